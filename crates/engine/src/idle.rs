//! The idle ladder: spin, pause, sleep.
//!
//! Right after work more work is likely, and a sleep costs two context
//! switches, so the engine looks again at once. The longer nothing comes, the
//! more it leaves the processor to others, until it sleeps on the port's
//! descriptor and costs nothing.

/// How long to stay on each step of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleConfig {
    /// Look again at once for so long after the last work.
    pub spin_ns: u64,
    /// Then look again after a short pause, until so long after the last work.
    pub pause_ns: u64,
}

impl Default for IdleConfig {
    fn default() -> Self {
        Self { spin_ns: 20_000, pause_ns: 50_000 }
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
}

impl Idle {
    /// A ladder whose last work was at `now_ns`.
    pub fn new(config: IdleConfig, now_ns: u64) -> Self {
        Self { config, last_work_ns: now_ns }
    }

    /// There was work: back to the first step.
    #[inline]
    pub fn on_work(&mut self, now_ns: u64) {
        self.last_work_ns = now_ns;
    }

    /// How to wait, when there was no work at `now_ns`.
    #[inline]
    pub fn step(&self, now_ns: u64) -> Step {
        let idle_ns = now_ns.saturating_sub(self.last_work_ns);
        if idle_ns < self.config.spin_ns {
            Step::Spin
        } else if idle_ns < self.config.pause_ns {
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
        let mut idle = Idle::new(IdleConfig { spin_ns: 10, pause_ns: 20 }, 100);
        assert_eq!(idle.step(105), Step::Spin);
        assert_eq!(idle.step(110), Step::Pause);
        assert_eq!(idle.step(120), Step::Sleep);
        idle.on_work(120);
        assert_eq!(idle.step(125), Step::Spin);
        assert_eq!(idle.step(90), Step::Spin, "a clock that stepped back is no reason to sleep");
    }
}
