//! The experiment `share`: what a program beside the router gets of the
//! processor.
//!
//! Figure 7-1 of Mogul and Ramakrishnan (1996): a process that only computes
//! runs on the router's core, and the load grows. Packets are held to a share;
//! what is left is the program's.

use std::fs;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::bench::{self, Bench, Running, Shape};
use crate::cpu;
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::load::flood;
use crate::netns;
use crate::plot::{Axis, Panel, Picture, Series};
use crate::process::Process;

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShareConfig {
    /// Shares of packets, in percent. 100 is no limit.
    pub shares_percent: Vec<u32>,
    /// Loads to offer, in packets per second, besides none and the maximum.
    pub loads_pps: Vec<f64>,
    /// How long to measure at each load, in seconds.
    pub seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// The core that routes and computes.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for ShareConfig {
    fn default() -> Self {
        let kpps = [10, 25, 50, 100, 200, 300, 400, 600, 800, 1200];
        Self {
            shares_percent: vec![25, 50, 75, 100],
            loads_pps: kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec(),
            seconds: 1.0,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl ShareConfig {
    /// Everything once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [50, 200, 400, 800];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.5, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let sane = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !sane || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        bench::check_cores(self.server_core, self.load_core)
    }
}

/// What was measured at one load.
#[derive(Clone, Copy, Debug, Default)]
struct Shares {
    offered_pps: f64,
    forwarded_pps: f64,
    /// What the computing process had of the core, in percent, without the
    /// interrupts that came meanwhile.
    program_percent: f64,
    /// What packets had: the router, the core's softirq thread, and interrupts.
    packets_percent: f64,
}

impl Shares {
    /// Whether packets wanted more than they were given.
    fn has_loss(&self) -> bool {
        self.forwarded_pps < (1.0 - LOSS) * self.offered_pps
    }
}

/// A loss that is not one of the counters' reading times.
const LOSS: f64 = 0.02;

/// All that was measured of one share.
struct Found {
    share_percent: u32,
    /// One list of runs for each load.
    steps: Vec<(Option<f64>, Vec<Shares>)>,
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// As [`super::run`].
pub fn run(config: &ShareConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let bench = Bench::new(config.server_core, config.load_core)?;
    let loads: Vec<Option<f64>> =
        [0.0].into_iter().chain(config.loads_pps.iter().copied()).map(Some).chain([None]).collect();
    let found = |&share_percent: &u32| {
        let steps = loads.iter().map(|&load| (load, Vec::new())).collect();
        Found { share_percent, steps }
    };
    let mut found: Vec<Found> = config.shares_percent.iter().map(found).collect();
    for repeat in 1..=config.repeats {
        for one in &mut found {
            sweep(config, &bench, one)?;
            tell(repeat, one);
        }
    }
    let mut result = Experiment::new("share");
    describe(config, &mut result);
    conclude(&found, &mut result);
    Ok(result)
}

/// Runs one router with one share beside a process that computes.
fn sweep(config: &ShareConfig, bench: &Bench, one: &mut Found) -> Result<(), LabError> {
    let time = Duration::from_secs_f64(config.seconds);
    let warm_up = Duration::from_millis(200);
    let limit = (time + warm_up) * one.steps.len() as u32 + Duration::from_secs(20);
    let share = one.share_percent.to_string();
    // The paper's quota for this experiment, by which a turn is short.
    let flags = ["--mode", "polled", "--quota", "5", "--cpu-share", &share];
    let shape = Shape { flags: flags.map(String::from).into(), interrupts: false, screen: false };
    let mut running = Running::start(&shape, bench, limit)?;
    let mut command = bench.program("timeout");
    command.args([&format!("{:.1}", limit.as_secs_f64()), "sh", "-c", "while :; do :; done"]);
    let program = Process::start("a loop", &mut command)?;
    let watched = Watched {
        router: running.pid(),
        softirqs: softirq_thread(config.server_core)?,
        program: program_under(&program)?,
    };
    for (load, runs) in &mut one.steps {
        let mut readings = Vec::new();
        let measured = running.measure(*load, warm_up, time, || {
            readings.push(watched.read()?);
            Ok(())
        })?;
        let [before, after] = readings[..] else { continue };
        let (packets_percent, program_percent) = after.since(&before);
        runs.push(Shares {
            offered_pps: measured.offered_pps,
            forwarded_pps: measured.goodput_pps,
            packets_percent,
            program_percent,
        });
    }
    Ok(())
}

/// Who runs on the router's core.
struct Watched {
    router: u32,
    softirqs: u32,
    program: u32,
}

/// What they have had of it so far, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    packets_ns: u64,
    program_ns: u64,
    /// Of the program's time, that in the kernel. A loop makes no system calls:
    /// these are the interrupts that came meanwhile, with their softirqs. The
    /// scheduler counts them as the program's.
    interrupted_ns: u64,
}

impl Watched {
    fn read(&self) -> Result<Reading, LabError> {
        Ok(Reading {
            at: Instant::now(),
            packets_ns: run_time_ns(self.router)? + run_time_ns(self.softirqs)?,
            program_ns: run_time_ns(self.program)?,
            interrupted_ns: system_time_ns(self.program)?,
        })
    }
}

impl Reading {
    /// What packets and the program had of the time from `before` to now, in
    /// percent.
    fn since(&self, before: &Self) -> (f64, f64) {
        let elapsed_ns = self.at.duration_since(before.at).as_nanos() as f64;
        let percent =
            |of: fn(&Self) -> u64| 100.0 * of(self).saturating_sub(of(before)) as f64 / elapsed_ns;
        let interrupted = percent(|reading| reading.interrupted_ns);
        let packets = percent(|reading| reading.packets_ns) + interrupted;
        (packets, percent(|reading| reading.program_ns) - interrupted)
    }
}

/// The kernel thread that does a core's softirqs when there are many.
fn softirq_thread(core: usize) -> Result<u32, LabError> {
    let name = format!("ksoftirqd/{core}");
    let processes = fs::read_dir("/proc").map_err(LabError::file("/proc"))?;
    let mut pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_it = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    pids.find(is_it).ok_or_else(|| LabError::Config(format!("there is no thread {name}")))
}

/// The process that computes: the only child of `timeout`, once it runs.
fn program_under(timeout: &Process) -> Result<u32, LabError> {
    let path = format!("/proc/{0}/task/{0}/children", timeout.pid());
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        let children = fs::read_to_string(&path).map_err(LabError::file(&path))?;
        if let Some(Ok(pid)) = children.split_whitespace().next().map(str::parse) {
            return Ok(pid);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(LabError::Config("the process that computes did not start".into()))
}

/// The time that all threads of a process were on a processor.
fn run_time_ns(pid: u32) -> Result<u64, LabError> {
    let folder = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&folder).map_err(LabError::file(&folder))?;
    let mut total_ns = 0;
    for thread in threads.flatten() {
        let path = thread.path().join("schedstat");
        let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
        let run_ns = text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        total_ns += run_ns
            .ok_or_else(|| LabError::Config(format!("{} is not as expected", path.display())))?;
    }
    Ok(total_ns)
}

/// The time that a process was in the kernel, its interrupts included.
fn system_time_ns(pid: u32) -> Result<u64, LabError> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
    // proc(5): the name in parentheses may hold anything; stime is field 15.
    let after_name = text.rsplit_once(')').map(|(_, rest)| rest);
    let ticks = after_name.and_then(|rest| rest.split_whitespace().nth(12)?.parse::<u64>().ok());
    let ticks = ticks.ok_or_else(|| LabError::Config(format!("{path} is not as expected")))?;
    Ok(ticks * 1_000_000_000 / cpu::ticks_per_second())
}

impl Found {
    /// The medians at every load.
    fn points(&self) -> Vec<Shares> {
        let of = |runs: &Vec<Shares>| {
            let middle =
                |figure: fn(&Shares) -> f64| median(&runs.iter().map(figure).collect::<Vec<_>>());
            Shares {
                offered_pps: middle(|run| run.offered_pps),
                forwarded_pps: middle(|run| run.forwarded_pps),
                program_percent: middle(|run| run.program_percent),
                packets_percent: middle(|run| run.packets_percent),
            }
        };
        let measured = self.steps.iter().map(|(_, runs)| runs).filter(|runs| !runs.is_empty());
        measured.map(of).collect()
    }

    /// Points between the share that was to be kept and the one that was, at
    /// each load. Packets may take less than their share where they need less:
    /// where all of them are forwarded.
    fn error_points(&self) -> Vec<Option<f64>> {
        let share = f64::from(self.share_percent);
        let error = |kept: &Shares| {
            let over = kept.packets_percent - share;
            if kept.has_loss() { over.abs() } else { over.max(0.0) }
        };
        let limited = self.share_percent < 100;
        self.points().iter().map(|kept| limited.then(|| error(kept))).collect()
    }
}

fn tell(repeat: usize, one: &Found) {
    let last = |(_, runs): &(Option<f64>, Vec<Shares>)| {
        let run = runs.last()?;
        let (offered, forwarded) = (run.offered_pps / 1e3, run.forwarded_pps / 1e3);
        Some(format!(
            "{}>{}:{:.0}+{:.0}%",
            number(offered.round()),
            number(forwarded.round()),
            run.packets_percent,
            run.program_percent
        ))
    };
    let steps: Vec<String> = one.steps.iter().filter_map(last).collect();
    eprintln!("{repeat} {:>3} %  {}", one.share_percent, steps.join("  "));
}

fn describe(config: &ShareConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends; core {server} routes and computes, the router before the program; \
         period 10 ms, quota 5; shares are times on the processor, from the scheduler's counters: \
         those of the router and of ksoftirqd/{server}, and of the loop's time what interrupts took, \
         are the packets'"
    ));
    result.note(flood::CARD);
    result.note(
        "share_error_max: points between the share that was set and what packets took, worst of all \
         loads and shares below 100 %; less than the share is no error where every packet was \
         forwarded",
    );
    result.note(
        "paper (Figure 7-1): 94 % for the program without load; with a limit it keeps what the \
         limit leaves, without one it gets nothing from the MLFRR on",
    );
    result.note(format!(
        "{} measurements of {} s at each load, shares taking turns; medians count; {} cores",
        config.repeats,
        config.seconds,
        cpu::cores()
    ));
}

const COLUMNS: [&str; 7] = [
    "share_percent",
    "offered_per_s",
    "forwarded_per_s",
    "packets_percent",
    "program_percent",
    "error_points",
    "paper_program_percent",
];

fn conclude(found: &[Found], result: &mut Experiment) {
    let free = found.iter().find(|one| one.share_percent >= 100);
    let errors = found.iter().flat_map(Found::error_points).flatten();
    if let Some(worst) = errors.reduce(f64::max) {
        result.figure("share_error_max", rounded(worst));
    }
    let idle = found.iter().filter_map(|one| one.points().first().map(|at| at.program_percent));
    if let Some(least) = idle.reduce(f64::min) {
        result.figure("program_percent_without_load", rounded(least));
    }
    if let Some(at) = free.and_then(|one| one.points().last().copied()) {
        result.figure("program_percent_without_limit", rounded(at.program_percent));
    }
    result.rows = found.iter().flat_map(rows).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(found));
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn rows(one: &Found) -> Vec<Value> {
    let row = |(at, error): (&Shares, Option<f64>)| {
        json!({
            "share_percent": one.share_percent,
            "offered_per_s": at.offered_pps.round(),
            "forwarded_per_s": at.forwarded_pps.round(),
            "packets_percent": rounded(at.packets_percent),
            "program_percent": rounded(at.program_percent),
            "error_points": error.map(rounded),
            "paper_program_percent": match one.share_percent {
                100 => "94 falling to 0".to_owned(),
                share => format!("94 falling to about {}", 100 - share),
            },
        })
    };
    one.points().iter().zip(one.error_points()).map(row).collect()
}

fn picture(found: &[Found]) -> Picture {
    let series = |one: &Found| {
        let points = one.points();
        let points = points.iter().map(|at| (at.offered_pps, at.program_percent));
        Series::new(format!("packets may take {} %", one.share_percent), points)
    };
    Picture::of(Panel {
        title: "What a program beside the router gets (after Figure 7-1)".into(),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("the program's share", "%").up_to(100.0),
        series: found.iter().map(series).collect(),
        spans: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(share_percent: u32, points: &[(f64, f64, f64)]) -> Found {
        let step = |&(offered_pps, forwarded_pps, packets_percent): &(f64, f64, f64)| {
            let program_percent = 100.0 - packets_percent;
            let run = Shares { offered_pps, forwarded_pps, program_percent, packets_percent };
            (Some(offered_pps), vec![run])
        };
        Found { share_percent, steps: points.iter().map(step).collect() }
    }

    #[test]
    fn too_little_counts_only_where_more_was_wanted() {
        let kept = found(25, &[(0.0, 0.0, 0.0), (100.0, 100.0, 9.0), (900.0, 200.0, 24.0)]);
        let late = found(50, &[(0.0, 0.0, 1.0), (100.0, 99.0, 10.0), (900.0, 400.0, 53.5)]);
        let free = found(100, &[(0.0, 0.0, 0.0), (100.0, 100.0, 10.0), (900.0, 800.0, 99.0)]);
        let mut result = Experiment::new("share");
        conclude(&[kept, late, free], &mut result);
        assert_eq!(result.figures["share_error_max"], 3.5);
        assert_eq!(result.figures["program_percent_without_limit"], 1.0);
        assert_eq!(result.rows.len(), 9);
        let starved = found(25, &[(900.0, 100.0, 10.0)]);
        let greedy = found(25, &[(100.0, 100.0, 32.0)]);
        for (one, error) in [(starved, 15.0), (greedy, 7.0)] {
            let mut result = Experiment::new("share");
            conclude(&[one], &mut result);
            assert_eq!(result.figures["share_error_max"], error);
        }
    }

    #[test]
    fn interrupts_are_the_packets() {
        let at = Instant::now();
        let before = Reading { at, packets_ns: 5, program_ns: 7, interrupted_ns: 1 };
        let after = Reading {
            at: at + Duration::from_millis(100),
            packets_ns: 40_000_005,
            program_ns: 60_000_007,
            interrupted_ns: 10_000_001,
        };
        let (packets, program) = after.since(&before);
        assert!((packets - 50.0).abs() < 1e-6 && (program - 50.0).abs() < 1e-6);
    }

    #[test]
    fn this_process_has_run() {
        assert!(run_time_ns(std::process::id()).unwrap() > 0);
        assert!(system_time_ns(std::process::id()).is_ok());
        assert!(system_time_ns(u32::MAX).is_err());
        assert!(softirq_thread(0).is_ok() && softirq_thread(1 << 20).is_err());
    }
}
