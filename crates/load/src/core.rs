//! Placement of the calling thread on a core.

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::error::LoadError;

/// Pins the calling thread to one core.
///
/// # Errors
/// When there is no such core, or this process may not use it.
pub(crate) fn pin_this_thread(core: usize) -> Result<(), LoadError> {
    if core >= CpuSet::MAX_CPU {
        return Err(LoadError::Config(format!(
            "core {core} does not exist: cores are numbered below {}",
            CpuSet::MAX_CPU
        )));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set)
        .map_err(LoadError::io(format!("cannot run on core {core} (cores count from 0)")))
}
