//! Two daemons on one in-memory link, with applications on both.

mod support;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Instant;

use support::{
    CORES, DaemonPair, FAMILIES, TIMEOUT, address, connection_pair, testbeds, wait_until,
    wait_until_connected,
};
use tidegate_service::Handle;
use tidegate_service::attachment::Attachment;
use tidegate_stack::{Shutdown, TcpOptions};

#[test]
fn datagrams_of_every_length_go_both_ways() {
    for (testbed, family) in testbeds() {
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let to = address(1, family, 7);
        let server = apps[1].bind_udp(to, Default::default()).unwrap();
        let client = apps[0].bind_udp(address(0, family, 0), Default::default()).unwrap();
        let from = apps[0].local_addr(client).unwrap();
        assert_ne!(from.port(), 0);
        let (mut buf, mut answer) = (vec![0; 65_536], vec![0; 65_536]);
        let lengths = [0, 1, 7, 8, 9, 1000, 1472, 1473, 9000, 65_507];
        // Fragments that arrive while their application migrates can meet on no core.
        let is_sent_whole = |len| len <= 1000 || !testbed.migrates();
        for len in lengths.into_iter().filter(|&len| is_sent_whole(len)) {
            let payload: Vec<u8> = (0..len).map(|n| n as u8).collect();
            apps[0].send_datagram(client, &payload, Some(to), None).unwrap();
            let got =
                wait_until(&mut apps[1], |app| app.recv_datagram(server, &mut buf, true)).unwrap();
            assert_eq!((got.len, got.full_len, got.from, got.to), (len, len, from, to.ip()));
            let short = apps[1].recv_datagram(server, &mut answer[..len / 2], false).unwrap();
            assert_eq!((short.len, short.full_len), (len / 2, len));
            assert_eq!(buf[..len], payload);
            let again = apps[1].recv_datagram(server, &mut answer, false).unwrap_err();
            assert_eq!(again.kind(), ErrorKind::WouldBlock);
            apps[1].send_datagram(server, &buf[..len], Some(from), None).unwrap();
            let got = wait_until(&mut apps[0], |app| app.recv_datagram(client, &mut answer, false))
                .unwrap();
            assert_eq!((got.len, got.from), (len, to));
            assert_eq!(answer[..len], payload);
        }
    }
}

#[test]
fn idle_core_wakes_application_with_many_peers_at_once() {
    for family in FAMILIES {
        let testbed = DaemonPair::with_coalescing(60 * TIMEOUT);
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let client = apps[0].bind_udp(address(0, family, 0), Default::default()).unwrap();
        let mut bind = |to| (apps[1].bind_udp(to, Default::default()).unwrap(), to);
        let servers: Vec<_> = (7..15).map(|port| bind(address(1, family, port))).collect();
        for (server, to) in servers {
            apps[0].send_datagram(client, b"x", Some(to), None).unwrap();
            let mut buf = [0; 8];
            wait_until(&mut apps[1], |app| app.recv_datagram(server, &mut buf, false)).unwrap();
        }
    }
}

#[test]
fn reports_datagram_errors() {
    for (testbed, family) in testbeds() {
        let mut app = testbed.attach(0);
        let client = app.bind_udp(address(0, family, 0), Default::default()).unwrap();
        let unsent = app.send_datagram(client, b"x", None, None).unwrap_err();
        assert_eq!(unsent.kind(), ErrorKind::NotConnected);
        app.connect_udp(client, Some(address(1, family, 9))).unwrap();
        app.send_datagram(client, b"nobody is there", None, None).unwrap();
        let refused = wait_until(&mut app, |app| app.recv_datagram(client, &mut [0; 8], false));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let own = app.local_addr(client).unwrap();
        let taken = app.bind_udp(own, Default::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse);
        let foreign = app.bind_udp(address(1, family, 0), Default::default()).unwrap_err();
        assert_eq!(foreign.kind(), ErrorKind::AddrNotAvailable);
        app.close(client, false);
    }
}

/// Sends `data` in one direction, and asserts that it arrives intact.
fn send_all(apps: &mut [Attachment; 2], sockets: [Handle; 2], from: usize, data: &[u8]) {
    let to = 1 - from;
    let (mut sent, mut received) = (0, Vec::new());
    let began = Instant::now();
    let mut buf = vec![0; 10_000];
    while received.len() < data.len() {
        assert!(began.elapsed() < TIMEOUT, "{} of {} arrived", received.len(), data.len());
        match apps[from].send(sockets[from], &data[sent..]) {
            Ok(len) => sent += len,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        match apps[to].recv(sockets[to], &mut buf, false) {
            Ok(len) => received.extend_from_slice(&buf[..len]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        apps.iter_mut().for_each(|app| {
            app.poll().unwrap();
        });
    }
    assert!(received == data);
}

#[test]
fn streams_deliver_in_order_and_close() {
    let byte = |n: u32| (n.wrapping_mul(0x9e37_79b9) >> 24) as u8;
    let data: Vec<u8> = (0..1_000_000).map(byte).collect();
    for (testbed, family) in testbeds() {
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let sockets = connection_pair(&mut apps, address(1, family, 80));
        send_all(&mut apps, sockets, 0, &data);
        send_all(&mut apps, sockets, 1, &data[..100_000]);
        let [ours, theirs] = sockets;
        // Half-closed: the other direction still works, and pending data arrives first.
        apps[0].send(ours, b"last").unwrap();
        apps[0].shutdown(ours, Shutdown::Write).unwrap();
        assert_eq!(apps[0].send(ours, b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        let mut buf = [0; 10];
        let len = wait_until(&mut apps[1], |app| app.recv(theirs, &mut buf, true)).unwrap();
        assert_eq!(&buf[..len], b"last");
        assert_eq!(apps[1].recv(theirs, &mut buf, false).unwrap(), 4);
        assert_eq!(wait_until(&mut apps[1], |app| app.recv(theirs, &mut buf, false)).unwrap(), 0);
        apps[1].send(theirs, b"reply").unwrap();
        let len = wait_until(&mut apps[0], |app| app.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"reply");
        // Closed with data that is still to be sent.
        apps[1].send(theirs, b"bye").unwrap();
        apps[1].close(theirs, false);
        let len = wait_until(&mut apps[0], |app| app.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"bye");
        assert_eq!(wait_until(&mut apps[0], |app| app.recv(ours, &mut buf, false)).unwrap(), 0);
        apps[0].close(ours, false);
    }
}

#[test]
fn space_for_sending_is_a_change_without_news() {
    for family in FAMILIES {
        let testbed = DaemonPair::new();
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let [ours, theirs] = connection_pair(&mut apps, address(1, family, 80));
        let [client, server] = &mut apps;
        let mut buf = vec![0; 65_536];
        let (mut sent, mut received, mut changes) = (0, 0, Vec::new());
        let began = Instant::now();
        while sent < 4 << 20 || received < sent {
            assert!(began.elapsed() < TIMEOUT, "{received} of {sent} arrived");
            if sent < 4 << 20 {
                sent += client.send(ours, &buf).unwrap_or(0);
            }
            // Asks for a notification of space if there is none.
            client.readiness(ours);
            received += server.recv(theirs, &mut buf, false).unwrap_or(0);
            server.poll().unwrap();
            client.poll().unwrap();
            changes.extend(std::iter::from_fn(|| client.next_changed()));
        }
        assert!(changes.len() > 2, "never without space");
        // The first reports how the connection began.
        assert!(changes[1..].iter().all(|changed| !changed.has_news));
        server.send(theirs, b"x").unwrap();
        while !client.next_changed().is_some_and(|changed| changed.has_news) {
            assert!(began.elapsed() < TIMEOUT, "a byte is no news");
            client.sleep(TIMEOUT).unwrap();
        }
    }
}

#[test]
fn connect_without_listener_is_refused() {
    for (testbed, family) in testbeds() {
        let mut app = testbed.attach(0);
        let socket = app.connect_tcp(None, address(1, family, 9), TcpOptions::default()).unwrap();
        let error = wait_until_connected(&mut app, socket).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }
}

#[test]
fn socket_slots_are_limited_and_reused() {
    let testbed = DaemonPair::new();
    let mut app = testbed.attach(0);
    let bind = |app: &mut Attachment, n: u16| {
        app.bind_udp(address(0, FAMILIES[0], 1000 + n), Default::default())
    };
    for round in 0..3 {
        let sockets: Vec<Handle> = (0..16).map(|n| bind(&mut app, n).unwrap()).collect();
        let error = bind(&mut app, 16).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::QuotaExceeded, "round {round}");
        assert_eq!(testbed.report(0).applications[0].sockets.len(), 16);
        sockets.into_iter().for_each(|socket| app.close(socket, false));
    }
}

/// Waits until a report meets the condition.
fn wait_for_report(
    testbed: &DaemonPair,
    side: usize,
    condition: impl Fn(&tidegate_service::daemon::DaemonReport) -> bool,
) {
    let began = Instant::now();
    while !condition(&testbed.report(side)) {
        assert!(began.elapsed() < TIMEOUT, "{:?}", testbed.report(side));
        std::thread::yield_now();
    }
}

#[test]
fn application_exit_frees_resources_and_resets_connections() {
    for (testbed, family) in testbeds() {
        let frames = testbed.report(1).frames_available;
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let [ours, _theirs] = connection_pair(&mut apps, address(1, family, 80));
        let udp = apps[1].bind_udp(address(1, family, 53), Default::default()).unwrap();
        for _ in 0..100 {
            let to = Some(address(1, family, 53));
            let from = apps[0].bind_udp(address(0, family, 0), Default::default()).unwrap();
            apps[0].send_datagram(from, &[0; 1000], to, None).unwrap();
            apps[0].close(from, false);
        }
        wait_until(&mut apps[1], |app| app.recv_datagram(udp, &mut [0; 8], true)).unwrap();
        let [mut client, server] = apps;
        drop(server);
        let error = wait_until(&mut client, |app| app.recv(ours, &mut [0; 8], false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        wait_for_report(&testbed, 1, |report| {
            report.applications.is_empty()
                && report.frames_available == frames
                && report.connections == 0
        });
    }
}

#[test]
fn port_of_exited_application_is_free_at_once() {
    let testbed = DaemonPair::new();
    for family in FAMILIES {
        // A busy application: the daemon does not check for exited applications all the time.
        let mut busy = testbed.attach(1);
        for _ in 0..200 {
            let mut server = testbed.attach(1);
            server.listen(address(1, family, 80), 8, TcpOptions::default()).unwrap();
            server.bind_udp(address(1, family, 80), Default::default()).unwrap();
            let other = busy.bind_udp(address(1, family, 0), Default::default()).unwrap();
            busy.close(other, false);
            drop(server);
        }
    }
}

#[test]
fn daemon_exit_is_reported_as_error() {
    let testbed = DaemonPair::new();
    let mut app = testbed.attach(1);
    let socket = app.bind_udp(address(1, FAMILIES[0], 53), Default::default()).unwrap();
    let DaemonPair { daemons, paths, _folder, .. } = testbed;
    drop(daemons);
    let error =
        wait_until(&mut app, |app| app.recv_datagram(socket, &mut [0; 8], false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
    let error = app.bind_udp(address(1, FAMILIES[0], 54), Default::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
    let error = Attachment::connect(Path::new(&paths[1]), "late").unwrap_err();
    assert!(error.to_string().contains("tidegate daemon"), "{error}");
}

#[test]
fn port_of_exited_application_is_free_on_every_core() {
    let testbed = DaemonPair::with_cores(CORES..=CORES);
    let mut client = testbed.attach(0);
    for family in FAMILIES {
        let to = address(1, family, 80);
        let mut app = testbed.attach(1);
        let mut cores = BTreeSet::new();
        for round in 0..20 {
            let listener = app.listen(to, 8, TcpOptions::default()).unwrap();
            app.bind_udp(to, Default::default()).unwrap();
            let ours = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
            let (theirs, _) = wait_until(&mut app, |app| app.accept(listener)).unwrap();
            wait_until_connected(&mut client, ours).unwrap();
            if round % 2 == 0 {
                // Closed on both sides: the connection stays in TIME-WAIT on its core.
                app.close(theirs, false);
                let mut end = [0; 1];
                let read = wait_until(&mut client, |client| client.recv(ours, &mut end, false));
                assert_eq!(read.unwrap(), 0);
            }
            client.close(ours, false);
            client.ping().unwrap();
            // The next application is on another core.
            let next = testbed.attach(1);
            wait_for_report(&testbed, 1, |report| report.applications.len() == 2);
            cores.extend(testbed.report(1).applications.iter().map(|app| app.core));
            drop(std::mem::replace(&mut app, next));
        }
        assert!(cores.len() > 1);
    }
}

#[test]
fn applications_are_spread_over_cores_and_ports_are_exclusive() {
    let testbed = DaemonPair::with_cores(CORES..=CORES);
    for family in FAMILIES {
        let attach = |name| Attachment::connect(&testbed.paths[1], name).unwrap();
        let (mut a, mut b, mut c) = (attach("a"), attach("b"), attach("c"));
        // The core may not have received a welcomed application yet.
        wait_for_report(&testbed, 1, |report| report.applications.len() == CORES);
        let cores: BTreeSet<_> =
            testbed.report(1).applications.iter().map(|app| app.core).collect();
        assert_eq!(cores.len(), CORES, "each has a core of its own");
        let port = address(1, family, 53);
        let first = a.bind_udp(port, Default::default()).unwrap();
        let listener = b.listen(port, 1, TcpOptions::default()).unwrap();
        let taken = b.bind_udp(port, Default::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse);
        let taken = c.listen(port, 1, TcpOptions::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse);
        a.close(first, false);
        a.ping().unwrap();
        let again = c.bind_udp(port, Default::default()).unwrap();
        // All three belong to the same process.
        testbed.daemons[1].controls().move_application(std::process::id(), 0).unwrap();
        wait_for_report(&testbed, 1, |report| report.applications.iter().all(|app| app.core == 0));
        let taken = a.bind_udp(port, Default::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse);
        let mut client = testbed.attach(0);
        let socket = client.connect_tcp(None, port, TcpOptions::default()).unwrap();
        wait_until(&mut b, |app| app.accept(listener)).unwrap();
        wait_until_connected(&mut client, socket).unwrap();
        c.close(again, false);
        drop((a, b, c));
        wait_for_report(&testbed, 1, |report| report.applications.is_empty());
    }
}
