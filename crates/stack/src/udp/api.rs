//! UDP calls of a stack, as sockets use them.

use std::net::SocketAddr;

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

use super::socket::Socket;
use super::{Datagram, DatagramInfo, UdpErrorReport, UdpId, UdpOptions, UdpTable};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::{SocketError, Transport};

/// Fill level of a full receive queue, as reported by [`crate::Stack::udp_queue_fill`].
pub const QUEUE_FILL_SCALE: u32 = 1024;

impl UdpTable {
    /// Allows [`crate::Event::UdpReadable`] to be queued again.
    #[inline]
    pub(crate) fn rearm_readable(&mut self, id: UdpId) {
        if let Some(socket) = self.get_mut(id) {
            socket.readable_notified = false;
        }
    }

    /// Allows [`crate::Event::UdpError`] to be queued again.
    pub(crate) fn rearm_error(&mut self, id: UdpId) {
        if let Some(socket) = self.get_mut(id) {
            socket.error_notified = false;
        }
    }

    /// Implements [`crate::Stack::udp_bind`].
    pub(crate) fn bind(
        &mut self,
        interface: &mut Interface,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpId, SocketError> {
        let ip = local.ip();
        let bindable = matches!(
            interface.addresses.kind(ip),
            AddressKind::Local | AddressKind::Broadcast | AddressKind::JoinedGroup
        );
        if !ip.is_unspecified() && !bindable {
            return Err(SocketError::AddressNotAvailable(ip));
        }
        let options = options.with_defaults(&interface.limits);
        // A bound address has no flow information and no scope.
        let local = SocketAddr::new(ip, local.port());
        let reserved = &interface.reserved_ports;
        let is_reserved = |port| reserved.contains(Transport::Udp, port);
        self.bind_to(&mut interface.rng, local, options, is_reserved)
    }

    /// Implements [`crate::Stack::udp_connect`].
    pub(crate) fn connect(
        &mut self,
        interface: &Interface,
        id: UdpId,
        remote: SocketAddr,
    ) -> Result<(), SocketError> {
        let socket = self.get(id).ok_or(SocketError::Closed)?;
        let peer = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        if peer.ip().is_unspecified() || !socket.accepts_peer(peer.ip()) {
            return Err(SocketError::PeerInvalid(remote));
        }
        let local = match socket.bound.ip() {
            ip if !ip.is_unspecified() => ip,
            _ => interface.source_for(peer.ip()).ok_or(SocketError::NetworkUnreachable(remote))?,
        };
        self.connect_to(id, local, peer)
    }

    /// Implements [`crate::Stack::udp_options`].
    pub(crate) fn options(&self, id: UdpId) -> Option<UdpOptions> {
        self.get(id).map(|socket| socket.options)
    }

    /// Implements [`crate::Stack::udp_set_options`].
    pub(crate) fn set_options(
        &mut self,
        interface: &Interface,
        id: UdpId,
        options: UdpOptions,
    ) -> Result<(), SocketError> {
        let socket = self.get_mut(id).ok_or(SocketError::Closed)?;
        socket.set_options(options.with_defaults(&interface.limits));
        Ok(())
    }

    /// Implements [`crate::Stack::udp_close`].
    pub(crate) fn close(&mut self, interface: &mut Interface, id: UdpId, arena: &mut Arena) {
        let Some(mut socket) = self.remove(id) else { return };
        self.notify_unbound(&socket);
        let unread = socket.drop_oldest(0, arena) as u64;
        interface.counters.held -= unread;
        interface.counters.count_drops(DropReason::SocketClosed, unread);
    }

    /// Implements [`crate::Stack::udp_local_addr`].
    pub(crate) fn local_addr(&self, id: UdpId) -> Option<SocketAddr> {
        let socket = self.get(id)?;
        Some(match socket.remote {
            Some(_) => socket.to_app_address(socket.local),
            None => socket.bound,
        })
    }

    /// Implements [`crate::Stack::udp_peer_addr`].
    pub(crate) fn peer_addr(&self, id: UdpId) -> Option<SocketAddr> {
        let socket = self.get(id)?;
        let remote = socket.remote.filter(|remote| remote.port() != 0)?;
        Some(socket.to_app_address(remote))
    }

    /// Implements [`crate::Stack::udp_recv`].
    #[inline]
    pub(crate) fn recv(
        &mut self,
        interface: &mut Interface,
        arena: &Arena,
        id: UdpId,
    ) -> Option<Datagram> {
        let datagram = self.get_mut(id)?.pop(arena)?;
        interface.counters.held -= 1;
        interface.counters.delivered += 1;
        Some(datagram)
    }

    /// Implements [`crate::Stack::udp_peek`].
    pub(crate) fn peek<R>(
        &self,
        arena: &Arena,
        id: UdpId,
        inspect: impl FnOnce(DatagramInfo, &[u8]) -> R,
    ) -> Option<R> {
        self.get(id)?.peek(arena, inspect)
    }

    /// Implements [`crate::Stack::udp_has_error`].
    pub(crate) fn has_error(&self, id: UdpId) -> bool {
        self.get(id).is_some_and(|socket| socket.error.is_some())
    }

    /// Implements [`crate::Stack::udp_count_as_dropped`].
    pub(crate) fn count_as_dropped(&mut self, interface: &mut Interface, datagrams: u64) {
        interface.counters.delivered -= datagrams;
        interface.counters.count_drops(DropReason::SocketQueueFull, datagrams);
    }

    /// Implements [`crate::Stack::udp_queue_len`].
    pub(crate) fn queue_len(&self, id: UdpId) -> usize {
        self.get(id).map_or(0, Socket::queue_len)
    }

    /// Implements [`crate::Stack::udp_take_error`].
    pub(crate) fn take_error(&mut self, id: UdpId) -> Option<SocketError> {
        self.get_mut(id)?.error.take()
    }

    /// Implements [`crate::Stack::udp_take_error_report`].
    pub(crate) fn take_error_report(&mut self, id: UdpId) -> Option<UdpErrorReport> {
        self.get_mut(id)?.pop_error_report()
    }

    /// Implements [`crate::Stack::udp_queue_fill`].
    pub(crate) fn queue_fill(&self, id: UdpId) -> Option<u32> {
        let socket = self.get(id)?;
        let fill = |held: usize, limit: usize| {
            let fill = held as u128 * u128::from(QUEUE_FILL_SCALE) / (limit.max(1) as u128);
            fill.min(u128::from(QUEUE_FILL_SCALE)) as u32
        };
        let (packets, bytes) = socket.queued();
        let (packet_limit, byte_limit) = socket.queue_limits();
        Some(fill(packets, packet_limit).max(fill(bytes, byte_limit)))
    }
}
