//! Scheduling class of a thread: `libc` wraps the system call, `rustix` does not.

use std::io;

/// Gives the calling thread a real-time priority (`SCHED_FIFO`, 1 to 99), so
/// that it runs before every ordinary thread of its core.
pub(super) fn set_real_time_priority(priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads the parameters, which outlive the call; 0
    // is the calling thread.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
