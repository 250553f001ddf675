//! Sockets on their way from one table to another of the same process.

use std::collections::VecDeque;
use std::net::IpAddr;

use tidegate_memory::Arena;

use super::socket::Socket;
use super::{UdpId, UdpTable};
use crate::{Event, MoveError};

/// Sockets that were taken out of a table, with their names there. What waits in
/// them lies in memory of its own: the other table has another arena.
pub(crate) struct TakenUdp(Vec<(UdpId, Socket)>);

impl TakenUdp {
    /// How many datagrams wait.
    pub(crate) fn held(&self) -> u64 {
        self.0.iter().map(|(_, socket)| socket.waiting() as u64).sum()
    }

    /// The addresses that sockets are bound to or send from.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().map(|(_, socket)| socket.local.ip())
    }

    /// The peers of those that are connected.
    pub(crate) fn remote_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().filter_map(|(_, socket)| Some(socket.remote?.ip()))
    }
}

impl UdpTable {
    /// Takes sockets out, with what waits in them.
    pub(crate) fn take_out(&mut self, sockets: &[UdpId], arena: &mut Arena) -> TakenUdp {
        let mut taken = Vec::with_capacity(sockets.len());
        for &id in sockets {
            if let Some(mut socket) = self.close(id) {
                self.tell_taken_out(&socket);
                socket.leave_arena(arena);
                (socket.readable_told, socket.error_told) = (false, false);
                taken.push((id, socket));
            }
        }
        TakenUdp(taken)
    }

    /// Whether there is room for all, and their addresses are free.
    ///
    /// # Errors
    /// What is in the way.
    pub(crate) fn check(&self, taken: &TakenUdp) -> Result<(), MoveError> {
        if !self.has_room_for(taken.0.len()) {
            return Err(MoveError::TooMany("UDP sockets"));
        }
        taken.0.iter().try_for_each(|(_, socket)| {
            self.check_free(socket).map_err(|_| MoveError::AddressInUse(socket.bound))
        })
    }

    /// Takes in what [`UdpTable::check`] has nothing against, and tells what
    /// there is to tell. Returns old and new names.
    pub(crate) fn put_in(
        &mut self,
        taken: TakenUdp,
        events: &mut VecDeque<Event>,
    ) -> Vec<(UdpId, UdpId)> {
        let TakenUdp(mut taken) = taken;
        // Of those that share an address, who was bound last stays last.
        taken.sort_by_key(|(_, socket)| socket.turn);
        let mut moved = Vec::with_capacity(taken.len());
        for (old, mut socket) in taken {
            let told = (!socket.is_empty(), socket.error.is_some());
            (socket.readable_told, socket.error_told) = told;
            self.tell_taken_over(&socket);
            let new = self.enter(socket);
            events.extend(told.0.then_some(Event::Readable(new)));
            events.extend(told.1.then_some(Event::Error(new)));
            moved.push((old, new));
        }
        moved
    }
}
