//! Descriptors: close, duplicate, flags.

use libc::{c_int, c_uint, c_ulong};

use super::errno;
use crate::{fd_table, real, runtime};

/// Removes the table entry of a descriptor that is about to be closed: no other thread may get
/// the same number before.
fn drop_entry(fd: c_int) {
    match runtime::is_child() {
        true => fd_table::forget(fd),
        false => fd_table::remove(fd),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if fd_table::is_tidegate(fd) {
        drop_entry(fd);
    }
    // SAFETY: the application's own call.
    unsafe { real::close(fd) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // With `CLOSE_RANGE_CLOEXEC` the call closes nothing yet.
    if flags & 4 == 0 {
        fd_table::range(first, last).for_each(drop_entry);
    }
    // SAFETY: the application's own call.
    unsafe { real::close_range(first, last, flags) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn closefrom(first: c_int) {
    fd_table::range(u32::try_from(first).unwrap_or(0), u32::MAX).for_each(drop_entry);
    // SAFETY: the application's own call.
    unsafe { real::closefrom(first) }
}

/// Gives the new descriptor the table entry of the old one.
fn copy_entry(old: c_int, new: c_int) {
    if new < 0 || new == old {
        return;
    }
    if fd_table::is_tidegate(new) {
        drop_entry(new);
    }
    if let Some(entry) = fd_table::get(old) {
        fd_table::insert(new, entry.clone());
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: the application's own call.
    let new = unsafe { real::dup(fd) };
    copy_entry(fd, new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: the application's own call.
    let new = unsafe { real::dup2(from, to) };
    copy_entry(from, new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the application's own call.
    let new = unsafe { real::dup3(from, to, flags) };
    copy_entry(from, new);
    new
}

// The third argument is optional in C, and is passed in the same register.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the application's own call.
    let result = unsafe { real::fcntl64(fd, command, argument) };
    if result < 0 || !fd_table::is_tidegate(fd) {
        return result;
    }
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copy_entry(fd, result),
        libc::F_SETFL => {
            if let Some(socket) = fd_table::socket(fd) {
                socket.set_nonblocking(argument as c_int & libc::O_NONBLOCK != 0);
            }
        }
        _ => {}
    }
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { fcntl64(fd, command, argument) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    let socket = fd_table::socket(fd).filter(|_| !runtime::is_child());
    if let Some(socket) = &socket
        && request == libc::FIONREAD
        && argument != 0
    {
        return errno::return_status(socket.readable_bytes().map(|bytes| {
            let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
            // SAFETY: the application's own pointer to an integer.
            unsafe { (argument as *mut c_int).write(bytes) };
        }));
    }
    // SAFETY: the application's own call.
    let result = unsafe { real::ioctl(fd, request, argument) };
    if let Some(socket) = socket
        && request == libc::FIONBIO
        && result == 0
    {
        // SAFETY: the kernel has just read this integer.
        socket.set_nonblocking(unsafe { (argument as *const c_int).read() } != 0);
    }
    result
}
