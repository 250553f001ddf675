//! How sockets share the frames of an arena.

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

use crate::Stack;

/// Frames are scarce when only this part of them is free.
const SCARCE: usize = 8;

/// All sockets together keep at most this part of the frames then; the rest is for
/// the port, and for who reads.
const KEPT: usize = 2;

impl Stack {
    /// When frames are scarce the sockets with the longest queues give up what has
    /// waited longest there, so that readers who do not read cannot stop the others.
    #[inline]
    pub(crate) fn udp_share_frames(&mut self, arena: &mut Arena) {
        let (free, all) = (arena.available(), arena.capacity());
        // Whoever has them otherwise, it is not the sockets.
        if free < all / SCARCE && self.counters.held > (all / KEPT) as u64 {
            self.udp_cut_queues(arena);
        }
    }

    #[cold]
    fn udp_cut_queues(&mut self, arena: &mut Arena) {
        let waiting = self.udp.sockets_mut().filter(|socket| !socket.is_empty()).count();
        let share = (arena.capacity() / KEPT / waiting.max(1)).max(1);
        let cut: usize = self.udp.sockets_mut().map(|socket| socket.cut(share, arena)).sum();
        self.counters.held -= cut as u64;
        self.counters.drops.add(DropReason::SocketQueueFull, cut as u64);
    }
}
