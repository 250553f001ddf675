//! Busy polling of an epoll.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Packets that one poll of the device takes at most.
const BUDGET: u16 = 64;
/// `EPIOCSPARAMS` of `linux/eventpoll.h`.
const EPIOCSPARAMS: libc::Ioctl = 0x4008_8a01;

/// `struct epoll_params` of `linux/eventpoll.h`.
#[repr(C)]
struct EpollParams {
    busy_poll_us: u32,
    busy_poll_budget: u16,
    prefer_busy_poll: u8,
    pad: u8,
}

/// Makes waits on an epoll poll the device of its sockets, for at most `busy_poll_us` microseconds,
/// in the place of softirqs.
pub(super) fn busy_poll(epoll: BorrowedFd<'_>, busy_poll_us: u32) -> io::Result<()> {
    let params =
        EpollParams { busy_poll_us, busy_poll_budget: BUDGET, prefer_busy_poll: 1, pad: 0 };
    // SAFETY: the request reads a structure of this layout, which lives through the call.
    let result = unsafe { libc::ioctl(epoll.as_raw_fd(), EPIOCSPARAMS, &raw const params) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
