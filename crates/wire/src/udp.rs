//! The User Datagram Protocol (RFC 768).

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::checksum::{Sum, pseudo_header_v4, pseudo_header_v6};
use crate::field::{put_u16, u16_at};
use crate::{DropReason, Protocol};

/// A UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    /// The sender's port; 0 when no answer is wanted.
    pub source_port: u16,
    /// The receiver's port.
    pub destination_port: u16,
    /// The length of the header and the payload.
    pub length_bytes: u16,
    /// The checksum field as it stands; 0 means that there is none.
    pub checksum: u16,
}

impl UdpHeader {
    /// The length of a header.
    pub const BYTES: usize = 8;

    /// The most payload that a datagram can have.
    pub const MAX_PAYLOAD_BYTES: usize = u16::MAX as usize - Self::BYTES;

    /// A header for `payload_bytes` of payload, its checksum not yet made;
    /// `None` for more than a datagram can have.
    #[inline]
    pub fn new(source_port: u16, destination_port: u16, payload_bytes: usize) -> Option<Self> {
        let length_bytes = u16::try_from(payload_bytes.checked_add(Self::BYTES)?).ok()?;
        Some(Self { source_port, destination_port, length_bytes, checksum: 0 })
    }

    /// Reads a header. The rest is the payload, cut to the length that the
    /// header tells. The checksum is a question of its own: [`verify_v4`] and
    /// [`verify_v6`].
    ///
    /// # Errors
    /// When the packet ends inside the header, or the length is under 8 or past
    /// the packet.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let header = Self::parse_quoted(bytes)?;
        let payload =
            bytes.get(Self::BYTES..header.length_bytes.into()).ok_or(DropReason::UdpLength)?;
        Ok((header, payload))
    }

    /// Reads the header of a datagram that an ICMP error quotes and may have
    /// cut short.
    ///
    /// # Errors
    /// When fewer than 8 bytes are there.
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

    /// Writes the header to the front of `buf`, the checksum field as it
    /// stands in the value, and returns what is behind it; `None`, with nothing
    /// written, when it does not fit.
    #[inline]
    #[must_use = "None says that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (head, rest) = buf.split_first_chunk_mut::<8>()?;
        put_u16(head, 0, self.source_port);
        put_u16(head, 2, self.destination_port);
        put_u16(head, 4, self.length_bytes);
        put_u16(head, 6, self.checksum);
        Some(rest)
    }
}

/// Fills the checksum field of a datagram, header and payload, whose other
/// bytes are in place. `pseudo` is the sum of its pseudo-header. Does nothing to
/// fewer bytes than a header.
#[inline]
pub fn fill_checksum(pseudo: Sum, datagram: &mut [u8]) {
    let Some((head, payload)) = datagram.split_first_chunk_mut::<8>() else { return };
    put_u16(head, 6, 0);
    let checksum = pseudo.with(head).with(payload).udp_checksum();
    put_u16(head, 6, checksum);
}

/// Checks the checksum of a datagram that came over IPv4. `datagram` is the
/// header and the payload, cut to the length that the header tells.
///
/// # Errors
/// [`DropReason::UdpChecksum`] when it is wrong, and
/// [`DropReason::UdpChecksumUnfilled`] when the sender left it to a card that
/// never saw the packet. A field of zero is right: the sender made none.
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

/// Checks the checksum of a datagram that came over IPv6. `datagram` is the
/// header and the payload, cut to the length that the header tells.
///
/// # Errors
/// As [`verify_v4`], and [`DropReason::UdpChecksumMissing`] when there is none
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
    // A sender that leaves the checksum to its card puts the sum of the
    // pseudo-header there.
    let unfilled = pseudo.fold() == field;
    Err(if unfilled { DropReason::UdpChecksumUnfilled } else { DropReason::UdpChecksum })
}
