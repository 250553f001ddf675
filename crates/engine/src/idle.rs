//! The idle ladder: spin, pause, sleep.
//!
//! Right after work more work is likely, and a sleep costs two context
//! switches, so the engine looks again at once. The longer nothing comes, the
//! more it leaves the processor to others, until it sleeps on the port's
//! descriptor and costs nothing.
//!
//! A peer that asks, waits for the answer and asks again comes back after much
//! the same time. While that is not long, the engine stays awake for it: else
//! each of its requests would pay for a sleep and a waking.
//!
//! A flood has gaps. Whoever sleeps in one leaves its end to the kernel's
//! softirqs, which go on for as long as the flood does and have the processor to
//! themselves for some milliseconds. So the engine stays awake the longer, the
//! longer it was busy.
//!
//! All that is for a processor that has nothing else to do. To those who want
//! it, a thread that looks again and again is one that works: the scheduler
//! gives it as much as them. So the engine sleeps soon where a pause was used by
//! others.

use std::time::{Duration, Instant};

/// How long to stay on each step of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleConfig {
    /// Look again at once for so long after the last work.
    pub spin_ns: u64,
    /// Then look again after a short pause, until so long after the last work.
    pub pause_ns: u64,
    /// The same while work came again within this time: twice as long as it
    /// took, and no longer than this. Work that comes more rarely costs a sleep
    /// each time, and no more than `pause_ns` of the processor.
    pub return_ns: u64,
    /// The same after a busy time: a quarter of that, and no longer than this.
    pub linger_ns: u64,
}

impl Default for IdleConfig {
    fn default() -> Self {
        Self { spin_ns: 20_000, pause_ns: 50_000, return_ns: 200_000, linger_ns: 5_000_000 }
    }
}

/// A pause longer than this was somebody else's turn.
const CROWDED: Duration = Duration::from_micros(20);

/// About a microsecond, unless others want the processor: the kernel's receive
/// work may be among them. Returns whether they did.
pub fn pause() -> bool {
    let began = Instant::now();
    std::thread::yield_now();
    began.elapsed() > CROWDED
}

/// How to wait for the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Look again at once.
    Spin,
    /// Look again after a pause of about a microsecond.
    Pause,
    /// Sleep until a descriptor or a timer wakes the engine.
    Sleep,
}

/// Where on the ladder an engine stands.
#[derive(Clone, Debug)]
pub struct Idle {
    config: IdleConfig,
    last_work_ns: u64,
    /// When the first work came after the last sleep.
    busy_since_ns: u64,
    /// How long after work to stay awake for those who come back.
    awake_ns: u64,
    /// What it has done since the last work.
    waited: Option<Step>,
}

impl Idle {
    /// A ladder whose last work was at `now_ns`.
    pub fn new(config: IdleConfig, now_ns: u64) -> Self {
        let awake_ns = config.pause_ns;
        Self { config, last_work_ns: now_ns, busy_since_ns: now_ns, awake_ns, waited: None }
    }

    /// There was work: back to the first step.
    #[inline]
    pub fn on_work(&mut self, now_ns: u64) {
        if let Some(waited) = self.waited.take() {
            self.on_return(now_ns, waited);
        }
        self.last_work_ns = now_ns;
    }

    /// Others wanted the processor while the engine paused: it waits no longer
    /// than `pause_ns` from the last work on, until it was busy for long again.
    pub fn on_crowded(&mut self) {
        self.busy_since_ns = self.last_work_ns;
        self.awake_ns = self.config.pause_ns;
    }

    /// There was none for a while.
    fn on_return(&mut self, now_ns: u64, waited: Step) {
        let IdleConfig { pause_ns, return_ns, .. } = self.config;
        let away_ns = now_ns.saturating_sub(self.last_work_ns);
        self.awake_ns = if away_ns > return_ns {
            // It may have been held up once.
            self.awake_ns / 2
        } else {
            // At once more, and slowly less.
            (2 * away_ns).min(return_ns).max(self.awake_ns - self.awake_ns / 64)
        }
        .max(pause_ns);
        if waited == Step::Sleep {
            self.busy_since_ns = now_ns;
        }
    }

    /// How to wait, when there was no work at `now_ns`.
    #[inline]
    pub fn step(&mut self, now_ns: u64) -> Step {
        let idle_ns = now_ns.saturating_sub(self.last_work_ns);
        let busy_ns = self.last_work_ns.saturating_sub(self.busy_since_ns);
        let awake_ns = (busy_ns / 4).min(self.config.linger_ns).max(self.awake_ns);
        let step = if idle_ns < self.config.spin_ns {
            Step::Spin
        } else if idle_ns < awake_ns {
            Step::Pause
        } else {
            Step::Sleep
        };
        self.waited = Some(step);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: IdleConfig = IdleConfig { spin_ns: 10, pause_ns: 20, return_ns: 0, linger_ns: 0 };

    #[test]
    fn it_climbs_down_with_time_and_back_with_work() {
        let mut idle = Idle::new(NO, 100);
        assert_eq!(idle.step(105), Step::Spin);
        assert_eq!(idle.step(110), Step::Pause);
        assert_eq!(idle.step(120), Step::Sleep);
        idle.on_work(120);
        assert_eq!(idle.step(125), Step::Spin);
        assert_eq!(idle.step(90), Step::Spin, "a clock that stepped back is no reason to sleep");
    }

    /// How long it stays awake after work at `now_ns`.
    fn awake_ns(idle: &Idle, now_ns: u64) -> u64 {
        let mut idle = idle.clone();
        (0..1_000).find(|&ns| idle.step(now_ns + ns) == Step::Sleep).unwrap()
    }

    /// Work comes at `now_ns`, after a look at `now_ns - 1`.
    fn come_back(idle: &mut Idle, now_ns: u64) {
        idle.step(now_ns - 1);
        idle.on_work(now_ns);
    }

    #[test]
    fn it_stays_awake_for_those_who_come_back_soon() {
        let mut idle = Idle::new(IdleConfig { return_ns: 100, ..NO }, 0);
        come_back(&mut idle, 30);
        assert_eq!(awake_ns(&idle, 30), 60, "twice as long as it took");
        come_back(&mut idle, 130);
        assert_eq!(awake_ns(&idle, 130), 100, "and no longer than is allowed");
        come_back(&mut idle, 131);
        assert!(awake_ns(&idle, 131) > 90, "one quick return says little");
        let mut now_ns = 131;
        (0..1_000).for_each(|_| {
            now_ns += 1;
            come_back(&mut idle, now_ns);
        });
        assert!(awake_ns(&idle, now_ns) < 70, "many say more");
        for _ in 0..2 {
            now_ns += 101;
            come_back(&mut idle, now_ns);
        }
        assert_eq!(awake_ns(&idle, now_ns), 20, "it does not wait for the rare");
    }

    #[test]
    fn the_longer_it_was_busy_the_longer_it_stays_awake() {
        let mut idle = Idle::new(IdleConfig { linger_ns: 100, ..NO }, 0);
        let mut awake_after = |work: std::ops::Range<u64>| {
            let end_ns = work.end;
            work.for_each(|now_ns| idle.on_work(now_ns));
            (0..).find(|ns| idle.step(end_ns - 1 + ns) == Step::Sleep)
        };
        assert_eq!(awake_after(0..1), Some(20));
        assert_eq!(awake_after(50..251), Some(50));
        assert_eq!(awake_after(400..402), Some(20), "a sleep ends a busy time");
        assert_eq!(awake_after(500..1501), Some(100));
    }

    #[test]
    fn it_leaves_the_processor_to_others_who_want_it() {
        let config = IdleConfig { linger_ns: 100, return_ns: 100, ..NO };
        let mut idle = Idle::new(config, 0);
        (0..1_000).for_each(|now_ns| idle.on_work(now_ns));
        come_back(&mut idle, 1_050);
        assert_eq!(awake_ns(&idle, 1_050), 100);
        idle.on_crowded();
        assert_eq!(awake_ns(&idle, 1_050), 20);
        (1_050..2_050).for_each(|now_ns| idle.on_work(now_ns));
        assert_eq!(awake_ns(&idle, 2_049), 100, "it was busy again");
    }
}
