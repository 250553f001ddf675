//! The Internet Control Message Protocol for IPv6 (RFC 4443).

use core::net::Ipv6Addr;

use crate::checksum::{Sum, pseudo_header_v6};
use crate::field::{u16_at, u32_at};
use crate::icmp::{IcmpHeader, quote_without_extensions};
use crate::mld::MldMessage;
use crate::ndp::NdpMessage;
use crate::{DropReason, Ipv6Header, Protocol};

/// Codes of [`Icmpv6Message::DestinationUnreachable`].
pub mod unreachable {
    /// No route to the destination.
    pub const NO_ROUTE: u8 = 0;
    /// Administratively prohibited.
    pub const ADMINISTRATIVELY_PROHIBITED: u8 = 1;
    /// The destination is beyond the scope of the source address.
    pub const BEYOND_SCOPE: u8 = 2;
    /// The address is unreachable.
    pub const ADDRESS: u8 = 3;
    /// No socket is bound to the port.
    pub const PORT: u8 = 4;
    /// The source address violates an ingress or egress policy.
    pub const SOURCE_POLICY: u8 = 5;
    /// A route rejects the destination.
    pub const REJECT_ROUTE: u8 = 6;
}

/// Codes of [`Icmpv6Message::TimeExceeded`].
pub mod time_exceeded {
    /// The hop limit was exceeded in transit.
    pub const IN_TRANSIT: u8 = 0;
    /// Fragment reassembly timed out.
    pub const REASSEMBLY: u8 = 1;
}

/// Codes of [`Icmpv6Message::ParameterProblem`].
pub mod parameter_problem {
    /// A header field has an invalid value.
    pub const HEADER_FIELD: u8 = 0;
    /// The next header type is unknown.
    pub const NEXT_HEADER: u8 = 1;
    /// The packet has an unknown option that requests an ICMP error.
    pub const OPTION: u8 = 2;
    /// The first fragment does not contain the whole header chain (RFC 7112).
    pub const HEADER_CHAIN: u8 = 3;
}

/// ICMPv6 message.
///
/// `quote` is the beginning of the packet that caused an error, from its IP header on; parse it
/// with [`Ipv6Header::parse_quoted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icmpv6Message<'a> {
    /// The packet could not be delivered.
    DestinationUnreachable {
        /// Cause: see [`mod@unreachable`].
        code: u8,
        /// Beginning of the packet.
        quote: &'a [u8],
    },
    /// The packet is too large for a link on the path.
    PacketTooBig {
        /// MTU of that link in bytes.
        mtu: u32,
        /// Beginning of the packet.
        quote: &'a [u8],
    },
    /// The packet's hop limit or reassembly time was exceeded.
    TimeExceeded {
        /// Place of the expiry: see [`mod@time_exceeded`].
        code: u8,
        /// Beginning of the packet.
        quote: &'a [u8],
    },
    /// The packet's header has an invalid or unknown field.
    ParameterProblem {
        /// Cause: see [`mod@parameter_problem`].
        code: u8,
        /// Offset of the first invalid byte in the packet.
        pointer: u32,
        /// Beginning of the packet.
        quote: &'a [u8],
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
    /// Reply to an echo request.
    EchoReply {
        /// Identifier of the request.
        identifier: u16,
        /// Sequence number of the request.
        sequence: u16,
        /// Data of the request.
        data: &'a [u8],
    },
    /// Neighbour discovery message.
    Ndp(NdpMessage<'a>),
    /// Multicast listener discovery message.
    Mld(MldMessage<'a>),
    /// Any other message.
    Other {
        /// ICMPv6 type; types under 128 are errors (RFC 4443 section 2.1).
        kind: u8,
        /// ICMPv6 code.
        code: u8,
        /// Bytes after the checksum.
        body: &'a [u8],
    },
}

impl<'a> Icmpv6Message<'a> {
    /// Header length in bytes of error and echo messages.
    pub const BYTES: usize = 8;

    const DESTINATION_UNREACHABLE: u8 = 1;
    const PACKET_TOO_BIG: u8 = 2;
    const TIME_EXCEEDED: u8 = 3;
    const PARAMETER_PROBLEM: u8 = 4;
    const ECHO_REQUEST: u8 = 128;
    const ECHO_REPLY: u8 = 129;

    /// Parses a message, which is the whole payload of the packet with header `ip`, and verifies
    /// its checksum.
    ///
    /// # Errors
    /// [`DropReason::IcmpTruncated`] when the message is shorter than its type requires,
    /// [`DropReason::IcmpChecksum`] when its checksum is wrong, and the reasons of [`crate::ndp`]
    /// and [`crate::mld`] when a discovery message violates a rule of its RFC.
    pub fn parse(ip: &Ipv6Header, bytes: &'a [u8]) -> Result<Self, DropReason> {
        let (head, body) = bytes.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        if !pseudo_header(ip.source, ip.destination, bytes.len()).with(bytes).is_valid() {
            return Err(DropReason::IcmpChecksum);
        }
        let [kind, code, ..] = *head;
        match kind {
            Self::DESTINATION_UNREACHABLE..=Self::PARAMETER_PROBLEM
            | Self::ECHO_REQUEST
            | Self::ECHO_REPLY => Self::parse_rfc_4443(kind, code, body),
            _ if NdpMessage::is_supported_type(kind) => {
                NdpMessage::parse(ip, kind, code, body).map(Self::Ndp)
            }
            _ if MldMessage::is_supported_type(kind) => {
                MldMessage::parse(ip, kind, body).map(Self::Mld)
            }
            _ => Ok(Self::Other { kind, code, body }),
        }
    }

    /// Parses the messages of RFC 4443: one 32-bit word, then data.
    fn parse_rfc_4443(kind: u8, code: u8, body: &'a [u8]) -> Result<Self, DropReason> {
        let (word, data) = body.split_first_chunk::<4>().ok_or(DropReason::IcmpTruncated)?;
        let (identifier, sequence) = (u16_at(word, 0), u16_at(word, 2));
        Ok(match kind {
            Self::DESTINATION_UNREACHABLE => Self::DestinationUnreachable {
                code,
                quote: quote_without_extensions(data, word[0], 8),
            },
            Self::PACKET_TOO_BIG => Self::PacketTooBig { mtu: u32_at(word, 0), quote: data },
            Self::TIME_EXCEEDED => {
                Self::TimeExceeded { code, quote: quote_without_extensions(data, word[0], 8) }
            }
            Self::PARAMETER_PROBLEM => {
                Self::ParameterProblem { code, pointer: u32_at(word, 0), quote: data }
            }
            Self::ECHO_REQUEST => Self::EchoRequest { identifier, sequence, data },
            _ => Self::EchoReply { identifier, sequence, data },
        })
    }

    /// Returns the length of the message in bytes.
    pub fn message_bytes(&self) -> usize {
        let (head, body) = self.header_and_body();
        head.as_bytes().len() + body.len()
    }

    /// Writes the message with its checksum to the front of `buf` and returns the rest of `buf`;
    /// `None`, with nothing written, when the message does not fit.
    ///
    /// The checksum covers `source` and `destination`, the addresses of the IPv6 header.
    #[must_use = "None means that nothing was written"]
    pub fn emit<'b>(
        &self,
        source: Ipv6Addr,
        destination: Ipv6Addr,
        buf: &'b mut [u8],
    ) -> Option<&'b mut [u8]> {
        let (mut head, body) = self.header_and_body();
        let sum = pseudo_header(source, destination, head.as_bytes().len() + body.len());
        head.set_checksum(sum.with(head.as_bytes()).with(body).checksum());
        head.emit(body, buf)
    }

    /// Returns the header, with a zero checksum, and the body.
    fn header_and_body(&self) -> (IcmpHeader, &'a [u8]) {
        match *self {
            Self::DestinationUnreachable { code, quote } => {
                (IcmpHeader::with_u32(Self::DESTINATION_UNREACHABLE, code, 0), quote)
            }
            Self::PacketTooBig { mtu, quote } => {
                (IcmpHeader::with_u32(Self::PACKET_TOO_BIG, 0, mtu), quote)
            }
            Self::TimeExceeded { code, quote } => {
                (IcmpHeader::with_u32(Self::TIME_EXCEEDED, code, 0), quote)
            }
            Self::ParameterProblem { code, pointer, quote } => {
                (IcmpHeader::with_u32(Self::PARAMETER_PROBLEM, code, pointer), quote)
            }
            Self::EchoRequest { identifier, sequence, data } => {
                (IcmpHeader::with_u16_pair(Self::ECHO_REQUEST, 0, identifier, sequence), data)
            }
            Self::EchoReply { identifier, sequence, data } => {
                (IcmpHeader::with_u16_pair(Self::ECHO_REPLY, 0, identifier, sequence), data)
            }
            Self::Ndp(message) => message.header_and_body(),
            Self::Mld(message) => message.header_and_body(),
            Self::Other { kind, code, body } => (IcmpHeader::type_code_only(kind, code), body),
        }
    }
}

/// Returns the sum of the pseudo-header for a message of `bytes` bytes.
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
    fn rejects_truncation_and_bit_flips() {
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
    fn checksum_covers_addresses() {
        let mut bytes = [0; 13];
        emit(ECHO, &mut bytes);
        let other_destination = Ipv6Header { destination: Ipv6Addr::LOCALHOST, ..ip() };
        assert_eq!(Icmpv6Message::parse(&other_destination, &bytes), Err(DropReason::IcmpChecksum));
    }

    #[test]
    fn rejects_message_shorter_than_its_type_requires() {
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
    fn emit_leaves_short_buffer_unchanged() {
        let mut short = [0; 12];
        assert!(ECHO.emit(ip().source, ip().destination, &mut short).is_none());
        assert_eq!(short, [0; 12]);
    }
}
