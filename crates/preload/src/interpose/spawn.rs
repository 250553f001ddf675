//! `posix_spawn`: starting another program in a new process.
//!
//! The C library starts the program without the functions of this library, so that the sockets of
//! the program are sent before. The file actions say which descriptors it gets.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_char, c_int, mode_t, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};

use super::process::{InheritedFd, inheritable_fds, start_with_sockets};
use crate::real;

/// Change of the new program's descriptors.
#[derive(Clone, Copy)]
enum FileAction {
    Duplicate {
        from: c_int,
        to: c_int,
    },
    /// The number is closed, or becomes another file.
    Drop(c_int),
    /// All numbers from this one on are closed.
    DropFrom(c_int),
}

impl FileAction {
    fn apply(self, fds: &mut Vec<InheritedFd>) {
        match self {
            Self::Drop(number) => fds.retain(|fd| fd.there != number),
            Self::DropFrom(first) => fds.retain(|fd| fd.there < first),
            Self::Duplicate { from, to } => {
                let source = fds.iter().find(|fd| fd.there == from).copied();
                fds.retain(|fd| fd.there != to);
                fds.extend(source.map(|fd| InheritedFd { there: to, stays_open: true, ..fd }));
            }
        }
    }
}

/// File actions by the address of the application's object.
static ACTIONS: Mutex<Option<HashMap<usize, Vec<FileAction>>>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<HashMap<usize, Vec<FileAction>>>> {
    ACTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds an action that the C library has accepted; returns the C library's result.
fn record(object: *const posix_spawn_file_actions_t, action: FileAction, result: c_int) -> c_int {
    if result == 0 {
        lock().get_or_insert_default().entry(object.addr()).or_default().push(action);
    }
    result
}

/// Forgets the actions of an object.
fn forget(object: *const posix_spawn_file_actions_t) {
    if let Some(all) = lock().as_mut() {
        all.remove(&object.addr());
    }
}

/// Sockets that the new program gets.
fn spawned_fds(object: *const posix_spawn_file_actions_t) -> Vec<InheritedFd> {
    let mut fds = inheritable_fds();
    if let Some(actions) = lock().as_ref().and_then(|all| all.get(&object.addr())) {
        actions.iter().for_each(|action| action.apply(&mut fds));
    }
    fds
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn(
    process: *mut pid_t,
    path: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    // SAFETY: the application's own call.
    let spawn = |environment: *const *const c_char| unsafe {
        real::posix_spawn(process, path, actions, attributes, arguments, environment.cast())
    };
    // SAFETY: the application's own argument.
    unsafe { start_with_sockets(environment.cast(), spawned_fds(actions), spawn, |code| code == 0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawnp(
    process: *mut pid_t,
    file: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    arguments: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    // SAFETY: the application's own call.
    let spawn = |environment: *const *const c_char| unsafe {
        real::posix_spawnp(process, file, actions, attributes, arguments, environment.cast())
    };
    // SAFETY: the application's own argument.
    unsafe { start_with_sockets(environment.cast(), spawned_fds(actions), spawn, |code| code == 0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_init(
    actions: *mut posix_spawn_file_actions_t,
) -> c_int {
    forget(actions);
    // SAFETY: the application's own call.
    unsafe { real::posix_spawn_file_actions_init(actions) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_destroy(
    actions: *mut posix_spawn_file_actions_t,
) -> c_int {
    forget(actions);
    // SAFETY: the application's own call.
    unsafe { real::posix_spawn_file_actions_destroy(actions) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: *mut posix_spawn_file_actions_t,
    from: c_int,
    to: c_int,
) -> c_int {
    // SAFETY: the application's own call.
    let result = unsafe { real::posix_spawn_file_actions_adddup2(actions, from, to) };
    record(actions, FileAction::Duplicate { from, to }, result)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_addclose(
    actions: *mut posix_spawn_file_actions_t,
    fd: c_int,
) -> c_int {
    // SAFETY: the application's own call.
    let result = unsafe { real::posix_spawn_file_actions_addclose(actions, fd) };
    record(actions, FileAction::Drop(fd), result)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_addclosefrom_np(
    actions: *mut posix_spawn_file_actions_t,
    first: c_int,
) -> c_int {
    // SAFETY: the application's own call.
    let result = unsafe { real::posix_spawn_file_actions_addclosefrom_np(actions, first) };
    record(actions, FileAction::DropFrom(first), result)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn_file_actions_addopen(
    actions: *mut posix_spawn_file_actions_t,
    fd: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the application's own call.
    let result = unsafe { real::posix_spawn_file_actions_addopen(actions, fd, path, flags, mode) };
    record(actions, FileAction::Drop(fd), result)
}
