//! Receiving and sending.

use std::borrow::Cow;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libc::c_int;
use tidegate::{Batch, DatagramMeta, TcpState, TcpStream, UdpSendOptions};
use tidegate_posix::families::check_families;
use tidegate_posix::unreachable::with_unreachable_reason;

use super::{Endpoint, IoDirection, Protocol, Socket, os_error};

/// Longest payload of a datagram in bytes: with the headers of UDP and IPv4 65,535 bytes.
const MAX_V4_PAYLOAD_BYTES: usize = 65_507;
/// The same on IPv6, which does not count its own header.
const MAX_V6_PAYLOAD_BYTES: usize = 65_527;

/// Received data.
pub(crate) struct Received {
    /// Bytes in the buffers; with `MSG_TRUNC` the bytes of the datagram.
    pub(crate) len: usize,
    /// Addresses and lengths, of a datagram.
    pub(crate) datagram: Option<DatagramMeta>,
}

/// The kernel's error codes of datagrams.
fn datagram_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::InvalidInput => os_error(libc::EMSGSIZE),
        io::ErrorKind::NotConnected => os_error(libc::EDESTADDRREQ),
        _ => error,
    }
}

/// Payload of buffers that are sent one after the other.
fn joined<'d>(data: &'d [IoSlice<'_>]) -> Cow<'d, [u8]> {
    match data {
        [one] => Cow::Borrowed(one),
        _ => data.iter().flat_map(|piece| piece.iter().copied()).collect(),
    }
}

/// Copies `data` into the buffers in order.
fn scatter(mut data: &[u8], bufs: &mut [IoSliceMut<'_>]) {
    for buf in bufs {
        let (chunk, rest) = data.split_at(data.len().min(buf.len()));
        buf[..chunk.len()].copy_from_slice(chunk);
        data = rest;
    }
}

impl Socket {
    /// Turns `NotConnected` into `WouldBlock` while connecting: such a call waits for the
    /// connection, as at the kernel.
    #[cold]
    fn stream_error(&self, stream: &TcpStream, error: io::Error) -> io::Error {
        let error = with_unreachable_reason(stream, error);
        if error.kind() == io::ErrorKind::NotConnected
            && self.is_connecting.load(Ordering::Relaxed)
            && stream
                .info()
                .is_ok_and(|info| matches!(info.state, TcpState::SynSent | TcpState::SynReceived))
        {
            return io::ErrorKind::WouldBlock.into();
        }
        error
    }

    /// Connection of a TCP socket.
    ///
    /// # Errors
    /// `ENOTCONN`, or `EPIPE` for a call that sends.
    fn connection(&self, direction: IoDirection) -> io::Result<&TcpStream> {
        self.stream().ok_or_else(|| match direction {
            IoDirection::Read => os_error(libc::ENOTCONN),
            IoDirection::Write => os_error(libc::EPIPE),
        })
    }

    /// Receives into one buffer of a connection, or one datagram without its address.
    ///
    /// # Errors
    /// As `recv`.
    #[inline]
    pub(crate) fn receive_bytes(
        self: &Arc<Self>,
        buf: &mut [u8],
        flags: c_int,
    ) -> io::Result<usize> {
        match self.endpoint() {
            Some(Endpoint::Stream(stream)) if flags & !libc::MSG_DONTWAIT == 0 => {
                let may_block = flags == 0;
                self.retry_until_ready(IoDirection::Read, may_block, || {
                    match stream.try_recv(buf) {
                        Ok(0) => self.end_of_stream(),
                        Ok(len) => Ok(len),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
                        Err(error) => Err(self.stream_error(stream, error)),
                    }
                })
            }
            _ => self.receive(&mut [IoSliceMut::new(buf)], flags).map(|received| received.len),
        }
    }

    fn end_of_stream(&self) -> io::Result<usize> {
        match self.has_never_connected.load(Ordering::Relaxed) {
            true => Err(os_error(libc::ENOTCONN)),
            false => Ok(0),
        }
    }

    /// Receives one datagram and gives its sender to a function, which takes fewer instructions than
    /// to return it; `None` for a connection, and where flags other than `MSG_DONTWAIT` are set.
    ///
    /// # Errors
    /// As `recvfrom`.
    #[inline(always)]
    pub(crate) fn receive_one_datagram(
        &self,
        buf: &mut [u8],
        flags: c_int,
        write_sender: impl FnOnce(&SocketAddr),
    ) -> Option<io::Result<usize>> {
        let Some(Endpoint::Udp(udp)) = self.endpoint() else { return None };
        if flags & !libc::MSG_DONTWAIT != 0 {
            return None;
        }
        match udp.recv_meta(buf) {
            Ok(ref datagram) => {
                write_sender(&datagram.from);
                Some(Ok(datagram.len))
            }
            // The slow path waits, and knows the errors.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => Some(Err(datagram_error(error))),
        }
    }

    /// Sends one datagram to an address of the socket's own family; `None` where the slow path has
    /// to look at the call.
    ///
    /// # Errors
    /// As `sendto`.
    #[inline(always)]
    pub(crate) fn send_one_datagram(
        &self,
        data: &[u8],
        to: SocketAddr,
        flags: c_int,
    ) -> Option<io::Result<usize>> {
        const PLAIN: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let Some(Endpoint::Udp(udp)) = self.endpoint() else { return None };
        let is_own_family = match to {
            SocketAddr::V4(_) => !self.is_v6,
            SocketAddr::V6(v6) => self.is_v6 && v6.ip().to_ipv4_mapped().is_none(),
        };
        if !is_own_family
            || to.port() == 0
            || flags & !PLAIN != 0
            || data.len() > MAX_V4_PAYLOAD_BYTES
        {
            return None;
        }
        match udp.send_with(data, Some(to), UdpSendOptions::default()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => Some(Err(datagram_error(error))),
            sent => Some(sent),
        }
    }

    /// Receives into the buffers in order.
    ///
    /// # Errors
    /// As `recvmsg`.
    pub(crate) fn receive(
        self: &Arc<Self>,
        bufs: &mut [IoSliceMut<'_>],
        flags: c_int,
    ) -> io::Result<Received> {
        if flags & libc::MSG_OOB != 0 {
            return Err(os_error(libc::EINVAL));
        }
        if flags & libc::MSG_ERRQUEUE != 0 {
            return Err(os_error(libc::EAGAIN));
        }
        if self.protocol == Protocol::Udp {
            return self.receive_datagram(bufs, flags);
        }
        let stream = self.connection(IoDirection::Read)?;
        let may_block = flags & libc::MSG_DONTWAIT == 0;
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        let waits_for_all = flags & (libc::MSG_WAITALL | libc::MSG_PEEK) == libc::MSG_WAITALL;
        let mut total = 0;
        loop {
            let received = self.retry_until_ready(IoDirection::Read, may_block, || {
                let received = self.net.batch(|batch| match flags & libc::MSG_PEEK {
                    0 => match total {
                        0 => batch.recv_vectored(stream, bufs),
                        _ => receive_rest(batch, stream, bufs, total),
                    },
                    _ => peek(batch, stream, bufs),
                })?;
                received.map_err(|error| self.stream_error(stream, error))
            });
            match received {
                Ok(0) if total == 0 => {
                    return self.end_of_stream().map(|len| Received { len, datagram: None });
                }
                Ok(len) => {
                    total += len;
                    if len == 0 || total >= wanted || !waits_for_all {
                        break;
                    }
                }
                // An error after data is returned by the next call.
                Err(_) if total > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Received { len: total, datagram: None })
    }

    fn receive_datagram(
        self: &Arc<Self>,
        bufs: &mut [IoSliceMut<'_>],
        flags: c_int,
    ) -> io::Result<Received> {
        let udp = self.udp()?;
        let receive = |buf: &mut [u8]| match flags & libc::MSG_PEEK {
            0 => udp.recv_meta(buf),
            _ => udp.peek_meta(buf),
        };
        let may_block = flags & libc::MSG_DONTWAIT == 0;
        let received = self.retry_until_ready(IoDirection::Read, may_block, || match bufs {
            [one] => receive(one),
            _ => {
                let mut whole = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
                let received = receive(&mut whole)?;
                scatter(&whole[..received.len], bufs);
                Ok(received)
            }
        });
        match received {
            Ok(datagram) => {
                let len = match flags & libc::MSG_TRUNC {
                    0 => datagram.len,
                    _ => datagram.datagram_len,
                };
                Ok(Received { len, datagram: Some(datagram) })
            }
            // The receive direction was shut down.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Ok(Received { len: 0, datagram: None })
            }
            Err(error) => Err(datagram_error(error)),
        }
    }

    /// Sends one buffer on a connection, or one datagram to the connected peer.
    ///
    /// # Errors
    /// As `send`.
    #[inline]
    pub(crate) fn send_bytes(self: &Arc<Self>, data: &[u8], flags: c_int) -> io::Result<usize> {
        const PLAIN: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        match self.endpoint() {
            Some(Endpoint::Stream(stream))
                if flags & !PLAIN == 0 && !self.more_follows.load(Ordering::Relaxed) =>
            {
                let may_block = flags & libc::MSG_DONTWAIT == 0 && !self.is_nonblocking();
                let sent = match stream.try_send(data) {
                    Ok(len) if len == data.len() || !may_block => return Ok(len),
                    Ok(len) => len,
                    Err(error) if may_block && error.kind() == io::ErrorKind::WouldBlock => 0,
                    Err(error) => match self.stream_error(stream, error) {
                        error if may_block && error.kind() == io::ErrorKind::WouldBlock => 0,
                        error => return Err(error),
                    },
                };
                self.send_stream(stream, &[IoSlice::new(data)], true, sent)
            }
            _ => self.send(&[IoSlice::new(data)], None, UdpSendOptions::default(), flags),
        }
    }

    /// Sends the buffers in order: as far as there is space if the call may not wait, else all.
    ///
    /// # Errors
    /// As `sendmsg`.
    pub(crate) fn send(
        self: &Arc<Self>,
        data: &[IoSlice<'_>],
        to: Option<SocketAddr>,
        options: UdpSendOptions,
        flags: c_int,
    ) -> io::Result<usize> {
        if flags & libc::MSG_OOB != 0 {
            return Err(os_error(libc::EOPNOTSUPP));
        }
        let may_block = flags & libc::MSG_DONTWAIT == 0;
        if self.protocol == Protocol::Udp {
            return self.send_datagram(data, to, options, may_block);
        }
        let stream = self.connection(IoDirection::Write)?;
        let more_follows = flags & libc::MSG_MORE != 0;
        if more_follows && !self.more_follows.swap(true, Ordering::Relaxed) {
            self.update_cork(stream, true);
        }
        let sent = self.send_stream(stream, data, may_block, 0);
        if !more_follows && self.more_follows.swap(false, Ordering::Relaxed) {
            self.update_cork(stream, false);
        }
        sent
    }

    /// Holds back a segment that is not full, or no longer unless the program has set `TCP_CORK`.
    fn update_cork(&self, stream: &TcpStream, more_follows: bool) {
        let is_corked = more_follows || self.settings().cork;
        // An ended connection has no options; sending returns its error.
        let _ = stream.set_options(|options| options.cork = is_corked);
    }

    fn send_stream(
        &self,
        stream: &TcpStream,
        data: &[IoSlice<'_>],
        may_block: bool,
        already_sent: usize,
    ) -> io::Result<usize> {
        let wanted: usize = data.iter().map(|piece| piece.len()).sum();
        let waits_for_all = may_block && !self.is_nonblocking();
        let mut total = already_sent;
        loop {
            let sent = self.retry_until_ready(IoDirection::Write, may_block, || {
                let sent = self.net.batch(|batch| match (data, total) {
                    (_, 0) if wanted == 0 => batch.send(stream, &[]),
                    ([one], _) => batch.send(stream, &one[total..]),
                    (_, 0) => batch.send_vectored(stream, data),
                    _ => batch.send(stream, &joined(data)[total..]),
                })?;
                sent.map_err(|error| self.stream_error(stream, error))
            });
            match sent {
                Ok(len) => total += len,
                // An error after data is returned by the next call.
                Err(_) if total > 0 => return Ok(total),
                Err(error) => return Err(error),
            }
            if total >= wanted || !waits_for_all {
                return Ok(total);
            }
        }
    }

    fn send_datagram(
        self: &Arc<Self>,
        data: &[IoSlice<'_>],
        to: Option<SocketAddr>,
        options: UdpSendOptions,
        may_block: bool,
    ) -> io::Result<usize> {
        let udp = self.udp()?;
        if let Some(to) = to {
            if to.port() == 0 {
                return Err(os_error(libc::EINVAL));
            }
            if to.ip().to_canonical().is_ipv6() != self.is_v6 {
                let local = udp.local_addr()?.ip();
                check_families(self.is_v6, self.settings().v6_only, local, to.ip())?;
            }
        }
        let to = to.map(|to| SocketAddr::new(to.ip().to_canonical(), to.port()));
        let payload = joined(data);
        if payload.len() > MAX_V4_PAYLOAD_BYTES {
            let is_v4 = to.or_else(|| udp.peer_addr().ok()).is_some_and(|to| to.is_ipv4());
            if is_v4 || payload.len() > MAX_V6_PAYLOAD_BYTES {
                return Err(os_error(libc::EMSGSIZE));
            }
        }
        self.retry_until_ready(IoDirection::Write, may_block, || {
            udp.send_with(&payload, to, options)
        })
        .map_err(datagram_error)
    }
}

/// Peeks into one joined buffer, since each peek starts at the head of the queue.
fn peek(
    batch: &mut Batch<'_>,
    stream: &TcpStream,
    bufs: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let mut whole = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
    let len = batch.peek(stream, &mut whole)?;
    scatter(&whole[..len], bufs);
    Ok(len)
}

/// Receives into the buffers behind the first `filled` bytes.
fn receive_rest(
    batch: &mut Batch<'_>,
    stream: &TcpStream,
    bufs: &mut [IoSliceMut<'_>],
    mut filled: usize,
) -> io::Result<usize> {
    for buf in bufs {
        if filled < buf.len() {
            return batch.recv(stream, &mut buf[filled..]);
        }
        filled -= buf.len();
    }
    Ok(0)
}
