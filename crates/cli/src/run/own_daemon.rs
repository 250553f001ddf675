//! Daemon of an application's own: started before it, and ended after the last of its processes.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::FdFlags;
use rustix::pipe::PipeFlags;
use rustix::process::Resource;

use crate::Failure;
use crate::config;
use crate::daemon::{BACKGROUND, UNTIL_EOF};
use crate::gate::GateOptions;
use crate::host::HostOptions;
use crate::service_manager;

/// Variable with the number of the descriptor that all processes of the application keep open: the
/// daemon ends when none has it.
const LIFELINE_VARIABLE: &str = "TIDEGATE_LIFELINE";
/// Lowest number of that descriptor where the application may have many.
const MAX_FLOOR: u64 = 4096;

/// Running daemon that belongs to the application that this process becomes.
pub(super) struct OwnDaemon {
    pub(super) socket: PathBuf,
    lifeline: OwnedFd,
}

impl OwnDaemon {
    /// Starts a daemon with these options and waits until it serves.
    ///
    /// # Errors
    /// When the daemon does not start; it has said why.
    pub(super) fn start(
        host: &HostOptions,
        gate: &GateOptions,
        has_admission: bool,
        config: Option<&Path>,
    ) -> Result<Self, Failure> {
        let socket = PathBuf::from(format!("/run/tidegate/run-{}.sock", std::process::id()));
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let mut daemon = Command::new(std::env::current_exe()?);
        daemon.args(["daemon", BACKGROUND, UNTIL_EOF]).arg("--socket").arg(&socket);
        daemon.args(config::to_flags(host)?).args(config::to_flags(gate)?);
        daemon.args(has_admission.then_some("--admission"));
        if let Some(config) = config {
            daemon.arg("--config").arg(config);
        }
        // The service, if this process is one, is the application.
        service_manager::hide_from(&mut daemon);
        let status = daemon.stdin(Stdio::from(reader)).stdout(Stdio::null()).status()?;
        if !status.success() {
            return Err("the application needs a daemon of its own, which did not start for the \
                        reason above"
                .into());
        }
        // The application may count on the numbers of its descriptors: this one is out of its way.
        let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let floor = (limit / 4 * 3).min(MAX_FLOOR) as i32;
        Ok(Self { socket, lifeline: rustix::io::fcntl_dupfd_cloexec(&writer, floor)? })
    }

    /// Leaves the daemon to the application that `command` starts in this process.
    pub(super) fn leave_to(self, command: &mut Command) -> Result<(), Failure> {
        rustix::io::fcntl_setfd(&self.lifeline, FdFlags::empty())?;
        command.env(LIFELINE_VARIABLE, self.lifeline.as_raw_fd().to_string());
        // Closed by the end of the application.
        let _ = self.lifeline.into_raw_fd();
        Ok(())
    }
}
