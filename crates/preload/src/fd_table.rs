//! Descriptor table: the Tidegate object of each descriptor.
//!
//! One load from an array says whether a descriptor is Tidegate's; kernel descriptors cost
//! nothing more. Duplicated descriptors share one object.

use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::epoll::Epoll;
use crate::signals::SignalGuard;
use crate::socket::Socket;

/// Size of the table. Higher descriptors are always the kernel's.
pub(crate) const MAX_FDS: usize = 1 << 20;

/// Number of locks; threads that close and use the same descriptor contend for one of them.
const LOCK_COUNT: usize = 64;

/// Tidegate object of a descriptor.
#[derive(Clone)]
pub(crate) enum Entry {
    Socket(Arc<Socket>),
    Epoll(Arc<Epoll>),
}

/// Object in use by a call. While it lives, its thread counts as inside the stack.
pub(crate) struct InUse<T> {
    value: T,
    signal_guard: SignalGuard,
}

impl<T> InUse<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value, signal_guard: SignalGuard::enter() }
    }
}

impl<T> std::ops::Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

static TABLE: [AtomicPtr<Entry>; MAX_FDS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_FDS];
static ENTRY_LOCKS: [Mutex<()>; LOCK_COUNT] = [const { Mutex::new(()) }; LOCK_COUNT];
/// Highest descriptor that had an entry; -1 when there was none.
static HIGHEST_FD: AtomicI32 = AtomicI32::new(-1);

fn slot(fd: i32) -> Option<&'static AtomicPtr<Entry>> {
    TABLE.get(usize::try_from(fd).ok()?)
}

fn lock_entry(fd: i32) -> MutexGuard<'static, ()> {
    let lock = &ENTRY_LOCKS[fd as usize % LOCK_COUNT];
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the moves of UDP sockets: several threads may use one socket for the first time at once, by
/// several descriptors.
pub(crate) fn lock_moves() -> MutexGuard<'static, ()> {
    static MOVES: Mutex<()> = Mutex::new(());
    MOVES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the table against access by all other threads.
pub(crate) fn lock_all() -> Vec<MutexGuard<'static, ()>> {
    ENTRY_LOCKS.iter().map(|guard| guard.lock().unwrap_or_else(PoisonError::into_inner)).collect()
}

/// True when the descriptor is Tidegate's.
#[inline]
pub(crate) fn is_tidegate(fd: i32) -> bool {
    slot(fd).is_some_and(|place| !place.load(Ordering::Acquire).is_null())
}

/// Object of the descriptor, if it is Tidegate's.
#[inline]
pub(crate) fn get(fd: i32) -> Option<InUse<Entry>> {
    let slot = slot(fd)?;
    if slot.load(Ordering::Acquire).is_null() {
        return None;
    }
    let signal_guard = SignalGuard::enter();
    let _guard = lock_entry(fd);
    let entry = slot.load(Ordering::Acquire);
    // SAFETY: `insert` created the entry, and an entry is removed only under its lock.
    let value = unsafe { entry.as_ref() }.cloned()?;
    Some(InUse { value, signal_guard })
}

/// Socket of the descriptor, if it is a Tidegate socket.
#[inline]
pub(crate) fn socket(fd: i32) -> Option<InUse<Arc<Socket>>> {
    let InUse { value, signal_guard } = get(fd)?;
    match value {
        Entry::Socket(socket) => Some(InUse { value: socket, signal_guard }),
        Entry::Epoll(_) => None,
    }
}

/// Epoll set of the descriptor, if it is one that Tidegate extends.
pub(crate) fn epoll(fd: i32) -> Option<InUse<Arc<Epoll>>> {
    let InUse { value, signal_guard } = get(fd)?;
    match value {
        Entry::Epoll(epoll) => Some(InUse { value: epoll, signal_guard }),
        Entry::Socket(_) => None,
    }
}

/// Sets the object of the descriptor. Returns false when the descriptor is too high.
pub(crate) fn insert(fd: i32, entry: Entry) -> bool {
    let _signal_guard = SignalGuard::enter();
    let Some(slot) = slot(fd) else { return false };
    HIGHEST_FD.fetch_max(fd, Ordering::Relaxed);
    let new = Box::into_raw(Box::new(entry));
    let _old = swap(fd, slot, new);
    true
}

/// Clears the entry of the descriptor. Its object is closed when no descriptor and no call
/// uses it.
pub(crate) fn remove(fd: i32) {
    let Some(slot) = slot(fd) else { return };
    if !slot.load(Ordering::Acquire).is_null() {
        let _signal_guard = SignalGuard::enter();
        drop(swap(fd, slot, std::ptr::null_mut()));
    }
}

fn swap(fd: i32, slot: &AtomicPtr<Entry>, new: *mut Entry) -> Option<Entry> {
    let lock = lock_entry(fd);
    let old = slot.swap(new, Ordering::AcqRel);
    drop(lock);
    // SAFETY: `insert` created the entry, and the table no longer has it; readers hold the lock
    // while they use it.
    (!old.is_null()).then(|| *unsafe { Box::from_raw(old) })
}

/// Clears the entry in a forked child without dropping the object, which belongs to the
/// parent.
pub(crate) fn forget(fd: i32) {
    if let Some(slot) = slot(fd) {
        // Leaked, and without the lock: another thread of the parent may have held the lock
        // when this child was forked.
        slot.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// Descriptors from `first` to `last` (inclusive) that are Tidegate's.
pub(crate) fn range(first: u32, last: u32) -> impl Iterator<Item = i32> {
    let highest = HIGHEST_FD.load(Ordering::Relaxed);
    let last = i32::try_from(last).map_or(highest, |last| last.min(highest));
    let first = i32::try_from(first).unwrap_or(i32::MAX);
    (first..=last).filter(|&fd| is_tidegate(fd))
}

/// All Tidegate sockets, one for each descriptor.
pub(crate) fn sockets() -> impl Iterator<Item = InUse<Arc<Socket>>> {
    range(0, u32::MAX).filter_map(socket)
}

/// Clears all entries.
pub(crate) fn clear() {
    range(0, u32::MAX).for_each(remove);
}
