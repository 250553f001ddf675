//! Threads that sleep until a socket is ready.
//!
//! Several threads may sleep at once, each on a doorbell of its own. The thread that runs the stack
//! rings the doorbells of the others.

use std::cell::Cell;
use std::sync::Arc;

use tidegate_memory::Doorbell;

use super::socket_id::SocketId;

/// Sleeping threads, each with the sockets that it waits for.
#[derive(Default)]
pub(crate) struct Waiters {
    waiting: Vec<Waiter>,
    /// A doorbell was rung since [`Waiters::forget_rung`].
    has_rung: Cell<bool>,
}

struct Waiter {
    bell: Arc<Doorbell>,
    sockets: Vec<SocketId>,
}

impl Waiters {
    /// Rings for every thread that waits for this socket.
    pub(crate) fn wake(&self, id: SocketId) {
        for waiter in self.waiting.iter().filter(|waiter| waiter.sockets.contains(&id)) {
            waiter.bell.ring();
            self.has_rung.set(true);
        }
    }

    /// Rings for every thread.
    pub(crate) fn wake_all(&self) {
        for waiter in &self.waiting {
            waiter.bell.ring();
        }
    }

    /// True if a thread was woken since [`Waiters::forget_rung`].
    pub(crate) fn has_rung(&self) -> bool {
        self.has_rung.get()
    }

    /// Begins to note anew whether threads are woken.
    pub(crate) fn forget_rung(&mut self) {
        self.has_rung.set(false);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a thread: its doorbell is rung for these sockets until [`Waiters::leave`].
    pub(crate) fn enter(&mut self, bell: Arc<Doorbell>, sockets: &[SocketId]) {
        self.waiting.push(Waiter { bell, sockets: sockets.to_vec() });
    }

    /// Removes a thread.
    pub(crate) fn leave(&mut self, bell: &Arc<Doorbell>) {
        self.waiting.retain(|waiter| !Arc::ptr_eq(&waiter.bell, bell));
    }
}
