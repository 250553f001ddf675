//! Output of ICMP: prepared replies, rate limits of errors, path MTUs learned from errors.

use std::net::IpAddr;

use tidegate_memory::{Arena, Checksum};
use tidegate_wire::{DropReason, Icmpv4Message, Icmpv6Message};

use super::QuotedPacket;
use crate::fast_path::template::HeaderTemplate;
use crate::interface::Interface;
use crate::ip::packet::{IcmpErrorKind, Packet};
use crate::ip::path::Path;
use crate::ip::path_mtu::{MtuReport, QuotedKind};
use crate::ip::version::is_ipv4;
use crate::link::LinkMeta;

impl Interface {
    /// Prepares an ICMPv4 reply.
    pub(crate) fn prepare_icmpv4(&mut self, packet: Packet, message: &Icmpv4Message<'_>) {
        self.reply.payload.resize(message.message_bytes(), 0);
        let written = message.emit(&mut self.reply.payload).is_some();
        debug_assert!(written, "the buffer has the length of the message");
        self.reply.packet = Some(packet);
        self.reply.mac = None;
    }

    /// Prepares an ICMPv6 message.
    pub(crate) fn prepare_icmpv6(&mut self, packet: Packet, message: &Icmpv6Message<'_>) {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (packet.source, packet.destination)
        else {
            debug_assert!(false, "source and destination of ICMPv6 are IPv6 addresses");
            return;
        };
        self.reply.payload.resize(message.message_bytes(), 0);
        let written = message.emit(source, destination, &mut self.reply.payload).is_some();
        debug_assert!(written, "the buffer has the length of the message");
        self.reply.packet = Some(packet);
        self.reply.mac = None;
    }

    /// Prepares an ICMP error about a packet, as far as the rules of its family allow.
    pub(crate) fn send_icmp_error(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        kind: IcmpErrorKind,
    ) {
        match is_ipv4(packet) {
            true => self.send_icmp_error_v4(now_ns, packet, link_meta, kind),
            false => self.send_icmp_error_v6(now_ns, packet, link_meta, kind),
        }
    }

    /// Sends the prepared reply, if any.
    #[inline]
    pub(crate) fn flush_reply(&mut self, now_ns: u64, arena: &mut Arena) {
        if let Some(packet) = self.reply.packet.take() {
            self.send_reply(now_ns, arena, packet);
        }
    }

    fn send_reply(&mut self, now_ns: u64, arena: &mut Arena, packet: Packet) {
        let payload = std::mem::take(&mut self.reply.payload);
        if self.reply.mac.is_none() && self.needs_router_lookup(packet.destination) {
            return self.queue_local_packet(packet, payload);
        }
        let path = match self.reply.mac.take() {
            Some(mac) => Ok(Path {
                destination: packet.destination,
                source: packet.source,
                next_hop: packet.destination,
                mac: Some(mac),
                is_loopback: false,
                mtu: u16::try_from(self.mtu).unwrap_or(u16::MAX),
                segment_mtu: u16::try_from(self.mtu).unwrap_or(u16::MAX),
                routers_fragment: false,
                template: HeaderTemplate::NONE,
                max_plain_frame_bytes: 0,
                valid_until_ns: 0,
            }),
            None => self.path(now_ns, arena, packet.destination),
        };
        match path {
            Ok(path) => self.send_payload(arena, &packet, &path, &payload),
            Err(_) => self.counters.count_transmit_drop(DropReason::NoRoute),
        }
        // Keeps the buffer for the next reply.
        self.reply.payload = payload;
    }

    /// Sends the payload of an IP packet in one new frame, or in fragments.
    pub(crate) fn send_payload(
        &mut self,
        arena: &mut Arena,
        packet: &Packet,
        path: &Path,
        payload: &[u8],
    ) {
        if payload.len() + packet.header_bytes() > usize::from(path.mtu) {
            if self.send_fragments(arena, packet, path, payload).is_err() {
                self.counters.count_transmit_drop(DropReason::TransmitQueueFull);
            }
            return;
        }
        match arena.alloc_from(payload) {
            Some(mut frame) => {
                frame.set_checksum(Checksum::Unknown);
                self.send_frame(arena, packet, path, None, frame);
            }
            None => self.counters.count_transmit_drop(DropReason::NoBuffer),
        }
    }

    /// Applies the rate limits of ICMP errors: true if one may be sent to `destination` now.
    pub(crate) fn allow_icmp_error(&mut self, now_ns: u64, destination: IpAddr) -> bool {
        let allowed = self.icmp_error_limiter.allow(now_ns, &mut self.rng, destination);
        if allowed {
            self.counters.icmp_errors_sent += 1;
        } else {
            self.counters.count_transmit_drop(DropReason::IcmpRateLimited);
        }
        allowed
    }

    /// Applies a report that a packet of `kind` was too big for a next hop with this MTU.
    ///
    /// # Errors
    /// [`DropReason::IcmpMtu`] when the report changes nothing or is impossible.
    pub(crate) fn learn_path_mtu(
        &mut self,
        now_ns: u64,
        mtu: usize,
        kind: QuotedKind,
        quote: &QuotedPacket<'_>,
    ) -> Result<(), DropReason> {
        let (current, _, _) = self.path_mtu(now_ns, kind, quote.destination);
        let report = MtuReport { kind, packet_bytes: quote.packet_bytes, mtu };
        self.path_mtus.learn(now_ns, &mut self.rng, quote.destination, report, current)?;
        self.paths.invalidate();
        Ok(())
    }

    /// Path MTU of a destination in bytes for packets of `kind`, whether routers on the path must
    /// fragment, and the expiry time of this entry.
    pub(crate) fn path_mtu(
        &self,
        now_ns: u64,
        kind: QuotedKind,
        destination: IpAddr,
    ) -> (usize, bool, u64) {
        match self.path_mtus.get(now_ns, kind, destination) {
            Some(known) => (known.mtu.min(self.mtu), known.routers_fragment, known.until_ns),
            None => (self.mtu, false, u64::MAX),
        }
    }
}
