//! Kernel trace events, in a private trace instance: the settings of other users stay unchanged,
//! and ours are removed with the instance.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::LabError;
use crate::testbed::ending;

const INSTANCES_FOLDER: &str = "/sys/kernel/tracing/instances";
const INSTANCE_PREFIX: &str = "tidegate-";

/// Trace instance, removed on drop. Instances of killed processes are removed by the next
/// [`TraceInstance::new`].
#[derive(Debug)]
pub(crate) struct TraceInstance {
    path: PathBuf,
}

impl TraceInstance {
    /// Creates an instance with a buffer of `buffer_kb` kilobytes on each core, with recording off.
    ///
    /// Time is counted in processor cycles; addresses are not hashed.
    pub(crate) fn new(buffer_kb: u32) -> Result<Self, LabError> {
        remove_stale();
        let _creating = ending::creating();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(INSTANCES_FOLDER)
            .join(format!("{INSTANCE_PREFIX}{}-{count}", std::process::id()));
        fs::create_dir(&path).map_err(|source| match source.kind() {
            ErrorKind::PermissionDenied => LabError::Permission {
                what: "tracing the kernel".to_owned(),
                hint: "run as root".to_owned(),
            },
            ErrorKind::NotFound => LabError::Config(
                "tracefs is not mounted: mount tracefs with `mount -t tracefs nodev /sys/kernel/tracing`".to_owned(),
            ),
            _ => LabError::File { path: path.clone(), source },
        })?;
        let instance = Self { path };
        instance.set("tracing_on", "0")?;
        instance.set("trace_clock", "x86-tsc")?;
        instance.set("options/hash-ptr", "0")?;
        instance.set("buffer_size_kb", &buffer_kb.to_string())?;
        Ok(instance)
    }

    fn set(&self, file: &str, value: &str) -> Result<(), LabError> {
        let path = self.path.join(file);
        fs::write(&path, value).map_err(LabError::file(&path))
    }

    /// Enables recording of the call stack with each event, from now on.
    pub(crate) fn record_stacks(&self) -> Result<(), LabError> {
        self.set("options/stacktrace", "1")
    }

    /// Enables an event, such as `skb/consume_skb`, or a group, such as `lock`.
    pub(crate) fn enable(&self, event: &str) -> Result<(), LabError> {
        self.set(&format!("events/{event}/enable"), "1")
    }

    /// Returns a switch that turns recording on and off, also from another mount namespace.
    pub(crate) fn recording_switch(&self) -> Result<RecordingSwitch, LabError> {
        let open = |file: &str| {
            let path = self.path.join(file);
            OpenOptions::new().write(true).open(&path).map_err(LabError::file(&path))
        };
        Ok(RecordingSwitch {
            tracing_on: open("tracing_on")?,
            thread_filter: open("set_event_pid")?,
        })
    }

    /// Takes the recorded events, in order of time, and the number of events lost because the
    /// buffer was full.
    pub(crate) fn take(&self) -> Result<(Vec<TraceEvent>, u64), LabError> {
        self.set("tracing_on", "0")?;
        let path = self.path.join("trace");
        let text = fs::read(&path).map_err(LabError::file(&path))?;
        let text = String::from_utf8_lossy(&text);
        let events = parse(&text);
        let lost = self.lost()?;
        self.set("trace", "")?;
        Ok((events, lost))
    }

    fn lost(&self) -> Result<u64, LabError> {
        let folder = self.path.join("per_cpu");
        let cores = fs::read_dir(&folder).map_err(LabError::file(&folder))?;
        let mut lost = 0;
        for core in cores.flatten() {
            let path = core.path().join("stats");
            let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
            lost += lost_in(&text);
        }
        Ok(lost)
    }
}

impl Drop for TraceInstance {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Number of events that one core lost, from the content of its file `stats`.
fn lost_in(stats: &str) -> u64 {
    let values = stats.lines().filter_map(|line| line.split_once(": "));
    let lost = values.filter(|(name, _)| matches!(*name, "overrun" | "dropped events"));
    lost.filter_map(|(_, value)| value.trim().parse::<u64>().ok()).sum()
}

/// Removes an instance; ignores errors, since the next start tries again.
fn remove(instance: &Path) {
    let _ = fs::write(instance.join("events/enable"), "0");
    let _ = fs::remove_dir(instance);
}

fn remove_stale() {
    let Ok(entries) = fs::read_dir(INSTANCES_FOLDER) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner);
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            remove(&entry.path());
        }
    }
}

/// Removes the instances of this process, which is about to end without dropping them.
pub(super) fn remove_own() {
    for entry in fs::read_dir(INSTANCES_FOLDER).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(owner) == Some(std::process::id()) {
            remove(&entry.path());
        }
    }
}

/// Process identifier of the owner of an instance; `None` for instances of other programs.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(INSTANCE_PREFIX)?.split_once('-')?.0.parse().ok()
}

/// Switch for the recording of an instance.
#[derive(Debug)]
pub(crate) struct RecordingSwitch {
    tracing_on: File,
    thread_filter: File,
}

impl RecordingSwitch {
    /// Adds the calling thread to the recorded threads.
    pub(crate) fn add_this_thread(&self) -> Result<(), LabError> {
        let id = rustix::thread::gettid().as_raw_nonzero();
        write(&self.thread_filter, &format!("{id}\n"))
    }

    /// Starts recording.
    pub(crate) fn start(&self) -> Result<(), LabError> {
        write(&self.tracing_on, "1")
    }

    /// Stops recording.
    pub(crate) fn stop(&self) -> Result<(), LabError> {
        write(&self.tracing_on, "0")
    }
}

fn write(mut file: &File, text: &str) -> Result<(), LabError> {
    file.write_all(text.as_bytes()).map_err(LabError::io("cannot set up tracing"))
}

/// Parses the events of a trace, each with its call stack if recorded.
fn parse(trace: &str) -> Vec<TraceEvent> {
    let mut events: Vec<TraceEvent> = Vec::new();
    for line in trace.lines() {
        match (line.strip_prefix(" => "), events.last_mut()) {
            (Some(function), Some(event)) => event.stack.push(function.trim().to_owned()),
            (Some(_), None) => {}
            (None, _) if line.ends_with(": <stack trace>") => {}
            (None, _) => events.extend(TraceEvent::parse(line)),
        }
    }
    events
}

/// Event that the kernel recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TraceEvent {
    /// Thread identifier.
    pub(crate) thread: u32,
    /// Time in cycles.
    pub(crate) cycles: u64,
    /// Name, such as `consume_skb`; `sys_recvfrom` for a system call.
    pub(crate) name: String,
    /// Arguments, such as `skbaddr=... len=10`; `-> 0xa` for a system call that returns.
    pub(crate) arguments: String,
    /// Call stack, innermost function first; empty if not recorded.
    pub(crate) stack: Vec<String>,
}

impl TraceEvent {
    /// Parses a line: `name-1234  [001] d..1. 123456: event: arguments`.
    fn parse(line: &str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        // The name of a thread may contain any character.
        let at = line.match_indices(" [").find(|(at, _)| {
            let core = line.get(at + 2..at + 5).unwrap_or_default();
            core.bytes().all(|byte| byte.is_ascii_digit()) && line[at + 5..].starts_with("] ")
        })?;
        let thread = line[..at.0].trim_end().rsplit('-').next()?.parse().ok()?;
        let rest = line.get(at.0 + 7..)?.trim_start().split_once(' ')?.1;
        let (cycles, rest) = rest.trim_start().split_once(": ")?;
        let end = rest.find([':', '(', ' '])?;
        let (name, arguments) = rest.split_at(end);
        Some(Self {
            thread,
            cycles: cycles.parse().ok()?,
            name: name.to_owned(),
            arguments: arguments.trim_start_matches([':', ' ']).to_owned(),
            stack: Vec::new(),
        })
    }

    /// Number after `name=`, parsed as hexadecimal.
    pub(crate) fn address(&self, name: &str) -> Option<u64> {
        let (_, rest) = self.arguments.split_once(name)?;
        let text = rest.trim_start_matches([' ', '=']);
        let text = text.strip_prefix("0x").unwrap_or(text);
        let end = text.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(text.len());
        u64::from_str_radix(text.get(..end)?, 16).ok()
    }

    /// True for the return of a system call.
    pub(crate) fn is_syscall_exit(&self) -> bool {
        self.arguments.starts_with("-> ")
    }
}

/// Rate of the time stamp counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TscRate {
    per_ns: f64,
}

impl TscRate {
    /// Measures the rate for 50 ms.
    pub(crate) fn measure() -> Self {
        let (start, cycles) = (std::time::Instant::now(), crate::testbed::sys::cycles());
        while start.elapsed().as_millis() < 50 {
            std::hint::spin_loop();
        }
        let cycles = crate::testbed::sys::cycles().wrapping_sub(cycles);
        Self { per_ns: cycles as f64 / start.elapsed().as_nanos() as f64 }
    }

    /// Returns a rate of `per_ns` cycles per nanosecond.
    #[cfg(test)]
    pub(crate) fn from_cycles_per_ns(per_ns: f64) -> Self {
        Self { per_ns }
    }

    /// Converts cycles to nanoseconds.
    pub(crate) fn to_ns(self, cycles: u64) -> f64 {
        cycles as f64 / self.per_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_event_lines() {
        let event = TraceEvent::parse(
            " a [b] c-d-4711    [001] b.s3. 33114141: netif_rx: dev=lo skbaddr=fff88810123 len=38",
        )
        .unwrap();
        assert_eq!((event.thread, event.cycles), (4711, 33_114_141));
        assert_eq!(event.name, "netif_rx");
        assert_eq!(event.address("skbaddr"), Some(0xfff_8881_0123));
        assert_eq!(event.address("nothing"), None);
        let enter = TraceEvent::parse("x-1 [000] ..... 5: sys_recvfrom(fd: 3, ubuf: 7f)").unwrap();
        assert_eq!((enter.name.as_str(), enter.is_syscall_exit()), ("sys_recvfrom", false));
        let exit = TraceEvent::parse("x-1 [000] ..... 6: sys_recvfrom -> 0xa").unwrap();
        assert!(exit.name == "sys_recvfrom" && exit.is_syscall_exit());
        let lock = TraceEvent::parse("x-1 [000] ..... 6: contention_begin: 0xffff01 (flags=SPIN)");
        assert_eq!(lock.unwrap().address(""), Some(0xffff01));
    }

    #[test]
    fn ignores_other_lines() {
        for line in ["# tracer: nop", "", "CPU:1 [LOST 17 EVENTS]", "x-1 [000] ..... 5", "x [01] "]
        {
            assert_eq!(TraceEvent::parse(line), None, "{line}");
        }
    }

    #[test]
    fn assigns_stack_to_the_preceding_event() {
        let events = parse(
            "# tracer: nop\n x-1 [000] ..... 6: contention_begin: 0xff01 (flags=SPIN)\n \
             x-1 [000] ..... 7: <stack trace>\n => _raw_spin_lock\n => __schedule\n \
             x-1 [000] ..... 8: contention_end: 0xff01 (ret=0)\n",
        );
        assert_eq!(events.len(), 2);
        assert_eq!(events[0].stack, ["_raw_spin_lock", "__schedule"]);
        assert!(events[1].stack.is_empty());
    }

    #[test]
    fn counts_lost_events() {
        let stats =
            "entries: 5\noverrun: 7\ncommit overrun: 0\ndropped events: 2\nread events: 9\n";
        assert_eq!(lost_in(stats), 9);
    }

    #[test]
    fn parses_owner_of_own_instances_only() {
        assert_eq!(owner("tidegate-17-0"), Some(17));
        assert_eq!(owner("tidegate-x-0"), None);
        assert_eq!(owner("other-17-0"), None);
    }
}
