//! Every packet script in `tests/scripts/tcp`, with the stack left alone, replaced
//! on the way, and with all sockets moving to another.

use std::path::{Path, PathBuf};

use crate::kit::Family;
use crate::tcp_script::{Changes, Script};

#[test]
fn every_script() {
    run_scripts(Changes::Never, &[]);
}

#[test]
fn every_script_across_upgrades() {
    run_scripts(Changes::UpgradesAtRest, &[]);
}

/// What is on its way when the stack is replaced gives no round trip. These
/// scripts expect what follows from one: other time-outs, and patience with what
/// may only be late.
const NEED_ROUND_TRIPS: &[&str] = &[
    "hostile-shrinking-window.tcp",
    "hostile-window-never-opens.tcp",
    "rfc2018-8-reneging.tcp",
    "rfc4821-7.5-lost-probe.tcp",
    "rfc4821-7.5-probing-upward.tcp",
    "rfc4821-7.7-black-hole.tcp",
    "rfc6298-5-retransmission-time-out.tcp",
    "rfc6675-5-selective-retransmission.tcp",
    "rfc8985-6.2-reordering-timer.tcp",
    "rfc8985-6.2-reordering.tcp",
    "rfc8985-7-tail-loss-probe.tcp",
    "rfc9293-3.8.3-user-timeout.tcp",
    "rfc9293-3.8.6.1-zero-window-probes.tcp",
    "rfc9293-3.8.6.2.1-silly-window-sender.tcp",
];

#[test]
fn every_script_across_more_upgrades() {
    run_scripts(Changes::Upgrades, NEED_ROUND_TRIPS);
}

#[test]
fn every_script_with_all_sockets_moving() {
    run_scripts(Changes::Moves, &[]);
}

fn run_scripts(changes: Changes, except: &[&str]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/tcp");
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let only = std::env::var("TCP_SCRIPT").unwrap_or_default();
    let (mut count, mut failed) = (0, Vec::new());
    let is_meant = |path: &&PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.contains(&only) && !except.contains(&&*name)
    };
    for path in paths.iter().filter(is_meant) {
        let text = std::fs::read_to_string(path).unwrap();
        for family in [Family::V4, Family::V6] {
            let name = format!("{} ({family:?})", path.file_name().unwrap().to_string_lossy());
            // Each script tells what is wrong with it.
            if std::panic::catch_unwind(|| Script::run(&name, &text, family, changes)).is_err() {
                failed.push(name);
            }
        }
        count += 1;
    }
    assert!(count > 0, "no script is like {only:?}");
    assert!(failed.is_empty(), "failed: {failed:#?}");
}
