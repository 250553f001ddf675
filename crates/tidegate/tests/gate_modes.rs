//! Echo server in every mode of receive scheduling, on an in-memory link.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::gate::{Config, Mode, Settings};
use tidegate::mem::{MemConfig, MemDevice, wire};
use tidegate::{DropReason, FrameSize, Limits, Net, NetConfig, OpenError, UdpSocket};

const TIMEOUT: Duration = Duration::from_secs(20);

fn config(device: MemDevice, host: u8) -> NetConfig {
    NetConfig::new(device)
        .address(format!("192.0.2.{host}/24").parse().unwrap())
        .address(format!("2001:db8::{host}/64").parse().unwrap())
        .frames(1024, FrameSize::K2)
        .limits(Limits::default().socket_queue_packets(64))
        .hugepages(false)
        .seed([7; 16])
}

/// A client, and a server in `mode`; `None` where real-time priorities are not
/// permitted.
fn hosts(mode: Mode, own_thread: bool, change: impl FnOnce(&mut Config)) -> Option<(Net, Net)> {
    let (a, b) = wire(&MemConfig::default()).unwrap();
    let mut gate = Config::default().mode(mode);
    change(&mut gate);
    let server = config(b, 2).gate(Settings::new(gate).unwrap()).own_thread(own_thread);
    let server = match Net::open(server) {
        Ok(server) => server,
        Err(OpenError::Io(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            tidegate_needs::skip("real-time priorities", error);
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    Some((Net::open(config(a, 1)).unwrap(), server))
}

fn bind(net: &Net, address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(net, address.parse::<SocketAddr>().unwrap()).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.set_write_timeout(Some(TIMEOUT)).unwrap();
    socket
}

/// Exchanges a datagram, so that both hosts resolve their neighbour.
fn resolve_neighbours(client: &UdpSocket, server: &UdpSocket) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (_, from) = server.recv_from(&mut [0; 10]).unwrap();
            server.send_to(b"welcome", from).unwrap();
        });
        client.send_to(b"hello", server.local_addr().unwrap()).unwrap();
        client.recv_from(&mut [0; 10]).unwrap();
    });
}

const ADDRESSES: [[&str; 2]; 2] =
    [["192.0.2.1:4000", "192.0.2.2:7"], ["[2001:db8::1]:4000", "[2001:db8::2]:7"]];

#[test]
fn every_mode_echoes_on_both_families() {
    let inline_modes = Mode::ALL.map(|mode| (mode, false));
    for (mode, own_thread) in
        inline_modes.into_iter().chain([(Mode::Polled, true), (Mode::Dedicated, true)])
    {
        let Some((client, server)) = hosts(mode, own_thread, |_| ()) else { continue };
        let has_threads = own_thread || !matches!(mode, Mode::Polled | Mode::Dedicated);
        assert_eq!(server.has_threads(), has_threads, "{mode:?}");
        for [from, to] in ADDRESSES {
            let (client, server) = (bind(&client, from), bind(&server, to));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut buf = [0; 100];
                    for _ in 0..100 {
                        let (len, from) = server.recv_from(&mut buf).unwrap();
                        server.send_to(&buf[..len], from).unwrap();
                    }
                });
                for round in 0..100_u32 {
                    client.send_to(&round.to_be_bytes(), to).unwrap();
                    let mut buf = [0; 100];
                    let (len, _) = client.recv_from(&mut buf).unwrap();
                    assert_eq!(buf[..len], round.to_be_bytes(), "{mode:?}");
                }
            });
        }
        if has_threads && mode != Mode::Polled && mode != Mode::Dedicated {
            assert!(server.counters().gate.interrupts > 0, "{mode:?}");
        }
    }
}

#[test]
fn counts_input_queue_overflow() {
    let Some((client, server)) = hosts(Mode::Interrupt, false, |gate| gate.input_queue = 4) else {
        return;
    };
    let [from, to] = ADDRESSES[0];
    let (client, reader) = (bind(&client, from), bind(&server, to));
    reader.set_nonblocking(true).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let payload = [0; 10];
    let burst = vec![(&payload[..], to.parse().unwrap()); 64];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if let Ok((_, from)) = reader.recv_from(&mut [0; 10]) {
                    let _ = reader.send_to(b"welcome", from);
                }
            }
        });
        // Until both hosts know each other. The short queue may lose a datagram while they announce
        // themselves.
        while client.recv_from(&mut [0; 10]).is_err() {
            client.send_to(b"hello", to).unwrap();
        }
        let dropped = || server.counters().drops().get(DropReason::InputQueueFull);
        while dropped() == 0 {
            client.send_batch(&burst).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    let counters = server.counters();
    assert_eq!(counters.stack.drops.get(DropReason::InputQueueFull), 0, "dropped before the stack");
}

#[test]
fn stalled_reader_pauses_receiving_only_until_timeout() {
    let (client, server) = hosts(Mode::Polled, true, |gate| {
        gate.feedback_timeout_us = 1000;
    })
    .unwrap();
    let [from, to] = ADDRESSES[1];
    let (client, stalled) = (bind(&client, from), bind(&server, to));
    let alive = bind(&server, "[2001:db8::2]:8");
    resolve_neighbours(&client, &alive);
    let payload = [0; 500];
    let burst = vec![(&payload[..], to.parse().unwrap()); 64];
    // No thread reads from `stalled`: its queue fills and stays full.
    while server.counters().gate.paused_by_feedback == 0 {
        client.send_batch(&burst).unwrap();
    }
    // The other socket still receives. The link may be full at first: datagrams are dropped on
    // overflow, so they are sent again.
    alive.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    for _ in 0..100 {
        let mut buf = [0; 10];
        let len = (0..100).find_map(|_| {
            client.send_to(b"alive", "[2001:db8::2]:8").unwrap();
            alive.recv_from(&mut buf).ok()
        });
        assert_eq!(&buf[..len.expect("a stalled reader must not block other sockets").0], b"alive");
    }
    drop(stalled);
}

#[test]
fn settings_change_at_runtime_but_mode_does_not() {
    let (_client, server) = hosts(Mode::Polled, false, |_| ()).unwrap();
    let mut config = server.gate().config().clone();
    config.low_mark_percent = 10;
    server.set_gate(Settings::new(config.clone()).unwrap()).unwrap();
    assert_eq!(server.gate().config(), &config);
    config.mode = Mode::Dedicated;
    let error = server.set_gate(Settings::new(config).unwrap()).unwrap_err();
    assert!(error.to_string().contains("restart it"), "{error}");
}

#[test]
fn serves_with_limited_cpu_share() {
    let (client, server) = hosts(Mode::Polled, false, |gate| {
        gate.cpu_share_percent = 10;
        gate.cpu_period_us = 1000;
    })
    .unwrap();
    let [from, to] = ADDRESSES[0];
    let (client, server) = (bind(&client, from), bind(&server, to));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buf = [0; 100];
            for _ in 0..1000 {
                let (len, from) = server.recv_from(&mut buf).unwrap();
                server.send_to(&buf[..len], from).unwrap();
            }
        });
        for _ in 0..1000 {
            client.send_to(b"share", to).unwrap();
            client.recv_from(&mut [0; 10]).unwrap();
        }
    });
}
