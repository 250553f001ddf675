//! Waiting for many descriptors: epoll sets, `poll` and `select`.

use std::io;
use std::time::Duration;

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, timeval};
use tidegate::Net;

use crate::descriptors::{self, Entry};
use crate::epoll::EpollSet;
use crate::poll;
use crate::socket::os_error;

/// Creates an epoll set for sockets of a stack.
///
/// # Errors
/// As `epoll_create1`.
pub(crate) fn epoll_create(net: &Net, flags: c_int) -> io::Result<c_int> {
    if flags & !libc::EPOLL_CLOEXEC != 0 {
        return Err(os_error(libc::EINVAL));
    }
    // SAFETY: creates a descriptor.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    descriptors::install_at(fd, Entry::Epoll(EpollSet::new(net, fd)))
}

/// Changes an epoll set.
///
/// # Errors
/// As `epoll_ctl`; `EINVAL` for an epoll set in an epoll set.
pub(crate) fn epoll_control(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: Option<(u32, u64)>,
) -> io::Result<()> {
    let epoll = descriptors::epoll(set)?;
    let event = match (operation, event) {
        (libc::EPOLL_CTL_DEL, _) => (0, 0),
        (_, Some(event)) => event,
        (_, None) => return Err(os_error(libc::EFAULT)),
    };
    match descriptors::get(fd).as_deref() {
        Some(Entry::Socket(socket)) => epoll.control(operation, fd, socket, event.0, event.1),
        Some(_) => Err(os_error(libc::EINVAL)),
        None => epoll.control_kernel(operation, fd, event.0, event.1),
    }
}

/// Waits for events of an epoll set.
///
/// # Errors
/// As `epoll_pwait`.
///
/// # Safety
/// `events` is null or has space for `max` events, `mask` is null or valid.
pub(crate) unsafe fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> io::Result<usize> {
    let epoll = descriptors::epoll(set)?;
    let max = usize::try_from(max).ok().filter(|&max| max > 0);
    let max = max.ok_or_else(|| os_error(libc::EINVAL))?;
    if events.is_null() {
        return Err(os_error(libc::EFAULT));
    }
    // SAFETY: guaranteed by the caller.
    let (events, mask) = unsafe { (std::slice::from_raw_parts_mut(events, max), mask.as_ref()) };
    epoll.wait(events, timeout, mask)
}

/// Waits for descriptors of Tidegate and of the kernel.
///
/// # Errors
/// As `poll`.
///
/// # Safety
/// `fds` is null or points to `count` entries.
pub(crate) unsafe fn poll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
) -> io::Result<usize> {
    let count = usize::try_from(count).map_err(|_| os_error(libc::EINVAL))?;
    let fds = match (fds.is_null(), count) {
        (_, 0) => &mut [],
        (true, _) => return Err(os_error(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        _ => unsafe { std::slice::from_raw_parts_mut(fds, count) },
    };
    poll::poll(fds, timeout, None)
}

/// Waits for descriptors in three sets.
///
/// # Errors
/// As `select`.
///
/// # Safety
/// The sets are null or valid for descriptors below `count`.
pub(crate) unsafe fn select(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    const EVENTS: [libc::c_short; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    if !(0..=libc::FD_SETSIZE as c_int).contains(&count) {
        return Err(os_error(libc::EINVAL));
    }
    let mut fds = Vec::new();
    for fd in 0..count {
        let mut events = 0;
        for (set, bit) in sets.iter().zip(EVENTS) {
            // SAFETY: guaranteed by the caller.
            if !set.is_null() && unsafe { libc::FD_ISSET(fd, *set) } {
                events |= bit;
            }
        }
        if events != 0 {
            fds.push(pollfd { fd, events, revents: 0 });
        }
    }
    poll::poll(&mut fds, timeout, None)?;
    if fds.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
        return Err(os_error(libc::EBADF));
    }
    let mut found = 0;
    for (set, bit) in sets.into_iter().zip(EVENTS).filter(|(set, _)| !set.is_null()) {
        let reported = match bit {
            libc::POLLIN => bit | libc::POLLHUP | libc::POLLERR,
            libc::POLLOUT => bit | libc::POLLERR,
            _ => bit,
        };
        // SAFETY: guaranteed by the caller.
        unsafe { libc::FD_ZERO(set) };
        for one in fds.iter().filter(|one| one.events & bit != 0 && one.revents & reported != 0) {
            found += 1;
            // SAFETY: guaranteed by the caller.
            unsafe { libc::FD_SET(one.fd, set) };
        }
    }
    Ok(found)
}

/// Time limit of `select`.
///
/// # Errors
/// `EINVAL` for a negative time.
///
/// # Safety
/// `timeout` is null or valid.
pub(crate) unsafe fn select_timeout(timeout: *const timeval) -> io::Result<Option<Duration>> {
    // SAFETY: guaranteed by the caller.
    let Some(time) = (unsafe { timeout.as_ref() }) else { return Ok(None) };
    match (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec)) {
        (Ok(seconds), Ok(us)) => Ok(Some(Duration::from_secs(seconds) + Duration::from_micros(us))),
        _ => Err(os_error(libc::EINVAL)),
    }
}
