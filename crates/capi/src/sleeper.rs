//! Sleeping for Tidegate sockets and kernel descriptors at once, ended by signals as at the
//! kernel.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use libc::{pollfd, sigset_t};
use tidegate::Sleeper;
use tidegate_posix::polling::{kernel_timeout, poll_with_wake};

/// Signals blocked while a call waits, so that a signal that arrives while the stack polls ends the
/// next sleep. The mask of the thread is restored on drop.
struct BlockedSignals(sigset_t);

impl BlockedSignals {
    fn new() -> Self {
        // SAFETY: both sets are initialised by the calls; masks of the own thread.
        unsafe {
            let mut all: sigset_t = std::mem::zeroed();
            let mut before: sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the mask that the thread had.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut());
        }
    }
}

/// Kernel side of a waiting call: descriptors and signals.
pub(crate) struct KernelWaiter {
    /// Kernel descriptors to poll.
    pub(crate) fds: Vec<pollfd>,
    /// Signal mask during a sleep: the program's, or that of the thread.
    mask: Option<sigset_t>,
    signals: Option<BlockedSignals>,
    /// Signals wait until the next sleep.
    pub(crate) leaves_signals: bool,
    /// The last call polled the kernel descriptors.
    has_polled: bool,
}

impl KernelWaiter {
    /// Waiter for kernel descriptors, none in most calls. `mask`: signal mask during the sleep, if
    /// the program passed one.
    pub(crate) fn new(fds: Vec<pollfd>, mask: Option<sigset_t>, may_wait: bool) -> Self {
        let signals = may_wait.then(BlockedSignals::new);
        Self { fds, mask, signals, leaves_signals: false, has_polled: false }
    }

    /// True if the kernel descriptors were polled since the last call of this function.
    pub(crate) fn take_polled(&mut self) -> bool {
        std::mem::take(&mut self.has_polled)
    }
}

impl Sleeper for KernelWaiter {
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
        let has_nothing = wake.is_empty() && self.fds.is_empty();
        if has_nothing && (self.leaves_signals || self.signals.is_none()) {
            return Ok(false);
        }
        let mask = self.mask.or(self.signals.as_ref().map(|signals| signals.0));
        self.has_polled = true;
        poll_with_wake(&mut self.fds, wake, |fds| poll(fds, timeout, mask.as_ref()))
    }
}

/// The kernel's `ppoll`.
///
/// # Errors
/// As `ppoll`.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let timeout = timeout.map(kernel_timeout);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the slice has as many elements; time and mask are valid or null.
    let found = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as u64, timeout, mask) };
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}

/// True when a call that a signal interrupted is to be restarted.
pub(crate) fn all_handlers_restart() -> bool {
    // SAFETY: reads an action and changes none.
    tidegate_posix::signals::all_handlers_restart(|signal, action| unsafe {
        libc::sigaction(signal, std::ptr::null(), action)
    })
}
