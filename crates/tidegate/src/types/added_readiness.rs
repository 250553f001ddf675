//! Sockets that the application has closed in one direction or both while it still has them.

use std::net::Shutdown;

use super::readiness::Readiness;
use super::socket_id::{SocketId, SocketMap};

/// Closed directions of sockets that the stack itself does not close: of UDP sockets and listeners.
#[derive(Default)]
pub(crate) struct ClosedSockets(SocketMap<ClosedDirections>);

#[derive(Clone, Copy, Default)]
struct ClosedDirections {
    read: bool,
    write: bool,
}

impl ClosedSockets {
    /// Closes directions of a socket.
    pub(crate) fn insert(&mut self, id: SocketId, how: Shutdown) {
        let closed = self.0.entry(id).or_default();
        closed.read |= how != Shutdown::Write;
        closed.write |= how != Shutdown::Read;
    }

    /// Removes a socket that has no handle any more.
    pub(crate) fn forget(&mut self, id: SocketId) {
        if !self.0.is_empty() {
            self.0.remove(&id);
        }
    }

    /// Readiness of a socket whose stack reports `found`. As at the kernel, a closed UDP socket is
    /// readable, and a closed listener is not.
    #[inline]
    pub(crate) fn apply(&self, id: SocketId, found: Readiness) -> Readiness {
        if self.0.is_empty() {
            return found;
        }
        let Some(closed) = self.0.get(&id) else { return found };
        let is_datagram = matches!(id, SocketId::Udp(_));
        Readiness {
            readable: is_datagram && (found.readable || closed.read),
            read_closed: closed.read,
            write_closed: closed.write,
            ..found
        }
    }
}
