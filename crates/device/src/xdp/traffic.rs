//! Choice between polling and interrupts by the traffic of the device.
//!
//! A poll moves frames off the NIC in bulk, on the polling core. But a NIC that waits for
//! polls delays a lone frame as well: for the rest of a poll's time, or for the flush timeout
//! while the owner sleeps. Light traffic therefore uses interrupts, as without polling.

use std::time::{Duration, Instant};

/// Number of frames in one measurement window.
const WINDOW_FRAMES: u32 = 64;
/// Maximum window time of heavy traffic: 90,000 frames per second. More than a peer has that sends
/// the next request after each reply; with many in flight, polls serve more of them.
const MAX_HEAVY_WINDOW: Duration = Duration::from_micros(711);
/// Minimum window time of light traffic: 50,000 frames per second.
const MIN_LIGHT_WINDOW: Duration = Duration::from_micros(1_280);
/// Maximum polls with frames per window for bursty traffic: many senders, or few senders with
/// much to send.
const MAX_BURST_POLLS: u32 = 10;

/// Minimum polls with frames per window of traffic whose frames come one by one. It is light up to
/// [`MAX_HEAVY_WINDOW`].
const MIN_LONE_POLLS: u32 = 43;

/// Maximum empty polls per window of a device that has no time to wait: frames are late
/// already, and each interrupt takes more time.
const MAX_EMPTY_POLLS: u32 = 16;

/// Traffic measured over the current window.
#[derive(Debug)]
pub(super) struct TrafficMonitor {
    heavy: bool,
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
    /// Initial state: heavy until the first window is measured.
    pub(super) fn new() -> Self {
        Self {
            heavy: true,
            limiting: false,
            frames: 0,
            productive_polls: 0,
            empty_polls: 0,
            window_start: Instant::now(),
        }
    }

    /// True if traffic is heavy enough to poll.
    pub(super) fn is_heavy(&self) -> bool {
        self.heavy
    }

    /// Treats the traffic as heavy and starts a new window.
    pub(super) fn set_heavy(&mut self) {
        *self = Self { limiting: self.limiting, ..Self::new() };
    }

    /// Sets whether admission limits are in force. Under limits the traffic counts as heavy,
    /// however few frames are admitted.
    pub(super) fn set_limiting(&mut self, limiting: bool) {
        *self = Self { limiting, ..Self::new() };
    }

    /// Records a poll that found `frames` frames. Returns true if `is_heavy` changed.
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
        if self.frames < WINDOW_FRAMES {
            return false;
        }
        let now = Instant::now();
        let window = self.projected_window(now);
        let heavy = if self.heavy {
            let come_alone = self.productive_polls >= MIN_LONE_POLLS;
            window < if come_alone { MAX_HEAVY_WINDOW } else { MIN_LIGHT_WINDOW }
        } else {
            window < MAX_HEAVY_WINDOW
                || self.productive_polls <= MAX_BURST_POLLS
                || window < MIN_LIGHT_WINDOW && self.empty_polls <= MAX_EMPTY_POLLS
        };
        self.begin_window(now, heavy)
    }

    /// Records that the device is about to sleep. Returns true if `is_heavy` changed.
    pub(super) fn on_sleep(&mut self) -> bool {
        let now = Instant::now();
        if self.limiting
            || now.duration_since(self.window_start) < MIN_LIGHT_WINDOW
            || self.projected_window(now) < MIN_LIGHT_WINDOW
        {
            return false;
        }
        self.begin_window(now, false)
    }

    /// Duration of a whole window at the rate of the current window.
    fn projected_window(&self, now: Instant) -> Duration {
        now.duration_since(self.window_start) * WINDOW_FRAMES / self.frames.max(1)
    }

    /// Starts a new window. Returns true if `is_heavy` changed.
    fn begin_window(&mut self, now: Instant, heavy: bool) -> bool {
        let (frames, productive_polls, empty_polls) = (0, 0, 0);
        let previous = std::mem::replace(
            self,
            Self { heavy, frames, productive_polls, empty_polls, window_start: now, ..*self },
        );
        previous.heavy != heavy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offers bursts of `burst` frames at `pps` frames per second for 100 ms, with one empty poll
    /// before each burst. Returns the number of changes.
    fn offer(traffic: &mut TrafficMonitor, burst: usize, pps: u32) -> usize {
        offer_after(traffic, 1, burst, pps)
    }

    /// Offers bursts like `offer`, with `empty_polls` empty polls before each burst.
    fn offer_after(
        traffic: &mut TrafficMonitor,
        empty_polls: usize,
        burst: usize,
        pps: u32,
    ) -> usize {
        let gap = Duration::from_secs(1) * burst as u32 / pps;
        let polls = pps as usize / 10 / burst;
        (0..polls)
            .filter(|_| {
                traffic.window_start = traffic.window_start.checked_sub(gap).unwrap();
                (0..empty_polls).for_each(|_| assert!(!traffic.on_poll(0)));
                traffic.on_poll(burst)
            })
            .count()
    }

    #[test]
    fn light_traffic_uses_interrupts_and_heavy_traffic_is_polled() {
        let mut traffic = TrafficMonitor::new();
        assert!(traffic.is_heavy());
        assert_eq!(offer(&mut traffic, 2, 40_000), 1);
        assert!(!traffic.is_heavy());
        assert_eq!(offer(&mut traffic, 2, 70_000), 0, "neither light nor heavy");
        assert_eq!(offer(&mut traffic, 2, 300_000), 1);
        assert!(traffic.is_heavy());
        assert_eq!(offer(&mut traffic, 2, 70_000), 0);
        assert_eq!(offer(&mut traffic, 2, 20_000), 1);
    }

    /// A peer sends the next request after each reply: an interrupt serves it sooner than a poll.
    #[test]
    fn frames_that_come_one_by_one_are_light_traffic() {
        let mut traffic = TrafficMonitor::new();
        assert_eq!(offer(&mut traffic, 1, 70_000), 1);
        assert!(!traffic.is_heavy());
        assert_eq!(offer(&mut traffic, 1, 100_000), 1, "peers with many requests");
        assert!(traffic.is_heavy());
    }

    #[test]
    fn bursts_are_polled_at_a_low_rate() {
        let mut traffic = TrafficMonitor::new();
        assert_eq!(offer(&mut traffic, 2, 20_000), 1);
        assert_eq!(offer(&mut traffic, 16, 100_000), 1);
        assert!(traffic.is_heavy());
    }

    #[test]
    fn busy_device_polls_at_a_moderate_rate() {
        let mut traffic = TrafficMonitor::new();
        assert_eq!(offer(&mut traffic, 2, 20_000), 1);
        assert_eq!(offer_after(&mut traffic, 0, 2, 40_000), 0, "still light traffic");
        assert_eq!(offer_after(&mut traffic, 0, 2, 80_000), 1);
        assert!(traffic.is_heavy());
    }

    /// The flood is dropped on the interface; only a few frames are admitted.
    #[test]
    fn few_admitted_frames_during_a_flood_are_heavy_traffic() {
        let mut traffic = TrafficMonitor::new();
        traffic.set_limiting(true);
        assert_eq!(offer(&mut traffic, 2, 20_000), 0);
        traffic.window_start -= 2 * MIN_LIGHT_WINDOW;
        assert!(!traffic.on_sleep() && traffic.is_heavy());
        traffic.set_limiting(false);
        assert_eq!(offer(&mut traffic, 2, 20_000), 1);
    }

    #[test]
    fn sleep_after_heavy_traffic_switches_to_interrupts() {
        let mut traffic = TrafficMonitor::new();
        traffic.window_start -= MIN_LIGHT_WINDOW / 2;
        assert!(!traffic.on_sleep(), "a pause between two bursts");
        traffic.window_start -= MIN_LIGHT_WINDOW;
        assert!(traffic.on_sleep());
        assert!(!traffic.is_heavy());
        traffic.window_start -= MIN_LIGHT_WINDOW;
        assert!(!traffic.on_sleep());
        traffic.set_heavy();
        assert!(traffic.is_heavy());
    }
}
