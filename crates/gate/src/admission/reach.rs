//! Down from which rank packets are refused at all.

/// In so many bad periods more than good ones those who are refused already are
/// not enough.
const BAD_PERIODS: u32 = 3;
/// After so much good time a rank is left alone again; after twice as much each
/// further time.
const GOOD_NS: u64 = 1_000_000_000;
const GOOD_MAX_NS: u64 = 32_000_000_000;

/// Which ranks are held to a rate.
///
/// A rate is a guess, and to refuse a packet of a connection stops it for the
/// time of a retransmission. So at first only the last rank is held to one. The
/// rank before it is when packets are still lost although hardly any of the last
/// are let in; and so on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    last_rank: u8,
    rank: u8,
    bad_periods: u32,
    good_ns: u64,
    patience_ns: u64,
}

impl Reach {
    pub(super) fn new(last_rank: u8) -> Self {
        Self { last_rank, rank: last_rank, bad_periods: 0, good_ns: 0, patience_ns: GOOD_NS / 2 }
    }

    /// Whether a class of this rank is held to a rate.
    pub(super) fn contains(&self, rank: u8) -> bool {
        rank >= self.rank
    }

    /// Limits begin anew.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.last_rank);
    }

    /// A period is over. `lost` says whether packets were lost all the same, and
    /// `exhausted` whether hardly any were let in of those who are refused
    /// already. `ranks` are those of all classes. Returns whether one more rank is
    /// held to a rate from now on.
    pub(super) fn on_period(
        &mut self,
        lost: bool,
        exhausted: bool,
        elapsed_ns: u64,
        ranks: impl Iterator<Item = u8>,
    ) -> bool {
        if !lost {
            self.bad_periods = self.bad_periods.saturating_sub(1);
            self.good_ns = self.good_ns.saturating_add(elapsed_ns);
            if self.good_ns >= self.patience_ns {
                self.good_ns = 0;
                self.rank = ranks.filter(|&rank| rank > self.rank).min().unwrap_or(self.rank);
            }
            return false;
        }
        self.good_ns = 0;
        self.bad_periods += u32::from(exhausted);
        if self.bad_periods < BAD_PERIODS {
            return false;
        }
        self.bad_periods = 0;
        let Some(next) = ranks.filter(|&rank| rank < self.rank).max() else { return false };
        self.rank = next;
        self.patience_ns = (self.patience_ns * 2).min(GOOD_MAX_NS);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: [u8; 4] = [0, 0, 1, 2];
    const PERIOD_NS: u64 = 5_000_000;

    fn periods(reach: &mut Reach, count: u32, lost: bool, exhausted: bool) -> u32 {
        (0..count)
            .map(|_| u32::from(reach.on_period(lost, exhausted, PERIOD_NS, RANKS.into_iter())))
            .sum()
    }

    #[test]
    fn the_next_rank_is_refused_only_when_the_last_is_not_enough() {
        let mut reach = Reach::new(2);
        assert!(reach.contains(2) && !reach.contains(1));
        assert_eq!(periods(&mut reach, 100, true, false), 0, "the last are still let in");
        assert_eq!(periods(&mut reach, 2, true, true), 0, "a hiccup");
        assert_eq!(periods(&mut reach, 2, false, true), 0);
        assert_eq!(periods(&mut reach, 3, true, true), 1);
        assert!(reach.contains(1) && !reach.contains(0));
        assert_eq!(periods(&mut reach, 100, true, true), 1, "there are no more than all");
        assert!(reach.contains(0));
    }

    #[test]
    fn who_was_refused_too_early_is_left_alone_later() {
        let mut reach = Reach::new(2);
        let mut waited = Vec::new();
        for _ in 0..7 {
            periods(&mut reach, 3, true, true);
            let mut count = 0;
            while reach.contains(1) {
                periods(&mut reach, 1, false, true);
                count += 1;
            }
            waited.push(count * PERIOD_NS / 1_000_000_000);
        }
        assert_eq!(waited, [1, 2, 4, 8, 16, 32, 32]);
        reach.restart();
        periods(&mut reach, 3, true, true);
        assert!(reach.contains(1));
        assert_eq!(periods(&mut reach, 200, false, true), 0);
        assert!(!reach.contains(1), "what was before is forgotten");
    }
}
