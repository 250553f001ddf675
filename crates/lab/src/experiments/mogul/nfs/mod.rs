//! Experiment nfs: calls to a network file service that are answered while a flood arrives.
//!
//! Mogul and Ramakrishnan name the NFS server as a victim of receive livelock: a host that is busy
//! with packets that nobody wants answers no reads. Clients of libnfs read from the server at a
//! constant rate, and a flood to the server's address is offered at growing rates.

mod client;
mod servers;

use std::net::SocketAddrV4;
use std::time::Duration;

use serde_json::{Value, json};

use self::client::{CONNECTIONS, ClientProgram, OUTSTANDING};
use self::servers::{NfsServer, has_ganesha};
use crate::error::LabError;
use crate::experiments::goodput_curve::{GoodputCurve, LoadStep};
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_thousandths;
use crate::testbed::cpu;
use crate::testbed::flood::{FloodSource, FloodTestbed, GIGABIT_LINE_PPS};
use crate::testbed::load::flood::{FLOOD_NOTE, Flood};
use crate::testbed::load::syn_flood::{SYN_SOURCES, syn_frames};
use crate::testbed::netns;
use crate::testbed::receive_work::ReceiveWork;

/// Port that the flood is sent to: that of NFS, which has no UDP socket.
const FLOODED_PORT: u16 = 2049;

/// Payload of the UDP flood.
const PAYLOAD: &[u8] = &[0x7e; 4];

/// Time of a load before its measurement.
const SETTLING: Duration = Duration::from_millis(500);

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct NfsLabConfig {
    /// Calls that the clients make, per second.
    pub calls_per_second: f64,
    /// Rates of the flood in packets per second, besides none and the maximum.
    pub loads_pps: Vec<f64>,
    /// Measure only the servers whose names contain this text.
    pub only: Option<String>,
    /// Measuring time at each load, in seconds.
    pub seconds: f64,
    /// Number of repeats; the median counts.
    pub repeats: usize,
    /// Core that runs the server.
    pub server_core: usize,
    /// Core that runs the clients and the flood.
    pub load_core: usize,
}

impl Default for NfsLabConfig {
    fn default() -> Self {
        Self {
            calls_per_second: 8_000.0,
            loads_pps: vec![100e3, 300e3, GIGABIT_LINE_PPS],
            only: None,
            seconds: 2.0,
            repeats: 1,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl NfsLabConfig {
    /// No load and the maximum, briefly.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { loads_pps: Vec::new(), seconds: 0.5, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        if cpu::available_cores() < 2 || self.server_core == self.load_core {
            return Err(LabError::Config("this experiment needs two cores".to_owned()));
        }
        let is_valid = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        let mut rates = self.loads_pps.iter().chain([&self.calls_per_second]);
        if !is_valid || rates.any(|rate| !(rate.is_finite() && *rate > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats, calls and loads must all be above zero".into(),
            ));
        }
        Ok(())
    }

    fn servers(&self) -> Result<Vec<NfsServer>, LabError> {
        let all = all_servers();
        let Some(text) = &self.only else { return Ok(all) };
        let selected = all.iter().copied().filter(|server| server.name().contains(text.as_str()));
        let selected: Vec<NfsServer> = selected.collect();
        if selected.is_empty() {
            let names: Vec<String> = all.iter().map(|server| server.name()).collect();
            let names = names.join(", ");
            return Err(LabError::Config(format!("no server contains {text:?}; known: {names}")));
        }
        Ok(selected)
    }

    /// All loads: none, those of the configuration, the maximum.
    fn loads(&self) -> impl Iterator<Item = Load> {
        let given = self.loads_pps.iter().copied().map(Some);
        [NO_LOAD].into_iter().chain(given).chain([MAX_LOAD])
    }
}

/// Packets of a flood, all from unknown sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FloodKind {
    /// To a port without a socket.
    Udp,
    /// SYN segments to the server's port.
    Syn,
}

impl FloodKind {
    const ALL: [Self; 2] = [Self::Udp, Self::Syn];

    fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Syn => "syn",
        }
    }

    fn prepare(self, testbed: &FloodTestbed, server: NfsServer) -> Result<Flood, LabError> {
        let target = SocketAddrV4::new(server.address(), FLOODED_PORT);
        let receive_work = server.receive_work();
        match self {
            Self::Udp => {
                let source = FloodSource::UnknownSources;
                let payloads = std::iter::repeat_n(PAYLOAD, source.flow_count());
                testbed.flood(source, target.into(), payloads, receive_work)
            }
            Self::Syn => {
                testbed.flood_frames(&syn_frames(testbed.pair.b.mac, target), receive_work)
            }
        }
    }
}

/// Server under one kind of flood, and its measurements.
struct Case {
    server: NfsServer,
    flood: FloodKind,
    curve: GoodputCurve,
}

/// Servers to measure: Tidegate's on Tidegate and on each way of the kernel, and ganesha, if it is
/// installed.
fn all_servers() -> Vec<NfsServer> {
    let ways =
        [ReceiveWork::Timer, ReceiveWork::Softirq, ReceiveWork::Steered, ReceiveWork::Thread];
    let mut servers = [false, true].map(|admission| NfsServer::Tidegate { admission }).to_vec();
    servers.extend(ways.map(NfsServer::Kernel));
    if has_ganesha() {
        servers.extend(ways.map(NfsServer::Ganesha));
    }
    servers
}

/// Measures the calls that each server answers under each flood. Prints its progress on standard
/// error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, libnfs is not installed, or a server
/// does not start.
pub fn run(config: &NfsLabConfig) -> Result<Experiment, LabError> {
    config.check()?;
    netns::remove_stale()?;
    let program = ClientProgram::build()?;
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    testbed.route_unknown_sources()?;
    let case = |flood, server| {
        let curve = GoodputCurve::with_loads(config.loads());
        Case { server, flood, curve }
    };
    let servers = config.servers()?;
    let floods = FloodKind::ALL.into_iter();
    let mut cases: Vec<Case> =
        floods.flat_map(|flood| servers.iter().map(move |&server| case(flood, server))).collect();
    let progress = Progress::new(cases.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for case in &mut cases {
            case.measure(config, &testbed, &program)?;
            let (name, flood) = (case.server.name(), case.flood.name());
            let runs = case.curve.format_last_runs();
            progress.step(format_args!("{repeat} {name:<24} {flood}  {runs} k/s"));
        }
    }
    let mut result = Experiment::new("nfs");
    describe(config, &mut result);
    conclude(&cases, &mut result);
    Ok(result)
}

impl Case {
    /// Offers every load once to a new server.
    fn measure(
        &mut self,
        config: &NfsLabConfig,
        testbed: &FloodTestbed,
        program: &ClientProgram,
    ) -> Result<(), LabError> {
        let mut server = self.server.start(testbed)?;
        let mut flood = self.flood.prepare(testbed, self.server)?;
        let mut clients = program.start(testbed, &server.address, config.calls_per_second)?;
        let time = Duration::from_secs_f64(config.seconds);
        for step in &mut self.curve.steps {
            let rate = step.requested_pps;
            let run = testbed.measure(&mut flood, &clients.meter, rate, SETTLING, time)?;
            step.runs.push(run);
            server.process.check_running()?;
            clients.process.check_running()?;
        }
        flood.set_rate(Some(0.0))?;
        clients.process.stop();
        server.process.stop();
        Ok(())
    }

    /// Lowest rate of answers over the highest, at the loads that `is_counted` selects.
    fn floor(&self, is_counted: impl Fn(Load) -> bool) -> f64 {
        let counted = self.curve.steps.iter().filter(|step| is_counted(step.requested_pps));
        let rates: Vec<f64> = counted.map(LoadStep::goodput_pps).collect();
        let lowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = rates.iter().copied().fold(0.0, f64::max);
        if highest > 0.0 { lowest / highest } else { 0.0 }
    }

    /// Rate of answers at a load, if that load was offered.
    fn answers_at(&self, load: Load) -> Option<f64> {
        let step = self.curve.steps.iter().find(|step| step.requested_pps == load);
        step.map(LoadStep::goodput_pps)
    }
}

/// Rate of a flood in packets per second; `None` is the maximum.
type Load = Option<f64>;

const NO_LOAD: Load = Some(0.0);
const LINE_RATE: Load = Some(GIGABIT_LINE_PPS);
const MAX_LOAD: Load = None;

fn is_up_to_line_rate(load: Load) -> bool {
    load.is_some_and(|pps| pps <= GIGABIT_LINE_PPS)
}

fn describe(config: &NfsLabConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} runs the clients and, in the time that they leave, the flood; core {server} \
         runs the server and its receive work; with kernel-rps core {load} receives up to where a \
         packet is handed to core {server}; with kernel-softirq Linux receives on the sender's core, \
         which slows down the flood, so that the comparisons leave it out"
    ));
    result.note(format!(
        "{CONNECTIONS} clients of libnfs make {} calls/s, as far as answers come, with at most \
         {OUTSTANDING} under way each: of eight calls seven read 8 KiB at random places of a file in \
         the page cache, and one asks for its attributes; answers per second count",
        config.calls_per_second
    ));
    result.note(format!(
        "udp: packets to a port without a socket; syn: SYN segments to the server's port; both from \
         {SYN_SOURCES} unknown sources; each load is held for {} s after {} s, {} times; a floor is \
         the lowest rate at any load over the highest, nfs_floor that of tidegate-admission, \
         nfs_floor_line_rate up to the line rate of 1 Gb/s",
        config.seconds,
        SETTLING.as_secs_f64(),
        config.repeats
    ));
    result.note(FLOOD_NOTE);
    if !has_ganesha() {
        result.note("nfs-ganesha is not installed: apt-get install nfs-ganesha nfs-ganesha-vfs");
    }
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 6] = [
    "server",
    "flood",
    "flood_per_s",
    "answers_per_s",
    "server_core_busy_percent",
    "load_core_busy_percent",
];

fn conclude(cases: &[Case], result: &mut Experiment) {
    let own_server = NfsServer::Tidegate { admission: true };
    for case in cases {
        let name = format!("{}_floor_{}", case.server.name().replace('-', "_"), case.flood.name());
        result.figure(&name, round_to_thousandths(case.floor(|_| true)));
    }
    let own = || cases.iter().filter(|case| case.server == own_server);
    let floor = |case: &Case| case.floor(|_| true);
    let floor_line_rate = |case: &Case| case.floor(is_up_to_line_rate);
    let floors = [
        ("nfs_floor", own().map(floor).reduce(f64::min)),
        ("nfs_floor_line_rate", own().map(floor_line_rate).reduce(f64::min)),
    ];
    for (figure, floor) in floors {
        if let Some(floor) = floor {
            result.figure(figure, round_to_thousandths(floor));
        }
    }
    for case in own() {
        for (suffix, load) in [("_no_load", NO_LOAD), ("_line_rate", LINE_RATE), ("", MAX_LOAD)] {
            let Some(answers) = case.answers_at(load) else { continue };
            let kernel = cases
                .iter()
                .filter(|kernel| kernel.flood == case.flood && kernel.server.is_compared_kernel());
            let kernel =
                kernel.filter_map(|case| Some((case.server.name(), case.answers_at(load)?)));
            let figure = format!("nfs_over_kernel{suffix}_{}", case.flood.name());
            result.compare_with_kernel(&figure, answers, kernel);
        }
    }
    result.rows = cases.iter().flat_map(rows).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(cases));
}

fn rows(case: &Case) -> Vec<Value> {
    let row = |step: &LoadStep| {
        json!({
            "server": case.server.name(),
            "flood": case.flood.name(),
            "asked_per_s": step.requested_pps,
            "flood_per_s": step.offered_pps().round(),
            "answers_per_s": step.goodput_pps().round(),
            "server_core_busy_percent": step.median(|run| run.server_core.busy_percent).round(),
            "load_core_busy_percent": step.median(|run| run.load_core.busy_percent).round(),
        })
    };
    case.curve.steps.iter().map(row).collect()
}

fn picture(cases: &[Case]) -> Picture {
    let panel = |flood: FloodKind| Panel {
        title: format!("{} flood", flood.name()),
        x: Axis::new("flood", "packets/s"),
        y: Axis::new("answers", "calls/s"),
        series: cases
            .iter()
            .filter(|case| case.flood == flood)
            .map(|case| Series::new(case.server.name(), case.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    Picture {
        title: "Calls of NFS answered under a flood".into(),
        panels: FloodKind::ALL.into_iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::flood::FloodMeasurement;

    /// Answers without load, at the line rate, and at the maximum.
    fn case(server: NfsServer, flood: FloodKind, answers: [f64; 3]) -> Case {
        let step = |(requested_pps, goodput_pps)| LoadStep {
            requested_pps,
            runs: vec![FloodMeasurement { goodput_pps, ..FloodMeasurement::default() }],
        };
        let steps = [NO_LOAD, LINE_RATE, MAX_LOAD].into_iter().zip(answers).map(step).collect();
        Case { server, flood, curve: GoodputCurve { steps } }
    }

    #[test]
    fn figures_compare_the_worst_flood_and_the_kernel_at_its_best() {
        let own = NfsServer::Tidegate { admission: true };
        let timer = NfsServer::Kernel(ReceiveWork::Timer);
        let thread = NfsServer::Kernel(ReceiveWork::Thread);
        let softirq = NfsServer::Kernel(ReceiveWork::Softirq);
        let cases = [
            case(own, FloodKind::Udp, [1000.0, 990.0, 900.0]),
            case(timer, FloodKind::Udp, [1000.0, 330.0, 100.0]),
            case(thread, FloodKind::Udp, [800.0, 300.0, 450.0]),
            case(softirq, FloodKind::Udp, [1000.0, 1000.0, 1000.0]),
            case(own, FloodKind::Syn, [1000.0, 960.0, 970.0]),
            case(thread, FloodKind::Syn, [1000.0, 10.0, 97.0]),
        ];
        let mut result = Experiment::new("nfs");
        conclude(&cases, &mut result);
        let figures = &result.figures;
        assert_eq!(figures["nfs_floor"], 0.9);
        assert_eq!(figures["nfs_floor_line_rate"], 0.96);
        assert_eq!(figures["tidegate_admission_floor_syn"], 0.96);
        assert_eq!(figures["kernel_timer_floor_udp"], 0.1);
        assert_eq!(figures["nfs_over_kernel_udp"], 2.0);
        assert_eq!(figures["nfs_over_kernel_line_rate_udp"], 3.0);
        assert_eq!(figures["nfs_over_kernel_syn"], 10.0);
        assert_eq!(figures["nfs_over_kernel_no_load_udp"], 1.0);
        assert!(result.comparisons.iter().all(|one| one.kernel_best != "kernel-softirq"));
        assert_eq!(result.rows.len(), 18);
    }

    #[test]
    fn loads_begin_with_none_and_end_with_the_maximum() {
        let loads: Vec<_> = NfsLabConfig::default().loads().collect();
        assert_eq!(loads.first(), Some(&NO_LOAD));
        assert_eq!(loads.last(), Some(&MAX_LOAD));
        assert_eq!(NfsLabConfig::default().quick().loads().count(), 2);
    }
}
