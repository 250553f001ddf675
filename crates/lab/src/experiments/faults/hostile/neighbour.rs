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
use crate::stats::{median, round_to_hundredths};
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
/// Maximum of the latency's 99.9th percentile over that beside the harmless attacker right before.
const MAX_SLOWDOWN: f64 = 2.0;

/// Measurements beside one attacker, one for each repetition.
struct Row {
    attack: Attack,
    runs: Vec<Run>,
}

/// Load beside one attacker.
#[derive(Clone, Copy)]
struct Run {
    p999_us: f64,
    /// The same beside the harmless attacker, right before.
    harmless_p999_us: f64,
    /// Requests that were due and not answered.
    lost: f64,
    wrong: u64,
    broken: u64,
    /// The daemon had ended.
    daemon_ended: bool,
    /// Longest round of the network core, if it is measured.
    longest_round_ms: Option<f64>,
}

impl Run {
    fn new(measurement: Measurement, harmless_p999_us: f64) -> Self {
        let Measurement { load, has_daemon, longest_ns } = measurement;
        let run = Self {
            p999_us: f64::INFINITY,
            harmless_p999_us,
            lost: 0.0,
            wrong: 0,
            broken: 1,
            daemon_ended: !has_daemon,
            longest_round_ms: longest_ns.map(|ns| ns as f64 / 1e6),
        };
        let Ok(load) = load else { return run };
        let due = REQUESTS_PER_SECOND * load.seconds * MIN_ANSWERED;
        Self {
            p999_us: load.latency.p999_us,
            lost: (due - load.requests as f64).max(0.0).round(),
            wrong: load.wrong_answers,
            broken: load.broken + load.connects_failed,
            ..run
        }
    }

    fn slowdown(&self) -> f64 {
        self.p999_us / self.harmless_p999_us
    }
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
    fn median(&self, of: impl Fn(&Run) -> f64) -> f64 {
        median(self.runs.iter().map(of))
    }

    /// Median of the longest rounds, if rounds are measured.
    fn longest_round_ms(&self) -> Option<f64> {
        let longest: Option<Vec<f64>> = self.runs.iter().map(|run| run.longest_round_ms).collect();
        longest.map(median)
    }

    fn count(&self, of: impl Fn(&Run) -> u64) -> u64 {
        self.runs.iter().map(of).sum()
    }

    fn broken(&self) -> u64 {
        self.count(|run| run.broken + u64::from(run.daemon_ended))
    }

    /// True if the attack has done harm: an error in any run, or loss or latency in most.
    fn is_harmed(&self) -> bool {
        self.count(|run| run.wrong) + self.broken() > 0
            || self.median(|run| run.lost) > 0.0
            || self.median(Run::slowdown) > MAX_SLOWDOWN
    }
}

/// Runs every attacker beside the honest server, each after the harmless one.
pub(super) fn run(config: &HostileConfig, progress: &Progress) -> Result<AttackResult, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = Testbed::new(config, server_core, load_core)?;
    let mut rows = Attack::ALL.map(|attack| Row { attack, runs: Vec::new() });
    let (harmless, attacks) = rows.split_at_mut(1);
    for repeat in 1..=config.repeats {
        for row in &mut *attacks {
            let reference = testbed.measure(Attack::Harmless, config.seconds)?;
            let p999_us =
                reference.load.as_ref().map_or(f64::INFINITY, |load| load.latency.p999_us);
            harmless[0].runs.push(Run::new(reference, p999_us));
            let run = Run::new(testbed.measure(row.attack, config.seconds)?, p999_us);
            progress.step(format_args!(
                "{repeat} of {}: {}: p99.9 {:.0} us, without {p999_us:.0} us, {} lost",
                config.repeats,
                row.attack.name(),
                run.p999_us,
                run.lost
            ));
            row.runs.push(run);
        }
    }
    Ok(report(&rows, server_core, load_core))
}

fn report(rows: &[Row], server_core: usize, load_core: usize) -> AttackResult {
    let attacks = || rows.iter().filter(|row| row.attack != Attack::Harmless);
    let harmed = attacks().filter(|row| row.is_harmed()).count();
    let longest = attacks().filter_map(Row::longest_round_ms).reduce(f64::max);
    let mut figures = vec![("hostile_harmed", harmed as f64)];
    figures.extend(longest.map(|longest_ms| ("hostile_core_stall_ms", longest_ms)));
    let rows = rows.iter().map(|row| {
        json!({
            "attack": row.attack.name(),
            "p999_us": row.median(|run| run.p999_us).round(),
            "slowdown": round_to_hundredths(row.median(Run::slowdown)),
            "lost": row.median(|run| run.lost),
            "wrong": row.count(|run| run.wrong),
            "broken": row.broken(),
            "core_stall_ms": row.longest_round_ms(),
            "harmed": row.is_harmed(),
        })
    });
    let note = format!(
        "hostile_harmed: attacks beside which an honest server on the same daemon gave a wrong byte \
         or lost a connection in any run, or beside which it, in the median of all runs, lost \
         requests or had a 99.9th percentile of latency above {MAX_SLOWDOWN} times that of the run \
         beside the harmless attacker right before; {REQUESTS_PER_SECOND} requests/s on \
         {CONNECTIONS} TCP connections, due times count; the daemon on core {server_core}, client, \
         server and attacker on core {load_core}, the attacker and the host that it sends to at \
         SCHED_IDLE"
    );
    let stall = "hostile_core_stall_ms: longest round of the network core, processor time and time \
                 blocked in system calls; the time of other threads and of the hypervisor does not \
                 count; median of all runs of an attack, the worst attack";
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

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: Run = Run {
        p999_us: 300.0,
        harmless_p999_us: 200.0,
        lost: 0.0,
        wrong: 0,
        broken: 0,
        daemon_ended: false,
        longest_round_ms: Some(0.5),
    };

    fn is_harmed(runs: [Run; 3]) -> bool {
        Row { attack: Attack::Streams, runs: runs.into() }.is_harmed()
    }

    /// A pause of the whole machine falls on one run of several, with attacker or without.
    #[test]
    fn latency_and_loss_of_a_single_run_are_no_harm() {
        let slow = Run { p999_us: 9_000.0, lost: 50.0, ..RUN };
        let paused = Run { p999_us: 9_000.0, harmless_p999_us: 8_000.0, ..RUN };
        assert!(!is_harmed([RUN, slow, RUN]));
        assert!(!is_harmed([paused, paused, RUN]));
        assert!(is_harmed([slow, slow, RUN]));
        assert!(is_harmed([Run { lost: 50.0, ..RUN }, Run { lost: 1.0, ..RUN }, RUN]));
    }

    #[test]
    fn a_single_error_is_harm() {
        for error in
            [Run { wrong: 1, ..RUN }, Run { broken: 1, ..RUN }, Run { daemon_ended: true, ..RUN }]
        {
            assert!(is_harmed([RUN, error, RUN]));
        }
    }

    #[test]
    fn the_stall_is_that_of_the_worst_attack() {
        let row = |attack, longest: [f64; 3]| {
            let run = |longest| Run { longest_round_ms: Some(longest), ..RUN };
            Row { attack, runs: longest.map(run).into() }
        };
        let rows = [
            row(Attack::Harmless, [9.0, 9.0, 9.0]),
            row(Attack::Streams, [0.5, 7.0, 0.4]),
            row(Attack::Ports, [0.7, 0.6, 0.8]),
        ];
        let AttackResult { figures, .. } = report(&rows, 1, 0);
        assert_eq!(figures, [("hostile_harmed", 0.0), ("hostile_core_stall_ms", 0.7)]);
    }
}
