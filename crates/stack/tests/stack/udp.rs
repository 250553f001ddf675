//! UDP sockets: binding, connecting, sending, receiving, errors.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Checksum;
use tidegate_stack::{Event, SendError, SocketError, UdpId, UdpOptions, UdpSendOptions};
use tidegate_wire::{DropReason, EthernetHeader, Ipv4Header, UdpHeader, VlanTag};

use crate::kit::packets::{frame_to, packet_of, pseudo, udp, udp_frame, udp_packet};
use crate::kit::{FRAMES, Family, HostPair, SECOND_NS, TestHost, config, for_each_family, mac};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

#[test]
fn exchanges_request_and_reply() {
    for_each_family(|family| {
        let mut pair = HostPair::new();
        let server = pair.b.bind(at(family.unspecified(), 53));
        let client = pair.a.bind(at(family.unspecified(), 0));
        pair.a.send(client, Some(at(family.host(2), 53)), b"question");
        pair.run();
        let (remote, local, question) = pair.b.receive(server).unwrap();
        assert_eq!(
            (remote.ip(), local, &*question),
            (family.host(1), family.host(2), &b"question"[..])
        );
        pair.b.send(server, Some(remote), b"answer");
        pair.run();
        let (remote, _, answer) = pair.a.receive(client).unwrap();
        assert_eq!((remote, &*answer), (at(family.host(2), 53), &b"answer"[..]));
        assert!(pair.a.receive(client).is_none());
        pair.finish();
    });
}

#[test]
fn sends_received_frame_back_without_copy() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 7));
        host.feed(&udp_frame(family, (4000, 7), b"echo"));
        let datagram = host.stack.udp_recv(&host.arena, socket).unwrap();
        let (to, from) = (datagram.remote, datagram.local);
        let frame = datagram.into_frame().unwrap();
        let free = host.arena.available();
        host.stack
            .udp_send_frame(host.now_ns, &mut host.arena, socket, Some(to), Some(from), frame)
            .unwrap();
        assert_eq!(host.arena.available(), free);
        let expected = udp_packet(family.host(1), family.host(2), (7, 4000), b"echo");
        assert_eq!(packet_of(&host.sent_one()), expected);
        host.finish();
    });
}

#[test]
fn prefers_connected_then_bound_then_wildcard_socket() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let options = UdpOptions::default().reuse_address(true);
        let mut bind = |ip| host.stack.udp_bind(at(ip, 53), options).unwrap();
        let connected = bind(family.host(1));
        host.stack.udp_connect(connected, at(family.host(2), 4000)).unwrap();
        let mut bind = |ip| host.stack.udp_bind(at(ip, 53), options).unwrap();
        let bound = bind(family.host(1));
        let wildcard = bind(family.unspecified());
        for (source_port, expected) in [(4000, connected), (4001, bound)] {
            host.feed(&udp_frame(family, (source_port, 53), b"x"));
            for socket in [connected, bound, wildcard] {
                assert_eq!(host.receive(socket).is_some(), socket == expected);
            }
        }
        host.stack.udp_close(bound, &mut host.arena);
        host.feed(&udp_frame(family, (4001, 53), b"x"));
        assert!(host.receive(wildcard).is_some());
        host.finish();
    });
}

#[test]
fn connected_socket_receives_only_from_its_peer() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 53));
        host.stack.udp_connect(socket, at(family.host(2), 4000)).unwrap();
        assert_eq!(host.stack.udp_local_addr(socket), Some(at(family.host(1), 53)));
        assert_eq!(host.stack.udp_peer_addr(socket), Some(at(family.host(2), 4000)));
        host.feed_dropped(&udp_frame(family, (4001, 53), b"x"), DropReason::UdpNoSocket);
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert!(host.receive(socket).is_some());
        host.stack.udp_disconnect(socket).unwrap();
        assert_eq!(host.stack.udp_peer_addr(socket), None);
        host.feed(&udp_frame(family, (4001, 53), b"x"));
        assert!(host.receive(socket).is_some());
        host.finish();
    });
}

#[test]
fn dual_stack_socket_serves_both_families_and_maps_ipv4() {
    let mut host = TestHost::with_neighbour(2);
    let options = UdpOptions::default().dual_stack(true);
    let socket = host.stack.udp_bind(at(Family::V6.unspecified(), 53), options).unwrap();
    host.feed(&udp_frame(Family::V4, (4000, 53), b"4"));
    host.feed(&udp_frame(Family::V6, (4000, 53), b"6"));
    let (remote, local, _) = host.receive(socket).unwrap();
    assert_eq!(remote, "[::ffff:192.0.2.2]:4000".parse().unwrap());
    assert_eq!(local, "::ffff:192.0.2.1".parse::<IpAddr>().unwrap());
    host.send(socket, Some(remote), b"back");
    let sent = host.sent_one();
    assert_eq!(Ipv4Header::parse(packet_of(&sent)).unwrap().0.ttl, 64);
    assert_eq!(host.receive(socket).unwrap().0, at(Family::V6.host(2), 4000));
    // A dual-stack socket occupies the IPv4 port too.
    let clash = host.stack.udp_bind(at(Family::V4.unspecified(), 53), UdpOptions::default());
    assert!(matches!(clash, Err(SocketError::AddressInUse(_))));
    host.finish();
}

#[test]
fn ipv6_only_socket_leaves_ipv4_port_free() {
    let mut host = TestHost::with_neighbour(2);
    let v6 = host.bind(at(Family::V6.unspecified(), 53));
    host.feed_dropped(&udp_frame(Family::V4, (4000, 53), b"4"), DropReason::UdpNoSocket);
    let v4 = host.bind(at(Family::V4.unspecified(), 53));
    host.feed(&udp_frame(Family::V4, (4000, 53), b"4"));
    assert!(host.receive(v4).is_some() && host.receive(v6).is_none());
    host.finish();
}

#[test]
fn rejects_bind_to_used_or_foreign_address() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let first = host.bind(at(family.host(1), 53));
        for ip in [family.host(1), family.unspecified()] {
            let again = host.stack.udp_bind(at(ip, 53), UdpOptions::default());
            assert_eq!(again, Err(SocketError::AddressInUse(at(ip, 53))));
        }
        let foreign = host.stack.udp_bind(at(family.host(9), 53), UdpOptions::default());
        assert_eq!(foreign, Err(SocketError::AddressNotAvailable(family.host(9))));
        host.stack.udp_close(first, &mut host.arena);
        host.bind(at(family.unspecified(), 53));
        host.finish();
    });
}

/// Sends a datagram from each of `ports` peer ports; returns the index of its receiver.
fn receivers_by_source_port(
    host: &mut TestHost,
    family: Family,
    sockets: &[UdpId],
    ports: u16,
) -> Vec<usize> {
    let mut receiver = |port| {
        host.feed(&udp_frame(family, (4000 + port, 53), b"x"));
        let got = |host: &mut TestHost, id| host.receive(id).is_some();
        let took: Vec<_> = (0..sockets.len()).filter(|&at| got(host, sockets[at])).collect();
        assert_eq!(took.len(), 1, "{took:?}");
        took[0]
    };
    (0..ports).map(&mut receiver).collect()
}

#[test]
fn reuse_port_group_distributes_datagrams_by_source() {
    for_each_family(|family| {
        for ip in [family.host(1), family.unspecified()] {
            let mut host = TestHost::with_neighbour(2);
            let shared = UdpOptions::default().reuse_port(true);
            let local = at(ip, 53);
            let join = |host: &mut TestHost| host.stack.udp_bind(local, shared).unwrap();
            let mut sockets = vec![join(&mut host)];
            assert_eq!(receivers_by_source_port(&mut host, family, &sockets, 10), [0; 10]);
            sockets.extend([join(&mut host), join(&mut host)]);
            let three = receivers_by_source_port(&mut host, family, &sockets, 90);
            for at in 0..3 {
                let share = three.iter().filter(|&&taker| taker == at).count();
                assert!((10..=60).contains(&share), "{share} of 90");
            }
            assert_eq!(
                receivers_by_source_port(&mut host, family, &sockets, 90),
                three,
                "flows keep their sockets"
            );
            // A joining socket takes over flows; all other flows stay.
            sockets.push(join(&mut host));
            let four = receivers_by_source_port(&mut host, family, &sockets, 90);
            assert!(four.contains(&3));
            assert!(four.iter().zip(&three).all(|(now, then)| now == then || *now == 3));
            // When a socket leaves, datagrams queued at the others and all other flows stay.
            let kept = four.iter().position(|&taker| taker == 0).unwrap() as u16;
            host.feed(&udp_frame(family, (4000 + kept, 53), b"waits"));
            host.stack.udp_close(sockets.pop().unwrap(), &mut host.arena);
            assert_eq!(&*host.receive(sockets[0]).unwrap().2, b"waits");
            assert_eq!(receivers_by_source_port(&mut host, family, &sockets, 90), three);
            // A connected socket is out of the group until it is disconnected.
            host.stack.udp_connect(sockets[2], at(family.host(2), 9)).unwrap();
            assert!(!receivers_by_source_port(&mut host, family, &sockets, 90).contains(&2));
            host.stack.udp_disconnect(sockets[2]).unwrap();
            assert_eq!(receivers_by_source_port(&mut host, family, &sockets, 90), three);
            for socket in sockets {
                host.stack.udp_close(socket, &mut host.arena);
            }
            host.bind(local);
            host.finish();
        }
    });
}

#[test]
fn reuse_port_requires_option_on_all_and_same_owner() {
    for_each_family(|family| {
        for ip in [family.host(1), family.unspecified()] {
            let mut host = TestHost::quiet(config(1));
            let shared = UdpOptions::default().reuse_port(true).owner(7);
            let local = at(ip, 53);
            let first = host.stack.udp_bind(local, shared).unwrap();
            let exclusive = shared.reuse_port(false);
            let other = shared.owner(8);
            for ip in [family.host(1), family.unspecified()] {
                for options in [exclusive, other] {
                    let taken = host.stack.udp_bind(at(ip, 53), options);
                    assert_eq!(taken, Err(SocketError::AddressInUse(at(ip, 53))));
                }
                host.stack.udp_bind(at(ip, 53), shared).unwrap();
            }
            // The rule also holds while the first socket is connected.
            host.stack.udp_connect(first, at(family.host(2), 9)).unwrap();
            assert!(host.stack.udp_bind(local, other).is_err());
            host.finish();
        }
    });
}

#[test]
fn reuse_address_delivers_to_last_bound_socket() {
    for_each_family(|family| {
        for ip in [family.host(1), family.unspecified()] {
            let mut host = TestHost::with_neighbour(2);
            let reuse = UdpOptions::default().reuse_address(true).owner(7);
            let local = at(ip, 53);
            let join = |host: &mut TestHost, options| host.stack.udp_bind(local, options).unwrap();
            let mut sockets = vec![join(&mut host, reuse), join(&mut host, reuse)];
            assert_eq!(receivers_by_source_port(&mut host, family, &sockets, 20), [1; 20]);
            // A socket without the option, or of another owner, is refused.
            for options in [reuse.owner(8), UdpOptions::default()] {
                let taken = host.stack.udp_bind(local, options);
                assert_eq!(taken, Err(SocketError::AddressInUse(local)));
            }
            // Sockets with `reuse_port` share datagrams when one of them was bound last.
            let share = reuse.reuse_port(true);
            sockets.extend([join(&mut host, share), join(&mut host, share)]);
            let shared = receivers_by_source_port(&mut host, family, &sockets, 40);
            assert!(shared.contains(&2) && shared.contains(&3));
            assert!(shared.iter().all(|&taker| taker >= 2), "{shared:?}");
            sockets.push(join(&mut host, reuse));
            assert_eq!(receivers_by_source_port(&mut host, family, &sockets, 20), [4; 20]);
            host.stack.udp_close(sockets.pop().unwrap(), &mut host.arena);
            assert_eq!(receivers_by_source_port(&mut host, family, &sockets, 40), shared);
            for socket in sockets {
                host.stack.udp_close(socket, &mut host.arena);
            }
            host.bind(local);
            host.finish();
        }
    });
}

#[test]
fn ephemeral_ports_are_distinct_and_depend_on_seed() {
    for_each_family(|family| {
        let choose = |seed| {
            let mut settings = config(1);
            settings.seed = [seed; 16];
            let mut host = TestHost::quiet(settings);
            let ports: Vec<_> = (0..50)
                .map(|_| {
                    let id = host.bind(at(family.unspecified(), 0));
                    host.stack.udp_local_addr(id).unwrap().port()
                })
                .collect();
            ports
        };
        let ports = choose(1);
        let distinct: std::collections::HashSet<_> = ports.iter().collect();
        assert_eq!(distinct.len(), 50);
        assert!(ports.iter().all(|&port| port >= 32_768));
        assert_eq!(ports, choose(1));
        assert_ne!(ports, choose(2));
    });
}

#[test]
fn rejects_stale_id() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let old = host.bind(at(family.unspecified(), 53));
        host.stack.udp_close(old, &mut host.arena);
        let new = host.bind(at(family.unspecified(), 53));
        assert_ne!(old, new);
        let to = at(family.host(2), 9);
        let sent = host.stack.udp_send(host.now_ns, &mut host.arena, old, Some(to), None, b"x");
        assert_eq!(sent, Err(SendError::Closed));
        assert_eq!(host.stack.udp_connect(old, to), Err(SocketError::Closed));
        assert_eq!(host.stack.udp_disconnect(old), Err(SocketError::Closed));
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert!(host.receive(old).is_none());
        assert_eq!((host.stack.udp_queue_len(old), host.stack.udp_queue_len(new)), (0, 1));
        host.stack.udp_close(old, &mut host.arena);
        assert!(host.receive(new).is_some());
        host.finish();
    });
}

#[test]
fn receive_queue_is_bounded_by_packets_and_bytes() {
    for_each_family(|family| {
        for (packets, bytes, fit) in [(3, 1000, 3), (100, 25, 2)] {
            let mut host = TestHost::with_neighbour(2);
            let options = UdpOptions::default().queue_packets(packets).queue_bytes(bytes);
            let socket = host.stack.udp_bind(at(family.unspecified(), 53), options).unwrap();
            for _ in 0..10 {
                host.feed(&udp_frame(family, (4000, 53), &[1; 10]));
            }
            assert_eq!(host.stack.udp_queue_len(socket), fit);
            assert_eq!(host.drops(DropReason::SocketQueueFull), 10 - fit as u64);
            assert!(host.receive(socket).is_some());
            host.feed(&udp_frame(family, (4000, 53), &[1; 10]));
            assert_eq!(host.stack.udp_queue_len(socket), fit);
            host.stack.udp_close(socket, &mut host.arena);
            assert_eq!(host.drops(DropReason::SocketClosed), fit as u64);
            host.finish();
        }
    });
}

#[test]
fn empty_receive_queue_takes_a_datagram_of_any_length() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let options = UdpOptions::default().queue_bytes(10);
        let socket = host.stack.udp_bind(at(family.unspecified(), 7), options).unwrap();
        for len in [1000, 11, 10] {
            host.feed(&udp_frame(family, (4000, 7), &vec![1; len]));
            host.feed_dropped(&udp_frame(family, (4000, 7), b"x"), DropReason::SocketQueueFull);
            assert_eq!(host.receive(socket).unwrap().2.len(), len);
        }
        // What was longer than the limit has not made the limit larger.
        for _ in 0..2 {
            host.feed(&udp_frame(family, (4000, 7), &[1; 5]));
        }
        host.feed_dropped(&udp_frame(family, (4000, 7), b"x"), DropReason::SocketQueueFull);
        host.finish();
    });
}

#[test]
fn socket_connected_to_port_zero_has_an_address_and_no_peer() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 7));
        host.stack.udp_connect(socket, at(family.host(2), 0)).unwrap();
        assert_eq!(host.stack.udp_local_addr(socket), Some(at(family.host(1), 7)));
        assert_eq!(host.stack.udp_peer_addr(socket), None);
        host.feed_dropped(&udp_frame(family, (4000, 7), b"x"), DropReason::UdpNoSocket);
        host.sent();
        host.stack.udp_disconnect(socket).unwrap();
        host.feed(&udp_frame(family, (4000, 7), b"x"));
        assert!(host.receive(socket).is_some());
        host.finish();
    });
}

#[test]
fn datagram_may_have_header_fields_of_its_own() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let options = UdpOptions::default().hop_limit(9).traffic_class(4);
        let to = Some(at(family.host(2), 9));
        for (socket_options, usual) in [(UdpOptions::default(), (64, 0)), (options, (9, 4))] {
            let socket = host.stack.udp_bind(at(family.unspecified(), 0), socket_options).unwrap();
            for (options, (hop_limit, traffic_class)) in [
                (UdpSendOptions::default(), usual),
                (UdpSendOptions::default().hop_limit(1), (1, usual.1)),
                (UdpSendOptions::default().traffic_class(0xb8), (usual.0, 0xb8)),
                (UdpSendOptions::default().hop_limit(255).traffic_class(0), (255, 0)),
                (UdpSendOptions::default(), usual),
            ] {
                let TestHost { stack, arena, now_ns } = &mut host;
                stack.udp_send(*now_ns, arena, socket, to, options, b"x").unwrap();
                let sent = host.sent_one();
                let found = match *packet_of(&sent) {
                    [0x45, traffic_class, _, _, _, _, _, _, hop_limit, ..] => {
                        (hop_limit, traffic_class)
                    }
                    [first, second, _, _, _, _, _, hop_limit, ..] => {
                        (hop_limit, first << 4 | second >> 4)
                    }
                    _ => unreachable!("a packet has a header"),
                };
                assert_eq!(found, (hop_limit, traffic_class));
            }
        }
        host.finish();
    });
}

#[test]
fn idle_readers_leave_frames_to_other_sockets() {
    for_each_family(|family| {
        for idle_count in [1, 2, 40] {
            let mut host = TestHost::with_neighbour(2);
            let reader = host.bind(at(family.unspecified(), 53));
            let idle: Vec<_> =
                (0..idle_count).map(|n| host.bind(at(family.unspecified(), 1000 + n))).collect();
            for round in 0..2 * FRAMES as usize {
                let port = 1000 + (round % idle.len()) as u16;
                host.feed(&udp_frame(family, (4000, port), &(round as u32).to_be_bytes()));
                host.feed(&udp_frame(family, (4000, 53), b"x"));
                assert!(host.receive(reader).is_some(), "{round}");
            }
            // Each idle socket keeps its share of frames, and keeps the latest ones.
            let kept: Vec<_> = idle.iter().map(|&id| host.stack.udp_queue_len(id)).collect();
            // The reading socket counts for one share.
            let share = FRAMES as usize / 2 / (idle.len() + 1);
            assert!(kept.iter().all(|&kept| kept >= share), "{kept:?} of {share}");
            let total: usize = kept.iter().sum();
            assert!(total <= FRAMES as usize, "{total}");
            assert_eq!(
                host.drops(DropReason::SocketQueueFull),
                u64::from(2 * FRAMES) - total as u64
            );
            for (number, &id) in idle.iter().enumerate() {
                let mut last = None;
                while let Some((_, _, bytes)) = host.receive(id) {
                    let round = u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize;
                    assert!(last.is_none_or(|last| round == last + idle.len()));
                    last = Some(round);
                }
                assert_eq!(last.unwrap() % idle.len(), number);
                assert!(last.unwrap() + idle.len() >= 2 * FRAMES as usize);
            }
            host.finish();
        }
    });
}

#[test]
fn reports_readable_once_until_event_is_polled() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 53));
        for _ in 0..5 {
            host.feed(&udp_frame(family, (4000, 53), b"x"));
            assert!(host.receive(socket).is_some());
        }
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert_eq!(host.events(), [Event::UdpReadable(socket)]);
        host.finish();
    });
}

#[test]
fn verifies_checksum_unless_device_did() {
    for_each_family(|family| {
        let (from, to) = (family.host(2), family.host(1));
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 53));
        let mut frame = udp_frame(family, (4000, 53), b"x");
        let field = frame.len() - 3;
        frame[field] ^= 0xff;
        host.feed_dropped(&frame, DropReason::UdpChecksum);
        for trusted in [Checksum::Verified, Checksum::Partial { start: 0, offset: 6 }] {
            let mut buffer = host.arena.alloc_from(&frame).unwrap();
            buffer.set_checksum(trusted);
            host.stack.handle_frame(host.now_ns, buffer, &mut host.arena);
            assert!(host.receive(socket).is_some());
        }
        // A field with only the pseudo-header sum comes from a sender on this machine whose
        // NIC would have completed the checksum.
        let unfilled = pseudo(from, to, 9).fold().to_be_bytes();
        let mut datagram = udp(from, to, (4000, 53), b"x");
        datagram[6..8].copy_from_slice(&unfilled);
        let packet = crate::kit::packets::ip(from, to, tidegate_wire::Protocol::UDP, &datagram);
        host.feed_dropped(&frame_to(mac(1), &packet), DropReason::UdpChecksumUnfilled);
        // Only IPv4 allows a datagram without checksum.
        datagram[6..8].copy_from_slice(&[0, 0]);
        let packet = crate::kit::packets::ip(from, to, tidegate_wire::Protocol::UDP, &datagram);
        match family {
            Family::V4 => host.feed(&frame_to(mac(1), &packet)),
            Family::V6 => {
                host.feed_dropped(&frame_to(mac(1), &packet), DropReason::UdpChecksumMissing);
            }
        }
        assert_eq!(host.receive(socket).is_some(), family == Family::V4);
        host.finish();
    });
}

#[test]
fn checksum_offload_leaves_pseudo_header_sum_in_field() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.transmit_checksum = true;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.unspecified(), 53));
        host.send(socket, Some(at(family.host(2), 9)), b"payload");
        let frame = host.stack.transmit_queue().pop_front().unwrap();
        let start = EthernetHeader::BYTES + family.header_bytes();
        assert_eq!(frame.checksum(), Checksum::Partial { start: start as u16, offset: 6 });
        let udp = UdpHeader::parse(&host.arena.bytes(&frame)[start..]).unwrap().0;
        assert_eq!(udp.checksum, pseudo(family.host(1), family.host(2), 15).fold());
        host.arena.free(frame);
        host.finish();
    });
}

#[test]
fn send_errors_name_the_reason() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.routes.clear();
        let mut host = TestHost::quiet(settings);
        let socket = host.bind(at(family.unspecified(), 53));
        let mut send = |to: Option<SocketAddr>, from: Option<IpAddr>, payload: &[u8]| {
            let TestHost { stack, arena, now_ns } = &mut host;
            stack.udp_send(*now_ns, arena, socket, to, from, payload).unwrap_err()
        };
        let near = at(family.host(2), 9);
        let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
        assert_eq!(send(None, None, b"x"), SendError::NotConnected);
        let zero = at(family.host(2), 0);
        assert_eq!(send(Some(zero), None, b"x"), SendError::DestinationInvalid(zero));
        let alien = at(other.host(2), 9);
        assert_eq!(send(Some(alien), None, b"x"), SendError::DestinationInvalid(alien));
        let far = family.far_host();
        assert_eq!(send(Some(at(far, 9)), None, b"x"), SendError::NetworkUnreachable(far));
        let foreign = family.host(7);
        let refused = send(Some(near), Some(foreign), b"x");
        assert_eq!(refused, SendError::SourceNotLocal(foreign));
        let huge = send(Some(near), None, &vec![0; 65_528]);
        assert!(matches!(huge, SendError::MessageTooLong { .. }));
        host.finish();
    });
}

#[test]
fn full_transmit_queue_or_empty_arena_returns_would_block() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.limits.transmit_frames = 2;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.unspecified(), 53));
        let to = Some(at(family.host(2), 9));
        host.send(socket, to, b"1");
        host.send(socket, to, b"2");
        let TestHost { stack, arena, now_ns } = &mut host;
        let third = stack.udp_send(*now_ns, arena, socket, to, None, b"3");
        assert_eq!(third, Err(SendError::WouldBlock));
        let frame = stack.udp_alloc(arena).unwrap();
        let third = stack.udp_send_frame(*now_ns, arena, socket, to, None, frame);
        assert_eq!(third, Err(SendError::WouldBlock));
        host.sent();
        let taken: Vec<_> = std::iter::from_fn(|| host.arena.alloc()).collect();
        let TestHost { stack, arena, now_ns } = &mut host;
        let without_memory = stack.udp_send(*now_ns, arena, socket, to, None, b"4");
        assert_eq!(without_memory, Err(SendError::WouldBlock));
        taken.into_iter().for_each(|frame| host.arena.free(frame));
        host.finish();
    });
}

#[test]
fn broadcast_and_multicast_reach_every_bound_socket() {
    let mut host = TestHost::with_neighbour(2);
    let wild = host.bind(at(Family::V4.unspecified(), 67));
    let exact = host.stack.udp_bind(
        at("255.255.255.255".parse().unwrap(), 67),
        UdpOptions::default().reuse_address(true),
    );
    assert!(exact.is_err(), "the wildcard socket is bound without reuse_address");
    for broadcast in ["255.255.255.255", "192.0.2.255"] {
        let packet = udp_packet(Family::V4.host(2), broadcast.parse().unwrap(), (68, 67), b"x");
        host.feed(&frame_to(tidegate_wire::MacAddr::BROADCAST, &packet));
        assert_eq!(host.receive(wild).unwrap().1, broadcast.parse::<IpAddr>().unwrap());
    }
    for (family, group) in [(Family::V4, "224.0.0.251"), (Family::V6, "ff02::fb")] {
        let group: IpAddr = group.parse().unwrap();
        let group_mac = match group {
            IpAddr::V4(v4) => tidegate_wire::MacAddr::from_ipv4_group(v4),
            IpAddr::V6(v6) => tidegate_wire::MacAddr::from_ipv6_group(v6),
        };
        let shared = UdpOptions::default().reuse_port(true);
        let mut join = || host.stack.udp_bind(at(family.unspecified(), 5353), shared).unwrap();
        let sockets = [join(), join()];
        let frame = frame_to(group_mac, &udp_packet(family.host(2), group, (5353, 5353), b"x"));
        host.feed_dropped(&frame, DropReason::EthernetNotForUs);
        host.stack.join_group(host.now_ns, group).unwrap();
        host.feed(&frame);
        // Every socket that shares the port gets a copy.
        for socket in sockets {
            assert_eq!(host.receive(socket).unwrap().1, group);
        }
        host.stack.leave_group(group);
        host.feed_dropped(&frame, DropReason::EthernetNotForUs);
    }
    host.finish();
}

#[test]
fn receives_and_sends_only_in_its_vlan() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.vlan = Some(7);
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.unspecified(), 53));
        let tagged = |id| {
            let packet = udp_packet(family.host(2), family.host(1), (4000, 53), b"x");
            let plain = frame_to(mac(1), &packet);
            let mut header = EthernetHeader::parse(&plain).unwrap().0;
            header.vlan = Some(VlanTag::new(id));
            let mut bytes = vec![0; 18 + packet.len()];
            header.emit(&mut bytes).unwrap().copy_from_slice(&packet);
            bytes
        };
        host.feed_dropped(&udp_frame(family, (4000, 53), b"x"), DropReason::VlanNotForUs);
        host.feed_dropped(&tagged(8), DropReason::VlanNotForUs);
        host.feed(&tagged(7));
        let (remote, ..) = host.receive(socket).unwrap();
        host.send(socket, Some(remote), b"back");
        let sent = host.sent_one();
        assert_eq!(EthernetHeader::parse(&sent).unwrap().0.vlan.map(VlanTag::id), Some(7));
        host.finish();
    });
}

#[test]
fn sends_without_neighbour_resolution_on_ip_medium() {
    for_each_family(|family| {
        let mut settings = tidegate_stack::Config::ip([1; 16]);
        settings.addresses = config(1).addresses;
        let mut host = TestHost::new(settings);
        host.advance(3 * SECOND_NS);
        assert!(host.sent().is_empty());
        let socket = host.bind(at(family.unspecified(), 53));
        host.feed(&udp_packet(family.host(2), family.host(1), (4000, 53), b"x"));
        let (remote, ..) = host.receive(socket).unwrap();
        host.send(socket, Some(remote), b"back");
        let expected = udp_packet(family.host(1), family.host(2), (53, 4000), b"back");
        assert_eq!(host.sent_one(), expected);
        host.finish();
    });
}

#[test]
fn serves_many_addresses_on_one_interface() {
    for_each_family(|family| {
        let mut settings = config(1);
        for n in 100..200 {
            let bits = if family == Family::V4 { 24 } else { 64 };
            settings.addresses.push(format!("{}/{bits}", family.host(n)).parse().unwrap());
        }
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.unspecified(), 53));
        for n in [1, 100, 150, 199] {
            let packet = udp_packet(family.host(2), family.host(n), (4000, 53), b"x");
            host.feed(&frame_to(mac(1), &packet));
            let (remote, local, _) = host.receive(socket).unwrap();
            assert_eq!(local, family.host(n));
            let TestHost { stack, arena, now_ns } = &mut host;
            stack.udp_send(*now_ns, arena, socket, Some(remote), Some(local), b"x").unwrap();
            let expected = udp_packet(family.host(n), family.host(2), (53, 4000), b"x");
            assert_eq!(packet_of(&host.sent_one()), expected);
        }
        host.finish();
    });
}
