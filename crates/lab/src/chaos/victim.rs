//! What a child process does until it is killed.

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

use super::site::{noise_at, own, streams_at};
use crate::LabError;

/// What an application does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Attaches and leaves, again and again.
    Attaching,
    /// Binds sockets, uses and closes them.
    Binding,
    /// Listens; connections with data in them wait, and nobody takes them.
    Listening,
    /// Listens, and takes every connection.
    Accepting,
    /// Has connections with data both ways, as much as they hold.
    Connected,
    /// Sends datagrams that come back, and reads some of them.
    Datagrams,
    /// Connects, writes and closes at once.
    Closing,
    /// Has sockets of every kind, and sleeps.
    Idle,
    /// Keeps its command ring full.
    Flooding,
    /// Writes nonsense over all that it shares with the daemon.
    Scribbling,
    /// Asks for data and never reads it.
    Deaf,
    /// Calls the kernel as one that floods does, and leaves the daemon alone.
    Churning,
    /// Comes and goes as one that scribbles, and writes to memory of its own.
    Passing,
    /// Asks for data as one that is deaf, and reads it.
    Hearing,
}

impl State {
    /// What one that is killed does before.
    pub(super) const VICTIMS: [Self; 8] = [
        Self::Attaching,
        Self::Binding,
        Self::Listening,
        Self::Accepting,
        Self::Connected,
        Self::Datagrams,
        Self::Closing,
        Self::Idle,
    ];

    /// Every state.
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
        Self::Scribbling,
        Self::Deaf,
        Self::Churning,
        Self::Passing,
        Self::Hearing,
    ];

    /// The name in rows and on the command line.
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
            Self::Scribbling => "scribbling",
            Self::Deaf => "deaf",
            Self::Churning => "churning",
            Self::Passing => "passing",
            Self::Hearing => "hearing",
        }
    }
}

/// What the child is told.
#[derive(Clone, Debug)]
pub struct VictimConfig {
    /// What it does.
    pub state: State,
    /// The Unix socket of the daemon.
    pub socket: PathBuf,
    /// The port that it listens on.
    pub port: u16,
    /// The same seed does the same.
    pub seed: u64,
}

/// Sockets that a victim has at once.
const SOCKETS: usize = 8;

/// How long to wait between two tries: the one before may not be buried yet.
const AGAIN: Duration = Duration::from_millis(1);

/// How long one that never reads and one that does wait between two questions.
const PACE: Duration = Duration::from_micros(500);

/// Does what it is told until it is killed, or the daemon or who started it ends.
///
/// # Errors
/// When there is no daemon any more.
pub fn victim(config: &VictimConfig) -> Result<(), LabError> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(LabError::io("a victim would outlive who kills it"))?;
    let mut victim = Victim {
        path: &config.socket,
        // Both families, by the seed.
        family: (config.seed % 2) as usize,
        port: config.port,
        chance: fastrand::Rng::with_seed(config.seed),
        has_begun: false,
    };
    loop {
        let ended = victim.live(config.state);
        if !config.socket.exists() {
            return ended.map_err(LabError::io("the daemon is gone"));
        }
        thread::sleep(AGAIN);
    }
}

struct Victim<'c> {
    path: &'c Path,
    family: usize,
    port: u16,
    chance: fastrand::Rng,
    has_begun: bool,
}

impl Victim<'_> {
    /// Tells who started us that we do what we are to do.
    fn begin(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.has_begun, true) {
            let mut out = io::stdout().lock();
            writeln!(out, "begun")?;
            out.flush()?;
        }
        Ok(())
    }

    fn attach(&self) -> io::Result<Net> {
        Net::attach(self.path, "victim")
    }

    fn own(&self, port: u16) -> SocketAddr {
        SocketAddr::new(own(self.family), port)
    }

    fn live(&mut self, state: State) -> io::Result<()> {
        match state {
            State::Attaching => loop {
                self.begin()?;
                drop(self.attach()?);
            },
            State::Binding => self.bind(),
            State::Listening | State::Accepting => self.listen(state == State::Accepting),
            State::Connected => self.fill_connections(),
            State::Datagrams => self.send_datagrams(),
            State::Closing => self.close(),
            State::Idle => {
                let net = self.attach()?;
                let _listener = TcpListener::bind(&net, self.own(self.port))?;
                let _socket = UdpSocket::bind(&net, self.own(self.port))?;
                let _stream = TcpStream::connect(&net, streams_at(self.family))?;
                self.begin()?;
                loop {
                    thread::park();
                }
            }
            State::Flooding => {
                let mut attachment = Attachment::connect(self.path, "bad")?;
                self.begin()?;
                loop {
                    attachment.nudge()?;
                }
            }
            State::Churning => {
                let (mut one, mut other) = UnixStream::pair()?;
                self.begin()?;
                loop {
                    one.write_all(&[0])?;
                    thread::yield_now();
                    other.read_exact(&mut [0])?;
                }
            }
            State::Scribbling | State::Passing => self.scribble(state == State::Scribbling),
            State::Deaf | State::Hearing => self.ask(state == State::Hearing),
        }
    }

    fn bind(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        self.begin()?;
        loop {
            let mut sockets = Vec::new();
            for _ in 0..self.chance.usize(1..=SOCKETS) {
                let socket = UdpSocket::bind(&net, self.own(0))?;
                socket.send_to(b"who binds", noise_at(self.family))?;
                sockets.push(socket);
            }
        }
    }

    fn listen(&mut self, accepts: bool) -> io::Result<()> {
        let net = self.attach()?;
        let listener = TcpListener::bind(&net, self.own(self.port))?;
        self.begin()?;
        let mut streams = std::collections::VecDeque::new();
        loop {
            if !accepts {
                thread::park();
                continue;
            }
            let (mut stream, _) = listener.accept()?;
            // Its client may be gone already.
            let _ = stream.write(&[7; 100]);
            streams.push_back(stream);
            if streams.len() > SOCKETS {
                streams.pop_front();
            }
        }
    }

    fn fill_connections(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        let connect = |_| {
            let stream = TcpStream::connect(&net, streams_at(self.family))?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        let mut streams: Vec<TcpStream> = (0..SOCKETS).map(connect).collect::<io::Result<_>>()?;
        self.begin()?;
        let mut piece = vec![7; 16 << 10];
        loop {
            let mut did = false;
            for stream in &mut streams {
                // Full or empty: another one is not.
                did |= stream.write(&piece).is_ok();
                did |= self.chance.bool() && stream.read(&mut piece).is_ok();
            }
            if !did {
                thread::sleep(AGAIN);
            }
        }
    }

    fn send_datagrams(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        let socket = UdpSocket::bind(&net, self.own(0))?;
        socket.set_nonblocking(true)?;
        self.begin()?;
        let mut bytes = [0; 1400];
        loop {
            for _ in 0..SOCKETS {
                let len = self.chance.usize(..bytes.len());
                // Full: that is what is to be killed.
                let _ = socket.send_to(&bytes[..len], noise_at(self.family));
            }
            if self.chance.bool() {
                let _ = socket.recv_from(&mut bytes);
            }
            thread::sleep(AGAIN);
        }
    }

    fn close(&mut self) -> io::Result<()> {
        let net = self.attach()?;
        self.begin()?;
        loop {
            let mut stream = TcpStream::connect(&net, streams_at(self.family))?;
            let len = self.chance.usize(1..64 << 10);
            stream.write_all(&vec![7; len])?;
        }
    }

    /// Writes to the memory that is shared, or to as much of its own, by its descriptor,
    /// as any program can, and leaves.
    fn scribble(&mut self, shares: bool) -> io::Result<()> {
        let mut attachment = Attachment::connect(self.path, "bad")?;
        attachment.bind_udp(self.own(0), Default::default())?;
        let shared = shared_memory()?;
        let written = if shares { shared } else { own_memory(&shared)? };
        self.begin()?;
        for file in written {
            // The first pages are those with rings and sockets in them.
            let bytes = file.metadata()?.len().min(1 << 17);
            for _ in 0..64 {
                let at = self.chance.u64(..bytes / 8) * 8;
                file.write_at(&self.chance.u64(..).to_ne_bytes(), at)?;
            }
        }
        attachment.nudge()
    }

    /// Sends datagrams that come back, and reads them or not.
    fn ask(&mut self, reads: bool) -> io::Result<()> {
        let net = self.attach()?;
        let socket = UdpSocket::bind(&net, self.own(0))?;
        socket.set_nonblocking(true)?;
        self.begin()?;
        let mut bytes = [0; 1400];
        loop {
            for _ in 0..SOCKETS {
                let _ = socket.send_to(&bytes, noise_at(self.family));
            }
            while reads && socket.recv_from(&mut bytes).is_ok() {}
            thread::sleep(PACE);
        }
    }
}

/// As much memory that is shared with nobody.
fn own_memory(shared: &[File]) -> io::Result<Vec<File>> {
    let own = |file: &File| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let own = File::from(rustix::fs::memfd_create("own", flags)?);
        own.set_len(file.metadata()?.len())?;
        Ok(own)
    };
    shared.iter().map(own).collect()
}

/// The memory that this process shares with the daemon, open for writing.
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
