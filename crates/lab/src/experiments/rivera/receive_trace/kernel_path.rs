//! Receive path of the kernel, measured by its trace events.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use super::{BURST_PACKETS, ReceiveTraceConfig, Stage};
use crate::LabError;
use crate::testbed::cpu;
use crate::testbed::netns::Namespace;
use crate::testbed::tracefs::{RecordingSwitch, TraceEvent, TraceInstance, TscRate};

/// Recorded events, in the order in which a packet causes them.
const TRACE_EVENTS: [&str; 7] = [
    "net/netif_rx",
    "net/netif_receive_skb",
    "sock/sk_data_ready",
    "syscalls/sys_enter_recvfrom",
    "kmem/kfree",
    "sock/sock_recv_length",
    "syscalls/sys_exit_recvfrom",
];
/// Size of the trace buffer of each core, in kilobytes for each 1000 packets.
const BUFFER_KB_PER_1000_PACKETS: usize = 1024;
/// Receive timeout, so that the experiment does not wait for a lost packet.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Stage times of the traced packets.
pub(super) struct KernelTrace {
    pub(super) stages: Vec<Stage>,
    /// Cost of recording one event, in nanoseconds.
    pub(super) event_ns: f64,
}

/// Times at which a packet reached each stage, in cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct PacketTimestamps {
    queued: u64,
    taken: u64,
    ready: u64,
    called: u64,
    freeing: u64,
    freed: u64,
    returned: u64,
}

/// Sends and reads packets, untraced and traced, and returns the time of each stage.
pub(super) fn trace_packets(
    config: &ReceiveTraceConfig,
    ipv6: bool,
    cycles: TscRate,
) -> Result<KernelTrace, LabError> {
    let rounds = config.packets.div_ceil(BURST_PACKETS);
    let buffer_kb = (rounds * BURST_PACKETS).div_ceil(1000) * BUFFER_KB_PER_1000_PACKETS;
    let instance = TraceInstance::new(buffer_kb as u32)?;
    for event in TRACE_EVENTS {
        instance.enable(event)?;
    }
    let switch = instance.recording_switch()?;
    let namespace = Namespace::new("trace")?;
    let (untraced_ns, traced_ns) =
        namespace.enter(|| measure_rounds(rounds, config.payload_bytes, ipv6, &switch))??;
    let (events, lost) = instance.take()?;
    if lost > 0 {
        return Err(LabError::Config(format!(
            "{lost} trace events were lost because the buffer was full: give fewer --packets"
        )));
    }
    let packets: Vec<PacketTimestamps> = collect_timestamps(&events);
    if packets.len() * 10 < config.packets * 9 {
        return Err(LabError::Config(format!(
            "only {} of {} packets could be traced: this kernel has other trace events",
            packets.len(),
            config.packets
        )));
    }
    let events_each_round = events.len() as f64 / rounds as f64;
    let event_ns = ((traced_ns - untraced_ns) / events_each_round).max(0.0);
    Ok(KernelTrace { stages: stages(&packets, cycles), event_ns })
}

/// Sends and reads on one core, first untraced, then traced; returns the nanoseconds of an
/// untraced and of a traced round.
fn measure_rounds(
    rounds: usize,
    payload_bytes: usize,
    ipv6: bool,
    switch: &RecordingSwitch,
) -> Result<(f64, f64), LabError> {
    cpu::pin_this_thread(cpu::available_cores() - 1)?;
    let address: IpAddr =
        if ipv6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
    let open = || -> std::io::Result<_> {
        let (reader, sender) = (UdpSocket::bind((address, 0))?, UdpSocket::bind((address, 0))?);
        reader.set_read_timeout(Some(READ_TIMEOUT))?;
        sender.connect(reader.local_addr()?)?;
        Ok((reader, sender))
    };
    let (reader, sender) = open().map_err(LabError::io("cannot open sockets on the loopback"))?;
    let payload = vec![7; payload_bytes];
    let mut buffer = vec![0; payload_bytes];
    let mut round = || -> std::io::Result<f64> {
        let start = Instant::now();
        (0..BURST_PACKETS).try_for_each(|_| sender.send(&payload).map(drop))?;
        (0..BURST_PACKETS).try_for_each(|_| reader.recv(&mut buffer).map(drop))?;
        Ok(start.elapsed().as_nanos() as f64)
    };
    let mut median = |rounds: usize| -> Result<f64, LabError> {
        let times: std::io::Result<Vec<f64>> = (0..rounds).map(|_| round()).collect();
        let mut times = times.map_err(LabError::io("a packet on the loopback was lost"))?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    // The first rounds only warm the caches.
    median(rounds.clamp(1, 100))?;
    let untraced_ns = median(rounds)?;
    switch.add_this_thread()?;
    switch.start()?;
    let traced_ns = median(rounds);
    switch.stop()?;
    Ok((untraced_ns, traced_ns?))
}

/// Combines the events of each packet. One thread sends and reads, and a socket's queue keeps the
/// order, so the packet read is the packet that has waited longest.
fn collect_timestamps(events: &[TraceEvent]) -> Vec<PacketTimestamps> {
    let mut waiting: VecDeque<PacketTimestamps> = VecDeque::new();
    let mut complete = Vec::new();
    let (mut arriving, mut reading) = (PacketTimestamps::default(), PacketTimestamps::default());
    for event in events {
        let now = event.cycles;
        match event.name.as_str() {
            "netif_rx" => {
                arriving = PacketTimestamps { queued: now, ..PacketTimestamps::default() }
            }
            "netif_receive_skb" => arriving.taken = now,
            "sk_data_ready" => waiting.push_back(PacketTimestamps { ready: now, ..arriving }),
            "sys_recvfrom" if !event.is_syscall_exit() => {
                reading =
                    PacketTimestamps { called: now, ..waiting.pop_front().unwrap_or_default() };
            }
            "kfree" if event.arguments.contains("=skb_release_data") => reading.freeing = now,
            "sock_recv_length" => reading.freed = now,
            "sys_recvfrom" => {
                reading.returned = now;
                complete.extend(
                    Some(std::mem::take(&mut reading)).filter(PacketTimestamps::is_complete),
                );
            }
            _ => {}
        }
    }
    complete
}

impl PacketTimestamps {
    fn is_complete(&self) -> bool {
        let timestamps = [
            self.queued,
            self.taken,
            self.ready,
            self.called,
            self.freeing,
            self.freed,
            self.returned,
        ];
        timestamps[0] > 0 && timestamps.is_sorted()
    }
}

fn stages(packets: &[PacketTimestamps], cycles: TscRate) -> Vec<Stage> {
    let between = |stage: Stage, endpoints: fn(&PacketTimestamps) -> (u64, u64)| Stage {
        times_ns: packets
            .iter()
            .map(|stamps| {
                let (from, to) = endpoints(stamps);
                cycles.to_ns(to - from)
            })
            .collect(),
        ..stage
    };
    vec![
        between(
            Stage::new(
                "softirq",
                "from the device's queue to the softirq that dequeues the packet",
            ),
            |s| (s.queued, s.taken),
        ),
        between(
            Stage::new("protocols", "IP, UDP, socket lookup, memory accounting, enqueue"),
            |s| (s.taken, s.ready),
        ),
        between(Stage::new("socket queue", "wait for the reader's call").waiting(), |s| {
            (s.ready, s.called)
        }),
        between(
            Stage::new("dequeue, copy", "into recvfrom, locks, dequeue, accounting, copy"),
            |s| (s.called, s.freeing),
        ),
        between(Stage::new("free", "the packet's memory"), |s| (s.freeing, s.freed)),
        between(Stage::new("return", "out of recvfrom"), |s| (s.freed, s.returned)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(cycles: u64, name: &str, arguments: &str) -> TraceEvent {
        TraceEvent {
            thread: 1,
            cycles,
            name: name.into(),
            arguments: arguments.into(),
            ..TraceEvent::default()
        }
    }

    fn read_events(at: u64) -> [TraceEvent; 5] {
        [
            event(at, "sys_recvfrom", "fd: 3"),
            event(at + 5, "kfree", "call_site=skb_release_data+0x16b/0x1d0 ptr=0"),
            event(at + 6, "kfree", "call_site=other+0x1/0x1d0 ptr=0"),
            event(at + 20, "sock_recv_length", "sk address = 0xd"),
            event(at + 21, "sys_recvfrom", "-> 0x40"),
        ]
    }

    #[test]
    fn collects_the_events_of_each_packet() {
        let mut events = Vec::new();
        for at in [100, 200] {
            events.push(event(at, "netif_rx", "dev=lo skbaddr=0xa len=64"));
            events.push(event(at + 10, "netif_receive_skb", "dev=lo skbaddr=0xa len=64"));
            events.push(event(at + 30, "sk_data_ready", "family=2"));
        }
        events.extend([1100, 1200].into_iter().flat_map(read_events));
        let packets = collect_timestamps(&events);
        assert_eq!(packets.len(), 2);
        let stage_ns: Vec<f64> = stages(&packets, TscRate::from_cycles_per_ns(1.0))
            .iter()
            .map(|stage| {
                assert_eq!(stage.times_ns, [stage.times_ns[0]; 2], "{}", stage.name);
                stage.times_ns[0]
            })
            .collect();
        assert_eq!(stage_ns, [10.0, 20.0, 970.0, 5.0, 15.0, 1.0]);
    }

    #[test]
    fn omits_incompletely_traced_packets() {
        let mut events = vec![event(5, "sk_data_ready", "")];
        events.extend(read_events(10));
        events.extend(read_events(40));
        events.push(event(99, "sys_recvfrom", "-> 0xfffffffffffffff5"));
        assert_eq!(collect_timestamps(&events), []);
    }
}
