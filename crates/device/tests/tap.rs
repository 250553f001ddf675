//! The TAP and TUN device, with the kernel at the other end.

mod sandbox;

use std::net::UdpSocket;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sandbox::{
    DEVICE_V4, DEVICE_V6, KERNEL_V4, KERNEL_V6, TIMEOUT, arena, enter_namespace, free_all, has_tun,
    ip, is_udp_to, numbered_frame, receive_matching, receive_until_error, reflect, transmit_all,
    wait_for_kernel_address,
};
use tidegate_device::netlink::{Interface, Monitor};
use tidegate_device::tap::{TapConfig, TapDevice, TapError};
use tidegate_device::{Burst, Device, HandoverState, Medium};
use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, MacAddr};

const ECHO_PORT: u16 = 7;

/// Enters a namespace for a test, unless that is not possible here. No other test runs meanwhile: a
/// program that it starts has the descriptors of this one for a moment, which keep an interface.
fn begin() -> Option<MutexGuard<'static, ()>> {
    static RUNNING: Mutex<()> = Mutex::new(());
    let guard = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    (enter_namespace() && has_tun()).then_some(guard)
}

/// Device with the kernel's addresses on its interface and the device's as neighbours.
fn open(name: &str, medium: Medium, arena: &mut Arena) -> TapDevice {
    let config = TapConfig::new(name).medium(medium).kernel_addresses(vec![
        format!("{KERNEL_V4}/24").parse().unwrap(),
        format!("{KERNEL_V6}/64").parse().unwrap(),
    ]);
    let mut monitor = Monitor::open().unwrap();
    let device = TapDevice::open(&config, arena).unwrap();
    wait_for_kernel_address(&mut monitor);
    if medium == Medium::Ethernet {
        let mac = MacAddr(device.capabilities().mac);
        for address in [DEVICE_V4, DEVICE_V6] {
            ip(&format!("neigh add {address} lladdr {mac} dev {}", device.name()));
        }
    }
    device
}

fn client(local: &str, remote: &str) -> UdpSocket {
    let socket = UdpSocket::bind((local, 0)).unwrap();
    socket.connect((remote, ECHO_PORT)).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

#[test]
fn receives_partial_checksums_and_sends_them_back() {
    let Some(_alone) = begin() else { return };
    for medium in [Medium::Ethernet, Medium::Ip] {
        let ethernet = medium == Medium::Ethernet;
        let link_bytes = if ethernet { 14 } else { 0 };
        let mut arena = arena(64);
        let mut device = open("tg%d", medium, &mut arena);
        assert_eq!(device.name(), "tg0");
        for (local, remote, udp) in [(KERNEL_V4, DEVICE_V4, 20), (KERNEL_V6, DEVICE_V6, 40)] {
            let client = client(local, remote);
            client.send(b"over and back").unwrap();
            let mut burst = receive_matching(&mut device, &mut arena, 1, |frame| {
                is_udp_to(frame, ethernet, ECHO_PORT)
            });
            let start = link_bytes + udp;
            assert_eq!(burst[0].checksum(), Checksum::Partial { start, offset: 6 }, "{medium:?}");
            reflect(arena.bytes_mut(&mut burst[0]), ethernet);
            transmit_all(&mut device, &mut arena, &mut burst);
            let mut buffer = [0; 64];
            let len = client
                .recv(&mut buffer)
                .unwrap_or_else(|error| panic!("{medium:?} {local}: {error}, {device:?}"));
            assert_eq!(&buffer[..len], b"over and back", "{medium:?} {local}");
        }
        let counters = device.counters();
        assert_eq!(counters.transmitted, 2);
        assert!(counters.received >= 2);
        assert_eq!(counters.drops.total(), 0);
        assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
    }
}

#[test]
fn delivers_a_burst_intact_and_in_order() {
    let Some(_alone) = begin() else { return };
    let mut arena = arena(1024);
    let mut device = open("tg0", Medium::Ip, &mut arena);
    for (local, remote, udp) in [(KERNEL_V4, DEVICE_V4, 28), (KERNEL_V6, DEVICE_V6, 48)] {
        let client = client(local, remote);
        for number in 0..200u32 {
            client.send(&number.to_be_bytes()).unwrap();
        }
        let mut burst = receive_matching(&mut device, &mut arena, 200, |frame| {
            is_udp_to(frame, false, ECHO_PORT)
        });
        for (number, frame) in burst.iter().enumerate() {
            assert_eq!(arena.bytes(frame)[udp..], (number as u32).to_be_bytes());
        }
        free_all(&mut arena, &mut burst);
    }
}

#[test]
fn interface_exists_while_the_device_is_open() {
    let Some(_alone) = begin() else { return };
    let mut arena = arena(8);
    let device = open("tg0", Medium::Ethernet, &mut arena);
    let kernel_end = Interface::by_name("tg0").unwrap();
    assert_eq!(kernel_end.index, device.index());
    assert_eq!(kernel_end.kind.as_deref(), Some("tun"));
    assert!(kernel_end.up && kernel_end.carrier);
    assert_ne!(kernel_end.mac.0, device.capabilities().mac, "two hosts, two addresses");
    assert_eq!(device.capabilities().mac[0] & 3, 2, "locally administered, not a group");
    drop(device);
    assert!(Interface::by_name("tg0").is_err());
}

#[test]
fn closed_interface_continues_with_the_next_device() {
    let Some(_alone) = begin() else { return };
    for medium in [Medium::Ethernet, Medium::Ip] {
        let ethernet = medium == Medium::Ethernet;
        let mut arena = arena(64);
        let device = open("tg%d", medium, &mut arena);
        let (index, mac) = (device.index(), device.capabilities().mac);
        let Some(HandoverState::Tap(tap_fd)) =
            Box::new(device).close_for_handover(&mut arena, false)
        else {
            panic!("no handover state");
        };
        // No process receives meanwhile, and no frame is lost.
        let clients = [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)].map(|(local, remote)| {
            let client = client(local, remote);
            client.send(b"over and back").unwrap();
            client
        });
        let mut open_on = |config: TapConfig| {
            TapDevice::open_from_handover(tap_fd.try_clone().unwrap(), &config, &mut arena)
        };
        let other = if ethernet { Medium::Ip } else { Medium::Ethernet };
        let error = open_on(TapConfig::new("tg0").medium(other)).unwrap_err();
        assert!(matches!(error, TapError::Kind(..)), "{error}");
        let another = open_on(TapConfig::new("another").medium(medium)).unwrap();
        assert_ne!(another.index(), index);
        let mut device = open_on(TapConfig::new("tg%d").medium(medium)).unwrap();
        assert_eq!((device.name(), device.index(), device.capabilities().mac), ("tg0", index, mac));
        device.take_over().unwrap();
        let is_wanted = |frame: &[u8]| is_udp_to(frame, ethernet, ECHO_PORT);
        let mut burst = receive_matching(&mut device, &mut arena, 2, is_wanted);
        for frame in burst.iter_mut() {
            reflect(arena.bytes_mut(frame), ethernet);
        }
        transmit_all(&mut device, &mut arena, &mut burst);
        for client in clients {
            assert_eq!(client.recv(&mut [0; 64]).unwrap(), 13);
        }
        drop((device, tap_fd));
        assert!(Interface::by_name("tg0").is_err());
    }
}

#[test]
fn counts_frames_rejected_by_the_kernel_and_goes_on() {
    let Some(_alone) = begin() else { return };
    let mut arena = arena(8);
    let mut device = open("tg0", Medium::Ip, &mut arena);
    let mut burst = Burst::new();
    // Version field: neither IPv4 nor IPv6.
    burst.extend(arena.alloc_from(&[0xf0; 40]));
    transmit_all(&mut device, &mut arena, &mut burst);
    ip("link set tg0 down");
    burst.extend(arena.alloc_from(&numbered_frame(1, 60)));
    transmit_all(&mut device, &mut arena, &mut burst);
    assert_eq!(device.counters().drops.get(DropReason::TransmitFailed), 2);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn drops_and_counts_frames_larger_than_a_buffer() {
    let Some(_alone) = begin() else { return };
    let mut arena = arena(8);
    let mut device = open("tg0", Medium::Ethernet, &mut arena);
    ip("link set tg0 mtu 9000");
    for (local, remote) in [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)] {
        let client = client(local, remote);
        client.send(&[1; 4000]).unwrap();
        client.send(b"short").unwrap();
        let mut burst =
            receive_matching(&mut device, &mut arena, 1, |frame| is_udp_to(frame, true, ECHO_PORT));
        free_all(&mut arena, &mut burst);
    }
    assert_eq!(device.counters().drops.get(DropReason::FrameTooLong), 2);
}

#[test]
fn deleted_interface_is_an_error() {
    let Some(_alone) = begin() else { return };
    let mut arena = arena(8);
    let mut device = open("tg0", Medium::Ethernet, &mut arena);
    ip("link del tg0");
    let error = receive_until_error(&mut device, &mut arena);
    assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
    let mut burst = Burst::from_iter(arena.alloc_from(&numbered_frame(1, 60)));
    assert!(device.transmit(&mut arena, &mut burst).is_err());
    free_all(&mut arena, &mut burst);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn open_errors_say_what_to_do() {
    let Some(_alone) = begin() else { return };
    let mut arena = arena(8);
    for name in ["", "sixteen-letters-", "a b", "a/b"] {
        let error = TapDevice::open(&TapConfig::new(name), &mut arena).unwrap_err();
        assert!(matches!(error, TapError::Name(_)), "{name:?}: {error}");
    }
    let _held = open("tg0", Medium::Ethernet, &mut arena);
    let error = TapDevice::open(&TapConfig::new("tg0"), &mut arena).unwrap_err();
    assert!(matches!(&error, TapError::Busy(name) if name == "tg0"), "{error}");
    let error = TapDevice::open(&TapConfig::new("lo"), &mut arena).unwrap_err();
    assert!(matches!(&error, TapError::Kind(name, "TAP") if name == "lo"), "{error}");
    let large = TapConfig::new("tg1").mtu(9000);
    let error = TapDevice::open(&large, &mut arena).unwrap_err();
    assert!(matches!(error, TapError::Mtu { mtu: 9000, .. }), "{error}");
    assert!(Interface::by_name("tg1").is_err(), "nothing is left behind");
    sandbox::drop_capabilities();
    let error = TapDevice::open(&TapConfig::new("tg2"), &mut arena).unwrap_err();
    assert!(matches!(error, TapError::Permission { .. }), "{error}");
    assert!(error.to_string().contains("ip tuntap add dev tg2"));
}
