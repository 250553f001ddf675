//! Lists of the sockets of a stack, for reports.

use crate::{Stack, TcpId, TcpListenerId, UdpId};

impl Stack {
    /// Handles of all UDP sockets.
    pub fn udp_sockets(&self) -> impl Iterator<Item = UdpId> {
        self.udp.ids()
    }

    /// Handles of all TCP listeners.
    pub fn tcp_listeners(&self) -> impl Iterator<Item = TcpListenerId> {
        self.tcp.listeners.ids()
    }

    /// Handles of all TCP connections, whether they were accepted or not.
    pub fn tcp_sockets(&self) -> impl Iterator<Item = TcpId> {
        self.tcp.connection_ids()
    }
}
