//! What an application has of the daemon.
//!
//! An [`Attachment`] is one end of a set of rings, for one thread at a time. All
//! its calls return at once but those that need an answer; to wait for more,
//! [`Attachment::prepare_sleep`] and sleep on its descriptor.

mod ask;
mod heir;
#[cfg(test)]
mod hostile;
mod passing;
mod socket;
mod tcp;
mod udp;

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{RecvFlags, SendFlags};
use tidegate_memory::shared::{Broken, Part, Receiver, Sender, Wanted};
use tidegate_stack::TcpInfo;

pub use passing::Arrived;
pub use socket::Kind;
pub use udp::Received;

use self::ask::PATIENCE;
use self::socket::Socket;
use crate::contract::command::{COMMAND_WORDS, Command, Handle, Tag};
use crate::contract::greeting::{Hello, Welcome, receive_welcome, send_hello};
use crate::contract::layout::Memory;
pub use crate::contract::notice::Found;
use crate::contract::notice::{Granted, NOTICE_WORDS, Notice};
use crate::contract::ticket::Ticket;

/// Where the daemon listens unless it is told otherwise.
pub const DEFAULT_PATH: &str = "/run/tidegate/tidegate.sock";

/// How often a daemon is called that hangs up before it has said anything.
const CALLS_MAX: u32 = 3;

/// So many looks in vain, and one looks whether the daemon is still there.
const LOOKS_IN_VAIN: u32 = 1024;

/// What was answered.
#[derive(Clone, Copy, Debug)]
enum Answer {
    Granted(Granted),
    Found(Found),
    Info(TcpInfo),
    Commands(u64),
}

/// One end of the rings between an application and the daemon.
pub struct Attachment {
    /// Where the daemon listens, and what it calls us.
    path: PathBuf,
    name: String,
    /// By which a child of this process gets its sockets.
    ticket: Ticket,
    cores: u32,
    connection: OwnedFd,
    memory: Memory,
    /// Memory of others that sockets of ours are in.
    elsewhere: Vec<Memory>,
    commands: Sender<Part, COMMAND_WORDS>,
    notices: Receiver<Part, NOTICE_WORDS>,
    daemon_sleeps: Wanted<Part>,
    we_sleep: Wanted<Part>,
    sockets: Vec<Option<Box<Socket>>>,
    /// Answers that nobody has taken yet.
    answers: Vec<(Tag, Result<Answer, ErrorKind>)>,
    /// Sockets that something happened to.
    changed: VecDeque<Handle>,
    last_tag: Tag,
    in_vain: u32,
    /// How many sleep on the descriptor.
    asleep: u32,
    /// What was asked of addresses before.
    found: HashMap<IpAddr, Found>,
    is_over: bool,
}

/// What is said when the daemon has gone.
fn gone() -> io::Error {
    io::Error::new(
        ErrorKind::ConnectionAborted,
        "the network daemon has ended: its connections are gone; start it and this program again",
    )
}

/// Says what we come for, and is let in.
///
/// # Errors
/// As [`call_at`], and what the daemon says.
fn be_welcomed(path: &Path, hello: &Hello) -> io::Result<(UnixStream, Welcome)> {
    let mut left = CALLS_MAX;
    loop {
        left -= 1;
        let connection = call_at(path)?;
        connection.set_read_timeout(Some(PATIENCE))?;
        let said = send_hello(connection.as_fd(), hello);
        match said.and_then(|()| receive_welcome(connection.as_fd())) {
            Ok(welcome) => return Ok((connection, welcome)),
            // One that has just been replaced hangs up: its successor listens there.
            Err(error) if left > 0 && hung_up(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

fn hung_up(error: &io::Error) -> bool {
    let kinds = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    kinds.contains(&error.kind())
}

/// Connects to the daemon that listens at a path.
pub(crate) fn call_at(path: &Path) -> io::Result<UnixStream> {
    let call = || loop {
        match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            connected => return connected,
        }
    };
    call().map_err(|error| {
        let message = format!(
            "no network daemon at {}: {error}; start one by `tidegate serve`, or give its path",
            path.display()
        );
        io::Error::new(error.kind(), message)
    })
}

impl Attachment {
    /// Attaches to the daemon that listens at a path. `name` is what it calls us.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] and [`io::ErrorKind::ConnectionRefused`] when no
    /// daemon listens there, [`io::ErrorKind::PermissionDenied`] when it is not for
    /// this user.
    pub fn connect(path: &Path, name: &str) -> io::Result<Self> {
        let hello = Hello::Attach(name.to_owned());
        let (connection, welcome) = be_welcomed(path, &hello)?;
        Self::new(connection, welcome, path, name)
    }

    /// One more attachment of this program. Those who sleep on this one right now sleep
    /// on both.
    ///
    /// # Errors
    /// As [`Attachment::connect`].
    pub fn another(&self) -> io::Result<Self> {
        let mut another = Self::connect(&self.path, &self.name)?;
        another.asleep = self.asleep;
        if another.asleep > 0 {
            another.we_sleep.ask();
        }
        Ok(another)
    }

    /// How many network cores the daemon has: with so many attachments a program can be
    /// on all of them.
    pub fn cores(&self) -> usize {
        self.cores as usize
    }

    fn new(connection: UnixStream, welcome: Welcome, path: &Path, name: &str) -> io::Result<Self> {
        let Welcome { memory, ticket, cores } = welcome;
        Ok(Self {
            path: path.to_owned(),
            name: name.to_owned(),
            ticket,
            cores,
            connection: connection.into(),
            commands: memory.asking()?,
            notices: memory.told()?,
            daemon_sleeps: memory.daemon_sleeps()?,
            we_sleep: memory.application_sleeps()?,
            memory,
            elsewhere: Vec::new(),
            sockets: Vec::new(),
            answers: Vec::new(),
            changed: VecDeque::new(),
            last_tag: 0,
            in_vain: 0,
            asleep: 0,
            found: HashMap::new(),
            is_over: false,
        })
    }

    /// Takes what the daemon has told since. Whether it was anything.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] when the daemon has ended.
    pub fn poll(&mut self) -> io::Result<bool> {
        if self.is_over {
            return Err(gone());
        }
        let mut any = false;
        while let Some(words) = self.notices.pop().map_err(|broken| self.end(broken))? {
            any = true;
            match Notice::from_words(words) {
                Some(Notice::Changed(handle)) => {
                    if let Some(socket) = self.get(handle) {
                        // Before anybody looks: what comes then is told again.
                        socket.place.changes.ask();
                        self.changed.push_back(handle);
                    }
                }
                Some(Notice::Answer { tag, outcome }) => {
                    self.answers.push((tag, outcome.map(Answer::Granted)));
                }
                Some(Notice::Found { tag, found }) => {
                    self.answers.push((tag, Ok(Answer::Found(found))));
                }
                Some(Notice::Informed { tag, info }) => {
                    self.answers.push((tag, Ok(Answer::Info(info))));
                }
                Some(Notice::Pong { tag, commands }) => {
                    self.answers.push((tag, Ok(Answer::Commands(commands))));
                }
                None => return Err(self.end(Broken)),
            }
        }
        if any {
            self.notices.release();
            self.in_vain = 0;
        } else {
            self.in_vain += 1;
            if self.in_vain >= LOOKS_IN_VAIN {
                self.take_bytes()?;
            }
        }
        Ok(any)
    }

    /// The next socket that something happened to.
    pub fn next_changed(&mut self) -> Option<(Handle, Kind)> {
        loop {
            let handle = self.changed.pop_front()?;
            if let Some(socket) = self.get(handle) {
                return Some((handle, socket.kind));
            }
        }
    }

    /// Before sleeping on the descriptor: it becomes readable when the daemon
    /// tells something. `false` when it has already; do not sleep then. In any case
    /// [`Attachment::end_sleep`] follows. Several threads may sleep at once: who
    /// wakes up hears for all.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] when the daemon has ended.
    pub fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.asleep += 1;
        self.we_sleep.ask();
        Ok(!self.poll()? && self.changed.is_empty())
    }

    /// After sleeping: the descriptor is quiet again. Look once more after this
    /// call.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] when the daemon has ended.
    pub fn end_sleep(&mut self) -> io::Result<()> {
        self.asleep = self.asleep.saturating_sub(1);
        // Before others are told for whom it was, nobody else wakes them.
        if self.asleep == 0 {
            self.we_sleep.clear();
        } else {
            self.we_sleep.ask();
        }
        self.take_bytes()
    }

    /// Whether something happened to a socket that nobody has heard of yet.
    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Takes the bytes away that woke us.
    fn take_bytes(&mut self) -> io::Result<()> {
        self.in_vain = 0;
        let mut bytes = [0; 256];
        match rustix::net::recv(&self.connection, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((1.., _)) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            _ => Err(self.end(Broken)),
        }
    }

    /// The daemon is of no further use.
    fn end(&mut self, _: Broken) -> io::Error {
        self.is_over = true;
        gone()
    }

    fn get(&mut self, handle: Handle) -> Option<&mut Socket> {
        let socket = self.sockets.get_mut(handle.place as usize)?.as_deref_mut()?;
        (socket.handle == handle).then_some(socket)
    }

    /// The socket of this name.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    fn socket(&mut self, handle: Handle) -> io::Result<&mut Socket> {
        if self.is_over {
            return Err(gone());
        }
        self.get(handle).ok_or_else(|| ErrorKind::NotConnected.into())
    }

    /// Gives the daemon a command.
    fn command(&mut self, command: Command) -> io::Result<()> {
        if self.is_over {
            return Err(gone());
        }
        let words = command.to_words();
        while !self.commands.push(&words).map_err(|broken| self.end(broken))? {
            // The daemon has a thousand commands to do: it is not far.
            self.wake_daemon();
            std::thread::yield_now();
            self.take_bytes()?;
            // It does no more while we do not hear what it says.
            self.poll()?;
        }
        self.commands.publish();
        if self.daemon_sleeps.take() {
            self.wake_daemon();
        }
        Ok(())
    }

    fn wake_daemon(&self) {
        // A connection that is full has woken it already; one that is over is
        // found out by the next look.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&self.connection, &[0], flags);
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
