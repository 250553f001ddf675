//! The experiments that look into the kernel: what they say, and that they
//! leave nothing behind.

mod support;

use std::process::Command;

use serde_json::Value;
use support::is_root;

/// Runs a small experiment and returns its result.
fn lab(arguments: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = command.arg("lab").args(arguments).args(["--json", "-"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether the kernel's trace events can be had; says so when they cannot.
fn can_trace(test: &str) -> bool {
    let folder = "/sys/kernel/tracing/instances";
    let can = is_root(test) && std::path::Path::new(folder).exists();
    if !can {
        eprintln!("skipped {test}: no {folder}");
    }
    can
}

/// The trace instances that this process's children could have left.
fn instances() -> usize {
    let entries = std::fs::read_dir("/sys/kernel/tracing/instances").unwrap();
    let gone = |name: &str| {
        let pid = name.strip_prefix("tidegate-").and_then(|rest| rest.split('-').next());
        pid.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    };
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(gone)).count()
}

#[test]
fn reads_measures_every_source() {
    if !is_root("reads_measures_every_source") {
        return;
    }
    let small = ["--units", "300", "--calls", "3000", "--threads", "1,3", "--runs", "1"];
    let result = lab(&[&["reads"], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8, "four sources, two numbers of threads");
    assert!(rows.iter().all(|row| row["units_per_second"].as_f64().unwrap() > 0.0));
    assert_eq!(rows[0]["linux_3.5.0-2"], 2.29, "the published time stands beside it");
    assert!(result["figures"]["udp_loopback_scaling"].as_f64().is_some());
}

#[test]
fn readers_measures_every_way_in_both_places() {
    if !is_root("readers_measures_every_way_in_both_places") {
        return;
    }
    let small = ["--readers", "1,2", "--work-ns", "0", "--seconds", "0.05", "--repeats", "1"];
    let result = lab(&[&["readers", "--loads", "5000"], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "two places, two numbers of readers");
    for row in rows {
        let mut ways = vec!["kernel_shared_rps", "kernel_reuseport_rps", "tidegate_rps"];
        ways.extend((row["place"] == "core-each").then_some("tidegate_memory_rps"));
        // How many a busy machine answers meanwhile is not for a test to say.
        assert!(ways.iter().all(|way| row[way].is_number()), "{row}");
    }
    assert!(result["figures"]["readers_over_kernel_min"].is_number());
}

#[test]
fn attach_measures_every_way_between_two_processes() {
    let small = ["--round-trips", "20", "--messages", "2000", "--repeats", "1"];
    let result = lab(&[&["attach"], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6, "the core, a ring, a Unix socket twice, pipes, the loopback");
    for row in rows {
        assert!(row["p50_ns"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["messages_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(result["figures"]["ping_pong_p50_ns"].is_number());
}

#[test]
fn chaos_kills_applications_and_the_daemon() {
    if !is_root("chaos_kills_applications_and_the_daemon") {
        return;
    }
    let small = ["--kills", "12", "--seconds", "0.05", "--repeats", "1"];
    let result = lab(&[&["chaos"], &small[..]].concat());
    let figure = |name: &str| result["figures"][name].as_f64().unwrap();
    assert_eq!(figure("kills"), 12.0);
    for nothing in [
        "honest_errors",
        "applications_left",
        "leaked_descriptors",
        "hung_applications",
        "upgrade_lost_connections",
    ] {
        assert_eq!(figure(nothing), 0.0, "{nothing}");
    }
    assert!(figure("honest_bytes") > 0.0 && figure("daemon_restart_ms") > 0.0);
    // What memory grows by at first and what a busy machine loses is not for a test
    // to say.
    assert!(figure("leaked_bytes") >= 0.0 && result["figures"]["bad_slows_percent"].is_number());
}

#[test]
fn trace_follows_packets_through_the_kernel_and_through_tidegate() {
    if !can_trace("trace_follows_packets_through_the_kernel_and_through_tidegate") {
        return;
    }
    let result = lab(&["trace", "--packets", "640", "--payload", "100"]);
    let rows = result["rows"].as_array().unwrap();
    for (path, stages) in [("kernel", 6), ("tidegate", 5)] {
        for family in ["IPv4", "IPv6"] {
            let of = |row: &&Value| row["path"] == path && row["family"] == family;
            assert_eq!(rows.iter().filter(of).count(), stages, "{path} {family}");
        }
        assert!(result["figures"][format!("{path}_receive_ns")].as_f64().unwrap() > 0.0);
    }
    assert_eq!(instances(), 0, "nothing is left");
}

#[test]
fn locks_watches_the_kernel() {
    if !can_trace("locks_watches_the_kernel") {
        return;
    }
    let result = lab(&["locks", "--kernel", "--packets", "500", "--readers", "1,4"]);
    let rows = result["rows"].as_array().unwrap();
    for readers in [1, 4] {
        let read =
            |row: &&Value| row["readers"] == readers && row["packets_per_second"].is_number();
        assert_eq!(rows.iter().filter(read).count(), 1);
    }
    assert_eq!(instances(), 0, "nothing is left");
}
