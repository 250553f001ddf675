//! Datagrams.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;

use tidegate::{Received, Source, UdpSocket};

use super::tcp::scatter;
use super::{Socket, Udp};
use crate::rules;

impl Udp {
    pub(super) fn new(socket: UdpSocket) -> Self {
        Self {
            socket,
            tells_destination: AtomicBool::new(false),
            is_connected: AtomicBool::new(false),
        }
    }

    /// Receives one datagram, and takes it away if it is `taken`.
    pub(crate) fn receive(&self, bufs: &mut [IoSliceMut<'_>], taken: bool) -> io::Result<Received> {
        let ready = self.socket.readiness();
        if !ready.readable && !ready.failed {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let receive = |buf: &mut [u8]| match taken {
            true => self.socket.recv_meta(buf),
            false => self.socket.peek_meta(buf),
        };
        if let [one] = bufs {
            return receive(one);
        }
        let mut whole = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
        let received = receive(&mut whole)?;
        scatter(&whole[..received.len], bufs);
        Ok(received)
    }

    /// How long the next datagram is.
    pub(crate) fn next_len(&self) -> usize {
        match self.socket.readiness().readable {
            true => self.socket.peek_meta(&mut []).map_or(0, |next| next.datagram_len),
            false => 0,
        }
    }

    /// Sends one datagram.
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

    /// Whether the kernel's socket has to send there.
    pub(crate) fn is_for_kernel(&self, socket: &Socket, to: Option<SocketAddr>) -> bool {
        socket.has_kernel
            && to.is_some_and(|to| {
                rules::is_loopback(to.ip()) || socket.net.source_for(to.ip()).is_none()
            })
    }
}
