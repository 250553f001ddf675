//! Mark of a thread that is inside a batch.

use std::cell::Cell;

thread_local!(static ACTIVE: Cell<bool> = const { Cell::new(false) });

/// True if this thread is inside a batch.
#[inline]
pub(crate) fn is_active() -> bool {
    ACTIVE.get()
}

/// Marks this thread as inside a batch, or as outside again.
pub(crate) fn set_active(active: bool) {
    ACTIVE.set(active);
}

/// Panics if this thread is inside a batch: it holds the lock of a stack already.
#[inline]
pub(crate) fn assert_inactive() {
    assert!(!is_active(), "a socket was used inside a batch, but not through the batch");
}
