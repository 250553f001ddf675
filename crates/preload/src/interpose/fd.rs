//! Descriptors: close, duplicate, flags.

use std::io;

use libc::{c_int, c_uint, c_ulong};

use tidegate_memory::own_fd;

use crate::errno;
use crate::socket::Endpoint;
use crate::socket::linger::LingeringSocket;
use crate::{duplicates, fd_table, real, runtime, signals};

/// `CLOSE_RANGE_CLOEXEC`: the call sets a flag and closes nothing.
const CLOSE_ON_EXEC: c_int = 4;

/// Requests for the time of the last datagram, which the `libc` crate does not define: in the form of
/// the machine's word, and with 64-bit seconds.
const SIOCGSTAMP_OLD: c_ulong = 0x8906;
const SIOCGSTAMPNS_OLD: c_ulong = 0x8907;
const SIOCGSTAMP_NEW: c_ulong = 0x8010_8906;
const SIOCGSTAMPNS_NEW: c_ulong = 0x8010_8907;

/// True for a descriptor of the library that the application must neither close nor replace. A
/// forked child of a process with an embedded stack has no use for those that it inherits.
#[inline]
pub(super) fn is_hidden(fd: c_int) -> bool {
    own_fd::is_own(fd) && !runtime::is_child()
}

/// Lowest descriptor of the library from `first` on that the application must not close.
fn next_hidden(first: c_int) -> Option<c_int> {
    if runtime::is_child() { None } else { own_fd::next_own(first) }
}

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
    let mut lingering = None;
    if fd_table::is_tidegate(fd) {
        lingering = LingeringSocket::begin(fd);
        drop_entry(fd);
    } else if is_hidden(fd) && !(signals::is_inside_stack() && own_fd::unlist_fixed(fd)) {
        errno::set(libc::EBADF);
        return -1;
    }
    duplicates::forget(fd);
    // SAFETY: the application's own call.
    let result = unsafe { real::close(fd) };
    if let Some(lingering) = lingering {
        lingering.finish();
    }
    result
}

/// Closes a range of descriptors except those of the library.
fn close_visible(mut first: c_uint, last: c_uint, flags: c_int) -> c_int {
    loop {
        let hidden = c_int::try_from(first).ok().and_then(next_hidden);
        let hidden = hidden.map(|fd| fd as c_uint).filter(|&fd| fd <= last);
        let end = hidden.map_or(Some(last), |fd| fd.checked_sub(1));
        if let Some(end) = end.filter(|&end| first <= end) {
            // SAFETY: the application's own call.
            let result = unsafe { real::close_range(first, end, flags) };
            if result != 0 {
                return result;
            }
        }
        match hidden {
            Some(fd) if fd < last => first = fd + 1,
            _ => return 0,
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if first > last || flags & CLOSE_ON_EXEC != 0 {
        // SAFETY: the application's own call.
        return unsafe { real::close_range(first, last, flags) };
    }
    fd_table::range(first, last).for_each(drop_entry);
    close_visible(first, last, flags)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let start = c_uint::try_from(first).unwrap_or(0);
    fd_table::range(start, c_uint::MAX).for_each(drop_entry);
    if next_hidden(start as c_int).is_none() {
        // SAFETY: the application's own call.
        return unsafe { real::closefrom(first) };
    }
    close_visible(start, c_uint::MAX, 0);
}

/// Leaves a number to the application that a descriptor of the library has.
fn give_number(fd: c_int) -> Result<(), c_int> {
    if !is_hidden(fd) {
        return Ok(());
    }
    own_fd::relocate(fd).map_err(|error| {
        errno::set_from(&error);
        -1
    })
}

/// Gives the new descriptor the table entry of the old one, now or when its socket moves.
fn copy_entry(old: c_int, new: c_int) {
    if new < 0 || new == old {
        return;
    }
    if fd_table::is_tidegate(new) {
        drop_entry(new);
    }
    match fd_table::get(old) {
        Some(entry) => {
            fd_table::insert(new, entry.clone());
        }
        None if runtime::rules().is_some() => duplicates::note(old, new),
        None => {}
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
    if let Err(result) = give_number(to) {
        return result;
    }
    // SAFETY: the application's own call.
    let new = unsafe { real::dup2(from, to) };
    copy_entry(from, new);
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    if let Err(result) = give_number(to) {
        return result;
    }
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
    if result < 0 {
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

/// Unit of a request for the time of the last datagram (`SIOCGSTAMP`, `SIOCGSTAMPNS`), as parts of a
/// second; `None` for other requests.
fn parts_of_second(request: c_ulong) -> Option<u64> {
    match request {
        SIOCGSTAMP_OLD | SIOCGSTAMP_NEW => Some(1_000_000),
        SIOCGSTAMPNS_OLD | SIOCGSTAMPNS_NEW => Some(1_000_000_000),
        _ => None,
    }
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
    if let Some(socket) = &socket
        && let Endpoint::Udp(udp) = &*socket.endpoint
        && let Some(parts) = parts_of_second(request)
        && argument != 0
    {
        let time = udp.receive_time.get().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT));
        return errno::return_status(time.map(|time| {
            let part = u64::from(time.subsec_nanos()) * parts / 1_000_000_000;
            // SAFETY: the application's own pointer to a time of two words.
            unsafe { (argument as *mut [u64; 2]).write([time.as_secs(), part]) };
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
