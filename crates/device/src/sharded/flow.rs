//! Flow key: the protocol and both endpoints.

use std::net::SocketAddr;

use super::LocalPort;
use crate::steering::TransportProtocol;

/// A transport flow: the protocol and both endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    protocol: TransportProtocol,
    local: SocketAddr,
    remote: SocketAddr,
}

impl Flow {
    /// Flow between a local and a remote endpoint. Flow labels and scopes are not part of it.
    pub fn new(protocol: TransportProtocol, local: SocketAddr, remote: SocketAddr) -> Self {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip(), end.port());
        Self { protocol, local: plain(local), remote: plain(remote) }
    }

    /// Local port of the flow.
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
