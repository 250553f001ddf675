//! A daemon with several network cores, and programs that go from one to another
//! while they serve.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::run::Daemon;
use support::{Kind, SERVER_V4, SERVER_V6, Site, can};

const REDIS: [&str; 8] =
    ["redis-server", "--save", "", "--protected-mode", "no", "--bind", "0.0.0.0", "::"];

const LIMIT: Duration = Duration::from_secs(60);

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}: {out}{err}", output.status)
}

/// `tidegate ctl` of a daemon.
fn ctl(site: &Site, control: &Path, arguments: &[&str]) -> Output {
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("ctl").arg(control).args(arguments).output().unwrap()
}

/// The process and the core of each program of this name, for each core that it has a
/// line to.
fn programs(daemon: &Daemon<'_>, name: &str) -> Vec<(u64, u64)> {
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    let is_it = |app: &&Value| app["identity"]["name"].as_str().unwrap().contains(name);
    let place = |app: &Value| (app["identity"]["pid"].as_u64(), app["core"].as_u64());
    let places = apps.iter().filter(is_it).map(place);
    places.map(|(pid, core)| (pid.unwrap(), core.unwrap())).collect()
}

fn move_and_wait(daemon: &Daemon<'_>, site: &Site, control: &Path, name: &str, core: u64) {
    let pid = programs(daemon, name)[0].0;
    let (pid, to) = (pid.to_string(), core.to_string());
    let began = Instant::now();
    loop {
        // A core that is busy gives some away again.
        let moved = ctl(site, control, &["--move", &pid, "--to", &to]);
        assert!(moved.status.success(), "{}", said(&moved));
        if programs(daemon, name).iter().all(|(_, at)| *at == core) {
            return;
        }
        assert!(began.elapsed() < LIMIT, "{name} does not arrive at core {core}");
    }
}

fn benchmark(site: &Site, host: &str) -> Command {
    let mut command = site.client().command("redis-benchmark");
    command.args(["-h", host, "-c", "20", "-n", "8000", "-q", "-t", "set,get,lrange_100"]);
    command
}

#[test]
fn programs_move_between_cores_while_they_serve() {
    if !can("cores", &["redis-server", "redis-benchmark", "memcached", "nc"]) {
        return;
    }
    for port in ["xdp", "packet"] {
        let site = Site::new(if port == "xdp" { Kind::Xdp } else { Kind::Packet });
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let flags = ["--port", port, "--cores", "2", "--control", control.to_str().unwrap()];
        let daemon = Daemon::start(&site, &flags);
        let _redis = daemon.run_server(&REDIS, 6379);
        let _memcached =
            daemon.run_server(&["memcached", "-u", "root", "-l", "0.0.0.0,::", "-U", "0"], 11211);
        for name in ["redis", "memcached"] {
            let cores: BTreeSet<u64> = programs(&daemon, name).iter().map(|it| it.1).collect();
            assert_eq!(cores.len(), 2, "{name} is on both cores");
        }
        for host in [SERVER_V4, SERVER_V6] {
            let mut load = benchmark(&site, host);
            let load = load.stdout(Stdio::piped());
            let mut load = load.stderr(Stdio::piped()).spawn().unwrap();
            let mut moves = 0;
            while load.try_wait().unwrap().is_none() {
                move_and_wait(&daemon, &site, &control, "redis", moves % 2);
                moves += 1;
            }
            let output = load.wait_with_output().unwrap();
            let text = said(&output);
            assert!(output.status.success() && text.contains("requests per second"), "{text}");
            assert!(!text.contains("rror"), "{text}");
            assert!(moves >= 2, "it was over before anybody moved");
        }
        // Receive scheduling is the same on all cores, and is changed on all.
        let shown = ctl(&site, &control, &["receive-quota=7", "--json"]);
        let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!(shown["gate"]["settings"]["receive-quota"], 7, "{shown}");
        let pid = programs(&daemon, "redis")[0].0;
        let nowhere = ctl(&site, &control, &["--move", &pid.to_string(), "--to", "2"]);
        assert!(said(&nowhere).contains("they are 0 to 1"), "{}", said(&nowhere));
    }
}

/// A server on a port that it shares, for both families and both protocols: it says who
/// it is before what it has heard.
const SHARER: &str = r#"
import os, selectors, socket
own = b"%d " % os.getpid()
ready = selectors.DefaultSelector()
def bind(family, kind, address):
    s = socket.socket(family, kind)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind((address, 7007))
    if kind == socket.SOCK_STREAM:
        s.listen(64)
    ready.register(s, selectors.EVENT_READ, kind == socket.SOCK_STREAM)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    bind(socket.AF_INET, kind, "0.0.0.0")
    bind(socket.AF_INET6, kind, "::")
while True:
    for key, _ in ready.select():
        s = key.fileobj
        if key.data is True:
            ready.register(s.accept()[0], selectors.EVENT_READ)
        elif key.data is False:
            data, peer = s.recvfrom(2048)
            s.sendto(own + data, peer)
        elif data := s.recv(2048):
            s.sendall(own + data)
        else:
            ready.unregister(s)
            s.close()
"#;

/// Its clients: new ones all the time, and some that stay with whom they have.
const SHARER_CLIENT: &str = r#"
import socket, sys
address, rounds = (sys.argv[1], 7007), int(sys.argv[2])
def connect():
    s = socket.create_connection(address, timeout=20)
    return s, talk(s, b"hello")
def talk(s, what):
    s.sendall(what)
    got = b""
    while not got.endswith(b" " + what):
        more = s.recv(2048)
        assert more, "it ended after %r" % got
        got += more
    return got.split()[0]
family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
lasting = [connect() for _ in range(8)]
streams, datagrams = set(), set()
for n in range(rounds):
    s, who = connect()
    streams.add(who)
    s.close()
    s, who = lasting[n % len(lasting)]
    assert talk(s, b"%d" % n) == who, "another one has the connection"
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        s.sendto(b"%d" % n, address)
        got, _ = s.recvfrom(2048)
        assert got.endswith(b" %d" % n), got
        datagrams.add(got.split()[0])
print(len(streams), len(datagrams))
"#;

#[test]
fn a_port_that_programs_share_is_on_several_cores() {
    if !can("cores", &["python3", "nc"]) {
        return;
    }
    for port in ["xdp", "packet"] {
        let site = Site::new(if port == "xdp" { Kind::Xdp } else { Kind::Packet });
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let flags = ["--port", port, "--cores", "2", "--control", control.to_str().unwrap()];
        let daemon = Daemon::start(&site, &flags);
        let server = || daemon.run_server(&["python3", "-c", SHARER], 7007);
        let _servers = [server(), server(), server()];
        let began = Instant::now();
        while programs(&daemon, "python").len() < 3 {
            assert!(began.elapsed() < LIMIT, "the servers do not come in");
        }
        let all = programs(&daemon, "python");
        let apart: BTreeSet<_> = all.into_iter().map(|(_, core)| core).collect();
        assert_eq!(apart.len(), 2, "they are on both cores");
        for host in [SERVER_V4, SERVER_V6] {
            let mut client = site.client().command("python3");
            client.args(["-c", SHARER_CLIENT, host, "300"]);
            let client = client.stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut client = client.spawn().unwrap();
            let mut moves = 0;
            while client.try_wait().unwrap().is_none() {
                let all = programs(&daemon, "python");
                let (pid, core) = all[moves % all.len()];
                let (pid, to) = (pid.to_string(), (1 - core).to_string());
                let moved = ctl(&site, &control, &["--move", &pid, "--to", &to]);
                assert!(moved.status.success(), "{}", said(&moved));
                moves += 1;
            }
            let output = client.wait_with_output().unwrap();
            assert!(output.status.success(), "after {moves} moves: {}", said(&output));
            assert!(said(&output).contains("3 3"), "all are reached: {}", said(&output));
            assert!(moves >= 2, "it was over before anybody moved");
        }
    }
}

#[test]
fn several_cores_need_an_address_of_their_own() {
    if !can("cores", &[]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let folder = tempfile::tempdir().unwrap();
    command.args(["serve", "--cores", "1-2", "--shared", "--iface", site.device(), "--socket"]);
    let refused = command.arg(folder.path().join("daemon.sock")).output().unwrap();
    assert!(said(&refused).contains("one network core"), "{}", said(&refused));
}
