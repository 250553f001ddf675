//! Goodput against offered load: where the peak is, and what is left beyond it.

use crate::dns::sweep::median;
use crate::experiment::number;

use super::bench::Measured;

/// All that was measured at one offered load.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// What was asked of the generator; `None` is as much as it can.
    pub asked_pps: Option<f64>,
    /// One measurement for each repeat.
    pub runs: Vec<Measured>,
}

impl Step {
    /// The median of a figure over the repeats.
    pub fn median(&self, figure: impl Fn(&Measured) -> f64) -> f64 {
        median(&self.runs.iter().map(figure).collect::<Vec<_>>())
    }

    /// Packets offered per second.
    pub fn offered_pps(&self) -> f64 {
        self.median(|run| run.offered_pps)
    }

    /// Packets worked on per second.
    pub fn goodput_pps(&self) -> f64 {
        self.median(|run| run.goodput_pps)
    }

    /// Goodput over that of another step in the same repeat, the median; 0 when
    /// there was none.
    fn over(&self, other: &Self) -> f64 {
        let ratio = |(own, other): (&Measured, &Measured)| {
            if other.goodput_pps > 0.0 { own.goodput_pps / other.goodput_pps } else { 0.0 }
        };
        median(&self.runs.iter().zip(&other.runs).map(ratio).collect::<Vec<_>>())
    }
}

/// The steps of one server, in the order of the offered load.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    /// The steps.
    pub steps: Vec<Step>,
}

impl Curve {
    /// A curve without measurements, at these loads.
    pub fn at(loads: impl IntoIterator<Item = Option<f64>>) -> Self {
        let step = |asked_pps| Step { asked_pps, runs: Vec::new() };
        Self { steps: loads.into_iter().map(step).collect() }
    }

    /// The steps that were measured, sorted by the load that was really offered.
    fn measured(&self) -> Vec<&Step> {
        let mut steps: Vec<_> = self.steps.iter().filter(|step| !step.runs.is_empty()).collect();
        steps.sort_by(|a, b| a.offered_pps().total_cmp(&b.offered_pps()));
        steps
    }

    /// Offered load and goodput of every step, sorted by the load.
    pub fn points(&self) -> Vec<(f64, f64)> {
        self.measured().iter().map(|step| (step.offered_pps(), step.goodput_pps())).collect()
    }

    /// The last repeat at each load, as `offered>goodput` in thousands of packets
    /// per second.
    pub fn last_runs(&self) -> String {
        let thousands = |pps: f64| number((pps / 1e3).round());
        let last = |step: &Step| {
            let run = step.runs.last()?;
            Some(format!("{}>{}", thousands(run.offered_pps), thousands(run.goodput_pps)))
        };
        self.steps.iter().filter_map(last).collect::<Vec<_>>().join("  ")
    }

    /// The step with the most goodput, and all from it on, by their load.
    fn peak_and_beyond(&self) -> Option<(&Step, Vec<&Step>)> {
        let mut steps = self.measured();
        // Of equals the one with the least load.
        let order = |a: &&Step, b: &&Step| a.goodput_pps().total_cmp(&b.goodput_pps());
        let peak = *steps.iter().rev().max_by(|a, b| order(a, b))?;
        let at_peak = steps.iter().position(|step| std::ptr::eq(*step, peak))?;
        steps.drain(..at_peak);
        Some((peak, steps))
    }

    /// The most goodput there was.
    pub fn peak_pps(&self) -> f64 {
        self.peak_and_beyond().map_or(0.0, |(peak, _)| peak.goodput_pps())
    }

    /// The worst goodput at any load from that of the peak on, over the peak; 0
    /// when nothing was worked on.
    ///
    /// Each repeat is compared with itself, and the median counts: a machine that
    /// is shared is slower at some times than at others.
    pub fn floor(&self) -> f64 {
        let Some((peak, steps)) = self.peak_and_beyond() else { return 0.0 };
        steps.iter().map(|step| step.over(peak)).fold(1.0, f64::min)
    }

    /// Goodput where about `offered_pps` were offered, over the peak, as
    /// [`Curve::floor`]; at the most load when the generator did not come within
    /// a tenth of that. `None` when nothing was measured.
    pub fn kept_near(&self, offered_pps: f64) -> Option<f64> {
        let (peak, _) = self.peak_and_beyond()?;
        let steps = self.measured();
        let distance = |step: &&Step| (step.offered_pps() - offered_pps).abs();
        let near = steps
            .iter()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .filter(|step| distance(step) <= 0.1 * offered_pps);
        Some(near.or(steps.last())?.over(peak))
    }

    /// Goodput at the most load there was.
    pub fn at_maximum_pps(&self) -> f64 {
        self.points().last().map_or(0.0, |point| point.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, &[f64])]) -> Curve {
        let step = |(offered, goods): &(f64, &[f64])| Step {
            asked_pps: Some(*offered),
            runs: goods
                .iter()
                .map(|&goodput_pps| Measured {
                    offered_pps: *offered,
                    goodput_pps,
                    ..Measured::default()
                })
                .collect(),
        };
        Curve { steps: points.iter().map(step).collect() }
    }

    #[test]
    fn the_floor_is_the_worst_beyond_the_peak_and_not_before_it() {
        let collapsing =
            curve(&[(100.0, &[100.0]), (400.0, &[396.0]), (800.0, &[190.0]), (1100.0, &[200.0])]);
        assert_eq!(collapsing.peak_pps(), 396.0);
        assert!((collapsing.floor() - 190.0 / 396.0).abs() < 1e-12);
        assert_eq!(collapsing.at_maximum_pps(), 200.0);
        assert_eq!(collapsing.kept_near(810.0), Some(190.0 / 396.0));
        assert_eq!(collapsing.kept_near(600.0), Some(200.0 / 396.0), "the most");
        let holding = curve(&[(100.0, &[100.0]), (500.0, &[480.0]), (1000.0, &[483.0])]);
        assert_eq!(holding.floor(), 1.0);
    }

    #[test]
    fn medians_count_and_steps_may_be_out_of_order() {
        let noisy = curve(&[(900.0, &[300.0, 10.0, 310.0]), (300.0, &[280.0, 299.0, 900.0])]);
        assert_eq!(noisy.points(), [(300.0, 299.0), (900.0, 300.0)]);
        assert_eq!(noisy.floor(), 1.0);
    }

    #[test]
    fn each_repeat_is_compared_with_itself() {
        let drifting = curve(&[(300.0, &[300.0, 200.0, 100.0]), (900.0, &[297.0, 100.0, 99.0])]);
        assert_eq!(drifting.floor(), 0.99);
        assert_eq!(drifting.kept_near(900.0), Some(0.99));
    }

    #[test]
    fn nothing_measured_is_no_floor() {
        assert_eq!(Curve::at([Some(1.0), None]).floor(), 0.0);
        assert_eq!(Curve::default().at_maximum_pps(), 0.0);
        assert_eq!(Curve::default().kept_near(1.0), None);
        assert_eq!(curve(&[(1.0, &[0.0])]).floor(), 0.0);
    }
}
