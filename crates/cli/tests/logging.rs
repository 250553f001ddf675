//! The log of the commands in each form, and the access log of the HTTP server.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::running::Running;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root};

/// Upper bound for any step on the slowest machine.
const TIMEOUT: Duration = Duration::from_secs(60);

fn echo(port: &str, more: &[&str]) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    Running::start(command.args(["serve", "echo", "--io", "kernel", "--listen", port]).args(more))
}

#[test]
fn log_is_text_or_json_above_a_level() {
    let mut server = echo("9491", &[]);
    assert!(server.reload().starts_with("reloaded"), "a line as it is");
    server.stop();

    let mut server = echo("9492", &["--log-format", "json"]);
    let line: Value = serde_json::from_str(&server.reload()).unwrap();
    assert_eq!(line["level"], "INFO");
    assert!(line["message"].as_str().unwrap().starts_with("reloaded"), "{line}");
    assert!(line["timestamp"].is_string(), "{line}");
    server.stop();

    let wrong = ["check", "no-such.toml", "--log-format", "json"];
    let output = support::tidegate(&wrong);
    let line: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(!output.status.success() && line["level"] == "ERROR", "{line}");
}

#[test]
fn journal_that_is_missing_is_named() {
    if Path::new("/run/systemd/journal/socket").exists() {
        eprintln!("journal_that_is_missing_is_named: this machine has a journal");
        return;
    }
    let output = support::tidegate(&["drops", "--log-format", "journald"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("systemd-journald"), "{error}");
}

/// Waits until a file has a line with this text, and returns the line.
fn line_with(path: &Path, text: &str) -> String {
    let began = Instant::now();
    loop {
        let lines = fs::read_to_string(path).unwrap_or_default();
        if let Some(line) = lines.lines().find(|line| line.contains(text)) {
            return line.to_owned();
        }
        assert!(began.elapsed() < TIMEOUT, "no {text} in {lines:?}");
        std::thread::yield_now();
    }
}

#[test]
fn access_log_has_each_request_and_follows_its_name() {
    if !is_root("access log") || !has_programs("access log", &["curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let (folder, files) = (tempfile::tempdir().unwrap(), support::files());
    let log = folder.path().join("access.log");
    let [root, path] = [files.path(), &log].map(|path| path.to_str().unwrap().to_owned());
    let (v4, v6) = (format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64"));
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "http", "--io", "packet", "--iface", testbed.device()]);
    command.args(["--address", &v4, "--address", &v6, "--root", &root, "--access-log", &path]);
    // The user of the server may open the file anew.
    let mut server = Running::start(command.args(["--user", "root"]));
    let get = |address: &str, path: &str| {
        let url = support::url(address, path);
        let output = testbed.try_tool("curl", &["-s", "--noproxy", "*", "-A", "a\"b", &url]);
        assert!(output.status.success(), "{output:?}");
    };
    get(SERVER_V4, "/no-such-file?q=1");
    let line = line_with(&log, "/no-such-file");
    assert!(line.starts_with(support::CLIENT_V4), "{line}");
    assert!(line.contains("\"GET /no-such-file?q=1 HTTP/1.1\" 404 "), "{line}");
    assert!(line.ends_with("\"-\" \"a\\\"b\""), "{line}");

    fs::rename(&log, folder.path().join("access.log.1")).unwrap();
    server.reload();
    get(SERVER_V6, "/api/status");
    let line = line_with(&log, "/api/status");
    assert!(line.starts_with(support::CLIENT_V6) && line.contains("\" 200 "), "{line}");
    server.stop();
}
