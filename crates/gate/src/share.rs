//! The CPU share: how much of each period packets may take.
//!
//! Mogul and Ramakrishnan, section 7: without a limit, packets take the whole
//! processor and a program beside them makes no progress. The time that was
//! really spent on packets is summed; over the share, receiving stops until
//! the period ends. A processor that falls idle lifts the limit, since nobody
//! wants what it would save.

/// No turn takes longer, or as long as the period where that is more: then the
/// clock jumped, or the machine stood still, and packets are not to blame.
const TURN_MAX_NS: u64 = 100_000_000;

/// What is left of this period's share.
#[derive(Clone, Debug)]
pub struct CpuShare {
    period_ns: u64,
    share_ns: u64,
    began_ns: u64,
    spent_ns: u64,
}

impl CpuShare {
    /// `percent` of each period; the first one begins at `now_ns`.
    pub fn new(percent: u32, period_ns: u64, now_ns: u64) -> Self {
        let share_ns = share_of(percent, period_ns);
        Self { period_ns, share_ns, began_ns: now_ns, spent_ns: 0 }
    }

    /// Changes the share from now on.
    pub fn set(&mut self, percent: u32, period_ns: u64) {
        self.period_ns = period_ns;
        self.share_ns = share_of(percent, period_ns);
    }

    /// Whether there is a limit at all.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.share_ns < self.period_ns
    }

    /// So much time was spent on packets.
    #[inline]
    pub fn charge(&mut self, now_ns: u64, spent_ns: u64) {
        self.roll(now_ns);
        let turn_max_ns = self.period_ns.max(TURN_MAX_NS);
        self.spent_ns = self.spent_ns.saturating_add(spent_ns.min(turn_max_ns));
    }

    /// Nobody else wants the processor: the rest of the period is free.
    pub fn on_idle(&mut self, now_ns: u64) {
        self.roll(now_ns);
        self.spent_ns = 0;
    }

    /// Until when receiving is held back; `None` when it is not.
    #[inline]
    pub fn held_until(&mut self, now_ns: u64) -> Option<u64> {
        if !self.is_limited() {
            return None;
        }
        self.roll(now_ns);
        (self.spent_ns >= self.share_ns).then(|| self.began_ns.saturating_add(self.period_ns))
    }

    /// Begins a new period if one is due. What was spent beyond the share is
    /// taken off the next one, since a turn is not cut short: so the share is
    /// kept over time, however long a turn is.
    #[inline]
    fn roll(&mut self, now_ns: u64) {
        if now_ns < self.began_ns {
            // The clock stepped back.
            self.began_ns = now_ns;
            self.spent_ns = 0;
            return;
        }
        let elapsed_ns = now_ns - self.began_ns;
        if elapsed_ns >= self.period_ns {
            let periods = elapsed_ns / self.period_ns;
            self.began_ns += periods * self.period_ns;
            self.spent_ns = self.spent_ns.saturating_sub(self.share_ns.saturating_mul(periods));
        }
    }
}

fn share_of(percent: u32, period_ns: u64) -> u64 {
    (u128::from(period_ns) * u128::from(percent) / 100) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn it_stops_for_the_rest_of_the_period() {
        let mut share = CpuShare::new(25, 10 * MS, 0);
        share.charge(MS, MS);
        assert_eq!(share.held_until(MS), None);
        share.charge(3 * MS, 2 * MS);
        assert_eq!(share.held_until(3 * MS), Some(10 * MS));
        assert_eq!(share.held_until(9 * MS), Some(10 * MS));
        assert_eq!(share.held_until(10 * MS), None);
    }

    #[test]
    fn long_turns_are_paid_back() {
        let mut share = CpuShare::new(50, 10 * MS, 0);
        let (mut now_ns, mut spent_ns) = (0, 0);
        while now_ns < 1000 * MS {
            match share.held_until(now_ns) {
                Some(until_ns) => now_ns = until_ns,
                None => {
                    now_ns += 4 * MS;
                    spent_ns += 4 * MS;
                    share.charge(now_ns, 4 * MS);
                }
            }
        }
        let percent = spent_ns * 100 / now_ns;
        assert!((49..=51).contains(&percent), "{percent}");
    }

    #[test]
    fn an_idle_processor_lifts_it() {
        let mut share = CpuShare::new(10, 10 * MS, 0);
        share.charge(2 * MS, 2 * MS);
        assert!(share.held_until(2 * MS).is_some());
        share.on_idle(3 * MS);
        assert_eq!(share.held_until(3 * MS), None);
    }

    #[test]
    fn all_of_the_processor_is_no_limit() {
        let mut share = CpuShare::new(100, 10 * MS, 0);
        share.charge(MS, 100 * MS);
        assert!(!share.is_limited());
        assert_eq!(share.held_until(MS), None);
    }

    #[test]
    fn a_clock_that_jumps_begins_a_new_period() {
        let mut share = CpuShare::new(50, 10 * MS, 1000 * MS);
        share.charge(1000 * MS, 9 * MS);
        assert!(share.held_until(1001 * MS).is_some());
        assert_eq!(share.held_until(0), None, "back");
        share.charge(MS, 9 * MS);
        assert_eq!(share.held_until(u64::MAX / 2), None, "forward");
    }

    /// A machine that stood still for an hour in the middle of a turn must not
    /// pay that hour back.
    #[test]
    fn a_jump_inside_a_turn_is_not_paid_back() {
        const HOUR_NS: u64 = 3600 * 1000 * MS;
        let mut share = CpuShare::new(25, 10 * MS, 0);
        share.charge(HOUR_NS, HOUR_NS);
        let mut now_ns = HOUR_NS;
        while let Some(until_ns) = share.held_until(now_ns) {
            assert!(until_ns > now_ns && until_ns - now_ns <= 10 * MS);
            now_ns = until_ns;
        }
        assert!(now_ns - HOUR_NS <= 400 * MS, "held for {} ms", (now_ns - HOUR_NS) / MS);
    }
}
