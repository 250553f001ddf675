//! A wake-up that costs no system call while the receiver is awake.
//!
//! The sleeper arms the doorbell, checks once more for work, and sleeps on the descriptor. The
//! other side publishes work and rings. Ringing makes a system call only while the doorbell is
//! armed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

use crate::own_fd::OwnFd;

/// An `eventfd` that is written only while a thread sleeps on it.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnFd,
    /// [`ARMED`] and [`RUNG`].
    state: AtomicU8,
}

/// A thread sleeps on the descriptor, or is about to.
const ARMED: u8 = 1;
/// The descriptor is readable, or soon will be.
const RUNG: u8 = 2;

impl Doorbell {
    /// Creates an unarmed doorbell.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd: fd.into(), state: AtomicU8::new(0) })
    }

    /// Arms the doorbell before sleeping: from now on [`Doorbell::ring`] makes the descriptor
    /// readable. Check for work once more after this call.
    pub fn arm(&self) {
        self.state.fetch_or(ARMED, Ordering::Relaxed);
        // Pairs with the fence in `ring`: either the ringing side sees the doorbell armed, or the
        // sleeper's next check sees the published work.
        fence(Ordering::SeqCst);
    }

    /// Disarms the doorbell after sleeping: the descriptor is no longer readable.
    pub fn disarm(&self) {
        if self.state.swap(0, Ordering::Relaxed) & RUNG == 0 {
            return;
        }
        // An empty eventfd answers EAGAIN: the other side is about to write.
        if rustix::io::read(&self.fd, &mut [0u8; 8]).is_err() {
            self.state.fetch_or(RUNG, Ordering::Relaxed);
        }
    }

    /// Wakes the sleeper, if any, after work was published.
    #[inline]
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) & ARMED != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let rung = |state| (state & ARMED != 0).then_some(RUNG);
        if self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rung).is_ok() {
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

    #[test]
    fn disarm_empties_a_bell_that_was_armed_again() {
        let bell = Doorbell::new().unwrap();
        bell.arm();
        bell.ring();
        bell.arm();
        bell.disarm();
        assert!(!readable(&bell));
    }

    #[test]
    fn late_write_of_a_ring_wakes_once_at_most() {
        let bell = Doorbell::new().unwrap();
        bell.arm();
        // The first half of `ring`, in another thread.
        assert_eq!(bell.state.swap(RUNG, Ordering::Relaxed), ARMED);
        bell.disarm();
        rustix::io::write(&bell.fd, &1u64.to_ne_bytes()).unwrap();
        bell.arm();
        assert!(readable(&bell));
        bell.disarm();
        assert!(!readable(&bell));
    }
}
