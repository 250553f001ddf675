//! What frames have in common that are for one socket.

use std::net::SocketAddr;

use super::LocalPort;
use crate::steering::Protocol;

/// The two ends of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    protocol: Protocol,
    local: SocketAddr,
    remote: SocketAddr,
}

impl Flow {
    /// The flow between an end of ours and another one. Flow labels and scopes are no
    /// part of it.
    pub fn new(protocol: Protocol, local: SocketAddr, remote: SocketAddr) -> Self {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip(), end.port());
        Self { protocol, local: plain(local), remote: plain(remote) }
    }

    /// The port that it has with us.
    pub fn local_port(&self) -> LocalPort {
        (self.protocol, self.local.port())
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(super) fn remote(&self) -> SocketAddr {
        self.remote
    }
}
