//! `dpdk-testpmd`: DPDK's own application that generates, forwards and counts frames.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::testbed::ending;

/// The executable, and the Debian package that contains it.
pub(super) const PROGRAM: &str = "dpdk-testpmd";
pub(super) const PACKAGE: &str = "dpdk-dev";
/// Starts `dpdk-testpmd` with line buffering: into a pipe it would flush its output only by the
/// page.
pub(super) const STDBUF: &str = "stdbuf";

const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two queries of the link status.
const LINK_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Number of recent output lines that an error message quotes.
const MAX_REPORTED_LINES: usize = 4;
/// Frames in a burst of a `dpdk-testpmd` that generates frames, which is its default.
pub(super) const BURST_FRAMES: usize = 32;

/// A `dpdk-testpmd` process that forwards every frame of a device unchanged. Stopped on drop.
pub(super) struct Testpmd {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
    recent_lines: VecDeque<String>,
}

impl Testpmd {
    /// Starts `dpdk-testpmd` on one device and waits until it accepts commands. `command` runs
    /// [`STDBUF`] and has no arguments yet.
    ///
    /// It moves at most `burst_frames` frames in one call of the device. Both threads run on `core`:
    /// the forwarding thread never sleeps, the command thread sleeps
    /// except while it executes a command.
    pub(super) fn start(
        mut command: Command,
        core: usize,
        device: &str,
        burst_frames: usize,
    ) -> Result<Self, LabError> {
        let lcores = format!("--lcores=0@{core},1@{core}");
        command.args(["-oL", PROGRAM]);
        command.args(["--no-huge", "-m", "256", "--no-shconf", "--no-telemetry", "--no-pci"]);
        command.args([&lcores, "--vdev", device, "--", "--interactive"]);
        command.args(["--forward-mode=io", "--total-num-mbufs=16384"]);
        command.arg(format!("--burst={burst_frames}"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = || LabError::io(format!("cannot start {PROGRAM}"));
        let _creating = ending::creating();
        let mut child = command.spawn().map_err(failed())?;
        let (Some(stdin), Some(out), Some(err)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            unreachable!("all three are pipes");
        };
        let (sender, lines) = mpsc::channel();
        read_lines(out, sender.clone());
        read_lines(err, sender);
        let mut testpmd = Self { child, stdin, lines, recent_lines: VecDeque::new() };
        testpmd.link_status()?;
        Ok(testpmd)
    }

    /// Waits until the link of the device is up, which needs the other end of the wire.
    pub(super) fn wait_for_link(&mut self) -> Result<(), LabError> {
        let began = Instant::now();
        while self.link_status()? != "up" {
            if began.elapsed() > REPLY_TIMEOUT {
                return Err(self.failed("the link of its device did not come up"));
            }
            thread::sleep(LINK_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Link status: `up` or `down`.
    fn link_status(&mut self) -> Result<String, LabError> {
        self.query("show port info 0", "Link status:")
    }

    /// Starts forwarding; first sends `bursts` bursts of generated frames.
    pub(super) fn forward(&mut self, bursts: usize) -> Result<(), LabError> {
        match bursts {
            0 => self.send_command("start"),
            bursts => self.send_command(&format!("start tx_first {bursts}")),
        }
    }

    /// Frames received per second, measured by `dpdk-testpmd` over `time`.
    pub(super) fn received_pps(&mut self, time: Duration) -> Result<f64, LabError> {
        // The counter restarts with each query.
        self.query("show port stats 0", "Rx-pps:")?;
        thread::sleep(time);
        let rate = self.query("show port stats 0", "Rx-pps:")?;
        rate.parse().map_err(|_| self.failed(&format!("{rate:?} is not a rate")))
    }

    fn send_command(&mut self, order: &str) -> Result<(), LabError> {
        writeln!(self.stdin, "{order}").map_err(|_| self.failed("it accepts no commands"))
    }

    /// Sends a command and returns the word after `name` in its output.
    fn query(&mut self, command: &str, name: &str) -> Result<String, LabError> {
        self.send_command(command)?;
        loop {
            let line = match self.lines.recv_timeout(REPLY_TIMEOUT) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    return Err(self.failed("no reply within 30 s"));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(self.failed("it exited")),
            };
            if let Some(word) = word_after(&line, name) {
                return Ok(word.to_owned());
            }
            self.recent_lines.truncate(MAX_REPORTED_LINES - 1);
            self.recent_lines.push_front(line);
        }
    }

    fn failed(&self, detail: &str) -> LabError {
        let output: Vec<&str> = self.recent_lines.iter().rev().map(String::as_str).collect();
        LabError::Server {
            name: PROGRAM.to_owned(),
            detail: format!("{detail}; last output: {}", output.join(" / ")),
        }
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.send_command("quit");
        let began = Instant::now();
        while began.elapsed() < STOP_TIMEOUT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Forwards every non-empty line to `to`, until the end of the input or until the receiver is
/// dropped.
fn read_lines(from: impl Read + Send + 'static, to: mpsc::Sender<String>) {
    thread::spawn(move || {
        let lines = BufReader::new(from).split(b'\n').map_while(Result::ok);
        let mut texts = lines.map(|line| String::from_utf8_lossy(&line).trim().to_owned());
        texts.all(|line| line.is_empty() || to.send(line).is_ok())
    });
}

/// The word after `name` in a line: `up` after `Link status:`.
fn word_after<'l>(line: &'l str, name: &str) -> Option<&'l str> {
    line.split_once(name)?.1.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_word_after_a_label() {
        let line = "  Rx-pps:      5947550          Rx-bps:   3045141552";
        assert_eq!(word_after(line, "Rx-pps:"), Some("5947550"));
        assert_eq!(word_after("testpmd> Link status: up", "Link status:"), Some("up"));
        assert_eq!(word_after("Link speed: 10 Gbps", "Link status:"), None);
    }

    #[test]
    fn early_exit_is_an_error_with_its_output() {
        let mut command = Command::new("sh");
        // The script ignores the further arguments.
        command.args(["-c", "echo no such device; exit 1", "sh"]);
        let error =
            Testpmd::start(command, 0, "net_null0", BURST_FRAMES).err().unwrap().to_string();
        assert!(error.contains(PROGRAM), "{error}");
    }
}
