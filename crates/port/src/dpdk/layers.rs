//! Where the headers of a frame are, for a device that sums checksums.

use tidegate_memory::{Checksum, Frame};
use tidegate_wire::checksum::Sum;
use tidegate_wire::{Ipv4Header, Ipv6Header, TcpHeader};

/// Where a sum begins, and of what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Bytes of the Ethernet header and its tag.
    pub link_bytes: u8,
    /// Bytes of the IP header and its extensions.
    pub network_bytes: u8,
    /// IPv6.
    pub is_v6: bool,
    /// TCP; else UDP.
    pub is_tcp: bool,
}

/// Where the checksum stands in a TCP and in a UDP header.
const TCP_OFFSET: u16 = 16;
const UDP_OFFSET: u16 = 6;

/// What the device has to sum in this frame; `None` when there is nothing, or
/// when it is nothing that a device knows.
pub fn to_sum(bytes: &[u8], checksum: Checksum) -> Option<Layers> {
    let Checksum::Partial { start, offset } = checksum else { return None };
    let is_tcp = match offset {
        TCP_OFFSET => true,
        UDP_OFFSET => false,
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
    Some(Layers { link_bytes: link_bytes as u8, network_bytes, is_v6, is_tcp })
}

/// How to cut a frame into TCP segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of the TCP header.
    pub transport_bytes: u8,
    /// Bytes of data in each segment.
    pub segment_bytes: u16,
}

/// Devices get a copy of the headers; as in the shim.
const HEADERS_BYTES_MAX: usize = 256;

/// The byte of a TCP header that tells how long it is.
const TCP_LENGTH_AT: usize = 12;

/// How the device has to cut this frame of these bytes; `None` if it stands for one
/// packet, or if its headers are too long or not all there.
#[inline(never)]
pub fn to_cut(bytes: &[u8], frame: &Frame) -> Option<Cut> {
    let segment_bytes = frame.segment_bytes() as u16;
    if segment_bytes == 0 {
        return None;
    }
    let layers = to_sum(bytes, frame.checksum())?;
    let (ipv4_bytes, ipv6_bytes) = (Ipv4Header::BYTES, Ipv6Header::BYTES);
    let least = if layers.is_v6 { ipv6_bytes } else { ipv4_bytes };
    let tcp_at = usize::from(layers.link_bytes) + usize::from(layers.network_bytes);
    let tcp = bytes.get(tcp_at..)?;
    let transport_bytes = (*tcp.get(TCP_LENGTH_AT)? >> 4) * 4;
    let is_whole = layers.is_tcp
        && usize::from(layers.network_bytes) >= least
        && usize::from(transport_bytes) >= TcpHeader::BYTES
        && tcp_at + usize::from(transport_bytes) <= HEADERS_BYTES_MAX
        && tcp.len() > usize::from(transport_bytes);
    is_whole.then_some(Cut { transport_bytes, segment_bytes })
}

/// Sums what is partial, for a device that does not.
pub fn complete(bytes: &mut [u8], checksum: Checksum) {
    let Checksum::Partial { start, offset } = checksum else { return };
    let Some(covered) = bytes.get_mut(usize::from(start)..) else { return };
    let sum = Sum::of(covered);
    let value = if offset == UDP_OFFSET { sum.udp_checksum() } else { sum.checksum() };
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
    fn a_partial_sum_is_completed_inside_the_frame_only() {
        let mut bytes = [0xaa, 0xaa, 1, 2, 0, 5, 3, 4];
        complete(&mut bytes, Checksum::Partial { start: 2, offset: 2 });
        assert!(Sum::of(&bytes[2..]).with(&[0, 5]).is_valid(), "the 5 was in the field");
        for (start, offset) in [(7, 0), (9, 0), (2, 5), (u16::MAX, u16::MAX)] {
            let before = bytes;
            complete(&mut bytes, Checksum::Partial { start, offset });
            assert_eq!(bytes, before);
        }
    }

    #[test]
    fn headers_are_found_by_family_and_tag() {
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
            let layers = |offset| to_sum(&frame, Checksum::Partial { start, offset });
            let expected = Layers {
                link_bytes: if tag { 18 } else { 14 },
                network_bytes: if is_v6 { 40 } else { 20 },
                is_v6,
                is_tcp: true,
            };
            assert_eq!(layers(16), Some(expected));
            assert_eq!(layers(6), Some(Layers { is_tcp: false, ..expected }));
            assert_eq!(layers(2), None, "no device sums ICMP");
        }
    }

    #[test]
    fn a_frame_is_cut_if_its_headers_are_whole() {
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
                let cut = to_cut(bytes, &frame);
                arena.free(frame);
                cut
            };
            let expected = Cut { transport_bytes: 32, segment_bytes: 1000 };
            assert_eq!(cut(&bytes, start, 16, 1000), Some(expected));
            assert_eq!(cut(&bytes, start, 16, 0), None, "one packet");
            assert_eq!(cut(&bytes, start, 6, 1000), None, "UDP");
            assert_eq!(cut(&bytes, start - 1, 16, 1000), None, "no room for the IP header");
            for len in 0..bytes.len() {
                assert_eq!(cut(&bytes[..len], start, 16, 1000), None, "{len} bytes");
            }
            bytes[usize::from(start) + 12] = 4 << 4;
            assert_eq!(cut(&bytes, start, 16, 1000), None, "a TCP header of 16 bytes");
        }
    }

    #[test]
    fn what_is_complete_is_left_alone() {
        assert_eq!(to_sum(&[0; 80], Checksum::Unknown), None);
        assert_eq!(to_sum(&[0; 80], Checksum::Partial { start: 34, offset: 6 }), None);
        assert_eq!(to_sum(&[0; 3], Checksum::Partial { start: 34, offset: 6 }), None);
    }
}
