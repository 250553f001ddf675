//! The AF_XDP port against the kernel, over veth pairs in namespaces.

mod netns;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use netns::{LEFT, Pair, RIGHT, may_make_namespaces};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::xdp::{Protocol, Rule, Steering, XdpConfig, XdpPort};
use tidegate_port::{Burst, Port};

fn arena() -> Arena {
    Arena::new(ArenaConfig { frames: 4096, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

fn udp_port(port: u16) -> Steering {
    Steering {
        rules: vec![Rule::Port { protocol: Protocol::Udp, address: None, port }],
        vlan: None,
    }
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

/// Turns a UDP frame into its own answer: addresses and ports swapped. The
/// checksums stay right, for sums do not mind the order.
fn reflect(frame: &mut [u8]) {
    let (destination, source) = frame.split_at_mut(6);
    destination.swap_with_slice(&mut source[..6]);
    let (first, len) = if frame[12..14] == [0x08, 0x00] { (26, 4) } else { (22, 16) };
    let (source, destination) = frame[first..].split_at_mut(len);
    source.swap_with_slice(&mut destination[..len]);
    let (source, destination) = frame[first + 2 * len..].split_at_mut(2);
    source.swap_with_slice(&mut destination[..2]);
}

/// Reflects until `count` frames were received.
fn reflect_frames(port: &mut XdpPort, arena: &mut Arena, count: usize) {
    let mut burst = Burst::new();
    let mut seen = 0;
    while seen < count {
        seen += port.receive(arena, &mut burst, 64).unwrap();
        for frame in &mut burst {
            reflect(arena.bytes_mut(frame));
        }
        while !burst.is_empty() {
            port.transmit(arena, &mut burst).unwrap();
        }
    }
}

#[test]
fn kernel_sockets_and_the_port_exchange_datagrams() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena();
    let mut port = pair.left.run(|| {
        let config = XdpConfig { steering: udp_port(7777), ..XdpConfig::new("left") };
        XdpPort::open(config, &mut arena).unwrap()
    });
    assert_eq!(port.capabilities().detail, "native, copy");
    for (local, remote) in RIGHT.into_iter().zip(LEFT) {
        let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        for round in 0..10_u8 {
            socket.send_to(&[round; 100], at(remote, 7777)).unwrap();
            reflect_frames(&mut port, &mut arena, 1);
            let mut answer = [0; 200];
            let (len, from) = socket.recv_from(&mut answer).unwrap();
            assert_eq!((&answer[..len], from), (&[round; 100][..], at(remote, 7777)));
        }
    }
    let counters = port.counters();
    assert_eq!((counters.received, counters.transmitted), (20, 20));
    assert_eq!(counters.drops.total(), 0, "{:?}", counters.drops);
    port.close(&mut arena);
    assert_eq!(arena.available(), arena.capacity());
}
