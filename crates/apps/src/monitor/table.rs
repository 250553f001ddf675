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

use fastrand::Rng;
use siphasher::sip::SipHasher13;

use super::flow::{FlowKey, FlowKind, Observation, Traffic};
use tidegate_wire::EtherType;

/// Places of a bucket.
pub const WAYS: usize = 8;

/// Time in which [`FlowTable::expire`] examines the whole table once.
const EXPIRE_PERIOD_NS: u64 = 1_000_000_000;

/// Settings of a [`FlowTable`].
#[derive(Clone, Debug)]
pub struct TableConfig {
    /// Maximum number of flows; rounded up to a power of two of at least 8.
    pub max_flows: usize,
    /// Time after which a flow that goes on gets a record, in nanoseconds.
    pub active_timeout_ns: u64,
    /// Time without a packet after which a flow ends, in nanoseconds.
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
    /// Time of the last packet.
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
    /// Time of the last packet of each flow, in ticks of 2^20 ns.
    seen: [u32; WAYS],
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: FlowKey,
    traffic: Traffic,
    /// Part of `traffic` that is in records.
    recorded: Traffic,
    /// Part of `traffic` that [`FlowTable::top`] has listed.
    listed: Traffic,
    /// Time of the first packet since the last record.
    first_ns: u64,
    last_ns: u64,
    /// Flags since the last record.
    tcp_flags: u8,
}

const NO_FLOW: Entry = Entry {
    key: FlowKey { vlan: 0, kind: FlowKind::Other(EtherType(0)) },
    traffic: Traffic { packets: 0, bytes: 0 },
    recorded: Traffic { packets: 0, bytes: 0 },
    listed: Traffic { packets: 0, bytes: 0 },
    first_ns: 0,
    last_ns: 0,
    tcp_flags: 0,
};

/// Table of flows. Times are in nanoseconds of any clock that does not go back.
pub struct FlowTable {
    buckets: Box<[Bucket]>,
    entries: Box<[Entry]>,
    hasher: SipHasher13,
    rng: Rng,
    active_timeout_ns: u64,
    inactive_timeout_ns: u64,
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
            hasher: SipHasher13::new_with_keys(low, high),
            rng: Rng::with_seed(low ^ high.rotate_left(32)),
            active_timeout_ns: config.active_timeout_ns,
            inactive_timeout_ns: config.inactive_timeout_ns,
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

    /// Counts a frame. The record of a flow that is evicted for it goes to `record`.
    #[inline]
    pub fn observe(
        &mut self,
        now_ns: u64,
        observation: &Observation,
        record: &mut impl FnMut(&FlowRecord),
    ) {
        let Observation { key, traffic, tcp_flags } = *observation;
        self.counters.observed.add(traffic);
        let hash = self.hasher.hash(&key.to_bytes());
        let at = hash as usize & (self.buckets.len() - 1);
        let tag = ((hash >> 48) as u16).max(1);
        let found = (0..WAYS).find(|&way| {
            self.buckets[at].tags[way] == tag && self.entries[at * WAYS + way].key == key
        });
        let Some(way) = found.or_else(|| self.admit(now_ns, at, tag, key, record)) else {
            self.counters.untracked.add(traffic);
            return;
        };
        self.counters.current.traffic.add(traffic);
        let bucket = &mut self.buckets[at];
        let packets = u16::try_from(traffic.packets).unwrap_or(u16::MAX);
        bucket.packets[way] = bucket.packets[way].saturating_add(packets);
        bucket.seen[way] = ticks(now_ns);
        let entry = &mut self.entries[at * WAYS + way];
        if entry.traffic == entry.recorded {
            entry.first_ns = now_ns;
        }
        entry.traffic.add(traffic);
        entry.last_ns = now_ns;
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
        let (now, timeout) = (ticks(now_ns), ticks(self.inactive_timeout_ns));
        let unseen = |way: usize| now.wrapping_sub(bucket.seen[way]);
        let free = (0..WAYS).find(|&way| bucket.tags[way] == 0);
        let ended = || (0..WAYS).find(|&way| unseen(way) > timeout);
        let way = if let Some(way) = free {
            way
        } else if let Some(way) = ended() {
            self.remove(at, way, EndReason::Idle, record);
            way
        } else {
            let smallest = (0..WAYS).min_by_key(|&way| (bucket.packets[way], !unseen(way)))?;
            let packets = u32::from(bucket.packets[smallest]);
            if self.rng.u32(0..=packets) > 0 {
                return None;
            }
            self.remove(at, smallest, EndReason::Evicted, record);
            smallest
        };
        self.counters.current.flows += 1;
        let bucket = &mut self.buckets[at];
        (bucket.tags[way], bucket.packets[way]) = (tag, 0);
        self.entries[at * WAYS + way] = Entry { key, ..NO_FLOW };
        Some(way)
    }

    /// Removes a flow, with its last record.
    fn remove(
        &mut self,
        at: usize,
        way: usize,
        reason: EndReason,
        record: &mut impl FnMut(&FlowRecord),
    ) {
        self.record(at, way, reason, record);
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
        at: usize,
        way: usize,
        reason: EndReason,
        record: &mut impl FnMut(&FlowRecord),
    ) {
        let entry = &mut self.entries[at * WAYS + way];
        if entry.traffic == entry.recorded {
            return;
        }
        record(&FlowRecord {
            key: entry.key,
            traffic: entry.traffic.since(entry.recorded),
            first_ns: entry.first_ns,
            last_ns: entry.last_ns,
            tcp_flags: entry.tcp_flags,
            reason,
        });
        entry.recorded = entry.traffic;
        entry.tcp_flags = 0;
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
            if self.buckets[at].tags[way] == 0 {
                continue;
            }
            let entry = &self.entries[at * WAYS + way];
            if now_ns.saturating_sub(entry.last_ns) > self.inactive_timeout_ns {
                self.remove(at, way, EndReason::Idle, record);
            } else if now_ns.saturating_sub(entry.first_ns) > self.active_timeout_ns {
                self.record(at, way, EndReason::Active, record);
            }
        }
    }

    /// Makes the last record of every flow. The table keeps the flows.
    pub fn record_all(&mut self, record: &mut impl FnMut(&FlowRecord)) {
        for at in 0..self.buckets.len() {
            for way in 0..WAYS {
                if self.buckets[at].tags[way] != 0 {
                    self.record(at, way, EndReason::Forced, record);
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
        for (at, entry) in self.entries.iter_mut().enumerate() {
            if self.buckets[at / WAYS].tags[at % WAYS] == 0 {
                continue;
            }
            let traffic = match span {
                Span::Whole => entry.traffic,
                Span::SinceLast => {
                    let traffic = entry.traffic.since(entry.listed);
                    entry.listed = entry.traffic;
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

/// Time in the unit of [`Bucket::seen`].
#[inline]
fn ticks(now_ns: u64) -> u32 {
    (now_ns >> 20) as u32
}

#[cfg(test)]
mod tests;
