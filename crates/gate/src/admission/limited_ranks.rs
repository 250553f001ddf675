//! Ranks whose packets are limited at all.

/// Excess of lossy periods over lossless periods after which one more rank is limited. Only
/// periods in which the limited ranks are exhausted count as lossy.
const BAD_PERIODS_TO_EXTEND: u32 = 3;
/// Minimum time without losses after which a rank is released. The time doubles with each
/// extension, up to the maximum.
const MIN_RELEASE_NS: u64 = 1_000_000_000;
const MAX_RELEASE_NS: u64 = 32_000_000_000;

/// Range of limited ranks: from `first_rank` to the last rank.
///
/// A rate is an estimate, and refusing a packet of a connection stalls the connection for a
/// retransmission timeout. So at first only the last rank is limited. The rank before it is
/// limited when packets are still lost although hardly any packets of the last rank are
/// admitted, and so on.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitedRanks {
    last_rank: u8,
    first_rank: u8,
    bad_periods: u32,
    good_ns: u64,
    release_after_ns: u64,
}

impl LimitedRanks {
    pub(super) fn new(last_rank: u8) -> Self {
        Self {
            last_rank,
            first_rank: last_rank,
            bad_periods: 0,
            good_ns: 0,
            release_after_ns: MIN_RELEASE_NS / 2,
        }
    }

    /// True if classes of this rank are limited.
    pub(super) fn contains(&self, rank: u8) -> bool {
        rank >= self.first_rank
    }

    /// Resets to the last rank, when limits come into force again.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.last_rank);
    }

    /// Updates the range at the end of a period. Returns true if one more rank is limited.
    ///
    /// `has_losses` is true if packets were lost in spite of the limits. `exhausted` is true if
    /// hardly any packets of the limited ranks were admitted. `ranks` are the ranks of all
    /// classes.
    pub(super) fn on_period(
        &mut self,
        has_losses: bool,
        exhausted: bool,
        elapsed_ns: u64,
        ranks: impl Iterator<Item = u8>,
    ) -> bool {
        if !has_losses {
            self.bad_periods = self.bad_periods.saturating_sub(1);
            self.good_ns = self.good_ns.saturating_add(elapsed_ns);
            if self.good_ns >= self.release_after_ns {
                self.good_ns = 0;
                self.first_rank =
                    ranks.filter(|&rank| rank > self.first_rank).min().unwrap_or(self.first_rank);
            }
            return false;
        }
        self.good_ns = 0;
        self.bad_periods += u32::from(exhausted);
        if self.bad_periods < BAD_PERIODS_TO_EXTEND {
            return false;
        }
        self.bad_periods = 0;
        let Some(next) = ranks.filter(|&rank| rank < self.first_rank).max() else { return false };
        self.first_rank = next;
        self.release_after_ns = (self.release_after_ns * 2).min(MAX_RELEASE_NS);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: [u8; 4] = [0, 0, 1, 2];
    const PERIOD_NS: u64 = 5_000_000;

    fn periods(limited: &mut LimitedRanks, count: u32, lost: bool, exhausted: bool) -> u32 {
        (0..count)
            .map(|_| u32::from(limited.on_period(lost, exhausted, PERIOD_NS, RANKS.into_iter())))
            .sum()
    }

    #[test]
    fn extends_to_the_next_rank_only_after_the_last_is_exhausted() {
        let mut limited = LimitedRanks::new(2);
        assert!(limited.contains(2) && !limited.contains(1));
        assert_eq!(periods(&mut limited, 100, true, false), 0, "the last rank is still admitted");
        assert_eq!(periods(&mut limited, 2, true, true), 0, "too few lossy periods");
        assert_eq!(periods(&mut limited, 2, false, true), 0);
        assert_eq!(periods(&mut limited, 3, true, true), 1);
        assert!(limited.contains(1) && !limited.contains(0));
        assert_eq!(periods(&mut limited, 100, true, true), 1, "no further rank");
        assert!(limited.contains(0));
    }

    #[test]
    fn release_time_doubles_after_each_extension() {
        let mut limited = LimitedRanks::new(2);
        let mut waited = Vec::new();
        for _ in 0..7 {
            periods(&mut limited, 3, true, true);
            let mut periods_to_release = 0;
            while limited.contains(1) {
                periods(&mut limited, 1, false, true);
                periods_to_release += 1;
            }
            waited.push(periods_to_release * PERIOD_NS / 1_000_000_000);
        }
        assert_eq!(waited, [1, 2, 4, 8, 16, 32, 32]);
        limited.restart();
        periods(&mut limited, 3, true, true);
        assert!(limited.contains(1));
        assert_eq!(periods(&mut limited, 200, false, true), 0);
        assert!(!limited.contains(1), "a restart resets the release time");
    }
}
