//! Frame input one frame at a time, for a capture that records what became of each.

use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropReason;

use super::Stack;

impl Stack {
    /// Processes one received frame like [`Stack::handle_burst`], but leaves the output to
    /// [`Stack::finish_observed`]. Returns the reason if the frame was dropped. `burst` must be
    /// empty, and is empty afterwards.
    pub fn handle_observed(
        &mut self,
        now_ns: u64,
        frame: Frame,
        burst: &mut Fifo<Frame>,
        arena: &mut Arena,
    ) -> Option<DropReason> {
        let before = self.interface.counters.drops.clone();
        burst.push_back(frame);
        self.handle_frames(now_ns, burst, arena);
        let drops = self.interface.counters.drops.iter();
        drops
            .zip(before.iter())
            .find(|(after, before)| after.1 != before.1)
            .map(|(after, _)| after.0)
    }

    /// Sends what the frames since the last call have caused.
    pub fn finish_observed(&mut self, now_ns: u64, arena: &mut Arena) {
        self.finish_input(now_ns, arena);
    }
}
