//! Metered locks: the six columns of Rivera's tables 3.1 to 3.10, as in the kernel's lock
//! statistics.
//!
//! The counters lie beside the locked value and are written while the lock is held, so that
//! counting needs no atomic. It costs two readings of the time stamp counter per use and one
//! more per contention.

use std::marker::PhantomData;

use super::ticks::{self, ClockSample};
use super::{Lock, LockKind};

/// Locks of the kind `K` that keep statistics.
pub struct Metered<K>(PhantomData<K>);

impl<K: LockKind> LockKind for Metered<K> {
    type Lock<T: Send> = MeteredLock<T, K>;
    const NAME: &'static str = K::NAME;
}

/// A lock that keeps statistics.
pub struct MeteredLock<T: Send, K: LockKind> {
    lock: K::Lock<MeteredValue<T>>,
}

/// A value and the statistics of its lock.
struct MeteredValue<T> {
    value: T,
    meter: LockMeter,
}

/// Counters of a lock, for locks that are not used through a closure. They lie beside the value
/// and are written while the lock is held.
pub struct LockMeter {
    created: ClockSample,
    /// Time stamp at which the present holder acquired the lock.
    acquired_at: u64,
    acquisitions: u64,
    contentions: u64,
    held_ticks: u64,
    waited_ticks: u64,
}

/// Time stamp at which a lock was found held, for [`LockMeter::on_contended`].
#[derive(Clone, Copy, Debug)]
pub struct ContentionStart(u64);

impl ContentionStart {
    /// Takes the time stamp now.
    #[inline(always)]
    pub fn now() -> Self {
        Self(ticks::now())
    }
}

impl Default for LockMeter {
    fn default() -> Self {
        Self {
            created: ClockSample::now(),
            acquired_at: 0,
            acquisitions: 0,
            contentions: 0,
            held_ticks: 0,
            waited_ticks: 0,
        }
    }
}

impl LockMeter {
    /// Records that the lock was acquired after it was found held.
    #[inline(always)]
    pub fn on_contended(&mut self, ContentionStart(since): ContentionStart) {
        self.contentions += 1;
        self.waited_ticks += ticks::now().saturating_sub(since);
    }

    /// Records that the lock was acquired.
    #[inline(always)]
    pub fn on_acquired(&mut self) {
        self.acquired_at = ticks::now();
    }

    /// Records that the lock is about to be released.
    #[inline(always)]
    pub fn on_release(&mut self) {
        self.acquisitions += 1;
        self.held_ticks += ticks::now().saturating_sub(self.acquired_at);
    }

    /// Statistics so far.
    pub fn statistics(&self) -> LockStatistics {
        let ns_per_tick = self.created.ns_per_tick();
        LockStatistics {
            acquisitions: self.acquisitions,
            contentions: self.contentions,
            held_ns: self.held_ticks as f64 * ns_per_tick,
            waited_ns: self.waited_ticks as f64 * ns_per_tick,
        }
    }
}

/// Usage of a lock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LockStatistics {
    /// Number of acquisitions.
    pub acquisitions: u64,
    /// Number of acquisitions that found the lock held.
    pub contentions: u64,
    /// Total hold time in nanoseconds.
    pub held_ns: f64,
    /// Total wait time of all threads in nanoseconds.
    pub waited_ns: f64,
}

impl LockStatistics {
    /// Mean hold time per acquisition in nanoseconds.
    pub fn held_mean_ns(&self) -> f64 {
        self.held_ns / self.acquisitions.max(1) as f64
    }

    /// Mean wait time per contention in nanoseconds.
    pub fn waited_mean_ns(&self) -> f64 {
        self.waited_ns / self.contentions.max(1) as f64
    }

    /// Adds the statistics of another lock.
    pub fn merge(&mut self, other: &Self) {
        self.acquisitions += other.acquisitions;
        self.contentions += other.contentions;
        self.held_ns += other.held_ns;
        self.waited_ns += other.waited_ns;
    }
}

impl<T> MeteredValue<T> {
    #[inline(always)]
    fn measure<R>(&mut self, using: impl FnOnce(&mut T) -> R) -> R {
        self.meter.on_acquired();
        let result = using(&mut self.value);
        self.meter.on_release();
        result
    }
}

impl<T: Send, K: LockKind> Lock<T> for MeteredLock<T, K> {
    fn new(value: T) -> Self {
        Self { lock: K::Lock::new(MeteredValue { value, meter: LockMeter::default() }) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let using = match self.lock.try_with(|metered| metered.measure(using)) {
            Ok(result) => return result,
            Err(using) => using,
        };
        let contention_start = ContentionStart::now();
        self.lock.with(|metered| {
            metered.meter.on_contended(contention_start);
            using(metered)
        })
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        // The closure must be returned unchanged if the lock is held.
        let mut using = Some(using);
        let use_it =
            |metered: &mut MeteredValue<T>| using.take().map(|using| metered.measure(using));
        let used = self.lock.try_with(use_it).ok().flatten();
        match (used, using) {
            (Some(result), _) => Ok(result),
            (None, Some(using)) => Err(using),
            (None, None) => unreachable!("a closure that ran has returned a result"),
        }
    }

    fn statistics(&self) -> Option<LockStatistics> {
        Some(self.lock.with(|metered| metered.meter.statistics()))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Spin;
    use super::*;

    /// A lock whose `try_with` always fails.
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
    fn counts_acquisitions() {
        let lock = MeteredLock::<u32, Spin>::new(0);
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
    fn counts_contentions() {
        let lock = MeteredLock::<u32, Busy>::new(0);
        for _ in 0..3 {
            lock.with(|value| *value += 1);
        }
        assert!(lock.try_with(|value| *value += 1).is_err());
        let counted = lock.statistics().unwrap();
        assert_eq!((counted.acquisitions, counted.contentions), (3, 3));
        assert!(counted.waited_ns > 0.0);
    }

    #[test]
    fn merges_statistics() {
        let mut sum =
            LockStatistics { acquisitions: 2, contentions: 1, held_ns: 10.0, waited_ns: 4.0 };
        let other = sum;
        sum.merge(&other);
        assert_eq!((sum.held_mean_ns(), sum.waited_mean_ns()), (5.0, 4.0));
        assert_eq!(LockStatistics::default().held_mean_ns(), 0.0);
    }
}
