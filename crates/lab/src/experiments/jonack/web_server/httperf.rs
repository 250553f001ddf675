//! httperf, the client of the paper, beside our own.

use crate::error::LabError;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::netns::run_to_end;
use crate::testbed::web_client::REQUEST_TIMEOUT;

use super::servers::RunningServer;

/// Package and program.
pub(super) const PROGRAM: &str = "httperf";

/// Report of httperf.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HttperfReport {
    pub(super) replies_per_s: f64,
    /// Mean duration of a connection with its request and its response; `None` without a response.
    pub(super) connection_ms: Option<f64>,
    pub(super) errors: u64,
}

/// Asks the server `rate` times a second for `seconds`, each time for the first file on a new
/// connection.
pub(super) fn measure(
    testbed: &FloodTestbed,
    server: &RunningServer,
    rate: f64,
    seconds: f64,
) -> Result<HttperfReport, LabError> {
    let mut command = testbed.pair.a.namespace.command_on_core(testbed.load_core, PROGRAM);
    command.args(["--hog", "--server", &server.target.ip().to_string()]);
    command.args(["--port", &server.target.port().to_string(), "--uri", &server.files[0].path]);
    command.args([
        "--rate",
        &rate.to_string(),
        "--timeout",
        &REQUEST_TIMEOUT.as_secs().to_string(),
    ]);
    let connections = (rate * seconds).ceil().max(1.0);
    command.args(["--num-conns", &connections.to_string()]);
    let text = run_to_end(&mut command, PROGRAM)?;
    parse(&text).ok_or_else(|| LabError::Config(format!("unknown output of {PROGRAM}: {text}")))
}

fn parse(text: &str) -> Option<HttperfReport> {
    let after = |name: &str| {
        let (_, rest) = text.split_once(name)?;
        rest.split_ascii_whitespace().next()?.parse::<f64>().ok()
    };
    let replies = after("replies ")?;
    let seconds = after("test-duration ")?;
    let mean_ms =
        after("Connection time [ms]: min ").and_then(|_| after(" avg ").filter(|ms| *ms > 0.0));
    Some(HttperfReport {
        replies_per_s: replies / seconds.max(1e-9),
        connection_ms: mean_ms,
        errors: after("Errors: total ")? as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_replies_and_duration_of_connections() {
        let text = "Total: connections 600 requests 599 replies 598 test-duration 3.996 s\n\n\
            Connection rate: 150.2 conn/s (6.7 ms/conn, <=1 concurrent connections)\n\
            Connection time [ms]: min 0.2 avg 0.4 max 9.5 median 0.5 stddev 0.5\n\
            Connection time [ms]: connect 0.1\n\
            Reply rate [replies/s]: min 0.0 avg 0.0 max 0.0 stddev 0.0 (0 samples)\n\
            Errors: total 2 client-timo 2 socket-timo 0 connrefused 0 connreset 0\n";
        let report = parse(text).unwrap();
        assert!((report.replies_per_s - 149.65).abs() < 0.01, "{report:?}");
        assert_eq!((report.connection_ms, report.errors), (Some(0.4), 2));
        assert_eq!(parse("httperf: warning"), None);
    }
}
