//! All sockets of applications, and which of the stack's they are.

use std::collections::HashMap;

use tidegate_stack::{Event, TcpId, TcpListenerId, UdpId};

use super::names::{SocketId, SocketKey};
use super::socket::Socket;

/// The sockets of all applications.
#[derive(Default)]
pub(super) struct Sockets {
    all: Vec<Option<Box<Socket>>>,
    free: Vec<SocketKey>,
}

impl Sockets {
    pub(super) fn insert(&mut self, socket: Socket) -> SocketKey {
        self.insert_boxed(Box::new(socket))
    }

    /// As [`Sockets::insert`], for one that was on another core.
    pub(super) fn insert_boxed(&mut self, socket: Box<Socket>) -> SocketKey {
        let key = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            (self.all.len() - 1) as SocketKey
        });
        self.all[key as usize] = Some(socket);
        key
    }

    /// The same sockets by the same numbers as they were elsewhere.
    pub(super) fn restore(sockets: Vec<Option<Socket>>) -> Self {
        let is_free =
            |(key, socket): (usize, &Option<Socket>)| socket.is_none().then_some(key as SocketKey);
        let free = sockets.iter().enumerate().filter_map(is_free).collect();
        Self { all: sockets.into_iter().map(|socket| socket.map(Box::new)).collect(), free }
    }

    /// All of them, by their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = Option<&Socket>> {
        self.all.iter().map(Option::as_deref)
    }

    /// All of them, with their numbers.
    pub(super) fn entries(&self) -> impl Iterator<Item = (SocketKey, &Socket)> {
        let all = self.all.iter().enumerate();
        all.filter_map(|(key, socket)| Some((key as SocketKey, socket.as_deref()?)))
    }

    /// The numbers of all of them.
    pub(super) fn keys(&self) -> Vec<SocketKey> {
        self.entries().map(|(key, _)| key).collect()
    }

    pub(super) fn get(&self, key: SocketKey) -> Option<&Socket> {
        self.all.get(key as usize)?.as_deref()
    }

    pub(super) fn get_mut(&mut self, key: SocketKey) -> Option<&mut Socket> {
        self.all.get_mut(key as usize)?.as_deref_mut()
    }

    pub(super) fn remove(&mut self, key: SocketKey) -> Option<Box<Socket>> {
        let socket = self.all.get_mut(key as usize)?.take()?;
        self.free.push(key);
        Some(socket)
    }
}

/// Which socket of an application's each of the stack's is.
#[derive(Default)]
pub(super) struct Owners {
    udp: HashMap<UdpId, SocketKey>,
    listeners: HashMap<TcpListenerId, SocketKey>,
    /// By the places of connections, which are small numbers.
    streams: Vec<Option<(TcpId, SocketKey)>>,
}

impl Owners {
    pub(super) fn insert(&mut self, id: SocketId, key: SocketKey) {
        match id {
            SocketId::Udp(id) => {
                self.udp.insert(id, key);
            }
            SocketId::Listener(id) => {
                self.listeners.insert(id, key);
            }
            SocketId::Stream(id) => {
                let place = id.place();
                if place >= self.streams.len() {
                    self.streams.resize(place + 1, None);
                }
                self.streams[place] = Some((id, key));
            }
        }
    }

    pub(super) fn remove(&mut self, id: SocketId) {
        match id {
            SocketId::Udp(id) => {
                self.udp.remove(&id);
            }
            SocketId::Listener(id) => {
                self.listeners.remove(&id);
            }
            SocketId::Stream(id) => {
                if let Some(slot) = self.streams.get_mut(id.place())
                    && slot.is_some_and(|(same, _)| same == id)
                {
                    *slot = None;
                }
            }
        }
    }

    /// Which socket an event concerns.
    pub(super) fn of_event(&self, event: Event) -> Option<SocketKey> {
        match event {
            Event::Readable(id) | Event::Error(id) => self.udp.get(&id).copied(),
            Event::TcpAcceptable(id) => self.listeners.get(&id).copied(),
            Event::TcpReadable(id) | Event::TcpWritable(id) => {
                let (same, key) = (*self.streams.get(id.place())?)?;
                (same == id).then_some(key)
            }
            _ => None,
        }
    }
}
