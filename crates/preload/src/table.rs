//! Which descriptor is what.
//!
//! Whether a descriptor is ours is one load from an array: those of the kernel
//! pay nothing else. What is ours is shared by all descriptors that were
//! duplicated from one.

use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::epoll::Epoll;
use crate::signals::Turn;
use crate::socket::Socket;

/// Descriptors from here on are always the kernel's.
const PLACES: usize = 1 << 20;

/// Threads that close and use the same descriptor at once meet at one of these.
const LOCKS: usize = 64;

/// What stands behind a descriptor of ours.
#[derive(Clone)]
pub(crate) enum Entry {
    Socket(Arc<Socket>),
    Epoll(Arc<Epoll>),
}

/// What a call uses. As long as it does, its thread is inside the stack.
pub(crate) struct InUse<T> {
    what: T,
    turn: Turn,
}

impl<T> InUse<T> {
    pub(crate) fn new(what: T) -> Self {
        Self { what, turn: Turn::begin() }
    }
}

impl<T> std::ops::Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.what
    }
}

static TABLE: [AtomicPtr<Entry>; PLACES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PLACES];
static GUARDS: [Mutex<()>; LOCKS] = [const { Mutex::new(()) }; LOCKS];
/// No entry is above this.
static HIGHEST: AtomicI32 = AtomicI32::new(-1);

fn place(fd: i32) -> Option<&'static AtomicPtr<Entry>> {
    TABLE.get(usize::try_from(fd).ok()?)
}

fn guard(fd: i32) -> MutexGuard<'static, ()> {
    let guard = &GUARDS[fd as usize % LOCKS];
    guard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds back every thread that wants to change or look at an entry.
pub(crate) fn lock() -> Vec<MutexGuard<'static, ()>> {
    GUARDS.iter().map(|guard| guard.lock().unwrap_or_else(PoisonError::into_inner)).collect()
}

/// Whether the descriptor is ours.
#[inline]
pub(crate) fn is_ours(fd: i32) -> bool {
    place(fd).is_some_and(|place| !place.load(Ordering::Acquire).is_null())
}

/// What the descriptor is, if it is ours.
#[inline]
pub(crate) fn get(fd: i32) -> Option<InUse<Entry>> {
    let place = place(fd)?;
    if place.load(Ordering::Acquire).is_null() {
        return None;
    }
    let turn = Turn::begin();
    let _guard = guard(fd);
    let entry = place.load(Ordering::Acquire);
    // SAFETY: it was made by `put`, and whoever takes it out holds the guard.
    let what = unsafe { entry.as_ref() }.cloned()?;
    Some(InUse { what, turn })
}

/// The socket that the descriptor is, if it is one of ours.
#[inline]
pub(crate) fn socket(fd: i32) -> Option<InUse<Arc<Socket>>> {
    let InUse { what, turn } = get(fd)?;
    match what {
        Entry::Socket(what) => Some(InUse { what, turn }),
        Entry::Epoll(_) => None,
    }
}

/// The set that the descriptor is, if it is one of ours.
pub(crate) fn epoll(fd: i32) -> Option<InUse<Arc<Epoll>>> {
    let InUse { what, turn } = get(fd)?;
    match what {
        Entry::Epoll(what) => Some(InUse { what, turn }),
        Entry::Socket(_) => None,
    }
}

/// The descriptor is this from now on. `false` when its number is too high.
pub(crate) fn put(fd: i32, entry: Entry) -> bool {
    let _turn = Turn::begin();
    let Some(place) = place(fd) else { return false };
    HIGHEST.fetch_max(fd, Ordering::Relaxed);
    let new = Box::into_raw(Box::new(entry));
    let _old = swap(fd, place, new);
    true
}

/// The descriptor is the kernel's, or nothing, from now on. What it was is
/// closed when nobody has it any more.
pub(crate) fn remove(fd: i32) {
    let Some(place) = place(fd) else { return };
    if !place.load(Ordering::Acquire).is_null() {
        let _turn = Turn::begin();
        drop(swap(fd, place, std::ptr::null_mut()));
    }
}

fn swap(fd: i32, place: &AtomicPtr<Entry>, new: *mut Entry) -> Option<Entry> {
    let guard = guard(fd);
    let old = place.swap(new, Ordering::AcqRel);
    drop(guard);
    // SAFETY: it was made by `put`, and nobody finds it in the table any more;
    // those who look hold the guard.
    (!old.is_null()).then(|| *unsafe { Box::from_raw(old) })
}

/// In a child the entry is forgotten, with what stands behind it: that is the
/// parent's.
pub(crate) fn forget(fd: i32) {
    if let Some(place) = place(fd) {
        // Its memory is not given back: another thread of the parent may have
        // held the guard when this child was made.
        place.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// The descriptors of ours from `first` to `last`.
pub(crate) fn between(first: u32, last: u32) -> impl Iterator<Item = i32> {
    let highest = HIGHEST.load(Ordering::Relaxed);
    let last = i32::try_from(last).map_or(highest, |last| last.min(highest));
    let first = i32::try_from(first).unwrap_or(i32::MAX);
    (first..=last).filter(|&fd| is_ours(fd))
}

/// All sockets that are ours.
pub(crate) fn sockets() -> impl Iterator<Item = InUse<Arc<Socket>>> {
    between(0, u32::MAX).filter_map(socket)
}

/// Takes everything out.
pub(crate) fn clear() {
    between(0, u32::MAX).for_each(remove);
}
