//! Metrics of a running command for Prometheus, served by HTTP on the kernel's stack.
//!
//! [`table`] lists every metric. A [`MetricsSource`] reads the values when Prometheus asks, so that
//! nothing is counted or kept for metrics alone.

mod list;
mod server;
mod sources;
pub(crate) mod table;
mod text;

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;

pub(crate) use self::list::MetricsCommand;
pub(crate) use self::server::{MetricsListener, MetricsServer};
pub(crate) use self::sources::{
    DaemonSource, Latest, NetSource, RouterCounters, RouterSource, add_http, add_requests,
    add_service_times, guard_readings, monitor_readings,
};
pub(crate) use self::table::Readings;

/// Interval at which a command publishes counters that only one of its threads may read.
pub(crate) const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

/// Option for the metrics of a command.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct MetricsOption {
    /// Serve metrics to Prometheus at this address of the kernel's stack (HTTP, path /metrics);
    /// `tidegate metrics` lists them [default: none]
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
}

impl MetricsOption {
    /// True if metrics are served: a command publishes its counters only then.
    pub(crate) fn is_given(&self) -> bool {
        self.metrics.is_some()
    }

    /// Binds the address. To be called while the process has its privileges.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(crate) fn bind(&self) -> Result<Option<MetricsListener>, crate::Failure> {
        self.metrics.map(|address| MetricsListener::bind(address, false)).transpose()
    }

    /// Binds the address so that the process after an upgrade can bind it too.
    ///
    /// # Errors
    /// As [`MetricsOption::bind`].
    pub(crate) fn bind_for_upgrades(&self) -> Result<Option<MetricsListener>, crate::Failure> {
        self.metrics.map(|address| MetricsListener::bind(address, true)).transpose()
    }
}

/// Reads the values of the metrics.
pub(crate) trait MetricsSource: Send + Sync + 'static {
    /// Values at this moment.
    ///
    /// # Errors
    /// They cannot be had, in one line for the client.
    fn read(&self) -> Result<Readings, crate::Failure>;
}
