//! Behaviour of a child process until it is killed.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use tidegate::{Net, TcpListener, TcpStream, UdpSocket};
use tidegate_service::attachment::Attachment;

use super::testbed::{daemon_address, stream_server, unchecked_server};
use crate::LabError;

/// Behaviour of an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Attaches and detaches repeatedly.
    Attaching,
    /// Binds sockets, uses them and closes them, repeatedly.
    Binding,
    /// Listens and never accepts: connections with data stay in the backlog.
    Listening,
    /// Listens and accepts every connection.
    Accepting,
    /// Holds connections with full buffers in both directions.
    Connected,
    /// Sends datagrams that are echoed, and reads some of the echoes.
    Datagrams,
    /// Connects, writes and closes at once, repeatedly.
    Closing,
    /// Holds sockets of every kind and sleeps.
    Idle,
    /// Keeps its command ring full.
    Flooding,
    /// Overwrites the memory that it shares with the daemon with random data.
    CorruptingSharedMemory,
    /// Requests data and never reads it.
    NotReading,
    /// Reference for flooding: makes as many system calls, but does not use the daemon.
    MakingSystemCalls,
    /// Reference for scribbling: attaches and leaves as often, but writes to private memory.
    WritingPrivateMemory,
    /// Reference for deaf: requests data and reads it.
    Reading,
}

impl Behaviour {
    /// Behaviours of applications that are killed.
    pub(super) const KILLED: [Self; 8] = [
        Self::Attaching,
        Self::Binding,
        Self::Listening,
        Self::Accepting,
        Self::Connected,
        Self::Datagrams,
        Self::Closing,
        Self::Idle,
    ];

    /// Every behaviour.
    pub const ALL: [Self; 14] = [
        Self::Attaching,
        Self::Binding,
        Self::Listening,
        Self::Accepting,
        Self::Connected,
        Self::Datagrams,
        Self::Closing,
        Self::Idle,
        Self::Flooding,
        Self::CorruptingSharedMemory,
        Self::NotReading,
        Self::MakingSystemCalls,
        Self::WritingPrivateMemory,
        Self::Reading,
    ];

    /// Name in rows and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attaching => "attaching",
            Self::Binding => "binding",
            Self::Listening => "listening",
            Self::Accepting => "accepting",
            Self::Connected => "connected",
            Self::Datagrams => "datagrams",
            Self::Closing => "closing",
            Self::Idle => "idle",
            Self::Flooding => "flooding",
            Self::CorruptingSharedMemory => "scribbling",
            Self::NotReading => "deaf",
            Self::MakingSystemCalls => "churning",
            Self::WritingPrivateMemory => "passing",
            Self::Reading => "hearing",
        }
    }
}

/// Configuration of the child process.
#[derive(Clone, Debug)]
pub struct TargetConfig {
    /// Behaviour of the process.
    pub behaviour: Behaviour,
    /// Path of the daemon's Unix socket.
    pub socket: PathBuf,
    /// Port that the process listens on.
    pub port: u16,
    /// Seed: the same seed gives the same actions.
    pub seed: u64,
}

/// Maximum number of sockets that a target holds at the same time.
const MAX_SOCKETS: usize = 8;

/// Time between two attempts: the daemon may not have released the previous application yet.
const RETRY_DELAY: Duration = Duration::from_millis(1);

/// Time between two batches of requests, for the behaviours that read the echoes or ignore them.
const SEND_INTERVAL: Duration = Duration::from_micros(500);

/// Runs the configured behaviour until the process is killed, or until the daemon or the parent
/// process ends.
///
/// # Errors
/// If the daemon's socket no longer exists.
pub fn run_target(config: &TargetConfig) -> Result<(), LabError> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(LabError::io("cannot bind the target's lifetime to its parent process"))?;
    let mut target = Target {
        path: &config.socket,
        // The seed selects IPv4 or IPv6.
        family: (config.seed % 2) as usize,
        port: config.port,
        rng: fastrand::Rng::with_seed(config.seed),
        has_reported: false,
    };
    loop {
        let result = target.act(config.behaviour);
        if !config.socket.exists() {
            return result.map_err(LabError::io("the daemon is gone"));
        }
        thread::sleep(RETRY_DELAY);
    }
}

struct Target<'c> {
    path: &'c Path,
    family: usize,
    port: u16,
    rng: fastrand::Rng,
    has_reported: bool,
}

impl Target<'_> {
    /// Reports to the parent process, once, that the behaviour has started.
    fn report_started(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.has_reported, true) {
            let mut out = io::stdout().lock();
            writeln!(out, "begun")?;
            out.flush()?;
        }
        Ok(())
    }

    fn attach(&self) -> io::Result<Net> {
        Net::attach(self.path, "victim")
    }

    fn local_address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(daemon_address(self.family), port)
    }

    fn act(&mut self, behaviour: Behaviour) -> io::Result<()> {
        match behaviour {
            Behaviour::Attaching => loop {
                self.report_started()?;
                drop(self.attach()?);
            },
            Behaviour::Binding => self.bind_sockets(),
            Behaviour::Listening | Behaviour::Accepting => {
                self.listen(behaviour == Behaviour::Accepting)
            }
            Behaviour::Connected => self.fill_connections(),
            Behaviour::Datagrams => self.send_datagrams(),
            Behaviour::Closing => self.connect_and_close(),
            Behaviour::Idle => {
                let net = self.attach()?;
                let _listener = TcpListener::bind(&net, self.local_address(self.port))?;
                let _socket = UdpSocket::bind(&net, self.local_address(self.port))?;
                let _stream = TcpStream::connect(&net, stream_server(self.family))?;
                self.report_started()?;
                loop {
                    thread::park();
                }
            }
            Behaviour::Flooding => {
                let mut attachment = Attachment::connect(self.path, "bad")?;
                self.report_started()?;
                loop {
                    attachment.send_no_op()?;
                }
            }
            Behaviour::MakingSystemCalls => {
                let (mut one, mut other) = UnixStream::pair()?;
                self.report_started()?;
                loop {
                    one.write_all(&[0])?;
                    thread::yield_now();
                    other.read_exact(&mut [0])?;
                }
            }
            Behaviour::CorruptingSharedMemory | Behaviour::WritingPrivateMemory => {
                self.write_random_words(behaviour == Behaviour::CorruptingSharedMemory)
            }
            Behaviour::NotReading | Behaviour::Reading => {
                self.send_and_read(behaviour == Behaviour::Reading)
            }
        }
    }

    fn bind_sockets(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        self.report_started()?;
        loop {
            let mut sockets = Vec::new();
            for _ in 0..self.rng.usize(1..=MAX_SOCKETS) {
                let socket = UdpSocket::bind(&net, self.local_address(0))?;
                socket.send_to(b"who binds", unchecked_server(self.family))?;
                sockets.push(socket);
            }
        }
    }

    fn listen(&mut self, accepts: bool) -> io::Result<()> {
        let net = self.attach()?;
        let listener = TcpListener::bind(&net, self.local_address(self.port))?;
        self.report_started()?;
        let mut streams = std::collections::VecDeque::new();
        loop {
            if !accepts {
                thread::park();
                continue;
            }
            let (mut stream, _) = listener.accept()?;
            // The client may have closed the connection already.
            let _ = stream.write(&[7; 100]);
            streams.push_back(stream);
            if streams.len() > MAX_SOCKETS {
                streams.pop_front();
            }
        }
    }

    fn fill_connections(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        let connect = |_| {
            let stream = TcpStream::connect(&net, stream_server(self.family))?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        let mut streams: Vec<TcpStream> =
            (0..MAX_SOCKETS).map(connect).collect::<io::Result<_>>()?;
        self.report_started()?;
        let mut piece = vec![7; 16 << 10];
        loop {
            let mut made_progress = false;
            for stream in &mut streams {
                // An error is expected: this connection may be full or empty, others not.
                made_progress |= stream.write(&piece).is_ok();
                made_progress |= self.rng.bool() && stream.read(&mut piece).is_ok();
            }
            if !made_progress {
                thread::sleep(RETRY_DELAY);
            }
        }
    }

    fn send_datagrams(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        let socket = UdpSocket::bind(&net, self.local_address(0))?;
        socket.set_nonblocking(true)?;
        self.report_started()?;
        let mut bytes = [0; 1400];
        loop {
            for _ in 0..MAX_SOCKETS {
                let len = self.rng.usize(..bytes.len());
                // An error is expected: a full buffer is the state to be killed in.
                let _ = socket.send_to(&bytes[..len], unchecked_server(self.family));
            }
            if self.rng.bool() {
                let _ = socket.recv_from(&mut bytes);
            }
            thread::sleep(RETRY_DELAY);
        }
    }

    fn connect_and_close(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        self.report_started()?;
        loop {
            let mut stream = TcpStream::connect(&net, stream_server(self.family))?;
            let len = self.rng.usize(1..64 << 10);
            stream.write_all(&vec![7; len])?;
        }
    }

    /// Writes random words through the memory's file descriptor, as any process can, and leaves.
    /// The memory is shared with the daemon, or private memory of the same size.
    fn write_random_words(&mut self, to_shared: bool) -> io::Result<()> {
        let mut attachment = Attachment::connect(self.path, "bad")?;
        attachment.bind_udp(self.local_address(0), Default::default())?;
        let shared = shared_memory()?;
        let files = if to_shared { shared } else { private_memory(&shared)? };
        self.report_started()?;
        for file in files {
            // Rings and sockets are in the first pages.
            let bytes = file.metadata()?.len().min(1 << 17);
            for _ in 0..64 {
                let at = self.rng.u64(..bytes / 8) * 8;
                file.write_at(&self.rng.u64(..).to_ne_bytes(), at)?;
            }
        }
        attachment.send_no_op()
    }

    /// Sends datagrams that are echoed, and reads the echoes if `reads` is set.
    fn send_and_read(&mut self, reads: bool) -> io::Result<()> {
        let net = self.attach()?;
        let socket = UdpSocket::bind(&net, self.local_address(0))?;
        socket.set_nonblocking(true)?;
        self.report_started()?;
        let mut bytes = [0; 1400];
        loop {
            for _ in 0..MAX_SOCKETS {
                let _ = socket.send_to(&bytes, unchecked_server(self.family));
            }
            while reads && socket.recv_from(&mut bytes).is_ok() {}
            thread::sleep(SEND_INTERVAL);
        }
    }
}

/// Creates private memory files of the same sizes.
fn private_memory(shared: &[File]) -> io::Result<Vec<File>> {
    let make_private = |file: &File| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let private = File::from(rustix::fs::memfd_create("own", flags)?);
        private.set_len(file.metadata()?.len())?;
        Ok(private)
    };
    shared.iter().map(make_private).collect()
}

/// Opens for writing all memory that this process shares with the daemon.
fn shared_memory() -> io::Result<Vec<File>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        let is_shared = std::fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:tidegate-shared"));
        if is_shared {
            files.push(File::options().read(true).write(true).open(&path)?);
        }
    }
    Ok(files)
}
