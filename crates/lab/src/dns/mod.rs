//! The experiment `dns`: DNS servers on the same wire, each at its best.
//!
//! One veth pair joins two namespaces. The server has one core and pays there
//! for all of its work, receiving included; the load generator has another.
//! Peaks are compared: for each server the offered load at which it answers
//! most is looked for, then measured again several times, the servers taking
//! turns.

pub mod bench;
pub mod servers;
pub mod sweep;
pub mod verify;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cpu;
use crate::error::LabError;
use crate::experiment::{Experiment, number};
use crate::load::LinkKind;
use crate::netns;
use bench::{Bench, Measured};
use servers::ServerKind;
use sweep::{PeakSearch, Point, median};
use verify::Answers;

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DnsConfig {
    /// Which servers; the oracle for right answers is NSD, listed or not.
    pub servers: Vec<ServerKind>,
    /// Names in the zone, each asked for.
    pub names: u64,
    /// How long to measure at each load, in seconds.
    pub seconds: f64,
    /// How often to measure each server at its best; the median counts.
    pub repeats: usize,
    /// The first offered load and the step up, in requests per second.
    pub step_pps: f64,
    /// The highest offered load.
    pub ceiling_pps: f64,
    /// Whether to compare every answer with NSD's.
    pub verify: bool,
    /// The core that serves.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for DnsConfig {
    fn default() -> Self {
        Self {
            servers: ServerKind::COMPARED.to_vec(),
            names: 100_000,
            seconds: 2.0,
            repeats: 5,
            step_pps: 100_000.0,
            ceiling_pps: 2_000_000.0,
            verify: true,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl DnsConfig {
    /// Shorter measurements, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.5, repeats: 3, ..self }
    }
}

/// What was found out about one server.
struct Found {
    kind: ServerKind,
    best_offered: f64,
    runs: Vec<Measured>,
    moderate: Option<Measured>,
}

impl Found {
    fn peak(&self) -> f64 {
        median(&self.each(|run| run.load.result.answered_pps))
    }

    fn each(&self, figure: impl Fn(&Measured) -> f64) -> Vec<f64> {
        self.runs.iter().map(figure).collect()
    }

    fn row(&self) -> Value {
        let moderate = self.moderate.as_ref();
        let latency = moderate.map(|run| run.load.result.latency);
        let peaks = self.each(|run| run.load.result.answered_pps);
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        json!({
            "server": self.kind.name(),
            "answers_per_s": self.peak().round(),
            "lowest": peaks.iter().copied().fold(f64::INFINITY, f64::min).round(),
            "highest": peaks.iter().copied().fold(0.0, f64::max).round(),
            "offered_per_s": self.best_offered.round(),
            "server_core_busy_percent": rounded(median(&self.each(|r| r.server_core.busy_percent))),
            "of_it_softirq_percent": rounded(median(&self.each(|r| r.server_core.softirq_percent))),
            "load_core_busy_percent": rounded(median(&self.each(|r| r.load_core.busy_percent))),
            "half_load_per_s": moderate.map(|run| run.load.result.sent_pps.round()),
            "half_load_p50_us": latency.map(|latency| rounded(latency.p50_us)),
            "half_load_p99_us": latency.map(|latency| rounded(latency.p99_us)),
            "half_load_server_core_busy_percent":
                moderate.map(|run| rounded(run.server_core.busy_percent)),
        })
    }
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When there is only one core, namespaces cannot be made, a server is not
/// installed or does not start, or the load cannot be sent.
pub fn run(config: &DnsConfig) -> Result<Experiment, LabError> {
    check(config)?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let bench = Bench::new(config.names, config.server_core, config.load_core, LinkKind::Xdp)?;
    let mut result = Experiment::new("dns");
    describe(config, &mut result);
    if config.verify {
        verify_answers(config, &bench, &mut result)?;
    }
    let mut found = Vec::new();
    for &kind in &config.servers {
        found.push(find_peak(config, &bench, kind)?);
    }
    for repeat in 1..=config.repeats {
        for one in &mut found {
            let server = bench.start(one.kind)?;
            let run = bench.measure(&server, Some(one.best_offered), config.seconds)?;
            let answered = number(run.load.result.answered_pps.round());
            eprintln!("{:<16} repeat {repeat}: {answered} answers/s", one.kind.name());
            one.runs.push(run);
        }
    }
    for one in &mut found {
        let server = bench.start(one.kind)?;
        one.moderate = Some(bench.measure(&server, Some(one.peak() / 2.0), config.seconds)?);
    }
    conclude(&found, &mut result);
    Ok(result)
}

fn check(config: &DnsConfig) -> Result<(), LabError> {
    let cores = cpu::cores();
    if cores < 2 || config.server_core == config.load_core {
        return Err(LabError::Config(format!(
            "one core must serve and another send; there are {cores} to choose from"
        )));
    }
    let sane = config.seconds > 0.0 && config.step_pps > 0.0 && config.names > 0;
    if !sane || config.repeats == 0 || config.servers.is_empty() {
        return Err(LabError::Config(
            "seconds, step, names, repeats and servers must all be above zero".into(),
        ));
    }
    // Early, before minutes are spent on the others.
    for kind in &config.servers {
        match kind {
            ServerKind::Knot | ServerKind::KnotXdp => servers::installed("knotd", "knot")?,
            ServerKind::Nsd => servers::installed("nsd", "nsd")?,
            _ => {}
        }
    }
    if config.verify { servers::installed("nsd", "nsd") } else { Ok(()) }
}

fn describe(config: &DnsConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {server} serves and pays for all receive work of the server; core {load} runs the \
         load generator (AF_XDP, open loop), and a thread on it receives the answers"
    ));
    result.note(format!(
        "tidegate-xdp: native AF_XDP, busy polls its veth on core {server}; knot-xdp: native XDP, a \
         timer on core {server} polls the veth every 20 us, as a card with coalescing would; kernel \
         sockets (tidegate-kernel, knot, nsd): RPS moves receiving to core {server}"
    ));
    result.note(format!(
        "{} names, one question each, EDNS 1232; {} measurements of {} s at each server's best \
         offered load, servers taking turns; the median counts",
        config.names, config.repeats, config.seconds
    ));
}

fn find_peak(config: &DnsConfig, bench: &Bench, kind: ServerKind) -> Result<Found, LabError> {
    let server = bench.start(kind)?;
    if !server.detail.is_empty() {
        eprintln!("{:<16} {}", kind.name(), server.detail);
    }
    let mut search = PeakSearch::new(config.step_pps, config.ceiling_pps);
    while let Some(offered) = search.next_load() {
        let run = bench.measure(&server, Some(offered), config.seconds.min(1.0))?;
        let load = &run.load.result;
        eprintln!(
            "{:<16} offered {:>10}/s  answered {:>10}/s  p50 {:>8.1} us  p99 {:>8.1} us  cores: \
             server {:>3.0} %, load {:>3.0} %{}",
            kind.name(),
            number(offered),
            number(load.answered_pps.round()),
            load.latency.p50_us,
            load.latency.p99_us,
            run.server_core.busy_percent,
            run.load_core.busy_percent,
            if load.generator_behind { "  (generator behind)" } else { "" },
        );
        search.record(Point { offered, answered: load.answered_pps });
    }
    let best_offered = search.best().map_or(config.step_pps, |best| best.offered);
    Ok(Found { kind, best_offered, runs: Vec::new(), moderate: None })
}

fn verify_answers(
    config: &DnsConfig,
    bench: &Bench,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let answers_of = |kind: ServerKind| -> Result<Answers, LabError> {
        eprintln!("{:<16} asking for all {} names", kind.name(), config.names);
        verify::collect(bench, &bench.start(kind)?)
    };
    let expected = answers_of(ServerKind::Nsd)?;
    let mut wrong = 0;
    let tidegate = [ServerKind::TidegateXdp, ServerKind::TidegateKernel];
    for kind in tidegate.into_iter().filter(|kind| config.servers.contains(kind)) {
        let comparison = verify::compare_all(&expected, &answers_of(kind)?);
        eprintln!("{:<16} {} answers are wrong", kind.name(), comparison.wrong());
        result.note(format!(
            "{}: {} answers compared with NSD's, {} different, {} missing",
            kind.name(),
            comparison.compared,
            comparison.different,
            comparison.unanswered
        ));
        comparison.examples.iter().for_each(|example| result.note(example.clone()));
        wrong += comparison.wrong();
    }
    result.figure("wrong_answers", wrong as f64);
    Ok(())
}

/// What people see; the JSON has more.
const COLUMNS: [&str; 8] = [
    "server",
    "answers_per_s",
    "lowest",
    "highest",
    "offered_per_s",
    "server_core_busy_percent",
    "half_load_p50_us",
    "half_load_p99_us",
];

fn conclude(found: &[Found], result: &mut Experiment) {
    let peak = |kind| found.iter().find(|one| one.kind == kind).map(Found::peak);
    if let Some(tidegate) = peak(ServerKind::TidegateXdp) {
        result.figure("tidegate_qps", tidegate.round());
        let ratios = [
            ("qps_ratio", ServerKind::TidegateKernel),
            ("knot_xdp_ratio", ServerKind::KnotXdp),
            ("knot_ratio", ServerKind::Knot),
            ("nsd_ratio", ServerKind::Nsd),
        ];
        for (name, kind) in ratios {
            if let Some(other) = peak(kind).filter(|other| *other > 0.0) {
                result.figure(name, (tidegate / other * 1000.0).round() / 1000.0);
            }
        }
    }
    let limited = |one: &&Found| one.runs.iter().any(|run| run.load.result.generator_behind);
    for one in found.iter().filter(limited) {
        result.note(format!("{}: the load generator was the limit", one.kind.name()));
    }
    result.rows = found.iter().map(Found::row).collect();
    result.columns = COLUMNS.to_vec();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_cannot_be_run_is_refused() {
        let same = DnsConfig { load_core: 1, ..DnsConfig::default() };
        assert!(check(&same).unwrap_err().to_string().contains("another send"));
        let none = DnsConfig { repeats: 0, ..DnsConfig::default() };
        assert!(check(&none).is_err());
    }

    #[test]
    fn ratios_are_of_medians() {
        let run = |answered_pps: f64| Measured {
            load: crate::load::LoadReport {
                line: String::new(),
                port_drops: Vec::new(),
                result: crate::load::LoadResult { answered_pps, ..Default::default() },
            },
            server_core: Default::default(),
            load_core: Default::default(),
        };
        let found = |kind, rates: [f64; 3]| Found {
            kind,
            best_offered: 1.0,
            runs: rates.map(run).into(),
            moderate: None,
        };
        let all = [
            found(ServerKind::TidegateXdp, [600.0, 300.0, 500.0]),
            found(ServerKind::TidegateKernel, [200.0, 250.0, 900.0]),
        ];
        let mut result = Experiment::new("dns");
        conclude(&all, &mut result);
        assert_eq!(result.figures["qps_ratio"], 2.0);
        assert!(!result.figures.contains_key("knot_xdp_ratio"));
        assert_eq!(result.rows[0]["highest"], 600.0);
    }
}
