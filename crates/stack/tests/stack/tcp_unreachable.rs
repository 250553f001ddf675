//! TCP and the network below: reasons of ICMP errors, and packets that routers may fragment.

use std::net::SocketAddr;

use tidegate_stack::{TcpId, TcpOptions, UnreachableReason};
use tidegate_wire::Ipv4Header;
use tidegate_wire::icmpv4::Icmpv4Message;

use crate::kit::packets::{frame, icmpv4, packet_of};
use crate::kit::{Family, SECOND_NS, TestHost};

/// Host that has sent a SYN, with the SYN's packet.
fn connecting(options: TcpOptions) -> (TestHost, TcpId, Vec<u8>) {
    let mut host = TestHost::with_neighbour(2);
    let TestHost { stack, arena, now_ns } = &mut host;
    let peer = SocketAddr::new(Family::V4.host(2), 80);
    let id = stack.tcp_connect(*now_ns, arena, None, peer, options).unwrap();
    let syn = packet_of(&host.sent_one()).to_vec();
    (host, id, syn)
}

#[test]
fn rfc1122_3_2_2_1_reports_why_the_peer_cannot_be_reached() {
    for (code, reason) in [
        (0, None),
        (1, None),
        (2, Some(UnreachableReason::Protocol)),
        (3, None),
        (5, Some(UnreachableReason::SourceRoute)),
        (7, Some(UnreachableReason::HostUnknown)),
        (8, Some(UnreachableReason::SourceIsolated)),
        (12, None),
    ] {
        let (mut host, id, quote) = connecting(TcpOptions::default());
        let message =
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu: 0, quote: &quote };
        let error = icmpv4(Family::V4.host(254), Family::V4.host(1), &message);
        host.feed(&frame(&error));
        host.advance(2 * SECOND_NS);
        assert_eq!(host.stack.tcp_info(id).unwrap().unreachable, reason, "code {code}");
        assert!(host.stack.tcp_take_error(id).is_some(), "code {code}");
        let TestHost { stack, arena, now_ns } = &mut host;
        stack.tcp_abort(*now_ns, arena, id);
        host.sent();
        host.finish();
    }
}

#[test]
fn rfc6864_4_2_a_retransmission_that_routers_may_fragment_has_a_new_identification() {
    for dont_fragment in [true, false] {
        let (mut host, id, syn) = connecting(TcpOptions::default().dont_fragment(dont_fragment));
        host.advance(SECOND_NS + SECOND_NS / 10);
        let again = host.sent_one();
        let [first, second] =
            [&syn[..], packet_of(&again)].map(|packet| Ipv4Header::parse(packet).unwrap().0);
        assert_eq!([first.dont_fragment, second.dont_fragment], [dont_fragment; 2]);
        assert_eq!(first.identification == second.identification, dont_fragment);
        let TestHost { stack, arena, now_ns } = &mut host;
        stack.tcp_abort(*now_ns, arena, id);
        host.sent();
        host.finish();
    }
}
