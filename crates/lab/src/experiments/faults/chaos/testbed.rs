//! Testbed: the daemon on one end of a veth pair, the kernel's stack with echo servers on the
//! other.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tidegate_service::daemon::DaemonReport;

use super::peers;
use crate::LabError;
use crate::testbed::cpu;
use crate::testbed::folder;
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::process::{ServerProcess, log_to};
use crate::testbed::programs;

/// Addresses of the kernel's side and of the daemon's side: IPv4, then IPv6.
const ADDRESSES: [[&str; 2]; 2] = [["10.9.0.1", "10.9.0.2"], ["fd00:9::1", "fd00:9::2"]];
const PREFIX_BITS: [u8; 2] = [24, 64];

/// Core of the daemon, and core of everything else.
const DAEMON_CORE: usize = 0;
const OTHER_CORE: usize = 1;

/// Maximum time to wait until the daemon is idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// Time without a change of its memory after which the daemon counts as idle. The daemon frees
/// memory that it does not need a few seconds after the last application has gone.
const STABLE_MEMORY_TIME: Duration = Duration::from_secs(8);

/// Both hosts: veth pair, echo servers and daemon. The echo servers are stopped on drop.
pub(super) struct ChaosTestbed {
    daemon: Mutex<Option<ServerProcess>>,
    stop: Arc<AtomicBool>,
    servers: Vec<JoinHandle<Result<(), LabError>>>,
    folder: tempfile::TempDir,
    pub(super) pair: VethPair,
}

/// Pins this thread, and all threads and processes that it starts, away from the daemon's core.
pub(super) fn leave_daemon_core() -> Result<(), LabError> {
    if cpu::available_cores() > OTHER_CORE { cpu::pin_this_thread(OTHER_CORE) } else { Ok(()) }
}

/// Address of the kernel's side.
pub(super) fn kernel_address(family: usize) -> IpAddr {
    address(family, 0)
}

/// Address of the daemon's side.
pub(super) fn daemon_address(family: usize) -> IpAddr {
    address(family, 1)
}

fn address(family: usize, side: usize) -> IpAddr {
    // The constants above are valid addresses, so the parser cannot fail.
    ADDRESSES[family % 2][side].parse().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED))
}

impl ChaosTestbed {
    /// Creates the hosts, and starts the kernel's servers and the daemon.
    pub(super) fn new() -> Result<Self, LabError> {
        let a: [String; 2] = std::array::from_fn(|family| {
            format!("{}/{}", kernel_address(family), PREFIX_BITS[family])
        });
        let pair = VethPair::as_on_a_wire(&VethConfig { a: a.into(), b: Vec::new() })?;
        let folder = folder::private()?;
        let stop = Arc::new(AtomicBool::new(false));
        let servers = Vec::new();
        let mut testbed = Self { daemon: Mutex::new(None), stop, servers, folder, pair };
        for family in 0..2 {
            for serve in [peers::echo_streams, peers::echo_datagrams, peers::echo_unchecked] {
                let stop = Arc::clone(&testbed.stop);
                let (ready, is_ready) = std::sync::mpsc::channel();
                let serve = move || serve(kernel_address(family), &stop, &ready);
                testbed.servers.push(testbed.pair.a.namespace.spawn(serve)?);
                is_ready
                    .recv()
                    .map_err(|_| LabError::Config("an echo server did not start".to_owned()))?;
            }
        }
        testbed.start_daemon()?;
        Ok(testbed)
    }

    /// Path of the daemon's Unix socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("daemon.sock")
    }

    /// Starts the daemon, and waits until applications can attach.
    pub(super) fn start_daemon(&self) -> Result<(), LabError> {
        let core = if cpu::available_cores() > OTHER_CORE { DAEMON_CORE } else { 0 };
        // The daemon logs each application that attaches or leaves.
        let log = self.folder.path().join("daemon.log");
        let mut command = log_to(self.pair.b.namespace.command_on_core(core, "sh"), &log);
        command.arg(programs::tidegate()?);
        command.args(["daemon", "--cores", "1", "--no-hugepages"]);
        command.args(["--iface", &self.pair.b.device, "--socket-mode", "600", "--socket"]);
        command.arg(self.socket());
        for (family, prefix) in PREFIX_BITS.iter().enumerate() {
            command.args(["--address", &format!("{}/{prefix}", daemon_address(family))]);
        }
        let daemon = ServerProcess::start_logged("the daemon", &mut command, &log)?;
        *self.daemon() = Some(daemon);
        Ok(())
    }

    fn daemon(&self) -> MutexGuard<'_, Option<ServerProcess>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills the daemon with SIGKILL.
    pub(super) fn kill_daemon(&self) -> Result<(), LabError> {
        if let Some(daemon) = self.daemon().take() {
            let pid = i32::try_from(daemon.pid()).ok().and_then(Pid::from_raw);
            let killed = pid.map_or(Ok(()), |pid| kill_process(pid, Signal::KILL));
            killed.map_err(LabError::io("cannot kill the daemon"))?;
        }
        Ok(())
    }

    /// Replaces the running daemon with a new one that takes over its state.
    pub(super) fn upgrade_daemon(&self) -> Result<(), LabError> {
        let core = if cpu::available_cores() > OTHER_CORE { DAEMON_CORE } else { 0 };
        let mut command = self.pair.b.namespace.command_on_core(core, programs::tidegate()?);
        command.arg("upgrade").arg("--socket").arg(self.socket());
        let output = command.output().map_err(LabError::io("cannot start `tidegate upgrade`"))?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(LabError::Config(format!("the upgrade of the daemon failed: {}", stderr.trim())))
    }

    /// Status report of the daemon.
    pub(super) fn report(&self) -> Result<DaemonReport, LabError> {
        DaemonReport::query(&self.socket())
            .map_err(LabError::io("the daemon does not reply to a status request"))
    }

    /// Waits until the daemon is idle, or until a time limit: no application, no connection, at
    /// least `min_free_frames` free packet buffers, and stable memory. Returns the last usage.
    pub(super) fn wait_until_idle(&self, min_free_frames: usize) -> Result<DaemonUsage, LabError> {
        let began = Instant::now();
        let (mut resident_bytes, mut stable_since) = (0, began);
        loop {
            let report = self.report()?;
            let usage =
                DaemonUsage::new(&report, self.daemon().as_ref().map_or(0, ServerProcess::pid))?;
            let is_idle = usage.applications == 0
                && usage.connections == 0
                && usage.frames_available >= min_free_frames;
            if !is_idle || usage.resident_bytes != resident_bytes {
                (resident_bytes, stable_since) = (usage.resident_bytes, Instant::now());
            }
            if stable_since.elapsed() > STABLE_MEMORY_TIME || began.elapsed() > IDLE_TIMEOUT {
                return Ok(usage);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for ChaosTestbed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for server in self.servers.drain(..) {
            // The applications that use the server have reported its errors.
            let _ = server.join();
        }
    }
}

/// Resources that the daemon holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DaemonUsage {
    pub(super) applications: usize,
    pub(super) connections: usize,
    pub(super) frames_available: usize,
    pub(super) tcp_memory_bytes: usize,
    /// Resident memory in bytes: the daemon's own, and memory shared with applications.
    pub(super) resident_bytes: u64,
    pub(super) descriptors: usize,
}

impl DaemonUsage {
    fn new(report: &DaemonReport, pid: u32) -> Result<Self, LabError> {
        let folder = format!("/proc/{pid}/fd");
        Ok(Self {
            applications: report.applications.len(),
            connections: report.connections,
            frames_available: report.frames_available,
            tcp_memory_bytes: report.tcp_memory_bytes,
            resident_bytes: unbacked_resident_bytes(Path::new(&format!("/proc/{pid}/status")))?,
            descriptors: fs::read_dir(&folder).map_err(LabError::file(&folder))?.count(),
        })
    }
}

/// Resident memory in bytes that is not backed by a file on disk (`RssAnon` and `RssShmem`).
fn unbacked_resident_bytes(path: &Path) -> Result<u64, LabError> {
    let text = fs::read_to_string(path).map_err(LabError::file(path))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let kib = field("RssAnon:").zip(field("RssShmem:")).map(|(own, shared)| own + shared);
    kib.map(|kib| kib * 1024).ok_or_else(|| {
        LabError::Config(format!("{} has no valid RssAnon and RssShmem lines", path.display()))
    })
}

/// Address of the kernel's echo server for connections.
pub(super) fn stream_server(family: usize) -> SocketAddr {
    SocketAddr::new(kernel_address(family), peers::STREAM_PORT)
}

/// Address of the kernel's echo server for checked datagrams.
pub(super) fn datagram_server(family: usize) -> SocketAddr {
    SocketAddr::new(kernel_address(family), peers::DATAGRAM_PORT)
}

/// Address of the kernel's echo server for applications that send as fast as they can.
pub(super) fn unchecked_server(family: usize) -> SocketAddr {
    SocketAddr::new(kernel_address(family), peers::UNCHECKED_PORT)
}
