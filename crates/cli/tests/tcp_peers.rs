//! TCP interoperability with third-party peers: socat, nginx, and Go's network library.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{
    CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, has_programs, is_root,
};
use tidegate::{Net, NetConfig, TcpStream};
use tidegate_device::xdp::XdpConfig;

const TIMEOUT: Duration = Duration::from_secs(30);
const LARGE_BYTES: usize = 2_000_000;

fn large() -> Vec<u8> {
    (0..LARGE_BYTES).map(|n| (n % 251) as u8).collect()
}

/// A server process on the client's side of the testbed, killed on drop.
struct Peer(Child);

impl Peer {
    fn start(testbed: &Testbed, program: &str, arguments: &[&str]) -> Self {
        let mut command = testbed.client().command(program);
        Self(command.args(arguments).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Waits until the peer listens: connects to it over the kernel.
    fn wait_for(&self, testbed: &Testbed, port: u16) {
        let begin = Instant::now();
        for server in [CLIENT_V4, CLIENT_V6] {
            let connect = || std::net::TcpStream::connect((server, port));
            while testbed.client().enter(connect).unwrap().is_err() {
                assert!(begin.elapsed() < TIMEOUT, "no listener on {server} port {port}");
            }
        }
    }

    fn wait_for_line(&mut self) {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `tidegate load tcp` against an echo server on the kernel's side; every reply must be
/// correct, on both families.
fn check_echo(testbed: &Testbed, port: u16) {
    for (server, own) in [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)] {
        let target = SocketAddr::new(server.parse().unwrap(), port).to_string();
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["load", "tcp", &target, "--io", "xdp", "--iface", testbed.device()]);
        command.args(["--source", own, "--connections", "5", "--bytes", "5000"]);
        command.args(["--seconds", "0.3", "--json"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["requests"].as_u64() > Some(0), "{report}");
        for counter in ["wrong_answers", "broken", "connects_failed"] {
            assert_eq!(report[counter], 0, "{counter}: {report}");
        }
    }
}

#[test]
fn socat_sends_files_and_echoes() {
    if !is_root("peer_socat") || !has_programs("peer_socat", &["socat"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let server = testbed.serve(DeviceKind::Xdp, &["echo", "--tcp", "--listen", "7777"]);
    for to in [format!("TCP4:{SERVER_V4}:7777"), format!("TCP6:[{SERVER_V6}]:7777")] {
        let mut command = testbed.client().command("socat");
        command.args(["-t", "20", "-", &to]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut socat = command.spawn().unwrap();
        let (mut input, mut output) = (socat.stdin.take().unwrap(), socat.stdout.take().unwrap());
        let writer = std::thread::spawn(move || input.write_all(&large()));
        let mut received = Vec::new();
        output.read_to_end(&mut received).unwrap();
        writer.join().unwrap().unwrap();
        assert!(received == large(), "{to}: {} of {LARGE_BYTES} bytes", received.len());
        assert!(socat.wait().unwrap().success());
    }
    drop(server);
    let peer = Peer::start(&testbed, "socat", &["TCP6-LISTEN:7778,fork,reuseaddr", "PIPE"]);
    peer.wait_for(&testbed, 7778);
    check_echo(&testbed, 7778);
}

/// Complete response of a web server to one HTTP/1.0 request.
fn fetch(net: &Net, server: IpAddr, port: u16, path: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect_timeout(net, (server, port).into(), TIMEOUT).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: test\r\n\r\n").unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    response
}

#[test]
fn a_client_fetches_from_nginx() {
    if !is_root("peer_nginx") || !has_programs("peer_nginx", &["nginx"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("large.bin"), large()).unwrap();
    let path = folder.path().to_str().unwrap();
    let config = format!(
        "daemon off; master_process off; user root; pid {path}/pid; error_log stderr;\n\
         events {{}}\n\
         http {{ access_log off; client_body_temp_path {path}/b; proxy_temp_path {path}/p;\n\
         fastcgi_temp_path {path}/f; uwsgi_temp_path {path}/u; scgi_temp_path {path}/s;\n\
         server {{ listen {CLIENT_V4}:8080; listen [{CLIENT_V6}]:8080; root {path}; }} }}\n"
    );
    let config_file = folder.path().join("nginx.conf");
    std::fs::write(&config_file, config).unwrap();
    let testbed = Testbed::new(DeviceKind::Xdp);
    let peer = Peer::start(&testbed, "nginx", &["-p", path, "-c", config_file.to_str().unwrap()]);
    peer.wait_for(&testbed, 8080);
    let fetch_all = || {
        let config = NetConfig::new(XdpConfig::new(testbed.device()))
            .address(format!("{SERVER_V4}/24").parse().unwrap())
            .address(format!("{SERVER_V6}/64").parse().unwrap());
        let net = Net::open(config).unwrap();
        for server in [CLIENT_V4, CLIENT_V6] {
            let response = fetch(&net, server.parse().unwrap(), 8080, "/large.bin");
            assert!(response.starts_with(b"HTTP/1.1 200 OK\r\n"));
            assert!(response.ends_with(&large()), "{server}: {} bytes", response.len());
            let response = fetch(&net, server.parse().unwrap(), 8080, "/none");
            assert!(response.starts_with(b"HTTP/1.1 404"));
        }
    };
    testbed.server().enter(fetch_all).unwrap();
}

#[test]
fn go_client_and_server_exchange_data() {
    if !is_root("peer_go") || !has_programs("peer_go", &["go"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("peer");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/peer.go");
    let mut build = std::process::Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(source);
    // The standard library takes half a minute to build; the cache keeps it for the next run.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go");
    let output = build.env("GOCACHE", cache).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = program.to_str().unwrap();
    let testbed = Testbed::new(DeviceKind::Xdp);
    let root = folder.path().to_str().unwrap();
    let server = testbed.serve(DeviceKind::Xdp, &["http", "--root", root]);
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        testbed.tool(program, &["fetch", &format!("http://{host}/api/echo")]);
    }
    drop(server);
    let mut peer = Peer::start(&testbed, program, &["echo", ":7778"]);
    peer.wait_for_line();
    check_echo(&testbed, 7778);
}
