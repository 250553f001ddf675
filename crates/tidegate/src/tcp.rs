//! TCP sockets.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate_port::steering::Protocol;
use tidegate_stack::{
    Keepalive, Shutdown as Half, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpState,
};

use crate::net::{Core, Net};
use crate::open::Claim;
use crate::poll::{Pollable, Source};
use crate::udp::{first_that_works, set_timeout, timeout};
use crate::wait::{Patience, SocketId};

/// Connections that wait to be accepted, unless another number is asked for.
const BACKLOG: usize = 1024;

/// A listener for TCP connections on a [`Net`], in the style of
/// `std::net::TcpListener`.
#[derive(Clone)]
pub struct TcpListener {
    inner: Arc<ListenerInner>,
}

struct ListenerInner {
    net: Net,
    id: TcpListenerId,
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
        let mut core = net.lock();
        let claim = core.claim(address, options.dual_stack)?;
        let local = claim.as_ref().map_or(address, |claim| claim.local());
        let (stack, _, _) = core.engine.parts();
        let id = match stack.tcp_listen(local, backlog, options) {
            Ok(id) => id,
            Err(error) => {
                core.release(claim);
                return Err(error.into());
            }
        };
        let nonblocking = AtomicBool::new(false);
        let inner = ListenerInner { net: net.clone(), id, nonblocking, claim };
        Ok(Self { inner: Arc::new(inner) })
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
        let (id, peer) = inner.net.wait_for(&ids, patience, |core| {
            let (stack, _, _) = core.engine.parts();
            match stack.tcp_accept(inner.id) {
                Ok(id) => {
                    let peer = stack.tcp_peer_addr(id).ok_or(io::ErrorKind::NotConnected.into());
                    // Others may wait for the next.
                    if stack.tcp_acceptable(inner.id) > 0 && !core.waiters.is_empty() {
                        core.waiters.wake(SocketId::Listener(inner.id));
                    }
                    Some(peer.map(|peer| (id, peer)))
                }
                Err(TcpError::WouldBlock) => None,
                Err(error) => Some(Err(error.into())),
            }
        })?;
        Ok((TcpStream::new(&inner.net, id, inner.claim.clone()), peer))
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
        let core = self.inner.net.lock();
        let address = core.engine.stack().tcp_listener_addr(self.inner.id);
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
        let mut core = self.net.lock();
        core.polls.forget(SocketId::Listener(self.id));
        let now_ns = core.engine.read_clock();
        let (stack, arena, _) = core.engine.parts();
        stack.tcp_close_listener(now_ns, arena, self.id);
        core.release(self.claim.take());
        // A port that takes nothing more says so to the next who uses it.
        let _ = core.commit();
    }
}

/// A TCP connection on a [`Net`], in the style of `std::net::TcpStream`.
///
/// It may be used from several threads at once and passed between them. When
/// the last handle is dropped the connection is closed: what was written still
/// goes out.
#[derive(Clone)]
pub struct TcpStream {
    inner: Arc<StreamInner>,
}

struct StreamInner {
    net: Net,
    id: TcpId,
    nonblocking: AtomicBool,
    /// Whether closing breaks the connection off.
    abrupt: AtomicBool,
    read_timeout: Mutex<Option<Duration>>,
    write_timeout: Mutex<Option<Duration>>,
    claim: Option<Arc<Claim>>,
}

impl TcpStream {
    fn new(net: &Net, id: TcpId, claim: Option<Arc<Claim>>) -> Self {
        let inner = StreamInner {
            net: net.clone(),
            id,
            nonblocking: AtomicBool::new(false),
            abrupt: AtomicBool::new(false),
            read_timeout: Mutex::new(None),
            write_timeout: Mutex::new(None),
            claim,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Connects to the first of the addresses that answers.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionRefused`], [`io::ErrorKind::TimedOut`],
    /// [`io::ErrorKind::HostUnreachable`] and the like, and what resolving a
    /// name gives.
    pub fn connect(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        first_that_works(address, |address| {
            let stream = Self::connect_nonblocking(net, address, TcpOptions::default())?;
            stream.wait_connected(Patience::Forever)?;
            Ok(stream)
        })
    }

    /// Connects to one address, and gives up after `limit`.
    ///
    /// # Errors
    /// As [`TcpStream::connect`].
    pub fn connect_timeout(net: &Net, address: SocketAddr, limit: Duration) -> io::Result<Self> {
        let stream = Self::connect_nonblocking(net, address, TcpOptions::default())?;
        match stream.wait_connected(Patience::timeout(Some(limit))) {
            Ok(()) => Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::ErrorKind::TimedOut.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Begins to connect and does not wait: the stream is writable when it is
    /// connected, or has failed, which [`TcpStream::take_error`] tells.
    ///
    /// # Errors
    /// When nothing leads to the address, or no port is free.
    pub fn connect_nonblocking(
        net: &Net,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let mut core = net.lock();
        let core = &mut *core;
        let mut claim = None;
        if let Some(own) = core.shared_address_like(address) {
            claim = core.claim(SocketAddr::new(own, 0), false)?;
        }
        let local = claim.as_ref().map(|claim| claim.local());
        let now_ns = core.engine.read_clock();
        let (stack, arena, _) = core.engine.parts();
        match stack.tcp_connect(now_ns, arena, local, address, options) {
            Ok(id) => {
                core.commit()?;
                Ok(Self::new(net, id, claim))
            }
            Err(error) => {
                core.release(claim);
                Err(error.into())
            }
        }
    }

    fn wait_connected(&self, patience: Patience) -> io::Result<()> {
        let id = self.inner.id;
        self.inner.net.wait_for(&[SocketId::Stream(id)], patience, |core| {
            let (stack, _, _) = core.engine.parts();
            match stack.tcp_state(id) {
                Some(TcpState::SynSent | TcpState::SynReceived) => None,
                Some(_) => Some(stack.tcp_take_error(id).map_or(Ok(()), |error| Err(error.into()))),
                None => Some(Err(io::ErrorKind::NotConnected.into())),
            }
        })
    }

    /// Reads what has arrived, at least one byte; 0 is the end.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait(&self.inner.read_timeout, |core| {
            let now_ns = core.engine.read_clock();
            let (stack, arena, _) = core.engine.parts();
            match stack.tcp_recv(now_ns, arena, id, buf) {
                Ok(len) => Some(core.commit().map(|()| len)),
                Err(TcpError::WouldBlock) => None,
                Err(error) => Some(Err(error.into())),
            }
        })
    }

    /// Reads what has arrived where it lies, as much as lies together: `read`
    /// says how much of it is done with.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv_with(&self, mut read: impl FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait(&self.inner.read_timeout, |core| {
            let now_ns = core.engine.read_clock();
            let (stack, arena, _) = core.engine.parts();
            match stack.tcp_read_with(now_ns, id, &mut read) {
                Ok(len) => {
                    stack.tcp_flush(now_ns, arena);
                    Some(core.commit().map(|()| len))
                }
                Err(TcpError::WouldBlock) => None,
                Err(error) => Some(Err(error.into())),
            }
        })
    }

    /// Writes some of `data`, at least one byte of it.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream.
    pub fn send(&self, data: &[u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait(&self.inner.write_timeout, |core| {
            let now_ns = core.engine.read_clock();
            let (stack, arena, _) = core.engine.parts();
            match stack.tcp_send(now_ns, arena, id, data) {
                Ok(len) => Some(core.commit().map(|()| len)),
                Err(TcpError::WouldBlock) => None,
                Err(error) => Some(Err(error.into())),
            }
        })
    }

    /// Shuts reading, writing or both.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`].
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let half = match how {
            Shutdown::Read => Half::Read,
            Shutdown::Write => Half::Write,
            Shutdown::Both => Half::Both,
        };
        let mut core = self.inner.net.lock();
        let now_ns = core.engine.read_clock();
        let (stack, arena, _) = core.engine.parts();
        stack.tcp_shutdown(now_ns, arena, self.inner.id, half)?;
        core.commit()
    }

    /// The peer's address.
    ///
    /// # Errors
    /// None while it is open.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let core = self.inner.net.lock();
        let address = core.engine.stack().tcp_peer_addr(self.inner.id);
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Our own address.
    ///
    /// # Errors
    /// None while it is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let core = self.inner.net.lock();
        let address = core.engine.stack().tcp_local_addr(self.inner.id);
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// What is known about the connection.
    ///
    /// # Errors
    /// None while it is open.
    pub fn info(&self) -> io::Result<TcpInfo> {
        let core = self.inner.net.lock();
        core.engine.stack().tcp_info(self.inner.id).ok_or(io::ErrorKind::NotConnected.into())
    }

    /// The options of the connection.
    ///
    /// # Errors
    /// None while it is open.
    pub fn options(&self) -> io::Result<TcpOptions> {
        let core = self.inner.net.lock();
        core.engine.stack().tcp_options(self.inner.id).ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Changes the options of the connection.
    ///
    /// # Errors
    /// None while it is open.
    pub fn set_options(&self, change: impl FnOnce(&mut TcpOptions)) -> io::Result<()> {
        let mut core = self.inner.net.lock();
        let now_ns = core.engine.read_clock();
        let (stack, arena, _) = core.engine.parts();
        let mut options = stack.tcp_options(self.inner.id).ok_or(io::ErrorKind::NotConnected)?;
        change(&mut options);
        stack.tcp_set_options(now_ns, arena, self.inner.id, options)?;
        core.commit()
    }

    /// Whether small segments go out at once.
    ///
    /// # Errors
    /// None while it is open.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.set_options(|options| options.no_delay = nodelay)
    }

    /// Whether small segments go out at once.
    ///
    /// # Errors
    /// None while it is open.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.options()?.no_delay)
    }

    /// Whether and how a silent peer is asked if it is still there.
    ///
    /// # Errors
    /// None while it is open.
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) -> io::Result<()> {
        self.set_options(|options| options.keepalive = keepalive)
    }

    /// The time to live, or hop limit, of what is sent.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a number over 255.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        let ttl = u8::try_from(ttl).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.set_options(|options| options.hop_limit = Some(ttl))
    }

    /// Whether dropping the last handle breaks the connection off by a reset
    /// instead of bringing it to an orderly end: what is `SO_LINGER` with a
    /// time of zero elsewhere.
    pub fn set_abrupt(&self, abrupt: bool) {
        self.inner.abrupt.store(abrupt, Ordering::Relaxed);
    }

    /// Whether calls return at once with [`io::ErrorKind::WouldBlock`] instead
    /// of waiting.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.inner.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// How long reading waits; `None` for ever.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a time-out of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_timeout(&self.inner.read_timeout, timeout)
    }

    /// How long writing waits for room; `None` for ever.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a time-out of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_timeout(&self.inner.write_timeout, timeout)
    }

    /// The error that the connection ended with, if any; it is then forgotten.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        let mut core = self.inner.net.lock();
        let (stack, _, _) = core.engine.parts();
        Ok(stack.tcp_take_error(self.inner.id).map(io::Error::from))
    }

    /// A second handle on the same connection.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    fn wait<R>(
        &self,
        limit: &Mutex<Option<Duration>>,
        ready: impl FnMut(&mut Core) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let patience = patience(&self.inner.nonblocking, timeout(limit));
        self.inner.net.wait_for(&[SocketId::Stream(self.inner.id)], patience, ready)
    }
}

impl Read for TcpStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }
}

impl Read for &TcpStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }
}

impl Write for TcpStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send(buf)
    }

    /// Nothing is held back here.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Write for &TcpStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Source for TcpStream {}

impl Pollable for TcpStream {
    fn net(&self) -> &Net {
        &self.inner.net
    }

    fn id(&self) -> SocketId {
        SocketId::Stream(self.inner.id)
    }
}

impl std::fmt::Debug for TcpStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpStream")
            .field("local", &self.local_addr().ok())
            .field("peer", &self.peer_addr().ok())
            .finish()
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        let mut core = self.net.lock();
        core.polls.forget(SocketId::Stream(self.id));
        let now_ns = core.engine.read_clock();
        let (stack, arena, _) = core.engine.parts();
        match self.abrupt.load(Ordering::Relaxed) {
            true => stack.tcp_abort(now_ns, arena, self.id),
            false => stack.tcp_close(now_ns, arena, self.id),
        }
        if let Some(claim) = self.claim.take() {
            core.closing.push((self.id, claim));
        }
        // A port that takes nothing more says so to the next who uses it.
        let _ = core.commit();
    }
}

fn patience(nonblocking: &AtomicBool, timeout: Option<Duration>) -> Patience {
    match nonblocking.load(Ordering::Relaxed) {
        true => Patience::None,
        false => Patience::timeout(timeout),
    }
}

impl Core {
    /// Takes a port away from the kernel, if the stack lives on its addresses.
    fn claim(&mut self, local: SocketAddr, dual: bool) -> io::Result<Option<Arc<Claim>>> {
        if self.shared_addresses.is_empty() {
            return Ok(None);
        }
        let (port, shared) = (self.engine.port(), &self.shared_addresses);
        Ok(Some(Arc::new(Claim::take(port, Protocol::Tcp, local, dual, shared)?)))
    }

    /// Gives it back, if nobody else needs it.
    fn release(&mut self, claim: Option<Arc<Claim>>) {
        if let Some(claim) = claim.and_then(Arc::into_inner) {
            claim.release(self.engine.port());
        }
    }

    /// The kernel's address to reach `peer` from.
    fn shared_address_like(&self, peer: SocketAddr) -> Option<std::net::IpAddr> {
        let same = |own: &&std::net::IpAddr| own.is_ipv4() == peer.is_ipv4();
        let usable = |own: &&std::net::IpAddr| match own {
            std::net::IpAddr::V6(v6) => !v6.is_unicast_link_local(),
            std::net::IpAddr::V4(_) => true,
        };
        self.shared_addresses.iter().filter(same).find(usable).copied()
    }
}
