//! Load of packaged benchmark programs in a closed loop: redis-benchmark, memcaslap and wrk.

use std::net::SocketAddr;
use std::process::Command;

use crate::error::LabError;
use crate::testbed::apps::application::Application;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::netns::run_to_end;

/// Requests of the first run of redis-benchmark, which estimates the rate.
const PROBE_REQUESTS: u64 = 200;

/// Measures requests per second of `application` with the benchmark program for it, on the core of
/// the load. `None` if there is no such program.
pub(crate) fn measure(
    testbed: &FloodTestbed,
    application: Application,
    target: SocketAddr,
    connections: usize,
    seconds: f64,
) -> Option<Result<f64, LabError>> {
    let command = |program| testbed.pair.a.namespace.command_on_core(testbed.load_core, program);
    match application {
        Application::Redis => {
            Some(measure_redis(|| command("redis-benchmark"), target, connections, seconds))
        }
        Application::Memcached => {
            Some(measure_memcached(&mut command("memcaslap"), target, connections, seconds))
        }
        Application::Nginx | Application::Apache => {
            Some(measure_http(&mut command("wrk"), target, connections, seconds))
        }
        Application::Echo => None,
    }
}

/// redis-benchmark ends after a number of requests: a short run finds the number.
fn measure_redis(
    command: impl Fn() -> Command,
    target: SocketAddr,
    connections: usize,
    seconds: f64,
) -> Result<f64, LabError> {
    let run = |requests: u64| {
        let mut command = command();
        command.args(["-h", &target.ip().to_string(), "-p", &target.port().to_string()]);
        command.args(["-c", &connections.to_string(), "-n", &requests.to_string()]);
        let output = run_to_end(command.args(["-t", "get", "--csv"]), "redis-tools")?;
        parse_redis_rate(&output).ok_or_else(|| unknown_output("redis-benchmark", &output))
    };
    let probe_requests = PROBE_REQUESTS.max(connections as u64);
    let estimate = run(probe_requests)?;
    run(((estimate * seconds) as u64).max(probe_requests))
}

/// Nine gets and one set of values of 64 bytes.
fn measure_memcached(
    command: &mut Command,
    target: SocketAddr,
    connections: usize,
    seconds: f64,
) -> Result<f64, LabError> {
    command.args(["-s", &target.to_string(), "-T", "1", "-c", &connections.to_string()]);
    // The window is the number of values of each connection, with which the run begins.
    command.args(["-X", "64", "-w", "1k", "-t", &format!("{}s", whole_seconds(seconds))]);
    let output = run_to_end(command, "libmemcached-tools")?;
    parse_memcached_rate(&output).ok_or_else(|| unknown_output("memcaslap", &output))
}

/// Gets a file `f` with wrk, and returns the requests per second.
pub(crate) fn measure_http(
    command: &mut Command,
    target: SocketAddr,
    connections: usize,
    seconds: f64,
) -> Result<f64, LabError> {
    let seconds = whole_seconds(seconds);
    command.args(["-t", "1", "-c", &connections.to_string(), "-d", &format!("{seconds}s")]);
    let output = run_to_end(command.arg(format!("http://{target}/f")), "wrk")?;
    parse_http_rate(&output).ok_or_else(|| unknown_output("wrk", &output))
}

/// The programs count whole seconds.
pub(super) fn whole_seconds(seconds: f64) -> String {
    seconds.ceil().max(1.0).to_string()
}

fn unknown_output(program: &str, output: &str) -> LabError {
    LabError::Config(format!("the output of {program} has no rate: {output}"))
}

/// Rate in the CSV output of redis-benchmark: second column of the row `GET`.
fn parse_redis_rate(output: &str) -> Option<f64> {
    let row = output.lines().find_map(|line| line.strip_prefix("\"GET\","))?;
    row.split(',').next()?.trim_matches('"').parse().ok()
}

/// Rate in the last line of memcaslap.
fn parse_memcached_rate(output: &str) -> Option<f64> {
    let (_, rate) =
        output.lines().find(|line| line.starts_with("Run time:"))?.split_once("TPS:")?;
    rate.split_whitespace().next()?.parse().ok()
}

/// Rate in the output of wrk; `None` if responses other than 2xx or 3xx came.
fn parse_http_rate(output: &str) -> Option<f64> {
    if output.contains("Non-2xx") {
        return None;
    }
    output.lines().find_map(|line| line.strip_prefix("Requests/sec:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_rate_of_redis_benchmark() {
        let output = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"166666.67\",\"0.2\"\n";
        assert_eq!(parse_redis_rate(output), Some(166_666.67));
        assert_eq!(parse_redis_rate("Could not connect"), None);
    }

    #[test]
    fn reads_the_rate_of_memcaslap() {
        let output = "cmd_get: 32000\n\nRun time: 1.0s Ops: 37959 TPS: 37956 Net_rate: 7.6M/s\n";
        assert_eq!(parse_memcached_rate(output), Some(37_956.0));
        assert_eq!(parse_memcached_rate("SYSTEM ERROR"), None);
    }

    #[test]
    fn reads_the_rate_of_wrk_unless_responses_are_errors() {
        let output = "  95 requests in 1.10s\nRequests/sec:     86.21\nTransfer/sec: 26KB\n";
        assert_eq!(parse_http_rate(output), Some(86.21));
        let failed = format!("  Non-2xx or 3xx responses: 95\n{output}");
        assert_eq!(parse_http_rate(&failed), None);
    }
}
