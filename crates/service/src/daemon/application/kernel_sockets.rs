//! Kernel sockets that an application has bound and registered: the descriptors under its
//! sockets here.

use std::collections::VecDeque;
use std::net::SocketAddr;

use tidegate_device::steering::TransportProtocol;
use tidegate_engine::BoundPort;

use crate::daemon::workers::AppFd;
use crate::ipc::handshake::Shard;

/// Kernel sockets kept for an application until it binds their ports here; the oldest is dropped.
const MAX_KERNEL_SOCKETS: usize = 64;

/// Kernel sockets of an application that has not bound their ports here yet.
#[derive(Default)]
pub(in crate::daemon) struct KernelSockets(VecDeque<KernelSocket>);

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

    /// Removes and returns a kernel socket that covers this request.
    pub(in crate::daemon) fn take(
        &mut self,
        protocol: TransportProtocol,
        local: SocketAddr,
        dual_stack: bool,
    ) -> Option<KernelSocket> {
        let covers = |held: &KernelSocket| held.port.covers(protocol, local, dual_stack);
        let index = self.0.iter().position(covers)?;
        self.0.remove(index)
    }
}
