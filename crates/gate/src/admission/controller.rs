//! Rate controller: the total admitted rate and its allocation to classes.

use super::busy_rate::BusyRate;
use super::class::{ClassPolicy, PerClass};
use super::pressure::Pressure;

/// Minimum total rate. Some packets must be admitted to detect that the load has fallen.
pub(super) const MIN_TOTAL_PPS: u64 = 100;

/// Periods after which a reduction for lost receive packets has taken effect.
const REDUCTION_PERIODS: u64 = 3;

/// Backlog from which the total rises no further: the server is nearly busy all the time.
const HIGH_BACKLOG_PERCENT: u32 = 50;

/// Controller of the total admitted rate.
///
/// The rate served while queues are not empty is the estimate of the capacity.
///
/// * Late drops: the total is set to nine tenths of the capacity.
/// * Queues above the high mark that do not drain, or a backlog at the device: the total is set slightly below the
///   capacity. Where feedback pauses receiving at that mark, queues reach it at every peak.
/// * A backlog at the device after receive packets were lost: the total is below what is served
///   meanwhile, the more the longer it takes to drain, but at least three quarters.
/// * Queues between the marks: the total is capped at the capacity while they fill, and
///   rises slowly while they do not.
/// * Queues below the low mark: the total rises slowly near the best capacity seen, and fast
///   far below it.
#[derive(Clone, Debug)]
pub(super) struct TotalRate {
    high_mark_percent: u32,
    low_mark_percent: u32,
    pub(super) pps: u64,
    /// Recent estimate of the rate that can be served.
    capacity_pps: u64,
    /// Best capacity seen, decaying slowly.
    best_pps: u64,
    last_level_percent: u32,
    /// The total was reduced for lost receive packets since limits were last off.
    was_reduced: bool,
    /// Rate served while the server was busy all the time.
    busy_rate: BusyRate,
    /// Periods since the last such reduction.
    periods_since_reduction: u64,
    /// Receive packets were lost in the last period.
    was_missing: bool,
    /// The server was busy all the time in the last period.
    was_busy: bool,
}

impl TotalRate {
    pub(super) fn new(low_mark_percent: u32, high_mark_percent: u32) -> Self {
        Self {
            high_mark_percent,
            low_mark_percent,
            pps: 0,
            capacity_pps: 0,
            best_pps: 0,
            last_level_percent: 0,
            was_reduced: false,
            busy_rate: BusyRate::default(),
            periods_since_reduction: u64::MAX,
            was_missing: false,
            was_busy: false,
        }
    }

    pub(super) fn is_overloaded(&self, pressure: &Pressure) -> bool {
        pressure.late_drops > 0
            || pressure.backlog_percent >= 100
            || pressure.level_percent >= self.high_mark_percent
    }

    /// Follows the capacity in a period in which limits bind nobody.
    pub(super) fn follow(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        let served_pps = rate_pps(pressure.served, elapsed_ns);
        self.capacity_pps = (self.capacity_pps * 3 + served_pps) / 4;
        self.best_pps = (self.best_pps - self.best_pps / 128).max(self.capacity_pps);
        self.last_level_percent = pressure.level_percent;
        self.was_reduced = false;
        self.pps = self.best_pps.max(MIN_TOTAL_PPS);
    }

    /// Updates the best capacity in a period without limits or overload.
    pub(super) fn on_calm(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        self.was_reduced = false;
        let served_pps = rate_pps(pressure.served, elapsed_ns);
        self.best_pps = (self.best_pps - self.best_pps / 128).max(served_pps);
    }

    /// Sets the first total when overload begins. The rate served now may be below the
    /// capacity, because a flood takes CPU time from the applications.
    pub(super) fn start(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        let served_pps = rate_pps(pressure.served, elapsed_ns).max(self.best_pps);
        self.capacity_pps = served_pps;
        self.best_pps = served_pps;
        self.last_level_percent = pressure.level_percent;
        // The demand of each class is not known yet. In an overrun the total is one eighth of the
        // capacity until it is.
        self.was_reduced = pressure.is_overrun();
        let pps = if self.was_reduced { served_pps / 8 } else { served_pps / 10 * 9 };
        self.pps = pps.max(MIN_TOTAL_PPS);
    }

    /// Sets the total to the capacity when one more rank shares it.
    pub(super) fn reset_to_capacity(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        let served_pps = rate_pps(pressure.served, elapsed_ns).max(self.capacity_pps);
        self.pps = (served_pps - served_pps / 10).max(MIN_TOTAL_PPS);
    }

    /// Adjusts the total to the measurements of a period. `limited` is true if
    /// packets were refused because the total was used up; `preferred_pps` is the result of [`preferred_demand`].
    pub(super) fn adjust(
        &mut self,
        pressure: &Pressure,
        elapsed_ns: u64,
        limited: bool,
        preferred_pps: Option<u64>,
    ) {
        let served_pps = rate_pps(pressure.served, elapsed_ns);
        let overloaded = self.is_overloaded(pressure);
        self.periods_since_reduction = self.periods_since_reduction.saturating_add(1);
        // A backlog that costs no packet is only a busy server.
        let is_busy = pressure.backlog_percent >= HIGH_BACKLOG_PERCENT
            && (self.was_reduced || pressure.is_missing_packets());
        let (stays_busy, missing) = self.compare_with_last(is_busy, pressure.is_missing_packets());
        self.busy_rate.update(served_pps, stays_busy, self.best_pps, elapsed_ns);
        let reduce_to_pps = preferred_pps.filter(|&pps| missing && (!overloaded || self.pps > pps));
        // Packets admitted before a reduction are still served for a while.
        let takes_effect =
            reduce_to_pps.is_some() && self.periods_since_reduction < REDUCTION_PERIODS;
        let queues_short = !overloaded
            && reduce_to_pps.is_none()
            && pressure.level_percent <= self.low_mark_percent
            && !is_busy;
        if queues_short {
            // Packets queued before the reduction distort the measurement.
            let max_pps = if self.was_reduced { self.pps } else { u64::MAX };
            self.capacity_pps = self.capacity_pps.max(served_pps.min(max_pps));
        } else if overloaded || !limited {
            // Otherwise the total itself may have capped the served rate.
            self.capacity_pps = (self.capacity_pps * 3 + served_pps) / 4;
        }
        self.best_pps = (self.best_pps - self.best_pps / 128).max(self.capacity_pps);
        let draining = pressure.late_drops == 0
            && pressure.backlog_percent < 100
            && pressure.level_percent < self.last_level_percent;
        let filling = pressure.level_percent > self.last_level_percent;
        self.last_level_percent = pressure.level_percent;
        if takes_effect {
            return;
        } else if let Some(preferred_pps) = reduce_to_pps {
            let busy_pps = stays_busy.then_some(self.busy_rate.pps);
            self.reduce_for_receive(preferred_pps, pressure.is_overrun(), busy_pps);
        } else if is_busy && pressure.backlog_percent >= 100 && pressure.late_drops == 0 {
            if stays_busy {
                self.drain_backlog();
            }
        } else if overloaded && !draining {
            let base_pps = self.pps.min(self.capacity_pps);
            let divisor = if pressure.late_drops > 0 { 10 } else { 32 };
            self.pps = base_pps - base_pps / divisor;
        } else if queues_short && limited {
            // Packets are refused only while the total is used.
            let far_below = self.pps < self.best_pps / 10 * 9;
            let step_pps = match far_below {
                true => self.pps / 4,
                false if self.busy_rate.is_doubtful_below(self.pps) => self.pps / 8,
                false if self.was_reduced => {
                    self.pps / 200_u64.saturating_sub(self.periods_since_reduction).max(50)
                }
                false => self.pps / 50,
            };
            // A large step could displace ranks above the last.
            let careful = self.was_reduced && preferred_pps.is_some();
            let min_pps = if careful { 0 } else { self.best_pps / 2 };
            let raised_pps = self.pps.max(min_pps).saturating_add(step_pps + 1);
            // Beyond the capacity the ring loses packets of all ranks.
            let max_pps = self.busy_rate.max_total_pps().unwrap_or(u64::MAX);
            self.pps = raised_pps.min(max_pps.max(self.pps));
        } else if !queues_short && filling {
            self.pps = self.pps.min(self.capacity_pps);
        } else if !queues_short && limited && !is_busy {
            // The served rate may equal the admitted rate, because work that does not come in
            // batches costs more. So it is not taken for the capacity while queues do not fill.
            self.pps = self.pps.saturating_add(self.pps / 50 + 1);
        }
        self.pps = self.pps.max(MIN_TOTAL_PPS);
    }

    /// Conditions that hold as in the last period: in a single one, another thread may have had the
    /// processor.
    fn compare_with_last(&mut self, is_busy: bool, missing: bool) -> (bool, bool) {
        let was_busy = std::mem::replace(&mut self.was_busy, is_busy);
        let was_missing = std::mem::replace(&mut self.was_missing, missing);
        (is_busy && was_busy, missing && was_missing)
    }

    /// Lowers the total below what a busy server serves, the more the longer there is a backlog.
    fn drain_backlog(&mut self) {
        let busy_pps = self.busy_rate.pps;
        let reduced_pps = self.pps.saturating_sub(busy_pps / 16);
        self.pps = reduced_pps.clamp(busy_pps / 4 * 3, busy_pps - busy_pps / 16);
    }

    /// Lowers the total, so that all arriving packets can be examined, but never below the demand of
    /// the ranks above the last. The total then rises fast to just below the rate at which packets
    /// were lost unexamined, and slowly from there.
    ///
    /// `busy_pps` is the served rate if the server was busy all the time. Then the total was above
    /// the capacity, and just below it suffices.
    fn reduce_for_receive(&mut self, preferred_pps: u64, overrun: bool, busy_pps: Option<u64>) {
        if self.pps <= preferred_pps {
            self.pps = (self.pps + self.pps / 2).min(preferred_pps);
            self.best_pps = self.pps;
        } else {
            self.best_pps = self.pps - self.pps / 16;
            self.periods_since_reduction = 0;
            let divisor = if overrun { 2 } else { 8 };
            let reduced_pps = match busy_pps {
                Some(busy_pps) => self.pps.min(busy_pps - busy_pps / 32),
                None => self.pps - self.pps / divisor,
            };
            self.pps = reduced_pps.max(preferred_pps);
        }
        self.capacity_pps = self.pps;
        self.was_reduced = true;
    }
}

/// Converts packets in a time to packets per second, saturating.
pub(super) fn rate_pps(packets: u64, elapsed_ns: u64) -> u64 {
    let pps = u128::from(packets) * 1_000_000_000 / u128::from(elapsed_ns.max(1));
    u64::try_from(pps).unwrap_or(u64::MAX)
}

/// Demand of the ranks above the last plus the guarantees of the last rank, in packets per
/// second, times 1.5 because packets arrive unevenly.
///
/// Returns `None` if the ranks above the last have hardly any demand. Refusing packets below
/// this rate to examine more of the others gains nothing.
pub(super) fn preferred_demand(
    policies: &[ClassPolicy],
    demand_pps: &PerClass<u64>,
) -> Option<u64> {
    let limited = || policies.iter().zip(demand_pps).filter(|(policy, _)| !policy.exempt);
    let last_rank = limited().map(|(policy, _)| policy.rank).max()?;
    let (mut asked_pps, mut guaranteed_pps) = (0_u64, 0_u64);
    for (policy, &demand_pps) in limited() {
        if policy.rank == last_rank {
            guaranteed_pps = guaranteed_pps.saturating_add(demand_pps.min(policy.guaranteed_pps));
        } else {
            asked_pps = asked_pps.saturating_add(demand_pps.min(policy.ceiling_pps));
        }
    }
    let sum_pps = asked_pps.saturating_add(guaranteed_pps);
    (asked_pps >= MIN_TOTAL_PPS).then(|| sum_pps.saturating_add(sum_pps / 2))
}

/// Allocates a total rate to classes and returns the rate of each class, in packets per
/// second.
///
/// Guaranteed rates come first, as far as they are used. The remainder is allocated by rank;
/// within a rank each class gets its demand or an equal share. A class whose demand is met
/// may also have the remainder for later ranks. The unused part is lent to the later ranks
/// until the class demands it. Exempt classes take no part.
pub(super) fn allocate_rates(
    total_pps: u64,
    policies: &[ClassPolicy],
    demand_pps: &PerClass<u64>,
) -> PerClass<u64> {
    let mut limits = [0; super::MAX_CLASSES];
    let mut unmet = [0; super::MAX_CLASSES];
    let mut remaining = total_pps;
    for (class, policy) in policies.iter().enumerate().filter(|(_, policy)| !policy.exempt) {
        limits[class] = demand_pps[class].min(policy.guaranteed_pps);
        unmet[class] = demand_pps[class].min(policy.ceiling_pps) - limits[class];
        remaining = remaining.saturating_sub(limits[class]);
    }
    let mut next = policies.iter().map(|policy| policy.rank).min();
    while let Some(rank) = next {
        let members = || (0..policies.len()).filter(|&class| policies[class].rank == rank);
        remaining = fill_rank(remaining, members, &mut unmet, &mut limits);
        for class in members().filter(|&class| unmet[class] == 0) {
            limits[class] = limits[class].saturating_add(remaining);
        }
        next = policies.iter().map(|policy| policy.rank).filter(|&other| other > rank).min();
    }
    for (limit, policy) in limits.iter_mut().zip(policies) {
        *limit = (*limit).clamp(policy.guaranteed_pps, policy.ceiling_pps);
    }
    limits
}

/// Grants each member its unmet demand or an equal share of `remaining`; returns the rate
/// that is left.
fn fill_rank<I: Iterator<Item = usize>>(
    mut remaining: u64,
    members: impl Fn() -> I,
    unmet: &mut PerClass<u64>,
    granted: &mut PerClass<u64>,
) -> u64 {
    loop {
        let unsatisfied = members().filter(|&class| unmet[class] > 0).count() as u64;
        if unsatisfied == 0 || remaining < unsatisfied {
            return if unsatisfied == 0 { remaining } else { 0 };
        }
        let share = remaining / unsatisfied;
        for class in members() {
            let more = unmet[class].min(share);
            unmet[class] -= more;
            granted[class] += more;
            remaining -= more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::class::ClassName;
    use super::*;
    use proptest::prelude::*;

    fn policy(rank: u8, guaranteed_pps: u64, ceiling_pps: u64) -> ClassPolicy {
        let name = ClassName::new("x").unwrap();
        ClassPolicy { name, rank, guaranteed_pps, ceiling_pps, exempt: false }
    }

    fn share(total_pps: u64, policies: &[ClassPolicy], demands: &[u64]) -> Vec<u64> {
        let mut demand_pps = [0; super::super::MAX_CLASSES];
        demand_pps[..demands.len()].copy_from_slice(demands);
        allocate_rates(total_pps, policies, &demand_pps)[..policies.len()].to_vec()
    }

    #[test]
    fn last_rank_gets_the_remainder() {
        let classes = [policy(0, 0, u64::MAX), policy(1, 0, u64::MAX)];
        assert_eq!(share(1000, &classes, &[300, 5000]), [1000, 700]);
        assert_eq!(share(1000, &classes, &[3000, 5000]), [1000, 0]);
    }

    #[test]
    fn guaranteed_rate_takes_precedence_and_is_lent_while_unused() {
        let classes = [policy(0, 0, u64::MAX), policy(1, 400, u64::MAX)];
        assert_eq!(share(1000, &classes, &[3000, 5000]), [600, 400]);
        assert_eq!(share(1000, &classes, &[3000, 100]), [900, 400]);
        assert_eq!(
            share(1000, &classes, &[3000, 0]),
            [1000, 400],
            "the unused guarantee is only lent"
        );
    }

    #[test]
    fn equal_ranks_share_fairly_within_ceilings() {
        let classes = [policy(3, 0, u64::MAX), policy(3, 0, u64::MAX), policy(3, 0, 200)];
        assert_eq!(share(900, &classes, &[100, 5000, 5000]), [100, 600, 200]);
        assert_eq!(share(900, &classes, &[5000, 5000, 0]), [450, 450, 0]);
        assert_eq!(share(900, &classes, &[100, 100, 100]), [700, 700, 200]);
    }

    #[test]
    fn reduces_the_total_to_the_preferred_demand_when_packets_are_missed() {
        let classes = [policy(0, 0, 100), policy(1, 0, u64::MAX), policy(2, 50, u64::MAX)];
        let preferred_for = |icmp, known, unknown| {
            let mut demand_pps = [0; super::super::MAX_CLASSES];
            demand_pps[..3].copy_from_slice(&[icmp, known, unknown]);
            preferred_demand(&classes, &demand_pps)
        };
        let preferred_pps = preferred_for(400, 7_150, 1_000_000);
        assert_eq!(preferred_pps, Some(7_300 + 7_300 / 2));
        assert_eq!(preferred_for(1, 2, 1_000_000), None, "no demand above the last rank");
        let mut total = TotalRate::new(25, 75);
        let served = |served| Pressure { served, ..Pressure::default() };
        let missed = |rx_missed_permille| Pressure { rx_missed_permille, ..served(1_000) };
        total.start(&served(1_000), 5_000_000);
        total.adjust(&missed(0), 5_000_000, false, None);
        assert_eq!(total.pps, 180_000);
        total.adjust(&missed(600), 5_000_000, false, preferred_pps);
        assert_eq!(total.pps, 180_000, "a single period says nothing");
        total.adjust(&missed(3), 5_000_000, true, preferred_pps);
        assert_eq!(total.pps, 157_500, "few packets are missed: an eighth less");
        for pps in [157_500, 157_500, 78_750] {
            total.adjust(&missed(600), 5_000_000, true, preferred_pps);
            assert_eq!(total.pps, pps, "an overrun: half, once the reduction has taken effect");
        }
        let examined = Pressure { served: 390, ..Pressure::default() };
        for _ in 0..3 {
            total.adjust(&examined, 5_000_000, true, preferred_pps);
        }
        let fast_pps = total.pps;
        assert!((130_000..157_500).contains(&fast_pps), "fast again: {fast_pps}");
        total.adjust(&examined, 5_000_000, true, preferred_pps);
        assert!(total.pps < fast_pps + fast_pps / 100, "then slowly: {}", total.pps);
        for _ in 0..100 {
            total.adjust(&missed(600), 5_000_000, true, preferred_pps);
        }
        assert_eq!(Some(total.pps), preferred_pps);
        for _ in 0..100 {
            total.adjust(&missed(600), 5_000_000, true, Some(50_000));
        }
        assert_eq!(total.pps, 50_000, "the preferred demand is higher");
        total.start(&missed(600), 5_000_000);
        assert_eq!(total.pps, 25_000, "an overrun from the start");
    }

    /// Total after a flood has begun, of a server of 40,000 packets/s that is busy all the time.
    fn limited_to_capacity() -> TotalRate {
        let mut total = TotalRate::new(25, 75);
        let busy = |rx_missed_permille| Pressure {
            served: 200,
            backlog_percent: 100,
            rx_missed_permille,
            ..Pressure::default()
        };
        total.start(&busy(600), 5_000_000);
        (0..20).for_each(|_| total.adjust(&busy(600), 5_000_000, true, Some(3_000)));
        (0..20).for_each(|_| total.adjust(&busy(0), 5_000_000, true, Some(3_000)));
        assert_eq!(total.pps, 30_000, "three quarters of what is served, as the backlog remains");
        let emptied = Pressure { served: 150, ..Pressure::default() };
        (0..10).for_each(|_| total.adjust(&emptied, 5_000_000, true, Some(3_000)));
        assert_eq!(total.pps, 39_375, "just below what was served");
        total
    }

    /// Most of a period, another thread has the processor.
    #[test]
    fn a_pause_of_the_thread_costs_little() {
        let mut total = limited_to_capacity();
        for _ in 0..5 {
            let pause = Pressure {
                served: 24,
                backlog_percent: 100,
                rx_missed_permille: 367,
                ..Pressure::default()
            };
            total.adjust(&pause, 5_000_000, true, Some(3_000));
            for _ in 0..20 {
                let served = Pressure { served: total.pps / 200, ..Pressure::default() };
                total.adjust(&served, 5_000_000, true, Some(3_000));
            }
            assert_eq!(total.pps, 39_375);
        }
    }

    #[test]
    fn uneven_service_does_not_lower_the_measured_capacity() {
        let mut total = limited_to_capacity();
        for period in 0..1_000 {
            let served = [85, 235, 90, 230, 360][period % 5];
            let busy = Pressure { served, backlog_percent: 100, ..Pressure::default() };
            total.adjust(&busy, 5_000_000, true, Some(3_000));
            assert!((20_000..=39_375).contains(&total.pps), "{}", total.pps);
        }
        let emptied = Pressure { served: 190, ..Pressure::default() };
        (0..10).for_each(|_| total.adjust(&emptied, 5_000_000, true, Some(3_000)));
        assert!((36_000..43_000).contains(&total.pps), "{}", total.pps);
    }

    /// Runs periods of 5 ms under a flood, in which the server can serve `capacities` packets each,
    /// and loses packets while the device has a backlog. Returns the packets served, and the periods
    /// with losses.
    fn serve(total: &mut TotalRate, capacities: impl IntoIterator<Item = u64>) -> (u64, usize) {
        let (mut waiting, mut all_served, mut with_losses) = (0, 0, 0);
        for capacity in capacities {
            waiting = (waiting + total.pps / 200).min(256);
            let served = capacity.min(waiting);
            waiting -= served;
            let is_busy = waiting > 0;
            let pressure = Pressure {
                served,
                backlog_percent: 100 * u32::from(is_busy),
                rx_missed_permille: 50 * u32::from(waiting > 64),
                ..Pressure::default()
            };
            total.adjust(&pressure, 5_000_000, true, Some(3_000));
            all_served += served;
            with_losses += usize::from(waiting > 64);
        }
        (all_served, with_losses)
    }

    #[test]
    fn a_program_that_computes_now_and_then_costs_what_it_takes() {
        let mut total = limited_to_capacity();
        let capacity = |period: u64| if period % 100 < 20 { 100 } else { 200 };
        let (served, _) = serve(&mut total, (0..2_000).map(capacity));
        let possible: u64 = (0..2_000).map(capacity).sum();
        assert!(served * 100 >= possible * 90, "{served} of {possible}");
    }

    /// The first expectation is what was served before the flood.
    #[test]
    fn a_program_that_computes_as_a_flood_begins_costs_what_it_takes() {
        let mut total = TotalRate::new(25, 75);
        let before = Pressure { served: 200, ..Pressure::default() };
        (0..20).for_each(|_| total.follow(&before, 5_000_000));
        let begins = Pressure {
            served: 50,
            backlog_percent: 100,
            rx_missed_permille: 400,
            ..Pressure::default()
        };
        (0..4).for_each(|_| total.adjust(&begins, 5_000_000, true, Some(3_000)));
        let capacity = |period: u64| if period % 100 < 20 { 50 } else { 200 };
        let (served, _) = serve(&mut total, (0..400).map(capacity));
        let possible: u64 = (0..400).map(capacity).sum();
        assert!(served * 100 >= possible * 85, "{served} of {possible}");
    }

    #[test]
    fn a_program_that_stays_is_taken_into_account() {
        let mut total = limited_to_capacity();
        serve(&mut total, [100; 600]);
        let (served, with_losses) = serve(&mut total, [100; 1_000]);
        assert!(served >= 95_000, "{served}");
        assert!(with_losses <= 40, "{with_losses}");
    }

    proptest! {
        #[test]
        fn used_rates_stay_within_the_total_and_the_guarantees(
            total_pps in 0_u64..10_000,
            classes in proptest::collection::vec((0_u8..4, 0_u64..2000, 0_u64..5000, 0_u64..9000), 1..16),
        ) {
            let policies: Vec<_> = classes.iter()
                .map(|&(rank, guaranteed, above, _)| policy(rank, guaranteed, guaranteed + above + 1))
                .collect();
            let demands: Vec<_> = classes.iter().map(|class| class.3).collect();
            let limits = share(total_pps, &policies, &demands);
            let used: Vec<_> = limits.iter().zip(&demands).map(|(l, d)| *l.min(d)).collect();
            let guaranteed: u64 =
                policies.iter().zip(&demands).map(|(t, d)| t.guaranteed_pps.min(*d)).sum();
            prop_assert!(used.iter().sum::<u64>() <= total_pps.max(guaranteed));
            for (i, one) in policies.iter().enumerate() {
                prop_assert!(limits[i] >= one.guaranteed_pps && limits[i] <= one.ceiling_pps);
                // No class is refused a rate that a later rank gets beyond its guarantee.
                let starved = used[i] + policies.len() as u64 <= demands[i].min(one.ceiling_pps);
                for (j, other) in policies.iter().enumerate() {
                    let extra = used[j] > other.guaranteed_pps.min(demands[j]);
                    prop_assert!(!(starved && other.rank > one.rank && extra), "{i} {j}");
                }
            }
        }
    }
}
