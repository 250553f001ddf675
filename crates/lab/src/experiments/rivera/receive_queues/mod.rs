//! Experiment receive-queues: compares receive queues for one socket that several readers drain.
//!
//! Follows chapter 4 of Rivera's thesis (2013) and adds queue structures that the thesis left open.

pub(crate) mod model;
mod published;
mod scheme;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::Experiment;
use crate::LabError;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_hundredths;
use crate::testbed::cpu;
use model::ModelConfig;
pub use scheme::{CANDIDATES, PAPER, Scheme};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ReceiveQueuesConfig {
    /// Packets for each reader; the paper uses one million.
    pub packets_per_reader: u64,
    /// Runs of each case; mean, spread and median are over these runs.
    pub runs: usize,
    /// Numbers of producers; each is measured with each number of readers.
    pub producers: Vec<usize>,
    /// Numbers of readers.
    pub readers: Vec<usize>,
    /// Numbers of producers that are measured with as many readers.
    pub symmetric: Vec<usize>,
    /// Names of the queues to measure; empty means all.
    pub schemes: Vec<String>,
    /// Limit of one run; a run that exceeds the limit is cut off and does not count.
    pub time_limit: Duration,
}

/// Packets per reader from which a run takes longer than the start of its threads.
const MIN_RELIABLE_PACKETS: u64 = 100_000;

impl Default for ReceiveQueuesConfig {
    fn default() -> Self {
        Self {
            packets_per_reader: 1_000_000,
            runs: 5,
            producers: Vec::new(),
            readers: Vec::new(),
            symmetric: vec![1, 4, 10],
            schemes: Vec::new(),
            time_limit: Duration::from_secs(25),
        }
    }
}

impl ReceiveQueuesConfig {
    /// Fewer packets and runs, for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { packets_per_reader: MIN_RELIABLE_PACKETS, runs: 3, ..self }
    }

    /// All numbers of producers and readers of the paper, instead of those of the figures.
    #[must_use]
    pub fn long(self) -> Self {
        Self {
            producers: (1..=4).collect(),
            readers: (1..=10).collect(),
            symmetric: (1..=10).collect(),
            ..self
        }
    }

    /// Cases to measure, as pairs of producers and readers.
    fn cases(&self) -> Vec<(usize, usize)> {
        let grid = self.producers.iter().flat_map(|&p| self.readers.iter().map(move |&r| (p, r)));
        let mut cases: Vec<_> = grid.chain(self.symmetric.iter().map(|&n| (n, n))).collect();
        cases.sort_unstable();
        cases.dedup();
        cases
    }

    fn selected_schemes(&self) -> Result<Vec<Scheme>, LabError> {
        let all = PAPER.iter().chain(&CANDIDATES).copied();
        let unknown = |name: &&String| !all.clone().any(|scheme| scheme.name() == **name);
        if let Some(name) = self.schemes.iter().find(unknown) {
            let names: Vec<String> = all.map(|scheme| scheme.name()).collect();
            return Err(LabError::Config(format!(
                "unknown queue {name}; known queues: {}",
                names.join(", ")
            )));
        }
        Ok(all
            .filter(|scheme| self.schemes.is_empty() || self.schemes.contains(&scheme.name()))
            .collect())
    }
}

/// One queue in one case, with its measured times.
struct QueuePoint {
    scheme: Scheme,
    producers: usize,
    readers: usize,
    /// Times of the runs that were not cut off, in microseconds.
    elapsed_us: Vec<f64>,
    runs_cut_off: usize,
}

impl QueuePoint {
    fn mean_us(&self) -> Option<f64> {
        let count = self.elapsed_us.len();
        (count > 0).then(|| self.elapsed_us.iter().sum::<f64>() / count as f64)
    }

    /// Half the difference between the slowest and the fastest run, in percent of the mean.
    fn spread_percent(&self) -> Option<f64> {
        let fastest = self.elapsed_us.iter().copied().fold(f64::INFINITY, f64::min);
        let slowest = self.elapsed_us.iter().copied().fold(0.0, f64::max);
        Some((slowest - fastest) / 2.0 / self.mean_us()? * 100.0)
    }

    /// Median time; runs that were cut off count as slowest.
    fn median_us(&self, time_limit: Duration) -> f64 {
        let mut all = self.elapsed_us.clone();
        all.resize(all.len() + self.runs_cut_off, time_limit.as_micros() as f64);
        all.sort_unstable_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Measures every queue in every case.
///
/// # Errors
/// When a queue is unknown, threads cannot be created, or a packet was lost.
pub fn run(config: &ReceiveQueuesConfig) -> Result<Experiment, LabError> {
    let schemes = config.selected_schemes()?;
    if config.packets_per_reader == 0 || config.runs == 0 {
        return Err(LabError::Config("give --packets and --runs of at least 1".into()));
    }
    if config.cases().iter().any(|&(producers, readers)| producers == 0 || readers == 0) {
        return Err(LabError::Config("give at least one producer and one reader".into()));
    }
    let mut points = Vec::new();
    let cases = config.cases();
    let progress = Progress::new(cases.len());
    for (producers, readers) in cases {
        let point = |&scheme: &Scheme| QueuePoint {
            scheme,
            producers,
            readers,
            elapsed_us: Vec::new(),
            runs_cut_off: 0,
        };
        let mut case: Vec<QueuePoint> = schemes.iter().map(point).collect();
        // Each run goes through all queues, so that a temporary disturbance of the machine affects
        // all queues alike.
        for _ in 0..config.runs {
            for point in &mut case {
                if point.runs_cut_off > 0 && point.elapsed_us.is_empty() {
                    // A queue whose first run was cut off would be cut off again.
                    point.runs_cut_off += 1;
                    continue;
                }
                measure(config, point)?;
            }
        }
        points.extend(case);
        progress.step(format_args!("{producers} producers, {readers} readers"));
    }
    experiment(config, &points)
}

fn measure(config: &ReceiveQueuesConfig, point: &mut QueuePoint) -> Result<(), LabError> {
    let run = ModelConfig {
        producers: point.producers,
        readers: point.readers,
        packets_per_reader: config.packets_per_reader,
        burst: point.scheme.burst,
        read_pause: Duration::ZERO,
        time_limit: config.time_limit,
    };
    let outcome = point.scheme.run(&run).map_err(LabError::io("cannot create a queue"))?;
    match outcome.elapsed {
        None => point.runs_cut_off += 1,
        Some(_) if !outcome.is_complete => {
            return Err(LabError::Config(format!(
                "{} lost or duplicated packets: {} were read",
                point.scheme.name(),
                outcome.read
            )));
        }
        Some(elapsed) => point.elapsed_us.push(elapsed.as_nanos() as f64 / 1000.0),
    }
    Ok(())
}

fn experiment(config: &ReceiveQueuesConfig, points: &[QueuePoint]) -> Result<Experiment, LabError> {
    let published = published::PublishedTimes::read()?;
    let mut result = Experiment::new("receive-queues");
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

fn row(
    config: &ReceiveQueuesConfig,
    point: &QueuePoint,
    published: &published::PublishedTimes,
) -> Value {
    let scheme = &point.scheme;
    let total = (point.readers as u64 * config.packets_per_reader) as f64;
    // Time that the paper's runs would have taken for as many packets.
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
        "spread_percent": point.spread_percent().map(round_to_hundredths),
        "read_mpps": point.mean_us().map(|us| round_to_hundredths(total / us)),
        "paper_us": paper.map(|paper| paper.elapsed_us),
        "paper_mpps": paper.map(|paper| round_to_hundredths(paper.mpps())),
        "cut_off": point.runs_cut_off,
        "runs_us": point.elapsed_us.iter().map(|us| us.round()).collect::<Vec<_>>(),
    })
}

/// Adds the figures, which are ratios of medians.
fn figures(config: &ReceiveQueuesConfig, points: &[QueuePoint], result: &mut Experiment) {
    let median = |name: &str, threads: usize| {
        let found = points.iter().find(|point| {
            point.scheme.name() == name && point.producers == threads && point.readers == threads
        })?;
        Some(found.median_us(config.time_limit))
    };
    for lock in ["spinlock", "mutex"] {
        let single = median(&format!("single-queue-{lock}"), 4);
        let multi = median(&format!("multi-queue-{lock}"), 4);
        if let (Some(single), Some(multi)) = (single, multi) {
            result.figure(&format!("multi_over_single_4x4_{lock}"), single / multi);
        }
    }
    for threads in [1, 4, 10] {
        let Some(paper) = median("multi-queue-spinlock", threads) else { continue };
        let mutex = median("multi-queue-mutex", threads);
        for burst in [false, true] {
            let candidates = CANDIDATES.iter().filter(|scheme| burst || scheme.burst == 1);
            let times = candidates.filter_map(|scheme| {
                let name = scheme.name();
                Some((median(&name, threads)?, name))
            });
            let Some((best, name)) = times.min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
            let figure = if burst { "best_over_paper" } else { "best_singly_over_paper" };
            result.figure(&format!("{figure}_{threads}x{threads}"), paper / best);
            result.note(format!("{figure}_{threads}x{threads}: the best is {name}"));
            if let Some(mutex) = mutex.filter(|_| burst) {
                result.figure(&format!("best_over_mutex_{threads}x{threads}"), mutex / best);
            }
        }
    }
}

fn notes(config: &ReceiveQueuesConfig, points: &[QueuePoint], result: &mut Experiment) {
    let cores = cpu::available_cores();
    result.note(format!(
        "{} packets per reader, {} runs, mean and half the range; from the start of all threads \
         to the end of the last thread; every packet is counted and summed at the end; the figures are ratios \
         of medians of interleaved runs",
        config.packets_per_reader, config.runs
    ));
    result.note(format!(
        "{cores} cores, no thread is pinned; the paper's machine had 4. With more threads than \
         cores, the holder of a spinlock is preempted while the others spin"
    ));
    result.note(
        "the paper's queues have no limit, and their readers sleep only when all lists are empty; \
         rings hold 1,024 packets per reader and producers wait for space. Readers take what they \
         get until the end; in the paper each reader took the same number of packets",
    );
    result.note(
        "a burst is 32 packets pushed or popped together; best_singly_over_paper is without bursts",
    );
    if config.packets_per_reader < MIN_RELIABLE_PACKETS {
        result.note(format!(
            "with fewer than {MIN_RELIABLE_PACKETS} packets per reader the start of the threads counts: \
             a queue without a limit is ahead before the readers have started"
        ));
    }
    let cut_runs: usize = points.iter().map(|point| point.runs_cut_off).sum();
    if cut_runs > 0 {
        result.note(format!(
            "{cut_runs} runs were cut off after {} s and are excluded from means; in medians they count as \
             that time; a queue that is cut off in its first run of a case is not run again in that case",
            config.time_limit.as_secs()
        ));
    }
}

/// Draws packets read per second against readers: a panel for each number of producers, and a
/// panel for equal numbers of producers and readers.
fn picture(points: &[QueuePoint], rows: &[Value]) -> Picture {
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
        let measured = row["read_mpps"].as_f64();
        let paper = row["paper_mpps"].as_f64();
        let mut lists = Vec::new();
        lists.push(panels.entry(point.producers).or_default());
        if point.producers == point.readers {
            lists.push(&mut symmetric);
        }
        for list in lists {
            add(list, name.clone(), point.readers, measured, false);
            if paper.is_some() {
                add(list, format!("{name}, paper"), point.readers, paper, true);
            }
        }
    }
    // A single case does not make a line: drop that number of producers.
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
    panels.push(panel("equal numbers of both".into(), "producers and readers", symmetric));
    Picture { title: "Receive queues with several readers".into(), panels }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small_config() -> ReceiveQueuesConfig {
        ReceiveQueuesConfig {
            packets_per_reader: 500,
            runs: 2,
            producers: vec![1, 2],
            readers: vec![1, 2],
            symmetric: vec![4],
            ..ReceiveQueuesConfig::default()
        }
    }

    #[test]
    fn measures_each_case_once_with_published_times() {
        let schemes = ["multi-queue-spinlock", "single-queue-spinlock", "ring"];
        let config =
            ReceiveQueuesConfig { schemes: schemes.map(str::to_owned).into(), ..small_config() };
        let result = run(&config).unwrap();
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
    fn rejects_unknown_queue_and_lists_valid_names() {
        let config = ReceiveQueuesConfig { schemes: vec!["cue".into()], ..small_config() };
        let error = run(&config).unwrap_err().to_string();
        assert!(error.contains("cue") && error.contains("grid-burst"), "{error}");
    }

    #[test]
    fn cuts_off_slow_runs_and_reports_them() {
        let config = ReceiveQueuesConfig {
            // Too many for the time limit; the sum of their numbers fits.
            packets_per_reader: 1 << 30,
            runs: 1,
            producers: Vec::new(),
            readers: Vec::new(),
            symmetric: vec![2],
            schemes: vec!["ring".into(), "grid-burst".into()],
            time_limit: Duration::from_millis(10),
        };
        let result = run(&config).unwrap();
        assert!(result.rows.iter().all(|row| row["cut_off"] == 1 && row["elapsed_us"].is_null()));
        assert!(result.notes.iter().any(|note| note.contains("2 runs were cut off")));
    }
}
