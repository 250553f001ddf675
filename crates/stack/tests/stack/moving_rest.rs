//! What else moves from one stack to another: datagrams, and what is known of
//! the ways to peers. And what does not move, and stays where it was.

use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{
    Config, Event, MoveError, Moved, MovingSockets, SocketError, Stack, TcpOptions, UdpId,
    UdpOptions,
};
use tidegate_wire::MacAddr;

use crate::kit::packets::{
    fragment, frame, frame_to, packet_of, port_unreachable, too_big, udp_frame, udp_packet,
};
use crate::kit::{Family, Host, SECOND_NS, both, config, mac};
use crate::moving::{move_all, renamed, stack_beside};
use crate::upgrade::{Hosts, close, receive, send, sent_segments};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

fn bind(host: &mut Host, local: SocketAddr, options: UdpOptions) -> UdpId {
    host.stack.udp_bind(local, options).unwrap()
}

fn only_udp(udp: &[UdpId]) -> MovingSockets {
    MovingSockets { udp: udp.to_vec(), ..MovingSockets::default() }
}

/// Moves some UDP sockets to a stack of the same configuration beside, which
/// stays where it is.
fn move_some(from: &mut Host, to: &mut Host, udp: &[UdpId]) -> Moved {
    let taken = from.stack.take_out(from.now_ns, &mut from.arena, &only_udp(udp));
    to.stack.put_in(to.now_ns, &mut to.arena, taken).unwrap()
}

#[test]
fn datagrams_that_wait_are_read_with_all_that_is_known_about_them() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let mut socket = host.bind(at(family.any(), 53));
        for payload in [b"one".as_slice(), b"", b"three"] {
            host.feed(&udp_frame(family, (4000, 53), payload));
        }
        // Put together from fragments, so in memory of its own.
        let long = vec![7; 2000];
        let whole = udp_packet(family.host(2), family.host(1), (4000, 53), &long);
        let datagram = &whole[family.header_bytes()..];
        for (from, to) in [(0, 1000), (1000, datagram.len())] {
            let bytes = &datagram[from..to];
            let last = to == datagram.len();
            host.feed(&frame(&fragment(family.host(2), family.host(1), 9, from, !last, bytes)));
        }
        host.feed(&udp_frame(family, (4000, 53), b"five"));
        host.sent();
        for _ in 0..2 {
            let moved = move_all(&mut host, config(1), &[socket]);
            socket = renamed(&moved.udp, socket).unwrap();
            assert_eq!((host.stack.counters().held, host.stack.counters().moved_in), (5, 5));
        }
        // What comes before it is told is no news.
        host.feed(&udp_frame(family, (4000, 53), b"six"));
        assert_eq!(host.events(), [Event::Readable(socket)]);
        for expected in [b"one".as_slice(), b"", b"three", &long, b"five", b"six"] {
            let datagram = host.stack.udp_receive(&host.arena, socket).unwrap();
            assert_eq!(
                (datagram.remote, datagram.local),
                (at(family.host(2), 4000), family.host(1))
            );
            assert_eq!((datagram.hop_limit, datagram.traffic_class), (64, 0));
            assert_eq!(datagram.bytes(&host.arena), expected);
            datagram.release(&mut host.arena);
        }
        assert_eq!(host.receive(socket), None);
        host.feed(&udp_frame(family, (4000, 53), b"after"));
        assert_eq!(host.events(), [Event::Readable(socket)]);
        assert_eq!(host.receive(socket).unwrap().2, b"after");
        assert_eq!((host.stack.counters().delivered, host.stack.counters().held), (7, 0));
        host.sent();
        host.finish();
    });
}

#[test]
fn a_full_queue_is_as_full_as_it_was() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let options = UdpOptions { queue_packets: Some(2), ..UdpOptions::default() };
        let socket = bind(&mut host, at(family.any(), 53), options);
        for payload in [b"one", b"two"] {
            host.feed(&udp_frame(family, (4000, 53), payload));
        }
        let moved = move_all(&mut host, config(1), &[socket]);
        let socket = renamed(&moved.udp, socket).unwrap();
        let reason = tidegate_wire::DropReason::SocketQueueFull;
        host.feed_dropped(&udp_frame(family, (4000, 53), b"three"), reason);
        assert_eq!(host.receive(socket).unwrap().2, b"one");
        host.feed(&udp_frame(family, (4000, 53), b"four"));
        assert_eq!(host.receive(socket).unwrap().2, b"two");
        assert_eq!(host.receive(socket).unwrap().2, b"four");
        // It was readable before it was looked at, and is told once.
        host.feed(&udp_frame(family, (4000, 53), b"five"));
        assert_eq!(host.events(), [Event::Readable(socket)]);
        host.sent();
        host.finish();
    });
}

#[test]
fn sockets_keep_addresses_peers_options_and_errors() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let options = UdpOptions { reuse_address: true, traffic_class: 8, ..UdpOptions::default() };
        let bound = bind(&mut host, at(family.host(1), 53), options);
        let peer = at(family.host(2), 4000);
        let connected = bind(&mut host, at(family.any(), 0), UdpOptions::default());
        host.stack.udp_connect(connected, peer).unwrap();
        let port = host.stack.udp_local_addr(connected).unwrap().port();
        host.send(connected, None, b"nobody there");
        let sent = packet_of(&host.sent_one()).to_vec();
        host.feed(&frame(&port_unreachable(family.host(2), family.host(1), &sent)));

        let mut other = stack_beside(&host, config(1));
        other.pass(3 * SECOND_NS);
        other.sent();
        other.now_ns = host.now_ns;
        let moved = move_some(&mut host, &mut other, &[bound, connected]);
        assert_eq!(host.events(), [], "events about them are dropped");
        assert_eq!(host.stack.udp_local_addr(bound), None);
        // Here the places are free again.
        let again = bind(&mut host, at(family.host(1), 53), UdpOptions::default());
        host.feed(&udp_frame(family, (4000, 53), b"here"));
        assert_eq!(host.receive(again).unwrap().2, b"here");
        host.stack.udp_close(again, &mut host.arena);

        let [bound, connected] = [bound, connected].map(|old| renamed(&moved.udp, old).unwrap());
        assert_eq!(other.events(), [Event::Error(connected)]);
        let refused = Some(SocketError::ConnectionRefused(peer));
        assert_eq!(other.stack.udp_take_error(connected), refused);
        assert_eq!(other.stack.udp_peer_addr(connected), Some(peer));
        assert_eq!(other.stack.udp_local_addr(connected), Some(at(family.host(1), port)));
        assert_eq!(other.stack.udp_local_addr(bound), Some(at(family.host(1), 53)));
        let taken = other.stack.udp_bind(at(family.host(1), 53), UdpOptions::default());
        assert_eq!(taken, Err(SocketError::AddressInUse(at(family.host(1), 53))));
        // Only the peer reaches a connected socket.
        other.feed(&udp_frame(family, (4000, port), b"peer"));
        other.feed(&udp_frame(family, (4001, port), b"other"));
        assert_eq!(other.receive(connected).unwrap().2, b"peer");
        assert_eq!(other.receive(connected), None);
        other.sent();
        other.send(bound, Some(peer), b"marked");
        let sent = other.sent_one();
        let class = match family {
            Family::V4 => sent[15],
            Family::V6 => sent[14] << 4 | sent[15] >> 4,
        };
        assert_eq!(class, 8);
        other.finish();
        host.finish();
    });
}

#[test]
fn one_socket_for_both_families_has_the_mapped_addresses_it_had() {
    let mut host = Host::with_neighbour(2);
    let dual = UdpOptions { dual_stack: true, ..UdpOptions::default() };
    let socket = bind(&mut host, at(Family::V6.any(), 53), dual);
    host.feed(&udp_frame(Family::V4, (4000, 53), b"four"));
    host.feed(&udp_frame(Family::V6, (4000, 53), b"six"));
    let moved = move_all(&mut host, config(1), &[socket]);
    let socket = renamed(&moved.udp, socket).unwrap();
    host.feed(&udp_frame(Family::V4, (4000, 53), b"four again"));
    let mapped = "[::ffff:192.0.2.2]:4000".parse().unwrap();
    assert_eq!(host.receive(socket).unwrap().0, mapped);
    assert_eq!(host.receive(socket).unwrap().0, at(Family::V6.host(2), 4000));
    assert_eq!(host.receive(socket).unwrap().0, mapped);
    host.sent();
    host.finish();
}

/// A datagram to a group is there once for each who listens.
#[test]
fn copies_for_a_group_are_accounted_for() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let group: IpAddr = match family {
            Family::V4 => "239.1.2.3".parse().unwrap(),
            Family::V6 => "ff05::1234".parse().unwrap(),
        };
        host.stack.join_group(host.now_ns, group).unwrap();
        let reuse = UdpOptions { reuse_address: true, ..UdpOptions::default() };
        let sockets = [family.any(), group].map(|ip| bind(&mut host, at(ip, 53), reuse));
        let packet = udp_packet(family.host(2), group, (4000, 53), b"to all");
        let to = match group {
            IpAddr::V4(v4) => MacAddr::of_ipv4_group(v4),
            IpAddr::V6(v6) => MacAddr::of_ipv6_group(v6),
        };
        host.feed(&frame_to(to, &packet));
        assert_eq!(host.stack.counters().held, 2);
        let moved = move_all(&mut host, config(1), &sockets);
        for socket in sockets {
            let socket = renamed(&moved.udp, socket).unwrap();
            assert_eq!(host.receive(socket).unwrap().2, b"to all");
        }
        let saved = host.stack.save(host.now_ns, &host.arena);
        let restored = Stack::restore(config(1), saved, host.now_ns, &mut host.arena).unwrap();
        assert_eq!(restored.counters().balance(), 0);
        restored.release(&mut host.arena);
        host.sent();
        host.finish();
    });
}

#[test]
fn who_was_bound_last_stays_the_last_where_sockets_go() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let reuse = UdpOptions { reuse_address: true, ..UdpOptions::default() };
        let sockets = [(); 3].map(|()| bind(&mut host, at(family.any(), 53), reuse));
        let [first, second, last] = sockets;
        let moved = move_all(&mut host, config(1), &[last, first, second]);
        let [first, second, last] = sockets.map(|socket| renamed(&moved.udp, socket).unwrap());
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert!(host.receive(first).is_none() && host.receive(second).is_none());
        assert!(host.receive(last).is_some());
        host.finish();
    });
}

#[test]
fn neighbours_and_narrow_paths_are_known_where_sockets_go() {
    both(|family| {
        for knows_neighbour in [false, true] {
            go_a_narrow_path(family, knows_neighbour);
        }
    });
}

/// A connected socket moves that knows of its path, to a stack that has sent
/// something to the same peer.
fn go_a_narrow_path(family: Family, knows_neighbour: bool) {
    let mut host = Host::with_neighbour(2);
    let socket = bind(&mut host, at(family.any(), 4000), UdpOptions::default());
    host.stack.udp_connect(socket, at(family.host(2), 53)).unwrap();
    host.send(socket, None, &[1; 1400]);
    let sent = packet_of(&host.sent_one()).to_vec();
    host.feed(&frame(&too_big(family.host(254), family.host(1), 1300, &sent)));
    host.events();
    let mut other = stack_beside(&host, config(1));
    other.pass(3 * SECOND_NS);
    other.sent();
    other.now_ns = host.now_ns;
    if knows_neighbour {
        let Host { stack, arena, now_ns } = &mut other;
        stack.set_neighbour(*now_ns, family.host(2), Some(mac(2)), arena);
    }
    let own = bind(&mut other, at(family.any(), 0), UdpOptions::default());
    other.send(own, Some(at(family.host(2), 9)), b"waits or goes");
    let first = other.sent_one();
    assert_eq!(first[..6] == mac(2).0, knows_neighbour);
    let moved = move_some(&mut host, &mut other, &[socket]);
    // Who asked for the neighbour has the answer.
    let waited = other.sent();
    assert_eq!(waited.len(), usize::from(!knows_neighbour));
    assert!(waited.iter().all(|frame| frame[..6] == mac(2).0));
    // Nobody is asked for, and two fragments leave.
    let socket = renamed(&moved.udp, socket).unwrap();
    other.send(socket, None, &[1; 1400]);
    assert_eq!(other.sent().len(), 2);
    // It is believed for as long as it would have been.
    other.pass(600 * SECOND_NS);
    let Host { stack, arena, now_ns } = &mut other;
    stack.set_neighbour(*now_ns, family.host(2), Some(mac(2)), arena);
    other.sent();
    other.send(socket, None, &[1; 1400]);
    assert_eq!(other.sent().len(), 1);
    other.finish();
    host.finish();
}

/// Tries to move everything of the second host to a stack that it is refused by;
/// afterwards it goes on in the first.
fn refused(
    family: Family,
    config: Config,
    shared: bool,
    occupy: impl FnOnce(&mut Host),
) -> MoveError {
    let mut hosts = Hosts::new(family);
    let (client, server) = hosts.connected();
    send(&mut hosts.pair.a, client, &[1; 5000]);
    hosts.pair.run();
    let waiting = hosts.connect();
    hosts.pair.run();
    let host = &mut hosts.pair.b;
    let socket = host.bind(at(family.host(2), 53));
    host.feed(&frame_to(mac(2), &udp_packet(family.host(1), family.host(2), (9, 53), b"hello")));

    let mut other = stack_beside(host, config.clone());
    if !shared {
        let seed = [99; 16];
        other.stack = Stack::new(Config { seed, ..config }, other.now_ns).unwrap();
    }
    occupy(&mut other);
    other.events();
    other.sent();
    let what_is_there = |host: &Host| {
        let stack = &host.stack;
        let tcp = (stack.tcp_connections(), stack.tcp_memory_used());
        (tcp, stack.counters().clone(), host.arena.available(), stack.next_timeout())
    };
    let before = what_is_there(&other);
    let sockets = MovingSockets {
        udp: vec![socket],
        listeners: vec![hosts.listener],
        connections: vec![server],
    };
    let taken = host.stack.take_out(host.now_ns, &mut host.arena, &sockets);
    let not_moved = other.stack.put_in(other.now_ns, &mut other.arena, taken).unwrap_err();
    assert_eq!(what_is_there(&other), before);
    assert_eq!((other.events(), sent_segments(&mut other).len()), (Vec::new(), 0));
    other.finish();

    let moved = host.stack.put_in(host.now_ns, &mut host.arena, not_moved.sockets).unwrap();
    let socket = renamed(&moved.udp, socket).unwrap();
    assert_eq!(host.receive(socket).unwrap().2, b"hello");
    let server = renamed(&moved.connections, server).unwrap();
    assert_eq!(receive(&mut hosts.pair.b, server), [1; 5000]);
    hosts.listener = renamed(&moved.listeners, hosts.listener).unwrap();
    let accepted = hosts.accept();
    for (client, server) in [(client, server), (waiting, accepted)] {
        send(&mut hosts.pair.a, client, b"after");
        hosts.pass(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.b, server), b"after");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
    }
    hosts.finish();
    not_moved.reason
}

#[test]
fn what_cannot_move_is_given_back_and_goes_on() {
    both(|family| {
        let nothing = |_: &mut Host| {};
        let (us, any) = (family.host(2), family.any());
        assert_eq!(refused(family, config(2), false, nothing), MoveError::Secrets);

        let in_use = |port| move |ip| MoveError::AddressInUse(at(ip, port));
        let bound = |ip| {
            move |other: &mut Host| {
                other.bind(at(ip, 53));
            }
        };
        for ip in [us, any] {
            assert_eq!(refused(family, config(2), true, bound(ip)), in_use(53)(us));
        }
        let connected = |other: &mut Host| {
            let socket = other.bind(at(us, 53));
            other.stack.udp_connect(socket, at(family.host(1), 9)).unwrap();
        };
        assert_eq!(refused(family, config(2), true, connected), in_use(53)(us));
        let listening = |other: &mut Host| {
            let options = TcpOptions { reuse_port: true, ..TcpOptions::default() };
            other.stack.tcp_listen(at(any, 80), 1, options).unwrap();
        };
        assert_eq!(refused(family, config(2), true, listening), in_use(80)(any));

        let mut few = config(2);
        few.limits.sockets = 0;
        let full = MoveError::TooMany("UDP sockets");
        assert_eq!(refused(family, few, true, nothing), full);
        let mut few = config(2);
        few.limits.tcp_connections = 1;
        assert_eq!(refused(family, few, true, nothing), MoveError::TooMany("connections"));
        let mut little = config(2);
        little.limits.tcp_buffer_bytes = 4096;
        let full = MoveError::TooMany("bytes of TCP data");
        assert_eq!(refused(family, little, true, nothing), full);

        let mut moved = config(2);
        moved.addresses.retain(|cidr| cidr.address() != us);
        assert_eq!(refused(family, moved, true, nothing), MoveError::AddressNotAvailable(us));
    });
}

#[test]
fn a_listener_too_many_and_the_same_ends_are_refused() {
    both(|family| {
        let mut hosts = Hosts::new(family);
        let mut few = hosts.configs[1].clone();
        few.limits.sockets = 2;
        let host = &mut hosts.pair.b;
        let mut other = stack_beside(host, few);
        let options = TcpOptions::default();
        for port in [81, 82] {
            other.stack.tcp_listen(at(family.any(), port), 1, options).unwrap();
        }
        let listeners = vec![hosts.listener];
        let sockets = MovingSockets { listeners, ..MovingSockets::default() };
        let taken = host.stack.take_out(host.now_ns, &mut host.arena, &sockets);
        let not_moved = other.stack.put_in(other.now_ns, &mut other.arena, taken).unwrap_err();
        assert_eq!(not_moved.reason, MoveError::TooMany("listeners"));
        drop(not_moved);

        // Both stacks connect from one port to one other.
        let (from, to) = (at(family.host(2), 7000), at(family.host(1), 9));
        for host in [&mut hosts.pair.b, &mut other] {
            let Host { stack, arena, now_ns } = host;
            stack.tcp_connect(*now_ns, arena, Some(from), to, options).unwrap();
        }
        let host = &mut hosts.pair.b;
        let connections = vec![tidegate_stack::TcpId::from_bits(0)];
        let sockets = MovingSockets { connections, ..MovingSockets::default() };
        let taken = host.stack.take_out(host.now_ns, &mut host.arena, &sockets);
        let not_moved = other.stack.put_in(other.now_ns, &mut other.arena, taken).unwrap_err();
        assert_eq!(not_moved.reason, MoveError::AddressInUse(from));
        // Who shares a port does not share a peer.
        let reuse = UdpOptions { reuse_address: true, ..UdpOptions::default() };
        let sockets = [&mut hosts.pair.b, &mut other].map(|host| {
            let socket = bind(host, at(family.any(), 53), reuse);
            host.stack.udp_connect(socket, to).unwrap();
            socket
        });
        let host = &mut hosts.pair.b;
        let taken = host.stack.take_out(host.now_ns, &mut host.arena, &only_udp(&sockets[..1]));
        let not_moved = other.stack.put_in(other.now_ns, &mut other.arena, taken).unwrap_err();
        assert_eq!(not_moved.reason, MoveError::AddressInUse(at(family.any(), 53)));
        hosts.pair.b.sent();
        hosts.pair.finish();
        other.sent();
        other.finish();
    });
}

#[test]
fn names_of_what_is_gone_are_passed_over() {
    let mut host = Host::with_neighbour(2);
    let socket = host.bind(at(Family::V4.any(), 53));
    host.stack.udp_close(socket, &mut host.arena);
    let mut other = stack_beside(&host, config(1));
    let moved = move_some(&mut host, &mut other, &[socket, socket]);
    assert_eq!(moved, Moved::default());
    host.finish();
    other.finish();
}
