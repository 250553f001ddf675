//! The virtio header that `PACKET_VNET_HDR` and `IFF_VNET_HDR` put before each frame.
//!
//! `struct virtio_net_hdr` of virtio 1.2 section 5.1.6: ten bytes in host byte order. On receive
//! the header has the kernel's checksum and GRO metadata; on transmit it requests checksum and
//! segmentation offload from the kernel.

use tidegate_memory::{Checksum, Frame, MAX_SEGMENT_BYTES};
use tidegate_wire::Medium;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 10;

/// Header as raw bytes.
pub type RawHeader = [u8; HEADER_BYTES];

const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;

const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
/// UDP datagrams of one size (`UDP_SEGMENT`).
const GSO_UDP_L4: u8 = 5;
/// CWR flag of the packet (RFC 3168), set on the first segment only.
const GSO_ECN: u8 = 0x80;

/// Offset of the data offset field in a TCP header.
const TCP_DATA_OFFSET_AT: usize = 12;

/// Offload metadata of a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxOffload {
    /// State of the transport checksum.
    pub checksum: Checksum,
    /// The frame stands for several packets, so it may be longer than the MTU: the sender left
    /// segmentation to a device (TSO, GSO), or the kernel coalesced the packets (GRO).
    pub merged: bool,
    /// Payload bytes per packet for TCP segments with a trusted checksum; 0 otherwise.
    pub segment_bytes: u16,
    /// Payload bytes per packet of a merged frame that can be split: TCP segments or UDP datagrams
    /// with a trusted checksum; 0 otherwise.
    pub split_bytes: u16,
}

/// Parses the header of a received frame of `len` bytes.
///
/// A checksum field outside the frame is ignored: the frame's checksum is then
/// [`Checksum::Unknown`].
#[inline]
pub fn decode(raw: &RawHeader, len: usize) -> RxOffload {
    let start = u16::from_ne_bytes([raw[6], raw[7]]);
    let offset = u16::from_ne_bytes([raw[8], raw[9]]);
    let checksum = if raw[0] & NEEDS_CSUM != 0 {
        if usize::from(start) + usize::from(offset) + 2 <= len {
            Checksum::Partial { start, offset }
        } else {
            Checksum::Unknown
        }
    } else if raw[0] & DATA_VALID != 0 {
        Checksum::Verified
    } else {
        Checksum::Unknown
    };
    let is_tcp = matches!(raw[1] & !GSO_ECN, GSO_TCPV4 | GSO_TCPV6);
    let can_split = is_tcp || raw[1] == GSO_UDP_L4;
    let split_bytes = match checksum {
        Checksum::Unknown => 0,
        _ if can_split => u16::from_ne_bytes([raw[4], raw[5]]),
        _ => 0,
    };
    let is_partial = matches!(checksum, Checksum::Partial { .. });
    let fits = usize::from(split_bytes) <= MAX_SEGMENT_BYTES;
    let segment_bytes = if is_tcp && is_partial && fits { split_bytes } else { 0 };
    RxOffload { checksum, merged: raw[1] != 0, segment_bytes, split_bytes }
}

/// Payload bytes of each packet of a received frame that stands for several packets; 0 for a frame
/// that is one packet.
#[cfg(feature = "packet")]
#[inline]
pub fn segment_bytes(raw: &RawHeader) -> u16 {
    if raw[1] == 0 { 0 } else { u16::from_ne_bytes([raw[4], raw[5]]) }
}

/// Makes the header of a frame to send, whose data is `bytes`. Segmentation is for TCP only.
#[inline]
pub fn encode(medium: Medium, frame: &Frame, bytes: &[u8]) -> RawHeader {
    let Checksum::Partial { start, offset } = frame.checksum() else { return [0; HEADER_BYTES] };
    let mut raw = with_checksum(start, offset);
    if frame.segment_bytes() > 0
        && let Some(data_offset) = bytes.get(usize::from(start) + TCP_DATA_OFFSET_AT)
    {
        let headers_bytes = usize::from(start) + usize::from(data_offset >> 4) * 4;
        put_gso(&mut raw, is_v6(medium, bytes), headers_bytes as u16, frame.segment_bytes() as u16);
    }
    raw
}

/// Makes the header of a frame with this partial checksum that stands for TCP segments of
/// `segment_bytes` bytes of payload after `headers_bytes` bytes of headers.
#[cfg(feature = "xdp")]
pub fn encode_segments(
    (start, offset): (u16, u16),
    is_v6: bool,
    headers_bytes: u16,
    segment_bytes: u16,
) -> RawHeader {
    let mut raw = with_checksum(start, offset);
    put_gso(&mut raw, is_v6, headers_bytes, segment_bytes);
    raw
}

/// Header that requests a checksum.
#[inline]
fn with_checksum(start: u16, offset: u16) -> RawHeader {
    let mut raw = [0; HEADER_BYTES];
    raw[0] = NEEDS_CSUM;
    raw[6..8].copy_from_slice(&start.to_ne_bytes());
    raw[8..10].copy_from_slice(&offset.to_ne_bytes());
    raw
}

/// True if the frame `bytes` is IPv6.
fn is_v6(medium: Medium, bytes: &[u8]) -> bool {
    match medium {
        Medium::Ip => bytes.first().is_some_and(|first| first >> 4 == 6),
        // The EtherType precedes the packet, after the VLAN tag if there is one.
        Medium::Ethernet => match bytes.get(12..18) {
            Some([0x81, 0x00, _, _, high, low]) => [*high, *low] == [0x86, 0xdd],
            Some([high, low, ..]) => [*high, *low] == [0x86, 0xdd],
            _ => false,
        },
    }
}

/// Sets the segmentation fields.
fn put_gso(raw: &mut RawHeader, is_v6: bool, headers_bytes: u16, segment_bytes: u16) {
    raw[1] = if is_v6 { GSO_TCPV6 } else { GSO_TCPV4 };
    raw[2..4].copy_from_slice(&headers_bytes.to_ne_bytes());
    raw[4..6].copy_from_slice(&segment_bytes.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidegate_memory::{Arena, ArenaConfig, FrameSize};

    /// Header of a frame of `len` zeros, except for the bytes in `put`.
    fn encoded(
        checksum: Checksum,
        segment_bytes: u16,
        len: usize,
        put: &[(usize, u8)],
    ) -> RawHeader {
        let config = ArenaConfig { frames: 1, frame_size: FrameSize::K4, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let mut bytes = vec![0; len];
        put.iter().for_each(|&(at, byte)| bytes[at] = byte);
        let mut frame = arena.alloc_from(&bytes).unwrap();
        frame.set_checksum(checksum);
        frame.set_segment_bytes(segment_bytes);
        let raw = encode(Medium::Ethernet, &frame, &bytes);
        arena.free(frame);
        raw
    }

    #[test]
    fn decodes_what_it_encodes() {
        let partial = Checksum::Partial { start: 34, offset: 6 };
        let back = |checksum| decode(&encoded(checksum, 0, 60, &[]), 60);
        assert_eq!(back(partial).checksum, partial);
        assert!(!back(partial).merged);
        assert_eq!(back(Checksum::Unknown).checksum, Checksum::Unknown);
        assert_eq!(back(Checksum::Verified).checksum, Checksum::Unknown);
    }

    #[test]
    fn encodes_gso_type_and_segment_size() {
        let length = |at| (at, 8 << 4);
        for (start, put, kind, headers_bytes) in [
            (34, &[(12, 0x08), length(46)][..], GSO_TCPV4, 66_u16),
            (54, &[(12, 0x86), (13, 0xdd), length(66)], GSO_TCPV6, 86),
            (38, &[(12, 0x81), (16, 0x08), length(50)], GSO_TCPV4, 70),
            (58, &[(12, 0x81), (16, 0x86), (17, 0xdd), length(70)], GSO_TCPV6, 90),
        ] {
            let partial = Checksum::Partial { start, offset: 16 };
            let raw = encoded(partial, 1000, 3000, put);
            assert_eq!((raw[0], raw[1]), (NEEDS_CSUM, kind));
            assert_eq!(u16::from_ne_bytes([raw[2], raw[3]]), headers_bytes);
            let expected = RxOffload {
                checksum: partial,
                merged: true,
                segment_bytes: 1000,
                split_bytes: 1000,
            };
            assert_eq!(decode(&raw, 3000), expected);
        }
    }

    #[test]
    fn decodes_verified_and_merged_frames() {
        let mut raw = [0; HEADER_BYTES];
        raw[0] = DATA_VALID;
        let expected = RxOffload {
            checksum: Checksum::Verified,
            merged: false,
            segment_bytes: 0,
            split_bytes: 0,
        };
        assert_eq!(decode(&raw, 60), expected);
        // UDP.
        raw[1] = 5;
        raw[4..6].copy_from_slice(&1000_u16.to_ne_bytes());
        let split = RxOffload { merged: true, split_bytes: 1000, ..expected };
        assert_eq!(decode(&raw, 60), split);
        // TCP: kept whole only with a checksum that the device can complete for each segment.
        raw[1] = GSO_TCPV4;
        assert_eq!(decode(&raw, 60), split);
        // A checksum that nothing vouches for.
        raw[0] = 0;
        let unknown = RxOffload { checksum: Checksum::Unknown, split_bytes: 0, ..split };
        assert_eq!(decode(&raw, 60), unknown);
    }

    proptest! {
        #[test]
        fn a_partial_checksum_always_lies_inside_the_frame(raw: RawHeader, len in 0usize..2048) {
            let received = decode(&raw, len);
            if let Checksum::Partial { start, offset } = received.checksum {
                prop_assert!(usize::from(start) + usize::from(offset) + 2 <= len);
            }
            prop_assert!(usize::from(received.segment_bytes) <= MAX_SEGMENT_BYTES);
        }
    }
}
