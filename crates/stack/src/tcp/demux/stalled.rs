//! Queue of the connections whose peers do not take their data.

use std::collections::VecDeque;

use crate::tcp::socket::TcpId;

/// Queue length from which stale entries are removed.
const MIN_COMPACTED: usize = 64;

/// Connection whose timer has expired while its peer took no data.
pub(super) struct StalledEntry {
    pub(super) id: TcpId,
    pub(super) since_ns: u64,
    /// Spared once, because the peer had taken data in between. A peer that takes a byte now and
    /// then is spared no second time.
    pub(super) is_spared: bool,
}

/// Stalled connections, oldest first. Each connection has at most one entry; entries may be stale.
#[derive(Default)]
pub(super) struct StallQueue {
    entries: VecDeque<StalledEntry>,
}

impl StallQueue {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn pop(&mut self) -> Option<StalledEntry> {
        self.entries.pop_front()
    }

    pub(super) fn push(&mut self, entry: StalledEntry) {
        self.entries.push_back(entry);
    }

    /// Removes the entries of connections that have ended, when these may be most of the queue.
    /// `connections` is the number of connections, `is_live` tells which of them still exist.
    pub(super) fn compact(&mut self, connections: usize, is_live: impl Fn(TcpId) -> bool) {
        if self.entries.len() > 2 * connections + MIN_COMPACTED {
            self.entries.retain(|entry| is_live(entry.id));
        }
    }
}
