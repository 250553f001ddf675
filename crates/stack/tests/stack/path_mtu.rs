//! Path MTU discovery, from outside.

use std::net::{IpAddr, SocketAddr};

use tidegate_stack::{SendError, SocketError, UdpId, UdpOptions};
use tidegate_wire::{DropReason, Ipv4Header};

use crate::kit::packets::{frame, packet_of, too_big, udp_packet};
use crate::kit::{Family, Host, SECOND_NS, both};

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

/// A host with a socket on port 4000, and the packet that it sent with
/// `payload_bytes`.
fn after_sending(
    family: Family,
    options: UdpOptions,
    payload_bytes: usize,
) -> (Host, UdpId, Vec<u8>) {
    let mut host = Host::with_neighbour(2);
    let socket = host.stack.udp_bind(at(family.any(), 4000), options).unwrap();
    host.send(socket, Some(at(family.host(2), 53)), &vec![1; payload_bytes]);
    let sent = packet_of(&host.sent_one()).to_vec();
    (host, socket, sent)
}

fn fragments_of_next(host: &mut Host, family: Family, socket: UdpId, bytes: usize) -> usize {
    host.send(socket, Some(at(family.host(2), 53)), &vec![1; bytes]);
    host.sent().len()
}

#[test]
fn a_narrow_path_makes_fragments_for_a_while() {
    both(|family| {
        let (mut host, socket, sent) = after_sending(family, UdpOptions::default(), 1400);
        assert_eq!(fragments_of_next(&mut host, family, socket, 1400), 1);
        let router = family.host(254);
        host.feed(&frame(&too_big(router, family.host(1), 1300, &sent)));
        assert_eq!(fragments_of_next(&mut host, family, socket, 1400), 2);
        host.pass(601 * SECOND_NS);
        host.stack.set_neighbour(
            host.now_ns,
            family.host(2),
            Some(crate::kit::mac(2)),
            &mut host.arena,
        );
        host.sent();
        assert_eq!(fragments_of_next(&mut host, family, socket, 1400), 1, "beliefs age");
        host.finish();
    });
}

#[test]
fn who_forbids_fragments_is_told_how_much_fits() {
    both(|family| {
        let options = UdpOptions { dont_fragment: true, ..UdpOptions::default() };
        let (mut host, socket, sent) = after_sending(family, options, 1400);
        let remote = at(family.host(2), 53);
        host.stack.udp_connect(socket, remote).unwrap();
        host.feed(&frame(&too_big(family.host(254), family.host(1), 1300, &sent)));
        let limit_bytes = 1300 - family.header_bytes() - 8;
        let told = host.stack.udp_take_error(socket);
        assert_eq!(told, Some(SocketError::MessageTooLong { remote, limit_bytes }));
        let Host { stack, arena, now_ns } = &mut host;
        let long = stack.udp_send(*now_ns, arena, socket, None, None, &[1; 1400]);
        assert_eq!(long, Err(SendError::MessageTooLong { limit_bytes }));
        let fits = stack.udp_send(*now_ns, arena, socket, None, None, &vec![1; limit_bytes]);
        assert_eq!(fits, Ok(()));
        host.finish();
    });
}

#[test]
fn class_5_a_path_mtu_under_the_minimum_cannot_make_crumbs() {
    let (mut host, socket, sent) = after_sending(Family::V6, UdpOptions::default(), 1400);
    for mtu in [0, 68, 1279] {
        let error = too_big(Family::V6.host(254), Family::V6.host(1), mtu, &sent);
        host.feed_dropped(&frame(&error), DropReason::IcmpMtu);
    }
    assert_eq!(fragments_of_next(&mut host, Family::V6, socket, 1400), 1);
    host.finish();

    let (mut host, socket, sent) = after_sending(Family::V4, UdpOptions::default(), 1400);
    host.feed(&frame(&too_big(Family::V4.host(254), Family::V4.host(1), 100, &sent)));
    host.send(socket, Some(at(Family::V4.host(2), 53)), &[1; 500]);
    let small = host.sent_one();
    let header = Ipv4Header::parse(packet_of(&small)).unwrap().0;
    assert!(!header.dont_fragment, "the router has to cut what is under our minimum");
    assert_eq!(fragments_of_next(&mut host, Family::V4, socket, 1400), 3);
    host.finish();
}

#[test]
fn class_5_a_path_mtu_needs_the_quote_of_a_packet_of_ours() {
    both(|family| {
        let (mut host, socket, _) = after_sending(family, UdpOptions::default(), 1400);
        let router = family.host(254);
        let (us, peer) = (family.host(1), family.host(2));
        let forged = udp_packet(us, peer, (4001, 53), &[1; 1400]);
        host.feed_dropped(&frame(&too_big(router, us, 1300, &forged)), DropReason::IcmpQuote);
        // A packet that fits is no reason.
        let small = udp_packet(us, peer, (4000, 53), &[1; 100]);
        host.feed_dropped(&frame(&too_big(router, us, 1300, &small)), DropReason::IcmpMtu);
        // Nothing makes a path wider.
        let large = udp_packet(us, peer, (4000, 53), &[1; 1400]);
        host.feed_dropped(&frame(&too_big(router, us, 9000, &large)), DropReason::IcmpMtu);
        assert_eq!(fragments_of_next(&mut host, family, socket, 1400), 1);
        host.finish();
    });
}
