//! Unmodified applications attached to one daemon, with the kernel's tools on the client side.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit};
use support::run::{ChildProcess, Daemon, cores};
use support::{CLIENT_V4, CLIENT_V6, DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, is_root};

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

fn redis_answers(testbed: &Testbed, address: &str) {
    let request = |words: &[&str]| testbed.tool("redis-cli", &[&["-h", address], words].concat());
    assert_eq!(request(&["set", "tide", "high"]), "OK\n");
    assert_eq!(request(&["get", "tide"]), "high\n");
    let large = "x".repeat(100_000);
    assert_eq!(request(&["set", "large", &large]), "OK\n");
    assert_eq!(request(&["get", "large"]).trim_end(), large);
    let all = ["-h", address, "-n", "2000", "-c", "20", "-t", "get,set,lpush", "--csv"];
    assert_eq!(testbed.tool("redis-benchmark", &all).lines().count(), 4);
}

fn memcached_answers(testbed: &Testbed, address: &str) {
    let request =
        format!(r"printf 'set k 0 0 4\r\nhigh\r\nget k\r\nquit\r\n' | nc {address} 11211");
    assert_eq!(testbed.tool("sh", &["-c", &request]), "STORED\r\nVALUE k 0 4\r\nhigh\r\nEND\r\n");
}

/// Number of sockets of each attached application; the length is the number of attachments.
fn sockets_per_application(daemon: &Daemon<'_>) -> Vec<usize> {
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    apps.iter().map(|app| app["sockets"].as_array().unwrap().len()).collect()
}

/// Waits until so few attachments are left. The daemon accepts connections for a killed
/// application until it notices: a wait for the port could find the listener that goes.
fn wait_for_attachments(daemon: &Daemon<'_>, count: usize) {
    let began = Instant::now();
    while sockets_per_application(daemon).len() > count {
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn several_applications_share_a_daemon() {
    if !can_run(
        "run_attached",
        &["redis-server", "redis-cli", "redis-benchmark", "memcached", "nc"],
    ) {
        return;
    }
    for (kind, flags) in
        [(DeviceKind::Xdp, ["--io", "xdp"]), (DeviceKind::Packet, ["--io", "packet"])]
    {
        let testbed = Testbed::new(kind);
        let daemon = Daemon::start(&testbed, &flags);
        let redis = daemon.run_server(&REDIS, 6379);
        let memcached = daemon.run_server(&MEMCACHED, 11211);
        for address in SERVERS {
            redis_answers(&testbed, address);
            memcached_answers(&testbed, address);
        }
        assert_eq!(sockets_per_application(&daemon).len(), 2 * cores());
        // One application is killed: the other is unaffected, and the killed one can start again.
        drop(redis);
        wait_for_attachments(&daemon, cores());
        SERVERS.iter().for_each(|address| memcached_answers(&testbed, address));
        let _redis = daemon.run_server(&REDIS, 6379);
        SERVERS.iter().for_each(|address| redis_answers(&testbed, address));
        drop(memcached);
        wait_for_attachments(&daemon, cores());
    }
}

/// UDP server on both families that replies with the name of the interface on which the
/// datagram arrived.
const INTERFACE_NAME_SERVER: &str = "import socket
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
s.bind(('::', 5300))
while True:
    _, control, _, peer = s.recvmsg(2000, 100)
    interface = int.from_bytes(control[0][2][16:], 'little')
    s.sendto(socket.if_indextoname(interface).encode(), peer)";

#[test]
fn daemon_serves_on_shared_addresses() {
    let needed = ["redis-server", "redis-cli", "redis-benchmark", "memcached", "nc", "python3"];
    if !can_run("run_attached_shared", &needed) {
        return;
    }
    let testbed = Testbed::shared();
    let daemon = Daemon::start_shared(&testbed, &[]);
    let redis = daemon.run_server(&REDIS, 6379);
    let _memcached = daemon.run_server(&MEMCACHED, 11211);
    let _names = ChildProcess::new(&mut daemon.run(&[], &["python3", "-c", INTERFACE_NAME_SERVER]));
    for address in SERVERS {
        redis_answers(&testbed, address);
        memcached_answers(&testbed, address);
        let interface = testbed.device().as_bytes();
        let is_named = || {
            let own = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let socket = UdpSocket::bind(own).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut answer = [0; 16];
            // The server may not have started yet, and datagrams may be lost.
            (0..300).any(|_| {
                let _ = socket.send_to(b"hello", (address, 5300));
                let len = socket.recv(&mut answer).unwrap_or(0);
                &answer[..len] == interface
            })
        };
        assert!(testbed.client().enter(is_named).unwrap(), "{address}");
    }
    // The kernel has bound these ports too, but traffic from the network went through Tidegate.
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    assert_eq!(apps.len(), 3);
    let bytes_in: u64 = apps.iter().map(|app| app["bytes_in"].as_u64().unwrap()).sum();
    assert!(bytes_in > 400_000, "{report}");
    let local = testbed.server().command("redis-cli").args(["-h", "127.0.0.1", "ping"]).output();
    assert_eq!(local.unwrap().stdout, b"PONG\n");
    // The port is free again after its application has exited.
    drop(redis);
    wait_for_attachments(&daemon, 2);
    let _redis = daemon.run_server(&REDIS, 6379);
    SERVERS.iter().for_each(|address| redis_answers(&testbed, address));
    let _on_kernel = ChildProcess::new(testbed.client().command(REDIS[0]).args(&REDIS[1..]));
    for address in [CLIENT_V4, CLIENT_V6] {
        testbed.wait_for_port(address, 6379);
        let request = ["redis-cli", "-h", address, "set", "tide", "high"];
        let output = daemon.run(&[], &request).output().unwrap();
        assert_eq!(output.stdout, b"OK\n", "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn transfers_files_in_both_directions() {
    if !can_run("run_attached_files", &["nginx", "curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
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
        testbed.tool("curl", &fetch);
        assert!(fs::read(&got).unwrap() == large, "{host}");
        fs::remove_file(&got).unwrap();
    }
    // The other direction: an attached client and a server on kernel sockets.
    let own_config = fs::read_to_string(folder.path().join("nginx.conf")).unwrap();
    let kernel_config =
        own_config.replace("8080", "8081").replace(&format!("{root}/pid"), "/dev/null");
    fs::write(folder.path().join("theirs.conf"), kernel_config).unwrap();
    let kernel_config = format!("{root}/theirs.conf");
    let mut command: Command = testbed.client().command("nginx");
    let _kernel_nginx = ChildProcess::new(command.args(["-c", &kernel_config, "-p", root]));
    for (address, host) in
        [(CLIENT_V4, CLIENT_V4.to_owned()), (CLIENT_V6, format!("[{CLIENT_V6}]"))]
    {
        testbed.wait_for_port(address, 8081);
        let url = format!("http://{host}:8081/large");
        let fetch = ["curl", "-sS", "--max-time", "30", "-o", got.to_str().unwrap(), &url];
        let output = daemon.run(&[], &fetch).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(fs::read(&got).unwrap() == large, "{host}");
        fs::remove_file(&got).unwrap();
    }
}

/// Runs an `iperf3` client, which must report no error. The server closes its listener after
/// each run and opens a new one: a client that connects in between is refused, reset or told to
/// try later, and retries.
fn iperf3(testbed: &Testbed, all: &[&str]) {
    let began = Instant::now();
    loop {
        let report: serde_json::Value = serde_json::from_str(&testbed.tool("iperf3", all)).unwrap();
        let error = report["error"].as_str().unwrap_or_default();
        let is_early = ["Connection refused", "Connection reset by peer", "try again later"];
        let is_early = is_early.iter().any(|end| error.ends_with(end));
        if is_early && began.elapsed() < Duration::from_secs(30) {
            continue;
        }
        return assert!(report["error"].is_null(), "{all:?}: {report}");
    }
}

#[test]
fn iperf3_moves_data_both_ways() {
    if !can_run("run_attached_iperf3", &["iperf3"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let _server = daemon.run_server(&["iperf3", "-s"], 5201);
    for address in SERVERS {
        // For UDP, iperf3 binds a second socket to the port once the first is connected.
        for more in [&[][..], &["-R"], &["-u", "-b", "10M"], &["-u", "-b", "10M", "-R"]] {
            iperf3(&testbed, &[&["-c", address, "-n", "2M", "--json"], more].concat());
        }
    }
}

/// HTTP server that opens and sends a file for each request: a closed connection must not
/// leave its descriptor number registered as a socket.
const NODE: &str = "const http = require('http'), fs = require('fs');
    http.createServer((request, response) =>
        fs.createReadStream(process.argv[2] + request.url).pipe(response)).listen(8080, '::');";

#[test]
fn node_reuses_descriptors_of_closed_connections() {
    if !can_run("run_attached_node", &["node", "ab"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let program = folder.path().join("serve.js");
    fs::write(&program, NODE).unwrap();
    fs::write(folder.path().join("page"), "tide\n".repeat(500)).unwrap();
    let _node = daemon.run_server(&["node", program.to_str().unwrap(), root], 8080);
    for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
        let url = format!("http://{host}:8080/page");
        let printed = testbed.tool("ab", &["-q", "-n", "500", "-c", "8", &url]);
        let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
        assert!(printed.lines().any(is_zero), "{printed}");
        assert!(printed.contains("Complete requests:      500"), "{printed}");
    }
}

#[test]
fn haproxy_forwards_to_kernel_servers() {
    if !can_run("run_attached_haproxy", &["haproxy", "nginx", "curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
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
    let mut nginx: Command = testbed.client().command("nginx");
    let _nginx = ChildProcess::new(nginx.args(["-c", &format!("{root}/nginx.conf"), "-p", root]));
    for address in [CLIENT_V4, CLIENT_V6] {
        testbed.wait_for_port(address, 9000);
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
        testbed.tool("curl", &["-sS", "--max-time", "30", "-o", got.to_str().unwrap(), &url]);
        assert!(fs::read(&got).unwrap() == large, "{host}");
        fs::remove_file(&got).unwrap();
    }
}

#[test]
fn nsd_answers_from_its_children() {
    if !can_run("run_attached_nsd", &["nsd", "kdig"]) {
        return;
    }
    for reuse_port in ["no", "yes"] {
        let testbed = Testbed::new(DeviceKind::Xdp);
        let daemon = Daemon::start(&testbed, &[]);
        check_nsd(&testbed, &daemon, reuse_port);
    }
}

/// Queries an NSD with two server processes, which share the sockets or have their own
/// (`reuseport`).
fn check_nsd(testbed: &Testbed, daemon: &Daemon<'_>, reuse_port: &str) {
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
            let request =
                [&[&server, "ns.example.com", "A", "+short", "+timeout=10"], more].concat();
            // Enough source ports that each server process is queried.
            for _ in 0..10 {
                assert_eq!(testbed.tool("kdig", &request), "192.0.2.1\n", "{address} {more:?}");
            }
        }
    }
    // NSD ends its children on SIGTERM, not on SIGKILL.
    let pid = folder.path().join("pid");
    let number = fs::read_to_string(&pid).unwrap();
    testbed.server().command("kill").arg(number.trim()).status().unwrap();
    let began = Instant::now();
    while pid.exists() && began.elapsed() < Duration::from_secs(30) {}
}

/// A program that gives up its user before it listens is told why the daemon refuses it.
#[test]
fn refusal_names_the_group_that_may_attach() {
    if !can_run("run_attached_group", &["python3"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let listens = |daemon: &Daemon<'_>| {
        let script = "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534); \
                      socket.create_server(('', 7000))";
        let output = daemon.run(&[], &["python3", "-c", script]).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (succeeds, printed) = listens(&Daemon::start(&testbed, &[]));
    assert!(!succeeds && printed.contains("Network is down"), "{printed}");
    assert!(printed.contains("runs as user 65534 with group 65534"), "{printed}");
    assert!(printed.contains("`--socket-group 65534`"), "{printed}");
    let (succeeds, printed) = listens(&Daemon::start(&testbed, &["--socket-group", "65534"]));
    assert!(succeeds && printed.contains("now uses Tidegate"), "{printed}");
}

#[test]
fn reports_missing_daemon_and_conflicts() {
    if !can_run("run_attached_errors", &["curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let fails = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let mut without_daemon = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    without_daemon.args(["run", "--socket", "/nonexistent/daemon.sock", "--", "curl", "--version"]);
    let printed = fails(&mut without_daemon);
    assert!(printed.contains("start one with `tidegate daemon`"), "{printed}");
    let printed = fails(&mut daemon.run(&["--iface", "lo"], &["curl"]));
    assert!(printed.contains("the daemon's"), "{printed}");
    let mut second = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    second.args(["daemon", "--iface", testbed.device(), "--address", "192.0.2.77/24", "--socket"]);
    let printed = fails(second.arg(daemon.socket()));
    assert!(printed.contains("another daemon listens there"), "{printed}");
}

#[test]
fn top_shows_the_rates_of_every_application() {
    if !can_run("run_attached_top", &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let daemon = Daemon::start(&testbed, &["--io", "packet"]);
    let _redis = daemon.run_server(&REDIS, 6379);
    let top = |flags: &[&str]| {
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["top", "--interval", "0.2", "--socket"]).arg(daemon.socket()).args(flags);
        command.stdout(std::process::Stdio::piped());
        command
    };
    // Rates are above 0 only while there is load, so the load repeats until they are.
    let mut child = top(&["--json"]).spawn().unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut seen = [false; 2];
    while seen != [true; 2] {
        redis_answers(&testbed, SERVER_V4);
        let mut line = String::new();
        assert!(
            std::io::BufRead::read_line(&mut lines, &mut line).unwrap() > 0,
            "tidegate top exited"
        );
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
    // Without a terminal, top prints plain lines.
    let output = top(&["--once"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("busy"), "{text}");
    assert!(text.contains("PROGRAM") && text.contains("redis"), "{text}");
    let output = top(&["--once", "--interval", "0"]).output().unwrap();
    assert!(!output.status.success());
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(printed.contains("--interval"), "{printed}");
}

/// For each thread: its capability sets and the no-new-privileges flag.
fn thread_privileges(pid: u32) -> Vec<[String; 5]> {
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

/// Application that accepts one connection and echoes five bytes.
fn serve_one_echo(daemon: &Daemon<'_>, testbed: &Testbed, address: &str, port: u16) {
    let net = tidegate::Net::attach(daemon.socket(), "test").unwrap();
    let address = std::net::SocketAddr::new(address.parse().unwrap(), port);
    let listener = tidegate::TcpListener::bind(&net, address).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = [0; 5];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        });
        let talk = || {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(b"hello").unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            received
        };
        assert_eq!(testbed.client().enter(talk).unwrap(), b"hello", "{address}");
    });
}

/// Processor time of a process so far.
fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(1000 * ticks / rustix::param::clock_ticks_per_second())
}

/// The daemon has no descriptor for one more application: it serves the others and does not spin,
/// and the application attaches when there are descriptors again.
#[test]
fn daemon_without_descriptors_serves_on_and_lets_attach_later() {
    if !can_run("run_attached_descriptors", &["redis-server", "redis-cli", "redis-benchmark"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &["--io", "packet"]);
    let _redis = daemon.run_server(&REDIS, 6379);
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32);
    let limit = |current| {
        let limit = rustix::process::getrlimit(Resource::Nofile);
        rustix::process::prlimit(pid, Resource::Nofile, Rlimit { current, ..limit }).unwrap()
    };
    // No number is free below the limit.
    let usual = limit(Some(3));
    let mut ss = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    let mut ss = ss.args(["ss", "--socket"]).arg(daemon.socket()).spawn().unwrap();
    let (began, used) = (Instant::now(), cpu_time(daemon.pid()));
    while began.elapsed() < Duration::from_secs(1) {
        assert_eq!(testbed.tool("redis-cli", &["-h", SERVER_V4, "ping"]), "PONG\n");
        std::thread::sleep(Duration::from_millis(50));
    }
    let used = cpu_time(daemon.pid()) - used;
    assert!(used < began.elapsed() / 2, "{used:?} of {:?}", began.elapsed());
    assert!(ss.try_wait().unwrap().is_none(), "it waits for the daemon");
    limit(usual.current);
    assert!(ss.wait().unwrap().success());
    redis_answers(&testbed, SERVER_V4);
}

#[test]
fn daemon_drops_unneeded_capabilities() {
    if !is_root("run_attached_privileges") {
        return;
    }
    // NET_BIND_SERVICE is bit 10, NET_ADMIN 12, NET_RAW 13, IPC_LOCK 14, SYS_NICE 23, BPF 39.
    let kinds =
        [("xdp", false, "8000807000"), ("xdp", true, "8000807400"), ("packet", false, "800000")];
    for (io, shared, kept) in kinds {
        let testbed = if shared { Testbed::shared() } else { Testbed::new(DeviceKind::Xdp) };
        let daemon = if shared {
            Daemon::start_shared(&testbed, &["--io", io])
        } else {
            Daemon::start(&testbed, &["--io", io])
        };
        let privileges = thread_privileges(daemon.pid());
        assert!(privileges.len() >= 3, "network core, attach listener and main thread");
        let expected = ["", kept, kept, kept, "1"].map(str::to_owned);
        assert!(privileges.iter().all(|sets| *sets == expected), "{io} {privileges:?}");
        // The daemon still serves: ports below 1024, and applications that attach later.
        for address in SERVERS {
            [379, 6379]
                .into_iter()
                .for_each(|port| serve_one_echo(&daemon, &testbed, address, port));
        }
    }
}
