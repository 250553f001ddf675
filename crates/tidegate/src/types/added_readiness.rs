//! Readiness that sockets have beside that of the stack.

use std::net::Shutdown;

use super::readiness::Readiness;
use super::socket_id::{SocketId, SocketMap};

/// Readiness unknown to the stack, of sockets that the application still has: closed directions of
/// UDP sockets and listeners, and reports.
#[derive(Default)]
pub(crate) struct AddedReadiness(SocketMap<Added>);

#[derive(Clone, Copy, Default)]
struct Added {
    is_read_closed: bool,
    is_write_closed: bool,
    has_report: bool,
}

impl AddedReadiness {
    /// Closes directions of a socket.
    pub(crate) fn close(&mut self, id: SocketId, how: Shutdown) {
        let added = self.0.entry(id).or_default();
        added.is_read_closed |= how != Shutdown::Write;
        added.is_write_closed |= how != Shutdown::Read;
    }

    /// Sets whether a report waits for the application.
    pub(crate) fn set_report(&mut self, id: SocketId, has_report: bool) {
        self.0.entry(id).or_default().has_report = has_report;
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
        let Some(added) = self.0.get(&id) else { return found };
        let found = Readiness { has_report: added.has_report, ..found };
        match id {
            SocketId::Stream(_) | SocketId::Poll(_) => found,
            SocketId::Udp(_) | SocketId::Listener(_) => {
                let is_open = !added.is_read_closed && !added.is_write_closed;
                Readiness {
                    readable: match id {
                        SocketId::Udp(_) => found.readable || added.is_read_closed,
                        _ => found.readable && is_open,
                    },
                    read_closed: added.is_read_closed,
                    write_closed: added.is_write_closed,
                    ..found
                }
            }
        }
    }
}
