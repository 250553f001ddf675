//! Return of freed heap memory to the kernel.

use std::time::{Duration, Instant};

use tidegate_memory::trim_heap;

/// Delay after the last detach: until then the stack releases memory it kept for further
/// sockets, and new applications may reuse it.
const TRIM_DELAY: Duration = Duration::from_secs(5);

/// Trims the heap when no application was detached for a while.
pub(super) struct HeapTrim {
    due: Option<Instant>,
}

impl HeapTrim {
    /// Schedules a first trim, for memory that startup used.
    pub(in crate::daemon) fn new(now: Instant) -> Self {
        Self { due: Some(now + TRIM_DELAY) }
    }

    /// Records that an application was detached, and its memory freed.
    pub(super) fn on_detach(&mut self, now: Instant) {
        self.due = Some(now + TRIM_DELAY);
    }

    /// Time until [`HeapTrim::trim_if_due`] has something to do.
    pub(super) fn time_left(&self, now: Instant) -> Option<Duration> {
        self.due.map(|due| due.saturating_duration_since(now))
    }

    /// Trims the heap if it is due. Must not run on a thread that processes packets.
    pub(super) fn trim_if_due(&mut self, now: Instant) {
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
            trim_heap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trims_once_after_the_last_detach() {
        let began = Instant::now();
        let second = Duration::from_secs(1);
        let mut trim = HeapTrim::new(began);
        assert_eq!(trim.time_left(began), Some(TRIM_DELAY));
        trim.on_detach(began + second);
        trim.on_detach(began + 2 * second);
        trim.trim_if_due(began + TRIM_DELAY + second);
        assert_eq!(
            trim.time_left(began + TRIM_DELAY + second),
            Some(second),
            "another application was detached"
        );
        trim.trim_if_due(began + TRIM_DELAY + 2 * second);
        assert_eq!(trim.time_left(began + TRIM_DELAY + 2 * second), None);
        trim.on_detach(began + TRIM_DELAY + 3 * second);
        assert_eq!(trim.time_left(began + TRIM_DELAY + 4 * second), Some(TRIM_DELAY - second));
    }
}
