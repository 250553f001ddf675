//! A device that works alone.
//!
//! While nearly all that comes is refused, the work is in the program on the
//! interface. It runs in softirqs then, by a timer of the device: whatever the
//! port's owner does meanwhile, the ring does not run over. The timer is on the
//! core that polled last, which would be the sender's after a pause: so the port
//! polls now and then.
//!
//! When more comes than softirqs can look at, they never end, and take the core
//! from the owner. Frames are lost in the ring then, whoever looks: so the port
//! looks itself, between two turns of its owner.
//!
//! Limits alone are no flood: a server that is just busy has them as well. While most
//! of what comes is let in, the port looks itself, as it does without limits.

use std::time::{Duration, Instant};

/// How often to look how it goes.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);
/// So many frames lost per second are more than softirqs can look at.
const OVERRUN_PPS: u128 = 300_000;
/// For so long: a hiccup is none.
const OVERRUN_AFTER: Duration = Duration::from_millis(20);
/// How long an overrun is believed to go on.
const OVERRUN: Duration = Duration::from_secs(1);
/// The same of a flood, of which most is refused.
const FLOOD: Duration = Duration::from_secs(1);

/// Who looks after a device while not everything is let in.
pub(super) struct Alone {
    /// More comes than softirqs can look at: the port looks itself.
    pub(super) overrun: bool,
    /// When it was last looked how it goes.
    pub(super) looked: Instant,
    lost: u64,
    /// Since when too many are lost, or since when it is an overrun.
    since: Option<Instant>,
    /// Most of what comes is refused.
    pub(super) refuses: bool,
    /// Frames that were let in and refused so far.
    counted: (u64, u64),
    /// When more were refused than let in.
    refused: Option<Instant>,
}

impl Alone {
    /// A device that has lost so many frames in its ring so far, and whose program has
    /// let in and refused so many.
    pub(super) fn new(lost: u64, counted: (u64, u64)) -> Self {
        let looked = Instant::now();
        Self { overrun: false, looked, lost, since: None, refuses: false, counted, refused: None }
    }

    /// Whether the device is left to itself.
    pub(super) fn is_left(&self) -> bool {
        self.refuses && !self.overrun
    }

    /// So many frames were let in and refused so far. Returns whether someone else looks
    /// after the device from now on.
    pub(super) fn on_counts(&mut self, counted: (u64, u64)) -> bool {
        let before = std::mem::replace(&mut self.counted, counted);
        let admitted = counted.0.saturating_sub(before.0);
        if counted.1.saturating_sub(before.1) > admitted {
            self.refused = Some(Instant::now());
        }
        let was = self.is_left();
        self.refuses = self.refused.is_some_and(|refused| refused.elapsed() < FLOOD);
        was != self.is_left()
    }

    /// The device has lost so many frames so far. Returns whether someone else
    /// looks after it from now on.
    pub(super) fn on_look(&mut self, lost: u64) -> bool {
        let now = Instant::now();
        let elapsed = now.duration_since(std::mem::replace(&mut self.looked, now));
        let lost_now = lost.saturating_sub(std::mem::replace(&mut self.lost, lost));
        let too_many = OVERRUN_PPS * elapsed.as_nanos() / 1_000_000_000;
        let watched = self.overrun || u128::from(lost_now) > too_many;
        let since = self.since.filter(|_| watched).unwrap_or(now);
        self.since = watched.then_some(since);
        let age = now.duration_since(since);
        let was = self.overrun;
        self.overrun = if was { age < OVERRUN } else { age >= OVERRUN_AFTER };
        if was != self.overrun {
            self.since = self.overrun.then_some(now);
        }
        was != self.overrun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device watched for so many looks that loses so many frames at each.
    fn changes(alone: &mut Alone, looks: u32, lost: u64) -> Vec<(u32, bool)> {
        let mut changes = Vec::new();
        for look in 1..=looks {
            alone.looked -= LOOK_EVERY;
            alone.since = alone.since.map(|since| since - LOOK_EVERY);
            if alone.on_look(alone.lost + lost) {
                changes.push((look, alone.overrun));
            }
        }
        changes
    }

    #[test]
    fn an_overrun_lasts_and_a_hiccup_does_not_make_one() {
        let mut alone = Alone::new(7, (0, 0));
        assert_eq!(changes(&mut alone, 9, 2_000), [], "a hiccup");
        assert_eq!(changes(&mut alone, 1, 10), []);
        assert_eq!(changes(&mut alone, 9, 2_000), [], "another");
        assert_eq!(changes(&mut alone, 1, 10), []);
        let [(look, true)] = changes(&mut alone, 20, 2_000)[..] else { panic!("no overrun") };
        assert!((10..=12).contains(&look), "{look}");
        let [(look, false)] = changes(&mut alone, 500, 0)[..] else { panic!("for ever") };
        assert!((480..=500).contains(&look), "{look}");
    }
    #[test]
    fn a_device_is_left_alone_while_most_is_refused() {
        let mut alone = Alone::new(0, (100, 1_000));
        assert!(!alone.is_left());
        assert!(!alone.on_counts((200, 1_050)), "most is let in");
        assert!(alone.on_counts((210, 2_000)) && alone.is_left());
        assert!(!alone.on_counts((900, 2_000)), "a pause");
        alone.overrun = true;
        assert!(!alone.is_left());
        alone.overrun = false;
        alone.refused = alone.refused.map(|refused| refused - FLOOD);
        assert!(alone.on_counts((1_900, 2_100)) && !alone.is_left());
    }
}
