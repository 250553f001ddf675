//! Where connections are kept, and how they are found by their ends: both in
//! constant time at any size, without ever moving all of them at once.

use super::connection::{Connection, Is, NOWHERE};
use super::segment::Ends;
use super::socket::TcpId;
use crate::chance::HashKey;
use std::hash::{BuildHasher, Hasher};

/// Connections of one page.
const PAGE: usize = 64;

struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

/// Pages of connections. A place is used again with another generation.
pub(crate) struct Connections {
    pages: Vec<Box<[Slot]>>,
    free: Vec<u32>,
    /// Places that were ever used.
    used: usize,
    limit: usize,
}

impl Connections {
    pub(crate) fn new(limit: usize) -> Self {
        let limit = limit.min(NOWHERE as usize - 1);
        Self { pages: Vec::new(), free: Vec::new(), used: 0, limit }
    }

    /// Every place that was ever used, in order: its generation and who is
    /// there.
    pub(crate) fn places(&self) -> impl Iterator<Item = (u32, Option<&Connection>)> {
        let slots = self.pages.iter().flatten().take(self.used);
        slots.map(|slot| (slot.generation, slot.connection.as_ref()))
    }

    /// Adds the next place, with who is there. Returns its number; `None` when
    /// there may be no more.
    pub(crate) fn add_place(
        &mut self,
        generation: u32,
        connection: Option<Connection>,
    ) -> Option<u32> {
        if self.used >= self.limit {
            return None;
        }
        let index = self.new_place();
        let slot = &mut self.pages[index as usize / PAGE][index as usize % PAGE];
        *slot = Slot { generation, connection };
        if slot.connection.is_none() {
            self.free.push(index);
        }
        Some(index)
    }

    /// A place that was never used.
    fn new_place(&mut self) -> u32 {
        if self.used == self.pages.len() * PAGE {
            let empty = || Slot { generation: 0, connection: None };
            self.pages.push((0..PAGE).map(|_| empty()).collect());
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

    /// Whether there may be so many more.
    pub(crate) fn has_room_for(&self, more: usize) -> bool {
        self.len() + more <= self.limit
    }

    /// Finds a place for a new connection; `None` when there is none.
    pub(crate) fn insert(&mut self, connection: Connection) -> Option<TcpId> {
        if self.is_full() {
            return None;
        }
        let index = self.free.pop().unwrap_or_else(|| self.new_place());
        let slot = &mut self.pages[index as usize / PAGE][index as usize % PAGE];
        slot.connection = Some(connection);
        Some(TcpId { index, generation: slot.generation })
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Connection> {
        let slot = self.pages.get_mut(index as usize / PAGE)?.get_mut(index as usize % PAGE)?;
        let connection = slot.connection.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some(connection)
    }

    #[inline]
    pub(crate) fn at(&self, index: u32) -> Option<&Connection> {
        let slot = self.pages.get(index as usize / PAGE)?.get(index as usize % PAGE)?;
        slot.connection.as_ref()
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut Connection> {
        let slot = self.pages.get_mut(index as usize / PAGE)?.get_mut(index as usize % PAGE)?;
        slot.connection.as_mut()
    }

    /// A connection and its name.
    #[inline]
    pub(crate) fn at_mut_with_id(&mut self, index: u32) -> Option<(&mut Connection, TcpId)> {
        let slot = self.pages.get_mut(index as usize / PAGE)?.get_mut(index as usize % PAGE)?;
        let id = TcpId { index, generation: slot.generation };
        slot.connection.as_mut().map(|connection| (connection, id))
    }

    /// The name of the connection at a place.
    pub(crate) fn id(&self, index: u32) -> TcpId {
        let page = self.pages.get(index as usize / PAGE);
        let generation = page.map_or(0, |page| page[index as usize % PAGE].generation);
        TcpId { index, generation }
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.pages.iter().flatten().filter_map(|slot| slot.connection.as_ref())
    }

    /// All of them, to be changed.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.pages.iter_mut().flatten().filter_map(|slot| slot.connection.as_mut())
    }

    /// The connection with this name.
    pub(crate) fn get(&self, id: TcpId) -> Option<&Connection> {
        self.at(id.index).filter(|_| self.id(id.index) == id)
    }
}

/// A hash table of connections by their ends: linear hashing (Litwin 1980). It
/// grows by one bucket at a time, so no connection pays for all others.
pub(crate) struct Index {
    key: HashKey,
    heads: Vec<u32>,
    /// The power of two that the table has outgrown.
    base: usize,
    count: usize,
}

impl Index {
    pub(crate) fn new(key: HashKey) -> Self {
        const SMALLEST: usize = 64;
        Self { key, heads: vec![NOWHERE; SMALLEST], base: SMALLEST, count: 0 }
    }

    fn hash(&self, ends: &Ends) -> u32 {
        let mut hasher = self.key.build_hasher();
        ends.words().into_iter().for_each(|word| hasher.write_u64(word));
        hasher.finish() as u32
    }

    fn bucket(&self, hash: u32) -> usize {
        let wide = hash as usize & (2 * self.base - 1);
        if wide < self.heads.len() { wide } else { hash as usize & (self.base - 1) }
    }

    /// The connection between these ends.
    #[inline]
    pub(crate) fn find(&self, connections: &Connections, ends: &Ends) -> Option<u32> {
        let hash = self.hash(ends);
        let mut index = self.heads[self.bucket(hash)];
        while let Some(connection) = connections.at(index) {
            if connection.links.hash == hash && connection.ends == *ends {
                return Some(index);
            }
            index = connection.links.hash_next;
        }
        None
    }

    pub(crate) fn insert(&mut self, connections: &mut Connections, index: u32) {
        let Some(ends) = connections.at(index).map(|connection| connection.ends) else { return };
        let hash = self.hash(&ends);
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
            connection.is.insert(Is::INDEXED);
            self.heads[bucket] = index;
        }
    }

    /// Adds one bucket, and moves there what belongs there.
    fn split(&mut self, connections: &mut Connections) {
        let old = self.heads.len() - self.base;
        self.heads.push(NOWHERE);
        let mut index = std::mem::replace(&mut self.heads[old], NOWHERE);
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
        if !connection.is.take(Is::INDEXED) {
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
    use crate::chance::Chance;
    use crate::tcp::seq::Seq;
    use std::sync::Arc;

    #[test]
    fn thousands_are_found_while_the_table_grows_and_shrinks() {
        let ends =
            |n: u16| Ends::new("[2001:db8::1]:80".parse().unwrap(), ([192, 0, 2, 2], n).into());
        let mut connections = Connections::new(5000);
        let mut index = Index::new(Chance::new([9; 16]).hash_key());
        let mut places = Vec::new();
        for n in 0..5000 {
            let connection = Connection::new(0, ends(n), Arc::default(), Seq(0), 0);
            let id = connections.insert(connection).unwrap();
            index.insert(&mut connections, id.index);
            places.push(id.index);
        }
        let one_more = Connection::new(0, ends(5000), Arc::default(), Seq(0), 0);
        assert!(connections.insert(one_more).is_none(), "the limit holds");
        for n in 0..5000 {
            assert_eq!(index.find(&connections, &ends(n)), Some(places[usize::from(n)]));
        }
        for n in (0..5000_u16).step_by(2) {
            index.remove(&mut connections, places[usize::from(n)]);
            let old = connections.id(places[usize::from(n)]);
            connections.remove(places[usize::from(n)]);
            assert!(connections.get(old).is_none());
        }
        for n in 0..5000 {
            let expected = (n % 2 == 1).then_some(places[usize::from(n)]);
            assert_eq!(index.find(&connections, &ends(n)), expected);
        }
        assert_eq!(connections.len(), 2500);
    }
}
