//! Kernel sockets that the application has bound to ports it will bind here.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use rustix::net::getsockname;
use tidegate_memory::OwnFd;

/// Most kernel sockets kept; older ones are dropped.
const MAX_KERNEL_SOCKETS: usize = 64;

/// Kernel sockets by local address, until the attachments that get their ports are known.
#[derive(Default)]
pub(super) struct KernelSockets(VecDeque<(SocketAddr, OwnFd)>);

impl KernelSockets {
    /// Keeps a copy of `fd`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it is not a bound IP socket.
    pub(super) fn insert(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let bound = getsockname(fd)?;
        let local = SocketAddr::try_from(bound).map_err(|_| io::ErrorKind::InvalidInput)?;
        let descriptor = OwnFd::from(fd.try_clone_to_owned()?);
        if self.0.len() == MAX_KERNEL_SOCKETS {
            self.0.pop_front();
        }
        self.0.push_back((local, descriptor));
        Ok(())
    }

    /// Removes and returns the kernel socket that is bound to `local`.
    pub(super) fn take(&mut self, local: SocketAddr) -> Option<OwnFd> {
        let matches = |(held, _): &(SocketAddr, OwnFd)| {
            held.port() == local.port() && held.ip().to_canonical() == local.ip().to_canonical()
        };
        let index = self.0.iter().position(matches)?;
        self.0.remove(index).map(|(_, held)| held)
    }
}
