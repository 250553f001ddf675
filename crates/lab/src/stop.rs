//! Telling threads to stop.

use std::sync::atomic::{AtomicBool, Ordering};

/// Tells others to stop when it is dropped: whatever ends the one that measures
/// ends those who work for it.
pub(crate) struct StopAtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
