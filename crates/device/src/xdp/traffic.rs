//! Choice between polling and interrupts by the traffic of the device.
//!
//! A poll moves frames off the NIC in bulk, on the polling core. But a NIC that waits for
//! polls delays a lone frame as well: for the rest of a poll's time, or for the flush timeout
//! while the owner sleeps. Light traffic therefore uses interrupts, as without polling. Heavy
//! traffic is polled if that serves more of it, which trials show.

use std::time::{Duration, Instant};

use super::mode_trials::{Measurement, ModeTrials};

/// Number of frames in one measurement window.
const WINDOW_FRAMES: u32 = 64;
/// Maximum window time of heavy traffic: 90,000 frames per second. Polls may serve more of it.
const MAX_HEAVY_WINDOW: Duration = Duration::from_micros(711);
/// Minimum window time of light traffic: 50,000 frames per second.
const MIN_LIGHT_WINDOW: Duration = Duration::from_micros(1_280);
/// Maximum polls with frames per window for bursty traffic: many senders, or few senders with
/// much to send.
const MAX_BURST_POLLS: u32 = 10;

/// Minimum polls with frames per window of traffic whose frames come one by one. It is light up to
/// [`MAX_HEAVY_WINDOW`].
const MIN_LONE_POLLS: u32 = 43;

/// Maximum frames for each poll that finds some, of traffic for which interrupts are tried. Larger
/// bursts wait for the processor, or come from so many senders that polls serve them best.
const MAX_TRIAL_BURST: u32 = 16;

/// Maximum empty polls per window of a device that has no time to wait: frames are late
/// already, and each interrupt takes more time.
const MAX_EMPTY_POLLS: u32 = 16;

/// Traffic measured over the current window.
#[derive(Debug)]
pub(super) struct TrafficMonitor {
    polls: bool,
    trials: ModeTrials,
    /// Admission limits are in force: most frames may be dropped before they are counted here.
    limiting: bool,
    frames: u32,
    /// Polls that found frames.
    productive_polls: u32,
    /// Polls that found no frame.
    empty_polls: u32,
    window_start: Instant,
}

impl TrafficMonitor {
    /// Initial state: polls until the first window is measured.
    pub(super) fn new() -> Self {
        Self {
            polls: true,
            trials: ModeTrials::new(),
            limiting: false,
            frames: 0,
            productive_polls: 0,
            empty_polls: 0,
            window_start: Instant::now(),
        }
    }

    /// True if the driver is to be polled.
    pub(super) fn prefers_polls(&self) -> bool {
        self.polls
    }

    /// Prefers polls, and starts a new window.
    pub(super) fn prefer_polls(&mut self) {
        self.trials.abandon();
        self.begin_window(Instant::now(), true);
    }

    /// Sets whether admission limits are in force. Under limits polls are preferred, however few
    /// frames are admitted.
    pub(super) fn set_limiting(&mut self, limiting: bool) {
        *self = Self { limiting, ..Self::new() };
    }

    /// Records a poll that found `frames` frames. Returns true if the preferred mode changed.
    #[inline]
    pub(super) fn on_poll(&mut self, frames: usize) -> bool {
        if frames == 0 {
            self.empty_polls = self.empty_polls.saturating_add(1);
            return false;
        }
        if self.limiting {
            return false;
        }
        self.frames += frames as u32;
        self.productive_polls += 1;
        let is_whole = self.frames >= WINDOW_FRAMES;
        if !is_whole && !self.trials.is_over(|| self.window_start.elapsed()) {
            return false;
        }
        let now = Instant::now();
        let polls = self.mode_after(now);
        self.begin_window(now, polls)
    }

    /// True if the driver is to be polled after the current window.
    fn mode_after(&mut self, now: Instant) -> bool {
        let window = Measurement { frames: self.frames, time: now - self.window_start };
        if self.trials.is_under_way() {
            return self.trials.on_window(self.polls, window);
        }
        if self.is_light(self.projected_window(now)) {
            self.trials.abandon();
            return false;
        }
        let is_busy = self.empty_polls <= MAX_EMPTY_POLLS;
        let is_bursty = self.frames > MAX_TRIAL_BURST * self.productive_polls;
        if self.polls && is_bursty {
            self.trials.abandon();
            return true;
        }
        if !self.polls && self.trials.is_overloaded(window, is_busy, is_bursty) {
            self.trials.require_polls();
            return true;
        }
        self.trials.on_window(self.polls, window)
    }

    /// True if the traffic of this window is so light that interrupts serve it best.
    fn is_light(&self, window: Duration) -> bool {
        if self.polls {
            let come_alone = self.productive_polls >= MIN_LONE_POLLS;
            return !self.trials.requires_polls()
                && window >= if come_alone { MAX_HEAVY_WINDOW } else { MIN_LIGHT_WINDOW };
        }
        window >= MAX_HEAVY_WINDOW
            && self.productive_polls > MAX_BURST_POLLS
            && (window >= MIN_LIGHT_WINDOW || self.empty_polls > MAX_EMPTY_POLLS)
    }

    /// Records that the device is about to sleep. Returns true if the preferred mode changed.
    pub(super) fn on_sleep(&mut self) -> bool {
        let now = Instant::now();
        if self.limiting
            || now.duration_since(self.window_start) < MIN_LIGHT_WINDOW
            || self.projected_window(now) < MIN_LIGHT_WINDOW
            || self.trials.is_under_way() && !self.trials.is_over(|| now - self.window_start)
        {
            return false;
        }
        self.trials.abandon();
        self.begin_window(now, false)
    }

    /// Duration of a whole window at the rate of the current window.
    fn projected_window(&self, now: Instant) -> Duration {
        now.duration_since(self.window_start) * WINDOW_FRAMES / self.frames.max(1)
    }

    /// Starts a new window, as the mode of this one is not yet in force.
    pub(super) fn restart_window(&mut self) {
        self.begin_window(Instant::now(), self.polls);
    }

    /// Starts a new window. Returns true if the preferred mode changed.
    fn begin_window(&mut self, now: Instant, polls: bool) -> bool {
        (self.frames, self.productive_polls, self.empty_polls) = (0, 0, 0);
        self.window_start = now;
        std::mem::replace(&mut self.polls, polls) != polls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bursts of frames, with empty polls before each.
    #[derive(Clone, Copy)]
    struct Load {
        burst: usize,
        empty_polls: usize,
        /// Frames per second with interrupts, and with polls: peers that wait for replies send more
        /// in the mode that serves them sooner.
        pps: [u32; 2],
    }

    impl Load {
        /// Bursts of `burst` frames at `pps` frames per second in both modes, with one empty poll before
        /// each.
        const fn of(burst: usize, pps: u32) -> Self {
            Self { burst, empty_polls: 1, pps: [pps; 2] }
        }
    }

    /// Offers a load until `frames` frames have come. Returns the number of frames in polled windows.
    fn offer_frames(traffic: &mut TrafficMonitor, load: Load, frames: usize) -> usize {
        let mut polled = 0;
        for _ in 0..frames / load.burst {
            let pps = load.pps[usize::from(traffic.prefers_polls())];
            let gap = Duration::from_secs(1) * load.burst as u32 / pps;
            polled += load.burst * usize::from(traffic.prefers_polls());
            traffic.window_start = traffic.window_start.checked_sub(gap).unwrap();
            (0..load.empty_polls).for_each(|_| assert!(!traffic.on_poll(0)));
            traffic.on_poll(load.burst);
        }
        polled
    }

    /// Offers a load, and returns true if the driver is polled in the end.
    fn is_polled(traffic: &mut TrafficMonitor, load: Load) -> bool {
        let frames = 10_000;
        let polled = offer_frames(traffic, load, frames);
        assert!(polled < frames / 2 || traffic.prefers_polls(), "{polled} of {frames}");
        traffic.prefers_polls()
    }

    #[test]
    fn light_traffic_uses_interrupts() {
        let mut traffic = TrafficMonitor::new();
        assert!(traffic.prefers_polls());
        for pps in [40_000, 20_000, 70_000] {
            assert!(!is_polled(&mut traffic, Load::of(2, pps)), "{pps}");
        }
        // Never tried: a lone frame would wait for the next poll.
        assert_eq!(offer_frames(&mut traffic, Load::of(2, 70_000), 10_000), 0);
    }

    #[test]
    fn heavy_traffic_uses_the_mode_that_serves_more_of_it() {
        for (burst, slow, fast) in
            [(1, 95_000, 140_000), (2, 130_000, 210_000), (8, 50_000, 90_000)]
        {
            for empty_polls in [0, 1, 5] {
                let mut traffic = TrafficMonitor::new();
                // The load changes twice; the first seconds of each are not counted.
                for (pps, is_polled) in
                    [([slow, fast], true), ([fast, slow], false), ([slow, fast], true)]
                {
                    let load = Load { burst, empty_polls, pps };
                    offer_frames(&mut traffic, load, 10 * fast as usize);
                    let frames = 5 * fast as usize;
                    let polled = offer_frames(&mut traffic, load, frames);
                    let percent = 100 * if is_polled { polled } else { frames - polled } / frames;
                    assert!(percent >= 98, "{burst} {empty_polls} {pps:?}: {percent} %");
                }
            }
        }
    }

    /// A flood, and many peers: their frames wait in the device.
    #[test]
    fn large_bursts_are_polled_without_trials() {
        let mut traffic = TrafficMonitor::new();
        let load = Load { burst: 32, empty_polls: 0, pps: [300_000, 300_000] };
        assert_eq!(offer_frames(&mut traffic, load, 1_000_000), 1_000_000);
        // The same after interrupts were found to serve enough.
        offer_frames(&mut traffic, Load::of(2, 300_000), 3_000_000);
        assert!(!traffic.prefers_polls());
        offer_frames(&mut traffic, load, 256);
        assert_eq!(offer_frames(&mut traffic, load, 1_000_000), 1_000_000);
    }

    /// A lone peer sends the next request after each reply.
    #[test]
    fn fast_lone_peer_has_interrupts() {
        let mut traffic = TrafficMonitor::new();
        let load = Load { burst: 1, empty_polls: 20, pps: [150_000, 70_000] };
        let polled = offer_frames(&mut traffic, load, 3_000_000);
        assert!(polled < 30_000, "{polled}");
    }

    #[test]
    fn device_that_interrupts_keep_busy_is_polled_soon() {
        let mut traffic = TrafficMonitor::new();
        assert!(!is_polled(&mut traffic, Load::of(2, 20_000)));
        let livelock = Load { burst: 8, empty_polls: 0, pps: [60_000, 400_000] };
        offer_frames(&mut traffic, livelock, 256);
        assert!(traffic.prefers_polls());
        // The same after interrupts were found to serve enough.
        let enough = Load { burst: 4, empty_polls: 0, pps: [400_000, 400_000] };
        offer_frames(&mut traffic, enough, 100_000);
        assert!(!traffic.prefers_polls());
        offer_frames(&mut traffic, livelock, 256);
        assert!(traffic.prefers_polls());
    }

    /// The flood is dropped on the interface; only a few frames are admitted.
    #[test]
    fn few_admitted_frames_during_a_flood_are_polled() {
        let mut traffic = TrafficMonitor::new();
        traffic.set_limiting(true);
        assert!(is_polled(&mut traffic, Load::of(2, 20_000)));
        traffic.window_start -= 2 * MIN_LIGHT_WINDOW;
        assert!(!traffic.on_sleep() && traffic.prefers_polls());
        traffic.set_limiting(false);
        assert!(!is_polled(&mut traffic, Load::of(2, 20_000)));
    }

    #[test]
    fn sleep_after_heavy_traffic_switches_to_interrupts() {
        let mut traffic = TrafficMonitor::new();
        traffic.window_start -= MIN_LIGHT_WINDOW / 2;
        assert!(!traffic.on_sleep(), "a pause between two bursts");
        traffic.window_start -= MIN_LIGHT_WINDOW;
        assert!(traffic.on_sleep());
        assert!(!traffic.prefers_polls());
        traffic.window_start -= MIN_LIGHT_WINDOW;
        assert!(!traffic.on_sleep());
        traffic.prefer_polls();
        assert!(traffic.prefers_polls());
    }

    /// Frames that come before the mode is in force say nothing about it.
    #[test]
    fn restarted_window_counts_nothing_before() {
        let mut traffic = TrafficMonitor::new();
        for _ in 0..10_000 {
            traffic.window_start -= Duration::from_millis(1);
            traffic.restart_window();
            assert!(!traffic.on_poll(1));
        }
    }
}
