//! Whether so much comes that the port polls the device for it.
//!
//! A poll takes frames off the device on the port's core and in bulk, but a
//! device that waits for polls keeps a lone frame waiting as well: for the rest
//! of a poll's time, or for its time-out once the port sleeps. So while little
//! comes the device interrupts, as if nobody polled.

use std::time::{Duration, Instant};

/// Frames that are judged at once.
const WINDOW: u32 = 64;
/// Frames that come faster than 150,000 a second are many.
const MANY: Duration = Duration::from_micros(427);
/// Frames that come more slowly than 50,000 a second are few.
const FEW: Duration = Duration::from_micros(1_280);
/// So many looks for a window, or fewer, find whole bursts: there are many
/// senders, or few with much to send.
const BURSTS: u32 = 10;

/// So many looks in vain for a window, or fewer, are those of a port that has no time to
/// wait: what comes is late already, and each interrupt takes more of its time.
const VAIN: u32 = 16;

/// What came lately.
#[derive(Debug)]
pub(super) struct Traffic {
    heavy: bool,
    /// Most of what comes is refused before it is seen here.
    limiting: bool,
    frames: u32,
    /// Looks that found frames.
    looks: u32,
    /// Looks that found none.
    vain: u32,
    since: Instant,
}

impl Traffic {
    /// Heavy until it is known.
    pub(super) fn new() -> Self {
        Self { heavy: true, limiting: false, frames: 0, looks: 0, vain: 0, since: Instant::now() }
    }

    /// Whether so much comes that it is polled for.
    pub(super) fn is_heavy(&self) -> bool {
        self.heavy
    }

    /// From now on it is.
    pub(super) fn set_heavy(&mut self) {
        *self = Self { limiting: self.limiting, ..Self::new() };
    }

    /// Frames are refused from now on, or no more. While they are it is heavy,
    /// however few are let in.
    pub(super) fn set_limiting(&mut self, limiting: bool) {
        *self = Self { limiting, ..Self::new() };
    }

    /// A look found so many frames. Returns whether that changed anything.
    #[inline]
    pub(super) fn on_look(&mut self, frames: usize) -> bool {
        if frames == 0 {
            self.vain = self.vain.saturating_add(1);
            return false;
        }
        if self.limiting {
            return false;
        }
        self.frames += frames as u32;
        self.looks += 1;
        if self.frames < WINDOW {
            return false;
        }
        let now = Instant::now();
        let took = self.window_would_take(now);
        let heavy = if self.heavy {
            took < FEW
        } else {
            took < MANY || self.looks <= BURSTS || took < FEW && self.vain <= VAIN
        };
        self.begin(now, heavy)
    }

    /// The port is about to sleep. Returns whether that changed anything.
    pub(super) fn on_sleep(&mut self) -> bool {
        let now = Instant::now();
        if self.limiting
            || now.duration_since(self.since) < FEW
            || self.window_would_take(now) < FEW
        {
            return false;
        }
        self.begin(now, false)
    }

    /// How long a whole window takes at the rate of this one.
    fn window_would_take(&self, now: Instant) -> Duration {
        now.duration_since(self.since) * WINDOW / self.frames.max(1)
    }

    /// Begins a window. Returns whether something changed.
    fn begin(&mut self, now: Instant, heavy: bool) -> bool {
        let (frames, looks, vain) = (0, 0, 0);
        let was = std::mem::replace(self, Self { heavy, frames, looks, vain, since: now, ..*self });
        was.heavy != heavy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames in bursts, so many a second, for a tenth of a second, with a look in vain
    /// before each.
    fn pass(traffic: &mut Traffic, burst: usize, pps: u32) -> usize {
        pass_after(traffic, 1, burst, pps)
    }

    /// The same after so many looks in vain.
    fn pass_after(traffic: &mut Traffic, vain: usize, burst: usize, pps: u32) -> usize {
        let gap = Duration::from_secs(1) * burst as u32 / pps;
        let looks = pps as usize / 10 / burst;
        (0..looks)
            .filter(|_| {
                traffic.since = traffic.since.checked_sub(gap).unwrap();
                (0..vain).for_each(|_| assert!(!traffic.on_look(0)));
                traffic.on_look(burst)
            })
            .count()
    }

    #[test]
    fn few_frames_are_left_to_interrupts_and_many_are_polled_for() {
        let mut traffic = Traffic::new();
        assert!(traffic.is_heavy());
        assert_eq!(pass(&mut traffic, 2, 40_000), 1);
        assert!(!traffic.is_heavy());
        assert_eq!(pass(&mut traffic, 2, 100_000), 0, "neither few nor many");
        assert_eq!(pass(&mut traffic, 2, 300_000), 1);
        assert!(traffic.is_heavy());
        assert_eq!(pass(&mut traffic, 2, 100_000), 0);
        assert_eq!(pass(&mut traffic, 2, 20_000), 1);
    }

    #[test]
    fn bursts_are_polled_for_though_the_rate_is_low() {
        let mut traffic = Traffic::new();
        assert_eq!(pass(&mut traffic, 2, 20_000), 1);
        assert_eq!(pass(&mut traffic, 16, 100_000), 1);
        assert!(traffic.is_heavy());
    }

    #[test]
    fn a_port_that_never_waits_polls_though_the_rate_is_not_high() {
        let mut traffic = Traffic::new();
        assert_eq!(pass(&mut traffic, 2, 20_000), 1);
        assert_eq!(pass_after(&mut traffic, 0, 2, 40_000), 0, "few are few");
        assert_eq!(pass_after(&mut traffic, 0, 2, 100_000), 1);
        assert!(traffic.is_heavy());
    }

    /// The flood is dropped on the interface, and only a few are let in.
    #[test]
    fn few_that_are_let_in_of_many_are_no_light_traffic() {
        let mut traffic = Traffic::new();
        traffic.set_limiting(true);
        assert_eq!(pass(&mut traffic, 2, 20_000), 0);
        traffic.since -= 2 * FEW;
        assert!(!traffic.on_sleep() && traffic.is_heavy());
        traffic.set_limiting(false);
        assert_eq!(pass(&mut traffic, 2, 20_000), 1);
    }

    #[test]
    fn a_port_that_sleeps_after_much_came_is_soon_woken_at_once() {
        let mut traffic = Traffic::new();
        traffic.since -= FEW / 2;
        assert!(!traffic.on_sleep(), "a pause between two bursts");
        traffic.since -= FEW;
        assert!(traffic.on_sleep());
        assert!(!traffic.is_heavy());
        traffic.since -= FEW;
        assert!(!traffic.on_sleep());
        traffic.set_heavy();
        assert!(traffic.is_heavy());
    }
}
