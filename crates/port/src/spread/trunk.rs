//! The port of the core with the card.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tidegate_memory::{Arena, Doorbell, Frame};
use tidegate_wire::{DropCounters, DropReason};

use super::crossing::{Crossing, LocalPort};
use super::destination::{Destination, FragmentKey};
use super::directory::Owner;
use crate::admission::Early;
use crate::mem::MemPort;
use crate::steering::Rule;
use crate::{Burst, Capabilities, Front, Port, PortCounters};

/// The most frames that wait while ports go from one core to another.
const PARKED_MAX: usize = 1024;

/// How many fragmented packets are remembered; a power of two.
const FRAGMENTED: usize = 256;

/// The card, shared with other cores.
pub struct Trunk {
    port: Box<dyn Port>,
    /// To each of the other cores.
    wires: Vec<MemPort>,
    /// Frames for each of them, until the burst is over.
    outs: Vec<Burst>,
    arrived: Burst,
    /// Frames of other cores that the card has not taken yet, and how many of each.
    leaving: Burst,
    taken: Vec<usize>,
    /// Frames for ports that are between two cores.
    parked: VecDeque<(LocalPort, Frame)>,
    /// As of when they were looked through.
    handed: u64,
    /// Which port the first part of a packet was for.
    fragmented: Box<[Option<(FragmentKey, LocalPort)>]>,
    bell: Arc<Doorbell>,
    wake: OwnedFd,
    crossing: Arc<Crossing>,
    drops: DropCounters,
}

impl Trunk {
    pub(super) fn new(
        port: Box<dyn Port>,
        wires: Vec<MemPort>,
        bell: Arc<Doorbell>,
        crossing: Arc<Crossing>,
    ) -> io::Result<Self> {
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&wake, Some(bell.as_fd()))?;
        watch(&wake, port.wake_fd())?;
        Ok(Self {
            port,
            outs: wires.iter().map(|_| Burst::new()).collect(),
            taken: vec![0; wires.len()],
            wires,
            arrived: Burst::new(),
            leaving: Burst::new(),
            parked: VecDeque::new(),
            handed: crossing.handed(),
            fragmented: vec![None; FRAGMENTED].into_boxed_slice(),
            bell,
            wake,
            crossing,
            drops: DropCounters::new(),
        })
    }

    /// What all cores share.
    pub fn crossing(&self) -> Arc<Crossing> {
        Arc::clone(&self.crossing)
    }

    /// Whose a frame is goes by its headers; the core's own are put into `burst`.
    fn route(&mut self, arena: &mut Arena, frame: Frame, burst: &mut Burst) {
        let medium = self.port.capabilities().medium;
        let local = match Destination::of(medium, arena.bytes(&frame)) {
            Destination::Port(protocol, port) => (protocol, port),
            Destination::FirstFragment(key, protocol, port) => {
                *self.fragment(key) = Some((key, (protocol, port)));
                (protocol, port)
            }
            Destination::Fragment(key) => match *self.fragment(key) {
                Some((first, local)) if first == key => local,
                _ => return burst.push_back(frame),
            },
            Destination::Everybody => {
                self.tell_everybody(arena, &frame);
                return burst.push_back(frame);
            }
            Destination::Home => return burst.push_back(frame),
        };
        self.pass(arena, local, frame, burst);
    }

    fn fragment(&mut self, key: FragmentKey) -> &mut Option<(FragmentKey, LocalPort)> {
        &mut self.fragmented[key.place(FRAGMENTED)]
    }

    /// Gives a frame to the core that has the port.
    fn pass(&mut self, arena: &mut Arena, local: LocalPort, frame: Frame, burst: &mut Burst) {
        let waits =
            |parked: &VecDeque<(LocalPort, Frame)>| parked.iter().any(|(port, _)| *port == local);
        match self.crossing.owner(local) {
            Owner::Core(core) if self.parked.is_empty() || !waits(&self.parked) => {
                match core.checked_sub(1).and_then(|at| self.outs.get_mut(at)) {
                    Some(out) => out.push_back(frame),
                    None => burst.push_back(frame),
                }
            }
            // Frames for it wait, or some that came before still do.
            _ if self.parked.len() < PARKED_MAX => self.parked.push_back((local, frame)),
            _ => {
                self.drops.count(DropReason::PortRingFull);
                arena.free(frame);
            }
        }
    }

    /// Gives every other core that is used a copy.
    fn tell_everybody(&mut self, arena: &mut Arena, frame: &Frame) {
        for (at, out) in self.outs.iter_mut().enumerate() {
            if self.crossing.is_used(at + 1) {
                match arena.copy_of(frame) {
                    Some(copy) => out.push_back(copy),
                    None => self.drops.count(DropReason::NoBuffer),
                }
            }
        }
    }

    /// Lets frames go on whose ports have arrived.
    fn pass_parked(&mut self, arena: &mut Arena, burst: &mut Burst) {
        let handed = self.crossing.handed();
        if self.parked.is_empty() || handed == self.handed {
            return;
        }
        self.handed = handed;
        // Each goes to the back again if it still has to wait.
        for (local, frame) in std::mem::take(&mut self.parked) {
            self.pass(arena, local, frame, burst);
        }
    }

    /// Hands the others what is theirs. What a core cannot take is lost, as with a
    /// card whose ring is full.
    fn push_out(&mut self, arena: &mut Arena) -> io::Result<()> {
        for (wire, out) in self.wires.iter_mut().zip(&mut self.outs) {
            if out.is_empty() {
                continue;
            }
            wire.transmit(arena, out)?;
            for frame in out.drain(..) {
                self.drops.count(DropReason::PortRingFull);
                arena.free(frame);
            }
        }
        Ok(())
    }

    /// Takes what the others send, and gives it to the card; what they send to our
    /// own addresses goes to whom it is for, as if it had just come. Returns how many
    /// frames were taken.
    fn pump(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut count = 0;
        if self.leaving.is_empty() {
            let mut sent = std::mem::take(&mut self.arrived);
            for (wire, taken) in self.wires.iter_mut().zip(&mut self.taken) {
                let frames = wire.receive(arena, &mut sent, quota)?;
                *taken += frames;
                count += frames;
            }
            for frame in sent.drain(..) {
                match frame.is_looped() {
                    true => self.route(arena, frame, burst),
                    false => self.leaving.push_back(frame),
                }
            }
            self.arrived = sent;
        }
        if count == 0 && self.leaving.is_empty() {
            return Ok(0);
        }
        self.port.transmit(arena, &mut self.leaving)?;
        if self.leaving.is_empty() {
            for (at, taken) in self.taken.iter_mut().enumerate() {
                self.crossing.on_forwarded(at + 1, std::mem::take(taken));
            }
        }
        Ok(count)
    }
}

/// Wakes whoever sleeps on `wake`.
fn watch(wake: &OwnedFd, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let data = epoll::EventData::new_u64(0);
    fd.map_or(Ok(()), |fd| Ok(epoll::add(wake, fd, data, epoll::EventFlags::IN)?))
}

impl Front for Trunk {
    fn replace(&mut self, port: Box<dyn Port>) -> io::Result<Box<dyn Port>> {
        if let Some(fd) = self.port.wake_fd() {
            epoll::delete(&self.wake, fd)?;
        }
        watch(&self.wake, port.wake_fd())?;
        Ok(std::mem::replace(&mut self.port, port))
    }

    fn receive_sieved(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        sieve: &mut dyn FnMut(&mut Arena, &mut Burst),
    ) -> io::Result<usize> {
        self.pass_parked(arena, burst);
        let mut arrived = std::mem::take(&mut self.arrived);
        let received = self.port.receive(arena, &mut arrived, quota)?;
        sieve(arena, &mut arrived);
        for frame in arrived.drain(..) {
            self.route(arena, frame, burst);
        }
        self.arrived = arrived;
        let pumped = self.pump(arena, burst, quota)?;
        self.push_out(arena)?;
        self.crossing.on_round();
        Ok(received.max(pumped.min(quota)))
    }
}

impl Port for Trunk {
    fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.receive_sieved(arena, burst, quota, &mut |_, _| ())
    }

    fn loop_back(
        &mut self,
        arena: &mut Arena,
        looped: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let before = burst.len();
        for _ in 0..quota {
            let Some(frame) = looped.pop_front() else { break };
            self.route(arena, frame, burst);
        }
        self.push_out(arena)?;
        Ok(burst.len() - before)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.port.transmit(arena, burst)
    }

    fn hold(&mut self, wait_ns: u64) -> io::Result<()> {
        self.bell.arm();
        self.port.hold(wait_ns)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.bell.disarm();
        self.bell.arm();
        let has_sent = self.wires.iter_mut().any(MemPort::has_arrived);
        let may_pass = !self.parked.is_empty() && self.handed != self.crossing.handed();
        let idle =
            !has_sent && !may_pass && self.leaving.is_empty() && self.port.prepare_sleep()?;
        if !idle {
            self.bell.disarm();
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn set_steering(&mut self, rule: &Rule, take: bool) -> io::Result<()> {
        self.crossing.set_steering(0, rule, take)
    }

    fn admission(&mut self) -> Option<&mut dyn Early> {
        self.port.admission()
    }

    fn go_live(&mut self) -> io::Result<()> {
        self.port.go_live()
    }

    fn front(&mut self) -> Option<&mut dyn Front> {
        Some(self)
    }

    fn counters(&mut self) -> PortCounters {
        let mut counters = self.port.counters();
        counters.drops.merge(&self.drops);
        counters
    }
}
