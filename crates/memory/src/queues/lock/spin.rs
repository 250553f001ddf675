//! Test and set, with a pause: the spinlock of the kernel that Rivera's model
//! was written after (thesis, figure 4.3).

use super::{Lock, LockKind};
use crate::sync::{AtomicBool, Ordering, UnsafeCell, relax};

/// Spinlocks.
pub struct Spin;

impl LockKind for Spin {
    type Lock<T: Send> = SpinLock<T>;
    const NAME: &'static str = "spinlock";
}

/// A lock that is tried again and again.
pub struct SpinLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread that found `taken` clear and
// set it, until that thread clears it; acquire and release order the uses.
unsafe impl<T: Send> Sync for SpinLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for SpinLock<T> {}

/// Clears the flag, also when the user of the value panics.
struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpinLock<T> {
    /// Test and set. The processor gets hold of the line either way, as with
    /// an exchange.
    #[inline(always)]
    fn take(&self) -> bool {
        let (ok, failed) = (Ordering::Acquire, Ordering::Relaxed);
        self.taken.compare_exchange(false, true, ok, failed).is_ok()
    }

    #[inline(always)]
    fn taken_by_us<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let _release = Release(&self.taken);
        // SAFETY: this thread has set `taken`, and `_release` clears it later.
        self.value.with_mut(|value| using(unsafe { &mut *value }))
    }
}

impl<T: Send> Lock<T> for SpinLock<T> {
    fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        while !self.take() {
            relax();
        }
        self.taken_by_us(using)
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        if !self.take() {
            return Err(using);
        }
        Ok(self.taken_by_us(using))
    }
}
