//! The AF_PACKET device over veth, against the kernel and against itself.

mod sandbox;

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::Instant;

use sandbox::{
    DEVICE_MAC, DEVICE_V4, DEVICE_V6, KERNEL_V4, KERNEL_V6, TIMEOUT, arena, enter_namespace,
    free_all, has_tun, ip, is_numbered, is_udp_to, numbered_frame, receive_matching,
    receive_until_error, reflect, sleep_on, transmit_all, veth,
};
use tidegate_device::packet::{PacketConfig, PacketDevice, PacketError, ReceiveMode, Steering};
use tidegate_device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig, Checksum, Frame, FrameSize};
use tidegate_wire::DropReason;

const RECEIVE_MODES: [ReceiveMode; 2] = [ReceiveMode::Syscalls, ReceiveMode::Ring];
const ECHO_PORT: u16 = 7;

fn open(interface: &str, receive: ReceiveMode, arena: &mut Arena) -> PacketDevice {
    let config = PacketConfig::new(interface).receive(receive);
    PacketDevice::open(&config, arena).unwrap()
}

fn client(local: &str, remote: &str) -> UdpSocket {
    let socket = UdpSocket::bind((local, 0)).unwrap();
    socket.connect((remote, ECHO_PORT)).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

#[test]
fn receives_partial_checksums_and_sends_them_back() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(256);
        let mut device = open("tg0", receive, &mut arena);
        assert_eq!(device.capabilities().mac, DEVICE_MAC);
        for (local, remote, udp) in [(KERNEL_V4, DEVICE_V4, 34), (KERNEL_V6, DEVICE_V6, 54)] {
            let client = client(local, remote);
            client.send(b"over and back").unwrap();
            let mut burst = receive_matching(&mut device, &mut arena, 1, |frame| {
                is_udp_to(frame, true, ECHO_PORT)
            });
            let frame = &mut burst[0];
            assert_eq!(frame.checksum(), Checksum::Partial { start: udp, offset: 6 });
            reflect(arena.bytes_mut(frame), true);
            transmit_all(&mut device, &mut arena, &mut burst);
            let mut buffer = [0; 64];
            let len = client.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], b"over and back", "{receive:?} {local}");
        }
        assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
        assert_eq!(device.counters().transmitted, 2);
    }
}

#[test]
fn delivers_a_burst_intact_and_in_order() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(4096);
        let mut near = open("tg0", receive, &mut arena);
        let mut far = open("tg1", receive, &mut arena);
        let mut burst = Burst::new();
        for number in 0..200 {
            let mut frame = arena.alloc_from(&numbered_frame(number, 60 + number as usize * 5));
            if number % 2 == 1 {
                let partial = Checksum::Partial { start: 34, offset: 6 };
                frame.as_mut().unwrap().set_checksum(partial);
            }
            burst.extend(frame);
        }
        transmit_all(&mut far, &mut arena, &mut burst);
        let mut burst = receive_matching(&mut near, &mut arena, 200, is_numbered);
        for (number, frame) in burst.iter().enumerate() {
            let expected = numbered_frame(number as u32, 60 + number * 5);
            assert_eq!(arena.bytes(frame), expected, "{receive:?}");
            let is_partial = matches!(frame.checksum(), Checksum::Partial { start: 34, offset: 6 });
            assert_eq!(is_partial, number % 2 == 1, "{:?}", frame.checksum());
        }
        let bytes: usize = burst.iter().map(Frame::len).sum();
        free_all(&mut arena, &mut burst);
        let (sent, received) = (far.counters(), near.counters());
        assert_eq!((sent.transmitted, sent.transmitted_bytes), (200, bytes as u64));
        assert!(received.received >= 200 && received.received_bytes >= bytes as u64);
        assert_eq!(received.drops.total() + sent.drops.total(), 0);
        assert_eq!(sent.received, 0, "a device does not receive its own frames");
        assert_eq!(arena.available(), arena.capacity());
    }
}

#[test]
fn counts_frames_dropped_by_the_kernel() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(512);
        let config = PacketConfig::new("tg0").receive(receive).buffer_bytes(64 << 10);
        let mut near = PacketDevice::open(&config, &mut arena).unwrap();
        let mut far = open("tg1", receive, &mut arena);
        let mut burst = Burst::new();
        for number in 0..4000 {
            burst.extend(arena.alloc_from(&numbered_frame(number, 200)));
            if burst.len() == 256 || number == 3999 {
                transmit_all(&mut far, &mut arena, &mut burst);
            }
        }
        // The last frames may still be in a block that is not full.
        let deadline = Instant::now() + TIMEOUT;
        loop {
            near.receive(&mut arena, &mut burst, 64).unwrap();
            free_all(&mut arena, &mut burst);
            let counters = near.counters();
            let dropped = counters.drops.get(DropReason::DeviceRingFull);
            if counters.received + dropped >= 4000 {
                assert!(dropped > 0, "{receive:?}");
                break;
            }
            assert!(Instant::now() < deadline, "{receive:?}: {counters:?}");
        }
        assert_eq!(arena.available(), arena.capacity());
    }
}

#[test]
fn drops_and_counts_frames_longer_than_a_buffer() {
    if !enter_namespace() {
        return;
    }
    veth();
    ip("link set tg0 mtu 9000");
    ip("link set tg1 mtu 9000");
    for receive in RECEIVE_MODES {
        let mut arena = arena(64);
        let mut device = open("tg0", receive, &mut arena);
        for (local, remote) in [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)] {
            client(local, remote).send(&[1; 4000]).unwrap();
            client(local, remote).send(b"short").unwrap();
            let mut burst = receive_matching(&mut device, &mut arena, 1, |frame| {
                is_udp_to(frame, true, ECHO_PORT)
            });
            free_all(&mut arena, &mut burst);
        }
        assert_eq!(device.counters().drops.get(DropReason::FrameTooLong), 2, "{receive:?}");
        assert_eq!(arena.available(), arena.capacity());
    }
}

#[test]
fn splits_gso_frames() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(64);
        let mut device = open("tg0", receive, &mut arena);
        for (local, remote, udp) in [(KERNEL_V4, DEVICE_V4, 34), (KERNEL_V6, DEVICE_V6, 54)] {
            let client = client(local, remote);
            // Datagrams in one GSO frame, which fits into a buffer or does not, and one datagram
            // in its own frame.
            for (segment_bytes, bytes) in [(100, 350), (100, 100), (1000, 30_500)] {
                set_udp_segment_bytes(&client, segment_bytes as libc::c_int);
                let sent: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
                client.send(&sent).unwrap();
                let count = sent.len().div_ceil(segment_bytes);
                let mut burst = receive_matching(&mut device, &mut arena, count, |frame| {
                    is_udp_to(frame, true, ECHO_PORT)
                });
                for (frame, expected) in burst.iter().zip(sent.chunks(segment_bytes)) {
                    assert_eq!(frame.checksum(), Checksum::Partial { start: udp, offset: 6 });
                    let datagram = &arena.bytes(frame)[usize::from(udp)..];
                    assert_eq!(datagram[4..6], (datagram.len() as u16).to_be_bytes());
                    assert!(datagram[8..] == *expected, "{receive:?}");
                }
                assert_eq!(burst.len(), count);
                free_all(&mut arena, &mut burst);
            }
        }
        assert_eq!(device.counters().drops.total(), 0, "{receive:?}");
        assert_eq!(arena.available(), arena.capacity());
    }
}

/// Makes the kernel split longer sends into datagrams of this size (`UDP_SEGMENT`).
fn set_udp_segment_bytes(socket: &UdpSocket, bytes: libc::c_int) {
    // SAFETY: UDP_SEGMENT takes an int, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            ptr::from_ref(&bytes).cast(),
            size_of_val(&bytes) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0);
}

#[test]
fn segmentation_limits_gro_size_to_a_buffer() {
    if !enter_namespace() {
        return;
    }
    veth();
    let gro_limit = || {
        let show = ["-d", "link", "show", "tg0"];
        let output = std::process::Command::new("ip").args(show).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        let limit = words.windows(2).find(|pair| pair[0] == "gro_max_size");
        limit.map(|pair| pair[1].parse::<usize>().unwrap())
    };
    let Some(before) = gro_limit() else {
        tidegate_needs::skip("gro-max-size", "this kernel coalesces up to 64 KiB, always");
        return;
    };
    let config = ArenaConfig { frames: 16, frame_size: FrameSize::K64, hugepages: false };
    let mut arena = Arena::new(config).unwrap();
    let config = PacketConfig::new("tg0").segmentation(true);
    let device = PacketDevice::open(&config, &mut arena).unwrap();
    let largest = arena.alloc().unwrap();
    let link_bytes = 18;
    assert!(gro_limit().unwrap() + link_bytes <= arena.space(&largest));
    drop(device);
    assert_eq!(gro_limit(), Some(before), "the limit is restored");
}

#[test]
fn fanout_group_shares_the_flows() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(256);
        let config = PacketConfig::new("tg0").receive(receive).fanout(7);
        let mut devices = [(); 2].map(|()| PacketDevice::open(&config, &mut arena).unwrap());
        let clients: Vec<_> = (0..64).map(|_| client(KERNEL_V4, DEVICE_V4)).collect();
        for client in &clients {
            client.send(b"one").unwrap();
            client.send(b"two").unwrap();
        }
        let mut burst = Burst::new();
        let mut sources = [BTreeMap::new(), BTreeMap::new()];
        let deadline = Instant::now() + TIMEOUT;
        while sources.iter().flat_map(BTreeMap::values).sum::<u32>() < 128 {
            assert!(Instant::now() < deadline, "{receive:?}: {sources:?}");
            for (device, sources) in devices.iter_mut().zip(&mut sources) {
                device.receive(&mut arena, &mut burst, 64).unwrap();
                for frame in burst.drain(..) {
                    let bytes = arena.bytes(&frame);
                    if is_udp_to(bytes, true, ECHO_PORT) {
                        *sources.entry(bytes[34..36].to_vec()).or_insert(0) += 1;
                    }
                    arena.free(frame);
                }
            }
        }
        // No flow is split, and each device receives some flows.
        assert!(sources.iter().flat_map(BTreeMap::values).all(|&count| count == 2));
        assert!(sources.iter().all(|sources| !sources.is_empty()), "{receive:?}");
    }
}

/// Two network cores read different flows, each with an arena of its own.
#[test]
fn flows_are_shared_out_among_cores() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arenas = [arena(256), arena(256)];
        let config = PacketConfig::new("tg0").receive(receive).cores(2);
        let mut device = PacketDevice::open(&config, &mut arenas[0]).unwrap();
        let mut offered = device.offer_queues();
        assert_eq!(offered.len(), 1);
        assert!(device.offer_queues().is_empty(), "offered once");
        let mut other = offered.remove(0)(&mut arenas[1]).unwrap();
        let clients: Vec<_> = (0..64).map(|_| client(KERNEL_V4, DEVICE_V4)).collect();
        let mut counts = [0; 2];
        for client in &clients {
            client.send(b"over and back").unwrap();
            let began = Instant::now();
            let before: u32 = counts.iter().sum();
            while counts.iter().sum::<u32>() == before {
                assert!(began.elapsed() < TIMEOUT, "{receive:?}: {counts:?}");
                let devices: [&mut dyn Device; 2] = [&mut device, &mut *other];
                for ((device, arena), count) in
                    devices.into_iter().zip(&mut arenas).zip(&mut counts)
                {
                    let mut burst = Burst::new();
                    device.receive(arena, &mut burst, 64).unwrap();
                    let mut answers = Burst::new();
                    for mut frame in burst.drain(..) {
                        if is_udp_to(arena.bytes(&frame), true, ECHO_PORT) {
                            reflect(arena.bytes_mut(&mut frame), true);
                            answers.push_back(frame);
                            *count += 1;
                        } else {
                            arena.free(frame);
                        }
                    }
                    device.transmit(arena, &mut answers).unwrap();
                    assert!(answers.is_empty());
                }
            }
            assert_eq!(client.recv(&mut [0; 64]).unwrap(), 13);
        }
        assert!(counts.iter().all(|&count| count > 0), "{receive:?}: {counts:?}");
    }
}

#[test]
fn vlan_tag_is_preserved() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(64);
        let mut near = open("tg0", receive, &mut arena);
        let mut far = open("tg1", receive, &mut arena);
        let mut tagged = numbered_frame(9, 100);
        tagged.splice(12..12, [0x81, 0x00, 0x60, 0x05]);
        let mut burst = Burst::from_iter(arena.alloc_from(&tagged));
        burst[0].set_checksum(Checksum::Partial { start: 38, offset: 8 });
        transmit_all(&mut far, &mut arena, &mut burst);
        let mut burst = receive_matching(&mut near, &mut arena, 1, is_numbered);
        assert_eq!(arena.bytes(&burst[0]), tagged, "{receive:?}");
        assert_eq!(burst[0].checksum(), Checksum::Partial { start: 38, offset: 8 });
        free_all(&mut arena, &mut burst);
    }
}

#[test]
fn receives_only_the_configured_addresses() {
    if !enter_namespace() {
        return;
    }
    veth();
    for receive in RECEIVE_MODES {
        let mut arena = arena(64);
        let wanted: Vec<IpAddr> = [DEVICE_V4, DEVICE_V6].map(|a| a.parse().unwrap()).into();
        let steering = Steering::Addresses(wanted);
        let config = PacketConfig::new("tg0").receive(receive).steering(steering);
        let mut device = PacketDevice::open(&config, &mut arena).unwrap();
        let mut far = open("tg1", receive, &mut arena);
        let mut burst = Burst::from_iter(arena.alloc_from(&numbered_frame(1, 60)));
        transmit_all(&mut far, &mut arena, &mut burst);
        for (local, remote) in [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)] {
            client(local, remote).send(b"for us").unwrap();
            let mut burst = receive_matching(&mut device, &mut arena, 1, |frame| {
                assert!(!is_numbered(frame), "{receive:?}");
                is_udp_to(frame, true, ECHO_PORT)
            });
            free_all(&mut arena, &mut burst);
        }
    }
}

#[test]
fn drops_frames_above_mtu_and_sends_the_rest() {
    if !enter_namespace() {
        return;
    }
    veth();
    let mut arena = arena(64);
    let mut near = open("tg0", ReceiveMode::Syscalls, &mut arena);
    let mut far = open("tg1", ReceiveMode::Syscalls, &mut arena);
    let mut burst = Burst::new();
    burst.extend(arena.alloc_from(&numbered_frame(1, 60)));
    burst.extend(arena.alloc_from(&numbered_frame(2, 1700)));
    burst.extend(arena.alloc_from(&numbered_frame(3, 60)));
    transmit_all(&mut far, &mut arena, &mut burst);
    let mut burst = receive_matching(&mut near, &mut arena, 2, is_numbered);
    assert_eq!(arena.bytes(&burst[1]), numbered_frame(3, 60));
    free_all(&mut arena, &mut burst);
    let counters = far.counters();
    assert_eq!((counters.transmitted, counters.drops.get(DropReason::TransmitFailed)), (2, 1));
}

#[test]
fn device_survives_link_down_but_not_deletion() {
    if !enter_namespace() {
        return;
    }
    for receive in RECEIVE_MODES {
        veth();
        let mut arena = arena(64);
        let mut device = open("tg0", receive, &mut arena);
        ip("link set tg0 down");
        ip("link set tg0 up");
        // The kernel takes a moment to use the link again: send until a datagram arrives.
        let client = client(KERNEL_V4, DEVICE_V4);
        let mut burst = Burst::new();
        let deadline = Instant::now() + TIMEOUT;
        while !burst.iter().any(|frame| is_udp_to(arena.bytes(frame), true, ECHO_PORT)) {
            assert!(Instant::now() < deadline, "{receive:?}");
            free_all(&mut arena, &mut burst);
            client.send(b"again").unwrap();
            sleep_on(&mut device);
            device.receive(&mut arena, &mut burst, 64).unwrap();
        }
        ip("link del tg0");
        free_all(&mut arena, &mut burst);
        let error = receive_until_error(&mut device, &mut arena);
        assert_eq!(error.raw_os_error(), Some(libc::ENETDOWN), "{receive:?}");
    }
}

#[test]
fn deletion_while_the_link_is_down_is_an_error() {
    if !enter_namespace() {
        return;
    }
    for receive in RECEIVE_MODES {
        veth();
        let mut arena = arena(64);
        let mut device = open("tg0", receive, &mut arena);
        let mut burst = Burst::new();
        let mut needs_retry = |device: &mut PacketDevice| {
            device.receive(&mut arena, &mut burst, 64).unwrap();
            device.prepare_sleep().unwrap();
            free_all(&mut arena, &mut burst);
            device.needs_retry()
        };
        for _ in 0..2 {
            assert!(!needs_retry(&mut device), "{receive:?}: the link is up");
            ip("link set tg0 down");
            assert!(needs_retry(&mut device), "{receive:?}: the link is down");
            ip("link set tg0 up");
        }
        ip("link set tg0 down");
        assert!(needs_retry(&mut device), "{receive:?}");
        // The kernel reports the deletion by no error of the socket.
        ip("link del tg0");
        let error = device.prepare_sleep().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENETDOWN), "{receive:?}");
        let error = device.receive(&mut arena, &mut burst, 64).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENETDOWN), "{receive:?}");
    }
}

#[test]
fn open_errors_say_what_to_do() {
    if !enter_namespace() {
        return;
    }
    veth();
    let mut arena = arena(8);
    let mut open_error =
        |config: PacketConfig| PacketDevice::open(&config, &mut arena).err().unwrap();
    let message = open_error(PacketConfig::new("eth7")).to_string();
    assert!(["eth7", "tg0", "tg1"].iter().all(|name| message.contains(name)), "{message}");
    if has_tun() {
        ip("tuntap add dev tun0 mode tun");
        ip("link set tun0 up");
        assert!(open_error(PacketConfig::new("tun0")).to_string().contains("tap device"));
    }
    let steering = Steering::Addresses(vec![KERNEL_V6.parse().unwrap()]);
    let shared = open_error(PacketConfig::new("tg0").steering(steering));
    assert!(matches!(&shared, PacketError::SharedAddress { interface, .. } if interface == "tg1"));
    assert!(shared.to_string().contains("--shared"));
    let small = PacketConfig::new("tg0").buffer_bytes(1);
    assert!(matches!(open_error(small), PacketError::BufferSize(1)));
    ip("link set tg0 down");
    assert!(open_error(PacketConfig::new("tg0")).to_string().contains("ip link set tg0 up"));
    ip("link set tg0 up");
    sandbox::drop_capabilities();
    let denied = open_error(PacketConfig::new("tg0"));
    assert!(matches!(denied, PacketError::Permission(_)), "{denied}");
    assert!(denied.to_string().contains("unshare -rn"));
}
