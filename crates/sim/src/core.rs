//! One core: a processor, a queue of the card, a gate, and the work that they
//! share out.
//!
//! Each task is a small machine that is asked for its next piece of work
//! (`begin_*`, which gives what the piece costs) and told when the piece is
//! done (`finish_*`, which has its effect).

use std::collections::VecDeque;

use hdrhistogram::Histogram;
use tidegate_gate::{Gate, Interrupt, Mode, Ring, Rings};

use crate::admission::Gatekeeper;
use crate::application::Program;
use crate::card::Card;
use crate::error::SetupError;
use crate::load::Packet;
use crate::polling::Polling;
use crate::processor::{Level, Processor, Step, TaskId};
use crate::report::{Place, Report, latency_histogram};
use crate::router::Router;
use crate::setup::{Beside, Costs, Placement, Role, Setup, Tick};
use crate::udp::UdpService;

/// What the host does with a packet.
pub(crate) enum Service {
    Udp { udp: Box<UdpService>, answers: bool, inline: bool },
    Router(Router),
}

/// The work of the interrupt handler.
#[derive(Clone, Copy)]
enum Handler {
    /// It is being entered.
    Enter,
    /// It takes packets, at most so many.
    Take(u32),
    /// It takes so many transmit descriptors back.
    Reclaim { descriptors: u32, take: u32 },
}

/// A program beside the network.
struct BesideState {
    beside: Beside,
    task: TaskId,
    /// Packets that are due and not sent.
    due: u64,
    sent: u64,
}

/// The tasks that every core has.
#[derive(Clone, Copy)]
pub(crate) struct Tasks {
    pub(crate) interrupt: TaskId,
    pub(crate) software: TaskId,
    pub(crate) poller: TaskId,
    pub(crate) tick: TaskId,
}

/// When something happens by itself. Those of programs come after these.
#[derive(Clone, Copy)]
pub(crate) enum Timer {
    Interrupt,
    Held,
    Transmitted,
    Tick,
    Stack,
    Admission,
    Beside,
}

const NEVER: u64 = u64::MAX;

pub(crate) struct Core {
    pub(crate) costs: Costs,
    pub(crate) mode: Mode,
    pub(crate) processor: Processor,
    pub(crate) tasks: Tasks,
    /// Who reads: the service's programs, or the screen.
    pub(crate) programs: Vec<Program>,
    timers: Vec<u64>,
    /// The earliest of the timers.
    next_timer_ns: u64,
    pub(crate) gate: Gate,
    pub(crate) card: Card,
    pub(crate) service: Service,
    pub(crate) gatekeeper: Option<Gatekeeper>,
    /// How far the clock that the gate and the stack are told is from the time.
    skew_ns: i64,
    handler: Handler,
    input: VecDeque<Packet>,
    input_queue: usize,
    /// Whether the software interrupt runs.
    software_runs: bool,
    pub(crate) polling: Polling,
    /// Whether the gate holds receiving back.
    pub(crate) held: bool,
    /// Whether the gate was told that the processor is idle.
    told_idle: bool,
    tick: Option<Tick>,
    beside: Vec<BesideState>,
    pub(crate) offered: u64,
    pub(crate) delivered: u64,
    pub(crate) answered: u64,
    pub(crate) drops: [u64; Place::ALL.len()],
    latency_ns: Histogram<u64>,
}

impl Core {
    pub(crate) fn new(setup: &Setup, index: u32) -> Result<Self, SetupError> {
        let seed = setup.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(index));
        let service = match setup.role {
            Role::Udp { family, socket_queue, answers, placement } => Service::Udp {
                udp: Box::new(UdpService::new(family, setup.readers, socket_queue, seed)?),
                answers,
                inline: placement == Placement::Inline,
            },
            Role::Closed { family } => Service::Udp {
                udp: Box::new(UdpService::new(family, 0, 1, seed)?),
                answers: false,
                inline: false,
            },
            Role::Router { output_queue, screen } => {
                Service::Router(Router::new(output_queue, screen))
            }
        };
        let config = setup.gate.config();
        let mut processor = Processor::new(setup.costs.switch_ns, setup.quantum_ns);
        let tasks = Tasks {
            interrupt: processor.add(Level::Device),
            software: processor.add(match setup.protocol_thread {
                true => Level::Kernel,
                false => Level::Software,
            }),
            poller: processor.add(poller_level(config.mode)),
            tick: processor.add(Level::Device),
        };
        let programs =
            (0..setup.readers).map(|_| Program::new(processor.add(Level::Program))).collect();
        let mut timers = vec![NEVER; Timer::Beside as usize];
        let beside: Vec<BesideState> = setup
            .beside
            .iter()
            .map(|&beside| {
                let task = processor.add(Level::Program);
                timers.push(match beside {
                    Beside::Compute => NEVER,
                    Beside::Send { period_ns, .. } => period_ns,
                });
                if beside == Beside::Compute {
                    processor.wake(task);
                }
                BesideState { beside, task, due: 0, sent: 0 }
            })
            .collect();
        let inline = matches!(service, Service::Udp { inline: true, .. });
        let rings = Rings { receive: 1, transmit: 1, application: usize::from(inline) };
        let mut gate = Gate::new(setup.gate.clone(), rings, 0);
        let receive_ring = match config.mode {
            Mode::Moderated => setup.receive_ring.min(config.descriptors),
            _ => setup.receive_ring,
        };
        let mut card = Card::new(setup, receive_ring);
        if config.mode == Mode::Dedicated {
            card.enabled = false;
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
            programs,
            timers,
            next_timer_ns: 0,
            input: VecDeque::with_capacity(config.input_queue as usize),
            input_queue: config.input_queue as usize,
            gate,
            card,
            service,
            gatekeeper: Gatekeeper::new(setup, seed)?,
            skew_ns: 0,
            handler: Handler::Enter,
            software_runs: false,
            polling: Polling::default(),
            held: false,
            told_idle: false,
            tick: setup.tick,
            beside,
            offered: 0,
            delivered: 0,
            answered: 0,
            drops: [0; Place::ALL.len()],
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

    /// What the clock says to the gate and to the stack.
    #[inline]
    pub(crate) fn clock_ns(&self) -> u64 {
        self.now_ns().saturating_add_signed(self.skew_ns)
    }

    /// When the clock will say so; now, if it is past that.
    #[inline]
    pub(crate) fn when_ns(&self, clock_ns: u64) -> u64 {
        self.now_ns().saturating_add(clock_ns.saturating_sub(self.clock_ns()))
    }

    /// The clock jumps. Back beyond its beginning it begins anew.
    pub(crate) fn jump_clock(&mut self, by_ns: i64) {
        let earliest_ns = -(i64::try_from(self.now_ns()).unwrap_or(i64::MAX));
        self.skew_ns = self.skew_ns.saturating_add(by_ns).max(earliest_ns);
        self.set_stack_timer();
    }

    /// A packet comes to the card, now.
    #[inline]
    pub(crate) fn arrive(&mut self, packet: Packet) {
        self.offered += 1;
        if !self.is_admitted(packet) {
            self.drop_at(Place::Admission);
        } else if self.card.arrive(packet) {
            self.raise();
        } else {
            self.drop_at(Place::Card);
        }
    }

    /// Lets time pass up to `end_ns`.
    pub(crate) fn run_until(&mut self, end_ns: u64) {
        loop {
            if self.next_timer_ns <= self.now_ns() {
                self.fire_timers();
            }
            if self.processor.is_idle() {
                self.on_idle();
            } else {
                self.told_idle = false;
            }
            let limit_ns = end_ns.min(self.next_timer_ns);
            match self.processor.step(limit_ns) {
                Step::Wants(task) if task == self.tasks.poller => self.poll(),
                Step::Wants(task) => match self.begin(task) {
                    Some(ns) => self.processor.give(task, ns),
                    None => self.leave(task),
                },
                Step::Done(task) => self.finish(task),
                Step::Limit if self.now_ns() >= end_ns => return,
                Step::Limit => {}
            }
        }
    }

    /// The processor falls idle: the gate may have something against that.
    #[inline]
    fn on_idle(&mut self) {
        if !self.told_idle {
            self.told_idle = true;
            let clock_ns = self.clock_ns();
            self.gate.on_idle_processor(clock_ns);
            self.release_if_not_held();
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
            self.begin_beside(task)
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
            self.finish_beside(task);
        }
    }

    /// A task has nothing to do.
    fn leave(&mut self, task: TaskId) {
        self.processor.block(task);
        if task == self.tasks.interrupt {
            self.handler = Handler::Enter;
            self.card.raised = false;
            self.raise();
        } else if task == self.tasks.software {
            self.software_runs = false;
        }
    }

    // The interrupt handler.

    /// Raises the card's interrupt if it has a reason, now or when moderation
    /// allows it.
    #[inline]
    pub(crate) fn raise(&mut self) {
        if !self.card.has_reason() {
            return;
        }
        let now_ns = self.now_ns();
        let allowed_ns = self.when_ns(self.gate.next_interrupt_ns(self.clock_ns()));
        let at_ns = allowed_ns.max(self.card.next_interrupt_ns());
        if at_ns <= now_ns {
            self.card.on_raised(now_ns);
            self.processor.wake(self.tasks.interrupt);
        } else {
            self.set_timer(Timer::Interrupt, at_ns);
        }
    }

    fn begin_interrupt(&mut self) -> Option<u64> {
        match self.handler {
            Handler::Enter => Some(self.costs.interrupt_ns),
            Handler::Take(left) if left > 0 && self.card.waiting() > 0 => {
                Some(self.costs.receive_ns)
            }
            Handler::Take(take) if self.card.sent() > 0 => {
                let descriptors = self.card.sent();
                self.handler = Handler::Reclaim { descriptors, take };
                Some(u64::from(descriptors) * self.costs.transmit_done_ns)
            }
            Handler::Take(_) => None,
            Handler::Reclaim { .. } => None,
        }
    }

    fn finish_interrupt(&mut self) {
        match self.handler {
            Handler::Enter => {
                let clock_ns = self.clock_ns();
                match self.gate.on_interrupt(clock_ns, 0) {
                    Interrupt::Take { limit } => self.handler = Handler::Take(limit),
                    Interrupt::StartPolling => {
                        self.card.enabled = false;
                        self.gate.on_ready(Ring::Transmit(0));
                        self.processor.wake(self.tasks.poller);
                        self.leave(self.tasks.interrupt);
                    }
                }
            }
            Handler::Take(left) => {
                self.handler = Handler::Take(left - 1);
                let Some(packet) = self.card.take() else { return };
                if self.input.len() < self.input_queue {
                    self.input.push_back(packet);
                    self.processor.wake(self.tasks.software);
                } else {
                    self.drop_at(Place::InputQueue);
                }
            }
            Handler::Reclaim { descriptors, take } => {
                self.card.reclaim(descriptors);
                self.start_output();
                self.handler = Handler::Take(take);
            }
        }
    }

    // Protocols, at software interrupt priority.

    fn begin_software(&mut self) -> Option<u64> {
        if self.input.is_empty() {
            return None;
        }
        let start_ns = if self.software_runs { 0 } else { self.costs.software_ns };
        self.software_runs = true;
        Some(start_ns + self.protocol_ns())
    }

    fn finish_software(&mut self) {
        if let Some(packet) = self.input.pop_front() {
            self.deliver(packet);
        }
    }

    /// What a packet costs in the protocols, and behind them if it is
    /// forwarded at once.
    #[inline]
    pub(crate) fn protocol_ns(&self) -> u64 {
        match &self.service {
            Service::Router(Router { screen: None, .. }) => {
                self.costs.protocol_ns + self.costs.transmit_ns
            }
            _ => self.costs.protocol_ns,
        }
    }

    /// A packet comes out of the protocols, or into them: the stack is real,
    /// and what it costs has been paid.
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
            Service::Router(router) => match &mut router.screen {
                Some(screen) => {
                    if !screen.push(packet) {
                        self.drop_at(Place::ScreenQueue);
                        return;
                    }
                    let level = screen.waiting.len() as u32;
                    self.gate.on_queue_level(clock_ns, 0, level, screen.capacity);
                    self.wake_reader(0);
                }
                None => self.forward(packet),
            },
        }
    }

    /// Receiving goes on if nothing holds it back any more.
    #[inline]
    pub(crate) fn release_if_not_held(&mut self) {
        let clock_ns = self.clock_ns();
        if self.held && self.gate.held_until(clock_ns).is_none() {
            self.release();
        }
    }

    fn release(&mut self) {
        self.held = false;
        self.set_timer(Timer::Held, NEVER);
        self.processor.wake(self.tasks.poller);
    }

    // The way out.

    /// Puts a packet into the output queue of a router.
    pub(crate) fn forward(&mut self, packet: Packet) {
        let Service::Router(router) = &mut self.service else { return };
        if router.push_output(packet) {
            self.start_output();
        } else {
            self.drop_at(Place::OutputQueue);
        }
    }

    /// Hands packets to the card while it has descriptors.
    pub(crate) fn start_output(&mut self) {
        let now_ns = self.now_ns();
        while self.card.has_transmit_room() {
            let packet = match &mut self.service {
                // When the stack's own packets came is nobody's concern.
                Service::Udp { udp, .. } => {
                    udp.next_output().then_some(Packet { arrived_ns: now_ns, flow: 0 })
                }
                Service::Router(router) => router.output.pop_front(),
            };
            let Some(packet) = packet else { return };
            if let Some(at_ns) = self.card.transmit(now_ns, packet) {
                self.set_timer(Timer::Transmitted, at_ns);
            }
        }
    }

    fn on_transmitted(&mut self) {
        let now_ns = self.now_ns();
        let (packet, next_ns) = self.card.on_transmitted(now_ns);
        self.set_timer(Timer::Transmitted, next_ns.unwrap_or(NEVER));
        if let (Some(packet), Service::Router(_)) = (packet, &self.service) {
            self.count_delivered(packet.arrived_ns);
        }
        if self.mode.has_input_queue() || self.card.enabled {
            self.raise();
        } else if self.card.has_many_sent() {
            self.gate.on_ready(Ring::Transmit(0));
            if !self.held {
                self.processor.wake(self.tasks.poller);
            } else {
                // Held back is only receiving.
                self.release();
            }
        }
    }

    // Programs beside.

    fn begin_beside(&mut self, task: TaskId) -> Option<u64> {
        let state = self.beside.iter_mut().find(|state| state.task == task)?;
        match state.beside {
            Beside::Compute => Some(1_000_000),
            Beside::Send { cost_ns, .. } => {
                state.due = state.due.checked_sub(1)?;
                Some(cost_ns)
            }
        }
    }

    fn finish_beside(&mut self, task: TaskId) {
        let state = self.beside.iter_mut().find(|state| state.task == task);
        if let Some(state) = state.filter(|state| state.beside != Beside::Compute) {
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
        self.next_timer_ns = self.timers.iter().copied().min().unwrap_or(NEVER);
    }

    pub(crate) fn set_stack_timer(&mut self) {
        if let Service::Udp { udp, .. } = &self.service {
            let at_ns = udp.next_timeout_ns().map_or(NEVER, |at_ns| self.when_ns(at_ns));
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
            self.set_timer(Timer::Interrupt, NEVER);
            self.raise();
        }
        if self.is_due(Timer::Held) {
            self.release();
        }
        if let Some(tick) = self.tick.filter(|_| self.is_due(Timer::Tick)) {
            self.set_timer(Timer::Tick, now_ns + tick.period_ns);
            self.processor.give(self.tasks.tick, tick.cost_ns);
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
        for index in 0..self.beside.len() {
            let timer = Timer::Beside as usize + index;
            if let Beside::Send { period_ns, .. } = self.beside[index].beside
                && self.timers[timer] <= now_ns
            {
                self.timers[timer] += period_ns;
                self.beside[index].due += 1;
                self.processor.wake(self.beside[index].task);
            }
        }
        self.find_next_timer();
    }

    // Counting.

    #[inline]
    pub(crate) fn drop_at(&mut self, place: Place) {
        self.drops[place as usize] += 1;
    }

    pub(crate) fn count_delivered(&mut self, arrived_ns: u64) {
        self.delivered += 1;
        let latency_ns = self.now_ns().saturating_sub(arrived_ns);
        self.latency_ns.saturating_record(latency_ns.max(1));
    }

    /// Begins the latency anew.
    pub(crate) fn forget_latency(&mut self) {
        self.latency_ns.reset();
    }

    /// Adds what came of this core since its beginning.
    pub(crate) fn add_to(&self, report: &mut Report) {
        report.offered += self.offered;
        report.delivered += self.delivered;
        for (sum, program) in report.delivered_by_reader.iter_mut().zip(&self.programs) {
            *sum += program.delivered;
        }
        report.answered += self.answered;
        for (sum, drops) in report.drops.iter_mut().zip(self.drops) {
            *sum += drops;
        }
        let waiting = self.card.waiting() + self.input.len();
        report.in_flight += waiting as u64;
        match &self.service {
            Service::Udp { udp, .. } => {
                report.drops[Place::SocketQueue as usize] += udp.socket_drops();
                report.drops[Place::Stack as usize] += udp.other_drops();
                report.in_flight += udp.in_flight();
            }
            Service::Router(router) => {
                report.in_flight += router.in_flight() + self.card.sending() as u64;
            }
        }
        for (sum, level) in report.level_ns.iter_mut().zip(Level::ALL) {
            *sum += self.processor.level_spent_ns(level);
        }
        report.idle_ns += self.processor.idle_ns();
        report.interrupts += self.gate.counters().interrupts;
        report.switches += self.processor.switches();
        for (sum, state) in report.beside.iter_mut().zip(&self.beside) {
            sum.spent_ns += self.processor.spent_ns(state.task);
            sum.sent += state.sent;
        }
        // Both have the same bounds, so nothing is left out.
        let _ = report.latency_ns.add(&self.latency_ns);
    }
}

/// Where the polling loop runs.
pub(crate) fn poller_level(mode: Mode) -> Level {
    match mode {
        Mode::Napi => Level::Software,
        _ => Level::Kernel,
    }
}
