//! How busy a core is.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How long a core is watched before it says how busy it is.
const WINDOW_NS: u64 = 10_000_000;

/// All of a core's time.
pub(super) const WHOLE: u32 = 1000;

/// What others know of a core.
#[derive(Default)]
pub(super) struct Load {
    busy: AtomicU32,
    /// How often it was told: a core that sleeps tells nothing.
    told: AtomicU64,
    applications: AtomicU32,
    families: AtomicU32,
}

/// What a core said last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// Thousandths of its time in which it had something to do.
    pub(super) busy: u32,
    /// How often it has said something.
    pub(super) told: u64,
    /// Applications that it serves.
    pub(super) applications: u32,
    /// How many of them can go elsewhere independently of each other.
    pub(super) families: u32,
}

impl Load {
    pub(super) fn said(&self) -> Said {
        Said {
            busy: self.busy.load(Ordering::Relaxed),
            told: self.told.load(Ordering::Relaxed),
            applications: self.applications.load(Ordering::SeqCst),
            families: self.families.load(Ordering::Relaxed),
        }
    }

    /// So many more applications are here, or on their way here.
    pub(super) fn add_applications(&self, count: usize) {
        self.applications.fetch_add(count as u32, Ordering::SeqCst);
    }

    /// So many less.
    pub(super) fn remove_applications(&self, count: usize) {
        self.applications.fetch_sub(count as u32, Ordering::SeqCst);
    }

    pub(super) fn set_families(&self, families: usize) {
        self.families.store(families as u32, Ordering::Relaxed);
    }

    fn tell(&self, busy: u32) {
        self.busy.store(busy, Ordering::Relaxed);
        self.told.fetch_add(1, Ordering::Relaxed);
    }
}

/// Measures what part of its time a core has something to do.
#[derive(Default)]
pub(super) struct Meter {
    began_ns: u64,
    last_ns: u64,
    busy_ns: u64,
    was_busy: bool,
}

impl Meter {
    /// A round begins. Whether a window is over; what is measured is in `load` then.
    pub(super) fn on_round(&mut self, now_ns: u64, load: &Load) -> bool {
        if self.was_busy {
            self.busy_ns += now_ns.saturating_sub(self.last_ns);
        }
        self.last_ns = now_ns;
        let elapsed_ns = now_ns.saturating_sub(self.began_ns);
        if elapsed_ns < WINDOW_NS {
            return false;
        }
        let busy = u128::from(self.busy_ns) * u128::from(WHOLE) / u128::from(elapsed_ns);
        load.tell((busy as u32).min(WHOLE));
        (self.began_ns, self.busy_ns) = (now_ns, 0);
        true
    }

    /// Whether the round found something to do.
    pub(super) fn set_busy(&mut self, busy: bool) {
        self.was_busy = busy;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_with_work_counts() {
        let (mut meter, load) = (Meter::default(), Load::default());
        assert!(!meter.on_round(0, &load));
        meter.set_busy(true);
        assert!(!meter.on_round(3_000_000, &load));
        meter.set_busy(false);
        assert!(meter.on_round(12_000_000, &load));
        assert_eq!(load.said(), Said { busy: 250, told: 1, ..Said::default() });
        meter.set_busy(true);
        assert!(meter.on_round(42_000_000, &load));
        assert_eq!(load.said().busy, WHOLE);
        meter.set_busy(false);
        assert!(meter.on_round(10_000_000_000, &load), "a long sleep");
        assert_eq!(load.said().busy, 0);
    }
}
