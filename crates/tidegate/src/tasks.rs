//! Tasks of an executor that wait for sockets.
//!
//! Their wakers are called when nobody holds the stack: a waker may run code
//! of the program's, which may drop a socket.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;
use std::task::Waker;

use tidegate_stack::Event;

use crate::calls::Calls;
use crate::net::Core;
use crate::wait::SocketId;

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Read,
    Write,
}

/// The tasks that wait, for which sockets.
#[derive(Default)]
pub(crate) struct Tasks {
    waiting: HashMap<(SocketId, Side), Waker>,
    /// Several may wait for one listener.
    accepting: Vec<(SocketId, Waker)>,
    /// Tasks that wait for the engine to end.
    failing: Vec<Waker>,
    /// The task that runs the engine, if one does.
    driver: Option<Waker>,
    /// Something waits for the driver to be sent.
    pub(crate) driver_called: bool,
    /// To be called when nobody holds the stack.
    woken: Vec<Waker>,
}

impl Tasks {
    /// The next time that something happens on this side of the socket, the
    /// task is woken. The last task that waits is the one that counts.
    pub(crate) fn wait(&mut self, id: SocketId, side: Side, waker: &Waker) {
        if let SocketId::Listener(_) = id {
            let mut same = self.accepting.iter().filter(|(other, _)| *other == id);
            if !same.any(|(_, other)| other.will_wake(waker)) {
                self.accepting.push((id, waker.clone()));
            }
            return;
        }
        self.waiting
            .entry((id, side))
            .and_modify(|old| old.clone_from(waker))
            .or_insert_with(|| waker.clone());
    }

    /// Something happened to a socket.
    pub(crate) fn on_event(&mut self, event: Event) {
        match event {
            Event::TcpReadable(id) => self.wake(SocketId::Stream(id), Side::Read),
            Event::TcpWritable(id) => self.wake(SocketId::Stream(id), Side::Write),
            Event::TcpAcceptable(id) => self.wake_accepting(SocketId::Listener(id)),
            _ => {}
        }
    }

    /// Something happened to a socket, and nobody says what.
    pub(crate) fn wake_both(&mut self, id: SocketId) {
        match id {
            SocketId::Listener(_) => self.wake_accepting(id),
            _ => [Side::Read, Side::Write].into_iter().for_each(|side| self.wake(id, side)),
        }
    }

    fn wake(&mut self, id: SocketId, side: Side) {
        if !self.waiting.is_empty() {
            self.woken.extend(self.waiting.remove(&(id, side)));
        }
    }

    pub(crate) fn wake_accepting(&mut self, id: SocketId) {
        let gone = self.accepting.extract_if(.., |(other, _)| *other == id);
        self.woken.extend(gone.map(|(_, waker)| waker));
    }

    /// The engine has ended: nobody shall wait for it.
    pub(crate) fn wake_all(&mut self) {
        self.woken.extend(self.waiting.drain().map(|(_, waker)| waker));
        self.woken.extend(self.accepting.drain(..).map(|(_, waker)| waker));
        self.woken.append(&mut self.failing);
    }

    /// A socket is closed.
    pub(crate) fn forget(&mut self, id: SocketId) {
        match id {
            SocketId::Listener(_) => self.accepting.retain(|(other, _)| *other != id),
            _ if self.waiting.is_empty() => {}
            _ => {
                self.waiting.remove(&(id, Side::Read));
                self.waiting.remove(&(id, Side::Write));
            }
        }
    }

    /// The task is woken when the engine has ended.
    #[cfg(feature = "tokio")]
    pub(crate) fn wait_for_failure(&mut self, waker: &Waker) {
        self.failing.push(waker.clone());
    }

    /// Whether some are to be called.
    #[cfg(feature = "tokio")]
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.is_empty()
    }

    /// A task runs the engine from now on, or none does any more.
    #[cfg(feature = "tokio")]
    pub(crate) fn set_driver(&mut self, driver: Option<&Waker>) {
        match (&mut self.driver, driver) {
            (Some(old), Some(new)) => old.clone_from(new),
            (old, new) => *old = new.cloned(),
        }
    }

    /// Calls the task that runs the engine. Whether there is one.
    pub(crate) fn call_driver(&mut self) -> bool {
        let Some(driver) = &self.driver else { return false };
        if !std::mem::replace(&mut self.driver_called, true) {
            self.woken.push(driver.clone());
        }
        true
    }
}

/// Calls these when it is dropped.
struct Woken(Vec<Waker>);

impl Drop for Woken {
    fn drop(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }
}

/// A stack, held by one thread.
pub(crate) struct Guard<'a, C: Calls> {
    // Fields are dropped in their order: the lock, then the wakers are called.
    core: MutexGuard<'a, C>,
    // Every call on a socket drops one of these, and mostly nobody waits.
    woken: Option<Box<Woken>>,
}

/// A stack in this program, held by one thread.
pub(crate) type CoreGuard<'a> = Guard<'a, Core>;

impl<'a, C: Calls> Guard<'a, C> {
    #[inline]
    pub(crate) fn new(core: MutexGuard<'a, C>) -> Self {
        Self { core, woken: None }
    }
}

impl<C: Calls> Deref for Guard<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.core
    }
}

impl<C: Calls> DerefMut for Guard<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.core
    }
}

impl<C: Calls> Drop for Guard<'_, C> {
    #[inline]
    fn drop(&mut self) {
        self.core.on_release();
        let tasks = self.core.tasks();
        if !tasks.woken.is_empty() {
            self.woken = Some(Box::new(Woken(std::mem::take(&mut tasks.woken))));
        }
    }
}
