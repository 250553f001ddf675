//! The TAP and TUN port, with the kernel at the other end.

mod sandbox;

use std::net::UdpSocket;

use sandbox::{
    KERNEL_V4, KERNEL_V6, PATIENCE, PORT_V4, PORT_V6, arena, enter_namespace, free_all, has_tun,
    ip, is_udp_to, numbered_frame, receive_until_error, receive_wanted, transmit_all, turn_round,
    wait_for_kernel_address,
};
use tidegate_memory::{Arena, Checksum};
use tidegate_port::netlink::{Interface, Monitor};
use tidegate_port::tap::{TapConfig, TapError, TapPort};
use tidegate_port::{Burst, Left, Medium, Port};
use tidegate_wire::{DropReason, MacAddr};

const ECHO: u16 = 7;

/// A device with the kernel's addresses on it and the port as a neighbour.
fn open(name: &str, medium: Medium, arena: &mut Arena) -> TapPort {
    let config = TapConfig {
        medium,
        kernel_addresses: vec![
            format!("{KERNEL_V4}/24").parse().unwrap(),
            format!("{KERNEL_V6}/64").parse().unwrap(),
        ],
        ..TapConfig::new(name)
    };
    let mut monitor = Monitor::open().unwrap();
    let port = TapPort::open(&config, arena).unwrap();
    wait_for_kernel_address(&mut monitor);
    if medium == Medium::Ethernet {
        let mac = MacAddr(port.capabilities().mac);
        for address in [PORT_V4, PORT_V6] {
            ip(&format!("neigh add {address} lladdr {mac} dev {}", port.name()));
        }
    }
    port
}

fn client(local: &str, remote: &str) -> UdpSocket {
    let socket = UdpSocket::bind((local, 0)).unwrap();
    socket.connect((remote, ECHO)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

#[test]
fn kernel_datagrams_come_with_unfilled_checksums_and_go_back() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    for medium in [Medium::Ethernet, Medium::Ip] {
        let ethernet = medium == Medium::Ethernet;
        let link_bytes = if ethernet { 14 } else { 0 };
        let mut arena = arena(64);
        let mut port = open("tg%d", medium, &mut arena);
        assert_eq!(port.name(), "tg0");
        for (local, remote, udp) in [(KERNEL_V4, PORT_V4, 20), (KERNEL_V6, PORT_V6, 40)] {
            let client = client(local, remote);
            client.send(b"over and back").unwrap();
            let mut burst =
                receive_wanted(&mut port, &mut arena, 1, |frame| is_udp_to(frame, ethernet, ECHO));
            let start = link_bytes + udp;
            assert_eq!(burst[0].checksum(), Checksum::Partial { start, offset: 6 }, "{medium:?}");
            turn_round(arena.bytes_mut(&mut burst[0]), ethernet);
            transmit_all(&mut port, &mut arena, &mut burst);
            let mut buffer = [0; 64];
            let len = client
                .recv(&mut buffer)
                .unwrap_or_else(|error| panic!("{medium:?} {local}: {error}, {port:?}"));
            assert_eq!(&buffer[..len], b"over and back", "{medium:?} {local}");
        }
        let counters = port.counters();
        assert_eq!(counters.transmitted, 2);
        assert!(counters.received >= 2);
        assert_eq!(counters.drops.total(), 0);
        assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
    }
}

#[test]
fn a_burst_of_datagrams_arrives_whole_and_in_order() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(1024);
    let mut port = open("tg0", Medium::Ip, &mut arena);
    for (local, remote, udp) in [(KERNEL_V4, PORT_V4, 28), (KERNEL_V6, PORT_V6, 48)] {
        let client = client(local, remote);
        for number in 0..200u32 {
            client.send(&number.to_be_bytes()).unwrap();
        }
        let mut burst =
            receive_wanted(&mut port, &mut arena, 200, |frame| is_udp_to(frame, false, ECHO));
        for (number, frame) in burst.iter().enumerate() {
            assert_eq!(arena.bytes(frame)[udp..], (number as u32).to_be_bytes());
        }
        free_all(&mut arena, &mut burst);
    }
}

#[test]
fn the_device_lives_as_long_as_the_port() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(8);
    let port = open("tg0", Medium::Ethernet, &mut arena);
    let kernel_end = Interface::by_name("tg0").unwrap();
    assert_eq!(kernel_end.index, port.index());
    assert_eq!(kernel_end.kind.as_deref(), Some("tun"));
    assert!(kernel_end.up && kernel_end.carrier);
    assert_ne!(kernel_end.mac.0, port.capabilities().mac, "two hosts, two addresses");
    assert_eq!(port.capabilities().mac[0] & 3, 2, "locally administered, not a group");
    drop(port);
    assert!(Interface::by_name("tg0").is_err());
}

#[test]
fn a_device_that_a_port_has_left_goes_on_with_the_next_one() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    for medium in [Medium::Ethernet, Medium::Ip] {
        let ethernet = medium == Medium::Ethernet;
        let mut arena = arena(64);
        let port = open("tg%d", medium, &mut arena);
        let (index, mac) = (port.index(), port.capabilities().mac);
        let Some(Left::Tap(device)) = Box::new(port).close_for_now(&mut arena, false) else {
            panic!("nothing is left");
        };
        // Nobody looks, and nothing is lost.
        let clients = [(KERNEL_V4, PORT_V4), (KERNEL_V6, PORT_V6)].map(|(local, remote)| {
            let client = client(local, remote);
            client.send(b"over and back").unwrap();
            client
        });
        let mut open_on =
            |config: TapConfig| TapPort::open_on(device.try_clone().unwrap(), &config, &mut arena);
        let other = if ethernet { Medium::Ip } else { Medium::Ethernet };
        let error = open_on(TapConfig { medium: other, ..TapConfig::new("tg0") }).unwrap_err();
        assert!(matches!(error, TapError::Kind(..)), "{error}");
        let another = open_on(TapConfig { medium, ..TapConfig::new("another") }).unwrap();
        assert_ne!(another.index(), index);
        let mut port = open_on(TapConfig { medium, ..TapConfig::new("tg%d") }).unwrap();
        assert_eq!((port.name(), port.index(), port.capabilities().mac), ("tg0", index, mac));
        port.go_live().unwrap();
        let is_wanted = |frame: &[u8]| is_udp_to(frame, ethernet, ECHO);
        let mut burst = receive_wanted(&mut port, &mut arena, 2, is_wanted);
        for frame in burst.iter_mut() {
            turn_round(arena.bytes_mut(frame), ethernet);
        }
        transmit_all(&mut port, &mut arena, &mut burst);
        for client in clients {
            assert_eq!(client.recv(&mut [0; 64]).unwrap(), 13);
        }
        drop((port, device));
        assert!(Interface::by_name("tg0").is_err(), "nobody has it any more");
    }
}

#[test]
fn what_the_kernel_refuses_is_counted_and_does_not_stop_the_rest() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(8);
    let mut port = open("tg0", Medium::Ip, &mut arena);
    let mut burst = Burst::new();
    // Neither IPv4 nor IPv6 by its version field.
    burst.extend(arena.alloc_from(&[0xf0; 40]));
    transmit_all(&mut port, &mut arena, &mut burst);
    ip("link set tg0 down");
    burst.extend(arena.alloc_from(&numbered_frame(1, 60)));
    transmit_all(&mut port, &mut arena, &mut burst);
    assert_eq!(port.counters().drops.get(DropReason::TransmitFailed), 2);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn a_frame_that_no_longer_fits_is_dropped_and_counted() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(8);
    let mut port = open("tg0", Medium::Ethernet, &mut arena);
    ip("link set tg0 mtu 9000");
    for (local, remote) in [(KERNEL_V4, PORT_V4), (KERNEL_V6, PORT_V6)] {
        let client = client(local, remote);
        client.send(&[1; 4000]).unwrap();
        client.send(b"short").unwrap();
        let mut burst =
            receive_wanted(&mut port, &mut arena, 1, |frame| is_udp_to(frame, true, ECHO));
        free_all(&mut arena, &mut burst);
    }
    assert_eq!(port.counters().drops.get(DropReason::FrameTooLong), 2);
}

#[test]
fn a_device_deleted_under_the_port_is_an_error() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(8);
    let mut port = open("tg0", Medium::Ethernet, &mut arena);
    ip("link del tg0");
    let error = receive_until_error(&mut port, &mut arena);
    assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
    let mut burst = Burst::from_iter(arena.alloc_from(&numbered_frame(1, 60)));
    assert!(port.transmit(&mut arena, &mut burst).is_err());
    free_all(&mut arena, &mut burst);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn errors_say_what_to_do() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(8);
    for name in ["", "sixteen-letters-", "a b", "a/b"] {
        let error = TapPort::open(&TapConfig::new(name), &mut arena).unwrap_err();
        assert!(matches!(error, TapError::Name(_)), "{name:?}: {error}");
    }
    let _held = open("tg0", Medium::Ethernet, &mut arena);
    let error = TapPort::open(&TapConfig::new("tg0"), &mut arena).unwrap_err();
    assert!(matches!(&error, TapError::Busy(name) if name == "tg0"), "{error}");
    let error = TapPort::open(&TapConfig::new("lo"), &mut arena).unwrap_err();
    assert!(matches!(&error, TapError::Kind(name, "TAP") if name == "lo"), "{error}");
    let large = TapConfig { mtu: Some(9000), ..TapConfig::new("tg1") };
    let error = TapPort::open(&large, &mut arena).unwrap_err();
    assert!(matches!(error, TapError::Mtu { mtu: 9000, .. }), "{error}");
    assert!(Interface::by_name("tg1").is_err(), "nothing is left behind");
    sandbox::drop_capabilities();
    let error = TapPort::open(&TapConfig::new("tg2"), &mut arena).unwrap_err();
    assert!(matches!(error, TapError::Permission(_)), "{error}");
    assert!(error.to_string().contains("ip tuntap add dev tg2"));
}
