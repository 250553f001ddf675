//! Other network stacks beside Tidegate: measured, or left out with the reason.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::Value;

use super::support::{fails_with, is_root, laboratory, share_processors};

#[test]
fn peers_lab_names_every_peer_that_it_leaves_out() {
    if !is_root("lab peers") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken");
    fs::write(&broken, "#!/bin/sh\nexit 1\n").unwrap();
    fs::set_permissions(&broken, PermissionsExt::from_mode(0o755)).unwrap();
    let mut peers = Command::new(laboratory());
    peers.args(["peers", "--quick", "--seconds", "0.05", "--only", "UDP IPv6", "--json", "-"]);
    peers.args(["--peers", "smoltcp,broken,vpp"]);
    peers.env("TIDEGATE_PEERS", format!("broken={}", broken.display()));
    let shared = share_processors();
    let output = peers.output().unwrap();
    drop(shared);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = |server: &str| {
        let mut rows = result["rows"].as_array().unwrap().iter();
        rows.find(|row| row["server"] == server).unwrap_or_else(|| panic!("{server}: {result}"))
    };
    for server in ["tidegate", "tidegate-packet"] {
        assert!(row(server)["value"].as_f64() > Some(0.0), "{result}");
    }
    let reason = |server: &str| row(server)["left_out"].as_str().unwrap_or_default().to_owned();
    assert!(reason("vpp").contains("TIDEGATE_PEERS"), "{result}");
    assert!(reason("broken").contains("the process exited"), "{result}");
    // Without the registry of its packages the program cannot be built.
    if row("smoltcp")["value"].as_f64() > Some(0.0) {
        assert!(result["figures"]["peer_rate_ratio"].as_f64() > Some(0.0), "{result}");
    } else {
        assert_ne!(reason("smoltcp"), "", "{result}");
    }
}

#[test]
fn unknown_peer_and_case_are_named() {
    fails_with(&["peers", "--peers", "linux"], &["linux", "smoltcp", "gvisor", "lwip", "f-stack"]);
    fails_with(
        &["peers", "--only", "carrier pigeon"],
        &["carrier pigeon", "TCP IPv4, 1 in flight"],
    );
}
