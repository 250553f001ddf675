//! A child process that is a victim, or bad.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::victim::State;
use crate::LabError;
use crate::livelock::subject::this_program;

/// Killed and waited for, whatever happens.
pub(super) struct Victim {
    child: Child,
}

impl Victim {
    /// Starts one.
    pub(super) fn start(
        state: State,
        socket: &Path,
        port: u16,
        seed: u64,
    ) -> Result<Self, LabError> {
        let mut command = Command::new(this_program()?);
        command.args(["lab", "chaos", "--as-victim", state.name(), "--socket"]).arg(socket);
        command.args(["--port", &port.to_string(), "--seed", &seed.to_string()]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Ok(Self { child: child.map_err(LabError::io("cannot start a victim"))? })
    }

    /// Waits until it does what it is to do.
    pub(super) fn wait_until_begun(&mut self, state: State) -> Result<(), LabError> {
        let mut line = String::new();
        let told = self.child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        match told {
            Some(Ok(1..)) => Ok(()),
            _ => Err(LabError::Config(format!("the child that is {} has ended", state.name()))),
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // SIGKILL. It may have ended by itself, when the daemon has.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
