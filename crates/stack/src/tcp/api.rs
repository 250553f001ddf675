//! TCP calls of a stack: listeners and connections, as sockets use them.

use std::net::SocketAddr;

use tidegate_memory::Arena;

use super::buffers::{BUFFER_BYTES, TcpShared};
use super::connection::Connection;
use super::flags::ConnFlags;
use super::listener::Listener;
use super::segment::FourTuple;
use super::socket::{
    Failure, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpReadiness, TcpState,
};
use crate::ip::address::AddressKind;
use crate::ports::choose_port;
use crate::{SendError, Stack, Transport};

impl Stack {
    /// Listens on `local`. Port 0 selects a free port; the unspecified address accepts connections
    /// to any local address. The accept queue holds at most `backlog` connections.
    ///
    /// # Errors
    /// When the address is not local or in use, no port is free, or the limit of listeners is
    /// reached.
    pub fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> Result<TcpListenerId, TcpError> {
        let ip = local.ip();
        if !ip.is_unspecified() && self.addresses.kind(ip) != AddressKind::Local {
            return Err(TcpError::AddressNotAvailable(ip));
        }
        let mut local = SocketAddr::new(ip, local.port());
        if local.port() == 0 {
            let (tcp, reserved) = (&self.tcp, &self.reserved_ports);
            let is_free = |port| {
                let is_taken = tcp.listeners.has_port(SocketAddr::new(ip, port));
                !is_taken && !reserved.contains(Transport::Tcp, port)
            };
            let port = choose_port(&mut self.rng, is_free).ok_or(TcpError::NoPortFree(local))?;
            local.set_port(port);
        }
        let options = self.tcp.shared.intern_options(options);
        self.tcp.listeners.add(local, backlog, options)
    }

    /// Returns the local address of a listener.
    pub fn tcp_listener_addr(&self, id: TcpListenerId) -> Option<SocketAddr> {
        self.tcp.listeners.get(id).map(|listener| listener.local)
    }

    /// Returns the options of a listener.
    pub fn tcp_listener_options(&self, id: TcpListenerId) -> Option<TcpOptions> {
        self.tcp.listeners.get(id).map(|listener| *listener.options)
    }

    /// Number of connections in the accept queue.
    pub fn tcp_acceptable(&self, id: TcpListenerId) -> usize {
        self.tcp.listeners.get(id).map_or(0, Listener::accept_queue_len)
    }

    /// Removes the oldest connection from the accept queue. The connection may have ended
    /// meanwhile.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when the accept queue is empty; [`TcpError::Closed`] when the
    /// listener does not exist.
    pub fn tcp_accept(&mut self, id: TcpListenerId) -> Result<TcpId, TcpError> {
        let listener = self.tcp.listeners.get_mut(id).ok_or(TcpError::Closed)?;
        let index = listener.pop().ok_or(TcpError::WouldBlock)?;
        let Some(connection) = self.tcp.connections.at_mut(index) else {
            debug_assert!(false, "connections in the accept queue are in the table");
            return Err(TcpError::WouldBlock);
        };
        connection.flags.remove(ConnFlags::IN_ACCEPT_QUEUE);
        connection.flags.remove(ConnFlags::ORPHAN);
        connection.listener = None;
        Ok(self.tcp.connections.id(index))
    }

    /// Closes a listener. Connections in its accept queue are reset.
    pub fn tcp_close_listener(&mut self, now_ns: u64, arena: &mut Arena, id: TcpListenerId) {
        let Some(mut listener) = self.tcp.listeners.remove(id) else { return };
        while let Some(index) = listener.pop() {
            if let Some(connection) = self.tcp.connections.at_mut(index) {
                connection.flags.remove(ConnFlags::IN_ACCEPT_QUEUE);
                connection.listener = None;
                connection.abort(&mut self.tcp.shared, Some(Failure::Aborted), true);
                self.tcp.update(now_ns, index);
            }
        }
        self.tcp_flush(now_ns, arena);
    }

    /// Starts a connection to `remote`; data can be written once it is established. `local` sets
    /// the local address and port; the unspecified address and port 0 let the stack choose.
    ///
    /// # Errors
    /// When there is no route, the local address is not available, the four-tuple is in use, no
    /// port is free, or the limit of connections is reached.
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
            AddressKind::Other => !peer.ip().is_multicast() && !peer.ip().is_unspecified(),
            AddressKind::Local => self.has_loopback(),
            AddressKind::Tentative | AddressKind::Broadcast | AddressKind::JoinedGroup => false,
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
        if self.addresses.kind(ip) != AddressKind::Local || ip.is_ipv4() != peer.is_ipv4() {
            return Err(TcpError::AddressNotAvailable(ip));
        }
        let tuple = self.choose_tuple(now_ns, SocketAddr::new(ip, port), peer)?;
        if self.tcp.connections.is_full() {
            return Err(TcpError::TooMany("connections"));
        }
        let iss = self.tcp.initial_seq(now_ns, &tuple);
        let iss = self.tcp.replace_time_wait(now_ns, &tuple).map_or(iss, |old| old.max(iss));
        let offset = self.tcp.timestamp_offset(&tuple);
        let ecn = options.ecn;
        let options = self.tcp.shared.intern_options(options);
        let mut connection = Connection::new(now_ns, tuple, options, iss, offset);
        connection.state = TcpState::SynSent;
        connection.flags.set(ConnFlags::ECN, ecn);
        connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        let index = self.tcp.insert(now_ns, connection);
        self.tcp_flush(now_ns, arena);
        Ok(self.tcp.connections.id(index))
    }

    /// Returns the four-tuple, with a free local port if none was given (RFC 6056 section 3.3.1).
    fn choose_tuple(
        &mut self,
        now_ns: u64,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<FourTuple, TcpError> {
        let tcp = &self.tcp;
        let is_free = |port| {
            let local = SocketAddr::new(local.ip(), port);
            !tcp.listeners.has_port(local)
                && tcp.is_tuple_free(now_ns, &FourTuple::new(local, remote))
        };
        match local.port() {
            0 => {
                let reserved = &self.reserved_ports;
                let is_free = |port| is_free(port) && !reserved.contains(Transport::Tcp, port);
                let port = choose_port(&mut self.rng, is_free);
                let port = port.ok_or(TcpError::NoPortFree(remote))?;
                Ok(FourTuple::new(SocketAddr::new(local.ip(), port), remote))
            }
            port if is_free(port) => Ok(FourTuple::new(local, remote)),
            _ => Err(TcpError::AddressInUse(local)),
        }
    }

    /// Writes as much of `data` as the send buffer takes, and flushes. Returns the bytes written.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when the send buffer is full; [`TcpError::BrokenPipe`] after
    /// [`Stack::tcp_shutdown`]; [`TcpError::NotConnected`] before the connection is established;
    /// the error that ended the connection.
    pub fn tcp_send(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        data: &[u8],
    ) -> Result<usize, TcpError> {
        let written = self.tcp_send_unflushed(now_ns, id, data)?;
        self.tcp_flush(now_ns, arena);
        Ok(written)
    }

    /// Writes like [`Stack::tcp_send`] without a flush: the segments are sent with the next burst
    /// or [`Stack::tcp_flush`].
    ///
    /// # Errors
    /// As [`Stack::tcp_send`].
    pub fn tcp_send_unflushed(
        &mut self,
        now_ns: u64,
        id: TcpId,
        data: &[u8],
    ) -> Result<usize, TcpError> {
        let all = |_: &Connection| data.len();
        self.write_in_place(now_ns, id, all, |connection, shared, space| {
            let end = connection.send.queued_bytes as usize;
            connection.send.queue.write(&mut shared.pool, end, &data[..space]);
            space
        })
    }

    /// Lets `write` fill contiguous send buffer memory, at most `limit` bytes: the data is not
    /// copied again until the peer has acknowledged it. `write` returns the bytes written; the
    /// prior content of the memory has no meaning. Sends like [`Stack::tcp_send_unflushed`].
    ///
    /// # Errors
    /// As [`Stack::tcp_send`]; `write` is then not called.
    pub fn tcp_send_with(
        &mut self,
        now_ns: u64,
        id: TcpId,
        limit: usize,
        write: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, TcpError> {
        let contiguous = |connection: &Connection| {
            let end = connection.send.queued_bytes as usize;
            connection.send.queue.contiguous_bytes(end).min(limit)
        };
        self.write_in_place(now_ns, id, contiguous, |connection, shared, space| {
            let end = connection.send.queued_bytes as usize;
            let slice = connection.send.queue.slice_mut(&mut shared.pool, end, space);
            let written = write(slice).min(slice.len());
            if written == 0 && end == 0 {
                connection.send.queue.clear(&mut shared.pool);
            }
            written
        })
    }

    /// Reserves memory for at most `wanted` bytes and lets `write` fill it.
    fn write_in_place(
        &mut self,
        now_ns: u64,
        id: TcpId,
        wanted: impl FnOnce(&Connection) -> usize,
        write: impl FnOnce(&mut Connection, &mut TcpShared, usize) -> usize,
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        if let Some(failure) = connection.failure.take() {
            return Err(TcpError::from_failure(failure, connection.tuple.remote()));
        }
        match connection.state {
            TcpState::SynSent | TcpState::SynReceived => return Err(TcpError::NotConnected),
            TcpState::Established | TcpState::CloseWait
                if !connection.flags.contains(ConnFlags::FIN_QUEUED) => {}
            _ => return Err(TcpError::BrokenPipe),
        }
        let wanted = wanted(connection);
        let space = connection.appendable_bytes(&shared.pool).min(wanted);
        let end = connection.send.queued_bytes as usize;
        if space < wanted {
            connection.flags.insert(ConnFlags::WRITE_BLOCKED);
        }
        if space == 0 && wanted > 0
            || !connection.send.queue.reserve(&mut shared.pool, end, end + space)
        {
            if end == 0 {
                // Nothing is in flight, so no acknowledgement will wake the writer.
                self.tcp.wait_for_memory(id);
            }
            return Err(TcpError::WouldBlock);
        }
        let written = write(connection, shared, space);
        connection.send.queued_bytes += written as u32;
        if written > 0 {
            connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        if !connection.flags.contains(ConnFlags::PENDING) {
            self.tcp.update(now_ns, id.index);
        }
        Ok(written)
    }

    /// Reads received data into `buf`, and flushes. Returns the bytes read; 0 means the end of the
    /// peer's data.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when no data has arrived; [`TcpError::NotConnected`] before the
    /// connection is established; the error that ended the connection.
    pub fn tcp_recv(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        let len = self.tcp_recv_unflushed(now_ns, id, buf)?;
        self.tcp_flush(now_ns, arena);
        Ok(len)
    }

    /// Reads like [`Stack::tcp_recv`] without a flush: a window update is sent with the next burst
    /// or [`Stack::tcp_flush`].
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    pub fn tcp_recv_unflushed(
        &mut self,
        now_ns: u64,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        if connection.readable() > 0 {
            let len = connection.read(buf, shared);
            if connection.flags.contains(ConnFlags::WANTS_OUTPUT)
                && !connection.flags.contains(ConnFlags::PENDING)
            {
                self.tcp.update(now_ns, id.index);
            }
            return Ok(len);
        }
        Self::read_when_empty(connection, buf.is_empty())
    }

    /// Copies the data that [`Stack::tcp_recv`] would read next, and leaves it in the receive
    /// buffer.
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    pub fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        let readable = connection.readable() as usize;
        if readable == 0 {
            return Self::read_when_empty(connection, buf.is_empty());
        }
        let len = buf.len().min(readable);
        connection.receive.queue.read(&shared.pool, 0, &mut buf[..len]);
        Ok(len)
    }

    /// Passes `read` the first contiguous received bytes in place. `read` returns the bytes used,
    /// which are then removed.
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    pub fn tcp_recv_with(
        &mut self,
        now_ns: u64,
        id: TcpId,
        read: impl FnOnce(&[u8]) -> usize,
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        let readable = connection.readable() as usize;
        if readable > 0 {
            let bytes = connection.receive.queue.front(&shared.pool, readable);
            let used = read(bytes).min(bytes.len());
            connection.consume(used, shared);
            if connection.flags.contains(ConnFlags::WANTS_OUTPUT)
                && !connection.flags.contains(ConnFlags::PENDING)
            {
                self.tcp.update(now_ns, id.index);
            }
            return Ok(used);
        }
        Self::read_when_empty(connection, false)
    }

    /// Result of a read when no data has arrived.
    fn read_when_empty(
        connection: &mut Connection,
        buffer_is_empty: bool,
    ) -> Result<usize, TcpError> {
        if connection.flags.contains(ConnFlags::FIN_RECEIVED)
            || connection.flags.contains(ConnFlags::READ_SHUT)
            || buffer_is_empty
        {
            return Ok(0);
        }
        if let Some(failure) = connection.failure.take() {
            return Err(TcpError::from_failure(failure, connection.tuple.remote()));
        }
        match connection.state {
            TcpState::Closed => Ok(0),
            TcpState::SynSent | TcpState::SynReceived => Err(TcpError::NotConnected),
            _ => Err(TcpError::WouldBlock),
        }
    }

    /// Shuts down one direction of a connection or both. Data written before is still sent.
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] before the connection is established; [`TcpError::Closed`] when
    /// the handle is not valid.
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
            connection.flags.insert(ConnFlags::READ_SHUT);
            connection.flags.insert(ConnFlags::NOTIFY_READABLE);
            let unread = connection.readable() as usize;
            connection.consume(unread, shared);
        }
        if how != Shutdown::Read {
            connection.queue_fin();
        }
        self.tcp.update(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
        Ok(())
    }

    /// Closes the handle. Written data is still sent, followed by a FIN. If received data is
    /// unread, the connection is reset instead, which tells the peer of the loss (RFC 9293
    /// section 3.10.4, RFC 1122 section 4.2.2.13).
    pub fn tcp_close(&mut self, now_ns: u64, arena: &mut Arena, id: TcpId) {
        let Some((connection, shared)) = self.tcp.get_mut(id) else { return };
        connection.flags.insert(ConnFlags::ORPHAN);
        match connection.state {
            TcpState::SynSent => connection.abort(shared, None, false),
            _ if connection.readable() > 0 && connection.state != TcpState::TimeWait => {
                connection.abort(shared, None, true);
            }
            TcpState::FinWait2 => connection.start_orphan_timer(now_ns, shared),
            _ => connection.queue_fin(),
        }
        self.tcp.update(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
    }

    /// Closes the handle and resets the connection. Unacknowledged data is lost.
    pub fn tcp_abort(&mut self, now_ns: u64, arena: &mut Arena, id: TcpId) {
        let Some((connection, shared)) = self.tcp.get_mut(id) else { return };
        connection.flags.insert(ConnFlags::ORPHAN);
        let reset = connection.state != TcpState::TimeWait;
        connection.abort(shared, None, reset);
        self.tcp.update(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
    }

    /// Returns the state of a connection.
    pub fn tcp_state(&self, id: TcpId) -> Option<TcpState> {
        self.tcp.get(id).map(|connection| connection.state)
    }

    /// Returns the readiness of a connection. A handle that is not valid is ready for everything.
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
        let is_closed = connection.state == TcpState::Closed;
        let read_closed = connection.flags.contains(ConnFlags::FIN_RECEIVED)
            || connection.flags.contains(ConnFlags::READ_SHUT)
            || is_closed;
        let write_closed = connection.flags.contains(ConnFlags::FIN_QUEUED) || is_closed;
        let has_space = connection.can_send()
            && connection.send.has_space(&connection.options)
            && connection.appendable_bytes(&self.tcp.shared.pool) > 0;
        TcpReadiness {
            readable: connection.readable() > 0 || read_closed,
            writable: has_space || write_closed,
            read_closed,
            write_closed,
            failed: connection.failure.is_some(),
        }
    }

    /// Bytes that can be read.
    pub fn tcp_readable(&self, id: TcpId) -> usize {
        self.tcp.get(id).map_or(0, |connection| connection.readable() as usize)
    }

    /// Bytes that can be written: free in the send buffer and backed by memory.
    pub fn tcp_writable(&self, id: TcpId) -> usize {
        let open = self.tcp.get(id).filter(|connection| connection.can_send());
        open.map_or(0, |connection| connection.appendable_bytes(&self.tcp.shared.pool))
    }

    /// Returns the local address of a connection.
    pub fn tcp_local_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.tcp.get(id).map(|connection| connection.tuple.local())
    }

    /// Returns the peer's address of a connection.
    pub fn tcp_peer_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.tcp.get(id).map(|connection| connection.tuple.remote())
    }

    /// Takes the error that ended a connection; it is reported once.
    pub fn tcp_take_error(&mut self, id: TcpId) -> Option<TcpError> {
        let (connection, _) = self.tcp.get_mut(id)?;
        let failure = connection.failure.take()?;
        Some(TcpError::from_failure(failure, connection.tuple.remote()))
    }

    /// Returns the options of a connection.
    pub fn tcp_options(&self, id: TcpId) -> Option<TcpOptions> {
        self.tcp.get(id).map(|connection| *connection.options)
    }

    /// Changes the options of a connection. The window scale and the options of port sharing
    /// (`reuse_port`, `owner`) do not change.
    ///
    /// # Errors
    /// [`TcpError::Closed`] when the handle is not valid.
    pub fn tcp_set_options(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        options: TcpOptions,
    ) -> Result<(), TcpError> {
        let (connection, shared) = self.tcp.get_mut(id).ok_or(TcpError::Closed)?;
        // Port sharing is fixed when the socket is bound.
        let TcpOptions { reuse_port, owner, .. } = *connection.options;
        connection.options = shared.intern_options(TcpOptions { reuse_port, owner, ..options });
        if connection.is_synchronized() && connection.state != TcpState::TimeWait {
            connection.timers.start_keepalive(now_ns, connection.options.keepalive);
        }
        // The new options may release data that Nagle held back.
        connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.tcp.update(now_ns, id.index);
        self.tcp_flush(now_ns, arena);
        Ok(())
    }

    /// Returns state, round trip, windows and options of a connection.
    pub fn tcp_info(&self, id: TcpId) -> Option<TcpInfo> {
        let connection = self.tcp.get(id)?;
        let window = connection.recovery.controller.window;
        Some(TcpInfo {
            state: connection.state,
            rtt_ns: connection.recovery.rtt.smoothed_ns(),
            rto_ns: connection.recovery.rtt.rto_ns(),
            cwnd_bytes: window.cwnd,
            ssthresh_bytes: window.ssthresh,
            send_window_bytes: connection.send.window,
            receive_window_bytes: connection.receive.window(),
            mss_bytes: connection.send.mss,
            unacknowledged_bytes: connection.send.queued_bytes,
            unread_bytes: connection.readable(),
            sack: connection.flags.contains(ConnFlags::SACK),
            timestamps: connection.flags.contains(ConnFlags::TIMESTAMPS),
            ecn: connection.flags.contains(ConnFlags::ECN),
        })
    }

    /// True while the connection exists, also after its handle was closed.
    pub fn tcp_exists(&self, id: TcpId) -> bool {
        self.tcp.connections.get(id).is_some()
    }

    /// True while a connection whose handle was closed may still have data or a FIN to deliver.
    /// Visits all connections.
    pub fn tcp_unfinished(&self) -> bool {
        self.tcp.connections.iter().any(|connection| {
            connection.flags.contains(ConnFlags::ORPHAN) && connection.can_transmit()
        })
    }

    /// Memory that holds data of connections, in bytes.
    pub fn tcp_memory_used(&self) -> usize {
        self.tcp.shared.pool.used() * BUFFER_BYTES
    }

    /// Number of connections in any state.
    pub fn tcp_connections(&self) -> usize {
        self.tcp.connections.len()
    }

    /// Iterates over the connections whose handles were closed and that have not ended yet: handle,
    /// local address, options.
    pub fn tcp_lingering(&self) -> impl Iterator<Item = (TcpId, SocketAddr, TcpOptions)> {
        let slots = (0_u32..).zip(self.tcp.connections.slots());
        slots.filter_map(|(index, (generation, connection))| {
            let was_closed = |known: &&Connection| {
                known.flags.contains(ConnFlags::ORPHAN) && known.listener.is_none()
            };
            let connection = connection.filter(was_closed)?;
            let local = connection.tuple.local();
            Some((TcpId { index, generation }, local, *connection.options))
        })
    }
}
