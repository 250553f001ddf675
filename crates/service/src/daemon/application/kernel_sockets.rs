//! Kernel sockets that an application has bound and registered: the descriptors under its
//! sockets here.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::{SocketType, getsockname, sockopt};
use tidegate_device::steering::TransportProtocol;

use crate::ipc::handshake::Shard;

/// Kernel sockets kept for an application until it binds their ports here; the oldest is dropped.
const MAX_KERNEL_SOCKETS: usize = 64;

/// Kernel sockets of an application that has not bound their ports here yet.
#[derive(Default)]
pub(in crate::daemon) struct KernelSockets(VecDeque<KernelSocket>);

/// Kernel socket that an application has bound and registered.
struct KernelSocket {
    protocol: TransportProtocol,
    local: SocketAddr,
    socket: OwnedFd,
    /// Shard of the kernel socket that gets the port here.
    shard: Shard,
}

impl KernelSockets {
    /// Registers a socket that the application has bound at the kernel.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] unless `descriptor` is a TCP or UDP socket bound to a port.
    pub(in crate::daemon) fn register(
        &mut self,
        descriptor: OwnedFd,
        shard: Shard,
    ) -> io::Result<()> {
        let none = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let protocol = match sockopt::socket_type(&descriptor).map_err(none)? {
            SocketType::STREAM => TransportProtocol::Tcp,
            SocketType::DGRAM => TransportProtocol::Udp,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let name = getsockname(&descriptor).map_err(none)?;
        let local = SocketAddr::try_from(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        if local.port() == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.0.len() == MAX_KERNEL_SOCKETS {
            self.0.pop_front();
        }
        self.0.push_back(KernelSocket { protocol, local, socket: descriptor, shard });
        Ok(())
    }

    /// Removes and returns the kernel socket bound to this port, and the shard that gets the port.
    pub(in crate::daemon) fn take(
        &mut self,
        protocol: TransportProtocol,
        local: SocketAddr,
    ) -> Option<(OwnedFd, Shard)> {
        let ip = local.ip().to_canonical();
        let is_match = |held: &KernelSocket| {
            let own = held.local.ip().to_canonical();
            let is_there = own.is_unspecified() || ip.is_unspecified() || own == ip;
            held.protocol == protocol && held.local.port() == local.port() && is_there
        };
        let index = self.0.iter().position(is_match)?;
        self.0.remove(index).map(|held| (held.socket, held.shard))
    }
}
