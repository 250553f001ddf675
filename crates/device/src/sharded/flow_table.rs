//! Flow table: the core of each flow on ports that cores share. Cores write to it, and the primary
//! core reads it for each frame without a lock.
//!
//! Each shard is a hash table with open addressing, whose slots are atomic words. A writer holds
//! the lock of its shard, marks a slot as unused, writes the flow, and publishes the slot's state
//! last. A reader takes a flow only if the state is the same before and after reading the flow. A
//! shard that is full is copied to a larger table, which replaces it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

use super::flow::Flow;
use crate::steering::TransportProtocol;

/// Number of shards: writers on different cores rarely meet.
const SHARDS: usize = 16;

/// Slots of an empty shard; a power of two.
const MIN_SLOTS: usize = 8;

// States of a slot. That of a flow has part of the flow's hash in the upper bits, and the core in
// the lower ones.
const EMPTY: u64 = 0;
const REMOVED: u64 = 1;
const IN_USE: u64 = 0x80;
const CORE: u64 = 0x7f;
const TAG: u64 = !0xff;

const FLOW_WORDS: usize = 5;

/// A flow as words: both addresses, then ports, protocol and family.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FlowWords([u64; FLOW_WORDS]);

impl FlowWords {
    fn new(flow: &Flow) -> Self {
        let (local, remote) = (flow.local(), flow.remote());
        let bits = |end: SocketAddr| match end.ip() {
            IpAddr::V4(ip) => u128::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let (protocol, _) = flow.local_port();
        let protocol = match protocol {
            TransportProtocol::Udp => 0,
            TransportProtocol::Tcp => 1,
        };
        let family = u64::from(local.is_ipv6());
        let ports = u64::from(local.port()) << 16 | u64::from(remote.port());
        let [own, peer] = [bits(local), bits(remote)];
        let rest = (protocol << 1 | family) << 32 | ports;
        Self([own as u64, (own >> 64) as u64, peer as u64, (peer >> 64) as u64, rest])
    }
}

#[derive(Default)]
struct Slot {
    state: AtomicU64,
    words: [AtomicU64; FLOW_WORDS],
}

impl Slot {
    fn has(&self, flow: &FlowWords) -> bool {
        self.words.iter().zip(flow.0).all(|(word, wanted)| word.load(Ordering::Acquire) == wanted)
    }

    fn flow(&self) -> FlowWords {
        FlowWords(std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed)))
    }

    /// Writes a flow to an unused slot. The caller holds the lock of the shard.
    fn fill(&self, flow: &FlowWords, state: u64) {
        for (word, value) in self.words.iter().zip(flow.0) {
            word.store(value, Ordering::Release);
        }
        self.state.store(state, Ordering::Release);
    }
}

type Slots = Box<[Slot]>;

fn new_slots(count: usize) -> Slots {
    (0..count).map(|_| Slot::default()).collect()
}

/// Slots of a hash, in the order of a search. Only the bits in [`TAG`] count.
fn probe(slots: &[Slot], hash: u64) -> impl Iterator<Item = &Slot> {
    let (first, mask) = ((hash >> 8) as usize, slots.len() - 1);
    (0..slots.len()).map(move |step| &slots[first.wrapping_add(step) & mask])
}

/// Slot of a flow, with its state.
fn find<'s>(slots: &'s [Slot], hash: u64, flow: &FlowWords) -> Option<(&'s Slot, u64)> {
    for slot in probe(slots, hash) {
        let state = slot.state.load(Ordering::Acquire);
        if state == EMPTY {
            return None;
        }
        let is_candidate = state & IN_USE != 0 && (state ^ hash) & TAG == 0;
        // A slot whose state has changed meanwhile no longer has the flow.
        if is_candidate && slot.has(flow) && slot.state.load(Ordering::Acquire) == state {
            return Some((slot, state));
        }
    }
    None
}

/// Writes a flow to the first unused slot. Returns the state that the slot had.
fn insert(slots: &[Slot], flow: &FlowWords, state: u64) -> Option<u64> {
    for slot in probe(slots, state) {
        let before = slot.state.load(Ordering::Relaxed);
        if before & IN_USE == 0 {
            slot.fill(flow, state);
            return Some(before);
        }
    }
    None
}

fn state(hash: u64, core: usize) -> u64 {
    hash & TAG | IN_USE | core as u64 & CORE
}

fn core(state: u64) -> usize {
    (state & CORE) as usize
}

/// A part of the flows.
struct Shard {
    slots: ArcSwap<Slots>,
    usage: Mutex<Usage>,
}

/// Numbers of slots in use and removed.
#[derive(Default)]
struct Usage {
    flows: usize,
    removed: usize,
}

impl Shard {
    fn new() -> Self {
        Self { slots: ArcSwap::from_pointee(new_slots(MIN_SLOTS)), usage: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        // A panic cannot leave a half-made change.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a flow that the shard does not have.
    fn add(&self, usage: &mut Usage, flow: &FlowWords, state: u64) {
        // A quarter of the slots stays empty, so that searches end soon.
        if 4 * (usage.flows + usage.removed + 1) > 3 * self.slots.load().len() {
            self.rebuild(usage.flows + 1);
            usage.removed = 0;
        }
        if let Some(before) = insert(&self.slots.load(), flow, state) {
            usage.removed -= usize::from(before == REMOVED);
            usage.flows += 1;
        }
    }

    /// Replaces the slots by some with space for twice as many flows, without removed ones.
    fn rebuild(&self, flows: usize) {
        let slots = new_slots((2 * flows).next_power_of_two().max(MIN_SLOTS));
        for slot in self.slots.load().iter() {
            let state = slot.state.load(Ordering::Relaxed);
            if state & IN_USE != 0 {
                insert(&slots, &slot.flow(), state);
            }
        }
        self.slots.store(Arc::new(slots));
    }
}

/// Cores of flows. At most as many flows as the stacks have sockets.
pub(super) struct FlowTable {
    shards: [Shard; SHARDS],
    /// Keyed hash: peers choose their addresses.
    hasher: RandomState,
}

impl FlowTable {
    pub(super) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Shard::new()), hasher: RandomState::new() }
    }

    fn locate(&self, flow: &Flow) -> (&Shard, u64, FlowWords) {
        let words = FlowWords::new(flow);
        let hash = self.hasher.hash_one(words.0);
        (&self.shards[(hash >> 60) as usize % SHARDS], hash, words)
    }

    /// Core of a flow, without a lock.
    pub(super) fn core(&self, flow: &Flow) -> Option<usize> {
        let (shard, hash, words) = self.locate(flow);
        find(&shard.slots.load(), hash, &words).map(|(_, state)| core(state))
    }

    /// Adds a flow of a core. Returns false when a core already has the flow.
    pub(super) fn begin(&self, flow: &Flow, core: usize) -> bool {
        let (shard, hash, words) = self.locate(flow);
        let mut usage = shard.lock();
        let is_new = find(&shard.slots.load(), hash, &words).is_none();
        if is_new {
            shard.add(&mut usage, &words, state(hash, core));
        }
        is_new
    }

    /// Gives a flow to a core, whichever had it.
    pub(super) fn take_over(&self, flow: &Flow, core: usize) {
        let (shard, hash, words) = self.locate(flow);
        let mut usage = shard.lock();
        match find(&shard.slots.load(), hash, &words) {
            Some((slot, _)) => slot.state.store(state(hash, core), Ordering::Release),
            None => shard.add(&mut usage, &words, state(hash, core)),
        }
    }

    /// Removes a flow of this core.
    pub(super) fn end(&self, flow: &Flow, of_core: usize) {
        let (shard, hash, words) = self.locate(flow);
        let mut usage = shard.lock();
        if let Some((slot, state)) = find(&shard.slots.load(), hash, &words)
            && core(state) == of_core
        {
            slot.state.store(REMOVED, Ordering::Release);
            (usage.flows, usage.removed) = (usage.flows - 1, usage.removed + 1);
        }
    }

    /// Locks all shards, as a writer that is preempted does.
    #[cfg(test)]
    pub(super) fn hold_locks(&self) -> Vec<impl Drop> {
        self.shards.iter().map(Shard::lock).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// A flow of either family.
    fn flow(number: u32) -> Flow {
        let (own, peer) = match number % 2 {
            0 => (IpAddr::from([192, 0, 2, 1]), IpAddr::from((number | 0x0a00_0000).to_be_bytes())),
            _ => (
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]),
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, (number >> 16) as u16, number as u16]),
            ),
        };
        Flow::new(TransportProtocol::Tcp, (own, 80).into(), (peer, 4000).into())
    }

    #[test]
    fn finds_flows_while_the_table_grows_and_shrinks() {
        let table = FlowTable::new();
        assert!((0..20_000).all(|n| table.begin(&flow(n), n as usize % 64)));
        assert!((0..20_000).all(|n| !table.begin(&flow(n), 1)), "each flow is known");
        assert!((0..20_000).all(|n| table.core(&flow(n)) == Some(n as usize % 64)));
        (0..20_000).for_each(|n| table.end(&flow(n), n as usize % 64 + n as usize % 2));
        for n in 0..20_000 {
            let expected = (n % 2 == 1).then_some(n as usize % 64);
            assert_eq!(table.core(&flow(n)), expected, "a flow of another core stays");
        }
        (0..20_000).for_each(|n| table.take_over(&flow(n), 5));
        assert!((0..20_000).all(|n| table.core(&flow(n)) == Some(5)));
        (0..20_000).for_each(|n| table.end(&flow(n), 5));
        for round in 0..20_000 {
            assert!(table.begin(&flow(round), 1));
            table.end(&flow(round), 1);
        }
        let slots = table.shards.iter().map(|shard| shard.slots.load().len());
        assert!(slots.max().unwrap() < 1 << 12, "removed flows take no more space");
    }

    /// A reader finds a lasting flow and never another core for it, whatever writers do.
    #[test]
    fn reads_are_right_while_cores_write() {
        let (table, stop) = (FlowTable::new(), AtomicBool::new(false));
        (0..100).for_each(|n| assert!(table.begin(&flow(n), 3)));
        std::thread::scope(|scope| {
            for core in 0..2 {
                let (table, stop) = (&table, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let own = (0..300).map(|n| flow(1000 + 1000 * core + n));
                        own.clone().for_each(|flow| assert!(table.begin(&flow, core as usize)));
                        own.for_each(|flow| table.end(&flow, core as usize));
                    }
                });
            }
            for n in 0..200_000 {
                assert_eq!(table.core(&flow(n % 100)), Some(3));
                let changing = table.core(&flow(1000 + n % 300));
                assert!(matches!(changing, None | Some(0)), "{changing:?}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
