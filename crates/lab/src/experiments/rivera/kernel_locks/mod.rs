//! The experiment `lock-contention` on the kernel: the locks of a kernel UDP socket that several
//! threads read.
//!
//! For each lock it counts the waits and adds up their time, from the kernel's trace events
//! `lock:contention_begin` and `contention_end`. For the socket's own locks it also measures the
//! share of time for which they are held, and the releases of each datagram.
//!
//! Rivera (2013), Tables 3.1 to 3.10, has the same for Linux 3.5 from lockdep.

mod names;
mod observer;

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use serde_json::{Value, json};

use self::names::{LockNames, locks_of_socket};
use self::observer::LockObserver;
use crate::experiments::rivera::concurrent_reads::{open_loopback_socket, time_prepared_threads};
use crate::experiments::rivera::receive_queues::model::spin_for;
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
/// Datagrams of the run that counts releases: a breakpoint costs microseconds.
const COUNTED_PACKETS: u64 = 2_000;
/// The timer looks while this many times the datagrams are read, for enough looks.
const SAMPLED_READS: u64 = 4;
/// Pause between two paced reads: longer than the paper's socket lock was held.
const PACE: Duration = Duration::from_micros(2);

/// Waits for one lock: their number, and their total and longest time in TSC cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LockWaits {
    contentions: u64,
    total_cycles: u64,
    max_cycles: u64,
}

/// Readers of one socket.
#[derive(Clone, Copy, Debug)]
struct Case {
    ipv6: bool,
    readers: usize,
    /// With a pause between two reads of a thread.
    is_paced: bool,
    packets_per_reader: u64,
}

impl Case {
    /// Those of the paper's tables: paced reads have one reader.
    fn all(config: &ContentionConfig) -> Vec<Self> {
        let case = |ipv6, readers, is_paced| Self {
            ipv6,
            readers,
            is_paced,
            packets_per_reader: config.packets_per_reader,
        };
        let of_family = |ipv6| {
            let endless = config.readers.iter().map(move |&readers| case(ipv6, readers, false));
            endless.chain([case(ipv6, 1, true)])
        };
        [false, true].into_iter().flat_map(of_family).collect()
    }

    fn packets(self) -> u64 {
        self.readers as u64 * self.packets_per_reader
    }

    fn address(self) -> IpAddr {
        if self.ipv6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() }
    }

    fn pace(self) -> Duration {
        if self.is_paced { PACE } else { Duration::ZERO }
    }

    fn row(self, lock: &str) -> Value {
        json!({
            "ip": if self.ipv6 { "ipv6" } else { "ipv4" },
            "paced_reads": self.is_paced,
            "readers": self.readers,
            "packets": self.packets(),
            "lock": lock,
        })
    }
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
    let (mut lost_events, mut sampled_rates) = (0, Vec::new());
    let cases = Case::all(config);
    let progress = Progress::new(cases.len());
    for case in cases {
        let recorded = record(case, &fields)?;
        lost_events += recorded.lost_events;
        sampled_rates.push(recorded.seconds / recorded.sampled_seconds);
        result.rows.extend(rows(case, &recorded, &fields, cycles));
        let pace = if case.is_paced { ", paced" } else { "" };
        progress.step(format_args!("{} readers{pace}: {} packets", case.readers, case.packets()));
    }
    result.columns = vec![
        "ip",
        "paced_reads",
        "readers",
        "lock",
        "contentions_per_1000_packets",
        "waited_mean_us",
        "waited_longest_us",
        "held_percent",
        "releases_per_packet",
        "held_mean_us",
        "packets_per_second",
    ];
    result.figure("kernel_events_lost", lost_events as f64);
    result.figure("rate_while_sampled", round_to_hundredths(crate::stats::median(&sampled_rates)));
    notes(config, &mut result);
    result.picture = Some(picture(&result.rows));
    Ok(result)
}

/// One row for each lock, and one for the rate.
fn rows(case: Case, recorded: &LockTrace, fields: &StructFields, cycles: TscRate) -> Vec<Value> {
    let lock_names = LockNames::new(recorded.socket, &recorded.naming_events, fields);
    let mut sums: BTreeMap<String, LockWaits> = BTreeMap::new();
    // A lock that nobody waited for is shown, too.
    sums.extend(recorded.held.iter().map(|held| (held.lock.to_owned(), LockWaits::default())));
    for (lock, waits) in waits_by_lock(&recorded.events) {
        let sum = sums.entry(lock_names.name(lock)).or_default();
        sum.contentions += waits.contentions;
        sum.total_cycles += waits.total_cycles;
        sum.max_cycles = sum.max_cycles.max(waits.max_cycles);
    }
    let us = |cycles_spent: u64| cycles.to_ns(cycles_spent) / 1000.0;
    let of_lock = |(lock, waits): (&String, &LockWaits)| {
        let total_us = us(waits.total_cycles);
        let per_1000 = waits.contentions as f64 * 1000.0 / case.packets() as f64;
        let mut row = case.row(lock);
        row["contentions"] = json!(waits.contentions);
        row["contentions_per_1000_packets"] = json!(round_to_hundredths(per_1000));
        row["waited_total_us"] = json!(round_to_hundredths(total_us));
        let waited_mean_us = total_us / waits.contentions.max(1) as f64;
        row["waited_mean_us"] = json!(round_to_hundredths(waited_mean_us));
        row["waited_longest_us"] = json!(round_to_hundredths(us(waits.max_cycles)));
        if let Some(held) = recorded.held.iter().find(|held| held.lock == lock) {
            let held_us = held.share * recorded.sampled_seconds * 1e6;
            let releases = held.releases_per_packet * case.packets() as f64;
            row["held_percent"] = json!(round_to_hundredths(100.0 * held.share));
            row["held_total_us"] = json!(held_us.round());
            row["releases_per_packet"] = json!(round_to_hundredths(held.releases_per_packet));
            row["held_mean_us"] = json!(crate::stats::round_to_thousandths(match releases {
                0.0 => 0.0,
                releases => held_us / releases,
            }));
        }
        row
    };
    let mut rate = case.row("(all packets)");
    rate["packets_per_second"] = json!((case.packets() as f64 / recorded.seconds).round());
    sums.iter().map(of_lock).chain([rate]).collect()
}

fn notes(config: &ContentionConfig, result: &mut Experiment) {
    result.note(format!(
        "one UDP socket on the loopback, a process that sends continuously, {} datagrams of 10 \
         bytes for each reader; waits of the readers, not of the sender; paced reads pause for {} us; \
         rates are without tracing",
        config.packets_per_reader,
        PACE.as_micros()
    ));
    result.note(
        "a wait is from lock:contention_begin to contention_end, so a lock acquired at once \
         is not shown. The socket's own locks are named by the kernel's type information, others \
         by the functions that take them, recorded in a short run before on the same socket; \
         `elsewhere` sums the locks that this run did not record, such as those of the threads",
    );
    result.note(
        "held_percent: looks of a timer of each processor, 5,000 a second, that find the lock held, \
         by whomever; rate_while_sampled is the rate meanwhile over the rate without. \
         releases_per_packet: writes of a free lock, counted by breakpoints in a run of its own. \
         held_mean_us is the time held over the releases: the functions of the kernel have no hook \
         in between, so nothing has to be subtracted",
    );
}

/// Waits for each lock on IPv4, and the time for which the socket's locks are held.
fn picture(rows: &[Value]) -> Picture {
    let panel = |title: &str, y: Axis, key: &str| {
        let mut series: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows.iter().filter(|row| row["ip"] == "ipv4" && row["paced_reads"] == false) {
            let point = row["readers"].as_f64().zip(row[key].as_f64());
            if let (Some(lock), Some(point)) = (row["lock"].as_str(), point) {
                series.entry(lock).or_default().push(point);
            }
        }
        let series = series.into_iter().map(|(name, points)| Series::new(name, points)).collect();
        Panel {
            title: title.to_owned(),
            x: Axis::new("readers", ""),
            y,
            series,
            ..Panel::default()
        }
    };
    let waits = Axis::new("waits per 1000 packets", "");
    let held = Axis::new("time held", "%");
    Picture {
        title: "Locks of one kernel UDP socket".to_owned(),
        panels: vec![
            panel("waits", waits, "contentions_per_1000_packets"),
            panel("held", held, "held_percent"),
        ],
    }
}

/// Observations of a case.
struct LockTrace {
    /// Address of the socket.
    socket: u64,
    events: Vec<TraceEvent>,
    /// Events of a short run before, with stacks. They relate locks to functions.
    naming_events: Vec<TraceEvent>,
    /// Events dropped because the trace buffer was full.
    lost_events: u64,
    held: Vec<HeldLock>,
    /// Duration without tracing.
    seconds: f64,
    /// Duration, for as many datagrams, while a timer looks at the locks.
    sampled_seconds: f64,
}

/// Use of a lock of the socket.
struct HeldLock {
    lock: &'static str,
    /// Share of the time for which the lock is held.
    share: f64,
    releases_per_packet: f64,
}

fn record(case: Case, fields: &StructFields) -> Result<LockTrace, LabError> {
    let instance = TraceInstance::new(TRACE_BUFFER_KB)?;
    instance.enable("lock/contention_begin")?;
    instance.enable("lock/contention_end")?;
    let switch = instance.recording_switch()?;
    // Stacks are recorded for this event only: readers that are slowed down never wait.
    let stack_trace = TraceInstance::new(TRACE_BUFFER_KB)?;
    stack_trace.record_stacks()?;
    stack_trace.enable("lock/contention_begin")?;
    let stack_switch = stack_trace.recording_switch()?;
    let mut observer = LockObserver::load()?;
    let mut recorded = Namespace::new("locks")?.enter(|| -> Result<LockTrace, LabError> {
        let (socket, _writer) = open_loopback_socket(case.address())?;
        let read = || {
            let mut unit = [0; 16];
            spin_for(case.pace());
            rustix::io::read(&socket, &mut unit).map(drop).map_err(LabError::io("cannot read"))
        };
        let read_all = |packets| time_prepared_threads(|| Ok(()), case.readers, packets, read);
        let address = observer.find_socket(read)?;
        stack_switch.start()?;
        let prepare = || stack_switch.add_this_thread();
        let packets = case.packets_per_reader;
        time_prepared_threads(prepare, case.readers, packets.min(LOCK_NAMING_PACKETS), read)?;
        stack_switch.stop()?;
        switch.start()?;
        time_prepared_threads(|| switch.add_this_thread(), case.readers, packets, read)?;
        switch.stop()?;
        let seconds = read_all(packets)?;
        let locks = locks_of_socket(address, fields);
        let addresses: Vec<u64> = locks.iter().map(|lock| lock.1).collect();
        let sampled = || read_all(SAMPLED_READS * packets);
        let (shares, sampled_seconds) = observer.held_shares(&addresses, sampled)?;
        let counted = packets.min(COUNTED_PACKETS);
        let (releases, _) = observer.releases(&addresses, || read_all(counted))?;
        let counted = (counted * case.readers as u64) as f64;
        let uses = locks.iter().zip(shares).zip(releases);
        let held = uses.map(|((&(lock, _), share), releases)| HeldLock {
            lock,
            share,
            releases_per_packet: releases as f64 / counted,
        });
        Ok(LockTrace {
            socket: address,
            events: Vec::new(),
            naming_events: Vec::new(),
            lost_events: 0,
            held: held.collect(),
            seconds,
            sampled_seconds: sampled_seconds / SAMPLED_READS as f64,
        })
    })??;
    (recorded.events, recorded.lost_events) = instance.take()?;
    recorded.naming_events = stack_trace.take()?.0;
    Ok(recorded)
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
    fn rejects_invalid_configuration() {
        for (packets_per_reader, readers) in [(0, vec![1]), (1, vec![]), (1, vec![0])] {
            assert!(run(&ContentionConfig { packets_per_reader, readers }).is_err());
        }
    }
}
