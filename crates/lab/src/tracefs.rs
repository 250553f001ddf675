//! The kernel's trace events, in a trace instance of our own: settings that
//! others made stay as they are, and ours go with the instance.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::LabError;

const INSTANCES: &str = "/sys/kernel/tracing/instances";
const PREFIX: &str = "tidegate-";

/// A trace instance. It is removed on drop; those of processes that were killed
/// are removed by the next [`Instance::new`].
#[derive(Debug)]
pub(crate) struct Instance {
    path: PathBuf,
}

impl Instance {
    /// Makes an instance with room for so many kilobytes of events on each
    /// core. It records nothing yet. Time is counted in cycles of the
    /// processor; addresses are shown as they are.
    pub(crate) fn new(buffer_kb: u32) -> Result<Self, LabError> {
        remove_stale();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(INSTANCES).join(format!("{PREFIX}{}-{count}", std::process::id()));
        fs::create_dir(&path).map_err(|source| match source.kind() {
            ErrorKind::PermissionDenied => LabError::Permission {
                what: "tracing the kernel".to_owned(),
                hint: "run as root".to_owned(),
            },
            ErrorKind::NotFound => LabError::Config(
                "no tracefs: mount it with `mount -t tracefs nodev /sys/kernel/tracing`".to_owned(),
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

    /// Records with each event the functions that it happened in, from now on.
    pub(crate) fn record_stacks(&self) -> Result<(), LabError> {
        self.set("options/stacktrace", "1")
    }

    /// Records an event, `skb/consume_skb`, or a group, `lock`.
    pub(crate) fn enable(&self, event: &str) -> Result<(), LabError> {
        self.set(&format!("events/{event}/enable"), "1")
    }

    /// What turns recording on and off, from wherever it is taken to.
    pub(crate) fn switch(&self) -> Result<Switch, LabError> {
        let open = |file: &str| {
            let path = self.path.join(file);
            OpenOptions::new().write(true).open(&path).map_err(LabError::file(&path))
        };
        Ok(Switch { on: open("tracing_on")?, threads: open("set_event_pid")? })
    }

    /// Takes what was recorded, in the order of time, and how many events were
    /// lost for want of room.
    pub(crate) fn take(&self) -> Result<(Vec<Event>, u64), LabError> {
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

impl Drop for Instance {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// The events that one core lost, of its file `stats`.
fn lost_in(stats: &str) -> u64 {
    let values = stats.lines().filter_map(|line| line.split_once(": "));
    let lost = values.filter(|(name, _)| matches!(*name, "overrun" | "dropped events"));
    lost.filter_map(|(_, value)| value.trim().parse::<u64>().ok()).sum()
}

/// A failure has nobody to report to; the next start tries again.
fn remove(instance: &Path) {
    let _ = fs::write(instance.join("events/enable"), "0");
    let _ = fs::remove_dir(instance);
}

fn remove_stale() {
    let Ok(entries) = fs::read_dir(INSTANCES) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner);
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            remove(&entry.path());
        }
    }
}

/// The process that made an instance, if one of ours.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}

/// Turns the recording of an instance on and off.
#[derive(Debug)]
pub(crate) struct Switch {
    on: File,
    threads: File,
}

impl Switch {
    /// Records what happens in the calling thread, beside others that asked.
    pub(crate) fn add_this_thread(&self) -> Result<(), LabError> {
        let id = rustix::thread::gettid().as_raw_nonzero();
        write(&self.threads, &format!("{id}\n"))
    }

    /// Begins to record.
    pub(crate) fn on(&self) -> Result<(), LabError> {
        write(&self.on, "1")
    }

    /// Stops.
    pub(crate) fn off(&self) -> Result<(), LabError> {
        write(&self.on, "0")
    }
}

fn write(mut file: &File, text: &str) -> Result<(), LabError> {
    file.write_all(text.as_bytes()).map_err(LabError::io("cannot set up tracing"))
}

/// The events of a trace, each with its stack if that was recorded.
fn parse(trace: &str) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    for line in trace.lines() {
        match (line.strip_prefix(" => "), events.last_mut()) {
            (Some(function), Some(event)) => event.stack.push(function.trim().to_owned()),
            (Some(_), None) => {}
            (None, _) if line.ends_with(": <stack trace>") => {}
            (None, _) => events.extend(Event::parse(line)),
        }
    }
    events
}

/// What the kernel recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Event {
    /// The thread.
    pub(crate) thread: u32,
    /// When, in cycles.
    pub(crate) cycles: u64,
    /// `consume_skb`; of a system call, `sys_recvfrom`.
    pub(crate) name: String,
    /// What belongs to it: `skbaddr=... len=10`; of a system call that returns,
    /// `-> 0xa`.
    pub(crate) arguments: String,
    /// The functions that it happened in, the innermost first, if recorded.
    pub(crate) stack: Vec<String>,
}

impl Event {
    /// Reads a line: `name-1234  [001] d..1. 123456: event: arguments`.
    fn parse(line: &str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        // The name of a thread may hold anything.
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

    /// A number behind `name=`, in hexadecimal where it is an address.
    pub(crate) fn address(&self, name: &str) -> Option<u64> {
        let (_, rest) = self.arguments.split_once(name)?;
        let text = rest.trim_start_matches([' ', '=']);
        let text = text.strip_prefix("0x").unwrap_or(text);
        let end = text.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(text.len());
        u64::from_str_radix(text.get(..end)?, 16).ok()
    }

    /// Whether a system call returns.
    pub(crate) fn returns(&self) -> bool {
        self.arguments.starts_with("-> ")
    }
}

/// How fast cycles pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycles {
    per_ns: f64,
}

impl Cycles {
    /// Measures for a twentieth of a second.
    pub(crate) fn measure() -> Self {
        let (start, cycles) = (std::time::Instant::now(), crate::sys::cycles());
        while start.elapsed().as_millis() < 50 {
            std::hint::spin_loop();
        }
        let cycles = crate::sys::cycles().wrapping_sub(cycles);
        Self { per_ns: cycles as f64 / start.elapsed().as_nanos() as f64 }
    }

    /// So many cycles in a nanosecond.
    #[cfg(test)]
    pub(crate) fn of(per_ns: f64) -> Self {
        Self { per_ns }
    }

    /// Cycles as nanoseconds.
    pub(crate) fn ns(self, cycles: u64) -> f64 {
        cycles as f64 / self.per_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let event = Event::parse(
            " a [b] c-d-4711    [001] b.s3. 33114141: netif_rx: dev=lo skbaddr=fff88810123 len=38",
        )
        .unwrap();
        assert_eq!((event.thread, event.cycles), (4711, 33_114_141));
        assert_eq!(event.name, "netif_rx");
        assert_eq!(event.address("skbaddr"), Some(0xfff_8881_0123));
        assert_eq!(event.address("nothing"), None);
        let enter = Event::parse("x-1 [000] ..... 5: sys_recvfrom(fd: 3, ubuf: 7f)").unwrap();
        assert_eq!((enter.name.as_str(), enter.returns()), ("sys_recvfrom", false));
        let exit = Event::parse("x-1 [000] ..... 6: sys_recvfrom -> 0xa").unwrap();
        assert!(exit.name == "sys_recvfrom" && exit.returns());
        let lock = Event::parse("x-1 [000] ..... 6: contention_begin: 0xffff01 (flags=SPIN)");
        assert_eq!(lock.unwrap().address(""), Some(0xffff01));
    }

    #[test]
    fn other_lines_are_not() {
        for line in ["# tracer: nop", "", "CPU:1 [LOST 17 EVENTS]", "x-1 [000] ..... 5", "x [01] "]
        {
            assert_eq!(Event::parse(line), None, "{line}");
        }
    }

    #[test]
    fn stacks_belong_to_the_event_before() {
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
    fn lost_events_are_counted() {
        let stats =
            "entries: 5\noverrun: 7\ncommit overrun: 0\ndropped events: 2\nread events: 9\n";
        assert_eq!(lost_in(stats), 9);
    }

    #[test]
    fn only_our_instances_have_an_owner() {
        assert_eq!(owner("tidegate-17-0"), Some(17));
        assert_eq!(owner("tidegate-x-0"), None);
        assert_eq!(owner("other-17-0"), None);
    }
}
