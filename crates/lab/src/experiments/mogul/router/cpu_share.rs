//! Experiment cpu-share: processor share of a process that runs on the router's core.
//!
//! Reproduces Figure 7-1 of Mogul and Ramakrishnan (1996): a compute-bound process runs on the
//! router's core while the load grows. Packet processing is limited to a share; the process gets
//! the rest.

use std::fs;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate_load::format_number;

use super::flood_testbed::{self, FloodTestbed, RouterSetup, RunningRouter};
use super::kernel_forwarding::KernelWay;
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::{median, round_to_hundredths};
use crate::testbed::cpu;
use crate::testbed::load::flood;
use crate::testbed::netns;
use crate::testbed::process::ServerProcess;

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CpuShareConfig {
    /// Processor shares of packet processing, in percent; 100 means no limit.
    pub shares_percent: Vec<u32>,
    /// Loads to offer, in packets per second, besides zero and the maximum.
    pub loads_pps: Vec<f64>,
    /// Duration of the measurement at each load, in seconds.
    pub seconds: f64,
    /// Number of repetitions of all measurements; the median counts.
    pub repeats: usize,
    /// Core that routes and runs the compute-bound process.
    pub server_core: usize,
    /// Core that sends.
    pub load_core: usize,
}

impl Default for CpuShareConfig {
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

impl CpuShareConfig {
    /// Reduces loads, times and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [50, 200, 400, 800];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.5, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let is_valid = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !is_valid || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        flood_testbed::check_cores(self.server_core, self.load_core)
    }
}

/// Measured rates and processor shares at one load.
#[derive(Clone, Copy, Debug, Default)]
struct CpuShares {
    offered_pps: f64,
    forwarded_pps: f64,
    /// Share of the compute-bound process in percent, without the interrupts during its time.
    process_percent: f64,
    /// Share of packet processing in percent: router, softirq thread of the core, and interrupts.
    packets_percent: f64,
}

impl CpuShares {
    /// True when packets were lost, so that packet processing needed more than its share.
    fn has_loss(&self) -> bool {
        self.forwarded_pps < (1.0 - MIN_LOSS_FRACTION) * self.offered_pps
    }
}

/// Smallest loss, as a fraction, that the counters' reading times do not explain.
const MIN_LOSS_FRACTION: f64 = 0.02;

/// Router beside the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShareCase {
    /// Tidegate, which limits packet processing to this share, in percent.
    Tidegate(u32),
    /// Linux, which limits packet processing by its softirqs and its scheduler only.
    Kernel(KernelWay),
}

impl ShareCase {
    fn name(self) -> String {
        match self {
            Self::Tidegate(percent) => format!("packet share {percent} %"),
            Self::Kernel(way) => format!("Linux forwarding, {}", way.name()),
        }
    }

    fn share_percent(self) -> Option<u32> {
        match self {
            Self::Tidegate(percent) => Some(percent),
            Self::Kernel(_) => None,
        }
    }
}

/// Results of one case.
struct ShareResults {
    case: ShareCase,
    /// One list of runs for each load.
    steps: Vec<(Option<f64>, Vec<CpuShares>)>,
}

/// Runs the experiment; prints progress on standard error.
///
/// # Errors
/// As [`super::run`].
pub fn run(config: &CpuShareConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that has exited");
    }
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    let loads: Vec<Option<f64>> =
        [0.0].into_iter().chain(config.loads_pps.iter().copied()).map(Some).chain([None]).collect();
    let new_results = |case: ShareCase| {
        let steps = loads.iter().map(|&load| (load, Vec::new())).collect();
        ShareResults { case, steps }
    };
    let shares = config.shares_percent.iter().copied().map(ShareCase::Tidegate);
    let kernel = KernelWay::ALL.into_iter().map(ShareCase::Kernel);
    let mut results: Vec<ShareResults> = shares.chain(kernel).map(new_results).collect();
    let progress = Progress::new(results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for share_results in &mut results {
            sweep(config, &testbed, share_results)?;
            report_step(&progress, repeat, share_results);
        }
    }
    let mut result = Experiment::new("cpu-share");
    describe(config, &mut result);
    conclude(&results, &mut result);
    Ok(result)
}

/// Runs one router, together with a compute-bound process.
fn sweep(
    config: &CpuShareConfig,
    testbed: &FloodTestbed,
    share_results: &mut ShareResults,
) -> Result<(), LabError> {
    let time = Duration::from_secs_f64(config.seconds);
    let warm_up = Duration::from_millis(200);
    let limit = (time + warm_up) * share_results.steps.len() as u32 + Duration::from_secs(20);
    let (mut running, mut command) = match share_results.case {
        ShareCase::Tidegate(percent) => {
            let share = percent.to_string();
            // The paper's quota for this experiment; it keeps a turn short.
            let flags = ["--mode", "polled", "--quota", "5", "--cpu-share", &share];
            let setup = RouterSetup {
                flags: flags.map(String::from).into(),
                uses_interrupts: false,
                uses_filter: false,
            };
            let running = RunningRouter::start(&setup, testbed, limit)?;
            (running, testbed.nice_command("timeout"))
        }
        // Softirq and NAPI threads have normal priority, so the process has too.
        ShareCase::Kernel(way) => {
            (RunningRouter::start_kernel(way, testbed)?, testbed.command("timeout"))
        }
    };
    command.args([&format!("{:.1}", limit.as_secs_f64()), "sh", "-c", "while :; do :; done"]);
    let busy_loop = ServerProcess::start("a loop", &mut command)?;
    let monitored = MonitoredProcesses {
        packets: running.pids().into_iter().chain([softirq_thread(config.server_core)?]).collect(),
        busy_loop: wait_for_child(&busy_loop)?,
    };
    for (load, runs) in &mut share_results.steps {
        let mut readings = Vec::new();
        let measured = running.measure(*load, warm_up, time, || {
            readings.push(monitored.read()?);
            Ok(())
        })?;
        let [before, after] = readings[..] else { continue };
        let (packets_percent, process_percent) = after.since(&before);
        runs.push(CpuShares {
            offered_pps: measured.offered_pps,
            forwarded_pps: measured.goodput_pps,
            packets_percent,
            process_percent,
        });
    }
    Ok(())
}

/// Processes that run on the router's core.
struct MonitoredProcesses {
    /// The router, or the kernel's NAPI threads, and the softirq thread of the core.
    packets: Vec<u32>,
    busy_loop: u32,
}

/// Processor time of the monitored processes so far, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct CpuTimes {
    at: Instant,
    packets_ns: u64,
    process_ns: u64,
    /// Kernel part of the process's time. A loop makes no system calls: this part is the
    /// interrupts during its time, with their softirqs. The scheduler counts them as time of
    /// the process.
    interrupt_ns: u64,
}

impl MonitoredProcesses {
    fn read(&self) -> Result<CpuTimes, LabError> {
        let mut packets_ns = 0;
        for &pid in &self.packets {
            packets_ns += run_time_ns(pid)?;
        }
        Ok(CpuTimes {
            at: Instant::now(),
            packets_ns,
            process_ns: run_time_ns(self.busy_loop)?,
            interrupt_ns: system_time_ns(self.busy_loop)?,
        })
    }
}

impl CpuTimes {
    /// Shares of packet processing and of the process in the time since `before`, in percent.
    fn since(&self, before: &Self) -> (f64, f64) {
        let elapsed_ns = self.at.duration_since(before.at).as_nanos() as f64;
        let percent =
            |of: fn(&Self) -> u64| 100.0 * of(self).saturating_sub(of(before)) as f64 / elapsed_ns;
        let interrupts = percent(|reading| reading.interrupt_ns);
        let packets = percent(|reading| reading.packets_ns) + interrupts;
        (packets, percent(|reading| reading.process_ns) - interrupts)
    }
}

/// Process identifier of the kernel thread that runs a core's softirqs under load.
fn softirq_thread(core: usize) -> Result<u32, LabError> {
    let name = format!("ksoftirqd/{core}");
    let processes = fs::read_dir("/proc").map_err(LabError::file("/proc"))?;
    let mut pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has_name = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    pids.find(has_name).ok_or_else(|| LabError::Config(format!("no kernel thread {name}")))
}

/// Waits for the compute-bound process, the only child of `timeout`, and returns its identifier.
fn wait_for_child(timeout: &ServerProcess) -> Result<u32, LabError> {
    let path = format!("/proc/{0}/task/{0}/children", timeout.pid());
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        let children = fs::read_to_string(&path).map_err(LabError::file(&path))?;
        if let Some(Ok(pid)) = children.split_whitespace().next().map(str::parse) {
            return Ok(pid);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(LabError::Config("timed out: the compute-bound process did not start".into()))
}

/// Time that all threads of a process spent on a processor.
fn run_time_ns(pid: u32) -> Result<u64, LabError> {
    let folder = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&folder).map_err(LabError::file(&folder))?;
    let mut total_ns = 0;
    for thread in threads.flatten() {
        let path = thread.path().join("schedstat");
        let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
        let run_ns = text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        total_ns += run_ns.ok_or_else(|| {
            LabError::Config(format!("{} has an unexpected format", path.display()))
        })?;
    }
    Ok(total_ns)
}

/// Time that a process spent in the kernel, including interrupts.
fn system_time_ns(pid: u32) -> Result<u64, LabError> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
    // proc(5): the name in parentheses may contain any character; stime is field 15.
    let after_name = text.rsplit_once(')').map(|(_, rest)| rest);
    let ticks = after_name.and_then(|rest| rest.split_whitespace().nth(12)?.parse::<u64>().ok());
    let ticks =
        ticks.ok_or_else(|| LabError::Config(format!("{path} has an unexpected format")))?;
    Ok(ticks * 1_000_000_000 / cpu::ticks_per_second())
}

impl ShareResults {
    /// Medians at every load.
    fn points(&self) -> Vec<CpuShares> {
        let medians = |runs: &Vec<CpuShares>| {
            let median_of = |figure: fn(&CpuShares) -> f64| median(runs.iter().map(figure));
            CpuShares {
                offered_pps: median_of(|run| run.offered_pps),
                forwarded_pps: median_of(|run| run.forwarded_pps),
                process_percent: median_of(|run| run.process_percent),
                packets_percent: median_of(|run| run.packets_percent),
            }
        };
        let measured = self.steps.iter().map(|(_, runs)| runs).filter(|runs| !runs.is_empty());
        measured.map(medians).collect()
    }

    /// Percentage points between the configured and the measured share, at each load.
    ///
    /// Packet processing may take less than its share where it needs less: where all packets are
    /// forwarded.
    fn error_points(&self) -> Vec<Option<f64>> {
        let share_percent = self.case.share_percent();
        let share = f64::from(share_percent.unwrap_or(100));
        let error = |shares: &CpuShares| {
            let excess = shares.packets_percent - share;
            if shares.has_loss() { excess.abs() } else { excess.max(0.0) }
        };
        let has_limit = share_percent.is_some_and(|percent| percent < 100);
        self.points().iter().map(|shares| has_limit.then(|| error(shares))).collect()
    }
}

fn report_step(progress: &Progress, repeat: usize, share_results: &ShareResults) {
    let last = |(_, runs): &(Option<f64>, Vec<CpuShares>)| {
        let run = runs.last()?;
        let (offered, forwarded) = (run.offered_pps / 1e3, run.forwarded_pps / 1e3);
        Some(format!(
            "{}>{}:{:.0}+{:.0}%",
            format_number(offered.round()),
            format_number(forwarded.round()),
            run.packets_percent,
            run.process_percent
        ))
    };
    let steps: Vec<String> = share_results.steps.iter().filter_map(last).collect();
    let name = share_results.case.name();
    progress.step(format_args!("{repeat} {name:<31} {}", steps.join("  ")));
}

fn describe(config: &CpuShareConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends; core {server} runs the router and, at lower priority, a compute-bound process; \
         period 10 ms, quota 5; shares are times on the processor, from the scheduler's counters: \
         those of the router and of ksoftirqd/{server}, and the interrupts during the loop's time, \
         count as packet processing"
    ));
    result.note(flood::FLOOD_NOTE);
    result.note(
        "share_error_max: percentage points between the configured and the measured share, worst of all \
         loads and shares below 100 %; less than the share is no error where every packet was \
         forwarded",
    );
    result.note(
        "paper (Figure 7-1): 94 % for the process without load; for loads the paper draws curves and says \
         only that the process gets less than the threshold suggests",
    );
    result.note(
        "Linux forwarding: ip_forward between the same devices by softirqs of a timer (kernel), NAPI \
         threads (kernel-thread), or RPS (kernel-rps); the process, the NAPI threads and ksoftirqd have \
         normal priority; program_over_kernel_at_share_N: what the process gets at the maximum load \
         beside Tidegate with this share, over the best of Linux's ways, where less than 1 % counts as \
         1 %. The rows say what each forwards meanwhile",
    );
    result.note(format!(
        "{} measurements of {} s at each load, interleaved shares; medians; {} cores",
        config.repeats,
        config.seconds,
        cpu::available_cores()
    ));
}

/// Share of the process without load in the paper, in percent.
const PAPER_IDLE_PERCENT: u32 = 94;

const COLUMNS: [&str; 7] = [
    "router",
    "offered_per_s",
    "forwarded_per_s",
    "packets_percent",
    "program_percent",
    "error_points",
    "paper_program_percent",
];

fn conclude(results: &[ShareResults], result: &mut Experiment) {
    let unlimited =
        results.iter().find(|one| one.case.share_percent().is_some_and(|percent| percent >= 100));
    let errors = results.iter().flat_map(ShareResults::error_points).flatten();
    if let Some(worst) = errors.reduce(f64::max) {
        result.figure("share_error_max", round_to_hundredths(worst));
    }
    let without_load = results
        .iter()
        .filter(|one| one.case.share_percent().is_some())
        .filter_map(|share_results| share_results.points().first().map(|at| at.process_percent));
    if let Some(min_percent) = without_load.reduce(f64::min) {
        result.figure("program_percent_without_load", round_to_hundredths(min_percent));
    }
    if let Some(at) = unlimited.and_then(|one| one.points().last().copied()) {
        result.figure("program_percent_without_limit", round_to_hundredths(at.process_percent));
    }
    conclude_kernel(results, result);
    result.rows = results.iter().flat_map(rows).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(results));
}

/// Share of the process beside Linux forwarding at the maximum load, and the ratio to it of the
/// process's share beside Tidegate with a limit.
fn conclude_kernel(results: &[ShareResults], result: &mut Experiment) {
    let at_maximum = |one: &ShareResults| one.points().last().map(|at| at.process_percent);
    let mut kernel = Vec::new();
    for one in results {
        if let (ShareCase::Kernel(way), Some(percent)) = (one.case, at_maximum(one)) {
            let name = format!("program_percent_beside_{}", way.figure_name());
            result.figure(&name, round_to_hundredths(percent));
            kernel.push((way.name().to_owned(), percent));
        }
    }
    for one in results {
        if let (Some(share @ ..100), Some(percent)) = (one.case.share_percent(), at_maximum(one)) {
            let name = format!("program_over_kernel_at_share_{share}");
            result.compare_with_kernel(&name, percent, kernel.clone());
        }
    }
}

fn rows(share_results: &ShareResults) -> Vec<Value> {
    let row = |(at, error): (&CpuShares, Option<f64>)| {
        json!({
            "router": share_results.case.name(),
            "share_percent": share_results.case.share_percent(),
            "offered_per_s": at.offered_pps.round(),
            "forwarded_per_s": at.forwarded_pps.round(),
            "packets_percent": round_to_hundredths(at.packets_percent),
            "program_percent": round_to_hundredths(at.process_percent),
            "error_points": error.map(round_to_hundredths),
            "paper_program_percent": (at.offered_pps == 0.0).then_some(PAPER_IDLE_PERCENT),
        })
    };
    share_results.points().iter().zip(share_results.error_points()).map(row).collect()
}

fn picture(results: &[ShareResults]) -> Picture {
    let series = |share_results: &ShareResults| {
        let points = share_results.points();
        let points = points.iter().map(|at| (at.offered_pps, at.process_percent));
        Series::new(share_results.case.name(), points)
    };
    Picture::from_panel(Panel {
        title: "Processor share of a process on the router's core (after Figure 7-1)".into(),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("process share", "%").up_to(100.0),
        series: results.iter().map(series).collect(),
        spans: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_results(share_percent: u32, points: &[(f64, f64, f64)]) -> ShareResults {
        let step = |&(offered_pps, forwarded_pps, packets_percent): &(f64, f64, f64)| {
            let process_percent = 100.0 - packets_percent;
            let run = CpuShares { offered_pps, forwarded_pps, process_percent, packets_percent };
            (Some(offered_pps), vec![run])
        };
        let case = ShareCase::Tidegate(share_percent);
        ShareResults { case, steps: points.iter().map(step).collect() }
    }

    #[test]
    fn less_than_the_share_is_an_error_only_under_overload() {
        let within_share =
            share_results(25, &[(0.0, 0.0, 0.0), (100.0, 100.0, 9.0), (900.0, 200.0, 24.0)]);
        let above_share =
            share_results(50, &[(0.0, 0.0, 1.0), (100.0, 99.0, 10.0), (900.0, 400.0, 53.5)]);
        let unlimited =
            share_results(100, &[(0.0, 0.0, 0.0), (100.0, 100.0, 10.0), (900.0, 800.0, 99.0)]);
        let mut result = Experiment::new("cpu-share");
        conclude(&[within_share, above_share, unlimited], &mut result);
        assert_eq!(result.figures["share_error_max"], 3.5);
        assert_eq!(result.figures["program_percent_without_limit"], 1.0);
        assert_eq!(result.rows.len(), 9);
        let starved = share_results(25, &[(900.0, 100.0, 10.0)]);
        let greedy = share_results(25, &[(100.0, 100.0, 32.0)]);
        for (share_results, error) in [(starved, 15.0), (greedy, 7.0)] {
            let mut result = Experiment::new("cpu-share");
            conclude(&[share_results], &mut result);
            assert_eq!(result.figures["share_error_max"], error);
        }
    }

    #[test]
    fn compares_what_the_process_gets_with_linux_forwarding() {
        let of_kernel = |way, packets_percent| ShareResults {
            case: ShareCase::Kernel(way),
            ..share_results(0, &[(0.0, 0.0, 0.0), (900.0, 300.0, packets_percent)])
        };
        let results = [
            share_results(50, &[(0.0, 0.0, 0.0), (900.0, 400.0, 50.0)]),
            share_results(100, &[(900.0, 800.0, 99.0)]),
            of_kernel(KernelWay::Timer, 100.0),
            of_kernel(KernelWay::Thread, 60.0),
        ];
        let mut result = Experiment::new("cpu-share");
        conclude(&results, &mut result);
        assert_eq!(result.figures["program_percent_beside_kernel"], 0.0);
        assert_eq!(result.figures["program_percent_beside_kernel_thread"], 40.0);
        assert_eq!(result.figures["program_over_kernel_at_share_50"], 1.25);
        assert_eq!(result.comparisons[0].kernel_best, "kernel-thread");
        assert_eq!(result.comparisons.len(), 1, "a share of 100 % is no limit");
        assert_eq!(result.figures["share_error_max"], 0.0);
        assert_eq!(result.rows[3]["router"], "Linux forwarding, kernel");
    }

    #[test]
    fn interrupt_time_counts_as_packet_time() {
        let at = Instant::now();
        let before = CpuTimes { at, packets_ns: 5, process_ns: 7, interrupt_ns: 1 };
        let after = CpuTimes {
            at: at + Duration::from_millis(100),
            packets_ns: 40_000_005,
            process_ns: 60_000_007,
            interrupt_ns: 10_000_001,
        };
        let (packets, program) = after.since(&before);
        assert!((packets - 50.0).abs() < 1e-6 && (program - 50.0).abs() < 1e-6);
    }

    #[test]
    fn reads_run_time_of_this_process() {
        assert!(run_time_ns(std::process::id()).unwrap() > 0);
        assert!(system_time_ns(std::process::id()).is_ok());
        assert!(system_time_ns(u32::MAX).is_err());
        assert!(softirq_thread(0).is_ok() && softirq_thread(1 << 20).is_err());
    }
}
