//! Each device with the least set of capabilities that opens it, as a user without root.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::{SERVER_V4, SERVER_V6, Testbed, can_run};

/// Command that runs `tidegate` on the server's side as user `nobody` with these capabilities.
fn command(testbed: &Testbed, capabilities: &[&str], arguments: &[&str]) -> Command {
    let list = |prefix: &str| {
        let names: Vec<_> = capabilities.iter().map(|name| format!(",+{name}")).collect();
        format!("{prefix}-all{}", names.concat())
    };
    let mut command = testbed.server().command("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.args([list("--inh-caps="), list("--ambient-caps="), list("--bounding-set=")]);
    // Run through an open file: the build directory may be inaccessible to other users.
    command.arg("/proc/self/fd/0").args(arguments);
    command.stdin(std::fs::File::open(env!("CARGO_BIN_EXE_tidegate")).unwrap());
    command
}

/// A running server with its standard output, ended on drop.
struct Server {
    child: Child,
    _output: BufReader<ChildStdout>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

fn start(command: &mut Command) -> Server {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert!(line.starts_with("ready: "), "{line}");
    Server { child, _output: output }
}

/// Error of a server that must not start.
fn error(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    text
}

/// Checks that the server starts with these capabilities, and without any one of them fails with
/// an error that names the missing one.
fn check_minimum_set(testbed: &Testbed, capabilities: &[&str], arguments: &[&str]) {
    for &missing in capabilities {
        let others: Vec<_> =
            capabilities.iter().copied().filter(|&capability| capability != missing).collect();
        let error = error(&mut command(testbed, &others, arguments));
        let name = format!("lacks CAP_{};", missing.to_uppercase());
        assert!(error.contains(&name), "{name} is not in: {error}");
        assert!(!error.contains("or newer"), "{error}");
    }
    drop(start(&mut command(testbed, capabilities, arguments)));
}

#[test]
fn xdp_needs_four_capabilities() {
    if !can_run("capabilities of xdp", &["setpriv", "ping"]) {
        return;
    }
    let testbed = Testbed::new(support::DeviceKind::Xdp);
    let own = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
    let device = testbed.device();
    let arguments = ["serve", "echo", "--io", "xdp", "--iface", device, "--address", &own[0]];
    // Without CAP_IPC_LOCK the packet buffers count against the limit of pinned memory.
    let arguments = [&arguments[..], &["--address", &own[1], "--frames", "1024"]].concat();
    let least = ["net_admin", "net_raw", "bpf", "perfmon"];
    check_minimum_set(&testbed, &least, &arguments);
    let server = start(&mut command(&testbed, &least, &arguments));
    for address in [SERVER_V4, SERVER_V6] {
        testbed.tool("ping", &["-c", "1", "-W", "5", address]);
    }
    drop(server);
    let link = testbed.server().ip(&["-d", "link", "show", device]).unwrap();
    assert!(!link.contains("xdp"), "{link}");
}

#[test]
fn guard_needs_three_capabilities() {
    if !can_run("capabilities of the guard", &["setpriv"]) {
        return;
    }
    let testbed = Testbed::shared();
    let arguments = ["guard", "--iface", testbed.device(), "--port", "udp/53"];
    check_minimum_set(&testbed, &["net_admin", "bpf", "perfmon"], &arguments);
}

#[test]
fn monitor_needs_one_capability() {
    if !can_run("capabilities of the monitor", &["setpriv"]) {
        return;
    }
    let testbed = Testbed::shared();
    check_minimum_set(&testbed, &["net_raw"], &["monitor", "--iface", testbed.device()]);
}

#[test]
fn packet_needs_one_capability() {
    if !can_run("capabilities of packet", &["setpriv", "ping"]) {
        return;
    }
    let testbed = Testbed::new(support::DeviceKind::Packet);
    let own = format!("{SERVER_V4}/24");
    let device = testbed.device();
    let arguments = ["serve", "echo", "--io", "packet", "--iface", device, "--address", &own];
    check_minimum_set(&testbed, &["net_raw"], &arguments);
    let _server = start(&mut command(&testbed, &["net_raw"], &arguments));
    testbed.tool("ping", &["-c", "1", "-W", "5", SERVER_V4]);
}

#[test]
fn tap_needs_one_capability() {
    if !can_run("capabilities of tap", &["setpriv"]) {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let node = std::fs::metadata("/dev/net/tun").map(|node| node.permissions().mode());
    if !node.is_ok_and(|mode| mode & 0o006 == 0o006) {
        tidegate_needs::skip("tun", "not every user may open /dev/net/tun");
        return;
    }
    let testbed = Testbed::without_device();
    let own = format!("{SERVER_V4}/24");
    let device = testbed.device();
    let arguments = ["serve", "echo", "--io", "tap", "--iface", device, "--address", &own];
    check_minimum_set(&testbed, &["net_admin"], &arguments);
}

#[test]
fn doctor_names_missing_capabilities_of_each_kind() {
    if !can_run("doctor without capabilities", &["setpriv"]) {
        return;
    }
    let testbed = Testbed::shared();
    let report = |capabilities: &[&str]| {
        let output = command(&testbed, capabilities, &["doctor", "--json"]).output().unwrap();
        let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = findings.as_array().unwrap().iter();
        let privileges = findings.filter(|finding| finding["subject"] == "privileges");
        let text = |finding: &serde_json::Value| finding["what"].as_str().unwrap().to_owned();
        privileges.map(text).collect::<Vec<_>>()
    };
    let [xdp, packet, tap] = &report(&["net_admin", "bpf"])[..] else { panic!("three kinds") };
    assert!(xdp.ends_with("lacks CAP_NET_RAW CAP_PERFMON"), "{xdp}");
    assert!(packet.ends_with("lacks CAP_NET_RAW"), "{packet}");
    assert!(tap.starts_with("sufficient"), "{tap}");
}
