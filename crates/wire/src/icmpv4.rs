//! The Internet Control Message Protocol (RFC 792).

use crate::DropReason;
use crate::checksum::Sum;
use crate::field::u16_at;
use crate::icmp::{IcmpHeader, quote_without_extensions};

/// Codes of [`Icmpv4Message::DestinationUnreachable`].
pub mod unreachable {
    /// No route to the network.
    pub const NETWORK: u8 = 0;
    /// No route to the host.
    pub const HOST: u8 = 1;
    /// The host does not support the protocol.
    pub const PROTOCOL: u8 = 2;
    /// No socket is bound to the port.
    pub const PORT: u8 = 3;
    /// The packet is too large and must not be fragmented (RFC 1191).
    pub const FRAGMENTATION_NEEDED: u8 = 4;
    /// The source route could not be followed.
    pub const SOURCE_ROUTE_FAILED: u8 = 5;
    /// The destination host is unknown (RFC 1122).
    pub const HOST_UNKNOWN: u8 = 7;
    /// The source host is isolated (RFC 1122).
    pub const SOURCE_HOST_ISOLATED: u8 = 8;
    /// Communication with the network is administratively prohibited (RFC 1122).
    pub const NETWORK_PROHIBITED: u8 = 9;
    /// Communication with the host is administratively prohibited (RFC 1122).
    pub const HOST_PROHIBITED: u8 = 10;
    /// Administratively prohibited (RFC 1812).
    pub const ADMINISTRATIVELY_PROHIBITED: u8 = 13;
}

/// Codes of [`Icmpv4Message::TimeExceeded`].
pub mod time_exceeded {
    /// The time to live expired in transit.
    pub const IN_TRANSIT: u8 = 0;
    /// Fragment reassembly timed out.
    pub const REASSEMBLY: u8 = 1;
}

/// ICMPv4 message.
///
/// `quote` is the beginning of the packet that caused an error, from its IP header on; parse it
/// with [`crate::Ipv4Header::parse_quoted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmpv4Message<'a> {
    /// Reply to an echo request.
    EchoReply {
        /// Identifier of the request.
        identifier: u16,
        /// Sequence number of the request.
        sequence: u16,
        /// Data of the request.
        data: &'a [u8],
    },
    /// Request to return the same data.
    EchoRequest {
        /// Distinguishes the requests of different senders.
        identifier: u16,
        /// Sequence number of the request at its sender.
        sequence: u16,
        /// Arbitrary data.
        data: &'a [u8],
    },
    /// The packet could not be delivered.
    DestinationUnreachable {
        /// Cause: see [`mod@unreachable`].
        code: u8,
        /// MTU of the next hop in bytes, if the code is [`unreachable::FRAGMENTATION_NEEDED`]
        /// (RFC 1191); 0 from old routers and for other codes.
        next_hop_mtu: u16,
        /// Beginning of the packet.
        quote: &'a [u8],
    },
    /// The packet's time to live or reassembly time was exceeded.
    TimeExceeded {
        /// Place of the expiry: see [`mod@time_exceeded`].
        code: u8,
        /// Beginning of the packet.
        quote: &'a [u8],
    },
    /// The packet's header has an invalid field.
    ParameterProblem {
        /// 0 when `pointer` identifies the invalid byte.
        code: u8,
        /// Offset of the first invalid byte in the packet.
        pointer: u8,
        /// Beginning of the packet.
        quote: &'a [u8],
    },
    /// Any other message.
    Other {
        /// ICMP type.
        kind: u8,
        /// ICMP code.
        code: u8,
        /// Bytes after the checksum.
        body: &'a [u8],
    },
}

impl<'a> Icmpv4Message<'a> {
    /// Header length in bytes of all variants but [`Icmpv4Message::Other`].
    pub const BYTES: usize = 8;

    const ECHO_REPLY: u8 = 0;
    const DESTINATION_UNREACHABLE: u8 = 3;
    const ECHO_REQUEST: u8 = 8;
    const TIME_EXCEEDED: u8 = 11;
    const PARAMETER_PROBLEM: u8 = 12;

    /// Parses a message, which is the whole payload of an IP packet, and verifies its checksum.
    ///
    /// # Errors
    /// [`DropReason::IcmpTruncated`] when the message is shorter than its type requires,
    /// [`DropReason::IcmpChecksum`] when its checksum is wrong.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, DropReason> {
        let (head, body) = bytes.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        if !Sum::of(bytes).is_valid() {
            return Err(DropReason::IcmpChecksum);
        }
        let [kind, code, ..] = *head;
        let has_second_word = matches!(
            kind,
            Self::ECHO_REPLY
                | Self::DESTINATION_UNREACHABLE
                | Self::ECHO_REQUEST
                | Self::TIME_EXCEEDED
                | Self::PARAMETER_PROBLEM
        );
        if !has_second_word {
            return Ok(Self::Other { kind, code, body });
        }
        let (word, data) = body.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        let (high, low) = (u16_at(word, 0), u16_at(word, 2));
        let quote = quote_without_extensions(data, word[1], 4);
        Ok(match kind {
            Self::ECHO_REPLY => Self::EchoReply { identifier: high, sequence: low, data },
            Self::ECHO_REQUEST => Self::EchoRequest { identifier: high, sequence: low, data },
            Self::DESTINATION_UNREACHABLE => {
                Self::DestinationUnreachable { code, next_hop_mtu: low, quote }
            }
            Self::TIME_EXCEEDED => Self::TimeExceeded { code, quote },
            _ => Self::ParameterProblem { code, pointer: word[0], quote },
        })
    }

    /// Returns the length of the message in bytes.
    pub fn message_bytes(&self) -> usize {
        let (head, body) = self.header_and_body();
        head.as_bytes().len() + body.len()
    }

    /// Writes the message with its checksum to the front of `buf` and returns the rest of `buf`;
    /// `None`, with nothing written, when the message does not fit.
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (mut head, body) = self.header_and_body();
        head.set_checksum(Sum::of(head.as_bytes()).with(body).checksum());
        head.emit(body, buf)
    }

    /// Returns the header, with a zero checksum, and the body.
    fn header_and_body(&self) -> (IcmpHeader, &'a [u8]) {
        match *self {
            Self::EchoReply { identifier, sequence, data } => {
                (IcmpHeader::with_u16_pair(Self::ECHO_REPLY, 0, identifier, sequence), data)
            }
            Self::EchoRequest { identifier, sequence, data } => {
                (IcmpHeader::with_u16_pair(Self::ECHO_REQUEST, 0, identifier, sequence), data)
            }
            Self::DestinationUnreachable { code, next_hop_mtu, quote } => (
                IcmpHeader::with_u16_pair(Self::DESTINATION_UNREACHABLE, code, 0, next_hop_mtu),
                quote,
            ),
            Self::TimeExceeded { code, quote } => {
                (IcmpHeader::with_u32(Self::TIME_EXCEEDED, code, 0), quote)
            }
            Self::ParameterProblem { code, pointer, quote } => (
                IcmpHeader::with_u32(Self::PARAMETER_PROBLEM, code, u32::from(pointer) << 24),
                quote,
            ),
            Self::Other { kind, code, body } => (IcmpHeader::type_code_only(kind, code), body),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ECHO: Icmpv4Message<'static> =
        Icmpv4Message::EchoRequest { identifier: 0x1234, sequence: 7, data: b"abcde" };

    #[test]
    fn rejects_truncation_and_bit_flips() {
        let mut bytes = [0; 13];
        assert_eq!(ECHO.message_bytes(), 13);
        assert!(ECHO.emit(&mut bytes).unwrap().is_empty());
        assert_eq!(Icmpv4Message::parse(&bytes), Ok(ECHO));
        for cut in 0..4 {
            assert_eq!(Icmpv4Message::parse(&bytes[..cut]), Err(DropReason::IcmpTruncated));
        }
        for cut in 4..13 {
            assert_eq!(Icmpv4Message::parse(&bytes[..cut]), Err(DropReason::IcmpChecksum));
        }
        for bit in 0..104 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Icmpv4Message::parse(&bad), Err(DropReason::IcmpChecksum), "bit {bit}");
        }
    }

    #[test]
    fn rejects_message_shorter_than_its_type_requires() {
        for kind in [0, 3, 8, 11, 12] {
            let mut buf = [0; 7];
            let short = Icmpv4Message::Other { kind, code: 0, body: &[1, 2, 3] };
            assert!(short.emit(&mut buf).unwrap().is_empty());
            assert_eq!(Icmpv4Message::parse(&buf), Err(DropReason::IcmpTruncated));
        }
        // Types that hosts ignore, such as source quench and redirect, are parsed as `Other`.
        for kind in [4, 5, 9, 13, 40, 255] {
            let mut buf = [0; 4];
            let other = Icmpv4Message::Other { kind, code: 3, body: &[] };
            assert!(other.emit(&mut buf).unwrap().is_empty());
            assert_eq!(Icmpv4Message::parse(&buf), Ok(other));
        }
    }

    #[test]
    fn strips_extensions_after_quoted_packet() {
        let mut data = [0xee; 148];
        data[128..].fill(0xaa);
        let mut buf = [0; 156];
        for (length, quote_bytes) in [(0, 148), (32, 128), (37, 148), (38, 148), (255, 148)] {
            let error =
                Icmpv4Message::DestinationUnreachable { code: 4, next_hop_mtu: 1400, quote: &data };
            assert!(error.emit(&mut buf).unwrap().is_empty());
            buf[5] = length;
            buf[2..4].fill(0);
            let checksum = Sum::of(&buf).checksum();
            buf[2..4].copy_from_slice(&checksum.to_be_bytes());
            let Ok(Icmpv4Message::DestinationUnreachable { code: 4, next_hop_mtu: 1400, quote }) =
                Icmpv4Message::parse(&buf)
            else {
                panic!("unexpected message: {:?}", Icmpv4Message::parse(&buf));
            };
            assert_eq!(quote.len(), quote_bytes);
        }
    }

    #[test]
    fn emit_leaves_short_buffer_unchanged() {
        let mut short = [0; 12];
        assert!(ECHO.emit(&mut short).is_none());
        assert_eq!(short, [0; 12]);
    }
}
