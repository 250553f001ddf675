//! What a serving loop counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a serving loop did so far. May be read from another thread while it
/// runs.
#[derive(Debug, Default)]
pub struct ServeCounters {
    /// Datagrams handed to the responder.
    pub requests: AtomicU64,
    /// Answers handed to the stack or taken by the kernel.
    pub answers: AtomicU64,
    /// Datagrams longer than the buffers, not handed to the responder. Always
    /// 0 on Tidegate, which counts them by reason.
    pub oversized: AtomicU64,
    /// Answers that the kernel refused to send: no route, a full buffer. Always
    /// 0 on Tidegate, which counts them by reason.
    pub unsent: AtomicU64,
}

impl ServeCounters {
    /// Counters that all stand at zero.
    pub const fn new() -> Self {
        ServeCounters {
            requests: AtomicU64::new(0),
            answers: AtomicU64::new(0),
            oversized: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        }
    }

    /// Adds one batch. There is one writer for each set of counters, so it
    /// need not be a locked instruction.
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }
}
