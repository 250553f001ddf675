//! Applications that go from one core to another, with all that they have.
//!
//! Those that share a socket go together, and those that share a local port, unless that
//! may be on several cores.

use std::collections::HashMap;
use std::sync::Arc;

use tidegate_engine::Claim;
use tidegate_port::spread::{Crossing, LocalPort};
use tidegate_stack::{Moved, TakenSockets, TcpId};

use super::application::Application;
use super::names::{AppNumber, SocketId, SocketKey};
use super::passages::{Passage, Shown};
use super::socket::Socket;

/// Applications on their way, with all that they have.
pub(super) struct Family {
    /// By the numbers that they had.
    pub(super) apps: Vec<(AppNumber, Box<Application>)>,
    /// By the numbers that they had.
    pub(super) sockets: Vec<(SocketKey, Box<Socket>)>,
    pub(super) stack: TakenSockets,
    /// Their ports, and how many claims of each.
    pub(super) ports: Vec<(LocalPort, u32)>,
    /// Closed connections that have not ended yet.
    pub(super) ending: Vec<(TcpId, Arc<Claim>)>,
    /// Sockets of theirs that are on their way to somebody.
    pub(super) passages: Vec<(Shown, Passage)>,
    /// The core that they came from.
    pub(super) from: usize,
    /// They were sent back.
    pub(super) is_back: bool,
}

/// Applications that must be on one core, and what they have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kin {
    pub(super) apps: Vec<AppNumber>,
    pub(super) sockets: Vec<SocketKey>,
    pub(super) ports: Vec<LocalPort>,
}

/// What sockets of one core have in common that must stay together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Tie {
    /// A port that is one core's.
    Port(LocalPort),
    /// A claim of a port that several cores may have: connections go with the listener
    /// that they came from, and with no other.
    Claim(*const Claim, LocalPort),
}

impl Tie {
    pub(super) fn port(self) -> LocalPort {
        match self {
            Self::Port(port) | Self::Claim(_, port) => port,
        }
    }
}

/// Finds out what ties sockets together.
pub(super) struct Ties<'c> {
    crossing: Option<&'c Crossing>,
    /// Ports that were asked for already.
    can_be_shared: HashMap<LocalPort, bool>,
}

impl<'c> Ties<'c> {
    pub(super) fn new(crossing: Option<&'c Crossing>) -> Self {
        Self { crossing, can_be_shared: HashMap::new() }
    }

    pub(super) fn of(&mut self, socket: &Socket) -> Option<Tie> {
        let claim = socket.claim.as_ref()?;
        let port = claim.local_port();
        let ask = || self.crossing.is_some_and(|crossing| crossing.can_be_shared(port));
        let is_shared = claim.is_shared() && *self.can_be_shared.entry(port).or_insert_with(ask);
        Some(if is_shared { Tie::Claim(Arc::as_ptr(claim), port) } else { Tie::Port(port) })
    }
}

/// Who goes with whom.
pub(super) struct Groups(Vec<AppNumber>);

impl Groups {
    pub(super) fn new(apps: usize) -> Self {
        Self((0..apps as AppNumber).collect())
    }

    /// The number of the group of an application.
    pub(super) fn of(&self, app: AppNumber) -> AppNumber {
        let mut at = app;
        while self.0[at as usize] != at {
            at = self.0[at as usize];
        }
        at
    }

    pub(super) fn join(&mut self, one: AppNumber, other: AppNumber) {
        let (one, other) = (self.of(one), self.of(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

/// What the stack's sockets are called in the other stack.
#[derive(Default)]
pub(super) struct Names(HashMap<SocketId, SocketId>);

impl Names {
    pub(super) fn new(moved: Moved) -> Self {
        let udp = moved.udp.into_iter().map(|(a, b)| (SocketId::Udp(a), SocketId::Udp(b)));
        let listeners = moved.listeners.into_iter();
        let listeners = listeners.map(|(a, b)| (SocketId::Listener(a), SocketId::Listener(b)));
        let streams = moved.connections.into_iter();
        let streams = streams.map(|(a, b)| (SocketId::Stream(a), SocketId::Stream(b)));
        Self(udp.chain(listeners).chain(streams).collect())
    }

    pub(super) fn of(&self, id: SocketId) -> Option<SocketId> {
        self.0.get(&id).copied()
    }

    pub(super) fn connection(&self, id: TcpId) -> Option<TcpId> {
        match self.of(SocketId::Stream(id))? {
            SocketId::Stream(id) => Some(id),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_joined_whoever_comes_first() {
        let mut groups = Groups::new(5);
        groups.join(4, 3);
        groups.join(1, 2);
        groups.join(2, 4);
        let names: Vec<_> = (0..5).map(|app| groups.of(app)).collect();
        assert_eq!(names, [0, 1, 1, 1, 1]);
    }
}
