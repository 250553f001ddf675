//! Socket of an application: connects its streams in shared memory with the stack.

pub(super) mod groups;
pub(super) mod pending_datagram;
pub(super) mod snapshot;
pub(super) mod table;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_engine::{Engine, PortClaim};
use tidegate_memory::Arena;
use tidegate_memory::shared::{PeerError, SharedWords};
use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use self::pending_datagram::PendingDatagram;
use crate::daemon::ids::{AppNumber, Holder, PayloadBytes, StackSocketId};
use crate::ipc::command::Handle;
use crate::ipc::layout::{SharedMemory, SocketSlot, StreamIn, StreamKind, StreamOut};
use crate::ipc::status::{SocketState, Status};

/// Payload up to which an ended socket leaves its memory to the next socket of its slot.
const DISCARD_THRESHOLD_BYTES: u64 = 16 << 10;

/// Minimum cost of a datagram, in bytes of a TCP stream.
const MIN_DATAGRAM_COST_BYTES: usize = 2 << 10;
/// Maximum bytes of one final poll.
const MAX_FINAL_POLL_BYTES: usize = 128 << 10;
/// Maximum polls of a socket whose application has exited.
const MAX_FINAL_POLLS: usize = 64;

/// Socket of one or several applications.
pub(super) struct AppSocket {
    pub(super) handle: Handle,
    pub(super) kind: SocketKind,
    pub(super) slot: SocketSlot,
    pub(super) status: Status,
    // The table of sockets counts these three: changed by its methods only.
    /// Claim of its local port.
    claim: Option<Arc<PortClaim>>,
    /// Application that created the socket; status and streams are in that application's slot.
    origin: Holder,
    /// Applications that hold the socket.
    holders: Vec<Holder>,
    /// A holder has corrupted the streams: the socket is no longer polled.
    is_corrupt: bool,
    /// The socket is in the core's poll queue.
    pub(super) in_poll_queue: bool,
}

/// Kind of a socket: its ID in the stack, and its streams.
pub(super) enum SocketKind {
    Udp(UdpEndpoint),
    Listener(TcpListenerId),
    Stream(TcpEndpoint),
}

/// UDP socket of the stack, and its streams in shared memory.
pub(super) struct UdpEndpoint {
    pub(super) id: UdpId,
    from_app: StreamIn,
    to_app: StreamOut,
    /// Received datagram that found no space in `to_app`.
    pending: Option<PendingDatagram>,
    payload_bytes: PayloadBytes,
}

impl UdpEndpoint {
    /// Releases the datagram that waits for space in the application's stream.
    pub(super) fn release_pending(&mut self, arena: &mut Arena) {
        if let Some(held) = self.pending.take() {
            held.release(arena);
        }
    }
}

/// TCP connection of the stack, and its streams in shared memory.
pub(super) struct TcpEndpoint {
    pub(super) id: TcpId,
    from_app: StreamIn,
    to_app: StreamOut,
    /// The application has shut down its side: data in the stream still goes out, then a FIN.
    pub(super) shutdown_pending: bool,
    /// The application has closed the connection: it ends when the stream is empty.
    pub(super) is_closed: bool,
    payload_bytes: PayloadBytes,
}

/// Result of polling a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PollResult {
    /// The holders must be notified.
    pub(super) notify: bool,
    /// The device was full: poll again soon.
    pub(super) device_full: bool,
    /// The application has written more than one poll takes: poll again in the next round.
    pub(super) has_more: bool,
    /// The socket has no more to do and can be removed.
    pub(super) is_done: bool,
    /// Cost of what was taken from the application's stream: bytes, of a datagram at least
    /// [`MIN_DATAGRAM_COST_BYTES`].
    pub(super) taken_bytes: usize,
}

impl AppSocket {
    pub(super) fn udp(memory: &SharedMemory, handle: Handle, id: UdpId) -> io::Result<Self> {
        let place = memory.slot(handle.slot)?;
        place.clear()?;
        let (from_app, to_app) = place.daemon_streams(StreamKind::Datagrams)?;
        let kind = SocketKind::Udp(UdpEndpoint {
            id,
            from_app,
            to_app,
            pending: None,
            payload_bytes: PayloadBytes::default(),
        });
        Ok(Self::with_kind(handle, kind, place, SocketState::Datagram))
    }

    pub(super) fn listener(
        memory: &SharedMemory,
        handle: Handle,
        id: TcpListenerId,
    ) -> io::Result<Self> {
        let place = memory.slot(handle.slot)?;
        place.clear()?;
        Ok(Self::with_kind(handle, SocketKind::Listener(id), place, SocketState::Listening))
    }

    pub(super) fn stream(memory: &SharedMemory, handle: Handle, id: TcpId) -> io::Result<Self> {
        let place = memory.slot(handle.slot)?;
        place.clear()?;
        let (from_app, to_app) = place.daemon_streams(StreamKind::Bytes)?;
        let stream = TcpEndpoint {
            id,
            from_app,
            to_app,
            shutdown_pending: false,
            is_closed: false,
            payload_bytes: PayloadBytes::default(),
        };
        Ok(Self::with_kind(handle, SocketKind::Stream(stream), place, SocketState::Connecting))
    }

    fn with_kind(handle: Handle, kind: SocketKind, slot: SocketSlot, state: SocketState) -> Self {
        let status = Status { generation: handle.generation, state, ..Status::default() };
        let mut socket = Self {
            handle,
            kind,
            slot,
            status,
            claim: None,
            origin: Holder::default(),
            holders: Vec::new(),
            is_corrupt: false,
            in_poll_queue: false,
        };
        // Both sides are notified of the first event.
        socket.slot.notify_on_change.request();
        socket.slot.poll_on_write.request();
        socket.write_status();
        socket
    }

    /// Aborts the socket if its streams were corrupted before or during a handover.
    pub(super) fn abort_if_corrupt(&mut self, engine: &mut Engine) {
        if self.is_corrupt && self.status.state != SocketState::Over {
            self.abort(engine);
        }
    }

    /// Sets the ID that the socket has after a migration to another stack.
    pub(super) fn set_id(&mut self, id: StackSocketId) {
        match (&mut self.kind, id) {
            (SocketKind::Udp(datagrams), StackSocketId::Udp(id)) => datagrams.id = id,
            (SocketKind::Listener(own), StackSocketId::Listener(id)) => *own = id,
            (SocketKind::Stream(stream), StackSocketId::Stream(id)) => stream.id = id,
            // The kind of a socket never changes.
            _ => {}
        }
    }

    /// Copies a pending datagram out of its frame, which stays with this core.
    pub(super) fn copy_pending(&mut self, engine: &mut Engine) {
        let SocketKind::Udp(datagrams) = &mut self.kind else { return };
        if let Some(held) = datagrams.pending.take() {
            datagrams.pending = Some(PendingDatagram::Copy(held.save(engine)));
            held.release(engine.parts().1);
        }
    }

    /// ID of the socket in the stack.
    pub(super) fn id(&self) -> StackSocketId {
        match &self.kind {
            SocketKind::Udp(datagrams) => StackSocketId::Udp(datagrams.id),
            SocketKind::Listener(id) => StackSocketId::Listener(*id),
            SocketKind::Stream(stream) => StackSocketId::Stream(stream.id),
        }
    }

    fn write_status(&mut self) {
        if let Some(word) = self.slot.status.words().first() {
            word.store(self.status.to_word(), Ordering::Release);
        }
    }

    /// Sets the status. Returns true if it has changed.
    pub(super) fn set_status(&mut self, status: Status) -> bool {
        let is_new = self.status != status;
        if is_new {
            self.status = status;
            self.write_status();
        }
        is_new
    }

    /// The socket with this claim of its local port.
    pub(super) fn with_claim(self, claim: Option<Arc<PortClaim>>) -> Self {
        Self { claim, ..self }
    }

    /// The socket with this application as its origin and only holder.
    pub(super) fn owned_by(self, owner: Holder) -> Self {
        Self { origin: owner, holders: vec![owner], ..self }
    }

    /// The socket on another core, with the numbers that the applications have there.
    pub(super) fn renumbered(
        mut self: Box<Self>,
        number_of: impl Fn(AppNumber) -> AppNumber,
    ) -> Box<Self> {
        self.origin.app = number_of(self.origin.app);
        self.holders.iter_mut().for_each(|holder| holder.app = number_of(holder.app));
        self
    }

    /// The socket without its claim, and the claim.
    pub(super) fn split_claim(mut self: Box<Self>) -> (Box<Self>, Option<Arc<PortClaim>>) {
        let claim = self.claim.take();
        (self, claim)
    }

    /// Claim of its local port.
    pub(super) fn claim(&self) -> Option<&Arc<PortClaim>> {
        self.claim.as_ref()
    }

    /// Application that created the socket; status and streams are in that application's slot.
    pub(super) fn origin(&self) -> Holder {
        self.origin
    }

    /// Applications that hold the socket.
    pub(super) fn holders(&self) -> &[Holder] {
        &self.holders
    }

    /// Adds a holder.
    fn add_holder(&mut self, holder: Holder) {
        self.holders.push(holder);
        self.set_status(Status { shared: self.holders.len() > 1, ..self.status });
    }

    /// Removes `app` from the holders; returns its entry.
    fn remove_holder(&mut self, app: AppNumber) -> Option<Holder> {
        let at = self.holders.iter().position(|holder| holder.app == app)?;
        let holder = self.holders.remove(at);
        self.set_status(Status { shared: self.holders.len() > 1, ..self.status });
        Some(holder)
    }

    /// True if the application has closed the connection, which only sends remaining data.
    pub(super) fn is_closed(&self) -> bool {
        matches!(&self.kind, SocketKind::Stream(stream) if stream.is_closed)
    }

    /// Aborts a socket whose streams were corrupted by one of several holders.
    pub(super) fn abort(&mut self, engine: &mut Engine) {
        self.is_corrupt = true;
        if let SocketKind::Stream(stream) = &self.kind {
            let (stack, arena, now_ns) = engine.parts();
            stack.tcp_abort(now_ns, arena, stream.id);
        }
        self.set_error(io::ErrorKind::ConnectionAborted);
        self.set_status(Status { state: SocketState::Over, ..self.status });
    }

    /// Records an error for the application. Returns true if the status has changed.
    pub(super) fn set_error(&mut self, kind: io::ErrorKind) -> bool {
        let error_count = self.status.error_count.wrapping_add(1);
        self.set_status(Status { error: Some(kind), error_count, ..self.status })
    }

    /// Moves data both ways between the streams and the stack, out of the application's stream at
    /// most `max_bytes`, but at least one datagram.
    ///
    /// # Errors
    /// [`PeerError`] when the application has written invalid indices or datagrams.
    pub(super) fn poll(
        &mut self,
        engine: &mut Engine,
        max_bytes: usize,
    ) -> Result<PollResult, PeerError> {
        if self.is_corrupt {
            return Ok(PollResult { is_done: self.is_closed(), ..PollResult::default() });
        }
        // Requested before polling: an event during the poll is notified again.
        self.slot.poll_on_write.request();
        match &self.kind {
            SocketKind::Udp(_) => self.poll_udp(engine, max_bytes),
            SocketKind::Listener(id) => {
                let accept_ready = engine.stack().tcp_acceptable(*id) > 0;
                let notify = self.set_status(Status { accept_ready, ..self.status });
                Ok(PollResult { notify: notify && accept_ready, ..PollResult::default() })
            }
            SocketKind::Stream(_) => self.poll_stream(engine, max_bytes),
        }
    }

    /// Polls the socket of an exited application for the last time. Returns true if it has no more
    /// to do.
    pub(super) fn poll_finally(&mut self, engine: &mut Engine) -> bool {
        let mut polled = self.poll(engine, MAX_FINAL_POLL_BYTES);
        for _ in 1..MAX_FINAL_POLLS {
            if !matches!(polled, Ok(PollResult { has_more: true, .. })) {
                break;
            }
            polled = self.poll(engine, MAX_FINAL_POLL_BYTES);
        }
        polled.is_ok_and(|polled| polled.is_done)
    }

    /// True if the stream memory of the ended socket must be discarded: unless the socket moved so
    /// little that the call would cost more.
    pub(super) fn needs_discard(&self) -> bool {
        let PayloadBytes { to_app, from_app } = self.payload_bytes();
        to_app + from_app > DISCARD_THRESHOLD_BYTES
    }

    /// Payload bytes moved so far.
    pub(super) fn payload_bytes(&self) -> PayloadBytes {
        match &self.kind {
            SocketKind::Udp(datagrams) => datagrams.payload_bytes,
            SocketKind::Listener(_) => PayloadBytes::default(),
            SocketKind::Stream(stream) => stream.payload_bytes,
        }
    }

    /// Local address.
    pub(super) fn local_addr(&self, engine: &Engine) -> Option<SocketAddr> {
        let stack = engine.stack();
        match &self.kind {
            SocketKind::Udp(datagrams) => stack.udp_local_addr(datagrams.id),
            SocketKind::Listener(id) => stack.tcp_listener_addr(*id),
            SocketKind::Stream(stream) => stack.tcp_local_addr(stream.id),
        }
    }

    /// Peer address of a connected socket.
    pub(super) fn peer_addr(&self, engine: &Engine) -> Option<SocketAddr> {
        let stack = engine.stack();
        match &self.kind {
            SocketKind::Udp(datagrams) => stack.udp_peer_addr(datagrams.id),
            SocketKind::Listener(_) => None,
            SocketKind::Stream(stream) => stack.tcp_peer_addr(stream.id),
        }
    }
}
