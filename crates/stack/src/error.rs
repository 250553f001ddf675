//! Socket errors.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};

/// Failure to create or use a socket, or an error that a peer or router reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum SocketError {
    /// The socket was closed.
    #[error("the socket is closed")]
    Closed,
    /// Another socket has the address and port.
    #[error("{0} is in use by another socket: choose another port, or 0 for an ephemeral port")]
    AddressInUse(SocketAddr),
    /// The address is not an address of this interface.
    #[error("{0} is not an address of this interface: bind to a local or the unspecified address")]
    AddressNotAvailable(IpAddr),
    /// No ephemeral port is free.
    #[error("no ephemeral port is free on {0}: close unused sockets")]
    NoPortFree(IpAddr),
    /// The number of sockets has reached the limit.
    #[error("all {0} sockets are in use: close unused sockets, or raise the limit")]
    TooManySockets(usize),
    /// The peer's address is of the other family, or not a valid destination.
    #[error("{0} is not a valid peer: use a unicast address of the socket's family")]
    PeerInvalid(SocketAddr),
    /// The peer's host reported that no socket listens on the port.
    #[error("{0} refused the datagram: no listener on that port")]
    ConnectionRefused(SocketAddr),
    /// A router reported the host unreachable, or address resolution failed.
    #[error("{0} is unreachable: no answer from its host or from the router before it")]
    HostUnreachable(SocketAddr),
    /// No route to the network.
    #[error("the network of {0} is unreachable: add a route")]
    NetworkUnreachable(SocketAddr),
    /// A datagram that must not be fragmented exceeds the path MTU.
    #[error("the datagram to {remote} exceeds the path MTU: send at most {limit_bytes} bytes")]
    MessageTooLong {
        /// Address of the peer.
        remote: SocketAddr,
        /// Largest UDP payload in bytes.
        limit_bytes: usize,
    },
}

impl SocketError {
    /// The corresponding [`ErrorKind`] of the standard library.
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

/// Failure to send a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The socket was closed.
    #[error("the socket is closed")]
    Closed,
    /// No destination was given and the socket is not connected.
    #[error("no destination: connect the socket or pass a destination address")]
    NotConnected,
    /// The destination is of the other family, or not a valid destination.
    #[error("{0} is not a valid destination: use an address of the socket's family and a port")]
    DestinationInvalid(SocketAddr),
    /// The requested source address is not an address of this interface.
    #[error("{0} is not an address of this interface: send from a local address")]
    SourceNotLocal(IpAddr),
    /// No address of this interface is a possible source for the destination.
    #[error("the interface has no source address for {0}: add an address of the same family")]
    NoSource(IpAddr),
    /// No route to the destination.
    #[error("no route to {0}: add a route")]
    NetworkUnreachable(IpAddr),
    /// The next hop does not answer address resolution.
    #[error("{0} is unreachable: no answer to address resolution")]
    HostUnreachable(IpAddr),
    /// The datagram exceeds the path MTU, or the maximum size of an IP packet.
    #[error("the datagram is too long: send at most {limit_bytes} bytes to that destination")]
    MessageTooLong {
        /// Largest UDP payload in bytes for that destination.
        limit_bytes: usize,
    },
    /// Back-pressure: a queue or the arena is full. Retry after the device has sent frames.
    #[error("the send queues are full: retry after frames were sent")]
    WouldBlock,
}

impl SendError {
    /// The corresponding [`ErrorKind`] of the standard library.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Closed | Self::NotConnected => ErrorKind::NotConnected,
            Self::DestinationInvalid(_) | Self::MessageTooLong { .. } => ErrorKind::InvalidInput,
            Self::SourceNotLocal(_) | Self::NoSource(_) => ErrorKind::AddrNotAvailable,
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
