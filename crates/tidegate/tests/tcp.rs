//! TCP sockets of two hosts in one process, joined by an in-memory link.

mod two_hosts;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tidegate::{Interest, Net, Poll, TcpListener, TcpOptions, TcpState, TcpStream, Token};
use two_hosts::FAMILIES;

struct Hosts {
    a: Net,
    b: Net,
}

const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs `check` on both families, with embedded stacks and with daemons.
fn on_both_families(check: impl Fn(Hosts, SocketAddr)) {
    for [_, b] in FAMILIES {
        let address = SocketAddr::new(b.parse().unwrap(), 7);
        two_hosts::in_both_forms(1024, |[a, b]| check(Hosts { a, b }, address));
    }
}

/// Sets timeouts on a stream: lost data fails the test instead of hanging it.
fn with_timeouts(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// Echoes one connection until its end; returns the number of bytes.
fn echo(listener: TcpListener) -> thread::JoinHandle<u64> {
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut stream = with_timeouts(stream);
        let (mut buf, mut total) = (vec![0; 10_000], 0);
        loop {
            let len = stream.read(&mut buf).unwrap();
            if len == 0 {
                stream.shutdown(Shutdown::Write).unwrap();
                // Runs the stack until the peer has everything: no other thread does, and the
                // last segments may need retransmission.
                listener.set_nonblocking(true).unwrap();
                while stream.info().is_ok_and(|info| info.unacknowledged_bytes > 0) {
                    let _ = listener.accept();
                    thread::yield_now();
                }
                return total;
            }
            stream.write_all(&buf[..len]).unwrap();
            total += len as u64;
        }
    })
}

#[test]
fn echoes_stream_and_closes() {
    on_both_families(|hosts, to| {
        let server = echo(TcpListener::bind(&hosts.b, ("::", to.port())).unwrap());
        let mut stream = with_timeouts(TcpStream::connect(&hosts.a, to).unwrap());
        assert_eq!(stream.peer_addr().unwrap(), to);
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
        let mut reader = stream.try_clone().unwrap();
        let received = thread::spawn(move || {
            let mut received = Vec::new();
            reader.read_to_end(&mut received).unwrap();
            received
        });
        stream.write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.send(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert!(received.join().unwrap() == sent);
        drop(stream);
        assert_eq!(server.join().unwrap(), sent.len() as u64);
    });
}

#[test]
fn delivers_written_data_after_all_handles_are_dropped() {
    on_both_families(|hosts, to| {
        let listener = TcpListener::bind(&hosts.b, to).unwrap();
        let server = thread::spawn(move || {
            let mut received = Vec::new();
            with_timeouts(listener.accept().unwrap().0).read_to_end(&mut received).unwrap();
            received.len()
        });
        let Hosts { a, b: _b } = hosts;
        let stream = with_timeouts(TcpStream::connect(&a, to).unwrap());
        let written = (&stream).write(&[1; 200_000]).unwrap();
        drop(stream);
        drop(a);
        assert_eq!(server.join().unwrap(), written);
    });
}

#[test]
fn connect_to_closed_port_is_refused() {
    on_both_families(|hosts, to| {
        let refused = AtomicBool::new(false);
        thread::scope(|scope| {
            // The answer is a reset: one frame, after those of address resolution.
            scope.spawn(|| {
                while !refused.load(Ordering::Relaxed) {
                    hosts.b.run_once().unwrap();
                }
            });
            let error = TcpStream::connect_timeout(&hosts.a, to, TIMEOUT);
            refused.store(true, Ordering::Relaxed);
            assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        });
        if hosts.b.is_attached() {
            // The daemon answers without this thread.
            return;
        }
        // With the other host's stack not running, no answer comes.
        let limit = Duration::from_millis(20);
        let error = TcpStream::connect_timeout(&hosts.a, to, limit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    });
}

#[test]
fn reset_on_close_resets_the_peer() {
    on_both_families(|hosts, to| {
        let listener = TcpListener::bind(&hosts.b, to).unwrap();
        let error = TcpListener::bind(&hosts.b, to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        // A connect that is reset before it returns fails itself.
        let (connected, is_connected) = mpsc::channel();
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            stream.set_reset_on_close(true);
            is_connected.recv().unwrap();
            drop(stream);
        });
        let stream = with_timeouts(TcpStream::connect(&hosts.a, to).unwrap());
        connected.send(()).unwrap();
        let error = stream.recv(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        server.join().unwrap();
    });
}

#[test]
fn readiness_reports_connections_data_and_space() {
    on_both_families(|hosts, to| {
        let options = TcpOptions::default().receive_buffer_bytes(4096);
        let listener = TcpListener::bind_with(&hosts.b, to, 4, options).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut poll = Poll::new(&hosts.b);
        poll.register(&listener, Token(0)).unwrap();
        assert_eq!(
            poll.register(&listener, Token(1)).unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        let options = TcpOptions::default().send_buffer_bytes(4096);
        let client = TcpStream::connect_nonblocking(&hosts.a, to, options).unwrap();
        client.set_nonblocking(true).unwrap();
        let mut client_poll = Poll::new(&hosts.a);
        client_poll.register_for(&client, Token(7), Interest::Writable).unwrap();
        let mut ready = Vec::new();
        let poll_timeout = Some(Duration::from_millis(1));
        let mut wait = |poll: &Poll, other: &Net| {
            for _ in 0..10_000 {
                other.run_once().unwrap();
                poll.wait(&mut ready, poll_timeout).unwrap();
                if !ready.is_empty() {
                    return ready.clone();
                }
            }
            panic!("no socket became ready");
        };
        let wait_once = |poll: &Poll| {
            let mut ready = Vec::new();
            poll.wait(&mut ready, poll_timeout).unwrap();
            ready
        };
        assert_eq!(wait(&client_poll, &hosts.b), [Token(7)]);
        assert_eq!(wait(&poll, &hosts.a), [Token(0)]);
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        poll.register(&server, Token(3)).unwrap();
        // The peer does not read, so the buffers fill up.
        let mut written = 0;
        while let Ok(len) = client.send(&[5; 1000]) {
            written += len;
            for net in [&hosts.b, &hosts.a] {
                net.run_once().unwrap();
            }
        }
        if hosts.a.is_attached() {
            // There is space again once the daemon has taken data from the application.
            while let [Token(7)] = wait_once(&client_poll)[..]
                && let Ok(len) = client.send(&[5; 1000])
            {
                written += len;
            }
        }
        // An attachment adds buffers on the way to and from the daemon.
        let buffers = if hosts.a.is_attached() { 5 } else { 3 };
        assert!((4096..=buffers * 4096).contains(&written), "{written}");
        client_poll.reregister(&client, Token(8), Interest::Writable).unwrap();
        let mut none = Vec::new();
        if !hosts.a.is_attached() {
            client_poll.wait(&mut none, poll_timeout).unwrap();
            assert_eq!(none, []);
        }
        let mut buf = vec![0; 10_000];
        let mut read = 0;
        while read < written {
            assert_eq!(wait(&poll, &hosts.a), [Token(3)]);
            read += server.recv(&mut buf).unwrap();
        }
        assert_eq!(wait(&client_poll, &hosts.b), [Token(8)]);
        assert_eq!(server.info().unwrap().state, TcpState::Established);
        drop(client);
        assert_eq!(wait(&poll, &hosts.a), [Token(3)]);
        assert_eq!(server.recv(&mut buf).unwrap(), 0);
        drop(server);
        poll.wait(&mut none, poll_timeout).unwrap();
        assert_eq!(none, [], "a closed socket leaves the set");
    });
}

#[test]
fn many_connections_at_once() {
    on_both_families(|hosts, to| {
        let listener = TcpListener::bind(&hosts.b, to).unwrap();
        let server = thread::spawn(move || {
            let serve = |stream: TcpStream| {
                thread::spawn(move || {
                    let mut stream = with_timeouts(stream);
                    let mut received = Vec::new();
                    stream.read_to_end(&mut received).unwrap();
                    stream.write_all(&received).unwrap();
                })
            };
            let threads: Vec<_> =
                listener.incoming().take(20).map(|stream| serve(stream.unwrap())).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let clients: Vec<_> = (0..20_u8)
            .map(|n| {
                let net = hosts.a.clone();
                thread::spawn(move || {
                    let mut stream = with_timeouts(TcpStream::connect(&net, to).unwrap());
                    let sent = vec![n; 5000 + usize::from(n)];
                    stream.write_all(&sent).unwrap();
                    stream.shutdown(Shutdown::Write).unwrap();
                    let mut received = Vec::new();
                    stream.read_to_end(&mut received).unwrap();
                    assert!(received == sent, "client {n}");
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        server.join().unwrap();
    });
}
