//! The livelock sweep over memif: goodput of a service against the offered load, up to ten
//! times the service's capacity.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate_apps::ServeCounters;
use tidegate_device::Device;
use tidegate_load::{DeviceFlood, format_number};

use super::DpdkLabConfig;
use super::testbed::{DpdkTestbed, WireKind};
use crate::error::LabError;
use crate::experiments::goodput_curve::{GoodputCurve, LoadStep};
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::testbed::flood::FloodMeasurement;
use crate::testbed::process::ServerProcess;
use crate::testbed::test_case::{DEFAULT_MODE, MODES, SERVICE_PORT, ServiceMode};

/// Offered loads in percent of the service's capacity.
const LOADS_PERCENT: [u32; 9] = [25, 50, 75, 100, 150, 200, 300, 500, 1000];
/// Polling with turns but without feedback: shows the effect of feedback.
const POLLED_MODE: &str = "polled";
/// The modes that are compared.
const MODE_NAMES: [&str; 2] = [DEFAULT_MODE, POLLED_MODE];
/// Length of a slice in seconds. The loads take turns in slices, so that a temporary slowdown
/// of the machine affects all of them.
const SLICE_S: f64 = 0.05;
/// Slices for measuring a service's capacity; the best slice counts.
const CAPACITY_SLICES: usize = 8;
/// Warm-up time at a load before each slice.
const WARM_UP: Duration = Duration::from_millis(25);
/// UDP payload in bytes: with headers and trailer, 64-byte frames.
const PAYLOAD_BYTES: usize = 18;

/// Results of a service in one mode with a given work time per packet.
struct FloodSweep {
    mode: ServiceMode,
    work_ns: u64,
    curve: GoodputCurve,
}

impl FloodSweep {
    fn work_us(&self) -> f64 {
        self.work_ns as f64 / 1e3
    }
}

/// Sweeps every mode with every work time, and adds rows, figures and a picture.
pub(super) fn run(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let mut sweeps = Vec::new();
    for &work_ns in &config.work_ns {
        let capacity_pps = measure_capacity(testbed, work_ns)?;
        eprintln!("{work_ns} ns of work: capacity about {}/s", format_number(capacity_pps.round()));
        let loads = LOADS_PERCENT.map(|percent| Some(capacity_pps * f64::from(percent) / 100.0));
        let modes = MODES.iter().filter(|mode| MODE_NAMES.contains(&mode.name));
        sweeps.extend(modes.map(|&mode| FloodSweep {
            mode,
            work_ns,
            curve: GoodputCurve::with_loads(loads),
        }));
    }
    let progress = Progress::of_part("flood", sweeps.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for flood_sweep in &mut sweeps {
            sweep(config, testbed, flood_sweep)?;
            report_step(&progress, repeat, flood_sweep);
        }
    }
    conclude(&sweeps, result);
    Ok(())
}

/// Running service and the flood against it.
struct RunningService {
    // Dropped before the server: a flooded server may not receive its stop signal.
    flood: DeviceFlood<Box<dyn Device>>,
    counters: PathBuf,
    _server: ServerProcess,
}

impl RunningService {
    fn start(testbed: &DpdkTestbed, mode: ServiceMode, work_ns: u64) -> Result<Self, LabError> {
        let devices = testbed.new_wire(WireKind::Memif);
        let counters = testbed.folder().join("counters");
        let (work, file) = (work_ns.to_string(), counters.display().to_string());
        let mut arguments = vec!["echo", "--sink", "--work-ns", &work, "--counters", &file];
        arguments.extend(mode.flags);
        let server = testbed.start_service(&arguments, &devices.server)?;
        let load = testbed.load_config(&devices.load, SERVICE_PORT, 0.0);
        Ok(Self { flood: DeviceFlood::open(&load, PAYLOAD_BYTES)?, counters, _server: server })
    }

    fn processed_packets(&self) -> Result<u64, LabError> {
        let read = ServeCounters::read_file(&self.counters);
        Ok(read.map_err(LabError::file(&self.counters))?[0])
    }

    /// Offers a load for `time` and measures the goodput.
    fn measure(&mut self, rate_pps: f64, time: Duration) -> Result<FloodMeasurement, LabError> {
        self.flood.offer(rate_pps, WARM_UP)?;
        let (began, before) = (Instant::now(), self.processed_packets()?);
        let offered = self.flood.offer(rate_pps, time)?;
        let (seconds, after) = (began.elapsed().as_secs_f64(), self.processed_packets()?);
        Ok(FloodMeasurement {
            offered_pps: offered as f64 / seconds,
            goodput_pps: (after - before) as f64 / seconds,
            ..FloodMeasurement::default()
        })
    }
}

/// Measures the capacity of a service with this work time per packet, in packets per second:
/// the goodput of Tidegate's default mode under a much higher load.
fn measure_capacity(testbed: &DpdkTestbed, work_ns: u64) -> Result<f64, LabError> {
    let mode = MODES.iter().find(|mode| mode.name == DEFAULT_MODE).unwrap_or(&MODES[0]);
    let mut running = RunningService::start(testbed, *mode, work_ns)?;
    let overload_pps = 3e9 / (work_ns + 100) as f64;
    let mut best_pps: f64 = 0.0;
    for _ in 0..CAPACITY_SLICES {
        let measured = running.measure(overload_pps, Duration::from_secs_f64(SLICE_S))?;
        best_pps = best_pps.max(measured.goodput_pps);
    }
    if best_pps > 0.0 {
        return Ok(best_pps);
    }
    Err(LabError::Config("the flooded service on memif processed no packet".into()))
}

/// Starts a service and offers every load to it once.
fn sweep(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    flood_sweep: &mut FloodSweep,
) -> Result<(), LabError> {
    let slices = (config.seconds / SLICE_S).round().max(1.0) as usize;
    let slice = Duration::from_secs_f64(config.seconds / slices as f64);
    let mut running = RunningService::start(testbed, flood_sweep.mode, flood_sweep.work_ns)?;
    let mut runs = vec![Vec::new(); flood_sweep.curve.steps.len()];
    for _ in 0..slices {
        for (step, runs) in flood_sweep.curve.steps.iter().zip(&mut runs) {
            runs.push(running.measure(step.requested_pps.unwrap_or_default(), slice)?);
        }
    }
    for (step, runs) in flood_sweep.curve.steps.iter_mut().zip(&runs) {
        step.runs.push(FloodMeasurement::mean(runs));
    }
    Ok(())
}

fn report_step(progress: &Progress, repeat: usize, flood_sweep: &FloodSweep) {
    progress.step(format_args!(
        "{repeat} {:<16} {} us  {} k/s",
        flood_sweep.mode.name,
        flood_sweep.work_us(),
        flood_sweep.curve.format_last_runs()
    ));
}

fn conclude(sweeps: &[FloodSweep], result: &mut Experiment) {
    let of =
        |name: &'static str| sweeps.iter().filter(move |flood_sweep| flood_sweep.mode.name == name);
    let floor = |name| of(name).filter_map(|one| one.curve.floor()).reduce(f64::min);
    if let Some(floor) = floor(DEFAULT_MODE) {
        result.figure("tidegate_floor", floor);
    }
    if let Some(floor) = floor(POLLED_MODE) {
        result.figure("polled_floor", floor);
    }
    let reach = |flood_sweep: &FloodSweep| {
        let max_pps = flood_sweep.curve.points().last().map_or(0.0, |point| point.0);
        max_pps / flood_sweep.curve.best_pps().max(1.0)
    };
    if let Some(reach) = of(DEFAULT_MODE).map(reach).reduce(f64::min) {
        result.figure("flood_over_capacity", reach);
    }
    result.rows.extend(sweeps.iter().flat_map(rows));
    result.note(
        "flood: the service works a fixed time on each packet and sends no reply; goodput is the \
         rate of processed packets; every frame that counts as offered was made, and dropped by \
         the generator where the memif ring was full; tidegate_floor is the lowest goodput at any \
         load above saturation, divided by the highest at any load; polled_floor is the same \
         without feedback; flood_over_capacity is the highest load over the highest goodput",
    );
    result.picture = Some(picture(sweeps));
}

fn rows(flood_sweep: &FloodSweep) -> Vec<Value> {
    let row = |step: &LoadStep| {
        let goodput = step.runs.iter().map(|run| run.goodput_pps);
        json!({
            "part": "flood",
            "wire": WireKind::Memif.name(),
            "subject": format!("{}, {} us of work", flood_sweep.mode.name, flood_sweep.work_us()),
            "load": format!("{}/s", format_number(step.offered_pps().round())),
            "offered_per_s": step.offered_pps().round(),
            "per_second": step.goodput_pps().round(),
            "lowest": goodput.clone().fold(f64::INFINITY, f64::min).round(),
            "highest": goodput.fold(0.0, f64::max).round(),
        })
    };
    flood_sweep.curve.steps.iter().filter(|step| !step.runs.is_empty()).map(row).collect()
}

/// One panel for each work time per packet.
fn picture(sweeps: &[FloodSweep]) -> Picture {
    let mut works: Vec<f64> = sweeps.iter().map(FloodSweep::work_us).collect();
    works.dedup();
    let panel = |&work_us: &f64| Panel {
        title: format!("{work_us} us of work per packet"),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("goodput", "packets/s"),
        series: sweeps
            .iter()
            .filter(|flood_sweep| flood_sweep.work_us() == work_us)
            .map(|flood_sweep| Series::new(flood_sweep.mode.name, flood_sweep.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    let title = "Goodput against offered load over memif".into();
    Picture { title, panels: works.iter().map(panel).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep_of(name: &str, work_ns: u64, points: &[(f64, f64)]) -> FloodSweep {
        let step = |&(offered_pps, goodput_pps): &(f64, f64)| LoadStep {
            requested_pps: Some(offered_pps),
            runs: vec![FloodMeasurement {
                offered_pps,
                goodput_pps,
                ..FloodMeasurement::default()
            }],
        };
        let mode = *MODES.iter().find(|mode| mode.name == name).unwrap();
        FloodSweep {
            mode,
            work_ns,
            curve: GoodputCurve { steps: points.iter().map(step).collect() },
        }
    }

    #[test]
    fn floor_is_of_the_worst_work_time() {
        let all = [
            sweep_of(DEFAULT_MODE, 500, &[(100.0, 100.0), (1000.0, 99.0)]),
            sweep_of(POLLED_MODE, 500, &[(100.0, 80.0), (1000.0, 8.0)]),
            sweep_of(DEFAULT_MODE, 2000, &[(50.0, 50.0), (450.0, 48.0)]),
        ];
        let mut result = Experiment::new("dpdk");
        conclude(&all, &mut result);
        assert_eq!(result.figures["tidegate_floor"], 0.96);
        assert_eq!(result.figures["polled_floor"], 0.1);
        assert_eq!(result.figures["flood_over_capacity"], 9.0);
        assert_eq!(result.rows.len(), 6);
        assert_eq!(result.picture.unwrap().panels.len(), 2);
    }
}
