//! Report of a daemon on its state and its counters.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tidegate_gate::admission::ClassCounters;
use tidegate_gate::{GateCounters, Settings, transmit};
use tidegate_stack::TcpInfo;

use super::ids::Identity;
use super::peer::Peer;
use super::versions::Versions;
use crate::ipc::connect::connect_to_daemon;
use crate::ipc::handshake::{Hello, send_hello};
use crate::ipc::status::SocketState;
use crate::ipc::version::ProtocolVersion;

/// State and counters of a daemon. From another version some fields may be missing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DaemonReport {
    /// Process ID of the daemon.
    pub pid: u32,
    /// Versions of the daemon; `None` from a daemon that does not report them.
    pub versions: Option<Versions>,
    /// Command-line arguments of the daemon, without the program's name.
    pub arguments: Vec<String>,
    /// Working directory of the daemon.
    pub folder: PathBuf,
    /// The stack shares the kernel's IP addresses.
    pub is_shared: bool,
    /// Attached applications.
    pub applications: Vec<ApplicationReport>,
    /// Packet buffers that are neither in use nor with the device.
    pub frames_available: usize,
    /// Connections in the stack, including connections without an application.
    pub connections: usize,
    /// Bytes of memory that hold data of the stack's connections.
    pub tcp_memory_bytes: usize,
    /// Frames received by the device.
    pub received: u64,
    /// Frames sent by the device.
    pub transmitted: u64,
    /// Drops in the device and in the stack, by reason.
    pub drops: Vec<(String, u64)>,
    /// Rounds of the engine.
    pub rounds: u64,
    /// Rounds that found frames.
    pub busy_rounds: u64,
    /// Times that the cores slept.
    pub sleeps: u64,
    /// Network cores.
    pub cores: Vec<CoreReport>,
    /// Number of cores that get new applications.
    pub cores_used: usize,
}

/// Report of a network core.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CoreReport {
    /// Share of its time in which the core was busy, in permille; 0 with a single core.
    pub busy: u32,
    /// Number of applications served.
    pub applications: usize,
    /// Frames received. Core 0 has the device, and counts the frames of all cores.
    pub received: u64,
    /// Frames sent.
    pub transmitted: u64,
    /// Longest round in nanoseconds of processor time and time blocked in system calls; `None` if
    /// rounds are not measured.
    #[serde(default)]
    pub longest_round_ns: Option<u64>,
    /// NUMA nodes that the core works with.
    #[serde(default)]
    pub nodes: CoreNodes,
}

/// NUMA nodes of a network core; `None` where the kernel does not tell the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreNodes {
    /// Node of the processor.
    pub processor: Option<usize>,
    /// Node of the packet buffers.
    pub memory: Option<usize>,
    /// Node of the card.
    pub device: Option<usize>,
}

/// Report of an attached application.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ApplicationReport {
    /// Process, user and name.
    pub identity: Identity,
    /// Commands taken from the application's ring.
    pub commands: u64,
    /// Payload bytes moved to the application.
    pub bytes_in: u64,
    /// Payload bytes taken from the application.
    pub bytes_out: u64,
    /// Bytes of shared memory allocated for the data of its sockets.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Sockets it holds.
    pub sockets: Vec<SocketReport>,
    /// Index of its network core.
    #[serde(default)]
    pub core: usize,
}

/// Report of an application's socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SocketReport {
    /// State of the socket.
    pub phase: SocketState,
    /// Local address.
    pub local: Option<SocketAddr>,
    /// Peer address of a connected socket.
    pub peer: Option<SocketAddr>,
    /// Amount queued in the stack: bytes, datagrams or connections.
    pub waiting: usize,
    /// Fill level of a UDP socket's receive queue in the stack, in percent.
    pub fill_percent: u32,
    /// Number of applications that hold the socket: fork children share their parents' sockets.
    pub holders: usize,
    /// Congestion control, round trips and traffic of a connection.
    #[serde(default)]
    pub tcp: Option<TcpInfo>,
}

/// Receive scheduling on the cores of a daemon.
#[derive(Clone, Debug)]
pub struct GateState {
    /// Settings in force, the same on all cores.
    pub settings: Settings,
    /// Counters of all cores together.
    pub counters: GateCounters,
    /// Admitted and refused packets of each admission class, on the primary core.
    pub classes: Vec<(String, ClassCounters)>,
    /// Packets per second that admission admits in all, on the primary core; `None` while it limits
    /// nothing.
    pub limit_pps: Option<u64>,
    /// Frames of each transmit class, of all cores together.
    pub transmit_classes: Vec<(String, transmit::ClassCounters)>,
}

impl GateState {
    /// Adds the counters of another core.
    pub fn add(&mut self, core: &Self) {
        self.counters.add(&core.counters);
        transmit::add_counters(&mut self.transmit_classes, &core.transmit_classes);
    }
}

/// Time limit for the daemon's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl DaemonReport {
    /// Queries the daemon that listens at a path.
    ///
    /// # Errors
    /// When no daemon listens there, when the user may not connect, and when the daemon does not
    /// answer within five seconds.
    pub fn query(path: &Path) -> io::Result<Self> {
        let mut connection = connect_to_daemon(path)?;
        connection.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        send_hello(connection.as_fd(), ProtocolVersion::CURRENT, &Hello::Report)?;
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer)?;
        serde_json::from_slice(&answer).map_err(|_| {
            let said = String::from_utf8_lossy(&answer);
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the daemon did not answer with a report: {said}"),
            )
        })
    }

    /// Adds the versions of the daemon, which its cores do not report.
    pub(super) fn of_daemon(self, versions: Versions) -> Self {
        Self { versions: Some(versions), ..self }
    }

    /// Leaves out what a user may not see: the applications of other users, unless the user is root
    /// or the daemon's own.
    pub(super) fn visible_to(mut self, uid: u32) -> Self {
        if !Peer::is_privileged(uid) {
            self.applications.retain(|app| app.identity.uid == uid);
        }
        self
    }

    /// Merges the reports of all cores. Frames through the device count once.
    pub(super) fn merge(reports: Vec<Self>, cores_used: usize) -> Self {
        let join = |mut all: Self, core: Self| {
            all.applications.extend(core.applications);
            all.cores.extend(core.cores);
            all.frames_available += core.frames_available;
            all.connections += core.connections;
            all.tcp_memory_bytes += core.tcp_memory_bytes;
            all.rounds += core.rounds;
            all.busy_rounds += core.busy_rounds;
            all.sleeps += core.sleeps;
            for (reason, count) in core.drops {
                match all.drops.iter_mut().find(|(known, _)| *known == reason) {
                    Some((_, sum)) => *sum += count,
                    None => all.drops.push((reason, count)),
                }
            }
            all
        };
        let joined = reports.into_iter().reduce(join).unwrap_or_default();
        Self { cores_used, ..joined }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipc::version::Library;

    #[test]
    fn users_see_only_their_own_applications() {
        let application = |uid| ApplicationReport {
            identity: Identity {
                pid: 1,
                uid,
                name: "test".to_owned(),
                library: Library::default(),
            },
            commands: 0,
            bytes_in: 0,
            bytes_out: 0,
            memory_bytes: 0,
            sockets: Vec::new(),
            core: 0,
        };
        let own = rustix::process::geteuid().as_raw();
        let (one, other) = (own + 1000, own + 1001);
        let report = DaemonReport {
            applications: vec![application(one), application(other)],
            ..DaemonReport::default()
        };
        let visible_to = |uid| {
            let applications = report.clone().visible_to(uid).applications;
            applications.iter().map(|app| app.identity.uid).collect::<Vec<_>>()
        };
        assert_eq!(visible_to(one), [one]);
        assert_eq!(visible_to(other), [other]);
        assert!(visible_to(own + 1002).is_empty());
        assert_eq!(visible_to(own), [one, other]);
        assert_eq!(visible_to(0), [one, other]);
    }
}
