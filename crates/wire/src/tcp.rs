//! TCP header and its options (RFC 9293).

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::ops::BitOr;

use crate::checksum::{Sum, pseudo_header_v4, pseudo_header_v6};
use crate::field::{append, put_u16, put_u32, u16_at, u32_at};
use crate::{DropReason, Protocol};

/// Flags of a TCP header.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// The sender has no more data.
    pub const FIN: TcpFlags = TcpFlags(0x01);
    /// Synchronize: start of the connection; `sequence` is the initial sequence number.
    pub const SYN: TcpFlags = TcpFlags(0x02);
    /// Reset: the connection is aborted.
    pub const RST: TcpFlags = TcpFlags(0x04);
    /// Push: the receiver should deliver the data to the application at once.
    pub const PSH: TcpFlags = TcpFlags(0x08);
    /// The acknowledgement number is valid.
    pub const ACK: TcpFlags = TcpFlags(0x10);
    /// The urgent pointer is valid.
    pub const URG: TcpFlags = TcpFlags(0x20);
    /// ECN echo: congestion was experienced on the path (RFC 3168).
    pub const ECE: TcpFlags = TcpFlags(0x40);
    /// Congestion window reduced by the sender (RFC 3168).
    pub const CWR: TcpFlags = TcpFlags(0x80);

    const NAMES: [&'static str; 8] = ["FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"];

    /// Returns true if all of `flags` are set.
    #[inline]
    pub const fn contains(self, flags: TcpFlags) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Returns true if at least one of `flags` is set.
    #[inline]
    pub const fn intersects(self, flags: TcpFlags) -> bool {
        self.0 & flags.0 != 0
    }
}

impl BitOr for TcpFlags {
    type Output = TcpFlags;

    fn bitor(self, other: TcpFlags) -> TcpFlags {
        TcpFlags(self.0 | other.0)
    }
}

impl fmt::Debug for TcpFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (bit, name) in Self::NAMES.iter().enumerate() {
            if self.0 >> bit & 1 != 0 {
                write!(f, "{separator}{name}")?;
                separator = "|";
            }
        }
        if separator.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

/// TCP header without the bytes of its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpHeader {
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Sequence number of the first byte of the payload, or of the SYN.
    pub sequence: u32,
    /// Next sequence number expected by the sender; valid if [`TcpFlags::ACK`] is set.
    pub acknowledgement: u32,
    /// Length of the header with its options, in bytes: 20 to 60, a multiple of 4.
    pub header_bytes: u8,
    /// Flags.
    pub flags: TcpFlags,
    /// Receive window of the sender, before scaling.
    pub window: u16,
    /// Checksum field as received or to be sent.
    pub checksum: u16,
    /// End of the urgent data, relative to `sequence`; valid if [`TcpFlags::URG`] is set.
    pub urgent_pointer: u16,
}

impl TcpHeader {
    /// Length in bytes of a header without options.
    pub const BYTES: usize = 20;

    /// Maximum length of a header's options in bytes.
    pub const MAX_OPTION_BYTES: usize = 40;

    /// Parses a header and returns it with the payload; [`TcpHeader::options`] returns the options.
    ///
    /// The checksum is not verified: see [`verify_v4`] and [`verify_v6`].
    ///
    /// # Errors
    /// [`DropReason::TcpTruncated`] when the segment ends inside the fixed header,
    /// [`DropReason::TcpHeaderLength`] when the data offset is under 20 bytes or past the segment.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), DropReason> {
        let header = Self::parse_quoted(bytes)?;
        let payload = bytes.get(header.header_bytes.into()..).ok_or(DropReason::TcpHeaderLength)?;
        Ok((header, payload))
    }

    /// Parses the fixed header of a segment quoted by an ICMP error, which may be truncated after
    /// the fixed header.
    ///
    /// # Errors
    /// As [`TcpHeader::parse`], except for a data offset past the segment.
    #[inline]
    pub fn parse_quoted(bytes: &[u8]) -> Result<Self, DropReason> {
        let head = bytes.first_chunk::<20>().ok_or(DropReason::TcpTruncated)?;
        let header_bytes = (head[12] >> 4) * 4;
        if usize::from(header_bytes) < Self::BYTES {
            return Err(DropReason::TcpHeaderLength);
        }
        Ok(Self {
            source_port: u16_at(head, 0),
            destination_port: u16_at(head, 2),
            sequence: u32_at(head, 4),
            acknowledgement: u32_at(head, 8),
            header_bytes,
            flags: TcpFlags(head[13]),
            window: u16_at(head, 14),
            checksum: u16_at(head, 16),
            urgent_pointer: u16_at(head, 18),
        })
    }

    /// Returns the options of this header, which was parsed from `segment`.
    #[inline]
    pub fn options<'a>(&self, segment: &'a [u8]) -> TcpOptions<'a> {
        TcpOptions::new(segment.get(Self::BYTES..self.header_bytes.into()).unwrap_or(&[]))
    }

    /// Writes the header to the front of `buf` and returns the rest of `buf`. The checksum field is
    /// written as it is in `self`.
    ///
    /// If `header_bytes` is over 20, the options must already be in `buf`: they are not changed.
    ///
    /// Returns `None`, with nothing written, when the header does not fit or `header_bytes` is not
    /// a valid header length.
    #[inline]
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        if !self.header_bytes.is_multiple_of(4) || self.header_bytes > 60 {
            return None;
        }
        let (header, rest) = buf.split_at_mut_checked(self.header_bytes.into())?;
        let head = header.first_chunk_mut::<20>()?;
        put_u16(head, 0, self.source_port);
        put_u16(head, 2, self.destination_port);
        put_u32(head, 4, self.sequence);
        put_u32(head, 8, self.acknowledgement);
        (head[12], head[13]) = (self.header_bytes << 2, self.flags.0);
        put_u16(head, 14, self.window);
        put_u16(head, 16, self.checksum);
        put_u16(head, 18, self.urgent_pointer);
        Some(rest)
    }
}

/// Computes and writes the checksum field of a segment (header and payload) whose other bytes
/// are complete. `pseudo` is the sum of the pseudo-header.
///
/// A segment shorter than a TCP header is left unchanged.
#[inline]
pub fn fill_checksum(pseudo: Sum, segment: &mut [u8]) {
    let Some(head) = segment.first_chunk_mut::<20>() else { return };
    put_u16(head, 16, 0);
    let checksum = pseudo.with(segment).checksum();
    if let Some(head) = segment.first_chunk_mut::<20>() {
        put_u16(head, 16, checksum);
    }
}

/// Verifies the checksum of a segment received over IPv4.
///
/// # Errors
/// [`DropReason::TcpChecksum`] when the checksum is wrong, and
/// [`DropReason::TcpChecksumUnfilled`] when the sender left it to checksum offload and the
/// packet never passed the sender's NIC.
#[inline]
pub fn verify_v4(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    segment: &[u8],
) -> Result<(), DropReason> {
    let bytes = u16::try_from(segment.len()).map_err(|_| DropReason::TcpChecksum)?;
    verify(pseudo_header_v4(source, destination, Protocol::TCP, bytes), segment)
}

/// Verifies the checksum of a segment received over IPv6.
///
/// # Errors
/// As [`verify_v4`].
#[inline]
pub fn verify_v6(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    segment: &[u8],
) -> Result<(), DropReason> {
    let bytes = u32::try_from(segment.len()).map_err(|_| DropReason::TcpChecksum)?;
    verify(pseudo_header_v6(source, destination, Protocol::TCP, bytes), segment)
}

#[inline]
fn verify(pseudo: Sum, segment: &[u8]) -> Result<(), DropReason> {
    if pseudo.with(segment).is_valid() {
        return Ok(());
    }
    let head = segment.first_chunk::<20>().ok_or(DropReason::TcpTruncated)?;
    let unfilled = pseudo.fold() == u16_at(head, 16);
    Err(if unfilled { DropReason::TcpChecksumUnfilled } else { DropReason::TcpChecksum })
}

/// Option of a TCP header. The connection validates the values, such as a window scale over 14.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpOption<'a> {
    /// Maximum segment size: the largest segment that the sender accepts, in bytes of payload
    /// (RFC 9293 section 3.7.1).
    MaximumSegmentSize(u16),
    /// Window scale: bits to shift the window field left (RFC 7323 section 2.2).
    WindowScale(u8),
    /// The sender supports selective acknowledgement (RFC 2018 section 2).
    SackPermitted,
    /// Selective acknowledgement: data received out of order (RFC 2018 section 3).
    Sack(SackBlocks<'a>),
    /// Timestamps (RFC 7323 section 3.2).
    Timestamps {
        /// Timestamp of the sender's clock (TSval).
        value: u32,
        /// Echo of the latest timestamp that the sender received (TSecr).
        echo: u32,
    },
    /// Any other option: its type and the bytes after its length field.
    Other(u8, &'a [u8]),
}

impl<'a> TcpOption<'a> {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const MAXIMUM_SEGMENT_SIZE: u8 = 2;
    const WINDOW_SCALE: u8 = 3;
    const SACK_PERMITTED: u8 = 4;
    const SACK: u8 = 5;
    const TIMESTAMPS: u8 = 8;

    /// Parses the first option, which must not be a one-byte option (end of list, no operation).
    fn parse(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let &[kind, length, ..] = bytes else { return None };
        let (option, rest) = bytes.split_at_checked(length.into())?;
        // An option length of 0 or 1 fails here; otherwise iteration would not terminate.
        let body = option.get(2..)?;
        let option = match (kind, body) {
            (Self::MAXIMUM_SEGMENT_SIZE, &[a, b]) => {
                Self::MaximumSegmentSize(u16::from_be_bytes([a, b]))
            }
            (Self::WINDOW_SCALE, &[shift]) => Self::WindowScale(shift),
            (Self::SACK_PERMITTED, []) => Self::SackPermitted,
            (Self::SACK, blocks) => Self::Sack(SackBlocks::parse(blocks)?),
            (Self::TIMESTAMPS, &[a, b, c, d, e, f, g, h]) => Self::Timestamps {
                value: u32::from_be_bytes([a, b, c, d]),
                echo: u32::from_be_bytes([e, f, g, h]),
            },
            (
                Self::MAXIMUM_SEGMENT_SIZE
                | Self::WINDOW_SCALE
                | Self::SACK_PERMITTED
                | Self::TIMESTAMPS,
                _,
            ) => return None,
            _ => Self::Other(kind, body),
        };
        Some((option, rest))
    }

    /// Writes the option to the front of `buf` and returns the rest of `buf`; `None` when the
    /// option does not fit.
    #[must_use = "None means that the option was not written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        match *self {
            Self::MaximumSegmentSize(size) => {
                emit_option(buf, Self::MAXIMUM_SEGMENT_SIZE, &size.to_be_bytes())
            }
            Self::WindowScale(shift) => emit_option(buf, Self::WINDOW_SCALE, &[shift]),
            Self::SackPermitted => emit_option(buf, Self::SACK_PERMITTED, &[]),
            Self::Sack(blocks) => emit_option(buf, Self::SACK, blocks.blocks.as_flattened()),
            Self::Timestamps { value, echo } => {
                let value_and_echo = u64::from(value) << 32 | u64::from(echo);
                emit_option(buf, Self::TIMESTAMPS, &value_and_echo.to_be_bytes())
            }
            Self::Other(kind, body) => emit_option(buf, kind, body),
        }
    }
}

fn emit_option<'b>(buf: &'b mut [u8], kind: u8, body: &[u8]) -> Option<&'b mut [u8]> {
    let length = u8::try_from(body.len() + 2).ok()?;
    let (option, rest) = buf.split_at_mut_checked(length.into())?;
    append(append(option, &[kind, length])?, body)?;
    Some(rest)
}

/// Fills `buf` with no-operation options, which pad the options to a multiple of 4 bytes.
pub fn emit_padding(buf: &mut [u8]) {
    buf.fill(TcpOption::NO_OPERATION);
}

/// Iterator over the blocks of a selective acknowledgement.
///
/// Yields each block's first sequence number and the sequence number after its last byte. The
/// edges are as received and may be reversed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SackBlocks<'a> {
    blocks: &'a [[u8; 8]],
}

impl<'a> SackBlocks<'a> {
    /// Checks that `bytes` consists of blocks of eight bytes; `None` for no block or an incomplete
    /// block.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (blocks, rest) = bytes.as_chunks::<8>();
        (rest.is_empty() && !blocks.is_empty()).then_some(Self { blocks })
    }
}

impl Iterator for SackBlocks<'_> {
    type Item = (u32, u32);

    fn next(&mut self) -> Option<Self::Item> {
        let (block, rest) = self.blocks.split_first()?;
        self.blocks = rest;
        Some((u32_at(block, 0), u32_at(block, 4)))
    }
}

/// Iterator over the options of a TCP header.
///
/// Yields [`DropReason::TcpOptions`] and ends at the first option with an invalid length: under
/// 2, past the header, or not the length that its type requires.
///
/// # Examples
/// ```
/// use tidegate_wire::{TcpOption, TcpOptions};
///
/// let mut options = TcpOptions::new(&[2, 4, 0x05, 0xb4, 1, 3, 3, 7]);
/// assert_eq!(options.next(), Some(Ok(TcpOption::MaximumSegmentSize(1460))));
/// assert_eq!(options.next(), Some(Ok(TcpOption::WindowScale(7))));
/// assert_eq!(options.next(), None);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions<'a> {
    bytes: &'a [u8],
}

impl<'a> TcpOptions<'a> {
    /// Creates an iterator over the options in `bytes`, which follow the fixed header.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Returns the bytes not parsed yet.
    #[inline]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> Iterator for TcpOptions<'a> {
    type Item = Result<TcpOption<'a>, DropReason>;

    fn next(&mut self) -> Option<Self::Item> {
        while let [TcpOption::NO_OPERATION, rest @ ..] = self.bytes {
            self.bytes = rest;
        }
        if matches!(self.bytes, [] | [TcpOption::END, ..]) {
            self.bytes = &[];
            return None;
        }
        let parsed = TcpOption::parse(self.bytes);
        self.bytes = parsed.map_or(&[], |(_, rest)| rest);
        Some(parsed.map(|(option, _)| option).ok_or(DropReason::TcpOptions))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::format;
    use std::vec;
    use std::vec::Vec;

    use super::*;

    const HEADER: TcpHeader = TcpHeader {
        source_port: 4000,
        destination_port: 80,
        sequence: 0xdead_beef,
        acknowledgement: 0x1234_5678,
        header_bytes: 20,
        flags: TcpFlags(0x12),
        window: 64_240,
        checksum: 0xabcd,
        urgent_pointer: 9,
    };

    fn parse_options(bytes: &[u8]) -> Vec<Result<TcpOption<'_>, DropReason>> {
        TcpOptions::new(bytes).collect()
    }

    #[test]
    fn rejects_invalid_lengths_with_specific_reason() {
        let mut good = [0xee; 24];
        assert_eq!(HEADER.emit(&mut good).unwrap().len(), 4);
        assert_eq!(TcpHeader::parse(&good), Ok((HEADER, &[0xee; 4][..])));
        for cut in 0..20 {
            assert_eq!(TcpHeader::parse(&good[..cut]), Err(DropReason::TcpTruncated));
        }
        for offset in 0..16 {
            good[12] = offset << 4;
            let parsed = TcpHeader::parse(&good).map(|(_, payload)| payload.len());
            let expected = match offset {
                5 => Ok(4),
                6 => Ok(0),
                _ => Err(DropReason::TcpHeaderLength),
            };
            assert_eq!(parsed, expected, "data offset {offset}");
        }
    }

    #[test]
    fn round_trips_every_flag_combination() {
        // Null, SYN with FIN, all flags: their meaning is not the parser's concern.
        for flags in 0..=255 {
            let mut bytes = [0; 20];
            let header = TcpHeader { flags: TcpFlags(flags), ..HEADER };
            assert!(header.emit(&mut bytes).is_some());
            assert_eq!(TcpHeader::parse(&bytes).unwrap().0, header);
        }
        let syn_ack = TcpFlags::SYN | TcpFlags::ACK;
        assert!(syn_ack.contains(TcpFlags::SYN) && !TcpFlags::SYN.contains(syn_ack));
        assert!(syn_ack.intersects(TcpFlags::ACK | TcpFlags::FIN));
        assert_eq!(format!("{syn_ack:?} {:?}", TcpFlags(0)), "SYN|ACK none");
    }

    #[test]
    fn round_trips_every_option() {
        let edges = [0, 0, 0, 1, 0, 0, 0, 2, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
        let options = [
            TcpOption::MaximumSegmentSize(0),
            TcpOption::SackPermitted,
            TcpOption::Timestamps { value: 0xdead_beef, echo: 1 },
            TcpOption::WindowScale(255),
            TcpOption::Sack(SackBlocks::parse(&edges).unwrap()),
            TcpOption::Other(253, &[1, 2, 3]),
        ];
        let mut bytes = vec![0xee; 80];
        let mut rest = &mut bytes[..];
        for option in options {
            rest = option.emit(rest).unwrap();
        }
        emit_padding(rest);
        let expected: Vec<_> = options.into_iter().map(Ok).collect();
        assert_eq!(parse_options(&bytes), expected);
        let TcpOption::Sack(blocks) = options[4] else { unreachable!() };
        assert_eq!(blocks.collect::<Vec<_>>(), [(1, 2), (u32::MAX, 0)], "reversed edges are kept");
        assert!(TcpOption::SackPermitted.emit(&mut [0]).is_none());
        assert!(TcpOption::Other(9, &[0; 254]).emit(&mut [0; 300]).is_none());
    }

    #[test]
    fn stops_at_malformed_option() {
        for bad in [
            &[2, 0, 5, 0xb4][..],         // length 0: would iterate forever
            &[2, 1, 5, 0xb4],             // length 1
            &[2, 5, 5, 0xb4],             // past the header
            &[2],                         // no length
            &[2, 3, 5],                   // an MSS of one byte
            &[3, 4, 1, 1],                // a window scale of two
            &[4, 3, 0],                   // SACK permitted with a body
            &[5, 2],                      // no SACK block
            &[5, 9, 0, 0, 0, 0, 0, 0, 0], // incomplete SACK block
            &[5, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[8, 9, 0, 0, 0, 0, 0, 0, 0], // timestamps one byte short
            &[254, 0],
            &[254, 255, 0, 0],
        ] {
            assert_eq!(parse_options(bad), [Err(DropReason::TcpOptions)], "{bad:?}");
            let after_valid_option = [&[1, 4, 2, 1][..], bad].concat();
            assert_eq!(
                parse_options(&after_valid_option),
                [Ok(TcpOption::SackPermitted), Err(DropReason::TcpOptions)]
            );
        }
        assert_eq!(
            parse_options(&[1, 1, 0, 2, 0]),
            [],
            "bytes after the end of the list are padding"
        );
    }

    #[test]
    fn fills_and_verifies_checksum_over_both_families() {
        let v4 = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
        let v6 = (Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED);
        let pseudo_v4 = pseudo_header_v4(v4.0, v4.1, Protocol::TCP, 23);
        let pseudo_v6 = pseudo_header_v6(v6.0, v6.1, Protocol::TCP, 23);
        let mut segment = [0xee; 23];
        assert!(HEADER.emit(&mut segment).is_some());
        assert_eq!(verify_v4(v4.0, v4.1, &segment), Err(DropReason::TcpChecksum));
        assert_eq!(verify_v6(v6.0, v6.1, &segment), Err(DropReason::TcpChecksum));
        fill_checksum(pseudo_v4, &mut segment);
        assert_eq!(verify_v4(v4.0, v4.1, &segment), Ok(()));
        assert_eq!(verify_v6(v6.0, v6.1, &segment), Err(DropReason::TcpChecksum));
        fill_checksum(pseudo_v6, &mut segment);
        assert_eq!(verify_v6(v6.0, v6.1, &segment), Ok(()));
        segment[16..18].copy_from_slice(&pseudo_v4.fold().to_be_bytes());
        assert_eq!(verify_v4(v4.0, v4.1, &segment), Err(DropReason::TcpChecksumUnfilled));
        assert_eq!(verify_v4(v4.0, v4.1, &segment[..19]), Err(DropReason::TcpTruncated));
    }
}
