//! Fork children that inherit the sockets of their parents.

mod support;

use std::io::ErrorKind;
use std::time::Instant;

use support::{
    DaemonPair, FAMILIES, TIMEOUT, address, connection_pair, testbeds, wait_until,
    wait_until_connected,
};
use tidegate_service::attachment::Attachment;
use tidegate_stack::TcpOptions;

/// Waits until `count` applications are attached to the second daemon.
fn wait_until_attached(testbed: &DaemonPair, count: usize) {
    let began = Instant::now();
    while testbed.report(1).applications.len() != count {
        assert!(began.elapsed() < TIMEOUT, "{:?}", testbed.report(1).applications);
        std::thread::yield_now();
    }
}

#[test]
fn inherited_listener_lives_until_last_holder_exits() {
    for (testbed, family) in testbeds() {
        let (mut client, mut parent) = (testbed.attach(0), testbed.attach(1));
        let to = address(1, family, 80);
        let listener = parent.listen(to, 8, TcpOptions::default()).unwrap();
        let mut children = [parent.fork_child().unwrap(), parent.fork_child().unwrap()];
        let report = testbed.report(1);
        assert!(report.applications.iter().all(|app| app.sockets[0].holders == 3));
        let connect = |client: &mut Attachment| {
            let socket = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
            wait_until_connected(client, socket).unwrap();
            socket
        };
        // Every holder is notified, and the first to accept gets the connection.
        for n in 0..4 {
            connect(&mut client);
            let (first, other) = children.split_at_mut(1);
            let (first, other) = match n % 2 {
                0 => (&mut first[0], &mut other[0]),
                _ => (&mut other[0], &mut first[0]),
            };
            wait_until(first, |app| match app.readiness(listener).readable {
                true => Ok(()),
                false => Err(ErrorKind::WouldBlock.into()),
            })
            .unwrap();
            let (accepted, _) = wait_until(other, |app| app.accept(listener)).unwrap();
            assert_eq!(first.accept(listener).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(!first.readiness(listener).readable);
            other.close(accepted, false);
        }
        // The process that opened the listener exits first, and a child closes it.
        drop(parent);
        wait_until_attached(&testbed, 2);
        let [mut one, mut other] = children;
        one.close(listener, false);
        one.ping().unwrap();
        connect(&mut client);
        wait_until(&mut other, |app| app.accept(listener)).unwrap();
        // The slot of a closed inherited socket is free again.
        let again = one.listen(address(1, family, 81), 8, TcpOptions::default()).unwrap();
        one.close(again, false);
        drop(other);
        wait_until_attached(&testbed, 1);
        let refused = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
        let error = wait_until_connected(&mut client, refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        drop(one);
        wait_until_attached(&testbed, 0);
    }
}

#[test]
fn connection_passes_through_fork_children_intact() {
    let byte = |n: u32| (n.wrapping_mul(0x9e37_79b9) >> 24) as u8;
    let data: Vec<u8> = (0..200_000).map(byte).collect();
    for (testbed, family) in testbeds() {
        let mut apps = [testbed.attach(0), testbed.attach(1)];
        let [ours, theirs] = connection_pair(&mut apps, address(1, family, 80));
        let [mut client, mut server] = apps;
        // Each process of a chain of forks echoes some data and passes the connection on. Some
        // data waits in the streams meanwhile.
        let (mut sent, mut received, mut echoed) = (0, Vec::new(), Vec::new());
        let mut buf = vec![0; 7000];
        let began = Instant::now();
        while echoed.len() < data.len() {
            assert!(began.elapsed() < TIMEOUT, "{} bytes were echoed", echoed.len());
            match client.send(ours, &data[sent..]) {
                Ok(len) => sent += len,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            match client.recv(ours, &mut buf, false) {
                Ok(len) => echoed.extend_from_slice(&buf[..len]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            client.poll().unwrap();
            let got = match server.recv(theirs, &mut buf, false) {
                Ok(len) => len,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    server.poll().unwrap();
                    continue;
                }
            };
            let mut rest = &buf[..got];
            received.extend_from_slice(rest);
            while !rest.is_empty() {
                match server.send(theirs, rest) {
                    Ok(len) => rest = &rest[len..],
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
                let mut back = [0; 4096];
                if let Ok(len) = client.recv(ours, &mut back, false) {
                    echoed.extend_from_slice(&back[..len]);
                }
            }
            let mut child = server.fork_child().unwrap();
            if received.len() % 2 == 0 {
                server.close(theirs, false);
            }
            std::mem::swap(&mut server, &mut child);
        }
        assert!(received == data && echoed == data);
        // No other holder is left: when this process closes the connection, it ends.
        wait_until(&mut server, |server| server.send(theirs, b"last")).unwrap();
        let mut child = server.fork_child().unwrap();
        child.close(theirs, false);
        child.ping().unwrap();
        let len = wait_until(&mut client, |client| client.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"last");
        assert_eq!(client.recv(ours, &mut buf, false).unwrap_err().kind(), ErrorKind::WouldBlock);
        server.close(theirs, false);
        assert_eq!(
            wait_until(&mut client, |client| client.recv(ours, &mut buf, false)).unwrap(),
            0
        );
        drop((client, server, child));
        wait_until_attached(&testbed, 0);
    }
}

#[test]
fn any_holder_receives_datagrams() {
    for (testbed, family) in testbeds() {
        let (mut client, mut parent) = (testbed.attach(0), testbed.attach(1));
        let to = address(1, family, 53);
        let ours = client.bind_udp(address(0, family, 0), Default::default()).unwrap();
        let from = client.local_addr(ours).unwrap();
        let theirs = parent.bind_udp(to, Default::default()).unwrap();
        let mut servers = vec![parent.fork_child().unwrap(), parent.fork_child().unwrap(), parent];
        let mut buf = [0; 100];
        for n in 0..100_u8 {
            client.send_datagram(ours, &[n; 50], Some(to), None).unwrap();
            let index = usize::from(n) % servers.len();
            let server = &mut servers[index];
            let got = wait_until(server, |app| app.recv_datagram(theirs, &mut buf, false)).unwrap();
            assert_eq!((got.len, got.from, buf[0]), (50, from, n));
            server.send_datagram(theirs, &[n; 9], Some(from), None).unwrap();
            wait_until(&mut client, |app| app.recv_datagram(ours, &mut buf, false)).unwrap();
            assert_eq!(buf[..9], [n; 9]);
            if n == 50 {
                // Removes the process that opened the socket.
                servers.pop();
                wait_until_attached(&testbed, 2);
            }
        }
        servers.clear();
        wait_until_attached(&testbed, 0);
        assert_eq!(testbed.report(1).frames_available, testbed.report(0).frames_available);
    }
}

#[test]
fn dropped_fork_child_leaves_no_state() {
    let testbed = DaemonPair::new();
    let mut apps = [testbed.attach(0), testbed.attach(1)];
    let [_, theirs] = connection_pair(&mut apps, address(1, FAMILIES[0], 80));
    for _ in 0..100 {
        drop(apps[1].fork_child().unwrap());
    }
    wait_until_attached(&testbed, 1);
    let report = testbed.report(1);
    assert_eq!(report.applications[0].sockets.len(), 1);
    assert_eq!(report.applications[0].sockets[0].holders, 1);
    assert_eq!(apps[1].send(theirs, b"alone again").unwrap(), 11);
}
