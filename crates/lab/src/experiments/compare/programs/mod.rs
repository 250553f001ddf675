//! `lab programs`: unmodified programs on the kernel's best way, embedded, and attached to a daemon
//! on the same core, under loads of programs that others wrote.

mod load;

use serde_json::json;

use self::load::{FIXED_RPS, Load, ProgramRun};
use crate::error::LabError;
use crate::experiments::packaged_program::ProgramResults;
use crate::report::experiment::{Experiment, KernelRows};
use crate::report::progress::Progress;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::{StackKind, check_installed};
use crate::testbed::flood::FloodTestbed;
use crate::testbed::tcp::{TcpLabConfig, choose_cores};

/// One load and its measurements on each stack.
struct Case {
    load: Load,
    results: ProgramResults<ProgramRun>,
}

/// Runs redis, memcached, nginx and the server of sockperf on the kernel's stack, embedded, and
/// attached to the daemon.
///
/// # Errors
/// If a program is not installed or does not start.
pub fn run(config: &TcpLabConfig, quick: bool) -> Result<Experiment, LabError> {
    check_installed(&Application::PACKAGES)?;
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    let measure = |load: Load, stack: StackKind, progress: &Progress| {
        let run = load.measure(&testbed, stack, config.seconds)?;
        progress.step(format_args!("{:<36} {:<16} {run}", load.to_string(), stack.name()));
        Ok(run)
    };
    let loads = Load::all(quick);
    let steps = loads.len() * ProgramResults::<ProgramRun>::first_pass_steps();
    let progress = Progress::of_part("first pass", steps);
    let mut cases = Vec::new();
    for load in loads {
        let (goal, figure) = load.goal();
        let measure = |stack| measure(load, stack, &progress);
        cases.push(Case { load, results: ProgramResults::choose_kernel(goal, figure, measure)? });
    }
    drop(progress);
    let rows = cases.iter().map(|case| case.results.rows().len()).sum::<usize>();
    let progress = Progress::new(rows * config.repeats);
    for _ in 0..config.repeats {
        for Case { load, results } in &mut cases {
            results.measure(|stack| measure(*load, stack, &progress))?;
        }
    }
    Ok(report(config, &cases))
}

/// The worst ratio of `of` on `stack` to the kernel's best, of the loads that `is_included`: the
/// lowest if more is better, else the highest. With the figures of the kernel's ways.
fn worst_ratio(
    cases: &[Case],
    stack: StackKind,
    of: fn(&ProgramRun) -> f64,
    more_is_better: bool,
    is_included: fn(Load) -> bool,
) -> Option<(f64, KernelRows)> {
    let included = cases.iter().filter(|case| is_included(case.load));
    let ratios = included.map(|case| (case, case.results.ratio(stack, of)));
    let worst = ratios.reduce(|worst, other| {
        let is_worse = if more_is_better { other.1 < worst.1 } else { other.1 > worst.1 };
        if is_worse { other } else { worst }
    });
    worst.map(|(case, ratio)| (ratio, case.results.kernel_rows()))
}

fn report(config: &TcpLabConfig, cases: &[Case]) -> Experiment {
    let mut result = Experiment::new("programs");
    let is_closed: fn(Load) -> bool = |load| matches!(load, Load::ClosedLoop { .. });
    let has_cpu: fn(Load) -> bool = |load| load.counts_cpu();
    for stack in [StackKind::Embedded, StackKind::Attached] {
        let name = stack.name();
        let rate: fn(&ProgramRun) -> f64 = |run| run.requests_per_second;
        let cpu: fn(&ProgramRun) -> f64 = |run| run.cpu_us_per_request;
        let p50: fn(&ProgramRun) -> f64 = |run| run.p50_us;
        let worst = |of, more_is_better, is_included: fn(Load) -> bool| {
            worst_ratio(cases, stack, of, more_is_better, is_included)
        };
        let cpu = worst(cpu, false, has_cpu);
        let cpu = cpu.map(|(ratio, kernel)| (ratio, kernel.for_other_figure()));
        // The processor of the network core is the program's own only when attached.
        let suffix = if stack == StackKind::Attached { "" } else { "_embedded" };
        let comparisons = [
            (format!("{name}_ratio_min"), worst(rate, true, is_closed)),
            (format!("cpu_per_request_ratio_{name}"), cpu),
            (format!("{name}_p50_ratio"), worst(p50, false, |load| load == Load::Messages)),
            (
                format!("spin_p50_ratio{suffix}"),
                worst(p50, false, |load| load == Load::BusyWaitingServer),
            ),
        ];
        for (figure, worst) in comparisons {
            if let Some((ratio, kernel)) = worst {
                result.compare_with_best(&figure, ratio, kernel);
            }
        }
    }
    result.rows = cases.iter().flat_map(rows).collect();
    result.columns = vec![
        "program",
        "load",
        "connections",
        "way",
        "requests_per_second",
        "spread_percent",
        "ratio",
        "p50_us",
        "p99_us",
        "cpu_us_per_request",
        "cpu_ratio",
    ];
    result.note(format!(
        "Debian's packages with default flags, one process and one thread, 64-byte values; the \
         program, its stack and the daemon on core 1, the load on kernel sockets on core 0; the \
         kernel's best way by the same load in a first pass, measured again in turn; medians of {}; \
         spread: largest less smallest of all repetitions, in percent of the median",
        config.repeats
    ));
    result.note(
        "closed loop: redis-benchmark, memcaslap (nine gets, one set, 64 bytes) and wrk, each with \
         one thread and a request in flight on each connection; attached_ratio_min and \
         embedded_ratio_min: requests/s over the kernel's best, the worst of all programs and numbers \
         of connections",
    );
    result.note(format!(
        "{FIXED_RPS:.0} requests/s: redis, memcached and nginx by the generator of Tidegate in an \
         open loop on kernel sockets, 16 connections; sockperf (under-load, a reply to each message, \
         one connection): attached_p50_ratio, embedded_p50_ratio; both sides sleep while idle"
    ));
    result.note(
        "sockperf with a server that busy-waits (--nonblocked), ping-pong on one connection: \
         spin_p50_ratio (attached), spin_p50_ratio_embedded",
    );
    result.note(
        "cpu_us_per_request: time of core 1 that is neither idle nor stolen, and of softirqs on core 0, \
         over the requests; on core 0 the client's own softirqs count for every way; \
         cpu_per_request_ratio_*: over the kernel's, the worst of all loads with requests",
    );
    result
}

fn rows(case: &Case) -> impl Iterator<Item = serde_json::Value> {
    let Case { load, results } = case;
    results.rows().iter().map(|row| {
        let measured = |of: fn(&ProgramRun) -> f64| {
            let median = row.median(of);
            (!median.is_nan()).then_some(median)
        };
        let (_, figure) = load.goal();
        let ratio = |of: fn(&ProgramRun) -> f64| results.ratio(row.stack, of);
        json!({
            "program": load.program(),
            "load": load.name(),
            "connections": load.connections(),
            "way": row.stack.name(),
            "requests_per_second": measured(|run| run.requests_per_second).map(f64::round),
            "spread_percent": row.spread_percent(figure),
            "ratio": ratio(figure),
            "p50_us": measured(|run| run.p50_us),
            "p99_us": measured(|run| run.p99_us),
            "cpu_us_per_request": measured(|run| run.cpu_us_per_request),
            "cpu_ratio": load.counts_cpu().then(|| ratio(|run| run.cpu_us_per_request)),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A case whose program serves `rate` on the kernel, and `factor` times as much on Tidegate.
    fn case(load: Load, rate: f64, factor: f64) -> Case {
        let run = |stack: StackKind| {
            let factor = if stack.is_kernel() { 1.0 } else { factor };
            let requests_per_second = rate * factor;
            Ok(ProgramRun {
                requests_per_second,
                cpu_us_per_request: factor,
                ..ProgramRun::NOTHING
            })
        };
        let (goal, figure) = load.goal();
        let mut results = ProgramResults::choose_kernel(goal, figure, run).unwrap();
        results.measure(run).unwrap();
        Case { load, results }
    }

    #[test]
    fn figures_are_the_worst_of_all_loads() {
        let closed = |application, connections| Load::ClosedLoop { application, connections };
        let cases = [
            case(closed(Application::Redis, 1), 100.0, 2.0),
            case(closed(Application::Nginx, 64), 700.0, 0.5),
            // Its rate is fixed.
            case(Load::FixedRate(Application::Redis), 20.0, 0.25),
        ];
        let result = report(&TcpLabConfig::default(), &cases);
        assert_eq!(result.figures["attached_ratio_min"], 0.5);
        assert_eq!(result.figures["cpu_per_request_ratio_embedded"], 2.0);
        let comparison =
            result.comparisons.iter().find(|one| one.figure == "embedded_ratio_min").unwrap();
        assert_eq!(comparison.kernel_rows[&comparison.kernel_best], 700.0);
        let row = &result.rows[4];
        assert_eq!((&row["program"], &row["way"]), (&json!("nginx"), &json!("embedded")));
        assert_eq!((&row["ratio"], &row["p50_us"]), (&json!(0.5), &json!(null)));
    }
}
