//! Idle governor: busy-poll, pause, sleep.
//!
//! Right after work, more work is likely, and a sleep costs two context switches. So the engine
//! busy-polls first. The longer it finds no work, the more it yields the processor, until it
//! sleeps on the descriptor of the device and costs nothing.
//!
//! A request-response peer sends its next request about one fixed gap after the response. While
//! that gap is short, the engine stays awake for it; otherwise each request would pay for a sleep
//! and a wake-up.
//!
//! A flood has gaps. An engine that sleeps in such a gap leaves the rest of the flood to the
//! kernel's softirqs. They run as long as the flood and keep the processor to themselves for
//! some milliseconds. So the longer the engine was busy, the longer it stays awake.
//!
//! All of this is for a processor without other work. A busy-polling thread counts as a working
//! thread, and the scheduler gives it the same share as the others. So the engine sleeps soon if
//! another thread used a pause.
//!
//! Beside a CPU-bound thread a pause costs whole time slices: a thread that yields stays runnable,
//! so no wake-up preempts the other thread. Only a thread that sleeps is woken. After a pause that
//! lost a time slice the engine therefore sleeps at once for a while, before it tries a pause
//! again.

use std::time::{Duration, Instant};

/// Times of the idle steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IdleConfig {
    /// Busy-poll until this long after the last work, in nanoseconds.
    pub spin_ns: u64,
    /// Then poll between short pauses until this long after the last work, in nanoseconds.
    pub pause_ns: u64,
    /// Upper bound of the pause time that adapts to recurring work, in nanoseconds.
    ///
    /// The pause time grows to twice the last gap between work, up to this bound. A longer gap
    /// costs one sleep and at most `pause_ns` of processor time.
    pub max_gap_ns: u64,
    /// Upper bound of the pause time after a busy period, in nanoseconds. It is a quarter of that
    /// period, up to this bound.
    pub max_linger_ns: u64,
}

impl Default for IdleConfig {
    fn default() -> Self {
        // Longer gaps are slept through: to busy-poll them takes the whole processor.
        Self { spin_ns: 5_000, pause_ns: 15_000, max_gap_ns: 30_000, max_linger_ns: 5_000_000 }
    }
}

impl IdleConfig {
    /// Sets the time of busy-polling after the last work, in nanoseconds.
    pub fn spin_ns(self, spin_ns: u64) -> Self {
        Self { spin_ns, ..self }
    }

    /// Sets the time of polling between short pauses, in nanoseconds after the last work.
    pub fn pause_ns(self, pause_ns: u64) -> Self {
        Self { pause_ns, ..self }
    }

    /// Sets the upper bound of the pause time that adapts to recurring work, in nanoseconds.
    pub fn max_gap_ns(self, max_gap_ns: u64) -> Self {
        Self { max_gap_ns, ..self }
    }

    /// Sets the upper bound of the pause time after a busy period, in nanoseconds.
    pub fn max_linger_ns(self, max_linger_ns: u64) -> Self {
        Self { max_linger_ns, ..self }
    }
}

/// Pauses longer than this mean that another thread ran.
const CONTENDED_PAUSE: Duration = Duration::from_micros(20);

/// Pauses from this length on mean that a CPU-bound thread ran: no time slice is shorter than a
/// tick of the slowest clocks, and interrupt work and requests of applications are.
const CPU_BOUND_PAUSE: Duration = Duration::from_micros(700);

/// Time without pauses after the first pause beside a CPU-bound thread, in nanoseconds. Doubles
/// with each further one.
const MIN_SLEEP_ONLY_NS: u64 = 100_000_000;
/// Upper bound of that time, in nanoseconds.
const MAX_SLEEP_ONLY_NS: u64 = 3_200_000_000;

/// Processor time that other threads used during a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuContention {
    /// The other thread used up a time slice.
    pub is_cpu_bound: bool,
}

/// Yields the processor for about a microsecond, or longer if another thread wants it, such as
/// the kernel's receive work. Returns the contention if another thread ran.
pub fn pause() -> Option<CpuContention> {
    let began = Instant::now();
    std::thread::yield_now();
    let paused = began.elapsed();
    (paused > CONTENDED_PAUSE).then_some(CpuContention { is_cpu_bound: paused >= CPU_BOUND_PAUSE })
}

/// Wait before the next poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleStep {
    /// Poll again at once.
    Spin,
    /// Poll again after a pause of about a microsecond.
    Pause,
    /// Sleep until a descriptor or a timer wakes the engine.
    Sleep,
}

/// Idle governor of one engine: chooses how to wait from the times of the last work.
#[derive(Clone, Debug)]
pub struct IdleGovernor {
    config: IdleConfig,
    last_work_ns: u64,
    /// Time of the first work after the last sleep.
    busy_since_ns: u64,
    /// Time to stay awake after work, adapted to the gaps between work.
    awake_ns: u64,
    /// Last idle step since the last work.
    last_step: Option<IdleStep>,
    /// End of the time without busy-polling and pauses, beside a CPU-bound thread.
    sleep_only_until_ns: u64,
    /// Length of the last such time.
    sleep_only_ns: u64,
}

impl IdleGovernor {
    /// Creates a governor whose last work was at `now_ns`.
    pub fn new(config: IdleConfig, now_ns: u64) -> Self {
        let awake_ns = config.pause_ns;
        Self {
            config,
            last_work_ns: now_ns,
            busy_since_ns: now_ns,
            awake_ns,
            last_step: None,
            sleep_only_until_ns: 0,
            sleep_only_ns: 0,
        }
    }

    /// Records work at `now_ns`: the next idle step is busy-polling again.
    #[inline]
    pub fn on_work(&mut self, now_ns: u64) {
        if let Some(step) = self.last_step.take() {
            self.adapt_to_gap(now_ns, step);
        }
        self.last_work_ns = now_ns;
    }

    /// Records CPU contention during a pause that ended at `now_ns`: the engine stays awake no
    /// longer than `pause_ns` after work, until it has been busy for long again. Beside a
    /// CPU-bound thread it sleeps at once for some time.
    pub fn on_cpu_contention(&mut self, now_ns: u64, contention: CpuContention) {
        self.busy_since_ns = self.last_work_ns;
        self.awake_ns = self.config.pause_ns;
        if !contention.is_cpu_bound {
            return;
        }
        let since_ns = now_ns.saturating_sub(self.sleep_only_until_ns);
        self.sleep_only_ns = if since_ns < self.sleep_only_ns {
            (2 * self.sleep_only_ns).min(MAX_SLEEP_ONLY_NS)
        } else {
            MIN_SLEEP_ONLY_NS
        };
        self.sleep_only_until_ns = now_ns.saturating_add(self.sleep_only_ns);
    }

    /// Returns true while the engine sleeps at once, because a CPU-bound thread shares its
    /// processor.
    pub fn is_beside_cpu_bound(&self, now_ns: u64) -> bool {
        now_ns < self.sleep_only_until_ns
    }

    /// Adapts the awake time to the gap between the last work and `now_ns`.
    fn adapt_to_gap(&mut self, now_ns: u64, step: IdleStep) {
        let IdleConfig { pause_ns, max_gap_ns, .. } = self.config;
        let gap_ns = now_ns.saturating_sub(self.last_work_ns);
        // The wake-up of a sleeping engine made the gap longer than it is for one that is awake.
        let longest_ns = if step == IdleStep::Sleep { max_gap_ns / 2 * 3 } else { max_gap_ns };
        self.awake_ns = if gap_ns > longest_ns {
            // A single long gap may be a delay, so only halve.
            self.awake_ns / 2
        } else {
            // Rises at once, decays slowly.
            (2 * gap_ns).min(max_gap_ns).max(self.awake_ns - self.awake_ns / 64)
        }
        .max(pause_ns);
        if step == IdleStep::Sleep {
            self.busy_since_ns = now_ns;
        }
    }

    /// Returns the idle step after a poll without work at `now_ns`.
    #[inline]
    pub fn step(&mut self, now_ns: u64) -> IdleStep {
        let idle_ns = now_ns.saturating_sub(self.last_work_ns);
        let busy_ns = self.last_work_ns.saturating_sub(self.busy_since_ns);
        let awake_ns = (busy_ns / 4).min(self.config.max_linger_ns).max(self.awake_ns);
        let step = if self.is_beside_cpu_bound(now_ns) {
            IdleStep::Sleep
        } else if idle_ns < self.config.spin_ns {
            IdleStep::Spin
        } else if idle_ns < awake_ns {
            IdleStep::Pause
        } else {
            IdleStep::Sleep
        };
        self.last_step = Some(step);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LINGER: IdleConfig =
        IdleConfig { spin_ns: 10, pause_ns: 20, max_gap_ns: 0, max_linger_ns: 0 };

    #[test]
    fn steps_from_spin_to_sleep_and_back_on_work() {
        let mut idle = IdleGovernor::new(NO_LINGER, 100);
        assert_eq!(idle.step(105), IdleStep::Spin);
        assert_eq!(idle.step(110), IdleStep::Pause);
        assert_eq!(idle.step(120), IdleStep::Sleep);
        idle.on_work(120);
        assert_eq!(idle.step(125), IdleStep::Spin);
        assert_eq!(
            idle.step(90),
            IdleStep::Spin,
            "a clock that stepped back is no reason to sleep"
        );
    }

    /// Time that the governor stays awake after work at `now_ns`, in nanoseconds.
    fn awake_ns(idle: &IdleGovernor, now_ns: u64) -> u64 {
        let mut idle = idle.clone();
        (0..1_000).find(|&ns| idle.step(now_ns + ns) == IdleStep::Sleep).unwrap()
    }

    /// Work arrives at `now_ns`, after an empty poll at `now_ns - 1`.
    fn work_after_poll(idle: &mut IdleGovernor, now_ns: u64) {
        idle.step(now_ns - 1);
        idle.on_work(now_ns);
    }

    #[test]
    fn stays_awake_for_work_with_short_gaps() {
        let mut idle = IdleGovernor::new(IdleConfig { max_gap_ns: 100, ..NO_LINGER }, 0);
        work_after_poll(&mut idle, 30);
        assert_eq!(awake_ns(&idle, 30), 60, "twice the gap");
        work_after_poll(&mut idle, 130);
        assert_eq!(awake_ns(&idle, 130), 100, "but no longer than the bound");
        work_after_poll(&mut idle, 131);
        assert!(awake_ns(&idle, 131) > 90, "one short gap changes little");
        let mut now_ns = 131;
        (0..1_000).for_each(|_| {
            now_ns += 1;
            work_after_poll(&mut idle, now_ns);
        });
        assert!(awake_ns(&idle, now_ns) < 70, "many short gaps lower it");
        for _ in 0..2 {
            now_ns += 151;
            work_after_poll(&mut idle, now_ns);
        }
        assert_eq!(awake_ns(&idle, now_ns), 20, "it does not wait for rare work");
    }

    #[test]
    fn gap_that_a_wake_up_made_too_long_is_short_for_an_engine_that_is_awake() {
        let mut idle = IdleGovernor::new(IdleConfig { max_gap_ns: 100, ..NO_LINGER }, 0);
        work_after_poll(&mut idle, 140);
        assert_eq!(awake_ns(&idle, 140), 100, "it slept");
        idle.step(230);
        idle.on_work(260);
        assert_eq!(awake_ns(&idle, 260), 50, "it was awake");
    }

    #[test]
    fn stays_awake_longer_after_longer_busy_period() {
        let mut idle = IdleGovernor::new(IdleConfig { max_linger_ns: 100, ..NO_LINGER }, 0);
        let mut awake_after = |work: std::ops::Range<u64>| {
            let end_ns = work.end;
            work.for_each(|now_ns| idle.on_work(now_ns));
            (0..).find(|ns| idle.step(end_ns - 1 + ns) == IdleStep::Sleep)
        };
        assert_eq!(awake_after(0..1), Some(20));
        assert_eq!(awake_after(50..251), Some(50));
        assert_eq!(awake_after(400..402), Some(20), "a sleep ends a busy period");
        assert_eq!(awake_after(500..1501), Some(100));
    }

    #[test]
    fn sleeps_early_under_cpu_contention() {
        let config = IdleConfig { max_linger_ns: 100, max_gap_ns: 100, ..NO_LINGER };
        let mut idle = IdleGovernor::new(config, 0);
        (0..1_000).for_each(|now_ns| idle.on_work(now_ns));
        work_after_poll(&mut idle, 1_050);
        assert_eq!(awake_ns(&idle, 1_050), 100);
        idle.on_cpu_contention(1_050, CpuContention { is_cpu_bound: false });
        assert_eq!(awake_ns(&idle, 1_050), 20);
        (1_050..2_050).for_each(|now_ns| idle.on_work(now_ns));
        assert_eq!(awake_ns(&idle, 2_049), 100, "it was busy again");
    }

    #[test]
    fn sleeps_at_once_beside_a_cpu_bound_thread() {
        const MS: u64 = 1_000_000;
        let mut idle = IdleGovernor::new(IdleConfig::default(), 0);
        idle.on_work(MS);
        idle.on_cpu_contention(MS, CpuContention { is_cpu_bound: true });
        for now_ns in [MS, 50 * MS, 101 * MS - 1] {
            idle.on_work(now_ns);
            assert_eq!(idle.step(now_ns), IdleStep::Sleep, "at {now_ns}");
        }
        idle.on_work(101 * MS);
        assert_eq!(idle.step(101 * MS), IdleStep::Spin, "tries again");
    }

    #[test]
    fn tries_to_pause_less_often_while_cpu_contention_lasts() {
        let mut idle = IdleGovernor::new(IdleConfig::default(), 0);
        let mut now_ns = 0;
        let mut time_without_pause_ms = || {
            idle.on_cpu_contention(now_ns, CpuContention { is_cpu_bound: true });
            let began_ns = now_ns;
            while idle.step(now_ns) == IdleStep::Sleep {
                now_ns += 1_000_000;
                idle.on_work(now_ns);
            }
            (now_ns - began_ns) / 1_000_000
        };
        let times: Vec<u64> = (0..7).map(|_| time_without_pause_ms()).collect();
        assert_eq!(times, [100, 200, 400, 800, 1_600, 3_200, 3_200]);
        let quiet_ns = now_ns + 2 * MAX_SLEEP_ONLY_NS;
        idle.on_cpu_contention(quiet_ns, CpuContention { is_cpu_bound: true });
        idle.on_work(quiet_ns + MIN_SLEEP_ONLY_NS);
        assert_eq!(idle.step(quiet_ns + MIN_SLEEP_ONLY_NS), IdleStep::Spin, "starts over");
    }
}
