//! The sockets of a stack.

use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Arena;

use super::lookup::{Group, Lookup, Member, Port, place_of};
use super::socket::{ANY_V4, ANY_V6, Socket};
use super::{UdpId, UdpOptions, ports};
use crate::chance::{Chance, HashKey};
use crate::port_groups::Told;
use crate::{RestoreError, SocketError};

struct Slot {
    generation: u32,
    socket: Option<Socket>,
}

pub(crate) struct UdpTable {
    sockets: Sockets,
    free: Vec<u32>,
    limit: usize,
    free_ports: Vec<u16>,
    lookup: Lookup,
    /// That of the socket that is bound next.
    next_turn: u64,
    /// Who hears of sockets on ports that are shared.
    pub(super) told: Told,
}

/// The sockets, each at its place.
pub(crate) struct Sockets {
    slots: Vec<Slot>,
}

impl Sockets {
    /// The socket at a place that a lookup gave.
    #[inline(always)]
    pub(crate) fn at(&mut self, index: u32) -> Option<(UdpId, &mut Socket)> {
        let slot = self.slots.get_mut(index as usize)?;
        let id = UdpId { index, generation: slot.generation };
        slot.socket.as_mut().map(|socket| (id, socket))
    }
}

impl UdpTable {
    pub(crate) fn new(key: HashKey, limit: usize) -> Self {
        Self {
            sockets: Sockets { slots: Vec::new() },
            free: Vec::new(),
            limit: limit.min(u32::MAX as usize),
            free_ports: Vec::new(),
            lookup: Lookup::new(key),
            next_turn: 0,
            told: Told::default(),
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

    /// The socket at a place that a lookup gave.
    #[inline(always)]
    pub(crate) fn at(&mut self, index: u32) -> Option<(UdpId, &mut Socket)> {
        self.sockets.at(index)
    }

    /// The socket that a datagram is for.
    pub(crate) fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        self.lookup.find(local, remote)
    }

    /// As [`Lookup::nth_listener`].
    pub(crate) fn nth_listener(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        n: usize,
    ) -> Option<u32> {
        self.lookup.nth_listener(local, remote, n)
    }

    /// The sockets, to be changed while datagrams are looked up.
    #[inline(always)]
    pub(crate) fn parts(&mut self) -> (&mut Sockets, &Lookup) {
        (&mut self.sockets, &self.lookup)
    }

    pub(crate) fn bind(
        &mut self,
        chance: &mut Chance,
        local: SocketAddr,
        options: UdpOptions,
        is_reserved: impl Fn(u16) -> bool,
    ) -> Result<UdpId, SocketError> {
        if !self.has_room_for(1) {
            return Err(SocketError::TooManySockets(self.limit));
        }
        let mut socket = Socket::new(local, options);
        if local.port() == 0 {
            let is_free =
                |number| self.lookup.port_of[place_of(number)] == 0 && !is_reserved(number);
            let number =
                ports::choose(chance, is_free).ok_or(SocketError::NoPortFree(local.ip()))?;
            socket.bound.set_port(number);
            socket.local = socket.bound;
        }
        self.check_free(&socket)?;
        self.tell_bound(&socket);
        Ok(self.enter(socket))
    }

    /// Gives a place to a socket whose addresses are free.
    pub(super) fn enter(&mut self, mut socket: Socket) -> UdpId {
        socket.turn = self.take_turn();
        let index = self.free.pop().unwrap_or_else(|| {
            self.sockets.slots.push(Slot { generation: 0, socket: None });
            (self.sockets.slots.len() - 1) as u32
        });
        self.enter_lookup(index, &socket);
        let slot = &mut self.sockets.slots[index as usize];
        slot.socket = Some(socket);
        UdpId { index, generation: slot.generation }
    }

    fn take_turn(&mut self) -> u64 {
        let turn = self.next_turn;
        self.next_turn = turn.saturating_add(1);
        turn
    }

    /// Puts those that share an address into the order in which they were bound, which
    /// is not that of their places.
    pub(super) fn restore_turns(&mut self) {
        let Self { sockets, lookup, .. } = self;
        let turn = |index: u32| sockets.slots[index as usize].socket.as_ref().map(|s| s.turn);
        let any = lookup.ports.iter_mut().flat_map(|port| &mut port.any);
        any.chain(lookup.bound.values_mut())
            .for_each(|group| group.sort_by_key(|member| turn(member.index)));
        let turns = self.places().filter_map(|(_, socket)| Some(socket?.turn));
        self.next_turn = turns.max().map_or(0, |last| last.saturating_add(1));
    }

    /// Whether there may be so many more.
    pub(super) fn has_room_for(&self, more: usize) -> bool {
        self.sockets.slots.len() - self.free.len() + more <= self.limit
    }

    pub(crate) fn connect(
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
            None if !self.may_begin(socket, local, remote) => {
                return Err(SocketError::AddressInUse(local));
            }
            None => {}
        }
        self.tell_over(socket);
        self.leave(id);
        let Some(socket) = self.get_mut(id) else { return Err(SocketError::Closed) };
        (socket.local, socket.remote) = (local, Some(remote));
        // Errors of the former peer say nothing about this one.
        socket.error = None;
        self.enter_connected(id.index, local.port(), local, remote);
        Ok(())
    }

    pub(crate) fn disconnect(&mut self, id: UdpId) -> Result<(), SocketError> {
        let socket = self.get(id).ok_or(SocketError::Closed)?;
        if socket.remote.is_none() {
            return Ok(());
        }
        if let Some(taken) = self.unconnected_taken(socket) {
            return Err(SocketError::AddressInUse(taken));
        }
        self.tell_over(socket);
        self.leave(id);
        let Some(slot) = self.sockets.slots.get_mut(id.index as usize) else {
            return Err(SocketError::Closed);
        };
        if let Some(mut socket) = slot.socket.take() {
            (socket.local, socket.remote) = (socket.bound, None);
            socket.turn = self.take_turn();
            self.enter_bound(id.index, &socket);
            self.tell_bound(&socket);
            self.sockets.slots[id.index as usize].socket = Some(socket);
        }
        Ok(())
    }

    pub(crate) fn close(&mut self, id: UdpId) -> Option<Socket> {
        self.get(id)?;
        self.leave(id);
        let slot = self.sockets.slots.get_mut(id.index as usize)?;
        // A place whose generations are used up is never used again.
        slot.generation = slot.generation.wrapping_add(1);
        if slot.generation != 0 {
            self.free.push(id.index);
        }
        slot.socket.take()
    }

    /// Gives back every frame that waits in a socket's queue.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        for socket in self.sockets_mut() {
            socket.cut(0, arena);
        }
    }

    /// All of them.
    pub(crate) fn sockets_mut(&mut self) -> impl Iterator<Item = &mut Socket> {
        self.sockets.slots.iter_mut().filter_map(|slot| slot.socket.as_mut())
    }

    /// Every place that was ever used, in order: its generation and who is
    /// there.
    pub(super) fn places(&self) -> impl Iterator<Item = (u32, Option<&Socket>)> {
        self.sockets.slots.iter().map(|slot| (slot.generation, slot.socket.as_ref()))
    }

    /// How many sockets there may be.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Adds the next place, with who was there, whose addresses are right by
    /// themselves. Returns its name.
    ///
    /// # Errors
    /// When another socket has its addresses.
    pub(super) fn add_place(
        &mut self,
        generation: u32,
        socket: Option<Socket>,
    ) -> Result<UdpId, RestoreError> {
        let index = self.sockets.slots.len() as u32;
        match &socket {
            // A place whose generations are used up is never used again.
            None if generation == 0 => {}
            None => self.free.push(index),
            Some(socket) => {
                if self.is_taken(socket) {
                    return Err(RestoreError::Damaged("two sockets have one address"));
                }
                self.enter_lookup(index, socket);
            }
        }
        self.sockets.slots.push(Slot { generation, socket });
        Ok(UdpId { index, generation })
    }

    fn enter_lookup(&mut self, index: u32, socket: &Socket) {
        match socket.remote {
            Some(remote) => {
                self.enter_connected(index, socket.bound.port(), socket.local, remote);
            }
            None => self.enter_bound(index, socket),
        }
    }

    fn enter_connected(&mut self, index: u32, port: u16, local: SocketAddr, remote: SocketAddr) {
        self.lookup.connected.insert((local, remote), Member { index, shares: false });
        let port = self.enter_port(port);
        port.connected += 1;
        port.find_only();
    }

    /// The families whose unspecified address a socket stands for.
    fn families(socket: &Socket) -> impl Iterator<Item = usize> + use<> {
        let (v4, v6) = match socket.bound.ip() {
            ANY_V6 => (socket.is_dual(), true),
            ip => (ip == ANY_V4, false),
        };
        [v4, v6].into_iter().enumerate().filter_map(|(family, stands)| stands.then_some(family))
    }

    /// Whether an unconnected socket has the place that this one wants, and does
    /// not share it.
    fn unconnected_taken(&self, socket: &Socket) -> Option<SocketAddr> {
        let port = self.lookup.port(socket.bound.port());
        let any = Self::families(socket).flat_map(|family| &port.any[family]);
        let bound = self.lookup.bound.get(&socket.bound);
        let mut there = any.chain(bound.into_iter().flatten());
        let shares = |member: &Member| {
            let other = &self.sockets.slots[member.index as usize].socket;
            other.as_ref().is_some_and(|other| may_share(socket, other))
        };
        (!there.all(shares)).then_some(socket.bound)
    }

    /// Whether another socket has just the place that this one wants.
    fn is_taken(&self, socket: &Socket) -> bool {
        match socket.remote {
            Some(remote) => self.lookup.connected.contains_key(&(socket.local, remote)),
            None => self.unconnected_taken(socket).is_some(),
        }
    }

    /// # Errors
    /// When the other sockets do not leave its addresses to this one.
    pub(super) fn check_free(&self, socket: &Socket) -> Result<(), SocketError> {
        let bound = socket.bound;
        let taken = SocketError::AddressInUse(bound);
        if self.is_taken(socket) {
            return Err(taken);
        }
        let place = self.lookup.port_of[place_of(bound.port())];
        if place == 0 {
            return Ok(());
        }
        // The rare case: others are on this port. All must agree to share it,
        // unless their addresses are plainly different.
        let clash =
            self.sockets.slots.iter().filter_map(|slot| slot.socket.as_ref()).any(|other| {
                let agree = reuse_address(socket, other) || may_share(socket, other);
                other.bound.port() == bound.port() && !agree && overlap(socket, other)
            });
        if clash { Err(taken) } else { Ok(()) }
    }

    fn enter_bound(&mut self, index: u32, socket: &Socket) {
        let member = Member { index, shares: socket.options.reuse_port };
        if socket.bound.ip().is_unspecified() {
            let families = Self::families(socket);
            let port = self.enter_port(socket.bound.port());
            families.for_each(|family| port.any[family].push(member));
            port.find_only();
        } else {
            let group = self.lookup.bound.entry(socket.bound).or_default();
            group.push(member);
            let is_alone = group.len() == 1;
            let port = self.enter_port(socket.bound.port());
            port.bound += 1;
            port.newest = is_alone.then_some((socket.bound.ip(), index));
            port.find_only();
        }
    }

    /// Takes a socket out of the lookup tables.
    fn leave(&mut self, id: UdpId) {
        let Some(socket) = self.get(id) else { return };
        let (bound, local, remote) = (socket.bound, socket.local, socket.remote);
        let place = self.lookup.port_of[place_of(bound.port())];
        let port = &mut self.lookup.ports[usize::from(place)];
        if let Some(remote) = remote {
            self.lookup.connected.remove(&(local, remote));
            port.connected -= 1;
        } else if bound.ip().is_unspecified() {
            port.any.iter_mut().for_each(|group| take_out(group, id.index));
        } else {
            if let Entry::Occupied(mut group) = self.lookup.bound.entry(bound) {
                take_out(group.get_mut(), id.index);
                if group.get().is_empty() {
                    group.remove();
                }
            }
            port.bound -= 1;
            port.newest = port.newest.filter(|&(_, index)| index != id.index);
        }
        port.find_only();
        if port.bound | port.connected == 0 && port.any.iter().all(Vec::is_empty) {
            self.lookup.port_of[place_of(bound.port())] = 0;
            self.free_ports.push(place);
        }
    }

    fn enter_port(&mut self, number: u16) -> &mut Port {
        let place = &mut self.lookup.port_of[place_of(number)];
        if *place == 0 {
            // At most 65,535 ports are ever in use: port 0 is never bound.
            *place = self.free_ports.pop().unwrap_or_else(|| {
                self.lookup.ports.push(Port::default());
                (self.lookup.ports.len() - 1) as u16
            });
        }
        &mut self.lookup.ports[usize::from(*place)]
    }
}

fn take_out(group: &mut Group, index: u32) {
    group.retain(|member| member.index != index);
}

/// Whether two sockets may be bound to the same address and port.
fn may_share(a: &Socket, b: &Socket) -> bool {
    let agree = a.options.reuse_port && b.options.reuse_port || reuse_address(a, b);
    agree && a.options.party == b.options.party
}

/// Whether both leave addresses to others that are not quite their own.
fn reuse_address(a: &Socket, b: &Socket) -> bool {
    a.options.reuse_address && b.options.reuse_address
}

/// Whether two sockets on one port could both be meant by a datagram.
fn overlap(a: &Socket, b: &Socket) -> bool {
    let (ip_a, ip_b) = (a.bound.ip(), b.bound.ip());
    let same_family = ip_a.is_ipv4() == ip_b.is_ipv4() || a.is_dual() || b.is_dual();
    ip_a == ip_b || same_family && (ip_a.is_unspecified() || ip_b.is_unspecified())
}
