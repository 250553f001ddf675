//! Packaged programs that measure between a client and a server of their own: iperf3 and sockperf.
//! The client is on kernel sockets on the core of the load, the server is unmodified on any stack.

use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::packaged_load::whole_seconds;
use super::{ProgramStack, StackKind};
use crate::error::LabError;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::netns::{output, run_to_end};
use crate::testbed::process::ServerProcess;

const IPERF3_PORT: u16 = 5201;
const SOCKPERF_PORT: u16 = 11_111;
/// Maximum time of an attempt to connect: the server's address does not exist before the server.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);
/// Time for which a client tries again. After a connection without a test iperf3 opens a new
/// listener, and refuses clients meanwhile.
const RETRY_TIME: Duration = Duration::from_secs(10);

/// Messages of sockperf, each of which the server returns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SockperfLoad {
    /// Each after the reply to the one before.
    PingPong,
    /// The same with a server that never sleeps.
    BusyWaitingServer,
    /// Messages per second.
    Rate(f64),
}

/// Round trips that sockperf has measured, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RoundTrips {
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
}

/// Measures gigabits per second of iperf3, into its server or out of it, for at least `seconds`.
pub(crate) fn measure_bytes(
    testbed: &FloodTestbed,
    stack: StackKind,
    streams: usize,
    out: bool,
    seconds: f64,
) -> Result<f64, LabError> {
    let port = IPERF3_PORT.to_string();
    let server = Server::start(testbed, stack, &["iperf3", "-s", "-p", &port], IPERF3_PORT)?;
    let began = Instant::now();
    loop {
        let mut command = server.client(testbed, "iperf3");
        command.args(["-c", &server.target.ip().to_string(), "-p", &port, "--json"]);
        command.args(["-t", &whole_seconds(seconds), "-P", &streams.to_string()]);
        command.args(out.then_some("-R"));
        // A client that fails says why in its report.
        let answer = output(&mut command, "iperf3")?;
        match parse_iperf3(&answer.stdout) {
            Ok(gigabits_per_second) => return Ok(gigabits_per_second),
            Err(_) if began.elapsed() < RETRY_TIME => {}
            Err(problem) => return Err(LabError::Config(format!("iperf3: {problem}"))),
        }
    }
}

/// Measures round trips of messages of `bytes` on one TCP connection of sockperf, for at least
/// `seconds`.
pub(crate) fn measure_round_trips(
    testbed: &FloodTestbed,
    stack: StackKind,
    load: SockperfLoad,
    bytes: usize,
    seconds: f64,
) -> Result<RoundTrips, LabError> {
    let (port, bytes) = (SOCKPERF_PORT.to_string(), bytes.to_string());
    let mut serve = vec!["sockperf", "server", "--tcp", "-p", &port, "-m", &bytes];
    if load == SockperfLoad::BusyWaitingServer {
        serve.push("--nonblocked");
    }
    let server = Server::start(testbed, stack, &serve, SOCKPERF_PORT)?;
    let mut command = server.client(testbed, "sockperf");
    match load {
        SockperfLoad::PingPong | SockperfLoad::BusyWaitingServer => command.arg("ping-pong"),
        SockperfLoad::Rate(rate) => {
            command.args(["under-load", "--reply-every", "1", "--mps", &rate.to_string()])
        }
    };
    command.args(["--tcp", "--full-rtt", "-i", &server.target.ip().to_string()]);
    command.args(["-p", &port, "-m", &bytes, "-t", &whole_seconds(seconds)]);
    let text = run_to_end(&mut command, "sockperf")?;
    parse_sockperf(&text)
        .ok_or_else(|| LabError::Config(format!("the output of sockperf has no latency: {text}")))
}

/// Running server of a packaged program.
struct Server {
    // Stopped before the stack, whose daemon serves it.
    _process: ServerProcess,
    _stack: ProgramStack,
    target: SocketAddr,
}

impl Server {
    /// Starts a server and waits until it accepts connections.
    fn start(
        testbed: &FloodTestbed,
        stack: StackKind,
        line: &[&str],
        port: u16,
    ) -> Result<Self, LabError> {
        let stack = ProgramStack::prepare(testbed, stack, testbed.server_core, &[])?;
        let target = SocketAddr::new(stack.address.into(), port);
        let mut command = testbed.pair.b.namespace.command_on_core(testbed.server_core, "env");
        let mut process = ServerProcess::start(line[0], command.args(&stack.prefix).args(line))?;
        let client = &testbed.pair.a.namespace;
        let connect = || TcpStream::connect_timeout(&target, CONNECT_TIMEOUT).is_ok();
        process.wait_until(|| client.enter(connect).unwrap_or(false))?;
        Ok(Self { _process: process, _stack: stack, target })
    }

    /// Command that runs a client.
    fn client(&self, testbed: &FloodTestbed, program: &str) -> Command {
        testbed.pair.a.namespace.command_on_core(testbed.load_core, program)
    }
}

/// Gigabits per second that the receiving end has counted, or the error of the client.
fn parse_iperf3(report: &[u8]) -> Result<f64, String> {
    let report: Value = serde_json::from_slice(report).map_err(|error| error.to_string())?;
    if let Some(error) = report["error"].as_str() {
        return Err(error.to_owned());
    }
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    bits.map(|bits| bits / 1e9).ok_or_else(|| format!("the report has no rate: {report}"))
}

fn parse_sockperf(text: &str) -> Option<RoundTrips> {
    let after = |name: &str| {
        let (_, rest) = text.split_once(name)?;
        let number = rest.trim_start_matches([' ', '=']);
        number.split_ascii_whitespace().next()?.parse().ok()
    };
    Some(RoundTrips {
        mean_us: after("Summary: Round trip is")?,
        p50_us: after("percentile 50.000")?,
        p90_us: after("percentile 90.000")?,
        p99_us: after("percentile 99.000")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_rate_at_the_receiving_end_of_iperf3() {
        let report = br#"{"end": {"sum_sent": {"bits_per_second": 9e9},
            "sum_received": {"bits_per_second": 8.5e9}}}"#;
        assert_eq!(parse_iperf3(report), Ok(8.5));
        let refused = br#"{"start": {}, "error": "unable to connect to server"}"#;
        assert_eq!(parse_iperf3(refused), Err("unable to connect to server".to_owned()));
        assert!(parse_iperf3(b"").is_err());
    }

    #[test]
    fn reads_the_round_trips_of_sockperf() {
        let text = "sockperf: Summary: Round trip is 48.363 usec\n\
            sockperf: ---> percentile 99.900 = 4066.511\n\
            sockperf: ---> percentile 99.000 = 2656.465\n\
            sockperf: ---> percentile 90.000 =   60.523\n\
            sockperf: ---> percentile 50.000 =   46.537\n";
        let expected =
            RoundTrips { mean_us: 48.363, p50_us: 46.537, p90_us: 60.523, p99_us: 2656.465 };
        assert_eq!(parse_sockperf(text), Some(expected));
        assert_eq!(parse_sockperf("sockperf: ERROR: connection refused"), None);
    }
}
