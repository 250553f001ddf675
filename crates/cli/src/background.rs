//! Scheduling of the threads beside a server.

use rustix::thread::CpuSet;
use tidegate_engine::Priority;

/// Scheduling of a thread beside the server: it is to take no time from the processor that serves.
#[derive(Clone)]
pub(crate) struct BackgroundThread {
    processors: CpuSet,
    nice: i32,
}

impl BackgroundThread {
    /// Keeps the processors and the nice value of the calling thread.
    pub(crate) fn like_this_thread() -> std::io::Result<Self> {
        Ok(Self {
            processors: rustix::thread::sched_getaffinity(None)?,
            nice: rustix::process::getpriority_process(None)?,
        })
    }

    /// Schedules the calling thread so. On failure it keeps the scheduling of the thread that
    /// started it.
    pub(crate) fn apply(&self) {
        let _ = Priority::Application.apply();
        let _ = rustix::thread::sched_setaffinity(None, &self.processors);
        let _ = rustix::process::setpriority_process(None, self.nice);
    }
}
