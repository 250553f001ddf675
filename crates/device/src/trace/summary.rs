//! One-line summary of a frame.

use std::fmt;
use std::net::IpAddr;

use tidegate_wire::{
    ArpOperation, ArpPacket, DropReason, EtherType, EthernetHeader, Icmpv4Message, Icmpv6Message,
    Ipv4Header, Ipv6Header, Medium, NdpMessage, NeighbourAdvertisement, Protocol, TcpFlags,
    TcpHeader, UdpHeader, upper_layer,
};

/// A frame, displayed in one line: protocol, source and destination.
///
/// Frames that the parsers reject are shown with the reason.
#[derive(Clone, Copy, Debug)]
pub struct Summary<'a> {
    medium: Medium,
    bytes: &'a [u8],
}

impl<'a> Summary<'a> {
    /// A summary of a whole frame.
    pub fn new(medium: Medium, bytes: &'a [u8]) -> Self {
        Self { medium, bytes }
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.medium {
            Medium::Ethernet => ethernet(f, self.bytes),
            Medium::Ip => match self.bytes.first().map(|byte| byte >> 4) {
                Some(4) => ipv4(f, self.bytes),
                Some(6) => ipv6(f, self.bytes),
                _ => f.write_str("not an IP packet"),
            },
        }
    }
}

fn refused(f: &mut fmt::Formatter<'_>, reason: DropReason) -> fmt::Result {
    write!(f, "refused: {reason}")
}

fn ethernet(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    let (header, payload) = match EthernetHeader::parse(bytes) {
        Ok(parsed) => parsed,
        Err(reason) => return refused(f, reason),
    };
    write!(f, "{} > {} ", header.source, header.destination)?;
    if let Some(tag) = header.vlan {
        write!(f, "vlan {} ", tag.id())?;
    }
    match header.ethertype {
        EtherType::ARP => arp(f, payload),
        EtherType::IPV4 => ipv4(f, payload),
        EtherType::IPV6 => ipv6(f, payload),
        EtherType(other) => write!(f, "ethertype 0x{other:04x}"),
    }
}

fn arp(f: &mut fmt::Formatter<'_>, payload: &[u8]) -> fmt::Result {
    match ArpPacket::parse(payload) {
        Ok((arp, _)) => match arp.operation {
            ArpOperation::Request => {
                write!(f, "ARP who has {} tell {}", arp.target_ip, arp.sender_ip)
            }
            ArpOperation::Reply => write!(f, "ARP {} is at {}", arp.sender_ip, arp.sender_mac),
        },
        Err(reason) => refused(f, reason),
    }
}

fn ipv4(f: &mut fmt::Formatter<'_>, packet: &[u8]) -> fmt::Result {
    let (header, payload) = match Ipv4Header::parse(packet) {
        Ok(parsed) => parsed,
        Err(reason) => return refused(f, reason),
    };
    let addresses = (IpAddr::V4(header.source), IpAddr::V4(header.destination));
    if header.fragment_offset_bytes > 0 {
        let (from, to) = addresses;
        let at = header.fragment_offset_bytes;
        return write!(f, "{from} > {to} fragment {:#06x} at {at}", header.identification);
    }
    match header.protocol {
        Protocol::ICMPV4 => {
            write!(f, "{} > {} ICMP ", addresses.0, addresses.1)?;
            match Icmpv4Message::parse(payload) {
                Ok(message) => icmpv4(f, message),
                Err(reason) => refused(f, reason),
            }
        }
        protocol => transport(f, addresses, protocol, payload, header.more_fragments),
    }
}

fn ipv6(f: &mut fmt::Formatter<'_>, packet: &[u8]) -> fmt::Result {
    let (header, payload) = match Ipv6Header::parse(packet) {
        Ok(parsed) => parsed,
        Err(reason) => return refused(f, reason),
    };
    let addresses = (IpAddr::V6(header.source), IpAddr::V6(header.destination));
    let upper = match upper_layer(header.next_header, payload) {
        Ok(upper) => upper,
        Err(fault) => return refused(f, fault.reason),
    };
    let more = upper.fragment.is_some_and(|fragment| fragment.more_fragments);
    match upper.fragment {
        Some(fragment) if fragment.offset_bytes > 0 => {
            let (from, to) = addresses;
            let at = fragment.offset_bytes;
            write!(f, "{from} > {to} fragment {:#010x} at {at}", fragment.identification)
        }
        _ if upper.protocol == Protocol::ICMPV6 => {
            write!(f, "{} > {} ICMPv6 ", addresses.0, addresses.1)?;
            match Icmpv6Message::parse(&header, upper.payload) {
                Ok(message) => icmpv6(f, message),
                Err(reason) => refused(f, reason),
            }
        }
        _ => transport(f, addresses, upper.protocol, upper.payload, more),
    }
}

fn transport(
    f: &mut fmt::Formatter<'_>,
    (from, to): (IpAddr, IpAddr),
    protocol: Protocol,
    payload: &[u8],
    is_first_fragment: bool,
) -> fmt::Result {
    match protocol {
        // The lengths in the header are of the whole datagram; only a part is here.
        _ if is_first_fragment => {
            write!(f, "{from} > {to} first fragment of protocol {}", protocol.0)
        }
        Protocol::UDP => match UdpHeader::parse(payload) {
            Ok((udp, data)) => {
                let (source, destination) = (udp.source_port, udp.destination_port);
                write!(f, "{from} {source} > {to} {destination} UDP {}", data.len())
            }
            Err(reason) => refused(f, reason),
        },
        Protocol::TCP => match TcpHeader::parse(payload) {
            Ok((tcp, data)) => {
                write!(f, "{from} {} > {to} {} TCP", tcp.source_port, tcp.destination_port)?;
                flags(f, tcp.flags)?;
                write!(f, " seq {} ack {} {}", tcp.sequence, tcp.acknowledgement, data.len())
            }
            Err(reason) => refused(f, reason),
        },
        Protocol(other) => write!(f, "{from} > {to} protocol {other}"),
    }
}

fn flags(f: &mut fmt::Formatter<'_>, set: TcpFlags) -> fmt::Result {
    let names = [
        (TcpFlags::SYN, " SYN"),
        (TcpFlags::FIN, " FIN"),
        (TcpFlags::RST, " RST"),
        (TcpFlags::PSH, " PSH"),
        (TcpFlags::ACK, " ACK"),
    ];
    names.iter().filter(|(flag, _)| set.contains(*flag)).try_for_each(|(_, name)| f.write_str(name))
}

fn icmpv4(f: &mut fmt::Formatter<'_>, message: Icmpv4Message<'_>) -> fmt::Result {
    match message {
        Icmpv4Message::EchoRequest { identifier, sequence, .. } => {
            write!(f, "echo request {identifier} {sequence}")
        }
        Icmpv4Message::EchoReply { identifier, sequence, .. } => {
            write!(f, "echo reply {identifier} {sequence}")
        }
        Icmpv4Message::DestinationUnreachable { code, .. } => write!(f, "unreachable code {code}"),
        Icmpv4Message::TimeExceeded { code, .. } => write!(f, "time exceeded code {code}"),
        Icmpv4Message::ParameterProblem { pointer, .. } => {
            write!(f, "parameter problem at {pointer}")
        }
        Icmpv4Message::Other { kind, code, .. } => write!(f, "type {kind} code {code}"),
    }
}

fn icmpv6(f: &mut fmt::Formatter<'_>, message: Icmpv6Message<'_>) -> fmt::Result {
    match message {
        Icmpv6Message::EchoRequest { identifier, sequence, .. } => {
            write!(f, "echo request {identifier} {sequence}")
        }
        Icmpv6Message::EchoReply { identifier, sequence, .. } => {
            write!(f, "echo reply {identifier} {sequence}")
        }
        Icmpv6Message::DestinationUnreachable { code, .. } => write!(f, "unreachable code {code}"),
        Icmpv6Message::PacketTooBig { mtu, .. } => write!(f, "too big, MTU {mtu}"),
        Icmpv6Message::TimeExceeded { code, .. } => write!(f, "time exceeded code {code}"),
        Icmpv6Message::ParameterProblem { pointer, .. } => {
            write!(f, "parameter problem at {pointer}")
        }
        Icmpv6Message::Ndp(message) => ndp(f, message),
        Icmpv6Message::Mld(_) => f.write_str("listener discovery"),
        Icmpv6Message::Other { kind, code, .. } => write!(f, "type {kind} code {code}"),
    }
}

fn ndp(f: &mut fmt::Formatter<'_>, message: NdpMessage<'_>) -> fmt::Result {
    match message {
        NdpMessage::NeighbourSolicitation { target, .. } => write!(f, "who has {target}"),
        NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
            target,
            target_mac: Some(mac),
            ..
        }) => write!(f, "{target} is at {mac}"),
        NdpMessage::NeighbourAdvertisement(advertisement) => {
            write!(f, "{} is here", advertisement.target)
        }
        NdpMessage::RouterSolicitation { .. } => f.write_str("router solicitation"),
        NdpMessage::RouterAdvertisement(_) => f.write_str("router advertisement"),
        NdpMessage::Redirect { target, destination, .. } => {
            write!(f, "redirect {destination} to {target}")
        }
    }
}
