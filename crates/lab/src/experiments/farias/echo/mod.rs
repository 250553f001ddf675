//! Experiments echo-throughput, echo-message-size and echo-latency: the scenarios of Farias (2023).

mod sockperf;

use std::fmt;

use serde_json::json;
use tidegate_load::{LinkKind, TcpLoadConfig};

use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal, distinct_best};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, spread_percent};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores};

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

    /// Points of the scenario that its figures need, for a quick run.
    fn few_points(self, full: bool) -> Vec<EchoPoint> {
        let is_needed = |point: &EchoPoint| match self {
            Self::ManyConnections => point.connections > 100 && point.bytes == 64,
            Self::GrowingMessages => [64, 1024, 8192].contains(&point.bytes),
            Self::FewClients => [1, 16].contains(&point.connections),
        };
        self.points(full).into_iter().filter(is_needed).collect()
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

    fn spread_percent(&self, of: impl Fn(&TcpMeasurement) -> f64) -> f64 {
        spread_percent(self.runs.iter().map(of))
    }

    fn rps(&self) -> f64 {
        self.median(|run| run.load.requests_per_second)
    }

    /// Lowest and highest of all repetitions.
    fn ends(&self, of: impl Fn(&TcpMeasurement) -> f64) -> [f64; 2] {
        let all = || self.runs.iter().map(&of);
        [all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max)]
    }
}

/// Measurements of all servers at one point.
struct PointResults {
    point: EchoPoint,
    /// One for each figure of the scenario, in its order.
    first_passes: Vec<FirstPass<ServerKind>>,
    /// The kernel's best servers, and Tidegate's.
    rows: Vec<Row>,
}

impl PointResults {
    fn row(&self, server_kind: ServerKind) -> &Row {
        let found = self.rows.iter().find(|row| row.server_kind == server_kind);
        found.expect("every server is measured at every point")
    }

    /// Sets a figure to the ratio of a server's median to that of the kernel's best.
    fn compare(
        &self,
        result: &mut Experiment,
        figure: &str,
        server_kind: ServerKind,
        (index, of): (usize, FigureOfRun),
    ) {
        let first_pass = &self.first_passes[index];
        let kernel = self.row(first_pass.best()).median(of);
        let ratio = self.row(server_kind).median(of) / kernel;
        result.compare_with_best(figure, ratio, first_pass.rows(kernel));
    }
}

type FigureOfRun = fn(&TcpMeasurement) -> f64;

/// Figures by which the kernel's best way is chosen.
const RATE: [(Goal, FigureOfRun); 1] = [(Goal::Highest, |run| run.load.requests_per_second)];
const LATENCIES: [(Goal, FigureOfRun); 2] =
    [(Goal::Lowest, |run| run.load.latency.p50_us), (Goal::Lowest, |run| run.load.latency.p95_us)];

/// Tidegate on AF_PACKET, where RPS moves the receive work to the server's core.
const TIDEGATE_PACKET: ServerKind = ServerKind::TidegatePacket(ReceiveWork::Steered);

/// Measures requests per second on many persistent connections with small messages.
///
/// # Errors
/// When namespaces cannot be created or a server does not start.
pub fn run_throughput(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let scenario = Scenario::ManyConnections;
    let results = measure(config, scenario, &[ServerKind::TidegateXdp, TIDEGATE_PACKET], &RATE)?;
    let mut result = experiment(scenario.name(), &results);
    let rate = (0, RATE[0].1);
    for point_results in &results {
        let figure = match point_results.point {
            EchoPoint { connections: 100, .. } => "rps_ratio_100",
            EchoPoint { bytes: 128, .. } => "rps_ratio_128",
            _ => {
                point_results.compare(&mut result, "rps_ratio_packet", TIDEGATE_PACKET, rate);
                "rps_ratio"
            }
        };
        point_results.compare(&mut result, figure, ServerKind::TidegateXdp, rate);
    }
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
    let results = measure(config, scenario, &[ServerKind::TidegateXdp], &RATE)?;
    let mut result = experiment(scenario.name(), &results);
    for point_results in &results {
        let figure = format!("gbps_ratio_{}", point_results.point.bytes);
        let rate = (0, RATE[0].1);
        point_results.compare(&mut result, &figure, ServerKind::TidegateXdp, rate);
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
    let own = [ServerKind::TidegateXdp, ServerKind::TidegateDedicated, TIDEGATE_PACKET];
    let results = measure(config, scenario, &own, &LATENCIES)?;
    let mut result = experiment(scenario.name(), &results);
    for point_results in &results {
        let clients = point_results.point.connections;
        if ![1, 16].contains(&clients) {
            continue;
        }
        for (index, name) in ["p50", "p95"].into_iter().enumerate() {
            for (server_kind, suffix) in own.into_iter().zip(["", "_dedicated", "_packet"]) {
                let figure = format!("{name}_ratio_{clients}{suffix}");
                let latency = (index, LATENCIES[index].1);
                point_results.compare(&mut result, &figure, server_kind, latency);
            }
        }
    }
    result.note("scenario 3 of Farias (1 to 16 clients, one connection each, 2048 B; bypass up to 18 times slower)");
    note_cores(&mut result, "the clients are on kernel sockets, in one thread");
    result.note(
        "few clients are served by interrupts of the device on AF_XDP, which run on the clients' \
         core, as kernel-*-softirq has all its receive work there; tidegate-xdp-dedicated polls on \
         core 1",
    );
    sockperf::add_rows(config, results[0].point, &mut result)?;
    Ok(result)
}

/// Medians of one server at one point.
pub(crate) struct ReferenceRow {
    pub(crate) server: String,
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
    let config = TcpLabConfig { seconds, repeats, ..TcpLabConfig::default() };
    let results = measure(&config, scenario, &[ServerKind::TidegateXdp], &RATE)?;
    let to_reference = |row: &Row| ReferenceRow {
        server: row.server_kind.name(),
        point: row.point,
        requests_per_second: row.rps(),
        p50_us: row.median(|run| run.load.latency.p50_us),
        p99_us: row.median(|run| run.load.latency.p99_us),
    };
    Ok(results.iter().flat_map(|results| &results.rows).map(to_reference).collect())
}

/// Chooses the kernel's best servers at every point of a scenario, then measures them in turn with
/// `own`. `figures` are those by which they are chosen.
fn measure(
    config: &TcpLabConfig,
    scenario: Scenario,
    own: &[ServerKind],
    figures: &[(Goal, FigureOfRun)],
) -> Result<Vec<PointResults>, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let measure_point = |progress: &Progress, point, server_kind, seconds, label: &str| {
        let run = measure_server(&testbed, point, server_kind, scenario.link(), seconds)?;
        report_step(progress, label, server_kind, point, &run);
        Ok::<_, LabError>(run)
    };
    let mut results = Vec::new();
    let points = match config.few_points {
        true => scenario.few_points(config.full),
        false => scenario.points(config.full),
    };
    let ways = points.len() * ServerKind::KERNEL.len();
    let first_progress = Progress::of_part("first pass", ways);
    for point in points {
        let measured = ServerKind::KERNEL.into_iter().map(|server_kind| {
            let seconds = (config.seconds / 4.0).clamp(0.25, FIRST_PASS_SECONDS);
            let run = measure_point(&first_progress, point, server_kind, seconds, "first pass")?;
            Ok((server_kind, run))
        });
        let measured = measured.collect::<Result<Vec<_>, LabError>>()?;
        let first_pass = |&(goal, of): &(Goal, FigureOfRun)| {
            FirstPass::new(goal, measured.iter().map(|(kind, run)| (*kind, kind.name(), of(run))))
        };
        let first_passes: Vec<_> = figures.iter().map(first_pass).collect();
        let mut server_kinds = distinct_best(&first_passes);
        server_kinds.extend(own);
        let row = |server_kind| Row { server_kind, point, runs: Vec::new() };
        results.push(PointResults {
            point,
            first_passes,
            rows: server_kinds.into_iter().map(row).collect(),
        });
    }
    drop(first_progress);
    let rows = results.iter().map(|one| one.rows.len()).sum::<usize>();
    let progress = Progress::new(rows * config.repeats);
    for repeat in 1..=config.repeats {
        for row in results.iter_mut().flat_map(|results| &mut results.rows) {
            let label = repeat.to_string();
            row.runs.push(measure_point(
                &progress,
                row.point,
                row.server_kind,
                config.seconds,
                &label,
            )?);
        }
    }
    Ok(results)
}

fn measure_server(
    testbed: &TcpTestbed,
    EchoPoint { connections, bytes }: EchoPoint,
    server_kind: ServerKind,
    link: LinkKind,
    seconds: f64,
) -> Result<TcpMeasurement, LabError> {
    let server = testbed.start(server_kind, &[])?;
    let load = TcpLoadConfig {
        connections,
        source_count: connections.div_ceil(CONNECTIONS_PER_SOURCE) as u32,
        message_bytes: bytes,
        seconds,
        warm_up_seconds: seconds / 4.0,
        ..testbed.load_config(&server, link)
    };
    let run = testbed.measure(&load)?;
    server.process.stop();
    Ok(run)
}

fn report_step(
    progress: &Progress,
    label: &str,
    server_kind: ServerKind,
    point: EchoPoint,
    run: &TcpMeasurement,
) {
    progress.step(format_args!(
        "{label} {:<22} {:>6} x {:>5} B: {:>9.0}/s, p50 {:.1} us, p95 {:.1} us; server core {:.0} \
         %, load core {:.0} %",
        server_kind.name(),
        point.connections,
        point.bytes,
        run.load.requests_per_second,
        run.load.latency.p50_us,
        run.load.latency.p95_us,
        run.server_core.busy_percent,
        run.load_core.busy_percent
    ));
}

fn experiment(name: &str, results: &[PointResults]) -> Experiment {
    let mut result = Experiment::new(name);
    result.rows = results
        .iter()
        .flat_map(|results| &results.rows)
        .map(|row| {
            let gigabits = |rps: f64| rps * row.point.bytes as f64 * 8.0 / 1e9;
            let [rps_lowest, rps_highest] = row.ends(|run| run.load.requests_per_second);
            let [p95_lowest, p95_highest] = row.ends(|run| run.load.latency.p95_us);
            json!({
                "server": row.server_kind.name(),
                "connections": row.point.connections,
                "bytes": row.point.bytes,
                "requests_per_second": row.rps(),
                "requests_lowest": rps_lowest,
                "requests_highest": rps_highest,
                "gigabits_per_second": gigabits(row.rps()),
                "gigabits_lowest": gigabits(rps_lowest),
                "gigabits_highest": gigabits(rps_highest),
                "p95_lowest_us": p95_lowest,
                "p95_highest_us": p95_highest,
                "p50_us": row.median(|run| run.load.latency.p50_us),
                "spread_percent": row.spread_percent(|run| run.load.latency.p50_us),
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
        "core 1 serves, core 0 generates the load; {load}; a first pass measures the kernel with \
         epoll that sleeps, epoll that spins and io_uring, each with its receive work in softirqs \
         where Linux puts them (on core 0), by RPS, in a NAPI thread or in the server's own calls \
         on core 1; ratios are to the best of these at each point, measured again in turn with \
         Tidegate; medians"
    ));
}
