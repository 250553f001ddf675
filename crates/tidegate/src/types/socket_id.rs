//! Identifiers of sockets and poll sets, and maps keyed by them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use tidegate_stack::{Event, TcpId, TcpListenerId, UdpId};

/// Identifier of a poll set ([`crate::Poll`]). Small, because every registration holds it.
pub(crate) type PollSetId = u32;

/// Source that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SocketId {
    Udp(UdpId),
    Listener(TcpListenerId),
    Stream(TcpId),
    /// A poll set.
    Poll(PollSetId),
}

/// Hash map keyed by socket.
pub(crate) type SocketMap<V> = HashMap<SocketId, V, BuildHasherDefault<IdHasher>>;

/// Fast hash for handles that the stack assigns: no peer or application can choose handles that
/// collide.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl IdHasher {
    fn add(&mut self, word: u64) {
        // Multiplier of rustc's FxHash.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        // Hash tables use the highest and the lowest bits.
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.add(byte.into()));
    }

    fn write_u32(&mut self, word: u32) {
        self.add(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }

    fn write_isize(&mut self, word: isize) {
        self.add(word as u64);
    }
}

impl SocketId {
    /// Socket that an event concerns.
    pub(crate) fn of_event(event: Event) -> Option<Self> {
        match event {
            Event::UdpReadable(id) | Event::UdpError(id) => Some(Self::Udp(id)),
            Event::TcpReadable(id) | Event::TcpWritable(id) => Some(Self::Stream(id)),
            Event::TcpAcceptable(id) => Some(Self::Listener(id)),
            _ => None,
        }
    }
}
