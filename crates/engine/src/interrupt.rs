//! The two stages of receiving in modes `interrupt` and `moderated`.
//!
//! The interrupt stage runs at interrupt priority and only moves frames to a bounded input queue.
//! The protocol stage processes them, as 4.2BSD did with `ipintrq`. Frames that overflow the
//! queue are dropped after work was spent on them. That is how these modes collapse under
//! overload (receive livelock), and the reason that they exist here.

use std::io;

use tidegate_wire::DropReason;

use crate::Engine;
use crate::capture::CaptureDirection;

/// Maximum number of frames of one receive call of the interrupt stage.
const MAX_BURST_FRAMES: usize = 64;

impl Engine {
    /// Runs the interrupt stage: moves up to `limit` frames from the device to the input queue and
    /// drops frames on overflow. Returns the number of received frames.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn receive_to_input_queue(&mut self, limit: u32) -> io::Result<usize> {
        let limit = limit as usize;
        let capacity = self.gate().settings().config().input_queue as usize;
        let mut taken = 0;
        while taken < limit {
            let max = MAX_BURST_FRAMES.min(limit - taken);
            let frames = self.device.receive(&mut self.arena, &mut self.incoming, max)?;
            while let Some(frame) = self.incoming.pop_front() {
                if self.input.len() < capacity {
                    self.input.push_back(frame);
                } else {
                    self.record_dropped(&frame, DropReason::InputQueueFull);
                    self.arena.free(frame);
                    self.input_drops.count(DropReason::InputQueueFull);
                }
            }
            taken += frames;
            if frames < max {
                break;
            }
        }
        Ok(taken)
    }

    /// Runs the protocol stage: passes up to `limit` loopback frames and up to `limit` frames of
    /// the input queue to the stack, serves its timers, and transmits. Returns the number of
    /// frames left in both queues.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn process_input_queue(&mut self, limit: usize) -> io::Result<usize> {
        let now_ns = self.read_clock();
        if self.has_loopback() {
            self.receive_loopback(limit)?;
        }
        for _ in 0..limit {
            let Some(frame) = self.input.pop_front() else { break };
            if self.captures.is_some() {
                self.incoming.push_back(frame);
                self.handle_captured(CaptureDirection::Received);
                continue;
            }
            self.stack.handle_frame(now_ns, frame, &mut self.arena);
        }
        self.serve_timers()?;
        self.flush()?;
        Ok(self.input.len() + self.stack.loopback_queue().len())
    }
}
