//! Sleeping for Tidegate sockets and kernel descriptors at once, with correct handling of
//! signals.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use libc::{pollfd, sigset_t};
use tidegate::Sleeper;
use tidegate_posix::polling::{kernel_timeout, poll_with_wake};

use crate::{real, signals};

/// Kernel side of a waiting call: descriptors and signal mask.
///
/// A signal that arrives while the stack polls must end the wait, as a signal during a sleep
/// does. The stack defers its handler: then the kernel's own wait does not begin.
pub(crate) struct KernelWaiter {
    /// Kernel descriptors to poll.
    pub(crate) fds: Vec<pollfd>,
    /// Signal mask during the sleep, if the application passed one.
    mask: Option<sigset_t>,
    sleep_calls: u32,
    /// The last call polled the kernel descriptors.
    has_polled: bool,
}

impl KernelWaiter {
    pub(crate) fn new(fds: Vec<pollfd>, mask: Option<sigset_t>) -> Self {
        Self { fds, mask, sleep_calls: 0, has_polled: false }
    }

    pub(crate) fn for_fd(fd: i32, events: i16) -> Self {
        Self::new(vec![pollfd { fd, events, revents: 0 }], None)
    }

    /// True if the kernel descriptors were polled since the last call of this function.
    pub(crate) fn take_polled(&mut self) -> bool {
        std::mem::take(&mut self.has_polled)
    }
}

impl Sleeper for KernelWaiter {
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
        self.sleep_calls += 1;
        let is_first_call = self.sleep_calls == 1 && wake.is_empty() && self.mask.is_none();
        if is_first_call && self.fds.is_empty() {
            return Ok(false);
        }
        // A signal before the first sleep came before the call.
        if !is_first_call && signals::has_deferred() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.has_polled = true;
        poll_with_wake(&mut self.fds, wake, |fds| poll(fds, timeout, self.mask.as_ref()))
    }
}

/// The kernel's `ppoll`, with signal handlers undeferred.
///
/// # Errors
/// As `ppoll`; [`io::ErrorKind::Interrupted`] also if it may wait and signals were deferred before.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let may_wait = timeout != Some(Duration::ZERO);
    let timeout = timeout.map(kernel_timeout);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    let (list, count) = (fds.as_mut_ptr(), fds.len() as u64);
    // SAFETY: the slice has `count` elements; time and mask are valid or null.
    let wait = || unsafe { real::ppoll(list, count, timeout, mask) };
    let found = match may_wait {
        true => signals::outside_stack_unless_deferred(wait).ok_or(io::ErrorKind::Interrupted)?,
        false => signals::outside_stack(wait),
    };
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}

/// True when a call that a signal interrupted is to be restarted. The signal is unknown here,
/// so all handlers must have `SA_RESTART`.
pub(crate) fn all_handlers_restart() -> bool {
    // SAFETY: reads an action and changes none.
    tidegate_posix::signals::all_handlers_restart(|signal, action| unsafe {
        real::sigaction(signal, std::ptr::null(), action)
    })
}
