//! Application's end of the connection to the daemon.
//!
//! An [`Attachment`] is one end of a set of rings, for one thread at a time. Its calls return at
//! once, except for requests that need a reply. To wait for events, call
//! [`Attachment::prepare_sleep`] and sleep on the attachment's event descriptor.

mod fork;
#[cfg(test)]
mod hostile;
mod requests;
mod socket;
mod tcp;
mod transfer;
mod udp;
mod udp_errors;
#[cfg(test)]
mod wake_ups;

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use tidegate_memory::OwnFd;
use tidegate_memory::shared::{PeerError, Receiver, Sender, WakeFlag, WordRange};
use tidegate_stack::{TcpInfo, TcpTraffic};

pub use socket::{ChangedSocket, SocketType};
pub use transfer::ReceivedShard;
pub use udp::ReceivedDatagram;

use self::requests::REPLY_TIMEOUT;
use self::socket::AttachedSocket;
use crate::ipc::command::{COMMAND_WORDS, Command, Handle, Tag};
use crate::ipc::connect::connect_to_daemon;
use crate::ipc::event_fds::EventFds;
use crate::ipc::handshake::{Hello, Welcome, receive_welcome, send_hello};
use crate::ipc::layout::SharedMemory;
pub use crate::ipc::notification::AddressInfo;
use crate::ipc::notification::{NOTIFICATION_WORDS, Notification, OpenedSocket};
use crate::ipc::processor::LastProcessor;
use crate::ipc::takeover_token::TakeoverToken;
use crate::ipc::version::ProtocolVersion;

/// Default path of the daemon's Unix socket.
pub const DEFAULT_PATH: &str = "/run/tidegate/tidegate.sock";

/// Maximum number of handshake attempts when the daemon closes the connection without a reply.
const MAX_HANDSHAKE_ATTEMPTS: u32 = 3;

/// Number of empty polls after which the connection to the daemon is checked.
const MAX_EMPTY_POLLS: u32 = 1024;

/// Time after which a command wakes the daemon although the wake-up was deferred.
const MAX_WAKE_UP_DELAY: Duration = Duration::from_micros(100);

/// Reply of the daemon to a request.
#[derive(Clone, Copy, Debug)]
enum Reply {
    Socket(OpenedSocket),
    Address(AddressInfo),
    TcpInfo(TcpInfo),
    Commands(u64),
}

/// Application's end of the rings that it shares with the daemon.
pub struct Attachment {
    /// Path of the daemon's socket, and this application's name in the daemon's report.
    path: PathBuf,
    name: String,
    /// Version of the attach protocol that it speaks.
    protocol: ProtocolVersion,
    /// Token by which a fork child inherits the sockets.
    token: TakeoverToken,
    cores: u32,
    connection: Arc<OwnFd>,
    event_fds: EventFds<Arc<OwnFd>>,
    /// Edge-triggered `epoll` of the event descriptor and the connection, for this attachment's own
    /// waits.
    events: OwnFd,
    memory: SharedMemory,
    /// Memory of other applications that holds sockets of this attachment.
    foreign_memories: Vec<SharedMemory>,
    commands: Sender<WordRange, COMMAND_WORDS>,
    notifications: Receiver<WordRange, NOTIFICATION_WORDS>,
    daemon_sleeps: WakeFlag<WordRange>,
    application_sleeps: WakeFlag<WordRange>,
    daemon_processor: LastProcessor,
    application_processor: LastProcessor,
    /// The network core and the thread that waited last ran on one processor.
    shares_processor: bool,
    /// Number of commands whose wake-up of the daemon may be deferred.
    deferrable_wake_ups: u32,
    /// Time of the first command whose wake-up is deferred.
    deferred_since: Option<Instant>,
    sockets: Vec<Option<Box<AttachedSocket>>>,
    /// Replies that were received and not taken yet.
    replies: Vec<(Tag, Result<Reply, ErrorKind>)>,
    /// Traffic of the connection of the next reply with a connection's state.
    tcp_traffic: TcpTraffic,
    /// Sockets with changes, to be returned by [`Attachment::next_changed`].
    changed: VecDeque<Handle>,
    last_tag: Tag,
    empty_polls: u32,
    /// Number of threads that sleep on the event descriptor.
    sleeping_threads: u32,
    /// Results of earlier address lookups.
    address_cache: HashMap<IpAddr, AddressInfo>,
    is_disconnected: bool,
}

/// Error after the daemon has exited.
fn daemon_exited_error() -> io::Error {
    io::Error::new(
        ErrorKind::ConnectionAborted,
        "the network daemon has exited and its connections are lost: restart it and this program",
    )
}

/// True if events of [`Attachment::watch`] tell of the end of the daemon.
pub fn has_hung_up(events: &[epoll::Event]) -> bool {
    let ended = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
    events.iter().any(|event| {
        let flags = event.flags;
        flags.intersects(ended)
    })
}

/// Connects, sends `hello` and waits for the welcome. Retries if the daemon hangs up.
///
/// # Errors
/// As [`connect_to_daemon`]; the error with which the daemon refuses.
fn handshake(
    path: &Path,
    protocol: ProtocolVersion,
    hello: &Hello,
) -> io::Result<(UnixStream, Welcome<OwnedFd>)> {
    let mut attempts_left = MAX_HANDSHAKE_ATTEMPTS;
    loop {
        attempts_left -= 1;
        let connection = connect_to_daemon(path)?;
        connection.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let sent = send_hello(connection.as_fd(), protocol, hello);
        match sent.and_then(|()| receive_welcome(connection.as_fd(), protocol)) {
            Ok(welcome) => return Ok((connection, welcome)),
            // A daemon that has just been replaced hangs up: its successor listens on the path.
            Err(error) if attempts_left > 0 && is_hang_up(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

fn is_hang_up(error: &io::Error) -> bool {
    let kinds = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    kinds.contains(&error.kind())
}

impl Attachment {
    /// Attaches to the daemon that listens at `path`. The daemon reports the application as
    /// `name`.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] and [`io::ErrorKind::ConnectionRefused`] if no daemon listens
    /// there; [`io::ErrorKind::PermissionDenied`] if this user may not attach.
    pub fn connect(path: &Path, name: &str) -> io::Result<Self> {
        Self::connect_speaking(ProtocolVersion::CURRENT, path, name)
    }

    /// Attaches in a version of the attach protocol.
    pub(crate) fn connect_speaking(
        protocol: ProtocolVersion,
        path: &Path,
        name: &str,
    ) -> io::Result<Self> {
        let hello = Hello::Attach(name.to_owned());
        let (connection, welcome) = handshake(path, protocol, &hello)?;
        Self::new(connection, welcome, protocol, path, name)
    }

    /// Opens another attachment of this application. Threads that sleep on this attachment count
    /// as sleeping on both.
    ///
    /// # Errors
    /// As [`Attachment::connect`].
    pub fn connect_another(&self) -> io::Result<Self> {
        let mut attachment = Self::connect_speaking(self.protocol, &self.path, &self.name)?;
        attachment.sleeping_threads = self.sleeping_threads;
        if attachment.sleeping_threads > 0 {
            attachment.application_sleeps.request();
        }
        Ok(attachment)
    }

    /// Number of network cores of the daemon. With one attachment per core an application can
    /// use all of them.
    pub fn cores(&self) -> usize {
        self.cores as usize
    }

    fn new(
        connection: UnixStream,
        welcome: Welcome<OwnedFd>,
        protocol: ProtocolVersion,
        path: &Path,
        name: &str,
    ) -> io::Result<Self> {
        let Welcome { memory, event_fds, token, cores } = welcome;
        let events = OwnFd::from(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let attachment = Self {
            path: path.to_owned(),
            name: name.to_owned(),
            protocol,
            token,
            cores,
            connection: Arc::new(OwnedFd::from(connection).into()),
            event_fds: event_fds.map(|fd| Arc::new(fd.into())),
            events,
            commands: memory.command_sender()?,
            notifications: memory.notification_receiver()?,
            daemon_sleeps: memory.daemon_sleeps()?,
            application_sleeps: memory.application_sleeps()?,
            daemon_processor: memory.daemon_processor()?,
            application_processor: memory.application_processor()?,
            shares_processor: false,
            deferrable_wake_ups: 0,
            deferred_since: None,
            memory,
            foreign_memories: Vec::new(),
            sockets: Vec::new(),
            replies: Vec::new(),
            tcp_traffic: TcpTraffic::default(),
            changed: VecDeque::new(),
            last_tag: 0,
            empty_polls: 0,
            sleeping_threads: 0,
            address_cache: HashMap::new(),
            is_disconnected: false,
        };
        attachment.watch(&attachment.events)?;
        Ok(attachment)
    }

    /// Adds what ends a sleep to an edge-triggered `epoll`: wake-ups of the daemon, and its end.
    ///
    /// # Errors
    /// As `epoll_ctl`.
    pub fn watch(&self, epoll: impl AsFd) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        let edge = epoll::EventFlags::ET;
        epoll::add(&epoll, &*self.connection, data, edge | epoll::EventFlags::RDHUP)?;
        Ok(epoll::add(&epoll, &*self.event_fds.application, data, edge | epoll::EventFlags::IN)?)
    }

    /// Processes the daemon's notifications. Returns true if there was any.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
    pub fn poll(&mut self) -> io::Result<bool> {
        if self.is_disconnected {
            return Err(daemon_exited_error());
        }
        if self.empty_polls >= MAX_EMPTY_POLLS {
            self.check_connection()?;
        }
        let mut any = false;
        while let Some(words) =
            self.notifications.pop().map_err(|broken| self.disconnect(broken))?
        {
            any = true;
            match Notification::from_words(words) {
                Some(Notification::Changed(handle)) => {
                    if let Some(socket) = self.get(handle) {
                        // Re-arm before the socket is read: later changes are notified again.
                        socket.slot.notify_on_change.request();
                        self.changed.push_back(handle);
                    }
                }
                Some(Notification::Reply { tag, outcome }) => {
                    self.replies.push((tag, outcome.map(Reply::Socket)));
                }
                Some(Notification::AddressInfo { tag, info }) => {
                    self.replies.push((tag, Ok(Reply::Address(info))));
                }
                Some(Notification::TcpTraffic(traffic)) => self.tcp_traffic = traffic,
                Some(Notification::TcpInfo { tag, info }) => {
                    let info = TcpInfo { traffic: self.tcp_traffic, ..info };
                    self.replies.push((tag, Ok(Reply::TcpInfo(info))));
                }
                Some(Notification::Pong { tag, commands }) => {
                    self.replies.push((tag, Ok(Reply::Commands(commands))));
                }
                None => return Err(self.disconnect(PeerError)),
            }
        }
        if any {
            self.notifications.release();
            self.empty_polls = 0;
        } else {
            self.empty_polls += 1;
        }
        Ok(any)
    }

    /// Returns the next socket with a change.
    pub fn next_changed(&mut self) -> Option<ChangedSocket> {
        loop {
            let handle = self.changed.pop_front()?;
            if let Some(socket) = self.get(handle) {
                let socket_type = socket.socket_type;
                return Some(ChangedSocket { handle, socket_type, has_news: socket.take_news() });
            }
        }
    }

    /// Tells the network core that this thread runs on `processor`. Returns true if the core ran
    /// there last: then the core runs while this thread sleeps, not while this thread busy-polls.
    pub fn note_processor(&mut self, processor: usize) -> bool {
        self.application_processor.publish(processor);
        self.shares_processor = self.daemon_processor.is(processor);
        self.shares_processor
    }

    /// True if the network core shares the processor of the thread that waited last: then nothing
    /// arrives while that thread runs.
    pub fn shares_processor(&self) -> bool {
        self.shares_processor
    }

    /// True if the network core waits for the processor of the thread that waited last.
    pub fn is_processor_wanted(&self) -> bool {
        self.shares_processor && !self.daemon_sleeps.is_requested()
    }

    /// Defers the wake-ups for the next `commands` commands, as long as the network core shares the
    /// processor of this thread: the command after them wakes the core, or
    /// [`Attachment::wake_daemon_if_deferred`].
    pub fn defer_wake_ups(&mut self, commands: u32) {
        self.deferrable_wake_ups = commands;
    }

    /// Wakes the daemon if a command waits for that.
    pub fn wake_daemon_if_deferred(&mut self) {
        if self.deferred_since.is_some() {
            self.wake_sleeping_daemon();
        }
        self.deferrable_wake_ups = 0;
    }

    /// Wakes the daemon if a command has waited for that for long. For waits that end at once, since
    /// a socket is always ready.
    pub fn wake_daemon_if_overdue(&mut self) {
        if self.deferred_since.is_some_and(|since| since.elapsed() >= MAX_WAKE_UP_DELAY) {
            self.wake_sleeping_daemon();
        }
    }

    /// Prepares a sleep on an `epoll` with the events of [`Attachment::watch`]. Returns `false` if a
    /// notification has arrived already: do not sleep then. In both cases call
    /// [`Attachment::end_sleep`] afterwards. Several threads may sleep at once: the thread that wakes
    /// up processes the notifications of all.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
    pub fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.enter_sleep();
        self.wake_daemon_if_deferred();
        Ok(!self.poll()? && self.changed.is_empty())
    }

    /// Sleeps until there is a notification, or for a time at most.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
    pub fn sleep(&mut self, limit: Duration) -> io::Result<()> {
        let slept = if self.prepare_sleep()? { self.await_events(limit) } else { Ok(false) };
        self.end_sleep(matches!(slept, Ok(true)))?;
        slept.map(drop)
    }

    /// Waits for an event. Returns true if the connection has ended. An event of the past may end
    /// the wait at once.
    fn await_events(&self, limit: Duration) -> io::Result<bool> {
        let limit = Timespec::try_from(limit).ok();
        let mut buffer = [const { MaybeUninit::<epoll::Event>::uninit() }; 2];
        match epoll::wait(&self.events, &mut buffer[..], limit.as_ref()) {
            Ok((events, _)) => Ok(has_hung_up(events)),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn enter_sleep(&mut self) {
        self.sleeping_threads += 1;
        self.application_sleeps.request();
    }

    /// Ends a sleep. `has_hung_up`: the wait has found the end of the connection. Poll once more
    /// after this call.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
    pub fn end_sleep(&mut self, has_hung_up: bool) -> io::Result<()> {
        self.leave_sleep();
        if has_hung_up { self.check_connection() } else { Ok(()) }
    }

    /// Descriptors of which one is readable when the daemon has sent a notification or has ended: to
    /// sleep on them instead of an `epoll`, after [`Attachment::prepare_sleep`] and before
    /// [`Attachment::end_sleep_on_fds`].
    pub fn sleep_fds(&self) -> [Arc<OwnFd>; 2] {
        [Arc::clone(&self.event_fds.application), Arc::clone(&self.connection)]
    }

    /// Ends a sleep on [`Attachment::sleep_fds`] and perhaps on other descriptors, of which one has
    /// an event if `has_other_event`. Poll once more after this call. A thread in a filter of system
    /// calls that allows but `poll` and `read` may sleep so.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
    pub fn end_sleep_on_fds(&mut self, has_other_event: bool) -> io::Result<()> {
        let was_woken = !self.application_sleeps.is_requested();
        self.leave_sleep();
        if has_other_event && !was_woken {
            return Ok(());
        }
        match rustix::io::read(&*self.event_fds.application, &mut [0; 8]) {
            Err(_) if !has_other_event => self.check_connection(),
            _ => Ok(()),
        }
    }

    fn leave_sleep(&mut self) {
        self.sleeping_threads = self.sleeping_threads.saturating_sub(1);
        // Until the other sleeping threads learn of their events, only the daemon wakes them.
        if self.sleeping_threads == 0 {
            self.application_sleeps.clear();
        } else {
            self.application_sleeps.request();
        }
    }

    /// True if [`Attachment::next_changed`] has a socket to return.
    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Finds out if the daemon has closed the connection.
    fn check_connection(&mut self) -> io::Result<()> {
        self.empty_polls = 0;
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let mut fds = [PollFd::new(&*self.connection, PollFlags::RDHUP)];
        match rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(_) if !fds[0].revents().intersects(ended) => Ok(()),
            Err(rustix::io::Errno::INTR) => Ok(()),
            _ => Err(self.disconnect(PeerError)),
        }
    }

    /// Marks the attachment as disconnected, and returns the error for the caller.
    fn disconnect(&mut self, _: PeerError) -> io::Error {
        self.is_disconnected = true;
        daemon_exited_error()
    }

    fn get(&mut self, handle: Handle) -> Option<&mut AttachedSocket> {
        let socket = self.sockets.get_mut(handle.slot as usize)?.as_deref_mut()?;
        (socket.handle == handle).then_some(socket)
    }

    /// Socket with this handle.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    fn socket(&mut self, handle: Handle) -> io::Result<&mut AttachedSocket> {
        if self.is_disconnected {
            return Err(daemon_exited_error());
        }
        self.get(handle).ok_or_else(|| ErrorKind::NotConnected.into())
    }

    /// Writes a command to the ring, and wakes the daemon if it sleeps.
    fn send_command(&mut self, command: Command) -> io::Result<()> {
        if self.is_disconnected {
            return Err(daemon_exited_error());
        }
        let words = command.to_words();
        while !self.commands.push(&words).map_err(|broken| self.disconnect(broken))? {
            // The command ring is full: the daemon catches up soon.
            self.wake_daemon();
            std::thread::yield_now();
            self.check_connection()?;
            // The daemon stops executing commands while the notification ring is full.
            self.poll()?;
        }
        self.commands.publish();
        if !self.defers_wake_up() {
            self.wake_sleeping_daemon();
        }
        Ok(())
    }

    /// True if the wake-up for a command waits for those after it. On a processor of its own a
    /// network core begins at once.
    fn defers_wake_up(&mut self) -> bool {
        if !self.shares_processor || self.deferrable_wake_ups == 0 {
            return false;
        }
        self.deferrable_wake_ups -= 1;
        match self.deferred_since {
            Some(since) => since.elapsed() < MAX_WAKE_UP_DELAY,
            None => {
                self.deferred_since = Some(Instant::now());
                true
            }
        }
    }

    fn wake_sleeping_daemon(&mut self) {
        self.deferred_since = None;
        if self.daemon_sleeps.take() {
            self.wake_daemon();
        }
    }

    fn wake_daemon(&self) {
        // Fails when the counter is full, which no honest application brings about.
        let _ = rustix::io::write(&*self.event_fds.daemon, &1_u64.to_ne_bytes());
    }
}

impl AsFd for Attachment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl std::fmt::Debug for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sockets = self.sockets.iter().flatten().count();
        f.debug_struct("Attachment").field("sockets", &sockets).finish_non_exhaustive()
    }
}
