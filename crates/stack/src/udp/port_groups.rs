//! Sockets that share their port with sockets of other stacks.

use std::net::SocketAddr;

use super::UdpTable;
use super::socket::{ANY_V4, ANY_V6, Socket};
use crate::Transport;
use crate::ports::PortGroupsHandle;

/// Addresses at which a socket shares incoming datagrams with other sockets. A connected socket has
/// none.
fn shared_addresses(socket: &Socket) -> impl Iterator<Item = SocketAddr> + use<> {
    let is_shared = socket.options.reuse_port && socket.remote.is_none();
    let is_dual_stack = socket.bound.ip() == ANY_V6 && socket.is_dual_stack();
    let v4 = is_dual_stack.then_some(SocketAddr::new(ANY_V4, socket.bound.port()));
    [Some(socket.bound), v4].into_iter().flatten().filter(move |_| is_shared)
}

impl UdpTable {
    /// As [`crate::Stack::set_port_groups`].
    pub(crate) fn set_port_groups(&mut self, port_groups: PortGroupsHandle) {
        self.port_groups = port_groups;
        self.slots()
            .filter_map(|(_, socket)| socket)
            .for_each(|socket| self.notify_taken_over(socket));
    }

    /// True if the socket may be connected: no other stack has a socket with the same two
    /// addresses.
    pub(super) fn may_open_flow(
        &self,
        socket: &Socket,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> bool {
        !socket.options.reuse_port || self.port_groups.begin_flow(Transport::Udp, local, remote)
    }

    /// Notifies the port groups of a bound, unconnected socket.
    pub(super) fn notify_bound(&self, socket: &Socket) {
        for local in shared_addresses(socket) {
            self.port_groups
                .notify(|groups| groups.join(Transport::Udp, local, socket.options.owner));
        }
    }

    /// Notifies the port groups of a socket that is being closed, connected or disconnected.
    pub(super) fn notify_unbound(&self, socket: &Socket) {
        match socket.remote.filter(|_| socket.options.reuse_port) {
            Some(remote) => {
                self.port_groups
                    .notify(|groups| groups.end_flow(Transport::Udp, socket.local, remote));
            }
            None => self.notify_extracted(socket),
        }
    }

    /// Notifies the port groups of a socket that migrates to another table. Its flow continues
    /// there.
    pub(super) fn notify_extracted(&self, socket: &Socket) {
        for local in shared_addresses(socket) {
            self.port_groups
                .notify(|groups| groups.leave(Transport::Udp, local, socket.options.owner));
        }
    }

    /// Notifies the port groups of a socket that migrated here from another table.
    pub(super) fn notify_taken_over(&self, socket: &Socket) {
        match socket.remote.filter(|_| socket.options.reuse_port) {
            Some(remote) => {
                self.port_groups
                    .notify(|groups| groups.take_over_flow(Transport::Udp, socket.local, remote));
            }
            None => self.notify_bound(socket),
        }
    }
}
