//! Output of an interface by classes.

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

use crate::interface::Interface;

impl Interface {
    /// Moves frames from the transmit queue to the classes. Does nothing without classes.
    #[inline]
    pub(crate) fn queue_by_class(&mut self, now_ns: u64, arena: &mut Arena) {
        if self.transmit_classes.is_some() {
            self.queue_all_by_class(now_ns, arena);
        }
    }

    fn queue_all_by_class(&mut self, now_ns: u64, arena: &mut Arena) {
        let link_bytes = self.link_header_bytes();
        let Some(classes) = &mut self.transmit_classes else { return };
        let mut dropped = 0;
        while let Some(frame) = self.transmit.pop_front() {
            dropped += u64::from(!classes.queue(now_ns, arena, link_bytes, frame));
        }
        self.count_dropped_by_class(dropped);
    }

    /// Makes the frames ready whose turn has come at `now_ns`.
    pub(crate) fn take_turns(&mut self, now_ns: u64, arena: &mut Arena) {
        let Some(classes) = &mut self.transmit_classes else { return };
        let dropped = classes.take_turns(now_ns, arena);
        self.count_dropped_by_class(dropped);
    }

    fn count_dropped_by_class(&mut self, frames: u64) {
        // They were counted when they were made.
        self.counters.transmitted -= frames;
        self.counters.transmit_drops.add(DropReason::TransmitQueueFull, frames);
    }
}
