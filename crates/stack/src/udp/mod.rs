//! The User Datagram Protocol (RFC 768): sockets and their datagrams.

mod datagram;
mod exchange;
mod id;
mod lookup;
mod migration;
mod port_groups;
mod queue_fill;
mod queue_trim;
mod receive;
mod send;
mod snapshot;
mod socket;
mod table;

pub use datagram::Datagram;
pub(crate) use datagram::{Payload, QueuedDatagram};
pub use exchange::{InPlaceRequest, UdpRequest};
pub use id::UdpId;
pub(crate) use lookup::Lookup;
pub(crate) use migration::ExtractedUdp;
pub use queue_fill::QUEUE_FILL_SCALE;
pub(crate) use snapshot::UdpSnapshot;
pub use socket::UdpOptions;
pub(crate) use table::UdpTable;

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Frame};
use tidegate_wire::DropReason;

use crate::ip::address::AddressKind;
use crate::{SocketError, Stack, Transport};

impl Stack {
    /// Creates a socket bound to `local`. Port 0 selects a random free ephemeral port (RFC 6056).
    /// The unspecified address receives datagrams to any local address of its family, and with
    /// `options.dual_stack` of both families.
    ///
    /// # Errors
    /// The address is not local, the port is in use, no ephemeral port is free, or the limit of
    /// sockets is reached.
    pub fn udp_bind(
        &mut self,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpId, SocketError> {
        let ip = local.ip();
        let bindable = matches!(
            self.addresses.kind(ip),
            AddressKind::Local | AddressKind::Broadcast | AddressKind::JoinedGroup
        );
        if !ip.is_unspecified() && !bindable {
            return Err(SocketError::AddressNotAvailable(ip));
        }
        let options = options.with_defaults(&self.limits);
        // A bound address has no flow information and no scope.
        let local = SocketAddr::new(ip, local.port());
        let reserved = &self.reserved_ports;
        let is_reserved = |port| reserved.contains(Transport::Udp, port);
        self.udp.bind(&mut self.rng, local, options, is_reserved)
    }

    /// Connects a socket: `remote` becomes its default destination, and the socket receives
    /// datagrams from `remote` only. A socket bound to the unspecified address gets the source
    /// address of packets to `remote`.
    ///
    /// # Errors
    /// The socket is closed, `remote` is not a valid peer for the socket, no route leads to
    /// `remote`, or another socket is connected with the same two addresses.
    pub fn udp_connect(&mut self, id: UdpId, remote: SocketAddr) -> Result<(), SocketError> {
        let socket = self.udp.get(id).ok_or(SocketError::Closed)?;
        let peer = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        if peer.port() == 0 || peer.ip().is_unspecified() || !socket.accepts_peer(peer.ip()) {
            return Err(SocketError::PeerInvalid(remote));
        }
        let local = match socket.bound.ip() {
            ip if !ip.is_unspecified() => ip,
            _ => self.source_for(peer.ip()).ok_or(SocketError::NetworkUnreachable(remote))?,
        };
        self.udp.connect(id, local, peer)
    }

    /// Undoes [`Stack::udp_connect`]: the socket is bound as before.
    ///
    /// # Errors
    /// The socket is closed, or its bound address is in use by another socket now.
    pub fn udp_disconnect(&mut self, id: UdpId) -> Result<(), SocketError> {
        self.udp.disconnect(id)
    }

    /// Options of a socket.
    pub fn udp_options(&self, id: UdpId) -> Option<UdpOptions> {
        self.udp.get(id).map(|socket| socket.options)
    }

    /// Closes a socket. Unread datagrams are dropped. Closing a closed socket does nothing.
    pub fn udp_close(&mut self, id: UdpId, arena: &mut Arena) {
        let Some(mut socket) = self.udp.close(id) else { return };
        self.udp.notify_unbound(&socket);
        let unread = socket.drop_oldest(0, arena) as u64;
        self.counters.held -= unread;
        self.counters.drops.add(DropReason::SocketClosed, unread);
    }

    /// Address and port that a socket is bound to. For a connected socket: source address and port
    /// of its packets.
    pub fn udp_local_addr(&self, id: UdpId) -> Option<SocketAddr> {
        let socket = self.udp.get(id)?;
        Some(match socket.remote {
            Some(_) => socket.to_app_address(socket.local),
            None => socket.bound,
        })
    }

    /// Peer of a connected socket.
    pub fn udp_peer_addr(&self, id: UdpId) -> Option<SocketAddr> {
        let socket = self.udp.get(id)?;
        socket.remote.map(|remote| socket.to_app_address(remote))
    }

    /// Takes the oldest datagram from the receive queue. The caller must free the datagram with
    /// [`Datagram::release`].
    #[inline]
    pub fn udp_recv(&mut self, arena: &Arena, id: UdpId) -> Option<Datagram> {
        let datagram = self.udp.get_mut(id)?.pop(arena)?;
        self.counters.held -= 1;
        self.counters.delivered += 1;
        Some(datagram)
    }

    /// Passes the sender, the destination address and the bytes of the oldest datagram to
    /// `inspect`. The datagram stays in the receive queue.
    pub fn udp_peek<R>(
        &self,
        arena: &Arena,
        id: UdpId,
        inspect: impl FnOnce(SocketAddr, IpAddr, &[u8]) -> R,
    ) -> Option<R> {
        self.udp.get(id)?.peek(arena, inspect)
    }

    /// True if an error is pending ([`Stack::udp_take_error`]).
    pub fn udp_has_error(&self, id: UdpId) -> bool {
        self.udp.get(id).is_some_and(|socket| socket.error.is_some())
    }

    /// Counts `datagrams` datagrams as dropped instead of delivered: the caller took them with
    /// [`Stack::udp_recv`], but the queue of their reader was full.
    pub fn udp_count_as_dropped(&mut self, datagrams: u64) {
        self.counters.delivered -= datagrams;
        self.counters.drops.add(DropReason::SocketQueueFull, datagrams);
    }

    /// Number of datagrams in the receive queue.
    pub fn udp_queue_len(&self, id: UdpId) -> usize {
        self.udp.get(id).map_or(0, socket::Socket::queue_len)
    }

    /// Takes the last error that a peer or a router reported.
    pub fn udp_take_error(&mut self, id: UdpId) -> Option<SocketError> {
        self.udp.get_mut(id)?.error.take()
    }

    /// Allocates an empty frame with headroom for every header, to be filled and passed to
    /// [`Stack::udp_send_frame`].
    #[inline]
    pub fn udp_alloc(&mut self, arena: &mut Arena) -> Option<Frame> {
        arena.alloc()
    }

    /// True if `address` is a local address that is ready for use.
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.addresses.kind(address) == AddressKind::Local
    }

    /// Source address of packets to `destination`; `None` without a route.
    pub fn source_for(&self, destination: IpAddr) -> Option<IpAddr> {
        let next_hop = self.next_hop(destination)?;
        self.addresses.source_for(destination, next_hop)
    }
}
