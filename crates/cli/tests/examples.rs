//! The programs of `examples/`, each with a real client.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Once;
use std::time::Duration;

use support::run::Daemon;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root};
use tidegate_lab::testbed::netns::Namespace;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Path of an example. `cargo test` of the whole tree has built all; the first call builds them if it
/// was of this crate alone.
fn example(name: &str) -> PathBuf {
    // target/debug/deps/examples-HASH
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().parent().unwrap().join("examples");
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        if folder.join(name).exists() {
            return;
        }
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked", "-p", "tidegate", "--examples"]);
        cargo.args(["--features", "attach,packet,tokio,xdp", "--target-dir"]);
        cargo.arg(folder.parent().unwrap().parent().unwrap());
        if folder.parent().unwrap().ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    });
    folder.join(name)
}

/// Addresses of the server, each with the address to send to.
const FAMILIES: [(&str, &str); 2] = [("10.9.0.2/24", SERVER_V4), ("fd00:9::2/64", SERVER_V6)];

/// Example that runs, killed on drop. Its output stays open, since it goes on writing.
struct Running(Child, BufReader<ChildStdout>);

impl Running {
    fn start(namespace: &Namespace, name: &str, arguments: &[&str]) -> Self {
        let mut command = namespace.command(example(name));
        let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut running = Self(child, output);
        let mut line = String::new();
        running.1.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{name}");
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn check_udp(testbed: &Testbed, server: &str) {
    let server = SocketAddr::new(server.parse().unwrap(), 7);
    let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = testbed.client().enter(|| UdpSocket::bind(any)).unwrap().unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.connect(server).unwrap();
    for len in [1, 100, 1400] {
        socket.send(&vec![7; len]).unwrap();
        let mut buffer = [0; 2048];
        assert_eq!(socket.recv(&mut buffer).unwrap(), len);
    }
}

#[test]
fn udp_echoes_answer() {
    if !is_root("udp examples") {
        return;
    }
    for (address, server) in FAMILIES {
        for name in ["udp_echo", "batch_echo"] {
            let testbed = Testbed::new(DeviceKind::Xdp);
            let arguments = [testbed.device(), address];
            let _server = Running::start(testbed.server(), name, &arguments);
            check_udp(&testbed, server);
        }
    }
}

#[test]
fn tcp_echo_answers() {
    if !is_root("tcp example") {
        return;
    }
    for (address, server) in FAMILIES {
        let testbed = Testbed::new(DeviceKind::Packet);
        let _server = Running::start(testbed.server(), "tcp_echo", &[testbed.device(), address]);
        let connect = || TcpStream::connect((server, 7));
        let mut stream = testbed.client().enter(connect).unwrap().unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(b"some words").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "some words");
    }
}

#[test]
fn hyper_server_answers_curl() {
    if !is_root("hyper example") || !has_programs("hyper example", &["curl"]) {
        return;
    }
    for (address, server) in FAMILIES {
        let testbed = Testbed::new(DeviceKind::Xdp);
        let arguments = [testbed.device(), address];
        let _server = Running::start(testbed.server(), "hyper_server", &arguments);
        let url = support::url(server, "/some/path");
        let answer = testbed.tool("curl", &["-s", "--noproxy", "*", "--max-time", "60", &url]);
        assert_eq!(answer, "you asked for /some/path\n");
    }
}

#[test]
fn attached_echo_answers() {
    if !is_root("attached example") {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let socket = daemon.socket().display().to_string();
    let _server = Running::start(testbed.server(), "attached_echo", &[&socket]);
    for server in [SERVER_V4, SERVER_V6] {
        check_udp(&testbed, server);
    }
}
