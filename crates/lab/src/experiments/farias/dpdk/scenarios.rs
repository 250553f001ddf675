//! The echo scenarios of Farias (2023) over memif, compared with Tidegate on AF_XDP and with
//! the kernel.

use serde_json::{Value, json};
use tidegate_load::{TcpLoadReport, format_number, load_tcp};

use super::DpdkLabConfig;
use super::testbed::{DpdkTestbed, WireKind};
use crate::error::LabError;
use crate::experiments::farias::echo::{self, EchoPoint, Scenario};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;

const ECHO_PORT: u16 = 7;

struct ScenarioResults {
    scenario: Scenario,
    point: EchoPoint,
    runs: Vec<TcpLoadReport>,
}

/// Measures every point of every scenario, and adds rows.
pub(super) fn run(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let mut results: Vec<ScenarioResults> = Vec::new();
    for scenario in Scenario::ALL {
        let points = scenario.points(false);
        // One point is enough for a quick run.
        let some = if config.is_quick { &points[..1] } else { &points[..] };
        results.extend(some.iter().map(|&point| ScenarioResults {
            scenario,
            point,
            runs: Vec::new(),
        }));
    }
    let progress = Progress::of_part("scenarios", results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for point_results in &mut results {
            measure(config, testbed, point_results)?;
            if let Some(run) = point_results.runs.last() {
                progress.step(format_args!(
                    "{repeat} {:<7} {:>6} x {:>5} B: {:>9}/s, p50 {:.1} us, p95 {:.1} us",
                    point_results.scenario.name(),
                    point_results.point.connections,
                    point_results.point.bytes,
                    format_number(run.requests_per_second.round()),
                    run.latency.p50_us,
                    run.latency.p95_us
                ));
            }
        }
    }
    result.rows.extend(results.iter().map(row));
    result.note(
        "echo-throughput, echo-message-size, echo-latency: the points of these; over memif \
         the load always runs on Tidegate, while echo-latency itself puts it on kernel sockets",
    );
    Ok(())
}

fn measure(
    config: &DpdkLabConfig,
    testbed: &DpdkTestbed,
    point_results: &mut ScenarioResults,
) -> Result<(), LabError> {
    let devices = testbed.new_wire(WireKind::Memif);
    let _server = testbed.start_service(&["echo", "--tcp"], &devices.server)?;
    let mut load = testbed.tcp_load_config(&devices.load, ECHO_PORT, config.seconds);
    load.connections = point_results.point.connections;
    load.message_bytes = point_results.point.bytes;
    point_results.runs.push(load_tcp(&load)?);
    Ok(())
}

fn row(point_results: &ScenarioResults) -> Value {
    let of = |figure: fn(&TcpLoadReport) -> f64| median(point_results.runs.iter().map(figure));
    let rates = point_results.runs.iter().map(|run| run.requests_per_second);
    json!({
        "part": point_results.scenario.name(),
        "wire": WireKind::Memif.name(),
        "subject": "tidegate",
        "load": point_results.point.to_string(),
        "per_second": of(|run| run.requests_per_second).round(),
        "lowest": rates.clone().fold(f64::INFINITY, f64::min).round(),
        "highest": rates.fold(0.0, f64::max).round(),
        "p50_us": of(|run| run.latency.p50_us),
        "p99_us": of(|run| run.latency.p99_us),
    })
}

/// Measures the scenarios without DPDK and adds rows; skipped in a quick run.
pub(super) fn run_without_dpdk(
    config: &DpdkLabConfig,
    result: &mut Experiment,
) -> Result<(), LabError> {
    if config.is_quick {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        result.note("no comparison of the echo scenarios over veth: namespaces need root");
        return Ok(());
    }
    for scenario in Scenario::ALL {
        result.rows.extend(measure_over_veth(config, scenario)?);
    }
    Ok(())
}

/// Measures the points of a scenario over a veth pair and returns their rows.
fn measure_over_veth(config: &DpdkLabConfig, scenario: Scenario) -> Result<Vec<Value>, LabError> {
    let results = echo::measure_over_veth(scenario, config.seconds, config.repeats)?;
    let row = |point_results: &echo::ReferenceRow| {
        json!({
            "part": scenario.name(),
            "wire": "veth",
            "subject": point_results.server,
            "load": point_results.point.to_string(),
            "per_second": point_results.requests_per_second.round(),
            "p50_us": point_results.p50_us,
            "p99_us": point_results.p99_us,
        })
    };
    Ok(results.iter().map(row).collect())
}
