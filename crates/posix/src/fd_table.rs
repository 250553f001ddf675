//! Descriptor table: the object of each descriptor.
//!
//! One load from an array says whether a descriptor has an object. Duplicated descriptors share
//! one object.

use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Size of a table. Higher descriptors never have an object.
pub const MAX_FDS: usize = 1 << 20;

/// Number of locks; threads that close and use the same descriptor contend for one of them.
const LOCK_COUNT: usize = 64;

/// Table of the objects of descriptors. An object is cheap to clone: a reference, in general.
pub struct FdTable<T> {
    slots: [AtomicPtr<T>; MAX_FDS],
    locks: [Mutex<()>; LOCK_COUNT],
    /// First descriptor above all that had an object.
    end_fd: AtomicI32,
}

impl<T: Clone> FdTable<T> {
    /// Creates an empty table. All its bytes are zero, so that a static takes no room in the file of a
    /// library.
    #[allow(clippy::new_without_default, reason = "a table is a static of eight megabytes")]
    #[allow(clippy::large_stack_arrays, reason = "evaluated at compile time")]
    pub const fn new() -> Self {
        Self {
            slots: [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_FDS],
            locks: [const { Mutex::new(()) }; LOCK_COUNT],
            end_fd: AtomicI32::new(0),
        }
    }

    #[inline]
    fn slot(&self, fd: i32) -> Option<&AtomicPtr<T>> {
        self.slots.get(usize::try_from(fd).ok()?)
    }

    #[inline]
    fn lock(&self, fd: i32) -> MutexGuard<'_, ()> {
        let lock = &self.locks[fd as usize % LOCK_COUNT];
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the table against access by all other threads.
    pub fn lock_all(&self) -> Vec<MutexGuard<'_, ()>> {
        self.locks.iter().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner)).collect()
    }

    /// True when the descriptor has an object.
    #[inline]
    pub fn contains(&self, fd: i32) -> bool {
        self.slot(fd).is_some_and(|slot| !slot.load(Ordering::Acquire).is_null())
    }

    /// Object of the descriptor.
    #[inline]
    pub fn get(&self, fd: i32) -> Option<T> {
        let slot = self.slot(fd)?;
        if slot.load(Ordering::Acquire).is_null() {
            return None;
        }
        let _guard = self.lock(fd);
        let object = slot.load(Ordering::Acquire);
        // SAFETY: `insert` created the object, and an object is removed only under its lock.
        unsafe { object.as_ref() }.cloned()
    }

    /// Sets the object of the descriptor. Returns false when the descriptor is too high.
    pub fn insert(&self, fd: i32, object: T) -> bool {
        let Some(slot) = self.slot(fd) else { return false };
        // A slot below `MAX_FDS`: no overflow.
        self.end_fd.fetch_max(fd + 1, Ordering::Relaxed);
        let new = Box::into_raw(Box::new(object));
        let _old = self.swap(fd, slot, new);
        true
    }

    /// Removes and returns the object of the descriptor.
    pub fn remove(&self, fd: i32) -> Option<T> {
        let slot = self.slot(fd)?;
        match slot.load(Ordering::Acquire).is_null() {
            true => None,
            false => self.swap(fd, slot, std::ptr::null_mut()),
        }
    }

    fn swap(&self, fd: i32, slot: &AtomicPtr<T>, new: *mut T) -> Option<T> {
        let lock = self.lock(fd);
        let old = slot.swap(new, Ordering::AcqRel);
        drop(lock);
        // SAFETY: `insert` created the object, and the table no longer has it; readers hold the
        // lock while they use it.
        (!old.is_null()).then(|| *unsafe { Box::from_raw(old) })
    }

    /// Clears the entry in a forked child without dropping the object, which belongs to the
    /// parent.
    pub fn forget(&self, fd: i32) {
        if let Some(slot) = self.slot(fd) {
            // Leaked, and without the lock: another thread of the parent may have held the lock
            // when this child was forked.
            slot.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// Descriptors from `first` to `last` (inclusive) that have an object.
    pub fn range(&self, first: u32, last: u32) -> impl Iterator<Item = i32> + '_ {
        let highest = self.end_fd.load(Ordering::Relaxed) - 1;
        let last = i32::try_from(last).map_or(highest, |last| last.min(highest));
        let first = i32::try_from(first).unwrap_or(i32::MAX);
        (first..=last).filter(|&fd| self.contains(fd))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    static TABLE: FdTable<Arc<u32>> = FdTable::new();

    #[test]
    fn objects_are_replaced_and_removed() {
        assert!(TABLE.get(-1).is_none() && TABLE.get(MAX_FDS as i32).is_none());
        assert!(!TABLE.insert(MAX_FDS as i32, Arc::new(0)));
        let first = Arc::new(1);
        assert!(TABLE.insert(5, Arc::clone(&first)));
        assert_eq!(TABLE.get(5).as_deref(), Some(&1));
        assert!(TABLE.insert(5, Arc::new(2)));
        assert_eq!(Arc::strong_count(&first), 1);
        assert_eq!(TABLE.range(0, u32::MAX).collect::<Vec<_>>(), [5]);
        assert_eq!(TABLE.remove(5).as_deref(), Some(&2));
        assert!(TABLE.remove(5).is_none() && !TABLE.contains(5));
    }
}
