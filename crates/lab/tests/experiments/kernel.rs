//! Labs that trace the kernel or measure its paths: they report all rows and figures and leave
//! nothing behind.

use serde_json::Value;

use super::support::{has_programs, is_root, lab};

/// True if the kernel's trace events are available; prints the reason if not.
fn can_trace(test: &str) -> bool {
    let folder = "/sys/kernel/tracing/instances";
    let available = is_root(test) && std::path::Path::new(folder).exists();
    if !available {
        tidegate_needs::skip("tracefs", format!("{test}: no {folder}"));
    }
    available
}

/// Number of trace instances left behind by processes that have exited.
fn leftover_trace_instances() -> usize {
    let entries = std::fs::read_dir("/sys/kernel/tracing/instances").unwrap();
    let is_leftover = |name: &str| {
        let pid = name.strip_prefix("tidegate-").and_then(|rest| rest.split('-').next());
        pid.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    };
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_leftover)).count()
}

#[test]
fn concurrent_reads_lab_measures_every_source() {
    if !is_root("concurrent_reads_lab_measures_every_source") {
        return;
    }
    let small = ["--units", "300", "--calls", "3000", "--threads", "1,3", "--runs", "1"];
    let result = lab(&[&["concurrent-reads"], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 14, "seven sources, two numbers of threads");
    assert!(rows.iter().all(|row| row["units_per_second"].as_f64().unwrap() > 0.0));
    assert_eq!(rows[0]["linux_3.5.0-2"], 2.29, "the row has the published time");
    assert!(result["figures"]["udp_loopback_scaling"].as_f64().is_some());
}

#[test]
fn reader_scaling_lab_measures_every_path_and_placement() {
    if !is_root("reader_scaling_lab_measures_every_path_and_placement") {
        return;
    }
    let small = ["--readers", "1,2", "--work-ns", "0", "--seconds", "0.05", "--repeats", "1"];
    let result = lab(&[&["reader-scaling", "--loads", "5000"], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "two placements, two reader counts");
    for row in rows {
        let mut columns = vec!["kernel_shared_rps", "kernel_reuseport_rps", "tidegate_rps"];
        columns.extend((row["place"] == "core-each").then_some("tidegate_memory_rps"));
        // A busy machine may answer any number of requests.
        assert!(columns.iter().all(|column| row[column].is_number()), "{row}");
    }
    assert!(result["figures"]["readers_over_kernel_min"].is_number());
}

#[test]
fn attach_latency_lab_measures_every_transport() {
    let small = ["--round-trips", "20", "--messages", "2000", "--repeats", "1"];
    let result = lab(&[&["attach-latency"], &small[..]].concat());
    let rows = result["rows"].as_array().unwrap();
    let ways = "network core, ring, two Unix sockets, pipes, loopback, and three that spin";
    assert_eq!(rows.len(), 9, "{ways}");
    for row in rows {
        assert!(row["p50_ns"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["messages_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(result["figures"]["ping_pong_p50_ns"].is_number());
}

#[test]
fn ring_lab_measures_every_stack() {
    let result = lab(&["ring", "--seconds", "0.01", "--repeats", "1"]);
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 48, "two transports, two families, four stacks, three kinds of calls");
    assert!(rows.iter().all(|row| row["messages_per_s"].as_f64().unwrap() > 0.0));
    for figure in ["ring_ratio", "ring_ratio_embedded", "ring_over_io_uring"] {
        assert!(result["figures"][figure].as_f64().unwrap() > 0.0, "{figure}");
    }
    let some = lab(&["ring", "--seconds", "0.01", "--repeats", "1", "--only", "tcp IPv6 embedded"]);
    assert_eq!(some["rows"].as_array().unwrap().len(), 3);
}

#[test]
fn chaos_lab_kills_applications_and_the_daemon() {
    if !is_root("chaos_lab_kills_applications_and_the_daemon") {
        return;
    }
    let small = ["--kills", "12", "--seconds", "0.05", "--repeats", "1"];
    let result = lab(&[&["chaos"], &small[..]].concat());
    let figure = |name: &str| result["figures"][name].as_f64().unwrap();
    assert_eq!(figure("kills"), 12.0);
    for name in [
        "honest_errors",
        "applications_left",
        "leaked_descriptors",
        "hung_applications",
        "upgrade_lost_connections",
    ] {
        assert_eq!(figure(name), 0.0, "{name}");
    }
    assert!(figure("honest_bytes") > 0.0 && figure("daemon_restart_ms") > 0.0);
    // Initial memory growth and losses on a busy machine vary, so only the presence of these
    // figures is checked.
    assert!(figure("leaked_bytes") >= 0.0 && result["figures"]["bad_slows_percent"].is_number());
}

#[test]
fn receive_trace_lab_follows_packets_in_kernel_and_tidegate() {
    if !can_trace("receive_trace_lab_follows_packets_in_kernel_and_tidegate") {
        return;
    }
    let result = lab(&["receive-trace", "--packets", "640", "--payload", "100"]);
    let rows = result["rows"].as_array().unwrap();
    for (path, stages) in [("kernel", 6), ("tidegate", 5)] {
        for family in ["IPv4", "IPv6"] {
            let is_stage = |row: &&Value| row["path"] == path && row["family"] == family;
            assert_eq!(rows.iter().filter(is_stage).count(), stages, "{path} {family}");
        }
        assert!(result["figures"][format!("{path}_receive_ns")].as_f64().unwrap() > 0.0);
    }
    assert_eq!(leftover_trace_instances(), 0, "trace instances were left behind");
}

#[test]
fn lock_contention_lab_traces_kernel_locks() {
    if !can_trace("lock_contention_lab_traces_kernel_locks") {
        return;
    }
    let result = lab(&["lock-contention", "--kernel", "--packets", "500", "--readers", "1,4"]);
    let rows = result["rows"].as_array().unwrap();
    for (ip, readers, paced) in
        ["ipv4", "ipv6"].into_iter().flat_map(|ip| [(ip, 1, false), (ip, 4, false), (ip, 1, true)])
    {
        let of_case = |row: &&Value| {
            row["ip"] == ip && row["readers"] == readers && row["paced_reads"] == paced
        };
        let of_case: Vec<_> = rows.iter().filter(of_case).collect();
        let is_rate = |row: &&&Value| row["packets_per_second"].is_number();
        assert_eq!(of_case.iter().filter(is_rate).count(), 1);
        let queue = of_case.iter().find(|row| row["lock"] == "sk_receive_queue").unwrap();
        let releases = queue["releases_per_packet"].as_f64().unwrap();
        assert!(releases > 0.5, "each datagram is taken out under the lock: {queue}");
        assert!(queue["held_percent"].is_number(), "{queue}");
    }
    assert_eq!(leftover_trace_instances(), 0, "trace instances were left behind");
}

#[test]
fn ordinary_lab_compares_with_the_kernels_best() {
    if !is_root("lab ordinary") {
        return;
    }
    let short = ["--quick", "--seconds", "0.05", "--only"];
    for (case, figures) in [
        ("UDP IPv6, 64", &["rate_64_ratio", "cpu_64_ratio"][..]),
        ("TCP IPv6, 4 ", &["rate_4_ratio"]),
        ("TCP IPv4, 1 ", &["latency_ratio"]),
    ] {
        let result = lab(&[&["ordinary"], &short[..], &[case]].concat());
        let rows = result["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2, "Tidegate and the kernel's best: {rows:?}");
        assert!(rows.iter().all(|row| row["value"].as_f64() > Some(0.0)), "{rows:?}");
        assert_eq!(rows[0]["server"], "tidegate");
        assert!(rows[1]["server"].as_str().unwrap().starts_with("kernel-"), "{rows:?}");
        for figure in figures {
            assert!(result["figures"][figure].as_f64() > Some(0.0), "{result}");
        }
    }
}

#[test]
fn profile_lab_names_the_functions_of_both_tests() {
    let test = "profile_lab_names_the_functions_of_both_tests";
    if !is_root(test) || !has_programs(test, &["perf"]) {
        return;
    }
    let result = lab(&["profile", "--quick", "--seconds", "0.5"]);
    let rows = result["rows"].as_array().unwrap();
    for (letter, of_its_own) in [("A", "tcp_"), ("B", "tidegate_")] {
        let symbols = || {
            let is_measured = |row: &&Value| !row["server"].as_str().unwrap().starts_with("paper");
            let of_test = rows.iter().filter(is_measured).filter(|row| row["test"] == letter);
            of_test.map(|row| row["symbol"].as_str().unwrap())
        };
        assert!(symbols().count() > 10, "{letter}: {result}");
        let has_own = symbols().any(|symbol| symbol.contains(of_its_own));
        assert!(has_own, "{of_its_own} in {letter}: {result}");
    }
    // Some libraries have no symbols.
    assert!(result["figures"]["profile_named_percent"].as_f64() > Some(50.0), "{result}");
    assert!(result["figures"]["profile_gbps_max_kernel"].as_f64() > Some(0.0), "{result}");
}
