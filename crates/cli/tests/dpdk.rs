//! Two Tidegate processes joined by DPDK devices, without the kernel.

#![cfg(feature = "dpdk")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use support::{tidegate, zone};

const ADDRESS_PAIRS: [(&str, &str); 2] = [("10.9.0.2", "10.9.0.1"), ("fd00:9::2", "fd00:9::1")];

/// A server on a device, killed on drop.
struct Server(Child);

impl Server {
    fn start(server: &[&str], device: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve").args(server).args(["--io", &format!("dpdk:{device}")]);
        command.args(["--address", "10.9.0.2/24", "--address", "fd00:9::2/64"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "the server printed {line:?}");
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Arguments of `tidegate load` over a device.
fn load(kind: &str, (server, source): (&str, &str), port: u16, device: &str) -> Vec<String> {
    let at = if server.contains(':') { format!("[{server}]") } else { server.to_owned() };
    let (target, io) = (format!("{at}:{port}"), format!("dpdk:{device}"));
    ["load", kind, &target, "--io", &io, "--source", source, "--seconds", "0.5", "--json"]
        .map(str::to_owned)
        .into()
}

fn run(arguments: &[String], more: &[&str]) -> Output {
    let all: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    tidegate(&all)
}

/// Number of replies that a load received, or its error output.
fn reply_count(output: &Output) -> Result<u64, String> {
    let report: Value = serde_json::from_slice(&output.stdout)
        .map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let count = report.get("answered").or(report.get("requests"));
    count.and_then(Value::as_u64).ok_or_else(|| report.to_string())
}

/// Device arguments for both ends of a memif with its own socket.
fn memif_pair(name: &str) -> (tempfile::TempDir, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name).display().to_string();
    let memif = |role| format!("net_memif0,role={role},id=0,socket-abstract=no,socket={path}");
    (folder, memif("server"), memif("client"))
}

fn assert_answered(kind: &str, port: u16, device: &str, more: &[&str]) {
    for addresses in ADDRESS_PAIRS {
        let output = run(&load(kind, addresses, port, device), more);
        let count =
            reply_count(&output).unwrap_or_else(|error| panic!("{kind} {addresses:?}: {error}"));
        assert!(count > 0, "{kind} {addresses:?}");
    }
}

#[test]
fn serves_udp_tcp_and_dns_over_memif() {
    let (_folder, ours, theirs) = memif_pair("services");
    let echo = Server::start(&["echo"], &ours);
    assert_answered("udp", 7, &theirs, &["--bytes", "1400"]);
    drop(echo);
    let echo = Server::start(&["echo", "--tcp"], &ours);
    assert_answered("tcp", 7, &theirs, &["--connections", "10", "--bytes", "3000"]);
    drop(echo);
    let queries = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(queries.path(), "www.example.test A\nalias.example.test AAAA\n").unwrap();
    let dns = Server::start(&["dns", "--rate-limit", "0", "--zone", &zone()], &ours);
    assert_answered("dns", 53, &theirs, &["--queries", queries.path().to_str().unwrap()]);
    drop(dns);
}

#[test]
fn memif_client_can_reconnect_after_being_killed() {
    let (_folder, ours, theirs) = memif_pair("client");
    let _echo = Server::start(&["echo"], &ours);
    assert_answered("udp", 7, &theirs, &[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let arguments = load("udp", ADDRESS_PAIRS[0], 7, &theirs);
    command.args(&arguments).args(["--seconds", "1000"]).stderr(Stdio::piped());
    let mut killed = command.stdout(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    // The process dies during the load: its first per-second line has been printed.
    BufReader::new(killed.stderr.take().unwrap()).read_line(&mut line).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_answered("udp", 7, &theirs, &[]);
}

/// The load process owns the memif server role; the Tidegate server has the client role.
#[test]
fn memif_server_can_restart() {
    let (_folder, theirs, ours) = memif_pair("server");
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(load("udp", ADDRESS_PAIRS[0], 7, &theirs));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first = start();
    let path = ours.rsplit_once('=').unwrap().1.to_owned();
    while !std::path::Path::new(&path).exists() {}
    let _echo = Server::start(&["echo"], &ours);
    let count = reply_count(&first.wait_with_output().unwrap()).unwrap();
    assert!(count > 0);
    let count = reply_count(&start().wait_with_output().unwrap()).unwrap();
    assert!(count > 0, "no reply over the restarted memif server");
}

/// The server's device is a vhost-user back end, as for a virtual machine.
#[test]
fn serves_a_guest_over_vhost_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vhost").display().to_string();
    let _echo = Server::start(&["echo"], &format!("net_vhost0,iface={path},queues=1"));
    let guest = format!("net_virtio_user0,path={path}");
    assert_answered("udp", 7, &guest, &["--bytes", "1400"]);
    drop(_echo);
    let _echo = Server::start(&["echo", "--tcp"], &format!("net_vhost0,iface={path},queues=1"));
    assert_answered("tcp", 7, &guest, &["--connections", "10", "--bytes", "3000"]);
}

#[test]
fn invalid_device_error_suggests_a_fix() {
    let fails = |device: &str, part: &str| {
        let io = format!("dpdk:{device}");
        let output = tidegate(&["serve", "echo", "--io", &io, "--address", "10.9.0.2/24"]);
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(part), "{device}: {error}");
    };
    fails("net_null0 --nonsense", "does not start with the arguments `--nonsense");
    fails("net_null0 --no-huge --in-memory", "--in-memory");
    fails("0000:ff:1f.7", "vfio-pci");
    let (_folder, ours, theirs) = memif_pair("busy");
    let _echo = Server::start(&["echo"], &ours);
    fails(&ours, "in use");
    // The server that owns the device is unaffected.
    assert_answered("udp", 7, &theirs, &[]);
}
