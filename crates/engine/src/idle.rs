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
}

impl Default for IdleConfig {
    fn default() -> Self {
        Self { spin_ns: 20_000, pause_ns: 50_000, return_ns: 200_000 }
    }
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
    /// How long after work not to sleep yet.
    awake_ns: u64,
}

impl Idle {
    /// A ladder whose last work was at `now_ns`.
    pub fn new(config: IdleConfig, now_ns: u64) -> Self {
        Self { config, last_work_ns: now_ns, awake_ns: config.pause_ns }
    }

    /// There was work: back to the first step.
    #[inline]
    pub fn on_work(&mut self, now_ns: u64) {
        let IdleConfig { pause_ns, return_ns, .. } = self.config;
        let away_ns = now_ns.saturating_sub(std::mem::replace(&mut self.last_work_ns, now_ns));
        self.awake_ns = if away_ns > return_ns {
            // It may have been held up once.
            self.awake_ns / 2
        } else {
            // At once more, and slowly less.
            (2 * away_ns).min(return_ns).max(self.awake_ns - self.awake_ns / 64)
        }
        .max(pause_ns);
    }

    /// How to wait, when there was no work at `now_ns`.
    #[inline]
    pub fn step(&self, now_ns: u64) -> Step {
        let idle_ns = now_ns.saturating_sub(self.last_work_ns);
        if idle_ns < self.config.spin_ns {
            Step::Spin
        } else if idle_ns < self.awake_ns {
            Step::Pause
        } else {
            Step::Sleep
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_climbs_down_with_time_and_back_with_work() {
        let mut idle = Idle::new(IdleConfig { spin_ns: 10, pause_ns: 20, return_ns: 0 }, 100);
        assert_eq!(idle.step(105), Step::Spin);
        assert_eq!(idle.step(110), Step::Pause);
        assert_eq!(idle.step(120), Step::Sleep);
        idle.on_work(120);
        assert_eq!(idle.step(125), Step::Spin);
        assert_eq!(idle.step(90), Step::Spin, "a clock that stepped back is no reason to sleep");
    }
    /// How long it stays awake after work at `now_ns`.
    fn awake_ns(idle: &Idle, now_ns: u64) -> u64 {
        (0..1_000).find(|&ns| idle.step(now_ns + ns) == Step::Sleep).unwrap()
    }

    #[test]
    fn it_stays_awake_for_those_who_come_back_soon() {
        let mut idle = Idle::new(IdleConfig { spin_ns: 10, pause_ns: 20, return_ns: 100 }, 0);
        idle.on_work(30);
        assert_eq!(awake_ns(&idle, 30), 60, "twice as long as it took");
        idle.on_work(130);
        assert_eq!(awake_ns(&idle, 130), 100, "and no longer than is allowed");
        idle.on_work(131);
        assert!(awake_ns(&idle, 131) > 90, "one quick return says little");
        let mut now_ns = 131;
        (0..1_000).for_each(|_| {
            now_ns += 1;
            idle.on_work(now_ns);
        });
        assert!(awake_ns(&idle, now_ns) < 70, "many say more");
        for _ in 0..2 {
            now_ns += 101;
            idle.on_work(now_ns);
        }
        assert_eq!(awake_ns(&idle, now_ns), 20, "it does not wait for the rare");
    }
}
