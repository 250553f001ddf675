//! Whose a frame is, as far as its headers tell.

use std::net::{IpAddr, SocketAddr};

use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, Icmpv4Message, Ipv4Header, Ipv6Header,
    Medium, Protocol as IpProtocol, upper_layer,
};

use super::LocalPort;
use super::flow::Flow;
use crate::steering::Protocol;

/// The part of a larger packet that a frame carries: all parts are alike in this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FragmentKey {
    /// The addresses, folded: whoever collides goes the same way.
    addresses: u64,
    identification: u32,
}

impl FragmentKey {
    /// Its place in a table of `places`, which is a power of two.
    pub(super) fn place(self, places: usize) -> usize {
        let mixed = (self.addresses ^ u64::from(self.identification)).wrapping_mul(MIXER);
        (mixed >> 32) as usize & (places - 1)
    }
}

/// Who should see a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination<'f> {
    /// Whoever has the port, or if several have it, the flow.
    Port(Ends<'f>),
    /// As before, and all other parts of the packet go there too.
    FirstFragment(FragmentKey, Ends<'f>),
    /// Whoever got the first part.
    Fragment(FragmentKey),
    /// Every core: all of them need to know.
    Everybody,
    /// The core with the card.
    Home,
}

/// Where the two ends of a flow stand in a frame: most frames are only asked for the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends<'f> {
    protocol: Protocol,
    /// From its IP header on.
    packet: &'f [u8],
    /// The source's and the destination's, which stand at the same place in UDP and TCP.
    ports: &'f [u8; 4],
    /// It was sent, and an error quotes it.
    is_sent: bool,
}

impl<'f> Ends<'f> {
    /// Those of a packet whose transport header begins with `ports`.
    fn new(
        protocol: IpProtocol,
        packet: &'f [u8],
        transport: &'f [u8],
        is_sent: bool,
    ) -> Option<Self> {
        let protocol = match protocol {
            IpProtocol::TCP => Protocol::Tcp,
            IpProtocol::UDP => Protocol::Udp,
            _ => return None,
        };
        Some(Self { protocol, packet, ports: transport.first_chunk()?, is_sent })
    }

    /// Our port.
    pub(super) fn local_port(&self) -> LocalPort {
        let [a, b, c, d] = *self.ports;
        let port = if self.is_sent { [a, b] } else { [c, d] };
        (self.protocol, u16::from_be_bytes(port))
    }

    /// Both ends.
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
            if self.is_sent { (source, destination) } else { (destination, source) };
        Some(Flow::new(self.protocol, local, remote))
    }
}

/// Spreads what differs over all bits: the golden ratio.
const MIXER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Types of ICMPv6 messages that all must hear: a router's and a neighbour's
/// advertisements, and redirects (RFC 4861 section 4).
const ADVERTISEMENTS: [u8; 3] = [134, 136, 137];

/// The highest type of an ICMPv6 error (RFC 4443 section 2.1).
const LAST_ERROR_V6: u8 = 127;

/// Bytes of an ICMPv6 error in front of the packet that it quotes.
const ERROR_BYTES_V6: usize = 8;

impl<'f> Destination<'f> {
    /// Reads a frame, which may hold anything. What is none of all this is the
    /// business of the core with the card.
    pub(super) fn of(medium: Medium, frame: &'f [u8]) -> Self {
        let packet = match medium {
            Medium::Ip => frame,
            Medium::Ethernet => match EthernetHeader::parse(frame) {
                Ok((header, rest)) if header.ethertype == EtherType::ARP => return of_arp(rest),
                Ok((_, rest)) => rest,
                Err(_) => return Self::Home,
            },
        };
        let read = match packet.first().map(|first| first >> 4) {
            Some(4) => of_v4(packet),
            Some(6) => of_v6(packet),
            _ => None,
        };
        read.unwrap_or(Self::Home)
    }

    /// The flow that a frame is of, which is no later part of a packet.
    pub(super) fn flow(medium: Medium, frame: &'f [u8]) -> Option<Flow> {
        match Self::of(medium, frame) {
            Self::Port(ends) | Self::FirstFragment(_, ends) => ends.flow(),
            _ => None,
        }
    }
}

/// An answer is for whoever asked, a question for who answers for the addresses.
fn of_arp(packet: &[u8]) -> Destination<'_> {
    match ArpPacket::parse(packet) {
        Ok((arp, _)) if arp.operation == ArpOperation::Reply => Destination::Everybody,
        _ => Destination::Home,
    }
}

fn of_v4(packet: &[u8]) -> Option<Destination<'_>> {
    // The stack checks what is checked here no more.
    let (header, payload) = Ipv4Header::parse_quoted(packet).ok()?;
    if header.protocol == IpProtocol::ICMPV4 {
        return (!header.is_fragment()).then(|| of_icmpv4(payload)).flatten();
    }
    let ends = || Ends::new(header.protocol, packet, payload, false);
    if !header.is_fragment() {
        return Some(Destination::Port(ends()?));
    }
    let addresses = u64::from(u32::from(header.source)) << 32
        | u64::from(u32::from(header.destination)) ^ u64::from(header.protocol.0);
    let key = FragmentKey { addresses, identification: header.identification.into() };
    Some(match header.fragment_offset_bytes {
        0 => Destination::FirstFragment(key, ends()?),
        _ => Destination::Fragment(key),
    })
}

fn of_v6(packet: &[u8]) -> Option<Destination<'_>> {
    let (header, payload) = Ipv6Header::parse_quoted(packet).ok()?;
    let upper = upper_layer(header.next_header, payload).ok()?;
    if upper.protocol == IpProtocol::ICMPV6 {
        return upper.fragment.is_none().then(|| of_icmpv6(upper.payload)).flatten();
    }
    let ends = || Ends::new(upper.protocol, packet, upper.payload, false);
    let Some(fragment) = upper.fragment else {
        return Some(Destination::Port(ends()?));
    };
    let fold = |address: u128| (address >> 64) as u64 ^ address as u64;
    let (source, destination) = (fold(header.source.into()), fold(header.destination.into()));
    let key = FragmentKey {
        addresses: source.rotate_left(32) ^ destination,
        identification: fragment.identification,
    };
    Some(match fragment.offset_bytes {
        0 => Destination::FirstFragment(key, ends()?),
        _ => Destination::Fragment(key),
    })
}

/// An error goes to whoever sent the packet that it quotes, by the ends that it went
/// from and to.
fn of_icmpv4(message: &[u8]) -> Option<Destination<'_>> {
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
    Some(Destination::Port(Ends::new(header.protocol, quote, payload, true)?))
}

fn of_icmpv6(message: &[u8]) -> Option<Destination<'_>> {
    let kind = *message.first()?;
    if ADVERTISEMENTS.contains(&kind) {
        return Some(Destination::Everybody);
    }
    if kind > LAST_ERROR_V6 {
        return None;
    }
    let quote = message.get(ERROR_BYTES_V6..)?;
    let (header, payload) = Ipv6Header::parse_quoted(quote).ok()?;
    let upper = upper_layer(header.next_header, payload).ok()?;
    if upper.fragment.is_some_and(|fragment| fragment.offset_bytes != 0) {
        return None;
    }
    Some(Destination::Port(Ends::new(upper.protocol, quote, upper.payload, true)?))
}
