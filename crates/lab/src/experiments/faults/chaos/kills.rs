//! Applications that are killed in any state, next to well-behaved applications that must lose
//! nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::peers::connect_repeatedly;
use super::target::Behaviour;
use super::target_process::TargetProcess;
use super::testbed::{ChaosTestbed, DaemonUsage, daemon_address};
use super::well_behaved::{WellBehaved, with_well_behaved};
use super::{ChaosConfig, RESIDENT_SLACK_BYTES};
use crate::LabError;
use crate::report::Progress;
use crate::testbed::stop::StopOnDrop;

/// Number of targets that run at the same time.
const CONCURRENT_TARGETS: u64 = 4;

/// First port that targets listen on.
const FIRST_TARGET_PORT: u16 = 9000;

/// Maximum lifetime of a target after it reported that it has started.
const MAX_LIFETIME: Duration = Duration::from_millis(30);

/// One target in this many is killed at a random time, without waiting until it has started its
/// behaviour: it may still be starting or attaching.
const UNTIMED_KILL_ONE_IN: u64 = 8;

/// Sizes in bytes of a frame in the daemon and of a connection in the stack.
const FRAME_BYTES: u64 = 2048;
const CONNECTION_BYTES: u64 = 416;

/// Result of the kills.
pub(super) struct KillResults {
    pub(super) well_behaved: WellBehaved,
    /// Number of kills by behaviour of the target.
    pub(super) kills_by_behaviour: BTreeMap<&'static str, u64>,
    pub(super) before: DaemonUsage,
    pub(super) after: DaemonUsage,
}

impl KillResults {
    pub(super) fn kills(&self) -> u64 {
        self.kills_by_behaviour.values().sum()
    }

    /// Memory in bytes that was not released. The daemon's resident memory may grow by a slack
    /// first, because memory in use is packed less densely than before.
    pub(super) fn leaked_bytes(&self) -> u64 {
        let Self { before, after, .. } = self;
        let frames = before.frames_available.saturating_sub(after.frames_available) as u64;
        let tcp = after.tcp_memory_bytes.saturating_sub(before.tcp_memory_bytes) as u64;
        let connections = after.connections.saturating_sub(before.connections) as u64;
        let resident = after.resident_bytes.saturating_sub(before.resident_bytes);
        frames * FRAME_BYTES
            + tcp
            + connections * CONNECTION_BYTES
            + resident.saturating_sub(RESIDENT_SLACK_BYTES)
    }

    /// Numbers of descriptors and of applications that were not released.
    pub(super) fn not_released(&self) -> [usize; 2] {
        let Self { before, after, .. } = self;
        [after.descriptors.saturating_sub(before.descriptors), after.applications]
    }
}

/// Kills of each step of the progress.
const KILLS_PER_STEP: u64 = 100;

fn warm_up_kills(config: &ChaosConfig) -> u64 {
    (config.kills / 5).clamp(CONCURRENT_TARGETS, 200)
}

/// Number of steps of the progress.
pub(super) fn steps(config: &ChaosConfig) -> usize {
    (warm_up_kills(config) / KILLS_PER_STEP + config.kills / KILLS_PER_STEP) as usize
}

/// Kills some targets to warm up, then the configured number.
pub(super) fn run(
    testbed: &ChaosTestbed,
    config: &ChaosConfig,
    progress: &Progress,
) -> Result<KillResults, LabError> {
    let warm_up = warm_up_kills(config);
    let well_behaved = WellBehaved::default();
    kill_targets(testbed, progress, &well_behaved, warm_up, config.seed ^ u64::MAX)?;
    let before = testbed.wait_until_idle(0)?;
    progress.line(format_args!("warm: {before:?}"));
    let kills_by_behaviour =
        kill_targets(testbed, progress, &well_behaved, config.kills, config.seed)?;
    let after = testbed.wait_until_idle(before.frames_available)?;
    progress.line(format_args!("after {} kills: {after:?}", config.kills));
    Ok(KillResults { well_behaved, kills_by_behaviour, before, after })
}

fn kill_targets(
    testbed: &ChaosTestbed,
    progress: &Progress,
    well_behaved: &WellBehaved,
    kills: u64,
    seed: u64,
) -> Result<BTreeMap<&'static str, u64>, LabError> {
    let kills_by_behaviour = Mutex::new(BTreeMap::new());
    let started = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let listeners: Vec<SocketAddr> = (0..CONCURRENT_TARGETS)
        .flat_map(|index| {
            [0, 1].map(|family| SocketAddr::new(daemon_address(family), target_port(index)))
        })
        .collect();
    with_well_behaved(testbed, well_behaved, || {
        thread::scope(|scope| {
            let _stop_visits = StopOnDrop(&stop);
            scope
                .spawn(|| testbed.pair.a.namespace.enter(|| connect_repeatedly(&listeners, &stop)));
            let killers: Vec<_> = (0..CONCURRENT_TARGETS)
                .map(|index| {
                    let (started, kills_by_behaviour) = (&started, &kills_by_behaviour);
                    scope.spawn(move || {
                        let lifetimes = Lifetimes { index, kills, seed };
                        kill_sequentially(testbed, progress, lifetimes, started, kills_by_behaviour)
                    })
                })
                .collect();
            killers.into_iter().try_for_each(|killer| {
                killer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    })?;
    Ok(kills_by_behaviour.into_inner().unwrap_or_default())
}

fn target_port(index: u64) -> u16 {
    FIRST_TARGET_PORT + index as u16
}

/// Targets that one thread kills: the thread's index, the number of all kills, and the seed.
struct Lifetimes {
    index: u64,
    kills: u64,
    seed: u64,
}

fn kill_sequentially(
    testbed: &ChaosTestbed,
    progress: &Progress,
    lifetimes: Lifetimes,
    started: &AtomicU64,
    kills_by_behaviour: &Mutex<BTreeMap<&'static str, u64>>,
) -> Result<(), LabError> {
    let Lifetimes { index, kills, seed } = lifetimes;
    let socket = testbed.socket();
    loop {
        let number = started.fetch_add(1, Ordering::Relaxed);
        if number >= kills {
            return Ok(());
        }
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(number);
        let mut rng = fastrand::Rng::with_seed(seed);
        let behaviour = Behaviour::KILLED[rng.usize(..Behaviour::KILLED.len())];
        let mut target = TargetProcess::start(behaviour, &socket, target_port(index), seed)?;
        let is_untimed = rng.u64(..UNTIMED_KILL_ONE_IN) == 0;
        if !is_untimed {
            target.wait_until_started(behaviour)?;
        }
        thread::sleep(MAX_LIFETIME.mul_f64(rng.f64()));
        drop(target);
        let name = if is_untimed { "any" } else { behaviour.name() };
        if let Ok(mut kills_by_behaviour) = kills_by_behaviour.lock() {
            *kills_by_behaviour.entry(name).or_default() += 1;
        }
        if number % KILLS_PER_STEP == KILLS_PER_STEP - 1 {
            // If the daemon has ended, the report fails and ends the experiment.
            let report = testbed.report()?;
            progress.step(format_args!(
                "{} killed, {} attached",
                number + 1,
                report.applications.len()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_memory_and_descriptors_that_were_not_released() {
        let before = DaemonUsage {
            applications: 0,
            connections: 0,
            frames_available: 100,
            tcp_memory_bytes: 0,
            resident_bytes: 1 << 20,
            descriptors: 10,
        };
        let of = |after| KillResults {
            well_behaved: WellBehaved::default(),
            kills_by_behaviour: BTreeMap::from([("idle", 2), ("any", 1)]),
            before,
            after,
        };
        let grown = before.resident_bytes + RESIDENT_SLACK_BYTES;
        let same = of(DaemonUsage { frames_available: 101, resident_bytes: grown, ..before });
        assert_eq!((same.leaked_bytes(), same.not_released(), same.kills()), (0, [0, 0], 3));
        let leaky = of(DaemonUsage {
            applications: 1,
            connections: 2,
            frames_available: 99,
            tcp_memory_bytes: 5,
            resident_bytes: grown + 7,
            descriptors: 13,
        });
        assert_eq!(leaky.leaked_bytes(), FRAME_BYTES + 5 + 2 * CONNECTION_BYTES + 7);
        assert_eq!(leaky.not_released(), [3, 1]);
    }
}
