//! The system call that no safe crate wraps: the scheduling policy of a thread.

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
