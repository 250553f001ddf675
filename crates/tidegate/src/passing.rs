//! Sockets that are handed from process to process, both attached to one daemon,
//! with a descriptor of the kernel's.

use std::io;
use std::os::fd::BorrowedFd;

use tidegate_service::attachment::Kind;

use crate::attached::{listener, stream, udp};
use crate::net::Net;
use crate::poll::Source;
use crate::tcp::{TcpListener, TcpStream};
use crate::udp::UdpSocket;

/// A socket that came from another process.
#[derive(Debug)]
pub enum Arrived {
    /// A UDP socket.
    Udp(UdpSocket),
    /// It listens for connections.
    Listener(TcpListener),
    /// A connection.
    Stream(TcpStream),
}

/// Why nothing is handed on by a stack that is in this program.
fn here() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "a socket of a stack in this program cannot be handed to another one: attach both to a \
         daemon",
    )
}

impl Net {
    /// Before a descriptor of the kernel's is handed to another process: whoever
    /// shows it, by [`Net::take`], gets this socket, each process once for each time
    /// it was offered. For a minute it stays open for that. Both processes must be of
    /// one user and may both use it from then on.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] when the stack is in this program,
    /// [`io::ErrorKind::QuotaExceeded`] when too many are on their way, and what the
    /// daemon's door says.
    pub fn offer(&self, socket: &dyn Source, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.attached().ok_or_else(here)?.lock().offer(socket.id(), descriptor)
    }

    /// The socket was not handed on with the descriptor after all.
    ///
    /// # Errors
    /// As [`Net::offer`].
    pub fn withdraw(&self, socket: &dyn Source, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.attached().ok_or_else(here)?.lock().withdraw(socket.id(), descriptor)
    }

    /// Before a port is bound here that the program has bound at the kernel itself, by
    /// this descriptor. Only so it gets the port of a daemon that lives on the kernel's
    /// addresses; and who listens there shares that, as at the kernel, with all who have
    /// the descriptor: they get the listener by [`Net::take`].
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] when the stack is in this program,
    /// [`io::ErrorKind::InvalidInput`] when it is no socket that is bound, and what
    /// the daemon's door says.
    pub fn hold(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.attached().ok_or_else(here)?.lock().hold(descriptor)
    }

    /// Waits until the daemon has let go of what this program has closed, and of what it
    /// held of the kernel for that.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] when the stack is in this program, and
    /// [`io::ErrorKind::ConnectionAborted`] when the daemon has ended.
    pub fn await_closed(&self) -> io::Result<()> {
        self.attached().ok_or_else(here)?.lock().await_closed()
    }

    /// The socket that was offered with this descriptor, or the listener that is on it;
    /// `None` when it is one of this [`Net`]'s already.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is none,
    /// [`io::ErrorKind::PermissionDenied`] when it is another user's,
    /// [`io::ErrorKind::QuotaExceeded`] when there is no place for it, and as
    /// [`Net::offer`].
    pub fn take(&self, descriptor: BorrowedFd<'_>) -> io::Result<Option<Arrived>> {
        let arrived = self.attached().ok_or_else(here)?.lock().take(descriptor)?;
        if !arrived.is_new {
            return Ok(None);
        }
        let name = arrived.socket;
        Ok(Some(match arrived.kind {
            Kind::Datagrams => Arrived::Udp(UdpSocket::new(self, udp(name), None)),
            Kind::Listener => Arrived::Listener(TcpListener::new(self, listener(name)?, None)),
            Kind::Stream => Arrived::Stream(TcpStream::new(self, stream(name), None)),
        }))
    }
}
