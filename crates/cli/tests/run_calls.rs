//! The calls that programs make on sockets come to the same on Tidegate as on
//! the kernel.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use support::run::Daemon;
use support::{CLIENT_V4, CLIENT_V6, Kind, SERVER_V4, SERVER_V6, Site, have, is_root};

const CALLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/calls.py");

/// The interpreter itself: what finds it may be a script of its own.
fn python() -> String {
    let mut asked = Command::new("python3");
    asked.args(["-c", "import sys; print(sys.executable)"]).output_of().trim_end().to_owned()
}

trait OutputOf {
    fn output_of(&mut self) -> String;
}

impl OutputOf for Command {
    fn output_of(&mut self) -> String {
        let output = self.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The other side, killed on drop.
struct Peer(Child);

impl Peer {
    fn start(site: &Site, client: &str, server: &str) -> Self {
        let mut command = site.client().command(python());
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

/// Without what depends on how fast others are: a connection that was full has room
/// again when the daemon has taken what was written, or the kernel of the peer.
fn without_room(results: &str) -> String {
    let lines = results.lines().filter(|line| !line.starts_with("full 1:"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// What the subject prints on the kernel's own sockets.
fn on_the_kernel(client: &str, server: &str) -> String {
    let site = Site::shared();
    let _peer = Peer::start(&site, client, server);
    site.server().command(python()).args([CALLS, "subject", server, client]).output_of()
}

#[test]
fn every_call_comes_to_the_same_as_on_the_kernel() {
    if !is_root("run_calls") || !have("run_calls", &["python3"]) {
        return;
    }
    let python = python();
    for (client, server) in FAMILIES {
        let expected = without_room(&on_the_kernel(client, server));
        assert!(expected.lines().count() > 100, "{expected}");
        assert!(!expected.contains(" after "), "the kernel itself fails:\n{expected}");
        for (kind, flags) in [(Kind::Xdp, ["--port", "xdp"]), (Kind::Packet, ["--port", "packet"])]
        {
            let site = Site::new(kind);
            let _peer = Peer::start(&site, client, server);
            let program = [&python, CALLS, "subject", server, client];
            let got = site.run(&flags, &program).output_of();
            assert!(got.contains("\nfull 1: []\n"), "{got}");
            let got = without_room(&got);
            let differs = |(got, expected): &(&str, &str)| got != expected;
            let first = got.lines().zip(expected.lines()).find(differs);
            assert_eq!(got, expected, "{kind:?}, first (Tidegate, kernel): {first:?}");
            drop(site);
            let site = Site::new(kind);
            let daemon = Daemon::start(&site, &flags);
            let _peer = Peer::start(&site, client, server);
            let got = without_room(&daemon.run(&[], &program).output_of());
            let first = got.lines().zip(expected.lines()).find(differs);
            assert_eq!(got, expected, "{kind:?} attached, first (Tidegate, kernel): {first:?}");
        }
    }
}
