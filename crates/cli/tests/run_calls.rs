//! Socket calls of applications have the same results on Tidegate as on the kernel.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use support::run::Daemon;
use support::{
    CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root,
};

const CALLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/calls.py");

/// Path of the Python interpreter itself: `python3` on the PATH may be a wrapper script.
fn python() -> String {
    let mut command = Command::new("python3");
    command.args(["-c", "import sys; print(sys.executable)"]).stdout_text().trim_end().to_owned()
}

trait StdoutText {
    fn stdout_text(&mut self) -> String;
}

impl StdoutText for Command {
    fn stdout_text(&mut self) -> String {
        let output = self.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The peer process, killed on drop.
struct Peer(Child);

impl Peer {
    fn start(testbed: &Testbed, client: &str, server: &str) -> Self {
        let mut command = testbed.client().command(python());
        command.args([CALLS, "peer", client, server]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const FAMILIES: [(&str, &str); 2] = [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)];

/// Drops the lines that depend on timing: a full connection becomes writable again when the
/// daemon or the peer's kernel has taken data.
fn without_send_space_results(results: &str) -> String {
    let lines = results.lines().filter(|line| !line.starts_with("full 1:"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Output of the test subject on kernel sockets.
fn subject_output_on_kernel(client: &str, server: &str) -> String {
    let testbed = Testbed::shared();
    let _peer = Peer::start(&testbed, client, server);
    testbed.server().command(python()).args([CALLS, "subject", server, client]).stdout_text()
}

#[test]
fn every_socket_call_over_ipv4_matches_the_kernel() {
    assert_calls_match_the_kernel((CLIENT_V4, SERVER_V4));
}

#[test]
fn every_socket_call_over_ipv6_matches_the_kernel() {
    assert_calls_match_the_kernel((CLIENT_V6, SERVER_V6));
}

fn assert_calls_match_the_kernel((client, server): (&str, &str)) {
    if !is_root("run_calls") || !has_programs("run_calls", &["python3"]) {
        return;
    }
    let python = python();
    let expected = without_send_space_results(&subject_output_on_kernel(client, server));
    assert!(expected.lines().count() > 100, "{expected}");
    assert!(!expected.contains(" after "), "the kernel itself fails:\n{expected}");
    for (kind, flags) in
        [(DeviceKind::Xdp, ["--io", "xdp"]), (DeviceKind::Packet, ["--io", "packet"])]
    {
        let testbed = Testbed::new(kind);
        let _peer = Peer::start(&testbed, client, server);
        let program = [&python, CALLS, "subject", server, client];
        let got = testbed.run(&flags, &program).stdout_text();
        assert!(got.contains("\nfull 1: []\n"), "{got}");
        let got = without_send_space_results(&got);
        let differs = |(got, expected): &(&str, &str)| got != expected;
        let first = got.lines().zip(expected.lines()).find(differs);
        assert_eq!(got, expected, "{kind:?}, first (Tidegate, kernel): {first:?}");
        drop(testbed);
        let testbed = Testbed::new(kind);
        let daemon = Daemon::start(&testbed, &flags);
        let _peer = Peer::start(&testbed, client, server);
        let got = without_send_space_results(&daemon.run(&[], &program).stdout_text());
        let first = got.lines().zip(expected.lines()).find(differs);
        assert_eq!(got, expected, "{kind:?} attached, first (Tidegate, kernel): {first:?}");
    }
}

/// The library's descriptors make way for those of the program.
#[test]
fn attached_program_may_overwrite_any_descriptor() {
    if !is_root("run_calls_overwrite") || !has_programs("run_calls_overwrite", &["python3"]) {
        return;
    }
    let python = python();
    for (client, server) in FAMILIES {
        let testbed = Testbed::new(DeviceKind::Packet);
        let daemon = Daemon::start(&testbed, &["--io", "packet"]);
        let _peer = Peer::start(&testbed, client, server);
        let program = [&python, CALLS, "overwrite", server, client];
        let got = daemon.run(&[], &program).stdout_text();
        assert_eq!(got, "True True b'.'\n", "{server}");
    }
}
