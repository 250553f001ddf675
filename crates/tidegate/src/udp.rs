//! UDP sockets.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate_engine::Claim;
use tidegate_memory::Arena;
use tidegate_stack::{InPlace, Request, Stack, UdpId, UdpOptions};

use crate::calls::{CallError, Calls, unless_blocked};
use crate::net::{Net, elsewhere};
use crate::poll::{Pollable, Source};
use crate::wait::{Patience, SocketId};

/// At most so many datagrams are answered before the answers are transmitted.
const EXCHANGE_BATCH: usize = 64;

/// A UDP socket on a [`Net`], in the style of `std::net::UdpSocket`.
///
/// It may be used from several threads at once and passed between them.
#[derive(Clone)]
pub struct UdpSocket {
    inner: Arc<Inner>,
}

struct Inner {
    net: Net,
    id: UdpId,
    nonblocking: AtomicBool,
    read_timeout: Mutex<Option<Duration>>,
    write_timeout: Mutex<Option<Duration>>,
    claim: Option<Arc<Claim>>,
}

/// Where a datagram came from, and how much of it there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes written to the buffer.
    pub len: usize,
    /// Whether the datagram was longer than the buffer; the rest is lost.
    pub truncated: bool,
    /// Bytes of the datagram, also those that did not fit.
    pub datagram_len: usize,
    /// Who sent it.
    pub from: SocketAddr,
    /// The address of ours that it was sent to.
    pub to: IpAddr,
}

impl UdpSocket {
    /// Binds a socket to the first of the addresses that it can. Port 0 lets
    /// the stack choose; the unspecified address takes datagrams for every
    /// address of the stack.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`], [`io::ErrorKind::AddrNotAvailable`] for an
    /// address that is not of this stack, and what resolving a name gives.
    pub fn bind(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        let options = UdpOptions { dual_stack: true, ..UdpOptions::default() };
        Self::bind_with(net, address, options)
    }

    /// As [`UdpSocket::bind`], but a socket on the unspecified IPv6 address
    /// takes IPv6 alone, so that one for IPv4 can be bound beside it. Two such
    /// sockets are faster than one that serves both families.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_one_family(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::bind_with(net, address, UdpOptions::default())
    }

    /// As [`UdpSocket::bind`], with options.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_with(
        net: &Net,
        address: impl ToSocketAddrs,
        options: UdpOptions,
    ) -> io::Result<Self> {
        first_that_works(address, |address| Self::bind_one(net, address, options))
    }

    fn bind_one(net: &Net, address: SocketAddr, options: UdpOptions) -> io::Result<Self> {
        let (id, claim) = net.with(|calls| calls.udp_bind(address, options))?;
        Ok(Self::new(net, id, claim))
    }

    pub(crate) fn new(net: &Net, id: UdpId, claim: Option<Arc<Claim>>) -> Self {
        let inner = Inner {
            net: net.clone(),
            id,
            nonblocking: AtomicBool::new(false),
            read_timeout: Mutex::new(None),
            write_timeout: Mutex::new(None),
            claim,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Takes datagrams only from this peer from now on and sends to it by
    /// [`UdpSocket::send`]. Errors that the peer's host reports are given to
    /// the next call.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for the wrong address family, and what
    /// resolving a name gives.
    pub fn connect(&self, address: impl ToSocketAddrs) -> io::Result<()> {
        first_that_works(address, |address| {
            self.inner.net.with(|calls| calls.udp_connect(self.inner.id, Some(address)))
        })
    }

    /// The address the socket is bound to.
    ///
    /// # Errors
    /// None while the socket is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|calls| calls.udp_local_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// The address the socket is connected to.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`].
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.inner.net.with(|calls| calls.udp_peer_addr(self.inner.id));
        address.ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Receives one datagram. What does not fit in `buf` is lost.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the time-out is over or the socket is
    /// non-blocking and there is nothing; [`io::ErrorKind::ConnectionRefused`]
    /// and the like when the peer's host reported an error.
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

    /// Receives one datagram, with all that is known about it.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_meta(&self, buf: &mut [u8]) -> io::Result<Received> {
        self.wait_readable(|calls| unless_blocked(calls.udp_recv(self.inner.id, buf, false)))
    }

    /// As [`UdpSocket::recv_meta`], and leaves the datagram for the next call.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn peek_meta(&self, buf: &mut [u8]) -> io::Result<Received> {
        self.wait_readable(|calls| unless_blocked(calls.udp_recv(self.inner.id, buf, true)))
    }

    /// Takes datagrams from everybody again, as before [`UdpSocket::connect`].
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another socket took its place.
    pub fn disconnect(&self) -> io::Result<()> {
        self.inner.net.with(|calls| calls.udp_connect(self.inner.id, None))
    }

    /// Receives as many datagrams as have arrived, at least one, each into one
    /// of `buffers`, and tells about them in `received`, which is cleared
    /// first.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_batch(
        &self,
        buffers: &mut [&mut [u8]],
        received: &mut Vec<Received>,
    ) -> io::Result<()> {
        received.clear();
        self.wait_readable(|calls| {
            for buf in buffers.iter_mut() {
                match calls.udp_recv(self.inner.id, buf, false) {
                    Ok(one) => received.push(one),
                    // An error after datagrams is told by the next call.
                    Err(CallError::Failed(error)) if received.is_empty() => {
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
    /// [`io::ErrorKind::WouldBlock`] when the time-out is over or the socket is
    /// non-blocking and there is no room; [`io::ErrorKind::InvalidInput`] for more
    /// bytes than a datagram can hold, 65,507 on IPv4;
    /// [`io::ErrorKind::NetworkUnreachable`] without a route; an error that the
    /// connected peer's host reported before.
    pub fn send_to(&self, payload: &[u8], to: impl ToSocketAddrs) -> io::Result<usize> {
        let to = to.to_socket_addrs()?.next().ok_or_else(no_address)?;
        self.send_one(payload, Some(to), None)
    }

    /// Sends one datagram to the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], and [`io::ErrorKind::NotConnected`].
    pub fn send(&self, payload: &[u8]) -> io::Result<usize> {
        self.send_one(payload, None, None)
    }

    /// Sends one datagram from this address of the stack's, to `to` or to the
    /// connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub fn send_from(
        &self,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: IpAddr,
    ) -> io::Result<usize> {
        self.send_one(payload, to, Some(from))
    }

    fn send_one(
        &self,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> io::Result<usize> {
        self.wait_writable(|calls| {
            calls.read_clock();
            let sent = calls.udp_send(self.inner.id, payload, to, from);
            unless_blocked(sent.and_then(|()| Ok(calls.udp_flush().map(|()| payload.len())?)))
        })
    }

    /// Sends datagrams, each to its own address, and returns how many. They go
    /// to the wire together. An error in the middle is told by the next call;
    /// the count says where to go on.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`], when the first datagram cannot be sent.
    pub fn send_batch(&self, datagrams: &[(&[u8], SocketAddr)]) -> io::Result<usize> {
        if datagrams.is_empty() {
            return Ok(0);
        }
        self.wait_writable(|calls| {
            calls.read_clock();
            let mut sent = 0;
            for &(payload, to) in datagrams {
                match calls.udp_send(self.inner.id, payload, Some(to), None) {
                    Ok(()) => sent += 1,
                    Err(error) if sent == 0 => return unless_blocked(Err(error)),
                    Err(_) => break,
                }
            }
            Some(calls.udp_flush().map(|()| sent))
        })
    }

    /// Answers datagrams where they lie: waits for at least one, hands each to
    /// `answer` together with the payload of a frame to write the answer to,
    /// and sends as many bytes of it as `answer` says; `None` sends nothing.
    /// Nothing is copied. Returns how many datagrams were taken, at most 64.
    ///
    /// An answer leaves from the address that was asked. It is lost, and
    /// counted, when there is no room to send it.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn exchange(
        &self,
        mut answer: impl FnMut(Request<'_>, &mut [u8]) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(|stack, arena, now_ns, id| {
            stack.udp_exchange(now_ns, arena, id, EXCHANGE_BATCH, &mut answer)
        })
    }

    /// As [`UdpSocket::exchange`], but each answer is written over its
    /// datagram, for answers that are much like their questions: no second
    /// buffer is needed, and what stays the same need not be written.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn exchange_in_place(
        &self,
        mut answer: impl FnMut(InPlace<'_>) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(|stack, arena, now_ns, id| {
            stack.udp_exchange_in_place(now_ns, arena, id, EXCHANGE_BATCH, &mut answer)
        })
    }

    /// Waits for datagrams, lets `exchange` answer a batch of them, and
    /// transmits the answers.
    fn exchange_batch(
        &self,
        mut exchange: impl FnMut(&mut Stack, &mut Arena, u64, UdpId) -> usize,
    ) -> io::Result<usize> {
        let id = self.inner.id;
        self.wait_readable(|calls| {
            if let Some(error) = calls.udp_take_error(id) {
                return Some(Err(error));
            }
            let Some(core) = calls.core() else { return Some(Err(elsewhere("exchange"))) };
            let (stack, arena, now_ns) = core.engine.parts();
            let taken = exchange(stack, arena, now_ns, id);
            if taken == 0 {
                return None;
            }
            core.pass_on(id);
            Some(core.engine.flush().map(|()| taken))
        })
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

    /// How long receiving calls wait; `None` for ever.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a time-out of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_timeout(&self.inner.read_timeout, timeout)
    }

    /// How long sending calls wait for room; `None` for ever.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a time-out of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_timeout(&self.inner.write_timeout, timeout)
    }

    /// The read time-out.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(timeout(&self.inner.read_timeout))
    }

    /// The write time-out.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(timeout(&self.inner.write_timeout))
    }

    /// The error that the peer's host reported, if any; it is then forgotten.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.inner.net.with(|calls| calls.udp_take_error(self.inner.id)))
    }

    /// A second handle on the same socket.
    ///
    /// # Errors
    /// None; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    pub(crate) fn udp_id(&self) -> UdpId {
        self.inner.id
    }

    fn wait_readable<R>(
        &self,
        ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        self.wait(&self.inner.read_timeout, ready)
    }

    fn wait_writable<R>(
        &self,
        ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        self.wait(&self.inner.write_timeout, ready)
    }

    fn wait<R>(
        &self,
        limit: &Mutex<Option<Duration>>,
        ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let patience = if self.inner.nonblocking.load(Ordering::Relaxed) {
            Patience::None
        } else {
            Patience::timeout(timeout(limit))
        };
        self.inner.net.wait_for(&[SocketId::Udp(self.inner.id)], patience, ready)
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

impl Drop for Inner {
    fn drop(&mut self) {
        let (id, claim) = (self.id, self.claim.take());
        self.net.with(|calls| calls.udp_close(id, claim));
    }
}

fn timeout(cell: &Mutex<Option<Duration>>) -> Option<Duration> {
    *cell.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set_timeout(cell: &Mutex<Option<Duration>>, timeout: Option<Duration>) -> io::Result<()> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a time-out of zero: use set_nonblocking",
        ));
    }
    *cell.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    Ok(())
}

pub(crate) fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the name resolves to no address")
}

pub(crate) fn first_that_works<R>(
    address: impl ToSocketAddrs,
    mut attempt: impl FnMut(SocketAddr) -> io::Result<R>,
) -> io::Result<R> {
    let mut last = no_address();
    for address in address.to_socket_addrs()? {
        match attempt(address) {
            Ok(result) => return Ok(result),
            Err(error) => last = error,
        }
    }
    Err(last)
}
