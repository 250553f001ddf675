//! Table of the connections of a server: keeps their number and their memory in bounds.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::limits::NfsLimits;
use crate::source::source_of;

/// Connections of one server.
#[derive(Debug, Default)]
pub(super) struct Connections {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    next_id: u64,
    unsent_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    source: IpAddr,
    /// Time of the last progress.
    active_at: Instant,
    unsent_bytes: usize,
    task: Option<AbortHandle>,
}

/// Entry of one connection. Dropping it removes the entry.
#[derive(Debug)]
pub(super) struct ConnectionEntry {
    connections: Arc<Connections>,
    id: u64,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection; ends another when there are too many.
    pub(super) fn add(self: &Arc<Self>, peer: IpAddr, limits: &NfsLimits) -> ConnectionEntry {
        let mut state = self.lock();
        while state.entries.len() >= limits.max_connections.max(1) {
            let Some(id) = state.longest_silent() else { break };
            state.evict(id);
        }
        let id = state.next_id;
        state.next_id += 1;
        let source = source_of(peer);
        let active_at = Instant::now();
        state.entries.insert(id, Entry { source, active_at, unsent_bytes: 0, task: None });
        ConnectionEntry { connections: Arc::clone(self), id }
    }
}

impl ConnectionEntry {
    /// Number of the entry, by which [`Connections::set_task`] finds it.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Records progress and the replies that the client has not taken; ends the connection that has
    /// taken nothing for longest when there are too many.
    pub(super) fn on_progress(&self, unsent_bytes: usize, limits: &NfsLimits) {
        let mut state = self.connections.lock();
        let Some(entry) = state.entries.get_mut(&self.id) else { return };
        entry.active_at = Instant::now();
        let before = std::mem::replace(&mut entry.unsent_bytes, unsent_bytes);
        state.unsent_bytes = state.unsent_bytes - before + unsent_bytes;
        while state.unsent_bytes > limits.memory_bytes {
            let Some(id) = state.longest_unsent() else { return };
            state.evict(id);
        }
    }
}

impl Connections {
    /// Sets the task that ends with the connection.
    pub(super) fn set_task(&self, id: u64, task: AbortHandle) {
        if let Some(entry) = self.lock().entries.get_mut(&id) {
            entry.task = Some(task);
        }
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.connections.lock().remove(self.id);
    }
}

impl State {
    /// Connection that has been silent longest, of the source that has most connections.
    fn longest_silent(&self) -> Option<u64> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.entries.values().for_each(|entry| *counts.entry(entry.source).or_default() += 1);
        let (source, _) = counts.into_iter().max_by_key(|&(source, count)| (count, source))?;
        let of_source = self.entries.iter().filter(|(_, entry)| entry.source == source);
        of_source.min_by_key(|(id, entry)| (entry.active_at, **id)).map(|(id, _)| *id)
    }

    fn longest_unsent(&self) -> Option<u64> {
        let unsent = self.entries.iter().filter(|(_, entry)| entry.unsent_bytes > 0);
        unsent.min_by_key(|(id, entry)| (entry.active_at, **id)).map(|(id, _)| *id)
    }

    /// Ends a connection.
    fn evict(&mut self, id: u64) {
        if let Some(task) = self.remove(id).and_then(|entry| entry.task) {
            task.abort();
        }
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.unsent_bytes -= entry.unsent_bytes;
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn limits(max_connections: usize, memory_bytes: usize) -> NfsLimits {
        NfsLimits { max_connections, memory_bytes, ..NfsLimits::default() }
    }

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[tokio::test(start_paused = true)]
    async fn evicts_the_silent_connection_of_the_largest_source() {
        let connections = Arc::new(Connections::default());
        let limits = limits(3, 1000);
        let alone = connections.add(peer(1), &limits);
        let mut entries = Vec::new();
        for _ in 0..2 {
            tokio::time::advance(Duration::from_secs(1)).await;
            entries.push(connections.add(peer(2), &limits));
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        entries[0].on_progress(0, &limits);
        let added = connections.add(peer(3), &limits);
        let open: Vec<u64> = {
            let mut open: Vec<_> = connections.lock().entries.keys().copied().collect();
            open.sort_unstable();
            open
        };
        assert_eq!(open, [alone.id, entries[0].id, added.id]);
    }

    #[tokio::test(start_paused = true)]
    async fn unsent_replies_are_bounded_and_given_back() {
        let connections = Arc::new(Connections::default());
        let limits = limits(10, 1000);
        let slow = connections.add(peer(1), &limits);
        slow.on_progress(600, &limits);
        tokio::time::advance(Duration::from_secs(1)).await;
        let other = connections.add(peer(2), &limits);
        other.on_progress(400, &limits);
        assert_eq!(connections.lock().entries.len(), 2);
        other.on_progress(500, &limits);
        assert!(!connections.lock().entries.contains_key(&slow.id), "the slow one ends");
        drop((slow, other));
        assert_eq!(connections.lock().unsent_bytes, 0);
        assert!(connections.lock().entries.is_empty());
    }
}
