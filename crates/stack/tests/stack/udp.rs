//! Sockets: binding, connecting, sending, receiving, errors.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Checksum;
use tidegate_stack::{Event, SendError, SocketError, UdpId, UdpOptions};
use tidegate_wire::{DropReason, EthernetHeader, Ipv4Header, UdpHeader, VlanTag};

use crate::kit::packets::{frame_to, packet_of, pseudo, udp, udp_frame, udp_packet};
use crate::kit::{FRAMES, Family, Host, Pair, SECOND_NS, both, config, mac};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

#[test]
fn a_datagram_goes_there_and_back() {
    both(|family| {
        let mut pair = Pair::new();
        let server = pair.b.bind(at(family.any(), 53));
        let client = pair.a.bind(at(family.any(), 0));
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
fn a_received_frame_is_sent_back_without_a_copy() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let socket = host.bind(at(family.any(), 7));
        host.feed(&udp_frame(family, (4000, 7), b"echo"));
        let datagram = host.stack.udp_receive(&host.arena, socket).unwrap();
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
fn the_connected_socket_comes_before_the_bound_one_and_that_before_the_wildcard() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let options = UdpOptions { reuse_address: true, ..UdpOptions::default() };
        let mut bind = |ip| host.stack.udp_bind(at(ip, 53), options).unwrap();
        let connected = bind(family.host(1));
        host.stack.udp_connect(connected, at(family.host(2), 4000)).unwrap();
        let mut bind = |ip| host.stack.udp_bind(at(ip, 53), options).unwrap();
        let bound = bind(family.host(1));
        let wildcard = bind(family.any());
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
fn a_connected_socket_hears_only_its_peer_until_it_is_disconnected() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let socket = host.bind(at(family.any(), 53));
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
fn a_dual_stack_socket_speaks_both_and_maps_ipv4() {
    let mut host = Host::with_neighbour(2);
    let options = UdpOptions { dual_stack: true, ..UdpOptions::default() };
    let socket = host.stack.udp_bind(at(Family::V6.any(), 53), options).unwrap();
    host.feed(&udp_frame(Family::V4, (4000, 53), b"4"));
    host.feed(&udp_frame(Family::V6, (4000, 53), b"6"));
    let (remote, local, _) = host.receive(socket).unwrap();
    assert_eq!(remote, "[::ffff:192.0.2.2]:4000".parse().unwrap());
    assert_eq!(local, "::ffff:192.0.2.1".parse::<IpAddr>().unwrap());
    host.send(socket, Some(remote), b"back");
    let sent = host.sent_one();
    assert_eq!(Ipv4Header::parse(packet_of(&sent)).unwrap().0.ttl, 64);
    assert_eq!(host.receive(socket).unwrap().0, at(Family::V6.host(2), 4000));
    // The other way round it takes both places.
    let clash = host.stack.udp_bind(at(Family::V4.any(), 53), UdpOptions::default());
    assert!(matches!(clash, Err(SocketError::AddressInUse(_))));
    host.finish();
}

#[test]
fn a_plain_ipv6_socket_leaves_ipv4_alone() {
    let mut host = Host::with_neighbour(2);
    let v6 = host.bind(at(Family::V6.any(), 53));
    host.feed_dropped(&udp_frame(Family::V4, (4000, 53), b"4"), DropReason::UdpNoSocket);
    let v4 = host.bind(at(Family::V4.any(), 53));
    host.feed(&udp_frame(Family::V4, (4000, 53), b"4"));
    assert!(host.receive(v4).is_some() && host.receive(v6).is_none());
    host.finish();
}

#[test]
fn places_that_are_taken_are_refused() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let first = host.bind(at(family.host(1), 53));
        for ip in [family.host(1), family.any()] {
            let again = host.stack.udp_bind(at(ip, 53), UdpOptions::default());
            assert_eq!(again, Err(SocketError::AddressInUse(at(ip, 53))));
        }
        let foreign = host.stack.udp_bind(at(family.host(9), 53), UdpOptions::default());
        assert_eq!(foreign, Err(SocketError::AddressNotAvailable(family.host(9))));
        host.stack.udp_close(first, &mut host.arena);
        host.bind(at(family.any(), 53));
        host.finish();
    });
}

/// Which of these sockets get a datagram from each of so many ports of the peer.
fn takers(host: &mut Host, family: Family, sockets: &[UdpId], ports: u16) -> Vec<usize> {
    let mut taker = |port| {
        host.feed(&udp_frame(family, (4000 + port, 53), b"x"));
        let got = |host: &mut Host, id| host.receive(id).is_some();
        let took: Vec<_> = (0..sockets.len()).filter(|&at| got(host, sockets[at])).collect();
        assert_eq!(took.len(), 1, "{took:?}");
        took[0]
    };
    (0..ports).map(&mut taker).collect()
}

#[test]
fn sockets_that_agree_share_what_comes_by_who_sent_it() {
    both(|family| {
        for ip in [family.host(1), family.any()] {
            let mut host = Host::with_neighbour(2);
            let shared = UdpOptions { reuse_port: true, ..UdpOptions::default() };
            let local = at(ip, 53);
            let join = |host: &mut Host| host.stack.udp_bind(local, shared).unwrap();
            let mut sockets = vec![join(&mut host)];
            assert_eq!(takers(&mut host, family, &sockets, 10), [0; 10]);
            sockets.extend([join(&mut host), join(&mut host)]);
            let three = takers(&mut host, family, &sockets, 90);
            for at in 0..3 {
                let share = three.iter().filter(|&&taker| taker == at).count();
                assert!((10..=60).contains(&share), "{share} of 90");
            }
            assert_eq!(takers(&mut host, family, &sockets, 90), three, "a flow stays");
            // Only what falls to the new one moves.
            sockets.push(join(&mut host));
            let four = takers(&mut host, family, &sockets, 90);
            assert!(four.contains(&3));
            assert!(four.iter().zip(&three).all(|(now, then)| now == then || *now == 3));
            // What waits elsewhere stays when one leaves, and all else as it was.
            let kept = four.iter().position(|&taker| taker == 0).unwrap() as u16;
            host.feed(&udp_frame(family, (4000 + kept, 53), b"waits"));
            host.stack.udp_close(sockets.pop().unwrap(), &mut host.arena);
            assert_eq!(&*host.receive(sockets[0]).unwrap().2, b"waits");
            assert_eq!(takers(&mut host, family, &sockets, 90), three);
            // One that is connected is out of it, until it is no more.
            host.stack.udp_connect(sockets[2], at(family.host(2), 9)).unwrap();
            assert!(!takers(&mut host, family, &sockets, 90).contains(&2));
            host.stack.udp_disconnect(sockets[2]).unwrap();
            assert_eq!(takers(&mut host, family, &sockets, 90), three);
            for socket in sockets {
                host.stack.udp_close(socket, &mut host.arena);
            }
            host.bind(local);
            host.finish();
        }
    });
}

#[test]
fn a_port_is_shared_only_if_all_agree_and_are_of_one_user() {
    both(|family| {
        for ip in [family.host(1), family.any()] {
            let mut host = Host::quiet(config(1));
            let shared = UdpOptions { reuse_port: true, party: 7, ..UdpOptions::default() };
            let local = at(ip, 53);
            let first = host.stack.udp_bind(local, shared).unwrap();
            let alone = UdpOptions { reuse_port: false, ..shared };
            let other = UdpOptions { party: 8, ..shared };
            for ip in [family.host(1), family.any()] {
                for options in [alone, other] {
                    let taken = host.stack.udp_bind(at(ip, 53), options);
                    assert_eq!(taken, Err(SocketError::AddressInUse(at(ip, 53))));
                }
                host.stack.udp_bind(at(ip, 53), shared).unwrap();
            }
            // Also while the first is connected.
            host.stack.udp_connect(first, at(family.host(2), 9)).unwrap();
            assert!(host.stack.udp_bind(local, other).is_err());
            host.finish();
        }
    });
}

#[test]
fn of_sockets_that_reuse_an_address_the_last_one_bound_hears() {
    both(|family| {
        for ip in [family.host(1), family.any()] {
            let mut host = Host::with_neighbour(2);
            let reuse = UdpOptions { reuse_address: true, party: 7, ..UdpOptions::default() };
            let local = at(ip, 53);
            let join = |host: &mut Host, options| host.stack.udp_bind(local, options).unwrap();
            let mut sockets = vec![join(&mut host, reuse), join(&mut host, reuse)];
            assert_eq!(takers(&mut host, family, &sockets, 20), [1; 20]);
            // Not one that does not agree, or is another user's.
            for options in [UdpOptions { party: 8, ..reuse }, UdpOptions::default()] {
                let taken = host.stack.udp_bind(local, options);
                assert_eq!(taken, Err(SocketError::AddressInUse(local)));
            }
            // Those that share do so when one of them is the last.
            let share = UdpOptions { reuse_port: true, ..reuse };
            sockets.extend([join(&mut host, share), join(&mut host, share)]);
            let shared = takers(&mut host, family, &sockets, 40);
            assert!(shared.contains(&2) && shared.contains(&3));
            assert!(shared.iter().all(|&taker| taker >= 2), "{shared:?}");
            sockets.push(join(&mut host, reuse));
            assert_eq!(takers(&mut host, family, &sockets, 20), [4; 20]);
            host.stack.udp_close(sockets.pop().unwrap(), &mut host.arena);
            assert_eq!(takers(&mut host, family, &sockets, 40), shared);
            for socket in sockets {
                host.stack.udp_close(socket, &mut host.arena);
            }
            host.bind(local);
            host.finish();
        }
    });
}

#[test]
fn chosen_ports_differ_and_come_from_the_seed() {
    both(|family| {
        let choose = |seed| {
            let mut settings = config(1);
            settings.seed = [seed; 16];
            let mut host = Host::quiet(settings);
            let ports: Vec<_> = (0..50)
                .map(|_| {
                    let id = host.bind(at(family.any(), 0));
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
fn a_stale_id_is_an_error_and_never_another_socket() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let old = host.bind(at(family.any(), 53));
        host.stack.udp_close(old, &mut host.arena);
        let new = host.bind(at(family.any(), 53));
        assert_ne!(old, new);
        let to = at(family.host(2), 9);
        let sent = host.stack.udp_send(host.now_ns, &mut host.arena, old, Some(to), None, b"x");
        assert_eq!(sent, Err(SendError::Closed));
        assert_eq!(host.stack.udp_connect(old, to), Err(SocketError::Closed));
        assert_eq!(host.stack.udp_disconnect(old), Err(SocketError::Closed));
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert!(host.receive(old).is_none());
        assert_eq!((host.stack.udp_readable(old), host.stack.udp_readable(new)), (0, 1));
        host.stack.udp_close(old, &mut host.arena);
        assert!(host.receive(new).is_some());
        host.finish();
    });
}

#[test]
fn the_receive_queue_is_bounded_by_packets_and_by_bytes() {
    both(|family| {
        for (packets, bytes, fit) in [(3, 1000, 3), (100, 25, 2)] {
            let mut host = Host::with_neighbour(2);
            let options = UdpOptions {
                queue_packets: Some(packets),
                queue_bytes: Some(bytes),
                ..UdpOptions::default()
            };
            let socket = host.stack.udp_bind(at(family.any(), 53), options).unwrap();
            for _ in 0..10 {
                host.feed(&udp_frame(family, (4000, 53), &[1; 10]));
            }
            assert_eq!(host.stack.udp_readable(socket), fit);
            assert_eq!(host.drops(DropReason::SocketQueueFull), 10 - fit as u64);
            assert!(host.receive(socket).is_some());
            host.feed(&udp_frame(family, (4000, 53), &[1; 10]));
            assert_eq!(host.stack.udp_readable(socket), fit);
            host.stack.udp_close(socket, &mut host.arena);
            assert_eq!(host.drops(DropReason::SocketClosed), fit as u64);
            host.finish();
        }
    });
}

#[test]
fn readers_that_do_not_read_leave_frames_for_the_others() {
    both(|family| {
        for deaf in [1, 2, 40] {
            let mut host = Host::with_neighbour(2);
            let reader = host.bind(at(family.any(), 53));
            let deaf: Vec<_> = (0..deaf).map(|n| host.bind(at(family.any(), 1000 + n))).collect();
            for round in 0..2 * FRAMES as usize {
                let port = 1000 + (round % deaf.len()) as u16;
                host.feed(&udp_frame(family, (4000, port), &(round as u32).to_be_bytes()));
                host.feed(&udp_frame(family, (4000, 53), b"x"));
                assert!(host.receive(reader).is_some(), "{round}");
            }
            // Those that are there are the latest ones, and each has its share of them.
            let kept: Vec<_> = deaf.iter().map(|&id| host.stack.udp_readable(id)).collect();
            // With who reads.
            let share = FRAMES as usize / 2 / (deaf.len() + 1);
            assert!(kept.iter().all(|&kept| kept >= share), "{kept:?} of {share}");
            let total: usize = kept.iter().sum();
            assert!(total <= FRAMES as usize, "{total}");
            assert_eq!(
                host.drops(DropReason::SocketQueueFull),
                u64::from(2 * FRAMES) - total as u64
            );
            for (number, &id) in deaf.iter().enumerate() {
                let mut last = None;
                while let Some((_, _, bytes)) = host.receive(id) {
                    let round = u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize;
                    assert!(last.is_none_or(|last| round == last + deaf.len()));
                    last = Some(round);
                }
                assert_eq!(last.unwrap() % deaf.len(), number);
                assert!(last.unwrap() + deaf.len() >= 2 * FRAMES as usize);
            }
            host.finish();
        }
    });
}

#[test]
fn readable_is_told_once_until_it_is_taken() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let socket = host.bind(at(family.any(), 53));
        for _ in 0..5 {
            host.feed(&udp_frame(family, (4000, 53), b"x"));
            assert!(host.receive(socket).is_some());
        }
        assert_eq!(host.events(), [Event::Readable(socket)]);
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        host.feed(&udp_frame(family, (4000, 53), b"x"));
        assert_eq!(host.events(), [Event::Readable(socket)]);
        host.finish();
    });
}

#[test]
fn checksums_are_checked_unless_the_port_did() {
    both(|family| {
        let (from, to) = (family.host(2), family.host(1));
        let mut host = Host::with_neighbour(2);
        let socket = host.bind(at(family.any(), 53));
        let mut frame = udp_frame(family, (4000, 53), b"x");
        let field = frame.len() - 3;
        frame[field] ^= 0xff;
        host.feed_dropped(&frame, DropReason::UdpChecksum);
        for trusted in [Checksum::Verified, Checksum::Partial { start: 0, offset: 6 }] {
            let mut buffer = host.arena.alloc_from(&frame).unwrap();
            buffer.set_checksum(trusted);
            host.stack.ingest(host.now_ns, buffer, &mut host.arena);
            assert!(host.receive(socket).is_some());
        }
        // A field that holds only the sum of the pseudo-header is a sender on
        // this machine whose card would have done the rest.
        let unfilled = pseudo(from, to, 9).fold().to_be_bytes();
        let mut datagram = udp(from, to, (4000, 53), b"x");
        datagram[6..8].copy_from_slice(&unfilled);
        let packet = crate::kit::packets::ip(from, to, tidegate_wire::Protocol::UDP, &datagram);
        host.feed_dropped(&frame_to(mac(1), &packet), DropReason::UdpChecksumUnfilled);
        // No checksum at all is allowed over IPv4 only.
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
fn with_offload_the_field_holds_the_sum_of_the_pseudo_header() {
    both(|family| {
        let mut settings = config(1);
        settings.transmit_checksum = true;
        let mut host = Host::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.any(), 53));
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
fn what_cannot_be_sent_is_refused_with_the_reason() {
    both(|family| {
        let mut settings = config(1);
        settings.routes.clear();
        let mut host = Host::quiet(settings);
        let socket = host.bind(at(family.any(), 53));
        let mut send = |to: Option<SocketAddr>, from, payload: &[u8]| {
            let Host { stack, arena, now_ns } = &mut host;
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
        let stranger = family.host(7);
        let refused = send(Some(near), Some(stranger), b"x");
        assert_eq!(refused, SendError::SourceNotOurs(stranger));
        let huge = send(Some(near), None, &vec![0; 65_528]);
        assert!(matches!(huge, SendError::MessageTooLong { .. }));
        host.finish();
    });
}

#[test]
fn a_full_transmit_queue_or_an_empty_arena_says_try_again() {
    both(|family| {
        let mut settings = config(1);
        settings.limits.transmit_frames = 2;
        let mut host = Host::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.any(), 53));
        let to = Some(at(family.host(2), 9));
        host.send(socket, to, b"1");
        host.send(socket, to, b"2");
        let Host { stack, arena, now_ns } = &mut host;
        let third = stack.udp_send(*now_ns, arena, socket, to, None, b"3");
        assert_eq!(third, Err(SendError::WouldBlock));
        let frame = stack.udp_alloc(arena).unwrap();
        let third = stack.udp_send_frame(*now_ns, arena, socket, to, None, frame);
        assert_eq!(third, Err(SendError::WouldBlock));
        host.sent();
        let taken: Vec<_> = std::iter::from_fn(|| host.arena.alloc()).collect();
        let Host { stack, arena, now_ns } = &mut host;
        let starved = stack.udp_send(*now_ns, arena, socket, to, None, b"4");
        assert_eq!(starved, Err(SendError::WouldBlock));
        taken.into_iter().for_each(|frame| host.arena.free(frame));
        host.finish();
    });
}

#[test]
fn broadcast_and_groups_reach_every_listener() {
    let mut host = Host::with_neighbour(2);
    let wild = host.bind(at(Family::V4.any(), 67));
    let exact = host.stack.udp_bind(
        at("255.255.255.255".parse().unwrap(), 67),
        UdpOptions { reuse_address: true, ..UdpOptions::default() },
    );
    assert!(exact.is_err(), "the wildcard socket did not agree to share");
    for broadcast in ["255.255.255.255", "192.0.2.255"] {
        let packet = udp_packet(Family::V4.host(2), broadcast.parse().unwrap(), (68, 67), b"x");
        host.feed(&frame_to(tidegate_wire::MacAddr::BROADCAST, &packet));
        assert_eq!(host.receive(wild).unwrap().1, broadcast.parse::<IpAddr>().unwrap());
    }
    for (family, group) in [(Family::V4, "224.0.0.251"), (Family::V6, "ff02::fb")] {
        let group: IpAddr = group.parse().unwrap();
        let group_mac = match group {
            IpAddr::V4(v4) => tidegate_wire::MacAddr::of_ipv4_group(v4),
            IpAddr::V6(v6) => tidegate_wire::MacAddr::of_ipv6_group(v6),
        };
        let shared = UdpOptions { reuse_port: true, ..UdpOptions::default() };
        let mut join = || host.stack.udp_bind(at(family.any(), 5353), shared).unwrap();
        let sockets = [join(), join()];
        let frame = frame_to(group_mac, &udp_packet(family.host(2), group, (5353, 5353), b"x"));
        host.feed_dropped(&frame, DropReason::EthernetNotForUs);
        host.stack.join_group(host.now_ns, group).unwrap();
        host.feed(&frame);
        // Also each of those that share a port.
        for socket in sockets {
            assert_eq!(host.receive(socket).unwrap().1, group);
        }
        host.stack.leave_group(group);
        host.feed_dropped(&frame, DropReason::EthernetNotForUs);
    }
    host.finish();
}

#[test]
fn a_vlan_is_kept_to() {
    both(|family| {
        let mut settings = config(1);
        settings.vlan = Some(7);
        let mut host = Host::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.any(), 53));
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
fn without_a_link_header_packets_need_no_neighbours() {
    both(|family| {
        let mut settings = tidegate_stack::Config::ip([1; 16]);
        settings.addresses = config(1).addresses;
        let mut host = Host::new(settings);
        host.pass(3 * SECOND_NS);
        assert!(host.sent().is_empty());
        let socket = host.bind(at(family.any(), 53));
        host.feed(&udp_packet(family.host(2), family.host(1), (4000, 53), b"x"));
        let (remote, ..) = host.receive(socket).unwrap();
        host.send(socket, Some(remote), b"back");
        let expected = udp_packet(family.host(1), family.host(2), (53, 4000), b"back");
        assert_eq!(host.sent_one(), expected);
        host.finish();
    });
}

#[test]
fn many_addresses_live_on_one_interface() {
    both(|family| {
        let mut settings = config(1);
        for n in 100..200 {
            let bits = if family == Family::V4 { 24 } else { 64 };
            settings.addresses.push(format!("{}/{bits}", family.host(n)).parse().unwrap());
        }
        let mut host = Host::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.any(), 53));
        for n in [1, 100, 150, 199] {
            let packet = udp_packet(family.host(2), family.host(n), (4000, 53), b"x");
            host.feed(&frame_to(mac(1), &packet));
            let (remote, local, _) = host.receive(socket).unwrap();
            assert_eq!(local, family.host(n));
            let Host { stack, arena, now_ns } = &mut host;
            stack.udp_send(*now_ns, arena, socket, Some(remote), Some(local), b"x").unwrap();
            let expected = udp_packet(family.host(n), family.host(2), (53, 4000), b"x");
            assert_eq!(packet_of(&host.sent_one()), expected);
        }
        host.finish();
    });
}
