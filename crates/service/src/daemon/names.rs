//! Who is who: applications and sockets by their numbers, and what is told of them.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tidegate_port::spread::Sharing;
use tidegate_port::steering::Protocol;
use tidegate_stack::{Stack, TcpId, TcpListenerId, UdpId};

/// The number of an application.
pub(super) type AppNumber = u32;

/// The number of no application: of one that has ended elsewhere.
pub(super) const NOBODY: AppNumber = AppNumber::MAX;

/// The number of a socket among those of all applications.
pub(super) type SocketKey = u32;

/// Who has a socket: an application, and the place among its sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) app: AppNumber,
    pub(super) place: u32,
}

/// A socket of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SocketId {
    Udp(UdpId),
    Listener(TcpListenerId),
    Stream(TcpId),
}

impl SocketId {
    /// The local port that it has.
    pub(super) fn local(self, stack: &Stack) -> Option<(Protocol, SocketAddr)> {
        match self {
            Self::Udp(id) => Some((Protocol::Udp, stack.udp_local_addr(id)?)),
            Self::Listener(id) => Some((Protocol::Tcp, stack.tcp_listener_addr(id)?)),
            Self::Stream(id) => Some((Protocol::Tcp, stack.tcp_local_addr(id)?)),
        }
    }
}

impl SocketId {
    /// With whom its port may be shared. What an application connects shares it with
    /// nobody.
    pub(super) fn sharing(self, stack: &Stack) -> Sharing {
        let shared = match self {
            Self::Udp(id) => stack.udp_options(id).map(|o| (o.reuse_port, o.party)),
            Self::Listener(id) => stack.tcp_listener_options(id).map(|o| (o.reuse_port, o.party)),
            Self::Stream(id) => stack.tcp_options(id).map(|o| (o.reuse_port, o.party)),
        };
        shared.map_or(Sharing::Alone, |(reuse_port, party)| Sharing::new(reuse_port, party))
    }
}

/// Who an application is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its process, as the kernel knows it.
    pub pid: u32,
    /// Its user, as the kernel knows it.
    pub uid: u32,
    /// What it calls itself.
    pub name: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// Bytes of payload that went through a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Moved {
    pub(super) to_app: u64,
    pub(super) from_app: u64,
}

impl Moved {
    pub(super) fn add(&mut self, other: Self) {
        self.to_app += other.to_app;
        self.from_app += other.from_app;
    }
}
