//! The experiment `fleet`: three servers behind a router share their addresses, which `tidegate
//! announce` and BIRD announce.
//!
//! Clients behind the router ask the fleet while a server is drained, while one is killed, while its
//! announcer is killed, and while one is flooded at ten times its capacity.

mod client;
mod testbed;

use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate_apps::ServeCounters;
use tidegate_load::Addressing;

use self::client::{ConnectionCount, Connections, start_datagrams};
use self::testbed::{Fleet, FleetService, SERVERS, SERVICE_V4, client_sources};
use crate::error::LabError;
use crate::report::Progress;
use crate::report::experiment::Experiment;
use crate::stats::round_to_thousandths;
use crate::testbed::client::{Client, RequestKind, RequestRecord, count_answered};
use crate::testbed::dns::servers::check_installed;
use crate::testbed::load::flood::{self, FLOOD_NOTE, Flood};
use crate::testbed::netns::{self, run_to_end};
use crate::testbed::tcp::choose_cores;

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FleetConfig {
    /// Requests per second of the clients, to the whole fleet.
    pub rate_pps: f64,
    /// Work for each request of the flooded service, in nanoseconds.
    pub work_ns: u64,
    /// Flood of one server, in multiples of its capacity.
    pub flood_factor: f64,
    /// Time before and after each event, and of each measurement of the flood, in seconds.
    pub seconds: f64,
    /// Time in which the servers learn the clients before the flood, in seconds. A source is known
    /// after two learning periods in which it was seen.
    pub calm_seconds: f64,
    /// Number of repetitions; the worst counts.
    pub repeats: usize,
    /// Parts to measure; none means all.
    pub only: Vec<FleetPart>,
}

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            rate_pps: 3_000.0,
            work_ns: 50_000,
            flood_factor: 10.0,
            seconds: 2.0,
            calm_seconds: 3.5,
            repeats: 5,
            only: Vec::new(),
        }
    }
}

impl FleetConfig {
    /// A single short run, for a first impression.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 1.0, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let rates = (1.0..=100_000.0).contains(&self.rate_pps) && self.flood_factor > 0.0;
        let times =
            (0.1..=60.0).contains(&self.seconds) && (0.0..=60.0).contains(&self.calm_seconds);
        if rates && times && self.repeats > 0 && (1_000..=1_000_000).contains(&self.work_ns) {
            return Ok(());
        }
        Err(LabError::Config(
            "give 1 to 100,000 requests/s, a flood above 0, times of 0.1 to 60 seconds, and 1,000 to \
             1,000,000 ns of work"
                .into(),
        ))
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

/// Part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FleetPart {
    /// A server is drained, and announced again.
    Drain,
    /// The same, with dnsperf as the client.
    Dnsperf,
    /// A server is killed.
    Server,
    /// An announcer is killed.
    Announcer,
    /// A server is flooded.
    Flood,
}

impl FleetPart {
    /// All parts.
    pub const ALL: [Self; 5] =
        [Self::Drain, Self::Dnsperf, Self::Server, Self::Announcer, Self::Flood];

    fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain, and undo",
            Self::Dnsperf => "drain, and undo, by dnsperf",
            Self::Server => "server killed",
            Self::Announcer => "announcer killed",
            Self::Flood => "one server flooded",
        }
    }
}

/// Outcome of an event.
#[derive(Clone, Copy, Debug, Default)]
struct EventOutcome {
    asked: u64,
    lost: u64,
    lost_ipv6: u64,
    /// Time from the event to the last query that was lost, in milliseconds.
    failover_ms: f64,
    connections: ConnectionCount,
}

/// Outcome of a flood of one server.
#[derive(Clone, Copy, Debug, Default)]
struct FloodOutcome {
    capacity_pps: f64,
    flood_pps: f64,
    before_pps: f64,
    during_pps: f64,
}

impl FloodOutcome {
    /// Answers during the flood over those before.
    fn floor(&self) -> f64 {
        self.during_pps / self.before_pps.max(1.0)
    }
}

/// Runs the experiment. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, BIRD or dnsperf is not installed, or a
/// server does not start.
pub fn run(config: &FleetConfig) -> Result<Experiment, LabError> {
    config.check()?;
    let (server_core, load_core) = choose_cores()?;
    check_installed("bird", "bird2")?;
    check_installed("dnsperf", "dnsperf")?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let is_asked = |part: &FleetPart| config.only.is_empty() || config.only.contains(part);
    let parts: Vec<_> = FleetPart::ALL.into_iter().filter(is_asked).collect();
    let progress = Progress::new(parts.len() * config.repeats);
    let mut events: Vec<_> = parts
        .iter()
        .filter(|&&part| part != FleetPart::Flood)
        .map(|&event| (event, Vec::new()))
        .collect();
    if !events.is_empty() {
        let mut fleet = Fleet::start(FleetService::Dns, server_core, load_core)?;
        for repeat in 1..=config.repeats {
            for (event, outcomes) in &mut events {
                let outcome = measure_event(config, &mut fleet, *event, load_core)?;
                progress.step(format_args!(
                    "{repeat} {}: {} of {} lost, {} by IPv6, {:.0} ms",
                    event.name(),
                    outcome.lost,
                    outcome.asked,
                    outcome.lost_ipv6,
                    outcome.failover_ms
                ));
                outcomes.push(outcome);
            }
        }
    }
    let mut floods = Vec::new();
    if parts.contains(&FleetPart::Flood) {
        let service = FleetService::Echo { work_ns: config.work_ns };
        let fleet = Fleet::start(service, server_core, load_core)?;
        for repeat in 1..=config.repeats {
            let outcome = measure_flood(config, &fleet, load_core)?;
            progress.step(format_args!("{repeat} flood: floor {:.3}", outcome.floor()));
            floods.push(outcome);
        }
    }
    Ok(conclude(config, &events, &floods))
}

fn measure_event(
    config: &FleetConfig,
    fleet: &mut Fleet,
    event: FleetPart,
    core: usize,
) -> Result<EventOutcome, LabError> {
    if event == FleetPart::Dnsperf {
        return drain_by_dnsperf(config, fleet, core);
    }
    let queries = fleet.zone().queries();
    let targets = FleetService::Dns.targets();
    let client = start_datagrams(
        &fleet.client,
        core,
        client_sources(),
        targets.clone(),
        RequestKind::Dns(queries.clone()),
        config.rate_pps,
    )?;
    let connections = match event {
        FleetPart::Drain => Some(Connections::start(&fleet.client, core, targets, queries)?),
        _ => None,
    };
    thread::sleep(config.time());
    let event_s = client.now_s();
    match event {
        FleetPart::Server => fleet.kill_server(0),
        FleetPart::Announcer => fleet.kill_announcer(0),
        _ => fleet.drain(0, false)?,
    }
    fleet.wait_for_routes(SERVERS - 1)?;
    thread::sleep(config.time());
    match event {
        FleetPart::Server => fleet.start_server(0)?,
        FleetPart::Announcer => fleet.start_announcer(0)?,
        _ => fleet.drain(0, true)?,
    }
    fleet.wait_for_routes(SERVERS)?;
    thread::sleep(config.time());
    let connections = connections.map_or(Ok(ConnectionCount::default()), Connections::stop)?;
    let records = client.stop()?;
    let outcome = outcome_of(&records, event_s - config.seconds / 2.0, event_s);
    Ok(EventOutcome { connections, ..outcome })
}

/// Outcome of an event at `event_s`, by what was asked from `from_s` on: before that, hosts resolve
/// their neighbours.
fn outcome_of(records: &[RequestRecord], from_s: f64, event_s: f64) -> EventOutcome {
    let first = records.partition_point(|record| record.scheduled_s < from_s);
    let lost = || {
        let numbered = records.iter().enumerate().skip(first);
        numbered.filter(|(_, record)| record.latency_s.is_none())
    };
    let last = lost().map(|(_, record)| record.scheduled_s).next_back();
    let sources = client_sources();
    let is_ipv6 = |number: usize| sources[number % sources.len()].is_ipv6();
    EventOutcome {
        asked: (records.len() - first) as u64,
        lost: lost().count() as u64,
        lost_ipv6: lost().filter(|&(number, _)| is_ipv6(number)).count() as u64,
        failover_ms: last.map_or(0.0, |last_s| (last_s - event_s).max(0.0) * 1e3),
        connections: ConnectionCount::default(),
    }
}

fn drain_by_dnsperf(
    config: &FleetConfig,
    fleet: &mut Fleet,
    core: usize,
) -> Result<EventOutcome, LabError> {
    let queries = fleet.write_queries()?;
    let seconds = (3.0 * config.seconds + 1.0).ceil();
    let mut command = fleet.client.command_on_core(core, "dnsperf");
    command.args(["-s", &SERVICE_V4.to_string(), "-d"]).arg(queries);
    command.args(["-l", &seconds.to_string(), "-Q", &config.rate_pps.to_string(), "-c", "32"]);
    let output = thread::scope(|scope| {
        let tool = scope.spawn(|| run_to_end(&mut command, "dnsperf"));
        let drained = drain_and_undo(config, fleet);
        let output = tool.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        drained.and(output)
    })?;
    let count = |name: &str| {
        let line = output.lines().find_map(|line| line.trim().strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        number.ok_or_else(|| {
            LabError::Config(format!("no {name:?} in the output of dnsperf: {output}"))
        })
    };
    let (asked, lost) = (count("Queries sent:")?, count("Queries lost:")?);
    Ok(EventOutcome { asked, lost, ..EventOutcome::default() })
}

fn drain_and_undo(config: &FleetConfig, fleet: &mut Fleet) -> Result<(), LabError> {
    thread::sleep(config.time());
    fleet.drain(0, false)?;
    fleet.wait_for_routes(SERVERS - 1)?;
    thread::sleep(config.time());
    fleet.drain(0, true)?;
    fleet.wait_for_routes(SERVERS)
}

fn measure_flood(
    config: &FleetConfig,
    fleet: &Fleet,
    core: usize,
) -> Result<FloodOutcome, LabError> {
    let member = &fleet.members[0];
    let frames = attack_frames(fleet);
    let mut flood = Flood::new(&fleet.attacker, &frames, core)?;
    let answers = || -> Result<u64, LabError> {
        let counters = ServeCounters::read_file(&member.counters);
        Ok(counters.map_err(LabError::file(&member.counters))?[1])
    };
    // The clients rest meanwhile: a server alone has the processor of all.
    let rate = 2e9 / config.work_ns as f64;
    flood.set_rate(Some(rate))?;
    thread::sleep(config.time() / 2);
    let before = answers()?;
    thread::sleep(config.time());
    let capacity_pps = (answers()? - before) as f64 / config.seconds;
    flood.set_rate(Some(0.0))?;

    let service = FleetService::Echo { work_ns: config.work_ns };
    let client = start_datagrams(
        &fleet.client,
        core,
        client_sources(),
        service.targets(),
        RequestKind::Numbered,
        config.rate_pps,
    )?;
    thread::sleep(Duration::from_secs_f64(config.calm_seconds));
    let before = interval(&client, config);
    flood.set_rate(Some(config.flood_factor * capacity_pps.max(1.0)))?;
    thread::sleep(config.time() / 2);
    let sent = flood.offered()?;
    let during = interval(&client, config);
    let flood_pps = (flood.offered()? - sent) as f64 / config.seconds;
    flood.set_rate(Some(0.0))?;
    let records = client.stop()?;
    let rate = |(from_s, to_s): (f64, f64)| {
        count_answered(&records, from_s, to_s).1 as f64 / (to_s - from_s)
    };
    Ok(FloodOutcome { capacity_pps, flood_pps, before_pps: rate(before), during_pps: rate(during) })
}

/// Waits for the time of a measurement; returns its begin and end.
fn interval(client: &Client, config: &FleetConfig) -> (f64, f64) {
    let from_s = client.now_s();
    thread::sleep(config.time());
    (from_s, client.now_s())
}

/// Frames from unknown sources to the first server alone.
fn attack_frames(fleet: &Fleet) -> Vec<Vec<u8>> {
    /// Number of sources.
    const SOURCES: u32 = 4096;
    let target = fleet.members[0].own_address();
    let addressing = Addressing {
        source_mac: [2, 0xf1, 0x00, 0xd0, 0, 2],
        target_mac: fleet.attacker_gateway,
        source: IpAddr::V4(Ipv4Addr::new(198, 18, 0, 1)),
        source_count: SOURCES,
        first_port: 20_000,
        port_count: 1,
        target: (target, FleetService::Echo { work_ns: 0 }.port()).into(),
    };
    flood::frames(&addressing, (0..SOURCES).map(|_| [0_u8; 18].as_slice()))
}

fn conclude(
    config: &FleetConfig,
    events: &[(FleetPart, Vec<EventOutcome>)],
    floods: &[FloodOutcome],
) -> Experiment {
    let mut result = Experiment::new("fleet");
    for (event, outcomes) in events {
        let total = |count: fn(&EventOutcome) -> u64| outcomes.iter().map(count).sum::<u64>();
        let failover_ms = outcomes.iter().map(|one| one.failover_ms).fold(0.0, f64::max);
        let (asked, lost) = (total(|one| one.asked), total(|one| one.lost));
        let broken = total(|one| one.connections.broken);
        let is_drain = *event == FleetPart::Drain;
        let only_for =
            |is_shown: bool, value: f64| if is_shown { json!(value) } else { Value::Null };
        let is_killed = *event == FleetPart::Server;
        result.rows.push(json!({
            "event": event.name(),
            "asked": asked,
            "lost": lost,
            "lost_ipv6": only_for(*event != FleetPart::Dnsperf, total(|one| one.lost_ipv6) as f64),
            "failover_ms": only_for(is_killed, round_to_thousandths(failover_ms)),
            "connections": only_for(is_drain, total(|one| one.connections.made) as f64),
            "broken_connections": only_for(is_drain, broken as f64),
        }));
        match event {
            FleetPart::Drain => {
                result.figure("fleet_lost_on_drain", lost as f64);
                result.figure("fleet_broken_connections_on_drain", broken as f64);
            }
            FleetPart::Dnsperf => result.figure("fleet_lost_on_drain_dnsperf", lost as f64),
            FleetPart::Server => {
                result.figure("fleet_failover_ms", round_to_thousandths(failover_ms));
            }
            FleetPart::Announcer => {
                result.figure("fleet_lost_on_announcer_kill", lost as f64);
            }
            FleetPart::Flood => {}
        }
    }
    for outcome in floods {
        result.rows.push(json!({
            "event": FleetPart::Flood.name(),
            "capacity_pps": outcome.capacity_pps.round(),
            "flood_pps": outcome.flood_pps.round(),
            "answers_before_pps": outcome.before_pps.round(),
            "answers_during_pps": outcome.during_pps.round(),
            "floor": round_to_thousandths(outcome.floor()),
        }));
    }
    if let Some(floor) = floods.iter().map(FloodOutcome::floor).reduce(f64::min) {
        result.figure("fleet_floor", round_to_thousandths(floor));
    }
    add_notes(&mut result, config);
    result
}

fn add_notes(result: &mut Experiment, config: &FleetConfig) {
    result.note(format!(
        "{SERVERS} servers announce the same addresses of both families to a router on which the kernel \
         forwards by a hash of the flow; BIRD on the router and on each server, `tidegate announce` \
         beside each server"
    ));
    result.note(
        "two cores are shared by all: core 1 by the servers, their announcers and their BIRD, core 0 \
         by clients, router and flood; a fleet of machines has these for itself",
    );
    result.note(format!(
        "clients send {} requests/s from 16 addresses, half by IPv4, half by IPv6; lost are all without \
         an answer over {} runs, from half the time before an event on; failover is the longest time from SIGKILL to the last query that was \
         lost",
        config.rate_pps, config.repeats
    ));
    result.note(
        "a connection that is under way when the routes change reaches another server, which resets \
         it: the kernel's router has no resilient hash for routes of BIRD",
    );
    result.note(format!(
        "the flooded service echoes, with {} ns of work for each request, and admission control; \
         unknown sources send at {} times the measured capacity of one server; the floor is the worst \
         of {} runs",
        config.work_ns, config.flood_factor, config.repeats
    ));
    result.note(FLOOD_NOTE);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(scheduled_s: f64, is_answered: bool) -> RequestRecord {
        RequestRecord { scheduled_s, latency_s: is_answered.then_some(0.001) }
    }

    #[test]
    fn failover_ends_with_the_last_query_that_was_lost() {
        let records = [
            record(0.1, false),
            record(0.5, true),
            record(1.0, false),
            record(1.1, true),
            record(1.2, false),
            record(1.3, true),
        ];
        let outcome = outcome_of(&records, 0.5, 1.0);
        assert_eq!((outcome.asked, outcome.lost, outcome.lost_ipv6), (5, 2, 0));
        assert!((outcome.failover_ms - 200.0).abs() < 1e-6, "{}", outcome.failover_ms);
        assert_eq!(outcome_of(&records[..2], 0.5, 0.5).failover_ms, 0.0);
    }

    #[test]
    fn the_worst_run_counts() {
        let outcome = |lost, failover_ms| EventOutcome {
            asked: 100,
            lost,
            failover_ms,
            ..Default::default()
        };
        let events = FleetPart::ALL.map(|event| (event, vec![outcome(1, 30.0), outcome(2, 10.0)]));
        let events = &events[..4];
        let flood =
            |during_pps| FloodOutcome { before_pps: 100.0, during_pps, ..Default::default() };
        let result = conclude(&FleetConfig::default(), events, &[flood(99.0), flood(97.0)]);
        assert_eq!(result.figures["fleet_lost_on_drain"], 3.0);
        assert_eq!(result.figures["fleet_failover_ms"], 30.0);
        assert_eq!(result.figures["fleet_floor"], 0.97);
        assert_eq!(result.rows.len(), 6);
    }

    #[test]
    fn rejects_invalid_configuration() {
        for config in [
            FleetConfig { repeats: 0, ..FleetConfig::default() },
            FleetConfig { rate_pps: 0.0, ..FleetConfig::default() },
            FleetConfig { seconds: 0.0, ..FleetConfig::default() },
            FleetConfig { work_ns: 0, ..FleetConfig::default() },
        ] {
            assert!(config.check().is_err(), "{config:?}");
        }
    }
}
