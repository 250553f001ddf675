//! Epoll of the servers on kernel sockets, with busy polling of the device.

mod sys;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;

/// Time that one wait polls the device for before it sleeps, in microseconds, if the server sleeps.
const IDLE_US: u32 = 50;
/// The same if it never does: longer than any wait.
const ENDLESS_US: u32 = 1_000_000;

/// Way in which a server on kernel sockets polls its device in its own calls, in the place of
/// softirqs (`SO_PREFER_BUSY_POLL`, Linux 5.11; of epoll, Linux 6.9). The device must defer its
/// interrupts (`napi_defer_hard_irqs`, `gro_flush_timeout`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelBusyPoll {
    /// Softirqs receive.
    #[default]
    Off,
    /// The server polls all the time and never sleeps.
    Always,
    /// The server polls while there is something to do, and sleeps 50 us later. With a suspend
    /// timeout (`irq-suspend-timeout`, Linux 6.13) the device has no interrupts meanwhile.
    UntilIdle,
}

/// Creates an epoll whose waits poll the device.
pub(crate) fn create(busy_poll: KernelBusyPoll) -> io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    match busy_poll {
        KernelBusyPoll::Off => {}
        KernelBusyPoll::Always => sys::busy_poll(epoll.as_fd(), ENDLESS_US)?,
        KernelBusyPoll::UntilIdle => sys::busy_poll(epoll.as_fd(), IDLE_US)?,
    }
    Ok(epoll)
}
