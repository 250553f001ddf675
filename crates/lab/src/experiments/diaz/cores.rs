//! `lab cores`: servers on one, two and more network cores, each with a receive queue of its own.

mod placement;
mod testbed;

use serde_json::{Value, json};

use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::cpu;
use placement::Placement;
use testbed::{Case, CoresTestbed, Load, ServerSetup};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct CoresConfig {
    /// Numbers of network cores.
    pub cores: Vec<usize>,
    /// Text in the names of the cases that are measured; `None` for all.
    pub only: Option<String>,
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
        let cores = cores.take_while(|&cores| cores <= max).collect();
        Self { cores, only: None, seconds: 2.0, repeats: 5 }
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
    /// Requests answered in a second of processor time of the server; `None` under a load that does
    /// not tell when it is at work.
    per_busy_second: Option<f64>,
    /// Frames passed from core to core, over those answered.
    crossing_share: f64,
}

/// Runs of one way.
struct Series {
    way: ServerSetup,
    runs: Vec<Run>,
}

impl Series {
    fn median(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn answered_pps(&self) -> f64 {
        self.median(|run| run.answered_pps)
    }

    fn per_busy_second(&self) -> Option<f64> {
        let of_each: Option<Vec<f64>> = self.runs.iter().map(|run| run.per_busy_second).collect();
        of_each.map(median)
    }
}

/// A service under one load with one number of cores, on Tidegate and on the kernel.
struct Comparison {
    case: Case,
    cores: usize,
    kernel: FirstPass<ServerSetup>,
    /// Tidegate's ways, and the best of the kernel's.
    series: Vec<Series>,
}

impl Comparison {
    /// Measures the kernel's ways once.
    fn first_pass(
        testbed: &mut CoresTestbed,
        case: Case,
        cores: usize,
        seconds: f64,
    ) -> Result<Self, LabError> {
        let name = |way: ServerSetup| way.name().to_owned();
        let kernel = FirstPass::measure(Goal::Highest, &ServerSetup::KERNEL, name, |way| {
            Ok(testbed.measure(case, way, cores, seconds)?.answered_pps)
        })?;
        let mut ways = vec![ServerSetup::QueueEach];
        // With one core, one queue is a queue each.
        if cores > 1 && case.load == Load::Flood {
            ways.push(ServerSetup::OneQueue);
        }
        ways.push(kernel.best());
        let series = ways.into_iter().map(|way| Series { way, runs: Vec::new() }).collect();
        Ok(Self { case, cores, kernel, series })
    }

    fn series(&self, way: ServerSetup) -> Option<&Series> {
        self.series.iter().find(|series| series.way == way)
    }

    /// Processor time of a crossing on both cores: what an answer costs more with one queue for all,
    /// over the crossings for each.
    fn crossing_ns(&self) -> Option<f64> {
        let (apart, together) =
            (self.series(ServerSetup::QueueEach)?, self.series(ServerSetup::OneQueue)?);
        let answer_ns = |series: &Series| Some(1e9 / series.per_busy_second()?.max(1.0));
        let crossings = |series: &Series| series.median(|run| run.crossing_share);
        let share = crossings(together) - crossings(apart);
        (share > 0.0).then_some((answer_ns(together)? - answer_ns(apart)?) / share)
    }

    fn row(&self, series: &Series) -> Value {
        json!({
            "service": self.case.service.name(),
            "load": self.case.load.name(),
            "server": series.way.name(),
            "cores": self.cores,
            "offered_per_s": series.median(|run| run.offered_pps).round(),
            "answered_per_s": series.answered_pps().round(),
            "per_busy_second": series.per_busy_second().map(f64::round),
            "crossing_share": round_to_thousandths(series.median(|run| run.crossing_share)),
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
    let mut testbed = CoresTestbed::new(placement.clone())?;
    let is_wanted =
        |case: &Case| config.only.as_ref().is_none_or(|only| case.to_string().contains(only));
    let cases: Vec<Case> = testbed.cases().into_iter().filter(is_wanted).collect();
    if cases.is_empty() {
        let known: Vec<String> = testbed.cases().iter().map(Case::to_string).collect();
        let only = config.only.as_deref().unwrap_or_default();
        let known = known.join("; ");
        return Err(LabError::Config(format!("no case contains {only:?}; known cases: {known}")));
    }
    let first_seconds = config.seconds.min(FIRST_PASS_SECONDS);
    let progress = Progress::of_part("first pass", cases.len() * config.cores.len());
    let mut comparisons = Vec::new();
    for &case in &cases {
        for &cores in &config.cores {
            let comparison = Comparison::first_pass(&mut testbed, case, cores, first_seconds)?;
            let best = comparison.kernel.best().name();
            progress.step(format_args!("{case}, {cores} cores: {best} is the kernel's best"));
            comparisons.push(comparison);
        }
    }
    let series = comparisons.iter().map(|comparison| comparison.series.len());
    let progress = Progress::new(series.sum::<usize>() * config.repeats);
    for _ in 0..config.repeats {
        for Comparison { case, cores, series, .. } in &mut comparisons {
            for Series { way, runs } in series {
                let run = testbed.measure(*case, *way, *cores, config.seconds)?;
                progress.step(format_args!(
                    "{case} {}, {cores} cores: {:.0} k/s answered of {:.0}, {:.2} crossings each",
                    way.name(),
                    run.answered_pps / 1e3,
                    run.offered_pps / 1e3,
                    run.crossing_share
                ));
                runs.push(run);
            }
        }
    }
    let mut result = Experiment::new("cores");
    for case in cases {
        let of_case = comparisons.iter().filter(|comparison| comparison.case == case);
        conclude(case, &of_case.collect::<Vec<_>>(), placement.is_apart, &mut result);
    }
    let rows = |of: &Comparison| of.series.iter().map(|series| of.row(series)).collect::<Vec<_>>();
    result.rows = comparisons.iter().flat_map(rows).collect();
    result.note(placement.describe());
    result.note(testbed::NOTE);
    Ok(result)
}

/// Sets the figures of one case.
fn conclude(case: Case, all: &[&Comparison], is_apart: bool, result: &mut Experiment) {
    let suffix = case.suffix();
    let of = |cores: usize| all.iter().find(|comparison| comparison.cores == cores);
    let one = of(1).and_then(|one| one.series(ServerSetup::QueueEach));
    for (way, place) in [(ServerSetup::QueueEach, ""), (ServerSetup::OneQueue, "_one_queue")] {
        let Some(two) = of(2).and_then(|two| two.series(way)) else { continue };
        let busy = two.per_busy_second().zip(one.and_then(Series::per_busy_second));
        if let Some((two, one)) = busy {
            let name = format!("cores_2_over_1{place}{suffix}");
            result.figure(&name, round_to_thousandths(2.0 * two / one.max(1.0)));
        }
        let crossing_share = two.median(|run| run.crossing_share);
        let name = format!("crossing_share{place}{suffix}");
        result.figure(&name, round_to_thousandths(crossing_share));
    }
    if let Some(crossing_ns) = of(2).and_then(|two| two.crossing_ns()) {
        result.figure(&format!("crossing_ns{suffix}"), crossing_ns.round());
    }
    if !is_apart {
        return;
    }
    for comparison in all {
        let Some(series) = comparison.series(ServerSetup::QueueEach) else { continue };
        let (cores, answered_pps) = (comparison.cores, series.answered_pps());
        if let Some(one) = one.filter(|_| cores > 1) {
            let name = format!("cores_{cores}_over_1_by_clock{suffix}");
            result.figure(&name, round_to_thousandths(answered_pps / one.answered_pps().max(1.0)));
        }
        let best = comparison.series(comparison.kernel.best()).map_or(1.0, Series::answered_pps);
        let name = format!("cores_{cores}_over_kernel{suffix}");
        result.compare_with_best(&name, answered_pps / best.max(1.0), comparison.kernel.rows(best));
    }
}
