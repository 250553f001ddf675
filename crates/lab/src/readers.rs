//! `tidegate lab readers`: requests per second of a UDP service with several
//! reader threads: all on one kernel socket, each on one of its own
//! (SO_REUSEPORT), and on Tidegate.

use std::time::Duration;

use serde_json::{Value, json};

use crate::livelock::bench::{Bench, Source};
use crate::livelock::subject::{Carrier, Service};
use crate::plot::{Axis, Panel, Picture, Series};
use crate::{Experiment, LabError, cpu};

/// How to run the experiment.
#[derive(Clone, Debug)]
pub struct ReadersConfig {
    /// Numbers of readers.
    pub readers: Vec<usize>,
    /// Work for each request, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// Loads to offer besides the maximum, in packets per second; the best
    /// counts.
    pub loads_pps: Vec<f64>,
    /// How long to measure at each load, in seconds.
    pub seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// The core that serves.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for ReadersConfig {
    fn default() -> Self {
        Self {
            readers: vec![1, 2, 4, 8],
            work_ns: vec![0, 1_000, 5_000],
            loads_pps: vec![150e3, 250e3, 400e3, 600e3, 900e3],
            seconds: 0.4,
            repeats: 5,
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
    /// Tidegate: a queue for each.
    Tidegate,
}

impl Way {
    const ALL: [Self; 3] = [Self::Shared, Self::ReusePort, Self::Tidegate];

    fn name(self) -> &'static str {
        match self {
            Self::Shared => "kernel-shared",
            Self::ReusePort => "kernel-reuseport",
            Self::Tidegate => "tidegate",
        }
    }

    fn carrier(self) -> Carrier {
        if self == Self::Tidegate { Carrier::tidegate() } else { Carrier::Kernel }
    }
}

/// One way with so many readers and so much work.
struct Point {
    way: Way,
    readers: usize,
    work_ns: u64,
    /// The best of each repeat, in requests per second.
    best: Vec<f64>,
}

impl Point {
    fn median(&self) -> f64 {
        let mut all = self.best.clone();
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
    let bench = Bench::new(config.server_core, config.load_core)?;
    let mut points: Vec<Point> = Vec::new();
    for &work_ns in &config.work_ns {
        for &readers in &config.readers {
            let ways = Way::ALL.map(|way| Point { way, readers, work_ns, best: Vec::new() });
            points.extend(ways);
        }
    }
    for repeat in 0..config.repeats {
        for point in &mut points {
            let (way, readers, work_ns) = (point.way.name(), point.readers, point.work_ns);
            progress(&format!("{}: {way}, {readers} readers, {work_ns} ns", repeat + 1));
            point.best.push(measure(config, &bench, point)?);
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

/// The most requests per second at any load.
fn measure(config: &ReadersConfig, bench: &Bench, point: &Point) -> Result<f64, LabError> {
    let count = point.readers.to_string();
    let mut flags = vec!["--readers", &count];
    if point.way == Way::ReusePort {
        flags.push("--reuse-port");
    }
    let service = Service {
        carrier: point.way.carrier(),
        work_ns: point.work_ns,
        sink: true,
        flags: &flags,
        flooded_by: Source::OneHost,
    };
    let (warm_up, time) = (Duration::from_millis(100), Duration::from_secs_f64(config.seconds));
    let loads = config.loads_pps.iter().copied().map(Some).chain([None]);
    let limit = (warm_up + time) * (config.loads_pps.len() as u32 + 1) + Duration::from_secs(20);
    let mut running = service.start(bench, limit)?;
    let mut best: f64 = 0.0;
    for load in loads {
        let measured = bench.measure(&mut running.flood, &running.meter, load, warm_up, time)?;
        best = best.max(measured.goodput_pps);
    }
    Ok(best)
}

fn experiment(config: &ReadersConfig, points: &[Point]) -> Experiment {
    let mut result = Experiment::new("readers");
    let median = |way: Way, readers: usize, work_ns: u64| {
        let is_it =
            |point: &&Point| (point.way, point.readers, point.work_ns) == (way, readers, work_ns);
        points.iter().find(is_it).map_or(0.0, Point::median)
    };
    let mut least = f64::INFINITY;
    for &work_ns in &config.work_ns {
        for &readers in &config.readers {
            let [shared, own, tidegate] = Way::ALL.map(|way| median(way, readers, work_ns));
            let over = tidegate / shared.max(own).max(1.0);
            least = least.min(over);
            result.rows.push(json!({
                "work_us": work_ns as f64 / 1e3,
                "readers": readers,
                "kernel_shared_rps": shared.round(),
                "kernel_reuseport_rps": own.round(),
                "tidegate_rps": tidegate.round(),
                "tidegate_over_kernel": (over * 100.0).round() / 100.0,
            }));
        }
    }
    result.columns = vec![
        "work_us",
        "readers",
        "kernel_shared_rps",
        "kernel_reuseport_rps",
        "tidegate_rps",
        "tidegate_over_kernel",
    ];
    result.figure("readers_over_kernel_min", least);
    if let Some(&work_ns) = config.work_ns.iter().max()
        && config.readers.contains(&1)
        && config.readers.contains(&2)
    {
        let [one, two] = [1, 2].map(|readers| median(Way::Tidegate, readers, work_ns));
        result.figure("readers_2_over_1", two / one.max(1.0));
    }
    notes(config, &mut result);
    result.picture = Some(picture(&result));
    result
}

fn notes(config: &ReadersConfig, result: &mut Experiment) {
    result.note(format!(
        "a service that works on each request and answers none, 64-byte frames of 64 flows over \
         veth; core {} serves with all its threads and all receive work, core {} sends; the best \
         rate at any load, median of {}, ways taken in turn",
        config.server_core, config.load_core, config.repeats
    ));
    result.note(format!(
        "{} cores: the load needs one of them, so that all readers share the other, and \
         readers_2_over_1, at the most work, is that of two readers on one core; on two free \
         cores it is to be 1.7",
        cpu::cores()
    ));
    result.note(
        "Tidegate with one reader runs in the reader's own calls; with more, a thread of its own \
         runs the stack and hands each datagram to a reader by its flow, with feedback",
    );
}

/// Requests per second against readers, a panel for each amount of work.
fn picture(result: &Experiment) -> Picture {
    let mut panels: Vec<Panel> = Vec::new();
    for row in &result.rows {
        let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let title = format!("{} us of work", Value::to_string(&row["work_us"]));
        if panels.last().is_none_or(|panel| panel.title != title) {
            let series = ["kernel, one socket", "kernel, SO_REUSEPORT", "Tidegate"];
            panels.push(Panel {
                title,
                x: Axis::new("readers", ""),
                y: Axis::new("requests", "1/s"),
                series: series.map(|name| Series::new(name, [])).into(),
                spans: Vec::new(),
            });
        }
        let Some(panel) = panels.last_mut() else { continue };
        let keys = ["kernel_shared_rps", "kernel_reuseport_rps", "tidegate_rps"];
        for (series, key) in panel.series.iter_mut().zip(keys) {
            series.points.push((number("readers"), number(key)));
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
        let point = |way, readers, best: [f64; 3]| Point {
            way,
            readers,
            work_ns: 5_000,
            best: best.into(),
        };
        let result = experiment(
            &config,
            &[
                point(Way::Shared, 1, [100.0, 900.0, 50.0]),
                point(Way::ReusePort, 1, [80.0, 80.0, 80.0]),
                point(Way::Tidegate, 1, [150.0, 150.0, 150.0]),
                point(Way::Shared, 2, [100.0, 100.0, 100.0]),
                point(Way::ReusePort, 2, [200.0, 200.0, 200.0]),
                point(Way::Tidegate, 2, [300.0, 240.0, 1.0]),
            ],
        );
        assert_eq!(result.figures["readers_over_kernel_min"], 1.2);
        assert_eq!(result.figures["readers_2_over_1"], 1.6);
        assert_eq!(result.rows[0]["tidegate_over_kernel"], 1.5);
        assert_eq!(result.picture.unwrap().panels[0].series[1].points, [(1.0, 80.0), (2.0, 200.0)]);
    }

    #[test]
    fn nonsense_is_refused() {
        let same = ReadersConfig { load_core: 1, ..ReadersConfig::default() };
        assert!(check(&same).is_err());
        let none = ReadersConfig { readers: vec![0], ..ReadersConfig::default() };
        assert!(check(&none).is_err());
    }
}
