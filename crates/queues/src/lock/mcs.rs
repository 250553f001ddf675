//! MCS lock: a queue of waiters, each spinning on a flag of its own, so that a release disturbs
//! one processor only (Mellor-Crummey and Scott, "Algorithms for scalable synchronization on
//! shared-memory multiprocessors", 1991).

use std::ptr;

use super::{Lock, LockKind, spin_then_yield};
use crate::sync::{AtomicBool, AtomicPtr, Ordering, UnsafeCell};

/// MCS locks.
pub struct Mcs;

impl LockKind for Mcs {
    type Lock<T: Send> = McsLock<T>;
    const NAME: &'static str = "mcs";
}

/// A lock that points to the tail of its queue of waiters.
pub struct McsLock<T> {
    tail: AtomicPtr<Waiter>,
    value: UnsafeCell<T>,
}

/// Queue node, on the stack of the thread that waits for or holds the lock.
struct Waiter {
    waiting: AtomicBool,
    next: AtomicPtr<Waiter>,
}

// SAFETY: the value is reached only by the thread at the head of the queue, and a thread
// reaches the head once; acquire and release order the uses.
unsafe impl<T: Send> Sync for McsLock<T> {}
// SAFETY: the lock owns its value.
unsafe impl<T: Send> Send for McsLock<T> {}

/// Leaves the head of the queue, also when the user of the value panics.
struct ReleaseGuard<'a> {
    tail: &'a AtomicPtr<Waiter>,
    waiter: &'a Waiter,
}

impl Drop for ReleaseGuard<'_> {
    fn drop(&mut self) {
        let own_node = ptr::from_ref(self.waiter).cast_mut();
        let mut next = self.waiter.next.load(Ordering::Acquire);
        if next.is_null() {
            let cleared = self.tail.compare_exchange(
                own_node,
                ptr::null_mut(),
                Ordering::Release,
                Ordering::Relaxed,
            );
            if cleared.is_ok() {
                return;
            }
            // A waiter has queued behind this node and is about to link itself.
            let mut spins = 0;
            while next.is_null() {
                spin_then_yield(&mut spins);
                next = self.waiter.next.load(Ordering::Acquire);
            }
        }
        // SAFETY: the next waiter stays on its stack until this store.
        unsafe { &(*next).waiting }.store(false, Ordering::Release);
    }
}

impl<T> McsLock<T> {
    #[inline(always)]
    fn run_locked<R>(&self, waiter: &Waiter, using: impl FnOnce(&mut T) -> R) -> R {
        let _release = ReleaseGuard { tail: &self.tail, waiter };
        // SAFETY: this thread is at the head of the queue until `_release` is dropped.
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
        Self { tail: AtomicPtr::new(ptr::null_mut()), value: UnsafeCell::new(value) }
    }

    #[inline]
    fn with<R>(&self, using: impl FnOnce(&mut T) -> R) -> R {
        let waiter = Waiter::new();
        let own_node = ptr::from_ref(&waiter).cast_mut();
        let predecessor = self.tail.swap(own_node, Ordering::AcqRel);
        if !predecessor.is_null() {
            // SAFETY: the previous waiter does not leave before it has seen its successor: `tail`
            // no longer points to it.
            unsafe { &(*predecessor).next }.store(own_node, Ordering::Release);
            let mut spins = 0;
            while waiter.waiting.load(Ordering::Acquire) {
                spin_then_yield(&mut spins);
            }
        }
        self.run_locked(&waiter, using)
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, using: F) -> Result<R, F> {
        let waiter = Waiter::new();
        let own_node = ptr::from_ref(&waiter).cast_mut();
        let acquired = self.tail.compare_exchange(
            ptr::null_mut(),
            own_node,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if acquired.is_err() {
            return Err(using);
        }
        Ok(self.run_locked(&waiter, using))
    }
}
