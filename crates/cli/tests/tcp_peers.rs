//! TCP with programs that other people wrote, on both sides: socat, nginx, Go's
//! network library.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{CLIENT_V4, CLIENT_V6, Kind, SERVER_V4, SERVER_V6, Site, have, is_root};
use tidegate::{Net, NetConfig, TcpStream};
use tidegate_port::xdp::XdpConfig;

const LIMIT: Duration = Duration::from_secs(30);
const LARGE_BYTES: usize = 2_000_000;

fn large() -> Vec<u8> {
    (0..LARGE_BYTES).map(|n| (n % 251) as u8).collect()
}

/// A program on the kernel's side that serves, ended on drop.
struct Peer(Child);

impl Peer {
    fn start(site: &Site, program: &str, arguments: &[&str]) -> Self {
        let mut command = site.client().command(program);
        Self(command.args(arguments).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Waits until it listens: the kernel connects to it.
    fn wait_for(&self, site: &Site, port: u16) {
        let begin = Instant::now();
        for server in [CLIENT_V4, CLIENT_V6] {
            let connect = || std::net::TcpStream::connect((server, port));
            while site.client().enter(connect).unwrap().is_err() {
                assert!(begin.elapsed() < LIMIT, "nobody listens on {server} port {port}");
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

/// `tidegate load tcp` against an echo server on the kernel's side: every
/// answer is right, on both families.
fn echo_is_right(site: &Site, port: u16) {
    for (server, own) in [(CLIENT_V4, SERVER_V4), (CLIENT_V6, SERVER_V6)] {
        let target = SocketAddr::new(server.parse().unwrap(), port).to_string();
        let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["load", "tcp", &target, "--port", "xdp", "--iface", site.device()]);
        command.args(["--source", own, "--connections", "5", "--bytes", "5000"]);
        command.args(["--seconds", "0.3", "--json"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["requests"].as_u64() > Some(0), "{report}");
        for wrong in ["wrong_answers", "broken", "connects_failed"] {
            assert_eq!(report[wrong], 0, "{wrong}: {report}");
        }
    }
}

#[test]
fn socat_sends_files_and_echoes() {
    if !is_root("peer_socat") || !have("peer_socat", &["socat"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let server = site.serve(Kind::Xdp, &["echo", "--tcp", "--listen", "7777"]);
    for to in [format!("TCP4:{SERVER_V4}:7777"), format!("TCP6:[{SERVER_V6}]:7777")] {
        let mut command = site.client().command("socat");
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
    let peer = Peer::start(&site, "socat", &["TCP6-LISTEN:7778,fork,reuseaddr", "PIPE"]);
    peer.wait_for(&site, 7778);
    echo_is_right(&site, 7778);
}

/// What a web server answers to one request, read to its end.
fn fetch(net: &Net, server: IpAddr, port: u16, path: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect_timeout(net, (server, port).into(), LIMIT).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: test\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    answer
}

#[test]
fn a_client_fetches_from_nginx() {
    if !is_root("peer_nginx") || !have("peer_nginx", &["nginx"]) {
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
    let site = Site::new(Kind::Xdp);
    let peer = Peer::start(&site, "nginx", &["-p", path, "-c", config_file.to_str().unwrap()]);
    peer.wait_for(&site, 8080);
    let fetched = || {
        let config = NetConfig::new(XdpConfig::new(site.device()))
            .address(format!("{SERVER_V4}/24").parse().unwrap())
            .address(format!("{SERVER_V6}/64").parse().unwrap());
        let net = Net::open(config).unwrap();
        for server in [CLIENT_V4, CLIENT_V6] {
            let answer = fetch(&net, server.parse().unwrap(), 8080, "/large.bin");
            assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"));
            assert!(answer.ends_with(&large()), "{server}: {} bytes", answer.len());
            let answer = fetch(&net, server.parse().unwrap(), 8080, "/none");
            assert!(answer.starts_with(b"HTTP/1.1 404"));
        }
    };
    site.server().enter(fetched).unwrap();
}

#[test]
fn go_asks_and_answers() {
    if !is_root("peer_go") || !have("peer_go", &["go"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("peer");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/peer.go");
    let mut build = std::process::Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(source);
    // The library takes half a minute to build; the next run finds it there.
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go");
    let output = build.env("GOCACHE", cache).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = program.to_str().unwrap();
    let site = Site::new(Kind::Xdp);
    let root = folder.path().to_str().unwrap();
    let server = site.serve(Kind::Xdp, &["http", "--root", root]);
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        site.tool(program, &["fetch", &format!("http://{host}/api/echo")]);
    }
    drop(server);
    let mut peer = Peer::start(&site, program, &["echo", ":7778"]);
    peer.wait_for_line();
    echo_is_right(&site, 7778);
}
