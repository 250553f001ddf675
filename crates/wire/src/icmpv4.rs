//! The Internet Control Message Protocol (RFC 792).

use crate::DropReason;
use crate::checksum::Sum;
use crate::field::u16_at;
use crate::icmp::{IcmpHead, quote_of};

/// Codes of [`Icmpv4Message::DestinationUnreachable`].
pub mod unreachable {
    /// No route to the network.
    pub const NETWORK: u8 = 0;
    /// No way to the host.
    pub const HOST: u8 = 1;
    /// The host does not speak the protocol.
    pub const PROTOCOL: u8 = 2;
    /// Nobody listens on the port.
    pub const PORT: u8 = 3;
    /// The packet is too large and must not be fragmented (RFC 1191).
    pub const FRAGMENTATION_NEEDED: u8 = 4;
    /// A source route could not be followed.
    pub const SOURCE_ROUTE_FAILED: u8 = 5;
    /// Forbidden by an administrator (RFC 1812).
    pub const ADMINISTRATIVELY_PROHIBITED: u8 = 13;
}

/// Codes of [`Icmpv4Message::TimeExceeded`].
pub mod time_exceeded {
    /// The time to live ran out on the way.
    pub const IN_TRANSIT: u8 = 0;
    /// Fragments were missing when the time was up.
    pub const REASSEMBLY: u8 = 1;
}

/// An ICMP message.
///
/// `quote` is the beginning of the packet that caused an error, from its IP
/// header on; read it with [`crate::Ipv4Header::parse_quoted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmpv4Message<'a> {
    /// An answer to an echo request.
    EchoReply {
        /// As in the request.
        identifier: u16,
        /// As in the request.
        sequence: u16,
        /// As in the request.
        data: &'a [u8],
    },
    /// A request to send the same back.
    EchoRequest {
        /// Tells one sender's requests from another's.
        identifier: u16,
        /// Tells one request from the next.
        sequence: u16,
        /// Anything.
        data: &'a [u8],
    },
    /// The packet could not be delivered.
    DestinationUnreachable {
        /// Why: see [`mod@unreachable`].
        code: u8,
        /// The MTU of the next hop, when the code is
        /// [`unreachable::FRAGMENTATION_NEEDED`] (RFC 1191); 0 from old routers
        /// and for other codes.
        next_hop_mtu: u16,
        /// The packet.
        quote: &'a [u8],
    },
    /// The packet was on its way for too long.
    TimeExceeded {
        /// Where: see [`mod@time_exceeded`].
        code: u8,
        /// The packet.
        quote: &'a [u8],
    },
    /// The packet's header is wrong.
    ParameterProblem {
        /// 0 when `pointer` says where.
        code: u8,
        /// The place of the first wrong byte in the packet.
        pointer: u8,
        /// The packet.
        quote: &'a [u8],
    },
    /// Any other message.
    Other {
        /// Its type.
        kind: u8,
        /// Its code.
        code: u8,
        /// What stands behind the checksum.
        body: &'a [u8],
    },
}

impl<'a> Icmpv4Message<'a> {
    /// The length of the header of the known messages.
    pub const BYTES: usize = 8;

    const ECHO_REPLY: u8 = 0;
    const DESTINATION_UNREACHABLE: u8 = 3;
    const ECHO_REQUEST: u8 = 8;
    const TIME_EXCEEDED: u8 = 11;
    const PARAMETER_PROBLEM: u8 = 12;

    /// Reads a message, the whole payload of an IP packet, and checks its
    /// checksum.
    ///
    /// # Errors
    /// When it is shorter than its type needs or the checksum is wrong.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, DropReason> {
        let (head, body) = bytes.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        if !Sum::of(bytes).is_valid() {
            return Err(DropReason::IcmpChecksum);
        }
        let [kind, code, ..] = *head;
        let known = matches!(
            kind,
            Self::ECHO_REPLY
                | Self::DESTINATION_UNREACHABLE
                | Self::ECHO_REQUEST
                | Self::TIME_EXCEEDED
                | Self::PARAMETER_PROBLEM
        );
        if !known {
            return Ok(Self::Other { kind, code, body });
        }
        let (word, data) = body.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        let (high, low) = (u16_at(word, 0), u16_at(word, 2));
        let quote = quote_of(data, word[1], 4);
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

    /// The length of the message in bytes.
    pub fn message_bytes(&self) -> usize {
        let (head, body) = self.parts();
        head.bytes().len() + body.len()
    }

    /// Writes the message with its checksum to the front of `buf` and returns
    /// what is behind it; `None`, with nothing written, when it does not fit.
    #[must_use = "None says that nothing was written"]
    pub fn emit<'b>(&self, buf: &'b mut [u8]) -> Option<&'b mut [u8]> {
        let (mut head, body) = self.parts();
        head.set_checksum(Sum::of(head.bytes()).with(body).checksum());
        head.emit(body, buf)
    }

    /// The header, checksum still zero, and what follows it.
    fn parts(&self) -> (IcmpHead, &'a [u8]) {
        match *self {
            Self::EchoReply { identifier, sequence, data } => {
                (IcmpHead::halves(Self::ECHO_REPLY, 0, identifier, sequence), data)
            }
            Self::EchoRequest { identifier, sequence, data } => {
                (IcmpHead::halves(Self::ECHO_REQUEST, 0, identifier, sequence), data)
            }
            Self::DestinationUnreachable { code, next_hop_mtu, quote } => {
                (IcmpHead::halves(Self::DESTINATION_UNREACHABLE, code, 0, next_hop_mtu), quote)
            }
            Self::TimeExceeded { code, quote } => {
                (IcmpHead::word(Self::TIME_EXCEEDED, code, 0), quote)
            }
            Self::ParameterProblem { code, pointer, quote } => {
                (IcmpHead::word(Self::PARAMETER_PROBLEM, code, u32::from(pointer) << 24), quote)
            }
            Self::Other { kind, code, body } => (IcmpHead::short(kind, code), body),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ECHO: Icmpv4Message<'static> =
        Icmpv4Message::EchoRequest { identifier: 0x1234, sequence: 7, data: b"abcde" };

    #[test]
    fn every_cut_and_flipped_bit_is_refused() {
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
    fn a_message_shorter_than_its_type_needs_is_refused() {
        for kind in [0, 3, 8, 11, 12] {
            let mut buf = [0; 7];
            let short = Icmpv4Message::Other { kind, code: 0, body: &[1, 2, 3] };
            assert!(short.emit(&mut buf).unwrap().is_empty());
            assert_eq!(Icmpv4Message::parse(&buf), Err(DropReason::IcmpTruncated));
        }
        // Types that hosts ignore are read as they are: source quench, redirect.
        for kind in [4, 5, 9, 13, 40, 255] {
            let mut buf = [0; 4];
            let other = Icmpv4Message::Other { kind, code: 3, body: &[] };
            assert!(other.emit(&mut buf).unwrap().is_empty());
            assert_eq!(Icmpv4Message::parse(&buf), Ok(other));
        }
    }

    #[test]
    fn extensions_behind_a_quote_are_cut() {
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
                panic!("another message: {:?}", Icmpv4Message::parse(&buf));
            };
            assert_eq!(quote.len(), quote_bytes);
        }
    }

    #[test]
    fn a_short_buffer_is_left_alone() {
        let mut short = [0; 12];
        assert!(ECHO.emit(&mut short).is_none());
        assert_eq!(short, [0; 12]);
    }
}
