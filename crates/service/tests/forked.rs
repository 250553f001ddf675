//! Children that get the sockets of their parents.

mod support;

use std::io::ErrorKind;
use std::time::Instant;

use support::{FAMILIES, LIMIT, Site, address, connected, pair, places, until};
use tidegate_service::attachment::Attachment;
use tidegate_stack::TcpOptions;

/// Waits until so many are attached to the second daemon.
fn wait_until_attached(site: &Site, count: usize) {
    let began = Instant::now();
    while site.report(1).applications.len() != count {
        assert!(began.elapsed() < LIMIT, "{:?}", site.report(1).applications);
        std::thread::yield_now();
    }
}

#[test]
fn a_listener_serves_all_who_have_it_until_the_last_one_ends() {
    for (site, family) in places() {
        let (mut client, mut parent) = (site.attach(0), site.attach(1));
        let to = address(1, family, 80);
        let listener = parent.listen(to, 8, TcpOptions::default()).unwrap();
        let mut children = [parent.heir().unwrap(), parent.heir().unwrap()];
        let report = site.report(1);
        assert!(report.applications.iter().all(|app| app.sockets[0].holders == 3));
        let connect = |client: &mut Attachment| {
            let socket = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
            connected(client, socket).unwrap();
            socket
        };
        // Whoever is first gets it, and all are told.
        for n in 0..4 {
            connect(&mut client);
            let (first, other) = children.split_at_mut(1);
            let (first, other) = match n % 2 {
                0 => (&mut first[0], &mut other[0]),
                _ => (&mut other[0], &mut first[0]),
            };
            until(first, |app| match app.readiness(listener).readable {
                true => Ok(()),
                false => Err(ErrorKind::WouldBlock.into()),
            })
            .unwrap();
            let (accepted, _) = until(other, |app| app.accept(listener)).unwrap();
            assert_eq!(first.accept(listener).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(!first.readiness(listener).readable);
            other.close(accepted, false);
        }
        // The one who asked for it goes first, and a child closes it.
        drop(parent);
        wait_until_attached(&site, 2);
        let [mut one, mut other] = children;
        one.close(listener, false);
        one.ping().unwrap();
        connect(&mut client);
        until(&mut other, |app| app.accept(listener)).unwrap();
        // The places of what was inherited are free for others.
        let again = one.listen(address(1, family, 81), 8, TcpOptions::default()).unwrap();
        one.close(again, false);
        drop(other);
        wait_until_attached(&site, 1);
        let refused = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
        let error = connected(&mut client, refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        drop(one);
        wait_until_attached(&site, 0);
    }
}

#[test]
fn a_connection_is_handed_from_parent_to_child_and_on() {
    let byte = |n: u32| (n.wrapping_mul(0x9e37_79b9) >> 24) as u8;
    let data: Vec<u8> = (0..200_000).map(byte).collect();
    for (site, family) in places() {
        let mut apps = [site.attach(0), site.attach(1)];
        let [ours, theirs] = pair(&mut apps, address(1, family, 80));
        let [mut client, mut server] = apps;
        // Each of a line of heirs takes some and hands the rest on; some of it waits
        // in the streams meanwhile.
        let (mut sent, mut received, mut echoed) = (0, Vec::new(), Vec::new());
        let mut buf = vec![0; 7000];
        let began = Instant::now();
        while echoed.len() < data.len() {
            assert!(began.elapsed() < LIMIT, "{} came back", echoed.len());
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
            let mut heir = server.heir().unwrap();
            if received.len() % 2 == 0 {
                server.close(theirs, false);
            }
            std::mem::swap(&mut server, &mut heir);
        }
        assert!(received == data && echoed == data);
        // Nobody else has it any more: when this one closes it, it ends.
        until(&mut server, |server| server.send(theirs, b"last")).unwrap();
        let mut heir = server.heir().unwrap();
        heir.close(theirs, false);
        heir.ping().unwrap();
        let len = until(&mut client, |client| client.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"last");
        assert_eq!(client.recv(ours, &mut buf, false).unwrap_err().kind(), ErrorKind::WouldBlock);
        server.close(theirs, false);
        assert_eq!(until(&mut client, |client| client.recv(ours, &mut buf, false)).unwrap(), 0);
        drop((client, server, heir));
        wait_until_attached(&site, 0);
    }
}

#[test]
fn datagrams_go_to_whoever_reads_first() {
    for (site, family) in places() {
        let (mut client, mut parent) = (site.attach(0), site.attach(1));
        let to = address(1, family, 53);
        let ours = client.bind_udp(address(0, family, 0), Default::default()).unwrap();
        let from = client.local_addr(ours).unwrap();
        let theirs = parent.bind_udp(to, Default::default()).unwrap();
        let mut servers = vec![parent.heir().unwrap(), parent.heir().unwrap(), parent];
        let mut buf = [0; 100];
        for n in 0..100_u8 {
            client.send_datagram(ours, &[n; 50], Some(to), None).unwrap();
            let turn = usize::from(n) % servers.len();
            let server = &mut servers[turn];
            let got = until(server, |app| app.recv_datagram(theirs, &mut buf, false)).unwrap();
            assert_eq!((got.len, got.from, buf[0]), (50, from, n));
            server.send_datagram(theirs, &[n; 9], Some(from), None).unwrap();
            until(&mut client, |app| app.recv_datagram(ours, &mut buf, false)).unwrap();
            assert_eq!(buf[..9], [n; 9]);
            if n == 50 {
                // The one who asked for it.
                servers.pop();
                wait_until_attached(&site, 2);
            }
        }
        servers.clear();
        wait_until_attached(&site, 0);
        assert_eq!(site.report(1).frames_available, site.report(0).frames_available);
    }
}

#[test]
fn an_heir_that_never_lives_leaves_nothing_behind() {
    let site = Site::new();
    let mut apps = [site.attach(0), site.attach(1)];
    let [_, theirs] = pair(&mut apps, address(1, FAMILIES[0], 80));
    for _ in 0..100 {
        drop(apps[1].heir().unwrap());
    }
    wait_until_attached(&site, 1);
    let report = site.report(1);
    assert_eq!(report.applications[0].sockets.len(), 1);
    assert_eq!(report.applications[0].sockets[0].holders, 1);
    assert_eq!(apps[1].send(theirs, b"alone again").unwrap(), 11);
}
