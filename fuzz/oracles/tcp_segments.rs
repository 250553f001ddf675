//! TCP on any segments and calls at any times. Nothing panics or spins, nothing is lost or
//! leaked, transmitted segments are well-formed, and data is read in order as it was sent.
//!
//! The input is one byte of setup and then records of eight bytes, each a segment, a call
//! or a time step. Sequence numbers are relative to the state of the connection, since a
//! fuzzer cannot guess them.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{
    Config, Counters, Event, Shutdown, Stack, TcpError, TcpId, TcpListenerId, TcpOptions,
};
use tidegate_wire::tcp::{SackBlocks, TcpFlags, TcpOption};
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, MacAddr, Protocol, TcpHeader, checksum, tcp,
};

const US: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const OUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
const LISTEN_PORT: u16 = 80;
const FRAMES: u32 = 256;
const MAX_RECORDS: usize = 256;
const RECORD_BYTES: usize = 8;
/// Maximum segments sent for one record: the capacity of the transmit queue. A window in
/// segments of 64 bytes holds more.
const MAX_SENT_SEGMENTS: usize = 192;
const MS: u64 = 1_000_000;

/// Bits of the first byte.
mod setup {
    pub const TINY_BUFFERS: u8 = 1;
    pub const COOKIES: u8 = 2;
    pub const KEEPALIVE: u8 = 4;
    pub const NO_DELAY: u8 = 8;
    pub const USER_TIMEOUT: u8 = 16;
    pub const ECN: u8 = 32;
    pub const SMALL_MEMORY: u8 = 64;
    pub const ETHERNET: u8 = 128;
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::new(
        Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
            .expect("a small arena"),
    );
}

/// Runs one input and returns the packet counters.
pub fn check(input: &[u8]) -> Counters {
    let Some((&bits, records)) = input.split_first() else { return Counters::default() };
    ARENA.with_borrow_mut(|arena| {
        let mut host = TestHost::new(bits);
        for record in records.chunks_exact(RECORD_BYTES).take(MAX_RECORDS) {
            host.step(arena, record.try_into().expect("eight bytes"));
        }
        let counters = host.finish(arena);
        assert_eq!(arena.available(), arena.capacity(), "a frame was lost");
        counters
    })
}

/// The peer's state for one pair of ports.
#[derive(Clone, Copy, Default)]
struct Peer {
    /// Last acknowledgement number from the stack, and the sequence number after its last byte.
    expected: u32,
    ours: u32,
    /// First sequence number of the peer's data, as acknowledged by the stack.
    first: u32,
    ts: u32,
}

struct TestHost {
    stack: Stack,
    ethernet: bool,
    now_ns: u64,
    options: TcpOptions,
    listener: Option<TcpListenerId>,
    /// Connections with their number of bytes read; `None` where the data to expect is
    /// unknown.
    open: Vec<(TcpId, Option<u32>)>,
    /// By peer port: first for the listening port, then for the other local ports.
    peers: [Peer; 8],
}

fn pattern(at: u32) -> u8 {
    (at % 251) as u8
}

impl TestHost {
    fn new(bits: u8) -> Self {
        let has = |bit: u8| bits & bit != 0;
        let mut config = match has(setup::ETHERNET) {
            true => Config::ethernet(OUR_MAC, [9; 16]),
            false => Config::ip([9; 16]),
        };
        config.addresses = vec!["192.0.2.1/24".parse().expect("an address")];
        config.limits.tcp_connections = 6;
        config.limits.tcp_half_open = if has(setup::COOKIES) { 0 } else { 2 };
        config.limits.tcp_time_waits = 2;
        config.limits.transmit_frames = MAX_SENT_SEGMENTS;
        if has(setup::SMALL_MEMORY) {
            config.limits.tcp_buffer_bytes = 8 * 2048;
        }
        let mut options = TcpOptions::default().no_delay(has(setup::NO_DELAY));
        options.ecn = has(setup::ECN);
        if has(setup::TINY_BUFFERS) {
            (options.send_buffer_bytes, options.receive_buffer_bytes) = (3000, 3000);
        } else {
            (options.send_buffer_bytes, options.receive_buffer_bytes) = (60_000, 200_000);
        }
        if has(setup::KEEPALIVE) {
            options.keepalive =
                Some(tidegate_stack::Keepalive::default().idle_ms(1000).interval_ms(500).probes(3));
        }
        options.user_timeout_ms = has(setup::USER_TIMEOUT).then_some(3000);
        let mut stack = Stack::new(config, 0).expect("a valid configuration");
        let local = SocketAddr::from((US, LISTEN_PORT));
        let listener = stack.tcp_listen(local, 2, options).expect("a free port");
        Self {
            stack,
            ethernet: has(setup::ETHERNET),
            now_ns: 0,
            options,
            listener: Some(listener),
            open: Vec::new(),
            peers: [Peer::default(); 8],
        }
    }

    fn step(&mut self, arena: &mut Arena, record: [u8; RECORD_BYTES]) {
        match record[0] {
            0..160 => self.segment(arena, record),
            160..200 => self.pass(arena, u64::from(record[1]) * 10 * MS),
            200..210 => self.pass(arena, u64::from(record[1]) * 1000 * MS),
            _ => self.call(arena, record),
        }
        self.transmit(arena, MAX_SENT_SEGMENTS);
        self.take_events();
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
    }

    /// Index and port of the peer that a byte chooses.
    fn port(choice: u8) -> (usize, u16) {
        let at = usize::from(choice & 3);
        (at, 4000 + at as u16)
    }

    /// Feeds a segment from the peer. The record: choice, flags, sequence number,
    /// acknowledgement, window, options, length, more.
    fn segment(&mut self, arena: &mut Arena, record: [u8; RECORD_BYTES]) {
        let [choice, flags, seq, ack, window, options, len, more] = record;
        let (at, port) = Self::port(choice);
        let at = at + usize::from(choice & 4);
        let flags = TcpFlags(flags);
        if flags.contains(TcpFlags::SYN) && choice & 64 == 0 {
            let first = u32::from(seq) << 24 | u32::from(more);
            self.peers[at].expected = first;
        }
        let peer = self.peers[at];
        // Small steps around the expected number, and occasionally large ones.
        let step = |byte: u8, unit: i32| match byte {
            255 => 1 << 30,
            254 => -(1 << 30),
            byte => (i32::from(byte) % 16 - 4) * unit,
        };
        let unit = if choice & 16 == 0 { 1 } else { 100 };
        let is_syn = flags.contains(TcpFlags::SYN) && choice & 64 == 0;
        let shift = if is_syn || choice & 32 != 0 { 0 } else { step(seq, unit) };
        let number = peer.expected.wrapping_add_signed(shift);
        let acknowledged =
            peer.ours.wrapping_add_signed(if choice & 8 == 0 { 0 } else { step(ack, unit) });
        let mut header = TcpHeader {
            source_port: port,
            destination_port: if choice & 4 == 0 {
                LISTEN_PORT
            } else {
                5000 + u16::from(choice & 3)
            },
            sequence: number,
            acknowledgement: acknowledged,
            header_bytes: 20,
            flags,
            window: u16::from(window) * 100,
            checksum: 0,
            urgent_pointer: u16::from(more),
        };
        let mut segment = vec![0; 20];
        put_options(&mut segment, options, more, &mut self.peers[at], acknowledged, unit as u32);
        header.header_bytes = segment.len() as u8;
        assert!(header.emit(&mut segment).is_some());
        let bytes = if more & 64 == 0 { u32::from(len) } else { u32::from(len) * 5 };
        // A SYN takes the sequence number before the data.
        let syn = u32::from(flags.contains(TcpFlags::SYN));
        let data_at = number.wrapping_add(syn).wrapping_sub(peer.first);
        segment.extend((0..bytes).map(|n| pattern(data_at.wrapping_add(n))));
        let class = if more & 32 == 0 { 0 } else { 3 };
        self.feed(arena, &mut segment, class);
    }

    fn feed(&mut self, arena: &mut Arena, segment: &mut [u8], class: u8) {
        let pseudo = checksum::pseudo_header_v4(PEER, US, Protocol::TCP, segment.len() as u16);
        tcp::fill_checksum(pseudo, segment);
        let mut ip = Ipv4Header::new(PEER, US, Protocol::TCP, segment.len()).expect("it fits");
        ip.dscp_ecn = class;
        let link_bytes = if self.ethernet { EthernetHeader::BYTES } else { 0 };
        let mut packet = vec![0; link_bytes + 20];
        if self.ethernet {
            let (destination, source) = (OUR_MAC, PEER_MAC);
            let header =
                EthernetHeader { destination, source, vlan: None, ethertype: EtherType::IPV4 };
            assert!(header.emit(&mut packet).is_some());
        }
        assert!(ip.emit(&mut packet[link_bytes..]).is_some());
        packet.extend_from_slice(segment);
        if let Some(frame) = arena.alloc_from(&packet) {
            self.stack.handle_frame(self.now_ns, frame, arena);
        }
    }

    fn call(&mut self, arena: &mut Arena, record: [u8; RECORD_BYTES]) {
        let [what, choice, size, ..] = record;
        let now_ns = self.now_ns;
        if what % 8 == 0 {
            let accepted = self.listener.map(|id| self.stack.tcp_accept(id));
            self.open.extend(accepted.and_then(Result::ok).map(|id| (id, Some(0))));
            return;
        }
        if what % 8 == 1 {
            let (at, port) = Self::port(choice);
            let local = SocketAddr::from((US, 5000 + at as u16));
            let to = SocketAddr::from((PEER, port));
            let connected = self.stack.tcp_connect(now_ns, arena, Some(local), to, self.options);
            self.open.extend(connected.ok().map(|id| (id, None)));
            return;
        }
        let Some(at) = usize::from(choice).checked_rem(self.open.len()) else { return };
        let (id, read) = self.open[at];
        match what % 8 {
            2 | 3 => {
                let data = vec![size; usize::from(size) * 40];
                let sent = self.stack.tcp_send(now_ns, arena, id, &data);
                assert!(sent.is_err() || sent.is_ok_and(|len| len <= data.len()));
            }
            4 | 5 => {
                let mut buf = vec![0; usize::from(size) * 40 + 1];
                if let Ok(len) = self.stack.tcp_recv(now_ns, arena, id, &mut buf)
                    && let Some(read) = read
                {
                    let right = (0..len as u32).all(|n| buf[n as usize] == pattern(read + n));
                    assert!(right, "received data differs from the data sent");
                    self.open[at].1 = Some(read + len as u32);
                }
            }
            6 => {
                let how = [Shutdown::Read, Shutdown::Write, Shutdown::Both][usize::from(size % 3)];
                let result = self.stack.tcp_shutdown(now_ns, arena, id, how);
                // Discarded data cannot be compared, so the connection is closed.
                if how != Shutdown::Write && result.is_ok() {
                    self.open.swap_remove(at);
                    self.stack.tcp_close(now_ns, arena, id);
                }
            }
            _ => {
                self.open.swap_remove(at);
                if size % 4 == 0 {
                    self.stack.tcp_abort(now_ns, arena, id);
                } else {
                    self.stack.tcp_close(now_ns, arena, id);
                }
                assert_eq!(self.stack.tcp_send(now_ns, arena, id, b"x"), Err(TcpError::Closed));
            }
        }
    }

    fn pass(&mut self, arena: &mut Arena, ns: u64) {
        let end_ns = self.now_ns + ns;
        for count in 0.. {
            assert!(count < 20_000, "timers fire without end");
            let due = self.stack.next_timeout().filter(|&due_ns| due_ns <= end_ns);
            let Some(due_ns) = due else { break };
            self.now_ns = self.now_ns.max(due_ns);
            self.stack.handle_timeout(self.now_ns, arena);
            self.transmit(arena, MAX_SENT_SEGMENTS);
            let next_ns = self.stack.next_timeout();
            assert!(next_ns.is_none_or(|next_ns| next_ns > self.now_ns), "a timer was left due");
        }
        self.now_ns = end_ns;
    }

    /// Resolves the peer's address for the stack.
    fn introduce_peer(&mut self, arena: &mut Arena) {
        self.stack.set_neighbour(self.now_ns, PEER.into(), Some(PEER_MAC), arena);
    }

    /// Takes transmitted frames: each must be well-formed, and their number at most `most`.
    fn transmit(&mut self, arena: &mut Arena, max_frames: usize) {
        let mut count = 0;
        while let Some(frame) = self.stack.transmit_queue().pop_front() {
            count += 1;
            let bytes = match self.ethernet {
                true => {
                    let (link, packet) =
                        EthernetHeader::parse(arena.bytes(&frame)).expect("a frame");
                    if link.ethertype != EtherType::IPV4 {
                        arena.free(frame);
                        self.introduce_peer(arena);
                        continue;
                    }
                    assert_eq!((link.source, link.destination), (OUR_MAC, PEER_MAC));
                    packet
                }
                false => arena.bytes(&frame),
            };
            assert!(bytes.len() <= 1500);
            let (ip, segment) = Ipv4Header::parse(bytes).expect("an IPv4 packet");
            assert_eq!((ip.source, ip.destination), (US, PEER));
            tcp::verify_v4(US, PEER, segment).expect("a checksum");
            let (header, payload) = TcpHeader::parse(segment).expect("a segment");
            assert!(header.options(segment).all(|option| option.is_ok()));
            let other = usize::from(header.source_port != LISTEN_PORT);
            let at = usize::from(header.destination_port - 4000) + 4 * other;
            let peer = &mut self.peers[at];
            if header.flags.contains(TcpFlags::ACK) && !header.flags.contains(TcpFlags::RST) {
                peer.expected = header.acknowledgement;
                if header.flags.contains(TcpFlags::SYN) {
                    peer.first = header.acknowledgement;
                }
            }
            let taken = u32::from(header.flags.contains(TcpFlags::SYN))
                + u32::from(header.flags.contains(TcpFlags::FIN));
            peer.ours = header.sequence.wrapping_add(payload.len() as u32 + taken);
            arena.free(frame);
        }
        assert!(count <= max_frames, "one record caused {count} segments");
    }

    fn take_events(&mut self) {
        let mut count = 0;
        while let Some(event) = self.stack.poll_event() {
            count += 1;
            assert!(count < 64, "the event queue never empties");
            if let Event::TcpAcceptable(id) = event {
                assert_eq!(Some(id), self.listener);
            }
        }
    }

    /// Closes everything and asserts that all connections end by themselves.
    fn finish(mut self, arena: &mut Arena) -> Counters {
        for (id, _) in std::mem::take(&mut self.open) {
            self.stack.tcp_close(self.now_ns, arena, id);
        }
        if let Some(id) = self.listener.take() {
            self.stack.tcp_close_listener(self.now_ns, arena, id);
        }
        self.transmit(arena, 4 * MAX_SENT_SEGMENTS);
        self.pass(arena, 1200 * 1000 * MS);
        assert_eq!(self.stack.tcp_connections(), 0, "a connection does not end");
        assert_eq!(self.stack.tcp_memory_used(), 0, "buffer memory leaked");
        let counters = self.stack.counters().clone();
        assert_eq!(counters.balance(), 0, "{counters:?}");
        self.stack.release(arena);
        counters
    }
}

/// Appends the options that a byte chooses, valid and invalid ones.
fn put_options(
    segment: &mut Vec<u8>,
    choice: u8,
    more: u8,
    peer: &mut Peer,
    acknowledged: u32,
    unit: u32,
) {
    let mut put = |option: TcpOption<'_>| {
        let mut bytes = [1; 40];
        let rest = option.emit(&mut bytes).map_or(40, |rest| rest.len());
        if segment.len() + 40 - rest <= 60 {
            segment.extend(&bytes[..40 - rest]);
        }
    };
    if choice & 1 != 0 {
        put(TcpOption::MaximumSegmentSize(u16::from(more) * 8));
    }
    if choice & 2 != 0 {
        put(TcpOption::WindowScale(more & 15));
    }
    if choice & 4 != 0 {
        put(TcpOption::SackPermitted);
    }
    if choice & 8 != 0 {
        peer.ts = peer.ts.wrapping_add(u32::from(more & 7)).wrapping_sub(1);
        put(TcpOption::Timestamps { value: peer.ts, echo: 0 });
    }
    if choice & 16 != 0 {
        let edge = |n: u8| acknowledged.wrapping_sub(u32::from(n) * unit * 10).to_be_bytes();
        let blocks = [edge(more & 15), edge(more >> 4), edge(choice >> 5), edge(0)].concat();
        if let Some(blocks) = SackBlocks::parse(&blocks) {
            put(TcpOption::Sack(blocks));
        }
    }
    if choice & 0xe0 == 0xe0 {
        put(TcpOption::Other(more, &[more; 3]));
    }
    let padding = if choice & 0x60 == 0x60 { more } else { 1 };
    segment.resize(segment.len().next_multiple_of(4).min(60), padding);
}
