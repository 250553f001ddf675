//! The locks of a kernel UDP socket that several threads read: who waits for
//! which lock, how often and how long, by the kernel's own trace events
//! `lock:contention_begin` and `contention_end`.
//!
//! Rivera (2013), Tables 3.1 to 3.10, has the same for Linux 3.5 from lockdep,
//! with the times for which locks were held. A kernel without lock statistics
//! tells only of waiting.

use std::collections::{BTreeMap, HashMap};

use serde_json::json;

use crate::btf::{self, Fields};
use crate::netns::Namespace;
use crate::plot::{Axis, Panel, Picture, Series};
use crate::reads::{open_socket, time_from};
use crate::sweep::hundredths;
use crate::tracefs::{Cycles, Event, Instance};
use crate::{Experiment, LabError};

/// How to run the experiment.
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

/// Room for events on each core.
const ROOM_KB: u32 = 32 * 1024;
const READERS_MAX: usize = 1024;
/// Datagrams that each thread reads to see who takes which lock.
const NAMING_PACKETS: u64 = 2_000;

/// Locks by the innermost of these functions, given by a part of its name, that
/// takes them.
const TAKERS: [(&str, &str); 8] = [
    ("prepare_to_wait", WAIT_QUEUE),
    ("finish_wait", WAIT_QUEUE),
    ("__wake_up", WAIT_QUEUE),
    ("__schedule", SCHEDULER),
    ("rq_lock", SCHEDULER),
    ("try_to_wake_up", SCHEDULER),
    ("slab", MEMORY),
    ("rmqueue", MEMORY),
];
/// Where readers of an empty socket sleep.
const WAIT_QUEUE: &str = "wait queue";
const SCHEDULER: &str = "scheduler";
const MEMORY: &str = "memory";

/// What is known of a lock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Waits {
    contentions: u64,
    total_cycles: u64,
    longest_cycles: u64,
}

/// Runs the experiment. It needs root, for a network namespace and for tracing.
///
/// # Errors
/// When the configuration makes no sense, or tracing or the socket fails.
pub fn run(config: &ContentionConfig) -> Result<Experiment, LabError> {
    if config.packets_per_reader == 0 || config.readers.is_empty() {
        let problem = "the kernel's locks need a number of readers and a packet for each";
        return Err(LabError::Config(problem.to_owned()));
    }
    if let Some(wrong) = config.readers.iter().find(|n| !(1..=READERS_MAX).contains(*n)) {
        return Err(LabError::Config(format!("{wrong} readers: give 1 to {READERS_MAX}")));
    }
    let fields = btf::fields_of(&["sock", "udp_sock", "sk_buff_head"])?;
    let cycles = Cycles::measure();
    let mut result = Experiment::new("locks");
    let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut lost_events = 0;
    for &readers in &config.readers {
        let recorded = record(readers, config.packets_per_reader)?;
        lost_events += recorded.lost;
        let names = Names::new(&recorded.naming, &fields);
        let packets = readers as u64 * config.packets_per_reader;
        let mut sums: BTreeMap<String, Waits> = BTreeMap::new();
        for (lock, waits) in waits(&recorded.events) {
            let sum = sums.entry(names.of(lock)).or_default();
            sum.contentions += waits.contentions;
            sum.total_cycles += waits.total_cycles;
            sum.longest_cycles = sum.longest_cycles.max(waits.longest_cycles);
        }
        for (lock, waits) in &sums {
            let us = |cycles_spent: u64| cycles.ns(cycles_spent) / 1000.0;
            let total_us = us(waits.total_cycles);
            result.rows.push(json!({
                "readers": readers,
                "lock": lock,
                "contentions": waits.contentions,
                "contentions_per_1000_packets":
                    hundredths(waits.contentions as f64 * 1000.0 / packets as f64),
                "waited_total_us": hundredths(total_us),
                "waited_mean_us": hundredths(total_us / waits.contentions.max(1) as f64),
                "waited_longest_us": hundredths(us(waits.longest_cycles)),
            }));
            let per_1000 = waits.contentions as f64 * 1000.0 / packets as f64;
            series.entry(lock.clone()).or_default().push((readers as f64, per_1000));
        }
        result.rows.push(json!({
            "readers": readers,
            "lock": "(all packets)",
            "packets_per_second": (packets as f64 / recorded.seconds).round(),
        }));
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
        "one UDP socket on the loopback, a process that sends without end, {} datagrams of 10 \
         bytes for each reader; the readers' waits, not the sender's; read while traced",
        config.packets_per_reader
    ));
    result.note(
        "a wait is from lock:contention_begin to contention_end, so a lock that is got at once \
         does not show. The socket's own locks are named by the kernel's type information, others \
         by the functions that take them, seen in a short run before on the same socket; \
         elsewhere is what that run did not see, as the locks of the threads themselves",
    );
    result.picture = Some(Picture::of(Panel {
        title: "Waits for locks, readers of one kernel UDP socket".to_owned(),
        x: Axis::new("readers", ""),
        y: Axis::new("waits per 1000 packets", ""),
        series: series.into_iter().map(|(name, points)| Series::new(name, points)).collect(),
        ..Panel::default()
    }));
    Ok(result)
}

/// What happened while so many readers each read so many packets.
struct Recorded {
    events: Vec<Event>,
    /// The socket's address, and of a short run before, with stacks: who takes
    /// which lock.
    naming: Vec<Event>,
    /// Events for which there was no room.
    lost: u64,
    seconds: f64,
}

fn record(readers: usize, packets: u64) -> Result<Recorded, LabError> {
    let instance = Instance::new(ROOM_KB)?;
    instance.enable("lock/contention_begin")?;
    instance.enable("lock/contention_end")?;
    let switch = instance.switch()?;
    // One packet with the event that tells the socket's address.
    let address = Instance::new(1024)?;
    address.enable("sock/sock_recv_length")?;
    let teller = address.switch()?;
    // Stacks of nothing else: readers that are slowed down never wait.
    let takers = Instance::new(ROOM_KB)?;
    takers.record_stacks()?;
    takers.enable("lock/contention_begin")?;
    let namer = takers.switch()?;
    let namespace = Namespace::new("locks")?;
    let seconds = namespace.enter(|| -> Result<f64, LabError> {
        let (socket, _writer) = open_socket()?;
        let read = || {
            let mut unit = [0; 16];
            rustix::io::read(&socket, &mut unit).map(drop).map_err(LabError::io("cannot read"))
        };
        teller.add_this_thread()?;
        teller.on()?;
        read()?;
        teller.off()?;
        namer.on()?;
        time_from(|| namer.add_this_thread(), readers, packets.min(NAMING_PACKETS), read)?;
        namer.off()?;
        switch.on()?;
        let seconds = time_from(|| switch.add_this_thread(), readers, packets, read);
        switch.off()?;
        seconds
    })??;
    let (events, lost) = instance.take()?;
    let (mut naming, _) = address.take()?;
    naming.extend(takers.take()?.0);
    Ok(Recorded { events, naming, lost, seconds })
}

/// The address of the socket, if the event tells it.
fn socket_of(event: &Event) -> Option<u64> {
    if event.name == "sock_recv_length" { event.address("sk address") } else { None }
}

/// The waits for each lock.
fn waits(events: &[Event]) -> HashMap<u64, Waits> {
    let mut began: HashMap<(u32, u64), u64> = HashMap::new();
    let mut waits: HashMap<u64, Waits> = HashMap::new();
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
                waits.longest_cycles = waits.longest_cycles.max(took);
            }
            _ => {}
        }
    }
    waits
}

/// What locks are called.
struct Names<'a> {
    socket: Option<u64>,
    fields: &'a Fields,
    by_taker: HashMap<u64, String>,
}

impl<'a> Names<'a> {
    /// From events with stacks.
    fn new(events: &[Event], fields: &'a Fields) -> Self {
        let socket = events.iter().rev().find_map(socket_of);
        let begins = events.iter().filter(|event| event.name == "contention_begin");
        let by_taker = begins.filter_map(|event| Some((event.address("")?, taker(&event.stack)?)));
        Self { socket, fields, by_taker: by_taker.collect() }
    }

    fn of(&self, lock: u64) -> String {
        let of_socket = name_in_socket(lock, self.socket, self.fields);
        let name = of_socket.or_else(|| self.by_taker.get(&lock).cloned());
        name.unwrap_or_else(|| "elsewhere".to_owned())
    }
}

/// What a lock is called that was taken in these functions.
fn taker(stack: &[String]) -> Option<String> {
    let is_lock = |function: &&String| {
        ["trace", "spin_lock", "mutex_lock"].iter().any(|part| function.contains(part))
    };
    let known = |function: &String| TAKERS.iter().find(|taker| function.contains(taker.0));
    let first = stack.iter().find(|function| !is_lock(function))?;
    let name = stack.iter().filter(|function| !is_lock(function)).find_map(known);
    Some(name.map_or_else(|| format!("in {first}"), |taker| taker.1.to_owned()))
}

/// What a lock of the socket is called; `None` if it is none.
fn name_in_socket(lock: u64, socket: Option<u64>, fields: &Fields) -> Option<String> {
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

    fn event(thread: u32, cycles: u64, name: &str, arguments: &str) -> Event {
        Event { thread, cycles, name: name.into(), arguments: arguments.into(), ..Event::default() }
    }

    #[test]
    fn waits_are_from_begin_to_end_of_one_thread() {
        let events = [
            event(1, 10, "contention_begin", "0xff01 (flags=SPIN)"),
            event(2, 12, "contention_begin", "0xff01 (flags=SPIN)"),
            event(1, 20, "contention_end", "0xff01 (ret=0)"),
            event(2, 42, "contention_end", "0xff01 (ret=0)"),
            event(3, 50, "contention_end", "0xff01 (ret=0)"),
            event(3, 60, "contention_begin", "0xff02 (flags=SPIN)"),
        ];
        let waits = waits(&events);
        let expected = Waits { contentions: 2, total_cycles: 40, longest_cycles: 30 };
        assert_eq!(waits.into_iter().collect::<Vec<_>>(), [(0xff01, expected)]);
    }

    #[test]
    fn locks_of_the_socket_have_names() {
        let field = |of: &str, name: &str, at| (of.to_owned(), name.to_owned(), at);
        let fields = vec![
            field("sk_buff_head", "lock", 20),
            field("sock", "sk_receive_queue", 168),
            field("sock", "sk_lock", 320),
            field("udp_sock", "reader_queue", 1152),
        ];
        let by_function = |lock: u64, functions: &[&str]| Event {
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
        let names = Names::new(&events, &fields);
        let name = |at: u64| names.of(0x1000 + at);
        assert_eq!(name(188), "sk_receive_queue");
        assert_eq!(name(320), "sk_lock");
        assert_eq!(name(1172), "reader_queue");
        assert_eq!(name(400), "socket + 400");
        assert_eq!(name(1 << 20), "elsewhere");
        assert_eq!(names.of(0x90_0000), "wait queue");
        assert_eq!(names.of(0xa0_0000), "scheduler");
        assert_eq!(names.of(0xb0_0000), "in something_else");
        assert_eq!(names.of(0xc0_0000), "scheduler");
        assert_eq!(Names::new(&[], &fields).of(0x1000), "elsewhere");
    }

    #[test]
    fn nonsense_is_refused() {
        for (packets_per_reader, readers) in [(0, vec![1]), (1, vec![]), (1, vec![0])] {
            assert!(run(&ContentionConfig { packets_per_reader, readers }).is_err());
        }
    }
}
