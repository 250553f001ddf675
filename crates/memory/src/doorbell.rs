//! A wake-up that costs nothing while the other side is awake.
//!
//! The sleeper arms the bell, looks once more whether there is work, and sleeps
//! on the descriptor. The other side publishes work and rings; only when the
//! bell is armed does ringing make a system call.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// An `eventfd` that is written only while somebody sleeps on it.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
    armed: AtomicBool,
}

impl Doorbell {
    /// Makes a bell that is not armed.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, armed: AtomicBool::new(false) })
    }

    /// Before sleeping: from now on [`Doorbell::ring`] makes the descriptor
    /// readable. Look for work once more after this call.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        // Pairs with the fence in `ring`: either the ringer sees the bell
        // armed, or the sleeper's next look sees what the ringer published.
        fence(Ordering::SeqCst);
    }

    /// After sleeping: the descriptor is quiet again.
    pub fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
        // An empty eventfd answers EAGAIN, which is what we want it to be.
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
    }

    /// After publishing work: wakes the sleeper, if there is one.
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
            // The write fails only when the counter is at its maximum, and
            // then the descriptor is readable already.
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
    fn it_is_silent_unless_armed() {
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
