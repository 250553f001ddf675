//! `lab cores`: a server on one, two and more network cores, each with a receive queue of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use serde_json::{Value, json};
use tidegate_load::{LinkKind, LoadConfig, load_udp};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::cpu;
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 2);
/// Source of the load, an address that no kernel has.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 79, 1, 1);
const PORT: u16 = 7;
/// Flows of the load: many enough that the hash divides them evenly.
const FLOWS: u16 = 2_000;
const PAYLOAD_BYTES: usize = 64;
/// Time of a load before its measurement.
const WARM_UP_SECONDS: f64 = 0.3;
/// Cores from which wall-clock rates are figures: with fewer, load and servers share processors.
const MIN_CORES_FOR_RATES: usize = 4;

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
    /// One, two, four and so on, as many as the machine has processors.
    fn default() -> Self {
        let most = cpu::available_cores().max(2);
        let cores = std::iter::successors(Some(1), |cores| Some(2 * cores));
        Self { cores: cores.take_while(|&cores| cores <= most).collect(), seconds: 3.0, repeats: 5 }
    }
}

impl CoresConfig {
    /// A shorter configuration, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 1.0, repeats: 2, ..self }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Run {
    offered_pps: f64,
    answered_pps: f64,
    /// Requests answered in a second of processor time of the network cores.
    per_busy_second: f64,
    /// Frames passed from core to core, over those answered.
    crossing_share: f64,
}

/// Measures an echo server on each number of cores, in turn.
///
/// # Errors
/// If namespaces cannot be created, or a server or the load does not start.
pub fn run(config: &CoresConfig) -> Result<Experiment, LabError> {
    if config.cores.is_empty() || config.cores.contains(&0) || config.repeats == 0 {
        return Err(LabError::Config("give numbers of cores and repeats above zero".into()));
    }
    let most = config.cores.iter().copied().max().unwrap_or(1);
    let client = VethConfig { a: vec!["10.79.0.1/16".into()], b: Vec::new() };
    let pair = VethPair::with_queues(&client, most)?;
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); config.cores.len()];
    let progress = Progress::new(config.cores.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for (&cores, runs) in config.cores.iter().zip(&mut runs) {
            let run = measure(&pair, cores, config.seconds)?;
            progress.step(format_args!(
                "{repeat} {cores} cores: {:.0} answers in a busy second of {:.0} offered, {:.2} \
                 crossings each",
                run.per_busy_second, run.offered_pps, run.crossing_share
            ));
            runs.push(run);
        }
    }
    Ok(conclude(config, &runs))
}

/// Serves on `cores` network cores, with as many queues on both ends as the most that are measured.
fn measure(pair: &VethPair, cores: usize, seconds: f64) -> Result<Run, LabError> {
    let processors = cpu::available_cores();
    // The load is on processor 0, so the servers begin with the last.
    let cpus: Vec<_> =
        (0..cores).map(|core| (processors - 1 - core % processors).to_string()).collect();
    let mut command = pair.b.namespace.command(programs::tidegate()?);
    command.args(["serve", "echo", "--json", "--io", "xdp", "--iface", &pair.b.device]);
    command.args(["--listen", &PORT.to_string(), "--address", &format!("{SERVER}/16")]);
    command.args(["--cores", &cores.to_string(), "--core-cpus", &cpus.join(",")]);
    let mut server = ServerProcess::start("tidegate", &mut command)?;
    server.wait_for_first_line()?;
    let load = LoadConfig {
        interface: Some(pair.a.device.clone()),
        source: Some(CLIENT.into()),
        ports: FLOWS,
        seconds,
        warm_up_seconds: WARM_UP_SECONDS,
        core: Some(0),
        ..LoadConfig::new(LinkKind::Xdp, SocketAddr::new(SERVER.into(), PORT))
    };
    let (began, ticks) = (Instant::now(), cpu::process_ticks(server.pid())?);
    let load = pair.a.namespace.enter(|| load_udp(&load, PAYLOAD_BYTES, &mut |_| ()))??;
    let ticks = cpu::process_ticks(server.pid())? - ticks;
    let busy_seconds = ticks as f64 / cpu::ticks_per_second() as f64;
    let elapsed = began.elapsed().as_secs_f64();
    let report =
        server.stop().ok_or_else(|| LabError::Config("the server has no report".into()))?;
    let answers = report["answers"].as_f64().unwrap_or(0.0);
    let passed_on = report["cores"]
        .as_array()
        .map_or(0.0, |cores| cores.iter().filter_map(|core| core["passed_on"].as_f64()).sum());
    Ok(Run {
        offered_pps: load.result.sent_pps,
        answered_pps: answers / elapsed,
        per_busy_second: answers / busy_seconds.max(0.01),
        crossing_share: passed_on / answers.max(1.0),
    })
}

fn conclude(config: &CoresConfig, runs: &[Vec<Run>]) -> Experiment {
    let mut result = Experiment::new("cores");
    let of = |at: usize, figure: fn(&Run) -> f64| median(runs[at].iter().map(figure));
    let place = |cores: usize| config.cores.iter().position(|&known| known == cores);
    if let (Some(one), Some(two)) = (place(1), place(2)) {
        let ratio = |figure: fn(&Run) -> f64| of(two, figure) / of(one, figure).max(1.0);
        let by_busy_time = 2.0 * ratio(|run| run.per_busy_second);
        result.figure("cores_2_over_1", round_to_thousandths(by_busy_time));
        if cpu::available_cores() >= MIN_CORES_FOR_RATES {
            let by_clock = ratio(|run| run.answered_pps);
            result.figure("cores_2_over_1_by_clock", round_to_thousandths(by_clock));
        }
        let crossings = of(two, |run| run.crossing_share);
        result.figure("crossing_share", round_to_thousandths(crossings));
    }
    result.rows = (0..runs.len()).map(|at| row(config.cores[at], &of, at)).collect();
    result.note(format!(
        "UDP echo on AF_XDP over a veth of as many queues as the most cores; {FLOWS} flows of \
         {PAYLOAD_BYTES} bytes at the maximum rate of a generator on processor 0, the servers from the \
         last processor on: {} processors",
        cpu::available_cores()
    ));
    result.note(
        "the generator spreads packets over its queues without regard to flows, so that a share of \
         them crosses to the core of their flow; per_busy_second: answers over the processor time of \
         all network cores, receive work included; cores_2_over_1: twice that of two cores over that of \
         one",
    );
    result
}

fn row(cores: usize, of: &dyn Fn(usize, fn(&Run) -> f64) -> f64, at: usize) -> Value {
    json!({
        "cores": cores,
        "offered_per_s": of(at, |run| run.offered_pps).round(),
        "answered_per_s": of(at, |run| run.answered_pps).round(),
        "per_busy_second": of(at, |run| run.per_busy_second).round(),
        "crossing_share": round_to_thousandths(of(at, |run| run.crossing_share)),
    })
}
