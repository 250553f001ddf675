//! ARP and neighbour discovery, with hostile input of class 7 (neighbour messages).

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use tidegate_stack::{AddressOwnership, Event, SocketError};
use tidegate_wire::ipv6_extension::upper_layer;
use tidegate_wire::mld::{self, MldMessage};
use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{
    ArpOperation, ArpPacket, DropReason, EtherType, EthernetHeader, Icmpv6Message, Ipv6Header,
    MacAddr, NdpMessage, NeighbourAdvertisement,
};

use crate::kit::packets::{
    arp, arp_frame, ethernet, frame, frame_to, icmpv6_with_hops, ndp_frame, packet_of,
};
use crate::kit::{Family, HostPair, SECOND_NS, TestHost, config, for_each_family, mac};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

fn v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V6(v6) => v6,
        IpAddr::V4(_) => panic!("{ip} is no IPv6 address"),
    }
}

/// ARP reply or neighbour advertisement from host `n` at hardware address `from`, to host 1.
fn reply_frame(family: Family, n: u8, from: MacAddr, solicited: bool, overrides: bool) -> Vec<u8> {
    match family {
        Family::V4 => {
            let packet = ArpPacket { sender_mac: from, ..arp(ArpOperation::Reply, n, 1) };
            arp_frame(mac(1), packet)
        }
        Family::V6 => ndp_frame(
            family.host(n),
            family.host(1),
            NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
                router: false,
                solicited,
                overrides,
                target: v6(family.host(n)),
                target_mac: Some(from),
            }),
        ),
    }
}

/// Destination hardware address of the next datagram to host 2.
fn next_frame_destination(host: &mut TestHost, family: Family) -> MacAddr {
    let socket = host.bind(at(family.unspecified(), 0));
    host.send(socket, Some(at(family.host(2), 9)), b"x");
    host.stack.udp_close(socket, &mut host.arena);
    let sent = host.sent();
    let data = sent.last().expect("a frame was sent");
    let header = EthernetHeader::parse(data).unwrap().0;
    assert_ne!(header.ethertype, EtherType::ARP);
    header.destination
}

fn unsolicited_reason(family: Family) -> DropReason {
    if family == Family::V4 { DropReason::ArpUnsolicited } else { DropReason::NdpUnsolicited }
}

#[test]
fn queues_packets_until_resolved_and_sends_in_order() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let socket = host.bind(at(family.unspecified(), 4000));
        for n in 0..3 {
            host.send(socket, Some(at(family.host(2), 53)), &[n]);
        }
        let solicitation = host.sent_one();
        let solicitation_header = EthernetHeader::parse(&solicitation).unwrap().0;
        match family {
            Family::V4 => assert_eq!(solicitation_header.destination, MacAddr::BROADCAST),
            Family::V6 => {
                let group = solicited_node(v6(family.host(2)));
                assert_eq!(solicitation_header.destination, MacAddr::from_ipv6_group(group));
            }
        }
        host.feed(&reply_frame(family, 2, mac(2), true, true));
        let sent = host.sent();
        assert_eq!(sent.iter().map(|frame| frame[frame.len() - 1]).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(sent.iter().all(|frame| frame[..6] == mac(2).0));
        host.finish();
    });
}

#[test]
fn gives_up_after_three_solicitations() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let socket = host.bind(at(family.unspecified(), 4000));
        let remote = at(family.host(2), 53);
        host.stack.udp_connect(socket, remote).unwrap();
        host.send(socket, None, b"x");
        host.advance(10 * SECOND_NS);
        assert_eq!(host.sent().len(), 3);
        assert_eq!(host.transmit_drops(DropReason::NeighbourUnreachable), 1);
        let error = host.stack.udp_take_error(socket);
        assert_eq!(error, Some(SocketError::HostUnreachable(remote)));
        // The next packet starts address resolution again.
        host.send(socket, None, b"x");
        assert_eq!(host.sent().len(), 1);
        host.finish();
    });
}

#[test]
fn unresolved_queue_keeps_newest_packets() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.limits.unresolved_frames = 8;
        let mut host = TestHost::quiet(settings);
        let socket = host.bind(at(family.unspecified(), 4000));
        for n in 0..20 {
            host.send(socket, Some(at(family.host(2), 53)), &[n]);
        }
        assert_eq!(host.transmit_drops(DropReason::NeighbourQueueFull), 12);
        host.sent();
        host.feed(&reply_frame(family, 2, mac(2), true, true));
        let last: Vec<_> = host.sent().iter().map(|frame| frame[frame.len() - 1]).collect();
        assert_eq!(last, (12..20).collect::<Vec<_>>());
        host.finish();
    });
}

#[test]
fn entries_pass_through_stale_delay_and_probe() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        // At most 45 seconds reachable, then stale. The next packet goes at once, and 5 seconds
        // later a unicast probe follows.
        host.advance(46 * SECOND_NS);
        assert!(host.sent().is_empty());
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        host.advance(4 * SECOND_NS);
        assert!(host.sent().is_empty(), "upper layers have time to confirm");
        host.advance(SECOND_NS);
        let probe = host.sent_one();
        assert_eq!(EthernetHeader::parse(&probe).unwrap().0.destination, mac(2));
        host.feed(&reply_frame(family, 2, mac(2), true, false));
        host.advance(10 * SECOND_NS);
        assert!(host.sent().is_empty(), "the neighbour answered the probe");
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn removes_neighbour_after_three_unanswered_probes() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        host.advance(46 * SECOND_NS);
        next_frame_destination(&mut host, family);
        host.advance(20 * SECOND_NS);
        assert_eq!(host.sent().len(), 3, "three probes");
        let socket = host.bind(at(family.unspecified(), 4000));
        host.send(socket, Some(at(family.host(2), 9)), b"x");
        let solicitation = host.sent_one();
        assert!(EthernetHeader::parse(&solicitation).unwrap().0.destination.is_group());
        host.finish();
    });
}

#[test]
fn two_stacks_keep_each_other_reachable() {
    for_each_family(|family| {
        let mut pair = HostPair::new();
        let socket = pair.a.bind(at(family.unspecified(), 4000));
        let server = pair.b.bind(at(family.unspecified(), 53));
        for _ in 0..200 {
            pair.a.send(socket, Some(at(family.host(2), 53)), b"x");
            pair.run();
            pair.advance(SECOND_NS);
            pair.run();
        }
        assert_eq!(std::iter::from_fn(|| pair.b.receive(server)).count(), 200);
        pair.finish();
    });
}

#[test]
fn sends_off_link_packets_through_the_router() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(254);
        let socket = host.bind(at(family.unspecified(), 4000));
        host.send(socket, Some(at(family.far_host(), 53)), b"x");
        let sent = host.sent_one();
        assert_eq!(EthernetHeader::parse(&sent).unwrap().0.destination, mac(254));
        host.finish();
    });
}

#[test]
fn shared_address_leaves_resolution_to_the_caller() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.ownership = AddressOwnership::Shared;
        let mut host = TestHost::quiet(settings);
        let socket = host.bind(at(family.unspecified(), 4000));
        host.send(socket, Some(at(family.host(2), 53)), b"1");
        host.send(socket, Some(at(family.host(2), 53)), b"2");
        assert!(host.sent().is_empty());
        assert_eq!(host.events(), [Event::NeighbourUnresolved(family.host(2))]);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        assert_eq!(host.sent().len(), 2);
        // After a negative answer from outside, queued packets are dropped.
        host.send(socket, Some(at(family.host(3), 53)), b"3");
        host.stack.set_neighbour(host.now_ns, family.host(3), None, &mut host.arena);
        assert_eq!(host.transmit_drops(DropReason::NeighbourUnreachable), 1);
        // The kernel answers for the address.
        let request = arp_frame(MacAddr::BROADCAST, arp(ArpOperation::Request, 2, 1));
        host.feed_dropped(&request, DropReason::ArpNotForUs);
        host.finish();
    });
}

#[test]
fn replies_to_solicitations_for_its_addresses() {
    let mut host = TestHost::quiet(config(1));
    host.feed(&arp_frame(MacAddr::BROADCAST, arp(ArpOperation::Request, 2, 1)));
    let reply = ArpPacket::parse(packet_of(&host.sent_one())).unwrap().0;
    assert_eq!((reply.operation, reply.sender_mac), (ArpOperation::Reply, mac(1)));
    assert_eq!((reply.target_mac, IpAddr::V4(reply.target_ip)), (mac(2), Family::V4.host(2)));

    let target = v6(Family::V6.host(1));
    let message = NdpMessage::NeighbourSolicitation { target, source_mac: Some(mac(2)) };
    let packet = icmpv6_with_hops(
        Family::V6.host(2),
        solicited_node(target).into(),
        255,
        &Icmpv6Message::Ndp(message),
    );
    host.feed(&frame_to(MacAddr::from_ipv6_group(solicited_node(target)), &packet));
    let sent = host.sent_one();
    assert_eq!(EthernetHeader::parse(&sent).unwrap().0.destination, mac(2));
    let (header, payload) = Ipv6Header::parse(packet_of(&sent)).unwrap();
    assert_eq!(header.hop_limit, 255);
    let advertisement = NeighbourAdvertisement {
        router: false,
        solicited: true,
        overrides: true,
        target,
        target_mac: Some(mac(1)),
    };
    assert_eq!(
        Icmpv6Message::parse(&header, payload),
        Ok(Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(advertisement)))
    );
    // The requesting neighbour is resolved now.
    assert_eq!(next_frame_destination(&mut host, Family::V4), mac(2));
    assert_eq!(next_frame_destination(&mut host, Family::V6), mac(2));
    host.finish();
}

#[test]
fn sends_mld_reports_at_start_and_on_query() {
    let mut host = TestHost::new(config(1));
    host.advance(5 * SECOND_NS);
    let sent = host.sent();
    assert_eq!(sent.len(), 2, "a change is reported twice");
    let (header, payload) = Ipv6Header::parse(packet_of(&sent[0])).unwrap();
    assert_eq!((header.destination, header.hop_limit), (mld::ALL_ROUTERS, 1));
    assert_eq!(header.source, mac(1).link_local());
    let upper = upper_layer(header.next_header, payload).unwrap();
    assert!(upper.router_alert);
    let Ok(Icmpv6Message::Mld(MldMessage::Report(records))) =
        Icmpv6Message::parse(&header, upper.payload)
    else {
        panic!("not a report: {payload:02x?}");
    };
    let mut groups: Vec<_> = records.map(|record| record.group).collect();
    groups.sort();
    let mut expected =
        vec![solicited_node(v6(Family::V6.host(1))), solicited_node(mac(1).link_local())];
    expected.sort();
    expected.dedup();
    assert_eq!(groups, expected);

    let query = MldMessage::Query { maximum_response_code: 1000, group: Ipv6Addr::UNSPECIFIED };
    let router = mac(254).link_local();
    let packet = icmpv6_with_hops(router.into(), Family::V6.host(1), 1, &Icmpv6Message::Mld(query));
    for _ in 0..10 {
        host.feed(&frame(&packet));
    }
    host.advance(SECOND_NS);
    assert_eq!(host.sent().len(), 1, "one report answers all queries");
    host.finish();
}

#[test]
fn ignores_unsolicited_replies_for_unknown_neighbours() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        for overrides in [false, true] {
            for solicited in [false, true] {
                let frame = reply_frame(family, 2, mac(66), solicited, overrides);
                host.feed_dropped(&frame, unsolicited_reason(family));
            }
        }
        let socket = host.bind(at(family.unspecified(), 4000));
        host.send(socket, Some(at(family.host(2), 9)), b"x");
        let solicitation = host.sent_one();
        assert!(EthernetHeader::parse(&solicitation).unwrap().0.destination.is_group());
        host.finish();
    });
}

#[test]
fn verifies_unsolicited_claim_before_replacing_neighbour() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        host.feed(&reply_frame(family, 2, mac(66), false, false));
        // A solicitation goes to the group; until the reply the old address stays in use.
        assert_eq!(host.sent().len(), 1);
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        // Further claims cause no further solicitations.
        for _ in 0..100 {
            if family == Family::V6 {
                host.feed(&reply_frame(family, 2, mac(66), false, false));
            }
        }
        assert!(host.sent().is_empty());
        host.feed(&reply_frame(family, 2, mac(2), true, true));
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn override_replaces_neighbour_and_is_verified_on_use() {
    let mut host = TestHost::with_neighbour(2);
    host.feed(&reply_frame(Family::V6, 2, mac(66), false, true));
    // RFC 4861 section 7.2.5: the new address is used, but its state is stale.
    assert_eq!(next_frame_destination(&mut host, Family::V6), mac(66));
    host.advance(5 * SECOND_NS);
    let probe = host.sent_one();
    assert_eq!(EthernetHeader::parse(&probe).unwrap().0.destination, mac(66));
    host.finish();
}

#[test]
fn claim_to_own_address_changes_no_neighbour() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let claim = match family {
            Family::V4 => arp_frame(
                mac(1),
                ArpPacket { sender_mac: mac(9), ..arp(ArpOperation::Reply, 1, 1) },
            ),
            Family::V6 => reply_frame(family, 1, mac(9), false, true),
        };
        let reason = match family {
            Family::V4 => DropReason::ArpConflict,
            Family::V6 => DropReason::NdpConflict,
        };
        host.feed_dropped(&claim, reason);
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn rejects_invalid_sender_addresses() {
    let mut host = TestHost::quiet(config(1));
    let request = arp(ArpOperation::Request, 2, 1);
    for sender_mac in
        [MacAddr::BROADCAST, MacAddr::UNSPECIFIED, "01:00:5e:00:00:01".parse().unwrap()]
    {
        let mut bytes = arp_frame(MacAddr::BROADCAST, ArpPacket { sender_mac, ..request });
        bytes[6..12].copy_from_slice(&mac(2).0);
        host.feed_dropped(&bytes, DropReason::ArpSenderInvalid);
    }
    for sender_ip in ["127.0.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.255", "0.0.0.1"] {
        let packet = ArpPacket { sender_ip: sender_ip.parse().unwrap(), ..request };
        host.feed_dropped(&arp_frame(MacAddr::BROADCAST, packet), DropReason::ArpSenderInvalid);
    }
    let target = v6(Family::V6.host(1));
    for link in [MacAddr::BROADCAST, MacAddr::UNSPECIFIED] {
        let solicitation = NdpMessage::NeighbourSolicitation { target, source_mac: Some(link) };
        let bytes = ndp_frame(Family::V6.host(2), target.into(), solicitation);
        host.feed_dropped(&bytes, DropReason::NdpMalformed);
    }
    assert!(host.sent().is_empty());
    host.finish();
}

#[test]
fn rejects_neighbour_discovery_with_hop_limit_below_255() {
    let mut host = TestHost::with_neighbour(2);
    let target = v6(Family::V6.host(1));
    let solicitation = NdpMessage::NeighbourSolicitation { target, source_mac: Some(mac(2)) };
    let advertisement = NeighbourAdvertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: v6(Family::V6.host(2)),
        target_mac: Some(mac(66)),
    };
    for hops in [0, 64, 254] {
        for message in [solicitation, NdpMessage::NeighbourAdvertisement(advertisement)] {
            let message = Icmpv6Message::Ndp(message);
            let packet = icmpv6_with_hops(Family::V6.host(2), target.into(), hops, &message);
            host.feed_dropped(&frame(&packet), DropReason::NdpHopLimit);
        }
    }
    assert_eq!(next_frame_destination(&mut host, Family::V6), mac(2));
    host.finish();
}

#[test]
fn rejects_zero_length_options_and_ignores_router_messages() {
    let mut host = TestHost::with_neighbour(2);
    let target = v6(Family::V6.host(1));
    let solicitation = NdpMessage::NeighbourSolicitation { target, source_mac: Some(mac(2)) };
    let good = ndp_frame(Family::V6.host(2), target.into(), solicitation);
    let mut body = packet_of(&good)[44..].to_vec();
    body[21] = 0;
    let bad = Icmpv6Message::Other { kind: 135, code: 0, body: &body };
    let bad = icmpv6_with_hops(Family::V6.host(2), target.into(), 255, &bad);
    host.feed_dropped(&frame(&bad), DropReason::NdpMalformed);
    // A well-formed router advertisement and redirect from the link.
    let router = IpAddr::V6(mac(254).link_local());
    let mut redirect = vec![0; 4];
    redirect.extend(v6(router).octets());
    redirect.extend(v6(Family::V6.far_host()).octets());
    for (kind, body) in [(134, vec![0; 12]), (137, redirect)] {
        let message = Icmpv6Message::Other { kind, code: 0, body: &body };
        let packet = icmpv6_with_hops(router, target.into(), 255, &message);
        host.feed_dropped(&frame(&packet), DropReason::NdpIgnored);
    }
    host.finish();
}

#[test]
fn address_sweep_does_not_evict_neighbours_in_use() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.limits.neighbours = 32;
        settings.limits.unresolved_frames_total = 24;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        next_frame_destination(&mut host, family);
        let socket = host.bind(at(family.unspecified(), 4000));
        let mut refused = 0;
        for n in 10..200 {
            let to = Some(at(family.host(n), 9));
            let TestHost { stack, arena, now_ns } = &mut host;
            refused += usize::from(stack.udp_send(*now_ns, arena, socket, to, None, b"x").is_err());
        }
        // Unresolved entries fill at most half of the table.
        assert_eq!(refused, 190 - 16);
        assert_eq!(host.transmit_drops(DropReason::NeighbourTableFull), 190 - 16);
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        host.advance(10 * SECOND_NS);
        host.sent();
        // After the entries time out there is space again.
        host.send(socket, Some(at(family.host(250), 9)), b"x");
        host.finish();
    });
}

#[test]
fn solicitation_flood_does_not_evict_neighbours_in_use() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.limits.neighbours = 32;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        next_frame_destination(&mut host, family);
        for n in 3..250 {
            let bytes = match family {
                Family::V4 => arp_frame(mac(1), arp(ArpOperation::Request, n, 1)),
                Family::V6 => ndp_frame(
                    family.host(n),
                    family.host(1),
                    NdpMessage::NeighbourSolicitation {
                        target: v6(family.host(1)),
                        source_mac: Some(mac(n)),
                    },
                ),
            };
            host.feed(&bytes);
        }
        assert_eq!(host.sent().len(), 247, "each solicitation is still answered");
        assert_eq!(next_frame_destination(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn drops_malformed_or_foreign_arp_and_unknown_ethertypes() {
    let mut host = TestHost::quiet(config(1));
    let good = arp_frame(mac(1), arp(ArpOperation::Request, 2, 1));
    for len in 14..good.len() {
        host.feed_dropped(&good[..len], DropReason::ArpMalformed);
    }
    for (at, value) in [(14, 9), (16, 9), (18, 8), (19, 16), (21, 3)] {
        let mut bad = good.clone();
        bad[at] = value;
        host.feed_dropped(&bad, DropReason::ArpMalformed);
    }
    let other = arp_frame(MacAddr::BROADCAST, arp(ArpOperation::Request, 2, 3));
    host.feed_dropped(&other, DropReason::ArpNotForUs);
    let mut settings = tidegate_stack::Config::ip([1; 16]);
    settings.addresses = config(1).addresses;
    let mut bare = TestHost::new(settings);
    bare.feed_dropped(&[], DropReason::Ipv4Truncated);
    bare.feed_dropped(&[0x50; 40], DropReason::EtherTypeUnknown);
    bare.finish();
    let unknown = ethernet(mac(1), mac(2), EtherType(0x88cc), &[0; 50]);
    host.feed_dropped(&unknown, DropReason::EtherTypeUnknown);
    host.finish();
}
