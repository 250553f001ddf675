//! UDP: receiving and sending datagrams without blocking.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;

use tidegate::{DatagramMeta, Source, UdpSocket};

use super::tcp::scatter;
use super::{Socket, Udp};
use crate::rules;

impl Udp {
    pub(super) fn new(socket: UdpSocket) -> Self {
        Self {
            socket,
            reports_destination: AtomicBool::new(false),
            is_connected: AtomicBool::new(false),
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
        if let [one] = bufs {
            return receive(one);
        }
        let mut joined = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
        let received = receive(&mut joined)?;
        scatter(&joined[..received.len], bufs);
        Ok(received)
    }

    /// Payload bytes of the next datagram; 0 when there is none.
    pub(crate) fn next_datagram_bytes(&self) -> usize {
        match self.socket.readiness().readable {
            true => self.socket.peek_meta(&mut []).map_or(0, |next| next.datagram_len),
            false => 0,
        }
    }

    /// Sends one datagram, optionally to an address and from a source address.
    pub(crate) fn send(
        &self,
        data: &[IoSlice<'_>],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> io::Result<usize> {
        let joined;
        let payload = match data {
            [one] => &**one,
            _ => {
                joined = data.iter().flat_map(|piece| piece.iter().copied()).collect::<Vec<u8>>();
                &joined
            }
        };
        match (to, from) {
            (to, Some(from)) => self.socket.send_from(payload, to, from),
            (Some(to), None) => self.socket.send_to(payload, to),
            (None, None) => self.socket.send(payload),
        }
    }

    /// Checks that the socket can send to an address of this family.
    ///
    /// # Errors
    /// The kernel's: `EAFNOSUPPORT` for IPv6 on an IPv4 socket, `ENETUNREACH` for IPv4 on a socket
    /// that is bound to an IPv6 address.
    pub(crate) fn check_family(&self, socket: &Socket, to: Option<SocketAddr>) -> io::Result<()> {
        let Some(to) = to else { return Ok(()) };
        if !socket.is_v6 {
            return match to.is_ipv4() {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
            };
        }
        let sends_v4 = to.ip().to_canonical().is_ipv4();
        let is_bound_to_v6 = |local: SocketAddr| {
            let ip = local.ip().to_canonical();
            ip.is_ipv6() && !ip.is_unspecified()
        };
        match sends_v4 && self.socket.local_addr().is_ok_and(is_bound_to_v6) {
            true => Err(io::Error::from_raw_os_error(libc::ENETUNREACH)),
            false => Ok(()),
        }
    }

    /// True when the kernel socket must send to this address.
    pub(crate) fn is_kernel_destination(&self, socket: &Socket, to: Option<SocketAddr>) -> bool {
        socket.uses_kernel_socket
            && to.is_some_and(|to| {
                rules::is_loopback(to.ip()) || socket.net.source_for(to.ip()).is_none()
            })
    }
}
