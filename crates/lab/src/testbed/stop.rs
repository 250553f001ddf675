//! Stop flag for threads.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the stop flag of worker threads when it is dropped: the workers stop however the
/// measuring thread ends.
pub(crate) struct StopOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
