//! The echo scenarios of Farias (2023) over memif, beside Tidegate on AF_XDP and
//! the kernel.

use serde_json::{Value, json};

use super::DpdkLabConfig;
use super::bench::{Bench, Wire};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::load::{TcpLoadReport, load_tcp};
use crate::tcp::echo::{self, Point, Scenario};

const ECHO_PORT: u16 = 7;

struct Found {
    scenario: Scenario,
    point: Point,
    runs: Vec<TcpLoadReport>,
}

/// Measures every point of every scenario, and adds rows.
pub(super) fn run(
    config: &DpdkLabConfig,
    bench: &Bench,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let mut found: Vec<Found> = Vec::new();
    for scenario in Scenario::ALL {
        let points = scenario.points(false);
        // One is enough for a first look.
        let some = if config.is_quick { &points[..1] } else { &points[..] };
        found.extend(some.iter().map(|&point| Found { scenario, point, runs: Vec::new() }));
    }
    for repeat in 1..=config.repeats {
        for one in &mut found {
            measure(config, bench, one)?;
            if let Some(run) = one.runs.last() {
                eprintln!(
                    "{repeat} {:<7} {:>6} x {:>5} B: {:>9}/s, p50 {:.1} us, p95 {:.1} us",
                    one.scenario.name(),
                    one.point.connections,
                    one.point.bytes,
                    number(run.requests_per_second.round()),
                    run.latency.p50_us,
                    run.latency.p95_us
                );
            }
        }
    }
    result.rows.extend(found.iter().map(row));
    result.note(
        "echo-1 to echo-3: the points of those experiments; over memif the load is on Tidegate \
         too, also in echo-3, where theirs is on kernel sockets",
    );
    Ok(())
}

fn measure(config: &DpdkLabConfig, bench: &Bench, one: &mut Found) -> Result<(), LabError> {
    let ends = bench.wire(Wire::Memif);
    let _server = bench.serve(&["echo", "--tcp"], &ends.server)?;
    let mut load = bench.tcp_load_config(&ends.load, ECHO_PORT, config.seconds);
    load.connections = one.point.connections;
    load.message_bytes = one.point.bytes;
    one.runs.push(load_tcp(&load)?);
    Ok(())
}

fn row(one: &Found) -> Value {
    let of = |figure: fn(&TcpLoadReport) -> f64| {
        median(&one.runs.iter().map(figure).collect::<Vec<_>>())
    };
    let rates = one.runs.iter().map(|run| run.requests_per_second);
    json!({
        "part": one.scenario.name(),
        "wire": Wire::Memif.name(),
        "subject": "tidegate",
        "load": one.point.to_string(),
        "per_second": of(|run| run.requests_per_second).round(),
        "lowest": rates.clone().fold(f64::INFINITY, f64::min).round(),
        "highest": rates.fold(0.0, f64::max).round(),
        "p50_us": of(|run| run.latency.p50_us),
        "p99_us": of(|run| run.latency.p99_us),
    })
}

/// Measures the same without DPDK, but not for a first look, and adds rows.
pub(super) fn run_beside(config: &DpdkLabConfig, result: &mut Experiment) -> Result<(), LabError> {
    if config.is_quick {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        result.note("nothing stands beside echo-1 to echo-3: namespaces need root");
        return Ok(());
    }
    for scenario in Scenario::ALL {
        result.rows.extend(beside(config, scenario)?);
    }
    Ok(())
}

/// The points of a scenario over a veth pair.
fn beside(config: &DpdkLabConfig, scenario: Scenario) -> Result<Vec<Value>, LabError> {
    let found = echo::beside(scenario, config.seconds, config.repeats)?;
    let row = |one: &echo::Beside| {
        json!({
            "part": scenario.name(),
            "wire": "veth",
            "subject": one.server,
            "load": one.point.to_string(),
            "per_second": one.requests_per_second.round(),
            "p50_us": one.p50_us,
            "p99_us": one.p99_us,
        })
    };
    Ok(found.iter().map(row).collect())
}
