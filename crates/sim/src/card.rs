//! One queue of a card: descriptors, an interrupt line, and the way out.

use std::collections::VecDeque;

use crate::load::Packet;
use crate::setup::Setup;

/// One queue of a card.
pub(crate) struct Card {
    received: VecDeque<Packet>,
    receive_ring: usize,
    /// Packets in descriptors that the link has still to send.
    sending: VecDeque<Packet>,
    /// Descriptors whose packets were sent, to be taken back.
    sent: u32,
    transmit_ring: usize,
    frame_ns: u64,
    interrupt_gap_ns: u64,
    /// The earliest time of the next interrupt.
    next_interrupt_ns: u64,
    /// Whether the interrupt may be raised at all.
    pub(crate) enabled: bool,
    /// Whether it is raised and its handler has not returned.
    pub(crate) raised: bool,
}

impl Card {
    pub(crate) fn new(setup: &Setup, receive_ring: u32) -> Self {
        let transmit_ring = setup.transmit_ring;
        Self {
            received: VecDeque::with_capacity(receive_ring as usize),
            receive_ring: receive_ring as usize,
            sending: VecDeque::with_capacity(transmit_ring as usize),
            sent: 0,
            transmit_ring: transmit_ring as usize,
            frame_ns: setup.link.frame_ns(),
            interrupt_gap_ns: setup.interrupt_gap_ns,
            next_interrupt_ns: 0,
            enabled: true,
            raised: false,
        }
    }

    /// The earliest time at which the card raises its next interrupt.
    #[inline]
    pub(crate) fn next_interrupt_ns(&self) -> u64 {
        self.next_interrupt_ns
    }

    /// The interrupt is raised.
    #[inline]
    pub(crate) fn on_raised(&mut self, now_ns: u64) {
        self.raised = true;
        self.next_interrupt_ns = now_ns + self.interrupt_gap_ns;
    }

    /// A packet comes in. Returns whether there was a descriptor for it.
    #[inline]
    pub(crate) fn arrive(&mut self, packet: Packet) -> bool {
        let room = self.received.len() < self.receive_ring;
        if room {
            self.received.push_back(packet);
        }
        room
    }

    /// Takes the packet that has waited longest.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Packet> {
        self.received.pop_front()
    }

    /// How many packets wait to be taken.
    pub(crate) fn waiting(&self) -> usize {
        self.received.len()
    }

    /// Whether there is a descriptor to send with.
    #[inline]
    pub(crate) fn has_transmit_room(&self) -> bool {
        self.sending.len() + (self.sent as usize) < self.transmit_ring
    }

    /// Hands a packet to the card, which has room for it. Returns when the
    /// packet will be out, if the link was free.
    #[inline]
    pub(crate) fn transmit(&mut self, now_ns: u64, packet: Packet) -> Option<u64> {
        self.sending.push_back(packet);
        (self.sending.len() == 1).then_some(now_ns + self.frame_ns)
    }

    /// The packet on the link is out. Returns it, and when the next will be.
    #[inline]
    pub(crate) fn on_transmitted(&mut self, now_ns: u64) -> (Option<Packet>, Option<u64>) {
        let out = self.sending.pop_front();
        self.sent += u32::from(out.is_some());
        (out, (!self.sending.is_empty()).then_some(now_ns + self.frame_ns))
    }

    /// Packets in descriptors that are not sent yet.
    pub(crate) fn sending(&self) -> usize {
        self.sending.len()
    }

    /// Descriptors that can be taken back.
    #[inline]
    pub(crate) fn sent(&self) -> u32 {
        self.sent
    }

    /// Takes descriptors back.
    #[inline]
    pub(crate) fn reclaim(&mut self, descriptors: u32) {
        self.sent -= descriptors.min(self.sent);
    }

    /// Whether the card has a reason to interrupt. Descriptors to take back
    /// are one only when half of the ring is, as drivers do it.
    #[inline]
    pub(crate) fn has_reason(&self) -> bool {
        self.enabled && !self.raised && (!self.received.is_empty() || self.has_many_sent())
    }

    /// Whether half of the transmit ring waits to be taken back.
    #[inline]
    pub(crate) fn has_many_sent(&self) -> bool {
        self.sent as usize * 2 >= self.transmit_ring.max(2)
    }
}
