//! Descriptor table: the Tidegate object of each descriptor.
//!
//! One load from an array says whether a descriptor is Tidegate's; kernel descriptors cost
//! nothing more. Duplicated descriptors share one object.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_posix::fd_table::FdTable;
pub(crate) use tidegate_posix::fd_table::{MAX_FDS, TableLock};

use crate::epoll::Epoll;
use crate::signals::SignalGuard;
use crate::socket::Socket;

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

static TABLE: FdTable<Entry> = FdTable::new();

/// Locks the moves of UDP sockets: several threads may use one socket for the first time at once, by
/// several descriptors.
pub(crate) fn lock_moves() -> MutexGuard<'static, ()> {
    static MOVES: Mutex<()> = Mutex::new(());
    MOVES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks what changes of the table lock.
pub(crate) fn lock() -> TableLock<Entry> {
    TABLE.lock()
}

/// True when the descriptor is Tidegate's.
#[inline]
pub(crate) fn is_tidegate(fd: i32) -> bool {
    TABLE.contains(fd)
}

/// Object of the descriptor, if it is Tidegate's.
#[inline]
pub(crate) fn get(fd: i32) -> Option<InUse<Entry>> {
    if !is_tidegate(fd) {
        return None;
    }
    let signal_guard = SignalGuard::enter();
    let value = (*TABLE.get(fd)?).clone();
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
    TABLE.insert(fd, entry)
}

/// Clears the entry of the descriptor. Its object is closed when no descriptor and no call
/// uses it.
pub(crate) fn remove(fd: i32) {
    if is_tidegate(fd) {
        let _signal_guard = SignalGuard::enter();
        drop(TABLE.remove(fd));
    }
}

/// Clears the entry in a forked child without dropping the object, which belongs to the
/// parent.
pub(crate) fn forget(fd: i32) {
    TABLE.forget(fd);
}

/// Descriptors from `first` to `last` (inclusive) that are Tidegate's.
pub(crate) fn range(first: u32, last: u32) -> impl Iterator<Item = i32> {
    TABLE.range(first, last)
}

/// All Tidegate sockets, one for each descriptor.
pub(crate) fn sockets() -> impl Iterator<Item = InUse<Arc<Socket>>> {
    range(0, u32::MAX).filter_map(socket)
}

/// Clears all entries.
pub(crate) fn clear() {
    range(0, u32::MAX).for_each(remove);
}
