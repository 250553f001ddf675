//! Coalescing in software: one frame for consecutive TCP segments of one connection, which the kernel
//! or a NIC segments again. The reverse of `segments`.

use tidegate_wire::{Sum, TcpFlags};

use crate::segments::{TCP_FLAGS_AT, TCP_SEQUENCE_AT, put_u16, sequence_at, u16_at};
use crate::transport::TransportLayout;
use crate::vnet;

/// Longest headers that are coalesced, in bytes: Ethernet with a VLAN tag, IPv6, TCP with all options.
const MAX_HEADERS_BYTES: usize = 18 + 40 + 60;
/// Longest IP packet that stands for several.
const MAX_PACKET_BYTES: usize = u16::MAX as usize;
/// Flags that only the last segment may have, and the flag that all have.
const LAST_FLAGS: u8 = TcpFlags::FIN.0 | TcpFlags::PSH.0;
const COMMON_FLAGS: u8 = TcpFlags::ACK.0;

/// Consecutive TCP segments that one frame can stand for: their headers and the length of their
/// payload.
#[derive(Clone, Copy, Debug)]
pub struct CoalescedSegments {
    layout: TransportLayout,
    /// Headers of the first segment, with the flags of the last.
    headers: [u8; MAX_HEADERS_BYTES],
    headers_bytes: usize,
    /// Payload bytes of each segment; the last may have less.
    segment_bytes: usize,
    payload_bytes: usize,
    /// Nothing may follow the last segment: it is shorter than the others, or has a flag that only
    /// the last may have.
    is_complete: bool,
}

impl CoalescedSegments {
    /// Begins with a first segment. `None` for anything but a TCP segment with payload whose flags
    /// all segments can have.
    pub fn begin(frame: &[u8]) -> Option<Self> {
        let layout = TransportLayout::parse(frame).filter(|layout| layout.is_tcp)?;
        let headers_bytes = layout.transport_at + layout.transport_header_bytes(frame)?;
        let flags = *frame.get(layout.transport_at + TCP_FLAGS_AT)?;
        let is_whole = layout.end == frame.len() && headers_bytes < frame.len();
        if !is_whole || flags & !LAST_FLAGS != COMMON_FLAGS {
            return None;
        }
        let mut headers = [0; MAX_HEADERS_BYTES];
        headers.get_mut(..headers_bytes)?.copy_from_slice(&frame[..headers_bytes]);
        let payload_bytes = frame.len() - headers_bytes;
        Some(Self {
            layout,
            headers,
            headers_bytes,
            segment_bytes: payload_bytes,
            payload_bytes,
            is_complete: flags & LAST_FLAGS != 0,
        })
    }

    /// Adds the next segment. Returns false, changing nothing, if `frame` is not that.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        let (headers_bytes, transport_at) = (self.headers_bytes, self.layout.transport_at);
        let Some((headers, payload)) = frame.split_at_checked(headers_bytes) else { return false };
        let packet_bytes = headers_bytes - self.layout.ip_at + self.payload_bytes + payload.len();
        let is_next = !self.is_complete
            && !payload.is_empty()
            && payload.len() <= self.segment_bytes
            && packet_bytes <= MAX_PACKET_BYTES
            && sequence_at(&headers[transport_at..])
                == sequence_at(&self.headers[transport_at..])
                    .wrapping_add(self.payload_bytes as u32)
            && self.has_same_headers(headers)
            && self.ip_bytes(headers) == frame.len() - self.layout.ip_at;
        if !is_next {
            return false;
        }
        let flags = headers[transport_at + TCP_FLAGS_AT];
        self.headers[transport_at + TCP_FLAGS_AT] = flags;
        self.payload_bytes += payload.len();
        self.is_complete = flags & LAST_FLAGS != 0 || payload.len() < self.segment_bytes;
        true
    }

    /// True if the headers differ only where those of successive segments do: length,
    /// identification and checksum of the IP header; sequence number, checksum and
    /// [`LAST_FLAGS`] of the TCP header.
    fn has_same_headers(&self, headers: &[u8]) -> bool {
        let TransportLayout { ip_at, transport_at, is_v6, .. } = self.layout;
        let own = &self.headers[..self.headers_bytes];
        let is_same = |from: usize, to: usize| own[from..to] == headers[from..to];
        let is_same_ip = match is_v6 {
            true => is_same(ip_at, ip_at + 4) && is_same(ip_at + 6, transport_at),
            false => {
                is_same(ip_at, ip_at + 2)
                    && is_same(ip_at + 6, ip_at + 10)
                    && is_same(ip_at + 12, transport_at)
            }
        };
        let tcp = |at| transport_at + at;
        is_same(0, ip_at)
            && is_same_ip
            && is_same(tcp(0), tcp(TCP_SEQUENCE_AT))
            && is_same(tcp(8), tcp(TCP_FLAGS_AT))
            && headers[tcp(TCP_FLAGS_AT)] & !LAST_FLAGS == COMMON_FLAGS
            && is_same(tcp(14), tcp(16))
            && is_same(tcp(18), self.headers_bytes)
    }

    /// Length of the IP packet by its length field.
    fn ip_bytes(&self, headers: &[u8]) -> usize {
        let ip = &headers[self.layout.ip_at..];
        let (before, length_at) = if self.layout.is_v6 { (40, 4) } else { (0, 2) };
        before + usize::from(u16_at(ip, length_at))
    }

    /// Headers of the frame that stands for all segments, with an unfilled checksum.
    pub fn headers(&mut self) -> &[u8] {
        let TransportLayout { ip_at, transport_at, is_v6, .. } = self.layout;
        let transport_bytes = self.headers_bytes - transport_at + self.payload_bytes;
        let ip_bytes = transport_at - ip_at + transport_bytes;
        let (front, transport) = self.headers[..self.headers_bytes].split_at_mut(transport_at);
        let ip = &mut front[ip_at..];
        if is_v6 {
            put_u16(ip, 4, (ip_bytes - 40) as u16);
        } else {
            put_u16(ip, 2, ip_bytes as u16);
            put_u16(ip, 10, 0);
            put_u16(ip, 10, Sum::of(ip).checksum());
        }
        let at = self.layout.checksum_offset();
        transport[at..at + 2].copy_from_slice(&self.layout.unfilled_field(transport_bytes));
        &self.headers[..self.headers_bytes]
    }

    /// Virtio header of that frame.
    pub fn vnet_header(&self) -> vnet::RawHeader {
        vnet::encode_segments(
            (self.layout.transport_at as u16, self.layout.checksum_offset() as u16),
            self.layout.is_v6,
            self.headers_bytes as u16,
            self.segment_bytes as u16,
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::segments::tests::packets_of;
    use crate::transport::tests::Shape;

    /// Segments of 1,000 bytes, the last shorter, and the frame that stands for them.
    fn segments(shape: Shape, payload_bytes: usize) -> (Vec<Vec<u8>>, Vec<u8>) {
        let shape = Shape { is_tcp: true, payload_bytes, ..shape };
        let mut frame = shape.frame();
        // Without a flag that only the first may have.
        frame[shape.transport_at() + TCP_FLAGS_AT] &= !TcpFlags::CWR.0;
        (packets_of(&frame, 1000), frame)
    }

    #[test]
    fn coalesced_segments_are_the_frame_that_was_split() {
        for shape in Shape::all() {
            let (parts, frame) = segments(shape, 9_500);
            let mut coalesced = CoalescedSegments::begin(&parts[0]).unwrap();
            assert!(parts[1..].iter().all(|part| coalesced.push(part)), "{shape:?}");
            let headers = coalesced.headers().to_vec();
            assert!(headers == frame[..headers.len()], "{shape:?}");
            assert!(!coalesced.push(&parts[1]), "the last segment ends the run");
            let raw = coalesced.vnet_header();
            let received = vnet::decode(&raw, frame.len());
            assert_eq!((received.merged, received.segment_bytes), (true, 1000), "{shape:?}");
        }
    }

    #[test]
    fn runs_end_at_the_longest_packet() {
        let (parts, frame) = segments(Shape::all().next().unwrap(), 64_000);
        let mut coalesced = CoalescedSegments::begin(&parts[0]).unwrap();
        let next = |sequence: u32| {
            let mut part = parts[1].clone();
            let at = frame.len() - 64_000 - 32 + TCP_SEQUENCE_AT;
            part[at..at + 4].copy_from_slice(&sequence.to_be_bytes());
            part
        };
        let first = 0xffff_ff00_u32;
        let sequences = (1..).map(|number| first.wrapping_add(1000 * number));
        let count = 1 + sequences.take_while(|&sequence| coalesced.push(&next(sequence))).count();
        assert_eq!(count, (65_535 - 52) / 1000);
    }

    #[test]
    fn other_frames_begin_no_run() {
        let (parts, _) = segments(Shape::all().next().unwrap(), 3_000);
        let transport_at = 34;
        for flags in [TcpFlags::SYN, TcpFlags::RST, TcpFlags::URG, TcpFlags::CWR] {
            let mut part = parts[0].clone();
            part[transport_at + TCP_FLAGS_AT] |= flags.0;
            assert!(CoalescedSegments::begin(&part).is_none(), "{flags:?}");
        }
        let padded = [&parts[0][..], &[0; 4]].concat();
        assert!(CoalescedSegments::begin(&padded).is_none(), "padding is not payload");
        let pure = &parts[0][..parts[0].len() - 1000];
        assert!(CoalescedSegments::begin(pure).is_none(), "truncated");
        let udp = Shape { is_tcp: false, ..Shape::all().next().unwrap() };
        assert!(CoalescedSegments::begin(&udp.frame()).is_none());
    }

    proptest! {
        /// A frame that differs elsewhere in its headers is not the next segment.
        #[test]
        fn only_the_next_segment_is_coalesced(shape in 0_usize..16, at in 0_usize..100, bit in 0_u8..8) {
            let shape = Shape::all().nth(shape).unwrap();
            let (mut parts, _) = segments(shape, 3_000);
            let headers_bytes = parts[0].len() - 1000;
            prop_assume!(at < headers_bytes);
            let transport_at = headers_bytes - 32;
            parts[1][at] ^= 1 << bit;
            let ip_at = if shape.tagged { 18 } else { 14 };
            // Identification and checksum of IPv4, and the checksum of TCP; FIN and PSH.
            let may_differ = !shape.is_v6 && [4, 5, 10, 11].contains(&at.wrapping_sub(ip_at))
                || [16, 17].contains(&at.wrapping_sub(transport_at))
                || at == transport_at + TCP_FLAGS_AT && LAST_FLAGS & 1 << bit != 0;
            let mut coalesced = CoalescedSegments::begin(&parts[0]).unwrap();
            prop_assert_eq!(coalesced.push(&parts[1]), may_differ);
        }

        #[test]
        fn any_bytes_are_coalesced_without_a_panic(
            first in proptest::collection::vec(any::<u8>(), 0..200),
            shape in 0_usize..16,
            cut in 0_usize..1_200,
            second in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let (mut parts, _) = segments(Shape::all().nth(shape).unwrap(), 3_000);
            parts[1].truncate(cut);
            for (first, second) in [(&first, &second), (&parts[0], &second), (&parts[0], &parts[1])] {
                if let Some(mut coalesced) = CoalescedSegments::begin(first) {
                    coalesced.push(second);
                    coalesced.headers();
                }
            }
        }
    }
}
