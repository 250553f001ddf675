//! Table of the UDP sockets of a stack.

use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Arena;

use super::bind_terms::BindTerms;
use super::lookup::{BoundGroup, Lookup, Member, PortEntry, port_index};
use super::socket::{ANY_V4, ANY_V6, Socket};
use super::{UdpId, UdpOptions};
use crate::ports::{PortGroupsHandle, choose_port};
use crate::random::{HashKey, SecretRng};
use crate::{RestoreError, SocketError};

/// Slot of the socket table; the generation makes handles unique.
struct Slot {
    generation: u32,
    socket: Option<Socket>,
}

/// All UDP sockets of a stack, with their lookup tables.
pub(crate) struct UdpTable {
    sockets: SocketSlots,
    free_slots: Vec<u32>,
    limit: usize,
    free_port_entries: Vec<u16>,
    lookup: Lookup,
    /// Bind order of the next socket.
    next_bind_order: u64,
    /// Registry of the sockets on shared ports.
    pub(super) port_groups: PortGroupsHandle,
}

/// Sockets by slot index.
pub(crate) struct SocketSlots {
    slots: Vec<Slot>,
}

impl SocketSlots {
    /// Socket and handle at a slot index from a lookup.
    #[inline(always)]
    pub(crate) fn by_index(&mut self, index: u32) -> Option<(UdpId, &mut Socket)> {
        let slot = self.slots.get_mut(index as usize)?;
        let id = UdpId { index, generation: slot.generation };
        slot.socket.as_mut().map(|socket| (id, socket))
    }
}

impl UdpTable {
    pub(crate) fn new(key: HashKey, limit: usize) -> Self {
        Self {
            sockets: SocketSlots { slots: Vec::new() },
            free_slots: Vec::new(),
            limit: limit.min(u32::MAX as usize),
            free_port_entries: Vec::new(),
            lookup: Lookup::new(key),
            next_bind_order: 0,
            port_groups: PortGroupsHandle::default(),
        }
    }

    #[inline]
    pub(crate) fn get(&self, id: UdpId) -> Option<&Socket> {
        let slot = self.sockets.slots.get(id.index as usize)?;
        if slot.generation == id.generation { slot.socket.as_ref() } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: UdpId) -> Option<&mut Socket> {
        let slot = self.sockets.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation { slot.socket.as_mut() } else { None }
    }

    /// Socket and handle at a slot index from a lookup.
    #[inline(always)]
    pub(crate) fn by_index(&mut self, index: u32) -> Option<(UdpId, &mut Socket)> {
        self.sockets.by_index(index)
    }

    /// Slot index of the socket for a datagram.
    pub(crate) fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        self.lookup.find(local, remote)
    }

    /// As [`Lookup::nth_group_socket`].
    pub(crate) fn nth_group_socket(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        n: usize,
    ) -> Option<u32> {
        self.lookup.nth_group_socket(local, remote, n)
    }

    /// Implements [`crate::Stack::udp_has_port`].
    pub(crate) fn has_port(&self, port: u16) -> bool {
        self.lookup.has_port(port)
    }

    /// Splits the table, so that sockets can change during lookups.
    #[inline(always)]
    pub(crate) fn sockets_and_lookup(&mut self) -> (&mut SocketSlots, &Lookup) {
        (&mut self.sockets, &self.lookup)
    }

    /// Adds a socket bound to `local`, whose address was checked. Port 0 selects a free port.
    pub(super) fn bind_to(
        &mut self,
        rng: &mut SecretRng,
        local: SocketAddr,
        options: UdpOptions,
        is_reserved: impl Fn(u16) -> bool,
    ) -> Result<UdpId, SocketError> {
        if !self.has_space_for(1) {
            return Err(SocketError::TooManySockets(self.limit));
        }
        let mut socket = Socket::new(local, options);
        if local.port() == 0 {
            let is_free =
                |number| self.lookup.entry_of_port[port_index(number)] == 0 && !is_reserved(number);
            let number = choose_port(rng, is_free).ok_or(SocketError::NoPortFree(local.ip()))?;
            socket.bound.set_port(number);
            socket.local = socket.bound;
        }
        self.check_address_free(&socket)?;
        self.notify_bound(&socket);
        Ok(self.insert(socket))
    }

    /// Inserts a socket whose addresses are free; returns its handle.
    pub(super) fn insert(&mut self, mut socket: Socket) -> UdpId {
        socket.bind_order = self.assign_bind_order();
        let index = self.free_slots.pop().unwrap_or_else(|| {
            self.sockets.slots.push(Slot { generation: 0, socket: None });
            (self.sockets.slots.len() - 1) as u32
        });
        self.add_to_lookup(index, &socket);
        let slot = &mut self.sockets.slots[index as usize];
        slot.socket = Some(socket);
        UdpId { index, generation: slot.generation }
    }

    fn assign_bind_order(&mut self) -> u64 {
        let order = self.next_bind_order;
        self.next_bind_order = order.saturating_add(1);
        order
    }

    /// Sorts the sockets of each shared address by bind order. Slot order may differ from it.
    pub(super) fn restore_bind_order(&mut self) {
        let Self { sockets, lookup, .. } = self;
        let order =
            |index: u32| sockets.slots[index as usize].socket.as_ref().map(|s| s.bind_order);
        let any = lookup.entries.iter_mut().flat_map(|port| &mut port.any);
        any.chain(lookup.bound.values_mut())
            .for_each(|group| group.sort_by_key(|member| order(member.index)));
        let orders = self.slots().filter_map(|(_, socket)| Some(socket?.bind_order));
        self.next_bind_order = orders.max().map_or(0, |last| last.saturating_add(1));
    }

    /// True if the limit allows `more` additional sockets.
    pub(super) fn has_space_for(&self, more: usize) -> bool {
        self.sockets.slots.len() - self.free_slots.len() + more <= self.limit
    }

    /// Connects a socket from the address `local` to `remote`.
    pub(super) fn connect_to(
        &mut self,
        id: UdpId,
        local: IpAddr,
        remote: SocketAddr,
    ) -> Result<(), SocketError> {
        let socket = self.get(id).ok_or(SocketError::Closed)?;
        let local = SocketAddr::new(local, socket.bound.port());
        match self.lookup.connected.get(&(local, remote)) {
            Some(other) if other.index == id.index => return Ok(()),
            Some(_) => return Err(SocketError::AddressInUse(local)),
            None if !self.may_open_flow(socket, local, remote) => {
                return Err(SocketError::AddressInUse(local));
            }
            None => {}
        }
        self.notify_unbound(socket);
        self.remove_from_lookup(id);
        let Some(socket) = self.get_mut(id) else { return Err(SocketError::Closed) };
        (socket.local, socket.remote) = (local, Some(remote));
        // Errors from the former peer do not concern the new one.
        socket.error = None;
        let terms = socket.bind_terms();
        self.add_connected(id.index, terms, local, remote);
        Ok(())
    }

    /// Implements [`crate::Stack::udp_disconnect`].
    pub(crate) fn disconnect(&mut self, id: UdpId) -> Result<(), SocketError> {
        let socket = self.get(id).ok_or(SocketError::Closed)?;
        if socket.remote.is_none() {
            return Ok(());
        }
        if let Some(in_use) = self.find_bind_conflict(socket) {
            return Err(SocketError::AddressInUse(in_use));
        }
        self.notify_unbound(socket);
        self.remove_from_lookup(id);
        let Some(slot) = self.sockets.slots.get_mut(id.index as usize) else {
            return Err(SocketError::Closed);
        };
        if let Some(mut socket) = slot.socket.take() {
            (socket.local, socket.remote) = (socket.bound, None);
            socket.bind_order = self.assign_bind_order();
            self.add_bound(id.index, &socket);
            self.notify_bound(&socket);
            self.sockets.slots[id.index as usize].socket = Some(socket);
        }
        Ok(())
    }

    /// Removes a socket.
    pub(super) fn remove(&mut self, id: UdpId) -> Option<Socket> {
        self.get(id)?;
        self.remove_from_lookup(id);
        let slot = self.sockets.slots.get_mut(id.index as usize)?;
        // A slot whose generations are exhausted is never reused.
        slot.generation = slot.generation.wrapping_add(1);
        if slot.generation != 0 {
            self.free_slots.push(id.index);
        }
        slot.socket.take()
    }

    /// Frees every frame in the receive queues.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        for socket in self.sockets_mut() {
            socket.drop_oldest(0, arena);
        }
    }

    /// All sockets, mutable.
    pub(crate) fn sockets_mut(&mut self) -> impl Iterator<Item = &mut Socket> {
        self.sockets.slots.iter_mut().filter_map(|slot| slot.socket.as_mut())
    }

    /// Every slot that was ever used, in order: its generation and its socket.
    pub(super) fn slots(&self) -> impl Iterator<Item = (u32, Option<&Socket>)> {
        self.sockets.slots.iter().map(|slot| (slot.generation, slot.socket.as_ref()))
    }

    /// Handles of all sockets.
    pub(crate) fn ids(&self) -> impl Iterator<Item = UdpId> {
        let slots = (0_u32..).zip(self.slots());
        slots
            .filter_map(|(index, (generation, socket))| socket.map(|_| UdpId { index, generation }))
    }

    /// Maximum number of sockets.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Appends a slot. The addresses of the socket must be valid. Returns the handle.
    ///
    /// # Errors
    /// Another socket uses the addresses.
    pub(super) fn add_slot(
        &mut self,
        generation: u32,
        socket: Option<Socket>,
    ) -> Result<UdpId, RestoreError> {
        let index = self.sockets.slots.len() as u32;
        match &socket {
            // A slot whose generations are exhausted is never reused.
            None if generation == 0 => {}
            None => self.free_slots.push(index),
            Some(socket) => {
                if self.is_in_use(socket) {
                    return Err(RestoreError::Damaged("two UDP sockets have the same address"));
                }
                self.add_to_lookup(index, socket);
            }
        }
        self.sockets.slots.push(Slot { generation, socket });
        Ok(UdpId { index, generation })
    }

    fn add_to_lookup(&mut self, index: u32, socket: &Socket) {
        match socket.remote {
            Some(remote) => {
                self.add_connected(index, socket.bind_terms(), socket.local, remote);
            }
            None => self.add_bound(index, socket),
        }
    }

    fn add_connected(
        &mut self,
        index: u32,
        terms: BindTerms,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        self.lookup.connected.insert((local, remote), Member { index, reuse_port: false });
        let port = self.port_entry(local.port());
        port.terms.add(terms, true);
        port.connected_count += 1;
        port.update_sole();
    }

    /// Families of the unspecified address that a socket is bound to: 0 is IPv4, 1 is IPv6.
    fn unspecified_families(socket: &Socket) -> impl Iterator<Item = usize> + use<> {
        let (v4, v6) = match socket.bound.ip() {
            ANY_V6 => (socket.is_dual_stack(), true),
            ip => (ip == ANY_V4, false),
        };
        [v4, v6].into_iter().enumerate().filter_map(|(family, stands)| stands.then_some(family))
    }

    /// Returns the bound address if an unconnected socket uses it and does not share it.
    fn find_bind_conflict(&self, socket: &Socket) -> Option<SocketAddr> {
        let port = self.lookup.port(socket.bound.port());
        port.terms.has_bind_conflict(&socket.bind_terms()).then_some(socket.bound)
    }

    /// True if another socket uses exactly these addresses.
    fn is_in_use(&self, socket: &Socket) -> bool {
        match socket.remote {
            Some(remote) => self.lookup.connected.contains_key(&(socket.local, remote)),
            None => self.find_bind_conflict(socket).is_some(),
        }
    }

    /// Checks that the addresses of a socket are free.
    ///
    /// # Errors
    /// Another socket uses the addresses and does not share them.
    pub(super) fn check_address_free(&self, socket: &Socket) -> Result<(), SocketError> {
        let bound = socket.bound;
        let in_use = SocketError::AddressInUse(bound);
        if self.is_in_use(socket) {
            return Err(in_use);
        }
        let entry = self.lookup.entry_of_port[port_index(bound.port())];
        if entry == 0 {
            return Ok(());
        }
        // Rare case: other sockets use this port. All must agree to share it, unless their
        // addresses do not overlap.
        let port = &self.lookup.entries[usize::from(entry)];
        if port.terms.has_clash(&socket.bind_terms()) { Err(in_use) } else { Ok(()) }
    }

    fn add_bound(&mut self, index: u32, socket: &Socket) {
        let member = Member { index, reuse_port: socket.options.reuse_port };
        let terms = socket.bind_terms();
        if socket.bound.ip().is_unspecified() {
            let families = Self::unspecified_families(socket);
            let port = self.port_entry(socket.bound.port());
            port.terms.add(terms, false);
            families.for_each(|family| port.any[family].push(member));
            port.update_sole();
        } else {
            let group = self.lookup.bound.entry(socket.bound).or_default();
            group.push(member);
            let is_sole = group.len() == 1;
            let port = self.port_entry(socket.bound.port());
            port.terms.add(terms, false);
            port.bound_count += 1;
            port.newest_bound = is_sole.then_some((socket.bound.ip(), index));
            port.update_sole();
        }
    }

    /// Removes a socket from the lookup tables.
    fn remove_from_lookup(&mut self, id: UdpId) {
        let Some(socket) = self.get(id) else { return };
        let (bound, local, remote) = (socket.bound, socket.local, socket.remote);
        let terms = socket.bind_terms();
        let entry = self.lookup.entry_of_port[port_index(bound.port())];
        let port = &mut self.lookup.entries[usize::from(entry)];
        port.terms.remove(terms, remote.is_some());
        if let Some(remote) = remote {
            self.lookup.connected.remove(&(local, remote));
            port.connected_count -= 1;
        } else if bound.ip().is_unspecified() {
            port.any.iter_mut().for_each(|group| remove_member(group, id.index));
        } else {
            if let Entry::Occupied(mut group) = self.lookup.bound.entry(bound) {
                remove_member(group.get_mut(), id.index);
                if group.get().is_empty() {
                    group.remove();
                }
            }
            port.bound_count -= 1;
            port.newest_bound = port.newest_bound.filter(|&(_, index)| index != id.index);
        }
        port.update_sole();
        if port.bound_count | port.connected_count == 0 && port.any.iter().all(Vec::is_empty) {
            self.lookup.entry_of_port[port_index(bound.port())] = 0;
            self.free_port_entries.push(entry);
        }
    }

    fn port_entry(&mut self, number: u16) -> &mut PortEntry {
        let entry = &mut self.lookup.entry_of_port[port_index(number)];
        if *entry == 0 {
            // At most 65,535 ports are ever in use: port 0 is never bound.
            *entry = self.free_port_entries.pop().unwrap_or_else(|| {
                self.lookup.entries.push(PortEntry::default());
                (self.lookup.entries.len() - 1) as u16
            });
        }
        &mut self.lookup.entries[usize::from(*entry)]
    }
}

fn remove_member(group: &mut BoundGroup, index: u32) {
    group.retain(|member| member.index != index);
}
