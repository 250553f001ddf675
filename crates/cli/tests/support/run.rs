//! Unmodified programs on Tidegate, in a site's server namespace.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::{Kind, SERVER_V4, SERVER_V6, Site};

/// The library that is loaded into programs, built like this test.
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
        assert!(built.success(), "the library cannot be built");
        folder.join("libtidegate_preload.so")
    })
}

/// The flags that give a stack inside a program the server's addresses.
const OWN_ADDRESSES: [&str; 4] = ["--address", "10.9.0.2/24", "--address", "fd00:9::2/64"];

/// How many network cores a daemon has if a test does not say: a program has a line to
/// each of them.
pub fn cores() -> usize {
    let said = std::env::var("TIDEGATE_TEST_CORES").ok();
    said.map_or(1, |cores| cores.parse().expect("TIDEGATE_TEST_CORES is a number"))
}

/// A program that runs, killed on drop.
pub struct Program {
    child: Child,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    pub fn new(command: &mut Command) -> Self {
        Self { child: command.stdin(Stdio::null()).spawn().unwrap() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// The daemon in a site's server namespace, and the programs that attach to it.
pub struct Daemon<'s> {
    site: &'s Site,
    folder: tempfile::TempDir,
    process: Program,
}

impl<'s> Daemon<'s> {
    /// Starts it with the server's addresses, and waits until programs can attach.
    pub fn start(site: &'s Site, flags: &[&str]) -> Self {
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let own = ["--address", &addresses[0], "--address", &addresses[1]];
        Self::start_with(site, &[&own, flags].concat())
    }

    /// As [`Daemon::start`], on a port of this kind.
    pub fn start_on(site: &'s Site, kind: Kind, flags: &[&str]) -> Self {
        let port = kind.flags(site.device());
        let port: Vec<&str> = port.iter().map(String::as_str).collect();
        Self::start(site, &[&port, flags].concat())
    }

    /// Starts it on the kernel's addresses.
    pub fn start_shared(site: &'s Site, flags: &[&str]) -> Self {
        Self::start_with(site, &[&["--shared"], flags].concat())
    }

    fn start_with(site: &'s Site, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Who may come to its door is for the door to say.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let mut command = site.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve");
        if !flags.contains(&"--iface") && !flags.iter().any(|flag| flag.starts_with("dpdk:")) {
            command.args(["--iface", site.device()]);
        }
        if !flags.contains(&"--cores") {
            // The kernel's addresses are for one core.
            let cores = if flags.contains(&"--shared") { 1 } else { cores() };
            command.args(["--cores", &cores.to_string()]);
        }
        command.arg("--socket").arg(folder.path().join("daemon.sock")).args(flags);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let process = Program { child };
        assert!(line.starts_with("ready: "), "{line}");
        Self { site, folder, process }
    }

    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("daemon.sock")
    }

    /// `tidegate run` of this program, attached.
    pub fn run(&self, flags: &[&str], program: &[&str]) -> Command {
        let mut command = self.site.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_PRELOAD_LIBRARY", library());
        command.arg("run").arg("--socket").arg(self.socket());
        command.args(flags).arg("--").args(program);
        command
    }

    /// Starts a server and waits until it answers on a port of both families.
    pub fn run_server(&self, program: &[&str], port: u16) -> Program {
        self.site.wait_for_server(&mut self.run(&[], program), port)
    }

    /// What `tidegate ss` says, as JSON.
    pub fn sockets(&self) -> serde_json::Value {
        let mut ss = self.site.server().command(env!("CARGO_BIN_EXE_tidegate"));
        let output = ss.args(["ss", "--json", "--socket"]).arg(self.socket()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// The server's side of a site, for tests that do the same wherever the stack is.
pub enum Host<'s> {
    /// In a daemon that programs are attached to.
    Attached(Daemon<'s>),
    /// Inside each program, opened with these flags.
    Embedded(&'s Site, &'static [&'static str]),
}

impl<'s> Host<'s> {
    pub fn site(&self) -> &'s Site {
        match self {
            Self::Attached(daemon) => daemon.site,
            Self::Embedded(site, _) => site,
        }
    }

    /// Does this with a daemon, and with a stack inside the program, on addresses of
    /// Tidegate's own.
    pub fn each(test: impl Fn(&Host<'_>)) {
        Self::attached(&test);
        let site = Site::new(Kind::Xdp);
        test(&Host::Embedded(&site, &OWN_ADDRESSES));
    }

    /// As [`Host::each`], with a daemon only.
    pub fn attached(test: impl Fn(&Host<'_>)) {
        Self::attached_with(&[], test);
    }

    /// As [`Host::attached`], with flags for the daemon.
    pub fn attached_with(flags: &[&str], test: impl Fn(&Host<'_>)) {
        let site = Site::new(Kind::Xdp);
        test(&Host::Attached(Daemon::start(&site, flags)));
    }

    /// As [`Host::each`], on the kernel's addresses.
    pub fn each_shared(test: impl Fn(&Host<'_>)) {
        Self::attached_shared(&test);
        let site = Site::shared();
        test(&Host::Embedded(&site, &["--shared"]));
    }

    /// As [`Host::each_shared`], with a daemon only.
    pub fn attached_shared(test: impl Fn(&Host<'_>)) {
        let site = Site::shared();
        test(&Host::Attached(Daemon::start_shared(&site, &[])));
    }

    /// `tidegate run` of this program.
    pub fn run(&self, program: &[&str]) -> Command {
        match self {
            Self::Attached(daemon) => daemon.run(&[], program),
            Self::Embedded(site, flags) => site.run_with(flags, program),
        }
    }

    /// Starts a server and waits until it answers on a port of both families.
    pub fn run_server(&self, program: &[&str], port: u16) -> Program {
        self.site().wait_for_server(&mut self.run(program), port)
    }
}

impl Site {
    /// `tidegate run` of this program on the server's side, with its addresses.
    pub fn run(&self, flags: &[&str], program: &[&str]) -> Command {
        let addresses = [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")];
        let mut all = vec!["--address", &addresses[0], "--address", &addresses[1]];
        all.extend(flags);
        self.run_with(&all, program)
    }

    /// As [`Site::run`], with exactly these flags.
    pub fn run_with(&self, flags: &[&str], program: &[&str]) -> Command {
        let mut command = self.server().command(env!("CARGO_BIN_EXE_tidegate"));
        command.env("TIDEGATE_PRELOAD_LIBRARY", library());
        command.args(["run", "--embedded", "--iface", self.device()]);
        command.args(flags).arg("--").args(program);
        command
    }

    /// Starts a server and waits until it answers on a port of both families.
    pub fn run_server(&self, flags: &[&str], program: &[&str], port: u16) -> Program {
        self.wait_for_server(&mut self.run(flags, program), port)
    }

    /// Starts this and waits until it answers on a port of both families.
    pub fn wait_for_server(&self, command: &mut Command, port: u16) -> Program {
        let server = Program::new(command);
        for address in [SERVER_V4, SERVER_V6] {
            self.wait_for_port(address, port);
        }
        server
    }

    /// Waits until somebody listens there.
    pub fn wait_for_port(&self, address: &str, port: u16) {
        let began = Instant::now();
        let address = SocketAddr::new(address.parse().unwrap(), port);
        // Nobody has the address before the program listens.
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok();
        while !self.client().enter(connect).unwrap() {
            assert!(began.elapsed() < Duration::from_secs(30), "nobody listens on port {port}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
