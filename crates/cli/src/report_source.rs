//! Reports of a daemon or of a server, for `tidegate ss` and `tidegate top`.

use std::io;
use std::path::PathBuf;

use clap::Args;
use tidegate_service::attachment::DEFAULT_PATH;
use tidegate_service::daemon::DaemonReport;

use crate::control;

/// Flags that choose the process to report on.
#[derive(Args)]
pub(crate) struct ReportSource {
    /// Unix socket of the daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_PATH)]
    socket: PathBuf,
    /// Control socket of a server (`serve dns`, `http`, `echo`) or daemon, in place of --socket
    #[arg(long, value_name = "PATH", conflicts_with = "socket")]
    control: Option<PathBuf>,
}

impl ReportSource {
    /// Queries the daemon or the server.
    ///
    /// # Errors
    /// When it cannot be reached or does not answer with a report.
    pub(crate) fn query(&self) -> io::Result<DaemonReport> {
        match &self.control {
            Some(control) => {
                control::report(control).map_err(|error| io::Error::other(error.to_string()))
            }
            None => DaemonReport::query(&self.socket),
        }
    }
}
