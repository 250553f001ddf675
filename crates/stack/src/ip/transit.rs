//! Packets between the interfaces of a router.

use std::collections::VecDeque;

use tidegate_memory::{Arena, Frame};

use crate::ip::packet::{ForwardMeta, Packet};

/// Packet in transit from one interface of a router to another.
#[must_use = "a packet that is neither forwarded nor discarded leaks its frame"]
#[derive(Debug)]
pub struct TransitPacket {
    /// IP packet without link header and padding.
    pub(crate) frame: Frame,
    pub(crate) forward_meta: ForwardMeta,
    /// Index of the ingress interface.
    pub(crate) ingress: usize,
}

impl TransitPacket {
    /// IP packet as received: the time to live is not decremented yet.
    pub fn bytes<'a>(&self, arena: &'a Arena) -> &'a [u8] {
        arena.bytes(&self.frame)
    }

    /// Index of the ingress interface.
    pub fn ingress(&self) -> usize {
        self.ingress
    }
}

/// Packet that the router itself originates; any interface may send it.
pub(crate) struct LocalPacket {
    pub(crate) packet: Packet,
    pub(crate) payload: Vec<u8>,
}

/// Queues of one router interface with packets for the other interfaces.
pub(crate) struct Forwarding {
    pub(crate) enabled: bool,
    pub(crate) transits: VecDeque<TransitPacket>,
    pub(crate) local: VecDeque<LocalPacket>,
}

impl Forwarding {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, transits: VecDeque::new(), local: VecDeque::new() }
    }

    /// Removes all queued frames.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Frame> + '_ {
        self.transits.drain(..).map(|transit| transit.frame)
    }
}
