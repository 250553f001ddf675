//! A wrapper that injects faults into a device, reproducibly for each seed.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fastrand::Rng;
use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropCounters, DropReason, Sum};

use crate::admission::EarlyDrop;
use crate::steering::SharedRules;
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState};

/// Fault rates: independent probabilities for each frame, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct FaultRates {
    /// The frame is dropped, counted as [`DropReason::FaultInjected`].
    pub loss: f64,
    /// The frame is duplicated.
    pub duplication: f64,
    /// Up to [`MAX_REORDER_DISTANCE`] later frames overtake the frame.
    pub reordering: f64,
    /// One bit of the frame is flipped.
    pub corruption: f64,
}

/// Maximum number of frames that overtake a reordered frame.
pub const MAX_REORDER_DISTANCE: u32 = 8;

impl FaultRates {
    /// Sets the probability that a frame is dropped.
    pub fn loss(self, loss: f64) -> Self {
        Self { loss, ..self }
    }

    /// Sets the probability that a frame is duplicated.
    pub fn duplication(self, duplication: f64) -> Self {
        Self { duplication, ..self }
    }

    /// Sets the probability that later frames overtake a frame.
    pub fn reordering(self, reordering: f64) -> Self {
        Self { reordering, ..self }
    }

    /// Sets the probability that one bit of a frame is flipped.
    pub fn corruption(self, corruption: f64) -> Self {
        Self { corruption, ..self }
    }

    fn by_name(&self) -> [(&'static str, f64); 4] {
        [
            ("loss", self.loss),
            ("duplication", self.duplication),
            ("reordering", self.reordering),
            ("corruption", self.corruption),
        ]
    }
}

/// Settings of a [`FaultInjector`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct FaultConfig {
    /// Seed: the same seed and frames give the same faults.
    pub seed: u64,
    /// Faults of received frames.
    pub receive: FaultRates,
    /// Faults of transmitted frames.
    pub transmit: FaultRates,
}

impl FaultConfig {
    /// Sets the seed.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Sets the faults of received frames.
    pub fn receive(self, receive: FaultRates) -> Self {
        Self { receive, ..self }
    }

    /// Sets the faults of transmitted frames.
    pub fn transmit(self, transmit: FaultRates) -> Self {
        Self { transmit, ..self }
    }
}

/// A probability is not between 0 and 1.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultError {
    fault: &'static str,
    probability: f64,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, probability } = self;
        write!(f, "the probability of {fault} is {probability}: use a number from 0 to 1")
    }
}

impl std::error::Error for FaultError {}

/// A device that loses, duplicates, reorders and corrupts frames.
///
/// Delayed frames are released by the next call in their direction that brings no new frames,
/// so none is held forever. [`FaultInjector::into_inner`] frees them.
///
/// # Examples
/// ```
/// use tidegate_device::fault::{FaultConfig, FaultInjector, FaultRates};
/// use tidegate_device::mem::{MemConfig, wire};
///
/// let (near, _far) = wire(&MemConfig::default())?;
/// let config = FaultConfig::default().seed(7).receive(FaultRates::default().loss(0.01));
/// let lossy = FaultInjector::new(near, config)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FaultInjector<P> {
    device: P,
    receive: FaultyDirection,
    transmit: FaultyDirection,
    /// Received frames that have not been through the faults yet.
    arrived: Burst,
    drops: DropCounters,
    received: u64,
    received_bytes: u64,
    /// True when frames were sent since the last receive.
    sent: bool,
}

/// Maximum number of frames that wait when the wrapped device takes no more.
const MAX_BACKLOG_FRAMES: usize = 64;

/// Faults and waiting frames of one direction.
struct FaultyDirection {
    rng: Rng,
    faults: FaultRates,
    /// Reordered frames, each with the number of frames that have yet to overtake it.
    delayed: VecDeque<(Frame, u32)>,
    /// Frames that are ready to be handed on.
    ready: Burst,
}

impl<P: Device> FaultInjector<P> {
    /// Wraps `device` to inject faults.
    ///
    /// # Errors
    /// When a probability is not from 0 to 1.
    pub fn new(device: P, config: FaultConfig) -> Result<Self, FaultError> {
        for faults in [config.receive, config.transmit] {
            for (fault, probability) in faults.by_name() {
                if !(0.0..=1.0).contains(&probability) {
                    return Err(FaultError { fault, probability });
                }
            }
        }
        let mut seeds = Rng::with_seed(config.seed);
        Ok(Self {
            device,
            receive: FaultyDirection::new(config.receive, seeds.fork()),
            transmit: FaultyDirection::new(config.transmit, seeds.fork()),
            arrived: Burst::new(),
            drops: DropCounters::new(),
            received: 0,
            received_bytes: 0,
            sent: false,
        })
    }

    /// Returns the wrapped device. Frames held inside return to the arena.
    pub fn into_inner(mut self, arena: &mut Arena) -> P {
        for direction in [&mut self.receive, &mut self.transmit] {
            direction.release_delayed();
            direction.ready.drain(..).for_each(|frame| arena.free(frame));
        }
        self.device
    }

    /// Hands frames that are ready to the wrapped device.
    fn flush(&mut self, arena: &mut Arena) -> io::Result<()> {
        self.device.transmit(arena, &mut self.transmit.ready)?;
        Ok(())
    }
}

impl FaultyDirection {
    fn new(faults: FaultRates, rng: Rng) -> Self {
        Self { rng, faults, delayed: VecDeque::new(), ready: Burst::new() }
    }

    fn draw(&mut self, probability: f64) -> bool {
        // Drawn every time, so that the probability of one fault does not change the random
        // sequence of another.
        self.rng.f64() < probability
    }

    /// Applies the faults to a frame.
    fn apply(&mut self, arena: &mut Arena, mut frame: Frame, drops: &mut DropCounters) {
        let FaultRates { loss, duplication, reordering, corruption } = self.faults;
        let (lost, duplicated) = (self.draw(loss), self.draw(duplication));
        let (overtaken, corrupted) = (self.draw(reordering), self.draw(corruption));
        if lost {
            drops.count(DropReason::FaultInjected);
            arena.free(frame);
            return;
        }
        // Copied first, so that only one of the two frames is corrupted.
        let copy = if duplicated { arena.copy_of(&frame) } else { None };
        if corrupted {
            self.corrupt(arena, &mut frame);
        }
        if overtaken {
            let overtakes_left = self.rng.u32(1..=MAX_REORDER_DISTANCE);
            self.delayed.push_back((frame, overtakes_left));
        } else {
            self.emit(frame);
        }
        if let Some(copy) = copy {
            self.emit(copy);
        }
    }

    /// Makes a frame ready, and every delayed frame that has now been overtaken often enough.
    fn emit(&mut self, frame: Frame) {
        let mut next = Some(frame);
        while let Some(frame) = next {
            self.ready.push_back(frame);
            for (_, overtakes_left) in &mut self.delayed {
                *overtakes_left = overtakes_left.saturating_sub(1);
            }
            // The earliest due frame first, so that no delayed frame is overtaken more often than
            // planned.
            let due = self.delayed.iter().position(|&(_, overtakes_left)| overtakes_left == 0);
            next = due.and_then(|at| self.delayed.remove(at)).map(|(frame, _)| frame);
        }
    }

    /// Makes all delayed frames ready.
    fn release_delayed(&mut self) {
        self.ready.extend(self.delayed.drain(..).map(|(frame, _)| frame));
    }

    /// Flips one bit, as a link would: with the checksum filled in and not verified by the NIC.
    fn corrupt(&mut self, arena: &mut Arena, frame: &mut Frame) {
        if let Checksum::Partial { start, offset } = frame.checksum() {
            fill_checksum(arena.bytes_mut(frame), start.into(), offset.into());
        }
        frame.set_checksum(Checksum::Unknown);
        let bits = frame.len() * 8;
        if bits > 0 {
            let bit = self.rng.usize(..bits);
            arena.bytes_mut(frame)[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// Fills in a partial checksum, as a NIC does.
fn fill_checksum(data: &mut [u8], start: usize, offset: usize) {
    let Some(covered) = data.get_mut(start..) else { return };
    // The field holds the sum of the pseudo-header, so the sum covers the field too. Zero means
    // "no checksum" to UDP; its other form is right for every protocol.
    let sum = Sum::of(covered).udp_checksum();
    if let Some(field) = covered.get_mut(offset..).and_then(|rest| rest.first_chunk_mut()) {
        *field = sum.to_be_bytes();
    }
}

impl<P: Device> Device for FaultInjector<P> {
    fn close_for_handover(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<HandoverState> {
        Box::new(self.device).close_for_handover(arena, keep)
    }

    fn take_over(&mut self) -> io::Result<()> {
        self.device.take_over()
    }

    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        // No frame was sent since the last call: release delayed frames.
        if !std::mem::take(&mut self.sent) {
            self.transmit.release_delayed();
        }
        if !self.transmit.ready.is_empty() {
            self.flush(arena)?;
        }
        let wanted = quota.saturating_sub(self.receive.ready.len());
        let fresh = self.device.receive(arena, &mut self.arrived, wanted)?;
        for frame in self.arrived.drain(..) {
            self.receive.apply(arena, frame, &mut self.drops);
        }
        if fresh == 0 && wanted > 0 {
            self.receive.release_delayed();
        }
        let taken = self.receive.ready.len().min(quota);
        for frame in self.receive.ready.drain(..taken) {
            self.received += 1;
            self.received_bytes += frame.len() as u64;
            burst.push_back(frame);
        }
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let mut taken = 0;
        if burst.is_empty() {
            self.transmit.release_delayed();
        }
        while !burst.is_empty() && self.transmit.ready.len() < MAX_BACKLOG_FRAMES {
            let batch = burst.len().min(MAX_BACKLOG_FRAMES);
            for frame in burst.drain(..batch) {
                self.transmit.apply(arena, frame, &mut self.drops);
            }
            taken += batch;
            self.sent = true;
            self.flush(arena)?;
        }
        self.flush(arena)?;
        Ok(taken)
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.device.set_idle_polls(allowed);
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        self.device.pause_receive(wait_ns)
    }

    fn needs_retry(&mut self) -> bool {
        self.device.needs_retry()
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        let has_frames = |direction: &FaultyDirection| {
            !direction.delayed.is_empty() || !direction.ready.is_empty()
        };
        if has_frames(&self.receive) || has_frames(&self.transmit) {
            return Ok(false);
        }
        self.device.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.wake_fd()
    }

    fn shared_rules(&self) -> Option<Arc<dyn SharedRules>> {
        self.device.shared_rules()
    }

    fn early_drop(&mut self) -> Option<&mut dyn EarlyDrop> {
        self.device.early_drop()
    }

    fn counters(&mut self) -> DeviceCounters {
        let mut counters = self.device.counters();
        (counters.received, counters.received_bytes) = (self.received, self.received_bytes);
        counters.drops.merge(&self.drops);
        counters
    }
}
