//! Load measurements of an engine, as input of admission control.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tidegate_gate::admission::{BacklogMeter, Pressure};
use tidegate_stack::Counters;
use tidegate_wire::DropReason;

use crate::source_sample::SampledSource;

/// Work of a device that drops early, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EarlyDropWork {
    /// Frames that the device examined: dropped or admitted.
    pub(crate) examined: u64,
    /// Frames lost before the device examined them.
    pub(crate) rx_missed: u64,
    /// Number of times that the device was found without admitted frames, if it knows.
    pub(crate) times_emptied: Option<u64>,
}

/// Load counters between two periods of admission.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PressureMeter {
    served: u64,
    lost_late: u64,
    early_drop: Option<EarlyDropWork>,
    backlog: BacklogMeter,
    max_level_percent: u32,
}

impl PressureMeter {
    /// Counts a receive turn that took `received` frames out of at most `quota`.
    #[inline]
    pub(crate) fn on_turn(&mut self, received: usize, quota: usize) {
        self.backlog.on_turn(received, received < quota);
    }

    /// Records the fill of a queue in front of an application, in percent.
    #[inline]
    pub(crate) fn on_level(&mut self, percent: u32) {
        self.max_level_percent = self.max_level_percent.max(percent);
    }

    /// Returns the pressure since the last call and starts the next period.
    ///
    /// An engine that runs inside the application's own calls has short queues under any load:
    /// frames that it cannot process wait in the device. A device that drops early knows itself
    /// whether it ran out of admitted frames, before it polled for more.
    ///
    /// `early_drop` is the work of a device that drops early.
    pub(crate) fn take(
        &mut self,
        counters: &Counters,
        early_drop: Option<EarlyDropWork>,
    ) -> Pressure {
        let served = counters.delivered + counters.handled;
        let lost = [DropReason::SocketQueueFull, DropReason::NoBuffer];
        let lost_late = lost.iter().map(|&reason| counters.drops.get(reason)).sum::<u64>();
        let served_now = served.saturating_sub(self.served);
        let work = early_drop.zip(self.early_drop).map(|(now, before)| now.since(&before));
        let rx_missed_permille = work.map_or(0, |work| work.rx_missed_permille(served_now));
        if let Some(emptied) = work.and_then(|work| work.times_emptied) {
            self.backlog.set_emptied(emptied);
        }
        let pressure = Pressure {
            served: served_now,
            late_drops: lost_late.saturating_sub(self.lost_late),
            level_percent: self.max_level_percent,
            backlog_percent: self.backlog.take(),
            rx_missed_permille,
        };
        *self = Self { served, lost_late, early_drop, ..Self::default() };
        pressure
    }
}

impl EarlyDropWork {
    fn since(self, before: &Self) -> Self {
        Self {
            examined: self.examined.saturating_sub(before.examined),
            rx_missed: self.rx_missed.saturating_sub(before.rx_missed),
            times_emptied: self
                .times_emptied
                .zip(before.times_emptied)
                .map(|(now, before)| now.saturating_sub(before)),
        }
    }

    /// Fraction of frames lost before they were examined, in permille. While the device drops
    /// nothing, it examines nothing: the served frames then count as examined.
    fn rx_missed_permille(&self, served: u64) -> u32 {
        let arrived = self.examined.max(served).saturating_add(self.rx_missed).max(1);
        (self.rx_missed.saturating_mul(1000) / arrived).min(1000) as u32
    }
}

/// Maximum number of confirmed peers, and of sampled sources, between two periods. Further ones
/// are reported by a later handshake or frame.
const MAX_REPORTED_SOURCES: usize = 4096;

/// Reports of the secondary cores, of load and of sources, to the primary core, which alone decides
/// admission.
#[derive(Debug, Default)]
pub(crate) struct SecondaryCores {
    served: AtomicU64,
    lost_late: AtomicU64,
    max_level_percent: AtomicU32,
    max_backlog_percent: AtomicU32,
    confirmed: Mutex<Vec<IpAddr>>,
    sampled: Mutex<Vec<SampledSource>>,
    /// No source becomes known.
    learning_is_off: AtomicBool,
}

impl SecondaryCores {
    /// Adds the pressure on one core since its last report.
    pub(crate) fn report(&self, pressure: &Pressure) {
        self.served.fetch_add(pressure.served, Ordering::Relaxed);
        self.lost_late.fetch_add(pressure.late_drops, Ordering::Relaxed);
        self.max_level_percent.fetch_max(pressure.level_percent, Ordering::Relaxed);
        self.max_backlog_percent.fetch_max(pressure.backlog_percent, Ordering::Relaxed);
    }

    /// Adds a confirmed peer: it has proven to one core that it receives packets sent to its
    /// address.
    pub(crate) fn confirm(&self, peer: IpAddr) {
        let mut confirmed = self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        if confirmed.len() < MAX_REPORTED_SOURCES {
            confirmed.push(peer);
        }
    }

    /// Adds the sources that `sample` returns, unless none becomes known. Loses them if another core
    /// holds the list.
    pub(crate) fn sample<I: Iterator<Item = SampledSource>>(&self, sample: impl FnOnce() -> I) {
        if self.learning_is_off.load(Ordering::Relaxed) {
            return;
        }
        if let Ok(mut sampled) = self.sampled.try_lock() {
            let space = MAX_REPORTED_SOURCES.saturating_sub(sampled.len());
            sampled.extend(sample().take(space));
        }
    }

    /// Says whether sources become known.
    pub(crate) fn set_learning(&self, is_learning: bool) {
        self.learning_is_off.store(!is_learning, Ordering::Relaxed);
    }

    /// Adds the reports of all cores since the last call to `pressure`.
    pub(crate) fn add_to(&self, pressure: &mut Pressure) {
        pressure.served += self.served.swap(0, Ordering::Relaxed);
        pressure.late_drops += self.lost_late.swap(0, Ordering::Relaxed);
        let max_level_percent = self.max_level_percent.swap(0, Ordering::Relaxed);
        pressure.level_percent = pressure.level_percent.max(max_level_percent);
        let max_backlog_percent = self.max_backlog_percent.swap(0, Ordering::Relaxed);
        pressure.backlog_percent = pressure.backlog_percent.max(max_backlog_percent);
    }

    /// Returns the peers confirmed since the last call.
    pub(crate) fn take_confirmed(&self) -> Vec<IpAddr> {
        std::mem::take(&mut self.confirmed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the sources sampled since the last call.
    pub(crate) fn take_sampled(&self) -> Vec<SampledSource> {
        std::mem::take(&mut self.sampled.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frames_left_after_each_full_quota_are_a_backlog() {
        let mut meter = PressureMeter::default();
        let mut counters = Counters { delivered: 100, ..Counters::default() };
        meter.on_turn(64, 64);
        let busy = meter.take(&counters, None);
        assert_eq!((busy.served, busy.level_percent, busy.backlog_percent), (100, 0, 100));
        // Each poll finds something, but the server has room for more.
        for _ in 0..100 {
            meter.on_turn(63, 64);
        }
        counters.drops.count(DropReason::SocketQueueFull);
        let calm = meter.take(&counters, None);
        assert_eq!((calm.served, calm.late_drops, calm.backlog_percent), (0, 1, 0));
        meter.on_level(80);
        assert_eq!(meter.take(&counters, None).level_percent, 80);
    }

    /// A poll of the device may fill the quota although the device had been emptied before.
    #[test]
    fn device_that_was_emptied_before_a_poll_has_no_backlog() {
        let mut meter = PressureMeter::default();
        let counters = Counters::default();
        let work = |times_emptied| {
            Some(EarlyDropWork { times_emptied: Some(times_emptied), ..EarlyDropWork::default() })
        };
        meter.take(&counters, work(3));
        meter.on_turn(64, 64);
        assert_eq!(meter.take(&counters, work(4)).backlog_percent, 0);
        meter.on_turn(64, 64);
        assert_eq!(meter.take(&counters, work(4)).backlog_percent, 100);
    }

    #[test]
    fn missed_frames_count_as_fraction_of_arrivals() {
        let missed_permille = |examined, rx_missed| {
            let mut meter = PressureMeter::default();
            let counters = Counters { delivered: 100, ..Counters::default() };
            meter.take(&Counters::default(), Some(EarlyDropWork::default()));
            meter
                .take(&counters, Some(EarlyDropWork { examined, rx_missed, times_emptied: None }))
                .rx_missed_permille
        };
        assert_eq!(missed_permille(1000, 0), 0);
        assert_eq!(missed_permille(1000, 500), 333);
        assert_eq!(missed_permille(990, 10), 10);
        assert_eq!(missed_permille(0, 300), 750, "what was served was seen");
    }
}
