//! UDP sockets of two hosts in one process, joined by an in-memory link.

mod two_hosts;

use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::{Net, Poll, Token, UdpSocket};
use two_hosts::FAMILIES;

/// Stacks of two hosts.
struct Hosts {
    a: Net,
    b: Net,
}

fn hosts() -> Hosts {
    let [a, b] = two_hosts::open(512, |config| config);
    Hosts { a, b }
}

/// Runs `check` on both families, with embedded stacks and with daemons.
fn on_both_families(check: impl Fn(Hosts, &str, &str)) {
    for [first, second] in FAMILIES {
        two_hosts::in_both_forms(512, |[a, b]| check(Hosts { a, b }, first, second));
    }
}

/// Binds a socket with timeouts: a lost datagram fails the test instead of hanging it.
fn bind(net: &Net, address: impl ToSocketAddrs) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind(net, address)?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    socket.set_write_timeout(Some(Duration::from_secs(20)))?;
    Ok(socket)
}

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// Echoes datagrams on a thread until an empty one; returns the number of datagrams before it.
fn echo(socket: UdpSocket) -> thread::JoinHandle<u32> {
    thread::spawn(move || {
        let mut buf = [0; 70_000];
        for count in 0.. {
            let (len, from) = socket.recv_from(&mut buf).unwrap();
            socket.send_to(&buf[..len], from).unwrap();
            if len == 0 {
                return count;
            }
        }
        unreachable!("the range has no end");
    })
}

#[test]
fn echoes_datagrams_of_every_size() {
    on_both_families(|hosts, a, b| {
        let server = echo(bind(&hosts.b, (b, 7)).unwrap());
        let client = bind(&hosts.a, (a, 0)).unwrap();
        client.connect((b, 7)).unwrap();
        assert_eq!(client.peer_addr().unwrap(), address(b, 7));
        let mut buf = vec![0; 70_000];
        for size in [1usize, 63, 1452, 1472, 1473, 4000, 65_000, 0] {
            let payload: Vec<u8> = (0..size).map(|n| n as u8).collect();
            assert_eq!(client.send(&payload).unwrap(), size);
            let len = client.recv(&mut buf).unwrap();
            assert_eq!(&buf[..len], payload);
        }
        assert_eq!(server.join().unwrap(), 7);
        let balance = hosts.b.counters().stack.balance();
        assert_eq!(balance, 0);
    });
}

#[test]
fn short_buffer_is_reported_as_truncated() {
    on_both_families(|hosts, a, b| {
        let receiver = bind(&hosts.b, (b, 9)).unwrap();
        let sender = bind(&hosts.a, (a, 10)).unwrap();
        sender.send_to(b"too long", (b, 9)).unwrap();
        sender.send_to(b"fits", (b, 9)).unwrap();
        thread::scope(|scope| {
            // The sender's stack must run once more, to answer address resolution.
            scope.spawn(|| {
                sender.recv(&mut [0]).unwrap();
            });
            let mut buf = [0; 4];
            let first = receiver.recv_meta(&mut buf).unwrap();
            assert_eq!((first.len, first.truncated, &buf), (4, true, b"too "));
            assert_eq!((first.from, first.to), (address(a, 10), b.parse().unwrap()));
            let second = receiver.recv_meta(&mut buf).unwrap();
            assert_eq!((second.len, second.truncated, &buf), (4, false, b"fits"));
            receiver.send_to(b"!", (a, 10)).unwrap();
            run_until_idle(&hosts.b);
        });
    });
}

/// Runs a host until no frame arrives any more.
fn run_until_idle(net: &Net) {
    while net.run_once().unwrap() > 0 {}
}

#[test]
fn nonblocking_and_timeouts_return_would_block() {
    on_both_families(|hosts, a, _| {
        let socket = bind(&hosts.a, (a, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let error = socket.recv(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert_eq!(socket.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
        let zero = socket.set_read_timeout(Some(Duration::ZERO)).unwrap_err();
        assert_eq!(zero.kind(), ErrorKind::InvalidInput);
        assert_eq!(socket.read_timeout().unwrap(), Some(Duration::from_millis(1)));
    });
}

#[test]
fn closed_port_refuses_connected_socket() {
    on_both_families(|hosts, a, b| {
        let client = bind(&hosts.a, (a, 0)).unwrap();
        client.connect((b, 9)).unwrap();
        client.send(b"anybody?").unwrap();
        let other = hosts.b.clone();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    other.run_once().unwrap();
                    thread::yield_now();
                }
            });
            let error = client.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            done.store(true, Ordering::Relaxed);
        });
        assert!(client.take_error().unwrap().is_none(), "an error is reported once");
    });
}

#[test]
fn bind_checks_addresses() {
    on_both_families(|hosts, a, b| {
        let taken = bind(&hosts.a, (a, 53)).unwrap();
        assert_eq!(taken.local_addr().unwrap(), address(a, 53));
        let again = bind(&hosts.a, (a, 53)).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AddrInUse);
        let foreign = bind(&hosts.a, (b, 53)).unwrap_err();
        assert_eq!(foreign.kind(), ErrorKind::AddrNotAvailable);
        drop(taken);
        bind(&hosts.a, (a, 53)).unwrap();
        let unconnected = bind(&hosts.a, (a, 0)).unwrap();
        assert_eq!(unconnected.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(unconnected.send(b"x").unwrap_err().kind(), ErrorKind::NotConnected);
    });
}

/// One socket on the unspecified IPv6 address serves both families, and replies leave from the
/// address that the request was sent to.
#[test]
fn dual_stack_socket_exchanges() {
    two_hosts::in_both_forms(512, |[a, b]| {
        let server = bind(&b, "[::]:7").unwrap();
        let serving = thread::spawn(move || {
            let mut served = 0;
            while served < 2 {
                served += server
                    .exchange(|request, reply| {
                        reply[..request.bytes.len()].copy_from_slice(request.bytes);
                        reply[request.bytes.len()] = b'!';
                        Some(request.bytes.len() + 1)
                    })
                    .unwrap();
            }
        });
        for [local, remote] in FAMILIES {
            let client = bind(&a, (local, 0)).unwrap();
            client.send_to(b"hello", (remote, 7)).unwrap();
            let mut buf = [0; 16];
            let (len, from) = client.recv_from(&mut buf).unwrap();
            assert_eq!((&buf[..len], from), (&b"hello!"[..], address(remote, 7)));
        }
        serving.join().unwrap();
    });
}

/// Datagrams of every size are answered in place, in order; a callback may leave a datagram
/// unanswered.
#[test]
fn exchanges_in_place() {
    const COUNT: usize = 100;
    let request = |number: usize| vec![number as u8; [0, 1, 1000, 1472, 5000][number % 5]];
    on_both_families(|hosts, a, b| {
        let server = bind(&hosts.b, (b, 7)).unwrap();
        let client = bind(&hosts.a, (a, 0)).unwrap();
        let client_address = client.local_addr().unwrap();
        let to = address(b, 7);
        let serving = thread::spawn(move || {
            let mut served = 0;
            while served < COUNT {
                let taken = server.exchange_in_place(|request| {
                    assert_eq!((request.from, request.to), (client_address, to.ip()));
                    assert!(request.buffer.len() >= request.len);
                    request.buffer[..request.len].iter_mut().for_each(|byte| *byte ^= 0xff);
                    (request.len != 1).then_some(request.len)
                });
                let taken = taken.unwrap();
                assert!((1..=64).contains(&taken));
                served += taken;
            }
            server.set_nonblocking(true).unwrap();
            assert_eq!(
                server.exchange_in_place(|_| None).unwrap_err().kind(),
                ErrorKind::WouldBlock
            );
        });
        let mut buf = [0; 6000];
        for number in 0..COUNT {
            client.send_to(&request(number), to).unwrap();
            if number % 5 == 1 {
                continue;
            }
            let (len, from) = client.recv_from(&mut buf).unwrap();
            let expected: Vec<u8> = request(number).iter().map(|byte| byte ^ 0xff).collect();
            assert_eq!((&buf[..len], from), (&expected[..], to));
        }
        serving.join().unwrap();
    });
}

/// A reply that cannot be sent is dropped, and later requests are answered.
#[test]
fn exchange_drops_replies_that_cannot_be_sent() {
    on_both_families(|hosts, a, b| {
        let server = bind(&hosts.b, (b, 7)).unwrap();
        let serving = thread::spawn(move || {
            let mut served = 0;
            while served < 3 {
                let taken = server.exchange(|request, reply| match request.bytes {
                    b"longer than the buffer" => Some(reply.len() + 1),
                    b"as long as the buffer" => Some(reply.len()),
                    _ => {
                        reply[..2].copy_from_slice(b"ok");
                        Some(2)
                    }
                });
                served += taken.unwrap();
            }
        });
        let client = bind(&hosts.a, (a, 0)).unwrap();
        for request in ["longer than the buffer", "as long as the buffer", "last"] {
            client.send_to(request.as_bytes(), (b, 7)).unwrap();
        }
        let mut buf = vec![0; 70_000];
        while client.recv_from(&mut buf).unwrap().0 != 2 {}
        assert_eq!(&buf[..2], b"ok");
        serving.join().unwrap();
    });
}

/// One socket for each family on the same port; each receives its own family only.
#[test]
fn one_family_socket_leaves_port_free_for_the_other() {
    let hosts = hosts();
    let bind = |address| UdpSocket::bind_one_family(&hosts.b, address).unwrap();
    let servers = [bind("0.0.0.0:7"), bind("[::]:7")].map(echo);
    assert_eq!(UdpSocket::bind(&hosts.b, "[::]:7").unwrap_err().kind(), ErrorKind::AddrInUse);
    for ([a, b], server) in FAMILIES.into_iter().zip(servers) {
        let client = self::bind(&hosts.a, (a, 0)).unwrap();
        for payload in [&b"hello"[..], b""] {
            client.send_to(payload, (b, 7)).unwrap();
            let (len, from) = client.recv_from(&mut [0; 8]).unwrap();
            assert_eq!((len, from), (payload.len(), address(b, 7)));
        }
        assert_eq!(server.join().unwrap(), 1);
    }
}

#[test]
fn batches_keep_order() {
    on_both_families(|hosts, a, b| {
        let receiver = bind(&hosts.b, (b, 9)).unwrap();
        let sending = thread::spawn({
            let (net, to, from) = (hosts.a.clone(), address(b, 9), address(a, 0));
            move || {
                let sender = bind(&net, from).unwrap();
                let payloads: Vec<[u8; 2]> = (0..200u16).map(u16::to_be_bytes).collect();
                // The first datagram alone: it waits for address resolution.
                sender.send_to(b"go", to).unwrap();
                let mut ready = [0; 2];
                sender.recv(&mut ready).unwrap();
                let batch: Vec<_> = payloads.iter().map(|p| (&p[..], to)).collect();
                let mut sent = 0;
                while sent < batch.len() {
                    sent += sender.send_batch(&batch[sent..]).unwrap();
                }
                sender.recv(&mut ready).unwrap();
            }
        });
        let mut storage = vec![[0u8; 8]; 32];
        let (_, peer) = receiver.recv_from(&mut storage[0]).unwrap();
        receiver.send_to(b"ok", peer).unwrap();
        let mut seen = Vec::new();
        let mut received = Vec::new();
        while seen.len() < 200 {
            let mut buffers: Vec<&mut [u8]> = storage.iter_mut().map(|b| &mut b[..]).collect();
            receiver.recv_batch(&mut buffers, &mut received).unwrap();
            for (one, buf) in received.iter().zip(&storage) {
                assert_eq!((one.len, one.from), (2, peer));
                seen.push(u16::from_be_bytes([buf[0], buf[1]]));
            }
        }
        receiver.send_to(b"ok", peer).unwrap();
        sending.join().unwrap();
        assert!(seen.iter().copied().eq(0..200), "{seen:?}");
    });
}

/// A thread that sleeps on one socket is woken when another thread, which runs the stack for
/// its own socket, receives a datagram for it.
#[test]
fn two_threads_wait_on_two_sockets() {
    on_both_families(|hosts, a, b| {
        let client = bind(&hosts.a, (a, 0)).unwrap();
        let ports = [101, 102];
        let servers = ports.map(|port| echo(bind(&hosts.b, (b, port)).unwrap()));
        let mut buf = [0; 8];
        for round in 0..50u32 {
            for port in ports {
                client.send_to(&round.to_be_bytes(), (b, port)).unwrap();
                let (len, from) = client.recv_from(&mut buf).unwrap();
                assert_eq!((len, from.port()), (4, port));
            }
        }
        for port in ports {
            client.send_to(&[], (b, port)).unwrap();
            client.recv(&mut buf).unwrap();
        }
        for server in servers {
            assert_eq!(server.join().unwrap(), 50);
        }
    });
}

#[test]
fn poll_reports_readable_sockets() {
    on_both_families(|hosts, a, b| {
        let sockets = [1, 2].map(|port| bind(&hosts.b, (b, port)).unwrap());
        let mut poll = Poll::new(&hosts.b);
        poll.register(&sockets[0], Token(1)).unwrap();
        poll.register(&sockets[1], Token(2)).unwrap();
        assert!(poll.register(&sockets[1], Token(3)).is_err());
        let foreign = bind(&hosts.a, (a, 0)).unwrap();
        assert!(poll.register(&foreign, Token(3)).is_err());

        let mut ready = vec![Token(9)];
        poll.wait(&mut ready, Some(Duration::from_millis(1))).unwrap();
        assert!(ready.is_empty());

        let to = address(b, 2);
        let asking = thread::spawn(move || {
            foreign.send_to(b"?", to).unwrap();
            foreign.recv(&mut [0]).unwrap();
        });
        poll.wait(&mut ready, None).unwrap();
        assert_eq!(ready, [Token(2)]);
        let (_, peer) = sockets[1].recv_from(&mut [0]).unwrap();
        poll.deregister(&sockets[1]).unwrap();
        assert!(poll.deregister(&sockets[1]).is_err());
        sockets[1].send_to(b"!", peer).unwrap();
        asking.join().unwrap();
    });
}

/// After any number of exchanges every frame is free again.
#[test]
fn returns_all_frames_to_the_arena() {
    on_both_families(|hosts, a, b| {
        let before = (hosts.a.frames_available(), hosts.b.frames_available());
        let server = echo(bind(&hosts.b, (b, 7)).unwrap());
        let client = bind(&hosts.a, (a, 0)).unwrap();
        let mut buf = [0; 4000];
        for size in (1..500).chain([0]) {
            client.send_to(&vec![1; size * 5], (b, 7)).unwrap();
            assert_eq!(client.recv(&mut buf).unwrap(), size * 5);
        }
        server.join().unwrap();
        drop(client);
        assert_eq!((hosts.a.frames_available(), hosts.b.frames_available()), before);
    });
}

/// Every call takes the stack's lock, and acquisitions are counted only if the configuration
/// enables it.
#[test]
fn lock_statistics_are_kept_on_request() {
    on_both_families(|hosts, a, _| {
        assert!(hosts.a.lock_statistics().is_none());
        drop(hosts);
        let [net, _other] = two_hosts::open(512, |config| config.lock_statistics(true));
        let before = net.lock_statistics().unwrap();
        let socket = bind(&net, (a, 7)).unwrap();
        for _ in 0..10 {
            socket.local_addr().unwrap();
        }
        let after = net.lock_statistics().unwrap();
        assert!(after.acquisitions >= before.acquisitions + 10, "{before:?} {after:?}");
        assert_eq!(after.contentions, 0, "there is one thread");
        assert!(after.held_ns > before.held_ns);
    });
}
