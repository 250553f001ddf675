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
        let first = self.ways.first().expect("the kernel has ways");
        let best = self.ways.iter().fold(first, |best, way| {
            let is_better = match self.goal {
                Goal::Highest => way.2 > best.2,
                Goal::Lowest => way.2 < best.2,
            };
            if is_better { way } else { best }
        });
        best.0
    }

    /// The figures by name. The best way has `best_figure`, which was measured later.
    pub(crate) fn rows(&self, best_figure: f64) -> KernelRows {
        let best = self.best();
        let figure = |way: W, figure: f64| if way == best { best_figure } else { figure };
        let rows = self.ways.iter().map(|(way, name, first)| (name.clone(), figure(*way, *first)));
        let kernel_best = self.ways.iter().find(|(way, ..)| *way == best);
        KernelRows {
            rows: rows.collect(),
            best: kernel_best.map_or_else(String::new, |(_, name, _)| name.clone()),
        }
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
        assert_eq!(rows.best, "kernel-9");
        assert_eq!(rows.rows["kernel-9"], 7.0);
        assert_eq!(rows.rows["kernel-5"], 5.0);
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
