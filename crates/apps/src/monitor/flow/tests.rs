use std::net::{Ipv4Addr, Ipv6Addr};

use super::*;

const V4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
const V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2),
];

/// Frame of an IPv4 packet; `fragment` is the field with the flags and the offset.
fn v4(protocol: Protocol, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let header = Ipv4Header::new(V4[0], V4[1], protocol, payload.len()).unwrap();
    let mut packet = vec![0; 20];
    header.emit(&mut packet).unwrap();
    packet[6..8].copy_from_slice(&fragment.to_be_bytes());
    packet.extend(payload);
    ethernet(EtherType::IPV4, &packet)
}

fn v6(next_header: Protocol, payload: &[u8]) -> Vec<u8> {
    let header = Ipv6Header::new(V6[0], V6[1], next_header, payload.len()).unwrap();
    let mut packet = vec![0; 40];
    header.emit(&mut packet).unwrap();
    packet.extend(payload);
    ethernet(EtherType::IPV6, &packet)
}

fn ethernet(ethertype: EtherType, payload: &[u8]) -> Vec<u8> {
    [&[2; 12][..], &ethertype.0.to_be_bytes(), payload].concat()
}

const UDP: [u8; 12] = [0x10, 0, 0, 53, 0, 12, 0, 0, 1, 2, 3, 4];
const TCP: [u8; 20] = [0, 80, 0x20, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x12, 0, 0, 0, 0, 0, 0];

fn frame(data: &[u8]) -> PassiveFrame<'_> {
    PassiveFrame { data, frame_bytes: data.len(), vlan: None, segment_bytes: 0 }
}

fn parse(data: &[u8]) -> Observation {
    Observation::parse(&frame(data)).unwrap()
}

fn ip_flow(observation: &Observation) -> IpFlow {
    match observation.key.kind {
        FlowKind::Ip(flow) => flow,
        FlowKind::Other(ethertype) => panic!("not IP: {ethertype:?}"),
    }
}

/// Protocol, ports, and whether the packet is a fragment.
fn upper(data: &[u8]) -> (u8, u16, u16, bool) {
    let flow = ip_flow(&parse(data));
    (flow.protocol.0, flow.source_port, flow.destination_port, flow.fragment)
}

#[test]
fn udp_and_tcp_of_both_families_have_ports() {
    for (udp, tcp, headers) in [
        (v4(Protocol::UDP, 0, &UDP), v4(Protocol::TCP, 0x4000, &TCP), 20),
        (v6(Protocol::UDP, &UDP), v6(Protocol::TCP, &TCP), 40),
    ] {
        assert_eq!(upper(&udp), (17, 0x1000, 53, false));
        assert_eq!(parse(&udp).traffic, Traffic { packets: 1, bytes: headers + 12 });
        assert_eq!(upper(&tcp), (6, 80, 0x2000, false));
        assert_eq!(parse(&tcp).tcp_flags, 0x12);
        let flow = ip_flow(&parse(&udp));
        let expected: [IpAddr; 2] =
            if headers == 20 { V4.map(IpAddr::from) } else { V6.map(IpAddr::from) };
        assert_eq!([flow.source, flow.destination], expected);
        // The padding of a short frame is no part of the packet.
        let padded = [&udp[..], &[0; 20]].concat();
        assert_eq!(parse(&padded), parse(&udp));
    }
}

#[test]
fn icmp_has_type_and_code() {
    let echo = [8, 3, 0, 0, 1, 1, 0, 1];
    assert_eq!(upper(&v4(Protocol::ICMPV4, 0, &echo)), (1, 0, 0x0803, false));
    assert_eq!(upper(&v6(Protocol::ICMPV6, &echo)), (58, 0, 0x0803, false));
    assert!(ip_flow(&parse(&v6(Protocol::ICMPV6, &echo))).is_icmp());
}

#[test]
fn fragments_of_a_packet_are_one_flow() {
    let first = v4(Protocol::UDP, 0x2000, &UDP);
    let later = v4(Protocol::UDP, 0x0010, &[9; 16]);
    assert_eq!(upper(&first), (17, 0, 0, true));
    assert_eq!(parse(&first).key, parse(&later).key);
    let fragment = |offset: u16, data: &[u8]| {
        let header = [&[17, 0][..], &offset.to_be_bytes(), &[0, 0, 0, 7]].concat();
        v6(Protocol::FRAGMENT, &[&header[..], data].concat())
    };
    let (first, later) = (fragment(1, &UDP), fragment(16, &[9; 16]));
    assert_eq!(upper(&first), (17, 0, 0, true));
    assert_eq!(parse(&first).key, parse(&later).key);
    assert_eq!(upper(&fragment(0, &UDP)), (17, 0x1000, 53, false), "atomic");
}

#[test]
fn extension_headers_are_skipped_or_leave_the_packet_without_ports() {
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let with_options = v6(Protocol::DESTINATION_OPTIONS, &[&options[..], &UDP].concat());
    assert_eq!(upper(&with_options), (17, 0x1000, 53, false));
    // The length of the header is past the packet.
    let cut = v6(Protocol::DESTINATION_OPTIONS, &[17, 9, 1, 4, 0, 0, 0, 0]);
    assert_eq!(upper(&cut), (60, 0, 0, false));
}

#[test]
fn unknown_protocols_and_types_are_flows() {
    assert_eq!(upper(&v4(Protocol(250), 0, &[1; 8])), (250, 0, 0, false));
    assert_eq!(upper(&v4(Protocol::TCP, 0, &TCP[..19])), (6, 0, 0, false), "short header");
    let arp = ethernet(EtherType::ARP, &[0; 46]);
    assert_eq!(parse(&arp).key.kind, FlowKind::Other(EtherType::ARP));
    assert_eq!(parse(&arp).traffic, Traffic { packets: 1, bytes: 60 });
    let lengths = [38, 46].map(|length| parse(&ethernet(EtherType(length), &[0; 46])).key);
    assert_eq!(lengths[0], lengths[1]);
    assert_eq!(lengths[0].kind, FlowKind::Other(EtherType(0)));
}

#[test]
fn vlan_tags_are_looked_through() {
    let plain = v6(Protocol::UDP, &UDP);
    let (addresses, packet) = plain.split_at(12);
    let single = [addresses, &[0x81, 0, 0xa0, 7], packet].concat();
    let double = [addresses, &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 7], packet].concat();
    for (data, removed, vlan) in [
        (&plain, None, 0),
        (&plain, Some((0x8100, 0xa007)), 7),
        (&single, None, 7),
        (&single, Some((0x88a8, 5)), 5),
        (&double, None, 5),
    ] {
        let observation =
            Observation::parse(&PassiveFrame { vlan: removed, ..frame(data) }).unwrap();
        assert_eq!(observation.key.vlan, vlan);
        assert_eq!(observation.key.kind, parse(&plain).key.kind);
        assert_eq!(observation.traffic, Traffic { packets: 1, bytes: 52 });
    }
    let cut = Observation::parse(&frame(&single[..17]));
    assert_eq!(cut, Err(DropReason::VlanTruncated));
    let endless = [addresses, &[0x81, 0, 0, 7].repeat(9)[..], packet].concat();
    assert_eq!(parse(&endless).key.kind, FlowKind::Other(EtherType::VLAN));
}

/// A frame of 10,000 bytes of payload counts as the packets that are on the wire.
#[test]
fn frame_for_several_packets_counts_as_these() {
    for (data, headers) in [(v4(Protocol::TCP, 0, &TCP), 40_usize), (v6(Protocol::TCP, &TCP), 60)] {
        for (payload, packets) in [(10_000, 7), (1448, 1), (1449, 2)] {
            let frame = PassiveFrame {
                segment_bytes: 1448,
                frame_bytes: 14 + headers + payload,
                ..frame(&data)
            };
            let traffic = Observation::parse(&frame).unwrap().traffic;
            let bytes = payload + packets * headers;
            assert_eq!(traffic, Traffic { packets: packets as u64, bytes: bytes as u64 });
        }
    }
}

#[test]
fn malformed_headers_have_a_reason() {
    let packet = v4(Protocol::UDP, 0, &UDP);
    let mut short = packet.clone();
    short[17] = 19;
    let mut long = packet.clone();
    long[17] += 1;
    let mut version = packet.clone();
    version[14] = 0x65;
    let mut jumbo = v6(Protocol::UDP, &UDP);
    jumbo[19] += 1;
    for (data, reason) in [
        (&packet[..13], DropReason::EthernetTruncated),
        (&packet[..33], DropReason::Ipv4Truncated),
        (&short, DropReason::Ipv4TotalLength),
        (&long, DropReason::Ipv4TotalLength),
        (&version, DropReason::Ipv4Version),
        (&jumbo, DropReason::Ipv6PayloadLength),
        (&jumbo[..53], DropReason::Ipv6Truncated),
    ] {
        assert_eq!(Observation::parse(&frame(data)), Err(reason));
    }
    // A frame of which only the first bytes were copied is not malformed.
    let cut = PassiveFrame { data: &packet[..42], ..frame(&packet) };
    assert_eq!(Observation::parse(&cut), Ok(parse(&packet)));
}

#[test]
fn keys_differ_as_bytes() {
    let mut keys = vec![
        parse(&v4(Protocol::UDP, 0, &UDP)).key,
        parse(&v4(Protocol::TCP, 0, &UDP)).key,
        parse(&v4(Protocol::UDP, 0x2000, &UDP)).key,
        parse(&v4(Protocol::TCP, 0, &TCP)).key,
        parse(&v6(Protocol::UDP, &UDP)).key,
        parse(&ethernet(EtherType::ARP, &[0; 46])).key,
        parse(&ethernet(EtherType(0x0608), &[0; 46])).key,
    ];
    let tagged: Vec<_> = keys.iter().map(|key| FlowKey { vlan: 7, ..*key }).collect();
    keys.extend(tagged);
    let bytes: std::collections::HashSet<_> =
        keys.iter().map(|key| key.with_bytes(<[u8]>::to_vec)).collect();
    assert_eq!(bytes.len(), keys.len());
}
