//! Attacker: an ordinary program that `tidegate run` has attached to the daemon, and that misuses
//! what it holds. It finds the descriptors of the attachment among its own, and knows nothing
//! of the protocol, so the same attacker runs against any version.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{PidfdFlags, PidfdGetfdFlags};

use crate::LabError;
use crate::testbed::programs;

/// Time after which the peer of a lingering socket closes, so that the last close of the socket
/// returns.
const LINGER_TIME: Duration = Duration::from_millis(300);
/// Pause between two descriptors that are sent.
const DESCRIPTOR_PAUSE: Duration = Duration::from_millis(2);
/// Bytes of its memory that an attacker allocates and discards in one call.
const PUNCHED_BYTES: u64 = 64 << 20;
/// Connections to the attach socket that are held open.
const HELD_CONNECTIONS: usize = 400;
/// Words that are overwritten before the attacker attaches again.
const SCRIBBLED_WORDS: usize = 20_000;
const DATAGRAM: [u8; 1200] = [0; 1200];

/// Misuse of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Makes system calls that concern nobody: the reference of all others.
    Harmless,
    /// Sends descriptors along whose last close blocks.
    Descriptors,
    /// Sends such descriptors in first messages.
    FirstMessages,
    /// Fills the event descriptors that it shares with the daemon, and makes them blocking.
    EventDescriptors,
    /// Holds the lock of its memory file, while it opens and closes sockets.
    MemoryFile,
    /// Overwrites the shared memory, is evicted, and attaches again.
    Scribble,
    /// Sends datagrams as fast as it can, on many sockets.
    Datagrams,
    /// Fills streams as fast as it can.
    Streams,
    /// Opens and closes connections as fast as it can.
    Connections,
    /// Binds and closes ports as fast as it can.
    Ports,
    /// Holds as many connections to the attach socket as it can, and says nothing.
    SilentConnections,
    /// Keeps connections alive at the shortest interval.
    KeepAlive,
}

impl Attack {
    /// All attacks, the harmless one first.
    pub const ALL: [Self; 12] = [
        Self::Harmless,
        Self::Descriptors,
        Self::FirstMessages,
        Self::EventDescriptors,
        Self::MemoryFile,
        Self::Scribble,
        Self::Datagrams,
        Self::Streams,
        Self::Connections,
        Self::Ports,
        Self::SilentConnections,
        Self::KeepAlive,
    ];

    /// Name in rows, and of the flag that starts the attacker.
    pub fn name(self) -> &'static str {
        match self {
            Self::Harmless => "harmless",
            Self::Descriptors => "descriptors",
            Self::FirstMessages => "first-messages",
            Self::EventDescriptors => "event-descriptors",
            Self::MemoryFile => "memory-file",
            Self::Scribble => "scribble",
            Self::Datagrams => "datagrams",
            Self::Streams => "streams",
            Self::Connections => "connections",
            Self::Ports => "ports",
            Self::SilentConnections => "silent-connections",
            Self::KeepAlive => "keep-alive",
        }
    }
}

/// Configuration of an attacker.
#[derive(Clone, Debug)]
pub struct AttackerConfig {
    /// Misuse.
    pub attack: Attack,
    /// Path of the daemon's attach socket.
    pub socket: PathBuf,
    /// Address of a host that discards what it gets, on TCP and UDP.
    pub sink: SocketAddrV4,
}

/// Attacks until the process is killed. Prints a line when the attack begins.
///
/// # Errors
/// If the attacker is not attached, or a system call that should succeed fails.
pub fn run_attacker(config: &AttackerConfig) -> Result<(), LabError> {
    attack(config).map_err(LabError::io(format!("the attack {} failed", config.attack.name())))
}

fn attack(config: &AttackerConfig) -> io::Result<()> {
    // The first socket attaches.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(config.sink)?;
    socket.send(&DATAGRAM[..1])?;
    let attachment = OwnAttachment::find(config)?;
    println!("attacking");
    io::stdout().flush()?;
    match config.attack {
        Attack::Harmless => loop {
            let _ = rustix::process::getppid();
        },
        Attack::Descriptors => send_descriptors(|| attachment.connection.try_clone()),
        Attack::FirstMessages => {
            send_descriptors(|| Ok(UnixStream::connect(&config.socket)?.into()))
        }
        Attack::EventDescriptors => fill_event_fds(&attachment, config.sink),
        Attack::MemoryFile => hold_memory_file(&attachment, config.sink),
        Attack::Scribble => scribble(&attachment, &socket),
        Attack::Datagrams => send_datagrams(config.sink),
        Attack::Streams => fill_streams(config.sink),
        Attack::Connections => loop {
            // Without a free port the connection fails.
            drop(TcpStream::connect(config.sink));
        },
        Attack::Ports => loop {
            for port in 20_000..20_256 {
                drop(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)));
            }
        },
        Attack::SilentConnections => hold_connections(config),
        Attack::KeepAlive => keep_alive(config.sink),
    }
}

/// Sends descriptors on a connection for each.
fn send_descriptors(mut connection: impl FnMut() -> io::Result<OwnedFd>) -> io::Result<()> {
    loop {
        let lingering = LingeringSocket::new()?;
        // The daemon refuses connections while too many say nothing, and a full one takes no more.
        if let Ok(connection) = connection() {
            let _ = send_along(&connection, lingering.near.as_fd());
        }
        lingering.close_later();
        thread::sleep(DESCRIPTOR_PAUSE);
    }
}

/// Allocates and discards memory, which holds the lock of the memory file, while another thread
/// makes the daemon discard memory.
fn hold_memory_file(attachment: &OwnAttachment, sink: SocketAddrV4) -> io::Result<()> {
    thread::spawn(move || use_sockets(sink));
    let bytes = attachment.data.metadata()?.len().min(PUNCHED_BYTES);
    let discard = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        rustix::fs::fallocate(&attachment.data, FallocateFlags::KEEP_SIZE, 0, bytes)?;
        rustix::fs::fallocate(&attachment.data, discard, 0, bytes)?;
    }
}

/// Overwrites the shared memory, then runs this program again.
fn scribble(attachment: &OwnAttachment, socket: &UdpSocket) -> io::Result<()> {
    let mut rng = fastrand::Rng::new();
    let files = [&attachment.control, &attachment.data];
    for _ in 0..SCRIBBLED_WORDS {
        let file = files[rng.usize(..2)];
        let word = rng.u64(..file.metadata()?.len() / 8);
        file.write_all_at(&rng.u64(..).to_ne_bytes(), word * 8)?;
        // The daemon looks at the memory of a socket in use. It may have evicted this process.
        let _ = socket.send(&DATAGRAM[..64]);
    }
    let program = programs::laboratory().map_err(io::Error::other)?;
    Err(Command::new(program).args(std::env::args_os().skip(1)).exec())
}

fn send_datagrams(sink: SocketAddrV4) -> io::Result<()> {
    let bind = |_| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.set_nonblocking(true)?;
        socket.connect(sink).map(|()| socket)
    };
    let sockets = (0..64).map(bind).collect::<io::Result<Vec<_>>>()?;
    loop {
        for socket in &sockets {
            let _ = socket.send(&DATAGRAM);
        }
    }
}

fn fill_streams(sink: SocketAddrV4) -> io::Result<()> {
    let connect = |_| {
        let stream = TcpStream::connect(sink)?;
        stream.set_nonblocking(true).map(|()| stream)
    };
    let mut streams = (0..16).map(connect).collect::<io::Result<Vec<_>>>()?;
    let bytes = vec![0; 1 << 20];
    loop {
        for stream in &mut streams {
            let _ = stream.write(&bytes);
        }
    }
}

/// Holds connections to the attach socket that say nothing, and opens new ones.
fn hold_connections(config: &AttackerConfig) -> io::Result<()> {
    let mut held = VecDeque::new();
    loop {
        match UnixStream::connect(&config.socket) {
            Ok(connection) => held.push_back(connection),
            Err(_) => held.clear(),
        }
        if held.len() > HELD_CONNECTIONS {
            held.pop_front();
        }
    }
}

/// Keeps its event descriptors full, while it sleeps until the daemon wakes it.
fn fill_event_fds(attachment: &OwnAttachment, sink: SocketAddrV4) -> io::Result<()> {
    loop {
        for event_fd in &attachment.event_fds {
            rustix::fs::fcntl_setfl(event_fd, OFlags::NONBLOCK)?;
            // Fails when the counter is full.
            let _ = rustix::io::write(event_fd, &(u64::MAX - 1).to_ne_bytes());
            rustix::fs::fcntl_setfl(event_fd, OFlags::empty())?;
        }
        for _ in 0..64 {
            // Without a free port the connection fails. It is answered in any case.
            drop(TcpStream::connect(sink));
        }
    }
}

fn keep_alive(sink: SocketAddrV4) -> io::Result<()> {
    let streams = (0..256).map(|_| TcpStream::connect(sink)).collect::<io::Result<Vec<_>>>()?;
    for stream in &streams {
        crate::testbed::sys::keep_alive_often(stream.as_fd())?;
    }
    loop {
        thread::park();
    }
}

/// Opens sockets, uses them and closes them.
fn use_sockets(sink: SocketAddrV4) {
    loop {
        if let Ok(socket) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)) {
            for _ in 0..64 {
                let _ = socket.send_to(&DATAGRAM, sink);
            }
        }
    }
}

/// Descriptors of this process that it shares with the daemon.
struct OwnAttachment {
    connection: OwnedFd,
    event_fds: Vec<OwnedFd>,
    control: File,
    data: File,
}

impl OwnAttachment {
    /// Finds the connection by the address of its peer, and the memory by its names and sizes. The
    /// event descriptors are all that this process has.
    fn find(config: &AttackerConfig) -> io::Result<Self> {
        let missing =
            || io::Error::other("this process is not attached: start it by `tidegate run`");
        let itself = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(itself, PidfdFlags::empty())?;
        let (mut connection, mut event_fds, mut memories) = (None, Vec::new(), Vec::new());
        for entry in fs::read_dir("/proc/self/fd")? {
            let path = entry?.path();
            let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            let (Ok(target), Some(number)) = (fs::read_link(&path), number) else { continue };
            let target = target.to_string_lossy();
            if target.starts_with("/memfd:") {
                let file = OpenOptions::new().read(true).write(true).open(&path)?;
                memories.push((file.metadata()?.len(), file));
            } else if target == "anon_inode:[eventfd]" {
                event_fds.push(rustix::process::pidfd_getfd(
                    &pidfd,
                    number,
                    PidfdGetfdFlags::empty(),
                )?);
            } else if target.starts_with("socket:") {
                let fd = rustix::process::pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty())?;
                if is_connected_to(&fd, config) {
                    connection = Some(fd);
                }
            }
        }
        memories.sort_by_key(|(bytes, _)| *bytes);
        let (_, data) = memories.pop().ok_or_else(missing)?;
        let (_, control) = memories.pop().ok_or_else(missing)?;
        Ok(Self { connection: connection.ok_or_else(missing)?, event_fds, control, data })
    }
}

fn is_connected_to(fd: &OwnedFd, config: &AttackerConfig) -> bool {
    let peer = rustix::net::getpeername(fd).ok().flatten();
    let unix = peer.and_then(|peer| rustix::net::SocketAddrUnix::try_from(peer).ok());
    let path = unix.as_ref().and_then(rustix::net::SocketAddrUnix::path);
    path.is_some_and(|path| path.to_bytes() == config.socket.as_os_str().as_encoded_bytes())
}

/// Socket of the kernel whose last close blocks until its peer closes.
struct LingeringSocket {
    near: OwnedFd,
    far: OwnedFd,
}

impl LingeringSocket {
    fn new() -> io::Result<Self> {
        // System calls of `rustix` do not pass through the preload library.
        let socket = || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
        };
        let (listener, near) = (socket()?, socket()?);
        rustix::net::bind(&listener, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
        rustix::net::listen(&listener, 1)?;
        let address = rustix::net::getsockname(&listener)?;
        rustix::net::connect(&near, &address)?;
        let far = rustix::net::accept(&listener)?;
        let bytes = vec![0; 1 << 20];
        while rustix::net::send(&near, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(600)))?;
        Ok(Self { near, far })
    }

    /// Closes both ends in the background, the far end after a time.
    fn close_later(self) {
        let Self { near, far } = self;
        thread::spawn(move || {
            thread::sleep(LINGER_TIME);
            drop(far);
        });
        // Blocks if the daemon has closed its copy.
        thread::spawn(move || drop(near));
    }
}

/// Sends a byte with a descriptor.
fn send_along(to: impl AsFd, fd: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    let fds = [fd];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(to, &[io::IoSlice::new(&[0])], &mut control, flags)?;
    Ok(())
}
