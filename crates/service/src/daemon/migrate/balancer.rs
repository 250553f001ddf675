//! Scales the number of network cores in use, and balances load among them.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::daemon::core::cores::Cores;
use crate::daemon::core::load::{FULL_PERMILLE, LastReport};
use crate::daemon::core::message::CoreMessage;

/// Sampling interval of the cores' load.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Load from which a core is overloaded, in permille of its time.
const BUSY_HIGH_PERMILLE: u32 = 800;

/// Difference in load from which a core in use is given load, in permille.
const IMBALANCE_PERMILLE: u32 = 300;

/// Average load of the remaining cores up to which one core fewer suffices, in permille.
const BUSY_LOW_PERMILLE: u32 = 500;

/// Consecutive samples before scaling up or down: up soon, down after a while.
const SCALE_UP_SAMPLES: u32 = 3;
const SCALE_DOWN_SAMPLES: u32 = 20;

/// Move of load between two cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MoveLoad {
    from: usize,
    to: usize,
    /// Maximum load to move, in permille of the core's time.
    busy_permille: u32,
}

/// Balancing policy: one decision a sample.
struct BalancePolicy {
    limits: RangeInclusive<usize>,
    used_cores: usize,
    high_samples: u32,
    low_samples: u32,
}

impl BalancePolicy {
    fn new(limits: RangeInclusive<usize>) -> Self {
        Self { used_cores: *limits.start(), limits, high_samples: 0, low_samples: 0 }
    }

    /// Decides on the loads of one sample.
    fn on_sample(&mut self, cores: &[LastReport]) -> Option<MoveLoad> {
        let used = &cores[..self.used_cores.min(cores.len())];
        let busiest = (0..used.len()).max_by_key(|&core| used[core].busy_permille)?;
        let LastReport { busy_permille, migration_sets, .. } = used[busiest];
        self.high_samples = if busy_permille >= BUSY_HIGH_PERMILLE && migration_sets > 1 {
            self.high_samples + 1
        } else {
            0
        };
        if self.high_samples >= SCALE_UP_SAMPLES {
            self.high_samples = 0;
            let idlest = (0..used.len()).min_by_key(|&core| used[core].busy_permille)?;
            let difference = busy_permille - used[idlest].busy_permille;
            if difference >= IMBALANCE_PERMILLE {
                return Some(MoveLoad { from: busiest, to: idlest, busy_permille: difference / 2 });
            }
            if self.used_cores < *self.limits.end() {
                self.used_cores += 1;
                return Some(MoveLoad {
                    from: busiest,
                    to: self.used_cores - 1,
                    busy_permille: busy_permille / 2,
                });
            }
        }
        let total: u32 = used.iter().map(|core| core.busy_permille).sum();
        let is_little = self.used_cores > *self.limits.start()
            && total <= BUSY_LOW_PERMILLE * (self.used_cores as u32 - 1);
        self.low_samples = if is_little { self.low_samples + 1 } else { 0 };
        if self.low_samples >= SCALE_DOWN_SAMPLES {
            self.low_samples = 0;
            self.used_cores -= 1;
            let to = (0..self.used_cores).min_by_key(|&core| used[core].busy_permille)?;
            return Some(MoveLoad { from: self.used_cores, to, busy_permille: FULL_PERMILLE });
        }
        None
    }
}

/// Thread that balances the cores of a daemon.
pub(in crate::daemon) struct Balancer {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Balancer {
    pub(in crate::daemon) fn start(
        cores: Arc<Cores>,
        limits: RangeInclusive<usize>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let run = move || {
            let mut policy = BalancePolicy::new(limits);
            let mut previous_reports = vec![0; cores.count()];
            while stopped.recv_timeout(SAMPLE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let step = policy.on_sample(&sample_loads(&cores, &mut previous_reports));
                cores.set_used(policy.used_cores);
                if let Some(MoveLoad { from, to, busy_permille }) = step {
                    // A core that has ended is found out by [`crate::daemon::Daemon::is_running`].
                    let _ = cores.inbox(from).send(CoreMessage::MoveLoad { to, busy_permille });
                }
            }
        };
        let thread = std::thread::Builder::new().name("tidegate-balance".into()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// Samples the load of all cores. A core without a new report has slept: load 0.
fn sample_loads(cores: &Cores, previous_reports: &mut [u64]) -> Vec<LastReport> {
    let of = |(core, before): (usize, &mut u64)| {
        let report = cores.load(core).last_report();
        let has_slept = std::mem::replace(before, report.reports) == report.reports;
        if has_slept { LastReport { busy_permille: 0, ..report } } else { report }
    };
    previous_reports.iter_mut().enumerate().map(of).collect()
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(busy: &[u32]) -> Vec<LastReport> {
        busy.iter()
            .map(|&busy_permille| LastReport {
                busy_permille,
                migration_sets: 2,
                ..LastReport::default()
            })
            .collect()
    }

    /// Decision on the same loads for as many samples as scaling down takes.
    fn decide_steady(policy: &mut BalancePolicy, busy: &[u32]) -> Option<MoveLoad> {
        (0..SCALE_DOWN_SAMPLES).find_map(|_| policy.on_sample(&cores(busy)))
    }

    #[test]
    fn saturated_core_moves_half_its_load_to_unused_core() {
        let mut policy = BalancePolicy::new(1..=3);
        assert_eq!(decide_steady(&mut policy, &[700, 0, 0]), None);
        assert_eq!(
            decide_steady(&mut policy, &[900, 0, 0]),
            Some(MoveLoad { from: 0, to: 1, busy_permille: 450 })
        );
        assert_eq!(
            decide_steady(&mut policy, &[900, 850, 0]),
            Some(MoveLoad { from: 0, to: 2, busy_permille: 450 })
        );
        assert_eq!(decide_steady(&mut policy, &[900, 850, 990]), None, "all cores are in use");
    }

    #[test]
    fn prefers_idle_used_core_over_unused_core() {
        let mut policy = BalancePolicy::new(2..=3);
        assert_eq!(
            decide_steady(&mut policy, &[400, 1000, 0]),
            Some(MoveLoad { from: 1, to: 0, busy_permille: 300 })
        );
        assert_eq!(policy.used_cores, 2);
    }

    #[test]
    fn indivisible_load_stays_on_its_core() {
        let mut policy = BalancePolicy::new(1..=2);
        let one = [
            LastReport { busy_permille: FULL_PERMILLE, migration_sets: 1, ..LastReport::default() },
            LastReport::default(),
        ];
        assert!((0..100).all(|_| policy.on_sample(&one).is_none()));
    }

    #[test]
    fn short_load_peak_moves_nothing() {
        let mut policy = BalancePolicy::new(1..=2);
        for _ in 0..10 {
            assert_eq!(policy.on_sample(&cores(&[1000, 0])), None);
            assert_eq!(policy.on_sample(&cores(&[1000, 0])), None);
            assert_eq!(policy.on_sample(&cores(&[100, 0])), None);
        }
    }

    #[test]
    fn scales_down_to_configured_minimum() {
        let mut policy = BalancePolicy::new(1..=3);
        policy.used_cores = 3;
        let step = decide_steady(&mut policy, &[300, 200, 100]);
        assert_eq!(step, Some(MoveLoad { from: 2, to: 1, busy_permille: FULL_PERMILLE }));
        let step = decide_steady(&mut policy, &[200, 200, 0]);
        assert_eq!(step, Some(MoveLoad { from: 1, to: 0, busy_permille: FULL_PERMILLE }));
        assert_eq!(decide_steady(&mut policy, &[0, 0, 0]), None, "one core stays in use");
        let mut policy = BalancePolicy::new(2..=3);
        assert_eq!(decide_steady(&mut policy, &[0, 0, 0]), None, "the configured minimum stays");
    }

    #[test]
    fn does_not_scale_down_right_after_scaling_up() {
        let mut policy = BalancePolicy::new(1..=2);
        assert!(decide_steady(&mut policy, &[820, 0]).is_some());
        assert_eq!(decide_steady(&mut policy, &[410, 410]), None);
    }
}
