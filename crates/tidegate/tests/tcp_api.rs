//! TCP calls: batched, vectored, in place, and in invalid states.

mod two_hosts;

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Interest, Keepalive, Net, Poll, TcpListener, TcpOptions, TcpStream, Token};
use two_hosts::FAMILIES;

const TIMEOUT: Duration = Duration::from_secs(20);

fn hosts() -> [Net; 2] {
    two_hosts::open(1024, |config| config)
}

/// Connects the first host to the second; returns both streams.
fn pair([a, b]: &[Net; 2], to: SocketAddr) -> [TcpStream; 2] {
    let listener = TcpListener::bind(b, to).unwrap();
    let accepting = thread::spawn(move || listener.accept().unwrap().0);
    let ends = [TcpStream::connect(a, to).unwrap(), accepting.join().unwrap()];
    for end in &ends {
        end.set_read_timeout(Some(TIMEOUT)).unwrap();
        end.set_write_timeout(Some(TIMEOUT)).unwrap();
    }
    ends
}

/// Runs `check` on both families, with embedded stacks and with daemons.
fn on_both_families(check: impl Fn([Net; 2], SocketAddr)) {
    for [_, b] in FAMILIES {
        let address = SocketAddr::new(b.parse().unwrap(), 7);
        two_hosts::in_both_forms(1024, |nets| check(nets, address));
    }
}

/// Runs both stacks until `happened` returns a value.
fn run_until<R>(nets: &[Net; 2], mut happened: impl FnMut() -> Option<R>) -> R {
    let started = Instant::now();
    while started.elapsed() < TIMEOUT {
        if let Some(result) = happened() {
            return result;
        }
        for net in nets {
            net.run_once().unwrap();
        }
    }
    panic!("timed out");
}

#[test]
fn invalid_calls_return_expected_errors() {
    on_both_families(|nets, to| {
        let [a, b] = &nets;
        // An address of no host: there is no answer yet.
        let unused_address = match to {
            SocketAddr::V4(_) => "192.0.2.9:7".parse().unwrap(),
            SocketAddr::V6(_) => "[2001:db8::9]:7".parse().unwrap(),
        };
        let connecting =
            TcpStream::connect_nonblocking(a, unused_address, TcpOptions::default()).unwrap();
        connecting.set_nonblocking(true).unwrap();
        assert_eq!(connecting.send(b"x").unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(connecting.recv(&mut [0]).unwrap_err().kind(), ErrorKind::NotConnected);
        // The same four-tuple again: there can be only one such connection.
        let local = connecting.local_addr().unwrap();
        let twice = TcpStream::connect_from(a, local, unused_address, TcpOptions::default());
        assert_eq!(twice.unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(connecting);
        let group = match to {
            SocketAddr::V4(_) => "224.0.0.1:9".parse().unwrap(),
            SocketAddr::V6(_) => "[ff02::1]:9".parse().unwrap(),
        };
        for wrong in [SocketAddr::new(to.ip(), 0), group] {
            let error = TcpStream::connect_nonblocking(a, wrong, TcpOptions::default());
            assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput, "{wrong}");
        }
        let error = TcpListener::bind(b, (local.ip(), 7)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrNotAvailable);

        let [client, server] = pair(&nets, to);
        assert_eq!(
            client.set_read_timeout(Some(Duration::ZERO)).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        assert_eq!(client.set_ttl(256).unwrap_err().kind(), ErrorKind::InvalidInput);
        client.shutdown(Shutdown::Write).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.send(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(server.recv(&mut [0; 9]).unwrap(), 0);
        assert_eq!(server.recv(&mut [0; 9]).unwrap(), 0, "end of stream is permanent");
        server.set_reset_on_close(true);
        drop(server);
        assert_eq!(client.recv(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        // The error is reported once; then the connection is closed.
        assert_eq!(client.recv(&mut [0]).unwrap(), 0);
        assert_eq!(client.send(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert!(client.take_error().unwrap().is_none());
        // A socket of another stack.
        let mut poll = Poll::new(b);
        assert_eq!(poll.register(&client, Token(0)).unwrap_err().kind(), ErrorKind::InvalidInput);
        let error = b.batch(|batch| batch.send(&client, b"x")).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let _ = a;
    });
}

#[test]
fn options_read_back_as_set() {
    on_both_families(|nets, to| {
        let [client, _server] = pair(&nets, to);
        client.set_nodelay(true).unwrap();
        client.set_keepalive(Some(Keepalive::default())).unwrap();
        client.set_ttl(9).unwrap();
        client
            .set_options(|options| {
                options.user_timeout_ms = Some(5_000);
                options.send_buffer_bytes = 1;
            })
            .unwrap();
        let options = client.options().unwrap();
        assert!(client.nodelay().unwrap() && options.no_delay);
        assert_eq!(options.keepalive, Some(Keepalive::default()));
        assert_eq!((options.hop_limit, options.user_timeout_ms), (Some(9), Some(5_000)));
        assert!(options.send_buffer_bytes > 1, "must be raised to the minimum");
        assert!(client.info().unwrap().mss_bytes > 500);
    });
}

#[test]
fn vectored_reads_and_writes_keep_order() {
    on_both_families(|nets, to| {
        let [mut client, mut server] = pair(&nets, to);
        // No thread runs the client's stack while the server reads.
        client.set_nodelay(true).unwrap();
        let data = [b"high ".as_slice(), b"", b"water ", b"mark"].map(IoSlice::new);
        assert_eq!(client.write_vectored(&data).unwrap(), 15);
        let (mut first, mut second) = ([0; 7], [0; 20]);
        let mut read = 0;
        while read < 15 {
            let skip = |buf: &mut [u8], from: usize| buf.len().min(from);
            let (a, b) = (skip(&mut first, read), skip(&mut second, read.saturating_sub(7)));
            let (first, second) = (&mut first[a..], &mut second[b..]);
            let mut bufs = [IoSliceMut::new(first), IoSliceMut::new(second)];
            read += server.read_vectored(&mut bufs).unwrap();
        }
        assert_eq!((&first, &second[..8]), (b"high wa", b"ter mark".as_slice()));
        // Reads in place, and only part of the data.
        client.write_all(b"abcdef").unwrap();
        let mut seen: Vec<u8> = Vec::new();
        while seen.len() < 6 {
            let consumed = server.recv_with(|bytes| {
                seen.extend(&bytes[..1]);
                1
            });
            assert_eq!(consumed.unwrap(), 1);
        }
        assert_eq!(seen, b"abcdef");
    });
}

#[test]
fn send_with_writes_in_place() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        client.set_nodelay(true).unwrap();
        let mut next = 0u8;
        let mut sent = Vec::new();
        let mut write = |limit: usize, max: usize| {
            client.send_with(limit, |buf| {
                assert!(!buf.is_empty() && buf.len() <= limit);
                let len = buf.len().min(max);
                for byte in &mut buf[..len] {
                    (*byte, next) = (next, next.wrapping_add(1));
                    sent.push(*byte);
                }
                // A returned length beyond the offered buffer is capped.
                if len < max { max } else { len }
            })
        };
        assert_eq!(write(10, 3).unwrap(), 3, "part of the offered buffer");
        assert_eq!(write(10, 0).unwrap(), 0, "nothing written");
        let mut wrote = 3;
        while wrote < 5_000 {
            wrote += write(usize::MAX, 3_000).unwrap();
        }
        let mut seen = vec![0; wrote];
        (&server).read_exact(&mut seen).unwrap();
        assert_eq!(seen, sent);
        client.shutdown(Shutdown::Write).unwrap();
        let error = client.send_with(1, |_| panic!("no buffer may be offered")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    });
}

#[test]
fn batch_performs_many_calls() {
    on_both_families(|nets, to| {
        let [a, b] = &nets;
        let listener = TcpListener::bind(b, to).unwrap();
        let poll = Poll::new(b);
        let clients: Vec<TcpStream> = a
            .batch(|batch| {
                let connect = |_| batch.connect(None, to, TcpOptions::default()).unwrap();
                (0..20).map(connect).collect()
            })
            .unwrap();
        let mut servers = Vec::new();
        run_until(&nets, || {
            b.batch(|batch| {
                while let Ok((stream, peer)) = batch.accept(&listener) {
                    assert_eq!(peer.ip().is_ipv4(), to.is_ipv4());
                    batch
                        .register(&poll, &stream, Token(servers.len()), Interest::Readable)
                        .unwrap();
                    servers.push(stream);
                }
            })
            .unwrap();
            (servers.len() == 20).then_some(())
        });
        // A server may know of its connection before the client does.
        run_until(&nets, || {
            let are_connected =
                a.batch(|batch| clients.iter().all(|client| batch.finish_connect(client).is_ok()));
            are_connected.unwrap().then_some(())
        });
        let sent = a.counters().device.transmitted;
        a.batch(|batch| {
            for (n, client) in clients.iter().enumerate() {
                assert_eq!(batch.send(client, &[n as u8; 100]).unwrap(), 100);
            }
        })
        .unwrap();
        if !a.is_attached() {
            assert_eq!(a.counters().device.transmitted - sent, 20, "one segment for each client");
        }
        let mut ready = Vec::new();
        run_until(&nets, || {
            poll.ready_now(&mut ready);
            (ready.len() == 20).then_some(())
        });
        // Sockets dropped inside a batch are closed inside the batch.
        let mut all: Vec<Option<TcpStream>> = servers.into_iter().map(Some).collect();
        b.batch(|batch| {
            for slot in &mut all {
                let stream = slot.take().unwrap();
                let mut buf = [0; 200];
                assert_eq!(batch.recv(&stream, &mut buf).unwrap(), 100);
                let error = batch.recv_with(&stream, <[u8]>::len).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
            }
        })
        .unwrap();
        poll.ready_now(&mut ready);
        assert!(ready.is_empty(), "a closed socket leaves the set");
        for client in &clients {
            client.set_read_timeout(Some(TIMEOUT)).unwrap();
        }
        run_until(&nets, || {
            a.batch(|batch| {
                let is_at_end = |client| matches!(batch.recv(client, &mut [0]), Ok(0));
                clients.iter().all(is_at_end).then_some(())
            })
            .unwrap()
        });
    });
}

#[test]
fn attempts_do_not_wait_in_blocking_mode() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        let blocked = |result: std::io::Result<usize>| {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::WouldBlock);
        };
        let mut buf = [0; 100];
        blocked(server.try_recv(&mut buf));
        assert_eq!(client.try_send(b"a message").unwrap(), 9);
        let arrived = run_until(&nets, || server.try_recv(&mut buf).ok());
        assert_eq!(&buf[..arrived], b"a message");
        blocked(server.try_recv(&mut buf));
        let chunk = [7; 64 << 10];
        let full = run_until(&nets, || client.try_send(&chunk).err());
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        drop(client);
        run_until(&nets, || match server.try_recv(&mut buf) {
            Ok(0) => Some(()),
            Ok(_) => None,
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        });
    });
}

/// A writer that stops before the buffer is full, and never gets `WouldBlock`, still learns
/// when there is space again.
#[test]
fn reports_space_to_writer_that_never_blocked() {
    on_both_families(|nets, to| {
        let [a, b] = &nets;
        let listener = TcpListener::bind(b, to).unwrap();
        let small = TcpOptions::default().send_buffer_bytes(9_000);
        let client = TcpStream::connect_nonblocking(a, to, small).unwrap();
        let server = run_until(&nets, || {
            b.batch(|batch| batch.accept(&listener).ok().map(|(stream, _)| stream)).unwrap()
        });
        let mut poll = Poll::new(a);
        poll.register_for(&client, Token(3), Interest::Writable).unwrap();
        let mut ready = Vec::new();
        run_until(&nets, || {
            poll.ready_now(&mut ready);
            (!ready.is_empty()).then_some(())
        });
        assert_eq!(client.send(&[1; 8_000]).unwrap(), 8_000, "everything is accepted");
        if !a.is_attached() {
            poll.ready_now(&mut ready);
            assert_eq!(ready, [], "too little space");
        }
        run_until(&nets, || {
            poll.ready_now(&mut ready);
            (!ready.is_empty()).then_some(())
        });
        run_until(&nets, || (server.info().unwrap().unread_bytes == 8_000).then_some(()));
    });
}

#[test]
#[should_panic = "inside a batch, but not through the batch"]
fn panics_on_socket_used_inside_batch_but_not_through_it() {
    let nets = hosts();
    let listener = TcpListener::bind(&nets[1], "192.0.2.2:7").unwrap();
    let _ = nets[1].batch(|_| listener.local_addr());
}
