//! The experiment `lock-contention`: waits for the locks of a kernel UDP socket that several
//! threads read.
//!
//! For each lock it counts the waits and adds up their time, from the kernel's trace events
//! `lock:contention_begin` and `contention_end`.
//!
//! Rivera (2013), Tables 3.1 to 3.10, has the same for Linux 3.5 from lockdep, and also the
//! times for which locks were held. A kernel without lock statistics reports waits only.

use std::collections::{BTreeMap, HashMap};

use serde_json::json;

use crate::experiments::rivera::concurrent_reads::{open_loopback_socket, time_prepared_threads};
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::stats::round_to_hundredths;
use crate::testbed::btf::{self, StructFields};
use crate::testbed::netns::Namespace;
use crate::testbed::tracefs::{TraceEvent, TraceInstance, TscRate};
use crate::{Experiment, LabError};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ContentionConfig {
    /// Datagrams that each thread reads.
    pub packets_per_reader: u64,
    /// Numbers of readers.
    pub readers: Vec<usize>,
}

impl Default for ContentionConfig {
    fn default() -> Self {
        Self { packets_per_reader: 50_000, readers: vec![1, 2, 4, 8] }
    }
}

/// Trace buffer of each core, in KiB.
const TRACE_BUFFER_KB: u32 = 32 * 1024;
const MAX_READERS: usize = 1024;
/// Datagrams that each thread reads in the run that relates locks to functions.
const LOCK_NAMING_PACKETS: u64 = 2_000;

/// Names of locks by the function that takes them: part of the function's name, name of the
/// lock. The innermost matching function counts.
const LOCK_FUNCTIONS: [(&str, &str); 8] = [
    ("prepare_to_wait", WAIT_QUEUE),
    ("finish_wait", WAIT_QUEUE),
    ("__wake_up", WAIT_QUEUE),
    ("__schedule", SCHEDULER),
    ("rq_lock", SCHEDULER),
    ("try_to_wake_up", SCHEDULER),
    ("slab", MEMORY),
    ("rmqueue", MEMORY),
];
/// Lock of the queue in which readers of an empty socket sleep.
const WAIT_QUEUE: &str = "wait queue";
const SCHEDULER: &str = "scheduler";
const MEMORY: &str = "memory";

/// Waits for one lock: their number, and their total and longest time in TSC cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LockWaits {
    contentions: u64,
    total_cycles: u64,
    max_cycles: u64,
}

/// Runs the experiment. Needs root, for a network namespace and for tracing.
///
/// # Errors
/// When the configuration is invalid, or tracing or the socket fails.
pub fn run(config: &ContentionConfig) -> Result<Experiment, LabError> {
    if config.packets_per_reader == 0 || config.readers.is_empty() {
        let problem = "the lock measurement needs a number of readers and a packet for each";
        return Err(LabError::Config(problem.to_owned()));
    }
    if let Some(wrong) = config.readers.iter().find(|n| !(1..=MAX_READERS).contains(*n)) {
        return Err(LabError::Config(format!("{wrong} readers: give 1 to {MAX_READERS}")));
    }
    let fields = btf::read_struct_fields(&["sock", "udp_sock", "sk_buff_head"])?;
    let cycles = TscRate::measure();
    let mut result = Experiment::new("lock-contention");
    let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut lost_events = 0;
    let progress = Progress::new(config.readers.len());
    for &readers in &config.readers {
        let recorded = record(readers, config.packets_per_reader)?;
        lost_events += recorded.lost_events;
        let lock_names = LockNames::new(&recorded.naming_events, &fields);
        let packets = readers as u64 * config.packets_per_reader;
        let mut sums: BTreeMap<String, LockWaits> = BTreeMap::new();
        for (lock, waits) in waits_by_lock(&recorded.events) {
            let sum = sums.entry(lock_names.name(lock)).or_default();
            sum.contentions += waits.contentions;
            sum.total_cycles += waits.total_cycles;
            sum.max_cycles = sum.max_cycles.max(waits.max_cycles);
        }
        for (lock, waits) in &sums {
            let us = |cycles_spent: u64| cycles.to_ns(cycles_spent) / 1000.0;
            let total_us = us(waits.total_cycles);
            result.rows.push(json!({
                "readers": readers,
                "lock": lock,
                "contentions": waits.contentions,
                "contentions_per_1000_packets":
                    round_to_hundredths(waits.contentions as f64 * 1000.0 / packets as f64),
                "waited_total_us": round_to_hundredths(total_us),
                "waited_mean_us": round_to_hundredths(total_us / waits.contentions.max(1) as f64),
                "waited_longest_us": round_to_hundredths(us(waits.max_cycles)),
            }));
            let per_1000 = waits.contentions as f64 * 1000.0 / packets as f64;
            series.entry(lock.clone()).or_default().push((readers as f64, per_1000));
        }
        result.rows.push(json!({
            "readers": readers,
            "lock": "(all packets)",
            "packets_per_second": (packets as f64 / recorded.seconds).round(),
        }));
        progress.step(format_args!("{readers} readers: {packets} packets"));
    }
    result.columns = vec![
        "readers",
        "lock",
        "contentions",
        "contentions_per_1000_packets",
        "waited_total_us",
        "waited_mean_us",
        "waited_longest_us",
        "packets_per_second",
    ];
    result.figure("kernel_events_lost", lost_events as f64);
    result.note(format!(
        "one UDP socket on the loopback, a process that sends continuously, {} datagrams of 10 \
         bytes for each reader; waits of the readers, not of the sender; rates are while traced",
        config.packets_per_reader
    ));
    result.note(
        "a wait is from lock:contention_begin to contention_end, so a lock acquired at once \
         is not shown. The socket's own locks are named by the kernel's type information, others \
         by the functions that take them, recorded in a short run before on the same socket; \
         `elsewhere` sums the locks that this run did not record, such as those of the threads",
    );
    result.picture = Some(Picture::from_panel(Panel {
        title: "Waits for locks, readers of one kernel UDP socket".to_owned(),
        x: Axis::new("readers", ""),
        y: Axis::new("waits per 1000 packets", ""),
        series: series.into_iter().map(|(name, points)| Series::new(name, points)).collect(),
        ..Panel::default()
    }));
    Ok(result)
}

/// Trace of one run with a given number of readers.
struct LockTrace {
    events: Vec<TraceEvent>,
    /// The event with the socket's address, and the events of a short run before, with stacks.
    /// They relate locks to functions.
    naming_events: Vec<TraceEvent>,
    /// Events dropped because the trace buffer was full.
    lost_events: u64,
    seconds: f64,
}

fn record(readers: usize, packets: u64) -> Result<LockTrace, LabError> {
    let instance = TraceInstance::new(TRACE_BUFFER_KB)?;
    instance.enable("lock/contention_begin")?;
    instance.enable("lock/contention_end")?;
    let switch = instance.recording_switch()?;
    // The event with the socket's address is traced for one packet only.
    let address_trace = TraceInstance::new(1024)?;
    address_trace.enable("sock/sock_recv_length")?;
    let address_switch = address_trace.recording_switch()?;
    // Stacks are recorded for this event only: readers that are slowed down never wait.
    let stack_trace = TraceInstance::new(TRACE_BUFFER_KB)?;
    stack_trace.record_stacks()?;
    stack_trace.enable("lock/contention_begin")?;
    let stack_switch = stack_trace.recording_switch()?;
    let namespace = Namespace::new("locks")?;
    let seconds = namespace.enter(|| -> Result<f64, LabError> {
        let (socket, _writer) = open_loopback_socket()?;
        let read = || {
            let mut unit = [0; 16];
            rustix::io::read(&socket, &mut unit).map(drop).map_err(LabError::io("cannot read"))
        };
        address_switch.add_this_thread()?;
        address_switch.start()?;
        read()?;
        address_switch.stop()?;
        stack_switch.start()?;
        time_prepared_threads(
            || stack_switch.add_this_thread(),
            readers,
            packets.min(LOCK_NAMING_PACKETS),
            read,
        )?;
        stack_switch.stop()?;
        switch.start()?;
        let seconds = time_prepared_threads(|| switch.add_this_thread(), readers, packets, read);
        switch.stop()?;
        seconds
    })??;
    let (events, lost_events) = instance.take()?;
    let (mut naming_events, _) = address_trace.take()?;
    naming_events.extend(stack_trace.take()?.0);
    Ok(LockTrace { events, naming_events, lost_events, seconds })
}

/// Address of the socket, if the event carries it.
fn socket_address(event: &TraceEvent) -> Option<u64> {
    if event.name == "sock_recv_length" { event.address("sk address") } else { None }
}

/// Sums the waits for each lock, by address.
fn waits_by_lock(events: &[TraceEvent]) -> HashMap<u64, LockWaits> {
    let mut began: HashMap<(u32, u64), u64> = HashMap::new();
    let mut waits: HashMap<u64, LockWaits> = HashMap::new();
    for event in events {
        let Some(lock) = event.address("") else { continue };
        match event.name.as_str() {
            "contention_begin" => {
                began.insert((event.thread, lock), event.cycles);
            }
            "contention_end" => {
                let Some(from) = began.remove(&(event.thread, lock)) else { continue };
                let took = event.cycles.saturating_sub(from);
                let waits = waits.entry(lock).or_default();
                waits.contentions += 1;
                waits.total_cycles += took;
                waits.max_cycles = waits.max_cycles.max(took);
            }
            _ => {}
        }
    }
    waits
}

/// Names of locks.
struct LockNames<'a> {
    socket: Option<u64>,
    fields: &'a StructFields,
    by_function: HashMap<u64, String>,
}

impl<'a> LockNames<'a> {
    /// Collects names from events with stacks.
    fn new(events: &[TraceEvent], fields: &'a StructFields) -> Self {
        let socket = events.iter().rev().find_map(socket_address);
        let begins = events.iter().filter(|event| event.name == "contention_begin");
        let by_taker =
            begins.filter_map(|event| Some((event.address("")?, name_by_stack(&event.stack)?)));
        Self { socket, fields, by_function: by_taker.collect() }
    }

    fn name(&self, lock: u64) -> String {
        let of_socket = name_in_socket(lock, self.socket, self.fields);
        let name = of_socket.or_else(|| self.by_function.get(&lock).cloned());
        name.unwrap_or_else(|| "elsewhere".to_owned())
    }
}

/// Name of the lock that was taken with this call stack.
fn name_by_stack(stack: &[String]) -> Option<String> {
    let is_lock = |function: &&String| {
        ["trace", "spin_lock", "mutex_lock"].iter().any(|part| function.contains(part))
    };
    let known_function =
        |function: &String| LOCK_FUNCTIONS.iter().find(|taker| function.contains(taker.0));
    let first = stack.iter().find(|function| !is_lock(function))?;
    let name = stack.iter().filter(|function| !is_lock(function)).find_map(known_function);
    Some(name.map_or_else(|| format!("in {first}"), |taker| taker.1.to_owned()))
}

/// Name of a lock inside the socket; `None` for any other lock.
fn name_in_socket(lock: u64, socket: Option<u64>, fields: &StructFields) -> Option<String> {
    let in_head = fields.iter().find(|f| f.0 == "sk_buff_head" && f.1 == "lock").map_or(0, |f| f.2);
    let end = fields.iter().map(|field| field.2).max().unwrap_or(0) + 256;
    let offset = lock.checked_sub(socket?).filter(|at| *at < end)?;
    let queues = ["sk_receive_queue", "reader_queue", "sk_error_queue", "sk_write_queue"];
    let named = fields.iter().find(|(_, field, at)| {
        let inside = if queues.contains(&field.as_str()) { in_head } else { 0 };
        at + inside == offset && (inside > 0 || field == "sk_lock" || field == "sk_callback_lock")
    });
    Some(named.map_or_else(|| format!("socket + {offset}"), |(_, field, _)| field.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(thread: u32, cycles: u64, name: &str, arguments: &str) -> TraceEvent {
        TraceEvent {
            thread,
            cycles,
            name: name.into(),
            arguments: arguments.into(),
            ..TraceEvent::default()
        }
    }

    #[test]
    fn wait_is_from_begin_to_end_on_one_thread() {
        let events = [
            event(1, 10, "contention_begin", "0xff01 (flags=SPIN)"),
            event(2, 12, "contention_begin", "0xff01 (flags=SPIN)"),
            event(1, 20, "contention_end", "0xff01 (ret=0)"),
            event(2, 42, "contention_end", "0xff01 (ret=0)"),
            event(3, 50, "contention_end", "0xff01 (ret=0)"),
            event(3, 60, "contention_begin", "0xff02 (flags=SPIN)"),
        ];
        let waits = waits_by_lock(&events);
        let expected = LockWaits { contentions: 2, total_cycles: 40, max_cycles: 30 };
        assert_eq!(waits.into_iter().collect::<Vec<_>>(), [(0xff01, expected)]);
    }

    #[test]
    fn names_locks_of_the_socket() {
        let field = |of: &str, name: &str, at| (of.to_owned(), name.to_owned(), at);
        let fields = vec![
            field("sk_buff_head", "lock", 20),
            field("sock", "sk_receive_queue", 168),
            field("sock", "sk_lock", 320),
            field("udp_sock", "reader_queue", 1152),
        ];
        let by_function = |lock: u64, functions: &[&str]| TraceEvent {
            stack: functions.iter().map(|&function| function.to_owned()).collect(),
            ..event(1, 5, "contention_begin", &format!("{lock:#x} (flags=SPIN)"))
        };
        let events = [
            event(1, 4, "sock_recv_length", "sk address = 0x1000, family = 2"),
            by_function(0x90_0000, &["_raw_spin_lock_irqsave", "prepare_to_wait_exclusive", "f"]),
            by_function(
                0xa0_0000,
                &["__traceiter_contention_begin", "_raw_spin_lock", "try_to_wake_up"],
            ),
            by_function(0xb0_0000, &["_raw_spin_lock", "something_else", "udp_recvmsg"]),
            by_function(0xc0_0000, &["_raw_spin_lock", "a_probe", "__schedule"]),
        ];
        let lock_names = LockNames::new(&events, &fields);
        let name = |at: u64| lock_names.name(0x1000 + at);
        assert_eq!(name(188), "sk_receive_queue");
        assert_eq!(name(320), "sk_lock");
        assert_eq!(name(1172), "reader_queue");
        assert_eq!(name(400), "socket + 400");
        assert_eq!(name(1 << 20), "elsewhere");
        assert_eq!(lock_names.name(0x90_0000), "wait queue");
        assert_eq!(lock_names.name(0xa0_0000), "scheduler");
        assert_eq!(lock_names.name(0xb0_0000), "in something_else");
        assert_eq!(lock_names.name(0xc0_0000), "scheduler");
        assert_eq!(LockNames::new(&[], &fields).name(0x1000), "elsewhere");
    }

    #[test]
    fn rejects_invalid_configuration() {
        for (packets_per_reader, readers) in [(0, vec![1]), (1, vec![]), (1, vec![0])] {
            assert!(run(&ContentionConfig { packets_per_reader, readers }).is_err());
        }
    }
}
