//! `tidegate lab reads`: what concurrent reads cost on this kernel, beside
//! Rivera's Tables 2.1 to 2.4.
//!
//! So many threads each read so many units of 10 bytes, without anything
//! between them but the kernel: from `/dev/zero`, from a FIFO, from a UDP
//! socket on the loopback; and each makes so many calls that do nothing.

mod published;

use std::fs::{File, OpenOptions};
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

use crate::experiment::number;
use crate::netns::Namespace;
use crate::plot::{Axis, Panel, Picture, Series};
use crate::sys::Writer;
use crate::{Experiment, LabError, cpu};

/// What a unit is (section 2.2.1).
const UNIT_BYTES: usize = 10;
/// A writer that died must not leave readers waiting.
const WRITER_LIMIT: Duration = Duration::from_secs(10);

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `/dev/zero`: a call that copies 10 bytes and shares nothing.
    DevZero,
    /// A FIFO, with a process that writes to it without end.
    Fifo,
    /// A UDP socket on the loopback, with a process that sends without end.
    UdpLoopback,
    /// Nothing: a system call that only returns.
    NullSyscall,
}

impl Source {
    /// Every source, in the order of the tables.
    pub const ALL: [Self; 4] = [Self::DevZero, Self::Fifo, Self::UdpLoopback, Self::NullSyscall];

    /// The name in rows and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::DevZero => "dev_zero",
            Self::Fifo => "fifo",
            Self::UdpLoopback => "udp_loopback",
            Self::NullSyscall => "null_syscall",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::DevZero => "/dev/zero (Table 2.1)",
            Self::Fifo => "FIFO (Table 2.2)",
            Self::UdpLoopback => "UDP socket, loopback (Table 2.3)",
            Self::NullSyscall => "null system call (Table 2.4)",
        }
    }
}

/// How to run the experiment.
#[derive(Clone, Debug)]
pub struct ReadsConfig {
    /// Units that each thread reads; the paper's 500,000.
    pub units: u64,
    /// Null calls that each thread makes; the paper's 15,000,000.
    pub calls: u64,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// How often to measure each case; the median counts.
    pub runs: usize,
}

impl Default for ReadsConfig {
    fn default() -> Self {
        Self { units: 500_000, calls: 15_000_000, threads: vec![1, 2, 4, 8], runs: 3 }
    }
}

const THREADS_MAX: usize = 1024;

impl ReadsConfig {
    fn check(&self) -> Result<(), LabError> {
        let problem = if self.units == 0 || self.calls == 0 {
            "reads needs at least one unit and one call for each thread".to_owned()
        } else if self.runs == 0 {
            "reads needs at least one run".to_owned()
        } else if self.threads.is_empty() {
            "reads needs a number of threads: give --threads 1,2,4,8".to_owned()
        } else if let Some(wrong) = self.threads.iter().find(|n| !(1..=THREADS_MAX).contains(*n)) {
            format!("{wrong} threads: give 1 to {THREADS_MAX}")
        } else {
            return Ok(());
        };
        Err(LabError::Config(problem))
    }
}

/// Runs the experiment. The UDP traffic is on the loopback of a network
/// namespace of its own, which needs root.
///
/// # Errors
/// When the configuration makes no sense, a namespace cannot be made, or
/// something cannot be read.
pub fn run(config: &ReadsConfig) -> Result<Experiment, LabError> {
    config.check()?;
    let published = published::published()?;
    let mut result = Experiment::new("reads");
    let mut measured: Vec<(Source, usize, f64)> = Vec::new();
    for source in Source::ALL {
        for &threads in &config.threads {
            let seconds = median_seconds(config, source, threads)?;
            measured.push((source, threads, seconds));
            let units = units_of(config, source);
            let rate = (units * threads as u64) as f64 / seconds;
            let mut row = json!({
                "source": source.name(),
                "threads": threads,
                "units_per_thread": units,
                "seconds": (seconds * 1000.0).round() / 1000.0,
                "units_per_second": rate.round(),
            });
            for paper in published.iter().filter(|p| p.source == source && p.threads == threads) {
                row[format!("linux_{}", paper.linux)] = json!(paper.seconds);
            }
            result.rows.push(row);
        }
    }
    let cores = cpu::cores();
    for source in Source::ALL {
        let ours = measured.iter().filter(|row| row.0 == source).map(|row| (row.1, row.2));
        if let Some(scaling) = scaling(ours, cores) {
            result.figure(&format!("{}_scaling", source.name()), scaling);
        }
    }
    result.columns = vec!["source", "threads", "units_per_thread", "seconds", "units_per_second"];
    result.columns.extend(["linux_2.6.24", "linux_2.6.35", "linux_2.6.38", "linux_3.4.6-2"]);
    result.columns.extend(["linux_3.5.0-2", "linux_3.5.2"]);
    notes(&mut result, config, cores);
    result.picture = Some(picture(config, &measured, &published));
    Ok(result)
}

fn notes(result: &mut Experiment, config: &ReadsConfig, cores: usize) {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    result.note(format!(
        "Linux {kernel}, {cores} cores, threads not pinned; median of {} runs, from the start of \
         all threads to the end of the last; units of {UNIT_BYTES} bytes; a writer process for \
         FIFO and UDP takes a core or part of one",
        config.runs
    ));
    result.note(
        "the columns linux_* are Rivera's Tables 2.1 to 2.4 in seconds, on an Intel i5-2400 with \
         4 cores; the null call here is getppid, his was one of his own that returns a constant",
    );
    result.note(
        "a scaling is the rate with the most threads that have a core each, over the rate of one \
         thread: the number of threads when they do not disturb each other",
    );
}

fn units_of(config: &ReadsConfig, source: Source) -> u64 {
    if source == Source::NullSyscall { config.calls } else { config.units }
}

/// The rate with the most threads that have a core each, over that of one.
fn scaling(times: impl Iterator<Item = (usize, f64)>, cores: usize) -> Option<f64> {
    let times: Vec<_> = times.collect();
    let one = times.iter().find(|time| time.0 == 1)?;
    let most = times.iter().filter(|time| time.0 <= cores).max_by_key(|time| time.0)?;
    Some((one.1 * most.0 as f64 / most.1 * 100.0).round() / 100.0)
}

fn median_seconds(config: &ReadsConfig, source: Source, threads: usize) -> Result<f64, LabError> {
    let mut seconds = Vec::with_capacity(config.runs);
    for _ in 0..config.runs {
        seconds.push(measure(source, threads, units_of(config, source))?);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

fn measure(source: Source, threads: usize, units: u64) -> Result<f64, LabError> {
    match source {
        Source::DevZero => {
            let file = File::open("/dev/zero").map_err(LabError::file("/dev/zero"))?;
            time(threads, units, || read_unit(file.as_fd()))
        }
        Source::Fifo => {
            let folder = tempfile::tempdir().map_err(LabError::io("no temporary folder"))?;
            let path = folder.path().join("fifo");
            let reader = open_fifo(&path)?;
            time(threads, units, || read_unit(reader.0.as_fd()))
        }
        Source::UdpLoopback => Namespace::new("reads")?.enter(|| {
            let (socket, _writer) = open_socket()?;
            time(threads, units, || read_unit(socket.as_fd()))
        })?,
        Source::NullSyscall => time(threads, units, || {
            std::hint::black_box(rustix::process::getppid());
            Ok(())
        }),
    }
}

/// A FIFO and the process that writes to it.
fn open_fifo(path: &std::path::Path) -> Result<(File, Writer), LabError> {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .map_err(LabError::io("cannot make a FIFO"))?;
    let open = |options: &OpenOptions| options.open(path).map_err(LabError::file(path));
    // Who opens one end waits for the other, but for one that opens both.
    let both = open(OpenOptions::new().read(true).write(true))?;
    let reader = open(OpenOptions::new().read(true))?;
    let writer = open(OpenOptions::new().write(true))?;
    drop(both);
    let process = Writer::start(writer.as_fd(), &[7; UNIT_BYTES])
        .map_err(LabError::io("cannot start a writer"))?;
    Ok((reader, process))
}

/// A socket on the loopback and the process that sends to it.
pub(crate) fn open_socket() -> Result<(UdpSocket, Writer), LabError> {
    let open = || -> std::io::Result<_> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.set_read_timeout(Some(WRITER_LIMIT))?;
        let sender = UdpSocket::bind("127.0.0.1:0")?;
        sender.connect(socket.local_addr()?)?;
        let writer = Writer::start(sender.as_fd(), &[7; UNIT_BYTES])?;
        Ok((socket, writer))
    };
    open().map_err(LabError::io("cannot open sockets on the loopback"))
}

#[inline]
fn read_unit(fd: BorrowedFd<'_>) -> Result<(), LabError> {
    let mut unit = [0; UNIT_BYTES];
    match rustix::io::read(fd, &mut unit) {
        Ok(0) => Err(LabError::Config("the writer ended before the readers had enough".into())),
        Ok(_) => Ok(()),
        Err(error) => Err(LabError::io("cannot read")(error)),
    }
}

/// The seconds until `threads` threads have each done `work` `units` times.
fn time(
    threads: usize,
    units: u64,
    work: impl Fn() -> Result<(), LabError> + Sync,
) -> Result<f64, LabError> {
    time_from(|| Ok(()), threads, units, work)
}

/// As [`time`], with something that every thread does before time is counted.
pub(crate) fn time_from(
    prepare: impl Fn() -> Result<(), LabError> + Sync,
    threads: usize,
    units: u64,
    work: impl Fn() -> Result<(), LabError> + Sync,
) -> Result<f64, LabError> {
    let barrier = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let reader = || {
            let prepared = prepare();
            barrier.wait();
            prepared.and_then(|()| (0..units).try_for_each(|_| work()))
        };
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(reader)).collect();
        barrier.wait();
        let start = Instant::now();
        for reader in readers {
            reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(start.elapsed().as_secs_f64())
    })
}

/// Seconds against threads, one panel for each source. Published times are for
/// as many units as ours are scaled to.
fn picture(
    config: &ReadsConfig,
    measured: &[(Source, usize, f64)],
    published: &[published::Published],
) -> Picture {
    let panels = Source::ALL.map(|source| {
        let of = || published.iter().filter(|row| row.source == source);
        let units = of().map(|row| row.units).next().unwrap_or(1);
        let factor = units as f64 / units_of(config, source) as f64;
        let ours = measured.iter().filter(|row| row.0 == source);
        let ours = ours.map(|row| (row.1 as f64, row.2 * factor));
        let mut series = vec![Series::new("this kernel", ours)];
        let mut kernels: Vec<&str> = of().map(|row| row.linux.as_str()).collect();
        kernels.dedup();
        kernels.sort_unstable();
        kernels.dedup();
        for linux in kernels {
            let rows = of().filter(|row| row.linux == linux);
            let points = rows.map(|row| (row.threads as f64, row.seconds));
            series.push(Series::new(format!("Linux {linux}, published"), points).dashed());
        }
        Panel {
            title: source.title().to_owned(),
            x: Axis::new("threads", ""),
            y: Axis::new(format!("time for {} units each", number(units as f64)), "s"),
            series,
            ..Panel::default()
        }
    });
    Picture { title: "Concurrent reads".to_owned(), panels: panels.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_but_the_network_can_be_read_by_many() {
        for source in [Source::DevZero, Source::Fifo, Source::NullSyscall] {
            for threads in [1, 3] {
                assert!(measure(source, threads, 500).unwrap() > 0.0, "{source:?}");
            }
        }
    }

    #[test]
    fn a_writer_that_is_gone_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (reader, writer) = open_fifo(&folder.path().join("fifo")).unwrap();
        drop(writer);
        // What it left in the FIFO comes first.
        let error = time(2, 1 << 20, || read_unit(reader.as_fd())).unwrap_err();
        assert!(error.to_string().contains("the writer ended"), "{error}");
    }

    #[test]
    fn scaling_is_of_the_threads_that_have_a_core() {
        let times = [(1, 1.0), (2, 1.25), (4, 9.0)];
        assert_eq!(scaling(times.into_iter(), 2), Some(1.6));
        assert_eq!(scaling(times.into_iter(), 1), Some(1.0));
        assert_eq!(scaling(times.into_iter().skip(1), 2), None);
    }

    #[test]
    fn nonsense_is_refused() {
        let refused = |change: fn(&mut ReadsConfig)| {
            let mut config = ReadsConfig::default();
            change(&mut config);
            run(&config).unwrap_err().to_string()
        };
        assert!(refused(|c| c.units = 0).contains("at least one unit"));
        assert!(refused(|c| c.runs = 0).contains("one run"));
        assert!(refused(|c| c.threads = vec![]).contains("--threads"));
        assert!(refused(|c| c.threads = vec![0]).contains("0 threads: give 1"));
    }
}
