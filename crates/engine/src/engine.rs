//! Engine: the poll loop of one network core.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tidegate_device::{Burst, Capabilities, Device, DeviceCounters, HandoverState};
use tidegate_gate::admission::{Admission, ClassCounters, Config};
use tidegate_gate::{
    Gate, GateAction, InterruptAction, Mode, Ring, RingCounts, Settings, transmit,
};
use tidegate_memory::{Arena, probes};
use tidegate_stack::{Counters, Event, QUEUE_FILL_SCALE, Stack, TcpId, UdpId};
use tidegate_wire::DropCounters;

use crate::admission::{AdmissionError, Admitter, Role, is_due};
use crate::arrival_times::ArrivalTimes;
use crate::capture::{CaptureDirection, Captures};
use crate::placement::EngineNodes;
use crate::pressure::{PressureMeter, SecondaryCores};
use crate::receive_way::ReceiveWay;
use crate::source_sample::sample_sources;
use crate::{
    AddressReservations, Clock, CpuContention, IdleConfig, IdleGovernor, IdleStep, KernelNeighbours,
};

/// Longest sleep, in nanoseconds, while frames wait because the transmit ring is full.
const TRANSMIT_RETRY_NS: u64 = 200_000;

/// The same after many attempts of the device to send what its own ring holds.
const MAX_TRANSMIT_RETRY_NS: u64 = 20_000_000;

/// Maximum number of frames of one receive call, whatever the quota.
const MAX_BURST_FRAMES: usize = 256;

/// Configuration of an engine.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// Receive scheduling: mode and quotas.
    pub gate: Settings,
    /// Waiting without work: busy-poll and sleep times.
    pub idle: IdleConfig,
}

/// Counters of an engine since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Rounds of the poll loop.
    pub rounds: u64,
    /// Rounds in which frames were received.
    pub busy_rounds: u64,
    /// Times that the engine prepared to sleep.
    pub sleeps: u64,
    /// Messages about the kernel's neighbours that were skipped since they could not be parsed.
    pub unreadable_neighbours: u64,
}

/// Timeout and wake-up sources of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepPlan {
    /// Time until the next timer, in nanoseconds; `None` if no timer is set.
    pub timeout_ns: Option<u64>,
    /// Receiving is held back: a readable device is no reason to wake up.
    pub receive_paused: bool,
}

/// Frames after which those passed on before have been processed: twice as many as all links to one
/// core hold, since half of them may come from a queue of the own.
const MAX_DRAINED_FRAMES: usize = 8192;

/// Descriptors to sleep on.
#[derive(Debug, Default)]
pub struct WakeFds {
    /// Readable when a frame has arrived.
    pub device: Option<OwnedFd>,
    /// Readable when other cores need this one, while receiving is paused.
    pub paused: Option<OwnedFd>,
    /// Readable when the kernel's neighbour table has changed.
    pub neighbours: Option<OwnedFd>,
}

/// Result of one step of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepResult {
    /// A ring was served; number of received frames.
    Served(usize),
    /// The application has its turn; quota in datagrams.
    Application(u32),
    /// Work is left, but applications come first now.
    Yield,
    /// No work, or receiving is held back.
    Wait,
}

/// A device, an arena and a stack, run to completion on one core.
pub struct Engine {
    // The device comes first: it is closed before the arena is unmapped, to which the kernel may
    // still be writing.
    pub(crate) device: Box<dyn Device>,
    pub(crate) arena: Arena,
    pub(crate) stack: Stack,
    /// State that a closed device leaves for the next process.
    pub(crate) handover_state: Option<HandoverState>,
    /// Own addresses among the programs on the interface.
    pub(crate) reservations: AddressReservations,
    /// NUMA node of the card.
    pub(crate) device_node: Option<usize>,
    neighbours: Option<KernelNeighbours>,
    gate: Gate,
    pub(crate) admission: Role,
    pub(crate) receive_way: ReceiveWay,
    /// Times of arrivals; `None` while they are not measured.
    pub(crate) arrivals: Option<ArrivalTimes>,
    /// Copies of frames for readers in other processes.
    pub(crate) captures: Option<Box<Captures>>,
    pressure: PressureMeter,
    /// End of the time in which receiving is held back.
    paused_until_ns: Option<u64>,
    pub(crate) clock: Clock,
    /// Time of the last clock reading.
    pub(crate) now_ns: u64,
    idle: IdleGovernor,
    /// Reported ends of closed connections, for [`crate::PortClaims::release_closed`].
    pub(crate) ended: Vec<TcpId>,
    pub(crate) incoming: Burst,
    /// Queue between receive work and protocol work, in modes `interrupt` and `moderated`.
    pub(crate) input: Burst,
    pub(crate) input_drops: DropCounters,
    counters: EngineCounters,
    /// Pause before the device tries again to send what it holds.
    next_device_retry_ns: u64,
}

impl Engine {
    /// NUMA nodes of the card and of the packet buffers.
    pub fn nodes(&self) -> EngineNodes {
        EngineNodes { device: self.device_node, memory: self.arena.memory().node() }
    }

    /// Creates an engine from a device, the arena it was opened with, and a stack. `neighbours`
    /// connects the stack to the kernel's neighbour table if both share an address.
    pub fn new(
        device: Box<dyn Device>,
        arena: Arena,
        stack: Stack,
        clock: Clock,
        neighbours: Option<KernelNeighbours>,
        config: EngineConfig,
    ) -> Self {
        let now_ns = clock.now_ns();
        let idle = IdleGovernor::new(config.idle, now_ns);
        let rings = RingCounts { receive: 1, transmit: 1, application: 1 };
        let gate = Gate::new(config.gate, rings, now_ns);
        let incoming = Burst::with_capacity(MAX_BURST_FRAMES);
        Self {
            device,
            arena,
            stack,
            handover_state: None,
            reservations: AddressReservations::default(),
            device_node: None,
            neighbours,
            gate,
            admission: Role::None,
            receive_way: ReceiveWay::Plain,
            arrivals: None,
            captures: None,
            pressure: PressureMeter::default(),
            paused_until_ns: None,
            clock,
            now_ns,
            idle,
            ended: Vec::new(),
            incoming,
            input: Burst::new(),
            input_drops: DropCounters::new(),
            counters: EngineCounters::default(),
            next_device_retry_ns: TRANSMIT_RETRY_NS,
        }
    }

    /// Enables admission control, or replaces its configuration: under overload, admission decides
    /// which frames pass. If this engine was the leader of other engines, it stays so. The seed
    /// should be secret.
    ///
    /// # Errors
    /// If the configuration is invalid or the device rejects it.
    pub fn set_admission(&mut self, config: &Config, seed: [u8; 16]) -> Result<(), AdmissionError> {
        let mut admitter = Admitter::new(config, seed, &mut *self.device)?;
        if let Some(others) = self.admission.admitter().and_then(Admitter::secondary_cores) {
            admitter.attach_secondary_cores(Arc::clone(others));
        }
        self.admission = Role::Leader(Box::new(admitter));
        self.update_special_ways();
        self.stack.report_confirmed_peers();
        Ok(())
    }

    /// Admission controller, if this engine is the leader.
    pub fn admission(&self) -> Option<&Admission> {
        self.admission.admitter().map(Admitter::admission)
    }

    /// Makes this engine the admission leader of `followers`, which report their load to it. Does
    /// nothing if this engine has no admission control.
    pub(crate) fn lead_admission<'s>(&mut self, followers: impl Iterator<Item = &'s mut Self>) {
        let Role::Leader(admitter) = &mut self.admission else { return };
        let secondary_cores = Arc::new(SecondaryCores::default());
        admitter.attach_secondary_cores(Arc::clone(&secondary_cores));
        for follower in followers {
            let leader = Arc::clone(&secondary_cores);
            let medium = follower.device.capabilities().medium;
            follower.admission = Role::Follower { leader, medium, next_report_ns: 0 };
            follower.update_special_ways();
            follower.stack.report_confirmed_peers();
        }
    }

    /// Runs one round: receives a burst, passes it to the stack, serves timers, transmits. Returns
    /// the number of received frames. The application has its turn until the next call. The device
    /// may poll for frames, though not beside a CPU-bound thread.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn poll(&mut self) -> io::Result<usize> {
        if self.is_beside_cpu_bound() { self.poll_briefly() } else { self.run_round() }
    }

    fn run_round(&mut self) -> io::Result<usize> {
        self.read_clock();
        // The device may poll for frames first.
        if self.stack.has_output() {
            self.flush()?;
        }
        self.gate.on_all_ready();
        let mut received = 0;
        while let StepResult::Served(frames) = self.step()? {
            received += frames;
        }
        self.paused_until_ns = self.gate.paused_until(self.now_ns);
        if self.paused_until_ns.is_some() {
            // No receive call has done this.
            self.device.forward(&mut self.arena)?;
        }
        self.serve_timers()?;
        self.counters.rounds += 1;
        if received > 0 {
            probes::on_receive(received);
            self.counters.busy_rounds += 1;
            self.idle.on_work(self.now_ns);
        }
        self.update_admission()?;
        // The transmit ring had its turn: frames are left only if timers made them or the device
        // was full.
        if self.stack.has_output() {
            self.flush()?;
        }
        Ok(received)
    }

    /// Runs one round like [`Engine::poll`], for a thread that has other work, or shares its
    /// processor with a thread at work: the device does not poll for frames for long.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn poll_briefly(&mut self) -> io::Result<usize> {
        self.device.set_idle_polls(false);
        let received = self.run_round();
        self.device.set_idle_polls(true);
        received
    }

    /// Serves the next ring that the gate chooses.
    ///
    /// # Errors
    /// If the device is no longer usable.
    #[inline]
    pub fn step(&mut self) -> io::Result<StepResult> {
        let turn = match self.gate.next(self.now_ns) {
            GateAction::Serve(turn) => turn,
            GateAction::Yield => return Ok(StepResult::Yield),
            GateAction::Wait { paused_until_ns } => {
                self.paused_until_ns = paused_until_ns;
                return Ok(StepResult::Wait);
            }
        };
        let taken = match turn.ring {
            Ring::Receive(_) => {
                let received = self.receive(turn.quota as usize)?;
                self.pressure.on_turn(received, turn.quota as usize);
                received
            }
            Ring::Transmit(_) => {
                self.flush()?;
                0
            }
            Ring::Application(_) => {
                // The application's time is its own and not charged to packets.
                self.gate.on_served(turn, 0, self.now_ns);
                return Ok(StepResult::Application(turn.quota));
            }
        };
        if self.gate.needs_turn_end_time() {
            self.read_clock();
        }
        self.gate.on_served(turn, taken as u32, self.now_ns);
        Ok(StepResult::Served(taken))
    }

    /// Receives up to `quota` frames and passes them to the stack.
    #[inline]
    fn receive(&mut self, quota: usize) -> io::Result<usize> {
        let loopback =
            if self.stack.has_loopback_frames() { self.receive_loopback(quota)? } else { 0 };
        // The wire has a quota of its own: loopback frames take nothing from it.
        let mut received = 0;
        while received < quota {
            let max = MAX_BURST_FRAMES.min(quota - received);
            let (device, arena, incoming) =
                (&mut *self.device, &mut self.arena, &mut self.incoming);
            let frames = match self.receive_way {
                ReceiveWay::Plain => device.receive(arena, incoming, max)?,
                ReceiveWay::Timed => self.receive_timed(max)?,
                ReceiveWay::Special => self.receive_specially(max)?,
            };
            self.stack.handle_burst(self.now_ns, &mut self.incoming, &mut self.arena);
            received += frames;
            if frames < max {
                break;
            }
        }
        Ok(received.max(loopback))
    }

    /// Processes the frames that another core has passed on so far, also while the gate holds
    /// receiving back: their sockets are about to leave. Returns false if some had to stay, since
    /// no frame is free.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn drain_passed_frames(&mut self) -> io::Result<bool> {
        self.read_clock();
        let mut drained = 0;
        // Frames that are passed on meanwhile are for other sockets.
        while drained < MAX_DRAINED_FRAMES && self.device.has_passed_frames() {
            match self.receive(MAX_BURST_FRAMES)? {
                0 => return Ok(false),
                frames => drained += frames,
            }
        }
        self.flush()?;
        Ok(true)
    }

    /// Receives up to `quota` loopback frames: frames that the stack sends to its own addresses.
    /// Frames sent in reply have the next turn.
    #[cold]
    pub(crate) fn receive_loopback(&mut self, quota: usize) -> io::Result<usize> {
        let loopback = self.stack.loopback_queue();
        let quota = quota.min(loopback.len());
        let frames = self.device.loop_back(&mut self.arena, loopback, &mut self.incoming, quota)?;
        self.handle_captured(CaptureDirection::Loopback);
        self.stack.handle_burst(self.now_ns, &mut self.incoming, &mut self.arena);
        Ok(frames)
    }

    /// Receives through admission, and passes the frames to the stack if they are captured.
    // Not inlined: an engine without admission and capture must not pay for this code.
    #[inline(never)]
    fn receive_specially(&mut self, max: usize) -> io::Result<usize> {
        let (device, arena, incoming) = (&mut *self.device, &mut self.arena, &mut self.incoming);
        let stack = &self.stack;
        let serves_port = |port: u16| stack.udp_has_port(port);
        let frames = match &mut self.admission {
            Role::Leader(admitter) => {
                admitter.receive(self.now_ns, device, arena, incoming, max, &serves_port)?
            }
            Role::Follower { leader, medium, .. } => {
                let frames = device.receive(arena, incoming, max)?;
                leader.sample(|| sample_sources(*medium, arena, incoming, &serves_port));
                frames
            }
            Role::None => device.receive(arena, incoming, max)?,
        };
        self.note_arrival(frames);
        self.handle_captured(CaptureDirection::Received);
        Ok(frames)
    }

    /// True while loopback frames wait. The engine receives them when it runs next.
    #[inline]
    pub fn has_loopback(&self) -> bool {
        self.stack.has_loopback_frames()
    }

    /// Adjusts admission to the pressure, or reports the pressure to the leader, once per period.
    #[inline]
    fn update_admission(&mut self) -> io::Result<()> {
        let admitter = match &mut self.admission {
            Role::Leader(admitter) if admitter.is_due(self.now_ns) => admitter,
            Role::Follower { leader, next_report_ns, .. }
                if is_due(self.now_ns, *next_report_ns) =>
            {
                *next_report_ns = self.now_ns.saturating_add(Config::PERIOD_NS);
                leader.report(&self.pressure.take(self.stack.counters(), None));
                return Ok(());
            }
            _ => return Ok(()),
        };
        let early_drop = admitter.early_drop_work(&mut *self.device)?;
        let pressure = self.pressure.take(self.stack.counters(), early_drop);
        admitter.on_period(self.now_ns, &pressure, &mut *self.device)
    }

    /// Serves the timers of the stack and changes of the kernel's neighbour table.
    ///
    /// # Errors
    /// If netlink is no longer usable.
    pub fn serve_timers(&mut self) -> io::Result<()> {
        let now_ns = self.now_ns;
        if self.stack.next_timeout().is_some_and(|timeout_ns| timeout_ns <= now_ns) {
            self.stack.handle_timeout(now_ns, &mut self.arena);
        }
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.update(now_ns, &mut self.stack, &mut self.arena)?;
        }
        Ok(())
    }

    /// Passes transmit frames of the stack to the device, as many as it takes.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.stack.sends_specially() {
            return self.flush_specially();
        }
        self.device.transmit(&mut self.arena, self.stack.transmit_queue())?;
        Ok(())
    }

    #[cold]
    fn flush_specially(&mut self) -> io::Result<()> {
        // Does nothing without classes.
        self.stack.take_turns(self.now_ns, &mut self.arena);
        if self.captures.is_some() {
            return self.transmit_captured();
        }
        self.device.transmit(&mut self.arena, self.stack.transmit_queue())?;
        Ok(())
    }

    /// Returns the next socket event. Neighbour requests and confirmed peers are handled here and
    /// not returned.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.stack.has_events() { self.next_event() } else { None }
    }

    fn next_event(&mut self) -> Option<Event> {
        loop {
            match self.stack.poll_event()? {
                Event::NeighbourUnresolved(address) => {
                    if let Some(neighbours) = &mut self.neighbours {
                        neighbours.resolve(address);
                    }
                }
                Event::PeerConfirmed(peer) => match &mut self.admission {
                    Role::Leader(admitter) => admitter.confirm(peer),
                    Role::Follower { leader, .. } => leader.confirm(peer),
                    Role::None => {}
                },
                Event::TcpEnded(id) => self.ended.push(id),
                event => return Some(event),
            }
        }
    }

    /// The stack, its arena, and the time in nanoseconds of the last round or of
    /// [`Engine::read_clock`]: the arguments of socket calls.
    #[inline]
    pub fn parts(&mut self) -> (&mut Stack, &mut Arena, u64) {
        (&mut self.stack, &mut self.arena, self.now_ns)
    }

    /// Time of the last round or of [`Engine::read_clock`], in nanoseconds of the system's
    /// monotonic clock.
    #[inline]
    pub fn monotonic_ns(&self) -> u64 {
        self.clock.monotonic_ns(self.now_ns)
    }

    /// Reads the clock, in nanoseconds. One reading for a whole burst is enough.
    pub fn read_clock(&mut self) -> u64 {
        self.now_ns = self.clock.now_ns();
        self.now_ns
    }

    /// The stack.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// True if the engine has its processor for itself, and never sleeps.
    pub fn is_dedicated(&self) -> bool {
        self.gate.settings().config().mode == Mode::Dedicated
    }

    /// Returns the next idle step, after a round without work.
    pub fn idle_step(&mut self) -> IdleStep {
        if self.paused_until_ns.is_some() {
            return IdleStep::Sleep;
        }
        if self.is_dedicated() {
            return IdleStep::Spin;
        }
        let now_ns = self.read_clock();
        self.idle.step(now_ns)
    }

    /// Records work that did not come from the device: idle waiting starts over.
    pub fn on_work(&mut self) {
        self.idle.on_work(self.now_ns);
    }

    /// Records CPU contention: another thread ran during a pause, so the engine sleeps sooner.
    pub fn on_cpu_contention(&mut self, contention: CpuContention) {
        let now_ns = self.read_clock();
        self.idle.on_cpu_contention(now_ns, contention);
    }

    /// Returns true while a CPU-bound thread shares the processor, as pauses have shown.
    pub fn is_beside_cpu_bound(&self) -> bool {
        self.idle.is_beside_cpu_bound(self.now_ns)
    }

    /// Prepares to sleep on [`Engine::wake_fds`]. Returns `None` if there is work already.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn prepare_sleep(&mut self) -> io::Result<Option<SleepPlan>> {
        let now_ns = self.read_clock();
        let held_ns = self.paused_until_ns.take().map(|until_ns| until_ns.saturating_sub(now_ns));
        match held_ns {
            // No receive call meanwhile: arriving frames stay in the ring of the device.
            Some(held_ns) => self.device.pause_receive(held_ns)?,
            None if self.has_loopback() || !self.device.prepare_sleep()? => return Ok(None),
            None => {}
        }
        self.counters.sleeps += 1;
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.on_sleep();
        }
        let retry_ns = self.device_retry_ns();
        let timeout_ns = self.timeout_ns().into_iter().chain(held_ns).chain(retry_ns).min();
        Ok(Some(SleepPlan { timeout_ns, receive_paused: held_ns.is_some() }))
    }

    /// Time until the device is to try again, in nanoseconds; longer each time, as the link may be down.
    /// `None` if it need not.
    fn device_retry_ns(&mut self) -> Option<u64> {
        if !self.device.needs_retry() {
            self.next_device_retry_ns = TRANSMIT_RETRY_NS;
            return None;
        }
        let longer_ns = (2 * self.next_device_retry_ns).min(MAX_TRANSMIT_RETRY_NS);
        Some(std::mem::replace(&mut self.next_device_retry_ns, longer_ns))
    }

    /// Duplicates the descriptors that become readable when there is work, for a thread that sleeps
    /// without holding the engine.
    ///
    /// # Errors
    /// If the process has no free descriptor.
    pub fn wake_fds(&self) -> io::Result<WakeFds> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let device = self.device.wake_fd().map(copy).transpose()?;
        let paused = self.device.pause_wake_fd().map(copy).transpose()?;
        let neighbours = self.neighbours.as_ref().map(|own| copy(own.as_fd())).transpose()?;
        Ok(WakeFds { device, paused, neighbours })
    }

    /// Reports the fill of a socket's receive queue to the gate.
    pub fn report_level(&mut self, id: UdpId) {
        match self.stack.udp_queue_fill(id) {
            Some(fill) => self.report_fill(id, fill),
            None => self.gate.on_queue_closed(id.to_bits()),
        }
    }

    /// Reports the fill of the queues behind a socket to the gate, in parts of
    /// [`QUEUE_FILL_SCALE`].
    pub fn report_fill(&mut self, id: UdpId, fill: u32) {
        self.pressure.on_level(fill * 100 / QUEUE_FILL_SCALE);
        self.gate.on_queue_level(self.now_ns, id.to_bits(), fill, QUEUE_FILL_SCALE);
    }

    /// True if the gate or admission uses queue levels.
    pub fn needs_queue_levels(&self) -> bool {
        !matches!(self.admission, Role::None) || self.gate.settings().config().feedback
    }

    /// Handles an interrupt of the device: marks its rings as ready in the gate.
    pub fn on_interrupt(&mut self) -> InterruptAction {
        let now_ns = self.read_clock();
        self.gate.on_ready(Ring::Transmit(0));
        self.gate.on_interrupt(now_ns, 0)
    }

    /// Time for which a sleep may last, in nanoseconds; `None` if it is not limited.
    pub fn timeout_ns(&mut self) -> Option<u64> {
        let now_ns = self.read_clock();
        let retry_ns = (!self.stack.transmit_queue().is_empty()).then_some(TRANSMIT_RETRY_NS);
        let timer_ns = self.stack.next_deadline().map(|at_ns| at_ns.saturating_sub(now_ns));
        let turn_ns = self.stack.next_turn_ns().map(|at_ns| at_ns.saturating_sub(now_ns));
        timer_ns.into_iter().chain(retry_ns).chain(turn_ns).min()
    }

    /// The gate, which schedules receive and transmit work.
    #[inline]
    pub fn gate(&mut self) -> &mut Gate {
        &mut self.gate
    }

    /// Replaces the settings of receive scheduling.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the mode differs: its threads are started when the stack
    /// is opened.
    pub fn set_gate(&mut self, settings: Settings) -> io::Result<()> {
        let (now, new) = (self.gate.settings().config().mode, settings.config().mode);
        if now != new {
            let (now, new) = (now.name(), new.name());
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("cannot change mode {now} to {new} while the stack runs: restart it"),
            ));
        }
        self.gate.apply_settings(settings);
        Ok(())
    }

    /// Names and counters of the admission classes; empty without admission.
    pub fn class_counters(&self) -> Vec<(String, ClassCounters)> {
        self.admission().map_or_else(Vec::new, |admission| {
            let names = admission.classes().names().map(str::to_owned);
            names.zip(admission.counters().iter().copied()).collect()
        })
    }

    /// Names and counters of the transmit classes; none without classes.
    pub fn transmit_class_counters(&self) -> Vec<(String, transmit::ClassCounters)> {
        let classes = self.stack.transmit_classes();
        classes.map(|(name, counters)| (name.to_owned(), counters)).collect()
    }

    /// Packets per second that admission admits in all; `None` while it limits nothing.
    pub fn admission_limit_pps(&self) -> Option<u64> {
        self.admission().and_then(Admission::total_pps)
    }

    /// The device, for operations that only it supports.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    /// Capabilities of the device.
    pub fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    /// Every drop, at the device and in the stack, by reason.
    pub fn drops(&mut self) -> DropCounters {
        let (_, device, stack) = self.counters();
        let mut drops = device.drops;
        drops.merge(&stack.drops);
        drops.merge(&stack.transmit_drops);
        drops
    }

    /// Counters of the engine, the device and the stack. Frames dropped by admission or by a full
    /// input queue count as drops of the device.
    pub fn counters(&mut self) -> (EngineCounters, DeviceCounters, &Counters) {
        let mut device = self.device.counters();
        let admitter_drops = self.admission.admitter().map(Admitter::drops);
        for drops in admitter_drops.into_iter().chain([&self.input_drops]) {
            device.received -= drops.total().min(device.received);
            device.drops.merge(drops);
        }
        let unreadable_neighbours =
            self.neighbours.as_ref().map_or(0, KernelNeighbours::unreadable);
        let own = EngineCounters { unreadable_neighbours, ..self.counters };
        (own, device, self.stack.counters())
    }

    /// Number of arena frames that are neither in use nor with the device.
    pub fn frames_available(&self) -> usize {
        self.arena.available()
    }
}
