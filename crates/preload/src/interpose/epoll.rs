//! `epoll_create`, `epoll_ctl` and `epoll_wait` with their variants.

use std::time::Duration;

use libc::{c_int, epoll_event, sigset_t, timespec};

use crate::epoll::Epoll;
use crate::errno;
use crate::fd_table::{self, Entry};
use crate::{raw, real, runtime};

/// Registers a new kernel epoll in the descriptor table, if any socket can move.
fn register(fd: i32) {
    if fd >= 0 && runtime::rules().is_some() {
        fd_table::insert(fd, Entry::Epoll(Epoll::new(fd)));
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: the application's own call.
    let new = unsafe { real::epoll_create1(flags) };
    register(new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    if size <= 0 {
        errno::set(libc::EINVAL);
        return -1;
    }
    // SAFETY: the function has no pointer argument.
    unsafe { epoll_create1(0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_ctl(
    set: c_int,
    operation: c_int,
    target: c_int,
    event: *mut epoll_event,
) -> c_int {
    let known = fd_table::epoll(set).filter(|_| set != target);
    // SAFETY: the application's own argument, which may be null only for EPOLL_CTL_DEL.
    let registration = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    let (Some(epoll), true) = (known, registration.is_some() || operation == libc::EPOLL_CTL_DEL)
    else {
        // SAFETY: the application's own call.
        return unsafe { real::epoll_ctl(set, operation, target, event) };
    };
    let (events, data) = registration.unwrap_or_default();
    errno::return_status(match fd_table::get(target).as_deref() {
        Some(Entry::Socket(socket)) => {
            epoll.control_socket(operation, target, socket, events, data)
        }
        Some(Entry::Epoll(inner)) => {
            epoll.control_nested_set(operation, target, inner, events, data)
        }
        None => epoll.control_kernel(operation, target, events, data),
    })
}

/// Waits on the set if Tidegate knows it; `None` leaves the call to the kernel.
///
/// # Safety
/// `events` has space for `limit` events; the mask is null or valid.
unsafe fn wait_if_tidegate(
    set: c_int,
    events: *mut epoll_event,
    limit: c_int,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    let epoll = fd_table::epoll(set)?;
    let limit = usize::try_from(limit).ok().filter(|&limit| limit > 0 && !events.is_null())?;
    // SAFETY: guaranteed by the caller.
    let (events, mask) = unsafe { (std::slice::from_raw_parts_mut(events, limit), mask.as_ref()) };
    Some(errno::return_count(epoll.wait(events, timeout, mask)) as c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    limit: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { epoll_pwait(set, events, limit, timeout, std::ptr::null()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    limit: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe {
        wait_if_tidegate(set, events, limit, raw::ms_timeout(timeout), mask)
            .unwrap_or_else(|| real::epoll_pwait(set, events, limit, timeout, mask))
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    limit: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe {
        raw::timespec_timeout(timeout)
            .ok()
            .and_then(|time| wait_if_tidegate(set, events, limit, time, mask))
            .unwrap_or_else(|| real::epoll_pwait2(set, events, limit, timeout, mask))
    }
}
