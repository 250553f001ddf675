//! Goodput as a function of offered load: the best rate, and the share kept above saturation.

use tidegate_load::format_number;

use crate::stats::median;
use crate::testbed::flood::FloodMeasurement;

/// Minimum share of the offered packets that a server processes while it is not saturated.
const UNSATURATED_SHARE: f64 = 0.98;

/// All measurements at one offered load.
#[derive(Clone, Debug, Default)]
pub struct LoadStep {
    /// Requested rate of the generator; `None` is its maximum.
    pub requested_pps: Option<f64>,
    /// One measurement for each repeat.
    pub runs: Vec<FloodMeasurement>,
}

impl LoadStep {
    /// Median of a figure over the repeats.
    pub fn median(&self, figure: impl Fn(&FloodMeasurement) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    /// Packets offered per second.
    pub fn offered_pps(&self) -> f64 {
        self.median(|run| run.offered_pps)
    }

    /// Packets processed per second.
    pub fn goodput_pps(&self) -> f64 {
        self.median(|run| run.goodput_pps)
    }

    /// Median ratio of this goodput to that of `other` in the same repeat. A repeat in which
    /// `other` has no goodput counts as 0.
    fn goodput_ratio_to(&self, other: &Self) -> f64 {
        let ratio = |(own, other): (&FloodMeasurement, &FloodMeasurement)| {
            if other.goodput_pps > 0.0 { own.goodput_pps / other.goodput_pps } else { 0.0 }
        };
        median(self.runs.iter().zip(&other.runs).map(ratio))
    }
}

/// All load steps of one server.
#[derive(Clone, Debug, Default)]
pub struct GoodputCurve {
    /// The steps.
    pub steps: Vec<LoadStep>,
}

impl GoodputCurve {
    /// A curve with these loads and no measurements.
    pub fn with_loads(loads: impl IntoIterator<Item = Option<f64>>) -> Self {
        let step = |requested_pps| LoadStep { requested_pps, runs: Vec::new() };
        Self { steps: loads.into_iter().map(step).collect() }
    }

    /// The measured steps, sorted by the load that was actually offered.
    fn measured_steps(&self) -> Vec<&LoadStep> {
        let mut steps: Vec<_> = self.steps.iter().filter(|step| !step.runs.is_empty()).collect();
        steps.sort_by(|a, b| a.offered_pps().total_cmp(&b.offered_pps()));
        steps
    }

    /// Offered load and goodput of every step, sorted by load.
    pub fn points(&self) -> Vec<(f64, f64)> {
        self.measured_steps().iter().map(|step| (step.offered_pps(), step.goodput_pps())).collect()
    }

    /// The last repeat at each load, as `offered>goodput` in thousands of packets per second.
    pub fn format_last_runs(&self) -> String {
        let thousands = |pps: f64| format_number((pps / 1e3).round());
        let last = |step: &LoadStep| {
            let run = step.runs.last()?;
            Some(format!("{}>{}", thousands(run.offered_pps), thousands(run.goodput_pps)))
        };
        self.steps.iter().filter_map(last).collect::<Vec<_>>().join("  ")
    }

    /// The step with the highest goodput; among equals, that with the lowest load.
    fn best_step(&self) -> Option<&LoadStep> {
        let steps = self.measured_steps();
        let order = |a: &&&LoadStep, b: &&&LoadStep| a.goodput_pps().total_cmp(&b.goodput_pps());
        steps.iter().rev().max_by(order).copied()
    }

    /// The steps above saturation: above the highest load of which the server processes all.
    fn saturated_steps(&self) -> Vec<&LoadStep> {
        let mut steps = self.measured_steps();
        let is_unsaturated =
            |step: &&LoadStep| step.goodput_pps() >= UNSATURATED_SHARE * step.offered_pps();
        let last = steps.iter().rposition(is_unsaturated);
        steps.drain(..last.map_or(0, |last| last + 1));
        steps
    }

    /// The highest goodput, in packets per second.
    pub fn best_pps(&self) -> f64 {
        self.best_step().map_or(0.0, LoadStep::goodput_pps)
    }

    /// The floor: the lowest goodput at any load above saturation, relative to the highest at any
    /// load; 0 without goodput. `None` if no load saturates the server, or only the highest, at which
    /// it serves the most: there is no load above saturation.
    ///
    /// Each repeat is compared with itself, and the median counts: a shared machine is slower at
    /// some times than at others.
    pub fn floor(&self) -> Option<f64> {
        let best = self.best_step()?;
        let steps = self.saturated_steps();
        if let [only] = *steps
            && std::ptr::eq(only, best)
            && best.goodput_pps() > 0.0
        {
            return None;
        }
        steps.iter().map(|step| step.goodput_ratio_to(best)).reduce(f64::min)
    }

    /// Goodput at the highest load, in packets per second.
    pub fn goodput_at_max_load_pps(&self) -> f64 {
        self.points().last().map_or(0.0, |point| point.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, &[f64])]) -> GoodputCurve {
        let step = |(offered, goodputs): &(f64, &[f64])| LoadStep {
            requested_pps: Some(*offered),
            runs: goodputs
                .iter()
                .map(|&goodput_pps| FloodMeasurement {
                    offered_pps: *offered,
                    goodput_pps,
                    ..FloodMeasurement::default()
                })
                .collect(),
        };
        GoodputCurve { steps: points.iter().map(step).collect() }
    }

    #[test]
    fn floor_is_the_worst_goodput_above_saturation_over_the_best() {
        let collapsing =
            curve(&[(100.0, &[100.0]), (400.0, &[396.0]), (800.0, &[190.0]), (1100.0, &[200.0])]);
        assert_eq!(collapsing.best_pps(), 396.0);
        assert_eq!(collapsing.floor(), Some(190.0 / 396.0));
        assert_eq!(collapsing.goodput_at_max_load_pps(), 200.0);
        let rising = curve(&[(100.0, &[100.0]), (500.0, &[480.0]), (1000.0, &[500.0])]);
        assert_eq!(rising.floor(), Some(0.96), "the load of the lowest is below that of the best");
    }

    #[test]
    fn curve_that_processes_everything_has_no_floor() {
        let unsaturated = curve(&[(100.0, &[100.0]), (400.0, &[396.0])]);
        assert_eq!(unsaturated.floor(), None);
        assert_eq!(unsaturated.best_pps(), 396.0);
        let saturated_last = curve(&[(100.0, &[100.0]), (400.0, &[396.0]), (1000.0, &[700.0])]);
        assert_eq!(saturated_last.floor(), None);
    }

    #[test]
    fn uses_medians_and_sorts_steps_by_load() {
        let noisy = curve(&[(900.0, &[290.0, 10.0, 310.0]), (300.0, &[300.0, 299.0, 900.0])]);
        assert_eq!(noisy.points(), [(300.0, 300.0), (900.0, 290.0)]);
        assert_eq!(noisy.floor(), Some(310.0 / 900.0));
    }

    #[test]
    fn compares_each_repeat_with_itself() {
        let drifting = curve(&[(300.0, &[300.0, 200.0, 100.0]), (900.0, &[297.0, 100.0, 99.0])]);
        assert_eq!(drifting.floor(), Some(0.99));
    }

    #[test]
    fn floor_is_zero_without_goodput() {
        assert_eq!(GoodputCurve::with_loads([Some(1.0), None]).floor(), None);
        assert_eq!(GoodputCurve::default().goodput_at_max_load_pps(), 0.0);
        assert_eq!(curve(&[(1.0, &[0.0])]).floor(), Some(0.0));
    }
}
