//! Placement of threads on cores, their priority, and the CPU time of cores and processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::time::ClockId;
use rustix::process::Pid;
use rustix::thread::CpuSet;
use serde::Serialize;
use tidegate_load::pin_thread;

use crate::error::LabError;

/// Pins the calling thread to one core.
///
/// # Errors
/// When there is no such core, or this process may not use it.
pub fn pin_this_thread(core: usize) -> Result<(), LabError> {
    Ok(pin_thread(None, core)?)
}

/// Keeps the calling thread on one core; restores the thread's former affinity on drop.
#[derive(Debug)]
pub(crate) struct PinGuard {
    before: CpuSet,
}

impl PinGuard {
    /// Pins the calling thread.
    pub(crate) fn to(core: usize) -> Result<Self, LabError> {
        let before = rustix::thread::sched_getaffinity(None)
            .map_err(LabError::io("cannot read the thread's CPU affinity"))?;
        pin_this_thread(core)?;
        Ok(Self { before })
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        // The thread was allowed on these cores before.
        let _ = rustix::thread::sched_setaffinity(None, &self.before);
    }
}

/// Pins the thread or process `pid` to one core.
///
/// # Errors
/// When there is no such core or process, or the process belongs to another user.
pub fn pin_process(pid: i32, core: usize) -> Result<(), LabError> {
    let pid = Pid::from_raw(pid).ok_or_else(|| LabError::Config("process id 0".into()))?;
    Ok(pin_thread(Some(pid), core)?)
}

/// Pins every present thread of the process `pid` to one core, overriding affinities that
/// the process set itself.
///
/// # Errors
/// When there is no such core or process, or the process belongs to another user.
pub fn pin_threads(pid: u32, core: usize) -> Result<(), LabError> {
    let folder = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&folder).map_err(LabError::file(&folder))?;
    let mut ids = threads.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.try_for_each(|thread| pin_process(thread, core))
}

/// Gives the thread `pid` real-time priority 1: it runs before every normal thread of its core.
///
/// # Errors
/// Without root, or when there is no such thread.
pub fn raise_above_normal_threads(pid: i32) -> Result<(), LabError> {
    run_at_real_time_priority(pid, 1)
}

/// Lowers the calling thread to nice 19: other threads of its core run before it.
///
/// # Errors
/// When the kernel refuses.
pub fn lower_to_last_priority() -> Result<(), LabError> {
    rustix::process::nice(19).map(drop).map_err(LabError::io("cannot lower a thread's priority"))
}

/// Real-time priority above every thread of the engine: see `tidegate_engine::priority`.
const INTERRUPT_PRIORITY: i32 = 70;

/// Gives the thread `pid` the precedence of an interrupt: it runs before every normal thread
/// of its core, and before protocol work.
///
/// # Errors
/// Without root, or when there is no such thread.
pub fn run_as_interrupt(pid: i32) -> Result<(), LabError> {
    run_at_real_time_priority(pid, INTERRUPT_PRIORITY)
}

fn run_at_real_time_priority(pid: i32, priority: i32) -> Result<(), LabError> {
    crate::testbed::sys::run_at_real_time_priority(pid, priority)
        .map_err(LabError::io("cannot give a thread real-time priority"))
}

/// Number of cores that this process may use; 1 if the system cannot say.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The kernel's NAPI threads of a network device, by process id.
///
/// They exist while the device is in threaded mode and has a NAPI context; on
/// veth that is while an XDP program is attached or GRO is on.
pub fn napi_threads(device: &str) -> Vec<i32> {
    // The kernel truncates a thread's name to 15 bytes.
    let mut prefix = format!("napi/{device}-");
    prefix.truncate(15);
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.starts_with(&prefix))
        })
        .collect()
}

/// CPU time of a core since boot, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreTicks {
    user: u64,
    system: u64,
    softirq: u64,
    idle: u64,
    steal: u64,
}

impl CoreTicks {
    /// Reads the present ticks of core `core`.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read or has no such core.
    pub fn read(core: usize) -> Result<Self, LabError> {
        let text = fs::read_to_string("/proc/stat").map_err(LabError::file("/proc/stat"))?;
        Self::parse(&text, core)
            .ok_or_else(|| LabError::Config(format!("/proc/stat has no core {core}")))
    }

    fn parse(stat: &str, core: usize) -> Option<Self> {
        let name = format!("cpu{core}");
        let line = stat.lines().find(|line| line.split(' ').next() == Some(&name))?;
        let t: Vec<u64> = line.split_whitespace().skip(1).map_while(|w| w.parse().ok()).collect();
        let at = |i: usize| t.get(i).copied().unwrap_or(0);
        Some(Self {
            user: at(0) + at(1),
            system: at(2) + at(5),
            softirq: at(6),
            idle: at(3) + at(4),
            steal: at(7),
        })
    }

    /// Usage of the core between `earlier` and this reading.
    pub fn since(self, earlier: Self) -> CoreUsage {
        let total = self.total().saturating_sub(earlier.total()).max(1) as f64;
        let percent = |now: u64, then: u64| 100.0 * now.saturating_sub(then) as f64 / total;
        CoreUsage {
            busy_percent: 100.0 - percent(self.idle, earlier.idle),
            user_percent: percent(self.user, earlier.user),
            system_percent: percent(self.system, earlier.system),
            softirq_percent: percent(self.softirq, earlier.softirq),
            stolen_percent: percent(self.steal, earlier.steal),
        }
    }

    fn total(self) -> u64 {
        self.user + self.system + self.softirq + self.idle + self.steal
    }
}

/// Usage of a core during an interval, in percent of the interval.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CoreUsage {
    /// All time except idle time.
    pub busy_percent: f64,
    /// Applications in user mode.
    pub user_percent: f64,
    /// Kernel mode: system calls, kernel threads, and hard interrupts.
    pub system_percent: f64,
    /// Softirqs: receive processing that is charged to no thread.
    pub softirq_percent: f64,
    /// Steal time: taken by the hypervisor.
    pub stolen_percent: f64,
}

impl CoreUsage {
    /// Mean usage over several intervals of the same length.
    pub(crate) fn mean(all: impl ExactSizeIterator<Item = Self>) -> Self {
        let share = 1.0 / all.len() as f64;
        all.fold(Self::default(), |sum, one| Self {
            busy_percent: sum.busy_percent + share * one.busy_percent,
            user_percent: sum.user_percent + share * one.user_percent,
            system_percent: sum.system_percent + share * one.system_percent,
            softirq_percent: sum.softirq_percent + share * one.softirq_percent,
            stolen_percent: sum.stolen_percent + share * one.stolen_percent,
        })
    }
}

/// Number of receive softirqs on core `core` since boot: one for each round of its NAPI
/// contexts.
///
/// # Errors
/// When `/proc/softirqs` cannot be read or has no such core.
pub fn receive_softirqs(core: usize) -> Result<u64, LabError> {
    let text = fs::read_to_string("/proc/softirqs").map_err(LabError::file("/proc/softirqs"))?;
    parse_receive_softirqs(&text, core)
        .ok_or_else(|| LabError::Config(format!("/proc/softirqs has no core {core}")))
}

fn parse_receive_softirqs(text: &str, core: usize) -> Option<u64> {
    let name = format!("CPU{core}");
    let column = text.lines().next()?.split_whitespace().position(|word| word == name)?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("NET_RX:"))?;
    line.split_whitespace().nth(column)?.parse().ok()
}

/// CPU time of a process with all its threads, user and system, in ticks.
///
/// # Errors
/// When there is no such process.
pub fn process_ticks(pid: u32) -> Result<u64, LabError> {
    read_process_ticks(pid).map(|(user, system)| user + system)
}

/// CPU time of a process in user mode, with all its threads, in ticks: without the interrupts
/// during its time.
///
/// # Errors
/// When there is no such process.
pub fn user_ticks(pid: u32) -> Result<u64, LabError> {
    read_process_ticks(pid).map(|(user, _)| user)
}

fn read_process_ticks(pid: u32) -> Result<(u64, u64), LabError> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).map_err(LabError::file(Path::new(&path)))?;
    parse_process_ticks(&text)
        .ok_or_else(|| LabError::Config(format!("{path} has an unknown format")))
}

/// User and system time.
fn parse_process_ticks(stat: &str) -> Option<(u64, u64)> {
    // The name in parentheses may itself contain parentheses: the fields begin after the last
    // one. proc(5): utime is field 14, stime field 15.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let utime: u64 = fields.get(11)?.parse().ok()?;
    let stime: u64 = fields.get(12)?.parse().ok()?;
    Some((utime, stime))
}

/// Ticks per second in the counts of `/proc`.
pub fn ticks_per_second() -> u64 {
    rustix::param::clock_ticks_per_second()
}

/// CPU time of a thread of this process, exact at any time: the statistics under `/proc` count a
/// running thread's time only up to its last tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadTime(ClockId);

impl ThreadTime {
    /// Reads the time of `thread`.
    pub(crate) fn of(thread: Pid) -> Self {
        // Linux, include/linux/posix-timers_types.h: the complement of the thread's id, then 1 for a
        // thread instead of a process, then 2 for the scheduler's time.
        Self(ClockId::from_raw(!thread.as_raw_pid() << 3 | 0b110))
    }

    /// CPU time since the thread started, user and system, in nanoseconds.
    ///
    /// # Errors
    /// When the thread has ended, or is of another process.
    pub(crate) fn ns(self) -> Result<u64, LabError> {
        let time = self.0.now().map_err(LabError::io_other("cannot read a thread's CPU time"))?;
        Ok(Duration::from(time).as_nanos() as u64)
    }
}

/// Resident memory of a process in bytes.
///
/// # Errors
/// When there is no such process.
pub fn resident_bytes(pid: u32) -> Result<u64, LabError> {
    let path = format!("/proc/{pid}/statm");
    let text = fs::read_to_string(&path).map_err(LabError::file(Path::new(&path)))?;
    let pages: Option<u64> = text.split_whitespace().nth(1).and_then(|w| w.parse().ok());
    let pages = pages.ok_or_else(|| LabError::Config(format!("{path} has an unknown format")))?;
    Ok(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 10 0 20 60 0 1 9 0 0 0\ncpu1 1 1 1 1\n";

    #[test]
    fn pin_guard_restores_affinity() {
        let on = || rustix::thread::sched_getaffinity(None).unwrap();
        let before = on();
        let core = (0..CpuSet::MAX_CPU).find(|&core| before.is_set(core)).unwrap();
        let pinned = PinGuard::to(core).unwrap();
        assert_eq!(on().count(), 1);
        drop(pinned);
        assert_eq!(on(), before);
    }

    #[test]
    fn finds_core_by_its_whole_name() {
        let ticks = CoreTicks::parse(STAT, 0).unwrap();
        assert_eq!((ticks.user, ticks.system, ticks.softirq, ticks.idle), (10, 21, 9, 60));
        assert!(CoreTicks::parse(STAT, 2).is_none());
    }

    #[test]
    fn usage_is_a_difference_in_percent() {
        let before = CoreTicks::parse(STAT, 0).unwrap();
        let after = CoreTicks { idle: before.idle + 50, softirq: before.softirq + 50, ..before };
        let used = after.since(before);
        assert_eq!((used.busy_percent, used.softirq_percent), (50.0, 50.0));
    }

    #[test]
    fn reads_receive_softirqs_from_the_column_of_the_core() {
        let text =
            "                    CPU0       CPU3\n      NET_TX:   1  2\n      NET_RX:  30  40\n";
        assert_eq!(parse_receive_softirqs(text, 3), Some(40));
        assert_eq!(parse_receive_softirqs(text, 1), None);
        assert!(receive_softirqs(0).is_ok());
    }

    #[test]
    fn parses_process_name_with_parentheses() {
        let stat = "7 (a) b) c) S 1 7 7 0 -1 0 0 0 0 0 30 12 0 0 20 0 1 0";
        assert_eq!(parse_process_ticks(stat), Some((30, 12)));
        assert_eq!(parse_process_ticks("7 nothing"), None);
    }

    #[test]
    fn time_of_a_running_thread_grows_between_ticks() {
        let time = ThreadTime::of(rustix::thread::gettid());
        let first = time.ns().unwrap();
        assert!(time.ns().unwrap() > first);
        assert!(ThreadTime::of(Pid::INIT).ns().is_err());
    }

    #[test]
    fn reads_memory_and_time_of_this_process() {
        assert!(resident_bytes(std::process::id()).unwrap() > 0);
        assert!(process_ticks(std::process::id()).is_ok());
        assert!(process_ticks(u32::MAX).is_err());
    }
}
