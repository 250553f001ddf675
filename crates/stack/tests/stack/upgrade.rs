//! A stack is saved, encoded, and restored with a fresh arena and another clock: peers and
//! applications notice only the pause.

use std::net::SocketAddr;

use proptest::prelude::*;
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{
    Config, Event, Keepalive, Shutdown, Stack, StackSnapshot, TcpError, TcpId, TcpListenerId,
    TcpOptions, TcpState,
};
use tidegate_wire::tcp::TcpOption;
use tidegate_wire::{Protocol, TcpHeader};

use crate::kit::{FRAMES, Family, HostPair, SECOND_NS, TestHost, config, for_each_family, mac};
use crate::tcp_pair::{cases, plans};

const PORT: u16 = 80;

/// Encodes a snapshot and decodes it again.
pub fn encode_and_decode<'b>(
    saved: &StackSnapshot<'_>,
    bytes: &'b mut Vec<u8>,
) -> StackSnapshot<'b> {
    *bytes = postcard::to_allocvec(saved).unwrap();
    postcard::from_bytes(bytes).unwrap()
}

/// A new, unused arena.
pub fn fresh_arena() -> Arena {
    let frames = ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false };
    Arena::new(frames).unwrap()
}

/// Replaces the stack and the arena of a host; its configuration is `config`.
pub fn upgrade(host: &mut TestHost, config: Config) {
    upgrade_at(host, config, host.now_ns);
}

/// Works like [`upgrade`]; the clock of the new stack stands at `now_ns`.
pub fn upgrade_at(host: &mut TestHost, config: Config, now_ns: u64) {
    let mut bytes = Vec::new();
    let saved = encode_and_decode(&host.stack.save(host.now_ns, &host.arena), &mut bytes);
    let mut arena = fresh_arena();
    // A new process has another seed too.
    let config = config.seed([host.now_ns as u8 ^ 0x5a; 16]);
    let stack = Stack::restore(config, saved, now_ns, &mut arena).unwrap();
    let old = std::mem::replace(&mut host.stack, stack);
    let mut old_arena = std::mem::replace(&mut host.arena, arena);
    host.now_ns = now_ns;
    old.release(&mut old_arena);
    assert_eq!(old_arena.available(), FRAMES as usize, "the old stack lost frames");
}

/// Two hosts; the second listens.
pub struct Hosts {
    pub pair: HostPair,
    pub family: Family,
    options: TcpOptions,
    pub listener: TcpListenerId,
    /// Configurations that the hosts were created with.
    pub configs: [Config; 2],
}

impl Hosts {
    pub fn new(family: Family) -> Self {
        Self::with_options(family, TcpOptions::default(), [config(1), config(2)])
    }

    pub fn with_options(family: Family, options: TcpOptions, configs: [Config; 2]) -> Self {
        let [a, b] = configs.clone().map(TestHost::quiet);
        let mut pair = HostPair { a, b };
        for (host, other) in [(&mut pair.a, 2), (&mut pair.b, 1)] {
            let TestHost { stack, arena, now_ns } = host;
            stack.set_neighbour(*now_ns, family.host(other), Some(mac(other)), arena);
        }
        let any = SocketAddr::new(family.unspecified(), PORT);
        let listener = pair.b.stack.tcp_listen(any, 4, options).unwrap();
        Self { pair, family, options, listener, configs }
    }

    /// Starts a connection; no frame is delivered yet.
    pub fn connect(&mut self) -> TcpId {
        let to = SocketAddr::new(self.family.host(2), PORT);
        let TestHost { stack, arena, now_ns } = &mut self.pair.a;
        stack.tcp_connect(*now_ns, arena, None, to, self.options).unwrap()
    }

    /// Opens a connection from both sides (simultaneous open); the SYNs have crossed.
    pub fn connect_simultaneously(&mut self) -> (TcpId, TcpId) {
        let addresses = [1, 2].map(|n| SocketAddr::new(self.family.host(n), 7000));
        let connect = |host: &mut TestHost, from: SocketAddr, to: SocketAddr| {
            let TestHost { stack, arena, now_ns } = host;
            let options = TcpOptions::default();
            stack.tcp_connect(*now_ns, arena, Some(from), to, options).unwrap()
        };
        let HostPair { a, b } = &mut self.pair;
        let (id_a, id_b) =
            (connect(a, addresses[0], addresses[1]), connect(b, addresses[1], addresses[0]));
        let (from_a, from_b) = (a.sent_one(), b.sent_one());
        a.feed(&from_b);
        b.feed(&from_a);
        (id_a, id_b)
    }

    pub fn accept(&mut self) -> TcpId {
        self.pair.b.stack.tcp_accept(self.listener).unwrap()
    }

    /// Establishes a connection and discards its events; returns both handles.
    pub fn establish_connection(&mut self) -> (TcpId, TcpId) {
        let client = self.connect();
        self.pair.run();
        let server = self.accept();
        self.pair.a.events();
        self.pair.b.events();
        (client, server)
    }

    /// Upgrades both hosts, each to another clock: that of the first has just started.
    pub fn upgrade(&mut self) {
        let [a, b] = self.configs.clone();
        upgrade_at(&mut self.pair.a, a, 123_456);
        upgrade_at(&mut self.pair.b, b, 3_000 * SECOND_NS + 654_321);
        self.check();
    }

    fn check(&mut self) {
        assert_eq!(self.pair.a.stack.counters().balance(), 0);
        assert_eq!(self.pair.b.stack.counters().balance(), 0);
    }

    /// Advances both clocks by `ns` and delivers the frames sent.
    pub fn advance(&mut self, ns: u64) {
        const STEPS: u64 = 100;
        for _ in 0..STEPS {
            self.pair.run();
            self.pair.advance(ns / STEPS);
        }
        self.pair.run();
    }

    /// Asserts that everything is closed and all memory is free.
    pub fn finish(mut self) {
        let TestHost { stack, arena, now_ns } = &mut self.pair.b;
        stack.tcp_close_listener(*now_ns, arena, self.listener);
        self.advance(200 * SECOND_NS);
        let HostPair { a, b } = &self.pair;
        assert_eq!((a.stack.tcp_connections(), b.stack.tcp_connections()), (0, 0));
        assert_eq!((a.stack.tcp_memory_used(), b.stack.tcp_memory_used()), (0, 0));
        self.pair.finish();
    }
}

pub fn send(host: &mut TestHost, id: TcpId, data: &[u8]) -> usize {
    host.stack.tcp_send(host.now_ns, &mut host.arena, id, data).unwrap()
}

/// Reads all bytes available now.
pub fn receive(host: &mut TestHost, id: TcpId) -> Vec<u8> {
    let (mut all, mut buf) = (Vec::new(), vec![0; 1 << 16]);
    while let Ok(len @ 1..) = host.stack.tcp_recv(host.now_ns, &mut host.arena, id, &mut buf) {
        all.extend(&buf[..len]);
    }
    all
}

/// TCP segments among the frames to transmit.
///
/// The others are group membership reports, which a restored stack sends again.
pub fn sent_segments(host: &mut TestHost) -> Vec<Vec<u8>> {
    let mut sent = host.sent();
    let protocol_at = |frame: &[u8]| if frame[12] == 8 { 23 } else { 20 };
    sent.retain(|frame| frame[protocol_at(frame)] == Protocol::TCP.0);
    sent
}

fn shutdown_write(host: &mut TestHost, id: TcpId) {
    host.stack.tcp_shutdown(host.now_ns, &mut host.arena, id, Shutdown::Write).unwrap();
}

pub fn close(host: &mut TestHost, id: TcpId) {
    host.stack.tcp_close(host.now_ns, &mut host.arena, id);
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8).collect()
}

#[test]
fn established_connection_survives_repeated_upgrades() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        for message in [b"before".as_slice(), b"after", b"and after that"] {
            assert_eq!(send(&mut hosts.pair.a, client, message), message.len());
            hosts.pair.run();
            assert_eq!(receive(&mut hosts.pair.b, server), *message);
            assert_eq!(send(&mut hosts.pair.b, server, message), message.len());
            hosts.pair.run();
            assert_eq!(receive(&mut hosts.pair.a, client), *message);
            hosts.advance(SECOND_NS);
            hosts.upgrade();
        }
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::Established));
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn saved_stack_continues_if_upgrade_is_abandoned() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        send(&mut hosts.pair.a, client, b"hello");
        hosts.pair.run();
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        drop(stack.save(*now_ns, arena));
        assert_eq!(receive(&mut hosts.pair.b, server), b"hello");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn simultaneous_open_survives_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (a, b) = hosts.connect_simultaneously();
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::SynReceived));
        hosts.upgrade();
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::SynReceived));
        hosts.advance(5 * SECOND_NS);
        hosts.upgrade();
        assert_eq!(send(&mut hosts.pair.a, a, b"hello"), 5);
        hosts.pair.run();
        assert_eq!(receive(&mut hosts.pair.b, b), b"hello");
        close(&mut hosts.pair.a, a);
        close(&mut hosts.pair.b, b);
        hosts.finish();
    });
}

#[test]
fn options_and_read_shutdown_survive_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        send(&mut hosts.pair.b, server, &bytes(20_000));
        hosts.pair.run();
        // The receive buffer is smaller than the data in it.
        let small = TcpOptions::default()
            .receive_buffer_bytes(4096)
            .send_buffer_bytes(4096)
            .traffic_class(8)
            .user_timeout_ms(90_000);
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.a;
        stack.tcp_set_options(*now_ns, arena, client, small).unwrap();
        hosts.upgrade();
        assert_eq!(hosts.pair.a.stack.tcp_options(client), Some(small));
        assert_eq!(receive(&mut hosts.pair.a, client), bytes(20_000));
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.a;
        stack.tcp_shutdown(*now_ns, arena, client, Shutdown::Read).unwrap();
        hosts.upgrade();
        send(&mut hosts.pair.b, server, b"for nobody");
        hosts.advance(SECOND_NS);
        assert!(hosts.pair.a.stack.tcp_readiness(client).read_closed);
        assert_eq!(hosts.pair.a.stack.tcp_readable(client), 0);
        hosts.upgrade();
        assert_eq!(send(&mut hosts.pair.a, client, b"still heard"), 11);
        hosts.advance(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.b, server), b"still heard");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn writer_waiting_for_memory_is_notified_after_upgrade() {
    for_each_family(|family| {
        let mut tight = config(1);
        tight.limits.tcp_buffer_bytes = 64 << 10;
        let options = TcpOptions::default().receive_buffer_bytes(4096);
        let mut hosts = Hosts::with_options(family, options, [tight, config(2)]);
        let pairs = [(); 4].map(|()| hosts.establish_connection());
        let mut waiting = Vec::new();
        for &(client, _) in &pairs {
            for _ in 0..40 {
                let TestHost { stack, arena, now_ns } = &mut hosts.pair.a;
                if stack.tcp_send(*now_ns, arena, client, &[1; 2048]).is_err() {
                    waiting.push(client);
                    break;
                }
            }
        }
        assert_eq!(waiting.len(), 4);
        hosts.upgrade();
        hosts.pair.a.events();
        let mut events = Vec::new();
        for _ in 0..60 {
            hosts.advance(SECOND_NS);
            pairs.iter().for_each(|&(_, server)| drop(receive(&mut hosts.pair.b, server)));
            events.extend(hosts.pair.a.events());
        }
        for (client, server) in pairs {
            assert!(events.contains(&Event::TcpWritable(client)), "{events:?}");
            close(&mut hosts.pair.a, client);
            close(&mut hosts.pair.b, server);
        }
        hosts.finish();
    });
}

/// Sequence number and time stamp of a segment.
pub fn sequence_and_timestamp(family: Family, frame: &[u8]) -> (u32, u32) {
    let tcp = &frame[14 + family.header_bytes()..];
    let (header, _) = TcpHeader::parse(tcp).unwrap();
    let mut options = header.options(tcp).map(Result::unwrap);
    let stamp = options.find_map(|option| match option {
        TcpOption::Timestamps { value, .. } => Some(value),
        _ => None,
    });
    (header.sequence, stamp.unwrap())
}

#[test]
fn sequence_numbers_and_timestamps_continue() {
    for_each_family(|family| {
        let options = TcpOptions::default().no_delay(true);
        let mut hosts = Hosts::with_options(family, options, [config(1), config(2)]);
        let (client, server) = hosts.establish_connection();
        let from = Some(SocketAddr::new(family.host(1), 50_000));
        let closed = SocketAddr::new(family.host(2), 9);
        let mut last = None;
        let mut last_syn = None;
        for _ in 0..3 {
            assert_eq!(send(&mut hosts.pair.a, client, b"x"), 1);
            let [data] = &sent_segments(&mut hosts.pair.a)[..] else { panic!("one segment") };
            let (seq, stamp) = sequence_and_timestamp(family, data);
            assert!(last.is_none_or(|last| last == (seq.wrapping_sub(1), stamp)), "{last:?}");
            last = Some((seq, stamp));
            hosts.pair.b.feed(data);
            hosts.pair.run();
            let TestHost { stack, arena, now_ns } = &mut hosts.pair.a;
            let options = TcpOptions::default();
            let refused = stack.tcp_connect(*now_ns, arena, from, closed, options).unwrap();
            let [syn] = &sent_segments(&mut hosts.pair.a)[..] else { panic!("one segment") };
            let numbers = sequence_and_timestamp(family, syn);
            assert_eq!(
                numbers.1, stamp,
                "connections between the same two hosts share a time-stamp clock"
            );
            assert!(last_syn.is_none_or(|last| last == numbers), "{last_syn:?}");
            last_syn = Some(numbers);
            hosts.pair.b.feed(syn);
            hosts.pair.run();
            close(&mut hosts.pair.a, refused);
            // Only the difference of the clocks passes as time.
            hosts.upgrade();
        }
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn retransmitted_syn_keeps_its_sequence_number() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let client = hosts.connect();
        let lost = hosts.pair.a.sent_one();
        hosts.pair.a.advance(SECOND_NS / 2);
        hosts.upgrade();
        hosts.pair.a.sent();
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::SynSent));
        hosts.pair.a.advance(6 * SECOND_NS / 10);
        let [again] = &sent_segments(&mut hosts.pair.a)[..] else { panic!("one segment") };
        let seq_at = 14 + family.header_bytes() + 4;
        assert_eq!(lost[seq_at..seq_at + 4], again[seq_at..seq_at + 4]);
        hosts.pair.b.feed(again);
        hosts.pair.run();
        assert_eq!(hosts.pair.a.events(), [Event::TcpWritable(client)]);
        let server = hosts.accept();
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn half_open_connection_is_established_after_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let client = hosts.connect();
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        let answer = hosts.pair.b.sent_one();
        hosts.upgrade();
        assert_eq!(hosts.pair.b.stack.tcp_connections(), 1);
        hosts.pair.b.sent();
        hosts.pair.a.feed(&answer);
        hosts.pair.run();
        assert_eq!(hosts.pair.b.events(), [Event::TcpAcceptable(hosts.listener)]);
        let server = hosts.accept();
        send(&mut hosts.pair.a, client, b"hello");
        hosts.pair.run();
        assert_eq!(receive(&mut hosts.pair.b, server), b"hello");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn syn_cookie_is_accepted_after_upgrade() {
    for_each_family(|family| {
        let mut crowded = config(2);
        crowded.limits.tcp_half_open = 0;
        let options = TcpOptions::default();
        let mut hosts = Hosts::with_options(family, options, [config(1), crowded]);
        let client = hosts.connect();
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        assert_eq!(hosts.pair.b.stack.tcp_connections(), 0);
        let answer = hosts.pair.b.sent_one();
        hosts.pair.a.feed(&answer);
        hosts.upgrade();
        hosts.pair.run();
        // The ACK was in the transmit queue that the upgrade discards: data replaces it.
        send(&mut hosts.pair.a, client, b"hello");
        hosts.pair.run();
        let server = hosts.accept();
        hosts.upgrade();
        assert_eq!(receive(&mut hosts.pair.b, server), b"hello");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn accept_queue_keeps_its_order() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let clients = [(); 3].map(|()| hosts.connect());
        hosts.pair.run();
        for (client, name) in clients.into_iter().zip([b"a", b"b", b"c"]) {
            send(&mut hosts.pair.a, client, name);
        }
        hosts.pair.run();
        hosts.pair.b.events();
        hosts.upgrade();
        assert_eq!(hosts.pair.b.events(), [Event::TcpAcceptable(hosts.listener)]);
        assert_eq!(hosts.pair.b.stack.tcp_acceptable(hosts.listener), 3);
        for (client, name) in clients.into_iter().zip([b"a", b"b", b"c"]) {
            let server = hosts.accept();
            assert_eq!(receive(&mut hosts.pair.b, server), name);
            close(&mut hosts.pair.a, client);
            close(&mut hosts.pair.b, server);
        }
        hosts.finish();
    });
}

#[test]
fn readiness_is_reported_again_after_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        send(&mut hosts.pair.a, client, b"unread");
        hosts.pair.run();
        assert_eq!(hosts.pair.b.events(), [Event::TcpReadable(server)]);
        hosts.upgrade();
        let expected = [Event::TcpReadable(server), Event::TcpWritable(server)];
        assert_eq!(hosts.pair.b.events(), expected);
        assert_eq!(hosts.pair.a.events(), [Event::TcpWritable(client)]);
        assert_eq!(receive(&mut hosts.pair.b, server), b"unread");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn zero_window_reopens_after_upgrade() {
    for_each_family(|family| {
        let options = TcpOptions::default().receive_buffer_bytes(4096);
        let mut hosts = Hosts::with_options(family, options, [config(1), config(2)]);
        let (client, server) = hosts.establish_connection();
        let data = bytes(100_000);
        assert_eq!(send(&mut hosts.pair.a, client, &data), data.len());
        hosts.advance(SECOND_NS);
        let mut received = Vec::new();
        for _ in 0..40 {
            hosts.upgrade();
            hosts.advance(SECOND_NS);
            received.extend(receive(&mut hosts.pair.b, server));
            hosts.advance(SECOND_NS);
        }
        assert_eq!(received, data);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn out_of_order_and_lost_data_are_reassembled() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        let data = bytes(10_000);
        send(&mut hosts.pair.a, client, &data);
        let mut sent = hosts.pair.a.sent();
        let lost = sent.remove(0);
        sent.iter().for_each(|frame| hosts.pair.b.feed(frame));
        let acks = hosts.pair.b.sent();
        hosts.upgrade();
        assert_eq!(receive(&mut hosts.pair.b, server), b"");
        // The missing segment alone completes the data.
        hosts.pair.b.feed(&lost);
        assert_eq!(receive(&mut hosts.pair.b, server), data);
        hosts.pair.b.sent();
        acks.iter().for_each(|frame| hosts.pair.a.feed(frame));
        hosts.upgrade();
        hosts.advance(5 * SECOND_NS);
        assert_eq!(hosts.pair.a.stack.tcp_info(client).unwrap().unacknowledged_bytes, 0);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn closes_in_order_with_an_upgrade_in_every_state() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        let states = |hosts: &Hosts| {
            let HostPair { a, b } = &hosts.pair;
            (a.stack.tcp_state(client), b.stack.tcp_state(server))
        };
        shutdown_write(&mut hosts.pair.a, client);
        let fin = hosts.pair.a.sent_one();
        hosts.upgrade();
        assert_eq!(states(&hosts), (Some(TcpState::FinWait1), Some(TcpState::Established)));
        hosts.pair.a.sent();
        hosts.pair.b.feed(&fin);
        hosts.pair.run();
        hosts.advance(SECOND_NS);
        hosts.upgrade();
        assert_eq!(states(&hosts), (Some(TcpState::FinWait2), Some(TcpState::CloseWait)));
        // The other direction stays open.
        send(&mut hosts.pair.b, server, b"late");
        hosts.upgrade();
        hosts.advance(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.a, client), b"late");
        shutdown_write(&mut hosts.pair.b, server);
        hosts.pair.b.sent();
        hosts.upgrade();
        assert_eq!(states(&hosts), (Some(TcpState::FinWait2), Some(TcpState::LastAck)));
        hosts.advance(5 * SECOND_NS);
        assert_eq!(states(&hosts), (Some(TcpState::TimeWait), Some(TcpState::Closed)));
        hosts.upgrade();
        assert_eq!(states(&hosts), (Some(TcpState::TimeWait), Some(TcpState::Closed)));
        let mut buf = [0; 8];
        for (host, id) in [(&mut hosts.pair.a, client), (&mut hosts.pair.b, server)] {
            let read = host.stack.tcp_recv(host.now_ns, &mut host.arena, id, &mut buf);
            assert_eq!(read, Ok(0), "end of stream is kept");
            close(host, id);
        }
        hosts.advance(30 * SECOND_NS);
        hosts.upgrade();
        assert!(hosts.pair.a.stack.tcp_exists(client), "TIME-WAIT lasts a minute");
        hosts.advance(31 * SECOND_NS);
        assert!(!hosts.pair.a.stack.tcp_exists(client));
        hosts.finish();
    });
}

#[test]
fn simultaneous_close_survives_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        shutdown_write(&mut hosts.pair.a, client);
        shutdown_write(&mut hosts.pair.b, server);
        let (from_a, from_b) = (hosts.pair.a.sent_one(), hosts.pair.b.sent_one());
        hosts.pair.a.feed(&from_b);
        hosts.pair.a.sent();
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::Closing));
        hosts.upgrade();
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::Closing));
        hosts.pair.b.feed(&from_a);
        hosts.advance(5 * SECOND_NS);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn data_written_before_close_is_sent_after_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        let data = bytes(300_000);
        assert_eq!(send(&mut hosts.pair.a, client, &data), data.len());
        close(&mut hosts.pair.a, client);
        assert_eq!(hosts.pair.a.stack.tcp_state(client), None);
        let mut received = Vec::new();
        for _ in 0..20 {
            hosts.upgrade();
            hosts.advance(SECOND_NS);
            received.extend(receive(&mut hosts.pair.b, server));
        }
        assert_eq!(received, data);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn connection_error_is_reported_once() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        send(&mut hosts.pair.b, server, b"last words");
        hosts.pair.run();
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        stack.tcp_abort(*now_ns, arena, server);
        hosts.pair.run();
        hosts.pair.a.events();
        hosts.upgrade();
        let expected = [Event::TcpReadable(client), Event::TcpWritable(client)];
        assert_eq!(hosts.pair.a.events(), expected);
        assert_eq!(receive(&mut hosts.pair.a, client), b"last words");
        let reset = TcpError::Reset(SocketAddr::new(family.host(2), PORT));
        hosts.upgrade();
        assert_eq!(hosts.pair.a.stack.tcp_take_error(client), None, "recv has returned the error");
        close(&mut hosts.pair.a, client);
        let (client, server) = hosts.establish_connection();
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        stack.tcp_abort(*now_ns, arena, server);
        hosts.pair.run();
        hosts.upgrade();
        assert_eq!(hosts.pair.a.stack.tcp_take_error(client), Some(reset));
        hosts.upgrade();
        assert_eq!(hosts.pair.a.stack.tcp_take_error(client), None);
        close(&mut hosts.pair.a, client);
        hosts.finish();
    });
}

#[test]
fn freed_ids_stay_invalid_after_upgrade() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.a;
        stack.tcp_abort(*now_ns, arena, client);
        hosts.pair.run();
        close(&mut hosts.pair.b, server);
        hosts.upgrade();
        assert!(!hosts.pair.a.stack.tcp_exists(client));
        let (next_client, next_server) = hosts.establish_connection();
        assert_eq!(next_client.slot(), client.slot(), "the slot is reused");
        assert_ne!((next_client, next_server), (client, server));
        assert_eq!(hosts.pair.a.stack.tcp_state(client), None);
        close(&mut hosts.pair.a, next_client);
        close(&mut hosts.pair.b, next_server);
        hosts.finish();
    });
}

#[test]
fn keepalive_probes_continue_after_upgrade() {
    for_each_family(|family| {
        let keepalive = Keepalive::default().idle_ms(10_000).interval_ms(1000).probes(3);
        let options = TcpOptions::default().keepalive(keepalive);
        let mut hosts = Hosts::with_options(family, options, [config(1), config(2)]);
        let (client, server) = hosts.establish_connection();
        hosts.pair.a.advance(5 * SECOND_NS);
        // On a clock that has just started the idle time stays the same.
        upgrade_at(&mut hosts.pair.a, config(1), 2_000 * SECOND_NS);
        hosts.pair.a.sent();
        hosts.pair.a.advance(4 * SECOND_NS);
        assert_eq!(sent_segments(&mut hosts.pair.a).len(), 0);
        hosts.pair.a.advance(2 * SECOND_NS);
        assert_eq!(sent_segments(&mut hosts.pair.a).len(), 1, "the first probe");
        upgrade_at(&mut hosts.pair.a, config(1), 4_000 * SECOND_NS);
        hosts.pair.a.advance(5 * SECOND_NS);
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::Closed));
        hosts.pair.run();
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_byte_arrives_once_and_in_order_however_often_sides_are_replaced(
        plan in plans(),
        upgrades in 1u32..100,
    ) {
        plan.carry_out(|exchange| exchange.with_upgrades(upgrades));
    }
}
