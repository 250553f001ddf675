//! `tidegate announce` beside a server on Tidegate, and beside the daemon: its interface, on which the
//! routes of a routing daemon depend, follows the health of the service and ends with the process.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use support::run::{ChildProcess, library};
use support::running::Running;
use support::{
    DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, has_programs, is_root, tidegate, wait_until,
    zone,
};

const NAME: &str = "dns:www.example.test";

/// Port of the program on the daemon.
const PROGRAM_PORT: u16 = 7000;

/// Program that returns what its connections send, on a port of both families.
const ECHO: &str = "
import socket, sys, threading
def echo(stream):
    while data := stream.recv(65536):
        stream.sendall(data)
    stream.close()
server = socket.create_server(('::', int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
";

/// Upper bound for an answer of a program.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Control socket as BIRD's, which takes every command. Returns the commands.
fn serve_bird(path: &Path) -> Receiver<String> {
    let listener = UnixListener::bind(path).unwrap();
    let (commands, received) = channel();
    // The thread ends with the test.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            (&stream).write_all(b"0001 BIRD ready.\n").unwrap();
            for line in BufReader::new(&stream).lines().map_while(Result::ok) {
                (&stream).write_all(b"0000 \n").unwrap();
                let _ = commands.send(line);
            }
        }
    });
    received
}

/// Server, announcer and BIRD of one host.
struct AnnouncedHost {
    testbed: Testbed,
    folder: tempfile::TempDir,
}

impl AnnouncedHost {
    fn new() -> Self {
        Self { testbed: Testbed::new(DeviceKind::Xdp), folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn serve(&self) -> Server {
        self.serve_with(&[])
    }

    /// Starts the DNS server with further flags.
    fn serve_with(&self, flags: &[&str]) -> Server {
        let (control, zone) = (self.text("control"), zone());
        let own = ["dns", "--zone", &zone, "--control", &control];
        self.testbed.serve(DeviceKind::Xdp, &[&own, flags].concat())
    }

    /// Starts the announcer of the DNS server with further flags.
    fn announce(&self, flags: &[&str]) -> Running {
        let control = self.text("control");
        self.announce_by("announce", &[&["--check", NAME, "--control", &control], flags].concat())
    }

    /// Starts an announcer whose socket has this name, with further flags.
    fn announce_by(&self, socket: &str, flags: &[&str]) -> Running {
        let mut command = self.command("announce");
        command.args(["--to", "bird", "--bird", &self.text("bird")]);
        command.args(["--address", SERVER_V4, "--address", SERVER_V6]);
        command.args(["--socket", &self.text(socket)]);
        command.args(["--interval", "0.02", "--rise", "1", "--drain-time", "0"]);
        Running::start(command.args(flags).stdin(Stdio::null()))
    }

    /// Command of `tidegate` on the server's side.
    fn command(&self, name: &str) -> Command {
        let mut command = self.testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.arg(name);
        command
    }

    /// Starts the daemon with the announced addresses.
    fn start_daemon(&self) -> Server {
        let socket = self.text("daemon");
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let own = ["--socket", &socket, "--address", &addresses[0], "--address", &addresses[1]];
        let device = DeviceKind::Xdp.flags(self.testbed.device());
        let device: Vec<&str> = device.iter().map(String::as_str).collect();
        self.testbed.start_command("daemon", &[&own, &device[..]].concat())
    }

    /// Starts a program on the daemon, and waits until it answers.
    fn run_program(&self) -> ChildProcess {
        let mut command = self.command("run");
        command.env("TIDEGATE_PRELOAD_LIBRARY", library());
        command.args(["--socket", &self.text("daemon"), "--", "python3", "-c", ECHO]);
        let program = ChildProcess::new(command.arg(PROGRAM_PORT.to_string()));
        for address in [SERVER_V4, SERVER_V6] {
            wait_until("the program answers", || self.exchange(address).is_ok());
        }
        program
    }

    /// Exchanges bytes with the program, from the client's side.
    fn exchange(&self, address: &str) -> std::io::Result<()> {
        let address = (address.parse::<IpAddr>().unwrap(), PROGRAM_PORT);
        let mut stream = self.testbed.client().enter(|| TcpStream::connect(address)).unwrap()?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(b"tide")?;
        stream.read_exact(&mut [0; 4])
    }

    fn drain(&self, flags: &[&str]) -> Value {
        let socket = self.text("announce");
        let arguments = ["drain", "--wait", "0", "--json", "--socket", &socket];
        let output = tidegate(&[&arguments, flags].concat());
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// True if the interface exists; the second is true if it is up.
    fn interface(&self) -> (bool, bool) {
        match self.testbed.server().ip(&["link", "show", "tidegate0"]) {
            Ok(text) => (true, text.contains("UP")),
            Err(_) => (false, false),
        }
    }

    fn wait_until_up(&self, is_up: bool) {
        wait_until("the interface follows", || self.interface() == (true, is_up));
    }
}

#[test]
fn interface_follows_the_server_and_ends_with_the_announcer() {
    if !is_root("interface of announce") {
        return;
    }
    let host = AnnouncedHost::new();
    let commands = serve_bird(&host.path("bird"));
    let server = host.serve();
    // Only the end of the process can withdraw the addresses in time.
    let announcer = host.announce(&["--fall", "1000000"]);
    host.wait_until_up(true);
    let commands: Vec<_> = commands.try_iter().collect();
    let enabled = ["enable tidegate4", "enable tidegate6"];
    assert!(commands.ends_with(&enabled.map(str::to_owned)), "{commands:?}");
    let state = host.drain(&["--status"]);
    assert_eq!(state["announced"], true, "{state}");
    assert_eq!(state["service_pid"], server.pid().as_raw_nonzero().get());

    let state = host.drain(&[]);
    assert_eq!(state["reason"], "drained", "{state}");
    assert_eq!(host.interface(), (true, false), "withdrawn before the answer");
    host.drain(&["--undo"]);
    host.wait_until_up(true);

    server.kill();
    host.wait_until_up(false);
    assert_eq!(host.drain(&["--status"])["reason"], "service_ended");
    let _server = host.serve();
    host.wait_until_up(true);

    // Dropping kills.
    drop(announcer);
    wait_until("the interface is gone", || host.interface() == (false, false));
    let again = host.announce(&[]);
    host.wait_until_up(true);
    again.stop();
    assert_eq!(host.interface(), (false, false));
}

#[test]
fn failed_check_withdraws_and_errors_name_the_next_step() {
    if !is_root("errors of announce") {
        return;
    }
    let host = AnnouncedHost::new();
    let error_of_start = |socket: &str| {
        let mut command = host.command("announce");
        command.args(["--to", "bird", "--address", SERVER_V4, "--check", "tcp:53"]);
        command.args(["--bird", &host.text("bird"), "--socket", &host.text(socket)]);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = error_of_start("announce");
    assert!(error.contains("start BIRD"), "{error}");

    let _commands = serve_bird(&host.path("bird"));
    let _server = host.serve();
    // The zone has no such name.
    let mut announcer = host.announce(&["--check", "dns:missing.example.test"]);
    let line = announcer.line_with("fails");
    assert!(line.contains("dns:missing.example.test") && line.contains("NXDOMAIN"), "{line}");
    let state = host.drain(&["--status"]);
    assert_eq!((&state["announced"], &state["reason"]), (&false.into(), &"unhealthy".into()));
    assert_eq!(host.interface(), (true, false));

    let error = error_of_start("other");
    assert!(error.contains("--interface tidegate0") && error.contains("another name"), "{error}");
}

/// A gate whose queues count as full with a burst of pings refuses what is above a ceiling.
const FULL_GATE: &str = "
[admission]
high-mark-percent = 1
low-mark-percent = 0
[[admission.class]]
name = \"pings\"
match = [{ protocol = \"icmp\" }]
ceiling-pps = 1
";

#[test]
fn gate_that_refuses_known_traffic_withdraws_for_a_time() {
    if !is_root("refusals of a gate") || !has_programs("the same", &["dnsperf"]) {
        return;
    }
    let host = AnnouncedHost::new();
    let _commands = serve_bird(&host.path("bird"));
    std::fs::write(host.path("gate.toml"), FULL_GATE).unwrap();
    std::fs::write(host.path("queries"), "www.example.test A\n").unwrap();
    let _server = host.serve_with(&["--config", &host.text("gate.toml"), "--rate-limit", "0"]);
    let refused = ["--refused-for", "0.1", "--known-class", "pings", "--hold", "0.5"];
    // Checks that fail under a full gate do not count.
    let _announcer = host.announce(&[&refused[..], &["--fall", "1000000"]].concat());
    host.wait_until_up(true);
    let start = |program: &str, flags: &[&str]| {
        let mut command = host.testbed.client().command(program);
        ChildProcess::new(command.args(flags).stdout(Stdio::null()))
    };
    for address in [SERVER_V4, SERVER_V6] {
        // Thousands of queries wait in the device: it is never empty.
        let queries = host.text("queries");
        let load = ["-s", address, "-d", &queries, "-c", "16", "-q", "4000", "-l", "600"];
        let load = start("dnsperf", &load);
        let pings = start("ping", &["-q", "-f", address]);
        host.wait_until_up(false);
        assert_eq!(host.drain(&["--status"])["reason"], "known_refused");
        drop((load, pings));
        host.wait_until_up(true);
    }
}

#[test]
fn checks_through_the_daemon_follow_its_programs() {
    if !is_root("checks through the daemon") || !has_programs("the same", &["python3"]) {
        return;
    }
    let host = AnnouncedHost::new();
    let _commands = serve_bird(&host.path("bird"));
    let (check, socket) = (format!("tcp:{PROGRAM_PORT}"), host.text("daemon"));
    let flags = ["--check", &check, "--check-through", "daemon", "--daemon", &socket];
    let _announcer = host.announce_by("announce", &flags);
    assert_eq!(host.drain(&["--status"])["announced"], false);
    let _daemon = host.start_daemon();
    let program = host.run_program();
    host.wait_until_up(true);
    drop(program);
    host.wait_until_up(false);
    assert_eq!(host.drain(&["--status"])["reason"], "unhealthy");
    let _program = host.run_program();
    host.wait_until_up(true);
}

/// The new daemon cannot take over: its flags name a processor that does not exist.
#[test]
fn upgrade_that_is_refused_drains_for_a_restart() {
    if !is_root("upgrade --drain") || !has_programs("the same", &["python3"]) {
        return;
    }
    let host = AnnouncedHost::new();
    let _commands = serve_bird(&host.path("bird"));
    let (check, socket) = (format!("tcp:{PROGRAM_PORT}"), host.text("daemon"));
    let daemon = host.start_daemon();
    let program = host.run_program();
    let flags = ["--check", &check, "--check-through", "daemon", "--daemon", &socket];
    let _announcer = host.announce_by("announce", &flags);
    host.wait_until_up(true);
    let upgrade = |flags: &[&str]| {
        let mut command = host.command("upgrade");
        command.args(["--socket", &socket, "--announce", &host.text("announce")]).args(flags);
        command.args(["--", "--iface", host.testbed.device(), "--cpu", "1000"]);
        command.args(["--address", &format!("{SERVER_V4}/24")]);
        command.args(["--address", &format!("{SERVER_V6}/64")]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = upgrade(&[]);
    assert!(!error.contains("withdrawn"), "{error}");
    assert_eq!(host.interface(), (true, true), "nobody has asked to drain");
    let error = upgrade(&["--drain"]);
    assert!(error.contains("The addresses are withdrawn"), "{error}");
    assert_eq!(host.drain(&["--status"])["reason"], "drained");
    assert_eq!(host.interface(), (true, false));
    for address in [SERVER_V4, SERVER_V6] {
        host.exchange(address).unwrap_or_else(|error| panic!("drained, but ended: {error}"));
    }

    daemon.kill();
    drop(program);
    let _daemon = host.start_daemon();
    let _program = host.run_program();
    assert_eq!(host.drain(&["--status"])["reason"], "drained", "until the operator says so");
    host.drain(&["--undo"]);
    host.wait_until_up(true);
}
