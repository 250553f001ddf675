//! Experiment monitor: packets that a passive monitor counts, against packets offered.
//!
//! Mogul and Ramakrishnan (1996) name passive network monitoring among the applications that
//! receive livelock stops. They give no figures for it. Here the monitor, the receive work of the
//! device and a CPU-bound program share one core, and another core sends.

mod reader;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate_load::Addressing;

use self::reader::{Reader, RunningReader};
use crate::error::LabError;
use crate::experiments::goodput_curve::GoodputCurve;
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::{median, round_to_hundredths, round_to_thousandths};
use crate::testbed::cpu::{self, CoreTicks};
use crate::testbed::flood::{FloodMeasurement, FloodTestbed, LOAD_MAC, Receiver};
use crate::testbed::load::flood::{self, Flood};
use crate::testbed::netns;
use crate::testbed::process::ServerProcess;
use crate::testbed::receive_work::ReceiveWork;

/// A hardware address of no device: the kernel drops the frames after the monitor has seen them.
const OTHER_HOST_MAC: [u8; 6] = [2, 0xf1, 0x00, 0xd0, 0, 2];
const FIRST_SOURCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const TARGET: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Flows of the load, each with a frame of its own.
const FLOWS: u16 = 8192;
/// Payload of a packet: frames of 60 bytes.
const PAYLOAD: [u8; 18] = [0; 18];
/// Time after a load for frames that are on their way.
const SETTLE: Duration = Duration::from_millis(100);

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MonitorConfig {
    /// Loads to offer, in packets per second, besides the maximum.
    pub loads_pps: Vec<f64>,
    /// Duration of the measurement at each load, in seconds.
    pub seconds: f64,
    /// Number of repetitions of all measurements; the median counts.
    pub repeats: usize,
    /// Core of the monitor and of the receive work.
    pub server_core: usize,
    /// Core that sends.
    pub load_core: usize,
}

impl Default for MonitorConfig {
    fn default() -> Self {
        let kpps = [100, 200, 400, 700, 1200, 2000];
        Self {
            loads_pps: kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec(),
            seconds: 2.0,
            repeats: 3,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl MonitorConfig {
    /// Everything once and briefly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [100, 400, 1000];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.5, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        if cpu::available_cores() < 2 || self.server_core == self.load_core {
            return Err(LabError::Config("one core must monitor, another send".into()));
        }
        let is_valid = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !is_valid || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        Ok(())
    }
}

/// Measurement of a monitor under one load.
#[derive(Clone, Copy, Debug, Default)]
struct MonitorRun {
    flood: FloodMeasurement,
    /// Packets that the monitor reports as lost, per second.
    lost_pps: f64,
    /// Those of them that found the monitor's ring full, per second.
    ring_full_pps: f64,
    /// Packets that are neither counted nor reported as lost.
    lost_unnamed: i64,
    /// Processor share of the CPU-bound program, if there is one, in percent.
    program_percent: f64,
}

/// Results of one monitor.
struct ReaderResults {
    reader: Reader,
    curve: GoodputCurve,
    runs: Vec<MonitorRun>,
    /// Measurements at the maximum load beside a CPU-bound program.
    beside_program: Vec<MonitorRun>,
}

/// Runs the experiment; prints progress on standard error.
///
/// # Errors
/// With only one core; when namespaces cannot be created, a monitor is not installed or does not
/// start, or the flood cannot be sent.
pub fn run(config: &MonitorConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that has exited");
    }
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    testbed.prepare(Receiver::Kernel)?;
    let mut flood = testbed.flood_frames(&frames(), ReceiveWork::Timer)?;
    let loads = || config.loads_pps.iter().copied().map(Some).chain([None]);
    let mut results = Reader::ALL.map(|reader| ReaderResults {
        reader,
        curve: GoodputCurve::with_loads(loads()),
        runs: Vec::new(),
        beside_program: Vec::new(),
    });
    let time = Duration::from_secs_f64(config.seconds);
    let progress = Progress::new(results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for ReaderResults { reader, curve, runs, beside_program } in &mut results {
            let steps = if reader.is_curve() { &mut curve.steps[..] } else { &mut [] };
            for step in steps {
                let run = measure(&testbed, &mut flood, *reader, step.requested_pps, time, false)?;
                step.runs.push(run.flood);
                runs.push(run);
            }
            beside_program.push(measure(&testbed, &mut flood, *reader, None, time, true)?);
            progress.step(format_args!(
                "{repeat} {:<22} {} k/s",
                reader.name(),
                curve.format_last_runs()
            ));
        }
    }
    let mut result = Experiment::new("monitor");
    describe(config, &mut result);
    conclude(&results, &mut result);
    Ok(result)
}

fn frames() -> Vec<Vec<u8>> {
    let addressing = Addressing {
        source_mac: LOAD_MAC,
        target_mac: OTHER_HOST_MAC,
        source: IpAddr::V4(FIRST_SOURCE),
        source_count: FLOWS.into(),
        first_port: 20_000,
        port_count: 1,
        target: SocketAddr::new(TARGET.into(), 53),
    };
    flood::frames(&addressing, std::iter::repeat_n(&PAYLOAD[..], FLOWS.into()))
}

/// Starts a monitor, offers a load, and compares what was sent with the monitor's report.
fn measure(
    testbed: &FloodTestbed,
    flood: &mut Flood,
    reader: Reader,
    rate_pps: Option<f64>,
    time: Duration,
    beside_program: bool,
) -> Result<MonitorRun, LabError> {
    let program = if beside_program { Some(start_program(testbed)?) } else { None };
    let program_ticks = || program.as_ref().map_or(Ok(0), |one| cpu::user_ticks(one.pid()));
    let running = RunningReader::start(reader, testbed)?;
    let sent_before = flood.offered()?;
    let cores = || -> Result<_, LabError> {
        Ok((CoreTicks::read(testbed.server_core)?, CoreTicks::read(testbed.load_core)?))
    };
    let (ticks_before, cores_before, began) = (program_ticks()?, cores()?, Instant::now());
    flood.set_rate(rate_pps)?;
    thread::sleep(time);
    let (ticks, cores_after) = (program_ticks()? - ticks_before, cores()?);
    flood.set_rate(Some(0.0))?;
    let seconds = began.elapsed().as_secs_f64();
    thread::sleep(SETTLE);
    let sent = flood.offered()? - sent_before;
    let report = running.stop()?;
    let rate = |packets: u64| packets as f64 / seconds;
    Ok(MonitorRun {
        flood: FloodMeasurement {
            offered_pps: rate(sent),
            goodput_pps: rate(report.counted),
            server_core: cores_after.0.since(cores_before.0),
            load_core: cores_after.1.since(cores_before.1),
        },
        lost_pps: rate(report.lost),
        ring_full_pps: rate(report.ring_full),
        lost_unnamed: sent as i64 - (report.counted + report.lost) as i64,
        program_percent: ticks as f64 * 100.0 / cpu::ticks_per_second() as f64 / seconds,
    })
}

/// Starts a CPU-bound program on the monitor's core.
fn start_program(testbed: &FloodTestbed) -> Result<ServerProcess, LabError> {
    let mut command = testbed.pair.b.namespace.command_on_core(testbed.server_core, "sh");
    ServerProcess::start("a loop", command.args(["-c", "while :; do :; done"]))
}

fn describe(config: &MonitorConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends UDP packets of {FLOWS} flows, by an XDP program that the kernel runs, to a \
         hardware address of no device; core {server} does the receive work, in softirqs of a timer \
         that polls the veth every 20 us while it is idle, and runs the monitor"
    ));
    result.note(flood::FLOOD_NOTE);
    result.note(
        "each monitor has a ring of 8 MiB and copies the headers; what is in the ring when the load \
         ends is counted too, at most 2 % of a measurement of 2 s at 1.5 million packets/s; tcpdump \
         writes to /dev/null, the plain reader reads the TPACKET_V3 ring and counts frames, without \
         flows",
    );
    result.note(
        "a floor is the lowest rate counted at any load above saturation over the highest at any load, \
         each repetition compared with itself; monitor_lost_unnamed is the largest difference of any \
         run between packets sent and packets that Tidegate counts or reports as lost",
    );
    result.note(
        "reported_lost: by the monitor's ring, or by the receive ring of the veth, before any monitor \
         could see the packet; tcpdump does not report the latter",
    );
    result.note(
        "program_percent: user time of a CPU-bound program on the monitor's core at the maximum load; \
         `none` is without a monitor",
    );
    result.note("the paper describes the livelock of passive monitoring and gives no figures");
    result.note(format!(
        "{} measurements of {} s at each load, the monitors taking turns; medians; {} cores",
        config.repeats,
        config.seconds,
        cpu::available_cores()
    ));
}

const COLUMNS: [&str; 7] = [
    "monitor",
    "offered_per_s",
    "counted_per_s",
    "softirq_percent",
    "program_percent",
    "reported_lost_per_s",
    "of_it_ring_full_per_s",
];

fn conclude(results: &[ReaderResults], result: &mut Experiment) {
    for one in results {
        let name = one.reader.figure_name();
        if let Some(floor) = one.curve.floor() {
            result.figure(&format!("{name}_floor"), round_to_thousandths(floor));
        }
        if !one.beside_program.is_empty() {
            let percent = median(one.beside_program.iter().map(|run| run.program_percent));
            result.figure(&format!("program_percent_beside_{name}"), round_to_hundredths(percent));
        }
    }
    let at_max = |reader| {
        let found = results.iter().find(|one| one.reader == reader)?;
        Some(found.curve.goodput_at_max_load_pps())
    };
    for (figure, other) in
        [("monitor_over_tcpdump", Reader::Tcpdump), ("monitor_over_plain_reader", Reader::Plain)]
    {
        if let (Some(own), Some(other)) = (at_max(Reader::Tidegate), at_max(other)) {
            result.figure(figure, round_to_thousandths(own / other.max(1.0)));
        }
    }
    let own = results.iter().filter(|one| one.reader.is_tidegate());
    let unnamed = own.flat_map(|one| one.runs.iter().chain(&one.beside_program));
    if let Some(worst) = unnamed.map(|run| run.lost_unnamed).max_by_key(|lost| lost.abs()) {
        result.figure("monitor_lost_unnamed", worst as f64);
    }
    result.rows = results.iter().flat_map(rows).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(results));
}

fn rows(one: &ReaderResults) -> Vec<Value> {
    let loads = one.curve.steps.len();
    let at_load = |load: usize| one.runs.iter().skip(load).step_by(loads.max(1)).collect();
    let by_load = (0..loads).map(at_load).filter(|runs: &Vec<_>| !runs.is_empty());
    let row = |runs: &Vec<&MonitorRun>, beside: bool| {
        let of = |figure: fn(&MonitorRun) -> f64| median(runs.iter().map(|run| figure(run)));
        json!({
            "monitor": one.reader.name(),
            "offered_per_s": of(|run| run.flood.offered_pps).round(),
            "counted_per_s": of(|run| run.flood.goodput_pps).round(),
            "softirq_percent": of(|run| run.flood.server_core.softirq_percent).round(),
            "program_percent": beside.then(|| round_to_hundredths(of(|run| run.program_percent))),
            "reported_lost_per_s": of(|run| run.lost_pps).round(),
            "of_it_ring_full_per_s": of(|run| run.ring_full_pps).round(),
            "lost_unnamed": of(|run| run.lost_unnamed as f64),
        })
    };
    let mut rows: Vec<Value> = by_load.map(|runs| row(&runs, false)).collect();
    rows.push(row(&one.beside_program.iter().collect(), true));
    rows
}

fn picture(results: &[ReaderResults]) -> Picture {
    let curves = results.iter().filter(|one| one.reader.is_curve());
    Picture::from_panel(Panel {
        title: "Packets counted by a passive monitor".into(),
        x: Axis::new("offered", "packets/s").log(),
        y: Axis::new("counted", "packets/s"),
        series: curves.map(|one| Series::new(one.reader.name(), one.curve.points())).collect(),
        spans: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(offered_pps: f64, goodput_pps: f64, lost_unnamed: i64) -> MonitorRun {
        let flood = FloodMeasurement { offered_pps, goodput_pps, ..FloodMeasurement::default() };
        MonitorRun { flood, lost_unnamed, program_percent: 40.0, ..MonitorRun::default() }
    }

    fn results(reader: Reader, runs: &[MonitorRun]) -> ReaderResults {
        let mut curve =
            GoodputCurve::with_loads(runs.iter().map(|run| Some(run.flood.offered_pps)));
        for (step, run) in curve.steps.iter_mut().zip(runs) {
            step.runs.push(run.flood);
        }
        let beside_program = vec![run(900.0, 500.0, 0)];
        ReaderResults { reader, curve, runs: runs.to_vec(), beside_program }
    }

    #[test]
    fn figures_compare_the_maximum_load_and_find_the_worst_loss() {
        let own = [run(100.0, 100.0, 0), run(800.0, 600.0, 2), run(900.0, 576.0, -3)];
        let others = [run(100.0, 100.0, 0), run(800.0, 300.0, 9), run(900.0, 144.0, 99)];
        let all = [results(Reader::Tidegate, &own), results(Reader::Tcpdump, &others)];
        let mut result = Experiment::new("monitor");
        conclude(&all, &mut result);
        assert_eq!(result.figures["monitor_floor"], 0.96);
        assert_eq!(result.figures["tcpdump_floor"], 0.48);
        assert_eq!(result.figures["monitor_over_tcpdump"], 4.0);
        assert_eq!(result.figures["monitor_lost_unnamed"], -3.0);
        assert_eq!(result.figures["program_percent_beside_monitor"], 40.0);
        assert_eq!(result.rows.len(), 8);
        assert_eq!(result.rows[1]["counted_per_s"], 600.0);
    }

    #[test]
    fn load_has_a_flow_for_each_frame() {
        let frames = frames();
        assert_eq!(frames.len(), usize::from(FLOWS));
        assert!(frames.iter().all(|frame| frame.len() == 60));
        let distinct: std::collections::HashSet<_> = frames.iter().collect();
        assert_eq!(distinct.len(), frames.len());
    }

    #[test]
    fn rejects_invalid_configuration() {
        let default = MonitorConfig::default();
        for config in [
            MonitorConfig { load_core: 1, ..default.clone() },
            MonitorConfig { repeats: 0, ..default.clone() },
            MonitorConfig { loads_pps: vec![0.0], ..default },
        ] {
            assert!(config.check().is_err(), "{config:?}");
        }
    }
}
