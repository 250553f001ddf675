//! Requests of a process that has dropped its privileges to its restorer: other values of the
//! settings that the process has changed before.
//!
//! A request is the flush timeout in nanoseconds, eight bytes on the socket of process and restorer.
//! The restorer repeats it when the kernel has accepted the change, and otherwise answers
//! [`REFUSED`]. A request can name no other interface, no other setting, and no longer timeout than
//! [`MAX_FLUSH_TIMEOUT_NS`].

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Longest flush timeout that a restorer sets, in nanoseconds: as long a program of the kernel
/// may have to wait for a packet while the process is alive.
pub(super) const MAX_FLUSH_TIMEOUT_NS: u64 = 1_000_000_000;

/// Answer to a request that the kernel or the restorer has refused.
pub(super) const REFUSED: u64 = u64::MAX;

const BYTES: usize = size_of::<u64>();

/// Maximum time that a device waits for its restorer. A device that goes to sleep must not sleep
/// with the timeout of a busy one.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(5);

/// Time without requests after a restorer did not answer: it may be stopped, or be replaced by its
/// standby.
const PAUSE: Duration = Duration::from_millis(200);

/// The process's side.
#[derive(Debug, Default)]
pub(super) struct Requests {
    paused_until: Option<Instant>,
}

impl Requests {
    /// Sends a request and waits for the answer.
    ///
    /// # Errors
    /// The restorer does not answer in time, is gone, or refuses.
    pub(super) fn send(&mut self, socket: impl AsFd, flush_timeout_ns: u64) -> io::Result<()> {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| now < until) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let request = flush_timeout_ns.min(MAX_FLUSH_TIMEOUT_NS);
        let result = exchange(&socket, request, now + ANSWER_TIMEOUT);
        self.paused_until = result.is_err().then(|| now + PAUSE);
        result
    }
}

fn exchange(socket: impl AsFd, request: u64, deadline: Instant) -> io::Result<()> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    send(&socket, &request.to_ne_bytes(), flags)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => continue,
            other => other?,
        };
        match receive(&socket)? {
            Some(answer) if answer == request => return Ok(()),
            Some(REFUSED) => return Err(io::ErrorKind::PermissionDenied.into()),
            // Late answer to an earlier request.
            Some(_) => {}
            None => return Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

/// Receives the next number without waiting; `None` if the other side has closed the socket.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a message of another length, and the errors of the socket.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<u64>> {
    let mut bytes = [0; BYTES];
    match recv(socket, &mut bytes, RecvFlags::DONTWAIT)?.0 {
        0 => Ok(None),
        BYTES => Ok(Some(u64::from_ne_bytes(bytes))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends an answer, unless the process does not take its answers.
pub(super) fn answer(socket: impl AsFd, answer: u64) {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let _ = send(socket, &answer.to_ne_bytes(), flags);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn request_is_granted_refused_or_pauses() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let restorer = std::thread::spawn(move || {
            let mut requests = Vec::new();
            loop {
                poll(&mut [PollFd::new(&theirs, PollFlags::IN)], None).unwrap();
                let Some(request) = receive(&theirs).unwrap() else { return requests };
                requests.push(request);
                // Late answer to an earlier request, then the answer.
                answer(&theirs, 77);
                answer(&theirs, if request == 3 { REFUSED } else { request });
            }
        });
        let mut requests = Requests::default();
        for timeout_ns in [0, 200_000, u64::MAX] {
            requests.send(&ours, timeout_ns).unwrap();
        }
        let refused = requests.send(&ours, 3).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        let paused = requests.send(&ours, 4).unwrap_err();
        assert_eq!(paused.kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert_eq!(restorer.join().unwrap(), [0, 200_000, MAX_FLUSH_TIMEOUT_NS, 3]);
    }

    #[test]
    fn truncated_request_is_an_error() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[1, 2, 3]).unwrap();
        assert_eq!(receive(&theirs).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(ours);
        assert_eq!(receive(&theirs).unwrap(), None);
    }
}
