//! Frames between the device and kernel sockets.

use super::*;

#[test]
fn exchanges_datagrams_with_kernel_sockets() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let busy_poll = Some(BusyPoll::default());
    let cases = [
        (AttachMode::Auto, CopyMode::Auto, None, "native, copy"),
        (AttachMode::Native, CopyMode::Copy, busy_poll, "native, copy, busy polling"),
        (AttachMode::Generic, CopyMode::Auto, None, "generic, copy"),
    ];
    let mut arena = arena(4096);
    for (mode, copy, busy_poll, detail) in cases {
        let config = XdpConfig::new("left")
            .mode(mode)
            .copy(copy)
            .busy_poll(busy_poll)
            .steering(rules([udp(ECHO_PORT)]));
        let mut device = try_open(&pair.left, config, &mut arena).unwrap();
        let capabilities = device.capabilities().clone();
        assert!(capabilities.detail.starts_with(detail), "{}", capabilities.detail);
        let deferred = capabilities.detail.contains(", interrupts deferred 200 us");
        assert_eq!(deferred, busy_poll.is_some(), "{}", capabilities.detail);
        assert_eq!((capabilities.mtu, capabilities.queues), (1500, 1));
        check_echo(&pair, &mut device, &mut arena);
        let counters = device.counters();
        assert_eq!((counters.received, counters.transmitted), (10, 10));
        assert_eq!(counters.received_bytes, 5 * (100 + 42) + 5 * (100 + 62));
        assert_eq!(counters.drops.total(), 0, "{:?}", counters.drops);
        assert_eq!(device.steering_counters().unwrap().redirected, 10);
        device.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
        wait_until_detached(&pair.left, detail);
    }
}

/// Headers of a datagram, by the family of its addresses.
fn udp_offset(address: &str) -> usize {
    if address.contains(':') { 54 } else { 34 }
}

/// A veth as Linux makes it: senders leave checksum and segmentation to their device.
#[test]
fn accepts_unfilled_checksums_of_local_senders() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::with_offloads(1);
    let mut arena = arena(4096);
    for mode in [AttachMode::Native, AttachMode::Generic] {
        let config = XdpConfig::new("left").mode(mode).steering(rules([udp(ECHO_PORT)]));
        let mut device = try_open(&pair.left, config, &mut arena).unwrap();
        assert!(device.capabilities().receive_checksum);
        for (local, remote) in RIGHT_ADDRESSES.into_iter().zip(LEFT_ADDRESSES) {
            let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
            let partial = Checksum::Partial { start: udp_offset(local) as u16, offset: 6 };
            socket.send_to(b"a datagram", at(remote, ECHO_PORT)).unwrap();
            let (bytes, checksum) = receive_checked(&mut device, &mut arena);
            assert_eq!((&bytes[udp_offset(local) + 8..], checksum), (&b"a datagram"[..], partial));
        }
        assert_eq!(device.counters().drops.total(), 0);
        device.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
        wait_until_detached(&pair.left, "the next mode");
    }
}

/// The kernel segments for a native program; in generic mode the device does it.
#[test]
fn streams_of_local_senders_arrive_in_segments() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::with_offloads(1);
    let mut arena = arena(4096);
    for mode in [AttachMode::Native, AttachMode::Generic] {
        let steering = LEFT_ADDRESSES.map(|address| SteeringRule::Port {
            protocol: TransportProtocol::Tcp,
            address: Some(address.parse().unwrap()),
            port: ECHO_PORT,
        });
        for (local, remote) in RIGHT_ADDRESSES.into_iter().zip(LEFT_ADDRESSES) {
            // The connection is the kernel's; its data is sent while the device is open.
            let listener = pair.left.run(|| TcpListener::bind(at(remote, ECHO_PORT)).unwrap());
            let mut client = pair.right.run(|| TcpStream::connect(at(remote, ECHO_PORT)).unwrap());
            let _server = listener.accept().unwrap();
            let config = XdpConfig::new("left").mode(mode).steering(rules(steering));
            let mut device = try_open(&pair.left, config, &mut arena).unwrap();
            // Less than the first window.
            let sent: Vec<u8> = (0..12_000).map(|n| (n % 251) as u8).collect();
            client.write_all(&sent).unwrap();
            let header = udp_offset(local) + 32;
            let partial = Checksum::Partial { start: udp_offset(local) as u16, offset: 16 };
            let (mut received, mut first) = (vec![None; sent.len()], None);
            while received.contains(&None) {
                let (bytes, checksum) = receive_checked(&mut device, &mut arena);
                assert!(bytes.len() <= 1514, "{mode:?}: a frame of {} bytes", bytes.len());
                assert_eq!(checksum, partial, "{mode:?}");
                let sequence = &bytes[udp_offset(local) + 4..][..4];
                let sequence = u32::from_be_bytes(sequence.try_into().unwrap());
                let offset = sequence.wrapping_sub(*first.get_or_insert(sequence)) as usize;
                for (to, &byte) in received[offset..].iter_mut().zip(&bytes[header..]) {
                    *to = Some(byte);
                }
            }
            assert!(received.into_iter().flatten().eq(sent), "{mode:?} {local}");
            assert_eq!(device.counters().drops.total(), 0, "{mode:?}");
            device.close(&mut arena);
            wait_until_detached(&pair.left, "the next connection");
        }
    }
}

/// A run of segments is one frame on its way to the kernel, and segments again on a wire. What is
/// before and after it stays in its place.
#[test]
fn sends_runs_of_segments_as_one_frame() {
    if !can_create_namespaces() {
        return;
    }
    let mut near = arena(256);
    let config = ArenaConfig { frames: 256, frame_size: FrameSize::K64, hugepages: false };
    let mut far = Arena::new(config).unwrap();
    let payload: Vec<u8> = (0..9_500).map(|n| (n % 251) as u8).collect();
    for (pair, is_merged) in [(VethPair::with_offloads(1), true), (VethPair::new(1), false)] {
        let mut device = open(&pair.left, Steering::default(), &mut near);
        let config = PacketConfig::new("right").segmentation(true);
        let mut receiver = pair.right.run(|| PacketDevice::open(&config, &mut far).unwrap());
        for address in RIGHT_ADDRESSES {
            let headers_bytes = udp_offset(address) + 20;
            let others = [8, 9].map(|port| frames::segment(address, port, 7, &payload[..1000]));
            let run = payload.chunks(1000).scan(u32::MAX - 2_000, |sequence, part| {
                let segment = frames::segment(address, 7, *sequence, part);
                *sequence = sequence.wrapping_add(part.len() as u32);
                Some(segment)
            });
            let sent: Vec<_> =
                [others[0].clone()].into_iter().chain(run).chain([others[1].clone()]).collect();
            let mut burst: Burst =
                sent.iter().map(|frame| near.alloc_from(frame).unwrap()).collect();
            assert_eq!(device.transmit(&mut near, &mut burst).unwrap(), sent.len());
            let (mut received, mut segments) = (Vec::new(), Burst::new());
            wait_until("all segments", || {
                receiver.receive(&mut far, &mut segments, 64).unwrap();
                for frame in segments.drain(..) {
                    let bytes = far.bytes(&frame);
                    let port = |bytes: &[u8]| bytes.get(udp_offset(address) + 3).copied();
                    if bytes[12..14] == others[0][12..14] && matches!(port(bytes), Some(7..=9)) {
                        let payload = bytes[headers_bytes..].to_vec();
                        received.push((port(bytes), frame.segment_bytes(), payload));
                    }
                    far.free(frame);
                }
                received.iter().any(|(port, _, _)| *port == Some(9)).then_some(())
            });
            let expected: Vec<_> = match is_merged {
                true => vec![(Some(7), 1000, payload.clone())],
                false => payload.chunks(1000).map(|part| (Some(7), 0, part.to_vec())).collect(),
            };
            let other = |port| (Some(port), 0, payload[..1000].to_vec());
            let expected: Vec<_> =
                [other(8)].into_iter().chain(expected).chain([other(9)]).collect();
            assert!(received == expected, "{address}: {} frames", received.len());
        }
        assert_eq!(device.counters().transmitted, 2 * 12);
        assert_eq!(device.counters().drops.total(), 0);
        device.close(&mut near);
        assert_eq!(near.available(), near.capacity(), "all frames came back");
    }
}

/// Receives one frame with the state of its checksum.
fn receive_checked(device: &mut XdpDevice, arena: &mut Arena) -> (Vec<u8>, Checksum) {
    let mut burst = Burst::new();
    wait_until("a frame", || {
        device.receive(arena, &mut burst, 1).unwrap();
        let frame = burst.pop_front()?;
        let (bytes, checksum) = (arena.bytes(&frame).to_vec(), frame.checksum());
        arena.free(frame);
        Some((bytes, checksum))
    })
}

#[test]
fn serves_every_configured_queue() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(2);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut device = open(&pair.left, rules([udp(53)]), &mut near);
    assert_eq!((sender.capabilities().queues, device.capabilities().queues), (2, 2));
    // Each burst leaves by the next queue and arrives on the same queue.
    for _ in 0..8 {
        let frame = frames::datagram(LEFT_ADDRESSES[0], 53, None);
        send_frame(&mut sender, &mut far, &frame);
        receive_frame(&mut device, &mut near, "a frame of each queue", |bytes| bytes == frame);
    }
    device.close(&mut near);
    // A device on one of two queues leaves the frames of the other queue to the kernel.
    let config = XdpConfig::new("left").queues(vec![1]).steering(rules([udp(53)]));
    let mut device = try_open(&pair.left, config, &mut near).unwrap();
    let frame = frames::datagram(LEFT_ADDRESSES[0], 53, None);
    for _ in 0..2 {
        send_frame(&mut sender, &mut far, &frame);
    }
    receive_frame(&mut device, &mut near, "a frame of queue 1", |bytes| bytes == frame);
    wait_until("a frame of queue 0", || {
        let counters = device.steering_counters().unwrap();
        ((counters.redirected, counters.passed_no_socket) == (1, 1)).then_some(())
    });
    device.close(&mut near);
    sender.close(&mut far);
}

#[test]
fn survives_and_counts_a_flood_on_a_small_arena() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(128), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut device = open(&pair.left, rules([udp(53)]), &mut near);
    let flood = frames::datagram(LEFT_ADDRESSES[0], 53, None);
    let sent = 20_000;
    let mut left = sent;
    let (mut burst, mut held) = (Burst::new(), Burst::new());
    while left > 0 {
        while burst.len() < left.min(64) {
            let Some(frame) = far.alloc_from(&flood) else { break };
            burst.push_back(frame);
        }
        left -= sender.transmit(&mut far, &mut burst).unwrap();
        // Hold up to the whole arena, as a slow stack would.
        device.receive(&mut near, &mut held, 16).unwrap();
        if near.available() == 0 {
            held.drain(..).for_each(|frame| near.free(frame));
        }
    }
    held.drain(..).for_each(|frame| near.free(frame));
    let lost_before = sender.counters().drops.get(DropReason::TransmitFailed);
    wait_until("the end of the flood", || {
        device.receive(&mut near, &mut held, 64).unwrap();
        held.drain(..).for_each(|frame| near.free(frame));
        let counters = device.counters();
        let seen = counters.received + counters.drops.total();
        (seen + lost_before == sent as u64).then_some(())
    });
    // Buffers are available again for later frames.
    let late = frames::datagram(LEFT_ADDRESSES[1], 53, None);
    send_frame(&mut sender, &mut far, &late);
    receive_frame(&mut device, &mut near, "a frame after the flood", |bytes| bytes == late);
    device.close(&mut near);
    sender.close(&mut far);
    assert_eq!(near.available(), near.capacity());
    assert_eq!(far.available(), far.capacity());
}

#[test]
fn arriving_frame_wakes_a_sleeper() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(4096);
    for busy_poll in [None, Some(BusyPoll::default())] {
        let config = XdpConfig::new("left").busy_poll(busy_poll).steering(rules([udp(ECHO_PORT)]));
        let mut device = try_open(&pair.left, config, &mut arena).unwrap();
        let client = pair.right.run(|| UdpSocket::bind(at(RIGHT_ADDRESSES[0], 0)).unwrap());
        for _ in 0..3 {
            assert!(device.prepare_sleep().unwrap(), "nothing was sent yet");
            client.send_to(b"wake up", at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap();
            let fd = device.wake_fd().unwrap();
            let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
            let woken = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap();
            assert_eq!(woken, 1, "busy polling: {}", busy_poll.is_some());
            assert!(!device.prepare_sleep().unwrap(), "a frame waits");
            receive_frame(&mut device, &mut arena, "the frame", |frame| {
                frame.ends_with(b"wake up")
            });
        }
        device.close(&mut arena);
    }
}

#[test]
fn counts_frames_that_cannot_be_sent() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(1024);
    let mut device = open(&pair.left, Steering::default(), &mut arena);
    let mut burst = Burst::from([arena.alloc_from(&[1; 13]).unwrap(), arena.alloc().unwrap()]);
    assert_eq!(device.transmit(&mut arena, &mut burst).unwrap(), 2);
    assert_eq!(device.counters().drops.get(DropReason::TransmitFailed), 2);
    assert_eq!(device.counters().transmitted, 0);
    device.close(&mut arena);
}

/// Two network cores with a queue each, and an arena each.
#[test]
fn queues_are_shared_out_among_cores() {
    if !can_create_namespaces() {
        return;
    }
    for busy_poll in [None, Some(BusyPoll::default())] {
        let pair = VethPair::new(2);
        let config =
            XdpConfig::new("left").cores(2).busy_poll(busy_poll).steering(rules([udp(ECHO_PORT)]));
        let (mut arena, mut other_arena) = (arena(2048), arena(2048));
        let mut device = try_open(&pair.left, config, &mut arena).unwrap();
        assert_eq!(device.capabilities().queues, 1);
        let mut offered = device.offer_queues();
        assert_eq!(offered.len(), 1, "{busy_poll:?}");
        assert!(device.offer_queues().is_empty(), "offered once");
        let open = offered.remove(0);
        let mut other = pair.left.run(|| open(&mut other_arena)).unwrap();
        // The kernel chooses the queue by the sender's transmit queue: the hash of the flow.
        let (mut by_first, mut by_other) = (0, 0);
        for (local, remote) in RIGHT_ADDRESSES.into_iter().zip(LEFT_ADDRESSES) {
            for number in 0..32_u8 {
                let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
                socket.set_read_timeout(Some(TIMEOUT)).unwrap();
                socket.send_to(&[number; 100], at(remote, ECHO_PORT)).unwrap();
                wait_until("the datagram on one of the queues", || {
                    let first = echo_waiting(&mut device, &mut arena);
                    let second = echo_waiting(&mut *other, &mut other_arena);
                    (by_first, by_other) = (by_first + first, by_other + second);
                    (first + second > 0).then_some(())
                });
                let mut answer = [0; 200];
                let (len, from) = socket.recv_from(&mut answer).unwrap();
                assert_eq!((&answer[..len], from), (&[number; 100][..], at(remote, ECHO_PORT)));
            }
        }
        assert_eq!(by_first + by_other, 64);
        assert!(by_first > 0 && by_other > 0, "{by_first} and {by_other}");
        assert_eq!(other.counters().received, by_other);
        drop(other.close_for_handover(&mut other_arena, false));
        device.close(&mut arena);
        assert_eq!(other_arena.available(), other_arena.capacity());
        assert_eq!(arena.available(), arena.capacity());
        wait_until_detached(&pair.left, "the next case");
    }
}

/// Reflects the datagrams that wait, and returns their number.
fn echo_waiting(device: &mut dyn Device, arena: &mut Arena) -> u64 {
    let mut burst = Burst::new();
    device.receive(arena, &mut burst, 64).unwrap();
    let count = burst.len() as u64;
    for frame in burst.drain(..) {
        let mut bytes = arena.bytes(&frame).to_vec();
        arena.free(frame);
        frames::reflect(&mut bytes);
        let mut answer = Burst::from([arena.alloc_from(&bytes).unwrap()]);
        device.transmit(arena, &mut answer).unwrap();
        assert!(answer.is_empty());
    }
    count
}
