//! Testbed: the server under test on one side, the kernel on the other.

// Each test binary uses a part of this module.
#![allow(dead_code, unused_imports)]

pub mod c_library;
pub mod run;
pub mod running;

use std::fs::{self, DirEntry};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;
pub use tidegate_lab::testbed::for_tests::{can_run, has_programs, is_root, wait_until};
use tidegate_lab::testbed::netns::{Namespace, VethConfig, VethPair};

pub const CLIENT_V4: &str = "10.9.0.1";
pub const CLIENT_V6: &str = "fd00:9::1";
pub const SERVER_V4: &str = "10.9.0.2";
pub const SERVER_V6: &str = "fd00:9::2";

/// URL of an address, with brackets around IPv6 addresses.
pub fn url(address: &str, rest: &str) -> String {
    match address.contains(':') {
        true => format!("http://[{address}]{rest}"),
        false => format!("http://{address}{rest}"),
    }
}

/// World-readable folder with a small and a large file.
pub fn files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(folder.path().join("small"), "high water\n").unwrap();
    let large: Vec<u8> = (0..3_000_000).map(|n| (n % 251) as u8).collect();
    fs::write(folder.path().join("large"), large).unwrap();
    folder
}

/// Device kind and mode of the server under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Xdp,
    XdpGeneric,
    XdpInterrupts,
    Packet,
    Tap,
    DpdkPacket,
    DpdkTap,
    DpdkMemif,
}

impl DeviceKind {
    /// Every device kind of this build.
    pub const ALL: &[DeviceKind] = &[
        DeviceKind::Xdp,
        DeviceKind::XdpGeneric,
        DeviceKind::XdpInterrupts,
        DeviceKind::Packet,
        DeviceKind::Tap,
        #[cfg(feature = "dpdk")]
        DeviceKind::DpdkPacket,
        #[cfg(feature = "dpdk")]
        DeviceKind::DpdkTap,
        #[cfg(feature = "dpdk")]
        DeviceKind::DpdkMemif,
    ];

    /// True if the client's end of the link exists only while a server runs.
    pub fn creates_link(self) -> bool {
        matches!(self, DeviceKind::Tap | DeviceKind::DpdkTap | DeviceKind::DpdkMemif)
    }

    /// Longest IPv4 datagram that gets through, in bytes. With DPDK's AF_PACKET driver the kernel
    /// reassembles fragments, for a buffer one frame long.
    pub fn max_ipv4_bytes(self) -> usize {
        if self == DeviceKind::DpdkPacket { 1600 } else { usize::MAX }
    }

    /// Flags of a server on this kind of device.
    pub fn flags(self, device: &str) -> Vec<String> {
        let flags: &[&str] = match self {
            DeviceKind::Xdp => &["--io", "xdp", "--xdp-mode", "native"],
            DeviceKind::XdpGeneric => &["--io", "xdp", "--xdp-mode", "generic"],
            DeviceKind::XdpInterrupts => &["--io", "xdp", "--busy-poll", "0"],
            DeviceKind::Packet => &["--io", "packet"],
            DeviceKind::Tap => &["--io", "tap"],
            DeviceKind::DpdkPacket => return dpdk(&format!("net_af_packet0,iface={device}")),
            DeviceKind::DpdkTap => return dpdk(&format!("net_tap0,iface={device}")),
            DeviceKind::DpdkMemif => {
                // Each server has the same address, since the client caches it.
                let mac = "mac=02:00:00:00:00:02";
                return dpdk(&format!("net_memif0,role=client,{mac},{MEMIF}"));
            }
        };
        let all = [flags, &["--iface", device]].concat();
        all.into_iter().map(str::to_owned).collect()
    }
}

fn dpdk(device: &str) -> Vec<String> {
    vec!["--io".into(), format!("dpdk:{device}")]
}

/// Two hosts: the client on the kernel, and a place for the server under test.
pub enum Testbed {
    /// Joined by a veth pair.
    Veth(VethPair),
    /// The kernel on one side of a TAP device, the server on the other.
    Tap(Namespace),
    /// The kernel on one side of a TAP device, whose other side `dpdk-testpmd` bridges to a
    /// memif. Each server has a bridge of its own: `dpdk-testpmd` may crash when the client of
    /// its memif ends.
    Memif(Mutex<Option<Bridge>>, Namespace),
}

const TAP: &str = "tg0";

/// Arguments of [`Testbed::Memif`]: an abstract socket, visible in its network namespace only.
const MEMIF: &str = "id=0,socket=tidegate-test,socket-abstract=yes";

/// `dpdk-testpmd` that forwards between a memif and a TAP device; killed on drop.
pub struct Bridge(Child);

impl Bridge {
    /// Starts it and waits until its TAP device exists and its memif accepts a client.
    fn new(host: &Namespace) -> Self {
        let memif = format!("net_memif0,role=server,{MEMIF}");
        let tap = format!("net_tap0,iface={TAP}");
        let eal = ["--no-huge", "-m", "256", "--no-shconf", "--no-telemetry", "--no-pci"];
        // The scheduler chooses the processors of the two threads.
        let last = std::thread::available_parallelism().unwrap().get() - 1;
        let lcores = format!("--lcores=0@(0-{last}),1@(0-{last})");
        let mut command = host.command("dpdk-testpmd");
        command.args(eal).args([&lcores, "--vdev", &memif, "--vdev", &tap, "--"]);
        command.args(["--total-num-mbufs=4096", "--forward-mode=io"]);
        // testpmd exits when it reads from standard input.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let bridge = Self(command.spawn().unwrap());
        while host.ip(&["link", "show", TAP]).is_err() || !accepts_memif(host) {}
        bridge
    }
}

/// True if a memif server listens in the namespace. Its TAP device exists before.
fn accepts_memif(host: &Namespace) -> bool {
    /// Mark of a listening socket (`__SO_ACCEPTCON`), in `/proc/net/unix`.
    const LISTENS: &str = " 00010000 ";
    // `/proc/net` shows the namespace of the process, not of the thread.
    let sockets = host.enter(|| fs::read_to_string("/proc/thread-self/net/unix"));
    let sockets = sockets.unwrap().unwrap();
    sockets.lines().any(|line| line.contains(LISTENS) && line.contains("@tidegate-test"))
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Testbed {
    /// Creates the testbed, with a veth as Linux makes it. The client has its addresses; the
    /// server's are still unassigned.
    pub fn new(kind: DeviceKind) -> Self {
        match kind {
            DeviceKind::Tap => {
                let host = Namespace::new("tap").unwrap();
                host.ip(&["tuntap", "add", TAP, "mode", "tap", "vnet_hdr"]).unwrap();
                give_client_addresses(&host);
                Self::Tap(host)
            }
            DeviceKind::DpdkTap => Self::without_device(),
            DeviceKind::DpdkMemif => {
                Self::Memif(Mutex::default(), Namespace::new("memif").unwrap())
            }
            _ => {
                let client = [format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")];
                let config = VethConfig { a: client.into(), b: Vec::new() };
                Self::Veth(match kind {
                    // DPDK's AF_PACKET driver does not learn the state of checksums.
                    DeviceKind::DpdkPacket => VethPair::as_on_a_wire(&config).unwrap(),
                    DeviceKind::Packet => VethPair::new(&config).unwrap(),
                    // A queue for each network core.
                    _ => VethPair::with_queues(&config, run::cores()).unwrap(),
                })
            }
        }
    }

    /// As [`Testbed::new`] for AF_XDP, with as many queues on both ends.
    pub fn with_queues(queues: usize) -> Self {
        let client = [format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")];
        let config = VethConfig { a: client.into(), b: Vec::new() };
        Self::Veth(VethPair::with_queues(&config, queues).unwrap())
    }

    /// Testbed without a device: the server creates the TAP device, and the client's addresses
    /// are assigned afterwards.
    pub fn without_device() -> Self {
        Self::Tap(Namespace::new("tap").unwrap())
    }

    /// As [`Testbed::new`], but the server's kernel has the server's addresses.
    pub fn shared() -> Self {
        Self::shared_with_queues(1)
    }

    /// As [`Testbed::shared`], with as many queues on both ends.
    pub fn shared_with_queues(queues: usize) -> Self {
        let config = VethConfig {
            a: vec![format!("{CLIENT_V4}/24"), format!("{CLIENT_V6}/64")],
            b: vec![format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")],
        };
        Self::Veth(VethPair::with_queues(&config, queues).unwrap())
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

    /// Interface for the server.
    pub fn device(&self) -> &str {
        match self {
            Self::Veth(pair) => &pair.b.device,
            Self::Tap(_) | Self::Memif(..) => TAP,
        }
    }

    /// Interface of the client.
    pub fn client_device(&self) -> &str {
        match self {
            Self::Veth(pair) => &pair.a.device,
            Self::Tap(_) | Self::Memif(..) => TAP,
        }
    }

    /// Starts a server with its own addresses and waits until it is ready.
    pub fn serve(&self, kind: DeviceKind, arguments: &[&str]) -> Server {
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let flags = kind.flags(self.device());
        let mut all = arguments.to_vec();
        all.extend(flags.iter().map(String::as_str));
        all.extend(["--address", &addresses[0], "--address", &addresses[1]]);
        if let Self::Memif(bridge, host) = self {
            // The last bridge ends first: its TAP device has the same name.
            let mut bridge = bridge.lock().unwrap();
            drop(bridge.take());
            *bridge = Some(Bridge::new(host));
            drop(bridge);
            self.give_client_addresses();
        }
        let server = self.start(&all);
        if kind == DeviceKind::DpdkTap {
            self.give_client_addresses();
        }
        if kind == DeviceKind::DpdkMemif {
            self.wait_for_memif();
        }
        server
    }

    /// Assigns the client's addresses to its end of a device that exists now.
    pub fn give_client_addresses(&self) {
        give_client_addresses(self.client());
    }

    /// Waits for the memif to connect: packets sent before that are lost.
    fn wait_for_memif(&self) {
        let ping = ["-c", "1", "-W", "1", SERVER_V4];
        let is_connected = || self.try_tool("ping", &ping).status.success();
        assert!((0..20).any(|_| is_connected()), "the memif does not connect");
    }

    /// Starts `tidegate daemon` on the server's side with exactly these arguments and waits until
    /// it is ready.
    pub fn start(&self, arguments: &[&str]) -> Server {
        self.start_command("serve", arguments)
    }

    /// As [`Testbed::start`], with another subcommand.
    pub fn start_command(&self, name: &str, arguments: &[&str]) -> Server {
        let mut command = self.server().command(env!("CARGO_BIN_EXE_tidegate"));
        Server::start(command.arg(name).args(arguments))
    }

    /// Runs a tool on the client's side and returns its standard output. Panics if the tool fails.
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

    /// As [`Testbed::tool`], whatever the exit status.
    pub fn try_tool(&self, program: &str, arguments: &[&str]) -> Output {
        self.client().command(program).args(arguments).output().unwrap()
    }
}

/// Assigns the client's addresses to the TAP device.
fn give_client_addresses(host: &Namespace) {
    host.ip(&["link", "set", TAP, "addrgenmode", "none", "up"]).unwrap();
    host.ip(&["addr", "add", &format!("{CLIENT_V4}/24"), "dev", TAP]).unwrap();
    host.ip(&["addr", "add", &format!("{CLIENT_V6}/64"), "dev", TAP, "nodad"]).unwrap();
}

/// A running server command, killed on drop.
pub struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Server {
    /// Starts a server command, which reports as JSON, and waits until it is ready.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.arg("--json").stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "the server printed {line:?}");
        Self { child, output }
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// Waits until all threads of the server sleep.
    pub fn wait_until_asleep(&self) {
        let begin = Instant::now();
        let tasks = format!("/proc/{}/task", self.child.id());
        let sleeps = |task: std::io::Result<DirEntry>| {
            let stat = fs::read_to_string(task.unwrap().path().join("stat"));
            // A thread that has exited does not run either.
            stat.map_or(true, |stat| stat.rsplit_once(')').unwrap().1.starts_with(" S"))
        };
        while !fs::read_dir(&tasks).unwrap().all(sleeps) {
            assert!(begin.elapsed() < Duration::from_secs(30), "the server does not sleep");
        }
    }

    /// Stops the server with SIGTERM and returns its report.
    pub fn stop(mut self) -> Value {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::TERM).unwrap();
        self.wait()
    }

    /// Waits until the server exits by itself and returns its report.
    pub fn wait(&mut self) -> Value {
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text:?}"))
    }

    /// Kills the server, which cannot clean up.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // `stop` and `kill` have ended the process already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `tidegate` to completion in the test's own namespace.
pub fn tidegate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate")).args(arguments).output().unwrap()
}

/// Value of `--zone` for the tests' zone file.
pub fn zone() -> String {
    format!("example.test={}/tests/zones/example.zone", env!("CARGO_MANIFEST_DIR"))
}
