//! Finding the offered load at which a server answers most.

/// A load that was offered and what came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Requests per second.
    pub offered: f64,
    /// Answers per second.
    pub answered: f64,
}

/// Looks for the peak: upwards in steps until more load brings clearly fewer
/// answers or no more, then twice closer around the best.
///
/// A server that gives way under overload has its peak at a load just above
/// what it can answer; one that holds has it anywhere beyond.
#[derive(Clone, Debug)]
pub struct PeakSearch {
    step: f64,
    ceiling: f64,
    pending: Vec<f64>,
    points: Vec<Point>,
    refinements: u32,
}

/// The search upwards ends when the best has stood for so many steps.
const PATIENCE: usize = 4;
/// How often the search comes closer.
const REFINEMENTS: u32 = 2;

impl PeakSearch {
    /// A search from `step` requests per second to `ceiling`.
    pub fn new(step: f64, ceiling: f64) -> Self {
        Self { step, ceiling, pending: vec![step], points: Vec::new(), refinements: 0 }
    }

    /// The next load to offer; `None` when the peak is found.
    pub fn next_load(&mut self) -> Option<f64> {
        self.pending.pop()
    }

    /// Says what came of the load that [`PeakSearch::next_load`] gave.
    pub fn record(&mut self, point: Point) {
        self.points.push(point);
        if !self.pending.is_empty() {
            return;
        }
        if self.refinements == 0 && self.climbs() {
            self.pending.push(point.offered + self.step);
        } else if self.refinements < REFINEMENTS {
            self.refinements += 1;
            self.step /= 2.0;
            let Some(best) = self.best() else { return };
            let sides = [best.offered - self.step, best.offered + self.step];
            self.pending.extend(sides.into_iter().filter(|load| *load > 0.0));
        }
    }

    /// The best so far.
    pub fn best(&self) -> Option<Point> {
        self.points.iter().copied().max_by(|a, b| a.answered.total_cmp(&b.answered))
    }

    /// Everything that was tried, in order.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    fn climbs(&self) -> bool {
        let Some(last) = self.points.last() else { return true };
        if last.offered + self.step > self.ceiling {
            return false;
        }
        let best_at = |points: &[Point]| {
            // A gain of less than 1 % is noise on a plateau.
            points.iter().enumerate().fold((0, 0.0), |best, (at, point)| {
                if point.answered > best.1 * 1.01 { (at, point.answered) } else { best }
            })
        };
        self.points.len() - best_at(&self.points).0 <= PATIENCE
    }
}

/// The median; of an even number, the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(ceiling: f64, server: impl Fn(f64) -> f64) -> PeakSearch {
        let mut search = PeakSearch::new(100.0, ceiling);
        let mut steps = 0;
        while let Some(offered) = search.next_load() {
            search.record(Point { offered, answered: server(offered) });
            steps += 1;
            assert!(steps < 100, "the search does not end");
        }
        search
    }

    #[test]
    fn a_server_that_collapses_is_measured_at_its_best() {
        let server = |load: f64| if load <= 430.0 { load } else { 430.0 - (load - 430.0) };
        let best = search(10_000.0, server).best().unwrap();
        assert!((400.0..=430.0).contains(&best.answered), "{best:?}");
        assert!(search(10_000.0, server).points().last().unwrap().offered < 1000.0);
    }

    #[test]
    fn a_server_that_holds_ends_the_search_too() {
        let found = search(10_000.0, |load| load.min(333.0));
        assert_eq!(found.best().unwrap().answered, 333.0);
        assert!(found.points().iter().all(|point| point.offered <= 900.0), "{found:?}");
    }

    #[test]
    fn the_ceiling_is_not_passed_by_a_step() {
        let found = search(500.0, |load| load);
        assert_eq!(found.best().unwrap().offered, 575.0, "only refined beyond");
        assert!(found.points().iter().filter(|point| point.offered > 500.0).count() <= 3);
    }

    #[test]
    fn a_server_that_never_answers_is_given_up() {
        assert_eq!(search(10_000.0, |_| 0.0).best().unwrap().answered, 0.0);
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
