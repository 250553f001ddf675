//! Attacks: what they may leave behind and cost others.

mod support;

use std::path::Path;
use std::process::Command;

use support::{can_run, lab, laboratory};
use tidegate_lab::experiments::faults::hostile::Attack;

#[test]
fn killed_and_stopped_servers_leave_nothing_behind() {
    if !can_run("left behind", &["ethtool"]) {
        return;
    }
    let trials = std::env::var("TIDEGATE_TEST_TRIALS").unwrap_or_else(|_| "3".to_owned());
    let flags = ["--part", "left-behind", "--trials", &trials, "--limit-ms", "60000"];
    let report = lab(&[&["hostile"][..], &flags].concat());
    assert_eq!(report["figures"]["left_behind"], 0.0, "{report:#}");
    assert!(report["figures"]["settings_changed"].as_f64().unwrap() > 0.0, "{report:#}");
}

/// True if the user of attackers may run the program under test, wherever its folder is.
fn others_may_run(program: &Path) -> bool {
    let other = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "test", "-x"];
    let test = Command::new("setpriv").args(other).arg(program).status();
    let may = test.is_ok_and(|status| status.success());
    if !may {
        tidegate_needs::skip(
            "open-folders",
            format!("user 65534 may not run {}", program.display()),
        );
    }
    may
}

#[test]
fn attackers_take_nothing_from_a_neighbour() {
    if !can_run("attackers", &["setpriv", "chrt"]) || !others_may_run(laboratory()) {
        return;
    }
    let flags = ["--part", "neighbour", "--repeats", "1", "--seconds", "0.2"];
    let report = lab(&[&["hostile"][..], &flags].concat());
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), Attack::ALL.len());
    for row in rows {
        // Latency and rate depend on the speed of the machine.
        assert_eq!((&row["wrong"], &row["broken"]), (&0.into(), &0.into()), "{report:#}");
        assert!(row["core_stall_ms"].as_f64().unwrap() > 0.0, "{report:#}");
    }
}
