//! Segmentation in software: the packets that one received frame stands for.
//!
//! Senders on this machine leave segmentation to their device (TSO, GSO), and the kernel coalesces
//! what it receives (GRO). Without frames that large in the arena, a device splits such a frame
//! here, one packet at a time, so that a burst keeps to its quota.

use std::ops::Range;

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{Medium, Sum, TcpFlags};

use crate::transport::TransportLayout;

/// Largest frame that stands for several packets, in bytes: an IP packet of 64 KiB, an Ethernet
/// header and a VLAN tag.
pub const MAX_MERGED_BYTES: usize = 65_536 + 18;

/// Offsets of the sequence number and of the flags in a TCP header.
pub const TCP_SEQUENCE_AT: usize = 4;
pub const TCP_FLAGS_AT: usize = 13;
/// Offset of the length in a UDP header.
const UDP_LENGTH_AT: usize = 4;

/// A frame that stands for several packets, and the packets that are not made yet.
#[derive(Debug)]
pub struct Splitter {
    frame: Vec<u8>,
    segments: Option<Segments>,
}

impl Splitter {
    pub fn new() -> Self {
        Self { frame: Vec::with_capacity(MAX_MERGED_BYTES), segments: None }
    }

    /// Adds the next part of a frame that arrives in parts. A frame longer than
    /// [`MAX_MERGED_BYTES`] is truncated.
    pub fn push_part(&mut self, part: &[u8]) {
        let space = self.frame.capacity() - self.frame.len();
        self.frame.extend_from_slice(&part[..part.len().min(space)]);
    }

    /// Begins to split the frame whose parts were added: by `begin`, into packets of at most
    /// `max_frame_bytes` bytes. Returns false, forgetting the frame, if that is impossible.
    pub fn begin(
        &mut self,
        max_frame_bytes: usize,
        begin: impl FnOnce(&[u8]) -> Option<Segments>,
    ) -> bool {
        let fits = |segments: &Segments| segments.max_frame_bytes() <= max_frame_bytes;
        self.segments = begin(&self.frame).filter(fits);
        if self.segments.is_none() {
            self.frame.clear();
        }
        self.segments.is_some()
    }

    /// Makes the next packet. `None` without a frame, or without a free frame in the arena.
    pub fn next(&mut self, arena: &mut Arena) -> Option<Frame> {
        let segments = self.segments.as_mut()?;
        let packet = segments.next(&self.frame, arena);
        if segments.is_finished() {
            self.segments = None;
            self.frame.clear();
        }
        packet
    }

    /// True while packets are not made yet.
    pub fn is_active(&self) -> bool {
        self.segments.is_some()
    }
}

/// Packets of one frame that are not made yet.
#[derive(Clone, Copy, Debug)]
pub struct Segments {
    layout: TransportLayout,
    /// Bytes of all headers.
    headers_bytes: usize,
    /// Payload bytes of each packet; the last may have less.
    segment_bytes: usize,
    /// Number of packets made.
    made: usize,
}

impl Segments {
    /// Begins to split `frame` into packets with `segment_bytes` bytes of payload each. `None` if
    /// the frame is not UDP or TCP, is truncated, or has no payload.
    pub fn new(medium: Medium, frame: &[u8], segment_bytes: usize) -> Option<Self> {
        let layout = TransportLayout::parse_on(medium, frame)?;
        let headers_bytes = layout.transport_at + layout.transport_header_bytes(frame)?;
        let is_whole = headers_bytes < layout.end && layout.end <= frame.len();
        (is_whole && segment_bytes > 0).then_some(Self {
            layout,
            headers_bytes,
            segment_bytes,
            made: 0,
        })
    }

    /// Begins to split `frame` into packets of at most `mtu` bytes. `None` if the frame is not TCP,
    /// whose segments may have any length, or as for [`Segments::new`].
    pub fn for_mtu(medium: Medium, frame: &[u8], mtu: usize) -> Option<Self> {
        let mut segments = Self::new(medium, frame, 1)?;
        let ip_headers_bytes = segments.headers_bytes - segments.layout.ip_at;
        segments.segment_bytes = mtu.checked_sub(ip_headers_bytes)?;
        (segments.layout.is_tcp && segments.segment_bytes > 0).then_some(segments)
    }

    /// True if `frame` has an unfilled checksum, so that its sender is on this machine.
    pub fn is_unfilled(&self, frame: &[u8]) -> bool {
        self.layout.is_unfilled(frame)
    }

    /// Length of the longest packet, with its link header.
    pub fn max_frame_bytes(&self) -> usize {
        self.headers_bytes + self.segment_bytes.min(self.layout.end - self.headers_bytes)
    }

    /// Number of packets that are not made yet.
    pub fn remaining(&self) -> usize {
        (self.layout.end - self.next_payload().start).div_ceil(self.segment_bytes)
    }

    /// True if all packets are made.
    pub fn is_finished(&self) -> bool {
        self.next_payload().is_empty()
    }

    /// Position of the next packet's payload in the frame.
    fn next_payload(&self) -> Range<usize> {
        let start = (self.headers_bytes + self.made * self.segment_bytes).min(self.layout.end);
        start..(start + self.segment_bytes).min(self.layout.end)
    }

    /// Checksum of each packet: partial.
    pub fn checksum(&self) -> Checksum {
        self.layout.partial_checksum()
    }

    /// Makes the next packet of `frame`, the frame that [`Segments::new`] was called with. Its
    /// checksum is partial. `None` if all packets are made, or the arena has no free frame.
    pub fn next(&mut self, frame: &[u8], arena: &mut Arena) -> Option<Frame> {
        if self.is_finished() {
            return None;
        }
        let mut segment = arena.alloc()?;
        let is_made = arena.set_len(&mut segment, self.headers_bytes + self.next_payload().len())
            && self.write_next(frame, arena.bytes_mut(&mut segment)).is_some();
        if !is_made {
            arena.free(segment);
            return None;
        }
        segment.set_checksum(self.checksum());
        Some(segment)
    }

    /// As [`Segments::next`], but writes the packet to the front of `target`; returns its length.
    /// `None` if all packets are made, or `target` is too short.
    pub fn write_next(&mut self, frame: &[u8], target: &mut [u8]) -> Option<usize> {
        let payload = self.next_payload();
        if payload.is_empty() {
            return None;
        }
        let is_last = payload.end == self.layout.end;
        let (headers, payload) = (frame.get(..self.headers_bytes)?, frame.get(payload)?);
        let packet = target.get_mut(..headers.len() + payload.len())?;
        let (head, tail) = packet.split_at_mut(headers.len());
        head.copy_from_slice(headers);
        tail.copy_from_slice(payload);
        self.adjust_ip_header(packet);
        self.adjust_transport_header(packet, is_last);
        self.made += 1;
        Some(packet.len())
    }

    fn adjust_ip_header(&self, bytes: &mut [u8]) {
        let TransportLayout { ip_at, transport_at, is_v6, .. } = self.layout;
        let ip_bytes = bytes.len() - ip_at;
        let header = &mut bytes[ip_at..transport_at];
        if is_v6 {
            put_u16(header, 4, (ip_bytes - 40) as u16);
            return;
        }
        put_u16(header, 2, ip_bytes as u16);
        let identification = u16_at(header, 4).wrapping_add(self.made as u16);
        put_u16(header, 4, identification);
        put_u16(header, 10, 0);
        put_u16(header, 10, Sum::of(header).checksum());
    }

    fn adjust_transport_header(&self, bytes: &mut [u8], is_last: bool) {
        let transport = &mut bytes[self.layout.transport_at..];
        let transport_bytes = transport.len();
        if self.layout.is_tcp {
            let offset = (self.made * self.segment_bytes) as u32;
            let sequence = sequence_at(transport).wrapping_add(offset);
            put_u16(transport, TCP_SEQUENCE_AT, (sequence >> 16) as u16);
            put_u16(transport, TCP_SEQUENCE_AT + 2, sequence as u16);
            // RFC 3168 section 6.1.2: one segment tells that the window was reduced.
            let mut cleared = if self.made > 0 { TcpFlags::CWR.0 } else { 0 };
            if !is_last {
                cleared |= (TcpFlags::FIN | TcpFlags::PSH).0;
            }
            transport[TCP_FLAGS_AT] &= !cleared;
        } else {
            put_u16(transport, UDP_LENGTH_AT, transport_bytes as u16);
        }
        let at = self.layout.checksum_offset();
        transport[at..at + 2].copy_from_slice(&self.layout.unfilled_field(transport_bytes));
    }
}

/// Sequence number of a TCP header.
pub fn sequence_at(tcp: &[u8]) -> u32 {
    u32::from(u16_at(tcp, TCP_SEQUENCE_AT)) << 16 | u32::from(u16_at(tcp, TCP_SEQUENCE_AT + 2))
}

/// Reads a field in network byte order.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Writes a field in network byte order.
pub fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;
    use tidegate_memory::{ArenaConfig, FrameSize};
    use tidegate_wire::{EthernetHeader, Ipv4Header, Ipv6Header, TcpHeader, UdpHeader};

    use super::*;
    use crate::transport::local_checksum;
    use crate::transport::tests::Shape;

    fn arena(frames: u32) -> Arena {
        Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
    }

    /// Packets of a frame, with `segment_bytes` bytes of payload each.
    pub fn packets_of(frame: &[u8], segment_bytes: usize) -> Vec<Vec<u8>> {
        let mut segments = Segments::new(Medium::Ethernet, frame, segment_bytes).unwrap();
        let next = || {
            let mut packet = vec![0; segments.max_frame_bytes()];
            let bytes = segments.write_next(frame, &mut packet)?;
            packet.truncate(bytes);
            Some(packet)
        };
        std::iter::from_fn(next).collect()
    }

    /// All packets of a frame, made in an arena.
    fn split(frame: &[u8], mut segments: Segments) -> Vec<Vec<u8>> {
        let mut arena = arena(64);
        let mut packets = Vec::new();
        while let Some(segment) = segments.next(frame, &mut arena) {
            let bytes = arena.bytes(&segment).to_vec();
            assert_eq!(segment.checksum(), local_checksum(&bytes));
            packets.push(bytes);
            arena.free(segment);
        }
        assert!(segments.is_finished());
        packets
    }

    #[test]
    fn packets_are_valid_and_carry_the_payload_in_order() {
        for shape in Shape::all() {
            let shape = Shape { payload_bytes: 4000, ..shape };
            let frame = shape.frame();
            let segments = Segments::new(Medium::Ethernet, &frame, 1000).unwrap();
            assert_eq!(segments.max_frame_bytes(), shape.headers_bytes() + 1000);
            let packets = split(&frame, segments);
            let payload: Vec<u8> = packets
                .iter()
                .flat_map(|packet| &packet[shape.headers_bytes()..])
                .copied()
                .collect();
            assert!(payload == frame[shape.headers_bytes()..], "{shape:?}");
            assert_eq!(packets.len(), 4);
            for (number, packet) in packets.iter().enumerate() {
                let (_, ip) = EthernetHeader::parse(packet).unwrap();
                if shape.is_v6 {
                    let (header, _) = Ipv6Header::parse(ip).unwrap();
                    assert_eq!(usize::from(header.payload_bytes), ip.len() - 40);
                } else {
                    let (header, _) = Ipv4Header::parse(ip).unwrap();
                    assert_eq!(usize::from(header.total_bytes), ip.len());
                    assert_eq!(usize::from(header.identification), number);
                }
                let transport = &packet[shape.transport_at()..];
                if shape.is_tcp {
                    let (header, _) = TcpHeader::parse(transport).unwrap();
                    let sequence = 0xffff_ff00_u32.wrapping_add(1000 * number as u32);
                    assert_eq!(header.sequence, sequence);
                    assert_eq!(header.flags.contains(TcpFlags::CWR), number == 0);
                    for flag in [TcpFlags::FIN, TcpFlags::PSH] {
                        assert_eq!(header.flags.contains(flag), number == 3);
                    }
                } else {
                    let (_, payload) = UdpHeader::parse(transport).unwrap();
                    assert_eq!(payload.len(), 1000);
                }
            }
        }
    }

    #[test]
    fn tcp_is_split_for_an_mtu_and_udp_is_not() {
        for shape in Shape::all() {
            let shape = Shape { payload_bytes: 4000, ..shape };
            let frame = shape.frame();
            let segments = Segments::for_mtu(Medium::Ethernet, &frame, 1500);
            assert_eq!(segments.is_some(), shape.is_tcp);
            let link_bytes = if shape.tagged { 18 } else { 14 };
            if let Some(segments) = segments {
                assert_eq!(split(&frame, segments)[0].len(), link_bytes + 1500);
            }
        }
    }

    #[test]
    fn waits_for_a_free_frame() {
        let shape = Shape { payload_bytes: 30, ..Shape::all().next().unwrap() };
        let (frame, mut arena) = (shape.frame(), arena(2));
        let mut segments = Segments::new(Medium::Ethernet, &frame, 10).unwrap();
        let first = segments.next(&frame, &mut arena).unwrap();
        let second = segments.next(&frame, &mut arena).unwrap();
        assert!(segments.next(&frame, &mut arena).is_none() && !segments.is_finished());
        arena.free(first);
        let third = segments.next(&frame, &mut arena).unwrap();
        assert_eq!(
            arena.bytes(&third)[shape.headers_bytes()..],
            [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
        );
        assert!(segments.is_finished() && segments.next(&frame, &mut arena).is_none());
        [second, third].into_iter().for_each(|frame| arena.free(frame));
    }

    proptest! {
        #[test]
        fn any_bytes_are_split_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            shape in 0usize..16,
            cut in 0usize..300,
            put in proptest::collection::vec((0usize..100, any::<u8>()), 0..4),
            segment_bytes in 0usize..200,
        ) {
            let mut arena = arena(4);
            let mut frame = Shape::all().nth(shape).unwrap().frame();
            frame.truncate(cut);
            for (at, byte) in put {
                if let Some(place) = frame.get_mut(at) {
                    *place = byte;
                }
            }
            for frame in [bytes, frame] {
                for segments in [Segments::new(Medium::Ethernet, &frame, segment_bytes), Segments::for_mtu(Medium::Ethernet, &frame, segment_bytes)] {
                    let Some(mut segments) = segments else { continue };
                    while let Some(segment) = segments.next(&frame, &mut arena) {
                        arena.free(segment);
                    }
                }
            }
            prop_assert_eq!(arena.available(), 4);
        }
    }
}
