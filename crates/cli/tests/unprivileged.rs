//! Servers that root has started run without privileges once they are ready.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use support::running::Running;
use support::{DeviceKind, SERVER_V4, SERVER_V6, Testbed, can_run, files, url, wait_until, zone};
use tidegate_lab::experiments::mogul::router::{RIGHT_V4, RIGHT_V6, RouterTestbed};

impl Running {
    /// Checks that each thread has the user `nobody`, or `tidegate` if there is one, and nothing
    /// else.
    #[track_caller]
    fn assert_unprivileged(&self) {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let statuses: Vec<_> = tasks.map(|task| Status::read(&task.unwrap().path())).collect();
        assert!(!statuses.is_empty());
        for status in statuses {
            status.assert_capabilities("0000000000000000");
            assert_eq!(status.field("Seccomp"), "2", "{status:?}");
        }
    }
}

/// A `status` file of `/proc`.
#[derive(Debug)]
struct Status(String);

impl Status {
    fn read(folder: &Path) -> Self {
        Self(fs::read_to_string(folder.join("status")).unwrap())
    }

    fn field(&self, name: &str) -> String {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[track_caller]
    fn assert_capabilities(&self, capabilities: &str) {
        let user = default_user();
        assert_eq!(self.field("Uid"), [user.as_str(); 4].join(" "), "{self:?}");
        assert!(!self.field("Groups").split(' ').any(|group| group == "0"), "{self:?}");
        for set in ["CapPrm", "CapEff"] {
            assert_eq!(self.field(set), capabilities, "{set}: {self:?}");
        }
        for set in ["CapInh", "CapBnd", "CapAmb"] {
            assert_eq!(self.field(set), "0000000000000000", "{set}: {self:?}");
        }
        assert_eq!(self.field("NoNewPrivs"), "1", "{self:?}");
    }
}

/// ID of the user that servers become by default.
fn default_user() -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let id = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        line.split(':').nth(2).map(str::to_owned)
    };
    id("tidegate").or_else(|| id("nobody")).unwrap()
}

/// Command that runs `tidegate` on the server's side.
fn tidegate(testbed: &Testbed, arguments: &[&str]) -> Command {
    let mut command = testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments);
    command
}

fn own_addresses() -> [String; 4] {
    let (v4, v6) = (format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64"));
    ["--address".to_owned(), v4, "--address".to_owned(), v6]
}

/// Starts a server with its own addresses.
fn serve(testbed: &Testbed, kind: DeviceKind, arguments: &[&str]) -> Running {
    let (flags, addresses) = (kind.flags(testbed.device()), own_addresses());
    let rest = flags.iter().chain(&addresses).map(String::as_str);
    Running::start(tidegate(testbed, &[&["serve"], arguments].concat()).args(rest))
}

#[track_caller]
fn looks_up(testbed: &Testbed, name: &str) {
    for server in [SERVER_V4, SERVER_V6] {
        let at = format!("@{server}");
        for transport in ["+notcp", "+tcp"] {
            let question = [&at, "+short", "+retry=0", "+timeout=10", transport, name, "A"];
            assert_ne!(testbed.tool("kdig", &question).trim(), "", "{server} {transport}");
        }
    }
}

fn fetches(testbed: &Testbed) {
    for server in [SERVER_V4, SERVER_V6] {
        let url = url(server, "/small");
        assert_eq!(testbed.tool("curl", &["-sS", "-m", "20", "-g", &url]), "high water\n");
    }
}

fn reads(testbed: &Testbed) {
    for server in [SERVER_V4, SERVER_V6] {
        let url = format!("nfs://{server}/./small?nfsport=2049&mountport=2049");
        assert_eq!(testbed.tool("timeout", &["20", "nfs-cat", &url]), "high water\n");
    }
}

fn pings(testbed: &Testbed) {
    for server in [SERVER_V4, SERVER_V6] {
        testbed.tool("ping", &["-c", "1", "-W", "10", server]);
    }
}

/// Checks DNS, HTTP, NFS and echo servers with these flags.
fn check_servers(testbed: &Testbed, kind: DeviceKind, flags: &[&str]) {
    let (zone, root) = (zone(), files());
    let root = root.path().to_str().unwrap();
    let check = |arguments: &[&str], request: &dyn Fn()| {
        let server = serve(testbed, kind, &[arguments, flags].concat());
        server.assert_unprivileged();
        request();
        server.assert_unprivileged();
        server.stop();
    };
    check(&["dns", "--zone", &zone], &|| looks_up(testbed, "www.example.test"));
    check(&["http", "--root", root], &|| fetches(testbed));
    check(&["nfs", "--directory", root], &|| reads(testbed));
    check(&["echo"], &|| pings(testbed));
    check(&["echo", "--tcp"], &|| pings(testbed));
}

fn has_tools(test: &str) -> bool {
    can_run(test, &["kdig", "curl", "nfs-cat", "ping"])
}

#[test]
fn servers_on_xdp_run_without_privileges() {
    if has_tools("unprivileged on xdp") {
        let testbed = Testbed::new(DeviceKind::Xdp);
        check_servers(&testbed, DeviceKind::Xdp, &[]);
        check_servers(&testbed, DeviceKind::Xdp, &["--network-thread", "--duration", "3600"]);
    }
}

#[test]
fn servers_on_packet_and_tap_run_without_privileges() {
    if has_tools("unprivileged on packet") {
        for kind in [DeviceKind::Packet, DeviceKind::Tap] {
            check_servers(&Testbed::new(kind), kind, &["--mode", "interrupt"]);
        }
        let testbed = Testbed::new(DeviceKind::Packet);
        check_servers(&testbed, DeviceKind::Packet, &["--cpu-share-percent", "50"]);
        let readers = ["dns", "--zone", &zone(), "--readers", "3"];
        let server = serve(&testbed, DeviceKind::Packet, &readers);
        looks_up(&testbed, "www.example.test");
        server.assert_unprivileged();
    }
}

#[test]
fn servers_on_kernel_sockets_run_without_privileges() {
    if !has_tools("unprivileged on the kernel") {
        return;
    }
    let (testbed, zone, root) = (Testbed::shared(), zone(), files());
    let root = root.path().to_str().unwrap();
    let start = |arguments: &[&str]| {
        let all = [&["serve"], arguments, &["--io", "kernel"]].concat();
        let server = Running::start(&mut tidegate(&testbed, &all));
        server.assert_unprivileged();
        server
    };
    let server = start(&["http", "--root", root]);
    fetches(&testbed);
    server.stop();
    let server = start(&["nfs", "--directory", root]);
    reads(&testbed);
    server.stop();
    let question = ["@10.9.0.2", "+short", "+retry=0", "+timeout=10", "www.example.test", "A"];
    for readers in ["1", "2"] {
        let server = start(&["dns", "--zone", &zone, "--readers", readers]);
        assert_ne!(testbed.tool("kdig", &question), "");
        server.assert_unprivileged();
        server.stop();
    }
    for flags in [&["echo"] as &[&str], &["echo", "--tcp"], &["echo", "--tcp", "--io-uring"]] {
        start(flags).stop();
    }
}

#[test]
fn shared_server_without_privileges_finds_new_neighbours() {
    if !can_run("unprivileged on shared addresses", &["kdig"]) {
        return;
    }
    let testbed = Testbed::shared();
    let device = testbed.device();
    // The kernel solicits neighbours from a link-local address.
    testbed.server().ip(&["addr", "add", "fe80::2/64", "dev", device, "nodad"]).unwrap();
    let arguments = ["serve", "dns", "--shared", "--iface", device, "--zone", &zone()];
    for busy_poll in ["64", "0"] {
        let all = [&arguments[..], &["--busy-poll", busy_poll]].concat();
        let server = Running::start(&mut tidegate(&testbed, &all));
        looks_up(&testbed, "www.example.test");
        // The next response has to have the kernel resolve the client's address again.
        testbed.server().ip(&["neigh", "flush", "dev", device]).unwrap();
        looks_up(&testbed, "www.example.test");
        server.assert_unprivileged();
        let children = format!("/proc/{0}/task/{0}/children", server.child.id());
        let children = fs::read_to_string(children).unwrap();
        let resolver = Path::new("/proc").join(children.trim());
        let status = Status::read(&resolver);
        assert_eq!(status.field("Name"), "tg-neighbours");
        status.assert_capabilities("0000000000001000");
        server.stop();
        wait_until("the resolver has ended", || !resolver.exists());
    }
}

#[test]
fn stopped_server_without_privileges_changes_the_interface_again() {
    if !can_run("unprivileged and stopped", &["ping"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Xdp);
    let deferral = || {
        let file = format!("/sys/class/net/{}/napi_defer_hard_irqs", testbed.device());
        testbed.server().enter(|| fs::read_to_string(file).unwrap()).unwrap()
    };
    let before = deferral();
    let server = serve(&testbed, DeviceKind::Xdp, &["echo"]);
    let changed = deferral();
    assert_ne!(changed, before);
    server.assert_unprivileged();
    server.signal(Signal::STOP);
    wait_until("the settings are restored", || deferral() == before);
    server.signal(Signal::CONT);
    // A frame wakes the server.
    pings(&testbed);
    wait_until("the settings are applied again", || deferral() == changed);
    server.stop();
    assert_eq!(deferral(), before);
}

#[test]
fn guard_runs_without_privileges() {
    if !can_run("unprivileged guard", &["ping"]) {
        return;
    }
    let (testbed, folder) = (Testbed::shared(), tempfile::tempdir().unwrap());
    let config = folder.path().join("guard.toml");
    fs::write(&config, "[[admission.class]]\nname = 'all'\n").unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let arguments = ["guard", "--iface", testbed.device(), "--port", "udp/53", "--config"];
    let mut command = tidegate(&testbed, &[&arguments[..], &[config.to_str().unwrap()]].concat());
    let mut guard = Running::start(&mut command);
    guard.assert_unprivileged();
    pings(&testbed);
    assert!(guard.reload().starts_with("reloaded"));
    guard.assert_unprivileged();
    guard.stop();
}

#[test]
fn monitor_runs_without_privileges() {
    if !can_run("unprivileged monitor", &["ping"]) {
        return;
    }
    let testbed = Testbed::shared();
    let collector = ["--ipfix", SERVER_V4];
    let arguments = ["monitor", "--iface", testbed.device(), "--cpu-share", "50"];
    let monitor = Running::start(&mut tidegate(&testbed, &[&arguments[..], &collector].concat()));
    monitor.assert_unprivileged();
    pings(&testbed);
    monitor.assert_unprivileged();
    monitor.stop();
}

#[test]
fn router_and_filter_run_without_privileges() {
    if !can_run("unprivileged router", &["ping"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (rules, socket) = (path("rules.toml"), path("filter"));
    fs::write(&rules, "default = 'allow'\n").unwrap();
    for kind in ["packet", "xdp"] {
        let testbed = RouterTestbed::new().unwrap();
        let start = |arguments: &[&str]| {
            let mut command = testbed.router.command(env!("CARGO_BIN_EXE_tidegate"));
            Running::start(command.args(arguments))
        };
        let mut filter = start(&["filter", "--rules", &rules, "--listen", &socket]);
        let flags = testbed.device_flags(kind);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let more = ["--filter", &socket, "--cpu-share", "90", "--realtime"];
        let router = start(&[&["route"], &flags[..], &more].concat());
        let reaches = || {
            for address in [RIGHT_V4, RIGHT_V6] {
                let mut ping = testbed.left.namespace.command("ping");
                let output = ping.args(["-c", "3", "-W", "5", address]).output().unwrap();
                assert!(output.status.success(), "{kind}: {output:?}");
            }
        };
        reaches();
        assert!(filter.reload().starts_with("reloaded"));
        filter.assert_unprivileged();
        filter.stop();
        // The router connects to a filter that is started later.
        let _ = fs::remove_file(&socket);
        let filter = start(&["filter", "--rules", &rules, "--listen", &socket]);
        reaches();
        router.assert_unprivileged();
        router.stop();
        filter.stop();
        let _ = fs::remove_file(&socket);
    }
}

#[test]
fn reload_reads_files_as_the_user() {
    if !can_run("unprivileged reload", &["kdig"]) {
        return;
    }
    let (testbed, folder) = (Testbed::new(DeviceKind::Packet), tempfile::tempdir().unwrap());
    let zone = folder.path().join("example.zone");
    let source = format!("{}/tests/zones/example.zone", env!("CARGO_MANIFEST_DIR"));
    fs::copy(source, &zone).unwrap();
    let allow = |mode| fs::set_permissions(&zone, PermissionsExt::from_mode(mode)).unwrap();
    allow(0o600);
    let option = format!("example.test={}", zone.display());
    let arguments = ["dns", "--zone", &option];
    let mut server = serve(&testbed, DeviceKind::Packet, &arguments);
    let line = server.reload();
    assert!(line.starts_with("not reloaded"), "{line}");
    assert!(line.contains("runs as user") && line.contains("--user root"), "{line}");
    looks_up(&testbed, "www.example.test");
    allow(0o644);
    assert!(server.reload().starts_with("reloaded"));
    looks_up(&testbed, "www.example.test");
    server.stop();

    allow(0o600);
    let arguments = [&arguments[..], &["--user", "root"]].concat();
    let mut server = serve(&testbed, DeviceKind::Packet, &arguments);
    assert!(server.reload().starts_with("reloaded"));
    let status = Status::read(&Path::new("/proc").join(server.child.id().to_string()));
    assert_eq!(status.field("Uid"), "0 0 0 0");
    assert_eq!(status.field("Seccomp"), "0");
    assert_ne!(status.field("CapEff"), "0000000000000000");
}

#[test]
fn user_that_cannot_be_is_an_error() {
    if !can_run("unknown user", &["setpriv"]) {
        return;
    }
    let testbed = Testbed::new(DeviceKind::Packet);
    let own = own_addresses();
    let mut arguments = vec!["serve", "echo", "--io", "packet", "--iface", testbed.device()];
    arguments.extend(own.iter().map(String::as_str));
    let error = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let unknown = [&arguments[..], &["--user", "no-such-user"]].concat();
    let text = error(&mut tidegate(&testbed, &unknown));
    assert!(text.contains("no such user: `useradd --system no-such-user`"), "{text}");

    let program = || fs::File::open(env!("CARGO_BIN_EXE_tidegate")).unwrap();
    let with = |setpriv: &[&str], arguments: &[&str]| {
        let mut command = testbed.server().command("setpriv");
        // Through an open file: the build directory may be inaccessible to other users.
        command.args(setpriv).arg("/proc/self/fd/0").args(arguments).stdin(program());
        command
    };
    let few = ["--bounding-set=-all,+net_raw"];
    let text = error(&mut with(&few, &arguments));
    assert!(text.contains("lacks CAP_SETGID CAP_SETUID"), "{text}");
    assert!(text.contains("--user root"), "{text}");

    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let rights = ["--inh-caps=-all,+net_raw", "--ambient-caps=-all,+net_raw"];
    let nobody = [&user[..], &rights].concat();
    let named = [&arguments[..], &["--user", "nobody"]].concat();
    let text = error(&mut with(&nobody, &named));
    assert!(text.contains("only root can become another user"), "{text}");
    // Without root nothing changes.
    let server = Running::start(&mut with(&nobody, &arguments));
    let status = Status::read(&Path::new("/proc").join(server.child.id().to_string()));
    assert_eq!(status.field("CapEff"), "0000000000002000");
    assert_eq!(status.field("Seccomp"), "0");
}
