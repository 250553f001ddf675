//! The experiment `guard`: a DNS server on the kernel's stack under a flood of
//! strangers, with `tidegate guard` in front of it and without.
//!
//! A known peer asks at a steady rate. What counts is how many of its questions
//! are answered while strangers send as fast as they can.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::cpu::{self, CoreTicks};
use crate::dns::servers::{Server, ServerKind};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::bench::{
    Bench, KERNEL_ADDRESS, LOAD_ADDRESS, LOAD_MAC, PREFIX, ReceiveWork, Receiver,
};
use crate::livelock::subject::{Zone, check_installed};
use crate::load::flood::{self, Flood};
use crate::load::{Addressing, QuerySet};
use crate::netns;
use crate::process::Process;

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Questions per second of the known peer.
    pub peer_pps: f64,
    /// How many strangers there are.
    pub strangers: u32,
    /// What they send per second; as fast as it goes when absent.
    pub flood_pps: Option<f64>,
    /// How long to measure, in seconds.
    pub seconds: f64,
    /// How long the peer asks before the flood, in seconds: it has to be seen
    /// in two learning periods to be known.
    pub calm_seconds: f64,
    /// How often to measure; the median counts.
    pub repeats: usize,
    /// The core that serves.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            peer_pps: 5_000.0,
            strangers: 4096,
            flood_pps: None,
            seconds: 3.0,
            calm_seconds: 3.5,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl GuardConfig {
    /// Once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 1.0, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        if cpu::cores() < 2 || self.server_core == self.load_core {
            return Err(LabError::Config("one core must serve and another send".into()));
        }
        let rates = self.peer_pps > 0.0 && self.peer_pps <= 50_000.0 && self.repeats > 0;
        let times = (0.1..=60.0).contains(&self.seconds) && self.calm_seconds >= 0.0;
        let strangers = (1..=flood::MAX_FRAMES as u32).contains(&self.strangers);
        if rates && times && strangers && self.flood_pps.is_none_or(|pps| pps > 0.0) {
            return Ok(());
        }
        Err(LabError::Config(format!(
            "a peer asks 1 to 50,000 times a second, there are 1 to {} strangers, and a \
             measurement takes 0.1 to 60 seconds",
            flood::MAX_FRAMES
        )))
    }
}

/// The peer's address; the kernel at the load's end has it.
const PEER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);
/// The first stranger; they are behind a router.
const STRANGER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 80, 0, 1);
const STRANGERS_NETWORK: &str = "10.80.0.0/16";
const STRANGER_PORT: u16 = 30_000;
/// The flood flows so long before anything is counted.
const WARM_UP: Duration = Duration::from_millis(500);

/// What is between the flood and the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// No flood.
    Unloaded,
    Unguarded,
    Guarded,
}

impl Way {
    const ALL: [Self; 3] = [Self::Unloaded, Self::Unguarded, Self::Guarded];

    fn name(self) -> &'static str {
        match self {
            Self::Unloaded => "no flood",
            Self::Unguarded => "flood, no guard",
            Self::Guarded => "flood, guard",
        }
    }
}

/// What came of one measurement.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Measured {
    asked: u64,
    answered: u64,
    flood_pps: f64,
    /// Answers to everyone.
    answers_pps: f64,
    server_busy_percent: f64,
}

impl Measured {
    fn kept(&self) -> f64 {
        self.answered as f64 / self.asked.max(1) as f64
    }
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When there is only one core, namespaces cannot be made, NSD is not
/// installed or does not start, or the flood cannot be sent.
pub fn run(config: &GuardConfig) -> Result<Experiment, LabError> {
    config.check()?;
    check_installed(&[ServerKind::Nsd])?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let zone = Zone::write()?;
    let mut runs = Way::ALL.map(|way| (way, Vec::new()));
    for repeat in 1..=config.repeats {
        for (way, runs) in &mut runs {
            let run = measure(config, *way, &zone)?;
            eprintln!(
                "{repeat} {:<16} kept {:.3}, flood {:.0}/s, answers {:.0}/s",
                way.name(),
                run.kept(),
                run.flood_pps,
                run.answers_pps
            );
            runs.push(run);
        }
    }
    Ok(conclude(config, &runs))
}

fn conclude(config: &GuardConfig, runs: &[(Way, Vec<Measured>)]) -> Experiment {
    let mut result = Experiment::new("guard");
    for (way, runs) in runs {
        let of =
            |figure: fn(&Measured) -> f64| median(&runs.iter().map(figure).collect::<Vec<_>>());
        let kept = of(Measured::kept);
        result.rows.push(json!({
            "way": way.name(),
            "kept": kept,
            "asked": of(|run| run.asked as f64),
            "answered": of(|run| run.answered as f64),
            "flood_pps": of(|run| run.flood_pps),
            "answers_pps": of(|run| run.answers_pps),
            "server_busy_percent": of(|run| run.server_busy_percent),
        }));
        let name = match way {
            Way::Unloaded => "unloaded_kept",
            Way::Unguarded => "unguarded_kept",
            Way::Guarded => "guard_kept",
        };
        result.figure(name, kept);
    }
    result.columns =
        vec!["way", "kept", "asked", "answered", "flood_pps", "answers_pps", "server_busy_percent"];
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "NSD on kernel sockets; core {server} does the receive work, the softirqs, the guard and \
         the service, core {load} the flood and the peer"
    ));
    result.note(format!(
        "the peer asks {} times a second, {} s before the flood begins and through it; {} \
         strangers send as fast as they can; kept is answered over asked while they do",
        config.peer_pps, config.calm_seconds, config.strangers
    ));
    result.note(format!(
        "{} measurements of {} s each, taking turns; medians count",
        config.repeats, config.seconds
    ));
    result
}

fn measure(config: &GuardConfig, way: Way, zone: &Zone) -> Result<Measured, LabError> {
    let bench = Bench::new(config.server_core, config.load_core)?;
    prepare_addresses(&bench)?;
    bench.prepare(Receiver::Kernel)?;
    let folder = tempfile::tempdir().map_err(LabError::io("cannot make a folder for files"))?;
    let setup = zone.setup(folder.path(), &bench);
    let server = Server::start(ServerKind::Nsd, &setup, &bench.pair.b)?;
    let guard = if way == Way::Guarded { Some(start_guard(&bench)?) } else { None };
    let frames = flood_frames(config, &bench, zone, server.target);
    let mut flood = bench.flood_frames(&frames, ReceiveWork::Timer)?;
    let peer = Peer { target: server.target, rate_pps: config.peer_pps };

    let calm = Duration::from_secs_f64(config.calm_seconds);
    let time = Duration::from_secs_f64(config.seconds);
    let measured = bench.pair.a.namespace.enter(|| {
        cpu::pin_this_thread(config.load_core)?;
        let mut asking = peer.start(&zone.queries)?;
        asking.run(calm)?;
        if way != Way::Unloaded {
            flood.set_rate(config.flood_pps)?;
        }
        asking.run(WARM_UP)?;
        asking.forget();
        let before = Reading::take(&bench, &mut flood)?;
        asking.run(time)?;
        let after = Reading::take(&bench, &mut flood)?;
        flood.set_rate(Some(0.0))?;
        asking.finish()?;
        Ok(after.since(&before, &asking))
    })?;
    drop(flood);
    drop(guard);
    measured
}

/// The peer is a neighbour, the strangers are behind a router. Both ends know
/// their neighbours, so a lost question for an address is not what decides.
fn prepare_addresses(bench: &Bench) -> Result<(), LabError> {
    let (a, b) = (&bench.pair.a, &bench.pair.b);
    a.add_address(PEER_ADDRESS.into(), PREFIX)?;
    let router = LOAD_ADDRESS.to_string();
    b.namespace.ip(&["route", "add", STRANGERS_NETWORK, "via", &router, "dev", &b.device])?;
    let neighbour = |end: &netns::End, address: Ipv4Addr, mac: [u8; 6]| {
        let address = address.to_string();
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let to = ["dev", end.device.as_str(), "nud", "permanent"];
        let mut words = vec!["neigh", "replace", address.as_str(), "lladdr", mac.as_str()];
        words.extend(to);
        end.namespace.ip(&words).map(drop)
    };
    neighbour(b, PEER_ADDRESS, a.mac)?;
    neighbour(b, LOAD_ADDRESS, LOAD_MAC)?;
    neighbour(a, KERNEL_ADDRESS, b.mac)
}

fn start_guard(bench: &Bench) -> Result<Process, LabError> {
    let program = std::env::current_exe().map_err(LabError::io("cannot find this program"))?;
    let end = &bench.pair.b;
    let mut command: Command = end.namespace.command_on_core(bench.server_core, program);
    command.args(["guard", "--iface", &end.device, "--port", "udp/53", "--json"]);
    let mut guard = Process::start("tidegate guard", &mut command)?;
    guard.wait_for_line()?;
    Ok(guard)
}

fn flood_frames(
    config: &GuardConfig,
    bench: &Bench,
    zone: &Zone,
    target: SocketAddr,
) -> Vec<Vec<u8>> {
    let strangers = Addressing {
        source_mac: LOAD_MAC,
        target_mac: bench.pair.b.mac,
        source: IpAddr::V4(STRANGER_ADDRESS),
        sources: config.strangers,
        first_port: STRANGER_PORT,
        ports: 1,
        target,
    };
    let payloads =
        (0..flood::MAX_FRAMES).map(|index| zone.queries.get(index % zone.queries.len()).0);
    flood::frames(&strangers, payloads)
}

/// Counters at one moment.
struct Reading {
    at: Instant,
    flood: u64,
    answers: u64,
    server_core: CoreTicks,
}

impl Reading {
    fn take(bench: &Bench, flood: &mut Flood) -> Result<Self, LabError> {
        Ok(Self {
            at: Instant::now(),
            flood: flood.sent()?,
            answers: bench.pair.b.transmitted()?,
            server_core: CoreTicks::read(bench.server_core)?,
        })
    }

    fn since(&self, before: &Self, asking: &Asking<'_>) -> Measured {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        Measured {
            asked: asking.asked,
            answered: asking.answered,
            flood_pps: (self.flood - before.flood) as f64 / seconds,
            answers_pps: (self.answers - before.answers) as f64 / seconds,
            server_busy_percent: self.server_core.since(before.server_core).busy_percent,
        }
    }
}

/// Who asks at a steady rate, from a kernel socket.
struct Peer {
    target: SocketAddr,
    rate_pps: f64,
}

/// A peer at work.
struct Asking<'q> {
    socket: UdpSocket,
    queries: &'q QuerySet,
    rate_pps: f64,
    /// Counts on, so that an answer can be told from one to an older question.
    number: u64,
    /// The first question that counts.
    first: u64,
    asked: u64,
    answered: u64,
}

/// How often the peer looks at the clock. A core that sends a flood has time
/// for little more.
const TICK: Duration = Duration::from_millis(1);
/// Ids are 16 bits: answers to older questions than this are too late.
const REMEMBERED: u64 = 1 << 15;

impl Peer {
    fn start<'q>(&self, queries: &'q QuerySet) -> Result<Asking<'q>, LabError> {
        let open = || {
            let socket = UdpSocket::bind((PEER_ADDRESS, 0))?;
            socket.connect(self.target)?;
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(socket)
        };
        let socket = open().map_err(LabError::io("cannot open the peer's socket"))?;
        let rate_pps = self.rate_pps;
        Ok(Asking { socket, queries, rate_pps, number: 0, first: 0, asked: 0, answered: 0 })
    }
}

impl Asking<'_> {
    /// Asks for so long.
    fn run(&mut self, time: Duration) -> Result<(), LabError> {
        let (began, mut sent) = (Instant::now(), 0);
        while began.elapsed() < time {
            let due = (began.elapsed().as_secs_f64() * self.rate_pps) as u64;
            while sent < due {
                self.ask()?;
                sent += 1;
            }
            self.collect()?;
            thread::sleep(TICK);
        }
        Ok(())
    }

    /// What was asked until now does not count.
    fn forget(&mut self) {
        (self.first, self.asked, self.answered) = (self.number, 0, 0);
    }

    /// Waits for answers that are still on their way.
    fn finish(&mut self) -> Result<(), LabError> {
        for _ in 0..300 {
            self.collect()?;
            thread::sleep(TICK);
        }
        Ok(())
    }

    fn ask(&mut self) -> Result<(), LabError> {
        let mut query = self.queries.get(self.number as usize % self.queries.len()).0.to_vec();
        query[..2].copy_from_slice(&(self.number as u16).to_be_bytes());
        // What does not even leave is not answered either.
        match self.socket.send(&query) {
            Ok(_) => {}
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(LabError::io("the peer cannot ask")(error)),
        }
        self.number += 1;
        self.asked += 1;
        Ok(())
    }

    fn collect(&mut self) -> Result<(), LabError> {
        let mut answer = [0; 2048];
        loop {
            match self.socket.recv(&mut answer) {
                Ok(len) if len >= 12 && answer[2] & 0x80 != 0 => {
                    let id = u16::from_be_bytes([answer[0], answer[1]]);
                    self.answered += u64::from(counts(id, self.first, self.number));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(LabError::io("the peer cannot listen")(error)),
            }
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionRefused)
        || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// Whether the question with this id is one of those from `first` on; `next` is
/// the number of the one after the last.
fn counts(id: u16, first: u64, next: u64) -> bool {
    let age = u64::from((next as u16).wrapping_sub(1).wrapping_sub(id));
    age < REMEMBERED && next > age && next - 1 - age >= first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_questions_that_count_are_counted() {
        assert!(counts(9, 5, 10) && counts(5, 5, 10));
        assert!(!counts(4, 5, 10), "asked before");
        assert!(!counts(10, 5, 10), "not asked yet");
        assert!(counts(0xffff, 0xfff0, 0x1_0001), "ids begin anew");
        assert!(counts(0, 0xfff0, 0x1_0001));
        assert!(!counts(1, 0xfff0, 0x1_0001));
    }

    #[test]
    fn medians_make_the_figures() {
        let run = |asked, answered| Measured { asked, answered, ..Measured::default() };
        let runs = [
            (Way::Unloaded, vec![run(10, 10)]),
            (Way::Unguarded, vec![run(10, 1), run(10, 0), run(10, 2)]),
            (Way::Guarded, vec![run(100, 99), run(100, 97), run(100, 98)]),
        ];
        let result = conclude(&GuardConfig::default(), &runs);
        assert_eq!(result.figures["unloaded_kept"], 1.0);
        assert_eq!(result.figures["unguarded_kept"], 0.1);
        assert_eq!(result.figures["guard_kept"], 0.98);
        assert_eq!(result.rows.len(), 3);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let default = GuardConfig::default;
        for config in [
            GuardConfig { server_core: 0, load_core: 0, ..default() },
            GuardConfig { peer_pps: 0.0, ..default() },
            GuardConfig { strangers: 0, ..default() },
            GuardConfig { seconds: 0.0, ..default() },
            GuardConfig { flood_pps: Some(0.0), ..default() },
        ] {
            assert!(config.check().is_err(), "{config:?}");
        }
    }
}
