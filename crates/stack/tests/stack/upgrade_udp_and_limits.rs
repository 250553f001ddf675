//! Upgrade of UDP sockets, neighbours, path MTUs and addresses. Also refused: snapshots
//! that are damaged or exceed the limits.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use proptest::prelude::*;
use tidegate_memory::Arena;
use tidegate_stack::{
    Event, RestoreError, STATE_VERSION, SocketError, Stack, StackSnapshot, TcpError, TcpOptions,
    UdpId, UdpOptions,
};

use crate::kit::packets::{
    fragment, frame, packet_of, packet_too_big, port_unreachable, udp_frame, udp_packet,
};
use crate::kit::{Family, SECOND_NS, TestHost, config, for_each_family, mac};
use crate::upgrade::{
    Hosts, close, encode_and_decode, fresh_arena, receive, send, upgrade, upgrade_at,
};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

fn bind(host: &mut TestHost, local: SocketAddr, options: UdpOptions) -> UdpId {
    host.stack.udp_bind(local, options).unwrap()
}

#[test]
fn reuse_port_group_survives_upgrade() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let shared = UdpOptions::default().reuse_port(true);
        let local = at(family.unspecified(), 53);
        let sockets = [(); 3].map(|()| host.stack.udp_bind(local, shared).unwrap());
        for port in 0..30 {
            host.feed(&udp_frame(family, (4000 + port, 53), b"x"));
        }
        upgrade(&mut host, config(1));
        let unread = sockets.map(|socket| host.stack.udp_queue_len(socket));
        assert_eq!(unread.iter().sum::<usize>(), 30);
        assert!(unread.iter().all(|&unread| unread > 0));
        for socket in sockets {
            while host.receive(socket).is_some() {}
        }
        for port in 0..30 {
            host.feed(&udp_frame(family, (4000 + port, 53), b"x"));
            let got = sockets.map(|socket| host.receive(socket).is_some());
            assert_eq!(got.into_iter().filter(|&got| got).count(), 1);
        }
        assert!(host.stack.udp_bind(local, UdpOptions::default()).is_err());
        host.finish();
    });
}

#[test]
fn last_bound_socket_stays_last_after_upgrade() {
    for_each_family(|family| {
        for ip in [family.host(1), family.unspecified()] {
            let mut host = TestHost::with_neighbour(2);
            let reuse = UdpOptions::default().reuse_address(true);
            let first = bind(&mut host, at(ip, 53), reuse);
            let second = bind(&mut host, at(ip, 53), reuse);
            host.stack.udp_close(first, &mut host.arena);
            // The new socket reuses the slot of the first.
            let last = bind(&mut host, at(ip, 53), reuse);
            for _ in 0..2 {
                host.feed(&udp_frame(family, (4000, 53), b"x"));
                assert!(host.receive(second).is_none());
                assert!(host.receive(last).is_some());
                upgrade(&mut host, config(1));
            }
            let newest = bind(&mut host, at(ip, 53), reuse);
            host.feed(&udp_frame(family, (4000, 53), b"x"));
            assert!(host.receive(newest).is_some());
            host.finish();
        }
    });
}

#[test]
fn queued_datagrams_survive_upgrade_with_metadata() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 53));
        for payload in [b"one".as_slice(), b"", b"three"] {
            host.feed(&udp_frame(family, (4000, 53), payload));
        }
        // A datagram reassembled from fragments is in memory of its own.
        let long = vec![7; 2000];
        let whole = udp_packet(family.host(2), family.host(1), (4000, 53), &long);
        let datagram = &whole[family.header_bytes()..];
        for (from, to) in [(0, 1000), (1000, datagram.len())] {
            let bytes = &datagram[from..to];
            let last = to == datagram.len();
            host.feed(&frame(&fragment(family.host(2), family.host(1), 9, from, !last, bytes)));
        }
        assert_eq!(host.stack.udp_queue_len(socket), 4);
        host.events();
        upgrade(&mut host, config(1));
        upgrade(&mut host, config(1));
        assert_eq!(host.stack.counters().balance(), 0);
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        for expected in [b"one".as_slice(), b"", b"three", &long] {
            let (from, to, bytes) = host.receive(socket).unwrap();
            assert_eq!((from, to), (at(family.host(2), 4000), family.host(1)));
            assert_eq!(bytes, expected);
        }
        assert_eq!(host.receive(socket), None);
        host.feed(&udp_frame(family, (4000, 53), b"after"));
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        assert_eq!(host.receive(socket).unwrap().2, b"after");
        assert_eq!((host.stack.counters().delivered, host.stack.counters().held), (5, 0));
        host.finish();
    });
}

#[test]
fn sockets_keep_ids_addresses_peers_options_and_errors() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let closed = host.bind(at(family.unspecified(), 9));
        let options = UdpOptions::default().reuse_address(true).traffic_class(8);
        let bound = bind(&mut host, at(family.host(1), 53), options);
        let peer = at(family.host(2), 4000);
        let connected = bind(&mut host, at(family.unspecified(), 0), UdpOptions::default());
        host.stack.udp_connect(connected, peer).unwrap();
        let port = host.stack.udp_local_addr(connected).unwrap().port();
        host.send(connected, None, b"nobody there");
        let sent = packet_of(&host.sent_one()).to_vec();
        host.feed(&frame(&port_unreachable(family.host(2), family.host(1), &sent)));
        host.stack.udp_close(closed, &mut host.arena);
        host.events();

        upgrade(&mut host, config(1));
        assert_eq!(host.events(), [Event::UdpError(connected)]);
        let refused = Some(SocketError::ConnectionRefused(peer));
        assert_eq!(host.stack.udp_take_error(connected), refused);
        assert_eq!(host.stack.udp_peer_addr(connected), Some(peer));
        assert_eq!(host.stack.udp_local_addr(connected), Some(at(family.host(1), port)));
        assert_eq!(host.stack.udp_local_addr(bound), Some(at(family.host(1), 53)));
        assert_eq!(host.stack.udp_local_addr(closed), None);
        assert_ne!(host.bind(at(family.unspecified(), 9)), closed);
        let taken = host.stack.udp_bind(at(family.host(1), 53), UdpOptions::default());
        assert_eq!(taken, Err(SocketError::AddressInUse(at(family.host(1), 53))));
        // A connected socket receives from its peer only.
        host.feed(&udp_frame(family, (4000, port), b"peer"));
        host.feed(&udp_frame(family, (4001, port), b"other"));
        assert_eq!(host.receive(connected).unwrap().2, b"peer");
        assert_eq!(host.receive(connected), None);
        host.stack.udp_disconnect(connected).unwrap();
        host.feed(&udp_frame(family, (4001, port), b"other"));
        assert_eq!(host.receive(connected).unwrap().2, b"other");
        host.sent();
        host.finish();
    });
}

#[test]
fn dual_stack_socket_keeps_mapped_addresses() {
    let mut host = TestHost::with_neighbour(2);
    let dual = UdpOptions::default().dual_stack(true);
    let socket = bind(&mut host, at(Family::V6.unspecified(), 53), dual);
    host.feed(&udp_frame(Family::V4, (4000, 53), b"four"));
    host.feed(&udp_frame(Family::V6, (4000, 53), b"six"));
    upgrade(&mut host, config(1));
    host.feed(&udp_frame(Family::V4, (4000, 53), b"four again"));
    let mapped = "[::ffff:192.0.2.2]:4000".parse().unwrap();
    assert_eq!(host.receive(socket).unwrap().0, mapped);
    assert_eq!(host.receive(socket).unwrap().0, at(Family::V6.host(2), 4000));
    assert_eq!(host.receive(socket).unwrap().0, mapped);
    host.finish();
}

#[test]
fn neighbours_groups_and_path_mtus_survive_upgrade() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 4000));
        let group = match family {
            Family::V4 => "239.1.2.3".parse().unwrap(),
            Family::V6 => "ff05::1234".parse().unwrap(),
        };
        host.stack.join_group(host.now_ns, group).unwrap();
        host.advance(3 * SECOND_NS);
        host.sent();
        host.send(socket, Some(at(family.host(2), 53)), &[1; 1400]);
        let sent = packet_of(&host.sent_one()).to_vec();
        host.feed(&frame(&packet_too_big(family.host(254), family.host(1), 1300, &sent)));
        let now_ns = 5 * SECOND_NS;
        upgrade_at(&mut host, config(1), now_ns);
        host.advance(3 * SECOND_NS);
        host.sent();
        // No neighbour is solicited, and two fragments leave.
        host.send(socket, Some(at(family.host(2), 53)), &[1; 1400]);
        assert_eq!(host.sent().len(), 2);
        let packet = udp_packet(family.host(2), group, (53, 4000), b"to all");
        let to = match group {
            IpAddr::V4(v4) => tidegate_wire::MacAddr::from_ipv4_group(v4),
            IpAddr::V6(v6) => tidegate_wire::MacAddr::from_ipv6_group(v6),
        };
        host.feed(&crate::kit::packets::frame_to(to, &packet));
        assert_eq!(host.receive(socket).unwrap().2, b"to all");
        // The path MTU entry expires when it would have without the upgrade.
        host.advance(600 * SECOND_NS);
        let TestHost { stack, arena, now_ns } = &mut host;
        stack.set_neighbour(*now_ns, family.host(2), Some(mac(2)), arena);
        host.sent();
        host.send(socket, Some(at(family.host(2), 53)), &[1; 1400]);
        assert_eq!(host.sent().len(), 1);
        host.finish();
    });
}

#[test]
fn counters_continue_after_upgrade() {
    let mut host = TestHost::with_neighbour(2);
    host.feed(&udp_frame(Family::V4, (4000, 53), b"nobody"));
    host.feed(&frame(&fragment(Family::V4.host(2), Family::V4.host(1), 9, 0, true, &[0; 64])));
    host.feed(&[0; 3]);
    host.sent();
    let before = host.stack.counters().clone();
    assert_eq!(before.held, 1);
    upgrade(&mut host, config(1));
    let after = host.stack.counters().clone();
    assert_eq!((after.received, after.held), (before.received, 0));
    assert_eq!(after.drops.total(), before.drops.total() + 1, "held fragments are not saved");
    assert_eq!(after.balance(), 0);
    host.finish();
}

/// Hosts with every kind of state, and the snapshot of the second host.
fn hosts_with_full_state(family: Family) -> (Hosts, StackSnapshot<'static>) {
    hosts_with_payload_bytes(family, 10_000)
}

/// Works like [`rich`], with about `bytes` bytes of data per segment or buffer.
fn hosts_with_payload_bytes(family: Family, bytes: usize) -> (Hosts, StackSnapshot<'static>) {
    let options = TcpOptions::default().no_delay(true);
    let mut hosts = Hosts::with_options(family, options, [config(1), config(2)]);
    let (client, server) = hosts.establish_connection();
    send(&mut hosts.pair.a, client, &vec![1; bytes / 2]);
    hosts.pair.run();
    for _ in 0..3 {
        send(&mut hosts.pair.b, server, &vec![2; bytes]);
    }
    let mut in_flight = hosts.pair.b.sent();
    in_flight.remove(0);
    in_flight.iter().for_each(|frame| hosts.pair.a.feed(frame));
    let acks = hosts.pair.a.sent();
    acks.iter().for_each(|frame| hosts.pair.b.feed(frame));
    // One connection unaccepted, one half-open, one in TIME-WAIT, one reset.
    let _ = hosts.establish_connection();
    let (client, server) = hosts.establish_connection();
    close(&mut hosts.pair.b, server);
    hosts.pair.run();
    close(&mut hosts.pair.a, client);
    hosts.pair.run();
    let (client, _) = hosts.establish_connection();
    hosts.pair.a.stack.tcp_abort(hosts.pair.a.now_ns, &mut hosts.pair.a.arena, client);
    hosts.pair.run();
    hosts.connect();
    hosts.pair.run();
    hosts.connect();
    let syn = hosts.pair.a.sent();
    syn.iter().for_each(|frame| hosts.pair.b.feed(frame));
    let host = &mut hosts.pair.b;
    let from = at(family.host(1), 9);
    let TestHost { stack, arena, now_ns } = host;
    let _ = stack.tcp_connect(*now_ns, arena, None, from, TcpOptions::default()).unwrap();
    let socket = host.bind(at(family.unspecified(), 53));
    let other = host.bind(at(family.unspecified(), 0));
    host.stack.udp_connect(other, at(family.host(1), 7)).unwrap();
    for payload in [b"one".as_slice(), b"two"] {
        let packet = udp_packet(family.host(1), family.host(2), (4000, 53), payload);
        host.feed(&crate::kit::packets::frame_to(mac(2), &packet));
    }
    assert_eq!(host.stack.udp_queue_len(socket), 2);
    let saved = host.stack.save(host.now_ns, &host.arena);
    (hosts, saved)
}

/// Uses every connection and socket of a stack restored from untrusted bytes.
fn exercise(mut stack: Stack, other: &mut TestHost, arena: &mut Arena) {
    let mut now_ns = 7 * SECOND_NS;
    let mut buf = vec![0; 1 << 16];
    for round in 0..6 {
        while let Some(event) = stack.poll_event() {
            match event {
                Event::TcpAcceptable(id) => while stack.tcp_accept(id).is_ok() {},
                Event::UdpReadable(id) => {
                    while let Some(datagram) = stack.udp_recv(arena, id) {
                        datagram.release(arena);
                    }
                }
                _ => {}
            }
        }
        for bits in (0..32_u64).flat_map(|index| (0..3).map(move |g| g << 32 | index)) {
            let id = tidegate_stack::TcpId::from_bits(bits);
            while let Ok(1..) = stack.tcp_recv(now_ns, arena, id, &mut buf) {}
            let _ = stack.tcp_send(now_ns, arena, id, &buf[..3000]);
            let _ = (stack.tcp_info(id), stack.tcp_readiness(id), stack.tcp_take_error(id));
            if round == 4 {
                stack.tcp_close(now_ns, arena, id);
            }
        }
        for _ in 0..20 {
            for frame in stack.transmit_queue().drain(..).collect::<Vec<_>>() {
                other.feed(arena.bytes(&frame));
                arena.free(frame);
            }
            for bytes in other.sent() {
                if let Some(frame) = arena.alloc_from(&bytes) {
                    stack.handle_frame(now_ns, frame, arena);
                }
            }
        }
        for _ in 0..200 {
            let Some(due_ns) = stack.next_timeout() else { break };
            now_ns = now_ns.max(due_ns.min(now_ns + SECOND_NS));
            stack.handle_timeout(now_ns, arena);
            for frame in stack.transmit_queue().drain(..).collect::<Vec<_>>() {
                arena.free(frame);
            }
        }
    }
    assert_eq!(stack.counters().balance(), 0);
    stack.release(arena);
    assert_eq!(arena.available(), crate::kit::FRAMES as usize);
}

#[test]
fn full_state_is_restored_and_usable() {
    for_each_family(|family| {
        let (mut hosts, saved) = hosts_with_full_state(family);
        let mut arena = fresh_arena();
        let mut bytes = Vec::new();
        let saved = encode_and_decode(&saved, &mut bytes);
        let stack = Stack::restore(config(2), saved, 7 * SECOND_NS, &mut arena).unwrap();
        assert_eq!(stack.tcp_connections(), hosts.pair.b.stack.tcp_connections());
        exercise(stack, &mut hosts.pair.a, &mut arena);
    });
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_damaged_state_is_refused_or_harmless(
        v6 in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let family = if v6 { Family::V6 } else { Family::V4 };
        let (mut hosts, saved) = hosts_with_full_state(family);
        let mut bytes = postcard::to_allocvec(&saved).unwrap();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] ^= value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let Ok(saved) = postcard::from_bytes::<StackSnapshot>(&bytes) else { return Ok(()) };
        let mut arena = fresh_arena();
        if let Ok(stack) = Stack::restore(config(2), saved, 7 * SECOND_NS, &mut arena) {
            exercise(stack, &mut hosts.pair.a, &mut arena);
        } else {
            prop_assert_eq!(arena.available(), crate::kit::FRAMES as usize);
        }
    }
}

/// Payload is most of a snapshot, and any payload is valid, so this snapshot has none.
#[test]
fn rejects_or_tolerates_any_corrupted_byte_of_small_state() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family);
        hosts.establish_connection();
        hosts.connect();
        hosts.pair.run();
        let server = hosts.accept();
        send(&mut hosts.pair.b, server, b"?");
        hosts.pair.b.bind(at(family.unspecified(), 53));
        let saved = hosts.pair.b.stack.save(hosts.pair.b.now_ns, &hosts.pair.b.arena);
        let good = postcard::to_allocvec(&saved).unwrap();
        let mut restored_count = 0;
        // All stacks share the arena and the other host, to save time.
        let (mut arena, mut other) = (fresh_arena(), TestHost::with_neighbour(2));
        for at in 0..good.len() {
            for value in [0, 0x7f, 0xff, good[at] ^ 1] {
                let mut bad = good.clone();
                bad[at] = value;
                let Ok(saved) = postcard::from_bytes::<StackSnapshot>(&bad) else { continue };
                let stack = Stack::restore(config(2), saved, 7 * SECOND_NS, &mut arena);
                if let Ok(stack) = stack {
                    restored_count += 1;
                    exercise(stack, &mut other, &mut arena);
                }
            }
        }
        assert!(restored_count > 100, "{restored_count}");
    });
}

/// `TIDEGATE_GOLDEN=write cargo test -p tidegate-stack` writes new seeds after a change of
/// the format.
#[test]
fn saved_stack_fuzz_seeds_match_state_format() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/saved_stack");
    let mut seeds = Vec::new();
    for (family, name) in [(Family::V4, "v4"), (Family::V6, "v6")] {
        let (_, saved) = hosts_with_payload_bytes(family, 100);
        let everything = postcard::to_allocvec(&saved).unwrap();
        let TestHost { stack, arena, now_ns } = &Hosts::new(family).pair.b;
        let listener = postcard::to_allocvec(&stack.save(*now_ns, arena)).unwrap();
        let mut later = listener.clone();
        later[0] += 1;
        let cut = everything[..everything.len() / 2].to_vec();
        seeds.push((format!("good_{name}_everything"), everything));
        seeds.push((format!("good_{name}_listener"), listener));
        seeds.push((format!("refused_{name}_version"), later));
        seeds.push((format!("unreadable_{name}_cut"), cut));
    }
    let may_write = std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write");
    for (at, (name, state)) in seeds.into_iter().enumerate() {
        let seed = [&[at as u8], &state[..]].concat();
        assert!(seed.len() < 4096, "{name}: the fuzzer truncates longer seeds");
        let path = corpus.join(&name);
        if may_write {
            std::fs::write(&path, &seed).unwrap();
        }
        assert!(std::fs::read(path).unwrap() == seed, "{name}: the format has changed");
    }
}

#[test]
fn rejects_other_state_version_with_its_number() {
    let (_, saved) = hosts_with_full_state(Family::V4);
    let mut bytes = postcard::to_allocvec(&saved).unwrap();
    assert_eq!(u32::from(bytes[0]), STATE_VERSION);
    bytes[0] += 1;
    let saved: StackSnapshot = postcard::from_bytes(&bytes).unwrap();
    let error = Stack::restore(config(2), saved, 0, &mut fresh_arena()).err().unwrap();
    assert_eq!(error, RestoreError::Version { found: STATE_VERSION + 1 });
    let text = error.to_string();
    assert!(text.contains("restart instead"), "{text}");
}

#[test]
fn rejects_state_above_limits_and_names_the_limit() {
    let (_, saved) = hosts_with_full_state(Family::V4);
    let mut small = [config(2), config(2), config(2)];
    small[0].limits.tcp_connections = 3;
    small[1].limits.sockets = 1;
    small[2].limits.tcp_buffer_bytes = 8192;
    for config in small {
        let refused = Stack::restore(config, saved.clone(), 0, &mut fresh_arena()).err().unwrap();
        assert!(matches!(refused, RestoreError::TooMany { .. }), "{refused}");
        assert!(refused.to_string().contains("raise the limit"));
    }
}

#[test]
fn rejects_state_whose_address_is_not_configured() {
    for_each_family(|family| {
        let (_, saved) = hosts_with_full_state(family);
        let ours = family.host(2);
        let mut moved = config(2);
        moved.addresses.retain(|cidr| cidr.address() != ours);
        let refused = Stack::restore(moved, saved, 0, &mut fresh_arena()).err().unwrap();
        assert_eq!(refused, RestoreError::Address(ours));
    });
}

#[test]
fn restores_ten_thousand_connections() {
    const CONNECTIONS: usize = 10_000;
    let mut hosts = Hosts::new(Family::V4);
    let pairs: Vec<_> = (0..CONNECTIONS).map(|_| hosts.establish_connection()).collect();
    hosts.upgrade();
    assert_eq!(hosts.pair.b.stack.tcp_connections(), CONNECTIONS);
    let writable_events =
        hosts.pair.b.events().into_iter().filter(|e| matches!(e, Event::TcpWritable(_)));
    assert_eq!(writable_events.count(), CONNECTIONS);
    for &(client, server) in pairs.iter().step_by(97) {
        send(&mut hosts.pair.a, client, b"still there");
        hosts.pair.run();
        assert_eq!(receive(&mut hosts.pair.b, server), b"still there");
    }
    let (client, server) = pairs[0];
    close(&mut hosts.pair.a, client);
    close(&mut hosts.pair.b, server);
    let listener =
        hosts.pair.b.stack.tcp_listen(at(Family::V4.unspecified(), 80), 1, TcpOptions::default());
    assert_eq!(listener, Err(TcpError::AddressInUse(at(Family::V4.unspecified(), 80))));
    hosts.pair.run();
    hosts.pair.finish();
}
