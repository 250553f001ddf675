//! DNS servers that are compared, each as a child process on one core.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::LabError;
use crate::testbed::netns::VethEnd;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;

/// DNS server to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerKind {
    /// Tidegate's DNS server on AF_XDP.
    TidegateXdp,
    /// Tidegate's DNS server on AF_PACKET, for users without the rights for AF_XDP.
    TidegatePacket,
    /// The same server on kernel sockets.
    TidegateKernel,
    /// Knot DNS in its XDP mode.
    KnotXdp,
    /// Knot DNS on kernel sockets.
    Knot,
    /// NSD on kernel sockets.
    Nsd,
}

impl ServerKind {
    /// The servers of the experiment, in the order of its table.
    pub const COMPARED: [ServerKind; 5] = [
        ServerKind::TidegateXdp,
        ServerKind::TidegateKernel,
        ServerKind::KnotXdp,
        ServerKind::Knot,
        ServerKind::Nsd,
    ];

    /// Name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::TidegateXdp => "tidegate-xdp",
            ServerKind::TidegatePacket => "tidegate-packet",
            ServerKind::TidegateKernel => "tidegate-kernel",
            ServerKind::KnotXdp => "knot-xdp",
            ServerKind::Knot => "knot",
            ServerKind::Nsd => "nsd",
        }
    }

    /// True if the server receives through the kernel's network stack.
    pub fn is_on_kernel_sockets(self) -> bool {
        matches!(self, ServerKind::TidegateKernel | ServerKind::Knot | ServerKind::Nsd)
    }

    /// Contexts that can do the receive work of the server's device, among which its best is.
    pub(crate) fn receive_works(self) -> &'static [ReceiveWork] {
        match self {
            ServerKind::TidegateXdp | ServerKind::TidegatePacket => &[ReceiveWork::Server],
            ServerKind::KnotXdp => &[ReceiveWork::Timer, ReceiveWork::Softirq, ReceiveWork::Thread],
            ServerKind::TidegateKernel => &ReceiveWork::KERNEL,
            _ => &ReceiveWork::PROGRAMS,
        }
    }

    fn is_tidegate(self) -> bool {
        matches!(
            self,
            ServerKind::TidegateXdp | ServerKind::TidegatePacket | ServerKind::TidegateKernel
        )
    }
}

impl FromStr for ServerKind {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        let all = [ServerKind::TidegatePacket].into_iter().chain(Self::COMPARED);
        let mut names = String::new();
        for kind in all {
            if kind.name() == text {
                return Ok(kind);
            }
            let _ = write!(names, " {}", kind.name());
        }
        Err(LabError::Config(format!("unknown server {text:?}; known servers:{names}")))
    }
}

/// Setup common to all servers.
#[derive(Debug)]
pub struct Setup {
    /// Folder for configuration files.
    pub folder: PathBuf,
    /// Origin of the zone, without a trailing dot.
    pub origin: String,
    /// Path of the zone file.
    pub zone_file: PathBuf,
    /// Address of the kernel's stack.
    pub kernel_address: IpAddr,
    /// Address of Tidegate's stack, on the same link.
    pub own_address: IpAddr,
    /// Further addresses of Tidegate's stack, each with its prefix length.
    pub extra_own_addresses: Vec<String>,
    /// Further flags of Tidegate's server.
    pub flags: Vec<String>,
    /// File to which Knot DNS logs queries and answers as dnstap.
    pub query_log: Option<PathBuf>,
    /// Length of the link's prefix in bits.
    pub prefix: u8,
    /// Core of the server.
    pub core: usize,
}

const PORT: u16 = 53;

/// Running server process; terminated on drop.
pub struct Server {
    process: ServerProcess,
    /// Address and port that the server answers on.
    pub target: SocketAddr,
    /// First line that Tidegate's server printed when it was ready; empty for other servers.
    pub detail: String,
}

impl Server {
    /// Starts a server in the namespace of `end` and waits until the server answers.
    ///
    /// # Errors
    /// [`LabError::Missing`] when the server is not installed, [`LabError::Server`] when it exits
    /// or does not answer in time.
    pub fn start(kind: ServerKind, setup: &Setup, end: &VethEnd) -> Result<Self, LabError> {
        Self::start_with(kind, ReceiveWork::Server, setup, end)
    }

    /// As [`Server::start`]; Tidegate's server on kernel sockets gets the flags of `receive_work`.
    pub(crate) fn start_with(
        kind: ServerKind,
        receive_work: ReceiveWork,
        setup: &Setup,
        end: &VethEnd,
    ) -> Result<Self, LabError> {
        let has_own_address = matches!(kind, ServerKind::TidegateXdp | ServerKind::TidegatePacket);
        let address = if has_own_address { setup.own_address } else { setup.kernel_address };
        let target = SocketAddr::new(address, PORT);
        let mut command = match kind {
            ServerKind::Knot | ServerKind::KnotXdp => knot(kind, setup, end)?,
            ServerKind::Nsd => nsd(setup, end)?,
            _ => tidegate(kind, setup, end, address)?,
        };
        if kind == ServerKind::TidegateKernel {
            command.args(receive_work.serve_flags());
        }
        let process = ServerProcess::start(kind.name(), &mut command)?;
        let mut server = Self { process, target, detail: String::new() };
        if kind.is_tidegate() {
            server.detail = server.process.wait_for_first_line()?;
        } else {
            server.wait_for_answer(setup, end)?;
            // Knot DNS pins its first worker to core 0, whatever core it was started on.
            crate::testbed::cpu::pin_threads(server.pid(), setup.core)?;
        }
        Ok(server)
    }

    /// Checks that the server has not ended by itself.
    ///
    /// # Errors
    /// If it has.
    pub(crate) fn check_running(&mut self) -> Result<(), LabError> {
        self.process.check_running()
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends SOA queries from inside the server's namespace until a reply without error arrives.
    fn wait_for_answer(&mut self, setup: &Setup, end: &VethEnd) -> Result<(), LabError> {
        let mut queries = tidegate_load::QuerySet::default();
        queries.push(&wire_name(&setup.origin), 6, false);
        let query = queries.get(0).0.to_vec();
        let bind = SocketAddr::new(setup.kernel_address, 0);
        let socket = end.namespace.enter(|| UdpSocket::bind(bind))?;
        let socket = socket.map_err(LabError::io("cannot open a socket to the server"))?;
        socket
            .set_read_timeout(Some(Duration::from_millis(100)))
            .map_err(LabError::io("cannot set the socket's read timeout"))?;
        let target = self.target;
        self.process.wait_until(|| {
            let mut answer = [0; 2048];
            let sent = socket.send_to(&query, target);
            let received = sent.and_then(|_| socket.recv(&mut answer));
            // A response, with response code 0.
            received.is_ok_and(|len| len > 12 && answer[2] & 0x80 != 0 && answer[3] & 0xf == 0)
        })
    }

    /// Stops the server and returns the counters that Tidegate's server prints on exit.
    pub fn stop(self) -> Option<Value> {
        self.process.stop()
    }
}

fn tidegate(
    kind: ServerKind,
    setup: &Setup,
    end: &VethEnd,
    address: IpAddr,
) -> Result<Command, LabError> {
    let program = programs::tidegate()?;
    let mut command = end.namespace.command_on_core(setup.core, program);
    let io = match kind {
        ServerKind::TidegateKernel => "kernel",
        ServerKind::TidegatePacket => "packet",
        _ => "xdp",
    };
    let zone = format!("{}={}", setup.origin, setup.zone_file.display());
    let address = format!("{address}/{}", setup.prefix);
    let core = setup.core.to_string();
    // One source asks each question many times: that is the measurement.
    command.args(["serve", "dns", "--rate-limit", "0", "--io", io, "--iface", &end.device]);
    command.args(["--address", &address, "--zone", &zone, "--cpu", &core, "--json"]);
    command.args(&setup.flags);
    if kind != ServerKind::TidegateKernel {
        command.args(setup.extra_own_addresses.iter().flat_map(|address| ["--address", address]));
    }
    Ok(command)
}

fn knot(kind: ServerKind, setup: &Setup, end: &VethEnd) -> Result<Command, LabError> {
    check_installed("knotd", "knot")?;
    let folder = setup.folder.join("knot");
    fs::create_dir_all(&folder).map_err(LabError::file(&folder))?;
    let folder_text = folder.display();
    let xdp = match kind {
        ServerKind::KnotXdp => format!("xdp:\n    listen: {}@{PORT}\n", end.device),
        _ => String::new(),
    };
    let (module, template) = match &setup.query_log {
        Some(file) => {
            let sink = file.display();
            let module = format!(
                "mod-dnstap:\n  - id: log\n    sink: \"{sink}\"\n    log-queries: on\n    \
                 log-responses: on\n"
            );
            (module, "    global-module: mod-dnstap/log\n")
        }
        None => (String::new(), ""),
    };
    let text = format!(
        "server:\n    rundir: \"{folder_text}\"\n    udp-workers: 1\n    tcp-workers: 1\n    \
         background-workers: 1\n    listen: {}@{PORT}\n{xdp}database:\n    storage: \"{folder_text}\"\n\
         log:\n  - target: stderr\n    any: error\n\
         {module}template:\n  - id: default\n    zonefile-load: whole\n    zonefile-sync: -1\n    \
         journal-content: none\n{template}\
         zone:\n  - domain: {}\n    file: \"{}\"\n",
        setup.kernel_address,
        setup.origin,
        setup.zone_file.display(),
    );
    let file = folder.join("knot.conf");
    fs::write(&file, text).map_err(LabError::file(&file))?;
    let mut command = end.namespace.command_on_core(setup.core, "knotd");
    command.arg("-c").arg(file);
    Ok(command)
}

fn nsd(setup: &Setup, end: &VethEnd) -> Result<Command, LabError> {
    check_installed("nsd", "nsd")?;
    let folder = setup.folder.join("nsd");
    fs::create_dir_all(&folder).map_err(LabError::file(&folder))?;
    let folder_text = folder.display();
    let text = format!(
        "server:\n  server-count: 1\n  ip-address: {}\n  port: {PORT}\n  username: \"\"\n  \
         zonesdir: \"{folder_text}\"\n  database: \"\"\n  pidfile: \"{folder_text}/nsd.pid\"\n  \
         xfrdfile: \"{folder_text}/xfrd.state\"\n  zonelistfile: \"{folder_text}/zone.list\"\n  \
         xfrdir: \"{folder_text}\"\n  receive-buffer-size: 8388608\n  rrl-ratelimit: 0\n  rrl-whitelist-ratelimit: 0\n\
         remote-control:\n  control-enable: no\n\
         zone:\n  name: {}\n  zonefile: \"{}\"\n",
        setup.kernel_address,
        setup.origin,
        setup.zone_file.display(),
    );
    let file = folder.join("nsd.conf");
    fs::write(&file, text).map_err(LabError::file(&file))?;
    let mut command = end.namespace.command_on_core(setup.core, "nsd");
    command.args(["-d", "-c"]).arg(file);
    Ok(command)
}

/// Checks that a program is installed.
///
/// # Errors
/// [`LabError::Missing`], with the package to install, when the program is not found.
pub fn check_installed(program: &str, package: &'static str) -> Result<(), LabError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(Into::into));
    if folders.map(|folder: PathBuf| folder.join(program)).any(|file| Path::is_file(&file)) {
        return Ok(());
    }
    Err(LabError::Missing { program: program.to_owned(), package })
}

/// Domain name in wire format; escapes are not supported.
fn wire_name(text: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in text.split('.').filter(|label| !label.is_empty()) {
        wire.push(label.len() as u8);
        wire.extend(label.bytes());
    }
    wire.push(0);
    wire
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_server_name() {
        for kind in ServerKind::COMPARED {
            assert_eq!(kind.name().parse::<ServerKind>().unwrap(), kind);
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        let error = "bind".parse::<ServerKind>().unwrap_err().to_string();
        assert!(error.contains("knot-xdp") && error.contains("\"bind\""), "{error}");
    }

    #[test]
    fn missing_program_names_its_package() {
        assert!(check_installed("sh", "dash").is_ok());
        let error = check_installed("tg-no-such-server", "some-package").unwrap_err();
        assert!(error.to_string().contains("some-package"));
    }

    #[test]
    fn wire_name_ends_with_the_root() {
        assert_eq!(wire_name("bench.example"), b"\x05bench\x07example\0");
        assert_eq!(wire_name("bench.example."), wire_name("bench.example"));
    }
}
