//! The AF_XDP device against the kernel, over veth pairs in network namespaces.

mod frames;
mod netns;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use netns::{
    FREE_ADDRESSES, LEFT_ADDRESSES, Namespace, RIGHT_ADDRESSES, VethPair, can_create_namespaces,
    run,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tidegate_device::admission::{self, ClassLimit, Classifier, Limits, MAX_CLASSES, RateLimit};
use tidegate_device::xdp::{
    AttachMode, BusyPoll, CopyMode, LoadedProgram, RingSizes, Steering, SteeringRule,
    TransportProtocol, XdpConfig, XdpDevice, XdpError, XdpLink,
};
use tidegate_device::{Burst, Device, HandoverState};
use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_wire::DropReason;

/// Time after which a waiting test fails.
const TIMEOUT: Duration = Duration::from_secs(20);
const ECHO_PORT: u16 = 7777;

fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

fn udp(port: u16) -> SteeringRule {
    SteeringRule::Port { protocol: TransportProtocol::Udp, address: None, port }
}

fn rules(rules: impl Into<Vec<SteeringRule>>) -> Steering {
    Steering::new(rules)
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

fn try_open(
    namespace: &Namespace,
    config: XdpConfig,
    arena: &mut Arena,
) -> Result<XdpDevice, XdpError> {
    namespace.run(|| XdpDevice::open(config, arena))
}

fn open(namespace: &Namespace, steering: Steering, arena: &mut Arena) -> XdpDevice {
    let config = XdpConfig::new(namespace.interface).steering(steering);
    try_open(namespace, config, arena).unwrap()
}

/// Calls `step` until it returns `Some`.
fn wait_until<R>(what: &str, mut step: impl FnMut() -> Option<R>) -> R {
    let start = Instant::now();
    loop {
        if let Some(result) = step() {
            return result;
        }
        assert!(start.elapsed() < TIMEOUT, "timed out: {what}");
        std::thread::yield_now();
    }
}

/// Receives until a frame matches `wanted`; frees the others.
fn receive_frame(
    device: &mut XdpDevice,
    arena: &mut Arena,
    what: &str,
    wanted: impl Fn(&[u8]) -> bool,
) -> Vec<u8> {
    let mut burst = Burst::new();
    wait_until(what, || {
        device.receive(arena, &mut burst, 1).unwrap();
        let frame = burst.pop_front()?;
        let bytes = arena.bytes(&frame).to_vec();
        arena.free(frame);
        wanted(&bytes).then_some(bytes)
    })
}

fn send_frame(device: &mut XdpDevice, arena: &mut Arena, bytes: &[u8]) {
    let mut burst = Burst::from([arena.alloc_from(bytes).unwrap()]);
    wait_until("space in the transmit ring", || {
        device.transmit(arena, &mut burst).unwrap();
        burst.is_empty().then_some(())
    });
}

/// Reflects one datagram sent to [`ECHO`].
fn echo_one(device: &mut XdpDevice, arena: &mut Arena) {
    let mut frame = receive_frame(device, arena, "a datagram", |_| true);
    frames::reflect(&mut frame);
    send_frame(device, arena, &frame);
}

/// Sends datagrams from the kernel of the right side and checks the echoes of the device.
fn check_echo(pair: &VethPair, device: &mut XdpDevice, arena: &mut Arena) {
    for (local, remote) in RIGHT_ADDRESSES.into_iter().zip(LEFT_ADDRESSES) {
        let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        for round in 0..5_u8 {
            socket.send_to(&[round; 100], at(remote, ECHO_PORT)).unwrap();
            echo_one(device, arena);
            let mut answer = [0; 200];
            let (len, from) = socket.recv_from(&mut answer).unwrap();
            assert_eq!((&answer[..len], from), (&[round; 100][..], at(remote, ECHO_PORT)));
        }
    }
}

/// Checks that the kernels of both sides exchange TCP data, in both families.
fn check_kernel_tcp(pair: &VethPair) {
    for remote in LEFT_ADDRESSES {
        let listener = pair.left.run(|| TcpListener::bind(at(remote, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let mut client = pair.right.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap());
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        client.write_all(b"still here").unwrap();
        let mut received = [0; 10];
        server.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"still here");
    }
}

fn is_attached(namespace: &Namespace) -> bool {
    let interface = namespace.interface;
    let output = run(namespace.command("ip").args(["-d", "link", "show", "dev", interface]));
    output.contains("xdp")
}

/// Waits until no XDP program is attached: a child process that another test is starting may hold
/// this process's descriptors for a moment.
fn wait_until_detached(namespace: &Namespace, what: &str) {
    wait_until(what, || (!is_attached(namespace)).then_some(()));
}

fn setting(namespace: &Namespace, name: &str) -> u64 {
    let path = format!("/sys/class/net/{}/{name}", namespace.interface);
    run(namespace.command("cat").arg(path)).trim().parse().unwrap()
}

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
fn unsteered_traffic_stays_with_the_kernel() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(4096);
    let mut device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut arena);
    check_kernel_tcp(&pair);
    let counters = device.steering_counters().unwrap();
    assert_eq!(counters.redirected, 0);
    assert!(counters.passed_not_steered > 0);
    assert_eq!(device.receive(&mut arena, &mut Burst::new(), 64).unwrap(), 0);
    device.close(&mut arena);
}

#[test]
fn steering_rules_change_while_the_device_is_open() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(4096);
    let mut device = open(&pair.left, Steering::default(), &mut arena);
    let client = pair.right.run(|| UdpSocket::bind(at(RIGHT_ADDRESSES[0], 0)).unwrap());
    let server = pair.left.run(|| UdpSocket::bind(at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap());
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut received = [0; 8];
    let to_kernel = |received: &mut [u8; 8]| {
        client.send_to(b"kernel", at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap();
        server.recv(received).unwrap()
    };
    assert_eq!(to_kernel(&mut received), 6);
    // A rule for one address, a rule for all addresses, and both at once.
    let one = SteeringRule::Port {
        protocol: TransportProtocol::Udp,
        address: LEFT_ADDRESSES[0].parse().ok(),
        port: ECHO_PORT,
    };
    for added in [vec![one], vec![udp(ECHO_PORT)], vec![one, udp(ECHO_PORT)]] {
        for &rule in &added {
            device.steer(rule).unwrap();
            device.steer(rule).unwrap();
        }
        assert_eq!(device.steering().rules, added);
        client.send_to(b"port", at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap();
        receive_frame(&mut device, &mut arena, "a datagram", |frame| frame.ends_with(b"port"));
        for rule in &added {
            device.unsteer(rule).unwrap();
        }
        assert_eq!(device.steering().rules, added, "each rule has a second user");
        client.send_to(b"again", at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap();
        receive_frame(&mut device, &mut arena, "a datagram", |frame| frame.ends_with(b"again"));
        for rule in &added {
            device.unsteer(rule).unwrap();
        }
        assert_eq!(to_kernel(&mut received), 6);
    }
    device.close(&mut arena);
}

#[test]
fn rules_end_with_the_device() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(4096);
    let device = open(&pair.left, rules([udp(ECHO_PORT), udp(ECHO_PORT + 1)]), &mut arena);
    let state = Box::new(device).close_for_handover(&mut arena, false);
    let Some(HandoverState::Xdp(mut loaded)) = state else { panic!("no handover state") };
    let config = XdpConfig::new(pair.left.interface).steering(rules([udp(ECHO_PORT + 1)]));
    // The kernel takes some time to release the queue.
    let mut device = wait_until("the queue is free", || {
        pair.left.run(|| XdpDevice::open_loaded(config.clone(), &mut loaded, &mut arena)).ok()
    });
    for (local, remote) in RIGHT_ADDRESSES.into_iter().zip(LEFT_ADDRESSES) {
        let server = pair.left.run(|| UdpSocket::bind(at(remote, ECHO_PORT)).unwrap());
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        let client = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        client.send_to(b"kernel", at(remote, ECHO_PORT)).unwrap();
        assert_eq!(server.recv(&mut [0; 8]).unwrap(), 6, "{remote}");
        client.send_to(b"device", at(remote, ECHO_PORT + 1)).unwrap();
        receive_frame(&mut device, &mut arena, "a datagram", |frame| frame.ends_with(b"device"));
    }
    device.close(&mut arena);
}

#[test]
fn steered_traffic_is_lost_not_passed_to_the_kernel_during_handover() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let kernel =
        LEFT_ADDRESSES.map(|own| pair.left.run(|| UdpSocket::bind(at(own, ECHO_PORT)).unwrap()));
    let fence = LEFT_ADDRESSES
        .map(|own| pair.left.run(|| UdpSocket::bind(at(own, ECHO_PORT + 1)).unwrap()));
    let clients =
        RIGHT_ADDRESSES.map(|own| pair.right.run(|| UdpSocket::bind(at(own, 0)).unwrap()));
    let send_to = |number: usize, what: &[u8], port| {
        clients[number].send_to(what, at(LEFT_ADDRESSES[number], port)).unwrap();
    };
    let check_lost = || {
        for number in 0..2 {
            send_to(number, b"lost", ECHO_PORT);
            // A datagram that the kernel receives after the lost datagram.
            send_to(number, b"fence", ECHO_PORT + 1);
            fence[number].set_read_timeout(Some(TIMEOUT)).unwrap();
            assert_eq!(fence[number].recv(&mut [0; 8]).unwrap(), 5);
            kernel[number].set_nonblocking(true).unwrap();
            let error = kernel[number].recv(&mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
        }
    };
    let check_received = |device: &mut XdpDevice, arena: &mut Arena| {
        for number in 0..2 {
            send_to(number, b"port", ECHO_PORT);
            receive_frame(device, arena, "a datagram", |frame| frame.ends_with(b"port"));
        }
    };
    let config = || XdpConfig::new(pair.left.interface);
    let open_loaded = |loaded: &mut LoadedProgram, arena: &mut Arena| {
        // The kernel takes some time to release the queue.
        wait_until("the queue is free", || {
            pair.left.run(|| XdpDevice::open_loaded(config(), loaded, arena)).ok()
        })
    };
    let device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut near);
    let close = |device: XdpDevice, arena: &mut Arena| match Box::new(device)
        .close_for_handover(arena, true)
    {
        Some(HandoverState::Xdp(loaded)) => *loaded,
        _ => panic!("no handover state"),
    };
    let mut loaded = close(device, &mut near);
    check_lost();
    // A device that takes over the loaded program receives the steered frames.
    let mut device = open_loaded(&mut loaded, &mut near);
    check_received(&mut device, &mut near);
    let old = close(device, &mut near);
    check_lost();
    // A device with its own program receives the frames of its rules once it goes live.
    let link = old.link().unwrap();
    let link = XdpLink::inherited(link.as_fd().try_clone_to_owned().unwrap(), link.native());
    let mut loaded = XdpDevice::load().unwrap();
    loaded.inherit(link);
    let mut device = open_loaded(&mut loaded, &mut far);
    device.steer(udp(ECHO_PORT)).unwrap();
    check_lost();
    device.take_over().unwrap();
    drop(old);
    check_received(&mut device, &mut far);
    device.close(&mut far);
    wait_until_detached(&pair.left, "the last device was closed");
    for (number, kernel) in kernel.iter().enumerate() {
        kernel.set_nonblocking(false).unwrap();
        kernel.set_read_timeout(Some(TIMEOUT)).unwrap();
        send_to(number, b"kernel", ECHO_PORT);
        assert_eq!(kernel.recv(&mut [0; 8]).unwrap(), 6);
    }
}

#[test]
fn takes_all_traffic_of_an_own_address() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(4096);
    let own = FREE_ADDRESSES.map(|address| SteeringRule::Address(address.parse().unwrap()));
    let mut device = open(&pair.left, rules(own), &mut arena);
    check_kernel_tcp(&pair);
    let before = device.steering_counters().unwrap().redirected;
    assert_eq!(before, 0, "a frame for another address was taken");
    for (local, own) in RIGHT_ADDRESSES.into_iter().zip(FREE_ADDRESSES) {
        let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        // The kernel resolves the hardware address first.
        socket.send_to(b"who has", at(own, 1)).unwrap();
        let address: IpAddr = own.parse().unwrap();
        let what = "an address resolution request";
        receive_frame(&mut device, &mut arena, what, |frame| {
            frames::is_resolution_request_for(frame, address)
        });
        // With the neighbour resolved, every fragment of a large datagram arrives.
        let neighbour = format!("neigh replace {own} lladdr 02:00:00:00:00:77 dev right");
        pair.right.ip(&neighbour);
        socket.send_to(&[7; 4000], at(own, 2)).unwrap();
        let mut bytes = 0;
        while bytes < 4000 + 8 {
            let frame = receive_frame(&mut device, &mut arena, "a fragment", |frame| {
                frames::is_fragment(frame)
            });
            bytes += frames::fragment_bytes(&frame);
        }
        assert_eq!(bytes, 4000 + 8);
    }
    device.close(&mut arena);
}

/// Sends every kind of frame as raw bytes, and checks the counter that must count it.
#[test]
fn steers_every_kind_of_frame_by_the_rules() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut steering = rules([udp(53)]);
    steering
        .rules
        .extend(FREE_ADDRESSES.map(|address| SteeringRule::Address(address.parse().unwrap())));
    steering.rules.extend(LEFT_ADDRESSES.map(|address| SteeringRule::Port {
        protocol: TransportProtocol::Tcp,
        address: address.parse().ok(),
        port: 853,
    }));
    let mut device = open(&pair.left, steering, &mut near);
    let mut burst = Burst::new();
    for case in frames::steering_cases(LEFT_ADDRESSES, FREE_ADDRESSES) {
        let before = device.steering_counters().unwrap();
        send_frame(&mut sender, &mut far, &case.frame);
        // The kernel sends frames of its own on the link now and then. So other counters may move
        // too, but not the counter of taken frames.
        wait_until(case.name, || {
            device.receive(&mut near, &mut burst, 64).unwrap();
            let now = device.steering_counters().unwrap();
            ((case.counter)(&now) > (case.counter)(&before)).then_some(())
        });
        let taken = device.steering_counters().unwrap().redirected - before.redirected;
        assert_eq!(taken, u64::from(case.taken), "{}", case.name);
        if case.taken {
            wait_until(case.name, || {
                device.receive(&mut near, &mut burst, 64).unwrap();
                let frame = burst.pop_front()?;
                assert_eq!(near.bytes(&frame), case.frame, "{}", case.name);
                near.free(frame);
                Some(())
            });
        }
        assert!(burst.is_empty(), "{}", case.name);
    }
    device.close(&mut near);
    sender.close(&mut far);
}

#[test]
fn takes_only_frames_of_the_vlan() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(1024), arena(1024));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let steering = Steering::new([udp(53)]).vlan(7);
    let mut device = open(&pair.left, steering, &mut near);
    for (tag, passed) in [(None, 1), (Some(8), 2), (Some(7 | 0x6000), 2)] {
        let frame = frames::datagram(LEFT_ADDRESSES[0], 53, tag);
        send_frame(&mut sender, &mut far, &frame);
        if tag == Some(7 | 0x6000) {
            receive_frame(&mut device, &mut near, "the VLAN's frame", |bytes| bytes == frame);
            assert_eq!(device.steering_counters().unwrap().redirected, 1);
        }
        wait_until("a frame of another VLAN", || {
            (device.steering_counters().unwrap().passed_other_vlan >= passed).then_some(())
        });
    }
    device.close(&mut near);
    sender.close(&mut far);
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

#[test]
fn deleted_interface_is_an_error() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    for busy_poll in [None, Some(BusyPoll::default())] {
        let mut arena = arena(1024);
        let config = XdpConfig::new("left").busy_poll(busy_poll);
        let pair = if busy_poll.is_some() { &VethPair::new(1) } else { &pair };
        let mut device = try_open(&pair.left, config, &mut arena).unwrap();
        pair.left.ip("link delete left");
        wait_until("an error", || device.prepare_sleep().err());
        device.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
    }
}

/// Child process of the tests below: opens a device on `left` of its namespace, prints a line,
/// and keeps the device until its input ends. Does nothing in the test process itself.
#[test]
fn child_holds_a_device() {
    if std::env::var_os("TIDEGATE_TEST_CHILD").is_none() {
        return;
    }
    let mut arena = arena(1024);
    let config =
        XdpConfig::new("left").busy_poll(BusyPoll::default()).steering(rules([udp(ECHO_PORT)]));
    let device = XdpDevice::open(config, &mut arena).unwrap();
    println!("\nopen: {}", device.capabilities().detail);
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    device.close(&mut arena);
}

/// Starts [`child_holds_a_port`] in a namespace and waits until its device is open.
fn start_child(namespace: &Namespace) -> std::process::Child {
    let mut command: Command =
        namespace.command(std::env::current_exe().unwrap().to_str().unwrap());
    let mut child = command
        .args(["--exact", "child_holds_a_device", "--nocapture"])
        .env("TIDEGATE_TEST_CHILD", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let open = lines.map_while(Result::ok).find(|line| line.starts_with("open: "));
    assert!(open.as_deref().is_some_and(|line| line.starts_with("open: native, copy, busy")));
    child
}

#[test]
fn kernel_resumes_after_the_process_is_killed() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let server = pair.left.run(|| UdpSocket::bind(at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap());
    let mut child = start_child(&pair.left);
    assert!(is_attached(&pair.left));
    check_kernel_tcp(&pair);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until_detached(&pair.left, "the killed process's program");
    check_kernel_tcp(&pair);
    // The UDP port that was steered belongs to the kernel again.
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    let client = pair.right.run(|| UdpSocket::bind(at(RIGHT_ADDRESSES[0], 0)).unwrap());
    client.send_to(b"back", at(LEFT_ADDRESSES[0], ECHO_PORT)).unwrap();
    assert_eq!(server.recv(&mut [0; 8]).unwrap(), 4);
    // The interface can be opened again.
    let mut arena = arena(1024);
    let mut device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut arena);
    check_echo(&pair, &mut device, &mut arena);
    device.close(&mut arena);
}

#[test]
fn interface_settings_are_restored() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let settings = |namespace| {
        ["napi_defer_hard_irqs", "gro_flush_timeout"].map(|name| setting(namespace, name))
    };
    let before = settings(&pair.left);
    let mut child = start_child(&pair.left);
    let BusyPoll { defer_irqs, flush_timeout_ns, .. } = BusyPoll::default();
    assert_eq!(settings(&pair.left), [u64::from(defer_irqs), flush_timeout_ns]);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(settings(&pair.left), before);
}

/// Error of opening a device with this configuration.
fn open_error(namespace: &Namespace, config: XdpConfig) -> XdpError {
    let mut arena = arena(1024);
    let error = try_open(namespace, config, &mut arena).err().expect("an error");
    assert_eq!(arena.available(), arena.capacity(), "{error}");
    error
}

#[test]
fn open_errors_name_the_cause_and_leave_nothing_behind() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let left = &pair.left;
    let config = || XdpConfig::new("left");
    let error_text = |config| {
        let error = open_error(left, config);
        wait_until_detached(left, &error.to_string());
        error.to_string()
    };

    let text = error_text(XdpConfig::new("nosuch0"));
    assert!(text.contains("nosuch0") && text.contains("left"), "{text}");
    assert!(error_text(XdpConfig::new("lo")).contains("`lo` is not an Ethernet interface"));
    assert!(error_text(XdpConfig::new("a-name-that-is-too-long")).contains("too-long"));

    let rings = RingSizes::default().receive(1000);
    assert!(error_text(config().rings(rings)).contains("1000 entries"));
    let queues = |queues: &[u32]| config().queues(queues.to_vec());
    assert!(error_text(queues(&[3])).contains("no receive queue 3: it has 1"));
    assert!(error_text(queues(&[])).contains("at least one"));
    assert!(error_text(queues(&[0, 0])).contains("only once"));
    let zero = config().copy(CopyMode::ZeroCopy);
    assert!(matches!(open_error(left, zero), XdpError::Socket { queue: 0, .. }));

    let many =
        (0..2000).map(|n| SteeringRule::Address(IpAddr::from([10, 1, (n >> 8) as u8, n as u8])));
    let many = config().steering(rules(many.collect::<Vec<_>>()));
    assert!(error_text(many).contains("1024 addresses"));

    left.ip("link set left mtu 3000");
    let text = error_text(config());
    assert!(text.contains("3000") && text.contains("ip link set dev left mtu 1774"), "{text}");
    left.ip("link set left mtu 1500 down");
    assert!(error_text(config()).contains("ip link set dev left up"));
    left.ip("link set left up");

    let error = left.run(|| {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none).unwrap();
        XdpDevice::open(config(), &mut arena(64)).err().unwrap()
    });
    assert!(matches!(error, XdpError::NotPermitted { .. }), "{error}");
    assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    wait_until_detached(left, "no permission");
}

#[test]
fn rejects_a_second_device_on_the_interface() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(1024);
    let mut device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut arena);
    let error = open_error(&pair.left, XdpConfig::new("left"));
    let own = format!("by process {} (", std::process::id());
    assert!(matches!(error, XdpError::AlreadyAttached { .. }), "{error}");
    assert!(error.to_string().contains(&own), "{error}");
    // The first device still works.
    check_echo(&pair, &mut device, &mut arena);
    device.close(&mut arena);
}

#[test]
fn large_peer_mtu_falls_back_to_generic_mode() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    pair.right.ip("link set right mtu 9000");
    let native = XdpConfig::new("left").mode(AttachMode::Native);
    let text = open_error(&pair.left, native).to_string();
    assert!(text.contains("MTU"), "{text}");
    let mut arena = arena(1024);
    let mut device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut arena);
    assert!(device.capabilities().detail.starts_with("generic, copy"));
    check_echo(&pair, &mut device, &mut arena);
    device.close(&mut arena);
}

/// Class rules with a single class for all packets.
fn one_class() -> Classifier {
    Classifier {
        rules: vec![admission::ClassRule {
            class: 0,
            family: 0,
            known: 0,
            protocol: u16::MAX,
            port_low: 0,
            port_high: 1 << 16,
            size_low: 0,
            size_high: u32::MAX,
            source: 0,
            source_mask: 0,
        }],
        default_class: 0,
        hash_seed: 1,
        hash_multiplier: 1,
    }
}

#[test]
fn refused_frames_are_dropped_on_the_interface() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(1024), arena(1024));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut device = open(&pair.left, rules([udp(53)]), &mut near);
    device.early_drop().unwrap().set_classifier(&one_class()).unwrap();
    // An interval so long that the test is over before a second packet is due.
    let one_packet = RateLimit::Limited { interval_ns: 3_000_000_000_000, burst_ns: 0 };
    let closed = ClassLimit { class: RateLimit::Closed, source: RateLimit::Unlimited };
    let limited = ClassLimit { class: one_packet, source: RateLimit::Unlimited };
    let two = RateLimit::Limited { interval_ns: 3_000_000_000_000, burst_ns: 3_000_000_000_000 };
    let shared = ClassLimit { class: two, source: one_packet };
    let reasons = [
        DropReason::AdmissionClassClosed,
        DropReason::AdmissionRate,
        DropReason::AdmissionSourceShare,
    ];
    let expected = [[3, 0, 0], [3, 2, 0], [3, 2, 2]];
    let cases = [
        (closed, LEFT_ADDRESSES[0], 0),
        (limited, LEFT_ADDRESSES[1], 1),
        (shared, LEFT_ADDRESSES[0], 1),
    ];
    for ((limit, address, admitted), expected) in cases.into_iter().zip(expected) {
        let classes = [limit; MAX_CLASSES];
        let limits = Limits { total: RateLimit::Unlimited, classes };
        device.early_drop().unwrap().set_limits(Some(&limits)).unwrap();
        // A UDP port without a rule stays with the kernel, whatever the limits are.
        for to in [54, 53, 53, 53] {
            send_frame(&mut sender, &mut far, &frames::datagram(address, to, None));
        }
        let drops = |device: &mut XdpDevice| {
            let counters = device.counters();
            reasons.map(|reason| counters.drops.get(reason))
        };
        wait_until("the drops", || (drops(&mut device) == expected).then_some(()));
        let mut burst = Burst::new();
        wait_until("what was admitted", || {
            device.receive(&mut near, &mut burst, 64).unwrap();
            (burst.len() >= admitted).then_some(())
        });
        assert_eq!(burst.len(), admitted);
        burst.drain(..).for_each(|frame| near.free(frame));
    }
    // Without limits every frame is admitted, and none is examined or counted.
    device.early_drop().unwrap().set_limits(None).unwrap();
    for address in LEFT_ADDRESSES {
        let frame = frames::datagram(address, 53, None);
        send_frame(&mut sender, &mut far, &frame);
        receive_frame(&mut device, &mut near, "a datagram", |bytes| bytes == frame);
    }
    assert_eq!(device.counters().drops.total(), 7);
    device.close(&mut near);
    sender.close(&mut far);
}
