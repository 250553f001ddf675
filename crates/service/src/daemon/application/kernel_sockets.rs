//! Kernel sockets that an application has bound and registered: the descriptors under its
//! sockets here.

use std::collections::VecDeque;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tidegate_device::steering::TransportProtocol;
use tidegate_engine::BoundPort;

use crate::daemon::ids::ProtocolSnapshot;
use crate::daemon::snapshot_error::InvalidSnapshot;
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

/// Kernel socket as plain data; its descriptor is handed over beside it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct KernelSocketSnapshot {
    pub(in crate::daemon) protocol: ProtocolSnapshot,
    pub(in crate::daemon) local: SocketAddr,
    pub(in crate::daemon) is_dual_stack: bool,
    pub(in crate::daemon) namespace: Option<u64>,
    pub(in crate::daemon) cookie: u64,
    /// Index and count.
    pub(in crate::daemon) shard: (u8, u8),
}

impl KernelSocket {
    fn save(&self) -> KernelSocketSnapshot {
        let (protocol, local, is_dual_stack, namespace) = self.port.to_parts();
        KernelSocketSnapshot {
            protocol: protocol.into(),
            local,
            is_dual_stack,
            namespace,
            cookie: self.cookie,
            shard: (self.shard.index, self.shard.count),
        }
    }

    fn restore(saved: KernelSocketSnapshot, socket: AppFd) -> Self {
        let KernelSocketSnapshot { protocol, local, is_dual_stack, namespace, cookie, shard } =
            saved;
        let (index, count) = shard;
        Self {
            socket,
            port: BoundPort::from_parts((protocol.into(), local, is_dual_stack, namespace)),
            cookie,
            shard: Shard { index, count },
        }
    }
}

impl KernelSockets {
    /// All sockets as plain data.
    pub(in crate::daemon) fn save(&self) -> Vec<KernelSocketSnapshot> {
        self.0.iter().map(KernelSocket::save).collect()
    }

    /// Descriptors, in the order of [`KernelSockets::save`].
    pub(in crate::daemon) fn descriptors(&self) -> impl Iterator<Item = &AppFd> {
        self.0.iter().map(|held| &held.socket)
    }

    /// Restores the sockets that another daemon saved, each with its descriptor.
    ///
    /// # Errors
    /// [`InvalidSnapshot`] if there are more than an application may have.
    pub(in crate::daemon) fn restore(
        saved: impl ExactSizeIterator<Item = (KernelSocketSnapshot, AppFd)>,
    ) -> Result<Self, InvalidSnapshot> {
        if saved.len() > MAX_KERNEL_SOCKETS {
            return Err(InvalidSnapshot("an application has too many kernel sockets"));
        }
        Ok(Self(saved.map(|(saved, socket)| KernelSocket::restore(saved, socket)).collect()))
    }

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
