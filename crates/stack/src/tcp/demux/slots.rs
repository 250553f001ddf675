//! Table of connections and its index by four-tuple. Both take constant time at any size and
//! never move all connections at once.

use crate::random::HashKey;
use crate::tcp::connection::Connection;
use crate::tcp::flags::ConnFlags;
use crate::tcp::segment::FourTuple;
use crate::tcp::socket::TcpId;
use crate::tcp::timers::NO_INDEX;
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher};

/// Slots of one page.
const PAGE_SLOTS: usize = 64;

struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

/// Connections in pages of slots. A reused slot has a new generation.
pub(crate) struct Connections {
    pages: Vec<Box<[Slot; PAGE_SLOTS]>>,
    free: Vec<u32>,
    /// Slots that were ever used.
    used: usize,
    limit: usize,
    /// Slots by local port, in a stack whose connections migrate.
    by_port: Option<BTreeSet<(u16, u32)>>,
}

impl Connections {
    pub(crate) fn new(limit: usize) -> Self {
        let limit = limit.min(NO_INDEX as usize - 1);
        Self { pages: Vec::new(), free: Vec::new(), used: 0, limit, by_port: None }
    }

    /// Lists the connections by local port from now on.
    pub(crate) fn index_ports(&mut self) {
        let slots = (0_u32..).zip(self.slots());
        let local_port = |connection: &Connection| connection.tuple.local().port();
        let entries = slots.filter_map(|(index, (_, known))| Some((local_port(known?), index)));
        let by_port = entries.collect();
        self.by_port = Some(by_port);
    }

    /// Slots of the connections on a local port, or of all connections that may be on the port.
    pub(crate) fn on_port(&self, port: u16) -> impl Iterator<Item = u32> {
        let listed =
            self.by_port.as_ref().map(|by_port| by_port.range((port, 0)..=(port, u32::MAX)));
        let all = if listed.is_none() { 0..self.used as u32 } else { 0..0 };
        listed.into_iter().flatten().map(|&(_, index)| index).chain(all)
    }

    /// Iterates over all slots that were ever used, in order: generation and connection.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u32, Option<&Connection>)> {
        let slots = self.pages.iter().flat_map(|page| page.iter()).take(self.used);
        slots.map(|slot| (slot.generation, slot.connection.as_ref()))
    }

    /// Adds the next slot, with its connection if there is one. Returns the slot index; `None` at
    /// the limit.
    pub(crate) fn add_slot(
        &mut self,
        generation: u32,
        connection: Option<Connection>,
    ) -> Option<u32> {
        if self.used >= self.limit {
            return None;
        }
        let index = self.new_slot();
        let slot = &mut self.pages[index as usize / PAGE_SLOTS][index as usize % PAGE_SLOTS];
        *slot = Slot { generation, connection };
        match (&slot.connection, &mut self.by_port) {
            (None, _) => self.free.push(index),
            (Some(connection), Some(by_port)) => {
                by_port.insert((connection.tuple.local().port(), index));
            }
            _ => {}
        }
        Some(index)
    }

    /// Returns the index of a slot that was never used.
    fn new_slot(&mut self) -> u32 {
        if self.used == self.pages.len() * PAGE_SLOTS {
            let empty = |_| Slot { generation: 0, connection: None };
            let page: Box<[Slot]> = (0..PAGE_SLOTS).map(empty).collect();
            // Not on the stack, which would be large for it. The length is right.
            self.pages.extend(page.try_into().ok());
        }
        self.used += 1;
        (self.used - 1) as u32
    }

    pub(crate) fn len(&self) -> usize {
        self.used - self.free.len()
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// True when `more` connections fit within the limit.
    pub(crate) fn has_space_for(&self, more: usize) -> bool {
        self.len() + more <= self.limit
    }

    /// Inserts a connection in a free slot; `None` at the limit.
    pub(crate) fn insert(&mut self, connection: Connection) -> Option<TcpId> {
        if self.is_full() { None } else { Some(self.insert_beyond_limit(connection)) }
    }

    /// Inserts a connection in a free slot, also at the limit.
    pub(crate) fn insert_beyond_limit(&mut self, connection: Connection) -> TcpId {
        let index = self.free.pop().unwrap_or_else(|| self.new_slot());
        if let Some(by_port) = &mut self.by_port {
            by_port.insert((connection.tuple.local().port(), index));
        }
        let slot = &mut self.pages[index as usize / PAGE_SLOTS][index as usize % PAGE_SLOTS];
        slot.connection = Some(connection);
        TcpId { index, generation: slot.generation }
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Connection> {
        let page = self.pages.get_mut(index as usize / PAGE_SLOTS)?;
        let slot = &mut page[index as usize % PAGE_SLOTS];
        let connection = slot.connection.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        if let Some(by_port) = &mut self.by_port {
            by_port.remove(&(connection.tuple.local().port(), index));
        }
        Some(connection)
    }

    #[inline]
    pub(crate) fn at(&self, index: u32) -> Option<&Connection> {
        let page = self.pages.get(index as usize / PAGE_SLOTS)?;
        page[index as usize % PAGE_SLOTS].connection.as_ref()
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut Connection> {
        let page = self.pages.get_mut(index as usize / PAGE_SLOTS)?;
        page[index as usize % PAGE_SLOTS].connection.as_mut()
    }

    /// Returns the connection in a slot, with its handle.
    #[inline]
    pub(crate) fn at_mut_with_id(&mut self, index: u32) -> Option<(&mut Connection, TcpId)> {
        let page = self.pages.get_mut(index as usize / PAGE_SLOTS)?;
        let slot = &mut page[index as usize % PAGE_SLOTS];
        let id = TcpId { index, generation: slot.generation };
        slot.connection.as_mut().map(|connection| (connection, id))
    }

    /// Returns the current handle of a slot.
    pub(crate) fn id(&self, index: u32) -> TcpId {
        let page = self.pages.get(index as usize / PAGE_SLOTS);
        let generation = page.map_or(0, |page| page[index as usize % PAGE_SLOTS].generation);
        TcpId { index, generation }
    }

    /// Iterates over all connections.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.pages.iter().flat_map(|page| page.iter()).filter_map(|slot| slot.connection.as_ref())
    }

    /// Iterates mutably over all connections.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.pages
            .iter_mut()
            .flat_map(|page| page.iter_mut())
            .filter_map(|slot| slot.connection.as_mut())
    }

    /// Returns the connection with this handle.
    pub(crate) fn get(&self, id: TcpId) -> Option<&Connection> {
        self.at(id.index).filter(|_| self.id(id.index) == id)
    }

    /// Returns the connection with this handle, if the application still holds the handle.
    #[inline]
    pub(crate) fn held_mut(&mut self, id: TcpId) -> Option<&mut Connection> {
        let found = self.at_mut_with_id(id.index).filter(|found| found.1 == id);
        found.map(|found| found.0).filter(|held| !held.flags.contains(ConnFlags::ORPHAN))
    }
}

/// Hash table of connections by four-tuple: linear hashing (Litwin 1980). The table grows by one
/// bucket at a time, so no insertion pays for rehashing all connections.
pub(crate) struct TupleIndex {
    key: HashKey,
    heads: Vec<u32>,
    /// Bucket count at the start of the current doubling round, a power of two.
    base: usize,
    count: usize,
}

impl TupleIndex {
    pub(crate) fn new(key: HashKey) -> Self {
        const MIN_BUCKETS: usize = 64;
        Self { key, heads: vec![NO_INDEX; MIN_BUCKETS], base: MIN_BUCKETS, count: 0 }
    }

    fn hash(&self, tuple: &FourTuple) -> u32 {
        let mut hasher = self.key.build_hasher();
        tuple.words().into_iter().for_each(|word| hasher.write_u64(word));
        hasher.finish() as u32
    }

    fn bucket(&self, hash: u32) -> usize {
        let wide = hash as usize & (2 * self.base - 1);
        if wide < self.heads.len() { wide } else { hash as usize & (self.base - 1) }
    }

    /// Returns the index of the connection with this four-tuple.
    #[inline]
    pub(crate) fn find(&self, connections: &Connections, tuple: &FourTuple) -> Option<u32> {
        let hash = self.hash(tuple);
        let mut index = self.heads[self.bucket(hash)];
        while let Some(connection) = connections.at(index) {
            if connection.links.hash == hash && connection.tuple == *tuple {
                return Some(index);
            }
            index = connection.links.hash_next;
        }
        None
    }

    pub(crate) fn insert(&mut self, connections: &mut Connections, index: u32) {
        let Some(tuple) = connections.at(index).map(|connection| connection.tuple) else { return };
        let hash = self.hash(&tuple);
        self.link(connections, index, hash);
        self.count += 1;
        if self.count > self.heads.len() {
            self.split(connections);
        }
    }

    fn link(&mut self, connections: &mut Connections, index: u32, hash: u32) {
        let bucket = self.bucket(hash);
        if let Some(connection) = connections.at_mut(index) {
            connection.links.hash = hash;
            connection.links.hash_next = self.heads[bucket];
            connection.flags.insert(ConnFlags::INDEXED);
            self.heads[bucket] = index;
        }
    }

    /// Adds one bucket and moves the connections that now belong to it.
    fn split(&mut self, connections: &mut Connections) {
        let old = self.heads.len() - self.base;
        self.heads.push(NO_INDEX);
        let mut index = std::mem::replace(&mut self.heads[old], NO_INDEX);
        if self.heads.len() == 2 * self.base {
            self.base *= 2;
        }
        while let Some(links) = connections.at(index).map(|connection| connection.links) {
            self.link(connections, index, links.hash);
            index = links.hash_next;
        }
    }

    pub(crate) fn remove(&mut self, connections: &mut Connections, index: u32) {
        let Some(connection) = connections.at_mut(index) else { return };
        if !connection.flags.take(ConnFlags::INDEXED) {
            return;
        }
        let links = connection.links;
        self.count -= 1;
        let bucket = self.bucket(links.hash);
        let mut at = self.heads[bucket];
        if at == index {
            self.heads[bucket] = links.hash_next;
            return;
        }
        while let Some(before) = connections.at_mut(at) {
            if before.links.hash_next == index {
                before.links.hash_next = links.hash_next;
                return;
            }
            at = before.links.hash_next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;
    use crate::tcp::seq::Seq;
    use std::sync::Arc;

    #[test]
    fn lists_connections_by_port() {
        let tuple = |port: u16, n: u16| {
            FourTuple::new(([192, 0, 2, 1], port).into(), ([192, 0, 2, 2], n).into())
        };
        let connection = |port, n| Connection::new(0, tuple(port, n), Arc::default(), Seq(0), 0);
        let mut connections = Connections::new(1000);
        let old: Vec<_> =
            (0..10).map(|n| connections.insert(connection(80, n)).unwrap().index).collect();
        assert_eq!(connections.on_port(443).count(), 10, "not listed: each may be on the port");
        connections.index_ports();
        let new: Vec<_> =
            (0..500).map(|n| connections.insert(connection(443, n)).unwrap().index).collect();
        let found =
            |connections: &Connections, port| -> Vec<_> { connections.on_port(port).collect() };
        assert_eq!((found(&connections, 80), found(&connections, 443)), (old.clone(), new.clone()));
        old.iter().for_each(|&index| assert!(connections.remove(index).is_some()));
        let reused = connections.insert(connection(8080, 1)).unwrap().index;
        assert_eq!(found(&connections, 8080), [reused]);
        assert!(found(&connections, 80).is_empty());
        connections.add_slot(0, Some(connection(80, 1))).unwrap();
        assert_eq!(found(&connections, 80).len(), 1);
    }

    #[test]
    fn finds_thousands_while_the_table_grows_and_shrinks() {
        let tuple = |n: u16| {
            FourTuple::new("[2001:db8::1]:80".parse().unwrap(), ([192, 0, 2, 2], n).into())
        };
        let mut connections = Connections::new(5000);
        let mut index = TupleIndex::new(SecretRng::new([9; 16]).hash_key());
        let mut indices = Vec::new();
        for n in 0..5000 {
            let connection = Connection::new(0, tuple(n), Arc::default(), Seq(0), 0);
            let id = connections.insert(connection).unwrap();
            index.insert(&mut connections, id.index);
            indices.push(id.index);
        }
        let one_more = Connection::new(0, tuple(5000), Arc::default(), Seq(0), 0);
        assert!(connections.insert(one_more).is_none(), "the limit holds");
        for n in 0..5000 {
            assert_eq!(index.find(&connections, &tuple(n)), Some(indices[usize::from(n)]));
        }
        for n in (0..5000_u16).step_by(2) {
            index.remove(&mut connections, indices[usize::from(n)]);
            let old = connections.id(indices[usize::from(n)]);
            connections.remove(indices[usize::from(n)]);
            assert!(connections.get(old).is_none());
        }
        for n in 0..5000 {
            let expected = (n % 2 == 1).then_some(indices[usize::from(n)]);
            assert_eq!(index.find(&connections, &tuple(n)), expected);
        }
        assert_eq!(connections.len(), 2500);
    }
}
