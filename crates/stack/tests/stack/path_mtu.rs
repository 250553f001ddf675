//! Path MTU discovery through the public API.

use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{SendError, SocketError, UdpId, UdpOptions};
use tidegate_wire::{DropReason, Ipv4Header};

use crate::kit::packets::{frame, packet_of, packet_too_big, udp_packet};
use crate::kit::{Family, SECOND_NS, TestHost, for_each_family};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

/// Creates a host with a socket on port 4000 and sends one datagram of `payload_bytes`.
///
/// Returns the host, the socket and the IP packet that was sent.
fn host_after_sending(
    family: Family,
    options: UdpOptions,
    payload_bytes: usize,
) -> (TestHost, UdpId, Vec<u8>) {
    let mut host = TestHost::with_neighbour(2);
    let socket = host.stack.udp_bind(at(family.unspecified(), 4000), options).unwrap();
    host.send(socket, Some(at(family.host(2), 53)), &vec![1; payload_bytes]);
    let sent = packet_of(&host.sent_one()).to_vec();
    (host, socket, sent)
}

fn fragment_count_of_next_datagram(
    host: &mut TestHost,
    family: Family,
    socket: UdpId,
    bytes: usize,
) -> usize {
    host.send(socket, Some(at(family.host(2), 53)), &vec![1; bytes]);
    host.sent().len()
}

#[test]
fn fragments_for_smaller_path_mtu_until_it_expires() {
    for_each_family(|family| {
        let (mut host, socket, sent) = host_after_sending(family, UdpOptions::default(), 1400);
        assert_eq!(fragment_count_of_next_datagram(&mut host, family, socket, 1400), 1);
        let router = family.host(254);
        host.feed(&frame(&packet_too_big(router, family.host(1), 1300, &sent)));
        assert_eq!(fragment_count_of_next_datagram(&mut host, family, socket, 1400), 2);
        host.advance(601 * SECOND_NS);
        host.stack.set_neighbour(
            host.now_ns,
            family.host(2),
            Some(crate::kit::mac(2)),
            &mut host.arena,
        );
        host.sent();
        assert_eq!(
            fragment_count_of_next_datagram(&mut host, family, socket, 1400),
            1,
            "the path MTU entry has expired"
        );
        host.finish();
    });
}

#[test]
fn reports_size_limit_to_dont_fragment_socket() {
    for_each_family(|family| {
        let options = UdpOptions::default().dont_fragment(true);
        let (mut host, socket, sent) = host_after_sending(family, options, 1400);
        let remote = at(family.host(2), 53);
        host.stack.udp_connect(socket, remote).unwrap();
        host.feed(&frame(&packet_too_big(family.host(254), family.host(1), 1300, &sent)));
        let limit_bytes = 1300 - family.header_bytes() - 8;
        let error = host.stack.udp_take_error(socket);
        assert_eq!(error, Some(SocketError::MessageTooLong { remote, limit_bytes }));
        let TestHost { stack, arena, now_ns } = &mut host;
        let long = stack.udp_send(*now_ns, arena, socket, None, None, &[1; 1400]);
        assert_eq!(long, Err(SendError::MessageTooLong { limit_bytes }));
        let fits = stack.udp_send(*now_ns, arena, socket, None, None, &vec![1; limit_bytes]);
        assert_eq!(fits, Ok(()));
        host.finish();
    });
}

#[test]
fn path_mtu_below_minimum_does_not_shrink_fragments() {
    let (mut host, socket, sent) = host_after_sending(Family::V6, UdpOptions::default(), 1400);
    for mtu in [0, 68, 1279] {
        let error = packet_too_big(Family::V6.host(254), Family::V6.host(1), mtu, &sent);
        host.feed_dropped(&frame(&error), DropReason::IcmpMtu);
    }
    assert_eq!(fragment_count_of_next_datagram(&mut host, Family::V6, socket, 1400), 1);
    host.finish();

    let (mut host, socket, sent) = host_after_sending(Family::V4, UdpOptions::default(), 1400);
    host.feed(&frame(&packet_too_big(Family::V4.host(254), Family::V4.host(1), 100, &sent)));
    host.send(socket, Some(at(Family::V4.host(2), 53)), &[1; 500]);
    let small = host.sent_one();
    let header = Ipv4Header::parse(packet_of(&small)).unwrap().0;
    assert!(!header.dont_fragment, "the router has to fragment below the minimum path MTU");
    assert_eq!(fragment_count_of_next_datagram(&mut host, Family::V4, socket, 1400), 3);
    host.finish();
}

#[test]
fn ignores_path_mtu_without_quote_of_sent_packet() {
    for_each_family(|family| {
        let (mut host, socket, _) = host_after_sending(family, UdpOptions::default(), 1400);
        let router = family.host(254);
        let (us, peer) = (family.host(1), family.host(2));
        let forged = udp_packet(us, peer, (4001, 53), &[1; 1400]);
        host.feed_dropped(
            &frame(&packet_too_big(router, us, 1300, &forged)),
            DropReason::IcmpQuote,
        );
        // The quoted packet already fits into the reported MTU.
        let small = udp_packet(us, peer, (4000, 53), &[1; 100]);
        host.feed_dropped(&frame(&packet_too_big(router, us, 1300, &small)), DropReason::IcmpMtu);
        // A report never raises the path MTU.
        let large = udp_packet(us, peer, (4000, 53), &[1; 1400]);
        host.feed_dropped(&frame(&packet_too_big(router, us, 9000, &large)), DropReason::IcmpMtu);
        assert_eq!(fragment_count_of_next_datagram(&mut host, family, socket, 1400), 1);
        host.finish();
    });
}

#[test]
fn ignores_path_mtu_of_a_destination_that_nothing_was_sent_to() {
    for_each_family(|family| {
        let (mut host, _, _) = host_after_sending(family, UdpOptions::default(), 1400);
        let (router, us) = (family.host(254), family.host(1));
        for n in 3..250 {
            let invented = udp_packet(us, family.host(n), (4000, 53), &[1; 1400]);
            host.feed_dropped(
                &frame(&packet_too_big(router, us, 1300, &invented)),
                DropReason::IcmpQuote,
            );
        }
        host.finish();
    });
}

#[test]
fn reports_of_others_keep_no_report_out() {
    for_each_family(|family| {
        let mut limited = crate::kit::config(1);
        limited.limits.path_mtus = 2;
        let mut host = TestHost::quiet(limited);
        let socket = host.bind(at(family.unspecified(), 4000));
        for n in 2..12 {
            let peer = family.host(n);
            let TestHost { stack, arena, now_ns } = &mut host;
            stack.set_neighbour(*now_ns, peer, Some(crate::kit::mac(n)), arena);
            host.send(socket, Some(at(peer, 53)), &[1; 1400]);
            let sent = packet_of(&host.sent_one()).to_vec();
            host.feed(&frame(&packet_too_big(family.host(254), family.host(1), 1300, &sent)));
            host.send(socket, Some(at(peer, 53)), &[1; 1400]);
            assert_eq!(host.sent().len(), 2, "the report about host {n} holds");
        }
        host.finish();
    });
}
