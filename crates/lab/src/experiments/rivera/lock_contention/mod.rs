//! `tidegate lab lock-contention`: lock statistics of a receive queue, after chapter 3 of
//! Rivera's thesis, in the model of its chapter 4.
//!
//! Memory accounting under one lock stands for the kernel's socket lock. The alternative is
//! pooled accounting, where each user of the queue has a reserve of its own.
//! Tidegate's own stack is measured beside the model, over IPv4 and IPv6.

mod published;

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate_queues::lock::{Lock, LockKind, LockStatistics, Metered, Sleeping, Spin};
use tidegate_queues::{
    Account, Eventfd, Futex, LockedAccount, PooledAccount, QueueEnds, QueueLimits, QueueShape,
    QueueStatistics, RingMatrix, Semaphore, SingleList, Structure, Unlimited, open,
};

use crate::Experiment;
use crate::LabError;
use crate::experiments::rivera::receive_queues::model::{
    ModelConfig, ModelOutcome, ModelPacket, measure,
};
use crate::experiments::rivera::stack_readers::{ReadMethod, StackOutcome, StackRun};
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::{round_to_hundredths, round_to_thousandths};
use crate::testbed::cpu;
use published::{LockTables, PublishedRow};

/// Default size of the kernel's receive buffer in bytes, and the limit in packets.
const LIMIT_BYTES: u64 = 212_992;
const LIMIT_PACKETS: u32 = 1 << 20;
/// Time limit of a run.
const CUT_OFF: Duration = Duration::from_secs(25);
/// Uncontended lock cycles for measuring the cost of the lock statistics.
const COST_ROUNDS: u32 = 500_000;

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct LockContentionConfig {
    /// Packets per reader.
    pub packets_per_reader: u64,
    /// Runs per case; the run of median length counts.
    pub runs: usize,
    /// Numbers of readers to measure.
    pub readers: Vec<usize>,
}

/// A queue with one kind of memory accounting.
struct QueueCase {
    queue: &'static str,
    accounting: &'static str,
    run: fn(&ModelConfig) -> io::Result<ModelOutcome>,
}

const QUEUE_CASES: [QueueCase; 6] = [
    QueueCase {
        queue: "single-queue-spinlock",
        accounting: "one lock",
        run: run_on::<SingleList<ModelPacket, Metered<Spin>>, LockedAccount<Metered<Spin>>, Eventfd>,
    },
    QueueCase {
        queue: "single-queue-spinlock",
        accounting: "none",
        run: run_on::<SingleList<ModelPacket, Metered<Spin>>, Unlimited, Eventfd>,
    },
    QueueCase {
        queue: "single-queue-spinlock",
        accounting: "reserved",
        run: run_on::<SingleList<ModelPacket, Metered<Spin>>, PooledAccount, Eventfd>,
    },
    QueueCase {
        queue: "single-queue-mutex",
        accounting: "one lock",
        run: run_on::<
            SingleList<ModelPacket, Metered<Sleeping>>,
            LockedAccount<Metered<Sleeping>>,
            Eventfd,
        >,
    },
    QueueCase {
        queue: "grid",
        accounting: "one lock",
        run: run_on::<RingMatrix<ModelPacket>, LockedAccount<Metered<Spin>>, Futex>,
    },
    QueueCase {
        queue: "grid",
        accounting: "reserved",
        run: run_on::<RingMatrix<ModelPacket>, PooledAccount, Futex>,
    },
];

/// Ways to read Tidegate's stack, with the IP version.
const STACK_CASES: [(ReadMethod, &str); 4] = [
    (ReadMethod::OneSocket, "ipv4"),
    (ReadMethod::OneSocket, "ipv6"),
    (ReadMethod::QueuePerReader, "ipv4"),
    (ReadMethod::QueuePerReader, "ipv6"),
];

fn run_on<S, A, B>(run: &ModelConfig) -> io::Result<ModelOutcome>
where
    S: Structure<Packet = ModelPacket>,
    A: Account,
    B: Semaphore,
{
    let shape = QueueShape { producers: run.producers, readers: run.readers, capacity: 1024 };
    let limits = QueueLimits::new(LIMIT_PACKETS, LIMIT_BYTES).map_err(io::Error::other)?;
    Ok(measure(open::<S, A, B>(&shape, limits)?, run))
}

/// Measures every case.
///
/// # Errors
/// If threads or a queue cannot be created, or a packet was lost or duplicated.
pub fn run(config: &LockContentionConfig) -> Result<Experiment, LabError> {
    if config.packets_per_reader == 0 || config.runs == 0 || config.readers.contains(&0) {
        return Err(LabError::Config("give --packets, --runs and --readers of at least 1".into()));
    }
    let published = LockTables::read()?;
    let mut result = Experiment::new("lock-contention");
    let cases = QUEUE_CASES.len() + STACK_CASES.len();
    let progress = Progress::new(cases * config.readers.len());
    for case in &QUEUE_CASES {
        for &readers in &config.readers {
            let free = measure_median(config, case, readers, Duration::ZERO)?;
            let rows = rows(case, readers, None, &free, config, &published);
            result.rows.extend(rows);
            let (queue, accounting) = (case.queue, case.accounting);
            progress.step(format_args!("{queue}, accounting {accounting}, {readers} readers"));
            if readers != 1 || case.accounting != "one lock" {
                continue;
            }
            // Pause for the mean hold time of a lock, as in the paper's paced runs.
            let Some(pause) = free.longest_hold() else { continue };
            let paced = measure_median(config, case, readers, pause)?;
            result.rows.extend(self::rows(case, readers, Some(pause), &paced, config, &published));
        }
    }
    stack_rows(config, &published, &progress, &mut result)?;
    figures(config, &mut result);
    result.columns = vec![
        "tables",
        "queue",
        "accounting",
        "ip",
        "pause_ns",
        "readers",
        "lock",
        "held_total_us",
        "acquisitions",
        "held_mean_us",
        "waited_total_us",
        "contentions",
        "waited_mean_us",
        "paper_held_mean_us",
        "paper_contentions",
        "paper_waited_mean_us",
        "read_mpps",
    ];
    result.picture = Some(picture(&result));
    notes(config, &mut result);
    Ok(result)
}

/// The run of median length.
struct MedianRun {
    elapsed: Duration,
    statistics: QueueStatistics,
}

impl MedianRun {
    /// The longest of the mean hold times of the locks.
    fn longest_hold(&self) -> Option<Duration> {
        let locks = [self.statistics.structure, self.statistics.account];
        let holds = locks.into_iter().flatten().map(|lock| lock.held_mean_ns());
        holds.reduce(f64::max).map(|ns| Duration::from_nanos(ns as u64))
    }
}

fn measure_median(
    config: &LockContentionConfig,
    case: &QueueCase,
    readers: usize,
    read_pause: Duration,
) -> Result<MedianRun, LabError> {
    let run = ModelConfig {
        producers: 1,
        readers,
        packets_per_reader: config.packets_per_reader,
        burst: 1,
        read_pause,
        time_limit: CUT_OFF,
    };
    let mut runs = Vec::new();
    for _ in 0..config.runs {
        let outcome = (case.run)(&run).map_err(LabError::io("cannot create a queue"))?;
        if outcome.elapsed.is_some() && !outcome.is_complete {
            let queue = case.queue;
            return Err(LabError::Config(format!("{queue} lost or duplicated packets")));
        }
        let elapsed = outcome.elapsed.unwrap_or(CUT_OFF);
        runs.push(MedianRun { elapsed, statistics: outcome.statistics });
    }
    runs.sort_by_key(|measured| measured.elapsed);
    let middle = runs.len() / 2;
    Ok(runs.swap_remove(middle))
}

/// One row per lock, or a single row without a lock.
fn rows(
    case: &QueueCase,
    readers: usize,
    pause: Option<Duration>,
    median_run: &MedianRun,
    config: &LockContentionConfig,
    published: &LockTables,
) -> Vec<Value> {
    let packets = (readers as u64 * config.packets_per_reader) as f64;
    let seconds = median_run.elapsed.as_secs_f64();
    let common = json!({
        "queue": case.queue,
        "accounting": case.accounting,
        "pause_ns": pause.map_or(0, |pause| pause.as_nanos() as u64),
        "readers": readers,
        "elapsed_us": (seconds * 1e6).round(),
        "read_mpps": round_to_hundredths(packets / seconds / 1e6),
    });
    // The paper measured the kernel's list with its spinlock.
    let is_papers_queue = case.queue == "single-queue-spinlock" && case.accounting != "reserved";
    let statistics = &median_run.statistics;
    let locks = [("socket", statistics.account), ("queue", statistics.structure)];
    let mut rows: Vec<Value> = Vec::new();
    for (lock, lock_statistics) in locks.into_iter().filter_map(|(lock, c)| Some((lock, c?))) {
        let mut row = common.clone();
        fill(&mut row, lock, &lock_statistics);
        let accounting = case.accounting == "one lock";
        let published_rows = published.find(lock, accounting, pause.is_some(), readers);
        let published_rows: Vec<_> = published_rows.filter(|_| is_papers_queue).collect();
        if let Some(first) = published_rows.first() {
            let tables: Vec<&str> = published_rows.iter().map(|row| row.table.as_str()).collect();
            row["tables"] = json!(tables.join(" "));
            fill_paper(&mut row, first);
        }
        rows.push(row);
    }
    if rows.is_empty() {
        let mut row = common;
        row["lock"] = json!("none");
        rows.push(row);
    }
    rows
}

fn fill(row: &mut Value, lock: &str, statistics: &LockStatistics) {
    row["lock"] = json!(lock);
    row["held_total_us"] = json!((statistics.held_ns / 1000.0).round());
    row["acquisitions"] = json!(statistics.acquisitions);
    row["held_mean_us"] = json!(round_to_thousandths(statistics.held_mean_ns() / 1000.0));
    row["waited_total_us"] = json!((statistics.waited_ns / 1000.0).round());
    row["contentions"] = json!(statistics.contentions);
    row["waited_mean_us"] = json!(round_to_thousandths(statistics.waited_mean_ns() / 1000.0));
}

fn fill_paper(row: &mut Value, paper: &PublishedRow) {
    row["paper_acquisitions"] = json!(paper.acquisitions);
    row["paper_held_mean_us"] = json!(round_to_thousandths(paper.held_mean_us));
    row["paper_contentions"] = json!(paper.contentions);
    row["paper_waited_mean_us"] = json!(round_to_thousandths(paper.waited_mean_us));
}

/// Rows of Tidegate's own stack: one per read method, IP version and number of readers, and one
/// with paced reads.
fn stack_rows(
    config: &LockContentionConfig,
    published: &LockTables,
    progress: &Progress,
    result: &mut Experiment,
) -> Result<(), LabError> {
    for (read_method, ip) in STACK_CASES {
        for &readers in &config.readers {
            let mut run = StackRun {
                read_method,
                ipv6: ip == "ipv6",
                readers,
                packets_per_reader: config.packets_per_reader,
                pause: Duration::ZERO,
                cut_off: CUT_OFF,
            };
            let free = median_of_stack(config, run)?;
            result.rows.push(stack_row(ip, run, &free, published));
            if readers == 1 {
                run.pause = Duration::from_nanos(free.lock.held_mean_ns() as u64);
                let paced = median_of_stack(config, run)?;
                result.rows.push(stack_row(ip, run, &paced, published));
            }
            progress.step(format_args!("{}, {ip}, {readers} readers", read_method.name()));
        }
    }
    Ok(())
}

/// The run of median length.
fn median_of_stack(config: &LockContentionConfig, run: StackRun) -> Result<StackOutcome, LabError> {
    let mut outcomes = Vec::new();
    for _ in 0..config.runs {
        outcomes.push(run.measure()?);
    }
    outcomes.sort_by_key(|outcome| outcome.elapsed);
    let middle = outcomes.len() / 2;
    Ok(outcomes.swap_remove(middle))
}

fn stack_row(ip: &str, run: StackRun, outcome: &StackOutcome, published: &LockTables) -> Value {
    let seconds = outcome.elapsed.as_secs_f64();
    let mut row = json!({
        "queue": run.read_method.name(),
        "ip": ip,
        "pause_ns": run.pause.as_nanos() as u64,
        "readers": run.readers,
        "elapsed_us": (seconds * 1e6).round(),
        "read": outcome.datagrams_read,
        "read_mpps": round_to_hundredths(outcome.datagrams_read as f64 / seconds / 1e6),
        "acquisitions_per_packet":
            round_to_thousandths(outcome.lock.acquisitions as f64 / outcome.datagrams_read.max(1) as f64),
    });
    fill(&mut row, "stack", &outcome.lock);
    // The kernel's socket lock, with memory accounting.
    let mut published_rows = published.find("socket", true, !run.pause.is_zero(), run.readers);
    if let Some(paper) = published_rows.find(|paper| paper.ip == ip) {
        row["tables"] = json!(paper.table);
        fill_paper(&mut row, paper);
    }
    row
}

fn figures(config: &LockContentionConfig, result: &mut Experiment) {
    let max_readers = config.readers.iter().copied().max().unwrap_or(1);
    let rate = |queue: &str, accounting: &str| {
        let matches_case = |row: &&Value| {
            row["queue"] == queue
                && row["accounting"] == accounting
                && row["readers"] == max_readers
                && row["pause_ns"] == 0
        };
        result
            .rows
            .iter()
            .find(matches_case)
            .and_then(|row| row["read_mpps"].as_f64())
            .unwrap_or(0.0)
    };
    let single = rate("single-queue-spinlock", "reserved")
        / rate("single-queue-spinlock", "one lock").max(1e-9);
    let grid = rate("grid", "reserved") / rate("grid", "one lock").max(1e-9);
    result.figure("reserved_over_one_lock_single", single);
    result.figure("reserved_over_one_lock_grid", grid);
    for read_method in [ReadMethod::OneSocket, ReadMethod::QueuePerReader] {
        let matches_case = |row: &&Value| {
            row["queue"] == read_method.name()
                && row["readers"] == max_readers
                && row["pause_ns"] == 0
        };
        let uses = result
            .rows
            .iter()
            .filter(matches_case)
            .filter_map(|row| row["acquisitions_per_packet"].as_f64());
        let max_uses = uses.fold(0.0, f64::max);
        result
            .figure(&format!("{}_uses_per_packet", read_method.name().replace('-', "_")), max_uses);
    }
    let [plain, counted] =
        min_of_interleaved([lock_cycle_ns::<Spin>, lock_cycle_ns::<Metered<Spin>>]);
    result.figure("lock_ns", plain);
    result.figure("statistics_cost_ns", counted - plain);
    let [plain, counted] = min_of_interleaved([packet_ns::<Spin>, packet_ns::<Metered<Spin>>]);
    result.figure("packet_ns", plain);
    result.figure("statistics_cost_percent", (counted / plain - 1.0) * 100.0);
}

/// The minimum of five measurements of each function, taken alternately.
fn min_of_interleaved<const N: usize>(measure: [fn() -> f64; N]) -> [f64; N] {
    let mut minima = [f64::INFINITY; N];
    for _ in 0..5 {
        for (minimum, measure) in minima.iter_mut().zip(measure) {
            *minimum = minimum.min(measure());
        }
    }
    minima
}

/// Cost of acquiring and releasing a free lock, in nanoseconds.
fn lock_cycle_ns<K: LockKind>() -> f64 {
    let lock = K::Lock::new(0u64);
    let start = Instant::now();
    for _ in 0..COST_ROUNDS {
        black_box(&lock).with(|count| *count += 1);
    }
    start.elapsed().as_nanos() as f64 / f64::from(COST_ROUNDS)
}

/// Cost, in nanoseconds and on one thread, of pushing a packet into the paper's queue with one
/// accounting lock and popping it again: four acquisitions of free locks.
fn packet_ns<K: LockKind>() -> f64 {
    let shape = QueueShape { producers: 1, readers: 1, capacity: 1 };
    let ends =
        open::<SingleList<ModelPacket, K>, LockedAccount<K>, Futex>(&shape, QueueLimits::default());
    // A futex needs no file descriptor, so opening cannot fail.
    let Ok(QueueEnds { mut producers, mut readers }) = ends else { return f64::NAN };
    let start = Instant::now();
    for _ in 0..COST_ROUNDS {
        let put = producers[0].try_push(black_box(ModelPacket::default()));
        black_box((put.is_ok(), readers[0].pop()));
    }
    start.elapsed().as_nanos() as f64 / f64::from(COST_ROUNDS)
}

fn notes(config: &LockContentionConfig, result: &mut Experiment) {
    result.note(format!(
        "{} packets per reader from one producer, the run of median length of {}, {} cores; a \
         limit of {LIMIT_BYTES} bytes where there is accounting",
        config.packets_per_reader,
        config.runs,
        cpu::available_cores()
    ));
    result.note(
        "this is the model, not the kernel: its socket lock covers the accounting only, the kernel's \
         of 2013 also freeing the packet; producers wait for space where the kernel drops. \
         The paper's numbers beside it are those for IPv4; the tables named are for IPv4 and \
         IPv6, which the model does not distinguish",
    );
    result.note(
        "tidegate-one-socket and tidegate-queue-each are Tidegate's own stack on a link in \
         memory that a sender fills endlessly: all readers on one socket, whose stack is \
         locked for each call as the kernel's socket is, and readers with a queue each \
         (UdpSocket::readers), which take no lock per datagram; the rest are acquisitions by the \
         thread that runs the stack, one per burst. Beside them the paper's socket lock",
    );
    result.note(
        "a pause between reads is the longest mean hold time of a lock, as in the paper's \
         paced runs; lock_ns is the cost of a free spinlock, statistics_cost_ns of its statistics; \
         packet_ns is the cost of a packet on one thread through the paper's queue with one \
         accounting lock, statistics_cost_percent that of the statistics",
    );
}

/// Packets read per second, and contentions, against readers, by queue and accounting.
fn picture(result: &Experiment) -> Picture {
    let mut panels = Vec::new();
    for (key, title, unit) in [
        ("read_mpps", "packets read", "millions/s"),
        ("contentions", "contentions of the most contended lock", ""),
    ] {
        let mut series: Vec<Series> = Vec::new();
        for row in result.rows.iter().filter(|row| row["pause_ns"] == 0) {
            let text = |key: &str| row[key].as_str().unwrap_or_default();
            let name = match row["ip"].as_str() {
                Some(ip) => format!("{}, {ip}", text("queue")),
                None => format!("{}, accounting: {}", text("queue"), text("accounting")),
            };
            let (Some(x), Some(y)) = (row["readers"].as_f64(), row[key].as_f64()) else { continue };
            let at = series.iter().position(|series| series.name == name).unwrap_or_else(|| {
                series.push(Series::new(name, []));
                series.len() - 1
            });
            match series[at].points.last_mut() {
                Some(last) if last.0 == x => last.1 = last.1.max(y),
                _ => series[at].points.push((x, y)),
            }
        }
        panels.push(Panel {
            title: title.into(),
            x: Axis::new("readers", ""),
            y: Axis::new(title, unit),
            series,
            spans: Vec::new(),
        });
    }
    Picture { title: "The locks of a receive queue".into(), panels }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_every_lock_of_every_case() {
        let config =
            LockContentionConfig { packets_per_reader: 2_000, runs: 1, readers: vec![1, 2] };
        let result = run(&config).unwrap();
        let find_row = |queue: &str, accounting: &str, readers: u64, lock: &str| {
            let matches_case = |row: &&Value| {
                row["queue"] == queue
                    && row["accounting"] == accounting
                    && row["readers"] == readers
                    && row["lock"] == lock
                    && row["pause_ns"] == 0
            };
            result.rows.iter().find(matches_case).cloned()
        };
        for readers in [1, 2] {
            let socket = find_row("single-queue-spinlock", "one lock", readers, "socket").unwrap();
            // One acquisition to push and one to pop each packet, and more when the queue was full.
            assert!(socket["acquisitions"].as_u64() >= Some(4_000 * readers));
            assert!(socket["tables"].as_str().unwrap().contains("3.1"));
            let queue = find_row("single-queue-spinlock", "none", readers, "queue").unwrap();
            assert!(queue["tables"].as_str().unwrap().contains("3.5"));
            assert!(find_row("single-queue-spinlock", "none", readers, "socket").is_none());
            assert!(find_row("grid", "reserved", readers, "none").is_some(), "no lock");
            for (read_method, ip, table) in [
                (ReadMethod::OneSocket, "ipv4", "3.1"),
                (ReadMethod::OneSocket, "ipv6", "3.3"),
                (ReadMethod::QueuePerReader, "ipv6", "3.3"),
            ] {
                let matches_case = |row: &&Value| {
                    row["queue"] == read_method.name()
                        && row["ip"] == ip
                        && row["readers"] == readers
                        && row["tables"] == table
                };
                let stack = result.rows.iter().find(matches_case).unwrap();
                assert_eq!(stack["read"], 2_000 * readers, "{stack}");
                assert!(stack["acquisitions"].as_u64() > Some(0), "{stack}");
            }
        }
        let paced = result.rows.iter().filter(|row| row["pause_ns"].as_u64() > Some(0));
        assert!(paced.count() >= 9);
        for figure in ["lock_ns", "packet_ns"] {
            assert!(result.figures[figure] > 0.0, "{figure}");
        }
    }
}
