//! Fragmentation and reassembly, with hostile input of class 2 (fragments).

use std::net::{IpAddr, SocketAddr};

use tidegate_wire::{DropReason, Icmpv4Message, Icmpv6Message, Ipv4Header, Ipv6Header, Protocol};

use crate::kit::packets::{fragment, frame, ip, packet_of, udp};
use crate::kit::{Family, HostPair, SECOND_NS, TestHost, config, for_each_family, mac};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

/// Host with a socket on port 53, and a datagram from host 2 for that socket.
fn host_with_socket(
    family: Family,
    payload_bytes: usize,
) -> (TestHost, tidegate_stack::UdpId, Vec<u8>) {
    let mut host = TestHost::with_neighbour(2);
    let socket = host.bind(at(family.unspecified(), 53));
    let payload: Vec<u8> = (0..payload_bytes).map(|n| n as u8).collect();
    let datagram = udp(family.host(2), family.host(1), (4000, 53), &payload);
    (host, socket, datagram)
}

/// Frame with bytes `from..to` of a datagram.
fn fragment_frame(family: Family, id: u32, datagram: &[u8], from: usize, to: usize) -> Vec<u8> {
    let more = to < datagram.len();
    frame(&fragment(family.host(2), family.host(1), id, from, more, &datagram[from..to]))
}

#[test]
fn fragments_and_reassembles_long_datagrams() {
    for_each_family(|family| {
        let longest = if family == Family::V4 { 65_507 } else { 65_527 };
        for bytes in [1500, 4000, longest] {
            let mut settings = config(1);
            settings.limits.unresolved_frames = 64;
            let mut pair = HostPair { a: TestHost::new(settings), b: TestHost::new(config(2)) };
            let server = pair.b.bind(at(family.unspecified(), 53));
            let client = pair.a.bind(at(family.unspecified(), 4000));
            let payload: Vec<u8> = (0..bytes).map(|n| (n / 7) as u8).collect();
            pair.a.send(client, Some(at(family.host(2), 53)), &payload);
            pair.run();
            let (_, _, received) = pair.b.receive(server).unwrap();
            assert!(received == payload, "{family:?} {bytes}");
            pair.finish();
        }
    });
}

#[test]
fn fragments_fit_the_mtu_and_share_an_identification() {
    for_each_family(|family| {
        let mut host = TestHost::with_neighbour(2);
        let socket = host.bind(at(family.unspecified(), 4000));
        let mut identifications = Vec::new();
        for _ in 0..2 {
            host.send(socket, Some(at(family.host(2), 53)), &[7; 5000]);
            let sent = host.sent();
            assert!(sent.iter().all(|frame| packet_of(frame).len() <= 1500));
            let ids: Vec<_> = sent
                .iter()
                .map(|frame| match family {
                    Family::V4 => packet_of(frame)[4..6].to_vec(),
                    Family::V6 => packet_of(frame)[44..48].to_vec(),
                })
                .collect();
            assert!(ids.iter().all(|id| *id == ids[0]));
            identifications.push(ids[0].clone());
        }
        assert_ne!(identifications[0], identifications[1]);
        host.finish();
    });
}

#[test]
fn sends_all_fragments_or_none() {
    for_each_family(|family| {
        let mut settings = config(1);
        settings.limits.transmit_frames = 3;
        let mut host = TestHost::quiet(settings);
        host.stack.set_neighbour(host.now_ns, family.host(2), Some(mac(2)), &mut host.arena);
        let socket = host.bind(at(family.unspecified(), 4000));
        let to = Some(at(family.host(2), 53));
        let TestHost { stack, arena, now_ns } = &mut host;
        let result = stack.udp_send(*now_ns, arena, socket, to, None, &[1; 6000]);
        assert_eq!(result, Err(tidegate_stack::SendError::WouldBlock));
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn reassembles_in_any_order_and_drops_duplicates() {
    for_each_family(|family| {
        let (mut host, socket, datagram) = host_with_socket(family, 72);
        let cuts = [(0, 32), (32, 56), (56, 80)];
        for (id, order) in [[0, 1, 2], [2, 1, 0], [1, 2, 0]].into_iter().enumerate() {
            for (seen, at) in order.into_iter().enumerate() {
                let frame = fragment_frame(family, id as u32, &datagram, cuts[at].0, cuts[at].1);
                host.feed(&frame);
                if seen < 2 {
                    host.feed_dropped(&frame, DropReason::FragmentDuplicate);
                }
            }
            assert_eq!(host.receive(socket).unwrap().2, datagram[8..]);
        }
        assert_eq!(host.stack.counters().merged, 6);
        host.finish();
    });
}

#[test]
fn rejects_overlapping_fragments() {
    for_each_family(|family| {
        // Head, tail, inside, around, and the same range with other data.
        for (from, to) in [(0, 24), (24, 48), (24, 32), (8, 56), (16, 40)] {
            let (mut host, socket, datagram) = host_with_socket(family, 72);
            host.feed(&fragment_frame(family, 1, &datagram, 16, 40));
            let mut other = datagram.clone();
            other[24] ^= 1;
            host.feed(&fragment_frame(family, 1, &other, from, to));
            assert_eq!(host.drops(DropReason::FragmentOverlap), 2, "{from}..{to}");
            // No later fragment completes the packet.
            for (from, to) in [(0, 16), (16, 40), (40, 80)] {
                let late = fragment_frame(family, 1, &datagram, from, to);
                host.feed_dropped(&late, DropReason::FragmentOverlap);
            }
            assert!(host.receive(socket).is_none());
            assert!(host.sent().is_empty(), "overlaps cause no error (RFC 5722)");
            host.finish();
        }
    });
}

#[test]
fn rejects_packets_over_65535_bytes() {
    for_each_family(|family| {
        let (mut host, ..) = host_with_socket(family, 8);
        let (from, to) = (family.host(2), family.host(1));
        let beyond = frame(&fragment(from, to, 1, 65_528, false, &[0; 16]));
        host.feed_dropped(&beyond, DropReason::FragmentTooBig);
        // RFC 8200 section 4.5 requires an error to the sender; RFC 791 does not.
        assert_eq!(host.sent().len(), usize::from(family == Family::V6));
        host.finish();
    });
}

#[test]
fn rejects_fragments_of_invalid_length() {
    for_each_family(|family| {
        let (mut host, ..) = host_with_socket(family, 8);
        let (from, to) = (family.host(2), family.host(1));
        for (offset, data) in [(8, &[0; 15][..]), (8, &[])] {
            let bad = frame(&fragment(from, to, 1, offset, true, data));
            host.feed_dropped(&bad, DropReason::FragmentInvalid);
        }
        let sent = host.sent();
        assert_eq!(sent.len(), usize::from(family == Family::V6));
        if let Some(error_frame) = sent.first() {
            let error = &packet_of(error_frame)[40..];
            assert_eq!((&error[..2], &error[4..8]), (&[4, 0][..], &[0, 0, 0, 4][..]));
        }
        assert_eq!(host.stack.counters().held, 0);
        host.finish();
    });
}

#[test]
fn rejects_first_fragment_without_full_udp_header() {
    for_each_family(|family| {
        let (mut host, _, datagram) = host_with_socket(family, 72);
        let (from, to) = (family.host(2), family.host(1));
        // IPv4 fragments have lengths in steps of 8 bytes. Only a wrong length gives a first
        // fragment with less than a UDP header.
        let data = if family == Family::V4 { &datagram[..4] } else { &[] };
        let tiny = frame(&fragment(from, to, 1, 0, true, data));
        host.feed_dropped(&tiny, DropReason::FragmentHeaderChain);
        host.finish();
    });
}

#[test]
fn accepts_atomic_fragments() {
    for_each_family(|family| {
        let (mut host, socket, datagram) = host_with_socket(family, 72);
        // For IPv6 an atomic fragment (RFC 6946), which must not be mixed with other fragments of
        // the same identification.
        host.feed(&fragment_frame(family, 5, &datagram, 0, 32));
        host.feed(&fragment_frame(family, 5, &datagram, 0, 80));
        assert_eq!(host.receive(socket).unwrap().2, datagram[8..]);
        host.feed(&fragment_frame(family, 5, &datagram, 32, 80));
        assert_eq!(host.receive(socket).unwrap().2, datagram[8..]);
        host.finish();
    });
}

#[test]
fn times_out_incomplete_packet_and_sends_icmp_error() {
    for_each_family(|family| {
        let (mut host, _, datagram) = host_with_socket(family, 72);
        host.feed(&fragment_frame(family, 1, &datagram, 0, 32));
        host.feed(&fragment_frame(family, 1, &datagram, 56, 80));
        host.feed(&fragment_frame(family, 2, &datagram, 32, 56));
        assert_eq!(host.stack.counters().held, 3);
        host.advance(59 * SECOND_NS);
        assert!(host.sent().is_empty());
        host.advance(SECOND_NS);
        assert_eq!(host.drops(DropReason::FragmentTimeout), 3);
        assert_eq!(host.stack.counters().held, 0);
        // Only for the packet whose first fragment arrived.
        let sent = host.sent();
        let errors: Vec<_> = sent
            .iter()
            .map(|frame| packet_of(frame))
            .filter(|packet| is_reassembly_timeout(packet, &datagram[..32]))
            .collect();
        assert_eq!(errors.len(), 1);
        host.finish();
    });
}

fn is_reassembly_timeout(packet: &[u8], first: &[u8]) -> bool {
    if packet[0] >> 4 == 4 {
        let payload = Ipv4Header::parse(packet).unwrap().1;
        let message = Icmpv4Message::parse(payload).unwrap();
        return matches!(message, Icmpv4Message::TimeExceeded { code: 1, quote } if quote.ends_with(first));
    }
    let (header, payload) = Ipv6Header::parse(packet).unwrap();
    let message = Icmpv6Message::parse(&header, payload);
    matches!(message, Ok(Icmpv6Message::TimeExceeded { code: 1, quote }) if quote.ends_with(first))
}

#[test]
fn evicts_oldest_fragments_and_holds_no_frames() {
    for_each_family(|family| {
        let (mut host, socket, datagram) = host_with_socket(family, 72);
        let free = host.arena.available();
        for id in 0..20_000 {
            host.feed(&fragment_frame(family, id, &datagram, 32, 56));
        }
        assert_eq!(host.arena.available(), free, "fragments hold no frames");
        assert!(host.stack.counters().held <= 1024);
        assert!(host.drops(DropReason::FragmentMemory) >= 18_976);
        // A packet whose fragments arrive together is still reassembled.
        host.feed(&fragment_frame(family, 77_777, &datagram, 0, 32));
        host.feed(&fragment_frame(family, 77_777, &datagram, 32, 80));
        assert!(host.receive(socket).is_some());
        host.advance(61 * SECOND_NS);
        assert_eq!(host.stack.counters().held, 0);
        host.finish();
    });
}

#[test]
fn ignores_padding_behind_fragments() {
    for_each_family(|family| {
        let (mut host, socket, datagram) = host_with_socket(family, 72);
        for (from, to) in [(0, 32), (32, 80)] {
            let mut padded = fragment_frame(family, 1, &datagram, from, to);
            padded.extend([0xee; 9]);
            host.feed(&padded);
        }
        assert_eq!(host.receive(socket).unwrap().2, datagram[8..]);
        host.finish();
    });
}

#[test]
fn verifies_checksum_of_reassembled_datagram() {
    for_each_family(|family| {
        let (mut host, socket, mut datagram) = host_with_socket(family, 72);
        datagram[79] ^= 1;
        host.feed(&fragment_frame(family, 1, &datagram, 0, 32));
        host.feed(&fragment_frame(family, 1, &datagram, 32, 80));
        assert_eq!(host.drops(DropReason::UdpChecksum), 1);
        assert!(host.receive(socket).is_none());
        host.finish();
    });
}

#[test]
fn rejects_nested_fragments() {
    let family = Family::V6;
    let (mut host, _, datagram) = host_with_socket(family, 72);
    let (from, to) = (family.host(2), family.host(1));
    let inner = fragment(from, to, 9, 8, true, &datagram[8..32]);
    // The payload of the outer packet is another fragment header.
    let payload = &inner[40..];
    let outer = |offset: usize, more, data: &[u8]| {
        let mut head = vec![Protocol::FRAGMENT.0, 0, 0, 0, 0, 0, 0, 1];
        head[2..4].copy_from_slice(&(offset as u16 | u16::from(more)).to_be_bytes());
        head.extend(data);
        frame(&ip(from, to, Protocol::FRAGMENT, &head))
    };
    host.feed(&outer(16, false, &payload[16..]));
    host.feed_dropped(&outer(0, true, &payload[..16]), DropReason::FragmentInvalid);
    assert_eq!(host.stack.counters().held, 1);
    host.finish();
}
