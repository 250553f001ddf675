//! Trials that compare polls with interrupts under the same load.
//!
//! Interrupts run the driver's receive path where they come: on a veth, on the sender's processor. Polls
//! run it on this one, in batches. Which of them serves more depends on the processor that is short of
//! time. Peers that wait for replies send more to the faster mode, so the rate of frames shows it.

use std::time::Duration;

/// Time of a measurement.
const MEASURED: Duration = Duration::from_millis(20);
/// Time after a change of mode that is not measured.
const TRANSITION: Duration = Duration::from_millis(2);
/// Time between two trials: doubled up to the maximum by each trial that changes nothing.
const MIN_INTERVAL: Duration = MEASURED;
const MAX_INTERVAL: Duration = Duration::from_secs(2);
/// Rate of polls, in percent of the rate with interrupts, from which polls are preferred. Interrupts
/// serve a lone frame sooner.
const MIN_POLLS_PERCENT: f64 = 102.0;
/// Part of the rate of the last trial below which a busy processor may have too many interrupts.
const MIN_RATE_PART: f64 = 0.5;
/// Consecutive windows in which it seems so, after a trial that has shown the contrary: another program
/// or a hypervisor may take the processor for a moment.
const OVERLOADED_WINDOWS: u32 = 3;

/// Trials of the mode that is not in force.
#[derive(Debug)]
pub(super) struct ModeTrials {
    interval: Duration,
    /// Time until the next trial.
    remaining: Duration,
    /// Frames of the last [`MEASURED`] before a trial.
    before: Measurement,
    /// Time since a trial began, and its frames after [`TRANSITION`].
    trial: Option<(Duration, Measurement)>,
    /// Interrupts kept the processor busy, or polls served more in the last trial.
    requires_polls: bool,
    /// Frames per second with interrupts, when they last served as much as polls.
    interrupts_pps: Option<f64>,
    /// Consecutive windows in which interrupts may have taken too much time.
    overloaded_windows: u32,
}

/// Frames of some time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measurement {
    pub(super) frames: u32,
    pub(super) time: Duration,
}

impl Measurement {
    fn add(&mut self, other: Self) {
        self.frames += other.frames;
        self.time += other.time;
    }

    fn pps(self) -> f64 {
        f64::from(self.frames) / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl ModeTrials {
    pub(super) fn new() -> Self {
        Self {
            interval: MIN_INTERVAL,
            remaining: MIN_INTERVAL,
            before: Measurement::default(),
            trial: None,
            requires_polls: false,
            interrupts_pps: None,
            overloaded_windows: 0,
        }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.trial.is_some()
    }

    /// True if a trial has taken its time, whose current window has taken `window` so far.
    #[inline]
    pub(super) fn is_over(&self, window: impl FnOnce() -> Duration) -> bool {
        let elapsed = self.trial.as_ref().map(|(elapsed, _)| *elapsed + window());
        elapsed.is_some_and(|elapsed| elapsed >= TRANSITION + MEASURED)
    }

    /// Records a window with interrupts. Returns true if they may take too much time: the processor is
    /// busy, with large bursts or at a lower rate than in the last trial.
    pub(super) fn is_overloaded(&mut self, window: Measurement, busy: bool, bursty: bool) -> bool {
        let Some(usual) = self.interrupts_pps else { return busy };
        match busy && (bursty || window.pps() < MIN_RATE_PART * usual) {
            true => self.overloaded_windows += 1,
            false => self.overloaded_windows = 0,
        }
        self.overloaded_windows >= OVERLOADED_WINDOWS
    }

    /// Abandons a measurement, as the load or the mode has changed.
    pub(super) fn abandon(&mut self) {
        (self.before, self.trial) = (Measurement::default(), None);
        self.remaining = self.remaining.max(MEASURED);
    }

    /// Requires polls until the next trial, as interrupts may take time that frames need.
    pub(super) fn require_polls(&mut self) {
        if self.interrupts_pps.take().is_some() {
            *self = Self::new();
        }
        self.requires_polls = true;
        self.abandon();
    }

    /// True if only a trial may end polls.
    pub(super) fn requires_polls(&self) -> bool {
        self.requires_polls
    }

    /// Records a window in which the driver was polled, or had interrupts. Returns true if it is to be
    /// polled in the next one.
    pub(super) fn on_window(&mut self, polls: bool, window: Measurement) -> bool {
        let is_over = self.is_over(|| window.time);
        if let Some((elapsed, measured)) = &mut self.trial {
            if *elapsed >= TRANSITION {
                measured.add(window);
            }
            *elapsed += window.time;
            return if is_over { self.conclude(polls) } else { polls };
        }
        if self.remaining <= MEASURED {
            self.before.add(window);
        }
        self.remaining = self.remaining.saturating_sub(window.time);
        if !self.remaining.is_zero() {
            return polls;
        }
        self.trial = Some(Default::default());
        !polls
    }

    /// Ends a trial of polls or of interrupts. Returns true if polls serve more.
    fn conclude(&mut self, polls: bool) -> bool {
        let (_, measured) = self.trial.take().unwrap_or_default();
        let (before, during) = (self.before.pps(), measured.pps());
        let (polled, interrupted) = if polls { (during, before) } else { (before, during) };
        let next = polled * 100.0 >= interrupted * MIN_POLLS_PERCENT;
        self.interval = match next == polls {
            true => MIN_INTERVAL,
            false => (2 * self.interval).min(MAX_INTERVAL),
        };
        self.requires_polls = next;
        self.interrupts_pps = (!next).then_some(interrupted);
        (self.remaining, self.before) = (self.interval, Measurement::default());
        self.overloaded_windows = 0;
        next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECONDS: u32 = 60;

    fn window(pps: u32) -> Measurement {
        Measurement { frames: 64, time: Duration::from_secs(64) / pps }
    }

    /// Percent of a minute that is polled, of a load with `pps` frames per second in each mode, begun
    /// with `polls`.
    fn polled_percent(mut polls: bool, mut pps: impl FnMut(bool) -> u32) -> u32 {
        let mut trials = ModeTrials::new();
        let (mut total, mut polled) = (Duration::ZERO, Duration::ZERO);
        while total.as_secs() < SECONDS.into() {
            let window = window(pps(polls));
            total += window.time;
            polled += if polls { window.time } else { Duration::ZERO };
            polls = trials.on_window(polls, window);
        }
        (100 * polled.as_millis() / total.as_millis()) as u32
    }

    #[test]
    fn faster_mode_has_nearly_all_the_time() {
        for start in [false, true] {
            for slower in [10_000, 50_000, 95_000] {
                let polled = polled_percent(start, |polls| if polls { slower } else { 100_000 });
                assert!(polled <= 1, "{start} {slower}: {polled} %");
                let polled = polled_percent(start, |polls| if polls { 100_000 } else { slower });
                assert!(polled >= 98, "{start} {slower}: {polled} %");
            }
        }
    }

    #[test]
    fn interrupts_are_preferred_where_both_serve_as_much() {
        assert!(polled_percent(true, |_| 200_000) <= 1);
    }

    #[test]
    fn trial_ends_in_time_without_a_whole_window() {
        let mut trials = ModeTrials::new();
        while trials.on_window(true, window(100_000)) {}
        assert!(!trials.is_over(|| MEASURED));
        let late = TRANSITION + MEASURED;
        assert!(trials.is_over(|| late));
        assert!(trials.on_window(false, Measurement { frames: 1, time: late }), "polls again");
        assert!(!trials.is_under_way() && !trials.is_over(|| late));
        assert!(trials.is_overloaded(window(100_000), true, false), "never found to be as fast");
    }

    #[test]
    fn interrupts_overload_a_processor_that_serves_less_for_some_windows() {
        let (fast, slow) = (window(100_000), window(49_999));
        let mut trials = ModeTrials::new();
        assert!(!trials.is_overloaded(fast, false, true), "it has time");
        assert!(trials.is_overloaded(fast, true, false), "nothing was compared");
        while trials.on_window(true, fast) {}
        while trials.is_under_way() {
            assert!(!trials.on_window(false, fast));
        }
        for _ in 0..10 {
            assert!(!trials.is_overloaded(window(50_001), true, false), "fast enough");
            assert!(!trials.is_overloaded(slow, false, true), "it has time");
        }
        for (window, bursty) in [(slow, false), (fast, true)] {
            assert!(!trials.is_overloaded(fast, true, false));
            let overloaded = [(); 3].map(|()| trials.is_overloaded(window, true, bursty));
            assert_eq!(overloaded, [false, false, true]);
        }
    }

    proptest! {
        /// Windows of any length decide nothing wrong.
        #[test]
        fn noise_costs_little(seed in any::<u64>()) {
            let mut state = seed;
            let mut noise = move || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as u32 % 41
            };
            let polled = polled_percent(false, |polls| {
                let percent = 80 + noise();
                percent * if polls { 600 } else { 1_000 }
            });
            prop_assert!(polled <= 1, "{polled} %");
        }
    }
}
