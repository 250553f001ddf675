//! IPv6 extension headers (RFC 8200 section 4).
//!
//! [`ExtensionWalk`] parses the chain header by header and checks only its syntax.
//! [`upper_layer`] processes the chain as the receiving host: it applies the option actions,
//! rejects routing headers with segments left, and stops at a fragment. An invalid packet yields
//! the drop reason and the ICMP error to send.

use core::iter::FusedIterator;

use crate::field::{put_u16, put_u32, u16_at, u32_at};
use crate::icmpv6::parameter_problem;
use crate::{DropReason, Ipv6Header, Protocol};

/// Maximum number of extension headers in a packet. RFC 8504 section 5.3 permits such a limit;
/// legitimate packets have one or two extension headers.
pub const MAX_HEADERS: usize = 8;

/// Maximum number of options in one header, not counting padding (RFC 8504 section 5.3).
pub const MAX_OPTIONS: usize = 8;

/// Maximum length in bytes of consecutive padding: enough to align the following data to 8
/// bytes, as RFC 4942 section 2.1.9.5 recommends.
pub const MAX_PADDING_BYTES: usize = 7;

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

/// Option of a hop-by-hop or destination options header. Padding is never yielded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Option<'a> {
    /// Option type. Its two highest bits select the action of a host that does not know the option.
    pub kind: u8,
    /// Option data.
    pub data: &'a [u8],
    /// Offset of the option type from the start of the IPv6 header, in bytes.
    pub offset_bytes: usize,
}

impl Ipv6Option<'_> {
    /// Option type of the router alert (RFC 2711).
    pub const ROUTER_ALERT: u8 = 5;
    /// Option type of the jumbo payload length (RFC 2675).
    pub const JUMBO_PAYLOAD: u8 = 0xc2;

    /// Applies the action that the type of an unknown option selects (RFC 8200 section 4.2).
    fn apply_unknown_option_action(&self) -> Result<(), ExtensionError> {
        let reason = match self.kind {
            Self::JUMBO_PAYLOAD => DropReason::Ipv6Jumbogram,
            _ => DropReason::Ipv6OptionUnknown,
        };
        let mut error =
            ExtensionError::with_icmp_error(reason, parameter_problem::OPTION, self.offset_bytes);
        match self.kind >> 6 {
            0b00 => return Ok(()),
            0b01 => error.icmp_error = None,
            0b10 => {
                error.icmp_error = error
                    .icmp_error
                    .map(|problem| ParameterProblem { allowed_for_group: true, ..problem });
            }
            _ => {}
        }
        Err(error)
    }
}

/// Iterator over the options of a header.
///
/// Yields an error and ends when an option runs past the header
/// ([`DropReason::Ipv6ExtensionTruncated`]). The same holds for more than [`MAX_OPTIONS`]
/// options or more than [`MAX_PADDING_BYTES`] of consecutive padding
/// ([`DropReason::Ipv6ExtensionLimit`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Options<'a> {
    bytes: &'a [u8],
    offset_bytes: usize,
    option_count: usize,
}

impl<'a> Ipv6Options<'a> {
    const PAD_1: u8 = 0;
    const PAD_N: u8 = 1;

    /// Creates an iterator over the options in `bytes`, which begin `offset_bytes` after the start
    /// of the IPv6 header.
    pub fn new(bytes: &'a [u8], offset_bytes: usize) -> Self {
        Self { bytes, offset_bytes, option_count: 0 }
    }

    /// Skips the padding before the next option.
    fn skip_padding(&mut self) -> Result<(), DropReason> {
        let mut padding_bytes = 0;
        loop {
            let bytes = match *self.bytes {
                [Self::PAD_1, ..] => 1,
                [Self::PAD_N, length, ..] => 2 + usize::from(length),
                [Self::PAD_N] => return Err(DropReason::Ipv6ExtensionTruncated),
                _ => return Ok(()),
            };
            padding_bytes += bytes;
            if padding_bytes > MAX_PADDING_BYTES {
                return Err(DropReason::Ipv6ExtensionLimit);
            }
            self.bytes = self.bytes.get(bytes..).ok_or(DropReason::Ipv6ExtensionTruncated)?;
            self.offset_bytes += bytes;
        }
    }

    fn parse_next(&mut self) -> Result<Option<Ipv6Option<'a>>, DropReason> {
        self.skip_padding()?;
        let [kind, rest @ ..] = self.bytes else { return Ok(None) };
        self.option_count += 1;
        if self.option_count > MAX_OPTIONS {
            return Err(DropReason::Ipv6ExtensionLimit);
        }
        let (data, rest) = rest
            .split_first()
            .and_then(|(&length, rest)| rest.split_at_checked(length.into()))
            .ok_or(DropReason::Ipv6ExtensionTruncated)?;
        let option = Ipv6Option { kind: *kind, data, offset_bytes: self.offset_bytes };
        self.bytes = rest;
        self.offset_bytes += 2 + data.len();
        Ok(Some(option))
    }
}

impl<'a> Iterator for Ipv6Options<'a> {
    type Item = Result<Ipv6Option<'a>, DropReason>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.parse_next();
        if next.is_err() {
            self.bytes = &[];
        }
        next.transpose()
    }
}

impl FusedIterator for Ipv6Options<'_> {}

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

/// Processes the extension headers in `payload` as the packet's destination. `payload` follows
/// an IPv6 header whose Next Header field is `next_header`.
///
/// # Errors
/// An [`ExtensionError`] when the chain
/// * is malformed or exceeds a limit,
/// * has an unknown option that must not be skipped,
/// * has a routing header with segments left, or
/// * is incomplete in a first fragment (RFC 7112).
///
/// # Examples
/// ```
/// use tidegate_wire::{Protocol, upper_layer};
///
/// // Destination options with 4 bytes of padding data, then UDP.
/// let payload = [17, 0, 1, 4, 0, 0, 0, 0, 0xaa, 0xbb];
/// let upper = upper_layer(Protocol::DESTINATION_OPTIONS, &payload).unwrap();
/// assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[0xaa, 0xbb][..]));
/// ```
#[inline]
pub fn upper_layer(
    next_header: Protocol,
    payload: &[u8],
) -> Result<UpperLayer<'_>, ExtensionError> {
    let walk = ExtensionWalk::new(next_header, payload);
    if is_extension(next_header) { walk_as_destination(walk) } else { Ok(walk.remainder()) }
}

fn walk_as_destination(mut walk: ExtensionWalk<'_>) -> Result<UpperLayer<'_>, ExtensionError> {
    if walk.protocol == Protocol::HOP_BY_HOP && walk.rest.is_empty() {
        // A jumbogram begins with a payload length of zero (RFC 2675).
        return Err(ExtensionError::without_icmp_error(DropReason::Ipv6Jumbogram));
    }
    let mut router_alert = false;
    loop {
        let offset_bytes = walk.offset_bytes;
        let Some(extension) = walk.next() else { break };
        match extension? {
            Extension::HopByHop(options) => router_alert |= process_options(options)?,
            Extension::Destination(options) => {
                process_options(options)?;
            }
            Extension::Routing(RoutingHeader { segments_left: 0, .. }) => {}
            Extension::Routing(_) => {
                return Err(ExtensionError::with_icmp_error(
                    DropReason::Ipv6RoutingHeader,
                    parameter_problem::HEADER_FIELD,
                    offset_bytes + 2,
                ));
            }
            Extension::Fragment(fragment) if fragment.is_atomic() => {}
            Extension::Fragment(fragment) => {
                if fragment.offset_bytes == 0 {
                    check_header_chain_complete(walk)?;
                }
                let fragment = Some(fragment);
                return Ok(UpperLayer { fragment, router_alert, ..walk.remainder() });
            }
        }
    }
    Ok(UpperLayer { router_alert, ..walk.remainder() })
}

/// Applies the actions of the unknown options of a header. Returns true if the header has a
/// router alert.
fn process_options(options: Ipv6Options<'_>) -> Result<bool, ExtensionError> {
    let mut router_alert = false;
    for option in options {
        let option = option.map_err(ExtensionError::without_icmp_error)?;
        match option.kind {
            Ipv6Option::ROUTER_ALERT => router_alert = true,
            _ => option.apply_unknown_option_action()?,
        }
    }
    Ok(router_alert)
}

/// Checks that this first fragment contains the rest of the header chain and the upper-layer
/// header's first bytes (RFC 7112, RFC 8200 section 4.5).
fn check_header_chain_complete(mut walk: ExtensionWalk<'_>) -> Result<(), ExtensionError> {
    let incomplete = ExtensionError::with_icmp_error(
        DropReason::FragmentHeaderChain,
        parameter_problem::HEADER_CHAIN,
        0,
    );
    for extension in &mut walk {
        match extension {
            Err(error) if error.reason == DropReason::Ipv6ExtensionTruncated => {
                return Err(incomplete);
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        }
    }
    let needed_bytes = match walk.protocol {
        Protocol::TCP => 20,
        Protocol::UDP => 8,
        Protocol::ICMPV6 => 4,
        _ => 0,
    };
    if walk.rest.len() < needed_bytes { Err(incomplete) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use super::*;

    const HBH: u8 = 0;
    const UDP: u8 = 17;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const OPTIONS: u8 = 60;

    /// Walks `bytes`; `first` is the protocol of the first header.
    fn walk(first: u8, bytes: &[u8]) -> Result<UpperLayer<'_>, ExtensionError> {
        upper_layer(Protocol(first), bytes)
    }

    fn reason(first: u8, bytes: &[u8]) -> DropReason {
        walk(first, bytes).unwrap_err().reason
    }

    /// Returns an options header, padded to a multiple of 8 bytes, followed by 8 bytes of UDP.
    fn options(options: &[u8]) -> Vec<u8> {
        let bytes = (2 + options.len()).next_multiple_of(8);
        let mut header = vec![UDP, (bytes / 8 - 1) as u8];
        header.extend(options);
        match bytes - header.len() {
            0 => {}
            1 => header.push(0),
            n => {
                header.extend([1, n as u8 - 2]);
                header.resize(bytes, 0);
            }
        }
        header.extend([0xee; 8]);
        header
    }

    fn problem(code: u8, pointer: u32, allowed_for_group: bool) -> Option<ParameterProblem> {
        Some(ParameterProblem { code, pointer, allowed_for_group })
    }

    #[test]
    fn returns_payload_without_extension_headers() {
        let upper = walk(UDP, &[1, 2, 3]).unwrap();
        assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[1, 2, 3][..]));
        assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (40, 6));
        assert_eq!(walk(59, &[]).unwrap().protocol, Protocol::NO_NEXT_HEADER);
    }

    #[test]
    fn walks_complete_chain_and_reports_offsets() {
        let mut bytes = router_alert_header(Protocol(OPTIONS)).to_vec();
        bytes.extend([ROUTING, 1, 0x1e, 2, 0xaa, 0xbb, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([FRAGMENT, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([UDP, 0, 0, 0, 1, 2, 3, 4]);
        bytes.extend([0xee; 8]);
        // The padding is longer than alignment requires.
        assert_eq!(reason(HBH, &bytes), DropReason::Ipv6ExtensionLimit);
        bytes[14..16].copy_from_slice(&[0x1f, 6]);
        let upper = walk(HBH, &bytes).unwrap();
        assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[0xee; 8][..]));
        assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (80, 72));
        assert!(upper.router_alert);
        assert_eq!(upper.fragment, None, "an atomic fragment is a whole packet");
    }

    #[test]
    fn rejects_truncated_chain() {
        let mut bytes = options(&[5, 2, 0, 0, 0x1e, 3, 1, 2, 3]);
        bytes.truncate(16);
        for first in [HBH, OPTIONS] {
            for cut in 1..16 {
                assert_eq!(reason(first, &bytes[..cut]), DropReason::Ipv6ExtensionTruncated);
            }
        }
        for first in [ROUTING, FRAGMENT] {
            for cut in 0..8 {
                assert_eq!(reason(first, &[0; 8][..cut]), DropReason::Ipv6ExtensionTruncated);
            }
        }
    }

    #[test]
    fn rejects_length_past_packet_without_wrapping() {
        for first in [HBH, OPTIONS, ROUTING] {
            assert_eq!(
                reason(first, &[UDP, 255, 0, 0, 0, 0, 0, 0]),
                DropReason::Ipv6ExtensionTruncated
            );
        }
        // In a fragment header, the same byte is reserved.
        assert!(walk(FRAGMENT, &[UDP, 255, 0, 0, 0, 0, 0, 0]).is_ok());
    }

    #[test]
    fn rejects_hop_by_hop_header_not_first_or_repeated() {
        let twice = [HBH, 0, 1, 4, 0, 0, 0, 0, UDP, 0, 1, 4, 0, 0, 0, 0];
        let error = walk(HBH, &twice).unwrap_err();
        assert_eq!(error.reason, DropReason::Ipv6ExtensionOrder);
        assert_eq!(error.icmp_error, problem(parameter_problem::NEXT_HEADER, 40, false));
        assert_eq!(reason(OPTIONS, &twice), DropReason::Ipv6ExtensionOrder);
    }

    #[test]
    fn limits_number_of_extension_headers() {
        let chain = |headers: usize| {
            let mut bytes = [OPTIONS, 0, 1, 4, 0, 0, 0, 0].repeat(headers);
            bytes[8 * (headers - 1)] = UDP;
            bytes
        };
        assert!(walk(OPTIONS, &chain(MAX_HEADERS)).is_ok());
        assert_eq!(reason(OPTIONS, &chain(MAX_HEADERS + 1)), DropReason::Ipv6ExtensionLimit);
        assert_eq!(reason(OPTIONS, &chain(8000)), DropReason::Ipv6ExtensionLimit);
    }

    #[test]
    fn limits_options_and_padding() {
        let at_limit = [0x1e, 0].repeat(MAX_OPTIONS);
        assert!(walk(HBH, &options(&at_limit)).is_ok());
        assert_eq!(reason(HBH, &options(&[0x1e, 0].repeat(9))), DropReason::Ipv6ExtensionLimit);
        assert_eq!(reason(HBH, &options(&[0; 2046])), DropReason::Ipv6ExtensionLimit);
        assert_eq!(
            reason(OPTIONS, &options(&[1, 6, 0, 0, 0, 0, 0, 0])),
            DropReason::Ipv6ExtensionLimit
        );
    }

    #[test]
    fn rejects_option_past_its_header() {
        for bad in
            [[5, 200, 0, 0, 0, 0], [1, 5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0x1e], [0, 0, 0, 0, 0, 1]]
        {
            assert_eq!(reason(HBH, &options(&bad)), DropReason::Ipv6ExtensionTruncated, "{bad:?}");
        }
    }

    #[test]
    fn applies_four_actions_for_unknown_options() {
        use parameter_problem::OPTION;
        for first in [HBH, OPTIONS] {
            // The option follows a router alert, at offset 40 + 2 + 4.
            let with = |kind: u8| options(&[5, 2, 0, 0, kind, 1, 0xee]);
            assert!(walk(first, &with(0x1e)).is_ok());
            for (kind, icmp_error) in [
                (0x5e, None),
                (0x9e, problem(OPTION, 46, true)),
                (0xde, problem(OPTION, 46, false)),
            ] {
                let bytes = with(kind);
                let error = walk(first, &bytes).unwrap_err();
                assert_eq!(error.reason, DropReason::Ipv6OptionUnknown);
                assert_eq!(error.icmp_error, icmp_error, "{kind:#x}");
            }
        }
    }

    #[test]
    fn rejects_jumbograms() {
        assert_eq!(reason(HBH, &[]), DropReason::Ipv6Jumbogram);
        let error = walk(HBH, &[UDP, 0, 0xc2, 4, 0, 1, 0, 0]).unwrap_err();
        assert_eq!(error.reason, DropReason::Ipv6Jumbogram);
        assert_eq!(error.icmp_error, problem(parameter_problem::OPTION, 42, false));
    }

    #[test]
    fn rejects_routing_headers_with_segments_left() {
        for kind in [0, 2, 4, 253] {
            let mut bytes = vec![UDP, 2, kind, 1];
            bytes.resize(24, 0);
            let error = walk(ROUTING, &bytes).unwrap_err();
            assert_eq!(error.reason, DropReason::Ipv6RoutingHeader);
            assert_eq!(error.icmp_error, problem(parameter_problem::HEADER_FIELD, 42, false));
            bytes[3] = 0;
            assert_eq!(walk(ROUTING, &bytes).unwrap().protocol, Protocol::UDP);
        }
    }

    #[test]
    fn stops_at_fragment() {
        let header = FragmentHeader {
            offset_bytes: 1448,
            more_fragments: true,
            identification: 0xdead_beef,
        };
        let mut bytes = [0xee; 24];
        header.emit(Protocol(OPTIONS), &mut bytes).unwrap();
        let upper = walk(FRAGMENT, &bytes).unwrap();
        assert_eq!(upper.fragment, Some(header));
        // The content of a later fragment is data, whatever its protocol.
        assert_eq!((upper.protocol, upper.payload), (Protocol(OPTIONS), &[0xee; 16][..]));
        assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (48, 40));
        assert!(header.emit(Protocol::UDP, &mut bytes[..7]).is_none());
    }

    #[test]
    fn requires_complete_header_chain_in_first_fragment() {
        let first = |next: u8, rest: &[u8]| [&[next, 0, 0, 1, 0, 0, 0, 9], rest].concat();
        let incomplete = |next: u8, rest: &[u8]| {
            let bytes = first(next, rest);
            let error = walk(FRAGMENT, &bytes).unwrap_err();
            assert_eq!(error.icmp_error, problem(parameter_problem::HEADER_CHAIN, 0, false));
            error.reason == DropReason::FragmentHeaderChain
        };
        assert!(walk(FRAGMENT, &first(UDP, &[0; 8])).unwrap().fragment.is_some());
        assert!(incomplete(UDP, &[0; 7]));
        assert!(incomplete(6, &[0; 16]), "truncated TCP header");
        assert!(incomplete(58, &[]));
        assert!(incomplete(OPTIONS, &[UDP, 2, 1, 4, 0, 0, 0, 0]));
        assert!(incomplete(OPTIONS, &[UDP, 0, 1, 4, 0, 0, 0, 0]));
        assert!(walk(FRAGMENT, &first(253, &[])).is_ok());
        assert_eq!(reason(FRAGMENT, &first(HBH, &[0; 8])), DropReason::Ipv6ExtensionOrder);
    }

    #[test]
    fn rejects_nested_fragment_headers() {
        for field in [0, 1] {
            let bytes = [
                FRAGMENT, 0, 0, field, 0, 0, 0, 1, UDP, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0,
            ];
            assert_eq!(reason(FRAGMENT, &bytes), DropReason::FragmentInvalid);
        }
    }
}
