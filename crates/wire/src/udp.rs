//! The User Datagram Protocol (RFC 768).

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::checksum::{Sum, pseudo_header_v4, pseudo_header_v6};
use crate::field::{put_u16, u16_at};
use crate::{DropReason, Protocol};

/// UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    /// Source port; 0 if the sender expects no reply.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Length of header and payload, in bytes.
    pub length_bytes: u16,
    /// Checksum field as received or to be sent; 0 means no checksum.
    pub checksum: u16,
}

impl UdpHeader {
    /// Length of the header in bytes.
    pub const BYTES: usize = 8;

    /// Maximum payload of a datagram in bytes.
    pub const MAX_PAYLOAD_BYTES: usize = u16::MAX as usize - Self::BYTES;

    /// Creates a header for `payload_bytes` of payload, with no checksum yet; `None` when the
    /// payload exceeds [`UdpHeader::MAX_PAYLOAD_BYTES`].
    #[inline]
    pub fn new(source_port: u16, destination_port: u16, payload_bytes: usize) -> Option<Self> {
        let length_bytes = u16::try_from(payload_bytes.checked_add(Self::BYTES)?).ok()?;
        Some(Self { source_port, destination_port, length_bytes, checksum: 0 })
    }

    /// Parses a header and returns it with the payload, cut to the length field.
    ///
    /// The checksum is not verified: see [`verify_v4`] and [`verify_v6`].
    ///
    /// # Errors
    /// [`DropReason::UdpTruncated`] when the packet ends inside the header,
    /// [`DropReason::UdpLength`] when the length field is under 8 or past the packet.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let header = Self::parse_quoted(bytes)?;
        let payload =
            bytes.get(Self::BYTES..header.length_bytes.into()).ok_or(DropReason::UdpLength)?;
        Ok((header, payload))
    }

    /// Parses the header of a datagram quoted by an ICMP error, whose payload may be truncated.
    ///
    /// # Errors
    /// [`DropReason::UdpTruncated`] for fewer than 8 bytes.
    #[inline]
    pub fn parse_quoted(bytes: &[u8]) -> Result<Self, DropReason> {
        let head = bytes.first_chunk::<8>().ok_or(DropReason::UdpTruncated)?;
        Ok(Self {
            source_port: u16_at(head, 0),
            destination_port: u16_at(head, 2),
            length_bytes: u16_at(head, 4),
            checksum: u16_at(head, 6),
        })
    }

    /// Writes the header to the front of `buf` and returns the rest of `buf`; `None`, with nothing
    /// written, when the header does not fit. The checksum field is written as it is in `self`.
    #[inline]
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (head, rest) = buf.split_first_chunk_mut::<8>()?;
        put_u16(head, 0, self.source_port);
        put_u16(head, 2, self.destination_port);
        put_u16(head, 4, self.length_bytes);
        put_u16(head, 6, self.checksum);
        Some(rest)
    }
}

/// Computes and writes the checksum field of a datagram (header and payload) whose other bytes
/// are complete. `pseudo` is the sum of the pseudo-header.
///
/// A datagram shorter than a UDP header is left unchanged.
#[inline]
pub fn fill_checksum(pseudo: Sum, datagram: &mut [u8]) {
    let Some((head, payload)) = datagram.split_first_chunk_mut::<8>() else { return };
    put_u16(head, 6, 0);
    let checksum = pseudo.with(head).with(payload).udp_checksum();
    put_u16(head, 6, checksum);
}

/// Verifies the checksum of a datagram received over IPv4. `datagram` is header and payload, cut
/// to the length field. A checksum field of zero is valid: the sender computed no checksum.
///
/// # Errors
/// [`DropReason::UdpChecksum`] when the checksum is wrong, and
/// [`DropReason::UdpChecksumUnfilled`] when the sender left it to checksum offload and the
/// packet never passed the sender's NIC.
#[inline]
pub fn verify_v4(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    datagram: &[u8],
) -> Result<(), DropReason> {
    let header = UdpHeader::parse_quoted(datagram)?;
    if header.checksum == 0 {
        return Ok(());
    }
    let length_bytes = u16::try_from(datagram.len()).map_err(|_| DropReason::UdpLength)?;
    let pseudo = pseudo_header_v4(source, destination, Protocol::UDP, length_bytes);
    verify(pseudo, header.checksum, datagram)
}

/// Verifies the checksum of a datagram received over IPv6. `datagram` is header and payload, cut
/// to the length field.
///
/// # Errors
/// As [`verify_v4`], and [`DropReason::UdpChecksumMissing`] when the datagram has no checksum
/// (RFC 8200 section 8.1).
#[inline]
pub fn verify_v6(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    datagram: &[u8],
) -> Result<(), DropReason> {
    let header = UdpHeader::parse_quoted(datagram)?;
    if header.checksum == 0 {
        return Err(DropReason::UdpChecksumMissing);
    }
    let length_bytes = u16::try_from(datagram.len()).map_err(|_| DropReason::UdpLength)?;
    let pseudo = pseudo_header_v6(source, destination, Protocol::UDP, length_bytes.into());
    verify(pseudo, header.checksum, datagram)
}

#[inline]
fn verify(pseudo: Sum, field: u16, datagram: &[u8]) -> Result<(), DropReason> {
    if pseudo.with(datagram).is_valid() {
        return Ok(());
    }
    // With checksum offload, the sender writes the sum of the pseudo-header into the checksum
    // field.
    let unfilled = pseudo.fold() == field;
    Err(if unfilled { DropReason::UdpChecksumUnfilled } else { DropReason::UdpChecksum })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
    const V6: (Ipv6Addr, Ipv6Addr) =
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), Ipv6Addr::LOCALHOST);

    fn pseudo_v4(bytes: usize) -> Sum {
        pseudo_header_v4(V4.0, V4.1, Protocol::UDP, bytes as u16)
    }

    fn pseudo_v6(bytes: usize) -> Sum {
        pseudo_header_v6(V6.0, V6.1, Protocol::UDP, bytes as u32)
    }

    /// Returns a datagram with this payload and no checksum yet.
    fn datagram<const N: usize>(payload: &[u8]) -> [u8; N] {
        let mut bytes = [0; N];
        let header = UdpHeader::new(4000, 53, payload.len()).unwrap();
        header.emit(&mut bytes).unwrap().copy_from_slice(payload);
        bytes
    }

    fn with_field(mut datagram: [u8; 10], field: u16) -> [u8; 10] {
        datagram[6..8].copy_from_slice(&field.to_be_bytes());
        datagram
    }

    #[test]
    fn rejects_invalid_lengths_with_specific_reason() {
        let good = datagram::<13>(b"hello");
        for cut in 0..8 {
            assert_eq!(UdpHeader::parse(&good[..cut]), Err(DropReason::UdpTruncated));
        }
        for cut in 8..13 {
            assert_eq!(UdpHeader::parse(&good[..cut]), Err(DropReason::UdpLength));
        }
        for length in [0, 7, 14, 0xffff] {
            let mut bad = good;
            bad[4..6].copy_from_slice(&u16::to_be_bytes(length));
            assert_eq!(UdpHeader::parse(&bad), Err(DropReason::UdpLength), "{length}");
        }
        let mut shorter = good;
        shorter[5] = 10;
        assert_eq!(UdpHeader::parse(&shorter).unwrap().1, b"he");
        assert!(UdpHeader::new(1, 2, 65_527).is_some() && UdpHeader::new(1, 2, 65_528).is_none());
    }

    #[test]
    fn accepts_filled_checksum_and_detects_every_bit_flip() {
        for payload in [&b"hi"[..], &[0xff, 0xfe]] {
            let (mut v4, mut v6) = (datagram::<10>(payload), datagram::<10>(payload));
            fill_checksum(pseudo_v4(10), &mut v4);
            fill_checksum(pseudo_v6(10), &mut v6);
            assert_eq!(verify_v4(V4.0, V4.1, &v4), Ok(()));
            assert_eq!(verify_v6(V6.0, V6.1, &v6), Ok(()));
            for bit in 0..80 {
                let flip = |mut bytes: [u8; 10]| {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                    bytes
                };
                assert!(verify_v4(V4.0, V4.1, &flip(v4)).is_err(), "bit {bit}");
                assert!(verify_v6(V6.0, V6.1, &flip(v6)).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn accepts_missing_checksum_only_over_ipv4() {
        let bytes = datagram::<10>(b"hi");
        assert_eq!(verify_v4(V4.0, V4.1, &bytes), Ok(()));
        assert_eq!(verify_v6(V6.0, V6.1, &bytes), Err(DropReason::UdpChecksumMissing));
    }

    #[test]
    fn distinguishes_unfilled_from_wrong_checksum() {
        let bytes = datagram::<10>(b"hi");
        let v4 = with_field(bytes, pseudo_v4(10).fold());
        let v6 = with_field(bytes, pseudo_v6(10).fold());
        assert_eq!(verify_v4(V4.0, V4.1, &v4), Err(DropReason::UdpChecksumUnfilled));
        assert_eq!(verify_v6(V6.0, V6.1, &v6), Err(DropReason::UdpChecksumUnfilled));
        let (v4, v6) = (with_field(bytes, 0xbad), with_field(bytes, 0xbad));
        assert_eq!(verify_v4(V4.0, V4.1, &v4), Err(DropReason::UdpChecksum));
        assert_eq!(verify_v6(V6.0, V6.1, &v6), Err(DropReason::UdpChecksum));
    }

    #[test]
    fn sends_zero_checksum_as_all_ones() {
        // With this payload, everything but the checksum field sums to all ones.
        let payload =
            (!pseudo_v4(10).with(&datagram::<8>(&[])[..4]).with_u16(10).fold()).to_be_bytes();
        let mut bytes = datagram::<10>(&payload);
        fill_checksum(pseudo_v4(10), &mut bytes);
        assert_eq!(bytes[6..8], [0xff, 0xff]);
        assert_eq!(verify_v4(V4.0, V4.1, &bytes), Ok(()));
    }
}
