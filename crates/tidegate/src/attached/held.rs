//! What a program has bound at the kernel and will bind here.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::getsockname;

/// So many are kept.
const MOST_HELD: usize = 64;

/// The kernel's sockets, until the lines are known that get their ports.
#[derive(Default)]
pub(super) struct Held(VecDeque<(SocketAddr, OwnedFd)>);

impl Held {
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it is not a bound socket.
    pub(super) fn insert(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let name = getsockname(descriptor)?;
        let local = SocketAddr::try_from(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        let descriptor = descriptor.try_clone_to_owned()?;
        if self.0.len() == MOST_HELD {
            self.0.pop_front();
        }
        self.0.push_back((local, descriptor));
        Ok(())
    }

    /// The one that is bound there.
    pub(super) fn take(&mut self, local: SocketAddr) -> Option<OwnedFd> {
        let is_it = |(held, _): &(SocketAddr, OwnedFd)| {
            held.port() == local.port() && held.ip().to_canonical() == local.ip().to_canonical()
        };
        let at = self.0.iter().position(is_it)?;
        self.0.remove(at).map(|(_, held)| held)
    }
}
