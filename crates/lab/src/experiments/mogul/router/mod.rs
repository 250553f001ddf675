//! Experiment router: packets forwarded against packets offered, with and without a packet filter.
//!
//! Reproduces Figures 6-1, 6-3, 6-4, 6-5 and 6-6 of Mogul and Ramakrishnan, "Eliminating receive
//! livelock in an interrupt-driven kernel" (1996), on this machine. Mode `interrupt` stands for the
//! unmodified kernel: a receive thread at the highest priority, protocol work below it, and the
//! packet filter as an ordinary process. Mode `polled` stands for the modified kernel, which also
//! has priority over the packet filter.

pub mod cpu_share;
mod flood_testbed;
mod kernel_forwarding;
mod testbed;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::flood_testbed::{FloodTestbed, RouterSetup, RunningRouter};
use self::kernel_forwarding::KernelWay;
pub use self::testbed::{
    LEFT_V4, LEFT_V6, RIGHT_V4, RIGHT_V6, ROUTER_LEFT, ROUTER_RIGHT, RouterTestbed,
};
use crate::error::LabError;
use crate::experiments::goodput_curve::GoodputCurve;
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_thousandths;
use crate::testbed::load::flood;
use crate::testbed::netns;

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterLabConfig {
    /// Loads to offer, in packets per second, besides the maximum.
    pub loads_pps: Vec<f64>,
    /// Measure only the lines whose names contain this text.
    pub only: Option<String>,
    /// Duration of the measurement at each load, in seconds.
    pub seconds: f64,
    /// Number of repetitions of all measurements; the median counts.
    pub repeats: usize,
    /// Core that routes.
    pub server_core: usize,
    /// Core that sends.
    pub load_core: usize,
}

impl Default for RouterLabConfig {
    fn default() -> Self {
        let kpps = [25, 50, 75, 100, 150, 200, 300, 400, 600, 800, 1200];
        Self {
            loads_pps: kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec(),
            only: None,
            seconds: 0.5,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl RouterLabConfig {
    /// Reduces loads, times and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [50, 100, 200, 400, 800];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.3, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let is_valid = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !is_valid || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        if self.lines().is_empty() && self.kernel_ways().is_empty() {
            let kernel = KernelWay::ALL.map(kernel_line_name);
            let names = FigureLine::all().into_iter().map(FigureLine::name).chain(kernel);
            let names: Vec<String> = names.collect();
            return Err(LabError::Config(format!(
                "no line contains {:?}; known lines: {}",
                self.only.as_deref().unwrap_or_default(),
                names.join("; ")
            )));
        }
        flood_testbed::check_cores(self.server_core, self.load_core)
    }

    /// Time of a measurement, and of a load before its measurement.
    fn times(&self) -> (Duration, Duration) {
        let warm_up = Duration::from_secs_f64((self.seconds / 2.0).min(0.2));
        (Duration::from_secs_f64(self.seconds), warm_up)
    }

    fn lines(&self) -> Vec<FigureLine> {
        let is_selected = |line: &FigureLine| {
            self.only.as_ref().is_none_or(|text| line.name().contains(text.as_str()))
        };
        FigureLine::all().into_iter().filter(is_selected).collect()
    }

    fn kernel_ways(&self) -> Vec<KernelWay> {
        let is_selected = |way: &KernelWay| {
            self.only.as_ref().is_none_or(|text| kernel_line_name(*way).contains(text.as_str()))
        };
        KernelWay::ALL.into_iter().filter(is_selected).collect()
    }
}

/// One line of the paper's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FigureLine {
    /// Receive mode.
    mode: RouterMode,
    /// Quota of a callback, in packets; `None` means no limit.
    quota: Option<u32>,
    /// True when each packet is checked by the packet filter.
    with_filter: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouterMode {
    Interrupt,
    Polled,
    Feedback,
}

impl RouterMode {
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Polled => "polled",
            Self::Feedback => "polled+feedback",
        }
    }
}

const QUOTAS: [Option<u32>; 5] = [Some(5), Some(10), Some(20), Some(100), None];

impl FigureLine {
    /// Every line, in the order of the figures.
    fn all() -> Vec<Self> {
        let interrupt =
            |with_filter| Self { mode: RouterMode::Interrupt, quota: None, with_filter };
        let polled =
            QUOTAS.map(|quota| Self { mode: RouterMode::Polled, quota, with_filter: false });
        let without_feedback =
            Self { mode: RouterMode::Polled, quota: Some(10), with_filter: true };
        let feedback = |quota, with_filter| Self { mode: RouterMode::Feedback, quota, with_filter };
        let mut all = vec![interrupt(false), interrupt(true)];
        all.extend(polled);
        all.push(feedback(Some(10), false));
        all.push(without_feedback);
        all.extend(QUOTAS.map(|quota| feedback(quota, true)));
        all
    }

    fn name(self) -> String {
        let filter_suffix = if self.with_filter { ", filter" } else { "" };
        match self.mode {
            RouterMode::Interrupt => format!("interrupt{filter_suffix}"),
            mode => format!("{}, quota {}{filter_suffix}", mode.name(), self.quota_name()),
        }
    }

    fn quota_name(self) -> String {
        self.quota.map_or("unlimited".into(), |quota| quota.to_string())
    }

    fn setup(self) -> RouterSetup {
        let mut flags = vec!["--mode".to_owned()];
        flags.push(if self.mode == RouterMode::Interrupt { "interrupt" } else { "polled" }.into());
        if self.mode != RouterMode::Interrupt {
            flags.extend(["--quota".into(), self.quota_name()]);
        }
        if self.mode == RouterMode::Polled {
            flags.push("--no-feedback".into());
        }
        RouterSetup {
            flags,
            uses_interrupts: self.mode == RouterMode::Interrupt,
            uses_filter: self.with_filter,
        }
    }

    /// Figures of the paper that show this line.
    fn figures(self) -> &'static str {
        match (self.mode, self.with_filter) {
            (RouterMode::Interrupt, false) => "6-1, 6-3",
            (RouterMode::Interrupt, true) => "6-1, 6-4",
            (RouterMode::Polled, false) if matches!(self.quota, Some(5 | 20) | None) => "6-3, 6-5",
            (RouterMode::Polled, false) => "6-5",
            (RouterMode::Polled, true) => "6-4",
            (RouterMode::Feedback, true) if self.quota == Some(10) => "6-4, 6-6",
            (RouterMode::Feedback, true) => "6-6",
            (RouterMode::Feedback, false) => "none",
        }
    }

    /// True when this line is drawn with this figure of the paper.
    fn is_drawn_in(self, figure: &str) -> bool {
        let is_comparison =
            self.mode == RouterMode::Feedback && !self.with_filter && figure == "6-3";
        is_comparison || self.figures().split(", ").any(|part| part == figure)
    }

    /// Result in the paper (`mogul_router.csv`).
    fn paper(self) -> &'static str {
        match (self.mode, self.with_filter, self.quota) {
            (RouterMode::Interrupt, false, _) => "peak 4,700/s, falls above it",
            (RouterMode::Interrupt, true, _) => "peak 2,000/s, 0 at 6,000/s offered: livelock",
            (RouterMode::Polled, false, None) => {
                "near 0 above the MLFRR: livelock at the output queue"
            }
            (RouterMode::Polled, false, Some(100)) => "falls as the quota grows",
            (RouterMode::Polled, false, Some(10 | 20)) => "stable, near the best",
            (RouterMode::Polled, false, _) => "at the MLFRR's plateau up to 12,000/s offered",
            (RouterMode::Polled, true, _) => {
                "like the unmodified kernel: the filter's queue overflows"
            }
            (RouterMode::Feedback, false, _) => "not in the paper: feedback from the output queue",
            (RouterMode::Feedback, _, Some(10)) => "flat plateau, no livelock, much higher peak",
            (RouterMode::Feedback, _, Some(5)) => "no livelock, about 5 % below the best",
            (RouterMode::Feedback, _, _) => "no livelock",
        }
    }
}

/// A line and its measured curve.
struct LineResults {
    line: FigureLine,
    curve: GoodputCurve,
}

/// Linux's own forwarding and its measured curve.
struct KernelResults {
    way: KernelWay,
    curve: GoodputCurve,
}

fn kernel_line_name(way: KernelWay) -> String {
    format!("Linux forwarding, {}", way.name())
}

/// Runs the experiment; prints progress on standard error.
///
/// # Errors
/// With only one core; when namespaces cannot be created, a router does not start, or the flood
/// cannot be sent.
pub fn run(config: &RouterLabConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that has exited");
    }
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    let loads = || config.loads_pps.iter().copied().map(Some).chain([None]);
    let mut results: Vec<LineResults> = config
        .lines()
        .into_iter()
        .map(|line| LineResults { line, curve: GoodputCurve::with_loads(loads()) })
        .collect();
    let mut kernel: Vec<KernelResults> = config
        .kernel_ways()
        .into_iter()
        .map(|way| KernelResults { way, curve: GoodputCurve::with_loads(loads()) })
        .collect();
    let progress = Progress::new((results.len() + kernel.len()) * config.repeats);
    for repeat in 1..=config.repeats {
        for line_results in &mut results {
            sweep(config, &testbed, line_results)?;
            report_step(&progress, repeat, line_results);
        }
        for KernelResults { way, curve } in &mut kernel {
            let running = RunningRouter::start_kernel(*way, &testbed)?;
            measure_steps(config, running, curve)?;
            let (name, runs) = (kernel_line_name(*way), curve.format_last_runs());
            progress.step(format_args!("{repeat} {name:<38} {runs} k/s"));
        }
    }
    let mut result = Experiment::new("router");
    describe(config, &mut result);
    conclude(&results, &mut result);
    conclude_kernel(&results, &kernel, &mut result);
    Ok(result)
}

/// Starts one router and offers each load once.
fn sweep(
    config: &RouterLabConfig,
    testbed: &FloodTestbed,
    line_results: &mut LineResults,
) -> Result<(), LabError> {
    let (time, warm_up) = config.times();
    let limit = (time + warm_up) * line_results.curve.steps.len() as u32 + Duration::from_secs(20);
    let running = RunningRouter::start(&line_results.line.setup(), testbed, limit)?;
    measure_steps(config, running, &mut line_results.curve)
}

/// Offers each load once.
fn measure_steps(
    config: &RouterLabConfig,
    mut running: RunningRouter<'_>,
    curve: &mut GoodputCurve,
) -> Result<(), LabError> {
    let (time, warm_up) = config.times();
    for step in &mut curve.steps {
        step.runs.push(running.measure(step.requested_pps, warm_up, time, || Ok(()))?);
    }
    Ok(())
}

fn report_step(progress: &Progress, repeat: usize, line_results: &LineResults) {
    progress.step(format_args!(
        "{repeat} {:<38} {} k/s",
        line_results.line.name(),
        line_results.curve.format_last_runs()
    ));
}

fn describe(config: &RouterLabConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends UDP packets of 4 bytes, by an XDP program that the kernel runs; core \
         {server} does all other work: receive work, router, packet filter, and dropping forwarded packets \
         at the far end; forwarded packets are counted at the far device"
    ));
    result.note(flood::FLOOD_NOTE);
    result.note(
        "the router has real-time priority, as a kernel's network code has priority over processes; the \
         packet filter is an ordinary process. Linux reserves 5 % of a core for such processes, so a \
         livelock is a few percent of the peak and not 0",
    );
    result.note(
        "a floor is the lowest forwarded rate at any load above saturation, over the highest at any load; \
         feedback_worst_floor is the worst of all lines with feedback, whatever their quota",
    );
    result.note(
        "the filter's queue holds 32 packets, input stops at 75 % and starts again at 25 % or after 1 \
         ms; the filter makes a system call for each packet, and one for every 8 verdicts",
    );
    result.note(
        "Linux forwarding: ip_forward between the same devices, without a filter, by softirqs of a timer \
         (kernel), NAPI threads of ordinary priority (kernel-thread), or RPS, where the sender's core \
         does a part of the work (kernel-rps); ratios are those of polled+feedback with quota 10, \
         without filter, to the best of them",
    );
    result.note(format!(
        "{} measurements of {} s at each load, interleaved lines; medians",
        config.repeats, config.seconds
    ));
}

/// Columns of the printed table; the JSON rows have more keys.
const COLUMNS: [&str; 7] =
    ["line", "paper_figures", "peak_per_s", "peak_at_per_s", "at_maximum_per_s", "floor", "paper"];

fn conclude(results: &[LineResults], result: &mut Experiment) {
    let curve = |mode, quota, with_filter| {
        let line = FigureLine { mode, quota, with_filter };
        results.iter().find(|line_results| line_results.line == line).map(|one| &one.curve)
    };
    let mut figure = |name: &str, value: Option<f64>| {
        if let Some(value) = value {
            result.figure(name, round_to_thousandths(value));
        }
    };
    let ten = Some(10);
    let (unmodified, unmodified_with_filter) =
        (curve(RouterMode::Interrupt, None, false), curve(RouterMode::Interrupt, None, true));
    let with_feedback = curve(RouterMode::Feedback, ten, true);
    figure("unmodified_floor", unmodified.and_then(GoodputCurve::floor));
    figure("unmodified_filter_floor", unmodified_with_filter.and_then(GoodputCurve::floor));
    figure("polled_floor", curve(RouterMode::Polled, ten, false).and_then(GoodputCurve::floor));
    figure(
        "polled_unlimited_floor",
        curve(RouterMode::Polled, None, false).and_then(GoodputCurve::floor),
    );
    figure(
        "polled_filter_floor",
        curve(RouterMode::Polled, ten, true).and_then(GoodputCurve::floor),
    );
    figure("feedback_floor", curve(RouterMode::Feedback, ten, false).and_then(GoodputCurve::floor));
    figure("feedback_filter_floor", with_feedback.and_then(GoodputCurve::floor));
    let feedback_lines = results.iter().filter(|one| one.line.mode == RouterMode::Feedback);
    figure(
        "feedback_worst_floor",
        feedback_lines.filter_map(|line_results| line_results.curve.floor()).reduce(f64::min),
    );
    let peak_ratio = |above: Option<&GoodputCurve>, below: Option<&GoodputCurve>| {
        let below = below.map(GoodputCurve::best_pps).filter(|peak| *peak > 0.0)?;
        Some(above?.best_pps() / below)
    };
    figure(
        "feedback_filter_peak_over_unmodified",
        peak_ratio(with_feedback, unmodified_with_filter),
    );
    figure(
        "polled_peak_over_unmodified",
        peak_ratio(curve(RouterMode::Polled, ten, false), unmodified),
    );
    result.rows = results.iter().map(row).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(results));
}

/// Adds the rows of Linux's forwarding, and the ratios to the best of its ways.
fn conclude_kernel(results: &[LineResults], kernel: &[KernelResults], result: &mut Experiment) {
    for KernelResults { way, curve } in kernel {
        if let Some(floor) = curve.floor() {
            let name = format!("{}_floor", way.figure_name());
            result.figure(&name, round_to_thousandths(floor));
        }
        let mut row = curve_row(curve);
        row["line"] = kernel_line_name(*way).into();
        result.rows.push(row);
        if let Some(panel) = result.picture.as_mut().and_then(|picture| picture.panels.get_mut(1)) {
            panel.series.push(Series::new(kernel_line_name(*way), curve.points()));
        }
    }
    let compared = FigureLine { mode: RouterMode::Feedback, quota: Some(10), with_filter: false };
    let Some(tidegate) = results.iter().find(|one| one.line == compared) else { return };
    for (figure, rate) in [
        ("peak_over_kernel", GoodputCurve::best_pps as fn(&GoodputCurve) -> f64),
        ("at_maximum_over_kernel", GoodputCurve::goodput_at_max_load_pps),
    ] {
        let rates = kernel.iter().map(|one| (one.way.name().to_owned(), rate(&one.curve)));
        result.compare_with_kernel(figure, rate(&tidegate.curve), rates);
    }
}

fn row(line_results: &LineResults) -> Value {
    let line = line_results.line;
    let mut row = curve_row(&line_results.curve);
    row["line"] = line.name().into();
    row["mode"] = line.mode.name().into();
    row["quota"] = line.quota.into();
    row["screen"] = line.with_filter.into();
    row["paper_figures"] = line.figures().into();
    row["paper"] = line.paper().into();
    row
}

fn curve_row(curve: &GoodputCurve) -> Value {
    let points = curve.points();
    let peak = points.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default();
    let steps: Vec<Value> = points
        .iter()
        .map(|&(offered, forwarded)| {
            json!({"offered_per_s": offered.round(), "forwarded_per_s": forwarded.round()})
        })
        .collect();
    json!({
        "peak_per_s": peak.1.round(),
        "peak_at_per_s": peak.0.round(),
        "at_maximum_per_s": curve.goodput_at_max_load_pps().round(),
        "floor": curve.floor().map(round_to_thousandths),
        "steps": steps,
    })
}

/// Draws one panel for each of the paper's figures.
fn picture(results: &[LineResults]) -> Picture {
    let panel = |(figure, title): &(&str, &str)| Panel {
        title: format!("{figure}: {title}"),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("forwarded", "packets/s"),
        series: results
            .iter()
            .filter(|line_results| line_results.line.is_drawn_in(figure))
            .map(|line_results| Series::new(line_results.line.name(), line_results.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    let panels = [
        ("6-1", "unmodified"),
        ("6-3", "polled, without filter"),
        ("6-4", "with filter"),
        ("6-5", "quotas, without filter"),
        ("6-6", "quotas, filter and feedback"),
    ];
    Picture {
        title: "Forwarded against offered, after Mogul and Ramakrishnan".into(),
        panels: panels.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::goodput_curve::LoadStep;
    use crate::testbed::flood::FloodMeasurement;

    #[test]
    fn every_line_has_distinct_flags_and_is_drawn() {
        let all = FigureLine::all();
        assert_eq!(all.len(), 14);
        for (at, line) in all.iter().enumerate() {
            assert!(all[at + 1..].iter().all(|other| other.setup() != line.setup()), "{line:?}");
        }
        let results: Vec<LineResults> = all
            .into_iter()
            .map(|line| LineResults { line, curve: GoodputCurve::default() })
            .collect();
        let counts: Vec<usize> = picture(&results).panels.iter().map(|p| p.series.len()).collect();
        assert_eq!(counts, [2, 5, 3, 5, 5]);
    }

    #[test]
    fn figures_are_of_the_named_lines() {
        let line_results = |mode, quota, with_filter, points: [(f64, f64); 2]| {
            let step = |(offered_pps, goodput_pps)| LoadStep {
                requested_pps: Some(offered_pps),
                runs: vec![FloodMeasurement {
                    offered_pps,
                    goodput_pps,
                    ..FloodMeasurement::default()
                }],
            };
            LineResults {
                line: FigureLine { mode, quota, with_filter },
                curve: GoodputCurve { steps: points.map(step).into() },
            }
        };
        let all = [
            line_results(RouterMode::Interrupt, None, true, [(50.0, 50.0), (500.0, 0.0)]),
            line_results(RouterMode::Feedback, Some(10), true, [(100.0, 100.0), (500.0, 99.0)]),
            line_results(RouterMode::Feedback, None, true, [(100.0, 100.0), (500.0, 90.0)]),
        ];
        let mut result = Experiment::new("router");
        conclude(&all, &mut result);
        assert_eq!(result.rows[1]["line"], "polled+feedback, quota 10, filter");
        assert_eq!(result.figures["unmodified_filter_floor"], 0.0);
        assert_eq!(result.figures["feedback_filter_floor"], 0.99);
        assert_eq!(result.figures["feedback_worst_floor"], 0.9);
        assert_eq!(result.figures["feedback_filter_peak_over_unmodified"], 2.0);
        assert!(!result.figures.contains_key("polled_floor"));
    }

    #[test]
    fn compares_with_the_best_of_linux_forwarding() {
        let curve = |points: [(f64, f64); 2]| {
            let step = |(offered_pps, goodput_pps)| LoadStep {
                requested_pps: Some(offered_pps),
                runs: vec![FloodMeasurement {
                    offered_pps,
                    goodput_pps,
                    ..FloodMeasurement::default()
                }],
            };
            GoodputCurve { steps: points.map(step).into() }
        };
        let line = FigureLine { mode: RouterMode::Feedback, quota: Some(10), with_filter: false };
        let results = [LineResults { line, curve: curve([(100.0, 100.0), (500.0, 90.0)]) }];
        let kernel = [
            KernelResults { way: KernelWay::Timer, curve: curve([(100.0, 80.0), (500.0, 10.0)]) },
            KernelResults { way: KernelWay::Thread, curve: curve([(100.0, 60.0), (500.0, 45.0)]) },
        ];
        let mut result = Experiment::new("router");
        conclude(&results, &mut result);
        conclude_kernel(&results, &kernel, &mut result);
        assert_eq!(result.figures["peak_over_kernel"], 1.25);
        assert_eq!(result.figures["at_maximum_over_kernel"], 2.0);
        assert_eq!(result.comparisons[0].kernel_best, "kernel");
        assert_eq!(result.comparisons[1].kernel_best, "kernel-thread");
        assert_eq!(result.figures["kernel_floor"], 0.125);
        assert_eq!(result.rows[1]["line"], "Linux forwarding, kernel");
        let panel = &result.picture.unwrap().panels[1];
        assert!(panel.series.iter().any(|series| series.name == "Linux forwarding, kernel-thread"));
    }

    #[test]
    fn selects_linux_forwarding_by_name() {
        let config = RouterLabConfig { only: Some("Linux".into()), ..RouterLabConfig::default() };
        assert_eq!((config.lines().len(), config.kernel_ways().len()), (0, 3));
        let config = RouterLabConfig { only: Some("feedback".into()), ..config };
        assert!(config.kernel_ways().is_empty());
    }
}
