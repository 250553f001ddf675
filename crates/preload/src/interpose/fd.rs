//! Descriptors: closing, duplicating, flags.

use libc::{c_int, c_uint, c_ulong};

use super::errno;
use crate::{real, start, table};

/// The descriptor is closed. What is Tidegate's ends first, so that nobody can
/// get the number before.
fn forget(fd: c_int) {
    match start::is_child() {
        true => table::forget(fd),
        false => table::remove(fd),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if table::is_ours(fd) {
        forget(fd);
    }
    // SAFETY: the program's own call.
    unsafe { real::close(fd) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // `CLOSE_RANGE_CLOEXEC` closes nothing yet.
    if flags & 4 == 0 {
        table::between(first, last).for_each(forget);
    }
    // SAFETY: the program's own call.
    unsafe { real::close_range(first, last, flags) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn closefrom(first: c_int) {
    table::between(u32::try_from(first).unwrap_or(0), u32::MAX).for_each(forget);
    // SAFETY: the program's own call.
    unsafe { real::closefrom(first) }
}

/// The new descriptor is what the old one is.
fn copy(old: c_int, new: c_int) {
    if new < 0 || new == old {
        return;
    }
    if table::is_ours(new) {
        forget(new);
    }
    if let Some(entry) = table::get(old) {
        table::put(new, entry.clone());
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: the program's own call.
    let new = unsafe { real::dup(fd) };
    copy(fd, new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: the program's own call.
    let new = unsafe { real::dup2(from, to) };
    copy(from, new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the program's own call.
    let new = unsafe { real::dup3(from, to, flags) };
    copy(from, new);
    new
}

// The third argument is optional in C, and stands in the same register.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the program's own call.
    let result = unsafe { real::fcntl64(fd, command, argument) };
    if result < 0 || !table::is_ours(fd) {
        return result;
    }
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copy(fd, result),
        libc::F_SETFL => {
            if let Some(socket) = table::socket(fd) {
                socket.set_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
            }
        }
        _ => {}
    }
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe { fcntl64(fd, command, argument) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    let socket = table::socket(fd).filter(|_| !start::is_child());
    if let Some(socket) = &socket
        && request == libc::FIONREAD
        && argument != 0
    {
        return errno::done(socket.readable_bytes().map(|bytes| {
            let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
            // SAFETY: the program's own place for a number.
            unsafe { (argument as *mut c_int).write(bytes) };
        }));
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::ioctl(fd, request, argument) };
    if let Some(socket) = socket
        && request == libc::FIONBIO
        && result == 0
    {
        // SAFETY: the kernel has just read this number.
        socket.set_nonblocking(unsafe { (argument as *const c_int).read() } != 0);
    }
    result
}
