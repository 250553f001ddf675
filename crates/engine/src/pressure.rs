//! Load measurements of an engine, as input of admission control.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tidegate_gate::admission::{Config, Pressure};
use tidegate_stack::Counters;
use tidegate_wire::DropReason;

/// Approximate cost of polling an empty device, in nanoseconds.
const EMPTY_POLL_NS: u64 = 10_000;

/// Fewer frames than this are no backlog, even if the device was never found empty: they arrived
/// while this thread did not run.
const MIN_BACKLOG_FRAMES: u64 = 16;

/// Work of a device that drops early, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EarlyDropWork {
    /// Frames that the device examined: dropped or admitted.
    pub(crate) examined: u64,
    /// Frames lost before the device examined them.
    pub(crate) rx_missed: u64,
}

/// Load counters between two periods of admission.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PressureMeter {
    served: u64,
    lost_late: u64,
    early_drop: Option<EarlyDropWork>,
    received: u64,
    idle_rounds: u64,
    max_level_percent: u32,
}

impl PressureMeter {
    /// Counts a round of the engine that received `received` frames. A round without frames means
    /// that the engine keeps up with the device.
    #[inline]
    pub(crate) fn on_round(&mut self, received: usize) {
        self.received += received as u64;
        self.idle_rounds += u64::from(received == 0);
    }

    /// Records the fill of a queue in front of an application, in percent.
    #[inline]
    pub(crate) fn on_level(&mut self, percent: u32) {
        self.max_level_percent = self.max_level_percent.max(percent);
    }

    /// Returns the pressure since the last call and starts the next period.
    ///
    /// An engine that runs inside the application's own calls has short queues under any load:
    /// frames that it cannot process wait in the device. So a device that is never found empty
    /// counts as a full queue. A device that is hardly ever empty counts as a queue between the
    /// marks. Neither counts if only a few frames arrived.
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
        let pressure = Pressure {
            served: served_now,
            late_drops: lost_late.saturating_sub(self.lost_late),
            level_percent: self.max_level_percent.max(self.device_level_percent()),
            rx_missed_permille,
        };
        *self = Self { served, lost_late, early_drop, ..Self::default() };
        pressure
    }

    fn device_level_percent(&self) -> u32 {
        match self.idle_rounds {
            _ if self.received < MIN_BACKLOG_FRAMES => 0,
            0 => 100,
            rounds if rounds * EMPTY_POLL_NS * 20 < Config::PERIOD_NS => 50,
            _ => 0,
        }
    }
}

impl EarlyDropWork {
    fn since(self, before: &Self) -> Self {
        Self {
            examined: self.examined.saturating_sub(before.examined),
            rx_missed: self.rx_missed.saturating_sub(before.rx_missed),
        }
    }

    /// Fraction of frames lost before they were examined, in permille. While the device drops
    /// nothing, it examines nothing: the served frames then count as examined.
    fn rx_missed_permille(&self, served: u64) -> u32 {
        let arrived = self.examined.max(served).saturating_add(self.rx_missed).max(1);
        (self.rx_missed.saturating_mul(1000) / arrived).min(1000) as u32
    }
}

/// Maximum number of confirmed peers between two periods. Further peers are confirmed by a
/// later handshake.
const MAX_CONFIRMED_PEERS: usize = 4096;

/// Load reports of the secondary cores to the primary core, which alone decides admission.
#[derive(Debug, Default)]
pub(crate) struct SecondaryCores {
    served: AtomicU64,
    lost_late: AtomicU64,
    max_level_percent: AtomicU32,
    confirmed: Mutex<Vec<IpAddr>>,
}

impl SecondaryCores {
    /// Adds the pressure on one core since its last report.
    pub(crate) fn report(&self, pressure: &Pressure) {
        self.served.fetch_add(pressure.served, Ordering::Relaxed);
        self.lost_late.fetch_add(pressure.late_drops, Ordering::Relaxed);
        self.max_level_percent.fetch_max(pressure.level_percent, Ordering::Relaxed);
    }

    /// Adds a confirmed peer: it has proven to one core that it receives packets sent to its
    /// address.
    pub(crate) fn confirm(&self, peer: IpAddr) {
        let mut confirmed = self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        if confirmed.len() < MAX_CONFIRMED_PEERS {
            confirmed.push(peer);
        }
    }

    /// Adds the reports of all cores since the last call to `pressure`.
    pub(crate) fn add_to(&self, pressure: &mut Pressure) {
        pressure.served += self.served.swap(0, Ordering::Relaxed);
        pressure.late_drops += self.lost_late.swap(0, Ordering::Relaxed);
        let max_level_percent = self.max_level_percent.swap(0, Ordering::Relaxed);
        pressure.level_percent = pressure.level_percent.max(max_level_percent);
    }

    /// Returns the peers confirmed since the last call.
    pub(crate) fn take_confirmed(&self) -> Vec<IpAddr> {
        std::mem::take(&mut self.confirmed.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_empty_device_counts_as_full_queue() {
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
        assert_eq!((calm.served, calm.late_drops, calm.level_percent), (0, 1, 0));
        meter.on_level(80);
        assert_eq!(meter.take(&counters, None).level_percent, 80);
    }

    #[test]
    fn few_waiting_frames_are_no_pressure() {
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
    fn missed_frames_count_as_fraction_of_arrivals() {
        let missed_permille = |examined, rx_missed| {
            let mut meter = PressureMeter::default();
            let counters = Counters { delivered: 100, ..Counters::default() };
            meter.take(&Counters::default(), Some(EarlyDropWork::default()));
            meter.take(&counters, Some(EarlyDropWork { examined, rx_missed })).rx_missed_permille
        };
        assert_eq!(missed_permille(1000, 0), 0);
        assert_eq!(missed_permille(1000, 500), 333);
        assert_eq!(missed_permille(990, 10), 10);
        assert_eq!(missed_permille(0, 300), 750, "what was served was seen");
    }
}
