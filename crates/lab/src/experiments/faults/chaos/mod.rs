//! `tidegate lab chaos`: effect of killed and misbehaving applications on the daemon and on other
//! applications, which must be none. Also the effect of a daemon upgrade on applications.
//!
//! The daemon is a separate process on one end of a veth pair; the kernel's servers are on the
//! other end. The targets that are killed are this executable again, controlled by a hidden flag.

mod echo_checker;
mod kills;
mod peers;
mod restart;
mod slowdown;
mod target;
mod target_process;
mod testbed;
mod upgrade;
mod well_behaved;

use std::sync::atomic::Ordering;

use serde_json::json;

pub use target::{Behaviour, TargetConfig, run_target};

use self::kills::KillResults;
use self::restart::RestartResults;
use self::slowdown::Slowdown;
use self::testbed::ChaosTestbed;
use self::upgrade::UpgradeResults;
use crate::report::Progress;
use crate::stats::round_to_hundredths;
use crate::{Experiment, LabError};

/// Growth of the daemon's own resident memory in bytes, after warm-up, that does not count as a
/// leak: pages that stay allocated because a small part of each is in use.
const RESIDENT_SLACK_BYTES: u64 = 2 << 20;

/// Maximum number of errors of well-behaved applications that are quoted in the result.
const MAX_ERRORS_REPORTED: usize = 8;

/// Configuration of the experiment.
#[derive(Clone, Copy, Debug)]
pub struct ChaosConfig {
    /// Number of applications to kill.
    pub kills: u64,
    /// Seed: the same seed kills the same applications after the same times.
    pub seed: u64,
    /// Duration in seconds of each measurement next to a misbehaving application.
    pub seconds: f64,
    /// Number of repetitions of that measurement; the result is their median.
    pub repeats: usize,
}

impl Default for ChaosConfig {
    fn default() -> Self {
        Self { kills: 1000, seed: 1, seconds: 1.0, repeats: 5 }
    }
}

impl ChaosConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { kills: 100, seconds: 0.5, repeats: 1, ..self }
    }
}

/// Runs all parts of the experiment.
///
/// # Errors
/// If namespaces cannot be created, or the daemon has ended.
pub fn run(config: &ChaosConfig) -> Result<Experiment, LabError> {
    std::thread::scope(|scope| {
        // A new thread is pinned, so that the caller's thread keeps its cores.
        let running = scope.spawn(|| {
            testbed::leave_daemon_core()?;
            let testbed = ChaosTestbed::new()?;
            let slowdown_steps = slowdown::PAIRS.len() * config.repeats;
            let progress = Progress::new(kills::steps(config) + slowdown_steps + 2);
            let kill_results = kills::run(&testbed, config, &progress)?;
            let slowdowns = slowdown::run(&testbed, config, &progress)?;
            let restart_results = restart::run(&testbed)?;
            progress.step("daemon killed and started again");
            let upgrade_results = upgrade::run(&testbed)?;
            progress.step("daemon upgraded");
            Ok(report(config, &kill_results, &slowdowns, &restart_results, &upgrade_results))
        });
        running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn report(
    config: &ChaosConfig,
    kill_results: &KillResults,
    slowdowns: &[Slowdown],
    restart_results: &RestartResults,
    upgrade_results: &UpgradeResults,
) -> Experiment {
    let mut result = Experiment::new("chaos");
    result.figure("kills", kill_results.kills() as f64);
    result.figure("leaked_bytes", kill_results.leaked_bytes() as f64);
    let [descriptors, applications] = kill_results.not_released();
    result.figure("leaked_descriptors", descriptors as f64);
    result.figure("applications_left", applications as f64);
    let grown =
        kill_results.after.resident_bytes as f64 - kill_results.before.resident_bytes as f64;
    result.figure("resident_growth_bytes", grown);
    let well_behaved = &kill_results.well_behaved;
    let errors = well_behaved.errors();
    result.figure("honest_errors", errors.len() as f64);
    result.figure("honest_bytes", well_behaved.checked_bytes.load(Ordering::Relaxed) as f64);
    result.figure("honest_datagrams", well_behaved.datagrams.load(Ordering::Relaxed) as f64);
    result.figure("honest_resent", well_behaved.retransmitted.load(Ordering::Relaxed) as f64);
    result.figure("honest_connections", well_behaved.connections.load(Ordering::Relaxed) as f64);
    let worst = slowdowns.iter().map(Slowdown::loss_percent).fold(f64::MIN, f64::max);
    result.figure("bad_slows_percent", round_to_hundredths(worst));
    result.figure("daemon_death_noticed_ms", restart_results.noticed.as_secs_f64() * 1e3);
    result.figure("daemon_restart_ms", restart_results.restarted.as_secs_f64() * 1e3);
    result.figure("hung_applications", restart_results.hung as f64);
    result.figure("upgrades", upgrade_results.upgrades as f64);
    result.figure("upgrade_lost_connections", upgrade_results.lost as f64);
    result.figure("upgrade_pause_ms", upgrade_results.pause.as_secs_f64() * 1e3);
    for (state, kills) in &kill_results.kills_by_behaviour {
        result.rows.push(json!({"application": state, "kills": kills}));
    }
    for slowdown in slowdowns {
        result.rows.push(json!({
            "application": slowdown.bad.name(),
            "requests_per_s": slowdown.median(|[_, with]| *with).round(),
            "without_per_s": slowdown.median(|[without, _]| *without).round(),
            "slows_percent": round_to_hundredths(slowdown.loss_percent()),
        }));
    }
    result.columns =
        vec!["application", "kills", "requests_per_s", "without_per_s", "slows_percent"];
    result.note(format!(
        "the daemon on core 0, everything else on core 1, AF_XDP over a veth pair; seed {}; \
         well-behaved (honest) applications exchange checked data by TCP and UDP while others are \
         killed; `any` were killed at a random time, even before they started their behaviour",
        config.seed
    ));
    for error in errors.iter().take(MAX_ERRORS_REPORTED) {
        result.note(format!("honest_errors: {error}"));
    }
    result.note(format!(
        "leaked_bytes: packet buffers, data and state of connections that were not released \
         within 90 s, and the growth of the daemon's resident memory (private and shared) \
         beyond {RESIDENT_SLACK_BYTES} bytes since the end of the warm-up"
    ));
    result.note(
        "honest_resent: datagrams that were sent again, because the ring of the veth pair was full \
         (the kernel counts them as discarded)",
    );
    result.note(
        "upgrade_pause_ms: longest round trip of 64 bytes, seen by a client on the kernel's stack, \
         while the daemon was upgraded repeatedly; upgrade_lost_connections: of this client and of \
         the well-behaved applications",
    );
    result.note(
        "slows_percent: requests/s that 23 applications lose to a 24th, versus one that uses the \
         processor in the same way but does no harm: flooding (its command ring is \
         always full) versus churning (only system calls), scribbling (overwrites the memory \
         that it shares, is evicted and attaches again) versus passing (writes to private memory), \
         deaf (requests data and never reads it) versus hearing (reads it); interleaved, medians",
    );
    result
}
