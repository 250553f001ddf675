//! Every parser on any bytes: nothing panics, every iteration ends, no slice lies outside
//! the input, and a parsed value survives emitting and parsing.

use std::fmt::Debug;

use tidegate_wire::ipv6_extension::Ipv6Options;
use tidegate_wire::mld::MldRecords;
use tidegate_wire::{
    ArpPacket, DropReason, EtherType, EthernetHeader, ExtensionWalk, Icmpv4Message, Icmpv6Message,
    IpCidr, Ipv4Header, Ipv4Options, Ipv6Header, MacAddr, MldMessage, NdpOption, NdpOptions,
    Protocol, Sum, TcpHeader, TcpOption, TcpOptions, UdpHeader, checksum, tcp, udp, upper_layer,
};

/// Runs one input: the first byte chooses the parser to begin with.
pub fn check(input: &[u8]) {
    let Some((&choice, bytes)) = input.split_first() else { return };
    match choice {
        b'e' => ethernet(bytes),
        b'4' => ipv4(bytes),
        b'6' => ipv6(bytes),
        b't' => tcp(bytes),
        b'u' => udp(bytes),
        b'o' => options(bytes),
        b's' => text(bytes),
        _ => {
            ethernet(bytes);
            options(bytes);
        }
    }
}

/// Asserts that `rest` is a subslice of `bytes`.
fn assert_inside(bytes: &[u8], rest: &[u8]) {
    let (outer, inner) = (bytes.as_ptr_range(), rest.as_ptr_range());
    assert!(rest.is_empty() || outer.start <= inner.start && inner.end <= outer.end);
}

/// Asserts that an iteration over `bytes` ends, and stops at its first error.
fn assert_ends<T: Debug, E: Debug>(bytes: &[u8], walk: impl Iterator<Item = Result<T, E>>) {
    let mut items = 0;
    let mut failed = false;
    for item in walk {
        assert!(!failed, "the iterator continued after an error");
        failed = item.is_err();
        items += 1;
    }
    assert!(items <= bytes.len() + 1);
}

fn ethernet(bytes: &[u8]) {
    let Ok((header, rest)) = EthernetHeader::parse(bytes) else { return };
    assert_eq!(header.header_bytes() + rest.len(), bytes.len());
    let mut copy = bytes.to_vec();
    copy[..header.header_bytes()].fill(0);
    assert_eq!(header.emit(&mut copy).unwrap(), rest);
    assert_eq!(copy, bytes);
    match header.ethertype {
        EtherType::ARP => arp(rest),
        EtherType::IPV4 => ipv4(rest),
        EtherType::IPV6 => ipv6(rest),
        _ => {}
    }
}

fn arp(bytes: &[u8]) {
    let Ok((packet, rest)) = ArpPacket::parse(bytes) else { return };
    let mut copy = [0; ArpPacket::BYTES];
    assert!(packet.emit(&mut copy).unwrap().is_empty());
    assert_eq!([&copy[..], rest].concat(), bytes);
}

fn ipv4(bytes: &[u8]) {
    // A fuzzer cannot guess checksums, so a wrong one is corrected.
    let mut bytes = bytes.to_vec();
    if Ipv4Header::parse(&bytes) == Err(DropReason::Ipv4Checksum) {
        let header_bytes = usize::from(bytes[0] & 0xf) * 4;
        bytes[10..12].fill(0);
        let field = Sum::of(&bytes[..header_bytes]).checksum();
        bytes[10..12].copy_from_slice(&field.to_be_bytes());
    }
    let quoted = Ipv4Header::parse_quoted(&bytes);
    let Ok((header, payload)) = Ipv4Header::parse(&bytes) else { return };
    assert_eq!(quoted, Ok((header, payload)), "a valid packet is also a valid quote");
    assert_inside(&bytes, payload);
    assert_eq!(payload.len(), header.payload_bytes());
    assert_ends(&bytes, header.options(&bytes));

    let mut copy = bytes.clone();
    copy[..20].fill(0);
    assert!(header.emit(&mut copy).is_some());
    assert_eq!(Ipv4Header::parse(&copy), Ok((header, payload)));

    match header.protocol {
        Protocol::ICMPV4 => icmpv4(payload),
        Protocol::UDP => {
            udp(payload);
            let bytes = payload.len() as u16;
            let pseudo =
                checksum::pseudo_header_v4(header.source, header.destination, Protocol::UDP, bytes);
            let verify =
                |datagram: &[u8]| udp::verify_v4(header.source, header.destination, datagram);
            fills(payload, UdpHeader::BYTES, |it| udp::fill_checksum(pseudo, it), verify);
        }
        Protocol::TCP => {
            tcp(payload);
            let bytes = payload.len() as u16;
            let pseudo =
                checksum::pseudo_header_v4(header.source, header.destination, Protocol::TCP, bytes);
            let verify =
                |segment: &[u8]| tcp::verify_v4(header.source, header.destination, segment);
            fills(payload, TcpHeader::BYTES, |it| tcp::fill_checksum(pseudo, it), verify);
        }
        _ => {}
    }
}

/// Asserts that a filled checksum verifies, and fails once a bit of the source port is
/// flipped.
fn fills(
    payload: &[u8],
    header_bytes: usize,
    fill: impl Fn(&mut [u8]),
    verify: impl Fn(&[u8]) -> Result<(), DropReason>,
) {
    let _ = verify(payload);
    let mut filled = payload.to_vec();
    fill(&mut filled);
    if filled.len() < header_bytes {
        assert_eq!(filled, payload);
        return;
    }
    assert_eq!(verify(&filled), Ok(()));
    filled[0] ^= 1;
    assert!(verify(&filled).is_err());
}

fn ipv6(bytes: &[u8]) {
    let quoted = Ipv6Header::parse_quoted(bytes);
    let Ok((header, rest)) = Ipv6Header::parse(bytes) else { return };
    assert_eq!(quoted, Ok((header, rest)));
    assert_inside(bytes, rest);
    let mut copy = bytes.to_vec();
    copy[..40].fill(0);
    assert!(header.emit(&mut copy).is_some());
    assert_eq!(copy, bytes);

    assert_ends(rest, ExtensionWalk::new(header.next_header, rest));
    match upper_layer(header.next_header, rest) {
        Err(error) => {
            let pointer = error.icmp_error.map_or(0, |problem| problem.pointer as usize);
            assert!(pointer < Ipv6Header::BYTES + rest.len(), "{error:?}");
        }
        Ok(upper) => {
            assert_eq!(bytes[upper.next_header_offset_bytes], upper.protocol.0);
            let end = Ipv6Header::BYTES + rest.len();
            assert_eq!(&bytes[upper.offset_bytes..end], upper.payload);
            if let Some(fragment) = upper.fragment {
                assert!(!fragment.is_atomic());
                let mut copy = [0; 8];
                assert!(fragment.emit(upper.protocol, &mut copy).unwrap().is_empty());
            } else {
                transport_v6(&header, upper.protocol, upper.payload);
            }
        }
    }
}

fn transport_v6(header: &Ipv6Header, protocol: Protocol, payload: &[u8]) {
    let (source, destination) = (header.source, header.destination);
    let pseudo = checksum::pseudo_header_v6(source, destination, protocol, payload.len() as u32);
    match protocol {
        Protocol::ICMPV6 => icmpv6(header, payload),
        Protocol::UDP => {
            udp(payload);
            let verify = |it: &[u8]| udp::verify_v6(source, destination, it);
            fills(payload, UdpHeader::BYTES, |it| udp::fill_checksum(pseudo, it), verify);
        }
        Protocol::TCP => {
            tcp(payload);
            let verify = |it: &[u8]| tcp::verify_v6(source, destination, it);
            fills(payload, TcpHeader::BYTES, |it| tcp::fill_checksum(pseudo, it), verify);
        }
        _ => {}
    }
}

/// Returns the message with a correct checksum at offset 2.
fn with_checksum(pseudo: Sum, message: &[u8]) -> Vec<u8> {
    let mut message = message.to_vec();
    if let Some(field) = message.get_mut(2..4) {
        field.fill(0);
        let checksum = pseudo.with(&message).checksum();
        message[2..4].copy_from_slice(&checksum.to_be_bytes());
    }
    message
}

fn icmpv4(bytes: &[u8]) {
    let bytes = with_checksum(Sum::ZERO, bytes);
    let Ok(message) = Icmpv4Message::parse(&bytes) else { return };
    let mut copy = vec![0; message.message_bytes()];
    assert!(message.emit(&mut copy).unwrap().is_empty());
    assert_eq!(Icmpv4Message::parse(&copy), Ok(message));
    if let Icmpv4Message::DestinationUnreachable { quote, .. }
    | Icmpv4Message::TimeExceeded { quote, .. }
    | Icmpv4Message::ParameterProblem { quote, .. } = message
    {
        assert_inside(&bytes, quote);
        if let Ok((_, payload)) = Ipv4Header::parse_quoted(quote) {
            assert_inside(quote, payload);
            let _ = (UdpHeader::parse_quoted(payload), TcpHeader::parse_quoted(payload));
        }
    }
}

fn icmpv6(ip: &Ipv6Header, bytes: &[u8]) {
    let pseudo =
        checksum::pseudo_header_v6(ip.source, ip.destination, Protocol::ICMPV6, bytes.len() as u32);
    let bytes = with_checksum(pseudo, bytes);
    let Ok(message) = Icmpv6Message::parse(ip, &bytes) else { return };
    let mut copy = vec![0; message.message_bytes()];
    assert!(message.emit(ip.source, ip.destination, &mut copy).unwrap().is_empty());
    assert_eq!(Icmpv6Message::parse(ip, &copy), Ok(message));
    match message {
        Icmpv6Message::DestinationUnreachable { quote, .. }
        | Icmpv6Message::PacketTooBig { quote, .. }
        | Icmpv6Message::TimeExceeded { quote, .. }
        | Icmpv6Message::ParameterProblem { quote, .. } => {
            assert_inside(&bytes, quote);
            if let Ok((header, rest)) = Ipv6Header::parse_quoted(quote) {
                let _ = upper_layer(header.next_header, rest);
            }
        }
        Icmpv6Message::Mld(MldMessage::Report(records)) => {
            assert!(records.count() <= bytes.len() / 20);
        }
        _ => {}
    }
}

fn udp(bytes: &[u8]) {
    let Ok((header, payload)) = UdpHeader::parse(bytes) else { return };
    assert_eq!(payload.len() + UdpHeader::BYTES, header.length_bytes.into());
    let mut copy = [0; UdpHeader::BYTES];
    assert!(header.emit(&mut copy).unwrap().is_empty());
    assert_eq!([&copy[..], payload].concat(), bytes[..header.length_bytes.into()]);
}

fn tcp(bytes: &[u8]) {
    let Ok((header, payload)) = TcpHeader::parse(bytes) else { return };
    assert_eq!(payload.len() + usize::from(header.header_bytes), bytes.len());
    let mut copy = bytes.to_vec();
    copy[..20].fill(0);
    assert_eq!(header.emit(&mut copy).unwrap(), payload);
    assert_eq!(TcpHeader::parse(&copy), Ok((header, payload)));
    tcp_options(&bytes[20..header.header_bytes.into()]);
}

fn tcp_options(bytes: &[u8]) {
    assert_ends(bytes, TcpOptions::new(bytes));
    let options: Vec<TcpOption<'_>> = TcpOptions::new(bytes).map_while(Result::ok).collect();
    let mut copy = vec![0; bytes.len()];
    let mut rest = &mut copy[..];
    for option in &options {
        rest = option.emit(rest).unwrap();
        if let TcpOption::Sack(blocks) = option {
            assert!((1..=bytes.len() / 8).contains(&blocks.count()));
        }
    }
    tcp::emit_padding(rest);
    let again: Result<Vec<_>, _> = TcpOptions::new(&copy).collect();
    assert_eq!(again, Ok(options));
}

/// Parses the bytes as the options of every protocol that has options.
fn options(bytes: &[u8]) {
    assert_ends(bytes, Ipv4Options::new(bytes));
    let walked: Result<Vec<_>, _> = Ipv4Options::new(bytes).collect();
    assert!(walked.is_ok() || Ipv4Options::new(bytes).check().is_err());
    tcp_options(bytes);
    assert_ends(bytes, Ipv6Options::new(bytes, 42));
    for option in Ipv6Options::new(bytes, 0).map_while(Result::ok) {
        assert_eq!(bytes[option.offset_bytes], option.kind);
        assert_inside(bytes, option.data);
    }
    if let Some(options) = NdpOptions::parse(bytes) {
        let option_bytes: usize = options
            .map(|option| match option {
                NdpOption::SourceLinkLayerAddress(_)
                | NdpOption::TargetLinkLayerAddress(_)
                | NdpOption::Mtu(_) => 8,
                NdpOption::Prefix(_) => 32,
                NdpOption::RedirectedHeader(packet) => 8 + packet.len(),
                NdpOption::Other(_, body) => 2 + body.len(),
            })
            .sum();
        assert_eq!(option_bytes, bytes.len(), "the iterator returned every option");
    }
    for count in [0, 1, 2, u16::MAX] {
        if let Some(records) = MldRecords::parse(count, bytes) {
            assert!(records.count() <= count.into());
        }
    }
}

/// Parses the bytes as the text of an address.
fn text(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(mac) = text.parse::<MacAddr>() {
        assert_eq!(mac.to_string().parse(), Ok(mac));
    }
    if let Ok(cidr) = text.parse::<IpCidr>() {
        assert_eq!(cidr.to_string().parse(), Ok(cidr));
        assert!(cidr.contains(cidr.address()) && cidr.contains(cidr.network().address()));
        assert!(cidr.broadcast().is_none_or(|address| cidr.contains(address.into())));
    }
}
