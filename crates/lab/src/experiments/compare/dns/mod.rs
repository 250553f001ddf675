//! The experiment `dns`: peak answer rates of DNS servers on the same wire.
//!
//! One veth pair joins two network namespaces. The server has one core, which does all of its
//! work including receive processing; the load generator has another core. For each server a
//! search finds the offered load with the highest answer rate. That load is then measured
//! several times, the servers taking turns.

pub mod peak_search;
pub mod verify;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate_load::{LinkKind, format_number};

use crate::error::LabError;
use crate::experiments::kernel_best::{FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::cpu;
use crate::testbed::dns::servers::{self, ServerKind};
use crate::testbed::dns::tools::{DnsTool, DnsToolRates};
use crate::testbed::dns::{DnsMeasurement, DnsService, DnsTestbed};
use crate::testbed::netns;
use crate::testbed::receive_work::ReceiveWork;
use peak_search::{LoadPoint, PeakSearch, SearchEffort};
use verify::Answers;

/// Configuration of the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DnsConfig {
    /// Servers to measure. NSD is always the reference for correct answers, listed or not.
    pub servers: Vec<ServerKind>,
    /// Names in the zone; each name is queried.
    pub names: u64,
    /// Duration of the measurement at each load, in seconds.
    pub seconds: f64,
    /// Measurements of each server at its best load; the median counts.
    pub repeats: usize,
    /// First offered load and the step of the search, in requests per second.
    pub step_pps: f64,
    /// Search for a first look.
    pub quick_search: bool,
    /// Highest offered load, in requests per second.
    pub ceiling_pps: f64,
    /// Compare every answer with NSD's.
    pub verify: bool,
    /// Core of the server.
    pub server_core: usize,
    /// Core of the load generator.
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
            quick_search: false,
            ceiling_pps: 2_000_000.0,
            verify: true,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl DnsConfig {
    /// Shorter measurements and fewer repeats, for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.5, repeats: 1, step_pps: 200_000.0, quick_search: true, ..self }
    }

    /// Servers whose answers are compared with NSD's.
    fn verified_servers(&self) -> impl Iterator<Item = ServerKind> {
        let tidegate = [ServerKind::TidegateXdp, ServerKind::TidegateKernel];
        tidegate.into_iter().filter(|kind| self.verify && self.servers.contains(kind))
    }

    /// Comparisons of answers, and for each server its searches, the repeats and half the load.
    fn steps(&self) -> usize {
        let searches = self.servers.iter().map(|kind| kind.receive_works().len()).sum::<usize>();
        self.verified_servers().count() + searches + self.servers.len() * (self.repeats + 1)
    }
}

/// Results of one server with its best receive work.
struct ServerResults {
    kind: ServerKind,
    /// Peaks by receive work.
    first_pass: FirstPass<ReceiveWork>,
    best_offered_pps: f64,
    runs: Vec<DnsMeasurement>,
    /// Rates by each packaged program, in the order of [`DnsTool::ALL`].
    tool_runs: [Vec<DnsToolRates>; 2],
    half_load: Option<DnsMeasurement>,
}

impl ServerResults {
    fn peak_pps(&self) -> f64 {
        median(self.figure_of_runs(|run| run.load.result.answered_pps))
    }

    /// Median of the answers per second by a packaged program.
    fn tool_peak_pps(&self, index: usize) -> f64 {
        median(self.tool_runs[index].iter().map(|rates| rates.answered_pps))
    }

    fn figure_of_runs(&self, figure: impl Fn(&DnsMeasurement) -> f64) -> Vec<f64> {
        self.runs.iter().map(figure).collect()
    }

    fn row(&self) -> Value {
        let half_load = self.half_load.as_ref();
        let latency = half_load.map(|run| run.load.result.latency);
        let peaks = self.figure_of_runs(|run| run.load.result.answered_pps);
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        json!({
            "server": self.kind.name(),
            "receive_work": self.first_pass.best().kernel_name(),
            "answers_per_s": self.peak_pps().round(),
            "lowest": peaks.iter().copied().fold(f64::INFINITY, f64::min).round(),
            "highest": peaks.iter().copied().fold(0.0, f64::max).round(),
            "offered_per_s": self.best_offered_pps.round(),
            "server_core_busy_percent": rounded(median(self.figure_of_runs(|r| r.server_core.busy_percent))),
            "of_it_softirq_percent": rounded(median(self.figure_of_runs(|r| r.server_core.softirq_percent))),
            "load_core_busy_percent": rounded(median(self.figure_of_runs(|r| r.load_core.busy_percent))),
            "kxdpgun_answers_per_s": self.tool_peak_pps(0).round(),
            "dnsperf_answers_per_s": self.tool_peak_pps(1).round(),
            "half_load_per_s": half_load.map(|run| run.load.result.sent_pps.round()),
            "half_load_p50_us": latency.map(|latency| rounded(latency.p50_us)),
            "half_load_p99_us": latency.map(|latency| rounded(latency.p99_us)),
            "half_load_server_core_busy_percent":
                half_load.map(|run| rounded(run.server_core.busy_percent)),
        })
    }
}

/// Runs the experiment. Reports progress on standard error.
///
/// # Errors
/// When there is only one core, a namespace cannot be created, a server is not installed or
/// does not start, or the load cannot be sent.
pub fn run(config: &DnsConfig) -> Result<Experiment, LabError> {
    check_config(config)?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let testbed =
        DnsTestbed::new(config.names, config.server_core, config.load_core, LinkKind::Xdp)?;
    let mut result = Experiment::new("dns");
    describe(config, &mut result);
    let progress = Progress::new(config.steps());
    if config.verify {
        verify_answers(config, &testbed, &progress, &mut result)?;
    }
    let mut results = Vec::new();
    for &kind in &config.servers {
        results.push(ServerResults::choose(config, &testbed, &progress, kind)?);
    }
    for repeat in 1..=config.repeats {
        for server_results in &mut results {
            let server = server_results.start(&testbed)?;
            let offered_pps = server_results.best_offered_pps;
            let run = testbed.measure(&server, Some(offered_pps), config.seconds)?;
            let mut line = format_number(run.load.result.answered_pps.round());
            server_results.runs.push(run);
            for (tool, runs) in DnsTool::ALL.into_iter().zip(&mut server_results.tool_runs) {
                let rates = testbed.measure_tool(tool, &server, offered_pps, config.seconds)?;
                let answered = format_number(rates.answered_pps.round());
                line = format!("{line}, by {} {answered}", tool.name());
                runs.push(rates);
            }
            progress.step(format_args!(
                "{:<16} repeat {repeat}: {line} answers/s",
                server_results.kind.name()
            ));
        }
    }
    for server_results in &mut results {
        let server = server_results.start(&testbed)?;
        server_results.half_load = Some(testbed.measure(
            &server,
            Some(server_results.peak_pps() / 2.0),
            config.seconds,
        )?);
        progress.step(format_args!("{:<16} half load", server_results.kind.name()));
    }
    conclude(&results, &mut result);
    Ok(result)
}

fn check_config(config: &DnsConfig) -> Result<(), LabError> {
    let cores = cpu::available_cores();
    if cores < 2 || config.server_core == config.load_core {
        return Err(LabError::Config(format!(
            "one core must run the server, another the generator; {cores} available"
        )));
    }
    let is_valid = config.seconds > 0.0 && config.step_pps > 0.0 && config.names > 0;
    if !is_valid || config.repeats == 0 || config.servers.is_empty() {
        return Err(LabError::Config(
            "seconds, step, names, repeats and servers must all be above zero".into(),
        ));
    }
    // Checked first, before minutes are spent on the other servers.
    DnsTool::ALL.into_iter().try_for_each(DnsTool::check_installed)?;
    for kind in &config.servers {
        match kind {
            ServerKind::Knot | ServerKind::KnotXdp => servers::check_installed("knotd", "knot")?,
            ServerKind::Nsd => servers::check_installed("nsd", "nsd")?,
            _ => {}
        }
    }
    if config.verify { servers::check_installed("nsd", "nsd") } else { Ok(()) }
}

fn describe(config: &DnsConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {server} runs the server with all its receive processing; core {load} runs the \
         load generator (AF_XDP, open loop), and a thread on it receives the replies"
    ));
    result.note(format!(
        "tidegate-xdp: native AF_XDP, busy-polls its veth on core {server}; the others have the \
         receive work that a search of the peak with each found best, named in the table: softirqs \
         where Linux puts them, on core {load} (kernel-softirq), RPS to core {server} (kernel-rps), \
         a NAPI thread there (kernel-thread), the server's own calls (kernel-busy-poll; \
         net.core.busy_poll for Knot DNS and NSD), a timer on core {server} that polls every 20 us, \
         as a coalescing NIC would (kernel-timer)"
    ));
    result.note(
        "kxdpgun sends the same load by AF_XDP; dnsperf, on kernel sockets, waits for answers, so \
         its own core limits it",
    );
    result.note(format!(
        "{} names, one query each, EDNS 1232; {} measurements of {} s at each server's best \
         offered load, servers taking turns; the median counts",
        config.names, config.repeats, config.seconds
    ));
}

impl ServerResults {
    /// Searches the peak with each receive work, and chooses the best.
    fn choose(
        config: &DnsConfig,
        testbed: &DnsTestbed,
        progress: &Progress,
        kind: ServerKind,
    ) -> Result<Self, LabError> {
        let mut peaks = Vec::new();
        let name = |work: ReceiveWork| work.kernel_name().to_owned();
        let first_pass =
            FirstPass::measure(Goal::Highest, kind.receive_works(), name, |receive_work| {
                let peak = find_peak(config, testbed, progress, kind, receive_work)?;
                peaks.push((receive_work, peak.offered_pps));
                Ok(peak.answered_pps)
            })?;
        let best = first_pass.best();
        let offered_pps = peaks.iter().find(|(work, _)| *work == best).map(|(_, pps)| *pps);
        Ok(Self {
            kind,
            first_pass,
            best_offered_pps: offered_pps.unwrap_or(config.step_pps),
            runs: Vec::new(),
            tool_runs: Default::default(),
            half_load: None,
        })
    }

    fn start(&self, testbed: &DnsTestbed) -> Result<DnsService, LabError> {
        testbed.start_with(self.kind, self.first_pass.best())
    }
}

fn find_peak(
    config: &DnsConfig,
    testbed: &DnsTestbed,
    progress: &Progress,
    kind: ServerKind,
    receive_work: ReceiveWork,
) -> Result<LoadPoint, LabError> {
    let server = testbed.start_with(kind, receive_work)?;
    if !server.detail.is_empty() {
        progress.line(format_args!("{:<16} {}", kind.name(), server.detail));
    }
    // Coarse: the best of many ways is sought, not the last percent.
    let effort = if config.quick_search { SearchEffort::QUICK } else { SearchEffort::WHOLE };
    let mut search = PeakSearch::new(2.0 * config.step_pps, config.ceiling_pps, effort);
    let seconds = (config.seconds / 4.0).clamp(0.2, 0.5);
    while let Some(offered_pps) = search.next_load() {
        let run = testbed.measure(&server, Some(offered_pps), seconds)?;
        search.record(LoadPoint { offered_pps, answered_pps: run.load.result.answered_pps });
    }
    let lowest = LoadPoint { offered_pps: config.step_pps, answered_pps: 0.0 };
    let best = search.best().unwrap_or(lowest);
    progress.step(format_args!(
        "{:<16} {:<22} best {:>10} answers/s at {:>10}/s offered",
        kind.name(),
        receive_work.kernel_name(),
        format_number(best.answered_pps.round()),
        format_number(best.offered_pps)
    ));
    Ok(best)
}

fn verify_answers(
    config: &DnsConfig,
    testbed: &DnsTestbed,
    progress: &Progress,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let answers_of = |kind: ServerKind| -> Result<Answers, LabError> {
        progress.line(format_args!("{:<16} querying all {} names", kind.name(), config.names));
        let server = testbed.start(kind)?;
        verify::collect(testbed, &server)
    };
    let expected = answers_of(ServerKind::Nsd)?;
    let mut wrong = 0;
    for kind in config.verified_servers() {
        let comparison = verify::compare_all(&expected, &answers_of(kind)?);
        progress.step(format_args!(
            "{:<16} {} answers are wrong",
            kind.name(),
            comparison.wrong_count()
        ));
        result.note(format!(
            "{}: {} answers compared with NSD's, {} different, {} missing",
            kind.name(),
            comparison.compared,
            comparison.different,
            comparison.unanswered
        ));
        comparison.examples.iter().for_each(|example| result.note(example.clone()));
        wrong += comparison.wrong_count();
    }
    result.figure("wrong_answers", wrong as f64);
    Ok(())
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 11] = [
    "server",
    "receive_work",
    "answers_per_s",
    "kxdpgun_answers_per_s",
    "dnsperf_answers_per_s",
    "lowest",
    "highest",
    "offered_per_s",
    "server_core_busy_percent",
    "half_load_p50_us",
    "half_load_p99_us",
];

fn conclude(results: &[ServerResults], result: &mut Experiment) {
    let of = |kind| results.iter().find(|one| one.kind == kind);
    if let Some(tidegate) = of(ServerKind::TidegateXdp) {
        result.figure("tidegate_qps", tidegate.peak_pps().round());
        let ratios = [
            ("qps_ratio", ServerKind::TidegateKernel),
            ("knot_xdp_ratio", ServerKind::KnotXdp),
            ("knot_ratio", ServerKind::Knot),
            ("nsd_ratio", ServerKind::Nsd),
        ];
        for (name, other) in ratios.into_iter().filter_map(|(name, kind)| Some((name, of(kind)?))) {
            let peak_pps = other.peak_pps();
            let ratio = tidegate.peak_pps() / peak_pps.max(1.0);
            result.compare_with_best(name, ratio, other.first_pass.rows(peak_pps));
            for (index, tool) in DnsTool::ALL.into_iter().enumerate() {
                if !other.tool_runs[index].is_empty() {
                    let rates = [tidegate, other].map(|one| one.tool_peak_pps(index));
                    let figure = format!("{name}_{}", tool.name());
                    result.figure(&figure, round_to_thousandths(rates[0] / rates[1].max(1.0)));
                }
            }
        }
    }
    let limited = |server_results: &&ServerResults| {
        server_results.runs.iter().any(|run| run.load.result.generator_behind)
    };
    for server_results in results.iter().filter(limited) {
        result.note(format!("{}: limited by the load generator", server_results.kind.name()));
    }
    result.rows = results.iter().map(ServerResults::row).collect();
    result.columns = COLUMNS.to_vec();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_invalid_configuration() {
        let same = DnsConfig { load_core: 1, ..DnsConfig::default() };
        assert!(check_config(&same).unwrap_err().to_string().contains("another the generator"));
        let none = DnsConfig { repeats: 0, ..DnsConfig::default() };
        assert!(check_config(&none).is_err());
    }

    #[test]
    fn compares_medians() {
        let run = |answered_pps: f64| DnsMeasurement {
            load: tidegate_load::LoadReport {
                line: String::new(),
                port_drops: Vec::new(),
                result: tidegate_load::LoadResult { answered_pps, ..Default::default() },
            },
            server_core: Default::default(),
            load_core: Default::default(),
        };
        let found = |kind, rates: [f64; 3]| ServerResults {
            kind,
            best_offered_pps: 1.0,
            first_pass: FirstPass::measure(
                Goal::Highest,
                kind.receive_works(),
                |work| work.kernel_name().to_owned(),
                |_| Ok(1.0),
            )
            .unwrap(),
            runs: rates.map(run).into(),
            tool_runs: Default::default(),
            half_load: None,
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
