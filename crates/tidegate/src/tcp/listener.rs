//! Listening for connections.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate_engine::Claim;
use tidegate_stack::{TcpId, TcpListenerId, TcpOptions};

use super::{TcpStream, patience};
use crate::calls::{Calls, unless_blocked};
use crate::net::Net;
use crate::poll::{Pollable, Source};
use crate::udp::first_that_works;
use crate::wait::SocketId;

/// Connections that wait to be accepted, unless another number is asked for.
const BACKLOG: usize = 1024;

/// A listener for TCP connections on a [`Net`], in the style of
/// `std::net::TcpListener`.
#[derive(Clone)]
pub struct TcpListener {
    pub(super) inner: Arc<ListenerInner>,
}

pub(super) struct ListenerInner {
    pub(super) net: Net,
    pub(super) id: TcpListenerId,
    nonblocking: AtomicBool,
    claim: Option<Arc<Claim>>,
}

impl TcpListener {
    /// Listens on the first of the addresses that it can. Port 0 lets the stack
    /// choose; the unspecified address takes connections to every address of
    /// the stack, that of IPv6 also those over IPv4.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`], [`io::ErrorKind::AddrNotAvailable`] for an
    /// address that is not of this stack, and what resolving a name gives.
    pub fn bind(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        let options = TcpOptions { dual_stack: true, ..TcpOptions::default() };
        Self::bind_with(net, address, BACKLOG, options)
    }

    /// As [`TcpListener::bind`], with room for `backlog` connections that were
    /// not accepted yet, and with options for all of them.
    ///
    /// # Errors
    /// As [`TcpListener::bind`].
    pub fn bind_with(
        net: &Net,
        address: impl ToSocketAddrs,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Self> {
        first_that_works(address, |address| Self::bind_one(net, address, backlog, options))
    }

    fn bind_one(
        net: &Net,
        address: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let (id, claim) = net.with(|calls| calls.tcp_listen(address, backlog, options))?;
        Ok(Self::new(net, id, claim))
    }

    pub(crate) fn new(net: &Net, id: TcpListenerId, claim: Option<Arc<Claim>>) -> Self {
        let nonblocking = AtomicBool::new(false);
        let inner = ListenerInner { net: net.clone(), id, nonblocking, claim };
        Self { inner: Arc::new(inner) }
    }

    /// Waits for a connection. Returns it with the peer's address.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the listener is non-blocking and no
    /// connection waits.
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let inner = &*self.inner;
        let patience = patience(&inner.nonblocking, None);
        let ids = [SocketId::Listener(inner.id)];
        let accept = |calls: &mut dyn Calls| unless_blocked(calls.tcp_accept(inner.id));
        let (id, peer) = inner.net.wait_for(&ids, patience, accept)?;
        Ok((self.stream(id), peer))
    }

    pub(crate) fn listener_id(&self) -> TcpListenerId {
        self.inner.id
    }

    pub(crate) fn stream(&self, id: TcpId) -> TcpStream {
        TcpStream::new(&self.inner.net, id, self.inner.claim.clone())
    }

    /// Connections, one after the other, for ever.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<TcpStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// None while it is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|calls| calls.tcp_listener_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Whether [`TcpListener::accept`] returns at once with
    /// [`io::ErrorKind::WouldBlock`] instead of waiting.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.inner.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// A second handle on the same listener.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }
}

impl Source for TcpListener {}

impl Pollable for TcpListener {
    fn net(&self) -> &Net {
        &self.inner.net
    }

    fn id(&self) -> SocketId {
        SocketId::Listener(self.inner.id)
    }
}

impl std::fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpListener").field("local", &self.local_addr().ok()).finish()
    }
}

impl Drop for ListenerInner {
    fn drop(&mut self) {
        let (id, claim) = (self.id, self.claim.take());
        self.net.with(|calls| {
            calls.polls().forget(SocketId::Listener(id));
            calls.tasks().forget(SocketId::Listener(id));
            calls.tcp_close_listener(id, claim);
        });
    }
}
