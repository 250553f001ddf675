//! What became of every packet.

use tidegate_wire::DropCounters;

/// What became of every packet.
///
/// The invariant, which [`Counters::balance`] checks:
///
/// `received + copied + moved_in =
/// delivered + handled + forwarded + merged + drops.total() + held + moved_out`
///
/// A frame is *received* when it is given to [`crate::Stack::ingest`]. From
/// then on it is *held* (a fragment of an incomplete packet, or a datagram in
/// a socket's queue) or has come to its end: *delivered* to an application,
/// *handled* by the stack itself (ARP, neighbour discovery, ICMP), *forwarded*
/// when they are for others and this is a router, *merged* into the packet that
/// its fragments made, or dropped for a reason. A
/// datagram to a group is *copied* for each socket that listens. What waits in
/// a socket that moves to another stack is *moved* out of one and into the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames given to the stack.
    pub received: u64,
    /// Copies made of datagrams to a group or broadcast address.
    pub copied: u64,
    /// Datagrams taken from sockets by the application.
    pub delivered: u64,
    /// Packets that were for the stack itself.
    pub handled: u64,
    /// Packets for others, handed over to be forwarded.
    pub forwarded: u64,
    /// Fragments beyond the first of packets put together again.
    pub merged: u64,
    /// Fragments and datagrams that wait, now.
    pub held: u64,
    /// Datagrams that came in sockets of another stack ([`crate::Stack::put_in`]),
    /// and those that left in sockets ([`crate::Stack::take_out`]).
    pub moved_in: u64,
    /// See `moved_in`.
    pub moved_out: u64,
    /// Received packets dropped, by reason.
    pub drops: DropCounters,
    /// Frames put into the transmit queue.
    pub transmitted: u64,
    /// ICMP errors among the frames sent.
    pub icmp_errors_sent: u64,
    /// Packets that were to be sent and were dropped, by reason.
    pub transmit_drops: DropCounters,
}

impl Counters {
    /// The packets that came in less those accounted for. Zero, always.
    pub fn balance(&self) -> i64 {
        let came = self.received.wrapping_add(self.copied).wrapping_add(self.moved_in);
        let known = [
            self.delivered,
            self.handled,
            self.forwarded,
            self.merged,
            self.drops.total(),
            self.held,
            self.moved_out,
        ];
        came.wrapping_sub(known.into_iter().fold(0, u64::wrapping_add)) as i64
    }
}
