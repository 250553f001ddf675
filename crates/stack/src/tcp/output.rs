//! Segments on their way out: from their connection into frames.

use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum, Frame, MAX_SEGMENT_BYTES};
use tidegate_wire::tcp::TcpFlags;
use tidegate_wire::{DropReason, Ipv6Header, Protocol, Sum, TcpHeader, checksum, tcp};

use super::TcpOptions;
use super::connection::Is;
use super::segment::Out;
use crate::Stack;
use crate::packet::Packet;
use crate::path::Path;

/// Segments of one connection before others have their turn.
const TURN_SEGMENTS: usize = 32;
/// The same where the port cuts segments: two packets of the largest kind.
const TURN_TRAIN_SEGMENTS: usize = 90;

/// What segments in one packet hold at most: a packet has 16 bits for its
/// length.
pub(crate) const LARGEST_TRAIN_BYTES: usize =
    u16::MAX as usize - Ipv6Header::BYTES - TcpHeader::BYTES - TcpHeader::MAX_OPTION_BYTES;

/// What cards cut, by the drivers of DPDK: no less data in a segment, no more segments.
const CUT_BYTES_MIN: u16 = 256;
const CUT_SEGMENTS: usize = 64;

/// The marks of the IP header (RFC 3168 section 5): ECT(0).
const ECN_CAPABLE: u8 = 2;

/// Segments in a row that leave as one, which the port cuts again. The
/// connection has sent each of them.
struct Train {
    all: Out,
    segment_bytes: u16,
}

impl Train {
    fn new(first: Out) -> Self {
        Self { segment_bytes: first.data_bytes, all: first }
    }

    /// Whether a segment was joined to the end: what goes in front of the data
    /// must be the same, but for the push flag, which the last one has.
    fn join(&mut self, next: &Out, most_bytes: usize) -> bool {
        let all = &mut self.all;
        let bytes = usize::from(all.data_bytes) + usize::from(next.data_bytes);
        let is_behind = next.seq == all.seq + u32::from(all.data_bytes)
            && all.data_bytes.is_multiple_of(self.segment_bytes.max(1))
            && (1..=self.segment_bytes).contains(&next.data_bytes)
            && (CUT_BYTES_MIN..=MAX_SEGMENT_BYTES as u16).contains(&self.segment_bytes)
            && bytes <= most_bytes.min(CUT_SEGMENTS * usize::from(self.segment_bytes));
        let is_alike = all.flags == TcpFlags::ACK
            && (next.flags == TcpFlags::ACK || next.flags == TcpFlags::ACK | TcpFlags::PSH)
            && (all.ack, all.window, all.ecn_capable) == (next.ack, next.window, next.ecn_capable)
            && all.options.as_bytes() == next.options.as_bytes();
        if is_behind && is_alike {
            all.data_bytes = bytes as u16;
            all.flags = next.flags;
        }
        is_behind && is_alike
    }

    /// The payload of each segment; 0 when there is only one.
    fn cut_bytes(&self) -> u16 {
        if self.all.data_bytes > self.segment_bytes { self.segment_bytes } else { 0 }
    }
}

impl Stack {
    /// Sends what connections have to send, as far as there is room. Called at
    /// the end of each burst; to be called after [`Stack::tcp_write`] and
    /// [`Stack::tcp_read`] when there is none.
    #[inline]
    pub fn tcp_flush(&mut self, now_ns: u64, arena: &mut Arena) {
        if !self.tcp.replies.is_empty() {
            self.send_tcp_replies(now_ns, arena);
        }
        self.tcp.feed_starved(now_ns);
        while let Some((index, remote)) = self.tcp.next_pending() {
            if !self.has_room_for_segments(arena) {
                self.tcp.put_back(index);
                return self.tcp.retry_later(now_ns);
            }
            self.take_turn(now_ns, arena, index, remote);
        }
    }

    /// TCP leaves room in the queue and frames in the arena to others: what it
    /// does not send now it sends later.
    fn has_room_for_segments(&self, arena: &Arena) -> bool {
        let queue = self.limits.transmit_frames;
        let queued = self.transmit.len().max(self.looped.len());
        queued < queue - queue / 4 && arena.available() > arena.capacity() / 4
    }

    fn take_turn(&mut self, now_ns: u64, arena: &mut Arena, index: u32, remote: IpAddr) {
        // Without a path segments are as good as lost; timers go on.
        let path = self.path(now_ns, arena, remote).ok();
        let mtu = path.as_ref().map_or(self.mtu, |path| path.mtu);
        let most_bytes = path.as_ref().map_or(0, |path| self.train_bytes(path, index));
        let mut left = if most_bytes > 0 { TURN_TRAIN_SEGMENTS } else { TURN_SEGMENTS };
        let mut train: Option<Train> = None;
        while left > 0 && self.has_room_for_segments(arena) {
            let Some(connection) = self.tcp.connections.at_mut(index) else { break };
            let Some(out) = connection.poll_output(now_ns, mtu, &mut self.tcp.shared) else {
                break;
            };
            left -= 1;
            let goes_on = connection.is.contains(Is::WANTS_OUTPUT);
            if !train.as_mut().is_some_and(|train| train.join(&out, most_bytes))
                && let Some(whole) = train.replace(Train::new(out))
            {
                self.send_train(arena, path.as_ref(), &whole, index);
            }
            if !goes_on {
                break;
            }
        }
        if let Some(train) = train {
            self.send_train(arena, path.as_ref(), &train, index);
        }
        self.tcp.settle(now_ns, index);
    }

    /// What one packet of a connection may hold beyond a segment: 0 unless the
    /// port cuts it and its headers are made ready.
    fn train_bytes(&self, path: &Path, index: u32) -> usize {
        let is_plain = |options: &TcpOptions| {
            path.plain_bytes > 0 && options.hop_limit.is_none_or(|limit| limit == self.hop_limit)
        };
        let connection = self.tcp.connections.at(index);
        let may = connection.is_some_and(|connection| {
            is_plain(&connection.options) && path.template.is_from(connection.ends.local_ip())
        });
        if may { self.segmentation_bytes } else { 0 }
    }

    fn send_train(&mut self, arena: &mut Arena, path: Option<&Path>, train: &Train, index: u32) {
        match path {
            Some(path) => {
                self.send_segment(arena, path, &train.all, train.cut_bytes(), Some(index));
            }
            None => self.counters.transmit_drops.count(DropReason::NoRoute),
        }
    }

    fn send_tcp_replies(&mut self, now_ns: u64, arena: &mut Arena) {
        let mut replies = std::mem::take(&mut self.tcp.replies);
        for out in replies.drain(..) {
            match self.path(now_ns, arena, out.ends.remote_ip()) {
                Ok(path) => self.send_segment(arena, &path, &out, 0, None),
                Err(_) => self.counters.transmit_drops.count(DropReason::NoRoute),
            }
        }
        // The memory is used again.
        self.tcp.replies = replies;
    }

    /// Puts a segment into a frame and sends it; several, if the port is to cut
    /// them, with so many bytes each.
    fn send_segment(
        &mut self,
        arena: &mut Arena,
        path: &Path,
        out: &Out,
        cut_bytes: u16,
        index: Option<u32>,
    ) {
        let Some(mut frame) = arena.alloc() else {
            return self.counters.transmit_drops.count(DropReason::NoBuffer);
        };
        if out.data_bytes > 0 && !arena.set_len(&mut frame, out.data_bytes.into()) {
            debug_assert!(false, "a segment is no larger than a frame");
            return arena.free(frame);
        }
        let connection = index.and_then(|index| self.tcp.connections.at_mut(index));
        let (hop_limit, traffic_class) = match connection {
            Some(connection) => {
                if out.data_bytes > 0 {
                    let bytes = arena.bytes_mut(&mut frame);
                    connection.outgoing.read(&self.tcp.shared.chunks, out.data_at as usize, bytes);
                }
                (connection.options.hop_limit, connection.options.traffic_class & !3)
            }
            None => (None, 0),
        };
        let traffic_class = traffic_class | if out.ecn_capable { ECN_CAPABLE } else { 0 };
        if path.plain_bytes > 0
            && hop_limit.is_none_or(|limit| limit == self.hop_limit)
            && path.template.is_from(out.ends.local_ip())
        {
            let (template, cut) = (&path.template, cut_bytes);
            return self.send_plain_segment(arena, template, out, cut, traffic_class, frame);
        }
        let packet = Packet {
            source: out.ends.local_ip(),
            destination: out.ends.remote_ip(),
            protocol: Protocol::TCP,
            hop_limit: hop_limit.unwrap_or(self.hop_limit),
            traffic_class,
        };
        // Nobody looks at the checksum of what we send to ourselves.
        let partial = self.transmit_checksum || path.loops;
        self.put_header(arena, &packet, out, partial, &mut frame);
        self.send_frame(arena, &packet, path, None, frame);
    }

    /// Writes the header in front of the payload; with a partial checksum, if the
    /// rest is left to the port.
    fn put_header(
        &self,
        arena: &mut Arena,
        packet: &Packet,
        out: &Out,
        partial: bool,
        frame: &mut Frame,
    ) {
        let header_bytes = TcpHeader::BYTES + out.options.as_bytes().len();
        frame.retreat(header_bytes);
        let header_at = self.link_bytes() + packet.header_bytes();
        let segment = arena.bytes_mut(frame);
        let pseudo = pseudo_header(packet.source, packet.destination, segment.len());
        out.emit(segment, if partial { pseudo.fold() } else { 0 });
        if partial {
            frame.set_checksum(Checksum::Partial { start: header_at as u16, offset: 16 });
        } else {
            tcp::fill_checksum(pseudo, segment);
            frame.set_checksum(Checksum::Unknown);
        }
    }
}

fn pseudo_header(source: IpAddr, destination: IpAddr, bytes: usize) -> Sum {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            checksum::pseudo_header_v4(source, destination, Protocol::TCP, bytes as u16)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            checksum::pseudo_header_v6(source, destination, Protocol::TCP, bytes as u32)
        }
        _ => Sum::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::segment::Ends;
    use crate::tcp::seq::Seq;

    /// How many whole segments of this size are one train.
    fn segments_of_train(segment_bytes: u16, most_bytes: usize) -> usize {
        let ends = Ends::new("192.0.2.1:80".parse().unwrap(), "192.0.2.2:4000".parse().unwrap());
        let segment = |number: usize| Out {
            seq: Seq(0) + (number * usize::from(segment_bytes)) as u32,
            data_bytes: segment_bytes,
            ..Out::bare(ends, TcpFlags::ACK)
        };
        let mut train = Train::new(segment(0));
        1 + (1..1000).take_while(|&number| train.join(&segment(number), most_bytes)).count()
    }

    #[test]
    fn a_train_is_one_that_cards_cut() {
        assert_eq!(segments_of_train(1448, LARGEST_TRAIN_BYTES), 45);
        assert_eq!(segments_of_train(1448, 3 * 1448), 3);
        assert_eq!(segments_of_train(536, LARGEST_TRAIN_BYTES), 64);
        assert_eq!(segments_of_train(256, LARGEST_TRAIN_BYTES), 64);
        assert_eq!(segments_of_train(255, LARGEST_TRAIN_BYTES), 1);
    }
}
