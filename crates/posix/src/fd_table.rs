//! Descriptor table: the object of each descriptor.
//!
//! One load from an array says whether a descriptor has an object. A call borrows the object by a count
//! of its users, without a lock. Duplicated descriptors share one object.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Size of a table. Higher descriptors never have an object.
pub const MAX_FDS: usize = 1 << 20;

/// Table of the objects of descriptors.
///
/// An object lies in a node. A node is never freed, only used again: a thread that has read the address
/// of a node from a slot may count itself a user before it knows whether the slot still has that node.
pub struct FdTable<T: 'static> {
    slots: [AtomicPtr<Node<T>>; MAX_FDS],
    free: Mutex<Free<T>>,
    /// First descriptor above all that had an object.
    end_fd: AtomicI32,
}

/// Home of an object.
struct Node<T: 'static> {
    /// [`IN_TABLE`], [`OCCUPIED`], and the number of users: borrowed objects, and threads that are about
    /// to find that they have come too late.
    users: AtomicU32,
    /// Next node without an object, of one that has none.
    next_free: Mutex<Free<T>>,
    object: UnsafeCell<Option<T>>,
}

/// A slot of the table has the node.
const IN_TABLE: u32 = 1 << 31;
/// The node has an object. Who clears it takes the object out.
const OCCUPIED: u32 = 1 << 30;

// SAFETY: the object is read by users only, while `OCCUPIED` is set, and written by the one thread that
// has taken the node from the free nodes or cleared `OCCUPIED`.
unsafe impl<T: Send + Sync> Sync for Node<T> {}

/// Lock of a table.
pub struct TableLock<T: 'static>(#[allow(dead_code, reason = "held")] MutexGuard<'static, Free<T>>);

/// First of the nodes without an object.
type Free<T> = Option<&'static Node<T>>;

/// Borrowed object, or a part of it. The object lives as long as somebody borrows it, also when its
/// descriptor is closed.
pub struct Borrowed<T: Send + Sync + 'static, U = T> {
    node: &'static Node<T>,
    free: &'static Mutex<Free<T>>,
    part: NonNull<U>,
}

// SAFETY: gives shared access to the object only, and may drop it in the thread that it is in.
unsafe impl<T: Send + Sync, U: Sync> Send for Borrowed<T, U> {}
// SAFETY: gives shared access to the object only.
unsafe impl<T: Send + Sync, U: Sync> Sync for Borrowed<T, U> {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send + Sync> FdTable<T> {
    /// Creates an empty table. All its bytes are zero, so that a static takes no room in the file of a
    /// library.
    #[allow(clippy::new_without_default, reason = "a table is a static of eight megabytes")]
    #[allow(clippy::large_stack_arrays, reason = "evaluated at compile time")]
    pub const fn new() -> Self {
        Self {
            slots: [const { AtomicPtr::new(ptr::null_mut()) }; MAX_FDS],
            free: Mutex::new(None),
            end_fd: AtomicI32::new(0),
        }
    }

    #[inline]
    fn slot(&self, fd: i32) -> Option<&AtomicPtr<Node<T>>> {
        self.slots.get(usize::try_from(fd).ok()?)
    }

    /// Locks what adding and removing objects locks, so that a child that is forked meanwhile finds it
    /// as this thread leaves it. Borrowing goes on.
    pub fn lock(&'static self) -> TableLock<T> {
        TableLock(lock(&self.free))
    }

    /// True when the descriptor has an object.
    #[inline]
    pub fn contains(&self, fd: i32) -> bool {
        self.slot(fd).is_some_and(|slot| !slot.load(Ordering::Acquire).is_null())
    }

    /// Object of the descriptor.
    #[inline]
    pub fn get(&'static self, fd: i32) -> Option<Borrowed<T>> {
        let slot = self.slot(fd)?;
        loop {
            let read = slot.load(Ordering::Acquire);
            // SAFETY: a node is never freed.
            let node = unsafe { read.as_ref() }?;
            // Whoever removes the node counts after it has cleared the slot: either it sees this user, or
            // this user sees the slot that it has cleared.
            node.users.fetch_add(1, Ordering::AcqRel);
            if slot.load(Ordering::Acquire) == read {
                return Some(self.borrowed(node));
            }
            node.leave(&self.free);
        }
    }

    /// Object of a node that this thread is a user of, and that was in the table meanwhile.
    #[inline]
    fn borrowed(&'static self, node: &'static Node<T>) -> Borrowed<T> {
        // SAFETY: `insert` has put the object there, and it stays as long as the node has users.
        let object = unsafe { (*node.object.get()).as_ref().unwrap_unchecked() };
        Borrowed { node, free: &self.free, part: NonNull::from(object) }
    }

    /// Sets the object of the descriptor. Returns false when the descriptor is too high.
    pub fn insert(&'static self, fd: i32, object: T) -> bool {
        let Some(slot) = self.slot(fd) else { return false };
        // A slot below `MAX_FDS`: no overflow.
        self.end_fd.fetch_max(fd + 1, Ordering::Relaxed);
        let node = self.free_node();
        // SAFETY: only this thread has the node, which has no object: others may count themselves users,
        // but find that no slot has it.
        unsafe { *node.object.get() = Some(object) };
        node.users.fetch_add(IN_TABLE | OCCUPIED, Ordering::AcqRel);
        drop(self.swap(slot, ptr::from_ref(node).cast_mut()));
        true
    }

    /// Removes and returns the object of the descriptor.
    pub fn remove(&'static self, fd: i32) -> Option<Borrowed<T>> {
        let slot = self.slot(fd)?;
        match slot.load(Ordering::Acquire).is_null() {
            true => None,
            false => self.swap(slot, ptr::null_mut()),
        }
    }

    /// Node without an object.
    fn free_node(&self) -> &'static Node<T> {
        let mut free = lock(&self.free);
        match *free {
            Some(node) => {
                *free = lock(&node.next_free).take();
                node
            }
            None => Box::leak(Box::new(Node {
                users: AtomicU32::new(0),
                next_free: Mutex::new(None),
                object: UnsafeCell::new(None),
            })),
        }
    }

    fn swap(&'static self, slot: &AtomicPtr<Node<T>>, new: *mut Node<T>) -> Option<Borrowed<T>> {
        // SAFETY: a node is never freed.
        let node = unsafe { slot.swap(new, Ordering::AcqRel).as_ref() }?;
        // The table's hold of the node becomes this thread's.
        node.users.fetch_sub(IN_TABLE - 1, Ordering::AcqRel);
        Some(self.borrowed(node))
    }

    /// Clears the entry in a forked child without dropping the object, which belongs to the
    /// parent.
    pub fn forget(&self, fd: i32) {
        if let Some(slot) = self.slot(fd) {
            // Leaked, and without the lock: another thread of the parent may have held the lock
            // when this child was forked.
            slot.store(ptr::null_mut(), Ordering::Release);
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

impl<T: Send + Sync> Node<T> {
    /// Ends a use. The last user of an object that the table no longer has drops it.
    #[inline]
    fn leave(&'static self, free: &Mutex<Free<T>>) {
        if self.users.fetch_sub(1, Ordering::AcqRel) == OCCUPIED | 1 {
            self.clear(free);
        }
    }

    #[cold]
    fn clear(&'static self, free: &Mutex<Free<T>>) {
        // A thread that has come too late clears the node itself, or has done so.
        if self.users.compare_exchange(OCCUPIED, 0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        // SAFETY: only one thread clears `OCCUPIED`, and no slot has the node.
        let object = unsafe { (*self.object.get()).take() };
        let mut first = lock(free);
        *lock(&self.next_free) = *first;
        *first = Some(self);
        drop(first);
        // Without the lock: an object may end others.
        drop(object);
    }
}

impl<T: Send + Sync, U> Borrowed<T, U> {
    /// Part of the object.
    ///
    /// # Errors
    /// The whole, if it has no such part.
    #[inline]
    pub fn filter_map<V>(
        self,
        part: impl FnOnce(&U) -> Option<&V>,
    ) -> Result<Borrowed<T, V>, Self> {
        let Some(part) = part(&self).map(NonNull::from) else { return Err(self) };
        let Self { node, free, .. } = self;
        std::mem::forget(self);
        Ok(Borrowed { node, free, part })
    }

    /// True for an object that was removed and that nobody else borrows.
    pub fn is_last_use(&self) -> bool {
        self.node.users.load(Ordering::Acquire) == OCCUPIED | 1
    }
}

impl<T: Send + Sync, U> Deref for Borrowed<T, U> {
    type Target = U;

    #[inline]
    fn deref(&self) -> &U {
        // SAFETY: a part of the object, which stays as long as the node has users.
        unsafe { self.part.as_ref() }
    }
}

impl<T: Send + Sync, U> Drop for Borrowed<T, U> {
    #[inline]
    fn drop(&mut self) {
        self.node.leave(self.free);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use super::*;

    #[test]
    fn objects_are_replaced_and_removed() {
        static TABLE: FdTable<Arc<u32>> = FdTable::new();
        assert!(TABLE.get(-1).is_none() && TABLE.get(MAX_FDS as i32).is_none());
        assert!(!TABLE.insert(MAX_FDS as i32, Arc::new(0)));
        let first = Arc::new(1);
        assert!(TABLE.insert(5, Arc::clone(&first)));
        assert_eq!(TABLE.get(5).as_deref(), Some(&Arc::new(1)));
        assert!(TABLE.insert(5, Arc::new(2)));
        assert_eq!(Arc::strong_count(&first), 1);
        assert_eq!(TABLE.range(0, u32::MAX).collect::<Vec<_>>(), [5]);
        assert_eq!(TABLE.remove(5).as_deref(), Some(&Arc::new(2)));
        assert!(TABLE.remove(5).is_none() && !TABLE.contains(5));
    }

    #[test]
    fn borrowed_object_outlives_its_descriptor() {
        static TABLE: FdTable<Result<Arc<u32>, u32>> = FdTable::new();
        let object = Arc::new(7);
        assert!(TABLE.insert(3, Ok(Arc::clone(&object))));
        let part =
            TABLE.get(3).and_then(|entry| entry.filter_map(|entry| entry.as_ref().ok()).ok());
        let removed = TABLE.remove(3).expect("it was there");
        assert!(!removed.is_last_use(), "a call still uses it");
        drop(removed);
        assert_eq!(Arc::strong_count(&object), 2);
        assert_eq!(part.as_deref(), Some(&object));
        drop(part);
        assert_eq!(Arc::strong_count(&object), 1);
        assert!(TABLE.insert(4, Err(1)));
        let whole = TABLE.get(4).expect("it is there").filter_map(|entry| entry.as_ref().ok());
        assert!(whole.is_err_and(|whole| *whole == Err(1)));
        assert!(TABLE.remove(4).is_some_and(|removed| removed.is_last_use()));
    }

    /// Counts its instances, and knows whether it was dropped.
    struct Counted {
        fd: i32,
        alive: &'static AtomicUsize,
        is_alive: AtomicBool,
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            assert!(self.is_alive.swap(false, Ordering::Relaxed), "dropped twice");
            self.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn threads_borrow_while_others_replace_and_remove() {
        const ROUNDS: usize = if cfg!(miri) { 100 } else { 20_000 };
        static TABLE: FdTable<Counted> = FdTable::new();
        static ALIVE: AtomicUsize = AtomicUsize::new(0);
        let change = |round: usize, thread: usize| {
            let fd = (round + thread) as i32 % 3;
            match round % 4 {
                0 => drop(TABLE.remove(fd)),
                _ => {
                    ALIVE.fetch_add(1, Ordering::Relaxed);
                    let object = Counted { fd, alive: &ALIVE, is_alive: AtomicBool::new(true) };
                    assert!(TABLE.insert(fd, object));
                }
            }
        };
        std::thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || (0..ROUNDS).for_each(|round| change(round, thread)));
                scope.spawn(|| {
                    for fd in (0..3).cycle().take(ROUNDS) {
                        if let Some(object) = TABLE.get(fd) {
                            assert_eq!(object.fd, fd);
                            assert!(object.is_alive.load(Ordering::Relaxed));
                        }
                    }
                });
            }
        });
        assert_eq!(ALIVE.load(Ordering::Relaxed), TABLE.range(0, 3).count());
        (0..3).for_each(|fd| drop(TABLE.remove(fd)));
        assert_eq!(ALIVE.load(Ordering::Relaxed), 0);
    }
}
