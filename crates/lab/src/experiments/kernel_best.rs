//! Choice of the kernel's best way: a first pass measures each way once, and the best is measured
//! again in turn with Tidegate.

use crate::error::LabError;
use crate::report::experiment::KernelRows;

/// Length of a measurement in the first pass, in seconds, if others are not shorter.
pub(crate) const FIRST_PASS_SECONDS: f64 = 0.5;

/// Order of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Rates.
    Highest,
    /// Latencies.
    Lowest,
}

/// Figures of the kernel's ways in the first pass.
pub(crate) struct FirstPass<W> {
    goal: Goal,
    ways: Vec<(W, String, f64)>,
}

impl<W: Copy + PartialEq> FirstPass<W> {
    /// Ways with their names and figures, which were measured together.
    pub(crate) fn new(goal: Goal, ways: impl IntoIterator<Item = (W, String, f64)>) -> Self {
        Self { goal, ways: ways.into_iter().collect() }
    }

    /// Measures each of `ways`, which has this name, once.
    ///
    /// # Errors
    /// Those of `measure`.
    pub(crate) fn measure(
        goal: Goal,
        ways: &[W],
        name: impl Fn(W) -> String,
        mut measure: impl FnMut(W) -> Result<f64, LabError>,
    ) -> Result<Self, LabError> {
        let measured = ways.iter().map(|&way| Ok((way, name(way), measure(way)?)));
        Ok(Self { goal, ways: measured.collect::<Result<_, LabError>>()? })
    }

    /// The best way.
    ///
    /// # Panics
    /// Without ways.
    pub(crate) fn best(&self) -> W {
        let figures = self.ways.iter().map(|(way, _, figure)| (*way, *figure));
        self.goal.best(figures).expect("the kernel has ways").0
    }

    /// The figures by name. The best way has `later_figure`, which was measured in turn with
    /// Tidegate. If another way was better than that in the first pass, the kernel's best is that
    /// one: no comparison gains by a way that was good once.
    pub(crate) fn rows(&self, later_figure: f64) -> KernelRows {
        let chosen = self.best();
        let figure = |way: W, first: f64| if way == chosen { later_figure } else { first };
        let rows = || self.ways.iter().map(|(way, name, first)| (name, figure(*way, *first)));
        let best = self.goal.best(rows());
        KernelRows {
            rows: rows().map(|(name, figure)| (name.clone(), figure)).collect(),
            best: best.map_or_else(String::new, |(name, _)| name.clone()),
            chosen_over_best: best.map_or(1.0, |(_, best)| later_figure / best),
        }
    }
}

impl Goal {
    fn best<T>(self, figures: impl Iterator<Item = (T, f64)>) -> Option<(T, f64)> {
        figures.reduce(|best, other| {
            let is_better = match self {
                Self::Highest => other.1 > best.1,
                Self::Lowest => other.1 < best.1,
            };
            if is_better { other } else { best }
        })
    }
}

/// The best ways of several first passes, each once.
pub(crate) fn distinct_best<'a, W: Copy + PartialEq + 'a>(
    first_passes: impl IntoIterator<Item = &'a FirstPass<W>>,
) -> Vec<W> {
    let mut ways = Vec::new();
    for way in first_passes.into_iter().map(FirstPass::best) {
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_pass(goal: Goal) -> FirstPass<u32> {
        let name = |way: u32| format!("kernel-{way}");
        FirstPass::measure(goal, &[5, 9, 2], name, |way| Ok(f64::from(way))).unwrap()
    }

    #[test]
    fn the_best_way_has_the_figure_of_its_later_measurement() {
        let rows = first_pass(Goal::Highest).rows(7.0);
        assert_eq!((rows.best.as_str(), rows.chosen_over_best), ("kernel-9", 1.0));
        assert_eq!(rows.rows["kernel-9"], 7.0);
        assert_eq!(rows.rows["kernel-5"], 5.0);
    }

    #[test]
    fn a_way_that_was_better_than_the_chosen_one_is_the_best() {
        let rows = first_pass(Goal::Highest).rows(4.0);
        assert_eq!((rows.best.as_str(), rows.chosen_over_best), ("kernel-5", 0.8));
        let rows = first_pass(Goal::Lowest).rows(10.0);
        assert_eq!((rows.best.as_str(), rows.chosen_over_best), ("kernel-5", 2.0));
    }

    #[test]
    fn lower_latencies_are_better() {
        assert_eq!(first_pass(Goal::Lowest).best(), 2);
    }

    #[test]
    fn distinct_best_ways_are_named_once() {
        let passes = [Goal::Highest, Goal::Lowest, Goal::Highest].map(first_pass);
        assert_eq!(distinct_best(&passes), [9, 2]);
    }

    #[test]
    fn a_failed_measurement_is_an_error() {
        let failing = |_| Err(LabError::Config("no".to_owned()));
        assert!(FirstPass::measure(Goal::Highest, &[1], |_| String::new(), failing).is_err());
    }
}
