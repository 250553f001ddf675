//! Every packet script in `tests/scripts/tcp`: with one stack throughout, across upgrades
//! of the stack, and with all sockets migrating to another stack.

use std::path::{Path, PathBuf};

use crate::kit::Family;
use crate::tcp_script::{Script, StackReplacement};

#[test]
fn every_script() {
    run_scripts(StackReplacement::Never, &[]);
}

/// Script that uses up the rate limit of resets, which each stack has anew.
const RESETS_ARE_LIMITED: &str = "rfc9293-3.10.7.1-resets-are-limited.tcp";

/// Scripts that need what a snapshot leaves out: rate limits, and the state before a recovery.
const NEED_ONE_STACK: &[&str] = &[
    RESETS_ARE_LIMITED,
    "rfc3708-needless-time-out.tcp",
    "rfc5682-3.1-needed-time-out.tcp",
    "rfc5682-3.1-spurious-time-out.tcp",
];

#[test]
fn every_script_across_upgrades_at_rest() {
    run_scripts(StackReplacement::UpgradeAtRest, NEED_ONE_STACK);
}

/// Scripts that need a round-trip sample from data in flight during an upgrade.
///
/// Segments in flight when the stack is replaced give no sample. These scripts expect its
/// effects: other time-outs, and tolerance of segments that may only be delayed.
const NEED_RTT_SAMPLES: &[&str] = &[
    "cork-and-a-small-window.tcp",
    "pacing-after-a-pause.tcp",
    "hostile-shrinking-window.tcp",
    "hostile-window-never-opens.tcp",
    "rfc2018-8-reneging.tcp",
    "rfc3465-2.3-slow-start-after-a-time-out.tcp",
    "rfc3522-needless-time-out.tcp",
    "rfc3708-needed-recovery.tcp",
    "rfc4821-7.5-lost-probe.tcp",
    "rfc4821-7.5-probing-upward.tcp",
    "rfc4821-7.7-black-hole.tcp",
    "rfc6298-5-retransmission-time-out.tcp",
    "rfc6298-5.7-backed-off-until-a-sample.tcp",
    "rfc6298-5.7-closed-window-keeps-the-back-off.tcp",
    "rfc6675-5-selective-retransmission.tcp",
    "rfc8985-6.2-reordering-timer.tcp",
    "rfc8985-6.2-reordering.tcp",
    "rfc8985-6.2-round-trip-of-the-last-delivered.tcp",
    "rfc8985-7-tail-loss-probe.tcp",
    "rfc9293-3.8.3-user-timeout-of-a-closed-window.tcp",
    "rfc9293-3.8.3-user-timeout.tcp",
    "rfc9293-3.8.6-retransmission-probes-a-window-that-shrank.tcp",
    "rfc9293-3.8.6.1-silence-ends-the-connection.tcp",
    "rfc9293-3.8.6.1-zero-window-probes.tcp",
    "rfc9293-3.8.6.2.1-silly-window-sender.tcp",
    "rfc9293-3.9.1.2-push-at-the-edge-of-the-window.tcp",
    "rfc9406-4.2-cautious-slow-start.tcp",
];

#[test]
fn every_script_across_upgrades_after_each_line() {
    run_scripts(StackReplacement::UpgradeAlways, &[NEED_RTT_SAMPLES, NEED_ONE_STACK].concat());
}

#[test]
fn every_script_with_socket_migration() {
    run_scripts(StackReplacement::MigrateSockets, &[RESETS_ARE_LIMITED]);
}

fn run_scripts(replacement: StackReplacement, except: &[&str]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/tcp");
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let only = std::env::var("TCP_SCRIPT").unwrap_or_default();
    let (mut count, mut failed) = (0, Vec::new());
    let is_selected = |path: &&PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.contains(&only) && !except.contains(&&*name)
    };
    for path in paths.iter().filter(is_selected) {
        let text = std::fs::read_to_string(path).unwrap();
        for family in [Family::V4, Family::V6] {
            let name = format!("{} ({family:?})", path.file_name().unwrap().to_string_lossy());
            // Each script reports its own problem.
            if std::panic::catch_unwind(|| Script::run(&name, &text, family, replacement)).is_err()
            {
                failed.push(name);
            }
        }
        count += 1;
    }
    assert!(count > 0, "no script name contains {only:?}");
    assert!(failed.is_empty(), "failed: {failed:#?}");
}
