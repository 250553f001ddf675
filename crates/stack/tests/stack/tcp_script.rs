//! Runs packet scripts: files in `tests/scripts/tcp` with one packet or call per line.
//! Each script runs on a virtual clock, once for IPv4 and once for IPv6.
//!
//! ```text
//! # a comment
//! TIME  ACTION
//! ```
//!
//! `TIME` is in milliseconds from the start, or `+N` after the line before. A line that
//! begins with `set` has no time and changes the setup:
//!
//! ```text
//! set family v4                run for this family only
//! set mtu 68                   MTU of the link; below 1280 only IPv4
//! set option no-delay          also: cork, no-cork, ecn, receive-buffer N, send-buffer N,
//!                              keepalive IDLE INTERVAL PROBES (ms),
//!                              user-timeout MS, fin-wait-2 MS, newreno,
//!                              defer-accept S
//! set limit half-open 1        also: backlog N, resets N, memory BYTES
//! set peer-isn 4294967000      the peer's initial sequence number
//! set port 4001                the peer's port from here on; a port that was set before
//!                              continues its connection
//! set salt 1                   the peer sends different data from here on
//! ```
//!
//! Actions:
//!
//! ```text
//! < FLAGS SEQ[..END] [ack N] [win N] [ce] [urg N] [<OPTIONS>]   the peer sends
//! << FLAGS ...                               the same; in one burst with the next packet
//! > FLAGS SEQ[..END] [ack N] [win N] [ect] [<OPTIONS>]          the stack has sent
//! < icmp too-big MTU SEQ | < icmp port SEQ | < icmp host SEQ | < icmp prohibited SEQ
//!                                            quoting the stack's SEQ
//! listen [error KIND] | accept [wait] | connect | close | abort | close-listener
//! shutdown read|write|both
//! send N [= M]     writes N bytes; M were accepted, if not all
//! recv N [= M]     reads up to N bytes and gets M
//! recv end | recv wait | recv error KIND
//! send error KIND | error KIND
//! state NAME | gone            of the connection
//! drops REASON                 the last packet was dropped for this reason
//! quiet                        nothing was sent up to now
//!
//! Flags are letters of `SFRPAUEC`, `-` for none. Sequence numbers are relative to each
//! side's initial one. Options, separated by commas: `mss N`, `scale N`, `sack-ok`,
//! `ts VALUE ECHO`, `sack A..B`, `raw HEX`; `<>` stands for no options. Fields that an
//! expected packet does not mention are not compared, nor is an unmentioned push flag.
//! In expected time stamps `*` matches any value. Every packet the stack sends must be
//! expected, and must come within two milliseconds of its time.

use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{
    Config, CongestionControl, Keepalive, Shutdown, TcpError, TcpId, TcpListenerId, TcpOptions,
    TcpState,
};
use tidegate_wire::tcp::{TcpFlags, TcpOption};
use tidegate_wire::{DropCounters, DropReason, Ipv4Header, Ipv6Header, Protocol, TcpHeader, tcp};

use crate::kit::packets::{
    frame, host_prohibited, host_unreachable, ip_with_class, packet_too_big, port_unreachable,
    transport_pseudo,
};
use crate::kit::{Family, TestHost, config, mac};
use crate::migration::{UNKNOWN_ID, migrate_all, new_id};
use crate::upgrade::upgrade;

const MS: u64 = 1_000_000;
/// TCP timers fire on ticks of one millisecond.
const TOLERANCE_NS: u64 = 2_200_000;
const OUR_PORT: u16 = 80;
const PEER_PORT: u16 = 4000;

/// Replacement of the stack while a script runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackReplacement {
    Never,
    /// Upgrade after each line that leaves no data in flight.
    UpgradeAtRest,
    /// Upgrade after each line.
    UpgradeAlways,
    /// Migration of all sockets to another stack after each line.
    MigrateSockets,
}

/// A segment in the terms of a script: numbers are relative.
#[derive(Clone)]
struct Packet {
    flags: TcpFlags,
    seq: u32,
    ack: u32,
    window: u16,
    ecn: u8,
    urgent: u16,
    options: Vec<Opt>,
    payload: Vec<u8>,
}

impl std::fmt::Debug for Packet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { flags, seq, ack, window, ecn, urgent, options, payload } = self;
        let end = seq.wrapping_add(payload.len() as u32);
        write!(
            f,
            "{flags:?} {seq}..{end} ack {ack} win {window} ecn {ecn} urg {urgent} {options:?}"
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Opt {
    /// Option bytes as written in the script, valid or not.
    Raw(Vec<u8>),
    Mss(u16),
    Scale(u8),
    SackOk,
    Ts(u32, u32),
    Sack(Vec<(u32, u32)>),
}

pub struct Script {
    name: String,
    line: String,
    family: Family,
    host: TestHost,
    start_ns: u64,
    options: TcpOptions,
    backlog: usize,
    peer_port: u16,
    peer_isn: u32,
    /// Value XORed into every byte of the peer's data.
    salt: u8,
    /// The stack's initial sequence number and first time stamp, once seen.
    our_isn: Option<u32>,
    our_ts: Option<u32>,
    /// Both of the connections from other ports.
    other_ports: HashMap<u16, (Option<u32>, Option<u32>)>,
    sent: VecDeque<(u64, Packet)>,
    /// Frames of the peer that the stack receives together with its next one.
    burst: Vec<Vec<u8>>,
    listener: Option<TcpListenerId>,
    connection: Option<TcpId>,
    written: u32,
    read: u32,
    last_drops: DropCounters,
    /// Drops counted by stacks that the sockets have migrated away from.
    drops_before: DropCounters,
}

/// The byte at an offset of a stream.
fn pattern(at: u32) -> u8 {
    (at % 251) as u8
}

fn pattern_bytes(at: u32, len: u32) -> Vec<u8> {
    (0..len).map(|n| pattern(at.wrapping_add(n))).collect()
}

impl Script {
    /// Runs a script. Panics with the script, the line and the problem.
    pub fn run(name: &str, text: &str, family: Family, replacement: StackReplacement) {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
        let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
        if lines.iter().any(|line| {
            line.strip_prefix("set family ")
                .is_some_and(|only| only != format!("{family:?}").to_lowercase())
        }) {
            return;
        }
        let mut limits = config(1).limits;
        for line in &lines {
            let words: Vec<_> = line.split_whitespace().collect();
            let number = |at: usize| words[at].parse::<usize>().unwrap();
            match words[..] {
                ["set", "limit", "half-open", _] => limits.tcp_half_open = number(3),
                ["set", "limit", "resets", _] => limits.tcp_resets_pps = number(3) as u32,
                ["set", "limit", "memory", _] => limits.tcp_buffer_bytes = number(3),
                _ => {}
            }
        }
        let mut config = config(1).limits(limits);
        for line in &lines {
            if let Some(mtu) = line.strip_prefix("set mtu ") {
                config.mtu = mtu.parse().expect(line);
                config.addresses.retain(|address| address.address().is_ipv4());
            }
        }
        let mut host = TestHost::quiet(config.clone());
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let start_ns = host.now_ns;
        let last_drops = host.stack.counters().drops.clone();
        let mut script = Script {
            name: name.to_owned(),
            line: String::new(),
            family,
            host,
            start_ns,
            options: TcpOptions::default(),
            backlog: 16,
            peer_port: PEER_PORT,
            peer_isn: 1_000_000,
            salt: 0,
            our_isn: None,
            other_ports: HashMap::new(),
            our_ts: None,
            sent: VecDeque::new(),
            burst: Vec::new(),
            listener: None,
            connection: None,
            written: 0,
            read: 0,
            last_drops,
            drops_before: DropCounters::new(),
        };
        let mut now_ms = 0.0;
        for line in lines {
            script.line = line.to_owned();
            let words: Vec<_> = line.split_whitespace().collect();
            if words[0] == "set" {
                script.set(&words[1..]);
                continue;
            }
            now_ms = match words[0].strip_prefix('+') {
                Some(more) => now_ms + more.parse::<f64>().expect(line),
                None => words[0].parse::<f64>().expect(line),
            };
            script.advance_to(now_ms);
            script.step(&words[1..]);
            match replacement {
                StackReplacement::UpgradeAtRest if script.is_at_rest() => {
                    upgrade(&mut script.host, config.clone());
                }
                StackReplacement::UpgradeAlways => upgrade(&mut script.host, config.clone()),
                StackReplacement::MigrateSockets => script.migrate(config.clone()),
                StackReplacement::UpgradeAtRest | StackReplacement::Never => continue,
            }
            script.collect();
        }
        script.line = "the end".to_owned();
        script.expect_silence();
        script.host.finish();
    }

    #[track_caller]
    fn fail(&self, problem: &str) -> ! {
        panic!(
            "{}: {}: {problem}; sent but not expected yet: {:?}",
            self.name, self.line, self.sent
        );
    }

    /// Migrates all sockets to another stack.
    fn migrate(&mut self, config: Config) {
        self.drops_before = self.drops();
        let moved = migrate_all(&mut self.host, config, &[]);
        let new_connection = |old| new_id(&moved.connections, old).unwrap_or(UNKNOWN_ID);
        self.connection = self.connection.map(new_connection);
        self.listener = self.listener.and_then(|old| new_id(&moved.listeners, old));
    }

    /// True while the stack has no unacknowledged data and no handshake in progress.
    fn is_at_rest(&self) -> bool {
        match self.connection.and_then(|id| self.host.stack.tcp_info(id)) {
            Some(info) => {
                info.unacknowledged_bytes == 0
                    && !matches!(info.state, TcpState::SynSent | TcpState::SynReceived)
            }
            None => self.host.stack.tcp_connections() == 0,
        }
    }

    fn expect_silence(&mut self) {
        if let Some((at_ns, packet)) = self.sent.front() {
            let ms = (at_ns - self.start_ns) / MS;
            self.fail(&format!("no packet was expected, but at {ms} ms the stack sent {packet:?}"));
        }
    }

    /// Advances the clock to a line's time.
    fn advance_to(&mut self, ms: f64) {
        self.run_until(self.start_ns + (ms * MS as f64) as u64);
    }

    fn run_until(&mut self, end_ns: u64) {
        loop {
            self.collect();
            self.collect();
            let due = self.host.stack.next_timeout().filter(|&due_ns| due_ns <= end_ns);
            let Some(due_ns) = due else { break };
            self.host.now_ns = self.host.now_ns.max(due_ns);
            self.host.stack.handle_timeout(self.host.now_ns, &mut self.host.arena);
        }
        self.host.now_ns = self.host.now_ns.max(end_ns);
    }

    fn collect(&mut self) {
        for bytes in self.host.sent() {
            match self.parse(&bytes) {
                Some(packet) => self.sent.push_back((self.host.now_ns, packet)),
                // A neighbour solicitation or ARP request for the peer.
                None => self.introduce_peer(),
            }
        }
    }

    fn introduce_peer(&mut self) {
        let TestHost { stack, arena, now_ns } = &mut self.host;
        stack.set_neighbour(*now_ns, self.family.host(2), Some(mac(2)), arena);
    }

    /// Parses a transmitted segment and makes its numbers relative.
    fn parse(&mut self, bytes: &[u8]) -> Option<Packet> {
        let (segment, ecn, destination) = match self.family {
            Family::V4 => {
                let (header, payload) = Ipv4Header::parse(&bytes[14..]).ok()?;
                if header.protocol != Protocol::TCP {
                    return None;
                }
                tcp::verify_v4(header.source, header.destination, payload)
                    .expect("a valid checksum");
                (payload, header.dscp_ecn & 3, IpAddr::from(header.destination))
            }
            Family::V6 => {
                let (header, payload) = Ipv6Header::parse(&bytes[14..]).ok()?;
                if header.next_header != Protocol::TCP {
                    return None;
                }
                tcp::verify_v6(header.source, header.destination, payload)
                    .expect("a valid checksum");
                (payload, header.traffic_class & 3, IpAddr::from(header.destination))
            }
        };
        assert_eq!(destination, self.family.host(2));
        let (header, payload) = TcpHeader::parse(segment).unwrap();
        assert_eq!((header.source_port, header.destination_port), (OUR_PORT, self.peer_port));
        if header.flags.contains(TcpFlags::SYN) && self.our_isn.is_none() {
            self.our_isn = Some(header.sequence);
        }
        let (ours, peers) = (self.our_isn.unwrap_or(0), self.peer_isn);
        let mut options = Vec::new();
        for option in header.options(segment) {
            options.push(match option.unwrap() {
                TcpOption::MaximumSegmentSize(size) => Opt::Mss(size),
                TcpOption::WindowScale(shift) => Opt::Scale(shift),
                TcpOption::SackPermitted => Opt::SackOk,
                TcpOption::Timestamps { value, echo } => {
                    let base = *self.our_ts.get_or_insert(value);
                    Opt::Ts(value.wrapping_sub(base), echo)
                }
                TcpOption::Sack(blocks) => {
                    let relative = |edge: u32| edge.wrapping_sub(peers);
                    Opt::Sack(blocks.map(|(a, b)| (relative(a), relative(b))).collect())
                }
                other => panic!("the stack sent the unexpected option {other:?}"),
            });
        }
        let has_ack = header.flags.contains(TcpFlags::ACK);
        Some(Packet {
            flags: header.flags,
            seq: header.sequence.wrapping_sub(ours),
            ack: if has_ack { header.acknowledgement.wrapping_sub(peers) } else { 0 },
            window: header.window,
            ecn,
            urgent: header.urgent_pointer,
            options,
            payload: payload.to_vec(),
        })
    }

    fn set(&mut self, words: &[&str]) {
        match words {
            ["option", "no-delay"] => self.options.no_delay = true,
            ["option", "cork"] => self.options.cork = true,
            ["option", "no-cork"] => self.options.cork = false,
            ["option", "ecn"] => self.options.ecn = true,
            ["option", "newreno"] => {
                self.options.congestion_control = CongestionControl::NewReno;
            }
            ["option", "receive-buffer", n] => {
                self.options = self.options.receive_buffer_bytes(n.parse().unwrap());
            }
            ["option", "send-buffer", n] => {
                self.options = self.options.send_buffer_bytes(n.parse().unwrap());
            }
            ["option", "user-timeout", n] => {
                self.options.user_timeout_ms = Some(n.parse().unwrap());
            }
            ["option", "fin-wait-2", n] => {
                self.options.fin_wait_2_ms = Some(n.parse().unwrap());
            }
            ["option", "defer-accept", n] => {
                self.options.defer_accept_s = Some(n.parse().unwrap());
            }
            ["option", "keepalive", idle, interval, probes] => {
                self.options.keepalive = Some(
                    Keepalive::default()
                        .idle_ms(idle.parse().unwrap())
                        .interval_ms(interval.parse().unwrap())
                        .probes(probes.parse().unwrap()),
                );
            }
            ["salt", n] => self.salt = n.parse().unwrap(),
            ["limit", "backlog", n] => self.backlog = n.parse().unwrap(),
            ["limit" | "family" | "mtu", ..] => {}
            ["peer-isn", n] => {
                self.peer_isn = n.parse().unwrap();
                (self.our_isn, self.our_ts) = (None, None);
            }
            ["port", n] => {
                let port = n.parse().unwrap();
                let left = std::mem::replace(&mut self.peer_port, port);
                // Returns to the connection of another port, or begins one.
                let known = self.other_ports.remove(&port).unwrap_or_default();
                if port != left {
                    self.other_ports.insert(left, (self.our_isn, self.our_ts));
                }
                (self.our_isn, self.our_ts) = known;
            }
            _ => self.fail("unknown setting"),
        }
    }

    fn peer(&self) -> SocketAddr {
        SocketAddr::new(self.family.host(2), self.peer_port)
    }

    fn us(&self) -> SocketAddr {
        SocketAddr::new(self.family.host(1), OUR_PORT)
    }

    fn step(&mut self, words: &[&str]) {
        if words[0] == ">" {
            return self.expect_packet(&words[1..]);
        }
        if words[0] == "quiet" {
            return self.expect_silence();
        }
        if !matches!(words[0], "state" | "gone" | "drops") {
            self.expect_silence();
        }
        if words[0] != "drops" {
            self.last_drops = self.drops();
        }
        match words {
            ["<", "icmp", rest @ ..] => self.inject_icmp(rest),
            ["<" | "<<", rest @ ..] => {
                let packet = frame(&self.peer_packet(rest));
                match (words[0], self.burst.is_empty()) {
                    ("<", true) => self.host.feed(&packet),
                    ("<", false) => self.host.feed_burst(self.burst.drain(..).chain([packet])),
                    _ => self.burst.push(packet),
                }
            }
            ["drops", reason] => self.expect_drop(reason),
            _ => self.call(words),
        }
        assert_eq!(self.host.stack.counters().balance(), 0);
        self.collect();
    }

    fn expect_drop(&mut self, reason: &str) {
        let reason =
            DropReason::from_name(reason).unwrap_or_else(|| self.fail("unknown drop reason"));
        let drops = self.drops();
        if drops.get(reason) != self.last_drops.get(reason) + 1 {
            self.fail(&format!(
                "the drop counters are {drops:?}, before the last packet {:?}",
                self.last_drops
            ));
        }
    }

    /// Drops counted so far, including those of earlier stacks.
    fn drops(&self) -> DropCounters {
        let mut drops = self.drops_before.clone();
        drops.merge(&self.host.stack.counters().drops);
        drops
    }

    fn connection(&self) -> TcpId {
        self.connection.unwrap_or_else(|| self.fail("there is no connection"))
    }

    fn call(&mut self, words: &[&str]) {
        let (now_ns, options, us, peer) = (self.host.now_ns, self.options, self.us(), self.peer());
        let TestHost { stack, arena, .. } = &mut self.host;
        match words {
            ["listen"] => {
                self.listener = Some(stack.tcp_listen(us, self.backlog, options).unwrap());
            }
            ["listen", "error", kind] => {
                let error = stack.tcp_listen(us, self.backlog, options).err();
                self.expect_error(error, kind);
            }
            ["close-listener"] => {
                stack.tcp_close_listener(now_ns, arena, self.listener.take().unwrap());
            }
            ["accept", rest @ ..] => {
                let accepted = stack.tcp_accept(self.listener.unwrap());
                match (accepted, rest) {
                    (Ok(id), []) => {
                        self.connection = Some(id);
                        (self.written, self.read) = (0, 0);
                    }
                    (Err(TcpError::WouldBlock), ["wait"]) => {}
                    (other, _) => self.fail(&format!("{other:?}")),
                }
            }
            ["connect"] => {
                let id = stack.tcp_connect(now_ns, arena, Some(us), peer, options).unwrap();
                self.connection = Some(id);
                (self.written, self.read) = (0, 0);
            }
            ["close"] => {
                let id = self.connection();
                self.host.stack.tcp_close(now_ns, &mut self.host.arena, id);
            }
            ["abort"] => {
                let id = self.connection();
                self.host.stack.tcp_abort(now_ns, &mut self.host.arena, id);
            }
            ["shutdown", how] => {
                let how = match *how {
                    "read" => Shutdown::Read,
                    "write" => Shutdown::Write,
                    _ => Shutdown::Both,
                };
                let id = self.connection();
                self.host.stack.tcp_shutdown(now_ns, &mut self.host.arena, id, how).unwrap();
            }
            ["option", rest @ ..] => {
                let words: Vec<_> = ["option"].into_iter().chain(rest.iter().copied()).collect();
                self.set(&words);
                let (id, options) = (self.connection(), self.options);
                let TestHost { stack, arena, .. } = &mut self.host;
                stack.tcp_set_options(now_ns, arena, id, options).unwrap();
            }
            ["send", rest @ ..] => self.send(rest),
            ["recv", rest @ ..] => self.recv(rest),
            ["error", kind] => {
                let id = self.connection();
                let error = self.host.stack.tcp_take_error(id);
                self.expect_error(error, kind);
            }
            ["state", name] => {
                let state = self.host.stack.tcp_state(self.connection());
                let actual = state.map(|state| format!("{state:?}"));
                if actual.as_deref() != Some(*name) {
                    self.fail(&format!("the state is {actual:?}"));
                }
            }
            ["gone"] => {
                let count = self.host.stack.tcp_connections();
                if count != 0 {
                    self.fail(&format!("{count} connections still exist"));
                }
            }
            _ => self.fail("unknown action"),
        }
    }

    fn expect_error(&self, error: Option<TcpError>, kind: &str) {
        let found = error.map(|error| error.kind());
        let fits = match kind {
            "none" => found.is_none(),
            "reset" => found == Some(ErrorKind::ConnectionReset),
            "refused" => found == Some(ErrorKind::ConnectionRefused),
            "timed-out" => found == Some(ErrorKind::TimedOut),
            "host-unreachable" => found == Some(ErrorKind::HostUnreachable),
            "broken-pipe" => found == Some(ErrorKind::BrokenPipe),
            "not-connected" => found == Some(ErrorKind::NotConnected),
            "in-use" => found == Some(ErrorKind::AddrInUse),
            "wait" => found == Some(ErrorKind::WouldBlock),
            _ => self.fail("unknown kind of error"),
        };
        if !fits {
            self.fail(&format!("the error is {error:?}"));
        }
    }

    fn send(&mut self, words: &[&str]) {
        let id = self.connection();
        let (now_ns, written) = (self.host.now_ns, self.written);
        let TestHost { stack, arena, .. } = &mut self.host;
        match words {
            ["error", kind] => {
                let error = stack.tcp_send(now_ns, arena, id, b"x").err();
                self.expect_error(error, kind);
            }
            [count, rest @ ..] => {
                let count: u32 = count.parse().unwrap();
                let taken: u32 = match rest {
                    ["=", taken] => taken.parse().unwrap(),
                    _ => count,
                };
                let data = pattern_bytes(written, count);
                match stack.tcp_send(now_ns, arena, id, &data) {
                    Ok(len) if len == taken as usize => self.written += taken,
                    other => self.fail(&format!("send returned {other:?}")),
                }
            }
            [] => self.fail("send needs a number of bytes"),
        }
    }

    fn recv(&mut self, words: &[&str]) {
        let id = self.connection();
        let now_ns = self.host.now_ns;
        let count = words[0].parse().unwrap_or(1);
        let mut buf = vec![0; count];
        let TestHost { stack, arena, .. } = &mut self.host;
        let result = stack.tcp_recv(now_ns, arena, id, &mut buf);
        match (words, result) {
            (["end"], Ok(0)) | (["wait"], Err(TcpError::WouldBlock)) => {}
            (["error", kind], Err(error)) => self.expect_error(Some(error), kind),
            ([_, rest @ ..], Ok(len)) if words[0] != "end" => {
                let expected = match rest {
                    ["=", expected] => expected.parse().unwrap(),
                    _ => count,
                };
                if len != expected || buf[..len] != pattern_bytes(self.read, len as u32) {
                    self.fail(&format!("received {len} bytes: {:?}", &buf[..len.min(20)]));
                }
                self.read += len as u32;
            }
            (_, other) => self.fail(&format!("recv returned {other:?}")),
        }
    }

    /// Parses a packet: its fields, the optional fields mentioned, and its data length.
    fn packet(&self, words: &[&str]) -> (Packet, Vec<&'static str>, u32) {
        let text = words.join(" ");
        let (text, options) = match text.split_once('<') {
            Some((front, options)) => {
                (front.to_owned(), Some(options.trim_end_matches('>').to_owned()))
            }
            None => (text, None),
        };
        let mut mentioned = Vec::new();
        let mut words = text.split_whitespace();
        let mut flags = 0;
        for letter in words.next().unwrap_or_else(|| self.fail("the packet has no flags")).chars() {
            match "FSRPAUEC".find(letter) {
                Some(bit) => flags |= 1 << bit,
                None if letter == '-' => {}
                None => self.fail("unknown flag"),
            }
        }
        let range = words.next().unwrap_or_else(|| self.fail("the packet has no sequence number"));
        let (seq, end): (u32, u32) = match range.split_once("..") {
            Some((start, end)) => (start.parse().unwrap(), end.parse().unwrap()),
            None => (range.parse().unwrap(), range.parse().unwrap()),
        };
        let mut packet = Packet {
            flags: TcpFlags(flags),
            seq,
            ack: 0,
            window: 65_535,
            ecn: 0,
            urgent: 0,
            options: Vec::new(),
            payload: Vec::new(),
        };
        while let Some(word) = words.next() {
            let mut number = || words.next().and_then(|n| n.parse::<u32>().ok()).unwrap();
            match word {
                "ack" => packet.ack = number(),
                "win" => {
                    packet.window = number() as u16;
                    mentioned.push("win");
                }
                "urg" => packet.urgent = number() as u16,
                "ce" => packet.ecn = 3,
                "ect" => packet.ecn = 2,
                _ => self.fail("unknown packet field"),
            }
        }
        if let Some(options) = options {
            mentioned.push("options");
            for option in options.split(',').filter(|option| !option.trim().is_empty()) {
                packet.options.push(self.option(option));
            }
        }
        (packet, mentioned, end.wrapping_sub(seq))
    }

    fn option(&self, text: &str) -> Opt {
        let words: Vec<_> = text.split_whitespace().collect();
        let number = |text: &str| match text {
            "*" => u32::MAX,
            text => text.parse().unwrap_or_else(|_| self.fail("an option value is no number")),
        };
        match words[..] {
            ["raw", hex] => {
                let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
                Opt::Raw((0..hex.len()).step_by(2).map(byte).collect())
            }
            ["mss", n] => Opt::Mss(number(n) as u16),
            ["scale", n] => Opt::Scale(number(n) as u8),
            ["sack-ok"] => Opt::SackOk,
            ["ts", value, echo] => Opt::Ts(number(value), number(echo)),
            ["sack", ref blocks @ ..] => {
                let block = |block: &&str| {
                    let (start, end) = block.split_once("..").unwrap();
                    (number(start), number(end))
                };
                Opt::Sack(blocks.iter().map(block).collect())
            }
            _ => self.fail("unknown option"),
        }
    }

    fn expect_packet(&mut self, words: &[&str]) {
        if self.sent.is_empty() {
            self.run_until(self.host.now_ns + TOLERANCE_NS);
        }
        let (expected, mentioned, len) = self.packet(words);
        let Some((at_ns, sent)) = self.sent.pop_front() else { self.fail("nothing was sent") };
        let now_ns = self.host.now_ns;
        if at_ns + TOLERANCE_NS < now_ns {
            self.fail(&format!("sent {} ms too early: {sent:?}", (now_ns - at_ns) / MS));
        }
        let push = TcpFlags::PSH.0;
        let ignored = if expected.flags.contains(TcpFlags::PSH) { 0 } else { push };
        let same = sent.flags.0 & !ignored == expected.flags.0
            && sent.seq == expected.seq
            && sent.ack == expected.ack
            && sent.payload.len() == len as usize
            && (!mentioned.contains(&"win") || sent.window == expected.window)
            && sent.ecn == expected.ecn
            && (!mentioned.contains(&"options")
                || self.options_fit(&sent.options, &expected.options));
        if !same {
            self.fail(&format!("the stack sent {sent:?}, expected {expected:?} with {len} bytes"));
        }
        if sent.payload != pattern_bytes(sent.seq.wrapping_sub(1), len) {
            self.fail("the payload differs from the pattern");
        }
    }

    fn options_fit(&self, sent: &[Opt], expected: &[Opt]) -> bool {
        expected.is_empty() == sent.is_empty()
            && expected.iter().all(|wanted| {
                sent.iter().any(|option| match (option, wanted) {
                    (Opt::Ts(value, echo), Opt::Ts(wanted_value, wanted_echo)) => {
                        (*wanted_value == u32::MAX || value.abs_diff(*wanted_value) <= 2)
                            && (*wanted_echo == u32::MAX || echo == wanted_echo)
                    }
                    // The MSS that the link allows is not under test.
                    (Opt::Mss(_), Opt::Mss(u16::MAX)) => true,
                    _ => option == wanted,
                })
            })
    }

    /// Builds a packet of the peer.
    fn peer_packet(&self, words: &[&str]) -> Vec<u8> {
        let (packet, _, len) = self.packet(words);
        let ours = self.our_isn.unwrap_or(0);
        let mut options = Vec::new();
        for option in &packet.options {
            let mut bytes = [1; 40];
            let blocks: Vec<u8>;
            let option = match option {
                Opt::Raw(raw) => {
                    options.extend(raw);
                    continue;
                }
                Opt::Mss(size) => TcpOption::MaximumSegmentSize(*size),
                Opt::Scale(shift) => TcpOption::WindowScale(*shift),
                Opt::SackOk => TcpOption::SackPermitted,
                Opt::Ts(value, echo) => TcpOption::Timestamps {
                    value: *value,
                    echo: echo.wrapping_add(self.our_ts.unwrap_or(0)),
                },
                Opt::Sack(list) => {
                    let edges = list.iter().flat_map(|&(a, b)| [a, b]);
                    blocks = edges.flat_map(|edge| edge.wrapping_add(ours).to_be_bytes()).collect();
                    TcpOption::Sack(tcp::SackBlocks::parse(&blocks).unwrap())
                }
            };
            let rest = option.emit(&mut bytes).unwrap().len();
            options.extend(&bytes[..40 - rest]);
        }
        options.resize(options.len().next_multiple_of(4), 1);
        let header_bytes = 20 + options.len();
        let header = TcpHeader {
            source_port: self.peer_port,
            destination_port: OUR_PORT,
            sequence: self.peer_isn.wrapping_add(packet.seq),
            acknowledgement: match packet.flags.contains(TcpFlags::ACK) {
                true => ours.wrapping_add(packet.ack),
                false => 0,
            },
            header_bytes: header_bytes as u8,
            flags: packet.flags,
            window: packet.window,
            checksum: 0,
            urgent_pointer: packet.urgent,
        };
        let syn = u32::from(packet.flags.contains(TcpFlags::SYN));
        let mut data = pattern_bytes(packet.seq.wrapping_sub(1).wrapping_add(syn), len);
        data.iter_mut().for_each(|byte| *byte ^= self.salt);
        let mut segment = vec![0; header_bytes];
        segment[20..].copy_from_slice(&options);
        assert!(header.emit(&mut segment).is_some());
        segment.extend(data);
        let (from, to) = (self.family.host(2), self.family.host(1));
        tcp::fill_checksum(transport_pseudo(Protocol::TCP, from, to, segment.len()), &mut segment);
        ip_with_class(from, to, Protocol::TCP, packet.ecn, &segment)
    }

    /// Feeds an ICMP error from the peer's address that quotes a segment of the stack.
    fn inject_icmp(&mut self, words: &[&str]) {
        let seq: u32 = words[words.len() - 1].parse().unwrap();
        let (us, peer) = (self.family.host(1), self.family.host(2));
        let mut quoted = vec![0; 1400];
        let header = TcpHeader {
            source_port: OUR_PORT,
            destination_port: self.peer_port,
            sequence: self.our_isn.unwrap_or(0).wrapping_add(seq),
            acknowledgement: 0,
            header_bytes: 20,
            flags: TcpFlags::ACK,
            window: 0,
            checksum: 0,
            urgent_pointer: 0,
        };
        assert!(header.emit(&mut quoted).is_some());
        let whole = ip_with_class(us, peer, Protocol::TCP, 0, &quoted);
        // The minimum quote of RFC 792: header and eight bytes.
        let quote = &whole[..self.family.header_bytes() + 8];
        let packet = match words {
            ["too-big", mtu, _] => packet_too_big(peer, us, mtu.parse().unwrap(), quote),
            ["port", _] => port_unreachable(peer, us, quote),
            ["host", _] => host_unreachable(peer, us, quote),
            ["prohibited", _] => host_prohibited(peer, us, quote),
            _ => self.fail("unknown ICMP error"),
        };
        self.host.feed(&frame(&packet));
    }
}
