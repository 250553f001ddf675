//! Search for the offered load with the highest answer rate.

/// Offered load and the answer rate measured at it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadPoint {
    /// Offered load in requests per second.
    pub offered_pps: f64,
    /// Answer rate in replies per second.
    pub answered_pps: f64,
}

/// Search for the peak answer rate.
///
/// The load rises in steps until more load brings clearly fewer answers or no more of them.
/// Then the search narrows twice around the best load. A server that collapses under overload
/// has its peak just above its capacity; one that saturates has it at any load beyond.
#[derive(Clone, Debug)]
pub struct PeakSearch {
    step_pps: f64,
    ceiling_pps: f64,
    pending: Vec<f64>,
    points: Vec<LoadPoint>,
    refinements: u32,
    effort: SearchEffort,
}

/// Ends of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchEffort {
    /// Steps without a new best rate after which the load rises no further.
    max_steps_without_gain: usize,
    /// Number of times that the search halves its step around the best load.
    max_refinements: u32,
}

impl SearchEffort {
    /// Finds a peak behind a dip, and the load of the peak to a quarter of a step.
    pub const WHOLE: Self = Self { max_steps_without_gain: 4, max_refinements: 2 };
    /// Finds the load of the peak to half a step.
    pub const QUICK: Self = Self { max_steps_without_gain: 2, max_refinements: 1 };
}

impl PeakSearch {
    /// Returns a search from `step_pps` to `ceiling_pps` requests per second.
    pub fn new(step_pps: f64, ceiling_pps: f64, effort: SearchEffort) -> Self {
        let pending = vec![step_pps];
        Self { step_pps, ceiling_pps, pending, points: Vec::new(), refinements: 0, effort }
    }

    /// Returns the next load to offer, in requests per second; `None` when the search is finished.
    pub fn next_load(&mut self) -> Option<f64> {
        self.pending.pop()
    }

    /// Records the result of the load that [`PeakSearch::next_load`] returned.
    pub fn record(&mut self, point: LoadPoint) {
        self.points.push(point);
        if !self.pending.is_empty() {
            return;
        }
        if self.refinements == 0 && self.should_climb() {
            self.pending.push(point.offered_pps + self.step_pps);
        } else if self.refinements < self.effort.max_refinements {
            self.refinements += 1;
            self.step_pps /= 2.0;
            let Some(best) = self.best() else { return };
            let sides = [best.offered_pps - self.step_pps, best.offered_pps + self.step_pps];
            self.pending.extend(sides.into_iter().filter(|load| *load > 0.0));
        }
    }

    /// Best point so far.
    pub fn best(&self) -> Option<LoadPoint> {
        self.points.iter().copied().max_by(|a, b| a.answered_pps.total_cmp(&b.answered_pps))
    }

    /// All measured points, in order.
    pub fn points(&self) -> &[LoadPoint] {
        &self.points
    }

    fn should_climb(&self) -> bool {
        let Some(last) = self.points.last() else { return true };
        if last.offered_pps + self.step_pps > self.ceiling_pps {
            return false;
        }
        let best_at = |points: &[LoadPoint]| {
            // A gain of less than 1 % is noise on a plateau.
            points.iter().enumerate().fold((0, 0.0), |best, (at, point)| {
                if point.answered_pps > best.1 * 1.01 { (at, point.answered_pps) } else { best }
            })
        };
        self.points.len() - best_at(&self.points).0 <= self.effort.max_steps_without_gain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(ceiling: f64, server: impl Fn(f64) -> f64) -> PeakSearch {
        search_with(SearchEffort::WHOLE, ceiling, server)
    }

    fn search_with(effort: SearchEffort, ceiling: f64, server: impl Fn(f64) -> f64) -> PeakSearch {
        let mut search = PeakSearch::new(100.0, ceiling, effort);
        let mut steps = 0;
        while let Some(offered_pps) = search.next_load() {
            search.record(LoadPoint { offered_pps, answered_pps: server(offered_pps) });
            steps += 1;
            assert!(steps < 100, "the search does not end");
        }
        search
    }

    #[test]
    fn finds_the_peak_of_a_server_that_collapses() {
        let server = |load: f64| if load <= 430.0 { load } else { 430.0 - (load - 430.0) };
        let best = search(10_000.0, server).best().unwrap();
        assert!((400.0..=430.0).contains(&best.answered_pps), "{best:?}");
        assert!(search(10_000.0, server).points().last().unwrap().offered_pps < 1000.0);
    }

    #[test]
    fn finds_the_peak_of_a_server_that_saturates() {
        let found = search(10_000.0, |load| load.min(333.0));
        assert_eq!(found.best().unwrap().answered_pps, 333.0);
        assert!(found.points().iter().all(|point| point.offered_pps <= 900.0), "{found:?}");
    }

    #[test]
    fn a_quick_search_is_short() {
        let server = |load: f64| load.min(333.0);
        let found = search_with(SearchEffort::QUICK, 10_000.0, server);
        assert_eq!(found.best().unwrap().answered_pps, 333.0);
        assert!(found.points().len() <= 8, "{found:?}");
        assert!(search(10_000.0, server).points().len() > 10);
    }

    #[test]
    fn steps_stay_below_the_ceiling() {
        let found = search(500.0, |load| load);
        assert_eq!(
            found.best().unwrap().offered_pps,
            575.0,
            "only refinement goes beyond the ceiling"
        );
        assert!(found.points().iter().filter(|point| point.offered_pps > 500.0).count() <= 3);
    }

    #[test]
    fn search_ends_for_a_server_that_never_answers() {
        assert_eq!(search(10_000.0, |_| 0.0).best().unwrap().answered_pps, 0.0);
    }
}
