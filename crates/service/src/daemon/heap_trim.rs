//! When memory that was freed goes back to the kernel.

use std::time::{Duration, Instant};

use tidegate_memory::trim_heap;

/// So long after the last application was let go: until then the stack gives back
/// what it kept for the next ones, and those may come.
const REST: Duration = Duration::from_secs(5);

/// Has the heap trimmed when nobody has gone for a while.
pub(super) struct HeapTrim {
    due: Option<Instant>,
}

impl HeapTrim {
    /// What starting took goes back, too.
    pub(super) fn new(now: Instant) -> Self {
        Self { due: Some(now + REST) }
    }

    /// An application was let go, and memory was freed.
    pub(super) fn on_let_go(&mut self, now: Instant) {
        self.due = Some(now + REST);
    }

    /// How long until [`HeapTrim::trim_if_due`] has something to do.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        self.due.map(|due| due.saturating_duration_since(now))
    }

    /// To be called by a thread that nobody's packets wait for.
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
    fn it_is_done_once_after_the_last_one_went() {
        let began = Instant::now();
        let second = Duration::from_secs(1);
        let mut trim = HeapTrim::new(began);
        assert_eq!(trim.left(began), Some(REST));
        trim.on_let_go(began + second);
        trim.on_let_go(began + 2 * second);
        trim.trim_if_due(began + REST + second);
        assert_eq!(trim.left(began + REST + second), Some(second), "another one went");
        trim.trim_if_due(began + REST + 2 * second);
        assert_eq!(trim.left(began + REST + 2 * second), None);
        trim.on_let_go(began + REST + 3 * second);
        assert_eq!(trim.left(began + REST + 4 * second), Some(REST - second));
    }
}
