//! Which core has which local port, and which flows of those that several have.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::LocalPort;
use super::flow::Flow;
use super::shared_port::{SharedPort, Sharing};
use crate::steering::Protocol;

/// A port number for each of the two protocols.
const ENTRIES: usize = 2 << 16;

/// An entry: the core in the lowest bits, then whether anybody has claimed the port,
/// whether it is between two cores, and whether several have it.
const CORE: u16 = 0xff;
const CLAIMED: u16 = 0x100;
const PARKED: u16 = 0x200;
const SHARED: u16 = 0x400;

/// Who has a local port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// This core; the one with the card has all that nobody else has.
    Core(usize),
    /// It is on its way from one core to another: frames wait.
    Parked,
    /// Several cores: each of its flows is one core's.
    Shared,
    /// All of these: a bit for each.
    Cores(u64),
}

/// The local ports that cores have claimed. Every core writes to it, the one with
/// the card reads it for each frame: one word says whose a port is, and only for
/// those of several cores there is more to look at.
pub(super) struct Directory {
    entries: Box<[AtomicU16]>,
    table: Mutex<Table>,
}

/// All that is known. The entries are written under its lock.
#[derive(Default)]
struct Table {
    ports: HashMap<LocalPort, SharedPort>,
    /// Of ports that may be shared, the flows that a core has a socket for. They are
    /// no more than the stacks have sockets.
    flows: HashMap<Flow, usize>,
    /// Which slot a flow falls into. Strangers choose addresses: the key is secret.
    slots: RandomState,
}

impl Table {
    fn owner(&self, flow: &Flow) -> Owner {
        let port = self.ports.get(&flow.local_port());
        if let Some(&core) = self.flows.get(flow) {
            let leaves = port.is_some_and(|port| port.is_leaving(core));
            return if leaves { Owner::Parked } else { Owner::Core(core) };
        }
        let Some(port) = port else { return Owner::Core(0) };
        if port.is_anything_leaving() {
            // Who would get it now may not be who gets it then.
            return Owner::Parked;
        }
        let core = port.core(flow.local().ip(), self.slots.hash_one(flow.remote()));
        // If nobody takes it, one of those on the port says so.
        core.or_else(|| Some(port.parts().first()?.core)).map_or(Owner::Core(0), Owner::Core)
    }
}

/// What the core with the card reads in one burst: it takes the lock once, and only
/// if a frame is for a port of several cores.
pub(super) struct View<'d> {
    directory: &'d Directory,
    used: u64,
    table: Option<MutexGuard<'d, Table>>,
}

impl View<'_> {
    /// Who gets frames for a port.
    pub(super) fn owner(&self, port: LocalPort) -> Owner {
        match self.directory.entry(port).load(Ordering::SeqCst) {
            entry if entry & SHARED != 0 => Owner::Shared,
            entry if entry & PARKED != 0 => Owner::Parked,
            entry => Owner::Core(usize::from(entry & CORE)),
        }
    }

    fn table(&mut self) -> &Table {
        self.table.get_or_insert_with(|| self.directory.lock())
    }

    /// Who gets a flow of a port that is shared.
    pub(super) fn owner_of_flow(&mut self, flow: &Flow) -> Owner {
        self.table().owner(flow)
    }

    /// All cores that have a port that is shared, for what is for all its sockets.
    pub(super) fn owners(&mut self, port: LocalPort) -> Owner {
        match self.table().ports.get(&port) {
            Some(port) if port.is_anything_leaving() => Owner::Parked,
            Some(port) => Owner::Cores(port.parts().iter().fold(0, |all, p| all | 1 << p.core)),
            None => Owner::Core(0),
        }
    }

    /// The cores that are used: a bit for each.
    pub(super) fn used(&self) -> u64 {
        self.used
    }
}

/// As in a stack, no two parties' sockets may get the same datagram.
fn overlap_of_datagrams(one: IpAddr, other: IpAddr) -> bool {
    let any = one.is_unspecified() || other.is_unspecified();
    one == other || any && one.is_ipv4() == other.is_ipv4()
}

impl Directory {
    pub(super) fn new() -> Self {
        let entries = (0..ENTRIES).map(|_| AtomicU16::new(0)).collect();
        Self { entries, table: Mutex::default() }
    }

    /// For the frames of one burst, while these cores are used.
    pub(super) fn view(&self, used: u64) -> View<'_> {
        View { directory: self, used, table: None }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each change is whole when it can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, (protocol, port): LocalPort) -> &AtomicU16 {
        let half = match protocol {
            Protocol::Udp => 0,
            Protocol::Tcp => ENTRIES / 2,
        };
        &self.entries[half + usize::from(port)]
    }

    /// Changes what is known of a port.
    fn change<T>(&self, local: LocalPort, change: impl FnOnce(&mut SharedPort) -> T) -> T {
        let mut table = self.lock();
        let mut port = match table.ports.entry(local) {
            Entry::Occupied(known) => known,
            Entry::Vacant(new) => new.insert_entry(SharedPort::default()),
        };
        let changed = change(port.get_mut());
        let entry = match port.get().parts() {
            [] => 0,
            [only] if port.get().is_anything_leaving() => CLAIMED | PARKED | only.core as u16,
            [only] => CLAIMED | only.core as u16,
            _ => CLAIMED | SHARED,
        };
        self.entry(local).store(entry, Ordering::SeqCst);
        if port.get().is_over() {
            port.remove();
        }
        changed
    }

    /// Claims a port once more. Returns whether that may be.
    pub(super) fn claim(&self, port: LocalPort, core: usize, sharing: Sharing) -> bool {
        let overlap = match port.0 {
            Protocol::Udp => overlap_of_datagrams,
            Protocol::Tcp => |one, other| one == other,
        };
        self.change(port, |port| port.claim(core, sharing, overlap))
    }

    /// Takes one claim back. With the last the port is nobody's.
    pub(super) fn release(&self, port: LocalPort, core: usize, sharing: Sharing) {
        self.change(port, |port| port.release(core, sharing));
    }

    /// Whether a core may claim a port so.
    pub(super) fn is_open_to(&self, port: LocalPort, core: usize, sharing: Sharing) -> bool {
        self.lock().ports.get(&port).is_none_or(|port| port.is_open_to(core, sharing))
    }

    /// Whether a core other than this one has claimed the port.
    pub(super) fn is_foreign(&self, port: LocalPort, core: usize) -> bool {
        let entry = self.entry(port).load(Ordering::Relaxed);
        entry & CLAIMED != 0 && (entry & SHARED != 0 || usize::from(entry & CORE) != core)
    }

    /// Whether the claims of a port may be on several cores.
    pub(super) fn can_be_shared(&self, port: LocalPort) -> bool {
        self.lock().ports.get(&port).is_some_and(SharedPort::can_be_shared)
    }

    /// Whether the core has claimed the port, or nobody has, and nothing of it is on its
    /// way.
    pub(super) fn is_at(&self, port: LocalPort, core: usize) -> bool {
        let table = self.lock();
        let Some(port) = table.ports.get(&port).filter(|port| !port.is_free()) else { return true };
        !port.is_anything_leaving() && port.parts().iter().any(|part| part.core == core)
    }

    /// Frames for what a core has of a port wait from now on.
    pub(super) fn park(&self, port: LocalPort, core: usize) {
        self.change(port, |port| port.park(core));
    }

    /// So many claims of a port that were parked are another core's from now on.
    pub(super) fn hand(&self, port: LocalPort, from: usize, to: usize, claims: u32) {
        self.change(port, |port| port.hand(from, to, claims));
    }

    /// A socket of a core's takes what anybody sends to this address and port.
    pub(super) fn join(&self, port: LocalPort, address: IpAddr, party: u64, core: usize) {
        self.change(port, |port| port.join(core, address, party));
    }

    /// It does so no longer.
    pub(super) fn leave(&self, port: LocalPort, address: IpAddr, party: u64, core: usize) {
        self.change(port, |port| port.leave(core, address, party));
    }

    /// A core is to have a socket for a flow. Whether that may be: no other has one, and
    /// none that was here is on its way.
    pub(super) fn begin(&self, flow: Flow, core: usize) -> bool {
        match self.lock().flows.entry(flow) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(core);
                true
            }
        }
    }

    /// A socket for a flow has come to a core.
    pub(super) fn take_over(&self, flow: Flow, core: usize) {
        self.lock().flows.insert(flow, core);
    }

    /// A core has no socket for a flow any more.
    pub(super) fn end(&self, flow: Flow, core: usize) {
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

    const WEB: LocalPort = (Protocol::Tcp, 80);
    const DNS: LocalPort = (Protocol::Udp, 53);
    const ALONE: Sharing = Sharing::Alone;
    const USER: Sharing = Sharing::ReusePort { party: 7 };
    const CARD: usize = 0;

    fn any(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A flow from one of many peers.
    fn flow(local: LocalPort, own: &str, peer: u16) -> Flow {
        let remote = (if own.contains(':') { any("fd00::9") } else { any("192.0.2.9") }, peer);
        Flow::new(local.0, (any(own), local.1).into(), remote.into())
    }

    /// Who gets each of a thousand flows.
    fn owners(directory: &Directory, local: LocalPort, own: &str) -> Vec<usize> {
        let mut view = directory.view(0);
        let mut owner = |peer| {
            let owner = match view.owner(local) {
                Owner::Shared => view.owner_of_flow(&flow(local, own, peer)),
                owner => owner,
            };
            let Owner::Core(core) = owner else { panic!("{owner:?}") };
            core
        };
        (1..=1000).map(&mut owner).collect()
    }

    fn count(owners: &[usize], core: usize) -> usize {
        owners.iter().filter(|&&owner| owner == core).count()
    }

    #[test]
    fn a_port_is_one_cores_until_its_last_claim_is_released() {
        let directory = Directory::new();
        let owner = || directory.view(0).owner(WEB);
        assert_eq!(owner(), Owner::Core(CARD));
        assert!(directory.claim(WEB, 2, ALONE) && directory.claim(WEB, 2, ALONE));
        assert!(!directory.claim(WEB, 0, ALONE), "not even by the core with the card");
        assert!(!directory.claim(WEB, 0, USER));
        assert!(directory.claim((Protocol::Udp, 80), 1, ALONE), "another protocol, another port");
        assert!(directory.is_foreign(WEB, 0) && !directory.is_foreign(WEB, 2));
        directory.release(WEB, 1, ALONE);
        directory.release(WEB, 2, ALONE);
        assert_eq!(owner(), Owner::Core(2));
        directory.release(WEB, 2, ALONE);
        assert_eq!(owner(), Owner::Core(CARD));
        assert!(directory.claim(WEB, 1, ALONE));
    }

    #[test]
    fn a_port_moves_with_its_claims() {
        let directory = Directory::new();
        assert!(directory.claim(DNS, 0, ALONE) && directory.claim(DNS, 0, USER));
        directory.park(DNS, 0);
        assert_eq!(directory.view(0).owner(DNS), Owner::Parked);
        assert!(!directory.is_at(DNS, 0));
        assert!(!directory.claim(DNS, 0, ALONE), "its sockets are elsewhere soon");
        directory.hand(DNS, 0, 3, 1);
        assert_eq!(directory.view(0).owner(DNS), Owner::Core(3), "it cannot be shared: all go");
        directory.release(DNS, 3, ALONE);
        assert_eq!(directory.view(0).owner(DNS), Owner::Core(3));
        assert!(!directory.claim(DNS, 0, ALONE));
        directory.release(DNS, 3, USER);
        assert!(directory.claim(DNS, 0, ALONE));
    }

    #[test]
    fn a_port_that_is_given_up_on_the_way_is_for_anybody() {
        let directory = Directory::new();
        assert!(directory.claim(DNS, 1, ALONE));
        directory.park(DNS, 1);
        directory.release(DNS, 1, ALONE);
        assert!(directory.claim(DNS, 2, ALONE));
        directory.hand(DNS, 1, 3, 1);
        assert_eq!(directory.view(0).owner(DNS), Owner::Core(2));
    }

    #[test]
    fn one_user_shares_a_port_among_cores_and_no_other_gets_in() {
        let directory = Directory::new();
        for core in 0..2 {
            directory.join(WEB, any("0.0.0.0"), 7, core);
            assert!(directory.claim(WEB, core, USER));
        }
        assert_eq!(directory.view(0).owner(WEB), Owner::Shared);
        assert!(directory.is_foreign(WEB, 0), "it is not to be chosen");
        assert!(directory.is_at(WEB, 1) && !directory.is_at(WEB, 2));
        for core in 0..3 {
            assert!(!directory.is_open_to(WEB, core, ALONE));
            assert!(!directory.claim(WEB, core, ALONE));
            directory.join(WEB, any("0.0.0.0"), 8, core);
            assert!(!directory.claim(WEB, core, Sharing::ReusePort { party: 8 }));
            directory.leave(WEB, any("0.0.0.0"), 8, core);
        }
        directory.release(WEB, 0, USER);
        assert_eq!(directory.view(0).owner(WEB), Owner::Core(1), "one core's again");
    }

    #[test]
    fn parties_share_a_port_at_addresses_of_their_own() {
        const OTHER: Sharing = Sharing::ReusePort { party: 8 };
        for (port, is_udp) in [(WEB, false), (DNS, true)] {
            let directory = Directory::new();
            for core in 0..2 {
                directory.join(port, any("192.0.2.1"), 7, core);
                assert!(directory.claim(port, core, USER));
            }
            for (address, may) in [("192.0.2.1", false), ("192.0.2.2", true), ("fd00::1", true)] {
                directory.join(port, any(address), 8, 2);
                assert_eq!(directory.claim(port, 2, OTHER), may, "{address}");
                let owner = directory.view(0).owner_of_flow(&flow(port, "192.0.2.1", 1));
                assert!(matches!(owner, Owner::Core(0 | 1)), "{owner:?}");
                let owner = directory.view(0).owner_of_flow(&flow(port, address, 1));
                assert_eq!(owner == Owner::Core(2), may);
                directory.leave(port, any(address), 8, 2);
                if may {
                    directory.release(port, 2, OTHER);
                }
            }
            // One for all addresses is another one's with datagrams only.
            directory.join(port, any("0.0.0.0"), 8, 2);
            assert_eq!(directory.claim(port, 2, OTHER), !is_udp);
            directory.leave(port, any("0.0.0.0"), 8, 2);
            // Where the others have just gone, nothing is left of them.
            for core in 0..2 {
                directory.leave(port, any("192.0.2.1"), 7, core);
            }
            directory.join(port, any("192.0.2.1"), 8, 2);
            assert!(directory.claim(port, 2, OTHER), "their connections may last");
        }
    }

    #[test]
    fn what_moves_keeps_its_addresses() {
        let directory = Directory::new();
        directory.join(WEB, any("192.0.2.1"), 7, 0);
        assert!(directory.claim(WEB, 0, USER) && directory.claim(WEB, 1, USER));
        directory.park(WEB, 0);
        directory.leave(WEB, any("192.0.2.1"), 7, 0);
        let other = Sharing::ReusePort { party: 8 };
        assert!(!directory.is_open_to(WEB, 1, other) && directory.is_open_to(WEB, 1, USER));
        directory.hand(WEB, 0, 1, 1);
        assert!(directory.is_open_to(WEB, 1, other));
    }

    #[test]
    fn flows_are_divided_by_sockets_and_few_change() {
        for (own, any_own) in [("192.0.2.1", "0.0.0.0"), ("fd00::1", "::")] {
            let directory = Directory::new();
            for core in 0..2 {
                directory.join(DNS, any(any_own), 7, core);
                assert!(directory.claim(DNS, core, USER));
            }
            let two = owners(&directory, DNS, own);
            assert!((400..600).contains(&count(&two, 1)), "{}", count(&two, 1));
            directory.join(DNS, any(any_own), 7, 2);
            assert_eq!(owners(&directory, DNS, own), two, "it has not claimed the port yet");
            assert!(directory.claim(DNS, 2, USER));
            let three = owners(&directory, DNS, own);
            let others = |core: usize| core != 2;
            assert!(two.iter().zip(&three).all(|(a, b)| a == b || !others(*b)), "only to the new");
            assert!((250..420).contains(&count(&three, 2)));
            // It ends: its flows go to the others, and theirs stay.
            directory.leave(DNS, any(any_own), 7, 2);
            directory.release(DNS, 2, USER);
            let again = owners(&directory, DNS, own);
            assert!(three.iter().zip(&again).all(|(a, b)| a == b || *a == 2));
        }
    }

    #[test]
    fn who_has_the_very_address_comes_first_and_families_are_apart() {
        let directory = Directory::new();
        directory.join(DNS, any("0.0.0.0"), 7, 0);
        directory.join(DNS, any("192.0.2.1"), 7, 1);
        directory.join(DNS, any("::"), 7, 2);
        assert!((0..3).all(|core| directory.claim(DNS, core, USER)));
        for (own, core) in [("192.0.2.2", 0), ("192.0.2.1", 1), ("fd00::1", 2)] {
            assert_eq!(count(&owners(&directory, DNS, own), core), 1000);
        }
        directory.leave(DNS, any("192.0.2.1"), 7, 1);
        assert_eq!(count(&owners(&directory, DNS, "192.0.2.1"), 0), 1000);
    }

    #[test]
    fn a_flow_stays_where_its_socket_is() {
        let directory = Directory::new();
        directory.join(WEB, any("0.0.0.0"), 7, 0);
        assert!(directory.claim(WEB, 0, USER) && directory.claim(WEB, 1, USER));
        let known = flow(WEB, "192.0.2.1", 5);
        let owner = || directory.view(0).owner_of_flow(&known);
        assert!(directory.begin(known, 0) && !directory.begin(known, 1));
        assert!(!directory.begin(known, 0), "its socket may be on its way elsewhere");
        assert_eq!(owner(), Owner::Core(0), "it was there first");
        directory.join(WEB, any("0.0.0.0"), 7, 1);
        directory.leave(WEB, any("0.0.0.0"), 7, 0);
        assert_eq!(owner(), Owner::Core(0), "its slot is another core's");
        directory.end(known, 1);
        assert_eq!(owner(), Owner::Core(0), "core 1 did not have it");
        directory.end(known, 0);
        assert_eq!(owner(), Owner::Core(1));
    }

    #[test]
    fn a_part_of_a_shared_port_moves_and_the_others_go_on() {
        let directory = Directory::new();
        for core in [0, 0, 1] {
            directory.join(WEB, any("0.0.0.0"), 7, core);
            assert!(directory.claim(WEB, core, USER));
        }
        let [staying, moving, other] = [1, 2, 3].map(|peer| flow(WEB, "192.0.2.1", peer));
        let owner = |flow| directory.view(0).owner_of_flow(flow);
        for (flow, core) in [(staying, 0), (moving, 0), (other, 1)] {
            assert!(directory.begin(flow, core));
        }
        directory.park(WEB, 0);
        assert_eq!((owner(&moving), owner(&other)), (Owner::Parked, Owner::Core(1)));
        assert_eq!(directory.view(0).owners(WEB), Owner::Parked);
        assert!(directory.claim(WEB, 2, USER), "who joins meanwhile is welcome");
        directory.park(WEB, 0);
        directory.leave(WEB, any("0.0.0.0"), 7, 0);
        directory.take_over(moving, 2);
        directory.hand(WEB, 0, 2, 1);
        assert_eq!(owner(&moving), Owner::Core(2));
        assert_eq!(owner(&staying), Owner::Parked, "something else is on its way from there");
        directory.hand(WEB, 0, 0, 1);
        assert_eq!(owner(&staying), Owner::Core(0), "it came back");
        assert_eq!(directory.view(0).owners(WEB), Owner::Cores(0b111));
        directory.release(WEB, 0, USER);
        directory.release(WEB, 1, USER);
        assert_eq!(directory.view(0).owner(WEB), Owner::Core(2));
    }
}
