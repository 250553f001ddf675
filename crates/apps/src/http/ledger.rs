//! Memory of all connections of a server, by source; chooses the connections to evict.

use std::collections::{BinaryHeap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::Waker;
use std::time::Duration;

use tokio::time::Instant;

use super::limits::{HttpLimits, MIN_SEND_BUFFER_BYTES};
use crate::slots::Slots;
use crate::source::source_of;

/// Time that a connection waits for its client before it counts as stalled.
const STALLED_AFTER: Duration = Duration::from_millis(100);

/// Minimum interval between two searches for connections to evict.
const EVICTION_INTERVAL: Duration = Duration::from_millis(10);

/// A connection may grow its send buffer to the free memory divided by this number.
const FREE_MEMORY_DIVISOR: usize = 256;

/// An eviction leaves this part of the limits free, so that the next one is not due at once.
const EVICTION_DIVISOR: usize = 16;

/// Instruction of the ledger to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Continue,
    /// Finish the current request, then close.
    Finish,
    /// End at once: the memory is needed.
    Abort,
}

/// Memory and connections of one server.
pub(super) struct Ledger {
    limits: RwLock<HttpLimits>,
    /// Copy of [`State::used_bytes`], which is read without the lock.
    used_bytes: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entries: Slots<Entry>,
    /// Bytes of each source that has connections.
    sources: HashMap<IpAddr, Share>,
    connections: usize,
    used_bytes: usize,
    next_eviction: Option<Instant>,
    stopping: bool,
}

/// Connections of one source.
#[derive(Default)]
struct Share {
    connections: usize,
    bytes: usize,
}

struct Entry {
    source: IpAddr,
    bytes: usize,
    waiting_since: Instant,
    waker: Option<Waker>,
    is_evicted: bool,
}

/// Account of one connection. Dropping the account closes it.
pub(super) struct Account {
    ledger: Arc<Ledger>,
    slot: usize,
}

impl Ledger {
    pub(super) fn new(limits: HttpLimits) -> Self {
        Self {
            limits: RwLock::new(limits),
            used_bytes: AtomicUsize::new(0),
            state: Mutex::default(),
        }
    }

    /// Limits in force.
    pub(super) fn limits(&self) -> HttpLimits {
        *self.limits.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the limits. Open connections keep their time limits.
    pub(super) fn set_limits(&self, limits: HttpLimits) {
        *self.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if there is memory for one more connection; evicts stalled connections
    /// otherwise.
    pub(super) fn make_room(&self, now: Instant) -> bool {
        let limits = self.limits();
        let mut state = self.lock();
        if !state.has_room(&limits) {
            state.evict(&limits, now);
            self.used_bytes.store(state.used_bytes, Ordering::Relaxed);
        }
        state.has_room(&limits)
    }

    /// Evicts a part of the stalled connections, for want of descriptors.
    pub(super) fn release_descriptors(&self, now: Instant) {
        let limits = self.limits();
        let mut state = self.lock();
        let max_connections = state.connections;
        state.evict(&HttpLimits { max_connections, ..limits }, now);
        self.used_bytes.store(state.used_bytes, Ordering::Relaxed);
    }

    /// Opens the account of a connection.
    pub(super) fn open(self: &Arc<Self>, peer: IpAddr, bytes: usize, now: Instant) -> Account {
        let source = source_of(peer);
        let mut state = self.lock();
        let slot = state.entries.next_slot();
        let entry = Entry { source, bytes: 0, waiting_since: now, waker: None, is_evicted: false };
        state.entries.insert(entry);
        state.connections += 1;
        state.sources.entry(source).or_default().connections += 1;
        state.set_bytes(slot, bytes);
        self.used_bytes.store(state.used_bytes, Ordering::Relaxed);
        Account { ledger: Arc::clone(self), slot }
    }

    /// Requests all connections to finish.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        for (_, entry) in state.entries.iter() {
            if let Some(waker) = &entry.waker {
                waker.wake_by_ref();
            }
        }
    }

    /// Send buffer that a connection may have now, in bytes.
    pub(super) fn send_buffer_bytes(&self) -> u32 {
        let used_bytes = self.used_bytes.load(Ordering::Relaxed);
        let limits = self.limits();
        let free_bytes = limits.memory_bytes.saturating_sub(used_bytes);
        let share = u32::try_from(free_bytes / FREE_MEMORY_DIVISOR).unwrap_or(u32::MAX);
        // Few sizes: sockets with the same options share them.
        let share = 1 << share.max(1).ilog2();
        share.min(limits.max_send_buffer_bytes).max(MIN_SEND_BUFFER_BYTES)
    }

    /// Number of open connections, without those that were evicted.
    pub(super) fn connections(&self) -> usize {
        self.lock().connections
    }
}

impl Account {
    /// Records the bytes that the connection holds, and since when it waits for its client.
    /// `waker` is woken when there is another order.
    pub(super) fn update(
        &self,
        now: Instant,
        bytes: usize,
        waiting_since: Instant,
        waker: &Waker,
    ) -> Order {
        let ledger = &self.ledger;
        let mut state = ledger.lock();
        let stopping = state.stopping;
        let Some(entry) = state.entries.get_mut(self.slot) else { return Order::Abort };
        if entry.is_evicted {
            return Order::Abort;
        }
        entry.waiting_since = waiting_since;
        if !entry.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            entry.waker = Some(waker.clone());
        }
        state.set_bytes(self.slot, bytes);
        let limits = ledger.limits();
        if state.used_bytes > limits.memory_bytes {
            state.evict(&limits, now);
        }
        ledger.used_bytes.store(state.used_bytes, Ordering::Relaxed);
        match state.entries.get_mut(self.slot) {
            Some(entry) if !entry.is_evicted && stopping => Order::Finish,
            Some(entry) if !entry.is_evicted => Order::Continue,
            _ => Order::Abort,
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let mut state = self.ledger.lock();
        state.remove_share(self.slot);
        state.entries.remove(self.slot);
        self.ledger.used_bytes.store(state.used_bytes, Ordering::Relaxed);
    }
}

impl State {
    fn has_room(&self, limits: &HttpLimits) -> bool {
        self.connections < limits.max_connections && self.used_bytes < limits.memory_bytes
    }

    fn set_bytes(&mut self, slot: usize, bytes: usize) {
        let Some(entry) = self.entries.get_mut(slot) else { return };
        let before = std::mem::replace(&mut entry.bytes, bytes);
        self.used_bytes = self.used_bytes - before + bytes;
        if let Some(share) = self.sources.get_mut(&entry.source) {
            share.bytes = share.bytes - before + bytes;
        }
    }

    /// Takes a connection out of all sums. Does nothing for an evicted connection.
    fn remove_share(&mut self, slot: usize) {
        self.set_bytes(slot, 0);
        let Some(entry) = self.entries.get_mut(slot) else { return };
        if std::mem::replace(&mut entry.is_evicted, true) {
            return;
        }
        self.connections -= 1;
        let source = entry.source;
        if let Some(share) = self.sources.get_mut(&source) {
            share.connections -= 1;
            if share.connections == 0 {
                self.sources.remove(&source);
            }
        }
    }

    /// Evicts stalled connections until a sixteenth of the limits is free: always the connection
    /// that has waited longest among those of the source that holds most.
    fn evict(&mut self, limits: &HttpLimits, now: Instant) {
        if self.next_eviction.is_some_and(|next| now < next) {
            return;
        }
        self.next_eviction = Some(now + EVICTION_INTERVAL);
        let max_bytes = limits.memory_bytes - limits.memory_bytes / EVICTION_DIVISOR;
        let max_connections =
            limits.max_connections - limits.max_connections.div_ceil(EVICTION_DIVISOR);
        let mut stalled: HashMap<IpAddr, Vec<(Instant, usize)>> = HashMap::new();
        for (slot, entry) in self.entries.iter() {
            let is_stalled = now.saturating_duration_since(entry.waiting_since) >= STALLED_AFTER;
            if is_stalled && !entry.is_evicted {
                stalled.entry(entry.source).or_default().push((entry.waiting_since, slot));
            }
        }
        let bytes_of = |state: &Self, source| state.sources.get(&source).map_or(0, |s| s.bytes);
        let mut heaviest = BinaryHeap::new();
        for (&source, connections) in &mut stalled {
            // The longest waiting comes last.
            connections.sort_unstable_by(|a, b| b.cmp(a));
            heaviest.push((bytes_of(self, source), source));
        }
        while self.used_bytes > max_bytes || self.connections > max_connections {
            let Some((_, source)) = heaviest.pop() else { return };
            let Some((_, slot)) = stalled.get_mut(&source).and_then(Vec::pop) else { continue };
            self.remove_share(slot);
            if let Some(Entry { waker: Some(waker), .. }) = self.entries.get_mut(slot) {
                waker.wake_by_ref();
            }
            heaviest.push((bytes_of(self, source), source));
        }
    }
}

#[cfg(test)]
mod tests;
