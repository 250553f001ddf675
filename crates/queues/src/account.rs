//! Accounting of queued packets and bytes against limits.
//!
//! [`LockedAccount`] is the kernel's scheme: every packet takes one lock on its way in and on
//! its way out. [`PooledAccount`] gives each producer and reader a credit cache of its own.

use crate::lock::{Lock, LockKind, LockStatistics, Sleeping};
use crate::structure::{CachePadded, QueueShape};
use crate::sync::{AtomicU64, Ordering};

/// Most packets and bytes that a queue may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    packets: u32,
    bytes: u64,
}

/// The highest limits.
impl Default for QueueLimits {
    fn default() -> Self {
        Self { packets: Self::MAX_PACKETS, bytes: Self::MAX_BYTES }
    }
}

/// Error: limits above the range of the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "limits of {packets} packets and {bytes} bytes are too high: a queue holds up to {} packets and {} bytes",
    QueueLimits::MAX_PACKETS,
    QueueLimits::MAX_BYTES
)]
pub struct QueueLimitsError {
    packets: u32,
    bytes: u64,
}

impl QueueLimits {
    /// Highest limit in packets.
    pub const MAX_PACKETS: u32 = (1 << 24) - 1;
    /// Highest limit in bytes.
    pub const MAX_BYTES: u64 = (1 << 40) - 1;

    /// Limits of at most `packets` packets and `bytes` bytes.
    ///
    /// # Errors
    /// For values above [`QueueLimits::MAX_PACKETS`] or [`QueueLimits::MAX_BYTES`].
    pub fn new(packets: u32, bytes: u64) -> Result<Self, QueueLimitsError> {
        if packets > Self::MAX_PACKETS || bytes > Self::MAX_BYTES {
            return Err(QueueLimitsError { packets, bytes });
        }
        Ok(Self { packets, bytes })
    }
}

/// Accounting of the packets and bytes in a queue.
pub trait Account: Send + Sync + Sized {
    /// Name in tables.
    const NAME: &'static str;

    /// Creates the account of an empty queue.
    fn new(limits: QueueLimits, shape: &QueueShape) -> Self;

    /// Charges a packet; returns false, charging nothing, when a limit would be exceeded.
    fn charge(&self, producer: usize, bytes: usize) -> bool;

    /// Releases the charge of packets that were taken out.
    fn release(&self, reader: usize, packets: usize, bytes: usize);

    /// Releases the charge of a packet that the producer could not enqueue.
    fn uncharge(&self, producer: usize, bytes: usize);

    /// Usage of the account's lock, if the account has a metered lock.
    fn statistics(&self) -> Option<LockStatistics> {
        None
    }
}

/// No accounting and no limit.
pub struct Unlimited;

impl Account for Unlimited {
    const NAME: &'static str = "none";

    fn new(_limits: QueueLimits, _shape: &QueueShape) -> Self {
        Self
    }

    #[inline(always)]
    fn charge(&self, _producer: usize, _bytes: usize) -> bool {
        true
    }

    #[inline(always)]
    fn release(&self, _reader: usize, _packets: usize, _bytes: usize) {}

    #[inline(always)]
    fn uncharge(&self, _producer: usize, _bytes: usize) {}
}

/// One counter under one lock.
pub struct LockedAccount<K: LockKind> {
    limits: QueueLimits,
    usage: CachePadded<K::Lock<QueueUsage>>,
}

/// Number of packets and bytes in a queue.
#[derive(Clone, Copy, Default)]
pub struct QueueUsage {
    packets: u64,
    bytes: u64,
}

impl<K: LockKind> Account for LockedAccount<K> {
    const NAME: &'static str = "one lock";

    fn new(limits: QueueLimits, _shape: &QueueShape) -> Self {
        Self { limits, usage: CachePadded(K::Lock::new(QueueUsage::default())) }
    }

    fn charge(&self, _producer: usize, bytes: usize) -> bool {
        self.usage.0.with(|held| {
            let packets = held.packets + 1;
            let bytes = held.bytes + bytes as u64;
            let fits = packets <= u64::from(self.limits.packets) && bytes <= self.limits.bytes;
            if fits {
                *held = QueueUsage { packets, bytes };
            }
            fits
        })
    }

    fn release(&self, _reader: usize, packets: usize, bytes: usize) {
        self.usage.0.with(|held| {
            held.packets -= packets as u64;
            held.bytes -= bytes as u64;
        });
    }

    fn uncharge(&self, producer: usize, bytes: usize) {
        self.release(producer, 1, bytes);
    }

    fn statistics(&self) -> Option<LockStatistics> {
        self.usage.0.statistics()
    }
}

/// Credit of the queue, in a common pool and in a cache of each producer and reader.
///
/// A packet moves its credit from the producer's cache to the reader's; only batches move
/// through the pool. A producer that finds too little credit collects the credit of all caches
/// before it refuses a packet, so that the limits are exact.
pub struct PooledAccount {
    pool: CachePadded<AtomicU64>,
    /// Caches of the producers, then of the readers.
    caches: Box<[CachePadded<AtomicU64>]>,
    producers: usize,
    /// Credit that a producer takes from the pool at once, and the level above which a reader
    /// returns its cache to the pool.
    batch: Credit,
    /// Held while taking from the pool, so that two collecting producers do not each find half.
    refill_lock: <Sleeping as LockKind>::Lock<()>,
}

/// Credit in packets and bytes, packed into one word: 24 and 40 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Credit(u64);

impl Credit {
    const ZERO: Self = Self(0);

    fn new(packets: u64, bytes: u64) -> Self {
        debug_assert!(
            packets <= u64::from(QueueLimits::MAX_PACKETS) && bytes <= QueueLimits::MAX_BYTES
        );
        Self(bytes << 24 | packets)
    }

    fn packets(self) -> u64 {
        self.0 & u64::from(QueueLimits::MAX_PACKETS)
    }

    fn bytes(self) -> u64 {
        self.0 >> 24
    }

    /// This credit less `other`, if it suffices in packets and in bytes.
    fn checked_sub(self, other: Self) -> Option<Self> {
        let enough = self.packets() >= other.packets() && self.bytes() >= other.bytes();
        enough.then(|| Self(self.0 - other.0))
    }

    /// Sum of both. Credit is neither created nor lost, so that no part overflows.
    fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    fn min_each(self, other: Self) -> Self {
        Self::new(self.packets().min(other.packets()), self.bytes().min(other.bytes()))
    }
}

impl PooledAccount {
    fn batch_plus(&self, need: Credit) -> Credit {
        let bytes = (self.batch.bytes() + need.bytes()).min(QueueLimits::MAX_BYTES);
        Credit::new(self.batch.packets() + need.packets(), bytes)
    }

    /// Takes `need` for a producer whose cache has too little.
    #[cold]
    fn refill(&self, producer: usize, need: Credit) -> bool {
        self.refill_lock.with(|()| {
            let own = &self.caches[producer].0;
            let mut credit = Credit(own.swap(0, Ordering::AcqRel));
            // A batch from the pool suffices in most cases.
            let mut batch = Credit::ZERO;
            let take = |pool| {
                batch = Credit(pool).min_each(self.batch_plus(need));
                Some(Credit(pool).checked_sub(batch)?.0)
            };
            // The update always succeeds; the batch may be zero.
            let _ = self.pool.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
            credit = credit.plus(batch);
            if let Some(rest) = credit.checked_sub(need) {
                own.fetch_add(rest.0, Ordering::AcqRel);
                return true;
            }
            // Caches before the pool: credit that a reader returns meanwhile moves in that
            // direction.
            for stash in self.caches.iter().map(|stash| &stash.0).chain([&self.pool.0]) {
                credit = credit.plus(Credit(stash.swap(0, Ordering::AcqRel)));
            }
            let rest = credit.checked_sub(need);
            self.pool.0.fetch_add(rest.unwrap_or(credit).0, Ordering::AcqRel);
            rest.is_some()
        })
    }
}

impl Account for PooledAccount {
    const NAME: &'static str = "reserved";

    fn new(limits: QueueLimits, shape: &QueueShape) -> Self {
        let users = (shape.producers + shape.readers) as u64;
        let batch = Credit::new(
            (u64::from(limits.packets) / (4 * users)).clamp(1, 64).min(limits.packets.into()),
            (limits.bytes / (4 * users)).min(1 << 16),
        );
        Self {
            pool: CachePadded(AtomicU64::new(Credit::new(limits.packets.into(), limits.bytes).0)),
            caches: (0..users).map(|_| CachePadded(AtomicU64::new(0))).collect(),
            producers: shape.producers,
            batch,
            refill_lock: Lock::new(()),
        }
    }

    #[inline]
    fn charge(&self, producer: usize, bytes: usize) -> bool {
        let Ok(bytes) = u64::try_from(bytes) else { return false };
        if bytes > QueueLimits::MAX_BYTES {
            return false;
        }
        let need = Credit::new(1, bytes);
        let spend = |cached| Some(Credit(cached).checked_sub(need)?.0);
        let cache = &self.caches[producer].0;
        cache.fetch_update(Ordering::AcqRel, Ordering::Acquire, spend).is_ok()
            || self.refill(producer, need)
    }

    #[inline]
    fn release(&self, reader: usize, packets: usize, bytes: usize) {
        let credit = Credit::new(packets as u64, bytes as u64);
        let cache = &self.caches[self.producers + reader].0;
        let now = Credit(cache.fetch_add(credit.0, Ordering::AcqRel)).plus(credit);
        if now.packets() >= self.batch.packets() || now.bytes() >= self.batch.bytes() {
            let all = cache.swap(0, Ordering::AcqRel);
            self.pool.0.fetch_add(all, Ordering::AcqRel);
        }
    }

    fn uncharge(&self, producer: usize, bytes: usize) {
        let credit = Credit::new(1, bytes as u64);
        self.caches[producer].0.fetch_add(credit.0, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lock::Spin;

    const SHAPE: QueueShape = QueueShape { producers: 3, readers: 2, capacity: 0 };

    #[test]
    fn rejects_limits_out_of_range() {
        assert!(QueueLimits::new(QueueLimits::MAX_PACKETS, QueueLimits::MAX_BYTES).is_ok());
        assert!(QueueLimits::new(QueueLimits::MAX_PACKETS + 1, 0).is_err());
        let error = QueueLimits::new(0, QueueLimits::MAX_BYTES + 1).unwrap_err();
        assert!(error.to_string().contains("up to 16777215 packets"));
    }

    /// Compares with plain sums: a charge succeeds exactly when it fits.
    fn check_limits_are_exact<A: Account>(
        limits: QueueLimits,
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
                    account.uncharge(user % SHAPE.producers, bytes);
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
                // Miri runs about a million times slower.
                0..if cfg!(miri) { 60 } else { 300 },
            ),
        ) {
            let limits = QueueLimits::new(packets, bytes).unwrap();
            check_limits_are_exact::<LockedAccount<Spin>>(limits, &steps)?;
            check_limits_are_exact::<LockedAccount<Sleeping>>(limits, &steps)?;
            check_limits_are_exact::<PooledAccount>(limits, &steps)?;
        }
    }
}

/// Explores every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two producers compete for credit for one packet: exactly one gets it.
    #[test]
    fn grants_the_last_credit_exactly_once() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shape = QueueShape { producers: 2, readers: 1, capacity: 0 };
            let account = Arc::new(PooledAccount::new(QueueLimits::new(1, 100).unwrap(), &shape));
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
