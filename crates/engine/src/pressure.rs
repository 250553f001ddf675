//! What an engine knows about how things go, for admission.

use tidegate_gate::admission::{Config, Pressure};
use tidegate_stack::Counters;
use tidegate_wire::DropReason;

/// What one look at a port costs that has nothing, about.
const IDLE_LOOK_NS: u64 = 10_000;

/// What a port that drops early can tell about its work, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EarlyWork {
    /// Frames that it looked at.
    pub(crate) seen: u64,
    /// Frames that were lost before anybody looked.
    pub(crate) unseen: u64,
    /// Time spent on what was let in, in nanoseconds.
    pub(crate) worked_ns: u64,
}

/// Counts from one call of admission to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PressureMeter {
    served: u64,
    lost_late: u64,
    early: Option<EarlyWork>,
    taken_ns: u64,
    idle_rounds: u64,
    fullest_percent: u32,
}

impl PressureMeter {
    /// A round of the engine received nothing: it keeps up with the port.
    #[inline]
    pub(crate) fn on_idle_round(&mut self) {
        self.idle_rounds += 1;
    }

    /// A queue in front of an application is so full.
    #[inline]
    pub(crate) fn on_level(&mut self, percent: u32) {
        self.fullest_percent = self.fullest_percent.max(percent);
    }

    /// How things went since the last call.
    ///
    /// An engine that runs in the program's own calls has short queues however
    /// much arrives: what it cannot take waits at the port. So a port that is
    /// never found empty counts as a full queue, and one that is hardly ever as
    /// one between the marks.
    ///
    /// `early` is what a port tells that drops early right now. It looks at
    /// frames for as long as there is nothing to serve, so it is never found
    /// empty. How much of the time it does not look says the same.
    pub(crate) fn take(
        &mut self,
        now_ns: u64,
        counters: &Counters,
        early: Option<EarlyWork>,
    ) -> Pressure {
        let served = counters.delivered + counters.handled;
        let lost = [DropReason::SocketQueueFull, DropReason::NoBuffer];
        let lost_late = lost.iter().map(|&reason| counters.drops.get(reason)).sum::<u64>();
        let elapsed_ns = now_ns.saturating_sub(self.taken_ns);
        let (port_percent, crowded) = match (early, self.early) {
            (Some(now), Some(before)) => now.since(&before).judge(elapsed_ns),
            _ => (self.idle_percent(), false),
        };
        let pressure = Pressure {
            served: served.saturating_sub(self.served),
            lost_late: lost_late.saturating_sub(self.lost_late),
            level_percent: self.fullest_percent.max(port_percent),
            crowded,
        };
        let (idle_rounds, fullest_percent) = (0, 0);
        *self = Self { served, lost_late, early, taken_ns: now_ns, idle_rounds, fullest_percent };
        pressure
    }

    fn idle_percent(&self) -> u32 {
        match self.idle_rounds {
            0 => 100,
            rounds if rounds * IDLE_LOOK_NS * 20 < Config::PERIOD_NS => 50,
            _ => 0,
        }
    }
}

impl EarlyWork {
    fn since(self, before: &Self) -> Self {
        Self {
            seen: self.seen.saturating_sub(before.seen),
            unseen: self.unseen.saturating_sub(before.unseen),
            worked_ns: self.worked_ns.saturating_sub(before.worked_ns),
        }
    }

    /// How full the port counts as, in percent, and whether it is crowded.
    fn judge(self, elapsed_ns: u64) -> (u32, bool) {
        let worked_percent = self.worked_ns.saturating_mul(100) / elapsed_ns.max(1);
        let level_percent = match worked_percent {
            0..80 => 0,
            80..90 => 50,
            _ => 100,
        };
        (level_percent, self.unseen > self.seen / 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_never_empty_is_pressure() {
        let mut meter = PressureMeter::default();
        let mut counters = Counters { delivered: 100, ..Counters::default() };
        let busy = meter.take(0, &counters, None);
        assert_eq!((busy.served, busy.level_percent), (100, 100));
        meter.on_idle_round();
        assert_eq!(meter.take(0, &counters, None).level_percent, 50);
        for _ in 0..100 {
            meter.on_idle_round();
        }
        counters.drops.count(DropReason::SocketQueueFull);
        let calm = meter.take(0, &counters, None);
        assert_eq!((calm.served, calm.lost_late, calm.level_percent), (0, 1, 0));
        for _ in 0..100 {
            meter.on_idle_round();
        }
        meter.on_level(80);
        assert_eq!(meter.take(0, &counters, None).level_percent, 80);
    }

    #[test]
    fn a_port_that_loses_frames_unseen_is_crowded() {
        let judge = |seen, unseen, worked_ns| {
            let mut meter = PressureMeter::default();
            let counters = Counters::default();
            meter.take(1_000, &counters, Some(EarlyWork::default()));
            let early = EarlyWork { seen, unseen, worked_ns };
            let pressure = meter.take(6_000, &counters, Some(early));
            (pressure.level_percent, pressure.crowded)
        };
        assert_eq!(judge(1000, 0, 3_000), (0, false));
        assert_eq!(judge(1000, 0, 4_200), (50, false));
        assert_eq!(judge(1000, 0, 4_800), (100, false), "no time left to look");
        assert_eq!(judge(1000, 500, 3_000), (0, true));
        assert_eq!(judge(1000, 10, 3_000), (0, false), "a few may get lost");
    }
}
