//! Segmentation offload: a device that cuts TSO frames and merges arriving segments (GRO).

use std::net::SocketAddr;

use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_stack::{Config, TcpId, TcpOptions};
use tidegate_wire::tcp::fill_checksum;
use tidegate_wire::{EthernetHeader, Ipv4Header, Protocol, Sum, TcpFlags, checksum};

use crate::kit::{FRAMES, Family, SECOND_NS, TestHost, config, for_each_family, mac};

const PORT: u16 = 80;
/// Payload bytes of a full segment on Ethernet with time stamps.
fn full_segment_payload_bytes(family: Family) -> usize {
    1500 - family.header_bytes() - 32
}

/// A frame as the stack handed it to its device.
struct TransmittedFrame {
    bytes: Vec<u8>,
    checksum: Checksum,
    segment_bytes: usize,
}

/// Two hosts; the device of `a` has TSO and GRO.
struct OffloadPair {
    family: Family,
    a: TestHost,
    b: TestHost,
    from: TcpId,
    to: TcpId,
}

fn host(config: Config, other: u8) -> TestHost {
    let mut host = TestHost::new(config);
    let frame_size = FrameSize::K64;
    host.arena = Arena::new(ArenaConfig { frames: FRAMES, frame_size, hugepages: false }).unwrap();
    host.advance(3 * SECOND_NS);
    take_transmitted(&mut host);
    for family in [Family::V4, Family::V6] {
        let (now_ns, neighbour) = (host.now_ns, Some(mac(other)));
        host.stack.set_neighbour(now_ns, family.host(other), neighbour, &mut host.arena);
    }
    host
}

fn take_transmitted(host: &mut TestHost) -> Vec<TransmittedFrame> {
    let frames: Vec<_> = host.stack.transmit_queue().drain(..).collect();
    let take = |frame: tidegate_memory::Frame| {
        let transmitted = TransmittedFrame {
            bytes: host.arena.bytes(&frame).to_vec(),
            checksum: frame.checksum(),
            segment_bytes: frame.segment_bytes(),
        };
        host.arena.free(frame);
        transmitted
    };
    frames.into_iter().map(take).collect()
}

/// The frames on the wire for one transmitted frame: cut and with checksums, as the
/// kernel produces them.
fn split_tso_frame(transmitted: &TransmittedFrame) -> Vec<Vec<u8>> {
    let Checksum::Partial { start, offset } = transmitted.checksum else {
        return vec![transmitted.bytes.clone()];
    };
    assert_eq!(offset, 16);
    let start = usize::from(start);
    let data_at = start + usize::from(transmitted.bytes[start + 12] >> 4) * 4;
    let (headers, data) = transmitted.bytes.split_at(data_at);
    let expected = pseudo_header_sum(headers, transmitted.bytes.len() - start).fold();
    let found = u16::from_be_bytes([headers[start + 16], headers[start + 17]]);
    assert_eq!(found, expected, "the pseudo-header sum of the whole frame");
    let size =
        if transmitted.segment_bytes > 0 { transmitted.segment_bytes } else { data.len().max(1) };
    let pieces: Vec<&[u8]> = if data.is_empty() { vec![data] } else { data.chunks(size).collect() };
    let count = pieces.len();
    let piece = |(number, piece): (usize, &[u8])| {
        let mut frame = [headers, piece].concat();
        let sequence = u32::from_be_bytes(frame[start + 4..][..4].try_into().unwrap());
        let sequence = sequence.wrapping_add((number * size) as u32);
        frame[start + 4..][..4].copy_from_slice(&sequence.to_be_bytes());
        if number + 1 < count {
            frame[start + 13] &= !(TcpFlags::PSH | TcpFlags::FIN).0;
        }
        frame[start + 16..][..2].fill(0);
        let segment_bytes = frame.len() - start;
        write_lengths(&mut frame, segment_bytes);
        let pseudo = pseudo_header_sum(&frame, segment_bytes);
        fill_checksum(pseudo, &mut frame[start..]);
        frame
    };
    pieces.into_iter().enumerate().map(piece).collect()
}

fn pseudo_header_sum(frame: &[u8], segment_bytes: usize) -> Sum {
    let packet = &frame[EthernetHeader::BYTES..];
    let address = |at: usize| <[u8; 4]>::try_from(&packet[at..at + 4]).unwrap();
    let wide = |at: usize| <[u8; 16]>::try_from(&packet[at..at + 16]).unwrap();
    match packet[0] >> 4 {
        4 => {
            let (from, to) = (address(12).into(), address(16).into());
            checksum::pseudo_header_v4(from, to, Protocol::TCP, segment_bytes as u16)
        }
        _ => {
            let (from, to) = (wide(8).into(), wide(24).into());
            checksum::pseudo_header_v6(from, to, Protocol::TCP, segment_bytes as u32)
        }
    }
}

fn write_lengths(frame: &mut [u8], segment_bytes: usize) {
    let packet = &mut frame[EthernetHeader::BYTES..];
    if packet[0] >> 4 == 6 {
        return packet[4..6].copy_from_slice(&(segment_bytes as u16).to_be_bytes());
    }
    let total = (segment_bytes + Ipv4Header::BYTES) as u16;
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    packet[10..12].fill(0);
    let sum = Sum::of(&packet[..Ipv4Header::BYTES]).checksum();
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
}

/// Feeds a frame that the device has merged, uncut.
fn feed_merged(host: &mut TestHost, merged: &TransmittedFrame) {
    let mut frame = host.arena.alloc_from(&merged.bytes).unwrap();
    frame.set_checksum(merged.checksum);
    frame.set_segment_bytes(merged.segment_bytes as u16);
    host.stack.handle_frame(host.now_ns, frame, &mut host.arena);
    assert_eq!(host.stack.counters().balance(), 0);
}

impl OffloadPair {
    fn new(family: Family) -> Self {
        let tso_config = config(1).transmit_checksum(true).max_tso_bytes(60_000);
        let (mut a, mut b) = (host(tso_config, 2), host(config(2), 1));
        let (to, any) =
            (SocketAddr::new(family.host(2), PORT), SocketAddr::new(family.unspecified(), PORT));
        let options = TcpOptions::default();
        let listener = b.stack.tcp_listen(any, 4, options).unwrap();
        let from = a.stack.tcp_connect(a.now_ns, &mut a.arena, None, to, options).unwrap();
        for _ in 0..3 {
            deliver_frames(&mut a, &mut b, |_| true);
        }
        let to = b.stack.tcp_accept(listener).unwrap();
        Self { family, a, b, from, to }
    }

    fn send(&mut self, data: &[u8]) -> usize {
        self.a.stack.tcp_send(self.a.now_ns, &mut self.a.arena, self.from, data).unwrap()
    }

    fn recv(&mut self) -> Vec<u8> {
        let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
        let b = &mut self.b;
        while let Ok(len) = b.stack.tcp_recv(b.now_ns, &mut b.arena, self.to, &mut buffer) {
            all.extend(&buffer[..len]);
        }
        all
    }
}

/// Delivers the frames of both hosts once. Returns the number of frames on the wire to
/// `b`, and the number of frames that `a` handed to its device for them.
fn deliver_frames(
    a: &mut TestHost,
    b: &mut TestHost,
    mut keep: impl FnMut(&[u8]) -> bool,
) -> (usize, usize) {
    let from_a = take_transmitted(a);
    let segments: Vec<_> = from_a.iter().flat_map(split_tso_frame).collect();
    for frame in &segments {
        assert!(frame.len() <= 1514, "{} bytes on Ethernet", frame.len());
        if keep(frame) {
            b.feed(frame);
        }
    }
    b.sent().iter().for_each(|frame| a.feed(frame));
    (segments.len(), from_a.len())
}

#[test]
fn sends_tso_frames_and_delivers_data_intact() {
    for_each_family(|family| {
        let mut pair = OffloadPair::new(family);
        let data: Vec<u8> = (0..400_000_u32).map(|n| (n % 251) as u8).collect();
        let (mut sent, mut received, mut frames) = (0, Vec::new(), (0, 0));
        while received.len() < data.len() {
            if sent < data.len() {
                let writable = pair.a.stack.tcp_readiness(pair.from).writable;
                sent += if writable { pair.send(&data[sent..]) } else { 0 };
            }
            let (segments, tso_frames) = deliver_frames(&mut pair.a, &mut pair.b, |_| true);
            frames = (frames.0 + segments, frames.1 + tso_frames);
            received.extend(pair.recv());
            let step_ns = if segments == 0 { SECOND_NS / 10 } else { SECOND_NS / 1000 };
            pair.a.advance(step_ns);
            pair.b.advance(step_ns);
        }
        assert!(received == data);
        let min_segments = data.len() / full_segment_payload_bytes(family);
        assert!(frames.0 >= min_segments && frames.0 < min_segments + 60, "{frames:?}");
        assert!(frames.1 * 3 < frames.0, "{frames:?}");
    });
}

#[test]
fn retransmits_only_lost_segments_of_tso_frame() {
    for_each_family(|family| {
        let mut pair = OffloadPair::new(family);
        let data: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
        let (mut sent, mut received, mut count, mut frames) = (0, Vec::new(), 0, 0);
        for _ in 0..10_000 {
            if sent < data.len() && pair.a.stack.tcp_readiness(pair.from).writable {
                sent += pair.send(&data[sent..]);
            }
            let keep = |frame: &[u8]| {
                count += usize::from(frame.len() > 1000);
                frame.len() <= 1000 || count % 17 != 0
            };
            frames += deliver_frames(&mut pair.a, &mut pair.b, keep).0;
            received.extend(pair.recv());
            if received.len() == data.len() {
                break;
            }
            pair.a.advance(SECOND_NS / 1000);
            pair.b.advance(SECOND_NS / 1000);
        }
        assert!(received == data, "{} of {}", received.len(), data.len());
        let min_segments = data.len() / full_segment_payload_bytes(family);
        assert!(frames < min_segments + min_segments / 3, "{frames} frames for {min_segments}");
    });
}

#[test]
fn rfc5681_4_2_acknowledges_gro_merged_segments_at_once() {
    for_each_family(|family| {
        let mut pair = OffloadPair::new(family);
        for segments in [8, 2, 2] {
            let data = vec![7; segments * full_segment_payload_bytes(family)];
            assert_eq!(pair.send(&data), data.len());
            let frames = take_transmitted(&mut pair.a);
            let [one] = &frames[..] else { panic!("{} frames", frames.len()) };
            assert_eq!(one.segment_bytes, full_segment_payload_bytes(family));
            assert_eq!(split_tso_frame(one).len(), segments);
            feed_merged(&mut pair.b, one);
            let acks = pair.b.sent();
            assert_eq!(acks.len(), 1, "one immediate ACK for all merged segments");
            let headers = EthernetHeader::BYTES + pair.family.header_bytes();
            assert_eq!(acks[0].len(), headers + 32);
            pair.a.feed(&acks[0]);
            assert_eq!(pair.recv(), data);
        }
    });
}

#[test]
fn sends_only_mtu_sized_frames_without_tso() {
    for_each_family(|family| {
        let mut pair = OffloadPair::new(family);
        let (a, b) = (&mut pair.a, &mut pair.b);
        let any = SocketAddr::new(family.unspecified(), PORT);
        let listener = a.stack.tcp_listen(any, 4, TcpOptions::default()).unwrap();
        let to = SocketAddr::new(family.host(1), PORT);
        let options = TcpOptions::default();
        let from = b.stack.tcp_connect(b.now_ns, &mut b.arena, None, to, options).unwrap();
        for _ in 0..3 {
            let frames = take_transmitted(b);
            frames.iter().for_each(|frame| a.feed(&frame.bytes));
            take_transmitted(a).iter().flat_map(split_tso_frame).for_each(|frame| b.feed(&frame));
        }
        a.stack.tcp_accept(listener).unwrap();
        b.stack.tcp_send(b.now_ns, &mut b.arena, from, &[1; 20_000]).unwrap();
        let frames = take_transmitted(b);
        assert!(frames.len() >= 10);
        let longest = EthernetHeader::BYTES + 1500;
        assert!(frames.iter().all(|one| one.segment_bytes == 0 && one.bytes.len() <= longest));
    });
}
