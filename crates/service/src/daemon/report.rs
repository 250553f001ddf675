//! How the daemon stands.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tidegate_gate::admission::ClassCounters;
use tidegate_gate::{GateCounters, Settings};
use tidegate_stack::FULL;

use super::application::Application;
use super::calls::Host;
use super::names::{Identity, Moved};
use super::socket::{Kind, Socket};
use crate::attachment::call_at;
use crate::contract::greeting::{Hello, send_hello};
use crate::contract::status::Phase;

/// How the daemon stands. Of a daemon of another version some of it may be missing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The process of the daemon.
    pub pid: u32,
    /// What it was started with, after the name of the program.
    pub arguments: Vec<String>,
    /// The folder that it works in.
    pub folder: PathBuf,
    /// Whether the stack lives on the kernel's addresses.
    pub is_shared: bool,
    /// All that are attached.
    pub applications: Vec<ApplicationReport>,
    /// Packet buffers that are neither in use nor with the port.
    pub frames_available: usize,
    /// Connections in the stack, also those that nobody has any more.
    pub connections: usize,
    /// Bytes of memory that the stack's connections hold data in.
    pub tcp_memory_bytes: usize,
    /// Frames that the port received.
    pub received: u64,
    /// Frames that the port sent.
    pub transmitted: u64,
    /// What was dropped at the port and in the stack, by reason.
    pub drops: Vec<(String, u64)>,
    /// Rounds of the engine.
    pub rounds: u64,
    /// Rounds that found frames.
    pub busy_rounds: u64,
    /// How often the core slept.
    pub sleeps: u64,
    /// Each network core.
    pub cores: Vec<CoreReport>,
    /// How many of them get new applications.
    pub cores_used: usize,
}

/// A network core.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CoreReport {
    /// Thousandths of its time in which it had something to do; 0 when there is
    /// only one core.
    pub busy: u32,
    /// Applications that it serves.
    pub applications: usize,
    /// Frames that it received. Core 0 has the card, and all come by it.
    pub received: u64,
    /// Frames that it sent.
    pub transmitted: u64,
}

/// An application that is attached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ApplicationReport {
    /// Who it is.
    pub identity: Identity,
    /// Commands that were done for it.
    pub commands: u64,
    /// Bytes of payload that it was given.
    pub bytes_in: u64,
    /// Bytes of payload that were taken from it.
    pub bytes_out: u64,
    /// Bytes of memory that the data of its sockets take.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Its sockets.
    pub sockets: Vec<SocketReport>,
    /// The network core that serves it.
    #[serde(default)]
    pub core: usize,
}

/// A socket of an application's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SocketReport {
    /// How far it has come.
    pub phase: Phase,
    /// Its own address.
    pub local: Option<SocketAddr>,
    /// Whom it is connected to.
    pub peer: Option<SocketAddr>,
    /// What waits in the stack: bytes, datagrams or connections.
    pub waiting: usize,
    /// How full the queue of a UDP socket in the stack is, in hundredths.
    pub fill_percent: u32,
    /// How many applications have it: children share their parents' sockets.
    pub holders: usize,
}

/// Receive scheduling on the cores of a daemon.
#[derive(Clone, Debug)]
pub struct GateState {
    /// The settings in force, on all cores alike.
    pub settings: Settings,
    /// What all of them counted.
    pub counters: GateCounters,
    /// What was admitted and refused of each class, where the card is.
    pub classes: Vec<(String, ClassCounters)>,
}

/// How long a daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

impl Report {
    /// Asks the daemon that listens at a path.
    ///
    /// # Errors
    /// When none listens there, when it is not for this user, and when it does not
    /// answer within five seconds.
    pub fn ask(path: &Path) -> io::Result<Self> {
        let mut connection = call_at(path)?;
        connection.set_read_timeout(Some(PATIENCE))?;
        send_hello(connection.as_fd(), &Hello::Report)?;
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer)?;
        serde_json::from_slice(&answer).map_err(|_| {
            let said = String::from_utf8_lossy(&answer);
            io::Error::new(io::ErrorKind::InvalidData, format!("the daemon answered: {said}"))
        })
    }

    /// All cores together. What goes through the card counts once.
    pub(super) fn join(reports: Vec<Self>, cores_used: usize) -> Self {
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

    pub(super) fn new<'a>(
        number: usize,
        busy: u32,
        host: &mut Host,
        apps: impl Iterator<Item = &'a Box<Application>>,
    ) -> Self {
        let applications: Vec<_> = apps
            .map(|app| ApplicationReport {
                core: number,
                identity: app.identity.clone(),
                commands: app.commands_taken,
                bytes_in: moved(host, app).to_app,
                bytes_out: moved(host, app).from_app,
                memory_bytes: app.memory.used_bytes().unwrap_or(0),
                sockets: app
                    .sockets()
                    .filter_map(|(_, key)| Some(SocketReport::new(host, host.sockets.get(key)?)))
                    .collect(),
            })
            .collect();
        let (engine, port, stack) = host.engine.counters();
        let mut drops = port.drops.clone();
        drops.merge(&stack.drops);
        drops.merge(&stack.transmit_drops);
        let arguments = std::env::args_os().skip(1);
        Self {
            pid: std::process::id(),
            arguments: arguments.map(|text| text.to_string_lossy().into_owned()).collect(),
            folder: std::env::current_dir().unwrap_or_default(),
            is_shared: host.claims.is_shared(),
            cores: vec![CoreReport {
                busy,
                applications: applications.len(),
                received: port.received,
                transmitted: port.transmitted,
            }],
            cores_used: 1,
            applications,
            received: port.received,
            transmitted: port.transmitted,
            drops: drops.iter().map(|(reason, count)| (reason.name().to_owned(), count)).collect(),
            rounds: engine.rounds,
            busy_rounds: engine.busy_rounds,
            sleeps: engine.sleeps,
            frames_available: host.engine.frames_available(),
            connections: host.engine.stack().tcp_connections(),
            tcp_memory_bytes: host.engine.stack().tcp_memory_used(),
        }
    }
}

/// What went through all sockets of an application so far.
fn moved(host: &Host, app: &Application) -> Moved {
    let mut moved = app.moved;
    let open = app.sockets().filter_map(|(_, key)| host.sockets.get(key));
    open.for_each(|socket| moved.add(socket.moved()));
    moved
}

impl SocketReport {
    fn new(host: &Host, socket: &Socket) -> Self {
        let stack = host.engine.stack();
        let mut fill = 0;
        let waiting = match &socket.kind {
            Kind::Datagrams(datagrams) => {
                fill = stack.udp_fill(datagrams.id).unwrap_or(0);
                stack.udp_readable(datagrams.id)
            }
            Kind::Listener(id) => stack.tcp_acceptable(*id),
            Kind::Stream(stream) => stack.tcp_readable(stream.id),
        };
        Self {
            phase: socket.status.phase,
            local: socket.local_addr(&host.engine),
            peer: socket.peer_addr(&host.engine),
            waiting,
            fill_percent: fill * 100 / FULL,
            holders: socket.holders.len(),
        }
    }
}
