//! A program that has its sockets on all cores of a daemon.

mod two_hosts;

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use tidegate::{Arrived, Net, TcpListener, TcpStream, UdpSocket};
use two_hosts::FAMILIES;

const CORES: usize = 3;
const LIMIT: Duration = Duration::from_secs(20);

/// A client's host and a server's, with an address of the server's.
fn places() -> impl Iterator<Item = (two_hosts::Daemons, SocketAddr)> {
    let families = FAMILIES.into_iter();
    families.map(|[_, server]| {
        let daemons = two_hosts::daemons(1024, CORES);
        (daemons, SocketAddr::new(server.parse().unwrap(), 80))
    })
}

fn bind(net: &Net, local: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(net, local).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

fn any_port(like: SocketAddr) -> SocketAddr {
    let client = FAMILIES.map(|[client, _]| client)[usize::from(like.is_ipv6())];
    SocketAddr::new(client.parse().unwrap(), 0)
}

/// Connects to a listener, and says something both ways.
fn exchange(client: &Net, to: SocketAddr, accept: impl FnOnce() -> TcpStream) {
    let mut ours = TcpStream::connect(client, to).unwrap();
    ours.write_all(b"question").unwrap();
    let mut theirs = accept();
    for stream in [&ours, &theirs] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
    }
    let mut buf = [0; 8];
    theirs.read_exact(&mut buf).unwrap();
    theirs.write_all(&buf).unwrap();
    ours.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"question");
}

#[test]
fn what_comes_to_a_port_is_divided_among_all_cores() {
    for (daemons, to) in places() {
        let [client, server] = daemons.attach();
        let listener = TcpListener::bind(&server, to).unwrap();
        let datagrams = bind(&server, to);
        for _ in 0..50 {
            exchange(&client, to, || listener.accept().unwrap().0);
            let asks = bind(&client, any_port(to));
            asks.send_to(b"question", to).unwrap();
            let mut buf = [0; 10];
            assert_eq!(datagrams.peek_meta(&mut buf).unwrap().len, 8);
            let (len, from) = datagrams.recv_from(&mut buf).unwrap();
            assert_eq!((&buf[..len], from), (&b"question"[..], asks.local_addr().unwrap()));
            datagrams.send_to(b"answer", from).unwrap();
            assert_eq!(asks.recv_from(&mut buf).unwrap(), (6, to));
        }
        let report = daemons.report(1);
        let served: Vec<u64> = report.cores.iter().map(|core| core.received).collect();
        assert!(served.iter().all(|&frames| frames > 0), "{served:?}");
        assert_eq!(report.applications.len(), CORES);
    }
}

#[test]
fn nobody_else_gets_the_port_until_it_is_closed() {
    for (daemons, to) in places() {
        let [_, server] = daemons.attach();
        let other = daemons.attach()[1].clone();
        let listener = TcpListener::bind(&server, to).unwrap();
        let datagrams = UdpSocket::bind(&server, to).unwrap();
        for net in [&server, &other] {
            assert_eq!(TcpListener::bind(net, to).unwrap_err().kind(), ErrorKind::AddrInUse);
            assert_eq!(UdpSocket::bind(net, to).unwrap_err().kind(), ErrorKind::AddrInUse);
        }
        drop((listener, datagrams));
        for _ in 0..50 {
            drop(TcpListener::bind(&server, to).unwrap());
            drop(UdpSocket::bind(&server, to).unwrap());
        }
        let [_listener, _again] =
            [80, 81].map(|port| TcpListener::bind(&other, SocketAddr::new(to.ip(), port)).unwrap());
        UdpSocket::bind(&other, to).unwrap();
    }
}

#[test]
fn a_connected_socket_hears_its_peer_alone() {
    for (daemons, to) in places() {
        let [client, server] = daemons.attach();
        let datagrams = bind(&server, to);
        let asking = [0; 30].map(|_| bind(&client, any_port(to)));
        let [peer, strangers @ ..] = &asking;
        datagrams.connect(peer.local_addr().unwrap()).unwrap();
        for stranger in strangers {
            stranger.send_to(b"stranger", to).unwrap();
        }
        peer.send_to(b"peer", to).unwrap();
        let mut buf = [0; 10];
        let (len, from) = datagrams.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..len], from), (&b"peer"[..], peer.local_addr().unwrap()));
    }
}

#[test]
fn what_a_peer_has_sent_before_is_there_when_it_is_connected_to() {
    for (daemons, to) in places() {
        let [client, server] = daemons.attach();
        for _ in 0..20 {
            let datagrams = bind(&server, to);
            let peer = bind(&client, any_port(to));
            (0..3_u8).for_each(|n| _ = peer.send_to(&[n], to).unwrap());
            let mut buf = [0; 10];
            let (_, from) = datagrams.recv_from(&mut buf).unwrap();
            datagrams.connect(from).unwrap();
            for n in 1..3 {
                assert_eq!((datagrams.recv(&mut buf).unwrap(), buf[0]), (1, n));
            }
            datagrams.send(b"answer").unwrap();
            assert_eq!(peer.recv_from(&mut buf).unwrap(), (6, to));
            assert_eq!(datagrams.peer_addr().unwrap(), peer.local_addr().unwrap());
        }
    }
}

#[test]
fn what_is_for_all_comes_once() {
    let daemons = two_hosts::daemons(1024, CORES);
    let [client, server] = daemons.attach();
    let datagrams = bind(&server, "0.0.0.0:53".parse().unwrap());
    let to: SocketAddr = "192.0.2.2:53".parse().unwrap();
    for n in 0..20 {
        let asks = bind(&client, any_port(to));
        asks.send_to(&[n], "192.0.2.255:53").unwrap();
        asks.send_to(&[n, n], to).unwrap();
        let mut buf = [0; 10];
        // On their ways to two parts one may overtake the other.
        let mut lens = [0, 1].map(|_| datagrams.recv_from(&mut buf).unwrap().0);
        lens.sort_unstable();
        assert_eq!((lens, buf[0]), ([1, 2], n));
    }
}

#[test]
fn a_socket_is_handed_on_with_all_its_parts() {
    for (daemons, to) in places() {
        let [client, sender] = daemons.attach();
        let taker = daemons.attach()[1].clone();
        let listener = TcpListener::bind(&sender, to).unwrap();
        let datagrams = UdpSocket::bind(&sender, to).unwrap();
        let shown = [0, 1].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        sender.offer(&listener, shown[0].as_fd()).unwrap();
        sender.offer(&datagrams, shown[1].as_fd()).unwrap();
        // One that stays here after all.
        sender.offer(&datagrams, shown[1].as_fd()).unwrap();
        sender.withdraw(&datagrams, shown[1].as_fd()).unwrap();
        drop((listener, datagrams));
        let Ok(Some(Arrived::Listener(listener))) = taker.take(shown[0].as_fd()) else {
            panic!("it is no listener");
        };
        let Ok(Some(Arrived::Udp(datagrams))) = taker.take(shown[1].as_fd()) else {
            panic!("it is no socket for datagrams");
        };
        assert_eq!(taker.take(shown[0].as_fd()).unwrap_err().kind(), ErrorKind::NotConnected);
        drop(sender);
        datagrams.set_read_timeout(Some(LIMIT)).unwrap();
        for n in 0..50 {
            exchange(&client, to, || listener.accept().unwrap().0);
            let asks = bind(&client, any_port(to));
            asks.send_to(&[n], to).unwrap();
            let mut buf = [0; 10];
            let (len, _) = datagrams.recv_from(&mut buf).unwrap();
            assert_eq!(&buf[..len], [n]);
        }
    }
}

#[test]
fn connections_are_handed_on_beside_a_listener() {
    for (daemons, to) in places() {
        let [client, sender] = daemons.attach();
        let taker = daemons.attach()[1].clone();
        let listener = TcpListener::bind(&sender, to).unwrap();
        let shown = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.offer(&listener, shown.as_fd()).unwrap();
        drop(listener);
        let Ok(Some(Arrived::Listener(listener))) = taker.take(shown.as_fd()) else {
            panic!("it is no listener");
        };
        let own_port = SocketAddr::new(to.ip(), 81);
        let own = TcpListener::bind(&sender, own_port).unwrap();
        for _ in 0..50 {
            exchange(&client, to, || listener.accept().unwrap().0);
            exchange(&client, own_port, || {
                let (stream, _) = own.accept().unwrap();
                let shown = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                sender.offer(&stream, shown.as_fd()).unwrap();
                drop(stream);
                match taker.take(shown.as_fd()) {
                    Ok(Some(Arrived::Stream(stream))) => stream,
                    other => panic!("it is no connection: {other:?}"),
                }
            });
        }
    }
}
