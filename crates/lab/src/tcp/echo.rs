//! `lab echo-1`, `echo-2`, `echo-3`: the scenarios of Farias (2023).

use std::fmt;

use serde_json::json;

use super::{Bench, KernelReceive, Measured, Subject, TcpConfig, cores, median};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::load::{LinkKind, TcpLoadConfig};

/// Ports of one source address that a load uses, at most.
const CONNECTIONS_PER_SOURCE: usize = 16_000;

/// One point of a scenario.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} B", self.connections, self.bytes)
    }
}

/// A scenario of the paper's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// Many connections that stay open, small messages.
    Many,
    /// Growing messages.
    Growing,
    /// Few clients.
    Few,
}

impl Scenario {
    pub(crate) const ALL: [Self; 3] = [Self::Many, Self::Growing, Self::Few];

    /// The name of its experiment.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Many => "echo-1",
            Self::Growing => "echo-2",
            Self::Few => "echo-3",
        }
    }

    /// Its points; `full` with the paper's numbers of connections.
    pub(crate) fn points(self, full: bool) -> Vec<Point> {
        match self {
            Self::Many => {
                let most = if full { 16_000 } else { 4_000 };
                let points = [(100, 64), (most, 64), (most, 128)];
                points.map(|(connections, bytes)| Point { connections, bytes }).to_vec()
            }
            Self::Growing => {
                let connections = if full { 12_000 } else { 1_000 };
                let sizes = [64, 256, 1024, 4096, 8192, 16_384];
                sizes.map(|bytes| Point { connections, bytes }).to_vec()
            }
            Self::Few => {
                [1, 2, 4, 8, 16].map(|connections| Point { connections, bytes: 2048 }).to_vec()
            }
        }
    }

    /// What the clients connect through.
    fn link(self) -> LinkKind {
        if self == Self::Few { LinkKind::Kernel } else { LinkKind::Xdp }
    }
}

/// What one server did at one point, in every repeat.
struct Row {
    subject: Subject,
    point: Point,
    runs: Vec<Measured>,
}

impl Row {
    fn median(&self, of: impl Fn(&Measured) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    fn rps(&self) -> f64 {
        self.median(|run| run.load.requests_per_second)
    }
}

/// Many connections that stay open, small messages: requests per second.
///
/// # Errors
/// When namespaces cannot be made or a server does not start.
pub fn run_1(config: &TcpConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::Many;
    let points = scenario.points(config.full);
    let rows = measure(config, &Subject::ALL, &points, scenario.link())?;
    let mut result = experiment(scenario.name(), &rows);
    for (name, point) in [("rps_ratio_100", points[0]), ("rps_ratio", points[1])] {
        result.figure(name, ratio(&rows, point, Subject::TidegateXdp));
    }
    result.figure("rps_ratio_128", ratio(&rows, points[2], Subject::TidegateXdp));
    result.figure("rps_ratio_packet", ratio(&rows, points[1], Subject::TidegatePacket));
    result.note("scenario 1 of Farias (8 x 2000 connections, 64 and 128 B; bypass 3.65 to 5.58)");
    note_cores(&mut result, "the load runs on Tidegate over AF_XDP");
    Ok(result)
}

/// Growing messages: gigabits per second.
///
/// # Errors
/// As [`run_1`].
pub fn run_2(config: &TcpConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::Growing;
    let points = scenario.points(config.full);
    let subjects =
        [Subject::KernelEpoll, Subject::KernelSpin, Subject::KernelUring, Subject::TidegateXdp];
    let rows = measure(config, &subjects, &points, scenario.link())?;
    let mut result = experiment(scenario.name(), &rows);
    for point in points {
        let name = format!("gbps_ratio_{}", point.bytes);
        result.figure(&name, ratio(&rows, point, Subject::TidegateXdp));
    }
    result.note("scenario 2 of Farias (4 x 3000 connections; the paper's servers have 2 and 4 threads, here one core serves)");
    note_cores(&mut result, "the load runs on Tidegate over AF_XDP");
    Ok(result)
}

/// Few clients: latency.
///
/// # Errors
/// As [`run_1`].
pub fn run_3(config: &TcpConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::Few;
    let points = scenario.points(config.full);
    let rows = measure(config, &Subject::ALL, &points, scenario.link())?;
    let mut result = experiment(scenario.name(), &rows);
    for (clients, point) in [(1, points[0]), (16, points[4])] {
        let of = |subject, of: fn(&Measured) -> f64| find(&rows, subject, point).median(of);
        for (name, latency) in [
            ("p50", (|run| run.load.latency.p50_us) as fn(&Measured) -> f64),
            ("p95", |run| run.load.latency.p95_us),
        ] {
            let kernel = of(Subject::KernelEpoll, latency).min(of(Subject::KernelSpin, latency));
            let figure = format!("{name}_ratio_{clients}");
            result.figure(&figure, of(Subject::TidegateXdp, latency) / kernel);
            let figure = format!("{name}_ratio_{clients}_packet");
            result.figure(&figure, of(Subject::TidegatePacket, latency) / kernel);
        }
    }
    result.note("scenario 3 of Farias (1 to 16 clients, one connection each, 2048 B; bypass up to 18 times slower)");
    note_cores(&mut result, "the clients are on kernel sockets, in one thread");
    result.note("few clients are served by interrupts of the device on AF_XDP, which run on the clients' core");
    Ok(result)
}

/// What a server did at one point, in medians.
pub(crate) struct Beside {
    pub(crate) server: &'static str,
    pub(crate) point: Point,
    pub(crate) requests_per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// A scenario on Tidegate and on the kernel, over a veth pair: to stand beside
/// the same over another wire.
pub(crate) fn beside(
    scenario: Scenario,
    seconds: f64,
    repeats: usize,
) -> Result<Vec<Beside>, LabError> {
    let config = TcpConfig { seconds, repeats, full: false };
    let subjects = [Subject::KernelEpoll, Subject::TidegateXdp];
    let rows = measure(&config, &subjects, &scenario.points(false), scenario.link())?;
    let of = |row: &Row| Beside {
        server: row.subject.name(),
        point: row.point,
        requests_per_second: row.rps(),
        p50_us: row.median(|run| run.load.latency.p50_us),
        p99_us: row.median(|run| run.load.latency.p99_us),
    };
    Ok(rows.iter().map(of).collect())
}

/// Measures every point with every server, interleaved.
fn measure(
    config: &TcpConfig,
    subjects: &[Subject],
    points: &[Point],
    link: LinkKind,
) -> Result<Vec<Row>, LabError> {
    let (server_core, load_core) = cores()?;
    let bench = Bench::new(server_core, load_core)?;
    let mut rows: Vec<Row> = Vec::new();
    for &point in points {
        rows.extend(subjects.iter().map(|&subject| Row { subject, point, runs: Vec::new() }));
    }
    for repeat in 1..=config.repeats {
        for &subject in subjects {
            for row in rows.iter_mut().filter(|row| row.subject == subject) {
                let server = bench.start(subject, KernelReceive::Steering, &[])?;
                let Point { connections, bytes } = row.point;
                let load = TcpLoadConfig {
                    connections,
                    sources: connections.div_ceil(CONNECTIONS_PER_SOURCE) as u32,
                    message_bytes: bytes,
                    seconds: config.seconds,
                    warm_up_seconds: config.seconds / 4.0,
                    ..bench.load_config(&server, link)
                };
                let run = bench.measure(&load)?;
                server.process.stop();
                eprintln!(
                    "{repeat} {:<16} {connections:>6} x {bytes:>5} B: {:>9.0}/s, p50 {:.1} us, p95 \
                     {:.1} us; server core {:.0} %, load core {:.0} %",
                    subject.name(),
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

fn find(rows: &[Row], subject: Subject, point: Point) -> &Row {
    let is_it = |row: &&Row| {
        let same = (row.point.connections, row.point.bytes) == (point.connections, point.bytes);
        row.subject == subject && same
    };
    rows.iter().find(is_it).expect("every point is measured with every server")
}

/// Requests per second over those of the better of the kernel's.
fn ratio(rows: &[Row], point: Point, subject: Subject) -> f64 {
    let rps = |subject| find(rows, subject, point).rps();
    rps(subject) / rps(Subject::KernelEpoll).max(rps(Subject::KernelSpin))
}

fn experiment(name: &str, rows: &[Row]) -> Experiment {
    let mut result = Experiment::new(name);
    result.rows = rows
        .iter()
        .map(|row| {
            json!({
                "server": row.subject.name(),
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
         core 0 makes the load; {load}; ratios are to the better of an epoll server that sleeps \
         and one that spins; medians"
    ));
}
