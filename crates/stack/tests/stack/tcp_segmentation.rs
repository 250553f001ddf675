//! A port that cuts what is sent into segments, and merges those that arrive.

use std::net::SocketAddr;

use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_stack::{Config, TcpId, TcpOptions};
use tidegate_wire::tcp::fill_checksum;
use tidegate_wire::{EthernetHeader, Ipv4Header, Protocol, Sum, TcpFlags, checksum};

use crate::kit::{FRAMES, Family, Host, SECOND_NS, both, config, mac};

const PORT: u16 = 80;
/// The payload of a whole segment on Ethernet, with time stamps.
fn whole_bytes(family: Family) -> usize {
    1500 - family.header_bytes() - 32
}

/// What a host gave to its port to send.
struct Given {
    bytes: Vec<u8>,
    checksum: Checksum,
    segment_bytes: usize,
}

/// Two hosts; the port of `a` cuts and merges.
struct Site {
    family: Family,
    a: Host,
    b: Host,
    from: TcpId,
    to: TcpId,
}

fn host(config: Config, other: u8) -> Host {
    let mut host = Host::new(config);
    let frame_size = FrameSize::K64;
    host.arena = Arena::new(ArenaConfig { frames: FRAMES, frame_size, hugepages: false }).unwrap();
    host.pass(3 * SECOND_NS);
    given(&mut host);
    for family in [Family::V4, Family::V6] {
        let (now_ns, neighbour) = (host.now_ns, Some(mac(other)));
        host.stack.set_neighbour(now_ns, family.host(other), neighbour, &mut host.arena);
    }
    host
}

fn given(host: &mut Host) -> Vec<Given> {
    let frames: Vec<_> = host.stack.transmit_queue().drain(..).collect();
    let take = |frame: tidegate_memory::Frame| {
        let given = Given {
            bytes: host.arena.bytes(&frame).to_vec(),
            checksum: frame.checksum(),
            segment_bytes: frame.segment_bytes(),
        };
        host.arena.free(frame);
        given
    };
    frames.into_iter().map(take).collect()
}

/// The frames that go over the wire for one that was given, as the kernel makes
/// them: cut, and with their checksums.
fn cut(given: &Given) -> Vec<Vec<u8>> {
    let Checksum::Partial { start, offset } = given.checksum else {
        return vec![given.bytes.clone()];
    };
    assert_eq!(offset, 16);
    let start = usize::from(start);
    let data_at = start + usize::from(given.bytes[start + 12] >> 4) * 4;
    let (headers, data) = given.bytes.split_at(data_at);
    let expected = pseudo(headers, given.bytes.len() - start).fold();
    let there = u16::from_be_bytes([headers[start + 16], headers[start + 17]]);
    assert_eq!(there, expected, "the sum of the pseudo-header of all");
    let size = if given.segment_bytes > 0 { given.segment_bytes } else { data.len().max(1) };
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
        put_length(&mut frame, segment_bytes);
        let pseudo = pseudo(&frame, segment_bytes);
        fill_checksum(pseudo, &mut frame[start..]);
        frame
    };
    pieces.into_iter().enumerate().map(piece).collect()
}

fn pseudo(frame: &[u8], segment_bytes: usize) -> Sum {
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

fn put_length(frame: &mut [u8], segment_bytes: usize) {
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

/// Gives a host what its port has merged, uncut.
fn feed_merged(host: &mut Host, given: &Given) {
    let mut frame = host.arena.alloc_from(&given.bytes).unwrap();
    frame.set_checksum(given.checksum);
    frame.set_segment_bytes(given.segment_bytes as u16);
    host.stack.ingest(host.now_ns, frame, &mut host.arena);
    assert_eq!(host.stack.counters().balance(), 0);
}

impl Site {
    fn new(family: Family) -> Self {
        let cutting = Config { transmit_checksum: true, segmentation_bytes: 60_000, ..config(1) };
        let (mut a, mut b) = (host(cutting, 2), host(config(2), 1));
        let (to, any) =
            (SocketAddr::new(family.host(2), PORT), SocketAddr::new(family.any(), PORT));
        let options = TcpOptions::default();
        let listener = b.stack.tcp_listen(any, 4, options).unwrap();
        let from = a.stack.tcp_connect(a.now_ns, &mut a.arena, None, to, options).unwrap();
        for _ in 0..3 {
            carry(&mut a, &mut b, |_| true);
        }
        let to = b.stack.tcp_accept(listener).unwrap();
        Self { family, a, b, from, to }
    }

    fn write(&mut self, data: &[u8]) -> usize {
        self.a.stack.tcp_send(self.a.now_ns, &mut self.a.arena, self.from, data).unwrap()
    }

    fn read(&mut self) -> Vec<u8> {
        let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
        let b = &mut self.b;
        while let Ok(len) = b.stack.tcp_recv(b.now_ns, &mut b.arena, self.to, &mut buffer) {
            all.extend(&buffer[..len]);
        }
        all
    }
}

/// Carries what both say, once. Returns how many frames went to `b`, and how
/// many `a` gave to its port for them.
fn carry(a: &mut Host, b: &mut Host, mut keep: impl FnMut(&[u8]) -> bool) -> (usize, usize) {
    let from_a = given(a);
    let cut: Vec<_> = from_a.iter().flat_map(cut).collect();
    for frame in &cut {
        assert!(frame.len() <= 1514, "{} bytes on Ethernet", frame.len());
        if keep(frame) {
            b.feed(frame);
        }
    }
    b.sent().iter().for_each(|frame| a.feed(frame));
    (cut.len(), from_a.len())
}

#[test]
fn segments_in_a_row_leave_as_one_and_arrive_as_they_are() {
    both(|family| {
        let mut site = Site::new(family);
        let data: Vec<u8> = (0..400_000_u32).map(|n| (n % 251) as u8).collect();
        let (mut sent, mut received, mut frames) = (0, Vec::new(), (0, 0));
        while received.len() < data.len() {
            if sent < data.len() {
                let room = site.a.stack.tcp_readiness(site.from).writable;
                sent += if room { site.write(&data[sent..]) } else { 0 };
            }
            let (cut, given) = carry(&mut site.a, &mut site.b, |_| true);
            frames = (frames.0 + cut, frames.1 + given);
            received.extend(site.read());
            let step_ns = if cut == 0 { SECOND_NS / 10 } else { SECOND_NS / 1000 };
            site.a.pass(step_ns);
            site.b.pass(step_ns);
        }
        assert!(received == data);
        let least = data.len() / whole_bytes(family);
        assert!(frames.0 >= least && frames.0 < least + 60, "{frames:?}");
        assert!(frames.1 * 3 < frames.0, "{frames:?}");
    });
}

#[test]
fn what_is_lost_of_one_is_sent_again_alone() {
    both(|family| {
        let mut site = Site::new(family);
        let data: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
        let (mut sent, mut received, mut count, mut frames) = (0, Vec::new(), 0, 0);
        for _ in 0..10_000 {
            if sent < data.len() && site.a.stack.tcp_readiness(site.from).writable {
                sent += site.write(&data[sent..]);
            }
            let lose = |frame: &[u8]| {
                count += usize::from(frame.len() > 1000);
                frame.len() <= 1000 || count % 17 != 0
            };
            frames += carry(&mut site.a, &mut site.b, lose).0;
            received.extend(site.read());
            if received.len() == data.len() {
                break;
            }
            site.a.pass(SECOND_NS / 1000);
            site.b.pass(SECOND_NS / 1000);
        }
        assert!(received == data, "{} of {}", received.len(), data.len());
        let least = data.len() / whole_bytes(family);
        assert!(frames < least + least / 3, "{frames} frames for {least}");
    });
}

#[test]
fn rfc5681_4_2_what_the_port_merged_is_acknowledged_at_once() {
    both(|family| {
        let mut site = Site::new(family);
        for segments in [8, 2, 2] {
            let data = vec![7; segments * whole_bytes(family)];
            assert_eq!(site.write(&data), data.len());
            let given = given(&mut site.a);
            let [one] = &given[..] else { panic!("{} frames", given.len()) };
            assert_eq!(one.segment_bytes, whole_bytes(family));
            assert_eq!(cut(one).len(), segments);
            feed_merged(&mut site.b, one);
            let acks = site.b.sent();
            assert_eq!(acks.len(), 1, "one for all of them, and not late");
            let headers = EthernetHeader::BYTES + site.family.header_bytes();
            assert_eq!(acks[0].len(), headers + 32);
            site.a.feed(&acks[0]);
            assert_eq!(site.read(), data);
        }
    });
}

#[test]
fn a_port_that_does_not_cut_gets_whole_frames_only() {
    both(|family| {
        let mut site = Site::new(family);
        let (a, b) = (&mut site.a, &mut site.b);
        let any = SocketAddr::new(family.any(), PORT);
        let listener = a.stack.tcp_listen(any, 4, TcpOptions::default()).unwrap();
        let to = SocketAddr::new(family.host(1), PORT);
        let options = TcpOptions::default();
        let from = b.stack.tcp_connect(b.now_ns, &mut b.arena, None, to, options).unwrap();
        for _ in 0..3 {
            let frames = given(b);
            frames.iter().for_each(|frame| a.feed(&frame.bytes));
            given(a).iter().flat_map(cut).for_each(|frame| b.feed(&frame));
        }
        a.stack.tcp_accept(listener).unwrap();
        b.stack.tcp_send(b.now_ns, &mut b.arena, from, &[1; 20_000]).unwrap();
        let frames = given(b);
        assert!(frames.len() >= 10);
        let longest = EthernetHeader::BYTES + 1500;
        assert!(frames.iter().all(|one| one.segment_bytes == 0 && one.bytes.len() <= longest));
    });
}
