//! The experiment `protect`: what a flood does to everything else.
//!
//! Jonack and Murta's tests on the live machine: a steady flow out, system
//! time, ping and the flood's losses at eight levels; a server with the flood
//! on in the middle third of the time. And the question that they left open,
//! which packets to drop: a known client among strangers.

mod admission;
mod levels;
mod side;
mod timeline;

use serde::{Deserialize, Serialize};

use crate::cpu;
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::bench::Bench;
use crate::livelock::subject::{Carrier, DEFAULT_MODE};
use crate::netns;
use crate::plot::Picture;
use admission::Policy;
use levels::Levels;
use timeline::TimeLine;

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// What the flood does to the rest of the machine at eight levels.
    Levels,
    /// How soon a server recovers.
    TimeLine,
    /// A known client among strangers.
    Admission,
}

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProtectConfig {
    /// The only part to run; all when absent.
    pub only: Option<Part>,
    /// What carries the flooded service, by name: `kernel` and Tidegate's
    /// modes; those of the paper when empty.
    pub carriers: Vec<String>,
    /// How long to measure the flow, and ping, at each level, in seconds.
    pub seconds: f64,
    /// A third of the time line, in seconds.
    pub third_seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// The core that serves.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for ProtectConfig {
    fn default() -> Self {
        Self {
            only: None,
            carriers: Vec::new(),
            seconds: 1.0,
            third_seconds: 2.0,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

/// The mechanisms of the paper, Linux as it is, and ours.
const COMPARED: [&str; 4] = ["kernel", "moderated", "napi", DEFAULT_MODE];

impl ProtectConfig {
    /// Everything once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.25, third_seconds: 0.5, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let cores = cpu::cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must serve and another send; there are {cores} to choose from"
            )));
        }
        let sane = |seconds: f64| seconds > 0.0 && seconds <= 60.0;
        if !sane(self.seconds) || !sane(self.third_seconds) || self.repeats == 0 {
            return Err(LabError::Config(
                "times are above zero and up to 60 seconds, repeats above zero".into(),
            ));
        }
        self.carriers().map(drop)
    }

    fn carriers(&self) -> Result<Vec<Carrier>, LabError> {
        if !self.carriers.is_empty() {
            return self.carriers.iter().map(|name| name.parse()).collect();
        }
        Ok(Carrier::all().filter(|carrier| COMPARED.contains(&carrier.name())).collect())
    }
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When there is only one core, namespaces cannot be made, a server does not
/// start, or the flood cannot be sent.
pub fn run(config: &ProtectConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let bench = Bench::new(config.server_core, config.load_core)?;
    let wanted = |part| config.only.is_none_or(|only| only == part);
    let mut levels = Vec::new();
    if wanted(Part::Levels) {
        levels = levels::run(config, &bench)?;
    }
    let mut lines = Vec::new();
    if wanted(Part::TimeLine) {
        lines = timeline::run(config, &bench)?;
    }
    let mut policies = Vec::new();
    if wanted(Part::Admission) {
        policies = admission::run(config, &bench)?;
    }
    let mut result = Experiment::new("protect");
    describe(config, &mut result);
    conclude(&levels, &lines, &policies, &mut result);
    Ok(result)
}

fn describe(config: &ProtectConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} floods a sink with 64-byte packets by one interface; core {server} runs the \
         sink, all receive work, and what goes by the second interface: a flow of 10 Mb/s out \
         (1470-byte datagrams) and the answers to ping"
    ));
    result.note(
        "levels N1 to N8 are the paper's shares of the most that the generator sends; losses of \
         the flood are what the sink did not work on",
    );
    result.note(
        "time line: a client asks 1,000 times a second by the flooded interface, with drop-tail \
         there; the flood is on in the middle third, at the maximum; recovered is who answers 95 % \
         of 100 questions within 5 ms (or ten times what it took before)",
    );
    result.note(
        "admission: a client that has been seen for 3.5 s asks 5,000 times a second while 8,192 \
         strangers flood the service with what fills a line of 1 Gb/s, 1.488 million frames/s; \
         drop-tail is the same without admission",
    );
    result.note(
        "overrun: the strangers send as fast as one core can. The ring of a veth holds 256 frames \
         and cannot be made longer (cards have 1,024 and more): more comes than one core can even \
         look at, and the ring loses frames whoever sent them; `unseen` is the share of the \
         client's that it lost",
    );
    result.note(format!(
        "{} repeats of {} s at each level, carriers taking turns; medians count",
        config.repeats, config.seconds
    ));
}

/// What people see; the JSON has more.
const COLUMNS: [&str; 9] = [
    "carrier",
    "level",
    "offered_per_s",
    "flow_mbps",
    "ping_ms",
    "system_percent",
    "flood_loss_percent",
    "answered_during",
    "recovery_ms",
];

fn conclude(levels: &[Levels], lines: &[TimeLine], policies: &[Policy], result: &mut Experiment) {
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    for one in levels {
        let prefix = prefix(one.carrier);
        result.figure(&format!("{prefix}flow_kept_min"), rounded(one.flow_kept_min()));
        // JSON has no infinity: a ping that never came is left out, and the
        // row shows it.
        if one.ping_ratio_max().is_finite() {
            result.figure(&format!("{prefix}ping_ratio_max"), rounded(one.ping_ratio_max()));
        }
    }
    for one in lines {
        result.figure(&format!("{}recovery_ms", prefix(one.carrier)), rounded(one.recovery_ms()));
    }
    for policy in policies {
        for (name, value) in policy.figures() {
            result.figure(&name, (value * 1e4).round() / 1e4);
        }
    }
    result.rows = levels.iter().flat_map(Levels::rows).collect();
    result.rows.extend(lines.iter().map(TimeLine::row));
    result.rows.extend(policies.iter().map(Policy::row));
    result.columns = COLUMNS.to_vec();
    let mut panels = levels::panels(levels);
    panels.push(timeline::panel(lines));
    result.picture = Some(Picture { title: "What a flood does to the rest".into(), panels });
}

/// The figures without a prefix are those of the default mode.
fn prefix(carrier: Carrier) -> String {
    match carrier.name() {
        DEFAULT_MODE => String::new(),
        name => format!("{}_", name.replace('+', "_")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_cannot_be_run_is_refused() {
        let config = ProtectConfig { carriers: vec!["kernel".into()], ..ProtectConfig::default() };
        let refused = |config: ProtectConfig| config.check().unwrap_err().to_string();
        assert!(refused(ProtectConfig { load_core: 1, ..config.clone() }).contains("another"));
        assert!(refused(ProtectConfig { seconds: f64::NAN, ..config.clone() }).contains("times"));
        assert!(refused(ProtectConfig { repeats: 0, ..config.clone() }).contains("repeats"));
        let unknown = ProtectConfig { carriers: vec!["pulled".into()], ..config };
        assert!(refused(unknown).contains("pulled"));
    }
}
