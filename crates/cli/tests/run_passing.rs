//! Unmodified programs that hand sockets to other processes, attached to a daemon,
//! with the kernel's tools on the other side.

mod support;

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use support::run::{Daemon, Program, cores};
use support::{Kind, SERVER_V4, SERVER_V6, Site, can, wait_until};

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Whether a process has ended, even if nobody has asked how.
fn has_ended(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.is_empty() || status.contains(") Z ")
}

/// How an URL of the server's begins, by both families.
fn servers() -> [String; 2] {
    [format!("http://{SERVER_V4}"), format!("http://[{SERVER_V6}]")]
}

/// All requests of a load were answered.
fn assert_complete(load: &str, requests: u32) {
    let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
    assert!(load.lines().any(is_zero), "{load}");
    assert!(load.contains(&format!("Complete requests:      {requests}\n")), "{load}");
    assert!(!load.contains("Non-2xx"), "{load}");
}

/// Takes a listener, a socket for datagrams and then connections over a Unix socket,
/// and serves from them.
const TAKER: &str = r#"
import os, socket, sys, threading

unix = socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1])
unix.listen()
sender, _ = unix.accept()

def serve(connection):
    data = b""
    while piece := connection.recv(1000):
        data += piece
    connection.sendall(b"taker " + data)
    connection.close()

def accept(listener):
    while True:
        serve(listener.accept()[0])

def datagrams(udp):
    while True:
        data, peer = udp.recvfrom(2000)
        udp.sendto(b"taker " + data, peer)

_, (listener, udp), _, _ = socket.recv_fds(sender, 100, 4)
threading.Thread(target=accept, args=[socket.socket(fileno=listener)], daemon=True).start()
threading.Thread(target=datagrams, args=[socket.socket(fileno=udp)], daemon=True).start()
while True:
    _, descriptors, _, _ = socket.recv_fds(sender, 100, 4)
    for descriptor in descriptors:
        serve(socket.socket(fileno=descriptor))
"#;

/// Has what [`TAKER`] takes, and closes it. Of each connection it reads a little.
const SENDER: &str = r#"
import socket, sys

def dual(kind, port):
    one = socket.socket(socket.AF_INET6, kind)
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    one.bind(("::", port))
    return one

listener, udp = dual(socket.SOCK_STREAM, 7200), dual(socket.SOCK_DGRAM, 7200)
listener.listen()
taker = socket.socket(socket.AF_UNIX)
taker.connect(sys.argv[1])
socket.send_fds(taker, [b"both"], [listener.fileno(), udp.fileno()])
listener.close()
udp.close()
own = dual(socket.SOCK_STREAM, 7201)
own.listen()
while True:
    connection, _ = own.accept()
    assert connection.recv(2) in (b"", b"--")
    socket.send_fds(taker, [b"one"], [connection.fileno()])
    connection.close()
"#;

#[test]
fn sockets_arrive_over_a_unix_socket() {
    if !can("run_passing_python", &["python3", "nc"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("unix");
    let path = path.to_str().unwrap();
    let taker = Program::new(&mut daemon.run(&[], &["python3", "-c", TAKER, path]));
    wait_until("the taker is there", || Path::new(path).exists());
    let sender = daemon.run_server(&["python3", "-c", SENDER, path], 7201);
    let large = "x".repeat(20_000);
    for address in [SERVER_V4, SERVER_V6] {
        for n in 0..5 {
            for (port, flags) in [(7200, "-N"), (7201, "-N"), (7200, "-u -W 1")] {
                let data = format!("hello {n}");
                let first = if port == 7201 { "--" } else { "" };
                let nc = format!("printf '%s' '{first}{data}' | nc {flags} -w 30 {address} {port}");
                let said = site.tool("sh", &["-c", &nc]);
                assert_eq!(said, format!("taker {data}"), "{address} {port} {flags}");
            }
        }
        let nc = format!("printf '%s' '--{large}' | nc -N -w 30 {address} 7201");
        assert!(site.tool("sh", &["-c", &nc]) == format!("taker {large}"));
    }
    // What was handed on stays when its sender has gone.
    drop(sender);
    let nc = format!("printf after | nc -N -w 30 {SERVER_V4} 7200");
    assert_eq!(site.tool("sh", &["-c", &nc]), "taker after");
    drop(taker);
    let applications = || daemon.sockets()["applications"].as_array().unwrap().len();
    wait_until("nobody is there", || applications() == 0);
}

/// A server of two workers, which a primary gives connections to, or the socket to
/// listen on.
const CLUSTER: &str = r#"
const cluster = require('cluster'), http = require('http');
if (process.argv[2] === 'none') cluster.schedulingPolicy = cluster.SCHED_NONE;
if (cluster.isPrimary) {
  for (let n = 0; n < 2; n++) cluster.fork();
} else {
  http.createServer((_, answer) => answer.end(`worker ${cluster.worker.id}\n`)).listen(8080, '::');
}
"#;

#[test]
fn node_serves_from_the_workers_of_a_cluster() {
    if !can("run_passing_node", &["node", "curl", "ab"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("cluster.js");
    fs::write(&program, CLUSTER).unwrap();
    for policy in ["round robin", "none"] {
        let _node = daemon.run_server(&["node", program.to_str().unwrap(), policy], 8080);
        for server in servers() {
            let url = format!("{server}:8080/");
            let mut workers = HashSet::new();
            wait_until("both workers have answered", || {
                // Several at once: else the quicker one takes them all.
                let four = ["-sS", "--max-time", "30", "-Z", &url, &url, &url, &url];
                let said = site.tool("curl", &four);
                assert_eq!(said.lines().filter(|line| line.starts_with("worker ")).count(), 4);
                workers.extend(said.lines().map(str::to_owned));
                workers.len() == 2
            });
            let load = site.tool("ab", &["-q", "-n", "1000", "-c", "4", &url]);
            assert_complete(&load, 1000);
        }
    }
}

/// A socket that is bound, and that three processes then listen on: the parent, a child,
/// and one that gets it over a Unix socket.
const LATE: &str = r#"
import os, socket

bound = socket.socket(socket.AF_INET6)
bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
bound.bind(("::", 7400))
here, there = socket.socketpair()

def serve(listener, name):
    listener.listen()
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            # The daemon has ended.
            os._exit(0)
        connection.sendall(name + b"\n")
        connection.close()

if os.fork() == 0:
    serve(bound, b"child")
if os.fork() == 0:
    bound.close()
    _, (descriptor,), _, _ = socket.recv_fds(there, 1, 1)
    serve(socket.socket(fileno=descriptor), b"taker")
socket.send_fds(here, [b"x"], [bound.fileno()])
serve(bound, b"parent")
"#;

#[test]
fn who_has_a_bound_socket_can_listen_on_it() {
    if !can("run_passing_late", &["python3", "nc"]) {
        return;
    }
    for is_shared in [false, true] {
        let site = if is_shared { Site::shared() } else { Site::new(Kind::Xdp) };
        let daemon = match is_shared {
            true => Daemon::start_shared(&site, &[]),
            false => Daemon::start(&site, &["--cores", "2"]),
        };
        let _python = daemon.run_server(&["python3", "-c", LATE], 7400);
        for address in [SERVER_V4, SERVER_V6] {
            let mut served = HashSet::new();
            wait_until("all three have served", || {
                let nc = format!("nc -w 30 {address} 7400 < /dev/null & ");
                let said = site.tool("sh", &["-c", &format!("{}wait", nc.repeat(6))]);
                assert_eq!(said.lines().count(), 6, "{said}");
                served.extend(said.lines().map(str::to_owned));
                served.len() == 3
            });
        }
    }
}

/// haproxy's master ends when it is asked to, with its workers.
struct Haproxy<'s> {
    site: &'s Site,
    pid: String,
    _program: Program,
}

impl Haproxy<'_> {
    fn signal(&self, signal: &str) {
        let sent = self.site.server().command("kill").args([signal, &self.pid]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Haproxy<'_> {
    fn drop(&mut self) {
        self.signal("-TERM");
        let began = Instant::now();
        while !has_ended(&self.pid) && began.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn haproxy_reloads_under_load_with_the_listeners_of_before() {
    if !can("run_passing_haproxy", &["haproxy", "ab", "curl"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let config = format!(
        "global\n stats socket {root}/stats mode 600 level admin expose-fd listeners\n\
         defaults\n mode http\n timeout client 10s\n timeout server 10s\n timeout connect 10s\n\
         frontend web\n bind 0.0.0.0:8080\n bind :::8080 v6only\n\
         http-request return status 200 content-type text/plain string \"page\"\n"
    );
    let file = format!("{root}/haproxy.cfg");
    fs::write(&file, config).unwrap();
    let pid_file = folder.path().join("pid");
    let pid_path = pid_file.to_str().unwrap();
    let program = ["haproxy", "-W", "-f", &file, "-p", pid_path];
    let program = daemon.run_server(&program, 8080);
    wait_until("the master has written who it is", || {
        fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n'))
    });
    let pid = fs::read_to_string(&pid_file).unwrap().trim().to_owned();
    let haproxy = Haproxy { site: &site, pid, _program: program };
    let workers = || {
        let children = format!("/proc/{0}/task/{0}/children", haproxy.pid);
        let children = fs::read_to_string(children).unwrap();
        children.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for server in servers() {
        let url = format!("{server}:8080/");
        let mut load = site.client().command("ab");
        load.args(["-q", "-n", "6000", "-c", "8", &url]);
        let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        for _ in 0..3 {
            let before = workers();
            let mut looks = 0;
            wait_until("other workers serve", || {
                // A master that has just begun may not hear the first.
                if looks % 100 == 0 {
                    haproxy.signal("-USR2");
                }
                looks += 1;
                let now = workers();
                !now.is_empty() && now.iter().all(|worker| !before.contains(worker))
            });
        }
        let output = load.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}{errors}");
        assert_complete(&said, 6000);
        // The workers of now serve.
        assert_eq!(site.tool("curl", &["-sS", "--max-time", "30", &url]), "page");
    }
}

/// A server that begins anew for each connection, as another program that has the
/// listener and the connection.
const AGAIN: &str = r#"
import os, socket, sys

if len(sys.argv) == 1:
    listener = socket.create_server(("::", 7300), family=socket.AF_INET6, dualstack_ipv6=True)
else:
    listener = socket.socket(fileno=int(sys.argv[1]))
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        data = b""
        while piece := connection.recv(1000):
            data += piece
        connection.sendall(b"again " + data)
connection, _ = listener.accept()
for one in (listener, connection):
    os.set_inheritable(one.fileno(), True)
source = os.environ["AGAIN"]
given = {"AGAIN": source}
arguments = [str(one.fileno()) for one in (listener, connection)]
os.execve(sys.executable, [sys.executable, "-c", source, *arguments], given)
"#;

#[test]
fn the_next_program_in_a_process_has_the_sockets_of_the_last() {
    if !can("run_passing_exec", &["python3", "nc"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let mut python = daemon.run(&[], &["python3", "-c", AGAIN]);
    let _python = site.wait_for_server(python.env("AGAIN", AGAIN), 7300);
    for address in [SERVER_V4, SERVER_V6] {
        for n in 0..3 {
            let nc = format!("printf 'hello {n}' | nc -N -w 30 {address} 7300");
            assert_eq!(site.tool("sh", &["-c", &nc]), format!("again hello {n}"), "{address}");
        }
    }
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    assert_eq!(apps.len(), cores(), "the programs of before have gone: {report}");
}

/// nginx ends when its last master does.
struct Nginx<'s> {
    site: &'s Site,
    pid_file: std::path::PathBuf,
    _program: Program,
}

impl Nginx<'_> {
    /// Empty while nobody has written it whole: nginx listens first, then goes to the background
    /// and only then says who it is.
    fn master(&self) -> String {
        let written = fs::read_to_string(&self.pid_file).unwrap_or_default();
        written.strip_suffix('\n').unwrap_or_default().to_owned()
    }

    fn signal(&self, master: &str, signal: &str) {
        let sent = self.site.server().command("kill").args([signal, master]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Nginx<'_> {
    fn drop(&mut self) {
        self.signal(&self.master(), "-TERM");
        let began = Instant::now();
        while self.pid_file.exists() && began.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn nginx_is_replaced_by_another_binary_under_load() {
    if !can("run_passing_nginx", &["nginx", "ab"]) {
        return;
    }
    let site = Site::new(Kind::Xdp);
    let daemon = Daemon::start(&site, &[]);
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    fs::set_permissions(root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(folder.path().join("page"), "tide\n".repeat(500)).unwrap();
    let config = format!(
        "daemon on; master_process on; worker_processes 2; user root; pid {root}/pid;
         error_log {root}/error.log; events {{ worker_connections 256; }}
         http {{ access_log off; client_body_temp_path {root}/body;
         proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
         uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
         server {{ listen 8080; listen [::]:8080; root {root}; }} }}"
    );
    let file = format!("{root}/nginx.conf");
    fs::write(&file, config).unwrap();
    let program = daemon.run_server(&["nginx", "-c", &file, "-p", root], 8080);
    let nginx = Nginx { site: &site, pid_file: folder.path().join("pid"), _program: program };
    wait_until("nginx has said who it is", || !nginx.master().is_empty());
    for server in servers() {
        let url = format!("{server}:8080/page");
        let mut load = site.client().command("ab");
        load.args(["-q", "-n", "4000", "-c", "8", &url]);
        let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let old = nginx.master();
        nginx.signal(&old, "-USR2");
        wait_until("there is another master", || ![&old, ""].contains(&&*nginx.master()));
        nginx.signal(&old, "-QUIT");
        wait_until("the old one has served its last", || has_ended(&old));
        let output = load.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        assert_complete(&said, 4000);
        let load = site.tool("ab", &["-q", "-n", "100", "-c", "4", &url]);
        assert_complete(&load, 100);
    }
}
