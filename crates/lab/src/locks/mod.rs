//! `tidegate lab locks`: how the locks of a receive queue are used, after
//! chapter 3 of Rivera's thesis, in the model of its chapter 4.
//!
//! Memory accounting by one lock stands for the kernel's socket lock. Beside it
//! stands accounting that each user does in a stash of its own, and beside the
//! model Tidegate's own stack, on IPv4 and IPv6.

mod published;
mod stack;

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate_memory::queues::lock::{Counted, Lock, LockKind, LockStatistics, Sleeping, Spin};
use tidegate_memory::queues::{
    Account, Ends, Eventfd, Futex, Grid, Limits, OneLock, QueueStatistics, Reserved, Semaphore,
    Shape, Single, Structure, Unlimited, open,
};

use crate::plot::{Axis, Panel, Picture, Series};
use crate::queues::model::{Outcome, Run, Token, measure};
use crate::sweep::hundredths;
use crate::{Experiment, LabError, cpu};
use published::{LockTables, Published};
use stack::{StackOutcome, StackRun, Way};

/// The kernel's receive buffer by default, and the packets that fit into it.
const LIMIT_BYTES: u64 = 212_992;
const LIMIT_PACKETS: u32 = 1 << 20;
/// A run that takes longer does not count.
const CUT_OFF: Duration = Duration::from_secs(25);
/// How often a free lock is taken to see what counting costs.
const COST_ROUNDS: u32 = 500_000;

/// What is measured.
#[derive(Clone, Debug)]
pub struct LocksConfig {
    /// Packets for each reader.
    pub packets_per_reader: u64,
    /// How often each case is measured; the run of median length counts.
    pub runs: usize,
    /// Numbers of readers.
    pub readers: Vec<usize>,
}

/// A queue with one way to account.
struct Subject {
    queue: &'static str,
    accounting: &'static str,
    run: fn(&Run) -> io::Result<Outcome>,
}

const SUBJECTS: [Subject; 6] = [
    Subject {
        queue: "single-queue-spinlock",
        accounting: "one lock",
        run: run_on::<Single<Token, Counted<Spin>>, OneLock<Counted<Spin>>, Eventfd>,
    },
    Subject {
        queue: "single-queue-spinlock",
        accounting: "none",
        run: run_on::<Single<Token, Counted<Spin>>, Unlimited, Eventfd>,
    },
    Subject {
        queue: "single-queue-spinlock",
        accounting: "reserved",
        run: run_on::<Single<Token, Counted<Spin>>, Reserved, Eventfd>,
    },
    Subject {
        queue: "single-queue-mutex",
        accounting: "one lock",
        run: run_on::<Single<Token, Counted<Sleeping>>, OneLock<Counted<Sleeping>>, Eventfd>,
    },
    Subject {
        queue: "grid",
        accounting: "one lock",
        run: run_on::<Grid<Token>, OneLock<Counted<Spin>>, Futex>,
    },
    Subject { queue: "grid", accounting: "reserved", run: run_on::<Grid<Token>, Reserved, Futex> },
];

fn run_on<S, A, B>(run: &Run) -> io::Result<Outcome>
where
    S: Structure<Packet = Token>,
    A: Account,
    B: Semaphore,
{
    let shape = Shape { producers: run.producers, readers: run.readers, capacity: 1024 };
    let limits = Limits::new(LIMIT_PACKETS, LIMIT_BYTES).map_err(io::Error::other)?;
    Ok(measure(open::<S, A, B>(&shape, limits)?, run))
}

/// Measures every case.
///
/// # Errors
/// When threads cannot be had, or a packet was lost.
pub fn run(config: &LocksConfig) -> Result<Experiment, LabError> {
    if config.packets_per_reader == 0 || config.runs == 0 || config.readers.contains(&0) {
        return Err(LabError::Config("give --packets, --runs and --readers of at least 1".into()));
    }
    let published = LockTables::read()?;
    let mut result = Experiment::new("locks");
    for subject in &SUBJECTS {
        for &readers in &config.readers {
            let free = measure_median(config, subject, readers, Duration::ZERO)?;
            let rows = rows(subject, readers, None, &free, config, &published);
            result.rows.extend(rows);
            if readers != 1 || subject.accounting != "one lock" {
                continue;
            }
            // As long as a lock is held on average, as the paper paces.
            let Some(pause) = free.longest_hold() else { continue };
            let paced = measure_median(config, subject, readers, pause)?;
            result.rows.extend(self::rows(
                subject,
                readers,
                Some(pause),
                &paced,
                config,
                &published,
            ));
        }
    }
    stack_rows(config, &published, &mut result)?;
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
struct Measured {
    elapsed: Duration,
    statistics: QueueStatistics,
}

impl Measured {
    /// How long the lock is held each time that is held longest.
    fn longest_hold(&self) -> Option<Duration> {
        let locks = [self.statistics.structure, self.statistics.account];
        let holds = locks.into_iter().flatten().map(|lock| lock.held_mean_ns());
        holds.reduce(f64::max).map(|ns| Duration::from_nanos(ns as u64))
    }
}

fn measure_median(
    config: &LocksConfig,
    subject: &Subject,
    readers: usize,
    pause: Duration,
) -> Result<Measured, LabError> {
    let run = Run {
        producers: 1,
        readers,
        packets_per_reader: config.packets_per_reader,
        burst: 1,
        pause,
        cut_off: CUT_OFF,
    };
    let mut all = Vec::new();
    for _ in 0..config.runs {
        let outcome = (subject.run)(&run).map_err(LabError::io("cannot make a queue"))?;
        if outcome.elapsed.is_some() && !outcome.whole {
            let queue = subject.queue;
            return Err(LabError::Config(format!("{queue} lost or doubled packets")));
        }
        let elapsed = outcome.elapsed.unwrap_or(CUT_OFF);
        all.push(Measured { elapsed, statistics: outcome.statistics });
    }
    all.sort_by_key(|measured| measured.elapsed);
    let middle = all.len() / 2;
    Ok(all.swap_remove(middle))
}

/// A row for each lock, or one without if there is none.
fn rows(
    subject: &Subject,
    readers: usize,
    pause: Option<Duration>,
    measured: &Measured,
    config: &LocksConfig,
    published: &LockTables,
) -> Vec<Value> {
    let packets = (readers as u64 * config.packets_per_reader) as f64;
    let seconds = measured.elapsed.as_secs_f64();
    let common = json!({
        "queue": subject.queue,
        "accounting": subject.accounting,
        "pause_ns": pause.map_or(0, |pause| pause.as_nanos() as u64),
        "readers": readers,
        "elapsed_us": (seconds * 1e6).round(),
        "read_mpps": hundredths(packets / seconds / 1e6),
    });
    // What the paper measured is the kernel's list with its spinlock.
    let paper = subject.queue == "single-queue-spinlock" && subject.accounting != "reserved";
    let statistics = &measured.statistics;
    let locks = [("socket", statistics.account), ("queue", statistics.structure)];
    let mut rows: Vec<Value> = Vec::new();
    for (lock, counted) in locks.into_iter().filter_map(|(lock, c)| Some((lock, c?))) {
        let mut row = common.clone();
        fill(&mut row, lock, &counted);
        let accounting = subject.accounting == "one lock";
        let found = published.find(lock, accounting, pause.is_some(), readers);
        let found: Vec<_> = found.filter(|_| paper).collect();
        if let Some(first) = found.first() {
            let tables: Vec<&str> = found.iter().map(|row| row.table.as_str()).collect();
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

fn fill(row: &mut Value, lock: &str, counted: &LockStatistics) {
    row["lock"] = json!(lock);
    row["held_total_us"] = json!((counted.held_ns / 1000.0).round());
    row["acquisitions"] = json!(counted.acquisitions);
    row["held_mean_us"] = json!(thousandths(counted.held_mean_ns() / 1000.0));
    row["waited_total_us"] = json!((counted.waited_ns / 1000.0).round());
    row["contentions"] = json!(counted.contentions);
    row["waited_mean_us"] = json!(thousandths(counted.waited_mean_ns() / 1000.0));
}

fn fill_paper(row: &mut Value, paper: &Published) {
    row["paper_acquisitions"] = json!(paper.acquisitions);
    row["paper_held_mean_us"] = json!(thousandths(paper.held_mean_us));
    row["paper_contentions"] = json!(paper.contentions);
    row["paper_waited_mean_us"] = json!(thousandths(paper.waited_mean_us));
}

/// Tidegate's own stack: a row for each way to read, IP version and number of
/// readers, and one of paced reads.
fn stack_rows(
    config: &LocksConfig,
    published: &LockTables,
    result: &mut Experiment,
) -> Result<(), LabError> {
    for way in [Way::OneSocket, Way::QueueEach] {
        for ip in ["ipv4", "ipv6"] {
            for &readers in &config.readers {
                let mut run = StackRun {
                    way,
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
            }
        }
    }
    Ok(())
}

/// The run of median length.
fn median_of_stack(config: &LocksConfig, run: StackRun) -> Result<StackOutcome, LabError> {
    let mut all = Vec::new();
    for _ in 0..config.runs {
        all.push(run.measure()?);
    }
    all.sort_by_key(|outcome| outcome.elapsed);
    let middle = all.len() / 2;
    Ok(all.swap_remove(middle))
}

fn stack_row(ip: &str, run: StackRun, outcome: &StackOutcome, published: &LockTables) -> Value {
    let seconds = outcome.elapsed.as_secs_f64();
    let mut row = json!({
        "queue": run.way.name(),
        "ip": ip,
        "pause_ns": run.pause.as_nanos() as u64,
        "readers": run.readers,
        "elapsed_us": (seconds * 1e6).round(),
        "read": outcome.read,
        "read_mpps": hundredths(outcome.read as f64 / seconds / 1e6),
        "acquisitions_per_packet":
            thousandths(outcome.lock.acquisitions as f64 / outcome.read.max(1) as f64),
    });
    fill(&mut row, "stack", &outcome.lock);
    // The kernel's lock of the socket, with its accounting.
    let mut found = published.find("socket", true, !run.pause.is_zero(), run.readers);
    if let Some(paper) = found.find(|paper| paper.ip == ip) {
        row["tables"] = json!(paper.table);
        fill_paper(&mut row, paper);
    }
    row
}

fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn figures(config: &LocksConfig, result: &mut Experiment) {
    let most = config.readers.iter().copied().max().unwrap_or(1);
    let rate = |queue: &str, accounting: &str| {
        let is_it = |row: &&Value| {
            row["queue"] == queue
                && row["accounting"] == accounting
                && row["readers"] == most
                && row["pause_ns"] == 0
        };
        result.rows.iter().find(is_it).and_then(|row| row["read_mpps"].as_f64()).unwrap_or(0.0)
    };
    let single = rate("single-queue-spinlock", "reserved")
        / rate("single-queue-spinlock", "one lock").max(1e-9);
    let grid = rate("grid", "reserved") / rate("grid", "one lock").max(1e-9);
    result.figure("reserved_over_one_lock_single", single);
    result.figure("reserved_over_one_lock_grid", grid);
    for way in [Way::OneSocket, Way::QueueEach] {
        let is_it = |row: &&Value| {
            row["queue"] == way.name() && row["readers"] == most && row["pause_ns"] == 0
        };
        let uses = result
            .rows
            .iter()
            .filter(is_it)
            .filter_map(|row| row["acquisitions_per_packet"].as_f64());
        let most_uses = uses.fold(0.0, f64::max);
        result.figure(&format!("{}_uses_per_packet", way.name().replace('-', "_")), most_uses);
    }
    let [plain, counted] = least_in_turn([use_ns::<Spin>, use_ns::<Counted<Spin>>]);
    result.figure("lock_ns", plain);
    result.figure("statistics_cost_ns", counted - plain);
    let [plain, counted] = least_in_turn([packet_ns::<Spin>, packet_ns::<Counted<Spin>>]);
    result.figure("packet_ns", plain);
    result.figure("statistics_cost_percent", (counted / plain - 1.0) * 100.0);
}

/// The least of five measurements of each, taken in turn.
fn least_in_turn<const N: usize>(measure: [fn() -> f64; N]) -> [f64; N] {
    let mut least = [f64::INFINITY; N];
    for _ in 0..5 {
        for (least, measure) in least.iter_mut().zip(measure) {
            *least = least.min(measure());
        }
    }
    least
}

/// What it costs to take a free lock and release it.
fn use_ns<K: LockKind>() -> f64 {
    let lock = K::Lock::new(0u64);
    let start = Instant::now();
    for _ in 0..COST_ROUNDS {
        black_box(&lock).with(|count| *count += 1);
    }
    start.elapsed().as_nanos() as f64 / f64::from(COST_ROUNDS)
}

/// What it costs one thread to put a packet into the paper's queue, with one
/// lock to account, and to take it out: four uses of free locks.
fn packet_ns<K: LockKind>() -> f64 {
    let shape = Shape { producers: 1, readers: 1, capacity: 1 };
    let ends = open::<Single<Token, K>, OneLock<K>, Futex>(&shape, Limits::default());
    // A futex needs no descriptor: there is nothing to fail.
    let Ok(Ends { mut producers, mut readers }) = ends else { return f64::NAN };
    let start = Instant::now();
    for _ in 0..COST_ROUNDS {
        let put = producers[0].try_push(black_box(Token::default()));
        black_box((put.is_ok(), readers[0].pop()));
    }
    start.elapsed().as_nanos() as f64 / f64::from(COST_ROUNDS)
}

fn notes(config: &LocksConfig, result: &mut Experiment) {
    result.note(format!(
        "{} packets per reader from one producer, the run of median length of {}, {} cores; a \
         limit of {LIMIT_BYTES} bytes where there is accounting",
        config.packets_per_reader,
        config.runs,
        cpu::cores()
    ));
    result.note(
        "this is the model, not the kernel: its socket lock is held to count only, the kernel's \
         of 2013 while it freed the packet too; producers wait for room where the kernel drops. \
         The paper's numbers beside it are those for IPv4; the tables named are for IPv4 and \
         IPv6, which the model does not tell apart",
    );
    result.note(
        "tidegate-one-socket and tidegate-queue-each are Tidegate's own stack on a wire in \
         memory that a sender fills without end: all readers on one socket, whose stack is \
         locked for each call as the kernel's socket is, and readers with a queue each \
         (UdpSocket::readers), who lock nothing for a datagram; what is left are the uses of the \
         thread that runs the stack, one for a burst. Beside them the paper's socket lock",
    );
    result.note(
        "a pause between reads is as long as the lock is held that is held longest, as the paper \
         paces; lock_ns is what a free spinlock costs, statistics_cost_ns what counting adds; \
         packet_ns is what a packet costs one thread through the paper's queue with one lock to \
         account, statistics_cost_percent what counting adds to that",
    );
}

/// Packets read per second against readers, by queue and accounting.
fn picture(result: &Experiment) -> Picture {
    let mut panels = Vec::new();
    for (key, title, unit) in [
        ("read_mpps", "packets read", "millions/s"),
        ("contentions", "contentions of the lock that has most", ""),
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
    fn every_lock_of_every_case_is_counted() {
        let config = LocksConfig { packets_per_reader: 2_000, runs: 1, readers: vec![1, 2] };
        let result = run(&config).unwrap();
        let of = |queue: &str, accounting: &str, readers: u64, lock: &str| {
            let is_it = |row: &&Value| {
                row["queue"] == queue
                    && row["accounting"] == accounting
                    && row["readers"] == readers
                    && row["lock"] == lock
                    && row["pause_ns"] == 0
            };
            result.rows.iter().find(is_it).cloned()
        };
        for readers in [1, 2] {
            let socket = of("single-queue-spinlock", "one lock", readers, "socket").unwrap();
            // Once in and once out for each packet, and more when it was full.
            assert!(socket["acquisitions"].as_u64() >= Some(4_000 * readers));
            assert!(socket["tables"].as_str().unwrap().contains("3.1"));
            let queue = of("single-queue-spinlock", "none", readers, "queue").unwrap();
            assert!(queue["tables"].as_str().unwrap().contains("3.5"));
            assert!(of("single-queue-spinlock", "none", readers, "socket").is_none());
            assert!(of("grid", "reserved", readers, "none").is_some(), "there is no lock");
            for (way, ip, table) in [
                (Way::OneSocket, "ipv4", "3.1"),
                (Way::OneSocket, "ipv6", "3.3"),
                (Way::QueueEach, "ipv6", "3.3"),
            ] {
                let is_it = |row: &&Value| {
                    row["queue"] == way.name()
                        && row["ip"] == ip
                        && row["readers"] == readers
                        && row["tables"] == table
                };
                let stack = result.rows.iter().find(is_it).unwrap();
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
