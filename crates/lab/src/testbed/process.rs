//! Servers as child processes: start, readiness, stop.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::LabError;
use crate::testbed::ending;

const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A command pinned to one core. The process receives SIGTERM when the thread that starts it
/// ends. The child has the process id of `program`.
pub(crate) fn command_on_core(core: usize, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(setpriv_arguments(&[core])).arg(program);
    command
}

/// The arguments of `setpriv` for a program on `cores`.
pub(crate) fn setpriv_arguments(cores: &[usize]) -> [String; 5] {
    ["--pdeathsig", "TERM", "taskset", "-c", &list(cores)].map(str::to_owned)
}

/// Numbers of cores as programs take them: `1,2`.
pub(crate) fn list(cores: &[usize]) -> String {
    cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Command that runs the program which its further arguments name, with standard error at the end of
/// the file `log`. `shell` runs `sh` where the program is to run.
pub(crate) fn log_to(mut shell: Command, log: &Path) -> Command {
    shell.args(["-c", r#"log=$1; shift; exec "$@" 2>>"$log""#, "sh"]).arg(log);
    shell
}

/// A server process, stopped on drop.
#[derive(Debug)]
pub struct ServerProcess {
    name: String,
    child: Child,
    first_line: mpsc::Receiver<String>,
    output: Option<JoinHandle<String>>,
}

impl ServerProcess {
    /// Starts `command`; `name` is for messages. The process inherits standard error.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(name: &str, command: &mut Command) -> Result<Self, LabError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let _creating = ending::creating();
        let mut child = command.spawn().map_err(LabError::io(format!("cannot start {name}")))?;
        let (ready, first_line) = mpsc::channel();
        let stdout = child.stdout.take();
        let output = stdout.map(|stdout| thread::spawn(move || read_output(stdout, &ready)));
        Ok(Self { name: name.to_owned(), child, first_line, output })
    }

    /// Starts a command of [`log_to`] and waits for its first line. An error quotes the log.
    ///
    /// # Errors
    /// As [`ServerProcess::start`] and [`ServerProcess::wait_for_first_line`].
    pub(crate) fn start_logged(
        name: &str,
        command: &mut Command,
        log: &Path,
    ) -> Result<Self, LabError> {
        let mut process = Self::start(name, command)?;
        process.wait_for_first_line().map_err(|error| {
            let text = fs::read_to_string(log).unwrap_or_default();
            LabError::Config(format!("{error}: {}", text.trim()))
        })?;
        Ok(process)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the first line of output, which Tidegate's servers print when they are ready.
    ///
    /// # Errors
    /// If the process exits, or prints nothing within the time limit.
    pub fn wait_for_first_line(&mut self) -> Result<String, LabError> {
        match self.first_line.recv_timeout(START_TIMEOUT) {
            Ok(line) => Ok(line),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.failed("no ready line within 60 s")),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.failed("the process exited")),
        }
    }

    /// Waits until `is_ready` returns true, polling every 20 ms.
    ///
    /// # Errors
    /// If the process exits first, or is not ready within the time limit.
    pub fn wait_until(&mut self, mut is_ready: impl FnMut() -> bool) -> Result<(), LabError> {
        let start = Instant::now();
        while start.elapsed() < START_TIMEOUT {
            self.check_running()?;
            if is_ready() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(self.failed("not ready within 60 s"))
    }

    /// Checks that the process has not ended by itself.
    ///
    /// # Errors
    /// If it has.
    pub fn check_running(&mut self) -> Result<(), LabError> {
        match self.child.try_wait() {
            Ok(Some(status)) => Err(self.failed(&format!("the process exited ({status})"))),
            _ => Ok(()),
        }
    }

    fn failed(&self, detail: &str) -> LabError {
        LabError::Server { name: self.name.clone(), detail: detail.to_owned() }
    }

    /// Stops the server and returns the counters that Tidegate's servers print on exit.
    pub fn stop(self) -> Option<Value> {
        let output = self.stop_with_output()?;
        output.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }

    /// Stops the server and returns its output after the first line.
    pub(crate) fn stop_with_output(mut self) -> Option<String> {
        self.end();
        self.output.take()?.join().ok()
    }

    fn end(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // The child has not been reaped yet, so the process id is still valid.
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        let start = Instant::now();
        while start.elapsed() < STOP_TIMEOUT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sends the first line at once, and returns the rest at the end of the output.
fn read_output(stdout: ChildStdout, ready: &mpsc::Sender<String>) -> String {
    let mut reader = BufReader::new(stdout);
    let mut first = String::new();
    if reader.read_line(&mut first).is_ok_and(|bytes| bytes > 0) {
        // The receiver may be dropped: not every caller waits for the first line.
        let _ = ready.send(first.trim().to_owned());
    }
    let mut rest = String::new();
    let _ = reader.read_to_string(&mut rest);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ServerProcess {
        ServerProcess::start("shell", Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn returns_the_first_line_and_the_last_json() {
        let mut process = shell("echo ready; echo '{\"a\": 1}'");
        assert_eq!(process.wait_for_first_line().unwrap(), "ready");
        let pid = process.pid();
        assert!(pid > 0);
        process.output.as_ref().inspect(|output| while !output.is_finished() {});
        assert_eq!(process.stop().unwrap()["a"], 1);
    }

    #[test]
    fn early_exit_is_an_error() {
        assert!(shell("exit 3").wait_for_first_line().unwrap_err().to_string().contains("shell"));
        let mut ended = shell("read line");
        let error = loop {
            if let Err(error) = ended.check_running() {
                break error;
            }
        };
        assert!(error.to_string().contains("the process exited"), "{error}");
        assert!(shell("sleep 100").check_running().is_ok());
        let error = shell("exit 3").wait_until(|| false).unwrap_err().to_string();
        assert!(error.contains("the process exited"), "{error}");
        let missing = ServerProcess::start("x", &mut Command::new("/no/such/program"));
        assert!(missing.unwrap_err().to_string().contains("cannot start x"));
    }
}
