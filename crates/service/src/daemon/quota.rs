//! Resource limits of applications.

use std::time::Duration;

use super::attachment_counts::AttachmentCounts;

/// Limits of an application's use of shared resources, on each network core, and of the number of
/// attachments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Local ports that the application may bind. Connections do not count.
    pub max_ports: u32,
    /// Bytes of memory for the data of its sockets. Beyond it, no further socket is created.
    pub max_memory_bytes: u64,
    /// Share of a core's time for its commands, 1 to 100 percent, while other applications have
    /// work too. Further commands wait.
    pub cpu_share_percent: u32,
    /// Attachments of all users together. A program has one for each network core that it uses.
    pub max_attachments: u32,
    /// Attachments of one user.
    pub max_user_attachments: u32,
}

impl Default for Quota {
    /// No limits.
    fn default() -> Self {
        Self {
            max_ports: u32::MAX,
            max_memory_bytes: u64::MAX,
            cpu_share_percent: 100,
            max_attachments: u32::MAX,
            max_user_attachments: u32::MAX,
        }
    }
}

/// Settings of an application when it attaches.
#[derive(Clone, Default)]
pub(super) struct AppSettings {
    /// Minimum time between two wake-ups of an application with several peers.
    pub(super) coalescing: Duration,
    pub(super) quota: Quota,
    /// Counts of the daemon's attachments.
    pub(super) attachments: AttachmentCounts,
}
