//! The static probes of the program.

use std::process::Command;

#[test]
fn program_has_static_probes() {
    let Ok(output) = Command::new("readelf").args(["-n", env!("CARGO_BIN_EXE_tidegate")]).output()
    else {
        tidegate_needs::skip("readelf", "readelf is not installed");
        return;
    };
    let notes = String::from_utf8(output.stdout).unwrap();
    let names: Vec<_> =
        notes.lines().filter_map(|line| line.trim().strip_prefix("Name: ")).collect();
    for name in ["receive", "drop", "accept", "close"] {
        assert!(names.contains(&name), "no probe {name} in {notes}");
    }
    assert!(notes.contains("Provider: tidegate"), "{notes}");
}
