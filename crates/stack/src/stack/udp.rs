//! UDP calls of a stack.

use std::net::SocketAddr;

use tidegate_memory::{Arena, Frame};

use super::Stack;
use crate::udp::{
    Datagram, DatagramInfo, InPlaceRequest, SendTarget, UdpErrorReport, UdpId, UdpOptions,
    UdpRequest, UdpSendOptions,
};
use crate::{SendError, SocketError};

impl Stack {
    /// Creates a socket bound to `local`. Port 0 selects a random free ephemeral port (RFC 6056).
    /// The unspecified address receives datagrams to any local address of its family, and with
    /// `options.dual_stack` of both families.
    ///
    /// # Errors
    /// The address is not local, the port is in use, no ephemeral port is free, or the limit of
    /// sockets is reached.
    #[inline]
    pub fn udp_bind(
        &mut self,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpId, SocketError> {
        self.udp.bind(&mut self.interface, local, options)
    }

    /// Connects a socket: `remote` becomes its default destination, and the socket receives
    /// datagrams from `remote` only. A socket bound to the unspecified address gets the source
    /// address of packets to `remote`.
    ///
    /// # Errors
    /// The socket is closed, `remote` is not a valid peer for the socket, no route leads to
    /// `remote`, or another socket is connected with the same two addresses.
    #[inline]
    pub fn udp_connect(&mut self, id: UdpId, remote: SocketAddr) -> Result<(), SocketError> {
        self.udp.connect(&self.interface, id, remote)
    }

    /// Undoes [`Stack::udp_connect`]: the socket is bound as before.
    ///
    /// # Errors
    /// The socket is closed, or its bound address is in use by another socket now.
    #[inline]
    pub fn udp_disconnect(&mut self, id: UdpId) -> Result<(), SocketError> {
        self.udp.disconnect(id)
    }

    /// Options of a socket.
    #[inline]
    pub fn udp_options(&self, id: UdpId) -> Option<UdpOptions> {
        self.udp.options(id)
    }

    /// Changes the options of a socket. Those that decide which sockets have the port (`dual_stack`,
    /// `reuse_address`, `reuse_port`, `owner`) do not change. A queue that holds more than its new
    /// limit keeps what it has.
    ///
    /// # Errors
    /// [`SocketError::Closed`].
    #[inline]
    pub fn udp_set_options(&mut self, id: UdpId, options: UdpOptions) -> Result<(), SocketError> {
        self.udp.set_options(&self.interface, id, options)
    }

    /// Closes a socket. Unread datagrams are dropped. Closing a closed socket does nothing.
    #[inline]
    pub fn udp_close(&mut self, id: UdpId, arena: &mut Arena) {
        self.udp.close(&mut self.interface, id, arena);
    }

    /// Address and port that a socket is bound to. For a connected socket: source address and port
    /// of its packets.
    #[inline]
    pub fn udp_local_addr(&self, id: UdpId) -> Option<SocketAddr> {
        self.udp.local_addr(id)
    }

    /// True if a socket is bound to this port, whatever its address.
    #[inline]
    pub fn udp_has_port(&self, port: u16) -> bool {
        self.udp.has_port(port)
    }

    /// Peer of a connected socket.
    #[inline]
    pub fn udp_peer_addr(&self, id: UdpId) -> Option<SocketAddr> {
        self.udp.peer_addr(id)
    }

    /// Takes the oldest datagram from the receive queue. The caller must free the datagram with
    /// [`Datagram::release`].
    #[inline]
    pub fn udp_recv(&mut self, arena: &Arena, id: UdpId) -> Option<Datagram> {
        self.udp.recv(&mut self.interface, arena, id)
    }

    /// Passes the header fields and the bytes of the oldest datagram to `inspect`. The datagram stays in the receive queue.
    #[inline]
    pub fn udp_peek<R>(
        &self,
        arena: &Arena,
        id: UdpId,
        inspect: impl FnOnce(DatagramInfo, &[u8]) -> R,
    ) -> Option<R> {
        self.udp.peek(arena, id, inspect)
    }

    /// True if an error is pending ([`Stack::udp_take_error`]).
    #[inline]
    pub fn udp_has_error(&self, id: UdpId) -> bool {
        self.udp.has_error(id)
    }

    /// Counts `datagrams` datagrams as dropped instead of delivered: the caller took them with
    /// [`Stack::udp_recv`], but the queue of their reader was full.
    #[inline]
    pub fn udp_count_as_dropped(&mut self, datagrams: u64) {
        self.udp.count_as_dropped(&mut self.interface, datagrams);
    }

    /// Number of datagrams in the receive queue.
    #[inline]
    pub fn udp_queue_len(&self, id: UdpId) -> usize {
        self.udp.queue_len(id)
    }

    /// Takes the last error that a peer or a router reported.
    #[inline]
    pub fn udp_take_error(&mut self, id: UdpId) -> Option<SocketError> {
        self.udp.take_error(id)
    }

    /// Takes the oldest ICMP error about a datagram that the socket has sent. A socket queues them with
    /// [`UdpOptions::report_errors`].
    #[inline]
    pub fn udp_take_error_report(&mut self, id: UdpId) -> Option<UdpErrorReport> {
        self.udp.take_error_report(id)
    }

    /// Allocates an empty frame with headroom for every header, to be filled and passed to
    /// [`Stack::udp_send_frame`].
    #[inline]
    pub fn udp_alloc(&mut self, arena: &mut Arena) -> Option<Frame> {
        arena.alloc()
    }

    /// Fill level of a socket's receive queue in parts of [`crate::QUEUE_FILL_SCALE`]: by packets
    /// or by bytes, whichever is nearer to its limit. `None` if the socket does not exist.
    #[inline]
    pub fn udp_queue_fill(&self, id: UdpId) -> Option<u32> {
        self.udp.queue_fill(id)
    }

    /// Sends a copy of `payload`, fragmented if necessary. A connected socket may omit `to`.
    /// `options` are header fields of this datagram; `None` selects those of the socket.
    ///
    /// # Errors
    /// See [`SendError`]; nothing was sent.
    #[inline]
    pub fn udp_send(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        to: Option<SocketAddr>,
        options: impl Into<UdpSendOptions>,
        payload: &[u8],
    ) -> Result<(), SendError> {
        let target = SendTarget { to, options: options.into() };
        self.udp.send(&mut self.interface, now_ns, arena, id, target, payload)
    }

    /// Sends the payload in `frame`. Frames from [`Stack::udp_alloc`] and received frames have
    /// headroom for all headers and are not copied. The frame is consumed, also on error.
    ///
    /// # Errors
    /// See [`SendError`]; nothing was sent.
    #[inline]
    pub fn udp_send_frame(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        to: Option<SocketAddr>,
        options: impl Into<UdpSendOptions>,
        frame: Frame,
    ) -> Result<(), SendError> {
        let target = SendTarget { to, options: options.into() };
        self.udp.send_frame(&mut self.interface, now_ns, arena, id, target, frame)
    }

    /// Passes up to `max_datagrams` queued datagrams of a socket to `respond`, and sends the
    /// replies. Returns the number of datagrams taken from the receive queue.
    ///
    /// `respond` writes a reply to the buffer and returns its length in bytes; `None` sends
    /// nothing. A reply leaves from the address that the request was sent to. Without space to
    /// send, a reply is dropped and counted.
    #[inline]
    pub fn udp_exchange(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        respond: impl FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>,
    ) -> usize {
        self.udp.exchange(&mut self.interface, now_ns, arena, id, max_datagrams, respond)
    }

    /// As [`Stack::udp_exchange`], but each reply is written over its request. This needs no second
    /// frame, and unchanged bytes are not copied.
    #[inline]
    pub fn udp_exchange_in_place(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: UdpId,
        max_datagrams: usize,
        respond: impl FnMut(InPlaceRequest<'_>) -> Option<usize>,
    ) -> usize {
        self.udp.exchange_in_place(&mut self.interface, now_ns, arena, id, max_datagrams, respond)
    }
}
