//! The experiment `protect`: effect of a flood on everything else.
//!
//! Jonack and Murta's tests on the live machine: a steady outgoing flow, system time, ping times
//! and the flood's losses at eight levels; a server with the flood on in the middle third of the
//! time. The paper leaves open which packets to drop: a further test has a known client among
//! unknown sources.

mod admission;
mod conserve;
mod levels;
mod queue_length;
mod second_interface;
mod timeline;

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::plot::Picture;
use crate::stats::round_to_thousandths;
use crate::testbed::cpu;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::netns;
use crate::testbed::test_case::{DEFAULT_MODE, Transport};
use admission::PolicyResults;
use conserve::ConserveCell;
use levels::LevelResults;
use timeline::TimelineResults;

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProtectPart {
    /// Effect of the flood on the rest of the machine at eight levels.
    Levels,
    /// Recovery time of a server.
    TimeLine,
    /// A known client among unknown sources.
    Admission,
    /// Total service with admission and without.
    Conserve,
}

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProtectConfig {
    /// The only part to run; all when absent.
    pub only: Option<ProtectPart>,
    /// Transports of the flooded service, by name: `kernel` and Tidegate's modes. Empty selects
    /// `kernel`, `moderated`, `napi` and the default mode.
    pub carriers: Vec<String>,
    /// Duration of the flow and ping measurements at each level, in seconds.
    pub seconds: f64,
    /// Length of a third of the time line, in seconds.
    pub third_seconds: f64,
    /// Number of repeats; the median counts.
    pub repeats: usize,
    /// The core that runs the server.
    pub server_core: usize,
    /// The core that generates the load.
    pub load_core: usize,
}

impl Default for ProtectConfig {
    fn default() -> Self {
        Self {
            only: None,
            carriers: Vec::new(),
            seconds: 1.0,
            third_seconds: 2.0,
            repeats: 3,
            server_core: 1,
            load_core: 0,
        }
    }
}

/// Default transports: the mechanisms of the paper, current Linux, and Tidegate's default mode.
const DEFAULT_TRANSPORTS: [&str; 4] = ["kernel", "moderated", "napi", DEFAULT_MODE];

impl ProtectConfig {
    /// Everything once and briefly, for a first impression.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.25, third_seconds: 0.5, repeats: 1, ..self }
    }

    /// True if each measurement runs once and briefly.
    fn is_quick(&self) -> bool {
        self.repeats == 1
    }

    fn check(&self) -> Result<(), LabError> {
        let cores = cpu::available_cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must run the server, another the generator; {cores} available"
            )));
        }
        let is_valid = |seconds: f64| seconds > 0.0 && seconds <= 60.0;
        if !is_valid(self.seconds) || !is_valid(self.third_seconds) || self.repeats == 0 {
            return Err(LabError::Config(
                "times must be above zero and at most 60 seconds, repeats above zero".into(),
            ));
        }
        self.transports().map(drop)
    }

    fn transports(&self) -> Result<Vec<Transport>, LabError> {
        match &self.carriers[..] {
            [] => DEFAULT_TRANSPORTS.iter().map(|name| name.parse()).collect(),
            names => names.iter().map(|name| name.parse()).collect(),
        }
    }
}

/// Runs the experiment. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, a server does not start, or the flood
/// cannot be sent.
pub fn run(config: &ProtectConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    let is_selected = |part| config.only.is_none_or(|only| only == part);
    let mut levels = Vec::new();
    if is_selected(ProtectPart::Levels) {
        levels = levels::run(config, &testbed)?;
    }
    let mut timelines = Vec::new();
    if is_selected(ProtectPart::TimeLine) {
        timelines = timeline::run(config, &testbed)?;
    }
    let mut policies = Vec::new();
    if is_selected(ProtectPart::Admission) {
        policies = admission::run(config, &testbed)?;
    }
    let mut cells = Vec::new();
    if is_selected(ProtectPart::Conserve) {
        cells = conserve::run(config, &testbed)?;
    }
    let mut result = Experiment::new("protect");
    describe(config, &mut result);
    conclude(&levels, &timelines, &policies, &mut result);
    conclude_conservation(&cells, &mut result);
    Ok(result)
}

fn describe(config: &ProtectConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} floods a sink with 64-byte packets through one interface; core {server} runs the \
         sink, all receive work, and the second interface's traffic: an outgoing flow of 10 Mb/s \
         (1470-byte datagrams) and the ping replies"
    ));
    result.note(
        "levels N1 to N8 are the paper's rates, 127 to 875 thousand packets/s, for all transports alike; \
         level_offered_share_min is the smallest share of a level that the generator made; losses of \
         the flood are packets that the sink did not process",
    );
    result.note(
        "time line: a client sends 1,000 requests/s through the flooded interface, with drop-tail \
         there; the flood is on in the middle third, at the maximum; a server has recovered when it answers 95 % \
         of 100 requests within 5 ms (or ten times the latency before)",
    );
    result.note(
        "admission: a client that has been seen for 3.5 s sends 5,000 requests/s while 8,192 \
         unknown sources flood the service at the rate of a 1 Gb/s line, 1.488 million frames/s; \
         drop-tail is the same without admission",
    );
    result.note(
        "overrun: the unknown sources send as fast as one core can. The ring of a veth holds 256 frames \
         and cannot be made longer (NICs have 1,024 and more): the flood exceeds what one core can \
         examine, and the ring drops frames of all sources; `unseen` is the share of the \
         client's frames among them",
    );
    result.note(
        "conserved: answers with admission over those without, the worst repeat; 1 to 1,000 unknown \
         sources, alone and beside a known client of 2,000 requests/s, at 1 to 10 times what the \
         server does with 20 us of work a request; kxdpgun and dnsperf ask a DNS server from one \
         address, kxdpgun for 0.2 to 2 million queries/s, of which `offered_per_s` was sent",
    );
    result.note(format!(
        "{} repeats of {} s at each level, transports taking turns; medians count",
        config.repeats, config.seconds
    ));
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 12] = [
    "carrier",
    "level",
    "offered_per_s",
    "flow_mbps",
    "ping_ms",
    "system_percent",
    "flood_loss_percent",
    "answered_during",
    "recovery_ms",
    "served_per_s",
    "served_without_per_s",
    "conserved",
];

fn conclude(
    levels: &[LevelResults],
    timelines: &[TimelineResults],
    policies: &[PolicyResults],
    result: &mut Experiment,
) {
    for results in levels {
        let prefix = figure_prefix(results.transport);
        result.figure(
            &format!("{prefix}flow_kept_min"),
            round_to_thousandths(results.flow_kept_min()),
        );
        // JSON has no infinity: a ping ratio without replies is left out here, and visible in the
        // row.
        if results.ping_ratio_max().is_finite() {
            result.figure(
                &format!("{prefix}ping_ratio_max"),
                round_to_thousandths(results.ping_ratio_max()),
            );
        }
    }
    if let Some(made) = levels::offered_share_min(levels) {
        result.figure("level_offered_share_min", round_to_thousandths(made));
    }
    if let Some(queue) = timelines.iter().find_map(|results| results.kernel_queue) {
        result.note(format!(
            "time line: the socket queues are of the same length, {} packets on Tidegate and {} on \
             the kernel, measured with packets of the flood (SO_RCVBUF {} bytes, which the kernel \
             doubles)",
            queue_length::tidegate_queue_packets(),
            queue.held_packets,
            queue.buffer_bytes
        ));
    }
    for results in timelines {
        result.figure(
            &format!("{}recovery_ms", figure_prefix(results.transport)),
            round_to_thousandths(results.recovery_ms()),
        );
    }
    for policy in policies {
        for (name, value) in policy.figures() {
            result.figure(&name, (value * 1e4).round() / 1e4);
        }
    }
    result.rows = levels.iter().flat_map(LevelResults::rows).collect();
    result.rows.extend(timelines.iter().map(TimelineResults::row));
    result.rows.extend(policies.iter().map(PolicyResults::row));
    result.columns = COLUMNS.to_vec();
    let mut panels = levels::panels(levels);
    panels.push(timeline::panel(timelines));
    result.picture = Some(Picture { title: "Effect of a flood on other traffic".into(), panels });
}

/// Adds the rows of the cells, and the worst ratio: of all cells, and of those without a known client.
fn conclude_conservation(cells: &[ConserveCell], result: &mut Experiment) {
    result.rows.extend(cells.iter().map(ConserveCell::row));
    let worst = |cells: &mut dyn Iterator<Item = &ConserveCell>| {
        cells.map(ConserveCell::ratio).fold(f64::INFINITY, f64::min)
    };
    let of_all = worst(&mut cells.iter());
    let alone = worst(&mut cells.iter().filter(|cell| !cell.has_known_client()));
    for (name, ratio) in [("admission_conserves", of_all), ("admission_conserves_alone", alone)] {
        if ratio.is_finite() {
            result.figure(name, (ratio * 1e4).round() / 1e4);
        }
    }
}

/// Prefix of a transport's figures; figures without a prefix are those of the default mode.
fn figure_prefix(transport: Transport) -> String {
    match transport.name() {
        DEFAULT_MODE => String::new(),
        _ if transport == Transport::kernel() => "kernel_".to_owned(),
        name => format!("{}_", name.replace(['+', '-'], "_")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_invalid_configuration() {
        let config = ProtectConfig { carriers: vec!["kernel".into()], ..ProtectConfig::default() };
        let check_error = |config: ProtectConfig| config.check().unwrap_err().to_string();
        assert!(check_error(ProtectConfig { load_core: 1, ..config.clone() }).contains("another"));
        assert!(
            check_error(ProtectConfig { seconds: f64::NAN, ..config.clone() }).contains("times")
        );
        assert!(check_error(ProtectConfig { repeats: 0, ..config.clone() }).contains("repeats"));
        let unknown = ProtectConfig { carriers: vec!["pulled".into()], ..config };
        assert!(check_error(unknown).contains("pulled"));
    }

    #[test]
    fn kernel_is_one_of_the_default_transports() {
        let transports = ProtectConfig::default().transports().unwrap();
        assert_eq!(transports.len(), DEFAULT_TRANSPORTS.len());
        assert!(transports.contains(&Transport::kernel()));
    }
}
