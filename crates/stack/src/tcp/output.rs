//! Segments on their way out: from their connection into frames.

use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropReason, Protocol, Sum, TcpHeader, checksum, tcp};

use super::segment::Out;
use crate::Stack;
use crate::packet::Packet;
use crate::path::Path;

/// Segments of one connection before others have their turn.
const TURN_SEGMENTS: usize = 32;

/// The marks of the IP header (RFC 3168 section 5): ECT(0).
const ECN_CAPABLE: u8 = 2;

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
        self.transmit.len() < queue - queue / 4 && arena.available() > arena.capacity() / 4
    }

    fn take_turn(&mut self, now_ns: u64, arena: &mut Arena, index: u32, remote: IpAddr) {
        // Without a path segments are as good as lost; timers go on.
        let path = self.path(now_ns, arena, remote).ok();
        let mtu = path.as_ref().map_or(self.mtu, |path| path.mtu);
        let mut left = TURN_SEGMENTS;
        while left > 0 && self.has_room_for_segments(arena) {
            let Some(connection) = self.tcp.connections.at_mut(index) else { return };
            let Some(out) = connection.poll_output(now_ns, mtu, &mut self.tcp.shared) else {
                return self.tcp.settle(now_ns, index);
            };
            match &path {
                Some(path) => self.send_segment(arena, path, &out, Some(index)),
                None => self.counters.transmit_drops.count(DropReason::NoRoute),
            }
            left -= 1;
            if self.tcp.connections.at(index).is_none_or(|connection| !connection.is.wants_output) {
                break;
            }
        }
        self.tcp.settle(now_ns, index);
    }

    fn send_tcp_replies(&mut self, now_ns: u64, arena: &mut Arena) {
        let mut replies = std::mem::take(&mut self.tcp.replies);
        for out in replies.drain(..) {
            match self.path(now_ns, arena, out.ends.remote_ip()) {
                Ok(path) => self.send_segment(arena, &path, &out, None),
                Err(_) => self.counters.transmit_drops.count(DropReason::NoRoute),
            }
        }
        // The memory is used again.
        self.tcp.replies = replies;
    }

    /// Puts a segment into a frame and sends it.
    fn send_segment(&mut self, arena: &mut Arena, path: &Path, out: &Out, index: Option<u32>) {
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
            return self.send_plain_segment(arena, &path.template, out, traffic_class, frame);
        }
        let packet = Packet {
            source: out.ends.local_ip(),
            destination: out.ends.remote_ip(),
            protocol: Protocol::TCP,
            hop_limit: hop_limit.unwrap_or(self.hop_limit),
            traffic_class,
        };
        self.put_header(arena, &packet, out, &mut frame);
        self.send_frame(arena, &packet, path, None, frame);
    }

    /// Writes the header in front of the payload.
    fn put_header(&self, arena: &mut Arena, packet: &Packet, out: &Out, frame: &mut Frame) {
        let header_bytes = TcpHeader::BYTES + out.options.as_bytes().len();
        frame.retreat(header_bytes);
        let header_at = self.link_bytes() + packet.header_bytes();
        let segment = arena.bytes_mut(frame);
        let pseudo = pseudo_header(packet.source, packet.destination, segment.len());
        out.emit(segment, if self.transmit_checksum { pseudo.fold() } else { 0 });
        if self.transmit_checksum {
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
