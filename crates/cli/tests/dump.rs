//! `tidegate dump` beside a running daemon, and without one.

mod support;

use serde_json::Value;
use support::run::Daemon;
use support::{DeviceKind, Testbed, is_root};

#[test]
fn dump_has_the_state_and_names_what_is_missing() {
    if !is_root("dump") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let daemon = Daemon::start_on(&testbed, DeviceKind::Packet, &[]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump.json");
    let mut dump = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    dump.args(["dump", "--control", "/no-such-socket", "--output"]).arg(&file);
    let output = dump.arg("--socket").arg(daemon.socket()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let state: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(state["daemon"]["pid"], daemon.pid(), "{state}");
    assert!(state["doctor"].as_array().unwrap().len() > 3, "{state}");
    assert!(state["control"]["/no-such-socket"]["error"].is_string(), "{state}");
    assert!(state["tidegate"]["build"].is_string() && state["machine"]["kernel"].is_string());

    let output = support::tidegate(&["dump", "--socket", "/no-such-daemon"]);
    let state: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(state["daemon"]["error"].is_string(), "{state}");
}
