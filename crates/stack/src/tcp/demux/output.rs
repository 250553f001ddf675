//! TCP transmit: puts the segments of connections into frames.

use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum, Frame, MAX_SEGMENT_BYTES};
use tidegate_wire::tcp::TcpFlags;
use tidegate_wire::{DropReason, Ipv6Header, Protocol, Sum, TcpHeader, checksum, tcp};

use super::pending::Turn;
use super::table::TcpTable;
use crate::interface::Interface;
use crate::ip::packet::Packet;
use crate::ip::path::Path;
use crate::tcp::flags::ConnFlags;
use crate::tcp::segment::OutSegment;
use crate::tcp::socket::TcpOptions;

/// Segments that one connection may send before the other connections have their turn.
const MAX_TURN_SEGMENTS: usize = 32;
/// The same limit with TSO: two packets of the largest size.
const MAX_TSO_TURN_SEGMENTS: usize = 90;

/// The same limit for a connection that had no output before, while others wait: a short message
/// leaves before the rest of long ones.
const MAX_FIRST_TURN_SEGMENTS: usize = 2;

/// Cost of what one flush sends at most: a frame costs 1, and 1 more for each [`COSTLY_BYTES`]. The
/// rest leaves after the next burst has been received, which would otherwise wait for all of it.
const MAX_FLUSH_COST: usize = 64;
/// Payload bytes that cost as much as a frame.
const COSTLY_BYTES: usize = 16 << 10;

/// Largest TCP payload of one packet, in bytes: the IP header has a 16-bit length.
pub(crate) const MAX_TSO_BYTES: usize =
    u16::MAX as usize - Ipv6Header::BYTES - TcpHeader::BYTES - TcpHeader::MAX_OPTION_BYTES;

/// Limits of the TSO engines of NICs, as in the drivers of DPDK: smallest payload of a
/// segment in bytes, and largest number of segments.
const MIN_GSO_SIZE_BYTES: u16 = 256;
const MAX_TSO_SEGMENTS: usize = 64;

/// ECN field of the IP header (RFC 3168 section 5): ECT(0).
const ECT_0: u8 = 2;

/// Consecutive segments joined into one packet, which the device segments again (TSO). The
/// connection counts each segment as sent.
struct TsoSegment {
    merged: OutSegment,
    gso_size: u16,
}

impl TsoSegment {
    fn new(first: OutSegment) -> Self {
        Self { gso_size: first.data_bytes, merged: first }
    }

    /// Appends the segment `next` if possible; returns true if appended. The headers must be
    /// equal except for the push flag, which only the last segment has.
    fn try_append(&mut self, next: &OutSegment, max_bytes: usize) -> bool {
        let merged = &mut self.merged;
        let bytes = usize::from(merged.data_bytes) + usize::from(next.data_bytes);
        let is_contiguous = next.seq == merged.seq + u32::from(merged.data_bytes)
            && merged.data_bytes.is_multiple_of(self.gso_size.max(1))
            && (1..=self.gso_size).contains(&next.data_bytes)
            && (MIN_GSO_SIZE_BYTES..=MAX_SEGMENT_BYTES as u16).contains(&self.gso_size)
            && bytes <= max_bytes.min(MAX_TSO_SEGMENTS * usize::from(self.gso_size));
        let has_same_header = merged.flags == TcpFlags::ACK
            && (next.flags == TcpFlags::ACK || next.flags == TcpFlags::ACK | TcpFlags::PSH)
            && (merged.ack, merged.window, merged.ecn_capable)
                == (next.ack, next.window, next.ecn_capable)
            && merged.options.as_bytes() == next.options.as_bytes();
        if is_contiguous && has_same_header {
            merged.data_bytes = bytes as u16;
            merged.flags = next.flags;
        }
        is_contiguous && has_same_header
    }

    /// Payload bytes of each segment (the kernel's `gso_size`); 0 for a single segment.
    fn effective_gso_size(&self) -> u16 {
        if self.merged.data_bytes > self.gso_size { self.gso_size } else { 0 }
    }
}

impl TcpTable {
    /// Implements [`crate::Stack::tcp_flush`].
    #[inline]
    pub(crate) fn flush(&mut self, interface: &mut Interface, now_ns: u64, arena: &mut Arena) {
        self.flush_cost = 0;
        if !self.replies.is_empty() {
            self.send_replies(interface, now_ns, arena);
        }
        self.reclaim_memory(&mut interface.counters, now_ns);
        self.wake_memory_waiters(now_ns);
        if interface.transmit_classes.is_some() {
            self.resume_unblocked(interface);
        }
        if self.pending.is_empty() {
            return;
        }
        while let Some((index, turn)) = self.next_pending() {
            if !interface.has_space_for_segments(arena) {
                self.put_pending_back(index, turn);
                return self.retry_later(now_ns);
            }
            if self.flush_cost >= MAX_FLUSH_COST {
                self.put_pending_back(index, turn);
                return self.go_on_later(now_ns);
            }
            self.flush_connection(interface, now_ns, arena, index, turn);
        }
    }

    /// Gives a connection its turn. There is space for a segment.
    fn flush_connection(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        index: u32,
        turn: Turn,
    ) {
        if self.send_lone_segment(interface, now_ns, arena, index) {
            self.flush_cost += 1;
            return self.update_timer(index);
        }
        let mut space_bytes = self.class_space(interface, index);
        if space_bytes == 0 {
            return;
        }
        let Some(connection) = self.connections.at(index) else { return };
        let remote = connection.tuple.remote_ip();
        // Without a path, segments count as lost; the timers of the connection still run.
        let path = interface.path(now_ns, arena, remote);
        let path = path.as_ref().ok();
        let mtu = path.map_or(interface.mtu, |path| path.segment_mtu.into());
        let max_bytes = path.map_or(0, |path| self.max_tso_bytes(interface, path, index));
        let mut segments_left = match turn {
            Turn::First if !self.pending.is_empty() => MAX_FIRST_TURN_SEGMENTS,
            _ if max_bytes > 0 => MAX_TSO_TURN_SEGMENTS,
            _ => MAX_TURN_SEGMENTS,
        };
        let mut tso: Option<TsoSegment> = None;
        while segments_left > 0 && space_bytes > 0 {
            let Some(connection) = self.connections.at_mut(index) else { break };
            let Some(out) = connection.poll_output(now_ns, mtu, &mut self.shared) else {
                break;
            };
            segments_left -= 1;
            space_bytes = space_bytes.saturating_sub(out.data_bytes.into());
            let has_more = connection.flags.contains(ConnFlags::WANTS_OUTPUT);
            if max_bytes == 0 {
                self.send_on_path(interface, arena, path, &out, 0, index);
            } else if !tso.as_mut().is_some_and(|train| train.try_append(&out, max_bytes))
                && let Some(complete) = tso.replace(TsoSegment::new(out))
            {
                let gso_size = complete.effective_gso_size();
                self.send_on_path(interface, arena, path, &complete.merged, gso_size, index);
            }
            if !has_more || !interface.has_space_for_segments(arena) {
                break;
            }
        }
        if let Some(tso) = tso {
            let gso_size = tso.effective_gso_size();
            self.send_on_path(interface, arena, path, &tso.merged, gso_size, index);
        }
        interface.queue_by_class(now_ns, arena);
        self.update_for_turn(now_ns, index, Turn::Further);
    }

    /// Bytes that a connection may queue in its transmit class now. With 0 the connection waits: it
    /// stays pending until [`TcpTable::resume_unblocked`].
    #[inline]
    fn class_space(&mut self, interface: &mut Interface, index: u32) -> usize {
        let Some(classes) = &mut interface.transmit_classes else { return usize::MAX };
        let Some(connection) = self.connections.at_mut(index) else { return usize::MAX };
        let traffic_class = connection.options.traffic_class;
        let space = classes.space_or_wait(&connection.tuple, traffic_class, index);
        if space == 0 {
            connection.flags.insert(ConnFlags::PENDING);
        }
        space
    }

    /// Gives the connections whose flows have space again their turns.
    #[cold]
    fn resume_unblocked(&mut self, interface: &mut Interface) {
        let Some(classes) = &mut interface.transmit_classes else { return };
        while let Some(index) = classes.take_unblocked() {
            // Without the flag, the connection that waited has ended.
            if self.connections.at(index).is_some_and(|own| own.flags.contains(ConnFlags::PENDING))
            {
                self.pending.push(index, Turn::Further);
            }
        }
    }

    /// Largest TSO payload for a connection on `path`, in bytes. 0 unless the device does TSO
    /// and the path has a header template.
    fn max_tso_bytes(&self, interface: &Interface, path: &Path, index: u32) -> usize {
        let is_plain = |options: &TcpOptions| {
            path.max_plain_frame_bytes > 0
                && options.hop_limit.is_none_or(|limit| limit == interface.hop_limit)
        };
        let connection = self.connections.at(index);
        let can_use_tso = connection.is_some_and(|connection| {
            is_plain(&connection.options) && path.template.is_from(connection.tuple.local_ip())
        });
        if can_use_tso { interface.max_tso_bytes.min(MAX_TSO_BYTES) } else { 0 }
    }

    /// Sends a segment of a connection, or counts it as lost without a path.
    #[inline]
    fn send_on_path(
        &mut self,
        interface: &mut Interface,
        arena: &mut Arena,
        path: Option<&Path>,
        out: &OutSegment,
        gso_size: u16,
        index: u32,
    ) {
        match path {
            Some(path) => self.send_segment(interface, arena, path, out, gso_size, Some(index)),
            None => interface.counters.count_transmit_drop(DropReason::NoRoute),
        }
    }

    fn send_replies(&mut self, interface: &mut Interface, now_ns: u64, arena: &mut Arena) {
        let mut replies = std::mem::take(&mut self.replies);
        for out in replies.drain(..) {
            match interface.path(now_ns, arena, out.tuple.remote_ip()) {
                Ok(path) => self.send_segment(interface, arena, &path, &out, 0, None),
                Err(_) => interface.counters.count_transmit_drop(DropReason::NoRoute),
            }
        }
        // Keeps the allocation for the next replies.
        self.replies = replies;
    }

    /// Puts a segment into a frame and sends the frame. With `gso_size` above 0, the device cuts
    /// the payload into segments of `gso_size` bytes.
    fn send_segment(
        &mut self,
        interface: &mut Interface,
        arena: &mut Arena,
        path: &Path,
        out: &OutSegment,
        gso_size: u16,
        index: Option<u32>,
    ) {
        let Some(mut frame) = arena.alloc() else {
            return interface.counters.count_transmit_drop(DropReason::NoBuffer);
        };
        if out.data_bytes > 0 && !arena.set_len(&mut frame, out.data_bytes.into()) {
            debug_assert!(false, "a segment is no larger than a frame");
            return arena.free(frame);
        }
        self.flush_cost += 1 + usize::from(out.data_bytes) / COSTLY_BYTES;
        let connection = index.and_then(|index| self.connections.at_mut(index));
        let (hop_limit, traffic_class, dont_fragment) = match connection {
            Some(connection) => {
                if out.data_bytes > 0 {
                    let bytes = arena.bytes_mut(&mut frame);
                    connection.send.queue.read(&self.shared.pool, out.data_at as usize, bytes);
                }
                let options = &connection.options;
                (options.hop_limit, options.traffic_class & !3, options.dont_fragment)
            }
            None => (None, 0, true),
        };
        let traffic_class = traffic_class | if out.ecn_capable { ECT_0 } else { 0 };
        if path.max_plain_frame_bytes > 0
            && hop_limit.is_none_or(|limit| limit == interface.hop_limit)
            && path.template.is_from(out.tuple.local_ip())
            && dont_fragment
        {
            let (template, gso_size) = (&path.template, gso_size);
            return interface.send_plain_segment(
                arena,
                template,
                out,
                gso_size,
                traffic_class,
                frame,
            );
        }
        let packet = Packet {
            source: out.tuple.local_ip(),
            destination: out.tuple.remote_ip(),
            protocol: Protocol::TCP,
            hop_limit: hop_limit.unwrap_or(interface.hop_limit),
            traffic_class,
        };
        // Packets to ourselves need no checksum: the receiver does not verify it.
        let partial = interface.transmit_checksum || path.is_loopback;
        interface.put_tcp_header(arena, &packet, out, partial, &mut frame);
        if dont_fragment || !out.tuple.is_v4() {
            return interface.send_frame(arena, &packet, path, None, frame);
        }
        let path = Path { routers_fragment: true, ..*path };
        interface.send_frame(arena, &packet, &path, None, frame);
    }
}

impl Interface {
    /// True while TCP may send: the last quarter of the transmit queue and of the arena is
    /// reserved for other protocols. Segments that are held back go out later.
    fn has_space_for_segments(&self, arena: &Arena) -> bool {
        let queue_limit = self.limits.transmit_frames;
        let queued = self.transmit.len().max(self.loopback.len());
        queued < queue_limit - queue_limit / 4 && arena.available() > arena.capacity() / 4
    }

    /// Writes the TCP header in front of the payload. `partial`: only the pseudo-header sum is
    /// filled in, and the device completes the checksum.
    fn put_tcp_header(
        &self,
        arena: &mut Arena,
        packet: &Packet,
        out: &OutSegment,
        partial: bool,
        frame: &mut Frame,
    ) {
        let header_bytes = TcpHeader::BYTES + out.options.as_bytes().len();
        frame.retreat(header_bytes);
        let header_at = self.link_header_bytes() + packet.header_bytes();
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
    use crate::tcp::segment::FourTuple;
    use crate::tcp::seq::Seq;

    /// Number of full segments of `segment_bytes` that join into one TSO segment.
    fn segments_appended(segment_bytes: u16, max_bytes: usize) -> usize {
        let tuple =
            FourTuple::new("192.0.2.1:80".parse().unwrap(), "192.0.2.2:4000".parse().unwrap());
        let segment = |number: usize| OutSegment {
            seq: Seq(0) + (number * usize::from(segment_bytes)) as u32,
            data_bytes: segment_bytes,
            ..OutSegment::bare(tuple, TcpFlags::ACK)
        };
        let mut tso = TsoSegment::new(segment(0));
        1 + (1..1000).take_while(|&number| tso.try_append(&segment(number), max_bytes)).count()
    }

    #[test]
    fn tso_segments_respect_nic_limits() {
        assert_eq!(segments_appended(1448, MAX_TSO_BYTES), 45);
        assert_eq!(segments_appended(1448, 3 * 1448), 3);
        assert_eq!(segments_appended(536, MAX_TSO_BYTES), 64);
        assert_eq!(segments_appended(256, MAX_TSO_BYTES), 64);
        assert_eq!(segments_appended(255, MAX_TSO_BYTES), 1);
    }
}
