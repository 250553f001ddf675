//! Sockets of an application that are sharded over all network cores of a daemon.

mod two_hosts;

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use tidegate::{Net, ReceivedSocket, TcpListener, TcpStream, UdpSocket};
use two_hosts::FAMILIES;

const CORES: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(20);

/// Daemons of a client's and a server's host, with an address of the server, in each family.
fn hosts_and_addresses() -> impl Iterator<Item = (two_hosts::Daemons, SocketAddr)> {
    let families = FAMILIES.into_iter();
    families.map(|[_, server]| {
        let daemons = two_hosts::daemons(1024, CORES);
        (daemons, SocketAddr::new(server.parse().unwrap(), 80))
    })
}

fn bind(net: &Net, local: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(net, local).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

fn any_port(like: SocketAddr) -> SocketAddr {
    let client = FAMILIES.map(|[client, _]| client)[usize::from(like.is_ipv6())];
    SocketAddr::new(client.parse().unwrap(), 0)
}

/// Connects to a listener and echoes a message.
fn exchange(client: &Net, to: SocketAddr, accept: impl FnOnce() -> TcpStream) {
    let mut client_stream = TcpStream::connect(client, to).unwrap();
    client_stream.write_all(b"question").unwrap();
    let mut server_stream = accept();
    for stream in [&client_stream, &server_stream] {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    }
    let mut buf = [0; 8];
    server_stream.read_exact(&mut buf).unwrap();
    server_stream.write_all(&buf).unwrap();
    client_stream.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"question");
}

#[test]
fn spreads_traffic_of_one_port_over_all_cores() {
    for (daemons, to) in hosts_and_addresses() {
        let [client, server] = daemons.attach();
        let listener = TcpListener::bind(&server, to).unwrap();
        let datagrams = bind(&server, to);
        for _ in 0..50 {
            exchange(&client, to, || listener.accept().unwrap().0);
            let client_socket = bind(&client, any_port(to));
            client_socket.send_to(b"question", to).unwrap();
            let mut buf = [0; 10];
            assert_eq!(datagrams.peek_meta(&mut buf).unwrap().len, 8);
            let (len, from) = datagrams.recv_from(&mut buf).unwrap();
            assert_eq!(
                (&buf[..len], from),
                (&b"question"[..], client_socket.local_addr().unwrap())
            );
            datagrams.send_to(b"answer", from).unwrap();
            assert_eq!(client_socket.recv_from(&mut buf).unwrap(), (6, to));
        }
        let report = daemons.report(1);
        let served: Vec<u64> = report.cores.iter().map(|core| core.received).collect();
        assert!(served.iter().all(|&frames| frames > 0), "{served:?}");
        assert_eq!(report.applications.len(), CORES);
    }
}

#[test]
fn port_is_exclusive_until_closed() {
    for (daemons, to) in hosts_and_addresses() {
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
fn connected_socket_receives_only_from_its_peer() {
    for (daemons, to) in hosts_and_addresses() {
        let [client, server] = daemons.attach();
        let datagrams = bind(&server, to);
        let clients = [0; 30].map(|_| bind(&client, any_port(to)));
        let [peer, others @ ..] = &clients;
        datagrams.connect(peer.local_addr().unwrap()).unwrap();
        for other in others {
            other.send_to(b"stranger", to).unwrap();
        }
        peer.send_to(b"peer", to).unwrap();
        let mut buf = [0; 10];
        let (len, from) = datagrams.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..len], from), (&b"peer"[..], peer.local_addr().unwrap()));
    }
}

#[test]
fn connect_keeps_queued_datagrams_of_the_peer() {
    for (daemons, to) in hosts_and_addresses() {
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
fn broadcast_is_delivered_once() {
    let daemons = two_hosts::daemons(1024, CORES);
    let [client, server] = daemons.attach();
    let datagrams = bind(&server, "0.0.0.0:53".parse().unwrap());
    let to: SocketAddr = "192.0.2.2:53".parse().unwrap();
    for n in 0..20 {
        let client_socket = bind(&client, any_port(to));
        client_socket.send_to(&[n], "192.0.2.255:53").unwrap();
        client_socket.send_to(&[n, n], to).unwrap();
        let mut buf = [0; 10];
        // The datagrams may overtake each other on their paths to two shards.
        let mut lens = [0, 1].map(|_| datagrams.recv_from(&mut buf).unwrap().0);
        lens.sort_unstable();
        assert_eq!((lens, buf[0]), ([1, 2], n));
    }
}

#[test]
fn transfers_socket_with_all_shards() {
    for (daemons, to) in hosts_and_addresses() {
        let [client, sender] = daemons.attach();
        let receiver = daemons.attach()[1].clone();
        let listener = TcpListener::bind(&sender, to).unwrap();
        let datagrams = UdpSocket::bind(&sender, to).unwrap();
        let kernel_sockets = [0, 1].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        sender.send_socket(&listener, kernel_sockets[0].as_fd()).unwrap();
        sender.send_socket(&datagrams, kernel_sockets[1].as_fd()).unwrap();
        // A transfer that is withdrawn.
        sender.send_socket(&datagrams, kernel_sockets[1].as_fd()).unwrap();
        sender.withdraw_socket(&datagrams, kernel_sockets[1].as_fd()).unwrap();
        drop((listener, datagrams));
        let Ok(Some(ReceivedSocket::Listener(listener))) =
            receiver.receive_socket(kernel_sockets[0].as_fd())
        else {
            panic!("expected a listener");
        };
        let Ok(Some(ReceivedSocket::Udp(datagrams))) =
            receiver.receive_socket(kernel_sockets[1].as_fd())
        else {
            panic!("expected a UDP socket");
        };
        assert_eq!(
            receiver.receive_socket(kernel_sockets[0].as_fd()).unwrap_err().kind(),
            ErrorKind::NotConnected
        );
        drop(sender);
        datagrams.set_read_timeout(Some(TIMEOUT)).unwrap();
        for n in 0..50 {
            exchange(&client, to, || listener.accept().unwrap().0);
            let client_socket = bind(&client, any_port(to));
            client_socket.send_to(&[n], to).unwrap();
            let mut buf = [0; 10];
            let (len, _) = datagrams.recv_from(&mut buf).unwrap();
            assert_eq!(&buf[..len], [n]);
        }
    }
}

#[test]
fn transfers_connections_and_listener() {
    for (daemons, to) in hosts_and_addresses() {
        let [client, sender] = daemons.attach();
        let receiver = daemons.attach()[1].clone();
        let listener = TcpListener::bind(&sender, to).unwrap();
        let kernel_socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.send_socket(&listener, kernel_socket.as_fd()).unwrap();
        drop(listener);
        let Ok(Some(ReceivedSocket::Listener(listener))) =
            receiver.receive_socket(kernel_socket.as_fd())
        else {
            panic!("expected a listener");
        };
        let own_port = SocketAddr::new(to.ip(), 81);
        let own = TcpListener::bind(&sender, own_port).unwrap();
        for _ in 0..50 {
            exchange(&client, to, || listener.accept().unwrap().0);
            exchange(&client, own_port, || {
                let (stream, _) = own.accept().unwrap();
                let kernel_socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                sender.send_socket(&stream, kernel_socket.as_fd()).unwrap();
                drop(stream);
                match receiver.receive_socket(kernel_socket.as_fd()) {
                    Ok(Some(ReceivedSocket::Stream(stream))) => stream,
                    other => panic!("expected a connection: {other:?}"),
                }
            });
        }
    }
}
