//! Testbed: a veth pair, two cores, and an application on one of several stacks.

pub(crate) mod application;
pub mod echo_server;
pub(crate) mod kafka;
pub(crate) mod packaged_load;
pub(crate) mod packaged_pair;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use tidegate_load::{ExpectedResponse, LinkKind, TcpLoadConfig, TcpLoadReport, Transaction};

use crate::error::LabError;
use crate::testbed::apps::application::Application;
use crate::testbed::cpu::CoreTicks;
use crate::testbed::flood::{
    CLIENT_ADDRESS, FloodTestbed, KERNEL_ADDRESS, PREFIX_BITS, Receiver, TIDEGATE_ADDRESS,
};
use crate::testbed::folder;
use crate::testbed::load::{BpfClientConfig, load_tcp_with_bpf};
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::sysctl::SysctlOverride;

/// File name of the daemon's socket in its folder.
const SOCKET_FILE: &str = "daemon.sock";
/// Source address of a load that runs on its own stack.
const CLIENT_STACK_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 100);
/// First source port of the load; below the kernel's ephemeral port range.
const FIRST_CLIENT_PORT: u16 = 20_000;
/// Maximum time for an application to reply to one request.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Stack that serves an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StackKind {
    /// Kernel stack, with this receive work. With [`ReceiveWork::BusyPoll`] the program's own calls
    /// poll by `net.core.busy_poll` and `net.core.busy_read`.
    Kernel(ReceiveWork),
    /// Stack embedded in the application's process.
    Embedded,
    /// Stack of the daemon, to which the application attaches.
    Attached,
}

impl StackKind {
    /// Ways of the kernel, among which its best is.
    pub(crate) fn kernel() -> [Self; 4] {
        ReceiveWork::PROGRAMS.map(Self::Kernel)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kernel(work) => work.kernel_name(),
            Self::Embedded => "embedded",
            Self::Attached => "attached",
        }
    }

    /// True for the kernel's stack, false for Tidegate's.
    pub(crate) fn is_kernel(self) -> bool {
        matches!(self, Self::Kernel(_))
    }

    /// Receive work of the server's device.
    pub(crate) fn receive_work(self) -> ReceiveWork {
        match self {
            Self::Kernel(work) => work,
            Self::Embedded | Self::Attached => ReceiveWork::Server,
        }
    }
}

/// Running application, and the daemon that serves it, if any.
pub(crate) struct RunningService {
    pub(crate) process: ServerProcess,
    pub(crate) daemon: Option<DaemonProcess>,
    pub(crate) target: SocketAddr,
    pub(crate) question: Transaction,
    folder: TempDir,
    _busy_poll: Vec<SysctlOverride>,
}

/// Result of a load on an application.
pub(crate) struct ServiceMeasurement {
    pub(crate) load: TcpLoadReport,
    pub(crate) server_core_percent: f64,
}

/// Cores of the application and of the daemon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreAssignment {
    pub(crate) application: usize,
    pub(crate) daemon: usize,
}

/// Daemon process that applications can attach to.
pub(crate) struct DaemonProcess {
    process: ServerProcess,
    folder: TempDir,
}

/// Command-line flags of a stack at the server's end of the veth pair.
fn stack_flags(testbed: &FloodTestbed) -> [String; 4] {
    let address = format!("{TIDEGATE_ADDRESS}/{PREFIX_BITS}");
    ["--iface".to_owned(), testbed.pair.b.device.clone(), "--address".to_owned(), address]
}

impl DaemonProcess {
    /// Starts a daemon on `core` and waits until it is ready.
    pub(crate) fn start(
        testbed: &FloodTestbed,
        core: usize,
        flags: &[&str],
    ) -> Result<Self, LabError> {
        let folder = folder::private()?;
        let mut command = testbed.pair.b.namespace.command_on_core(core, programs::tidegate()?);
        command.args(["daemon", "--cpu", &core.to_string(), "--socket"]);
        command.arg(folder.path().join(SOCKET_FILE)).args(stack_flags(testbed)).args(flags);
        let mut process = ServerProcess::start("tidegate serve", &mut command)?;
        process.wait_for_first_line()?;
        Ok(Self { process, folder })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET_FILE)
    }

    /// Words that start a program attached to this daemon, before its command line.
    fn prefix(&self) -> Result<Vec<OsString>, LabError> {
        let run = ["run", "--log", "/dev/null", "--socket"].map(OsString::from);
        let mut prefix = vec![programs::tidegate()?.into()];
        prefix.extend(run);
        prefix.extend([self.socket().into(), "--".into()]);
        Ok(prefix)
    }

    pub(crate) fn stop(self) {
        self.process.stop();
    }
}

/// Stack that is ready for programs.
struct ProgramStack {
    /// Words before the command line of a program.
    prefix: Vec<OsString>,
    address: Ipv4Addr,
    daemon: Option<DaemonProcess>,
    busy_poll: Vec<SysctlOverride>,
}

impl ProgramStack {
    /// Prepares a stack, and starts a daemon with `flags` on `daemon_core` if the stack needs one.
    fn prepare(
        testbed: &FloodTestbed,
        stack: StackKind,
        daemon_core: usize,
        flags: &[&str],
    ) -> Result<Self, LabError> {
        let receiver = if stack.is_kernel() { Receiver::Kernel } else { Receiver::Server };
        testbed.prepare(receiver)?;
        let (mut daemon, mut busy_poll) = (None, Vec::new());
        let (prefix, address) = match stack {
            StackKind::Kernel(work) => {
                work.place(&testbed.pair.b, daemon_core)?;
                busy_poll = work.program_settings()?;
                (Vec::new(), KERNEL_ADDRESS)
            }
            StackKind::Embedded => {
                let mut prefix = vec![programs::tidegate()?.into()];
                let run = ["run", "--embedded", "--log", "/dev/null"].map(OsString::from);
                prefix.extend(run);
                prefix.extend(stack_flags(testbed).map(OsString::from));
                prefix.extend(flags.iter().map(OsString::from));
                prefix.push("--".into());
                (prefix, TIDEGATE_ADDRESS)
            }
            StackKind::Attached => {
                let daemon = daemon.insert(DaemonProcess::start(testbed, daemon_core, flags)?);
                (daemon.prefix()?, TIDEGATE_ADDRESS)
            }
        };
        Ok(Self { prefix, address, daemon, busy_poll })
    }
}

/// Starts an application, and a daemon if the stack needs one; waits until the application
/// replies.
pub(crate) fn start_service(
    testbed: &FloodTestbed,
    application: Application,
    stack: StackKind,
    cores: CoreAssignment,
    flags: &[&str],
) -> Result<RunningService, LabError> {
    let ProgramStack { prefix, address, daemon, busy_poll } =
        ProgramStack::prepare(testbed, stack, cores.daemon, flags)?;
    let service = start_application(testbed, application, cores.application, address, prefix)?;
    Ok(RunningService { daemon, _busy_poll: busy_poll, ..service })
}

/// Starts an application attached to `daemon`; waits until the application replies.
pub(crate) fn start_attached(
    testbed: &FloodTestbed,
    application: Application,
    core: usize,
    daemon: &DaemonProcess,
) -> Result<RunningService, LabError> {
    start_application(testbed, application, core, TIDEGATE_ADDRESS, daemon.prefix()?)
}

/// Starts an application on `core`, with the words `prefix` before its command line.
fn start_application(
    testbed: &FloodTestbed,
    application: Application,
    core: usize,
    address: Ipv4Addr,
    prefix: Vec<OsString>,
) -> Result<RunningService, LabError> {
    // Apache serves as a user of its own.
    let folder = folder::readable()?;
    let mut command = testbed.pair.b.namespace.command_on_core(core, "env");
    command.args(prefix).args(application.command_line(folder.path())?);
    let mut process = ServerProcess::start(application.name(), &mut command)?;
    let target = SocketAddr::new(address.into(), application.port());
    let client = &testbed.pair.a.namespace;
    let mut question = application.measured_request();
    let mut first_reply_bytes = None;
    process.wait_until(|| {
        first_reply_bytes = client
            .enter(|| send_first_requests(application, target, &question))
            .ok()
            .and_then(Result::ok);
        first_reply_bytes.is_some()
    })?;
    if let Some(answer_bytes) = first_reply_bytes
        && question.response.is_empty()
    {
        question.response = ExpectedResponse::Length(answer_bytes);
    }
    let (daemon, _busy_poll) = (None, Vec::new());
    Ok(RunningService { process, daemon, target, question, folder, _busy_poll })
}

/// Sends each kind of request once. Returns the length in bytes of the response to `question`.
fn send_first_requests(
    application: Application,
    target: SocketAddr,
    question: &Transaction,
) -> std::io::Result<usize> {
    let mut stream = TcpStream::connect_timeout(&target, REPLY_TIMEOUT)?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    let mut buf = [0; 4096];
    if let Some(setup) = application.setup_request() {
        stream.write_all(&setup.request)?;
        stream.read_exact(&mut buf[..setup.response.len()])?;
    }
    stream.write_all(&question.request)?;
    if !question.response.is_empty() {
        stream.read_exact(&mut buf[..question.response.len()])?;
        return Ok(question.response.len());
    }
    let mut received = 0;
    loop {
        if let Some(bytes) = http_response_bytes(&buf[..received]) {
            return Ok(bytes);
        }
        match stream.read(&mut buf[received..])? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => received += count,
        }
    }
}

/// Length of an HTTP response, header included, whose header is complete in `bytes`.
fn http_response_bytes(bytes: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (header, _) = text.split_once("\r\n\r\n")?;
    let fields = header.lines().filter_map(|line| line.split_once(':'));
    let mut lengths = fields.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let body_bytes: usize = lengths.next()?.1.trim().parse().ok()?;
    Some(header.len() + 4 + body_bytes)
}

impl RunningService {
    /// Configuration of a load that runs on its own stack.
    pub(crate) fn load_config(&self, testbed: &FloodTestbed, connections: usize) -> TcpLoadConfig {
        TcpLoadConfig {
            interface: Some(testbed.pair.a.device.clone()),
            source: Some(CLIENT_STACK_ADDRESS.into()),
            prefix_len: PREFIX_BITS,
            connections,
            transaction: Some(self.question.clone()),
            core: Some(testbed.load_core),
            ..TcpLoadConfig::new(LinkKind::Xdp, self.target)
        }
    }

    /// Configuration of a load on kernel sockets.
    pub(crate) fn kernel_load_config(
        &self,
        testbed: &FloodTestbed,
        connections: usize,
        seconds: f64,
    ) -> TcpLoadConfig {
        TcpLoadConfig {
            connections,
            seconds,
            transaction: Some(self.question.clone()),
            core: Some(testbed.load_core),
            ..TcpLoadConfig::new(LinkKind::Kernel, self.target)
        }
    }

    /// Sends the same requests from the load's device itself, each as soon as the previous
    /// response arrives. A NAPI thread on the server's core receives for Tidegate what AF_XDP takes.
    pub(crate) fn measure_from_device(
        &self,
        testbed: &FloodTestbed,
        stack: StackKind,
        connections: u16,
        seconds: f64,
    ) -> Result<ServiceMeasurement, LabError> {
        let SocketAddr::V4(target) = self.target else {
            return Err(LabError::Config("the load from the device supports IPv4 only".into()));
        };
        let config = BpfClientConfig {
            target: (target, testbed.pair.b.mac),
            source: SocketAddrV4::new(CLIENT_ADDRESS, FIRST_CLIENT_PORT),
            connections,
            transaction: self.question.clone(),
            warm_up_seconds: seconds / 4.0,
            seconds,
            core: testbed.load_core,
        };
        if !stack.is_kernel() {
            testbed.pair.b.set_threaded_napi(testbed.server_core)?;
        }
        let before = CoreTicks::read(testbed.server_core)?;
        let load = load_tcp_with_bpf(&testbed.pair.a, &config)?;
        let server_core = CoreTicks::read(testbed.server_core)?.since(before);
        if !stack.is_kernel() {
            testbed.pair.b.set_softirq_napi()?;
        }
        Ok(ServiceMeasurement { load, server_core_percent: server_core.busy_percent })
    }

    /// Folder of the application's files, which a web server serves.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Process ids of the daemon, if any, and of the application.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let daemon = self.daemon.as_ref().map(|daemon| daemon.process.pid());
        daemon.into_iter().chain([self.process.pid()]).collect()
    }

    /// Stops the application, then the daemon.
    pub(crate) fn stop(self) {
        let Self { process, daemon, _busy_poll, .. } = self;
        process.stop();
        if let Some(daemon) = daemon {
            daemon.stop();
        }
    }
}

/// Checks that the applications and the preload library are installed; the error names the
/// command that installs the missing one.
pub(crate) fn check_installed(applications: &[Application]) -> Result<(), LabError> {
    for application in applications {
        if !application.is_installed() {
            let name = application.name();
            let problem = format!("{name} is not installed: apt-get install {name}");
            return Err(LabError::Config(problem));
        }
    }
    let library = Path::new(&programs::tidegate()?).with_file_name("libtidegate_preload.so");
    if !library.is_file() && std::env::var_os("TIDEGATE_PRELOAD_LIBRARY").is_none() {
        return Err(LabError::Config(format!(
            "{} is missing: `make build` builds it",
            library.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The body may arrive after the header, in another segment.
    #[test]
    fn length_of_a_response_follows_from_its_header() {
        let response = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nServer: x\r\n\r\nabc";
        let header_bytes = response.len() - 3;
        for received in header_bytes..=response.len() {
            assert_eq!(http_response_bytes(&response[..received]), Some(response.len()));
        }
        for received in 0..header_bytes {
            assert_eq!(http_response_bytes(&response[..received]), None);
        }
    }
}
