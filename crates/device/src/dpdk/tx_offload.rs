//! Transmit offload requests: header layout for checksum offload and TSO.

use tidegate_memory::{Checksum, Frame};
use tidegate_wire::checksum::Sum;
use tidegate_wire::{Ipv4Header, Ipv6Header, TcpHeader};

/// Header lengths and protocols, as checksum offload needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderLayout {
    /// Bytes of the Ethernet header, including a VLAN tag.
    pub link_bytes: u8,
    /// Bytes of the IP header, including options and extension headers.
    pub network_bytes: u8,
    /// IPv6; IPv4 if false.
    pub is_v6: bool,
    /// TCP; UDP if false.
    pub is_tcp: bool,
}

/// Offset of the checksum field in the TCP and in the UDP header, in bytes.
const TCP_CHECKSUM_AT: u16 = 16;
const UDP_CHECKSUM_AT: u16 = 6;

/// Header layout of a frame with a partial checksum. Returns `None` if the checksum is not
/// partial or the protocol has no offload.
pub fn checksum_offload(bytes: &[u8], checksum: Checksum) -> Option<HeaderLayout> {
    let Checksum::Partial { start, offset } = checksum else { return None };
    let is_tcp = match offset {
        TCP_CHECKSUM_AT => true,
        UDP_CHECKSUM_AT => false,
        _ => return None,
    };
    let (link_bytes, kind) = match bytes.get(12..18)? {
        [0x81, 0x00, _, _, high, low] => (18, [*high, *low]),
        [high, low, ..] => (14, [*high, *low]),
        _ => return None,
    };
    let is_v6 = match kind {
        [0x08, 0x00] => false,
        [0x86, 0xdd] => true,
        _ => return None,
    };
    let network_bytes = u8::try_from(start.checked_sub(link_bytes)?).ok()?;
    Some(HeaderLayout { link_bytes: link_bytes as u8, network_bytes, is_v6, is_tcp })
}

/// TSO request for one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TsoRequest {
    /// Bytes of the TCP header.
    pub transport_bytes: u8,
    /// TCP payload bytes of each segment.
    pub segment_bytes: u16,
}

/// Maximum bytes of all headers of a TSO frame, as in the C shim: devices get a copy of them.
const MAX_HEADER_BYTES: usize = 256;

/// Offset of the byte with the data offset field in the TCP header.
const TCP_DATA_OFFSET_AT: usize = 12;

/// TSO request for `frame`. Returns `None` if the frame is a single packet, or if its headers
/// are too long or incomplete.
#[inline(never)]
pub fn tso_request(bytes: &[u8], frame: &Frame) -> Option<TsoRequest> {
    let segment_bytes = frame.segment_bytes() as u16;
    if segment_bytes == 0 {
        return None;
    }
    let layout = checksum_offload(bytes, frame.checksum())?;
    let (ipv4_bytes, ipv6_bytes) = (Ipv4Header::BYTES, Ipv6Header::BYTES);
    let min_ip_bytes = if layout.is_v6 { ipv6_bytes } else { ipv4_bytes };
    let tcp_at = usize::from(layout.link_bytes) + usize::from(layout.network_bytes);
    let tcp = bytes.get(tcp_at..)?;
    let transport_bytes = (*tcp.get(TCP_DATA_OFFSET_AT)? >> 4) * 4;
    let is_valid = layout.is_tcp
        && usize::from(layout.network_bytes) >= min_ip_bytes
        && usize::from(transport_bytes) >= TcpHeader::BYTES
        && tcp_at + usize::from(transport_bytes) <= MAX_HEADER_BYTES
        && tcp.len() > usize::from(transport_bytes);
    is_valid.then_some(TsoRequest { transport_bytes, segment_bytes })
}

/// Computes a partial checksum in software, for a device without that offload.
pub fn complete_checksum(bytes: &mut [u8], checksum: Checksum) {
    let Checksum::Partial { start, offset } = checksum else { return };
    let Some(covered) = bytes.get_mut(usize::from(start)..) else { return };
    let sum = Sum::of(covered);
    let value = if offset == UDP_CHECKSUM_AT { sum.udp_checksum() } else { sum.checksum() };
    let at = usize::from(offset);
    if let Some(field) = covered.get_mut(at..at + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_memory::{Arena, ArenaConfig, FrameSize};

    #[test]
    fn completes_partial_checksums_inside_the_frame_only() {
        let mut bytes = [0xaa, 0xaa, 1, 2, 0, 5, 3, 4];
        complete_checksum(&mut bytes, Checksum::Partial { start: 2, offset: 2 });
        assert!(
            Sum::of(&bytes[2..]).with(&[0, 5]).is_valid(),
            "the checksum covers the initial value 5"
        );
        for (start, offset) in [(7, 0), (9, 0), (2, 5), (u16::MAX, u16::MAX)] {
            let before = bytes;
            complete_checksum(&mut bytes, Checksum::Partial { start, offset });
            assert_eq!(bytes, before);
        }
    }

    #[test]
    fn finds_headers_by_family_and_vlan_tag() {
        for (kind, tag, start) in [
            (&[0x08, 0x00][..], false, 34),
            (&[0x86, 0xdd], false, 54),
            (&[0x08, 0x00], true, 38),
            (&[0x86, 0xdd], true, 58),
        ] {
            let mut frame = vec![0; 12];
            frame.extend(if tag { &[0x81, 0x00, 0, 5][..] } else { &[] });
            frame.extend(kind);
            frame.resize(80, 0);
            let is_v6 = kind[0] == 0x86;
            let layers = |offset| checksum_offload(&frame, Checksum::Partial { start, offset });
            let expected = HeaderLayout {
                link_bytes: if tag { 18 } else { 14 },
                network_bytes: if is_v6 { 40 } else { 20 },
                is_v6,
                is_tcp: true,
            };
            assert_eq!(layers(16), Some(expected));
            assert_eq!(layers(6), Some(HeaderLayout { is_tcp: false, ..expected }));
            assert_eq!(layers(2), None, "no checksum offload for ICMP");
        }
    }

    #[test]
    fn requests_tso_only_with_complete_headers() {
        let config = ArenaConfig { frames: 1, frame_size: FrameSize::K4, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        for (kind, start) in [([0x08, 0x00], 34_u16), ([0x86, 0xdd], 54)] {
            let mut bytes = vec![0; 12];
            bytes.extend(kind);
            bytes.resize(usize::from(start) + 32, 0);
            bytes[usize::from(start) + 12] = 8 << 4;
            bytes.push(9);
            let mut cut = |bytes: &[u8], start, offset, segment_bytes| {
                let mut frame = arena.alloc_from(bytes).unwrap();
                frame.set_checksum(Checksum::Partial { start, offset });
                frame.set_segment_bytes(segment_bytes);
                let cut = tso_request(bytes, &frame);
                arena.free(frame);
                cut
            };
            let expected = TsoRequest { transport_bytes: 32, segment_bytes: 1000 };
            assert_eq!(cut(&bytes, start, 16, 1000), Some(expected));
            assert_eq!(cut(&bytes, start, 16, 0), None, "a single packet");
            assert_eq!(cut(&bytes, start, 6, 1000), None, "UDP");
            assert_eq!(cut(&bytes, start - 1, 16, 1000), None, "no space for the IP header");
            for len in 0..bytes.len() {
                assert_eq!(cut(&bytes[..len], start, 16, 1000), None, "{len} bytes");
            }
            bytes[usize::from(start) + 12] = 4 << 4;
            assert_eq!(cut(&bytes, start, 16, 1000), None, "a TCP header of 16 bytes");
        }
    }

    #[test]
    fn complete_checksums_need_no_offload() {
        assert_eq!(checksum_offload(&[0; 80], Checksum::Unknown), None);
        assert_eq!(checksum_offload(&[0; 80], Checksum::Partial { start: 34, offset: 6 }), None);
        assert_eq!(checksum_offload(&[0; 3], Checksum::Partial { start: 34, offset: 6 }), None);
    }
}
