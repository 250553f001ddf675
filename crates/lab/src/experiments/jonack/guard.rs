//! The experiment `guard`: a DNS server on the kernel's stack under a flood from unknown
//! sources, with `tidegate guard` in front of the server and without.
//!
//! A known peer sends queries at a steady rate. The figure is the share of its queries that are
//! answered while unknown sources fill a line of 1 Gb/s, and while they send at the maximum rate.

use std::net::Ipv4Addr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::client::{Client, RequestKind, count_answered};
use crate::testbed::cpu::{self, CoreTicks};
use crate::testbed::dns::servers::{Server, ServerKind};
use crate::testbed::flood::{
    CLIENT_ADDRESS, FloodSource, FloodTestbed, GIGABIT_LINE_PPS, KERNEL_ADDRESS, LOAD_ADDRESS,
    LOAD_MAC, Receiver, UNKNOWN_SOURCE_COUNT, UNKNOWN_SOURCES_NETWORK,
};
use crate::testbed::folder;
use crate::testbed::load::flood::{Flood, MAX_FRAMES};
use crate::testbed::netns;
use crate::testbed::process::ServerProcess;
use crate::testbed::programs;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::test_case::{Zone, check_installed};

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Queries per second of the known peer.
    pub peer_pps: f64,
    /// Flood of the unknown sources, in packets per second.
    pub flood_pps: f64,
    /// Duration of a measurement, in seconds.
    pub seconds: f64,
    /// Time for which the peer sends queries before the flood, in seconds. A source is known after
    /// two learning periods in which it was seen.
    pub calm_seconds: f64,
    /// Number of measurements; the median counts.
    pub repeats: usize,
    /// The core that runs the server.
    pub server_core: usize,
    /// The core that generates the load.
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
    /// A single short run, for a first impression.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 1.0, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        if cpu::available_cores() < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(
                "server and load generator need one core each, at least two in all".into(),
            ));
        }
        let rates = self.peer_pps > 0.0 && self.peer_pps <= 50_000.0 && self.repeats > 0;
        let times = (0.1..=60.0).contains(&self.seconds) && self.calm_seconds >= 0.0;
        if rates && times && self.flood_pps > 0.0 {
            return Ok(());
        }
        Err(LabError::Config(
            "the peer rate must be 1 to 50,000 queries/s, the flood rate above 0, a measurement \
             0.1 to 60 seconds"
                .into(),
        ))
    }
}

/// Time between the start of the flood and the start of the measurement.
const WARM_UP: Duration = Duration::from_millis(500);

/// A case of the experiment: the flood, with or without the guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GuardCase {
    name: &'static str,
    figure: &'static str,
    flood_level: FloodLevel,
    guarded: bool,
}

/// Rate of the flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FloodLevel {
    Off,
    /// The configured rate.
    Configured,
    /// The maximum rate, more than one core can examine: the device loses frames of known
    /// and unknown sources alike.
    Unlimited,
}

impl GuardCase {
    const ALL: [Self; 5] = [
        Self::new("no flood", "unloaded_kept", FloodLevel::Off, false),
        Self::new("flood, no guard", "unguarded_kept", FloodLevel::Configured, false),
        Self::new("flood, guard", "guard_kept", FloodLevel::Configured, true),
        Self::new("overrun, no guard", "unguarded_kept_overrun", FloodLevel::Unlimited, false),
        Self::new("overrun, guard", "guard_kept_overrun", FloodLevel::Unlimited, true),
    ];

    const fn new(
        name: &'static str,
        figure: &'static str,
        flood_level: FloodLevel,
        guarded: bool,
    ) -> Self {
        Self { name, figure, flood_level, guarded }
    }
}

/// Result of one measurement.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct GuardMeasurement {
    queries: u64,
    answered_queries: u64,
    flood_pps: f64,
    /// Replies to all sources.
    replies_pps: f64,
    server_busy_percent: f64,
}

impl GuardMeasurement {
    fn kept_share(&self) -> f64 {
        self.answered_queries as f64 / self.queries.max(1) as f64
    }
}

/// Runs the experiment. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, NSD is not installed or does not
/// start, or the flood cannot be sent.
pub fn run(config: &GuardConfig) -> Result<Experiment, LabError> {
    config.check()?;
    check_installed(&[ServerKind::Nsd])?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let zone = Zone::write()?;
    let mut runs = GuardCase::ALL.map(|case| (case, Vec::new()));
    let progress = Progress::new(runs.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for (case, runs) in &mut runs {
            let run = measure(config, *case, &zone)?;
            progress.step(format_args!(
                "{repeat} {:<16} kept {:.3}, flood {:.0}/s, replies {:.0}/s",
                case.name,
                run.kept_share(),
                run.flood_pps,
                run.replies_pps
            ));
            runs.push(run);
        }
    }
    Ok(conclude(config, &runs))
}

fn conclude(config: &GuardConfig, runs: &[(GuardCase, Vec<GuardMeasurement>)]) -> Experiment {
    let mut result = Experiment::new("guard");
    for (case, runs) in runs {
        let of = |figure: fn(&GuardMeasurement) -> f64| median(runs.iter().map(figure));
        let kept_share = of(GuardMeasurement::kept_share);
        result.rows.push(json!({
            "way": case.name,
            "kept": kept_share,
            "asked": of(|run| run.queries as f64),
            "answered": of(|run| run.answered_queries as f64),
            "flood_pps": of(|run| run.flood_pps),
            "answers_pps": of(|run| run.replies_pps),
            "server_busy_percent": of(|run| run.server_busy_percent),
        }));
        result.figure(case.figure, kept_share);
    }
    result.columns =
        vec!["way", "kept", "asked", "answered", "flood_pps", "answers_pps", "server_busy_percent"];
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "NSD on kernel sockets; core {server} does the receive work, the softirqs, the guard and \
         the service, core {load} the flood and the peer"
    ));
    result.note(format!(
        "the peer sends {} queries/s, from {} s before the flood until its end; {} unknown \
         sources send {:.0} frames/s (a line of 1 Gb/s carries {:.0}), in the overrun cases as fast as \
         one core can; kept is answered over asked queries meanwhile",
        config.peer_pps, config.calm_seconds, UNKNOWN_SOURCE_COUNT, config.flood_pps, GIGABIT_LINE_PPS
    ));
    result.note(
        "overrun: the flood exceeds what one core can examine; the veth's ring of 256 frames drops \
         the peer's frames as well, before any XDP program runs",
    );
    result.note(format!(
        "{} measurements of {} s each, taking turns; medians count",
        config.repeats, config.seconds
    ));
    result
}

fn measure(
    config: &GuardConfig,
    case: GuardCase,
    zone: &Zone,
) -> Result<GuardMeasurement, LabError> {
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    prepare_addresses(&testbed)?;
    testbed.prepare(Receiver::Kernel)?;
    let folder = folder::private()?;
    let setup = zone.setup(folder.path(), &testbed);
    let server = Server::start(ServerKind::Nsd, &setup, &testbed.pair.b)?;
    let guard = if case.guarded { Some(start_guard(&testbed)?) } else { None };
    let payloads = (0..MAX_FRAMES).map(|index| zone.queries.get(index % zone.queries.len()).0);
    let mut flood =
        testbed.flood(FloodSource::UnknownSources, server.target, payloads, ReceiveWork::Timer)?;
    let namespace = &testbed.pair.a.namespace;
    let requests = RequestKind::Dns(zone.queries.clone());
    let peer =
        Client::start(namespace, server.target, requests, config.peer_pps, config.load_core)?;
    thread::sleep(Duration::from_secs_f64(config.calm_seconds));
    flood.set_rate(match case.flood_level {
        FloodLevel::Off => Some(0.0),
        FloodLevel::Configured => Some(config.flood_pps),
        FloodLevel::Unlimited => None,
    })?;
    thread::sleep(WARM_UP);
    let (from_s, before) = (peer.now_s(), Reading::take(&testbed, &mut flood)?);
    thread::sleep(Duration::from_secs_f64(config.seconds));
    let (to_s, after) = (peer.now_s(), Reading::take(&testbed, &mut flood)?);
    flood.set_rate(Some(0.0))?;
    let records = peer.stop()?;
    drop(flood);
    drop(guard);
    Ok(after.since(&before, count_answered(&records, from_s, to_s)))
}

/// Sets up routes and static neighbour entries: the peer is a neighbour, the unknown sources
/// are behind a router. With static entries at both ends, a lost ARP request does not decide
/// the result.
fn prepare_addresses(testbed: &FloodTestbed) -> Result<(), LabError> {
    let (a, b) = (&testbed.pair.a, &testbed.pair.b);
    let router = LOAD_ADDRESS.to_string();
    b.namespace.ip(&["route", "add", UNKNOWN_SOURCES_NETWORK, "via", &router, "dev", &b.device])?;
    let neighbour = |end: &netns::VethEnd, address: Ipv4Addr, mac: [u8; 6]| {
        let address = address.to_string();
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let to = ["dev", end.device.as_str(), "nud", "permanent"];
        let mut arguments = vec!["neigh", "replace", address.as_str(), "lladdr", mac.as_str()];
        arguments.extend(to);
        end.namespace.ip(&arguments).map(drop)
    };
    neighbour(b, CLIENT_ADDRESS, a.mac)?;
    neighbour(b, LOAD_ADDRESS, LOAD_MAC)?;
    neighbour(a, KERNEL_ADDRESS, b.mac)
}

fn start_guard(testbed: &FloodTestbed) -> Result<ServerProcess, LabError> {
    let executable = programs::tidegate()?;
    let end = &testbed.pair.b;
    let mut command: Command = end.namespace.command_on_core(testbed.server_core, executable);
    command.args(["guard", "--iface", &end.device, "--port", "udp/53", "--json"]);
    let mut guard = ServerProcess::start("tidegate guard", &mut command)?;
    guard.wait_for_first_line()?;
    Ok(guard)
}

/// Counters at one moment.
struct Reading {
    at: Instant,
    flood: u64,
    replies: u64,
    server_core: CoreTicks,
}

impl Reading {
    fn take(testbed: &FloodTestbed, flood: &mut Flood) -> Result<Self, LabError> {
        Ok(Self {
            at: Instant::now(),
            flood: flood.offered()?,
            replies: testbed.pair.b.tx_packets()?,
            server_core: CoreTicks::read(testbed.server_core)?,
        })
    }

    fn since(&self, before: &Self, (queries, answered_queries): (u64, u64)) -> GuardMeasurement {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        GuardMeasurement {
            queries,
            answered_queries,
            flood_pps: (self.flood - before.flood) as f64 / seconds,
            replies_pps: (self.replies - before.replies) as f64 / seconds,
            server_busy_percent: self.server_core.since(before.server_core).busy_percent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians() {
        let run = |queries, answered_queries| GuardMeasurement {
            queries,
            answered_queries,
            ..GuardMeasurement::default()
        };
        let runs = [
            (GuardCase::ALL[0], vec![run(10, 10)]),
            (GuardCase::ALL[1], vec![run(10, 1), run(10, 0), run(10, 2)]),
            (GuardCase::ALL[2], vec![run(100, 99), run(100, 97), run(100, 98)]),
        ];
        let result = conclude(&GuardConfig::default(), &runs);
        assert_eq!(result.figures["unloaded_kept"], 1.0);
        assert_eq!(result.figures["unguarded_kept"], 0.1);
        assert_eq!(result.figures["guard_kept"], 0.98);
        assert_eq!(result.rows.len(), 3);
    }

    #[test]
    fn rejects_invalid_configuration() {
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
