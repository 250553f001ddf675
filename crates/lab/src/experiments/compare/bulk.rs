//! Experiment bulk: bulk transfer in one direction, on one stream and on many.

use serde_json::json;
use tidegate_load::{Exchange, LinkKind, TcpLoadConfig};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::stats::median;
use crate::testbed::tcp::{
    KernelReceive, ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores,
};

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

    /// Servers that support this form: AF_XDP carries complete frames only.
    fn server_kinds(self) -> &'static [ServerKind] {
        use ServerKind::{KernelEpoll, KernelSpin, TidegatePacket, TidegateXdp};
        match self {
            Self::Frames => &[KernelEpoll, KernelSpin, TidegateXdp, TidegatePacket],
            Self::Uncut => &[KernelEpoll, KernelSpin, TidegatePacket],
        }
    }

    fn streams(self) -> &'static [usize] {
        match self {
            Self::Frames => &STREAM_COUNTS,
            Self::Uncut => &STREAM_COUNTS[..1],
        }
    }
}

/// Parameters that are the same for all servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    wire: WireFormat,
    direction: Direction,
    streams: usize,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for wire in [WireFormat::Frames, WireFormat::Uncut] {
            for direction in [Direction::In, Direction::Out] {
                all.extend(wire.streams().iter().map(|&streams| Self { wire, direction, streams }));
            }
        }
        all
    }
}

struct Row {
    server_kind: ServerKind,
    case: Case,
    runs: Vec<TcpMeasurement>,
}

impl Row {
    fn median(&self, of: impl Fn(&TcpMeasurement) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    fn gbps(&self) -> f64 {
        self.median(|run| {
            let bytes = match self.case.direction {
                Direction::In => run.load.sent_bytes_per_second,
                Direction::Out => run.load.received_bytes_per_second,
            };
            bytes * 8.0 / 1e9
        })
    }

    fn measure(&self, testbed: &TcpTestbed, seconds: f64) -> Result<TcpMeasurement, LabError> {
        let Case { wire, direction, streams: connections } = self.case;
        testbed.set_offload(wire == WireFormat::Uncut)?;
        let mut flags = vec![if direction == Direction::In { "--sink" } else { "--source" }];
        flags.extend((self.server_kind == ServerKind::TidegatePacket).then_some("--segmentation"));
        let server = testbed.start(self.server_kind, KernelReceive::Thread, &flags)?;
        let link = if wire == WireFormat::Uncut { LinkKind::Kernel } else { LinkKind::Xdp };
        let load = TcpLoadConfig {
            connections,
            exchange: if direction == Direction::In { Exchange::Send } else { Exchange::Receive },
            message_bytes: WRITE_BYTES,
            seconds,
            warm_up_seconds: seconds / 4.0,
            ..testbed.load_config(&server, link)
        };
        let measured = testbed.measure(&load)?;
        server.process.stop();
        Ok(measured)
    }
}

/// Measures transfers into a server and out of a server: with frames as on a physical link, and
/// with segments that are not segmented.
///
/// # Errors
/// When namespaces cannot be created or a server does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let row = |case, server_kind| Row { server_kind, case, runs: Vec::new() };
    let rows_of = |case: Case| {
        case.wire.server_kinds().iter().map(move |&server_kind| row(case, server_kind))
    };
    let mut rows: Vec<Row> = Case::all().into_iter().flat_map(rows_of).collect();
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let run = row.measure(&testbed, config.seconds)?;
            eprintln!(
                "{repeat} {:<16} {:>3} x {:<3} {:<14}: {:.2} Gbit/s in, {:.2} out; server core \
                 {:.0} %, load core {:.0} %",
                row.server_kind.name(),
                row.case.streams,
                row.case.direction.name(),
                row.case.wire.name(),
                run.load.sent_bytes_per_second * 8e-9,
                run.load.received_bytes_per_second * 8e-9,
                run.server_core.busy_percent,
                run.load_core.busy_percent,
            );
            row.runs.push(run);
        }
    }
    Ok(report(&rows))
}

fn report(rows: &[Row]) -> Experiment {
    let mut result = Experiment::new("bulk");
    let mut offload_ratio = f64::INFINITY;
    for case in Case::all() {
        let best = |of_kernel: bool| {
            let of_case = rows.iter().filter(|row| row.case == case);
            let same_side = of_case.filter(|row| row.server_kind.is_kernel() == of_kernel);
            same_side.map(Row::gbps).fold(0.0, f64::max)
        };
        let ratio = best(false) / best(true);
        match case {
            Case { wire: WireFormat::Uncut, .. } => offload_ratio = ratio.min(offload_ratio),
            Case { direction, streams: 1, .. } => {
                result.figure(&format!("bulk_{}_ratio", direction.name()), ratio);
            }
            Case { direction, streams, .. } => {
                result.figure(&format!("bulk_{}_ratio_{streams}", direction.name()), ratio);
            }
        }
    }
    result.figure("bulk_offload_ratio", offload_ratio);
    let row = |row: &Row| {
        json!({
            "server": row.server_kind.name(),
            "wire": row.case.wire.name(),
            "way": row.case.direction.name(),
            "streams": row.case.streams,
            "gigabits_per_second": row.gbps(),
            "server_core": row.median(|run| run.server_core.busy_percent),
            "load_core": row.median(|run| run.load_core.busy_percent),
        })
    };
    result.rows = rows.iter().map(row).collect();
    result.note(
        "ratios are of the best of Tidegate's devices to the better of the kernel's servers; on \
         AF_PACKET Tidegate lets the kernel segment and coalesce (--segmentation); the device of \
         the kernel and of AF_PACKET has a thread on the server's core and coalesces segments \
         (GRO); with frames the other end of every stream is Tidegate on AF_XDP on core 0, with \
         uncut segments the kernel, which may be the bottleneck where its core is saturated; \
         bulk_offload_ratio is the worse of both directions; medians",
    );
    result
}
