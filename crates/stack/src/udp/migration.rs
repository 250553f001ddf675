//! Migration of sockets from one table to another of the same process.

use std::collections::VecDeque;
use std::net::IpAddr;

use tidegate_memory::Arena;

use super::socket::Socket;
use super::{UdpId, UdpTable};
use crate::{Event, MigrationError};

/// Sockets extracted from a table, with their handles there. Queued datagrams are copied out of the
/// arena, because the other table has a different arena.
pub(crate) struct ExtractedUdp(Vec<(UdpId, Socket)>);

impl ExtractedUdp {
    /// Number of queued datagrams.
    pub(crate) fn queued_datagrams(&self) -> u64 {
        self.0.iter().map(|(_, socket)| socket.queue_len() as u64).sum()
    }

    /// Local addresses of the sockets.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().map(|(_, socket)| socket.local.ip())
    }

    /// Peer addresses of the connected sockets.
    pub(crate) fn remote_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().filter_map(|(_, socket)| Some(socket.remote?.ip()))
    }
}

impl UdpTable {
    /// Extracts sockets with their queued datagrams. Ignores handles of closed sockets.
    pub(crate) fn extract_sockets(&mut self, sockets: &[UdpId], arena: &mut Arena) -> ExtractedUdp {
        let mut extracted = Vec::with_capacity(sockets.len());
        for &id in sockets {
            if let Some(mut socket) = self.remove(id) {
                self.notify_extracted(&socket);
                socket.copy_out_of_arena(arena);
                (socket.readable_notified, socket.error_notified) = (false, false);
                extracted.push((id, socket));
            }
        }
        ExtractedUdp(extracted)
    }

    /// Checks that the table has space for all sockets.
    ///
    /// # Errors
    /// The limit that would be exceeded.
    pub(crate) fn check_space(&self, extracted: &ExtractedUdp) -> Result<(), MigrationError> {
        match self.has_space_for(extracted.0.len()) {
            true => Ok(()),
            false => Err(MigrationError::LimitReached("UDP sockets")),
        }
    }

    /// Checks that the addresses of the extracted sockets are free.
    ///
    /// # Errors
    /// The address in use.
    pub(crate) fn check_addresses_free(
        &self,
        extracted: &ExtractedUdp,
    ) -> Result<(), MigrationError> {
        extracted.0.iter().try_for_each(|(_, socket)| {
            self.check_address_free(socket).map_err(|_| MigrationError::AddressInUse(socket.bound))
        })
    }

    /// Inserts sockets that passed [`UdpTable::check_addresses_free`], and queues their events. Returns
    /// pairs of old and new handles.
    pub(crate) fn insert_sockets(
        &mut self,
        extracted: ExtractedUdp,
        events: &mut VecDeque<Event>,
    ) -> Vec<(UdpId, UdpId)> {
        let ExtractedUdp(mut sockets) = extracted;
        // Keeps the bind order of sockets that share an address.
        sockets.sort_by_key(|(_, socket)| socket.bind_order);
        let mut moved = Vec::with_capacity(sockets.len());
        for (old, mut socket) in sockets {
            let notified = (!socket.is_empty(), socket.error.is_some());
            (socket.readable_notified, socket.error_notified) = notified;
            self.notify_taken_over(&socket);
            let new = self.insert(socket);
            events.extend(notified.0.then_some(Event::UdpReadable(new)));
            events.extend(notified.1.then_some(Event::UdpError(new)));
            moved.push((old, new));
        }
        moved
    }
}
