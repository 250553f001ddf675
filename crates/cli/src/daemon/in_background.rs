//! Daemon in the background of an application of its own.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::Failure;

/// Flag that starts the daemon in the background.
pub(crate) const BACKGROUND: &str = "--background";
/// Flag that ends the daemon with the other end of its standard input.
pub(crate) const UNTIL_EOF: &str = "--until-eof";

/// Starts the daemon of this command line once more, without [`BACKGROUND`], and returns when it
/// serves. It is then no child of the process that called this one.
///
/// # Errors
/// When the daemon ends before it serves; it has said why.
pub(super) fn start() -> Result<(), Failure> {
    let mut daemon = Command::new(std::env::current_exe()?);
    daemon.args(std::env::args_os().skip(1).filter(|argument| argument != BACKGROUND));
    let mut daemon = daemon.stdout(Stdio::piped()).spawn()?;
    let mut ready = String::new();
    if let Some(output) = daemon.stdout.take() {
        BufReader::new(output).read_line(&mut ready)?;
    }
    match ready.is_empty() {
        true => Err(format!("the daemon did not start ({})", daemon.wait()?).into()),
        false => Ok(()),
    }
}

/// Waits for the end of standard input, at most this long. Returns true if it has ended.
pub(super) fn has_stdin_ended(limit: Duration) -> bool {
    let stdin = rustix::stdio::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::empty())];
    let limit = Timespec::try_from(limit).ok();
    match rustix::event::poll(&mut fds, limit.as_ref()) {
        Ok(_) => fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
        // A signal: whoever sent it is noticed by the caller.
        Err(_) => false,
    }
}
