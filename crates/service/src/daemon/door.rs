//! Where applications come in: a Unix socket.

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

use super::Log;
use super::application::Application;
use super::cores::Cores;
use super::handover::HandOver;
use super::heap_trim::HeapTrim;
use super::names::Identity;
use super::passing::{Request, Search};
use super::post::{Message, Post};
use super::quota::{Quota, Terms};
use super::succession::Predecessor;
use crate::contract::greeting::{Hello, receive_hello, send_refusal};
use crate::contract::layout::{Geometry, Memory};
use crate::contract::ticket::Ticket;

/// How long an application may take to say who it is.
const GREETING_LIMIT: Duration = Duration::from_secs(1);

/// So many may be at the door who have said nothing yet; others wait outside.
const MOST_SILENT: usize = 256;

/// Who may come in, and what they get.
#[derive(Clone, Debug)]
pub struct DoorConfig {
    /// Where the Unix socket is.
    pub path: PathBuf,
    /// Who may connect to it: the permissions of the file.
    pub mode: u32,
    /// The group of the file; the process's own with none.
    pub group: Option<String>,
    /// What each application gets.
    pub geometry: Geometry,
    /// An application with several peers that was woken is not woken again before so
    /// much time is over.
    pub coalescing: Duration,
    /// What each application may have of what all share.
    pub quota: Quota,
}

/// A place where nobody is let in yet.
pub(super) struct Doorway {
    listener: UnixListener,
    config: DoorConfig,
    /// It is removed when this is dropped.
    is_ours: bool,
}

impl Doorway {
    /// Takes the place.
    pub(super) fn take(config: DoorConfig) -> io::Result<Self> {
        let listener = listen(&config)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, config, is_ours: true })
    }

    /// The place of another daemon, which is still the other one's.
    pub(super) fn inherit(config: DoorConfig, listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, config, is_ours: false })
    }
}

impl Drop for Doorway {
    fn drop(&mut self) {
        if self.is_ours {
            // Whoever removed it already had a reason.
            let _ = fs::remove_file(&self.config.path);
        }
    }
}

/// The thread that lets applications in.
pub(super) struct Door {
    stop: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Lets them in from when it hears so; if nobody can say so any more the place
    /// is left to whom it belongs.
    pub(super) fn open(
        mut way: Doorway,
        cores: Arc<Cores>,
        log: Log,
        may_begin: mpsc::Receiver<()>,
    ) -> io::Result<Self> {
        let stop = Arc::new(Doorbell::new()?);
        stop.arm();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("tidegate-door".into()).spawn(move || {
            if may_begin.recv().is_ok() {
                way.is_ours = true;
                let_in(&mut way, &cores, &log, &stopped);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Listens at a path, also where a daemon that has ended left its socket.
fn listen(config: &DoorConfig) -> io::Result<UnixListener> {
    let DoorConfig { path, mode, group, .. } = config;
    let say = |what: &str, error: io::Error| {
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
        fs::remove_file(path).map_err(|error| say("cannot remove an old socket", error))?;
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|error| say("cannot make its folder", error))?;
    }
    let listener = UnixListener::bind(path).map_err(|error| say("cannot listen", error))?;
    if let Some(name) = group {
        let id = group_id(name).map_err(|error| say("--socket-group", error))?;
        std::os::unix::fs::chown(path, None, Some(id))
            .map_err(|error| say("cannot set its group", error))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(*mode))
        .map_err(|error| say("cannot set who may connect", error))?;
    Ok(listener)
}

/// The number of a group, by `/etc/group` or as a number.
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
        io::Error::new(io::ErrorKind::NotFound, format!("there is no group {name}: add it"))
    })
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Lets everybody in who says what he comes for. Those who have said nothing yet
/// keep nobody else waiting. After those who have gone memory is given back here,
/// where no packets wait for it.
fn let_in(way: &mut Doorway, cores: &Cores, log: &Log, stop: &Arc<Doorbell>) {
    let mut silent: VecDeque<(UnixStream, Instant)> = VecDeque::new();
    let bell = cores.let_go_bell();
    bell.arm();
    let mut heap_trim = HeapTrim::new(Instant::now());
    loop {
        let now = Instant::now();
        heap_trim.trim_if_due(now);
        while let Some((_, since)) = silent.front()
            && now.duration_since(*since) >= GREETING_LIMIT
        {
            silent.pop_front();
            log("somebody at the door was sent away: he has not said what he wants");
        }
        let left = silent.front().map(|(_, since)| GREETING_LIMIT - now.duration_since(*since));
        let left = left.into_iter().chain(heap_trim.left(now)).min().map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
        fds.extend(silent.iter().map(|(connection, _)| PollFd::new(connection, PollFlags::IN)));
        if silent.len() < MOST_SILENT {
            fds.push(PollFd::new(&way.listener, PollFlags::IN));
        }
        let polled = poll(&mut fds, left.as_ref());
        if !matches!(polled, Ok(_) | Err(rustix::io::Errno::INTR)) || !fds[0].revents().is_empty() {
            return;
        }
        if !fds[1].revents().is_empty() {
            heap_trim.on_let_go(Instant::now());
            bell.disarm();
            bell.arm();
        }
        let speaks: Vec<bool> = fds[2..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut speak = speaks.into_iter();
        let (ready, rest) = std::mem::take(&mut silent)
            .into_iter()
            .partition::<VecDeque<_>, _>(|_| speak.next() == Some(true));
        silent = rest;
        for (connection, _) in ready {
            match greet(connection, way, cores, log) {
                Ok(Greeted::LetIn) => {}
                Ok(Greeted::Replaced) => {
                    way.is_ours = false;
                    return;
                }
                Err(error) => log(&format!("somebody at the door was sent away: {error}")),
            }
        }
        while silent.len() < MOST_SILENT
            && let Ok((connection, _)) = way.listener.accept()
        {
            silent.push_back((connection, Instant::now()));
        }
    }
}

/// What came of somebody who came.
enum Greeted {
    /// He was let in, or told what he wanted to know.
    LetIn,
    /// He goes on in our place.
    Replaced,
}

/// Hears who comes, and sends them to the core or tells them how it stands.
fn greet(connection: UnixStream, way: &Doorway, cores: &Cores, log: &Log) -> io::Result<Greeted> {
    let config = &way.config;
    connection.set_read_timeout(Some(GREETING_LIMIT))?;
    connection.set_write_timeout(Some(GREETING_LIMIT))?;
    let hello = receive_hello(connection.as_fd()).inspect_err(|error| {
        // It may be gone.
        let _ = send_refusal(connection.as_fd(), &error.to_string());
    })?;
    match hello {
        Hello::Attach(name) => {
            let app = admit(connection, config, name, None)?;
            app.welcome(cores.count())?;
            cores.let_in(cores.for_newcomer(), app)?;
        }
        Hello::Inherit(ticket, name) => {
            // It is welcome when it has its sockets: the core says so.
            let app = admit(connection, config, name, Some(ticket))?;
            cores.let_in(0, app)?;
        }
        Hello::Pass(ticket, passing, descriptor) => {
            // What is no socket has none.
            let cookie = rustix::net::sockopt::socket_cookie(&descriptor)?;
            let (search, hops) = (Search::Application, 0);
            let request = Request { connection, ticket, passing, descriptor, cookie, search, hops };
            cores.post(0).send(Message::Pass(Box::new(request)))?;
        }
        Hello::Report => {
            let report = cores.report()?;
            (&connection).write_all(&serde_json::to_vec(&report)?)?;
        }
        Hello::Upgrade => return step_down(connection, &way.listener, cores.post(0), log),
    }
    Ok(Greeted::LetIn)
}

/// Hands everything over to a daemon that is to go on in our place. Meanwhile
/// whoever comes waits at the door.
fn step_down(
    connection: UnixStream,
    listener: &UnixListener,
    post: &Post,
    log: &Log,
) -> io::Result<Greeted> {
    let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
    let refuse = |why: &str| {
        // It may be gone.
        let _ = send_refusal(connection.as_fd(), why);
        io::Error::new(io::ErrorKind::PermissionDenied, format!("no upgrade: {why}"))
    };
    if !credentials.uid.is_root() && credentials.uid != rustix::process::geteuid() {
        return Err(refuse("only the daemon's own user and root may replace it"));
    }
    let (offer, offered) = mpsc::channel();
    let (settle, outcome) = mpsc::channel();
    post.send(Message::HandOver(HandOver { offer, outcome }))?;
    let offered = offered.recv().map_err(|_| io::Error::other("the network core has ended"))?;
    let parcel = offered.map_err(|why| refuse(&why))?;
    let mut other = Predecessor::new(connection)?;
    let handed = other.hand_over(&parcel.state, listener, &parcel.belongings.descriptors());
    let other_pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    let successor = handed.is_ok().then_some(other_pid);
    if let Err(error) = handed {
        log(&format!("no upgrade: {error}; this daemon goes on"));
        let own = rustix::process::getpid();
        if !other.call_off() && credentials.pid != own {
            // It has what we need, and does not answer.
            let _ = rustix::process::kill_process(credentials.pid, Signal::KILL);
            other.call_off();
        }
    }
    // The core waits for this word; one that has ended needs none.
    let _ = settle.send(successor);
    Ok(if successor.is_some() { Greeted::Replaced } else { Greeted::LetIn })
}

/// Makes an application with its memory.
fn admit(
    connection: UnixStream,
    config: &DoorConfig,
    name: String,
    heir_of: Option<Ticket>,
) -> io::Result<Application> {
    let credentials = rustix::net::sockopt::socket_peercred(&connection)?;
    let pid = credentials.pid.as_raw_nonzero().get().unsigned_abs();
    let identity = Identity { pid, uid: credentials.uid.as_raw(), name };
    let control = Region::reserve(config.geometry.control_words())?;
    let data = Region::reserve(config.geometry.data_words())?;
    let memory = Memory::new(config.geometry, control, data)?;
    let terms = Terms { coalescing: config.coalescing, quota: config.quota };
    Application::new(identity, memory, OwnedFd::from(connection), heir_of, terms)
}
