//! The Transmission Control Protocol (RFC 9293): connections and listeners.
//!
//! A connection is a state machine without clock or I/O, split by topic:
//! `arrival` (what a segment does, in the order of RFC 9293 section 3.10.7),
//! `receive`, `send`, `recovery` with `flight` and `congestion`, `path_search`,
//! `keepalive`, `time_wait`. `table` holds all of them, with `connections` (where they are
//! and how they are found), `listener`, and `timers`. `input` and `output`
//! join it to the rest of the stack.
//!
//! Segments that arrive only change state. What is to be sent goes out when
//! the burst is over, so acknowledgements of one burst are one.

mod arrival;
mod chunks;
mod congestion;
mod connection;
mod connections;
mod cookie;
mod fast_path;
mod flight;
mod input;
mod isn;
mod keepalive;
mod listener;
mod moving;
mod options;
mod output;
mod path_search;
mod peer_clock;
mod prf;
mod receive;
mod recovery;
mod report;
mod rtt;
mod saved;
mod secrets;
mod segment;
mod send;
mod seq;
mod socket;
mod table;
mod time_wait;
mod timers;

pub use congestion::CongestionControl;
pub(crate) use fast_path::may_be_plain_tcp;
pub(crate) use moving::{MovedTcp, TakenTcp};
pub(crate) use output::LARGEST_TRAIN_BYTES;
pub(crate) use saved::SavedTcp;
pub use secrets::TcpSecrets;
pub use socket::{
    Keepalive, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpReadiness,
    TcpState,
};
pub(crate) use table::TcpTable;

use std::net::SocketAddr;

use tidegate_memory::Arena;

use crate::address::Kind;
use crate::udp::choose_port;
use crate::{SendError, Stack, Transport};
use connection::{Connection, Is, Shared};
use segment::Ends;
use socket::Failure;

impl Stack {
    /// Listens on `local`. Port 0 chooses one; the unspecified address takes
    /// connections to any address of ours. At most `backlog` connections wait
    /// to be accepted.
    ///
    /// # Errors
    /// When the address is not ours, the port is taken, or none is left.
    pub fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> Result<TcpListenerId, TcpError> {
        let ip = local.ip();
        if !ip.is_unspecified() && self.addresses.kind(ip) != Kind::Ours {
            return Err(TcpError::AddressNotAvailable(ip));
        }
        let mut local = SocketAddr::new(ip, local.port());
        if local.port() == 0 {
            let (tcp, reserved) = (&self.tcp, &self.reserved_ports);
            let is_free = |port| {
                let is_taken = tcp.listeners.has_port(SocketAddr::new(ip, port));
                !is_taken && !reserved.has(Transport::Tcp, port)
            };
            let port = choose_port(&mut self.chance, is_free).ok_or(TcpError::NoPortFree(local))?;
            local.set_port(port);
        }
        let options = self.tcp.shared.options(options);
        self.tcp.listeners.add(local, backlog, options)
    }

    /// The address that a listener listens on.
    pub fn tcp_listener_addr(&self, id: TcpListenerId) -> Option<SocketAddr> {
        self.tcp.listeners.get(id).map(|listener| listener.local)
    }

    /// The options of a listener.
    pub fn tcp_listener_options(&self, id: TcpListenerId) -> Option<TcpOptions> {
        self.tcp.listeners.get(id).map(|listener| *listener.options)
    }

    /// How many connections wait to be accepted.
    pub fn tcp_acceptable(&self, id: TcpListenerId) -> usize {
        self.tcp.listeners.get(id).map_or(0, listener::Listener::waiting)
    }

    /// Takes the connection that has waited longest. It may have ended since.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when none waits, [`TcpError::Closed`].
    pub fn tcp_accept(&mut self, id: TcpListenerId) -> Result<TcpId, TcpError> {
        let listener = self.tcp.listeners.get_mut(id).ok_or(TcpError::Closed)?;
        let index = listener.pop().ok_or(TcpError::WouldBlock)?;
        let Some(connection) = self.tcp.connections.at_mut(index) else {
            debug_assert!(false, "what waits to be accepted is kept");
            return Err(TcpError::WouldBlock);
        };
        connection.is.remove(Is::IN_ACCEPT_QUEUE);
        connection.is.remove(Is::ORPHAN);
        connection.listener = None;
        Ok(self.tcp.connections.id(index))
    }

    /// Stops listening. Connections that were not accepted are reset.
    pub fn tcp_close_listener(&mut self, now_ns: u64, arena: &mut Arena, id: TcpListenerId) {
        let Some(mut listener) = self.tcp.listeners.remove(id) else { return };
        while let Some(index) = listener.pop() {
            if let Some(connection) = self.tcp.connections.at_mut(index) {
                connection.is.remove(Is::IN_ACCEPT_QUEUE);
                connection.listener = None;
                connection.abort(&mut self.tcp.shared, Some(Failure::Aborted), true);
                self.tcp.settle(now_ns, index);
            }
        }
        self.tcp_flush(now_ns, arena);
    }

    /// Begins a connection to `remote`. It can be written to when it is
    /// established. `local` chooses address and port; port 0 and the
    /// unspecified address leave them open.
    ///
    /// # Errors
    /// When nothing leads there, the ends are in use, or no port is left.
    pub fn tcp_connect(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> Result<TcpId, TcpError> {
        let peer = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        let reachable = match self.addresses.kind(peer.ip()) {
            Kind::Other => !peer.ip().is_multicast() && !peer.ip().is_unspecified(),
            Kind::Ours => self.has_loopback(),
            Kind::Tentative | Kind::Broadcast | Kind::Group => false,
        };
        if peer.port() == 0 || !reachable {
            return Err(TcpError::PeerInvalid(remote));
        }
        let path = self.path(now_ns, arena, peer.ip()).map_err(|error| match error {
            SendError::NoSource(_) => TcpError::PeerInvalid(remote),
            SendError::WouldBlock => TcpError::WouldBlock,
            _ => TcpError::NetworkUnreachable(remote),
        })?;
        let (ip, port) = match local {
            Some(local) if !local.ip().is_unspecified() => (local.ip(), local.port()),
            Some(local) => (path.source, local.port()),
            None => (path.source, 0),
        };
        if self.addresses.kind(ip) != Kind::Ours || ip.is_ipv4() != peer.is_ipv4() {
            return Err(TcpError::AddressNotAvailable(ip));
        }
        let ends = self.choose_ends(now_ns, SocketAddr::new(ip, port), peer)?;
        if self.tcp.connections.is_full() {
            return Err(TcpError::TooMany("connections"));
        }
        let iss = self.tcp.initial_seq(now_ns, &ends);
        let iss = self.tcp.replace_time_wait(now_ns, &ends).map_or(iss, |old| old.max(iss));
        let offset = self.tcp.timestamp_offset(&ends);
        let ecn = options.ecn;
        let options = self.tcp.shared.options(options);
        let mut connection = Connection::new(now_ns, ends, options, iss, offset);
        connection.state = TcpState::SynSent;
        connection.is.set(Is::ECN, ecn);
        connection.is.insert(Is::WANTS_OUTPUT);
        let index = self.tcp.enter(now_ns, connection);
        self.tcp_flush(now_ns, arena);
        Ok(self.tcp.connections.id(index))
    }

    /// Both ends, with a free port if none was chosen (RFC 6056 section 3.3.1).
    fn choose_ends(
        &mut self,
        now_ns: u64,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<Ends, TcpError> {
        let tcp = &self.tcp;
        let is_free = |port| {
            let local = SocketAddr::new(local.ip(), port);
            !tcp.listeners.has_port(local) && tcp.are_free(now_ns, &Ends::new(local, remote))
        };
        match local.port() {
            0 => {
                let reserved = &self.reserved_ports;
                let is_free = |port| is_free(port) && !reserved.has(Transport::Tcp, port);
                let port = choose_port(&mut self.chance, is_free);
                let port = port.ok_or(TcpError::NoPortFree(remote))?;
                Ok(Ends::new(SocketAddr::new(local.ip(), port), remote))
            }
            port if is_free(port) => Ok(Ends::new(local, remote)),
            _ => Err(TcpError::AddressInUse(local)),
        }
    }

    /// Writes as much of `data` as there is room for. Returns how much.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when there is no room; [`TcpError::BrokenPipe`]
    /// after [`Stack::tcp_shutdown`]; how the connection ended.
    pub fn tcp_send(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        data: &[u8],
    ) -> Result<usize, TcpError> {
        let written = self.tcp_write(now_ns, id, data)?;
        self.tcp_flush(now_ns, arena);
        Ok(written)
    }

    /// As [`Stack::tcp_send`], but the segments go out with the next burst, or
    /// with [`Stack::tcp_flush`].
    ///
    /// # Errors
    /// As [`Stack::tcp_send`].
    pub fn tcp_write(&mut self, now_ns: u64, id: TcpId, data: &[u8]) -> Result<usize, TcpError> {
        let all = |_: &Connection| data.len();
        self.write_where_it_stays(now_ns, id, all, |connection, shared, room| {
            let end = connection.outgoing_bytes as usize;
            connection.outgoing.write(&mut shared.chunks, end, &data[..room]);
            room
        })
    }

    /// Lets `write` put data where it stays until the peer has it, as much as
    /// lies together and no more than `limit`: no other copy of it is needed.
    /// `write` says how much it wrote; what it finds there has no meaning. The
    /// segments go out as with [`Stack::tcp_write`].
    ///
    /// # Errors
    /// As [`Stack::tcp_send`]; `write` is not called then.
    pub fn tcp_write_with(
        &mut self,
        now_ns: u64,
        id: TcpId,
        limit: usize,
        write: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, TcpError> {
        let together = |connection: &Connection| {
            let end = connection.outgoing_bytes as usize;
            connection.outgoing.together(end).min(limit)
        };
        self.write_where_it_stays(now_ns, id, together, |connection, shared, room| {
            let end = connection.outgoing_bytes as usize;
            let place = connection.outgoing.place(&mut shared.chunks, end, room);
            let written = write(place).min(place.len());
            if written == 0 && end == 0 {
                connection.outgoing.clear(&mut shared.chunks);
            }
            written
        })
    }

    /// Makes room for as many bytes as are `wanted` or fewer, and lets `write` fill some of it.
    fn write_where_it_stays(
        &mut self,
        now_ns: u64,
        id: TcpId,
        wanted: impl FnOnce(&Connection) -> usize,
        write: impl FnOnce(&mut Connection, &mut Shared, usize) -> usize,
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        if let Some(failure) = connection.failure.take() {
            return Err(TcpError::from_failure(failure, connection.ends.remote()));
        }
        match connection.state {
            TcpState::SynSent | TcpState::SynReceived => return Err(TcpError::NotConnected),
            TcpState::Established | TcpState::CloseWait
                if !connection.is.contains(Is::FIN_QUEUED) => {}
            _ => return Err(TcpError::BrokenPipe),
        }
        let wanted = wanted(connection);
        let room = connection.appendable(&shared.chunks).min(wanted);
        let end = connection.outgoing_bytes as usize;
        if room < wanted {
            connection.is.insert(Is::WRITE_BLOCKED);
        }
        if room == 0 && wanted > 0 || !connection.outgoing.grow(&mut shared.chunks, end, end + room)
        {
            if end == 0 {
                // No acknowledgement will come to wake it.
                self.tcp.starve(id);
            }
            return Err(TcpError::WouldBlock);
        }
        let written = write(connection, shared, room);
        connection.outgoing_bytes += written as u32;
        if written > 0 {
            connection.is.insert(Is::WANTS_OUTPUT);
        }
        if !connection.is.contains(Is::PENDING) {
            self.tcp.settle(now_ns, id.index);
        }
        Ok(written)
    }

    /// Reads what has arrived into `buf`. Returns how much: 0 is the end of
    /// what the peer sends.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when nothing has arrived; how the connection
    /// ended.
    pub fn tcp_recv(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        let len = self.tcp_read(now_ns, id, buf)?;
        self.tcp_flush(now_ns, arena);
        Ok(len)
    }

    /// As [`Stack::tcp_recv`]; the peer is told of the room with the next
    /// burst, or with [`Stack::tcp_flush`].
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    pub fn tcp_read(&mut self, now_ns: u64, id: TcpId, buf: &mut [u8]) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        if connection.readable() > 0 {
            let len = connection.read(buf, shared);
            if connection.is.contains(Is::WANTS_OUTPUT) && !connection.is.contains(Is::PENDING) {
                self.tcp.settle(now_ns, id.index);
            }
            return Ok(len);
        }
        Self::nothing_to_read(connection, buf.is_empty())
    }

    /// Copies what [`Stack::tcp_read`] would take next, and takes nothing away.
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    pub fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        let readable = connection.readable() as usize;
        if readable == 0 {
            return Self::nothing_to_read(connection, buf.is_empty());
        }
        let len = buf.len().min(readable);
        connection.incoming.read(&shared.chunks, 0, &mut buf[..len]);
        Ok(len)
    }

    /// Shows what has arrived, as much as lies together, where it lies. `read`
    /// says how much it used; that is gone then.
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    pub fn tcp_read_with(
        &mut self,
        now_ns: u64,
        id: TcpId,
        read: impl FnOnce(&[u8]) -> usize,
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        let readable = connection.readable() as usize;
        if readable > 0 {
            let bytes = connection.incoming.front(&shared.chunks, readable);
            let used = read(bytes).min(bytes.len());
            connection.consume(used, shared);
            if connection.is.contains(Is::WANTS_OUTPUT) && !connection.is.contains(Is::PENDING) {
                self.tcp.settle(now_ns, id.index);
            }
            return Ok(used);
        }
        Self::nothing_to_read(connection, false)
    }

    /// What reading gives when nothing has arrived.
    fn nothing_to_read(connection: &mut Connection, wants_none: bool) -> Result<usize, TcpError> {
        if connection.is.contains(Is::FIN_RECEIVED)
            || connection.is.contains(Is::READ_SHUT)
            || wants_none
        {
            return Ok(0);
        }
        if let Some(failure) = connection.failure.take() {
            return Err(TcpError::from_failure(failure, connection.ends.remote()));
        }
        match connection.state {
            TcpState::Closed => Ok(0),
            TcpState::SynSent | TcpState::SynReceived => Err(TcpError::NotConnected),
            _ => Err(TcpError::WouldBlock),
        }
    }

    /// Shuts one half of a connection or both. What was written before still
    /// goes out.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`], [`TcpError::Closed`].
    pub fn tcp_shutdown(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        how: Shutdown,
    ) -> Result<(), TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        if !connection.is_synchronized() {
            return Err(TcpError::NotConnected);
        }
        if how != Shutdown::Write {
            connection.is.insert(Is::READ_SHUT);
            connection.is.insert(Is::TELL_READABLE);
            let unread = connection.readable() as usize;
            connection.consume(unread, shared);
        }
        if how != Shutdown::Read {
            connection.queue_fin();
        }
        self.tcp.settle(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
        Ok(())
    }

    /// Closes the handle. What was written still goes out, and the connection
    /// ends in order; if there is unread data the peer is told by a reset that
    /// it was lost (RFC 9293 section 3.10.4, RFC 1122 section 4.2.2.13).
    pub fn tcp_close(&mut self, now_ns: u64, arena: &mut Arena, id: TcpId) {
        let Some((connection, shared)) = self.tcp.get_mut(id) else { return };
        connection.is.insert(Is::ORPHAN);
        match connection.state {
            TcpState::SynSent => connection.abort(shared, None, false),
            _ if connection.readable() > 0 && connection.state != TcpState::TimeWait => {
                connection.abort(shared, None, true);
            }
            TcpState::FinWait2 => connection.wait_as_orphan(now_ns, shared),
            _ => connection.queue_fin(),
        }
        self.tcp.settle(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
    }

    /// Closes the handle and breaks the connection off: what was not
    /// acknowledged is lost, and the peer is told by a reset.
    pub fn tcp_abort(&mut self, now_ns: u64, arena: &mut Arena, id: TcpId) {
        let Some((connection, shared)) = self.tcp.get_mut(id) else { return };
        connection.is.insert(Is::ORPHAN);
        let reset = connection.state != TcpState::TimeWait;
        connection.abort(shared, None, reset);
        self.tcp.settle(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
    }

    /// The state of a connection.
    pub fn tcp_state(&self, id: TcpId) -> Option<TcpState> {
        self.tcp.get(id).map(|connection| connection.state)
    }

    /// What a connection is ready for.
    pub fn tcp_readiness(&self, id: TcpId) -> TcpReadiness {
        let Some(connection) = self.tcp.get(id) else {
            return TcpReadiness {
                readable: true,
                writable: true,
                read_closed: true,
                write_closed: true,
                failed: false,
            };
        };
        let over = connection.state == TcpState::Closed;
        let read_closed = connection.is.contains(Is::FIN_RECEIVED)
            || connection.is.contains(Is::READ_SHUT)
            || over;
        let write_closed = connection.is.contains(Is::FIN_QUEUED) || over;
        let room = connection.can_send()
            && connection.has_room()
            && connection.appendable(&self.tcp.shared.chunks) > 0;
        TcpReadiness {
            readable: connection.readable() > 0 || read_closed,
            writable: room || write_closed,
            read_closed,
            write_closed,
            failed: connection.failure.is_some(),
        }
    }

    /// How many bytes can be read.
    pub fn tcp_readable(&self, id: TcpId) -> usize {
        self.tcp.get(id).map_or(0, |connection| connection.readable() as usize)
    }

    /// How many bytes can be written: what there is room and memory for.
    pub fn tcp_writable(&self, id: TcpId) -> usize {
        let open = self.tcp.get(id).filter(|connection| connection.can_send());
        open.map_or(0, |connection| connection.appendable(&self.tcp.shared.chunks))
    }

    /// Our end of a connection.
    pub fn tcp_local_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.tcp.get(id).map(|connection| connection.ends.local())
    }

    /// The peer's end of a connection.
    pub fn tcp_peer_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.tcp.get(id).map(|connection| connection.ends.remote())
    }

    /// Takes the error that a connection ended with; it is told once.
    pub fn tcp_take_error(&mut self, id: TcpId) -> Option<TcpError> {
        let (connection, _) = self.tcp.get_mut(id)?;
        let failure = connection.failure.take()?;
        Some(TcpError::from_failure(failure, connection.ends.remote()))
    }

    /// The options of a connection.
    pub fn tcp_options(&self, id: TcpId) -> Option<TcpOptions> {
        self.tcp.get(id).map(|connection| *connection.options)
    }

    /// Changes the options of a connection. The window scale stays what it was.
    ///
    /// # Errors
    /// [`TcpError::Closed`].
    pub fn tcp_set_options(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        options: TcpOptions,
    ) -> Result<(), TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        // What it shares its port with stays.
        let TcpOptions { reuse_port, party, .. } = *connection.options;
        connection.options = shared.options(TcpOptions { reuse_port, party, ..options });
        if connection.is_synchronized() && connection.state != TcpState::TimeWait {
            connection.start_keepalive(now_ns);
        }
        // What Nagle held back may go now.
        connection.is.insert(Is::WANTS_OUTPUT);
        self.tcp.settle(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
        Ok(())
    }

    /// What is known about a connection.
    pub fn tcp_info(&self, id: TcpId) -> Option<TcpInfo> {
        let connection = self.tcp.get(id)?;
        let window = connection.controller.window;
        Some(TcpInfo {
            state: connection.state,
            rtt_ns: connection.rtt.smoothed_ns(),
            rto_ns: connection.rtt.rto_ns(),
            cwnd_bytes: window.cwnd,
            ssthresh_bytes: window.ssthresh,
            send_window_bytes: connection.window,
            receive_window_bytes: connection.receive_window(),
            mss_bytes: connection.mss,
            unacknowledged_bytes: connection.outgoing_bytes,
            unread_bytes: connection.readable(),
            sack: connection.is.contains(Is::SACK),
            timestamps: connection.is.contains(Is::TIMESTAMPS),
            ecn: connection.is.contains(Is::ECN),
        })
    }

    /// Whether the connection is still remembered, after its handle was closed
    /// too.
    pub fn tcp_exists(&self, id: TcpId) -> bool {
        self.tcp.connections.get(id).is_some()
    }

    /// Whether a connection whose handle was closed still has something to
    /// bring over. Looks at all of them.
    pub fn tcp_unfinished(&self) -> bool {
        self.tcp
            .connections
            .iter()
            .any(|connection| connection.is.contains(Is::ORPHAN) && connection.sends())
    }

    /// Memory that holds data of connections now, in bytes.
    pub fn tcp_memory_used(&self) -> usize {
        self.tcp.shared.chunks.used() * chunks::CHUNK_BYTES
    }

    /// How many connections there are, in whatever state.
    pub fn tcp_connections(&self) -> usize {
        self.tcp.connections.len()
    }

    /// All connections whose handles were closed and that have not ended yet, each
    /// with our end of it and its options.
    pub fn tcp_lingering(&self) -> impl Iterator<Item = (TcpId, SocketAddr, TcpOptions)> {
        let places = (0_u32..).zip(self.tcp.connections.places());
        places.filter_map(|(index, (generation, connection))| {
            let was_closed =
                |known: &&Connection| known.is.contains(Is::ORPHAN) && known.listener.is_none();
            let connection = connection.filter(was_closed)?;
            let local = connection.ends.local();
            Some((TcpId { index, generation }, local, *connection.options))
        })
    }
}
