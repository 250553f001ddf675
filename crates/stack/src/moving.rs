//! Sockets that move from one stack to another of the same process, between two
//! polls: nothing is lost, nothing is told, no peer can notice.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Arena;
use tidegate_wire::MacAddr;

use crate::path_mtu::PathMtu;
use crate::tcp::{MovedTcp, TakenTcp};
use crate::udp::TakenUdp;
use crate::{Event, Stack, TcpId, TcpListenerId, TcpSecrets, UdpId};

/// The sockets that [`Stack::take_out`] takes. Names of what is gone are passed
/// over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MovingSockets {
    /// UDP sockets.
    pub udp: Vec<UdpId>,
    /// Listeners. Connections in their SYN queues and accept queues come with
    /// them.
    pub listeners: Vec<TcpListenerId>,
    /// Connections, also those whose handle was closed.
    pub connections: Vec<TcpId>,
}

/// Sockets in no stack, for [`Stack::put_in`]. When it is dropped, they are gone
/// without a word to their peers.
#[must_use = "sockets that no stack has are lost"]
pub struct TakenSockets {
    /// Of the stack that they were in.
    secrets: TcpSecrets,
    taken_at_ns: u64,
    udp: TakenUdp,
    tcp: TakenTcp,
    /// What that stack knew of the ways to their peers.
    neighbours: Vec<(IpAddr, MacAddr)>,
    path_mtus: Vec<(IpAddr, PathMtu)>,
}

impl fmt::Debug for TakenSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TakenSockets").finish_non_exhaustive()
    }
}

/// What became of sockets that have moved: each one's old name and the new one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// UDP sockets.
    pub udp: Vec<(UdpId, UdpId)>,
    /// Listeners.
    pub listeners: Vec<(TcpListenerId, TcpListenerId)>,
    /// Connections, also those that wait to be accepted and those whose handle
    /// was closed.
    pub connections: Vec<(TcpId, TcpId)>,
}

/// Why sockets cannot move to a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// Peers would see other numbers, and cookies would not be accepted.
    #[error("the stacks have different secrets: let both have those of one")]
    Secrets,
    /// Another socket has the address and port, or a connection the same ends.
    #[error("{0} is in use in the other stack: close the socket that has it")]
    AddressInUse(SocketAddr),
    /// The other stack's interface lacks an address.
    #[error("{0} is not an address of the other stack: give both the same addresses")]
    AddressNotAvailable(IpAddr),
    /// The limits of the other stack allow no more.
    #[error("the other stack has no room for more {0}: raise its limits")]
    TooMany(&'static str),
}

/// Sockets that [`Stack::put_in`] has refused: all of them, for the stack that
/// they came from.
#[derive(Debug, thiserror::Error)]
#[error("the sockets were not moved: {reason}")]
pub struct NotMoved {
    /// All that was to be put in.
    pub sockets: TakenSockets,
    /// What is in the way.
    pub reason: MoveError,
}

impl Stack {
    /// Takes sockets out of this stack, as if they had never been there: nothing
    /// is sent, told or counted as dropped, and their memory comes back. To be
    /// put into another stack of this process, which has the same clock, the
    /// same addresses and the same secrets ([`Stack::share_tcp_secrets`]).
    ///
    /// Connections without a handle (in TIME-WAIT, or with something left to
    /// bring over) go with a listener or connection of their local port, since
    /// frames are steered by it. Events that wait to be taken and are about what
    /// moves are dropped: the other stack tells anew what is ready.
    ///
    /// Call it between two bursts, and send what is in the transmit queue before
    /// the other stack sends, so that nothing is overtaken. Frames that wait for
    /// a neighbour stay, and go out when it answers. It looks at every
    /// connection of this stack.
    pub fn take_out(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        sockets: &MovingSockets,
    ) -> TakenSockets {
        let udp = self.udp.take_out(&sockets.udp, arena);
        let tcp = self.tcp.take_out(&sockets.listeners, &sockets.connections);
        self.counters.held -= udp.held();
        self.counters.moved_out += udp.held();
        self.events.retain(|event| match *event {
            Event::Readable(id) | Event::Error(id) => self.udp.get(id).is_some(),
            _ => true,
        });
        let peers: BTreeSet<_> = udp.remote_addresses().chain(tcp.remote_addresses()).collect();
        let next_hops: BTreeSet<_> = peers.iter().filter_map(|&peer| self.next_hop(peer)).collect();
        let mac_of = |ip| Some((ip, self.neighbours.mac(ip)?));
        let mtu_to = |peer| Some((peer, self.path_mtus.get(now_ns, peer)?));
        let taken = TakenSockets {
            secrets: self.tcp_secrets(),
            taken_at_ns: now_ns,
            neighbours: next_hops.into_iter().filter_map(mac_of).collect(),
            path_mtus: peers.into_iter().filter_map(mtu_to).collect(),
            udp,
            tcp,
        };
        // Others may have waited for memory.
        self.tcp_flush(now_ns, arena);
        taken
    }

    /// Puts sockets into this stack that [`Stack::take_out`] took out of another
    /// one. They go on where they were, under new names. Whatever is ready is
    /// told by an [`Event`], told before or not, and what is to be sent is in
    /// the transmit queue.
    ///
    /// Datagrams that waited lie in memory of their own, and need no frame.
    /// What this stack does not know of the neighbours and path MTUs of their
    /// peers comes with them. Group memberships are the stack's, and do not.
    /// `now_ns` counts as no earlier than that of [`Stack::take_out`]; look at the
    /// clock again before the next call, or the peers see it go back.
    ///
    /// # Errors
    /// When the stacks have different secrets, or this one has no room, lacks an
    /// address, or has another socket where one of them was. Nothing has changed
    /// then, and all sockets are given back.
    pub fn put_in(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        sockets: TakenSockets,
    ) -> Result<Moved, Box<NotMoved>> {
        if let Err(reason) = self.check_moving(&sockets) {
            return Err(Box::new(NotMoved { sockets, reason }));
        }
        let TakenSockets { udp, tcp, neighbours, path_mtus, taken_at_ns, .. } = sockets;
        // Another core may have looked at the clock before: to peers time does
        // not go back.
        let now_ns = now_ns.max(taken_at_ns);
        self.learn_ways(now_ns, arena, &neighbours, &path_mtus);
        self.counters.held += udp.held();
        self.counters.moved_in += udp.held();
        let udp = self.udp.put_in(udp, &mut self.events);
        let MovedTcp { listeners, connections } = self.tcp.put_in(now_ns, tcp);
        self.tcp_flush(now_ns, arena);
        Ok(Moved { udp, listeners, connections })
    }

    fn check_moving(&self, sockets: &TakenSockets) -> Result<(), MoveError> {
        if sockets.secrets != self.tcp_secrets() {
            return Err(MoveError::Secrets);
        }
        let TakenSockets { udp, tcp, .. } = sockets;
        if let Some(ip) = self.foreign(udp.local_addresses().chain(tcp.local_addresses())) {
            return Err(MoveError::AddressNotAvailable(ip));
        }
        self.udp.check(udp)?;
        self.tcp.check(tcp)
    }

    /// Takes from another stack what this one does not know.
    fn learn_ways(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        neighbours: &[(IpAddr, MacAddr)],
        path_mtus: &[(IpAddr, PathMtu)],
    ) {
        for &(ip, mac) in neighbours {
            if self.neighbours.mac(ip).is_none() {
                let heard = self.neighbours.heard(now_ns, ip, mac);
                // It is no claim: nothing is wrong with it.
                let _ = self.neighbour_claimed(now_ns, arena, ip, heard);
            }
        }
        for &(peer, told) in path_mtus {
            let known = self.path_mtus.get(now_ns, peer);
            if told.mtu <= self.mtu && known.is_none_or(|known| told.mtu < known.mtu) {
                self.path_mtus.take_up(now_ns, peer, told);
                self.paths.forget();
            }
        }
    }
}
