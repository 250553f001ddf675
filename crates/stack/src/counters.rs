//! Packet counters that account for every packet.

use tidegate_memory::probes;
use tidegate_wire::{DropCounters, DropReason};

/// Packet counters that account for every packet.
///
/// The invariant, which [`Counters::balance`] checks:
///
/// `received + copied + migrated_in =
/// delivered + handled + forwarded + merged + drops.total() + held + migrated_out`
///
/// A frame is *received* when it is passed to [`crate::Stack::handle_frame`]. It is *held* as a fragment
/// of an incomplete packet, or as a datagram in a socket's queue. It ends in one of these ways:
///
/// * *delivered* to an application,
/// * *handled* by the stack itself (ARP, neighbour discovery, ICMP),
/// * *forwarded*, when it is for another host and this stack belongs to a router,
/// * *merged* into the packet that was reassembled from its fragments,
/// * dropped for a reason.
///
/// A datagram to a group is *copied* for each listening socket. Datagrams that wait in a socket
/// *migrate* with the socket from one stack to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames passed to the stack.
    pub received: u64,
    /// Copies of datagrams to a group or broadcast address.
    pub copied: u64,
    /// Datagrams that applications received from sockets.
    pub delivered: u64,
    /// Packets handled by the stack itself.
    pub handled: u64,
    /// Packets for other hosts, passed on for forwarding.
    pub forwarded: u64,
    /// Fragments of reassembled packets, the first of each packet not counted.
    pub merged: u64,
    /// Fragments and datagrams that wait now.
    pub held: u64,
    /// Datagrams that arrived inside sockets of another stack ([`crate::Stack::insert_sockets`]).
    pub migrated_in: u64,
    /// Datagrams that left inside sockets ([`crate::Stack::extract_sockets`]).
    pub migrated_out: u64,
    /// Received packets that were dropped, by reason.
    pub drops: DropCounters,
    /// Frames appended to the transmit queue.
    pub transmitted: u64,
    /// ICMP errors among the transmitted frames.
    pub icmp_errors_sent: u64,
    /// Outgoing packets that were dropped, by reason.
    pub transmit_drops: DropCounters,
}

impl Counters {
    /// Counts a received packet that is dropped.
    #[inline]
    pub(crate) fn count_drop(&mut self, reason: DropReason) {
        self.count_drops(reason, 1);
    }

    /// Counts received packets that are dropped.
    #[inline]
    pub(crate) fn count_drops(&mut self, reason: DropReason, packets: u64) {
        probes::on_drop(reason as usize, packets);
        self.drops.add(reason, packets);
    }

    /// Counts an outgoing packet that is dropped.
    #[inline]
    pub(crate) fn count_transmit_drop(&mut self, reason: DropReason) {
        probes::on_drop(reason as usize, 1);
        self.transmit_drops.count(reason);
    }

    /// Input packets minus accounted packets. Always zero.
    pub fn balance(&self) -> i64 {
        let input = self.received.wrapping_add(self.copied).wrapping_add(self.migrated_in);
        let accounted = [
            self.delivered,
            self.handled,
            self.forwarded,
            self.merged,
            self.drops.total(),
            self.held,
            self.migrated_out,
        ];
        input.wrapping_sub(accounted.into_iter().fold(0, u64::wrapping_add)) as i64
    }
}
