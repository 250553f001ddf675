//! TCP sockets of two hosts in one process, joined by a wire in memory.

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

const LIMIT: Duration = Duration::from_secs(20);

/// On both families, with the stacks here and in daemons.
fn on_both_families(check: impl Fn(Hosts, SocketAddr)) {
    for [_, b] in FAMILIES {
        let address = SocketAddr::new(b.parse().unwrap(), 7);
        two_hosts::in_both_forms(1024, |[a, b]| check(Hosts { a, b }, address));
    }
}

/// A stream whose calls end, so that what is lost fails the test.
fn limited(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Sends everything back on one connection, until its end.
fn echo(listener: TcpListener) -> thread::JoinHandle<u64> {
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut stream = limited(stream);
        let (mut buf, mut total) = (vec![0; 10_000], 0);
        loop {
            let len = stream.read(&mut buf).unwrap();
            if len == 0 {
                stream.shutdown(Shutdown::Write).unwrap();
                // Until the peer has everything: nobody else runs this stack, and
                // the last segments may have to go out again.
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
fn a_stream_comes_back_whole_and_ends() {
    on_both_families(|hosts, to| {
        let server = echo(TcpListener::bind(&hosts.b, ("::", to.port())).unwrap());
        let mut stream = limited(TcpStream::connect(&hosts.a, to).unwrap());
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
fn what_was_written_arrives_though_the_program_drops_everything() {
    on_both_families(|hosts, to| {
        let listener = TcpListener::bind(&hosts.b, to).unwrap();
        let server = thread::spawn(move || {
            let mut received = Vec::new();
            limited(listener.accept().unwrap().0).read_to_end(&mut received).unwrap();
            received.len()
        });
        let Hosts { a, b: _b } = hosts;
        let stream = limited(TcpStream::connect(&a, to).unwrap());
        let written = (&stream).write(&[1; 200_000]).unwrap();
        drop(stream);
        drop(a);
        assert_eq!(server.join().unwrap(), written);
    });
}

#[test]
fn nobody_listens() {
    on_both_families(|hosts, to| {
        let refused = AtomicBool::new(false);
        thread::scope(|scope| {
            // The answer is a reset: one frame, after those of the resolution.
            scope.spawn(|| {
                while !refused.load(Ordering::Relaxed) {
                    hosts.b.run_once().unwrap();
                }
            });
            let error = TcpStream::connect_timeout(&hosts.a, to, LIMIT);
            refused.store(true, Ordering::Relaxed);
            assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        });
        if hosts.b.is_attached() {
            // A daemon answers by itself.
            return;
        }
        // Nobody even answers.
        let limit = Duration::from_millis(20);
        let error = TcpStream::connect_timeout(&hosts.a, to, limit).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    });
}

#[test]
fn a_dropped_listener_and_an_abrupt_end_reset() {
    on_both_families(|hosts, to| {
        let listener = TcpListener::bind(&hosts.b, to).unwrap();
        let error = TcpListener::bind(&hosts.b, to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        // A connect that is reset before it returns fails itself.
        let (connected, is_connected) = mpsc::channel();
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            stream.set_abrupt(true);
            is_connected.recv().unwrap();
            drop(stream);
        });
        let stream = limited(TcpStream::connect(&hosts.a, to).unwrap());
        connected.send(()).unwrap();
        let error = stream.recv(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        server.join().unwrap();
    });
}

#[test]
fn readiness_tells_of_connections_data_and_room() {
    on_both_families(|hosts, to| {
        let options = TcpOptions { receive_buffer_bytes: 4096, ..TcpOptions::default() };
        let listener = TcpListener::bind_with(&hosts.b, to, 4, options).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut poll = Poll::new(&hosts.b);
        poll.register(&listener, Token(0)).unwrap();
        assert_eq!(
            poll.register(&listener, Token(1)).unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        let options = TcpOptions { send_buffer_bytes: 4096, ..TcpOptions::default() };
        let client = TcpStream::connect_nonblocking(&hosts.a, to, options).unwrap();
        client.set_nonblocking(true).unwrap();
        let mut client_poll = Poll::new(&hosts.a);
        client_poll.register_for(&client, Token(7), Interest::Writable).unwrap();
        let mut ready = Vec::new();
        let turn = Some(Duration::from_millis(1));
        let mut wait = |poll: &Poll, other: &Net| {
            for _ in 0..10_000 {
                other.run_once().unwrap();
                poll.wait(&mut ready, turn).unwrap();
                if !ready.is_empty() {
                    return ready.clone();
                }
            }
            panic!("nothing becomes ready");
        };
        let wait_once = |poll: &Poll| {
            let mut ready = Vec::new();
            poll.wait(&mut ready, turn).unwrap();
            ready
        };
        assert_eq!(wait(&client_poll, &hosts.b), [Token(7)]);
        assert_eq!(wait(&poll, &hosts.a), [Token(0)]);
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        poll.register(&server, Token(3)).unwrap();
        // The peer does not read, so there is room for so much only.
        let mut written = 0;
        while let Ok(len) = client.send(&[5; 1000]) {
            written += len;
            for net in [&hosts.b, &hosts.a] {
                net.run_once().unwrap();
            }
        }
        if hosts.a.is_attached() {
            // What the daemon takes from the program makes room once more.
            while let [Token(7)] = wait_once(&client_poll)[..]
                && let Ok(len) = client.send(&[5; 1000])
            {
                written += len;
            }
        }
        // On the way to a daemon and from one as much again finds room.
        let buffers = if hosts.a.is_attached() { 5 } else { 3 };
        assert!((4096..=buffers * 4096).contains(&written), "{written}");
        client_poll.reregister(&client, Token(8), Interest::Writable).unwrap();
        let mut none = Vec::new();
        if !hosts.a.is_attached() {
            client_poll.wait(&mut none, turn).unwrap();
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
        poll.wait(&mut none, turn).unwrap();
        assert_eq!(none, [], "what is closed has left the set");
    });
}

#[test]
fn many_connections_at_once() {
    on_both_families(|hosts, to| {
        let listener = TcpListener::bind(&hosts.b, to).unwrap();
        let server = thread::spawn(move || {
            let serve = |stream: TcpStream| {
                thread::spawn(move || {
                    let mut stream = limited(stream);
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
                    let mut stream = limited(TcpStream::connect(&net, to).unwrap());
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
