//! What an engine knows about how things go, for admission.

use tidegate_gate::admission::{Config, Pressure};
use tidegate_stack::Counters;
use tidegate_wire::DropReason;

/// What one look at a port costs that has nothing, about.
const IDLE_LOOK_NS: u64 = 10_000;

/// Counts from one call of admission to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PressureMeter {
    served: u64,
    lost_late: u64,
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
    pub(crate) fn take(&mut self, counters: &Counters) -> Pressure {
        let served = counters.delivered + counters.handled;
        let lost = [DropReason::SocketQueueFull, DropReason::NoBuffer];
        let lost_late = lost.iter().map(|&reason| counters.drops.get(reason)).sum::<u64>();
        let port_percent = match self.idle_rounds {
            0 => 100,
            rounds if rounds * IDLE_LOOK_NS * 20 < Config::PERIOD_NS => 50,
            _ => 0,
        };
        let pressure = Pressure {
            served: served.saturating_sub(self.served),
            lost_late: lost_late.saturating_sub(self.lost_late),
            level_percent: self.fullest_percent.max(port_percent),
        };
        *self = Self { served, lost_late, idle_rounds: 0, fullest_percent: 0 };
        pressure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_never_empty_is_pressure() {
        let mut meter = PressureMeter::default();
        let mut counters = Counters { delivered: 100, ..Counters::default() };
        let busy = meter.take(&counters);
        assert_eq!((busy.served, busy.level_percent), (100, 100));
        meter.on_idle_round();
        assert_eq!(meter.take(&counters).level_percent, 50);
        for _ in 0..100 {
            meter.on_idle_round();
        }
        counters.drops.count(DropReason::SocketQueueFull);
        let calm = meter.take(&counters);
        assert_eq!((calm.served, calm.lost_late, calm.level_percent), (0, 1, 0));
        for _ in 0..100 {
            meter.on_idle_round();
        }
        meter.on_level(80);
        assert_eq!(meter.take(&counters).level_percent, 80);
    }
}
