//! Socket numbers of the attachments as handles of sockets.

use std::io;

use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use crate::types::socket_id::SocketId;

/// UDP handle made of a socket number.
pub(crate) fn udp_id(number: u64) -> UdpId {
    UdpId::from_bits(number)
}

pub(crate) fn stream_id(number: u64) -> TcpId {
    TcpId::from_bits(number)
}

/// Listener handle made of a socket number; fails with `InvalidData` for an invalid number.
pub(crate) fn listener_id(number: u64) -> io::Result<TcpListenerId> {
    TcpListenerId::from_bits(number).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Socket number of a handle; a poll set has none.
pub(super) fn socket_number(id: SocketId) -> Option<u64> {
    match id {
        SocketId::Udp(id) => Some(id.to_bits()),
        SocketId::Listener(id) => Some(id.to_bits()),
        SocketId::Stream(id) => Some(id.to_bits()),
        SocketId::Poll(_) => None,
    }
}
