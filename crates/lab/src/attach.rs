//! `tidegate lab attach`: what it costs to hand 64 bytes to another process: from
//! an application to the network core and back, by a ring alone, and by what the
//! kernel has for it.
//!
//! The network core is a thread of the daemon's, with an engine that has nothing
//! else to do. The other process is this program again: it gets the memory or the socket as
//! its standard input, and sends back what asks for that.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde_json::json;
use tidegate::NetConfig;
use tidegate_gate::{self as gate, Mode};
use tidegate_memory::shared::{Part, Receiver, Region, Sender, words_for};
use tidegate_port::mem::{self, MemConfig};
use tidegate_service::Geometry;
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{DEFAULT_COALESCING, Daemon, DoorConfig, Quota};

use crate::livelock::subject::this_program;
use crate::sys::Uring;
use crate::{Experiment, LabError, cpu};

/// A message: 64 bytes, of which the first word says what it is.
const WORDS: usize = 8;
const BYTES: usize = WORDS * 8;
type Message = [u64; WORDS];

/// It is to be sent back.
const PING: u64 = 1;
/// It is one of many.
const DATA: u64 = 2;
/// It is the last: it is to be sent back with the number of those before it.
const END: u64 = 3;

/// Messages that a ring holds.
const CAPACITY: usize = 1024;
const RING_WORDS: usize = words_for(CAPACITY, WORDS);
/// Messages that are made visible together when there are many.
const BATCH: u64 = 64;

/// A side that says nothing for so long is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often to look at the clock while nothing comes.
const LOOKS: u32 = 1 << 20;

/// What the messages go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The rings of the daemon: commands there, notices back.
    Daemon,
    /// Two rings in shared memory. Both sides look again and again.
    Ring,
    /// A pair of Unix stream sockets.
    Unix,
    /// The same, by `io_uring`.
    Uring,
    /// Two pipes.
    Pipe,
    /// A TCP connection over the kernel's loopback.
    Loopback,
}

impl Way {
    /// Every way.
    pub const ALL: [Self; 6] =
        [Self::Daemon, Self::Ring, Self::Unix, Self::Uring, Self::Pipe, Self::Loopback];

    /// The name in rows and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "network-core",
            Self::Ring => "ring",
            Self::Unix => "unix-socket",
            Self::Uring => "unix-socket-io-uring",
            Self::Pipe => "pipe",
            Self::Loopback => "loopback-tcp",
        }
    }
}

/// How to run the experiment.
#[derive(Clone, Copy, Debug)]
pub struct AttachConfig {
    /// Messages that go there and back, one at a time.
    pub round_trips: u64,
    /// Messages that go one way.
    pub messages: u64,
    /// How often to measure; the median counts.
    pub repeats: usize,
}

impl Default for AttachConfig {
    fn default() -> Self {
        Self { round_trips: 200_000, messages: 5_000_000, repeats: 5 }
    }
}

/// Messages one way through the kernel cost a call each: fewer say as much.
const FEWER: u64 = 10;

/// One end of a way.
trait Channel {
    fn send(&mut self, message: &Message) -> io::Result<()>;
    /// Lets the other side see what was sent.
    fn flush(&mut self);
    fn receive(&mut self) -> io::Result<Message>;
}

struct Rings {
    out: Sender<Part, WORDS>,
    inward: Receiver<Part, WORDS>,
}

impl Rings {
    /// The end of the process that made the region, or of the other one.
    fn new(region: &Arc<Region>, is_peer: bool) -> io::Result<Self> {
        let part = |second: bool| {
            let start = if second { RING_WORDS } else { 0 };
            let part = Part::new(region, start..start + RING_WORDS);
            part.ok_or_else(|| io::Error::other("the shared memory is too small"))
        };
        let ends =
            (Sender::new(part(is_peer)?, CAPACITY), Receiver::new(part(!is_peer)?, CAPACITY));
        Ok(Self {
            out: ends.0.map_err(io::Error::other)?,
            inward: ends.1.map_err(io::Error::other)?,
        })
    }
}

impl Channel for Rings {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        look_until(|| {
            let sent = self.out.push(message).map_err(io::Error::other)?;
            if !sent {
                self.out.publish();
            }
            Ok(sent.then_some(()))
        })
    }

    fn flush(&mut self) {
        self.out.publish();
    }

    fn receive(&mut self) -> io::Result<Message> {
        look_until(|| {
            let message = self.inward.pop().map_err(io::Error::other)?;
            if message.is_none() {
                self.inward.release();
            }
            Ok(message)
        })
    }
}

/// Looks again and again until there is something, and not for ever.
#[inline]
fn look_until<R>(mut look: impl FnMut() -> io::Result<Option<R>>) -> io::Result<R> {
    let mut since = None;
    loop {
        for _ in 0..LOOKS {
            if let Some(found) = look()? {
                return Ok(found);
            }
            std::hint::spin_loop();
        }
        if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// An application of a daemon that runs on a core of its own.
struct Attached {
    attachment: Attachment,
    /// What is to come back.
    awaited: Message,
    /// Commands before the messages that are counted.
    before: u64,
}

/// Starts a daemon on a core, with nobody at the other end of its wire, and
/// attaches to it.
fn attach(folder: &Path, core: usize) -> io::Result<(Daemon, Attached)> {
    let (port, _) = mem::wire(&MemConfig::default())?;
    let gate = gate::Config { mode: Mode::Dedicated, ..gate::Config::default() };
    let gate = gate::Settings::new(gate).map_err(io::Error::other)?;
    let own = "192.0.2.1/24".parse().map_err(io::Error::other)?;
    let door = DoorConfig {
        path: folder.join("daemon.sock"),
        mode: 0o600,
        group: None,
        geometry: Geometry { sockets: 1, tcp_bytes: 1 << 16, udp_bytes: 1 << 18 },
        coalescing: DEFAULT_COALESCING,
        quota: Quota::default(),
    };
    let path = door.path.clone();
    let begin = move || cpu::pin_this_thread(core).map_err(io::Error::other);
    let net = NetConfig::new(port).address(own).gate(gate);
    let daemon = Daemon::start(net, door, begin, Arc::new(|_: &str| {}));
    let daemon = daemon.map_err(io::Error::other)?;
    let mut attachment = Attachment::connect(&path, "lab")?;
    let before = attachment.ping()?;
    Ok((daemon, Attached { attachment, awaited: [0; WORDS], before }))
}

impl Channel for Attached {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        match message[0] {
            DATA => return self.attachment.nudge(),
            PING => self.before += 1,
            _ => {}
        }
        self.awaited = *message;
        Ok(())
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> io::Result<Message> {
        let commands = self.attachment.ping()?;
        let mut message = self.awaited;
        if message[0] == END {
            // Itself is not counted.
            message[1] = commands - self.before - 1;
        }
        Ok(message)
    }
}

struct Calls<R, W> {
    from: R,
    to: W,
}

impl<R: Read, W: Write> Channel for Calls<R, W> {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        let mut bytes = [0; BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(message) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        self.to.write_all(&bytes)
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> io::Result<Message> {
        let mut bytes = [0; BYTES];
        self.from.read_exact(&mut bytes)?;
        Ok(message_of(&bytes))
    }
}

/// A stream by `io_uring`: what is sent goes to the kernel with what is waited for,
/// or when there is a batch.
struct ByUring {
    uring: Uring,
    unsent: Vec<u8>,
}

impl ByUring {
    fn new(stream: OwnedFd) -> io::Result<Self> {
        let uring = Uring::new(stream, 2 * BATCH as u32)?;
        Ok(Self { uring, unsent: Vec::new() })
    }

    fn hand_over(&mut self, into: &mut [u8]) -> io::Result<()> {
        let unsent = std::mem::take(&mut self.unsent);
        self.uring.exchange(&unsent, BYTES, into)
    }
}

impl Channel for ByUring {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        self.unsent.extend(message.iter().flat_map(|word| word.to_ne_bytes()));
        if self.unsent.len() < BATCH as usize * BYTES { Ok(()) } else { self.hand_over(&mut []) }
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> io::Result<Message> {
        let mut bytes = [0; BYTES];
        self.hand_over(&mut bytes)?;
        Ok(message_of(&bytes))
    }
}

impl Drop for ByUring {
    fn drop(&mut self) {
        // The other side may have ended.
        let _ = self.hand_over(&mut []);
    }
}

fn message_of(bytes: &[u8; BYTES]) -> Message {
    let mut message = [0; WORDS];
    for (word, from) in message.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = from.try_into().map_or(0, u64::from_ne_bytes);
    }
    message
}

/// The other process: answers on its standard input, and output for pipes,
/// until the last message.
///
/// # Errors
/// When it was not started by [`run`], or that ended early.
pub fn peer(way: Way, core: usize) -> Result<(), LabError> {
    cpu::pin_this_thread(core)?;
    let failed = |source| LabError::Io { what: "the peer failed".into(), source };
    let input = || io::stdin().as_fd().try_clone_to_owned();
    let answered = match way {
        Way::Daemon => Err(io::Error::other("the network core is no process of its own")),
        Way::Ring => input()
            .and_then(|fd| Region::open(fd, 2 * RING_WORDS))
            .and_then(|region| answer(&mut Rings::new(&Arc::new(region), true)?)),
        Way::Pipe => {
            let output = || io::stdout().as_fd().try_clone_to_owned();
            input().and_then(|from| {
                answer(&mut Calls { from: File::from(from), to: File::from(output()?) })
            })
        }
        Way::Uring => input().and_then(|fd| answer(&mut ByUring::new(fd)?)),
        Way::Unix | Way::Loopback => input().and_then(|fd| {
            let from = File::from(fd);
            let to = from.try_clone()?;
            answer(&mut Calls { from, to })
        }),
    };
    answered.map_err(failed)
}

fn answer(channel: &mut impl Channel) -> io::Result<()> {
    let mut count = 0;
    loop {
        let mut message = channel.receive()?;
        match message[0] {
            PING => {
                channel.send(&message)?;
                channel.flush();
            }
            DATA => count += 1,
            END => {
                message[1] = count;
                channel.send(&message)?;
                channel.flush();
                return Ok(());
            }
            other => return Err(io::Error::other(format!("a message of kind {other}"))),
        }
    }
}

/// Ended and waited for, whatever happens.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(way: Way, core: usize, input: Stdio, output: Stdio) -> Result<Peer, LabError> {
    let mut command = Command::new(this_program()?);
    command.args(["lab", "attach", "--as-peer", way.name(), "--cpu", &core.to_string()]);
    let child = command.stdin(input).stdout(output).spawn();
    Ok(Peer(child.map_err(LabError::io("cannot start the peer"))?))
}

/// What was measured once.
struct Measured {
    round_trips_ns: Histogram<u64>,
    messages_per_s: f64,
}

fn measure(config: &AttachConfig, way: Way, peer_core: usize) -> Result<Measured, LabError> {
    let failed = |source| LabError::Io { what: format!("{} failed", way.name()), source };
    let from_fd = |fd: OwnedFd| Stdio::from(fd);
    match way {
        Way::Daemon => {
            let folder = tempfile::tempdir().map_err(failed)?;
            let (_daemon, mut attached) = attach(folder.path(), peer_core).map_err(failed)?;
            exchange(config, way, &mut attached).map_err(failed)
        }
        Way::Ring => {
            let region = Arc::new(Region::create(2 * RING_WORDS).map_err(failed)?);
            let theirs = region.as_fd().try_clone_to_owned().map_err(failed)?;
            let mut rings = Rings::new(&region, false).map_err(failed)?;
            let _peer = start(way, peer_core, from_fd(theirs), Stdio::null())?;
            exchange(config, way, &mut rings).map_err(failed)
        }
        Way::Pipe => {
            let mut peer = start(way, peer_core, Stdio::piped(), Stdio::piped())?;
            let (to, from) = (peer.0.stdin.take(), peer.0.stdout.take());
            let missing = || failed(io::Error::other("the peer has no pipes"));
            let (to, from) = (to.ok_or_else(missing)?, from.ok_or_else(missing)?);
            exchange(config, way, &mut Calls { from, to }).map_err(failed)
        }
        Way::Unix => {
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let _peer = start(way, peer_core, from_fd(theirs.into()), Stdio::null())?;
            exchange(config, way, &mut Calls { from: &ours, to: &ours }).map_err(failed)
        }
        Way::Uring => {
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let _peer = start(way, peer_core, from_fd(theirs.into()), Stdio::null())?;
            let mut stream = ByUring::new(ours.into()).map_err(failed)?;
            exchange(config, way, &mut stream).map_err(failed)
        }
        Way::Loopback => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
            let ours = listener.local_addr().and_then(TcpStream::connect).map_err(failed)?;
            let (theirs, _) = listener.accept().map_err(failed)?;
            [&ours, &theirs].iter().try_for_each(|end| end.set_nodelay(true)).map_err(failed)?;
            let _peer = start(way, peer_core, from_fd(theirs.into()), Stdio::null())?;
            exchange(config, way, &mut Calls { from: &ours, to: &ours }).map_err(failed)
        }
    }
}

/// Messages there and back one at a time, then many one way.
fn exchange(config: &AttachConfig, way: Way, channel: &mut impl Channel) -> io::Result<Measured> {
    let mut round_trips_ns =
        Histogram::new_with_bounds(1, PATIENCE.as_nanos() as u64, 3).map_err(io::Error::other)?;
    // The first waits for the peer to start, and some more for it to warm up.
    let warm_up = 1 + config.round_trips / 20;
    for n in 0..warm_up + config.round_trips {
        let sent = Instant::now();
        channel.send(&[PING, n, 0, 0, 0, 0, 0, n])?;
        channel.flush();
        let came = channel.receive()?;
        if came != [PING, n, 0, 0, 0, 0, 0, n] {
            return Err(io::Error::other("something else came back"));
        }
        if n >= warm_up {
            round_trips_ns.saturating_record(sent.elapsed().as_nanos() as u64);
        }
    }
    let messages = if matches!(way, Way::Ring | Way::Daemon) {
        config.messages
    } else {
        config.messages / FEWER
    };
    let began = Instant::now();
    for n in 0..messages {
        channel.send(&[DATA, n, 0, 0, 0, 0, 0, n])?;
        if n % BATCH == BATCH - 1 {
            channel.flush();
        }
    }
    channel.send(&[END; WORDS])?;
    channel.flush();
    let counted = channel.receive()?[1];
    let took: Duration = began.elapsed();
    if counted != messages {
        return Err(io::Error::other(format!("{counted} of {messages} messages came")));
    }
    Ok(Measured { round_trips_ns, messages_per_s: messages as f64 / took.as_secs_f64() })
}

/// Measures every way, in turn.
///
/// # Errors
/// When there are not two cores, or a process cannot be started.
pub fn run(config: &AttachConfig) -> Result<Experiment, LabError> {
    if cpu::cores() < 2 {
        return Err(LabError::Config("this experiment needs two cores".to_owned()));
    }
    let (core, peer_core) = (0, 1);
    // Of this thread alone: others keep their cores.
    let measured = std::thread::scope(|scope| {
        let measuring = scope.spawn(|| {
            cpu::pin_this_thread(core)?;
            let mut all: Vec<(Way, Vec<Measured>)> =
                Way::ALL.into_iter().map(|way| (way, Vec::new())).collect();
            for repeat in 1..=config.repeats {
                for (way, runs) in &mut all {
                    let run = measure(config, *way, peer_core)?;
                    eprintln!(
                        "{repeat} {:<12} there and back {} ns, {:.0} messages/s one way",
                        way.name(),
                        run.round_trips_ns.value_at_quantile(0.5),
                        run.messages_per_s
                    );
                    runs.push(run);
                }
            }
            Ok::<_, LabError>(all)
        });
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(report(&measured))
}

fn report(measured: &[(Way, Vec<Measured>)]) -> Experiment {
    let mut result = Experiment::new("attach");
    for (way, runs) in measured {
        let median = |of: &dyn Fn(&Measured) -> f64| {
            crate::dns::sweep::median(&runs.iter().map(of).collect::<Vec<_>>())
        };
        let quantile = |q| median(&|run| run.round_trips_ns.value_at_quantile(q) as f64);
        let messages_per_s = median(&|run| run.messages_per_s).round();
        if *way == Way::Daemon {
            result.figure("ping_pong_p50_ns", quantile(0.5));
            result.figure("messages_per_s", messages_per_s);
        }
        result.rows.push(json!({
            "way": way.name(),
            "p50_ns": quantile(0.5),
            "p99_ns": quantile(0.99),
            "messages_per_s": messages_per_s,
        }));
    }
    result.columns = vec!["way", "p50_ns", "p99_ns", "messages_per_s"];
    result.note(
        "64 bytes from a process on core 0 to one on core 1 and back; one way as fast as they go; \
         the network core is an engine with its applications, the ring a ring alone; both sides \
         of these look again and again, the others sleep in the kernel, with a call for \
         each message, which io_uring hands over together; medians",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was sent comes back, and those that are only counted are.
    #[test]
    fn rings_carry_messages_both_ways() {
        let region = Arc::new(Region::create(2 * RING_WORDS).unwrap());
        let mut ours = Rings::new(&region, false).unwrap();
        let mut theirs = Rings::new(&region, true).unwrap();
        let config = AttachConfig { round_trips: 100, messages: 10_000, repeats: 1 };
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || answer(&mut theirs));
            let measured = exchange(&config, Way::Ring, &mut ours).unwrap();
            answering.join().unwrap().unwrap();
            assert_eq!(measured.round_trips_ns.len(), 100);
            assert!(measured.messages_per_s > 0.0);
        });
    }

    #[test]
    fn a_ring_of_the_kernel_s_carries_messages_both_ways() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let config = AttachConfig { round_trips: 100, messages: 10_010, repeats: 1 };
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || answer(&mut ByUring::new(theirs.into()).unwrap()));
            let mut ours = ByUring::new(ours.into()).unwrap();
            let measured = exchange(&config, Way::Uring, &mut ours).unwrap();
            answering.join().unwrap().unwrap();
            assert_eq!(measured.round_trips_ns.len(), 100);
            // The other side is gone.
            assert_eq!(ours.receive().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        });
    }

    #[test]
    fn nonsense_ends_the_peer() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[9; BYTES]).unwrap();
        let error = answer(&mut Calls { from: &theirs, to: &theirs }).unwrap_err();
        assert!(error.to_string().contains("kind"), "{error}");
    }

    #[test]
    fn figures_are_those_of_the_network_core() {
        let run = |ns, messages_per_s| {
            let mut round_trips_ns = Histogram::new_with_bounds(1, 1_000_000, 3).unwrap();
            round_trips_ns.record(ns).unwrap();
            Measured { round_trips_ns, messages_per_s }
        };
        let core = vec![run(300, 5.0), run(900, 9.0), run(200, 7.0)];
        let result = report(&[(Way::Daemon, core), (Way::Pipe, vec![run(7_000, 1.0)])]);
        assert_eq!(result.figures["ping_pong_p50_ns"], 300.0);
        assert_eq!(result.figures["messages_per_s"], 7.0);
        assert_eq!(result.rows[1]["p50_ns"].as_f64().map(f64::round), Some(7_003.0));
    }
}
