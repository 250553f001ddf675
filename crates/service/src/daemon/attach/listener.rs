//! Attach listener: the Unix socket on which applications attach.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use tidegate_memory::Doorbell;
use tidegate_memory::shared::Region;

use super::heap_trim::HeapTrim;
use crate::daemon::Log;
use crate::daemon::application::Application;
use crate::daemon::core::cores::Cores;
use crate::daemon::core::inbox::{CoreMessage, InboxSender};
use crate::daemon::ids::Identity;
use crate::daemon::quota::{AppSettings, Quota};
use crate::daemon::transfer::request::{SearchTarget, TransferRequest};
use crate::daemon::upgrade::protocol::Predecessor;
use crate::daemon::upgrade::request::HandoverRequest;
use crate::ipc::handshake::{Hello, receive_hello, send_refusal};
use crate::ipc::layout::{Geometry, SharedMemory};
use crate::ipc::takeover_token::TakeoverToken;

/// Time limit for the first message of a connection, and for each read and write of its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of connections without a first message; further ones wait in the backlog.
const MAX_PENDING_HANDSHAKES: usize = 256;

/// Configuration of the attach listener, and the resources of each application.
#[derive(Clone, Debug)]
pub struct AttachConfig {
    /// Path of the Unix socket.
    pub path: PathBuf,
    /// File mode of the socket: the users who may connect.
    pub mode: u32,
    /// Group of the socket file; `None` leaves the process's group.
    pub group: Option<String>,
    /// Sizes of each application's shared memory.
    pub geometry: Geometry,
    /// Wake-up coalescing: minimum time between two wake-ups of an application with several peers.
    pub coalescing: Duration,
    /// Resource limits of each application.
    pub quota: Quota,
}

/// Bound Unix socket on which no connection is accepted yet.
pub(in crate::daemon) struct BoundSocket {
    listener: UnixListener,
    config: AttachConfig,
    /// The socket file is removed when this is dropped.
    removes_on_drop: bool,
}

impl BoundSocket {
    /// Binds the socket.
    pub(in crate::daemon) fn bind(config: AttachConfig) -> io::Result<Self> {
        let listener = listen(&config)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, config, removes_on_drop: true })
    }

    /// Socket inherited from another daemon, which still owns the file.
    pub(in crate::daemon) fn inherit(
        config: AttachConfig,
        listener: UnixListener,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, config, removes_on_drop: false })
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if self.removes_on_drop {
            // The file may have been removed already.
            let _ = fs::remove_file(&self.config.path);
        }
    }
}

/// Thread that accepts applications.
pub(in crate::daemon) struct AttachListener {
    stop: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

impl AttachListener {
    /// Starts the thread, which accepts from the first message on `may_begin`. If the sender is
    /// dropped instead, the socket is left to its owner.
    pub(in crate::daemon) fn open(
        mut socket: BoundSocket,
        cores: Arc<Cores>,
        log: Log,
        may_begin: mpsc::Receiver<()>,
    ) -> io::Result<Self> {
        let stop = Arc::new(Doorbell::new()?);
        stop.arm();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("tidegate-door".into()).spawn(move || {
            if may_begin.recv().is_ok() {
                socket.removes_on_drop = true;
                accept_applications(&mut socket, &cores, &log, &stopped);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for AttachListener {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Binds and listens at a path; replaces the socket file of a daemon that has ended.
fn listen(config: &AttachConfig) -> io::Result<UnixListener> {
    let AttachConfig { path, mode, group, .. } = config;
    let annotate = |what: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("{}: {what}: {error}", path.display()))
    };
    if is_socket(path) {
        if UnixStream::connect(path).is_ok() {
            let message = format!(
                "{}: another daemon listens there: end it, or choose another path",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
        fs::remove_file(path).map_err(|error| annotate("cannot remove the old socket", error))?;
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .map_err(|error| annotate("cannot create its directory", error))?;
    }
    let listener = UnixListener::bind(path).map_err(|error| annotate("cannot listen", error))?;
    if let Some(name) = group {
        let id = group_id(name).map_err(|error| annotate("--socket-group", error))?;
        std::os::unix::fs::chown(path, None, Some(id))
            .map_err(|error| annotate("cannot set its group", error))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(*mode))
        .map_err(|error| annotate("cannot set its permissions", error))?;
    Ok(listener)
}

/// Group ID, from a number or by name from `/etc/group`.
fn group_id(name: &str) -> io::Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let groups = fs::read_to_string("/etc/group")?;
    let mut lines = groups.lines().map(|line| line.split(':'));
    let found = lines.find_map(|mut fields| {
        (fields.next() == Some(name)).then(|| fields.nth(1).and_then(|id| id.parse().ok()))?
    });
    found.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("there is no group {name}: create it, or choose another group"),
        )
    })
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Accepts connections and handles their first message, without waiting for any single
/// connection. After detached applications the heap is trimmed here, as no packets wait for
/// this thread.
fn accept_applications(socket: &mut BoundSocket, cores: &Cores, log: &Log, stop: &Arc<Doorbell>) {
    let mut pending: VecDeque<(UnixStream, Instant)> = VecDeque::new();
    let bell = cores.detach_bell();
    bell.arm();
    let mut heap_trim = HeapTrim::new(Instant::now());
    loop {
        let now = Instant::now();
        heap_trim.trim_if_due(now);
        while let Some((_, since)) = pending.front()
            && now.duration_since(*since) >= HANDSHAKE_TIMEOUT
        {
            pending.pop_front();
            log("a connection was closed: no first message within 1 s");
        }
        let timeout =
            pending.front().map(|(_, since)| HANDSHAKE_TIMEOUT - now.duration_since(*since));
        let timeout = timeout.into_iter().chain(heap_trim.time_left(now)).min().map(|left| {
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
        fds.extend(pending.iter().map(|(connection, _)| PollFd::new(connection, PollFlags::IN)));
        if pending.len() < MAX_PENDING_HANDSHAKES {
            fds.push(PollFd::new(&socket.listener, PollFlags::IN));
        }
        let polled = poll(&mut fds, timeout.as_ref());
        if !matches!(polled, Ok(_) | Err(rustix::io::Errno::INTR)) || !fds[0].revents().is_empty() {
            return;
        }
        if !fds[1].revents().is_empty() {
            heap_trim.on_detach(Instant::now());
            bell.disarm();
            bell.arm();
        }
        let readable: Vec<bool> = fds[2..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut readable_iter = readable.into_iter();
        let (ready, rest) = std::mem::take(&mut pending)
            .into_iter()
            .partition::<VecDeque<_>, _>(|_| readable_iter.next() == Some(true));
        pending = rest;
        for (connection, _) in ready {
            match handle_hello(connection, socket, cores, log) {
                Ok(HandshakeOutcome::Served) => {}
                Ok(HandshakeOutcome::Replaced) => {
                    socket.removes_on_drop = false;
                    return;
                }
                Err(error) => log(&format!("a connection was rejected: {error}")),
            }
        }
        while pending.len() < MAX_PENDING_HANDSHAKES
            && let Ok((connection, _)) = socket.listener.accept()
        {
            pending.push_back((connection, Instant::now()));
        }
    }
}

/// Outcome of a connection's first message.
enum HandshakeOutcome {
    /// The application was admitted, or the request was answered.
    Served,
    /// The peer has taken over from this daemon.
    Replaced,
}

/// Reads the first message, and sends the application to a core or answers the request.
fn handle_hello(
    connection: UnixStream,
    socket: &BoundSocket,
    cores: &Cores,
    log: &Log,
) -> io::Result<HandshakeOutcome> {
    let config = &socket.config;
    connection.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    connection.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let hello = receive_hello(connection.as_fd()).inspect_err(|error| {
        // The peer may be gone.
        let _ = send_refusal(connection.as_fd(), &error.to_string());
    })?;
    match hello {
        Hello::Attach(name) => {
            let app = create_application(connection, config, name, None)?;
            app.welcome(cores.count())?;
            cores.admit(cores.least_loaded(), app)?;
        }
        Hello::Inherit(token, name) => {
            // The core sends the welcome once the child has its sockets.
            let app = create_application(connection, config, name, Some(token))?;
            cores.admit(0, app)?;
        }
        Hello::Transfer(token, operation, descriptor) => {
            // Fails for a descriptor that is no socket.
            let cookie = rustix::net::sockopt::socket_cookie(&descriptor)?;
            let (search, hops) = (SearchTarget::Application, 0);
            let request =
                TransferRequest { connection, token, operation, descriptor, cookie, search, hops };
            cores.inbox(0).send(CoreMessage::Transfer(Box::new(request)))?;
        }
        Hello::Report => {
            let report = cores.report()?;
            (&connection).write_all(&serde_json::to_vec(&report)?)?;
        }
        Hello::Upgrade => return hand_over(connection, &socket.listener, cores.inbox(0), log),
    }
    Ok(HandshakeOutcome::Served)
}

/// Hands everything over to another daemon. Meanwhile new connections wait in the backlog.
fn hand_over(
    connection: UnixStream,
    listener: &UnixListener,
    inbox: &InboxSender,
    log: &Log,
) -> io::Result<HandshakeOutcome> {
    let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
    let refuse = |why: &str| {
        // The peer may be gone.
        let _ = send_refusal(connection.as_fd(), why);
        io::Error::new(io::ErrorKind::PermissionDenied, format!("no upgrade: {why}"))
    };
    if !credentials.uid.is_root() && credentials.uid != rustix::process::geteuid() {
        return Err(refuse("only the daemon's own user and root may replace it"));
    }
    let (offer, offered) = mpsc::channel();
    let (outcome_sender, outcome) = mpsc::channel();
    inbox.send(CoreMessage::HandOver(HandoverRequest { offer, outcome }))?;
    let offered = offered.recv().map_err(|_| io::Error::other("the network core has ended"))?;
    let package = offered.map_err(|why| refuse(&why))?;
    let mut peer = Predecessor::new(connection)?;
    let handed_over = peer.hand_over(&package.state, listener, &package.fds.descriptors());
    let other_pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    let successor = handed_over.is_ok().then_some(other_pid);
    if let Err(error) = handed_over {
        log(&format!("no upgrade: {error}; this daemon continues"));
        let own = rustix::process::getpid();
        if !peer.abort() && credentials.pid != own {
            // The peer holds what this daemon needs, and does not answer.
            let _ = rustix::process::kill_process(credentials.pid, Signal::KILL);
            peer.abort();
        }
    }
    // The core waits for this outcome; a core that has ended needs none.
    let _ = outcome_sender.send(successor);
    Ok(if successor.is_some() { HandshakeOutcome::Replaced } else { HandshakeOutcome::Served })
}

/// Creates an application with its shared memory.
fn create_application(
    connection: UnixStream,
    config: &AttachConfig,
    name: String,
    heir_of: Option<TakeoverToken>,
) -> io::Result<Application> {
    let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
    let pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    let identity = Identity { pid, uid: credentials.uid.as_raw(), name };
    let control = Region::reserve(config.geometry.control_words())?;
    let data = Region::reserve(config.geometry.data_words())?;
    let memory = SharedMemory::new(config.geometry, control, data)?;
    let settings = AppSettings { coalescing: config.coalescing, quota: config.quota };
    Application::new(identity, memory, OwnedFd::from(connection), heir_of, settings)
}
