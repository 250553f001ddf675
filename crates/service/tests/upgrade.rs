//! Upgrades: a daemon takes over from another while applications stay attached.

mod support;

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use support::upgrade::{
    DropPrivileges, UpgradeTestbed, bytes, custom, net, receive_some, send_rest, start,
};
use support::{TIMEOUT, address, wait_until, wait_until_connected};
use tidegate_device::{Device, mem};
use tidegate_engine::{DeviceConfig, NetConfig};
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{ConfigFactory, Daemon};
use tidegate_service::{Handle, Shard};
use tidegate_stack::{Shutdown, TcpOptions};

#[test]
fn sockets_survive_upgrade() {
    UpgradeTestbed::all().for_each(check_sockets_survive_upgrade);
}

fn check_sockets_survive_upgrade((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let mut peer = testbed.attach(0);
    let mut app = testbed.attach(1);
    // A UDP socket with unread datagrams.
    let udp = app.bind_udp(address(1, family, 7), Default::default()).unwrap();
    let from = peer.bind_udp(address(0, family, 0), Default::default()).unwrap();
    let own = peer.local_addr(from).unwrap();
    for n in 0..3 {
        peer.send_datagram(from, &[n; 100], Some(address(1, family, 7)), None).unwrap();
    }
    // A listener with a connection in its accept queue.
    let listener = app.listen(address(1, family, 80), 8, TcpOptions::default()).unwrap();
    let to = address(1, family, 80);
    let connect = |peer: &mut Attachment| {
        let socket = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
        wait_until_connected(peer, socket).unwrap();
        socket
    };
    let ours = connect(&mut peer);
    let (theirs, _) = wait_until(&mut app, |app| app.accept(listener)).unwrap();
    let waiting = connect(&mut peer);
    // A connection with more data in flight in each direction than all buffers hold.
    let data = bytes(4_000_000);
    let (mut sent, mut got) = ([0; 2], [Vec::new(), Vec::new()]);
    for _ in 0..100 {
        send_rest(&mut peer, ours, &data, &mut sent[0]);
        send_rest(&mut app, theirs, &data, &mut sent[1]);
        peer.poll().unwrap();
        app.poll().unwrap();
    }
    assert!(
        sent.iter().all(|&sent| sent < data.len()),
        "all data fitted into the buffers: {sent:?}"
    );
    let began = std::time::Instant::now();
    while got.iter().any(|got| got.len() < data.len()) {
        assert!(began.elapsed() < TIMEOUT, "{sent:?}");
        // Three upgrades during the transfer.
        if [0, 100_000, 250_000].iter().any(|at| (*at..at + 4096).contains(&got[1].len())) {
            testbed.upgrade();
        }
        send_rest(&mut peer, ours, &data, &mut sent[0]);
        send_rest(&mut app, theirs, &data, &mut sent[1]);
        receive_some(&mut peer, ours, &mut got[0]);
        receive_some(&mut app, theirs, &mut got[1]);
        peer.poll().unwrap();
        app.poll().unwrap();
    }
    assert!(got[0] == data && got[1] == data);
    let mut buf = [0; 200];
    for n in 0..3 {
        let came = wait_until(&mut app, |app| app.recv_datagram(udp, &mut buf, false)).unwrap();
        assert_eq!((came.len, came.from, buf[0]), (100, own, n));
    }
    app.send_datagram(udp, b"back", Some(own), None).unwrap();
    let came = wait_until(&mut peer, |peer| peer.recv_datagram(from, &mut buf, false)).unwrap();
    assert_eq!(&buf[..came.len], b"back");
    // The connection that waited in the accept queue, and a new connection.
    let late = connect(&mut peer);
    for socket in [waiting, late] {
        let (accepted, _) = wait_until(&mut app, |app| app.accept(listener)).unwrap();
        app.send(accepted, b"hello").unwrap();
        app.shutdown(accepted, Shutdown::Write).unwrap();
        testbed.upgrade();
        let len = wait_until(&mut peer, |peer| peer.recv(socket, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"hello");
        assert_eq!(wait_until(&mut peer, |peer| peer.recv(socket, &mut buf, false)).unwrap(), 0);
    }
    // Socket handles are still valid.
    let taken = app.bind_udp(address(1, family, 7), Default::default()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AddrInUse);
    app.close(udp, false);
    app.ping().unwrap();
    app.bind_udp(address(1, family, 7), Default::default()).unwrap();
    drop((peer, app));
    // The last daemon detects that the applications have exited, and frees their sockets.
    let began = std::time::Instant::now();
    for daemon in [&testbed.first, testbed.second.as_ref().unwrap()] {
        while !daemon.report().unwrap().applications.is_empty() {
            assert!(began.elapsed() < TIMEOUT);
            std::thread::yield_now();
        }
    }
}

#[test]
fn shared_port_survives_upgrade() {
    UpgradeTestbed::all().for_each(check_shared_port);
}

/// Applications on one port are gathered on one core for the upgrade, and spread afterwards.
fn check_shared_port((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let to = address(1, family, 80);
    let options = TcpOptions::default().reuse_port(true);
    let listen = |mut app: Attachment| {
        let listener = app.listen(to, 8, options).unwrap();
        (app, listener)
    };
    let mut servers: Vec<_> = (0..3).map(|_| listen(testbed.attach(1))).collect();
    let mut peer = testbed.attach(0);
    let mut open: Vec<(Handle, usize, Handle)> = Vec::new();
    let mut buf = [0; 16];
    for round in 0..6_u8 {
        let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
        wait_until_connected(&mut peer, ours).unwrap();
        let began = std::time::Instant::now();
        let (at, theirs) = loop {
            let accept = |(at, (app, listener)): (usize, &mut (Attachment, Handle))| {
                Some((at, app.accept(*listener).ok()?.0))
            };
            if let Some(accepted) = servers.iter_mut().enumerate().find_map(accept) {
                break accepted;
            }
            assert!(began.elapsed() < TIMEOUT, "no server accepted the connection");
        };
        open.push((ours, at, theirs));
        for &(ours, at, theirs) in &open {
            peer.send(ours, &[round]).unwrap();
            let app = &mut servers[at].0;
            assert_eq!(wait_until(app, |app| app.recv(theirs, &mut buf, false)).unwrap(), 1);
            assert_eq!(buf[0], round);
        }
        testbed.upgrade();
        testbed.scatter_applications();
    }
}

#[test]
fn closed_connection_is_flushed_after_upgrade() {
    UpgradeTestbed::all().for_each(check_closed_connection);
}

fn check_closed_connection((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let (mut peer, mut app) = (testbed.attach(0), testbed.attach(1));
    let to = address(0, family, 80);
    let listener = peer.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = app.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = wait_until(&mut peer, |peer| peer.accept(listener)).unwrap();
    wait_until_connected(&mut app, ours).unwrap();
    let data = bytes(300_000);
    let mut sent = 0;
    for _ in 0..100 {
        send_rest(&mut app, ours, &data, &mut sent);
        app.poll().unwrap();
    }
    app.close(ours, false);
    testbed.upgrade();
    let mut got = Vec::new();
    let mut buf = [0; 4096];
    loop {
        match wait_until(&mut peer, |peer| peer.recv(theirs, &mut buf, false)).unwrap() {
            0 => break,
            len => got.extend_from_slice(&buf[..len]),
        }
    }
    assert!(got == data[..sent], "{} of {sent}", got.len());
}

#[test]
fn fork_children_keep_sockets_across_upgrade() {
    UpgradeTestbed::all().for_each(check_fork_children);
}

fn check_fork_children((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let (mut peer, mut parent) = (testbed.attach(0), testbed.attach(1));
    let to = address(1, family, 80);
    let listener = parent.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = wait_until(&mut parent, |app| app.accept(listener)).unwrap();
    let mut child = parent.fork_child().unwrap();
    testbed.upgrade();
    // The takeover token is valid under the next daemon, too.
    let mut second = child.fork_child().unwrap();
    drop(parent);
    testbed.upgrade();
    let mut buf = [0; 16];
    for app in [&mut child, &mut second] {
        peer.send(ours, b"who").unwrap();
        let len = wait_until(app, |app| app.recv(theirs, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"who");
        app.send(theirs, b"me").unwrap();
        let len = wait_until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"me");
    }
    drop(child);
    testbed.upgrade();
    second.close(theirs, false);
    assert_eq!(wait_until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap(), 0);
}

#[test]
fn socket_in_transit_survives_upgrade() {
    UpgradeTestbed::all().for_each(check_socket_in_transit);
}

fn check_socket_in_transit((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let (mut peer, mut sender, mut receiver) =
        (testbed.attach(0), testbed.attach(1), testbed.attach(1));
    let to = address(1, family, 80);
    let listener = sender.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = wait_until(&mut sender, |app| app.accept(listener)).unwrap();
    // The receiver gets the socket under a different handle.
    let own = receiver.listen(address(1, family, 81), 8, TcpOptions::default()).unwrap();
    let fd = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    sender.send_socket(theirs, Shard::ONLY, fd.as_fd()).unwrap();
    sender.close(theirs, false);
    testbed.upgrade();
    let received = receiver.receive_socket(0, fd.as_fd()).unwrap().socket;
    assert_ne!(received, own);
    testbed.upgrade();
    drop(sender);
    peer.send(ours, b"who").unwrap();
    let mut buf = [0; 16];
    let len = wait_until(&mut receiver, |app| app.recv(received, &mut buf, false)).unwrap();
    assert_eq!(&buf[..len], b"who");
    receiver.close(received, false);
    assert_eq!(wait_until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap(), 0);
}

#[test]
fn pending_requests_are_answered_across_upgrade() {
    UpgradeTestbed::all().for_each(check_pending_requests);
}

fn check_pending_requests((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let mut owner = testbed.attach(1);
    let port = address(1, family, 53);
    owner.bind_udp(port, Default::default()).unwrap();
    let mut others = [testbed.attach(1), testbed.attach(1)];
    let is_finished = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for app in &mut others {
            scope.spawn(move || {
                while !is_finished.load(Ordering::Relaxed) {
                    // Another core holds the port, if there are several.
                    let taken = app.bind_udp(port, Default::default()).unwrap_err();
                    assert_eq!(taken.kind(), ErrorKind::AddrInUse);
                }
            });
        }
        let _stop = StopOnDrop(is_finished);
        (0..8).for_each(|_| testbed.upgrade());
    });
}

/// Stops the waiting threads, however the test ends.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn failed_upgrade_changes_nothing() {
    UpgradeTestbed::all().for_each(check_failed_upgrades);
}

fn check_failed_upgrades((mut testbed, family): (UpgradeTestbed, [&str; 2])) {
    let (mut peer, mut app) = (testbed.attach(0), testbed.attach(1));
    let to = address(1, family, 80);
    let listener = app.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = wait_until(&mut app, |app| app.accept(listener)).unwrap();
    wait_until_connected(&mut peer, ours).unwrap();
    let no_device = DeviceConfig::Custom(Box::new(|_| Err(io::Error::other("no such device"))));
    let other_address = {
        let shared_device = testbed.shared_device.clone();
        let device = DeviceConfig::Custom(Box::new(move |_| {
            Ok(Box::new(shared_device.acquire()) as Box<dyn Device>)
        }));
        NetConfig::new(device).address("198.51.100.1/24".parse().unwrap())
    };
    let late: DropPrivileges = || Err(io::Error::other("too late"));
    let failures: [(NetConfig, DropPrivileges, &str); 3] = [
        (net(no_device, 1), || Ok(()), "no such device"),
        (other_address, || Ok(()), "cannot restore the state"),
        (custom(&testbed.shared_device), late, "too late"),
    ];
    for (net, drop_privileges, expected) in failures {
        testbed.scatter_applications();
        let message = testbed.start_next(net, drop_privileges).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        let mut buf = [0; 16];
        peer.send(ours, b"still").unwrap();
        let len = wait_until(&mut app, |app| app.recv(theirs, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"still");
        app.send(theirs, b"here").unwrap();
        let len = wait_until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"here");
        // New applications are served, too.
        let mut late = testbed.attach(1);
        late.bind_udp(address(1, family, 9), Default::default()).unwrap();
    }
}

#[test]
fn refuses_upgrade_when_not_supported() {
    let testbed = support::DaemonPair::new();
    let (device, _other) = mem::wire(&mem::MemConfig::default()).unwrap();
    let config_factory: ConfigFactory = Box::new(|| Err(ErrorKind::Unsupported.into()));
    let taken =
        Daemon::take_over(net(device, 1), start(&testbed.paths[1], 1, config_factory, || Ok(())));
    let message = taken.map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("does not support upgrades"), "{message}");
    testbed.attach(1).ping().unwrap();
}
