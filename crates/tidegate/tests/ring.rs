//! Rings: operations on many sockets, embedded and attached, on both families.

mod two_hosts;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use tidegate::ring::{BufferIndex, Completion, Ring, RingConfig, SocketKey, Submission};
use tidegate::{Net, TcpListener, TcpStream, UdpSocket};
use two_hosts::FAMILIES;

const TIMEOUT: Duration = Duration::from_secs(20);
const CANCELED: Option<i32> = Some(125);
const NO_BUFFERS: Option<i32> = Some(105);
const NO_ENTRY: Option<i32> = Some(2);
const TOO_MANY_FILES: Option<i32> = Some(24);

/// Runs `check` on both families, with embedded stacks and with daemons. It gets addresses of the
/// second host.
fn on_both_families(check: impl Fn([Net; 2], SocketAddr)) {
    for [_, b] in FAMILIES {
        let address = SocketAddr::new(b.parse().unwrap(), 7);
        two_hosts::in_both_forms(1024, |nets| check(nets, address));
    }
}

/// Address of the first host, in the family of an address of the second.
fn own_address(to: SocketAddr) -> &'static str {
    FAMILIES[usize::from(to.is_ipv6())][0]
}

fn ring(net: &Net) -> Ring {
    Ring::new(net, RingConfig::default()).unwrap()
}

/// Waits for one completion and takes it.
fn next(ring: &mut Ring) -> Completion {
    assert!(ring.submit_and_wait(1, Some(TIMEOUT)).unwrap() > 0, "timed out: {ring:?}");
    ring.completion().unwrap()
}

/// Like [`next`], while no thread waits on the other host, which runs in between.
fn next_beside(ring: &mut Ring, other: &Net) -> Completion {
    let started = Instant::now();
    while ring.submit_and_wait(0, None).unwrap() == 0 {
        assert!(started.elapsed() < TIMEOUT, "timed out: {ring:?}");
        other.run_once().unwrap();
    }
    ring.completion().unwrap()
}

/// Takes a buffer and fills its beginning.
fn filled(ring: &mut Ring, bytes: &[u8]) -> BufferIndex {
    let buffer = ring.take_buffer().unwrap();
    ring.buffer_mut(buffer)[..bytes.len()].copy_from_slice(bytes);
    buffer
}

fn send(ring: &mut Ring, socket: SocketKey, bytes: &[u8]) {
    let buffer = filled(ring, bytes);
    ring.push(Submission::send(socket, buffer, bytes.len()).skip_success()).unwrap();
}

fn received<'r>(ring: &'r Ring, completion: &Completion) -> &'r [u8] {
    let len = *completion.result.as_ref().unwrap();
    &ring.buffer(completion.buffer.unwrap())[..len]
}

fn error_of(completion: &Completion) -> &std::io::Error {
    completion.result.as_ref().unwrap_err()
}

/// Connects the first host to the second.
fn pair([a, b]: &[Net; 2], to: SocketAddr) -> [TcpStream; 2] {
    let listener = TcpListener::bind(b, to).unwrap();
    let accepting = thread::spawn(move || listener.accept().unwrap().0);
    [TcpStream::connect(a, to).unwrap(), accepting.join().unwrap()]
}

#[test]
fn echoes_datagrams_of_many_sockets() {
    const SOCKETS: u64 = 40;
    const ROUNDS: u64 = 5;
    on_both_families(|[a, b], to| {
        let servers: Vec<UdpSocket> =
            (0..SOCKETS).map(|n| UdpSocket::bind(&b, (to.ip(), 100 + n as u16)).unwrap()).collect();
        let serving = thread::spawn(move || {
            let mut ring = ring(&b);
            let servers: Vec<SocketKey> =
                servers.into_iter().map(|server| ring.add(server).unwrap()).collect();
            for (n, &server) in servers.iter().enumerate() {
                ring.push(Submission::recv(server).multishot().user_data(n as u64)).unwrap();
            }
            let mut echoed = 0;
            while echoed < SOCKETS * ROUNDS {
                ring.submit_and_wait(1, Some(TIMEOUT)).unwrap();
                while let Some(completion) = ring.completion() {
                    assert!(completion.has_more, "{completion:?}");
                    let (len, from) = (completion.result.unwrap(), completion.from.unwrap());
                    let buffer = completion.buffer.unwrap();
                    assert_eq!(ring.buffer(buffer)[0], completion.user_data as u8);
                    let server = servers[completion.user_data as usize];
                    let reply = Submission::send_to(server, buffer, len, from);
                    ring.push(reply.skip_success()).unwrap();
                    echoed += 1;
                }
            }
            ring.submit().unwrap();
            assert_eq!(ring.in_flight() as u64, SOCKETS);
        });
        let mut ring = ring(&a);
        let clients: Vec<SocketKey> = (0..SOCKETS)
            .map(|n| {
                let socket = UdpSocket::bind(&a, (own_address(to), 0)).unwrap();
                socket.connect((to.ip(), 100 + n as u16)).unwrap();
                ring.add(socket).unwrap()
            })
            .collect();
        for round in 0..ROUNDS {
            for (n, &client) in clients.iter().enumerate() {
                send(&mut ring, client, &[n as u8, round as u8]);
                ring.push(Submission::recv(client).user_data(n as u64)).unwrap();
            }
            let mut seen = BTreeMap::new();
            while seen.len() < clients.len() {
                let completion = next(&mut ring);
                let n = completion.user_data;
                assert_eq!(received(&ring, &completion), [n as u8, round as u8]);
                assert_eq!(completion.from.unwrap(), SocketAddr::new(to.ip(), 100 + n as u16));
                assert!(!completion.has_more && !completion.is_truncated);
                ring.release_buffer(completion.buffer.unwrap());
                assert!(seen.insert(n, ()).is_none());
            }
        }
        serving.join().unwrap();
        assert_eq!(ring.in_flight(), 0);
    });
}

#[test]
fn accepts_connects_sends_and_closes() {
    const CONNECTIONS: usize = 4;
    // More than the send buffer of a connection holds.
    const BYTES: usize = 3 << 20;
    const CLOSED: u64 = u64::MAX;
    on_both_families(|[a, b], to| {
        let listener = TcpListener::bind(&b, to).unwrap();
        let serving = thread::spawn(move || {
            let mut ring = ring(&b);
            let listener = ring.add(listener).unwrap();
            ring.push(Submission::accept(listener).multishot().user_data(u64::MAX)).unwrap();
            let mut connections = Vec::new();
            let mut received_bytes = Vec::new();
            let mut ended = 0;
            while ended < CONNECTIONS {
                let completion = next(&mut ring);
                if completion.user_data == u64::MAX {
                    assert!(completion.has_more && completion.from.is_some());
                    let socket = completion.accepted.unwrap();
                    let recv = Submission::recv(socket).multishot();
                    ring.push(recv.user_data(connections.len() as u64)).unwrap();
                    connections.push(socket);
                    received_bytes.push(0);
                    continue;
                }
                let n = completion.user_data as usize;
                let Some(buffer) = completion.buffer else {
                    assert!(matches!(completion.result, Ok(0)) && !completion.has_more);
                    assert_eq!(received_bytes[n], BYTES);
                    ring.push(Submission::close(connections[n]).skip_success()).unwrap();
                    ended += 1;
                    continue;
                };
                for &byte in received(&ring, &completion) {
                    assert_eq!(byte, pattern(received_bytes[n]));
                    received_bytes[n] += 1;
                }
                ring.release_buffer(buffer);
            }
            ring.submit().unwrap();
            assert_eq!(ring.in_flight(), 1, "the accept");
        });
        let config = RingConfig::default().buffers(3 * CONNECTIONS as u32, BYTES as u32 / 3);
        let mut ring = Ring::new(&a, config).unwrap();
        (0..CONNECTIONS).for_each(|_| ring.push(Submission::connect(to)).unwrap());
        assert_eq!(ring.submit().unwrap(), CONNECTIONS);
        let data: Vec<u8> = (0..BYTES).map(pattern).collect();
        let mut connections = Vec::new();
        let (mut sent, mut closed) = (0, 0);
        while closed < CONNECTIONS {
            let completion = next(&mut ring);
            let result = completion.result.unwrap();
            if completion.user_data == 0 {
                let socket = completion.socket.unwrap();
                connections.push(socket);
                // Three sends at once: they leave in order, each as a whole, and before the end.
                let n = connections.len() as u64;
                for piece in data.chunks(BYTES / 3) {
                    let buffer = filled(&mut ring, piece);
                    let send = Submission::send(socket, buffer, piece.len());
                    ring.push(send.user_data(n)).unwrap();
                }
                ring.push(Submission::close(socket).user_data(CLOSED)).unwrap();
            } else if completion.user_data != CLOSED {
                assert_eq!(result, BYTES / 3);
                ring.release_buffer(completion.buffer.unwrap());
                sent += 1;
            } else {
                closed += 1;
                assert!(sent >= 3 * closed);
            }
        }
        while !serving.is_finished() {
            a.run_once().unwrap();
        }
        serving.join().unwrap();
    });
}

fn pattern(index: usize) -> u8 {
    (index % 251) as u8
}

#[test]
fn errors_are_completions() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, SocketAddr::new(to.ip(), 9));
        let [a, b] = &nets;
        let mut ring = ring(a);
        // Nobody listens.
        ring.push(Submission::connect(to).user_data(5)).unwrap();
        let refused = next_beside(&mut ring, b);
        assert_eq!(refused.user_data, 5);
        assert_eq!(error_of(&refused).kind(), ErrorKind::ConnectionRefused);
        assert!(refused.socket.is_none());

        let stream = ring.add(client).unwrap();
        ring.push(Submission::finish_connect(stream)).unwrap();
        assert_eq!(next(&mut ring).result.unwrap(), 0);
        ring.push(Submission::recv(stream)).unwrap();
        ring.submit().unwrap();
        server.set_reset_on_close(true);
        drop(server);
        assert_eq!(error_of(&next(&mut ring)).kind(), ErrorKind::ConnectionReset);

        // Kinds of sockets, and sockets that are gone.
        let udp = ring.add(UdpSocket::bind(a, (own_address(to), 0)).unwrap()).unwrap();
        ring.push(Submission::accept(udp)).unwrap();
        assert_eq!(error_of(&next(&mut ring)).kind(), ErrorKind::Unsupported);
        send(&mut ring, udp, b"to whom");
        let failed = next(&mut ring);
        assert_eq!(error_of(&failed).kind(), ErrorKind::NotConnected);
        ring.release_buffer(failed.buffer.expect("a failed send returns its buffer"));
        ring.push(Submission::recv(udp).user_data(6)).unwrap();
        ring.push(Submission::close(udp).user_data(7)).unwrap();
        let cancelled = next(&mut ring);
        assert_eq!((cancelled.user_data, error_of(&cancelled).raw_os_error()), (6, CANCELED));
        assert_eq!(next(&mut ring).user_data, 7);
        assert!(ring.socket(udp).is_none() && ring.remove(udp).is_none());
        assert!(ring.remove(stream).is_some());
        ring.push(Submission::recv(udp)).unwrap();
        assert_eq!(error_of(&next(&mut ring)).kind(), ErrorKind::NotConnected);
        assert_eq!(ring.in_flight(), 0);
    });
}

#[test]
fn cancels_what_is_in_flight() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        let mut ring = ring(&nets[0]);
        let stream = ring.add(client).unwrap();
        // The peer does not read: the send stops in the middle.
        let mut sends = 0;
        while ring.in_flight() == 0 {
            let buffer = ring.take_buffer().unwrap();
            ring.push(Submission::send(stream, buffer, 2_048).user_data(1).skip_success()).unwrap();
            ring.submit().unwrap();
            sends += 1;
            assert!(sends < 20_000);
        }
        ring.push(Submission::recv(stream).user_data(2).multishot()).unwrap();
        ring.push(Submission::cancel(1).user_data(3)).unwrap();
        ring.push(Submission::cancel(2).user_data(4)).unwrap();
        ring.push(Submission::cancel(2).user_data(5)).unwrap();
        assert_eq!(ring.submit().unwrap(), 4);
        let sent = next(&mut ring);
        assert_eq!(sent.user_data, 1);
        match sent.result {
            Ok(len) => assert!((1..2_048).contains(&len)),
            Err(error) => assert_eq!(error.raw_os_error(), CANCELED),
        }
        ring.release_buffer(sent.buffer.unwrap());
        let cancels = next(&mut ring);
        assert_eq!((cancels.user_data, cancels.result.unwrap()), (3, 1));
        let cancelled = next(&mut ring);
        assert_eq!((cancelled.user_data, error_of(&cancelled).raw_os_error()), (2, CANCELED));
        assert!(!cancelled.has_more);
        assert_eq!(next(&mut ring).result.unwrap(), 1);
        let nothing = next(&mut ring);
        assert_eq!((nothing.user_data, error_of(&nothing).raw_os_error()), (5, NO_ENTRY));
        assert_eq!(ring.in_flight(), 0);
        drop(server);
    });
}

#[test]
fn full_ring_is_an_error_and_loses_nothing() {
    on_both_families(|[a, _b], to| {
        let config = RingConfig::default().entries(4).buffers(2, 64).sockets(2);
        let mut ring = Ring::new(&a, config).unwrap();
        let own = SocketAddr::new(own_address(to).parse().unwrap(), 70);
        let udp = UdpSocket::bind(&a, own).unwrap();
        let socket = ring.add(udp.clone()).unwrap();
        assert_eq!(ring.add(udp).unwrap_err().kind(), ErrorKind::AlreadyExists);
        let listener = ring.add(TcpListener::bind(&a, own).unwrap()).unwrap();
        let third = UdpSocket::bind(&a, (own.ip(), 0)).unwrap();
        assert_eq!(ring.add(third).unwrap_err().raw_os_error(), TOO_MANY_FILES);
        ring.push(Submission::accept(listener)).unwrap();
        assert_eq!(error_of(&next(&mut ring)).raw_os_error(), TOO_MANY_FILES);

        (0..4).for_each(|n| ring.push(Submission::recv(socket).user_data(n)).unwrap());
        let full = ring.push(Submission::nop()).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::ResourceBusy);
        assert_eq!(ring.submit().unwrap(), 4);
        // All are in flight: one more waits, and what ends them overtakes it.
        ring.push(Submission::recv(socket).user_data(4)).unwrap();
        assert_eq!(ring.submit().unwrap_err().kind(), ErrorKind::ResourceBusy);
        ring.push(Submission::cancel(0).user_data(9)).unwrap();
        assert_eq!(ring.submit().unwrap(), 1);
        assert_eq!(next(&mut ring).user_data, 0);
        assert_eq!(next(&mut ring).user_data, 9);
        assert_eq!(ring.in_flight(), 4);

        // Receives without a free buffer wait for one.
        let held = [ring.take_buffer().unwrap(), ring.take_buffer().unwrap()];
        assert!(ring.take_buffer().is_none());
        let sender = UdpSocket::bind(&a, (own.ip(), 0)).unwrap();
        (0..4).for_each(|n| assert_eq!(sender.send_to(&[n; 70], own).unwrap(), 70));
        let error = ring.submit_and_wait(1, Some(TIMEOUT)).unwrap_err();
        assert_eq!(error.raw_os_error(), NO_BUFFERS);
        assert_eq!(ring.in_flight(), 4);
        held.into_iter().for_each(|buffer| ring.release_buffer(buffer));
        for n in 0..4 {
            let completion = next(&mut ring);
            assert_eq!(received(&ring, &completion), [n; 64]);
            assert_eq!(completion.user_data, u64::from(n) + 1);
            assert!(completion.is_truncated);
            ring.release_buffer(completion.buffer.unwrap());
        }
        assert_eq!(ring.in_flight(), 0);
    });
}

#[test]
fn completions_of_a_multishot_receive_have_a_limit() {
    on_both_families(|[a, _b], to| {
        const DATAGRAMS: u8 = 40;
        let mut ring = Ring::new(&a, RingConfig::default().entries(4).buffers(64, 64)).unwrap();
        let own = SocketAddr::new(own_address(to).parse().unwrap(), 70);
        let socket = ring.add(UdpSocket::bind(&a, own).unwrap()).unwrap();
        let sender = UdpSocket::bind(&a, (own.ip(), 0)).unwrap();
        (0..DATAGRAMS).for_each(|n| _ = sender.send_to(&[n], own).unwrap());
        ring.push(Submission::recv(socket).multishot()).unwrap();
        for n in 0..DATAGRAMS {
            assert!(ring.submit_and_wait(1, Some(TIMEOUT)).unwrap() < 8);
            let completion = ring.completion().unwrap();
            assert_eq!(received(&ring, &completion), [n]);
            ring.release_buffer(completion.buffer.unwrap());
        }
        assert_eq!(ring.submit_and_wait(1, Some(Duration::ZERO)).unwrap(), 0);
    });
}

#[test]
fn sends_only_buffers_that_the_program_holds() {
    let [a, b] = two_hosts::open(256, |config| config);
    let mut ring = ring(&a);
    let socket = UdpSocket::bind(&a, "192.0.2.1:70").unwrap();
    socket.connect("192.0.2.1:71").unwrap();
    let socket = ring.add(socket).unwrap();
    let held = ring.take_buffer().unwrap();
    let mut refused = |buffer, len| {
        ring.push(Submission::send(socket, buffer, len)).map_err(|error| error.kind())
    };
    assert_eq!(refused(held, 2_049), Err(ErrorKind::InvalidInput));
    assert_eq!(refused(BufferIndex(u32::MAX), 1), Err(ErrorKind::InvalidInput));
    assert_eq!(refused(BufferIndex(held.0 + 1), 1), Err(ErrorKind::InvalidInput), "a free one");
    assert_eq!(refused(held, 2_048), Ok(()));
    assert_eq!(refused(held, 2_048), Err(ErrorKind::InvalidInput), "twice");
    // A buffer of a send cannot be freed under it.
    ring.release_buffer(held);
    assert!((1..256).all(|_| ring.take_buffer().is_some_and(|other| other != held)));
    assert!(ring.take_buffer().is_none());
    assert_eq!(next(&mut ring).buffer, Some(held));
    let other = UdpSocket::bind(&b, "192.0.2.2:70").unwrap();
    assert_eq!(ring.add(other).unwrap_err().kind(), ErrorKind::InvalidInput);
    for bad in [RingConfig::default().entries(0), RingConfig::default().buffers(1, u32::MAX)] {
        let error = Ring::new(&a, bad).unwrap_err();
        assert!(error.to_string().contains("choose 1 to"), "{error}");
    }
    let error = ring.submit_and_wait(257, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn end_of_the_daemon_completes_what_is_in_flight() {
    let daemons = two_hosts::daemons(256, 1);
    let [a, _b] = daemons.attach();
    let mut ring = ring(&a);
    let udp = ring.add(UdpSocket::bind(&a, "192.0.2.1:70").unwrap()).unwrap();
    let listener = ring.add(TcpListener::bind(&a, "192.0.2.1:70").unwrap()).unwrap();
    ring.push(Submission::recv(udp).multishot()).unwrap();
    ring.push(Submission::accept(listener)).unwrap();
    ring.submit().unwrap();
    drop(daemons);
    for _ in 0..2 {
        assert_eq!(error_of(&next(&mut ring)).kind(), ErrorKind::ConnectionAborted);
    }
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn closed_receive_direction_ends_a_receive() {
    on_both_families(|[a, _b], to| {
        let mut ring = ring(&a);
        let udp = UdpSocket::bind(&a, (own_address(to), 70)).unwrap();
        let socket = ring.add(udp.clone()).unwrap();
        ring.push(Submission::recv(socket)).unwrap();
        ring.submit().unwrap();
        udp.shutdown(std::net::Shutdown::Both);
        assert_eq!(error_of(&next(&mut ring)).kind(), ErrorKind::UnexpectedEof);
        let buffer = ring.take_buffer().unwrap();
        ring.push(Submission::send(socket, buffer, 1)).unwrap();
        assert_eq!(error_of(&next(&mut ring)).kind(), ErrorKind::BrokenPipe);
    });
}

#[test]
fn wait_closes_the_socket_whose_sends_end_meanwhile() {
    on_both_families(|nets, to| {
        let [client, server] = pair(&nets, to);
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        let [a, _b] = &nets;
        let config = RingConfig::default().buffers(4, 1 << 20);
        let mut ring = Ring::new(a, config).unwrap();
        let stream = ring.add(client).unwrap();
        for _ in 0..3 {
            let buffer = ring.take_buffer().unwrap();
            ring.push(Submission::send(stream, buffer, 1 << 20).skip_success()).unwrap();
        }
        ring.push(Submission::close(stream).skip_success()).unwrap();
        let idle = ring.add(UdpSocket::bind(a, (own_address(to), 70)).unwrap()).unwrap();
        ring.push(Submission::recv(idle)).unwrap();
        let waiting = thread::spawn(move || next(&mut ring).result.unwrap());
        let (mut total, mut bytes) = (0, vec![0; 1 << 16]);
        // The end of the stream comes although the wait has no completion.
        while let len @ 1.. = server.recv(&mut bytes).unwrap() {
            total += len;
        }
        assert_eq!(total, 3 << 20);
        let other = UdpSocket::bind(a, (own_address(to), 0)).unwrap();
        other.send_to(b"end", (own_address(to), 70)).unwrap();
        assert_eq!(waiting.join().unwrap(), 3);
    });
}
