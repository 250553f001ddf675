//! The public API, against the list in `golden/public_api.txt`: a review sees each change of the API
//! as a change of the list.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Command that writes the list anew.
const REMAKE: &str = "TIDEGATE_GOLDEN=write cargo test -p tidegate --test public_api";

/// Format that the crate `public-api` reads, and the version of Rust that writes it. Each version of
/// that crate reads one format: change all three together.
const FORMAT: u32 = 57;
const RUST: &str = "Rust 1.95";

/// Writes the documentation of the crate with all features as JSON; returns the file. The
/// dependencies are those that other builds in the same folder have checked.
fn documentation() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    // JSON is unstable: a release writes it only with this variable. Set for all of cargo, the
    // variable would have the dependencies built anew.
    let folder = tempfile::tempdir().unwrap();
    let rustdoc = folder.path().join("rustdoc");
    fs::write(&rustdoc, "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n").unwrap();
    fs::set_permissions(&rustdoc, fs::Permissions::from_mode(0o755)).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["rustdoc", "--locked", "--quiet", "--lib", "--all-features", "--target-dir"]);
    cargo.arg(target).args(["--", "-Zunstable-options", "--output-format", "json"]);
    let output = cargo.env("RUSTDOC", &rustdoc).current_dir(CRATE).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("doc/tidegate.json")
}

/// Number of the format of a documentation.
fn format_of(documentation: &Path) -> u64 {
    let text = fs::read(documentation).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    json["format_version"].as_u64().unwrap()
}

#[test]
fn public_api_is_that_of_the_list() {
    let documentation = documentation();
    let format = format_of(&documentation);
    if format != u64::from(FORMAT) {
        return tidegate_needs::skip(RUST, format!("this Rust writes format {format}"));
    }
    let api = public_api::Builder::from_rustdoc_json(documentation)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .unwrap();
    let list = Path::new(CRATE).join("tests/golden/public_api.txt");
    let now = api.to_string();
    if std::env::var("TIDEGATE_GOLDEN").is_ok_and(|value| value == "write") {
        fs::create_dir_all(list.parent().unwrap()).unwrap();
        fs::write(&list, &now).unwrap();
    }
    let before = fs::read_to_string(&list).unwrap_or_default();
    let only_in = |text: &str, other: &str, sign: char| -> String {
        let known: std::collections::HashSet<_> = other.lines().collect();
        let lines = text.lines().filter(|line| !known.contains(line));
        lines.map(|line| format!("{sign} {line}\n")).collect()
    };
    let changes = only_in(&before, &now, '-') + &only_in(&now, &before, '+');
    assert!(
        before == now,
        "the public API of `tidegate` has changed:\n{changes}If it should, write \
         crates/tidegate/tests/golden/public_api.txt anew: {REMAKE}"
    );
}
