//! Commands that run until they are told to end, and reload at SIGHUP.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A running command whose standard error is read line by line; killed on drop.
pub struct Running {
    pub child: Child,
    _output: BufReader<ChildStdout>,
    errors: BufReader<ChildStderr>,
}

impl Running {
    /// Starts a command and waits until it is ready.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        if !line.starts_with("ready: ") {
            let mut text = String::new();
            errors.read_to_string(&mut text).unwrap();
            panic!("the command printed {line:?}: {text}");
        }
        Self { child, _output: output, errors }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Sends SIGHUP and returns the line that reports the reload.
    pub fn reload(&mut self) -> String {
        self.signal(Signal::HUP);
        self.line_with("reloaded")
    }

    /// Waits for a line on standard error with this text, and returns the line.
    pub fn line_with(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            let len = self.errors.read_line(&mut line).unwrap();
            assert_ne!(len, 0, "the command ended: {:?}", self.child.wait());
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Ends the command by SIGTERM, which must succeed.
    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
