//! Probes, announcements and defence of own addresses (RFC 5227, RFC 4862, RFC 4429).

use std::net::{IpAddr, Ipv6Addr};

use tidegate_stack::{AddressConflict, AddressProbe, Event, OwnAddresses};
use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{
    ArpOperation, ArpPacket, DropReason, EtherType, EthernetHeader, Icmpv6Message, Ipv6Header,
    MacAddr, NdpMessage, NeighbourAdvertisement,
};

use crate::kit::packets::{arp, arp_frame, ethernet, icmpv6_with_hops, packet_of, udp_frame};
use crate::kit::{Family, SECOND_NS, TestHost, config, for_each_family, mac};
use crate::upgrade::upgrade;

const MILLISECOND_NS: u64 = 1_000_000;

/// Statement of a sent frame about an address of host 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Statement {
    Probe,
    /// Announcement to all, or answer to a probe.
    Announcement,
    Answer {
        overrides: bool,
    },
}

/// Statement of another host about an address of host 1.
#[derive(Clone, Copy, Debug)]
enum Claim {
    Probe,
    Request,
    Answer,
}

fn v6(address: IpAddr) -> Ipv6Addr {
    let IpAddr::V6(address) = address else { panic!("{address} is no IPv6 address") };
    address
}

fn new_host(probe: AddressProbe) -> TestHost {
    let mut host = TestHost::new(config(1));
    host.stack.claim_addresses(host.now_ns, probe);
    host
}

/// Frame of the host `from` that claims the address of host 1.
fn claim_frame(family: Family, claim: Claim, from: MacAddr) -> Vec<u8> {
    let target = family.host(1);
    let IpAddr::V6(target_v6) = target else {
        let (operation, sender) = match claim {
            Claim::Probe | Claim::Request => (ArpOperation::Request, 1),
            Claim::Answer => (ArpOperation::Reply, 1),
        };
        let mut packet = ArpPacket { sender_mac: from, ..arp(operation, sender, 1) };
        if matches!(claim, Claim::Probe) {
            packet.sender_ip = "0.0.0.0".parse().unwrap();
        }
        let mut frame = arp_frame(MacAddr::BROADCAST, packet);
        frame[6..12].copy_from_slice(&from.0);
        return frame;
    };
    let (source, destination, message) = match claim {
        Claim::Probe => (
            family.unspecified(),
            solicited_node(target_v6),
            NdpMessage::NeighbourSolicitation { target: target_v6, source_mac: None },
        ),
        Claim::Request => (
            target,
            solicited_node(target_v6),
            NdpMessage::NeighbourSolicitation { target: target_v6, source_mac: Some(from) },
        ),
        Claim::Answer => (
            target,
            "ff02::1".parse().unwrap(),
            NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
                router: false,
                solicited: false,
                overrides: true,
                target: target_v6,
                target_mac: Some(from),
            }),
        ),
    };
    let packet = icmpv6_with_hops(source, destination.into(), 255, &Icmpv6Message::Ndp(message));
    ethernet(MacAddr::from_ipv6_group(destination), from, EtherType::IPV6, &packet)
}

/// Statements of the sent frames about the address of host 1.
fn statements(host: &mut TestHost, family: Family) -> Vec<Statement> {
    host.sent().iter().filter_map(|frame| statement_of(frame, family.host(1))).collect()
}

fn statement_of(frame: &[u8], own: IpAddr) -> Option<Statement> {
    let (ethernet, rest) = EthernetHeader::parse(frame).unwrap();
    let IpAddr::V6(own_v6) = own else {
        let packet =
            (ethernet.ethertype == EtherType::ARP).then(|| ArpPacket::parse(rest))?.ok()?.0;
        assert_eq!(packet.sender_mac, mac(1));
        return match packet.operation {
            ArpOperation::Request if packet.target_ip == own => {
                assert_eq!(ethernet.destination, MacAddr::BROADCAST);
                match packet.sender_ip.is_unspecified() {
                    true => Some(Statement::Probe),
                    false => Some(Statement::Announcement),
                }
            }
            ArpOperation::Reply if packet.sender_ip == own => {
                Some(Statement::Answer { overrides: true })
            }
            _ => None,
        };
    };
    if ethernet.ethertype != EtherType::IPV6 {
        return None;
    }
    let (header, payload) = Ipv6Header::parse(rest).unwrap();
    match Icmpv6Message::parse(&header, payload).ok()? {
        Icmpv6Message::Ndp(NdpMessage::NeighbourSolicitation { target, source_mac: None })
            if target == own_v6 && header.source.is_unspecified() =>
        {
            Some(Statement::Probe)
        }
        Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(advertisement))
            if advertisement.target == own_v6 =>
        {
            let NeighbourAdvertisement { solicited, overrides, .. } = advertisement;
            match solicited {
                true => Some(Statement::Answer { overrides }),
                false => Some(Statement::Announcement),
            }
        }
        _ => None,
    }
}

/// True if a datagram to host 1 arrives at a socket.
fn is_usable(host: &mut TestHost, family: Family) -> bool {
    let socket = host.bind((family.unspecified(), 53).into());
    host.feed(&udp_frame(family, (1, 53), b"x"));
    let is_usable = host.receive(socket).is_some();
    host.stack.udp_close(socket, &mut host.arena);
    is_usable
}

/// Neighbours of a new host replace the hardware address of the former owner of its addresses.
#[test]
fn announces_own_addresses_twice() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        assert!(host.sent().is_empty(), "nothing without the call");
        host.stack.claim_addresses(host.now_ns, AddressProbe::Off);
        for interval_ns in [0, 2 * SECOND_NS] {
            host.advance(interval_ns);
            assert_eq!(statements(&mut host, family), [Statement::Announcement], "{family:?}");
        }
        host.advance(60 * SECOND_NS);
        assert_eq!(statements(&mut host, family), []);
        host.finish();
    });
}

#[test]
fn quick_probe_uses_addresses_at_once_and_announces_them_after_210_ms() {
    for_each_family(|family| {
        let mut host = new_host(AddressProbe::Quick);
        assert!(is_usable(&mut host, family));
        for _ in 0..3 {
            host.advance(0);
            assert_eq!(statements(&mut host, family), [Statement::Probe]);
            assert_eq!(host.stack.own_addresses(), OwnAddresses::Probing);
            host.advance(70 * MILLISECOND_NS - 1);
            assert_eq!(statements(&mut host, family), []);
            host.advance(1);
        }
        assert_eq!(statements(&mut host, family), [Statement::Announcement]);
        assert_eq!(host.stack.own_addresses(), OwnAddresses::Unique);
        host.advance(10 * SECOND_NS);
        assert_eq!(statements(&mut host, family), [Statement::Announcement]);
        host.finish();
    });
}

#[test]
fn rfc_probe_uses_addresses_only_when_nobody_claims_them() {
    for (family, probes, min_s, max_s) in [(Family::V4, 3, 4, 7), (Family::V6, 1, 1, 2)] {
        let mut host = new_host(AddressProbe::Rfc);
        let began_ns = host.now_ns;
        let mut before_use = Vec::new();
        while !host.stack.has_address(family.host(1)) {
            assert!(!is_usable(&mut host, family));
            host.advance(100 * MILLISECOND_NS);
            before_use.extend(statements(&mut host, family));
            let waited_ns = host.now_ns - began_ns;
            assert!(waited_ns <= max_s * SECOND_NS + 100 * MILLISECOND_NS, "{family:?}");
        }
        assert!(host.now_ns - began_ns >= min_s * SECOND_NS, "{family:?}");
        let mut expected = vec![Statement::Probe; probes];
        expected.push(Statement::Announcement);
        assert_eq!(before_use, expected);
        assert!(is_usable(&mut host, family));
        host.finish();
    }
}

#[test]
fn address_claimed_while_it_is_probed_is_given_up() {
    for_each_family(|family| {
        for probe in [AddressProbe::Quick, AddressProbe::Rfc] {
            for claim in [Claim::Probe, Claim::Request, Claim::Answer] {
                let mut host = new_host(probe);
                host.advance(0);
                host.sent();
                let reason = match family {
                    Family::V4 => DropReason::ArpConflict,
                    Family::V6 => DropReason::NdpConflict,
                };
                host.feed_dropped(&claim_frame(family, claim, mac(9)), reason);
                let conflict = AddressConflict { address: family.host(1), mac: mac(9) };
                assert_eq!(host.events(), [Event::AddressConflict(family.host(1))], "{claim:?}");
                assert_eq!(host.stack.own_addresses(), OwnAddresses::Taken(conflict));
                host.advance(20 * SECOND_NS);
                assert_eq!(statements(&mut host, family), [], "{probe:?}, {claim:?}");
                assert!(!host.stack.has_address(family.host(1)));
                assert!(!is_usable(&mut host, family));
                let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
                assert!(is_usable(&mut host, other), "the other address stays");
                host.finish();
            }
        }
    });
}

/// A switch or a bond may return frames to their sender.
#[test]
fn own_frames_are_no_claim() {
    for_each_family(|family| {
        let mut host = new_host(AddressProbe::Quick);
        for claim in [Claim::Probe, Claim::Request, Claim::Answer] {
            host.feed(&claim_frame(family, claim, mac(1)));
        }
        host.advance(SECOND_NS);
        assert_eq!(host.events(), []);
        assert!(is_usable(&mut host, family));
        host.finish();
    });
}

/// Two forged packets must not silence a server, so it keeps an address that it uses.
#[test]
fn address_in_use_is_defended_once_in_ten_seconds() {
    for_each_family(|family| {
        for claim in [Claim::Request, Claim::Answer] {
            let mut host = new_host(AddressProbe::Quick);
            host.advance(10 * SECOND_NS);
            host.sent();
            for _ in 0..2 {
                for _ in 0..100 {
                    host.feed(&claim_frame(family, claim, mac(9)));
                    host.advance(MILLISECOND_NS);
                }
                assert_eq!(statements(&mut host, family), [Statement::Announcement], "{claim:?}");
                host.advance(10 * SECOND_NS);
            }
            assert_eq!(host.events(), [Event::AddressConflict(family.host(1))]);
            assert_eq!(host.stack.own_addresses(), OwnAddresses::Unique);
            assert!(is_usable(&mut host, family));
            host.finish();
        }
    });
}

#[test]
fn probe_of_another_host_is_answered() {
    for_each_family(|family| {
        let mut host = new_host(AddressProbe::Off);
        host.advance(10 * SECOND_NS);
        host.sent();
        host.feed(&claim_frame(family, Claim::Probe, mac(9)));
        let answer = match family {
            Family::V4 => Statement::Answer { overrides: true },
            // To all nodes, as its asker has no address yet.
            Family::V6 => Statement::Announcement,
        };
        assert_eq!(statements(&mut host, family), [answer]);
        assert_eq!(host.events(), []);
        host.finish();
    });
}

/// RFC 4429 sections 3.2 and 3.3: caches of neighbours keep the address of a former owner.
#[test]
fn address_that_is_probed_overrides_no_neighbour_cache() {
    let own = Family::V6.host(1);
    let solicitation =
        NdpMessage::NeighbourSolicitation { target: v6(own), source_mac: Some(mac(2)) };
    let packet = icmpv6_with_hops(Family::V6.host(2), own, 255, &Icmpv6Message::Ndp(solicitation));
    let request = ethernet(mac(1), mac(2), EtherType::IPV6, &packet);
    let mut host = new_host(AddressProbe::Quick);
    for overrides in [false, true] {
        host.feed(&request);
        assert_eq!(statements(&mut host, Family::V6), [Statement::Answer { overrides }]);
        let socket = host.bind((own, 0).into());
        let unknown = if overrides { 30 } else { 31 };
        host.send(socket, Some((Family::V6.host(unknown), 9).into()), b"x");
        let frame = host.sent_one();
        let (header, payload) = Ipv6Header::parse(packet_of(&frame)).unwrap();
        let Ok(Icmpv6Message::Ndp(NdpMessage::NeighbourSolicitation { source_mac, .. })) =
            Icmpv6Message::parse(&header, payload)
        else {
            panic!("no solicitation");
        };
        assert_eq!(source_mac, overrides.then_some(mac(1)));
        host.stack.udp_close(socket, &mut host.arena);
        host.advance(10 * SECOND_NS);
        host.sent();
    }
    host.finish();
}

#[test]
fn upgrade_probes_nothing() {
    for_each_family(|family| {
        let mut host = new_host(AddressProbe::Rfc);
        host.advance(20 * SECOND_NS);
        host.sent();
        upgrade(&mut host, config(1));
        assert!(is_usable(&mut host, family));
        host.advance(20 * SECOND_NS);
        assert_eq!(statements(&mut host, family), []);
        host.finish();
    });
}
