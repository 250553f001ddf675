//! Frames that the device takes, and frames that stay with the kernel.

use tidegate_device::packet::{self, PacketConfig, PacketDevice};

use super::*;

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

/// As [`steers_every_kind_of_frame_by_the_rules`], with the rules for ports on a packet socket.
#[test]
fn packet_socket_receives_what_rules_for_ports_match() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(4096), arena(4096));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let config =
        PacketConfig::new(pair.left.interface).steering(packet::Steering::Ports { vlan: None });
    let mut device = pair.left.run(|| PacketDevice::open(&config, &mut near).unwrap());
    let of_address = LEFT_ADDRESSES.map(|address| SteeringRule::Port {
        protocol: TransportProtocol::Tcp,
        address: address.parse().ok(),
        port: 853,
    });
    for rule in [udp(53), of_address[0], of_address[1]] {
        device.set_steering(&rule, true).unwrap();
    }
    let last = frames::datagram(LEFT_ADDRESSES[0], 53, None);
    let mut burst = Burst::new();
    for case in frames::steering_cases(LEFT_ADDRESSES, FREE_ADDRESSES) {
        let by_address = ["own address", "to all nodes", "before an echo request"];
        let by_address = by_address.iter().any(|part| case.name.contains(part));
        let mut expected = vec![last.clone()];
        if case.taken && !by_address {
            expected.insert(0, case.frame.clone());
        }
        send_frame(&mut sender, &mut far, &case.frame);
        send_frame(&mut sender, &mut far, &last);
        for frame in expected {
            let received = wait_until(case.name, || {
                device.receive(&mut near, &mut burst, 1).unwrap();
                burst.pop_front()
            });
            assert_eq!(near.bytes(&received), frame, "{}", case.name);
            near.free(received);
        }
    }
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
