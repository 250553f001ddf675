//! What a frame says about itself, as far as rules ask about it.
//!
//! The same is read by `port/bpf/admission.h`; a test runs both on the same
//! frames. Nothing is checked that does not change the answer: the stack does
//! that for the packets that are admitted.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_wire::{Medium, Protocol};

use super::hash::Source;

/// What kind of packet it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// ARP, or neighbour and router discovery that comes from this link (hop
    /// limit 255, RFC 4861 section 7.1).
    Neighbour,
    /// ICMP or ICMPv6, but for neighbour discovery.
    Icmp,
    /// Any other protocol above IP.
    Ip(Protocol),
    /// Neither IP nor ARP.
    Other,
    /// Cut short, or not what it says it is.
    Malformed,
}

impl Kind {
    /// The kind as one number: that of the protocol above IP, with 1 for both
    /// ICMPs, or a number above 255 for the rest. The BPF program has the same.
    pub const fn number(self) -> u16 {
        match self {
            Kind::Neighbour => 256,
            Kind::Icmp => 1,
            Kind::Ip(protocol) => protocol.0 as u16,
            Kind::Other => 257,
            Kind::Malformed => 258,
        }
    }
}

/// What a frame says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// What kind of packet it is.
    pub kind: Kind,
    /// Who sent it, if it says.
    pub source: Option<IpAddr>,
    /// The destination port of UDP and TCP. Fragments have none.
    pub port: Option<u16>,
    /// The length of the IP packet in bytes; of the frame, for what is not IP.
    pub packet_bytes: u32,
}

/// More extension headers than this are more than any honest sender needs.
const EXTENSIONS_MAX: usize = 6;

const ICMPV4: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const ICMPV6: u8 = 58;
const DESTINATION: u8 = 60;

impl Facts {
    /// Reads a frame. Never fails: what cannot be read is
    /// [`Kind::Malformed`].
    pub fn of_frame(medium: Medium, frame: &[u8]) -> Self {
        let facts = match medium {
            Medium::Ethernet => of_ethernet(frame),
            Medium::Ip => of_ip(frame),
        };
        facts.unwrap_or_else(|| Self::new(Kind::Malformed, None, frame.len()))
    }

    /// Who sent it, as far as senders are told apart.
    #[inline]
    pub fn source_id(&self) -> Source {
        self.source.map_or(Source::NONE, Source::of)
    }

    fn new(kind: Kind, source: Option<IpAddr>, packet_bytes: usize) -> Self {
        Self { kind, source, port: None, packet_bytes: packet_bytes as u32 }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|half| u16::from_be_bytes(*half))
}

fn of_ethernet(frame: &[u8]) -> Option<Facts> {
    let mut rest = frame.get(14..)?;
    let mut ethertype = u16_at(frame, 12)?;
    if matches!(ethertype, 0x8100 | 0x88a8) {
        ethertype = u16_at(rest, 2)?;
        rest = rest.get(4..)?;
    }
    match ethertype {
        0x0800 => of_ipv4(rest),
        0x86dd => of_ipv6(rest),
        0x0806 => of_arp(frame, rest),
        _ => Some(Facts::new(Kind::Other, None, frame.len())),
    }
}

fn of_ip(packet: &[u8]) -> Option<Facts> {
    match packet.first()? >> 4 {
        4 => of_ipv4(packet),
        6 => of_ipv6(packet),
        _ => None,
    }
}

fn of_arp(frame: &[u8], arp: &[u8]) -> Option<Facts> {
    let arp: &[u8; 28] = arp.first_chunk()?;
    // Protocol IPv4, lengths of Ethernet and IPv4.
    if arp[2..6] != [8, 0, 6, 4] {
        return Some(Facts::new(Kind::Other, None, frame.len()));
    }
    let sender = Ipv4Addr::new(arp[14], arp[15], arp[16], arp[17]);
    Some(Facts::new(Kind::Neighbour, Some(sender.into()), frame.len()))
}

fn of_ipv4(packet: &[u8]) -> Option<Facts> {
    let head: &[u8; 20] = packet.first_chunk()?;
    let header_bytes = usize::from(head[0] & 15) * 4;
    let total_bytes = usize::from(u16_at(head, 2)?);
    if head[0] >> 4 != 4 || header_bytes < 20 || total_bytes < header_bytes {
        return None;
    }
    let upper = packet.get(..total_bytes)?.get(header_bytes..)?;
    let source = IpAddr::V4(Ipv4Addr::new(head[12], head[13], head[14], head[15]));
    let fragment = u16_at(head, 6)? & 0x3fff != 0;
    let kind = match head[9] {
        ICMPV4 => Kind::Icmp,
        protocol => Kind::Ip(Protocol(protocol)),
    };
    let mut facts = Facts::new(kind, Some(source), total_bytes);
    if matches!(head[9], UDP | TCP) && !fragment {
        facts.port = Some(u16_at(upper, 2)?);
    }
    Some(facts)
}

fn of_ipv6(packet: &[u8]) -> Option<Facts> {
    let head: &[u8; 40] = packet.first_chunk()?;
    let total_bytes = 40 + usize::from(u16_at(head, 4)?);
    if head[0] >> 4 != 6 {
        return None;
    }
    let mut rest = packet.get(..total_bytes)?.get(40..)?;
    let source: [u8; 16] = *head[8..].first_chunk()?;
    let source = IpAddr::V6(Ipv6Addr::from(source));
    let facts = |kind| Facts::new(kind, Some(source), total_bytes);
    let mut next = head[6];
    for _ in 0..EXTENSIONS_MAX {
        match next {
            HOP_BY_HOP | ROUTING | DESTINATION => {
                let bytes = 8 + 8 * usize::from(*rest.get(1)?);
                next = rest[0];
                rest = rest.get(bytes..)?;
            }
            FRAGMENT => {
                // What it is a fragment of, as far as the header says.
                rest.get(..8)?;
                return Some(facts(match rest[0] {
                    ICMPV6 => Kind::Icmp,
                    protocol => Kind::Ip(Protocol(protocol)),
                }));
            }
            UDP | TCP => {
                let port = Some(u16_at(rest, 2)?);
                return Some(Facts { port, ..facts(Kind::Ip(Protocol(next))) });
            }
            ICMPV6 => {
                let from_link = head[7] == 255 && (133..=137).contains(rest.first()?);
                return Some(facts(if from_link { Kind::Neighbour } else { Kind::Icmp }));
            }
            _ => return Some(facts(Kind::Ip(Protocol(next)))),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
        [&[0; 12][..], &ethertype.to_be_bytes(), payload].concat()
    }

    fn v4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 20 + payload.len() as u8, 0, 0];
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        packet.extend(payload);
        packet
    }

    fn v6(next: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next, hop_limit];
        packet.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        packet.extend([0; 16]);
        packet.extend(payload);
        packet
    }

    const TO_PORT_53: [u8; 8] = [1, 1, 0, 53, 0, 8, 0, 0];

    #[test]
    fn datagrams_of_both_families() {
        for (packet, source, bytes) in [
            (v4(17, 0x4000, &TO_PORT_53), "192.0.2.1", 28),
            (v6(17, 1, &TO_PORT_53), "2001:db8::1", 48),
        ] {
            let facts = Facts::of_frame(Medium::Ip, &packet);
            assert_eq!(facts.kind, Kind::Ip(Protocol::UDP));
            assert_eq!((facts.source, facts.port), (source.parse().ok(), Some(53)));
            assert_eq!(facts.packet_bytes, bytes);
            let ethertype = if bytes == 28 { 0x0800_u16 } else { 0x86dd };
            let mut padded = ethernet(ethertype, &packet);
            padded.extend([0; 20]);
            assert_eq!(Facts::of_frame(Medium::Ethernet, &padded), facts, "padding");
            let tagged = [&[0, 7], &ethertype.to_be_bytes()[..], &packet].concat();
            assert_eq!(Facts::of_frame(Medium::Ethernet, &ethernet(0x8100, &tagged)), facts);
            for cut in 0..packet.len() {
                let facts = Facts::of_frame(Medium::Ip, &packet[..cut]);
                assert_eq!((facts.kind, facts.source), (Kind::Malformed, None), "{cut}");
            }
        }
    }

    #[test]
    fn fragments_have_no_port() {
        for packet in [
            v4(17, 0x2000, &TO_PORT_53),
            v4(17, 0x0010, &[]),
            v6(44, 64, &[17, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 53]),
            v6(60, 64, &[44, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 1, 0, 0, 0, 0]),
        ] {
            let facts = Facts::of_frame(Medium::Ip, &packet);
            assert_eq!((facts.kind, facts.port), (Kind::Ip(Protocol::UDP), None), "{packet:?}");
        }
    }

    #[test]
    fn extension_headers_are_looked_through_up_to_a_limit() {
        let chain = |headers: usize| {
            let mut payload = TO_PORT_53.to_vec();
            let mut next = 17;
            for _ in 0..headers {
                payload = [&[next, 0, 0, 0, 0, 0, 0, 0], &payload[..]].concat();
                next = 60;
            }
            Facts::of_frame(Medium::Ip, &v6(next, 64, &payload))
        };
        assert_eq!(chain(5).port, Some(53));
        assert_eq!(chain(6).kind, Kind::Malformed);
    }

    #[test]
    fn only_what_comes_from_the_link_is_neighbour_traffic() {
        let kind = |packet: &[u8]| Facts::of_frame(Medium::Ip, packet).kind;
        for message in 133..=137 {
            assert_eq!(kind(&v6(58, 255, &[message; 8])), Kind::Neighbour);
            assert_eq!(kind(&v6(58, 254, &[message; 8])), Kind::Icmp, "from far away");
        }
        for message in [1, 128, 132, 138] {
            assert_eq!(kind(&v6(58, 255, &[message; 8])), Kind::Icmp);
        }
        assert_eq!(kind(&v4(1, 0, &[8; 8])), Kind::Icmp);

        let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
        arp.extend([2, 0, 0, 0, 0, 1, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 2]);
        let facts = Facts::of_frame(Medium::Ethernet, &ethernet(0x0806, &arp));
        assert_eq!((facts.kind, facts.source), (Kind::Neighbour, "192.0.2.1".parse().ok()));
        let cut = Facts::of_frame(Medium::Ethernet, &ethernet(0x0806, &arp[..27]));
        assert_eq!(cut.kind, Kind::Malformed);
        assert_eq!(Facts::of_frame(Medium::Ethernet, &ethernet(0x88cc, &arp)).kind, Kind::Other);
    }
}
