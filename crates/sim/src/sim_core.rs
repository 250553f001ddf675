//! Simulated core: a processor, a queue pair of the NIC, a gate, and their tasks.
//!
//! Each task is a state machine. `begin_*` returns the cost of its next piece of work in
//! nanoseconds; `finish_*` applies the effect of the piece.

use std::collections::VecDeque;

use hdrhistogram::Histogram;
use tidegate_gate::{Gate, InterruptAction, Mode, Ring, RingCounts};

use crate::admission::AdmissionStage;
use crate::application::Application;
use crate::error::SetupError;
use crate::load::Packet;
use crate::nic::Nic;
use crate::polling::PollLoop;
use crate::processor::{PriorityLevel, Processor, ProcessorStep, TaskId};
use crate::report::{DropPoint, SimReport, latency_histogram};
use crate::router::RouterQueues;
use crate::setup::{BackgroundTask, Costs, HostRole, Placement, Setup, Tick};
use crate::udp::UdpService;

/// Service that the host provides.
pub(crate) enum Service {
    Udp { udp: Box<UdpService>, answers: bool, inline: bool },
    Router(RouterQueues),
}

/// State of the interrupt handler.
#[derive(Clone, Copy)]
enum InterruptHandler {
    /// Entering the handler.
    Enter,
    /// Taking packets, up to this many more.
    Take(u32),
    /// Reclaiming transmit descriptors; afterwards taking up to `take` packets.
    Reclaim { descriptors: u32, take: u32 },
}

/// State of a background task.
struct BackgroundState {
    background: BackgroundTask,
    task: TaskId,
    /// Packets that are due and not sent.
    due: u64,
    sent: u64,
}

/// Tasks that every core has.
#[derive(Clone, Copy)]
pub(crate) struct CoreTasks {
    pub(crate) interrupt: TaskId,
    pub(crate) software: TaskId,
    pub(crate) poller: TaskId,
    pub(crate) tick: TaskId,
}

/// Timers of a core. One timer for each background task follows from `Background` on.
#[derive(Clone, Copy)]
pub(crate) enum Timer {
    Interrupt,
    ReceivePaused,
    Transmitted,
    Tick,
    Stack,
    Admission,
    Background,
}

const NEVER_NS: u64 = u64::MAX;

pub(crate) struct SimCore {
    pub(crate) costs: Costs,
    pub(crate) mode: Mode,
    pub(crate) processor: Processor,
    pub(crate) tasks: CoreTasks,
    /// Applications that read packets: the readers of the service, or the filter process.
    pub(crate) applications: Vec<Application>,
    timers: Vec<u64>,
    /// Time of the earliest timer.
    next_timer_ns: u64,
    pub(crate) gate: Gate,
    pub(crate) nic: Nic,
    pub(crate) service: Service,
    pub(crate) admission_stage: Option<AdmissionStage>,
    /// Offset of the clock given to the gate and the stack from virtual time.
    skew_ns: i64,
    handler: InterruptHandler,
    input: VecDeque<Packet>,
    input_queue: usize,
    /// The software interrupt is running.
    software_running: bool,
    pub(crate) polling: PollLoop,
    /// The gate pauses receiving.
    pub(crate) receive_paused: bool,
    /// The gate was notified that the processor is idle.
    idle_notified: bool,
    tick: Option<Tick>,
    background: Vec<BackgroundState>,
    pub(crate) offered: u64,
    pub(crate) delivered: u64,
    pub(crate) answered: u64,
    pub(crate) drops: [u64; DropPoint::ALL.len()],
    latency_ns: Histogram<u64>,
}

impl SimCore {
    pub(crate) fn new(setup: &Setup, index: u32) -> Result<Self, SetupError> {
        let seed = setup.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(index));
        let service = match setup.role {
            HostRole::Udp { family, socket_queue, answers, placement } => Service::Udp {
                udp: Box::new(UdpService::new(family, setup.readers, socket_queue, seed)?),
                answers,
                inline: placement == Placement::Inline,
            },
            HostRole::Closed { family } => Service::Udp {
                udp: Box::new(UdpService::new(family, 0, 1, seed)?),
                answers: false,
                inline: false,
            },
            HostRole::Router { output_queue, filter } => {
                Service::Router(RouterQueues::new(output_queue, filter))
            }
        };
        let config = setup.gate.config();
        let mut processor = Processor::new(setup.costs.switch_ns, setup.quantum_ns);
        let tasks = CoreTasks {
            interrupt: processor.add(PriorityLevel::Device),
            software: processor.add(match setup.protocol_thread {
                true => PriorityLevel::Kernel,
                false => PriorityLevel::Software,
            }),
            poller: processor.add(poller_level(config.mode)),
            tick: processor.add(PriorityLevel::Device),
        };
        let applications = (0..setup.readers)
            .map(|_| Application::new(processor.add(PriorityLevel::Application)))
            .collect();
        let mut timers = vec![NEVER_NS; Timer::Background as usize];
        let background: Vec<BackgroundState> = setup
            .background
            .iter()
            .map(|&background| {
                let task = processor.add(PriorityLevel::Application);
                timers.push(match background {
                    BackgroundTask::Compute => NEVER_NS,
                    BackgroundTask::Send { period_ns, .. } => period_ns,
                });
                if background == BackgroundTask::Compute {
                    processor.wake(task);
                }
                BackgroundState { background, task, due: 0, sent: 0 }
            })
            .collect();
        let inline = matches!(service, Service::Udp { inline: true, .. });
        let rings = RingCounts { receive: 1, transmit: 1, application: usize::from(inline) };
        let mut gate = Gate::new(setup.gate.clone(), rings, 0);
        let receive_ring = match config.mode {
            Mode::Moderated => setup.receive_ring.min(config.descriptors),
            _ => setup.receive_ring,
        };
        let mut nic = Nic::new(setup, receive_ring);
        if config.mode == Mode::Dedicated {
            nic.interrupt_enabled = false;
            gate.on_all_ready();
            processor.wake(tasks.poller);
        }
        if let Some(tick) = setup.tick {
            timers[Timer::Tick as usize] = tick.period_ns;
        }
        let mut core = Self {
            costs: setup.costs,
            mode: config.mode,
            processor,
            tasks,
            applications,
            timers,
            next_timer_ns: 0,
            input: VecDeque::with_capacity(config.input_queue as usize),
            input_queue: config.input_queue as usize,
            gate,
            nic,
            service,
            admission_stage: AdmissionStage::new(setup, seed)?,
            skew_ns: 0,
            handler: InterruptHandler::Enter,
            software_running: false,
            polling: PollLoop::default(),
            receive_paused: false,
            idle_notified: false,
            tick: setup.tick,
            background,
            offered: 0,
            delivered: 0,
            answered: 0,
            drops: [0; DropPoint::ALL.len()],
            latency_ns: latency_histogram(),
        };
        core.set_stack_timer();
        core.set_admission_timer();
        core.find_next_timer();
        Ok(core)
    }

    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.processor.now_ns()
    }

    /// Returns the time of the clock given to the gate and the stack.
    #[inline]
    pub(crate) fn clock_ns(&self) -> u64 {
        self.now_ns().saturating_add_signed(self.skew_ns)
    }

    /// Converts a clock time to virtual time; returns the current time if it has passed.
    #[inline]
    pub(crate) fn virtual_time_of(&self, clock_ns: u64) -> u64 {
        self.now_ns().saturating_add(clock_ns.saturating_sub(self.clock_ns()))
    }

    /// Makes the clock jump. A jump back beyond the clock's start sets it to the start.
    pub(crate) fn jump_clock(&mut self, by_ns: i64) {
        let earliest_ns = -(i64::try_from(self.now_ns()).unwrap_or(i64::MAX));
        self.skew_ns = self.skew_ns.saturating_add(by_ns).max(earliest_ns);
        self.set_stack_timer();
    }

    /// Receives a packet at the current time.
    #[inline]
    pub(crate) fn arrive(&mut self, packet: Packet) {
        self.offered += 1;
        if !self.is_admitted(packet) {
            self.count_drop(DropPoint::Admission);
        } else if self.nic.arrive(packet) {
            self.raise_interrupt();
        } else {
            self.count_drop(DropPoint::NicRing);
        }
    }

    /// Runs the core up to `end_ns`.
    pub(crate) fn run_until(&mut self, end_ns: u64) {
        loop {
            if self.next_timer_ns <= self.now_ns() {
                self.fire_timers();
            }
            if self.processor.is_idle() {
                self.on_idle();
            } else {
                self.idle_notified = false;
            }
            let limit_ns = end_ns.min(self.next_timer_ns);
            match self.processor.step(limit_ns) {
                ProcessorStep::NeedsWork(task) if task == self.tasks.poller => self.poll(),
                ProcessorStep::NeedsWork(task) => match self.begin(task) {
                    Some(ns) => self.processor.assign(task, ns),
                    None => self.sleep_task(task),
                },
                ProcessorStep::Done(task) => self.finish(task),
                ProcessorStep::LimitReached if self.now_ns() >= end_ns => return,
                ProcessorStep::LimitReached => {}
            }
        }
    }

    /// Notifies the gate that the processor is idle, which may resume receiving.
    #[inline]
    fn on_idle(&mut self) {
        if !self.idle_notified {
            self.idle_notified = true;
            let clock_ns = self.clock_ns();
            self.gate.on_idle_processor(clock_ns);
            self.resume_if_not_paused();
        }
    }

    fn begin(&mut self, task: TaskId) -> Option<u64> {
        if task == self.tasks.interrupt {
            self.begin_interrupt()
        } else if task == self.tasks.software {
            self.begin_software()
        } else if task == self.tasks.tick {
            None
        } else if let Some(reader) = self.reader_of(task) {
            self.begin_application(reader)
        } else {
            self.begin_background(task)
        }
    }

    fn finish(&mut self, task: TaskId) {
        if task == self.tasks.poller {
            self.finish_poller();
        } else if task == self.tasks.interrupt {
            self.finish_interrupt();
        } else if task == self.tasks.software {
            self.finish_software();
        } else if let Some(reader) = self.reader_of(task) {
            self.finish_application(reader);
        } else if task != self.tasks.tick {
            self.finish_background(task);
        }
    }

    /// Puts a task without work to sleep.
    fn sleep_task(&mut self, task: TaskId) {
        self.processor.block(task);
        if task == self.tasks.interrupt {
            self.handler = InterruptHandler::Enter;
            self.nic.interrupt_raised = false;
            self.raise_interrupt();
        } else if task == self.tasks.software {
            self.software_running = false;
        }
    }

    // Interrupt handler.

    /// Raises the NIC's interrupt if one is needed, now or as soon as moderation allows.
    #[inline]
    pub(crate) fn raise_interrupt(&mut self) {
        if !self.nic.should_interrupt() {
            return;
        }
        let now_ns = self.now_ns();
        let allowed_ns = self.virtual_time_of(self.gate.next_interrupt_ns(self.clock_ns()));
        let at_ns = allowed_ns.max(self.nic.next_interrupt_ns());
        if at_ns <= now_ns {
            self.nic.on_interrupt_raised(now_ns);
            self.processor.wake(self.tasks.interrupt);
        } else {
            self.set_timer(Timer::Interrupt, at_ns);
        }
    }

    fn begin_interrupt(&mut self) -> Option<u64> {
        match self.handler {
            InterruptHandler::Enter => Some(self.costs.interrupt_ns),
            InterruptHandler::Take(limit) if limit > 0 && self.nic.waiting() > 0 => {
                Some(self.costs.receive_ns)
            }
            InterruptHandler::Take(take) if self.nic.reclaimable() > 0 => {
                let descriptors = self.nic.reclaimable();
                self.handler = InterruptHandler::Reclaim { descriptors, take };
                Some(u64::from(descriptors) * self.costs.transmit_done_ns)
            }
            InterruptHandler::Take(_) => None,
            InterruptHandler::Reclaim { .. } => None,
        }
    }

    fn finish_interrupt(&mut self) {
        match self.handler {
            InterruptHandler::Enter => {
                let clock_ns = self.clock_ns();
                match self.gate.on_interrupt(clock_ns, 0) {
                    InterruptAction::Take { limit } => self.handler = InterruptHandler::Take(limit),
                    InterruptAction::StartPolling => {
                        self.nic.interrupt_enabled = false;
                        self.gate.on_ready(Ring::Transmit(0));
                        self.processor.wake(self.tasks.poller);
                        self.sleep_task(self.tasks.interrupt);
                    }
                }
            }
            InterruptHandler::Take(limit) => {
                self.handler = InterruptHandler::Take(limit - 1);
                let Some(packet) = self.nic.take() else { return };
                if self.input.len() < self.input_queue {
                    self.input.push_back(packet);
                    self.processor.wake(self.tasks.software);
                } else {
                    self.count_drop(DropPoint::InputQueue);
                }
            }
            InterruptHandler::Reclaim { descriptors, take } => {
                self.nic.reclaim(descriptors);
                self.start_output();
                self.handler = InterruptHandler::Take(take);
            }
        }
    }

    // Protocol work, at software interrupt priority.

    fn begin_software(&mut self) -> Option<u64> {
        if self.input.is_empty() {
            return None;
        }
        let start_ns = if self.software_running { 0 } else { self.costs.software_ns };
        self.software_running = true;
        Some(start_ns + self.protocol_ns())
    }

    fn finish_software(&mut self) {
        if let Some(packet) = self.input.pop_front() {
            self.deliver(packet);
        }
    }

    /// Cost of the protocol work on a packet, transmission included if the packet is forwarded
    /// at once.
    #[inline]
    pub(crate) fn protocol_ns(&self) -> u64 {
        match &self.service {
            Service::Router(RouterQueues { filter: None, .. }) => {
                self.costs.protocol_ns + self.costs.transmit_ns
            }
            _ => self.costs.protocol_ns,
        }
    }

    /// Delivers a packet to its service after the protocol work. The stack is the real one; the
    /// cost of its work is already accounted.
    pub(crate) fn deliver(&mut self, packet: Packet) {
        let clock_ns = self.clock_ns();
        match &mut self.service {
            Service::Udp { udp, inline, .. } => {
                let inline = *inline;
                let reader = udp.ingest(clock_ns, packet);
                let (level, capacity) = udp.level(reader);
                self.gate.on_queue_level(clock_ns, reader as u64, level, capacity);
                match level {
                    0 => {}
                    _ if inline => self.gate.on_ready(Ring::Application(0)),
                    _ => self.wake_reader(reader),
                }
                self.set_stack_timer();
                self.start_output();
            }
            Service::Router(router) => match &mut router.filter {
                Some(queue) => {
                    if !queue.push(packet) {
                        self.count_drop(DropPoint::FilterQueue);
                        return;
                    }
                    let level = queue.waiting.len() as u32;
                    self.gate.on_queue_level(clock_ns, 0, level, queue.capacity);
                    self.wake_reader(0);
                }
                None => self.forward(packet),
            },
        }
    }

    /// Resumes receiving if the gate no longer pauses it.
    #[inline]
    pub(crate) fn resume_if_not_paused(&mut self) {
        let clock_ns = self.clock_ns();
        if self.receive_paused && self.gate.paused_until(clock_ns).is_none() {
            self.resume_receiving();
        }
    }

    fn resume_receiving(&mut self) {
        self.receive_paused = false;
        self.set_timer(Timer::ReceivePaused, NEVER_NS);
        self.processor.wake(self.tasks.poller);
    }

    // Transmission.

    /// Puts a packet into the output queue of a router.
    pub(crate) fn forward(&mut self, packet: Packet) {
        let Service::Router(router) = &mut self.service else { return };
        if router.push_output(packet) {
            self.start_output();
        } else {
            self.count_drop(DropPoint::OutputQueue);
        }
    }

    /// Passes packets to the NIC while transmit descriptors are free.
    pub(crate) fn start_output(&mut self) {
        let now_ns = self.now_ns();
        while self.nic.has_transmit_space() {
            let packet = match &mut self.service {
                // The arrival time of the stack's own packets is never used.
                Service::Udp { udp, .. } => {
                    udp.next_output().then_some(Packet { arrived_ns: now_ns, flow: 0 })
                }
                Service::Router(router) => router.output.pop_front(),
            };
            let Some(packet) = packet else { return };
            if let Some(at_ns) = self.nic.transmit(now_ns, packet) {
                self.set_timer(Timer::Transmitted, at_ns);
            }
        }
    }

    fn on_transmitted(&mut self) {
        let now_ns = self.now_ns();
        let (packet, next_ns) = self.nic.on_transmitted(now_ns);
        self.set_timer(Timer::Transmitted, next_ns.unwrap_or(NEVER_NS));
        if let (Some(packet), Service::Router(_)) = (packet, &self.service) {
            self.count_delivered(packet.arrived_ns);
        }
        if self.mode.has_input_queue() || self.nic.interrupt_enabled {
            self.raise_interrupt();
        } else if self.nic.has_many_reclaimable() {
            self.gate.on_ready(Ring::Transmit(0));
            if !self.receive_paused {
                self.processor.wake(self.tasks.poller);
            } else {
                // Only receiving is paused.
                self.resume_receiving();
            }
        }
    }

    // Background tasks.

    fn begin_background(&mut self, task: TaskId) -> Option<u64> {
        let state = self.background.iter_mut().find(|state| state.task == task)?;
        match state.background {
            BackgroundTask::Compute => Some(1_000_000),
            BackgroundTask::Send { cost_ns, .. } => {
                state.due = state.due.checked_sub(1)?;
                Some(cost_ns)
            }
        }
    }

    fn finish_background(&mut self, task: TaskId) {
        let state = self.background.iter_mut().find(|state| state.task == task);
        if let Some(state) = state.filter(|state| state.background != BackgroundTask::Compute) {
            state.sent += 1;
        }
    }

    // Timers.

    pub(crate) fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        self.timers[timer as usize] = at_ns;
        self.find_next_timer();
    }

    #[inline]
    fn find_next_timer(&mut self) {
        self.next_timer_ns = self.timers.iter().copied().min().unwrap_or(NEVER_NS);
    }

    pub(crate) fn set_stack_timer(&mut self) {
        if let Service::Udp { udp, .. } = &self.service {
            let at_ns = udp.next_timeout_ns().map_or(NEVER_NS, |at_ns| self.virtual_time_of(at_ns));
            if at_ns != self.timers[Timer::Stack as usize] {
                self.set_timer(Timer::Stack, at_ns);
            }
        }
    }

    #[inline]
    fn is_due(&self, timer: Timer) -> bool {
        self.timers[timer as usize] <= self.now_ns()
    }

    fn fire_timers(&mut self) {
        let now_ns = self.now_ns();
        if self.is_due(Timer::Transmitted) {
            self.on_transmitted();
        }
        if self.is_due(Timer::Interrupt) {
            self.set_timer(Timer::Interrupt, NEVER_NS);
            self.raise_interrupt();
        }
        if self.is_due(Timer::ReceivePaused) {
            self.resume_receiving();
        }
        if let Some(tick) = self.tick.filter(|_| self.is_due(Timer::Tick)) {
            self.set_timer(Timer::Tick, now_ns + tick.period_ns);
            self.processor.assign(self.tasks.tick, tick.cost_ns);
            self.processor.wake(self.tasks.tick);
        }
        if self.is_due(Timer::Stack) {
            let clock_ns = self.clock_ns();
            if let Service::Udp { udp, .. } = &mut self.service {
                udp.handle_timeout(clock_ns);
            }
            self.start_output();
            self.set_stack_timer();
        }
        if self.is_due(Timer::Admission) {
            self.on_admission_period();
        }
        for index in 0..self.background.len() {
            let timer = Timer::Background as usize + index;
            if let BackgroundTask::Send { period_ns, .. } = self.background[index].background
                && self.timers[timer] <= now_ns
            {
                self.timers[timer] += period_ns;
                self.background[index].due += 1;
                self.processor.wake(self.background[index].task);
            }
        }
        self.find_next_timer();
    }

    // Counters.

    #[inline]
    pub(crate) fn count_drop(&mut self, point: DropPoint) {
        self.drops[point as usize] += 1;
    }

    pub(crate) fn count_delivered(&mut self, arrived_ns: u64) {
        self.delivered += 1;
        let latency_ns = self.now_ns().saturating_sub(arrived_ns);
        self.latency_ns.saturating_record(latency_ns.max(1));
    }

    /// Resets the latency histogram.
    pub(crate) fn reset_latency(&mut self) {
        self.latency_ns.reset();
    }

    /// Adds the counts of this core since its start to a report.
    pub(crate) fn add_to(&self, report: &mut SimReport) {
        report.offered += self.offered;
        report.delivered += self.delivered;
        for (sum, application) in report.delivered_by_reader.iter_mut().zip(&self.applications) {
            *sum += application.delivered;
        }
        report.answered += self.answered;
        for (sum, drops) in report.drops.iter_mut().zip(self.drops) {
            *sum += drops;
        }
        let waiting = self.nic.waiting() + self.input.len();
        report.in_flight += waiting as u64;
        match &self.service {
            Service::Udp { udp, .. } => {
                report.drops[DropPoint::SocketQueue as usize] += udp.socket_drops();
                report.drops[DropPoint::Stack as usize] += udp.other_drops();
                report.in_flight += udp.in_flight();
            }
            Service::Router(router) => {
                report.in_flight += router.in_flight() + self.nic.sending() as u64;
            }
        }
        for (sum, level) in report.level_ns.iter_mut().zip(PriorityLevel::ALL) {
            *sum += self.processor.level_spent_ns(level);
        }
        report.idle_ns += self.processor.idle_ns();
        report.interrupts += self.gate.counters().interrupts;
        report.context_switches += self.processor.context_switches();
        for (sum, state) in report.background.iter_mut().zip(&self.background) {
            sum.spent_ns += self.processor.spent_ns(state.task);
            sum.sent += state.sent;
        }
        // Both histograms have the same bounds, so adding cannot fail.
        let _ = report.latency_ns.add(&self.latency_ns);
    }
}

/// Returns the priority level of the polling loop.
pub(crate) fn poller_level(mode: Mode) -> PriorityLevel {
    match mode {
        Mode::Napi => PriorityLevel::Software,
        _ => PriorityLevel::Kernel,
    }
}
