//! Experiment sweep: every mode of the gate in the simulator, from a tenth of the capacity to ten
//! times the capacity, on 1 to 64 cores.
//!
//! The same seed gives identical results.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tidegate_gate::{Config, Mode, Settings};
use tidegate_sim::{
    ArrivalPattern, BackgroundTask, Costs, DropPoint, HostRole, Machine, OfferedLoad, Placement,
    PriorityLevel, Setup, SimReport,
};

use crate::experiments::goodput_curve::{GoodputCurve, LoadStep};
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_hundredths;
use crate::testbed::flood::FloodMeasurement;
use crate::{Experiment, LabError};

const NS_PER_MS: u64 = 1_000_000;

/// Access to memory of the own node, in round numbers, and of another node. The second is twice the
/// first: the distances that Linux takes without a table of the firmware (`LOCAL_DISTANCE` 10,
/// `REMOTE_DISTANCE` 20 in `include/linux/topology.h`, as in the SLIT of ACPI).
const LOCAL_ACCESS_NS: u64 = 100;
const REMOTE_ACCESS_NS: u64 = 200;
/// Cache lines of a received packet that the core reads from memory: descriptor and headers.
const REMOTE_LINES: u64 = 2;

/// Mode of the gate with the options that are simulated with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepMode {
    /// Mode `interrupt`.
    Interrupt,
    /// Mode `moderated`.
    Moderated,
    /// Mode `napi`.
    Napi,
    /// Mode `polled` without feedback.
    Polled,
    /// Mode `polled` with feedback.
    PolledFeedback,
    /// Mode `polled` with feedback, where the queue of a flow says nothing of the core of its socket,
    /// so that on N cores N - 1 of N flows pass from core to core.
    PolledUnsteered,
    /// Mode `polled` with feedback, where the memory of the packets is on another NUMA node than the
    /// cores.
    PolledRemote,
    /// Mode `polled` with feedback and a CPU share of one half, together with a compute-bound
    /// process.
    PolledShare,
    /// Mode `dedicated`, with the service in the polling loop.
    Dedicated,
}

impl SweepMode {
    /// Every mode, in the order of the papers.
    pub const ALL: [Self; 9] = [
        Self::Interrupt,
        Self::Moderated,
        Self::Napi,
        Self::Polled,
        Self::PolledFeedback,
        Self::PolledUnsteered,
        Self::PolledRemote,
        Self::PolledShare,
        Self::Dedicated,
    ];

    /// Name in rows and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Moderated => "moderated",
            Self::Napi => "napi",
            Self::Polled => "polled",
            Self::PolledFeedback => "polled-feedback",
            Self::PolledUnsteered => "polled-unsteered",
            Self::PolledRemote => "polled-remote",
            Self::PolledShare => "polled-share",
            Self::Dedicated => "dedicated",
        }
    }

    fn setup(self) -> Result<Setup, LabError> {
        let mode = match self {
            Self::Interrupt => Mode::Interrupt,
            Self::Moderated => Mode::Moderated,
            Self::Napi => Mode::Napi,
            Self::Polled
            | Self::PolledFeedback
            | Self::PolledUnsteered
            | Self::PolledRemote
            | Self::PolledShare => Mode::Polled,
            Self::Dedicated => Mode::Dedicated,
        };
        let has_share = self == Self::PolledShare;
        let config = Config::default()
            .mode(mode)
            .feedback(matches!(
                self,
                Self::PolledFeedback
                    | Self::PolledUnsteered
                    | Self::PolledRemote
                    | Self::PolledShare
            ))
            .cpu_share_percent(if has_share { 50 } else { 100 });
        let mut setup = Setup { gate: gate_settings(config)?, ..Setup::default() };
        if self == Self::Dedicated {
            setup.role = HostRole::Udp {
                family: Default::default(),
                socket_queue: 256,
                answers: false,
                placement: Placement::Inline,
            };
        }
        setup.background = if has_share { vec![BackgroundTask::Compute] } else { Vec::new() };
        Ok(setup)
    }
}

/// Passing of packets between cores, as `lab cores` measures it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossingCost {
    /// Share of the packets that arrive at another core than that of their socket.
    pub share: f64,
    /// Processor time of a crossing on both cores together.
    pub ns: u64,
}

impl CrossingCost {
    /// Reads the figures `crossing_share` and `crossing_ns` of a result of `lab cores`.
    ///
    /// # Errors
    /// If the file cannot be read, or has no such figures.
    pub fn read(path: &Path) -> Result<Self, LabError> {
        let text = fs::read_to_string(path).map_err(LabError::file(path))?;
        let result: Option<Value> = serde_json::from_str(&text).ok();
        let figure = |name: &str| result.as_ref()?["figures"][name].as_f64();
        let found = figure("crossing_share").zip(figure("crossing_ns"));
        let crossing = found.map(|(share, ns)| Self { share, ns: ns.max(0.0).round() as u64 });
        crossing.ok_or_else(|| {
            LabError::Config(format!(
                "{} has no figures crossing_share and crossing_ns: give a result that \
                 `tidegate lab cores --json FILE` wrote with two cores",
                path.display()
            ))
        })
    }
}

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct SweepConfig {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Numbers of cores.
    pub cores: Vec<u32>,
    /// Loads, in percent of the capacity of all cores.
    pub loads_percent: Vec<u64>,
    /// Measuring time at each load, in milliseconds of virtual time.
    pub window_ms: u64,
    /// Measured cost of packets that pass from core to core; `None`: no packet does.
    pub crossing: Option<CrossingCost>,
}

impl Default for SweepConfig {
    fn default() -> Self {
        Self {
            seed: 1,
            cores: vec![1, 2, 4, 8, 16, 32, 64],
            loads_percent: vec![10, 25, 50, 75, 100, 150, 200, 300, 500, 1000],
            window_ms: 20,
            crossing: None,
        }
    }
}

impl SweepConfig {
    /// Reduces cores and loads for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { cores: vec![1, 4], loads_percent: vec![50, 100, 300, 1000], ..self }
    }

    /// Modes that differ with this configuration.
    fn modes(&self) -> impl Iterator<Item = SweepMode> + Clone {
        let crosses = self.crossing.is_some();
        SweepMode::ALL
            .into_iter()
            .filter(move |&mode| crosses || mode != SweepMode::PolledUnsteered)
    }
}

/// One simulated machine at one load.
struct SweepPoint {
    mode: SweepMode,
    cores: u32,
    load_percent: u64,
    report: SimReport,
}

/// Runs every mode on every number of cores at every load.
///
/// # Errors
/// When a machine cannot be built: too many cores, or a load above the rate of its link.
pub fn run(config: &SweepConfig) -> Result<Experiment, LabError> {
    let mut points = Vec::new();
    let progress = Progress::new(config.modes().count() * config.cores.len());
    for mode in config.modes() {
        for &cores in &config.cores {
            for &load_percent in &config.loads_percent {
                let report = measure(config, mode, cores, load_percent)?;
                points.push(SweepPoint { mode, cores, load_percent, report });
            }
            progress.step(format_args!("{}, {cores} cores", mode.name()));
        }
    }
    Ok(experiment(config, &points))
}

fn measure(
    config: &SweepConfig,
    mode: SweepMode,
    cores: u32,
    load_percent: u64,
) -> Result<SimReport, LabError> {
    let capacity_pps = Costs::default().capacity_pps() * u64::from(cores);
    let load = OfferedLoad {
        pps: capacity_pps * load_percent / 100,
        shape: ArrivalPattern::Poisson,
        ..OfferedLoad::default()
    };
    let crossing = config.crossing.unwrap_or(CrossingCost { share: 0.0, ns: 0 });
    let crossing_share = match mode {
        SweepMode::PolledUnsteered => f64::from(cores.saturating_sub(1)) / f64::from(cores.max(1)),
        _ => crossing.share,
    };
    let mut setup = Setup { cores, load, seed: config.seed, crossing_share, ..mode.setup()? };
    setup.costs.crossing_ns = crossing.ns;
    if mode == SweepMode::PolledRemote {
        setup.costs.remote_ns = REMOTE_LINES * (REMOTE_ACCESS_NS - LOCAL_ACCESS_NS);
    }
    let mut machine = Machine::new(&setup).map_err(|error| LabError::Config(error.to_string()))?;
    machine.run(10 * NS_PER_MS);
    Ok(machine.run(config.window_ms * NS_PER_MS))
}

fn experiment(config: &SweepConfig, points: &[SweepPoint]) -> Experiment {
    let mut result = Experiment::new("sweep");
    result.rows = points.iter().map(row).collect();
    for mode in config.modes() {
        let name = match mode {
            SweepMode::PolledFeedback => "sweep".to_owned(),
            _ => mode.name().replace('-', "_"),
        };
        let floors = config.cores.iter().filter_map(|&cores| floor(points, mode, cores));
        if let Some(worst) = floors.reduce(f64::min) {
            result.figure(&format!("{name}_floor"), worst);
        }
        let is_scaled = matches!(mode, SweepMode::PolledFeedback | SweepMode::PolledUnsteered);
        if let (true, Some(one)) = (is_scaled, peak_pps(points, mode, 1)) {
            for &cores in config.cores.iter().filter(|&&cores| cores > 1) {
                let peak_pps = peak_pps(points, mode, cores).unwrap_or_default();
                let ratio = round_to_hundredths(peak_pps / one.max(1.0));
                result.figure(&format!("{name}_{cores}_over_1"), ratio);
            }
        }
    }
    let peak = |mode| peak_pps(points, mode, *config.cores.first()?);
    if let Some((local, remote)) =
        peak(SweepMode::PolledFeedback).zip(peak(SweepMode::PolledRemote))
    {
        let ratio = round_to_hundredths(local / remote.max(1.0));
        result.figure("numa_local_over_remote", ratio);
        result.note(format!(
            "polled-remote: {REMOTE_LINES} cache lines of a packet come from another NUMA node, in \
             {REMOTE_ACCESS_NS} instead of {LOCAL_ACCESS_NS} ns; the ratio of the distances 20 and 10 \
             of Linux and ACPI"
        ));
    }
    if let Some(crossing) = config.crossing {
        result.figure("crossing_share", crossing.share);
        result.figure("crossing_ns", crossing.ns as f64);
        result.note(
            "crossing_share and crossing_ns are those of lab cores; polled-unsteered: all but one flow \
             in N pass from core to core. A crossing takes its time on the core where the packet arrives",
        );
    }
    result.columns = vec![
        "mode",
        "cores",
        "load_percent",
        "offered_pps",
        "goodput_pps",
        "card_drops_pps",
        "late_drops_pps",
        "latency_p50_us",
        "latency_p99_us",
    ];
    result.note(format!(
        "virtual time, seed {}; UDP over IPv4 on the real gate and stack, one gate and queue per \
         core, 4,096 flows spread by the NICs' hash, Poisson arrivals; {} ms after 10 ms",
        config.seed, config.window_ms
    ));
    result.note(
        "a floor is the worst goodput at any load above saturation, over the best at any load, for the worst \
         number of cores; sweep_floor is that of polled with feedback",
    );
    result.picture = Some(picture(config, &result));
    result
        .note("polled-share runs together with a compute-bound process, with a CPU share of 50 %");
    result
}

/// Highest goodput of a mode on a number of cores, in packets per second.
fn peak_pps(points: &[SweepPoint], mode: SweepMode, cores: u32) -> Option<f64> {
    let matching = points.iter().filter(|point| point.mode == mode && point.cores == cores);
    matching.map(|point| point.report.delivered_pps()).reduce(f64::max)
}

/// Floor of a mode on a number of cores; `None` if no load saturates the machine.
fn floor(points: &[SweepPoint], mode: SweepMode, cores: u32) -> Option<f64> {
    let step = |point: &SweepPoint| LoadStep {
        requested_pps: Some(point.report.offered_pps()),
        runs: vec![FloodMeasurement {
            offered_pps: point.report.offered_pps(),
            goodput_pps: point.report.delivered_pps(),
            ..FloodMeasurement::default()
        }],
    };
    let matching = points.iter().filter(|point| point.mode == mode && point.cores == cores);
    GoodputCurve { steps: matching.map(step).collect() }.floor()
}

fn row(point: &SweepPoint) -> Value {
    let report = &point.report;
    let pps = |count| report.per_second(count).round();
    let us = |quantile| report.latency_ns.value_at_quantile(quantile) as f64 / 1000.0;
    let drops: u64 = report.drops.iter().sum();
    let mut row = json!({
        "mode": point.mode.name(),
        "cores": point.cores,
        "load_percent": point.load_percent,
        "offered_pps": pps(report.offered),
        "goodput_pps": pps(report.delivered),
        "late_drops_pps": pps(drops - report.dropped(DropPoint::NicRing)),
        "idle_percent": round_to_hundredths(report.idle_percent()),
        "interrupts_per_second": pps(report.interrupts),
        "switches_per_second": pps(report.context_switches),
        "latency_p50_us": us(0.5),
        "latency_p99_us": us(0.99),
    });
    for drop_point in DropPoint::ALL {
        row[format!("{}_drops_pps", drop_point.name())] = json!(pps(report.dropped(drop_point)));
    }
    for (level, name) in
        PriorityLevel::ALL.into_iter().zip(["device", "software", "kernel", "program"])
    {
        row[format!("{name}_percent")] = json!(round_to_hundredths(report.level_percent(level)));
    }
    let background_ns: u64 = report.background.iter().map(|beside| beside.spent_ns).sum();
    row["beside_percent"] = json!(round_to_hundredths(report.percent(background_ns)));
    row
}

pub(crate) fn gate_settings(config: Config) -> Result<Settings, LabError> {
    Settings::new(config).map_err(|error| LabError::Config(error.to_string()))
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(0.0)
}

/// Draws four panels: goodput against offered load on the fewest and on the most cores, latency
/// on the fewest cores, and goodput at the highest load against cores.
fn picture(config: &SweepConfig, result: &Experiment) -> Picture {
    let min_cores = config.cores.iter().copied().min().unwrap_or(1);
    let max_cores = config.cores.iter().copied().max().unwrap_or(1);
    let max_load_percent = config.loads_percent.iter().copied().max().unwrap_or(0);
    let mut panels = vec![goodput_panel(result, min_cores)];
    if max_cores != min_cores {
        panels.push(goodput_panel(result, max_cores));
    }
    panels.push(Panel {
        title: format!("Latency on {}", cores_text(min_cores)),
        x: Axis::new("offered", "packets/s").log(),
        y: Axis::new("99th percentile", "us").log(),
        series: series_of(result, |row| row["cores"] == min_cores, "offered_pps", "latency_p99_us"),
        ..Panel::default()
    });
    if max_cores != min_cores {
        panels.push(Panel {
            title: format!("At {max_load_percent} % of the capacity"),
            x: Axis::new("cores", "").log(),
            y: Axis::new("served", "packets/s").log(),
            series: series_of(
                result,
                |row| row["load_percent"] == max_load_percent,
                "cores",
                "goodput_pps",
            ),
            ..Panel::default()
        });
    }
    Picture { title: "Every mode of the gate, simulated".to_owned(), panels }
}

fn goodput_panel(result: &Experiment, cores: u32) -> Panel {
    Panel {
        title: format!("Goodput on {}", cores_text(cores)),
        x: Axis::new("offered", "packets/s").log(),
        y: Axis::new("served", "packets/s"),
        series: series_of(result, |row| row["cores"] == cores, "offered_pps", "goodput_pps"),
        ..Panel::default()
    }
}

fn cores_text(cores: u32) -> String {
    format!("{cores} core{}", if cores == 1 { "" } else { "s" })
}

/// Returns a series for each mode, from the rows that `is_included` accepts.
fn series_of(
    result: &Experiment,
    is_included: impl Fn(&Value) -> bool,
    x: &str,
    y: &str,
) -> Vec<Series> {
    let mode_series = |mode: SweepMode| {
        let rows = result.rows.iter().filter(|row| row["mode"] == mode.name() && is_included(row));
        Series::new(mode.name(), rows.map(|row| (number(row, x), number(row, y))))
    };
    let drawn = SweepMode::ALL.into_iter().map(mode_series);
    drawn.filter(|series| !series.points.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_gives_identical_results() {
        let config = SweepConfig { window_ms: 5, ..SweepConfig::default() }.quick();
        let text = |config: &SweepConfig| serde_json::to_string(&run(config).unwrap()).unwrap();
        let first = text(&config);
        assert_eq!(first, text(&config));
        assert_ne!(
            first,
            text(&SweepConfig { seed: 2, ..config }),
            "random numbers come from the seed"
        );
    }

    #[test]
    fn feedback_holds_the_peak_and_interrupts_do_not() {
        let result = run(&SweepConfig::default().quick()).unwrap();
        assert!(result.figures["sweep_floor"] >= 0.95, "{:?}", result.figures);
        assert!(result.figures["interrupt_floor"] < 0.05, "{:?}", result.figures);
        assert!(result.figures["napi_floor"] < 0.7, "a dip lowers the floor: {:?}", result.figures);
        let picture = result.picture.expect("a picture");
        assert!(picture.to_svg().unwrap().contains("polled-feedback"));
    }

    #[test]
    fn memory_on_another_node_costs_throughput_and_no_stability() {
        let config = SweepConfig { cores: vec![1], ..SweepConfig::default().quick() };
        let figures = run(&config).unwrap().figures;
        // 200 ns more for a packet that takes between 1 and 2 us.
        let ratio = figures["numa_local_over_remote"];
        assert!((1.1..1.25).contains(&ratio), "{ratio}");
        assert!(figures["polled_remote_floor"] >= 0.95, "{figures:?}");
    }

    /// The published figure: polled with feedback keeps its peak on every number of cores.
    #[test]
    fn the_floor_holds_from_1_to_64_cores() {
        let loads_percent = vec![100, 200, 1000];
        let config = SweepConfig { window_ms: 5, loads_percent, ..SweepConfig::default() };
        let mut points = Vec::new();
        for &cores in &config.cores {
            for &load_percent in &config.loads_percent {
                let mode = SweepMode::PolledFeedback;
                let report = measure(&config, mode, cores, load_percent).unwrap();
                points.push(SweepPoint { mode, cores, load_percent, report });
            }
            let floor = floor(&points, SweepMode::PolledFeedback, cores).unwrap();
            assert!(floor >= 0.95, "{cores} cores: {floor}");
        }
    }

    #[test]
    fn measured_crossings_slow_cores_that_are_not_steered() {
        let path = std::env::temp_dir().join(format!("tidegate-cores-{}.json", std::process::id()));
        fs::write(&path, r#"{"figures": {"crossing_share": 0.0, "crossing_ns": 300.4}}"#).unwrap();
        let crossing = CrossingCost::read(&path).unwrap();
        assert_eq!(crossing, CrossingCost { share: 0.0, ns: 300 });
        fs::write(&path, r#"{"figures": {"crossing_share": 0.0}}"#).unwrap();
        let error = CrossingCost::read(&path).unwrap_err().to_string();
        assert!(error.contains("no figures crossing_share and crossing_ns"), "{error}");
        fs::remove_file(&path).unwrap();

        let config = SweepConfig { cores: vec![1, 8], window_ms: 5, ..SweepConfig::default() };
        let config = SweepConfig { loads_percent: vec![100, 300], ..config };
        let crossed = run(&SweepConfig { crossing: Some(crossing), ..config.clone() }).unwrap();
        let figures = &crossed.figures;
        assert!(figures["sweep_8_over_1"] > 7.5, "{figures:?}");
        assert!(figures["polled_unsteered_8_over_1"] < 7.0, "{figures:?}");
        assert!(!run(&config).unwrap().figures.contains_key("polled_unsteered_floor"));
    }

    #[test]
    fn rejects_invalid_core_count() {
        let config = SweepConfig { cores: vec![0], ..SweepConfig::default() };
        assert!(run(&config).unwrap_err().to_string().contains("0 cores"));
    }
}
