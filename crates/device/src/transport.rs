//! UDP and TCP headers in received frames, for the work that a NIC would do: checksum offload
//! and segmentation offload.
//!
//! A sender on this machine leaves both to its device. A veth and similar devices do neither, so
//! the frames arrive with an unfilled checksum, and many packets in one frame.

use tidegate_memory::Checksum;
use tidegate_wire::ipv6_extension::Extension;
use tidegate_wire::{
    EtherType, EthernetHeader, ExtensionWalk, Ipv4Header, Ipv6Header, Medium, Protocol, Sum,
    TcpHeader, UdpHeader, checksum,
};

/// Offset of the checksum field in the TCP and in the UDP header, in bytes.
const TCP_CHECKSUM_AT: usize = 16;
const UDP_CHECKSUM_AT: usize = 6;

/// Position of the UDP or TCP header in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportLayout {
    /// Offset of the IP header.
    pub ip_at: usize,
    /// IPv6; IPv4 if false.
    pub is_v6: bool,
    /// Offset of the UDP or TCP header.
    pub transport_at: usize,
    /// TCP; UDP if false.
    pub is_tcp: bool,
    /// End of the IP packet by its length field; may be past the frame.
    pub end: usize,
    /// Sum of the pseudo-header without the length.
    addresses: Sum,
}

impl TransportLayout {
    /// Parses the headers of an Ethernet frame. `None` for anything but UDP and TCP, and for
    /// fragments.
    #[inline]
    pub fn parse(frame: &[u8]) -> Option<Self> {
        Self::parse_plain(frame).or_else(|| Self::parse_any(frame))
    }

    /// As [`TransportLayout::parse`], for a frame of any medium.
    pub fn parse_on(medium: Medium, frame: &[u8]) -> Option<Self> {
        match (medium, frame.first()? >> 4) {
            (Medium::Ethernet, _) => Self::parse(frame),
            (Medium::Ip, 4) => Self::parse_v4(0, frame),
            (Medium::Ip, 6) => Self::parse_v6(0, frame),
            (Medium::Ip, _) => None,
        }
    }

    /// Parses an untagged frame without IP options and extension headers: nearly every frame.
    #[inline]
    fn parse_plain(frame: &[u8]) -> Option<Self> {
        const IP_AT: usize = EthernetHeader::BYTES;
        let head = frame.first_chunk::<{ IP_AT + Ipv6Header::BYTES }>()?;
        let word = |at| u64::from_ne_bytes(std::array::from_fn(|byte| head[at + byte]));
        let half = |at| usize::from(u16::from_be_bytes([head[at], head[at + 1]]));
        match [head[12], head[13], head[14]] {
            [0x08, 0x00, 0x45] if half(20) & 0x3fff == 0 => Some(Self {
                ip_at: IP_AT,
                is_v6: false,
                transport_at: IP_AT + Ipv4Header::BYTES,
                is_tcp: is_tcp(Protocol(head[23]))?,
                end: IP_AT + half(16),
                addresses: Sum::of_words([word(26)]).with_u16(head[23].into()),
            }),
            [0x86, 0xdd, 0x60..=0x6f] => Some(Self {
                ip_at: IP_AT,
                is_v6: true,
                transport_at: IP_AT + Ipv6Header::BYTES,
                is_tcp: is_tcp(Protocol(head[20]))?,
                end: IP_AT + Ipv6Header::BYTES + half(18),
                addresses: Sum::of_words([word(22), word(30), word(38), word(46)])
                    .with_u16(head[20].into()),
            }),
            _ => None,
        }
    }

    #[inline(never)]
    fn parse_any(frame: &[u8]) -> Option<Self> {
        let (ethernet, packet) = EthernetHeader::parse(frame).ok()?;
        let ip_at = ethernet.header_bytes();
        match ethernet.ethertype {
            EtherType::IPV4 => Self::parse_v4(ip_at, packet),
            EtherType::IPV6 => Self::parse_v6(ip_at, packet),
            _ => None,
        }
    }

    #[inline]
    fn parse_v4(ip_at: usize, packet: &[u8]) -> Option<Self> {
        let (ip, _) = Ipv4Header::parse_quoted(packet).ok()?;
        if ip.is_fragment() {
            return None;
        }
        Some(Self {
            ip_at,
            is_v6: false,
            transport_at: ip_at + usize::from(ip.header_bytes),
            is_tcp: is_tcp(ip.protocol)?,
            end: ip_at + usize::from(ip.total_bytes),
            addresses: checksum::pseudo_header_v4(ip.source, ip.destination, ip.protocol, 0),
        })
    }

    #[inline]
    fn parse_v6(ip_at: usize, packet: &[u8]) -> Option<Self> {
        let (ip, payload) = Ipv6Header::parse_quoted(packet).ok()?;
        let mut extensions = ExtensionWalk::new(ip.next_header, payload);
        for extension in extensions.by_ref() {
            match extension.ok()? {
                // The pseudo-header has the last destination, which another header names.
                Extension::Routing(routing) if routing.segments_left > 0 => return None,
                Extension::Fragment(_) => return None,
                _ => {}
            }
        }
        let upper = extensions.remainder();
        let (from, to) = (ip.source, ip.destination);
        Some(Self {
            ip_at,
            is_v6: true,
            transport_at: ip_at + upper.offset_bytes,
            is_tcp: is_tcp(upper.protocol)?,
            end: ip_at + Ipv6Header::BYTES + usize::from(ip.payload_bytes),
            addresses: checksum::pseudo_header_v6(from, to, upper.protocol, 0),
        })
    }

    /// Offset of the checksum field in the UDP or TCP header.
    pub fn checksum_offset(&self) -> usize {
        if self.is_tcp { TCP_CHECKSUM_AT } else { UDP_CHECKSUM_AT }
    }

    /// Checksum field that a sender leaves for its device to fill in: the sum of the pseudo-header
    /// for `bytes` bytes of transport header and payload.
    #[inline]
    pub fn unfilled_field(&self, bytes: usize) -> [u8; 2] {
        self.addresses.with_u32(bytes as u32).fold().to_be_bytes()
    }

    /// Length of the UDP or TCP header; `None` if the frame ends inside the header.
    pub fn transport_header_bytes(&self, frame: &[u8]) -> Option<usize> {
        let transport = frame.get(self.transport_at..)?;
        if self.is_tcp {
            let header = TcpHeader::parse_quoted(transport).ok()?;
            (header.header_bytes as usize >= TcpHeader::BYTES).then_some(header.header_bytes.into())
        } else {
            (transport.len() >= UdpHeader::BYTES).then_some(UdpHeader::BYTES)
        }
    }

    /// Checksum state of a frame whose transport checksum is still to be filled in.
    pub fn partial_checksum(&self) -> Checksum {
        Checksum::Partial { start: self.transport_at as u16, offset: self.checksum_offset() as u16 }
    }

    /// True if the checksum field holds the sum of the pseudo-header only.
    #[inline]
    pub fn is_unfilled(&self, frame: &[u8]) -> bool {
        let Some(transport) = frame.get(self.transport_at..self.end) else { return false };
        let field = transport.get(self.checksum_offset()..).and_then(|rest| rest.first_chunk());
        field == Some(&self.unfilled_field(transport.len()))
    }
}

/// Returns true for TCP, false for UDP, `None` for other protocols.
#[inline]
fn is_tcp(protocol: Protocol) -> Option<bool> {
    match protocol {
        Protocol::TCP => Some(true),
        Protocol::UDP => Some(false),
        _ => None,
    }
}

/// Checksum state of a frame whose sender may be on this machine: partial if the checksum field
/// is unfilled, otherwise unknown.
///
/// A frame from elsewhere, damaged on its way, passes for a frame of this machine as rarely as it
/// passes the checksum.
#[inline]
pub fn local_checksum(frame: &[u8]) -> Checksum {
    match TransportLayout::parse(frame) {
        Some(layout) if layout.is_unfilled(frame) => layout.partial_checksum(),
        _ => Checksum::Unknown,
    }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;
    use tidegate_wire::{MacAddr, VlanTag};

    use super::*;

    /// Frame with an unfilled checksum.
    #[derive(Clone, Copy, Debug)]
    pub struct Shape {
        pub is_v6: bool,
        pub is_tcp: bool,
        pub tagged: bool,
        /// Bytes of IPv6 extension headers or of IPv4 options, a multiple of eight.
        pub extra_bytes: usize,
        pub payload_bytes: usize,
    }

    impl Shape {
        pub fn all() -> impl Iterator<Item = Shape> {
            (0..16).map(|bits| Shape {
                is_v6: bits & 1 != 0,
                is_tcp: bits & 2 != 0,
                tagged: bits & 4 != 0,
                extra_bytes: if bits & 8 != 0 { 8 } else { 0 },
                payload_bytes: 100,
            })
        }

        pub fn transport_at(self) -> usize {
            14 + if self.tagged { 4 } else { 0 }
                + if self.is_v6 { 40 } else { 20 }
                + self.extra_bytes
        }

        pub fn headers_bytes(self) -> usize {
            self.transport_at() + if self.is_tcp { 32 } else { 8 }
        }

        /// Frame with payload bytes that count up.
        pub fn frame(self) -> Vec<u8> {
            let mut frame = vec![0; self.headers_bytes() + self.payload_bytes];
            let transport_bytes = frame.len() - self.transport_at();
            let ethernet = EthernetHeader {
                destination: MacAddr([2, 0, 0, 0, 0, 1]),
                source: MacAddr([2, 0, 0, 0, 0, 2]),
                vlan: self.tagged.then(|| VlanTag::new(7)),
                ethertype: if self.is_v6 { EtherType::IPV6 } else { EtherType::IPV4 },
            };
            let protocol = if self.is_tcp { Protocol::TCP } else { Protocol::UDP };
            let packet = ethernet.emit(&mut frame).unwrap();
            let (v4, v6) = (["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]);
            let pseudo = if self.is_v6 {
                let [from, to] = v6.map(|address| address.parse().unwrap());
                let mut ip =
                    Ipv6Header::new(from, to, protocol, self.extra_bytes + transport_bytes)
                        .unwrap();
                if self.extra_bytes > 0 {
                    ip.next_header = Protocol::HOP_BY_HOP;
                }
                let rest = ip.emit(packet).unwrap();
                if self.extra_bytes > 0 {
                    // PadN.
                    rest[..4].copy_from_slice(&[protocol.0, self.extra_bytes as u8 / 8 - 1, 1, 4]);
                }
                checksum::pseudo_header_v6(from, to, protocol, transport_bytes as u32)
            } else {
                let [from, to] = v4.map(|address| address.parse().unwrap());
                let mut ip =
                    Ipv4Header::new(from, to, protocol, self.extra_bytes + transport_bytes)
                        .unwrap();
                ip.header_bytes += self.extra_bytes as u8;
                packet[20..20 + self.extra_bytes].fill(1);
                ip.emit(packet).unwrap();
                checksum::pseudo_header_v4(from, to, protocol, transport_bytes as u16)
            };
            let headers_bytes = self.headers_bytes();
            let (headers, payload) = frame.split_at_mut(headers_bytes);
            let transport = &mut headers[self.transport_at()..];
            transport[..4].copy_from_slice(&[0x30, 0x39, 0, 7]);
            let field_at = if self.is_tcp {
                transport[4..8].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
                (transport[12], transport[13]) = (8 << 4, 0x99);
                transport[20..].fill(1);
                16
            } else {
                transport[4..6].copy_from_slice(&(transport_bytes as u16).to_be_bytes());
                6
            };
            transport[field_at..field_at + 2].copy_from_slice(&pseudo.fold().to_be_bytes());
            (0..payload.len()).for_each(|at| payload[at] = (at % 251) as u8);
            frame
        }
    }

    #[test]
    fn unfilled_checksums_are_partial_and_others_unknown() {
        for shape in Shape::all() {
            let mut frame = shape.frame();
            let start = shape.transport_at();
            let offset = if shape.is_tcp { 16 } else { 6 };
            let partial = Checksum::Partial { start: start as u16, offset: offset as u16 };
            assert_eq!(local_checksum(&frame), partial, "{shape:?}");
            frame.extend([0; 9]);
            assert_eq!(local_checksum(&frame), partial, "{shape:?} with padding");
            frame.truncate(frame.len() - 10);
            assert_eq!(local_checksum(&frame), Checksum::Unknown, "{shape:?} truncated");
            let mut frame = shape.frame();
            frame[start + offset] ^= 1;
            assert_eq!(local_checksum(&frame), Checksum::Unknown, "{shape:?} other field");
        }
    }

    #[test]
    fn plain_frames_are_parsed_like_any() {
        let mut plain = 0;
        for shape in Shape::all() {
            let frame = shape.frame();
            let expected = TransportLayout::parse_any(&frame).unwrap();
            let Some(layout) = TransportLayout::parse_plain(&frame) else { continue };
            plain += 1;
            let fields =
                |layout: TransportLayout| (layout.unfilled_field(77), layout.addresses.fold());
            assert_eq!(fields(layout), fields(expected), "{shape:?}");
            let with_sum = TransportLayout { addresses: expected.addresses, ..layout };
            assert_eq!(with_sum, expected);
        }
        assert_eq!(plain, 4, "two families, two protocols");
    }

    #[test]
    fn fragments_are_not_partial() {
        let shape = Shape::all().next().unwrap();
        for flags in [[0x20, 0], [0, 1]] {
            let mut frame = shape.frame();
            frame[20..22].copy_from_slice(&flags);
            assert_eq!(local_checksum(&frame), Checksum::Unknown);
        }
    }

    proptest! {
        #[test]
        fn a_partial_checksum_lies_inside_any_frame(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Checksum::Partial { start, offset } = local_checksum(&bytes) {
                prop_assert!(usize::from(start + offset) + 2 <= bytes.len());
            }
        }
    }
}
