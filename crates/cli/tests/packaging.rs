//! Units and example configurations of `packaging/`: commands and keys are those of the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

/// Command of a unit, without the path of the program.
fn exec_start(unit: &str) -> String {
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/tidegate "));
    command.unwrap().to_owned()
}

/// Each unit is started with the example of its configuration, on an interface that there is not:
/// that, or a missing file or privilege, is the only error.
#[test]
fn units_and_example_configurations_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let etc = folder.path().to_str().unwrap();
    for example in fs::read_dir(packaging().join("config")).unwrap() {
        let example = example.unwrap();
        let text = fs::read_to_string(example.path()).unwrap().replace("eth", "tg-none");
        fs::write(folder.path().join(example.file_name()), text).unwrap();
    }
    let flags = |file| {
        let text = fs::read_to_string(folder.path().join(file)).unwrap();
        text.lines().find_map(|line| line.strip_prefix("FLAGS=")).unwrap().to_owned()
    };
    let (guard_flags, daemon_flags) = (flags("guard.conf"), flags("daemon.conf"));
    // Neither the routing daemon of this machine nor its interfaces.
    let announce_flags = flags("announce.conf").replace(
        "--to bird",
        &format!("--to bird --bird {etc}/none --interface tg-none0 --socket {etc}/announce"),
    );
    let mut units = 0;
    for unit in fs::read_dir(packaging().join("systemd")).unwrap() {
        let unit = fs::read_to_string(unit.unwrap().path()).unwrap();
        let command = exec_start(&unit);
        let flags = match command.split(' ').next() {
            Some("guard") => &guard_flags,
            Some("announce") => &announce_flags,
            _ => &daemon_flags,
        };
        // The port of the example may be in use here.
        let flags = flags.replace(":9480", ":0");
        let command = command
            .replace("/etc/tidegate", etc)
            .replace("--socket-group tidegate", &format!("--socket {etc}/daemon.sock"))
            .replace("--iface %I", "--iface tg-none0")
            .replace("$FLAGS", &flags);
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(command.split_whitespace())
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command}: {error}");
        for wrong in ["Usage:", "panicked", ".toml"] {
            assert!(!error.contains(wrong), "{command}: {error}");
        }
        units += 1;
    }
    assert_eq!(units, 6);
}
