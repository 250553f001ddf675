//! Packets to send, as far as rules and the hash of flows use them.

use std::net::IpAddr;

use tidegate_gate::transmit::PacketMeta;
use tidegate_wire::{Ipv4Header, Ipv6Header, Protocol, Sum, checksum};

use crate::ip::version::is_ipv4;
use crate::tcp::FourTuple;

/// Types of ICMPv6 messages of neighbour and router discovery (RFC 4861 section 4).
const NEIGHBOUR_DISCOVERY: std::ops::RangeInclusive<u8> = 133..=137;

/// Bits of the explicit congestion notification, below the code point (RFC 3168).
const ECN_BITS: u8 = 3;

const CHECKSUM_OFFSET_BYTES: usize = 10;

/// Addresses, ports and protocol: equal for all packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FlowKey {
    protocol: u8,
    source: IpAddr,
    destination: IpAddr,
    /// Source and destination; `None` for fragments, and for protocols without ports.
    ports: Option<(u16, u16)>,
}

/// Packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutgoingPacket {
    pub(super) key: FlowKey,
    traffic_class: u8,
}

impl OutgoingPacket {
    /// Packet of a connection.
    pub(super) fn of_connection(tuple: &FourTuple, traffic_class: u8) -> Self {
        let key = FlowKey {
            protocol: Protocol::TCP.0,
            source: tuple.local_ip(),
            destination: tuple.remote_ip(),
            ports: Some((tuple.local_port, tuple.remote_port)),
        };
        Self { key, traffic_class }
    }

    /// Reads an IP packet of this stack. `None` for neighbour discovery, and for what is no IP
    /// packet: both are part of the link's own work.
    pub(super) fn parse(packet: &[u8]) -> Option<Self> {
        let (protocol, source, destination, is_fragment, traffic_class, payload) =
            match is_ipv4(packet) {
                true => {
                    let (header, payload) = Ipv4Header::parse_quoted(packet).ok()?;
                    let is_fragment = header.more_fragments || header.fragment_offset_bytes > 0;
                    let (source, destination) = (header.source.into(), header.destination.into());
                    let protocol = header.protocol;
                    (protocol, source, destination, is_fragment, header.dscp_ecn, payload)
                }
                false => {
                    let (header, payload) = Ipv6Header::parse_quoted(packet).ok()?;
                    let is_fragment = header.next_header == Protocol::FRAGMENT;
                    // The fragment header begins with the protocol of the packet.
                    let protocol = match payload.first() {
                        Some(&protocol) if is_fragment => Protocol(protocol),
                        _ => header.next_header,
                    };
                    let (source, destination): (IpAddr, IpAddr) =
                        (header.source.into(), header.destination.into());
                    let class = header.traffic_class;
                    (protocol, source, destination, is_fragment, class, payload)
                }
            };
        let is_discovery = protocol == Protocol::ICMPV6
            && !is_fragment
            && payload.first().is_some_and(|kind| NEIGHBOUR_DISCOVERY.contains(kind));
        if is_discovery {
            return None;
        }
        let ports = match payload {
            [a, b, c, d, ..]
                if !is_fragment && matches!(protocol, Protocol::TCP | Protocol::UDP) =>
            {
                Some((u16::from_be_bytes([*a, *b]), u16::from_be_bytes([*c, *d])))
            }
            _ => None,
        };
        let key = FlowKey { protocol: protocol.0, source, destination, ports };
        Some(Self { key, traffic_class })
    }

    /// The packet as rules see it.
    pub(super) fn meta(&self) -> PacketMeta {
        PacketMeta {
            protocol: self.protocol(),
            local_port: self.local_port(),
            destination: self.key.destination,
            dscp: self.traffic_class >> 2,
        }
    }

    pub(super) fn protocol(&self) -> Protocol {
        Protocol(self.key.protocol)
    }

    pub(super) fn local_port(&self) -> Option<u16> {
        self.key.ports.map(|(source, _)| source)
    }
}

/// Writes a differentiated services code point to an IP packet (RFC 2474).
pub(super) fn set_dscp(packet: &mut [u8], dscp: u8) {
    let Some(head) = packet.first_chunk_mut::<{ Ipv4Header::BYTES }>() else { return };
    let old = Sum::ZERO.with_u16(u16::from_be_bytes([head[0], head[1]]));
    if head[0] >> 4 == 6 {
        head[0] = 6 << 4 | dscp >> 2;
        head[1] = dscp << 6 | head[1] & 0x3f;
        return;
    }
    head[1] = dscp << 2 | head[1] & ECN_BITS;
    let new = Sum::ZERO.with_u16(u16::from_be_bytes([head[0], head[1]]));
    let at = CHECKSUM_OFFSET_BYTES;
    let updated = checksum::update(u16::from_be_bytes([head[at], head[at + 1]]), old, new);
    head[at..at + 2].copy_from_slice(&updated.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(protocol: Protocol, payload: &[u8], change: impl FnOnce(&mut Ipv4Header)) -> Vec<u8> {
        let (source, destination) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let mut header = Ipv4Header::new(source, destination, protocol, payload.len()).unwrap();
        change(&mut header);
        let mut packet = vec![0; Ipv4Header::BYTES + payload.len()];
        header.emit(&mut packet).unwrap().copy_from_slice(payload);
        packet
    }

    fn v6(next_header: Protocol, payload: &[u8], traffic_class: u8) -> Vec<u8> {
        let (source, destination) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let mut header = Ipv6Header::new(source, destination, next_header, payload.len()).unwrap();
        header.traffic_class = traffic_class;
        let mut packet = vec![0; Ipv6Header::BYTES + payload.len()];
        header.emit(&mut packet).unwrap().copy_from_slice(payload);
        packet
    }

    #[test]
    fn segment_has_the_flow_of_its_connection() {
        let ports = [0, 80, 0x12, 0x34, 0, 0, 0, 0];
        for (packet, local, remote) in [
            (v4(Protocol::TCP, &ports, |_| ()), "192.0.2.1:80", "192.0.2.2:4660"),
            (v6(Protocol::TCP, &ports, 0), "[fd00::1]:80", "[fd00::2]:4660"),
        ] {
            let tuple = FourTuple::new(local.parse().unwrap(), remote.parse().unwrap());
            let expected = OutgoingPacket::of_connection(&tuple, 0);
            assert_eq!(OutgoingPacket::parse(&packet), Some(expected));
        }
    }

    #[test]
    fn all_fragments_of_a_packet_have_one_flow() {
        let first = v4(Protocol::UDP, &[0, 53, 0, 54], |header| header.more_fragments = true);
        let last = v4(Protocol::UDP, &[7; 8], |header| header.fragment_offset_bytes = 8);
        let of = |packet: &[u8]| OutgoingPacket::parse(packet).unwrap();
        assert_eq!(of(&first), of(&last));
        let fragment = |rest: [u8; 3]| {
            let payload = [[17, 0, 0].as_slice(), &rest, &[0, 1, 0, 53, 0, 54]].concat();
            v6(Protocol::FRAGMENT, &payload, 0)
        };
        assert_eq!(of(&fragment([1, 0, 0])), of(&fragment([8, 0, 0])));
        assert_eq!(of(&fragment([1, 0, 0])).protocol(), Protocol::UDP);
    }

    #[test]
    fn neighbour_discovery_and_foreign_bytes_are_of_no_flow() {
        for kind in 133..=137 {
            assert_eq!(OutgoingPacket::parse(&v6(Protocol::ICMPV6, &[kind, 0], 0)), None);
        }
        assert!(OutgoingPacket::parse(&v6(Protocol::ICMPV6, &[129, 0], 0)).is_some());
        for packet in [&[][..], &[0x45; 3], &[0; 60]] {
            assert_eq!(OutgoingPacket::parse(packet), None, "{packet:?}");
        }
    }

    #[test]
    fn code_point_is_written_beside_the_congestion_bits() {
        let mut packet = v4(Protocol::UDP, &[0; 8], |header| header.dscp_ecn = 0b10);
        set_dscp(&mut packet, 46);
        let (header, _) = Ipv4Header::parse(&packet).expect("the checksum holds");
        assert_eq!(header.dscp_ecn, 46 << 2 | 0b10);
        let mut packet = v6(Protocol::UDP, &[0; 8], 0b01);
        set_dscp(&mut packet, 46);
        let (header, _) = Ipv6Header::parse(&packet).unwrap();
        assert_eq!(header.traffic_class, 46 << 2 | 0b01);
        assert_eq!(OutgoingPacket::parse(&packet).unwrap().meta().dscp, 46);
    }
}
