//! Experiment reader-scaling: request rate of a UDP service with several reader threads.
//!
//! Compares readers that share one kernel socket, readers with one kernel socket each
//! (SO_REUSEPORT), and Tidegate.

mod in_memory;
mod sender;

use std::time::Duration;

use serde_json::{Value, json};

use crate::Experiment;
use crate::LabError;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_hundredths;
use crate::testbed::cpu;
use crate::testbed::flood::{FloodSource, FloodTestbed};
use crate::testbed::test_case::{EchoService, FloodedServer, Transport};
use sender::{OfferedLoads, Sender};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ReaderScalingConfig {
    /// Numbers of readers.
    pub readers: Vec<usize>,
    /// Work for each request, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// Loads of the flood besides the maximum, in packets per second; the best result counts.
    /// Where each reader has its own core, the loads are derived from the work.
    pub loads_pps: Vec<f64>,
    /// Duration of the measurement at each load, in seconds.
    pub seconds: f64,
    /// Number of repetitions of all measurements; the median counts.
    pub repeats: usize,
    /// Placements of the threads on cores.
    pub placements: Vec<CorePlacement>,
    /// Core that serves; core of the first reader where each reader has its own core.
    pub server_core: usize,
    /// Core that sends.
    pub load_core: usize,
}

/// Placement of the threads on cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorePlacement {
    /// All readers and all receive work on one core, as under a flood, which needs a second core
    /// for itself.
    OneCore,
    /// Each reader on its own core as far as there are cores. Receive work and a light load run
    /// on the core that is assigned to a reader last.
    CoreEach,
}

impl CorePlacement {
    /// Both placements.
    pub const ALL: [Self; 2] = [Self::OneCore, Self::CoreEach];

    /// Name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneCore => "one-core",
            Self::CoreEach => "core-each",
        }
    }
}

impl std::str::FromStr for CorePlacement {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        Self::ALL.into_iter().find(|placement| placement.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(" or ");
            LabError::Config(format!("{text:?} is not a placement of readers: give {names}"))
        })
    }
}

impl Default for ReaderScalingConfig {
    fn default() -> Self {
        Self {
            readers: vec![1, 2, 4, 8],
            work_ns: vec![0, 1_000, 5_000],
            loads_pps: vec![150e3, 250e3, 400e3, 600e3, 900e3],
            seconds: 0.4,
            repeats: 3,
            placements: CorePlacement::ALL.into(),
            server_core: 1,
            load_core: 0,
        }
    }
}

impl ReaderScalingConfig {
    /// Reduces loads, times and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self {
            readers: vec![1, 2, 4],
            work_ns: vec![0, 5_000],
            loads_pps: vec![200e3, 400e3],
            seconds: 0.2,
            repeats: 1,
            ..self
        }
    }
}

/// Assignment of sockets to reader threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SocketSetup {
    /// All threads read one kernel socket.
    Shared,
    /// Each thread reads its own kernel socket.
    ReusePort,
    /// Tidegate on AF_XDP, with a queue for each reader.
    Tidegate,
    /// Tidegate on an in-memory link.
    Memory,
}

impl SocketSetup {
    /// Setups that receive over the same device.
    const OVER_VETH: [Self; 3] = [Self::Shared, Self::ReusePort, Self::Tidegate];

    fn for_placement(placement: CorePlacement) -> impl Iterator<Item = Self> {
        let memory = (placement == CorePlacement::CoreEach).then_some(Self::Memory);
        Self::OVER_VETH.into_iter().chain(memory)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Shared => "kernel-shared",
            Self::ReusePort => "kernel-reuseport",
            Self::Tidegate => "tidegate",
            Self::Memory => "tidegate-memory",
        }
    }

    fn transport(self) -> Transport {
        if self == Self::Tidegate { Transport::tidegate() } else { Transport::kernel() }
    }
}

/// One measured case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    placement: CorePlacement,
    setup: SocketSetup,
    readers: usize,
    work_ns: u64,
}

/// A case and its best rate in each repetition, in requests per second.
struct ReaderPoint {
    case: Case,
    best_rps: Vec<f64>,
}

impl ReaderPoint {
    fn median(&self) -> f64 {
        let mut all = self.best_rps.clone();
        all.sort_unstable_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Measures every socket setup.
///
/// # Errors
/// Without root or without two cores; when a server does not start.
pub fn run(config: &ReaderScalingConfig) -> Result<Experiment, LabError> {
    check_config(config)?;
    let mut testbeds = Testbeds::default();
    let mut points: Vec<ReaderPoint> =
        config.cases().map(|case| ReaderPoint { case, best_rps: Vec::new() }).collect();
    let progress = Progress::new(points.len() * config.repeats);
    for repeat in 0..config.repeats {
        for ReaderPoint { case, best_rps } in &mut points {
            let Case { placement, setup, readers, work_ns } = *case;
            let (placement, setup) = (placement.name(), setup.name());
            best_rps.push(measure(config, &mut testbeds, *case)?);
            progress.step(format_args!(
                "{}: {placement}, {setup}, {readers} readers, {work_ns} ns",
                repeat + 1
            ));
        }
    }
    Ok(experiment(config, &points))
}

fn check_config(config: &ReaderScalingConfig) -> Result<(), LabError> {
    if cpu::available_cores() < 2 || config.server_core == config.load_core {
        return Err(LabError::Config(
            "the server core and the load core must differ; two cores are needed".into(),
        ));
    }
    let is_valid = config.seconds > 0.0 && config.seconds < 60.0 && config.repeats > 0;
    if !is_valid || config.readers.contains(&0) {
        return Err(LabError::Config(
            "seconds (below 60), repeats and readers must be above zero".into(),
        ));
    }
    Ok(())
}

impl ReaderScalingConfig {
    fn cases(&self) -> impl Iterator<Item = Case> {
        let works = self
            .placements
            .iter()
            .flat_map(|&placement| self.work_ns.iter().map(move |&work_ns| (placement, work_ns)));
        let counts = works.flat_map(|(placement, work_ns)| {
            self.readers.iter().map(move |&readers| (placement, work_ns, readers))
        });
        counts.flat_map(|(placement, work_ns, readers)| {
            SocketSetup::for_placement(placement).map(move |setup| Case {
                placement,
                setup,
                readers,
                work_ns,
            })
        })
    }

    /// Cores of the readers when each reader has its own core; the core of the load comes last.
    fn reader_cores(&self) -> Vec<usize> {
        let others = (0..cpu::available_cores())
            .filter(|&core| core != self.server_core && core != self.load_core);
        [self.server_core].into_iter().chain(others).chain([self.load_core]).collect()
    }

    /// Loads from well below to well above the capacity of the readers.
    fn light_loads(&self, case: Case) -> OfferedLoads {
        let cores = case.readers.min(cpu::available_cores()) as f64;
        let max_pps = cores * 1e9 / (case.work_ns as f64 + OVERHEAD_NS);
        let rates_pps = LIGHT_LOAD_FACTORS.map(|factor| factor * max_pps).into();
        OfferedLoads { rates_pps, warm_up: WARM_UP, time: self.time() }
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

const WARM_UP: Duration = Duration::from_millis(100);
/// Approximate time of a reader for one datagram besides its work.
const OVERHEAD_NS: f64 = 300.0;
/// Loads where each reader has its own core, as a fraction of the capacity of the readers.
const LIGHT_LOAD_FACTORS: [f64; 4] = [0.7, 0.9, 1.1, 1.4];

/// One testbed for each placement, created when first needed.
#[derive(Default)]
struct Testbeds {
    one_core: Option<FloodTestbed>,
    core_each: Option<FloodTestbed>,
}

impl Testbeds {
    fn get_or_create(
        &mut self,
        config: &ReaderScalingConfig,
        placement: CorePlacement,
    ) -> Result<&FloodTestbed, LabError> {
        let (testbed, server_core) = match placement {
            CorePlacement::OneCore => (&mut self.one_core, config.server_core),
            // The receiving process runs where the load is; the readers choose their cores.
            CorePlacement::CoreEach => (&mut self.core_each, config.load_core),
        };
        if testbed.is_none() {
            *testbed = Some(FloodTestbed::new(server_core, config.load_core)?);
        }
        testbed.as_ref().ok_or_else(|| LabError::Config("no testbed".into()))
    }
}

/// Measures the highest request rate at any load, in requests per second.
fn measure(
    config: &ReaderScalingConfig,
    testbeds: &mut Testbeds,
    case: Case,
) -> Result<f64, LabError> {
    let reader_cores = config.reader_cores();
    if case.setup == SocketSetup::Memory {
        let service = in_memory::InMemoryService {
            network_core: config.load_core,
            reader_cores: &reader_cores,
            readers: case.readers,
            work_ns: case.work_ns,
        };
        return service.best_rps(&config.light_loads(case));
    }
    let testbed = testbeds.get_or_create(config, case.placement)?;
    let count = case.readers.to_string();
    let cores: Vec<String> = reader_cores.iter().map(usize::to_string).collect();
    let cores = cores.join(",");
    let mut flags = vec!["--readers", &count];
    if case.setup == SocketSetup::ReusePort {
        flags.push("--reuse-port");
    }
    if case.placement == CorePlacement::CoreEach {
        flags.extend(["--reader-cpus", &cores]);
    }
    let service = EchoService {
        transport: case.setup.transport(),
        work_ns: case.work_ns,
        sink: true,
        flags: &flags,
        flood_source: FloodSource::OneHost,
    };
    let loads = config.loads_pps.len().max(LIGHT_LOAD_FACTORS.len()) as u32 + 1;
    let limit = (WARM_UP + config.time()) * loads + Duration::from_secs(20);
    let mut running = service.start(testbed, limit)?;
    match case.placement {
        CorePlacement::OneCore => flood(config, testbed, &mut running),
        CorePlacement::CoreEach => {
            let frames = sender::frames(running.target, testbed.pair.b.mac);
            let sender = Sender::over_packet_socket(&testbed.pair.a, frames, config.load_core)?;
            let served = || testbed.goodput_packets(&running.meter);
            let best = config.light_loads(case).best_rps(&sender, served)?;
            sender.finish()?;
            Ok(best)
        }
    }
}

/// Measures the highest request rate in a flood of any rate, in requests per second.
fn flood(
    config: &ReaderScalingConfig,
    testbed: &FloodTestbed,
    running: &mut FloodedServer,
) -> Result<f64, LabError> {
    let mut best: f64 = 0.0;
    for load in config.loads_pps.iter().copied().map(Some).chain([None]) {
        let (flood, meter) = (&mut running.flood, &running.meter);
        let measured = testbed.measure(flood, meter, load, WARM_UP, config.time())?;
        best = best.max(measured.goodput_pps);
    }
    Ok(best)
}

fn experiment(config: &ReaderScalingConfig, points: &[ReaderPoint]) -> Experiment {
    let mut result = Experiment::new("reader-scaling");
    let median = |case: Case| {
        points.iter().find(|point| point.case == case).map_or(0.0, ReaderPoint::median)
    };
    let mut worst: Option<(f64, Case)> = None;
    for first in
        points.iter().map(|point| point.case).filter(|case| case.setup == SocketSetup::Shared)
    {
        let median_of = |setup: SocketSetup| median(Case { setup, ..first });
        let [shared, reuseport, tidegate] = SocketSetup::OVER_VETH.map(median_of);
        let ratio = tidegate / shared.max(reuseport).max(1.0);
        if worst.is_none_or(|(min_ratio, _)| ratio < min_ratio) {
            worst = Some((ratio, first));
        }
        let in_memory = (first.placement == CorePlacement::CoreEach)
            .then(|| median_of(SocketSetup::Memory).round());
        result.rows.push(json!({
            "place": first.placement.name(),
            "work_us": first.work_ns as f64 / 1e3,
            "readers": first.readers,
            "kernel_shared_rps": shared.round(),
            "kernel_reuseport_rps": reuseport.round(),
            "tidegate_rps": tidegate.round(),
            "tidegate_over_kernel": round_to_hundredths(ratio),
            "tidegate_memory_rps": in_memory,
        }));
    }
    result.columns = vec![
        "place",
        "work_us",
        "readers",
        "kernel_shared_rps",
        "kernel_reuseport_rps",
        "tidegate_rps",
        "tidegate_over_kernel",
        "tidegate_memory_rps",
    ];
    if let Some((_, case)) = worst {
        let kernel = [SocketSetup::Shared, SocketSetup::ReusePort]
            .map(|setup| (setup.name().to_owned(), median(Case { setup, ..case })));
        let tidegate = median(Case { setup: SocketSetup::Tidegate, ..case });
        result.compare_with_kernel("readers_over_kernel_min", tidegate, kernel);
    }
    let work_ns = config.work_ns.iter().max().copied().unwrap_or(0);
    let scaling = |placement: CorePlacement, setup: SocketSetup| {
        let median_of = |readers| median(Case { placement, setup, readers, work_ns });
        (median_of(1) > 0.0 && median_of(2) > 0.0).then(|| median_of(2) / median_of(1))
    };
    for (name, placement, setup) in [
        ("readers_2_over_1", CorePlacement::CoreEach, SocketSetup::Tidegate),
        ("readers_2_over_1_memory", CorePlacement::CoreEach, SocketSetup::Memory),
        ("readers_2_over_1_kernel_shared", CorePlacement::CoreEach, SocketSetup::Shared),
        ("readers_2_over_1_kernel_reuseport", CorePlacement::CoreEach, SocketSetup::ReusePort),
        ("readers_2_over_1_one_core", CorePlacement::OneCore, SocketSetup::Tidegate),
    ] {
        if let Some(scaling) = scaling(placement, setup) {
            result.figure(name, scaling);
        }
    }
    notes(config, &mut result);
    result.picture = Some(picture(&result));
    result
}

fn notes(config: &ReaderScalingConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "a service that works on each request and sends no reply, 64-byte frames of 64 flows; the \
         best rate at any load, median of {}, interleaved setups; {} cores",
        config.repeats,
        cpu::available_cores()
    ));
    result.note(format!(
        "one-core: core {server} has all readers and all receive work, including the stack's thread; \
         core {load} sends a flood over veth; Tidegate with one reader runs in the reader's calls"
    ));
    let cores: Vec<String> = config.reader_cores().iter().map(usize::to_string).collect();
    result.note(format!(
        "core-each: readers run on the cores {} in turn; core {load} also receives, for the \
         kernel in softirqs, for Tidegate in the thread of its stack, and sends by AF_PACKET over \
         veth from a thread that sleeps between bursts. tidegate_memory is the same service on an \
         in-memory link, whose load and receive work take a few percent of that core. \
         readers_2_over_1 and its rows of the kernel are measured over the same veth with the same \
         placement, at the largest work; readers_2_over_1_memory is that of the in-memory link, with two \
         almost free cores, and compares with none of them",
        cores.join(", ")
    ));
    result.note(
        "a separate thread runs Tidegate's stack and hands each datagram to a reader by its \
         flow, with feedback; the better of the kernel's rows counts in tidegate_over_kernel",
    );
}

/// Draws requests per second against readers, with a panel for each placement and amount of work.
fn picture(result: &Experiment) -> Picture {
    let series = [
        ("kernel_shared_rps", "kernel, one socket"),
        ("kernel_reuseport_rps", "kernel, SO_REUSEPORT"),
        ("tidegate_rps", "Tidegate"),
        ("tidegate_memory_rps", "Tidegate, in-memory link"),
    ];
    let mut panels: Vec<Panel> = Vec::new();
    for row in &result.rows {
        let placement = row["place"].as_str().unwrap_or_default();
        let title = format!("{placement}, {} us of work", Value::to_string(&row["work_us"]));
        if panels.last().is_none_or(|panel| panel.title != title) {
            let present = series.iter().filter(|(key, _)| row[*key].is_number());
            panels.push(Panel {
                title,
                x: Axis::new("readers", ""),
                y: Axis::new("requests", "1/s"),
                series: present.map(|(_, name)| Series::new(*name, [])).collect(),
                spans: Vec::new(),
            });
        }
        let Some(panel) = panels.last_mut() else { continue };
        for (key, name) in series {
            let drawn = panel.series.iter_mut().find(|series| series.name == name);
            if let (Some(drawn), Some(x), Some(y)) =
                (drawn, row["readers"].as_f64(), row[key].as_f64())
            {
                drawn.points.push((x, y));
            }
        }
    }
    Picture { title: "Several readers on one UDP port".into(), panels }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_medians_with_the_better_kernel_setup() {
        let config = ReaderScalingConfig {
            readers: vec![1, 2],
            work_ns: vec![5_000],
            ..ReaderScalingConfig::default()
        };
        let best = |case: Case| match (case.placement, case.setup, case.readers) {
            (CorePlacement::OneCore, SocketSetup::Shared, 1) => [100.0, 900.0, 50.0],
            (CorePlacement::OneCore, SocketSetup::Tidegate, 1) => [150.0; 3],
            (CorePlacement::OneCore, SocketSetup::Shared, _) => [100.0; 3],
            (CorePlacement::OneCore, SocketSetup::ReusePort, 2) => [200.0; 3],
            (CorePlacement::OneCore, SocketSetup::Tidegate, _) => [300.0, 240.0, 1.0],
            (CorePlacement::CoreEach, SocketSetup::Memory, readers) => [readers as f64 * 90.0; 3],
            (CorePlacement::CoreEach, SocketSetup::Tidegate, _) => [400.0; 3],
            _ => [80.0; 3],
        };
        let point = |case| ReaderPoint { case, best_rps: best(case).into() };
        let points: Vec<ReaderPoint> = config.cases().map(point).collect();
        assert_eq!(points.len(), 2 * (3 + 4));
        let result = experiment(&config, &points);
        assert_eq!(result.figures["readers_over_kernel_min"], 1.2);
        assert_eq!(result.comparisons[0].kernel_best, "kernel-reuseport");
        assert_eq!(result.figures["readers_2_over_1"], 1.0);
        assert_eq!(result.figures["readers_2_over_1_kernel_reuseport"], 1.0);
        assert_eq!(result.figures["readers_2_over_1_memory"], 2.0);
        assert_eq!(result.figures["readers_2_over_1_one_core"], 1.6);
        assert_eq!(result.rows[0]["tidegate_over_kernel"], 1.5);
        assert_eq!(result.rows[3]["tidegate_memory_rps"], 180.0);
        let panels = result.picture.unwrap().panels;
        assert_eq!(panels[0].series[1].points, [(1.0, 80.0), (2.0, 200.0)]);
        assert_eq!((panels[0].series.len(), panels[1].series.len()), (3, 4));
    }

    #[test]
    fn load_core_is_assigned_to_a_reader_last() {
        let cores = ReaderScalingConfig::default().reader_cores();
        assert_eq!((cores[0], cores.last()), (1, Some(&0)));
        assert_eq!(cores.len(), cpu::available_cores().max(2));
    }

    #[test]
    fn rejects_invalid_configuration() {
        let same = ReaderScalingConfig { load_core: 1, ..ReaderScalingConfig::default() };
        assert!(check_config(&same).is_err());
        let none = ReaderScalingConfig { readers: vec![0], ..ReaderScalingConfig::default() };
        assert!(check_config(&none).is_err());
    }
}
