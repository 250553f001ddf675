//! One queue pair of a NIC: receive and transmit descriptors, and an interrupt line.

use std::collections::VecDeque;

use crate::load::Packet;
use crate::setup::Setup;

/// One queue pair of a NIC.
pub(crate) struct Nic {
    received: VecDeque<Packet>,
    receive_ring: usize,
    /// Packets in transmit descriptors, not yet sent by the link.
    sending: VecDeque<Packet>,
    /// Transmit descriptors whose packets were sent, to be reclaimed.
    reclaimable: u32,
    transmit_ring: usize,
    frame_ns: u64,
    interrupt_gap_ns: u64,
    /// Earliest time of the next interrupt.
    next_interrupt_ns: u64,
    /// The interrupt is enabled.
    pub(crate) interrupt_enabled: bool,
    /// The interrupt is raised, and its handler has not returned.
    pub(crate) interrupt_raised: bool,
}

impl Nic {
    pub(crate) fn new(setup: &Setup, receive_ring: u32) -> Self {
        let transmit_ring = setup.transmit_ring;
        Self {
            received: VecDeque::with_capacity(receive_ring as usize),
            receive_ring: receive_ring as usize,
            sending: VecDeque::with_capacity(transmit_ring as usize),
            reclaimable: 0,
            transmit_ring: transmit_ring as usize,
            frame_ns: setup.link.frame_ns(),
            interrupt_gap_ns: setup.interrupt_gap_ns,
            next_interrupt_ns: 0,
            interrupt_enabled: true,
            interrupt_raised: false,
        }
    }

    /// Earliest time at which the NIC raises its next interrupt.
    #[inline]
    pub(crate) fn next_interrupt_ns(&self) -> u64 {
        self.next_interrupt_ns
    }

    /// Records that the interrupt is raised.
    #[inline]
    pub(crate) fn on_interrupt_raised(&mut self, now_ns: u64) {
        self.interrupt_raised = true;
        self.next_interrupt_ns = now_ns + self.interrupt_gap_ns;
    }

    /// Receives a packet. Returns false if no descriptor is free.
    #[inline]
    pub(crate) fn arrive(&mut self, packet: Packet) -> bool {
        let has_space = self.received.len() < self.receive_ring;
        if has_space {
            self.received.push_back(packet);
        }
        has_space
    }

    /// Takes the oldest received packet.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Packet> {
        self.received.pop_front()
    }

    /// Number of receive descriptors.
    pub(crate) fn capacity(&self) -> usize {
        self.receive_ring
    }

    /// Oldest received packet.
    #[inline]
    pub(crate) fn first(&self) -> Option<Packet> {
        self.received.front().copied()
    }

    /// Number of received packets to be taken.
    pub(crate) fn waiting(&self) -> usize {
        self.received.len()
    }

    /// True if a transmit descriptor is free.
    #[inline]
    pub(crate) fn has_transmit_space(&self) -> bool {
        self.sending.len() + (self.reclaimable as usize) < self.transmit_ring
    }

    /// Queues a packet for transmission; a descriptor must be free. Returns the time at which the
    /// packet is sent if the link was idle.
    #[inline]
    pub(crate) fn transmit(&mut self, now_ns: u64, packet: Packet) -> Option<u64> {
        self.sending.push_back(packet);
        (self.sending.len() == 1).then_some(now_ns + self.frame_ns)
    }

    /// Completes the transmission on the link. Returns the packet, and the completion time of the
    /// next packet.
    #[inline]
    pub(crate) fn on_transmitted(&mut self, now_ns: u64) -> (Option<Packet>, Option<u64>) {
        let packet = self.sending.pop_front();
        self.reclaimable += u32::from(packet.is_some());
        (packet, (!self.sending.is_empty()).then_some(now_ns + self.frame_ns))
    }

    /// Number of packets in transmit descriptors that are not sent yet.
    pub(crate) fn sending(&self) -> usize {
        self.sending.len()
    }

    /// Number of transmit descriptors that can be reclaimed.
    #[inline]
    pub(crate) fn reclaimable(&self) -> u32 {
        self.reclaimable
    }

    /// Reclaims transmit descriptors.
    #[inline]
    pub(crate) fn reclaim(&mut self, descriptors: u32) {
        self.reclaimable -= descriptors.min(self.reclaimable);
    }

    /// True if the NIC is to raise an interrupt: for received packets, or, as drivers do it, when
    /// half of the transmit ring can be reclaimed.
    #[inline]
    pub(crate) fn should_interrupt(&self) -> bool {
        self.interrupt_enabled
            && !self.interrupt_raised
            && (!self.received.is_empty() || self.has_many_reclaimable())
    }

    /// True if at least half of the transmit ring can be reclaimed.
    #[inline]
    pub(crate) fn has_many_reclaimable(&self) -> bool {
        self.reclaimable as usize * 2 >= self.transmit_ring.max(2)
    }
}
