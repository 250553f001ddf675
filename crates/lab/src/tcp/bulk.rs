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

struct Row {
    subject: Subject,
    way: Way,
    streams: usize,
    runs: Vec<Measured>,
}

impl Row {
    fn median(&self, of: impl Fn(&Measured) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    fn gbps(&self) -> f64 {
        self.median(|run| {
            let bytes = match self.way {
                Way::In => run.load.sent_bytes_per_second,
                Way::Out => run.load.received_bytes_per_second,
            };
            bytes * 8.0 / 1e9
        })
    }
}

/// Bytes into a server and out of one, with frames as a wire carries them.
///
/// # Errors
/// When namespaces cannot be made or a server does not start.
pub fn run(config: &TcpConfig) -> Result<Experiment, LabError> {
    let (server_core, load_core) = cores()?;
    let bench = Bench::new(server_core, load_core)?;
    let subjects = [Subject::KernelEpoll, Subject::KernelSpin, Subject::TidegateXdp];
    let mut rows: Vec<Row> = Vec::new();
    for way in [Way::In, Way::Out] {
        for streams in STREAMS {
            rows.extend(subjects.map(|subject| Row { subject, way, streams, runs: Vec::new() }));
        }
    }
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let flag = if row.way == Way::In { "--sink" } else { "--source" };
            let server = bench.start(row.subject, KernelReceive::Thread, &[flag])?;
            let load = TcpLoadConfig {
                connections: row.streams,
                exchange: if row.way == Way::In { Exchange::Send } else { Exchange::Receive },
                message_bytes: WRITE_BYTES,
                seconds: config.seconds,
                warm_up_seconds: config.seconds / 4.0,
                ..bench.load_config(&server, LinkKind::Xdp)
            };
            row.runs.push(bench.measure(&load)?);
            server.process.stop();
            let run = &row.runs[row.runs.len() - 1];
            eprintln!(
                "{repeat} {:<16} {:>3} x {:<3}: {:.2} Gbit/s in, {:.2} out; server core {:.0} %, load \
                 core {:.0} %",
                row.subject.name(),
                row.streams,
                row.way.name(),
                run.load.sent_bytes_per_second * 8e-9,
                run.load.received_bytes_per_second * 8e-9,
                run.server_core.busy_percent,
                run.load_core.busy_percent,
            );
        }
    }
    Ok(report(&rows))
}

fn report(rows: &[Row]) -> Experiment {
    let mut result = Experiment::new("bulk");
    for way in [Way::In, Way::Out] {
        for streams in STREAMS {
            let gbps = |subject| {
                let is_it =
                    |row: &&Row| (row.subject, row.way, row.streams) == (subject, way, streams);
                rows.iter().find(is_it).map_or(0.0, Row::gbps)
            };
            let kernel = gbps(Subject::KernelEpoll).max(gbps(Subject::KernelSpin));
            let ratio = gbps(Subject::TidegateXdp) / kernel;
            let name = match streams {
                1 => format!("bulk_{}_ratio", way.name()),
                _ => format!("bulk_{}_ratio_{streams}", way.name()),
            };
            result.figure(&name, ratio);
        }
    }
    let row = |row: &Row| {
        json!({
            "server": row.subject.name(),
            "way": row.way.name(),
            "streams": row.streams,
            "gigabits_per_second": row.gbps(),
            "server_core": row.median(|run| run.server_core.busy_percent),
            "load_core": row.median(|run| run.load_core.busy_percent),
        })
    };
    result.rows = rows.iter().map(row).collect();
    result.note(
        "no segmentation offload on either side; the kernel's device has a thread on the server's \
         core and merges what it receives (GRO); the other end of every stream is Tidegate on core \
         0, which may be the limit where its core is full; medians",
    );
    result
}
