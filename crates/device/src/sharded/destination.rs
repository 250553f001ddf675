//! Destination core of a frame, as far as its headers determine it.

use std::net::{IpAddr, SocketAddr};

use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, Icmpv4Message, Ipv4Header, Ipv6Header,
    Medium, Protocol as IpProtocol, upper_layer,
};

use super::LocalPort;
use super::flow::Flow;
use crate::steering::TransportProtocol;

/// Key of a fragmented packet, equal for all its fragments and for those of no other packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FragmentKey {
    source: IpAddr,
    destination: IpAddr,
    /// Protocol on IPv4. On IPv6 it is no part of the key (RFC 8200 section 4.5).
    protocol: Option<IpProtocol>,
    identification: u32,
}

#[cfg(test)]
impl FragmentKey {
    /// Key of a datagram.
    pub(super) fn of_udp(source: IpAddr, destination: IpAddr, identification: u32) -> Self {
        let protocol = source.is_ipv4().then_some(IpProtocol::UDP);
        Self { source, destination, protocol, identification }
    }
}

/// Destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination<'f> {
    /// The core that has the local port, or the flow if several cores share the port.
    Flow(FlowHeaders<'f>),
    /// As [`Destination::Flow`], and all other fragments of the packet go to the same core.
    FirstFragment(FragmentKey, FlowHeaders<'f>),
    /// The core that received the first fragment.
    Fragment(FragmentKey),
    /// All active cores.
    AllCores,
    /// The primary core.
    PrimaryCore,
    /// The core that received it.
    ThisCore,
}

/// Headers with the flow of a frame, parsed on demand: most frames only need the local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlowHeaders<'f> {
    protocol: TransportProtocol,
    /// The packet, from its IP header on.
    packet: &'f [u8],
    /// Source and destination port, at the same offset in UDP and TCP.
    ports: &'f [u8; 4],
    /// True for a sent packet that an ICMP error quotes.
    is_quoted: bool,
}

impl<'f> FlowHeaders<'f> {
    /// Headers of a packet whose transport header is `transport`.
    fn new(
        protocol: IpProtocol,
        packet: &'f [u8],
        transport: &'f [u8],
        is_quoted: bool,
    ) -> Option<Self> {
        let protocol = match protocol {
            IpProtocol::TCP => TransportProtocol::Tcp,
            IpProtocol::UDP => TransportProtocol::Udp,
            _ => return None,
        };
        Some(Self { protocol, packet, ports: transport.first_chunk()?, is_quoted })
    }

    /// The local port.
    pub(super) fn local_port(&self) -> LocalPort {
        let [a, b, c, d] = *self.ports;
        let port = if self.is_quoted { [a, b] } else { [c, d] };
        (self.protocol, u16::from_be_bytes(port))
    }

    /// The flow, with both addresses and ports.
    pub(super) fn flow(&self) -> Option<Flow> {
        let [source, destination]: [IpAddr; 2] = match self.packet.first()? >> 4 {
            4 => {
                let header = Ipv4Header::parse_quoted(self.packet).ok()?.0;
                [header.source.into(), header.destination.into()]
            }
            _ => {
                let header = Ipv6Header::parse_quoted(self.packet).ok()?.0;
                [header.source.into(), header.destination.into()]
            }
        };
        let [a, b, c, d] = *self.ports;
        let source = SocketAddr::new(source, u16::from_be_bytes([a, b]));
        let destination = SocketAddr::new(destination, u16::from_be_bytes([c, d]));
        let (local, remote) =
            if self.is_quoted { (source, destination) } else { (destination, source) };
        Some(Flow::new(self.protocol, local, remote))
    }
}

/// ICMPv6 types that all cores receive: router and neighbour advertisements, and redirects (RFC
/// 4861 section 4).
const ADVERTISEMENT_TYPES_V6: [u8; 3] = [134, 136, 137];

/// ICMPv6 type of a neighbour solicitation (RFC 4861 section 4.3).
const NEIGHBOUR_SOLICITATION_V6: u8 = 135;

/// Protocols that fragments of a TCP segment or a datagram may name: those, or an extension header.
const TRANSPORT_OR_EXTENSION_V6: [IpProtocol; 5] = [
    IpProtocol::TCP,
    IpProtocol::UDP,
    IpProtocol::HOP_BY_HOP,
    IpProtocol::ROUTING,
    IpProtocol::DESTINATION_OPTIONS,
];

/// Highest type of an ICMPv6 error (RFC 4443 section 2.1).
const MAX_ERROR_TYPE_V6: u8 = 127;

/// Bytes of an ICMPv6 error in front of the quoted packet.
const ERROR_HEADER_BYTES_V6: usize = 8;

impl<'f> Destination<'f> {
    /// Parses an untrusted frame. Frames that are not recognised go to the primary core.
    pub(super) fn classify(medium: Medium, frame: &'f [u8]) -> Self {
        let packet = match Self::ip_packet(medium, frame, Self::PrimaryCore) {
            Ok(packet) => packet,
            Err(destination) => return destination,
        };
        let read = match packet.first().map(|first| first >> 4) {
            Some(4) => classify_v4(packet),
            Some(6) => classify_v6(packet),
            _ => None,
        };
        read.unwrap_or(Self::PrimaryCore)
    }

    /// Destination of an untrusted frame at a router with these addresses on the link: each core
    /// forwards what it receives. A packet that could be forwarded never goes to several cores.
    pub(super) fn at_router(medium: Medium, frame: &'f [u8], own: &[IpAddr]) -> Self {
        let packet = match Self::ip_packet(medium, frame, Self::ThisCore) {
            Ok(packet) => packet,
            Err(destination) => return destination,
        };
        let Ok((header, payload)) = Ipv6Header::parse_quoted(packet) else {
            return Self::ThisCore;
        };
        let to = header.destination;
        let is_for_router =
            to.is_multicast() || to.is_unicast_link_local() || own.contains(&to.into());
        match payload.first() {
            Some(kind) if is_for_router && header.next_header == IpProtocol::ICMPV6 => {
                if ADVERTISEMENT_TYPES_V6.contains(kind) {
                    Self::AllCores
                } else if to.is_multicast() || *kind == NEIGHBOUR_SOLICITATION_V6 {
                    Self::PrimaryCore
                } else {
                    Self::ThisCore
                }
            }
            _ => Self::ThisCore,
        }
    }

    /// IP packet in a frame; for other frames the destination, `malformed` if there is no header.
    #[inline]
    fn ip_packet(medium: Medium, frame: &'f [u8], malformed: Self) -> Result<&'f [u8], Self> {
        match medium {
            Medium::Ip => Ok(frame),
            Medium::Ethernet => match EthernetHeader::parse(frame) {
                Ok((header, rest)) if header.ethertype == EtherType::ARP => Err(classify_arp(rest)),
                Ok((_, rest)) => Ok(rest),
                Err(_) => Err(malformed),
            },
        }
    }

    /// Flow of a frame that is not a later fragment.
    pub(super) fn flow(medium: Medium, frame: &'f [u8]) -> Option<Flow> {
        match Self::classify(medium, frame) {
            Self::Flow(headers) | Self::FirstFragment(_, headers) => headers.flow(),
            _ => None,
        }
    }
}

/// ARP replies go to all cores, requests to the primary core, which answers for the addresses.
fn classify_arp(packet: &[u8]) -> Destination<'_> {
    match ArpPacket::parse(packet) {
        Ok((arp, _)) if arp.operation == ArpOperation::Reply => Destination::AllCores,
        _ => Destination::PrimaryCore,
    }
}

fn classify_v4(packet: &[u8]) -> Option<Destination<'_>> {
    // A lenient parser: the stack checks the total length and the checksum.
    let (header, payload) = Ipv4Header::parse_quoted(packet).ok()?;
    if header.protocol == IpProtocol::ICMPV4 {
        return (!header.is_fragment()).then(|| classify_icmpv4(payload)).flatten();
    }
    let headers = || FlowHeaders::new(header.protocol, packet, payload, false);
    if !header.is_fragment() {
        return Some(Destination::Flow(headers()?));
    }
    let key = FragmentKey {
        source: header.source.into(),
        destination: header.destination.into(),
        protocol: Some(header.protocol),
        identification: header.identification.into(),
    };
    if !matches!(header.protocol, IpProtocol::TCP | IpProtocol::UDP) {
        return None;
    }
    Some(match header.fragment_offset_bytes {
        0 => Destination::FirstFragment(key, headers()?),
        _ => Destination::Fragment(key),
    })
}

fn classify_v6(packet: &[u8]) -> Option<Destination<'_>> {
    let (header, payload) = Ipv6Header::parse_quoted(packet).ok()?;
    let upper = upper_layer(header.next_header, payload).ok()?;
    if upper.protocol == IpProtocol::ICMPV6 {
        return upper.fragment.is_none().then(|| classify_icmpv6(upper.payload)).flatten();
    }
    let headers = || FlowHeaders::new(upper.protocol, packet, upper.payload, false);
    let Some(fragment) = upper.fragment else {
        return Some(Destination::Flow(headers()?));
    };
    let key = FragmentKey {
        source: header.source.into(),
        destination: header.destination.into(),
        protocol: None,
        identification: fragment.identification,
    };
    Some(match fragment.offset_bytes {
        0 => Destination::FirstFragment(key, headers()?),
        _ if !TRANSPORT_OR_EXTENSION_V6.contains(&upper.protocol) => return None,
        _ => Destination::Fragment(key),
    })
}

/// An ICMP error goes to the core that sent the quoted packet, by the quoted flow.
fn classify_icmpv4(message: &[u8]) -> Option<Destination<'_>> {
    let (Icmpv4Message::DestinationUnreachable { quote, .. }
    | Icmpv4Message::TimeExceeded { quote, .. }
    | Icmpv4Message::ParameterProblem { quote, .. }) = Icmpv4Message::parse(message).ok()?
    else {
        return None;
    };
    let (header, payload) = Ipv4Header::parse_quoted(quote).ok()?;
    if header.fragment_offset_bytes != 0 {
        return None;
    }
    Some(Destination::Flow(FlowHeaders::new(header.protocol, quote, payload, true)?))
}

fn classify_icmpv6(message: &[u8]) -> Option<Destination<'_>> {
    let kind = *message.first()?;
    if ADVERTISEMENT_TYPES_V6.contains(&kind) {
        return Some(Destination::AllCores);
    }
    if kind > MAX_ERROR_TYPE_V6 {
        return None;
    }
    let quote = message.get(ERROR_HEADER_BYTES_V6..)?;
    let (header, payload) = Ipv6Header::parse_quoted(quote).ok()?;
    let upper = upper_layer(header.next_header, payload).ok()?;
    if upper.fragment.is_some_and(|fragment| fragment.offset_bytes != 0) {
        return None;
    }
    Some(Destination::Flow(FlowHeaders::new(upper.protocol, quote, upper.payload, true)?))
}
