//! Experiment connections: memory and request cost of idle connections.

use serde_json::json;
use tidegate_load::{LinkKind, TcpLoadConfig};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::cpu;
use crate::testbed::tcp::{ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores};

/// Connections that send requests, whatever the number of idle connections.
const ACTIVE_CONNECTIONS: usize = 500;
const CONNECTIONS_PER_SOURCE: usize = 16_000;

struct Row {
    connections: usize,
    resident_bytes: Vec<u64>,
    runs: Vec<TcpMeasurement>,
}

impl Row {
    fn rps(&self) -> f64 {
        median(self.runs.iter().map(|run| run.load.requests_per_second))
    }

    fn resident(&self) -> f64 {
        median(self.resident_bytes.iter().map(|&bytes| bytes as f64))
    }
}

/// Measures the memory of each idle connection, and the cost of a request on some active
/// connections, at growing numbers of connections up to `max_connections`.
///
/// # Errors
/// When namespaces cannot be created or the server does not start.
pub fn run(config: &TcpLabConfig, max_connections: usize) -> Result<Experiment, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let counts =
        [1_000, 10_000, 100_000, 1_000_000].into_iter().filter(|&count| count <= max_connections);
    let row = |connections| Row { connections, resident_bytes: Vec::new(), runs: Vec::new() };
    let mut rows: Vec<Row> = counts.map(row).collect();
    let progress = Progress::new(rows.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let server = testbed.start(ServerKind::TidegateXdp, &[])?;
            let pid = server.process.pid();
            let load = TcpLoadConfig {
                connections: row.connections,
                active_connections: Some(ACTIVE_CONNECTIONS),
                source_count: row.connections.div_ceil(CONNECTIONS_PER_SOURCE) as u32,
                seconds: config.seconds,
                warm_up_seconds: config.seconds / 4.0,
                ..testbed.load_config(&server, LinkKind::Xdp)
            };
            let mut resident = 0;
            let run = testbed.measure_with(&load, || {
                resident = cpu::resident_bytes(pid)?;
                Ok(())
            })?;
            server.process.stop();
            progress.step(format_args!(
                "{repeat} {:>9} connections: {:.1} MB resident, {:.0} requests/s; server core {:.0} \
                 %, load core {:.0} %",
                row.connections,
                resident as f64 / 1e6,
                run.load.requests_per_second,
                run.server_core.busy_percent,
                run.load_core.busy_percent));
            row.resident_bytes.push(resident);
            row.runs.push(run);
        }
    }
    let mut result = Experiment::new("connections");
    if let (Some(first), Some(last)) = (rows.first(), rows.last())
        && last.connections > first.connections
    {
        let added_connections = (last.connections - first.connections) as f64;
        let bytes = (last.resident() - first.resident()) / added_connections;
        result.figure("bytes_per_idle_connection", bytes);
        result.figure("cost_growth", first.rps() / last.rps());
        result.figure("max_connections", last.connections as f64);
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
        "bytes: growth of the whole server process from the first row to the last, for each \
         additional connection, including sockets and the application's own tables; cost: requests/s of \
         {ACTIVE_CONNECTIONS} connections among the idle connections, both ends on Tidegate with as many connections \
         each, so the cost includes growth at the client"
    ));
    Ok(result)
}
