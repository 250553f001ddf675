//! A packaged program on the kernel's best way and on Tidegate's stacks, measured in turn.

use crate::error::LabError;
use crate::experiments::kernel_best::{FirstPass, Goal};
use crate::report::experiment::{Experiment, KernelRows};
use crate::stats::{median, spread_percent};
use crate::testbed::apps::StackKind;

/// Measurements of one program: on the kernel's best way, embedded, attached.
pub(crate) struct ProgramResults<M> {
    figure: fn(&M) -> f64,
    first_pass: FirstPass<StackKind>,
    /// The kernel's best way first.
    rows: Vec<ProgramRow<M>>,
}

/// Measurements on one stack, one for each repetition.
pub(crate) struct ProgramRow<M> {
    pub(crate) stack: StackKind,
    runs: Vec<M>,
}

impl<M> ProgramRow<M> {
    pub(crate) fn median(&self, of: impl Fn(&M) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    pub(crate) fn spread_percent(&self, of: impl Fn(&M) -> f64) -> f64 {
        spread_percent(self.runs.iter().map(of))
    }
}

impl<M> ProgramResults<M> {
    /// Number of measurements of the first pass.
    pub(crate) fn first_pass_steps() -> usize {
        StackKind::kernel().len()
    }

    /// Measures the kernel's ways once, and chooses the best by `figure`.
    ///
    /// # Errors
    /// Those of `measure`.
    pub(crate) fn choose_kernel(
        goal: Goal,
        figure: fn(&M) -> f64,
        mut measure: impl FnMut(StackKind) -> Result<M, LabError>,
    ) -> Result<Self, LabError> {
        let name = |stack: StackKind| stack.name().to_owned();
        let first_pass = FirstPass::measure(goal, &StackKind::kernel(), name, |stack| {
            measure(stack).map(|run| figure(&run))
        })?;
        let stacks = [first_pass.best(), StackKind::Embedded, StackKind::Attached];
        let rows = stacks.map(|stack| ProgramRow { stack, runs: Vec::new() });
        Ok(Self { figure, first_pass, rows: rows.into() })
    }

    pub(crate) fn rows(&self) -> &[ProgramRow<M>] {
        &self.rows
    }

    /// Measures each stack once.
    ///
    /// # Errors
    /// Those of `measure`.
    pub(crate) fn measure(
        &mut self,
        mut measure: impl FnMut(StackKind) -> Result<M, LabError>,
    ) -> Result<(), LabError> {
        for row in &mut self.rows {
            row.runs.push(measure(row.stack)?);
        }
        Ok(())
    }

    /// Sets the ratios of Tidegate's medians to that of the kernel's best, `figure` with
    /// `_embedded` and `_attached`.
    pub(crate) fn compare(&self, result: &mut Experiment, figure: &str) {
        for row in &self.rows[1..] {
            let figure = format!("{figure}_{}", row.stack.name());
            let ratio = self.ratio(row.stack, self.figure);
            result.compare_with_best(&figure, ratio, self.kernel_rows());
        }
    }

    /// Median of `of` on `stack` over that of the kernel's best. Not a number if the stack was not
    /// measured.
    pub(crate) fn ratio(&self, stack: StackKind, of: fn(&M) -> f64) -> f64 {
        let row = self.rows.iter().find(|row| row.stack == stack);
        row.map_or(f64::NAN, |row| row.median(of) / self.rows[0].median(of))
    }

    /// The kernel's figures by which its best was chosen.
    pub(crate) fn kernel_rows(&self) -> KernelRows {
        self.first_pass.rows(self.rows[0].median(self.figure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_best_way_measured_again() {
        let first = |stack: StackKind| Ok(if stack.name() == "kernel-thread" { 1.0 } else { 9.0 });
        let mut results =
            ProgramResults::choose_kernel(Goal::Lowest, |us: &f64| *us, first).unwrap();
        for factor in [1.0, 2.0, 3.0] {
            let again = |stack: StackKind| {
                Ok(factor * if stack == StackKind::Attached { 8.0 } else { 4.0 })
            };
            results.measure(again).unwrap();
        }
        let mut experiment = Experiment::new("test");
        results.compare(&mut experiment, "p50_ratio");
        assert_eq!(experiment.figures["p50_ratio_embedded"], 1.0);
        assert_eq!(experiment.figures["p50_ratio_attached"], 2.0);
        assert_eq!(experiment.comparisons[0].kernel_best, "kernel-thread");
        assert_eq!(experiment.comparisons[0].kernel_rows["kernel-thread"], 8.0);
    }
}
