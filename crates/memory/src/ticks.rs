//! A clock that is cheap enough to time a critical section.

use std::time::Instant;

/// Time stamp of the processor: in ticks of constant length on every x86-64 of the last fifteen
/// years, in nanoseconds elsewhere.
#[inline(always)]
pub(crate) fn now() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: every x86-64 has the instruction.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    {
        use std::sync::OnceLock;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// A simultaneous reading of both clocks, to calibrate the length of a tick.
pub(crate) struct ClockSample {
    ticks: u64,
    instant: Instant,
}

impl ClockSample {
    pub(crate) fn now() -> Self {
        Self { ticks: now(), instant: Instant::now() }
    }

    /// Nanoseconds per tick since this sample; more precise the older the sample is.
    pub(crate) fn ns_per_tick(&self) -> f64 {
        let ticks = now().saturating_sub(self.ticks).max(1);
        self.instant.elapsed().as_nanos() as f64 / ticks as f64
    }
}
