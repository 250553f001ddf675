//! Sleep of a thread that waits for sockets: on descriptors, and on a doorbell of its own.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_memory::Doorbell;

/// Sleep of a thread that waits for sockets in [`Net::wait`](crate::Net::wait): for applications that wait for
/// other events at the same time, or handle signals.
pub trait Sleeper {
    /// Sleeps until one of the descriptors is readable, the timeout expires, or another event
    /// of the application occurs; returns true in the last case. Without descriptors and with
    /// a zero timeout this only polls.
    ///
    /// # Errors
    /// An error ends the wait, as [`io::ErrorKind::Interrupted`].
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool>;
}

/// Sleeps until a descriptor is readable, the doorbell rings, or the timeout expires.
pub(crate) fn sleep<'a>(
    descriptors: impl IntoIterator<Item = BorrowedFd<'a>>,
    bell: &'a Doorbell,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let wake: Vec<BorrowedFd<'_>> = descriptors.into_iter().chain([bell.as_fd()]).collect();
    PollSleeper.sleep(&wake, timeout).map(|_| ())
}

/// Sleeper based on `ppoll(2)`, without events of its own.
pub(crate) struct PollSleeper;

impl Sleeper for PollSleeper {
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
        sleep_on(wake, timeout).map(|()| false)
    }
}

/// Sleeps until a descriptor is readable or the timeout expires.
fn sleep_on(wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
    let fds = wake.iter().copied();
    let mut fds: Vec<PollFd<'_>> =
        fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    match poll(&mut fds, timeout.as_ref()) {
        // A signal does not end the wait: its handler has run.
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

thread_local!(static BELL: RefCell<Option<Arc<Doorbell>>> = const { RefCell::new(None) });

/// Forgets the thread's doorbell in a forked child: it is the parent's.
#[cfg(feature = "attach")]
pub(crate) fn forget_thread_bell() {
    // A terminating thread has none.
    let _ = BELL.try_with(RefCell::take);
}

/// Doorbell of this thread, created at its first sleep.
pub(crate) fn thread_bell() -> io::Result<Arc<Doorbell>> {
    let own = BELL.try_with(|bell| {
        let mut bell = bell.borrow_mut();
        if let Some(bell) = &*bell {
            return Ok(Arc::clone(bell));
        }
        let new = Arc::new(Doorbell::new()?);
        *bell = Some(Arc::clone(&new));
        Ok(new)
    });
    // A terminating thread cannot keep one.
    own.unwrap_or_else(|_| Ok(Arc::new(Doorbell::new()?)))
}
