//! How much is let in, and of what.

use super::class::{PerClass, Terms};

/// How things went since the last call of
/// [`Admission::on_period`](super::Admission::on_period).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Packets that were served: that an application took, that were forwarded
    /// or answered.
    pub served: u64,
    /// Packets that were dropped after work was spent on them because something
    /// was full: the port's ring, a socket's queue.
    pub lost_late: u64,
    /// How full the fullest queue in front of an application is, in percent.
    pub level_percent: u32,
    /// Of the packets that came, how many were lost before anybody looked at
    /// them, in parts of a thousand, whoever sent them: less work on those that
    /// are let in would leave more time to look.
    pub unseen_permille: u32,
}

impl Pressure {
    fn is_crowded(&self) -> bool {
        self.unseen_permille >= CROWDED_PERMILLE
    }

    fn is_overrun(&self) -> bool {
        self.unseen_permille >= OVERRUN_PERMILLE
    }

    /// Whether packets were lost for which there was no room or no time.
    pub(super) fn has_lost(&self) -> bool {
        self.lost_late > 0 || self.is_overrun()
    }
}

/// So many of a thousand packets unseen are too many: those who do not come last
/// lose as much.
const CROWDED_PERMILLE: u32 = 3;
/// So many, and it has to get better at once.
const OVERRUN_PERMILLE: u32 = 100;

/// The least that is ever tried, so that it can be seen when things are better.
pub(super) const TOTAL_MIN_PPS: u64 = 100;

/// The total rate that is let in.
///
/// What is served while queues are not empty is what can be served, as far as is
/// known. The total is set to nine tenths of that when packets are lost late, and
/// a little below it when queues are above the high mark and do not drain: where
/// feedback stops receiving there, they are so at every peak. Between the marks
/// it is kept to just that while queues fill, and rises slowly while they do not.
/// It rises when queues are short: slowly when it is near what could be served
/// before, fast when it is far below.
#[derive(Clone, Debug)]
pub(super) struct Total {
    high_mark_percent: u32,
    low_mark_percent: u32,
    pub(super) pps: u64,
    /// What can be served, as seen lately.
    capacity_pps: u64,
    /// The best capacity that was seen, slowly forgotten.
    best_pps: u64,
    last_level_percent: u32,
    /// Room had to be made since the last calm time.
    made_room: bool,
}

impl Total {
    pub(super) fn new(low_mark_percent: u32, high_mark_percent: u32) -> Self {
        Self {
            high_mark_percent,
            low_mark_percent,
            pps: 0,
            capacity_pps: 0,
            best_pps: 0,
            last_level_percent: 0,
            made_room: false,
        }
    }

    pub(super) fn is_pressed(&self, pressure: &Pressure) -> bool {
        pressure.lost_late > 0 || pressure.level_percent >= self.high_mark_percent
    }

    /// All that came was served.
    pub(super) fn on_calm(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        self.made_room = false;
        let served_pps = rate_pps(pressure.served, elapsed_ns);
        self.best_pps = (self.best_pps - self.best_pps / 128).max(served_pps);
    }

    /// More came than can be served. What is served now may be less than could
    /// be: a flood takes the processor away from those who serve.
    pub(super) fn start(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        let served_pps = rate_pps(pressure.served, elapsed_ns).max(self.best_pps);
        self.capacity_pps = served_pps;
        self.best_pps = served_pps;
        self.last_level_percent = pressure.level_percent;
        // Who asks for what is not known yet. In an overrun a little has to do
        // until it is.
        self.made_room = pressure.is_overrun();
        let pps = if self.made_room { served_pps / 8 } else { served_pps / 10 * 9 };
        self.pps = pps.max(TOTAL_MIN_PPS);
    }

    /// More classes share the total from now on: it is as much as can be served.
    pub(super) fn share_anew(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        let served_pps = rate_pps(pressure.served, elapsed_ns).max(self.capacity_pps);
        self.pps = (served_pps - served_pps / 10).max(TOTAL_MIN_PPS);
    }

    /// Sets the total by how things went. `refused_beyond_pps` is what was let
    /// in, if more would have come; `preferred_pps` is what [`preferred`] says.
    pub(super) fn adjust(
        &mut self,
        pressure: &Pressure,
        elapsed_ns: u64,
        refused_beyond_pps: Option<u64>,
        preferred_pps: Option<u64>,
    ) {
        let served_pps = rate_pps(pressure.served, elapsed_ns);
        let pressed = self.is_pressed(pressure);
        let crowded = pressure.is_crowded();
        let room_for_pps = preferred_pps.filter(|&pps| crowded && (!pressed || self.pps > pps));
        let short =
            !pressed && room_for_pps.is_none() && pressure.level_percent <= self.low_mark_percent;
        if short {
            // What waited from before room was made is no measure.
            let most_pps = if self.made_room { self.pps } else { u64::MAX };
            self.capacity_pps = self.capacity_pps.max(served_pps.min(most_pps));
        } else {
            self.capacity_pps = (self.capacity_pps * 3 + served_pps) / 4;
        }
        self.best_pps = (self.best_pps - self.best_pps / 128).max(self.capacity_pps);
        let draining = pressure.lost_late == 0 && pressure.level_percent < self.last_level_percent;
        let filling = pressure.level_percent > self.last_level_percent;
        self.last_level_percent = pressure.level_percent;
        if let Some(preferred_pps) = room_for_pps {
            self.make_room(preferred_pps, pressure.is_overrun());
        } else if pressed && !draining {
            let served_pps = self.pps.min(self.capacity_pps);
            let part = if pressure.lost_late > 0 { 10 } else { 32 };
            self.pps = served_pps - served_pps / part;
        } else if short && refused_beyond_pps.is_some_and(|pps| pps >= self.pps / 3) {
            // More is tried only while some of it is used: sources that are
            // held to their shares leave something over.
            let far = self.pps < self.best_pps / 10 * 9;
            let step_pps = if far { self.pps / 4 } else { self.pps / 50 };
            // A large step could crowd out those who do not come last.
            let careful = self.made_room && preferred_pps.is_some();
            let least_pps = if careful { 0 } else { self.best_pps / 2 };
            self.pps = self.pps.max(least_pps).saturating_add(step_pps + 1);
        } else if !short && filling {
            self.pps = self.pps.min(self.capacity_pps);
        } else if !short && refused_beyond_pps.is_some() {
            // What is served may be no more than what is let in: work that does
            // not come in batches costs more. So it is never taken for all that
            // can be served while queues do not fill.
            self.pps = self.pps.saturating_add(self.pps / 50 + 1);
        }
        self.pps = self.pps.max(TOTAL_MIN_PPS);
    }

    /// Lets in less, so that there is time to look at all that comes; not less
    /// than those ask for who do not come last. From there it rises slowly: what
    /// was served without a look at the rest is no measure.
    fn make_room(&mut self, preferred_pps: u64, overrun: bool) {
        self.pps = if self.pps <= preferred_pps {
            (self.pps + self.pps / 2).min(preferred_pps)
        } else if overrun {
            preferred_pps
        } else {
            (self.pps / 2).max(preferred_pps)
        };
        self.capacity_pps = self.pps;
        self.best_pps = self.pps;
        self.made_room = true;
    }
}

/// Packets in a time as packets per second.
pub(super) fn rate_pps(packets: u64, elapsed_ns: u64) -> u64 {
    let pps = u128::from(packets) * 1_000_000_000 / u128::from(elapsed_ns.max(1));
    u64::try_from(pps).unwrap_or(u64::MAX)
}

/// What those ask for who do not come last, in packets per second, with what the
/// others are guaranteed; nothing when they hardly ask. There is no use in
/// refusing it to look at more. Half more, since they do not come evenly.
pub(super) fn preferred(terms: &[Terms], demand_pps: &PerClass<u64>) -> Option<u64> {
    let judged = || terms.iter().zip(demand_pps).filter(|(terms, _)| !terms.exempt);
    let last = judged().map(|(terms, _)| terms.rank).max()?;
    let (mut asked_pps, mut guaranteed_pps) = (0_u64, 0_u64);
    for (terms, &demand_pps) in judged() {
        if terms.rank == last {
            guaranteed_pps = guaranteed_pps.saturating_add(demand_pps.min(terms.guaranteed_pps));
        } else {
            asked_pps = asked_pps.saturating_add(demand_pps.min(terms.ceiling_pps));
        }
    }
    let sum_pps = asked_pps.saturating_add(guaranteed_pps);
    (asked_pps >= TOTAL_MIN_PPS).then(|| sum_pps.saturating_add(sum_pps / 2))
}

/// Shares a total rate out between classes and returns the rate of each.
///
/// Guaranteed rates come first, as far as they are used. What is left goes to
/// the classes by rank; inside a rank everyone gets what it asks for, or an
/// equal part. A class that gets all it asks for may have more, up to what is
/// left for those behind it: what it does not use is lent to them, and it takes
/// it back as soon as it asks for it. Exempt classes have no part in it.
pub(super) fn share_out(
    total_pps: u64,
    terms: &[Terms],
    demand_pps: &PerClass<u64>,
) -> PerClass<u64> {
    let mut limits = [0; super::CLASSES_MAX];
    let mut wanted = [0; super::CLASSES_MAX];
    let mut left = total_pps;
    for (class, terms) in terms.iter().enumerate().filter(|(_, terms)| !terms.exempt) {
        limits[class] = demand_pps[class].min(terms.guaranteed_pps);
        wanted[class] = demand_pps[class].min(terms.ceiling_pps) - limits[class];
        left = left.saturating_sub(limits[class]);
    }
    let mut next = terms.iter().map(|terms| terms.rank).min();
    while let Some(rank) = next {
        let members = || (0..terms.len()).filter(|&class| terms[class].rank == rank);
        left = fill(left, members, &mut wanted, &mut limits);
        for class in members().filter(|&class| wanted[class] == 0) {
            limits[class] = limits[class].saturating_add(left);
        }
        next = terms.iter().map(|terms| terms.rank).filter(|&other| other > rank).min();
    }
    for (limit, terms) in limits.iter_mut().zip(terms) {
        *limit = (*limit).clamp(terms.guaranteed_pps, terms.ceiling_pps);
    }
    limits
}

/// Gives the members what they want or an equal part of what there is; returns
/// what is left.
fn fill<I: Iterator<Item = usize>>(
    mut left: u64,
    members: impl Fn() -> I,
    wanted: &mut PerClass<u64>,
    given: &mut PerClass<u64>,
) -> u64 {
    loop {
        let hungry = members().filter(|&class| wanted[class] > 0).count() as u64;
        if hungry == 0 || left < hungry {
            return if hungry == 0 { left } else { 0 };
        }
        let part = left / hungry;
        for class in members() {
            let more = wanted[class].min(part);
            wanted[class] -= more;
            given[class] += more;
            left -= more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::class::ClassName;
    use super::*;
    use proptest::prelude::*;

    fn terms(rank: u8, guaranteed_pps: u64, ceiling_pps: u64) -> Terms {
        let name = ClassName::new("x").unwrap();
        Terms { name, rank, guaranteed_pps, ceiling_pps, exempt: false }
    }

    fn share(total_pps: u64, terms: &[Terms], demands: &[u64]) -> Vec<u64> {
        let mut demand_pps = [0; super::super::CLASSES_MAX];
        demand_pps[..demands.len()].copy_from_slice(demands);
        share_out(total_pps, terms, &demand_pps)[..terms.len()].to_vec()
    }

    #[test]
    fn the_last_rank_gets_what_is_left() {
        let classes = [terms(0, 0, u64::MAX), terms(1, 0, u64::MAX)];
        assert_eq!(share(1000, &classes, &[300, 5000]), [1000, 700]);
        assert_eq!(share(1000, &classes, &[3000, 5000]), [1000, 0]);
    }

    #[test]
    fn a_guaranteed_rate_goes_first_and_is_lent_when_nobody_asks() {
        let classes = [terms(0, 0, u64::MAX), terms(1, 400, u64::MAX)];
        assert_eq!(share(1000, &classes, &[3000, 5000]), [600, 400]);
        assert_eq!(share(1000, &classes, &[3000, 100]), [900, 400]);
        assert_eq!(share(1000, &classes, &[3000, 0]), [1000, 400], "lent, not given away");
    }

    #[test]
    fn equal_ranks_share_fairly_and_ceilings_hold() {
        let classes = [terms(3, 0, u64::MAX), terms(3, 0, u64::MAX), terms(3, 0, 200)];
        assert_eq!(share(900, &classes, &[100, 5000, 5000]), [100, 600, 200]);
        assert_eq!(share(900, &classes, &[5000, 5000, 0]), [450, 450, 0]);
        assert_eq!(share(900, &classes, &[100, 100, 100]), [700, 700, 200]);
    }

    #[test]
    fn strangers_make_room_to_look_and_others_do_not() {
        let classes = [terms(0, 0, 100), terms(1, 0, u64::MAX), terms(2, 50, u64::MAX)];
        let asked = |icmp, known, strangers| {
            let mut demand_pps = [0; super::super::CLASSES_MAX];
            demand_pps[..3].copy_from_slice(&[icmp, known, strangers]);
            preferred(&classes, &demand_pps)
        };
        let preferred_pps = asked(400, 7_150, 1_000_000);
        assert_eq!(preferred_pps, Some(7_300 + 7_300 / 2));
        assert_eq!(asked(1, 2, 1_000_000), None, "nobody to make room for");
        let mut total = Total::new(25, 75);
        let served = |served| Pressure { served, ..Pressure::default() };
        let unseen = |unseen_permille| Pressure { unseen_permille, ..served(1_000) };
        total.start(&served(1_000), 5_000_000);
        total.adjust(&unseen(0), 5_000_000, None, None);
        assert_eq!(total.pps, 180_000);
        total.adjust(&unseen(3), 5_000_000, Some(100_000), preferred_pps);
        assert_eq!(total.pps, 90_000, "a few are lost: half");
        total.adjust(&unseen(600), 5_000_000, Some(100_000), preferred_pps);
        assert_eq!(Some(total.pps), preferred_pps, "an overrun: at once");
        for _ in 0..100 {
            total.adjust(&unseen(600), 5_000_000, Some(100_000), Some(50_000));
        }
        assert_eq!(total.pps, 50_000, "more is asked for");
        let served = Pressure { unseen_permille: 0, served: 250, ..Pressure::default() };
        total.adjust(&served, 5_000_000, Some(50_000), Some(50_000));
        assert_eq!(total.pps, 51_001, "slowly up again");
        total.start(&unseen(600), 5_000_000);
        assert_eq!(total.pps, 25_000, "an overrun from the start");
    }

    proptest! {
        #[test]
        fn what_is_used_never_exceeds_the_total_and_the_guarantees(
            total_pps in 0_u64..10_000,
            classes in proptest::collection::vec((0_u8..4, 0_u64..2000, 0_u64..5000, 0_u64..9000), 1..16),
        ) {
            let terms: Vec<_> = classes.iter()
                .map(|&(rank, guaranteed, above, _)| terms(rank, guaranteed, guaranteed + above + 1))
                .collect();
            let demands: Vec<_> = classes.iter().map(|class| class.3).collect();
            let limits = share(total_pps, &terms, &demands);
            let used: Vec<_> = limits.iter().zip(&demands).map(|(l, d)| *l.min(d)).collect();
            let guaranteed: u64 =
                terms.iter().zip(&demands).map(|(t, d)| t.guaranteed_pps.min(*d)).sum();
            prop_assert!(used.iter().sum::<u64>() <= total_pps.max(guaranteed));
            for (i, one) in terms.iter().enumerate() {
                prop_assert!(limits[i] >= one.guaranteed_pps && limits[i] <= one.ceiling_pps);
                // Nobody is refused what a later rank gets beyond its guarantee.
                let starved = used[i] + terms.len() as u64 <= demands[i].min(one.ceiling_pps);
                for (j, other) in terms.iter().enumerate() {
                    let extra = used[j] > other.guaranteed_pps.min(demands[j]);
                    prop_assert!(!(starved && other.rank > one.rank && extra), "{i} {j}");
                }
            }
        }
    }
}
