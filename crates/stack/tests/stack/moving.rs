//! Sockets move from one stack to another of the same process: nobody notices,
//! and nothing is left behind.

use std::net::SocketAddr;

use proptest::prelude::*;
use tidegate_stack::{
    Config, Event, Moved, MovingSockets, Shutdown, Stack, TakenSockets, TcpError, TcpId,
    TcpListenerId, TcpOptions, TcpState, UdpId,
};

use crate::kit::{Family, Host, Pair, SECOND_NS, both, config, mac};
use crate::tcp_pair::{cases, plans};
use crate::upgrade::{Hosts, close, fresh_arena, numbers, receive, send, sent_segments};

const PORT: u16 = 80;

/// The name of no connection.
pub const GONE: TcpId = TcpId::from_bits(u64::MAX);

/// The new name of what has moved.
pub fn renamed<T: Copy + PartialEq>(moved: &[(T, T)], old: T) -> Option<T> {
    moved.iter().find(|&&(known, _)| known == old).map(|&(_, new)| new)
}

/// Another stack for the host, on the same clock and with an arena of its own.
pub fn stack_beside(host: &Host, config: Config) -> Host {
    // The seed is another one in life too.
    let config = Config { seed: [host.now_ns as u8 ^ 0x3c; 16], ..config };
    let mut stack = Stack::new(config, host.now_ns).unwrap();
    stack.share_tcp_secrets(host.stack.tcp_secrets());
    Host { stack, arena: fresh_arena(), now_ns: host.now_ns }
}

/// What can be seen of a connection.
fn seen(stack: &Stack, id: TcpId) -> impl PartialEq + std::fmt::Debug + use<> {
    let ends = (stack.tcp_local_addr(id), stack.tcp_peer_addr(id));
    (ends, stack.tcp_info(id), stack.tcp_readiness(id), stack.tcp_options(id))
}

/// Moves all sockets that there are, and sees that nothing is left of them and
/// nothing has changed.
pub fn move_between(from: &mut Host, to: &mut Host, sockets: &MovingSockets) -> Moved {
    to.now_ns = from.now_ns;
    // It may have slept.
    to.stack.handle_timeout(to.now_ns, &mut to.arena);
    let before: Vec<_> = sockets.connections.iter().map(|&id| seen(&from.stack, id)).collect();
    let taken = from.stack.take_out(from.now_ns, &mut from.arena, sockets);
    assert_eq!(from.stack.counters().balance(), 0);
    let left = (from.stack.tcp_connections(), from.stack.tcp_memory_used());
    assert_eq!(left, (0, 0), "something was left behind");
    assert_eq!(from.stack.counters().held, 0);
    assert_eq!(from.events(), []);
    let moved = to.stack.put_in(to.now_ns, &mut to.arena, taken).unwrap();
    assert_eq!(to.stack.counters().balance(), 0);
    for (&old, before) in sockets.connections.iter().zip(before) {
        let new = renamed(&moved.connections, old).unwrap_or(GONE);
        assert_eq!(seen(&to.stack, new), before);
    }
    moved
}

/// All of TCP in a stack that has had little to do, and these sockets.
fn all_sockets(stack: &Stack, udp: &[UdpId]) -> MovingSockets {
    let names =
        |places: u64| (0..places).flat_map(|index| (0..40).map(move |used| used << 32 | index));
    let listeners = names(4).filter_map(TcpListenerId::from_bits);
    MovingSockets {
        udp: udp.to_vec(),
        listeners: listeners.filter(|&id| stack.tcp_listener_addr(id).is_some()).collect(),
        connections: names(64).map(TcpId::from_bits).filter(|&id| stack.tcp_exists(id)).collect(),
    }
}

/// Everything there is goes on in a new stack in the place of the host's. What
/// the old one wanted to send is sent first.
pub fn move_all(host: &mut Host, config: Config, udp: &[UdpId]) -> Moved {
    let mut other = stack_beside(host, config);
    for bytes in host.sent() {
        let frame = other.arena.alloc_from(&bytes).unwrap();
        other.stack.transmit_queue().push_back(frame);
    }
    let moved = move_between(host, &mut other, &all_sockets(&host.stack, udp));
    std::mem::swap(host, &mut other);
    other.finish();
    moved
}

/// Everything on both sides moves; these connections have new names.
fn move_both(hosts: &mut Hosts, client: &mut TcpId, server: &mut TcpId) {
    let [a, b] = hosts.configs.clone();
    let moved = move_all(&mut hosts.pair.a, a, &[]);
    *client = renamed(&moved.connections, *client).unwrap_or(GONE);
    let moved = move_all(&mut hosts.pair.b, b, &[]);
    *server = renamed(&moved.connections, *server).unwrap_or(GONE);
    hosts.listener = renamed(&moved.listeners, hosts.listener).unwrap_or(hosts.listener);
    // Where no connection was, no neighbour was learnt.
    for (host, other) in [(&mut hosts.pair.a, 2), (&mut hosts.pair.b, 1)] {
        let Host { stack, arena, now_ns } = host;
        stack.set_neighbour(*now_ns, hosts.family.host(other), Some(mac(other)), arena);
    }
}

fn shut(host: &mut Host, id: TcpId) {
    host.stack.tcp_shutdown(host.now_ns, &mut host.arena, id, Shutdown::Write).unwrap();
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at % 251) as u8).collect()
}

#[test]
fn what_was_taken_out_can_go_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<TakenSockets>();
}

#[test]
fn a_connection_moves_in_every_state() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = (hosts.connect(), GONE);
        let check = |hosts: &mut Hosts, client: &mut TcpId, server: &mut TcpId, states| {
            for _ in 0..2 {
                // Moving by itself says nothing, and waits for nobody.
                let unsent = [hosts.pair.a.sent(), hosts.pair.b.sent()];
                move_both(hosts, client, server);
                assert_eq!(sent_segments(&mut hosts.pair.a), Vec::<Vec<u8>>::new());
                assert_eq!(sent_segments(&mut hosts.pair.b), Vec::<Vec<u8>>::new());
                let Pair { a, b } = &mut hosts.pair;
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
        send(&mut hosts.pair.a, client, &bytes(100_000));
        check(&mut hosts, &mut client, &mut server, (Some(Established), Some(Established)));
        hosts.pair.run();
        check(&mut hosts, &mut client, &mut server, (Some(Established), Some(Established)));
        assert_eq!(receive(&mut hosts.pair.b, server), bytes(100_000));
        hosts.pass(SECOND_NS);
        shut(&mut hosts.pair.a, client);
        check(&mut hosts, &mut client, &mut server, (Some(FinWait1), Some(Established)));
        hosts.pair.run();
        hosts.pass(SECOND_NS);
        check(&mut hosts, &mut client, &mut server, (Some(FinWait2), Some(CloseWait)));
        // The other half goes on.
        send(&mut hosts.pair.b, server, b"late");
        check(&mut hosts, &mut client, &mut server, (Some(FinWait2), Some(CloseWait)));
        hosts.pass(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.a, client), b"late");
        shut(&mut hosts.pair.b, server);
        check(&mut hosts, &mut client, &mut server, (Some(FinWait2), Some(LastAck)));
        hosts.pass(SECOND_NS);
        check(&mut hosts, &mut client, &mut server, (Some(TimeWait), Some(Closed)));
        let mut buf = [0; 8];
        for (host, id) in [(&mut hosts.pair.a, client), (&mut hosts.pair.b, server)] {
            let read = host.stack.tcp_recv(host.now_ns, &mut host.arena, id, &mut buf);
            assert_eq!(read, Ok(0), "the end is still the end");
            close(host, id);
        }
        check(&mut hosts, &mut client, &mut server, (None, None));
        hosts.pass(57 * SECOND_NS);
        assert!(hosts.pair.a.stack.tcp_exists(client), "TIME-WAIT lasts a minute");
        check(&mut hosts, &mut client, &mut server, (None, None));
        hosts.pass(3 * SECOND_NS);
        assert!(!hosts.pair.a.stack.tcp_exists(client));
        hosts.finish();
    });
}

#[test]
fn both_open_and_both_close_at_once() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let (mut a, mut b) = hosts.connect_at_once();
        move_both(&mut hosts, &mut a, &mut b);
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::SynReceived));
        hosts.pair.run();
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::Established));
        shut(&mut hosts.pair.a, a);
        shut(&mut hosts.pair.b, b);
        let (from_a, from_b) = (hosts.pair.a.sent_one(), hosts.pair.b.sent_one());
        hosts.pair.a.feed(&from_b);
        hosts.pair.b.feed(&from_a);
        move_both(&mut hosts, &mut a, &mut b);
        assert_eq!(hosts.pair.a.stack.tcp_state(a), Some(TcpState::Closing));
        hosts.pair.run();
        assert_eq!(hosts.pair.b.stack.tcp_state(b), Some(TcpState::TimeWait));
        close(&mut hosts.pair.a, a);
        close(&mut hosts.pair.b, b);
        hosts.finish();
    });
}

#[test]
fn an_error_moves_and_is_told_once() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = hosts.connected();
        send(&mut hosts.pair.b, server, b"last words");
        hosts.pair.run();
        let Host { stack, arena, now_ns } = &mut hosts.pair.b;
        stack.tcp_abort(*now_ns, arena, server);
        hosts.pair.run();
        assert_eq!(hosts.pair.a.stack.tcp_state(client), Some(TcpState::Closed));
        move_both(&mut hosts, &mut client, &mut server);
        let told = [Event::TcpReadable(client), Event::TcpWritable(client)];
        assert_eq!(hosts.pair.a.events(), told);
        assert_eq!(receive(&mut hosts.pair.a, client), b"last words");
        assert!(hosts.pair.a.stack.tcp_take_error(client).is_none(), "reading has told it");
        close(&mut hosts.pair.a, client);
        let (mut client, mut server) = hosts.connected();
        let Host { stack, arena, now_ns } = &mut hosts.pair.b;
        stack.tcp_abort(*now_ns, arena, server);
        hosts.pair.run();
        move_both(&mut hosts, &mut client, &mut server);
        let peer = hosts.pair.a.stack.tcp_peer_addr(client).unwrap();
        assert_eq!(hosts.pair.a.stack.tcp_take_error(client), Some(TcpError::Reset(peer)));
        close(&mut hosts.pair.a, client);
        hosts.finish();
    });
}

#[test]
fn data_out_of_order_is_put_together_elsewhere() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = hosts.connected();
        let data = bytes(10_000);
        send(&mut hosts.pair.a, client, &data);
        let mut sent = hosts.pair.a.sent();
        let lost = sent.remove(0);
        sent.iter().for_each(|frame| hosts.pair.b.feed(frame));
        let used = hosts.pair.b.stack.tcp_memory_used();
        let acks = hosts.pair.b.sent();
        move_both(&mut hosts, &mut client, &mut server);
        assert_eq!(hosts.pair.b.stack.tcp_memory_used(), used, "memory goes along");
        assert_eq!(receive(&mut hosts.pair.b, server), b"");
        // Only what is missing is needed.
        hosts.pair.b.feed(&lost);
        assert_eq!(receive(&mut hosts.pair.b, server), data);
        acks.iter().for_each(|frame| hosts.pair.a.feed(frame));
        hosts.pass(SECOND_NS);
        assert_eq!(hosts.pair.a.stack.tcp_info(client).unwrap().unacknowledged_bytes, 0);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn a_cookie_of_the_old_stack_is_accepted_by_the_new_one() {
    both(|family| {
        let mut crowded = config(2);
        crowded.limits.tcp_half_open = 0;
        let mut hosts = Hosts::with(family, TcpOptions::default(), [config(1), crowded]);
        let (mut client, mut server) = (hosts.connect(), GONE);
        let syn = hosts.pair.a.sent_one();
        hosts.pair.b.feed(&syn);
        let answer = hosts.pair.b.sent_one();
        assert_eq!(hosts.pair.b.stack.tcp_connections(), 0, "nothing is remembered");
        move_both(&mut hosts, &mut client, &mut server);
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
fn a_listener_takes_its_queues_along() {
    both(|family| {
        let mut narrow = config(2);
        narrow.limits.tcp_half_open = 1;
        let mut hosts = Hosts::with(family, TcpOptions::default(), [config(1), narrow]);
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
        let moved = move_all(&mut hosts.pair.b, hosts.configs[1].clone(), &[]);
        assert_eq!(moved.connections.len(), 4);
        hosts.listener = renamed(&moved.listeners, hosts.listener).unwrap();
        assert_eq!(hosts.pair.b.events(), [Event::TcpAcceptable(hosts.listener)]);
        assert_eq!(hosts.pair.b.stack.tcp_acceptable(hosts.listener), 3);
        // There is no room for another that is half open.
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

/// Two hosts, the second with two stacks: frames to some port are for the second
/// of them.
struct Cores {
    hosts: Hosts,
    other: Host,
    steered_port: u16,
}

impl Cores {
    fn new(family: Family, steered_port: u16) -> Self {
        let hosts = Hosts::new(family);
        let mut other = stack_beside(&hosts.pair.b, hosts.configs[1].clone());
        other.pass(3 * SECOND_NS);
        other.sent();
        other.now_ns = hosts.pair.b.now_ns;
        Self { hosts, other, steered_port }
    }

    /// Carries frames until nobody has more to say.
    fn run(&mut self) {
        let port_at = 14 + self.hosts.family.header_bytes() + 2;
        let Pair { a, b } = &mut self.hosts.pair;
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
        panic!("the hosts never stop talking");
    }

    fn connect(&mut self, port: u16) -> TcpId {
        let to = SocketAddr::new(self.hosts.family.host(2), port);
        let Host { stack, arena, now_ns } = &mut self.hosts.pair.a;
        stack.tcp_connect(*now_ns, arena, None, to, TcpOptions::default()).unwrap()
    }

    /// Everything has ended by itself, on all stacks.
    fn finish(mut self) {
        for _ in 0..200 {
            self.run();
            self.hosts.pair.pass(SECOND_NS);
            self.other.pass(SECOND_NS);
        }
        let Pair { a, b } = self.hosts.pair;
        for host in [a, b, self.other] {
            assert_eq!((host.stack.tcp_connections(), host.stack.tcp_memory_used()), (0, 0));
            host.finish();
        }
    }
}

#[test]
fn some_sockets_move_with_their_ports_and_the_others_stay() {
    both(|family| {
        const STAYING: u16 = 81;
        let mut cores = Cores::new(family, PORT);
        let at = SocketAddr::new(family.host(2), STAYING);
        let staying = cores.hosts.pair.b.stack.tcp_listen(at, 4, TcpOptions::default()).unwrap();
        let leaving = cores.hosts.listener;
        // On each port one is accepted, one lingers, one waits and one is half open.
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
            panic!("two on each port")
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

        let sockets = MovingSockets {
            listeners: vec![leaving],
            connections: vec![server],
            ..MovingSockets::default()
        };
        let Host { stack, arena, now_ns } = &mut cores.hosts.pair.b;
        assert_eq!(stack.tcp_connections(), 8);
        let taken = stack.take_out(*now_ns, arena, &sockets);
        assert_eq!((stack.tcp_connections(), stack.tcp_acceptable(staying)), (4, 1));
        assert_eq!(cores.hosts.pair.b.events(), [Event::TcpReadable(staying_server)]);
        cores.steered_port = PORT;
        let Host { stack, arena, now_ns } = &mut cores.other;
        let moved = stack.put_in(*now_ns, arena, taken).unwrap();
        assert_eq!(moved.connections.len(), 4);
        let server = renamed(&moved.connections, server).unwrap();
        let leaving = renamed(&moved.listeners, leaving).unwrap();
        let told = cores.other.events();
        assert!(told.contains(&Event::TcpReadable(server)), "{told:?}");
        assert!(told.contains(&Event::TcpAcceptable(leaving)), "{told:?}");

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
            let Host { stack, arena, now_ns } = host;
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
fn one_half_open_whose_listener_was_closed_comes_to_no_other() {
    both(|family| {
        let mut cores = Cores::new(family, PORT);
        let leaving = cores.hosts.listener;
        let (client, server) = cores.hosts.connected();
        let half_open = cores.connect(PORT);
        let syn = cores.hosts.pair.a.sent_one();
        cores.hosts.pair.b.feed(&syn);
        let answer = cores.hosts.pair.b.sent_one();
        let Host { stack, arena, now_ns } = &mut cores.hosts.pair.b;
        stack.tcp_close_listener(*now_ns, arena, leaving);
        let sockets = MovingSockets { connections: vec![server], ..MovingSockets::default() };
        let taken = stack.take_out(*now_ns, arena, &sockets);
        assert_eq!(stack.tcp_connections(), 0);
        let Host { stack, arena, now_ns } = &mut cores.other;
        // It has the name that the other had.
        let at = SocketAddr::new(family.any(), 81);
        let listener = stack.tcp_listen(at, 4, TcpOptions::default()).unwrap();
        assert_eq!(listener, leaving);
        let moved = stack.put_in(*now_ns, arena, taken).unwrap();
        assert_eq!(moved.connections.len(), 2);
        cores.hosts.pair.a.feed(&answer);
        cores.run();
        assert_eq!(cores.other.stack.tcp_acceptable(listener), 0);
        assert_eq!(cores.hosts.pair.a.stack.tcp_state(half_open), Some(TcpState::Closed));
        close(&mut cores.hosts.pair.a, half_open);
        close(&mut cores.hosts.pair.a, client);
        close(&mut cores.other, renamed(&moved.connections, server).unwrap());
        let Host { stack, arena, now_ns } = &mut cores.other;
        stack.tcp_close_listener(*now_ns, arena, listener);
        cores.finish();
    });
}

#[test]
fn a_writer_who_stays_gets_the_memory_of_those_who_leave() {
    both(|family| {
        let mut tight = config(2);
        tight.limits.tcp_buffer_bytes = 64 << 10;
        let mut hosts = Hosts::with(family, TcpOptions::default(), [config(1), tight]);
        let [leaving, leaving_too, staying] = [(); 3].map(|()| hosts.connected().1);
        let Host { stack, arena, now_ns } = &mut hosts.pair.b;
        for id in [leaving, leaving_too, staying] {
            while stack.tcp_send(*now_ns, arena, id, &[1; 2048]).is_ok() {}
        }
        assert_eq!(stack.tcp_info(staying).unwrap().unacknowledged_bytes, 0);
        while stack.poll_event().is_some() {}
        let connections = vec![leaving, leaving_too];
        let sockets = MovingSockets { connections, ..MovingSockets::default() };
        drop(stack.take_out(*now_ns, arena, &sockets));
        assert_eq!(hosts.pair.b.events(), [Event::TcpWritable(staying)]);
        assert_eq!(send(&mut hosts.pair.b, staying, &[1; 2048]), 2048);
        hosts.pair.finish();
    });
}

#[test]
fn what_was_written_and_not_sent_leaves_from_where_it_goes() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let (mut client, mut server) = hosts.connected();
        let Host { stack, now_ns, .. } = &mut hosts.pair.a;
        assert_eq!(stack.tcp_write(*now_ns, client, b"hello"), Ok(5));
        assert_eq!(hosts.pair.a.sent().len(), 0);
        move_both(&mut hosts, &mut client, &mut server);
        assert_eq!(sent_segments(&mut hosts.pair.a).len(), 1);
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
        hosts.finish();
    });
}

#[test]
fn time_stamps_do_not_go_back_where_the_clock_was_read_before() {
    both(|family| {
        let options = TcpOptions { no_delay: true, ..TcpOptions::default() };
        let mut hosts = Hosts::with(family, options, [config(1), config(2)]);
        let (client, _) = hosts.connected();
        let mut other = stack_beside(&hosts.pair.a, config(1));
        hosts.pair.a.pass(SECOND_NS);
        send(&mut hosts.pair.a, client, b"before");
        let before = numbers(family, &sent_segments(&mut hosts.pair.a)[0]).1;
        let Host { stack, arena, now_ns } = &mut hosts.pair.a;
        stack.tcp_write(*now_ns, client, b"after").unwrap();
        let sockets = MovingSockets { connections: vec![client], ..MovingSockets::default() };
        let taken = stack.take_out(*now_ns, arena, &sockets);
        other.stack.put_in(other.now_ns, &mut other.arena, taken).unwrap();
        let after = numbers(family, &sent_segments(&mut other)[0]).1;
        assert_eq!(after, before);
        other.finish();
        hosts.pair.finish();
    });
}

#[test]
fn the_ends_of_what_is_over_are_free_for_another() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let from = Some(SocketAddr::new(family.host(1), 7000));
        let nobody = SocketAddr::new(family.host(2), 9);
        let connect = |host: &mut Host| {
            let Host { stack, arena, now_ns } = host;
            stack.tcp_connect(*now_ns, arena, from, nobody, TcpOptions::default())
        };
        let mut refused = connect(&mut hosts.pair.a).unwrap();
        hosts.pair.run();
        let mut nobody_else = GONE;
        move_both(&mut hosts, &mut refused, &mut nobody_else);
        assert_eq!(hosts.pair.a.stack.tcp_state(refused), Some(TcpState::Closed));
        let again = connect(&mut hosts.pair.a).unwrap();
        for id in [refused, again] {
            close(&mut hosts.pair.a, id);
        }
        hosts.finish();
    });
}

#[test]
fn of_listeners_that_share_a_port_each_has_its_own_queues() {
    both(|family| {
        let options = TcpOptions { reuse_port: true, ..TcpOptions::default() };
        let mut hosts = Hosts::with(family, options, [config(1), config(2)]);
        let at = SocketAddr::new(family.any(), PORT);
        let staying = hosts.pair.b.stack.tcp_listen(at, 4, options).unwrap();
        let leaving = hosts.listener;
        for _ in 0..8 {
            hosts.connect();
            hosts.pair.run();
        }
        let stack = &hosts.pair.b.stack;
        assert_eq!((stack.tcp_acceptable(leaving), stack.tcp_acceptable(staying)), (4, 4));
        let mut other = stack_beside(&hosts.pair.b, config(2));
        let sockets = MovingSockets { listeners: vec![leaving], ..MovingSockets::default() };
        let Host { stack, arena, now_ns } = &mut hosts.pair.b;
        let taken = stack.take_out(*now_ns, arena, &sockets);
        assert_eq!((stack.tcp_connections(), stack.tcp_acceptable(staying)), (4, 4));
        let moved = other.stack.put_in(other.now_ns, &mut other.arena, taken).unwrap();
        assert_eq!(moved.connections.len(), 4);
        let leaving = renamed(&moved.listeners, leaving).unwrap();
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
fn ten_thousand_connections_move() {
    const CONNECTIONS: usize = 10_000;
    let mut hosts = Hosts::new(Family::V4);
    let pairs: Vec<_> = (0..CONNECTIONS).map(|_| hosts.connected()).collect();
    let connections = pairs.iter().map(|&(_, server)| server).collect();
    let listeners = vec![hosts.listener];
    let sockets = MovingSockets { listeners, connections, ..MovingSockets::default() };
    let mut other = stack_beside(&hosts.pair.b, config(2));
    let moved = move_between(&mut hosts.pair.b, &mut other, &sockets);
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
fn those_in_time_wait_count_where_they_are() {
    both(|family| {
        let mut few = config(1);
        few.limits.tcp_time_waits = 2;
        let mut hosts = Hosts::with(family, TcpOptions::default(), [few.clone(), config(2)]);
        let (mut client, server) = hosts.connected();
        close(&mut hosts.pair.a, client);
        hosts.pair.run();
        close(&mut hosts.pair.b, server);
        hosts.pair.run();
        let mut other = stack_beside(&hosts.pair.a, few);
        other.pass(3 * SECOND_NS);
        other.sent();
        other.now_ns = hosts.pair.a.now_ns;
        for _ in 0..6 {
            let connections = vec![client];
            let sockets = MovingSockets { connections, ..MovingSockets::default() };
            let moved = move_between(&mut hosts.pair.a, &mut other, &sockets);
            std::mem::swap(&mut hosts.pair.a, &mut other);
            client = renamed(&moved.connections, client).unwrap();
            assert!(hosts.pair.a.stack.tcp_exists(client));
        }
        other.finish();
        hosts.finish();
    });
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_byte_arrives_once_and_in_order_however_often_sockets_move(
        plan in plans(),
        moves in 1u32..300,
    ) {
        plan.carry_out(|exchange| exchange.with_moves(moves));
    }
}
