//! How much a queue holds, against its limits.
//!
//! [`OneLock`] is the kernel's shape: every packet takes one lock on its way in
//! and on its way out. [`Reserved`] gives each core a stash to count in.

use super::lock::{Lock, LockKind, LockStatistics, Sleeping};
use super::structure::{Padded, Shape};
use crate::sync::{AtomicU64, Ordering};

/// The most that a queue may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    packets: u32,
    bytes: u64,
}

/// The highest limits.
impl Default for Limits {
    fn default() -> Self {
        Self { packets: Self::MOST_PACKETS, bytes: Self::MOST_BYTES }
    }
}

/// Limits that cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a limit of {packets} packets and {bytes} bytes; a queue can hold up to {} packets and {} bytes",
    Limits::MOST_PACKETS,
    Limits::MOST_BYTES
)]
pub struct LimitsError {
    packets: u32,
    bytes: u64,
}

impl Limits {
    /// The highest limit in packets.
    pub const MOST_PACKETS: u32 = (1 << 24) - 1;
    /// The highest limit in bytes.
    pub const MOST_BYTES: u64 = (1 << 40) - 1;

    /// At most `packets` packets and `bytes` bytes.
    ///
    /// # Errors
    /// Above [`Limits::MOST_PACKETS`] or [`Limits::MOST_BYTES`].
    pub fn new(packets: u32, bytes: u64) -> Result<Self, LimitsError> {
        if packets > Self::MOST_PACKETS || bytes > Self::MOST_BYTES {
            return Err(LimitsError { packets, bytes });
        }
        Ok(Self { packets, bytes })
    }
}

/// Counts what a queue holds.
pub trait Account: Send + Sync + Sized {
    /// The name in tables.
    const NAME: &'static str;

    /// An account of an empty queue.
    fn new(limits: Limits, shape: &Shape) -> Self;

    /// Counts a packet in, unless it would be too much.
    fn charge(&self, producer: usize, bytes: usize) -> bool;

    /// Counts packets out.
    fn release(&self, reader: usize, packets: usize, bytes: usize);

    /// Counts a packet out that a producer charged and could not put in.
    fn take_back(&self, producer: usize, bytes: usize);

    /// How its lock was used, if it has one that counts.
    fn statistics(&self) -> Option<LockStatistics> {
        None
    }
}

/// Nothing is counted and there is no limit.
pub struct Unlimited;

impl Account for Unlimited {
    const NAME: &'static str = "none";

    fn new(_limits: Limits, _shape: &Shape) -> Self {
        Self
    }

    #[inline(always)]
    fn charge(&self, _producer: usize, _bytes: usize) -> bool {
        true
    }

    #[inline(always)]
    fn release(&self, _reader: usize, _packets: usize, _bytes: usize) {}

    #[inline(always)]
    fn take_back(&self, _producer: usize, _bytes: usize) {}
}

/// One count under one lock.
pub struct OneLock<K: LockKind> {
    limits: Limits,
    held: Padded<K::Lock<Held>>,
}

/// What a queue holds.
#[derive(Clone, Copy, Default)]
pub struct Held {
    packets: u64,
    bytes: u64,
}

impl<K: LockKind> Account for OneLock<K> {
    const NAME: &'static str = "one lock";

    fn new(limits: Limits, _shape: &Shape) -> Self {
        Self { limits, held: Padded(K::Lock::new(Held::default())) }
    }

    fn charge(&self, _producer: usize, bytes: usize) -> bool {
        self.held.0.with(|held| {
            let packets = held.packets + 1;
            let bytes = held.bytes + bytes as u64;
            let fits = packets <= u64::from(self.limits.packets) && bytes <= self.limits.bytes;
            if fits {
                *held = Held { packets, bytes };
            }
            fits
        })
    }

    fn release(&self, _reader: usize, packets: usize, bytes: usize) {
        self.held.0.with(|held| {
            held.packets -= packets as u64;
            held.bytes -= bytes as u64;
        });
    }

    fn take_back(&self, producer: usize, bytes: usize) {
        self.release(producer, 1, bytes);
    }

    fn statistics(&self) -> Option<LockStatistics> {
        self.held.0.statistics()
    }
}

/// What the queue may still hold, in a common pool and in a stash of each
/// user. A packet moves it from a producer's stash to a reader's; only batches
/// move through the pool. A producer that finds too little gathers all there
/// is before it refuses, so that the limits are exact.
pub struct Reserved {
    pool: Padded<AtomicU64>,
    /// Of the producers, then of the readers.
    stashes: Box<[Padded<AtomicU64>]>,
    producers: usize,
    /// What a producer takes from the pool at once, and above which a reader
    /// gives back.
    batch: Room,
    /// Held by who takes from the pool, so that two who gather do not each
    /// find half.
    gathering: <Sleeping as LockKind>::Lock<()>,
}

/// Room for packets and for bytes, packed into one word: 24 and 40 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room(u64);

impl Room {
    const NONE: Self = Self(0);

    fn new(packets: u64, bytes: u64) -> Self {
        debug_assert!(packets <= u64::from(Limits::MOST_PACKETS) && bytes <= Limits::MOST_BYTES);
        Self(bytes << 24 | packets)
    }

    fn packets(self) -> u64 {
        self.0 & u64::from(Limits::MOST_PACKETS)
    }

    fn bytes(self) -> u64 {
        self.0 >> 24
    }

    /// This room less `other`, if it has that much of both.
    fn less(self, other: Self) -> Option<Self> {
        let enough = self.packets() >= other.packets() && self.bytes() >= other.bytes();
        enough.then(|| Self(self.0 - other.0))
    }

    /// Both together. Room is neither made nor lost, so that no part overflows.
    fn and(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    fn least(self, other: Self) -> Self {
        Self::new(self.packets().min(other.packets()), self.bytes().min(other.bytes()))
    }
}

impl Reserved {
    fn batch_and(&self, need: Room) -> Room {
        let bytes = (self.batch.bytes() + need.bytes()).min(Limits::MOST_BYTES);
        Room::new(self.batch.packets() + need.packets(), bytes)
    }

    /// Takes `need` for a producer whose stash has too little.
    #[cold]
    fn gather(&self, producer: usize, need: Room) -> bool {
        self.gathering.with(|()| {
            let own = &self.stashes[producer].0;
            let mut room = Room(own.swap(0, Ordering::AcqRel));
            // A batch from the pool will do in most cases.
            let mut batch = Room::NONE;
            let take = |pool| {
                batch = Room(pool).least(self.batch_and(need));
                Some(Room(pool).less(batch)?.0)
            };
            // It always gives something, be it nothing.
            let _ = self.pool.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
            room = room.and(batch);
            if let Some(rest) = room.less(need) {
                own.fetch_add(rest.0, Ordering::AcqRel);
                return true;
            }
            // Stashes before the pool: what a reader gives back meanwhile goes
            // that way.
            for stash in self.stashes.iter().map(|stash| &stash.0).chain([&self.pool.0]) {
                room = room.and(Room(stash.swap(0, Ordering::AcqRel)));
            }
            let rest = room.less(need);
            self.pool.0.fetch_add(rest.unwrap_or(room).0, Ordering::AcqRel);
            rest.is_some()
        })
    }
}

impl Account for Reserved {
    const NAME: &'static str = "reserved";

    fn new(limits: Limits, shape: &Shape) -> Self {
        let users = (shape.producers + shape.readers) as u64;
        let batch = Room::new(
            (u64::from(limits.packets) / (4 * users)).clamp(1, 64).min(limits.packets.into()),
            (limits.bytes / (4 * users)).min(1 << 16),
        );
        Self {
            pool: Padded(AtomicU64::new(Room::new(limits.packets.into(), limits.bytes).0)),
            stashes: (0..users).map(|_| Padded(AtomicU64::new(0))).collect(),
            producers: shape.producers,
            batch,
            gathering: Lock::new(()),
        }
    }

    #[inline]
    fn charge(&self, producer: usize, bytes: usize) -> bool {
        let Ok(bytes) = u64::try_from(bytes) else { return false };
        if bytes > Limits::MOST_BYTES {
            return false;
        }
        let need = Room::new(1, bytes);
        let spend = |stash| Some(Room(stash).less(need)?.0);
        let stash = &self.stashes[producer].0;
        stash.fetch_update(Ordering::AcqRel, Ordering::Acquire, spend).is_ok()
            || self.gather(producer, need)
    }

    #[inline]
    fn release(&self, reader: usize, packets: usize, bytes: usize) {
        let room = Room::new(packets as u64, bytes as u64);
        let stash = &self.stashes[self.producers + reader].0;
        let now = Room(stash.fetch_add(room.0, Ordering::AcqRel)).and(room);
        if now.packets() >= self.batch.packets() || now.bytes() >= self.batch.bytes() {
            let all = stash.swap(0, Ordering::AcqRel);
            self.pool.0.fetch_add(all, Ordering::AcqRel);
        }
    }

    fn take_back(&self, producer: usize, bytes: usize) {
        let room = Room::new(1, bytes as u64);
        self.stashes[producer].0.fetch_add(room.0, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::super::lock::Spin;
    use super::*;

    const SHAPE: Shape = Shape { producers: 3, readers: 2, capacity: 0 };

    #[test]
    fn limits_beyond_what_can_be_counted_are_refused() {
        assert!(Limits::new(Limits::MOST_PACKETS, Limits::MOST_BYTES).is_ok());
        assert!(Limits::new(Limits::MOST_PACKETS + 1, 0).is_err());
        let error = Limits::new(0, Limits::MOST_BYTES + 1).unwrap_err();
        assert!(error.to_string().contains("up to 16777215 packets"));
    }

    /// Against plain sums: charged exactly when it fits.
    fn is_exact<A: Account>(
        limits: Limits,
        steps: &[(bool, usize, usize)],
    ) -> Result<(), TestCaseError> {
        let account = A::new(limits, &SHAPE);
        let mut held: Vec<usize> = Vec::new();
        for &(charge, user, bytes) in steps {
            if charge {
                let all = held.iter().sum::<usize>() + bytes;
                let fits = held.len() < limits.packets as usize && all as u64 <= limits.bytes;
                prop_assert_eq!(account.charge(user % SHAPE.producers, bytes), fits, "{}", A::NAME);
                if fits && user == 7 {
                    account.take_back(user % SHAPE.producers, bytes);
                } else if fits {
                    held.push(bytes);
                }
            } else if !held.is_empty() {
                let bytes = held.swap_remove(user % held.len());
                account.release(user % SHAPE.readers, 1, bytes);
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn limits_are_exact(
            packets in 0u32..100,
            bytes in 0u64..5_000,
            steps in prop::collection::vec(
                (prop::bool::weighted(0.6), 0usize..8, 0usize..200),
                // Miri needs a second for what takes a microsecond.
                0..if cfg!(miri) { 60 } else { 300 },
            ),
        ) {
            let limits = Limits::new(packets, bytes).unwrap();
            is_exact::<OneLock<Spin>>(limits, &steps)?;
            is_exact::<OneLock<Sleeping>>(limits, &steps)?;
            is_exact::<Reserved>(limits, &steps)?;
        }
    }
}

/// Every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two producers and room for one packet: exactly one has it.
    #[test]
    fn the_last_room_is_given_once_and_not_withheld() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shape = Shape { producers: 2, readers: 1, capacity: 0 };
            let account = Arc::new(Reserved::new(Limits::new(1, 100).unwrap(), &shape));
            let other = {
                let account = Arc::clone(&account);
                thread::spawn(move || account.charge(1, 60))
            };
            let ours = account.charge(0, 60);
            assert!(ours ^ other.join().unwrap());
            account.release(0, 1, 60);
            assert!(account.charge(0, 100));
            assert!(!account.charge(1, 0));
        });
    }
}
