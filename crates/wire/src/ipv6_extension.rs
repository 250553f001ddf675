//! IPv6 extension headers (RFC 8200 section 4).
//!
//! [`ExtensionWalk`] parses the chain header by header and checks only its syntax.
//! [`upper_layer`] processes the chain as the receiving host: it applies the option actions,
//! rejects routing headers with segments left, and stops at a fragment. An invalid packet yields
//! the drop reason and the ICMP error to send.

mod destination;
mod options;

use core::iter::FusedIterator;

pub use self::destination::upper_layer;
pub use self::options::{Ipv6Option, Ipv6Options, MAX_OPTIONS, MAX_PADDING_BYTES};
use crate::field::{put_u16, put_u32, u16_at, u32_at};
use crate::icmpv6::parameter_problem;
use crate::{DropReason, Ipv6Header, Protocol};

/// Maximum number of extension headers in a packet. RFC 8504 section 5.3 permits such a limit;
/// legitimate packets have one or two extension headers.
pub const MAX_HEADERS: usize = 8;

/// Rejection of a packet because of its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtensionError {
    /// Reason under which the packet is dropped.
    pub reason: DropReason,
    /// ICMP error to send, if any.
    pub icmp_error: Option<ParameterProblem>,
}

/// Contents of an ICMPv6 Parameter Problem to send (RFC 4443 section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterProblem {
    /// Cause: see [`parameter_problem`].
    pub code: u8,
    /// Offset of the invalid byte from the start of the IPv6 header.
    pub pointer: u32,
    /// True if the error is sent even when the packet's destination is a multicast group.
    pub allowed_for_group: bool,
}

impl ExtensionError {
    const fn without_icmp_error(reason: DropReason) -> Self {
        Self { reason, icmp_error: None }
    }

    const fn with_icmp_error(reason: DropReason, code: u8, offset_bytes: usize) -> Self {
        let pointer = offset_bytes as u32;
        Self {
            reason,
            icmp_error: Some(ParameterProblem { code, pointer, allowed_for_group: false }),
        }
    }
}

/// Extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension<'a> {
    /// Options for every router on the path.
    HopByHop(Ipv6Options<'a>),
    /// Options for the destination.
    Destination(Ipv6Options<'a>),
    /// Routers to visit.
    Routing(RoutingHeader<'a>),
    /// Fragment header: the packet is a fragment.
    Fragment(FragmentHeader),
}

/// Routing header (RFC 8200 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingHeader<'a> {
    /// Routing type; RFC 5095 deprecates type 0.
    pub kind: u8,
    /// Number of listed routers still to be visited.
    pub segments_left: u8,
    /// Bytes after the first four bytes of the header.
    pub data: &'a [u8],
}

/// Fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Offset of the data in the fragmentable part of the packet, in bytes; a multiple of 8.
    pub offset_bytes: u16,
    /// Set in every fragment but the last.
    pub more_fragments: bool,
    /// Identification: equal in all fragments of a packet.
    pub identification: u32,
}

impl FragmentHeader {
    /// Length of the header in bytes.
    pub const BYTES: usize = 8;

    /// Returns true for an atomic fragment, which is a whole packet (RFC 6946).
    #[inline]
    pub const fn is_atomic(&self) -> bool {
        self.offset_bytes == 0 && !self.more_fragments
    }

    fn parse(head: &[u8; 8]) -> Self {
        let field = u16_at(head, 2);
        Self {
            offset_bytes: field & !7,
            more_fragments: field & 1 != 0,
            identification: u32_at(head, 4),
        }
    }

    /// Writes the header, followed by data of protocol `next_header`, to the front of `buf` and
    /// returns the rest of `buf`; `None`, with nothing written, when the header does not fit.
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, next_header: Protocol, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (head, rest) = buf.split_first_chunk_mut::<8>()?;
        (head[0], head[1]) = (next_header.0, 0);
        put_u16(head, 2, self.offset_bytes & !7 | u16::from(self.more_fragments));
        put_u32(head, 4, self.identification);
        Some(rest)
    }
}

/// Returns a hop-by-hop header with a router alert for multicast listener discovery (RFC 2711,
/// RFC 3810 section 5), followed by a payload of protocol `next_header`.
pub const fn router_alert_header(next_header: Protocol) -> [u8; 8] {
    // Option type 5, length 2, value 0 (MLD), then two bytes of padding (PadN).
    [next_header.0, 0, 5, 2, 0, 0, 1, 0]
}

/// Iterator over the extension headers of a packet.
///
/// Yields an error and ends when:
/// * a header runs past the packet,
/// * a hop-by-hop header is not the first header,
/// * a second fragment header follows, or
/// * there are more than [`MAX_HEADERS`] headers.
///
/// Otherwise the walk ends at the first protocol that is none of the four extension headers.
/// After a fragment header the walk continues inside the fragment, which is meaningful only for
/// a first fragment. [`ExtensionWalk::remainder`] returns the data after the headers.
#[derive(Clone, Copy, Debug)]
pub struct ExtensionWalk<'a> {
    /// Protocol of `rest`.
    protocol: Protocol,
    /// Bytes not walked yet.
    rest: &'a [u8],
    /// Offset of `rest` from the start of the IPv6 header.
    offset_bytes: usize,
    /// Offset of the Next Header field that contains `protocol`.
    next_header_offset_bytes: usize,
    header_count: usize,
    fragment_seen: bool,
}

impl<'a> ExtensionWalk<'a> {
    /// Creates a walk through `payload`, which follows an IPv6 header whose Next Header field is
    /// `next_header`.
    #[inline]
    pub fn new(next_header: Protocol, payload: &'a [u8]) -> Self {
        Self {
            protocol: next_header,
            rest: payload,
            offset_bytes: Ipv6Header::BYTES,
            next_header_offset_bytes: Ipv6Header::NEXT_HEADER_OFFSET_BYTES,
            header_count: 0,
            fragment_seen: false,
        }
    }

    /// Returns the data after the headers walked so far.
    #[inline]
    pub fn remainder(&self) -> UpperLayer<'a> {
        UpperLayer {
            protocol: self.protocol,
            payload: self.rest,
            offset_bytes: self.offset_bytes,
            next_header_offset_bytes: self.next_header_offset_bytes,
            fragment: None,
            router_alert: false,
        }
    }

    /// Checks that another header of `protocol` is allowed at this position, and counts it.
    fn check_order_and_count(&mut self, protocol: Protocol) -> Result<(), ExtensionError> {
        if protocol == Protocol::HOP_BY_HOP && self.header_count > 0 {
            return Err(ExtensionError::with_icmp_error(
                DropReason::Ipv6ExtensionOrder,
                parameter_problem::NEXT_HEADER,
                self.next_header_offset_bytes,
            ));
        }
        if protocol == Protocol::FRAGMENT && self.fragment_seen {
            return Err(ExtensionError::without_icmp_error(DropReason::FragmentInvalid));
        }
        self.header_count += 1;
        if self.header_count > MAX_HEADERS {
            return Err(ExtensionError::without_icmp_error(DropReason::Ipv6ExtensionLimit));
        }
        Ok(())
    }

    fn parse_next(&mut self) -> Result<Option<Extension<'a>>, ExtensionError> {
        let protocol = self.protocol;
        if !is_extension(protocol) {
            return Ok(None);
        }
        self.check_order_and_count(protocol)?;
        let truncated = ExtensionError::without_icmp_error(DropReason::Ipv6ExtensionTruncated);
        let start = self.rest.first_chunk::<8>().ok_or(truncated)?;
        // A fragment header has a fixed length; its second byte is reserved.
        let units = if protocol == Protocol::FRAGMENT { 0 } else { usize::from(start[1]) };
        let (header, rest) = self.rest.split_at_checked(8 * (units + 1)).ok_or(truncated)?;
        let (body, body_offset_bytes) = (header.get(2..).unwrap_or(&[]), self.offset_bytes + 2);
        let extension = match protocol {
            Protocol::HOP_BY_HOP => Extension::HopByHop(Ipv6Options::new(body, body_offset_bytes)),
            Protocol::ROUTING => Extension::Routing(RoutingHeader {
                kind: start[2],
                segments_left: start[3],
                data: header.get(4..).unwrap_or(&[]),
            }),
            Protocol::FRAGMENT => {
                self.fragment_seen = true;
                Extension::Fragment(FragmentHeader::parse(start))
            }
            _ => Extension::Destination(Ipv6Options::new(body, body_offset_bytes)),
        };
        self.protocol = Protocol(start[0]);
        self.next_header_offset_bytes = self.offset_bytes;
        self.offset_bytes += header.len();
        self.rest = rest;
        Ok(Some(extension))
    }
}

impl<'a> Iterator for ExtensionWalk<'a> {
    type Item = Result<Extension<'a>, ExtensionError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.parse_next();
        if next.is_err() {
            (self.protocol, self.rest) = (Protocol::NO_NEXT_HEADER, &[]);
        }
        next.transpose()
    }
}

impl FusedIterator for ExtensionWalk<'_> {}

#[inline]
const fn is_extension(protocol: Protocol) -> bool {
    matches!(
        protocol,
        Protocol::HOP_BY_HOP
            | Protocol::ROUTING
            | Protocol::FRAGMENT
            | Protocol::DESTINATION_OPTIONS
    )
}

/// Upper-layer data of an IPv6 packet: the data after its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperLayer<'a> {
    /// Protocol of the payload. For a fragment, this is the protocol of the fragmented part: it may
    /// be an extension header, and it is meaningful only in the first fragment.
    pub protocol: Protocol,
    /// Upper-layer header and data, or the data of the fragment.
    pub payload: &'a [u8],
    /// Offset of `payload` from the start of the IPv6 header, in bytes.
    pub offset_bytes: usize,
    /// Offset in bytes of the Next Header field that contains `protocol`. A Parameter Problem about
    /// an unknown protocol points to this field.
    pub next_header_offset_bytes: usize,
    /// Fragment header, if the payload is a part of a larger packet; `None` for a whole packet,
    /// including an atomic fragment.
    pub fragment: Option<FragmentHeader>,
    /// True if the packet has a router alert option.
    pub router_alert: bool,
}

#[cfg(test)]
mod tests;
