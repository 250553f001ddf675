//! Load over TCP connections: requests that are echoed, or bytes one way.
//!
//! One thread does everything, on kernel sockets or on Tidegate. In a closed
//! loop each connection asks again when it has its answer; in an open loop
//! requests have their times, and latency counts from then, so a stall counts
//! for every request that it delays.

mod drive;
mod kernel;
mod tidegate;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use serde::Serialize;

use super::{LatencySummary, LinkKind};
use crate::cpu;
use crate::error::LabError;
use crate::experiment::number;

/// What goes over the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// Messages, which come back.
    #[default]
    Echo,
    /// Bytes to the server, as fast as it takes them.
    Send,
    /// Bytes from the server, as fast as it sends them.
    Receive,
}

/// A question to a server that knows more than to echo, and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// What is sent.
    pub request: Vec<u8>,
    /// What comes back.
    pub answer: Answer,
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// These bytes.
    Exactly(Vec<u8>),
    /// So many bytes, whatever they are.
    Bytes(usize),
}

impl Answer {
    /// How long it is.
    pub fn len(&self) -> usize {
        match self {
            Self::Exactly(bytes) => bytes.len(),
            Self::Bytes(len) => *len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether these bytes may be what follows the first `received` ones.
    fn goes_on(&self, received: usize, bytes: &[u8]) -> bool {
        match self {
            Self::Exactly(whole) => whole.get(received..received + bytes.len()) == Some(bytes),
            Self::Bytes(len) => received + bytes.len() <= *len,
        }
    }
}

/// How to make load.
#[derive(Clone, Debug)]
pub struct TcpLoadConfig {
    /// The server.
    pub target: SocketAddr,
    /// What to connect through.
    pub link: LinkKind,
    /// The interface; not for kernel sockets.
    pub interface: Option<String>,
    /// The first source address; Tidegate's own, or one that the kernel has.
    pub source: Option<IpAddr>,
    /// How many source addresses, counting up from the first. Each has about
    /// 16,000 ports.
    pub sources: u32,
    /// The length of the network's prefix, in bits.
    pub prefix: u8,
    /// Connections at the same time.
    pub connections: usize,
    /// So many of them make load, the others are idle; `None` is all.
    pub active: Option<usize>,
    /// What goes over them.
    pub exchange: Exchange,
    /// The length of a message.
    pub message_bytes: usize,
    /// What to ask instead of sending messages that come back.
    pub question: Option<Question>,
    /// A connection for each request.
    pub connect_each: bool,
    /// Requests per second; `None` is a closed loop.
    pub rate_per_second: Option<f64>,
    /// How long to measure.
    pub seconds: f64,
    /// How long to make load before.
    pub warm_up_seconds: f64,
    /// Run on this processor only.
    pub core: Option<usize>,
}

impl TcpLoadConfig {
    /// One connection, messages of 64 bytes, for ten seconds.
    pub fn new(link: LinkKind, target: SocketAddr) -> Self {
        Self {
            target,
            link,
            interface: None,
            source: None,
            sources: 1,
            prefix: if target.is_ipv4() { 24 } else { 64 },
            connections: 1,
            active: None,
            exchange: Exchange::Echo,
            message_bytes: 64,
            question: None,
            connect_each: false,
            rate_per_second: None,
            seconds: 10.0,
            warm_up_seconds: 0.0,
            core: None,
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TcpLoadReport {
    /// What it went through.
    pub link: String,
    /// Connections that were open at the end.
    pub connections: usize,
    /// How long was measured.
    pub seconds: f64,
    /// Requests with a whole answer.
    pub requests: u64,
    /// The same per second.
    pub requests_per_second: f64,
    /// Payload sent per second.
    pub sent_bytes_per_second: f64,
    /// Payload received per second.
    pub received_bytes_per_second: f64,
    /// From the time a request was meant to be sent to the end of its answer.
    pub latency: LatencySummary,
    /// From the first segment to an established connection.
    pub connect_latency: LatencySummary,
    /// Connections established while it was measured.
    pub connects: u64,
    /// Connections that could not be established, from the beginning on.
    pub connects_failed: u64,
    /// Connections that ended by an error, from the beginning on.
    pub broken: u64,
    /// Answers that were not what was sent, from the beginning on.
    pub wrong_answers: u64,
    /// Requests that were due and not sent when the time was over.
    pub unsent: u64,
}

impl fmt::Display for TcpLoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = number(self.requests_per_second.round());
        let gigabits = |bytes: f64| bytes * 8.0 / 1e9;
        writeln!(f, "{} connections by {}, {:.1} s", self.connections, self.link, self.seconds)?;
        writeln!(f, "{} requests, {rate} per second", number(self.requests as f64))?;
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
            (self.broken, "connections broke"),
            (self.wrong_answers, "answers were not what was sent"),
            (self.unsent, "requests were due and not sent"),
        ] {
            if count > 0 {
                writeln!(f, "{count} {what}")?;
            }
        }
        Ok(())
    }
}

/// Makes load over TCP and tells what came of it.
///
/// # Errors
/// When the settings make no sense, the port cannot be opened, or connections
/// cannot be established.
pub fn load_tcp(config: &TcpLoadConfig) -> Result<TcpLoadReport, LabError> {
    load_tcp_watched(config, || Ok(()))
}

/// As [`load_tcp`]; calls `opened` when all connections are established and
/// nothing goes over them yet.
///
/// # Errors
/// As [`load_tcp`], and what `opened` says.
pub fn load_tcp_watched(
    config: &TcpLoadConfig,
    opened: impl FnOnce() -> Result<(), LabError>,
) -> Result<TcpLoadReport, LabError> {
    check(config)?;
    if let Some(core) = config.core {
        cpu::pin_this_thread(core)?;
    }
    let failed = |source: io::Error| LabError::io(format!("load on {}", config.target))(source);
    if config.link == LinkKind::Kernel {
        let mut sockets = kernel::KernelStreams::new(config).map_err(failed)?;
        let mut load = drive::Load::new(config);
        load.open(&mut sockets).map_err(failed)?;
        opened()?;
        return load.run(&mut sockets, "kernel sockets".to_owned()).map_err(failed);
    }
    let mut sockets = tidegate::OwnStreams::open(config)?;
    let name = sockets.name();
    let mut load = drive::Load::new(config);
    load.open(&mut sockets).map_err(failed)?;
    opened()?;
    load.run(&mut sockets, name).map_err(failed)
}

fn check(config: &TcpLoadConfig) -> Result<(), LabError> {
    let wrong = |what: &str| Err(LabError::Config(what.to_owned()));
    if config.connections == 0 || config.message_bytes == 0 || config.sources == 0 {
        return wrong("connections, bytes and sources must be 1 or more");
    }
    if let Some(question) = &config.question
        && (question.request.is_empty() || question.answer.is_empty())
    {
        return wrong("a request and its answer must be 1 byte or more");
    }
    if !(config.seconds > 0.0 && config.warm_up_seconds >= 0.0) {
        return wrong("the time to measure must be more than 0 seconds");
    }
    if config.rate_per_second.is_some_and(|rate| !(rate > 0.0 && rate <= 1e9)) {
        return wrong("a rate must be more than 0 and at most 1,000,000,000 per second");
    }
    if config.exchange != Exchange::Echo
        && (config.connect_each || config.rate_per_second.is_some())
    {
        return wrong("a rate and a connection for each request are for echoes");
    }
    Ok(())
}

/// The source address of a connection: the first one and those behind it, in
/// turn.
fn source(config: &TcpLoadConfig, slot: usize) -> Option<IpAddr> {
    let offset = (slot % config.sources as usize) as u32;
    Some(match config.source? {
        IpAddr::V4(first) => IpAddr::V4((u32::from(first) + offset).into()),
        IpAddr::V6(first) => IpAddr::V6((u128::from(first) + u128::from(offset)).into()),
    })
}

/// Calls on connections, which have numbers.
trait Calls {
    /// Begins to connect.
    fn connect(&mut self, slot: usize) -> io::Result<()>;
    /// Whether it is connected, when it became writable.
    fn finish_connect(&mut self, slot: usize) -> io::Result<()>;
    /// Writes some.
    fn send(&mut self, slot: usize, data: &[u8]) -> io::Result<usize>;
    /// Reads some.
    fn recv(&mut self, slot: usize, buf: &mut [u8]) -> io::Result<usize>;
    /// Whether to be told that there is room.
    fn want_room(&mut self, slot: usize, wanted: bool) -> io::Result<()>;
    /// Ends it; `abrupt` by a reset, so that no port waits for it.
    fn close(&mut self, slot: usize, abrupt: bool);
}

/// Many connections.
trait Streams {
    /// Waits at most `timeout_ns`, and calls `each` for those that are ready.
    fn turn(
        &mut self,
        timeout_ns: u64,
        each: &mut dyn FnMut(&mut dyn Calls, usize) -> io::Result<()>,
    ) -> io::Result<()>;

    /// Calls that need no readiness.
    fn calls(&mut self, work: &mut dyn FnMut(&mut dyn Calls) -> io::Result<()>) -> io::Result<()>;
}
