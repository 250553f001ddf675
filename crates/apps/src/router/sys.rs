//! The scheduling class of a thread: `libc` has it, `rustix` has not.

use std::io;

/// Gives the calling thread a real-time priority (`SCHED_FIFO`, 1 to 99), so
/// that it runs before every ordinary thread of its core.
pub(super) fn run_at_real_time_priority(priority: i32) -> io::Result<()> {
    set(libc::SCHED_FIFO, priority)
}

/// Lets the calling thread run only when nobody else wants its core
/// (`SCHED_IDLE`).
pub(super) fn run_when_idle() -> io::Result<()> {
    set(libc::SCHED_IDLE, 0)
}

fn set(policy: i32, priority: i32) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel only reads the parameters, which outlive the call; 0
    // is the calling thread.
    match unsafe { libc::sched_setscheduler(0, policy, &parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
