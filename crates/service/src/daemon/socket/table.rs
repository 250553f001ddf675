//! Table of all application sockets, and its index by the stack's socket IDs.

use std::collections::HashMap;

use tidegate_stack::{Event, TcpId, TcpListenerId, UdpId};

use super::AppSocket;
use crate::daemon::ids::{SocketKey, StackSocketId};

/// Sockets of all applications, by key.
#[derive(Default)]
pub(in crate::daemon) struct SocketTable {
    slots: Vec<Option<Box<AppSocket>>>,
    free_keys: Vec<SocketKey>,
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
        self.slots[key as usize] = Some(socket);
        key
    }

    /// Restores the table with the same keys.
    pub(in crate::daemon) fn restore(sockets: Vec<Option<AppSocket>>) -> Self {
        let is_free = |(key, socket): (usize, &Option<AppSocket>)| {
            socket.is_none().then_some(key as SocketKey)
        };
        let free_keys = sockets.iter().enumerate().filter_map(is_free).collect();
        Self { slots: sockets.into_iter().map(|socket| socket.map(Box::new)).collect(), free_keys }
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
        self.free_keys.push(key);
        Some(socket)
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
