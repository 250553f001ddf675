//! Sets of applications that migrate from one core to another, with all they hold.
//!
//! Applications that share a socket migrate together, and so do applications that share a
//! local port, unless the port may be on several cores.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tidegate_device::sharded::{FlowSteering, LocalPort};
use tidegate_engine::PortClaim;

use crate::daemon::core::NetworkCore;
use crate::daemon::ids::{AppNumber, SocketKey};
use crate::daemon::socket::AppSocket;

/// Applications that must be on one core, and what they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MigrationSet {
    pub(in crate::daemon) apps: Vec<AppNumber>,
    pub(in crate::daemon) sockets: Vec<SocketKey>,
    pub(in crate::daemon) ports: Vec<LocalPort>,
}

/// Constraint that keeps sockets on one core together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Constraint {
    /// Port that belongs to a single core.
    Port(LocalPort),
    /// Claim of a port that several cores may have: connections stay with the listener that
    /// accepted them.
    Claim(*const PortClaim, LocalPort),
}

impl Constraint {
    fn port(self) -> LocalPort {
        match self {
            Self::Port(port) | Self::Claim(_, port) => port,
        }
    }
}

/// Determines the constraints of sockets.
struct Constraints<'c> {
    flow_steering: Option<&'c FlowSteering>,
    /// Answers of the flow steering so far.
    can_be_shared: HashMap<LocalPort, bool>,
}

impl<'c> Constraints<'c> {
    fn new(flow_steering: Option<&'c FlowSteering>) -> Self {
        Self { flow_steering, can_be_shared: HashMap::new() }
    }

    fn of(&mut self, socket: &AppSocket) -> Option<Constraint> {
        let claim = socket.claim.as_ref()?;
        let port = claim.local_port();
        let ask =
            || self.flow_steering.is_some_and(|flow_steering| flow_steering.can_be_shared(port));
        let is_shared = claim.is_shared() && *self.can_be_shared.entry(port).or_insert_with(ask);
        Some(if is_shared {
            Constraint::Claim(Arc::as_ptr(claim), port)
        } else {
            Constraint::Port(port)
        })
    }
}

/// Groups of applications that migrate together (union-find).
struct AppGroups(Vec<AppNumber>);

impl AppGroups {
    fn new(apps: usize) -> Self {
        Self((0..apps as AppNumber).collect())
    }

    /// Number of an application's group.
    fn group_of(&self, app: AppNumber) -> AppNumber {
        let mut root = app;
        while self.0[root as usize] != root {
            root = self.0[root as usize];
        }
        root
    }

    fn merge(&mut self, one: AppNumber, other: AppNumber) {
        let (one, other) = (self.group_of(one), self.group_of(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

impl NetworkCore {
    /// Number of sets of applications that can migrate independently.
    pub(in crate::daemon) fn count_migration_sets(&self) -> usize {
        self.migration_sets().len()
    }

    /// Sets of applications that can migrate independently, with all sockets.
    pub(super) fn migration_sets(&self) -> Vec<MigrationSet> {
        let mut groups = AppGroups::new(self.apps.len());
        let (mut constraints, mut ports) = (self.constraints(), HashMap::new());
        for (_, socket) in self.server.sockets.entries() {
            let Some(first) = self.involved_applications(socket).next() else { continue };
            self.involved_applications(socket).for_each(|other| groups.merge(first, other));
            if let Some(constraint) = constraints.of(socket) {
                groups.merge(first, *ports.entry(constraint).or_insert(first));
            }
        }
        let mut sets: HashMap<AppNumber, MigrationSet> = HashMap::new();
        let live = self.apps.iter().enumerate().filter(|(_, app)| app.is_some());
        for (number, _) in live {
            let number = number as AppNumber;
            sets.entry(groups.group_of(number)).or_default().apps.push(number);
        }
        for (key, socket) in self.server.sockets.entries() {
            // A socket in transit may share its port with other applications only.
            let port =
                constraints.of(socket).and_then(|constraint| ports.get(&constraint).copied());
            let first = self.involved_applications(socket).next().or(port);
            let set = first.and_then(|first| sets.get_mut(&groups.group_of(first)));
            set.into_iter().for_each(|set| set.sockets.push(key));
        }
        let mut seen = HashSet::new();
        for (constraint, app) in ports {
            let (group, port) = (groups.group_of(app), constraint.port());
            if seen.insert((group, port)) {
                sets.entry(group).and_modify(|set| set.ports.push(port));
            }
        }
        sets.into_values().collect()
    }

    /// Migration set of a socket.
    pub(super) fn migration_set_of(&self, key: SocketKey) -> MigrationSet {
        let set = self.migration_sets().into_iter().find(|set| set.sockets.contains(&key));
        set.unwrap_or_else(|| {
            // The socket is in transit, and its port has no other sockets than such.
            let mut constraints = self.constraints();
            let own = self.server.sockets.get(key).and_then(|socket| constraints.of(socket));
            let mut is_same = |&(other, socket): &(SocketKey, &AppSocket)| {
                other == key || own.is_some() && constraints.of(socket) == own
            };
            let all = self.server.sockets.entries().filter(|it| is_same(it));
            let sockets = all.map(|(other, _)| other).collect();
            MigrationSet {
                apps: Vec::new(),
                sockets,
                ports: own.map(Constraint::port).into_iter().collect(),
            }
        })
    }

    fn constraints(&self) -> Constraints<'_> {
        Constraints::new(self.cores.flow_steering())
    }

    /// Holders and origin of a socket, as far as they are on this core.
    fn involved_applications<'a>(
        &'a self,
        socket: &'a AppSocket,
    ) -> impl Iterator<Item = AppNumber> + 'a {
        let all = socket.holders.iter().chain([&socket.origin]).map(|owner| owner.app);
        all.filter(|&app| matches!(self.apps.get(app as usize), Some(Some(_))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_groups_in_any_order() {
        let mut groups = AppGroups::new(5);
        groups.merge(4, 3);
        groups.merge(1, 2);
        groups.merge(2, 4);
        let names: Vec<_> = (0..5).map(|app| groups.group_of(app)).collect();
        assert_eq!(names, [0, 1, 1, 1, 1]);
    }
}
