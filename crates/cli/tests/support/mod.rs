//! A site with a server under test on one side and the kernel on the other.

// Each test program uses a part of this.
#![allow(dead_code)]

pub mod run;

use std::fs::{self, DirEntry};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidegate_lab::netns::{Namespace, VethConfig, VethPair};

pub const CLIENT_V4: &str = "10.9.0.1";
pub const CLIENT_V6: &str = "fd00:9::1";
pub const SERVER_V4: &str = "10.9.0.2";
pub const SERVER_V6: &str = "fd00:9::2";

/// Whether this test can run; says so when it cannot.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped {test}: network namespaces need root");
    }
    root
}

/// Whether all of these programs are installed; says which one is not.
pub fn have(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let missing = programs.iter().find(|program| {
        !path.split(':').any(|folder| std::path::Path::new(folder).join(program).exists())
    });
    if let Some(program) = missing {
        eprintln!("skipped {test}: {program} is not installed");
    }
    missing.is_none()
}

/// Whether a test can run that needs namespaces and these programs.
pub fn can(test: &str, programs: &[&str]) -> bool {
    is_root(test) && have(test, programs)
}

/// Waits until this is so, for a minute at most.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "it never comes to this: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Addresses as URLs have them.
pub fn url(address: &str, rest: &str) -> String {
    match address.contains(':') {
        true => format!("http://[{address}]{rest}"),
        false => format!("http://{address}{rest}"),
    }
}

/// A folder with a small and a large file, which everybody may read.
pub fn files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(folder.path().join("small"), "high water\n").unwrap();
    let large: Vec<u8> = (0..3_000_000).map(|n| (n % 251) as u8).collect();
    fs::write(folder.path().join("large"), large).unwrap();
    folder
}

/// The port that a server is tested on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Xdp,
    XdpGeneric,
    XdpInterrupts,
    Packet,
    Tap,
    DpdkPacket,
    DpdkTap,
    DpdkMemif,
}

impl Kind {
    /// Every port of a program without DPDK.
    #[cfg(not(feature = "dpdk"))]
    pub const ALL: [Kind; 5] =
        [Kind::Xdp, Kind::XdpGeneric, Kind::XdpInterrupts, Kind::Packet, Kind::Tap];

    /// Those that a program with DPDK has beyond them.
    #[cfg(feature = "dpdk")]
    pub const ALL: [Kind; 3] = [Kind::DpdkPacket, Kind::DpdkTap, Kind::DpdkMemif];

    /// Whether the client's end of the wire is there only while a server runs.
    pub fn makes_the_wire(self) -> bool {
        matches!(self, Kind::Tap | Kind::DpdkTap | Kind::DpdkMemif)
    }

    /// The longest datagram on IPv4 that comes through. DPDK's driver has the
    /// kernel put fragments together, for a buffer that is one frame long.
    pub fn ipv4_bytes_max(self) -> usize {
        if self == Kind::DpdkPacket { 1600 } else { usize::MAX }
    }

    /// The flags of a server on a device.
    pub fn flags(self, device: &str) -> Vec<String> {
        let flags: &[&str] = match self {
            Kind::Xdp => &["--port", "xdp", "--xdp-mode", "native"],
            Kind::XdpGeneric => &["--port", "xdp", "--xdp-mode", "generic"],
            Kind::XdpInterrupts => &["--port", "xdp", "--busy-poll", "0"],
            Kind::Packet => &["--port", "packet"],
            Kind::Tap => &["--port", "tap"],
            Kind::DpdkPacket => return dpdk(&format!("net_af_packet0,iface={device}")),
            Kind::DpdkTap => return dpdk(&format!("net_tap0,iface={device}")),
            Kind::DpdkMemif => {
                // Each server has the same, since the client remembers it.
                let mac = "mac=02:00:00:00:00:02";
                return dpdk(&format!("net_memif0,role=client,{mac},{MEMIF}"));
            }
        };
        let all = [flags, &["--iface", device]].concat();
        all.into_iter().map(str::to_owned).collect()
    }
}

fn dpdk(device: &str) -> Vec<String> {
    vec!["--port".into(), format!("dpdk:{device}")]
}

/// Two hosts: the kernel with its tools, and room for a server.
pub enum Site {
    /// Joined by a veth pair.
    Veth(VethPair),
    /// The kernel on one side of a TAP device, the server on the other.
    Tap(Namespace),
    /// The kernel on one side of a TAP device, whose other side DPDK's own
    /// program joins to a memif.
    Memif(Bridge, Namespace),
}

const TAP: &str = "tg0";

/// The wire of [`Site::Memif`]: a socket that is known in its namespace only.
const MEMIF: &str = "id=0,socket=tidegate-test,socket-abstract=yes";

/// `dpdk-testpmd` between a memif and a TAP device. It is killed on drop.
pub struct Bridge(Child);

impl Bridge {
    fn new(host: &Namespace) -> Self {
        let memif = format!("net_memif0,role=server,{MEMIF}");
        let tap = format!("net_tap0,iface={TAP}");
        let eal = ["--no-huge", "-m", "256", "--no-shconf", "--no-telemetry", "--no-pci"];
        // On which processors the two threads run is the scheduler's business.
        let last = std::thread::available_parallelism().unwrap().get() - 1;
        let lcores = format!("--lcores=0@(0-{last}),1@(0-{last})");
        let mut command = host.command("dpdk-testpmd");
        command.args(eal).args([&lcores, "--vdev", &memif, "--vdev", &tap, "--"]);
        command.args(["--total-num-mbufs=4096", "--forward-mode=io"]);
        // It ends when it is told something.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Site {
    /// The client has its addresses; the server's are nobody's yet.
    pub fn new(kind: Kind) -> Self {
        match kind {
            Kind::Tap => {
                let host = Namespace::new("tap").unwrap();
                host.ip(&["tuntap", "add", TAP, "mode", "tap", "vnet_hdr"]).unwrap();
                give_client_addresses(&host);
                Self::Tap(host)
            }
            Kind::DpdkTap => Self::without_device(),
            Kind::DpdkMemif => {
                let host = Namespace::new("memif").unwrap();
                let bridge = Bridge::new(&host);
                while host.ip(&["link", "show", TAP]).is_err() {}
                give_client_addresses(&host);
                Self::Memif(bridge, host)
            }
            _ => {
                let client = [format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")];
                let config = VethConfig { a: client.into(), b: Vec::new() };
                Self::Veth(VethPair::new(&config).unwrap())
            }
        }
    }

    /// The server makes the TAP device, whose other end gets the client's addresses
    /// then.
    pub fn without_device() -> Self {
        Self::Tap(Namespace::new("tap").unwrap())
    }

    /// As [`Site::new`], and the server's kernel has the server's addresses.
    pub fn shared() -> Self {
        let config = VethConfig {
            a: vec![format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")],
            b: vec![format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")],
        };
        Self::Veth(VethPair::new(&config).unwrap())
    }

    pub fn client(&self) -> &Namespace {
        match self {
            Self::Veth(pair) => &pair.a.namespace,
            Self::Tap(host) | Self::Memif(_, host) => host,
        }
    }

    pub fn server(&self) -> &Namespace {
        match self {
            Self::Veth(pair) => &pair.b.namespace,
            Self::Tap(host) | Self::Memif(_, host) => host,
        }
    }

    /// The interface that the server is to use.
    pub fn device(&self) -> &str {
        match self {
            Self::Veth(pair) => &pair.b.device,
            Self::Tap(_) | Self::Memif(..) => TAP,
        }
    }

    /// The client's side of the wire.
    pub fn client_device(&self) -> &str {
        match self {
            Self::Veth(pair) => &pair.a.device,
            Self::Tap(_) | Self::Memif(..) => TAP,
        }
    }

    /// Starts a server with its own addresses and waits until it is ready.
    pub fn serve(&self, kind: Kind, arguments: &[&str]) -> Server {
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let flags = kind.flags(self.device());
        let mut all = arguments.to_vec();
        all.extend(flags.iter().map(String::as_str));
        all.extend(["--address", &addresses[0], "--address", &addresses[1]]);
        let server = self.start(&all);
        if kind == Kind::DpdkTap {
            self.give_client_addresses();
        }
        if kind == Kind::DpdkMemif {
            self.wait_for_memif();
        }
        server
    }

    /// Gives the client's end of a device that is there now its addresses.
    pub fn give_client_addresses(&self) {
        give_client_addresses(self.client());
    }

    /// What is sent before both ends of the memif have found each other is lost.
    fn wait_for_memif(&self) {
        let ping = ["-c", "1", "-W", "1", SERVER_V4];
        let is_there = || self.try_tool("ping", &ping).status.success();
        assert!((0..20).any(|_| is_there()), "the memif does not connect");
    }

    /// Starts `tidegate serve` on the server's side with exactly these
    /// arguments and waits until it is ready.
    pub fn start(&self, arguments: &[&str]) -> Server {
        self.start_command("serve", arguments)
    }

    /// As [`Site::start`], with another command of the program.
    pub fn start_command(&self, name: &str, arguments: &[&str]) -> Server {
        let mut command = self.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.arg(name).args(arguments).arg("--json").stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "the server said {line:?}");
        Server { child, output }
    }

    /// Runs one of the kernel's tools on the client's side and returns what it
    /// printed.
    pub fn tool(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.try_tool(program, arguments);
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{program} {}: {}\n{stdout}{stderr}",
            arguments.join(" "),
            output.status
        );
        stdout
    }

    /// As [`Site::tool`], however it ends.
    pub fn try_tool(&self, program: &str, arguments: &[&str]) -> Output {
        self.client().command(program).args(arguments).output().unwrap()
    }
}

/// The client's end of a TAP device.
fn give_client_addresses(host: &Namespace) {
    host.ip(&["link", "set", TAP, "addrgenmode", "none", "up"]).unwrap();
    host.ip(&["addr", "add", &format!("{CLIENT_V4}/24"), "dev", TAP]).unwrap();
    host.ip(&["addr", "add", &format!("{CLIENT_V6}/64"), "dev", TAP, "nodad"]).unwrap();
}

/// A running `tidegate serve` or the like, killed on drop.
pub struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Server {
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// Waits until all of its threads sleep.
    pub fn wait_until_asleep(&self) {
        let begin = Instant::now();
        let tasks = format!("/proc/{}/task", self.child.id());
        let sleeps = |task: std::io::Result<DirEntry>| {
            let stat = fs::read_to_string(task.unwrap().path().join("stat"));
            // A thread that is gone does nothing either.
            stat.map_or(true, |stat| stat.rsplit_once(')').unwrap().1.starts_with(" S"))
        };
        while !fs::read_dir(&tasks).unwrap().all(sleeps) {
            assert!(begin.elapsed() < Duration::from_secs(30), "it does not sleep");
        }
    }

    /// Ends it as an operator would and returns its counters.
    pub fn stop(mut self) -> Value {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::TERM).unwrap();
        self.wait()
    }

    /// Waits until it ends by itself and returns its counters.
    pub fn wait(&mut self) -> Value {
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }

    /// Ends it without a chance to clean up.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After `stop` and `kill` it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program, run to its end in this namespace.
pub fn tidegate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate")).args(arguments).output().unwrap()
}

/// The path of a zone file of the tests, as `--zone` wants it.
pub fn zone() -> String {
    format!("example.test={}/tests/zones/example.zone", env!("CARGO_MANIFEST_DIR"))
}
