//! Connections and listeners on their way from one table to another of the same
//! process. They move as they are, and so does the memory of their data: both
//! tables have one clock, so every time and every number stays right.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::chunks::{Loose, Strand};
use super::connection::{Connection, Is, NOWHERE, Shared};
use super::listener::Listener;
use super::saved::LASTING;
use super::socket::{TcpId, TcpListenerId};
use super::table::TcpTable;
use crate::{Event, MoveError};

/// What a connection brings along besides [`LASTING`].
const MOVING: Is = LASTING.union(Is::IN_ACCEPT_QUEUE);

/// A connection in no table: its memory is in no pool.
struct Taken {
    connection: Connection,
    outgoing: Loose,
    incoming: Loose,
}

impl Taken {
    fn new(mut connection: Connection, shared: &mut Shared) -> Self {
        let outgoing = connection.outgoing.loosen(&mut shared.chunks);
        let incoming = connection.incoming.loosen(&mut shared.chunks);
        Self { connection, outgoing, incoming }
    }

    /// The connection in a table that was asked whether it has room.
    fn settle(self, shared: &mut Shared) -> Connection {
        let mut connection = self.connection;
        connection.outgoing = Strand::join(&mut shared.chunks, self.outgoing);
        connection.incoming = Strand::join(&mut shared.chunks, self.incoming);
        connection.options = shared.options(*connection.options);
        connection.is &= MOVING;
        connection.look_around();
        connection
    }
}

/// Connections and listeners that were taken out of a table, with their names
/// there. Connections are in the order of their places.
pub(crate) struct TakenTcp {
    listeners: Vec<(TcpListenerId, Listener)>,
    connections: Vec<(TcpId, Taken)>,
    /// Until when acknowledgements may bring a cookie.
    cookies_until_ns: u64,
}

/// Old and new names.
pub(crate) struct MovedTcp {
    pub(crate) listeners: Vec<(TcpListenerId, TcpListenerId)>,
    pub(crate) connections: Vec<(TcpId, TcpId)>,
}

impl TakenTcp {
    fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.connections.iter().map(|(_, taken)| &taken.connection)
    }

    /// The addresses that listeners have and that connections send from.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let open = self.connections().filter(|connection| connection.sends_from_its_address());
        let open = open.map(|connection| connection.ends.local_ip());
        self.listeners.iter().map(|(_, listener)| listener.local.ip()).chain(open)
    }

    /// The addresses of the peers.
    pub(crate) fn remote_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.connections().map(|connection| connection.ends.remote_ip())
    }
}

impl TcpTable {
    /// Takes listeners and connections out, without a word to anybody. With a
    /// listener go those in its queues, and with a port those who linger there, unless
    /// it is shared: then each flow is found wherever it is.
    pub(crate) fn take_out(
        &mut self,
        listeners: &[TcpListenerId],
        connections: &[TcpId],
    ) -> TakenTcp {
        let remove = |&id: &TcpListenerId| self.listeners.remove(id).map(|listener| (id, listener));
        let listeners: Vec<_> = listeners.iter().filter_map(remove).collect();
        let places = self.leaving(&listeners, connections);
        let mut taken = Vec::with_capacity(places.len());
        for index in places {
            let id = self.connections.id(index);
            if let Some(connection) = self.remove(index) {
                taken.push((id, Taken::new(connection, &mut self.shared)));
            }
        }
        let (known, listening) = (&self.connections, &self.listeners);
        self.events.retain(|event| match *event {
            Event::TcpReadable(id) | Event::TcpWritable(id) => known.get(id).is_some(),
            Event::TcpAcceptable(id) => listening.get(id).is_some(),
            _ => true,
        });
        let cookies_until_ns = if listeners.is_empty() { 0 } else { self.cookies_until_ns };
        TakenTcp { listeners, connections: taken, cookies_until_ns }
    }

    /// The places of those who go when these listeners have gone and these
    /// connections go.
    fn leaving(&self, listeners: &[(TcpListenerId, Listener)], connections: &[TcpId]) -> Vec<u32> {
        let gone: BTreeSet<_> = listeners.iter().map(|&(id, _)| id).collect();
        let named: BTreeSet<_> = connections.iter().copied().collect();
        let known = named.iter().filter_map(|&id| self.connections.get(id));
        let ports = known.map(|connection| connection.ends.local().port());
        let ports: BTreeSet<_> =
            ports.chain(listeners.iter().map(|(_, listener)| listener.local.port())).collect();
        if ports.is_empty() {
            return Vec::new();
        }
        let leaves = |index: u32, connection: &Connection| match connection.listener {
            Some(listener) if gone.contains(&listener) => true,
            // It goes with that listener only.
            Some(listener) if self.listeners.get(listener).is_some() => false,
            _ => {
                let lingers = connection.is.contains(Is::ORPHAN) && !connection.options.reuse_port;
                named.contains(&self.connections.id(index))
                    || lingers && ports.contains(&connection.ends.local().port())
            }
        };
        let places = (0_u32..).zip(self.connections.places());
        let places = places.filter_map(|(index, (_, connection))| Some((index, connection?)));
        places.filter(|&(index, connection)| leaves(index, connection)).map(|(at, _)| at).collect()
    }

    /// Whether there is room for all, and their addresses are free.
    ///
    /// # Errors
    /// What is in the way.
    pub(crate) fn check(&self, taken: &TakenTcp) -> Result<(), MoveError> {
        let in_use = |local: SocketAddr| Err(MoveError::AddressInUse(local));
        if !self.listeners.has_room_for(taken.listeners.len()) {
            return Err(MoveError::TooMany("listeners"));
        }
        if !self.connections.has_room_for(taken.connections.len()) {
            return Err(MoveError::TooMany("connections"));
        }
        let loose = taken.connections.iter().flat_map(|(_, taken)| {
            let Taken { outgoing, incoming, .. } = taken;
            [outgoing, incoming]
        });
        if !self.shared.chunks.has_room_for(loose) {
            return Err(MoveError::TooMany("bytes of TCP data"));
        }
        let mut listeners = taken.listeners.iter().map(|(_, listener)| listener);
        if let Some(listener) = listeners.find(|listener| !self.listeners.may_enter(listener)) {
            return in_use(listener.local);
        }
        let is_taken = |connection: &&Connection| {
            connection.has_ends() && self.index.find(&self.connections, &connection.ends).is_some()
        };
        match taken.connections().find(is_taken) {
            Some(connection) => in_use(connection.ends.local()),
            None => Ok(()),
        }
    }

    /// Takes in what [`TcpTable::check`] has nothing against.
    pub(crate) fn put_in(&mut self, now_ns: u64, taken: TakenTcp) -> MovedTcp {
        let mut connections = Vec::with_capacity(taken.connections.len());
        for (old, taken) in taken.connections {
            let connection = taken.settle(&mut self.shared);
            match self.connections.insert(connection) {
                Some(new) => connections.push((old, new)),
                None => debug_assert!(false, "it was asked whether there is room"),
            }
        }
        let renamed = |old: u32| {
            let at = connections.binary_search_by_key(&old, |(old, _)| old.index).ok()?;
            Some(connections[at].1.index)
        };
        let mut listeners = Vec::with_capacity(taken.listeners.len());
        for (old, mut listener) in taken.listeners {
            listener.rename_queued(renamed);
            listener.told = listener.waiting() > 0;
            let tells = listener.told;
            let new = self.listeners.enter(listener);
            self.events.extend(tells.then_some(Event::TcpAcceptable(new)));
            listeners.push((old, new));
        }
        for &(_, TcpId { index, .. }) in &connections {
            let Some(connection) = self.connections.at_mut(index) else { continue };
            connection.listener = connection.listener.map(|old| {
                let new = listeners.iter().find(|&&(known, _)| known == old);
                // It was closed: no other here is meant.
                new.map_or(TcpListenerId { index: NOWHERE, ..old }, |&(_, new)| new)
            });
            if connection.has_ends() {
                self.index.insert(&mut self.connections, index);
            }
            if let Some(connection) = self.connections.at(index).filter(|known| known.has_ends()) {
                self.tell_taken_over(connection);
            }
        }
        self.cookies_until_ns = self.cookies_until_ns.max(taken.cookies_until_ns);
        self.wake_all(now_ns, connections.iter().map(|(_, new)| new.index).collect());
        MovedTcp { listeners, connections }
    }
}
