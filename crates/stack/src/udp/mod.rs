//! The User Datagram Protocol (RFC 768): sockets and their datagrams.

mod datagram;
mod exchange;
mod fill;
mod groups;
mod lookup;
mod moving;
mod ports;
mod receive;
mod saved;
mod send;
mod sharing;
mod socket;
mod table;

pub use datagram::Datagram;
pub(crate) use datagram::{Payload, Waiting, array_at};
pub use exchange::{InPlace, Request};
pub use fill::FULL;
pub(crate) use lookup::Lookup;
pub(crate) use moving::TakenUdp;
pub(crate) use ports::choose as choose_port;
pub(crate) use receive::{Delivery, IpInfo};
pub(crate) use saved::SavedUdp;
pub use socket::{UdpId, UdpOptions};
pub(crate) use table::UdpTable;

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Frame};
use tidegate_wire::DropReason;

use crate::address::Kind;
use crate::{SocketError, Stack, Transport};

impl Stack {
    /// Makes a socket bound to `local`. Port 0 chooses a free one at random
    /// (RFC 6056); the unspecified address takes what is sent to any address
    /// of ours, of the same family, and with `options.dual_stack` of both.
    ///
    /// # Errors
    /// When the address is not ours, the port is taken, or no port or socket
    /// is left.
    pub fn udp_bind(
        &mut self,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpId, SocketError> {
        let ip = local.ip();
        let bindable =
            matches!(self.addresses.kind(ip), Kind::Ours | Kind::Broadcast | Kind::Group);
        if !ip.is_unspecified() && !bindable {
            return Err(SocketError::AddressNotAvailable(ip));
        }
        let options = options.with_defaults(&self.limits);
        // Flow information and scope are no part of a name.
        let local = SocketAddr::new(ip, local.port());
        let reserved = &self.reserved_ports;
        let is_reserved = |port| reserved.has(Transport::Udp, port);
        self.udp.bind(&mut self.chance, local, options, is_reserved)
    }

    /// Connects a socket: it then sends to `remote` unless told otherwise,
    /// and receives from nobody else. A socket bound to the unspecified
    /// address gets the address that packets to `remote` leave from.
    ///
    /// # Errors
    /// When the socket is closed, the peer cannot be sent to from it, no route
    /// leads there, or another socket is connected the same way.
    pub fn udp_connect(&mut self, id: UdpId, remote: SocketAddr) -> Result<(), SocketError> {
        let socket = self.udp.get(id).ok_or(SocketError::Closed)?;
        let peer = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        if peer.port() == 0 || peer.ip().is_unspecified() || !socket.speaks_to(peer.ip()) {
            return Err(SocketError::PeerInvalid(remote));
        }
        let local = match socket.bound.ip() {
            ip if !ip.is_unspecified() => ip,
            _ => self.source_for(peer.ip()).ok_or(SocketError::NetworkUnreachable(remote))?,
        };
        self.udp.connect(id, local, peer)
    }

    /// Undoes [`Stack::udp_connect`]: the socket is bound as it was before.
    ///
    /// # Errors
    /// When the socket is closed, or another one took its place meanwhile.
    pub fn udp_disconnect(&mut self, id: UdpId) -> Result<(), SocketError> {
        self.udp.disconnect(id)
    }

    /// The options of a socket.
    pub fn udp_options(&self, id: UdpId) -> Option<UdpOptions> {
        self.udp.get(id).map(|socket| socket.options)
    }

    /// Closes a socket. What it had not read is dropped; closing twice does
    /// nothing.
    pub fn udp_close(&mut self, id: UdpId, arena: &mut Arena) {
        let Some(mut socket) = self.udp.close(id) else { return };
        self.udp.tell_over(&socket);
        let unread = socket.cut(0, arena) as u64;
        self.counters.held -= unread;
        self.counters.drops.add(DropReason::SocketClosed, unread);
    }

    /// The address and port that a socket is bound to; when it is connected,
    /// those that its packets leave from.
    pub fn udp_local_addr(&self, id: UdpId) -> Option<SocketAddr> {
        let socket = self.udp.get(id)?;
        Some(match socket.remote {
            Some(_) => socket.present(socket.local),
            None => socket.bound,
        })
    }

    /// The peer that a socket is connected to.
    pub fn udp_peer_addr(&self, id: UdpId) -> Option<SocketAddr> {
        let socket = self.udp.get(id)?;
        socket.remote.map(|remote| socket.present(remote))
    }

    /// Takes the datagram that has waited longest. Give it back with
    /// [`Datagram::release`].
    #[inline]
    pub fn udp_receive(&mut self, arena: &Arena, id: UdpId) -> Option<Datagram> {
        let datagram = self.udp.get_mut(id)?.pop(arena)?;
        self.counters.held -= 1;
        self.counters.delivered += 1;
        Some(datagram)
    }

    /// Shows the datagram that has waited longest, with who sent it and the
    /// address it was sent to, and leaves it where it is.
    pub fn udp_peek<R>(
        &self,
        arena: &Arena,
        id: UdpId,
        see: impl FnOnce(SocketAddr, IpAddr, &[u8]) -> R,
    ) -> Option<R> {
        self.udp.get(id)?.peek(arena, see)
    }

    /// Whether an error waits to be told.
    pub fn udp_has_error(&self, id: UdpId) -> bool {
        self.udp.get(id).is_some_and(|socket| socket.error.is_some())
    }

    /// So many datagrams that were taken by [`Stack::udp_receive`] found no room
    /// with those whom they were taken for: they count as dropped.
    pub fn udp_refused(&mut self, datagrams: u64) {
        self.counters.delivered -= datagrams;
        self.counters.drops.add(DropReason::SocketQueueFull, datagrams);
    }

    /// How many datagrams wait.
    pub fn udp_readable(&self, id: UdpId) -> usize {
        self.udp.get(id).map_or(0, socket::Socket::waiting)
    }

    /// Takes the error that a peer or a router reported last.
    pub fn udp_take_error(&mut self, id: UdpId) -> Option<SocketError> {
        self.udp.get_mut(id)?.error.take()
    }

    /// An empty frame with room in front for every header, to be filled and
    /// handed to [`Stack::udp_send_frame`].
    #[inline]
    pub fn udp_alloc(&mut self, arena: &mut Arena) -> Option<Frame> {
        arena.alloc()
    }

    /// Whether an address is one of ours.
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.addresses.kind(address) == Kind::Ours
    }

    /// The address that packets to `destination` leave from; `None` when nothing
    /// leads there.
    pub fn source_for(&self, destination: IpAddr) -> Option<IpAddr> {
        let next_hop = self.next_hop(destination)?;
        self.addresses.source_for(destination, next_hop)
    }
}
