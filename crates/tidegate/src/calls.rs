//! What sockets ask of a stack, wherever it runs: in this program ([`Core`]) or
//! in the daemon ([`crate::attached`]). Nothing here waits.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_engine::Claim;
use tidegate_stack::{
    SendError, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, UdpId, UdpOptions,
};

use crate::net::Core;
use crate::poll::{Polls, Ready};
use crate::readiness::Readiness;
use crate::tasks::Tasks;
use crate::udp::Received;
use crate::wait::{SetNumber, SocketId, Waiters};

/// Why a call gave nothing.
pub(crate) enum CallError {
    /// Try again when the socket is ready.
    WouldBlock,
    /// Do not.
    Failed(io::Error),
}

/// What a call gave.
pub(crate) type Called<R> = Result<R, CallError>;

impl From<TcpError> for CallError {
    fn from(error: TcpError) -> Self {
        match error {
            TcpError::WouldBlock => Self::WouldBlock,
            error => Self::Failed(error.into()),
        }
    }
}

impl From<SendError> for CallError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::WouldBlock => Self::WouldBlock,
            error => Self::Failed(error.into()),
        }
    }
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::WouldBlock,
            _ => Self::Failed(error),
        }
    }
}

impl From<CallError> for io::Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::WouldBlock => io::ErrorKind::WouldBlock.into(),
            CallError::Failed(error) => error,
        }
    }
}

/// Nothing yet is `None`.
pub(crate) fn unless_blocked<R>(called: Called<R>) -> Option<io::Result<R>> {
    match called {
        Ok(result) => Some(Ok(result)),
        Err(CallError::WouldBlock) => None,
        Err(CallError::Failed(error)) => Some(Err(error)),
    }
}

/// A socket, and what was taken from the kernel for it.
pub(crate) type Made<I> = (I, Option<Arc<Claim>>);

/// What sockets ask of a stack.
pub(crate) trait Calls {
    /// The stack, if it runs in this program.
    fn core(&mut self) -> Option<&mut Core>;

    /// Sets of sockets that programs wait for.
    fn polls(&mut self) -> &mut Polls;
    /// Threads that sleep.
    fn waiters(&mut self) -> &mut Waiters;
    /// Tasks that wait.
    fn tasks(&mut self) -> &mut Tasks;
    /// Why nothing will come any more.
    fn failure(&self) -> Option<io::Error>;
    /// What a socket is ready for.
    fn readiness(&mut self, id: SocketId) -> Readiness;
    /// Tells of at most `limit` sockets of a set that are ready.
    fn collect(&mut self, set: SetNumber, limit: usize, tell: &mut dyn FnMut(Ready));

    /// Whether an address is one of the stack's.
    fn has_address(&mut self, address: IpAddr) -> bool;
    /// The address that packets to `destination` leave from.
    fn source_for(&mut self, destination: IpAddr) -> Option<IpAddr>;

    /// Reads the clock for the calls that follow.
    fn read_clock(&mut self);
    /// Sends what calls have made, and tells those whom it concerns.
    fn commit(&mut self) -> io::Result<()>;
    /// As [`Calls::commit`], or together with what other tasks make.
    fn commit_later(&mut self) -> io::Result<()>;
    /// The thread that holds the stack lets it go.
    fn on_release(&mut self);

    fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Made<TcpListenerId>>;
    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr>;
    fn tcp_accept(&mut self, id: TcpListenerId) -> Called<(TcpId, SocketAddr)>;
    fn tcp_close_listener(&mut self, id: TcpListenerId, claim: Option<Arc<Claim>>);
    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Made<TcpId>>;
    /// Whether a connection is established, or how that failed.
    fn tcp_finish_connect(&mut self, id: TcpId) -> Called<()>;
    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize>;
    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize>;
    fn tcp_recv_with(&mut self, id: TcpId, read: &mut dyn FnMut(&[u8]) -> usize) -> Called<usize>;
    /// How much can be read at once.
    fn tcp_readable(&mut self, id: TcpId) -> usize;
    /// How much can be written at once.
    fn tcp_writable(&mut self, id: TcpId) -> usize;
    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> Called<usize>;
    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> Called<usize>;
    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()>;
    fn tcp_local_addr(&mut self, id: TcpId) -> Option<SocketAddr>;
    fn tcp_peer_addr(&mut self, id: TcpId) -> Option<SocketAddr>;
    fn tcp_info(&mut self, id: TcpId) -> Option<TcpInfo>;
    fn tcp_options(&mut self, id: TcpId) -> Option<TcpOptions>;
    fn tcp_set_options(&mut self, id: TcpId, options: TcpOptions) -> io::Result<()>;
    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error>;
    /// The program has no handle on a connection any more.
    fn tcp_end(&mut self, id: TcpId, abrupt: bool, claim: Option<Arc<Claim>>);

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<Made<UdpId>>;
    fn udp_close(&mut self, id: UdpId, claim: Option<Arc<Claim>>);
    fn udp_connect(&mut self, id: UdpId, peer: Option<SocketAddr>) -> io::Result<()>;
    fn udp_local_addr(&mut self, id: UdpId) -> Option<SocketAddr>;
    fn udp_peer_addr(&mut self, id: UdpId) -> Option<SocketAddr>;
    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> Called<Received>;
    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> Called<()>;
    /// Transmits datagrams that calls have made.
    fn udp_flush(&mut self) -> io::Result<()>;
    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error>;
}

/// Several buffers, one after the other, as far as it goes.
pub(crate) fn one_after_another<T>(
    pieces: impl IntoIterator<Item = T>,
    mut call: impl FnMut(T) -> Called<(usize, bool)>,
) -> Called<usize> {
    let mut total = 0;
    for piece in pieces {
        match call(piece) {
            Ok((len, goes_on)) => {
                total += len;
                if !goes_on {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}
