//! A wake-up that costs no system call while the receiver is awake.
//!
//! The sleeper arms the doorbell, checks once more for work, and sleeps on the descriptor. The
//! other side publishes work and rings. Ringing makes a system call only while the doorbell is
//! armed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

use crate::own_fd::OwnFd;

/// An `eventfd` that is written only while a thread sleeps on it.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnFd,
    armed: AtomicBool,
}

impl Doorbell {
    /// Creates an unarmed doorbell.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd: fd.into(), armed: AtomicBool::new(false) })
    }

    /// Arms the doorbell before sleeping: from now on [`Doorbell::ring`] makes the descriptor
    /// readable. Check for work once more after this call.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        // Pairs with the fence in `ring`: either the ringing side sees the doorbell armed, or the
        // sleeper's next check sees the published work.
        fence(Ordering::SeqCst);
    }

    /// Disarms the doorbell after sleeping: the descriptor is no longer readable.
    pub fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
        // An empty eventfd answers EAGAIN: the descriptor is then already in the wanted state.
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
    }

    /// Wakes the sleeper, if any, after work was published.
    #[inline]
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.armed.swap(false, Ordering::Relaxed) {
            // The write fails only when the counter is at its maximum, and then the descriptor is
            // readable already.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(all(test, not(miri), not(loom)))]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn readable(bell: &Doorbell) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn rings_only_when_armed() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        assert!(!readable(&bell));
        bell.arm();
        bell.ring();
        bell.ring();
        assert!(readable(&bell));
        bell.disarm();
        assert!(!readable(&bell));
    }
}
