//! TCP fast path, receive and transmit: a whole segment in a plain packet (Ethernet without
//! tags, IP without options or fragments).
//!
//! As in the fast path for datagrams, nothing is dropped or answered here on behalf of the lower
//! layers. A packet that is not plain and valid takes the slow path through the parsers, which
//! find the reason. The stack behaves the same without this module.

use std::net::Ipv6Addr;

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{EtherType, Ipv4Header, Ipv6Header, Protocol, Sum, TcpHeader, tcp};

use super::plain::{
    IPV4_VERSION_AND_IHL, LINK_BYTES, array_at, ipv4_header_sum, is_plain_source_v4,
    is_plain_source_v6, write_at,
};
use super::template::HeaderTemplate;
use crate::AddressOwnership;
use crate::interface::Interface;
use crate::tcp::{FourTuple, OutSegment, Segment, TcpTable};

/// Bytes up to the end of the fixed TCP header.
const HEAD_V4_BYTES: usize = LINK_BYTES + Ipv4Header::BYTES + TcpHeader::BYTES;
const HEAD_V6_BYTES: usize = LINK_BYTES + Ipv6Header::BYTES + TcpHeader::BYTES;
const TCP_V4_OFFSET: usize = LINK_BYTES + Ipv4Header::BYTES;
const TCP_V6_OFFSET: usize = LINK_BYTES + Ipv6Header::BYTES;

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
    let Some(head) = bytes.first_chunk::<HEAD_V4_BYTES>() else { return false };
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
                interface.plain_tcp_v4(bytes)
            }
            _ => interface.plain_tcp_v6(bytes),
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
            Err(reason) => interface.counters.drops.count(reason),
        }
        arena.free(frame);
        None
    }
}

impl Interface {
    #[inline(always)]
    fn plain_tcp_v4<'a>(&self, bytes: &'a [u8]) -> Option<PlainSegment<'a>> {
        let head = bytes.first_chunk::<HEAD_V4_BYTES>()?;
        let packet_bytes = usize::from(u16::from_be_bytes(array_at(head, 16)));
        let (from, to) = (array_at(head, 26), array_at(head, 30));
        let plain = self.plain_link.matches(head.first_chunk()?)
            && head[14] == IPV4_VERSION_AND_IHL
            && u16::from_be_bytes(array_at(head, 20)) & 0x3fff == 0
            && ipv4_header_sum(head.first_chunk()?).is_valid_nonzero()
            && is_plain_source_v4(from)
            && self.addresses.is_for_us_v4(from, to);
        let segment = bytes.get(TCP_V4_OFFSET..LINK_BYTES + packet_bytes)?;
        let pseudo_sum = Sum::of_words([u64::from_ne_bytes(array_at(head, 26))])
            .with_u16(Protocol::TCP.0.into())
            .with_u16(segment.len() as u16);
        plain.then(|| PlainSegment {
            tuple: FourTuple::v4(to, from, array_at(head, TCP_V4_OFFSET)),
            segment,
            traffic_class: head[15],
            pseudo_sum,
        })
    }

    #[inline(always)]
    fn plain_tcp_v6<'a>(&self, bytes: &'a [u8]) -> Option<PlainSegment<'a>> {
        let head = bytes.first_chunk::<HEAD_V6_BYTES>()?;
        let segment_bytes = usize::from(u16::from_be_bytes(array_at(head, 18)));
        let (from, to): ([u8; 16], [u8; 16]) = (array_at(head, 22), array_at(head, 38));
        let plain = self.plain_link.matches(head.first_chunk()?)
            && head[14] >> 4 == 6
            && is_plain_source_v6(from)
            && self.addresses.is_local_v6(Ipv6Addr::from(to))
            && self.addresses.is_other_v6(Ipv6Addr::from(from));
        let segment = bytes.get(TCP_V6_OFFSET..TCP_V6_OFFSET + segment_bytes)?;
        let pseudo_sum =
            Sum::of(&head[22..54]).with_u16(Protocol::TCP.0.into()).with_u16(segment.len() as u16);
        plain.then(|| PlainSegment {
            tuple: FourTuple::v6(to, from, array_at(head, TCP_V6_OFFSET)),
            segment,
            traffic_class: head[14] << 4 | head[15] >> 4,
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
        let tcp_offset = if is_v4 { TCP_V4_OFFSET } else { TCP_V6_OFFSET };
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
            true => template.emit_tcp_v4(head, segment.len(), traffic_class),
            false => template.emit_tcp_v6(head, segment.len(), traffic_class),
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

impl HeaderTemplate {
    /// Writes the headers in front of a segment of `segment_bytes`. Returns the sum of the
    /// pseudo-header.
    #[inline(always)]
    fn emit_tcp_v4(&self, head: &mut [u8], segment_bytes: usize, traffic_class: u8) -> Sum {
        let Some(head) = head.first_chunk_mut::<TCP_V4_OFFSET>() else { return Sum::ZERO };
        self.copy_to(head);
        let total_bytes = (segment_bytes + Ipv4Header::BYTES) as u16;
        head[15] = traffic_class;
        write_at(head, 16, total_bytes.to_be_bytes());
        head[23] = Protocol::TCP.0;
        let words =
            [u64::from_ne_bytes(array_at(head, 14)), u64::from_ne_bytes(array_at(head, 22))];
        let last = u64::from(u32::from_ne_bytes(array_at(head, 30)));
        write_at(head, 24, Sum::of_words([words[0], words[1], last]).checksum().to_be_bytes());
        Sum::of_words([u64::from_ne_bytes(array_at(head, 26))])
            .with_u16(Protocol::TCP.0.into())
            .with_u16(segment_bytes as u16)
    }

    /// IPv6 counterpart of [`HeaderTemplate::emit_tcp_v4`].
    #[inline(always)]
    fn emit_tcp_v6(&self, head: &mut [u8], segment_bytes: usize, traffic_class: u8) -> Sum {
        let Some(head) = head.first_chunk_mut::<TCP_V6_OFFSET>() else { return Sum::ZERO };
        self.copy_to(head);
        write_at(head, 14, [0x60 | traffic_class >> 4, traffic_class << 4]);
        write_at(head, 18, (segment_bytes as u16).to_be_bytes());
        head[20] = Protocol::TCP.0;
        Sum::of(&head[22..54]).with_u16(Protocol::TCP.0.into()).with_u16(segment_bytes as u16)
    }
}
