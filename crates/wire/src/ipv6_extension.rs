//! The extension headers of IPv6 (RFC 8200 section 4).
//!
//! [`ExtensionWalk`] reads the chain header by header and checks only its
//! form. [`upper_layer`] does what a receiving host does with the chain: it
//! obeys the options, refuses source routes, stops at a fragment, and says
//! which ICMP error an offending packet deserves.

use core::iter::FusedIterator;

use crate::field::{put_u16, put_u32, u16_at, u32_at};
use crate::icmpv6::parameter_problem;
use crate::{DropReason, Ipv6Header, Protocol};

/// The most extension headers that a packet may have. RFC 8504 section 5.3
/// lets a host set such limits; an honest packet has one or two.
pub const MAX_HEADERS: usize = 8;

/// The most options, padding not counted, that one header may have (RFC 8504
/// section 5.3).
pub const MAX_OPTIONS: usize = 8;

/// The most bytes of padding in one place: enough to align what follows to 8
/// bytes, as RFC 4942 section 2.1.9.5 advises.
pub const MAX_PADDING_BYTES: usize = 7;

/// A packet whose extension headers are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtensionFault {
    /// Why.
    pub reason: DropReason,
    /// The ICMP error to send, if any.
    pub answer: Option<ParameterProblem>,
}

/// A Parameter Problem to send about a packet (RFC 4443 section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterProblem {
    /// What is wrong: see [`parameter_problem`].
    pub code: u8,
    /// The place of the wrong byte, from the start of the IPv6 header.
    pub pointer: u32,
    /// Whether to send it even when the packet was for a group.
    pub even_for_group: bool,
}

impl ExtensionFault {
    const fn silent(reason: DropReason) -> Self {
        Self { reason, answer: None }
    }

    const fn answered(reason: DropReason, code: u8, offset_bytes: usize) -> Self {
        let pointer = offset_bytes as u32;
        Self { reason, answer: Some(ParameterProblem { code, pointer, even_for_group: false }) }
    }
}

/// One extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension<'a> {
    /// Options for every router on the way.
    HopByHop(Ipv6Options<'a>),
    /// Options for the destination.
    Destination(Ipv6Options<'a>),
    /// Routers to pass on the way.
    Routing(RoutingHeader<'a>),
    /// The packet is a fragment.
    Fragment(FragmentHeader),
}

/// A routing header (RFC 8200 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingHeader<'a> {
    /// The type; 0 is the one that RFC 5095 forbids.
    pub kind: u8,
    /// How many routers are still to pass.
    pub segments_left: u8,
    /// The rest of the header.
    pub data: &'a [u8],
}

/// A fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Where the data belongs in the whole packet; a multiple of 8.
    pub offset_bytes: u16,
    /// Whether this is not the last fragment.
    pub more_fragments: bool,
    /// The same in all fragments of a packet.
    pub identification: u32,
}

impl FragmentHeader {
    /// The length of the header.
    pub const BYTES: usize = 8;

    /// Whether the fragment is the whole packet (RFC 6946).
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

    /// Writes the header, with data of protocol `next_header` behind it, to the
    /// front of `buf` and returns what is behind it; `None`, with nothing
    /// written, when it does not fit.
    #[must_use = "None says that nothing was written"]
    pub fn emit<'b>(&self, next_header: Protocol, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (head, rest) = buf.split_first_chunk_mut::<8>()?;
        (head[0], head[1]) = (next_header.0, 0);
        put_u16(head, 2, self.offset_bytes & !7 | u16::from(self.more_fragments));
        put_u32(head, 4, self.identification);
        Some(rest)
    }
}

/// A hop-by-hop header with a router alert for multicast listener discovery
/// (RFC 2711, RFC 3810 section 5), before a payload of protocol `next_header`.
pub const fn router_alert_header(next_header: Protocol) -> [u8; 8] {
    // Type 5 of length 2 with value 0, then two bytes of padding.
    [next_header.0, 0, 5, 2, 0, 0, 1, 0]
}

/// One option of a hop-by-hop or destination options header. Padding is never
/// yielded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Option<'a> {
    /// The type. Its two high bits say what to do with the packet when it is
    /// unknown.
    pub kind: u8,
    /// The option's data.
    pub data: &'a [u8],
    /// The place of the type, from the start of the IPv6 header.
    pub offset_bytes: usize,
}

impl Ipv6Option<'_> {
    /// The type of the router alert (RFC 2711).
    pub const ROUTER_ALERT: u8 = 5;
    /// The type of the jumbo payload length (RFC 2675).
    pub const JUMBO_PAYLOAD: u8 = 0xc2;

    /// What a host does that does not know the option (RFC 8200 section 4.2).
    fn obey_unknown(&self) -> Result<(), ExtensionFault> {
        let reason = match self.kind {
            Self::JUMBO_PAYLOAD => DropReason::Ipv6Jumbogram,
            _ => DropReason::Ipv6OptionUnknown,
        };
        let mut fault =
            ExtensionFault::answered(reason, parameter_problem::OPTION, self.offset_bytes);
        match self.kind >> 6 {
            0b00 => return Ok(()),
            0b01 => fault.answer = None,
            0b10 => {
                fault.answer =
                    fault.answer.map(|it| ParameterProblem { even_for_group: true, ..it });
            }
            _ => {}
        }
        Err(fault)
    }
}

/// The options of a header, one by one.
///
/// Yields an error and ends when an option runs past the header
/// ([`DropReason::Ipv6ExtensionTruncated`]), or when there are more than
/// [`MAX_OPTIONS`] or more padding than [`MAX_PADDING_BYTES`]
/// ([`DropReason::Ipv6ExtensionLimit`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Options<'a> {
    bytes: &'a [u8],
    offset_bytes: usize,
    seen: usize,
}

impl<'a> Ipv6Options<'a> {
    const PAD_1: u8 = 0;
    const PAD_N: u8 = 1;

    /// The options in `bytes`, which stand at `offset_bytes` from the start of
    /// the IPv6 header.
    pub fn new(bytes: &'a [u8], offset_bytes: usize) -> Self {
        Self { bytes, offset_bytes, seen: 0 }
    }

    /// Skips the padding at the front.
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
        self.seen += 1;
        if self.seen > MAX_OPTIONS {
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

/// The extension headers of a packet, one by one, and what comes after them.
///
/// Yields an error and ends when a header runs past the packet, when a
/// hop-by-hop header is not the first or a fragment header not the only one, and
/// when there are more than [`MAX_HEADERS`]. Otherwise the walk ends at the
/// first protocol that is none of the four extension headers; behind a fragment
/// header it goes on inside the fragment, which makes sense for a first fragment
/// only.
#[derive(Clone, Copy, Debug)]
pub struct ExtensionWalk<'a> {
    /// The protocol of what follows.
    next: Protocol,
    /// What follows.
    rest: &'a [u8],
    /// The place of `rest` from the start of the IPv6 header.
    offset_bytes: usize,
    /// The place of the field that holds `next`.
    field_offset_bytes: usize,
    headers: usize,
    fragment_seen: bool,
}

impl<'a> ExtensionWalk<'a> {
    /// A walk through `payload`, which follows an IPv6 header that names
    /// `next_header`.
    #[inline]
    pub fn new(next_header: Protocol, payload: &'a [u8]) -> Self {
        Self {
            next: next_header,
            rest: payload,
            offset_bytes: Ipv6Header::BYTES,
            field_offset_bytes: Ipv6Header::NEXT_HEADER_OFFSET_BYTES,
            headers: 0,
            fragment_seen: false,
        }
    }

    /// What stands behind the headers walked so far.
    #[inline]
    pub fn remainder(&self) -> UpperLayer<'a> {
        UpperLayer {
            protocol: self.next,
            payload: self.rest,
            offset_bytes: self.offset_bytes,
            next_header_offset_bytes: self.field_offset_bytes,
            fragment: None,
            router_alert: false,
        }
    }

    /// Whether one more header of this protocol may stand here.
    fn admit(&mut self, protocol: Protocol) -> Result<(), ExtensionFault> {
        if protocol == Protocol::HOP_BY_HOP && self.headers > 0 {
            return Err(ExtensionFault::answered(
                DropReason::Ipv6ExtensionOrder,
                parameter_problem::NEXT_HEADER,
                self.field_offset_bytes,
            ));
        }
        if protocol == Protocol::FRAGMENT && self.fragment_seen {
            return Err(ExtensionFault::silent(DropReason::FragmentInvalid));
        }
        self.headers += 1;
        if self.headers > MAX_HEADERS {
            return Err(ExtensionFault::silent(DropReason::Ipv6ExtensionLimit));
        }
        Ok(())
    }

    fn parse_next(&mut self) -> Result<Option<Extension<'a>>, ExtensionFault> {
        let protocol = self.next;
        if !is_extension(protocol) {
            return Ok(None);
        }
        self.admit(protocol)?;
        let truncated = ExtensionFault::silent(DropReason::Ipv6ExtensionTruncated);
        let start = self.rest.first_chunk::<8>().ok_or(truncated)?;
        // A fragment header has one length; the byte is reserved there.
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
        self.next = Protocol(start[0]);
        self.field_offset_bytes = self.offset_bytes;
        self.offset_bytes += header.len();
        self.rest = rest;
        Ok(Some(extension))
    }
}

impl<'a> Iterator for ExtensionWalk<'a> {
    type Item = Result<Extension<'a>, ExtensionFault>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.parse_next();
        if next.is_err() {
            (self.next, self.rest) = (Protocol::NO_NEXT_HEADER, &[]);
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

/// What an IPv6 packet carries behind its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperLayer<'a> {
    /// The protocol; for a fragment that of the fragmented part, which counts
    /// only in the first fragment and may be an extension header.
    pub protocol: Protocol,
    /// The protocol's bytes, or the fragment's.
    pub payload: &'a [u8],
    /// The place of `payload` from the start of the IPv6 header.
    pub offset_bytes: usize,
    /// The place of the field that holds `protocol`: what a Parameter Problem
    /// about an unknown protocol points to.
    pub next_header_offset_bytes: usize,
    /// Which part of a larger packet the payload is; `None` for a whole packet,
    /// an atomic fragment among them.
    pub fragment: Option<FragmentHeader>,
    /// Whether routers were asked to look at the packet.
    pub router_alert: bool,
}

/// Walks the extension headers in `payload`, which follows an IPv6 header that
/// names `next_header`, as the destination of the packet.
///
/// # Errors
/// When the chain is malformed, longer than the limits, has an option that is
/// unknown and may not be skipped, has a routing header with segments left, or
/// is not whole in a first fragment (RFC 7112).
#[inline]
pub fn upper_layer(
    next_header: Protocol,
    payload: &[u8],
) -> Result<UpperLayer<'_>, ExtensionFault> {
    let walk = ExtensionWalk::new(next_header, payload);
    if is_extension(next_header) { walk_as_host(walk) } else { Ok(walk.remainder()) }
}

fn walk_as_host(mut walk: ExtensionWalk<'_>) -> Result<UpperLayer<'_>, ExtensionFault> {
    if walk.next == Protocol::HOP_BY_HOP && walk.rest.is_empty() {
        // A payload length of zero is how a jumbogram begins (RFC 2675).
        return Err(ExtensionFault::silent(DropReason::Ipv6Jumbogram));
    }
    let mut router_alert = false;
    loop {
        let offset_bytes = walk.offset_bytes;
        let Some(extension) = walk.next() else { break };
        match extension? {
            Extension::HopByHop(options) => router_alert |= obey(options)?,
            Extension::Destination(options) => {
                obey(options)?;
            }
            Extension::Routing(RoutingHeader { segments_left: 0, .. }) => {}
            Extension::Routing(_) => {
                return Err(ExtensionFault::answered(
                    DropReason::Ipv6RoutingHeader,
                    parameter_problem::HEADER_FIELD,
                    offset_bytes + 2,
                ));
            }
            Extension::Fragment(fragment) if fragment.is_atomic() => {}
            Extension::Fragment(fragment) => {
                if fragment.offset_bytes == 0 {
                    check_chain_is_whole(walk)?;
                }
                let fragment = Some(fragment);
                return Ok(UpperLayer { fragment, router_alert, ..walk.remainder() });
            }
        }
    }
    Ok(UpperLayer { router_alert, ..walk.remainder() })
}

/// Reads the options of a header and does what the unknown ones ask for.
/// Returns whether there was a router alert.
fn obey(options: Ipv6Options<'_>) -> Result<bool, ExtensionFault> {
    let mut router_alert = false;
    for option in options {
        let option = option.map_err(ExtensionFault::silent)?;
        match option.kind {
            Ipv6Option::ROUTER_ALERT => router_alert = true,
            _ => option.obey_unknown()?,
        }
    }
    Ok(router_alert)
}

/// Checks that the rest of the chain, with the first bytes of the protocol
/// behind it, stands in this first fragment (RFC 7112, RFC 8200 section 4.5).
fn check_chain_is_whole(mut walk: ExtensionWalk<'_>) -> Result<(), ExtensionFault> {
    let incomplete = ExtensionFault::answered(
        DropReason::FragmentHeaderChain,
        parameter_problem::HEADER_CHAIN,
        0,
    );
    for extension in &mut walk {
        match extension {
            Err(fault) if fault.reason == DropReason::Ipv6ExtensionTruncated => {
                return Err(incomplete);
            }
            Err(fault) => return Err(fault),
            Ok(_) => {}
        }
    }
    let needed_bytes = match walk.next {
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

    /// Walks these bytes, `first` being the protocol of the first header.
    fn walk(first: u8, bytes: &[u8]) -> Result<UpperLayer<'_>, ExtensionFault> {
        upper_layer(Protocol(first), bytes)
    }

    fn reason(first: u8, bytes: &[u8]) -> DropReason {
        walk(first, bytes).unwrap_err().reason
    }

    /// A header of one kind of options, padded to 8 bytes, then UDP.
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

    fn problem(code: u8, pointer: u32, even_for_group: bool) -> Option<ParameterProblem> {
        Some(ParameterProblem { code, pointer, even_for_group })
    }

    #[test]
    fn no_extension_header_is_no_walk() {
        let upper = walk(UDP, &[1, 2, 3]).unwrap();
        assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[1, 2, 3][..]));
        assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (40, 6));
        assert_eq!(walk(59, &[]).unwrap().protocol, Protocol::NO_NEXT_HEADER);
    }

    #[test]
    fn a_whole_chain_is_walked_and_its_places_told() {
        let mut bytes = router_alert_header(Protocol(OPTIONS)).to_vec();
        bytes.extend([ROUTING, 1, 0x1e, 2, 0xaa, 0xbb, 1, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([FRAGMENT, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([UDP, 0, 0, 0, 1, 2, 3, 4]);
        bytes.extend([0xee; 8]);
        // The padding is longer than alignment needs.
        assert_eq!(reason(HBH, &bytes), DropReason::Ipv6ExtensionLimit);
        bytes[14..16].copy_from_slice(&[0x1f, 6]);
        let upper = walk(HBH, &bytes).unwrap();
        assert_eq!((upper.protocol, upper.payload), (Protocol::UDP, &[0xee; 8][..]));
        assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (80, 72));
        assert!(upper.router_alert);
        assert_eq!(upper.fragment, None, "an atomic fragment is a whole packet");
    }

    #[test]
    fn every_cut_of_a_chain_is_refused() {
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
    fn a_length_past_the_packet_does_not_wrap() {
        for first in [HBH, OPTIONS, ROUTING] {
            assert_eq!(
                reason(first, &[UDP, 255, 0, 0, 0, 0, 0, 0]),
                DropReason::Ipv6ExtensionTruncated
            );
        }
        // The same byte is reserved in a fragment header.
        assert!(walk(FRAGMENT, &[UDP, 255, 0, 0, 0, 0, 0, 0]).is_ok());
    }

    #[test]
    fn hop_by_hop_stands_first_and_once() {
        let twice = [HBH, 0, 1, 4, 0, 0, 0, 0, UDP, 0, 1, 4, 0, 0, 0, 0];
        let fault = walk(HBH, &twice).unwrap_err();
        assert_eq!(fault.reason, DropReason::Ipv6ExtensionOrder);
        assert_eq!(fault.answer, problem(parameter_problem::NEXT_HEADER, 40, false));
        assert_eq!(reason(OPTIONS, &twice), DropReason::Ipv6ExtensionOrder);
    }

    #[test]
    fn thousands_of_headers_end_at_the_limit() {
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
    fn options_and_padding_have_limits() {
        let honest = [0x1e, 0].repeat(MAX_OPTIONS);
        assert!(walk(HBH, &options(&honest)).is_ok());
        assert_eq!(reason(HBH, &options(&[0x1e, 0].repeat(9))), DropReason::Ipv6ExtensionLimit);
        assert_eq!(reason(HBH, &options(&[0; 2046])), DropReason::Ipv6ExtensionLimit);
        assert_eq!(
            reason(OPTIONS, &options(&[1, 6, 0, 0, 0, 0, 0, 0])),
            DropReason::Ipv6ExtensionLimit
        );
    }

    #[test]
    fn an_option_past_its_header_is_refused() {
        for bad in
            [[5, 200, 0, 0, 0, 0], [1, 5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0x1e], [0, 0, 0, 0, 0, 1]]
        {
            assert_eq!(reason(HBH, &options(&bad)), DropReason::Ipv6ExtensionTruncated, "{bad:?}");
        }
    }

    #[test]
    fn the_four_actions_for_unknown_options() {
        use parameter_problem::OPTION;
        for first in [HBH, OPTIONS] {
            // The option stands behind a router alert, at 40 + 2 + 4.
            let with = |kind: u8| options(&[5, 2, 0, 0, kind, 1, 0xee]);
            assert!(walk(first, &with(0x1e)).is_ok());
            for (kind, answer) in [
                (0x5e, None),
                (0x9e, problem(OPTION, 46, true)),
                (0xde, problem(OPTION, 46, false)),
            ] {
                let bytes = with(kind);
                let fault = walk(first, &bytes).unwrap_err();
                assert_eq!(fault.reason, DropReason::Ipv6OptionUnknown);
                assert_eq!(fault.answer, answer, "{kind:#x}");
            }
        }
    }

    #[test]
    fn jumbograms_are_refused() {
        assert_eq!(reason(HBH, &[]), DropReason::Ipv6Jumbogram);
        let fault = walk(HBH, &[UDP, 0, 0xc2, 4, 0, 1, 0, 0]).unwrap_err();
        assert_eq!(fault.reason, DropReason::Ipv6Jumbogram);
        assert_eq!(fault.answer, problem(parameter_problem::OPTION, 42, false));
    }

    #[test]
    fn routing_headers_with_segments_left_are_refused() {
        for kind in [0, 2, 4, 253] {
            let mut bytes = vec![UDP, 2, kind, 1];
            bytes.resize(24, 0);
            let fault = walk(ROUTING, &bytes).unwrap_err();
            assert_eq!(fault.reason, DropReason::Ipv6RoutingHeader);
            assert_eq!(fault.answer, problem(parameter_problem::HEADER_FIELD, 42, false));
            bytes[3] = 0;
            assert_eq!(walk(ROUTING, &bytes).unwrap().protocol, Protocol::UDP);
        }
    }

    #[test]
    fn a_fragment_ends_the_walk() {
        let header = FragmentHeader {
            offset_bytes: 1448,
            more_fragments: true,
            identification: 0xdead_beef,
        };
        let mut bytes = [0xee; 24];
        header.emit(Protocol(OPTIONS), &mut bytes).unwrap();
        let upper = walk(FRAGMENT, &bytes).unwrap();
        assert_eq!(upper.fragment, Some(header));
        // What stands in a later fragment is data, whatever its protocol.
        assert_eq!((upper.protocol, upper.payload), (Protocol(OPTIONS), &[0xee; 16][..]));
        assert_eq!((upper.offset_bytes, upper.next_header_offset_bytes), (48, 40));
        assert!(header.emit(Protocol::UDP, &mut bytes[..7]).is_none());
    }

    #[test]
    fn a_first_fragment_holds_the_whole_chain() {
        let first = |next: u8, rest: &[u8]| [&[next, 0, 0, 1, 0, 0, 0, 9], rest].concat();
        let incomplete = |next: u8, rest: &[u8]| {
            let bytes = first(next, rest);
            let fault = walk(FRAGMENT, &bytes).unwrap_err();
            assert_eq!(fault.answer, problem(parameter_problem::HEADER_CHAIN, 0, false));
            fault.reason == DropReason::FragmentHeaderChain
        };
        assert!(walk(FRAGMENT, &first(UDP, &[0; 8])).unwrap().fragment.is_some());
        assert!(incomplete(UDP, &[0; 7]));
        assert!(incomplete(6, &[0; 16]), "half a TCP header");
        assert!(incomplete(58, &[]));
        assert!(incomplete(OPTIONS, &[UDP, 2, 1, 4, 0, 0, 0, 0]));
        assert!(incomplete(OPTIONS, &[UDP, 0, 1, 4, 0, 0, 0, 0]));
        assert!(walk(FRAGMENT, &first(253, &[])).is_ok());
        assert_eq!(reason(FRAGMENT, &first(HBH, &[0; 8])), DropReason::Ipv6ExtensionOrder);
    }

    #[test]
    fn a_fragment_of_a_fragment_is_refused() {
        for field in [0, 1] {
            let bytes = [
                FRAGMENT, 0, 0, field, 0, 0, 0, 1, UDP, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0,
            ];
            assert_eq!(reason(FRAGMENT, &bytes), DropReason::FragmentInvalid);
        }
    }
}
