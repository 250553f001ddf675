//! `dpdk-testpmd`: DPDK's own program to make, forward and count frames.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::LabError;

/// The program, and the package that has it.
pub(super) const PROGRAM: &str = "dpdk-testpmd";
pub(super) const PACKAGE: &str = "dpdk-dev";
/// What starts it: into a pipe it would answer only by the page.
pub(super) const STARTER: &str = "stdbuf";

const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How often to look whether a link is up.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How many of the last lines an error tells.
const TOLD_LINES: usize = 4;
/// Frames of a burst of its own.
pub(super) const BURST: usize = 32;

/// One that forwards every frame of a device as it came. It is ended on drop.
pub(super) struct Testpmd {
    child: Child,
    orders: ChildStdin,
    lines: mpsc::Receiver<String>,
    last: VecDeque<String>,
}

impl Testpmd {
    /// Starts it on one device, and waits until it takes orders. `command` runs
    /// [`STARTER`] and has no arguments yet. Its two threads are where the command is: the one that forwards
    /// never sleeps, the one that takes orders always does.
    pub(super) fn start(mut command: Command, core: usize, device: &str) -> Result<Self, LabError> {
        let lcores = format!("--lcores=0@{core},1@{core}");
        command.args(["-oL", PROGRAM]);
        command.args(["--no-huge", "-m", "256", "--no-shconf", "--no-telemetry", "--no-pci"]);
        command.args([&lcores, "--vdev", device, "--", "--interactive"]);
        command.args(["--forward-mode=io", "--total-num-mbufs=16384"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = || LabError::io(format!("cannot start {PROGRAM}"));
        let mut child = command.spawn().map_err(failed())?;
        let (Some(orders), Some(out), Some(err)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            unreachable!("all three are pipes");
        };
        let (sender, lines) = mpsc::channel();
        read_lines(out, sender.clone());
        read_lines(err, sender);
        let mut testpmd = Self { child, orders, lines, last: VecDeque::new() };
        testpmd.link()?;
        Ok(testpmd)
    }

    /// Waits until the other side of its device is there.
    pub(super) fn wait_for_link(&mut self) -> Result<(), LabError> {
        let began = Instant::now();
        while self.link()? != "up" {
            if began.elapsed() > ANSWER_LIMIT {
                return Err(self.failed("its device has no link"));
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// `up` or `down`.
    fn link(&mut self) -> Result<String, LabError> {
        self.ask("show port info 0", "Link status:")
    }

    /// Forwards from now on, and sends so many bursts of its own first.
    pub(super) fn forward(&mut self, bursts: usize) -> Result<(), LabError> {
        match bursts {
            0 => self.order("start"),
            bursts => self.order(&format!("start tx_first {bursts}")),
        }
    }

    /// Frames that it receives in a second, by its own clock.
    pub(super) fn received_pps(&mut self, time: Duration) -> Result<f64, LabError> {
        // It counts from the last time that it was asked.
        self.ask("show port stats 0", "Rx-pps:")?;
        thread::sleep(time);
        let rate = self.ask("show port stats 0", "Rx-pps:")?;
        rate.parse().map_err(|_| self.failed(&format!("{rate:?} is no rate")))
    }

    fn order(&mut self, order: &str) -> Result<(), LabError> {
        writeln!(self.orders, "{order}").map_err(|_| self.failed("it takes no orders"))
    }

    /// Gives an order, and returns the word behind `name` in what it prints.
    fn ask(&mut self, order: &str, name: &str) -> Result<String, LabError> {
        self.order(order)?;
        loop {
            let line = match self.lines.recv_timeout(ANSWER_LIMIT) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Timeout) => return Err(self.failed("it is silent")),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(self.failed("it ended")),
            };
            if let Some(word) = word_behind(&line, name) {
                return Ok(word.to_owned());
            }
            self.last.truncate(TOLD_LINES - 1);
            self.last.push_front(line);
        }
    }

    fn failed(&self, detail: &str) -> LabError {
        let said: Vec<&str> = self.last.iter().rev().map(String::as_str).collect();
        LabError::Server {
            name: PROGRAM.to_owned(),
            detail: format!("{detail}; it said: {}", said.join(" / ")),
        }
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.order("quit");
        let began = Instant::now();
        while began.elapsed() < STOP_LIMIT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Hands on every line until there is no more, or nobody listens.
fn read_lines(from: impl Read + Send + 'static, to: mpsc::Sender<String>) {
    thread::spawn(move || {
        let lines = BufReader::new(from).split(b'\n').map_while(Result::ok);
        let mut texts = lines.map(|line| String::from_utf8_lossy(&line).trim().to_owned());
        texts.all(|line| line.is_empty() || to.send(line).is_ok())
    });
}

/// The word behind `name` in a line: `up` behind `Link status:`.
fn word_behind<'l>(line: &'l str, name: &str) -> Option<&'l str> {
    line.split_once(name)?.1.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_in_what_it_prints() {
        let line = "  Rx-pps:      5947550          Rx-bps:   3045141552";
        assert_eq!(word_behind(line, "Rx-pps:"), Some("5947550"));
        assert_eq!(word_behind("testpmd> Link status: up", "Link status:"), Some("up"));
        assert_eq!(word_behind("Link speed: 10 Gbps", "Link status:"), None);
    }

    #[test]
    fn one_that_ends_is_an_error_that_tells_what_it_said() {
        let mut command = Command::new("sh");
        // What else it is given are arguments that the script does not look at.
        command.args(["-c", "echo no such device; exit 1", "sh"]);
        let error = Testpmd::start(command, 0, "net_null0").err().unwrap().to_string();
        assert!(error.contains(PROGRAM), "{error}");
    }
}
