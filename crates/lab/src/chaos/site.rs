//! A daemon on one end of a veth pair, and the kernel with its sockets on the
//! other.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tidegate_service::daemon::Report;

use super::peers;
use crate::livelock::subject::this_program;
use crate::netns::{VethConfig, VethPair};
use crate::process::Process;
use crate::{LabError, cpu};

/// The addresses of the kernel and of the daemon, by family.
const FAMILIES: [[&str; 2]; 2] = [["10.9.0.1", "10.9.0.2"], ["fd00:9::1", "fd00:9::2"]];
const PREFIXES: [u8; 2] = [24, 64];

/// The cores of the daemon and of everything else.
const DAEMON_CORE: usize = 0;
const OTHER_CORE: usize = 1;

/// How long the daemon may take to come to rest.
const REST_LIMIT: Duration = Duration::from_secs(90);

/// When its memory stayed the same for so long it is at rest: it gives back what it
/// does not need a few seconds after the last application has gone.
const SETTLED: Duration = Duration::from_secs(8);

/// The two hosts.
pub(super) struct Site {
    daemon: Mutex<Option<Process>>,
    stop: Arc<AtomicBool>,
    peers: Vec<JoinHandle<Result<(), LabError>>>,
    folder: tempfile::TempDir,
    pub(super) pair: VethPair,
}

/// Keeps this thread, and all that it starts, off the daemon's core.
pub(super) fn leave_daemons_core() -> Result<(), LabError> {
    if cpu::cores() > OTHER_CORE { cpu::pin_this_thread(OTHER_CORE) } else { Ok(()) }
}

/// The address of the kernel's side.
pub(super) fn peer(family: usize) -> IpAddr {
    address(family, 0)
}

/// The address of the daemon's side.
pub(super) fn own(family: usize) -> IpAddr {
    address(family, 1)
}

fn address(family: usize, side: usize) -> IpAddr {
    // They are written above.
    FAMILIES[family % 2][side].parse().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED))
}

impl Site {
    /// Makes the hosts, and starts the kernel's servers and the daemon.
    pub(super) fn new() -> Result<Self, LabError> {
        let a: [String; 2] =
            std::array::from_fn(|family| format!("{}/{}", peer(family), PREFIXES[family]));
        let pair = VethPair::new(&VethConfig { a: a.into(), b: Vec::new() })?;
        let folder = tempfile::tempdir().map_err(LabError::io("cannot make a folder"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let peers = Vec::new();
        let mut site = Self { daemon: Mutex::new(None), stop, peers, folder, pair };
        for family in 0..2 {
            for serve in [peers::echo_streams, peers::echo_datagrams, peers::echo_noise] {
                let stop = Arc::clone(&site.stop);
                let (ready, is_ready) = std::sync::mpsc::channel();
                let serve = move || serve(peer(family), &stop, &ready);
                site.peers.push(site.pair.a.namespace.spawn(serve)?);
                is_ready
                    .recv()
                    .map_err(|_| LabError::Config("the peer does not serve".to_owned()))?;
            }
        }
        site.start_daemon()?;
        Ok(site)
    }

    /// The Unix socket of the daemon.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("daemon.sock")
    }

    /// Starts the daemon, and waits until programs can attach.
    pub(super) fn start_daemon(&self) -> Result<(), LabError> {
        let core = if cpu::cores() > OTHER_CORE { DAEMON_CORE } else { 0 };
        // It says of each application that it came and went.
        let log = self.folder.path().join("daemon.log");
        let script = r#"log=$1; shift; exec "$@" 2>>"$log""#;
        let mut command = self.pair.b.namespace.command_on_core(core, "sh");
        command.args(["-c", script, "sh"]).arg(&log).arg(this_program()?);
        command.args(["serve", "--cores", "1", "--no-hugepages"]);
        command.args(["--iface", &self.pair.b.device, "--socket-mode", "600", "--socket"]);
        command.arg(self.socket());
        for (family, prefix) in PREFIXES.iter().enumerate() {
            command.args(["--address", &format!("{}/{prefix}", own(family))]);
        }
        let mut daemon = Process::start("the daemon", &mut command)?;
        daemon.wait_for_line().map_err(|error| {
            let said = fs::read_to_string(&log).unwrap_or_default();
            LabError::Config(format!("{error}: {}", said.trim()))
        })?;
        *self.daemon() = Some(daemon);
        Ok(())
    }

    fn daemon(&self) -> MutexGuard<'_, Option<Process>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the daemon at once, as nobody should.
    pub(super) fn kill_daemon(&self) -> Result<(), LabError> {
        if let Some(daemon) = self.daemon().take() {
            let pid = i32::try_from(daemon.pid()).ok().and_then(Pid::from_raw);
            let killed = pid.map_or(Ok(()), |pid| kill_process(pid, Signal::KILL));
            killed.map_err(LabError::io("cannot kill the daemon"))?;
        }
        Ok(())
    }

    /// Lets another daemon go on in the place of the one that runs.
    pub(super) fn upgrade_daemon(&self) -> Result<(), LabError> {
        let core = if cpu::cores() > OTHER_CORE { DAEMON_CORE } else { 0 };
        let mut command = self.pair.b.namespace.command_on_core(core, this_program()?);
        command.arg("upgrade").arg("--socket").arg(self.socket());
        let output = command.output().map_err(LabError::io("cannot start `tidegate upgrade`"))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(LabError::Config(format!("an upgrade has failed: {}", said.trim())))
    }

    /// How the daemon stands.
    pub(super) fn report(&self) -> Result<Report, LabError> {
        Report::ask(&self.socket()).map_err(LabError::io("the daemon does not answer"))
    }

    /// Waits until the daemon has no application and no connection, at least so
    /// many free packet buffers, and memory that stays the same; or until it is clear
    /// that it never will.
    pub(super) fn rest(&self, frames: usize) -> Result<Rest, LabError> {
        let began = Instant::now();
        let (mut resident_bytes, mut since) = (0, began);
        loop {
            let report = self.report()?;
            let rest = Rest::new(&report, self.daemon().as_ref().map_or(0, Process::pid))?;
            let is_quiet =
                rest.applications == 0 && rest.connections == 0 && rest.frames_available >= frames;
            if !is_quiet || rest.resident_bytes != resident_bytes {
                (resident_bytes, since) = (rest.resident_bytes, Instant::now());
            }
            if since.elapsed() > SETTLED || began.elapsed() > REST_LIMIT {
                return Ok(rest);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for peer in self.peers.drain(..) {
            // What it ended with was seen by those who talked to it.
            let _ = peer.join();
        }
    }
}

/// What the daemon holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rest {
    pub(super) applications: usize,
    pub(super) connections: usize,
    pub(super) frames_available: usize,
    pub(super) tcp_memory_bytes: usize,
    /// Memory of its own, and what it shares with applications.
    pub(super) resident_bytes: u64,
    pub(super) descriptors: usize,
}

impl Rest {
    fn new(report: &Report, pid: u32) -> Result<Self, LabError> {
        let folder = format!("/proc/{pid}/fd");
        Ok(Self {
            applications: report.applications.len(),
            connections: report.connections,
            frames_available: report.frames_available,
            tcp_memory_bytes: report.tcp_memory_bytes,
            resident_bytes: own_bytes(Path::new(&format!("/proc/{pid}/status")))?,
            descriptors: fs::read_dir(&folder).map_err(LabError::file(&folder))?.count(),
        })
    }
}

/// Resident memory that no file on a disk stands behind.
fn own_bytes(path: &Path) -> Result<u64, LabError> {
    let text = fs::read_to_string(path).map_err(LabError::file(path))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let kib = field("RssAnon:").zip(field("RssShmem:")).map(|(own, shared)| own + shared);
    kib.map(|kib| kib * 1024)
        .ok_or_else(|| LabError::Config(format!("{} is not as expected", path.display())))
}

/// Where the kernel's servers are.
pub(super) fn streams_at(family: usize) -> SocketAddr {
    SocketAddr::new(peer(family), peers::STREAMS)
}

/// Where the kernel's servers are.
pub(super) fn datagrams_at(family: usize) -> SocketAddr {
    SocketAddr::new(peer(family), peers::DATAGRAMS)
}

/// Where the kernel's server is for those who send as fast as they can.
pub(super) fn noise_at(family: usize) -> SocketAddr {
    SocketAddr::new(peer(family), peers::NOISE)
}
