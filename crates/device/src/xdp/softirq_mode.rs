//! Softirq mode: the kernel polls the device while admission refuses most frames.
//!
//! Under a flood that is nearly all refused, the work is done by the BPF program on the
//! interface. The program then runs in softirqs, started by a timer of the device. The RX
//! ring does not overflow, whatever the device's owner does meanwhile. The timer runs on the
//! core that polled last. After a pause that would be the sender's core, so the owner's core
//! polls now and then.
//!
//! When frames arrive faster than softirqs can process them, the softirqs never end and take
//! the core from the owner. The ring then overflows, whichever side polls. In that case the
//! device polls the driver itself, between two turns of its owner.
//!
//! Limits alone are not a flood: a server that is merely busy has limits as well. While most
//! frames are admitted, the device polls the driver itself, as it does without limits.

use std::time::{Duration, Instant};

/// Interval between two checks of the RX-missed counters.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// Missed frames per second above which softirqs cannot keep up.
const MIN_OVERRUN_PPS: u128 = 300_000;
/// Minimum time above [`MIN_OVERRUN_PPS`] before an overrun is declared; ignores short peaks.
const MIN_OVERRUN_TIME: Duration = Duration::from_millis(20);
/// Time for which a declared overrun lasts.
const OVERRUN_DURATION: Duration = Duration::from_secs(1);
/// Time for which a flood lasts after the last check with more refused than admitted frames, and a
/// fast one after the last check above [`FAST_PPS`].
const FLOOD_DURATION: Duration = Duration::from_secs(1);
/// Frames per second from which softirqs have to come more often: a veth's ring of 256 frames would
/// fill in the meantime.
const FAST_PPS: u128 = 500_000;
/// Minimum time over which the rate of frames is measured; frames come in bursts.
const MIN_RATE_TIME: Duration = Duration::from_millis(20);

/// Decides between softirqs and the owner's polls while admission limits are in force.
pub(super) struct SoftirqMode {
    /// Frames arrive faster than softirqs process them: the device polls the driver itself.
    pub(super) overrun: bool,
    /// Time of the last check of the RX-missed counters.
    pub(super) last_check: Instant,
    rx_missed: u64,
    /// Start of the overrun, or of the excessive loss that may become an overrun.
    state_since: Option<Instant>,
    /// Most frames are refused.
    pub(super) is_flood: bool,
    /// Frames admitted and refused so far.
    counts: (u64, u64),
    /// Frames since the rate was last measured, and the time of that.
    recent: u64,
    measured: Instant,
    /// Last time at which more frames were refused than admitted.
    last_flood: Option<Instant>,
    /// Frames arrive faster than [`FAST_PPS`], and the last time at which they did.
    pub(super) is_fast: bool,
    last_fast: Option<Instant>,
}

impl SoftirqMode {
    /// State for a device whose RX ring has missed `rx_missed` frames so far, and whose BPF program
    /// has admitted and refused `counts` frames.
    pub(super) fn new(rx_missed: u64, counts: (u64, u64)) -> Self {
        let last_check = Instant::now();
        Self {
            overrun: false,
            last_check,
            rx_missed,
            state_since: None,
            is_flood: false,
            counts,
            recent: 0,
            measured: last_check,
            last_flood: None,
            is_fast: false,
            last_fast: None,
        }
    }

    /// True while softirqs poll the device.
    pub(super) fn is_active(&self) -> bool {
        self.is_flood && !self.overrun
    }

    /// Records the frames admitted and refused so far. Returns true if the polling side changes
    /// between softirqs and the owner, or the pace of softirqs.
    pub(super) fn on_counts(&mut self, counts: (u64, u64)) -> bool {
        let now = Instant::now();
        let previous = std::mem::replace(&mut self.counts, counts);
        let admitted = counts.0.saturating_sub(previous.0);
        let refused = counts.1.saturating_sub(previous.1);
        if refused > admitted {
            self.last_flood = Some(now);
        }
        self.recent += refused + admitted;
        let elapsed = now.duration_since(self.measured);
        if elapsed >= MIN_RATE_TIME {
            let frames = u128::from(std::mem::take(&mut self.recent));
            self.measured = now;
            if frames > FAST_PPS * elapsed.as_nanos() / 1_000_000_000 {
                self.last_fast = Some(now);
            }
        }
        let lasts = |last: Option<Instant>| last.is_some_and(|at| at.elapsed() < FLOOD_DURATION);
        let was = (self.is_active(), self.is_fast);
        (self.is_flood, self.is_fast) = (lasts(self.last_flood), lasts(self.last_fast));
        was != (self.is_active(), self.is_fast)
    }

    /// Records the frames missed so far. Returns true if an overrun begins or ends.
    pub(super) fn on_check(&mut self, rx_missed: u64) -> bool {
        let now = Instant::now();
        let elapsed = now.duration_since(std::mem::replace(&mut self.last_check, now));
        let newly_missed =
            rx_missed.saturating_sub(std::mem::replace(&mut self.rx_missed, rx_missed));
        let limit = MIN_OVERRUN_PPS * elapsed.as_nanos() / 1_000_000_000;
        let exceeds_limit = self.overrun || u128::from(newly_missed) > limit;
        let since = self.state_since.filter(|_| exceeds_limit).unwrap_or(now);
        self.state_since = exceeds_limit.then_some(since);
        let age = now.duration_since(since);
        let was = self.overrun;
        self.overrun = if was { age < OVERRUN_DURATION } else { age >= MIN_OVERRUN_TIME };
        if was != self.overrun {
            self.state_since = self.overrun.then_some(now);
        }
        was != self.overrun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `checks` checks that each miss `missed_per_check` frames; returns each change of
    /// `overrun` with the number of its check.
    fn overrun_changes(
        mode: &mut SoftirqMode,
        checks: u32,
        missed_per_check: u64,
    ) -> Vec<(u32, bool)> {
        let mut changes = Vec::new();
        for check in 1..=checks {
            mode.last_check -= CHECK_INTERVAL;
            mode.state_since = mode.state_since.map(|since| since - CHECK_INTERVAL);
            if mode.on_check(mode.rx_missed + missed_per_check) {
                changes.push((check, mode.overrun));
            }
        }
        changes
    }

    #[test]
    fn overrun_needs_sustained_loss_and_lasts_one_second() {
        let mut mode = SoftirqMode::new(7, (0, 0));
        assert_eq!(overrun_changes(&mut mode, 9, 2_000), [], "a short peak");
        assert_eq!(overrun_changes(&mut mode, 1, 10), []);
        assert_eq!(overrun_changes(&mut mode, 9, 2_000), [], "another short peak");
        assert_eq!(overrun_changes(&mut mode, 1, 10), []);
        let [(check, true)] = overrun_changes(&mut mode, 20, 2_000)[..] else {
            panic!("no overrun")
        };
        assert!((10..=12).contains(&check), "{check}");
        let [(check, false)] = overrun_changes(&mut mode, 500, 0)[..] else {
            panic!("the overrun never ends")
        };
        assert!((480..=500).contains(&check), "{check}");
    }

    /// Records counts 20 ms after the last.
    fn count(mode: &mut SoftirqMode, counts: (u64, u64)) -> bool {
        mode.measured -= MIN_RATE_TIME;
        mode.on_counts(counts)
    }

    #[test]
    fn softirq_mode_is_active_while_the_majority_is_refused() {
        let mut mode = SoftirqMode::new(0, (100, 1_000));
        assert!(!mode.is_active());
        assert!(!count(&mut mode, (200, 1_050)), "most frames are admitted");
        assert!(count(&mut mode, (210, 2_000)) && mode.is_active());
        assert!(!count(&mut mode, (900, 2_000)), "a pause");
        mode.overrun = true;
        assert!(!mode.is_active());
        mode.overrun = false;
        mode.last_flood = mode.last_flood.map(|refused| refused - FLOOD_DURATION);
        assert!(count(&mut mode, (1_900, 2_100)) && !mode.is_active());
    }

    #[test]
    fn softirqs_come_more_often_while_frames_arrive_fast() {
        let mut mode = SoftirqMode::new(0, (0, 0));
        assert!(!mode.on_counts((10, 0)), "too little time to tell");
        assert!(count(&mut mode, (100, 9_000)) && mode.is_active() && !mode.is_fast);
        assert!(count(&mut mode, (200, 25_000)) && mode.is_fast);
        assert!(!count(&mut mode, (300, 26_000)), "a pause");
        mode.last_fast = mode.last_fast.map(|fast| fast - FLOOD_DURATION);
        assert!(count(&mut mode, (400, 27_000)) && mode.is_active() && !mode.is_fast);
    }
}
