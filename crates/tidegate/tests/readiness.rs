//! What sockets are ready for, and waiting for them together with something
//! else, on a wire in memory.

mod two_hosts;

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use tidegate::{
    Interest, Net, Poll, Readiness, Ready, Sleeper, Source, TcpListener, TcpStream, Token, Trigger,
    UdpOptions, UdpSocket,
};
use two_hosts::FAMILIES;

const LIMIT: Duration = Duration::from_secs(20);

/// Waits for nothing of its own, and never long: the other host is run by the
/// same thread.
struct Other<'n>(&'n Net);

impl Sleeper for Other<'_> {
    fn sleep(&mut self, _: &[BorrowedFd<'_>], _: Option<Duration>) -> io::Result<bool> {
        self.0.run_once().map(|_| false)
    }
}

/// Has found something, or was interrupted, at once.
struct AtOnce(Option<io::ErrorKind>);

impl Sleeper for AtOnce {
    fn sleep(&mut self, _: &[BorrowedFd<'_>], _: Option<Duration>) -> io::Result<bool> {
        self.0.map_or(Ok(true), |kind| Err(kind.into()))
    }
}

/// Both hosts, run by this thread alone.
struct Hosts {
    a: Net,
    b: Net,
}

impl Hosts {
    /// Waits at host `b`, and runs `a`.
    fn wait(&self, source: &dyn Source, interest: Interest) {
        let waited = self.b.wait(&[(source, interest)], Some(LIMIT), &mut Other(&self.a));
        assert!(waited.unwrap(), "the time is over");
    }

    /// A connection from `a` to `b`.
    fn connect(&self, address: SocketAddr) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(&self.b, address).unwrap();
        let client = TcpStream::connect_nonblocking(&self.a, address, Default::default()).unwrap();
        self.wait(&listener, Interest::Readable);
        assert!(listener.readiness().readable);
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        client.set_nonblocking(true).unwrap();
        (client, server)
    }
}

fn everywhere(check: impl Fn(&Hosts, IpAddr, IpAddr)) {
    for [a, b] in FAMILIES {
        let [host_a, host_b] = two_hosts::open(1024, |config| config);
        check(&Hosts { a: host_a, b: host_b }, a.parse().unwrap(), b.parse().unwrap());
    }
}

fn found(poll: &Poll) -> Vec<(usize, Readiness)> {
    let mut found: Vec<Ready> = Vec::new();
    poll.collect(&mut found, 10);
    found.iter().map(|ready| (ready.token.0, ready.readiness)).collect()
}

#[test]
fn a_stream_tells_data_its_end_and_failure() {
    everywhere(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        let nothing = Readiness { writable: true, ..Readiness::default() };
        assert_eq!(server.readiness(), nothing);
        client.send(b"hello").unwrap();
        hosts.wait(&server, Interest::Readable);
        assert_eq!(server.readiness(), Readiness { readable: true, ..nothing });
        let mut buf = [0; 10];
        assert_eq!((server.peek(&mut buf[..2]).unwrap(), &buf[..2]), (2, &b"he"[..]));
        assert_eq!((server.recv(&mut buf).unwrap(), &buf[..5]), (5, &b"hello"[..]));
        assert_eq!(server.peek(&mut buf).unwrap_err().kind(), io::ErrorKind::WouldBlock);

        client.shutdown(Shutdown::Write).unwrap();
        hosts.wait(&server, Interest::Readable);
        let ended = Readiness { readable: true, read_closed: true, ..nothing };
        assert_eq!(server.readiness(), ended);
        assert_eq!(server.peek(&mut buf).unwrap(), 0);

        client.set_abrupt(true);
        drop(client);
        hosts.wait(&server, Interest::Neither);
        assert!(server.readiness().failed && server.readiness().write_closed);
        assert!(server.take_error().unwrap().is_some() && !server.readiness().failed);
    });
}

#[test]
fn a_set_reports_by_level_by_edge_and_once() {
    everywhere(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        client.set_nodelay(true).unwrap();
        let mut poll = Poll::new(&hosts.b);
        poll.register(&server, Token(5)).unwrap();
        assert!(found(&poll).is_empty());
        let send = || {
            client.send(b"x").unwrap();
            hosts.wait(&server, Interest::Readable);
            // What is readable already does not end that wait by itself.
            hosts.b.run_once().unwrap();
        };
        send();
        for _ in 0..2 {
            assert!(matches!(found(&poll)[..], [(5, Readiness { readable: true, .. })]));
        }
        poll.set_trigger(&server, Trigger::Edge).unwrap();
        assert_eq!(found(&poll).len(), 1, "it may be ready already");
        assert_eq!(found(&poll).len(), 0);
        send();
        assert_eq!(found(&poll).len(), 1);
        poll.set_trigger(&server, Trigger::OneShot).unwrap();
        assert_eq!(found(&poll).len(), 1);
        send();
        assert_eq!(found(&poll).len(), 0, "until it is registered again");
        poll.reregister(&server, Token(6), Interest::Both).unwrap();
        assert!(matches!(found(&poll)[..], [(6, _)]));
    });
}

#[test]
fn a_full_list_leaves_the_others_for_the_next() {
    everywhere(|hosts, _, b| {
        let mut poll = Poll::new(&hosts.b);
        let sockets: Vec<UdpSocket> =
            (0..5).map(|_| UdpSocket::bind(&hosts.b, (b, 0)).unwrap()).collect();
        for (number, socket) in sockets.iter().enumerate() {
            poll.register_for(socket, Token(number), Interest::Writable).unwrap();
        }
        let mut all: Vec<Ready> = Vec::new();
        for _ in 0..5 {
            poll.collect(&mut all, 1);
        }
        let mut tokens: Vec<usize> = all.iter().map(|ready| ready.token.0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4]);
    });
}

#[test]
fn the_sleeper_ends_a_wait() {
    everywhere(|hosts, _, b| {
        let socket = UdpSocket::bind(&hosts.b, (b, 7)).unwrap();
        let sources: [(&dyn Source, Interest); 1] = [(&socket, Interest::Readable)];
        let wait = |sleeper: &mut AtOnce| hosts.b.wait(&sources, Some(LIMIT), sleeper);
        assert!(wait(&mut AtOnce(None)).unwrap());
        let error = wait(&mut AtOnce(Some(io::ErrorKind::Interrupted))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        let nothing = hosts.b.wait(&sources, Some(Duration::ZERO), &mut Other(&hosts.a));
        assert!(!nothing.unwrap(), "the time is over");
    });
}

#[test]
fn datagrams_are_peeked_and_leave_from_a_chosen_address() {
    everywhere(|hosts, a, b| {
        let server = UdpSocket::bind_with(&hosts.b, (b, 7), UdpOptions::default()).unwrap();
        let client = UdpSocket::bind(&hosts.a, (a, 0)).unwrap();
        server.set_nonblocking(true).unwrap();
        client.send_from(b"hello", Some(SocketAddr::new(b, 7)), a).unwrap();
        hosts.wait(&server, Interest::Readable);
        for _ in 0..2 {
            let mut buf = [0; 3];
            let seen = server.peek_meta(&mut buf).unwrap();
            assert_eq!((seen.len, seen.truncated, seen.datagram_len), (3, true, 5));
            assert_eq!((&buf, seen.from.ip(), seen.to), (b"hel", a, b));
        }
        assert_eq!(server.recv(&mut [0; 10]).unwrap(), 5);
        assert_eq!(server.peek_meta(&mut []).unwrap_err().kind(), io::ErrorKind::WouldBlock);

        client.connect((b, 7)).unwrap();
        assert!(client.peer_addr().is_ok());
        client.disconnect().unwrap();
        assert!(client.peer_addr().is_err());
    });
}

#[test]
fn a_set_in_a_wait_and_the_way_to_a_peer() {
    everywhere(|hosts, a, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        let mut poll = Poll::new(&hosts.b);
        poll.register(&server, Token(1)).unwrap();
        assert!(!poll.readiness().readable);
        client.send(b"x").unwrap();
        hosts.wait(&poll, Interest::Readable);
        assert!(poll.readiness().readable);

        assert!(hosts.a.has_address(a) && !hosts.a.has_address(b));
        assert_eq!(hosts.a.source_for(b), Some(a));
        assert_eq!(hosts.a.source_for("198.51.100.1".parse().unwrap()), None);
    });
}

#[test]
fn what_is_deferred_leaves_with_the_last_call() {
    everywhere(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        client.set_nodelay(true).unwrap();
        let sent = || hosts.a.counters().port.transmitted;
        let before = sent();
        hosts.a.defer_transmit(2);
        client.send(b"a").unwrap();
        client.send(b"b").unwrap();
        assert_eq!(sent(), before);
        client.send(b"c").unwrap();
        assert_eq!(sent(), before + 3);
        hosts.wait(&server, Interest::Readable);
    });
}
