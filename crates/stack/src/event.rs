//! Events that a stack reports to its caller.

use std::net::IpAddr;

use crate::{TcpId, TcpListenerId, UdpId};

/// Event that a stack reports to its caller.
///
/// Events are edge-triggered. Each event is queued at most once until the caller takes it, so the
/// queue is never longer than the number of sockets, neighbours and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A frame waits for an unknown hardware address, with [`crate::AddressOwnership::Shared`].
    /// Answer with [`crate::Stack::set_neighbour`].
    NeighbourUnresolved(IpAddr),
    /// The receive queue of the socket has become non-empty.
    UdpReadable(UdpId),
    /// The socket has a pending error.
    UdpError(UdpId),
    /// The connection has become readable: data, end of stream or an error. Also after the end of
    /// both directions.
    TcpReadable(TcpId),
    /// The connection is established, has send buffer space again, or has ended.
    TcpWritable(TcpId),
    /// A closed connection has terminated. Reported after [`crate::Stack::tcp_report_end`].
    TcpEnded(TcpId),
    /// The listener's accept queue has become non-empty.
    TcpAcceptable(TcpListenerId),
    /// A peer has proved that it receives packets at its address: it echoed a number that was sent
    /// only there. Reported after [`crate::Stack::report_confirmed_peers`].
    PeerConfirmed(IpAddr),
    /// Another host claims this address of the interface. [`crate::Stack::own_addresses`] tells
    /// whether it was given up.
    AddressConflict(IpAddr),
}
