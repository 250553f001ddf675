//! TCP fast path, receive and transmit: a whole segment in a plain packet (Ethernet without
//! tags, IP without options or fragments).
//!
//! As in the fast path for datagrams, nothing is dropped or answered here on behalf of the lower
//! layers. A packet that is not plain and valid takes the slow path through the parsers, which
//! find the reason. The stack behaves the same without this module.

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{EtherType, Protocol, Sum, TcpHeader, tcp};

use super::family::{Family, V4, V6};
use super::plain::array_at;
use super::template::HeaderTemplate;
use crate::AddressOwnership;
use crate::interface::Interface;
use crate::tcp::{FourTuple, OutSegment, Segment, TcpTable};

/// TCP segment of a plain packet.
struct PlainSegment<'a> {
    tuple: FourTuple,
    segment: &'a [u8],
    traffic_class: u8,
    /// Checksum over the pseudo-header.
    pseudo_sum: Sum,
}

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
        let bytes = arena.bytes(&frame);
        let plain = match bytes.get(12) {
            Some(&high) if u16::from(high) << 8 == EtherType::IPV4.0 & 0xff00 => {
                interface.plain_segment::<V4>(bytes)
            }
            _ => interface.plain_segment::<V6>(bytes),
        };
        let Some(plain) = plain else { return Some(frame) };
        if frame.is_unchecked() && !plain.pseudo_sum.with(plain.segment).is_valid_nonzero() {
            return Some(frame);
        }
        let Ok((header, payload)) = TcpHeader::parse(plain.segment) else { return Some(frame) };
        let PlainSegment { tuple, segment, traffic_class, .. } = plain;
        let Ok(segment) = Segment::new(&header, segment, payload, traffic_class) else {
            return Some(frame);
        };
        if tuple.local_port == 0 || tuple.remote_port == 0 {
            return Some(frame);
        }
        let may_reset = interface.ownership == AddressOwnership::Exclusive;
        match self.handle_segment(now_ns, tuple, &segment, may_reset) {
            Ok(()) => interface.counters.handled += 1,
            Err(reason) => interface.counters.count_drop(reason),
        }
        arena.free(frame);
        None
    }
}

impl Interface {
    /// Segment of a frame that is plain and valid, except for what the TCP header says.
    #[inline(always)]
    fn plain_segment<'a, F: Family>(&self, bytes: &'a [u8]) -> Option<PlainSegment<'a>> {
        let head = bytes.get(..F::TRANSPORT_OFFSET + TcpHeader::BYTES)?;
        let addresses = F::addresses(head);
        let plain = self.plain_link.matches(head)
            && F::is_plain_tcp(head)
            && F::is_for_us(&self.addresses, addresses);
        let segment = bytes.get(F::TRANSPORT_OFFSET..F::packet_end(head))?;
        let pseudo_sum = F::address_sum(addresses)
            .with_u16(Protocol::TCP.0.into())
            .with_u16(segment.len() as u16);
        plain.then(|| PlainSegment {
            tuple: F::four_tuple(addresses, array_at(head, F::TRANSPORT_OFFSET)),
            segment,
            traffic_class: F::traffic_class(head),
            pseudo_sum,
        })
    }

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
