//! Packets for others: which may be forwarded, and how one leaves.
//!
//! The rules are those of RFC 1812 sections 4.2, 4.3 and 5.3 for IPv4, and of
//! RFC 8200, RFC 4291 and RFC 4443 for IPv6. Redirects are never sent, options
//! for routers are passed on unread, multicast is not routed, and the source
//! address is not checked against the way back.
//!
//! The interface that a packet came in by decides here whether it may go on
//! and keeps it as a [`Transit`]; [`crate::Router`] finds the interface that it
//! leaves by.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_memory::{Arena, Checksum, Frame, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Ipv4Header, Ipv6Header, Sum, checksum};

use crate::Stack;
use crate::address::{Kind, can_be_source_v4, can_be_source_v6, is_link_local};
use crate::ethernet::Arrival;
use crate::packet::{Complaint, Fate, Onward, Packet, Refusal};
use crate::path::Path;

/// Where the time to live and the header checksum stand in an IPv4 header.
const TTL_OFFSET_BYTES: usize = 8;
const CHECKSUM_OFFSET_BYTES: usize = 10;
/// Where the hop limit stands in an IPv6 header.
const HOP_LIMIT_OFFSET_BYTES: usize = 7;
/// Where the checksum stands in a UDP header.
const UDP_CHECKSUM_OFFSET_BYTES: u16 = 6;

/// A packet on its way from one interface of a router to another.
#[must_use = "a packet that is not forwarded or dropped is lost to its arena"]
#[derive(Debug)]
pub struct Transit {
    /// The IP packet, without a link header and without padding.
    pub(crate) frame: Frame,
    pub(crate) onward: Onward,
    /// The interface it came in by.
    pub(crate) ingress: usize,
}

impl Transit {
    /// The IP packet as it came: the time to live is not counted down yet.
    pub fn bytes<'a>(&self, arena: &'a Arena) -> &'a [u8] {
        arena.bytes(&self.frame)
    }

    /// The number of the interface that it came in by.
    pub fn ingress(&self) -> usize {
        self.ingress
    }
}

/// A packet of the router's own that may leave by any interface.
pub(crate) struct OwnPacket {
    pub(crate) packet: Packet,
    pub(crate) payload: Vec<u8>,
}

/// What an interface of a router has for the others.
pub(crate) struct Forwarding {
    pub(crate) enabled: bool,
    pub(crate) transits: VecDeque<Transit>,
    pub(crate) own: VecDeque<OwnPacket>,
}

impl Forwarding {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, transits: VecDeque::new(), own: VecDeque::new() }
    }

    /// Every frame that waits here.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Frame> + '_ {
        self.transits.drain(..).map(|transit| transit.frame)
    }
}

/// Whether packets to or from an address may leave their link: not 0/8, 127/8,
/// 240/4 nor link-local (RFC 1812 section 5.3.7, RFC 3927 section 7).
fn is_forwardable_v4(address: Ipv4Addr) -> bool {
    let first = address.octets()[0];
    first != 0 && first != 127 && first < 224 && !address.is_link_local()
}

/// The same for IPv6 (RFC 4291 sections 2.5.2, 2.5.3, 2.5.6; RFC 4942 section
/// 2.2 for IPv4-mapped addresses).
fn is_forwardable_v6(address: Ipv6Addr) -> bool {
    !address.is_unspecified()
        && !address.is_loopback()
        && !address.is_multicast()
        && !address.is_unicast_link_local()
        && address.to_bits() >> 32 != 0xffff
}

impl Stack {
    /// Decides about an IPv4 packet that is not for us.
    pub(crate) fn ipv4_transit(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
        header: &Ipv4Header,
    ) -> Result<Fate, DropReason> {
        let (source, destination) = (header.source, header.destination);
        // Groups are not routed; fragments are put together only for us.
        if !self.forwarding.enabled || destination.is_multicast() || arrival.rebuilt {
            return Err(DropReason::Ipv4NotForUs);
        }
        if arrival.group {
            return Err(DropReason::ForwardLinkGroup);
        }
        if !can_be_source_v4(source) || self.addresses.kind_v4(source) != Kind::Other {
            return Err(DropReason::Ipv4SourceInvalid);
        }
        if !is_forwardable_v4(source) || !is_forwardable_v4(destination) {
            return Err(DropReason::ForwardScope);
        }
        header.options(packet).check()?;
        if header.ttl <= 1 {
            self.complain_v4(now_ns, packet, arrival, Complaint::Transit(Refusal::HopLimit));
            return Err(DropReason::HopLimitExceeded);
        }
        Ok(Fate::Forward(Onward {
            destination: destination.into(),
            packet_bytes: header.total_bytes.into(),
        }))
    }

    /// Decides about an IPv6 packet that is not for us.
    pub(crate) fn ipv6_transit(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
        header: &Ipv6Header,
    ) -> Result<Fate, DropReason> {
        let (source, destination) = (header.source, header.destination);
        if !self.forwarding.enabled || destination.is_multicast() || arrival.rebuilt {
            return Err(DropReason::Ipv6NotForUs);
        }
        if arrival.group {
            return Err(DropReason::ForwardLinkGroup);
        }
        let from_nobody = source.is_unspecified() || !can_be_source_v6(source);
        if from_nobody || self.addresses.kind_v6(source) == Kind::Ours {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        if !is_forwardable_v6(destination) {
            return Err(DropReason::ForwardScope);
        }
        let refusal = match header.hop_limit {
            _ if !is_forwardable_v6(source) => Some(Refusal::Scope),
            0 | 1 => Some(Refusal::HopLimit),
            _ => None,
        };
        if let Some(refusal) = refusal {
            self.complain_v6(now_ns, packet, arrival, Complaint::Transit(refusal));
            return Err(refusal.reason());
        }
        Ok(Fate::Forward(Onward {
            destination: destination.into(),
            packet_bytes: Ipv6Header::BYTES + usize::from(header.payload_bytes),
        }))
    }

    /// Keeps a packet for another interface.
    pub(crate) fn hand_over(&mut self, arena: &mut Arena, mut frame: Frame, onward: Onward) {
        if self.forwarding.transits.len() >= self.limits.transmit_frames {
            self.counters.drops.count(DropReason::ForwardQueueFull);
            return arena.free(frame);
        }
        frame.truncate(onward.packet_bytes);
        self.counters.forwarded += 1;
        self.forwarding.transits.push_back(Transit { frame, onward, ingress: 0 });
    }

    /// Whether a packet of our own is for the router to find a way for: it may
    /// have a better one than this interface.
    pub(crate) fn leaves_by_router(&self, destination: IpAddr) -> bool {
        self.forwarding.enabled && !destination.is_multicast() && !is_link_local(destination)
    }

    /// Keeps a packet of our own for the interface that leads to its
    /// destination. There are few: every kind of them has a rate.
    pub(crate) fn hand_over_own(&mut self, packet: Packet, payload: Vec<u8>) {
        if self.forwarding.own.len() >= self.limits.transmit_frames {
            self.counters.transmit_drops.count(DropReason::TransmitQueueFull);
            return;
        }
        self.forwarding.own.push_back(OwnPacket { packet, payload });
    }

    /// Sends a packet of the router's own by this interface.
    pub(crate) fn send_own(&mut self, now_ns: u64, arena: &mut Arena, own: &OwnPacket) {
        match self.path(now_ns, arena, own.packet.destination) {
            Ok(path) => self.send_payload(arena, &own.packet, &path, &own.payload),
            Err(_) => self.counters.transmit_drops.count(DropReason::NoRoute),
        }
    }

    /// Tells the sender of a packet that is not forwarded why, if he may be
    /// told.
    pub(crate) fn refuse(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        frame: &Frame,
        refusal: Refusal,
    ) {
        let packet = arena.bytes(frame);
        let arrival = Arrival::plain(Checksum::Unknown);
        let complaint = Complaint::Transit(refusal);
        match packet.first().map(|first| first >> 4) {
            Some(4) => self.complain_v4(now_ns, packet, &arrival, complaint),
            _ => self.complain_v6(now_ns, packet, &arrival, complaint),
        }
        self.flush_reply(now_ns, arena);
    }

    /// Tells the sender of a packet whose next hop did not answer, unless we
    /// sent it ourselves.
    pub(crate) fn tell_unreachable(&mut self, now_ns: u64, arena: &mut Arena, frame: &Frame) {
        let packet = arena.bytes(frame);
        let source: Option<IpAddr> = match packet.first().map(|first| first >> 4) {
            Some(4) => Ipv4Header::parse_quoted(packet).ok().map(|(h, _)| h.source.into()),
            _ => Ipv6Header::parse_quoted(packet).ok().map(|(h, _)| h.source.into()),
        };
        if source.is_some_and(|source| self.addresses.kind(source) == Kind::Other) {
            self.refuse(now_ns, arena, frame, Refusal::Host);
        }
    }

    /// Reads a packet that came in by another interface and is for us.
    pub(crate) fn ingest_transit(&mut self, now_ns: u64, transit: Transit, arena: &mut Arena) {
        self.counters.received += 1;
        let Transit { frame, onward, .. } = transit;
        let arrival = Arrival::plain(frame.checksum());
        let packet = arena.bytes(&frame);
        let result = match onward.destination {
            IpAddr::V4(_) => self.ipv4_input(now_ns, packet, &arrival),
            IpAddr::V6(_) => self.ipv6_input(now_ns, packet, &arrival),
        };
        self.settle(now_ns, frame, arena, result);
    }

    /// Sends a packet that came in by another interface.
    ///
    /// # Errors
    /// Gives it back with what its sender is to be told.
    pub(crate) fn send_transit(
        &mut self,
        now_ns: u64,
        transit: Transit,
        arena: &mut Arena,
    ) -> Result<(), (Transit, Refusal)> {
        if self.addresses.kind(transit.onward.destination) == Kind::Broadcast {
            self.counters.transmit_drops.count(DropReason::ForwardBroadcast);
            arena.free(transit.frame);
            return Ok(());
        }
        let path = match self.path(now_ns, arena, transit.onward.destination) {
            Ok(path) => path,
            Err(crate::SendError::WouldBlock) => {
                // The neighbour table is full, and has counted that.
                arena.free(transit.frame);
                return Ok(());
            }
            Err(_) => return Err((transit, Refusal::NoRoute)),
        };
        // What our own sockets have learnt of the path's MTU is nobody else's
        // business: each sender learns that himself.
        let mtu = self.mtu.min(arena.frame_bytes() - usize::from(HEADROOM_BYTES));
        let v4 = transit.onward.destination.is_ipv4();
        if transit.frame.len() > mtu {
            if v4 && !forbids_fragments(arena.bytes(&transit.frame)) {
                self.forward_in_fragments(arena, &path, transit.frame, mtu);
                return Ok(());
            }
            return Err((transit, Refusal::TooBig { mtu: mtu as u16 }));
        }
        let mut frame = transit.frame;
        self.prepare_checksum(arena, &mut frame);
        count_down(arena.bytes_mut(&mut frame), v4);
        self.send_by(arena, &path, v4, frame);
        Ok(())
    }

    /// Sends a frame that holds an IP packet by a path, or lets it wait for the
    /// next hop's hardware address.
    fn send_by(&mut self, arena: &mut Arena, path: &Path, v4: bool, frame: Frame) {
        match path.mac {
            Some(mac) => self.send_to(arena, mac, v4, frame),
            None => {
                if let Some(dropped) = self.neighbours.wait(path.next_hop, frame) {
                    self.counters.transmit_drops.count(DropReason::NeighbourQueueFull);
                    arena.free(dropped);
                }
            }
        }
    }

    /// Makes what is known of the transport checksum right for sending: a sum
    /// that was left to a card is left to ours, or done here.
    fn prepare_checksum(&self, arena: &mut Arena, frame: &mut Frame) {
        match frame.checksum() {
            Checksum::Unknown => {}
            Checksum::Verified => frame.set_checksum(Checksum::Unknown),
            Checksum::Partial { .. } if !self.transmit_checksum => {
                complete_checksum(arena, frame);
            }
            Checksum::Partial { start, offset } => {
                let start = start + self.link_bytes() as u16;
                frame.set_checksum(Checksum::Partial { start, offset });
            }
        }
    }

    /// Cuts an IPv4 packet into fragments that fit the link (RFC 791 section
    /// 3.2): all of them go, or none.
    fn forward_in_fragments(
        &mut self,
        arena: &mut Arena,
        path: &Path,
        mut whole: Frame,
        mtu: usize,
    ) {
        complete_checksum(arena, &mut whole);
        count_down(arena.bytes_mut(&mut whole), true);
        let sent = self.cut(arena, path, &whole, mtu);
        if let Err(reason) = sent {
            self.counters.transmit_drops.count(reason);
        }
        arena.free(whole);
    }

    fn cut(
        &mut self,
        arena: &mut Arena,
        path: &Path,
        whole: &Frame,
        mtu: usize,
    ) -> Result<(), DropReason> {
        let (header, payload) = Ipv4Header::parse(arena.bytes(whole))?;
        let header_bytes = usize::from(header.header_bytes);
        // Later fragments carry fewer options, but an offset counts in eights
        // from the first, so all are cut alike.
        let piece_bytes = mtu.saturating_sub(header_bytes) & !7;
        if piece_bytes == 0 {
            return Err(DropReason::PacketTooBig);
        }
        let pieces = payload.len().div_ceil(piece_bytes);
        if pieces > arena.available() {
            return Err(DropReason::NoBuffer);
        }
        if pieces > self.limits.transmit_frames.saturating_sub(self.transmit.len()) {
            return Err(DropReason::TransmitQueueFull);
        }
        for piece in 0..pieces {
            let mut frame = arena.alloc().ok_or(DropReason::NoBuffer)?;
            if !arena.set_len(&mut frame, mtu) {
                arena.free(frame);
                return Err(DropReason::NoBuffer);
            }
            let (from, to) = arena.pair(whole, &mut frame);
            let len = emit_fragment(&header, from, piece * piece_bytes, piece_bytes, to);
            frame.truncate(len.unwrap_or(0));
            self.send_by(arena, path, true, frame);
        }
        Ok(())
    }
}

/// Writes the fragment of the packet `whole` whose payload begins `at` bytes
/// behind the header, and returns its length.
fn emit_fragment(
    header: &Ipv4Header,
    whole: &[u8],
    at: usize,
    piece_bytes: usize,
    to: &mut [u8],
) -> Option<usize> {
    let header_bytes = usize::from(header.header_bytes);
    let payload = whole.get(header_bytes..)?;
    let data = payload.get(at..payload.len().min(at + piece_bytes))?;
    let options = whole.get(Ipv4Header::BYTES..header_bytes)?;
    let mut copied = [0; 40];
    let options_bytes = match at {
        0 => {
            copied.get_mut(..options.len())?.copy_from_slice(options);
            options.len()
        }
        _ => copied_options(options, &mut copied),
    };
    let fragment_header_bytes = Ipv4Header::BYTES + options_bytes;
    let fragment = Ipv4Header {
        header_bytes: fragment_header_bytes as u8,
        total_bytes: (fragment_header_bytes + data.len()) as u16,
        fragment_offset_bytes: header.fragment_offset_bytes + at as u16,
        more_fragments: header.more_fragments || at + data.len() < payload.len(),
        ..*header
    };
    to.get_mut(Ipv4Header::BYTES..fragment_header_bytes)?.copy_from_slice(&copied[..options_bytes]);
    fragment.emit(to)?.get_mut(..data.len())?.copy_from_slice(data);
    Some(fragment_header_bytes + data.len())
}

/// Copies those options that every fragment carries (RFC 791 section 3.1: the
/// highest bit of the type says which) and returns their length, padded.
fn copied_options(mut options: &[u8], to: &mut [u8; 40]) -> usize {
    const COPIED: u8 = 0x80;
    let mut len = 0;
    while let Some(&kind) = options.first() {
        let bytes = match (kind, options.get(1)) {
            (0, _) => break,
            (1, _) => 1,
            (_, Some(&bytes)) if bytes >= 2 => usize::from(bytes),
            _ => break,
        };
        let Some((option, rest)) = options.split_at_checked(bytes) else { break };
        if kind & COPIED != 0
            && let Some(room) = to.get_mut(len..len + bytes)
        {
            room.copy_from_slice(option);
            len += bytes;
        }
        options = rest;
    }
    // The rest of `to` is zero, which is the end of the list.
    len.next_multiple_of(4)
}

/// Whether an IPv4 packet has the "don't fragment" flag.
fn forbids_fragments(packet: &[u8]) -> bool {
    packet.get(6).is_some_and(|flags| flags & 0x40 != 0)
}

/// Counts the time to live or hop limit down by one, and brings the header
/// checksum up to date (RFC 1624).
fn count_down(packet: &mut [u8], v4: bool) {
    if !v4 {
        if let Some(hop_limit) = packet.get_mut(HOP_LIMIT_OFFSET_BYTES) {
            *hop_limit = hop_limit.saturating_sub(1);
        }
        return;
    }
    let Some(head) = packet.first_chunk_mut::<{ Ipv4Header::BYTES }>() else { return };
    let word =
        |head: &[u8; Ipv4Header::BYTES], at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let old = Sum::ZERO.with_u16(word(head, TTL_OFFSET_BYTES));
    head[TTL_OFFSET_BYTES] = head[TTL_OFFSET_BYTES].saturating_sub(1);
    let new = Sum::ZERO.with_u16(word(head, TTL_OFFSET_BYTES));
    let updated = checksum::update(word(head, CHECKSUM_OFFSET_BYTES), old, new);
    head[CHECKSUM_OFFSET_BYTES..CHECKSUM_OFFSET_BYTES + 2].copy_from_slice(&updated.to_be_bytes());
}

/// What is known of the checksum, told from behind a link header.
#[inline]
pub(crate) fn checksum_behind(checksum: Checksum, link_bytes: usize) -> Checksum {
    match checksum {
        Checksum::Partial { start, offset } => {
            let start = start.saturating_sub(link_bytes as u16);
            Checksum::Partial { start, offset }
        }
        known => known,
    }
}

/// Does what a card was left to do: the field holds the sum of the
/// pseudo-header, and gets that of everything.
fn complete_checksum(arena: &mut Arena, frame: &mut Frame) {
    let Checksum::Partial { start, offset } = frame.checksum() else {
        frame.set_checksum(Checksum::Unknown);
        return;
    };
    frame.set_checksum(Checksum::Unknown);
    let Some(segment) = arena.bytes_mut(frame).get_mut(usize::from(start)..) else { return };
    let sum = Sum::of(segment);
    let sum = if offset == UDP_CHECKSUM_OFFSET_BYTES { sum.udp_checksum() } else { sum.checksum() };
    let at = usize::from(offset);
    if let Some(field) = segment.get_mut(at..at + 2) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_wire::Protocol;

    use super::*;

    proptest! {
        #[test]
        fn a_counted_down_header_is_still_right(
            source: [u8; 4],
            destination: [u8; 4],
            ttl in 1..=255_u8,
            identification: u16,
            bytes in 0..1400_usize,
        ) {
            let ends = (Ipv4Addr::from(source), Ipv4Addr::from(destination));
            let mut header = Ipv4Header::new(ends.0, ends.1, Protocol::UDP, bytes).unwrap();
            (header.ttl, header.identification) = (ttl, identification);
            let mut packet = vec![0; 20 + bytes];
            header.emit(&mut packet).unwrap();
            count_down(&mut packet, true);
            let (after, _) = Ipv4Header::parse(&packet).unwrap();
            prop_assert_eq!(after, Ipv4Header { ttl: ttl - 1, ..header });
        }

        #[test]
        fn no_options_make_copying_fail(options in prop::collection::vec(any::<u8>(), 0..=40)) {
            let len = copied_options(&options, &mut [0; 40]);
            prop_assert!(len <= 40 && len.is_multiple_of(4));
        }
    }

    #[test]
    fn only_options_of_every_fragment_are_copied() {
        let mut to = [0; 40];
        let options = [7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0, 0x82, 3, 9, 0];
        assert_eq!(copied_options(&options, &mut to), 8);
        assert_eq!(to[..8], [148, 4, 0, 0, 0x82, 3, 9, 0]);
    }

    #[test]
    fn what_stays_on_its_link_is_known() {
        for address in ["0.1.2.3", "127.0.0.1", "169.254.7.7", "224.0.0.9", "240.0.0.1"] {
            assert!(!is_forwardable_v4(address.parse().unwrap()), "{address}");
        }
        for address in ["::", "::1", "fe80::1", "ff0e::1", "::ffff:192.0.2.1"] {
            assert!(!is_forwardable_v6(address.parse().unwrap()), "{address}");
        }
        assert!(is_forwardable_v4("10.0.0.1".parse().unwrap()));
        assert!(is_forwardable_v6("fd00::1".parse().unwrap()));
    }
}
