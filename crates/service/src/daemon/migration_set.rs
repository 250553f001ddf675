//! Sets of applications that migrate from one core to another, with all they hold.
//!
//! Applications that share a socket migrate together, and so do applications that share a
//! local port, unless the port may be on several cores.

use std::collections::HashMap;
use std::sync::Arc;

use tidegate_device::sharded::{FlowSteering, LocalPort};
use tidegate_engine::PortClaim;
use tidegate_stack::{ExtractedSockets, MigrationMap, TcpId};

use super::application::Application;
use super::ids::{AppNumber, SocketKey, StackSocketId};
use super::socket::AppSocket;
use super::transfer_table::{FdCookie, SocketTransfer};

/// Applications in migration between two cores, with all they hold.
pub(super) struct MigrationBatch {
    /// Applications, with their index on the previous core.
    pub(super) apps: Vec<(AppNumber, Box<Application>)>,
    /// Sockets, with their key on the previous core.
    pub(super) sockets: Vec<(SocketKey, Box<AppSocket>)>,
    pub(super) stack: ExtractedSockets,
    /// Local ports, with the number of claims of each.
    pub(super) ports: Vec<(LocalPort, u32)>,
    /// Closed connections that have not ended yet.
    pub(super) closing: Vec<(TcpId, Arc<PortClaim>)>,
    /// Transfers in transit of these sockets.
    pub(super) transfers: Vec<(FdCookie, SocketTransfer)>,
    /// Previous core.
    pub(super) from_core: usize,
    /// The target core has sent the batch back.
    pub(super) is_returned: bool,
}

/// Applications that must be on one core, and what they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MigrationSet {
    pub(super) apps: Vec<AppNumber>,
    pub(super) sockets: Vec<SocketKey>,
    pub(super) ports: Vec<LocalPort>,
}

/// Constraint that keeps sockets on one core together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Constraint {
    /// Port that belongs to a single core.
    Port(LocalPort),
    /// Claim of a port that several cores may have: connections stay with the listener that
    /// accepted them.
    Claim(*const PortClaim, LocalPort),
}

impl Constraint {
    pub(super) fn port(self) -> LocalPort {
        match self {
            Self::Port(port) | Self::Claim(_, port) => port,
        }
    }
}

/// Determines the constraints of sockets.
pub(super) struct Constraints<'c> {
    flow_steering: Option<&'c FlowSteering>,
    /// Answers of the flow steering so far.
    can_be_shared: HashMap<LocalPort, bool>,
}

impl<'c> Constraints<'c> {
    pub(super) fn new(flow_steering: Option<&'c FlowSteering>) -> Self {
        Self { flow_steering, can_be_shared: HashMap::new() }
    }

    pub(super) fn of(&mut self, socket: &AppSocket) -> Option<Constraint> {
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
pub(super) struct AppGroups(Vec<AppNumber>);

impl AppGroups {
    pub(super) fn new(apps: usize) -> Self {
        Self((0..apps as AppNumber).collect())
    }

    /// Number of an application's group.
    pub(super) fn group_of(&self, app: AppNumber) -> AppNumber {
        let mut root = app;
        while self.0[root as usize] != root {
            root = self.0[root as usize];
        }
        root
    }

    pub(super) fn merge(&mut self, one: AppNumber, other: AppNumber) {
        let (one, other) = (self.group_of(one), self.group_of(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

/// Socket IDs of one stack, mapped to the IDs in another stack.
#[derive(Default)]
pub(super) struct SocketIdMap(HashMap<StackSocketId, StackSocketId>);

impl SocketIdMap {
    pub(super) fn new(moved: MigrationMap) -> Self {
        let udp =
            moved.udp.into_iter().map(|(a, b)| (StackSocketId::Udp(a), StackSocketId::Udp(b)));
        let listeners = moved.listeners.into_iter();
        let listeners =
            listeners.map(|(a, b)| (StackSocketId::Listener(a), StackSocketId::Listener(b)));
        let streams = moved.connections.into_iter();
        let streams = streams.map(|(a, b)| (StackSocketId::Stream(a), StackSocketId::Stream(b)));
        Self(udp.chain(listeners).chain(streams).collect())
    }

    pub(super) fn get(&self, id: StackSocketId) -> Option<StackSocketId> {
        self.0.get(&id).copied()
    }

    pub(super) fn connection(&self, id: TcpId) -> Option<TcpId> {
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
