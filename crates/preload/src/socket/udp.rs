//! UDP: receiving and sending datagrams without blocking.

use std::borrow::Cow;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use tidegate::{DatagramMeta, Source, UdpSocket};
use tidegate_posix::control::{ControlRequests, SendOptions};
use tidegate_posix::families::check_families;

use super::receive_time::ReceiveTime;
use super::tcp::scatter;
use super::zero_copy::ZeroCopy;
use super::{Socket, Udp};
use crate::{real, rules};

/// Longest payload of a datagram in bytes: with the headers of UDP and IPv4 65,535 bytes.
const MAX_V4_PAYLOAD_BYTES: usize = 65_507;
/// The same on IPv6, which does not count its own header.
const MAX_V6_PAYLOAD_BYTES: usize = 65_527;

/// The kernel's limit of datagrams that one call sends.
const MAX_SEGMENTS: usize = 128;

/// Payload that fits into a packet on every path.
const MIN_CHECKED_BYTES: usize = 508;

impl Udp {
    pub(super) fn new(socket: UdpSocket) -> Self {
        let bound = socket.local_addr().map_or(IpAddr::from([0; 16]), |local| local.ip());
        Self {
            socket,
            bound,
            control_requests: ControlRequests::default(),
            is_connected: AtomicBool::new(false),
            dont_fragment: AtomicBool::new(false),
            segment_bytes: AtomicU16::new(0),
            zero_copy: ZeroCopy::default(),
            receive_time: ReceiveTime::default(),
        }
    }

    /// Receives one datagram. With `consume` false the datagram stays in the queue (`MSG_PEEK`).
    pub(crate) fn receive(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        consume: bool,
    ) -> io::Result<DatagramMeta> {
        let ready = self.socket.readiness();
        if !ready.readable && !ready.failed {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let receive = |buf: &mut [u8]| match consume {
            true => self.socket.recv_meta(buf),
            false => self.socket.peek_meta(buf),
        };
        let received = match bufs {
            [one] => receive(one).map_err(with_code)?,
            _ => {
                let mut joined = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
                let received = receive(&mut joined).map_err(with_code)?;
                scatter(&joined[..received.len], bufs);
                received
            }
        };
        if !self.control_requests.include_time() {
            self.receive_time.on_received(received.received_ns);
        }
        Ok(received)
    }

    /// Payload bytes of the next datagram; 0 when there is none.
    pub(crate) fn next_datagram_bytes(&self) -> usize {
        match self.socket.readiness().readable {
            true => self.socket.peek_meta(&mut []).map_or(0, |next| next.datagram_len),
            false => 0,
        }
    }

    /// Closes directions as at the kernel: also for a socket that is not connected, although the
    /// call fails there. The kernel's own socket may wait for datagrams, too.
    pub(crate) fn shutdown(&self, fd: i32, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how);
        let number = match how {
            Shutdown::Read => libc::SHUT_RD,
            Shutdown::Write => libc::SHUT_WR,
            Shutdown::Both => libc::SHUT_RDWR,
        };
        // SAFETY: closes directions of a socket of the application.
        unsafe { real::shutdown(fd, number) };
        match self.is_connected.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Sends a payload to an address or to the connected peer, as one datagram or as several of one
    /// size. Returns the bytes sent, of several datagrams perhaps not all.
    pub(crate) fn send(
        &self,
        socket: &Socket,
        payload: &[u8],
        to: Option<SocketAddr>,
        options: SendOptions,
    ) -> io::Result<usize> {
        if to.is_some_and(|to| to.port() == 0) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let of_socket = || self.segment_bytes.load(Ordering::Relaxed);
        let segment_bytes = options.segment_bytes.unwrap_or_else(of_socket);
        self.check_size(socket, payload.len(), segment_bytes, to)?;
        let sent = match NonZero::new(segment_bytes) {
            Some(size) if payload.len() > size.get().into() => {
                self.socket.send_segments(payload, size, to, options.fields)
            }
            _ => self.socket.send_with(payload, to, options.fields),
        };
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::NotConnected => io::Error::from_raw_os_error(libc::EDESTADDRREQ),
            _ => with_code(error),
        })
    }

    /// Sets the payload bytes of each datagram that a call sends (`UDP_SEGMENT`); 0 is one datagram.
    pub(super) fn set_segment_bytes(&self, bytes: u16) {
        self.segment_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Sets whether datagrams may be fragmented.
    pub(super) fn set_dont_fragment(&self, dont_fragment: bool) {
        self.dont_fragment.store(dont_fragment, Ordering::Relaxed);
    }

    /// Checks that `len` bytes can be sent, as one datagram or as segments of this size.
    ///
    /// # Errors
    /// `EMSGSIZE`; `EINVAL` for too many segments.
    fn check_size(
        &self,
        socket: &Socket,
        len: usize,
        segment_bytes: u16,
        to: Option<SocketAddr>,
    ) -> io::Result<()> {
        let segment_bytes = usize::from(segment_bytes);
        let has_segments = segment_bytes > 0;
        let dont_fragment = has_segments || self.dont_fragment.load(Ordering::Relaxed);
        if !has_segments
            && len <= (if dont_fragment { MIN_CHECKED_BYTES } else { MAX_V4_PAYLOAD_BYTES })
        {
            return Ok(());
        }
        let Some(to) = to.or_else(|| self.socket.peer_addr().ok()) else { return Ok(()) };
        let (limit, header_bytes) = match is_v6(to.ip()) {
            true => (MAX_V6_PAYLOAD_BYTES, 48),
            false => (MAX_V4_PAYLOAD_BYTES, 28),
        };
        let mut fits = len <= limit;
        if fits && dont_fragment {
            let longest = if has_segments { len.min(segment_bytes) } else { len };
            fits = socket.net.path_mtu(to.ip()).is_none_or(|mtu| header_bytes + longest <= mtu);
        }
        match fits {
            true if has_segments && len > segment_bytes * MAX_SEGMENTS => {
                Err(io::Error::from_raw_os_error(libc::EINVAL))
            }
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
        }
    }

    /// Checks that the socket can send to an address of this family.
    ///
    /// # Errors
    /// As [`check_families`].
    pub(crate) fn check_family(&self, socket: &Socket, to: Option<SocketAddr>) -> io::Result<()> {
        let Some(to) = to else { return Ok(()) };
        check_families(socket.is_v6, socket.is_v6_only(), self.bound, to.ip())
    }

    /// True when the kernel socket must send to this address.
    pub(crate) fn is_kernel_destination(&self, socket: &Socket, to: Option<SocketAddr>) -> bool {
        socket.uses_kernel_socket
            && to.is_some_and(|to| {
                rules::is_loopback(to.ip()) || socket.net.source_for(to.ip()).is_none()
            })
    }
}

/// Payload of buffers that are sent one after the other.
pub(crate) fn joined<'d>(data: &'d [IoSlice<'_>]) -> Cow<'d, [u8]> {
    match data {
        [one] => Cow::Borrowed(one),
        _ => data.iter().flat_map(|piece| piece.iter().copied()).collect(),
    }
}

/// The kernel's error code of a datagram that is longer than the path allows.
pub(super) fn with_code(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::InvalidInput => io::Error::from_raw_os_error(libc::EMSGSIZE),
        _ => error,
    }
}

fn is_v6(ip: IpAddr) -> bool {
    ip.to_canonical().is_ipv6()
}
