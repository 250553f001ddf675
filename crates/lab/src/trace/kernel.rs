//! The kernel's way of a packet, by its trace events.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use super::{BURST, Stage, TraceConfig};
use crate::LabError;
use crate::cpu;
use crate::netns::Namespace;
use crate::tracefs::{Cycles, Event, Instance, Switch};

/// What is recorded, in the order of a packet's way.
const EVENTS: [&str; 7] = [
    "net/netif_rx",
    "net/netif_receive_skb",
    "sock/sk_data_ready",
    "syscalls/sys_enter_recvfrom",
    "kmem/kfree",
    "sock/sock_recv_length",
    "syscalls/sys_exit_recvfrom",
];
/// Room on each core, in kilobytes for each 1000 packets.
const ROOM_KB: usize = 1024;
/// A packet that was lost must not be waited for.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// What came of following packets.
pub(super) struct Followed {
    pub(super) stages: Vec<Stage>,
    /// What recording one event costs.
    pub(super) event_ns: f64,
}

/// When a packet was where, in cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Stamps {
    queued: u64,
    taken: u64,
    ready: u64,
    called: u64,
    freeing: u64,
    freed: u64,
    returned: u64,
}

/// Sends and reads so many packets, traced and not, and says where their time
/// went.
pub(super) fn follow(
    config: &TraceConfig,
    ipv6: bool,
    cycles: Cycles,
) -> Result<Followed, LabError> {
    let rounds = config.packets.div_ceil(BURST);
    let room_kb = (rounds * BURST).div_ceil(1000) * ROOM_KB;
    let instance = Instance::new(room_kb as u32)?;
    for event in EVENTS {
        instance.enable(event)?;
    }
    let switch = instance.switch()?;
    let namespace = Namespace::new("trace")?;
    let (untraced_ns, traced_ns) =
        namespace.enter(|| drive(rounds, config.payload_bytes, ipv6, &switch))??;
    let (events, lost) = instance.take()?;
    if lost > 0 {
        return Err(LabError::Config(format!(
            "{lost} trace events found no room: give fewer --packets"
        )));
    }
    let whole: Vec<Stamps> = stamps(&events);
    if whole.len() * 10 < config.packets * 9 {
        return Err(LabError::Config(format!(
            "only {} of {} packets could be followed: this kernel's trace events are others",
            whole.len(),
            config.packets
        )));
    }
    let events_each_round = events.len() as f64 / rounds as f64;
    let event_ns = ((traced_ns - untraced_ns) / events_each_round).max(0.0);
    Ok(Followed { stages: stages(&whole, cycles), event_ns })
}

/// Sends and reads on one core, first untraced, then traced; the nanoseconds
/// that a round of either takes.
fn drive(
    rounds: usize,
    payload_bytes: usize,
    ipv6: bool,
    switch: &Switch,
) -> Result<(f64, f64), LabError> {
    cpu::pin_this_thread(cpu::cores() - 1)?;
    let address: IpAddr =
        if ipv6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
    let open = || -> std::io::Result<_> {
        let (reader, sender) = (UdpSocket::bind((address, 0))?, UdpSocket::bind((address, 0))?);
        reader.set_read_timeout(Some(READ_LIMIT))?;
        sender.connect(reader.local_addr()?)?;
        Ok((reader, sender))
    };
    let (reader, sender) = open().map_err(LabError::io("cannot open sockets on the loopback"))?;
    let payload = vec![7; payload_bytes];
    let mut buffer = vec![0; payload_bytes];
    let mut round = || -> std::io::Result<f64> {
        let start = Instant::now();
        (0..BURST).try_for_each(|_| sender.send(&payload).map(drop))?;
        (0..BURST).try_for_each(|_| reader.recv(&mut buffer).map(drop))?;
        Ok(start.elapsed().as_nanos() as f64)
    };
    let mut median = |rounds: usize| -> Result<f64, LabError> {
        let times: std::io::Result<Vec<f64>> = (0..rounds).map(|_| round()).collect();
        let mut times = times.map_err(LabError::io("a packet on the loopback was lost"))?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    // The first rounds only fill caches.
    median(rounds.clamp(1, 100))?;
    let untraced_ns = median(rounds)?;
    switch.add_this_thread()?;
    switch.on()?;
    let traced_ns = median(rounds);
    switch.off()?;
    Ok((untraced_ns, traced_ns?))
}

/// Puts the events of each packet together. One thread sends and reads, and a
/// socket's queue keeps the order, so what is read is what has waited longest.
fn stamps(events: &[Event]) -> Vec<Stamps> {
    let mut waiting: VecDeque<Stamps> = VecDeque::new();
    let mut whole = Vec::new();
    let (mut comes, mut goes) = (Stamps::default(), Stamps::default());
    for event in events {
        let now = event.cycles;
        match event.name.as_str() {
            "netif_rx" => comes = Stamps { queued: now, ..Stamps::default() },
            "netif_receive_skb" => comes.taken = now,
            "sk_data_ready" => waiting.push_back(Stamps { ready: now, ..comes }),
            "sys_recvfrom" if !event.returns() => {
                goes = Stamps { called: now, ..waiting.pop_front().unwrap_or_default() };
            }
            "kfree" if event.arguments.contains("=skb_release_data") => goes.freeing = now,
            "sock_recv_length" => goes.freed = now,
            "sys_recvfrom" => {
                goes.returned = now;
                whole.extend(Some(std::mem::take(&mut goes)).filter(Stamps::is_whole));
            }
            _ => {}
        }
    }
    whole
}

impl Stamps {
    fn is_whole(&self) -> bool {
        let way = [
            self.queued,
            self.taken,
            self.ready,
            self.called,
            self.freeing,
            self.freed,
            self.returned,
        ];
        way[0] > 0 && way.is_sorted()
    }
}

fn stages(whole: &[Stamps], cycles: Cycles) -> Vec<Stage> {
    let between = |stage: Stage, ends: fn(&Stamps) -> (u64, u64)| Stage {
        times_ns: whole
            .iter()
            .map(|stamps| {
                let (from, to) = ends(stamps);
                cycles.ns(to - from)
            })
            .collect(),
        ..stage
    };
    vec![
        between(
            Stage::new("softirq", "from the device's queue to the softirq that takes it"),
            |s| (s.queued, s.taken),
        ),
        between(
            Stage::new("protocols", "IP, UDP, socket lookup, memory accounting, enqueue"),
            |s| (s.taken, s.ready),
        ),
        between(Stage::new("socket queue", "waits until its reader's call").waiting(), |s| {
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

    fn event(cycles: u64, name: &str, arguments: &str) -> Event {
        Event {
            thread: 1,
            cycles,
            name: name.into(),
            arguments: arguments.into(),
            ..Event::default()
        }
    }

    fn reads(at: u64) -> [Event; 5] {
        [
            event(at, "sys_recvfrom", "fd: 3"),
            event(at + 5, "kfree", "call_site=skb_release_data+0x16b/0x1d0 ptr=0"),
            event(at + 6, "kfree", "call_site=other+0x1/0x1d0 ptr=0"),
            event(at + 20, "sock_recv_length", "sk address = 0xd"),
            event(at + 21, "sys_recvfrom", "-> 0x40"),
        ]
    }

    #[test]
    fn the_events_of_a_packet_are_put_together() {
        let mut events = Vec::new();
        for at in [100, 200] {
            events.push(event(at, "netif_rx", "dev=lo skbaddr=0xa len=64"));
            events.push(event(at + 10, "netif_receive_skb", "dev=lo skbaddr=0xa len=64"));
            events.push(event(at + 30, "sk_data_ready", "family=2"));
        }
        events.extend([1100, 1200].into_iter().flat_map(reads));
        let whole = stamps(&events);
        assert_eq!(whole.len(), 2);
        let of: Vec<f64> = stages(&whole, Cycles::of(1.0))
            .iter()
            .map(|stage| {
                assert_eq!(stage.times_ns, [stage.times_ns[0]; 2], "{}", stage.name);
                stage.times_ns[0]
            })
            .collect();
        assert_eq!(of, [10.0, 20.0, 970.0, 5.0, 15.0, 1.0]);
    }

    #[test]
    fn packets_that_were_not_seen_whole_are_left_out() {
        let mut events = vec![event(5, "sk_data_ready", "")];
        events.extend(reads(10));
        events.extend(reads(40));
        events.push(event(99, "sys_recvfrom", "-> 0xfffffffffffffff5"));
        assert_eq!(stamps(&events), []);
    }
}
