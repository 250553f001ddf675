//! A line of waiters, each waiting on a place of its own, so that a release
//! disturbs one processor only (Mellor-Crummey and Scott, "Algorithms for
//! scalable synchronization on shared-memory multiprocessors", 1991).

use std::ptr;

use super::{Lock, LockKind, wait_in_order};
use crate::sync::{AtomicBool, AtomicPtr, Ordering, UnsafeCell};

/// MCS locks.
pub struct Mcs;

impl LockKind for Mcs {
    type Lock<T: Send> = McsLock<T>;
    const NAME: &'static str = "mcs";
}

/// A lock that knows the last of its waiters.
pub struct McsLock<T> {
    last: AtomicPtr<Waiter>,
    value: UnsafeCell<T>,
}

/// A place in the line, on the stack of the thread that waits or holds.
struct Waiter {
    waiting: AtomicBool,
    next: AtomicPtr<Waiter>,
}

// SAFETY: the value is reached only by the thread at the head of the line,
// and a thread becomes that once; acquire and release order the uses.
unsafe impl<T: Send> Sync for McsLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for McsLock<T> {}

/// Leaves the head of the line, also when the user of the value panics.
struct Leave<'a> {
    last: &'a AtomicPtr<Waiter>,
    waiter: &'a Waiter,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let us = ptr::from_ref(self.waiter).cast_mut();
        let mut next = self.waiter.next.load(Ordering::Acquire);
        if next.is_null() {
            let alone = self.last.compare_exchange(
                us,
                ptr::null_mut(),
                Ordering::Release,
                Ordering::Relaxed,
            );
            if alone.is_ok() {
                return;
            }
            // Somebody stands behind us and is about to say who.
            let mut turn = 0;
            while next.is_null() {
                wait_in_order(&mut turn);
                next = self.waiter.next.load(Ordering::Acquire);
            }
        }
        // SAFETY: the waiter behind us stays where it is until this store.
        unsafe { &(*next).waiting }.store(false, Ordering::Release);
    }
}

impl<T> McsLock<T> {
    #[inline(always)]
    fn at_head<R>(&self, waiter: &Waiter, using: impl FnOnce(&mut T) -> R) -> R {
        let _leave = Leave { last: &self.last, waiter };
        // SAFETY: this thread is at the head of the line until `_leave` goes.
        self.value.with_mut(|value| using(unsafe { &mut *value }))
    }
}

impl Waiter {
    fn new() -> Self {
        Self { waiting: AtomicBool::new(true), next: AtomicPtr::new(ptr::null_mut()) }
    }
}

impl<T: Send> Lock<T> for McsLock<T> {
    fn new(value: T) -> Self {
        Self { last: AtomicPtr::new(ptr::null_mut()), value: UnsafeCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let waiter = Waiter::new();
        let us = ptr::from_ref(&waiter).cast_mut();
        let before = self.last.swap(us, Ordering::AcqRel);
        if !before.is_null() {
            // SAFETY: the waiter before us does not leave before it has seen
            // who stands behind it: `last` no longer names it.
            unsafe { &(*before).next }.store(us, Ordering::Release);
            let mut turn = 0;
            while waiter.waiting.load(Ordering::Acquire) {
                wait_in_order(&mut turn);
            }
        }
        self.at_head(&waiter, using)
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        let waiter = Waiter::new();
        let us = ptr::from_ref(&waiter).cast_mut();
        let alone =
            self.last.compare_exchange(ptr::null_mut(), us, Ordering::AcqRel, Ordering::Relaxed);
        if alone.is_err() {
            return Err(using);
        }
        Ok(self.at_head(&waiter, using))
    }
}
