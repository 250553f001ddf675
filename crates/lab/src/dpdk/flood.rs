//! The livelock sweep over memif: goodput of a service against the load that is
//! offered, up to ten times what it can do.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate_apps::ServeCounters;
use tidegate_port::Port;

use super::DpdkLabConfig;
use super::bench::{Bench, Wire};
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::livelock::Measured;
use crate::livelock::curve::{Curve, Step};
use crate::livelock::subject::{DEFAULT_MODE, MODES, Mode, SERVICE_PORT};
use crate::load::PortFlood;
use crate::plot::{Axis, Panel, Picture, Series};
use crate::process::Process;

/// The loads, in percent of what the service can do.
const LOADS_PERCENT: [u32; 9] = [25, 50, 75, 100, 150, 200, 300, 500, 1000];
/// Polling with turns alone, to see what feedback adds to it.
const PLAIN_MODE: &str = "polled";
/// The modes that are compared.
const MODE_NAMES: [&str; 2] = [DEFAULT_MODE, PLAIN_MODE];
/// The loads take turns of this length, in seconds: a machine that is slow for a
/// second is slow for all of them.
const SLICE_S: f64 = 0.05;
/// Slices that say what a service can do; the best counts.
const TRIES: usize = 8;
/// Time to settle at a load before each slice.
const WARM_UP: Duration = Duration::from_millis(25);
/// With its headers and trailer, 64 bytes.
const PAYLOAD_BYTES: usize = 18;

/// A service in one mode, with so much work for each packet.
struct Found {
    mode: Mode,
    work_ns: u64,
    curve: Curve,
}

impl Found {
    fn work_us(&self) -> f64 {
        self.work_ns as f64 / 1e3
    }
}

/// Sweeps every mode with every work, and adds rows, figures and a picture.
pub(super) fn run(
    config: &DpdkLabConfig,
    bench: &Bench,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let mut found = Vec::new();
    for &work_ns in &config.work_ns {
        let capacity_pps = capacity(bench, work_ns)?;
        eprintln!("{work_ns} ns of work: about {}/s can be done", number(capacity_pps.round()));
        let loads = LOADS_PERCENT.map(|percent| Some(capacity_pps * f64::from(percent) / 100.0));
        let modes = MODES.iter().filter(|mode| MODE_NAMES.contains(&mode.name));
        found.extend(modes.map(|&mode| Found { mode, work_ns, curve: Curve::at(loads) }));
    }
    for repeat in 1..=config.repeats {
        for one in &mut found {
            sweep(config, bench, one)?;
            tell(repeat, one);
        }
    }
    conclude(&found, result);
    Ok(())
}

/// A service that runs, and the flood that hits it.
struct Running {
    // Dropped first: a server that is flooded may not hear that it is to end.
    flood: PortFlood<Box<dyn Port>>,
    counters: PathBuf,
    _server: Process,
}

impl Running {
    fn start(bench: &Bench, mode: Mode, work_ns: u64) -> Result<Self, LabError> {
        let ends = bench.wire(Wire::Memif);
        let counters = bench.folder().join("counters");
        let (work, file) = (work_ns.to_string(), counters.display().to_string());
        let mut arguments = vec!["echo", "--sink", "--work-ns", &work, "--counters", &file];
        arguments.extend(mode.flags);
        let server = bench.serve(&arguments, &ends.server)?;
        let load = bench.load_config(&ends.load, SERVICE_PORT, 0.0);
        Ok(Self { flood: PortFlood::open(&load, PAYLOAD_BYTES)?, counters, _server: server })
    }

    fn good(&self) -> Result<u64, LabError> {
        let read = ServeCounters::read_file(&self.counters);
        Ok(read.map_err(LabError::file(&self.counters))?[0])
    }

    /// Offers a load and measures what comes of it.
    fn measure(&mut self, rate_pps: f64, time: Duration) -> Result<Measured, LabError> {
        self.flood.offer(rate_pps, WARM_UP)?;
        let (began, before) = (Instant::now(), self.good()?);
        let offered = self.flood.offer(rate_pps, time)?;
        let (seconds, after) = (began.elapsed().as_secs_f64(), self.good()?);
        Ok(Measured {
            offered_pps: offered as f64 / seconds,
            goodput_pps: (after - before) as f64 / seconds,
            ..Measured::default()
        })
    }
}

/// What a service with so much work can do: what Tidegate does when much more
/// comes.
fn capacity(bench: &Bench, work_ns: u64) -> Result<f64, LabError> {
    let mode = MODES.iter().find(|mode| mode.name == DEFAULT_MODE).unwrap_or(&MODES[0]);
    let mut running = Running::start(bench, *mode, work_ns)?;
    let too_much_pps = 3e9 / (work_ns + 100) as f64;
    let mut best_pps: f64 = 0.0;
    for _ in 0..TRIES {
        let found = running.measure(too_much_pps, Duration::from_secs_f64(SLICE_S))?;
        best_pps = best_pps.max(found.goodput_pps);
    }
    if best_pps > 0.0 {
        return Ok(best_pps);
    }
    Err(LabError::Config("a flooded service on memif does nothing".into()))
}

/// Starts a service and offers it every load once.
fn sweep(config: &DpdkLabConfig, bench: &Bench, one: &mut Found) -> Result<(), LabError> {
    let slices = (config.seconds / SLICE_S).round().max(1.0) as usize;
    let slice = Duration::from_secs_f64(config.seconds / slices as f64);
    let mut running = Running::start(bench, one.mode, one.work_ns)?;
    let mut runs = vec![Vec::new(); one.curve.steps.len()];
    for _ in 0..slices {
        for (step, runs) in one.curve.steps.iter().zip(&mut runs) {
            runs.push(running.measure(step.asked_pps.unwrap_or_default(), slice)?);
        }
    }
    for (step, runs) in one.curve.steps.iter_mut().zip(&runs) {
        step.runs.push(Measured::mean(runs));
    }
    Ok(())
}

fn tell(repeat: usize, one: &Found) {
    eprintln!("{repeat} {:<16} {} us  {} k/s", one.mode.name, one.work_us(), one.curve.last_runs());
}

fn conclude(found: &[Found], result: &mut Experiment) {
    let of = |name: &'static str| found.iter().filter(move |one| one.mode.name == name);
    let floor = |name| of(name).map(|one| one.curve.floor()).reduce(f64::min);
    if let Some(floor) = floor(DEFAULT_MODE) {
        result.figure("tidegate_floor", floor);
    }
    if let Some(floor) = floor(PLAIN_MODE) {
        result.figure("polled_floor", floor);
    }
    let reach = |one: &Found| {
        let most_pps = one.curve.points().last().map_or(0.0, |point| point.0);
        most_pps / one.curve.peak_pps().max(1.0)
    };
    if let Some(reach) = of(DEFAULT_MODE).map(reach).reduce(f64::min) {
        result.figure("flood_over_capacity", reach);
    }
    result.rows.extend(found.iter().flat_map(rows));
    result.note(
        "flood: a service that works so long on each packet and answers none; goodput is what it \
         has worked on; a frame that the memif has no room for costs nobody anything, as at a \
         card: for 40 us none are made, and those that were due count as offered; tidegate_floor \
         is the worst goodput at any load from that of the peak on over the peak, \
         polled_floor the same without feedback, flood_over_capacity the highest load over \
         the peak",
    );
    result.picture = Some(picture(found));
}

fn rows(one: &Found) -> Vec<Value> {
    let row = |step: &Step| {
        let goodput = step.runs.iter().map(|run| run.goodput_pps);
        json!({
            "part": "flood",
            "wire": Wire::Memif.name(),
            "subject": format!("{}, {} us of work", one.mode.name, one.work_us()),
            "load": format!("{}/s", number(step.offered_pps().round())),
            "offered_per_s": step.offered_pps().round(),
            "per_second": step.goodput_pps().round(),
            "lowest": goodput.clone().fold(f64::INFINITY, f64::min).round(),
            "highest": goodput.fold(0.0, f64::max).round(),
        })
    };
    one.curve.steps.iter().filter(|step| !step.runs.is_empty()).map(row).collect()
}

/// One panel for each amount of work.
fn picture(found: &[Found]) -> Picture {
    let mut works: Vec<f64> = found.iter().map(Found::work_us).collect();
    works.dedup();
    let panel = |&work_us: &f64| Panel {
        title: format!("{work_us} us of work per packet"),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("goodput", "packets/s"),
        series: found
            .iter()
            .filter(|one| one.work_us() == work_us)
            .map(|one| Series::new(one.mode.name, one.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    let title = "Goodput against offered load over memif".into();
    Picture { title, panels: works.iter().map(panel).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, work_ns: u64, points: &[(f64, f64)]) -> Found {
        let step = |&(offered_pps, goodput_pps): &(f64, f64)| Step {
            asked_pps: Some(offered_pps),
            runs: vec![Measured { offered_pps, goodput_pps, ..Measured::default() }],
        };
        let mode = *MODES.iter().find(|mode| mode.name == name).unwrap();
        Found { mode, work_ns, curve: Curve { steps: points.iter().map(step).collect() } }
    }

    #[test]
    fn the_floor_is_of_the_worst_work_and_the_load_is_seen() {
        let all = [
            found(DEFAULT_MODE, 500, &[(100.0, 100.0), (1000.0, 99.0)]),
            found(PLAIN_MODE, 500, &[(100.0, 80.0), (1000.0, 8.0)]),
            found(DEFAULT_MODE, 2000, &[(50.0, 50.0), (450.0, 48.0)]),
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
