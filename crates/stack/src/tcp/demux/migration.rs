//! Migration of connections and listeners between two tables of the same process. Connections
//! move unchanged, with the memory of their data. Both tables use one clock, so all times and
//! sequence numbers stay valid.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use super::table::TcpTable;
use crate::tcp::buffers::{ByteQueue, DetachedBuffer, TcpShared};
use crate::tcp::connection::Connection;
use crate::tcp::flags::{ConnFlags, PERSISTENT_FLAGS};
use crate::tcp::listener::Listener;
use crate::tcp::socket::{TcpId, TcpListenerId};
use crate::tcp::timers::NO_INDEX;
use crate::{Event, MigrationError};

/// Flags that a connection keeps: those of a snapshot ([`PERSISTENT_FLAGS`]) and the accept queue.
const MIGRATED_FLAGS: ConnFlags = PERSISTENT_FLAGS.union(ConnFlags::IN_ACCEPT_QUEUE);

/// Connection in no table, with its data detached from the buffer pool.
struct ExtractedConnection {
    connection: Connection,
    outgoing: DetachedBuffer,
    incoming: DetachedBuffer,
}

impl ExtractedConnection {
    fn new(mut connection: Connection, shared: &mut TcpShared) -> Self {
        let outgoing = connection.send.queue.detach(&mut shared.pool);
        let incoming = connection.receive.queue.detach(&mut shared.pool);
        Self { connection, outgoing, incoming }
    }

    /// Attaches the data to the pool of another table.
    fn attach(self, shared: &mut TcpShared) -> Connection {
        let mut connection = self.connection;
        connection.send.queue = ByteQueue::attach(&mut shared.pool, self.outgoing);
        connection.receive.queue = ByteQueue::attach(&mut shared.pool, self.incoming);
        connection.options = shared.intern_options(*connection.options);
        connection.flags &= MIGRATED_FLAGS;
        connection.refresh_pending_flags();
        connection
    }
}

/// Connections and listeners extracted from a table, with their old handles. Connections are in
/// the order of their slots.
pub(crate) struct ExtractedTcp {
    listeners: Vec<(TcpListenerId, Listener)>,
    connections: Vec<(TcpId, ExtractedConnection)>,
    /// Time until which acknowledgements may carry a SYN cookie.
    cookies_until_ns: u64,
}

/// Pairs of old and new handle.
pub(crate) struct TcpMigrationMap {
    pub(crate) listeners: Vec<(TcpListenerId, TcpListenerId)>,
    pub(crate) connections: Vec<(TcpId, TcpId)>,
}

impl ExtractedTcp {
    fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.connections.iter().map(|(_, extracted)| &extracted.connection)
    }

    /// Iterates over the addresses of listeners and those from which connections still send.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let open = self.connections().filter(|connection| connection.uses_local_address());
        let open = open.map(|connection| connection.tuple.local_ip());
        self.listeners.iter().map(|(_, listener)| listener.local.ip()).chain(open)
    }

    /// Iterates over the addresses of the peers.
    pub(crate) fn remote_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.connections().map(|connection| connection.tuple.remote_ip())
    }
}

impl TcpTable {
    /// Extracts listeners and connections; nothing is sent and no event is raised. A listener takes
    /// along the connections in its queues. A port takes along its orphaned connections, unless the
    /// port is shared: then segments of each flow find the flow in any table.
    pub(crate) fn extract_sockets(
        &mut self,
        listeners: &[TcpListenerId],
        connections: &[TcpId],
    ) -> ExtractedTcp {
        let remove = |&id: &TcpListenerId| self.listeners.remove(id).map(|listener| (id, listener));
        let listeners: Vec<_> = listeners.iter().filter_map(remove).collect();
        let indices = self.leaving_indices(&listeners, connections);
        let mut extracted = Vec::with_capacity(indices.len());
        for index in indices {
            let id = self.connections.id(index);
            if let Some(connection) = self.remove(index) {
                extracted.push((id, ExtractedConnection::new(connection, &mut self.shared)));
            }
        }
        let (known, listening) = (&self.connections, &self.listeners);
        self.events.retain(|event| match *event {
            Event::TcpReadable(id) | Event::TcpWritable(id) => known.get(id).is_some(),
            Event::TcpAcceptable(id) => listening.get(id).is_some(),
            _ => true,
        });
        let cookies_until_ns = if listeners.is_empty() { 0 } else { self.cookies_until_ns };
        ExtractedTcp { listeners, connections: extracted, cookies_until_ns }
    }

    /// Returns the slots of all connections that leave with these removed listeners and these
    /// connections.
    fn leaving_indices(
        &self,
        listeners: &[(TcpListenerId, Listener)],
        connections: &[TcpId],
    ) -> Vec<u32> {
        let gone: BTreeSet<_> = listeners.iter().map(|&(id, _)| id).collect();
        let named: BTreeSet<_> = connections.iter().copied().collect();
        let known = named.iter().filter_map(|&id| self.connections.get(id));
        let ports = known.map(|connection| connection.tuple.local().port());
        let ports: BTreeSet<_> =
            ports.chain(listeners.iter().map(|(_, listener)| listener.local.port())).collect();
        if ports.is_empty() {
            return Vec::new();
        }
        let leaves = |index: u32, connection: &Connection| match connection.listener {
            Some(listener) if gone.contains(&listener) => true,
            // A connection of a listener that stays leaves only with that listener.
            Some(listener) if self.listeners.get(listener).is_some() => false,
            _ => {
                let lingers =
                    connection.flags.contains(ConnFlags::ORPHAN) && !connection.options.reuse_port;
                named.contains(&self.connections.id(index))
                    || lingers && ports.contains(&connection.tuple.local().port())
            }
        };
        let on_ports = ports.iter().flat_map(|&port| self.connections.on_port(port));
        let occupied = on_ports.filter_map(|index| Some((index, self.connections.at(index)?)));
        let mut indices: Vec<_> = occupied
            .filter(|&(index, connection)| leaves(index, connection))
            .map(|(index, _)| index)
            .collect();
        indices.sort_unstable();
        indices.dedup();
        indices
    }

    /// Checks that the extracted sockets fit.
    ///
    /// # Errors
    /// The limit that would be exceeded.
    pub(crate) fn check_space(&self, extracted: &ExtractedTcp) -> Result<(), MigrationError> {
        if !self.listeners.has_space_for(extracted.listeners.len()) {
            return Err(MigrationError::LimitReached("listeners"));
        }
        if !self.connections.has_space_for(extracted.connections.len()) {
            return Err(MigrationError::LimitReached("connections"));
        }
        let detached = extracted.connections.iter().flat_map(|(_, taken)| {
            let ExtractedConnection { outgoing, incoming, .. } = taken;
            [outgoing, incoming]
        });
        if !self.shared.pool.has_space_for(detached) {
            return Err(MigrationError::LimitReached("bytes of TCP data"));
        }
        Ok(())
    }

    /// Checks that the addresses of the extracted sockets are free.
    ///
    /// # Errors
    /// The address in use.
    pub(crate) fn check_addresses_free(
        &self,
        extracted: &ExtractedTcp,
    ) -> Result<(), MigrationError> {
        let in_use = |local: SocketAddr| Err(MigrationError::AddressInUse(local));
        let mut listeners = extracted.listeners.iter().map(|(_, listener)| listener);
        if let Some(listener) = listeners.find(|listener| !self.listeners.can_insert(listener)) {
            return in_use(listener.local);
        }
        let is_in_use = |connection: &&Connection| {
            connection.holds_tuple()
                && self.by_tuple.find(&self.connections, &connection.tuple).is_some()
        };
        match extracted.connections().find(is_in_use) {
            Some(connection) => in_use(connection.tuple.local()),
            None => Ok(()),
        }
    }

    /// Inserts sockets for which [`TcpTable::check_addresses_free`] succeeded.
    pub(crate) fn insert_sockets(
        &mut self,
        now_ns: u64,
        extracted: ExtractedTcp,
    ) -> TcpMigrationMap {
        let mut connections = Vec::with_capacity(extracted.connections.len());
        for (old, extracted) in extracted.connections {
            let connection = extracted.attach(&mut self.shared);
            connections.push((old, self.connections.insert_beyond_limit(connection)));
        }
        let new_index = |old: u32| {
            let at = connections.binary_search_by_key(&old, |(old, _)| old.index).ok()?;
            Some(connections[at].1.index)
        };
        let mut listeners = Vec::with_capacity(extracted.listeners.len());
        for (old, mut listener) in extracted.listeners {
            listener.remap_queued(new_index);
            listener.notified = listener.accept_queue_len() > 0;
            let notifies = listener.notified;
            let new = self.listeners.insert(listener);
            self.events.extend(notifies.then_some(Event::TcpAcceptable(new)));
            listeners.push((old, new));
        }
        let new_listeners: HashMap<_, _> = listeners.iter().copied().collect();
        for &(_, TcpId { index, .. }) in &connections {
            let Some(connection) = self.connections.at_mut(index) else { continue };
            connection.listener = connection.listener.map(|old| {
                // Without a new one it was closed: the index must match no listener of this table.
                let closed = TcpListenerId { index: NO_INDEX, ..old };
                new_listeners.get(&old).copied().unwrap_or(closed)
            });
            if connection.holds_tuple() {
                self.by_tuple.insert(&mut self.connections, index);
            }
            if let Some(connection) = self.connections.at(index).filter(|known| known.holds_tuple())
            {
                self.notify_taken_over(connection);
            }
        }
        self.cookies_until_ns = self.cookies_until_ns.max(extracted.cookies_until_ns);
        self.resume_all(now_ns, connections.iter().map(|(_, new)| new.index).collect());
        TcpMigrationMap { listeners, connections }
    }
}
