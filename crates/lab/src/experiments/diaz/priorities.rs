//! `lab priorities`: small answers beside bulk senders of the same host, on a link of 1 Gb/s.
//!
//! The server's programs and the daemon are on core 1, the clients on core 0. The programs run
//! unmodified, on the daemon and on the kernel's stack.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_load::LatencyHistogram;

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::cpu::PinGuard;
use crate::testbed::netns::{VethConfig, VethPair, output, run_to_end};
use crate::testbed::process::ServerProcess;
use crate::testbed::tcp::{Family, TcpLabConfig, choose_cores};
use crate::testbed::{folder, programs};

const LINK_BPS: u64 = 1_000_000_000;
const ECHO_PORT: u16 = 7;
const BULK_PORT: u16 = 5201;
const MESSAGE_BYTES: usize = 64;
/// Pause between an answer and the next request: a ping-pong without pauses would be bulk itself.
const PAUSE: Duration = Duration::from_micros(200);
/// Time after which an answer counts as lost.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// Time until bulk senders have the link.
const BULK_START: Duration = Duration::from_secs(1);
/// Numbers of bulk connections beside small answers.
const BULK_CONNECTIONS: [usize; 2] = [1, 8];
/// Target of the figure `small_answer_p99_ratio`.
pub const MAX_P99_RATIO: f64 = 1.5;

/// Order of the frames that the server sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    /// Tidegate's transmit classes: answers have the better rank.
    Classes,
    /// Tidegate's single class: flows have fair turns.
    Flows,
    /// The kernel's token bucket, with one queue.
    Tbf,
    /// The kernel's hierarchical token bucket, with a better priority for answers.
    Htb,
}

impl Queue {
    const ALL: [Self; 4] = [Self::Classes, Self::Flows, Self::Tbf, Self::Htb];

    fn name(self) -> &'static str {
        match self {
            Self::Classes => "tidegate-classes",
            Self::Flows => "tidegate-flows",
            Self::Tbf => "kernel-tbf",
            Self::Htb => "kernel-htb",
        }
    }

    fn is_kernel(self) -> bool {
        matches!(self, Self::Tbf | Self::Htb)
    }

    /// Section of the daemon's configuration.
    fn config(self) -> String {
        let link = format!("[transmit]\nceiling-bps = {LINK_BPS}\n");
        let classes = format!(
            "[[transmit.class]]\nname = \"answers\"\nmatch = [{{ local-port = {ECHO_PORT} }}]\n\
             [[transmit.class]]\nname = \"bulk\"\nrank = 1\n"
        );
        if self == Self::Classes { link + &classes } else { link }
    }
}

/// Messages of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Messages {
    family: Family,
    is_tcp: bool,
}

impl fmt::Display for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", if self.is_tcp { "TCP" } else { "UDP" }, self.family.name())
    }
}

fn client(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 77, 0, 1).into(),
        Family::V6 => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1).into(),
    }
}

/// Address of the server, on the kernel's stack or on Tidegate.
fn server(family: Family, on_kernel: bool) -> IpAddr {
    let host = if on_kernel { 2 } else { 3 };
    match family {
        Family::V4 => Ipv4Addr::new(10, 77, 0, host).into(),
        Family::V6 => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, host.into()).into(),
    }
}

fn cidr(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 16 } else { 64 })
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Run {
    p50_us: f64,
    p99_us: f64,
    lost: u64,
    /// Goodput of the bulk senders in Gb/s; 0 without any.
    bulk_gbps: f64,
}

/// Programs of the server, and the daemon that serves them, if any. The echo server is stopped
/// before the daemon.
struct Server {
    queue: Queue,
    prefix: Vec<OsString>,
    _echo: ServerProcess,
    _daemon: Option<ServerProcess>,
    _folder: TempDir,
}

struct Testbed {
    /// Clients in `a`, server in `b`.
    pair: VethPair,
    server_core: usize,
    load_core: usize,
}

impl Testbed {
    fn new() -> Result<Self, LabError> {
        let (server_core, load_core) = choose_cores()?;
        let addresses = |of: fn(Family) -> IpAddr| Family::ALL.map(|family| cidr(of(family)));
        let config = VethConfig {
            a: addresses(client).to_vec(),
            b: addresses(|family| server(family, true)).to_vec(),
        };
        let pair = VethPair::as_on_a_wire(&config)?;
        pair.a.set_rps(&[load_core])?;
        Ok(Self { pair, server_core, load_core })
    }

    fn tc(&self, arguments: &str) -> Result<(), LabError> {
        let end = &self.pair.b;
        let mut words: Vec<&str> = arguments.split(' ').collect();
        // The device follows the object and the verb.
        words.splice(2..2, ["dev", &end.device]);
        run_to_end(end.namespace.command("tc").args(words), "iproute2").map(drop)
    }

    /// Sets the queueing discipline of the server's device.
    fn set_discipline(&self, queue: Queue) -> Result<(), LabError> {
        // There is none at first.
        let _ = self.tc("qdisc del root");
        match queue {
            Queue::Classes | Queue::Flows => Ok(()),
            Queue::Tbf => {
                self.tc(&format!("qdisc add root tbf rate {LINK_BPS} burst 32kb latency 50ms"))
            }
            Queue::Htb => {
                self.tc("qdisc add root handle 1: htb default 20")?;
                let whole = format!("rate {LINK_BPS} ceil {LINK_BPS} quantum 15140");
                self.tc(&format!("class add parent 1: classid 1:1 htb {whole}"))?;
                for (class, rate, prio) in [(10, LINK_BPS / 10, 0), (20, LINK_BPS / 10 * 9, 1)] {
                    self.tc(&format!(
                        "class add parent 1:1 classid 1:{class} htb rate {rate} ceil {LINK_BPS} \
                         prio {prio} quantum 15140"
                    ))?;
                }
                for (protocol, preference) in [("ip", 1), ("ipv6", 2)] {
                    let at = if protocol == "ip" { 20 } else { 40 };
                    self.tc(&format!(
                        "filter add parent 1: protocol {protocol} prio {preference} u32 match u16 \
                         {ECHO_PORT} 0xffff at {at} flowid 1:10"
                    ))?;
                }
                Ok(())
            }
        }
    }

    fn start(&self, queue: Queue) -> Result<Server, LabError> {
        self.set_discipline(queue)?;
        let folder = folder::private()?;
        let (daemon, prefix) = match queue.is_kernel() {
            true => {
                self.pair.b.set_rps(&[self.server_core])?;
                (None, Vec::new())
            }
            false => {
                self.pair.b.set_rps(&[])?;
                let (daemon, prefix) = self.start_daemon(queue, &folder)?;
                (Some(daemon), prefix)
            }
        };
        let end = &self.pair.b;
        let mut command = end.namespace.command_on_core(self.server_core, "env");
        command.args(&prefix).arg(programs::laboratory()?);
        command.args(["noisy", "--echo-port", &ECHO_PORT.to_string()]);
        let mut echo = ServerProcess::start("echo server", &mut command)?;
        let target = SocketAddr::new(server(Family::V4, queue.is_kernel()), ECHO_PORT);
        let connect = || TcpStream::connect_timeout(&target, Duration::from_secs(1));
        echo.wait_until(|| matches!(self.pair.a.namespace.enter(connect), Ok(Ok(_))))?;
        Ok(Server { queue, prefix, _echo: echo, _daemon: daemon, _folder: folder })
    }

    /// Starts a daemon; also returns the words before the command line of a program attached to it.
    fn start_daemon(
        &self,
        queue: Queue,
        folder: &TempDir,
    ) -> Result<(ServerProcess, Vec<OsString>), LabError> {
        let (config, socket) = (folder.path().join("transmit.toml"), folder.path().join("socket"));
        fs::write(&config, queue.config()).map_err(LabError::io("cannot write a file"))?;
        let (end, core) = (&self.pair.b, self.server_core);
        let mut command = end.namespace.command_on_core(core, programs::tidegate()?);
        command.args(["daemon", "--cpu", &core.to_string(), "--iface", &end.device]);
        for family in Family::ALL {
            command.args(["--address", &cidr(server(family, false))]);
        }
        command.arg("--config").arg(config).arg("--socket").arg(&socket);
        let mut daemon = ServerProcess::start("tidegate daemon", &mut command)?;
        daemon.wait_for_first_line()?;
        let run = ["run", "--log", "/dev/null", "--socket"].map(OsString::from);
        let mut prefix = vec![programs::tidegate()?.into()];
        prefix.extend(run);
        prefix.extend([socket.into(), "--".into()]);
        Ok((daemon, prefix))
    }

    /// Runs bulk senders for `seconds`; returns their goodput in Gb/s.
    fn send_bulk(
        &self,
        prefix: &[OsString],
        connections: usize,
        seconds: f64,
    ) -> Result<f64, LabError> {
        let client_address = client(Family::V4).to_string();
        let mut command = self.pair.b.namespace.command_on_core(self.server_core, "env");
        command.args(prefix).args(["iperf3", "--json", "--client", &client_address]);
        command.args(["--parallel", &connections.to_string()]);
        command.args(["--time", &format!("{}", seconds.ceil()), "--omit", "1"]);
        let result = output(&mut command, "iperf3")?;
        let report: Value = serde_json::from_slice(&result.stdout).unwrap_or_default();
        let bps = report.pointer("/end/sum_received/bits_per_second").and_then(Value::as_f64);
        bps.map(|bps| bps / 1e9).ok_or_else(|| {
            LabError::Config(format!("iperf3: {}", report.get("error").unwrap_or(&Value::Null)))
        })
    }

    /// Measures answers for `seconds` beside `bulk` connections.
    fn measure(
        &self,
        server: &Server,
        messages: Messages,
        bulk: usize,
        seconds: f64,
    ) -> Result<Run, LabError> {
        let target =
            SocketAddr::new(self::server(messages.family, server.queue.is_kernel()), ECHO_PORT);
        let prefix = &server.prefix;
        thread::scope(|scope| {
            let bulk_seconds = seconds + BULK_START.as_secs_f64();
            let sender =
                (bulk > 0).then(|| scope.spawn(move || self.send_bulk(prefix, bulk, bulk_seconds)));
            if sender.is_some() {
                // The first second of the bulk senders does not count.
                thread::sleep(BULK_START);
            }
            let client = || -> Result<(LatencyHistogram, u64), LabError> {
                let _pinned = PinGuard::to(self.load_core)?;
                exchange(messages, target, seconds).map_err(LabError::io("the client failed"))
            };
            let (latency, lost) = self.pair.a.namespace.enter(client)??;
            let bulk_gbps = match sender.map(thread::ScopedJoinHandle::join) {
                Some(Ok(goodput)) => goodput?,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                None => 0.0,
            };
            let at = |percentile| latency.percentile_us(percentile);
            Ok(Run { p50_us: at(50.0), p99_us: at(99.0), lost, bulk_gbps })
        })
    }
}

/// Sends one request after the other for `seconds`. Returns the latencies, and the number of
/// requests without an answer.
fn exchange(
    messages: Messages,
    target: SocketAddr,
    seconds: f64,
) -> io::Result<(LatencyHistogram, u64)> {
    let (mut latency, mut lost) = (LatencyHistogram::default(), 0);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut link = Link::connect(messages, target)?;
    let mut number = 0_u64;
    while Instant::now() < end {
        number += 1;
        let began = Instant::now();
        if link.ask(number)? {
            latency.record(began.elapsed().as_nanos() as u64);
        } else {
            lost += 1;
        }
        thread::sleep(PAUSE);
    }
    Ok((latency, lost))
}

enum Link {
    Udp(UdpSocket),
    Tcp(TcpStream),
}

impl Link {
    fn connect(messages: Messages, target: SocketAddr) -> io::Result<Self> {
        if messages.is_tcp {
            let stream = TcpStream::connect(target)?;
            stream.set_nodelay(true)?;
            return Ok(Self::Tcp(stream));
        }
        let socket = UdpSocket::bind(SocketAddr::new(client(messages.family), 0))?;
        socket.connect(target)?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self::Udp(socket))
    }

    /// Sends a request and waits for its answer. Returns false if the answer is lost.
    fn ask(&mut self, number: u64) -> io::Result<bool> {
        let mut message = [0; MESSAGE_BYTES];
        message[..8].copy_from_slice(&number.to_be_bytes());
        let mut answer = [0; MESSAGE_BYTES];
        match self {
            Self::Tcp(stream) => {
                stream.write_all(&message)?;
                stream.read_exact(&mut answer)?;
            }
            Self::Udp(socket) => {
                socket.send(&message)?;
                // Late answers to earlier requests are skipped.
                while answer != message {
                    match socket.recv(&mut answer) {
                        Ok(_) => {}
                        Err(error)
                            if matches!(
                                error.kind(),
                                ErrorKind::WouldBlock | ErrorKind::TimedOut
                            ) =>
                        {
                            return Ok(false);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(true)
    }
}

/// Measurements of one kind of messages on one queue.
struct Case {
    queue: Queue,
    messages: Messages,
    alone: Vec<Run>,
    /// One for each of [`BULK_CONNECTIONS`].
    beside: [Vec<Run>; BULK_CONNECTIONS.len()],
    /// Goodput of the bulk senders without small answers, in Gb/s.
    bulk_alone: [Vec<f64>; BULK_CONNECTIONS.len()],
}

fn median_of(runs: &[Run], figure: fn(&Run) -> f64) -> f64 {
    median(runs.iter().map(figure))
}

impl Case {
    fn new(queue: Queue, messages: Messages) -> Self {
        Self {
            queue,
            messages,
            alone: Vec::new(),
            beside: Default::default(),
            bulk_alone: Default::default(),
        }
    }

    /// p99 beside bulk senders over p99 alone, for each number of connections.
    fn p99_ratios(&self) -> [f64; BULK_CONNECTIONS.len()] {
        let alone = median_of(&self.alone, |run| run.p99_us);
        self.beside.each_ref().map(|runs| median_of(runs, |run| run.p99_us) / alone)
    }

    /// Goodput of bulk senders beside answers over that without.
    fn bulk_shares(&self) -> [f64; BULK_CONNECTIONS.len()] {
        std::array::from_fn(|at| {
            median_of(&self.beside[at], |run| run.bulk_gbps)
                / median(self.bulk_alone[at].iter().copied())
        })
    }

    fn rows(&self) -> Vec<Value> {
        let row = |bulk: usize, runs: &[Run], ratio: f64, share: Option<f64>| {
            json!({
                "queue": self.queue.name(),
                "messages": self.messages.to_string(),
                "bulk_connections": bulk,
                "p50_us": round_to_thousandths(median_of(runs, |run| run.p50_us)),
                "p99_us": round_to_thousandths(median_of(runs, |run| run.p99_us)),
                "p99_ratio": round_to_thousandths(ratio),
                "lost": runs.iter().map(|run| run.lost).sum::<u64>(),
                "bulk_gbps": round_to_thousandths(median_of(runs, |run| run.bulk_gbps)),
                "bulk_share": share.map(round_to_thousandths),
            })
        };
        let (ratios, shares) = (self.p99_ratios(), self.bulk_shares());
        let beside = (0..BULK_CONNECTIONS.len())
            .map(|at| row(BULK_CONNECTIONS[at], &self.beside[at], ratios[at], Some(shares[at])));
        std::iter::once(row(0, &self.alone, 1.0, None)).chain(beside).collect()
    }
}

/// Measures small answers alone and beside bulk senders, on Tidegate and on the kernel's queueing
/// disciplines.
///
/// # Errors
/// If namespaces cannot be created, or a program is missing or does not start.
pub fn run(config: &TcpLabConfig, quick: bool) -> Result<Experiment, LabError> {
    let testbed = Testbed::new()?;
    let families = if quick { &Family::ALL[..1] } else { &Family::ALL[..] };
    let messages: Vec<Messages> = families
        .iter()
        .flat_map(|&family| [false, true].map(|is_tcp| Messages { family, is_tcp }))
        .collect();
    let _receiver = {
        let end = &testbed.pair.a;
        let mut command = end.namespace.command_on_core(testbed.load_core, "iperf3");
        command.args(["--server", "--forceflush", "--port", &BULK_PORT.to_string()]);
        let mut receiver = ServerProcess::start("iperf3", &mut command)?;
        receiver.wait_for_first_line()?;
        receiver
    };
    let of_queue = |queue| messages.iter().map(move |&messages| Case::new(queue, messages));
    let mut cases: Vec<Case> = Queue::ALL.into_iter().flat_map(of_queue).collect();
    let progress = Progress::new(cases.len() * config.repeats);
    for _ in 0..config.repeats {
        for of_queue in cases.chunk_by_mut(|one, other| one.queue == other.queue) {
            let server = testbed.start(of_queue[0].queue)?;
            let mut bulk_alone = [0.0; BULK_CONNECTIONS.len()];
            for (bulk, goodput) in BULK_CONNECTIONS.into_iter().zip(&mut bulk_alone) {
                *goodput = testbed.send_bulk(&server.prefix, bulk, config.seconds)?;
            }
            for case in of_queue {
                let measure = |bulk| testbed.measure(&server, case.messages, bulk, config.seconds);
                case.alone.push(measure(0)?);
                for (at, bulk) in BULK_CONNECTIONS.into_iter().enumerate() {
                    case.beside[at].push(measure(bulk)?);
                    case.bulk_alone[at].push(bulk_alone[at]);
                }
                progress.step(format_args!(
                    "{:<17} {}: p99 {:.0} us alone, {:.1?} of it beside 1 and 8 bulk senders",
                    case.queue.name(),
                    case.messages,
                    median_of(&case.alone, |run| run.p99_us),
                    case.p99_ratios(),
                ));
            }
        }
    }
    Ok(conclude(&cases))
}

fn conclude(cases: &[Case]) -> Experiment {
    let mut result = Experiment::new("priorities");
    for queue in Queue::ALL {
        let of_queue = || cases.iter().filter(move |case| case.queue == queue);
        let suffix = match queue {
            Queue::Classes => String::new(),
            other => format!("_{}", other.name().replace('-', "_")),
        };
        if let Some(worst) = of_queue().flat_map(Case::p99_ratios).reduce(f64::max) {
            let name = format!("small_answer_p99_ratio{suffix}");
            result.figure(&name, round_to_thousandths(worst));
        }
        if let Some(worst) = of_queue().flat_map(Case::bulk_shares).reduce(f64::min) {
            result.figure(&format!("bulk_share_kept{suffix}"), round_to_thousandths(worst));
        }
    }
    result.rows = cases.iter().flat_map(Case::rows).collect();
    result.note(format!(
        "a link of 1 Gb/s: [transmit] ceiling-bps of the daemon, or tbf and htb of the kernel; an \
         unmodified echo server and iperf3 as the bulk sender on core 1, with the daemon; their \
         clients on kernel sockets on core 0; requests and answers of {MESSAGE_BYTES} bytes, one in \
         flight, {} us apart",
        PAUSE.as_micros()
    ));
    result.note(format!(
        "small_answer_p99_ratio: p99 beside 1 and 8 bulk connections over p99 alone, the worst case, \
         target at most {MAX_P99_RATIO}; bulk_share_kept: goodput of the bulk senders beside small \
         answers over that without; of Tidegate with classes, with fair flows only, and of the \
         kernel. This kernel has no fq_codel, prio or sfq"
    ));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_worst_case_of_each_queue() {
        let run = |p99_us, bulk_gbps| vec![Run { p50_us: 1.0, p99_us, lost: 0, bulk_gbps }];
        let messages = |is_tcp| Messages { family: Family::V4, is_tcp };
        let case = |queue, is_tcp, beside: [f64; 2], bulk| Case {
            queue,
            messages: messages(is_tcp),
            alone: run(100.0, 0.0),
            beside: beside.map(|p99_us| run(p99_us, bulk)),
            bulk_alone: [vec![0.8], vec![0.8]],
        };
        let result = conclude(&[
            case(Queue::Classes, false, [110.0, 120.0], 0.8),
            case(Queue::Classes, true, [130.0, 100.0], 0.72),
            case(Queue::Tbf, false, [900.0, 5000.0], 0.8),
        ]);
        assert_eq!(result.figures["small_answer_p99_ratio"], 1.3);
        assert_eq!(result.figures["bulk_share_kept"], 0.9);
        assert_eq!(result.figures["small_answer_p99_ratio_kernel_tbf"], 50.0);
        assert!(!result.figures.contains_key("bulk_share_kept_kernel_htb"));
        assert_eq!(result.rows.len(), 9);
    }
}
