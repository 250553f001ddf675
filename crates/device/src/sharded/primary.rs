//! Device of the primary core.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll;
use tidegate_memory::{Arena, Doorbell, Frame};
use tidegate_wire::{DropCounters, DropReason, Medium};

use super::destination::Destination;
use super::flow::Flow;
use super::flow_steering::FlowSteering;
use super::fragments::FragmentTable;
use super::parked::{ParkedFrames, SteeredFrame};
use super::steering_table::{SteeringTarget, SteeringView};
use crate::admission::EarlyDrop;
use crate::mem::MemDevice;
use crate::{Burst, Capabilities, Device, DeviceCounters, ShardedDevice};

/// Maximum number of loopback frames of secondary cores that wait while receiving is paused.
const MAX_LOOPBACK_FRAMES: usize = 1024;

/// Device of the primary core: wraps the NIC and shares it with the secondary cores.
pub struct PrimaryDevice {
    device: Box<dyn Device>,
    /// Link to each secondary core.
    wires: Vec<MemDevice>,
    dispatcher: Dispatcher,
    arrived: Burst,
    /// Frames of secondary cores that the device has not taken yet, and the number of frames
    /// of each core.
    tx_backlog: Burst,
    backlog_counts: Vec<usize>,
    /// Frames of secondary cores to addresses of their own, to be dispatched like received frames.
    loopback: Burst,
    doorbell: Arc<Doorbell>,
    wake_epoll: OwnedFd,
    flow_steering: Arc<FlowSteering>,
}

/// Delivers each frame to its core.
struct Dispatcher {
    medium: Medium,
    /// Frames for each secondary core, until the end of the burst.
    secondary_bursts: Vec<Burst>,
    /// Frames for ports that are migrating between cores.
    parked: ParkedFrames,
    /// Number of handovers when the parked frames were last examined.
    handovers_seen: u64,
    fragments: FragmentTable,
    /// Fragments that are delivered after the first one of their packet; empty between frames.
    early_fragments: Burst,
    drops: DropCounters,
}

impl PrimaryDevice {
    pub(super) fn new(
        device: Box<dyn Device>,
        wires: Vec<MemDevice>,
        doorbell: Arc<Doorbell>,
        flow_steering: Arc<FlowSteering>,
    ) -> io::Result<Self> {
        let wake_epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add_wake_source(&wake_epoll, Some(doorbell.as_fd()))?;
        add_wake_source(&wake_epoll, device.wake_fd())?;
        let dispatcher = Dispatcher {
            medium: device.capabilities().medium,
            secondary_bursts: wires.iter().map(|_| Burst::new()).collect(),
            parked: ParkedFrames::new(),
            handovers_seen: flow_steering.handovers(),
            fragments: FragmentTable::new(),
            early_fragments: Burst::new(),
            drops: DropCounters::new(),
        };
        Ok(Self {
            device,
            backlog_counts: vec![0; wires.len()],
            wires,
            dispatcher,
            arrived: Burst::new(),
            tx_backlog: Burst::new(),
            loopback: Burst::new(),
            doorbell,
            wake_epoll,
            flow_steering,
        })
    }

    /// Flow steering state that all cores share.
    pub fn flow_steering(&self) -> Arc<FlowSteering> {
        Arc::clone(&self.flow_steering)
    }

    /// Takes the frames that secondary cores send, and transmits them on the device; loopback
    /// frames are kept. Returns the number of frames taken.
    fn forward_tx(&mut self, arena: &mut Arena, quota: usize) -> io::Result<usize> {
        let mut count = 0;
        if self.tx_backlog.is_empty() && self.loopback.len() < MAX_LOOPBACK_FRAMES {
            let mut sent = std::mem::take(&mut self.arrived);
            for (wire, taken) in self.wires.iter_mut().zip(&mut self.backlog_counts) {
                let frames = wire.receive(arena, &mut sent, quota)?;
                *taken += frames;
                count += frames;
            }
            for frame in sent.drain(..) {
                match frame.is_loopback() {
                    true => self.loopback.push_back(frame),
                    false => self.tx_backlog.push_back(frame),
                }
            }
            self.arrived = sent;
        }
        if count == 0 && self.tx_backlog.is_empty() {
            return Ok(0);
        }
        self.device.transmit(arena, &mut self.tx_backlog)?;
        if self.tx_backlog.is_empty() {
            for (at, taken) in self.backlog_counts.iter_mut().enumerate() {
                self.flow_steering.on_forwarded(at + 1, std::mem::take(taken));
            }
        }
        Ok(count)
    }
}

impl Dispatcher {
    /// Dispatches a frame by its headers; frames for the primary core go to `burst`.
    fn dispatch(
        &mut self,
        view: &SteeringView<'_>,
        arena: &mut Arena,
        frame: Frame,
        burst: &mut Burst,
    ) {
        let (local_port, flow) = match Destination::classify(self.medium, arena.bytes(&frame)) {
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
                self.copy_to_cores(view.active_cores(), arena, &frame);
                return burst.push_back(frame);
            }
            Destination::PrimaryCore => return burst.push_back(frame),
        };
        self.deliver(view, arena, SteeredFrame { local_port, flow, frame }, burst);
        while let Some(frame) = self.early_fragments.pop_front() {
            self.deliver(view, arena, SteeredFrame { local_port, flow, frame }, burst);
        }
    }

    /// Drops fragments that have waited too long for the first one of their packet.
    #[cold]
    fn expire_fragments(&mut self, arena: &mut Arena) {
        let Self { fragments, drops, .. } = self;
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
                self.copy_to_cores(cores, arena, &steered.frame);
                match cores & 1 {
                    0 => arena.free(steered.frame),
                    _ => burst.push_back(steered.frame),
                }
            }
            SteeringTarget::Core(core) => {
                match core.checked_sub(1).and_then(|at| self.secondary_bursts.get_mut(at)) {
                    Some(out) => out.push_back(steered.frame),
                    None => burst.push_back(steered.frame),
                }
            }
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

    /// Gives a copy to each secondary core whose bit is set.
    fn copy_to_cores(&mut self, cores: u64, arena: &mut Arena, frame: &Frame) {
        for (at, burst) in self.secondary_bursts.iter_mut().enumerate() {
            if cores & 1 << (at + 1) != 0 {
                match arena.copy_of(frame) {
                    Some(copy) => burst.push_back(copy),
                    None => self.drops.count(DropReason::NoBuffer),
                }
            }
        }
    }

    /// Returns true when frames are parked whose ports may have been handed over.
    fn may_deliver_parked(&self, flow_steering: &FlowSteering) -> bool {
        !self.parked.is_empty() && self.handovers_seen != flow_steering.handovers()
    }

    /// Delivers parked frames whose ports have been handed over.
    fn deliver_parked(
        &mut self,
        flow_steering: &FlowSteering,
        arena: &mut Arena,
        burst: &mut Burst,
    ) {
        let handovers = flow_steering.handovers();
        if self.parked.is_empty() || handovers == self.handovers_seen {
            return;
        }
        self.handovers_seen = handovers;
        let view = flow_steering.view();
        // A frame that still has to wait is parked again, at the end.
        for steered in self.parked.take() {
            self.deliver(&view, arena, steered, burst);
        }
    }

    /// Transmits to the secondary cores. Drops on ring overflow, as a NIC does.
    fn flush_secondaries(&mut self, wires: &mut [MemDevice], arena: &mut Arena) -> io::Result<()> {
        for (wire, burst) in wires.iter_mut().zip(&mut self.secondary_bursts) {
            if burst.is_empty() {
                continue;
            }
            wire.transmit(arena, burst)?;
            for frame in burst.drain(..) {
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

/// Adds a descriptor that wakes a thread sleeping on `wake_epoll`.
fn add_wake_source(wake_epoll: &OwnedFd, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let data = epoll::EventData::new_u64(0);
    fd.map_or(Ok(()), |fd| Ok(epoll::add(wake_epoll, fd, data, epoll::EventFlags::IN)?))
}

impl ShardedDevice for PrimaryDevice {
    fn replace_inner(&mut self, device: Box<dyn Device>) -> io::Result<Box<dyn Device>> {
        if let Some(fd) = self.device.wake_fd() {
            epoll::delete(&self.wake_epoll, fd)?;
        }
        add_wake_source(&self.wake_epoll, device.wake_fd())?;
        Ok(std::mem::replace(&mut self.device, device))
    }

    fn receive_filtered(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        filter: &mut dyn FnMut(&mut Arena, &mut Burst),
    ) -> io::Result<usize> {
        self.dispatcher.deliver_parked(&self.flow_steering, arena, burst);
        if self.dispatcher.fragments.has_waiting() {
            self.dispatcher.expire_fragments(arena);
        }
        let received = self.device.receive(arena, &mut self.arrived, quota)?;
        filter(arena, &mut self.arrived);
        let view = self.flow_steering.view();
        for frame in self.arrived.drain(..) {
            self.dispatcher.dispatch(&view, arena, frame, burst);
        }
        let forwarded = self.forward_tx(arena, quota)?;
        if !self.loopback.is_empty() {
            let view = self.flow_steering.view();
            for frame in self.loopback.drain(..) {
                self.dispatcher.dispatch(&view, arena, frame, burst);
            }
        }
        self.dispatcher.flush_secondaries(&mut self.wires, arena)?;
        self.flow_steering.on_round();
        Ok(received.max(forwarded.min(quota)))
    }
}

impl Device for PrimaryDevice {
    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.receive_filtered(arena, burst, quota, &mut |_, _| ())
    }

    fn loop_back(
        &mut self,
        arena: &mut Arena,
        loopback: &mut Burst,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let before = burst.len();
        let view = self.flow_steering.view();
        for _ in 0..quota {
            let Some(frame) = loopback.pop_front() else { break };
            self.dispatcher.dispatch(&view, arena, frame, burst);
        }
        self.dispatcher.flush_secondaries(&mut self.wires, arena)?;
        Ok(burst.len() - before)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.device.transmit(arena, burst)
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.device.set_idle_polls(allowed);
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        self.doorbell.disarm();
        self.doorbell.arm();
        // Frames that a secondary core has sent before must not wait for the end of the pause.
        let has_frames = self.wires.iter_mut().any(MemDevice::has_frame);
        if has_frames && self.loopback.len() < MAX_LOOPBACK_FRAMES {
            self.doorbell.ring();
        }
        self.device.pause_receive(wait_ns)
    }

    fn pause_wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.doorbell.as_fd())
    }

    /// Also counts as a round: the last receive has passed its frames on.
    fn forward(&mut self, arena: &mut Arena) -> io::Result<()> {
        self.forward_tx(arena, MAX_LOOPBACK_FRAMES)?;
        self.flow_steering.on_round();
        Ok(())
    }

    fn has_unsent_frames(&mut self) -> bool {
        self.device.has_unsent_frames()
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.doorbell.disarm();
        self.doorbell.arm();
        let has_secondary_frames = self.wires.iter_mut().any(MemDevice::has_frame);
        let may_deliver = self.dispatcher.may_deliver_parked(&self.flow_steering);
        let idle = !has_secondary_frames
            && !may_deliver
            && self.tx_backlog.is_empty()
            && self.loopback.is_empty()
            && self.device.prepare_sleep()?;
        if !idle {
            self.doorbell.disarm();
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_epoll.as_fd())
    }

    fn early_drop(&mut self) -> Option<&mut dyn EarlyDrop> {
        self.device.early_drop()
    }

    fn take_over(&mut self) -> io::Result<()> {
        self.device.take_over()
    }

    fn as_sharded(&mut self) -> Option<&mut dyn ShardedDevice> {
        Some(self)
    }

    fn counters(&mut self) -> DeviceCounters {
        let mut counters = self.device.counters();
        counters.drops.merge(&self.dispatcher.drops);
        counters
    }
}
