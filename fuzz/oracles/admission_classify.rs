//! Classification of frames: any bytes have a class, and fields that the stack's parsers
//! read are read alike by the classifier.

use std::net::IpAddr;

use tidegate_gate::admission::{
    Admission, AdmissionVerdict, Class, ClassCounters, Config, Match, NumberRange, PacketKind,
    PacketMeta, Pressure, ProtocolMatch, SourceId,
};
use tidegate_wire::{
    EtherType, EthernetHeader, IpCidr, Ipv4Header, Ipv6Header, Medium, Protocol, UdpHeader,
};

/// Address of the only known source.
const KNOWN: [u8; 4] = [192, 0, 2, 1];

/// Runs one input: the first byte chooses the link type. Returns the class.
pub fn check(input: &[u8]) -> Option<usize> {
    let (&choice, frame) = input.split_first()?;
    let medium = if choice == b'i' { Medium::Ip } else { Medium::Ethernet };
    let meta = PacketMeta::parse(medium, frame);
    assert!(meta.packet_bytes as usize <= frame.len());
    let has_ports = matches!(meta.kind, PacketKind::Ip(Protocol::UDP | Protocol::TCP));
    assert!(meta.destination_port.is_none() || has_ports, "{meta:?}");
    assert!(meta.payload.is_empty() || meta.destination_port.is_some(), "{meta:?}");
    match medium {
        Medium::Ip => packet(frame, &meta),
        Medium::Ethernet => match EthernetHeader::parse(frame) {
            Ok((header, rest)) if header.ethertype == EtherType::IPV4 => packet(rest, &meta),
            Ok((header, rest)) if header.ethertype == EtherType::IPV6 => packet(rest, &meta),
            _ => {}
        },
    }
    Some(class(&meta))
}

/// Asserts that the classifier reads a packet as the stack's parsers do.
fn packet(bytes: &[u8], meta: &PacketMeta<'_>) {
    if let Ok((header, payload)) = Ipv4Header::parse(bytes) {
        if meta.kind == PacketKind::Malformed {
            // The stack detects the error only when it reads the port.
            let has_ports = matches!(header.protocol, Protocol::UDP | Protocol::TCP);
            assert!(has_ports && payload.len() < 4, "{header:?}");
            return;
        }
        assert_eq!(meta.source, Some(IpAddr::V4(header.source)));
        assert_eq!(meta.packet_bytes, u32::from(header.total_bytes));
        if header.protocol == Protocol::UDP && !header.is_fragment() {
            datagram(payload, meta);
        }
    }
    if let Ok((header, rest)) = Ipv6Header::parse(bytes)
        && meta.kind != PacketKind::Malformed
    {
        assert_eq!(meta.source, Some(IpAddr::V6(header.source)));
        if header.next_header == Protocol::UDP {
            datagram(rest, meta);
        }
    }
}

fn datagram(bytes: &[u8], meta: &PacketMeta<'_>) {
    let Ok((header, payload)) = UdpHeader::parse(bytes) else { return };
    assert_eq!(meta.kind, PacketKind::Ip(Protocol::UDP));
    assert_eq!(meta.destination_port, Some(header.destination_port));
    assert!(meta.payload.starts_with(payload), "the length of UDP may be less than that of IP");
}

/// Asserts that a frame is in the class of the first rule that matches, and that the
/// verdict is counted there, once. Returns the class.
fn class(meta: &PacketMeta<'_>) -> usize {
    let mut admission = Admission::new(&config(), [7; 16]).expect("valid classes");
    admission.confirm(SourceId::from_address(IpAddr::from(KNOWN)));
    let class = admission.classify(meta);
    let known = admission.known_sources().contains(meta.source_id());
    let classes = admission.classes();
    if meta.kind == PacketKind::Malformed {
        assert_eq!(class, classes.default_class());
    } else {
        let first = classes.rules().iter().find(|rule| rule.matches(meta, known));
        assert_eq!(first.map(|rule| usize::from(rule.class)), Some(class));
    }
    // A period with packet loss, so that limits are in force.
    admission.on_period(0, &Pressure::default());
    admission.on_period(5_000_000, &Pressure { late_drops: 1, ..Pressure::default() });
    assert!(admission.is_limiting());
    for packet in 1..=20 {
        let (AdmissionVerdict::Admit { class: of } | AdmissionVerdict::Refuse { class: of, .. }) =
            admission.decide(5_000_000, meta);
        assert_eq!(of, class);
        let counters = admission.counters();
        assert_eq!(counters[class].arrived(), packet);
        assert_eq!(counters.iter().map(ClassCounters::arrived).sum::<u64>(), packet);
    }
    class
}

/// Configuration with a class for every kind of condition.
fn config() -> Config {
    let class = |name: &str, rule: Match, rank| Class::new(name).rules(vec![rule]).rank(rank);
    let all = Match::default();
    let protocol = |protocol| all.protocol(protocol);
    let network = |text: &str| all.source(text.parse::<IpCidr>().ok());
    let fragments = protocol(ProtocolMatch::UDP).port(NumberRange::NONE);
    Config::default()
        .classes(vec![
            class("neighbour", protocol(ProtocolMatch::NEIGHBOUR), 0),
            class("icmp", protocol(ProtocolMatch::ICMP), 0),
            class("known", all.known(true), 1),
            class("network", network("198.51.100.0/24"), 1),
            class("network6", network("2001:db8::/32"), 1),
            class("asks", all.payload(12, "\\x07example".parse().ok()), 2),
            class("dns", all.port(NumberRange { low: 53, high: 53 }), 2),
            class("fragments", fragments, 3),
            class("small", all.size(NumberRange { low: 0, high: 60 }), 4),
        ])
        .known_sources(1)
}
