//! ARP and neighbour discovery, with hostile input of class 7.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use tidegate_stack::{Event, Ownership, SocketError};
use tidegate_wire::ipv6_extension::upper_layer;
use tidegate_wire::mld::{self, MldMessage};
use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{
    ArpOperation, ArpPacket, DropReason, EtherType, EthernetHeader, Icmpv6Message, Ipv6Header,
    MacAddr, NdpMessage, NeighbourAdvertisement,
};

use crate::kit::packets::{
    arp, arp_frame, ethernet, frame, frame_to, icmpv6_with_hops, ndp_frame, packet_of, udp_frame,
};
use crate::kit::{Family, Host, Pair, SECOND_NS, both, config, mac};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

fn v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V6(v6) => v6,
        IpAddr::V4(_) => panic!("{ip} is no IPv6 address"),
    }
}

/// The answer of host `n` at hardware address `from`, to host 1.
fn answer(family: Family, n: u8, from: MacAddr, solicited: bool, overrides: bool) -> Vec<u8> {
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
                target_link: Some(from),
            }),
        ),
    }
}

/// Where the next datagram to host 2 goes.
fn sent_to(host: &mut Host, family: Family) -> MacAddr {
    let socket = host.bind(at(family.any(), 0));
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
fn packets_wait_for_the_answer_and_then_go_in_order() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let socket = host.bind(at(family.any(), 4000));
        for n in 0..3 {
            host.send(socket, Some(at(family.host(2), 53)), &[n]);
        }
        let question = host.sent_one();
        let asked = EthernetHeader::parse(&question).unwrap().0;
        match family {
            Family::V4 => assert_eq!(asked.destination, MacAddr::BROADCAST),
            Family::V6 => {
                let group = solicited_node(v6(family.host(2)));
                assert_eq!(asked.destination, MacAddr::of_ipv6_group(group));
            }
        }
        host.feed(&answer(family, 2, mac(2), true, true));
        let sent = host.sent();
        assert_eq!(sent.iter().map(|frame| frame[frame.len() - 1]).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(sent.iter().all(|frame| frame[..6] == mac(2).0));
        host.finish();
    });
}

#[test]
fn a_neighbour_that_never_answers_is_asked_three_times() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let socket = host.bind(at(family.any(), 4000));
        let remote = at(family.host(2), 53);
        host.stack.udp_connect(socket, remote).unwrap();
        host.send(socket, None, b"x");
        host.pass(10 * SECOND_NS);
        assert_eq!(host.sent().len(), 3);
        assert_eq!(host.transmit_drops(DropReason::NeighbourUnreachable), 1);
        let error = host.stack.udp_take_error(socket);
        assert_eq!(error, Some(SocketError::HostUnreachable(remote)));
        // The next packet begins anew.
        host.send(socket, None, b"x");
        assert_eq!(host.sent().len(), 1);
        host.finish();
    });
}

#[test]
fn the_queue_for_one_neighbour_keeps_the_newest() {
    both(|family| {
        let mut settings = config(1);
        settings.limits.unresolved_frames = 8;
        let mut host = Host::quiet(settings);
        let socket = host.bind(at(family.any(), 4000));
        for n in 0..20 {
            host.send(socket, Some(at(family.host(2), 53)), &[n]);
        }
        assert_eq!(host.transmit_drops(DropReason::NeighbourQueueFull), 12);
        host.sent();
        host.feed(&answer(family, 2, mac(2), true, true));
        let last: Vec<_> = host.sent().iter().map(|frame| frame[frame.len() - 1]).collect();
        assert_eq!(last, (12..20).collect::<Vec<_>>());
        host.finish();
    });
}

#[test]
fn entries_age_through_stale_delay_and_probe() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        assert_eq!(sent_to(&mut host, family), mac(2));
        // At most 45 seconds reachable, then stale: the next packet goes at
        // once, and 5 seconds later the neighbour is asked, alone.
        host.pass(46 * SECOND_NS);
        assert!(host.sent().is_empty());
        assert_eq!(sent_to(&mut host, family), mac(2));
        host.pass(4 * SECOND_NS);
        assert!(host.sent().is_empty(), "upper layers have time to confirm");
        host.pass(SECOND_NS);
        let probe = host.sent_one();
        assert_eq!(EthernetHeader::parse(&probe).unwrap().0.destination, mac(2));
        host.feed(&answer(family, 2, mac(2), true, false));
        host.pass(10 * SECOND_NS);
        assert!(host.sent().is_empty(), "it answered");
        assert_eq!(sent_to(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn a_neighbour_that_does_not_answer_probes_is_forgotten() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        host.pass(46 * SECOND_NS);
        sent_to(&mut host, family);
        host.pass(20 * SECOND_NS);
        assert_eq!(host.sent().len(), 3, "three probes");
        let socket = host.bind(at(family.any(), 4000));
        host.send(socket, Some(at(family.host(2), 9)), b"x");
        let question = host.sent_one();
        assert!(EthernetHeader::parse(&question).unwrap().0.destination.is_group());
        host.finish();
    });
}

#[test]
fn two_stacks_keep_each_other_reachable() {
    both(|family| {
        let mut pair = Pair::new();
        let socket = pair.a.bind(at(family.any(), 4000));
        let server = pair.b.bind(at(family.any(), 53));
        for _ in 0..200 {
            pair.a.send(socket, Some(at(family.host(2), 53)), b"x");
            pair.run();
            pair.pass(SECOND_NS);
            pair.run();
        }
        assert_eq!(std::iter::from_fn(|| pair.b.receive(server)).count(), 200);
        pair.finish();
    });
}

#[test]
fn hosts_off_the_link_go_through_the_router() {
    both(|family| {
        let mut host = Host::with_neighbour(254);
        let socket = host.bind(at(family.any(), 4000));
        host.send(socket, Some(at(family.far_host(), 53)), b"x");
        let sent = host.sent_one();
        assert_eq!(EthernetHeader::parse(&sent).unwrap().0.destination, mac(254));
        host.finish();
    });
}

#[test]
fn with_a_shared_address_the_outside_is_asked() {
    both(|family| {
        let mut settings = config(1);
        settings.ownership = Ownership::Shared;
        let mut host = Host::quiet(settings);
        let socket = host.bind(at(family.any(), 4000));
        host.send(socket, Some(at(family.host(2), 53)), b"1");
        host.send(socket, Some(at(family.host(2), 53)), b"2");
        assert!(host.sent().is_empty());
        assert_eq!(host.events(), [Event::NeighbourWanted(family.host(2))]);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        assert_eq!(host.sent().len(), 2);
        // Told that there is none, what waits is dropped.
        host.send(socket, Some(at(family.host(3), 53)), b"3");
        host.stack.set_neighbour(host.now_ns, family.host(3), None, &mut host.arena);
        assert_eq!(host.transmit_drops(DropReason::NeighbourUnreachable), 1);
        // The kernel answers for the address.
        let question = arp_frame(MacAddr::BROADCAST, arp(ArpOperation::Request, 2, 1));
        host.feed_dropped(&question, DropReason::ArpNotForUs);
        host.finish();
    });
}

#[test]
fn questions_for_our_address_are_answered() {
    let mut host = Host::quiet(config(1));
    host.feed(&arp_frame(MacAddr::BROADCAST, arp(ArpOperation::Request, 2, 1)));
    let reply = ArpPacket::parse(packet_of(&host.sent_one())).unwrap().0;
    assert_eq!((reply.operation, reply.sender_mac), (ArpOperation::Reply, mac(1)));
    assert_eq!((reply.target_mac, IpAddr::V4(reply.target_ip)), (mac(2), Family::V4.host(2)));

    let target = v6(Family::V6.host(1));
    let message = NdpMessage::NeighbourSolicitation { target, source_link: Some(mac(2)) };
    let packet = icmpv6_with_hops(
        Family::V6.host(2),
        solicited_node(target).into(),
        255,
        &Icmpv6Message::Ndp(message),
    );
    host.feed(&frame_to(MacAddr::of_ipv6_group(solicited_node(target)), &packet));
    let sent = host.sent_one();
    assert_eq!(EthernetHeader::parse(&sent).unwrap().0.destination, mac(2));
    let (header, payload) = Ipv6Header::parse(packet_of(&sent)).unwrap();
    assert_eq!(header.hop_limit, 255);
    let advertisement = NeighbourAdvertisement {
        router: false,
        solicited: true,
        overrides: true,
        target,
        target_link: Some(mac(1)),
    };
    assert_eq!(
        Icmpv6Message::parse(&header, payload),
        Ok(Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(advertisement)))
    );
    // Whoever asked is known now.
    assert_eq!(sent_to(&mut host, Family::V4), mac(2));
    assert_eq!(sent_to(&mut host, Family::V6), mac(2));
    host.finish();
}

#[test]
fn groups_are_reported_to_routers_at_the_start_and_when_asked() {
    let mut host = Host::new(config(1));
    host.pass(5 * SECOND_NS);
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
    host.pass(SECOND_NS);
    assert_eq!(host.sent().len(), 1, "one answer serves all");
    host.finish();
}

#[test]
fn an_address_is_used_only_when_nobody_else_has_it() {
    let mut settings = config(1);
    settings.duplicate_address_detection = true;
    let mut host = Host::new(settings.clone());
    host.pass(0);
    let probes = host.sent();
    let from_nobody = probes
        .iter()
        .filter(|frame| Ipv6Header::parse(packet_of(frame)).unwrap().0.hop_limit == 255);
    assert_eq!(from_nobody.count(), 2, "our own address and the link-local one");
    host.feed_dropped(&udp_frame(Family::V6, (1, 53), b"x"), DropReason::Ipv6NotForUs);
    host.pass(2 * SECOND_NS);
    host.sent();
    let socket = host.bind(at(Family::V6.any(), 53));
    host.feed(&udp_frame(Family::V6, (1, 53), b"x"));
    assert!(host.receive(socket).is_some());
    host.finish();

    let mut host = Host::new(settings);
    host.pass(0);
    let claim = NeighbourAdvertisement {
        router: false,
        solicited: false,
        overrides: true,
        target: v6(Family::V6.host(1)),
        target_link: Some(mac(9)),
    };
    let claim = ndp_frame(
        Family::V6.host(1),
        "ff02::1".parse().unwrap(),
        NdpMessage::NeighbourAdvertisement(claim),
    );
    host.feed_dropped(&claim, DropReason::NdpConflict);
    assert_eq!(host.events(), [Event::AddressConflict(Family::V6.host(1))]);
    host.pass(5 * SECOND_NS);
    host.feed_dropped(&udp_frame(Family::V6, (1, 53), b"x"), DropReason::Ipv6NotForUs);
    host.finish();
}

#[test]
fn class_7_answers_that_nobody_asked_for_make_no_entries() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        for overrides in [false, true] {
            for solicited in [false, true] {
                let frame = answer(family, 2, mac(66), solicited, overrides);
                host.feed_dropped(&frame, unsolicited_reason(family));
            }
        }
        let socket = host.bind(at(family.any(), 4000));
        host.send(socket, Some(at(family.host(2), 9)), b"x");
        let question = host.sent_one();
        assert!(EthernetHeader::parse(&question).unwrap().0.destination.is_group());
        host.finish();
    });
}

#[test]
fn class_7_an_unasked_claim_on_a_neighbour_is_checked_before_it_is_believed() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        host.feed(&answer(family, 2, mac(66), false, false));
        // Everybody is asked; until then the old address stays in use.
        assert_eq!(host.sent().len(), 1);
        assert_eq!(sent_to(&mut host, family), mac(2));
        // More claims make no more questions.
        for _ in 0..100 {
            if family == Family::V6 {
                host.feed(&answer(family, 2, mac(66), false, false));
            }
        }
        assert!(host.sent().is_empty());
        host.feed(&answer(family, 2, mac(2), true, true));
        assert_eq!(sent_to(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn class_7_an_override_moves_a_neighbour_and_is_verified_when_used() {
    let mut host = Host::with_neighbour(2);
    host.feed(&answer(Family::V6, 2, mac(66), false, true));
    // RFC 4861 section 7.2.5: the new address, but stale.
    assert_eq!(sent_to(&mut host, Family::V6), mac(66));
    host.pass(5 * SECOND_NS);
    let probe = host.sent_one();
    assert_eq!(EthernetHeader::parse(&probe).unwrap().0.destination, mac(66));
    host.finish();
}

#[test]
fn class_7_a_conflict_for_our_own_address_is_told_and_changes_nothing() {
    both(|family| {
        let mut host = Host::with_neighbour(2);
        let claims = match family {
            Family::V4 => vec![
                arp_frame(
                    mac(1),
                    ArpPacket { sender_mac: mac(9), ..arp(ArpOperation::Reply, 1, 1) },
                ),
                arp_frame(
                    MacAddr::BROADCAST,
                    ArpPacket { sender_mac: mac(9), ..arp(ArpOperation::Request, 1, 1) },
                ),
            ],
            Family::V6 => vec![answer(family, 1, mac(9), false, true)],
        };
        let reason = match family {
            Family::V4 => DropReason::ArpConflict,
            Family::V6 => DropReason::Ipv6SourceInvalid,
        };
        for claim in claims {
            host.feed_dropped(&claim, reason);
        }
        if family == Family::V6 {
            // From another source, about our address.
            let claim = NeighbourAdvertisement {
                router: false,
                solicited: false,
                overrides: true,
                target: v6(family.host(1)),
                target_link: Some(mac(9)),
            };
            let claim = ndp_frame(
                family.host(9),
                family.host(1),
                NdpMessage::NeighbourAdvertisement(claim),
            );
            for _ in 0..10 {
                host.feed_dropped(&claim, DropReason::NdpConflict);
            }
        }
        assert_eq!(host.events(), [Event::AddressConflict(family.host(1))]);
        assert_eq!(sent_to(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn class_7_senders_that_cannot_be_are_refused() {
    let mut host = Host::quiet(config(1));
    let ask = arp(ArpOperation::Request, 2, 1);
    for sender_mac in
        [MacAddr::BROADCAST, MacAddr::UNSPECIFIED, "01:00:5e:00:00:01".parse().unwrap()]
    {
        let mut bytes = arp_frame(MacAddr::BROADCAST, ArpPacket { sender_mac, ..ask });
        bytes[6..12].copy_from_slice(&mac(2).0);
        host.feed_dropped(&bytes, DropReason::ArpSenderInvalid);
    }
    for sender_ip in ["127.0.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.255", "0.0.0.1"] {
        let packet = ArpPacket { sender_ip: sender_ip.parse().unwrap(), ..ask };
        host.feed_dropped(&arp_frame(MacAddr::BROADCAST, packet), DropReason::ArpSenderInvalid);
    }
    let target = v6(Family::V6.host(1));
    for link in [MacAddr::BROADCAST, MacAddr::UNSPECIFIED] {
        let ask = NdpMessage::NeighbourSolicitation { target, source_link: Some(link) };
        let bytes = ndp_frame(Family::V6.host(2), target.into(), ask);
        host.feed_dropped(&bytes, DropReason::NdpMalformed);
    }
    assert!(host.sent().is_empty());
    host.finish();
}

#[test]
fn class_7_neighbour_discovery_from_off_the_link_is_refused() {
    let mut host = Host::with_neighbour(2);
    let target = v6(Family::V6.host(1));
    let ask = NdpMessage::NeighbourSolicitation { target, source_link: Some(mac(2)) };
    let answer = NeighbourAdvertisement {
        router: false,
        solicited: true,
        overrides: true,
        target: v6(Family::V6.host(2)),
        target_link: Some(mac(66)),
    };
    for hops in [0, 64, 254] {
        for message in [ask, NdpMessage::NeighbourAdvertisement(answer)] {
            let message = Icmpv6Message::Ndp(message);
            let packet = icmpv6_with_hops(Family::V6.host(2), target.into(), hops, &message);
            host.feed_dropped(&frame(&packet), DropReason::NdpHopLimit);
        }
    }
    assert_eq!(sent_to(&mut host, Family::V6), mac(2));
    host.finish();
}

#[test]
fn class_7_options_of_length_zero_router_advertisements_and_redirects() {
    let mut host = Host::with_neighbour(2);
    let target = v6(Family::V6.host(1));
    let ask = NdpMessage::NeighbourSolicitation { target, source_link: Some(mac(2)) };
    let good = ndp_frame(Family::V6.host(2), target.into(), ask);
    let mut body = packet_of(&good)[44..].to_vec();
    body[21] = 0;
    let bad = Icmpv6Message::Other { kind: 135, code: 0, body: &body };
    let bad = icmpv6_with_hops(Family::V6.host(2), target.into(), 255, &bad);
    host.feed_dropped(&frame(&bad), DropReason::NdpMalformed);
    // A router advertisement and a redirect, well formed, from the link.
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
fn class_7_a_sweep_of_the_network_does_not_push_out_who_is_in_use() {
    both(|family| {
        let mut settings = config(1);
        settings.limits.neighbours = 32;
        settings.limits.unresolved_frames_total = 24;
        let mut host = Host::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        sent_to(&mut host, family);
        let socket = host.bind(at(family.any(), 4000));
        let mut refused = 0;
        for n in 10..200 {
            let to = Some(at(family.host(n), 9));
            let Host { stack, arena, now_ns } = &mut host;
            refused += usize::from(stack.udp_send(*now_ns, arena, socket, to, None, b"x").is_err());
        }
        // Unanswered entries fill half of the table at most.
        assert_eq!(refused, 190 - 16);
        assert_eq!(host.transmit_drops(DropReason::NeighbourTableFull), 190 - 16);
        assert_eq!(sent_to(&mut host, family), mac(2));
        host.pass(10 * SECOND_NS);
        host.sent();
        // After they timed out there is room again.
        host.send(socket, Some(at(family.host(250), 9)), b"x");
        host.finish();
    });
}

#[test]
fn class_7_a_flood_of_questions_does_not_push_out_who_is_in_use() {
    both(|family| {
        let mut settings = config(1);
        settings.limits.neighbours = 32;
        let mut host = Host::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        sent_to(&mut host, family);
        for n in 3..250 {
            let bytes = match family {
                Family::V4 => arp_frame(mac(1), arp(ArpOperation::Request, n, 1)),
                Family::V6 => ndp_frame(
                    family.host(n),
                    family.host(1),
                    NdpMessage::NeighbourSolicitation {
                        target: v6(family.host(1)),
                        source_link: Some(mac(n)),
                    },
                ),
            };
            host.feed(&bytes);
        }
        assert_eq!(host.sent().len(), 247, "each is answered all the same");
        assert_eq!(sent_to(&mut host, family), mac(2));
        host.finish();
    });
}

#[test]
fn class_7_truncated_and_foreign_arp() {
    let mut host = Host::quiet(config(1));
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
    let mut bare = Host::new(settings);
    bare.feed_dropped(&[], DropReason::Ipv4Truncated);
    bare.feed_dropped(&[0x50; 40], DropReason::EtherTypeUnknown);
    bare.finish();
    let unknown = ethernet(mac(1), mac(2), EtherType(0x88cc), &[0; 50]);
    host.feed_dropped(&unknown, DropReason::EtherTypeUnknown);
    host.finish();
}
