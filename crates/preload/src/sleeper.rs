//! Sleeping for sockets of Tidegate and descriptors of the kernel at once, and
//! hearing of signals.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use libc::{pollfd, sigset_t, timespec};
use tidegate::Sleeper;

use crate::{real, signals};

/// What a waiting call waits for at the kernel.
///
/// A signal that comes while the stack looks for packets must end the wait as
/// one that comes in a sleep does. So signals are held back from the first idle
/// moment on, and let through only in the kernel's own wait. One that came before has
/// not been handled yet and ends it at once.
pub(crate) struct KernelSide {
    /// Descriptors of the kernel.
    pub(crate) fds: Vec<pollfd>,
    /// The signals to hold back while it sleeps, if the program chose them.
    mask: Option<sigset_t>,
    /// Those that were held back before this began to.
    before: Option<sigset_t>,
    looks: u32,
}

impl KernelSide {
    pub(crate) fn new(fds: Vec<pollfd>, mask: Option<sigset_t>) -> Self {
        Self { fds, mask, before: None, looks: 0 }
    }

    pub(crate) fn one(fd: i32, events: i16) -> Self {
        Self::new(vec![pollfd { fd, events, revents: 0 }], None)
    }

    fn hold_signals(&mut self) -> sigset_t {
        *self.before.get_or_insert_with(hold_signals)
    }
}

/// Holds back every signal that a program can get from outside; gives those
/// that were held back before.
fn hold_signals() -> sigset_t {
    // SAFETY: a set of signals is a plain array of bits, and both calls fill
    // in or read what they are given.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        // A fault is told where it happens.
        for fault in signals::FAULTS {
            libc::sigdelset(&mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        before
    }
}

impl Drop for KernelSide {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: reads a set that `hold_signals` has filled in.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}

impl Sleeper for KernelSide {
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
        self.looks += 1;
        let is_first_look = self.looks == 1 && wake.is_empty() && self.mask.is_none();
        if is_first_look && self.fds.is_empty() {
            return Ok(false);
        }
        // A signal before the first look came before the call.
        let mask = match is_first_look {
            true => None,
            false => {
                let before = self.hold_signals();
                if signals::are_deferred() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                Some(self.mask.unwrap_or(before))
            }
        };
        let own = self.fds.len();
        let wake = wake.iter().map(AsRawFd::as_raw_fd);
        self.fds.extend(wake.map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 }));
        let found = poll(&mut self.fds, timeout, mask.as_ref());
        let is_ours = self.fds[..own].iter().any(|fd| fd.revents != 0);
        self.fds.truncate(own);
        found.map(|found| found > 0 && is_ours)
    }
}

/// The kernel's `ppoll`.
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
    // SAFETY: the slice is as long as it says, time and mask are valid or null.
    let found = signals::outside(|| unsafe { real::ppoll(list, count, timeout, mask) });
    usize::try_from(found).map_err(|_| io::Error::last_os_error())
}

/// Whether a call that a signal has interrupted goes on by itself. Which
/// signal it was is not told, so all handlers must want that.
pub(crate) fn restarts() -> bool {
    (1..=64).all(|signal| {
        // SAFETY: asks for a handler and changes none; glibc keeps two signals
        // for itself and says so by an error.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let known = real::sigaction(signal, std::ptr::null(), &mut action) == 0;
            known.then_some(action)
        };
        action.is_none_or(|action| {
            let handled = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
            !handled || action.sa_flags & libc::SA_RESTART != 0
        })
    })
}
