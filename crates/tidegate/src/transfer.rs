//! Sockets sent from process to process together with a kernel descriptor. Both processes are
//! attached to one daemon.

use std::io;
use std::os::fd::BorrowedFd;

use tidegate_service::attachment::SocketType;

use crate::backend::attached::socket_number::{listener_id, stream_id, udp_id};
use crate::net::handle::Net;
use crate::net::source::Source;
use crate::tcp::{TcpListener, TcpStream};
use crate::udp::UdpSocket;

/// Socket received from another process.
#[derive(Debug)]
pub enum ReceivedSocket {
    /// A UDP socket.
    Udp(UdpSocket),
    /// A TCP listener.
    Listener(TcpListener),
    /// A TCP connection.
    Stream(TcpStream),
}

/// Error of a socket transfer on an embedded stack.
fn unsupported_when_embedded() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "a socket of an embedded stack cannot be sent to another process: attach both to a \
         daemon",
    )
}

impl Net {
    /// Sends a socket to another process, before `fd` is passed there. A process that presents
    /// the descriptor to [`Net::receive_socket`] gets the socket, once for each call of this
    /// function. The daemon keeps the socket open for one minute for that. Both processes must
    /// belong to one user, and both may use the socket afterwards.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] on an embedded stack, [`io::ErrorKind::QuotaExceeded`]
    /// when too many sockets are in transfer, and the daemon's attach errors.
    pub fn send_socket(&self, socket: &dyn Source, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.attached().ok_or_else(unsupported_when_embedded)?.lock().send_socket(socket.id(), fd)
    }

    /// Cancels a transfer whose descriptor was not passed on after all.
    ///
    /// # Errors
    /// As [`Net::send_socket`].
    pub fn withdraw_socket(&self, socket: &dyn Source, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.attached()
            .ok_or_else(unsupported_when_embedded)?
            .lock()
            .withdraw_socket(socket.id(), fd)
    }

    /// Reserves the port of a bound kernel socket, before the port is bound on this [`Net`]. A
    /// daemon that shares the kernel's addresses grants the port only to the owner of such a
    /// socket. A listener on the port is then shared, as in the kernel, by all processes that
    /// have the descriptor: they get the listener from [`Net::receive_socket`].
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] on an embedded stack, [`io::ErrorKind::InvalidInput`]
    /// when `fd` is not a bound socket, and the daemon's attach errors.
    pub fn reserve_port(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.attached().ok_or_else(unsupported_when_embedded)?.lock().reserve_port(fd)
    }

    /// Waits until the daemon has released the sockets that this process has closed, and their
    /// kernel ports.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] on an embedded stack,
    /// [`io::ErrorKind::ConnectionAborted`] when the daemon has exited.
    pub fn await_closed(&self) -> io::Result<()> {
        self.attached().ok_or_else(unsupported_when_embedded)?.lock().await_closed()
    }

    /// Receives the socket that was sent with this descriptor, or the listener that is bound to
    /// it. Returns `None` when this [`Net`] already has that socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is no such socket,
    /// [`io::ErrorKind::PermissionDenied`] when it belongs to another user,
    /// [`io::ErrorKind::QuotaExceeded`] when this process has no free socket slot, and as
    /// [`Net::send_socket`].
    pub fn receive_socket(&self, fd: BorrowedFd<'_>) -> io::Result<Option<ReceivedSocket>> {
        let received =
            self.attached().ok_or_else(unsupported_when_embedded)?.lock().receive_socket(fd)?;
        if !received.is_new {
            return Ok(None);
        }
        let number = received.socket;
        Ok(Some(match received.kind {
            SocketType::Udp => ReceivedSocket::Udp(UdpSocket::new(self, udp_id(number), None)),
            SocketType::Listener => {
                ReceivedSocket::Listener(TcpListener::new(self, listener_id(number)?, None))
            }
            SocketType::Stream => {
                ReceivedSocket::Stream(TcpStream::new(self, stream_id(number), None))
            }
        }))
    }
}
