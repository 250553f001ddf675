//! The AF_XDP port against the kernel, over veth pairs in namespaces.

mod frames;
mod netns;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use netns::{LEFT, Namespace, OWN, Pair, RIGHT, may_make_namespaces, run};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::admission::{self, ClassLimit, Pace, Program};
use tidegate_port::xdp::{
    BusyPoll, Copy, Link, Loaded, Mode, Protocol, RingSizes, Rule, Steering, XdpConfig, XdpError,
    XdpPort,
};
use tidegate_port::{Burst, Left, Port};
use tidegate_wire::DropReason;

/// A test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);
const ECHO: u16 = 7777;

fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

fn udp(port: u16) -> Rule {
    Rule::Port { protocol: Protocol::Udp, address: None, port }
}

fn rules(rules: impl Into<Vec<Rule>>) -> Steering {
    Steering { rules: rules.into(), vlan: None }
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

fn try_open(
    namespace: &Namespace,
    config: XdpConfig,
    arena: &mut Arena,
) -> Result<XdpPort, XdpError> {
    namespace.run(|| XdpPort::open(config, arena))
}

fn open(namespace: &Namespace, steering: Steering, arena: &mut Arena) -> XdpPort {
    let config = XdpConfig { steering, ..XdpConfig::new(namespace.interface) };
    try_open(namespace, config, arena).unwrap()
}

/// Calls `step` until it returns something.
fn until<R>(what: &str, mut step: impl FnMut() -> Option<R>) -> R {
    let start = Instant::now();
    loop {
        if let Some(result) = step() {
            return result;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// Receives until a frame arrives that `wanted` accepts; others are freed.
fn receive_frame(
    port: &mut XdpPort,
    arena: &mut Arena,
    what: &str,
    wanted: impl Fn(&[u8]) -> bool,
) -> Vec<u8> {
    let mut burst = Burst::new();
    until(what, || {
        port.receive(arena, &mut burst, 1).unwrap();
        let frame = burst.pop_front()?;
        let bytes = arena.bytes(&frame).to_vec();
        arena.free(frame);
        wanted(&bytes).then_some(bytes)
    })
}

fn send_frame(port: &mut XdpPort, arena: &mut Arena, bytes: &[u8]) {
    let mut burst = Burst::from([arena.alloc_from(bytes).unwrap()]);
    until("room to send", || {
        port.transmit(arena, &mut burst).unwrap();
        burst.is_empty().then_some(())
    });
}

/// Reflects one datagram that comes to [`ECHO`].
fn reflect_one(port: &mut XdpPort, arena: &mut Arena) {
    let mut frame = receive_frame(port, arena, "a datagram", |_| true);
    frames::turn_round(&mut frame);
    send_frame(port, arena, &frame);
}

/// Sends datagrams from the kernel of the right side and has them answered.
fn exchange(pair: &Pair, port: &mut XdpPort, arena: &mut Arena) {
    for (local, remote) in RIGHT.into_iter().zip(LEFT) {
        let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        for round in 0..5_u8 {
            socket.send_to(&[round; 100], at(remote, ECHO)).unwrap();
            reflect_one(port, arena);
            let mut answer = [0; 200];
            let (len, from) = socket.recv_from(&mut answer).unwrap();
            assert_eq!((&answer[..len], from), (&[round; 100][..], at(remote, ECHO)));
        }
    }
}

/// Has the kernels of both sides talk TCP, in both families.
fn kernel_tcp_works(pair: &Pair) {
    for remote in LEFT {
        let listener = pair.left.run(|| TcpListener::bind(at(remote, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let mut client = pair.right.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(b"still here").unwrap();
        let mut said = [0; 10];
        server.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"still here");
    }
}

fn is_attached(namespace: &Namespace) -> bool {
    let interface = namespace.interface;
    let shown = run(namespace.command("ip").args(["-d", "link", "show", "dev", interface]));
    shown.contains("xdp")
}

/// Waits until no program is attached: a program that another test is about to
/// start holds this process's descriptors for a moment.
fn until_detached(namespace: &Namespace, what: &str) {
    until(what, || (!is_attached(namespace)).then_some(()));
}

fn setting(namespace: &Namespace, name: &str) -> u64 {
    let path = format!("/sys/class/net/{}/{name}", namespace.interface);
    run(namespace.command("cat").arg(path)).trim().parse().unwrap()
}

#[test]
fn kernel_sockets_and_the_port_exchange_datagrams() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let busy_poll = Some(BusyPoll::default());
    let ways = [
        (Mode::Auto, Copy::Auto, None, "native, copy"),
        (Mode::Native, Copy::Copy, busy_poll, "native, copy, busy polling"),
        (Mode::Generic, Copy::Auto, None, "generic, copy"),
    ];
    let mut arena = arena(4096);
    for (mode, copy, busy_poll, detail) in ways {
        let config = XdpConfig {
            mode,
            copy,
            busy_poll,
            steering: rules([udp(ECHO)]),
            ..XdpConfig::new("left")
        };
        let mut port = try_open(&pair.left, config, &mut arena).unwrap();
        let capabilities = port.capabilities().clone();
        assert!(capabilities.detail.starts_with(detail), "{}", capabilities.detail);
        let deferred = capabilities.detail.ends_with(", interrupts deferred 200 us");
        assert_eq!(deferred, busy_poll.is_some(), "{}", capabilities.detail);
        assert_eq!((capabilities.mtu, capabilities.queues), (1500, 1));
        exchange(&pair, &mut port, &mut arena);
        let counters = port.counters();
        assert_eq!((counters.received, counters.transmitted), (10, 10));
        assert_eq!(counters.received_bytes, 5 * (100 + 42) + 5 * (100 + 62));
        assert_eq!(counters.drops.total(), 0, "{:?}", counters.drops);
        assert_eq!(port.steering_counters().unwrap().taken, 10);
        port.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
        until_detached(&pair.left, detail);
    }
}

#[test]
fn what_was_not_asked_for_stays_with_the_kernel() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena(4096);
    let mut port = open(&pair.left, rules([udp(ECHO)]), &mut arena);
    kernel_tcp_works(&pair);
    let counters = port.steering_counters().unwrap();
    assert_eq!(counters.taken, 0);
    assert!(counters.passed_not_steered > 0);
    assert_eq!(port.receive(&mut arena, &mut Burst::new(), 64).unwrap(), 0);
    port.close(&mut arena);
}

#[test]
fn rules_come_and_go_while_the_port_is_open() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena(4096);
    let mut port = open(&pair.left, Steering::default(), &mut arena);
    let client = pair.right.run(|| UdpSocket::bind(at(RIGHT[0], 0)).unwrap());
    let server = pair.left.run(|| UdpSocket::bind(at(LEFT[0], ECHO)).unwrap());
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut said = [0; 8];
    let to_kernel = |said: &mut [u8; 8]| {
        client.send_to(b"kernel", at(LEFT[0], ECHO)).unwrap();
        server.recv(said).unwrap()
    };
    assert_eq!(to_kernel(&mut said), 6);
    // A rule for one address, one for all, and both at once.
    let one = Rule::Port { protocol: Protocol::Udp, address: LEFT[0].parse().ok(), port: ECHO };
    for added in [vec![one], vec![udp(ECHO)], vec![one, udp(ECHO)]] {
        for &rule in &added {
            port.steer(rule).unwrap();
            port.steer(rule).unwrap();
        }
        assert_eq!(port.steering().rules, added);
        client.send_to(b"port", at(LEFT[0], ECHO)).unwrap();
        receive_frame(&mut port, &mut arena, "a datagram", |frame| frame.ends_with(b"port"));
        for rule in &added {
            port.unsteer(rule).unwrap();
            port.unsteer(rule).unwrap();
        }
        assert_eq!(to_kernel(&mut said), 6);
    }
    port.close(&mut arena);
}

#[test]
fn what_was_taken_is_lost_and_not_the_kernels_until_there_is_a_port_again() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let kernel = LEFT.map(|own| pair.left.run(|| UdpSocket::bind(at(own, ECHO)).unwrap()));
    let fence = LEFT.map(|own| pair.left.run(|| UdpSocket::bind(at(own, ECHO + 1)).unwrap()));
    let clients = RIGHT.map(|own| pair.right.run(|| UdpSocket::bind(at(own, 0)).unwrap()));
    let said = |number: usize, what: &[u8], port| {
        clients[number].send_to(what, at(LEFT[number], port)).unwrap();
    };
    let nobody_hears = || {
        for number in 0..2 {
            said(number, b"lost", ECHO);
            // What the kernel gets after it.
            said(number, b"fence", ECHO + 1);
            fence[number].set_read_timeout(Some(PATIENCE)).unwrap();
            assert_eq!(fence[number].recv(&mut [0; 8]).unwrap(), 5);
            kernel[number].set_nonblocking(true).unwrap();
            let heard = kernel[number].recv(&mut [0; 8]).unwrap_err();
            assert_eq!(heard.kind(), ErrorKind::WouldBlock);
        }
    };
    let port_hears = |port: &mut XdpPort, arena: &mut Arena| {
        for number in 0..2 {
            said(number, b"port", ECHO);
            receive_frame(port, arena, "a datagram", |frame| frame.ends_with(b"port"));
        }
    };
    let config = || XdpConfig::new(pair.left.interface);
    let open_loaded = |loaded: &mut Loaded, arena: &mut Arena| {
        // The kernel takes its time to let go of the queue.
        until("the queue is free", || {
            pair.left.run(|| XdpPort::open_loaded(config(), loaded, arena)).ok()
        })
    };
    let port = open(&pair.left, rules([udp(ECHO)]), &mut near);
    let close = |port: XdpPort, arena: &mut Arena| match Box::new(port).close_for_now(arena, true) {
        Some(Left::Xdp(loaded)) => *loaded,
        _ => panic!("nothing is left"),
    };
    let mut loaded = close(port, &mut near);
    nobody_hears();
    // A port in the same place has what was taken.
    let mut port = open_loaded(&mut loaded, &mut near);
    port_hears(&mut port, &mut near);
    let old = close(port, &mut near);
    nobody_hears();
    // One with a program of its own has what it says, when it says that it is there.
    let link = old.link().unwrap();
    let link = Link::inherited(link.as_fd().try_clone_to_owned().unwrap(), link.native());
    let mut loaded = XdpPort::load().unwrap();
    loaded.inherit(link);
    let mut port = open_loaded(&mut loaded, &mut far);
    port.steer(udp(ECHO)).unwrap();
    nobody_hears();
    port.go_live().unwrap();
    drop(old);
    port_hears(&mut port, &mut far);
    port.close(&mut far);
    until_detached(&pair.left, "the last one was closed");
    for (number, kernel) in kernel.iter().enumerate() {
        kernel.set_nonblocking(false).unwrap();
        kernel.set_read_timeout(Some(PATIENCE)).unwrap();
        said(number, b"kernel", ECHO);
        assert_eq!(kernel.recv(&mut [0; 8]).unwrap(), 6);
    }
}

#[test]
fn an_address_of_its_own_is_taken_whole() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena(4096);
    let own = OWN.map(|address| Rule::Address(address.parse().unwrap()));
    let mut port = open(&pair.left, rules(own), &mut arena);
    kernel_tcp_works(&pair);
    let before = port.steering_counters().unwrap().taken;
    assert_eq!(before, 0, "something about another address was taken");
    for (local, own) in RIGHT.into_iter().zip(OWN) {
        let socket = pair.right.run(|| UdpSocket::bind(at(local, 0)).unwrap());
        // The kernel asks for the hardware address first.
        socket.send_to(b"who has", at(own, 1)).unwrap();
        let address: IpAddr = own.parse().unwrap();
        let what = "a question for the hardware address";
        receive_frame(&mut port, &mut arena, what, |frame| frames::asks_for(frame, address));
        // Once it knows, every fragment of a large datagram arrives.
        let neighbour = format!("neigh replace {own} lladdr 02:00:00:00:00:77 dev right");
        pair.right.ip(&neighbour);
        socket.send_to(&[7; 4000], at(own, 2)).unwrap();
        let mut bytes = 0;
        while bytes < 4000 + 8 {
            let frame = receive_frame(&mut port, &mut arena, "a fragment", |frame| {
                frames::is_fragment(frame)
            });
            bytes += frames::fragment_bytes(&frame);
        }
        assert_eq!(bytes, 4000 + 8);
    }
    port.close(&mut arena);
}

/// Every kind of frame, sent as raw bytes, and the counter that must see it.
#[test]
fn every_frame_goes_where_the_rules_say() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut steering = rules([udp(53)]);
    steering.rules.extend(OWN.map(|address| Rule::Address(address.parse().unwrap())));
    steering.rules.extend(LEFT.map(|address| Rule::Port {
        protocol: Protocol::Tcp,
        address: address.parse().ok(),
        port: 853,
    }));
    let mut port = open(&pair.left, steering, &mut near);
    let mut burst = Burst::new();
    for case in frames::steering_cases(LEFT, OWN) {
        let before = port.steering_counters().unwrap();
        send_frame(&mut sender, &mut far, &case.frame);
        // The kernel has a word of its own on the link now and then, so other
        // counters may move too, but not the one for frames that are taken.
        until(case.name, || {
            port.receive(&mut near, &mut burst, 64).unwrap();
            let now = port.steering_counters().unwrap();
            ((case.counter)(&now) > (case.counter)(&before)).then_some(())
        });
        let taken = port.steering_counters().unwrap().taken - before.taken;
        assert_eq!(taken, u64::from(case.taken), "{}", case.name);
        if case.taken {
            until(case.name, || {
                port.receive(&mut near, &mut burst, 64).unwrap();
                let frame = burst.pop_front()?;
                assert_eq!(near.bytes(&frame), case.frame, "{}", case.name);
                near.free(frame);
                Some(())
            });
        }
        assert!(burst.is_empty(), "{}", case.name);
    }
    port.close(&mut near);
    sender.close(&mut far);
}

#[test]
fn only_frames_of_the_vlan_are_taken() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let (mut near, mut far) = (arena(1024), arena(1024));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let steering = Steering { rules: vec![udp(53)], vlan: Some(7) };
    let mut port = open(&pair.left, steering, &mut near);
    for (tag, passed) in [(None, 1), (Some(8), 2), (Some(7 | 0x6000), 2)] {
        let frame = frames::datagram(LEFT[0], 53, tag);
        send_frame(&mut sender, &mut far, &frame);
        if tag == Some(7 | 0x6000) {
            receive_frame(&mut port, &mut near, "the VLAN's frame", |bytes| bytes == frame);
            assert_eq!(port.steering_counters().unwrap().taken, 1);
        }
        until("a frame of another VLAN", || {
            (port.steering_counters().unwrap().passed_other_vlan >= passed).then_some(())
        });
    }
    port.close(&mut near);
    sender.close(&mut far);
}

#[test]
fn every_queue_in_use_is_served() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(2);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut port = open(&pair.left, rules([udp(53)]), &mut near);
    assert_eq!((sender.capabilities().queues, port.capabilities().queues), (2, 2));
    // Each burst leaves by the next queue, and arrives by the same.
    for _ in 0..8 {
        let frame = frames::datagram(LEFT[0], 53, None);
        send_frame(&mut sender, &mut far, &frame);
        receive_frame(&mut port, &mut near, "a frame of each queue", |bytes| bytes == frame);
    }
    port.close(&mut near);
    // A port on one of two queues leaves the frames of the other to the kernel.
    let config =
        XdpConfig { queues: Some(vec![1]), steering: rules([udp(53)]), ..XdpConfig::new("left") };
    let mut port = try_open(&pair.left, config, &mut near).unwrap();
    let frame = frames::datagram(LEFT[0], 53, None);
    for _ in 0..2 {
        send_frame(&mut sender, &mut far, &frame);
    }
    receive_frame(&mut port, &mut near, "a frame of queue 1", |bytes| bytes == frame);
    until("a frame of queue 0", || {
        let counters = port.steering_counters().unwrap();
        ((counters.taken, counters.passed_no_socket) == (1, 1)).then_some(())
    });
    port.close(&mut near);
    sender.close(&mut far);
}

#[test]
fn a_flood_on_a_small_arena_is_counted_and_survived() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let (mut near, mut far) = (arena(128), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut port = open(&pair.left, rules([udp(53)]), &mut near);
    let flood = frames::datagram(LEFT[0], 53, None);
    let sent = 20_000;
    let mut left = sent;
    let (mut burst, mut held) = (Burst::new(), Burst::new());
    while left > 0 {
        while burst.len() < left.min(64) {
            let Some(frame) = far.alloc_from(&flood) else { break };
            burst.push_back(frame);
        }
        left -= sender.transmit(&mut far, &mut burst).unwrap();
        // Up to the whole arena is kept, as a slow stack would.
        port.receive(&mut near, &mut held, 16).unwrap();
        if near.available() == 0 {
            held.drain(..).for_each(|frame| near.free(frame));
        }
    }
    held.drain(..).for_each(|frame| near.free(frame));
    let lost_before = sender.counters().drops.get(DropReason::TransmitFailed);
    until("the end of the flood", || {
        port.receive(&mut near, &mut held, 64).unwrap();
        held.drain(..).for_each(|frame| near.free(frame));
        let counters = port.counters();
        let seen = counters.received + counters.drops.total();
        (seen + lost_before == sent as u64).then_some(())
    });
    // There are buffers again for what comes after.
    let late = frames::datagram(LEFT[1], 53, None);
    send_frame(&mut sender, &mut far, &late);
    receive_frame(&mut port, &mut near, "a frame after the flood", |bytes| bytes == late);
    port.close(&mut near);
    sender.close(&mut far);
    assert_eq!(near.available(), near.capacity());
    assert_eq!(far.available(), far.capacity());
}

#[test]
fn a_sleeper_wakes_when_a_frame_arrives() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena(4096);
    for busy_poll in [None, Some(BusyPoll::default())] {
        let config =
            XdpConfig { busy_poll, steering: rules([udp(ECHO)]), ..XdpConfig::new("left") };
        let mut port = try_open(&pair.left, config, &mut arena).unwrap();
        let client = pair.right.run(|| UdpSocket::bind(at(RIGHT[0], 0)).unwrap());
        for _ in 0..3 {
            assert!(port.prepare_sleep().unwrap(), "nothing was sent yet");
            client.send_to(b"wake up", at(LEFT[0], ECHO)).unwrap();
            let fd = port.wake_fd().unwrap();
            let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
            let woken = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&patience)).unwrap();
            assert_eq!(woken, 1, "busy polling: {}", busy_poll.is_some());
            assert!(!port.prepare_sleep().unwrap(), "a frame waits");
            receive_frame(&mut port, &mut arena, "the frame", |frame| frame.ends_with(b"wake up"));
        }
        port.close(&mut arena);
    }
}

#[test]
fn frames_that_cannot_be_sent_are_counted() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena(1024);
    let mut port = open(&pair.left, Steering::default(), &mut arena);
    let mut burst = Burst::from([arena.alloc_from(&[1; 13]).unwrap(), arena.alloc().unwrap()]);
    assert_eq!(port.transmit(&mut arena, &mut burst).unwrap(), 2);
    assert_eq!(port.counters().drops.get(DropReason::TransmitFailed), 2);
    assert_eq!(port.counters().transmitted, 0);
    port.close(&mut arena);
}

#[test]
fn a_port_whose_interface_is_deleted_says_so() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    for busy_poll in [None, Some(BusyPoll::default())] {
        let mut arena = arena(1024);
        let config = XdpConfig { busy_poll, ..XdpConfig::new("left") };
        let pair = if busy_poll.is_some() { &Pair::new(1) } else { &pair };
        let mut port = try_open(&pair.left, config, &mut arena).unwrap();
        pair.left.ip("link delete left");
        until("an error", || port.prepare_sleep().err());
        port.close(&mut arena);
        assert_eq!(arena.available(), arena.capacity());
    }
}

/// Opens a port on `left` of the namespace it runs in, says so, and keeps it
/// until its input ends. Does something only as a child of the tests below.
#[test]
fn child_holds_a_port() {
    if std::env::var_os("TIDEGATE_TEST_CHILD").is_none() {
        return;
    }
    let mut arena = arena(1024);
    let config = XdpConfig {
        busy_poll: Some(BusyPoll::default()),
        steering: rules([udp(ECHO)]),
        ..XdpConfig::new("left")
    };
    let port = XdpPort::open(config, &mut arena).unwrap();
    println!("\nopen: {}", port.capabilities().detail);
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    port.close(&mut arena);
}

/// Starts [`child_holds_a_port`] in a namespace and waits until it is open.
fn start_child(namespace: &Namespace) -> std::process::Child {
    let mut command: Command =
        namespace.command(std::env::current_exe().unwrap().to_str().unwrap());
    let mut child = command
        .args(["--exact", "child_holds_a_port", "--nocapture"])
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
fn a_killed_process_leaves_the_kernel_in_charge() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let server = pair.left.run(|| UdpSocket::bind(at(LEFT[0], ECHO)).unwrap());
    let mut child = start_child(&pair.left);
    assert!(is_attached(&pair.left));
    kernel_tcp_works(&pair);
    child.kill().unwrap();
    child.wait().unwrap();
    until_detached(&pair.left, "the killed process's program");
    kernel_tcp_works(&pair);
    // The port that was taken is the kernel's again.
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let client = pair.right.run(|| UdpSocket::bind(at(RIGHT[0], 0)).unwrap());
    client.send_to(b"back", at(LEFT[0], ECHO)).unwrap();
    assert_eq!(server.recv(&mut [0; 8]).unwrap(), 4);
    // And the interface can be opened anew.
    let mut arena = arena(1024);
    let mut port = open(&pair.left, rules([udp(ECHO)]), &mut arena);
    exchange(&pair, &mut port, &mut arena);
    port.close(&mut arena);
}

#[test]
fn device_settings_are_put_back() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
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

/// What opening a port with this configuration fails with.
fn refusal(namespace: &Namespace, config: XdpConfig) -> XdpError {
    let mut arena = arena(1024);
    let error = try_open(namespace, config, &mut arena).err().expect("an error");
    assert_eq!(arena.available(), arena.capacity(), "{error}");
    error
}

#[test]
fn errors_name_what_is_wrong_and_leave_nothing_behind() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let left = &pair.left;
    let config = || XdpConfig::new("left");
    let said = |config| {
        let error = refusal(left, config);
        until_detached(left, &error.to_string());
        error.to_string()
    };

    let text = said(XdpConfig::new("nosuch0"));
    assert!(text.contains("nosuch0") && text.contains("left"), "{text}");
    assert!(said(XdpConfig::new("lo")).contains("`lo` is not an Ethernet interface"));
    assert!(said(XdpConfig::new("a-name-that-is-too-long")).contains("too-long"));

    let rings = RingSizes { receive: 1000, ..RingSizes::default() };
    assert!(said(XdpConfig { rings, ..config() }).contains("1000 entries"));
    let queues = |queues: &[u32]| XdpConfig { queues: Some(queues.to_vec()), ..config() };
    assert!(said(queues(&[3])).contains("no receive queue 3: it has 1"));
    assert!(said(queues(&[])).contains("at least one"));
    assert!(said(queues(&[0, 0])).contains("only once"));
    let zero = XdpConfig { copy: Copy::Zero, ..config() };
    assert!(matches!(refusal(left, zero), XdpError::Socket { queue: 0, .. }));

    let many = (0..2000).map(|n| Rule::Address(IpAddr::from([10, 1, (n >> 8) as u8, n as u8])));
    let many = XdpConfig { steering: rules(many.collect::<Vec<_>>()), ..config() };
    assert!(said(many).contains("at most 1024 addresses"));

    left.ip("link set left mtu 3000");
    let text = said(config());
    assert!(text.contains("3000") && text.contains("ip link set dev left mtu 1774"), "{text}");
    left.ip("link set left mtu 1500 down");
    assert!(said(config()).contains("ip link set dev left up"));
    left.ip("link set left up");

    let error = left.run(|| {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none).unwrap();
        XdpPort::open(config(), &mut arena(64)).err().unwrap()
    });
    assert!(matches!(error, XdpError::NotPermitted(_)), "{error}");
    assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    until_detached(left, "no permission");
}

#[test]
fn a_second_port_on_the_interface_is_refused() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let mut arena = arena(1024);
    let mut port = open(&pair.left, rules([udp(ECHO)]), &mut arena);
    let error = refusal(&pair.left, XdpConfig::new("left"));
    assert!(matches!(error, XdpError::AlreadyAttached(_)), "{error}");
    assert!(error.to_string().contains("ip link set dev left xdp off"), "{error}");
    // The first is none the worse.
    exchange(&pair, &mut port, &mut arena);
    port.close(&mut arena);
}

#[test]
fn a_veth_peer_with_a_large_mtu_leaves_generic_mode() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    pair.right.ip("link set right mtu 9000");
    let native = XdpConfig { mode: Mode::Native, ..XdpConfig::new("left") };
    let text = refusal(&pair.left, native).to_string();
    assert!(text.contains("MTU"), "{text}");
    let mut arena = arena(1024);
    let mut port = open(&pair.left, rules([udp(ECHO)]), &mut arena);
    assert_eq!(port.capabilities().detail, "generic, copy");
    exchange(&pair, &mut port, &mut arena);
    port.close(&mut arena);
}

/// Everything in one class.
fn one_class() -> Program {
    Program {
        rules: vec![admission::Rule {
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
        rest_class: 0,
        key_start: 1,
        key_factor: 1,
    }
}

#[test]
fn what_is_not_admitted_is_dropped_on_the_interface() {
    if !may_make_namespaces() {
        return;
    }
    let pair = Pair::new(1);
    let (mut near, mut far) = (arena(1024), arena(1024));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut port = open(&pair.left, rules([udp(53)]), &mut near);
    port.admission().unwrap().set_program(&one_class()).unwrap();
    // An interval so long that the test is over before a second packet is due.
    let one_packet = Pace::Limited { interval_ns: 3_000_000_000_000, burst_ns: 0 };
    let closed = ClassLimit { class: Pace::Closed, source: Pace::Open };
    let limited = ClassLimit { class: one_packet, source: Pace::Open };
    let two = Pace::Limited { interval_ns: 3_000_000_000_000, burst_ns: 3_000_000_000_000 };
    let shared = ClassLimit { class: two, source: one_packet };
    let reasons = [
        DropReason::AdmissionClassClosed,
        DropReason::AdmissionRate,
        DropReason::AdmissionSourceShare,
    ];
    let expected = [[3, 0, 0], [3, 2, 0], [3, 2, 2]];
    let cases = [(closed, LEFT[0], 0), (limited, LEFT[1], 1), (shared, LEFT[0], 1)];
    for ((limit, address, admitted), expected) in cases.into_iter().zip(expected) {
        port.admission().unwrap().set_limits(Some(&[limit])).unwrap();
        // Another port is left to the kernel, whatever the limits say.
        for to in [54, 53, 53, 53] {
            send_frame(&mut sender, &mut far, &frames::datagram(address, to, None));
        }
        let drops = |port: &mut XdpPort| {
            let counters = port.counters();
            reasons.map(|reason| counters.drops.get(reason))
        };
        until("the drops", || (drops(&mut port) == expected).then_some(()));
        let mut burst = Burst::new();
        until("what was admitted", || {
            port.receive(&mut near, &mut burst, 64).unwrap();
            (burst.len() >= admitted).then_some(())
        });
        assert_eq!(burst.len(), admitted);
        burst.drain(..).for_each(|frame| near.free(frame));
    }
    // All is open again, and costs and counts nothing.
    port.admission().unwrap().set_limits(None).unwrap();
    for address in LEFT {
        let frame = frames::datagram(address, 53, None);
        send_frame(&mut sender, &mut far, &frame);
        receive_frame(&mut port, &mut near, "a datagram", |bytes| bytes == frame);
    }
    assert_eq!(port.counters().drops.total(), 7);
    port.close(&mut near);
    sender.close(&mut far);
}
