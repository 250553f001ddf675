//! Locks that count: the six columns of Rivera's tables 3.1 to 3.10, as the
//! kernel's lock statistics have them.
//!
//! What a lock counts lies beside its value and is written while it is held, so
//! counting needs no atomic. It costs two readings of the time stamp counter
//! per use and one more per contention.

use std::marker::PhantomData;

use super::ticks::{self, Moment};
use super::{Lock, LockKind};

/// Locks of the kind `K` that count.
pub struct Counted<K>(PhantomData<K>);

impl<K: LockKind> LockKind for Counted<K> {
    type Lock<T: Send> = CountedLock<T, K>;
    const NAME: &'static str = K::NAME;
}

/// A lock that counts.
pub struct CountedLock<T: Send, K: LockKind> {
    lock: K::Lock<Watched<T>>,
}

/// A value and how it was used.
struct Watched<T> {
    value: T,
    meter: LockMeter,
}

/// What a lock counts, for locks that are not used through a closure: it lies
/// beside the value and is written while the lock is held.
pub struct LockMeter {
    made: Moment,
    /// When the one that holds the lock took it.
    taken: u64,
    acquisitions: u64,
    contentions: u64,
    held_ticks: u64,
    waited_ticks: u64,
}

/// When a lock was found taken, for [`LockMeter::on_waited`].
#[derive(Clone, Copy, Debug)]
pub struct FoundTaken(u64);

impl FoundTaken {
    /// Now.
    #[inline(always)]
    pub fn now() -> Self {
        Self(ticks::now())
    }
}

impl Default for LockMeter {
    fn default() -> Self {
        Self {
            made: Moment::now(),
            taken: 0,
            acquisitions: 0,
            contentions: 0,
            held_ticks: 0,
            waited_ticks: 0,
        }
    }
}

impl LockMeter {
    /// The lock was taken by one that had found it taken.
    #[inline(always)]
    pub fn on_waited(&mut self, FoundTaken(since): FoundTaken) {
        self.contentions += 1;
        self.waited_ticks += ticks::now().saturating_sub(since);
    }

    /// The lock was taken.
    #[inline(always)]
    pub fn on_taken(&mut self) {
        self.taken = ticks::now();
    }

    /// The lock is about to be released.
    #[inline(always)]
    pub fn on_release(&mut self) {
        self.acquisitions += 1;
        self.held_ticks += ticks::now().saturating_sub(self.taken);
    }

    /// What was counted so far.
    pub fn statistics(&self) -> LockStatistics {
        let ns_per_tick = self.made.ns_per_tick();
        LockStatistics {
            acquisitions: self.acquisitions,
            contentions: self.contentions,
            held_ns: self.held_ticks as f64 * ns_per_tick,
            waited_ns: self.waited_ticks as f64 * ns_per_tick,
        }
    }
}

/// How a lock was used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LockStatistics {
    /// How often it was taken.
    pub acquisitions: u64,
    /// How often it was found taken.
    pub contentions: u64,
    /// How long it was held, in all.
    pub held_ns: f64,
    /// How long threads waited for it, in all.
    pub waited_ns: f64,
}

impl LockStatistics {
    /// How long it was held each time.
    pub fn held_mean_ns(&self) -> f64 {
        self.held_ns / self.acquisitions.max(1) as f64
    }

    /// How long a thread waited that found it taken.
    pub fn waited_mean_ns(&self) -> f64 {
        self.waited_ns / self.contentions.max(1) as f64
    }

    /// Adds what another lock counted.
    pub fn merge(&mut self, other: &Self) {
        self.acquisitions += other.acquisitions;
        self.contentions += other.contentions;
        self.held_ns += other.held_ns;
        self.waited_ns += other.waited_ns;
    }
}

impl<T> Watched<T> {
    #[inline(always)]
    fn used<R>(&mut self, using: impl FnOnce(&mut T) -> R) -> R {
        self.meter.on_taken();
        let result = using(&mut self.value);
        self.meter.on_release();
        result
    }
}

impl<T: Send, K: LockKind> Lock<T> for CountedLock<T, K> {
    fn new(value: T) -> Self {
        Self { lock: K::Lock::new(Watched { value, meter: LockMeter::default() }) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let using = match self.lock.try_with(|watched| watched.used(using)) {
            Ok(result) => return result,
            Err(using) => using,
        };
        let found_taken = FoundTaken::now();
        self.lock.with(|watched| {
            watched.meter.on_waited(found_taken);
            using(watched)
        })
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        // The closure has to come back as it was given.
        let mut using = Some(using);
        let use_it = |watched: &mut Watched<T>| using.take().map(|using| watched.used(using));
        let used = self.lock.try_with(use_it).ok().flatten();
        match (used, using) {
            (Some(result), _) => Ok(result),
            (None, Some(using)) => Err(using),
            (None, None) => unreachable!("a closure that was used gave a result"),
        }
    }

    fn statistics(&self) -> Option<LockStatistics> {
        Some(self.lock.with(|watched| watched.meter.statistics()))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Spin;
    use super::*;

    /// A lock that is always found taken at first.
    struct Busy;
    struct BusyLock<T>(std::sync::Mutex<T>);

    impl LockKind for Busy {
        type Lock<T: Send> = BusyLock<T>;
        const NAME: &'static str = "busy";
    }

    impl<T: Send> Lock<T> for BusyLock<T> {
        fn new(value: T) -> Self {
            Self(std::sync::Mutex::new(value))
        }

        fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
            using(&mut self.0.lock().unwrap())
        }

        fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
            Err(using)
        }
    }

    #[test]
    fn uses_are_counted() {
        let lock = CountedLock::<u32, Spin>::new(0);
        for _ in 0..3 {
            lock.with(|value| *value += 1);
        }
        assert!(lock.try_with(|value| *value += 1).is_ok());
        assert_eq!(lock.with(|value| *value), 4);
        let counted = lock.statistics().unwrap();
        assert_eq!((counted.acquisitions, counted.contentions), (5, 0));
        assert_eq!(counted.waited_ns, 0.0);
        assert!(counted.held_ns > 0.0);
    }

    #[test]
    fn contentions_are_counted() {
        let lock = CountedLock::<u32, Busy>::new(0);
        for _ in 0..3 {
            lock.with(|value| *value += 1);
        }
        assert!(lock.try_with(|value| *value += 1).is_err());
        let counted = lock.statistics().unwrap();
        assert_eq!((counted.acquisitions, counted.contentions), (3, 3));
        assert!(counted.waited_ns > 0.0);
    }

    #[test]
    fn statistics_add_up() {
        let mut sum =
            LockStatistics { acquisitions: 2, contentions: 1, held_ns: 10.0, waited_ns: 4.0 };
        let other = sum;
        sum.merge(&other);
        assert_eq!((sum.held_mean_ns(), sum.waited_mean_ns()), (5.0, 4.0));
        assert_eq!(LockStatistics::default().held_mean_ns(), 0.0);
    }
}
