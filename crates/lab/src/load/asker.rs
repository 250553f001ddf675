//! Requests in a closed loop from the device at the load's end of the wire.
//!
//! A BPF program on the device turns the frame of each answer into the next question
//! (`bpf/asker.bpf.c`), which costs the load's core a part of what sockets of any kind
//! do. So a server is measured that answers faster than a client of its own kind could
//! ask. What is rare is done here: connections are opened and ended by frames made
//! ahead, and a question whose answer stays away is asked again.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::XdpMode;
use tidegate_port::xdp::{BusyPoll, NapiPoller};
use tidegate_wire::{MacAddr, TcpFlags};

use super::bpf;
use super::segment::Segment;
use super::template::{fold, sum};
use super::{Answer, Latencies, Question, TcpLoadReport};
use crate::cpu;
use crate::error::LabError;
use crate::netns::End;
use crate::sys;

/// Built from `bpf/asker.bpf.c` by `make bpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/asker.bpf.o");

/// The most connections, and the longest question and answer that is compared, in bytes.
const MAX_CONNECTIONS: u16 = 1024;
const MAX_BYTES: usize = 128;
/// Each power of two of a latency has so many buckets.
const PARTS: u32 = 32;
const BUCKETS: u32 = 64 * PARTS;

/// How often to look for connections on which nothing happens.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long to wait until all connections are established.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Who asks whom.
#[derive(Clone, Debug)]
pub struct AskerConfig {
    /// The server, and its hardware address.
    pub target: (SocketAddrV4, [u8; 6]),
    /// An address of the kernel's at the load's end, which answers ARP for it, and the
    /// first port. The others follow it.
    pub source: SocketAddrV4,
    /// How many connections, each with one question at a time.
    pub connections: u16,
    /// What is asked: up to 128 bytes, and no longer than the answer.
    pub question: Question,
    /// How long to ask before it counts.
    pub warm_up_seconds: f64,
    /// How long to measure.
    pub seconds: f64,
    /// Where the load is made.
    pub core: usize,
}

/// `struct settings` of the program: six numbers of 32 bits, the question, the answer.
type Settings = [u8; 6 * 4 + 2 * MAX_BYTES];

/// `struct connection` of the program: two numbers each in the first two words.
type Connection = [u64; 5];

/// Its `state`.
const CONNECTING: u32 = 1;
const ASKING: u32 = 2;

/// What a connection is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    state: u32,
    sent: u32,
    received: u32,
    answers: u64,
    wrong: u64,
}

impl From<Connection> for Seen {
    fn from([state_sent, received_part, _, answers, wrong]: Connection) -> Self {
        let (state, sent) = (state_sent as u32, (state_sent >> 32) as u32);
        Self { state, sent, received: received_part as u32, answers, wrong }
    }
}

/// Clients that ask until they are dropped.
struct Asker<'c> {
    config: &'c AskerConfig,
    source_mac: [u8; 6],
    connections: Array<MapData, Connection>,
    latencies: Array<MapData, u64>,
    socket: OwnedFd,
    poller: NapiPoller,
    /// What was seen of each the last time.
    seen: Vec<Seen>,
    _program: Ebpf,
}

/// Asks from the device of `end`, whose peer must have a NAPI context: an XDP program, or
/// GRO on.
///
/// # Errors
/// When the settings make no sense, the kernel does not take the program (it must be
/// Linux 6.13 or newer), or connections cannot be established.
pub fn load_tcp_at_device(end: &End, config: &AskerConfig) -> Result<TcpLoadReport, LabError> {
    let BusyPoll { defer_irqs, flush_timeout_ns, .. } = BusyPoll::default();
    end.set_deferral(defer_irqs, flush_timeout_ns)?;
    let device = (end.index()?, end.mac);
    let report = end.namespace.enter(|| {
        let _pinned = cpu::Pinned::to(config.core)?;
        let mut asker = Asker::start(device, config)?;
        asker.open()?;
        asker.run()
    });
    end.set_deferral(0, 0)?;
    report?
}

impl<'c> Asker<'c> {
    /// On the device with an index and a hardware address in the network namespace of
    /// this thread.
    fn start(
        (index, source_mac): (u32, [u8; 6]),
        config: &'c AskerConfig,
    ) -> Result<Self, LabError> {
        let settings = settings(config)?;
        let refused = "the kernel refuses the program that asks";
        let mut ebpf = Ebpf::load(OBJECT).map_err(LabError::io_other(refused))?;
        bpf::xdp(&mut ebpf, "asker")?.load().map_err(LabError::io_other(refused))?;
        bpf::array::<Settings>(&mut ebpf, "settings")?
            .set(0, settings, 0)
            .map_err(LabError::io_other("cannot set what to ask"))?;
        let mut connections = bpf::array::<Connection>(&mut ebpf, "connections")?;
        for number in 0..config.connections {
            // RFC 9293, section 3.4.1: nobody knows it before.
            let first = fastrand::u32(..);
            let connecting = u64::from(CONNECTING) | u64::from(first.wrapping_add(1)) << 32;
            connections
                .set(number.into(), [connecting, 0, 0, 0, 0], 0)
                .map_err(LabError::io_other("cannot set up a connection"))?;
        }
        let latencies = bpf::array(&mut ebpf, "latencies")?;
        // It ends with `ebpf`.
        bpf::xdp(&mut ebpf, "asker")?
            .attach_to_if_index(index, XdpMode::Driver)
            .map_err(LabError::io_other("the load's device takes no program"))?;
        let failed = LabError::io("cannot poll the load's device (needs Linux 6.13)");
        let poller = NapiPoller::of(index).map_err(failed)?;
        let socket = sys::arp_socket(index).map_err(LabError::io("cannot send frames"))?;
        let mut asker = Self {
            config,
            source_mac,
            connections,
            latencies,
            socket,
            poller,
            seen: Vec::new(),
            _program: ebpf,
        };
        asker.seen = asker.look()?;
        Ok(asker)
    }

    /// Reads all connections.
    fn look(&self) -> Result<Vec<Seen>, LabError> {
        (0..self.config.connections)
            .map(|number| self.connections.get(&number.into(), 0).map(Seen::from))
            .collect::<Result<_, _>>()
            .map_err(LabError::io_other("cannot read the connections"))
    }

    fn buckets(&self) -> Result<Vec<u64>, LabError> {
        (0..BUCKETS)
            .map(|bucket| self.latencies.get(&bucket, 0))
            .collect::<Result<_, _>>()
            .map_err(LabError::io_other("cannot read the latencies"))
    }

    /// Runs the device until then, and asks again where nothing happens.
    fn until(&mut self, until: Instant) -> Result<(), LabError> {
        let mut next_look = Instant::now() + LOOK_EVERY;
        loop {
            let now = Instant::now();
            if now >= until {
                return Ok(());
            }
            if now >= next_look {
                self.urge()?;
                next_look = now + LOOK_EVERY;
            }
            self.poller.poll_long().map_err(LabError::io("cannot poll the load's device"))?;
        }
    }

    /// Establishes all connections and asks the first question of each.
    fn open(&mut self) -> Result<(), LabError> {
        let began = Instant::now();
        self.urge()?;
        while self.seen.iter().any(|seen| seen.state == CONNECTING) {
            if began.elapsed() > CONNECT_LIMIT {
                let what = format!("{} does not let all connections in", self.config.target.0);
                return Err(LabError::Config(what));
            }
            self.until(Instant::now() + LOOK_EVERY / 10)?;
            let before = std::mem::take(&mut self.seen);
            self.seen = self.look()?;
            for (number, before) in before.iter().enumerate() {
                if before.state == CONNECTING && self.seen[number].state == ASKING {
                    self.send_last(number)?;
                }
            }
        }
        Ok(())
    }

    /// Sends again what was sent last on connections where nothing has happened.
    fn urge(&mut self) -> Result<(), LabError> {
        let before = std::mem::take(&mut self.seen);
        self.seen = self.look()?;
        let quiet = |number: &usize| self.seen[*number] == before[*number];
        (0..before.len()).filter(quiet).try_for_each(|number| self.send_last(number))
    }

    /// Sends what a connection waits for an answer to.
    fn send_last(&self, number: usize) -> Result<(), LabError> {
        let Seen { state, sent, .. } = self.seen[number];
        match state {
            CONNECTING => self.send(number, sent.wrapping_sub(1), TcpFlags::SYN),
            ASKING => {
                let bytes = self.config.question.request.len() as u32;
                self.send(number, sent.wrapping_sub(bytes), TcpFlags::PSH | TcpFlags::ACK)
            }
            _ => Ok(()),
        }
    }

    /// Sends a segment, with the question if flags say PSH.
    fn send(&self, number: usize, sequence: u32, flags: TcpFlags) -> Result<(), LabError> {
        let AskerConfig { target: (target, target_mac), source, question, .. } = self.config;
        let source = SocketAddrV4::new(*source.ip(), source.port() + number as u16);
        let asks = flags.contains(TcpFlags::PSH);
        let segment = Segment {
            source: (MacAddr(self.source_mac), source),
            target: (MacAddr(*target_mac), *target),
            sequence,
            // 0 before it is connected.
            acknowledgement: self.seen[number].received,
            flags,
            payload: if asks { &question.request } else { &[] },
        };
        let frame = segment.frame();
        let frame = frame.ok_or_else(|| LabError::Config("a question is too long".into()))?;
        rustix::io::write(&self.socket, &frame).map(drop).map_err(LabError::io("cannot send"))
    }

    fn run(&mut self) -> Result<TcpLoadReport, LabError> {
        let seconds = Duration::from_secs_f64;
        self.until(Instant::now() + seconds(self.config.warm_up_seconds))?;
        let (before, began) = (self.buckets()?, Instant::now());
        self.until(began + seconds(self.config.seconds))?;
        let seconds = began.elapsed().as_secs_f64();
        let mut latencies = Latencies::default();
        for (bucket, (after, before)) in (0..).zip(self.buckets()?.iter().zip(&before)) {
            latencies.record_many(latency_ns(bucket), after - before);
        }
        self.seen = self.look()?;
        let requests = latencies.count();
        let rate = requests as f64 / seconds;
        let Question { request, answer } = &self.config.question;
        let open = self.seen.iter().filter(|seen| seen.state == ASKING).count();
        Ok(TcpLoadReport {
            link: "a program on the device".to_owned(),
            connections: open,
            seconds,
            requests,
            requests_per_second: rate,
            sent_bytes_per_second: rate * request.len() as f64,
            received_bytes_per_second: rate * answer.len() as f64,
            latency: latencies.summary(),
            broken: (self.seen.len() - open) as u64,
            wrong_answers: self.seen.iter().map(|seen| seen.wrong).sum(),
            ..TcpLoadReport::default()
        })
    }
}

impl Drop for Asker<'_> {
    /// Ends what is open, so that the server has it no more.
    fn drop(&mut self) {
        self.seen = self.look().unwrap_or_default();
        for (number, seen) in self.seen.iter().enumerate() {
            // The server's device may be gone.
            let _ = self.send(number, seen.sent, TcpFlags::RST);
        }
    }
}

fn settings(config: &AskerConfig) -> Result<Settings, LabError> {
    let Question { request, answer } = &config.question;
    let wrong = |what: &str| Err(LabError::Config(what.to_owned()));
    if !(1..=MAX_BYTES.min(answer.len())).contains(&request.len()) {
        return wrong("a question has 1 to 128 bytes and is no longer than its answer");
    }
    if !(1..=MAX_CONNECTIONS).contains(&config.connections)
        || config.source.port().checked_add(config.connections).is_none()
    {
        return wrong("1 to 1024 connections can ask, from ports up to 65534");
    }
    let compared = match answer {
        Answer::Exactly(bytes) if bytes.len() <= MAX_BYTES => Some(&bytes[..]),
        _ => None,
    };
    let numbers = [
        config.source.port().into(),
        config.connections.into(),
        request.len() as u32,
        answer.len() as u32,
        // In words of this machine, as the program sums.
        u16::from_ne_bytes(fold(sum(request)).to_be_bytes()).into(),
        compared.is_some().into(),
    ];
    let mut settings = [0; size_of::<Settings>()];
    let (head, texts) = settings.split_at_mut(size_of_val(&numbers));
    for (place, number) in head.chunks_exact_mut(4).zip(numbers) {
        place.copy_from_slice(&number.to_ne_bytes());
    }
    texts[..request.len()].copy_from_slice(request);
    let compared = compared.unwrap_or_default();
    texts[MAX_BYTES..][..compared.len()].copy_from_slice(compared);
    Ok(settings)
}

/// The middle of what a bucket holds.
fn latency_ns(bucket: u32) -> u64 {
    match (bucket / PARTS).checked_sub(1) {
        None | Some(0) => bucket.into(),
        Some(octave) => {
            let lead = u64::from(bucket % PARTS + PARTS);
            (lead << octave) + (1 << (octave - 1))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `note_latency` of the program.
    fn bucket_of(mut ns: u64) -> u32 {
        let mut octave = 0;
        for shift in [32, 16, 8, 4, 2, 1] {
            if ns >> shift >= u64::from(PARTS) {
                ns >>= shift;
                octave += shift;
            }
        }
        octave * PARTS + ns as u32
    }

    #[test]
    fn a_bucket_s_latency_is_near_what_is_in_it() {
        let mut last = 0;
        for ns in (0..4096).chain([65_535, 1_000_000, 123_456_789, u64::MAX]) {
            let bucket = bucket_of(ns);
            assert!(bucket == last || bucket > last && bucket < BUCKETS, "{ns}");
            last = bucket;
            let error = latency_ns(bucket).abs_diff(ns);
            assert!(error <= ns / u64::from(PARTS), "{ns}: {}", latency_ns(bucket));
        }
    }
}
