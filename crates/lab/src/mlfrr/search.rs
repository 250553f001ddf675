//! The search for the largest load that a device still takes.
//!
//! In the manner of RFC 2544, section 26.1, and of MLRsearch
//! (draft-ietf-bmwg-mlrsearch): a load is a lower or an upper bound by the time
//! of all trials at it, and a share of bad trials is forgiven, since a shared
//! machine stalls now and then at any load.

/// What counts as found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// The share of packets that a good trial may lose, 0 to 1.
    pub loss_ratio: f64,
    /// The share of the time of trials at a load that may be bad, 0 to 1.
    pub exceed_ratio: f64,
    /// How long a trial lasts, in seconds.
    pub trial_s: f64,
    /// How long all trials at a load last before it is a bound for certain, in
    /// seconds.
    pub duration_sum_s: f64,
    /// How close the bounds are at the end, relative to the upper one.
    pub width: f64,
}

impl Default for Goal {
    fn default() -> Self {
        Self { loss_ratio: 0.0, exceed_ratio: 0.5, trial_s: 0.5, duration_sum_s: 2.5, width: 0.05 }
    }
}

impl Goal {
    /// Why this goal cannot be searched for, if so.
    pub fn problem(&self) -> Option<&'static str> {
        let share = |value: f64| (0.0..1.0).contains(&value);
        if !share(self.loss_ratio) || !share(self.exceed_ratio) {
            return Some("the loss ratio and the exceed ratio are 0 or more and below 1");
        }
        if !(self.trial_s > 0.0 && self.trial_s <= 60.0) {
            return Some("a trial lasts more than 0 and at most 60 seconds");
        }
        if !(self.duration_sum_s >= self.trial_s && self.duration_sum_s <= 600.0) {
            return Some("the sum of durations is at least one trial and at most 600 seconds");
        }
        (!(0.001..1.0).contains(&self.width)).then_some("the width is 0.001 or more and below 1")
    }
}

/// What a load turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The device takes it.
    Lower,
    /// It is too much.
    Upper,
    /// More trials are needed.
    Undecided,
}

/// All trials at one load.
#[derive(Clone, Copy, Debug)]
struct Tried {
    load_pps: f64,
    good_s: f64,
    bad_s: f64,
}

impl Tried {
    fn verdict(&self, goal: &Goal) -> Verdict {
        // Trials that are still missing could all be good, or all be bad.
        let whole_s = (self.good_s + self.bad_s).max(goal.duration_sum_s);
        if self.bad_s / whole_s > goal.exceed_ratio {
            Verdict::Upper
        } else if 1.0 - self.good_s / whole_s <= goal.exceed_ratio {
            Verdict::Lower
        } else {
            Verdict::Undecided
        }
    }
}

/// A search between the smallest and the largest load.
#[derive(Clone, Debug)]
pub struct Search {
    goal: Goal,
    min_pps: f64,
    max_pps: f64,
    tried: Vec<Tried>,
    /// What came through when the largest load was offered: near the result
    /// for a device that holds.
    forwarded_pps: Option<f64>,
    /// How far the next step outwards goes, as a share.
    step: f64,
}

impl Search {
    /// A search for `goal` from `min_pps` to `max_pps`.
    pub fn new(goal: Goal, min_pps: f64, max_pps: f64) -> Self {
        let max_pps = max_pps.max(min_pps);
        Self { goal, min_pps, max_pps, tried: Vec::new(), forwarded_pps: None, step: goal.width }
    }

    /// The load of the next trial, in packets per second; `None` when the
    /// search is over.
    pub fn next_load(&mut self) -> Option<f64> {
        let undecided = |tried: &&Tried| tried.verdict(&self.goal) == Verdict::Undecided;
        if let Some(tried) = self.tried.iter().find(undecided) {
            return Some(tried.load_pps);
        }
        let Some(upper_pps) = self.upper_pps() else {
            // First the largest load: if the device takes it, that is all.
            let taken = self.lower_pps().is_some_and(|lower| lower >= self.max_pps);
            return (!taken).then_some(self.max_pps);
        };
        let Some(lower_pps) = self.lower_pps() else {
            if upper_pps <= self.min_pps {
                return None;
            }
            // Downwards from what came through, in growing steps.
            let start_pps = match self.forwarded_pps.take() {
                Some(forwarded_pps) => forwarded_pps.min(upper_pps * (1.0 - self.goal.width)),
                None => upper_pps * (1.0 - self.grow()),
            };
            return Some(start_pps.max(self.min_pps));
        };
        if (upper_pps - lower_pps) / upper_pps <= self.goal.width {
            return None;
        }
        // Upwards from what is taken while that is nearer than the middle:
        // what came through was a good guess, or the true bound is far above.
        let middle_pps = (lower_pps * upper_pps).sqrt();
        let outwards_pps = lower_pps * (1.0 + self.grow());
        Some(outwards_pps.min(middle_pps))
    }

    fn grow(&mut self) -> f64 {
        let step = self.step;
        self.step = (2.0 * step).min(0.5);
        step
    }

    /// Says what came of a trial at `load_pps`: the share of packets lost, and
    /// how many came through per second.
    pub fn record(&mut self, load_pps: f64, loss_ratio: f64, forwarded_pps: f64) {
        if load_pps >= self.max_pps && self.forwarded_pps.is_none() && self.tried.is_empty() {
            self.forwarded_pps = Some(forwarded_pps);
        }
        let at = self.tried.iter().position(|tried| tried.load_pps == load_pps);
        let at = at.unwrap_or_else(|| {
            self.tried.push(Tried { load_pps, good_s: 0.0, bad_s: 0.0 });
            self.tried.len() - 1
        });
        // What cannot be measured is lost.
        let good = loss_ratio <= self.goal.loss_ratio;
        let tried = &mut self.tried[at];
        *(if good { &mut tried.good_s } else { &mut tried.bad_s }) += self.goal.trial_s;
    }

    /// The smallest load that is too much.
    fn upper_pps(&self) -> Option<f64> {
        let upper = self.tried.iter().filter(|tried| tried.verdict(&self.goal) == Verdict::Upper);
        upper.map(|tried| tried.load_pps).reduce(f64::min)
    }

    /// The largest load that is taken, below every load that is too much.
    fn lower_pps(&self) -> Option<f64> {
        let limit_pps = self.upper_pps().unwrap_or(f64::INFINITY);
        let lower = self.tried.iter().filter(|tried| tried.verdict(&self.goal) == Verdict::Lower);
        lower.map(|tried| tried.load_pps).filter(|load| *load < limit_pps).reduce(f64::max)
    }

    /// The largest load that was found to be taken; `None` when even the
    /// smallest is not.
    pub fn result_pps(&self) -> Option<f64> {
        self.lower_pps()
    }

    /// How many different loads were tried.
    pub fn loads(&self) -> usize {
        self.tried.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOAL: Goal =
        Goal { loss_ratio: 0.0, exceed_ratio: 0.5, trial_s: 0.5, duration_sum_s: 2.5, width: 0.05 };

    /// Searches a device that forwards by `forward`; returns the result and
    /// the number of trials.
    fn search(mut forward: impl FnMut(f64) -> f64) -> (Option<f64>, usize) {
        let mut search = Search::new(GOAL, 1e3, 2e6);
        let mut trials = 0;
        while let Some(load) = search.next_load() {
            let forwarded = forward(load);
            search.record(load, 1.0 - forwarded / load, forwarded);
            trials += 1;
            assert!(trials < 500, "the search does not end: {search:?}");
        }
        (search.result_pps(), trials)
    }

    #[test]
    fn a_device_that_holds_is_found_to_the_width() {
        let (found, trials) = search(|load| load.min(437_000.0));
        let found = found.unwrap();
        assert!((0.95 * 437_000.0..=437_000.0).contains(&found), "{found}");
        assert!(trials < 40, "{trials}");
    }

    #[test]
    fn a_device_that_collapses_is_found_far_above_what_came_through() {
        let found = search(|load| if load <= 400_000.0 { load } else { 9_000.0 }).0.unwrap();
        assert!((380_000.0..=400_000.0).contains(&found), "{found}");
    }

    #[test]
    fn the_ends_are_results_too() {
        assert_eq!(search(|load| load).0, Some(2e6));
        assert_eq!(search(|load| load * 0.9).0, None);
        assert_eq!(search(|_| 0.0).0, None);
    }

    #[test]
    fn a_stall_now_and_then_is_forgiven() {
        let mut trial = 0;
        let stalling = |load: f64| {
            trial += 1;
            if trial % 4 == 0 { 0.9 * load } else { load.min(300_000.0) }
        };
        let found = search(stalling).0.unwrap();
        assert!((0.9 * 300_000.0..=300_000.0).contains(&found), "{found}");
    }

    #[test]
    fn goals_without_sense_are_refused() {
        assert_eq!(GOAL.problem(), None);
        for (goal, part) in [
            (Goal { loss_ratio: 1.0, ..GOAL }, "loss"),
            (Goal { exceed_ratio: f64::NAN, ..GOAL }, "exceed"),
            (Goal { trial_s: 0.0, ..GOAL }, "trial"),
            (Goal { duration_sum_s: 0.1, ..GOAL }, "sum"),
            (Goal { width: 0.0, ..GOAL }, "width"),
        ] {
            assert!(goal.problem().unwrap().contains(part), "{goal:?}");
        }
    }

    proptest! {
        #[test]
        fn it_ends_whatever_the_device_does(
            losses in proptest::collection::vec(prop_oneof![Just(0.0), 0.0..=1.0, Just(f64::NAN)], 1..50),
            min in 1.0..1e6, factor in 1.0..1e4, width in 0.001..0.5,
        ) {
            let mut search = Search::new(Goal { width, ..GOAL }, min, min * factor);
            let mut losses = losses.into_iter().cycle();
            let mut trials = 0;
            while let Some(load) = search.next_load() {
                prop_assert!((min..=min * factor).contains(&load), "{load}");
                let loss = losses.next().unwrap_or(0.0);
                search.record(load, loss, load * (1.0 - loss));
                trials += 1;
                // Five trials at a load, and bounds that close in.
                prop_assert!(trials < 200_000);
            }
            prop_assert!(search.result_pps().is_none_or(|found| found >= min));
        }
    }
}
