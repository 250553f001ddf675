//! Transmission for cores without a queue: the primary core sends their frames by its own device.

use std::io;

use tidegate_memory::Arena;

use super::flow_steering::FlowSteering;
use crate::mem::MemDevice;
use crate::{Burst, Device};

/// Maximum number of loopback frames of other cores that wait while receiving is paused.
const MAX_LOOPBACK_FRAMES: usize = 1024;

/// Links from all other cores to the primary core, by which they send.
pub(super) struct Uplinks {
    wires: Vec<MemDevice>,
    /// Frames that the device has not taken yet, and the number of frames of each core.
    backlog: Burst,
    backlog_counts: Vec<usize>,
    /// Frames to addresses of their own, to be dispatched like received frames.
    loopback: Burst,
    /// Empty between calls.
    taken: Burst,
}

impl Uplinks {
    /// Links from the cores 1, 2, ….
    pub(super) fn new(wires: Vec<MemDevice>) -> Self {
        Self {
            backlog_counts: vec![0; wires.len()],
            wires,
            backlog: Burst::new(),
            loopback: Burst::new(),
            taken: Burst::new(),
        }
    }

    /// Takes the frames that other cores send, and transmits them on the device; loopback frames
    /// are kept. Returns the number of frames taken.
    pub(super) fn forward(
        &mut self,
        device: &mut dyn Device,
        flow_steering: &FlowSteering,
        arena: &mut Arena,
        quota: usize,
    ) -> io::Result<usize> {
        let mut count = 0;
        if self.backlog.is_empty() && self.loopback.len() < MAX_LOOPBACK_FRAMES {
            for (wire, counted) in self.wires.iter_mut().zip(&mut self.backlog_counts) {
                let frames = wire.receive(arena, &mut self.taken, quota)?;
                *counted += frames;
                count += frames;
            }
            for frame in self.taken.drain(..) {
                match frame.is_loopback() {
                    true => self.loopback.push_back(frame),
                    false => self.backlog.push_back(frame),
                }
            }
        }
        if count == 0 && self.backlog.is_empty() {
            return Ok(0);
        }
        device.transmit(arena, &mut self.backlog)?;
        if self.backlog.is_empty() {
            for (at, counted) in self.backlog_counts.iter_mut().enumerate() {
                flow_steering.on_forwarded(at + 1, std::mem::take(counted));
            }
        }
        Ok(count)
    }

    /// As [`Uplinks::forward`], while receiving is paused: as much as may wait.
    pub(super) fn forward_paused(
        &mut self,
        device: &mut dyn Device,
        flow_steering: &FlowSteering,
        arena: &mut Arena,
    ) -> io::Result<()> {
        self.forward(device, flow_steering, arena, MAX_LOOPBACK_FRAMES).map(|_| ())
    }

    /// Loopback frames to dispatch.
    pub(super) fn loopback(&mut self) -> &mut Burst {
        &mut self.loopback
    }

    /// True if frames of other cores wait, and may be taken.
    pub(super) fn can_forward(&mut self) -> bool {
        self.loopback.len() < MAX_LOOPBACK_FRAMES && self.wires.iter_mut().any(MemDevice::has_frame)
    }

    /// True if no frame of another core waits.
    pub(super) fn is_empty(&mut self) -> bool {
        self.backlog.is_empty()
            && self.loopback.is_empty()
            && !self.wires.iter_mut().any(MemDevice::has_frame)
    }
}
