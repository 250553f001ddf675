//! Flow steering table: the core of each local port, and of each flow of ports that cores share.
//!
//! Every core writes to the table, and cores with a queue read it for each frame, without a lock: a
//! core that is preempted while it writes must not stop the device. One atomic word holds the core
//! of a port. For a port of several cores, the distribution of its flows is a value that is
//! replaced as a whole ([`SharedPort`]), and flows with a socket are in the [`FlowTable`]. Cores that
//! change the claims of ports take a lock for each part of the ports.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;

use super::LocalPort;
use super::claimed_port::{Arrival, ClaimedPort, PortSharing, SharedPort};
use super::flow::Flow;
use super::flow_table::FlowTable;
use crate::steering::TransportProtocol;

/// Number of entries: one for each port number of both protocols.
const ENTRIES: usize = 2 << 16;

/// Entries whose distributions are allocated together.
const CHUNK_ENTRIES: usize = 256;

/// Parts of the claims with a lock each.
const CLAIM_SHARDS: usize = 64;

/// Attempts to read the distribution of a port that alternates between one core and several.
const MAX_READS: usize = 4;

// Fields of an entry: the core in the low bits, then flags for a port that is claimed, parked
// between two cores, shared by several, or claimed without sharing.
const CORE: u16 = 0xff;
const CLAIMED: u16 = 0x100;
const PARKED: u16 = 0x200;
const SHARED: u16 = 0x400;
const EXCLUSIVE: u16 = 0x800;

/// Destination of the frames for a local port or flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SteeringTarget {
    /// This core; the primary core for ports without a claim.
    Core(usize),
    /// Migrating between cores: frames wait.
    Parked,
    /// Several cores: each flow belongs to one of them.
    Shared,
    /// All of these cores, one bit each.
    Cores(u64),
}

type Chunk = Box<[ArcSwapOption<SharedPort>]>;

/// Steering table of all local ports.
pub(super) struct SteeringTable {
    entries: Box<[AtomicU16]>,
    /// Distributions of the flows of shared ports, in chunks of entries.
    shared: Box<[OnceLock<Chunk>]>,
    flows: FlowTable,
    /// Keyed hash of peers. They choose their addresses, so the key is secret.
    peer_hasher: RandomState,
    /// Claims, for the cores that change them. The lock is also held to write the entries.
    claims: Box<[Mutex<HashMap<LocalPort, ClaimedPort>>]>,
}

/// Steering table as a core with a queue reads it during one burst.
pub(super) struct SteeringView<'d> {
    steering: &'d SteeringTable,
    active_cores: u64,
    arrival: Arrival,
}

impl SteeringView<'_> {
    /// Target of frames for a port.
    pub(super) fn target(&self, port: LocalPort) -> SteeringTarget {
        match self.steering.entry(port).load(Ordering::SeqCst) {
            entry if entry & SHARED != 0 => SteeringTarget::Shared,
            entry if entry & PARKED != 0 => SteeringTarget::Parked,
            entry => SteeringTarget::Core(usize::from(entry & CORE)),
        }
    }

    /// Target by the distribution of a shared port, or by its entry if it is shared no more.
    fn shared_target(
        &self,
        port: LocalPort,
        target: impl Fn(&SharedPort) -> SteeringTarget,
    ) -> SteeringTarget {
        for _ in 0..MAX_READS {
            match self.target(port) {
                SteeringTarget::Shared => {
                    let shared = self.steering.shared_slot(port).map(ArcSwapOption::load);
                    if let Some(shared) = shared.as_deref().and_then(Option::as_deref) {
                        return target(shared);
                    }
                }
                target => return target,
            }
        }
        SteeringTarget::Core(0)
    }

    /// Target of a flow of a shared port.
    pub(super) fn flow_target(&self, flow: &Flow) -> SteeringTarget {
        let SteeringTable { flows, peer_hasher, .. } = self.steering;
        self.shared_target(flow.local_port(), |port| {
            // Read after the port: a flow changes its core before its migration is complete.
            if let Some(core) = flows.core(flow) {
                let is_migrating = port.migrating & 1 << core != 0;
                return match is_migrating {
                    true => SteeringTarget::Parked,
                    false => SteeringTarget::Core(core),
                };
            }
            if port.migrating != 0 {
                // The core that would get the flow now may change with the migration.
                return SteeringTarget::Parked;
            }
            let hash = || peer_hasher.hash_one(flow.remote());
            let core = port.core(flow.local().ip(), self.arrival, hash);
            // Unclaimed: delivered to any member core, which answers with ICMP or RST.
            SteeringTarget::Core(core.unwrap_or(port.cores.trailing_zeros() as usize))
        })
    }

    /// Target of frames for all sockets on a shared port: all its cores.
    pub(super) fn group_target(&self, port: LocalPort) -> SteeringTarget {
        self.shared_target(port, |port| match port.migrating {
            0 => SteeringTarget::Cores(port.cores),
            _ => SteeringTarget::Parked,
        })
    }

    /// Active cores, one bit each.
    pub(super) fn active_cores(&self) -> u64 {
        self.active_cores
    }
}

/// Overlap of UDP addresses. As in a stack, a datagram goes to the sockets of one owner only.
fn udp_addresses_overlap(one: IpAddr, other: IpAddr) -> bool {
    let any = one.is_unspecified() || other.is_unspecified();
    one == other || any && one.is_ipv4() == other.is_ipv4()
}

/// Index of the entry of a port.
fn index_of((protocol, port): LocalPort) -> usize {
    let half = match protocol {
        TransportProtocol::Udp => 0,
        TransportProtocol::Tcp => ENTRIES / 2,
    };
    half + usize::from(port)
}

impl SteeringTable {
    pub(super) fn new() -> Self {
        Self {
            entries: (0..ENTRIES).map(|_| AtomicU16::new(0)).collect(),
            shared: (0..ENTRIES / CHUNK_ENTRIES).map(|_| OnceLock::new()).collect(),
            flows: FlowTable::new(),
            peer_hasher: RandomState::new(),
            claims: (0..CLAIM_SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    /// View for the frames of one burst, with the active cores.
    pub(super) fn view(&self, active_cores: u64, arrival: Arrival) -> SteeringView<'_> {
        SteeringView { steering: self, active_cores, arrival }
    }

    fn lock(&self, port: LocalPort) -> MutexGuard<'_, HashMap<LocalPort, ClaimedPort>> {
        let shard = &self.claims[index_of(port) % CLAIM_SHARDS];
        // A panic cannot leave a half-made change.
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, port: LocalPort) -> &AtomicU16 {
        &self.entries[index_of(port)]
    }

    /// Slot for the distribution of a port; `None` if no port near it was ever shared.
    fn shared_slot(&self, port: LocalPort) -> Option<&ArcSwapOption<SharedPort>> {
        let index = index_of(port);
        Some(&self.shared[index / CHUNK_ENTRIES].get()?[index % CHUNK_ENTRIES])
    }

    /// Changes the claims of a port and publishes its state.
    fn update<T>(&self, local: LocalPort, change: impl FnOnce(&mut ClaimedPort) -> T) -> T {
        let mut claims = self.lock(local);
        let mut port = match claims.entry(local) {
            Entry::Occupied(known) => known,
            Entry::Vacant(new) => new.insert_entry(ClaimedPort::default()),
        };
        let changed = change(port.get_mut());
        let claimed = match port.get().can_be_shared() {
            true => CLAIMED,
            false => CLAIMED | EXCLUSIVE,
        };
        let entry = match port.get().by_core() {
            [] => 0,
            [only] if port.get().is_any_migrating() => claimed | PARKED | only.core as u16,
            [only] => claimed | only.core as u16,
            _ => claimed | SHARED,
        };
        self.publish(local, entry, port.get());
        if port.get().is_unused() {
            port.remove();
        }
        changed
    }

    /// Publishes the entry of a port. A reader that finds it shared finds its distribution.
    fn publish(&self, local: LocalPort, entry: u16, port: &ClaimedPort) {
        if entry & SHARED == 0 {
            let before = self.entry(local).swap(entry, Ordering::SeqCst);
            if let Some(slot) = self.shared_slot(local).filter(|_| before & SHARED != 0) {
                slot.store(None);
            }
            return;
        }
        let index = index_of(local);
        let new_chunk = || (0..CHUNK_ENTRIES).map(|_| ArcSwapOption::empty()).collect();
        let chunk: &Chunk = self.shared[index / CHUNK_ENTRIES].get_or_init(new_chunk);
        chunk[index % CHUNK_ENTRIES].store(Some(Arc::new(port.snapshot())));
        self.entry(local).store(entry, Ordering::SeqCst);
    }

    /// Adds a claim of a core on a port. Returns false when the port cannot be claimed.
    pub(super) fn claim(&self, port: LocalPort, core: usize, sharing: PortSharing) -> bool {
        let overlap = match port.0 {
            TransportProtocol::Udp => udp_addresses_overlap,
            TransportProtocol::Tcp => |one, other| one == other,
        };
        self.update(port, |port| port.claim(core, sharing, overlap))
    }

    /// Removes one claim. Without claims the port is free.
    pub(super) fn release(&self, port: LocalPort, core: usize, sharing: PortSharing) {
        self.update(port, |port| port.release(core, sharing));
    }

    /// Returns true when a core may claim a port with this sharing mode.
    pub(super) fn can_claim(&self, port: LocalPort, core: usize, sharing: PortSharing) -> bool {
        self.lock(port).get(&port).is_none_or(|port| port.can_claim(core, sharing))
    }

    /// Returns true when a core other than `core` has claimed the port, or will have: the claims are
    /// migrating.
    pub(super) fn is_claimed_elsewhere(&self, port: LocalPort, core: usize) -> bool {
        let entry = self.entry(port).load(Ordering::Relaxed);
        entry & CLAIMED != 0
            && (entry & (SHARED | PARKED) != 0 || usize::from(entry & CORE) != core)
    }

    /// Returns true when several cores may claim the port.
    pub(super) fn can_be_shared(&self, port: LocalPort) -> bool {
        self.entry(port).load(Ordering::SeqCst) & (CLAIMED | EXCLUSIVE) == CLAIMED
    }

    /// Cores that have claimed the port, one bit each; `None` while claims are migrating.
    pub(super) fn holders(&self, port: LocalPort) -> Option<u64> {
        match self.entry(port).load(Ordering::SeqCst) {
            entry if entry & CLAIMED == 0 => Some(0),
            entry if entry & SHARED != 0 => {
                let shared = self.shared_slot(port)?.load();
                shared.as_deref().filter(|port| port.migrating == 0).map(|port| port.cores)
            }
            entry if entry & PARKED != 0 => None,
            entry => Some(1 << (entry & CORE)),
        }
    }

    /// Returns true when the core or no core has claimed the port, and no part of the port is
    /// migrating.
    pub(super) fn is_held_by(&self, port: LocalPort, core: usize) -> bool {
        let claims = self.lock(port);
        let Some(port) = claims.get(&port).filter(|port| !port.is_unclaimed()) else {
            return true;
        };
        !port.is_any_migrating() && port.by_core().iter().any(|part| part.core == core)
    }

    /// Parks a core's share of a port: its frames wait from now on.
    pub(super) fn park(&self, port: LocalPort, core: usize) {
        self.update(port, |port| port.park(core));
    }

    /// Hands `claims` parked claims of a port to another core.
    pub(super) fn hand_over(&self, port: LocalPort, from: usize, to: usize, claims: u32) {
        self.update(port, |port| port.hand_over(from, to, claims));
    }

    /// Adds a socket on a core to the group of this address and port.
    pub(super) fn join(&self, port: LocalPort, address: IpAddr, owner: u64, core: usize) {
        self.update(port, |port| port.join(core, address, owner));
    }

    /// Removes such a socket from its group.
    pub(super) fn leave(&self, port: LocalPort, address: IpAddr, owner: u64, core: usize) {
        self.update(port, |port| port.leave(core, address, owner));
    }

    /// Registers a flow for a core. Returns false when a core already has the flow, also while the
    /// flow's socket is migrating.
    pub(super) fn begin_flow(&self, flow: Flow, core: usize) -> bool {
        self.flows.begin(&flow, core)
    }

    /// Moves a flow to this core.
    pub(super) fn take_over_flow(&self, flow: Flow, core: usize) {
        self.flows.take_over(&flow, core);
    }

    /// Removes a flow of this core.
    pub(super) fn end_flow(&self, flow: Flow, core: usize) {
        self.flows.end(&flow, core);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: LocalPort = (TransportProtocol::Tcp, 80);
    const DNS: LocalPort = (TransportProtocol::Udp, 53);
    const EXCLUSIVE: PortSharing = PortSharing::Exclusive;
    const REUSE_PORT: PortSharing = PortSharing::ReusePort { owner: 7 };
    const PRIMARY: usize = 0;

    /// View of the primary core, which alone has a queue.
    fn view(table: &SteeringTable) -> SteeringView<'_> {
        table.view(0, Arrival { core: PRIMARY, queue_cores: 1 })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A flow from one of many peer ports.
    fn flow(local: LocalPort, own: &str, peer: u16) -> Flow {
        let remote = (if own.contains(':') { ip("fd00::9") } else { ip("192.0.2.9") }, peer);
        Flow::new(local.0, (ip(own), local.1).into(), remote.into())
    }

    /// Core of each of a thousand flows.
    fn cores_of_flows(table: &SteeringTable, local: LocalPort, own: &str) -> Vec<usize> {
        let view = view(table);
        let core_of = |peer| {
            let target = match view.target(local) {
                SteeringTarget::Shared => view.flow_target(&flow(local, own, peer)),
                target => target,
            };
            let SteeringTarget::Core(core) = target else { panic!("{target:?}") };
            core
        };
        (1..=1000).map(core_of).collect()
    }

    fn count(cores: &[usize], core: usize) -> usize {
        cores.iter().filter(|&&found| found == core).count()
    }

    #[test]
    fn port_stays_with_its_core_until_the_last_claim_is_released() {
        let table = SteeringTable::new();
        let target = || view(&table).target(WEB);
        assert_eq!(target(), SteeringTarget::Core(PRIMARY));
        assert!(table.claim(WEB, 2, EXCLUSIVE) && table.claim(WEB, 2, EXCLUSIVE));
        assert!(!table.claim(WEB, 0, EXCLUSIVE), "not even by the primary core");
        assert!(!table.claim(WEB, 0, REUSE_PORT));
        assert!(
            table.claim((TransportProtocol::Udp, 80), 1, EXCLUSIVE),
            "ports of another protocol are independent"
        );
        assert!(table.is_claimed_elsewhere(WEB, 0) && !table.is_claimed_elsewhere(WEB, 2));
        table.release(WEB, 1, EXCLUSIVE);
        table.release(WEB, 2, EXCLUSIVE);
        assert_eq!(target(), SteeringTarget::Core(2));
        table.release(WEB, 2, EXCLUSIVE);
        assert_eq!(target(), SteeringTarget::Core(PRIMARY));
        assert!(table.claim(WEB, 1, EXCLUSIVE));
    }

    #[test]
    fn port_migrates_with_its_claims() {
        let table = SteeringTable::new();
        assert!(table.claim(DNS, 0, EXCLUSIVE) && table.claim(DNS, 0, REUSE_PORT));
        table.park(DNS, 0);
        assert_eq!(view(&table).target(DNS), SteeringTarget::Parked);
        assert!(!table.is_held_by(DNS, 0));
        assert!(!table.claim(DNS, 0, EXCLUSIVE), "its sockets are migrating");
        table.hand_over(DNS, 0, 3, 1);
        assert_eq!(
            view(&table).target(DNS),
            SteeringTarget::Core(3),
            "not shareable: all claims migrate"
        );
        table.release(DNS, 3, EXCLUSIVE);
        assert_eq!(view(&table).target(DNS), SteeringTarget::Core(3));
        assert!(!table.claim(DNS, 0, EXCLUSIVE));
        table.release(DNS, 3, REUSE_PORT);
        assert!(table.claim(DNS, 0, EXCLUSIVE));
    }

    #[test]
    fn port_released_during_migration_is_free() {
        let table = SteeringTable::new();
        assert!(table.claim(DNS, 1, EXCLUSIVE));
        table.park(DNS, 1);
        table.release(DNS, 1, EXCLUSIVE);
        assert!(table.claim(DNS, 2, EXCLUSIVE));
        table.hand_over(DNS, 1, 3, 1);
        assert_eq!(view(&table).target(DNS), SteeringTarget::Core(2));
    }

    #[test]
    fn only_one_owner_shares_a_port_at_one_address() {
        let table = SteeringTable::new();
        for core in 0..2 {
            table.join(WEB, ip("0.0.0.0"), 7, core);
            assert!(table.claim(WEB, core, REUSE_PORT));
        }
        assert_eq!(view(&table).target(WEB), SteeringTarget::Shared);
        assert!(table.is_claimed_elsewhere(WEB, 0), "not available as an ephemeral port");
        assert!(table.is_held_by(WEB, 1) && !table.is_held_by(WEB, 2));
        for core in 0..3 {
            assert!(!table.can_claim(WEB, core, EXCLUSIVE));
            assert!(!table.claim(WEB, core, EXCLUSIVE));
            table.join(WEB, ip("0.0.0.0"), 8, core);
            assert!(!table.claim(WEB, core, PortSharing::ReusePort { owner: 8 }));
            table.leave(WEB, ip("0.0.0.0"), 8, core);
        }
        table.release(WEB, 0, REUSE_PORT);
        assert_eq!(view(&table).target(WEB), SteeringTarget::Core(1), "a single core again");
    }

    #[test]
    fn owners_share_a_port_at_distinct_addresses() {
        const OTHER: PortSharing = PortSharing::ReusePort { owner: 8 };
        for (port, is_udp) in [(WEB, false), (DNS, true)] {
            let table = SteeringTable::new();
            for core in 0..2 {
                table.join(port, ip("192.0.2.1"), 7, core);
                assert!(table.claim(port, core, REUSE_PORT));
            }
            for (address, may) in [("192.0.2.1", false), ("192.0.2.2", true), ("fd00::1", true)] {
                table.join(port, ip(address), 8, 2);
                assert_eq!(table.claim(port, 2, OTHER), may, "{address}");
                let target = view(&table).flow_target(&flow(port, "192.0.2.1", 1));
                assert!(matches!(target, SteeringTarget::Core(0 | 1)), "{target:?}");
                let target = view(&table).flow_target(&flow(port, address, 1));
                assert_eq!(target == SteeringTarget::Core(2), may);
                table.leave(port, ip(address), 8, 2);
                if may {
                    table.release(port, 2, OTHER);
                }
            }
            // A wildcard address overlaps a specific one for datagrams only.
            table.join(port, ip("0.0.0.0"), 8, 2);
            assert_eq!(table.claim(port, 2, OTHER), !is_udp);
            table.leave(port, ip("0.0.0.0"), 8, 2);
            // After the other owner's sockets have left, the address is free.
            for core in 0..2 {
                table.leave(port, ip("192.0.2.1"), 7, core);
            }
            table.join(port, ip("192.0.2.1"), 8, 2);
            assert!(table.claim(port, 2, OTHER), "connections of the other owner may remain");
        }
    }

    #[test]
    fn migrating_claims_keep_their_addresses() {
        let table = SteeringTable::new();
        table.join(WEB, ip("192.0.2.1"), 7, 0);
        assert!(table.claim(WEB, 0, REUSE_PORT) && table.claim(WEB, 1, REUSE_PORT));
        table.park(WEB, 0);
        table.leave(WEB, ip("192.0.2.1"), 7, 0);
        let other = PortSharing::ReusePort { owner: 8 };
        assert!(!table.can_claim(WEB, 1, other) && table.can_claim(WEB, 1, REUSE_PORT));
        table.hand_over(WEB, 0, 1, 1);
        assert!(table.can_claim(WEB, 1, other));
    }

    #[test]
    fn flows_are_distributed_by_socket_count_with_few_changes() {
        for (own, any_own) in [("192.0.2.1", "0.0.0.0"), ("fd00::1", "::")] {
            let table = SteeringTable::new();
            for core in 0..2 {
                table.join(DNS, ip(any_own), 7, core);
                assert!(table.claim(DNS, core, REUSE_PORT));
            }
            let two = cores_of_flows(&table, DNS, own);
            assert!((400..600).contains(&count(&two, 1)), "{}", count(&two, 1));
            table.join(DNS, ip(any_own), 7, 2);
            assert_eq!(
                cores_of_flows(&table, DNS, own),
                two,
                "core 2 has not claimed the port yet"
            );
            assert!(table.claim(DNS, 2, REUSE_PORT));
            let three = cores_of_flows(&table, DNS, own);
            let others = |core: usize| core != 2;
            assert!(
                two.iter().zip(&three).all(|(a, b)| a == b || !others(*b)),
                "flows move to the new core only"
            );
            assert!((250..420).contains(&count(&three, 2)));
            // After core 2 leaves, its flows go to the others, whose flows stay.
            table.leave(DNS, ip(any_own), 7, 2);
            table.release(DNS, 2, REUSE_PORT);
            let again = cores_of_flows(&table, DNS, own);
            assert!(three.iter().zip(&again).all(|(a, b)| a == b || *a == 2));
        }
    }

    #[test]
    fn specific_address_beats_wildcard_of_the_same_family() {
        let table = SteeringTable::new();
        table.join(DNS, ip("0.0.0.0"), 7, 0);
        table.join(DNS, ip("192.0.2.1"), 7, 1);
        table.join(DNS, ip("::"), 7, 2);
        assert!((0..3).all(|core| table.claim(DNS, core, REUSE_PORT)));
        for (own, core) in [("192.0.2.2", 0), ("192.0.2.1", 1), ("fd00::1", 2)] {
            assert_eq!(count(&cores_of_flows(&table, DNS, own), core), 1000);
        }
        table.leave(DNS, ip("192.0.2.1"), 7, 1);
        assert_eq!(count(&cores_of_flows(&table, DNS, "192.0.2.1"), 0), 1000);
    }

    #[test]
    fn flow_stays_with_its_socket() {
        let table = SteeringTable::new();
        table.join(WEB, ip("0.0.0.0"), 7, 0);
        assert!(table.claim(WEB, 0, REUSE_PORT) && table.claim(WEB, 1, REUSE_PORT));
        let known = flow(WEB, "192.0.2.1", 5);
        let target = || view(&table).flow_target(&known);
        assert!(table.begin_flow(known, 0) && !table.begin_flow(known, 1));
        assert!(!table.begin_flow(known, 0), "the flow's socket may be migrating");
        assert_eq!(target(), SteeringTarget::Core(0), "core 0 registered the flow");
        table.join(WEB, ip("0.0.0.0"), 7, 1);
        table.leave(WEB, ip("0.0.0.0"), 7, 0);
        assert_eq!(target(), SteeringTarget::Core(0), "although its slot belongs to another core");
        table.end_flow(known, 1);
        assert_eq!(target(), SteeringTarget::Core(0), "core 1 did not have the flow");
        table.end_flow(known, 0);
        assert_eq!(target(), SteeringTarget::Core(1));
    }

    #[test]
    fn migrating_one_share_leaves_other_cores_running() {
        let table = SteeringTable::new();
        for core in [0, 0, 1] {
            table.join(WEB, ip("0.0.0.0"), 7, core);
            assert!(table.claim(WEB, core, REUSE_PORT));
        }
        let [staying, moving, other] = [1, 2, 3].map(|peer| flow(WEB, "192.0.2.1", peer));
        let target = |flow| view(&table).flow_target(flow);
        for (flow, core) in [(staying, 0), (moving, 0), (other, 1)] {
            assert!(table.begin_flow(flow, core));
        }
        table.park(WEB, 0);
        assert_eq!(
            (target(&moving), target(&other)),
            (SteeringTarget::Parked, SteeringTarget::Core(1))
        );
        assert_eq!(view(&table).group_target(WEB), SteeringTarget::Parked);
        assert!(table.claim(WEB, 2, REUSE_PORT), "a core may join during a migration");
        table.park(WEB, 0);
        table.leave(WEB, ip("0.0.0.0"), 7, 0);
        table.take_over_flow(moving, 2);
        table.hand_over(WEB, 0, 2, 1);
        assert_eq!(target(&moving), SteeringTarget::Core(2));
        assert_eq!(
            target(&staying),
            SteeringTarget::Parked,
            "another migration from core 0 is pending"
        );
        table.hand_over(WEB, 0, 0, 1);
        assert_eq!(target(&staying), SteeringTarget::Core(0), "the claim returned to core 0");
        assert_eq!(view(&table).group_target(WEB), SteeringTarget::Cores(0b111));
        table.release(WEB, 0, REUSE_PORT);
        table.release(WEB, 1, REUSE_PORT);
        assert_eq!(view(&table).target(WEB), SteeringTarget::Core(2));
    }

    /// A core that changes claims may be preempted at any moment, with the locks it holds.
    #[test]
    fn reading_takes_no_lock() {
        let table = SteeringTable::new();
        for core in 0..2 {
            table.join(DNS, ip("0.0.0.0"), 7, core);
            table.join(DNS, ip("::"), 7, core);
            assert!(table.claim(DNS, core, REUSE_PORT));
        }
        let flows = ["192.0.2.1", "fd00::1"].map(|own| flow(DNS, own, 5));
        assert!(table.begin_flow(flows[0], 1));
        let _preempted: Vec<_> = table.claims.iter().map(|shard| shard.lock().unwrap()).collect();
        let view = view(&table);
        assert_eq!(view.target(DNS), SteeringTarget::Shared);
        assert_eq!(view.flow_target(&flows[0]), SteeringTarget::Core(1));
        assert!(matches!(view.flow_target(&flows[1]), SteeringTarget::Core(0 | 1)));
        assert_eq!(view.group_target(DNS), SteeringTarget::Cores(0b11));
        assert_eq!(table.holders(DNS), Some(0b11));
        assert!(table.is_claimed_elsewhere(DNS, 0) && table.can_be_shared(DNS));
    }

    #[test]
    fn migrating_port_is_not_available_to_any_core() {
        let table = SteeringTable::new();
        assert!(table.claim(WEB, 1, EXCLUSIVE) && !table.is_claimed_elsewhere(WEB, 1));
        table.park(WEB, 1);
        assert!((0..3).all(|core| table.is_claimed_elsewhere(WEB, core)));
        assert_eq!((table.holders(WEB), table.holders(DNS)), (None, Some(0)));
        table.hand_over(WEB, 1, 2, 1);
        assert_eq!(table.holders(WEB), Some(0b100));
        assert!(table.is_claimed_elsewhere(WEB, 1) && !table.is_claimed_elsewhere(WEB, 2));
    }
}
