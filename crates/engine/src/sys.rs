//! System calls that no safe crate wraps: the scheduling policy and attributes of a thread, and two
//! options of sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Sets the scheduling policy of the calling thread.
pub(crate) fn set_scheduler(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads the parameters, which outlive the call; 0
    // is the calling thread.
    match unsafe { libc::sched_setscheduler(0, policy, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Scheduling attributes of the calling thread.
pub(crate) fn scheduling_attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: all fields are integers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as libc::c_uint;
    // SAFETY: the kernel writes at most `size` bytes to the attributes, which outlive the call; 0
    // is the calling thread.
    match unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) } {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the scheduling attributes of the calling thread.
pub(crate) fn set_scheduling_attributes(attributes: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: the kernel only reads the attributes, which outlive the call; 0 is the calling
    // thread.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const *attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Cookie of a socket's network namespace.
///
/// # Errors
/// The kernel's error, also before Linux 5.14.
pub(crate) fn netns_cookie(socket: impl AsFd) -> io::Result<u64> {
    let mut cookie = 0_u64;
    socket_option(socket, libc::SO_NETNS_COOKIE, &mut cookie).map(|()| cookie)
}

/// Index of the interface that a socket is bound to; 0 for none.
///
/// # Errors
/// The kernel's error.
pub(crate) fn bound_device(socket: impl AsFd) -> io::Result<u32> {
    let mut index = 0_u32;
    socket_option(socket, libc::SO_BINDTOIFINDEX, &mut index).map(|()| index)
}

/// Integer of the fixed sizes that socket options have.
trait OptionValue {}
impl OptionValue for u32 {}
impl OptionValue for u64 {}

fn socket_option<V: OptionValue>(
    socket: impl AsFd,
    name: libc::c_int,
    value: &mut V,
) -> io::Result<()> {
    let mut len = size_of::<V>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    let value: *mut V = value;
    // SAFETY: the kernel writes at most `len` bytes, the size of the integer, which outlives the
    // call; every bit pattern is an integer.
    match unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, value.cast(), &raw mut len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
