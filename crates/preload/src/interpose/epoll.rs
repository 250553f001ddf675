//! epoll.

use std::time::Duration;

use libc::{c_int, epoll_event, sigset_t, timespec};

use super::errno;
use crate::{epoll, raw, real, table};

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: the program's own call.
    let new = unsafe { real::epoll_create1(flags) };
    epoll::enter(new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    if size <= 0 {
        errno::set_number(libc::EINVAL);
        return -1;
    }
    // SAFETY: no arguments that could be wrong.
    unsafe { epoll_create1(0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_ctl(
    set: c_int,
    operation: c_int,
    target: c_int,
    event: *mut epoll_event,
) -> c_int {
    let known = table::epoll(set).filter(|_| set != target);
    // SAFETY: the program's own argument, which only removing needs not.
    let wanted = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    let (Some(epoll), true) = (known, wanted.is_some() || operation == libc::EPOLL_CTL_DEL) else {
        // SAFETY: the program's own call.
        return unsafe { real::epoll_ctl(set, operation, target, event) };
    };
    let (events, data) = wanted.unwrap_or_default();
    let entry = table::get(target);
    errno::done(epoll.control(operation, target, entry.as_deref(), events, data))
}

/// # Safety
/// There is room for `limit` events; the mask is null or valid.
unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    limit: c_int,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Option<c_int> {
    let epoll = table::epoll(set)?;
    let limit = usize::try_from(limit).ok().filter(|&limit| limit > 0 && !events.is_null())?;
    // SAFETY: the caller's promise.
    let (events, mask) = unsafe { (std::slice::from_raw_parts_mut(events, limit), mask.as_ref()) };
    Some(errno::count(epoll.wait(events, timeout, mask)) as c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    limit: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program's own arguments.
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
    // SAFETY: the program's own arguments.
    unsafe {
        wait(set, events, limit, raw::milliseconds(timeout), mask)
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
    // SAFETY: the program's own arguments.
    unsafe {
        raw::time(timeout)
            .ok()
            .and_then(|time| wait(set, events, limit, time, mask))
            .unwrap_or_else(|| real::epoll_pwait2(set, events, limit, timeout, mask))
    }
}
