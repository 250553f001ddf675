//! UDP sockets.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs};
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate_engine::PortClaim;
use tidegate_stack::{UdpErrorReport, UdpId, UdpOptions, UdpSendOptions};

use crate::net::handle::Net;
use crate::net::source::{Pollable, Source};
use crate::types::datagram::DatagramMeta;
use crate::types::deadline::Deadline;
use crate::types::errors::{OpError, no_address, try_each_address, unless_blocked};
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// UDP socket on a [`Net`], in the style of `std::net::UdpSocket`.
///
/// Threads may share a socket and pass it on.
///
/// # Examples
/// ```
/// use tidegate::{Net, NetConfig, UdpSocket};
///
/// let (device_a, device_b) = tidegate::mem::wire(&Default::default())?;
/// let a = Net::open(NetConfig::new(device_a).address("192.0.2.1/24".parse().unwrap()))?;
/// let b = Net::open(NetConfig::new(device_b).address("192.0.2.2/24".parse().unwrap()))?;
///
/// let server = UdpSocket::bind(&a, "192.0.2.1:7")?;
/// let echo = std::thread::spawn(move || {
///     // Writes each reply over its datagram; nothing is copied.
///     server.exchange_in_place(|request| Some(request.len))
/// });
///
/// let client = UdpSocket::bind(&b, "192.0.2.2:0")?;
/// client.connect("192.0.2.1:7")?;
/// client.send(b"hello")?;
/// let mut buf = [0; 64];
/// assert_eq!(client.recv(&mut buf)?, 5);
/// assert_eq!(&buf[..5], b"hello");
/// assert_eq!(echo.join().unwrap()?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct UdpSocket {
    inner: Arc<UdpInner>,
}

struct UdpInner {
    net: Net,
    id: UdpId,
    nonblocking: AtomicBool,
    read_timeout: Mutex<Option<Duration>>,
    write_timeout: Mutex<Option<Duration>>,
    is_read_closed: AtomicBool,
    is_write_closed: AtomicBool,
    claim: Option<Arc<PortClaim>>,
}

impl UdpSocket {
    /// Binds a socket to the first of the addresses that can be bound. With port 0 the stack
    /// chooses a port. The unspecified address receives datagrams for every address of the
    /// stack.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`], [`io::ErrorKind::AddrNotAvailable`] for an address that the
    /// stack does not have, and errors of name resolution.
    pub fn bind(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        let options = UdpOptions::default().dual_stack(true);
        Self::bind_with(net, address, options)
    }

    /// Like [`UdpSocket::bind`], but the unspecified IPv6 address receives IPv6 datagrams only,
    /// so an IPv4 socket can be bound to the same port. Two such sockets are faster than one
    /// dual-stack socket.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_one_family(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::bind_with(net, address, UdpOptions::default())
    }

    /// Like [`UdpSocket::bind`], with options.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_with(
        net: &Net,
        address: impl ToSocketAddrs,
        options: UdpOptions,
    ) -> io::Result<Self> {
        try_each_address(address, |address| Self::bind_one(net, address, options))
    }

    fn bind_one(net: &Net, address: SocketAddr, options: UdpOptions) -> io::Result<Self> {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let (id, claim) = net.with(|ops| ops.udp_bind(address, options))?;
        Ok(Self::new(net, id, claim))
    }

    pub(crate) fn new(net: &Net, id: UdpId, claim: Option<Arc<PortClaim>>) -> Self {
        let inner = UdpInner {
            net: net.clone(),
            id,
            nonblocking: AtomicBool::new(false),
            read_timeout: Mutex::new(None),
            write_timeout: Mutex::new(None),
            is_read_closed: AtomicBool::new(false),
            is_write_closed: AtomicBool::new(false),
            claim,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Connects the socket: from now on it receives from this peer only, and
    /// [`UdpSocket::send`] sends to the peer. ICMP errors from the peer's host are returned by
    /// the next call.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for the wrong address family, and errors of name
    /// resolution.
    pub fn connect(&self, address: impl ToSocketAddrs) -> io::Result<()> {
        try_each_address(address, |address| {
            self.inner.net.with(|ops| ops.udp_connect(self.inner.id, Some(address)))
        })
    }

    /// Address that the socket is bound to.
    ///
    /// # Errors
    /// None while the socket is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|ops| ops.udp_local_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Address of the connected peer.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`].
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|ops| ops.udp_peer_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Receives one datagram. Bytes beyond the length of `buf` are lost.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the timeout expires, or the socket is non-blocking and
    /// no datagram is waiting; [`io::ErrorKind::ConnectionRefused`] and the like after an ICMP
    /// error.
    pub fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.recv_meta(buf).map(|received| (received.len, received.from))
    }

    /// Receives one datagram from the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv_meta(buf).map(|received| received.len)
    }

    /// Receives one datagram, with its addresses and lengths.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_meta(&self, buf: &mut [u8]) -> io::Result<DatagramMeta> {
        self.wait_readable(|ops| unless_blocked(ops.udp_recv(self.inner.id, buf, false)))
    }

    /// Like [`UdpSocket::recv_meta`], without consuming the datagram.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn peek_meta(&self, buf: &mut [u8]) -> io::Result<DatagramMeta> {
        self.wait_readable(|ops| unless_blocked(ops.udp_recv(self.inner.id, buf, true)))
    }

    /// Undoes [`UdpSocket::connect`]: receives datagrams from every peer again.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another socket has taken the address.
    pub fn disconnect(&self) -> io::Result<()> {
        self.inner.net.with(|ops| ops.udp_connect(self.inner.id, None))
    }

    /// Sets the options, but not those that decide which sockets have the port (`dual_stack`,
    /// `reuse_address`, `reuse_port`, `owner`). A queue that holds more than its new limit keeps what
    /// it has.
    ///
    /// # Errors
    /// None while the socket is open.
    pub fn set_options(&self, options: UdpOptions) -> io::Result<()> {
        self.inner.net.with(|ops| ops.udp_set_options(self.inner.id, options))
    }

    /// Closes directions of the socket, and wakes the threads that wait. Then a receiving call
    /// that finds no datagram returns [`io::ErrorKind::UnexpectedEof`], and a sending call
    /// [`io::ErrorKind::BrokenPipe`]. What arrives all the same is received. Exchanges and
    /// readers of the socket go on.
    pub fn shutdown(&self, how: Shutdown) {
        let inner = &*self.inner;
        inner.is_read_closed.fetch_or(how != Shutdown::Write, Ordering::Relaxed);
        inner.is_write_closed.fetch_or(how != Shutdown::Read, Ordering::Relaxed);
        let id = SocketId::Udp(inner.id);
        inner.net.with(|ops| {
            ops.added_readiness().close(id, how);
            ops.notify(id);
        });
    }

    /// Receives as many datagrams as have arrived, at least one, each into one of `buffers`.
    /// Clears `received` and fills it with their addresses and lengths.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_batch(
        &self,
        buffers: &mut [&mut [u8]],
        received: &mut Vec<DatagramMeta>,
    ) -> io::Result<()> {
        received.clear();
        self.wait_readable(|ops| {
            for buf in buffers.iter_mut() {
                match ops.udp_recv(self.inner.id, buf, false) {
                    Ok(one) => received.push(one),
                    // An error after datagrams is returned by the next call.
                    Err(OpError::Failed(error)) if received.is_empty() => {
                        return Some(Err(error));
                    }
                    Err(_) => break,
                }
            }
            (!received.is_empty() || buffers.is_empty()).then_some(Ok(()))
        })
    }

    /// Sends one datagram.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the timeout expires, or the socket is non-blocking and
    /// there is no transmit space; [`io::ErrorKind::InvalidInput`] for more bytes than a
    /// datagram can hold, 65,507 on IPv4; [`io::ErrorKind::NetworkUnreachable`] without a route;
    /// an earlier ICMP error of the connected peer's host.
    pub fn send_to(&self, payload: &[u8], to: impl ToSocketAddrs) -> io::Result<usize> {
        let to = to.to_socket_addrs()?.next().ok_or_else(no_address)?;
        self.send_with(payload, Some(to), UdpSendOptions::default())
    }

    /// Sends one datagram to the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], and [`io::ErrorKind::NotConnected`].
    pub fn send(&self, payload: &[u8]) -> io::Result<usize> {
        self.send_with(payload, None, UdpSendOptions::default())
    }

    /// Sends one datagram from this local address, to `to` or to the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub fn send_from(
        &self,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: IpAddr,
    ) -> io::Result<usize> {
        self.send_with(payload, to, Some(from).into())
    }

    /// Sends one datagram with these header fields, to `to` or to the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub fn send_with(
        &self,
        payload: &[u8],
        to: Option<SocketAddr>,
        options: UdpSendOptions,
    ) -> io::Result<usize> {
        self.wait_writable(|ops| {
            ops.read_clock();
            let sent = ops.udp_send(self.inner.id, payload, to, options);
            unless_blocked(sent.and_then(|()| Ok(ops.udp_flush().map(|()| payload.len())?)))
        })
    }

    /// Sends the payload as datagrams of `segment_bytes` in one transmit batch; the last may be
    /// shorter. Returns the payload bytes sent: fewer when transmit space ends. An error in the
    /// middle is returned by the next call.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], when the first datagram cannot be sent.
    pub fn send_segments(
        &self,
        payload: &[u8],
        segment_bytes: NonZero<u16>,
        to: Option<SocketAddr>,
        options: UdpSendOptions,
    ) -> io::Result<usize> {
        let segment_bytes = usize::from(segment_bytes.get());
        self.wait_writable(|ops| {
            ops.read_clock();
            let mut sent = 0;
            for segment in payload.chunks(segment_bytes) {
                match ops.udp_send(self.inner.id, segment, to, options) {
                    Ok(()) => sent += segment.len(),
                    Err(error) if sent == 0 => return unless_blocked(Err(error)),
                    Err(_) => break,
                }
            }
            Some(ops.udp_flush().map(|()| sent))
        })
    }

    /// Sends datagrams, each to its own address, in one transmit batch. Returns the number sent.
    /// An error in the middle is returned by the next call; the count says where to continue.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], when the first datagram cannot be sent.
    pub fn send_batch(&self, datagrams: &[(&[u8], SocketAddr)]) -> io::Result<usize> {
        if datagrams.is_empty() {
            return Ok(0);
        }
        self.wait_writable(|ops| {
            ops.read_clock();
            let mut sent = 0;
            for &(payload, to) in datagrams {
                match ops.udp_send(self.inner.id, payload, Some(to), UdpSendOptions::default()) {
                    Ok(()) => sent += 1,
                    Err(error) if sent == 0 => return unless_blocked(Err(error)),
                    Err(_) => break,
                }
            }
            Some(ops.udp_flush().map(|()| sent))
        })
    }

    /// Makes calls return [`io::ErrorKind::WouldBlock`] instead of waiting.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.inner.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Sets the timeout of receiving calls; `None` waits without limit.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a timeout of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_timeout(&self.inner.read_timeout, timeout)
    }

    /// Sets the timeout of sending calls that wait for transmit space; `None` waits without
    /// limit.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a timeout of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_timeout(&self.inner.write_timeout, timeout)
    }

    /// Timeout of receiving calls.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(timeout(&self.inner.read_timeout))
    }

    /// Timeout of sending calls.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(timeout(&self.inner.write_timeout))
    }

    /// Takes the ICMP error reported by the peer's host, if any; later calls return `None`.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.inner.net.with(|ops| ops.udp_take_error(self.inner.id)))
    }

    /// Takes the oldest ICMP error about a datagram that the socket has sent, with the beginning of
    /// the datagram. A socket has them with [`UdpOptions::report_errors`].
    ///
    /// # Errors
    /// None while the socket is open.
    pub fn take_error_report(&self) -> io::Result<Option<UdpErrorReport>> {
        self.inner.net.with(|ops| ops.udp_take_error_report(self.inner.id))
    }

    /// Creates a second handle of the same socket.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    pub(crate) fn udp_id(&self) -> UdpId {
        self.inner.id
    }

    /// True if the program has closed the receive direction.
    pub(crate) fn is_read_closed(&self) -> bool {
        self.inner.is_read_closed.load(Ordering::Relaxed)
    }

    /// True if the program has closed the send direction.
    pub(crate) fn is_write_closed(&self) -> bool {
        self.inner.is_write_closed.load(Ordering::Relaxed)
    }

    /// Deadline of a receiving call.
    pub(super) fn read_deadline(&self) -> Deadline {
        Deadline::of_call(&self.inner.nonblocking, timeout(&self.inner.read_timeout))
    }

    fn wait_readable<R>(
        &self,
        mut ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let end = || self.is_read_closed().then(|| Err(io::ErrorKind::UnexpectedEof.into()));
        let ids = [SocketId::Udp(self.inner.id)];
        self.inner.net.wait_until(&ids, self.read_deadline(), |ops| ready(ops).or_else(end))
    }

    fn wait_writable<R>(
        &self,
        ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        if self.is_write_closed() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let deadline =
            Deadline::of_call(&self.inner.nonblocking, timeout(&self.inner.write_timeout));
        self.inner.net.wait_until(&[SocketId::Udp(self.inner.id)], deadline, ready)
    }
}

impl Source for UdpSocket {}

impl Pollable for UdpSocket {
    fn net(&self) -> &Net {
        &self.inner.net
    }

    fn id(&self) -> SocketId {
        SocketId::Udp(self.inner.id)
    }
}

impl std::fmt::Debug for UdpSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpSocket")
            .field("local", &self.local_addr().ok())
            .field("peer", &self.peer_addr().ok())
            .finish()
    }
}

impl Drop for UdpInner {
    fn drop(&mut self) {
        let (id, claim) = (self.id, self.claim.take());
        self.net.with(|ops| {
            ops.udp_close(id, claim);
            ops.added_readiness().forget(SocketId::Udp(id));
        });
    }
}

fn timeout(cell: &Mutex<Option<Duration>>) -> Option<Duration> {
    *cell.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set_timeout(cell: &Mutex<Option<Duration>>, timeout: Option<Duration>) -> io::Result<()> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a timeout of zero is invalid: use set_nonblocking instead",
        ));
    }
    *cell.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    Ok(())
}
