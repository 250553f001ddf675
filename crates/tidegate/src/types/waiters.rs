//! Threads that sleep until a socket is ready.
//!
//! Several threads may sleep at once, each on the device's descriptors and on a doorbell of
//! its own. The thread that runs the stack rings the doorbells of the others.

use std::sync::Arc;

use tidegate_memory::Doorbell;

use super::socket_id::SocketId;

/// Sleeping threads, each with the sockets that it waits for.
#[derive(Default)]
pub(crate) struct Waiters(Vec<Waiter>);

struct Waiter {
    bell: Arc<Doorbell>,
    sockets: Vec<SocketId>,
}

impl Waiters {
    /// Rings for every thread that waits for this socket.
    pub(crate) fn wake(&self, id: SocketId) {
        for waiter in self.0.iter().filter(|waiter| waiter.sockets.contains(&id)) {
            waiter.bell.ring();
        }
    }

    /// Rings for every thread.
    pub(crate) fn wake_all(&self) {
        for waiter in &self.0 {
            waiter.bell.ring();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a thread: its doorbell is rung for these sockets until [`Waiters::leave`].
    pub(crate) fn enter(&mut self, bell: Arc<Doorbell>, sockets: &[SocketId]) {
        self.0.push(Waiter { bell, sockets: sockets.to_vec() });
    }

    /// Removes a thread.
    pub(crate) fn leave(&mut self, bell: &Arc<Doorbell>) {
        self.0.retain(|waiter| !Arc::ptr_eq(&waiter.bell, bell));
    }
}
