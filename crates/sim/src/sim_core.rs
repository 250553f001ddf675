//! Simulated core: a processor, a queue pair of the NIC, a gate, and their tasks.
//!
//! Each task is a state machine. `begin_*` returns the cost of its next piece of work in
//! nanoseconds; `finish_*` applies the effect of the piece.
//!
//! This file holds the state of a core, its clock, timers and counters. The files of the folder
//! add the tasks: `output` and `receive_control` below, `delivery` and `readers` on them, then
//! `interrupt`, `polling` and `background`, and `run` on top.

mod background;
mod delivery;
mod interrupt;
mod output;
mod polling;
mod readers;
mod receive_control;
mod run;

use std::collections::VecDeque;

use hdrhistogram::Histogram;
use tidegate_gate::{Gate, Mode, RingCounts, admission};

use crate::admission::AdmissionStage;
use crate::application::Application;
use crate::error::SetupError;
use crate::load::{CrossingFlows, Packet};
use crate::nic::Nic;
use crate::processor::{PriorityLevel, Processor};
use crate::report::{DropPoint, SimReport, latency_histogram};
use crate::service::Service;
use crate::setup::{BackgroundTask, Costs, Setup, Tick};
use crate::tasks::{BackgroundState, CoreTasks, InterruptHandler, PollLoop};
use crate::timers::{NEVER_NS, Timer, Timers};

pub(crate) struct SimCore {
    costs: Costs,
    /// Flows that belong to another core.
    crossing: CrossingFlows,
    mode: Mode,
    processor: Processor,
    tasks: CoreTasks,
    /// Applications that read packets: the readers of the service, or the filter process.
    applications: Vec<Application>,
    timers: Timers,
    gate: Gate,
    nic: Nic,
    service: Service,
    admission_stage: Option<AdmissionStage>,
    backlog_meter: admission::BacklogMeter,
    /// Offset of the clock given to the gate and the stack from virtual time.
    skew_ns: i64,
    handler: InterruptHandler,
    input: VecDeque<Packet>,
    input_queue: usize,
    /// The software interrupt is running.
    software_running: bool,
    polling: PollLoop,
    /// The gate pauses receiving.
    receive_paused: bool,
    /// The gate was notified that the processor is idle.
    idle_notified: bool,
    tick: Option<Tick>,
    background: Vec<BackgroundState>,
    offered: u64,
    delivered: u64,
    /// First flow of the further source, and its packets that arrived and were served.
    peer_flow: u32,
    peer_offered: u64,
    peer_delivered: u64,
    answered: u64,
    drops: [u64; DropPoint::ALL.len()],
    latency_ns: Histogram<u64>,
}

impl SimCore {
    pub(crate) fn new(setup: &Setup, index: u32) -> Result<Self, SetupError> {
        let seed = setup.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(index));
        let service = Service::new(setup, seed)?;
        let config = setup.gate.config();
        let mut processor = Processor::new(setup.costs.switch_ns, setup.quantum_ns);
        let tasks = CoreTasks::new(setup, config.mode, &mut processor);
        let applications = (0..setup.readers)
            .map(|_| Application::new(processor.add(PriorityLevel::Application)))
            .collect();
        let mut timers = Timers::new();
        let background: Vec<BackgroundState> = setup
            .background
            .iter()
            .map(|&background| {
                timers.add(match background {
                    BackgroundTask::Compute => NEVER_NS,
                    BackgroundTask::Send { period_ns, .. } => period_ns,
                });
                BackgroundState::new(background, &mut processor)
            })
            .collect();
        let application = usize::from(service.is_inline());
        let rings = RingCounts { receive: 1, transmit: 1, application };
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
            timers.set(Timer::Tick, tick.period_ns);
        }
        let mut core = Self {
            costs: setup.costs,
            crossing: CrossingFlows::new(setup.crossing_share, setup.cores),
            mode: config.mode,
            processor,
            tasks,
            applications,
            timers,
            input: VecDeque::with_capacity(config.input_queue as usize),
            input_queue: config.input_queue as usize,
            gate,
            nic,
            service,
            admission_stage: AdmissionStage::new(setup, seed)?,
            backlog_meter: admission::BacklogMeter::default(),
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
            peer_flow: setup.load.flows,
            peer_offered: 0,
            peer_delivered: 0,
            answered: 0,
            drops: [0; DropPoint::ALL.len()],
            latency_ns: latency_histogram(),
        };
        core.set_stack_timer();
        core.set_admission_timer();
        Ok(core)
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        self.processor.now_ns()
    }

    /// Returns the time of the clock given to the gate and the stack.
    #[inline]
    fn clock_ns(&self) -> u64 {
        self.now_ns().saturating_add_signed(self.skew_ns)
    }

    /// Converts a clock time to virtual time; returns the current time if it has passed.
    #[inline]
    fn virtual_time_of(&self, clock_ns: u64) -> u64 {
        self.now_ns().saturating_add(clock_ns.saturating_sub(self.clock_ns()))
    }

    /// Makes the clock jump. A jump back beyond the clock's start sets it to the start.
    pub(crate) fn jump_clock(&mut self, by_ns: i64) {
        let earliest_ns = -(i64::try_from(self.now_ns()).unwrap_or(i64::MAX));
        self.skew_ns = self.skew_ns.saturating_add(by_ns).max(earliest_ns);
        self.set_stack_timer();
    }

    fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        self.timers.set(timer, at_ns);
    }

    fn set_stack_timer(&mut self) {
        if let Service::Udp { udp, .. } = &self.service {
            let at_ns = udp.next_timeout_ns().map_or(NEVER_NS, |at_ns| self.virtual_time_of(at_ns));
            if at_ns != self.timers.at_ns(Timer::Stack) {
                self.set_timer(Timer::Stack, at_ns);
            }
        }
    }

    fn set_admission_timer(&mut self) {
        if self.admission_stage.is_some() {
            self.set_timer(Timer::Admission, self.now_ns() + admission::Config::PERIOD_NS);
        }
    }

    /// Additional cost of the oldest received packet: to read it from memory of another node, and to
    /// pass it to the core of its socket.
    fn detour_ns(&self) -> u64 {
        let crosses = self.nic.first().is_some_and(|packet| self.crossing.contains(packet.flow));
        self.costs.remote_ns + if crosses { self.costs.crossing_ns } else { 0 }
    }

    #[inline]
    fn is_due(&self, timer: Timer) -> bool {
        self.timers.at_ns(timer) <= self.now_ns()
    }

    #[inline]
    fn count_drop(&mut self, point: DropPoint) {
        self.drops[point as usize] += 1;
    }

    fn count_delivered(&mut self, arrived_ns: u64) {
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
        report.peer_offered += self.peer_offered;
        report.peer_delivered += self.peer_delivered;
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
