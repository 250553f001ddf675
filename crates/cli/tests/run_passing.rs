//! Unmodified applications that pass sockets to other processes, attached to a daemon, with
//! the kernel's tools on the client side.

mod support;

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use support::run::{ChildProcess, Daemon, cores};
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, wait_until};

/// Upper bound for any step.
const TIMEOUT: Duration = Duration::from_secs(60);

/// True if a process has exited, even if it has not been reaped.
fn has_ended(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.is_empty() || status.contains(") Z ")
}

/// URL prefixes of the server, one for each family.
fn server_urls() -> [String; 2] {
    [format!("http://{SERVER_V4}"), format!("http://[{SERVER_V6}]")]
}

/// Asserts that all requests of a load were answered.
fn assert_complete(load: &str, requests: u32) {
    let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
    assert!(load.lines().any(is_zero), "{load}");
    assert!(load.contains(&format!("Complete requests:      {requests}\n")), "{load}");
    assert!(!load.contains("Non-2xx"), "{load}");
}

/// Receives a listener, a UDP socket and then connections over a Unix socket, and serves on
/// them.
const RECEIVER: &str = r#"
import os, socket, sys, threading

unix = socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1])
unix.listen()
sender, _ = unix.accept()

def serve(connection):
    data = b""
    while piece := connection.recv(1000):
        data += piece
    connection.sendall(b"receiver " + data)
    connection.close()

def accept(listener):
    while True:
        serve(listener.accept()[0])

def datagrams(udp):
    while True:
        data, peer = udp.recvfrom(2000)
        udp.sendto(b"receiver " + data, peer)

_, (listener, udp), _, _ = socket.recv_fds(sender, 100, 4)
threading.Thread(target=accept, args=[socket.socket(fileno=listener)], daemon=True).start()
threading.Thread(target=datagrams, args=[socket.socket(fileno=udp)], daemon=True).start()
while True:
    _, descriptors, _, _ = socket.recv_fds(sender, 100, 4)
    for descriptor in descriptors:
        serve(socket.socket(fileno=descriptor))
"#;

/// Creates the sockets that [`RECEIVER`] serves, sends them, and closes its own descriptors.
/// Of each connection the sender first reads up to two bytes.
const SENDER: &str = r#"
import socket, sys

def dual(kind, port):
    one = socket.socket(socket.AF_INET6, kind)
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    one.bind(("::", port))
    return one

listener, udp = dual(socket.SOCK_STREAM, 7200), dual(socket.SOCK_DGRAM, 7200)
listener.listen()
receiver = socket.socket(socket.AF_UNIX)
receiver.connect(sys.argv[1])
socket.send_fds(receiver, [b"both"], [listener.fileno(), udp.fileno()])
listener.close()
udp.close()
own = dual(socket.SOCK_STREAM, 7201)
own.listen()
while True:
    connection, _ = own.accept()
    assert connection.recv(2) in (b"", b"--")
    socket.send_fds(receiver, [b"one"], [connection.fileno()])
    connection.close()
"#;

#[test]
fn sockets_transfer_over_a_unix_socket() {
    if !can_run("run_passing_python", &["python3", "nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("unix");
    let path = path.to_str().unwrap();
    let receiver = ChildProcess::new(&mut daemon.run(&[], &["python3", "-c", RECEIVER, path]));
    wait_until("the receiver listens", || Path::new(path).exists());
    let sender = daemon.run_server(&["python3", "-c", SENDER, path], 7201);
    let large = "x".repeat(20_000);
    for address in [SERVER_V4, SERVER_V6] {
        for n in 0..5 {
            for (port, flags) in [(7200, "-N"), (7201, "-N"), (7200, "-u -W 1")] {
                let data = format!("hello {n}");
                let first = if port == 7201 { "--" } else { "" };
                let nc = format!("printf '%s' '{first}{data}' | nc {flags} -w 30 {address} {port}");
                let printed = testbed.tool("sh", &["-c", &nc]);
                assert_eq!(printed, format!("receiver {data}"), "{address} {port} {flags}");
            }
        }
        let nc = format!("printf '%s' '--{large}' | nc -N -w 30 {address} 7201");
        assert!(testbed.tool("sh", &["-c", &nc]) == format!("receiver {large}"));
    }
    // Transferred sockets stay open after the sender has exited.
    drop(sender);
    let nc = format!("printf after | nc -N -w 30 {SERVER_V4} 7200");
    assert_eq!(testbed.tool("sh", &["-c", &nc]), "receiver after");
    drop(receiver);
    let applications = || daemon.sockets()["applications"].as_array().unwrap().len();
    wait_until("no application is attached", || applications() == 0);
}

/// Server with two workers: the primary passes them connections, or the listening socket.
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
    if !can_run("run_passing_node", &["node", "curl", "ab"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("cluster.js");
    fs::write(&program, CLUSTER).unwrap();
    for policy in ["round robin", "none"] {
        let _node = daemon.run_server(&["node", program.to_str().unwrap(), policy], 8080);
        for server in server_urls() {
            let url = format!("{server}:8080/");
            let mut workers = HashSet::new();
            wait_until("both workers have answered", || {
                // Several requests at once: otherwise the faster worker serves all of them.
                let four = ["-sS", "--max-time", "30", "-Z", &url, &url, &url, &url];
                let printed = testbed.tool("curl", &four);
                assert_eq!(printed.lines().filter(|line| line.starts_with("worker ")).count(), 4);
                workers.extend(printed.lines().map(str::to_owned));
                workers.len() == 2
            });
            let load = testbed.tool("ab", &["-q", "-n", "1000", "-c", "4", &url]);
            assert_complete(&load, 1000);
        }
    }
}

/// A bound socket on which three processes listen afterwards: the parent, a child, and a
/// process that receives the socket over a Unix socket.
const LISTEN_AFTER_TRANSFER: &str = r#"
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
    serve(socket.socket(fileno=descriptor), b"receiver")
socket.send_fds(here, [b"x"], [bound.fileno()])
serve(bound, b"parent")
"#;

#[test]
fn every_holder_of_a_bound_socket_can_listen() {
    if !can_run("run_passing_late", &["python3", "nc"]) {
        return;
    }
    for is_shared in [false, true] {
        let testbed = if is_shared { Testbed::shared() } else { Testbed::new(DeviceKind::Xdp) };
        let daemon = match is_shared {
            true => Daemon::start_shared(&testbed, &[]),
            false => Daemon::start(&testbed, &["--cores", "2"]),
        };
        let _python = daemon.run_server(&["python3", "-c", LISTEN_AFTER_TRANSFER], 7400);
        for address in [SERVER_V4, SERVER_V6] {
            let mut served = HashSet::new();
            wait_until("all three have served", || {
                let nc = format!("nc -w 30 {address} 7400 < /dev/null & ");
                let printed = testbed.tool("sh", &["-c", &format!("{}wait", nc.repeat(6))]);
                assert_eq!(printed.lines().count(), 6, "{printed}");
                served.extend(printed.lines().map(str::to_owned));
                served.len() == 3
            });
        }
    }
}

/// A running haproxy; drop sends SIGTERM to its master, which ends the workers too.
struct Haproxy<'s> {
    testbed: &'s Testbed,
    pid: String,
    _program: ChildProcess,
}

impl Haproxy<'_> {
    fn signal(&self, signal: &str) {
        let sent = self.testbed.server().command("kill").args([signal, &self.pid]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Haproxy<'_> {
    fn drop(&mut self) {
        self.signal("-TERM");
        let began = Instant::now();
        while !has_ended(&self.pid) && began.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn haproxy_reload_keeps_its_listeners_under_load() {
    if !can_run("run_passing_haproxy", &["haproxy", "ab", "curl"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
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
    wait_until("the master has written its PID", || {
        fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n'))
    });
    let pid = fs::read_to_string(&pid_file).unwrap().trim().to_owned();
    let haproxy = Haproxy { testbed: &testbed, pid, _program: program };
    let workers = || {
        let children = format!("/proc/{0}/task/{0}/children", haproxy.pid);
        let children = fs::read_to_string(children).unwrap();
        children.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for server in server_urls() {
        let url = format!("{server}:8080/");
        let mut load = testbed.client().command("ab");
        load.args(["-q", "-n", "6000", "-c", "8", &url]);
        let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        for _ in 0..3 {
            let before = workers();
            let mut attempts = 0;
            wait_until("other workers serve", || {
                // A master that has just started may miss the first signal.
                if attempts % 100 == 0 {
                    haproxy.signal("-USR2");
                }
                attempts += 1;
                let now = workers();
                !now.is_empty() && now.iter().all(|worker| !before.contains(worker))
            });
        }
        let output = load.wait_with_output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{printed}{errors}");
        assert_complete(&printed, 6000);
        // The new workers serve.
        assert_eq!(testbed.tool("curl", &["-sS", "--max-time", "30", &url]), "page");
    }
}

/// Server that calls `execve` for each connection; the listener and the connection are passed
/// to the new program as inherited descriptors.
const REEXEC_SERVER: &str = r#"
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
fn sockets_survive_exec() {
    if !can_run("run_passing_exec", &["python3", "nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let mut python = daemon.run(&[], &["python3", "-c", REEXEC_SERVER]);
    let _python = testbed.wait_for_server(python.env("AGAIN", REEXEC_SERVER), 7300);
    for address in [SERVER_V4, SERVER_V6] {
        for n in 0..3 {
            let nc = format!("printf 'hello {n}' | nc -N -w 30 {address} 7300");
            assert_eq!(testbed.tool("sh", &["-c", &nc]), format!("again hello {n}"), "{address}");
        }
    }
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    assert_eq!(apps.len(), cores(), "only the last executed program is attached: {report}");
}

/// Server that starts `sh` for each connection, in another way each time, with the connection as
/// standard input and output.
const STARTING_SERVER: &str = r#"
import ctypes, os, signal, socket

libc = ctypes.CDLL(None)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server(("::", 7500), family=socket.AF_INET6, dualstack_ipv6=True)
script = 'read -r line; echo "$0 $line $SETTING $1$2$3$4$5$6"'

def spawn(function, connection):
    number = connection.fileno()
    # 9 is overwritten by another file, and 8 is closed.
    actions = [(os.POSIX_SPAWN_DUP2, number, to) for to in (8, 9, 0, 1)]
    actions += [(os.POSIX_SPAWN_OPEN, 9, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_CLOSE, 8)]
    words = ["sh", "-c", script, function.__name__, *"abcdef"]
    function("/bin/sh", words, {"SETTING": "here"}, file_actions=actions)

def execute(name, connection):
    os.environ["SETTING"] = "here"
    if os.fork() == 0:
        for to in (0, 1):
            os.dup2(connection.fileno(), to)
        words = [b"sh", b"-c", script.encode(), name.encode(), *(b"%c" % c for c in b"abcdef")]
        if name == "fexecve":
            environment = (ctypes.c_char_p * 2)(b"SETTING=here", None)
            list = (ctypes.c_char_p * (len(words) + 1))(*words, None)
            libc.fexecve(os.open("/bin/sh", os.O_RDONLY | os.O_CLOEXEC), list, environment)
        elif name == "execle":
            libc.execle(b"/bin/sh", *words, None, (ctypes.c_char_p * 2)(b"SETTING=here", None))
        elif name == "execlp":
            libc.execlp(b"sh", *words, None)
        else:
            libc.execl(b"/bin/sh", *words, None)
        os._exit(1)

while True:
    for function in os.posix_spawn, os.posix_spawnp:
        spawn(function, listener.accept()[0])
    for name in "execl", "execlp", "execle", "fexecve":
        execute(name, listener.accept()[0])
"#;

#[test]
fn started_programs_inherit_sockets() {
    if !can_run("run_passing_start", &["python3", "nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let mut python = daemon.run(&[], &["python3", "-c", STARTING_SERVER]);
    let _python = ChildProcess::new(&mut python);
    wait_until("the server listens", || {
        !daemon.sockets()["applications"][0]["sockets"][0].is_null()
    });
    for address in [SERVER_V4, SERVER_V6] {
        for name in ["posix_spawn", "posix_spawnp", "execl", "execlp", "execle", "fexecve"] {
            let nc = format!("echo hello | nc -w 30 {address} 7500");
            let got = testbed.tool("sh", &["-c", &nc]);
            assert_eq!(got, format!("{name} hello here abcdef\n"), "{address}");
        }
    }
    wait_until("only the server is attached", || {
        let report = daemon.sockets();
        let apps = report["applications"].as_array().unwrap();
        apps.len() == cores() && apps[0]["sockets"].as_array().unwrap().len() == 1
    });
}

/// A running nginx; drop ends its current master and waits until the PID file is gone.
struct Nginx<'s> {
    testbed: &'s Testbed,
    pid_file: std::path::PathBuf,
    _program: ChildProcess,
}

impl Nginx<'_> {
    /// PID of the current master; empty while the PID file is incomplete. nginx first listens,
    /// then goes to the background, and then writes the file.
    fn master_pid(&self) -> String {
        let written = fs::read_to_string(&self.pid_file).unwrap_or_default();
        written.strip_suffix('\n').unwrap_or_default().to_owned()
    }

    fn signal(&self, master: &str, signal: &str) {
        let sent = self.testbed.server().command("kill").args([signal, master]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Nginx<'_> {
    fn drop(&mut self) {
        self.signal(&self.master_pid(), "-TERM");
        let began = Instant::now();
        while self.pid_file.exists() && began.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn nginx_binary_upgrade_completes_under_load() {
    if !can_run("run_passing_nginx", &["nginx", "ab"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
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
    let nginx = Nginx { testbed: &testbed, pid_file: folder.path().join("pid"), _program: program };
    wait_until("nginx has written its PID", || !nginx.master_pid().is_empty());
    for server in server_urls() {
        let url = format!("{server}:8080/page");
        let mut load = testbed.client().command("ab");
        load.args(["-q", "-n", "4000", "-c", "8", &url]);
        let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let old = nginx.master_pid();
        nginx.signal(&old, "-USR2");
        wait_until("a new master runs", || ![&old, ""].contains(&&*nginx.master_pid()));
        nginx.signal(&old, "-QUIT");
        wait_until("the old master has exited", || has_ended(&old));
        let output = load.wait_with_output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
        assert_complete(&printed, 4000);
        let load = testbed.tool("ab", &["-q", "-n", "100", "-c", "4", &url]);
        assert_complete(&load, 100);
    }
}
