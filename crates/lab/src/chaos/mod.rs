//! `tidegate lab chaos`: what applications that die, and bad ones, do to the
//! daemon and to the others: nothing. And what a new daemon does to them.
//!
//! The daemon is a process of its own, on one end of a veth pair; the kernel's
//! servers are on the other. Those who are killed are this program again, told
//! what to do by a hidden flag.

mod child;
mod data;
mod honest;
mod kills;
mod peers;
mod restart;
mod site;
mod slow;
mod upgrade;
mod victim;

use std::sync::atomic::Ordering;

use serde_json::json;

pub use victim::{State, VictimConfig, victim};

use self::kills::Killed;
use self::restart::Restarted;
use self::site::Site;
use self::slow::Slowed;
use self::upgrade::Upgraded;
use crate::{Experiment, LabError};

/// What the daemon's own resident memory may grow by, after it was warm, and not
/// be called a leak: pages that are kept by the little in them that is in use.
const RESIDENT_SLACK_BYTES: u64 = 2 << 20;

/// Errors of honest applications whose words go with the result.
const ERRORS_SAID: usize = 8;

/// How to run the experiment.
#[derive(Clone, Copy, Debug)]
pub struct ChaosConfig {
    /// Applications that are killed.
    pub kills: u64,
    /// The same seed kills the same applications, after the same times.
    pub seed: u64,
    /// How long each measurement beside a bad application lasts.
    pub seconds: f64,
    /// How often to measure that; the median counts.
    pub repeats: usize,
}

impl Default for ChaosConfig {
    fn default() -> Self {
        Self { kills: 1000, seed: 1, seconds: 1.0, repeats: 5 }
    }
}

/// Runs all of it.
///
/// # Errors
/// When namespaces cannot be made, or the daemon has ended.
pub fn run(config: &ChaosConfig) -> Result<Experiment, LabError> {
    std::thread::scope(|scope| {
        // Of this thread alone: who called keeps its cores.
        let running = scope.spawn(|| {
            site::leave_daemons_core()?;
            let site = Site::new()?;
            let killed = kills::run(&site, config)?;
            let slowed = slow::run(&site, config)?;
            let restarted = restart::run(&site)?;
            let upgraded = upgrade::run(&site)?;
            Ok(report(config, &killed, &slowed, &restarted, &upgraded))
        });
        running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn report(
    config: &ChaosConfig,
    killed: &Killed,
    slowed: &[Slowed],
    restarted: &Restarted,
    upgraded: &Upgraded,
) -> Experiment {
    let mut result = Experiment::new("chaos");
    result.figure("kills", killed.kills() as f64);
    result.figure("leaked_bytes", killed.leaked_bytes() as f64);
    let [descriptors, applications] = killed.left();
    result.figure("leaked_descriptors", descriptors as f64);
    result.figure("applications_left", applications as f64);
    let grown = killed.after.resident_bytes as f64 - killed.before.resident_bytes as f64;
    result.figure("resident_growth_bytes", grown);
    let honest = &killed.honest;
    let errors = honest.errors();
    result.figure("honest_errors", errors.len() as f64);
    result.figure("honest_bytes", honest.bytes.load(Ordering::Relaxed) as f64);
    result.figure("honest_datagrams", honest.datagrams.load(Ordering::Relaxed) as f64);
    result.figure("honest_resent", honest.resent.load(Ordering::Relaxed) as f64);
    result.figure("honest_connections", honest.connections.load(Ordering::Relaxed) as f64);
    let worst = slowed.iter().map(Slowed::loss_percent).fold(f64::MIN, f64::max);
    result.figure("bad_slows_percent", (worst * 100.0).round() / 100.0);
    result.figure("daemon_death_noticed_ms", restarted.noticed.as_secs_f64() * 1e3);
    result.figure("daemon_restart_ms", restarted.restarted.as_secs_f64() * 1e3);
    result.figure("hung_applications", restarted.hung as f64);
    result.figure("upgrades", upgraded.upgrades as f64);
    result.figure("upgrade_lost_connections", upgraded.lost as f64);
    result.figure("upgrade_pause_ms", upgraded.pause.as_secs_f64() * 1e3);
    for (state, kills) in &killed.states {
        result.rows.push(json!({"application": state, "kills": kills}));
    }
    for bad in slowed {
        result.rows.push(json!({
            "application": bad.bad.name(),
            "requests_per_s": bad.median(|[_, with]| *with).round(),
            "without_per_s": bad.median(|[without, _]| *without).round(),
            "slows_percent": (bad.loss_percent() * 100.0).round() / 100.0,
        }));
    }
    result.columns =
        vec!["application", "kills", "requests_per_s", "without_per_s", "slows_percent"];
    result.note(format!(
        "the daemon on core 0, everything else on core 1, AF_XDP over a veth pair; seed {}; \
         honest applications exchange numbered bytes over TCP and UDP while others are killed; \
         `any` were killed without a look at what they did",
        config.seed
    ));
    for error in errors.iter().take(ERRORS_SAID) {
        result.note(format!("honest_errors: {error}"));
    }
    result.note(format!(
        "leaked_bytes: packet buffers, data and places of connections that did not come back \
         within 90 s, and what the daemon's resident memory (its own and what it shares) grew by \
         beyond {RESIDENT_SLACK_BYTES} bytes since it was warm"
    ));
    result.note(
        "honest_resent: datagrams that were sent again, because the ring of the veth pair was full \
         (the kernel counts them as discarded)",
    );
    result.note(
        "upgrade_pause_ms: the longest that a client of the kernel's waited for 64 bytes to come \
         back while the daemon was replaced again and again; upgrade_lost_connections: of it and of \
         the honest applications beside it",
    );
    result.note(
        "slows_percent: requests/s that 23 applications lose to a 24th, beside one that uses the \
         processor as much in the same way but does nothing bad: flooding (its command ring is \
         always full) beside churning (system calls of its own), scribbling (over the memory \
         that it shares, then it is let go and comes again) beside passing (writes to its own), \
         deaf (asks and never reads) beside hearing; interleaved, medians",
    );
    result
}
