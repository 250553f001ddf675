//! Trials that compare polls with interrupts under the same load.
//!
//! Interrupts run the driver's receive path where they come: on a veth, on the sender's processor. Polls
//! run it on this one, in batches. Which of them serves more depends on the processor that is short of
//! time. Peers that wait for replies send more to the faster mode, so the rate of frames shows it.

use std::time::Duration;

/// Windows of one measurement.
const TRIAL_WINDOWS: u32 = 32;
/// Windows after a change of mode that are not measured.
const TRANSITION_WINDOWS: u32 = 4;
/// Windows between two trials: doubled up to the maximum by each trial that changes nothing.
const MIN_INTERVAL_WINDOWS: u32 = TRIAL_WINDOWS;
const MAX_INTERVAL_WINDOWS: u32 = 4_096;
/// Time with interrupts, in percent of the time with polls, up to which interrupts are preferred: they
/// serve a lone frame sooner.
const MAX_INTERRUPTS_PERCENT: u32 = 105;
/// Times of the windows before up to which a trial, or a busy processor with interrupts, goes on.
const MAX_SLOWDOWN: u32 = 2;

/// Trials of the mode that is not in force.
#[derive(Debug)]
pub(super) struct ModeTrials {
    interval: u32,
    /// Windows until the next trial.
    remaining: u32,
    /// Time of the last windows before a trial, up to [`TRIAL_WINDOWS`].
    before: Duration,
    trial: Option<Trial>,
    /// Interrupts kept the processor busy, and no trial has shown that they serve as much as polls.
    requires_polls: bool,
    /// Time of a window with interrupts, when they last served as much as polls.
    interrupts_window: Option<Duration>,
}

/// Trial under way.
#[derive(Debug, Default)]
struct Trial {
    windows: u32,
    elapsed: Duration,
    measured: Duration,
}

impl ModeTrials {
    pub(super) fn new() -> Self {
        Self {
            interval: MIN_INTERVAL_WINDOWS,
            remaining: MIN_INTERVAL_WINDOWS,
            before: Duration::ZERO,
            trial: None,
            requires_polls: false,
            interrupts_window: None,
        }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.trial.is_some()
    }

    /// True if a trial has taken too long, whose current window has taken `window` so far.
    #[inline]
    pub(super) fn is_overdue(&self, window: impl FnOnce() -> Duration) -> bool {
        self.trial
            .as_ref()
            .is_some_and(|trial| trial.elapsed + window() > MAX_SLOWDOWN * self.before)
    }

    /// True if interrupts were found to serve as much as polls, and this window with interrupts is not
    /// much slower: a busy processor is then no sign that the interrupts keep it busy.
    pub(super) fn confirm_interrupts(&self, window: Duration) -> bool {
        self.interrupts_window.is_some_and(|usual| window <= MAX_SLOWDOWN * usual)
    }

    /// Abandons a measurement, as the load or the mode has changed.
    pub(super) fn abandon(&mut self) {
        (self.before, self.trial) = (Duration::ZERO, None);
        self.remaining = self.remaining.max(TRIAL_WINDOWS);
    }

    /// Requires polls until the next trial, as interrupts may take time that frames need.
    pub(super) fn require_polls(&mut self) {
        if self.interrupts_window.take().is_some() {
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
    pub(super) fn on_window(&mut self, polls: bool, window: Duration) -> bool {
        if self.trial.is_some() {
            return self.on_trial_window(polls, window);
        }
        if self.remaining <= TRIAL_WINDOWS {
            self.before += window;
        }
        self.remaining -= 1;
        if self.remaining > 0 {
            return polls;
        }
        self.trial = Some(Trial::default());
        !polls
    }

    fn on_trial_window(&mut self, polls: bool, window: Duration) -> bool {
        let is_overdue = self.is_overdue(|| window);
        let Some(trial) = &mut self.trial else { return polls };
        trial.windows += 1;
        trial.elapsed += window;
        if trial.windows > TRANSITION_WINDOWS {
            trial.measured += window;
        }
        if trial.windows < TRANSITION_WINDOWS + TRIAL_WINDOWS && !is_overdue {
            return polls;
        }
        let (polled, interrupted) = match polls {
            true => (trial.measured, self.before),
            false => (self.before, trial.measured),
        };
        let next = match is_overdue {
            true => !polls,
            false => interrupted * 100 > polled * MAX_INTERRUPTS_PERCENT,
        };
        self.interval = match next == polls {
            true => MIN_INTERVAL_WINDOWS,
            false => (2 * self.interval).min(MAX_INTERVAL_WINDOWS),
        };
        self.requires_polls &= next;
        self.interrupts_window = (!next).then(|| interrupted / TRIAL_WINDOWS);
        (self.remaining, self.before, self.trial) = (self.interval, Duration::ZERO, None);
        next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOWS: u32 = 100_000;

    /// Windows with polls, of a load whose windows take `window`, begun with `polls`.
    fn polled_windows(mut polls: bool, mut window: impl FnMut(bool) -> Duration) -> u32 {
        let mut trials = ModeTrials::new();
        let mut polled = 0;
        for _ in 0..WINDOWS {
            polled += u32::from(polls);
            polls = trials.on_window(polls, window(polls));
        }
        polled
    }

    #[test]
    fn faster_mode_has_nearly_all_windows() {
        let us = Duration::from_micros;
        for start in [false, true] {
            for slower in [110, 200, 1_000] {
                let slow_polls =
                    polled_windows(start, |polls| us(if polls { slower } else { 100 }));
                assert!(slow_polls < WINDOWS / 50, "{start} {slower}: {slow_polls}");
                let fast_polls =
                    polled_windows(start, |polls| us(if polls { 100 } else { slower }));
                assert!(fast_polls > WINDOWS * 49 / 50, "{start} {slower}: {fast_polls}");
            }
        }
    }

    #[test]
    fn interrupts_are_preferred_where_both_serve_as_much() {
        let polled = polled_windows(true, |_| Duration::from_micros(300));
        assert!(polled < WINDOWS / 50, "{polled}");
    }

    /// A livelock: the interrupts leave no time to serve frames.
    #[test]
    fn slow_trial_is_ended_early() {
        let usual = Duration::from_micros(200);
        let mut trials = ModeTrials::new();
        while trials.on_window(true, usual) {}
        assert!(!trials.is_overdue(|| usual));
        let limit = MAX_SLOWDOWN * TRIAL_WINDOWS * usual;
        assert!(trials.is_overdue(|| limit + usual));
        assert!(trials.on_window(false, limit + usual), "polls again");
        assert!(!trials.is_under_way() && !trials.is_overdue(|| limit + usual));
        assert!(!trials.confirm_interrupts(usual), "never found to be as fast");
    }

    #[test]
    fn interrupts_are_confirmed_until_they_get_slow() {
        let usual = Duration::from_micros(200);
        let mut trials = ModeTrials::new();
        assert!(!trials.confirm_interrupts(usual), "nothing was compared");
        while trials.on_window(true, usual) {}
        while trials.is_under_way() {
            assert!(!trials.on_window(false, usual));
        }
        assert!(trials.confirm_interrupts(MAX_SLOWDOWN * usual));
        assert!(!trials.confirm_interrupts(MAX_SLOWDOWN * usual + Duration::from_nanos(1)));
    }

    proptest! {
        /// With windows of any length trials end, and a fifth of the windows decides nothing wrong.
        #[test]
        fn noise_costs_little(seed in any::<u64>()) {
            let mut state = seed;
            let mut noise = move || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % 41
            };
            let polled = polled_windows(false, |polls| {
                Duration::from_micros(if polls { 160 } else { 100 } * (80 + noise()) / 100)
            });
            prop_assert!(polled < WINDOWS / 50, "{polled}");
        }
    }
}
