//! System calls that no safe crate wraps: the scheduling policy and attributes of a thread.

use std::io;

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
