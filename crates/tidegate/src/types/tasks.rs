//! Tasks of an executor that wait for sockets.

use std::collections::HashMap;
use std::task::Waker;

use tidegate_stack::Event;

use super::socket_id::SocketId;

/// Direction that a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IoDirection {
    Read,
    Write,
}

/// Waiting tasks, by socket.
#[derive(Default)]
pub(crate) struct Tasks {
    waiting: HashMap<(SocketId, IoDirection), Waker>,
    /// Tasks that wait for connections; several may wait on one listener.
    accepting: Vec<(SocketId, Waker)>,
    /// Tasks that wait for the engine to fail.
    failing: Vec<Waker>,
    /// Task that drives the engine, if any.
    driver: Option<Waker>,
    /// The driver is to run: written data waits to be sent.
    pub(crate) is_driver_woken: bool,
    /// Wakers to call once the stack is unlocked.
    woken: Vec<Waker>,
}

impl Tasks {
    /// Registers a waker for the next event in this direction of the socket. A stream keeps
    /// only the last waker of each direction.
    pub(crate) fn register(&mut self, id: SocketId, direction: IoDirection, waker: &Waker) {
        if let SocketId::Listener(_) = id {
            let mut same = self.accepting.iter().filter(|(other, _)| *other == id);
            if !same.any(|(_, other)| other.will_wake(waker)) {
                self.accepting.push((id, waker.clone()));
            }
            return;
        }
        self.waiting
            .entry((id, direction))
            .and_modify(|old| old.clone_from(waker))
            .or_insert_with(|| waker.clone());
    }

    /// Wakes the tasks that an event concerns.
    pub(crate) fn on_event(&mut self, event: Event) {
        match event {
            Event::TcpReadable(id) => self.wake(SocketId::Stream(id), IoDirection::Read),
            Event::TcpWritable(id) => self.wake(SocketId::Stream(id), IoDirection::Write),
            Event::TcpAcceptable(id) => self.wake_accepting(SocketId::Listener(id)),
            _ => {}
        }
    }

    /// Wakes the tasks of both directions, after an event of unknown direction.
    pub(crate) fn wake_both(&mut self, id: SocketId) {
        match id {
            SocketId::Listener(_) => self.wake_accepting(id),
            _ => [IoDirection::Read, IoDirection::Write]
                .into_iter()
                .for_each(|side| self.wake(id, side)),
        }
    }

    fn wake(&mut self, id: SocketId, direction: IoDirection) {
        if !self.waiting.is_empty() {
            self.woken.extend(self.waiting.remove(&(id, direction)));
        }
    }

    pub(crate) fn wake_accepting(&mut self, id: SocketId) {
        let ready = self.accepting.extract_if(.., |(other, _)| *other == id);
        self.woken.extend(ready.map(|(_, waker)| waker));
    }

    /// Wakes all tasks after the engine has failed.
    pub(crate) fn wake_all(&mut self) {
        self.woken.extend(self.waiting.drain().map(|(_, waker)| waker));
        self.woken.extend(self.accepting.drain(..).map(|(_, waker)| waker));
        self.woken.append(&mut self.failing);
    }

    /// Removes a closed socket.
    pub(crate) fn forget(&mut self, id: SocketId) {
        match id {
            SocketId::Listener(_) => self.accepting.retain(|(other, _)| *other != id),
            _ if self.waiting.is_empty() => {}
            _ => {
                self.waiting.remove(&(id, IoDirection::Read));
                self.waiting.remove(&(id, IoDirection::Write));
            }
        }
    }

    /// Registers a waker for the failure of the engine.
    #[cfg(feature = "tokio")]
    pub(crate) fn register_for_failure(&mut self, waker: &Waker) {
        self.failing.push(waker.clone());
    }

    /// Wakers to call once the stack is unlocked, if there are any.
    #[inline]
    pub(crate) fn take_woken(&mut self) -> Option<Vec<Waker>> {
        (!self.woken.is_empty()).then(|| std::mem::take(&mut self.woken))
    }

    /// True if wakers are to be called.
    #[cfg(feature = "tokio")]
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.is_empty()
    }

    /// Sets or removes the task that drives the engine.
    #[cfg(feature = "tokio")]
    pub(crate) fn set_driver(&mut self, driver: Option<&Waker>) {
        match (&mut self.driver, driver) {
            (Some(old), Some(new)) => old.clone_from(new),
            (old, new) => *old = new.cloned(),
        }
    }

    /// Wakes the task that drives the engine. Returns false if there is none.
    pub(crate) fn wake_driver(&mut self) -> bool {
        let Some(driver) = &self.driver else { return false };
        if !std::mem::replace(&mut self.is_driver_woken, true) {
            self.woken.push(driver.clone());
        }
        true
    }
}
