//! Statistics of a lock: acquisitions, contentions, hold and wait times, as in the kernel's lock
//! statistics.
//!
//! The counters lie beside the locked value and are written while the lock is held, so that
//! counting needs no atomic. It costs two readings of the time stamp counter per use and one
//! more per contention.

use crate::ticks::{self, ClockSample};

/// Counters of a lock. They lie beside the value
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
