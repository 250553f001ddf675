//! Receive interrupts of a device.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

use super::super::{raw, result};
use super::EthDev;
/// Receive interrupts of a device: an epoll instance filled by DPDK.
#[derive(Debug)]
pub struct RxInterrupts(OwnedFd);

impl RxInterrupts {
    /// Drains pending interrupts; the descriptor is no longer readable.
    pub fn drain(&self) {
        // SAFETY: the descriptor is an epoll instance, to which only DPDK adds.
        unsafe { raw::dpdk_take_interrupts(self.0.as_raw_fd()) }
    }
}

impl AsFd for RxInterrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl EthDev {
    /// Receive interrupts as a file descriptor, readable after an interrupt; `None` if the device
    /// has none.
    pub fn interrupts(&self) -> Option<RxInterrupts> {
        if self.raw.has_interrupts == 0 {
            return None;
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        // SAFETY: the device was opened, and the descriptor is an epoll instance.
        let error = unsafe { raw::dpdk_watch(&self.raw, epoll.as_raw_fd()) };
        (error == 0).then_some(RxInterrupts(epoll))
    }

    /// Enables or disables interrupts.
    pub fn set_interrupts(&self, on: bool) -> io::Result<()> {
        // SAFETY: the device was opened.
        result(unsafe { raw::dpdk_set_interrupts(&self.raw, on.into()) })
    }
}
