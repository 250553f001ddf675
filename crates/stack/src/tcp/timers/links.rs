//! Links of a connection in the tables.

/// Null table index.
pub(crate) const NO_INDEX: u32 = u32::MAX;

/// One tick is 2^20 ns, about a millisecond.
pub(crate) const TICK_BITS: u32 = 20;

/// First tick at or after `at_ns`.
#[inline]
pub(crate) fn tick_of(at_ns: u64) -> u64 {
    (at_ns >> TICK_BITS) + u64::from(at_ns & ((1 << TICK_BITS) - 1) != 0)
}

/// Links of a connection in the hash table and in the timer wheel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableLinks {
    pub(crate) hash: u32,
    /// Next connection in the same hash bucket.
    pub(crate) hash_next: u32,
    pub(crate) timer_previous: u32,
    pub(crate) timer_next: u32,
    /// Slot of the timer wheel; [`NO_INDEX`] when no timer is set.
    pub(crate) timer_slot: u32,
    /// Tick for which the timer is set, as two words: the links need no padding then.
    timer_tick: [u32; 2],
}

impl TableLinks {
    /// Tick for which the timer is set.
    #[inline]
    pub(crate) fn tick(&self) -> u64 {
        let [low, high] = self.timer_tick;
        u64::from(high) << 32 | u64::from(low)
    }

    #[inline]
    pub(crate) fn set_tick(&mut self, tick: u64) {
        self.timer_tick = [tick as u32, (tick >> 32) as u32];
    }

    /// True when the timer wheel would fire later than `at_ns`, or not at all.
    #[inline]
    pub(crate) fn fires_later_than(&self, at_ns: u64) -> bool {
        // `tick_of(at_ns)` is before the tick; no timer is set for tick 0.
        self.timer_slot == NO_INDEX || at_ns <= self.tick().wrapping_sub(1) << TICK_BITS
    }
}

impl Default for TableLinks {
    /// In no table.
    fn default() -> Self {
        Self {
            hash: 0,
            hash_next: NO_INDEX,
            timer_previous: NO_INDEX,
            timer_next: NO_INDEX,
            timer_slot: NO_INDEX,
            timer_tick: [0; 2],
        }
    }
}
