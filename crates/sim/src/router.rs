//! IP forwarding, with or without a screen: what waits where.

use std::collections::VecDeque;

use crate::load::Packet;
use crate::setup::Screen;

/// The queues of a router.
pub(crate) struct Router {
    /// What waits for the card.
    pub(crate) output: VecDeque<Packet>,
    output_queue: usize,
    /// What waits for the screen.
    pub(crate) screen: Option<ScreenQueue>,
}

pub(crate) struct ScreenQueue {
    pub(crate) waiting: VecDeque<Packet>,
    pub(crate) capacity: u32,
    /// What the screen looks at now.
    pub(crate) current: Option<Packet>,
}

impl Router {
    pub(crate) fn new(output_queue: u32, screen: Option<Screen>) -> Self {
        Self {
            output: VecDeque::with_capacity(output_queue as usize),
            output_queue: output_queue as usize,
            screen: screen.map(|screen| ScreenQueue {
                waiting: VecDeque::with_capacity(screen.queue as usize),
                capacity: screen.queue,
                current: None,
            }),
        }
    }

    /// Puts a packet into the output queue. Returns whether there was room.
    pub(crate) fn push_output(&mut self, packet: Packet) -> bool {
        let room = self.output.len() < self.output_queue;
        if room {
            self.output.push_back(packet);
        }
        room
    }

    /// Packets in its queues.
    pub(crate) fn in_flight(&self) -> u64 {
        let screen = self
            .screen
            .as_ref()
            .map_or(0, |screen| screen.waiting.len() + usize::from(screen.current.is_some()));
        (self.output.len() + screen) as u64
    }
}

impl ScreenQueue {
    /// The screen is gone, and nothing fits any more. Returns how many packets
    /// are lost.
    pub(crate) fn close(&mut self) -> u64 {
        let lost = self.waiting.len() + usize::from(self.current.take().is_some());
        self.waiting.clear();
        self.capacity = 0;
        lost as u64
    }

    /// Puts a packet into the queue. Returns whether there was room.
    pub(crate) fn push(&mut self, packet: Packet) -> bool {
        let room = self.waiting.len() < self.capacity as usize;
        if room {
            self.waiting.push_back(packet);
        }
        room
    }
}
