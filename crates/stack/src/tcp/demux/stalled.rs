//! Connections whose peers do not take their data: while memory is short, the connections that
//! have stalled for the longest time end first (RFC 6429 section 4).

use std::collections::VecDeque;

use tidegate_wire::DropReason;

use super::table::TcpTable;
use crate::Counters;
use crate::tcp::flags::ConnFlags;
use crate::tcp::socket::{Failure, TcpId};

/// Entries that one call examines.
const MAX_EXAMINED: usize = 64;

/// Queue length from which stale entries are removed.
const MIN_COMPACTED: usize = 64;

/// Connection whose timer has expired while its peer took no data.
struct StalledEntry {
    id: TcpId,
    since_ns: u64,
    /// Spared once, because the peer had taken data in between. A peer that takes a byte now and
    /// then is spared no second time.
    is_spared: bool,
}

/// Stalled connections, oldest first. Each connection has at most one entry; entries may be stale.
#[derive(Default)]
pub(super) struct StallQueue {
    entries: VecDeque<StalledEntry>,
}

impl TcpTable {
    /// Queues a connection if its peer takes no data. Called when a timer has expired: until then
    /// no connection counts as stalled.
    pub(super) fn note_stall(&mut self, now_ns: u64, index: u32) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        if !connection.is_stalled() || !connection.flags.set_new(ConnFlags::IN_STALL_QUEUE) {
            return;
        }
        let entries = &mut self.stalled.entries;
        entries.push_back(StalledEntry { id, since_ns: now_ns, is_spared: false });
        if entries.len() > 2 * self.connections.len() + MIN_COMPACTED {
            entries.retain(|entry| self.connections.get(entry.id).is_some());
        }
    }

    /// Ends the connections that have stalled for the longest time, while only the reserve of
    /// memory is left.
    #[inline]
    pub(super) fn reclaim_memory(&mut self, counters: &mut Counters, now_ns: u64) {
        if !self.stalled.entries.is_empty() && !self.shared.pool.has_reserve() {
            self.reclaim_memory_cold(counters, now_ns);
        }
    }

    #[cold]
    fn reclaim_memory_cold(&mut self, counters: &mut Counters, now_ns: u64) {
        for _ in 0..self.stalled.entries.len().min(MAX_EXAMINED) {
            if self.shared.pool.has_reserve() {
                return;
            }
            let Some(entry) = self.stalled.entries.pop_front() else { return };
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
                self.stalled.entries.push_back(spared);
                continue;
            }
            connection.abort(&mut self.shared, Some(Failure::TimedOut), true);
            counters.transmit_drops.count(DropReason::TcpStalled);
            self.update(now_ns, entry.id.index);
        }
    }
}
