//! A wrapper that makes a port unreliable, the same way for the same seed.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use fastrand::Rng;
use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropCounters, DropReason, Sum};

use crate::admission::Early;
use crate::steering::Rule;
use crate::{Burst, Capabilities, Left, Port, PortCounters};

/// How often each thing happens to a frame: probabilities from 0 to 1, each on
/// its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// The frame is gone, counted as [`DropReason::FaultInjected`].
    pub loss: f64,
    /// The frame comes twice.
    pub duplication: f64,
    /// The frame is overtaken by up to [`OVERTAKEN_MAX`] frames behind it.
    pub reordering: f64,
    /// One bit of the frame is turned over.
    pub corruption: f64,
}

/// The most frames that overtake a reordered one.
pub const OVERTAKEN_MAX: u32 = 8;

impl Faults {
    fn named(&self) -> [(&'static str, f64); 4] {
        [
            ("loss", self.loss),
            ("duplication", self.duplication),
            ("reordering", self.reordering),
            ("corruption", self.corruption),
        ]
    }
}

/// What a [`Fault`] does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FaultConfig {
    /// The same seed and frames give the same faults.
    pub seed: u64,
    /// Faults of frames that arrive.
    pub receive: Faults,
    /// Faults of frames that are sent.
    pub transmit: Faults,
}

/// A probability is none.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultError {
    fault: &'static str,
    probability: f64,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, probability } = self;
        write!(f, "the probability of {fault} is {probability}: it must be from 0 to 1")
    }
}

impl std::error::Error for FaultError {}

/// A port that loses, doubles, reorders and corrupts frames.
///
/// A few frames may wait inside; they come out with the next call for their
/// direction that brings no others, so none is held for ever.
/// [`Fault::into_inner`] gives them back.
pub struct Fault<P> {
    port: P,
    receive: Lane,
    transmit: Lane,
    /// Frames for [`Fault::receive`] to go through the lane.
    arrived: Burst,
    drops: DropCounters,
    received: u64,
    received_bytes: u64,
    /// Frames were sent since the last receive.
    sent: bool,
}

/// The most frames that wait to be sent because the port below takes no more.
const BACKLOG_MAX: usize = 64;

/// One direction.
struct Lane {
    rng: Rng,
    faults: Faults,
    /// Frames to be overtaken, with how many are still to pass.
    held: VecDeque<(Frame, u32)>,
    /// Frames that are through.
    ready: Burst,
}

impl<P: Port> Fault<P> {
    /// Makes `port` unreliable.
    ///
    /// # Errors
    /// When a probability is not from 0 to 1.
    pub fn new(port: P, config: FaultConfig) -> Result<Self, FaultError> {
        for faults in [config.receive, config.transmit] {
            for (fault, probability) in faults.named() {
                if !(0.0..=1.0).contains(&probability) {
                    return Err(FaultError { fault, probability });
                }
            }
        }
        let mut seeds = Rng::with_seed(config.seed);
        Ok(Self {
            port,
            receive: Lane::new(config.receive, seeds.fork()),
            transmit: Lane::new(config.transmit, seeds.fork()),
            arrived: Burst::new(),
            drops: DropCounters::new(),
            received: 0,
            received_bytes: 0,
            sent: false,
        })
    }

    /// The port below. Frames that wait inside go back to the arena.
    pub fn into_inner(mut self, arena: &mut Arena) -> P {
        for lane in [&mut self.receive, &mut self.transmit] {
            lane.release();
            lane.ready.drain(..).for_each(|frame| arena.free(frame));
        }
        self.port
    }

    /// Hands what is through to the port below.
    fn push_out(&mut self, arena: &mut Arena) -> io::Result<()> {
        self.port.transmit(arena, &mut self.transmit.ready)?;
        Ok(())
    }
}

impl Lane {
    fn new(faults: Faults, rng: Rng) -> Self {
        Self { rng, faults, held: VecDeque::new(), ready: Burst::new() }
    }

    fn happens(&mut self, probability: f64) -> bool {
        // Drawn every time, so that one fault's probability does not move
        // another's dice.
        self.rng.f64() < probability
    }

    /// Takes a frame through the faults.
    fn pass(&mut self, arena: &mut Arena, mut frame: Frame, drops: &mut DropCounters) {
        let Faults { loss, duplication, reordering, corruption } = self.faults;
        let (lost, doubled) = (self.happens(loss), self.happens(duplication));
        let (overtaken, corrupted) = (self.happens(reordering), self.happens(corruption));
        if lost {
            drops.count(DropReason::FaultInjected);
            arena.free(frame);
            return;
        }
        // A copy is made first, so that only one of the two is corrupted.
        let copy = if doubled { arena.copy_of(&frame) } else { None };
        if corrupted {
            self.corrupt(arena, &mut frame);
        }
        if overtaken {
            let places = self.rng.u32(1..=OVERTAKEN_MAX);
            self.held.push_back((frame, places));
        } else {
            self.put_through(frame);
        }
        if let Some(copy) = copy {
            self.put_through(copy);
        }
    }

    /// Puts a frame through, and the held ones that enough have overtaken now.
    fn put_through(&mut self, frame: Frame) {
        let mut next = Some(frame);
        while let Some(frame) = next {
            self.ready.push_back(frame);
            for (_, places) in &mut self.held {
                *places = places.saturating_sub(1);
            }
            // The one that came first, so that no held frame is overtaken by
            // more than its number.
            let due = self.held.iter().position(|&(_, places)| places == 0);
            next = due.and_then(|at| self.held.remove(at)).map(|(frame, _)| frame);
        }
    }

    /// Puts everything through that is held.
    fn release(&mut self) {
        self.ready.extend(self.held.drain(..).map(|(frame, _)| frame));
    }

    /// Turns one bit over, as if on a wire: with every checksum filled in and
    /// checked by nobody.
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

/// Does what a card does with an unfilled checksum.
fn fill_checksum(data: &mut [u8], start: usize, offset: usize) {
    let Some(covered) = data.get_mut(start..) else { return };
    // The field holds the sum of the pseudo-header, and so is summed too. Zero
    // means "none" to UDP; its other form is right for every protocol.
    let sum = Sum::of(covered).udp_checksum();
    if let Some(field) = covered.get_mut(offset..).and_then(|rest| rest.first_chunk_mut()) {
        *field = sum.to_be_bytes();
    }
}

impl<P: Port> Port for Fault<P> {
    fn close_for_now(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<Left> {
        Box::new(self.port).close_for_now(arena, keep)
    }

    fn go_live(&mut self) -> io::Result<()> {
        self.port.go_live()
    }

    fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        // Nothing was sent since the last call: what is held goes out.
        if !std::mem::take(&mut self.sent) {
            self.transmit.release();
        }
        if !self.transmit.ready.is_empty() {
            self.push_out(arena)?;
        }
        let wanted = quota.saturating_sub(self.receive.ready.len());
        let fresh = self.port.receive(arena, &mut self.arrived, wanted)?;
        for frame in self.arrived.drain(..) {
            self.receive.pass(arena, frame, &mut self.drops);
        }
        if fresh == 0 && wanted > 0 {
            self.receive.release();
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
            self.transmit.release();
        }
        while !burst.is_empty() && self.transmit.ready.len() < BACKLOG_MAX {
            let batch = burst.len().min(BACKLOG_MAX);
            for frame in burst.drain(..batch) {
                self.transmit.pass(arena, frame, &mut self.drops);
            }
            taken += batch;
            self.sent = true;
            self.push_out(arena)?;
        }
        self.push_out(arena)?;
        Ok(taken)
    }

    fn hold(&mut self, wait_ns: u64) -> io::Result<()> {
        self.port.hold(wait_ns)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        let waits = |lane: &Lane| !lane.held.is_empty() || !lane.ready.is_empty();
        if waits(&self.receive) || waits(&self.transmit) {
            return Ok(false);
        }
        self.port.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.wake_fd()
    }

    fn set_steering(&mut self, rule: &Rule, take: bool) -> io::Result<()> {
        self.port.set_steering(rule, take)
    }

    fn admission(&mut self) -> Option<&mut dyn Early> {
        self.port.admission()
    }

    fn counters(&mut self) -> PortCounters {
        let mut counters = self.port.counters();
        (counters.received, counters.received_bytes) = (self.received, self.received_bytes);
        counters.drops.merge(&self.drops);
        counters
    }
}
