//! Migration of sockets from one stack to another of the same process, between two polls: no data
//! is lost, no event or packet announces it, and no peer can notice.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use tidegate_memory::Arena;
use tidegate_wire::MacAddr;

use super::error::MigrationError;
use crate::interface::Interface;
use crate::ip::path_mtu::{PathMtu, QuotedKind};
use crate::tcp::{ExtractedTcp, TcpMigrationMap};
use crate::udp::ExtractedUdp;
use crate::{Event, Stack, TcpId, TcpListenerId, TcpSecrets, UdpId};

/// Sockets for [`Stack::extract_sockets`] to extract. Stale handles are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketSelection {
    /// UDP sockets.
    pub udp: Vec<UdpId>,
    /// Listeners, together with the connections in their SYN and accept queues.
    pub listeners: Vec<TcpListenerId>,
    /// Connections, including those whose handle was closed.
    pub connections: Vec<TcpId>,
}

/// Sockets that belong to no stack, for [`Stack::insert_sockets`]. Dropping this value discards the
/// sockets without notice to their peers.
#[must_use = "sockets that are not inserted into a stack are lost"]
pub struct ExtractedSockets {
    /// Secrets of the source stack.
    secrets: TcpSecrets,
    extracted_at_ns: u64,
    udp: ExtractedUdp,
    tcp: ExtractedTcp,
    /// Entries of the source stack for next hops and peers of the sockets.
    neighbours: Vec<(IpAddr, MacAddr)>,
    path_mtus: Vec<(IpAddr, QuotedKind, PathMtu)>,
}

impl fmt::Debug for ExtractedSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TakenSockets").finish_non_exhaustive()
    }
}

/// Handles of migrated sockets: pairs of old and new handle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationMap {
    /// UDP sockets.
    pub udp: Vec<(UdpId, UdpId)>,
    /// Listeners.
    pub listeners: Vec<(TcpListenerId, TcpListenerId)>,
    /// Connections, including those not accepted yet and those whose handle was closed.
    pub connections: Vec<(TcpId, TcpId)>,
}

/// Sockets that [`Stack::insert_sockets`] has rejected, complete and ready to return to the source
/// stack.
#[derive(Debug, thiserror::Error)]
#[error("the sockets were not migrated: {reason}")]
pub struct MigrationRejected {
    /// All sockets of the rejected call.
    pub sockets: ExtractedSockets,
    /// Reason of the rejection.
    pub reason: MigrationError,
}

impl Stack {
    /// Removes sockets from this stack for [`Stack::insert_sockets`]. Nothing is sent, reported or
    /// counted as dropped, and the memory of the sockets is freed.
    ///
    /// The target stack must belong to this process and have the same clock, the same addresses and
    /// the same secrets ([`Stack::set_tcp_secrets`]).
    ///
    /// Connections without a handle (in TIME-WAIT, or with data left to deliver) move with a
    /// listener or connection on their local port, because frames are steered by local port. Queued
    /// events about the sockets are discarded: the target stack reports readiness again.
    ///
    /// Call between two bursts. Transmit the queued frames before the target stack sends, so that
    /// no packet is overtaken. Frames that wait for a neighbour stay here and are sent when the
    /// neighbour answers. The call examines the connections on the local ports of the sockets; all
    /// connections in a stack without [`Stack::set_port_groups`].
    pub fn extract_sockets(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        sockets: &SocketSelection,
    ) -> ExtractedSockets {
        let udp = self.udp.extract_sockets(&sockets.udp, arena);
        let tcp = self.tcp.extract_sockets(&sockets.listeners, &sockets.connections);
        self.interface.counters.held -= udp.queued_datagrams();
        self.interface.counters.migrated_out += udp.queued_datagrams();
        self.interface.events.retain(|event| match *event {
            Event::UdpReadable(id) | Event::UdpError(id) => self.udp.get(id).is_some(),
            _ => true,
        });
        let peers: BTreeSet<_> = udp.remote_addresses().chain(tcp.remote_addresses()).collect();
        let next_hops: BTreeSet<_> =
            peers.iter().filter_map(|&peer| self.interface.next_hop(peer)).collect();
        let mac_of = |ip| Some((ip, self.interface.neighbours.mac(ip)?));
        let known_mtus = &self.interface.path_mtus;
        let mtus_to = |&peer: &IpAddr| {
            [QuotedKind::Segment, QuotedKind::Datagram]
                .into_iter()
                .filter_map(move |kind| Some((peer, kind, known_mtus.get(now_ns, kind, peer)?)))
        };
        let extracted = ExtractedSockets {
            secrets: self.tcp_secrets(),
            extracted_at_ns: now_ns,
            neighbours: next_hops.into_iter().filter_map(mac_of).collect(),
            path_mtus: peers.iter().flat_map(mtus_to).collect(),
            udp,
            tcp,
        };
        // Other connections may have waited for memory.
        self.tcp_flush(now_ns, arena);
        extracted
    }

    /// Inserts sockets that [`Stack::extract_sockets`] removed from another stack. The sockets
    /// continue in the same state, under new handles. Readiness is reported by an [`Event`], even
    /// if it was reported before. Pending packets are in the transmit queue.
    ///
    /// Queued datagrams are in memory of their own and need no frame. Neighbour entries and path
    /// MTUs of the peers that this stack lacks are added. Group memberships belong to the stack and
    /// do not migrate.
    /// `now_ns` counts as no earlier than that of [`Stack::extract_sockets`]. Read the clock again
    /// before the next call; otherwise peers see time go backwards.
    ///
    /// # Errors
    /// When the secrets differ, a limit is reached, an address is missing, or another socket has
    /// the same address and port. This stack is then unchanged, and the error returns all sockets.
    pub fn insert_sockets(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        sockets: ExtractedSockets,
    ) -> Result<MigrationMap, Box<MigrationRejected>> {
        if let Err(reason) = self.check_migration(&sockets) {
            return Err(Box::new(MigrationRejected { sockets, reason }));
        }
        Ok(self.insert_checked(now_ns, arena, sockets))
    }

    /// As [`Stack::insert_sockets`], for sockets of this stack that another one has rejected. New
    /// sockets may have taken their space, so no limit applies: the stack then takes no further
    /// sockets until enough have ended.
    ///
    /// # Errors
    /// When another socket has the same address and port.
    pub fn insert_returned_sockets(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        sockets: ExtractedSockets,
    ) -> Result<MigrationMap, Box<MigrationRejected>> {
        let ExtractedSockets { udp, tcp, .. } = &sockets;
        let checked =
            self.udp.check_addresses_free(udp).and_then(|()| self.tcp.check_addresses_free(tcp));
        match checked {
            Ok(()) => Ok(self.insert_checked(now_ns, arena, sockets)),
            Err(reason) => Err(Box::new(MigrationRejected { sockets, reason })),
        }
    }

    /// Inserts sockets whose addresses are free.
    fn insert_checked(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        sockets: ExtractedSockets,
    ) -> MigrationMap {
        let ExtractedSockets { udp, tcp, neighbours, path_mtus, extracted_at_ns, .. } = sockets;
        // The source core may have read the clock later: peers must not see time go backwards.
        let now_ns = now_ns.max(extracted_at_ns);
        self.merge_neighbours_and_path_mtus(now_ns, arena, &neighbours, &path_mtus);
        self.interface.counters.held += udp.queued_datagrams();
        self.interface.counters.migrated_in += udp.queued_datagrams();
        let udp = self.udp.insert_sockets(udp, &mut self.interface.events);
        let TcpMigrationMap { listeners, connections } = self.tcp.insert_sockets(now_ns, tcp);
        self.tcp_flush(now_ns, arena);
        MigrationMap { udp, listeners, connections }
    }

    fn check_migration(&self, sockets: &ExtractedSockets) -> Result<(), MigrationError> {
        if sockets.secrets != self.tcp_secrets() {
            return Err(MigrationError::SecretsDiffer);
        }
        let ExtractedSockets { udp, tcp, .. } = sockets;
        if let Some(ip) =
            self.find_nonlocal_address(udp.local_addresses().chain(tcp.local_addresses()))
        {
            return Err(MigrationError::AddressNotAvailable(ip));
        }
        self.udp.check_space(udp)?;
        self.udp.check_addresses_free(udp)?;
        self.tcp.check_space(tcp)?;
        self.tcp.check_addresses_free(tcp)
    }

    /// Adds the entries of another stack that this stack lacks.
    fn merge_neighbours_and_path_mtus(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        neighbours: &[(IpAddr, MacAddr)],
        path_mtus: &[(IpAddr, QuotedKind, PathMtu)],
    ) {
        for &(ip, mac) in neighbours {
            if self.interface.neighbours.mac(ip).is_none() {
                let outcome = self.interface.neighbours.learn(now_ns, ip, mac);
                // A learned entry is never rejected.
                let _ = self.interface.apply_claim_outcome(now_ns, arena, ip, outcome);
            }
        }
        for &(peer, kind, migrated) in path_mtus {
            let Interface { path_mtus, rng, mtu, .. } = &mut self.interface;
            if migrated.mtu <= *mtu {
                path_mtus.restore(now_ns, rng, kind, peer, migrated);
                self.interface.paths.invalidate();
            }
        }
    }
}
