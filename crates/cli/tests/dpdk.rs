//! Two processes of Tidegate's joined by devices of DPDK's, without the kernel.

#![cfg(feature = "dpdk")]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{tidegate, zone};
use tidegate::port::dpdk::DpdkConfig;
use tidegate::{FrameSize, Net, NetConfig, TcpListener};
use tidegate_lab::netns::Namespace;

const SERVER: [(&str, &str); 2] = [("10.9.0.2", "10.9.0.1"), ("fd00:9::2", "fd00:9::1")];

/// A server on a device; killed on drop.
struct Server(Child);

impl Server {
    fn start(server: &[&str], device: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve").args(server).args(["--port", &format!("dpdk:{device}")]);
        command.args(["--address", "10.9.0.2/24", "--address", "fd00:9::2/64"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "the server said {line:?}");
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The arguments of a load over a device.
fn load(kind: &str, (server, source): (&str, &str), port: u16, device: &str) -> Vec<String> {
    let at = if server.contains(':') { format!("[{server}]") } else { server.to_owned() };
    let (target, port) = (format!("{at}:{port}"), format!("dpdk:{device}"));
    ["load", kind, &target, "--port", &port, "--source", source, "--seconds", "0.5", "--json"]
        .map(str::to_owned)
        .into()
}

fn run(arguments: &[String], more: &[&str]) -> Output {
    let all: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    tidegate(&all)
}

/// How many answers a load got, or what it said.
fn answers(output: &Output) -> Result<u64, String> {
    let report: Value = serde_json::from_slice(&output.stdout)
        .map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let count = report.get("answered").or(report.get("requests"));
    count.and_then(Value::as_u64).ok_or_else(|| report.to_string())
}

/// Both ends of a wire that nobody else has.
fn wire(name: &str) -> (tempfile::TempDir, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name).display().to_string();
    let memif = |role| format!("net_memif0,role={role},id=0,socket-abstract=no,socket={path}");
    (folder, memif("server"), memif("client"))
}

fn is_answered(kind: &str, port: u16, device: &str, more: &[&str]) {
    for addresses in SERVER {
        let output = run(&load(kind, addresses, port, device), more);
        let count =
            answers(&output).unwrap_or_else(|error| panic!("{kind} {addresses:?}: {error}"));
        assert!(count > 0, "{kind} {addresses:?}");
    }
}

#[test]
fn datagrams_streams_and_names_go_over_memif() {
    let (_folder, ours, theirs) = wire("services");
    let echo = Server::start(&["echo"], &ours);
    is_answered("udp", 7, &theirs, &["--bytes", "1400"]);
    drop(echo);
    let echo = Server::start(&["echo", "--tcp"], &ours);
    is_answered("tcp", 7, &theirs, &["--connections", "10", "--bytes", "3000"]);
    drop(echo);
    let queries = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(queries.path(), "www.example.test A\nalias.example.test AAAA\n").unwrap();
    let dns = Server::start(&["dns", "--zone", &zone()], &ours);
    is_answered("dns", 53, &theirs, &["--queries", queries.path().to_str().unwrap()]);
    drop(dns);
}

#[test]
fn a_client_that_dies_may_come_back() {
    let (_folder, ours, theirs) = wire("client");
    let _echo = Server::start(&["echo"], &ours);
    is_answered("udp", 7, &theirs, &[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let arguments = load("udp", SERVER[0], 7, &theirs);
    command.args(&arguments).args(["--seconds", "1000"]).stderr(Stdio::piped());
    let mut dies = command.stdout(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    // In the middle of the load: it has told of its first second.
    BufReader::new(dies.stderr.take().unwrap()).read_line(&mut line).unwrap();
    dies.kill().unwrap();
    dies.wait().unwrap();
    is_answered("udp", 7, &theirs, &[]);
}

/// The load has the memif's server, the server is its client.
#[test]
fn a_memif_server_that_dies_may_come_back() {
    let (_folder, theirs, ours) = wire("server");
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(load("udp", SERVER[0], 7, &theirs));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first = start();
    let path = ours.rsplit_once('=').unwrap().1.to_owned();
    while !std::path::Path::new(&path).exists() {}
    let _echo = Server::start(&["echo"], &ours);
    let count = answers(&first.wait_with_output().unwrap()).unwrap();
    assert!(count > 0);
    let count = answers(&start().wait_with_output().unwrap()).unwrap();
    assert!(count > 0, "the second server of the memif was not found");
}

/// As a virtual machine would be attached.
#[test]
fn a_guest_is_served_over_vhost_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vhost").display().to_string();
    let _echo = Server::start(&["echo"], &format!("net_vhost0,iface={path},queues=1"));
    let guest = format!("net_virtio_user0,path={path}");
    is_answered("udp", 7, &guest, &["--bytes", "1400"]);
    drop(_echo);
    let _echo = Server::start(&["echo", "--tcp"], &format!("net_vhost0,iface={path},queues=1"));
    is_answered("tcp", 7, &guest, &["--connections", "10", "--bytes", "3000"]);
}

/// What this end sends to the kernel, on one connection of each family. Of `net_tap` the
/// driver cuts on IPv4 only, and the kernel gets what it does not cut in one.
#[test]
fn a_device_cuts_what_a_stream_sends() {
    if !support::is_root("dpdk_segmentation") {
        return;
    }
    Namespace::new("cut").unwrap().enter(streams_through_a_device_that_cuts).unwrap();
}

fn streams_through_a_device_that_cuts() {
    let device: DpdkConfig = "net_tap_stream,iface=tgstream".parse().unwrap();
    let config = NetConfig::new(DpdkConfig { segmentation: true, ..device })
        .address("10.9.0.2/24".parse().unwrap())
        .address("fd00:9::2/64".parse().unwrap())
        .frames(512, FrameSize::K64)
        .hugepages(false);
    let net = Net::open(config).unwrap();
    assert!(net.capabilities().segmentation, "{}", net.capabilities().detail);
    for address in [&["10.9.0.1/24"][..], &["fd00:9::1/64", "nodad"]] {
        let mut ip = Command::new("ip");
        ip.args(["address", "add", "dev", "tgstream"]).args(address);
        assert!(ip.status().unwrap().success());
    }
    let data: Vec<u8> = (0..4_000_000_u32).map(|at| (at % 251) as u8).collect();
    let packets = || {
        let path = "/sys/class/net/tgstream/statistics/rx_packets";
        std::fs::read_to_string(path).unwrap().trim().parse::<usize>().unwrap()
    };
    let (v4, v6) = (SERVER[0].0, SERVER[1].0);
    // The kernel says which segments it takes, whole ones at first; none that small is cut.
    for (ip, segment_bytes) in [(v4, 1448), (v6, 1448), (v4, 520), (v6, 520), (v4, 248)] {
        if segment_bytes < 1448 {
            let largest = (segment_bytes + 12).to_string();
            let route = ["route", "replace", ip, "dev", "tgstream", "advmss", &largest];
            assert!(Command::new("ip").args(route).status().unwrap().success());
        }
        let address = SocketAddr::new(ip.parse().unwrap(), 7);
        let listener = TcpListener::bind(&net, address).unwrap();
        let given = || net.counters().port.transmitted as usize;
        let before = (given(), packets());
        let received = std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                let mut received = Vec::new();
                stream.read_to_end(&mut received).unwrap();
                received
            });
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.write_all(&data).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            // Until all of it has arrived somebody has to run the stack.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
            reader.join().unwrap()
        });
        assert!(received == data, "{} bytes came", received.len());
        let (given, came) = (given() - before.0, packets() - before.1);
        let segments = data.len() / segment_bytes;
        assert!(came >= segments || address.is_ipv6(), "{came} packets for {segments} segments");
        let is_cut = given * 2 < segments;
        assert_eq!(is_cut, segment_bytes >= 256, "{given} frames for {segments} segments");
    }
}

#[test]
fn a_wrong_port_says_what_to_do() {
    let fails = |device: &str, part: &str| {
        let port = format!("dpdk:{device}");
        let output = tidegate(&["serve", "echo", "--port", &port, "--address", "10.9.0.2/24"]);
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(part), "{device}: {error}");
    };
    fails("net_null0 --nonsense", "does not start with the arguments `--nonsense");
    fails("net_null0 --no-huge --in-memory", "--in-memory");
    fails("0000:ff:1f.7", "vfio-pci");
    let (_folder, ours, theirs) = wire("busy");
    let _echo = Server::start(&["echo"], &ours);
    fails(&ours, "in use");
    // Who has it notices nothing.
    is_answered("udp", 7, &theirs, &[]);
}

/// Not how much, but that every figure is there and can be one.
#[test]
fn the_lab_finds_every_figure() {
    if !support::have("lab_dpdk", &["dpdk-testpmd", "setpriv", "taskset"]) {
        return;
    }
    let output = tidegate(&["lab", "dpdk", "--quick", "--json", "-"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figure = |name: &str| result["figures"][name].as_f64().unwrap_or(f64::NAN);
    for name in ["testpmd_ratio_memif", "testpmd_ratio_ring", "echo_over_raw"] {
        assert!(figure(name) > 0.0, "{name}: {result}");
    }
    let lesser = figure("testpmd_ratio_memif").min(figure("testpmd_ratio_ring"));
    assert_eq!(figure("testpmd_ratio"), lesser);
    for name in ["tidegate_floor", "polled_floor"] {
        assert!((0.0..=1.0).contains(&figure(name)), "{name}: {result}");
    }
    assert!(figure("flood_over_capacity") > 1.0, "{result}");
    let rows = result["rows"].as_array().unwrap();
    for part in ["frames back", "flood", "services", "echo-1", "echo-2", "echo-3"] {
        assert!(rows.iter().any(|row| row["part"] == part), "no {part} in {result}");
    }
    for row in rows {
        assert!(row["part"] == "flood" || row["per_second"].as_f64() > Some(0.0), "{row}");
        assert!(row["lowest"].as_f64() <= row["highest"].as_f64(), "{row}");
        assert!(row["p50_us"].as_f64() <= row["p99_us"].as_f64(), "{row}");
    }
}
