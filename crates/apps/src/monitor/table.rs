//! Table of flows, with a limit on its memory.
//!
//! A flow is in one of the [`WAYS`] places of the bucket that a keyed hash of its key selects, so
//! senders cannot choose flows that share a bucket. When all places of a bucket are taken, the
//! smallest flow of the bucket is the candidate for eviction; among equals that is the flow unseen
//! for the longest. A packet of a new flow evicts a candidate of `n` packets with probability
//! 1/(n + 1); otherwise the packet is counted as untracked. This is randomized admission (Ben Basat,
//! Einziger, Friedman, Kassner 2017): a flood of flows of a packet each replaces flows of the flood,
//! and a flow of many packets stays.
//!
//! Nothing is estimated. The counts of a flow are those of its packets while it was in the table,
//! and every packet is in exactly one of: the flows in the table, ended flows, evicted flows,
//! untracked packets.

use std::hint::black_box;

use fastrand::Rng;
use siphasher::sip::SipHasher13;

use super::flow::{FlowKey, FlowKind, Observation, Traffic};
use tidegate_wire::EtherType;

/// Places of a bucket.
pub const WAYS: usize = 8;

/// Maximum number of observations for one call of [`FlowTable::observe`] that pays off.
pub const BATCH: usize = 32;

/// A tick is 2^18 ns.
const TICK_BITS: u32 = 18;
/// Longest inactive timeout in ticks: 12 days. Ticks begin anew after 13, and a flow ends before.
const MAX_TIMEOUT: u32 = u32::MAX / 16 * 15;

/// Time in which [`FlowTable::expire`] examines the whole table once.
const EXPIRE_PERIOD_NS: u64 = 1_000_000_000;

/// Settings of a [`FlowTable`].
#[derive(Clone, Debug)]
pub struct TableConfig {
    /// Maximum number of flows; rounded up to a power of two of at least 8.
    pub max_flows: usize,
    /// Time after which a flow that goes on gets a record, in nanoseconds.
    pub active_timeout_ns: u64,
    /// Time without a packet after which a flow ends, in nanoseconds; 12 days at most.
    pub inactive_timeout_ns: u64,
    /// Secret seed of the hash and of the choice of evicted flows.
    pub seed: [u8; 16],
}

/// Reason for a record of a flow, by the values of flowEndReason (RFC 5102).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EndReason {
    /// No packet for the inactive timeout: the flow has ended.
    Idle = 1,
    /// The active timeout has passed: the flow goes on.
    Active = 2,
    /// The monitor ends.
    Forced = 4,
    /// The place in the table was needed for another flow.
    Evicted = 5,
}

/// Traffic of a flow since its last record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRecord {
    /// The flow.
    pub key: FlowKey,
    /// Traffic since the last record of the flow.
    pub traffic: Traffic,
    /// Time of the first packet since the last record.
    pub first_ns: u64,
    /// Time of the last packet, up to 0.3 ms too early.
    pub last_ns: u64,
    /// All TCP flags of these packets.
    pub tcp_flags: u8,
    /// Reason for the record.
    pub reason: EndReason,
}

/// Number of flows, and their traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCount {
    /// Flows.
    pub flows: u64,
    /// Their traffic while they were in the table.
    pub traffic: Traffic,
}

/// Counters of a [`FlowTable`] since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounters {
    /// All traffic.
    pub observed: Traffic,
    /// Flows in the table.
    pub current: FlowCount,
    /// Flows that ended by the inactive timeout, or with the monitor.
    pub ended: FlowCount,
    /// Flows that were evicted.
    pub evicted: FlowCount,
    /// Traffic of flows that were not in the table.
    pub untracked: Traffic,
}

/// Order of flows: the largest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// By bytes.
    #[default]
    Bytes,
    /// By packets.
    Packets,
}

/// Span of the traffic by which flows are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// Since the last list of this span.
    SinceLast,
    /// Since the flow entered the table.
    Whole,
}

/// Summary of a bucket, one cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    /// Upper bits of the hash of each flow; 0 for a free place.
    tags: [u16; WAYS],
    /// Packets of each flow, up to the maximum of the type.
    packets: [u16; WAYS],
    /// Time of the last packet of each flow, in ticks.
    seen: [u32; WAYS],
}

impl Bucket {
    /// Places with this tag, a bit each: mostly one if the table has the flow, else none.
    #[inline]
    fn candidates(&self, tag: u16) -> u32 {
        let bit = |(way, &other): (usize, &u16)| u32::from(other == tag) << way;
        self.tags.iter().enumerate().map(bit).sum()
    }

    /// Ticks since the last packet of a flow.
    #[inline]
    fn unseen(&self, way: usize, now_ns: u64) -> u32 {
        ticks(now_ns).wrapping_sub(self.seen[way])
    }
}

/// State of a flow that each of its packets needs: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Entry {
    key: FlowKey,
    traffic: Traffic,
    /// Flags since the last record.
    tcp_flags: u8,
    /// All traffic is in records.
    is_recorded: bool,
}

const _: () = assert!(size_of::<Bucket>() == 64 && size_of::<Entry>() == 64);

const NO_FLOW: Entry = Entry {
    key: FlowKey { vlan: 0, kind: FlowKind::Other(EtherType(0)) },
    traffic: Traffic { packets: 0, bytes: 0 },
    tcp_flags: 0,
    is_recorded: true,
};

/// State of a flow that its records and lists need.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    /// Part of the traffic that is in records.
    recorded: Traffic,
    /// Part of the traffic that [`FlowTable::top`] has listed.
    listed: Traffic,
    /// Time of the first packet since the last record.
    first_ns: u64,
}

/// Bucket of a flow and its tag there.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    bucket: usize,
    tag: u16,
}

/// Table of flows. Times are in nanoseconds of any clock that does not go back.
pub struct FlowTable {
    buckets: Box<[Bucket]>,
    entries: Box<[Entry]>,
    histories: Box<[History]>,
    hasher: SipHasher13,
    rng: Rng,
    active_timeout_ns: u64,
    inactive_timeout: u32,
    counters: TableCounters,
    /// Next bucket to examine for timeouts, and the time until which buckets were due.
    next_bucket: usize,
    expired_until_ns: u64,
}

impl FlowTable {
    /// Creates an empty table at time `now_ns`. All of its memory is allocated here.
    pub fn new(config: &TableConfig, now_ns: u64) -> Self {
        let flows = config.max_flows.max(WAYS).next_power_of_two();
        let seed = u128::from_le_bytes(config.seed);
        let (low, high) = (seed as u64, (seed >> 64) as u64);
        Self {
            buckets: vec![Bucket::default(); flows / WAYS].into(),
            entries: vec![NO_FLOW; flows].into(),
            histories: vec![History::default(); flows].into(),
            hasher: SipHasher13::new_with_keys(low, high),
            rng: Rng::with_seed(low ^ high.rotate_left(32)),
            active_timeout_ns: config.active_timeout_ns,
            inactive_timeout: u32::try_from(config.inactive_timeout_ns >> TICK_BITS)
                .map_or(MAX_TIMEOUT, |timeout| timeout.min(MAX_TIMEOUT)),
            counters: TableCounters::default(),
            next_bucket: 0,
            expired_until_ns: now_ns,
        }
    }

    /// Maximum number of flows.
    pub fn max_flows(&self) -> usize {
        self.entries.len()
    }

    /// Counters since the creation of the table.
    pub fn counters(&self) -> &TableCounters {
        &self.counters
    }

    /// Counts frames. The records of flows that are evicted for them go to `record`.
    ///
    /// The processor loads what one frame needs while it waits for that of another.
    pub fn observe(
        &mut self,
        now_ns: u64,
        observations: &[Observation],
        record: &mut impl FnMut(&FlowRecord),
    ) {
        for observations in observations.chunks(BATCH) {
            let mut slots = [Slot::default(); BATCH];
            for (slot, observation) in slots.iter_mut().zip(observations) {
                *slot = self.slot(&observation.key);
            }
            let slots = &slots[..observations.len()];
            for &Slot { bucket, tag } in slots {
                // Without a branch, which would wait for the tags.
                let way = self.buckets[bucket].candidates(tag).trailing_zeros() as usize % WAYS;
                black_box(self.entries[bucket * WAYS + way].tcp_flags);
            }
            for (&slot, observation) in slots.iter().zip(observations) {
                self.count(now_ns, slot, observation, record);
            }
        }
    }

    #[inline]
    fn slot(&self, key: &FlowKey) -> Slot {
        let hash = key.with_bytes(|bytes| self.hasher.hash(bytes));
        let bucket = hash as usize & (self.buckets.len() - 1);
        Slot { bucket, tag: ((hash >> 48) as u16).max(1) }
    }

    /// Place of a flow in its bucket, if the table has the flow.
    #[inline]
    fn find(&self, Slot { bucket, tag }: Slot, key: &FlowKey) -> Option<usize> {
        let mut candidates = self.buckets[bucket].candidates(tag);
        while candidates != 0 {
            let way = candidates.trailing_zeros() as usize;
            if self.entries[bucket * WAYS + way].key == *key {
                return Some(way);
            }
            candidates &= candidates - 1;
        }
        None
    }

    /// Counts a frame.
    #[inline]
    fn count(
        &mut self,
        now_ns: u64,
        slot: Slot,
        observation: &Observation,
        record: &mut impl FnMut(&FlowRecord),
    ) {
        let Observation { key, traffic, tcp_flags } = *observation;
        self.counters.observed.add(traffic);
        let Slot { bucket: at, tag } = slot;
        let Some(way) = self.find(slot, &key).or_else(|| self.admit(now_ns, at, tag, key, record))
        else {
            self.counters.untracked.add(traffic);
            return;
        };
        self.counters.current.traffic.add(traffic);
        let bucket = &mut self.buckets[at];
        let packets = u16::try_from(traffic.packets).unwrap_or(u16::MAX);
        bucket.packets[way] = bucket.packets[way].saturating_add(packets);
        bucket.seen[way] = ticks(now_ns);
        let entry = &mut self.entries[at * WAYS + way];
        if std::mem::take(&mut entry.is_recorded) {
            self.histories[at * WAYS + way].first_ns = now_ns;
        }
        entry.traffic.add(traffic);
        entry.tcp_flags |= tcp_flags;
    }

    /// Gives a new flow a place in its bucket, if it gets one.
    #[cold]
    fn admit(
        &mut self,
        now_ns: u64,
        at: usize,
        tag: u16,
        key: FlowKey,
        record: &mut impl FnMut(&FlowRecord),
    ) -> Option<usize> {
        let bucket = &self.buckets[at];
        let free = (0..WAYS).find(|&way| bucket.tags[way] == 0);
        let ended = || (0..WAYS).find(|&way| bucket.unseen(way, now_ns) > self.inactive_timeout);
        let way = if let Some(way) = free {
            way
        } else if let Some(way) = ended() {
            self.remove(now_ns, at, way, EndReason::Idle, record);
            way
        } else {
            let smallest =
                (0..WAYS).min_by_key(|&way| (bucket.packets[way], !bucket.unseen(way, now_ns)))?;
            let packets = u32::from(bucket.packets[smallest]);
            if self.rng.u32(0..=packets) > 0 {
                return None;
            }
            self.remove(now_ns, at, smallest, EndReason::Evicted, record);
            smallest
        };
        self.counters.current.flows += 1;
        let bucket = &mut self.buckets[at];
        (bucket.tags[way], bucket.packets[way]) = (tag, 0);
        self.entries[at * WAYS + way] = Entry { key, ..NO_FLOW };
        self.histories[at * WAYS + way] = History::default();
        Some(way)
    }

    /// Removes a flow, with its last record.
    fn remove(
        &mut self,
        now_ns: u64,
        at: usize,
        way: usize,
        reason: EndReason,
        record: &mut impl FnMut(&FlowRecord),
    ) {
        self.record(now_ns, at, way, reason, record);
        self.buckets[at].tags[way] = 0;
        let traffic = self.entries[at * WAYS + way].traffic;
        let TableCounters { current, ended, evicted, .. } = &mut self.counters;
        current.flows -= 1;
        current.traffic = current.traffic.since(traffic);
        let count = if reason == EndReason::Evicted { evicted } else { ended };
        count.flows += 1;
        count.traffic.add(traffic);
    }

    /// Makes a record of the traffic since the last record, if there was any.
    fn record(
        &mut self,
        now_ns: u64,
        at: usize,
        way: usize,
        reason: EndReason,
        record: &mut impl FnMut(&FlowRecord),
    ) {
        let entry = &mut self.entries[at * WAYS + way];
        if std::mem::replace(&mut entry.is_recorded, true) {
            return;
        }
        let History { recorded, first_ns, .. } = &mut self.histories[at * WAYS + way];
        let unseen = self.buckets[at].unseen(way, now_ns);
        let last_tick = (now_ns >> TICK_BITS).saturating_sub(unseen.into());
        record(&FlowRecord {
            key: entry.key,
            traffic: entry.traffic.since(*recorded),
            first_ns: *first_ns,
            last_ns: (last_tick << TICK_BITS).max(*first_ns),
            tcp_flags: std::mem::take(&mut entry.tcp_flags),
            reason,
        });
        *recorded = entry.traffic;
    }

    /// Applies the timeouts to the part of the table that is due, at most `max_buckets` buckets; to
    /// all of the table once a second, if called often. Returns the number of buckets examined.
    pub fn expire(
        &mut self,
        now_ns: u64,
        max_buckets: u32,
        record: &mut impl FnMut(&FlowRecord),
    ) -> u32 {
        let all = self.buckets.len() as u64;
        let bucket_ns = (EXPIRE_PERIOD_NS / all).max(1);
        // After a long time without a call, once through the table is enough.
        let earliest_ns = now_ns.saturating_sub(all * bucket_ns);
        self.expired_until_ns = self.expired_until_ns.max(earliest_ns);
        let due = now_ns.saturating_sub(self.expired_until_ns) / bucket_ns;
        let examined = due.min(max_buckets.into());
        self.expired_until_ns += examined * bucket_ns;
        for _ in 0..examined {
            let at = self.next_bucket;
            self.next_bucket = (at + 1) & (self.buckets.len() - 1);
            self.expire_bucket(now_ns, at, record);
        }
        examined as u32
    }

    fn expire_bucket(&mut self, now_ns: u64, at: usize, record: &mut impl FnMut(&FlowRecord)) {
        for way in 0..WAYS {
            let bucket = &self.buckets[at];
            if bucket.tags[way] == 0 {
                continue;
            }
            let first_ns = self.histories[at * WAYS + way].first_ns;
            if bucket.unseen(way, now_ns) > self.inactive_timeout {
                self.remove(now_ns, at, way, EndReason::Idle, record);
            } else if now_ns.saturating_sub(first_ns) > self.active_timeout_ns {
                self.record(now_ns, at, way, EndReason::Active, record);
            }
        }
    }

    /// Makes the last record of every flow. The table keeps the flows.
    pub fn record_all(&mut self, now_ns: u64, record: &mut impl FnMut(&FlowRecord)) {
        for at in 0..self.buckets.len() {
            for way in 0..WAYS {
                if self.buckets[at].tags[way] != 0 {
                    self.record(now_ns, at, way, EndReason::Forced, record);
                }
            }
        }
    }

    /// The `count` largest flows with traffic in this span, the largest first.
    pub fn top(&mut self, count: usize, order: Order, span: Span) -> Vec<(FlowKey, Traffic)> {
        let size = |traffic: &Traffic| match order {
            Order::Bytes => (traffic.bytes, traffic.packets),
            Order::Packets => (traffic.packets, traffic.bytes),
        };
        let count = count.min(self.entries.len());
        let mut found: Vec<(FlowKey, Traffic)> = Vec::new();
        let shrink = |found: &mut Vec<(FlowKey, Traffic)>| {
            found.sort_unstable_by_key(|(_, traffic)| std::cmp::Reverse(size(traffic)));
            found.truncate(count);
        };
        for (at, (entry, history)) in self.entries.iter().zip(&mut self.histories).enumerate() {
            if self.buckets[at / WAYS].tags[at % WAYS] == 0 {
                continue;
            }
            let traffic = match span {
                Span::Whole => entry.traffic,
                Span::SinceLast => {
                    let traffic = entry.traffic.since(history.listed);
                    history.listed = entry.traffic;
                    traffic
                }
            };
            if traffic.packets > 0 {
                found.push((entry.key, traffic));
            }
            if found.len() > 2 * count {
                shrink(&mut found);
            }
        }
        shrink(&mut found);
        found
    }
}

/// Time in ticks, which begin anew after 13 days.
#[inline]
fn ticks(now_ns: u64) -> u32 {
    (now_ns >> TICK_BITS) as u32
}

#[cfg(test)]
mod tests;
