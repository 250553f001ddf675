//! When memory that was freed goes back to the kernel.

use tidegate_memory::trim_heap;

/// So long after the last application was let go: until then the stack gives back
/// what it kept for the next ones, and those may come.
const REST_NS: u64 = 5_000_000_000;

/// Has the heap trimmed while nobody comes or goes.
pub(super) struct HeapTrim {
    due_ns: Option<u64>,
}

impl HeapTrim {
    /// What starting took goes back, too.
    pub(super) fn new(now_ns: u64) -> Self {
        Self { due_ns: Some(now_ns.saturating_add(REST_NS)) }
    }

    /// An application was let go, and memory was freed.
    pub(super) fn on_let_go(&mut self, now_ns: u64) {
        self.due_ns = Some(now_ns.saturating_add(REST_NS));
    }

    /// When [`HeapTrim::trim_if_due`] has something to do.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// To be called when there is time.
    pub(super) fn trim_if_due(&mut self, now_ns: u64) {
        if self.due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            self.due_ns = None;
            trim_heap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_done_once_after_the_last_one_went() {
        let mut trim = HeapTrim::new(0);
        assert_eq!(trim.next_ns(), Some(REST_NS));
        trim.on_let_go(1);
        trim.on_let_go(2);
        trim.trim_if_due(REST_NS + 1);
        assert_eq!(trim.next_ns(), Some(REST_NS + 2), "another one went");
        trim.trim_if_due(REST_NS + 2);
        assert_eq!(trim.next_ns(), None);
        trim.on_let_go(REST_NS + 3);
        assert_eq!(trim.next_ns(), Some(2 * REST_NS + 3));
    }
}
