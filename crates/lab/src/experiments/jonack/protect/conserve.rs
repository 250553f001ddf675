//! Total service with admission over that without: admission must conserve work.
//!
//! A few or many unknown sources, alone or beside a known client, ask from once to ten times what
//! the server can do. Work of 20 us a request keeps these rates within what one core really sends.
//! DNS tools are further lone sources, at the rates of a DNS server.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::ProtectConfig;
use crate::error::LabError;
use crate::report::progress::Progress;
use crate::testbed::client::{Client, RequestKind, answered_share};
use crate::testbed::dns::servers::{Server, ServerKind};
use crate::testbed::dns::tools::{DnsTool, DnsToolRun};
use crate::testbed::flood::{CLIENT_ADDRESS, FloodSource, FloodTestbed, LOAD_ADDRESS, Receiver};
use crate::testbed::folder;
use crate::testbed::test_case::{EchoService, FloodedServer, Transport, Zone};

/// Work per request in nanoseconds.
const WORK_PER_REQUEST_NS: u64 = 20_000;
/// Requests per second of the known client.
const CLIENT_REQUESTS_PER_S: f64 = 2_000.0;
/// Numbers of unknown sources.
const SOURCE_COUNTS: [u32; 4] = [1, 2, 10, 1000];
/// Offered load as a multiple of the capacity.
const LOAD_FACTORS: [f64; 4] = [1.0, 2.0, 5.0, 10.0];
/// Time to learn the known client: two whole periods of one second, the first of them partial.
const LEARNING_TIME: Duration = Duration::from_millis(3_000);
/// Time of a load before its measurement.
const WARM_UP: Duration = Duration::from_millis(300);
/// Flag that turns admission on.
const ADMISSION: &str = "--admission";

/// Sources of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sources {
    /// Unknown sources, alone or beside a known client.
    Unknown { count: u32, known_client: bool },
    /// A packaged program with one address.
    Tool(DnsTool),
}

/// One run: packets offered and served per second.
#[derive(Clone, Copy, Debug, Default)]
struct ConserveRun {
    offered_pps: f64,
    served_pps: f64,
    known_answered: Option<f64>,
}

/// Runs of one cell, with admission and without, in pairs.
pub(super) struct ConserveCell {
    sources: Sources,
    factor: f64,
    runs: Vec<(ConserveRun, ConserveRun)>,
}

/// Measures all cells: each repeat with admission and without, one after the other.
pub(super) fn run(
    config: &ProtectConfig,
    testbed: &FloodTestbed,
) -> Result<Vec<ConserveCell>, LabError> {
    DnsTool::ALL.into_iter().try_for_each(DnsTool::check_installed)?;
    let capacity_pps = measure_capacity(config, testbed)?;
    let zone = Zone::write()?;
    let counts = if config.is_quick() { &SOURCE_COUNTS[..1] } else { &SOURCE_COUNTS[..] };
    let unknown =
        |known_client| counts.iter().map(move |&count| Sources::Unknown { count, known_client });
    let rows = unknown(false).chain(unknown(true)).chain(DnsTool::ALL.map(Sources::Tool));
    let mut cells = Vec::new();
    let progress = Progress::of_part("conserve", rows.clone().count() * config.repeats);
    for sources in rows {
        for repeat in 1..=config.repeats {
            let measure = |admission: bool| match sources {
                Sources::Unknown { count, known_client } => {
                    let server = UnknownSourcesCase { count, known_client, admission };
                    server.measure(config, testbed, capacity_pps)
                }
                Sources::Tool(tool) => measure_tool(tool, config, testbed, &zone, admission),
            };
            let (with, without) = (measure(true)?, measure(false)?);
            for ((factor, with), (_, without)) in with.into_iter().zip(without) {
                report_run(&progress, repeat, sources, factor, &with, &without);
                let same =
                    |cell: &&mut ConserveCell| cell.sources == sources && cell.factor == factor;
                match cells.iter_mut().find(same) {
                    Some(cell) => cell.runs.push((with, without)),
                    None => {
                        let runs = vec![(with, without)];
                        cells.push(ConserveCell { sources, factor, runs });
                    }
                }
            }
            progress.step(format_args!("{repeat} {}: measured", sources.name()));
        }
    }
    Ok(cells)
}

fn report_run(
    progress: &Progress,
    repeat: usize,
    sources: Sources,
    factor: f64,
    with: &ConserveRun,
    without: &ConserveRun,
) {
    let known = with.known_answered.map_or(String::new(), |share| {
        format!(", {:.1} % of the known client's answered", 100.0 * share)
    });
    progress.line(format_args!(
        "{repeat} {} at {factor}: {:.0} of {:.0} k/s served with admission, {:.0} without{known}",
        sources.name(),
        with.served_pps / 1e3,
        with.offered_pps / 1e3,
        without.served_pps / 1e3
    ));
}

/// Requests per second that the server serves without admission, when far more arrive.
fn measure_capacity(config: &ProtectConfig, testbed: &FloodTestbed) -> Result<f64, LabError> {
    let case = UnknownSourcesCase { count: 10, known_client: false, admission: false };
    let mut server = case.start(testbed, Duration::from_secs(30))?;
    let time = Duration::from_secs_f64(config.seconds);
    let FloodedServer { flood, meter, .. } = &mut server;
    Ok(testbed.measure(flood, meter, Some(500_000.0), WARM_UP, time)?.goodput_pps)
}

/// An echo service and its unknown sources.
#[derive(Clone, Copy, Debug)]
struct UnknownSourcesCase {
    count: u32,
    known_client: bool,
    admission: bool,
}

impl UnknownSourcesCase {
    fn start(self, testbed: &FloodTestbed, limit: Duration) -> Result<FloodedServer, LabError> {
        // The route for replies to the unknown sources.
        let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
        let mut flags = vec!["--route", &route];
        flags.extend(self.admission.then_some(ADMISSION));
        let service = EchoService {
            transport: Transport::tidegate(),
            work_ns: WORK_PER_REQUEST_NS,
            sink: false,
            flags: &flags,
            flood_source: FloodSource::Sources(self.count),
        };
        service.start(testbed, limit)
    }

    /// Measures one server at all loads, from the lowest.
    fn measure(
        self,
        config: &ProtectConfig,
        testbed: &FloodTestbed,
        capacity_pps: f64,
    ) -> Result<Vec<(f64, ConserveRun)>, LabError> {
        let time = Duration::from_secs_f64(config.seconds);
        let limit = (WARM_UP + time) * 4 + LEARNING_TIME + Duration::from_secs(30);
        let mut server = self.start(testbed, limit)?;
        let namespace = &testbed.pair.a.namespace;
        let client = self
            .known_client
            .then(|| {
                Client::start(
                    namespace,
                    server.target,
                    RequestKind::Numbered,
                    CLIENT_REQUESTS_PER_S,
                    config.load_core,
                )
            })
            .transpose()?;
        // Without admission there is nothing to learn.
        if client.is_some() && self.admission {
            thread::sleep(LEARNING_TIME);
        }
        let FloodedServer { flood, meter, .. } = &mut server;
        let mut runs = Vec::new();
        for factor in LOAD_FACTORS {
            let rate_pps = Some(factor * capacity_pps);
            flood.set_rate(rate_pps)?;
            thread::sleep(WARM_UP);
            let from_s = client.as_ref().map(Client::now_s);
            let load = testbed.measure(flood, meter, rate_pps, Duration::ZERO, time)?;
            let to_s = client.as_ref().map(Client::now_s);
            let run = ConserveRun {
                offered_pps: load.offered_pps,
                served_pps: load.goodput_pps,
                known_answered: None,
            };
            runs.push((factor, run, from_s.zip(to_s)));
        }
        flood.set_rate(Some(0.0))?;
        let records = client.map(Client::stop).transpose()?.unwrap_or_default();
        let finished = runs.into_iter().map(|(factor, run, times)| {
            let known_answered = times.map(|(from_s, to_s)| answered_share(&records, from_s, to_s));
            (factor, ConserveRun { known_answered, ..run })
        });
        Ok(finished.collect())
    }
}

/// Measures a DNS server with a tool as its only source. dnsperf waits for answers, so it has one
/// load of its own.
fn measure_tool(
    tool: DnsTool,
    config: &ProtectConfig,
    testbed: &FloodTestbed,
    zone: &Zone,
    admission: bool,
) -> Result<Vec<(f64, ConserveRun)>, LabError> {
    let folder = folder::private()?;
    let mut setup = zone.setup(folder.path(), testbed);
    setup.flags.extend(admission.then(|| ADMISSION.to_owned()));
    let queries = zone.write_queries(folder.path())?;
    let has_all_loads = tool == DnsTool::Kxdpgun && !config.is_quick();
    let factors = if has_all_loads { &LOAD_FACTORS[..] } else { &LOAD_FACTORS[..1] };
    let mut runs = Vec::new();
    for &factor in factors {
        testbed.prepare(Receiver::Server)?;
        let server = Server::start(ServerKind::TidegateXdp, &setup, &testbed.pair.b)?;
        let run = DnsToolRun {
            pair: &testbed.pair,
            cores: &[config.load_core],
            source: CLIENT_ADDRESS,
            target: server.target.ip(),
            queries: &queries,
        };
        let measured = Duration::from_secs_f64(config.seconds);
        let rates = tool.measure(&run, factor * DNS_CAPACITY_PPS, measured)?;
        let (offered_pps, served_pps) = (rates.sent_pps, rates.answered_pps);
        runs.push((factor, ConserveRun { offered_pps, served_pps, known_answered: None }));
    }
    Ok(runs)
}

/// Queries per second that a DNS server of Tidegate answers on one core, about: the loads of
/// kxdpgun are multiples of it, as far as kxdpgun makes them.
const DNS_CAPACITY_PPS: f64 = 200_000.0;

impl Sources {
    fn name(self) -> String {
        match self {
            Self::Unknown { count, known_client } => {
                let known = if known_client { " and a known client" } else { "" };
                format!("{count} source{}{known}", if count == 1 { "" } else { "s" })
            }
            Self::Tool(tool) => tool.name().into(),
        }
    }
}

impl ConserveCell {
    /// Worst ratio of the packets served with admission and without, of all repeats.
    pub(super) fn ratio(&self) -> f64 {
        let ratio = |(with, without): &(ConserveRun, ConserveRun)| {
            with.served_pps / without.served_pps.max(1.0)
        };
        self.runs.iter().map(ratio).fold(f64::INFINITY, f64::min)
    }

    /// True if a known client asks as well.
    pub(super) fn has_known_client(&self) -> bool {
        matches!(self.sources, Sources::Unknown { known_client: true, .. })
    }

    pub(super) fn row(&self) -> Value {
        let mean = |figure: fn(&(ConserveRun, ConserveRun)) -> f64| {
            (self.runs.iter().map(figure).sum::<f64>() / self.runs.len() as f64).round()
        };
        let known = self.runs.iter().filter_map(|(with, _)| with.known_answered);
        let known = known.fold(f64::INFINITY, f64::min);
        json!({
            "test": "service with admission and without",
            "carrier": self.sources.name(),
            "level": format!("{} x", self.factor),
            "offered_per_s": mean(|(with, _)| with.offered_pps),
            "served_per_s": mean(|(with, _)| with.served_pps),
            "served_without_per_s": mean(|(_, without)| without.served_pps),
            "conserved": (self.ratio() * 1e4).round() / 1e4,
            "answered_during": known.is_finite().then_some((known * 1e4).round() / 1e4),
        })
    }
}
