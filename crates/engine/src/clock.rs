//! Monotonic clock: the only reader of the time on the data path.

use rustix::time::{ClockId, clock_gettime};

/// Monotonic clock, in nanoseconds since its epoch.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch_ns: u64,
}

impl Clock {
    /// Creates a clock that reads zero now.
    pub fn new() -> Self {
        Self { epoch_ns: monotonic_ns() }
    }

    /// Nanoseconds since the epoch of the clock.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        monotonic_ns().wrapping_sub(self.epoch_ns)
    }

    /// Time of the system's monotonic clock at `ns` nanoseconds since the epoch of this clock.
    #[inline]
    pub fn monotonic_ns(&self, ns: u64) -> u64 {
        self.epoch_ns.wrapping_add(ns)
    }

    /// Returns the same clock, advanced by `by_ns` nanoseconds: for tests, which do not wait.
    pub fn advanced_by(self, by_ns: u64) -> Self {
        Self { epoch_ns: self.epoch_ns.wrapping_sub(by_ns) }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
