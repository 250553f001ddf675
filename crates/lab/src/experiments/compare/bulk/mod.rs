//! Experiment bulk: bulk transfer in one direction, on one stream and on many.

mod iperf3;

use serde_json::json;
use tidegate_load::{Exchange, LinkKind, TcpLoadConfig};

use self::iperf3::Iperf3;
use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, spread_percent};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores};

/// Tidegate on AF_PACKET, where a NAPI thread merges segments.
const TIDEGATE_PACKET: ServerKind = ServerKind::TidegatePacket(ReceiveWork::Thread);
const STREAM_COUNTS: [usize; 2] = [1, 16];
/// Bytes of one write.
const WRITE_BYTES: usize = 64 << 10;

/// Direction of the bytes, as seen from the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }
}

/// Form of the segments on the veth pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WireFormat {
    /// Complete frames of at most 1,514 bytes.
    Frames,
    /// Large segments without segmentation (TSO), with checksums that are not filled in.
    Uncut,
}

impl WireFormat {
    fn name(self) -> &'static str {
        match self {
            Self::Frames => "frames",
            Self::Uncut => "uncut segments",
        }
    }

    /// Tidegate's servers that support this form: AF_XDP carries complete frames only.
    fn own_servers(self) -> &'static [ServerKind] {
        match self {
            Self::Frames => &[ServerKind::TidegateXdp, TIDEGATE_PACKET],
            Self::Uncut => &[TIDEGATE_PACKET],
        }
    }

    fn streams(self) -> &'static [usize] {
        match self {
            Self::Frames => &STREAM_COUNTS,
            Self::Uncut => &STREAM_COUNTS[..1],
        }
    }
}

/// Other end of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// Tidegate on AF_XDP.
    Tidegate,
    /// The kernel's sockets.
    Kernel,
}

impl Client {
    fn name(self) -> &'static str {
        match self {
            Self::Tidegate => "tidegate",
            Self::Kernel => "kernel",
        }
    }

    fn link(self) -> LinkKind {
        match self {
            Self::Tidegate => LinkKind::Xdp,
            Self::Kernel => LinkKind::Kernel,
        }
    }
}

/// Parameters that are the same for all servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    wire: WireFormat,
    client: Client,
    direction: Direction,
    streams: usize,
}

impl Case {
    fn all() -> Vec<Self> {
        let wires = [
            (WireFormat::Frames, Client::Tidegate),
            (WireFormat::Frames, Client::Kernel),
            (WireFormat::Uncut, Client::Kernel),
        ];
        let mut all = Vec::new();
        for (wire, client) in wires {
            for direction in [Direction::In, Direction::Out] {
                let streams = wire.streams().iter();
                all.extend(streams.map(|&streams| Self { wire, client, direction, streams }));
            }
        }
        all
    }

    fn measure(
        self,
        server_kind: ServerKind,
        testbed: &TcpTestbed,
        seconds: f64,
    ) -> Result<TcpMeasurement, LabError> {
        let Self { wire, client, direction, streams: connections } = self;
        testbed.set_offload(wire == WireFormat::Uncut)?;
        let mut flags = vec![if direction == Direction::In { "--sink" } else { "--source" }];
        flags.extend((server_kind == TIDEGATE_PACKET).then_some("--segmentation"));
        let server = testbed.start(server_kind, &flags)?;
        let load = TcpLoadConfig {
            connections,
            exchange: if direction == Direction::In { Exchange::Send } else { Exchange::Receive },
            message_bytes: WRITE_BYTES,
            seconds,
            warm_up_seconds: seconds / 4.0,
            ..testbed.load_config(&server, client.link())
        };
        let measured = testbed.measure(&load)?;
        server.process.stop();
        Ok(measured)
    }

    fn gbps(self, run: &TcpMeasurement) -> f64 {
        let bytes = match self.direction {
            Direction::In => run.load.sent_bytes_per_second,
            Direction::Out => run.load.received_bytes_per_second,
        };
        bytes * 8.0 / 1e9
    }

    fn report_step(
        self,
        progress: &Progress,
        label: &str,
        server_kind: ServerKind,
        run: &TcpMeasurement,
    ) {
        progress.step(format_args!(
            "{label} {:<22} {:>3} x {:<3} {:<14} client {:<8}: {:.2} Gbit/s; server core {:.0} %, \
             load core {:.0} %",
            server_kind.name(),
            self.streams,
            self.direction.name(),
            self.wire.name(),
            self.client.name(),
            self.gbps(run),
            run.server_core.busy_percent,
            run.load_core.busy_percent
        ));
    }

    /// Name of the figure that compares Tidegate with the kernel.
    fn figure(self) -> String {
        let Self { wire, client, direction, streams } = self;
        let offload = if wire == WireFormat::Uncut { "_offload" } else { "" };
        let streams = if streams == 1 { String::new() } else { format!("_{streams}") };
        let client = match (wire, client) {
            (WireFormat::Frames, Client::Kernel) => "_kernel_client",
            _ => "",
        };
        format!("bulk{offload}_{}_ratio{streams}{client}", direction.name())
    }
}

struct Row {
    server_kind: ServerKind,
    runs: Vec<TcpMeasurement>,
}

impl Row {
    fn median(&self, of: impl Fn(&TcpMeasurement) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    fn spread_percent(&self, of: impl Fn(&TcpMeasurement) -> f64) -> f64 {
        spread_percent(self.runs.iter().map(of))
    }
}

/// Measurements of all servers in one case: the kernel's best, then Tidegate's.
struct CaseResults {
    case: Case,
    first_pass: FirstPass<ServerKind>,
    rows: Vec<Row>,
}

/// Measures transfers into a server and out of a server: with frames as on a physical link, and
/// with segments that are not segmented.
///
/// # Errors
/// When namespaces cannot be created or a server does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let measure = |progress: &Progress, case: Case, server_kind, seconds, label: &str| {
        let run = case.measure(server_kind, &testbed, seconds)?;
        case.report_step(progress, label, server_kind, &run);
        Ok::<_, LabError>(run)
    };
    let mut results = Vec::new();
    let kernel = ServerKind::kernel_stream_servers();
    let first_pass = Progress::of_part("first pass", Case::all().len() * kernel.len());
    for case in Case::all() {
        let seconds = (config.seconds / 4.0).clamp(0.25, FIRST_PASS_SECONDS);
        let rate = |server_kind| {
            measure(&first_pass, case, server_kind, seconds, "first pass")
                .map(|run| case.gbps(&run))
        };
        let ways = FirstPass::measure(Goal::Highest, &kernel, ServerKind::name, rate)?;
        let server_kinds = [ways.best()].into_iter().chain(case.wire.own_servers().to_vec());
        let row = |server_kind| Row { server_kind, runs: Vec::new() };
        let rows = server_kinds.map(row).collect();
        results.push(CaseResults { case, rows, first_pass: ways });
    }
    drop(first_pass);
    // iperf3 counts whole seconds: a short run measures one stream.
    let stream_counts = if config.seconds < 1.0 { &STREAM_COUNTS[..1] } else { &STREAM_COUNTS[..] };
    let mut iperf3 =
        Iperf3::choose_kernel((server_core, load_core), stream_counts, FIRST_PASS_SECONDS)?;
    let rows = results.iter().map(|one| one.rows.len()).sum::<usize>() + iperf3.steps();
    let progress = Progress::new(rows * config.repeats);
    for repeat in 1..=config.repeats {
        for CaseResults { case, rows, .. } in &mut results {
            for row in rows {
                let label = repeat.to_string();
                row.runs.push(measure(&progress, *case, row.server_kind, config.seconds, &label)?);
            }
        }
        iperf3.measure(config.seconds, &progress)?;
    }
    let mut result = report(&results);
    iperf3.report(&mut result);
    Ok(result)
}

fn report(results: &[CaseResults]) -> Experiment {
    let mut result = Experiment::new("bulk");
    let mut offload_ratio = f64::INFINITY;
    for CaseResults { case, first_pass, rows } in results {
        let best = |of_kernel: bool| {
            let same_side = rows.iter().filter(|row| row.server_kind.is_kernel() == of_kernel);
            same_side.map(|row| row.median(|run| case.gbps(run))).fold(0.0, f64::max)
        };
        let (own, kernel) = (best(false), best(true));
        let ratio = own / kernel;
        if case.wire == WireFormat::Uncut {
            offload_ratio = ratio.min(offload_ratio);
        }
        result.compare_with_best(&case.figure(), ratio, first_pass.rows(kernel));
        result.rows.extend(rows.iter().map(|row| {
            json!({
                "server": row.server_kind.name(),
                "wire": case.wire.name(),
                "client": case.client.name(),
                "way": case.direction.name(),
                "streams": case.streams,
                "gigabits_per_second": row.median(|run| case.gbps(run)),
                "spread_percent": row.spread_percent(|run| case.gbps(run)),
                "server_core": row.median(|run| run.server_core.busy_percent),
                "load_core": row.median(|run| run.load_core.busy_percent),
            })
        }));
    }
    result.figure("bulk_offload_ratio", offload_ratio);
    result.note(
        "ratios are of the best of Tidegate's devices to the kernel's best, which a first pass \
         chooses for each case and which is measured again in turn with Tidegate; on AF_PACKET \
         Tidegate lets the kernel segment and coalesce (--segmentation), and the device has a NAPI \
         thread on the server's core; the client is Tidegate on AF_XDP or the kernel, on core 0, \
         and may be the bottleneck where its core is saturated; bulk_offload_ratio is the worse of \
         both directions; medians",
    );
    result
}
