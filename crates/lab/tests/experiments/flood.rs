//! Smoke tests of the receive-livelock labs at minimal length: each lab runs and reports all
//! its rows and figures. The figures themselves are judged by `tidegate lab`.

use std::ops::Range;

use serde_json::Value;

use super::support::{can_run, fails_with, has_programs, is_root, lab, lab_alone};

fn figure(result: &Value, name: &str) -> f64 {
    result["figures"][name].as_f64().unwrap_or_else(|| panic!("no {name} in {result}"))
}

#[test]
fn livelock_lab_measures_every_load_and_draws_svg() {
    if !is_root("lab livelock") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("livelock.svg");
    let result = lab(&[
        "livelock",
        "--quick",
        "--work-ns",
        "0,500",
        "--carriers",
        "kernel,polled+feedback,raw",
        "--no-dns",
        "--loads",
        "5000,20000",
        "--seconds",
        "0.1",
        "--svg",
        svg.to_str().unwrap(),
    ]);
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(
        rows.len(),
        (2 * 2 + 1) * 3,
        "two amounts of work, two transports and the raw loop, two loads and the maximum"
    );
    for row in rows {
        // On a busy machine the server may get no CPU time during a measurement.
        assert!(row["offered_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["goodput_per_s"].as_f64().unwrap() >= 0.0, "{row}");
    }
    let worked = |row: &Value| row["goodput_per_s"].as_f64() > Some(0.0);
    assert!(rows.iter().any(worked), "no row has goodput: {result}");
    // A curve that no load saturates has no floor.
    for name in ["tidegate_floor", "kernel_timer_floor", "raw_floor"] {
        let floor = result["figures"][name].as_f64();
        assert!(floor.is_none_or(|floor| (0.0..=1.0).contains(&floor)), "{name}: {floor:?}");
    }
    assert!(figure(&result, "tidegate_over_kernel_at_max") >= 0.0);
    let best = &result["comparisons"][0]["kernel_best"];
    assert_eq!(best, "kernel-timer", "the only row of the kernel");
    let svg = std::fs::read_to_string(&svg).unwrap();
    assert!(svg.contains("polled+feedback") && svg.contains("0.5 us of work"), "{svg}");
}

#[test]
fn nfs_lab_measures_every_load_of_both_floods() {
    if !is_root("lab nfs") {
        return;
    }
    let header = "/usr/include/nfsc/libnfs.h";
    if !std::path::Path::new(header).exists() {
        return tidegate_needs::skip("libnfs", format!("no {header}"));
    }
    let result = lab(&["nfs", "--quick", "--seconds", "0.1", "--only", "tidegate-admission"]);
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2, "two floods, no load and the maximum");
    // On a busy machine the flood may take the processor from server and clients.
    for row in rows.iter().filter(|row| row["asked_per_s"] == 0.0) {
        assert!(row["answers_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["flood_per_s"], 0.0, "{row}");
    }
    assert!((0.0..=1.0).contains(&figure(&result, "nfs_floor")));
    fails_with(&["nfs", "--only", "none"], &["known: tidegate, tidegate-admission, kernel-timer"]);
}

#[test]
fn elastic_lab_accounts_for_every_request() {
    if !is_root("lab elastic") {
        return;
    }
    let result = lab(&["elastic", "--seconds", "0.3", "--peak", "2000"]);
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5, "up and down again");
    for row in rows {
        assert!(row["cores_at_most"].as_u64() >= row["cores_at_end"].as_u64(), "{row}");
    }
    // At most 0.3 s at 2,000, 1,000 and 100 requests/s.
    let (sent, lost) = (figure(&result, "elastic_sent"), figure(&result, "elastic_lost"));
    assert!(lost < sent && sent <= 1_300.0, "{lost} of {sent}");
    assert!(figure(&result, "elastic_cores_at_most") >= 1.0);
}

#[test]
fn cores_lab_counts_crossings_with_a_queue_for_each_core_and_with_one() {
    if !is_root("lab cores") {
        return;
    }
    let short = ["--quick", "--seconds", "0.05", "--repeats", "1"];
    let arguments = [&["cores", "--cores", "2", "--only", "echo"], &short[..]].concat();
    let result = lab(&arguments);
    let rows = result["rows"].as_array().unwrap();
    let servers: Vec<_> = rows.iter().map(|row| &row["server"]).collect();
    assert_eq!(servers.len(), 3, "and the kernel's best: {servers:?}");
    assert_eq!(servers[..2], ["tidegate", "tidegate-one-queue"]);
    assert_eq!(figure(&result, "crossing_share"), 0.0);
    // Half of the flows are the other core's.
    assert_in_range(&arguments, "crossing_share_one_queue", 0.3..0.7);
}

/// Floor below which a server counts as livelocked: a kernel's or an interrupt-driven server falls
/// to a tenth and less.
const LIVELOCK_FLOOR: f64 = 0.4;
/// Attempts: another program on the machine may take the processor from the server meanwhile.
const ATTEMPTS: usize = 5;

/// Asserts that an experiment with these arguments finds no livelock.
fn assert_no_livelock(arguments: &[&str], floor: &str) {
    assert_in_range(arguments, floor, LIVELOCK_FLOOR..f64::INFINITY);
}

/// Asserts that an experiment with these arguments has this figure in one of several attempts, no
/// other one beside it.
fn assert_in_range(arguments: &[&str], name: &str, range: Range<f64>) {
    let mut values = Vec::new();
    while values.len() < ATTEMPTS {
        let result = lab_alone(arguments);
        values.push(result["figures"][name].as_f64().unwrap_or(f64::NAN));
        if values.iter().any(|value| range.contains(value)) {
            return;
        }
    }
    panic!("{name} in {ATTEMPTS} attempts: {values:?}, not in {range:?}");
}

#[test]
fn service_keeps_its_rate_under_a_flood() {
    if !is_root("lab livelock") {
        return;
    }
    let mut arguments = vec!["livelock", "--quick", "--no-dns", "--loads", "100000,800000"];
    arguments.extend(["--carriers", "polled+feedback", "--work-ns", "2000,10000"]);
    assert_no_livelock(&arguments, "tidegate_floor");
}

#[test]
fn dns_server_keeps_its_rate_under_a_flood() {
    if !is_root("lab livelock") {
        return;
    }
    let mut arguments = vec!["livelock", "--quick", "--loads", "100000,800000"];
    arguments.extend(["--carriers", "raw", "--work-ns", "0", "--dns", "tidegate-xdp"]);
    assert_no_livelock(&arguments, "dns_floor");
}

#[test]
fn unknown_transport_error_lists_known_transports() {
    fails_with(&["livelock", "--no-dns", "--carriers", "pulled"], &["pulled", "polled+feedback"]);
}

#[test]
fn protect_lab_measures_every_level_and_draws_svg() {
    if !is_root("lab protect") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("protect.svg");
    let result = lab(&[
        "protect",
        "--quick",
        "--carriers",
        "kernel,polled+feedback",
        "--seconds",
        "0.1",
        "--third",
        "0.3",
        "--svg",
        svg.to_str().unwrap(),
    ]);
    let rows = result["rows"].as_array().unwrap();
    let is_conserve = |row: &&Value| row["test"] == "service with admission and without";
    assert_eq!(
        rows.iter().filter(|row| !is_conserve(row)).count(),
        2 * 9 + 2 + 4,
        "each transport at nine levels and over time, two policies at two rates"
    );
    assert!(
        rows.iter().filter(is_conserve).count() >= 8,
        "one source, alone and not, at four loads"
    );
    for row in rows.iter().filter(|row| row["test"] == "levels") {
        let flooded = row["offered_per_s"].as_f64().unwrap() > 0.0;
        assert_eq!(flooded, row["level"] != "none", "{row}");
    }
    for row in rows.iter().filter(|row| row["test"] == "time line") {
        assert!(row["answered_before"].as_f64().unwrap() > 0.0, "{row}");
    }
    // Without a flood the flow and the pings get through.
    for row in rows.iter().filter(|row| row["level"] == "none") {
        assert!(row["flow_mbps"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["ping_ms"].as_f64().unwrap() > 0.0, "{row}");
    }
    for name in [
        "flow_kept_min",
        "recovery_ms",
        "kernel_flow_kept_min",
        "kernel_recovery_ms",
        "known_peer_answered",
        "known_peer_answered_droptail",
        "known_peer_answered_overrun",
        "known_peer_answered_droptail_overrun",
        "admission_conserves",
    ] {
        assert!(figure(&result, name) >= 0.0, "{name}");
    }
    assert!(std::fs::read_to_string(&svg).unwrap().contains("steady outgoing flow"));
}

#[test]
fn web_server_lab_measures_every_level_and_draws_svg() {
    if !is_root("lab web-server") || !has_programs("lab web-server", &["httperf"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("web-server.svg");
    let svg_name = svg.to_str().unwrap();
    let short = ["--quick", "--seconds", "0.3", "--only", "tidegate-http", "--svg", svg_name];
    let result = lab(&[&["web-server"], &short[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    let levels: Vec<&Value> = rows.iter().map(|row| &row["level"]).collect();
    assert_eq!(levels, ["N8", "maximum", "N8"], "and once more by httperf: {result}");
    for row in &rows[..2] {
        // 45 requests, and some more on a busy machine that catches up.
        assert!(row["answered_before"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["mean_ms_before"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["offered_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    for name in ["web_throughput_kept", "web_throughput_kept_n8", "web_recovery_s"] {
        assert!(figure(&result, name) >= 0.0, "{name}");
    }
    assert!(std::fs::read_to_string(&svg).unwrap().contains("flood at maximum"));
    fails_with(&["web-server", "--only", "lighttpd"], &["known: apache2-kernel-softirq"]);
}

#[test]
fn mlfrr_lab_measures_target_and_baseline() {
    if !is_root("lab mlfrr") {
        return;
    }
    let result = lab(&[
        "mlfrr",
        "--quick",
        // Without a counter file, replies are counted at the device.
        "--target",
        "tidegate serve echo --iface {iface} --address {own} --listen {port} --cpu {core}",
        // A high loss ratio yields a result on a busy machine, too.
        "--loss-ratio",
        "0.9",
        "--max",
        "20000",
        "--trial",
        "0.05",
        "--duration-sum",
        "0.05",
    ]);
    let rows = result["rows"].as_array().unwrap();
    let servers: Vec<_> = rows.iter().map(|row| row["server"].as_str().unwrap()).collect();
    assert_eq!(servers, ["baseline", "target"]);
    assert!((0.0..=20_000.0).contains(&figure(&result, "mlfrr_pps")));
    assert!(result["notes"][0].as_str().unwrap().contains("serve echo --iface"), "{result}");
}

#[test]
fn fleet_lab_drains_a_server_and_kills_one() {
    if !can_run("lab fleet", &["bird", "dnsperf"]) {
        return;
    }
    let result =
        lab(&["fleet", "--quick", "--seconds", "0.1", "--only", "drain,server", "--rate", "500"]);
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "a row for each part: {rows:?}");
    for row in rows {
        let (asked, lost) = (row["asked"].as_u64().unwrap(), row["lost"].as_u64().unwrap());
        assert!(asked > 0 && lost < asked, "{row}");
    }
    assert!(rows[0]["connections"].as_f64().unwrap() > 0.0, "{}", rows[0]);
    assert!(figure(&result, "fleet_lost_on_drain") >= 0.0);
    assert!(figure(&result, "fleet_failover_ms") >= 0.0);
    fails_with(&["fleet", "--rate", "0"], &["1 to 100,000 requests/s"]);
}
