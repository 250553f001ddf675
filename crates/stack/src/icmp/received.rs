//! Received ICMP errors: reports about packets that this host sent, which they quote.

use std::net::IpAddr;

use tidegate_wire::ipv6_extension::{Extension, ExtensionWalk};
use tidegate_wire::{DropReason, Ipv4Header, Ipv6Header, Protocol};

use crate::ip::version::is_ipv4;

/// ICMP error received about a packet that this host sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceivedIcmpError {
    /// No socket listens on the port.
    PortUnreachable,
    /// The host does not support the protocol.
    ProtocolUnreachable,
    /// A source route failed.
    SourceRouteFailed,
    /// A router knows no such host.
    HostUnknown,
    /// A router does not forward for this host (RFC 1122 section 3.2.2.1).
    SourceHostIsolated,
    /// The host cannot be reached.
    HostUnreachable,
    /// A router dropped the packet because its hop limit ran out, or the host because fragments
    /// were missing. Both may pass.
    TimeExceeded,
    /// The network cannot be reached.
    NetworkUnreachable,
    /// A router's policy forbids to reach the host: waiting does not help.
    HostProhibited,
    /// A router's policy forbids to reach the network.
    NetworkProhibited,
    /// The packet exceeds the next hop's MTU: this many bytes, or 0 when not reported.
    TooBig(usize),
}

/// Sender, type and code of an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IcmpOrigin {
    pub(crate) reporter: IpAddr,
    pub(crate) icmp_type: u8,
    pub(crate) icmp_code: u8,
}

/// Packet quoted by an ICMP error: addresses, protocol, packet length, and the bytes behind the IP
/// headers.
pub(crate) struct QuotedPacket<'a> {
    /// Origin of the error; `None` if this host found it.
    origin: Option<IcmpOrigin>,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) packet_bytes: usize,
    pub(crate) payload: &'a [u8],
}

impl<'a> QuotedPacket<'a> {
    /// The packet with the sender of the error and its message.
    pub(crate) fn with_origin(self, reporter: impl Into<IpAddr>, message: &[u8]) -> Self {
        let origin = match *message {
            [icmp_type, icmp_code, ..] => {
                Some(IcmpOrigin { reporter: reporter.into(), icmp_type, icmp_code })
            }
            _ => None,
        };
        Self { origin, ..self }
    }

    /// Origin of the error. A neighbour that does not answer counts as an unreachable host, which this
    /// host reports to itself.
    pub(crate) fn origin(&self) -> IcmpOrigin {
        let (icmp_type, icmp_code) = if self.source.is_ipv4() { (3, 1) } else { (1, 3) };
        self.origin.unwrap_or(IcmpOrigin { reporter: self.source, icmp_type, icmp_code })
    }

    /// Parses the beginning of an IP packet of either family.
    pub(crate) fn parse(quote: &'a [u8]) -> Result<Self, DropReason> {
        if is_ipv4(quote) { Self::parse_v4(quote) } else { Self::parse_v6(quote) }
    }

    /// Parses an IPv4 packet quoted by an ICMP error.
    pub(crate) fn parse_v4(quote: &'a [u8]) -> Result<Self, DropReason> {
        let (header, payload) =
            Ipv4Header::parse_quoted(quote).map_err(|_| DropReason::IcmpQuote)?;
        if header.fragment_offset_bytes != 0 {
            return Err(DropReason::IcmpQuote);
        }
        Ok(Self {
            origin: None,
            source: IpAddr::V4(header.source),
            destination: IpAddr::V4(header.destination),
            protocol: header.protocol,
            packet_bytes: header.total_bytes.into(),
            payload,
        })
    }

    /// Parses an IPv6 packet quoted by an ICMP error.
    pub(crate) fn parse_v6(quote: &'a [u8]) -> Result<Self, DropReason> {
        let (header, payload) =
            Ipv6Header::parse_quoted(quote).map_err(|_| DropReason::IcmpQuote)?;
        let mut walk = ExtensionWalk::new(header.next_header, payload);
        for extension in &mut walk {
            match extension.map_err(|_| DropReason::IcmpQuote)? {
                Extension::Fragment(fragment) if fragment.offset_bytes != 0 => {
                    return Err(DropReason::IcmpQuote);
                }
                _ => {}
            }
        }
        let rest = walk.remainder();
        Ok(Self {
            origin: None,
            source: IpAddr::V6(header.source),
            destination: IpAddr::V6(header.destination),
            protocol: rest.protocol,
            packet_bytes: Ipv6Header::BYTES + usize::from(header.payload_bytes),
            payload: rest.payload,
        })
    }
}
