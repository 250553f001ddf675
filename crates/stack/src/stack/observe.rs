//! Frame input one frame at a time, for a capture that records what became of each.

use std::iter::zip;

use tidegate_memory::{Arena, Frame};
use tidegate_wire::DropReason;

use super::Stack;
use crate::Event;

impl Stack {
    /// Processes a received frame like [`Stack::handle_frame`], but leaves the output to the next
    /// [`Stack::handle_burst`], of an empty burst too. Returns the reason if the frame was dropped.
    #[cold]
    #[inline(never)]
    pub fn handle_observed(
        &mut self,
        now_ns: u64,
        frame: Frame,
        arena: &mut Arena,
    ) -> Option<DropReason> {
        let before = self.interface.counters.drops.clone();
        self.handle_alone(now_ns, frame, arena);
        let drops = zip(self.interface.counters.drops.iter(), before.iter());
        let mut changed = drops.filter(|(after, before)| after.1 != before.1);
        changed.next().map(|(after, _)| after.0)
    }

    /// Numbers of waiting events, for [`Stack::events_since`].
    pub fn waiting_events(&self) -> [usize; 2] {
        [self.interface.events.len(), self.tcp.events.len()]
    }

    /// Events that were queued since [`Stack::waiting_events`], if none was polled meanwhile.
    pub fn events_since(&self, [of_interface, of_tcp]: [usize; 2]) -> impl Iterator<Item = Event> {
        let of_interface = self.interface.events.iter().skip(of_interface);
        of_interface.chain(self.tcp.events.iter().skip(of_tcp)).copied()
    }
}
