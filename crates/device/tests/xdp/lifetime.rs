//! End of a device: of its rules, its settings, its process and its interface.

use super::*;

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

/// Starts [`child_holds_a_device`] in a namespace and waits until its device is open.
fn start_child(namespace: &Namespace) -> std::process::Child {
    let mut command: Command =
        namespace.command(std::env::current_exe().unwrap().to_str().unwrap());
    let mut child = command
        .args(["--exact", "lifetime::child_holds_a_device", "--nocapture"])
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
