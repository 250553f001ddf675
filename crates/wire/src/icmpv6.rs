//! The Internet Control Message Protocol for IPv6 (RFC 4443).

use core::net::Ipv6Addr;

use crate::checksum::{Sum, pseudo_header_v6};
use crate::field::{u16_at, u32_at};
use crate::icmp::{IcmpHead, quote_of};
use crate::mld::MldMessage;
use crate::ndp::NdpMessage;
use crate::{DropReason, Ipv6Header, Protocol};

/// Codes of [`Icmpv6Message::DestinationUnreachable`].
pub mod unreachable {
    /// No route to the destination.
    pub const NO_ROUTE: u8 = 0;
    /// Forbidden by an administrator.
    pub const ADMINISTRATIVELY_PROHIBITED: u8 = 1;
    /// The destination is beyond the scope of the source address.
    pub const BEYOND_SCOPE: u8 = 2;
    /// No way to the address.
    pub const ADDRESS: u8 = 3;
    /// Nobody listens on the port.
    pub const PORT: u8 = 4;
}

/// Codes of [`Icmpv6Message::TimeExceeded`].
pub mod time_exceeded {
    /// The hop limit ran out on the way.
    pub const IN_TRANSIT: u8 = 0;
    /// Fragments were missing when the time was up.
    pub const REASSEMBLY: u8 = 1;
}

/// Codes of [`Icmpv6Message::ParameterProblem`].
pub mod parameter_problem {
    /// A field of a header has a wrong value.
    pub const HEADER_FIELD: u8 = 0;
    /// The next header is unknown.
    pub const NEXT_HEADER: u8 = 1;
    /// An option is unknown and asks to be told.
    pub const OPTION: u8 = 2;
    /// The first fragment does not hold the whole header chain (RFC 7112).
    pub const HEADER_CHAIN: u8 = 3;
}

/// An ICMPv6 message.
///
/// `quote` is the beginning of the packet that caused an error, from its IP
/// header on; read it with [`Ipv6Header::parse_quoted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmpv6Message<'a> {
    /// The packet could not be delivered.
    DestinationUnreachable {
        /// Why: see [`mod@unreachable`].
        code: u8,
        /// The packet.
        quote: &'a [u8],
    },
    /// The packet is too large for a link on the way.
    PacketTooBig {
        /// The MTU of that link in bytes.
        mtu: u32,
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
        /// What is wrong: see [`mod@parameter_problem`].
        code: u8,
        /// The place of the first wrong byte in the packet.
        pointer: u32,
        /// The packet.
        quote: &'a [u8],
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
    /// An answer to an echo request.
    EchoReply {
        /// As in the request.
        identifier: u16,
        /// As in the request.
        sequence: u16,
        /// As in the request.
        data: &'a [u8],
    },
    /// A neighbour discovery message.
    Ndp(NdpMessage<'a>),
    /// A multicast listener discovery message.
    Mld(MldMessage<'a>),
    /// Any other message.
    Other {
        /// Its type; under 128 it is an error (RFC 4443 section 2.1).
        kind: u8,
        /// Its code.
        code: u8,
        /// What stands behind the checksum.
        body: &'a [u8],
    },
}

impl<'a> Icmpv6Message<'a> {
    /// The length of the header of errors and echoes.
    pub const BYTES: usize = 8;

    const DESTINATION_UNREACHABLE: u8 = 1;
    const PACKET_TOO_BIG: u8 = 2;
    const TIME_EXCEEDED: u8 = 3;
    const PARAMETER_PROBLEM: u8 = 4;
    const ECHO_REQUEST: u8 = 128;
    const ECHO_REPLY: u8 = 129;

    /// Reads a message, the whole payload of the packet with header `ip`, and
    /// checks its checksum.
    ///
    /// # Errors
    /// When it is shorter than its type needs, the checksum is wrong, or it
    /// breaks a rule of neighbour or listener discovery.
    pub fn parse(ip: &Ipv6Header, bytes: &'a [u8]) -> Result<Self, DropReason> {
        let (head, body) = bytes.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        if !pseudo_header(ip.source, ip.destination, bytes.len()).with(bytes).is_valid() {
            return Err(DropReason::IcmpChecksum);
        }
        let [kind, code, ..] = *head;
        match kind {
            Self::DESTINATION_UNREACHABLE..=Self::PARAMETER_PROBLEM
            | Self::ECHO_REQUEST
            | Self::ECHO_REPLY => Self::parse_word(kind, code, body),
            _ if NdpMessage::has_type(kind) => {
                NdpMessage::parse(ip, kind, code, body).map(Self::Ndp)
            }
            _ if MldMessage::has_type(kind) => MldMessage::parse(ip, kind, body).map(Self::Mld),
            _ => Ok(Self::Other { kind, code, body }),
        }
    }

    /// Reads the messages of RFC 4443: one word, then data.
    fn parse_word(kind: u8, code: u8, body: &'a [u8]) -> Result<Self, DropReason> {
        let (word, data) = body.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        let (identifier, sequence) = (u16_at(word, 0), u16_at(word, 2));
        Ok(match kind {
            Self::DESTINATION_UNREACHABLE => {
                Self::DestinationUnreachable { code, quote: quote_of(data, word[0], 8) }
            }
            Self::PACKET_TOO_BIG => Self::PacketTooBig { mtu: u32_at(word, 0), quote: data },
            Self::TIME_EXCEEDED => Self::TimeExceeded { code, quote: quote_of(data, word[0], 8) },
            Self::PARAMETER_PROBLEM => {
                Self::ParameterProblem { code, pointer: u32_at(word, 0), quote: data }
            }
            Self::ECHO_REQUEST => Self::EchoRequest { identifier, sequence, data },
            _ => Self::EchoReply { identifier, sequence, data },
        })
    }

    /// The length of the message in bytes.
    pub fn message_bytes(&self) -> usize {
        let (head, body) = self.parts();
        head.bytes().len() + body.len()
    }

    /// Writes the message, to be sent between these addresses, with its
    /// checksum to the front of `buf` and returns what is behind it; `None`,
    /// with nothing written, when it does not fit.
    #[must_use = "None says that nothing was written"]
    pub fn emit<'b>(
        &self,
        source: Ipv6Addr,
        destination: Ipv6Addr,
        buf: &'b mut [u8],
    ) -> Option<&'b mut [u8]> {
        let (mut head, body) = self.parts();
        let sum = pseudo_header(source, destination, head.bytes().len() + body.len());
        head.set_checksum(sum.with(head.bytes()).with(body).checksum());
        head.emit(body, buf)
    }

    /// The header, checksum still zero, and what follows it.
    fn parts(&self) -> (IcmpHead, &'a [u8]) {
        match *self {
            Self::DestinationUnreachable { code, quote } => {
                (IcmpHead::word(Self::DESTINATION_UNREACHABLE, code, 0), quote)
            }
            Self::PacketTooBig { mtu, quote } => {
                (IcmpHead::word(Self::PACKET_TOO_BIG, 0, mtu), quote)
            }
            Self::TimeExceeded { code, quote } => {
                (IcmpHead::word(Self::TIME_EXCEEDED, code, 0), quote)
            }
            Self::ParameterProblem { code, pointer, quote } => {
                (IcmpHead::word(Self::PARAMETER_PROBLEM, code, pointer), quote)
            }
            Self::EchoRequest { identifier, sequence, data } => {
                (IcmpHead::halves(Self::ECHO_REQUEST, 0, identifier, sequence), data)
            }
            Self::EchoReply { identifier, sequence, data } => {
                (IcmpHead::halves(Self::ECHO_REPLY, 0, identifier, sequence), data)
            }
            Self::Ndp(message) => message.parts(),
            Self::Mld(message) => message.parts(),
            Self::Other { kind, code, body } => (IcmpHead::short(kind, code), body),
        }
    }
}

/// The sum of the pseudo-header of a message of `bytes` bytes.
fn pseudo_header(source: Ipv6Addr, destination: Ipv6Addr, bytes: usize) -> Sum {
    pseudo_header_v6(source, destination, Protocol::ICMPV6, bytes as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip() -> Ipv6Header {
        let (source, destination) =
            ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
        Ipv6Header::new(source, destination, Protocol::ICMPV6, 0).unwrap()
    }

    const ECHO: Icmpv6Message<'static> =
        Icmpv6Message::EchoRequest { identifier: 0x1234, sequence: 7, data: b"abcde" };

    fn emit(message: Icmpv6Message<'_>, buf: &mut [u8]) {
        assert!(message.emit(ip().source, ip().destination, buf).unwrap().is_empty());
    }

    #[test]
    fn every_cut_and_flipped_bit_is_refused() {
        let mut bytes = [0; 13];
        emit(ECHO, &mut bytes);
        assert_eq!(Icmpv6Message::parse(&ip(), &bytes), Ok(ECHO));
        for cut in 0..13 {
            let reason = if cut < 4 { DropReason::IcmpTruncated } else { DropReason::IcmpChecksum };
            assert_eq!(Icmpv6Message::parse(&ip(), &bytes[..cut]), Err(reason));
        }
        for bit in 0..104 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            let refused = Icmpv6Message::parse(&ip(), &bad);
            assert_eq!(refused, Err(DropReason::IcmpChecksum), "bit {bit}");
        }
    }

    #[test]
    fn the_checksum_covers_the_addresses() {
        let mut bytes = [0; 13];
        emit(ECHO, &mut bytes);
        let elsewhere = Ipv6Header { destination: Ipv6Addr::LOCALHOST, ..ip() };
        assert_eq!(Icmpv6Message::parse(&elsewhere, &bytes), Err(DropReason::IcmpChecksum));
    }

    #[test]
    fn a_message_shorter_than_its_type_needs_is_refused() {
        for kind in [1, 2, 3, 4, 128, 129] {
            let mut buf = [0; 7];
            emit(Icmpv6Message::Other { kind, code: 0, body: &[1, 2, 3] }, &mut buf);
            assert_eq!(Icmpv6Message::parse(&ip(), &buf), Err(DropReason::IcmpTruncated));
        }
        for kind in [0, 100, 127, 131, 132, 138, 255] {
            let mut buf = [0; 4];
            let other = Icmpv6Message::Other { kind, code: 3, body: &[] };
            emit(other, &mut buf);
            assert_eq!(Icmpv6Message::parse(&ip(), &buf), Ok(other));
        }
    }

    #[test]
    fn a_short_buffer_is_left_alone() {
        let mut short = [0; 12];
        assert!(ECHO.emit(ip().source, ip().destination, &mut short).is_none());
        assert_eq!(short, [0; 12]);
    }
}
