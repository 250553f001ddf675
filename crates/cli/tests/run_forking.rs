//! Unmodified servers that fork, attached to a daemon, with the kernel's tools on the client
//! side.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use support::run::{ChildProcess, Daemon, OWN_ADDRESSES, cores, library};
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, wait_until};

/// Upper bound for any step.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Holder counts: for each attachment of an application, one count per socket.
fn holders(daemon: &Daemon<'_>) -> Vec<Vec<u64>> {
    let report = daemon.sockets();
    let apps = report["applications"].as_array().unwrap();
    let of = |app: &serde_json::Value| {
        let sockets = app["sockets"].as_array().unwrap();
        sockets.iter().map(|socket| socket["holders"].as_u64().unwrap()).collect()
    };
    apps.iter().map(of).collect()
}

/// Sends `data` and returns the reply up to the end of the connection.
fn exchange(testbed: &Testbed, address: &str, port: u16, data: &str) -> String {
    testbed.tool("sh", &["-c", &format!("printf '%s' '{data}' | nc -N -w 30 {address} {port}")])
}

/// A running nginx; drop stops it with `nginx -s stop`, so that its workers exit too.
struct Nginx<'s> {
    testbed: &'s Testbed,
    config: String,
    _program: ChildProcess,
}

impl Nginx<'_> {
    fn signal(&self, signal: &str) -> bool {
        let mut nginx = self.testbed.server().command("nginx");
        nginx.args(["-c", &self.config, "-s", signal]).stderr(Stdio::null());
        nginx.status().unwrap().success()
    }
}

impl Drop for Nginx<'_> {
    fn drop(&mut self) {
        self.signal("stop");
        // The master removes its PID file when its workers have exited; it must not be killed
        // before that.
        let pid = Path::new(&self.config).with_file_name("pid");
        let began = Instant::now();
        while pid.exists() && began.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn nginx_config(root: &Path, is_daemon: bool) -> String {
    let daemon = if is_daemon { "on" } else { "off" };
    let root = root.display();
    format!(
        "daemon {daemon}; master_process on; worker_processes 2; user root; pid {root}/pid;
         error_log {root}/error.log; events {{ worker_connections 256; }}
         http {{ access_log off; client_body_temp_path {root}/body;
         proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
         uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
         server {{ listen 8080; listen [::]:8080; root {root}; }} }}"
    )
}

/// Folder with a page and the path of the configuration of an nginx that serves it.
fn nginx_folder(is_daemon: bool) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::set_permissions(root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(root.join("page"), "tide\n".repeat(500)).unwrap();
    let config = root.join("nginx.conf");
    fs::write(&config, nginx_config(root, is_daemon)).unwrap();
    let config = config.to_str().unwrap().to_owned();
    (folder, config)
}

#[test]
fn nginx_serves_from_workers_and_reloads_under_load() {
    if !can_run("run_forking_nginx", &["nginx", "ab", "curl"]) {
        return;
    }
    for is_daemon in [false, true] {
        let testbed = Testbed::new(DeviceKind::Xdp);
        let daemon = Daemon::start(&testbed, &[]);
        let (folder, config) = nginx_folder(is_daemon);
        let root = folder.path();
        let program = ["nginx", "-c", &config, "-p", root.to_str().unwrap()];
        let program = daemon.run_server(&program, 8080);
        let nginx = Nginx { testbed: &testbed, config, _program: program };
        let is_complete = || {
            let all = holders(&daemon);
            all.len() == 3 * cores() && all.iter().all(|sockets| sockets == &[3, 3])
        };
        wait_until("a master and two workers", is_complete);
        for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
            let url = format!("http://{host}:8080/page");
            let mut load = testbed.client().command("ab");
            load.args(["-q", "-n", "4000", "-c", "8", &url]);
            let mut load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut reloads = 0;
            while load.try_wait().unwrap().is_none() || reloads < 3 {
                assert!(nginx.signal("reload"));
                reloads += 1;
                // The previous workers exit when they have served their last connection.
                wait_until("a master and two workers again", is_complete);
            }
            let output = load.wait_with_output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{printed}{errors}");
            let is_zero = |line: &str| line.starts_with("Failed requests:") && line.ends_with(" 0");
            assert!(printed.lines().any(is_zero), "{printed}");
            assert!(printed.contains("Complete requests:      4000"), "{printed}");
            assert!(!printed.contains("Non-2xx"), "{printed}");
        }
        drop(nginx);
        wait_until("no application is attached", || holders(&daemon).is_empty());
    }
}

/// Sockets of the daemons that belong to one application each.
fn own_daemons() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/run/tidegate") else { return Vec::new() };
    let is_own = |path: &PathBuf| path.to_string_lossy().contains("/run-");
    entries.flatten().map(|entry| entry.path()).filter(is_own).collect()
}

#[test]
fn nginx_with_a_device_gets_a_daemon_that_ends_with_it() {
    if !can_run("run_forking_own_daemon", &["nginx", "curl"]) {
        return;
    }
    for is_daemon in [false, true] {
        let testbed = Testbed::new(DeviceKind::Xdp);
        let (folder, config) = nginx_folder(is_daemon);
        let root = folder.path();
        let before = own_daemons();
        // No flag says so: the program serves from children, and has a device.
        let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_PRELOAD_LIBRARY", library());
        command.args(["run", "--iface", testbed.device()]).args(OWN_ADDRESSES);
        command.args(["--", "nginx", "-c", &config, "-p", root.to_str().unwrap()]);
        let program = testbed.wait_for_server(&mut command, 8080);
        let nginx = Nginx { testbed: &testbed, config, _program: program };
        let own: Vec<_> = own_daemons().into_iter().filter(|path| !before.contains(path)).collect();
        assert_eq!(own.len(), 1, "{own:?}");
        for host in [SERVER_V4.to_owned(), format!("[{SERVER_V6}]")] {
            let url = format!("http://{host}:8080/page");
            assert_eq!(testbed.tool("curl", &["-sS", &url]), "tide\n".repeat(500));
        }
        drop(nginx);
        wait_until("the daemon has ended with nginx", || !own[0].exists());
    }
}

/// CPU time of a process, in the kernel's clock ticks.
fn cpu_ticks(pid: &str) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = rest.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn servers_are_idle_after_the_daemon_is_killed() {
    if !can_run("run_forking_death", &["nginx", "redis-server", "ab"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let (folder, config) = nginx_folder(false);
    let root = folder.path();
    let program = ["nginx", "-c", &config, "-p", root.to_str().unwrap()];
    let program = daemon.run_server(&program, 8080);
    let redis = ["redis-server", "--bind", "0.0.0.0", "::", "--protected-mode", "no"];
    let redis = [&redis[..], &["--save", "", "--dir", root.to_str().unwrap()]].concat();
    let redis = daemon.run_server(&redis, 6379);
    let master = program.pid().to_string();
    let nginx = Nginx { testbed: &testbed, config, _program: program };
    let children = format!("/proc/{master}/task/{master}/children");
    let mut servers = Vec::new();
    wait_until("there are two workers", || {
        let children = fs::read_to_string(&children).unwrap();
        servers = children.split_whitespace().map(str::to_owned).collect();
        servers.len() == 2
    });
    servers.push(redis.pid().to_string());
    // The daemon is killed during the load.
    let url = format!("http://{SERVER_V4}:8080/page");
    let mut load = testbed.client().command("ab");
    load.args(["-q", "-k", "-s", "5", "-n", "100000", "-c", "8", &url]);
    let load = ChildProcess::new(load.stdout(Stdio::null()).stderr(Stdio::null()));
    wait_until("workers hold connections", || {
        let of_workers = |sockets: &Vec<u64>| sockets.contains(&1);
        holders(&daemon).iter().filter(|sockets| of_workers(sockets)).count() > cores()
    });
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    // The servers may need a moment to see all their errors. Then they are idle.
    wait_until("no server is busy", || {
        let before: Vec<u64> = servers.iter().map(|pid| cpu_ticks(pid)).collect();
        std::thread::sleep(Duration::from_secs(1));
        servers.iter().zip(before).all(|(pid, before)| cpu_ticks(pid) - before <= 20)
    });
    drop((load, redis, nginx));
}

#[test]
fn socat_serves_each_connection_in_a_child() {
    if !can_run("run_forking_socat", &["socat", "nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let large = "x".repeat(50_000);
    for (listen, port, serve) in [
        ("TCP6-LISTEN:7001,fork,reuseaddr,ipv6only=0", 7001, "PIPE"),
        ("TCP6-LISTEN:7002,fork,reuseaddr,ipv6only=0", 7002, "EXEC:cat"),
    ] {
        let socat = daemon.run_server(&["socat", listen, serve], port);
        for address in [SERVER_V4, SERVER_V6] {
            for data in ["one", "two", &large] {
                assert!(exchange(&testbed, address, port, data) == data, "{address} {serve}");
            }
        }
        wait_until("the children have ended", || holders(&daemon) == vec![[1]; cores()]);
        drop(socat);
        wait_until("no application is attached", || holders(&daemon).is_empty());
    }
}

/// Children serve on sockets that their parent has opened; on port 7101, one child serves each
/// connection that the parent accepts.
const FORKING_SERVER: &str = r#"
import ctypes, os, signal, socket

def child(work):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        work()
        os._exit(0)
    return pid

tcp = socket.create_server(("::", 7100), family=socket.AF_INET6, dualstack_ipv6=True)
single = socket.create_server(("::", 7101), family=socket.AF_INET6, dualstack_ipv6=True)
udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
udp.bind(("::", 7100))

def answer(connection):
    data = b""
    while piece := connection.recv(1000):
        data += piece
    connection.sendall(b"%d %s" % (os.getpid(), data))
    connection.close()

def accept():
    while True:
        answer(tcp.accept()[0])

def datagrams():
    while True:
        data, peer = udp.recvfrom(2000)
        udp.sendto(b"%d %s" % (os.getpid(), data), peer)

for work in [accept, accept, accept, datagrams, datagrams]:
    child(work)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    connection, _ = single.accept()
    child(lambda: answer(connection))
    connection.close()
"#;

#[test]
fn children_serve_on_inherited_sockets() {
    if !can_run("run_forking_python", &["python3", "nc"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let python = daemon.run_server(&["python3", "-c", FORKING_SERVER], 7101);
    let pid = std::cell::Cell::new(0_u32);
    let check_reply = |answer: String, data: &str| {
        let (by, payload) = answer.split_once(' ').unwrap_or_else(|| panic!("{answer:?}"));
        assert_eq!(payload, data);
        pid.set(by.parse().unwrap());
    };
    for address in [SERVER_V4, SERVER_V6] {
        let mut servers = std::collections::HashSet::new();
        for n in 0..20 {
            let data = format!("hello {n}");
            check_reply(exchange(&testbed, address, 7100, &data), &data);
            check_reply(exchange(&testbed, address, 7101, &data), &data);
            assert!(servers.insert(pid.get()), "each connection has its own child");
            let request = format!("printf '%s' '{data}' | nc -u -W 1 -w 30 {address} 7100");
            check_reply(testbed.tool("sh", &["-c", &request]), &data);
        }
    }
    drop(python);
    wait_until("no application is attached", || holders(&daemon).is_empty());
}

/// A child answers each connection after it has allowed itself hardly any system call; any other one
/// kills it. The parent keeps the connection until the child has ended, and prints its status.
const FILTERING_SERVER: &str = r#"
import ctypes, os, platform, socket, struct

BY_MACHINE = {
    # read, write, close, poll, mmap, munmap, brk, rt_sigprocmask, rt_sigreturn, mremap, madvise,
    # getpid, exit, futex, clock_gettime, clock_nanosleep, exit_group, ppoll, getrandom
    "x86_64": [0, 1, 3, 7, 9, 11, 12, 14, 15, 25, 28, 39, 60, 202, 228, 230, 231, 271, 318],
    "aarch64": [63, 64, 57, 73, 222, 215, 214, 135, 139, 216, 233, 172, 93, 98, 113, 115, 94, 278],
}
ALLOWED = BY_MACHINE[platform.machine()]
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
KILL, ALLOW = 0x80000000, 0x7FFF0000

def allow_hardly_any_call():
    code = [(LOAD, 0, 0, 0)]
    for n, number in enumerate(ALLOWED):
        code.append((JUMP_IF_EQUAL, len(ALLOWED) - n, 0, number))
    code += [(RETURN, 0, 0, KILL), (RETURN, 0, 0, ALLOW)]
    program = b"".join(struct.pack("=HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    prctl(38, 1, 0, 0, 0)
    if prctl(22, 2, ctypes.addressof(header), 0, 0) != 0:
        os._exit(9)

server = socket.create_server(("::", 7103), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    connection, _ = server.accept()
    pid = os.fork()
    if pid == 0:
        fd = connection.fileno()
        allow_hardly_any_call()
        while data := os.read(fd, 65536):
            while data:
                data = data[os.write(fd, data):]
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        connection.sendall(b" ended with %d" % status)
    connection.close()
"#;

#[test]
fn child_with_a_filter_of_system_calls_uses_its_socket() {
    // Attachments to several network cores are waited for by epoll.
    if !can_run("run_forking_filter", &["python3", "nc"]) || cores() > 1 {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let python = daemon.run_server(&["python3", "-c", FILTERING_SERVER], 7103);
    for address in [SERVER_V4, SERVER_V6] {
        for data in ["one", &"x".repeat(100_000)] {
            assert!(exchange(&testbed, address, 7103, data) == data, "{address}");
        }
        // Another program takes its turns on the processor meanwhile.
        let slowly =
            format!("for n in 1 2 3 4; do echo $n; sleep 0.05; done | nc -N {address} 7103");
        assert_eq!(testbed.tool("sh", &["-c", &slowly]), "1\n2\n3\n4\n");
    }
    drop(python);
    wait_until("no application is attached", || holders(&daemon).is_empty());
}

#[test]
fn redis_saves_in_a_child() {
    if !can_run("run_forking_redis", &["redis-server", "redis-cli"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    let redis = ["redis-server", "--bind", "0.0.0.0", "::", "--protected-mode", "no", "--dir", dir];
    let _redis = daemon.run_server(&redis, 6379);
    for address in [SERVER_V4, SERVER_V6] {
        let request =
            |words: &[&str]| testbed.tool("redis-cli", &[&["-h", address], words].concat());
        assert_eq!(request(&["set", "tide", "high"]), "OK\n");
        assert_eq!(request(&["bgsave"]), "Background saving started\n");
        wait_until("the dump is saved", || {
            let printed = request(&["info", "persistence"]);
            printed.contains("rdb_bgsave_in_progress:0")
                && printed.contains("rdb_last_bgsave_status:ok")
        });
        assert_eq!(request(&["get", "tide"]), "high\n");
        assert!(folder.path().join("dump.rdb").exists());
        fs::remove_file(folder.path().join("dump.rdb")).unwrap();
    }
    wait_until("the child has ended", || holders(&daemon).len() == cores());
}

/// Forks repeatedly while signals interrupt its system calls; each child must have inherited
/// the sockets.
const FORK_UNDER_SIGNALS: &str = "import os, signal, socket
listeners = [socket.create_server((address, 7100), family=family) for address, family in
    (('0.0.0.0', socket.AF_INET), ('::', socket.AF_INET6))]
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
lost = 0
for _ in range(40):
    pid = os.fork()
    if not pid:
        try:
            for listener in listeners:
                listener.setblocking(False)
                try:
                    listener.accept()
                except BlockingIOError:
                    pass
            os._exit(0)
        except BaseException:
            os._exit(1)
    lost += os.waitpid(pid, 0)[1] != 0
signal.setitimer(signal.ITIMER_REAL, 0)
print('lost', lost)";

#[test]
fn children_inherit_sockets_despite_signals() {
    if !can_run("run_forking_signals", &["python3"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let daemon = Daemon::start(&testbed, &[]);
    let output = daemon.run(&[], &["python3", "-c", FORK_UNDER_SIGNALS]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"lost 0\n", "{error}");
}
