//! `lab context-switches`: context switches and interrupts that a network core saves at the same
//! throughput, after Diaz and Zabaljauregui.

use std::fs;

use serde_json::json;
use tidegate_load::{TcpLoadConfig, TcpLoadReport, load_tcp_with_hook};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_hundredths};
use crate::testbed::apps::application::Application;
use crate::testbed::apps::{
    CoreAssignment, RunningService, StackKind, check_installed, start_service,
};
use crate::testbed::cpu::{self, CoreTicks};
use crate::testbed::flood::FloodTestbed;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{TcpLabConfig, choose_cores};

/// Concurrent connections of the load.
const CONNECTIONS: usize = 50;
/// Requests per second for both stacks: few enough that redis sleeps between requests, although
/// it shares its core with the load.
const RPS: f64 = 20_000.0;

/// Counters read at one time, cumulative.
#[derive(Clone, Copy)]
struct CounterSample {
    context_switches: u64,
    interrupts: u64,
    core_ticks: CoreTicks,
    application_core_ticks: CoreTicks,
    process_ticks: u64,
}

/// Result of one run.
struct Run {
    load: TcpLoadReport,
    switches_per_s: f64,
    interrupts_per_s: f64,
    network_core_percent: f64,
    /// Busy time of the core of redis and of the load.
    application_core_percent: f64,
    server_percent: f64,
}

impl Run {
    /// Busy time of both cores for each request, in microseconds.
    fn busy_us_per_request(&self) -> f64 {
        let busy_us_per_s = (self.network_core_percent + self.application_core_percent) * 1e4;
        busy_us_per_s / self.load.requests_per_second.max(1.0)
    }
}

/// Runs redis with the receive work on a separate core: with the kernel's stack, steered to that
/// core by RPS, and with the daemon.
///
/// # Errors
/// If redis is not installed or does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    check_installed(&[Application::Redis])?;
    let (network_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(network_core, load_core)?;
    let separate_cores = CoreAssignment { application: load_core, daemon: network_core };
    let stacks = [StackKind::Kernel(ReceiveWork::Steered), StackKind::Attached];
    let mut runs: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
    let progress = Progress::new(stacks.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for (stack, runs) in stacks.into_iter().zip(&mut runs) {
            let service = start_service(&testbed, Application::Redis, stack, separate_cores, &[])?;
            let run = measure(&testbed, &service, (network_core, load_core), config.seconds)?;
            service.stop();
            progress.step(format_args!(
                "{repeat} {:<8} {:>7.0} requests/s: {:>8.0} context switches/s, {:>8.0} \
                 interrupts/s on the network core, {:.0} % of it busy",
                stack.name(),
                run.load.requests_per_second,
                run.switches_per_s,
                run.interrupts_per_s,
                run.network_core_percent
            ));
            runs.push(run);
        }
    }
    let mut result = Experiment::new("context-switches");
    conclude(stacks, &runs, &mut result);
    result.note(format!(
        "redis answers {RPS} GET/s on {CONNECTIONS} connections on core 0, which also makes the \
         load; core 1 does the network work: the kernel's receive work by RPS, or the daemon"
    ));
    result.note(
        "context switches are those of redis, of the daemon, and of the kernel's softirq threads; \
         interrupts are all those of core 1, including scheduler and timer; server_percent is the \
         processor time of redis and the daemon together",
    );
    result.note(
        "throughput and processor time of both are figures too: busy time of the same two cores for \
         each request, with that of the load, and at a rate that leaves idle time; a network core that \
         busy-polls is busy all the time",
    );
    Ok(result)
}

fn conclude(stacks: [StackKind; 2], runs: &[Vec<Run>; 2], result: &mut Experiment) {
    let of = |stack: usize, figure: fn(&Run) -> f64| median(runs[stack].iter().map(figure));
    let kernel_switches = of(0, |run| run.switches_per_s).max(1.0);
    result.figure("switch_ratio", of(1, |run| run.switches_per_s) / kernel_switches);
    let mut of_both = |name: &str, figure: fn(&Run) -> f64| {
        result.figure(name, round_to_hundredths(of(1, figure)));
        result.figure(&format!("{name}_kernel"), round_to_hundredths(of(0, figure)));
    };
    of_both("interrupts_per_s", |run| run.interrupts_per_s);
    of_both("requests_per_s", |run| run.load.requests_per_second.round());
    of_both("network_core_percent", |run| run.network_core_percent);
    of_both("application_core_percent", |run| run.application_core_percent);
    of_both("busy_us_per_request", Run::busy_us_per_request);
    for (n, stack) in stacks.iter().enumerate() {
        result.rows.push(json!({
            "way": stack.name(),
            "requests_per_second": of(n, |run| run.load.requests_per_second).round(),
            "p50_us": of(n, |run| run.load.latency.p50_us),
            "p99_us": of(n, |run| run.load.latency.p99_us),
            "switches_per_s": of(n, |run| run.switches_per_s).round(),
            "interrupts_per_s": of(n, |run| run.interrupts_per_s).round(),
            "network_core_percent": of(n, |run| run.network_core_percent),
            "application_core_percent": of(n, |run| run.application_core_percent),
            "server_percent": of(n, |run| run.server_percent),
            "busy_us_per_request": round_to_hundredths(of(n, Run::busy_us_per_request)),
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
        "application_core_percent",
        "server_percent",
        "busy_us_per_request",
    ];
}

fn measure(
    testbed: &FloodTestbed,
    service: &RunningService,
    (network_core, application_core): (usize, usize),
    seconds: f64,
) -> Result<Run, LabError> {
    let load = TcpLoadConfig {
        rate_per_second: Some(RPS),
        seconds,
        ..service.load_config(testbed, CONNECTIONS)
    };
    let processes = service.processes();
    let sample = || -> Result<CounterSample, LabError> {
        let mut process_ticks = 0;
        for &pid in &processes {
            process_ticks += cpu::process_ticks(pid)?;
        }
        Ok(CounterSample {
            context_switches: count_context_switches(&processes)?,
            interrupts: count_interrupts(network_core)?,
            core_ticks: CoreTicks::read(network_core)?,
            application_core_ticks: CoreTicks::read(application_core)?,
            process_ticks,
        })
    };
    let mut before = None;
    let (load, after) = testbed.pair.a.namespace.enter(|| {
        let load = load_tcp_with_hook(&load, || {
            before = Some(sample()?);
            Ok::<_, LabError>(())
        })?;
        Ok::<_, LabError>((load, sample()?))
    })??;
    let before = before.unwrap_or(after);
    let per_s = |after: u64, before: u64| (after - before) as f64 / load.seconds;
    Ok(Run {
        switches_per_s: per_s(after.context_switches, before.context_switches),
        interrupts_per_s: per_s(after.interrupts, before.interrupts),
        network_core_percent: after.core_ticks.since(before.core_ticks).busy_percent,
        application_core_percent: after
            .application_core_ticks
            .since(before.application_core_ticks)
            .busy_percent,
        server_percent: per_s(after.process_ticks, before.process_ticks) * 100.0
            / cpu::ticks_per_second() as f64,
        load,
    })
}

/// Context switches of the threads of these processes and of the kernel's softirq threads, since
/// each thread started.
fn count_context_switches(processes: &[u32]) -> Result<u64, LabError> {
    let mut total = 0;
    for pid in processes.iter().copied().chain(softirq_threads()) {
        let tasks = format!("/proc/{pid}/task");
        for task in fs::read_dir(&tasks).map_err(LabError::file(&tasks))?.flatten() {
            // A thread may have exited since `read_dir`.
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let counts = status.lines().filter_map(|line| line.split_once("_ctxt_switches:"));
            total += counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>();
        }
    }
    Ok(total)
}

/// Process ids of the kernel's `ksoftirqd` threads, which run deferred softirqs.
fn softirq_threads() -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.starts_with("ksoftirqd/"))
    })
    .collect()
}

/// Interrupts of a core since boot.
fn count_interrupts(core: usize) -> Result<u64, LabError> {
    let path = "/proc/interrupts";
    let text = fs::read_to_string(path).map_err(LabError::file(path))?;
    Ok(text.lines().skip(1).filter_map(|line| core_column(line, core)).sum())
}

/// Count of one core from a line of `/proc/interrupts`: name, one count per core, description.
fn core_column(line: &str, core: usize) -> Option<u64> {
    line.split_whitespace().nth(1 + core)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_throughput_and_time_of_both() {
        let run = |switches_per_s, network_core_percent| Run {
            load: TcpLoadReport { requests_per_second: 20_000.0, ..TcpLoadReport::default() },
            switches_per_s,
            interrupts_per_s: 10.0,
            network_core_percent,
            application_core_percent: 60.0,
            server_percent: 30.0,
        };
        let mut result = Experiment::new("context-switches");
        let runs = [vec![run(1_000.0, 40.0)], vec![run(100.0, 100.0)]];
        conclude(
            [StackKind::Kernel(ReceiveWork::Steered), StackKind::Attached],
            &runs,
            &mut result,
        );
        assert_eq!(result.figures["switch_ratio"], 0.1);
        assert_eq!(result.figures["busy_us_per_request"], 80.0);
        assert_eq!(result.figures["busy_us_per_request_kernel"], 50.0);
        assert_eq!(result.figures["requests_per_s_kernel"], 20_000.0);
        assert_eq!(result.rows[1]["network_core_percent"], 100.0);
    }

    #[test]
    fn reads_interrupts_from_the_column_of_the_core() {
        let line = " LOC:   123   456   Local timer interrupts";
        assert_eq!(
            (core_column(line, 0), core_column(line, 1), core_column(line, 2)),
            (Some(123), Some(456), None)
        );
        assert_eq!(core_column(" ERR:   7", 1), None);
    }

    #[test]
    fn counts_context_switches_and_interrupts() {
        assert!(count_context_switches(&[std::process::id()]).unwrap() > 0);
        assert!(count_interrupts(0).unwrap() > 0);
    }
}
