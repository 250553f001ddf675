//! Flow steering table: the core of each local port, and of each flow of ports that cores share.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::LocalPort;
use super::claimed_port::{ClaimedPort, PortSharing};
use super::flow::Flow;
use crate::steering::TransportProtocol;

/// Number of entries: one for each port number of both protocols.
const ENTRIES: usize = 2 << 16;

// Fields of an entry: the core in the low bits, then flags for a port that is claimed, parked
// between two cores, or shared by several.
const CORE: u16 = 0xff;
const CLAIMED: u16 = 0x100;
const PARKED: u16 = 0x200;
const SHARED: u16 = 0x400;

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

/// Steering table of all local ports. Every core writes to the table, and the primary core reads it
/// for each frame. One atomic word holds the core of a port; only ports of several cores need
/// another look-up.
pub(super) struct SteeringTable {
    entries: Box<[AtomicU16]>,
    state: Mutex<SteeringState>,
}

/// State behind the lock, which is also held to write the entries.
#[derive(Default)]
struct SteeringState {
    ports: HashMap<LocalPort, ClaimedPort>,
    /// Core of the socket of each flow, for ports that may be shared. At most as many flows as the
    /// stacks have sockets.
    flows: HashMap<Flow, usize>,
    /// Keyed hash of flows. Peers choose their addresses, so the key is secret.
    flow_hasher: RandomState,
}

impl SteeringState {
    fn target(&self, flow: &Flow) -> SteeringTarget {
        let port = self.ports.get(&flow.local_port());
        if let Some(&core) = self.flows.get(flow) {
            let is_migrating = port.is_some_and(|port| port.is_migrating(core));
            return if is_migrating { SteeringTarget::Parked } else { SteeringTarget::Core(core) };
        }
        let Some(port) = port else { return SteeringTarget::Core(0) };
        if port.is_any_migrating() {
            // The core that would get the flow now may change with the migration.
            return SteeringTarget::Parked;
        }
        let core = port.core(flow.local().ip(), self.flow_hasher.hash_one(flow.remote()));
        // Unclaimed: delivered to any member core, which answers with ICMP or RST.
        core.or_else(|| Some(port.by_core().first()?.core))
            .map_or(SteeringTarget::Core(0), SteeringTarget::Core)
    }
}

/// Steering table as the primary core reads it during one burst: takes the lock at most once, and
/// only for a frame to a port of several cores.
pub(super) struct SteeringView<'d> {
    steering: &'d SteeringTable,
    active_cores: u64,
    state: Option<MutexGuard<'d, SteeringState>>,
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

    fn state(&mut self) -> &SteeringState {
        self.state.get_or_insert_with(|| self.steering.lock())
    }

    /// Target of a flow of a shared port.
    pub(super) fn flow_target(&mut self, flow: &Flow) -> SteeringTarget {
        self.state().target(flow)
    }

    /// Target of frames for all sockets on a shared port: all its cores.
    pub(super) fn group_target(&mut self, port: LocalPort) -> SteeringTarget {
        match self.state().ports.get(&port) {
            Some(port) if port.is_any_migrating() => SteeringTarget::Parked,
            Some(port) => {
                SteeringTarget::Cores(port.by_core().iter().fold(0, |all, p| all | 1 << p.core))
            }
            None => SteeringTarget::Core(0),
        }
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

impl SteeringTable {
    pub(super) fn new() -> Self {
        let entries = (0..ENTRIES).map(|_| AtomicU16::new(0)).collect();
        Self { entries, state: Mutex::default() }
    }

    /// View for the frames of one burst, with the active cores.
    pub(super) fn view(&self, active_cores: u64) -> SteeringView<'_> {
        SteeringView { steering: self, active_cores, state: None }
    }

    fn lock(&self) -> MutexGuard<'_, SteeringState> {
        // A panic cannot leave a half-made change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, (protocol, port): LocalPort) -> &AtomicU16 {
        let half = match protocol {
            TransportProtocol::Udp => 0,
            TransportProtocol::Tcp => ENTRIES / 2,
        };
        &self.entries[half + usize::from(port)]
    }

    /// Changes the claims of a port and updates its entry.
    fn update<T>(&self, local: LocalPort, change: impl FnOnce(&mut ClaimedPort) -> T) -> T {
        let mut table = self.lock();
        let mut port = match table.ports.entry(local) {
            Entry::Occupied(known) => known,
            Entry::Vacant(new) => new.insert_entry(ClaimedPort::default()),
        };
        let changed = change(port.get_mut());
        let entry = match port.get().by_core() {
            [] => 0,
            [only] if port.get().is_any_migrating() => CLAIMED | PARKED | only.core as u16,
            [only] => CLAIMED | only.core as u16,
            _ => CLAIMED | SHARED,
        };
        self.entry(local).store(entry, Ordering::SeqCst);
        if port.get().is_unused() {
            port.remove();
        }
        changed
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
        self.lock().ports.get(&port).is_none_or(|port| port.can_claim(core, sharing))
    }

    /// Returns true when a core other than `core` has claimed the port.
    pub(super) fn is_claimed_elsewhere(&self, port: LocalPort, core: usize) -> bool {
        let entry = self.entry(port).load(Ordering::Relaxed);
        entry & CLAIMED != 0 && (entry & SHARED != 0 || usize::from(entry & CORE) != core)
    }

    /// Returns true when several cores may claim the port.
    pub(super) fn can_be_shared(&self, port: LocalPort) -> bool {
        self.lock().ports.get(&port).is_some_and(ClaimedPort::can_be_shared)
    }

    /// Returns true when the core or no core has claimed the port, and no part of the port is
    /// migrating.
    pub(super) fn is_held_by(&self, port: LocalPort, core: usize) -> bool {
        let table = self.lock();
        let Some(port) = table.ports.get(&port).filter(|port| !port.is_unclaimed()) else {
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
        match self.lock().flows.entry(flow) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(core);
                true
            }
        }
    }

    /// Moves a flow to this core.
    pub(super) fn take_over_flow(&self, flow: Flow, core: usize) {
        self.lock().flows.insert(flow, core);
    }

    /// Removes a flow of this core.
    pub(super) fn end_flow(&self, flow: Flow, core: usize) {
        if let Entry::Occupied(known) = self.lock().flows.entry(flow)
            && *known.get() == core
        {
            known.remove();
        }
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
        let mut view = table.view(0);
        let mut core_of = |peer| {
            let target = match view.target(local) {
                SteeringTarget::Shared => view.flow_target(&flow(local, own, peer)),
                target => target,
            };
            let SteeringTarget::Core(core) = target else { panic!("{target:?}") };
            core
        };
        (1..=1000).map(&mut core_of).collect()
    }

    fn count(cores: &[usize], core: usize) -> usize {
        cores.iter().filter(|&&found| found == core).count()
    }

    #[test]
    fn port_stays_with_its_core_until_the_last_claim_is_released() {
        let table = SteeringTable::new();
        let target = || table.view(0).target(WEB);
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
        assert_eq!(table.view(0).target(DNS), SteeringTarget::Parked);
        assert!(!table.is_held_by(DNS, 0));
        assert!(!table.claim(DNS, 0, EXCLUSIVE), "its sockets are migrating");
        table.hand_over(DNS, 0, 3, 1);
        assert_eq!(
            table.view(0).target(DNS),
            SteeringTarget::Core(3),
            "not shareable: all claims migrate"
        );
        table.release(DNS, 3, EXCLUSIVE);
        assert_eq!(table.view(0).target(DNS), SteeringTarget::Core(3));
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
        assert_eq!(table.view(0).target(DNS), SteeringTarget::Core(2));
    }

    #[test]
    fn only_one_owner_shares_a_port_at_one_address() {
        let table = SteeringTable::new();
        for core in 0..2 {
            table.join(WEB, ip("0.0.0.0"), 7, core);
            assert!(table.claim(WEB, core, REUSE_PORT));
        }
        assert_eq!(table.view(0).target(WEB), SteeringTarget::Shared);
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
        assert_eq!(table.view(0).target(WEB), SteeringTarget::Core(1), "a single core again");
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
                let target = table.view(0).flow_target(&flow(port, "192.0.2.1", 1));
                assert!(matches!(target, SteeringTarget::Core(0 | 1)), "{target:?}");
                let target = table.view(0).flow_target(&flow(port, address, 1));
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
        let target = || table.view(0).flow_target(&known);
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
        let target = |flow| table.view(0).flow_target(flow);
        for (flow, core) in [(staying, 0), (moving, 0), (other, 1)] {
            assert!(table.begin_flow(flow, core));
        }
        table.park(WEB, 0);
        assert_eq!(
            (target(&moving), target(&other)),
            (SteeringTarget::Parked, SteeringTarget::Core(1))
        );
        assert_eq!(table.view(0).group_target(WEB), SteeringTarget::Parked);
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
        assert_eq!(table.view(0).group_target(WEB), SteeringTarget::Cores(0b111));
        table.release(WEB, 0, REUSE_PORT);
        table.release(WEB, 1, REUSE_PORT);
        assert_eq!(table.view(0).target(WEB), SteeringTarget::Core(2));
    }
}
