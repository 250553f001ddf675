//! Resource limits of applications.

use std::time::Duration;

/// Limits of an application's use of shared resources, on each network core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Local ports that the application may bind. Connections do not count.
    pub max_ports: u32,
    /// Bytes of memory for the data of its sockets. Beyond it, no further socket is created.
    pub max_memory_bytes: u64,
    /// Share of a core's time for its commands, 1 to 100 percent, while other applications have
    /// work too. Further commands wait.
    pub cpu_share_percent: u32,
}

impl Default for Quota {
    /// No limits.
    fn default() -> Self {
        Self { max_ports: u32::MAX, max_memory_bytes: u64::MAX, cpu_share_percent: 100 }
    }
}

/// Settings of an application when it attaches.
#[derive(Clone, Copy, Default)]
pub(super) struct AppSettings {
    /// Minimum time between two wake-ups of an application with several peers.
    pub(super) coalescing: Duration,
    pub(super) quota: Quota,
}
