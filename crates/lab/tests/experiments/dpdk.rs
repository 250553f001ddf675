//! The experiment on DPDK devices.

use super::support;

/// Checks that each figure of the lab is present and plausible, not its size.
#[cfg(feature = "dpdk")]
#[test]
fn lab_reports_every_figure() {
    if !support::has_programs("lab_dpdk", &["dpdk-testpmd", "setpriv", "taskset"]) {
        return;
    }
    let result = support::lab(&["dpdk", "--quick"]);
    let figure = |name: &str| result["figures"][name].as_f64().unwrap_or(f64::NAN);
    for name in ["testpmd_ratio_memif", "testpmd_ratio_ring", "echo_over_raw"] {
        assert!(figure(name) > 0.0, "{name}: {result}");
    }
    let lesser = figure("testpmd_ratio_memif").min(figure("testpmd_ratio_ring"));
    assert_eq!(figure("testpmd_ratio"), lesser);
    for name in ["tidegate_floor", "polled_floor"] {
        assert!((0.0..=1.0).contains(&figure(name)), "{name}: {result}");
    }
    assert!(figure("flood_over_capacity") > 1.0, "{result}");
    let rows = result["rows"].as_array().unwrap();
    for part in
        ["frames back", "flood", "services", "echo-throughput", "echo-message-size", "echo-latency"]
    {
        assert!(rows.iter().any(|row| row["part"] == part), "no {part} in {result}");
    }
    for row in rows {
        assert!(row["part"] == "flood" || row["per_second"].as_f64() > Some(0.0), "{row}");
        assert!(row["lowest"].as_f64() <= row["highest"].as_f64(), "{row}");
        assert!(row["p50_us"].as_f64() <= row["p99_us"].as_f64(), "{row}");
    }
}

#[cfg(not(feature = "dpdk"))]
#[test]
fn build_without_dpdk_names_the_missing_packages() {
    support::fails_with(&["dpdk"], &["libdpdk-dev", "--features dpdk"]);
    support::fails_with(&["dpdk", "--forward", "net_null0"], &["libdpdk-dev", "--features dpdk"]);
}
