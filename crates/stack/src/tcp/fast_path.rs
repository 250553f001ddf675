//! The short way for TCP: a whole segment on plain Ethernet, in and out, without
//! IP options, tags or fragments.
//!
//! As in the short way for datagrams, nothing is dropped or answered here for
//! what the lower layers say: what is not plain and right goes through the
//! parsers, which find the reason. So it could be left out without a change in
//! what the stack does.

use std::net::Ipv6Addr;

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, Ipv6Header, Protocol, Sum, TcpHeader, tcp,
};

use super::segment::{Ends, Out, Segment};
use crate::fast_path::{Template, header_sum, is_plain_source_v4, is_plain_source_v6, put};
use crate::udp::array_at;
use crate::{Ownership, Stack};

const LINK_BYTES: usize = EthernetHeader::BYTES;
/// Everything up to the end of the fixed TCP header.
const HEAD_V4_BYTES: usize = LINK_BYTES + Ipv4Header::BYTES + TcpHeader::BYTES;
const HEAD_V6_BYTES: usize = LINK_BYTES + Ipv6Header::BYTES + TcpHeader::BYTES;
const TCP_V4_AT: usize = LINK_BYTES + Ipv4Header::BYTES;
const TCP_V6_AT: usize = LINK_BYTES + Ipv6Header::BYTES;
/// Version and header length of IPv4 without options.
const PLAIN_V4: u8 = 0x45;

/// A plain packet that holds a segment.
struct Plain<'a> {
    ends: Ends,
    segment: &'a [u8],
    traffic_class: u8,
    /// The sum of the pseudo-header.
    pseudo: Sum,
}

/// Whether a frame looks like one that [`Stack::ingest_plain_tcp`] takes.
#[inline(always)]
pub(crate) fn may_be_plain_tcp(bytes: &[u8]) -> bool {
    let Some(head) = bytes.first_chunk::<HEAD_V4_BYTES>() else { return false };
    match u16::from_be_bytes(array_at(head, 12)) {
        ethertype if ethertype == EtherType::IPV4.0 => head[23] == Protocol::TCP.0,
        ethertype if ethertype == EtherType::IPV6.0 => head[20] == Protocol::TCP.0,
        _ => false,
    }
}

impl Stack {
    /// Takes a frame, if it is plain and right. Gives it back otherwise.
    #[inline(never)]
    pub(crate) fn ingest_plain_tcp(
        &mut self,
        now_ns: u64,
        frame: Frame,
        arena: &mut Arena,
    ) -> Option<Frame> {
        let bytes = arena.bytes(&frame);
        let plain = match bytes.get(12) {
            Some(&high) if u16::from(high) << 8 == EtherType::IPV4.0 & 0xff00 => {
                self.plain_tcp_v4(bytes)
            }
            _ => self.plain_tcp_v6(bytes),
        };
        let Some(plain) = plain else { return Some(frame) };
        if frame.is_unchecked() && !plain.pseudo.with(plain.segment).adds_up() {
            return Some(frame);
        }
        let Ok((header, payload)) = TcpHeader::parse(plain.segment) else { return Some(frame) };
        let Plain { ends, segment, traffic_class, .. } = plain;
        let Ok(segment) = Segment::new(&header, segment, payload, traffic_class) else {
            return Some(frame);
        };
        if ends.local_port == 0 || ends.remote_port == 0 {
            return Some(frame);
        }
        let may_reset = self.ownership == Ownership::Own;
        match self.tcp.arrival(now_ns, ends, &segment, may_reset) {
            Ok(()) => self.counters.handled += 1,
            Err(reason) => self.counters.drops.count(reason),
        }
        arena.free(frame);
        None
    }

    #[inline(always)]
    fn plain_tcp_v4<'a>(&self, bytes: &'a [u8]) -> Option<Plain<'a>> {
        let head = bytes.first_chunk::<HEAD_V4_BYTES>()?;
        let packet_bytes = usize::from(u16::from_be_bytes(array_at(head, 16)));
        let (from, to) = (array_at(head, 26), array_at(head, 30));
        let plain = self.plain_link.is_front_of(head.first_chunk()?)
            && head[14] == PLAIN_V4
            && u16::from_be_bytes(array_at(head, 20)) & 0x3fff == 0
            && header_sum(head.first_chunk()?).adds_up()
            && is_plain_source_v4(from)
            && self.addresses.is_for_us_v4(from, to);
        let segment = bytes.get(TCP_V4_AT..LINK_BYTES + packet_bytes)?;
        let pseudo = Sum::of_words([u64::from_ne_bytes(array_at(head, 26))])
            .with_u16(Protocol::TCP.0.into())
            .with_u16(segment.len() as u16);
        plain.then(|| Plain {
            ends: Ends::v4(to, from, array_at(head, TCP_V4_AT)),
            segment,
            traffic_class: head[15],
            pseudo,
        })
    }

    #[inline(always)]
    fn plain_tcp_v6<'a>(&self, bytes: &'a [u8]) -> Option<Plain<'a>> {
        let head = bytes.first_chunk::<HEAD_V6_BYTES>()?;
        let segment_bytes = usize::from(u16::from_be_bytes(array_at(head, 18)));
        let (from, to): ([u8; 16], [u8; 16]) = (array_at(head, 22), array_at(head, 38));
        let plain = self.plain_link.is_front_of(head.first_chunk()?)
            && head[14] >> 4 == 6
            && is_plain_source_v6(from)
            && self.addresses.is_ours_v6(Ipv6Addr::from(to))
            && self.addresses.is_other_v6(Ipv6Addr::from(from));
        let segment = bytes.get(TCP_V6_AT..TCP_V6_AT + segment_bytes)?;
        let pseudo =
            Sum::of(&head[22..54]).with_u16(Protocol::TCP.0.into()).with_u16(segment.len() as u16);
        plain.then(|| Plain {
            ends: Ends::v6(to, from, array_at(head, TCP_V6_AT)),
            segment,
            traffic_class: head[14] << 4 | head[15] >> 4,
            pseudo,
        })
    }

    /// Sends a frame that holds the data of a segment, by headers made ready. It
    /// has headroom for them. The port cuts it into pieces of `cut_bytes`,
    /// unless that is 0.
    pub(crate) fn send_plain_segment(
        &mut self,
        arena: &mut Arena,
        template: &Template,
        out: &Out,
        cut_bytes: u16,
        traffic_class: u8,
        mut frame: Frame,
    ) {
        let is_v4 = out.ends.is_v4();
        let tcp_at = if is_v4 { TCP_V4_AT } else { TCP_V6_AT };
        let options = out.options.as_bytes();
        let header_bytes = TcpHeader::BYTES + options.len();
        frame.retreat(tcp_at + header_bytes);
        let partial = self.transmit_checksum;
        let Some((head, segment)) = arena.bytes_mut(&mut frame).split_at_mut_checked(tcp_at) else {
            debug_assert!(false, "a frame for sending has headroom");
            return arena.free(frame);
        };
        let pseudo = match is_v4 {
            true => template.emit_tcp_v4(head, segment.len(), traffic_class),
            false => template.emit_tcp_v6(head, segment.len(), traffic_class),
        };
        out.emit(segment, if partial { pseudo.fold() } else { 0 });
        if partial {
            frame.set_checksum(Checksum::Partial { start: tcp_at as u16, offset: 16 });
            frame.set_segment_bytes(cut_bytes);
        } else {
            tcp::fill_checksum(pseudo, segment);
            frame.set_checksum(Checksum::Unknown);
        }
        self.push_transmit(arena, frame);
    }
}

impl Template {
    /// Writes the headers in front of a segment of `bytes`. Returns the sum of
    /// its pseudo-header.
    #[inline(always)]
    fn emit_tcp_v4(&self, head: &mut [u8], bytes: usize, traffic_class: u8) -> Sum {
        let Some(head) = head.first_chunk_mut::<TCP_V4_AT>() else { return Sum::ZERO };
        self.copy_to(head);
        let total_bytes = (bytes + Ipv4Header::BYTES) as u16;
        head[15] = traffic_class;
        put(head, 16, total_bytes.to_be_bytes());
        head[23] = Protocol::TCP.0;
        let words =
            [u64::from_ne_bytes(array_at(head, 14)), u64::from_ne_bytes(array_at(head, 22))];
        let last = u64::from(u32::from_ne_bytes(array_at(head, 30)));
        put(head, 24, Sum::of_words([words[0], words[1], last]).checksum().to_be_bytes());
        Sum::of_words([u64::from_ne_bytes(array_at(head, 26))])
            .with_u16(Protocol::TCP.0.into())
            .with_u16(bytes as u16)
    }

    /// As [`Template::emit_tcp_v4`].
    #[inline(always)]
    fn emit_tcp_v6(&self, head: &mut [u8], bytes: usize, traffic_class: u8) -> Sum {
        let Some(head) = head.first_chunk_mut::<TCP_V6_AT>() else { return Sum::ZERO };
        self.copy_to(head);
        put(head, 14, [0x60 | traffic_class >> 4, traffic_class << 4]);
        put(head, 18, (bytes as u16).to_be_bytes());
        head[20] = Protocol::TCP.0;
        Sum::of(&head[22..54]).with_u16(Protocol::TCP.0.into()).with_u16(bytes as u16)
    }
}
