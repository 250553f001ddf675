//! Internet Protocol version 6 (RFC 8200): the fixed header.

use core::net::Ipv6Addr;

use crate::field::{ipv6_at, put, put_u16, put_u32, u16_at, u32_at};
use crate::{DropReason, Protocol};

/// IPv6 header without its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Header {
    /// Source address.
    pub source: Ipv6Addr,
    /// Destination address.
    pub destination: Ipv6Addr,
    /// Type of the first extension header, or the protocol of the payload.
    pub next_header: Protocol,
    /// Hop limit: each router on the path decrements it.
    pub hop_limit: u8,
    /// Differentiated services code point (6 bits) and congestion notification (2 bits) (RFC 2474,
    /// RFC 3168).
    pub traffic_class: u8,
    /// Flow label: equal in all packets of a flow; 20 bits (RFC 6437).
    pub flow_label: u32,
    /// Length of everything after this header, in bytes.
    pub payload_bytes: u16,
}

impl Ipv6Header {
    /// Length of the header in bytes.
    pub const BYTES: usize = 40;

    /// Offset of the Next Header field in bytes.
    pub const NEXT_HEADER_OFFSET_BYTES: usize = 6;

    /// Creates a header for `payload_bytes` of extension headers and payload, with hop limit 64.
    /// `None` for more than 65,535 bytes.
    #[inline]
    pub fn new(
        source: Ipv6Addr,
        destination: Ipv6Addr,
        next_header: Protocol,
        payload_bytes: usize,
    ) -> Option<Self> {
        Some(Self {
            source,
            destination,
            next_header,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            payload_bytes: u16::try_from(payload_bytes).ok()?,
        })
    }

    /// Parses a header and returns it with the bytes after it, cut to the payload length.
    ///
    /// # Errors
    /// [`DropReason::Ipv6Truncated`], [`DropReason::Ipv6Version`] or
    /// [`DropReason::Ipv6PayloadLength`].
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let (header, rest) = Self::parse_fields(bytes)?;
        let payload =
            rest.get(..header.payload_bytes.into()).ok_or(DropReason::Ipv6PayloadLength)?;
        Ok((header, payload))
    }

    /// Parses the header of a packet quoted by an ICMP error, whose payload may be truncated.
    ///
    /// # Errors
    /// As [`Ipv6Header::parse`], except for the payload length.
    pub fn parse_quoted(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let (header, rest) = Self::parse_fields(bytes)?;
        Ok((header, rest.get(..header.payload_bytes.into()).unwrap_or(rest)))
    }

    #[inline(always)]
    fn parse_fields(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let (head, rest) = bytes.split_first_chunk::<40>().ok_or(DropReason::Ipv6Truncated)?;
        let first = u32_at(head, 0);
        if first >> 28 != 6 {
            return Err(DropReason::Ipv6Version);
        }
        let header = Self {
            source: ipv6_at(head, 8),
            destination: ipv6_at(head, 24),
            next_header: Protocol(head[6]),
            hop_limit: head[7],
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0x000f_ffff,
            payload_bytes: u16_at(head, 4),
        };
        Ok((header, rest))
    }

    /// Writes the header to the front of `buf` and returns the rest of `buf`; `None`, with nothing
    /// written, when the header does not fit.
    #[inline]
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (head, rest) = buf.split_first_chunk_mut::<40>()?;
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0x000f_ffff;
        put_u32(head, 0, first);
        put_u16(head, 4, self.payload_bytes);
        (head[6], head[7]) = (self.next_header.0, self.hop_limit);
        put(head, 8, &self.source.octets());
        put(head, 24, &self.destination.octets());
        Some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet() -> ([u8; 44], Ipv6Header) {
        let source = "2001:db8::1".parse().unwrap();
        let destination = "2001:db8::2".parse().unwrap();
        let header = Ipv6Header {
            traffic_class: 0x2e,
            flow_label: 0xabcde,
            hop_limit: 3,
            ..Ipv6Header::new(source, destination, Protocol::UDP, 4).unwrap()
        };
        let mut packet = [0xee; 44];
        assert_eq!(header.emit(&mut packet).unwrap().len(), 4);
        (packet, header)
    }

    #[test]
    fn round_trips_and_strips_padding() {
        let (packet, header) = packet();
        let mut padded = [0; 64];
        padded[..44].copy_from_slice(&packet);
        assert_eq!(Ipv6Header::parse(&padded), Ok((header, &[0xee; 4][..])));
        assert_eq!(packet[..4], [0x62, 0xea, 0xbc, 0xde]);
    }

    #[test]
    fn rejects_invalid_lengths_with_specific_reason() {
        let (good, header) = packet();
        for cut in 0..40 {
            assert_eq!(Ipv6Header::parse(&good[..cut]), Err(DropReason::Ipv6Truncated));
            assert!(header.emit(&mut [0; 40][..cut]).is_none());
        }
        for cut in 40..44 {
            assert_eq!(Ipv6Header::parse(&good[..cut]), Err(DropReason::Ipv6PayloadLength));
            assert_eq!(Ipv6Header::parse_quoted(&good[..cut]).unwrap().1.len(), cut - 40);
        }
        let mut bad = good;
        bad[0] = 0x42;
        assert_eq!(Ipv6Header::parse(&bad), Err(DropReason::Ipv6Version));
        let new = |bytes| Ipv6Header::new(header.source, header.source, Protocol::UDP, bytes);
        assert!(new(65_535).is_some() && new(65_536).is_none());
    }
}
