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
/// Time for which a flood lasts after the last check with more refused than admitted frames, and an
/// interval after the last check that needed it.
const FLOOD_DURATION: Duration = Duration::from_secs(1);
/// Intervals of softirqs in nanoseconds, from the longest. Each softirq costs a timer and its start,
/// more than five microseconds in a virtual machine.
const INTERVALS_NS: [u64; 5] = [400_000, 200_000, 100_000, 50_000, 25_000];
/// Interval of a flood whose rate is not yet known.
const FIRST_INTERVAL_NS: u64 = 100_000;
/// Frames that may arrive in an interval: a veth's ring has 256, and frames come in bursts.
const FRAMES_PER_INTERVAL: u128 = 96;
/// Minimum time over which the rate of frames is measured.
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
    /// Time between two softirqs in nanoseconds, and the last check whose rate needed it.
    pub(super) interval_ns: u64,
    interval_needed: Instant,
}

/// Longest interval of softirqs in which so few frames arrive that a ring does not fill.
fn longest_interval_ns(frames: u64, elapsed: Duration) -> u64 {
    let [.., shortest] = INTERVALS_NS;
    let fits = |&interval_ns: &u64| {
        u128::from(frames) * u128::from(interval_ns) <= FRAMES_PER_INTERVAL * elapsed.as_nanos()
    };
    INTERVALS_NS.into_iter().find(fits).unwrap_or(shortest)
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
            interval_ns: FIRST_INTERVAL_NS,
            interval_needed: last_check,
        }
    }

    /// True while softirqs poll the device.
    pub(super) fn is_active(&self) -> bool {
        self.is_flood && !self.overrun
    }

    /// Records the frames admitted and refused so far. Returns true if the polling side changes
    /// between softirqs and the owner, or the interval of softirqs.
    pub(super) fn on_counts(&mut self, counts: (u64, u64)) -> bool {
        let now = Instant::now();
        let previous = std::mem::replace(&mut self.counts, counts);
        let admitted = counts.0.saturating_sub(previous.0);
        let refused = counts.1.saturating_sub(previous.1);
        if refused > admitted {
            self.last_flood = Some(now);
        }
        self.recent += refused + admitted;
        let was = (self.is_active(), self.interval_ns);
        let elapsed = now.duration_since(self.measured);
        if elapsed >= MIN_RATE_TIME {
            let frames = std::mem::take(&mut self.recent);
            self.measured = now;
            self.choose_interval(longest_interval_ns(frames, elapsed), now);
        }
        self.is_flood = self.last_flood.is_some_and(|at| at.elapsed() < FLOOD_DURATION);
        was != (self.is_active(), self.interval_ns)
    }

    /// Shortens the interval at once, and lengthens it after a second in which it could have been
    /// longer.
    fn choose_interval(&mut self, longest_ns: u64, now: Instant) {
        let is_needed = longest_ns <= self.interval_ns;
        if is_needed || now.duration_since(self.interval_needed) >= FLOOD_DURATION {
            (self.interval_ns, self.interval_needed) = (longest_ns, now);
        }
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
    fn softirqs_come_as_often_as_the_rate_of_frames_needs() {
        let mut mode = SoftirqMode::new(0, (0, 0));
        assert!(!mode.on_counts((10, 0)), "too little time to tell");
        let mut refused = 0;
        let mut after_20_ms = |mode: &mut SoftirqMode, frames: u64| {
            refused += frames;
            count(mode, (10, refused)).then_some(mode.interval_ns)
        };
        // 400,000 frames/s: 80 in 200 us, of a ring of 256.
        assert_eq!(after_20_ms(&mut mode, 8_000), Some(100_000), "the flood begins");
        assert_eq!(after_20_ms(&mut mode, 8_000), None, "a longer one would do");
        mode.interval_needed -= FLOOD_DURATION;
        assert_eq!(after_20_ms(&mut mode, 8_000), Some(200_000));
        // 1.5 and 8 million frames/s.
        assert_eq!(after_20_ms(&mut mode, 30_000), Some(50_000));
        assert_eq!(after_20_ms(&mut mode, 160_000), Some(25_000));
        assert_eq!(after_20_ms(&mut mode, 100), None, "a pause");
        mode.interval_needed -= FLOOD_DURATION;
        assert_eq!(after_20_ms(&mut mode, 160_000), None, "it goes on");
        assert_eq!(after_20_ms(&mut mode, 100), None);
        mode.interval_needed -= FLOOD_DURATION;
        assert_eq!(after_20_ms(&mut mode, 100), Some(400_000));
    }
}
