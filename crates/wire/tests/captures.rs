//! Frames captured between two Linux network namespaces: parses each frame, and asserts that
//! emitting the parsed values reproduces its bytes.

use std::net::{Ipv4Addr, Ipv6Addr};

use tidegate_wire::icmpv4::unreachable as unreachable_v4;
use tidegate_wire::icmpv6::unreachable as unreachable_v6;
use tidegate_wire::mld::{ALL_ROUTERS, MldRecord, MldRecordKind};
use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, FragmentHeader, Icmpv4Message,
    Icmpv6Message, Ipv4Header, Ipv4Option, Ipv6Header, MacAddr, MldMessage, NdpMessage,
    NeighbourAdvertisement, Protocol, TcpFlags, TcpHeader, TcpOption, UdpHeader, UpperLayer, tcp,
    udp, upper_layer,
};

const MAC_A: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x0a]);
const MAC_B: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x0b]);
const V4_A: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const V4_B: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const V6_A: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const V6_B: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Returns the Ethernet header of a frame and its payload.
fn parse_ethernet(frame: &[u8]) -> (EthernetHeader, &[u8]) {
    EthernetHeader::parse(frame).unwrap()
}

fn parse_ipv4(frame: &[u8]) -> (Ipv4Header, &[u8], &[u8]) {
    let (ethernet, packet) = parse_ethernet(frame);
    assert_eq!(ethernet.ethertype, EtherType::IPV4);
    let (ip, payload) = Ipv4Header::parse(packet).unwrap();
    (ip, packet, payload)
}

fn parse_ipv6(frame: &[u8]) -> (Ipv6Header, UpperLayer<'_>) {
    let (ethernet, packet) = parse_ethernet(frame);
    assert_eq!(ethernet.ethertype, EtherType::IPV6);
    let (ip, rest) = Ipv6Header::parse(packet).unwrap();
    (ip, upper_layer(ip.next_header, rest).unwrap())
}

/// Emits the Ethernet and IP headers of `frame` into `copy`, copies the rest, and asserts that
/// `copy` equals `frame`. Returns the offset of the IP payload.
fn rewrite_headers(frame: &[u8], copy: &mut [u8]) -> usize {
    copy.copy_from_slice(frame);
    let (header, packet) = parse_ethernet(frame);
    let ip_at = header.header_bytes();
    copy[..ip_at].fill(0);
    header.emit(copy).unwrap();
    let payload_at = if header.ethertype == EtherType::IPV4 {
        let (ip, _) = Ipv4Header::parse(packet).unwrap();
        copy[ip_at..ip_at + 20].fill(0);
        ip.emit(&mut copy[ip_at..]).unwrap();
        ip_at + usize::from(ip.header_bytes)
    } else {
        let (ip, rest) = Ipv6Header::parse(packet).unwrap();
        copy[ip_at..ip_at + 40].fill(0);
        ip.emit(&mut copy[ip_at..]).unwrap();
        ip_at + upper_layer(ip.next_header, rest).unwrap().offset_bytes
    };
    assert_eq!(copy, frame);
    payload_at
}

fn assert_same_icmpv4(frame: &[u8], message: Icmpv4Message<'_>) {
    let mut copy = vec![0; frame.len()];
    let at = rewrite_headers(frame, &mut copy);
    copy[at..].fill(0);
    assert!(message.emit(&mut copy[at..]).unwrap().is_empty());
    assert_eq!(copy, frame);
}

fn assert_same_icmpv6(frame: &[u8], message: Icmpv6Message<'_>) {
    let (ip, _) = parse_ipv6(frame);
    let mut copy = vec![0; frame.len()];
    let at = rewrite_headers(frame, &mut copy);
    copy[at..].fill(0);
    assert!(message.emit(ip.source, ip.destination, &mut copy[at..]).unwrap().is_empty());
    assert_eq!(copy, frame);
}

#[test]
fn arp_request_and_reply() {
    let request = bytes(
        "ffffffffffff 02000000000a 0806 0001080006040001
         02000000000a c0000201 000000000000 c0000202",
    );
    let reply = bytes(
        "02000000000a 02000000000b 0806 0001080006040002
         02000000000b c0000202 02000000000a c0000201",
    );
    for (frame, destination, expected) in [
        (
            request,
            MacAddr::BROADCAST,
            ArpPacket {
                operation: ArpOperation::Request,
                sender_mac: MAC_A,
                sender_ip: V4_A,
                target_mac: MacAddr::UNSPECIFIED,
                target_ip: V4_B,
            },
        ),
        (
            reply,
            MAC_A,
            ArpPacket {
                operation: ArpOperation::Reply,
                sender_mac: MAC_B,
                sender_ip: V4_B,
                target_mac: MAC_A,
                target_ip: V4_A,
            },
        ),
    ] {
        let (header, packet) = parse_ethernet(&frame);
        assert_eq!((header.destination, header.ethertype), (destination, EtherType::ARP));
        assert_eq!(ArpPacket::parse(packet), Ok((expected, &[][..])));
        let mut copy = vec![0; frame.len()];
        assert!(expected.emit(header.emit(&mut copy).unwrap()).unwrap().is_empty());
        assert_eq!(copy, frame);
    }
}

#[test]
fn icmpv4_echo() {
    let request = bytes(
        "02000000000b 02000000000a 0800 4500002cc5aa40004001f122c0000201c0000202
         08004bc749e30001b365016b00000000a3830a0000000000",
    );
    let (ip, _, payload) = parse_ipv4(&request);
    assert_eq!((ip.source, ip.destination, ip.protocol), (V4_A, V4_B, Protocol::ICMPV4));
    assert!(ip.dont_fragment && !ip.is_fragment());
    assert_eq!((ip.ttl, ip.identification, ip.total_bytes), (64, 0xc5aa, 44));
    let message = Icmpv4Message::parse(payload).unwrap();
    let Icmpv4Message::EchoRequest { identifier: 0x49e3, sequence: 1, data } = message else {
        panic!("{message:?}");
    };
    assert_same_icmpv4(&request, message);

    let reply = bytes(
        "02000000000a 02000000000b 0800 4500002ca900000040014dcdc0000202c0000201
         000053c749e30001b365016b00000000a3830a0000000000",
    );
    assert_same_icmpv4(&reply, Icmpv4Message::EchoReply { identifier: 0x49e3, sequence: 1, data });
}

#[test]
fn icmpv4_echo_reply_with_recorded_route() {
    let reply = bytes(
        "02000000000a 02000000000b 0800 4f000054a902000040012536c0000202c0000201
         072710 c0000201 c0000202 c0000202 00000000000000000000000000000000000000000000000000
         00003e6e49e50001b365016b00000000b8da0a0000000000",
    );
    let (ip, packet, _) = parse_ipv4(&reply);
    assert_eq!(ip.header_bytes, 60);
    let options: Vec<_> = ip.options(packet).map(Result::unwrap).collect();
    let [Ipv4Option::RecordRoute(route)] = options[..] else { panic!("{options:?}") };
    assert_eq!((route.pointer, route.addresses.len()), (16, 9));
    assert_eq!(route.addresses[..3], [V4_A, V4_B, V4_B].map(|a| a.octets()));
    assert_eq!(ip.options(packet).check(), Ok(()));
    rewrite_headers(&reply, &mut vec![0; reply.len()]);
}

#[test]
fn icmpv6_echo() {
    let request = bytes(
        "02000000000b 02000000000a 86dd 600c6b4a00183a40
         20010db8000000000000000000000001 20010db8000000000000000000000002
         8000b7ec49e40001b365016b0000000063950a0000000000",
    );
    let (ip, upper) = parse_ipv6(&request);
    assert_eq!((ip.source, ip.destination, ip.hop_limit), (V6_A, V6_B, 64));
    assert_eq!((ip.flow_label, ip.payload_bytes), (0xc6b4a, 24));
    assert_eq!((upper.protocol, upper.offset_bytes), (Protocol::ICMPV6, 40));
    let message = Icmpv6Message::parse(&ip, upper.payload).unwrap();
    assert!(matches!(
        message,
        Icmpv6Message::EchoRequest { identifier: 0x49e4, sequence: 1, data } if data.len() == 16
    ));
    assert_same_icmpv6(&request, message);
}

#[test]
fn neighbour_discovery() {
    let solicitation = bytes(
        "3333ff000002 02000000000a 86dd 6000000000203aff
         20010db8000000000000000000000001 ff0200000000000000000001ff000002
         87001c1e00000000 20010db8000000000000000000000002 010102000000000a",
    );
    let (ip, upper) = parse_ipv6(&solicitation);
    assert_eq!(ip.destination, solicited_node(V6_B));
    assert_eq!(
        parse_ethernet(&solicitation).0.destination,
        MacAddr::from_ipv6_group(ip.destination)
    );
    let message = Icmpv6Message::Ndp(NdpMessage::NeighbourSolicitation {
        target: V6_B,
        source_mac: Some(MAC_A),
    });
    assert_eq!(Icmpv6Message::parse(&ip, upper.payload), Ok(message));
    assert_same_icmpv6(&solicitation, message);

    let advertisement = bytes(
        "02000000000a 02000000000b 86dd 6000000000203aff
         20010db8000000000000000000000002 20010db8000000000000000000000001
         8800 8a68 60000000 20010db8000000000000000000000002 020102000000000b",
    );
    let (ip, upper) = parse_ipv6(&advertisement);
    let message = Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: V6_B,
        target_mac: Some(MAC_B),
    }));
    assert_eq!(Icmpv6Message::parse(&ip, upper.payload), Ok(message));
    assert_same_icmpv6(&advertisement, message);

    let router_solicitation = bytes(
        "333300000002 02000000000a 86dd 6000000000103aff
         fe80000000000000000000fffe00000a ff020000000000000000000000000002
         85007b1a00000000 010102000000000a",
    );
    let (ip, upper) = parse_ipv6(&router_solicitation);
    assert_eq!(ip.source, MAC_A.link_local());
    let message = Icmpv6Message::Ndp(NdpMessage::RouterSolicitation { source_mac: Some(MAC_A) });
    assert_eq!(Icmpv6Message::parse(&ip, upper.payload), Ok(message));
    assert_same_icmpv6(&router_solicitation, message);
}

#[test]
fn multicast_listener_report() {
    let report = bytes(
        "333300000016 02000000000a 86dd 6000000000380001
         fe80000000000000000000fffe00000a ff020000000000000000000000000016
         3a00050200000100
         8f006fda00000002
         04000000 ff0200000000000000000001ff00000a
         04000000 ff0200000000000000000001ff000001",
    );
    let (ip, upper) = parse_ipv6(&report);
    assert_eq!(ip.destination, ALL_ROUTERS);
    assert!(upper.router_alert);
    assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (48, 40));
    let message = Icmpv6Message::parse(&ip, upper.payload).unwrap();
    let Icmpv6Message::Mld(MldMessage::Report(records)) = message else { panic!("{message:?}") };
    let expected = [MAC_A.link_local(), V6_A].map(|address| MldRecord {
        kind: MldRecordKind::ChangeToExclude,
        group: solicited_node(address),
        source_count: 0,
    });
    assert_eq!(records.collect::<Vec<_>>(), expected);
    assert_same_icmpv6(&report, message);
    for record in expected {
        let encoded = MldRecord::emit_without_sources(record.kind, record.group);
        assert!(report.windows(MldRecord::BYTES).any(|window| window == encoded));
    }
}

#[test]
fn udp_datagram_and_port_unreachable() {
    let datagram_v4 = "45000021 83fe4000401132cac0000201c0000202 e0b90009000d573b68656c6c6f";
    let datagram_v6 = "6000f2e0000d1140 20010db8000000000000000000000001
         20010db8000000000000000000000002 adfb0009000db28868656c6c6f";

    let frame = bytes(&format!("02000000000b 02000000000a 0800 {datagram_v4}"));
    let (ip, _, datagram) = parse_ipv4(&frame);
    let (header, payload) = UdpHeader::parse(datagram).unwrap();
    assert_eq!((header.source_port, header.destination_port), (0xe0b9, 9));
    assert_eq!(payload, b"hello");
    assert_eq!(udp::verify_v4(ip.source, ip.destination, datagram), Ok(()));

    let error = bytes(&format!(
        "02000000000a 02000000000b 0800 45c0003da907000040014cf5c0000202c0000201
         0303811f00000000 {datagram_v4}"
    ));
    let (_, _, payload) = parse_ipv4(&error);
    let message = Icmpv4Message::parse(payload).unwrap();
    let Icmpv4Message::DestinationUnreachable {
        code: unreachable_v4::PORT,
        next_hop_mtu: 0,
        quote,
    } = message
    else {
        panic!("{message:?}");
    };
    assert_eq!(Ipv4Header::parse_quoted(quote), Ok((ip, datagram)));
    assert_same_icmpv4(&error, message);

    let frame = bytes(&format!("02000000000b 02000000000a 86dd {datagram_v6}"));
    let (ip, upper) = parse_ipv6(&frame);
    let (header, payload) = UdpHeader::parse(upper.payload).unwrap();
    assert_eq!((header.source_port, header.destination_port), (0xadfb, 9));
    assert_eq!(payload, b"hello");
    assert_eq!(udp::verify_v6(ip.source, ip.destination, upper.payload), Ok(()));

    let error = bytes(&format!(
        "02000000000a 02000000000b 86dd 6004408d003d3a40
         20010db8000000000000000000000002 20010db8000000000000000000000001
         01043eff00000000 {datagram_v6}"
    ));
    let (error_ip, error_upper) = parse_ipv6(&error);
    let message = Icmpv6Message::parse(&error_ip, error_upper.payload).unwrap();
    let Icmpv6Message::DestinationUnreachable { code: unreachable_v6::PORT, quote } = message
    else {
        panic!("{message:?}");
    };
    assert_eq!(Ipv6Header::parse_quoted(quote), Ok((ip, upper.payload)));
    assert_same_icmpv6(&error, message);
}

#[test]
fn last_ipv6_fragment() {
    let last = bytes(
        "02000000000b 02000000000a 86dd 600c6b4a 0018 2c40
         20010db8000000000000000000000001 20010db8000000000000000000000002
         3a0005a881c64624 a0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
    );
    let (_, upper) = parse_ipv6(&last);
    let fragment =
        FragmentHeader { offset_bytes: 1448, more_fragments: false, identification: 0x81c6_4624 };
    assert_eq!(upper.fragment, Some(fragment));
    assert_eq!((upper.protocol, upper.payload.len()), (Protocol::ICMPV6, 16));
    let mut copy = [0; 8];
    assert!(fragment.emit(upper.protocol, &mut copy).unwrap().is_empty());
    assert_eq!(copy, last[54..62]);
}

#[test]
fn tcp_syn_refused_with_reset() {
    let syn = bytes(
        "02000000000b 02000000000a 0800 4500003c049840004006b220c0000201c0000202
         e5840009ef242abe00000000a002faf0078f0000 020405b4 0402 080a40e1812700000000 01 03030a",
    );
    let (ip, _, segment) = parse_ipv4(&syn);
    let (header, payload) = TcpHeader::parse(segment).unwrap();
    assert_eq!((header.flags, header.window, header.header_bytes), (TcpFlags::SYN, 64_240, 40));
    assert_eq!((header.sequence, payload.len()), (0xef24_2abe, 0));
    assert_eq!(tcp::verify_v4(ip.source, ip.destination, segment), Ok(()));
    let options = [
        TcpOption::MaximumSegmentSize(1460),
        TcpOption::SackPermitted,
        TcpOption::Timestamps { value: 0x40e1_8127, echo: 0 },
        TcpOption::WindowScale(10),
    ];
    assert_eq!(header.options(segment).collect::<Vec<_>>(), options.map(Ok),);
    let mut copy = segment.to_vec();
    copy[..20].fill(0);
    assert!(header.emit(&mut copy).unwrap().is_empty());
    assert_eq!(copy, segment);

    let reset = bytes(
        "02000000000a 02000000000b 0800 45000028000040004006b6ccc0000202c0000201
         0009e58400000000ef242abf501400002c5b0000",
    );
    let (ip, _, segment) = parse_ipv4(&reset);
    let (header, _) = TcpHeader::parse(segment).unwrap();
    assert_eq!(header.flags, TcpFlags::RST | TcpFlags::ACK);
    assert_eq!(header.acknowledgement, 0xef24_2abf);
    assert_eq!(header.options(segment).count(), 0);
    assert_eq!(tcp::verify_v4(ip.source, ip.destination, segment), Ok(()));
}
