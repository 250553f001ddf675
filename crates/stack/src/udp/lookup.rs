//! Lookup of the socket for a datagram.
//!
//! A table of 65,536 entries maps the destination port to a [`PortEntry`] without a search. Most
//! ports have one socket, and the lookup ends there. Two cases cost a hash lookup each: connected
//! sockets on the port, and several sockets bound to specific addresses. Sockets that share one
//! address and port form a group. The bind order and the flow select the member that receives a
//! datagram.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::ops::Not;

use super::bind_terms::PortTerms;
use crate::random::HashKey;

/// Sockets bound to one address and port, in bind order. There are several if all agreed to share
/// the address.
pub(super) type BoundGroup = Vec<Member>;

/// Member of a group.
#[derive(Clone, Copy)]
pub(super) struct Member {
    pub(super) index: u32,
    /// Shares datagrams with all other members that have this flag. Without the flag, the last
    /// member receives every datagram.
    pub(super) reuse_port: bool,
}

/// Sockets on one port.
#[derive(Default)]
pub(super) struct PortEntry {
    /// Sockets bound to the unspecified address, by family: IPv4, then IPv6.
    pub(super) any: [BoundGroup; 2],
    /// Terms of all sockets on the port.
    pub(super) terms: PortTerms,
    /// Number of sockets bound to a specific address.
    pub(super) bound_count: u32,
    /// Number of connected sockets.
    pub(super) connected_count: u32,
    /// Address and index of the socket that was bound to a specific address last, unless it
    /// shares the address. If it is the only socket, no search is needed.
    pub(super) newest_bound: Option<(IpAddr, u32)>,
    /// Precomputed lookup result for most ports, by family.
    sole_v4: SoleSocket<u32>,
    sole_v6: SoleSocket<u128>,
}

/// Socket that receives every datagram whose local address under `mask` equals `address`: the
/// lookup needs no search. Addresses are in header byte order.
struct SoleSocket<A> {
    mask: A,
    address: A,
    socket: u32,
}

impl<A: Default + From<u8> + Not<Output = A>> SoleSocket<A> {
    /// No socket: an address under an empty mask never equals 1.
    fn none() -> Self {
        Self { mask: A::default(), address: A::from(1), socket: 0 }
    }

    /// `socket` receives datagrams to every address.
    fn any(socket: u32) -> Self {
        Self { mask: A::default(), address: A::default(), socket }
    }

    /// `socket` receives datagrams to one address.
    fn exact(address: A, socket: u32) -> Self {
        Self { mask: !A::default(), address, socket }
    }
}

impl<A: Default + From<u8> + Not<Output = A>> Default for SoleSocket<A> {
    fn default() -> Self {
        Self::none()
    }
}

impl PortEntry {
    /// Recomputes the sole sockets after a change.
    pub(super) fn update_sole(&mut self) {
        let any = |family: usize| match *self.any[family] {
            [only] if self.bound_count == 0 => Some(only.index),
            _ => None,
        };
        (self.sole_v4, self.sole_v6) = match self.newest_bound {
            _ if self.connected_count != 0 => (SoleSocket::none(), SoleSocket::none()),
            Some((IpAddr::V4(address), socket)) => (
                SoleSocket::exact(u32::from_ne_bytes(address.octets()), socket),
                SoleSocket::none(),
            ),
            Some((IpAddr::V6(address), socket)) => (
                SoleSocket::none(),
                SoleSocket::exact(u128::from_ne_bytes(address.octets()), socket),
            ),
            None => (
                any(0).map_or_else(SoleSocket::none, SoleSocket::any),
                any(1).map_or_else(SoleSocket::none, SoleSocket::any),
            ),
        };
    }
}

/// Slot index of no socket; the table cannot have so many slots.
const NO_SOCKET: u32 = u32::MAX;

/// Index of a port number in the table: the number in header byte order.
#[inline(always)]
pub(super) fn port_index(number: u16) -> usize {
    usize::from(number.to_be())
}

/// Local and remote address of a connected socket.
pub(super) type AddressPair = (SocketAddr, SocketAddr);

/// Map from addresses and ports to sockets.
pub(crate) struct Lookup {
    /// Index in `entries` for every port number; 0 means no sockets.
    pub(super) entry_of_port: Box<[u16; 1 << 16]>,
    pub(super) entries: Vec<PortEntry>,
    pub(super) bound: HashMap<SocketAddr, BoundGroup, HashKey>,
    pub(super) connected: HashMap<AddressPair, Member, HashKey>,
}

impl Lookup {
    pub(super) fn new(key: HashKey) -> Self {
        Self {
            entry_of_port: boxed_zeros(),
            // Entry 0 has no sockets, so that a lookup needs no branch.
            entries: vec![PortEntry::default()],
            bound: HashMap::with_hasher(key),
            connected: HashMap::with_hasher(key),
        }
    }

    /// Slot index of the socket for a datagram to a local address, or an index without a socket.
    /// `local` and `remote` are address and port in header byte order.
    #[inline(always)]
    pub(crate) fn find_plain_v4(
        &self,
        local: ([u8; 4], [u8; 2]),
        remote: ([u8; 4], [u8; 2]),
    ) -> u32 {
        let sole = &self.port(u16::from_be_bytes(local.1)).sole_v4;
        if u32::from_ne_bytes(local.0) & sole.mask == sole.address {
            return sole.socket;
        }
        let socket_addr =
            |(ip, port): ([u8; 4], _)| SocketAddr::from((ip, u16::from_be_bytes(port)));
        self.find(socket_addr(local), socket_addr(remote)).unwrap_or(NO_SOCKET)
    }

    /// As [`Lookup::find_plain_v4`], for IPv6.
    #[inline(always)]
    pub(crate) fn find_plain_v6(
        &self,
        local: ([u8; 16], [u8; 2]),
        remote: ([u8; 16], [u8; 2]),
    ) -> u32 {
        let sole = &self.port(u16::from_be_bytes(local.1)).sole_v6;
        if u128::from_ne_bytes(local.0) & sole.mask == sole.address {
            return sole.socket;
        }
        let socket_addr =
            |(ip, port): ([u8; 16], _)| SocketAddr::from((ip, u16::from_be_bytes(port)));
        self.find(socket_addr(local), socket_addr(remote)).unwrap_or(NO_SOCKET)
    }

    /// True if a socket is bound to this port, whatever its address.
    pub(crate) fn has_port(&self, number: u16) -> bool {
        self.entry_of_port[port_index(number)] != 0
    }

    /// Slot index of the socket for a datagram.
    #[inline(never)]
    pub(crate) fn find(&self, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        let port = self.port(local.port());
        let group = match self.find_exact(port, local, remote) {
            [] => &port.any[usize::from(local.is_ipv6())],
            exact => exact,
        };
        self.choose_member(group, local, remote)
    }

    /// Returns the connected socket, or the sockets bound to exactly this address.
    fn find_exact(&self, port: &PortEntry, local: SocketAddr, remote: SocketAddr) -> &[Member] {
        if port.connected_count > 0
            && let Some(connected) = self.connected.get(&(local, remote))
        {
            return std::slice::from_ref(connected);
        }
        match port.bound_count {
            0 => &[],
            _ => self.bound.get(&local).map_or(&[], Vec::as_slice),
        }
    }

    /// Selects the group member for a flow. The last member receives the flow unless it shares;
    /// otherwise the sharing member with the highest hash of flow and index does. So a flow keeps
    /// its socket when members join or leave, unless it falls to a joining member.
    fn choose_member(
        &self,
        group: &[Member],
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<u32> {
        let last = group.last()?;
        if group.len() == 1 || !last.reuse_port {
            return Some(last.index);
        }
        let key = self.bound.hasher();
        let flow = key.hash_one((local, remote));
        let sharing = group.iter().filter(|member| member.reuse_port).map(|member| member.index);
        sharing.max_by_key(|&index| key.hash_one((flow, index)))
    }

    /// Slot index of the `n`th socket for a datagram to a multicast group or broadcast address.
    /// First come the connected socket or the sockets bound to that address, then the sockets
    /// bound to the unspecified address.
    pub(crate) fn nth_group_socket(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        n: usize,
    ) -> Option<u32> {
        let port = self.port(local.port());
        let exact = self.find_exact(port, local, remote);
        let any = &port.any[usize::from(local.is_ipv6())];
        exact.iter().chain(any).nth(n).map(|member| member.index)
    }

    #[inline(always)]
    pub(super) fn port(&self, number: u16) -> &PortEntry {
        &self.entries[usize::from(self.entry_of_port[port_index(number)])]
    }
}

fn boxed_zeros<const N: usize>() -> Box<[u16; N]> {
    match vec![0; N].try_into() {
        Ok(zeros) => zeros,
        Err(_) => unreachable!("the length is the same"),
    }
}
