//! What the stack tells the outside.

use std::net::IpAddr;

use crate::{TcpId, TcpListenerId, UdpId};

/// What the stack tells the outside.
///
/// Events tell of edges, and each is queued at most once until it is taken, so
/// the queue is no longer than there are sockets, neighbours and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// With [`crate::Ownership::Shared`]: a frame waits for this neighbour.
    /// Answer with [`crate::Stack::set_neighbour`].
    NeighbourWanted(IpAddr),
    /// The receive queue of the socket was empty and now is not.
    Readable(UdpId),
    /// The socket has an error to take.
    Error(UdpId),
    /// The connection has data, its end or an error to read, where it had none.
    TcpReadable(TcpId),
    /// The connection is established, has room again, or has ended.
    TcpWritable(TcpId),
    /// A connection waits to be accepted where none did.
    TcpAcceptable(TcpListenerId),
    /// A peer has answered what only it was told: it gets what is sent to its
    /// address. Only after [`crate::Stack::tell_confirmed_peers`].
    PeerConfirmed(IpAddr),
    /// Another host claims this address of ours.
    AddressConflict(IpAddr),
}
