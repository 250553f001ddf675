//! Table of all application sockets, and its index by the stack's socket IDs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tidegate_device::sharded::LocalPort;
use tidegate_engine::PortClaim;
use tidegate_stack::{Event, TcpId, TcpListenerId, UdpId};

use super::AppSocket;
use super::groups::{AppGroups, ClaimKey, Owners, SocketGroups};
use crate::daemon::ids::{AppNumber, Holder, SocketKey, StackSocketId};

/// Sockets of all applications, by key.
#[derive(Default)]
pub(in crate::daemon) struct SocketTable {
    slots: Vec<Option<Box<AppSocket>>>,
    free_keys: Vec<SocketKey>,
    /// Counts of the owners of all sockets.
    groups: SocketGroups,
}

fn claim_id(claim: &Arc<PortClaim>) -> usize {
    Arc::as_ptr(claim).addr()
}

impl AppSocket {
    fn claim_key(&self) -> Option<ClaimKey> {
        let claim = self.claim.as_ref()?;
        Some(ClaimKey { id: claim_id(claim), port: claim.local_port() })
    }

    fn owners(&self) -> Owners<'_> {
        Owners { claim: self.claim_key(), origin: self.origin.app, holders: &self.holders }
    }
}

impl SocketTable {
    pub(in crate::daemon) fn insert(&mut self, socket: AppSocket) -> SocketKey {
        self.insert_boxed(Box::new(socket))
    }

    /// Like [`SocketTable::insert`], for a socket from another core.
    pub(in crate::daemon) fn insert_boxed(&mut self, socket: Box<AppSocket>) -> SocketKey {
        let key = self.free_keys.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as SocketKey
        });
        self.groups.add(key, socket.owners());
        self.slots[key as usize] = Some(socket);
        key
    }

    /// Restores the table with the same keys.
    pub(in crate::daemon) fn restore(sockets: Vec<Option<AppSocket>>) -> Self {
        let is_free = |(key, socket): (usize, &Option<AppSocket>)| {
            socket.is_none().then_some(key as SocketKey)
        };
        let free_keys = sockets.iter().enumerate().filter_map(is_free).collect();
        let slots = sockets.into_iter().map(|socket| socket.map(Box::new)).collect();
        let mut table = Self { slots, free_keys, groups: SocketGroups::default() };
        for (key, socket) in (0..).zip(&table.slots) {
            socket.iter().for_each(|socket| table.groups.add(key, socket.owners()));
        }
        table
    }

    /// All slots, in the order of their keys.
    pub(in crate::daemon) fn all(&self) -> impl Iterator<Item = Option<&AppSocket>> {
        self.slots.iter().map(Option::as_deref)
    }

    /// All sockets with their keys.
    pub(in crate::daemon) fn entries(&self) -> impl Iterator<Item = (SocketKey, &AppSocket)> {
        let all = self.slots.iter().enumerate();
        all.filter_map(|(key, socket)| Some((key as SocketKey, socket.as_deref()?)))
    }

    /// Keys of all sockets.
    pub(in crate::daemon) fn keys(&self) -> Vec<SocketKey> {
        self.entries().map(|(key, _)| key).collect()
    }

    pub(in crate::daemon) fn get(&self, key: SocketKey) -> Option<&AppSocket> {
        self.slots.get(key as usize)?.as_deref()
    }

    pub(in crate::daemon) fn get_mut(&mut self, key: SocketKey) -> Option<&mut AppSocket> {
        self.slots.get_mut(key as usize)?.as_deref_mut()
    }

    pub(in crate::daemon) fn remove(&mut self, key: SocketKey) -> Option<Box<AppSocket>> {
        let socket = self.slots.get_mut(key as usize)?.take()?;
        self.groups.remove(key, socket.owners());
        self.free_keys.push(key);
        Some(socket)
    }

    /// Number of sockets.
    pub(in crate::daemon) fn len(&self) -> usize {
        self.slots.len() - self.free_keys.len()
    }

    /// Sets the claim of a socket.
    pub(in crate::daemon) fn set_claim(&mut self, key: SocketKey, claim: Option<Arc<PortClaim>>) {
        let Some(socket) = self.slots.get_mut(key as usize).and_then(Option::as_mut) else {
            return;
        };
        self.groups.remove(key, socket.owners());
        socket.claim = claim;
        self.groups.add(key, socket.owners());
    }

    /// Adds a holder of a socket.
    pub(in crate::daemon) fn add_holder(&mut self, key: SocketKey, holder: Holder) {
        if let Some(socket) = self.slots.get_mut(key as usize).and_then(Option::as_mut) {
            socket.add_holder(holder);
            self.groups.add_holder(key, socket.owners());
        }
    }

    /// Removes `app` from the holders of a socket; returns its entry.
    pub(in crate::daemon) fn remove_holder(
        &mut self,
        key: SocketKey,
        app: AppNumber,
    ) -> Option<Holder> {
        let socket = self.slots.get_mut(key as usize)?.as_mut()?;
        self.groups.remove(key, socket.owners());
        let removed = socket.remove_holder(app);
        self.groups.add(key, socket.owners());
        removed
    }

    /// True if a socket refers to this application, live or not.
    pub(in crate::daemon) fn refers_to(&self, app: AppNumber) -> bool {
        self.groups.refers_to(app)
    }

    /// True if a socket has this claim.
    pub(in crate::daemon) fn has_claim(&self, claim: &Arc<PortClaim>) -> bool {
        self.groups.has_claim(claim_id(claim))
    }

    /// True if a socket has this local port.
    pub(in crate::daemon) fn has_port(&self, port: LocalPort) -> bool {
        self.groups.has_port(port)
    }

    /// Local ports of all sockets.
    pub(in crate::daemon) fn ports(&self) -> impl Iterator<Item = LocalPort> {
        self.groups.ports()
    }

    /// Groups of `count` applications that must be on one core, as far as they are live.
    pub(in crate::daemon) fn app_groups(
        &self,
        count: usize,
        is_live: impl Fn(AppNumber) -> bool,
        can_be_shared: impl Fn(LocalPort) -> bool,
    ) -> AppGroups {
        self.groups.of_applications(count, is_live, can_be_shared)
    }

    /// Applications that a socket keeps on its core, whether they are live or not.
    pub(in crate::daemon) fn applications_of(
        &self,
        key: SocketKey,
        can_be_shared: impl Fn(LocalPort) -> bool,
    ) -> Vec<AppNumber> {
        let Some(socket) = self.get(key) else { return Vec::new() };
        let of_claim = socket
            .claim_key()
            .into_iter()
            .flat_map(|claim| self.groups.joined_by(claim, can_be_shared(claim.port)));
        let holders = socket.holders.iter().map(|holder| holder.app);
        holders.chain([socket.origin.app]).chain(of_claim).collect()
    }

    /// Sockets and local ports that leave with the sockets `held` by the applications `apps`, a
    /// whole number of groups: also the sockets in transit that they have sent, or on their ports.
    pub(in crate::daemon) fn leaving_with(
        &self,
        apps: &[AppNumber],
        held: impl Iterator<Item = SocketKey>,
        can_be_shared: impl Fn(LocalPort) -> bool,
    ) -> (Vec<SocketKey>, Vec<LocalPort>) {
        let sent = apps.iter().flat_map(|&app| self.groups.in_transit_from(app));
        let mut keys: HashSet<SocketKey> = held.chain(sent).collect();
        self.groups.count_steps(keys.len());
        let claims = keys.iter().filter_map(|&key| self.get(key)?.claim_key());
        let mut claims: HashSet<ClaimKey> = claims.collect();
        let ports: HashSet<LocalPort> = claims.iter().map(|claim| claim.port).collect();
        for &port in ports.iter().filter(|&&port| !can_be_shared(port)) {
            claims.extend(self.groups.claims_on(port));
        }
        self.groups.count_steps(claims.len());
        keys.extend(claims.iter().flat_map(|&claim| self.groups.in_transit_with(claim)));
        (keys.into_iter().collect(), ports.into_iter().collect())
    }

    /// Work done since the last call to find groups, and what leaves.
    #[cfg(test)]
    pub(in crate::daemon) fn take_steps(&self) -> usize {
        self.groups.take_steps()
    }
}

/// Keys of the application sockets by the stack's socket IDs.
#[derive(Default)]
pub(in crate::daemon) struct SocketIndex {
    udp: HashMap<UdpId, SocketKey>,
    listeners: HashMap<TcpListenerId, SocketKey>,
    /// By the slots of connections, which are small numbers.
    connections: Vec<Option<(TcpId, SocketKey)>>,
}

impl SocketIndex {
    pub(in crate::daemon) fn insert(&mut self, id: StackSocketId, key: SocketKey) {
        match id {
            StackSocketId::Udp(id) => {
                self.udp.insert(id, key);
            }
            StackSocketId::Listener(id) => {
                self.listeners.insert(id, key);
            }
            StackSocketId::Stream(id) => {
                let place = id.slot();
                if place >= self.connections.len() {
                    self.connections.resize(place + 1, None);
                }
                self.connections[place] = Some((id, key));
            }
        }
    }

    pub(in crate::daemon) fn remove(&mut self, id: StackSocketId) {
        match id {
            StackSocketId::Udp(id) => {
                self.udp.remove(&id);
            }
            StackSocketId::Listener(id) => {
                self.listeners.remove(&id);
            }
            StackSocketId::Stream(id) => {
                if let Some(slot) = self.connections.get_mut(id.slot())
                    && slot.is_some_and(|(same, _)| same == id)
                {
                    *slot = None;
                }
            }
        }
    }

    /// Key of the socket that an event concerns.
    pub(in crate::daemon) fn of_event(&self, event: Event) -> Option<SocketKey> {
        match event {
            Event::UdpReadable(id) | Event::UdpError(id) => self.udp.get(&id).copied(),
            Event::TcpAcceptable(id) => self.listeners.get(&id).copied(),
            Event::TcpReadable(id) | Event::TcpWritable(id) => {
                let (same, key) = (*self.connections.get(id.slot())?)?;
                (same == id).then_some(key)
            }
            _ => None,
        }
    }
}
