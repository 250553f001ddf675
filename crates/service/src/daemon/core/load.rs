//! Load of a network core.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Window over which a core's load is measured.
const LOAD_WINDOW_NS: u64 = 10_000_000;

/// Load of a core that is busy all the time, in permille.
pub(in crate::daemon) const FULL_PERMILLE: u32 = 1000;

/// Load of a core, as other threads see it.
#[derive(Default)]
pub(in crate::daemon) struct CoreLoad {
    busy_permille: AtomicU32,
    /// Number of reports: a core that sleeps publishes none.
    reports: AtomicU64,
    applications: AtomicU32,
    migration_sets: AtomicU32,
}

/// Last report of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::daemon) struct LastReport {
    /// Share of its time in which the core was busy, in permille.
    pub(in crate::daemon) busy_permille: u32,
    /// Number of reports so far.
    pub(in crate::daemon) reports: u64,
    /// Applications served, or on their way to this core.
    pub(in crate::daemon) applications: u32,
    /// Sets of applications that can migrate independently.
    pub(in crate::daemon) migration_sets: u32,
}

impl CoreLoad {
    pub(in crate::daemon) fn last_report(&self) -> LastReport {
        LastReport {
            busy_permille: self.busy_permille.load(Ordering::Relaxed),
            reports: self.reports.load(Ordering::Relaxed),
            applications: self.applications.load(Ordering::SeqCst),
            migration_sets: self.migration_sets.load(Ordering::Relaxed),
        }
    }

    /// Adds applications that are here or on their way here.
    pub(in crate::daemon) fn add_applications(&self, count: usize) {
        self.applications.fetch_add(count as u32, Ordering::SeqCst);
    }

    /// Removes applications.
    pub(in crate::daemon) fn remove_applications(&self, count: usize) {
        self.applications.fetch_sub(count as u32, Ordering::SeqCst);
    }

    pub(super) fn set_migration_sets(&self, count: usize) {
        self.migration_sets.store(count as u32, Ordering::Relaxed);
    }

    fn publish(&self, busy: u32) {
        self.busy_permille.store(busy, Ordering::Relaxed);
        self.reports.fetch_add(1, Ordering::Relaxed);
    }
}

/// Measures the share of time in which a core is busy.
#[derive(Default)]
pub(super) struct LoadMeter {
    began_ns: u64,
    last_ns: u64,
    busy_ns: u64,
    was_busy: bool,
}

impl LoadMeter {
    /// Starts a round. Returns true at the end of a window, with the result published in `load`.
    pub(super) fn on_round(&mut self, now_ns: u64, load: &CoreLoad) -> bool {
        if self.was_busy {
            self.busy_ns += now_ns.saturating_sub(self.last_ns);
        }
        self.last_ns = now_ns;
        let elapsed_ns = now_ns.saturating_sub(self.began_ns);
        if elapsed_ns < LOAD_WINDOW_NS {
            return false;
        }
        let busy = u128::from(self.busy_ns) * u128::from(FULL_PERMILLE) / u128::from(elapsed_ns);
        load.publish((busy as u32).min(FULL_PERMILLE));
        (self.began_ns, self.busy_ns) = (now_ns, 0);
        true
    }

    /// Records if the round found work.
    pub(super) fn set_busy(&mut self, busy: bool) {
        self.was_busy = busy;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_permille_of_busy_time() {
        let (mut meter, load) = (LoadMeter::default(), CoreLoad::default());
        assert!(!meter.on_round(0, &load));
        meter.set_busy(true);
        assert!(!meter.on_round(3_000_000, &load));
        meter.set_busy(false);
        assert!(meter.on_round(12_000_000, &load));
        assert_eq!(
            load.last_report(),
            LastReport { busy_permille: 250, reports: 1, ..LastReport::default() }
        );
        meter.set_busy(true);
        assert!(meter.on_round(42_000_000, &load));
        assert_eq!(load.last_report().busy_permille, FULL_PERMILLE);
        meter.set_busy(false);
        assert!(meter.on_round(10_000_000_000, &load), "idle for a long time");
        assert_eq!(load.last_report().busy_permille, 0);
    }
}
