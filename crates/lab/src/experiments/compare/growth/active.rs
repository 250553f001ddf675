//! Requests per second of 10,000 active connections, alone and among a million.

use tidegate_load::{LinkKind, TcpLoadConfig};

use crate::error::LabError;
use crate::experiments::compare::connections::CONNECTIONS_PER_SOURCE;
use crate::testbed::tcp::{ServerKind, TcpTestbed};

/// Requests per second of `active` connections among `connections`.
///
/// # Errors
/// Also if not all connections are open at the end.
pub(super) fn measure(
    testbed: &TcpTestbed,
    active: usize,
    connections: usize,
    seconds: f64,
) -> Result<f64, LabError> {
    let server = testbed.start(ServerKind::TidegateXdp, &[])?;
    let load = TcpLoadConfig {
        connections,
        active_connections: Some(active),
        source_count: connections.div_ceil(CONNECTIONS_PER_SOURCE) as u32,
        seconds,
        warm_up_seconds: seconds / 4.0,
        ..testbed.load_config(&server, LinkKind::Xdp)
    };
    let run = testbed.measure(&load)?.load;
    server.process.stop();
    if run.connections < connections {
        let open = run.connections;
        return Err(LabError::Config(format!("only {open} of {connections} connections are open")));
    }
    Ok(run.requests_per_second)
}
