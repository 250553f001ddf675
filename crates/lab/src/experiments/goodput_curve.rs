//! Goodput as a function of offered load: the peak, and the share kept beyond the peak.

use tidegate_load::format_number;

use crate::stats::median;
use crate::testbed::flood::FloodMeasurement;

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

    /// The step with the highest goodput, and all steps from it on, sorted by load.
    fn peak_and_beyond(&self) -> Option<(&LoadStep, Vec<&LoadStep>)> {
        let mut steps = self.measured_steps();
        // Among equals, the step with the lowest load.
        let order = |a: &&LoadStep, b: &&LoadStep| a.goodput_pps().total_cmp(&b.goodput_pps());
        let peak = *steps.iter().rev().max_by(|a, b| order(a, b))?;
        let peak_index = steps.iter().position(|step| std::ptr::eq(*step, peak))?;
        steps.drain(..peak_index);
        Some((peak, steps))
    }

    /// The highest goodput, in packets per second.
    pub fn peak_pps(&self) -> f64 {
        self.peak_and_beyond().map_or(0.0, |(peak, _)| peak.goodput_pps())
    }

    /// The floor: lowest goodput at any load from the peak on, relative to the peak; 0 without
    /// goodput.
    ///
    /// Each repeat is compared with itself, and the median counts: a shared machine is slower at
    /// some times than at others.
    pub fn floor(&self) -> f64 {
        let Some((peak, steps)) = self.peak_and_beyond() else { return 0.0 };
        steps.iter().map(|step| step.goodput_ratio_to(peak)).fold(1.0, f64::min)
    }

    /// Goodput near a load of `offered_pps`, relative to the peak, computed as in
    /// [`GoodputCurve::floor`]. Uses the highest load if no step is within a tenth of
    /// `offered_pps`. `None` without measurements.
    pub fn kept_share_near(&self, offered_pps: f64) -> Option<f64> {
        let (peak, _) = self.peak_and_beyond()?;
        let steps = self.measured_steps();
        let distance = |step: &&LoadStep| (step.offered_pps() - offered_pps).abs();
        let near = steps
            .iter()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .filter(|step| distance(step) <= 0.1 * offered_pps);
        Some(near.or(steps.last())?.goodput_ratio_to(peak))
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
    fn floor_is_the_worst_goodput_beyond_the_peak() {
        let collapsing =
            curve(&[(100.0, &[100.0]), (400.0, &[396.0]), (800.0, &[190.0]), (1100.0, &[200.0])]);
        assert_eq!(collapsing.peak_pps(), 396.0);
        assert!((collapsing.floor() - 190.0 / 396.0).abs() < 1e-12);
        assert_eq!(collapsing.goodput_at_max_load_pps(), 200.0);
        assert_eq!(collapsing.kept_share_near(810.0), Some(190.0 / 396.0));
        assert_eq!(collapsing.kept_share_near(600.0), Some(200.0 / 396.0), "the most");
        let holding = curve(&[(100.0, &[100.0]), (500.0, &[480.0]), (1000.0, &[483.0])]);
        assert_eq!(holding.floor(), 1.0);
    }

    #[test]
    fn uses_medians_and_sorts_steps_by_load() {
        let noisy = curve(&[(900.0, &[300.0, 10.0, 310.0]), (300.0, &[280.0, 299.0, 900.0])]);
        assert_eq!(noisy.points(), [(300.0, 299.0), (900.0, 300.0)]);
        assert_eq!(noisy.floor(), 1.0);
    }

    #[test]
    fn compares_each_repeat_with_itself() {
        let drifting = curve(&[(300.0, &[300.0, 200.0, 100.0]), (900.0, &[297.0, 100.0, 99.0])]);
        assert_eq!(drifting.floor(), 0.99);
        assert_eq!(drifting.kept_share_near(900.0), Some(0.99));
    }

    #[test]
    fn floor_is_zero_without_measurements() {
        assert_eq!(GoodputCurve::with_loads([Some(1.0), None]).floor(), 0.0);
        assert_eq!(GoodputCurve::default().goodput_at_max_load_pps(), 0.0);
        assert_eq!(GoodputCurve::default().kept_share_near(1.0), None);
        assert_eq!(curve(&[(1.0, &[0.0])]).floor(), 0.0);
    }
}
