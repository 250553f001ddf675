//! Goodput against offered load: where the peak is, and what is left beyond it.

use crate::dns::sweep::median;

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

    /// Offered load and goodput of every step, sorted by the load that was
    /// really offered.
    pub fn points(&self) -> Vec<(f64, f64)> {
        let measured = self.steps.iter().filter(|step| !step.runs.is_empty());
        let mut points: Vec<_> =
            measured.map(|step| (step.offered_pps(), step.goodput_pps())).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    }

    /// The most goodput there was.
    pub fn peak_pps(&self) -> f64 {
        self.points().iter().map(|point| point.1).fold(0.0, f64::max)
    }

    /// The worst goodput at any load from that of the peak on, over the peak; 0
    /// when nothing was worked on.
    pub fn floor(&self) -> f64 {
        let (points, peak_pps) = (self.points(), self.peak_pps());
        if peak_pps <= 0.0 {
            return 0.0;
        }
        let at_peak = points.iter().position(|point| point.1 >= peak_pps).unwrap_or(0);
        points[at_peak..].iter().map(|point| point.1).fold(peak_pps, f64::min) / peak_pps
    }

    /// Goodput at the most load there was.
    pub fn at_maximum_pps(&self) -> f64 {
        self.points().last().map_or(0.0, |point| point.1)
    }

    /// Goodput where about `offered_pps` were offered; `None` when the
    /// generator did not come within a tenth of it.
    pub fn near_pps(&self, offered_pps: f64) -> Option<f64> {
        let distance = |point: &(f64, f64)| (point.0 - offered_pps).abs();
        let points = self.points();
        let nearest = points.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
        (distance(nearest) <= 0.1 * offered_pps).then_some(nearest.1)
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
        assert_eq!(collapsing.near_pps(810.0), Some(190.0));
        assert_eq!(collapsing.near_pps(600.0), None);
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
    fn nothing_measured_is_no_floor() {
        assert_eq!(Curve::at([Some(1.0), None]).floor(), 0.0);
        assert_eq!(Curve::default().at_maximum_pps(), 0.0);
        assert_eq!(curve(&[(1.0, &[0.0])]).floor(), 0.0);
    }
}
