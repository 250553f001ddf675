//! Unmodified programs that are attached to one daemon, with the kernel's tools on
//! the other side.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use support::run::{Daemon, Program, cores};
use support::{CLIENT_V4, CLIENT_V6, Kind, SERVER_V4, SERVER_V6, Site, can, is_root};

const SERVERS: [&str; 2] = [SERVER_V4, SERVER_V6];

const REDIS: [&str; 10] = [
    "redis-server",
    "--port",
    "6379",
    "--bind",
    "0.0.0.0",
    "::",
    "--protected-mode",
    "no",
    "--save",
    "",
];
const MEMCACHED: [&str; 9] =
    ["memcached", "-u", "root", "-p", "11211", "-l", "0.0.0.0,::", "-t", "2"];

fn redis_answers(site: &Site, address: &str) {
    let ask = |words: &[&str]| site.tool("redis-cli", &[&["-h", address], words].concat());
    assert_eq!(ask(&["set", "tide", "high"]), "OK\n");
    assert_eq!(ask(&["get", "tide"]), "high\n");
    let large = "x".repeat(100_000);
    assert_eq!(ask(&["set", "large", &large]), "OK\n");
    assert_eq!(ask(&["get", "large"]).trim_end(), large);
    let all = ["-h", address, "-n", "2000", "-c", "20", "-t", "get,set,lpush", "--csv"];
    assert_eq!(site.tool("redis-benchmark", &all).lines().count(), 4);
}

fn memcached_answers(site: &Site, address: &str) {
    let ask = format!(r"printf 'set k 0 0 4\r\nhigh\r\nget k\r\nquit\r\n' | nc {address} 11211");
    assert_eq!(site.tool("sh", &["-c", &ask]), "STORED\r\nVALUE k 0 4\r\nhigh\r\nEND\r\n");
}

/// How many programs are attached, and how many sockets they have.
fn attached(daemon: &Daemon<'_>) -> Vec<usize> {
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    apps.iter().map(|app| app["sockets"].as_array().unwrap().len()).collect()
}

#[test]
fn several_programs_share_a_daemon_and_come_and_go() {
    if !can("run_attached", &["redis-server", "redis-cli", "redis-benchmark", "memcached", "nc"]) {
        return;
    }
    for (kind, flags) in [(Kind::Xdp, ["--port", "xdp"]), (Kind::Packet, ["--port", "packet"])] {
        let site = Site::new(kind);
        let daemon = Daemon::start(&site, &flags);
        let redis = daemon.run_server(&REDIS, 6379);
        let memcached = daemon.run_server(&MEMCACHED, 11211);
        for address in SERVERS {
            redis_answers(&site, address);
            memcached_answers(&site, address);
        }
        assert_eq!(attached(&daemon).len(), 2 * cores());
        // One is killed: the other does not notice, and it can start again.
        drop(redis);
        SERVERS.iter().for_each(|address| memcached_answers(&site, address));
        let _redis = daemon.run_server(&REDIS, 6379);
        SERVERS.iter().for_each(|address| redis_answers(&site, address));
        drop(memcached);
        let began = std::time::Instant::now();
        while attached(&daemon).len() > cores() {
            assert!(began.elapsed() < Duration::from_secs(30));
        }
    }
}

/// Answers datagrams on a port of both families, by the name of the interface that they
/// came in by.
const NAMES: &str = "import socket
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
s.bind(('::', 5300))
while True:
    _, told, _, peer = s.recvmsg(2000, 100)
    interface = int.from_bytes(told[0][2][16:], 'little')
    s.sendto(socket.if_indextoname(interface).encode(), peer)";

#[test]
fn programs_live_on_the_kernels_addresses_by_a_daemon() {
    let needed = ["redis-server", "redis-cli", "redis-benchmark", "memcached", "nc", "python3"];
    if !can("run_attached_shared", &needed) {
        return;
    }
    let site = Site::shared();
    let daemon = Daemon::start_shared(&site, &[]);
    let redis = daemon.run_server(&REDIS, 6379);
    let _memcached = daemon.run_server(&MEMCACHED, 11211);
    let _names = Program::new(&mut daemon.run(&[], &["python3", "-c", NAMES]));
    for address in SERVERS {
        redis_answers(&site, address);
        memcached_answers(&site, address);
        let interface = site.device().as_bytes();
        let is_named = || {
            let own = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let socket = UdpSocket::bind(own).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut answer = [0; 16];
            // It may not have begun, and datagrams may be lost.
            (0..300).any(|_| {
                let _ = socket.send_to(b"hello", (address, 5300));
                let len = socket.recv(&mut answer).unwrap_or(0);
                &answer[..len] == interface
            })
        };
        assert!(site.client().enter(is_named).unwrap(), "{address}");
    }
    // The kernel has these ports too, but what came from the network was ours.
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    assert_eq!(apps.len(), 3);
    let bytes_in: u64 = apps.iter().map(|app| app["bytes_in"].as_u64().unwrap()).sum();
    assert!(bytes_in > 400_000, "{report}");
    let local = site.server().command("redis-cli").args(["-h", "127.0.0.1", "ping"]).output();
    assert_eq!(local.unwrap().stdout, b"PONG\n");
    // Its port is free again when it has ended.
    drop(redis);
    let _redis = daemon.run_server(&REDIS, 6379);
    SERVERS.iter().for_each(|address| redis_answers(&site, address));
    let _on_kernel = Program::new(site.client().command(REDIS[0]).args(&REDIS[1..]));
    for address in [CLIENT_V4, CLIENT_V6] {
        site.wait_for_port(address, 6379);
        let ask = ["redis-cli", "-h", address, "set", "tide", "high"];
        let output = daemon.run(&[], &ask).output().unwrap();
        assert_eq!(output.stdout, b"OK\n", "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn files_go_both_ways() {
    if !can("run_attached_files", &["nginx", "curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let large: Vec<u8> = (0..3_000_000).map(|n| (n % 251) as u8).collect();
    fs::write(folder.path().join("large"), &large).unwrap();
    let root = folder.path().to_str().unwrap();
    let config = format!(
        "daemon off; master_process off; pid {root}/pid; error_log {root}/error.log;
         events {{ worker_connections 256; }}
         http {{ access_log off; sendfile on; client_body_temp_path {root}/body;
         proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
         uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
         server {{ listen 8080; listen [::]:8080; root {root}; }} }}"
    );
    fs::write(folder.path().join("nginx.conf"), config).unwrap();
    let nginx = ["nginx", "-c", &format!("{root}/nginx.conf"), "-p", root].map(str::to_owned);
    let nginx: Vec<&str> = nginx.iter().map(String::as_str).collect();
    let _nginx = daemon.run_server(&nginx, 8080);
    let got = folder.path().join("got");
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        let url = format!("http://{host}:8080/large");
        let fetch = ["-sS", "--max-time", "30", "-o", got.to_str().unwrap(), &url];
        site.tool("curl", &fetch);
        assert!(fs::read(&got).unwrap() == large, "{host}");
        fs::remove_file(&got).unwrap();
    }
    // The other way: a client that is attached, and a server of the kernel's.
    let kernels = fs::read_to_string(folder.path().join("nginx.conf")).unwrap();
    let theirs = kernels.replace("8080", "8081").replace(&format!("{root}/pid"), "/dev/null");
    fs::write(folder.path().join("theirs.conf"), theirs).unwrap();
    let theirs = format!("{root}/theirs.conf");
    let mut command: Command = site.client().command("nginx");
    let _theirs = Program::new(command.args(["-c", &theirs, "-p", root]));
    for (address, host) in
        [(CLIENT_V4, CLIENT_V4.to_owned()), (CLIENT_V6, format!("[{CLIENT_V6}]"))]
    {
        site.wait_for_port(address, 8081);
        let url = format!("http://{host}:8081/large");
        let fetch = ["curl", "-sS", "--max-time", "30", "-o", got.to_str().unwrap(), &url];
        let output = daemon.run(&[], &fetch).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(fs::read(&got).unwrap() == large, "{host}");
        fs::remove_file(&got).unwrap();
    }
}

/// What `iperf3` says of a run, which must be no error. The server closes its listener
/// after each run and makes another one: who comes too early is refused, or reset with
/// the first one.
fn iperf3(site: &Site, all: &[&str]) {
    let began = std::time::Instant::now();
    loop {
        let report: serde_json::Value = serde_json::from_str(&site.tool("iperf3", all)).unwrap();
        let error = report["error"].as_str().unwrap_or_default();
        let is_early = ["Connection refused", "Connection reset by peer"];
        let is_early = is_early.iter().any(|end| error.ends_with(end));
        if is_early && began.elapsed() < Duration::from_secs(30) {
            continue;
        }
        return assert!(report["error"].is_null(), "{all:?}: {report}");
    }
}

#[test]
fn iperf3_moves_data_both_ways() {
    if !can("run_attached_iperf3", &["iperf3"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let _server = daemon.run_server(&["iperf3", "-s"], 5201);
    for address in SERVERS {
        // For UDP it binds a second socket to the port when the first is connected.
        for more in [&[][..], &["-R"], &["-u", "-b", "10M"], &["-u", "-b", "10M", "-R"]] {
            iperf3(&site, &[&["-c", address, "-n", "2M", "--json"], more].concat());
        }
    }
}

/// A server that sends a file that it opens for each request: what closes a
/// connection must not leave its descriptor's number behind.
const NODE: &str = "const http = require('http'), fs = require('fs');
    http.createServer((request, response) =>
        fs.createReadStream(process.argv[2] + request.url).pipe(response)).listen(8080, '::');";

#[test]
fn node_opens_files_where_connections_were() {
    if !can("run_attached_node", &["node", "ab"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let program = folder.path().join("serve.js");
    fs::write(&program, NODE).unwrap();
    fs::write(folder.path().join("page"), "tide\n".repeat(500)).unwrap();
    let _node = daemon.run_server(&["node", program.to_str().unwrap(), root], 8080);
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        let url = format!("http://{host}:8080/page");
        let said = site.tool("ab", &["-q", "-n", "500", "-c", "8", &url]);
        let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
        assert!(said.lines().any(is_zero), "{said}");
        assert!(said.contains("Complete requests:      500"), "{said}");
    }
}

#[test]
fn haproxy_passes_on_what_the_kernel_serves() {
    if !can("run_attached_haproxy", &["haproxy", "nginx", "curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let large: Vec<u8> = (0..1_000_000).map(|n| (n % 251) as u8).collect();
    fs::write(folder.path().join("large"), &large).unwrap();
    let config = format!(
        "daemon off; master_process off; user root; pid {root}/pid; error_log {root}/errors;
         events {{ }} http {{ access_log off;
         server {{ listen 9000; listen [::]:9000; root {root}; }} }}"
    );
    fs::write(folder.path().join("nginx.conf"), config).unwrap();
    let mut nginx: Command = site.client().command("nginx");
    let _nginx = Program::new(nginx.args(["-c", &format!("{root}/nginx.conf"), "-p", root]));
    for address in [CLIENT_V4, CLIENT_V6] {
        site.wait_for_port(address, 9000);
    }
    let proxy = format!(
        "global\n nbthread 2\ndefaults\n mode http\n timeout client 30s\n timeout server 30s\n\
         timeout connect 30s\nlisten four\n bind 0.0.0.0:8080\n server k {CLIENT_V4}:9000\n\
         listen six\n bind [::]:8080 v6only\n server k [{CLIENT_V6}]:9000\n"
    );
    let config = format!("{root}/haproxy.cfg");
    fs::write(&config, proxy).unwrap();
    let _haproxy = daemon.run_server(&["haproxy", "-db", "-f", &config], 8080);
    let got = folder.path().join("got");
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        let url = format!("http://{host}:8080/large");
        site.tool("curl", &["-sS", "--max-time", "30", "-o", got.to_str().unwrap(), &url]);
        assert!(fs::read(&got).unwrap() == large, "{host}");
        fs::remove_file(&got).unwrap();
    }
}

#[test]
fn nsd_answers_from_its_children() {
    if !can("run_attached_nsd", &["nsd", "kdig"]) {
        return;
    }
    for reuse_port in ["no", "yes"] {
        let site = Site::new(Kind::Xdp);
        let daemon = Daemon::start(&site, &[]);
        nsd_answers(&site, &daemon, reuse_port);
    }
}

/// Asks an NSD of two servers, which have a socket of each kind between them or one
/// each.
fn nsd_answers(site: &Site, daemon: &Daemon<'_>, reuse_port: &str) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let zone = "$ORIGIN example.com.\n$TTL 60\n@ SOA ns h 1 2 3 4 5\n@ NS ns\nns A 192.0.2.1\n";
    fs::write(folder.path().join("zone"), zone).unwrap();
    let config = format!(
        "server:\n ip-address: {SERVER_V4}\n ip-address: {SERVER_V6}\n username: root\n\
         database: \"\"\n zonesdir: \"{root}\"\n pidfile: \"{root}/pid\"\n\
         xfrdfile: \"{root}/xfrd\"\n zonelistfile: \"{root}/list\"\n xfrdir: \"{root}\"\n\
         server-count: 2\n reuseport: {reuse_port}\nremote-control:\n control-enable: no\n\
         zone:\n name: example.com\n zonefile: zone\n"
    );
    let file = format!("{root}/nsd.conf");
    fs::write(&file, config).unwrap();
    let _nsd = daemon.run_server(&["nsd", "-d", "-c", &file], 53);
    for address in SERVERS {
        let server = format!("@{address}");
        for more in [&["+notcp"][..], &["+tcp"]] {
            let ask = [&[&server, "ns.example.com", "A", "+short", "+timeout=10"], more].concat();
            // From so many ports that each server is asked.
            for _ in 0..10 {
                assert_eq!(site.tool("kdig", &ask), "192.0.2.1\n", "{address} {more:?}");
            }
        }
    }
    // It ends its children when it is asked to, not when it is killed.
    let pid = folder.path().join("pid");
    let number = fs::read_to_string(&pid).unwrap();
    site.server().command("kill").arg(number.trim()).status().unwrap();
    let began = std::time::Instant::now();
    while pid.exists() && began.elapsed() < Duration::from_secs(30) {}
}

#[test]
fn what_is_missing_is_said() {
    if !can("run_attached_errors", &["curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let fails = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let mut nobody = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    nobody.args(["run", "--socket", "/nonexistent/daemon.sock", "--", "curl", "--version"]);
    let said = fails(&mut nobody);
    assert!(said.contains("start one by `tidegate serve`"), "{said}");
    let said = fails(&mut daemon.run(&["--iface", "lo"], &["curl"]));
    assert!(said.contains("the daemon's"), "{said}");
    let mut second = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
    second.args(["serve", "--iface", site.device(), "--address", "192.0.2.77/24", "--socket"]);
    let said = fails(second.arg(daemon.socket()));
    assert!(said.contains("another daemon listens there"), "{said}");
}

#[test]
fn top_shows_what_every_program_does() {
    if !can("run_attached_top", &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    let site = Site::new(Kind::Packet);
    let daemon = Daemon::start(&site, &["--port", "packet"]);
    let _redis = daemon.run_server(&REDIS, 6379);
    let top = |flags: &[&str]| {
        let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["top", "--interval", "0.2", "--socket"]).arg(daemon.socket()).args(flags);
        command.stdout(std::process::Stdio::piped());
        command
    };
    // Rates are above 0 while there is load, whenever that comes.
    let mut child = top(&["--json"]).spawn().unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut seen = [false; 2];
    while seen != [true; 2] {
        redis_answers(&site, SERVER_V4);
        let mut line = String::new();
        assert!(std::io::BufRead::read_line(&mut lines, &mut line).unwrap() > 0, "it ended");
        let view: serde_json::Value = serde_json::from_str(&line).unwrap();
        let app = &view["applications"][0];
        seen[0] |= view["frames_in_per_s"].as_f64().unwrap() > 0.0;
        let rates = ["commands_per_s", "bytes_in_per_s", "bytes_out_per_s"];
        seen[1] |= rates.iter().all(|rate| app[rate].as_f64().unwrap() > 0.0);
        assert!(app["sockets"].as_u64().unwrap() > 0, "{view}");
        assert!(view["drops_per_s"].is_array() && view["busy_percent"].is_number(), "{view}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Without a terminal there are plain lines.
    let output = top(&["--once"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("busy"), "{text}");
    assert!(text.contains("PROGRAM") && text.contains("redis"), "{text}");
    let output = top(&["--once", "--interval", "0"]).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("--interval"), "{said}");
}

/// What a process may do: its sets of capabilities, and whether it can get more.
fn privileges(pid: u32) -> Vec<[String; 5]> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap();
        ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "NoNewPrivs:"].map(|name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_start_matches('0').to_owned()
        })
    };
    tasks.map(|task| of(task.unwrap())).collect()
}

/// An application that sends back what the first who comes says.
fn answers_one(daemon: &Daemon<'_>, site: &Site, address: &str, port: u16) {
    let net = tidegate::Net::attach(daemon.socket(), "test").unwrap();
    let address = std::net::SocketAddr::new(address.parse().unwrap(), port);
    let listener = tidegate::TcpListener::bind(&net, address).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut said = [0; 5];
            stream.read_exact(&mut said).unwrap();
            stream.write_all(&said).unwrap();
        });
        let talk = || {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(b"hello").unwrap();
            let mut said = Vec::new();
            stream.read_to_end(&mut said).unwrap();
            said
        };
        assert_eq!(site.client().enter(talk).unwrap(), b"hello", "{address}");
    });
}

#[test]
fn a_daemon_that_serves_has_given_up_what_it_needs_no_more() {
    if !is_root("run_attached_privileges") {
        return;
    }
    // NET_BIND_SERVICE is bit 10, NET_ADMIN 12, NET_RAW 13, IPC_LOCK 14, BPF 39.
    let kinds = [("xdp", false, "8000007000"), ("xdp", true, "8000007400"), ("packet", false, "")];
    for (port, shared, kept) in kinds {
        let site = if shared { Site::shared() } else { Site::new(Kind::Xdp) };
        let daemon = if shared {
            Daemon::start_shared(&site, &["--port", port])
        } else {
            Daemon::start(&site, &["--port", port])
        };
        let privileges = privileges(daemon.pid());
        assert!(privileges.len() >= 3, "the core, the door, and who started them");
        let expected = ["", kept, kept, kept, "1"].map(str::to_owned);
        assert!(privileges.iter().all(|sets| *sets == expected), "{port} {privileges:?}");
        // It serves all the same, also a port below 1024, and whoever comes later.
        for address in SERVERS {
            [379, 6379].into_iter().for_each(|port| answers_one(&daemon, &site, address, port));
        }
    }
}
