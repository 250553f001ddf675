//! Which socket a datagram is for.
//!
//! The destination port leads to a [`Port`] without any search: a table of
//! 65,536 places. Most ports have one socket, and that is the end of it. Only
//! a port that has connected sockets, or several bound to one address each,
//! costs a hash lookup for each kind. Sockets that share one address and port
//! are a group: who was bound last and who sent a datagram say which of them it is
//! for.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::ops::Not;

use crate::chance::HashKey;

/// The sockets at one address and port: several if they agreed to share it. Those
/// bound last are last.
pub(super) type Group = Vec<Member>;

/// A socket of a group.
#[derive(Clone, Copy)]
pub(super) struct Member {
    pub(super) index: u32,
    /// It shares what comes with all others that do. Else it takes everything when it
    /// is the last.
    pub(super) shares: bool,
}

/// The sockets on one port.
#[derive(Default)]
pub(super) struct Port {
    /// Bound to the unspecified address: by family, IPv4 first.
    pub(super) any: [Group; 2],
    /// How many are bound to one address.
    pub(super) bound: u32,
    /// How many are connected.
    pub(super) connected: u32,
    /// The socket bound to one address last, and that address, if it shares it
    /// with none: where there is just one, no search is needed.
    pub(super) newest: Option<(IpAddr, u32)>,
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
    pub(super) fn find_only(&mut self) {
        let any = |family: usize| match *self.any[family] {
            [only] if self.bound == 0 => Some(only.index),
            _ => None,
        };
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
const NO_SOCKET: u32 = u32::MAX;

/// Where a port number stands in the table: it is taken as it stands in headers.
#[inline(always)]
pub(super) fn place_of(number: u16) -> usize {
    usize::from(number.to_be())
}

/// Local and remote end of a connected socket.
pub(super) type Pair = (SocketAddr, SocketAddr);

/// Which socket is at which address and port.
pub(crate) struct Lookup {
    /// For every port number, which of `ports` it is; 0 is none.
    pub(super) port_of: Box<[u16; 1 << 16]>,
    pub(super) ports: Vec<Port>,
    pub(super) bound: HashMap<SocketAddr, Group, HashKey>,
    pub(super) connected: HashMap<Pair, Member, HashKey>,
}

impl Lookup {
    pub(super) fn new(key: HashKey) -> Self {
        Self {
            port_of: boxed_zeros(),
            // Place 0 stands for no sockets, so that a lookup needs no branch.
            ports: vec![Port::default()],
            bound: HashMap::with_hasher(key),
            connected: HashMap::with_hasher(key),
        }
    }

    /// The socket that a datagram to one of our addresses is for, or a place
    /// where none is. `local` and `remote` are address and port as they stand
    /// in the headers.
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

    /// As [`Lookup::find_plain_v4`].
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
        let group = match self.find_exact(port, local, remote) {
            [] => &port.any[usize::from(local.is_ipv6())],
            exact => exact,
        };
        self.choose(group, local, remote)
    }

    /// The connected socket, or those bound to the very address.
    fn find_exact(&self, port: &Port, local: SocketAddr, remote: SocketAddr) -> &[Member] {
        if port.connected > 0
            && let Some(connected) = self.connected.get(&(local, remote))
        {
            return std::slice::from_ref(connected);
        }
        match port.bound {
            0 => &[],
            _ => self.bound.get(&local).map_or(&[], Vec::as_slice),
        }
    }

    /// Which of a group has the flow between two ends: the one bound last, or if that
    /// shares, the one of those that do with the highest hash of the flow and itself.
    /// So a flow stays where it is, whoever else joins or leaves, unless it falls to
    /// the one that joins.
    fn choose(&self, group: &[Member], local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        let last = group.last()?;
        if group.len() == 1 || !last.shares {
            return Some(last.index);
        }
        let key = self.bound.hasher();
        let flow = key.hash_one((local, remote));
        let sharing = group.iter().filter(|member| member.shares).map(|member| member.index);
        sharing.max_by_key(|&index| key.hash_one((flow, index)))
    }

    /// One after the other, the sockets that a datagram to a group or broadcast
    /// address is for: the connected one or those bound to that address, and those
    /// bound to the unspecified address.
    pub(crate) fn nth_listener(
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
    pub(super) fn port(&self, number: u16) -> &Port {
        &self.ports[usize::from(self.port_of[place_of(number)])]
    }
}

fn boxed_zeros<const N: usize>() -> Box<[u16; N]> {
    match vec![0; N].try_into() {
        Ok(zeros) => zeros,
        Err(_) => unreachable!("the length is the same"),
    }
}
