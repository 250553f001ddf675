//! Forwarding: admission of packets for other hosts, and their transmission.
//!
//! The rules are RFC 1812 sections 4.2, 4.3 and 5.3 for IPv4, and RFC 8200, RFC 4291 and RFC 4443
//! for IPv6. Redirects are never sent, options for routers are passed on unread, multicast is not
//! routed, and there is no reverse path check of the source address.
//!
//! The ingress interface decides here whether a packet may be forwarded and queues it as a
//! [`TransitPacket`]. [`crate::Router`] selects the egress interface.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_memory::{Arena, Checksum, Frame, HEADROOM_BYTES};
use tidegate_wire::{DropReason, Ipv4Header, Ipv6Header, Sum, checksum};

use crate::interface::Interface;
use crate::ip::address::{AddressKind, can_be_source_v4, can_be_source_v6, is_link_local};
use crate::ip::packet::{ForwardError, ForwardMeta, IcmpErrorKind, Packet, RxVerdict};
use crate::ip::path::Path;
use crate::ip::transit::{LocalPacket, TransitPacket};
use crate::ip::version::is_ipv4;
use crate::link::LinkMeta;

/// Offsets of time to live and checksum in an IPv4 header.
const TTL_OFFSET_BYTES: usize = 8;
const CHECKSUM_OFFSET_BYTES: usize = 10;
/// Offset of the hop limit in an IPv6 header.
const HOP_LIMIT_OFFSET_BYTES: usize = 7;
/// Offset of the checksum in a UDP header.
const UDP_CHECKSUM_OFFSET_BYTES: u16 = 6;

/// True if packets to or from an address may leave their link: not 0/8, 127/8, 224/4, 240/4 or
/// link-local (RFC 1812 section 5.3.7, RFC 3927 section 7).
fn is_forwardable_v4(address: Ipv4Addr) -> bool {
    let first = address.octets()[0];
    first != 0 && first != 127 && first < 224 && !address.is_link_local()
}

/// IPv6 counterpart of [`is_forwardable_v4`] (RFC 4291 sections 2.5.2, 2.5.3, 2.5.6; RFC 4942
/// section 2.2 for IPv4-mapped addresses).
fn is_forwardable_v6(address: Ipv6Addr) -> bool {
    !address.is_unspecified()
        && !address.is_loopback()
        && !address.is_multicast()
        && !address.is_unicast_link_local()
        && address.to_bits() >> 32 != 0xffff
}

impl Interface {
    /// Decides on an IPv4 packet for another host: forward or drop.
    pub(crate) fn handle_transit_v4(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        header: &Ipv4Header,
    ) -> Result<RxVerdict, DropReason> {
        let (source, destination) = (header.source, header.destination);
        // Multicast is not routed, and fragments are reassembled for local delivery only.
        if !self.forwarding.enabled || destination.is_multicast() || link_meta.is_reassembled {
            return Err(DropReason::Ipv4NotForUs);
        }
        if link_meta.is_group {
            return Err(DropReason::ForwardLinkGroup);
        }
        if !can_be_source_v4(source) || self.addresses.kind_v4(source) != AddressKind::Other {
            return Err(DropReason::Ipv4SourceInvalid);
        }
        if !is_forwardable_v4(source) || !is_forwardable_v4(destination) {
            return Err(DropReason::ForwardScope);
        }
        header.options(packet).check()?;
        if header.ttl <= 1 {
            self.send_icmp_error_v4(
                now_ns,
                packet,
                link_meta,
                IcmpErrorKind::NotForwarded(ForwardError::HopLimitExceeded),
            );
            return Err(DropReason::HopLimitExceeded);
        }
        Ok(RxVerdict::Forward(ForwardMeta {
            destination: destination.into(),
            packet_bytes: header.total_bytes.into(),
        }))
    }

    /// Decides on an IPv6 packet for another host: forward or drop.
    pub(crate) fn handle_transit_v6(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        header: &Ipv6Header,
    ) -> Result<RxVerdict, DropReason> {
        let (source, destination) = (header.source, header.destination);
        if !self.forwarding.enabled || destination.is_multicast() || link_meta.is_reassembled {
            return Err(DropReason::Ipv6NotForUs);
        }
        if link_meta.is_group {
            return Err(DropReason::ForwardLinkGroup);
        }
        let no_source = source.is_unspecified() || !can_be_source_v6(source);
        if no_source || self.addresses.kind_v6(source) == AddressKind::Local {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        if !is_forwardable_v6(destination) {
            return Err(DropReason::ForwardScope);
        }
        let error = match header.hop_limit {
            _ if !is_forwardable_v6(source) => Some(ForwardError::BeyondScope),
            0 | 1 => Some(ForwardError::HopLimitExceeded),
            _ => None,
        };
        if let Some(error) = error {
            self.send_icmp_error_v6(now_ns, packet, link_meta, IcmpErrorKind::NotForwarded(error));
            return Err(error.drop_reason());
        }
        Ok(RxVerdict::Forward(ForwardMeta {
            destination: destination.into(),
            packet_bytes: Ipv6Header::BYTES + usize::from(header.payload_bytes),
        }))
    }

    /// Queues a packet for another interface; drops on overflow.
    pub(crate) fn queue_transit(
        &mut self,
        arena: &mut Arena,
        mut frame: Frame,
        forward_meta: ForwardMeta,
    ) {
        if self.forwarding.transits.len() >= self.limits.transmit_frames {
            self.counters.count_drop(DropReason::ForwardQueueFull);
            return arena.free(frame);
        }
        frame.truncate(forward_meta.packet_bytes);
        self.counters.forwarded += 1;
        self.forwarding.transits.push_back(TransitPacket { frame, forward_meta, ingress: 0 });
    }

    /// True if the router selects the egress interface of a locally originated packet: another
    /// interface may have a better route.
    pub(crate) fn needs_router_lookup(&self, destination: IpAddr) -> bool {
        self.forwarding.enabled && !destination.is_multicast() && !is_link_local(destination)
    }

    /// Queues a locally originated packet for the egress interface that the router selects. Such
    /// packets are few: every kind of them is rate-limited.
    pub(crate) fn queue_local_packet(&mut self, packet: Packet, payload: Vec<u8>) {
        if self.forwarding.local.len() >= self.limits.transmit_frames {
            self.counters.count_transmit_drop(DropReason::TransmitQueueFull);
            return;
        }
        self.forwarding.local.push_back(LocalPacket { packet, payload });
    }

    /// Sends a packet of the router itself by this interface.
    pub(crate) fn send_local_packet(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        local: &LocalPacket,
    ) {
        match self.path(now_ns, arena, local.packet.destination) {
            Ok(path) => self.send_payload(arena, &local.packet, &path, &local.payload),
            Err(_) => self.counters.count_transmit_drop(DropReason::NoRoute),
        }
    }

    /// Sends the ICMP error for a packet that is not forwarded, as far as the rules for ICMP errors
    /// allow.
    pub(crate) fn send_forward_error(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        frame: &Frame,
        error: ForwardError,
    ) {
        let packet = arena.bytes(frame);
        let link_meta = LinkMeta::new(Checksum::Unknown);
        let kind = IcmpErrorKind::NotForwarded(error);
        self.send_icmp_error(now_ns, packet, &link_meta, kind);
        self.flush_reply(now_ns, arena);
    }

    /// Sends "host unreachable" to the sender of a packet whose next hop did not answer, unless
    /// this host is the sender.
    pub(crate) fn send_unreachable(&mut self, now_ns: u64, arena: &mut Arena, frame: &Frame) {
        let packet = arena.bytes(frame);
        let source: Option<IpAddr> = match is_ipv4(packet) {
            true => Ipv4Header::parse_quoted(packet).ok().map(|(h, _)| h.source.into()),
            false => Ipv6Header::parse_quoted(packet).ok().map(|(h, _)| h.source.into()),
        };
        if source.is_some_and(|source| self.addresses.kind(source) == AddressKind::Other) {
            self.send_forward_error(now_ns, arena, frame, ForwardError::HostUnreachable);
        }
    }

    /// Sends a packet that entered by another interface.
    ///
    /// # Errors
    /// Returns the packet and the error to report to its sender.
    pub(crate) fn send_transit(
        &mut self,
        now_ns: u64,
        transit: TransitPacket,
        arena: &mut Arena,
    ) -> Result<(), (TransitPacket, ForwardError)> {
        if self.addresses.kind(transit.forward_meta.destination) == AddressKind::Broadcast {
            self.counters.count_transmit_drop(DropReason::ForwardBroadcast);
            arena.free(transit.frame);
            return Ok(());
        }
        let path = match self.path(now_ns, arena, transit.forward_meta.destination) {
            Ok(path) => path,
            Err(crate::SendError::WouldBlock) => {
                // The neighbour table is full; the drop is already counted.
                arena.free(transit.frame);
                return Ok(());
            }
            Err(_) => return Err((transit, ForwardError::NoRoute)),
        };
        // The path MTU that local sockets learned does not apply: each sender discovers the path
        // MTU itself.
        let mtu = self.mtu.min(arena.frame_bytes() - usize::from(HEADROOM_BYTES));
        let is_v4 = transit.forward_meta.destination.is_ipv4();
        if transit.frame.len() > mtu {
            if is_v4 && !has_dont_fragment(arena.bytes(&transit.frame)) {
                self.forward_in_fragments(arena, &path, transit.frame, mtu);
                return Ok(());
            }
            return Err((transit, ForwardError::TooBig { mtu: mtu as u16 }));
        }
        let mut frame = transit.frame;
        self.prepare_checksum(arena, &mut frame);
        decrement_hop_limit(arena.bytes_mut(&mut frame), is_v4);
        self.send_on_path(arena, &path, is_v4, frame);
        Ok(())
    }

    /// Sends a frame that holds an IP packet on a path, or queues the frame until the next hop's
    /// hardware address is known.
    fn send_on_path(&mut self, arena: &mut Arena, path: &Path, is_v4: bool, frame: Frame) {
        match path.mac {
            Some(mac) => self.send_to_mac(arena, mac, is_v4, frame),
            None => {
                if let Some(dropped) = self.neighbours.queue_frame(path.next_hop, frame) {
                    self.counters.count_transmit_drop(DropReason::NeighbourQueueFull);
                    arena.free(dropped);
                }
            }
        }
    }

    /// Converts the checksum state from receive to send: a partial checksum is left to the egress
    /// device, or completed in software.
    fn prepare_checksum(&self, arena: &mut Arena, frame: &mut Frame) {
        match frame.checksum() {
            Checksum::Unknown => {}
            Checksum::Verified => frame.set_checksum(Checksum::Unknown),
            Checksum::Partial { .. } if !self.transmit_checksum => {
                complete_checksum(arena, frame);
            }
            Checksum::Partial { start, offset } => {
                let start = start + self.link_header_bytes() as u16;
                frame.set_checksum(Checksum::Partial { start, offset });
            }
        }
    }

    /// Splits an IPv4 packet into fragments that fit the link (RFC 791 section 3.2) and sends all
    /// of them or none.
    fn forward_in_fragments(
        &mut self,
        arena: &mut Arena,
        path: &Path,
        mut whole: Frame,
        mtu: usize,
    ) {
        complete_checksum(arena, &mut whole);
        decrement_hop_limit(arena.bytes_mut(&mut whole), true);
        let sent = self.emit_fragments(arena, path, &whole, mtu);
        if let Err(reason) = sent {
            self.counters.count_transmit_drop(reason);
        }
        arena.free(whole);
    }

    fn emit_fragments(
        &mut self,
        arena: &mut Arena,
        path: &Path,
        whole: &Frame,
        mtu: usize,
    ) -> Result<(), DropReason> {
        let (header, payload) = Ipv4Header::parse(arena.bytes(whole))?;
        let header_bytes = usize::from(header.header_bytes);
        // Later fragments carry fewer options. Offsets count in units of 8 bytes from the first
        // fragment, so all fragments get the same size.
        let fragment_bytes = mtu.saturating_sub(header_bytes) & !7;
        if fragment_bytes == 0 {
            return Err(DropReason::PacketTooBig);
        }
        let fragments = payload.len().div_ceil(fragment_bytes);
        if fragments > arena.available() {
            return Err(DropReason::NoBuffer);
        }
        if fragments > self.limits.transmit_frames.saturating_sub(self.transmit.len()) {
            return Err(DropReason::TransmitQueueFull);
        }
        for index in 0..fragments {
            let mut frame = arena.alloc().ok_or(DropReason::NoBuffer)?;
            if !arena.set_len(&mut frame, mtu) {
                arena.free(frame);
                return Err(DropReason::NoBuffer);
            }
            let (from, to) = arena.read_and_write(whole, &mut frame);
            let len = emit_fragment(&header, from, index * fragment_bytes, fragment_bytes, to);
            frame.truncate(len.unwrap_or(0));
            self.send_on_path(arena, path, true, frame);
        }
        Ok(())
    }
}

/// Writes the fragment of the packet `whole` whose payload begins `at` bytes behind the header.
/// Returns the fragment's length in bytes.
fn emit_fragment(
    header: &Ipv4Header,
    whole: &[u8],
    at: usize,
    fragment_bytes: usize,
    to: &mut [u8],
) -> Option<usize> {
    let header_bytes = usize::from(header.header_bytes);
    let payload = whole.get(header_bytes..)?;
    let data = payload.get(at..payload.len().min(at + fragment_bytes))?;
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

/// Copies the options that every fragment carries: the highest bit of their type is set (RFC 791
/// section 3.1). Returns their padded length in bytes.
fn copied_options(mut options: &[u8], to: &mut [u8; 40]) -> usize {
    const COPIED_FLAG: u8 = 0x80;
    let mut len = 0;
    while let Some(&kind) = options.first() {
        let bytes = match (kind, options.get(1)) {
            (0, _) => break,
            (1, _) => 1,
            (_, Some(&bytes)) if bytes >= 2 => usize::from(bytes),
            _ => break,
        };
        let Some((option, rest)) = options.split_at_checked(bytes) else { break };
        if kind & COPIED_FLAG != 0
            && let Some(slot) = to.get_mut(len..len + bytes)
        {
            slot.copy_from_slice(option);
            len += bytes;
        }
        options = rest;
    }
    // The rest of `to` is zero, which means "end of option list".
    len.next_multiple_of(4)
}

/// True if an IPv4 packet has the "don't fragment" flag.
fn has_dont_fragment(packet: &[u8]) -> bool {
    packet.get(6).is_some_and(|flags| flags & 0x40 != 0)
}

/// Decrements time to live or hop limit, and updates the IPv4 header checksum (RFC 1624).
fn decrement_hop_limit(packet: &mut [u8], is_v4: bool) {
    if !is_v4 {
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

/// Checksum state with offsets relative to the packet behind a link header of `link_bytes` bytes.
#[inline]
pub(crate) fn rebase_checksum(checksum: Checksum, link_bytes: usize) -> Checksum {
    match checksum {
        Checksum::Partial { start, offset } => {
            let start = start.saturating_sub(link_bytes as u16);
            Checksum::Partial { start, offset }
        }
        other => other,
    }
}

/// Completes a partial checksum in software: the field holds the sum of the pseudo-header and
/// receives the checksum of the segment.
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
        fn decremented_header_has_valid_checksum(
            source: [u8; 4],
            destination: [u8; 4],
            ttl in 1..=255_u8,
            identification: u16,
            bytes in 0..1400_usize,
        ) {
            let addresses = (Ipv4Addr::from(source), Ipv4Addr::from(destination));
            let mut header = Ipv4Header::new(addresses.0, addresses.1, Protocol::UDP, bytes).unwrap();
            (header.ttl, header.identification) = (ttl, identification);
            let mut packet = vec![0; 20 + bytes];
            header.emit(&mut packet).unwrap();
            decrement_hop_limit(&mut packet, true);
            let (after, _) = Ipv4Header::parse(&packet).unwrap();
            prop_assert_eq!(after, Ipv4Header { ttl: ttl - 1, ..header });
        }

        #[test]
        fn copies_any_options_without_panic(options in prop::collection::vec(any::<u8>(), 0..=40)) {
            let len = copied_options(&options, &mut [0; 40]);
            prop_assert!(len <= 40 && len.is_multiple_of(4));
        }
    }

    #[test]
    fn copies_only_options_with_the_copied_flag() {
        let mut to = [0; 40];
        let options = [7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0, 0x82, 3, 9, 0];
        assert_eq!(copied_options(&options, &mut to), 8);
        assert_eq!(to[..8], [148, 4, 0, 0, 0x82, 3, 9, 0]);
    }

    #[test]
    fn rejects_addresses_that_stay_on_link() {
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
