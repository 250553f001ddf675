//! `lab cores`: servers on one, two and more network cores, each with a receive queue of its own.

mod placement;
mod testbed;

use serde_json::{Value, json};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::cpu;
use placement::Placement;
use testbed::{CoresTestbed, Service, Way};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct CoresConfig {
    /// Numbers of network cores.
    pub cores: Vec<usize>,
    /// Duration of each measurement in seconds.
    pub seconds: f64,
    /// Number of repetitions.
    pub repeats: usize,
}

impl Default for CoresConfig {
    /// One, two, four and so on: half the processors of the machine, the others are for the load.
    fn default() -> Self {
        let max = (cpu::available_cores() / 2).max(2);
        let cores = std::iter::successors(Some(1), |cores| Some(2 * cores));
        Self { cores: cores.take_while(|&cores| cores <= max).collect(), seconds: 2.0, repeats: 5 }
    }
}

impl CoresConfig {
    /// A shorter configuration, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.5, repeats: 2, ..self }
    }
}

/// One measurement, at the offered rate at which the server answered most.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    offered_pps: f64,
    answered_pps: f64,
    /// Requests answered in a second of processor time of the server.
    per_busy_second: f64,
    /// Frames passed from core to core, over those answered.
    crossing_share: f64,
}

/// Runs of one way with one number of cores.
struct Series {
    service: Service,
    way: Way,
    cores: usize,
    runs: Vec<Run>,
}

impl Series {
    fn median(&self, figure: fn(&Run) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn row(&self) -> Value {
        json!({
            "service": self.service.name(),
            "server": self.way.name(),
            "cores": self.cores,
            "offered_per_s": self.median(|run| run.offered_pps).round(),
            "answered_per_s": self.median(|run| run.answered_pps).round(),
            "per_busy_second": self.median(|run| run.per_busy_second).round(),
            "crossing_share": round_to_thousandths(self.median(|run| run.crossing_share)),
        })
    }
}

/// Measures echo and DNS servers on each number of cores, in turn.
///
/// # Errors
/// If namespaces cannot be created, or a server or the load does not start.
pub fn run(config: &CoresConfig) -> Result<Experiment, LabError> {
    if config.cores.is_empty() || config.cores.contains(&0) || config.repeats == 0 {
        return Err(LabError::Config("give numbers of cores and repeats above zero".into()));
    }
    let placement = Placement::of_machine()?;
    let mut testbed = CoresTestbed::new()?;
    let mut all: Vec<Series> = Vec::new();
    for service in Service::ALL {
        for way in Way::ALL {
            // One core with one queue is a case of its own queue each.
            let cores = config.cores.iter().filter(|&&cores| way != Way::OneQueue || cores > 1);
            all.extend(cores.map(|&cores| Series { service, way, cores, runs: Vec::new() }));
        }
    }
    let progress = Progress::new(all.len() * config.repeats);
    for _ in 0..config.repeats {
        for series in &mut all {
            let Series { service, way, cores, .. } = *series;
            let run = testbed.measure(service, way, &placement, cores, config.seconds)?;
            progress.step(format_args!(
                "{} {}, {cores} cores: {:.0} k/s answered of {:.0}, {:.0} k/s in a busy second, \
                 {:.2} crossings each",
                service.name(),
                way.name(),
                run.answered_pps / 1e3,
                run.offered_pps / 1e3,
                run.per_busy_second / 1e3,
                run.crossing_share
            ));
            series.runs.push(run);
        }
    }
    Ok(conclude(&all, &placement))
}

fn conclude(all: &[Series], placement: &Placement) -> Experiment {
    let mut result = Experiment::new("cores");
    for service in Service::ALL {
        let of = |way: Way, cores: usize| {
            let is_it = |series: &&Series| {
                (series.service, series.way, series.cores) == (service, way, cores)
            };
            all.iter().find(is_it)
        };
        let max = all.iter().map(|series| series.cores).max().unwrap_or(1);
        let Some(one) = of(Way::QueueEach, 1) else { continue };
        let suffix = service.suffix();
        let mut ratio = |name: &str, series: &Series, factor: f64, figure: fn(&Run) -> f64| {
            let value = factor * series.median(figure) / one.median(figure).max(1.0);
            result.figure(&format!("{name}{suffix}"), round_to_thousandths(value));
        };
        if let Some(two) = of(Way::QueueEach, 2) {
            ratio("cores_2_over_1", two, 2.0, |run| run.per_busy_second);
        }
        if let Some(two) = of(Way::OneQueue, 2) {
            ratio("cores_2_over_1_one_queue", two, 2.0, |run| run.per_busy_second);
        }
        if placement.is_apart {
            for cores in [2, max] {
                if let Some(series) = of(Way::QueueEach, cores) {
                    let name = format!("cores_{cores}_over_1_by_clock");
                    ratio(&name, series, 1.0, |run| run.answered_pps);
                }
            }
        }
        for series in [of(Way::QueueEach, 2), of(Way::OneQueue, 2)].into_iter().flatten() {
            let place = if series.way == Way::OneQueue { "_one_queue" } else { "" };
            let share = round_to_thousandths(series.median(|run| run.crossing_share));
            result.figure(&format!("crossing_share{place}{suffix}"), share);
        }
    }
    result.rows = all.iter().map(Series::row).collect();
    result.note(placement.describe());
    result.note(testbed::NOTE);
    result
}
