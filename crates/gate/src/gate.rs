//! The one policy object.

use crate::config::{Mode, Settings};
use crate::feedback::{Feedback, QueueId};
use crate::moderation::Moderation;
use crate::schedule::{Ring, Rings, Schedule, Turn};
use crate::share::CpuShare;

/// What the handler of a receive interrupt does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Moves at most so many packets to the input queue, at its own priority.
    /// The interrupt stays enabled.
    Take {
        /// The most packets; [`u32::MAX`] is all.
        limit: u32,
    },
    /// Masks the interrupt and starts polling; [`Next::Wait`] enables it again.
    StartPolling,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Serve this ring, then say how it went by [`Gate::on_served`].
    Serve(Turn),
    /// The round is over while work is left: go on at the priority of a
    /// program, so that programs run too.
    Yield,
    /// Nothing may be done now: enable interrupts unless receiving is held
    /// back, and wait.
    Wait {
        /// Ask again at this time at the latest: receiving is held back until
        /// then. `None`: only an interrupt brings work.
        held_until_ns: Option<u64>,
    },
}

/// What the gate did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateCounters {
    /// Interrupts handled.
    pub interrupts: u64,
    /// Turns of receive rings.
    pub receive_turns: u64,
    /// Rounds that ended with work left.
    pub yields: u64,
    /// Waits because a queue was full.
    pub held_by_feedback: u64,
    /// Waits because the CPU share was spent.
    pub held_by_share: u64,
    /// Times that an idle processor lifted the share.
    pub lifted: u64,
}

/// Receive scheduling of one core: when to look, and how much to take.
///
/// The caller asks [`Gate::next`], does it, and tells by [`Gate::on_served`]
/// how much there was. Times are in nanoseconds of any clock; one that jumps
/// costs at most a time-out or a period.
#[derive(Clone, Debug)]
pub struct Gate {
    settings: Settings,
    schedule: Schedule,
    feedback: Feedback,
    share: CpuShare,
    moderation: Moderation,
    round: Round,
    /// When the turn began that is being served.
    turn_began_ns: u64,
    counters: GateCounters,
}

/// A round of mode `napi`.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    began_ns: Option<u64>,
    taken: u32,
}

impl Gate {
    /// A gate for so many rings, at the time `now_ns`.
    pub fn new(settings: Settings, rings: Rings, now_ns: u64) -> Self {
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
            moderation: Moderation::new(config.interrupts_per_second),
            round: Round::default(),
            turn_began_ns: now_ns,
            counters: GateCounters::default(),
            settings,
        }
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings from now on.
    pub fn set(&mut self, settings: Settings) {
        let config = settings.config();
        self.schedule.set(config);
        self.feedback.set(
            config.high_mark_percent,
            config.low_mark_percent,
            config.feedback_timeout_us.saturating_mul(1000),
        );
        self.share.set(config.cpu_share_percent, config.cpu_period_us.saturating_mul(1000));
        self.moderation = Moderation::new(config.interrupts_per_second);
        self.settings = settings;
    }

    /// What was done so far.
    pub fn counters(&self) -> &GateCounters {
        &self.counters
    }

    /// A card raised its receive interrupt.
    pub fn on_interrupt(&mut self, now_ns: u64, card: usize) -> Interrupt {
        self.counters.interrupts += 1;
        self.moderation.on_interrupt(now_ns);
        let config = self.settings.config();
        match config.mode {
            Mode::Interrupt => Interrupt::Take { limit: u32::MAX },
            Mode::Moderated => Interrupt::Take { limit: config.descriptors },
            Mode::Napi | Mode::Polled | Mode::Dedicated => {
                self.schedule.on_ready(Ring::Receive(card));
                Interrupt::StartPolling
            }
        }
    }

    /// The earliest time at which the card may raise its next interrupt.
    pub fn next_interrupt_ns(&self, now_ns: u64) -> u64 {
        match self.settings.config().mode {
            Mode::Moderated => self.moderation.next_ns(now_ns),
            _ => now_ns,
        }
    }

    /// A ring has work, or may have some.
    #[inline]
    pub fn on_ready(&mut self, ring: Ring) {
        self.schedule.on_ready(ring);
    }

    /// Every ring may have work.
    #[inline]
    pub fn on_all_ready(&mut self) {
        self.schedule.on_all_ready();
    }

    /// What to do next.
    #[inline]
    pub fn next(&mut self, now_ns: u64) -> Next {
        if self.round_is_over(now_ns) {
            self.round = Round::default();
            self.counters.yields += 1;
            return Next::Yield;
        }
        let held_until_ns = self.held_until(now_ns);
        if let Some(turn) = self.schedule.next(held_until_ns.is_none()) {
            self.turn_began_ns = now_ns;
            self.round.began_ns.get_or_insert(now_ns);
            if matches!(turn.ring, Ring::Receive(_)) {
                self.counters.receive_turns += 1;
            }
            return Next::Serve(turn);
        }
        self.round = Round::default();
        // Held back counts only when there is something to hold back.
        Next::Wait { held_until_ns: held_until_ns.filter(|_| self.schedule.receive_waits()) }
    }

    /// A turn is over: `taken` packets or requests were there.
    #[inline]
    pub fn on_served(&mut self, turn: Turn, taken: u32, now_ns: u64) {
        let receives = matches!(turn.ring, Ring::Receive(_));
        let dedicated = self.settings.config().mode == Mode::Dedicated;
        if taken < turn.quota && !(dedicated && receives) {
            self.schedule.on_empty(turn.ring);
        }
        self.round.taken = self.round.taken.saturating_add(taken);
        if self.share.is_limited() {
            self.share.charge(now_ns, now_ns.saturating_sub(self.turn_began_ns));
        }
    }

    /// Whether [`Gate::on_served`] needs the time of the end of a turn. If not,
    /// that of its beginning does, which saves a look at the clock.
    #[inline]
    pub fn measures_time(&self) -> bool {
        self.share.is_limited() || self.settings.config().mode == Mode::Napi
    }

    /// A queue between the stack and an application holds `packets` of
    /// `capacity`. To be told when a queue goes over a mark, and when its
    /// reader takes something.
    #[inline]
    pub fn on_queue_level(&mut self, now_ns: u64, queue: QueueId, packets: u32, capacity: u32) {
        if self.settings.config().feedback {
            self.feedback.on_level(now_ns, queue, packets, capacity);
        }
    }

    /// Whether a queue went over its high mark and has not come down to the low
    /// one: then its level is to be told whenever it changes.
    #[inline]
    pub fn watches_queues(&self) -> bool {
        self.feedback.watches()
    }

    /// Whether this queue is one of those.
    pub fn watches_queue(&self, queue: QueueId) -> bool {
        self.feedback.watches_queue(queue)
    }

    /// The queue is gone.
    pub fn on_queue_closed(&mut self, queue: QueueId) {
        self.feedback.forget(queue);
    }

    /// The processor has nothing else to do: the rest of the period is free.
    pub fn on_idle_processor(&mut self, now_ns: u64) {
        if self.share.held_until(now_ns).is_some() {
            self.counters.lifted += 1;
        }
        self.share.on_idle(now_ns);
    }

    /// Until when receiving is held back at the latest; `None` when it is not.
    #[inline]
    pub fn held_until(&mut self, now_ns: u64) -> Option<u64> {
        let watched = self.settings.config().feedback && self.feedback.watches();
        if !watched && !self.share.is_limited() {
            return None;
        }
        let share = self.share.held_until(now_ns);
        let config = self.settings.config();
        let feedback = if config.feedback { self.feedback.held_until(now_ns) } else { None };
        self.counters.held_by_share += u64::from(share.is_some());
        self.counters.held_by_feedback += u64::from(feedback.is_some());
        share.max(feedback)
    }

    #[inline]
    fn round_is_over(&self, now_ns: u64) -> bool {
        let config = self.settings.config();
        if config.mode != Mode::Napi {
            return false;
        }
        let Some(began_ns) = self.round.began_ns else { return false };
        self.round.taken >= config.budget
            || now_ns.saturating_sub(began_ns) >= config.round_us.saturating_mul(1000)
    }
}

#[cfg(test)]
mod tests;
