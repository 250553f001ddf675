//! One connection.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_engine::Claim;
use tidegate_stack::{Keepalive, Shutdown as Half, TcpId, TcpInfo, TcpOptions};

use super::patience;
use crate::batch;
use crate::calls::{Called, Calls, one_after_another, unless_blocked};
use crate::net::Net;
use crate::poll::{Pollable, Source};
use crate::udp::first_that_works;
use crate::wait::{Patience, SharedTimeout, SocketId};

/// A TCP connection on a [`Net`], in the style of `std::net::TcpStream`.
///
/// It may be used from several threads at once and passed between them. When
/// the last handle is dropped the connection is closed: what was written still
/// goes out.
#[derive(Clone)]
pub struct TcpStream {
    pub(super) inner: Arc<StreamInner>,
}

pub(super) struct StreamInner {
    pub(super) net: Net,
    pub(super) id: TcpId,
    nonblocking: AtomicBool,
    /// Whether closing breaks the connection off.
    abrupt: AtomicBool,
    read_timeout: SharedTimeout,
    write_timeout: SharedTimeout,
    claim: Option<Arc<Claim>>,
}

impl TcpStream {
    pub(crate) fn new(net: &Net, id: TcpId, claim: Option<Arc<Claim>>) -> Self {
        let inner = StreamInner {
            net: net.clone(),
            id,
            nonblocking: AtomicBool::new(false),
            abrupt: AtomicBool::new(false),
            read_timeout: SharedTimeout::none(),
            write_timeout: SharedTimeout::none(),
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
        net.with(|calls| {
            let stream = Self::begin(net, calls, None, address, options)?;
            calls.commit()?;
            Ok(stream)
        })
    }

    /// As [`TcpStream::connect_nonblocking`], from a local address. Port 0
    /// lets the stack choose.
    ///
    /// # Errors
    /// As [`TcpStream::connect_nonblocking`], and for an address that is not
    /// ours or in use.
    pub fn connect_from(
        net: &Net,
        local: SocketAddr,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        net.with(|calls| {
            let stream = Self::begin(net, calls, Some(local), address, options)?;
            calls.commit()?;
            Ok(stream)
        })
    }

    /// Begins to connect; the first segment is not on its way yet.
    pub(crate) fn begin(
        net: &Net,
        calls: &mut dyn Calls,
        local: Option<SocketAddr>,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let (id, claim) = calls.tcp_connect(local, address, options)?;
        Ok(Self::new(net, id, claim))
    }

    pub(crate) fn tcp_id(&self) -> TcpId {
        self.inner.id
    }

    fn wait_connected(&self, patience: Patience) -> io::Result<()> {
        let id = self.inner.id;
        self.inner.net.wait_for(&[SocketId::Stream(id)], patience, |calls| {
            unless_blocked(calls.tcp_finish_connect(id))
        })
    }

    /// Reads what has arrived, at least one byte; 0 is the end.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.read_timeout, |calls| calls.tcp_recv(id, buf))
    }

    /// Copies what [`TcpStream::recv`] would read next, and leaves it there.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.read_timeout, |calls| calls.tcp_peek(id, buf))
    }

    /// Reads what has arrived where it lies, as much as lies together: `read`
    /// says how much of it is done with.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv_with(&self, mut read: impl FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.read_timeout, |calls| calls.tcp_recv_with(id, &mut read))
    }

    /// Writes some of `data`, at least one byte of it.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream.
    pub fn send(&self, data: &[u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.write_timeout, |calls| calls.tcp_send(id, data))
    }

    /// Has `write` put data where it stays until the peer has it, as much as
    /// lies together (up to 2 KiB) and no more than `limit`: the program needs
    /// no buffer of its own. `write` says how much it wrote; what it finds there
    /// has no meaning. It runs while nobody else can use the stack.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream; `write` is not called then.
    pub fn send_with(
        &self,
        limit: usize,
        mut write: impl FnMut(&mut [u8]) -> usize,
    ) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.write_timeout, |calls| calls.tcp_send_with(id, limit, &mut write))
    }

    /// Reads what has arrived into these buffers, one after the other.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv_vectored(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.read_timeout, |calls| {
            let filled = bufs.iter_mut().filter(|buf| !buf.is_empty());
            one_after_another(filled, |buf| {
                let len = calls.tcp_recv(id, buf)?;
                Ok((len, calls.tcp_readable(id) > 0))
            })
        })
    }

    /// Writes some of these pieces of data, at least one byte of them.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream.
    pub fn send_vectored(&self, data: &[IoSlice<'_>]) -> io::Result<usize> {
        let id = self.inner.id;
        self.call(&self.inner.write_timeout, |calls| write_pieces(calls, id, data))
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
        self.inner.net.with(|calls| calls.tcp_shutdown(self.inner.id, half))
    }

    /// The peer's address.
    ///
    /// # Errors
    /// None while it is open.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|calls| calls.tcp_peer_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Our own address.
    ///
    /// # Errors
    /// None while it is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|calls| calls.tcp_local_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// How many bytes can be written now: what there is room for. A socket may be
    /// ready to write only when that is a good part of its send buffer.
    pub fn writable_bytes(&self) -> usize {
        self.inner.net.with(|calls| calls.tcp_writable(self.inner.id))
    }

    /// What is known about the connection.
    ///
    /// # Errors
    /// None while it is open.
    pub fn info(&self) -> io::Result<TcpInfo> {
        let info = self.inner.net.with(|calls| calls.tcp_info(self.inner.id));
        info.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// The options of the connection.
    ///
    /// # Errors
    /// None while it is open.
    pub fn options(&self) -> io::Result<TcpOptions> {
        let options = self.inner.net.with(|calls| calls.tcp_options(self.inner.id));
        options.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Changes the options of the connection.
    ///
    /// # Errors
    /// None while it is open.
    pub fn set_options(&self, change: impl FnOnce(&mut TcpOptions)) -> io::Result<()> {
        self.inner.net.with(|calls| {
            let mut options =
                calls.tcp_options(self.inner.id).ok_or(io::ErrorKind::NotConnected)?;
            change(&mut options);
            calls.tcp_set_options(self.inner.id, options)
        })
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
        self.inner.read_timeout.set(timeout)
    }

    /// How long writing waits for room; `None` for ever.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a time-out of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.write_timeout.set(timeout)
    }

    /// The error that the connection ended with, if any; it is then forgotten.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.inner.net.with(|calls| calls.tcp_take_error(self.inner.id)))
    }

    /// A second handle on the same connection.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    /// Waits until a call gives something, and sends what that has made.
    fn call<R>(
        &self,
        limit: &SharedTimeout,
        mut call: impl FnMut(&mut dyn Calls) -> Called<R>,
    ) -> io::Result<R> {
        let patience = patience(&self.inner.nonblocking, limit.get());
        self.inner.net.wait_for(&[SocketId::Stream(self.inner.id)], patience, |calls| {
            calls.read_clock();
            unless_blocked(call(calls)).map(|called| {
                called.and_then(|result| {
                    calls.commit()?;
                    Ok(result)
                })
            })
        })
    }
}

impl Read for TcpStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.recv_vectored(bufs)
    }
}

impl Read for &TcpStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.recv_vectored(bufs)
    }
}

impl Write for TcpStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send(buf)
    }

    fn write_vectored(&mut self, data: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_vectored(data)
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

    fn write_vectored(&mut self, data: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_vectored(data)
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
        let ended = Ended {
            net: self.net.clone(),
            id: self.id,
            abrupt: self.abrupt.load(Ordering::Relaxed),
            claim: self.claim.take(),
            is_over: false,
        };
        // What cannot be deferred ends here.
        drop(batch::defer(ended));
    }
}

/// A connection that the program has no handle on any more. It is closed when
/// this is dropped.
pub(crate) struct Ended {
    net: Net,
    id: TcpId,
    abrupt: bool,
    claim: Option<Arc<Claim>>,
    is_over: bool,
}

impl Ended {
    /// Closes the connection, if it is of this stack; `None` when it is done.
    pub(crate) fn end_in(mut self, net: &Net, calls: &mut dyn Calls) -> Option<Self> {
        if !self.net.is_same(net) {
            return Some(self);
        }
        self.end(calls);
        None
    }

    fn end(&mut self, calls: &mut dyn Calls) {
        self.is_over = true;
        calls.tcp_end(self.id, self.abrupt, self.claim.take());
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let net = self.net.clone();
        net.with(|calls| {
            self.end(calls);
            // A port that takes nothing more says so to the next who uses it.
            let _ = calls.commit();
        });
    }
}

/// Writes one piece after the other, as far as there is room.
pub(super) fn write_pieces(
    calls: &mut dyn Calls,
    id: TcpId,
    data: &[IoSlice<'_>],
) -> Called<usize> {
    let pieces = data.iter().filter(|piece| !piece.is_empty());
    one_after_another(pieces, |piece| {
        let len = calls.tcp_send(id, piece)?;
        Ok((len, len == piece.len()))
    })
}
