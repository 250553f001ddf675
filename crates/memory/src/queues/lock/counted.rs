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
    made: Moment,
}

/// A value and how it was used.
struct Watched<T> {
    value: T,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    acquisitions: u64,
    contentions: u64,
    held_ticks: u64,
    waited_ticks: u64,
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
        let taken = ticks::now();
        let result = using(&mut self.value);
        self.counts.acquisitions += 1;
        self.counts.held_ticks += ticks::now().saturating_sub(taken);
        result
    }
}

impl<T: Send, K: LockKind> Lock<T> for CountedLock<T, K> {
    fn new(value: T) -> Self {
        let watched = Watched { value, counts: Counts::default() };
        Self { lock: K::Lock::new(watched), made: Moment::now() }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let using = match self.lock.try_with(|watched| watched.used(using)) {
            Ok(result) => return result,
            Err(using) => using,
        };
        let found_taken = ticks::now();
        self.lock.with(|watched| {
            watched.counts.contentions += 1;
            watched.counts.waited_ticks += ticks::now().saturating_sub(found_taken);
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
        let ns_per_tick = self.made.ns_per_tick();
        Some(self.lock.with(|watched| {
            let counts = &watched.counts;
            LockStatistics {
                acquisitions: counts.acquisitions,
                contentions: counts.contentions,
                held_ns: counts.held_ticks as f64 * ns_per_tick,
                waited_ns: counts.waited_ticks as f64 * ns_per_tick,
            }
        }))
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
