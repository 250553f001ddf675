//! The only place on the data path where the time is read.

use rustix::time::{ClockId, clock_gettime};

/// The monotonic clock, in nanoseconds since the engine began.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch_ns: u64,
}

impl Clock {
    /// A clock that stands at zero now.
    pub fn new() -> Self {
        Self { epoch_ns: monotonic_ns() }
    }

    /// Nanoseconds since the clock was made.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        monotonic_ns().wrapping_sub(self.epoch_ns)
    }

    /// The same clock, put forward by so many nanoseconds: for tests, which do
    /// not wait.
    pub fn put_forward(self, by_ns: u64) -> Self {
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
