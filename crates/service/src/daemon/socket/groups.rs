//! Groups of applications that must be on one network core.
//!
//! Applications that share a socket stay together, and so do applications with a local port in
//! common, unless the port may be on several cores. All that joins applications is counted with
//! each change of a socket's owners, so no question about the groups walks all sockets.

#[cfg(test)]
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use tidegate_device::sharded::LocalPort;

use crate::daemon::ids::{AppNumber, Holder, NO_APP, SocketKey};

/// Claim of a local port: a number that no other claim has, and the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::daemon) struct ClaimKey {
    pub(super) id: usize,
    pub(super) port: LocalPort,
}

/// Owners of a socket.
#[derive(Clone, Copy)]
pub(super) struct Owners<'a> {
    pub(super) claim: Option<ClaimKey>,
    pub(super) origin: AppNumber,
    pub(super) holders: &'a [Holder],
}

impl Owners<'_> {
    /// All applications that the socket refers to: its holders, then its origin.
    fn apps(&self) -> impl Iterator<Item = AppNumber> {
        let holders = self.holders.iter().map(|holder| holder.app);
        holders.chain([self.origin]).filter(|&app| app != NO_APP)
    }

    /// Application that stands for all of them in the counts of a port.
    fn first(&self) -> Option<AppNumber> {
        self.apps().next()
    }

    fn is_in_transit(&self) -> bool {
        self.holders.iter().any(|holder| holder.app == NO_APP)
    }
}

/// Number of sockets of each application, in the order of the applications.
#[derive(Default)]
struct AppCounts(Vec<(AppNumber, u32)>);

impl AppCounts {
    fn change(&mut self, app: AppNumber, adds: bool) {
        match self.0.binary_search_by_key(&app, |&(known, _)| known) {
            Ok(at) if adds => self.0[at].1 += 1,
            Ok(at) if self.0[at].1 > 1 => self.0[at].1 -= 1,
            Ok(at) => {
                self.0.remove(at);
            }
            Err(at) if adds => self.0.insert(at, (app, 1)),
            Err(_) => {}
        }
    }

    fn apps(&self) -> impl Iterator<Item = AppNumber> {
        self.0.iter().map(|&(app, _)| app)
    }

    fn has_several(&self) -> bool {
        self.0.len() > 1
    }
}

/// Sockets with one claim.
#[derive(Default)]
struct ClaimSockets {
    count: u32,
    apps: AppCounts,
    in_transit: HashSet<SocketKey>,
}

/// Sockets on one local port.
#[derive(Default)]
struct PortSockets {
    claims: HashSet<usize>,
    /// Claims of several applications.
    joint_claims: HashSet<usize>,
    apps: AppCounts,
}

/// Counts of all that joins the applications of a core.
#[derive(Default)]
pub(in crate::daemon) struct SocketGroups {
    claims: HashMap<usize, ClaimSockets>,
    ports: HashMap<LocalPort, PortSockets>,
    /// Ports of several applications.
    joint_ports: HashSet<LocalPort>,
    /// Number of sockets that two applications share.
    pairs: HashMap<(AppNumber, AppNumber), u32>,
    /// Number of owners' entries of each application in all sockets.
    references: HashMap<AppNumber, u32>,
    /// Sockets in transit, by origin.
    in_transit: HashMap<AppNumber, HashSet<SocketKey>>,
    /// Work done to answer questions.
    #[cfg(test)]
    steps: Cell<usize>,
}

/// Increments or decrements a count. A count of zero is removed.
fn change<K: Eq + Hash>(counts: &mut HashMap<K, u32>, key: K, adds: bool) {
    if adds {
        *counts.entry(key).or_default() += 1;
    } else if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

fn pair(one: AppNumber, other: AppNumber) -> (AppNumber, AppNumber) {
    (one.min(other), one.max(other))
}

impl SocketGroups {
    /// Adds a socket.
    pub(super) fn add(&mut self, key: SocketKey, owners: Owners<'_>) {
        self.change_apps(owners, true);
        self.change_claim(owners, true);
        self.change_transit(key, owners, true);
    }

    /// Removes a socket, with the owners that it had last.
    pub(super) fn remove(&mut self, key: SocketKey, owners: Owners<'_>) {
        self.change_transit(key, owners, false);
        self.change_claim(owners, false);
        self.change_apps(owners, false);
    }

    /// Adds the last of the holders in `owners`, which the socket did not have before.
    pub(super) fn add_holder(&mut self, key: SocketKey, owners: Owners<'_>) {
        let Some((&new, before)) = owners.holders.split_last() else { return };
        let Some(first) = before.iter().map(|holder| holder.app).find(|&app| app != NO_APP) else {
            // The new holder stands for the socket now.
            self.remove(key, Owners { holders: before, ..owners });
            return self.add(key, owners);
        };
        if new.app == NO_APP {
            return self.change_transit(key, owners, true);
        }
        change(&mut self.references, new.app, true);
        if new.app != first {
            change(&mut self.pairs, pair(first, new.app), true);
        }
    }

    fn change_apps(&mut self, owners: Owners<'_>, adds: bool) {
        let Some(first) = owners.first() else { return };
        for app in owners.apps() {
            change(&mut self.references, app, adds);
            if app != first {
                change(&mut self.pairs, pair(first, app), adds);
            }
        }
    }

    fn change_claim(&mut self, owners: Owners<'_>, adds: bool) {
        let Some(ClaimKey { id, port }) = owners.claim else { return };
        let (claim, of_port) =
            (self.claims.entry(id).or_default(), self.ports.entry(port).or_default());
        claim.count = if adds { claim.count + 1 } else { claim.count.saturating_sub(1) };
        if let Some(first) = owners.first() {
            claim.apps.change(first, adds);
            of_port.apps.change(first, adds);
        }
        match claim.apps.has_several() {
            true => of_port.joint_claims.insert(id),
            false => of_port.joint_claims.remove(&id),
        };
        match of_port.apps.has_several() {
            true => self.joint_ports.insert(port),
            false => self.joint_ports.remove(&port),
        };
        if claim.count > 0 {
            of_port.claims.insert(id);
            return;
        }
        self.claims.remove(&id);
        of_port.claims.remove(&id);
        if of_port.claims.is_empty() {
            self.ports.remove(&port);
        }
    }

    fn change_transit(&mut self, key: SocketKey, owners: Owners<'_>, adds: bool) {
        if !owners.is_in_transit() {
            return;
        }
        let claim = owners.claim.and_then(|claim| self.claims.get_mut(&claim.id));
        let of_origin = self.in_transit.entry(owners.origin).or_default();
        for keys in [of_origin].into_iter().chain(claim.map(|claim| &mut claim.in_transit)) {
            match adds {
                true => keys.insert(key),
                false => keys.remove(&key),
            };
        }
        if self.in_transit.get(&owners.origin).is_some_and(HashSet::is_empty) {
            self.in_transit.remove(&owners.origin);
        }
    }

    /// True if a socket refers to this application.
    pub(super) fn refers_to(&self, app: AppNumber) -> bool {
        self.references.contains_key(&app)
    }

    /// True if a socket has this claim.
    pub(super) fn has_claim(&self, id: usize) -> bool {
        self.claims.contains_key(&id)
    }

    /// True if a socket has this local port.
    pub(super) fn has_port(&self, port: LocalPort) -> bool {
        self.ports.contains_key(&port)
    }

    /// Local ports of all sockets.
    pub(super) fn ports(&self) -> impl Iterator<Item = LocalPort> {
        self.ports.keys().copied()
    }

    /// Sockets in transit that an application has created.
    pub(super) fn in_transit_from(&self, app: AppNumber) -> impl Iterator<Item = SocketKey> {
        self.in_transit.get(&app).into_iter().flatten().copied()
    }

    /// Sockets in transit with a claim.
    pub(super) fn in_transit_with(&self, claim: ClaimKey) -> impl Iterator<Item = SocketKey> {
        self.claims.get(&claim.id).into_iter().flat_map(|claim| &claim.in_transit).copied()
    }

    /// Claims on a local port.
    pub(super) fn claims_on(&self, port: LocalPort) -> impl Iterator<Item = ClaimKey> {
        let claims = self.ports.get(&port).into_iter().flat_map(|of_port| &of_port.claims);
        claims.map(move |&id| ClaimKey { id, port })
    }

    /// Applications joined by a claim: those of its port, or of the claim alone if the port may
    /// be on several cores.
    pub(super) fn joined_by(
        &self,
        claim: ClaimKey,
        can_be_shared: bool,
    ) -> impl Iterator<Item = AppNumber> {
        let counts = match can_be_shared {
            true => self.claims.get(&claim.id).map(|claim| &claim.apps),
            false => self.ports.get(&claim.port).map(|of_port| &of_port.apps),
        };
        counts.into_iter().flat_map(AppCounts::apps)
    }

    /// Groups of `count` applications, of which those count that are live.
    pub(super) fn of_applications(
        &self,
        count: usize,
        is_live: impl Fn(AppNumber) -> bool,
        can_be_shared: impl Fn(LocalPort) -> bool,
    ) -> AppGroups {
        let mut groups = AppGroups::new(count);
        self.count_steps(count + self.pairs.len());
        let joined = self.pairs.keys().filter(|(one, other)| is_live(*one) && is_live(*other));
        joined.for_each(|&(one, other)| groups.merge(one, other));
        let mut merge = |apps: &AppCounts| {
            self.count_steps(apps.0.len());
            let mut live = apps.apps().filter(|&app| is_live(app));
            if let Some(first) = live.next() {
                live.for_each(|other| groups.merge(first, other));
            }
        };
        for &port in &self.joint_ports {
            let Some(of_port) = self.ports.get(&port) else { continue };
            if can_be_shared(port) {
                let joint = of_port.joint_claims.iter().filter_map(|id| self.claims.get(id));
                joint.for_each(|claim| merge(&claim.apps));
            } else {
                merge(&of_port.apps);
            }
        }
        groups
    }

    /// Counts work that was done to answer a question.
    #[cfg(test)]
    pub(super) fn count_steps(&self, steps: usize) {
        self.steps.set(self.steps.get() + steps);
    }

    #[cfg(not(test))]
    #[inline]
    pub(super) fn count_steps(&self, _: usize) {}

    /// Work done since the last call.
    #[cfg(test)]
    pub(super) fn take_steps(&self) -> usize {
        self.steps.take()
    }
}

/// Groups of applications that migrate together (union-find).
pub(in crate::daemon) struct AppGroups(Vec<AppNumber>);

impl AppGroups {
    fn new(apps: usize) -> Self {
        Self((0..apps as AppNumber).collect())
    }

    /// Number of an application's group.
    pub(in crate::daemon) fn group_of(&mut self, app: AppNumber) -> AppNumber {
        let mut root = app;
        while self.0[root as usize] != root {
            // Halves the path for the next search.
            self.0[root as usize] = self.0[self.0[root as usize] as usize];
            root = self.0[root as usize];
        }
        root
    }

    fn merge(&mut self, one: AppNumber, other: AppNumber) {
        let (one, other) = (self.group_of(one), self.group_of(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

#[cfg(test)]
mod tests {
    use tidegate_device::steering::TransportProtocol;

    use super::*;

    const SOCKETS: u32 = 100_000;
    const APPS: u32 = 100;

    fn port(number: u32) -> LocalPort {
        (TransportProtocol::Tcp, number as u16)
    }

    fn claim(id: u32, number: u32) -> Option<ClaimKey> {
        Some(ClaimKey { id: id as usize, port: port(number) })
    }

    fn holders(apps: &[AppNumber]) -> Vec<Holder> {
        apps.iter().map(|&app| Holder { app, slot: 0 }).collect()
    }

    /// Groups of the applications, each by its first member.
    fn groups(all: &SocketGroups, live: &[AppNumber], is_shared: bool) -> Vec<AppNumber> {
        let count = live.iter().max().map_or(0, |&last| last as usize + 1);
        let mut found = all.of_applications(count, |app| live.contains(&app), |_| is_shared);
        live.iter().map(|&app| found.group_of(app)).collect()
    }

    #[test]
    fn merges_groups_in_any_order() {
        let mut groups = AppGroups::new(5);
        groups.merge(4, 3);
        groups.merge(1, 2);
        groups.merge(2, 4);
        let names: Vec<_> = (0..5).map(|app| groups.group_of(app)).collect();
        assert_eq!(names, [0, 1, 1, 1, 1]);
    }

    /// Servers with many connections each, clients with a port for each connection, and workers
    /// that share one listener.
    #[test]
    fn work_for_the_groups_does_not_grow_with_the_sockets() {
        let each = SOCKETS / 3;
        let mut all = SocketGroups::default();
        for key in 0..each {
            let app = key % APPS;
            let holders = holders(&[app]);
            let owners = |claim| Owners { claim, origin: app, holders: &holders };
            all.add(key, owners(claim(app, 500 + app)));
            all.add(key + each, owners(claim(1_000 + key, 1_000 + key % 60_000)));
        }
        let workers: Vec<_> = (APPS..2 * APPS).collect();
        let of_all = holders(&workers);
        let listener = claim(500_000, 80);
        all.add(0, Owners { claim: listener, origin: APPS, holders: &of_all });
        for key in 2 * each..SOCKETS {
            let app = APPS + key % APPS;
            let holders = holders(&[app]);
            all.add(key, Owners { claim: listener, origin: app, holders: &holders });
        }
        let live: Vec<_> = (0..2 * APPS).collect();
        let mut found = groups(&all, &live, false);
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), APPS as usize + 1);
        let steps = all.take_steps();
        assert!(steps <= 10 * APPS as usize, "{steps} steps with {SOCKETS} sockets");
    }

    #[test]
    fn sharers_of_a_socket_are_joined_while_they_live() {
        let mut all = SocketGroups::default();
        let (mut now, origin) = (holders(&[2]), 2);
        all.add(7, Owners { claim: None, origin, holders: &now });
        for app in [0, 3] {
            now.push(Holder { app, slot: 0 });
            all.add_holder(7, Owners { claim: None, origin, holders: &now });
        }
        assert_eq!(groups(&all, &[0, 1, 2, 3], false), [0, 1, 0, 0]);
        assert_eq!(groups(&all, &[0, 1, 3], false), [0, 1, 3], "application 2 has ended");
        all.remove(7, Owners { claim: None, origin, holders: &now });
        now.remove(0);
        all.add(7, Owners { claim: None, origin, holders: &now });
        assert_eq!(groups(&all, &[0, 1, 3], false), [0, 1, 0]);
        assert!(all.refers_to(2), "the memory of the socket is that of application 2");
        all.remove(7, Owners { claim: None, origin, holders: &now });
        assert!(!all.refers_to(2) && all.pairs.is_empty());
    }

    #[test]
    fn a_port_joins_applications_unless_it_can_be_on_several_cores() {
        let mut all = SocketGroups::default();
        let own: Vec<_> = (0..4).map(|app| holders(&[app])).collect();
        let ids = [1, 1, 2, 3];
        let owners = |app: usize| Owners {
            claim: claim(ids[app], 53),
            origin: app as AppNumber,
            holders: &own[app],
        };
        (0..4).for_each(|app| all.add(app as SocketKey, owners(app)));
        assert_eq!(groups(&all, &[0, 1, 2, 3], false), [0; 4]);
        assert_eq!(groups(&all, &[0, 1, 2, 3], true), [0, 0, 2, 3], "two have one claim");
        assert!(all.has_port(port(53)) && all.has_claim(3) && !all.has_port(port(54)));
        (0..4).for_each(|app| all.remove(app as SocketKey, owners(app)));
        assert!(!all.has_port(port(53)) && !all.has_claim(3));
        assert!(all.ports.is_empty() && all.claims.is_empty() && all.joint_ports.is_empty());
    }

    #[test]
    fn sockets_in_transit_are_found_by_origin_and_claim() {
        let mut all = SocketGroups::default();
        let mut now = holders(&[4]);
        fn owners(holders: &[Holder]) -> Owners<'_> {
            Owners { claim: claim(1, 80), origin: 4, holders }
        }
        all.add(9, owners(&now));
        now.push(Holder { app: NO_APP, slot: 0 });
        all.add_holder(9, owners(&now));
        let found = |all: &SocketGroups| {
            let claim = ClaimKey { id: 1, port: port(80) };
            [all.in_transit_from(4).collect(), all.in_transit_with(claim).collect::<Vec<_>>()]
        };
        assert_eq!(found(&all), [[9], [9]]);
        all.remove(9, owners(&now));
        now.remove(0);
        all.add(9, owners(&now));
        assert_eq!(found(&all), [[9], [9]], "the sender has closed it");
        now.push(Holder { app: 5, slot: 0 });
        all.add_holder(9, owners(&now));
        let apps: Vec<_> = all.joined_by(ClaimKey { id: 1, port: port(80) }, true).collect();
        assert_eq!(apps, [5], "a holder stands before the origin");
        all.remove(9, owners(&now));
        assert!(found(&all).iter().all(Vec::is_empty));
        assert!(all.in_transit.is_empty());
    }
}
