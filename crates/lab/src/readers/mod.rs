//! `tidegate lab readers`: requests per second of a UDP service with several
//! reader threads: all on one kernel socket, each on one of its own
//! (SO_REUSEPORT), and on Tidegate.

mod memory;
mod sender;

use std::time::Duration;

use serde_json::{Value, json};

use crate::livelock::bench::{Bench, Source};
use crate::livelock::subject::{Carrier, Running, Service};
use crate::plot::{Axis, Panel, Picture, Series};
use crate::{Experiment, LabError, cpu};
use sender::{Loads, Sender};

/// How to run the experiment.
#[derive(Clone, Debug)]
pub struct ReadersConfig {
    /// Numbers of readers.
    pub readers: Vec<usize>,
    /// Work for each request, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// Loads of the flood besides the maximum, in packets per second; the best
    /// counts. Where each reader has a core, loads follow from the work.
    pub loads_pps: Vec<f64>,
    /// How long to measure at each load, in seconds.
    pub seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// Where threads run.
    pub places: Vec<Place>,
    /// The core that serves, or that the first reader has.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

/// Where threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All readers and all receive work on one core: as under a flood, which
    /// needs another one to itself.
    OneCore,
    /// Each reader on a core of its own as far as there are cores; receive work
    /// and a load that takes little on the core that is given to a reader last.
    CoreEach,
}

impl Place {
    /// Both.
    pub const ALL: [Self; 2] = [Self::OneCore, Self::CoreEach];

    /// The name in tables and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneCore => "one-core",
            Self::CoreEach => "core-each",
        }
    }
}

impl std::str::FromStr for Place {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        Self::ALL.into_iter().find(|place| place.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(" or ");
            LabError::Config(format!("{text:?} is no place for readers: give {names}"))
        })
    }
}

impl Default for ReadersConfig {
    fn default() -> Self {
        Self {
            readers: vec![1, 2, 4, 8],
            work_ns: vec![0, 1_000, 5_000],
            loads_pps: vec![150e3, 250e3, 400e3, 600e3, 900e3],
            seconds: 0.4,
            repeats: 5,
            places: Place::ALL.into(),
            server_core: 1,
            load_core: 0,
        }
    }
}

impl ReadersConfig {
    /// Everything once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { loads_pps: vec![200e3, 400e3], seconds: 0.2, repeats: 1, ..self }
    }
}

/// Who reads what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// All threads one kernel socket.
    Shared,
    /// Each thread a kernel socket.
    ReusePort,
    /// Tidegate on AF_XDP: a queue for each.
    Tidegate,
    /// Tidegate on a wire in memory.
    Memory,
}

impl Way {
    /// Those that receive over the same device.
    const OVER_VETH: [Self; 3] = [Self::Shared, Self::ReusePort, Self::Tidegate];

    fn in_place(place: Place) -> impl Iterator<Item = Self> {
        let memory = (place == Place::CoreEach).then_some(Self::Memory);
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

    fn carrier(self) -> Carrier {
        if self == Self::Tidegate { Carrier::tidegate() } else { Carrier::kernel() }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    place: Place,
    way: Way,
    readers: usize,
    work_ns: u64,
}

/// A case and the best of each repeat, in requests per second.
struct Point {
    case: Case,
    best_rps: Vec<f64>,
}

impl Point {
    fn median(&self) -> f64 {
        let mut all = self.best_rps.clone();
        all.sort_unstable_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Measures every way.
///
/// # Errors
/// Without root or without two cores; when a server does not start.
pub fn run(config: &ReadersConfig, progress: &mut dyn FnMut(&str)) -> Result<Experiment, LabError> {
    check(config)?;
    let mut benches = Benches::default();
    let mut points: Vec<Point> =
        config.cases().map(|case| Point { case, best_rps: Vec::new() }).collect();
    for repeat in 0..config.repeats {
        for Point { case, best_rps } in &mut points {
            let Case { place, way, readers, work_ns } = case;
            let (place, way) = (place.name(), way.name());
            progress(&format!("{}: {place}, {way}, {readers} readers, {work_ns} ns", repeat + 1));
            best_rps.push(measure(config, &mut benches, *case)?);
        }
    }
    Ok(experiment(config, &points))
}

fn check(config: &ReadersConfig) -> Result<(), LabError> {
    if cpu::cores() < 2 || config.server_core == config.load_core {
        return Err(LabError::Config("one core must serve and another send".into()));
    }
    let sane = config.seconds > 0.0 && config.seconds < 60.0 && config.repeats > 0;
    if !sane || config.readers.contains(&0) {
        return Err(LabError::Config(
            "seconds (below 60), repeats and readers must be above zero".into(),
        ));
    }
    Ok(())
}

impl ReadersConfig {
    fn cases(&self) -> impl Iterator<Item = Case> {
        let works = self
            .places
            .iter()
            .flat_map(|&place| self.work_ns.iter().map(move |&work_ns| (place, work_ns)));
        let counts = works.flat_map(|(place, work_ns)| {
            self.readers.iter().map(move |&readers| (place, work_ns, readers))
        });
        counts.flat_map(|(place, work_ns, readers)| {
            Way::in_place(place).map(move |way| Case { place, way, readers, work_ns })
        })
    }

    /// Where readers are when each has a core: last where the load is.
    fn reader_cores(&self) -> Vec<usize> {
        let others =
            (0..cpu::cores()).filter(|&core| core != self.server_core && core != self.load_core);
        [self.server_core].into_iter().chain(others).chain([self.load_core]).collect()
    }

    /// From well below to well above what so many readers can do.
    fn light_loads(&self, case: Case) -> Loads {
        let cores = case.readers.min(cpu::cores()) as f64;
        let most_pps = cores * 1e9 / (case.work_ns as f64 + OVERHEAD_NS);
        let rates_pps = LIGHT_LOADS.map(|part| part * most_pps).into();
        Loads { rates_pps, warm_up: WARM_UP, time: self.time() }
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

const WARM_UP: Duration = Duration::from_millis(100);
/// What a reader does for a datagram besides its work, about.
const OVERHEAD_NS: f64 = 300.0;
/// Loads where each reader has a core, in parts of what the readers could do.
const LIGHT_LOADS: [f64; 4] = [0.7, 0.9, 1.1, 1.4];

/// One bench for each place, made when it is needed.
#[derive(Default)]
struct Benches {
    one_core: Option<Bench>,
    core_each: Option<Bench>,
}

impl Benches {
    fn of(&mut self, config: &ReadersConfig, place: Place) -> Result<&Bench, LabError> {
        let (bench, server_core) = match place {
            Place::OneCore => (&mut self.one_core, config.server_core),
            // What receives is where the load is; readers choose their cores.
            Place::CoreEach => (&mut self.core_each, config.load_core),
        };
        if bench.is_none() {
            *bench = Some(Bench::new(server_core, config.load_core)?);
        }
        bench.as_ref().ok_or_else(|| LabError::Config("no bench".into()))
    }
}

/// The most requests per second at any load.
fn measure(config: &ReadersConfig, benches: &mut Benches, case: Case) -> Result<f64, LabError> {
    let reader_cores = config.reader_cores();
    if case.way == Way::Memory {
        let service = memory::Service {
            network_core: config.load_core,
            reader_cores: &reader_cores,
            readers: case.readers,
            work_ns: case.work_ns,
        };
        return service.best_rps(&config.light_loads(case));
    }
    let bench = benches.of(config, case.place)?;
    let count = case.readers.to_string();
    let cores: Vec<String> = reader_cores.iter().map(usize::to_string).collect();
    let cores = cores.join(",");
    let mut flags = vec!["--readers", &count];
    if case.way == Way::ReusePort {
        flags.push("--reuse-port");
    }
    if case.place == Place::CoreEach {
        flags.extend(["--reader-cpus", &cores]);
    }
    let service = Service {
        carrier: case.way.carrier(),
        work_ns: case.work_ns,
        sink: true,
        flags: &flags,
        flooded_by: Source::OneHost,
    };
    let loads = config.loads_pps.len().max(LIGHT_LOADS.len()) as u32 + 1;
    let limit = (WARM_UP + config.time()) * loads + Duration::from_secs(20);
    let mut running = service.start(bench, limit)?;
    match case.place {
        Place::OneCore => flood(config, bench, &mut running),
        Place::CoreEach => {
            let frames = sender::frames(running.target, bench.pair.b.mac);
            let sender = Sender::through_device(&bench.pair.a, frames, config.load_core)?;
            let served = || bench.good(&running.meter);
            let best = config.light_loads(case).best_rps(&sender, served)?;
            sender.finish()?;
            Ok(best)
        }
    }
}

/// The most requests per second in a flood of any rate.
fn flood(config: &ReadersConfig, bench: &Bench, running: &mut Running) -> Result<f64, LabError> {
    let mut best: f64 = 0.0;
    for load in config.loads_pps.iter().copied().map(Some).chain([None]) {
        let (flood, meter) = (&mut running.flood, &running.meter);
        let measured = bench.measure(flood, meter, load, WARM_UP, config.time())?;
        best = best.max(measured.goodput_pps);
    }
    Ok(best)
}

fn experiment(config: &ReadersConfig, points: &[Point]) -> Experiment {
    let mut result = Experiment::new("readers");
    let median =
        |case: Case| points.iter().find(|point| point.case == case).map_or(0.0, Point::median);
    let mut least = f64::INFINITY;
    for first in points.iter().map(|point| point.case).filter(|case| case.way == Way::Shared) {
        let of = |way: Way| median(Case { way, ..first });
        let [shared, own, tidegate] = Way::OVER_VETH.map(of);
        let over = tidegate / shared.max(own).max(1.0);
        least = least.min(over);
        let in_memory = (first.place == Place::CoreEach).then(|| of(Way::Memory).round());
        result.rows.push(json!({
            "place": first.place.name(),
            "work_us": first.work_ns as f64 / 1e3,
            "readers": first.readers,
            "kernel_shared_rps": shared.round(),
            "kernel_reuseport_rps": own.round(),
            "tidegate_rps": tidegate.round(),
            "tidegate_over_kernel": (over * 100.0).round() / 100.0,
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
    result.figure("readers_over_kernel_min", least);
    let work_ns = config.work_ns.iter().max().copied().unwrap_or(0);
    let scaling = |place: Place, way: Way| {
        let of = |readers| median(Case { place, way, readers, work_ns });
        (of(1) > 0.0 && of(2) > 0.0).then(|| of(2) / of(1))
    };
    for (name, place, way) in [
        ("readers_2_over_1", Place::CoreEach, Way::Memory),
        ("readers_2_over_1_veth", Place::CoreEach, Way::Tidegate),
        ("readers_2_over_1_kernel_shared", Place::CoreEach, Way::Shared),
        ("readers_2_over_1_kernel_reuseport", Place::CoreEach, Way::ReusePort),
        ("readers_2_over_1_one_core", Place::OneCore, Way::Tidegate),
    ] {
        if let Some(scaling) = scaling(place, way) {
            result.figure(name, scaling);
        }
    }
    notes(config, &mut result);
    result.picture = Some(picture(&result));
    result
}

fn notes(config: &ReadersConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "a service that works on each request and answers none, 64-byte frames of 64 flows; the \
         best rate at any load, median of {}, ways taken in turn; {} cores",
        config.repeats,
        cpu::cores()
    ));
    result.note(format!(
        "one-core: core {server} has all readers and all receive work, the stack's thread too; \
         core {load} sends a flood over veth; Tidegate with one reader runs in the reader's calls"
    ));
    let cores: Vec<String> = config.reader_cores().iter().map(usize::to_string).collect();
    result.note(format!(
        "core-each: readers run on the cores {} in turn; core {load} also receives, for the \
         kernel in softirqs, for Tidegate in the thread of its stack, and sends by AF_PACKET over \
         veth from a thread that sleeps between bursts. tidegate_memory is the same service on a \
         wire in memory, whose load and receive work take a few percent of that core: the two \
         free cores of readers_2_over_1, which is at the most work",
        cores.join(", ")
    ));
    result.note(
        "a thread of its own runs Tidegate's stack and hands each datagram to a reader by its \
         flow, with feedback; of the kernel's rows the better one counts in tidegate_over_kernel",
    );
}

/// Requests per second against readers, a panel for each place and amount of
/// work.
fn picture(result: &Experiment) -> Picture {
    let series = [
        ("kernel_shared_rps", "kernel, one socket"),
        ("kernel_reuseport_rps", "kernel, SO_REUSEPORT"),
        ("tidegate_rps", "Tidegate"),
        ("tidegate_memory_rps", "Tidegate, wire in memory"),
    ];
    let mut panels: Vec<Panel> = Vec::new();
    for row in &result.rows {
        let place = row["place"].as_str().unwrap_or_default();
        let title = format!("{place}, {} us of work", Value::to_string(&row["work_us"]));
        if panels.last().is_none_or(|panel| panel.title != title) {
            let there = series.iter().filter(|(key, _)| row[*key].is_number());
            panels.push(Panel {
                title,
                x: Axis::new("readers", ""),
                y: Axis::new("requests", "1/s"),
                series: there.map(|(_, name)| Series::new(*name, [])).collect(),
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
    fn figures_are_of_medians_and_of_the_better_kernel() {
        let config =
            ReadersConfig { readers: vec![1, 2], work_ns: vec![5_000], ..ReadersConfig::default() };
        let best = |case: Case| match (case.place, case.way, case.readers) {
            (Place::OneCore, Way::Shared, 1) => [100.0, 900.0, 50.0],
            (Place::OneCore, Way::Tidegate, 1) => [150.0; 3],
            (Place::OneCore, Way::Shared, _) => [100.0; 3],
            (Place::OneCore, Way::ReusePort, 2) => [200.0; 3],
            (Place::OneCore, Way::Tidegate, _) => [300.0, 240.0, 1.0],
            (Place::CoreEach, Way::Memory, readers) => [readers as f64 * 90.0; 3],
            (Place::CoreEach, Way::Tidegate, _) => [400.0; 3],
            _ => [80.0; 3],
        };
        let point = |case| Point { case, best_rps: best(case).into() };
        let points: Vec<Point> = config.cases().map(point).collect();
        assert_eq!(points.len(), 2 * (3 + 4));
        let result = experiment(&config, &points);
        assert_eq!(result.figures["readers_over_kernel_min"], 1.2);
        assert_eq!(result.figures["readers_2_over_1"], 2.0);
        assert_eq!(result.figures["readers_2_over_1_one_core"], 1.6);
        assert_eq!(result.rows[0]["tidegate_over_kernel"], 1.5);
        assert_eq!(result.rows[3]["tidegate_memory_rps"], 180.0);
        let panels = result.picture.unwrap().panels;
        assert_eq!(panels[0].series[1].points, [(1.0, 80.0), (2.0, 200.0)]);
        assert_eq!((panels[0].series.len(), panels[1].series.len()), (3, 4));
    }

    #[test]
    fn the_core_of_the_load_is_given_to_a_reader_last() {
        let cores = ReadersConfig::default().reader_cores();
        assert_eq!((cores[0], cores.last()), (1, Some(&0)));
        assert_eq!(cores.len(), cpu::cores().max(2));
    }

    #[test]
    fn nonsense_is_refused() {
        let same = ReadersConfig { load_core: 1, ..ReadersConfig::default() };
        assert!(check(&same).is_err());
        let none = ReadersConfig { readers: vec![0], ..ReadersConfig::default() };
        assert!(check(&none).is_err());
    }
}
