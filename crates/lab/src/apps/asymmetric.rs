//! `lab asymmetric`: what a network core saves the rest of the machine, after
//! Diaz and Zabaljauregui: context switches and interrupts at the same
//! throughput.

use std::fs;

use serde_json::json;

use super::program::Program;
use super::site::{Cores, Served, Way, check, serve};
use crate::cpu::{self, CoreTicks};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::bench::Bench;
use crate::load::{TcpLoadConfig, TcpLoadReport, load_tcp_watched};
use crate::tcp::{TcpConfig, cores, median};

/// Connections that ask.
const CONNECTIONS: usize = 50;
/// Requests per second, of both: so few that redis sleeps in between, though it
/// shares its core with the load.
const RPS: f64 = 20_000.0;

/// What was counted at one time.
#[derive(Clone, Copy)]
struct Counted {
    switches: u64,
    interrupts: u64,
    core: CoreTicks,
    ticks: u64,
}

/// What came of one run.
struct Run {
    load: TcpLoadReport,
    switches_per_s: f64,
    interrupts_per_s: f64,
    network_core_percent: f64,
    server_percent: f64,
}

/// Redis with its receive work on a core of its own: the kernel's, tuned by
/// affinity, and the daemon's.
///
/// # Errors
/// When redis is not installed or does not start.
pub fn run(config: &TcpConfig) -> Result<Experiment, LabError> {
    check(&[Program::Redis])?;
    let (network_core, load_core) = cores()?;
    let bench = Bench::new(network_core, load_core)?;
    let apart = Cores { program: load_core, daemon: network_core };
    let ways = [Way::Kernel, Way::Attached];
    let mut runs: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
    for repeat in 1..=config.repeats {
        for (way, runs) in ways.into_iter().zip(&mut runs) {
            let served = serve(&bench, Program::Redis, way, apart, &[])?;
            let run = measure(&bench, &served, network_core, config.seconds)?;
            served.stop();
            eprintln!(
                "{repeat} {:<8} {:>7.0} requests/s: {:>8.0} context switches/s, {:>8.0} \
                 interrupts/s on the network core, {:.0} % of it",
                way.name(),
                run.load.requests_per_second,
                run.switches_per_s,
                run.interrupts_per_s,
                run.network_core_percent
            );
            runs.push(run);
        }
    }
    let mut result = Experiment::new("asymmetric");
    let of = |way: usize, figure: fn(&Run) -> f64| median(runs[way].iter().map(figure));
    result
        .figure("switch_ratio", of(1, |run| run.switches_per_s) / of(0, |run| run.switches_per_s));
    result.figure("interrupts_per_s", of(1, |run| run.interrupts_per_s));
    result.figure("interrupts_per_s_kernel", of(0, |run| run.interrupts_per_s));
    for (n, way) in ways.iter().enumerate() {
        result.rows.push(json!({
            "way": way.name(),
            "requests_per_second": of(n, |run| run.load.requests_per_second).round(),
            "p50_us": of(n, |run| run.load.latency.p50_us),
            "p99_us": of(n, |run| run.load.latency.p99_us),
            "switches_per_s": of(n, |run| run.switches_per_s).round(),
            "interrupts_per_s": of(n, |run| run.interrupts_per_s).round(),
            "network_core_percent": of(n, |run| run.network_core_percent),
            "server_percent": of(n, |run| run.server_percent),
        }));
    }
    result.columns = vec![
        "way",
        "requests_per_second",
        "p50_us",
        "p99_us",
        "switches_per_s",
        "interrupts_per_s",
        "network_core_percent",
        "server_percent",
    ];
    result.note(format!(
        "redis answers {RPS} GET/s of {CONNECTIONS} connections on core 0, which also makes the \
         load; core 1 is the network's: the kernel's receive work by RPS, or the daemon"
    ));
    result.note(
        "context switches are those of redis, of the daemon, and of the kernel's softirq threads; \
         interrupts are all of core 1, the scheduler's and the timer's too; server_percent is the \
         processor time of redis and the daemon together",
    );
    Ok(result)
}

fn measure(
    bench: &Bench,
    served: &Served,
    network_core: usize,
    seconds: f64,
) -> Result<Run, LabError> {
    let load =
        TcpLoadConfig { rate_per_second: Some(RPS), seconds, ..served.load(bench, CONNECTIONS) };
    let processes = served.processes();
    let count = || -> Result<Counted, LabError> {
        let mut ticks = 0;
        for &pid in &processes {
            ticks += cpu::process_ticks(pid)?;
        }
        Ok(Counted {
            switches: switches(&processes)?,
            interrupts: interrupts(network_core)?,
            core: CoreTicks::read(network_core)?,
            ticks,
        })
    };
    let mut before = None;
    let (load, after) = bench.pair.a.namespace.enter(|| {
        let load = load_tcp_watched(&load, || {
            before = Some(count()?);
            Ok(())
        })?;
        Ok::<_, LabError>((load, count()?))
    })??;
    let before = before.unwrap_or(after);
    let per_s = |after: u64, before: u64| (after - before) as f64 / load.seconds;
    Ok(Run {
        switches_per_s: per_s(after.switches, before.switches),
        interrupts_per_s: per_s(after.interrupts, before.interrupts),
        network_core_percent: after.core.since(before.core).busy_percent,
        server_percent: per_s(after.ticks, before.ticks) * 100.0 / cpu::ticks_per_second() as f64,
        load,
    })
}

/// Context switches of these processes' threads and of the kernel's softirq
/// threads, since they began.
fn switches(processes: &[u32]) -> Result<u64, LabError> {
    let mut total = 0;
    for pid in processes.iter().copied().chain(softirq_threads()) {
        let tasks = format!("/proc/{pid}/task");
        for task in fs::read_dir(&tasks).map_err(LabError::file(&tasks))?.flatten() {
            // A thread may have ended since.
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let counts = status.lines().filter_map(|line| line.split_once("_ctxt_switches:"));
            total += counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>();
        }
    }
    Ok(total)
}

/// The kernel's threads for softirqs that were put off.
fn softirq_threads() -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.starts_with("ksoftirqd/"))
    })
    .collect()
}

/// Interrupts of a core since the machine began.
fn interrupts(core: usize) -> Result<u64, LabError> {
    let path = "/proc/interrupts";
    let text = fs::read_to_string(path).map_err(LabError::file(path))?;
    Ok(text.lines().skip(1).filter_map(|line| of_core(line, core)).sum())
}

/// A line is a name, a count for each core, and words.
fn of_core(line: &str, core: usize) -> Option<u64> {
    line.split_whitespace().nth(1 + core)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_s_interrupts_are_in_its_column() {
        let line = " LOC:   123   456   Local timer interrupts";
        assert_eq!(
            (of_core(line, 0), of_core(line, 1), of_core(line, 2)),
            (Some(123), Some(456), None)
        );
        assert_eq!(of_core(" ERR:   7", 1), None);
    }

    #[test]
    fn this_process_has_switched() {
        assert!(switches(&[std::process::id()]).unwrap() > 0);
        assert!(interrupts(0).unwrap() > 0);
    }
}
