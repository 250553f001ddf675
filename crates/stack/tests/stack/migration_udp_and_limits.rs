//! Migration of datagrams, neighbours and path MTUs from one stack to another, and rejected
//! migrations, which leave the sockets usable in the old stack.

use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{
    Config, Event, MigrationError, MigrationMap, SocketError, SocketSelection, Stack, TcpOptions,
    UdpId, UdpOptions,
};
use tidegate_wire::MacAddr;

use crate::kit::packets::{
    fragment, frame, frame_to, packet_of, packet_too_big, port_unreachable, udp_frame, udp_packet,
};
use crate::kit::{Family, SECOND_NS, TestHost, config, for_each_family, mac};
use crate::migration::{migrate_all, new_id, second_stack};
use crate::upgrade::{Hosts, close, receive, send, sent_segments};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

fn bind(host: &mut TestHost, local: SocketAddr, options: UdpOptions) -> UdpId {
    host.stack.udp_bind(local, options).unwrap()
}

fn udp_selection(udp: &[UdpId]) -> SocketSelection {
    SocketSelection { udp: udp.to_vec(), ..SocketSelection::default() }
}

/// Migrates some UDP sockets to a second stack of the same configuration, which does not replace
/// the first.
fn migrate_udp(from: &mut TestHost, to: &mut TestHost, udp: &[UdpId]) -> MigrationMap {
    let extracted = from.stack.extract_sockets(from.now_ns, &mut from.arena, &udp_selection(udp));
    to.stack.insert_sockets(to.now_ns, &mut to.arena, extracted).unwrap()
}

#[test]
fn migrates_queued_datagrams_with_their_metadata() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let mut socket = host.bind(at(family.unspecified(), 53));
        for payload in [b"one".as_slice(), b"", b"three"] {
            host.feed(&udp_frame(family, (4000, 53), payload));
        }
        // Reassembled from fragments, so in an allocation of its own.
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
            let moved = migrate_all(&mut host, config(1), &[socket]);
            socket = new_id(&moved.udp, socket).unwrap();
            assert_eq!((host.stack.counters().held, host.stack.counters().migrated_in), (5, 5));
        }
        // A readiness event is already queued, so the datagram queues no second event.
        host.feed(&udp_frame(family, (4000, 53), b"six"));
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        for expected in [b"one".as_slice(), b"", b"three", &long, b"five", b"six"] {
            let datagram = host.stack.udp_recv(&host.arena, socket).unwrap();
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
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        assert_eq!(host.receive(socket).unwrap().2, b"after");
        assert_eq!((host.stack.counters().delivered, host.stack.counters().held), (7, 0));
        host.sent();
        host.finish();
    });
}

#[test]
fn migrates_full_queue() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let options = UdpOptions::default().queue_packets(2);
        let socket = bind(&mut host, at(family.unspecified(), 53), options);
        for payload in [b"one", b"two"] {
            host.feed(&udp_frame(family, (4000, 53), payload));
        }
        let moved = migrate_all(&mut host, config(1), &[socket]);
        let socket = new_id(&moved.udp, socket).unwrap();
        let reason = tidegate_wire::DropReason::SocketQueueFull;
        host.feed_dropped(&udp_frame(family, (4000, 53), b"three"), reason);
        assert_eq!(host.receive(socket).unwrap().2, b"one");
        host.feed(&udp_frame(family, (4000, 53), b"four"));
        assert_eq!(host.receive(socket).unwrap().2, b"two");
        assert_eq!(host.receive(socket).unwrap().2, b"four");
        // The event of the migration was not taken before reading; it is reported once.
        host.feed(&udp_frame(family, (4000, 53), b"five"));
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        host.sent();
        host.finish();
    });
}

#[test]
fn migrated_sockets_keep_addresses_peers_options_and_errors() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let options = UdpOptions::default().reuse_address(true).traffic_class(8);
        let bound = bind(&mut host, at(family.host(1), 53), options);
        let peer = at(family.host(2), 4000);
        let connected = bind(&mut host, at(family.unspecified(), 0), UdpOptions::default());
        host.stack.udp_connect(connected, peer).unwrap();
        let port = host.stack.udp_local_addr(connected).unwrap().port();
        host.send(connected, None, b"nobody there");
        let sent = packet_of(&host.sent_one()).to_vec();
        host.feed(&frame(&port_unreachable(family.host(2), family.host(1), &sent)));

        let mut other = second_stack(&host, config(1));
        other.advance(3 * SECOND_NS);
        other.sent();
        other.now_ns = host.now_ns;
        let moved = migrate_udp(&mut host, &mut other, &[bound, connected]);
        assert_eq!(host.events(), [], "events of extracted sockets are dropped");
        assert_eq!(host.stack.udp_local_addr(bound), None);
        // The addresses are free again on the old stack.
        let again = bind(&mut host, at(family.host(1), 53), UdpOptions::default());
        host.feed(&udp_frame(family, (4000, 53), b"here"));
        assert_eq!(host.receive(again).unwrap().2, b"here");
        host.stack.udp_close(again, &mut host.arena);

        let [bound, connected] = [bound, connected].map(|old| new_id(&moved.udp, old).unwrap());
        assert_eq!(other.events(), [Event::UdpError(connected)]);
        let refused = Some(SocketError::ConnectionRefused(peer));
        assert_eq!(other.stack.udp_take_error(connected), refused);
        assert_eq!(other.stack.udp_peer_addr(connected), Some(peer));
        assert_eq!(other.stack.udp_local_addr(connected), Some(at(family.host(1), port)));
        assert_eq!(other.stack.udp_local_addr(bound), Some(at(family.host(1), 53)));
        let rebind = other.stack.udp_bind(at(family.host(1), 53), UdpOptions::default());
        assert_eq!(rebind, Err(SocketError::AddressInUse(at(family.host(1), 53))));
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
fn migrated_dual_stack_socket_keeps_mapped_addresses() {
    let mut host = TestHost::with_neighbour(2);
    let dual = UdpOptions::default().dual_stack(true);
    let socket = bind(&mut host, at(Family::V6.unspecified(), 53), dual);
    host.feed(&udp_frame(Family::V4, (4000, 53), b"four"));
    host.feed(&udp_frame(Family::V6, (4000, 53), b"six"));
    let moved = migrate_all(&mut host, config(1), &[socket]);
    let socket = new_id(&moved.udp, socket).unwrap();
    host.feed(&udp_frame(Family::V4, (4000, 53), b"four again"));
    let mapped = "[::ffff:192.0.2.2]:4000".parse().unwrap();
    assert_eq!(host.receive(socket).unwrap().0, mapped);
    assert_eq!(host.receive(socket).unwrap().0, at(Family::V6.host(2), 4000));
    assert_eq!(host.receive(socket).unwrap().0, mapped);
    host.sent();
    host.finish();
}

/// Each socket of a group gets a copy of a datagram.
#[test]
fn counters_balance_for_copies_to_a_group() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let group: IpAddr = match family {
            Family::V4 => "239.1.2.3".parse().unwrap(),
            Family::V6 => "ff05::1234".parse().unwrap(),
        };
        host.stack.join_group(host.now_ns, group).unwrap();
        let reuse = UdpOptions::default().reuse_address(true);
        let sockets = [family.unspecified(), group].map(|ip| bind(&mut host, at(ip, 53), reuse));
        let packet = udp_packet(family.host(2), group, (4000, 53), b"to all");
        let to = match group {
            IpAddr::V4(v4) => MacAddr::from_ipv4_group(v4),
            IpAddr::V6(v6) => MacAddr::from_ipv6_group(v6),
        };
        host.feed(&frame_to(to, &packet));
        assert_eq!(host.stack.counters().held, 2);
        let moved = migrate_all(&mut host, config(1), &sockets);
        for socket in sockets {
            let socket = new_id(&moved.udp, socket).unwrap();
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
fn migration_preserves_bind_order() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let reuse = UdpOptions::default().reuse_address(true);
        let sockets = [(); 3].map(|()| bind(&mut host, at(family.unspecified(), 53), reuse));
        let [first, second, last] = sockets;
        let moved = migrate_all(&mut host, config(1), &[last, first, second]);
        let [first, second, last] = sockets.map(|socket| new_id(&moved.udp, socket).unwrap());
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert!(host.receive(first).is_none() && host.receive(second).is_none());
        assert!(host.receive(last).is_some());
        host.finish();
    });
}

#[test]
fn migrates_neighbours_and_path_mtus() {
    for_each_family(|family| {
        for knows_neighbour in [false, true] {
            migrate_socket_with_path_mtu(family, knows_neighbour);
        }
    });
}

/// Migrates a connected socket with a learned path MTU to a stack that has sent to the same peer
/// before.
fn migrate_socket_with_path_mtu(family: Family, knows_neighbour: bool) {
    let mut host = TestHost::with_neighbour(2);
    let socket = bind(&mut host, at(family.unspecified(), 4000), UdpOptions::default());
    host.stack.udp_connect(socket, at(family.host(2), 53)).unwrap();
    host.send(socket, None, &[1; 1400]);
    let sent = packet_of(&host.sent_one()).to_vec();
    host.feed(&frame(&packet_too_big(family.host(254), family.host(1), 1300, &sent)));
    host.events();
    let mut other = second_stack(&host, config(1));
    other.advance(3 * SECOND_NS);
    other.sent();
    other.now_ns = host.now_ns;
    if knows_neighbour {
        let TestHost { stack, arena, now_ns } = &mut other;
        stack.set_neighbour(*now_ns, family.host(2), Some(mac(2)), arena);
    }
    let own = bind(&mut other, at(family.unspecified(), 0), UdpOptions::default());
    other.send(own, Some(at(family.host(2), 9)), b"waits or goes");
    let first = other.sent_one();
    assert_eq!(first[..6] == mac(2).0, knows_neighbour);
    let moved = migrate_udp(&mut host, &mut other, &[socket]);
    // The packet that waited for the neighbour is sent.
    let waited = other.sent();
    assert_eq!(waited.len(), usize::from(!knows_neighbour));
    assert!(waited.iter().all(|frame| frame[..6] == mac(2).0));
    // No neighbour is solicited, and two fragments are sent.
    let socket = new_id(&moved.udp, socket).unwrap();
    other.send(socket, None, &[1; 1400]);
    assert_eq!(other.sent().len(), 2);
    // The learned path MTU keeps its remaining lifetime.
    other.advance(600 * SECOND_NS);
    let TestHost { stack, arena, now_ns } = &mut other;
    stack.set_neighbour(*now_ns, family.host(2), Some(mac(2)), arena);
    other.sent();
    other.send(socket, None, &[1; 1400]);
    assert_eq!(other.sent().len(), 1);
    other.finish();
    host.finish();
}

/// Tries to migrate everything of the second host to a stack that rejects the sockets. Then checks
/// that all sockets continue in the first stack. Returns the reason.
fn rejected_migration(
    family: Family,
    config: Config,
    shared: bool,
    occupy: impl FnOnce(&mut TestHost),
) -> MigrationError {
    let mut hosts = Hosts::new(family);
    let (client, server) = hosts.establish_connection();
    send(&mut hosts.pair.a, client, &[1; 5000]);
    hosts.pair.run();
    let waiting = hosts.connect();
    hosts.pair.run();
    let host = &mut hosts.pair.b;
    let socket = host.bind(at(family.host(2), 53));
    host.feed(&frame_to(mac(2), &udp_packet(family.host(1), family.host(2), (9, 53), b"hello")));

    let mut other = second_stack(host, config.clone());
    if !shared {
        let seed = [99; 16];
        other.stack = Stack::new(config.seed(seed), other.now_ns).unwrap();
    }
    occupy(&mut other);
    other.events();
    other.sent();
    let observable_state = |host: &TestHost| {
        let stack = &host.stack;
        let tcp = (stack.tcp_connections(), stack.tcp_memory_used());
        (tcp, stack.counters().clone(), host.arena.available(), stack.next_timeout())
    };
    let before = observable_state(&other);
    let sockets = SocketSelection {
        udp: vec![socket],
        listeners: vec![hosts.listener],
        connections: vec![server],
    };
    let extracted = host.stack.extract_sockets(host.now_ns, &mut host.arena, &sockets);
    let rejection =
        other.stack.insert_sockets(other.now_ns, &mut other.arena, extracted).unwrap_err();
    assert_eq!(observable_state(&other), before);
    assert_eq!((other.events(), sent_segments(&mut other).len()), (Vec::new(), 0));
    other.finish();

    let moved = host.stack.insert_sockets(host.now_ns, &mut host.arena, rejection.sockets).unwrap();
    let socket = new_id(&moved.udp, socket).unwrap();
    assert_eq!(host.receive(socket).unwrap().2, b"hello");
    let server = new_id(&moved.connections, server).unwrap();
    assert_eq!(receive(&mut hosts.pair.b, server), [1; 5000]);
    hosts.listener = new_id(&moved.listeners, hosts.listener).unwrap();
    let accepted = hosts.accept();
    for (client, server) in [(client, server), (waiting, accepted)] {
        send(&mut hosts.pair.a, client, b"after");
        hosts.advance(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.b, server), b"after");
        close(&mut hosts.pair.a, client);
        close(&mut hosts.pair.b, server);
    }
    hosts.finish();
    rejection.reason
}

#[test]
fn returns_sockets_of_a_rejected_migration() {
    for_each_family(|family| {
        let nothing = |_: &mut TestHost| {};
        let (us, any) = (family.host(2), family.unspecified());
        assert_eq!(
            rejected_migration(family, config(2), false, nothing),
            MigrationError::SecretsDiffer
        );

        let in_use = |port| move |ip| MigrationError::AddressInUse(at(ip, port));
        let bound = |ip| {
            move |other: &mut TestHost| {
                other.bind(at(ip, 53));
            }
        };
        for ip in [us, any] {
            assert_eq!(rejected_migration(family, config(2), true, bound(ip)), in_use(53)(us));
        }
        let connected = |other: &mut TestHost| {
            let socket = other.bind(at(us, 53));
            other.stack.udp_connect(socket, at(family.host(1), 9)).unwrap();
        };
        assert_eq!(rejected_migration(family, config(2), true, connected), in_use(53)(us));
        let listening = |other: &mut TestHost| {
            let options = TcpOptions::default().reuse_port(true);
            other.stack.tcp_listen(at(any, 80), 1, options).unwrap();
        };
        assert_eq!(rejected_migration(family, config(2), true, listening), in_use(80)(any));

        let mut few = config(2);
        few.limits.sockets = 0;
        let full = MigrationError::LimitReached("UDP sockets");
        assert_eq!(rejected_migration(family, few, true, nothing), full);
        let mut few = config(2);
        few.limits.tcp_connections = 1;
        assert_eq!(
            rejected_migration(family, few, true, nothing),
            MigrationError::LimitReached("connections")
        );
        let mut little_memory = config(2);
        little_memory.limits.tcp_buffer_bytes = 4096;
        let full = MigrationError::LimitReached("bytes of TCP data");
        assert_eq!(rejected_migration(family, little_memory, true, nothing), full);

        let mut without_address = config(2);
        without_address.addresses.retain(|cidr| cidr.address() != us);
        assert_eq!(
            rejected_migration(family, without_address, true, nothing),
            MigrationError::AddressNotAvailable(us)
        );
    });
}

#[test]
fn returned_sockets_are_inserted_beyond_the_limits() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let (client, server) = hosts.establish_connection();
        send(&mut hosts.pair.a, client, &[1; 5000]);
        hosts.pair.run();
        hosts.connect();
        hosts.pair.run();
        let host = &mut hosts.pair.b;
        let socket = host.bind(at(family.host(2), 53));
        let datagram = udp_packet(family.host(1), family.host(2), (9, 53), b"hello");
        host.feed(&frame_to(mac(2), &datagram));
        host.sent();

        // The stack that the sockets return to has been filled meanwhile.
        let mut full = config(2);
        (full.limits.sockets, full.limits.tcp_connections) = (0, 0);
        full.limits.tcp_buffer_bytes = 4096;
        let mut full = second_stack(host, full);
        let TestHost { stack, arena, now_ns } = &mut full;
        stack.set_neighbour(*now_ns, family.host(1), Some(mac(1)), arena);
        let sockets = SocketSelection {
            udp: vec![socket],
            listeners: vec![hosts.listener],
            connections: vec![server],
        };
        let extracted = host.stack.extract_sockets(host.now_ns, &mut host.arena, &sockets);
        let rejection = stack.insert_sockets(*now_ns, arena, extracted).unwrap_err();
        assert!(matches!(rejection.reason, MigrationError::LimitReached(_)));
        let moved = stack.insert_returned_sockets(*now_ns, arena, rejection.sockets).unwrap();
        std::mem::swap(host, &mut full);
        full.finish();

        let socket = new_id(&moved.udp, socket).unwrap();
        assert_eq!(host.receive(socket).unwrap().2, b"hello");
        let refused = host.stack.udp_bind(at(family.host(2), 54), UdpOptions::default());
        assert_eq!(refused, Err(SocketError::TooManySockets(0)));
        hosts.listener = new_id(&moved.listeners, hosts.listener).unwrap();
        let server = new_id(&moved.connections, server).unwrap();
        assert_eq!(receive(&mut hosts.pair.b, server), [1; 5000]);
        hosts.accept();
        send(&mut hosts.pair.b, server, b"after");
        hosts.advance(SECOND_NS);
        assert_eq!(receive(&mut hosts.pair.a, client), b"after");
    });
}

#[test]
fn rejects_listener_over_the_limit_and_duplicate_addresses() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        let mut few = hosts.configs[1].clone();
        few.limits.sockets = 2;
        let host = &mut hosts.pair.b;
        let mut other = second_stack(host, few);
        let options = TcpOptions::default();
        for port in [81, 82] {
            other.stack.tcp_listen(at(family.unspecified(), port), 1, options).unwrap();
        }
        let listeners = vec![hosts.listener];
        let sockets = SocketSelection { listeners, ..SocketSelection::default() };
        let extracted = host.stack.extract_sockets(host.now_ns, &mut host.arena, &sockets);
        let rejection =
            other.stack.insert_sockets(other.now_ns, &mut other.arena, extracted).unwrap_err();
        assert_eq!(rejection.reason, MigrationError::LimitReached("listeners"));
        drop(rejection);

        // Both stacks connect from the same port to the same peer.
        let (from, to) = (at(family.host(2), 7000), at(family.host(1), 9));
        for host in [&mut hosts.pair.b, &mut other] {
            let TestHost { stack, arena, now_ns } = host;
            stack.tcp_connect(*now_ns, arena, Some(from), to, options).unwrap();
        }
        let host = &mut hosts.pair.b;
        let connections = vec![tidegate_stack::TcpId::from_bits(0)];
        let sockets = SocketSelection { connections, ..SocketSelection::default() };
        let extracted = host.stack.extract_sockets(host.now_ns, &mut host.arena, &sockets);
        let rejection =
            other.stack.insert_sockets(other.now_ns, &mut other.arena, extracted).unwrap_err();
        assert_eq!(rejection.reason, MigrationError::AddressInUse(from));
        // Sockets that share a port cannot share a peer.
        let reuse = UdpOptions::default().reuse_address(true);
        let sockets = [&mut hosts.pair.b, &mut other].map(|host| {
            let socket = bind(host, at(family.unspecified(), 53), reuse);
            host.stack.udp_connect(socket, to).unwrap();
            socket
        });
        let host = &mut hosts.pair.b;
        let extracted =
            host.stack.extract_sockets(host.now_ns, &mut host.arena, &udp_selection(&sockets[..1]));
        let rejection =
            other.stack.insert_sockets(other.now_ns, &mut other.arena, extracted).unwrap_err();
        assert_eq!(rejection.reason, MigrationError::AddressInUse(at(family.unspecified(), 53)));
        hosts.pair.b.sent();
        hosts.pair.finish();
        other.sent();
        other.finish();
    });
}

#[test]
fn ignores_stale_handles() {
    let mut host = TestHost::with_neighbour(2);
    let socket = host.bind(at(Family::V4.unspecified(), 53));
    host.stack.udp_close(socket, &mut host.arena);
    let mut other = second_stack(&host, config(1));
    let moved = migrate_udp(&mut host, &mut other, &[socket, socket]);
    assert_eq!(moved, MigrationMap::default());
    host.finish();
    other.finish();
}
