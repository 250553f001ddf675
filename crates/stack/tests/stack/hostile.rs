//! Hostile headers: class 1 (IPv4), class 3 (IPv6), and cases of both families.

use std::net::{IpAddr, SocketAddr};

use tidegate_wire::{DropReason, Ipv4Header, Protocol, Sum};

use crate::kit::packets::{
    ethernet, frame, ip, ip_with_hops, packet_of, udp, udp_frame, udp_packet,
};
use crate::kit::{Family, TestHost, for_each_family, mac};

fn host_with_sockets() -> (TestHost, [tidegate_stack::UdpId; 2]) {
    let mut host = TestHost::with_neighbour(2);
    let sockets = [Family::V4, Family::V6].map(|f| host.bind(SocketAddr::new(f.unspecified(), 53)));
    (host, sockets)
}

fn valid_packet(family: Family) -> Vec<u8> {
    udp_packet(family.host(2), family.host(1), (4000, 53), b"payload")
}

/// Recomputes the header checksum of an IPv4 packet.
fn with_valid_header_checksum(mut packet: Vec<u8>) -> Vec<u8> {
    let header_bytes = usize::from(packet[0] & 15) * 4;
    packet[10..12].fill(0);
    let header = &packet[..header_bytes.min(packet.len())];
    let sum = Sum::of(header).checksum();
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// IPv4 packet with a UDP datagram and these options.
fn with_options(options: &[u8]) -> Vec<u8> {
    let (from, to) = (Family::V4.host(2), Family::V4.host(1));
    let datagram = udp(from, to, (4000, 53), b"payload");
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from, to) else {
        panic!("hosts of the IPv4 family have IPv4 addresses");
    };
    let mut header = Ipv4Header::new(source, destination, Protocol::UDP, datagram.len()).unwrap();
    header.header_bytes += options.len() as u8;
    header.total_bytes += options.len() as u16;
    let mut packet = vec![0; 20];
    packet.extend(options);
    packet.extend(datagram);
    assert!(header.emit(&mut packet).is_some());
    packet
}

/// IPv6 packet with these extension headers in front of a UDP datagram. `first` is the type of
/// the first header; the last header must name UDP.
fn with_extensions(first: Protocol, extensions: &[u8]) -> Vec<u8> {
    let (from, to) = (Family::V6.host(2), Family::V6.host(1));
    let mut payload = extensions.to_vec();
    payload.extend(udp(from, to, (4000, 53), b"payload"));
    ip(from, to, first, &payload)
}

#[test]
fn rejects_ipv4_headers_with_wrong_lengths() {
    let (mut host, [socket, _]) = host_with_sockets();
    let cases: [(usize, u8, DropReason); 6] = [
        (0, 0x44, DropReason::Ipv4HeaderLength),
        (0, 0x40, DropReason::Ipv4HeaderLength),
        (0, 0x65, DropReason::Ipv4Version),
        (3, 19, DropReason::Ipv4TotalLength),
        (3, 200, DropReason::Ipv4TotalLength),
        (2, 0xff, DropReason::Ipv4TotalLength),
    ];
    for (at, value, reason) in cases {
        let mut packet = valid_packet(Family::V4);
        packet[at] = value;
        let bytes = ethernet(
            mac(1),
            mac(2),
            tidegate_wire::EtherType::IPV4,
            &with_valid_header_checksum(packet),
        );
        host.feed_dropped(&bytes, reason);
    }
    let mut short = valid_packet(Family::V4);
    short.truncate(19);
    host.feed_dropped(&frame(&short), DropReason::Ipv4Truncated);
    let mut past_the_end = valid_packet(Family::V4)[..24].to_vec();
    past_the_end[0] = 0x4f;
    host.feed_dropped(&frame(&past_the_end), DropReason::Ipv4HeaderLength);
    let mut wrong_sum = valid_packet(Family::V4);
    wrong_sum[10] ^= 1;
    host.feed_dropped(&frame(&wrong_sum), DropReason::Ipv4Checksum);
    assert!(host.receive(socket).is_none() && host.sent().is_empty());
    host.finish();
}

#[test]
fn rejects_malformed_ipv4_options_and_source_routes() {
    let (mut host, [socket, _]) = host_with_sockets();
    for (options, reason) in [
        (&[7, 0, 0, 0], DropReason::Ipv4Options),
        (&[7, 1, 0, 0], DropReason::Ipv4Options),
        (&[7, 9, 4, 0], DropReason::Ipv4Options),
        (&[1, 1, 1, 7], DropReason::Ipv4Options),
        (&[131, 3, 4, 0], DropReason::Ipv4SourceRoute),
        (&[137, 3, 4, 0], DropReason::Ipv4SourceRoute),
    ] {
        host.feed_dropped(&frame(&with_options(options)), reason);
    }
    let full = [&[7, 7, 8, 1, 2, 3, 4][..], &[0]].concat();
    let overflowing = [&[7, 7, 200, 1, 2, 3, 4][..], &[0]].concat();
    host.feed_dropped(&frame(&with_options(&overflowing)), DropReason::Ipv4Options);
    for options in [&full[..], &[1, 1, 1, 0], &[0x94, 4, 0, 0], &[0x44, 4, 5, 0]] {
        host.feed(&frame(&with_options(options)));
        assert_eq!(host.receive(socket).unwrap().2, b"payload", "{options:?}");
    }
    host.finish();
}

#[test]
fn accepts_hop_limit_of_zero() {
    for_each_family(|family| {
        // RFC 1122 section 3.2.1.7: a host must not drop a packet for its low time to live.
        let (mut host, sockets) = host_with_sockets();
        let datagram = udp(family.host(2), family.host(1), (4000, 53), b"x");
        let packet = ip_with_hops(family.host(2), family.host(1), Protocol::UDP, 0, &datagram);
        host.feed(&frame(&packet));
        assert!(host.receive(sockets[usize::from(family == Family::V6)]).is_some());
        host.finish();
    });
}

#[test]
fn rejects_invalid_source_addresses() {
    for_each_family(|family| {
        let (mut host, sockets) = host_with_sockets();
        let (sources, reason) = match family {
            Family::V4 => (
                &[
                    "224.0.0.1",
                    "255.255.255.255",
                    "192.0.2.255",
                    "192.0.2.1",
                    "127.0.0.1",
                    "0.0.0.0",
                ][..],
                DropReason::Ipv4SourceInvalid,
            ),
            Family::V6 => (
                &["ff02::1", "::1", "2001:db8::1", "::ffff:192.0.2.9", "::"][..],
                DropReason::Ipv6SourceInvalid,
            ),
        };
        for source in sources {
            let packet = udp_packet(source.parse().unwrap(), family.host(1), (4000, 53), b"x");
            host.feed_dropped(&frame(&packet), reason);
        }
        assert!(sockets.iter().all(|&socket| host.stack.udp_queue_len(socket) == 0));
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn drops_frames_and_packets_for_other_hosts() {
    for_each_family(|family| {
        let (mut host, _) = host_with_sockets();
        let mut other_station = frame(&valid_packet(family));
        other_station[5] = 77;
        host.feed_dropped(&other_station, DropReason::EthernetNotForUs);
        let mut from_group = frame(&valid_packet(family));
        from_group[6] |= 1;
        host.feed_dropped(&from_group, DropReason::EthernetSourceInvalid);
        let reason = match family {
            Family::V4 => DropReason::Ipv4NotForUs,
            Family::V6 => DropReason::Ipv6NotForUs,
        };
        let elsewhere = udp_packet(family.host(2), family.host(9), (4000, 53), b"x");
        host.feed_dropped(&frame(&elsewhere), reason);
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn rejects_malformed_udp_headers() {
    for_each_family(|family| {
        let (mut host, _) = host_with_sockets();
        let (from, to) = (family.host(2), family.host(1));
        for (length, reason) in
            [(7, DropReason::UdpLength), (0, DropReason::UdpLength), (100, DropReason::UdpLength)]
        {
            let mut datagram = udp(from, to, (4000, 53), b"payload");
            datagram[5] = length;
            host.feed_dropped(&frame(&ip(from, to, Protocol::UDP, &datagram)), reason);
        }
        let short = ip(from, to, Protocol::UDP, &[0; 7]);
        host.feed_dropped(&frame(&short), DropReason::UdpTruncated);
        host.feed_dropped(&udp_frame(family, (4000, 0), b"x"), DropReason::UdpPortZero);
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn counts_every_truncated_frame() {
    for_each_family(|family| {
        let (mut host, _) = host_with_sockets();
        let good = frame(&valid_packet(family));
        for len in 0..good.len() {
            host.feed(&good[..len]);
        }
        assert_eq!(host.stack.counters().drops.total(), good.len() as u64);
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn rejects_misplaced_hop_by_hop_headers() {
    let (mut host, [_, socket]) = host_with_sockets();
    let udp = Protocol::UDP.0;
    let pad = [1, 4, 0, 0, 0, 0];
    let header = |next: u8| [&[next, 0][..], &pad].concat();
    host.feed(&frame(&with_extensions(Protocol::HOP_BY_HOP, &header(udp))));
    assert!(host.receive(socket).is_some());
    for first in [Protocol::HOP_BY_HOP, Protocol::DESTINATION_OPTIONS] {
        let twice = [header(0), header(udp)].concat();
        let bad = frame(&with_extensions(first, &twice));
        host.feed_dropped(&bad, DropReason::Ipv6ExtensionOrder);
        let error_frame = host.sent_one();
        assert_eq!(packet_of(&error_frame)[40..42], [4, 1], "unrecognized next header");
    }
    host.finish();
}

#[test]
fn rejects_overlong_ipv6_extension_headers() {
    let (mut host, _) = host_with_sockets();
    let mut too_long = with_extensions(Protocol::HOP_BY_HOP, &[17, 0, 1, 4, 0, 0, 0, 0]);
    too_long[41] = 255;
    host.feed_dropped(&frame(&too_long), DropReason::Ipv6ExtensionTruncated);
    let option_past = with_extensions(Protocol::HOP_BY_HOP, &[17, 0, 5, 9, 0, 0, 0, 0]);
    host.feed_dropped(&frame(&option_past), DropReason::Ipv6ExtensionTruncated);
    let mut many = Vec::new();
    for _ in 0..100 {
        many.extend([Protocol::DESTINATION_OPTIONS.0, 0, 1, 4, 0, 0, 0, 0]);
    }
    many.extend([17, 0, 1, 4, 0, 0, 0, 0]);
    let endless = with_extensions(Protocol::DESTINATION_OPTIONS, &many);
    host.feed_dropped(&frame(&endless), DropReason::Ipv6ExtensionLimit);
    let mut wrong_length = valid_packet(Family::V6);
    wrong_length[5] = 0xff;
    host.feed_dropped(&frame(&wrong_length), DropReason::Ipv6PayloadLength);
    host.finish();
}

#[test]
fn rejects_ipv6_routing_headers_with_segments_left() {
    let (mut host, [_, socket]) = host_with_sockets();
    for kind in [0, 2, 4] {
        let with_segments = [17, 0, kind, 1, 0, 0, 0, 0];
        let bad = frame(&with_extensions(Protocol::ROUTING, &with_segments));
        host.feed_dropped(&bad, DropReason::Ipv6RoutingHeader);
        let error_frame = host.sent_one();
        let error = &packet_of(&error_frame)[40..];
        assert_eq!((&error[..2], error[7]), (&[4, 0][..], 42), "pointer to the routing type");
        let without_segments_left = [17, 0, kind, 0, 0, 0, 0, 0];
        host.feed(&frame(&with_extensions(Protocol::ROUTING, &without_segments_left)));
        assert!(host.receive(socket).is_some());
    }
    host.finish();
}

#[test]
fn handles_unknown_ipv6_options_by_their_action_bits() {
    let (mut host, [_, socket]) = host_with_sockets();
    let group: IpAddr = "ff02::1".parse().unwrap();
    // Option type; is the packet delivered; is an error sent for unicast; and for multicast.
    for (kind, passes, sends_error, sends_error_for_group) in [
        (0x1e, true, false, false),
        (0x5e, false, false, false),
        (0x9e, false, true, true),
        (0xde, false, true, false),
    ] {
        let header = [17, 0, kind, 4, 0, 0, 0, 0];
        let packet = with_extensions(Protocol::DESTINATION_OPTIONS, &header);
        host.feed(&frame(&packet));
        assert_eq!(host.receive(socket).is_some(), passes, "{kind:#x}");
        assert_eq!(host.sent().len(), usize::from(sends_error), "{kind:#x}");
        if !passes {
            let mut to_group = packet.clone();
            let IpAddr::V6(v6) = group else { panic!("an IPv6 group") };
            to_group[24..40].copy_from_slice(&v6.octets());
            host.feed_dropped(&frame(&to_group), DropReason::Ipv6OptionUnknown);
            assert_eq!(host.sent().len(), usize::from(sends_error_for_group), "{kind:#x}");
        }
    }
    host.finish();
}

#[test]
fn rejects_ipv6_jumbograms() {
    let (mut host, _) = host_with_sockets();
    let jumbo = [17, 0, 0xc2, 4, 0, 1, 0, 0];
    let bad = frame(&with_extensions(Protocol::HOP_BY_HOP, &jumbo));
    host.feed_dropped(&bad, DropReason::Ipv6Jumbogram);
    let mut without_length = with_extensions(Protocol::HOP_BY_HOP, &jumbo);
    without_length[4..6].fill(0);
    host.feed_dropped(&frame(&without_length), DropReason::Ipv6Jumbogram);
    host.finish();
}

#[test]
fn accepts_ipv6_no_next_header() {
    let (mut host, _) = host_with_sockets();
    let packet = ip(Family::V6.host(2), Family::V6.host(1), Protocol::NO_NEXT_HEADER, &[1; 9]);
    host.feed(&frame(&packet));
    assert_eq!(host.stack.counters().handled, 1);
    assert!(host.sent().is_empty());
    host.finish();
}
