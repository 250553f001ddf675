//! CPU share: maximum part of each period that packets may take.
//!
//! Mogul and Ramakrishnan, section 7: without a limit, packets take the whole processor and
//! an application on it makes no progress. The time actually spent on packets is summed;
//! above the share, receiving is paused until the period ends. A processor that becomes idle
//! lifts the limit, since no process needs the time saved.

/// Maximum plausible duration of a turn, or the period if that is longer. More means that the
/// clock jumped or the machine was suspended; the excess is not charged.
const MAX_TURN_NS: u64 = 100_000_000;

/// Accounting of the CPU share in the current period.
#[derive(Clone, Debug)]
pub struct CpuShare {
    period_ns: u64,
    share_ns: u64,
    period_start_ns: u64,
    spent_ns: u64,
    /// Charged since the charges were last replaced.
    recent_charges_ns: u64,
}

impl CpuShare {
    /// Creates the accounting for `percent` of each period; the first period starts at `now_ns`.
    pub fn new(percent: u32, period_ns: u64, now_ns: u64) -> Self {
        let share_ns = share_of(percent, period_ns);
        Self { period_ns, share_ns, period_start_ns: now_ns, spent_ns: 0, recent_charges_ns: 0 }
    }

    /// Changes the share and the period.
    pub fn set_share(&mut self, percent: u32, period_ns: u64) {
        self.period_ns = period_ns;
        self.share_ns = share_of(percent, period_ns);
    }

    /// True if the share is below 100 %.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.share_ns < self.period_ns
    }

    /// Charges time spent on packets.
    #[inline]
    pub fn charge(&mut self, now_ns: u64, spent_ns: u64) {
        self.advance_period(now_ns);
        let spent_ns = spent_ns.min(self.max_charge_ns());
        self.spent_ns = self.spent_ns.saturating_add(spent_ns);
        self.recent_charges_ns = self.recent_charges_ns.saturating_add(spent_ns);
    }

    /// Replaces what was charged since the last call by the processor time that the thread took
    /// meanwhile. So busy-polling, sleeping and waking count too, and time in which another
    /// thread ran does not.
    pub fn replace_charges(&mut self, now_ns: u64, processor_ns: u64) {
        self.advance_period(now_ns);
        let processor_ns = processor_ns.min(self.max_charge_ns());
        self.spent_ns = self.spent_ns.saturating_add(processor_ns);
        self.spent_ns = self.spent_ns.saturating_sub(self.recent_charges_ns);
        self.recent_charges_ns = 0;
    }

    fn max_charge_ns(&self) -> u64 {
        self.period_ns.max(MAX_TURN_NS)
    }

    /// Lifts the limit for the rest of the period, because no other task needs the processor.
    pub fn on_idle(&mut self, now_ns: u64) {
        self.advance_period(now_ns);
        self.spent_ns = 0;
    }

    /// Time until which receiving is paused; `None` if it is not paused.
    #[inline]
    pub fn paused_until(&mut self, now_ns: u64) -> Option<u64> {
        if !self.is_limited() {
            return None;
        }
        self.advance_period(now_ns);
        (self.spent_ns >= self.share_ns)
            .then(|| self.period_start_ns.saturating_add(self.period_ns))
    }

    /// Starts a new period if one is due. Time spent beyond the share is charged to the next
    /// period, since a turn is not cut short. So the share holds over time, however long a turn.
    #[inline]
    fn advance_period(&mut self, now_ns: u64) {
        if now_ns < self.period_start_ns {
            // The clock stepped back.
            self.period_start_ns = now_ns;
            self.spent_ns = 0;
            return;
        }
        let elapsed_ns = now_ns - self.period_start_ns;
        if elapsed_ns >= self.period_ns {
            let periods = elapsed_ns / self.period_ns;
            self.period_start_ns += periods * self.period_ns;
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
    fn pauses_for_the_rest_of_the_period() {
        let mut share = CpuShare::new(25, 10 * MS, 0);
        share.charge(MS, MS);
        assert_eq!(share.paused_until(MS), None);
        share.charge(3 * MS, 2 * MS);
        assert_eq!(share.paused_until(3 * MS), Some(10 * MS));
        assert_eq!(share.paused_until(9 * MS), Some(10 * MS));
        assert_eq!(share.paused_until(10 * MS), None);
    }

    #[test]
    fn time_awake_between_turns_counts() {
        let mut share = CpuShare::new(25, 10 * MS, 0);
        share.charge(MS, MS);
        share.replace_charges(2 * MS, 2 * MS);
        assert_eq!(share.paused_until(2 * MS), None);
        share.charge(3 * MS, MS / 4);
        assert_eq!(share.paused_until(3 * MS), None);
        share.replace_charges(3 * MS, MS / 2);
        assert_eq!(share.paused_until(3 * MS), Some(10 * MS));
    }

    #[test]
    fn time_of_other_threads_is_given_back() {
        let mut share = CpuShare::new(25, 10 * MS, 0);
        share.charge(4 * MS, 4 * MS);
        assert!(share.paused_until(4 * MS).is_some());
        share.replace_charges(4 * MS, MS);
        assert_eq!(share.paused_until(4 * MS), None);
        share.charge(6 * MS, 3 * MS / 2);
        assert!(share.paused_until(6 * MS).is_some(), "1 ms and 1.5 ms");
    }

    #[test]
    fn long_turns_are_charged_to_later_periods() {
        let mut share = CpuShare::new(50, 10 * MS, 0);
        let (mut now_ns, mut spent_ns) = (0, 0);
        while now_ns < 1000 * MS {
            match share.paused_until(now_ns) {
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
    fn idle_processor_lifts_the_share() {
        let mut share = CpuShare::new(10, 10 * MS, 0);
        share.charge(2 * MS, 2 * MS);
        assert!(share.paused_until(2 * MS).is_some());
        share.on_idle(3 * MS);
        assert_eq!(share.paused_until(3 * MS), None);
    }

    #[test]
    fn full_share_is_no_limit() {
        let mut share = CpuShare::new(100, 10 * MS, 0);
        share.charge(MS, 100 * MS);
        assert!(!share.is_limited());
        assert_eq!(share.paused_until(MS), None);
    }

    #[test]
    fn clock_jump_starts_a_new_period() {
        let mut share = CpuShare::new(50, 10 * MS, 1000 * MS);
        share.charge(1000 * MS, 9 * MS);
        assert!(share.paused_until(1001 * MS).is_some());
        assert_eq!(share.paused_until(0), None, "back");
        share.charge(MS, 9 * MS);
        assert_eq!(share.paused_until(u64::MAX / 2), None, "forward");
    }

    /// A suspension of an hour in the middle of a turn must not be charged.
    #[test]
    fn clock_jump_inside_a_turn_is_not_charged() {
        const HOUR_NS: u64 = 3600 * 1000 * MS;
        let mut share = CpuShare::new(25, 10 * MS, 0);
        share.charge(HOUR_NS, HOUR_NS);
        let mut now_ns = HOUR_NS;
        while let Some(until_ns) = share.paused_until(now_ns) {
            assert!(until_ns > now_ns && until_ns - now_ns <= 10 * MS);
            now_ns = until_ns;
        }
        assert!(now_ns - HOUR_NS <= 400 * MS, "paused for {} ms", (now_ns - HOUR_NS) / MS);
    }
}
