//! Listeners: their table, and their SYN and accept queues (RFC 9293 section 3.10.7.2).
//!
//! Several listeners may share an address (`SO_REUSEPORT`), each with its own queues.

mod cookie;
mod passive_open;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;
use std::sync::Arc;

use super::buffers::TcpShared;
use super::segment::FourTuple;
use super::socket::{TcpError, TcpListenerId, TcpOptions};
use crate::ports::PortGroupsHandle;
use crate::random::HashKey;
use crate::{RestoreError, Transport};

/// Listening socket.
pub(crate) struct Listener {
    pub(crate) local: SocketAddr,
    pub(crate) options: Arc<TcpOptions>,
    backlog: usize,
    /// Accept queue: slot indices of connections that are established and not accepted.
    accept_queue: VecDeque<u32>,
    /// Length of the SYN queue.
    pub(crate) half_open: usize,
    /// The application was notified and has not taken the event yet.
    pub(crate) notified: bool,
}

impl Listener {
    /// True when the accept queue is full.
    pub(crate) fn is_full(&self) -> bool {
        self.accept_queue.len() >= self.backlog
    }

    pub(crate) fn push(&mut self, index: u32) {
        self.accept_queue.push_back(index);
    }

    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.accept_queue.pop_front()
    }

    /// Iterates over the accept queue, oldest connection first.
    pub(crate) fn queued(&self) -> impl Iterator<Item = u32> + '_ {
        self.accept_queue.iter().copied()
    }

    pub(crate) fn accept_queue_len(&self) -> usize {
        self.accept_queue.len()
    }

    /// Replaces the indices in the accept queue by those of another table; drops the unmapped ones.
    pub(crate) fn remap_queued(&mut self, new_index: impl FnMut(u32) -> Option<u32>) {
        let queue = std::mem::take(&mut self.accept_queue);
        self.accept_queue = queue.into_iter().filter_map(new_index).collect();
    }
}

/// Snapshot of a [`Listener`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct ListenerSnapshot {
    local: SocketAddr,
    options: TcpOptions,
    backlog: u64,
    accept_queue: Vec<u32>,
}

/// Snapshot of a slot: its generation and its listener, if any.
pub(crate) type ListenerSlotSnapshot = (NonZeroU32, Option<ListenerSnapshot>);

/// Table of listeners.
pub(crate) struct Listeners {
    slots: Vec<(NonZeroU32, Option<Listener>)>,
    free: Vec<u32>,
    /// Listeners of each address: a group when they share the port.
    by_address: HashMap<SocketAddr, Vec<u32>, HashKey>,
    limit: usize,
    /// Observer of the sockets that share their port with other stacks.
    port_groups: PortGroupsHandle,
}

impl Listeners {
    pub(crate) fn new(key: HashKey, limit: usize) -> Self {
        let by_address = HashMap::with_hasher(key);
        let port_groups = PortGroupsHandle::default();
        Self { slots: Vec::new(), free: Vec::new(), by_address, limit, port_groups }
    }

    /// Sets the observer, see [`crate::Stack::set_port_groups`].
    pub(super) fn set_port_groups(&mut self, port_groups: PortGroupsHandle) {
        self.port_groups = port_groups;
        self.slots
            .iter()
            .filter_map(|(_, there)| there.as_ref())
            .for_each(|l| self.notify_joined(l));
    }

    /// Notifies the observer of a listener that shares its port.
    fn notify_joined(&self, listener: &Listener) {
        if listener.options.reuse_port {
            for key in Self::keys(listener.local, &listener.options) {
                let owner = listener.options.owner;
                self.port_groups.notify(|groups| groups.join(Transport::Tcp, key, owner));
            }
        }
    }

    /// Takes a snapshot, slot by slot.
    pub(crate) fn save(&self) -> Vec<ListenerSlotSnapshot> {
        let save = |listener: &Listener| ListenerSnapshot {
            local: listener.local,
            options: *listener.options,
            backlog: listener.backlog as u64,
            accept_queue: listener.accept_queue.iter().copied().collect(),
        };
        let slot_snapshot =
            |slot: &(NonZeroU32, Option<Listener>)| (slot.0, slot.1.as_ref().map(save));
        self.slots.iter().map(slot_snapshot).collect()
    }

    /// Adds the next slot, with the listener of the snapshot. The accept queue is checked
    /// elsewhere.
    ///
    /// # Errors
    /// When the listener's port is 0, or its address conflicts with that of another listener.
    pub(crate) fn add_slot(
        &mut self,
        (generation, saved): ListenerSlotSnapshot,
        shared: &mut TcpShared,
    ) -> Result<(), RestoreError> {
        let index = self.slots.len() as u32;
        self.slots.push((generation, None));
        let Some(saved) = saved else {
            self.free.push(index);
            return Ok(());
        };
        let options = shared.intern_options(saved.options);
        let local = SocketAddr::new(saved.local.ip(), saved.local.port());
        let is_free = Self::keys(local, &options).all(|key| self.can_bind(key, &options));
        if local.port() == 0 || !is_free {
            return Err(RestoreError::Damaged(
                "a listener has port 0 or the address of another listener",
            ));
        }
        for key in Self::keys(local, &options) {
            self.by_address.entry(key).or_default().push(index);
        }
        self.slots[index as usize].1 = Some(Listener {
            local,
            options,
            backlog: usize::try_from(saved.backlog).unwrap_or(usize::MAX).max(1),
            accept_queue: saved.accept_queue.into(),
            half_open: 0,
            notified: false,
        });
        Ok(())
    }

    /// Handles of all listeners.
    pub(crate) fn ids(&self) -> impl Iterator<Item = TcpListenerId> {
        let slots = (0_u32..).zip(&self.slots);
        slots.filter_map(|(index, (generation, listener))| {
            listener.as_ref().map(|_| TcpListenerId { index, generation: *generation })
        })
    }

    /// Number of slots that were ever used.
    pub(crate) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Most listeners that the table may hold.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn at(&self, index: u32) -> Option<&Listener> {
        self.slots.get(index as usize)?.1.as_ref()
    }

    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut Listener> {
        self.slots.get_mut(index as usize)?.1.as_mut()
    }

    pub(crate) fn id(&self, index: u32) -> TcpListenerId {
        let generation = self.slots.get(index as usize).map_or(NonZeroU32::MIN, |slot| slot.0);
        TcpListenerId { index, generation }
    }

    pub(crate) fn get(&self, id: TcpListenerId) -> Option<&Listener> {
        self.at(id.index).filter(|_| self.id(id.index) == id)
    }

    pub(crate) fn get_mut(&mut self, id: TcpListenerId) -> Option<&mut Listener> {
        if self.id(id.index) == id { self.at_mut(id.index) } else { None }
    }

    /// Returns the listeners of `local`, or else those of the unspecified address and its port.
    fn group(&self, local: SocketAddr) -> Option<&[u32]> {
        let any: IpAddr = match local {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let exact = self.by_address.get(&local);
        let group = exact.or_else(|| self.by_address.get(&SocketAddr::new(any, local.port())));
        group.map(Vec::as_slice)
    }

    /// Returns the listener for a segment with this four-tuple. Within a group the hash of the
    /// four-tuple selects a listener; full listeners are skipped if any other has space.
    pub(crate) fn find(&self, tuple: &FourTuple) -> Option<u32> {
        let group = self.group(tuple.local())?;
        if let [only] = group {
            return Some(*only);
        }
        let start = self.by_address.hasher().hash_one(tuple) as usize % group.len().max(1);
        let (before, behind) = group.split_at_checked(start)?;
        let mut in_turn = behind.iter().chain(before).copied();
        let has_space = |&index: &u32| self.at(index).is_some_and(|listener| !listener.is_full());
        in_turn.clone().find(has_space).or_else(|| in_turn.next())
    }

    /// True when a listener has this address, or its port on the unspecified address.
    pub(crate) fn has_port(&self, local: SocketAddr) -> bool {
        self.group(local).is_some()
    }

    /// True when another listener may bind an address: the address is free, or all its listeners
    /// and the new one share it (`reuse_port`) and have the same owner.
    fn can_bind(&self, address: SocketAddr, options: &TcpOptions) -> bool {
        let shares = |&index: &u32| {
            let other = self.at(index).map(|other| &other.options);
            other.is_some_and(|other| other.reuse_port && other.owner == options.owner)
        };
        // The listeners of an address share it with one another, on the same terms.
        let one = self.by_address.get(&address).and_then(|group| group.first());
        one.is_none_or(|one| options.reuse_port && shares(one))
    }

    /// Returns the addresses under which a listener is found.
    fn keys(local: SocketAddr, options: &TcpOptions) -> impl Iterator<Item = SocketAddr> + use<> {
        let is_dual = options.dual_stack && local.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let v4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), local.port());
        [Some(local), is_dual.then_some(v4)].into_iter().flatten()
    }

    /// Adds a listener on `local`.
    ///
    /// # Errors
    /// [`TcpError::AddressInUse`]; [`TcpError::TooMany`] at the limit.
    pub(crate) fn add(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: Arc<TcpOptions>,
    ) -> Result<TcpListenerId, TcpError> {
        if !Self::keys(local, &options).all(|key| self.can_bind(key, &options)) {
            return Err(TcpError::AddressInUse(local));
        }
        if !self.has_space_for(1) {
            return Err(TcpError::TooMany("listeners"));
        }
        Ok(self.insert(Listener {
            local,
            options,
            backlog: backlog.max(1),
            accept_queue: VecDeque::new(),
            half_open: 0,
            notified: false,
        }))
    }

    /// True when `more` listeners fit within the limit.
    pub(crate) fn has_space_for(&self, more: usize) -> bool {
        self.slots.len() - self.free.len() + more <= self.limit
    }

    /// True when a listener conflicts with none in the table.
    pub(crate) fn can_insert(&self, listener: &Listener) -> bool {
        let options = &listener.options;
        Self::keys(listener.local, options).all(|key| self.can_bind(key, options))
    }

    /// Inserts a listener for which [`Listeners::can_insert`] is true.
    pub(crate) fn insert(&mut self, listener: Listener) -> TcpListenerId {
        self.notify_joined(&listener);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((NonZeroU32::MIN, None));
            (self.slots.len() - 1) as u32
        });
        for key in Self::keys(listener.local, &listener.options) {
            self.by_address.entry(key).or_default().push(index);
        }
        self.slots[index as usize].1 = Some(listener);
        self.id(index)
    }

    pub(crate) fn remove(&mut self, id: TcpListenerId) -> Option<Listener> {
        self.get(id)?;
        let slot = &mut self.slots[id.index as usize];
        let listener = slot.1.take()?;
        slot.0 = slot.0.checked_add(1).unwrap_or(NonZeroU32::MIN);
        self.free.push(id.index);
        for key in Self::keys(listener.local, &listener.options) {
            if listener.options.reuse_port {
                let owner = listener.options.owner;
                self.port_groups.notify(|groups| groups.leave(Transport::Tcp, key, owner));
            }
            if let Entry::Occupied(mut group) = self.by_address.entry(key) {
                group.get_mut().retain(|&index| index != id.index);
                if group.get().is_empty() {
                    group.remove();
                }
            }
        }
        Some(listener)
    }
}
