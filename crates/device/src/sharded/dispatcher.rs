//! Dispatcher of received frames: passes each frame to the core that has its port or flow.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use tidegate_memory::{Arena, Frame};
use tidegate_wire::{DropCounters, DropReason, Medium};

use super::destination::Destination;
use super::flow::Flow;
use super::flow_steering::FlowSteering;
use super::fragments::FragmentTable;
use super::parked::{ParkedFrames, SteeredFrame};
use super::steering_table::{SteeringTarget, SteeringView};
use crate::mem::MemDevice;
use crate::{Burst, Device};

/// In-memory link to another core.
pub(super) struct Link {
    wire: MemDevice,
    /// The other core has a queue, whose frames it may pass on to this core.
    receives: bool,
    /// Frames for the other core, until the end of the burst.
    outgoing: Burst,
}

impl Link {
    pub(super) fn new(wire: MemDevice, receives: bool) -> Self {
        Self { wire, receives, outgoing: Burst::new() }
    }
}

/// Use of a device's frames by its cores.
#[derive(Clone, Debug)]
pub(super) enum Usage {
    /// Each core has sockets: frames go to the core of their port or flow.
    Host,
    /// Each core forwards what it receives, and these are the addresses on the link.
    Router(Arc<[IpAddr]>),
}

/// Frames that other cores have passed on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassedCounters {
    pub(super) frames: u64,
    pub(super) bytes: u64,
}

/// Dispatcher of one core: delivers each frame to its core.
pub(super) struct Dispatcher {
    core: usize,
    medium: Medium,
    usage: Usage,
    /// Link to each core; `None` at this core's own place.
    links: Vec<Option<Link>>,
    /// Core whose frames are received first.
    next_link: usize,
    /// Frames for ports that are migrating between cores.
    parked: ParkedFrames,
    /// Number of handovers when the parked frames were last examined.
    handovers_seen: u64,
    fragments: FragmentTable,
    /// Fragments that are delivered after the first one of their packet; empty between frames.
    early_fragments: Burst,
    drops: DropCounters,
}

impl Dispatcher {
    pub(super) fn new(core: usize, medium: Medium, usage: Usage, links: Vec<Option<Link>>) -> Self {
        Self {
            core,
            medium,
            usage,
            links,
            next_link: 0,
            parked: ParkedFrames::new(),
            handovers_seen: 0,
            fragments: FragmentTable::new(),
            early_fragments: Burst::new(),
            drops: DropCounters::new(),
        }
    }

    /// Adds the frames dropped so far.
    pub(super) fn add_drops(&mut self, drops: &mut DropCounters) {
        drops.merge(&self.drops);
        for link in self.links.iter_mut().flatten() {
            drops.merge(&link.wire.counters().drops);
        }
    }

    /// Packets that other cores got from this one so far.
    pub(super) fn passed_on(&self) -> u64 {
        self.links.iter().flatten().map(|link| link.wire.transmitted()).sum()
    }

    /// True if other cores may pass frames on to this one.
    pub(super) fn has_peers(&self) -> bool {
        self.links.iter().flatten().any(|link| link.receives)
    }

    /// Receives up to `quota` frames that other cores have passed on to this core.
    pub(super) fn receive_passed(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let (first, count) = (self.next_link, self.links.len());
        let mut received = 0;
        for core in (first..count).chain(0..first) {
            let Some(link) = self.links[core].as_mut().filter(|link| link.receives) else {
                continue;
            };
            if link.wire.has_frame() {
                received += link.wire.receive(arena, burst, quota - received)?;
                // Frames of another core come first in the next call.
                self.next_link = (core + 1) % count;
            }
            if received == quota {
                break;
            }
        }
        Ok(received)
    }

    /// Frames that other cores have passed on to this core so far.
    pub(super) fn passed(&mut self) -> PassedCounters {
        let mut passed = PassedCounters::default();
        for link in self.links.iter_mut().flatten() {
            let counters = link.wire.counters();
            passed.frames += counters.received;
            passed.bytes += counters.received_bytes;
        }
        passed
    }

    /// True if frames that other cores have passed on wait.
    pub(super) fn has_passed(&mut self) -> bool {
        let mut links = self.links.iter_mut().flatten();
        links.any(|link| link.receives && link.wire.has_frame())
    }

    /// Dispatches a frame by its headers; frames for this core go to `burst`.
    pub(super) fn dispatch(
        &mut self,
        view: &SteeringView<'_>,
        arena: &mut Arena,
        frame: Frame,
        burst: &mut Burst,
    ) {
        let bytes = arena.bytes(&frame);
        let destination = match &self.usage {
            Usage::Host => Destination::classify(self.medium, bytes),
            Usage::Router(own) => Destination::at_router(self.medium, bytes, own),
        };
        let (local_port, flow) = match destination {
            Destination::Flow(headers) => (headers.local_port(), None),
            Destination::FirstFragment(key, headers) => {
                let flow = headers.flow();
                if let Some(flow) = flow {
                    self.fragments.begin(Instant::now(), key, flow, &mut self.early_fragments);
                }
                (headers.local_port(), flow)
            }
            Destination::Fragment(key) => {
                let now = Instant::now();
                match self.fragments.flow(now, key) {
                    Some(flow) => (flow.local_port(), Some(flow)),
                    None => return self.fragments.wait(now, key, frame, burst),
                }
            }
            Destination::AllCores => {
                let cores = match self.usage {
                    Usage::Host => view.active_cores(),
                    Usage::Router(_) => u64::MAX,
                };
                return self.give_to_cores(cores, arena, frame, burst);
            }
            Destination::ThisCore => return burst.push_back(frame),
            Destination::PrimaryCore => return self.give_to_core(0, frame, burst),
        };
        self.deliver(view, arena, SteeredFrame { local_port, flow, frame }, burst);
        while let Some(frame) = self.early_fragments.pop_front() {
            self.deliver(view, arena, SteeredFrame { local_port, flow, frame }, burst);
        }
    }

    /// Drops fragments that have waited too long for the first one of their packet.
    pub(super) fn expire_fragments(&mut self, arena: &mut Arena) {
        let Self { fragments, drops, .. } = self;
        if !fragments.has_waiting() {
            return;
        }
        fragments.expire(Instant::now(), |frame| {
            drops.count(DropReason::FragmentTimeout);
            arena.free(frame);
        });
    }

    /// Delivers a frame to the core that has the port or flow.
    fn deliver(
        &mut self,
        view: &SteeringView<'_>,
        arena: &mut Arena,
        steered: SteeredFrame,
        burst: &mut Burst,
    ) {
        let local = steered.local_port;
        let target = match view.target(local) {
            SteeringTarget::Shared => self.flow_target(view, arena, &steered),
            target => target,
        };
        match target {
            // Earlier frames of the port are still parked.
            _ if self.parked.has(local) => self.park(arena, steered),
            SteeringTarget::Parked | SteeringTarget::Shared => self.park(arena, steered),
            SteeringTarget::Cores(cores) => {
                self.give_to_cores(cores, arena, steered.frame, burst);
            }
            SteeringTarget::Core(core) => self.give_to_core(core, steered.frame, burst),
        }
    }

    /// Target of a frame for a port of several cores.
    fn flow_target(
        &self,
        view: &SteeringView<'_>,
        arena: &Arena,
        steered: &SteeredFrame,
    ) -> SteeringTarget {
        let bytes = arena.bytes(&steered.frame);
        let flow = steered.flow.or_else(|| Destination::flow(self.medium, bytes));
        match flow {
            Some(flow) if is_group_addressed(self.medium, &flow, bytes) => {
                view.group_target(steered.local_port)
            }
            Some(flow) => view.flow_target(&flow),
            None => SteeringTarget::Core(0),
        }
    }

    fn park(&mut self, arena: &mut Arena, steered: SteeredFrame) {
        if let Some(frame) = self.parked.push(steered) {
            self.drops.count(DropReason::DeviceRingFull);
            arena.free(frame);
        }
    }

    /// Gives a frame to a core; to this one if there is no such core.
    fn give_to_core(&mut self, core: usize, frame: Frame, burst: &mut Burst) {
        match self.links.get_mut(core).and_then(Option::as_mut) {
            Some(link) => link.outgoing.push_back(frame),
            None => burst.push_back(frame),
        }
    }

    /// Gives a frame to each core whose bit is set, to all but this one as a copy.
    fn give_to_cores(&mut self, cores: u64, arena: &mut Arena, frame: Frame, burst: &mut Burst) {
        for (core, link) in self.links.iter_mut().enumerate() {
            if let Some(link) = link
                && cores & 1 << core != 0
            {
                match arena.copy_of(&frame) {
                    Some(copy) => link.outgoing.push_back(copy),
                    None => self.drops.count(DropReason::NoBuffer),
                }
            }
        }
        match cores & 1 << self.core {
            0 => arena.free(frame),
            _ => burst.push_back(frame),
        }
    }

    /// True while frames are parked whose ports may have been handed over.
    pub(super) fn may_deliver_parked(&self, flow_steering: &FlowSteering) -> bool {
        !self.parked.is_empty() && self.handovers_seen != flow_steering.handovers()
    }

    /// Delivers parked frames whose ports have been handed over.
    pub(super) fn deliver_parked(
        &mut self,
        flow_steering: &FlowSteering,
        arena: &mut Arena,
        burst: &mut Burst,
    ) {
        if !self.may_deliver_parked(flow_steering) {
            return;
        }
        self.handovers_seen = flow_steering.handovers();
        let view = flow_steering.view(self.core);
        // A frame that still has to wait is parked again, at the end.
        for steered in self.parked.take() {
            self.deliver(&view, arena, steered, burst);
        }
    }

    /// Passes the dispatched frames on to the other cores. Drops on ring overflow, as a NIC does.
    pub(super) fn flush(&mut self, arena: &mut Arena) -> io::Result<()> {
        for Link { wire, outgoing, .. } in self.links.iter_mut().flatten() {
            if outgoing.is_empty() {
                continue;
            }
            wire.transmit(arena, outgoing)?;
            for frame in outgoing.drain(..) {
                self.drops.count(DropReason::DeviceRingFull);
                arena.free(frame);
            }
        }
        Ok(())
    }
}

/// Returns true when a frame is for all sockets on its port. An address does not show that it is
/// a subnet's broadcast address, so the link-layer destination counts too.
fn is_group_addressed(medium: Medium, flow: &Flow, frame: &[u8]) -> bool {
    let is_group = |first: &u8| first & 1 != 0;
    let to_group = medium == Medium::Ethernet && frame.first().is_some_and(is_group);
    let ip = flow.local().ip();
    to_group || ip.is_multicast() || ip == Ipv4Addr::BROADCAST
}
