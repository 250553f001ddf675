//! Experiment connections: memory and request cost of idle connections, on Tidegate and on kernel
//! sockets.

mod kernel_memory;

use serde_json::json;
use tidegate_load::{LinkKind, TcpLoadConfig};

use self::kernel_memory::KernelMemory;
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_hundredths};
use crate::testbed::cpu;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{
    KernelProgram, ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores,
};

/// Connections that send requests, whatever the number of idle connections.
const ACTIVE_CONNECTIONS: usize = 500;
/// Connections from one source address.
pub(super) const CONNECTIONS_PER_SOURCE: usize = 16_000;

/// Server of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Tidegate,
    /// Kernel sockets with epoll, by receive work.
    Kernel(ReceiveWork),
}

impl Server {
    const ALL: [Self; 4] = [
        Self::Tidegate,
        Self::Kernel(ReceiveWork::Softirq),
        Self::Kernel(ReceiveWork::Steered),
        Self::Kernel(ReceiveWork::Thread),
    ];

    fn name(self) -> String {
        self.kind().name()
    }

    fn kind(self) -> ServerKind {
        match self {
            Self::Tidegate => ServerKind::TidegateXdp,
            Self::Kernel(receive_work) => ServerKind::Kernel(KernelProgram::Epoll, receive_work),
        }
    }
}

/// Memory of a server and its sockets while all connections are open.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    /// Resident memory of the server process.
    resident_bytes: u64,
    /// Growth of the kernel's memory since before the server's start.
    kernel: KernelMemory,
}

impl Memory {
    fn total_bytes(&self) -> f64 {
        (self.resident_bytes + self.kernel.object_bytes) as f64
    }
}

struct Row {
    server: Server,
    connections: usize,
    memory: Vec<Memory>,
    rps: Vec<f64>,
    /// Connections that were established, in each run.
    established: Vec<usize>,
}

impl Row {
    fn rps(&self) -> f64 {
        median(&self.rps)
    }

    fn bytes(&self, of: fn(&Memory) -> f64) -> f64 {
        median(self.memory.iter().map(of))
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
    let counts: Vec<usize> = [1_000, 10_000, 100_000, 1_000_000]
        .into_iter()
        .filter(|&count| count <= max_connections)
        .collect();
    // Each connection of the kernel takes a descriptor.
    let max_kernel = kernel_memory::allow_descriptors(counts.last().copied().unwrap_or(0));
    let row = |(server, connections)| Row {
        server,
        connections,
        memory: Vec::new(),
        rps: Vec::new(),
        established: Vec::new(),
    };
    let cases = Server::ALL.iter().flat_map(|&server| counts.iter().map(move |&n| (server, n)));
    let cases = cases
        .filter(|(server, connections)| *server == Server::Tidegate || *connections <= max_kernel);
    let mut rows: Vec<Row> = cases.map(row).collect();
    let progress = Progress::new(rows.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let (memory, run) = measure(config, &testbed, row)?;
            progress.step(format_args!(
                "{repeat} {:<26} {:>9} connections: {:.1} MB resident, {:.1} MB in the kernel, \
                 {:.0} requests/s; server core {:.0} %, load core {:.0} %",
                row.server.name(),
                row.connections,
                memory.resident_bytes as f64 / 1e6,
                memory.kernel.object_bytes as f64 / 1e6,
                run.load.requests_per_second,
                run.server_core.busy_percent,
                run.load_core.busy_percent
            ));
            row.memory.push(memory);
            row.rps.push(run.load.requests_per_second);
            row.established.push(run.load.connections);
        }
    }
    let mut result = Experiment::new("connections");
    conclude(&rows, &mut result);
    if counts.last().is_some_and(|&count| count > max_kernel) {
        result.note(format!(
            "the kernel's servers may open descriptors for {max_kernel} connections only: for more, run \
             as root with CAP_SYS_RESOURCE, or raise the hard limit (ulimit -Hn)"
        ));
    }
    Ok(result)
}

fn measure(
    config: &TcpLabConfig,
    testbed: &TcpTestbed,
    row: &Row,
) -> Result<(Memory, TcpMeasurement), LabError> {
    let before = KernelMemory::read(testbed.server_namespace())?;
    let server = testbed.start(row.server.kind(), &[])?;
    let pid = server.process.pid();
    let load = TcpLoadConfig {
        connections: row.connections,
        active_connections: Some(ACTIVE_CONNECTIONS),
        source_count: row.connections.div_ceil(CONNECTIONS_PER_SOURCE) as u32,
        seconds: config.seconds,
        warm_up_seconds: config.seconds / 4.0,
        ..testbed.load_config(&server, LinkKind::Xdp)
    };
    let mut memory = Memory::default();
    let run = testbed.measure_with(&load, || {
        let kernel = KernelMemory::read(testbed.server_namespace())?.since(before);
        memory = Memory { resident_bytes: cpu::resident_bytes(pid)?, kernel };
        Ok(())
    })?;
    server.process.stop();
    Ok((memory, run))
}

fn conclude(rows: &[Row], result: &mut Experiment) {
    let of = |server: Server| rows.iter().filter(move |row| row.server == server);
    for (server, suffix) in [
        (Server::Tidegate, ""),
        (Server::Kernel(ReceiveWork::Softirq), "_kernel_softirq"),
        (Server::Kernel(ReceiveWork::Steered), "_kernel_rps"),
        (Server::Kernel(ReceiveWork::Thread), "_kernel_thread"),
    ] {
        let (Some(first), Some(last)) = (of(server).next(), of(server).next_back()) else {
            continue;
        };
        if last.connections > first.connections {
            let added_connections = (last.connections - first.connections) as f64;
            let added_bytes = last.bytes(Memory::total_bytes) - first.bytes(Memory::total_bytes);
            result.figure(
                &format!("bytes_per_idle_connection{suffix}"),
                (added_bytes / added_connections).round(),
            );
            let growth = first.rps() / last.rps().max(1.0);
            result.figure(&format!("cost_growth{suffix}"), round_to_hundredths(growth));
        }
    }
    if let Some(last) = of(Server::Tidegate).next_back() {
        result.figure("max_connections", last.connections as f64);
    }
    compare_requests(rows, result);
    let row = |row: &Row| {
        json!({
            "server": row.server.name(),
            "connections": row.connections,
            "resident_megabytes": row.bytes(|memory| memory.resident_bytes as f64) / 1e6,
            "kernel_megabytes": row.bytes(|memory| memory.kernel.object_bytes as f64) / 1e6,
            "socket_buffer_megabytes": row.bytes(|memory| memory.kernel.buffer_bytes as f64) / 1e6,
            "requests_per_second": row.rps(),
            "established": row.established.iter().min(),
        })
    };
    result.rows = rows.iter().map(row).collect();
    result.columns = vec![
        "server",
        "connections",
        "established",
        "resident_megabytes",
        "kernel_megabytes",
        "socket_buffer_megabytes",
        "requests_per_second",
    ];
    result.note(
        "bytes: growth from the first row to the last, for each additional connection, of the whole \
         server process (resident memory, with sockets of Tidegate and the application's own tables) \
         and of the kernel (Slab and VmallocUsed of /proc/meminfo, from before the server's start to \
         all connections open: sockets, inodes, files, epoll items, tables of descriptors). Buffers \
         that /proc/net/sockstat charges are part of it and shown apart. Other programs that run at \
         the time count too",
    );
    result.note(format!(
        "cost: requests/s of {ACTIVE_CONNECTIONS} connections among the idle connections; the client is \
         the same for all servers, on Tidegate, with as many connections, so the cost includes growth \
         at the client",
    ));
}

/// Compares the requests per second at the highest number of connections that all servers had.
fn compare_requests(rows: &[Row], result: &mut Experiment) {
    let kernel_rows = || rows.iter().filter(|row| row.server != Server::Tidegate);
    let Some(connections) = kernel_rows().map(|row| row.connections).max() else { return };
    let at_count = |row: &&Row| row.connections == connections;
    let mut tidegate = rows.iter().filter(|row| row.server == Server::Tidegate);
    if let Some(tidegate) = tidegate.find(at_count) {
        let kernel = kernel_rows().filter(at_count);
        let kernel = kernel.map(|row| (row.server.name().to_owned(), row.rps()));
        result.compare_with_kernel("requests_over_kernel", tidegate.rps(), kernel);
        result.figure("compared_connections", connections as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(server: Server, connections: usize, megabytes: (u64, u64), rps: f64) -> Row {
        let kernel =
            KernelMemory { object_bytes: megabytes.1 * 1_000_000, ..KernelMemory::default() };
        let memory = Memory { resident_bytes: megabytes.0 * 1_000_000, kernel };
        let established = vec![connections];
        Row { server, connections, memory: vec![memory], rps: vec![rps], established }
    }

    #[test]
    fn compares_memory_and_cost_with_the_kernel() {
        let rows = [
            row(Server::Tidegate, 1_000, (20, 0), 1_000.0),
            row(Server::Tidegate, 11_000, (25, 1), 800.0),
            row(Server::Kernel(ReceiveWork::Steered), 1_000, (10, 3), 500.0),
            row(Server::Kernel(ReceiveWork::Steered), 11_000, (11, 32), 250.0),
            row(Server::Kernel(ReceiveWork::Thread), 1_000, (10, 3), 500.0),
            row(Server::Kernel(ReceiveWork::Thread), 11_000, (11, 32), 400.0),
        ];
        let mut result = Experiment::new("connections");
        conclude(&rows, &mut result);
        assert_eq!(result.figures["bytes_per_idle_connection"], 600.0);
        assert_eq!(result.figures["bytes_per_idle_connection_kernel_rps"], 3_000.0);
        assert_eq!(result.figures["cost_growth"], 1.25);
        assert_eq!(result.figures["cost_growth_kernel_thread"], 1.25);
        assert_eq!(result.figures["requests_over_kernel"], 2.0);
        assert_eq!(result.figures["compared_connections"], 11_000.0);
        assert_eq!(result.comparisons[0].kernel_best, "kernel-epoll-thread");
        assert_eq!(result.rows[3]["kernel_megabytes"], 32.0);
    }

    #[test]
    fn one_number_of_connections_shows_no_growth() {
        let mut result = Experiment::new("connections");
        conclude(&[row(Server::Tidegate, 1_000, (20, 0), 1_000.0)], &mut result);
        assert!(result.figures.keys().eq(["max_connections"]), "{:?}", result.figures);
    }
}
