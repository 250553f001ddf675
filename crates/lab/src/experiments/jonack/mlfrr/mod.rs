//! The experiment `mlfrr`: maximum loss-free receive rate of a server.
//!
//! Searches alternate between the baseline and the target. On a shared machine the ratio says
//! more than a single rate.

pub mod search;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::json;
use tidegate_load::format_number;

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::cpu;
use crate::testbed::flood::{
    FloodSource, FloodTestbed, GoodputMeter, KERNEL_ADDRESS, PREFIX_BITS, Receiver,
    TIDEGATE_ADDRESS,
};
use crate::testbed::folder;
use crate::testbed::load::flood::Flood;
use crate::testbed::netns;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::test_case::SERVICE_PORT;
pub use search::{Search, SearchGoal};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct MlfrrConfig {
    /// Command line of the server under test; see [`PLACEHOLDERS`].
    pub target: String,
    /// Command line of the server to compare with.
    pub baseline: String,
    /// Goal of the search.
    pub goal: SearchGoal,
    /// Lowest load, in packets per second.
    pub min_pps: f64,
    /// Highest load in packets per second; default: the generator's maximum.
    pub max_pps: Option<f64>,
    /// Number of searches for each server; the median of the ratios counts.
    pub repeats: usize,
    /// The core that runs the server.
    pub server_core: usize,
    /// The core that generates the load.
    pub load_core: usize,
}

/// Placeholders in a command line: the interface, an address of Tidegate's own, the kernel's
/// address (both with prefix length), the server's core, the UDP port of the service, and the
/// file for counters. Without `{counters}`, goodput is the number of replies.
pub const PLACEHOLDERS: &str = "{iface} {own} {kernel} {core} {port} {counters}";

/// Share of a load that the generator must have made in a trial.
const MIN_SENT: f64 = 0.95;
/// Trials at a load in turn in which the generator may fall short of it.
const MAX_SHORT_TRIALS: usize = 10;

const SERVICE_FLAGS: &str =
    "--listen {port} --cpu {core} --sink --work-ns 500 --counters {counters}";

impl Default for MlfrrConfig {
    fn default() -> Self {
        Self {
            target: format!(
                "tidegate serve echo --iface {{iface}} --address {{own}} {SERVICE_FLAGS}"
            ),
            baseline: format!(
                "tidegate serve echo --io kernel --address {{kernel}} {SERVICE_FLAGS}"
            ),
            goal: SearchGoal::default(),
            min_pps: 5_000.0,
            max_pps: None,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl MlfrrConfig {
    /// One short search each, for a first impression.
    #[must_use]
    pub fn quick(self) -> Self {
        let goal = SearchGoal { trial_s: 0.1, duration_sum_s: 0.3, width: 0.2, ..self.goal };
        Self { goal, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let cores = cpu::available_cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must run the server, another the generator; {cores} available"
            )));
        }
        if let Some(problem) = self.goal.problem() {
            return Err(LabError::Config(problem.into()));
        }
        let max_pps = self.max_pps.unwrap_or(f64::INFINITY);
        if self.repeats == 0 || !(self.min_pps > 0.0 && self.min_pps < max_pps) {
            return Err(LabError::Config(
                "repeats must be above zero, and 0 < smallest load < largest load".into(),
            ));
        }
        Ok(())
    }
}

/// A server started from a command line, and the flood for it.
struct TestServer {
    flood: Flood,
    meter: GoodputMeter,
    _process: ServerProcess,
    _folder: tempfile::TempDir,
}

/// Runs the experiment. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, a command does not start or prints
/// no first line, or the flood cannot be sent.
pub fn run(config: &MlfrrConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    let mut result = Experiment::new("mlfrr");
    describe(config, &mut result);
    let (mut ratios, mut rates) = (Vec::new(), [Vec::new(), Vec::new()]);
    let progress = Progress::new(2 * config.repeats);
    for repeat in 1..=config.repeats {
        let mut results_pps = [0.0; 2];
        let sides = [("baseline", &config.baseline), ("target", &config.target)];
        for (side, (name, line)) in sides.into_iter().enumerate() {
            let (found_pps, loads) = search_server(config, &testbed, line)?;
            progress.step(format_args!(
                "{repeat} {name:<9} {} packets/s",
                format_number(found_pps.round())
            ));
            result.rows.push(json!({
                "repeat": repeat,
                "server": name,
                "mlfrr_per_s": found_pps.round(),
                "loads_tried": loads,
            }));
            results_pps[side] = found_pps;
            rates[side].push(found_pps);
        }
        if results_pps[0] > 0.0 {
            ratios.push(results_pps[1] / results_pps[0]);
        }
    }
    let [baseline, target] = rates.map(|rates| median(&rates));
    result.figure("baseline_mlfrr_pps", baseline.round());
    result.figure("mlfrr_pps", target.round());
    if ratios.is_empty() {
        result.note("no ratio: the baseline does not sustain even the smallest load");
    } else {
        result.figure("mlfrr_ratio", round_to_thousandths(median(&ratios)));
    }
    Ok(result)
}

fn describe(config: &MlfrrConfig, result: &mut Experiment) {
    let (server, load, goal) = (config.server_core, config.load_core, &config.goal);
    result.note(format!("target: {}", config.target));
    result.note(format!("baseline: {}", config.baseline));
    result.note(format!(
        "core {load} sends 64-byte packets; core {server} does all other work; a server on the \
         kernel's address is polled by a timer every 20 us, like a NIC with coalescing"
    ));
    result.note(format!(
        "goal: at most {} of the packets lost in {} of {} s of trials of {} s; bounds within {}; a \
         trial ends when the queues are empty, and is repeated if nothing was lost and less than {} \
         of the load was made",
        goal.loss_ratio,
        1.0 - goal.exceed_ratio,
        goal.duration_sum_s,
        goal.trial_s,
        goal.width,
        MIN_SENT
    ));
}

/// Searches for the rate of one server; returns the rate, 0 if there is none, and the number of
/// loads tried.
fn search_server(
    config: &MlfrrConfig,
    testbed: &FloodTestbed,
    command_line: &str,
) -> Result<(f64, usize), LabError> {
    let mut server = start_server(config, testbed, command_line)?;
    let max_pps = match config.max_pps {
        Some(max_pps) => max_pps,
        None => {
            let warm_up = Duration::from_millis(50);
            let (flood, meter) = (&mut server.flood, &server.meter);
            let time = Duration::from_millis(200);
            testbed.measure(flood, meter, None, warm_up, time)?.offered_pps
        }
    };
    wait_until_idle(testbed, &mut server)?;
    let mut search = Search::new(config.goal, config.min_pps, max_pps);
    while let Some(load_pps) = search.next_load() {
        let (loss_ratio, forwarded_pps) = run_trial(config, testbed, &mut server, load_pps)?;
        search.record(load_pps, loss_ratio, forwarded_pps);
    }
    Ok((search.result_pps().unwrap_or(0.0), search.load_count()))
}

/// Loss ratio and rate of processed packets per second of a trial at a load. A trial without loss in
/// which the generator fell short of the load says nothing and is repeated; the last one counts as
/// lost.
fn run_trial(
    config: &MlfrrConfig,
    testbed: &FloodTestbed,
    server: &mut TestServer,
    load_pps: f64,
) -> Result<(f64, f64), LabError> {
    let trial_s = config.goal.trial_s;
    let mut forwarded_pps = 0.0;
    for _ in 0..MAX_SHORT_TRIALS {
        let (sent, delivered) = offer(trial_s, testbed, server, load_pps)?;
        forwarded_pps = delivered / trial_s;
        if delivered < sent || sent >= MIN_SENT * load_pps * trial_s {
            return Ok((1.0 - (delivered / sent).min(1.0), forwarded_pps));
        }
    }
    Ok((1.0, forwarded_pps))
}

/// Offers a load for a time, waits until the queues are empty, and returns the packets sent and
/// processed.
fn offer(
    seconds: f64,
    testbed: &FloodTestbed,
    server: &mut TestServer,
    load_pps: f64,
) -> Result<(f64, f64), LabError> {
    let sent = server.flood.offered()?;
    let delivered = testbed.goodput_packets(&server.meter)?;
    server.flood.set_rate(Some(load_pps))?;
    thread::sleep(Duration::from_secs_f64(seconds));
    server.flood.set_rate(Some(0.0))?;
    wait_until_idle(testbed, server)?;
    let sent = server.flood.offered()? - sent;
    let delivered = testbed.goodput_packets(&server.meter)? - delivered;
    Ok((sent as f64, delivered as f64))
}

/// Waits until the server is idle.
fn wait_until_idle(testbed: &FloodTestbed, server: &mut TestServer) -> Result<(), LabError> {
    const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
    const MAX_SAMPLES: usize = 100;
    server.flood.set_rate(Some(0.0))?;
    let mut before = (server.flood.offered()?, testbed.goodput_packets(&server.meter)?);
    for _ in 0..MAX_SAMPLES {
        thread::sleep(SAMPLE_INTERVAL);
        let now = (server.flood.offered()?, testbed.goodput_packets(&server.meter)?);
        if now == before {
            break;
        }
        before = now;
    }
    Ok(())
}

fn start_server(
    config: &MlfrrConfig,
    testbed: &FloodTestbed,
    command_line: &str,
) -> Result<TestServer, LabError> {
    let folder = folder::private()?;
    let counters = folder.path().join("counters");
    let on_kernel = command_line.contains("{kernel}");
    let (receiver, address) = if on_kernel {
        (Receiver::Kernel, KERNEL_ADDRESS)
    } else {
        (Receiver::Server, TIDEGATE_ADDRESS)
    };
    testbed.prepare(receiver)?;
    let end = &testbed.pair.b;
    let words = fill_in(command_line, &|name| {
        Some(match name {
            "iface" => end.device.clone(),
            "own" => format!("{TIDEGATE_ADDRESS}/{PREFIX_BITS}"),
            "kernel" => format!("{KERNEL_ADDRESS}/{PREFIX_BITS}"),
            "core" => config.server_core.to_string(),
            "port" => SERVICE_PORT.to_string(),
            "counters" => counters.display().to_string(),
            _ => return None,
        })
    })?;
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| LabError::Config("the command line of the server is empty".into()))?;
    let mut command = end.namespace.command_on_core(config.server_core, executable_path(program)?);
    let mut process = ServerProcess::start(program, command.args(arguments))?;
    process.wait_for_first_line()?;
    // With headers and trailer, a frame of 64 bytes.
    let payload: &[u8] = &[0x7e; 18];
    let destination = SocketAddr::new(address.into(), SERVICE_PORT);
    let payloads = std::iter::repeat_n(payload, FloodSource::OneHost.flow_count());
    let receive_work = if on_kernel { ReceiveWork::Timer } else { ReceiveWork::Server };
    let flood = testbed.flood(FloodSource::OneHost, destination, payloads, receive_work)?;
    let meter = if command_line.contains("{counters}") {
        GoodputMeter::CounterFile(counters)
    } else {
        GoodputMeter::TransmittedFrames
    };
    Ok(TestServer { flood, meter, _process: process, _folder: folder })
}

/// Path of an executable; `tidegate` is this executable, wherever it is installed.
fn executable_path(name: &str) -> Result<PathBuf, LabError> {
    if name == "tidegate" {
        return programs::tidegate();
    }
    Ok(PathBuf::from(name))
}

/// Splits a command line into words and replaces each `{name}` by the result of `value`.
fn fill_in(
    command_line: &str,
    value: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<String>, LabError> {
    let word = |word: &str| {
        let mut text = String::new();
        let mut rest = word;
        while let Some((before, tail)) = rest.split_once('{') {
            let (name, after) = tail.split_once('}').unwrap_or((tail, ""));
            let value = value(name).ok_or_else(|| {
                LabError::Config(format!(
                    "unknown placeholder in {word:?}; available: {PLACEHOLDERS}"
                ))
            })?;
            text.push_str(before);
            text.push_str(&value);
            rest = after;
        }
        text.push_str(rest);
        Ok(text)
    };
    command_line.split_whitespace().map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_placeholders_and_rejects_unknown_names() {
        let value = |name: &str| (name == "iface").then(|| "eth0".to_owned());
        let words = fill_in("serve  --iface {iface} --x=a{iface}b{iface}", &value).unwrap();
        assert_eq!(words, ["serve", "--iface", "eth0", "--x=aeth0beth0"]);
        for bad in ["{ifcae}", "{", "{iface"] {
            let result = fill_in(bad, &value);
            assert!(
                bad == "{iface" || result.unwrap_err().to_string().contains("{iface}"),
                "{bad}"
            );
        }
    }

    #[test]
    fn rejects_invalid_configuration() {
        let config = MlfrrConfig::default();
        let check_error = |config: MlfrrConfig| config.check().unwrap_err().to_string();
        assert!(check_error(MlfrrConfig { load_core: 1, ..config.clone() }).contains("another"));
        assert!(
            check_error(MlfrrConfig { max_pps: Some(1.0), ..config.clone() }).contains("largest")
        );
        let goal = SearchGoal { width: 2.0, ..config.goal };
        assert!(check_error(MlfrrConfig { goal, ..config }).contains("width"));
    }
}
