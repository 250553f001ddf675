//! Load over TCP connections: echoed requests, or bulk transfer in one direction.
//!
//! One thread drives all connections, on kernel sockets or on Tidegate. In a closed loop each
//! connection sends the next request when its response has arrived. In an open loop requests
//! have scheduled times and latency counts from these times, so a stall counts for every request
//! that it delays.

mod arrivals;
mod embedded;
mod generator;
mod kernel;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use serde::Serialize;

use crate::core;
use crate::error::LoadError;
use crate::number::format_number;
use crate::{LatencySummary, LinkKind};

/// Traffic on the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// Messages that the server echoes.
    #[default]
    Echo,
    /// Bulk transfer to the server, as fast as the server receives.
    Send,
    /// Bulk transfer from the server, as fast as the server sends.
    Receive,
}

/// Request to a server that does more than echo, and the expected response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Bytes of the request.
    pub request: Vec<u8>,
    /// Expected response.
    pub response: ExpectedResponse,
}

/// Expected response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedResponse {
    /// Exactly these bytes.
    Exactly(Vec<u8>),
    /// Any bytes of this length.
    Length(usize),
}

impl ExpectedResponse {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Exactly(bytes) => bytes.len(),
            Self::Length(len) => *len,
        }
    }

    /// True for a response of length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if `bytes` match the response from offset `received` on.
    fn matches_at(&self, received: usize, bytes: &[u8]) -> bool {
        match self {
            Self::Exactly(expected) => {
                expected.get(received..received + bytes.len()) == Some(bytes)
            }
            Self::Length(len) => received + bytes.len() <= *len,
        }
    }
}

/// Configuration of a TCP load.
#[derive(Clone, Debug)]
pub struct TcpLoadConfig {
    /// Address and port of the server.
    pub target: SocketAddr,
    /// Means of transmission.
    pub link: LinkKind,
    /// Network interface or DPDK device; not for kernel sockets.
    pub interface: Option<String>,
    /// First source address: the generator's own on Tidegate, an address of the kernel otherwise.
    pub source: Option<IpAddr>,
    /// Number of source addresses, counting up from the first. Each has about 16,000 ports.
    pub source_count: u32,
    /// Prefix length of the source network, in bits.
    pub prefix_len: u8,
    /// Number of concurrent connections.
    pub connections: usize,
    /// Number of connections that carry load, the rest stays idle; `None` is all.
    pub active_connections: Option<usize>,
    /// Traffic on the connections.
    pub exchange: Exchange,
    /// Length of a message in bytes.
    pub message_bytes: usize,
    /// Request and response that replace the echoed message.
    pub transaction: Option<Transaction>,
    /// Opens a connection for each request.
    pub connection_per_request: bool,
    /// Requests per second; `None` is a closed loop.
    pub rate_per_second: Option<f64>,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Warm-up before measuring, in seconds.
    pub warm_up_seconds: f64,
    /// Core to run on; `None` is any.
    pub core: Option<usize>,
    /// The generator never sleeps; on kernel sockets only.
    pub spins: bool,
}

impl TcpLoadConfig {
    /// Returns a load with defaults: one connection, echoed messages of 64 bytes, ten seconds.
    pub fn new(link: LinkKind, target: SocketAddr) -> Self {
        Self {
            target,
            link,
            interface: None,
            source: None,
            source_count: 1,
            prefix_len: if target.is_ipv4() { 24 } else { 64 },
            connections: 1,
            active_connections: None,
            exchange: Exchange::Echo,
            message_bytes: 64,
            transaction: None,
            connection_per_request: false,
            rate_per_second: None,
            seconds: 10.0,
            warm_up_seconds: 0.0,
            core: None,
            spins: false,
        }
    }
}

/// Result of a TCP load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TcpLoadReport {
    /// Description of the link.
    pub link: String,
    /// Connections open at the end.
    pub connections: usize,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Requests with a complete response.
    pub requests: u64,
    /// Requests with a complete response per second.
    pub requests_per_second: f64,
    /// Payload bytes sent per second.
    pub sent_bytes_per_second: f64,
    /// Payload bytes received per second.
    pub received_bytes_per_second: f64,
    /// Time from the intended send time of a request to the end of its response.
    pub latency: LatencySummary,
    /// Time from the connect call to the established connection.
    pub connect_latency: LatencySummary,
    /// Connections established during the measurement.
    pub connects: u64,
    /// Failed connection attempts, since the start.
    pub connects_failed: u64,
    /// Connections that ended with an error, since the start.
    pub broken: u64,
    /// Responses that differ from the expected response, since the start.
    pub wrong_answers: u64,
    /// Requests that were due but not sent by the end.
    pub unsent: u64,
}

impl fmt::Display for TcpLoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = format_number(self.requests_per_second.round());
        let gigabits = |bytes: f64| bytes * 8.0 / 1e9;
        writeln!(f, "{} connections over {}, {:.1} s", self.connections, self.link, self.seconds)?;
        writeln!(f, "{} requests, {rate} per second", format_number(self.requests as f64))?;
        writeln!(
            f,
            "{:.2} Gbit/s sent, {:.2} Gbit/s received",
            gigabits(self.sent_bytes_per_second),
            gigabits(self.received_bytes_per_second)
        )?;
        let line = |f: &mut fmt::Formatter<'_>, name: &str, latency: &LatencySummary| {
            let LatencySummary { p50_us, p90_us, p99_us, p999_us, max_us, .. } = latency;
            writeln!(
                f,
                "{name} in us: p50 {p50_us:.1}, p90 {p90_us:.1}, p99 {p99_us:.1}, p99.9 \
                 {p999_us:.1}, max {max_us:.1}"
            )
        };
        if self.latency.count > 0 {
            line(f, "latency", &self.latency)?;
        }
        if self.connects > 0 {
            line(f, "connect", &self.connect_latency)?;
        }
        for (count, what) in [
            (self.connects_failed, "connections could not be established"),
            (self.broken, "connections failed"),
            (self.wrong_answers, "responses were wrong"),
            (self.unsent, "requests were due but not sent"),
        ] {
            if count > 0 {
                writeln!(f, "{count} {what}")?;
            }
        }
        Ok(())
    }
}

/// Generates load over TCP and returns the result.
///
/// # Errors
/// When the configuration is invalid, the device cannot be opened, or the connections cannot be
/// established.
pub fn load_tcp(config: &TcpLoadConfig) -> Result<TcpLoadReport, LoadError> {
    load_tcp_with_hook(config, || Ok(()))
}

/// As [`load_tcp`]; calls `on_established` when all connections are established and carry no
/// data yet.
///
/// # Errors
/// As [`load_tcp`], and the error of `on_established`.
pub fn load_tcp_with_hook<E: From<LoadError>>(
    config: &TcpLoadConfig,
    on_established: impl FnOnce() -> Result<(), E>,
) -> Result<TcpLoadReport, E> {
    check(config)?;
    if let Some(core) = config.core {
        core::pin_thread(None, core)?;
    }
    let failed =
        |source: io::Error| LoadError::io(format!("TCP load on {} failed", config.target))(source);
    if config.link == LinkKind::Kernel {
        let mut connections = kernel::KernelConnections::new(config).map_err(failed)?;
        let mut load = generator::TcpLoad::new(config);
        load.connect_all(&mut connections).map_err(failed)?;
        on_established()?;
        let report = load.run(&mut connections, "kernel sockets".to_owned());
        return Ok(report.map_err(failed)?);
    }
    let mut connections = embedded::EmbeddedConnections::open(config)?;
    let name = connections.describe();
    let mut load = generator::TcpLoad::new(config);
    load.connect_all(&mut connections).map_err(failed)?;
    on_established()?;
    Ok(load.run(&mut connections, name).map_err(failed)?)
}

fn check(config: &TcpLoadConfig) -> Result<(), LoadError> {
    let invalid = |what: &str| Err(LoadError::Config(what.to_owned()));
    if config.connections == 0 || config.message_bytes == 0 || config.source_count == 0 {
        return invalid("connections, bytes and sources must be 1 or more");
    }
    if let Some(transaction) = &config.transaction
        && (transaction.request.is_empty() || transaction.response.is_empty())
    {
        return invalid("a request and its response must be 1 byte or more");
    }
    if !(config.seconds > 0.0 && config.warm_up_seconds >= 0.0) {
        return invalid("the time to measure must be more than 0 seconds");
    }
    if config.rate_per_second.is_some_and(|rate| !(rate > 0.0 && rate <= 1e9)) {
        return invalid("a rate must be more than 0 and at most 1,000,000,000 per second");
    }
    if config.exchange != Exchange::Echo
        && (config.connection_per_request || config.rate_per_second.is_some())
    {
        return invalid("a rate or a connection for each request is possible for echoes only");
    }
    Ok(())
}

/// Returns the source address of a connection: the configured addresses in turn.
fn source_address(config: &TcpLoadConfig, slot: usize) -> Option<IpAddr> {
    let offset = (slot % config.source_count as usize) as u32;
    Some(match config.source? {
        IpAddr::V4(first) => IpAddr::V4((u32::from(first) + offset).into()),
        IpAddr::V6(first) => IpAddr::V6((u128::from(first) + u128::from(offset)).into()),
    })
}

/// Operations on connections, addressed by slot.
trait ConnectionOps {
    /// Starts to connect.
    fn connect(&mut self, slot: usize) -> io::Result<()>;
    /// Checks a writable connection: `Ok` when established, `WouldBlock` while connecting.
    fn finish_connect(&mut self, slot: usize) -> io::Result<()>;
    /// Sends bytes; returns the number accepted.
    fn send(&mut self, slot: usize, data: &[u8]) -> io::Result<usize>;
    /// Receives bytes; returns 0 at the end of the stream.
    fn recv(&mut self, slot: usize, buf: &mut [u8]) -> io::Result<usize>;
    /// Sets whether the connection is reported as ready when it is writable.
    fn set_write_interest(&mut self, slot: usize, wanted: bool) -> io::Result<()>;
    /// Closes the connection; `reset` sends RST, so that no port stays in TIME-WAIT.
    fn close(&mut self, slot: usize, reset: bool);
}

/// Set of connections with readiness events.
trait ConnectionSet {
    /// Waits for at most `timeout_ns` and calls `on_ready` for each ready connection.
    fn wait_ready(
        &mut self,
        timeout_ns: u64,
        on_ready: &mut dyn FnMut(&mut dyn ConnectionOps, usize) -> io::Result<()>,
    ) -> io::Result<()>;

    /// Runs `action` without waiting for readiness.
    fn with_ops(
        &mut self,
        action: &mut dyn FnMut(&mut dyn ConnectionOps) -> io::Result<()>,
    ) -> io::Result<()>;
}
