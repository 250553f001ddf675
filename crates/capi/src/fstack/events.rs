//! Kqueues and epoll sets of F-Stack.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use libc::c_int;

use super::run;
use crate::calls::wait;
use crate::descriptors::{self, Entry};
use crate::kqueue::{ERROR, Kevent, Kqueue, RECEIPT};
use crate::socket::{Socket, os_error};
use crate::stack;

/// Creates an epoll set, for which `ff_run` waits.
///
/// # Errors
/// As `epoll_create`.
pub(super) fn create_epoll() -> io::Result<c_int> {
    let fd = wait::epoll_create(stack::net()?, 0)?;
    let set = descriptors::epoll(fd)?;
    run::add(&set);
    Ok(fd)
}

/// Creates a kqueue, for which `ff_run` waits.
///
/// # Errors
/// As `kqueue`.
pub(super) fn create_kqueue() -> io::Result<c_int> {
    let fd = create_epoll()?;
    let set = descriptors::epoll(fd)?;
    descriptors::install_at(fd, Entry::Kqueue(Kqueue::new(Arc::clone(&set))))
}

fn socket_of(fd: c_int) -> Option<Arc<Socket>> {
    descriptors::socket(fd).ok().map(|socket| Arc::clone(&socket))
}

/// Applies changes, then takes events without waiting. A change that fails becomes an event with
/// `EV_ERROR` where there is space.
///
/// # Errors
/// As `kevent`.
///
/// # Safety
/// `changes` is null or points to `change_count` changes.
pub(super) unsafe fn kevent(
    kqueue: c_int,
    changes: *const Kevent,
    change_count: c_int,
    max: c_int,
    mut found: impl FnMut(Kevent),
) -> io::Result<usize> {
    let kqueue = descriptors::kqueue(kqueue)?;
    let max = usize::try_from(max).map_err(|_| os_error(libc::EINVAL))?;
    let mut written = 0;
    let change_count =
        if changes.is_null() { 0 } else { usize::try_from(change_count).unwrap_or(0) };
    for at in 0..change_count {
        // SAFETY: guaranteed by the caller.
        let change = unsafe { changes.add(at).read() };
        let fd = c_int::try_from(change.ident).unwrap_or(-1);
        let applied = descriptors::socket(fd)
            .map_err(|_| os_error(libc::EBADF))
            .and_then(|socket| kqueue.change(fd, &socket, &change));
        let code = match &applied {
            Err(error) => tidegate_posix::errno::code(error),
            Ok(()) if change.flags & RECEIPT != 0 => 0,
            Ok(()) => continue,
        };
        match applied {
            Err(error) if written == max => return Err(error),
            _ if written == max => continue,
            _ => {}
        }
        found(Kevent { flags: ERROR, data: code.into(), ..change });
        written += 1;
    }
    if written > 0 || max == 0 {
        return Ok(written);
    }
    kqueue.wait(max, Some(Duration::ZERO), socket_of, found)
}
