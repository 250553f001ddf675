//! Sockets of a ring.

use super::in_flight::OpQueue;
use crate::net::handle::Net;
use crate::net::source::Pollable;
use crate::tcp::{TcpListener, TcpStream};
use crate::types::socket_id::SocketId;
use crate::udp::UdpSocket;

/// Socket of a ring: slot index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketKey {
    pub(super) slot: u32,
    generation: u32,
}

/// Socket that a ring holds a handle of.
#[derive(Clone, Debug)]
pub enum Socket {
    /// UDP socket.
    Udp(UdpSocket),
    /// TCP listener.
    Listener(TcpListener),
    /// TCP connection.
    Stream(TcpStream),
}

impl From<UdpSocket> for Socket {
    fn from(socket: UdpSocket) -> Self {
        Self::Udp(socket)
    }
}

impl From<TcpListener> for Socket {
    fn from(listener: TcpListener) -> Self {
        Self::Listener(listener)
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        Self::Stream(stream)
    }
}

impl Socket {
    fn source(&self) -> &dyn Pollable {
        match self {
            Self::Udp(socket) => socket,
            Self::Listener(listener) => listener,
            Self::Stream(stream) => stream,
        }
    }

    pub(super) fn net(&self) -> &Net {
        self.source().net()
    }

    pub(super) fn id(&self) -> SocketId {
        self.source().id()
    }
}

/// Slot of a socket.
pub(super) struct SocketSlot {
    pub(super) socket: Socket,
    /// Operations that receive or accept, and operations that send or connect.
    pub(super) queues: [OpQueue; 2],
    /// The slot is in the list of those that wait for space.
    pub(super) waits_for_space: bool,
}

/// Sockets of a ring, by slot.
pub(super) struct SocketTable {
    slots: Vec<(u32, Option<SocketSlot>)>,
    free: Vec<u32>,
    max: usize,
}

impl SocketTable {
    pub(super) fn new(max: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), max }
    }

    /// True if there is space for another socket.
    pub(super) fn has_space(&self) -> bool {
        self.slots.len() - self.free.len() < self.max
    }

    /// Adds a socket. The caller has checked that there is space.
    pub(super) fn insert(&mut self, socket: Socket) -> SocketKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let (generation, slot) = &mut self.slots[index as usize];
        *slot = Some(SocketSlot { socket, queues: Default::default(), waits_for_space: false });
        SocketKey { slot: index, generation: *generation }
    }

    pub(super) fn get(&self, key: SocketKey) -> Option<&SocketSlot> {
        let (generation, slot) = self.slots.get(key.slot as usize)?;
        slot.as_ref().filter(|_| *generation == key.generation)
    }

    /// Slot by index, whatever its generation.
    pub(super) fn slot_mut(&mut self, index: u32) -> Option<&mut SocketSlot> {
        self.slots.get_mut(index as usize)?.1.as_mut()
    }

    /// Key of the socket in a slot.
    pub(super) fn key_of(&self, index: u32) -> Option<SocketKey> {
        let (generation, slot) = self.slots.get(index as usize)?;
        slot.as_ref().map(|_| SocketKey { slot: index, generation: *generation })
    }

    pub(super) fn remove(&mut self, key: SocketKey) -> Option<Socket> {
        self.get(key)?;
        let (generation, slot) = &mut self.slots[key.slot as usize];
        *generation = generation.wrapping_add(1);
        self.free.push(key.slot);
        slot.take().map(|slot| slot.socket)
    }
}
