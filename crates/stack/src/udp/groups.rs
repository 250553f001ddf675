//! Sockets that share their port with those of other stacks.

use std::net::SocketAddr;

use super::UdpTable;
use super::socket::{ANY_V4, ANY_V6, Socket};
use crate::Transport;
use crate::port_groups::Told;

/// The addresses at which a socket shares with others what anybody sends: none if it
/// is connected.
fn joined(socket: &Socket) -> impl Iterator<Item = SocketAddr> + use<> {
    let joins = socket.options.reuse_port && socket.remote.is_none();
    let is_both = socket.bound.ip() == ANY_V6 && socket.is_dual();
    let v4 = is_both.then_some(SocketAddr::new(ANY_V4, socket.bound.port()));
    [Some(socket.bound), v4].into_iter().flatten().filter(move |_| joins)
}

impl UdpTable {
    /// As [`crate::Stack::set_port_groups`].
    pub(crate) fn set_port_groups(&mut self, told: Told) {
        self.told = told;
        self.places()
            .filter_map(|(_, socket)| socket)
            .for_each(|socket| self.tell_taken_over(socket));
    }

    /// Whether a socket may be connected so: no other stack has such a one.
    pub(super) fn may_begin(&self, socket: &Socket, local: SocketAddr, remote: SocketAddr) -> bool {
        !socket.options.reuse_port || self.told.begin(Transport::Udp, local, remote)
    }

    /// A socket is bound, and not connected.
    pub(super) fn tell_bound(&self, socket: &Socket) {
        for local in joined(socket) {
            self.told.tell(|groups| groups.join(Transport::Udp, local, socket.options.party));
        }
    }

    /// A socket is what it was no longer: it is closed, connected or disconnected.
    pub(super) fn tell_over(&self, socket: &Socket) {
        match socket.remote.filter(|_| socket.options.reuse_port) {
            Some(remote) => {
                self.told.tell(|groups| groups.end(Transport::Udp, socket.local, remote));
            }
            None => self.tell_taken_out(socket),
        }
    }

    /// A socket goes to another table, where its flow goes on.
    pub(super) fn tell_taken_out(&self, socket: &Socket) {
        for local in joined(socket) {
            self.told.tell(|groups| groups.leave(Transport::Udp, local, socket.options.party));
        }
    }

    /// A socket has come from another table.
    pub(super) fn tell_taken_over(&self, socket: &Socket) {
        match socket.remote.filter(|_| socket.options.reuse_port) {
            Some(remote) => {
                self.told.tell(|groups| groups.take_over(Transport::Udp, socket.local, remote));
            }
            None => self.tell_bound(socket),
        }
    }
}
