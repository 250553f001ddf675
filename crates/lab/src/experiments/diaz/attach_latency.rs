//! `tidegate lab attach-latency`: latency and rate of passing 64-byte messages to another process.
//! Compares an application and the network core, a pair of bare rings, and the kernel's
//! mechanisms.
//!
//! The network core is a thread of the daemon whose engine has no other work. In the other cases
//! the peer process is this executable again: it gets the shared memory or the socket as its
//! standard input, and sends back each message that requests a reply.

mod spinning;

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
use tidegate_device::mem::{self, MemConfig};
use tidegate_gate::{self as gate, Mode};
use tidegate_memory::shared::{Receiver, Region, Sender, WordRange, ring_words};
use tidegate_service::Geometry;
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{AttachConfig, Daemon};

use self::spinning::Spinning;
use crate::Experiment;
use crate::LabError;
use crate::report::progress::Progress;
use crate::testbed::cpu;
use crate::testbed::programs;
use crate::testbed::sys::UringStream;
use crate::testbed::{ending, folder};

/// Message of 64 bytes; its first word is the message kind.
const MESSAGE_WORDS: usize = 8;
const MESSAGE_BYTES: usize = MESSAGE_WORDS * 8;
type Message = [u64; MESSAGE_WORDS];

/// Message kind: the peer sends the message back.
const PING: u64 = 1;
/// Message kind: the peer only counts the message.
const DATA: u64 = 2;
/// Message kind: last message; the peer replies with the number of [`DATA`] messages before it.
const END: u64 = 3;

/// Capacity of a ring in messages.
const RING_MESSAGES: usize = 1024;
const RING_WORDS: usize = ring_words(RING_MESSAGES, MESSAGE_WORDS);
/// Messages that are published together in the one-way measurement.
const BATCH_MESSAGES: u64 = 64;

/// Time without a message after which the peer counts as dead.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);
/// Polls of an empty or full ring between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 1 << 20;

/// Transport of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpcTransport {
    /// Rings of the daemon: commands to the network core, notifications back.
    Daemon,
    /// Two rings in shared memory; both sides busy-poll.
    Ring,
    /// Pair of connected Unix stream sockets.
    Unix,
    /// Pair of connected Unix stream sockets, used with `io_uring`.
    Uring,
    /// Two pipes.
    Pipe,
    /// TCP connection over the kernel's loopback device.
    Loopback,
    /// As [`IpcTransport::Unix`]; both sides busy-poll.
    UnixSpin,
    /// As [`IpcTransport::Pipe`]; both sides busy-poll.
    PipeSpin,
    /// As [`IpcTransport::Loopback`]; both sides busy-poll.
    LoopbackSpin,
}

impl IpcTransport {
    /// All transports, in the order of measurement.
    pub const ALL: [Self; 9] = [
        Self::Daemon,
        Self::Ring,
        Self::Unix,
        Self::Uring,
        Self::Pipe,
        Self::Loopback,
        Self::UnixSpin,
        Self::PipeSpin,
        Self::LoopbackSpin,
    ];

    /// Name in rows and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "network-core",
            Self::Ring => "ring",
            Self::Unix => "unix-socket",
            Self::Uring => "unix-socket-io-uring",
            Self::Pipe => "pipe",
            Self::Loopback => "loopback-tcp",
            Self::UnixSpin => "unix-socket-spin",
            Self::PipeSpin => "pipe-spin",
            Self::LoopbackSpin => "loopback-tcp-spin",
        }
    }

    /// True if both sides read from the kernel again and again instead of sleeping there.
    fn spins(self) -> bool {
        matches!(self, Self::UnixSpin | Self::PipeSpin | Self::LoopbackSpin)
    }

    fn is_of_kernel(self) -> bool {
        !matches!(self, Self::Daemon | Self::Ring)
    }
}

/// Configuration of the experiment.
#[derive(Clone, Copy, Debug)]
pub struct AttachLatencyConfig {
    /// Number of round trips to measure, one message at a time.
    pub round_trips: u64,
    /// Number of messages to send in one direction.
    pub messages: u64,
    /// Number of repetitions; the result is their median.
    pub repeats: usize,
}

impl Default for AttachLatencyConfig {
    fn default() -> Self {
        Self { round_trips: 200_000, messages: 5_000_000, repeats: 5 }
    }
}

impl AttachLatencyConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { round_trips: 20_000, messages: 500_000, repeats: 1 }
    }
}

/// Divisor of the number of one-way messages for the kernel's transports: each message costs a
/// system call there, and fewer messages give the same result.
const KERNEL_MESSAGES_DIVISOR: u64 = 10;

/// One end of a transport.
trait Channel {
    fn send(&mut self, message: &Message) -> io::Result<()>;
    /// Publishes the messages sent so far to the other side.
    fn flush(&mut self);
    fn receive(&mut self) -> io::Result<Message>;
}

struct RingChannel {
    tx: Sender<WordRange, MESSAGE_WORDS>,
    rx: Receiver<WordRange, MESSAGE_WORDS>,
}

impl RingChannel {
    /// Opens one end: of the peer process if `is_peer`, else of the process that created the
    /// region.
    fn new(region: &Arc<Region>, is_peer: bool) -> io::Result<Self> {
        let range = |second: bool| {
            let start = if second { RING_WORDS } else { 0 };
            let range = WordRange::new(region, start..start + RING_WORDS);
            range.ok_or_else(|| io::Error::other("the shared memory is too small"))
        };
        let ends = (
            Sender::new(range(is_peer)?, RING_MESSAGES),
            Receiver::new(range(!is_peer)?, RING_MESSAGES),
        );
        Ok(Self { tx: ends.0.map_err(io::Error::other)?, rx: ends.1.map_err(io::Error::other)? })
    }
}

impl Channel for RingChannel {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        busy_poll_until(|| {
            let sent = self.tx.push(message).map_err(io::Error::other)?;
            if !sent {
                self.tx.publish();
            }
            Ok(sent.then_some(()))
        })
    }

    fn flush(&mut self) {
        self.tx.publish();
    }

    fn receive(&mut self) -> io::Result<Message> {
        busy_poll_until(|| {
            let message = self.rx.pop().map_err(io::Error::other)?;
            if message.is_none() {
                self.rx.release();
            }
            Ok(message)
        })
    }
}

/// Busy-polls until `poll` returns a value; fails after the timeout.
#[inline]
fn busy_poll_until<R>(mut poll: impl FnMut() -> io::Result<Option<R>>) -> io::Result<R> {
    let mut since = None;
    loop {
        for _ in 0..POLLS_PER_CLOCK_READ {
            if let Some(value) = poll()? {
                return Ok(value);
            }
            std::hint::spin_loop();
        }
        if since.get_or_insert_with(Instant::now).elapsed() > PEER_TIMEOUT {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Application attached to a daemon that runs on a separate core.
struct DaemonChannel {
    attachment: Attachment,
    /// Message that the next receive returns.
    expected: Message,
    /// Number of commands that do not count as messages.
    uncounted_commands: u64,
}

/// Starts a daemon on `core`, with no host at the other end of its link, and attaches to it.
fn start_daemon(folder: &Path, core: usize) -> io::Result<(Daemon, DaemonChannel)> {
    let (device, _) = mem::wire(&MemConfig::default())?;
    let gate = gate::Config::default().mode(Mode::Dedicated);
    let gate = gate::Settings::new(gate).map_err(io::Error::other)?;
    let address = "192.0.2.1/24".parse().map_err(io::Error::other)?;
    let attach_config = AttachConfig::new(
        folder.join("daemon.sock"),
        Geometry { sockets: 1, tcp_bytes: 1 << 16, udp_bytes: 1 << 18 },
    );
    let path = attach_config.path.clone();
    let on_core_start = move || cpu::pin_this_thread(core).map_err(io::Error::other);
    let net = NetConfig::new(device).address(address).gate(gate);
    let daemon = Daemon::start(net, attach_config, on_core_start, Arc::new(|_: &str| {}));
    let daemon = daemon.map_err(io::Error::other)?;
    let mut attachment = Attachment::connect(&path, "lab")?;
    let uncounted_commands = attachment.ping()?;
    Ok((daemon, DaemonChannel { attachment, expected: [0; MESSAGE_WORDS], uncounted_commands }))
}

impl Channel for DaemonChannel {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        match message[0] {
            DATA => return self.attachment.send_no_op(),
            PING => self.uncounted_commands += 1,
            _ => {}
        }
        self.expected = *message;
        Ok(())
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> io::Result<Message> {
        let commands = self.attachment.ping()?;
        let mut message = self.expected;
        if message[0] == END {
            // The ping that asks for the number is not counted.
            message[1] = commands - self.uncounted_commands - 1;
        }
        Ok(message)
    }
}

struct StreamChannel<R, W> {
    reader: Spinning<R>,
    writer: Spinning<W>,
}

impl<R: AsFd, W: AsFd> StreamChannel<R, W> {
    fn new(transport: IpcTransport, reader: R, writer: W) -> io::Result<Self> {
        let spins = transport.spins();
        Ok(Self { reader: Spinning::new(reader, spins)?, writer: Spinning::new(writer, spins)? })
    }
}

impl<R: Read, W: Write> Channel for StreamChannel<R, W> {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES];
        for (bytes_of_word, word) in bytes.chunks_exact_mut(8).zip(message) {
            bytes_of_word.copy_from_slice(&word.to_ne_bytes());
        }
        self.writer.write_all(&bytes)
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> io::Result<Message> {
        let mut bytes = [0; MESSAGE_BYTES];
        self.reader.read_exact(&mut bytes)?;
        Ok(parse_message(&bytes))
    }
}

/// Stream used with `io_uring`: sent bytes go to the kernel together with the next receive, or
/// when a batch is full.
struct UringChannel {
    uring: UringStream,
    unsent: Vec<u8>,
}

impl UringChannel {
    fn new(stream: OwnedFd) -> io::Result<Self> {
        let uring = UringStream::new(stream, 2 * BATCH_MESSAGES as u32)?;
        Ok(Self { uring, unsent: Vec::new() })
    }

    fn exchange(&mut self, received: &mut [u8]) -> io::Result<()> {
        let unsent = std::mem::take(&mut self.unsent);
        self.uring.exchange(&unsent, MESSAGE_BYTES, received)
    }
}

impl Channel for UringChannel {
    fn send(&mut self, message: &Message) -> io::Result<()> {
        self.unsent.extend(message.iter().flat_map(|word| word.to_ne_bytes()));
        if self.unsent.len() < BATCH_MESSAGES as usize * MESSAGE_BYTES {
            Ok(())
        } else {
            self.exchange(&mut [])
        }
    }

    fn flush(&mut self) {}

    fn receive(&mut self) -> io::Result<Message> {
        let mut bytes = [0; MESSAGE_BYTES];
        self.exchange(&mut bytes)?;
        Ok(parse_message(&bytes))
    }
}

impl Drop for UringChannel {
    fn drop(&mut self) {
        // The peer may have exited already.
        let _ = self.exchange(&mut []);
    }
}

fn parse_message(bytes: &[u8; MESSAGE_BYTES]) -> Message {
    let mut message = [0; MESSAGE_WORDS];
    for (word, from) in message.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = from.try_into().map_or(0, u64::from_ne_bytes);
    }
    message
}

/// Runs the peer process: serves messages on its standard input, and on its standard output for
/// pipes, until the last message.
///
/// # Errors
/// If the process was not started by [`run`], or [`run`] ended early.
pub fn run_peer(transport: IpcTransport, core: usize) -> Result<(), LabError> {
    cpu::pin_this_thread(core)?;
    let failed = |source| LabError::Io { what: "the peer failed".into(), source };
    let input = || io::stdin().as_fd().try_clone_to_owned();
    let served = match transport {
        IpcTransport::Daemon => Err(io::Error::other("the network core is not a separate process")),
        IpcTransport::Ring => input()
            .and_then(|fd| Region::open(fd, 2 * RING_WORDS))
            .and_then(|region| serve_messages(&mut RingChannel::new(&Arc::new(region), true)?)),
        IpcTransport::Pipe | IpcTransport::PipeSpin => {
            let output = || io::stdout().as_fd().try_clone_to_owned();
            input().and_then(|reader| {
                let (reader, writer) = (File::from(reader), File::from(output()?));
                serve_messages(&mut StreamChannel::new(transport, reader, writer)?)
            })
        }
        IpcTransport::Uring => input().and_then(|fd| serve_messages(&mut UringChannel::new(fd)?)),
        IpcTransport::Unix
        | IpcTransport::UnixSpin
        | IpcTransport::Loopback
        | IpcTransport::LoopbackSpin => input().and_then(|fd| {
            let reader = File::from(fd);
            let writer = reader.try_clone()?;
            serve_messages(&mut StreamChannel::new(transport, reader, writer)?)
        }),
    };
    served.map_err(failed)
}

fn serve_messages(channel: &mut impl Channel) -> io::Result<()> {
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
            other => return Err(io::Error::other(format!("unknown message kind {other}"))),
        }
    }
}

/// Peer process; killed and reaped on drop.
struct PeerProcess(Child);

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // The peer may have exited by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_peer(
    transport: IpcTransport,
    core: usize,
    input: Stdio,
    output: Stdio,
) -> Result<PeerProcess, LabError> {
    let mut command = Command::new(programs::laboratory()?);
    command.args(["attach-latency", "--as-peer", transport.name(), "--cpu", &core.to_string()]);
    let _creating = ending::creating();
    let child = command.stdin(input).stdout(output).spawn();
    Ok(PeerProcess(child.map_err(LabError::io("cannot start the peer"))?))
}

/// Result of one measurement of a transport.
struct TransportMeasurement {
    round_trips_ns: Histogram<u64>,
    messages_per_s: f64,
}

fn measure(
    config: &AttachLatencyConfig,
    transport: IpcTransport,
    peer_core: usize,
) -> Result<TransportMeasurement, LabError> {
    let failed = |source| LabError::Io { what: format!("{} failed", transport.name()), source };
    let from_fd = |fd: OwnedFd| Stdio::from(fd);
    match transport {
        IpcTransport::Daemon => {
            let folder = folder::private()?;
            let (_daemon, mut channel) = start_daemon(folder.path(), peer_core).map_err(failed)?;
            exchange(config, transport, &mut channel).map_err(failed)
        }
        IpcTransport::Ring => {
            let region = Arc::new(Region::create(2 * RING_WORDS).map_err(failed)?);
            let theirs = region.as_fd().try_clone_to_owned().map_err(failed)?;
            let mut rings = RingChannel::new(&region, false).map_err(failed)?;
            let _peer = start_peer(transport, peer_core, from_fd(theirs), Stdio::null())?;
            exchange(config, transport, &mut rings).map_err(failed)
        }
        IpcTransport::Pipe | IpcTransport::PipeSpin => {
            let mut peer = start_peer(transport, peer_core, Stdio::piped(), Stdio::piped())?;
            let (writer, reader) = (peer.0.stdin.take(), peer.0.stdout.take());
            let missing = || failed(io::Error::other("the peer has no pipes"));
            let (writer, reader) = (writer.ok_or_else(missing)?, reader.ok_or_else(missing)?);
            StreamChannel::new(transport, reader, writer)
                .and_then(|mut stream| exchange(config, transport, &mut stream))
                .map_err(failed)
        }
        IpcTransport::Unix | IpcTransport::UnixSpin => {
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let _peer = start_peer(transport, peer_core, from_fd(theirs.into()), Stdio::null())?;
            StreamChannel::new(transport, &ours, &ours)
                .and_then(|mut stream| exchange(config, transport, &mut stream))
                .map_err(failed)
        }
        IpcTransport::Uring => {
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let _peer = start_peer(transport, peer_core, from_fd(theirs.into()), Stdio::null())?;
            let mut stream = UringChannel::new(ours.into()).map_err(failed)?;
            exchange(config, transport, &mut stream).map_err(failed)
        }
        IpcTransport::Loopback | IpcTransport::LoopbackSpin => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
            let ours = listener.local_addr().and_then(TcpStream::connect).map_err(failed)?;
            let (theirs, _) = listener.accept().map_err(failed)?;
            [&ours, &theirs].iter().try_for_each(|end| end.set_nodelay(true)).map_err(failed)?;
            let _peer = start_peer(transport, peer_core, from_fd(theirs.into()), Stdio::null())?;
            StreamChannel::new(transport, &ours, &ours)
                .and_then(|mut stream| exchange(config, transport, &mut stream))
                .map_err(failed)
        }
    }
}

/// Measures round trips one at a time, then many messages in one direction.
fn exchange(
    config: &AttachLatencyConfig,
    transport: IpcTransport,
    channel: &mut impl Channel,
) -> io::Result<TransportMeasurement> {
    let mut round_trips_ns = Histogram::new_with_bounds(1, PEER_TIMEOUT.as_nanos() as u64, 3)
        .map_err(io::Error::other)?;
    // The first round trip waits for the peer to start; the others let it warm up.
    let warm_up = 1 + config.round_trips / 20;
    for n in 0..warm_up + config.round_trips {
        let sent = Instant::now();
        channel.send(&[PING, n, 0, 0, 0, 0, 0, n])?;
        channel.flush();
        let received = channel.receive()?;
        if received != [PING, n, 0, 0, 0, 0, 0, n] {
            return Err(io::Error::other("the peer returned a different message"));
        }
        if n >= warm_up {
            round_trips_ns.saturating_record(sent.elapsed().as_nanos() as u64);
        }
    }
    let messages = if transport.is_of_kernel() {
        config.messages / KERNEL_MESSAGES_DIVISOR
    } else {
        config.messages
    };
    let began = Instant::now();
    for n in 0..messages {
        channel.send(&[DATA, n, 0, 0, 0, 0, 0, n])?;
        if n % BATCH_MESSAGES == BATCH_MESSAGES - 1 {
            channel.flush();
        }
    }
    channel.send(&[END; MESSAGE_WORDS])?;
    channel.flush();
    let counted = channel.receive()?[1];
    let took: Duration = began.elapsed();
    if counted != messages {
        return Err(io::Error::other(format!("{counted} of {messages} messages arrived")));
    }
    Ok(TransportMeasurement {
        round_trips_ns,
        messages_per_s: messages as f64 / took.as_secs_f64(),
    })
}

/// Measures each transport in turn.
///
/// # Errors
/// If there are fewer than two cores, or a process cannot be started.
pub fn run(config: &AttachLatencyConfig) -> Result<Experiment, LabError> {
    if cpu::available_cores() < 2 {
        return Err(LabError::Config("this experiment needs two cores".to_owned()));
    }
    let (core, peer_core) = (0, 1);
    // A new thread is pinned, so that the other threads keep their cores.
    let measured = std::thread::scope(|scope| {
        let measuring = scope.spawn(|| {
            cpu::pin_this_thread(core)?;
            let mut by_transport: Vec<(IpcTransport, Vec<TransportMeasurement>)> =
                IpcTransport::ALL.into_iter().map(|transport| (transport, Vec::new())).collect();
            let progress = Progress::new(by_transport.len() * config.repeats);
            for repeat in 1..=config.repeats {
                for (transport, runs) in &mut by_transport {
                    let run = measure(config, *transport, peer_core)?;
                    progress.step(format_args!(
                        "{repeat} {:<12} round trip {} ns, {:.0} messages/s one way",
                        transport.name(),
                        run.round_trips_ns.value_at_quantile(0.5),
                        run.messages_per_s
                    ));
                    runs.push(run);
                }
            }
            Ok::<_, LabError>(by_transport)
        });
        measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(report(&measured))
}

fn report(by_transport: &[(IpcTransport, Vec<TransportMeasurement>)]) -> Experiment {
    let mut result = Experiment::new("attach-latency");
    let (mut round_trips_per_s, mut one_way_per_s) = (Vec::new(), Vec::new());
    for (transport, runs) in by_transport {
        let median =
            |of: &dyn Fn(&TransportMeasurement) -> f64| crate::stats::median(runs.iter().map(of));
        let quantile = |q| median(&|run| run.round_trips_ns.value_at_quantile(q) as f64);
        let messages_per_s = median(&|run| run.messages_per_s).round();
        if *transport == IpcTransport::Daemon {
            result.figure("ping_pong_p50_ns", quantile(0.5));
            result.figure("messages_per_s", messages_per_s);
        }
        let name = transport.name().to_owned();
        round_trips_per_s.push((*transport, name.clone(), 1e9 / quantile(0.5).max(1.0)));
        one_way_per_s.push((*transport, name, messages_per_s));
        result.rows.push(json!({
            "way": transport.name(),
            "p50_ns": quantile(0.5),
            "p99_ns": quantile(0.99),
            "messages_per_s": messages_per_s,
        }));
    }
    for (figure, rates) in
        [("round_trips_over_kernel", round_trips_per_s), ("messages_over_kernel", one_way_per_s)]
    {
        let daemon = rates.iter().find(|(transport, ..)| *transport == IpcTransport::Daemon);
        let Some(daemon) = daemon.map(|(.., rate)| *rate) else { continue };
        let kernel = rates.into_iter().filter(|(transport, ..)| transport.is_of_kernel());
        result.compare_with_kernel(figure, daemon, kernel.map(|(_, name, rate)| (name, rate)));
    }
    result.columns = vec!["way", "p50_ns", "p99_ns", "messages_per_s"];
    result.note(
        "64 bytes from a process on core 0 to a process on core 1 and back; one way at full rate; \
         network-core: an engine with its applications; ring: two rings and nothing else; in both \
         cases both sides busy-poll, as in those of the kernel named spin, by calls that do not block; the \
         others sleep in the kernel; the kernel takes a system call for each message, except io_uring, \
         which submits them in batches; round_trips_over_kernel compares 1 s / p50; medians",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peer returns each ping and counts each data message.
    #[test]
    fn rings_carry_messages_both_ways() {
        let region = Arc::new(Region::create(2 * RING_WORDS).unwrap());
        let mut ours = RingChannel::new(&region, false).unwrap();
        let mut theirs = RingChannel::new(&region, true).unwrap();
        let config = AttachLatencyConfig { round_trips: 100, messages: 10_000, repeats: 1 };
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || serve_messages(&mut theirs));
            let measured = exchange(&config, IpcTransport::Ring, &mut ours).unwrap();
            answering.join().unwrap().unwrap();
            assert_eq!(measured.round_trips_ns.len(), 100);
            assert!(measured.messages_per_s > 0.0);
        });
    }

    #[test]
    fn io_uring_carries_messages_both_ways() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let config = AttachLatencyConfig { round_trips: 100, messages: 10_010, repeats: 1 };
        std::thread::scope(|scope| {
            let answering =
                scope.spawn(move || serve_messages(&mut UringChannel::new(theirs.into()).unwrap()));
            let mut ours = UringChannel::new(ours.into()).unwrap();
            let measured = exchange(&config, IpcTransport::Uring, &mut ours).unwrap();
            answering.join().unwrap().unwrap();
            assert_eq!(measured.round_trips_ns.len(), 100);
            // The peer has closed its end.
            assert_eq!(ours.receive().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        });
    }

    #[test]
    fn spinning_sockets_carry_messages_both_ways() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let transport = IpcTransport::UnixSpin;
        let config = AttachLatencyConfig { round_trips: 100, messages: 10_000, repeats: 1 };
        std::thread::scope(|scope| {
            let answering = scope.spawn(move || {
                serve_messages(&mut StreamChannel::new(transport, &theirs, &theirs).unwrap())
            });
            let mut stream = StreamChannel::new(transport, &ours, &ours).unwrap();
            let measured = exchange(&config, transport, &mut stream).unwrap();
            answering.join().unwrap().unwrap();
            assert_eq!(measured.round_trips_ns.len(), 100);
        });
    }

    #[test]
    fn peer_fails_on_unknown_message() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[9; MESSAGE_BYTES]).unwrap();
        let mut stream = StreamChannel::new(IpcTransport::Unix, &theirs, &theirs).unwrap();
        let error = serve_messages(&mut stream).unwrap_err();
        assert!(error.to_string().contains("kind"), "{error}");
    }

    #[test]
    fn reports_medians_of_the_network_core() {
        let run = |ns, messages_per_s| {
            let mut round_trips_ns = Histogram::new_with_bounds(1, 1_000_000, 3).unwrap();
            round_trips_ns.record(ns).unwrap();
            TransportMeasurement { round_trips_ns, messages_per_s }
        };
        let core = vec![run(300, 5.0), run(900, 9.0), run(200, 7.0)];
        let result = report(&[
            (IpcTransport::Daemon, core),
            (IpcTransport::Pipe, vec![run(7_000, 1.0)]),
            (IpcTransport::PipeSpin, vec![run(600, 4.0)]),
            (IpcTransport::Ring, vec![run(1, 99.0)]),
        ]);
        assert_eq!(result.figures["round_trips_over_kernel"], 2.0);
        assert_eq!(result.figures["messages_over_kernel"], 1.75);
        assert_eq!(result.comparisons[0].kernel_best, "pipe-spin");
        assert_eq!(result.figures["ping_pong_p50_ns"], 300.0);
        assert_eq!(result.figures["messages_per_s"], 7.0);
        assert_eq!(result.rows[1]["p50_ns"].as_f64().map(f64::round), Some(7_003.0));
    }
}
