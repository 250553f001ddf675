//! Socket IDs across two stacks.

use std::collections::HashMap;

use tidegate_stack::{MigrationMap, TcpId};

use crate::daemon::ids::StackSocketId;

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
