//! The experiment `guard`: a DNS server on the kernel's stack under a flood of
//! strangers, with `tidegate guard` in front of it and without.
//!
//! A known peer asks at a steady rate. What counts is how many of its questions
//! are answered while strangers fill a line of 1 Gb/s, and while they send as
//! fast as they can.

use std::net::Ipv4Addr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::{Client, Questions, answered_of};
use crate::cpu::{self, CoreTicks};
use crate::dns::servers::{Server, ServerKind};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::bench::{
    Bench, CLIENT_ADDRESS, GIGABIT_LINE_PPS, KERNEL_ADDRESS, LOAD_ADDRESS, LOAD_MAC, ReceiveWork,
    Receiver, STRANGERS, STRANGERS_NETWORK, Source,
};
use crate::livelock::subject::{Zone, check_installed};
use crate::load::flood::{Flood, MAX_FRAMES};
use crate::netns;
use crate::process::Process;

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Questions per second of the known peer.
    pub peer_pps: f64,
    /// What the strangers send per second.
    pub flood_pps: f64,
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
            flood_pps: GIGABIT_LINE_PPS,
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
        if rates && times && self.flood_pps > 0.0 {
            return Ok(());
        }
        Err(LabError::Config(
            "a peer asks 1 to 50,000 times a second, a flood has a rate, and a measurement takes \
             0.1 to 60 seconds"
                .into(),
        ))
    }
}

/// The flood flows so long before anything is counted.
const WARM_UP: Duration = Duration::from_millis(500);

/// What floods the server, and what stands before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Way {
    name: &'static str,
    figure: &'static str,
    flood: Flooded,
    guarded: bool,
}

/// How much the strangers send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flooded {
    No,
    /// What the configuration says.
    AtRate,
    /// More than one core can look at: the device loses frames whoever sent
    /// them.
    Overrun,
}

impl Way {
    const ALL: [Self; 5] = [
        Self::new("no flood", "unloaded_kept", Flooded::No, false),
        Self::new("flood, no guard", "unguarded_kept", Flooded::AtRate, false),
        Self::new("flood, guard", "guard_kept", Flooded::AtRate, true),
        Self::new("overrun, no guard", "unguarded_kept_overrun", Flooded::Overrun, false),
        Self::new("overrun, guard", "guard_kept_overrun", Flooded::Overrun, true),
    ];

    const fn new(name: &'static str, figure: &'static str, flood: Flooded, guarded: bool) -> Self {
        Self { name, figure, flood, guarded }
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
                way.name,
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
            "way": way.name,
            "kept": kept,
            "asked": of(|run| run.asked as f64),
            "answered": of(|run| run.answered as f64),
            "flood_pps": of(|run| run.flood_pps),
            "answers_pps": of(|run| run.answers_pps),
            "server_busy_percent": of(|run| run.server_busy_percent),
        }));
        result.figure(way.figure, kept);
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
         strangers send {:.0} frames/s (a line of 1 Gb/s carries {:.0}), or, overrun, as fast as \
         one core can; kept is answered over asked while they do",
        config.peer_pps, config.calm_seconds, STRANGERS, config.flood_pps, GIGABIT_LINE_PPS
    ));
    result.note(
        "overrun: more comes than one core can look at, and the veth's ring of 256 frames loses \
         the peer's as well, before any program runs",
    );
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
    let guard = if way.guarded { Some(start_guard(&bench)?) } else { None };
    let payloads = (0..MAX_FRAMES).map(|index| zone.queries.get(index % zone.queries.len()).0);
    let mut flood = bench.flood(Source::Strangers, server.target, payloads, ReceiveWork::Timer)?;
    let namespace = &bench.pair.a.namespace;
    let questions = Questions::Dns(zone.queries.clone());
    let peer =
        Client::start(namespace, server.target, questions, config.peer_pps, config.load_core)?;
    thread::sleep(Duration::from_secs_f64(config.calm_seconds));
    flood.set_rate(match way.flood {
        Flooded::No => Some(0.0),
        Flooded::AtRate => Some(config.flood_pps),
        Flooded::Overrun => None,
    })?;
    thread::sleep(WARM_UP);
    let (from_s, before) = (peer.now_s(), Reading::take(&bench, &mut flood)?);
    thread::sleep(Duration::from_secs_f64(config.seconds));
    let (to_s, after) = (peer.now_s(), Reading::take(&bench, &mut flood)?);
    flood.set_rate(Some(0.0))?;
    let asked = peer.stop()?;
    drop(flood);
    drop(guard);
    Ok(after.since(&before, answered_of(&asked, from_s, to_s)))
}

/// The peer is a neighbour, the strangers are behind a router. Both ends know
/// their neighbours, so a lost question for an address is not what decides.
fn prepare_addresses(bench: &Bench) -> Result<(), LabError> {
    let (a, b) = (&bench.pair.a, &bench.pair.b);
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
    neighbour(b, CLIENT_ADDRESS, a.mac)?;
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

    fn since(&self, before: &Self, (asked, answered): (u64, u64)) -> Measured {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        Measured {
            asked,
            answered,
            flood_pps: (self.flood - before.flood) as f64 / seconds,
            answers_pps: (self.answers - before.answers) as f64 / seconds,
            server_busy_percent: self.server_core.since(before.server_core).busy_percent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_make_the_figures() {
        let run = |asked, answered| Measured { asked, answered, ..Measured::default() };
        let runs = [
            (Way::ALL[0], vec![run(10, 10)]),
            (Way::ALL[1], vec![run(10, 1), run(10, 0), run(10, 2)]),
            (Way::ALL[2], vec![run(100, 99), run(100, 97), run(100, 98)]),
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
            GuardConfig { seconds: 0.0, ..default() },
            GuardConfig { flood_pps: 0.0, ..default() },
        ] {
            assert!(config.check().is_err(), "{config:?}");
        }
    }
}
