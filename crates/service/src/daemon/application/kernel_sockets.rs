//! Kernel sockets that an application has bound and registered: the descriptors under its
//! sockets here.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::net::{SocketType, getsockname, sockopt};
use tidegate_device::steering::TransportProtocol;

use crate::daemon::workers::AppFd;
use crate::ipc::handshake::Shard;

/// Kernel sockets kept for an application until it binds their ports here; the oldest is dropped.
const MAX_KERNEL_SOCKETS: usize = 64;

/// Kernel sockets of an application that has not bound their ports here yet.
#[derive(Default)]
pub(in crate::daemon) struct KernelSockets(VecDeque<KernelSocket>);

/// Port that a kernel socket is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) struct BoundPort {
    protocol: TransportProtocol,
    local: SocketAddr,
}

impl BoundPort {
    /// Port of a descriptor. The calls can wait for the application.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] unless `descriptor` is a TCP or UDP socket bound to a port.
    pub(in crate::daemon) fn of(descriptor: impl AsFd) -> io::Result<Self> {
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
        Ok(Self { protocol, local })
    }
}

/// Kernel socket that an application has bound and registered.
#[derive(Clone, Debug)]
pub(in crate::daemon) struct KernelSocket {
    pub(in crate::daemon) socket: AppFd,
    pub(in crate::daemon) port: BoundPort,
    /// Kernel's socket cookie.
    pub(in crate::daemon) cookie: u64,
    /// Shard of the kernel socket that gets the port here.
    pub(in crate::daemon) shard: Shard,
}

impl KernelSockets {
    /// Registers a socket that the application has bound at the kernel.
    pub(in crate::daemon) fn register(&mut self, socket: KernelSocket) {
        if self.0.len() == MAX_KERNEL_SOCKETS {
            self.0.pop_front();
        }
        self.0.push_back(socket);
    }

    /// Removes and returns the kernel socket bound to this port.
    pub(in crate::daemon) fn take(
        &mut self,
        protocol: TransportProtocol,
        local: SocketAddr,
    ) -> Option<KernelSocket> {
        let ip = local.ip().to_canonical();
        let is_match = |held: &KernelSocket| {
            let own = held.port.local.ip().to_canonical();
            let is_there = own.is_unspecified() || ip.is_unspecified() || own == ip;
            let has_port = held.port.local.port() == local.port();
            held.port.protocol == protocol && has_port && is_there
        };
        let index = self.0.iter().position(is_match)?;
        self.0.remove(index)
    }
}
