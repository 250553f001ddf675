//! `tidegate lab queues`: which receive queue lets several readers drain one
//! socket, after chapter 4 of Rivera's thesis, with the structures that it
//! left open beside its own.

pub(crate) mod model;
mod published;
mod scheme;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::plot::{Axis, Panel, Picture, Series};
use crate::sweep::hundredths;
use crate::{Experiment, LabError, cpu};
use model::Run;
pub use scheme::{CANDIDATES, PAPER, Scheme};

/// What is measured.
#[derive(Clone, Debug)]
pub struct QueuesConfig {
    /// Packets for each reader; the paper's is a million.
    pub packets_per_reader: u64,
    /// How often each case is measured; mean, spread and median are of these.
    pub runs: usize,
    /// Numbers of producers, each with each number of readers.
    pub producers: Vec<usize>,
    /// Numbers of readers.
    pub readers: Vec<usize>,
    /// Numbers of both at once.
    pub symmetric: Vec<usize>,
    /// Names of the queues to measure; all when empty.
    pub schemes: Vec<String>,
    /// After this a run is ended and does not count.
    pub cut_off: Duration,
}

/// With so many packets per reader a run takes longer than its threads take to
/// start.
const ENOUGH_PACKETS: u64 = 100_000;

impl Default for QueuesConfig {
    fn default() -> Self {
        Self {
            packets_per_reader: 1_000_000,
            runs: 5,
            producers: (1..=4).collect(),
            readers: (1..=10).collect(),
            symmetric: (1..=10).collect(),
            schemes: Vec::new(),
            cut_off: Duration::from_secs(25),
        }
    }
}

impl QueuesConfig {
    /// Only what the figures need, with fewer packets, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self {
            packets_per_reader: ENOUGH_PACKETS,
            runs: 3,
            producers: Vec::new(),
            readers: Vec::new(),
            symmetric: vec![1, 4, 10],
            ..self
        }
    }

    /// The cases to measure: producers and readers.
    fn cases(&self) -> Vec<(usize, usize)> {
        let grid = self.producers.iter().flat_map(|&p| self.readers.iter().map(move |&r| (p, r)));
        let mut cases: Vec<_> = grid.chain(self.symmetric.iter().map(|&n| (n, n))).collect();
        cases.sort_unstable();
        cases.dedup();
        cases
    }

    fn chosen(&self) -> Result<Vec<Scheme>, LabError> {
        let all = PAPER.iter().chain(&CANDIDATES).copied();
        let unknown = |name: &&String| !all.clone().any(|scheme| scheme.name() == **name);
        if let Some(name) = self.schemes.iter().find(unknown) {
            let names: Vec<String> = all.map(|scheme| scheme.name()).collect();
            return Err(LabError::Config(format!(
                "there is no queue {name}; there are {}",
                names.join(", ")
            )));
        }
        Ok(all
            .filter(|scheme| self.schemes.is_empty() || self.schemes.contains(&scheme.name()))
            .collect())
    }
}

/// A queue in one case.
struct Point {
    scheme: Scheme,
    producers: usize,
    readers: usize,
    /// Of the runs that were not cut off, in microseconds.
    elapsed_us: Vec<f64>,
    cut_off: usize,
}

impl Point {
    fn mean_us(&self) -> Option<f64> {
        let count = self.elapsed_us.len();
        (count > 0).then(|| self.elapsed_us.iter().sum::<f64>() / count as f64)
    }

    /// Half of the distance between the fastest and the slowest, in percent of
    /// the mean.
    fn spread_percent(&self) -> Option<f64> {
        let fastest = self.elapsed_us.iter().copied().fold(f64::INFINITY, f64::min);
        let slowest = self.elapsed_us.iter().copied().fold(0.0, f64::max);
        Some((slowest - fastest) / 2.0 / self.mean_us()? * 100.0)
    }

    /// The middle one, counting those that were cut off as slowest.
    fn median_us(&self, cut_off: Duration) -> f64 {
        let mut all = self.elapsed_us.clone();
        all.resize(all.len() + self.cut_off, cut_off.as_micros() as f64);
        all.sort_unstable_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Measures every queue in every case; tells `progress` what it is at.
///
/// # Errors
/// When a queue is unknown, threads cannot be had, or a packet was lost.
pub fn run(config: &QueuesConfig, progress: &mut dyn FnMut(&str)) -> Result<Experiment, LabError> {
    let schemes = config.chosen()?;
    if config.packets_per_reader == 0 || config.runs == 0 {
        return Err(LabError::Config("give --packets and --runs of at least 1".into()));
    }
    if config.cases().iter().any(|&(producers, readers)| producers == 0 || readers == 0) {
        return Err(LabError::Config("give at least one producer and one reader".into()));
    }
    let mut points = Vec::new();
    for (producers, readers) in config.cases() {
        progress(&format!("{producers} producers, {readers} readers"));
        let point = |&scheme: &Scheme| Point {
            scheme,
            producers,
            readers,
            elapsed_us: Vec::new(),
            cut_off: 0,
        };
        let mut case: Vec<Point> = schemes.iter().map(point).collect();
        // Run by run through all queues, so that what disturbs the machine for
        // a while disturbs them alike.
        for _ in 0..config.runs {
            for point in &mut case {
                if point.cut_off > 0 && point.elapsed_us.is_empty() {
                    // What was cut off at once would be again.
                    point.cut_off += 1;
                    continue;
                }
                measure(config, point)?;
            }
        }
        points.extend(case);
    }
    experiment(config, &points)
}

fn measure(config: &QueuesConfig, point: &mut Point) -> Result<(), LabError> {
    let run = Run {
        producers: point.producers,
        readers: point.readers,
        packets_per_reader: config.packets_per_reader,
        burst: point.scheme.burst,
        pause: Duration::ZERO,
        cut_off: config.cut_off,
    };
    let outcome = point.scheme.run(&run).map_err(LabError::io("cannot make a queue"))?;
    match outcome.elapsed {
        None => point.cut_off += 1,
        Some(_) if !outcome.whole => {
            return Err(LabError::Config(format!(
                "{} lost or doubled packets: {} were read",
                point.scheme.name(),
                outcome.read
            )));
        }
        Some(elapsed) => point.elapsed_us.push(elapsed.as_nanos() as f64 / 1000.0),
    }
    Ok(())
}

fn experiment(config: &QueuesConfig, points: &[Point]) -> Result<Experiment, LabError> {
    let published = published::ReceiveQueues::read()?;
    let mut result = Experiment::new("queues");
    result.rows = points.iter().map(|point| row(config, point, &published)).collect();
    result.columns = vec![
        "table",
        "queue",
        "producers",
        "readers",
        "elapsed_us",
        "spread_percent",
        "read_mpps",
        "paper_us",
        "paper_mpps",
        "cut_off",
    ];
    figures(config, points, &mut result);
    result.picture = Some(picture(points, &result.rows));
    notes(config, points, &mut result);
    Ok(result)
}

fn row(config: &QueuesConfig, point: &Point, published: &published::ReceiveQueues) -> Value {
    let scheme = &point.scheme;
    let total = (point.readers as u64 * config.packets_per_reader) as f64;
    // What the paper's runs would have taken for as many packets.
    let paper = published.find(scheme, point.producers, point.readers);
    json!({
        "table": paper.map(|paper| paper.tables.join(" ")),
        "queue": scheme.name(),
        "structure": scheme.structure,
        "lock": scheme.lock,
        "sleep": scheme.sleep,
        "burst": scheme.burst,
        "producers": point.producers,
        "readers": point.readers,
        "elapsed_us": point.mean_us().map(f64::round),
        "spread_percent": point.spread_percent().map(hundredths),
        "read_mpps": point.mean_us().map(|us| hundredths(total / us)),
        "paper_us": paper.map(|paper| paper.elapsed_us),
        "paper_mpps": paper.map(|paper| hundredths(paper.mpps())),
        "cut_off": point.cut_off,
        "runs_us": point.elapsed_us.iter().map(|us| us.round()).collect::<Vec<_>>(),
    })
}

/// Ratios of medians.
fn figures(config: &QueuesConfig, points: &[Point], result: &mut Experiment) {
    let median = |name: &str, both: usize| {
        let found = points.iter().find(|point| {
            point.scheme.name() == name && point.producers == both && point.readers == both
        })?;
        Some(found.median_us(config.cut_off))
    };
    for lock in ["spinlock", "mutex"] {
        let single = median(&format!("single-queue-{lock}"), 4);
        let multi = median(&format!("multi-queue-{lock}"), 4);
        if let (Some(single), Some(multi)) = (single, multi) {
            result.figure(&format!("multi_over_single_4x4_{lock}"), single / multi);
        }
    }
    for both in [1, 4, 10] {
        let Some(paper) = median("multi-queue-spinlock", both) else { continue };
        let mutex = median("multi-queue-mutex", both);
        for burst in [false, true] {
            let candidates = CANDIDATES.iter().filter(|scheme| burst || scheme.burst == 1);
            let times = candidates.filter_map(|scheme| {
                let name = scheme.name();
                Some((median(&name, both)?, name))
            });
            let Some((best, name)) = times.min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
            let figure = if burst { "best_over_paper" } else { "best_singly_over_paper" };
            result.figure(&format!("{figure}_{both}x{both}"), paper / best);
            result.note(format!("{figure}_{both}x{both}: the best is {name}"));
            if let Some(mutex) = mutex.filter(|_| burst) {
                result.figure(&format!("best_over_mutex_{both}x{both}"), mutex / best);
            }
        }
    }
}

fn notes(config: &QueuesConfig, points: &[Point], result: &mut Experiment) {
    let cores = cpu::cores();
    result.note(format!(
        "{} packets per reader, {} runs, mean and half the range; from the start of all threads \
         to the end of all; every packet is counted and summed at the end; the figures are ratios \
         of medians of runs taken in turn",
        config.packets_per_reader, config.runs
    ));
    result.note(format!(
        "{cores} cores, no thread is pinned; the paper's machine had 4. With more threads than \
         cores a spinlock's holder loses its processor while the others spin"
    ));
    result.note(
        "the paper's queues have no limit, and their readers sleep only when all lists are empty; \
         rings hold 1,024 packets per reader and producers wait for room. Readers take what they \
         get until the end; in the paper each took as many as every other",
    );
    result.note(
        "a burst is 32 packets put in or taken out together; best_singly_over_paper is without",
    );
    if config.packets_per_reader < ENOUGH_PACKETS {
        result.note(format!(
            "with fewer than {ENOUGH_PACKETS} packets per reader the start of the threads counts: \
             what needs no room is ahead before the readers have begun"
        ));
    }
    let cut: usize = points.iter().map(|point| point.cut_off).sum();
    if cut > 0 {
        result.note(format!(
            "{cut} runs were cut off after {} s and are in no mean; in medians they count as \
             that; a queue that is cut off in its first run of a case is not run again in it",
            config.cut_off.as_secs()
        ));
    }
}

/// Packets read per second against readers: a panel for each number of
/// producers, and one for as many of both.
fn picture(points: &[Point], rows: &[Value]) -> Picture {
    let mut panels: BTreeMap<usize, Vec<Series>> = BTreeMap::new();
    let mut symmetric: Vec<Series> = Vec::new();
    let add = |list: &mut Vec<Series>, name: String, x: usize, y: Option<f64>, dashed| {
        let point = (x as f64, y.unwrap_or(f64::NAN) * 1e6);
        match list.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => {
                let series = Series::new(name, [point]);
                list.push(if dashed { series.dashed() } else { series });
            }
        }
    };
    for (point, row) in points.iter().zip(rows) {
        let name = point.scheme.name();
        let ours = row["read_mpps"].as_f64();
        let paper = row["paper_mpps"].as_f64();
        let mut lists = Vec::new();
        lists.push(panels.entry(point.producers).or_default());
        if point.producers == point.readers {
            lists.push(&mut symmetric);
        }
        for list in lists {
            add(list, name.clone(), point.readers, ours, false);
            if paper.is_some() {
                add(list, format!("{name}, paper"), point.readers, paper, true);
            }
        }
    }
    // A number of producers with one case is no line.
    panels.retain(|_, list| list.iter().any(|series| series.points.len() > 1));
    let panel = |title: String, x: &str, series| Panel {
        title,
        x: Axis::new(x, ""),
        y: Axis::new("read", "packets/s").log(),
        series,
        spans: Vec::new(),
    };
    let mut panels: Vec<Panel> = panels
        .into_iter()
        .map(|(producers, series)| panel(format!("{producers} producers"), "readers", series))
        .collect();
    panels.push(panel("as many of both".into(), "producers and readers", symmetric));
    Picture { title: "Receive queues with several readers".into(), panels }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> QueuesConfig {
        QueuesConfig {
            packets_per_reader: 500,
            runs: 2,
            producers: vec![1, 2],
            readers: vec![1, 2],
            symmetric: vec![4],
            ..QueuesConfig::default()
        }
    }

    #[test]
    fn each_case_is_measured_once_beside_the_paper() {
        let schemes = ["multi-queue-spinlock", "single-queue-spinlock", "ring"];
        let config = QueuesConfig { schemes: schemes.map(str::to_owned).into(), ..small() };
        let result = run(&config, &mut |_| ()).unwrap();
        assert_eq!(result.rows.len(), 5 * 3);
        for row in &result.rows {
            assert_eq!(row["runs_us"].as_array().map(Vec::len), Some(2));
            assert_eq!(row["paper_us"].is_null(), row["queue"] == "ring");
        }
        for figure in ["multi_over_single_4x4_spinlock", "best_over_paper_4x4"] {
            assert!(result.figures[figure] > 0.0, "{figure}");
        }
        assert_eq!(result.picture.unwrap().panels.len(), 3);
    }

    #[test]
    fn an_unknown_queue_is_refused_with_the_names_there_are() {
        let config = QueuesConfig { schemes: vec!["cue".into()], ..small() };
        let error = run(&config, &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains("cue") && error.contains("grid-burst"), "{error}");
    }

    #[test]
    fn runs_that_take_too_long_are_cut_off_and_said_so() {
        let config = QueuesConfig {
            packets_per_reader: u64::MAX / 1_000_000,
            runs: 1,
            producers: Vec::new(),
            readers: Vec::new(),
            symmetric: vec![2],
            schemes: vec!["ring".into(), "grid-burst".into()],
            cut_off: Duration::from_millis(10),
        };
        let result = run(&config, &mut |_| ()).unwrap();
        assert!(result.rows.iter().all(|row| row["cut_off"] == 1 && row["elapsed_us"].is_null()));
        assert!(result.notes.iter().any(|note| note.contains("2 runs were cut off")));
    }
}
