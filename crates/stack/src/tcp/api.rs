//! TCP calls of a stack: listeners and connections, as sockets use them.

use std::net::SocketAddr;

use tidegate_memory::{Arena, probes};

use super::buffers::{BUFFER_BYTES, TcpShared};
use super::connection::Connection;
use super::demux::{TcpTable, Turn};
use super::flags::ConnFlags;
use super::listener::Listener;
use super::segment::FourTuple;
use super::socket::{
    Failure, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpReadiness, TcpState,
};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ports::choose_port;
use crate::{SendError, Transport};

impl TcpTable {
    /// Implements [`crate::Stack::tcp_listen`].
    pub(crate) fn listen(
        &mut self,
        interface: &mut Interface,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> Result<TcpListenerId, TcpError> {
        let ip = local.ip();
        if !ip.is_unspecified() && interface.addresses.kind(ip) != AddressKind::Local {
            return Err(TcpError::AddressNotAvailable(ip));
        }
        let mut local = SocketAddr::new(ip, local.port());
        if local.port() == 0 {
            let (tcp, reserved) = (&self, &interface.reserved_ports);
            let is_free = |port| {
                let is_taken = tcp.listeners.has_port(SocketAddr::new(ip, port));
                !is_taken && !reserved.contains(Transport::Tcp, port)
            };
            let port =
                choose_port(&mut interface.rng, is_free).ok_or(TcpError::NoPortFree(local))?;
            local.set_port(port);
        }
        let options = self.shared.intern_options(options);
        self.listeners.add(local, backlog, options)
    }

    /// Implements [`crate::Stack::tcp_listener_addr`].
    pub(crate) fn listener_addr(&self, id: TcpListenerId) -> Option<SocketAddr> {
        self.listeners.get(id).map(|listener| listener.local)
    }

    /// Implements [`crate::Stack::tcp_listener_options`].
    pub(crate) fn listener_options(&self, id: TcpListenerId) -> Option<TcpOptions> {
        self.listeners.get(id).map(|listener| *listener.options)
    }

    /// Implements [`crate::Stack::tcp_set_listener_options`].
    pub(crate) fn set_listener_options(
        &mut self,
        id: TcpListenerId,
        options: TcpOptions,
    ) -> Result<(), TcpError> {
        let listener = self.listeners.get_mut(id).ok_or(TcpError::Closed)?;
        // The addresses of a listener, and who shares them, are fixed when it is bound.
        let TcpOptions { reuse_port, owner, dual_stack, .. } = *listener.options;
        let options = TcpOptions { reuse_port, owner, dual_stack, ..options };
        listener.options = self.shared.intern_options(options);
        Ok(())
    }

    /// Implements [`crate::Stack::tcp_acceptable`].
    pub(crate) fn acceptable(&self, id: TcpListenerId) -> usize {
        self.listeners.get(id).map_or(0, Listener::accept_queue_len)
    }

    /// Implements [`crate::Stack::tcp_accept`].
    pub(crate) fn accept(&mut self, id: TcpListenerId) -> Result<TcpId, TcpError> {
        let listener = self.listeners.get_mut(id).ok_or(TcpError::Closed)?;
        let index = listener.pop().ok_or(TcpError::WouldBlock)?;
        let Some(connection) = self.connections.at_mut(index) else {
            debug_assert!(false, "connections in the accept queue are in the table");
            return Err(TcpError::WouldBlock);
        };
        connection.flags.remove(ConnFlags::IN_ACCEPT_QUEUE);
        connection.flags.remove(ConnFlags::ORPHAN);
        connection.listener = None;
        let ports = (connection.tuple.local().port(), connection.tuple.remote().port());
        probes::on_accept(ports.0, ports.1);
        Ok(self.connections.id(index))
    }

    /// Implements [`crate::Stack::tcp_close_listener`].
    pub(crate) fn close_listener(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpListenerId,
    ) {
        let Some(mut listener) = self.listeners.remove(id) else { return };
        while let Some(index) = listener.pop() {
            if let Some(connection) = self.connections.at_mut(index) {
                connection.flags.remove(ConnFlags::IN_ACCEPT_QUEUE);
                connection.listener = None;
                connection.abort(&mut self.shared, Some(Failure::Aborted), true);
                self.update(now_ns, index);
            }
        }
        self.flush(interface, now_ns, arena);
    }

    /// Implements [`crate::Stack::tcp_connect`].
    pub(crate) fn connect(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> Result<TcpId, TcpError> {
        let peer = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        let reachable = match interface.addresses.kind(peer.ip()) {
            AddressKind::Other => !peer.ip().is_multicast() && !peer.ip().is_unspecified(),
            AddressKind::Local => interface.has_loopback(),
            AddressKind::Tentative | AddressKind::Broadcast | AddressKind::JoinedGroup => false,
        };
        if peer.port() == 0 || !reachable {
            return Err(TcpError::PeerInvalid(remote));
        }
        let path = interface.path(now_ns, arena, peer.ip()).map_err(|error| match error {
            SendError::NoSource(_) => TcpError::PeerInvalid(remote),
            SendError::WouldBlock => TcpError::WouldBlock,
            _ => TcpError::NetworkUnreachable(remote),
        })?;
        let (ip, port) = match local {
            Some(local) if !local.ip().is_unspecified() => (local.ip(), local.port()),
            Some(local) => (path.source, local.port()),
            None => (path.source, 0),
        };
        if interface.addresses.kind(ip) != AddressKind::Local || ip.is_ipv4() != peer.is_ipv4() {
            return Err(TcpError::AddressNotAvailable(ip));
        }
        let tuple = self.choose_tuple(interface, now_ns, SocketAddr::new(ip, port), peer)?;
        if self.connections.is_full() {
            return Err(TcpError::TooMany("connections"));
        }
        let iss = self.initial_seq(now_ns, &tuple);
        let iss = self.replace_time_wait(now_ns, &tuple).map_or(iss, |old| old.max(iss));
        let offset = self.timestamp_offset(&tuple);
        let ecn = options.ecn;
        let options = self.shared.intern_options(options);
        let mut connection = Connection::new(now_ns, tuple, options, iss, offset);
        connection.state = TcpState::SynSent;
        connection.flags.set(ConnFlags::ECN, ecn);
        connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        let index = self.insert(now_ns, connection);
        self.flush(interface, now_ns, arena);
        Ok(self.connections.id(index))
    }

    /// Returns the four-tuple, with a free local port if none was given (RFC 6056 section 3.3.1).
    fn choose_tuple(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<FourTuple, TcpError> {
        let tcp = &self;
        let is_free = |port| {
            let local = SocketAddr::new(local.ip(), port);
            !tcp.listeners.has_port(local)
                && tcp.is_tuple_free(now_ns, &FourTuple::new(local, remote))
        };
        match local.port() {
            0 => {
                let reserved = &interface.reserved_ports;
                let is_free = |port| is_free(port) && !reserved.contains(Transport::Tcp, port);
                let port = choose_port(&mut interface.rng, is_free);
                let port = port.ok_or(TcpError::NoPortFree(remote))?;
                Ok(FourTuple::new(SocketAddr::new(local.ip(), port), remote))
            }
            port if is_free(port) => Ok(FourTuple::new(local, remote)),
            _ => Err(TcpError::AddressInUse(local)),
        }
    }

    /// Implements [`crate::Stack::tcp_send`].
    pub(crate) fn send(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        data: &[u8],
    ) -> Result<usize, TcpError> {
        let written = self.send_unflushed(id, data)?;
        self.flush(interface, now_ns, arena);
        Ok(written)
    }

    /// Implements [`crate::Stack::tcp_send_unflushed`].
    pub(crate) fn send_unflushed(&mut self, id: TcpId, data: &[u8]) -> Result<usize, TcpError> {
        let all = |_: &Connection| data.len();
        self.write_in_place(id, all, |connection, shared, space| {
            let end = connection.send.queued_bytes as usize;
            connection.send.queue.write(&mut shared.pool, end, &data[..space]);
            space
        })
    }

    /// Implements [`crate::Stack::tcp_send_with`].
    pub(crate) fn send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, TcpError> {
        let contiguous = |connection: &Connection| {
            let end = connection.send.queued_bytes as usize;
            connection.send.queue.contiguous_bytes(end).min(limit)
        };
        self.write_in_place(id, contiguous, |connection, shared, space| {
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
        id: TcpId,
        wanted: impl FnOnce(&Connection) -> usize,
        write: impl FnOnce(&mut Connection, &mut TcpShared, usize) -> usize,
    ) -> Result<usize, TcpError> {
        let Self { connections, shared, pending, .. } = self;
        let connection = connections.held_mut(id).ok_or(TcpError::Closed)?;
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
                self.wait_for_memory(id);
            }
            return Err(TcpError::WouldBlock);
        }
        let written = write(connection, shared, space);
        connection.send.queued_bytes += written as u32;
        if written > 0 {
            connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        pending.schedule(connection, id.index, Turn::First);
        Ok(written)
    }

    /// Implements [`crate::Stack::tcp_recv`].
    pub(crate) fn recv(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        let len = self.recv_unflushed(now_ns, id, buf)?;
        self.flush(interface, now_ns, arena);
        Ok(len)
    }

    /// Implements [`crate::Stack::tcp_recv_unflushed`].
    pub(crate) fn recv_unflushed(
        &mut self,
        now_ns: u64,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.get_mut(id).ok_or(TcpError::Closed)?;
        if connection.readable() > 0 {
            let len = connection.read(buf, shared);
            if connection.flags.contains(ConnFlags::WANTS_OUTPUT)
                && !connection.flags.contains(ConnFlags::PENDING)
            {
                self.update(now_ns, id.index);
            }
            return Ok(len);
        }
        Self::read_when_empty(connection, buf.is_empty())
    }

    /// Implements [`crate::Stack::tcp_peek`].
    pub(crate) fn peek(&mut self, id: TcpId, buf: &mut [u8]) -> Result<usize, TcpError> {
        let (connection, shared) = self.get_mut(id).ok_or(TcpError::Closed)?;
        let readable = connection.readable() as usize;
        if readable == 0 {
            return Self::read_when_empty(connection, buf.is_empty());
        }
        let len = buf.len().min(readable);
        connection.receive.queue.read(&shared.pool, 0, &mut buf[..len]);
        Ok(len)
    }

    /// Implements [`crate::Stack::tcp_recv_with`].
    pub(crate) fn recv_with(
        &mut self,
        now_ns: u64,
        id: TcpId,
        read: impl FnOnce(&[u8]) -> usize,
    ) -> Result<usize, TcpError> {
        let (connection, shared) = self.get_mut(id).ok_or(TcpError::Closed)?;
        let readable = connection.readable() as usize;
        if readable > 0 {
            let bytes = connection.receive.queue.front(&shared.pool, readable);
            let used = read(bytes).min(bytes.len());
            connection.consume(used, shared);
            if connection.flags.contains(ConnFlags::WANTS_OUTPUT)
                && !connection.flags.contains(ConnFlags::PENDING)
            {
                self.update(now_ns, id.index);
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
        if connection.has_read_ended() || buffer_is_empty {
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

    /// Implements [`crate::Stack::tcp_shutdown`].
    pub(crate) fn shutdown(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        how: Shutdown,
    ) -> Result<(), TcpError> {
        let (connection, shared) = self.get_mut(id).ok_or(TcpError::Closed)?;
        if connection.state == TcpState::SynSent {
            // As at the kernel, this ends the attempt.
            connection.abort(shared, Some(Failure::Reset), false);
            self.update(now_ns, id.index);
            return Ok(());
        }
        if !connection.is_synchronized() || connection.state == TcpState::TimeWait {
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
        self.update(now_ns, id.index);
        self.flush(interface, now_ns, arena);
        Ok(())
    }

    /// Implements [`crate::Stack::tcp_close`].
    pub(crate) fn close(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
    ) {
        let Some((connection, shared)) = self.get_mut(id) else { return };
        connection.flags.insert(ConnFlags::ORPHAN);
        match connection.state {
            TcpState::SynSent => connection.abort(shared, None, false),
            _ if connection.readable() > 0 && connection.state != TcpState::TimeWait => {
                connection.abort(shared, None, true);
            }
            TcpState::FinWait2 => connection.start_orphan_timer(now_ns, shared),
            _ => connection.queue_fin(),
        }
        self.update(now_ns, id.index);
        self.flush(interface, now_ns, arena);
    }

    /// Implements [`crate::Stack::tcp_abort`].
    pub(crate) fn abort(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
    ) {
        let Some((connection, shared)) = self.get_mut(id) else { return };
        connection.flags.insert(ConnFlags::ORPHAN);
        let reset = connection.state != TcpState::TimeWait;
        connection.abort(shared, None, reset);
        self.update(now_ns, id.index);
        self.flush(interface, now_ns, arena);
    }

    /// Implements [`crate::Stack::tcp_state`].
    pub(crate) fn state(&self, id: TcpId) -> Option<TcpState> {
        self.get(id).map(|connection| connection.state)
    }

    /// Implements [`crate::Stack::tcp_readiness`].
    pub(crate) fn readiness(&self, id: TcpId) -> TcpReadiness {
        let Some(connection) = self.get(id) else {
            return TcpReadiness {
                readable: true,
                writable: true,
                read_closed: true,
                write_closed: true,
                failed: false,
            };
        };
        let is_closed = connection.state == TcpState::Closed;
        let read_closed = connection.has_read_ended() || is_closed;
        let write_closed = connection.flags.contains(ConnFlags::FIN_QUEUED) || is_closed;
        let has_space = connection.can_send()
            && connection.has_send_space()
            && connection.appendable_bytes(&self.shared.pool) > 0;
        TcpReadiness {
            readable: connection.readable() > 0 || read_closed,
            writable: has_space || write_closed,
            read_closed,
            write_closed,
            failed: connection.failure.is_some(),
        }
    }

    /// Implements [`crate::Stack::tcp_has_read_ended`].
    pub(crate) fn has_read_ended(&self, id: TcpId) -> bool {
        self.get(id).is_none_or(Connection::has_read_ended)
    }

    /// Implements [`crate::Stack::tcp_readable`].
    pub(crate) fn readable(&self, id: TcpId) -> usize {
        self.get(id).map_or(0, |connection| connection.readable() as usize)
    }

    /// Implements [`crate::Stack::tcp_writable`].
    pub(crate) fn writable(&self, id: TcpId) -> usize {
        let open = self.get(id).filter(|connection| connection.can_send());
        open.map_or(0, |connection| connection.appendable_bytes(&self.shared.pool))
    }

    /// Implements [`crate::Stack::tcp_local_addr`].
    pub(crate) fn local_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.get(id).map(|connection| connection.tuple.local())
    }

    /// Implements [`crate::Stack::tcp_peer_addr`].
    pub(crate) fn peer_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.get(id).map(|connection| connection.tuple.remote())
    }

    /// Implements [`crate::Stack::tcp_take_error`].
    pub(crate) fn take_error(&mut self, id: TcpId) -> Option<TcpError> {
        let (connection, _) = self.get_mut(id)?;
        let failure = connection.failure.take()?;
        Some(TcpError::from_failure(failure, connection.tuple.remote()))
    }

    /// Implements [`crate::Stack::tcp_options`].
    pub(crate) fn options(&self, id: TcpId) -> Option<TcpOptions> {
        self.get(id).map(|connection| *connection.options)
    }

    /// Implements [`crate::Stack::tcp_set_options`].
    pub(crate) fn set_options(
        &mut self,
        interface: &mut Interface,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        options: TcpOptions,
    ) -> Result<(), TcpError> {
        let (connection, shared) = self.get_mut(id).ok_or(TcpError::Closed)?;
        // Port sharing is fixed when the socket is bound.
        let TcpOptions { reuse_port, owner, .. } = *connection.options;
        connection.options = shared.intern_options(TcpOptions { reuse_port, owner, ..options });
        if connection.is_synchronized() && connection.state != TcpState::TimeWait {
            connection.timers.start_keepalive(now_ns, connection.options.keepalive);
        }
        // The new options may release data that Nagle held back.
        connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.update(now_ns, id.index);
        self.flush(interface, now_ns, arena);
        Ok(())
    }

    /// Implements [`crate::Stack::tcp_info`].
    pub(crate) fn info(&self, id: TcpId) -> Option<TcpInfo> {
        let connection = self.get(id)?;
        let window = connection.recovery.controller.window;
        Some(TcpInfo {
            state: connection.state,
            rtt_ns: connection.recovery.rtt.smoothed_ns(),
            rtt_variation_ns: connection.recovery.rtt.variation_ns(),
            min_rtt_ns: Some(connection.recovery.rtt.min_ns()).filter(|&ns| ns > 0),
            rto_ns: connection.recovery.rtt.rto_ns(),
            recovery: connection.recovery.phase,
            retries: connection.recovery.retries,
            unreachable: connection.soft_failure.and_then(Failure::unreachable_reason),
            cwnd_bytes: window.cwnd,
            ssthresh_bytes: window.ssthresh,
            send_window_bytes: connection.send.window,
            receive_window_bytes: connection.receive.window(),
            mss_bytes: connection.send.mss,
            unacknowledged_bytes: connection.send.queued_bytes,
            unsent_bytes: connection.send.unsent(),
            lost_bytes: connection.recovery.lost_bytes(),
            unread_bytes: connection.readable(),
            sack: connection.flags.contains(ConnFlags::SACK),
            timestamps: connection.flags.contains(ConnFlags::TIMESTAMPS),
            ecn: connection.flags.contains(ConnFlags::ECN),
            send_window_shift: connection.receive.peer_window_shift,
            receive_window_shift: connection.receive.window_shift,
            traffic: connection.traffic,
        })
    }

    /// Implements [`crate::Stack::tcp_exists`].
    pub(crate) fn exists(&self, id: TcpId) -> bool {
        self.connections.get(id).is_some()
    }

    /// Implements [`crate::Stack::tcp_report_end`].
    pub(crate) fn report_end(&mut self, id: TcpId) -> bool {
        if !self.exists(id) {
            return false;
        }
        if let Some(connection) = self.connections.at_mut(id.index) {
            connection.flags.insert(ConnFlags::REPORT_END);
        }
        true
    }

    /// Implements [`crate::Stack::tcp_unfinished`].
    pub(crate) fn unfinished(&self) -> bool {
        self.connections.iter().any(|connection| {
            connection.flags.contains(ConnFlags::ORPHAN) && connection.can_transmit()
        })
    }

    /// Implements [`crate::Stack::tcp_memory_used`].
    pub(crate) fn memory_used(&self) -> usize {
        self.shared.pool.used() * BUFFER_BYTES
    }

    /// Implements [`crate::Stack::tcp_connections`].
    pub(crate) fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Implements [`crate::Stack::tcp_lingering`].
    pub(crate) fn lingering(&self) -> impl Iterator<Item = (TcpId, SocketAddr, TcpOptions)> {
        let slots = (0_u32..).zip(self.connections.slots());
        slots.filter_map(|(index, (generation, connection))| {
            let was_closed = |known: &&Connection| {
                known.flags.contains(ConnFlags::ORPHAN) && known.listener.is_none()
            };
            let connection = connection.filter(was_closed)?;
            let local = connection.tuple.local();
            Some((TcpId { index, generation }, local, *connection.options))
        })
    }

    /// Implements [`crate::Stack::tcp_sockets`].
    pub(crate) fn connection_ids(&self) -> impl Iterator<Item = TcpId> {
        let slots = (0_u32..).zip(self.connections.slots());
        slots.filter_map(|(index, (generation, connection))| {
            connection.map(|_| TcpId { index, generation })
        })
    }

    /// Implements [`crate::Stack::tcp_states`].
    pub(crate) fn states(&self) -> impl Iterator<Item = (SocketAddr, TcpState)> {
        self.connections.iter().map(|connection| (connection.tuple.local(), connection.state))
    }
}
