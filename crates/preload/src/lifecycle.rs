//! Course of a process with a stack: opening, fork, and exit.
//!
//! A forked child of an attached process gets an attachment of its own. A forked child of a
//! process with an embedded stack gives the stack up.

use std::cell::RefCell;
use std::io;
use std::sync::MutexGuard;

use libc::c_long;
use tidegate::{Fork, Net};

use crate::fd_table::{Entry, TableLock};
use crate::signals::SignalGuard;
use crate::{epoll, fd_table, log, runtime};

/// Stack of this process; the first call opens the stack.
///
/// # Errors
/// `ENETDOWN` when the stack cannot be opened, which is logged. `EIO` in a forked child of a
/// process with an embedded stack, whose memory is the parent's.
pub(crate) fn net() -> io::Result<&'static Net> {
    let _guard = SignalGuard::enter();
    runtime::open(install_fork_handlers)
}

/// Locks from before a fork until after it: no other thread changes the state that the child
/// copies.
struct ForkGuards {
    fork: Fork<'static>,
    table_lock: TableLock<Entry>,
    epoll_guard: epoll::SetsGuard,
    moves_lock: MutexGuard<'static, ()>,
    signal_guard: SignalGuard,
}

thread_local! {
    static FORK_GUARDS: RefCell<Option<ForkGuards>> = const { RefCell::new(None) };
}

fn take_fork_guards() -> Option<ForkGuards> {
    // An exiting thread does not fork.
    FORK_GUARDS.try_with(RefCell::take).ok().flatten()
}

fn install_fork_handlers() {
    // SAFETY: the functions live as long as this library, which is never unloaded. The C
    // library calls them in the thread that forks, the last two after its own memory is
    // consistent again. They acquire and release locks of that thread only.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_fork_child)) };
}

extern "C" fn before_fork() {
    let Some(net) = runtime::opened_net().filter(|net| net.is_attached()) else { return };
    let signal_guard = SignalGuard::enter();
    // In the order in which other threads take these locks.
    let moves_lock = fd_table::lock_moves();
    let epoll_guard = epoll::lock_all();
    let Some(fork) = net.prepare_fork() else { return };
    let table_lock = fd_table::lock();
    let guards = ForkGuards { fork, table_lock, epoll_guard, moves_lock, signal_guard };
    // An exiting thread does not fork.
    let _ = FORK_GUARDS.try_with(|slot| slot.replace(Some(guards)));
}

/// Runs in the parent.
extern "C" fn after_fork() {
    let Some(guards) = take_fork_guards() else { return };
    let ForkGuards { fork, table_lock, epoll_guard, moves_lock, signal_guard } = guards;
    drop(table_lock);
    fork.in_parent();
    // Dropping the last reference to a set calls the stack.
    drop(epoll_guard);
    drop(moves_lock);
    fd_table::sockets().for_each(|socket| socket.note_other_holders());
    drop(signal_guard);
}

extern "C" fn in_fork_child() {
    let Some(guards) = take_fork_guards() else { return runtime::set_child() };
    let ForkGuards { fork, table_lock, epoll_guard, moves_lock, signal_guard: _guard } = guards;
    drop(table_lock);
    let inherited = fork.in_child();
    drop(epoll_guard);
    drop(moves_lock);
    match inherited {
        Ok(()) => fd_table::sockets().for_each(|socket| socket.on_inherited()),
        Err(error) => {
            log::write(&format!("a forked child did not get the sockets of its parent: {error}"));
        }
    }
}

/// Forks by a system call of the application, for which the C library calls no handlers.
///
/// # Errors
/// As the system call.
pub(crate) fn fork_by_system_call(fork: impl FnOnce() -> io::Result<c_long>) -> io::Result<c_long> {
    if runtime::opened_net().is_none() {
        return fork();
    }
    before_fork();
    let process = fork();
    match process {
        Ok(0) => in_fork_child(),
        _ => after_fork(),
    }
    process
}

/// Called before the process filters its system calls.
pub(crate) fn before_system_call_filter() {
    let _guard = SignalGuard::enter();
    if let Some(net) = runtime::opened_net() {
        net.prepare_system_call_filter();
    }
}

/// Called when the process exits: written data is still sent, as by the kernel.
pub(crate) fn finish() {
    if runtime::is_child() {
        return;
    }
    let _guard = SignalGuard::enter();
    if let Some(net) = runtime::opened_net() {
        fd_table::clear();
        net.finish();
    }
}
