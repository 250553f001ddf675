//! Test-and-set spinlock with a pause, as in the kernel that Rivera's model was written after
//! (thesis, figure 4.3).

use super::{Lock, LockKind};
use crate::sync::{AtomicBool, Ordering, UnsafeCell, relax};

/// Spinlocks.
pub struct Spin;

impl LockKind for Spin {
    type Lock<T: Send> = SpinLock<T>;
    const NAME: &'static str = "spinlock";
}

/// A lock that is retried in a loop.
pub struct SpinLock<T> {
    locked: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread that found `locked` clear and set it, until
// that thread clears it; acquire and release order the uses.
unsafe impl<T: Send> Sync for SpinLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for SpinLock<T> {}

/// Clears the flag, also when the user of the value panics.
struct ReleaseGuard<'a>(&'a AtomicBool);

impl Drop for ReleaseGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpinLock<T> {
    /// Test and set. The processor acquires the cache line either way, as with an exchange.
    #[inline(always)]
    fn try_acquire(&self) -> bool {
        let (ok, failed) = (Ordering::Acquire, Ordering::Relaxed);
        self.locked.compare_exchange(false, true, ok, failed).is_ok()
    }

    #[inline(always)]
    fn run_locked<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let _release = ReleaseGuard(&self.locked);
        // SAFETY: this thread has set `locked`, and `_release` clears it later.
        self.value.with_mut(|value| using(unsafe { &mut *value }))
    }
}

impl<T: Send> Lock<T> for SpinLock<T> {
    fn new(value: T) -> Self {
        Self { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        while !self.try_acquire() {
            relax();
        }
        self.run_locked(using)
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        if !self.try_acquire() {
            return Err(using);
        }
        Ok(self.run_locked(using))
    }
}
