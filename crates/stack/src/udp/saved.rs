//! Sockets as plain data, for another process to go on with.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_memory::Arena;

use super::datagram::{Payload, SavedDatagram};
use super::socket::Socket;
use super::{Datagram, UdpOptions, UdpTable};
use crate::{Event, RestoreError, SocketError};

/// The most that one datagram can hold.
const MOST_BYTES: usize = u16::MAX as usize;

/// All sockets, place by place: the generation and who is there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedUdp(Vec<(u32, Option<SavedSocket>)>);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedSocket {
    bound: SocketAddr,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: UdpOptions,
    turn: u64,
    error: Option<SocketError>,
    queue: Vec<SavedDatagram>,
}

fn save(socket: &Socket, arena: &Arena) -> SavedSocket {
    SavedSocket {
        bound: socket.bound,
        local: socket.local,
        remote: socket.remote,
        options: socket.options,
        turn: socket.turn,
        error: socket.error,
        queue: socket.datagrams(arena).collect(),
    }
}

impl SavedSocket {
    /// The socket that was saved, with what waited.
    fn restore(self) -> Result<Socket, RestoreError> {
        // Flow information and scope are no part of a name.
        let plain = |address: SocketAddr| SocketAddr::new(address.ip(), address.port());
        let (bound, local) = (plain(self.bound), plain(self.local));
        let mut socket = Socket::new(bound, self.options);
        let remote = self.remote.map(plain);
        let is_right = bound.port() != 0
            && match remote {
                None => local == bound,
                Some(remote) => {
                    let (from, to) = (local.ip(), remote.ip());
                    local.port() == bound.port()
                        && (bound.ip() == from || bound.ip().is_unspecified())
                        && from.is_ipv4() == to.is_ipv4()
                        && to == to.to_canonical()
                        && remote.port() != 0
                        && !to.is_unspecified()
                        && socket.speaks_to(to)
                }
            };
        if !is_right {
            return Err(RestoreError::Damaged("a socket has impossible addresses"));
        }
        (socket.local, socket.remote, socket.error) = (local, remote, self.error);
        socket.turn = self.turn;
        for SavedDatagram { remote, local, hop_limit, traffic_class, data } in self.queue {
            if data.len() > MOST_BYTES || socket.has_room(data.len()).is_err() {
                return Err(RestoreError::Damaged("more waits in a socket than there is room for"));
            }
            // It needs no frame: nobody knows how many the new arena can spare.
            let payload = Payload::Owned(data.into_vec().into());
            let _ = socket.push(Datagram { payload, remote, local, hop_limit, traffic_class });
        }
        Ok(socket)
    }
}

impl UdpTable {
    /// How many datagrams wait.
    pub(crate) fn held(&self) -> u64 {
        self.places().filter_map(|(_, socket)| socket).map(|socket| socket.waiting() as u64).sum()
    }

    /// The addresses that sockets are bound to or send from.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.places().filter_map(|(_, socket)| Some(socket?.local.ip()))
    }

    pub(crate) fn save(&self, arena: &Arena) -> SavedUdp {
        let place = |(generation, socket): (u32, Option<&Socket>)| {
            (generation, socket.map(|socket| save(socket, arena)))
        };
        SavedUdp(self.places().map(place).collect())
    }

    /// Takes all sockets up, into a table that has none yet. Returns what there
    /// is to tell.
    ///
    /// # Errors
    /// When they are damaged, or more than the limits allow.
    pub(crate) fn restore(&mut self, saved: SavedUdp) -> Result<Vec<Event>, RestoreError> {
        let (found, limit) = (saved.0.len(), self.limit());
        if found > limit {
            return Err(RestoreError::TooMany { what: "sockets", found, limit });
        }
        let mut events = Vec::new();
        for (generation, saved) in saved.0 {
            let mut socket = saved.map(SavedSocket::restore).transpose()?;
            let mut told = (false, false);
            if let Some(socket) = &mut socket {
                told = (!socket.is_empty(), socket.error.is_some());
                (socket.readable_told, socket.error_told) = told;
            }
            let id = self.add_place(generation, socket)?;
            events.extend(told.0.then_some(Event::Readable(id)));
            events.extend(told.1.then_some(Event::Error(id)));
        }
        self.restore_turns();
        Ok(events)
    }
}
