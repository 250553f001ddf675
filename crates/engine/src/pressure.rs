//! What an engine knows about how things go, for admission.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tidegate_gate::admission::{Config, Pressure};
use tidegate_stack::Counters;
use tidegate_wire::DropReason;

/// What one look at a port costs that has nothing, about.
const IDLE_LOOK_NS: u64 = 10_000;

/// So few frames are no queue, even if the port was never found empty: they came
/// while this thread did not run.
const FEW_FRAMES: u64 = 16;

/// What a port that drops early can tell about its work, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EarlyWork {
    /// Frames that it looked at to drop or let in.
    pub(crate) seen: u64,
    /// Frames that were lost before anybody looked.
    pub(crate) unseen: u64,
}

/// Counts from one call of admission to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PressureMeter {
    served: u64,
    lost_late: u64,
    early: Option<EarlyWork>,
    received: u64,
    idle_rounds: u64,
    fullest_percent: u32,
}

impl PressureMeter {
    /// A round of the engine received so many frames. One that received nothing
    /// keeps up with the port.
    #[inline]
    pub(crate) fn on_round(&mut self, received: usize) {
        self.received += received as u64;
        self.idle_rounds += u64::from(received == 0);
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
    /// one between the marks, unless just a few frames came.
    ///
    /// `early` is what a port tells that drops early.
    pub(crate) fn take(&mut self, counters: &Counters, early: Option<EarlyWork>) -> Pressure {
        let served = counters.delivered + counters.handled;
        let lost = [DropReason::SocketQueueFull, DropReason::NoBuffer];
        let lost_late = lost.iter().map(|&reason| counters.drops.get(reason)).sum::<u64>();
        let served_now = served.saturating_sub(self.served);
        let work = early.zip(self.early).map(|(now, before)| now.since(&before));
        let unseen_permille = work.map_or(0, |work| work.unseen_permille(served_now));
        let pressure = Pressure {
            served: served_now,
            lost_late: lost_late.saturating_sub(self.lost_late),
            level_percent: self.fullest_percent.max(self.idle_percent()),
            unseen_permille,
        };
        *self = Self { served, lost_late, early, ..Self::default() };
        pressure
    }

    fn idle_percent(&self) -> u32 {
        match self.idle_rounds {
            _ if self.received < FEW_FRAMES => 0,
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
        }
    }

    /// How many of a thousand frames were lost before anybody looked. While
    /// nothing is dropped, those that were served are those that were seen.
    fn unseen_permille(&self, served: u64) -> u32 {
        let came = self.seen.max(served).saturating_add(self.unseen).max(1);
        (self.unseen.saturating_mul(1000) / came).min(1000) as u32
    }
}

/// The most peers that are told of from one look to the next. Others will finish
/// another handshake.
const CONFIRMED_MAX: usize = 4096;

/// How things go on the cores behind the one with the card, which alone decides
/// what is admitted.
#[derive(Debug, Default)]
pub(crate) struct OtherCores {
    served: AtomicU64,
    lost_late: AtomicU64,
    fullest_percent: AtomicU32,
    confirmed: Mutex<Vec<IpAddr>>,
}

impl OtherCores {
    /// How things went on one of them since it last told.
    pub(crate) fn tell(&self, pressure: &Pressure) {
        self.served.fetch_add(pressure.served, Ordering::Relaxed);
        self.lost_late.fetch_add(pressure.lost_late, Ordering::Relaxed);
        self.fullest_percent.fetch_max(pressure.level_percent, Ordering::Relaxed);
    }

    /// A peer has proven to one of them that it gets what is sent to its address.
    pub(crate) fn confirm(&self, peer: IpAddr) {
        let mut confirmed = self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        if confirmed.len() < CONFIRMED_MAX {
            confirmed.push(peer);
        }
    }

    /// Adds how things went on all of them since the last call.
    pub(crate) fn add_to(&self, pressure: &mut Pressure) {
        pressure.served += self.served.swap(0, Ordering::Relaxed);
        pressure.lost_late += self.lost_late.swap(0, Ordering::Relaxed);
        let fullest_percent = self.fullest_percent.swap(0, Ordering::Relaxed);
        pressure.level_percent = pressure.level_percent.max(fullest_percent);
    }

    /// Who was confirmed since the last call.
    pub(crate) fn take_confirmed(&self) -> Vec<IpAddr> {
        std::mem::take(&mut self.confirmed.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_never_empty_is_pressure() {
        let mut meter = PressureMeter::default();
        let mut counters = Counters { delivered: 100, ..Counters::default() };
        meter.on_round(64);
        let busy = meter.take(&counters, None);
        assert_eq!((busy.served, busy.level_percent), (100, 100));
        meter.on_round(64);
        meter.on_round(0);
        assert_eq!(meter.take(&counters, None).level_percent, 50);
        meter.on_round(64);
        for _ in 0..100 {
            meter.on_round(0);
        }
        counters.drops.count(DropReason::SocketQueueFull);
        let calm = meter.take(&counters, None);
        assert_eq!((calm.served, calm.lost_late, calm.level_percent), (0, 1, 0));
        meter.on_level(80);
        assert_eq!(meter.take(&counters, None).level_percent, 80);
    }

    #[test]
    fn a_few_frames_that_waited_for_a_thread_that_did_not_run_are_no_pressure() {
        let mut meter = PressureMeter::default();
        let counters = Counters::default();
        meter.on_round(5);
        meter.on_round(10);
        assert_eq!(meter.take(&counters, None).level_percent, 0);
        meter.on_round(15);
        meter.on_round(1);
        assert_eq!(meter.take(&counters, None).level_percent, 100);
    }

    #[test]
    fn frames_that_a_port_loses_unseen_are_a_part_of_all() {
        let judge = |seen, unseen| {
            let mut meter = PressureMeter::default();
            let counters = Counters { delivered: 100, ..Counters::default() };
            meter.take(&Counters::default(), Some(EarlyWork::default()));
            meter.take(&counters, Some(EarlyWork { seen, unseen })).unseen_permille
        };
        assert_eq!(judge(1000, 0), 0);
        assert_eq!(judge(1000, 500), 333);
        assert_eq!(judge(990, 10), 10);
        assert_eq!(judge(0, 300), 750, "what was served was seen");
    }
}
