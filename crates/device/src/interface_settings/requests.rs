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

use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Longest flush timeout that a restorer sets, in nanoseconds: as long a program of the kernel
/// may have to wait for a packet while the process is alive.
pub(super) const MAX_FLUSH_TIMEOUT_NS: u64 = 1_000_000_000;

/// Answer to a request that the kernel or the restorer has refused.
pub(super) const REFUSED: u64 = u64::MAX;

const BYTES: usize = size_of::<u64>();

/// Time after which a restorer counts as one that does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(5);

/// Time without requests after a restorer did not answer: it may be stopped, or be replaced by its
/// standby.
const PAUSE: Duration = Duration::from_millis(200);

/// The process's side. No call waits for the restorer.
#[derive(Debug, Default)]
pub(super) struct Requests {
    sent: Option<SentRequest>,
    /// Request to send after the answer to the one before.
    next: Option<u64>,
    paused_until: Option<Instant>,
}

#[derive(Debug)]
struct SentRequest {
    flush_timeout_ns: u64,
    /// Time until which an answer is expected.
    deadline: Instant,
}

impl Requests {
    /// True while an answer is expected.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.sent.is_some()
    }

    /// Sends a request, or keeps it until the request before is answered. A request replaces an
    /// earlier one that is kept.
    ///
    /// # Errors
    /// The restorer is gone, takes no requests, or did not answer a short time ago.
    pub(super) fn send(
        &mut self,
        socket: impl AsFd,
        flush_timeout_ns: u64,
        now: Instant,
    ) -> io::Result<()> {
        let request = flush_timeout_ns.min(MAX_FLUSH_TIMEOUT_NS);
        if self.is_pending() {
            self.next = Some(request);
            return Ok(());
        }
        if self.paused_until.is_some_and(|until| now < until) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = send(socket, &request.to_ne_bytes(), flags);
        self.paused_until = sent.is_err().then(|| now + PAUSE);
        sent?;
        let deadline = now + ANSWER_TIMEOUT;
        self.sent = Some(SentRequest { flush_timeout_ns: request, deadline });
        Ok(())
    }

    /// Result of the last request, once the restorer has answered or its time is over.
    ///
    /// # Errors
    /// The restorer refuses, is gone, or does not answer in time.
    pub(super) fn poll(&mut self, socket: impl AsFd, now: Instant) -> Option<io::Result<()>> {
        loop {
            let Err(error) = self.take_answer(&socket, now)? else {
                match self.next.take() {
                    None => return Some(Ok(())),
                    Some(next) => match self.send(&socket, next, now) {
                        Ok(()) => continue,
                        Err(error) => return Some(Err(error)),
                    },
                }
            };
            self.next = None;
            self.paused_until = Some(now + PAUSE);
            return Some(Err(error));
        }
    }

    /// Result of the request that was sent.
    fn take_answer(&mut self, socket: impl AsFd, now: Instant) -> Option<io::Result<()>> {
        let SentRequest { flush_timeout_ns, deadline } = *self.sent.as_ref()?;
        let result = loop {
            match receive(&socket) {
                Ok(Some(answer)) if answer == flush_timeout_ns => break Ok(()),
                Ok(Some(REFUSED)) => break Err(io::ErrorKind::PermissionDenied.into()),
                // Late answer to an earlier request.
                Ok(Some(_)) => {}
                Ok(None) => break Err(io::ErrorKind::BrokenPipe.into()),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => break Err(error),
                Err(_) if now < deadline => return None,
                Err(_) => break Err(io::ErrorKind::TimedOut.into()),
            }
        };
        self.sent = None;
        Some(result)
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

    /// Takes the next request, which has arrived.
    fn request(restorer: &UnixStream) -> u64 {
        receive(restorer).unwrap().unwrap()
    }

    fn is_empty(restorer: &UnixStream) -> bool {
        receive(restorer).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    #[test]
    fn request_is_granted_or_refused_and_then_pauses() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut requests, now) = (Requests::default(), Instant::now());
        assert!(requests.poll(&ours, now).is_none(), "nothing was requested");
        for timeout_ns in [0, 200_000, u64::MAX] {
            requests.send(&ours, timeout_ns, now).unwrap();
            assert!(requests.is_pending() && requests.poll(&ours, now).is_none());
            // Late answer to an earlier request, then the answer.
            answer(&theirs, 77);
            assert!(requests.poll(&ours, now).is_none());
            let timeout_ns = timeout_ns.min(MAX_FLUSH_TIMEOUT_NS);
            assert_eq!(request(&theirs), timeout_ns);
            answer(&theirs, timeout_ns);
            requests.poll(&ours, now).unwrap().unwrap();
            assert!(!requests.is_pending());
        }
        requests.send(&ours, 3, now).unwrap();
        answer(&theirs, REFUSED);
        let refused = requests.poll(&ours, now).unwrap().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        let paused = requests.send(&ours, 4, now).unwrap_err();
        assert_eq!(paused.kind(), io::ErrorKind::TimedOut);
        requests.send(&ours, 5, now + PAUSE).unwrap();
        assert_eq!((request(&theirs), request(&theirs)), (3, 5));
        drop(theirs);
        let gone = requests.poll(&ours, now + PAUSE).unwrap().unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn request_waits_for_no_restorer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut requests, now) = (Requests::default(), Instant::now());
        requests.send(&ours, 1, now).unwrap();
        requests.send(&ours, 2, now).unwrap();
        assert!(requests.poll(&ours, now).is_none());
        let error = requests.poll(&ours, now + ANSWER_TIMEOUT).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!requests.is_pending());
        assert_eq!(request(&theirs), 1);
        assert!(is_empty(&theirs), "the request that was kept is given up, too");
    }

    #[test]
    fn only_the_latest_request_is_sent_after_an_answer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut requests, now) = (Requests::default(), Instant::now());
        for timeout_ns in [1, 2, 3] {
            requests.send(&ours, timeout_ns, now).unwrap();
        }
        assert_eq!(request(&theirs), 1);
        assert!(is_empty(&theirs));
        answer(&theirs, 1);
        assert!(requests.poll(&ours, now).is_none());
        assert_eq!(request(&theirs), 3);
        answer(&theirs, 3);
        requests.poll(&ours, now).unwrap().unwrap();
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
