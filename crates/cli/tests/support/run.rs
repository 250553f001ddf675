//! Unmodified applications on Tidegate, in the server's namespace of a testbed.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::{DeviceKind, SERVER_V4, SERVER_V6, Testbed};

/// Path of the preload library, built with the profile of this test.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--locked", "--quiet", "-p", "tidegate-preload"]);
        if folder.ends_with("release") {
            build.arg("--release");
        }
        let build = build.arg("--target-dir").arg(folder.parent().unwrap());
        let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(built.success(), "building the preload library failed");
        folder.join("libtidegate_preload.so")
    })
}

/// Flags that give an embedded stack the server's addresses.
pub const OWN_ADDRESSES: [&str; 4] = ["--address", "10.9.0.2/24", "--address", "fd00:9::2/64"];

/// Number of network cores of a daemon unless the test sets it (`TIDEGATE_TEST_CORES`,
/// default 1). An application has one attachment to each core.
pub fn cores() -> usize {
    let value = std::env::var("TIDEGATE_TEST_CORES").ok();
    value.map_or(1, |cores| cores.parse().expect("TIDEGATE_TEST_CORES must be a number"))
}

/// A running child process, killed on drop.
pub struct ChildProcess {
    child: Child,
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ChildProcess {
    pub fn new(command: &mut Command) -> Self {
        Self { child: command.stdin(Stdio::null()).spawn().unwrap() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// A daemon in the server's namespace of a testbed, and the applications that attach to it.
pub struct Daemon<'s> {
    testbed: &'s Testbed,
    folder: tempfile::TempDir,
    process: ChildProcess,
}

impl Drop for Daemon<'_> {
    /// Kills also a daemon that has taken over: it would keep the output of the tests open.
    fn drop(&mut self) {
        let _ = self.process.child.kill();
        let _ = self.process.child.wait();
        let successor = tidegate_service::daemon::DaemonReport::query(&self.socket());
        let pid = successor.ok().and_then(|report| i32::try_from(report.pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

impl<'s> Daemon<'s> {
    /// Starts a daemon with the server's addresses and waits until applications can attach.
    pub fn start(testbed: &'s Testbed, flags: &[&str]) -> Self {
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let own = ["--address", &addresses[0], "--address", &addresses[1]];
        Self::start_with(testbed, &[&own, flags].concat())
    }

    /// As [`Daemon::start`], on this kind of device.
    pub fn start_on(testbed: &'s Testbed, kind: DeviceKind, flags: &[&str]) -> Self {
        let device_flags = kind.flags(testbed.device());
        let device_flags: Vec<&str> = device_flags.iter().map(String::as_str).collect();
        Self::start(testbed, &[&device_flags, flags].concat())
    }

    /// Starts a daemon on the host's own addresses.
    pub fn start_shared(testbed: &'s Testbed, flags: &[&str]) -> Self {
        Self::start_with(testbed, &[&["--shared"], flags].concat())
    }

    fn start_with(testbed: &'s Testbed, flags: &[&str]) -> Self {
        Self::start_program(Path::new(env!("CARGO_BIN_EXE_tidegate")), testbed, flags)
    }

    /// Starts a daemon of this program with exactly these addresses, and waits until applications
    /// can attach.
    pub fn start_program(program: &Path, testbed: &'s Testbed, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The daemon itself decides which users may attach.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let mut command = testbed.server().command(program);
        command.arg("daemon");
        if !flags.contains(&"--iface") && !flags.iter().any(|flag| flag.starts_with("dpdk:")) {
            command.args(["--iface", testbed.device()]);
        }
        if !flags.contains(&"--cores") {
            // Shared addresses support one core only.
            let cores = if flags.contains(&"--shared") { 1 } else { cores() };
            command.args(["--cores", &cores.to_string()]);
        }
        command.arg("--socket").arg(folder.path().join("daemon.sock")).args(flags);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let process = ChildProcess { child };
        assert!(line.starts_with("ready: "), "{line}");
        Self { testbed, folder, process }
    }

    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    pub fn testbed(&self) -> &'s Testbed {
        self.testbed
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("daemon.sock")
    }

    /// Command that runs this program attached to the daemon (`tidegate run`).
    pub fn run(&self, flags: &[&str], program: &[&str]) -> Command {
        let mut command = self.testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_PRELOAD_LIBRARY", library());
        command.arg("run").arg("--socket").arg(self.socket());
        command.args(flags).arg("--").args(program);
        command
    }

    /// Starts a server and waits until it accepts connections on a port of both families.
    pub fn run_server(&self, program: &[&str], port: u16) -> ChildProcess {
        self.testbed.wait_for_server(&mut self.run(&[], program), port)
    }

    /// JSON report of `tidegate ss`.
    pub fn sockets(&self) -> serde_json::Value {
        let mut ss = self.testbed.server().command(env!("CARGO_BIN_EXE_tidegate"));
        let output = ss.args(["ss", "--json", "--socket"]).arg(self.socket()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// The server's side of a testbed, for tests that run with either backend.
pub enum ServerHost<'s> {
    /// A daemon to which the applications attach.
    Attached(Daemon<'s>),
    /// An embedded stack in each application, opened with these flags.
    Embedded(&'s Testbed, &'static [&'static str]),
    /// The kernel, for comparison.
    Kernel(&'s Testbed),
}

impl<'s> ServerHost<'s> {
    pub fn testbed(&self) -> &'s Testbed {
        match self {
            Self::Attached(daemon) => daemon.testbed,
            Self::Embedded(testbed, _) | Self::Kernel(testbed) => testbed,
        }
    }

    /// Runs the test with a daemon and with an embedded stack, on addresses of Tidegate's own.
    pub fn each(test: impl Fn(&ServerHost<'_>)) {
        Self::attached(&test);
        let testbed = Testbed::new(DeviceKind::Xdp);
        test(&ServerHost::Embedded(&testbed, &OWN_ADDRESSES));
    }

    /// As [`ServerHost::each`], with a daemon only.
    pub fn attached(test: impl Fn(&ServerHost<'_>)) {
        Self::attached_with(&[], test);
    }

    /// As [`ServerHost::attached`], with flags for the daemon.
    pub fn attached_with(flags: &[&str], test: impl Fn(&ServerHost<'_>)) {
        let testbed = Testbed::new(DeviceKind::Xdp);
        test(&ServerHost::Attached(Daemon::start(&testbed, flags)));
    }

    /// As [`ServerHost::each`], on the host's own addresses.
    pub fn each_shared(test: impl Fn(&ServerHost<'_>)) {
        Self::attached_shared(&test);
        let testbed = Testbed::shared();
        test(&ServerHost::Embedded(&testbed, &["--shared"]));
    }

    /// As [`ServerHost::each_shared`], with a daemon only.
    pub fn attached_shared(test: impl Fn(&ServerHost<'_>)) {
        let testbed = Testbed::shared();
        test(&ServerHost::Attached(Daemon::start_shared(&testbed, &[])));
    }

    /// Command that runs this program on Tidegate (`tidegate run`), or on the kernel.
    pub fn run(&self, program: &[&str]) -> Command {
        match self {
            Self::Attached(daemon) => daemon.run(&[], program),
            Self::Embedded(testbed, flags) => testbed.run_with(flags, program),
            Self::Kernel(testbed) => {
                let mut command = testbed.server().command(program[0]);
                command.args(&program[1..]);
                command
            }
        }
    }

    /// Starts a server and waits until it accepts connections on a port of both families.
    pub fn run_server(&self, program: &[&str], port: u16) -> ChildProcess {
        self.testbed().wait_for_server(&mut self.run(program), port)
    }
}

impl Testbed {
    /// Command that runs this program with an embedded stack that has the server's addresses.
    pub fn run(&self, flags: &[&str], program: &[&str]) -> Command {
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let mut all = vec!["--address", &addresses[0], "--address", &addresses[1]];
        all.extend(flags);
        self.run_with(&all, program)
    }

    /// As [`Testbed::run`], with exactly these flags.
    pub fn run_with(&self, flags: &[&str], program: &[&str]) -> Command {
        let mut command = self.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_PRELOAD_LIBRARY", library());
        command.args(["run", "--embedded", "--iface", self.device()]);
        command.args(flags).arg("--").args(program);
        command
    }

    /// Starts a server and waits until it accepts connections on a port of both families.
    pub fn run_server(&self, flags: &[&str], program: &[&str], port: u16) -> ChildProcess {
        self.wait_for_server(&mut self.run(flags, program), port)
    }

    /// Starts this command and waits until it accepts connections on a port of both families.
    pub fn wait_for_server(&self, command: &mut Command, port: u16) -> ChildProcess {
        let server = ChildProcess::new(command);
        for address in [SERVER_V4, SERVER_V6] {
            self.wait_for_port(address, port);
        }
        server
    }

    /// Waits until a server listens on this address and port.
    pub fn wait_for_port(&self, address: &str, port: u16) {
        let began = Instant::now();
        while !self.accepts(address, port) {
            assert!(began.elapsed() < Duration::from_secs(30), "no listener on port {port}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// True if a server accepts a connection on this address and port.
    pub fn accepts(&self, address: &str, port: u16) -> bool {
        let address = SocketAddr::new(address.parse().unwrap(), port);
        // The address does not exist before the server listens.
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok();
        self.client().enter(connect).unwrap()
    }
}
