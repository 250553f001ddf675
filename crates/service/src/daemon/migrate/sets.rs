//! Sets of applications that migrate from one core to another, with all they hold.
//!
//! Applications that share a socket migrate together, and so do applications that share a
//! local port, unless the port may be on several cores.

use std::collections::HashMap;
use std::sync::Arc;

use tidegate_device::sharded::{FlowSteering, LocalPort};
use tidegate_engine::PortClaim;
use tidegate_stack::{ExtractedSockets, MigrationMap, TcpId};

use crate::daemon::application::Application;
use crate::daemon::ids::{AppNumber, SocketKey, StackSocketId};
use crate::daemon::socket::AppSocket;
use crate::daemon::transfer::table::{FdCookie, SocketTransfer};

/// Applications in migration between two cores, with all they hold.
pub(in crate::daemon) struct MigrationBatch {
    /// Applications, with their index on the previous core.
    pub(in crate::daemon) apps: Vec<(AppNumber, Box<Application>)>,
    /// Sockets, with their key on the previous core.
    pub(in crate::daemon) sockets: Vec<(SocketKey, Box<AppSocket>)>,
    pub(in crate::daemon) stack: ExtractedSockets,
    /// Local ports, with the number of claims of each.
    pub(in crate::daemon) ports: Vec<(LocalPort, u32)>,
    /// Closed connections that have not ended yet.
    pub(in crate::daemon) closing: Vec<(TcpId, Arc<PortClaim>)>,
    /// Transfers in transit of these sockets.
    pub(in crate::daemon) transfers: Vec<(FdCookie, SocketTransfer)>,
    /// Previous core.
    pub(in crate::daemon) from_core: usize,
    /// The target core has sent the batch back.
    pub(in crate::daemon) is_returned: bool,
}

/// Applications that must be on one core, and what they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::daemon) struct MigrationSet {
    pub(in crate::daemon) apps: Vec<AppNumber>,
    pub(in crate::daemon) sockets: Vec<SocketKey>,
    pub(in crate::daemon) ports: Vec<LocalPort>,
}

/// Constraint that keeps sockets on one core together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::daemon) enum Constraint {
    /// Port that belongs to a single core.
    Port(LocalPort),
    /// Claim of a port that several cores may have: connections stay with the listener that
    /// accepted them.
    Claim(*const PortClaim, LocalPort),
}

impl Constraint {
    pub(in crate::daemon) fn port(self) -> LocalPort {
        match self {
            Self::Port(port) | Self::Claim(_, port) => port,
        }
    }
}

/// Determines the constraints of sockets.
pub(in crate::daemon) struct Constraints<'c> {
    flow_steering: Option<&'c FlowSteering>,
    /// Answers of the flow steering so far.
    can_be_shared: HashMap<LocalPort, bool>,
}

impl<'c> Constraints<'c> {
    pub(in crate::daemon) fn new(flow_steering: Option<&'c FlowSteering>) -> Self {
        Self { flow_steering, can_be_shared: HashMap::new() }
    }

    pub(in crate::daemon) fn of(&mut self, socket: &AppSocket) -> Option<Constraint> {
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
pub(in crate::daemon) struct AppGroups(Vec<AppNumber>);

impl AppGroups {
    pub(in crate::daemon) fn new(apps: usize) -> Self {
        Self((0..apps as AppNumber).collect())
    }

    /// Number of an application's group.
    pub(in crate::daemon) fn group_of(&self, app: AppNumber) -> AppNumber {
        let mut root = app;
        while self.0[root as usize] != root {
            root = self.0[root as usize];
        }
        root
    }

    pub(in crate::daemon) fn merge(&mut self, one: AppNumber, other: AppNumber) {
        let (one, other) = (self.group_of(one), self.group_of(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

/// Socket IDs of one stack, mapped to the IDs in another stack.
#[derive(Default)]
pub(in crate::daemon) struct SocketIdMap(HashMap<StackSocketId, StackSocketId>);

impl SocketIdMap {
    pub(in crate::daemon) fn new(moved: MigrationMap) -> Self {
        let udp =
            moved.udp.into_iter().map(|(a, b)| (StackSocketId::Udp(a), StackSocketId::Udp(b)));
        let listeners = moved.listeners.into_iter();
        let listeners =
            listeners.map(|(a, b)| (StackSocketId::Listener(a), StackSocketId::Listener(b)));
        let streams = moved.connections.into_iter();
        let streams = streams.map(|(a, b)| (StackSocketId::Stream(a), StackSocketId::Stream(b)));
        Self(udp.chain(listeners).chain(streams).collect())
    }

    pub(in crate::daemon) fn get(&self, id: StackSocketId) -> Option<StackSocketId> {
        self.0.get(&id).copied()
    }

    pub(in crate::daemon) fn connection(&self, id: TcpId) -> Option<TcpId> {
        match self.get(StackSocketId::Stream(id))? {
            StackSocketId::Stream(id) => Some(id),
            _ => None,
        }
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
