//! `lab connections`: what idle connections cost.

use serde_json::json;

use super::{Bench, KernelReceive, Measured, Subject, TcpConfig, cores, median};
use crate::cpu;
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::load::{LinkKind, TcpLoadConfig};

/// Connections that ask, whatever the number of idle ones.
const ACTIVE: usize = 500;
const PER_SOURCE: usize = 16_000;

struct Row {
    connections: usize,
    resident_bytes: Vec<u64>,
    runs: Vec<Measured>,
}

impl Row {
    fn rps(&self) -> f64 {
        median(self.runs.iter().map(|run| run.load.requests_per_second))
    }

    fn resident(&self) -> f64 {
        median(self.resident_bytes.iter().map(|&bytes| bytes as f64))
    }
}

/// Memory for each idle connection, and the cost of a request on some others,
/// at more and more connections.
///
/// # Errors
/// When namespaces cannot be made or the server does not start.
pub fn run(config: &TcpConfig, most: usize) -> Result<Experiment, LabError> {
    let (server_core, load_core) = cores()?;
    let bench = Bench::new(server_core, load_core)?;
    let counts = [1_000, 10_000, 100_000, 1_000_000].into_iter().filter(|&count| count <= most);
    let row = |connections| Row { connections, resident_bytes: Vec::new(), runs: Vec::new() };
    let mut rows: Vec<Row> = counts.map(row).collect();
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let server = bench.start(Subject::TidegateXdp, KernelReceive::Steering, &[])?;
            let pid = server.process.pid();
            let load = TcpLoadConfig {
                connections: row.connections,
                active: Some(ACTIVE),
                sources: row.connections.div_ceil(PER_SOURCE) as u32,
                seconds: config.seconds,
                warm_up_seconds: config.seconds / 4.0,
                ..bench.load_config(&server, LinkKind::Xdp)
            };
            let mut resident = 0;
            let run = bench.measure_watched(&load, || {
                resident = cpu::resident_bytes(pid)?;
                Ok(())
            })?;
            server.process.stop();
            eprintln!(
                "{repeat} {:>9} connections: {:.1} MB resident, {:.0} requests/s; server core {:.0} \
                 %, load core {:.0} %",
                row.connections,
                resident as f64 / 1e6,
                run.load.requests_per_second,
                run.server_core.busy_percent,
                run.load_core.busy_percent
            );
            row.resident_bytes.push(resident);
            row.runs.push(run);
        }
    }
    let mut result = Experiment::new("connections");
    if let (Some(first), Some(last)) = (rows.first(), rows.last())
        && last.connections > first.connections
    {
        let more = (last.connections - first.connections) as f64;
        let bytes = (last.resident() - first.resident()) / more;
        result.figure("bytes_per_idle_connection", bytes);
        result.figure("cost_growth", first.rps() / last.rps());
        result.figure("most_connections", last.connections as f64);
    }
    let row = |row: &Row| {
        json!({
            "connections": row.connections,
            "resident_megabytes": row.resident() / 1e6,
            "requests_per_second": row.rps(),
            "established": row.runs.iter().map(|run| run.load.connections).min(),
        })
    };
    result.rows = rows.iter().map(row).collect();
    result.note(format!(
        "bytes: how much the whole server process grows from the first row to the last, for each \
         connection more, sockets and the program's own tables included; cost: requests/s of \
         {ACTIVE} connections among the idle ones, both ends on Tidegate with as many connections \
         each, so it counts what grows at the client too"
    ));
    Ok(result)
}
