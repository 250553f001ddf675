//! `tidegate announce` beside a server on Tidegate: its interface, on which the routes of a routing
//! daemon depend, follows the health of the server and ends with the process.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::Value;
use support::running::Running;
use support::{
    DeviceKind, SERVER_V4, SERVER_V6, Server, Testbed, is_root, tidegate, wait_until, zone,
};

const NAME: &str = "dns:www.example.test";

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
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn serve(&self) -> Server {
        let (control, zone) = (self.text("control"), zone());
        self.testbed.serve(DeviceKind::Xdp, &["dns", "--zone", &zone, "--control", &control])
    }

    /// Starts the announcer with further flags.
    fn announce(&self, flags: &[&str]) -> Running {
        let mut command = self.testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["announce", "--to", "bird", "--bird", &self.text("bird")]);
        command.args(["--address", SERVER_V4, "--address", SERVER_V6, "--check", NAME]);
        command.args(["--control", &self.text("control"), "--socket", &self.text("announce")]);
        command.args(["--interval", "0.02", "--rise", "1", "--drain-time", "0"]);
        Running::start(command.args(flags).stdin(Stdio::null()))
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
    let host = AnnouncedHost {
        testbed: Testbed::new(DeviceKind::Xdp),
        folder: tempfile::tempdir().unwrap(),
    };
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
    let host = AnnouncedHost {
        testbed: Testbed::new(DeviceKind::Xdp),
        folder: tempfile::tempdir().unwrap(),
    };
    let error_of_start = |socket: &str| {
        let mut command = host.testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["announce", "--to", "bird", "--address", SERVER_V4, "--check", "tcp:53"]);
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
