//! The gate: receive scheduling policy of one core.

use crate::config::{Mode, Settings};
use crate::cpu_share::CpuShare;
use crate::feedback::{Feedback, QueueId};
use crate::moderation::InterruptModeration;
use crate::schedule::{Ring, RingCounts, Schedule, Turn};

/// Action of a receive interrupt handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptAction {
    /// Move packets to the input queue at interrupt priority; the interrupt stays enabled.
    Take {
        /// Maximum number of packets; [`u32::MAX`] is unlimited.
        limit: u32,
    },
    /// Mask the interrupt and start polling. [`GateAction::Wait`] enables the interrupt again.
    StartPolling,
}

/// Next action of the polling loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateAction {
    /// Serve this ring, then report the result by [`Gate::on_served`].
    Serve(Turn),
    /// Yield the processor: the round is finished but work is left. Continue at the priority of
    /// a process, so that applications run too.
    Yield,
    /// Wait: nothing may be done now. Enable interrupts unless receiving is paused.
    Wait {
        /// End of the pause: call [`Gate::next`] again at this time at the latest. `None`: only an
        /// interrupt brings work.
        paused_until_ns: Option<u64>,
    },
}

/// Counters of a gate since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateCounters {
    /// Interrupts handled.
    pub interrupts: u64,
    /// Turns of receive rings.
    pub receive_turns: u64,
    /// Rounds that ended with work left.
    pub yields: u64,
    /// Times that receiving was found paused because a queue was full.
    pub paused_by_feedback: u64,
    /// Times that receiving was found paused because the CPU share was spent.
    pub paused_by_share: u64,
    /// Times that an idle processor lifted the CPU share.
    pub share_lifted: u64,
}

impl GateCounters {
    /// Adds the counters of another core.
    pub fn add(&mut self, other: &Self) {
        self.interrupts += other.interrupts;
        self.receive_turns += other.receive_turns;
        self.yields += other.yields;
        self.paused_by_feedback += other.paused_by_feedback;
        self.paused_by_share += other.paused_by_share;
        self.share_lifted += other.share_lifted;
    }
}

/// Receive scheduler of one core: when to poll, and how many packets to take.
///
/// The caller performs the action returned by [`Gate::next`] and reports the number of packets
/// by [`Gate::on_served`]. Times are in nanoseconds of any clock; a clock jump costs at most
/// a timeout or a period.
///
/// # Examples
///
/// ```
/// use tidegate_gate::{Gate, GateAction, InterruptAction, Ring, RingCounts, Settings};
///
/// let rings = RingCounts { receive: 1, transmit: 1, application: 0 };
/// let mut gate = Gate::new(Settings::default(), rings, 0);
/// assert_eq!(gate.on_interrupt(0, 0), InterruptAction::StartPolling);
/// let GateAction::Serve(turn) = gate.next(0) else { panic!("a receive ring is ready") };
/// assert_eq!(turn.ring, Ring::Receive(0));
/// // Fewer packets than the quota: the ring is empty.
/// gate.on_served(turn, 3, 1_000);
/// assert_eq!(gate.next(1_000), GateAction::Wait { paused_until_ns: None });
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    settings: Settings,
    schedule: Schedule,
    feedback: Feedback,
    share: CpuShare,
    moderation: InterruptModeration,
    round: Round,
    /// Start time of the current turn.
    turn_start_ns: u64,
    counters: GateCounters,
}

/// Round of mode `napi`.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    start_ns: Option<u64>,
    packets: u32,
}

impl Gate {
    /// Creates a gate for the given rings at time `now_ns`.
    pub fn new(settings: Settings, rings: RingCounts, now_ns: u64) -> Self {
        let config = settings.config();
        Self {
            schedule: Schedule::new(rings, config),
            feedback: Feedback::new(
                config.high_mark_percent,
                config.low_mark_percent,
                config.feedback_timeout_us.saturating_mul(1000),
            ),
            share: CpuShare::new(
                config.cpu_share_percent,
                config.cpu_period_us.saturating_mul(1000),
                now_ns,
            ),
            moderation: InterruptModeration::new(config.interrupts_per_second),
            round: Round::default(),
            turn_start_ns: now_ns,
            counters: GateCounters::default(),
            settings,
        }
    }

    /// Returns the settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Replaces the settings.
    pub fn apply_settings(&mut self, settings: Settings) {
        let config = settings.config();
        self.schedule.set_quotas(config);
        self.feedback.set_marks(
            config.high_mark_percent,
            config.low_mark_percent,
            config.feedback_timeout_us.saturating_mul(1000),
        );
        self.share.set_share(config.cpu_share_percent, config.cpu_period_us.saturating_mul(1000));
        self.moderation = InterruptModeration::new(config.interrupts_per_second);
        self.settings = settings;
    }

    /// Returns the counters.
    pub fn counters(&self) -> &GateCounters {
        &self.counters
    }

    /// Handles a receive interrupt of a device.
    pub fn on_interrupt(&mut self, now_ns: u64, device: usize) -> InterruptAction {
        self.counters.interrupts += 1;
        self.moderation.on_interrupt(now_ns);
        let config = self.settings.config();
        match config.mode {
            Mode::Interrupt => InterruptAction::Take { limit: u32::MAX },
            Mode::Moderated => InterruptAction::Take { limit: config.descriptors },
            Mode::Napi | Mode::Polled | Mode::Dedicated => {
                self.schedule.on_ready(Ring::Receive(device));
                InterruptAction::StartPolling
            }
        }
    }

    /// Earliest time at which the device may raise its next interrupt.
    pub fn next_interrupt_ns(&self, now_ns: u64) -> u64 {
        match self.settings.config().mode {
            Mode::Moderated => self.moderation.next_ns(now_ns),
            _ => now_ns,
        }
    }

    /// Marks a ring as ready: it has or may have work.
    #[inline]
    pub fn on_ready(&mut self, ring: Ring) {
        self.schedule.on_ready(ring);
    }

    /// Marks all rings as ready.
    #[inline]
    pub fn on_all_ready(&mut self) {
        self.schedule.on_all_ready();
    }

    /// Returns the next action.
    #[inline]
    pub fn next(&mut self, now_ns: u64) -> GateAction {
        if self.is_round_finished(now_ns) {
            self.round = Round::default();
            self.counters.yields += 1;
            return GateAction::Yield;
        }
        let paused_until_ns = self.paused_until(now_ns);
        if let Some(turn) = self.schedule.next(paused_until_ns.is_none()) {
            self.turn_start_ns = now_ns;
            self.round.start_ns.get_or_insert(now_ns);
            if matches!(turn.ring, Ring::Receive(_)) {
                self.counters.receive_turns += 1;
            }
            return GateAction::Serve(turn);
        }
        self.round = Round::default();
        // A pause counts only if a receive ring is ready.
        GateAction::Wait {
            paused_until_ns: paused_until_ns.filter(|_| self.schedule.has_ready_receive_ring()),
        }
    }

    /// Ends a turn in which `processed` packets or requests were taken.
    #[inline]
    pub fn on_served(&mut self, turn: Turn, processed: u32, now_ns: u64) {
        let receives = matches!(turn.ring, Ring::Receive(_));
        let dedicated = self.settings.config().mode == Mode::Dedicated;
        if processed < turn.quota && !(dedicated && receives) {
            self.schedule.on_empty(turn.ring);
        }
        self.round.packets = self.round.packets.saturating_add(processed);
        if self.share.is_limited() {
            self.share.charge(now_ns, now_ns.saturating_sub(self.turn_start_ns));
        }
    }

    /// True if [`Gate::on_served`] needs the end time of a turn. Otherwise the start time
    /// suffices, which saves reading the clock.
    #[inline]
    pub fn needs_turn_end_time(&self) -> bool {
        self.share.is_limited() || self.settings.config().mode == Mode::Napi
    }

    /// True if packets may take only a part of the processor's time.
    pub fn has_cpu_share(&self) -> bool {
        self.share.is_limited()
    }

    /// Replaces what turns have charged to the CPU share since the last call by the processor time
    /// that the thread took meanwhile, in its turns and between them.
    pub fn replace_cpu_charges(&mut self, now_ns: u64, processor_ns: u64) {
        self.share.replace_charges(now_ns, processor_ns);
    }

    /// Reports that a queue between the stack and an application holds `packets` of `capacity`.
    /// To be called when a queue crosses a mark, and when its reader takes something.
    #[inline]
    pub fn on_queue_level(&mut self, now_ns: u64, queue: QueueId, packets: u32, capacity: u32) {
        if self.settings.config().feedback {
            self.feedback.on_level(now_ns, queue, packets, capacity);
        }
    }

    /// Bounds the pauses of feedback: a tenth of the time, and at most the timeout each. To be called
    /// where independent applications share the processor, so that a slow reader costs the others
    /// little. Without it a reader on the same processor gets the time that it needs.
    pub fn bound_pauses(&mut self) {
        self.feedback.bound_pauses();
    }

    /// True if a queue went above its high mark and has not come down to the low mark. Its level
    /// is then to be reported on every change.
    #[inline]
    pub fn watches_queues(&self) -> bool {
        self.feedback.watches_any()
    }

    /// True if this queue is watched in that way.
    pub fn watches_queue(&self, queue: QueueId) -> bool {
        self.feedback.watches_queue(queue)
    }

    /// Removes a closed queue.
    pub fn on_queue_closed(&mut self, queue: QueueId) {
        self.feedback.remove(queue);
    }

    /// Lifts the CPU share for the rest of the period, because the processor is otherwise idle.
    pub fn on_idle_processor(&mut self, now_ns: u64) {
        if self.share.paused_until(now_ns).is_some() {
            self.counters.share_lifted += 1;
        }
        self.share.on_idle(now_ns);
    }

    /// Latest end of the pause of receiving; `None` if receiving is not paused.
    #[inline]
    pub fn paused_until(&mut self, now_ns: u64) -> Option<u64> {
        let watched = self.settings.config().feedback && self.feedback.watches_any();
        if !watched && !self.share.is_limited() {
            return None;
        }
        let share = self.share.paused_until(now_ns);
        let config = self.settings.config();
        let feedback = if config.feedback { self.feedback.paused_until(now_ns) } else { None };
        self.counters.paused_by_share += u64::from(share.is_some());
        self.counters.paused_by_feedback += u64::from(feedback.is_some());
        share.max(feedback)
    }

    #[inline]
    fn is_round_finished(&self, now_ns: u64) -> bool {
        let config = self.settings.config();
        if config.mode != Mode::Napi {
            return false;
        }
        let Some(start_ns) = self.round.start_ns else { return false };
        self.round.packets >= config.budget
            || now_ns.saturating_sub(start_ns) >= config.round_us.saturating_mul(1000)
    }
}

#[cfg(test)]
mod tests;
