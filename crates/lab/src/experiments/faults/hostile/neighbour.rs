//! Attackers that are attached to a daemon, beside an honest neighbour: a server that answers
//! 10,000 requests/s.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::json;
use tidegate_load::{LinkKind, LoadError, TcpLoadConfig, TcpLoadReport, load_tcp};
use tidegate_service::daemon::DaemonReport;

use super::attacker::Attack;
use super::{AttackResult, HostileConfig};
use crate::LabError;
use crate::report::Progress;
use crate::stats::median;
use crate::testbed::folder;
use crate::testbed::netns::{VethConfig, VethPair};
use crate::testbed::process::{ServerProcess, log_to};
use crate::testbed::programs;
use crate::testbed::tcp::choose_cores;

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 3);
const PREFIX_BITS: u8 = 24;
/// Port of the honest server.
const PORT: u16 = 7;
/// Port of the client's host that discards what attackers send.
const SINK_PORT: u16 = 9;
/// Interval between two checks of the stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// User and group of the attackers: workers of a user serve that user's applications only.
const ATTACKER_USER: &str = "65534";
const REQUESTS_PER_SECOND: f64 = 10_000.0;
const CONNECTIONS: usize = 8;
/// Part of the load's duration before it counts.
const WARM_UP: f64 = 0.25;
/// Minimum answered part of the requests.
const MIN_ANSWERED: f64 = 0.999;
/// Maximum of the latency's 99.9th percentile over that beside the harmless attacker.
const MAX_SLOWDOWN: f64 = 2.0;

/// Measurements beside one attacker.
struct Row {
    attack: Attack,
    p999_us: Vec<f64>,
    /// Lost requests, wrong answers and broken connections of all runs.
    lost: u64,
    wrong: u64,
    broken: u64,
    /// Longest round of the network core in all runs, in milliseconds.
    longest_round_ms: Option<f64>,
    /// Runs after which the daemon had ended.
    daemon_ended: u64,
}

/// Measurement of one run.
struct Measurement {
    load: Result<TcpLoadReport, LoadError>,
    /// The daemon still answers.
    has_daemon: bool,
    /// Longest round of the network core, if it is measured.
    longest_ns: Option<u64>,
}

impl Row {
    fn new(attack: Attack) -> Self {
        Self {
            attack,
            p999_us: Vec::new(),
            lost: 0,
            wrong: 0,
            broken: 0,
            longest_round_ms: None,
            daemon_ended: 0,
        }
    }

    fn add(&mut self, measurement: Measurement) {
        let Measurement { load, has_daemon, longest_ns } = measurement;
        self.daemon_ended += u64::from(!has_daemon);
        let longest_ms = longest_ns.map(|ns| ns as f64 / 1e6);
        self.longest_round_ms =
            self.longest_round_ms.into_iter().chain(longest_ms).reduce(f64::max);
        let Ok(load) = load else {
            self.broken += 1;
            self.p999_us.push(f64::INFINITY);
            return;
        };
        let due = REQUESTS_PER_SECOND * load.seconds * MIN_ANSWERED;
        self.lost += (due - load.requests as f64).max(0.0) as u64;
        self.wrong += load.wrong_answers;
        self.broken += load.broken + load.connects_failed;
        self.p999_us.push(load.latency.p999_us);
    }

    fn median_p999_us(&self) -> f64 {
        median(self.p999_us.iter().copied())
    }

    fn is_harmed(&self, harmless: &Self) -> bool {
        self.lost + self.wrong + self.broken + self.daemon_ended > 0
            || self.median_p999_us() > MAX_SLOWDOWN * harmless.median_p999_us()
    }
}

/// Runs every attacker beside the honest server.
pub(super) fn run(config: &HostileConfig, progress: &Progress) -> Result<AttackResult, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = Testbed::new(config, server_core, load_core)?;
    let mut rows = Attack::ALL.map(Row::new);
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            row.add(testbed.measure(row.attack, config.seconds)?);
            progress.step(format_args!(
                "{repeat} of {}: {}: p99.9 {:.0} us, {} lost",
                config.repeats,
                row.attack.name(),
                row.p999_us.last().copied().unwrap_or(f64::NAN),
                row.lost
            ));
        }
    }
    Ok(report(&rows, server_core, load_core))
}

fn report(rows: &[Row], server_core: usize, load_core: usize) -> AttackResult {
    let harmless = &rows[0];
    let harmed = rows[1..].iter().filter(|row| row.is_harmed(harmless)).count();
    let longest = rows.iter().filter_map(|row| row.longest_round_ms).reduce(f64::max);
    let mut figures = vec![("hostile_harmed", harmed as f64)];
    figures.extend(longest.map(|longest_ms| ("hostile_core_stall_ms", longest_ms)));
    let rows = rows.iter().map(|row| {
        json!({
            "attack": row.attack.name(),
            "p999_us": row.median_p999_us().round(),
            "lost": row.lost,
            "wrong": row.wrong,
            "broken": row.broken + row.daemon_ended,
            "core_stall_ms": row.longest_round_ms,
            "harmed": row.is_harmed(harmless),
        })
    });
    let note = format!(
        "hostile_harmed: attacks beside which an honest server on the same daemon lost a request, \
         gave a wrong byte, lost a connection, or had a 99.9th percentile of latency above \
         {MAX_SLOWDOWN} times that beside the harmless attacker; {REQUESTS_PER_SECOND} requests/s \
         on {CONNECTIONS} TCP connections, due times count; the daemon on core {server_core}, \
         client, server and attacker on core {load_core}, the attacker and the host that it sends to \
         at SCHED_IDLE; medians"
    );
    let stall = "hostile_core_stall_ms: longest round of the network core, processor time and time \
                 blocked in system calls, without time runnable";
    AttackResult { figures, rows: rows.collect(), notes: vec![note, stall.to_owned()] }
}

/// Both hosts: client and sinks on the kernel, the daemon on the other end.
struct Testbed {
    daemon_command: Vec<String>,
    server_core: usize,
    load_core: usize,
    stop: Arc<AtomicBool>,
    sinks: Vec<JoinHandle<Result<(), LabError>>>,
    folder: tempfile::TempDir,
    pair: VethPair,
}

impl Drop for Testbed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for sink in self.sinks.drain(..) {
            let _ = sink.join();
        }
    }
}

impl Testbed {
    fn new(config: &HostileConfig, server_core: usize, load_core: usize) -> Result<Self, LabError> {
        let a = vec![format!("{CLIENT}/{PREFIX_BITS}")];
        let pair = VethPair::new(&VethConfig { a, b: Vec::new() })?;
        // Lingering sockets of the attackers are on the loopback interface.
        pair.b.namespace.ip(&["link", "set", "lo", "up"])?;
        // Other users attach, too.
        let folder = folder::readable()?;
        let daemon_command = match &config.daemon {
            Some(command) => command.split_ascii_whitespace().map(str::to_owned).collect(),
            None => vec![
                programs::tidegate()?.to_string_lossy().into_owned(),
                "daemon".to_owned(),
                "--measure-rounds".to_owned(),
            ],
        };
        let stop = Arc::new(AtomicBool::new(false));
        let mut sinks = Vec::new();
        for discard in [discard_datagrams, discard_streams] {
            let stop = Arc::clone(&stop);
            sinks.push(pair.a.namespace.spawn(move || {
                crate::testbed::cpu::pin_this_thread(load_core)?;
                // The neighbour loses no processor time to it.
                crate::testbed::sys::run_when_idle()
                    .and_then(|()| discard(&stop))
                    .map_err(LabError::io("the sink failed"))
            })?);
        }
        Ok(Self { daemon_command, server_core, load_core, stop, sinks, folder, pair })
    }

    fn program(&self) -> &str {
        &self.daemon_command[0]
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("daemon.sock")
    }

    /// Command that runs this executable with `arguments` attached to the daemon.
    fn attached(&self, prefix: &[&str], arguments: &[&str]) -> Result<Command, LabError> {
        let mut command = self.pair.b.namespace.command_on_core(self.load_core, "env");
        command.args(prefix).arg(self.program()).args(["run", "--log", "/dev/null", "--socket"]);
        command.arg(self.socket()).arg("--").arg(programs::laboratory()?).args(arguments);
        Ok(command)
    }

    /// Loads the honest server beside an attacker.
    fn measure(&self, attack: Attack, seconds: f64) -> Result<Measurement, LabError> {
        let daemon = self.start_daemon()?;
        let port = PORT.to_string();
        let mut command = self.attached(&[], &["noisy", "--echo-port", &port])?;
        let mut honest = ServerProcess::start("the honest server", &mut command)?;
        let target = SocketAddrV4::new(SERVER, PORT);
        let client = &self.pair.a.namespace;
        honest.wait_until(|| {
            client.enter(|| std::net::TcpStream::connect(target)).is_ok_and(|opened| opened.is_ok())
        })?;
        let (socket, sink) = (self.socket(), SocketAddrV4::new(CLIENT, SINK_PORT));
        let attacker = [
            "hostile",
            "--as-attacker",
            attack.name(),
            "--socket",
            &socket.to_string_lossy(),
            "--sink",
            &sink.to_string(),
        ];
        let mut command = self.attached(
            &[
                "setpriv",
                "--reuid",
                ATTACKER_USER,
                "--regid",
                ATTACKER_USER,
                "--clear-groups",
                "chrt",
                "--idle",
                "0",
            ],
            &attacker,
        )?;
        command.stderr(Stdio::null());
        let mut attacker = ServerProcess::start("the attacker", &mut command)?;
        attacker.wait_for_first_line()?;
        let load = TcpLoadConfig {
            connections: CONNECTIONS,
            rate_per_second: Some(REQUESTS_PER_SECOND),
            seconds,
            warm_up_seconds: seconds * WARM_UP,
            core: Some(self.load_core),
            ..TcpLoadConfig::new(LinkKind::Kernel, target.into())
        };
        let load = client.enter(|| load_tcp(&load))?;
        let report = DaemonReport::query(&self.socket()).ok();
        let cores = report.as_ref().map_or(&[][..], |report| &report.cores);
        let longest_ns = cores.iter().filter_map(|core| core.longest_round_ns).max();
        drop((attacker, honest, daemon));
        Ok(Measurement { load, has_daemon: report.is_some(), longest_ns })
    }

    fn start_daemon(&self) -> Result<ServerProcess, LabError> {
        let log = self.folder.path().join("daemon.log");
        let shell = self.pair.b.namespace.command_on_core(self.server_core, "sh");
        let mut command = log_to(shell, &log);
        command.args(&self.daemon_command);
        command.args(["--iface", &self.pair.b.device, "--socket"]).arg(self.socket());
        command.args(["--address", &format!("{SERVER}/{PREFIX_BITS}")]);
        command.args(["--cpu", &self.server_core.to_string(), "--socket-mode", "666"]);
        ServerProcess::start_logged("the daemon", &mut command, &log)
    }
}

fn discard_datagrams(stop: &AtomicBool) -> std::io::Result<()> {
    let socket = UdpSocket::bind((CLIENT, SINK_PORT))?;
    socket.set_read_timeout(Some(STOP_CHECK_INTERVAL))?;
    let mut datagram = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        let _ = socket.recv(&mut datagram);
    }
    Ok(())
}

fn discard_streams(stop: &AtomicBool) -> std::io::Result<()> {
    let listener = TcpListener::bind((CLIENT, SINK_PORT))?;
    listener.set_nonblocking(true)?;
    let mut bytes = vec![0; 1 << 16];
    let mut streams = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true)?;
            streams.push(stream);
        }
        streams.retain_mut(|stream| match stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        });
        thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}
