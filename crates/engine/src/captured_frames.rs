//! Frames of an engine with a capture: each is processed and recorded by itself.

use std::io;

use tidegate_memory::Frame;
use tidegate_wire::DropReason;

use crate::Engine;
use crate::admission::Role;
use crate::capture::{
    CaptureDirection, CaptureRecord, CaptureTap, Captures, MAX_CAPTURES, MAX_SNAP_BYTES,
};

impl Engine {
    /// Begins a capture.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] for more than [`MAX_CAPTURES`] at a time.
    pub fn start_capture(&mut self, tap: CaptureTap) -> io::Result<()> {
        let captures = self.captures.get_or_insert_default();
        if captures.taps.len() >= MAX_CAPTURES {
            let message = "four captures run already: end one of them";
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, message));
        }
        captures.taps.push(tap);
        self.update_special_ways();
        Ok(())
    }

    /// Ends capture `number`. Its memory is unmapped where the returned value is dropped.
    pub fn end_capture(&mut self, number: u64) -> Option<CaptureTap> {
        let captures = self.captures.as_mut()?;
        let at = captures.taps.iter().position(|tap| tap.number == number)?;
        let tap = captures.taps.swap_remove(at);
        if captures.taps.is_empty() {
            self.captures = None;
            self.update_special_ways();
        }
        Some(tap)
    }

    /// Passes the received burst to the stack and records each frame, if there is a capture.
    #[cold]
    #[inline(never)]
    pub(crate) fn handle_captured(&mut self, direction: CaptureDirection) {
        let Some(mut captures) = self.captures.take() else { return };
        let now_ns = self.now_ns;
        let time_ns = self.clock.monotonic_ns(now_ns);
        let empty = CaptureRecord {
            time_ns,
            done_ns: time_ns,
            direction,
            drop_reason: None,
            original_bytes: 0,
            lost: 0,
            data: &[],
        };
        if let Role::Leader(admitter) = &mut self.admission {
            for (frame, reason) in admitter.take_refused() {
                let data = self.arena.bytes(&frame);
                let (selected, original_bytes) = (captures.copy_selected(data), data.len());
                self.arena.free(frame);
                let drop_reason = Some(number_of(reason));
                captures
                    .record_copy(selected, &CaptureRecord { drop_reason, original_bytes, ..empty });
            }
        }
        let waiting = self.stack.waiting_events();
        while let Some(frame) = self.incoming.pop_front() {
            let data = self.arena.bytes(&frame);
            let (selected, original_bytes) = (captures.copy_selected(data), data.len());
            let dropped = self.stack.handle_observed(now_ns, frame, &mut self.arena);
            if selected != 0 {
                let done_ns = self.clock.monotonic_ns(self.clock.now_ns());
                let drop_reason = dropped.map(number_of);
                let record = CaptureRecord { done_ns, drop_reason, original_bytes, ..empty };
                captures.record_copy(selected, &record);
            }
        }
        // The burst is empty: this sends what the frames have caused.
        self.stack.handle_burst(now_ns, &mut self.incoming, &mut self.arena);
        if captures.taps.iter().any(|tap| tap.notifications) {
            let time_ns = self.clock.monotonic_ns(self.clock.now_ns());
            for event in self.stack.events_since(waiting) {
                captures.record_event(time_ns, &self.stack, event);
            }
        }
        captures.publish();
        self.captures = Some(captures);
    }

    /// Passes transmit frames to the device, and records those that the device takes.
    #[cold]
    #[inline(never)]
    pub(crate) fn transmit_captured(&mut self) -> io::Result<()> {
        let Some(mut captures) = self.captures.take() else { return Ok(()) };
        let queue = self.stack.transmit_queue();
        captures.tx_copies.copy_burst(&self.arena, queue, MAX_SNAP_BYTES);
        let offered = queue.len();
        let outcome = self.device.transmit(&mut self.arena, queue);
        let taken = offered - queue.len();
        if taken > 0 {
            let time_ns = self.clock.monotonic_ns(self.clock.now_ns());
            let Captures { taps, tx_copies, .. } = &mut *captures;
            for (data, original_bytes) in tx_copies.first(taken) {
                for tap in &mut *taps {
                    if tap.selects(data, original_bytes) {
                        tap.record(&CaptureRecord {
                            time_ns,
                            done_ns: time_ns,
                            direction: CaptureDirection::Transmitted,
                            drop_reason: None,
                            original_bytes,
                            lost: 0,
                            data,
                        });
                    }
                }
            }
            captures.publish();
        }
        self.captures = Some(captures);
        outcome.map(drop)
    }

    /// Records a frame that is dropped before the stack.
    #[cold]
    pub(crate) fn record_dropped(&mut self, frame: &Frame, reason: DropReason) {
        let Some(captures) = &mut self.captures else { return };
        let data = self.arena.bytes(frame);
        let (selected, original_bytes) = (captures.copy_selected(data), data.len());
        let time_ns = self.clock.monotonic_ns(self.now_ns);
        captures.record_copy(
            selected,
            &CaptureRecord {
                time_ns,
                done_ns: time_ns,
                direction: CaptureDirection::Received,
                drop_reason: Some(number_of(reason)),
                original_bytes,
                lost: 0,
                data: &[],
            },
        );
        captures.publish();
    }
}

/// Number of a drop reason in the list of all.
fn number_of(reason: DropReason) -> u16 {
    reason as u16
}
