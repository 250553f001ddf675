//! `tidegate capture` at running servers and at a daemon, read back by tcpdump and tshark.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::run::Daemon;
use support::{
    DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root, url, wait_until, zone,
};

fn can_run(test: &str) -> bool {
    is_root(test) && has_programs(test, &["curl", "dig", "tcpdump"])
}

/// Running capture, killed on drop.
struct Capture {
    child: Child,
    errors: BufReader<ChildStderr>,
}

impl Capture {
    /// Starts a capture and waits until it is attached.
    fn start(control: &Path, arguments: &[&str]) -> Self {
        Self::start_command("capture", control, arguments)
    }

    fn start_command(command: &str, control: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg(command)
            .arg(control)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        errors.read_line(&mut line).unwrap();
        assert!(line.starts_with("capturing ") || line.starts_with("tracing "), "{line}");
        Self { child, errors }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end. Returns what it printed on standard output and on standard error.
    fn end(mut self) -> (String, String) {
        let (mut output, mut errors) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        self.errors.read_to_string(&mut errors).unwrap();
        assert!(self.child.wait().unwrap().success(), "{errors}");
        (output, errors)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn dig(testbed: &Testbed, server: &str) {
    let at = format!("@{server}");
    testbed.tool("dig", &[&at, "+tries=1", "+time=10", "+nocookie", "www.example.test", "A"]);
}

fn read_back(file: &Path) -> Vec<String> {
    let output = Command::new("tcpdump").args(["-nr"]).arg(file).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn frames_of_both_families_are_captured_with_what_became_of_them() {
    if !can_run("capture at a server") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = tempfile::tempdir().unwrap();
    let (control, file) = (folder.path().join("control"), folder.path().join("dns.pcapng"));
    let (control_flag, path) = (control.to_str().unwrap(), file.to_str().unwrap());
    let zone = zone();
    let arguments = ["dns", "--zone", &zone, "--control", control_flag];
    let server = testbed.serve(DeviceKind::Xdp, &arguments);

    let capture = Capture::start(&control, &["-w", path, "-c", "4", "udp", "port", "53"]);
    dig(&testbed, SERVER_V4);
    dig(&testbed, SERVER_V6);
    let (_, errors) = capture.end();
    assert!(errors.contains("4 frames captured, 0 copies lost"), "{errors}");
    let lines = read_back(&file);
    assert_eq!(lines.len(), 4, "{lines:?}");
    for (line, parts) in lines.iter().zip([
        [&format!("> {SERVER_V4}.53:") as &str, "A? www.example.test"],
        [&format!("{SERVER_V4}.53 >"), " A 192.0.2."],
        [&format!("> {SERVER_V6}.53:"), "A? www.example.test"],
        [&format!("{SERVER_V6}.53 >"), " A 192.0.2."],
    ]) {
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
    if has_programs("comments in tshark", &["tshark"]) {
        let mut tshark = Command::new("tshark");
        tshark.args(["-r", path, "-T", "fields", "-e", "frame.packet_flags_direction"]);
        let output = tshark.args(["-e", "frame.comment"]).output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let directions: Vec<_> = output.lines().map(|line| line.contains("received")).collect();
        assert_eq!(directions, [true, false, true, false], "{output}");
    }

    // Nobody listens there: the stack drops the packet and says why.
    for address in [SERVER_V4, SERVER_V6] {
        let filter = ["-c", "1", "udp", "dst", "port", "9999"];
        let capture = Capture::start(&control, &filter);
        let at = format!("@{address}");
        testbed.try_tool("dig", &[&at, "-p", "9999", "+tries=1", "+time=1", "example.test"]);
        let (output, _) = capture.end();
        assert!(output.contains(" < ") && output.contains("dropped: udp_no_socket"), "{output}");
    }
    let capture = Capture::start(&control, &["-w", path, "-c", "1", "udp", "dst", "port", "9999"]);
    let at = format!("@{SERVER_V4}");
    testbed.try_tool("dig", &[&at, "-p", "9999", "+tries=1", "+time=1", "example.test"]);
    capture.end();
    let bytes = fs::read(&file).unwrap();
    let comment = b"received; dropped: udp_no_socket: ";
    assert!(bytes.windows(comment.len()).any(|window| window == comment));
    server.stop();
}

#[test]
fn trace_follows_a_query_through_the_server() {
    if !can_run("trace of a server") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let zone = zone();
    let arguments = ["dns", "--zone", &zone, "--control", control.to_str().unwrap()];
    let server = testbed.serve(DeviceKind::Xdp, &arguments);
    for address in [SERVER_V4, SERVER_V6] {
        let local =
            if address.contains(':') { format!("[{address}]:53") } else { format!("{address}:53") };
        let arguments = ["udp", &local, "--count", "2", "--json"];
        let trace = Capture::start_command("trace", &control, &arguments);
        dig(&testbed, address);
        let (output, _) = trace.end();
        let steps: Vec<Value> =
            output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<_> = steps.iter().map(|step| step["step"].as_str().unwrap()).collect();
        assert_eq!(names, ["received", "done", "notified", "sent"], "{output}");
        let times: Vec<_> = steps.iter().map(|step| step["time_ns"].as_u64().unwrap()).collect();
        assert!(times.is_sorted(), "{output}");
    }
    let listed = ss(&control, &["-aun"]);
    for address in ["0.0.0.0:53", "[::]:53"] {
        assert!(listed.contains(address) && listed.contains("UNCONN"), "{listed}");
    }
    server.stop();
}

/// Output of `tidegate ss` for a server.
fn ss(control: &Path, arguments: &[&str]) -> String {
    let mut ss = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = ss.arg("ss").args(arguments).arg("--control").arg(control).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn connections_of_a_server_are_listed_with_round_trips() {
    if !can_run("ss of a server") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let files = support::files();
    let root = files.path().to_str().unwrap();
    let arguments = ["http", "--root", root, "--control", control.to_str().unwrap()];
    let server = testbed.serve(DeviceKind::Xdp, &arguments);
    assert!(ss(&control, &["-ltn"]).contains("LISTEN"));
    for address in [SERVER_V4, SERVER_V6] {
        let script = format!("exec 3<>/dev/tcp/{address}/80; exec cat <&3");
        let mut client = testbed.client().command("bash");
        let mut client = client.args(["-c", &script]).spawn().unwrap();
        let listed = || ss(&control, &["-tin"]);
        wait_until("the connection is listed", || listed().contains("ESTAB"));
        let lines = listed();
        let is_detail =
            |line: &&str| ["cwnd:", "rtt:", "mss:"].iter().all(|word| line.contains(word));
        assert!(lines.lines().any(|line| is_detail(&line)), "{lines}");
        client.kill().unwrap();
        client.wait().unwrap();
        wait_until("the connection has ended", || !listed().contains("ESTAB"));
    }
    let mut top = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    top.args(["top", "--once", "--json", "--interval", "0.05", "--control"]).arg(&control);
    let view: Value = serde_json::from_slice(&top.output().unwrap().stdout).unwrap();
    assert_eq!(view["applications"].as_array().unwrap().len(), 1, "{view}");
    server.stop();
}

#[test]
fn slow_and_killed_readers_cost_the_server_nothing() {
    if !can_run("slow readers of a capture") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let files = support::files();
    let root = files.path().to_str().unwrap();
    let arguments = ["http", "--root", root, "--control", control.to_str().unwrap()];
    let server = testbed.serve(DeviceKind::Xdp, &arguments);
    let download = |address: &str| {
        let url = url(address, "/large");
        let flags = ["-s", "--noproxy", "*", "--max-time", "30", "-o", "/dev/null", "-w"];
        let bytes = testbed.tool("curl", &[&flags[..], &["%{size_download}", &url]].concat());
        assert_eq!(bytes, "3000000");
    };

    let path = folder.path().join("slow");
    let path = path.to_str().unwrap();
    let capture = Capture::start(&control, &["-w", path, "--buffer", "1"]);
    capture.signal(Signal::STOP);
    download(SERVER_V4);
    download(SERVER_V6);
    capture.signal(Signal::INT);
    capture.signal(Signal::CONT);
    let (_, errors) = capture.end();
    let lost = errors.split_once(" frames captured, ").unwrap().1;
    let lost: u64 = lost.split_once(' ').unwrap().0.parse().unwrap();
    assert!(lost > 0, "{errors}");

    // More readers than may capture at a time.
    for _ in 0..6 {
        wait_until("a killed reader has left its place", || {
            let mut capture = Command::new(env!("CARGO_BIN_EXE_tidegate"));
            capture.arg("capture").arg(&control).args(["-w", "/dev/null"]);
            let mut child = capture.stderr(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            line.starts_with("capturing ")
        });
    }
    download(SERVER_V4);

    // A ring of files.
    let path = folder.path().join("ring");
    let ring = ["-w", path.to_str().unwrap(), "-C", "1", "-W", "2", "--buffer", "16"];
    let capture = Capture::start(&control, &ring);
    download(SERVER_V4);
    download(SERVER_V6);
    capture.signal(Signal::INT);
    capture.end();
    for number in 0..2 {
        let file = folder.path().join(format!("ring{number}"));
        assert!(fs::metadata(&file).unwrap().len() < 1_300_000);
        read_back(&file);
    }
    assert!(!folder.path().join("ring2").exists());
    server.stop();
}

#[test]
fn invalid_filters_are_refused() {
    if !can_run("filters of a capture") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let daemon =
        Daemon::start_on(&testbed, DeviceKind::Packet, &["--control", control.to_str().unwrap()]);
    let mut capture = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = capture.arg("capture").arg(&control).arg("udp prt 53").output().unwrap();
    assert!(!output.status.success());
    assert!(text(&output).contains("syntax error"), "{}", text(&output));

    // A program that leaves itself, past the compiler.
    let mut stream = UnixStream::connect(&control).unwrap();
    let request =
        r#"{"capture":{"cores":1,"ring-bytes":65536,"snap-bytes":96,"filter":[[5,0,0,9]]}}"#;
    writeln!(stream, "{request}").unwrap();
    let mut response = String::new();
    BufReader::new(&stream).read_line(&mut response).unwrap();
    assert!(response.contains("jumps out of the program"), "{response}");

    // The daemon answers ARP and echo requests by itself.
    let capture = Capture::start(&control, &["-c", "2", "icmp"]);
    testbed.tool("ping", &["-c", "1", "-W", "10", SERVER_V4]);
    let (output, _) = capture.end();
    let lines: Vec<_> = output.lines().collect();
    assert!(lines[0].contains(" < ") && lines[1].contains(" > "), "{output}");
    drop(daemon);
}
