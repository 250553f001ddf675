//! Migration of TCP sockets from one stack to another of the same process: peers and applications
//! notice nothing, and nothing stays behind.

use std::net::SocketAddr;

use proptest::prelude::*;
use tidegate_stack::{
    Config, Event, ExtractedSockets, MigrationMap, Shutdown, SocketSelection, Stack, TcpError,
    TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpState, TcpTraffic, UdpId,
};

use crate::kit::{Family, HostPair, SECOND_NS, TestHost, config, for_each_family, mac};
use crate::tcp_pair::{cases, plans};
use crate::upgrade::{
    Hosts, close, fresh_arena, receive, send, sent_segments, sequence_and_timestamp,
};

const PORT: u16 = 80;

/// Handle of no connection.
pub const UNKNOWN_ID: TcpId = TcpId::from_bits(u64::MAX);

/// New handle of a migrated socket.
pub fn new_id<T: Copy + PartialEq>(moved: &[(T, T)], old: T) -> Option<T> {
    moved.iter().find(|&&(known, _)| known == old).map(|&(_, new)| new)
}

/// Second stack for the host, with the same clock and an arena of its own.
pub fn second_stack(host: &TestHost, config: Config) -> TestHost {
    // Two stacks have different seeds in production too.
    let config = config.seed([host.now_ns as u8 ^ 0x3c; 16]);
    let mut stack = Stack::new(config, host.now_ns).unwrap();
    stack.set_tcp_secrets(host.stack.tcp_secrets());
    TestHost { stack, arena: fresh_arena(), now_ns: host.now_ns }
}

/// State of a connection as far as it is observable, but for what is sent at the migration.
fn observable_state(stack: &Stack, id: TcpId) -> impl PartialEq + std::fmt::Debug + use<> {
    let addresses = (stack.tcp_local_addr(id), stack.tcp_peer_addr(id));
    let info = stack.tcp_info(id).map(|info| {
        let traffic = TcpTraffic { sent_segments: 0, ..info.traffic };
        TcpInfo { unsent_bytes: 0, traffic, ..info }
    });
    (addresses, info, stack.tcp_readiness(id), stack.tcp_options(id))
}

/// Migrates the given sockets, which must be all sockets of the stack. Checks that nothing stays
/// behind and that no connection changes.
pub fn migrate_sockets(
    from: &mut TestHost,
    to: &mut TestHost,
    sockets: &SocketSelection,
) -> MigrationMap {
    to.now_ns = from.now_ns;
    // The clock of the stack may be behind.
    to.stack.handle_timeout(to.now_ns, &mut to.arena);
    let before: Vec<_> =
        sockets.connections.iter().map(|&id| observable_state(&from.stack, id)).collect();
    let extracted = from.stack.extract_sockets(from.now_ns, &mut from.arena, sockets);
    assert_eq!(from.stack.counters().balance(), 0);
    let remaining = (from.stack.tcp_connections(), from.stack.tcp_memory_used());
    assert_eq!(remaining, (0, 0), "sockets or memory stayed behind");
    assert_eq!(from.stack.counters().held, 0);
    assert_eq!(from.events(), []);
    let moved = to.stack.insert_sockets(to.now_ns, &mut to.arena, extracted).unwrap();
    assert_eq!(to.stack.counters().balance(), 0);
    for (&old, before) in sockets.connections.iter().zip(before) {
        let new = new_id(&moved.connections, old).unwrap_or(UNKNOWN_ID);
        assert_eq!(observable_state(&to.stack, new), before);
    }
    moved
}

/// All TCP sockets of a stack with low handles, and these UDP sockets.
fn all_sockets(stack: &Stack, udp: &[UdpId]) -> SocketSelection {
    let ids =
        |places: u64| (0..places).flat_map(|index| (0..40).map(move |used| used << 32 | index));
    let listeners = ids(4).filter_map(TcpListenerId::from_bits);
    SocketSelection {
        udp: udp.to_vec(),
        listeners: listeners.filter(|&id| stack.tcp_listener_addr(id).is_some()).collect(),
        connections: ids(64).map(TcpId::from_bits).filter(|&id| stack.tcp_exists(id)).collect(),
    }
}

/// Migrates everything to a new stack that replaces the stack of the host. Frames that the old
/// stack had queued are sent first.
pub fn migrate_all(host: &mut TestHost, config: Config, udp: &[UdpId]) -> MigrationMap {
    let mut other = second_stack(host, config);
    for bytes in host.sent() {
        let frame = other.arena.alloc_from(&bytes).unwrap();
        other.stack.transmit_queue().push_back(frame);
    }
    let moved = migrate_sockets(host, &mut other, &all_sockets(&host.stack, udp));
    std::mem::swap(host, &mut other);
    other.finish();
    moved
}

/// Migrates everything on both hosts, and updates the handles of these connections.
fn migrate_both_hosts(hosts: &mut Hosts, client: &mut TcpId, server: &mut TcpId) {
    let [a, b] = hosts.configs.clone();
    let moved = migrate_all(&mut hosts.pair.a, a, &[]);
    *client = new_id(&moved.connections, *client).unwrap_or(UNKNOWN_ID);
    let moved = migrate_all(&mut hosts.pair.b, b, &[]);
    *server = new_id(&moved.connections, *server).unwrap_or(UNKNOWN_ID);
    hosts.listener = new_id(&moved.listeners, hosts.listener).unwrap_or(hosts.listener);
    // A host without connections has learned no neighbours.
    for (host, other) in [(&mut hosts.pair.a, 2), (&mut hosts.pair.b, 1)] {
        let TestHost { stack, arena, now_ns } = host;
        stack.set_neighbour(*now_ns, hosts.family.host(other), Some(mac(other)), arena);
    }
}

fn shut_down_write(host: &mut TestHost, id: TcpId) {
    host.stack.tcp_shutdown(host.now_ns, &mut host.arena, id, Shutdown::Write).unwrap();
}

fn test_bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8).collect()
}

#[test]
fn extracted_sockets_are_send() {
    fn is_send<T: Send>() {}
    is_send::<ExtractedSockets>();
}

#[test]
fn migrates_connection_in_every_state() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = (hosts.connect(), UNKNOWN_ID);
        let check = |hosts: &mut Hosts, client: &mut TcpId, server: &mut TcpId, states| {
            for _ in 0..2 {
                // Migration itself sends nothing, and waits for no peer.
                let unsent = [hosts.pair.a.sent(), hosts.pair.b.sent()];
                migrate_both_hosts(hosts, client, server);
                assert_eq!(sent_segments(&mut hosts.pair.a), Vec::<Vec<u8>>::new());
                assert_eq!(sent_segments(&mut hosts.pair.b), Vec::<Vec<u8>>::new());
                let HostPair { a, b } = &mut hosts.pair;
                assert_eq!((a.stack.tcp_state(*client), b.stack.tcp_state(*server)), states);
                for (host, frames) in [a, b].into_iter().zip(unsent) {
                    for bytes in frames {
                        let frame = host.arena.alloc_from(&bytes).unwrap();
                        host.stack.transmit_queue().push_back(frame);
                    }
                }
            }
        };
        use TcpState::*;
        check(&mut hosts, &mut client, &mut server, (Some(SynSent), None));
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        check(&mut hosts, &mut client, &mut server, (Some(SynSent), None));
        assert_eq!(hosts.pair.b.stack.tcp_connections(), 1, "half open");
        hosts.pair.run();
        check(&mut hosts, &mut client, &mut server, (Some(Established), None));
        assert_eq!(hosts.pair.b.stack.tcp_acceptable(hosts.listener), 1);
        server = hosts.accept();
        check(&mut hosts, &mut client, &mut server, (Some(Established), Some(Established)));
        send(&mut hosts.pair.a, client, &test_bytes(100_000));
        check(&mut hosts, &mut client, &mut server, (Some(Established), Some(Established)));
        hosts.pair.run();
        check(&mut hosts, &mut client, &mut server, (Some(Established), Some(Established)));
        assert_eq!(receive(&mut hosts.pair.b, server), test_bytes(100_000));
        hosts.advance(SECOND_NS);
        shut_down_write(&mut hosts.pair.a, client);
        check(&mut hosts, &mut client, &mut server, (Some(FinWait1), Some(Established)));
        hosts.pair.run();
        hosts.advance(SECOND_NS);
        check(&mut hosts, &mut client, &mut server, (Some(FinWait2), Some(CloseWait)));
        // The open half of the connection continues.
        send(&mut hosts.pair.b, server, b"late");
        check(&mut hosts, &mut client, &mut server, (Some(FinWait2), Some(CloseWait)));
        hosts.advance(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.a, client), b"late");
        shut_down_write(&mut hosts.pair.b, server);
        check(&mut hosts, &mut client, &mut server, (Some(FinWait2), Some(LastAck)));
        hosts.advance(SECOND_NS);
        check(&mut hosts, &mut client, &mut server, (Some(TimeWait), Some(Closed)));
        let mut buf = [0; 8];
        for (host, id) in [(&mut hosts.pair.a, client), (&mut hosts.pair.b, server)] {
            let read = host.stack.tcp_recv(host.now_ns, &mut host.arena, id, &mut buf);
            assert_eq!(read, Ok(0), "reads still return end of stream");
            close(host, id);
        }
        check(&mut hosts, &mut client, &mut server, (None, None));
        hosts.advance(57 * SECOND_NS);
        assert!(hosts.pair.a.stack.tcp_exists(client), "TIME-WAIT lasts a minute");
        check(&mut hosts, &mut client, &mut server, (None, None));
        hosts.advance(3 * SECOND_NS);
        assert!(!hosts.pair.a.stack.tcp_exists(client));
        hosts.finish();
    });
}

#[test]
fn migrates_during_simultaneous_open_and_close() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (mut a, mut b) = hosts.connect_simultaneously();
        migrate_both_hosts(&mut hosts, &mut a, &mut b);
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::SynReceived));
        hosts.pair.run();
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::Established));
        shut_down_write(&mut hosts.pair.a, a);
        shut_down_write(&mut hosts.pair.b, b);
        let (from_a, from_b) = (hosts.pair.a.sent_one(), hosts.pair.b.sent_one());
        hosts.pair.a.feed(&from_b);
        hosts.pair.b.feed(&from_a);
        migrate_both_hosts(&mut hosts, &mut a, &mut b);
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::Closing));
        hosts.pair.run();
        assert_eq!(hosts.pair.b.stack.tcp_state(b), Some(TcpState::TimeWait));
        close(&mut hosts.pair.a, a);
        close(&mut hosts.pair.b, b);
        hosts.finish();
    });
}

#[test]
fn migrates_error_and_reports_it_once() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = hosts.establish_connection();
        send(&mut hosts.pair.b, server, b"last words");
        hosts.pair.run();
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        stack.tcp_abort(*now_ns, arena, server);
        hosts.pair.run();
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::Closed));
        migrate_both_hosts(&mut hosts, &mut client, &mut server);
        let events = [Event::TcpReadable(client), Event::TcpWritable(client)];
        assert_eq!(hosts.pair.a.events(), events);
        assert_eq!(receive(&mut hosts.pair.a, client), b"last words");
        assert!(
            hosts.pair.a.stack.tcp_take_error(client).is_none(),
            "the read call reported the error already"
        );
        close(&mut hosts.pair.a, client);
        let (mut client, mut server) = hosts.establish_connection();
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        stack.tcp_abort(*now_ns, arena, server);
        hosts.pair.run();
        migrate_both_hosts(&mut hosts, &mut client, &mut server);
        let peer = hosts.pair.a.stack.tcp_peer_addr(client).unwrap();
        assert_eq!(hosts.pair.a.stack.tcp_take_error(client), Some(TcpError::Reset(peer)));
        close(&mut hosts.pair.a, client);
        hosts.finish();
    });
}

#[test]
fn reassembles_out_of_order_data_after_migration() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = hosts.establish_connection();
        let data = test_bytes(10_000);
        send(&mut hosts.pair.a, client, &data);
        let mut sent = hosts.pair.a.sent();
        let lost = sent.remove(0);
        sent.iter().for_each(|frame| hosts.pair.b.feed(frame));
        let used = hosts.pair.b.stack.tcp_memory_used();
        let acks = hosts.pair.b.sent();
        migrate_both_hosts(&mut hosts, &mut client, &mut server);
        assert_eq!(
            hosts.pair.b.stack.tcp_memory_used(),
            used,
            "memory use migrates with the connection"
        );
        assert_eq!(receive(&mut hosts.pair.b, server), b"");
        // Only the lost segment is needed.
        hosts.pair.b.feed(&lost);
        assert_eq!(receive(&mut hosts.pair.b, server), data);
        acks.iter().for_each(|frame| hosts.pair.a.feed(frame));
        hosts.advance(SECOND_NS);
        assert_eq!(hosts.pair.a.stack.tcp_info(client).unwrap().unacknowledged_bytes, 0);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn new_stack_accepts_syn_cookie_of_old_stack() {
    for_each_family(|family| {
        let mut crowded = config(2);
        crowded.limits.tcp_half_open = 0;
        let mut hosts = Hosts::with_options(family, TcpOptions::default(), [config(1), crowded]);
        let (mut client, mut server) = (hosts.connect(), UNKNOWN_ID);
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        let answer = hosts.pair.b.sent_one();
        assert_eq!(hosts.pair.b.stack.tcp_connections(), 0, "SYN cookies need no state");
        migrate_both_hosts(&mut hosts, &mut client, &mut server);
        hosts.pair.a.feed(&answer);
        hosts.pair.run();
        assert_eq!(hosts.pair.b.events(), [Event::TcpAcceptable(hosts.listener)]);
        server = hosts.accept();
        send(&mut hosts.pair.a, client, b"hello");
        hosts.pair.run();
        assert_eq!(receive(&mut hosts.pair.b, server), b"hello");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn migrates_listener_with_its_queues() {
    for_each_family(|family| {
        let mut narrow = config(2);
        narrow.limits.tcp_half_open = 1;
        let mut hosts = Hosts::with_options(family, TcpOptions::default(), [config(1), narrow]);
        let clients = [(); 3].map(|()| {
            let client = hosts.connect();
            hosts.pair.run();
            client
        });
        for (client, name) in clients.into_iter().zip([b"a", b"b", b"c"]) {
            send(&mut hosts.pair.a, client, name);
        }
        hosts.pair.run();
        let half_open = hosts.connect();
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        let answer = hosts.pair.b.sent_one();
        hosts.pair.b.events();
        let moved = migrate_all(&mut hosts.pair.b, hosts.configs[1].clone(), &[]);
        assert_eq!(moved.connections.len(), 4);
        hosts.listener = new_id(&moved.listeners, hosts.listener).unwrap();
        assert_eq!(hosts.pair.b.events(), [Event::TcpAcceptable(hosts.listener)]);
        assert_eq!(hosts.pair.b.stack.tcp_acceptable(hosts.listener), 3);
        // The limit allows no second half-open connection.
        let fifth = hosts.connect();
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        assert_eq!(hosts.pair.b.stack.tcp_connections(), 4);
        hosts.pair.b.sent();
        hosts.pair.a.feed(&answer);
        hosts.pair.run();
        let clients = clients.into_iter().chain([half_open]);
        for (client, name) in clients.zip([b"a".as_slice(), b"b", b"c", b""]) {
            let server = hosts.accept();
            assert_eq!(receive(&mut hosts.pair.b, server), name);
            close(&mut hosts.pair.a, client);
            close(&mut hosts.pair.b, server);
        }
        close(&mut hosts.pair.a, fifth);
        hosts.finish();
    });
}

/// Two hosts, the second with two stacks. Frames to `steered_port` go to the second of these.
struct SteeredHosts {
    hosts: Hosts,
    other: TestHost,
    steered_port: u16,
}

impl SteeredHosts {
    fn new(family: Family, steered_port: u16) -> Self {
        let hosts = Hosts::new(family);
        let mut other = second_stack(&hosts.pair.b, hosts.configs[1].clone());
        other.advance(3 * SECOND_NS);
        other.sent();
        other.now_ns = hosts.pair.b.now_ns;
        Self { hosts, other, steered_port }
    }

    /// Carries frames until all hosts are quiet.
    fn run(&mut self) {
        let port_at = 14 + self.hosts.family.header_bytes() + 2;
        let HostPair { a, b } = &mut self.hosts.pair;
        for _ in 0..1000 {
            let from_a = a.sent();
            let to_a = [b.sent(), self.other.sent()].concat();
            if from_a.is_empty() && to_a.is_empty() {
                return;
            }
            for frame in from_a {
                let port = u16::from_be_bytes([frame[port_at], frame[port_at + 1]]);
                if port == self.steered_port { self.other.feed(&frame) } else { b.feed(&frame) }
            }
            to_a.iter().for_each(|frame| a.feed(frame));
        }
        panic!("the hosts never become quiet");
    }

    fn connect(&mut self, port: u16) -> TcpId {
        let to = SocketAddr::new(self.hosts.family.host(2), port);
        let TestHost { stack, arena, now_ns } = &mut self.hosts.pair.a;
        stack.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap()
    }

    /// Waits until all connections have ended by themselves on all stacks, and checks that.
    fn finish(mut self) {
        for _ in 0..200 {
            self.run();
            self.hosts.pair.advance(SECOND_NS);
            self.other.advance(SECOND_NS);
        }
        let HostPair { a, b } = self.hosts.pair;
        for host in [a, b, self.other] {
            assert_eq!((host.stack.tcp_connections(), host.stack.tcp_memory_used()), (0, 0));
            host.finish();
        }
    }
}

#[test]
fn migrates_selected_sockets_and_keeps_the_others() {
    for_each_family(|family| {
        const STAYING: u16 = 81;
        let mut cores = SteeredHosts::new(family, PORT);
        let at = SocketAddr::new(family.host(2), STAYING);
        let staying = cores.hosts.pair.b.stack.tcp_listen(at, 4, TcpOptions::default()).unwrap();
        let leaving = cores.hosts.listener;
        // On each port: an accepted, a lingering, an unaccepted and a half-open connection.
        let mut clients = Vec::new();
        let mut servers = Vec::new();
        cores.steered_port = 0;
        for (port, listener) in [(PORT, leaving), (STAYING, staying)] {
            clients.extend([(); 3].map(|()| cores.connect(port)));
            cores.run();
            let stack = &mut cores.hosts.pair.b.stack;
            servers.extend([(); 2].map(|()| stack.tcp_accept(listener).unwrap()));
        }
        let &[server, lingering, staying_server, staying_lingering] = &servers[..] else {
            panic!("two accepted connections on each port")
        };
        for server in [lingering, staying_lingering] {
            close(&mut cores.hosts.pair.b, server);
            cores.run();
        }
        cores.hosts.pair.b.events();
        let half_open = [PORT, STAYING].map(|port| cores.connect(port));
        let syns = cores.hosts.pair.a.sent();
        syns.iter().for_each(|syn| cores.hosts.pair.b.feed(syn));
        let answers = cores.hosts.pair.b.sent();
        for at in [0, 3] {
            send(&mut cores.hosts.pair.a, clients[at], b"hello");
        }
        cores.run();

        let sockets = SocketSelection {
            listeners: vec![leaving],
            connections: vec![server],
            ..SocketSelection::default()
        };
        let TestHost { stack, arena, now_ns } = &mut cores.hosts.pair.b;
        assert_eq!(stack.tcp_connections(), 8);
        let extracted = stack.extract_sockets(*now_ns, arena, &sockets);
        assert_eq!((stack.tcp_connections(), stack.tcp_acceptable(staying)), (4, 1));
        assert_eq!(cores.hosts.pair.b.events(), [Event::TcpReadable(staying_server)]);
        cores.steered_port = PORT;
        let TestHost { stack, arena, now_ns } = &mut cores.other;
        let moved = stack.insert_sockets(*now_ns, arena, extracted).unwrap();
        assert_eq!(moved.connections.len(), 4);
        let server = new_id(&moved.connections, server).unwrap();
        let leaving = new_id(&moved.listeners, leaving).unwrap();
        let events = cores.other.events();
        assert!(events.contains(&Event::TcpReadable(server)), "{events:?}");
        assert!(events.contains(&Event::TcpAcceptable(leaving)), "{events:?}");

        answers.iter().for_each(|answer| cores.hosts.pair.a.feed(answer));
        cores.run();
        for (host, server, listener) in [
            (&mut cores.other, server, leaving),
            (&mut cores.hosts.pair.b, staying_server, staying),
        ] {
            assert_eq!(receive(host, server), b"hello");
            close(host, server);
            for _ in 0..2 {
                let accepted = host.stack.tcp_accept(listener).unwrap();
                close(host, accepted);
            }
            let TestHost { stack, arena, now_ns } = host;
            stack.tcp_close_listener(*now_ns, arena, listener);
        }
        for client in clients.into_iter().chain(half_open) {
            cores.run();
            assert_eq!(cores.hosts.pair.a.stack.tcp_state(client), Some(TcpState::CloseWait));
            close(&mut cores.hosts.pair.a, client);
        }
        cores.finish();
    });
}

#[test]
fn half_open_connection_of_closed_listener_joins_no_other() {
    for_each_family(|family| {
        let mut cores = SteeredHosts::new(family, PORT);
        let leaving = cores.hosts.listener;
        let (client, server) = cores.hosts.establish_connection();
        let half_open = cores.connect(PORT);
        let syn = cores.hosts.pair.a.sent_one();
        cores.hosts.pair.b.feed(&syn);
        let answer = cores.hosts.pair.b.sent_one();
        let TestHost { stack, arena, now_ns } = &mut cores.hosts.pair.b;
        stack.tcp_close_listener(*now_ns, arena, leaving);
        let sockets = SocketSelection { connections: vec![server], ..SocketSelection::default() };
        let extracted = stack.extract_sockets(*now_ns, arena, &sockets);
        assert_eq!(stack.tcp_connections(), 0);
        let TestHost { stack, arena, now_ns } = &mut cores.other;
        // The new listener has the handle of the closed one.
        let at = SocketAddr::new(family.unspecified(), 81);
        let listener = stack.tcp_listen(at, 4, TcpOptions::default()).unwrap();
        assert_eq!(listener, leaving);
        let moved = stack.insert_sockets(*now_ns, arena, extracted).unwrap();
        assert_eq!(moved.connections.len(), 2);
        cores.hosts.pair.a.feed(&answer);
        cores.run();
        assert_eq!(cores.other.stack.tcp_acceptable(listener), 0);
        assert_eq!(cores.hosts.pair.a.stack.tcp_state(half_open), Some(TcpState::Closed));
        close(&mut cores.hosts.pair.a, half_open);
        close(&mut cores.hosts.pair.a, client);
        close(&mut cores.other, new_id(&moved.connections, server).unwrap());
        let TestHost { stack, arena, now_ns } = &mut cores.other;
        stack.tcp_close_listener(*now_ns, arena, listener);
        cores.finish();
    });
}

#[test]
fn remaining_writer_gets_memory_of_migrated_connections() {
    for_each_family(|family| {
        let mut tight = config(2);
        tight.limits.tcp_buffer_bytes = 64 << 10;
        let mut hosts = Hosts::with_options(family, TcpOptions::default(), [config(1), tight]);
        // Two take all but the reserve, and two more take the reserve.
        let leaving = [(); 4].map(|()| hosts.establish_connection().1);
        let staying = hosts.establish_connection().1;
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        for id in leaving.into_iter().chain([staying]) {
            while stack.tcp_send(*now_ns, arena, id, &[1; 2048]).is_ok() {}
        }
        assert_eq!(stack.tcp_info(staying).unwrap().unacknowledged_bytes, 0);
        while stack.poll_event().is_some() {}
        let connections = leaving.to_vec();
        let sockets = SocketSelection { connections, ..SocketSelection::default() };
        drop(stack.extract_sockets(*now_ns, arena, &sockets));
        assert_eq!(hosts.pair.b.events(), [Event::TcpWritable(staying)]);
        assert_eq!(send(&mut hosts.pair.b, staying, &[1; 2048]), 2048);
        hosts.pair.finish();
    });
}

#[test]
fn unsent_data_is_sent_by_the_new_stack() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = hosts.establish_connection();
        let TestHost { stack, .. } = &mut hosts.pair.a;
        assert_eq!(stack.tcp_send_unflushed(client, b"hello"), Ok(5));
        assert_eq!(hosts.pair.a.sent().len(), 0);
        migrate_both_hosts(&mut hosts, &mut client, &mut server);
        assert_eq!(sent_segments(&mut hosts.pair.a).len(), 1);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn timestamps_do_not_go_back_after_migration() {
    for_each_family(|family| {
        let options = TcpOptions::default().no_delay(true);
        let mut hosts = Hosts::with_options(family, options, [config(1), config(2)]);
        let (client, _) = hosts.establish_connection();
        let mut other = second_stack(&hosts.pair.a, config(1));
        hosts.pair.a.advance(SECOND_NS);
        send(&mut hosts.pair.a, client, b"before");
        let before = sequence_and_timestamp(family, &sent_segments(&mut hosts.pair.a)[0]).1;
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.a;
        stack.tcp_send_unflushed(client, b"after").unwrap();
        let sockets = SocketSelection { connections: vec![client], ..SocketSelection::default() };
        let extracted = stack.extract_sockets(*now_ns, arena, &sockets);
        other.stack.insert_sockets(other.now_ns, &mut other.arena, extracted).unwrap();
        let after = sequence_and_timestamp(family, &sent_segments(&mut other)[0]).1;
        assert_eq!(after, before);
        other.finish();
        hosts.pair.finish();
    });
}

#[test]
fn closed_connection_frees_its_four_tuple() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let from = Some(SocketAddr::new(family.host(1), 7000));
        let closed_port = SocketAddr::new(family.host(2), 9);
        let connect = |host: &mut TestHost| {
            let TestHost { stack, arena, now_ns } = host;
            stack.tcp_connect(*now_ns, arena, from, closed_port, TcpOptions::default())
        };
        let mut refused = connect(&mut hosts.pair.a).unwrap();
        hosts.pair.run();
        let mut no_server = UNKNOWN_ID;
        migrate_both_hosts(&mut hosts, &mut refused, &mut no_server);
        assert_eq!(hosts.pair.a.stack.tcp_state(refused), Some(TcpState::Closed));
        let again = connect(&mut hosts.pair.a).unwrap();
        for id in [refused, again] {
            close(&mut hosts.pair.a, id);
        }
        hosts.finish();
    });
}

#[test]
fn listeners_sharing_a_port_keep_their_own_queues() {
    for_each_family(|family| {
        let options = TcpOptions::default().reuse_port(true);
        let mut hosts = Hosts::with_options(family, options, [config(1), config(2)]);
        let at = SocketAddr::new(family.unspecified(), PORT);
        let staying = hosts.pair.b.stack.tcp_listen(at, 4, options).unwrap();
        let leaving = hosts.listener;
        for _ in 0..8 {
            hosts.connect();
            hosts.pair.run();
        }
        let stack = &hosts.pair.b.stack;
        assert_eq!((stack.tcp_acceptable(leaving), stack.tcp_acceptable(staying)), (4, 4));
        let mut other = second_stack(&hosts.pair.b, config(2));
        let sockets = SocketSelection { listeners: vec![leaving], ..SocketSelection::default() };
        let TestHost { stack, arena, now_ns } = &mut hosts.pair.b;
        let extracted = stack.extract_sockets(*now_ns, arena, &sockets);
        assert_eq!((stack.tcp_connections(), stack.tcp_acceptable(staying)), (4, 4));
        let moved = other.stack.insert_sockets(other.now_ns, &mut other.arena, extracted).unwrap();
        assert_eq!(moved.connections.len(), 4);
        let leaving = new_id(&moved.listeners, leaving).unwrap();
        for (host, listener) in [(&mut hosts.pair.b, staying), (&mut other, leaving)] {
            for _ in 0..4 {
                let accepted = host.stack.tcp_accept(listener).unwrap();
                assert_eq!(host.stack.tcp_state(accepted), Some(TcpState::Established));
            }
        }
        other.finish();
        hosts.pair.finish();
    });
}

#[test]
fn migrates_ten_thousand_connections() {
    const CONNECTIONS: usize = 10_000;
    let mut hosts = Hosts::new(Family::V4);
    let pairs: Vec<_> = (0..CONNECTIONS).map(|_| hosts.establish_connection()).collect();
    let connections = pairs.iter().map(|&(_, server)| server).collect();
    let listeners = vec![hosts.listener];
    let sockets = SocketSelection { listeners, connections, ..SocketSelection::default() };
    let mut other = second_stack(&hosts.pair.b, config(2));
    let moved = migrate_sockets(&mut hosts.pair.b, &mut other, &sockets);
    std::mem::swap(&mut hosts.pair.b, &mut other);
    other.finish();
    assert_eq!(hosts.pair.b.stack.tcp_connections(), CONNECTIONS);
    for (&(client, old), &(known, server)) in pairs.iter().zip(&moved.connections).step_by(97) {
        assert_eq!(old, known);
        send(&mut hosts.pair.a, client, b"still there");
        hosts.pair.run();
        assert_eq!(receive(&mut hosts.pair.b, server), b"still there");
    }
    hosts.pair.finish();
}

#[test]
fn time_wait_limit_follows_migrated_connections() {
    for_each_family(|family| {
        let mut few = config(1);
        few.limits.tcp_time_waits = 2;
        let mut hosts =
            Hosts::with_options(family, TcpOptions::default(), [few.clone(), config(2)]);
        let (mut client, server) = hosts.establish_connection();
        close(&mut hosts.pair.a, client);
        hosts.pair.run();
        close(&mut hosts.pair.b, server);
        hosts.pair.run();
        let mut other = second_stack(&hosts.pair.a, few);
        other.advance(3 * SECOND_NS);
        other.sent();
        other.now_ns = hosts.pair.a.now_ns;
        for _ in 0..6 {
            let connections = vec![client];
            let sockets = SocketSelection { connections, ..SocketSelection::default() };
            let moved = migrate_sockets(&mut hosts.pair.a, &mut other, &sockets);
            std::mem::swap(&mut hosts.pair.a, &mut other);
            client = new_id(&moved.connections, client).unwrap();
            assert!(hosts.pair.a.stack.tcp_exists(client));
        }
        other.finish();
        hosts.finish();
    });
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn delivers_every_byte_once_in_order_across_migrations(
        plan in plans(),
        moves in 1u32..300,
    ) {
        plan.carry_out(|exchange| exchange.with_moves(moves));
    }
}
