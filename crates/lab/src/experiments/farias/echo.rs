//! Experiments echo-throughput, echo-message-size and echo-latency: the scenarios of Farias (2023).

use std::fmt;

use serde_json::json;
use tidegate_load::{LinkKind, TcpLoadConfig};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::stats::median;
use crate::testbed::tcp::{
    KernelReceive, ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores,
};

/// Maximum number of ports of one source address that a load uses.
const CONNECTIONS_PER_SOURCE: usize = 16_000;

/// One point of a scenario.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EchoPoint {
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
}

impl fmt::Display for EchoPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} B", self.connections, self.bytes)
    }
}

/// Scenario of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// Many persistent connections with small messages.
    ManyConnections,
    /// Messages of growing size.
    GrowingMessages,
    /// A few clients.
    FewClients,
}

impl Scenario {
    pub(crate) const ALL: [Self; 3] =
        [Self::ManyConnections, Self::GrowingMessages, Self::FewClients];

    /// Name of the experiment.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ManyConnections => "echo-throughput",
            Self::GrowingMessages => "echo-message-size",
            Self::FewClients => "echo-latency",
        }
    }

    /// Points of the scenario; `full` uses the paper's numbers of connections.
    pub(crate) fn points(self, full: bool) -> Vec<EchoPoint> {
        match self {
            Self::ManyConnections => {
                let many = if full { 16_000 } else { 4_000 };
                let points = [(100, 64), (many, 64), (many, 128)];
                points.map(|(connections, bytes)| EchoPoint { connections, bytes }).to_vec()
            }
            Self::GrowingMessages => {
                let connections = if full { 12_000 } else { 1_000 };
                let sizes = [64, 256, 1024, 4096, 8192, 16_384];
                sizes.map(|bytes| EchoPoint { connections, bytes }).to_vec()
            }
            Self::FewClients => {
                [1, 2, 4, 8, 16].map(|connections| EchoPoint { connections, bytes: 2048 }).to_vec()
            }
        }
    }

    /// Link of the clients.
    fn link(self) -> LinkKind {
        if self == Self::FewClients { LinkKind::Kernel } else { LinkKind::Xdp }
    }
}

/// Measurements of one server at one point, one for each repetition.
struct Row {
    server_kind: ServerKind,
    point: EchoPoint,
    runs: Vec<TcpMeasurement>,
}

impl Row {
    fn median(&self, of: impl Fn(&TcpMeasurement) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    fn rps(&self) -> f64 {
        self.median(|run| run.load.requests_per_second)
    }
}

/// Measures requests per second on many persistent connections with small messages.
///
/// # Errors
/// When namespaces cannot be created or a server does not start.
pub fn run_throughput(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::ManyConnections;
    let points = scenario.points(config.full);
    let rows = measure(config, &ServerKind::ALL, &points, scenario.link())?;
    let mut result = experiment(scenario.name(), &rows);
    for (name, point) in [("rps_ratio_100", points[0]), ("rps_ratio", points[1])] {
        result.figure(name, ratio(&rows, point, ServerKind::TidegateXdp));
    }
    result.figure("rps_ratio_128", ratio(&rows, points[2], ServerKind::TidegateXdp));
    result.figure("rps_ratio_packet", ratio(&rows, points[1], ServerKind::TidegatePacket));
    result.note("scenario 1 of Farias (8 x 2000 connections, 64 and 128 B; bypass 3.65 to 5.58)");
    note_cores(&mut result, "the load runs on Tidegate over AF_XDP");
    Ok(result)
}

/// Measures gigabits per second with messages of growing size.
///
/// # Errors
/// As [`run_throughput`].
pub fn run_message_size(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::GrowingMessages;
    let points = scenario.points(config.full);
    let server_kinds = [
        ServerKind::KernelEpoll,
        ServerKind::KernelSpin,
        ServerKind::KernelUring,
        ServerKind::TidegateXdp,
    ];
    let rows = measure(config, &server_kinds, &points, scenario.link())?;
    let mut result = experiment(scenario.name(), &rows);
    for point in points {
        let name = format!("gbps_ratio_{}", point.bytes);
        result.figure(&name, ratio(&rows, point, ServerKind::TidegateXdp));
    }
    result.note("scenario 2 of Farias (4 x 3000 connections; the paper's servers have 2 and 4 threads, here one core serves)");
    note_cores(&mut result, "the load runs on Tidegate over AF_XDP");
    Ok(result)
}

/// Measures the latency of a few clients.
///
/// # Errors
/// As [`run_throughput`].
pub fn run_latency(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::FewClients;
    let points = scenario.points(config.full);
    let rows = measure(config, &ServerKind::ALL, &points, scenario.link())?;
    let mut result = experiment(scenario.name(), &rows);
    for (clients, point) in [(1, points[0]), (16, points[4])] {
        let latency_of = |server_kind, of: fn(&TcpMeasurement) -> f64| {
            find(&rows, server_kind, point).median(of)
        };
        for (name, latency) in [
            ("p50", (|run| run.load.latency.p50_us) as fn(&TcpMeasurement) -> f64),
            ("p95", |run| run.load.latency.p95_us),
        ] {
            let kernel = latency_of(ServerKind::KernelEpoll, latency)
                .min(latency_of(ServerKind::KernelSpin, latency));
            let figure = format!("{name}_ratio_{clients}");
            result.figure(&figure, latency_of(ServerKind::TidegateXdp, latency) / kernel);
            let figure = format!("{name}_ratio_{clients}_packet");
            result.figure(&figure, latency_of(ServerKind::TidegatePacket, latency) / kernel);
        }
    }
    result.note("scenario 3 of Farias (1 to 16 clients, one connection each, 2048 B; bypass up to 18 times slower)");
    note_cores(&mut result, "the clients are on kernel sockets, in one thread");
    result.note("few clients are served by interrupts of the device on AF_XDP, which run on the clients' core");
    Ok(result)
}

/// Medians of one server at one point.
pub(crate) struct ReferenceRow {
    pub(crate) server: &'static str,
    pub(crate) point: EchoPoint,
    pub(crate) requests_per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// Runs a scenario on Tidegate and on the kernel over a veth pair, for comparison with the same
/// scenario over another link.
pub(crate) fn measure_over_veth(
    scenario: Scenario,
    seconds: f64,
    repeats: usize,
) -> Result<Vec<ReferenceRow>, LabError> {
    let config = TcpLabConfig { seconds, repeats, full: false };
    let server_kinds = [ServerKind::KernelEpoll, ServerKind::TidegateXdp];
    let rows = measure(&config, &server_kinds, &scenario.points(false), scenario.link())?;
    let to_reference = |row: &Row| ReferenceRow {
        server: row.server_kind.name(),
        point: row.point,
        requests_per_second: row.rps(),
        p50_us: row.median(|run| run.load.latency.p50_us),
        p99_us: row.median(|run| run.load.latency.p99_us),
    };
    Ok(rows.iter().map(to_reference).collect())
}

/// Measures every point with every server, interleaved.
fn measure(
    config: &TcpLabConfig,
    server_kinds: &[ServerKind],
    points: &[EchoPoint],
    link: LinkKind,
) -> Result<Vec<Row>, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let mut rows: Vec<Row> = Vec::new();
    for &point in points {
        rows.extend(server_kinds.iter().map(|&server_kind| Row {
            server_kind,
            point,
            runs: Vec::new(),
        }));
    }
    for repeat in 1..=config.repeats {
        for &server_kind in server_kinds {
            for row in rows.iter_mut().filter(|row| row.server_kind == server_kind) {
                let server = testbed.start(server_kind, KernelReceive::Steering, &[])?;
                let EchoPoint { connections, bytes } = row.point;
                let load = TcpLoadConfig {
                    connections,
                    source_count: connections.div_ceil(CONNECTIONS_PER_SOURCE) as u32,
                    message_bytes: bytes,
                    seconds: config.seconds,
                    warm_up_seconds: config.seconds / 4.0,
                    ..testbed.load_config(&server, link)
                };
                let run = testbed.measure(&load)?;
                server.process.stop();
                eprintln!(
                    "{repeat} {:<16} {connections:>6} x {bytes:>5} B: {:>9.0}/s, p50 {:.1} us, p95 \
                     {:.1} us; server core {:.0} %, load core {:.0} %",
                    server_kind.name(),
                    run.load.requests_per_second,
                    run.load.latency.p50_us,
                    run.load.latency.p95_us,
                    run.server_core.busy_percent,
                    run.load_core.busy_percent,
                );
                row.runs.push(run);
            }
        }
    }
    Ok(rows)
}

fn find(rows: &[Row], server_kind: ServerKind, point: EchoPoint) -> &Row {
    let is_match = |row: &&Row| {
        let is_same_point =
            (row.point.connections, row.point.bytes) == (point.connections, point.bytes);
        row.server_kind == server_kind && is_same_point
    };
    rows.iter().find(is_match).expect("every point is measured with every server")
}

/// Requests per second of a server, divided by those of the better of the kernel's servers.
fn ratio(rows: &[Row], point: EchoPoint, server_kind: ServerKind) -> f64 {
    let rps = |server_kind| find(rows, server_kind, point).rps();
    rps(server_kind) / rps(ServerKind::KernelEpoll).max(rps(ServerKind::KernelSpin))
}

fn experiment(name: &str, rows: &[Row]) -> Experiment {
    let mut result = Experiment::new(name);
    result.rows = rows
        .iter()
        .map(|row| {
            json!({
                "server": row.server_kind.name(),
                "connections": row.point.connections,
                "bytes": row.point.bytes,
                "requests_per_second": row.rps(),
                "gigabits_per_second": row.rps() * row.point.bytes as f64 * 8.0 / 1e9,
                "p50_us": row.median(|run| run.load.latency.p50_us),
                "p95_us": row.median(|run| run.load.latency.p95_us),
                "p99_us": row.median(|run| run.load.latency.p99_us),
                "server_core": row.median(|run| run.server_core.busy_percent),
                "load_core": row.median(|run| run.load_core.busy_percent),
                "wrong_answers": row.runs.iter().map(|run| run.load.wrong_answers).sum::<u64>(),
                "broken": row.runs.iter().map(|run| run.load.broken).sum::<u64>(),
            })
        })
        .collect();
    result.columns = vec![
        "server",
        "connections",
        "bytes",
        "requests_per_second",
        "gigabits_per_second",
        "p50_us",
        "p95_us",
        "server_core",
        "load_core",
    ];
    result
}

fn note_cores(result: &mut Experiment, load: &str) {
    result.note(format!(
        "core 1 serves and does all receive work of the server's device (RPS for the kernel's), \
         core 0 generates the load; {load}; ratios are to the better of an epoll server that sleeps \
         and one that busy-polls; medians"
    ));
}
