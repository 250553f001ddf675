//! Traffic between a client on kernel sockets that never sleeps, on core 0, and a server on core 1.

use std::fmt;

use tidegate_load::{Exchange, LinkKind, SpinningConfig, TcpLoadConfig};

use crate::error::LabError;
use crate::experiments::kernel_best::Goal;
use crate::testbed::tcp::{Family, RunningServer, ServerKind, TcpTestbed};

const MESSAGE_BYTES: usize = 64;
/// Requests in flight of a busy client.
pub(super) const MANY_IN_FLIGHT: usize = 64;
/// Bytes of one write of a stream.
const WRITE_BYTES: usize = 64 << 10;

/// Traffic between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// Echoed messages on TCP connections, one in flight on each.
    Tcp { connections: usize },
    /// Echoed datagrams.
    Udp { in_flight: usize },
    /// Bytes one way on one TCP connection.
    Stream { into_server: bool, offload: bool },
}

impl Traffic {
    pub(super) fn goal(self) -> Goal {
        match self {
            Self::Tcp { connections: 1 } | Self::Udp { in_flight: 1 } => Goal::Lowest,
            _ => Goal::Highest,
        }
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            _ if self.goal() == Goal::Lowest => "us",
            Self::Stream { .. } => "Gbit/s",
            _ => "/s",
        }
    }

    fn serve_flags(self) -> &'static [&'static str] {
        match self {
            Self::Tcp { .. } => &["--tcp"],
            Self::Udp { .. } => &[],
            Self::Stream { into_server: true, .. } => &["--tcp", "--sink"],
            Self::Stream { into_server: false, .. } => &["--tcp", "--source"],
        }
    }
}

/// Traffic by one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) traffic: Traffic,
    pub(super) family: Family,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = self.family.name();
        match self.traffic {
            Traffic::Tcp { connections } => write!(f, "TCP {family}, {connections} in flight"),
            Traffic::Udp { in_flight } => write!(f, "UDP {family}, {in_flight} in flight"),
            Traffic::Stream { into_server, offload } => {
                let way = if into_server { "in" } else { "out" };
                let frames = if offload { "segments with offloads" } else { "frames" };
                write!(f, "stream {way} {family}, {frames}")
            }
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Median latency in us, requests per second, or gigabits per second.
    pub(super) value: f64,
    /// Busy time of the server's core for each unit of work, in us: a request, or a kilobyte.
    pub(super) server_us: f64,
}

impl Case {
    /// Cases of each traffic by both families; with `only`, those whose names contain it.
    ///
    /// # Errors
    /// No name contains `only`.
    pub(super) fn of_traffic(
        traffic: &[Traffic],
        only: Option<&str>,
    ) -> Result<Vec<Self>, LabError> {
        let by_family = |&traffic| Family::ALL.map(|family| Self { traffic, family });
        let all: Vec<Self> = traffic.iter().flat_map(by_family).collect();
        let is_wanted = |case: &&Self| only.is_none_or(|only| case.to_string().contains(only));
        let wanted: Vec<Self> = all.iter().filter(is_wanted).copied().collect();
        match (only, all.first()) {
            (Some(only), Some(example)) if wanted.is_empty() => {
                Err(LabError::Config(format!("no case contains {only:?}; one is {example}")))
            }
            _ => Ok(wanted),
        }
    }

    /// Measures `tidegate serve echo`.
    pub(super) fn measure_serve(
        self,
        testbed: &TcpTestbed,
        server_kind: ServerKind,
        seconds: f64,
    ) -> Result<Run, LabError> {
        let flags = self.traffic.serve_flags();
        self.measure(testbed, seconds, || testbed.start_echo(server_kind, self.family, flags))
    }

    /// Measures a server that `start` starts, and ends it.
    pub(super) fn measure(
        self,
        testbed: &TcpTestbed,
        seconds: f64,
        start: impl FnOnce() -> Result<RunningServer, LabError>,
    ) -> Result<Run, LabError> {
        let offload = matches!(self.traffic, Traffic::Stream { offload: true, .. });
        testbed.set_offload(offload)?;
        let server = start()?;
        if offload {
            testbed.coalesce()?;
        }
        let warm_up_seconds = seconds / 4.0;
        let tcp = TcpLoadConfig {
            seconds,
            warm_up_seconds,
            spins: true,
            ..testbed.load_config(&server, LinkKind::Kernel)
        };
        let run = match self.traffic {
            Traffic::Udp { in_flight } => {
                let (report, server_core) = testbed.measure_udp(&SpinningConfig {
                    target: server.target,
                    in_flight,
                    bytes: MESSAGE_BYTES,
                    warm_up_seconds,
                    seconds,
                    core: testbed.load_core(),
                })?;
                self.run(report.latency.p50_us, report.answered_pps, server_core.busy_percent)
            }
            Traffic::Tcp { connections } => {
                let run = testbed.measure(&TcpLoadConfig {
                    connections,
                    message_bytes: MESSAGE_BYTES,
                    ..tcp
                })?;
                let (load, core) = (run.load, run.server_core);
                self.run(load.latency.p50_us, load.requests_per_second, core.busy_percent)
            }
            Traffic::Stream { into_server, .. } => {
                let exchange = if into_server { Exchange::Send } else { Exchange::Receive };
                let run = testbed.measure(&TcpLoadConfig {
                    exchange,
                    message_bytes: WRITE_BYTES,
                    ..tcp
                })?;
                let bytes = match into_server {
                    true => run.load.sent_bytes_per_second,
                    false => run.load.received_bytes_per_second,
                };
                let busy_us = run.server_core.busy_percent / 100.0 * 1e6;
                Run { value: bytes * 8.0 / 1e9, server_us: busy_us / (bytes / 1e3).max(1.0) }
            }
        };
        server.process.stop();
        Ok(run)
    }

    fn run(self, p50_us: f64, per_second: f64, busy_percent: f64) -> Run {
        let value = if self.traffic.goal() == Goal::Lowest { p50_us } else { per_second };
        Run { value, server_us: busy_percent / 100.0 * 1e6 / per_second.max(1.0) }
    }
}
