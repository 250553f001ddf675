//! Trimming of receive queues when frames of the arena are scarce.

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

use super::UdpTable;
use crate::Counters;

/// Frames are scarce when less than `1 / SCARCE_FREE_DIVISOR` of the arena is free.
const SCARCE_FREE_DIVISOR: usize = 8;

/// While frames are scarce, all sockets together keep at most `1 / QUEUED_SHARE_DIVISOR` of the
/// frames. The rest is left to the device and to readers.
const QUEUED_SHARE_DIVISOR: usize = 2;

impl UdpTable {
    /// Drops the oldest datagrams of the longest receive queues while frames are scarce, so that
    /// sockets that are not read cannot starve the others.
    #[inline]
    pub(crate) fn trim_queues_if_scarce(&mut self, counters: &mut Counters, arena: &mut Arena) {
        let (free, all) = (arena.available(), arena.capacity());
        // Otherwise the frames are held elsewhere, not by sockets.
        if free < all / SCARCE_FREE_DIVISOR && counters.held > (all / QUEUED_SHARE_DIVISOR) as u64 {
            self.trim_queues(counters, arena);
        }
    }

    #[cold]
    fn trim_queues(&mut self, counters: &mut Counters, arena: &mut Arena) {
        let waiting = self.sockets_mut().filter(|socket| !socket.is_empty()).count();
        let share = (arena.capacity() / QUEUED_SHARE_DIVISOR / waiting.max(1)).max(1);
        let dropped: usize =
            self.sockets_mut().map(|socket| socket.drop_oldest(share, arena)).sum();
        counters.held -= dropped as u64;
        counters.count_drops(DropReason::SocketQueueFull, dropped as u64);
    }
}
