//! Which socket a datagram is for.
//!
//! The destination port leads to a [`Port`] without any search: a table of
//! 65,536 places. Most ports have one socket, and that is the end of it. Only
//! a port that has connected sockets, or several bound to one address each,
//! costs a hash lookup for each kind.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Not;

use tidegate_memory::Arena;

use super::socket::{ANY_V4, ANY_V6, Socket};
use super::{UdpId, UdpOptions, ports};
use crate::SocketError;
use crate::chance::{Chance, HashKey};

/// The sockets on one port.
#[derive(Default)]
struct Port {
    /// Bound to the unspecified address: by family, IPv4 first.
    any: [Option<u32>; 2],
    /// How many are bound to one address.
    bound: u32,
    /// How many are connected.
    connected: u32,
    /// The socket bound to one address last, and that address: where there is
    /// just one, no search is needed.
    newest: Option<(IpAddr, u32)>,
    /// What the above comes to for most ports.
    only_v4: Only<u32>,
    only_v6: Only<u128>,
}

/// The socket for datagrams to some address of ours, where that needs no
/// search: those whose address is `address` under `mask`. Addresses are as they
/// stand in headers.
struct Only<A> {
    mask: A,
    address: A,
    socket: u32,
}

impl<A: Default + From<u8> + Not<Output = A>> Only<A> {
    /// There is none: no address is 1 where all is masked out.
    fn none() -> Self {
        Self { mask: A::default(), address: A::from(1), socket: 0 }
    }

    /// This socket is for every address.
    fn any(socket: u32) -> Self {
        Self { mask: A::default(), address: A::default(), socket }
    }

    /// This socket is for one address.
    fn one(address: A, socket: u32) -> Self {
        Self { mask: !A::default(), address, socket }
    }
}

impl<A: Default + From<u8> + Not<Output = A>> Default for Only<A> {
    fn default() -> Self {
        Self::none()
    }
}

impl Port {
    /// Works out again who needs no search, after a change.
    fn find_only(&mut self) {
        let any = |family: usize| self.any[family].filter(|_| self.bound == 0);
        (self.only_v4, self.only_v6) = match self.newest {
            _ if self.connected != 0 => (Only::none(), Only::none()),
            Some((IpAddr::V4(address), socket)) => {
                (Only::one(u32::from_ne_bytes(address.octets()), socket), Only::none())
            }
            Some((IpAddr::V6(address), socket)) => {
                (Only::none(), Only::one(u128::from_ne_bytes(address.octets()), socket))
            }
            None => (
                any(0).map_or_else(Only::none, Only::any),
                any(1).map_or_else(Only::none, Only::any),
            ),
        };
    }
}

/// A place where no socket is: there cannot be as many.
pub(crate) const NO_SOCKET: u32 = u32::MAX;

/// Where a port number stands in the table: it is taken as it stands in headers.
#[inline(always)]
fn place_of(number: u16) -> usize {
    usize::from(number.to_be())
}

struct Slot {
    generation: u32,
    socket: Option<Socket>,
}

/// Local and remote end of a connected socket.
type Pair = (SocketAddr, SocketAddr);

pub(crate) struct UdpTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    limit: usize,
    /// For every port number, which of `ports` it is; 0 is none.
    port_of: Box<[u16; 1 << 16]>,
    ports: Vec<Port>,
    free_ports: Vec<u16>,
    bound: HashMap<SocketAddr, u32, HashKey>,
    connected: HashMap<Pair, u32, HashKey>,
}

impl UdpTable {
    pub(crate) fn new(key: HashKey, limit: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            limit: limit.min(u32::MAX as usize),
            port_of: boxed_zeros(),
            // Place 0 stands for no sockets, so that a lookup needs no branch.
            ports: vec![Port::default()],
            free_ports: Vec::new(),
            bound: HashMap::with_hasher(key),
            connected: HashMap::with_hasher(key),
        }
    }

    #[inline]
    pub(crate) fn get(&self, id: UdpId) -> Option<&Socket> {
        let slot = self.slots.get(id.index as usize)?;
        if slot.generation == id.generation { slot.socket.as_ref() } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: UdpId) -> Option<&mut Socket> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation == id.generation { slot.socket.as_mut() } else { None }
    }

    /// The socket at a place that a lookup gave, to look at.
    #[inline(always)]
    pub(crate) fn look_at(&self, index: u32) -> Option<&Socket> {
        self.slots.get(index as usize)?.socket.as_ref()
    }

    /// The socket at a place that a lookup gave.
    #[inline(always)]
    pub(crate) fn at(&mut self, index: u32) -> Option<(UdpId, &mut Socket)> {
        let slot = self.slots.get_mut(index as usize)?;
        let id = UdpId { index, generation: slot.generation };
        slot.socket.as_mut().map(|socket| (id, socket))
    }

    /// The socket that a datagram to one of our addresses is for, or a place
    /// where none is. `local` and
    /// `remote` are address and port as they stand in the headers.
    #[inline(always)]
    pub(crate) fn find_plain_v4(
        &self,
        local: ([u8; 4], [u8; 2]),
        remote: ([u8; 4], [u8; 2]),
    ) -> u32 {
        let only = &self.port(u16::from_be_bytes(local.1)).only_v4;
        if u32::from_ne_bytes(local.0) & only.mask == only.address {
            return only.socket;
        }
        let end = |(ip, port): ([u8; 4], _)| SocketAddr::from((ip, u16::from_be_bytes(port)));
        self.find(end(local), end(remote)).unwrap_or(NO_SOCKET)
    }

    /// As [`UdpTable::find_plain_v4`].
    #[inline(always)]
    pub(crate) fn find_plain_v6(
        &self,
        local: ([u8; 16], [u8; 2]),
        remote: ([u8; 16], [u8; 2]),
    ) -> u32 {
        let only = &self.port(u16::from_be_bytes(local.1)).only_v6;
        if u128::from_ne_bytes(local.0) & only.mask == only.address {
            return only.socket;
        }
        let end = |(ip, port): ([u8; 16], _)| SocketAddr::from((ip, u16::from_be_bytes(port)));
        self.find(end(local), end(remote)).unwrap_or(NO_SOCKET)
    }

    /// The socket that a datagram is for.
    #[inline(never)]
    pub(crate) fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        let port = self.port(local.port());
        if port.bound | port.connected != 0
            && let Some(index) = self.find_exact(port, local, remote)
        {
            return Some(index);
        }
        port.any[usize::from(local.is_ipv6())]
    }

    fn find_exact(&self, port: &Port, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        if port.connected > 0
            && let Some(&index) = self.connected.get(&(local, remote))
        {
            return Some(index);
        }
        self.bound.get(&local).copied()
    }

    /// The sockets that a datagram to a group or broadcast address is for: the
    /// connected one, the one bound to that address, and those bound to the
    /// unspecified address.
    pub(crate) fn find_listeners(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> impl Iterator<Item = u32> + use<> {
        let port = self.port(local.port());
        let exact = self.find_exact(port, local, remote);
        let any = port.any[usize::from(local.is_ipv6())];
        exact.into_iter().chain(any.filter(|&index| Some(index) != exact))
    }

    pub(crate) fn bind(
        &mut self,
        chance: &mut Chance,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpId, SocketError> {
        if self.free.is_empty() && self.slots.len() >= self.limit {
            return Err(SocketError::TooManySockets(self.limit));
        }
        let mut socket = Socket::new(local, options);
        if local.port() == 0 {
            let is_free = |number| self.port_of[place_of(number)] == 0;
            let number =
                ports::choose(chance, is_free).ok_or(SocketError::NoPortFree(local.ip()))?;
            socket.bound.set_port(number);
            socket.local = socket.bound;
        }
        self.check_free(&socket)?;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, socket: None });
            (self.slots.len() - 1) as u32
        });
        self.enter_bound(index, &socket);
        let slot = &mut self.slots[index as usize];
        slot.socket = Some(socket);
        Ok(UdpId { index, generation: slot.generation })
    }

    pub(crate) fn connect(
        &mut self,
        id: UdpId,
        local: IpAddr,
        remote: SocketAddr,
    ) -> Result<(), SocketError> {
        let socket = self.get(id).ok_or(SocketError::Closed)?;
        let local = SocketAddr::new(local, socket.bound.port());
        match self.connected.get(&(local, remote)) {
            Some(&other) if other == id.index => return Ok(()),
            Some(_) => return Err(SocketError::AddressInUse(local)),
            None => {}
        }
        self.leave(id);
        let Some(socket) = self.get_mut(id) else { return Err(SocketError::Closed) };
        (socket.local, socket.remote) = (local, Some(remote));
        // Errors of the former peer say nothing about this one.
        socket.error = None;
        self.connected.insert((local, remote), id.index);
        let port = self.enter_port(local.port());
        port.connected += 1;
        port.find_only();
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
        self.leave(id);
        let Some(slot) = self.slots.get_mut(id.index as usize) else {
            return Err(SocketError::Closed);
        };
        if let Some(mut socket) = slot.socket.take() {
            (socket.local, socket.remote) = (socket.bound, None);
            self.enter_bound(id.index, &socket);
            self.slots[id.index as usize].socket = Some(socket);
        }
        Ok(())
    }

    pub(crate) fn close(&mut self, id: UdpId) -> Option<Socket> {
        self.get(id)?;
        self.leave(id);
        let slot = self.slots.get_mut(id.index as usize)?;
        // A place whose generations are used up is never used again.
        slot.generation = slot.generation.wrapping_add(1);
        if slot.generation != 0 {
            self.free.push(id.index);
        }
        slot.socket.take()
    }

    /// Gives back every frame that waits in a socket's queue.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        for socket in self.slots.iter_mut().filter_map(|slot| slot.socket.as_mut()) {
            socket.release(arena);
        }
    }

    /// The families whose unspecified address a socket stands for.
    fn families(socket: &Socket) -> impl Iterator<Item = usize> + use<> {
        let (v4, v6) = match socket.bound.ip() {
            ANY_V6 => (socket.is_dual(), true),
            ip => (ip == ANY_V4, false),
        };
        [v4, v6].into_iter().enumerate().filter_map(|(family, stands)| stands.then_some(family))
    }

    /// Whether an unconnected socket has the place that this one wants.
    fn unconnected_taken(&self, socket: &Socket) -> Option<SocketAddr> {
        let port = self.port(socket.bound.port());
        let any = Self::families(socket).any(|family| port.any[family].is_some());
        (any || self.bound.contains_key(&socket.bound)).then_some(socket.bound)
    }

    fn check_free(&self, socket: &Socket) -> Result<(), SocketError> {
        let bound = socket.bound;
        let taken = SocketError::AddressInUse(bound);
        if self.unconnected_taken(socket).is_some() {
            return Err(taken);
        }
        let place = self.port_of[place_of(bound.port())];
        if place == 0 {
            return Ok(());
        }
        // The rare case: others are on this port. All must agree to share it,
        // unless their addresses are plainly different.
        let clash = self.slots.iter().filter_map(|slot| slot.socket.as_ref()).any(|other| {
            let agree = other.options.reuse_address && socket.options.reuse_address;
            other.bound.port() == bound.port() && !agree && overlap(socket, other)
        });
        if clash { Err(taken) } else { Ok(()) }
    }

    fn enter_bound(&mut self, index: u32, socket: &Socket) {
        if socket.bound.ip().is_unspecified() {
            let families = Self::families(socket);
            let port = self.enter_port(socket.bound.port());
            families.for_each(|family| port.any[family] = Some(index));
            port.find_only();
        } else {
            self.bound.insert(socket.bound, index);
            let port = self.enter_port(socket.bound.port());
            port.bound += 1;
            port.newest = Some((socket.bound.ip(), index));
            port.find_only();
        }
    }

    /// Takes a socket out of the lookup tables.
    fn leave(&mut self, id: UdpId) {
        let Some(socket) = self.get(id) else { return };
        let (bound, local, remote) = (socket.bound, socket.local, socket.remote);
        let place = self.port_of[place_of(bound.port())];
        let port = &mut self.ports[usize::from(place)];
        if let Some(remote) = remote {
            self.connected.remove(&(local, remote));
            port.connected -= 1;
        } else if bound.ip().is_unspecified() {
            for any in port.any.iter_mut().filter(|any| **any == Some(id.index)) {
                *any = None;
            }
        } else {
            self.bound.remove(&bound);
            port.bound -= 1;
            port.newest = port.newest.filter(|&(_, index)| index != id.index);
        }
        port.find_only();
        if port.bound | port.connected == 0 && port.any == [None, None] {
            self.port_of[place_of(bound.port())] = 0;
            self.free_ports.push(place);
        }
    }

    #[inline(always)]
    fn port(&self, number: u16) -> &Port {
        &self.ports[usize::from(self.port_of[place_of(number)])]
    }

    fn enter_port(&mut self, number: u16) -> &mut Port {
        let place = &mut self.port_of[place_of(number)];
        if *place == 0 {
            // At most 65,535 ports are ever in use: port 0 is never bound.
            *place = self.free_ports.pop().unwrap_or_else(|| {
                self.ports.push(Port::default());
                (self.ports.len() - 1) as u16
            });
        }
        &mut self.ports[usize::from(*place)]
    }
}

fn boxed_zeros<const N: usize>() -> Box<[u16; N]> {
    match vec![0; N].try_into() {
        Ok(zeros) => zeros,
        Err(_) => unreachable!("the length is the same"),
    }
}

/// Whether two sockets on one port could both be meant by a datagram.
fn overlap(a: &Socket, b: &Socket) -> bool {
    let (ip_a, ip_b) = (a.bound.ip(), b.bound.ip());
    let same_family = ip_a.is_ipv4() == ip_b.is_ipv4() || a.is_dual() || b.is_dual();
    ip_a == ip_b || same_family && (ip_a.is_unspecified() || ip_b.is_unspecified())
}
