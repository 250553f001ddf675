//! Scheduling class of a thread: `libc` wraps the system call, `rustix` does not.

use std::io;

/// Gives the calling thread a real-time priority (`SCHED_FIFO`, 1 to 99), so
/// that it runs before every ordinary thread of its core.
pub(super) fn set_real_time_priority(priority: i32) -> io::Result<()> {
    set_scheduler(libc::SCHED_FIFO, priority)
}

/// Puts the calling thread into the `SCHED_IDLE` class: it runs only when no other thread wants
/// its core.
pub(super) fn set_idle_priority() -> io::Result<()> {
    set_scheduler(libc::SCHED_IDLE, 0)
}

fn set_scheduler(policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads the parameters, which outlive the call; 0
    // is the calling thread.
    match unsafe { libc::sched_setscheduler(0, policy, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
