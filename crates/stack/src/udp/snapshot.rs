//! Sockets as plain data, for a snapshot that another process restores.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Arena;

use super::datagram::{DatagramSnapshot, Payload};
use super::socket::Socket;
use super::{Datagram, UdpOptions, UdpTable};
use crate::{Event, RestoreError, SocketError};

/// Upper bound of a datagram's payload in bytes: the length field has 16 bits.
const MAX_DATAGRAM_BYTES: usize = u16::MAX as usize;

/// Snapshot of all sockets: generation and socket of each slot, in slot order.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct UdpSnapshot<'a>(
    #[cfg_attr(feature = "serde", serde(borrow))] Vec<(u32, Option<UdpSocketSnapshot<'a>>)>,
);

#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct UdpSocketSnapshot<'a> {
    bound: SocketAddr,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: UdpOptions,
    bind_order: u64,
    error: Option<SocketError>,
    #[cfg_attr(feature = "serde", serde(borrow))]
    queue: Vec<DatagramSnapshot<'a>>,
}

fn save(socket: &Socket, arena: &Arena) -> UdpSocketSnapshot<'static> {
    UdpSocketSnapshot {
        bound: socket.bound,
        local: socket.local,
        remote: socket.remote,
        options: socket.options,
        bind_order: socket.bind_order,
        error: socket.error,
        queue: socket.snapshot_datagrams(arena).collect(),
    }
}

impl UdpSocketSnapshot<'_> {
    /// Restores the socket with its queued datagrams.
    fn restore(self) -> Result<Socket, RestoreError> {
        // A bound address has no flow information and no scope.
        let without_scope = |address: SocketAddr| SocketAddr::new(address.ip(), address.port());
        let (bound, local) = (without_scope(self.bound), without_scope(self.local));
        let mut socket = Socket::new(bound, self.options);
        let remote = self.remote.map(without_scope);
        let is_valid = bound.port() != 0
            && match remote {
                None => local == bound,
                Some(remote) => {
                    let (from, to) = (local.ip(), remote.ip());
                    local.port() == bound.port()
                        && (bound.ip() == from || bound.ip().is_unspecified())
                        && from.is_ipv4() == to.is_ipv4()
                        && to == to.to_canonical()
                        && !to.is_unspecified()
                        && socket.accepts_peer(to)
                }
            };
        if !is_valid {
            return Err(RestoreError::Damaged("a UDP socket has invalid addresses"));
        }
        (socket.local, socket.remote, socket.error) = (local, remote, self.error);
        socket.bind_order = self.bind_order;
        for DatagramSnapshot { remote, local, hop_limit, traffic_class, data } in self.queue {
            if data.len() > MAX_DATAGRAM_BYTES || socket.check_space(data.len()).is_err() {
                return Err(RestoreError::Damaged("a UDP receive queue exceeds its limits"));
            }
            // An allocation instead of a frame: the new arena may have too few frames.
            let payload = Payload::Owned(data.into());
            let _ = socket.push(Datagram { payload, remote, local, hop_limit, traffic_class });
        }
        Ok(socket)
    }
}

impl UdpTable {
    /// Number of queued datagrams.
    pub(crate) fn queued_datagrams(&self) -> u64 {
        self.slots().filter_map(|(_, socket)| socket).map(|socket| socket.queue_len() as u64).sum()
    }

    /// Local addresses of the sockets.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.slots().filter_map(|(_, socket)| Some(socket?.local.ip()))
    }

    pub(crate) fn save(&self, arena: &Arena) -> UdpSnapshot<'static> {
        let slot_snapshot = |(generation, socket): (u32, Option<&Socket>)| {
            (generation, socket.map(|socket| save(socket, arena)))
        };
        UdpSnapshot(self.slots().map(slot_snapshot).collect())
    }

    /// Restores all sockets into an empty table. Returns their events.
    ///
    /// # Errors
    /// The snapshot is damaged or exceeds the limits.
    pub(crate) fn restore(
        &mut self,
        snapshot: UdpSnapshot<'_>,
    ) -> Result<Vec<Event>, RestoreError> {
        let (found, limit) = (snapshot.0.len(), self.limit());
        if found > limit {
            return Err(RestoreError::TooMany { what: "sockets", found, limit });
        }
        let mut events = Vec::new();
        for (generation, snapshot) in snapshot.0 {
            let mut socket = snapshot.map(UdpSocketSnapshot::restore).transpose()?;
            let mut notified = (false, false);
            if let Some(socket) = &mut socket {
                notified = (!socket.is_empty(), socket.error.is_some());
                (socket.readable_notified, socket.error_notified) = notified;
            }
            let id = self.add_slot(generation, socket)?;
            events.extend(notified.0.then_some(Event::UdpReadable(id)));
            events.extend(notified.1.then_some(Event::UdpError(id)));
        }
        self.restore_bind_order();
        Ok(events)
    }
}
