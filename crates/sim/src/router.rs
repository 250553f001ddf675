//! Queues of IP forwarding, with or without a filter process.

use std::collections::VecDeque;

use crate::load::Packet;
use crate::setup::FilterProcess;

/// Queues of a router.
pub(crate) struct RouterQueues {
    /// Packets to be transmitted.
    pub(crate) output: VecDeque<Packet>,
    output_queue: usize,
    /// Queue to the filter process, if there is one.
    pub(crate) filter: Option<FilterQueue>,
}

pub(crate) struct FilterQueue {
    pub(crate) waiting: VecDeque<Packet>,
    pub(crate) capacity: u32,
    /// Packet that the filter is judging.
    pub(crate) current: Option<Packet>,
}

impl RouterQueues {
    pub(crate) fn new(output_queue: u32, filter: Option<FilterProcess>) -> Self {
        Self {
            output: VecDeque::with_capacity(output_queue as usize),
            output_queue: output_queue as usize,
            filter: filter.map(|filter| FilterQueue {
                waiting: VecDeque::with_capacity(filter.queue as usize),
                capacity: filter.queue,
                current: None,
            }),
        }
    }

    /// Puts a packet into the output queue. Returns false if the queue is full.
    pub(crate) fn push_output(&mut self, packet: Packet) -> bool {
        let has_space = self.output.len() < self.output_queue;
        if has_space {
            self.output.push_back(packet);
        }
        has_space
    }

    /// Packets in the router's queues.
    pub(crate) fn in_flight(&self) -> u64 {
        let filter = self
            .filter
            .as_ref()
            .map_or(0, |filter| filter.waiting.len() + usize::from(filter.current.is_some()));
        (self.output.len() + filter) as u64
    }
}

impl FilterQueue {
    /// Closes the queue when the filter exits: every later packet is dropped. Returns the number of
    /// packets lost.
    pub(crate) fn close(&mut self) -> u64 {
        let lost = self.waiting.len() + usize::from(self.current.take().is_some());
        self.waiting.clear();
        self.capacity = 0;
        lost as u64
    }

    /// Puts a packet into the queue. Returns false if the queue is full.
    pub(crate) fn push(&mut self, packet: Packet) -> bool {
        let has_space = self.waiting.len() < self.capacity as usize;
        if has_space {
            self.waiting.push_back(packet);
        }
        has_space
    }
}
