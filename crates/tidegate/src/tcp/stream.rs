//! TCP connections.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_engine::PortClaim;
use tidegate_stack::{Keepalive, Shutdown as Half, TcpId, TcpInfo, TcpOptions};

use super::closing::ClosingStream;
use crate::net::handle::Net;
use crate::net::source::{Pollable, Source};
use crate::types::deadline::{Deadline, SharedTimeout};
use crate::types::errors::{OpResult, try_each_address, unless_blocked, vectored_op};
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// TCP connection on a [`Net`], in the style of `std::net::TcpStream`.
///
/// Threads may share a stream and pass it on. Dropping the last handle closes the connection;
/// written data is still sent.
///
/// # Examples
/// ```no_run
/// use std::io::{Read, Write};
/// use std::time::Duration;
///
/// use tidegate::{Net, TcpStream};
///
/// # let net = Net::attach("/run/tidegate/tidegate.sock", "example")?;
/// let mut stream = TcpStream::connect(&net, "192.0.2.1:80")?;
/// stream.set_read_timeout(Some(Duration::from_secs(5)))?;
/// stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
/// let mut reply = Vec::new();
/// stream.read_to_end(&mut reply)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone)]
pub struct TcpStream {
    pub(super) inner: Arc<StreamInner>,
}

pub(super) struct StreamInner {
    pub(super) net: Net,
    pub(super) id: TcpId,
    nonblocking: AtomicBool,
    /// Reset the connection on close (RST instead of FIN).
    reset_on_close: AtomicBool,
    read_timeout: SharedTimeout,
    write_timeout: SharedTimeout,
    claim: Option<Arc<PortClaim>>,
}

impl TcpStream {
    pub(crate) fn new(net: &Net, id: TcpId, claim: Option<Arc<PortClaim>>) -> Self {
        let inner = StreamInner {
            net: net.clone(),
            id,
            nonblocking: AtomicBool::new(false),
            reset_on_close: AtomicBool::new(false),
            read_timeout: SharedTimeout::none(),
            write_timeout: SharedTimeout::none(),
            claim,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Connects to the first of the addresses that accepts.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionRefused`], [`io::ErrorKind::TimedOut`],
    /// [`io::ErrorKind::HostUnreachable`] and the like, and errors of name resolution.
    pub fn connect(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        try_each_address(address, |address| {
            let stream = Self::connect_nonblocking(net, address, TcpOptions::default())?;
            stream.wait_connected(Deadline::Never)?;
            Ok(stream)
        })
    }

    /// Connects to one address, for at most `limit`.
    ///
    /// # Errors
    /// As [`TcpStream::connect`].
    pub fn connect_timeout(net: &Net, address: SocketAddr, limit: Duration) -> io::Result<Self> {
        let stream = Self::connect_nonblocking(net, address, TcpOptions::default())?;
        match stream.wait_connected(Deadline::after(Some(limit))) {
            Ok(()) => Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::ErrorKind::TimedOut.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Starts a connection without waiting. The stream becomes writable when the connection is
    /// established or has failed; [`TcpStream::take_error`] returns the error.
    ///
    /// # Errors
    /// When there is no route to the address, or no free local port.
    pub fn connect_nonblocking(
        net: &Net,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        net.with(|ops| {
            let stream = Self::start_connect(net, ops, None, address, options)?;
            ops.commit()?;
            Ok(stream)
        })
    }

    /// Like [`TcpStream::connect_nonblocking`], from a local address. With port 0 the stack
    /// chooses a port.
    ///
    /// # Errors
    /// As [`TcpStream::connect_nonblocking`], and for a local address that the stack does not
    /// have or that is in use.
    pub fn connect_from(
        net: &Net,
        local: SocketAddr,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        net.with(|ops| {
            let stream = Self::start_connect(net, ops, Some(local), address, options)?;
            ops.commit()?;
            Ok(stream)
        })
    }

    /// Starts a connection; the SYN segment is not transmitted yet.
    pub(crate) fn start_connect(
        net: &Net,
        ops: &mut dyn SocketOps,
        local: Option<SocketAddr>,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let (id, claim) = ops.tcp_connect(local, address, options)?;
        Ok(Self::new(net, id, claim))
    }

    pub(crate) fn tcp_id(&self) -> TcpId {
        self.inner.id
    }

    fn wait_connected(&self, deadline: Deadline) -> io::Result<()> {
        let id = self.inner.id;
        self.inner.net.wait_until(&[SocketId::Stream(id)], deadline, |ops| {
            unless_blocked(ops.tcp_finish_connect(id))
        })
    }

    /// Reads received data, at least one byte. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.read_timeout, |ops| ops.tcp_recv(id, buf))
    }

    /// Reads received data, at least one byte, if there is any. Neither waits nor runs the stack, also
    /// in blocking mode.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when no data has arrived; the error that ended the connection.
    pub fn try_recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.try_op(|ops| ops.tcp_recv(id, buf))
    }

    /// Copies the data that [`TcpStream::recv`] would read next, without consuming it.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.read_timeout, |ops| ops.tcp_peek(id, buf))
    }

    /// Reads received data in place, as much as is contiguous: `read` returns the number of
    /// bytes it has consumed.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv_with(&self, mut read: impl FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.read_timeout, |ops| ops.tcp_recv_with(id, &mut read))
    }

    /// Writes some of `data`, at least one byte, if there is space. Neither waits nor runs the stack,
    /// also in blocking mode.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the send buffer is full; the error that ended the connection.
    pub fn try_send(&self, data: &[u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.try_op(|ops| ops.tcp_send(id, data))
    }

    /// Writes some of `data`, at least one byte.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream.
    pub fn send(&self, data: &[u8]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.write_timeout, |ops| ops.tcp_send(id, data))
    }

    /// Writes in place: `write` gets contiguous send-buffer memory (up to 2 KiB, and at most
    /// `limit` bytes) and returns the number of bytes written. The data stays there until the
    /// peer acknowledges it, so the application needs no buffer. The previous content of the
    /// memory is undefined. `write` runs with the stack locked.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream; `write` is not called then.
    pub fn send_with(
        &self,
        limit: usize,
        mut write: impl FnMut(&mut [u8]) -> usize,
    ) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.write_timeout, |ops| ops.tcp_send_with(id, limit, &mut write))
    }

    /// Reads received data into these buffers, one after the other.
    ///
    /// # Errors
    /// As [`Read::read`] of the stream.
    pub fn recv_vectored(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.read_timeout, |ops| recv_buffers(ops, id, bufs))
    }

    /// Writes some of the data in these slices, at least one byte.
    ///
    /// # Errors
    /// As [`Write::write`] of the stream.
    pub fn send_vectored(&self, data: &[IoSlice<'_>]) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_for_op(&self.inner.write_timeout, |ops| send_buffers(ops, id, data))
    }

    /// Shuts down reading, writing or both. Ends an attempt to connect with
    /// [`io::ErrorKind::ConnectionReset`].
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`].
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let half = match how {
            Shutdown::Read => Half::Read,
            Shutdown::Write => Half::Write,
            Shutdown::Both => Half::Both,
        };
        self.inner.net.with(|ops| {
            ops.tcp_shutdown(self.inner.id, half)?;
            // Other threads may wait for space, which the peer need not give any more.
            ops.notify(SocketId::Stream(self.inner.id));
            Ok(())
        })
    }

    /// Address of the peer.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|ops| ops.tcp_peer_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Local address.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|ops| ops.tcp_local_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Free send-buffer space in bytes. A socket may become ready to write only when a good part
    /// of its send buffer is free.
    pub fn writable_bytes(&self) -> usize {
        self.inner.net.with(|ops| ops.tcp_writable(self.inner.id))
    }

    /// State and statistics of the connection, as Linux's `TCP_INFO`.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn info(&self) -> io::Result<TcpInfo> {
        let info = self.inner.net.with(|ops| ops.tcp_info(self.inner.id));
        info.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Options of the connection.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn options(&self) -> io::Result<TcpOptions> {
        let options = self.inner.net.with(|ops| ops.tcp_options(self.inner.id));
        options.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Changes the options of the connection.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn set_options(&self, change: impl FnOnce(&mut TcpOptions)) -> io::Result<()> {
        self.inner.net.with(|ops| {
            let mut options = ops.tcp_options(self.inner.id).ok_or(io::ErrorKind::NotConnected)?;
            let before_bytes = options.send_buffer_bytes;
            change(&mut options);
            ops.tcp_set_options(self.inner.id, options)?;
            if options.send_buffer_bytes > before_bytes {
                ops.notify(SocketId::Stream(self.inner.id));
            }
            Ok(())
        })
    }

    /// Sends small segments at once (`TCP_NODELAY`), without Nagle's algorithm.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.set_options(|options| options.no_delay = nodelay)
    }

    /// True if small segments are sent at once.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.options()?.no_delay)
    }

    /// Enables or disables keepalive probes to a silent peer.
    ///
    /// # Errors
    /// None while the connection is open.
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) -> io::Result<()> {
        self.set_options(|options| options.keepalive = keepalive)
    }

    /// Sets the time to live (IPv4) or hop limit (IPv6) of sent packets.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a value over 255.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        let ttl = u8::try_from(ttl).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.set_options(|options| options.hop_limit = Some(ttl))
    }

    /// Resets the connection (RST) when the last handle is dropped, instead of an orderly close
    /// (FIN): `SO_LINGER` with a time of zero.
    pub fn set_reset_on_close(&self, reset: bool) {
        self.inner.reset_on_close.store(reset, Ordering::Relaxed);
    }

    /// Makes calls return [`io::ErrorKind::WouldBlock`] instead of waiting.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.inner.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Sets the timeout of reads; `None` waits without limit.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a timeout of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.read_timeout.set(timeout)
    }

    /// Sets the timeout of writes that wait for send-buffer space; `None` waits without limit.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a timeout of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.write_timeout.set(timeout)
    }

    /// Takes the error that ended the connection, if any; later calls return `None`.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.inner.net.with(|ops| ops.tcp_take_error(self.inner.id)))
    }

    /// Creates a second handle of the same connection.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    /// Does an operation once, and transmits its segments.
    #[inline]
    fn try_op<R>(&self, op: impl FnOnce(&mut dyn SocketOps) -> OpResult<R>) -> io::Result<R> {
        self.inner.net.with(|ops| {
            ops.read_clock();
            let result = op(ops)?;
            ops.commit()?;
            Ok(result)
        })
    }

    /// Waits until an operation succeeds or fails, and transmits its segments.
    fn wait_for_op<R>(
        &self,
        timeout: &SharedTimeout,
        mut op: impl FnMut(&mut dyn SocketOps) -> OpResult<R>,
    ) -> io::Result<R> {
        let deadline = Deadline::of_call(&self.inner.nonblocking, timeout.get());
        self.inner.net.wait_until(&[SocketId::Stream(self.inner.id)], deadline, |ops| {
            ops.read_clock();
            unless_blocked(op(ops)).map(|outcome| {
                outcome.and_then(|result| {
                    ops.commit()?;
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

    /// Does nothing: written data is not held back.
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
        let reset_on_close = self.reset_on_close.load(Ordering::Relaxed);
        ClosingStream::new(self.net.clone(), self.id, reset_on_close, self.claim.take()).close();
    }
}

/// Receives into one buffer after the other, as far as data has arrived.
pub(crate) fn recv_buffers(
    ops: &mut dyn SocketOps,
    id: TcpId,
    bufs: &mut [IoSliceMut<'_>],
) -> OpResult<usize> {
    let buffers = bufs.iter_mut().filter(|buf| !buf.is_empty());
    vectored_op(buffers, |buf| {
        let len = ops.tcp_recv(id, buf)?;
        Ok((len, ops.tcp_readable(id) > 0))
    })
}

/// Sends one slice after the other, as far as there is send-buffer space.
pub(crate) fn send_buffers(
    ops: &mut dyn SocketOps,
    id: TcpId,
    data: &[IoSlice<'_>],
) -> OpResult<usize> {
    let buffers = data.iter().filter(|piece| !piece.is_empty());
    vectored_op(buffers, |piece| {
        let len = ops.tcp_send(id, piece)?;
        Ok((len, len == piece.len() && ops.tcp_writable(id) > 0))
    })
}
