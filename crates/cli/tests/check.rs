//! `tidegate check` on files of every kind.

mod support;

use std::fs;

use serde_json::Value;

#[test]
fn right_file_passes_and_wrong_file_fails_with_every_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tidegate.toml");
    let check = |text: &str| {
        fs::write(&path, text).unwrap();
        let plain = support::tidegate(&["check", path.to_str().unwrap()]);
        let json = support::tidegate(&["check", "--json", path.to_str().unwrap()]);
        assert_eq!(plain.status.code(), json.status.code());
        let report: Value = serde_json::from_slice(&json.stdout).unwrap();
        (plain.status.success(), String::from_utf8(plain.stderr).unwrap(), report)
    };
    let (passed, _, report) = check("[gate]\nreceive-quota = 32\n");
    assert!(passed && report["problems"] == serde_json::json!([]), "{report}");

    let (passed, said, report) =
        check("[gate]\nreceive-quota = 0\n[dns]\nzone = ['no-such.zone']\n");
    assert!(!passed && report["problems"].as_array().unwrap().len() == 2, "{report}");
    assert!(said.contains("[gate]") && said.contains("no-such.zone"), "{said}");
}
