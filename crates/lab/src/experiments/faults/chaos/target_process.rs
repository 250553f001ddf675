//! Child process that runs as a kill target or as a misbehaving application.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::target::Behaviour;
use crate::LabError;
use crate::testbed::ending;
use crate::testbed::programs;

/// Child process; killed and reaped on drop.
pub(super) struct TargetProcess {
    child: Child,
}

impl TargetProcess {
    /// Starts a child process with the given behaviour.
    pub(super) fn start(
        behaviour: Behaviour,
        socket: &Path,
        port: u16,
        seed: u64,
    ) -> Result<Self, LabError> {
        let mut command = Command::new(programs::laboratory()?);
        command.args(["chaos", "--as-victim", behaviour.name(), "--socket"]).arg(socket);
        command.args(["--port", &port.to_string(), "--seed", &seed.to_string()]);
        let _creating = ending::creating();
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        Ok(Self { child: child.map_err(LabError::io("cannot start a target process"))? })
    }

    /// Waits until the child reports that it has started its behaviour.
    pub(super) fn wait_until_started(&mut self, behaviour: Behaviour) -> Result<(), LabError> {
        let mut line = String::new();
        let first_line =
            self.child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        match first_line {
            Some(Ok(1..)) => Ok(()),
            _ => Err(LabError::Config(format!(
                "the child process with the behaviour \"{}\" exited before it started",
                behaviour.name()
            ))),
        }
    }
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        // SIGKILL. The child may have exited by itself after the daemon ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
