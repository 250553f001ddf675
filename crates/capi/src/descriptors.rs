//! Descriptors: each object of the library reserves a number of the kernel, so that descriptors of
//! both can be used side by side.

use std::io;
use std::sync::{Arc, OnceLock};

use libc::c_int;
use tidegate_posix::fd_table::{Borrowed, FdTable};

use crate::epoll::EpollSet;
use crate::kqueue::Kqueue;
use crate::ring::SocketRing;
use crate::socket::{Socket, os_error};

/// Object of a descriptor.
pub(crate) enum Entry {
    Socket(Arc<Socket>),
    Epoll(Arc<EpollSet>),
    Kqueue(Arc<Kqueue>),
    Ring(Arc<SocketRing>),
}

/// Object in use by a call.
pub(crate) type InUse<T> = Borrowed<Entry, T>;

static TABLE: FdTable<Entry> = FdTable::new();

/// Event descriptor whose copies reserve numbers.
fn anchor() -> io::Result<c_int> {
    static ANCHOR: OnceLock<Result<c_int, c_int>> = OnceLock::new();
    let created = ANCHOR.get_or_init(|| {
        // SAFETY: creates a descriptor.
        match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
            -1 => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE)),
            fd => Ok(fd),
        }
    });
    created.map_err(os_error)
}

/// Gives a socket or kqueue a descriptor.
///
/// # Errors
/// `EMFILE` and the like.
pub(crate) fn install(entry: Entry) -> io::Result<c_int> {
    // SAFETY: copies a descriptor of the library's own.
    let fd = unsafe { libc::fcntl(anchor()?, libc::F_DUPFD_CLOEXEC, 0) };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    install_at(fd, entry)
}

/// Gives an object the descriptor `fd`, which the library owns.
///
/// # Errors
/// `EMFILE` for a descriptor beyond the table.
pub(crate) fn install_at(fd: c_int, entry: Entry) -> io::Result<c_int> {
    match TABLE.insert(fd, entry) {
        true => Ok(fd),
        false => {
            // SAFETY: a descriptor of the library's own, not used any more.
            unsafe { libc::close(fd) };
            Err(os_error(libc::EMFILE))
        }
    }
}

/// Puts another socket in the place of one, for another attempt to connect.
pub(crate) fn replace(fd: c_int, socket: Arc<Socket>) {
    TABLE.insert(fd, Entry::Socket(socket));
}

/// Object of a descriptor.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<InUse<Entry>> {
    TABLE.get(fd)
}

/// True if the descriptor is the library's.
pub(crate) fn contains(fd: c_int) -> bool {
    TABLE.contains(fd)
}

/// Error of a descriptor that is not what a call needs: `EBADF` for no descriptor.
#[cold]
pub(crate) fn other_kind(fd: c_int, code: c_int) -> io::Error {
    // SAFETY: the kernel checks the descriptor.
    match unsafe { libc::fcntl(fd, libc::F_GETFD) } {
        -1 => os_error(libc::EBADF),
        _ => os_error(code),
    }
}

/// Object of a descriptor of the kind that a call needs.
///
/// # Errors
/// `EBADF` for no descriptor, `code` for something else.
#[inline]
fn get_part<T>(
    fd: c_int,
    code: c_int,
    part: impl FnOnce(&Entry) -> Option<&T>,
) -> io::Result<InUse<T>> {
    match get(fd).map(|entry| entry.filter_map(part)) {
        Some(Ok(part)) => Ok(part),
        _ => Err(other_kind(fd, code)),
    }
}

/// Socket of a descriptor.
///
/// # Errors
/// `EBADF` for no descriptor, `ENOTSOCK` for something else.
#[inline]
pub(crate) fn socket(fd: c_int) -> io::Result<InUse<Arc<Socket>>> {
    get_part(fd, libc::ENOTSOCK, |entry| match entry {
        Entry::Socket(socket) => Some(socket),
        _ => None,
    })
}

/// Epoll set of a descriptor.
///
/// # Errors
/// `EBADF` for no descriptor, `EINVAL` for something else.
pub(crate) fn epoll(fd: c_int) -> io::Result<InUse<Arc<EpollSet>>> {
    get_part(fd, libc::EINVAL, |entry| match entry {
        Entry::Epoll(set) => Some(set),
        _ => None,
    })
}

/// Kqueue of a descriptor.
///
/// # Errors
/// `EBADF` for anything else.
pub(crate) fn kqueue(fd: c_int) -> io::Result<InUse<Arc<Kqueue>>> {
    get_part(fd, libc::EBADF, |entry| match entry {
        Entry::Kqueue(kqueue) => Some(kqueue),
        _ => None,
    })
}

/// Ring of a descriptor.
///
/// # Errors
/// `EBADF` for no descriptor, `EINVAL` for something else.
pub(crate) fn ring(fd: c_int) -> io::Result<InUse<Arc<SocketRing>>> {
    get_part(fd, libc::EINVAL, |entry| match entry {
        Entry::Ring(ring) => Some(ring),
        _ => None,
    })
}

/// Removes the object of a descriptor, whose number stays reserved. The object ends with the calls that
/// still use it.
///
/// # Errors
/// `EBADF` for other descriptors.
fn remove(fd: c_int) -> io::Result<()> {
    let entry = TABLE.remove(fd).ok_or_else(|| os_error(libc::EBADF))?;
    if let Entry::Socket(socket) = &*entry
        && Arc::strong_count(socket) == 1
        && entry.is_last_use()
    {
        socket.linger();
    }
    Ok(())
}

/// Closes a descriptor of the library. The object ends with the calls that still use it.
///
/// # Errors
/// `EBADF` for other descriptors.
pub(crate) fn close(fd: c_int) -> io::Result<()> {
    remove(fd)?;
    // SAFETY: a descriptor of the library's own, which the table no longer has.
    unsafe { libc::close(fd) };
    Ok(())
}

/// Object for a second descriptor.
///
/// # Errors
/// `EBADF` for other descriptors, `EINVAL` for objects other than sockets.
fn second(fd: c_int) -> io::Result<Entry> {
    match get(fd).as_deref() {
        Some(Entry::Socket(socket)) => Ok(Entry::Socket(Arc::clone(socket))),
        Some(_) => Err(os_error(libc::EINVAL)),
        None => Err(os_error(libc::EBADF)),
    }
}

/// Second descriptor of a socket.
///
/// # Errors
/// `EBADF` for other descriptors, `EMFILE` and the like.
pub(crate) fn duplicate(fd: c_int) -> io::Result<c_int> {
    install(second(fd)?)
}

/// Second descriptor of a socket with the number `to`. What had that number is closed.
///
/// # Errors
/// As [`duplicate`].
pub(crate) fn duplicate_to(fd: c_int, to: c_int) -> io::Result<c_int> {
    let entry = second(fd)?;
    if fd == to {
        return Ok(to);
    }
    // Fails for a number that is not the library's. The number is never free in between, so that no
    // other thread gets it.
    let _ = remove(to);
    // SAFETY: `to` is the program's own, which says that it is to be closed.
    if unsafe { libc::dup3(anchor()?, to, libc::O_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    install_at(to, entry)
}

/// Closes all objects, for the end of the process.
pub(crate) fn clear() {
    for fd in TABLE.range(0, u32::MAX).collect::<Vec<_>>() {
        drop(TABLE.remove(fd));
    }
}

/// Forgets all objects in a forked child: they are the parent's.
pub(crate) fn forget_all() {
    for fd in TABLE.range(0, u32::MAX).collect::<Vec<_>>() {
        TABLE.forget(fd);
    }
}
