//! End of the laboratory: from then on its threads create nothing.

use std::mem;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// Held for reading while something is created that has to be removed at the end.
static CREATING: RwLock<()> = RwLock::new(());

/// To be held while a process, a namespace or a file is created. Blocks forever once this process
/// ends.
pub(crate) fn creating() -> RwLockReadGuard<'static, ()> {
    CREATING.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until nothing is being created, and forbids it for the rest of this process.
pub(super) fn stop_creating() {
    mem::forget(CREATING.write().unwrap_or_else(PoisonError::into_inner));
}
