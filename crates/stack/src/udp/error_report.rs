//! Errors about sent datagrams, as a socket queues them for its application.

use std::net::{IpAddr, SocketAddr};

use tidegate_wire::UdpHeader;

use crate::icmp::{IcmpOrigin, QuotedPacket, ReceivedIcmpError};

/// Maximum number of reports that a socket queues; later ones are dropped.
pub(super) const MAX_REPORTS: usize = 16;

/// Longest payload that a report quotes, in bytes.
const MAX_QUOTED_BYTES: usize = 1500;

/// ICMP error about a datagram that a socket has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpErrorReport {
    /// Destination of the datagram.
    pub remote: SocketAddr,
    /// Host or router that reported the error.
    pub reporter: IpAddr,
    /// Type of the ICMP message; of ICMPv6 if the datagram was sent by IPv6.
    pub icmp_type: u8,
    /// Code of the ICMP message.
    pub icmp_code: u8,
    /// Longest packet that the next hop takes, in bytes; 0 where the error does not tell.
    pub mtu: u32,
    /// Beginning of the datagram's payload, as far as the ICMP message quotes it.
    pub payload: Box<[u8]>,
}

impl UdpErrorReport {
    /// Report of an error about the datagram with this header, to `remote`.
    pub(super) fn new(
        remote: SocketAddr,
        error: ReceivedIcmpError,
        quote: &QuotedPacket<'_>,
        header: &UdpHeader,
    ) -> Self {
        let IcmpOrigin { reporter, icmp_type, icmp_code } = quote.origin();
        let end = usize::from(header.length_bytes).min(quote.payload.len());
        let quoted = quote.payload.get(UdpHeader::BYTES..end).unwrap_or_default();
        let payload = quoted[..quoted.len().min(MAX_QUOTED_BYTES)].into();
        let mtu = match error {
            ReceivedIcmpError::TooBig(mtu) => u32::try_from(mtu).unwrap_or(u32::MAX),
            _ => 0,
        };
        Self { remote, reporter, icmp_type, icmp_code, mtu, payload }
    }
}
