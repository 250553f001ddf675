//! A server as a child process: started, waited for, ended.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::error::LabError;

const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A command on one core, ended with SIGTERM when the thread that starts it
/// ends. The child's process id is the program's.
pub(crate) fn command_on_core(core: usize, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(on_core(core)).arg(program);
    command
}

/// The arguments of `setpriv` for that.
pub(crate) fn on_core(core: usize) -> [String; 5] {
    ["--pdeathsig", "TERM", "taskset", "-c", &core.to_string()].map(str::to_owned)
}

/// A process that serves. It is ended on drop.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    said: mpsc::Receiver<String>,
    output: Option<JoinHandle<String>>,
}

impl Process {
    /// Starts `command`; `name` is for people. Its standard error is ours.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(name: &str, command: &mut Command) -> Result<Self, LabError> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().map_err(LabError::io(format!("cannot start {name}")))?;
        let (ready, said) = mpsc::channel();
        let stdout = child.stdout.take();
        let output = stdout.map(|stdout| thread::spawn(move || read_output(stdout, &ready)));
        Ok(Self { name: name.to_owned(), child, said, output })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the line that Tidegate's servers print when they serve.
    ///
    /// # Errors
    /// When it ends or says nothing.
    pub fn wait_for_line(&mut self) -> Result<String, LabError> {
        match self.said.recv_timeout(START_LIMIT) {
            Ok(line) => Ok(line),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.failed("it never got ready")),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.failed("it ended")),
        }
    }

    /// Waits until `is_ready` says so, which is asked every few milliseconds.
    ///
    /// # Errors
    /// When the process ends first, or is never ready.
    pub fn wait_until(&mut self, mut is_ready: impl FnMut() -> bool) -> Result<(), LabError> {
        let start = Instant::now();
        while start.elapsed() < START_LIMIT {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(self.failed(&format!("it ended ({status})")));
            }
            if is_ready() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(self.failed("it never answered"))
    }

    fn failed(&self, detail: &str) -> LabError {
        LabError::Server { name: self.name.clone(), detail: detail.to_owned() }
    }

    /// Ends the server and returns the counters that Tidegate's servers print
    /// at their end.
    pub fn stop(mut self) -> Option<Value> {
        self.end();
        let output = self.output.take()?.join().ok()?;
        output.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }

    fn end(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // Not waited for yet, so the id is still the child's.
        let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        let start = Instant::now();
        while start.elapsed() < STOP_LIMIT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// Tells the first line at once and returns the rest at the end.
fn read_output(stdout: ChildStdout, ready: &mpsc::Sender<String>) -> String {
    let mut reader = BufReader::new(stdout);
    let mut first = String::new();
    if reader.read_line(&mut first).is_ok_and(|bytes| bytes > 0) {
        // Nobody listens when the server is another's.
        let _ = ready.send(first.trim().to_owned());
    }
    let mut rest = String::new();
    let _ = reader.read_to_string(&mut rest);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        Process::start("shell", Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn the_first_line_is_told_and_the_last_json_kept() {
        let mut process = shell("echo ready; echo '{\"a\": 1}'");
        assert_eq!(process.wait_for_line().unwrap(), "ready");
        let pid = process.pid();
        assert!(pid > 0);
        process.output.as_ref().inspect(|output| while !output.is_finished() {});
        assert_eq!(process.stop().unwrap()["a"], 1);
    }

    #[test]
    fn a_process_that_ends_early_is_an_error() {
        assert!(shell("exit 3").wait_for_line().unwrap_err().to_string().contains("shell"));
        let error = shell("exit 3").wait_until(|| false).unwrap_err().to_string();
        assert!(error.contains("it ended"), "{error}");
        let missing = Process::start("x", &mut Command::new("/no/such/program"));
        assert!(missing.unwrap_err().to_string().contains("cannot start x"));
    }
}
