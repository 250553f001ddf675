//! Receive interrupts of the queues.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

use super::super::{raw, result};
use super::EthQueues;

/// Receive interrupts of the queues: an epoll instance filled by DPDK.
#[derive(Debug)]
pub struct RxInterrupts(OwnedFd);

impl RxInterrupts {
    /// An instance without interrupts.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Drains pending interrupts; the descriptor is no longer readable.
    pub fn drain(&self) {
        // SAFETY: the descriptor is an epoll instance. Only DPDK adds to it, and where the device has
        // no interrupts a timer without data, which DPDK skips.
        unsafe { raw::dpdk_take_interrupts(self.0.as_raw_fd()) }
    }
}

impl AsFd for RxInterrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl EthQueues {
    /// Has the interrupts of the queues fill `interrupts`. Returns false if the device has none.
    pub fn watch(&self, interrupts: &RxInterrupts) -> bool {
        let Some(running) = self.eth_dev.running() else { return false };
        running.has_interrupts()
            // SAFETY: the device is open, and the descriptor is an epoll instance.
            && unsafe { raw::dpdk_watch(&*self.raw, interrupts.0.as_raw_fd()) == 0 }
    }

    /// Enables or disables interrupts.
    pub fn set_interrupts(&self, on: bool) -> io::Result<()> {
        let Some(_running) = self.eth_dev.running() else { return Ok(()) };
        // SAFETY: the device is open.
        result(unsafe { raw::dpdk_set_interrupts(&*self.raw, on.into()) })
    }
}
