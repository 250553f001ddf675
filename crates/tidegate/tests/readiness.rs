//! Readiness of sockets, and waiting for sockets together with other events, on an in-memory
//! link.

mod two_hosts;

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use tidegate::{
    Interest, Net, Poll, Readiness, Ready, Sleeper, Source, TcpListener, TcpStream, Token, Trigger,
    UdpOptions, UdpSocket,
};
use two_hosts::FAMILIES;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Sleeper that waits for nothing and returns at once, after it has run the other host on the
/// same thread.
struct OtherHost<'n>(&'n Net);

impl Sleeper for OtherHost<'_> {
    fn sleep(&mut self, _: &[BorrowedFd<'_>], _: Option<Duration>) -> io::Result<bool> {
        self.0.run_once().map(|_| false)
    }
}

/// Sleeper that has no events of its own.
struct WakeOnly;

impl Sleeper for WakeOnly {
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
        let mut fds: Vec<_> =
            wake.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = timeout.map(|timeout| timeout.try_into().unwrap());
        rustix::event::poll(&mut fds, timeout.as_ref())?;
        Ok(false)
    }
}

/// Sleeper that reports an event, or fails with the given error kind, at once.
struct ImmediateSleeper(Option<io::ErrorKind>);

impl Sleeper for ImmediateSleeper {
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
    /// Waits at host `b`, while it runs `a`.
    fn wait(&self, source: &dyn Source, interest: Interest) {
        let waited = self.b.wait(&[(source, interest)], Some(TIMEOUT), &mut OtherHost(&self.a));
        assert!(waited.unwrap(), "timed out");
    }

    /// Connects `a` to `b`; returns the client's and the server's stream.
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

fn for_each_family(check: impl Fn(&Hosts, IpAddr, IpAddr)) {
    for [a, b] in FAMILIES {
        let [host_a, host_b] = two_hosts::open(1024, |config| config);
        check(&Hosts { a: host_a, b: host_b }, a.parse().unwrap(), b.parse().unwrap());
    }
}

fn collect_ready(poll: &Poll) -> Vec<(usize, Readiness)> {
    let mut found: Vec<Ready> = Vec::new();
    poll.collect_ready(&mut found, 10);
    found.iter().map(|ready| (ready.token.0, ready.readiness)).collect()
}

#[test]
fn stream_readiness_reports_data_end_and_failure() {
    for_each_family(|hosts, _, b| {
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

        client.set_reset_on_close(true);
        drop(client);
        hosts.wait(&server, Interest::Neither);
        assert!(server.readiness().failed && server.readiness().write_closed);
        assert!(server.take_error().unwrap().is_some() && !server.readiness().failed);
    });
}

#[test]
fn poll_set_supports_level_edge_and_one_shot() {
    for_each_family(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        client.set_nodelay(true).unwrap();
        let mut poll = Poll::new(&hosts.b);
        poll.register(&server, Token(5)).unwrap();
        assert!(collect_ready(&poll).is_empty());
        let send = || {
            client.send(b"x").unwrap();
            hosts.wait(&server, Interest::Readable);
            // Data that is readable already does not end that wait by itself.
            hosts.b.run_once().unwrap();
        };
        send();
        for _ in 0..2 {
            assert!(matches!(collect_ready(&poll)[..], [(5, Readiness { readable: true, .. })]));
        }
        poll.set_trigger(&server, Trigger::Edge).unwrap();
        assert_eq!(collect_ready(&poll).len(), 1, "the first report may repeat an old event");
        assert_eq!(collect_ready(&poll).len(), 0);
        send();
        assert_eq!(collect_ready(&poll).len(), 1);
        poll.set_trigger(&server, Trigger::OneShot).unwrap();
        assert_eq!(collect_ready(&poll).len(), 1);
        send();
        assert_eq!(collect_ready(&poll).len(), 0, "no report until reregistered");
        poll.reregister(&server, Token(6), Interest::Both).unwrap();
        assert!(matches!(collect_ready(&poll)[..], [(6, _)]));
    });
}

#[test]
fn space_for_sending_is_no_edge_for_readers() {
    for_each_family(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        let mut poll = Poll::new(&hosts.b);
        poll.register(&server, Token(5)).unwrap();
        poll.set_trigger(&server, Trigger::Edge).unwrap();
        // The peer takes nothing: its buffer and then the own one fill.
        while server.send(&[1; 65536]).is_ok() {
            hosts.a.run_once().unwrap();
            hosts.b.run_once().unwrap();
        }
        client.send(b"x").unwrap();
        hosts.wait(&server, Interest::Readable);
        assert_eq!(collect_ready(&poll).len(), 1);
        let mut buf = vec![0; 1 << 20];
        while !server.readiness().writable {
            let _ = client.recv(&mut buf);
            hosts.a.run_once().unwrap();
            hosts.b.run_once().unwrap();
        }
        assert_eq!(collect_ready(&poll).len(), 0, "nothing has arrived");
        // The end of both directions is reported to readers too.
        client.shutdown(Shutdown::Write).unwrap();
        hosts.wait(&server, Interest::ReadClosed);
        assert_eq!(collect_ready(&poll).len(), 1);
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(collect_ready(&poll).len(), 1);
    });
}

#[test]
fn full_list_leaves_other_sockets_for_next_collect() {
    for_each_family(|hosts, _, b| {
        let mut poll = Poll::new(&hosts.b);
        let sockets: Vec<UdpSocket> =
            (0..5).map(|_| UdpSocket::bind(&hosts.b, (b, 0)).unwrap()).collect();
        for (number, socket) in sockets.iter().enumerate() {
            poll.register_for(socket, Token(number), Interest::Writable).unwrap();
        }
        let mut all: Vec<Ready> = Vec::new();
        for _ in 0..5 {
            poll.collect_ready(&mut all, 1);
        }
        let mut tokens: Vec<usize> = all.iter().map(|ready| ready.token.0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4]);
    });
}

#[test]
fn sleeper_ends_wait() {
    for_each_family(|hosts, _, b| {
        let socket = UdpSocket::bind(&hosts.b, (b, 7)).unwrap();
        let sources: [(&dyn Source, Interest); 1] = [(&socket, Interest::Readable)];
        let wait = |sleeper: &mut ImmediateSleeper| hosts.b.wait(&sources, Some(TIMEOUT), sleeper);
        assert!(wait(&mut ImmediateSleeper(None)).unwrap());
        let error = wait(&mut ImmediateSleeper(Some(io::ErrorKind::Interrupted))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        let nothing = hosts.b.wait(&sources, Some(Duration::ZERO), &mut OtherHost(&hosts.a));
        assert!(!nothing.unwrap(), "expected a timeout");
    });
}

#[test]
fn peeks_datagrams_and_sends_from_chosen_address() {
    for_each_family(|hosts, a, b| {
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
fn waits_for_poll_set_and_finds_source_address() {
    for_each_family(|hosts, a, b| {
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
fn deferred_frames_leave_with_the_last_call() {
    for_each_family(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        client.set_nodelay(true).unwrap();
        let sent = || hosts.a.counters().device.transmitted;
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

#[test]
fn calls_that_send_nothing_do_not_end_a_deferral() {
    for_each_family(|hosts, _, b| {
        let (client, server) = hosts.connect(SocketAddr::new(b, 7));
        client.set_nodelay(true).unwrap();
        server.send(b"12345").unwrap();
        let sources: [(&dyn Source, Interest); 1] = [(&client, Interest::Readable)];
        assert!(hosts.a.wait(&sources, Some(TIMEOUT), &mut OtherHost(&hosts.b)).unwrap());
        let sent = || hosts.a.counters().device.transmitted;
        let before = sent();
        hosts.a.defer_transmit(2);
        client.send(b"a").unwrap();
        assert!((0..5).all(|_| client.recv(&mut [0; 1]).is_ok()));
        client.send(b"b").unwrap();
        assert_eq!(sent(), before);
        client.send(b"c").unwrap();
        assert!(sent() >= before + 3);
        hosts.wait(&server, Interest::Readable);
    });
}

#[test]
fn wait_for_many_sockets_ends_with_data_that_comes_while_they_are_checked() {
    const EXCHANGES: usize = 300;
    let daemons = two_hosts::daemons(1024, 1);
    for [a, b] in FAMILIES {
        let [client, server] = daemons.attach();
        let bind = |port| {
            let local = SocketAddr::new(b.parse().unwrap(), port);
            UdpSocket::bind_one_family(&server, local).unwrap()
        };
        let echo = bind(7);
        let idle: Vec<UdpSocket> = (1000..1200).map(bind).collect();
        let all = std::iter::once(&echo).chain(&idle);
        let sources: Vec<_> =
            all.map(|socket| (socket as &dyn Source, Interest::Readable)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let local = SocketAddr::new(a.parse().unwrap(), 0);
                let socket = UdpSocket::bind_one_family(&client, local).unwrap();
                socket.set_read_timeout(Some(TIMEOUT)).unwrap();
                for _ in 0..EXCHANGES {
                    socket.send_to(b"x", SocketAddr::new(b.parse().unwrap(), 7)).unwrap();
                    socket.recv_from(&mut [0; 8]).unwrap();
                }
            });
            for exchange in 0..EXCHANGES {
                let found = server.wait(&sources, Some(TIMEOUT), &mut WakeOnly).unwrap();
                assert!(found, "exchange {exchange} timed out");
                let (len, from) = echo.recv_from(&mut [0; 8]).unwrap();
                echo.send_to(&[0; 8][..len], from).unwrap();
            }
        });
    }
}
