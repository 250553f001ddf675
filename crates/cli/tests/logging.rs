//! The log of the commands in each form, and the access log of the HTTP server.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
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
        tidegate_needs::skip("no-journal", "this machine has a journal");
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

/// Running receiver of a query log, killed on drop.
struct Receiver(Child);

impl Receiver {
    /// Ends it, so that its file is whole.
    fn finish(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Messages of a dnstap file, a line each, as BIND's reader has them.
fn dnstap_messages(testbed: &Testbed, file: &Path) -> Vec<String> {
    let text = testbed.tool("dnstap-read", &[file.to_str().unwrap()]);
    text.lines().map(str::to_owned).collect()
}

fn assert_has_exchanges(messages: &[String]) {
    let has = |kind: &str, protocol: &str, client: &str| {
        messages.iter().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.contains(&kind)
                && words.contains(&protocol)
                && line.contains(client)
                && line.contains("www.example.test/IN/A")
        })
    };
    for kind in ["AQ", "AR"] {
        assert!(has(kind, "UDP", support::CLIENT_V4), "{kind} UDP in {messages:#?}");
        assert!(has(kind, "TCP", support::CLIENT_V6), "{kind} TCP in {messages:#?}");
    }
}

#[test]
fn query_log_goes_to_a_receiver_or_into_a_file() {
    let programs = ["kdig", "dnstap-read", "fstrm_capture"];
    if !is_root("query log") || !has_programs("query log", &programs) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let folder = tempfile::tempdir().unwrap();
    let [socket, received, file] =
        ["socket", "received", "file"].map(|name| folder.path().join(name));
    let ask = || {
        for (address, transport) in [(SERVER_V4, "+notcp"), (SERVER_V6, "+tcp")] {
            let at = format!("@{address}");
            testbed.tool("kdig", &[&at, transport, "+timeout=20", "www.example.test"]);
        }
    };
    let zone = support::zone();
    let serve = |log: &Path| {
        let flags = ["dns", "--zone", &zone, "--dnstap", log.to_str().unwrap()];
        testbed.serve(DeviceKind::Packet, &flags)
    };

    let mut receiver = Command::new("fstrm_capture");
    receiver.args(["-t", "protobuf:dnstap.Dnstap", "-u"]).arg(&socket).arg("-w").arg(&received);
    let receiver = Receiver(receiver.spawn().unwrap());
    let began = Instant::now();
    while !socket.exists() {
        assert!(began.elapsed() < TIMEOUT, "fstrm_capture does not listen");
        std::thread::yield_now();
    }
    let server = serve(&socket);
    ask();
    server.stop();
    receiver.finish();
    assert_has_exchanges(&dnstap_messages(&testbed, &received));

    let server = serve(&file);
    ask();
    server.stop();
    assert_has_exchanges(&dnstap_messages(&testbed, &file));
    let zone = zone.as_str();
    let again = ["serve", "dns", "--io", "kernel", "--listen", "9493", "--zone", zone, "--dnstap"];
    let output = support::tidegate(&[&again[..], &[file.to_str().unwrap()]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("rename it"), "{error}");
}
