//! What can go wrong with a socket.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Why a socket could not be made or used, or what a peer reported about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum SocketError {
    /// The socket was closed.
    #[error("the socket is closed")]
    Closed,
    /// Another socket has the address and port.
    #[error("{0} is in use by another socket: choose another port, or 0 for any")]
    AddressInUse(SocketAddr),
    /// The address is not ours.
    #[error(
        "{0} is not an address of this interface: bind to one that is, or to the unspecified address"
    )]
    AddressNotAvailable(IpAddr),
    /// No port is free.
    #[error("no port is free on {0}: close sockets that are no longer used")]
    NoPortFree(IpAddr),
    /// There are as many sockets as the limits allow.
    #[error("all {0} sockets are in use: close some, or raise the limit")]
    TooManySockets(usize),
    /// The peer's address is of the other family, or none that can be sent to.
    #[error(
        "{0} cannot be reached from this socket: give a host's address of its family and a port"
    )]
    PeerInvalid(SocketAddr),
    /// The peer's host said that nobody listens there.
    #[error("{0} refused: nobody listens on that port")]
    ConnectionRefused(SocketAddr),
    /// A router or a missing neighbour: the host cannot be reached.
    #[error("{0} cannot be reached: no answer from its host or the router before it")]
    HostUnreachable(SocketAddr),
    /// No way to the network.
    #[error("the network of {0} cannot be reached: add a route")]
    NetworkUnreachable(SocketAddr),
    /// A datagram was too large for the path and must not be fragmented.
    #[error("datagrams to {remote} may be at most {limit_bytes} bytes long on this path")]
    MessageTooLong {
        /// The peer.
        remote: SocketAddr,
        /// The largest payload.
        limit_bytes: usize,
    },
}

impl SocketError {
    /// The kind of I/O error that programs know this by.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Closed => ErrorKind::NotConnected,
            Self::AddressInUse(_) => ErrorKind::AddrInUse,
            Self::AddressNotAvailable(_) | Self::NoPortFree(_) => ErrorKind::AddrNotAvailable,
            Self::TooManySockets(_) => ErrorKind::OutOfMemory,
            Self::PeerInvalid(_) | Self::MessageTooLong { .. } => ErrorKind::InvalidInput,
            Self::ConnectionRefused(_) => ErrorKind::ConnectionRefused,
            Self::HostUnreachable(_) => ErrorKind::HostUnreachable,
            Self::NetworkUnreachable(_) => ErrorKind::NetworkUnreachable,
        }
    }
}

impl From<SocketError> for Error {
    fn from(error: SocketError) -> Self {
        Error::new(error.kind(), error)
    }
}

/// Why a datagram was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The socket was closed.
    #[error("the socket is closed")]
    Closed,
    /// No destination was given and the socket is not connected.
    #[error("no destination: connect the socket or say where to send")]
    NotConnected,
    /// The destination is of the other family, or none that can be sent to.
    #[error("{0} cannot be sent to from this socket: give an address of its family and a port")]
    DestinationInvalid(SocketAddr),
    /// The source address asked for is not ours.
    #[error("{0} is not an address of this interface: send from one that is")]
    SourceNotOurs(IpAddr),
    /// No address of ours can be the source for this destination.
    #[error("the interface has no address to send to {0} from: add one of its family")]
    NoSource(IpAddr),
    /// No route leads there.
    #[error("no route to {0}: add one")]
    NetworkUnreachable(IpAddr),
    /// The next hop did not answer address resolution.
    #[error("{0} does not answer address resolution")]
    HostUnreachable(IpAddr),
    /// The datagram is too long for the path, or for any packet at all.
    #[error("the datagram is too long: at most {limit_bytes} bytes can be sent there")]
    MessageTooLong {
        /// The largest payload that can be sent to that destination.
        limit_bytes: usize,
    },
    /// Nothing is wrong, but a queue or the arena is full: try again after the
    /// port has sent some.
    #[error("queues are full: try again when frames were sent")]
    WouldBlock,
}

impl SendError {
    /// The kind of I/O error that programs know this by.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Closed | Self::NotConnected => ErrorKind::NotConnected,
            Self::DestinationInvalid(_) | Self::MessageTooLong { .. } => ErrorKind::InvalidInput,
            Self::SourceNotOurs(_) | Self::NoSource(_) => ErrorKind::AddrNotAvailable,
            Self::NetworkUnreachable(_) => ErrorKind::NetworkUnreachable,
            Self::HostUnreachable(_) => ErrorKind::HostUnreachable,
            Self::WouldBlock => ErrorKind::WouldBlock,
        }
    }
}

impl From<SendError> for Error {
    fn from(error: SendError) -> Self {
        Error::new(error.kind(), error)
    }
}
