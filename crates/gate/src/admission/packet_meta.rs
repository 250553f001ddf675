//! Metadata of a frame, as far as rules match on it.
//!
//! `bpf/admission.h` of the device crate parses the same fields; a test runs both parsers on
//! the same frames. Only checks that change the result are made: the stack validates admitted
//! packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_wire::{Medium, Protocol};

use super::hash::SourceId;

/// Packet kind, by protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PacketKind {
    /// ARP, or neighbour and router discovery from this link (hop limit 255, RFC 4861
    /// section 7.1).
    Neighbour,
    /// ICMP or ICMPv6, except neighbour discovery.
    Icmp,
    /// Any other protocol above IP.
    Ip(Protocol),
    /// Neither IP nor ARP.
    Other,
    /// Truncated, or inconsistent with its headers.
    Malformed,
}

impl PacketKind {
    /// Returns the kind as a number, the same as in the BPF program: the IP protocol number, 1
    /// for both versions of ICMP, or a number above 255 for kinds without one.
    pub const fn number(self) -> u16 {
        match self {
            PacketKind::Neighbour => 256,
            PacketKind::Icmp => 1,
            PacketKind::Ip(protocol) => protocol.0 as u16,
            PacketKind::Other => 257,
            PacketKind::Malformed => 258,
        }
    }
}

/// Metadata of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketMeta<'p> {
    /// Packet kind.
    pub kind: PacketKind,
    /// Source address; `None` if the frame has none.
    pub source: Option<IpAddr>,
    /// Destination port of UDP and TCP. `None` for fragments.
    pub destination_port: Option<u16>,
    /// IP packet length in bytes, or frame length if the frame is not IP.
    pub packet_bytes: u32,
    /// Payload of UDP or TCP; empty for fragments and where the header is cut off or invalid.
    pub payload: &'p [u8],
}

/// Maximum number of IPv6 extension headers; no legitimate sender needs more.
const MAX_EXTENSION_HEADERS: usize = 6;

const ICMPV4: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const ICMPV6: u8 = 58;
const DESTINATION_OPTIONS: u8 = 60;

impl<'p> PacketMeta<'p> {
    /// Parses a frame. Never fails: unreadable frames are [`PacketKind::Malformed`].
    pub fn parse(medium: Medium, frame: &'p [u8]) -> Self {
        let meta = match medium {
            Medium::Ethernet => parse_ethernet(frame),
            Medium::Ip => parse_ip(frame),
        };
        meta.unwrap_or_else(|| Self::new(PacketKind::Malformed, None, frame.len()))
    }

    /// Returns the source identity used for known sources and source shares.
    #[inline]
    pub fn source_id(&self) -> SourceId {
        self.source.map_or(SourceId::NONE, SourceId::from_address)
    }

    fn new(kind: PacketKind, source: Option<IpAddr>, packet_bytes: usize) -> Self {
        Self {
            kind,
            source,
            destination_port: None,
            packet_bytes: packet_bytes as u32,
            payload: &[],
        }
    }
}

/// Payload of a UDP datagram or a TCP segment.
fn payload(protocol: u8, upper: &[u8]) -> &[u8] {
    let header_bytes = match protocol {
        TCP => upper.get(12).map(|byte| usize::from(byte >> 4) * 4).filter(|bytes| *bytes >= 20),
        _ => Some(8),
    };
    header_bytes.and_then(|bytes| upper.get(bytes..)).unwrap_or_default()
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    bytes.get(offset..)?.first_chunk().map(|half| u16::from_be_bytes(*half))
}

fn parse_ethernet(frame: &[u8]) -> Option<PacketMeta<'_>> {
    let mut rest = frame.get(14..)?;
    let mut ethertype = u16_at(frame, 12)?;
    if matches!(ethertype, 0x8100 | 0x88a8) {
        ethertype = u16_at(rest, 2)?;
        rest = rest.get(4..)?;
    }
    match ethertype {
        0x0800 => parse_ipv4(rest),
        0x86dd => parse_ipv6(rest),
        0x0806 => parse_arp(frame, rest),
        _ => Some(PacketMeta::new(PacketKind::Other, None, frame.len())),
    }
}

fn parse_ip(packet: &[u8]) -> Option<PacketMeta<'_>> {
    match packet.first()? >> 4 {
        4 => parse_ipv4(packet),
        6 => parse_ipv6(packet),
        _ => None,
    }
}

fn parse_arp<'p>(frame: &[u8], arp: &[u8]) -> Option<PacketMeta<'p>> {
    let arp: &[u8; 28] = arp.first_chunk()?;
    // Protocol type IPv4, with the address lengths of Ethernet and IPv4.
    if arp[2..6] != [8, 0, 6, 4] {
        return Some(PacketMeta::new(PacketKind::Other, None, frame.len()));
    }
    let sender = Ipv4Addr::new(arp[14], arp[15], arp[16], arp[17]);
    Some(PacketMeta::new(PacketKind::Neighbour, Some(sender.into()), frame.len()))
}

fn parse_ipv4(packet: &[u8]) -> Option<PacketMeta<'_>> {
    let header: &[u8; 20] = packet.first_chunk()?;
    let header_bytes = usize::from(header[0] & 15) * 4;
    let total_bytes = usize::from(u16_at(header, 2)?);
    if header[0] >> 4 != 4 || header_bytes < 20 || total_bytes < header_bytes {
        return None;
    }
    let upper = packet.get(..total_bytes)?.get(header_bytes..)?;
    let source = IpAddr::V4(Ipv4Addr::new(header[12], header[13], header[14], header[15]));
    let fragment = u16_at(header, 6)? & 0x3fff != 0;
    let kind = match header[9] {
        ICMPV4 => PacketKind::Icmp,
        protocol => PacketKind::Ip(Protocol(protocol)),
    };
    let mut meta = PacketMeta::new(kind, Some(source), total_bytes);
    if matches!(header[9], UDP | TCP) && !fragment {
        meta.destination_port = Some(u16_at(upper, 2)?);
        meta.payload = payload(header[9], upper);
    }
    Some(meta)
}

fn parse_ipv6(packet: &[u8]) -> Option<PacketMeta<'_>> {
    let header: &[u8; 40] = packet.first_chunk()?;
    let total_bytes = 40 + usize::from(u16_at(header, 4)?);
    if header[0] >> 4 != 6 {
        return None;
    }
    let mut rest = packet.get(..total_bytes)?.get(40..)?;
    let source: [u8; 16] = *header[8..].first_chunk()?;
    let source = IpAddr::V6(Ipv6Addr::from(source));
    let meta = |kind| PacketMeta::new(kind, Some(source), total_bytes);
    let mut next = header[6];
    for _ in 0..MAX_EXTENSION_HEADERS {
        match next {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => {
                let bytes = 8 + 8 * usize::from(*rest.get(1)?);
                next = rest[0];
                rest = rest.get(bytes..)?;
            }
            FRAGMENT => {
                // Protocol of the fragmented packet, according to the fragment header.
                rest.get(..8)?;
                return Some(meta(match rest[0] {
                    ICMPV6 => PacketKind::Icmp,
                    protocol => PacketKind::Ip(Protocol(protocol)),
                }));
            }
            UDP | TCP => {
                let destination_port = Some(u16_at(rest, 2)?);
                return Some(PacketMeta {
                    destination_port,
                    payload: payload(next, rest),
                    ..meta(PacketKind::Ip(Protocol(next)))
                });
            }
            ICMPV6 => {
                let from_link = header[7] == 255 && (133..=137).contains(rest.first()?);
                return Some(meta(if from_link {
                    PacketKind::Neighbour
                } else {
                    PacketKind::Icmp
                }));
            }
            _ => return Some(meta(PacketKind::Ip(Protocol(next)))),
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

    const UDP_HEADER_TO_PORT_53: [u8; 8] = [1, 1, 0, 53, 0, 8, 0, 0];

    #[test]
    fn parses_udp_of_both_families() {
        for (packet, source, bytes) in [
            (v4(17, 0x4000, &UDP_HEADER_TO_PORT_53), "192.0.2.1", 28),
            (v6(17, 1, &UDP_HEADER_TO_PORT_53), "2001:db8::1", 48),
        ] {
            let meta = PacketMeta::parse(Medium::Ip, &packet);
            assert_eq!(meta.kind, PacketKind::Ip(Protocol::UDP));
            assert_eq!((meta.source, meta.destination_port), (source.parse().ok(), Some(53)));
            assert_eq!(meta.packet_bytes, bytes);
            let ethertype = if bytes == 28 { 0x0800_u16 } else { 0x86dd };
            let mut padded = ethernet(ethertype, &packet);
            padded.extend([0; 20]);
            assert_eq!(PacketMeta::parse(Medium::Ethernet, &padded), meta, "padding");
            let tagged = [&[0, 7], &ethertype.to_be_bytes()[..], &packet].concat();
            let tagged = ethernet(0x8100, &tagged);
            assert_eq!(PacketMeta::parse(Medium::Ethernet, &tagged), meta);
            for cut in 0..packet.len() {
                let meta = PacketMeta::parse(Medium::Ip, &packet[..cut]);
                assert_eq!((meta.kind, meta.source), (PacketKind::Malformed, None), "{cut}");
            }
        }
    }

    #[test]
    fn payload_begins_after_the_header_and_ends_with_the_packet() {
        let payload = |packet: &[u8]| PacketMeta::parse(Medium::Ip, packet).payload.to_vec();
        let datagram = [&UDP_HEADER_TO_PORT_53[..], b"query"].concat();
        let segment = |header_bytes: u8, payload: &[u8]| {
            let mut segment = vec![0; header_bytes.max(13).into()];
            segment[12] = header_bytes << 2;
            segment.extend(payload);
            segment
        };
        for of in
            [|next, upper: &[u8]| v4(next, 0, upper), |next, upper: &[u8]| v6(next, 64, upper)]
        {
            let padded = [of(17, &datagram), vec![0; 9]].concat();
            assert_eq!(payload(&padded), b"query");
            assert_eq!(payload(&of(6, &segment(20, b"GET /"))), b"GET /");
            assert_eq!(payload(&of(6, &segment(32, b"GET /"))), b"GET /");
            for none in [segment(16, b"GET /"), segment(60, b"")[..59].to_vec(), vec![0; 12]] {
                assert_eq!(payload(&of(6, &none)), b"", "{none:?}");
            }
            assert_eq!(payload(&of(17, &datagram[..7])), b"");
        }
        assert_eq!(payload(&v4(17, 0x2000, &datagram)), b"", "a fragment");
    }

    #[test]
    fn fragments_have_no_port() {
        for packet in [
            v4(17, 0x2000, &UDP_HEADER_TO_PORT_53),
            v4(17, 0x0010, &[]),
            v6(44, 64, &[17, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 53]),
            v6(60, 64, &[44, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 1, 0, 0, 0, 0]),
        ] {
            let meta = PacketMeta::parse(Medium::Ip, &packet);
            assert_eq!(
                (meta.kind, meta.destination_port),
                (PacketKind::Ip(Protocol::UDP), None),
                "{packet:?}"
            );
        }
    }

    #[test]
    fn skips_extension_headers_up_to_the_limit() {
        let chain = |headers: usize| {
            let mut payload = UDP_HEADER_TO_PORT_53.to_vec();
            let mut next = 17;
            for _ in 0..headers {
                payload = [&[next, 0, 0, 0, 0, 0, 0, 0], &payload[..]].concat();
                next = 60;
            }
            let packet = v6(next, 64, &payload);
            let meta = PacketMeta::parse(Medium::Ip, &packet);
            (meta.kind, meta.destination_port)
        };
        assert_eq!(chain(5), (PacketKind::Ip(Protocol::UDP), Some(53)));
        assert_eq!(chain(6), (PacketKind::Malformed, None));
    }

    #[test]
    fn neighbour_discovery_needs_hop_limit_255() {
        let kind = |packet: &[u8]| PacketMeta::parse(Medium::Ip, packet).kind;
        for message in 133..=137 {
            assert_eq!(kind(&v6(58, 255, &[message; 8])), PacketKind::Neighbour);
            assert_eq!(kind(&v6(58, 254, &[message; 8])), PacketKind::Icmp, "not from this link");
        }
        for message in [1, 128, 132, 138] {
            assert_eq!(kind(&v6(58, 255, &[message; 8])), PacketKind::Icmp);
        }
        assert_eq!(kind(&v4(1, 0, &[8; 8])), PacketKind::Icmp);

        let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
        arp.extend([2, 0, 0, 0, 0, 1, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 2]);
        let frame = ethernet(0x0806, &arp);
        let meta = PacketMeta::parse(Medium::Ethernet, &frame);
        assert_eq!((meta.kind, meta.source), (PacketKind::Neighbour, "192.0.2.1".parse().ok()));
        let cut = PacketMeta::parse(Medium::Ethernet, &frame[..frame.len() - 1]);
        assert_eq!(cut.kind, PacketKind::Malformed);
        assert_eq!(
            PacketMeta::parse(Medium::Ethernet, &ethernet(0x88cc, &arp)).kind,
            PacketKind::Other
        );
    }
}
