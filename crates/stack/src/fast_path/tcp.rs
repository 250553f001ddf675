//! TCP fast path, receive and transmit: a whole segment in a plain packet (Ethernet without
//! tags, IP without options or fragments).
//!
//! As in the fast path for datagrams, nothing is dropped or answered here on behalf of the lower
//! layers. A packet that is not plain and valid takes the slow path through the parsers, which
//! find the reason. The stack behaves the same without this module.

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropReason, EtherType, Protocol, TcpHeader, tcp};

use super::family::{Family, V4, V6};
use super::plain::array_at;
use super::template::HeaderTemplate;
use crate::AddressOwnership;
use crate::interface::Interface;
use crate::tcp::{
    Connection, DataHeader, OutSegment, Segment, TcpShared, TcpTable, TupleAddresses,
};

/// True when a frame looks like one that [`TcpTable::handle_plain`] accepts.
#[inline(always)]
pub(crate) fn may_be_plain_tcp(bytes: &[u8]) -> bool {
    let Some(head) = bytes.get(..V4::TRANSPORT_OFFSET + TcpHeader::BYTES) else { return false };
    match u16::from_be_bytes(array_at(head, 12)) {
        ethertype if ethertype == EtherType::IPV4.0 => head[23] == Protocol::TCP.0,
        ethertype if ethertype == EtherType::IPV6.0 => head[20] == Protocol::TCP.0,
        _ => false,
    }
}

impl TcpTable {
    /// Processes a frame that is plain and valid. Returns any other frame.
    #[inline(never)]
    pub(crate) fn handle_plain(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        frame: Frame,
        arena: &mut Arena,
    ) -> Option<Frame> {
        let (bytes, is_checked) = (arena.bytes(&frame), !frame.is_unchecked());
        let result = match bytes.get(12) {
            Some(&high) if u16::from(high) << 8 == EtherType::IPV4.0 & 0xff00 => {
                self.handle_plain_segment::<V4>(interface, now_ns, bytes, is_checked)
            }
            _ => self.handle_plain_segment::<V6>(interface, now_ns, bytes, is_checked),
        };
        match result {
            None => return Some(frame),
            Some(Ok(())) => interface.counters.handled += 1,
            Some(Err(reason)) => interface.counters.count_drop(reason),
        }
        arena.free(frame);
        None
    }

    /// Processes the segment of a frame that is plain and valid; `None` for any other frame.
    /// `is_checked`: the device has verified the checksum.
    #[inline(always)]
    fn handle_plain_segment<F: Family>(
        &mut self,
        interface: &Interface,
        now_ns: u64,
        bytes: &[u8],
        is_checked: bool,
    ) -> Option<Result<(), DropReason>> {
        let head = bytes.get(..F::TRANSPORT_OFFSET + TcpHeader::BYTES)?;
        let addresses = F::addresses(head);
        let is_plain = interface.plain_link.matches(head)
            && F::is_plain_tcp(head)
            && F::is_for_us(&interface.addresses, addresses);
        let segment = bytes.get(F::TRANSPORT_OFFSET..F::packet_end(head)).filter(|_| is_plain)?;
        let pseudo_sum = F::address_sum(addresses)
            .with_u16(Protocol::TCP.0.into())
            .with_u16(segment.len() as u16);
        if !is_checked && !pseudo_sum.with(segment).is_valid_nonzero() {
            return None;
        }
        let (header, payload) = TcpHeader::parse(segment).ok()?;
        let segment = Segment::new(&header, segment, payload, F::traffic_class(head)).ok()?;
        let tuple = F::four_tuple(addresses, array_at(head, F::TRANSPORT_OFFSET));
        if tuple.local_port == 0 || tuple.remote_port == 0 {
            return None;
        }
        let may_reset = interface.ownership == AddressOwnership::Exclusive;
        Some(self.handle_segment(now_ns, tuple, &segment, may_reset))
    }
}

impl Interface {
    /// Sends a frame that holds the payload of a segment and has headroom for the headers of
    /// `template`. The device cuts the payload into segments of `gso_size` bytes, unless that is 0.
    pub(crate) fn send_plain_segment(
        &mut self,
        arena: &mut Arena,
        template: &HeaderTemplate,
        out: &OutSegment,
        gso_size: u16,
        traffic_class: u8,
        mut frame: Frame,
    ) {
        let is_v4 = out.tuple.is_v4();
        let tcp_offset = if is_v4 { V4::TRANSPORT_OFFSET } else { V6::TRANSPORT_OFFSET };
        let options = out.options.as_bytes();
        let header_bytes = TcpHeader::BYTES + options.len();
        frame.retreat(tcp_offset + header_bytes);
        let partial = self.transmit_checksum;
        let Some((head, segment)) = arena.bytes_mut(&mut frame).split_at_mut_checked(tcp_offset)
        else {
            debug_assert!(false, "a frame for sending has headroom");
            return arena.free(frame);
        };
        let pseudo = match is_v4 {
            true => template.emit_tcp::<V4>(head, segment.len(), traffic_class),
            false => template.emit_tcp::<V6>(head, segment.len(), traffic_class),
        };
        out.emit(segment, if partial { pseudo.fold() } else { 0 });
        if partial {
            frame.set_checksum(Checksum::Partial { start: tcp_offset as u16, offset: 16 });
            frame.set_segment_bytes(gso_size);
        } else {
            tcp::fill_checksum(pseudo, segment);
            frame.set_checksum(Checksum::Unknown);
        }
        self.push_transmit(arena, frame);
    }
}

impl TcpTable {
    /// Sends all that a connection has to send, if it is one segment in a plain packet while nothing
    /// is in flight. Returns false, with nothing sent, in every other case.
    #[inline]
    pub(crate) fn send_lone_segment(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        index: u32,
    ) -> bool {
        if interface.transmit_classes.is_some() {
            return false;
        }
        let Self { connections, shared, .. } = self;
        let Some(connection) = connections.at_mut(index) else { return false };
        let frame = match connection.tuple.addresses() {
            TupleAddresses::V4(local, remote) => {
                interface.put_lone_segment::<V4>(now_ns, arena, connection, shared, (local, remote))
            }
            TupleAddresses::V6(local, remote) => {
                interface.put_lone_segment::<V6>(now_ns, arena, connection, shared, (local, remote))
            }
        };
        let Some(frame) = frame else { return false };
        interface.push_transmit(arena, frame);
        true
    }
}

impl Interface {
    /// Takes the segment of [`TcpTable::send_lone_segment`] from the connection, whose local and
    /// remote address are given, and puts it into a frame.
    #[inline(always)]
    fn put_lone_segment<F: Family>(
        &self,
        now_ns: u64,
        arena: &mut Arena,
        connection: &mut Connection,
        shared: &mut TcpShared,
        (local, remote): (F::Address, F::Address),
    ) -> Option<Frame> {
        let path = self.paths.get(now_ns, remote.into())?;
        let options = &connection.options;
        let is_plain = path.max_plain_frame_bytes > 0
            && options.hop_limit.is_none()
            && options.dont_fragment
            && path.template.source::<F>() == local;
        if !is_plain {
            return None;
        }
        let traffic_class = options.traffic_class & !3;
        let bytes = connection.lone_segment_bytes(path.segment_mtu.into())?;
        let mut frame = arena.alloc()?;
        let fits = arena.set_len(&mut frame, bytes as usize);
        frame.retreat(F::TRANSPORT_OFFSET + DataHeader::BYTES);
        let space = arena.bytes_mut(&mut frame).split_at_mut_checked(F::TRANSPORT_OFFSET);
        let parts = space.filter(|_| fits).and_then(|(head, segment)| {
            let (header, payload) = segment.split_first_chunk_mut()?;
            Some((head, header, payload))
        });
        let Some((head, header, payload)) = parts else {
            arena.free(frame);
            return None;
        };
        let taken = connection.take_lone_segment(now_ns, bytes, shared);
        let at = taken.sequence.since(connection.send.base) as usize;
        connection.send.queue.read(&shared.pool, at, payload);
        taken.emit(&connection.tuple, header);
        let segment_bytes = DataHeader::BYTES + payload.len();
        let pseudo = path.template.emit_tcp::<F>(head, segment_bytes, traffic_class);
        if self.transmit_checksum {
            DataHeader::put_checksum(header, pseudo.fold());
            let start = F::TRANSPORT_OFFSET as u16;
            frame.set_checksum(Checksum::Partial { start, offset: 16 });
        } else {
            DataHeader::put_checksum(header, pseudo.with(header).with(payload).checksum());
            frame.set_checksum(Checksum::Unknown);
        }
        Some(frame)
    }
}
