//! The two halves of receiving in the modes `interrupt` and `moderated`.
//!
//! The upper half runs at interrupt priority and only moves frames to a bounded
//! queue; the lower half does the protocol work, as 4.2BSD did with `ipintrq`.
//! What does not fit between them is dropped after work was spent on it: that
//! is how these modes collapse, and what they are here to show.

use std::io;

use tidegate_wire::DropReason;

use crate::Engine;

/// The most frames that the upper half asks the port for at once.
const BURST: usize = 64;

impl Engine {
    /// The upper half: takes up to `limit` frames from the port to the input
    /// queue. What does not fit is dropped. Returns how many were taken.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn take_in(&mut self, limit: u32) -> io::Result<usize> {
        let limit = limit as usize;
        let room = self.gate().settings().config().input_queue as usize;
        let mut taken = 0;
        while taken < limit {
            let most = BURST.min(limit - taken);
            let frames = self.port.receive(&mut self.arena, &mut self.incoming, most)?;
            while let Some(frame) = self.incoming.pop_front() {
                if self.input.len() < room {
                    self.input.push_back(frame);
                } else {
                    self.arena.free(frame);
                    self.input_drops.count(DropReason::InputQueueFull);
                }
            }
            taken += frames;
            if frames < most {
                break;
            }
        }
        Ok(taken)
    }

    /// The lower half: lets the stack take up to `limit` frames each of those that
    /// it sends to itself and of the input queue, then its timers, then the port
    /// what the stack has made. Returns how many frames were left.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn process_input(&mut self, limit: usize) -> io::Result<usize> {
        let now_ns = self.read_clock();
        if self.has_looped() {
            self.loop_back(limit)?;
        }
        for _ in 0..limit {
            let Some(frame) = self.input.pop_front() else { break };
            self.stack.ingest(now_ns, frame, &mut self.arena);
        }
        self.serve_timers()?;
        self.flush()?;
        Ok(self.input.len() + self.stack.looped_queue().len())
    }
}
