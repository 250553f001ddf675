//! Sleeping for Tidegate sockets and kernel descriptors at once, with correct handling of
//! signals.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use libc::{pollfd, sigset_t, timespec};
use tidegate::Sleeper;

use crate::{real, signals};

/// Kernel side of a waiting call: descriptors and signal mask.
///
/// A signal that arrives while the stack polls must end the wait, as a signal during a sleep
/// does. So signals are blocked from the first idle moment on, and unblocked only in the
/// kernel's own wait. A signal that was deferred before that ends the wait immediately.
pub(crate) struct KernelWaiter {
    /// Kernel descriptors to poll.
    pub(crate) fds: Vec<pollfd>,
    /// Signal mask during the sleep, if the application passed one.
    mask: Option<sigset_t>,
    /// Signal mask of the thread before this waiter blocked signals.
    previous_mask: Option<sigset_t>,
    sleep_calls: u32,
}

impl KernelWaiter {
    pub(crate) fn new(fds: Vec<pollfd>, mask: Option<sigset_t>) -> Self {
        Self { fds, mask, previous_mask: None, sleep_calls: 0 }
    }

    pub(crate) fn for_fd(fd: i32, events: i16) -> Self {
        Self::new(vec![pollfd { fd, events, revents: 0 }], None)
    }

    fn block_signals(&mut self) -> sigset_t {
        *self.previous_mask.get_or_insert_with(block_signals)
    }
}

/// Blocks every signal that can come from outside the process; returns the previous mask.
fn block_signals() -> sigset_t {
    // SAFETY: a signal set is a plain array of bits; both calls write or read their arguments.
    unsafe {
        let (mut all, mut previous) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        // A fault is handled where it occurs.
        for fault in signals::FAULT_SIGNALS {
            libc::sigdelset(&mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut previous);
        previous
    }
}

impl Drop for KernelWaiter {
    fn drop(&mut self) {
        if let Some(previous) = &self.previous_mask {
            // SAFETY: reads a set that `block_signals` has written.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, previous, std::ptr::null_mut()) };
        }
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
        let mask = match is_first_call {
            true => None,
            false => {
                let previous = self.block_signals();
                if signals::has_deferred() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                Some(self.mask.unwrap_or(previous))
            }
        };
        let own_count = self.fds.len();
        let wake = wake.iter().map(AsRawFd::as_raw_fd);
        self.fds.extend(wake.map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 }));
        let found = poll(&mut self.fds, timeout, mask.as_ref());
        let has_own_event = self.fds[..own_count].iter().any(|fd| fd.revents != 0);
        self.fds.truncate(own_count);
        found.map(|found| found > 0 && has_own_event)
    }
}

/// The kernel's `ppoll`, with signal handlers undeferred.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: Option<&sigset_t>,
) -> io::Result<usize> {
    let timeout = timeout.map(|timeout| timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    let (list, count) = (fds.as_mut_ptr(), fds.len() as u64);
    // SAFETY: the slice has `count` elements; time and mask are valid or null.
    let found = signals::outside_stack(|| unsafe { real::ppoll(list, count, timeout, mask) });
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}

/// True when a call that a signal interrupted is to be restarted. The signal is unknown here,
/// so all handlers must have `SA_RESTART`.
pub(crate) fn all_handlers_restart() -> bool {
    (1..=64).all(|signal| {
        // SAFETY: reads an action and changes none; glibc reserves two signals, for which it
        // returns an error.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let is_known = real::sigaction(signal, std::ptr::null(), &mut action) == 0;
            is_known.then_some(action)
        };
        action.is_none_or(|action| {
            let is_handled = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
            !is_handled || action.sa_flags & libc::SA_RESTART != 0
        })
    })
}
