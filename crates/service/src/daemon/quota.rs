//! On what terms applications are attached.

use std::time::Duration;

/// What an application may have of what all share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Local ports that it may bind; connections that it made or accepted are no
    /// matter.
    pub ports: u32,
    /// Bytes that the data of its sockets may take. With more it gets no socket.
    pub memory_bytes: u64,
    /// The part of a core's time for what it asks for, 1 to 100, as long as others
    /// want something too. The rest waits.
    pub cpu_share_percent: u32,
}

impl Default for Quota {
    /// Everything.
    fn default() -> Self {
        Self { ports: u32::MAX, memory_bytes: u64::MAX, cpu_share_percent: 100 }
    }
}

/// On what terms an application is attached.
#[derive(Clone, Copy, Default)]
pub(super) struct Terms {
    /// With several peers it is not woken again before so much time is over.
    pub(super) coalescing: Duration,
    pub(super) quota: Quota,
}
