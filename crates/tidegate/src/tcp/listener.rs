//! TCP listeners.

use std::io;
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_engine::PortClaim;
use tidegate_stack::{TcpId, TcpListenerId, TcpOptions};

use super::stream::TcpStream;
use crate::net::handle::Net;
use crate::net::source::{Pollable, Source};
use crate::types::deadline::Deadline;
use crate::types::errors::{try_each_address, unless_blocked};
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// Default accept queue length, in connections.
const BACKLOG: usize = 1024;

/// TCP listener on a [`Net`], in the style of `std::net::TcpListener`.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
///
/// use tidegate::{Net, NetConfig, TcpListener, TcpStream};
///
/// let (device_a, device_b) = tidegate::mem::wire(&Default::default())?;
/// let a = Net::open(NetConfig::new(device_a).address("192.0.2.1/24".parse().unwrap()))?;
/// let b = Net::open(NetConfig::new(device_b).address("192.0.2.2/24".parse().unwrap()))?;
///
/// let listener = TcpListener::bind(&a, "192.0.2.1:7")?;
/// let server = std::thread::spawn(move || -> std::io::Result<()> {
///     let (mut stream, _peer) = listener.accept()?;
///     stream.write_all(b"hello")
/// });
///
/// let mut stream = TcpStream::connect(&b, "192.0.2.1:7")?;
/// let mut received = String::new();
/// stream.read_to_string(&mut received)?;
/// assert_eq!(received, "hello");
/// server.join().unwrap()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct TcpListener {
    pub(super) inner: Arc<ListenerInner>,
}

pub(super) struct ListenerInner {
    pub(super) net: Net,
    pub(super) id: TcpListenerId,
    nonblocking: AtomicBool,
    claim: Mutex<Option<Arc<PortClaim>>>,
    is_closed: AtomicBool,
}

impl TcpListener {
    /// Listens on the first of the addresses that can be bound. With port 0 the stack chooses a
    /// port. The unspecified address accepts connections to every address of the stack; the
    /// unspecified IPv6 address accepts IPv4 connections as well.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`], [`io::ErrorKind::AddrNotAvailable`] for an address that the
    /// stack does not have, and errors of name resolution.
    pub fn bind(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        let options = TcpOptions::default().dual_stack(true);
        Self::bind_with(net, address, BACKLOG, options)
    }

    /// Like [`TcpListener::bind`], with an accept queue of `backlog` connections, and with
    /// options for all connections.
    ///
    /// # Errors
    /// As [`TcpListener::bind`].
    pub fn bind_with(
        net: &Net,
        address: impl ToSocketAddrs,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Self> {
        try_each_address(address, |address| Self::bind_one(net, address, backlog, options))
    }

    fn bind_one(
        net: &Net,
        address: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let (id, claim) = net.with(|ops| ops.tcp_listen(address, backlog, options))?;
        Ok(Self::new(net, id, claim))
    }

    pub(crate) fn new(net: &Net, id: TcpListenerId, claim: Option<Arc<PortClaim>>) -> Self {
        let nonblocking = AtomicBool::new(false);
        let (claim, is_closed) = (Mutex::new(claim), AtomicBool::new(false));
        let inner = ListenerInner { net: net.clone(), id, nonblocking, claim, is_closed };
        Self { inner: Arc::new(inner) }
    }

    /// Waits for a connection. Returns its stream and the peer's address.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the listener is non-blocking and no connection is
    /// waiting.
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let inner = &*self.inner;
        let deadline = Deadline::of_call(&inner.nonblocking, None);
        let ids = [SocketId::Listener(inner.id)];
        let accept = |ops: &mut dyn SocketOps| unless_blocked(ops.tcp_accept(inner.id));
        let (id, peer) = inner.net.wait_until(&ids, deadline, accept)?;
        Ok((self.stream(id), peer))
    }

    pub(crate) fn listener_id(&self) -> TcpListenerId {
        self.inner.id
    }

    pub(crate) fn stream(&self, id: TcpId) -> TcpStream {
        let claim = self.inner.lock_claim().clone();
        TcpStream::new(&self.inner.net, id, claim)
    }

    /// Stops listening at once, although there are other handles. Their calls, also those that
    /// wait, return [`io::ErrorKind::NotConnected`]. Connections that no call has accepted are
    /// reset.
    pub fn close(&self) {
        self.inner.close();
    }

    /// Endless iterator over accepted connections.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<TcpStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// Local address of the listener.
    ///
    /// # Errors
    /// None while the listener is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|ops| ops.tcp_listener_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Sets the options of new connections. Port sharing, and whether the listener accepts both
    /// families, are fixed.
    ///
    /// # Errors
    /// None while the listener is open.
    pub fn set_options(&self, options: TcpOptions) -> io::Result<()> {
        self.inner.net.with(|ops| ops.tcp_set_listener_options(self.inner.id, options))
    }

    /// Makes [`TcpListener::accept`] return [`io::ErrorKind::WouldBlock`] instead of waiting.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.inner.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Creates a second handle of the same listener.
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

impl ListenerInner {
    fn lock_claim(&self) -> MutexGuard<'_, Option<Arc<PortClaim>>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return;
        }
        let claim = self.lock_claim().take();
        self.net.with(|ops| {
            let id = SocketId::Listener(self.id);
            ops.tcp_close_listener(self.id, claim);
            ops.added_readiness().close(id, Shutdown::Both);
            ops.notify(id);
        });
    }
}

impl Drop for ListenerInner {
    fn drop(&mut self) {
        self.close();
        let id = SocketId::Listener(self.id);
        self.net.with(|ops| {
            ops.poll_sets().forget(id);
            ops.tasks().forget(id);
            ops.added_readiness().forget(id);
        });
    }
}
