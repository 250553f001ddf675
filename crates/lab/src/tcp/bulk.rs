//! `lab bulk`: bytes one way, one stream and many.

use serde_json::json;

use super::{Bench, KernelReceive, Measured, Subject, TcpConfig, cores, median};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::load::{Exchange, LinkKind, TcpLoadConfig};

const STREAMS: [usize; 2] = [1, 16];
/// What is written at once.
const WRITE_BYTES: usize = 64 << 10;

/// Which way the bytes go, as seen from the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }
}

/// What goes over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wire {
    /// Frames of at most 1,514 bytes, whole.
    Frames,
    /// Segments that are not cut, with checksums that are not filled in.
    Uncut,
}

impl Wire {
    fn name(self) -> &'static str {
        match self {
            Self::Frames => "frames",
            Self::Uncut => "uncut segments",
        }
    }

    /// Who can serve: AF_XDP has only whole frames.
    fn subjects(self) -> &'static [Subject] {
        use Subject::{KernelEpoll, KernelSpin, TidegatePacket, TidegateXdp};
        match self {
            Self::Frames => &[KernelEpoll, KernelSpin, TidegateXdp, TidegatePacket],
            Self::Uncut => &[KernelEpoll, KernelSpin, TidegatePacket],
        }
    }

    fn streams(self) -> &'static [usize] {
        match self {
            Self::Frames => &STREAMS,
            Self::Uncut => &STREAMS[..1],
        }
    }
}

/// What is measured: all that is the same for all subjects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    wire: Wire,
    way: Way,
    streams: usize,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for wire in [Wire::Frames, Wire::Uncut] {
            for way in [Way::In, Way::Out] {
                all.extend(wire.streams().iter().map(|&streams| Self { wire, way, streams }));
            }
        }
        all
    }
}

struct Row {
    subject: Subject,
    case: Case,
    runs: Vec<Measured>,
}

impl Row {
    fn median(&self, of: impl Fn(&Measured) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    fn gbps(&self) -> f64 {
        self.median(|run| {
            let bytes = match self.case.way {
                Way::In => run.load.sent_bytes_per_second,
                Way::Out => run.load.received_bytes_per_second,
            };
            bytes * 8.0 / 1e9
        })
    }

    fn measure(&self, bench: &Bench, seconds: f64) -> Result<Measured, LabError> {
        let Case { wire, way, streams } = self.case;
        bench.set_offload(wire == Wire::Uncut)?;
        let mut flags = vec![if way == Way::In { "--sink" } else { "--source" }];
        flags.extend((self.subject == Subject::TidegatePacket).then_some("--segmentation"));
        let server = bench.start(self.subject, KernelReceive::Thread, &flags)?;
        let link = if wire == Wire::Uncut { LinkKind::Kernel } else { LinkKind::Xdp };
        let load = TcpLoadConfig {
            connections: streams,
            exchange: if way == Way::In { Exchange::Send } else { Exchange::Receive },
            message_bytes: WRITE_BYTES,
            seconds,
            warm_up_seconds: seconds / 4.0,
            ..bench.load_config(&server, link)
        };
        let measured = bench.measure(&load)?;
        server.process.stop();
        Ok(measured)
    }
}

/// Bytes into a server and out of one: with frames as a wire carries them, and
/// with segments that nobody cuts.
///
/// # Errors
/// When namespaces cannot be made or a server does not start.
pub fn run(config: &TcpConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = cores()?;
    let bench = Bench::new(server_core, load_core)?;
    let row = |case, subject| Row { subject, case, runs: Vec::new() };
    let rows_of = |case: Case| case.wire.subjects().iter().map(move |&subject| row(case, subject));
    let mut rows: Vec<Row> = Case::all().into_iter().flat_map(rows_of).collect();
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let run = row.measure(&bench, config.seconds)?;
            eprintln!(
                "{repeat} {:<16} {:>3} x {:<3} {:<14}: {:.2} Gbit/s in, {:.2} out; server core \
                 {:.0} %, load core {:.0} %",
                row.subject.name(),
                row.case.streams,
                row.case.way.name(),
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
            let those = of_case.filter(|row| row.subject.is_kernel() == of_kernel);
            those.map(Row::gbps).fold(0.0, f64::max)
        };
        let ratio = best(false) / best(true);
        match case {
            Case { wire: Wire::Uncut, .. } => offload_ratio = ratio.min(offload_ratio),
            Case { way, streams: 1, .. } => {
                result.figure(&format!("bulk_{}_ratio", way.name()), ratio);
            }
            Case { way, streams, .. } => {
                result.figure(&format!("bulk_{}_ratio_{streams}", way.name()), ratio);
            }
        }
    }
    result.figure("bulk_offload_ratio", offload_ratio);
    let row = |row: &Row| {
        json!({
            "server": row.subject.name(),
            "wire": row.case.wire.name(),
            "way": row.case.way.name(),
            "streams": row.case.streams,
            "gigabits_per_second": row.gbps(),
            "server_core": row.median(|run| run.server_core.busy_percent),
            "load_core": row.median(|run| run.load_core.busy_percent),
        })
    };
    result.rows = rows.iter().map(row).collect();
    result.note(
        "ratios are of the best of Tidegate's ports to the better of the kernel's servers; on \
         AF_PACKET Tidegate lets the kernel cut and merge segments (--segmentation); the device of \
         the kernel and of AF_PACKET has a thread on the server's core and merges what it receives \
         (GRO); with frames the other end of every stream is Tidegate on AF_XDP on core 0, with \
         uncut segments the kernel, which may be the limit where its core is full; \
         bulk_offload_ratio is the worse of both ways; medians",
    );
    result
}
