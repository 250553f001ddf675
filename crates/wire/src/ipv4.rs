//! Internet Protocol version 4 (RFC 791) and its options.

use core::net::Ipv4Addr;

use crate::checksum::Sum;
use crate::field::{ipv4_at, put, put_u16, u16_at};
use crate::{DropReason, Protocol};

/// IPv4 header without the bytes of its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Header {
    /// Source address.
    pub source: Ipv4Addr,
    /// Destination address.
    pub destination: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: Protocol,
    /// Time to live: each router on the path decrements it.
    pub ttl: u8,
    /// Differentiated services code point (6 bits) and congestion notification (2 bits), formerly
    /// the type of service (RFC 2474, RFC 3168).
    pub dscp_ecn: u8,
    /// Identification: equal in all fragments of a packet.
    pub identification: u16,
    /// Forbids routers to fragment the packet.
    pub dont_fragment: bool,
    /// Set in every fragment but the last.
    pub more_fragments: bool,
    /// Offset of the payload in the unfragmented packet, in bytes; a multiple of 8.
    pub fragment_offset_bytes: u16,
    /// Length of the header with its options, in bytes: 20 to 60, a multiple of 4.
    pub header_bytes: u8,
    /// Length of header and payload, in bytes.
    pub total_bytes: u16,
}

impl Ipv4Header {
    /// Length in bytes of a header without options.
    pub const BYTES: usize = 20;

    /// Creates a header for `payload_bytes` of payload: no options, TTL 64, don't-fragment set.
    /// `None` when the packet would be longer than 65,535 bytes.
    #[inline]
    pub fn new(
        source: Ipv4Addr,
        destination: Ipv4Addr,
        protocol: Protocol,
        payload_bytes: usize,
    ) -> Option<Self> {
        Some(Self {
            source,
            destination,
            protocol,
            ttl: 64,
            dscp_ecn: 0,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset_bytes: 0,
            header_bytes: Self::BYTES as u8,
            total_bytes: u16::try_from(payload_bytes.checked_add(Self::BYTES)?).ok()?,
        })
    }

    /// Parses a header and verifies its lengths and its checksum. Returns the header and the
    /// payload, cut to the total length; [`Ipv4Header::options`] returns the options.
    ///
    /// # Errors
    /// [`DropReason::Ipv4Truncated`], [`DropReason::Ipv4Version`],
    /// [`DropReason::Ipv4HeaderLength`], [`DropReason::Ipv4TotalLength`] or
    /// [`DropReason::Ipv4Checksum`].
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let header = Self::parse_fields(bytes)?;
        let header_bytes = usize::from(header.header_bytes);
        let head = bytes.get(..header_bytes).ok_or(DropReason::Ipv4HeaderLength)?;
        let payload = bytes
            .get(header_bytes..usize::from(header.total_bytes))
            .ok_or(DropReason::Ipv4TotalLength)?;
        // Nearly every header has no options; the constant length makes the sum fast.
        let sum = match <&[u8; Self::BYTES]>::try_from(head) {
            Ok(head) => Sum::of(head),
            Err(_) => Sum::of(head),
        };
        if sum.is_valid() { Ok((header, payload)) } else { Err(DropReason::Ipv4Checksum) }
    }

    /// Parses the header of a packet quoted by an ICMP error.
    ///
    /// The payload may be truncated, and a router on the path may have changed the checksum or the
    /// total length.
    ///
    /// # Errors
    /// As [`Ipv4Header::parse`], except for the total length and the checksum.
    pub fn parse_quoted(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let header = Self::parse_fields(bytes)?;
        let payload =
            bytes.get(usize::from(header.header_bytes)..).ok_or(DropReason::Ipv4HeaderLength)?;
        let payload_bytes =
            usize::from(header.total_bytes).saturating_sub(header.header_bytes.into());
        Ok((header, payload.get(..payload_bytes).unwrap_or(payload)))
    }

    #[inline(always)]
    fn parse_fields(bytes: &[u8]) -> Result<Self, DropReason> {
        let head = bytes.first_chunk::<20>().ok_or(DropReason::Ipv4Truncated)?;
        if head[0] >> 4 != 4 {
            return Err(DropReason::Ipv4Version);
        }
        let header_bytes = (head[0] & 0x0f) * 4;
        if usize::from(header_bytes) < Self::BYTES {
            return Err(DropReason::Ipv4HeaderLength);
        }
        let fragment = u16_at(head, 6);
        Ok(Self {
            source: ipv4_at(head, 12),
            destination: ipv4_at(head, 16),
            protocol: Protocol(head[9]),
            ttl: head[8],
            dscp_ecn: head[1],
            identification: u16_at(head, 4),
            dont_fragment: fragment & 0x4000 != 0,
            more_fragments: fragment & 0x2000 != 0,
            fragment_offset_bytes: fragment << 3,
            header_bytes,
            total_bytes: u16_at(head, 2),
        })
    }

    /// Returns true if the packet is a fragment of a larger packet.
    #[inline]
    pub const fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset_bytes != 0
    }

    /// Returns the length of the payload in bytes.
    #[inline]
    pub const fn payload_bytes(&self) -> usize {
        self.total_bytes.saturating_sub(self.header_bytes as u16) as usize
    }

    /// Returns the options of this header, which was parsed from `packet`.
    #[inline]
    pub fn options<'a>(&self, packet: &'a [u8]) -> Ipv4Options<'a> {
        Ipv4Options::new(packet.get(Self::BYTES..self.header_bytes.into()).unwrap_or(&[]))
    }

    /// Writes the header with its checksum to the front of `buf` and returns the rest of `buf`.
    ///
    /// If `header_bytes` is over 20, the options must already be in `buf`: they are included in
    /// the checksum and not changed.
    ///
    /// Returns `None`, with nothing written, when the header does not fit or `header_bytes` is not
    /// a valid header length.
    #[inline]
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let header_bytes = usize::from(self.header_bytes);
        if !header_bytes.is_multiple_of(4) || header_bytes > 60 {
            return None;
        }
        let (header, rest) = buf.split_at_mut_checked(header_bytes)?;
        let (head, options) = header.split_first_chunk_mut::<20>()?;
        head[0] = 0x40 | (self.header_bytes / 4);
        head[1] = self.dscp_ecn;
        put_u16(head, 2, self.total_bytes);
        put_u16(head, 4, self.identification);
        let flags = u16::from(self.dont_fragment) << 14 | u16::from(self.more_fragments) << 13;
        put_u16(head, 6, flags | self.fragment_offset_bytes >> 3);
        (head[8], head[9]) = (self.ttl, self.protocol.0);
        put_u16(head, 10, 0);
        put(head, 12, &self.source.octets());
        put(head, 16, &self.destination.octets());
        let sum = Sum::of(head);
        let sum = if options.is_empty() { sum } else { sum.with(options) };
        put_u16(head, 10, sum.checksum());
        Some(rest)
    }
}

/// Option of an IPv4 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv4Option<'a> {
    /// Record route: routers write their addresses from `pointer` on (RFC 791).
    RecordRoute(Ipv4Route<'a>),
    /// Loose source route: routers to visit, with others allowed in between (RFC 791).
    LooseSourceRoute(Ipv4Route<'a>),
    /// Strict source route: routers to visit, with no others in between (RFC 791).
    StrictSourceRoute(Ipv4Route<'a>),
    /// Router alert: requests routers to examine a packet that is not addressed to them (RFC 2113);
    /// the value is 0.
    RouterAlert(u16),
    /// Any other option: its type and the bytes after its length field.
    Other(u8, &'a [u8]),
}

/// Body of the route options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Route<'a> {
    /// Position of the next address, counted from 1 at the option's type; at least 4. Past the
    /// option's end when the route is full.
    pub pointer: u8,
    /// Route addresses, four bytes each.
    pub addresses: &'a [[u8; 4]],
}

/// Iterator over the options of an IPv4 header.
///
/// Yields [`DropReason::Ipv4Options`] and ends at the first option with an invalid length: under
/// 2, past the header, or not the length that its type requires.
#[derive(Clone, Copy, Debug)]
pub struct Ipv4Options<'a> {
    bytes: &'a [u8],
}

impl<'a> Ipv4Options<'a> {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const RECORD_ROUTE: u8 = 7;
    const LOOSE_SOURCE_ROUTE: u8 = 131;
    const STRICT_SOURCE_ROUTE: u8 = 137;
    const ROUTER_ALERT: u8 = 148;

    /// Creates an iterator over the options in `bytes`, which follow the fixed header.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Validates every option.
    ///
    /// # Errors
    /// [`DropReason::Ipv4Options`] for a malformed option, [`DropReason::Ipv4SourceRoute`] for a
    /// source route, complete or not (RFC 7126 sections 4.3 and 4.4).
    #[inline]
    pub fn check(self) -> Result<(), DropReason> {
        if self.bytes.is_empty() { Ok(()) } else { self.check_each() }
    }

    fn check_each(mut self) -> Result<(), DropReason> {
        self.try_for_each(|option| match option? {
            Ipv4Option::LooseSourceRoute(_) | Ipv4Option::StrictSourceRoute(_) => {
                Err(DropReason::Ipv4SourceRoute)
            }
            _ => Ok(()),
        })
    }

    /// Parses the first option, which must not be a one-byte option (end of list, no operation).
    fn parse_first(bytes: &'a [u8]) -> Option<(Ipv4Option<'a>, &'a [u8])> {
        let &[kind, length, ..] = bytes else { return None };
        let (option, rest) = bytes.split_at_checked(length.into())?;
        let body = option.get(2..)?;
        let option = match kind {
            Self::RECORD_ROUTE => Ipv4Option::RecordRoute(Ipv4Route::parse(body)?),
            Self::LOOSE_SOURCE_ROUTE => Ipv4Option::LooseSourceRoute(Ipv4Route::parse(body)?),
            Self::STRICT_SOURCE_ROUTE => Ipv4Option::StrictSourceRoute(Ipv4Route::parse(body)?),
            Self::ROUTER_ALERT => {
                Ipv4Option::RouterAlert(u16::from_be_bytes(body.try_into().ok()?))
            }
            _ => Ipv4Option::Other(kind, body),
        };
        Some((option, rest))
    }
}

impl<'a> Ipv4Route<'a> {
    /// Parses the pointer and the addresses, which follow the option's length field.
    fn parse(body: &'a [u8]) -> Option<Self> {
        let (&pointer, route) = body.split_first()?;
        let (addresses, rest) = route.as_chunks::<4>();
        // RFC 791: the smallest legal pointer is 4, and the pointer advances by 4. A pointer just
        // past the end means a full route; a larger pointer is invalid.
        let slot = pointer.checked_sub(4)?;
        let legal = slot.is_multiple_of(4) && usize::from(slot) <= route.len();
        (rest.is_empty() && legal).then_some(Self { pointer, addresses })
    }
}

impl<'a> Iterator for Ipv4Options<'a> {
    type Item = Result<Ipv4Option<'a>, DropReason>;

    fn next(&mut self) -> Option<Self::Item> {
        while let [Self::NO_OPERATION, rest @ ..] = self.bytes {
            self.bytes = rest;
        }
        if matches!(self.bytes, [] | [Self::END, ..]) {
            self.bytes = &[];
            return None;
        }
        let parsed = Self::parse_first(self.bytes);
        self.bytes = parsed.map_or(&[], |(_, rest)| rest);
        Some(parsed.map(|(option, _)| option).ok_or(DropReason::Ipv4Options))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use super::*;

    const HEADER: Ipv4Header = Ipv4Header {
        source: Ipv4Addr::new(192, 0, 2, 1),
        destination: Ipv4Addr::new(192, 0, 2, 2),
        protocol: Protocol::UDP,
        ttl: 63,
        dscp_ecn: 0x2e,
        identification: 0xbeef,
        dont_fragment: false,
        more_fragments: true,
        fragment_offset_bytes: 1480,
        header_bytes: 20,
        total_bytes: 24,
    };

    /// Returns a packet with these option bytes, valid or not, and 4 bytes of payload.
    fn with_options(options: &[u8]) -> Vec<u8> {
        let header_bytes = 20 + options.len();
        let mut packet = vec![0xee; header_bytes + 4];
        packet[20..header_bytes].copy_from_slice(options);
        let header = Ipv4Header {
            header_bytes: header_bytes as u8,
            total_bytes: packet.len() as u16,
            ..HEADER
        };
        assert_eq!(header.emit(&mut packet).unwrap().len(), 4);
        packet
    }

    /// Returns a packet with the byte at offset `at` set to `value` and the checksum recomputed.
    fn with_byte(at: usize, value: u8) -> Vec<u8> {
        let mut packet = with_options(&[]);
        packet[at] = value;
        packet[10..12].fill(0);
        let checksum = Sum::of(&packet[..20]).checksum();
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
        packet
    }

    fn check(options: &[u8]) -> Result<(), DropReason> {
        let packet = with_options(options);
        let (header, _) = Ipv4Header::parse(&packet).unwrap();
        header.options(&packet).check()
    }

    #[test]
    fn round_trips_and_strips_padding() {
        let mut packet = with_options(&[]);
        packet.extend([0; 22]);
        assert_eq!(Ipv4Header::parse(&packet), Ok((HEADER, &[0xee; 4][..])));
    }

    #[test]
    fn rejects_invalid_lengths_with_specific_reason() {
        for cut in 0..20 {
            assert_eq!(
                Ipv4Header::parse(&with_options(&[])[..cut]),
                Err(DropReason::Ipv4Truncated)
            );
        }
        for (at, value, reason) in [
            (0, 0x65, DropReason::Ipv4Version),
            (0, 0x44, DropReason::Ipv4HeaderLength),
            (0, 0x40, DropReason::Ipv4HeaderLength),
            (0, 0x4f, DropReason::Ipv4HeaderLength), // 60 bytes, past the packet
            (0, 0x46, DropReason::Ipv4Checksum),     // payload read as options
            (3, 25, DropReason::Ipv4TotalLength),    // past the packet
            (3, 19, DropReason::Ipv4TotalLength),    // shorter than the header
            (2, 0xff, DropReason::Ipv4TotalLength),
            (3, 0, DropReason::Ipv4TotalLength),
        ] {
            let packet = with_byte(at, value);
            assert_eq!(Ipv4Header::parse(&packet), Err(reason), "byte {at} = {value:#x}");
        }
    }

    #[test]
    fn detects_every_bit_flip() {
        for bit in 0..160 {
            let mut packet = with_options(&[]);
            packet[bit / 8] ^= 1 << (bit % 8);
            assert!(Ipv4Header::parse(&packet).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn round_trips_every_fragment_offset() {
        for fragment_offset_bytes in (0..=u16::MAX).step_by(8) {
            let header = Ipv4Header { fragment_offset_bytes, ..HEADER };
            let mut packet = [0xee; 24];
            assert!(header.emit(&mut packet).is_some());
            assert_eq!(Ipv4Header::parse(&packet).unwrap().0, header);
            let last = Ipv4Header { more_fragments: false, ..header };
            assert_eq!(last.is_fragment(), fragment_offset_bytes != 0);
        }
    }

    #[test]
    fn total_length_of_header_means_empty_payload() {
        assert_eq!(Ipv4Header::parse(&with_byte(3, 20)).unwrap().1, &[] as &[u8]);
    }

    #[test]
    fn parse_quoted_accepts_truncated_and_modified_packets() {
        let mut packet = with_options(&[]);
        packet[10] ^= 1;
        packet[3] = 200;
        let (header, payload) = Ipv4Header::parse_quoted(&packet).unwrap();
        assert_eq!((header.total_bytes, payload), (200, &[0xee; 4][..]));
        packet[3] = 22;
        assert_eq!(Ipv4Header::parse_quoted(&packet).unwrap().1, &[0xee; 2]);
        packet[3] = 0;
        assert_eq!(Ipv4Header::parse_quoted(&packet).unwrap().1, &[] as &[u8]);
    }

    #[test]
    fn yields_options_in_order_until_end_of_list() {
        let route = [0x01, 7, 7, 4, 0, 0, 0, 0, 148, 4, 0, 0, 68, 4, 5, 0, 0x01, 0, 0xff, 0xff];
        let packet = with_options(&route);
        let (header, _) = Ipv4Header::parse(&packet).unwrap();
        let options: Vec<_> = header.options(&packet).collect();
        assert_eq!(
            options,
            [
                Ok(Ipv4Option::RecordRoute(Ipv4Route { pointer: 4, addresses: &[[0; 4]] })),
                Ok(Ipv4Option::RouterAlert(0)),
                Ok(Ipv4Option::Other(68, &[5, 0])),
            ]
        );
        assert_eq!(header.options(&packet).check(), Ok(()));
    }

    #[test]
    fn rejects_malformed_options() {
        for options in [
            [7, 0, 0, 0],     // length 0
            [7, 1, 0, 0],     // length 1
            [7, 2, 0, 0],     // no pointer
            [7, 5, 4, 0],     // past the header
            [1, 1, 1, 7],     // no length
            [68, 255, 5, 0],  // past the header
            [148, 3, 0, 0],   // router alert of the wrong length
            [7, 3, 3, 0],     // pointer before the route
            [7, 3, 8, 0],     // pointer past the route: overflow
            [131, 4, 4, 0],   // part of an address
            [137, 3, 255, 0], // pointer past the route
            [7, 3, 5, 0],     // pointer between addresses
        ] {
            assert_eq!(check(&options), Err(DropReason::Ipv4Options), "{options:?}");
        }
    }

    #[test]
    fn rejects_source_routes_even_if_complete() {
        for kind in [131, 137] {
            assert_eq!(check(&[kind, 7, 4, 198, 51, 100, 1, 0]), Err(DropReason::Ipv4SourceRoute));
            assert_eq!(check(&[1, kind, 7, 8, 198, 51, 100, 1]), Err(DropReason::Ipv4SourceRoute));
        }
        // Bytes after the end-of-list option are padding, whatever their values.
        assert_eq!(check(&[0, 131, 3, 4]), Ok(()));
        assert_eq!(check(&[]), Ok(()));
    }

    #[test]
    fn does_not_emit_invalid_headers() {
        let mut buf = [0; 64];
        for header_bytes in [0, 16, 19, 21, 64] {
            assert!(Ipv4Header { header_bytes, ..HEADER }.emit(&mut buf).is_none());
        }
        assert!(HEADER.emit(&mut buf[..19]).is_none());
        assert_eq!(buf, [0; 64]);
        let new = |bytes| Ipv4Header::new(HEADER.source, HEADER.source, Protocol::UDP, bytes);
        assert_eq!(new(65_515).unwrap().total_bytes, 65_535);
        assert!(new(65_516).is_none() && new(usize::MAX).is_none());
    }
}
