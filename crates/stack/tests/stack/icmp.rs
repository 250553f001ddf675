//! ICMP: echo, errors sent and errors received.

use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{AddressOwnership, Event, SocketError, UdpErrorReport, UdpOptions};
use tidegate_wire::{DropReason, MacAddr, Protocol};

use crate::kit::packets::{
    echo_reply_data, echo_request, frame, frame_to, ip, packet_of, port_unreachable, time_exceeded,
    udp_frame, udp_packet,
};
use crate::kit::{Family, HostPair, SECOND_NS, TestHost, config, for_each_family, mac};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

#[test]
fn replies_to_echo_requests_with_their_data() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        host.feed(&frame(&echo_request(family.host(2), family.host(1), b"ping")));
        let reply = host.sent_one();
        assert_eq!(echo_reply_data(packet_of(&reply)).unwrap(), b"ping");
        assert_eq!(host.stack.counters().handled, 1);
        host.finish();
    });
}

#[test]
fn replies_to_large_echo_requests_in_fragments() {
    for_each_family(|family| {
        let mut pair = HostPair::new();
        let data: Vec<u8> = (0..4000).map(|n| n as u8).collect();
        let request = echo_request(family.host(2), family.host(1), &data);
        let protocol = if family == Family::V4 { Protocol::ICMPV4 } else { Protocol::ICMPV6 };
        for (at, data) in request[family.header_bytes()..].chunks(1400).enumerate() {
            let fragment = crate::kit::packets::fragment_with_protocol(
                protocol,
                family.host(2),
                family.host(1),
                5,
                at * 1400,
                at < 2,
                data,
            );
            pair.a.feed(&frame(&fragment));
        }
        // The other host reassembles the reply and ignores it, as it sent no request. Being
        // counted as ignored proves that the reply arrived whole.
        pair.run();
        assert_eq!(pair.a.stack.counters().merged, 2);
        assert_eq!(pair.b.stack.counters().merged, 2);
        assert_eq!(pair.b.drops(DropReason::IcmpIgnored), 1);
        pair.finish();
    });
}

#[test]
fn rate_limits_echo_replies() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.limits.icmp_echo_pps = 10;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        for _ in 0..50 {
            host.feed(&frame(&echo_request(family.host(2), family.host(1), b"x")));
        }
        assert_eq!(host.sent().len(), 10);
        assert_eq!(host.drops(DropReason::IcmpRateLimited), 40);
        host.finish();
    });
}

#[test]
fn reports_closed_port_to_the_sending_socket() {
    for_each_family(|family| {
        let mut pair = HostPair::new();
        let client = pair.a.bind(at(family.unspecified(), 0));
        let remote = at(family.host(2), 53);
        pair.a.stack.udp_connect(client, remote).unwrap();
        pair.a.send(client, None, b"question");
        pair.run();
        assert_eq!(pair.b.drops(DropReason::UdpNoSocket), 1);
        assert_eq!(pair.a.events(), [Event::UdpError(client)]);
        let error = pair.a.stack.udp_take_error(client);
        assert_eq!(error, Some(SocketError::ConnectionRefused(remote)));
        assert_eq!(pair.a.stack.udp_take_error(client), None);
        pair.finish();
    });
}

#[test]
fn reports_errors_to_unconnected_socket_only_on_request() {
    for_each_family(|family| {
        for report_errors in [false, true] {
            let mut host = TestHost::with_neighbour(2);
            let options = UdpOptions::default().report_errors(report_errors);
            let socket = host.stack.udp_bind(at(family.unspecified(), 4000), options).unwrap();
            host.send(socket, Some(at(family.host(2), 53)), b"x");
            let sent = host.sent_one();
            let error = port_unreachable(family.host(2), family.host(1), packet_of(&sent));
            host.feed(&frame(&error));
            assert_eq!(host.stack.udp_take_error(socket).is_some(), report_errors);
            let (icmp_type, icmp_code) = if family == Family::V4 { (3, 3) } else { (1, 4) };
            let expected = UdpErrorReport {
                remote: at(family.host(2), 53),
                reporter: family.host(2),
                icmp_type,
                icmp_code,
                mtu: 0,
                payload: b"x"[..].into(),
            };
            let report = host.stack.udp_take_error_report(socket);
            assert_eq!(report, report_errors.then_some(expected));
            assert_eq!(host.stack.udp_take_error_report(socket), None);
            host.finish();
        }
    });
}

/// A hop limit that runs out on the way shows a routing loop, which may pass, or comes from
/// traceroute. Linux too tells a connected socket only on request.
#[test]
fn reports_exceeded_hop_limit_only_on_request() {
    for_each_family(|family| {
        for report_errors in [false, true] {
            let mut host = TestHost::with_neighbour(2);
            let options = UdpOptions::default().report_errors(report_errors);
            let socket = host.stack.udp_bind(at(family.unspecified(), 4000), options).unwrap();
            let remote = at(family.host(2), 53);
            host.stack.udp_connect(socket, remote).unwrap();
            host.send(socket, None, b"x");
            let sent = host.sent_one();
            let error = time_exceeded(family.host(3), family.host(1), packet_of(&sent));
            host.feed(&frame(&error));
            let expected = report_errors.then_some(SocketError::HostUnreachable(remote));
            assert_eq!(host.stack.udp_take_error(socket), expected);
            host.finish();
        }
    });
}

#[test]
fn ignores_errors_quoting_packets_never_sent() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 4000));
        host.stack.udp_connect(socket, at(family.host(2), 53)).unwrap();
        let (us, peer) = (family.host(1), family.host(2));
        let quotes = [
            udp_packet(us, peer, (4001, 53), b"another port of ours"),
            udp_packet(us, peer, (4000, 54), b"another port of the peer"),
            udp_packet(us, family.host(3), (4000, 53), b"another peer"),
            udp_packet(peer, us, (53, 4000), b"the other way"),
            ip(us, peer, Protocol::TCP, &[0; 20]),
            udp_packet(us, peer, (4000, 53), b"")[..family.header_bytes() + 4].to_vec(),
        ];
        for quote in quotes {
            let error = port_unreachable(peer, us, &quote);
            host.feed_dropped(&frame(&error), DropReason::IcmpQuote);
        }
        assert_eq!(host.stack.udp_take_error(socket), None);
        let right = udp_packet(us, peer, (4000, 53), b"");
        host.feed(&frame(&port_unreachable(peer, us, &right)));
        assert!(host.stack.udp_take_error(socket).is_some());
        host.finish();
    });
}

#[test]
fn reports_unknown_protocol_to_the_sender() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let packet = ip(family.host(2), family.host(1), Protocol(253), &[1; 20]);
        let reason = match family {
            Family::V4 => DropReason::ProtocolUnknown,
            Family::V6 => DropReason::Ipv6NextHeaderUnknown,
        };
        host.feed_dropped(&frame(&packet), reason);
        let sent = host.sent_one();
        let error = &packet_of(&sent)[family.header_bytes()..];
        // IPv4: protocol unreachable. IPv6: a parameter problem that points to the next header
        // field.
        match family {
            Family::V4 => assert_eq!(error[..2], [3, 2]),
            Family::V6 => assert_eq!((&error[..2], &error[4..8]), (&[4, 1][..], &[0, 0, 0, 6][..])),
        }
        assert_eq!(error[8..], packet);
        host.finish();
    });
}

#[test]
fn limits_length_of_icmp_errors() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        host.feed(&udp_frame(family, (4000, 53), &[1; 1400]));
        let sent = host.sent_one();
        let limit = if family == Family::V4 { 576 } else { 1280 };
        assert_eq!(packet_of(&sent).len(), limit);
        host.finish();
    });
}

#[test]
fn sends_no_error_for_errors_multicast_or_broadcast() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let (us, peer) = (family.host(1), family.host(2));
        let broadcast_mac = frame_to(MacAddr::BROADCAST, &udp_packet(peer, us, (1, 2), b"x"));
        host.feed_dropped(&broadcast_mac, DropReason::UdpNoSocket);
        let group: IpAddr = match family {
            Family::V4 => "192.0.2.255".parse().unwrap(),
            Family::V6 => "ff02::1".parse().unwrap(),
        };
        let group_mac = match group {
            IpAddr::V4(_) => MacAddr::BROADCAST,
            IpAddr::V6(v6) => MacAddr::from_ipv6_group(v6),
        };
        let to_group = frame_to(group_mac, &udp_packet(peer, group, (1, 2), b"x"));
        host.feed_dropped(&to_group, DropReason::UdpNoSocket);
        // Even in a unicast frame.
        let unicast_frame = frame(&udp_packet(peer, group, (1, 2), b"x"));
        host.feed_dropped(&unicast_frame, DropReason::UdpNoSocket);
        let echo = frame_to(group_mac, &echo_request(peer, group, b"smurf"));
        host.feed_dropped(&echo, DropReason::IcmpBroadcast);
        let quote = udp_packet(us, peer, (9, 9), b"");
        let error = frame(&port_unreachable(peer, us, &quote));
        host.feed_dropped(&error, DropReason::IcmpQuote);
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn rate_limits_icmp_errors() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        for _ in 0..1000 {
            host.feed(&udp_frame(family, (4000, 53), b"x"));
        }
        assert_eq!(host.sent().len(), 10);
        assert_eq!(host.transmit_drops(DropReason::IcmpRateLimited), 990);
        assert_eq!(host.drops(DropReason::UdpNoSocket), 1000);
        host.advance(SECOND_NS);
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert_eq!(host.sent().len(), 1, "tokens are refilled after a second");
        host.finish();
    });
}

#[test]
fn leaves_echo_and_errors_of_a_shared_address_to_the_kernel() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.ownership = AddressOwnership::Shared;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let echo = frame(&echo_request(family.host(2), family.host(1), b"x"));
        host.feed_dropped(&echo, DropReason::IcmpIgnored);
        host.feed_dropped(&udp_frame(family, (1, 2), b"x"), DropReason::UdpNoSocket);
        assert!(host.sent().is_empty());
        // Errors about packets of this stack are still processed.
        let socket = host.bind(at(family.unspecified(), 4000));
        host.stack.udp_connect(socket, at(family.host(2), 53)).unwrap();
        host.send(socket, None, b"x");
        let sent = host.sent_one();
        let error = port_unreachable(family.host(2), family.host(1), packet_of(&sent));
        host.feed(&frame(&error));
        assert!(host.stack.udp_take_error(socket).is_some());
        host.finish();
    });
}
