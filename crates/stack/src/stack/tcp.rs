//! TCP calls of a stack.

use std::net::SocketAddr;

use tidegate_memory::Arena;

use super::Stack;
use crate::tcp::{
    Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpReadiness, TcpSecrets,
    TcpState,
};

impl Stack {
    /// Listens on `local`. Port 0 selects a free port; the unspecified address accepts connections
    /// to any local address. The accept queue holds at most `backlog` connections.
    ///
    /// # Errors
    /// When the address is not local or in use, no port is free, or the limit of listeners is
    /// reached.
    #[inline]
    pub fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> Result<TcpListenerId, TcpError> {
        self.tcp.listen(&mut self.interface, local, backlog, options)
    }

    /// Returns the local address of a listener.
    #[inline]
    pub fn tcp_listener_addr(&self, id: TcpListenerId) -> Option<SocketAddr> {
        self.tcp.listener_addr(id)
    }

    /// Returns the options of a listener.
    #[inline]
    pub fn tcp_listener_options(&self, id: TcpListenerId) -> Option<TcpOptions> {
        self.tcp.listener_options(id)
    }

    /// Changes the options that a listener passes on to new connections. What decides on its
    /// addresses (`reuse_port`, `owner`, `dual_stack`) does not change.
    ///
    /// # Errors
    /// [`TcpError::Closed`] when the handle is not valid.
    pub fn tcp_set_listener_options(
        &mut self,
        id: TcpListenerId,
        options: TcpOptions,
    ) -> Result<(), TcpError> {
        self.tcp.set_listener_options(id, options)
    }

    /// Number of connections in the accept queue.
    #[inline]
    pub fn tcp_acceptable(&self, id: TcpListenerId) -> usize {
        self.tcp.acceptable(id)
    }

    /// Removes the oldest connection from the accept queue. The connection may have ended
    /// meanwhile.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when the accept queue is empty; [`TcpError::Closed`] when the
    /// listener does not exist.
    #[inline]
    pub fn tcp_accept(&mut self, id: TcpListenerId) -> Result<TcpId, TcpError> {
        self.tcp.accept(id)
    }

    /// Closes a listener. Connections in its accept queue are reset.
    #[inline]
    pub fn tcp_close_listener(&mut self, now_ns: u64, arena: &mut Arena, id: TcpListenerId) {
        self.tcp.close_listener(&mut self.interface, now_ns, arena, id);
    }

    /// Starts a connection to `remote`; data can be written once it is established. `local` sets
    /// the local address and port; the unspecified address and port 0 let the stack choose.
    ///
    /// # Errors
    /// When there is no route, the local address is not available, the four-tuple is in use, no
    /// port is free, or the limit of connections is reached.
    #[inline]
    pub fn tcp_connect(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> Result<TcpId, TcpError> {
        self.tcp.connect(&mut self.interface, now_ns, arena, local, remote, options)
    }

    /// Writes as much of `data` as the send buffer takes, and flushes. Returns the bytes written.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when the send buffer is full; [`TcpError::BrokenPipe`] after
    /// [`Stack::tcp_shutdown`]; [`TcpError::NotConnected`] before the connection is established;
    /// the error that ended the connection.
    #[inline]
    pub fn tcp_send(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        data: &[u8],
    ) -> Result<usize, TcpError> {
        self.tcp.send(&mut self.interface, now_ns, arena, id, data)
    }

    /// Writes like [`Stack::tcp_send`] without a flush: the segments are sent with the next burst
    /// or [`Stack::tcp_flush`].
    ///
    /// # Errors
    /// As [`Stack::tcp_send`].
    #[inline]
    pub fn tcp_send_unflushed(&mut self, id: TcpId, data: &[u8]) -> Result<usize, TcpError> {
        self.tcp.send_unflushed(id, data)
    }

    /// Lets `write` fill contiguous send buffer memory, at most `limit` bytes: the data is not
    /// copied again until the peer has acknowledged it. `write` returns the bytes written; the
    /// prior content of the memory has no meaning. Sends like [`Stack::tcp_send_unflushed`].
    ///
    /// # Errors
    /// As [`Stack::tcp_send`]; `write` is then not called.
    #[inline]
    pub fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize, TcpError> {
        self.tcp.send_with(id, limit, write)
    }

    /// Reads received data into `buf`, and flushes. Returns the bytes read; 0 means the end of the
    /// peer's data.
    ///
    /// # Errors
    /// [`TcpError::WouldBlock`] when no data has arrived; [`TcpError::NotConnected`] before the
    /// connection is established; the error that ended the connection.
    #[inline]
    pub fn tcp_recv(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        self.tcp.recv(&mut self.interface, now_ns, arena, id, buf)
    }

    /// Reads like [`Stack::tcp_recv`] without a flush: a window update is sent with the next burst
    /// or [`Stack::tcp_flush`].
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    #[inline]
    pub fn tcp_recv_unflushed(
        &mut self,
        now_ns: u64,
        id: TcpId,
        buf: &mut [u8],
    ) -> Result<usize, TcpError> {
        self.tcp.recv_unflushed(now_ns, id, buf)
    }

    /// Copies the data that [`Stack::tcp_recv`] would read next, and leaves it in the receive
    /// buffer.
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    #[inline]
    pub fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Result<usize, TcpError> {
        self.tcp.peek(id, buf)
    }

    /// Passes `read` the first contiguous received bytes in place. `read` returns the bytes used,
    /// which are then removed.
    ///
    /// # Errors
    /// As [`Stack::tcp_recv`].
    #[inline]
    pub fn tcp_recv_with(
        &mut self,
        now_ns: u64,
        id: TcpId,
        read: impl FnOnce(&[u8]) -> usize,
    ) -> Result<usize, TcpError> {
        self.tcp.recv_with(now_ns, id, read)
    }

    /// Shuts down one direction of a connection or both. Data written before is still sent. A
    /// connection that waits for the answer to its SYN ends with [`TcpError::Reset`].
    ///
    /// # Errors
    /// [`TcpError::NotConnected`] before the connection is established; [`TcpError::Closed`] when
    /// the handle is not valid.
    #[inline]
    pub fn tcp_shutdown(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        how: Shutdown,
    ) -> Result<(), TcpError> {
        self.tcp.shutdown(&mut self.interface, now_ns, arena, id, how)
    }

    /// Closes the handle. Written data is still sent, followed by a FIN. If received data is
    /// unread, the connection is reset instead, which tells the peer of the loss (RFC 9293
    /// section 3.10.4, RFC 1122 section 4.2.2.13).
    #[inline]
    pub fn tcp_close(&mut self, now_ns: u64, arena: &mut Arena, id: TcpId) {
        self.tcp.close(&mut self.interface, now_ns, arena, id);
    }

    /// Closes the handle and resets the connection. Unacknowledged data is lost.
    #[inline]
    pub fn tcp_abort(&mut self, now_ns: u64, arena: &mut Arena, id: TcpId) {
        self.tcp.abort(&mut self.interface, now_ns, arena, id);
    }

    /// Returns the state of a connection.
    #[inline]
    pub fn tcp_state(&self, id: TcpId) -> Option<TcpState> {
        self.tcp.state(id)
    }

    /// Returns the readiness of a connection. A handle that is not valid is ready for everything.
    #[inline]
    pub fn tcp_readiness(&self, id: TcpId) -> TcpReadiness {
        self.tcp.readiness(id)
    }

    /// True if the peer has ended its data or reading was shut down: once all is read, reads give
    /// the end of the stream, also if the connection has failed since. True for a closed handle.
    pub fn tcp_has_read_ended(&self, id: TcpId) -> bool {
        self.tcp.has_read_ended(id)
    }

    /// Bytes that can be read.
    #[inline]
    pub fn tcp_readable(&self, id: TcpId) -> usize {
        self.tcp.readable(id)
    }

    /// Bytes that can be written: free in the send buffer and backed by memory.
    #[inline]
    pub fn tcp_writable(&self, id: TcpId) -> usize {
        self.tcp.writable(id)
    }

    /// Returns the local address of a connection.
    #[inline]
    pub fn tcp_local_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.tcp.local_addr(id)
    }

    /// Returns the peer's address of a connection.
    #[inline]
    pub fn tcp_peer_addr(&self, id: TcpId) -> Option<SocketAddr> {
        self.tcp.peer_addr(id)
    }

    /// Takes the error that ended a connection; it is reported once.
    #[inline]
    pub fn tcp_take_error(&mut self, id: TcpId) -> Option<TcpError> {
        self.tcp.take_error(id)
    }

    /// Returns the options of a connection.
    #[inline]
    pub fn tcp_options(&self, id: TcpId) -> Option<TcpOptions> {
        self.tcp.options(id)
    }

    /// Changes the options of a connection. The window scale and the options of port sharing
    /// (`reuse_port`, `owner`) do not change.
    ///
    /// # Errors
    /// [`TcpError::Closed`] when the handle is not valid.
    #[inline]
    pub fn tcp_set_options(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        id: TcpId,
        options: TcpOptions,
    ) -> Result<(), TcpError> {
        self.tcp.set_options(&mut self.interface, now_ns, arena, id, options)
    }

    /// Returns state, round trip, windows and options of a connection.
    #[inline]
    pub fn tcp_info(&self, id: TcpId) -> Option<TcpInfo> {
        self.tcp.info(id)
    }

    /// True while the connection exists, also after its handle was closed.
    #[inline]
    pub fn tcp_exists(&self, id: TcpId) -> bool {
        self.tcp.exists(id)
    }

    /// Requests [`crate::Event::TcpEnded`] for a connection whose handle was closed. Returns false
    /// if the connection has terminated already.
    #[inline]
    pub fn tcp_report_end(&mut self, id: TcpId) -> bool {
        self.tcp.report_end(id)
    }

    /// True while a connection whose handle was closed may still have data or a FIN to deliver.
    /// Visits all connections.
    #[inline]
    pub fn tcp_unfinished(&self) -> bool {
        self.tcp.unfinished()
    }

    /// Memory that holds data of connections, in bytes.
    #[inline]
    pub fn tcp_memory_used(&self) -> usize {
        self.tcp.memory_used()
    }

    /// Number of connections in any state.
    #[inline]
    pub fn tcp_connections(&self) -> usize {
        self.tcp.connection_count()
    }

    /// Iterates over the connections whose handles were closed and that have not ended yet: handle,
    /// local address, options.
    #[inline]
    pub fn tcp_lingering(&self) -> impl Iterator<Item = (TcpId, SocketAddr, TcpOptions)> {
        self.tcp.lingering()
    }

    /// Iterates over all connections, whether their handles were closed or not: local address and
    /// state.
    #[inline]
    pub fn tcp_states(&self) -> impl Iterator<Item = (SocketAddr, TcpState)> {
        self.tcp.states()
    }

    /// Sends pending segments of all connections, as far as the transmit queue and the arena have
    /// space. The stack calls this at the end of each burst. Without a burst, call it after
    /// [`Stack::tcp_send_unflushed`] and [`Stack::tcp_recv_unflushed`].
    #[inline]
    pub fn tcp_flush(&mut self, now_ns: u64, arena: &mut Arena) {
        self.tcp.flush(&mut self.interface, now_ns, arena);
    }

    /// Enables [`crate::Event::PeerConfirmed`] for each completed TCP handshake.
    pub fn report_confirmed_peers(&mut self) {
        self.tcp.reports_confirmed_peers = true;
    }

    /// Returns the secrets of this stack. Sockets can migrate between stacks of one process only
    /// if they have the same secrets ([`Stack::set_tcp_secrets`]).
    pub fn tcp_secrets(&self) -> TcpSecrets {
        self.tcp.secrets()
    }

    /// Sets the secrets of another stack, so that peers see both stacks as one host. `now_ns` must
    /// come from the same clock in both stacks.
    ///
    /// Call this before creating listeners, and again after [`Stack::restore`], because each saved
    /// stack has a pause of its own. SYN cookies made with the old secrets are no longer accepted;
    /// existing connections are unaffected.
    pub fn set_tcp_secrets(&mut self, secrets: TcpSecrets) {
        self.tcp.set_secrets(secrets);
    }
}
