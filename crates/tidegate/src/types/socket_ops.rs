//! Non-blocking socket operations: the interface between sockets and backends.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_engine::PortClaim;
use tidegate_stack::{
    Shutdown, TcpId, TcpInfo, TcpListenerId, TcpOptions, UdpErrorReport, UdpId, UdpOptions,
    UdpSendOptions,
};

use super::added_readiness::AddedReadiness;
use super::datagram::DatagramMeta;
use super::errors::OpResult;
use super::poll_sets::PollSets;
use super::readiness::{Readiness, Ready};
use super::socket_id::{PollSetId, SocketId};
use super::tasks::Tasks;
use super::waiters::Waiters;

/// New socket, and the port claimed from the kernel for it.
pub(crate) type NewSocket<I> = (I, Option<Arc<PortClaim>>);

/// Socket operations of a stack.
pub(crate) trait SocketOps {
    /// Poll sets of the application.
    fn poll_sets(&mut self) -> &mut PollSets;
    /// Sleeping threads.
    fn waiters(&mut self) -> &mut Waiters;
    /// Waiting tasks.
    fn tasks(&mut self) -> &mut Tasks;
    /// Sockets that the application has closed while it still has them.
    fn added_readiness(&mut self) -> &mut AddedReadiness;
    /// Wakes the threads and tasks that wait for a socket, alone or in a set.
    fn notify(&mut self, id: SocketId);
    /// Error that ended the stack, if it has failed.
    fn failure(&self) -> Option<io::Error>;
    /// Takes the notifications of another process that has the stack: for applications that ask for
    /// readiness without a wait.
    fn take_notifications(&mut self);
    /// Current readiness of a socket. Takes no notifications.
    fn readiness(&mut self, id: SocketId) -> Readiness;
    /// Reports at most `limit` ready sockets of a set.
    fn collect_ready(&mut self, set: PollSetId, limit: usize, report: &mut dyn FnMut(Ready));

    /// True if `address` is one of the stack's.
    fn has_address(&mut self, address: IpAddr) -> bool;
    /// True if a datagram socket can be bound to `address`.
    fn has_datagram_address(&mut self, address: IpAddr) -> bool;
    /// Longest packet to `destination` that is not fragmented, as far as is known.
    fn path_mtu(&mut self, destination: IpAddr) -> Option<usize>;
    /// Source address of packets to `destination`.
    fn source_for(&mut self, destination: IpAddr) -> Option<IpAddr>;

    /// Reads the clock for the calls that follow.
    fn read_clock(&mut self);
    /// Transmits the segments of the previous calls, and dispatches events.
    fn commit(&mut self) -> io::Result<()>;
    /// Like [`SocketOps::commit`], or together with the segments of other tasks.
    fn commit_later(&mut self) -> io::Result<()>;
    /// Begins operations that are committed together.
    fn begin_batch(&mut self);
    /// Commits the operations since [`SocketOps::begin_batch`], among them receives from the
    /// sockets `read`.
    fn end_batch(&mut self, read: &[SocketId]) -> io::Result<()>;
    /// True if data may arrive before the event of its socket.
    fn has_early_data(&self) -> bool;
    /// Called when a thread unlocks the stack.
    fn on_release(&mut self);

    fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<NewSocket<TcpListenerId>>;
    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr>;
    /// Sets the options that a listener passes on to new connections.
    fn tcp_set_listener_options(
        &mut self,
        id: TcpListenerId,
        options: TcpOptions,
    ) -> io::Result<()>;
    fn tcp_accept(&mut self, id: TcpListenerId) -> OpResult<(TcpId, SocketAddr)>;
    fn tcp_close_listener(&mut self, id: TcpListenerId, claim: Option<Arc<PortClaim>>);
    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<NewSocket<TcpId>>;
    /// Succeeds once the connection is established; fails with its error.
    fn tcp_finish_connect(&mut self, id: TcpId) -> OpResult<()>;
    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> OpResult<usize>;
    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> OpResult<usize>;
    fn tcp_recv_with(&mut self, id: TcpId, read: &mut dyn FnMut(&[u8]) -> usize)
    -> OpResult<usize>;
    /// Bytes that can be read at once.
    fn tcp_readable(&mut self, id: TcpId) -> usize;
    /// Bytes that can be written at once.
    fn tcp_writable(&mut self, id: TcpId) -> usize;
    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> OpResult<usize>;
    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> OpResult<usize>;
    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()>;
    fn tcp_local_addr(&mut self, id: TcpId) -> Option<SocketAddr>;
    fn tcp_peer_addr(&mut self, id: TcpId) -> Option<SocketAddr>;
    fn tcp_info(&mut self, id: TcpId) -> Option<TcpInfo>;
    fn tcp_options(&mut self, id: TcpId) -> Option<TcpOptions>;
    fn tcp_set_options(&mut self, id: TcpId, options: TcpOptions) -> io::Result<()>;
    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error>;
    /// Closes a connection whose last handle was dropped; resets it if `reset_on_close`.
    fn tcp_close(&mut self, id: TcpId, reset_on_close: bool, claim: Option<Arc<PortClaim>>);

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<NewSocket<UdpId>>;
    fn udp_close(&mut self, id: UdpId, claim: Option<Arc<PortClaim>>);
    fn udp_connect(&mut self, id: UdpId, peer: Option<SocketAddr>) -> io::Result<()>;
    fn udp_local_addr(&mut self, id: UdpId) -> Option<SocketAddr>;
    fn udp_peer_addr(&mut self, id: UdpId) -> Option<SocketAddr>;
    fn udp_set_options(&mut self, id: UdpId, options: UdpOptions) -> io::Result<()>;
    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> OpResult<DatagramMeta>;
    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        options: UdpSendOptions,
    ) -> OpResult<()>;
    /// Transmits the datagrams of the previous calls.
    fn udp_flush(&mut self) -> io::Result<()>;
    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error>;
    fn udp_take_error_report(&mut self, id: UdpId) -> io::Result<Option<UdpErrorReport>>;
}
