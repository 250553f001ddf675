//! The experiment `mlfrr`: the maximum loss-free receive rate of a server.
//!
//! Searched for the kernel's sockets and for the target in turn: on a shared
//! machine a single rate says little, and the ratio more.

pub mod search;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::cpu;
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::livelock::bench::{
    Bench, KERNEL_ADDRESS, Meter, OWN_ADDRESS, PREFIX, ReceiveWork, Receiver, Source,
};
use crate::livelock::subject::SERVICE_PORT;
use crate::load::flood::Flood;
use crate::netns;
use crate::process::Process;
pub use search::{Goal, Search};

/// How to run the experiment.
#[derive(Clone, Debug)]
pub struct MlfrrConfig {
    /// The server's command line; see [`PLACEHOLDERS`].
    pub target: String,
    /// What it is compared with.
    pub baseline: String,
    /// What is searched for.
    pub goal: Goal,
    /// The smallest load, in packets per second.
    pub min_pps: f64,
    /// The largest load; what the generator can send when absent.
    pub max_pps: Option<f64>,
    /// How often to search for both; the median of the ratios counts.
    pub repeats: usize,
    /// The core that serves.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

/// What stands for what in a command line: the interface, an address of
/// Tidegate's own, the kernel's address, both with their prefix, the core that
/// serves, the UDP port that packets go to, and the file for counters. A server
/// that keeps no counters is judged by its answers.
pub const PLACEHOLDERS: &str = "{iface} {own} {kernel} {core} {port} {counters}";

const WORK: &str = "--listen {port} --cpu {core} --sink --work-ns 500 --counters {counters}";

impl Default for MlfrrConfig {
    fn default() -> Self {
        Self {
            target: format!("tidegate serve echo --iface {{iface}} --address {{own}} {WORK}"),
            baseline: format!("tidegate serve echo --port kernel --address {{kernel}} {WORK}"),
            goal: Goal::default(),
            min_pps: 5_000.0,
            max_pps: None,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl MlfrrConfig {
    /// One short search each, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        let goal = Goal { trial_s: 0.1, duration_sum_s: 0.3, width: 0.2, ..self.goal };
        Self { goal, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let cores = cpu::cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must serve and another send; there are {cores} to choose from"
            )));
        }
        if let Some(problem) = self.goal.problem() {
            return Err(LabError::Config(problem.into()));
        }
        let most_pps = self.max_pps.unwrap_or(f64::INFINITY);
        if self.repeats == 0 || !(self.min_pps > 0.0 && self.min_pps < most_pps) {
            return Err(LabError::Config(
                "repeats are above zero, and the largest load above the smallest above zero".into(),
            ));
        }
        Ok(())
    }
}

/// A server that was started from a command line, and the flood for it.
struct Target {
    flood: Flood,
    meter: Meter,
    _process: Process,
    _folder: tempfile::TempDir,
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When there is only one core, namespaces cannot be made, a command does not
/// start or says nothing, or the flood cannot be sent.
pub fn run(config: &MlfrrConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let bench = Bench::new(config.server_core, config.load_core)?;
    let mut result = Experiment::new("mlfrr");
    describe(config, &mut result);
    let (mut ratios, mut rates) = (Vec::new(), [Vec::new(), Vec::new()]);
    for repeat in 1..=config.repeats {
        let mut found = [0.0; 2];
        let sides = [("baseline", &config.baseline), ("target", &config.target)];
        for (side, (name, line)) in sides.into_iter().enumerate() {
            let (found_pps, loads) = search_one(config, &bench, line)?;
            eprintln!("{repeat} {name:<9} {} packets/s", number(found_pps.round()));
            result.rows.push(json!({
                "repeat": repeat,
                "server": name,
                "mlfrr_per_s": found_pps.round(),
                "loads_tried": loads,
            }));
            found[side] = found_pps;
            rates[side].push(found_pps);
        }
        if found[0] > 0.0 {
            ratios.push(found[1] / found[0]);
        }
    }
    let [baseline, target] = rates.map(|rates| median(&rates));
    result.figure("baseline_mlfrr_pps", baseline.round());
    result.figure("mlfrr_pps", target.round());
    if ratios.is_empty() {
        result.note("no ratio: the baseline takes not even the smallest load");
    } else {
        result.figure("mlfrr_ratio", (median(&ratios) * 1000.0).round() / 1000.0);
    }
    Ok(result)
}

fn describe(config: &MlfrrConfig, result: &mut Experiment) {
    let (server, load, goal) = (config.server_core, config.load_core, &config.goal);
    result.note(format!("target: {}", config.target));
    result.note(format!("baseline: {}", config.baseline));
    result.note(format!(
        "core {load} sends 64-byte packets; core {server} does all the rest; a server on the \
         kernel's address is polled by a timer every 20 us, as by a card with coalescing"
    ));
    result.note(format!(
        "goal: at most {} of the packets lost in {} of {} s of trials of {} s; bounds within {}; a \
         trial ends when nothing arrives any more",
        goal.loss_ratio,
        1.0 - goal.exceed_ratio,
        goal.duration_sum_s,
        goal.trial_s,
        goal.width
    ));
}

/// Searches for one server; returns the rate, 0 for none, and how many loads
/// were tried.
fn search_one(config: &MlfrrConfig, bench: &Bench, line: &str) -> Result<(f64, usize), LabError> {
    let mut target = start(config, bench, line)?;
    let max_pps = match config.max_pps {
        Some(max_pps) => max_pps,
        None => {
            let warm_up = Duration::from_millis(50);
            let (flood, meter) = (&mut target.flood, &target.meter);
            let time = Duration::from_millis(200);
            bench.measure(flood, meter, None, warm_up, time)?.offered_pps
        }
    };
    settle(bench, &mut target)?;
    let mut search = Search::new(config.goal, config.min_pps, max_pps);
    while let Some(load_pps) = search.next_load() {
        let (loss_ratio, forwarded_pps) = trial(config, bench, &mut target, load_pps)?;
        search.record(load_pps, loss_ratio, forwarded_pps);
    }
    Ok((search.result_pps().unwrap_or(0.0), search.loads()))
}

/// Sends for the time of a trial, waits until all that was queued is served,
/// and returns the share of lost packets and the rate of the others.
fn trial(
    config: &MlfrrConfig,
    bench: &Bench,
    target: &mut Target,
    load_pps: f64,
) -> Result<(f64, f64), LabError> {
    let sent = target.flood.sent()?;
    let good = bench.good(&target.meter)?;
    target.flood.set_rate(Some(load_pps))?;
    thread::sleep(Duration::from_secs_f64(config.goal.trial_s));
    target.flood.set_rate(Some(0.0))?;
    settle(bench, target)?;
    let sent = (target.flood.sent()? - sent) as f64;
    let good = (bench.good(&target.meter)? - good) as f64;
    // A generator that did not come near the load has not tried it.
    let wanted = 0.95 * load_pps * config.goal.trial_s;
    let loss_ratio = if sent < wanted { 1.0 } else { 1.0 - (good / sent).min(1.0) };
    Ok((loss_ratio, good / config.goal.trial_s))
}

/// Waits until the server has nothing to do any more.
fn settle(bench: &Bench, target: &mut Target) -> Result<(), LabError> {
    const QUIET: Duration = Duration::from_millis(20);
    const LOOKS: usize = 100;
    target.flood.set_rate(Some(0.0))?;
    let mut before = (target.flood.sent()?, bench.good(&target.meter)?);
    for _ in 0..LOOKS {
        thread::sleep(QUIET);
        let now = (target.flood.sent()?, bench.good(&target.meter)?);
        if now == before {
            break;
        }
        before = now;
    }
    Ok(())
}

fn start(config: &MlfrrConfig, bench: &Bench, line: &str) -> Result<Target, LabError> {
    let folder =
        tempfile::tempdir().map_err(LabError::io("cannot make a folder for the counters"))?;
    let counters = folder.path().join("counters");
    let on_kernel = line.contains("{kernel}");
    let (receiver, address) = if on_kernel {
        (Receiver::Kernel, KERNEL_ADDRESS)
    } else {
        (Receiver::Server, OWN_ADDRESS)
    };
    bench.prepare(receiver)?;
    let end = &bench.pair.b;
    let words = fill_in(line, &|name| {
        Some(match name {
            "iface" => end.device.clone(),
            "own" => format!("{OWN_ADDRESS}/{PREFIX}"),
            "kernel" => format!("{KERNEL_ADDRESS}/{PREFIX}"),
            "core" => config.server_core.to_string(),
            "port" => SERVICE_PORT.to_string(),
            "counters" => counters.display().to_string(),
            _ => return None,
        })
    })?;
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| LabError::Config("the command line of the server is empty".into()))?;
    let mut command = end.namespace.command_on_core(config.server_core, program_of(program)?);
    let mut process = Process::start(program, command.args(arguments))?;
    process.wait_for_line()?;
    // With its headers and trailer, 64 bytes.
    let payload: &[u8] = &[0x7e; 18];
    let destination = SocketAddr::new(address.into(), SERVICE_PORT);
    let payloads = std::iter::repeat_n(payload, Source::OneHost.flows());
    let receive_work = if on_kernel { ReceiveWork::Timer } else { ReceiveWork::Server };
    let flood = bench.flood(Source::OneHost, destination, payloads, receive_work)?;
    let meter =
        if line.contains("{counters}") { Meter::Counters(counters) } else { Meter::Answers };
    Ok(Target { flood, meter, _process: process, _folder: folder })
}

/// `tidegate` is this program, wherever it lies.
fn program_of(name: &str) -> Result<PathBuf, LabError> {
    if name == "tidegate" {
        return std::env::current_exe().map_err(LabError::io("cannot find this program"));
    }
    Ok(PathBuf::from(name))
}

/// The words of a command line with `{name}` replaced by what `value` says.
fn fill_in(line: &str, value: &dyn Fn(&str) -> Option<String>) -> Result<Vec<String>, LabError> {
    let word = |word: &str| {
        let mut text = String::new();
        let mut rest = word;
        while let Some((before, tail)) = rest.split_once('{') {
            let (name, after) = tail.split_once('}').unwrap_or((tail, ""));
            let value = value(name).ok_or_else(|| {
                LabError::Config(format!("{word:?} in a command line: there are {PLACEHOLDERS}"))
            })?;
            text.push_str(before);
            text.push_str(&value);
            rest = after;
        }
        text.push_str(rest);
        Ok(text)
    };
    line.split_whitespace().map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_filled_in_and_unknown_ones_refused() {
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
    fn a_configuration_that_cannot_be_run_is_refused() {
        let config = MlfrrConfig::default();
        let refused = |config: MlfrrConfig| config.check().unwrap_err().to_string();
        assert!(refused(MlfrrConfig { load_core: 1, ..config.clone() }).contains("another"));
        assert!(refused(MlfrrConfig { max_pps: Some(1.0), ..config.clone() }).contains("largest"));
        let goal = Goal { width: 2.0, ..config.goal };
        assert!(refused(MlfrrConfig { goal, ..config }).contains("width"));
    }
}
