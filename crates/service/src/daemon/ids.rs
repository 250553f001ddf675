//! Identifiers of applications and sockets.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tidegate_device::sharded::PortSharing;
use tidegate_device::steering::TransportProtocol;
use tidegate_gate::transmit::Program;
use tidegate_stack::{Stack, TcpId, TcpListenerId, UdpId};

use crate::ipc::version::Library;

/// Transport protocol in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ProtocolSnapshot {
    Udp,
    Tcp,
}

impl From<TransportProtocol> for ProtocolSnapshot {
    fn from(protocol: TransportProtocol) -> Self {
        match protocol {
            TransportProtocol::Udp => Self::Udp,
            TransportProtocol::Tcp => Self::Tcp,
        }
    }
}

impl From<ProtocolSnapshot> for TransportProtocol {
    fn from(saved: ProtocolSnapshot) -> Self {
        match saved {
            ProtocolSnapshot::Udp => Self::Udp,
            ProtocolSnapshot::Tcp => Self::Tcp,
        }
    }
}

/// Index of an application on its core.
pub(super) type AppNumber = u32;

/// Index of no application: the application has ended on another core.
pub(super) const NO_APP: AppNumber = AppNumber::MAX;

/// Key of a socket in a core's socket table.
pub(super) type SocketKey = u32;

/// Holder of a socket: an application, and the slot among its sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holder {
    pub(super) app: AppNumber,
    pub(super) slot: u32,
}

/// ID of a socket in the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum StackSocketId {
    Udp(UdpId),
    Listener(TcpListenerId),
    Stream(TcpId),
}

impl StackSocketId {
    /// Protocol and local address of the socket.
    pub(super) fn local(self, stack: &Stack) -> Option<(TransportProtocol, SocketAddr)> {
        match self {
            Self::Udp(id) => Some((TransportProtocol::Udp, stack.udp_local_addr(id)?)),
            Self::Listener(id) => Some((TransportProtocol::Tcp, stack.tcp_listener_addr(id)?)),
            Self::Stream(id) => Some((TransportProtocol::Tcp, stack.tcp_local_addr(id)?)),
        }
    }
}

impl StackSocketId {
    /// Sharing of the socket's port with sockets on other cores. A connection opened by an
    /// application is exclusive.
    pub(super) fn sharing(self, stack: &Stack) -> PortSharing {
        let shared = match self {
            Self::Udp(id) => stack.udp_options(id).map(|o| (o.reuse_port, o.owner)),
            Self::Listener(id) => stack.tcp_listener_options(id).map(|o| (o.reuse_port, o.owner)),
            Self::Stream(id) => stack.tcp_options(id).map(|o| (o.reuse_port, o.owner)),
        };
        shared.map_or(PortSharing::Exclusive, |(reuse_port, owner)| {
            PortSharing::new(reuse_port, owner)
        })
    }
}

/// Identity of an application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Process ID, from the kernel (`SO_PEERCRED`).
    pub pid: u32,
    /// User ID, from the kernel (`SO_PEERCRED`).
    pub uid: u32,
    /// Name the application gives itself.
    pub name: String,
    /// Library by which the application is attached.
    #[serde(default)]
    pub library: Library,
}

impl Identity {
    /// The application as rules of transmit classes name it.
    pub(in crate::daemon) fn as_program(&self) -> Program<'_> {
        Program { name: &self.name, user: self.uid }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// Payload bytes moved through a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PayloadBytes {
    pub(super) to_app: u64,
    pub(super) from_app: u64,
}

impl PayloadBytes {
    pub(super) fn add(&mut self, other: Self) {
        self.to_app += other.to_app;
        self.from_app += other.from_app;
    }
}
