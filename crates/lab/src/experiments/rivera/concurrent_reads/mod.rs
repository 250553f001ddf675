//! Experiment concurrent-reads: cost of concurrent reads on this kernel, compared with Rivera's
//! Tables 2.1 to 2.4, and on Tidegate.
//!
//! A number of threads each read a number of 10-byte units: from `/dev/zero`, from a FIFO, from
//! a UDP socket on the loopback interface, and from a UDP socket of Tidegate. In further cases each
//! thread makes a number of null system calls, or of calls of Tidegate that find nothing. Nothing
//! synchronizes the threads except the kernel, or Tidegate.

mod published;

use std::fs::{File, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde::Deserialize;
use serde_json::json;
use tidegate_load::format_number;

use crate::Experiment;
use crate::LabError;
use crate::experiments::rivera::stack_readers::{ReadMethod, StackRun};
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::{round_to_hundredths, round_to_thousandths};
use crate::testbed::cpu;
use crate::testbed::folder;
use crate::testbed::netns::Namespace;
use crate::testbed::sys::{self, WriterProcess};

/// Size of a unit (Rivera, section 2.2.1).
const UNIT_BYTES: usize = 10;
/// Receive timeout, so that readers do not wait for a writer that has exited.
const WRITER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a run on Tidegate.
const STACK_TIMEOUT: Duration = Duration::from_secs(120);

/// Source of the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadSource {
    /// `/dev/zero`: a call that copies 10 bytes and shares no state.
    DevZero,
    /// A FIFO, with a process that writes continuously.
    Fifo,
    /// A UDP socket on the loopback interface, with a process that sends continuously.
    UdpLoopback,
    /// A system call that only returns: `getppid`.
    NullSyscall,
    /// A system call with a number that does not exist.
    UnknownSyscall,
    /// A UDP socket of Tidegate on a link in memory, with a thread that sends continuously and a queue
    /// for each reading thread.
    TidegateUdp,
    /// The same without a sender: a call that finds nothing.
    TidegateEmpty,
}

impl ReadSource {
    /// Every source, in the order of the tables.
    pub const ALL: [Self; 7] = [
        Self::DevZero,
        Self::Fifo,
        Self::UdpLoopback,
        Self::NullSyscall,
        Self::UnknownSyscall,
        Self::TidegateUdp,
        Self::TidegateEmpty,
    ];

    /// Name in rows and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::DevZero => "dev_zero",
            Self::Fifo => "fifo",
            Self::UdpLoopback => "udp_loopback",
            Self::NullSyscall => "null_syscall",
            Self::UnknownSyscall => "unknown_syscall",
            Self::TidegateUdp => "tidegate_udp",
            Self::TidegateEmpty => "tidegate_empty",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::DevZero => "/dev/zero (Table 2.1)",
            Self::Fifo => "FIFO (Table 2.2)",
            Self::UdpLoopback => "UDP socket, loopback (Table 2.3)",
            Self::NullSyscall => "null system call (Table 2.4)",
            Self::UnknownSyscall => "unknown system call (Table 2.4)",
            Self::TidegateUdp => "UDP socket of Tidegate",
            Self::TidegateEmpty => "call of Tidegate without a datagram",
        }
    }

    /// True if each unit is a call that reads nothing.
    fn is_call(self) -> bool {
        matches!(self, Self::NullSyscall | Self::UnknownSyscall | Self::TidegateEmpty)
    }
}

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ConcurrentReadsConfig {
    /// Units that each thread reads; the paper uses 500,000.
    pub units: u64,
    /// Null calls that each thread makes; the paper uses 15,000,000.
    pub calls: u64,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Number of runs of each case; the median counts.
    pub runs: usize,
}

impl Default for ConcurrentReadsConfig {
    fn default() -> Self {
        Self { units: 500_000, calls: 15_000_000, threads: vec![1, 2, 4, 8], runs: 3 }
    }
}

impl ConcurrentReadsConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { units: 100_000, calls: 3_000_000, runs: 1, ..self }
    }
}

const MAX_THREADS: usize = 1024;

impl ConcurrentReadsConfig {
    fn check(&self) -> Result<(), LabError> {
        let problem = if self.units == 0 || self.calls == 0 {
            "give at least one unit and one call for each thread".to_owned()
        } else if self.runs == 0 {
            "give at least one run".to_owned()
        } else if self.threads.is_empty() {
            "no number of threads: give --threads 1,2,4,8".to_owned()
        } else if let Some(wrong) = self.threads.iter().find(|n| !(1..=MAX_THREADS).contains(*n)) {
            format!("{wrong} threads: give 1 to {MAX_THREADS}")
        } else {
            return Ok(());
        };
        Err(LabError::Config(problem))
    }
}

/// Runs the experiment.
///
/// The UDP traffic uses the loopback interface of a new network namespace, which needs root.
///
/// # Errors
/// When the configuration is invalid, a namespace cannot be created, or a source cannot be read.
pub fn run(config: &ConcurrentReadsConfig) -> Result<Experiment, LabError> {
    config.check()?;
    let published = published::read_published()?;
    let mut result = Experiment::new("concurrent-reads");
    let mut measured: Vec<(ReadSource, usize, f64)> = Vec::new();
    let progress = Progress::new(ReadSource::ALL.len() * config.threads.len());
    for source in ReadSource::ALL {
        for &threads in &config.threads {
            let seconds = median_seconds(config, source, threads)?;
            measured.push((source, threads, seconds));
            let units = units_per_thread(config, source);
            let rate = (units * threads as u64) as f64 / seconds;
            let mut row = json!({
                "source": source.name(),
                "threads": threads,
                "units_per_thread": units,
                "seconds": round_to_thousandths(seconds),
                "units_per_second": rate.round(),
            });
            for paper in published.iter().filter(|p| p.source == source && p.threads == threads) {
                row[format!("linux_{}", paper.linux)] = json!(paper.seconds);
            }
            result.rows.push(row);
            progress.step(format_args!("{} {threads} threads: {seconds:.2} s", source.name()));
        }
    }
    let cores = cpu::available_cores();
    for source in ReadSource::ALL {
        let times = measured.iter().filter(|row| row.0 == source).map(|row| (row.1, row.2));
        if let Some(scaling) = scaling(times, cores) {
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

fn notes(result: &mut Experiment, config: &ConcurrentReadsConfig, cores: usize) {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    result.note(format!(
        "Linux {kernel}, {cores} cores, threads not pinned; median of {} runs, from the start of \
         all threads to the end of the last; units of {UNIT_BYTES} bytes; a writer process for \
         FIFO and UDP takes a core or part of one",
        config.runs
    ));
    result.note(
        "the columns linux_* are Rivera's Tables 2.1 to 2.4 in seconds, on an Intel i5-2400 with \
         4 cores; the null call here is getppid, and the unknown call one with a number that does not \
         exist; Rivera's was a new system call that returns a constant. On Tidegate a thread sends \
         continuously and another runs the stack: both share the cores with the readers",
    );
    result.note(
        "a scaling is the rate with the most threads that have a core each, over the rate of one \
         thread; equal to the number of threads when the threads do not disturb each other",
    );
}

fn units_per_thread(config: &ConcurrentReadsConfig, source: ReadSource) -> u64 {
    if source.is_call() { config.calls } else { config.units }
}

/// Rate with the most threads that have a core each, divided by the rate of one thread.
fn scaling(times: impl Iterator<Item = (usize, f64)>, cores: usize) -> Option<f64> {
    let times: Vec<_> = times.collect();
    let single = times.iter().find(|time| time.0 == 1)?;
    let widest = times.iter().filter(|time| time.0 <= cores).max_by_key(|time| time.0)?;
    Some(round_to_hundredths(single.1 * widest.0 as f64 / widest.1))
}

fn median_seconds(
    config: &ConcurrentReadsConfig,
    source: ReadSource,
    threads: usize,
) -> Result<f64, LabError> {
    let mut seconds = Vec::with_capacity(config.runs);
    for _ in 0..config.runs {
        seconds.push(measure(source, threads, units_per_thread(config, source))?);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

fn measure(source: ReadSource, threads: usize, units: u64) -> Result<f64, LabError> {
    match source {
        ReadSource::DevZero => {
            let file = File::open("/dev/zero").map_err(LabError::file("/dev/zero"))?;
            time_threads(threads, units, || read_unit(file.as_fd()))
        }
        ReadSource::Fifo => {
            let folder = folder::private()?;
            let path = folder.path().join("fifo");
            let reader = open_fifo(&path)?;
            time_threads(threads, units, || read_unit(reader.0.as_fd()))
        }
        ReadSource::UdpLoopback => Namespace::new("reads")?.enter(|| {
            let (socket, _writer) = open_loopback_socket(Ipv4Addr::LOCALHOST.into())?;
            time_threads(threads, units, || read_unit(socket.as_fd()))
        })?,
        ReadSource::NullSyscall => time_threads(threads, units, || {
            std::hint::black_box(rustix::process::getppid());
            Ok(())
        }),
        ReadSource::UnknownSyscall => time_threads(threads, units, || {
            std::hint::black_box(sys::call_unknown());
            Ok(())
        }),
        ReadSource::TidegateUdp => time_stack(ReadMethod::QueuePerReader, threads, units),
        ReadSource::TidegateEmpty => time_stack(ReadMethod::EmptyQueue, threads, units),
    }
}

/// Seconds until each of `threads` threads has made `units` calls on a socket of Tidegate.
fn time_stack(read_method: ReadMethod, threads: usize, units: u64) -> Result<f64, LabError> {
    let run = StackRun {
        read_method,
        ipv6: false,
        readers: threads,
        packets_per_reader: units,
        pause: Duration::ZERO,
        cut_off: STACK_TIMEOUT,
    };
    let outcome = run.measure()?;
    if outcome.datagrams_read < units * threads as u64 {
        return Err(LabError::Config("a socket of Tidegate gave too few units".to_owned()));
    }
    Ok(outcome.elapsed.as_secs_f64())
}

/// Creates a FIFO and a process that writes to the FIFO.
fn open_fifo(path: &std::path::Path) -> Result<(File, WriterProcess), LabError> {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .map_err(LabError::io("cannot create a FIFO"))?;
    let open = |options: &OpenOptions| options.open(path).map_err(LabError::file(path));
    // Opening one end of a FIFO blocks until the other end is open, unless both are opened at once.
    let read_write_end = open(OpenOptions::new().read(true).write(true))?;
    let reader = open(OpenOptions::new().read(true))?;
    let writer = open(OpenOptions::new().write(true))?;
    drop(read_write_end);
    let process = WriterProcess::start(writer.as_fd(), &[7; UNIT_BYTES])
        .map_err(LabError::io("cannot start the writer process"))?;
    Ok((reader, process))
}

/// Opens a socket on an address of the loopback interface and starts a process that sends to the
/// socket.
pub(crate) fn open_loopback_socket(
    address: IpAddr,
) -> Result<(UdpSocket, WriterProcess), LabError> {
    let open = || -> std::io::Result<_> {
        let socket = UdpSocket::bind((address, 0))?;
        socket.set_read_timeout(Some(WRITER_TIMEOUT))?;
        let sender = UdpSocket::bind((address, 0))?;
        sender.connect(socket.local_addr()?)?;
        let writer = WriterProcess::start(sender.as_fd(), &[7; UNIT_BYTES])?;
        Ok((socket, writer))
    };
    open().map_err(LabError::io("cannot open sockets on the loopback"))
}

#[inline]
fn read_unit(fd: BorrowedFd<'_>) -> Result<(), LabError> {
    let mut unit = [0; UNIT_BYTES];
    match rustix::io::read(fd, &mut unit) {
        Ok(0) => Err(LabError::Config("the writer ended before the readers had all units".into())),
        Ok(_) => Ok(()),
        Err(error) => Err(LabError::io("cannot read")(error)),
    }
}

/// Seconds until each of `threads` threads has called `work` `units` times.
fn time_threads(
    threads: usize,
    units: u64,
    work: impl Fn() -> Result<(), LabError> + Sync,
) -> Result<f64, LabError> {
    time_prepared_threads(|| Ok(()), threads, units, work)
}

/// Like [`time_threads`], with a step that every thread runs before the clock starts.
pub(crate) fn time_prepared_threads(
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

/// Draws seconds against threads, one panel for each source. Measured times are scaled to the
/// number of units of the published times.
fn picture(
    config: &ConcurrentReadsConfig,
    measured: &[(ReadSource, usize, f64)],
    published: &[published::PublishedTime],
) -> Picture {
    let panels = ReadSource::ALL.map(|source| {
        let published_rows = || published.iter().filter(|row| row.source == source);
        let own_units = units_per_thread(config, source);
        let units = published_rows().map(|row| row.units).next().unwrap_or(own_units);
        let factor = units as f64 / own_units as f64;
        let measured_points = measured.iter().filter(|row| row.0 == source);
        let measured_points = measured_points.map(|row| (row.1 as f64, row.2 * factor));
        let mut series = vec![Series::new("measured", measured_points)];
        let mut kernels: Vec<&str> = published_rows().map(|row| row.linux.as_str()).collect();
        kernels.dedup();
        kernels.sort_unstable();
        kernels.dedup();
        for linux in kernels {
            let rows = published_rows().filter(|row| row.linux == linux);
            let points = rows.map(|row| (row.threads as f64, row.seconds));
            series.push(Series::new(format!("Linux {linux}, published"), points).dashed());
        }
        Panel {
            title: source.title().to_owned(),
            x: Axis::new("threads", ""),
            y: Axis::new(format!("time for {} units each", format_number(units as f64)), "s"),
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
    fn concurrent_threads_read_every_local_source() {
        for source in ReadSource::ALL {
            if source == ReadSource::UdpLoopback {
                continue;
            }
            for threads in [1, 3] {
                assert!(measure(source, threads, 500).unwrap() > 0.0, "{source:?}");
            }
        }
    }

    #[test]
    fn reports_that_the_writer_ended() {
        let folder = tempfile::tempdir().unwrap();
        let (reader, writer) = open_fifo(&folder.path().join("fifo")).unwrap();
        drop(writer);
        // Units that the writer left in the FIFO are read first.
        let error = time_threads(2, 1 << 20, || read_unit(reader.as_fd())).unwrap_err();
        assert!(error.to_string().contains("the writer ended"), "{error}");
    }

    #[test]
    fn scaling_counts_only_threads_with_a_core() {
        let times = [(1, 1.0), (2, 1.25), (4, 9.0)];
        assert_eq!(scaling(times.into_iter(), 2), Some(1.6));
        assert_eq!(scaling(times.into_iter(), 1), Some(1.0));
        assert_eq!(scaling(times.into_iter().skip(1), 2), None);
    }

    #[test]
    fn rejects_invalid_configuration() {
        let error_after = |change: fn(&mut ConcurrentReadsConfig)| {
            let mut config = ConcurrentReadsConfig::default();
            change(&mut config);
            run(&config).unwrap_err().to_string()
        };
        assert!(error_after(|c| c.units = 0).contains("at least one unit"));
        assert!(error_after(|c| c.runs = 0).contains("one run"));
        assert!(error_after(|c| c.threads = vec![]).contains("--threads"));
        assert!(error_after(|c| c.threads = vec![0]).contains("0 threads: give 1"));
    }
}
