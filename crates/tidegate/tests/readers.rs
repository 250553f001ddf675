//! Several readers of one socket, on an in-memory link.

use std::collections::{BTreeSet, HashMap};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tidegate::gate::{Config, Mode, Quota, Settings};
use tidegate::mem::{MemConfig, wire};
use tidegate::{
    Distribution, DropReason, FrameSize, Limits, Net, NetConfig, OpenError, ReadersConfig,
    UdpReader, UdpSocket, wait_readable,
};

const TIMEOUT: Duration = Duration::from_secs(20);
const ADDRESSES: [[&str; 2]; 2] =
    [["192.0.2.1", "192.0.2.2:7"], ["2001:db8::1", "[2001:db8::2]:7"]];

fn config(device: tidegate::mem::MemDevice, host: u8) -> NetConfig {
    NetConfig::new(device)
        .address(format!("192.0.2.{host}/24").parse().unwrap())
        .address(format!("2001:db8::{host}/64").parse().unwrap())
        .frames(4096, FrameSize::K2)
        .limits(Limits::default().socket_queue_packets(2048))
        .hugepages(false)
        .seed([7; 16])
}

/// A client and a server, each with stack threads of its own; `None` where real-time
/// priorities are not permitted.
fn hosts(mode: Mode) -> Option<(Net, Net)> {
    let (a, b) = wire(&MemConfig::default()).unwrap();
    let gate = Settings::new(Config::default().mode(mode)).unwrap();
    let server = match Net::open(config(b, 2).gate(gate).own_thread(true)) {
        Ok(server) => server,
        Err(OpenError::Io(error)) if error.kind() == ErrorKind::PermissionDenied => {
            tidegate_needs::skip("real-time priorities", error);
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    Some((Net::open(config(a, 1).own_thread(true)).unwrap(), server))
}

fn polled_hosts() -> (Net, Net) {
    hosts(Mode::Polled).expect("mode polled needs no privileges")
}

fn client(net: &Net, ip: &str) -> UdpSocket {
    let socket = UdpSocket::bind(net, (ip, 0)).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.set_write_timeout(Some(TIMEOUT)).unwrap();
    socket
}

/// Echoes until `stop`; returns the number of echoed datagrams.
fn echo(mut reader: UdpReader, stop: &AtomicBool) -> usize {
    reader.set_read_timeout(Some(Duration::from_millis(20)));
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let echoed = reader.exchange(|request, _, reply| {
            reply[..request.len()].copy_from_slice(request);
            Some(request.len())
        });
        match echoed {
            Ok(echoed) => count += echoed,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    count
}

/// Stops the echo threads on drop, also when the test fails: the scope could not end otherwise.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends one datagram from each client and receives each echo.
fn round_trip(clients: &[UdpSocket], to: &str, payload: &[u8]) {
    let to: SocketAddr = to.parse().unwrap();
    for client in clients {
        client.send_to(payload, to).unwrap();
    }
    for client in clients {
        let mut buf = [0; 64];
        let (len, from) = client.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..len], from), (payload, to));
    }
}

#[test]
fn replies_to_all_clients_in_every_mode_and_distribution() {
    for mode in Mode::ALL {
        let Some((a, b)) = hosts(mode) else { continue };
        for [ip, to] in ADDRESSES {
            let clients: Vec<_> = (0..8).map(|_| client(&a, ip)).collect();
            for distribution in
                [Distribution::FlowHash, Distribution::RoundRobin, Distribution::LeastLoaded]
            {
                let socket = UdpSocket::bind(&b, to).unwrap();
                let readers =
                    socket.readers(ReadersConfig::default().distribution(distribution)).unwrap();
                let stop = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    let end = StopAtEnd(&stop);
                    let reading: Vec<_> = (0..3)
                        .map(|_| readers.add().unwrap())
                        .map(|reader| scope.spawn(|| echo(reader, &stop)))
                        .collect();
                    assert_eq!(readers.count(), 3);
                    for round in 0..20u8 {
                        round_trip(&clients, to, &[round; 33]);
                    }
                    drop(end);
                    let counts: Vec<_> = reading.into_iter().map(|r| r.join().unwrap()).collect();
                    assert_eq!(counts.iter().sum::<usize>(), 8 * 20, "{mode:?} {distribution:?}");
                    if distribution == Distribution::RoundRobin {
                        assert!(counts.iter().all(|&count| count >= 50), "{counts:?}");
                    }
                });
                assert_eq!(readers.count(), 0);
            }
        }
    }
}

/// Datagrams that a reader received: port of the peer and number.
fn drain(reader: &mut UdpReader) -> Vec<(u16, u32)> {
    reader.set_nonblocking(true);
    let mut got = Vec::new();
    let mut buf = [0; 64];
    while let Ok(received) = reader.recv_from(&mut buf) {
        let number = u32::from_be_bytes(buf[..4].try_into().unwrap());
        got.push((received.from.port(), number));
    }
    got
}

/// Waits until the server has received this number of datagrams.
fn wait_until_received(server: &Net, datagrams: u64) {
    let received = || {
        let counters = server.counters().stack;
        counters.delivered + counters.drops.get(DropReason::SocketQueueFull)
    };
    let started = std::time::Instant::now();
    while received() < datagrams {
        assert!(started.elapsed() < TIMEOUT, "{} of {datagrams} arrived", received());
        std::thread::yield_now();
    }
}

/// Makes the hosts resolve each other, through a separate socket.
fn resolve_neighbours(a: &Net, b: &Net, ip: &str, to: &str) {
    let mut to: SocketAddr = to.parse().unwrap();
    to.set_port(9);
    let server = UdpSocket::bind(b, to).unwrap();
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    let client = client(a, ip);
    client.send_to(b"hello", to).unwrap();
    let (_, from) = server.recv_from(&mut [0; 8]).unwrap();
    server.send_to(b"hello", from).unwrap();
    client.recv_from(&mut [0; 8]).unwrap();
}

#[test]
fn flow_hash_keeps_each_flow_on_one_reader_in_order() {
    for [ip, to] in ADDRESSES {
        let (a, b) = polled_hosts();
        resolve_neighbours(&a, &b, ip, to);
        let readers = UdpSocket::bind(&b, to).unwrap().readers(ReadersConfig::default()).unwrap();
        let mut handles: Vec<_> = (0..4).map(|_| readers.add().unwrap()).collect();
        let clients: Vec<_> = (0..32).map(|_| client(&a, ip)).collect();
        for number in 0..5u32 {
            for client in &clients {
                client.send_to(&number.to_be_bytes(), to).unwrap();
            }
        }
        wait_until_received(&b, 1 + 32 * 5);
        let mut owner = HashMap::new();
        for (reader, handle) in handles.iter_mut().enumerate() {
            let got = drain(handle);
            let mut next: HashMap<u16, u32> = HashMap::new();
            for (peer, number) in got {
                let expected = next.entry(peer).or_default();
                assert_eq!(number, *expected, "reader {reader}, peer {peer}");
                *expected += 1;
                assert_eq!(*owner.entry(peer).or_insert(reader), reader);
            }
            assert!(next.values().all(|&count| count == 5));
        }
        assert_eq!(owner.len(), 32);
        assert!(
            owner.values().collect::<BTreeSet<_>>().len() > 1,
            "all peers have the same reader"
        );
    }
}

#[test]
fn enforces_exact_queue_limits_and_counts_drops() {
    for [ip, to] in ADDRESSES {
        for (queue_packets, queue_bytes, fits) in [(10, 1 << 20, 10), (100, 40, 4)] {
            let (a, b) = polled_hosts();
            resolve_neighbours(&a, &b, ip, to);
            let config =
                ReadersConfig::default().queue_packets(queue_packets).queue_bytes(queue_bytes);
            let readers = UdpSocket::bind(&b, to).unwrap().readers(config).unwrap();
            let mut reader = readers.add().unwrap();
            let client = client(&a, ip);
            for number in 0..50u32 {
                let mut payload = [0; 10];
                payload[..4].copy_from_slice(&number.to_be_bytes());
                client.send_to(&payload, to).unwrap();
            }
            wait_until_received(&b, 1 + 50);
            let full = b.counters().stack.drops.get(DropReason::SocketQueueFull);
            assert_eq!(full, 50 - fits as u64);
            let got: Vec<_> = drain(&mut reader).into_iter().map(|(_, number)| number).collect();
            assert_eq!(got, (0..fits).collect::<Vec<u32>>());
        }
    }
}

#[test]
fn adding_and_removing_readers_loses_no_datagram() {
    const PACKETS: u32 = 4_000;
    for distribution in
        [Distribution::FlowHash, Distribution::RoundRobin, Distribution::LeastLoaded]
    {
        let [ip, to] = ADDRESSES[0];
        let (a, b) = polled_hosts();
        resolve_neighbours(&a, &b, ip, to);
        let config = ReadersConfig::default()
            .distribution(distribution)
            .queue_packets(PACKETS as usize)
            .queue_bytes(1 << 30);
        let readers = UdpSocket::bind(&b, to).unwrap().readers(config).unwrap();
        let clients: Vec<_> = (0..16).map(|_| client(&a, ip)).collect();
        let mut seen = BTreeSet::new();
        let mut handles = vec![readers.add().unwrap()];
        for number in 0..PACKETS {
            let client = &clients[number as usize % clients.len()];
            client.send_to(&number.to_be_bytes(), to).unwrap();
            match number % 300 {
                0 => handles.push(readers.add().unwrap()),
                100 => seen.extend(drain(&mut handles[0]).into_iter().map(|(_, number)| number)),
                // The reader is dropped with unread datagrams.
                200 => drop(handles.swap_remove(0)),
                _ => {}
            }
        }
        wait_until_received(&b, 1 + u64::from(PACKETS));
        // The last reader takes over the unread datagrams of all others.
        while handles.len() > 1 {
            drop(handles.swap_remove(0));
        }
        seen.extend(drain(&mut handles[0]).into_iter().map(|(_, number)| number));
        assert_eq!(seen.len() as u32, PACKETS, "{distribution:?}");
        assert_eq!(b.counters().stack.drops.get(DropReason::SocketQueueFull), 0);
    }
}

#[test]
fn next_reader_gets_unread_datagrams_of_the_last() {
    let [ip, to] = ADDRESSES[1];
    let (a, b) = polled_hosts();
    resolve_neighbours(&a, &b, ip, to);
    let readers = UdpSocket::bind(&b, to).unwrap().readers(ReadersConfig::default()).unwrap();
    let first = readers.add().unwrap();
    let client = client(&a, ip);
    for number in 0..10u32 {
        client.send_to(&number.to_be_bytes(), to).unwrap();
    }
    wait_until_received(&b, 1 + 10);
    drop(first);
    let mut second = readers.add().unwrap();
    let got: Vec<u32> = drain(&mut second).into_iter().map(|(_, number)| number).collect();
    assert_eq!(got, (0..10).collect::<Vec<u32>>());
}

/// More readers than cores; one reader never reads and one panics. The other readers still
/// reply to their peers.
#[test]
fn stalled_or_panicking_reader_does_not_block_others() {
    for [ip, to] in ADDRESSES {
        let (a, b) = polled_hosts();
        resolve_neighbours(&a, &b, ip, to);
        let config =
            ReadersConfig::default().distribution(Distribution::RoundRobin).queue_packets(8);
        let readers = UdpSocket::bind(&b, to).unwrap().readers(config).unwrap();
        let _stalled = readers.add().unwrap();
        let mut panicking = readers.add().unwrap();
        let (stop, panics) = (AtomicBool::new(false), AtomicUsize::new(0));
        let clients: Vec<_> = (0..4).map(|_| client(&a, ip)).collect();
        let echo_readers = 6;
        std::thread::scope(|scope| {
            let end = StopAtEnd(&stop);
            let threads: Vec<_> = (0..echo_readers)
                .map(|_| readers.add().unwrap())
                .map(|reader| scope.spawn(|| echo(reader, &stop)))
                .collect();
            let panics = &panics;
            let panicking_thread = scope.spawn(move || {
                panicking.set_read_timeout(Some(TIMEOUT));
                let respond = |_: &[u8], _: SocketAddr, _: &mut [u8]| -> Option<usize> {
                    panics.fetch_add(1, Ordering::Relaxed);
                    panic!("on purpose")
                };
                let _ = panicking.exchange(respond);
            });
            // The first eight requests for the stalled reader get no reply. Another reader
            // replies to those left by the one that panicked.
            let mut replied = BTreeSet::new();
            let mut receive_reply = |client: &UdpSocket| {
                let mut number = [0; 8];
                if client.recv_from(&mut number).is_ok_and(|(len, _)| len == 4) {
                    replied.insert(number);
                }
                replied.len()
            };
            for number in 0..400u32 {
                let client = &clients[number as usize % clients.len()];
                client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
                client.send_to(&number.to_be_bytes(), to).unwrap();
                receive_reply(client);
            }
            // On a busy machine some replies are late.
            let started = std::time::Instant::now();
            while clients.iter().map(&mut receive_reply).max() < Some(392) {
                assert!(started.elapsed() < TIMEOUT, "more than eight requests without a reply");
            }
            assert!(panicking_thread.join().is_err());
            drop(end);
            let echoed: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert!(echoed >= 392, "{echoed}");
        });
        assert_eq!(panics.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn ten_thousand_full_reader_sockets_do_not_stall_others() {
    const SOCKETS: u16 = 10_000;
    let [ip, to] = ADDRESSES[0];
    let (a, b) = polled_hosts();
    resolve_neighbours(&a, &b, ip, to);
    let server: SocketAddr = to.parse().unwrap();
    let small = ReadersConfig::default().queue_packets(2);
    let idle: Vec<UdpReader> = (0..SOCKETS)
        .map(|n| {
            let socket = UdpSocket::bind(&b, (server.ip(), 20_000 + n)).unwrap();
            socket.readers(small).unwrap().add().unwrap()
        })
        .collect();
    let readers = UdpSocket::bind(&b, to).unwrap().readers(ReadersConfig::default()).unwrap();
    let stop = AtomicBool::new(false);
    let clients: Vec<_> = (0..4).map(|_| client(&a, ip)).collect();
    std::thread::scope(|scope| {
        let _end = StopAtEnd(&stop);
        for _ in 0..2 {
            let reader = readers.add().unwrap();
            scope.spawn(|| echo(reader, &stop));
        }
        // Each of the other sockets gets more than its queue holds, and no thread reads.
        for number in 0..SOCKETS {
            let full = SocketAddr::new(server.ip(), 20_000 + number);
            for _ in 0..3 {
                clients[0].send_to(b"unread", full).unwrap();
            }
            if number % 100 == 0 {
                round_trip(&clients, to, b"tide");
            }
        }
    });
    let mut idle = idle;
    let queued: Vec<usize> = idle.iter_mut().map(UdpReader::readable).collect();
    assert!(queued.iter().all(|&waiting| waiting <= 2), "queue limit exceeded");
    assert!(queued.iter().filter(|&&waiting| waiting == 2).count() > 9_000);
}

/// A stack whose feedback timeout is a minute resumes receiving as soon as a reader has made
/// space in a full queue.
#[test]
fn draining_readers_resume_receiving() {
    const PACKETS: u64 = 1000;
    // A small quota pauses receiving often: occasional wakeups by other timers would not
    // suffice.
    let slow_feedback =
        Config::default().feedback_timeout_us(60_000_000).receive_quota(Quota::Packets(4));
    let small_queues = ReadersConfig::default().queue_packets(16);
    for [ip, to] in ADDRESSES {
        let (a, b) = wire(&MemConfig::default()).unwrap();
        let gate = Settings::new(slow_feedback.clone()).unwrap();
        let server = Net::open(config(b, 2).gate(gate).own_thread(true)).unwrap();
        let peer = Net::open(config(a, 1).own_thread(true)).unwrap();
        resolve_neighbours(&peer, &server, ip, to);
        let readers = UdpSocket::bind(&server, to).unwrap().readers(small_queues).unwrap();
        let mut reader = readers.add().unwrap();
        reader.set_read_timeout(Some(Duration::from_millis(20)));
        let client = client(&peer, ip);
        for _ in 0..PACKETS {
            client.send_to(b"tide", to).unwrap();
        }
        let started = std::time::Instant::now();
        // Reading starts only now: a reader that keeps up would never pause receiving.
        while server.counters().gate.paused_by_feedback == 0 {
            assert!(started.elapsed() < TIMEOUT, "receiving was never paused");
            std::thread::yield_now();
        }
        let dropped = || server.counters().stack.drops.get(DropReason::SocketQueueFull);
        let mut read = 0;
        while read + dropped() < PACKETS {
            read += u64::from(reader.recv_from(&mut [0; 8]).is_ok());
            assert!(started.elapsed() < TIMEOUT, "{read} of {PACKETS} datagrams received");
        }
    }
}

#[test]
fn one_thread_waits_for_readers_of_both_families() {
    let (a, b) = polled_hosts();
    let mut readers: Vec<UdpReader> = ADDRESSES
        .iter()
        .map(|[_, to]| {
            let socket = UdpSocket::bind_one_family(&b, to).unwrap();
            socket.readers(ReadersConfig::default()).unwrap().add().unwrap()
        })
        .collect();
    assert!(!wait_readable(&mut readers, Some(Duration::from_millis(5))).unwrap());
    for (family, [ip, to]) in ADDRESSES.into_iter().enumerate() {
        let client = client(&a, ip);
        client.send_to(b"tide", to).unwrap();
        assert!(wait_readable(&mut readers, Some(TIMEOUT)).unwrap());
        let reader = &mut readers[family];
        assert_eq!(reader.readable(), 1);
        let mut buf = [0; 2];
        let received = reader.recv_from(&mut buf).unwrap();
        assert!(received.truncated && received.len == 2 && &buf == b"ti");
        reader.send_to(b"ebb!", received.from, received.to).unwrap();
        let (len, _) = client.recv_from(&mut buf).unwrap();
        assert_eq!((len, &buf), (2, b"eb"));
    }
}

#[test]
fn readers_require_own_thread_and_exist_once() {
    let (_, b) = polled_hosts();
    let (device, _peer) = wire(&MemConfig::default()).unwrap();
    let without_thread = client(&Net::open(config(device, 1)).unwrap(), "192.0.2.1");
    let error = without_thread.readers(ReadersConfig::default()).unwrap_err();
    assert!(error.to_string().contains("own_thread"), "{error}");
    let socket = UdpSocket::bind(&b, "192.0.2.2:7").unwrap();
    for config in [
        ReadersConfig::default().queue_packets(0),
        ReadersConfig::default().queue_packets(usize::MAX),
        ReadersConfig::default().queue_bytes(0),
    ] {
        assert_eq!(socket.readers(config).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    let readers = socket.readers(ReadersConfig::default()).unwrap();
    let again = socket.readers(ReadersConfig::default()).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    let mut reader = readers.add().unwrap();
    reader.set_nonblocking(true);
    let error = reader.recv_from(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop((readers, socket));
    assert!(reader.recv_from(&mut [0; 8]).is_err(), "no datagram was sent");
}
