//! Memory for the data of connections: writers that wait for it, and connections that give it back
//! while it is short. Those that have stalled for the longest time end first (RFC 6429 section 4).

use tidegate_wire::DropReason;

use super::stalled::StalledEntry;
use super::table::TcpTable;
use crate::Counters;
use crate::tcp::flags::ConnFlags;
use crate::tcp::socket::{Failure, TcpId};

/// Stalled connections that one call examines.
const MAX_EXAMINED: usize = 64;

impl TcpTable {
    /// Queues a connection if its peer takes no data. Called when a timer has expired: until then
    /// no connection counts as stalled.
    pub(super) fn note_stall(&mut self, now_ns: u64, index: u32) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        if !connection.is_stalled() || !connection.flags.set_new(ConnFlags::IN_STALL_QUEUE) {
            return;
        }
        self.stalled.push(StalledEntry { id, since_ns: now_ns, is_spared: false });
        let connections = &self.connections;
        self.stalled.compact(connections.len(), |id| connections.get(id).is_some());
    }

    /// Ends the connections that have stalled for the longest time, while only the reserve of
    /// memory is left.
    #[inline]
    pub(super) fn reclaim_memory(&mut self, counters: &mut Counters, now_ns: u64) {
        if !self.stalled.is_empty() && !self.shared.pool.has_reserve() {
            self.reclaim_memory_cold(counters, now_ns);
        }
    }

    #[cold]
    fn reclaim_memory_cold(&mut self, counters: &mut Counters, now_ns: u64) {
        for _ in 0..self.stalled.len().min(MAX_EXAMINED) {
            if self.shared.pool.has_reserve() {
                return;
            }
            let Some(entry) = self.stalled.pop() else { return };
            if self.connections.id(entry.id.index) != entry.id {
                continue;
            }
            let Some(connection) = self.connections.at_mut(entry.id.index) else { continue };
            if !connection.is_stalled() {
                connection.flags.remove(ConnFlags::IN_STALL_QUEUE);
                continue;
            }
            if connection.timers.stalled_since_ns > entry.since_ns && !entry.is_spared {
                let spared = StalledEntry { since_ns: now_ns, is_spared: true, ..entry };
                self.stalled.push(spared);
                continue;
            }
            connection.abort(&mut self.shared, Some(Failure::TimedOut), true);
            counters.count_transmit_drop(DropReason::TcpStalled);
            self.update(now_ns, entry.id.index);
        }
    }

    /// Queues a connection whose writer waits for memory.
    pub(crate) fn wait_for_memory(&mut self, id: TcpId) {
        if let Some((connection, _)) = self.get_mut(id)
            && connection.flags.set_new(ConnFlags::WAITS_FOR_MEMORY)
        {
            self.memory_waiters.push_back(id);
        }
    }

    /// Wakes writers that waited for memory, once there is enough again.
    #[inline]
    pub(crate) fn wake_memory_waiters(&mut self, now_ns: u64) {
        if !self.memory_waiters.is_empty() {
            self.wake_memory_waiters_cold(now_ns);
        }
    }

    fn wake_memory_waiters_cold(&mut self, now_ns: u64) {
        while self.shared.pool.has_reserve()
            && let Some(id) = self.memory_waiters.pop_front()
        {
            if let Some((connection, _)) = self.get_mut(id) {
                connection.flags.remove(ConnFlags::WAITS_FOR_MEMORY);
                connection.flags.insert(ConnFlags::NOTIFY_WRITABLE);
                self.update(now_ns, id.index);
            }
        }
    }
}
