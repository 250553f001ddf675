//! Kqueues of F-Stack: event queues of FreeBSD, over an epoll set.

use std::collections::HashMap;
use std::ffi::c_void;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libc::{c_int, c_short, c_uint, c_ushort, epoll_event};

use crate::epoll::EpollSet;
use crate::socket::{Endpoint, Socket, lock, os_error};

/// Event, as FreeBSD's `struct kevent`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Kevent {
    pub(crate) ident: usize,
    pub(crate) filter: c_short,
    pub(crate) flags: c_ushort,
    pub(crate) fflags: c_uint,
    pub(crate) data: i64,
    pub(crate) udata: *mut c_void,
    pub(crate) ext: [u64; 4],
}

/// Filters (`EVFILT_READ`, `EVFILT_WRITE`).
const READ: c_short = -1;
const WRITE: c_short = -2;

/// Flags (`EV_ADD` and the like).
const ADD: c_ushort = 0x1;
const DELETE: c_ushort = 0x2;
const ENABLE: c_ushort = 0x4;
const DISABLE: c_ushort = 0x8;
const ONESHOT: c_ushort = 0x10;
const CLEAR: c_ushort = 0x20;
pub(crate) const RECEIPT: c_ushort = 0x40;
const DISPATCH: c_ushort = 0x80;
pub(crate) const ERROR: c_ushort = 0x4000;
const END: c_ushort = 0x8000;

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const READ_END: u32 = (libc::EPOLLRDHUP | libc::EPOLLHUP) as u32;
const WRITE_END: u32 = (libc::EPOLLHUP | libc::EPOLLERR) as u32;

/// Registered filter of a socket.
#[derive(Clone, Copy)]
struct Knote {
    flags: c_ushort,
    is_enabled: bool,
    udata: usize,
}

/// Filters of a socket.
#[derive(Clone, Copy, Default)]
struct Filters {
    read: Option<Knote>,
    write: Option<Knote>,
}

impl Filters {
    fn filter(&mut self, filter: c_short) -> io::Result<&mut Option<Knote>> {
        match filter {
            READ => Ok(&mut self.read),
            WRITE => Ok(&mut self.write),
            _ => Err(os_error(libc::EINVAL)),
        }
    }

    /// Events to register. A set is edge-triggered if all its filters clear their state.
    fn events(&self) -> u32 {
        let enabled = |knote: Option<Knote>| knote.filter(|knote| knote.is_enabled);
        let (read, write) = (enabled(self.read), enabled(self.write));
        let clears = |knote: Option<Knote>| knote.is_none_or(|knote| knote.flags & CLEAR != 0);
        let edge = if clears(read) && clears(write) { EDGE } else { 0 };
        read.map_or(0, |_| IN | libc::EPOLLRDHUP as u32) | write.map_or(0, |_| OUT) | edge
    }
}

/// Kqueue.
pub(crate) struct Kqueue {
    set: Arc<EpollSet>,
    filters: Mutex<HashMap<c_int, Filters>>,
}

impl Kqueue {
    pub(crate) fn new(set: Arc<EpollSet>) -> Arc<Self> {
        Arc::new(Self { set, filters: Mutex::default() })
    }

    pub(crate) fn set(&self) -> &EpollSet {
        &self.set
    }

    /// Applies a change to the filters of a socket.
    ///
    /// # Errors
    /// As `kevent`: `ENOENT` for a filter that is not registered, `EINVAL` for an unknown one.
    pub(crate) fn change(
        &self,
        fd: c_int,
        socket: &Arc<Socket>,
        change: &Kevent,
    ) -> io::Result<()> {
        let mut all = lock(&self.filters);
        let before = all.get(&fd).copied().unwrap_or_default();
        let mut after = before;
        let knote = after.filter(change.filter)?;
        if change.flags & DELETE != 0 {
            knote.take().ok_or_else(|| os_error(libc::ENOENT))?;
        } else {
            let old = *knote;
            if change.flags & ADD == 0 && old.is_none() {
                return Err(os_error(libc::ENOENT));
            }
            let is_enabled = match change.flags & (ENABLE | DISABLE) {
                0 => old.is_none_or(|old| old.is_enabled),
                bits => bits & DISABLE == 0,
            };
            let flags = match change.flags & ADD {
                0 => old.map_or(0, |old| old.flags),
                _ => change.flags & (ONESHOT | CLEAR | DISPATCH),
            };
            *knote = Some(Knote { flags, is_enabled, udata: change.udata as usize });
        }
        self.register(fd, socket, after)?;
        match (after.read, after.write) {
            (None, None) => _ = all.remove(&fd),
            _ => _ = all.insert(fd, after),
        }
        Ok(())
    }

    /// Registers the events of a socket. A descriptor may be that of a socket closed before.
    fn register(&self, fd: c_int, socket: &Arc<Socket>, filters: Filters) -> io::Result<()> {
        let control = |operation, events| {
            self.set.control(operation, fd, socket, events, fd.unsigned_abs().into())
        };
        if filters.read.is_none() && filters.write.is_none() {
            return control(libc::EPOLL_CTL_DEL, 0);
        }
        match control(libc::EPOLL_CTL_MOD, filters.events()) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                control(libc::EPOLL_CTL_ADD, filters.events())
            }
            result => result,
        }
    }

    /// Waits for events, and writes them.
    ///
    /// # Errors
    /// As `kevent`.
    pub(crate) fn wait(
        &self,
        max: usize,
        timeout: Option<Duration>,
        socket_of: impl Fn(c_int) -> Option<Arc<Socket>>,
        mut found: impl FnMut(Kevent),
    ) -> io::Result<usize> {
        // One event of the set may be two of the kqueue.
        let mut ready = vec![epoll_event { events: 0, u64: 0 }; max.div_ceil(2).min(1024)];
        let count = self.set.wait(&mut ready, timeout, None)?;
        let mut written = 0;
        for one in &ready[..count] {
            let fd = one.u64 as c_int;
            let Some(socket) = socket_of(fd) else { continue };
            let mut all = lock(&self.filters);
            let Some(mut filters) = all.get(&fd).copied() else { continue };
            let before = filters;
            for filter in [READ, WRITE] {
                let Ok(knote) = filters.filter(filter) else { continue };
                let Some(active) = knote.filter(|knote| knote.is_enabled) else { continue };
                let Some(event) = event(fd, &socket, filter, one.events, active) else { continue };
                if written < max {
                    written += 1;
                    found(event);
                    match active.flags {
                        flags if flags & ONESHOT != 0 => *knote = None,
                        flags if flags & DISPATCH != 0 => {
                            *knote = Some(Knote { is_enabled: false, ..active });
                        }
                        _ => {}
                    }
                }
            }
            if filters.events() != before.events() {
                // Fails for a socket that another thread has closed meanwhile.
                let _ = self.register(fd, &socket, filters);
                all.insert(fd, filters);
            }
        }
        Ok(written)
    }
}

/// Event of a filter, if there is one.
fn event(fd: c_int, socket: &Socket, filter: c_short, bits: u32, knote: Knote) -> Option<Kevent> {
    let (ready, end) = match filter {
        READ => (IN, READ_END),
        _ => (OUT, WRITE_END),
    };
    if bits & (ready | end) == 0 {
        return None;
    }
    let data = match (filter, socket.endpoint()) {
        // Connections to accept: at least this one.
        (READ, Some(Endpoint::Listener(_))) => 1,
        (READ, _) => socket.readable_bytes().unwrap_or(0),
        (_, Some(Endpoint::Stream(stream))) => stream.writable_bytes(),
        _ => 1,
    };
    let flags = if bits & end != 0 { knote.flags | END } else { knote.flags };
    Some(Kevent {
        ident: fd.unsigned_abs() as usize,
        filter,
        flags,
        fflags: 0,
        data: i64::try_from(data).unwrap_or(i64::MAX),
        udata: knote.udata as *mut c_void,
        ext: [0; 4],
    })
}
