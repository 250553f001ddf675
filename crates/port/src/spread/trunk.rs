//! The port of the core with the card.

use std::collections::VecDeque;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use tidegate_memory::{Arena, Doorbell, Frame};
use tidegate_wire::{DropCounters, DropReason, Medium};

use super::LocalPort;
use super::crossing::Crossing;
use super::destination::{Destination, FragmentKey};
use super::directory::{Owner, View};
use super::flow::Flow;
use crate::admission::Early;
use crate::mem::MemPort;
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
    sorter: Sorter,
    arrived: Burst,
    /// Frames of other cores that the card has not taken yet, and how many of each.
    leaving: Burst,
    taken: Vec<usize>,
    bell: Arc<Doorbell>,
    wake: OwnedFd,
    crossing: Arc<Crossing>,
}

/// Gives each frame to the core that it is for.
struct Sorter {
    medium: Medium,
    /// Frames for each of the other cores, until the burst is over.
    outs: Vec<Burst>,
    /// Frames for ports that are between two cores.
    parked: VecDeque<Addressed>,
    /// As of when they were looked through.
    handed: u64,
    /// Which flow the first part of a packet was of.
    fragmented: Box<[Option<(FragmentKey, Flow)>]>,
    drops: DropCounters,
}

/// A frame whose port is known.
struct Addressed {
    local: LocalPort,
    /// What its headers do not tell: it is a part of a packet.
    flow: Option<Flow>,
    frame: Frame,
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
        let sorter = Sorter {
            medium: port.capabilities().medium,
            outs: wires.iter().map(|_| Burst::new()).collect(),
            parked: VecDeque::new(),
            handed: crossing.handed(),
            fragmented: vec![None; FRAGMENTED].into_boxed_slice(),
            drops: DropCounters::new(),
        };
        Ok(Self {
            port,
            taken: vec![0; wires.len()],
            wires,
            sorter,
            arrived: Burst::new(),
            leaving: Burst::new(),
            bell,
            wake,
            crossing,
        })
    }

    /// What all cores share.
    pub fn crossing(&self) -> Arc<Crossing> {
        Arc::clone(&self.crossing)
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
            let mut view = self.crossing.view();
            for frame in sent.drain(..) {
                match frame.is_looped() {
                    true => self.sorter.route(&mut view, arena, frame, burst),
                    false => self.leaving.push_back(frame),
                }
            }
            drop(view);
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

impl Sorter {
    /// Whose a frame is goes by its headers; the core's own are put into `burst`.
    fn route(&mut self, view: &mut View<'_>, arena: &mut Arena, frame: Frame, burst: &mut Burst) {
        let (local, flow) = match Destination::of(self.medium, arena.bytes(&frame)) {
            Destination::Port(ends) => (ends.local_port(), None),
            Destination::FirstFragment(key, ends) => {
                let flow = ends.flow();
                *self.fragment(key) = flow.map(|flow| (key, flow));
                (ends.local_port(), flow)
            }
            Destination::Fragment(key) => match *self.fragment(key) {
                Some((first, flow)) if first == key => (flow.local_port(), Some(flow)),
                _ => return burst.push_back(frame),
            },
            Destination::Everybody => {
                self.copy(view.used(), arena, &frame);
                return burst.push_back(frame);
            }
            Destination::Home => return burst.push_back(frame),
        };
        self.pass(view, arena, Addressed { local, flow, frame }, burst);
    }

    fn fragment(&mut self, key: FragmentKey) -> &mut Option<(FragmentKey, Flow)> {
        &mut self.fragmented[key.place(FRAGMENTED)]
    }

    /// Gives a frame to the core that has the port, or the flow.
    fn pass(
        &mut self,
        view: &mut View<'_>,
        arena: &mut Arena,
        addressed: Addressed,
        burst: &mut Burst,
    ) {
        let local = addressed.local;
        let owner = match view.owner(local) {
            Owner::Shared => self.owner_of_flow(view, arena, &addressed),
            owner => owner,
        };
        // Some that came before may still wait.
        let is_overtaking = self.parked.iter().any(|parked| parked.local == local);
        match owner {
            _ if is_overtaking => self.park(arena, addressed),
            Owner::Parked | Owner::Shared => self.park(arena, addressed),
            Owner::Cores(cores) => {
                self.copy(cores, arena, &addressed.frame);
                match cores & 1 {
                    0 => arena.free(addressed.frame),
                    _ => burst.push_back(addressed.frame),
                }
            }
            Owner::Core(core) => match core.checked_sub(1).and_then(|at| self.outs.get_mut(at)) {
                Some(out) => out.push_back(addressed.frame),
                None => burst.push_back(addressed.frame),
            },
        }
    }

    /// Who gets a frame for a port of several cores.
    fn owner_of_flow(&self, view: &mut View<'_>, arena: &Arena, addressed: &Addressed) -> Owner {
        let bytes = arena.bytes(&addressed.frame);
        let flow = addressed.flow.or_else(|| Destination::flow(self.medium, bytes));
        match flow {
            Some(flow) if is_for_many(self.medium, &flow, bytes) => view.owners(addressed.local),
            Some(flow) => view.owner_of_flow(&flow),
            None => Owner::Core(0),
        }
    }

    fn park(&mut self, arena: &mut Arena, addressed: Addressed) {
        if self.parked.len() < PARKED_MAX {
            self.parked.push_back(addressed);
        } else {
            self.drops.count(DropReason::PortRingFull);
            arena.free(addressed.frame);
        }
    }

    /// Gives other cores a copy, each that has its bit.
    fn copy(&mut self, cores: u64, arena: &mut Arena, frame: &Frame) {
        for (at, out) in self.outs.iter_mut().enumerate() {
            if cores & 1 << (at + 1) != 0 {
                match arena.copy_of(frame) {
                    Some(copy) => out.push_back(copy),
                    None => self.drops.count(DropReason::NoBuffer),
                }
            }
        }
    }

    /// Whether frames wait whose ports may have arrived.
    fn may_pass_parked(&self, crossing: &Crossing) -> bool {
        !self.parked.is_empty() && self.handed != crossing.handed()
    }

    /// Lets frames go on whose ports have arrived.
    fn pass_parked(&mut self, crossing: &Crossing, arena: &mut Arena, burst: &mut Burst) {
        let handed = crossing.handed();
        if self.parked.is_empty() || handed == self.handed {
            return;
        }
        self.handed = handed;
        let mut view = crossing.view();
        // Each goes to the back again if it still has to wait.
        for addressed in std::mem::take(&mut self.parked) {
            self.pass(&mut view, arena, addressed, burst);
        }
    }

    /// Hands the others what is theirs. What a core cannot take is lost, as with a
    /// card whose ring is full.
    fn push_out(&mut self, wires: &mut [MemPort], arena: &mut Arena) -> io::Result<()> {
        for (wire, out) in wires.iter_mut().zip(&mut self.outs) {
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
}

/// Whether a frame is for all sockets on its port, and not for one of them. An address
/// does not tell whether it is a subnet's broadcast address, so the link says so, too.
fn is_for_many(medium: Medium, flow: &Flow, frame: &[u8]) -> bool {
    let is_group = |first: &u8| first & 1 != 0;
    let to_group = medium == Medium::Ethernet && frame.first().is_some_and(is_group);
    let ip = flow.local().ip();
    to_group || ip.is_multicast() || ip == Ipv4Addr::BROADCAST
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
        self.sorter.pass_parked(&self.crossing, arena, burst);
        let received = self.port.receive(arena, &mut self.arrived, quota)?;
        sieve(arena, &mut self.arrived);
        let mut view = self.crossing.view();
        for frame in self.arrived.drain(..) {
            self.sorter.route(&mut view, arena, frame, burst);
        }
        drop(view);
        let pumped = self.pump(arena, burst, quota)?;
        self.sorter.push_out(&mut self.wires, arena)?;
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
        let mut view = self.crossing.view();
        for _ in 0..quota {
            let Some(frame) = looped.pop_front() else { break };
            self.sorter.route(&mut view, arena, frame, burst);
        }
        drop(view);
        self.sorter.push_out(&mut self.wires, arena)?;
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
        let may_pass = self.sorter.may_pass_parked(&self.crossing);
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
        counters.drops.merge(&self.sorter.drops);
        counters
    }
}
