//! Search for the highest load that a device sustains.
//!
//! Follows RFC 2544, section 26.1, and MLRsearch (draft-ietf-bmwg-mlrsearch): the total duration
//! of all trials at a load decides between lower and upper bound. A share of bad trials is
//! tolerated, since a shared machine stalls now and then at any load.

/// Goal of a search: the tolerated loss, the durations, and the precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchGoal {
    /// Maximum loss ratio of a good trial, 0 to 1.
    pub loss_ratio: f64,
    /// Maximum share of bad trials in the trial time at a load, 0 to 1.
    pub exceed_ratio: f64,
    /// Duration of a trial, in seconds.
    pub trial_s: f64,
    /// Total duration of the trials at a load after which its bound is final, in seconds.
    pub duration_sum_s: f64,
    /// Maximum final distance of the bounds, relative to the upper bound.
    pub width: f64,
}

impl Default for SearchGoal {
    fn default() -> Self {
        Self { loss_ratio: 0.0, exceed_ratio: 0.5, trial_s: 0.5, duration_sum_s: 2.5, width: 0.05 }
    }
}

impl SearchGoal {
    /// Description of an invalid value, if there is one.
    pub fn problem(&self) -> Option<&'static str> {
        let share = |value: f64| (0.0..1.0).contains(&value);
        if !share(self.loss_ratio) || !share(self.exceed_ratio) {
            return Some("the loss ratio and the exceed ratio must be at least 0 and below 1");
        }
        if !(self.trial_s > 0.0 && self.trial_s <= 60.0) {
            return Some("a trial must last more than 0 and at most 60 seconds");
        }
        if !(self.duration_sum_s >= self.trial_s && self.duration_sum_s <= 600.0) {
            return Some("the sum of durations must be at least one trial and at most 600 seconds");
        }
        (!(0.001..1.0).contains(&self.width)).then_some("the width must be 0.001 to below 1")
    }
}

/// Classification of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadBound {
    /// Lower bound: the device sustains the load.
    Lower,
    /// Upper bound: the load is too high.
    Upper,
    /// More trials are needed.
    Undecided,
}

/// All trials at one load.
#[derive(Clone, Copy, Debug)]
struct TrialTotals {
    load_pps: f64,
    good_s: f64,
    bad_s: f64,
}

impl TrialTotals {
    fn bound(&self, goal: &SearchGoal) -> LoadBound {
        // The missing trials could all be good, or all be bad.
        let total_s = (self.good_s + self.bad_s).max(goal.duration_sum_s);
        if self.bad_s / total_s > goal.exceed_ratio {
            LoadBound::Upper
        } else if 1.0 - self.good_s / total_s <= goal.exceed_ratio {
            LoadBound::Lower
        } else {
            LoadBound::Undecided
        }
    }
}

/// A search between the lowest and the highest load.
#[derive(Clone, Debug)]
pub struct Search {
    goal: SearchGoal,
    min_pps: f64,
    max_pps: f64,
    trials: Vec<TrialTotals>,
    /// Forwarded rate at the highest load: near the result for a device that saturates without
    /// a collapse.
    forwarded_pps: Option<f64>,
    /// Size of the next outward step, as a share of the load.
    step: f64,
}

impl Search {
    /// A search with `goal` from `min_pps` to `max_pps`.
    pub fn new(goal: SearchGoal, min_pps: f64, max_pps: f64) -> Self {
        let max_pps = max_pps.max(min_pps);
        Self { goal, min_pps, max_pps, trials: Vec::new(), forwarded_pps: None, step: goal.width }
    }

    /// The load of the next trial, in packets per second; `None` when the search is finished.
    pub fn next_load(&mut self) -> Option<f64> {
        let undecided = |tried: &&TrialTotals| tried.bound(&self.goal) == LoadBound::Undecided;
        if let Some(tried) = self.trials.iter().find(undecided) {
            return Some(tried.load_pps);
        }
        let Some(upper_pps) = self.upper_pps() else {
            // The highest load comes first: a device that sustains it needs no search.
            let is_accepted = self.lower_pps().is_some_and(|lower| lower >= self.max_pps);
            return (!is_accepted).then_some(self.max_pps);
        };
        let Some(lower_pps) = self.lower_pps() else {
            if upper_pps <= self.min_pps {
                return None;
            }
            // Downwards from the forwarded rate, in growing steps.
            let start_pps = match self.forwarded_pps.take() {
                Some(forwarded_pps) => forwarded_pps.min(upper_pps * (1.0 - self.goal.width)),
                None => upper_pps * (1.0 - self.next_step()),
            };
            return Some(start_pps.max(self.min_pps));
        };
        if (upper_pps - lower_pps) / upper_pps <= self.goal.width {
            return None;
        }
        // Upwards from the lower bound while that step is shorter than to the middle: either the
        // forwarded rate was a good guess, or the true bound is far above.
        let middle_pps = (lower_pps * upper_pps).sqrt();
        let outwards_pps = lower_pps * (1.0 + self.next_step());
        Some(outwards_pps.min(middle_pps))
    }

    fn next_step(&mut self) -> f64 {
        let step = self.step;
        self.step = (2.0 * step).min(0.5);
        step
    }

    /// Records a trial at `load_pps`: the loss ratio, and the forwarded packets per second.
    pub fn record(&mut self, load_pps: f64, loss_ratio: f64, forwarded_pps: f64) {
        if load_pps >= self.max_pps && self.forwarded_pps.is_none() && self.trials.is_empty() {
            self.forwarded_pps = Some(forwarded_pps);
        }
        let at = self.trials.iter().position(|tried| tried.load_pps == load_pps);
        let at = at.unwrap_or_else(|| {
            self.trials.push(TrialTotals { load_pps, good_s: 0.0, bad_s: 0.0 });
            self.trials.len() - 1
        });
        // A loss ratio that is not a number counts as loss.
        let good = loss_ratio <= self.goal.loss_ratio;
        let tried = &mut self.trials[at];
        *(if good { &mut tried.good_s } else { &mut tried.bad_s }) += self.goal.trial_s;
    }

    /// The lowest load that is too high.
    fn upper_pps(&self) -> Option<f64> {
        let upper = self.trials.iter().filter(|tried| tried.bound(&self.goal) == LoadBound::Upper);
        upper.map(|tried| tried.load_pps).reduce(f64::min)
    }

    /// The highest sustained load below every load that is too high.
    fn lower_pps(&self) -> Option<f64> {
        let limit_pps = self.upper_pps().unwrap_or(f64::INFINITY);
        let lower = self.trials.iter().filter(|tried| tried.bound(&self.goal) == LoadBound::Lower);
        lower.map(|tried| tried.load_pps).filter(|load| *load < limit_pps).reduce(f64::max)
    }

    /// The highest sustained load found, in packets per second; `None` if the device does not
    /// sustain even the lowest.
    pub fn result_pps(&self) -> Option<f64> {
        self.lower_pps()
    }

    /// Number of different loads tried.
    pub fn load_count(&self) -> usize {
        self.trials.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOAL: SearchGoal = SearchGoal {
        loss_ratio: 0.0,
        exceed_ratio: 0.5,
        trial_s: 0.5,
        duration_sum_s: 2.5,
        width: 0.05,
    };

    /// Searches a device with the forwarding rate `forward`; returns the result and the number
    /// of trials.
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
    fn finds_the_rate_of_a_saturating_device_within_the_width() {
        let (found, trials) = search(|load| load.min(437_000.0));
        let found = found.unwrap();
        assert!((0.95 * 437_000.0..=437_000.0).contains(&found), "{found}");
        assert!(trials < 40, "{trials}");
    }

    #[test]
    fn finds_the_rate_of_a_collapsing_device() {
        let found = search(|load| if load <= 400_000.0 { load } else { 9_000.0 }).0.unwrap();
        assert!((380_000.0..=400_000.0).contains(&found), "{found}");
    }

    #[test]
    fn result_may_be_the_largest_load_or_none() {
        assert_eq!(search(|load| load).0, Some(2e6));
        assert_eq!(search(|load| load * 0.9).0, None);
        assert_eq!(search(|_| 0.0).0, None);
    }

    #[test]
    fn tolerates_occasional_stalls() {
        let mut trial = 0;
        let stalling = |load: f64| {
            trial += 1;
            if trial % 4 == 0 { 0.9 * load } else { load.min(300_000.0) }
        };
        let found = search(stalling).0.unwrap();
        assert!((0.9 * 300_000.0..=300_000.0).contains(&found), "{found}");
    }

    #[test]
    fn rejects_invalid_goals() {
        assert_eq!(GOAL.problem(), None);
        for (goal, part) in [
            (SearchGoal { loss_ratio: 1.0, ..GOAL }, "loss"),
            (SearchGoal { exceed_ratio: f64::NAN, ..GOAL }, "exceed"),
            (SearchGoal { trial_s: 0.0, ..GOAL }, "trial"),
            (SearchGoal { duration_sum_s: 0.1, ..GOAL }, "sum"),
            (SearchGoal { width: 0.0, ..GOAL }, "width"),
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
            let mut search = Search::new(SearchGoal { width, ..GOAL }, min, min * factor);
            let mut losses = losses.into_iter().cycle();
            let mut trials = 0;
            while let Some(load) = search.next_load() {
                prop_assert!((min..=min * factor).contains(&load), "{load}");
                let loss = losses.next().unwrap_or(0.0);
                search.record(load, loss, load * (1.0 - loss));
                trials += 1;
                // Five trials per load, and bounds that converge.
                prop_assert!(trials < 200_000);
            }
            prop_assert!(search.result_pps().is_none_or(|found| found >= min));
        }
    }
}
