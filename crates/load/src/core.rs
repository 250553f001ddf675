//! Placement of threads on cores.

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::error::LoadError;

/// Pins a thread to one core; `None` is the calling thread.
///
/// # Errors
/// When there is no such core or thread, or this process may not pin it there.
pub fn pin_thread(thread: Option<Pid>, core: usize) -> Result<(), LoadError> {
    if core >= CpuSet::MAX_CPU {
        return Err(LoadError::Config(format!(
            "core {core} does not exist: cores are numbered below {}",
            CpuSet::MAX_CPU
        )));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(thread, &set)
        .map_err(LoadError::io(format!("cannot run on core {core} (cores count from 0)")))
}
