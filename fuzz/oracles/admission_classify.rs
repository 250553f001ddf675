//! Frames on their way to a class: any bytes have one, and what the stack would
//! read in them, the classifier reads too.

use std::net::IpAddr;

use tidegate_gate::admission::{
    Admission, Class, ClassCounters, Config, Facts, Kind, Match, Pressure, ProtocolMatch, Range,
    Source, Verdict,
};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, Medium, Protocol, UdpHeader,
};

/// The source that is known.
const KNOWN: [u8; 4] = [192, 0, 2, 1];

/// The first byte says what the frame begins with. Returns the class.
pub fn check(input: &[u8]) -> Option<usize> {
    let (&choice, frame) = input.split_first()?;
    let medium = if choice == b'i' { Medium::Ip } else { Medium::Ethernet };
    let facts = Facts::of_frame(medium, frame);
    assert!(facts.packet_bytes as usize <= frame.len());
    let has_ports = matches!(facts.kind, Kind::Ip(Protocol::UDP | Protocol::TCP));
    assert!(facts.port.is_none() || has_ports, "{facts:?}");
    match medium {
        Medium::Ip => packet(frame, &facts),
        Medium::Ethernet => match EthernetHeader::parse(frame) {
            Ok((header, rest)) if header.ethertype == EtherType::IPV4 => packet(rest, &facts),
            Ok((header, rest)) if header.ethertype == EtherType::IPV6 => packet(rest, &facts),
            _ => {}
        },
    }
    Some(class(&facts))
}

/// What passes the stack's parsers is read by the classifier in the same way.
fn packet(bytes: &[u8], facts: &Facts) {
    if let Ok((header, payload)) = Ipv4Header::parse(bytes) {
        if facts.kind == Kind::Malformed {
            // The stack finds out when it looks for the port.
            let has_ports = matches!(header.protocol, Protocol::UDP | Protocol::TCP);
            assert!(has_ports && payload.len() < 4, "{header:?}");
            return;
        }
        assert_eq!(facts.source, Some(IpAddr::V4(header.source)));
        assert_eq!(facts.packet_bytes, u32::from(header.total_bytes));
        if header.protocol == Protocol::UDP && !header.is_fragment() {
            datagram(payload, facts);
        }
    }
    if let Ok((header, rest)) = Ipv6Header::parse(bytes)
        && facts.kind != Kind::Malformed
    {
        assert_eq!(facts.source, Some(IpAddr::V6(header.source)));
        if header.next_header == Protocol::UDP {
            datagram(rest, facts);
        }
    }
}

fn datagram(bytes: &[u8], facts: &Facts) {
    let Ok((header, _)) = UdpHeader::parse(bytes) else { return };
    assert_eq!(facts.kind, Kind::Ip(Protocol::UDP));
    assert_eq!(facts.port, Some(header.destination_port));
}

/// The class of a frame, which is that of the first rule that matches; and what
/// becomes of it is counted there, once.
fn class(facts: &Facts) -> usize {
    let mut admission = Admission::new(&config(), [7; 16]).expect("the classes make sense");
    admission.confirm(Source::of(IpAddr::from(KNOWN)));
    let class = admission.classify(facts);
    let known = admission.known().contains(facts.source_id());
    let classes = admission.classes();
    if facts.kind == Kind::Malformed {
        assert_eq!(class, classes.rest());
    } else {
        let first = classes.rules().iter().find(|rule| rule.matches(facts, known));
        assert_eq!(first.map(|rule| usize::from(rule.class)), Some(class));
    }
    // One that loses packets, so that limits hold.
    admission.on_period(0, &Pressure::default());
    admission.on_period(5_000_000, &Pressure { lost_late: 1, ..Pressure::default() });
    assert!(admission.is_limiting());
    for packet in 1..=20 {
        let (Verdict::Admit { class: of } | Verdict::Refuse { class: of, .. }) =
            admission.decide(5_000_000, facts);
        assert_eq!(of, class);
        let counters = admission.counters();
        assert_eq!(counters[class].arrived(), packet);
        assert_eq!(counters.iter().map(ClassCounters::arrived).sum::<u64>(), packet);
    }
    class
}

/// A class for every kind of condition.
fn config() -> Config {
    let class = |name: &str, rule: Match, rank| Class {
        name: name.into(),
        rules: vec![rule],
        rank,
        guaranteed_pps: 0,
        ceiling_pps: None,
        exempt: false,
    };
    let all = Match::default();
    let protocol = |protocol| Match { protocol: Some(protocol), ..all };
    let network = |text: &str| Match { source: text.parse().ok(), ..all };
    let fragments = Match { port: Some(Range::NONE), ..protocol(ProtocolMatch::UDP) };
    Config {
        classes: vec![
            class("neighbour", protocol(ProtocolMatch::NEIGHBOUR), 0),
            class("icmp", protocol(ProtocolMatch::ICMP), 0),
            class("known", Match { known: Some(true), ..all }, 1),
            class("network", network("198.51.100.0/24"), 1),
            class("network6", network("2001:db8::/32"), 1),
            class("dns", Match { port: Some(Range { low: 53, high: 53 }), ..all }, 2),
            class("fragments", fragments, 3),
            class("small", Match { size: Some(Range { low: 0, high: 60 }), ..all }, 4),
        ],
        known_sources: 1,
        ..Config::default()
    }
}
