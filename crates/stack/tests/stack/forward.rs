//! Routers: forwarding, and the ICMP errors to senders of packets that are not forwarded.

use std::net::IpAddr;

use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_stack::{Config, Counters, Router, Stack};
use tidegate_wire::icmpv4::{time_exceeded, unreachable};
use tidegate_wire::{
    DropReason, EthernetHeader, Icmpv4Message, Icmpv6Message, Ipv4Header, Ipv6Header, MacAddr,
    Protocol, Sum, icmpv6, udp,
};

use crate::kit::packets::{
    echo_reply_data, echo_request, frame, frame_to, ip, ip_with_hops, packet_of, udp_packet,
};
use crate::kit::{Family, SECOND_NS, for_each_family, mac};

const FRAMES: u32 = 256;
/// Hardware address of the sending host in the near network.
const NEAR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// Hardware address of the host in the far network.
const FAR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

/// Router with two interfaces. Interface 0 is host 1 of the near network, with `mac(1)`. Interface
/// 1 is in the network of [`Family::far_host`], with `mac(9)`. All other hosts are behind a
/// host of the far network.
struct RouterTestbed {
    router: Router,
    arena: Arena,
    now_ns: u64,
}

/// Address of the router in the far network.
fn router_far_address(family: Family) -> IpAddr {
    match family {
        Family::V4 => "198.51.100.1".parse().unwrap(),
        Family::V6 => "2001:db8:ffff::1".parse().unwrap(),
    }
}

/// Address of a host behind the far network.
fn remote_host(family: Family) -> IpAddr {
    match family {
        Family::V4 => "203.0.113.9".parse().unwrap(),
        Family::V6 => "2001:db8:aaaa::9".parse().unwrap(),
    }
}

fn interface_config(n: u8, addresses: [&str; 2]) -> Config {
    let mut config = Config::ethernet(mac(n), [n; 16]);
    config.addresses = addresses.map(|address| address.parse().unwrap()).into();
    config.forwarding = true;
    config
}

impl RouterTestbed {
    fn new() -> Self {
        Self::with_far_config(|_| ())
    }

    /// Router with a changed configuration of the far interface.
    fn with_far_config(change: impl FnOnce(&mut Config)) -> Self {
        let arena =
            Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
                .unwrap();
        let near = interface_config(1, ["192.0.2.1/24", "2001:db8::1/64"]);
        let mut far = interface_config(9, ["198.51.100.1/24", "2001:db8:ffff::1/64"]);
        for (prefix, family) in [("203.0.113.0/24", Family::V4), ("2001:db8:aaaa::/48", Family::V6)]
        {
            far.routes.push(tidegate_stack::Route {
                prefix: prefix.parse().unwrap(),
                gateway: Some(family.far_host()),
            });
        }
        change(&mut far);
        let now_ns = 1_000 * SECOND_NS;
        let stacks = [near, far].map(|config| Stack::new(config, now_ns).unwrap());
        let mut testbed = Self { router: Router::new(stacks.into(), [3; 16]), arena, now_ns };
        testbed.advance(3 * SECOND_NS);
        testbed.sent(0);
        testbed.sent(1);
        testbed
    }

    /// Router with resolved entries for both hosts.
    fn with_neighbours() -> Self {
        Self::new().resolve_neighbours()
    }

    fn resolve_neighbours(mut self) -> Self {
        for family in [Family::V4, Family::V6] {
            let (now_ns, arena) = (self.now_ns, &mut self.arena);
            let near = self.router.stack_mut(0);
            near.set_neighbour(now_ns, family.host(2), Some(NEAR_MAC), arena);
            let far = self.router.stack_mut(1);
            far.set_neighbour(now_ns, family.far_host(), Some(FAR_MAC), arena);
        }
        self
    }

    fn feed(&mut self, interface: usize, bytes: &[u8]) {
        self.feed_with(interface, bytes, Checksum::Unknown);
    }

    fn feed_with(&mut self, interface: usize, bytes: &[u8], checksum: Checksum) {
        let mut frame = self.arena.alloc_from(bytes).unwrap();
        frame.set_checksum(checksum);
        self.router.handle_frame(self.now_ns, interface, frame, &mut self.arena);
        while let Some(transit) = self.router.poll_transit() {
            self.router.forward(self.now_ns, transit, &mut self.arena);
        }
        for stack in self.router.stacks() {
            assert_eq!(stack.counters().balance(), 0, "{:?}", stack.counters());
        }
    }

    fn sent(&mut self, interface: usize) -> Vec<Vec<u8>> {
        let frames: Vec<_> = self.router.transmit_queue(interface).drain(..).collect();
        let bytes = frames.iter().map(|frame| self.arena.bytes(frame).to_vec()).collect();
        frames.into_iter().for_each(|frame| self.arena.free(frame));
        bytes
    }

    #[track_caller]
    fn sent_one(&mut self, interface: usize) -> Vec<u8> {
        let mut sent = self.sent(interface);
        assert_eq!(sent.len(), 1, "frames sent: {sent:02x?}");
        sent.remove(0)
    }

    fn advance(&mut self, ns: u64) {
        let end_ns = self.now_ns + ns;
        while let Some(due_ns) = self.router.next_timeout().filter(|&due_ns| due_ns <= end_ns) {
            self.now_ns = self.now_ns.max(due_ns);
            self.router.handle_timeout(self.now_ns, &mut self.arena);
        }
        self.now_ns = end_ns;
    }

    fn counters(&self, interface: usize) -> &Counters {
        self.router.stacks()[interface].counters()
    }

    /// Feeds a frame that must be dropped for this reason.
    #[track_caller]
    fn feed_dropped(&mut self, bytes: &[u8], reason: DropReason) {
        let count = |testbed: &Self| {
            let all = testbed.router.stacks().iter().map(Stack::counters);
            all.map(|c| c.drops.get(reason) + c.transmit_drops.get(reason)).sum::<u64>()
        };
        let before = count(self);
        self.feed(0, bytes);
        assert_eq!(count(self), before + 1, "{:?} {:?}", self.counters(0), self.counters(1));
        assert!(self.sent(1).is_empty(), "the packet was forwarded");
    }

    fn finish(mut self) {
        let router = std::mem::replace(&mut self.router, Router::new(Vec::new(), [0; 16]));
        router.release(&mut self.arena);
        assert_eq!(self.arena.available(), FRAMES as usize, "frames were lost");
    }
}

/// Frame to the router with a datagram from the near host to the far host.
fn datagram_frame(family: Family, bytes: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..bytes).map(|n| n as u8).collect();
    frame(&udp_packet(family.host(2), family.far_host(), (4000, 53), &payload))
}

fn hop_limit_of(packet: &[u8]) -> u8 {
    match packet[0] >> 4 {
        4 => Ipv4Header::parse(packet).expect("the header has a valid checksum").0.ttl,
        _ => Ipv6Header::parse(packet).unwrap().0.hop_limit,
    }
}

/// ICMP error: sender, receiver, type with code and MTU, and quoted packet.
#[derive(Debug, PartialEq)]
struct IcmpError {
    from: IpAddr,
    to: IpAddr,
    kind: (&'static str, u8, usize),
    quote: Vec<u8>,
}

#[track_caller]
fn parse_icmp_error(frame: &[u8]) -> IcmpError {
    let packet = packet_of(frame);
    if packet[0] >> 4 == 4 {
        let (header, payload) = Ipv4Header::parse(packet).unwrap();
        let (kind, quote) = match Icmpv4Message::parse(payload).unwrap() {
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu, quote } => {
                (("unreachable", code, next_hop_mtu.into()), quote)
            }
            Icmpv4Message::TimeExceeded { code, quote } => (("time", code, 0), quote),
            other => panic!("{other:?}"),
        };
        let (from, to) = (header.source.into(), header.destination.into());
        return IcmpError { from, to, kind, quote: quote.into() };
    }
    let (header, payload) = Ipv6Header::parse(packet).unwrap();
    let (kind, quote) = match Icmpv6Message::parse(&header, payload).unwrap() {
        Icmpv6Message::DestinationUnreachable { code, quote } => (("unreachable", code, 0), quote),
        Icmpv6Message::TimeExceeded { code, quote } => (("time", code, 0), quote),
        Icmpv6Message::PacketTooBig { mtu, quote } => (("too big", 0, mtu as usize), quote),
        other => panic!("{other:?}"),
    };
    let (from, to) = (header.source.into(), header.destination.into());
    IcmpError { from, to, kind, quote: quote.into() }
}

#[test]
fn forwards_packets_and_decrements_hop_limit() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        let sent = datagram_frame(family, 100);
        let before = testbed.counters(1).transmitted;
        testbed.feed(0, &sent);
        let forwarded = testbed.sent_one(1);
        let (link, packet) = EthernetHeader::parse(&forwarded).unwrap();
        assert_eq!((link.source, link.destination), (mac(9), FAR_MAC));
        assert_eq!(hop_limit_of(packet), 63);
        let at = family.header_bytes();
        assert_eq!(packet[at..], packet_of(&sent)[at..], "the payload is unchanged");
        assert!(testbed.sent(0).is_empty());
        assert_eq!(
            (testbed.counters(0).forwarded, testbed.counters(1).transmitted - before),
            (1, 1)
        );
        testbed.finish();
    });
}

#[test]
fn forwards_through_gateway() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        testbed.feed(0, &frame(&udp_packet(family.host(2), remote_host(family), (1, 2), b"x")));
        let forwarded = testbed.sent_one(1);
        assert_eq!(EthernetHeader::parse(&forwarded).unwrap().0.destination, FAR_MAC);
        testbed.finish();
    });
}

#[test]
fn forwards_out_of_the_ingress_interface() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        let packet = udp_packet(remote_host(family), family.far_host(), (1, 2), b"x");
        testbed.feed(1, &frame_to(mac(9), &packet));
        assert_eq!(hop_limit_of(packet_of(&testbed.sent_one(1))), 63);
        assert!(testbed.sent(1).is_empty(), "no redirect is sent");
        testbed.finish();
    });
}

#[test]
fn strips_ethernet_padding() {
    let mut testbed = RouterTestbed::with_neighbours();
    let mut sent = datagram_frame(Family::V4, 1);
    let len = sent.len();
    sent.resize(60, 0xee);
    testbed.feed(0, &sent);
    assert_eq!(testbed.sent_one(1).len(), len);
    testbed.finish();
}

#[test]
fn sends_time_exceeded_at_the_last_hop() {
    for_each_family(|family| {
        for hops in [0, 1] {
            let mut testbed = RouterTestbed::with_neighbours();
            let packet =
                ip_with_hops(family.host(2), family.far_host(), Protocol::UDP, hops, &[0; 24]);
            testbed.feed_dropped(&frame(&packet), DropReason::HopLimitExceeded);
            let error = parse_icmp_error(&testbed.sent_one(0));
            assert_eq!((error.from, error.to), (family.host(1), family.host(2)));
            assert_eq!(error.kind, ("time", time_exceeded::IN_TRANSIT, 0));
            assert_eq!(error.quote[..packet.len()], packet);
            testbed.finish();
        }
        let mut testbed = RouterTestbed::with_neighbours();
        let packet = ip_with_hops(family.host(2), family.far_host(), Protocol::UDP, 2, &[0; 24]);
        testbed.feed(0, &frame(&packet));
        assert_eq!(hop_limit_of(packet_of(&testbed.sent_one(1))), 1);
        testbed.finish();
    });
}

#[test]
fn sends_unreachable_without_a_route() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        let nowhere: IpAddr = match family {
            Family::V4 => "8.8.8.8".parse().unwrap(),
            Family::V6 => "2001:4860::8888".parse().unwrap(),
        };
        let packet = udp_packet(family.host(2), nowhere, (1, 2), b"x");
        testbed.feed_dropped(&frame(&packet), DropReason::NoRoute);
        let error = parse_icmp_error(&testbed.sent_one(0));
        assert_eq!(error.kind, ("unreachable", 0, 0), "network unreachable, or no route");
        assert_eq!((error.from, error.to), (family.host(1), family.host(2)));
        testbed.finish();
    });
}

#[test]
fn sends_unreachable_for_silent_neighbour() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::new();
        let (now_ns, arena) = (testbed.now_ns, &mut testbed.arena);
        testbed.router.stack_mut(0).set_neighbour(now_ns, family.host(2), Some(NEAR_MAC), arena);
        testbed.feed(0, &datagram_frame(family, 10));
        assert_eq!(testbed.sent(1).len(), 1, "a solicitation");
        testbed.advance(10 * SECOND_NS);
        assert_eq!(testbed.sent(1).len(), 2, "two more solicitations");
        let error = parse_icmp_error(&testbed.sent_one(0));
        let code = if family == Family::V4 { unreachable::HOST } else { 3 };
        assert_eq!(error.kind, ("unreachable", code, 0));
        assert_eq!(error.to, family.host(2));
        assert_eq!(testbed.counters(1).transmit_drops.get(DropReason::NeighbourUnreachable), 1);
        testbed.finish();
    });
}

#[test]
fn bounds_unresolved_queue_and_sends_it_when_resolved() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_far_config(|far| far.limits.unresolved_frames = 3);
        for _ in 0..5 {
            testbed.feed(0, &datagram_frame(family, 10));
        }
        assert_eq!(testbed.counters(1).transmit_drops.get(DropReason::NeighbourQueueFull), 2);
        testbed.sent(1);
        let (now_ns, arena) = (testbed.now_ns, &mut testbed.arena);
        testbed.router.stack_mut(1).set_neighbour(now_ns, family.far_host(), Some(FAR_MAC), arena);
        let sent = testbed.sent(1);
        assert_eq!(sent.len(), 3);
        sent.iter().for_each(|frame| assert_eq!(hop_limit_of(packet_of(frame)), 63));
        testbed.finish();
    });
}

#[test]
fn reports_the_mtu_for_packets_too_big() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_far_config(|far| far.mtu = 1300).resolve_neighbours();
        let large = datagram_frame(family, 1300);
        testbed.feed_dropped(&large, DropReason::PacketTooBig);
        let error = parse_icmp_error(&testbed.sent_one(0));
        let expected = match family {
            Family::V4 => ("unreachable", unreachable::FRAGMENTATION_NEEDED, 1300),
            Family::V6 => ("too big", 0, 1300),
        };
        assert_eq!(error.kind, expected);
        let at = if family == Family::V4 { 576 - 28 } else { 1280 - 48 };
        assert_eq!(
            error.quote[..],
            packet_of(&large)[..at],
            "the largest quote that an error may carry"
        );
        // A packet of exactly the MTU is forwarded.
        testbed.feed(0, &datagram_frame(family, 1300 - 8 - family.header_bytes()));
        assert_eq!(packet_of(&testbed.sent_one(1)).len(), 1300);
        testbed.finish();
    });
}

/// Sets an MTU below the IPv6 minimum.
fn set_narrow_mtu(far: &mut Config) {
    far.addresses.retain(|address| address.address().is_ipv4());
    far.mtu = 600;
}

#[test]
fn fragments_ipv4_without_dont_fragment() {
    for options in [&[][..], &[7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0]] {
        let mut testbed = RouterTestbed::with_far_config(set_narrow_mtu).resolve_neighbours();
        let family = Family::V4;
        let payload: Vec<u8> = (0..1400).map(|n| (n * 7) as u8).collect();
        let packet = udp_packet(family.host(2), family.far_host(), (4000, 53), &payload);
        let (mut header, carried) = Ipv4Header::parse(&packet).unwrap();
        (header.dont_fragment, header.identification) = (false, 0x1234);
        header.header_bytes += options.len() as u8;
        header.total_bytes += options.len() as u16;
        let mut fragmentable = vec![0; packet.len() + options.len()];
        fragmentable[20..20 + options.len()].copy_from_slice(options);
        header.emit(&mut fragmentable).unwrap().copy_from_slice(carried);
        testbed.feed(0, &frame(&fragmentable));
        let fragments = testbed.sent(1);
        assert_eq!(fragments.len(), 3);
        let mut reassembled = Vec::new();
        for (at, fragment) in fragments.iter().enumerate() {
            let packet = packet_of(fragment);
            let (header, data) = Ipv4Header::parse(packet).unwrap();
            assert!(packet.len() <= 600 && header.ttl == 63 && header.identification == 0x1234);
            assert_eq!(usize::from(header.fragment_offset_bytes), reassembled.len());
            assert_eq!(header.more_fragments, at < 2);
            let carried = match at {
                0 => options,
                _ if options.is_empty() => options,
                _ => &options[8..],
            };
            assert_eq!(&packet[20..header.header_bytes.into()], carried);
            reassembled.extend_from_slice(data);
        }
        assert_eq!(reassembled, carried);
        testbed.finish();
    }
}

#[test]
fn fragments_a_fragment_at_the_right_offsets() {
    let mut testbed = RouterTestbed::with_far_config(set_narrow_mtu).resolve_neighbours();
    let (from, to) = (Family::V4.host(2), Family::V4.far_host());
    let fragment = crate::kit::packets::fragment(from, to, 5, 1480, true, &[7; 1000]);
    testbed.feed(0, &frame(&fragment));
    let headers: Vec<_> = testbed
        .sent(1)
        .iter()
        .map(|frame| Ipv4Header::parse(packet_of(frame)).unwrap().0)
        .map(|h| (h.fragment_offset_bytes, h.payload_bytes(), h.more_fragments))
        .collect();
    assert_eq!(headers, [(1480, 576, true), (2056, 424, true)]);
    testbed.finish();
}

#[test]
fn does_not_forward_link_scoped_addresses() {
    let near = Family::V4.host(2);
    let (near6, far6) = (Family::V6.host(2), Family::V6.far_host());
    let far = Family::V4.far_host();
    let address = |text: &str| -> IpAddr { text.parse().unwrap() };
    for (from, to, reason) in [
        (near, address("169.254.1.1"), DropReason::ForwardScope),
        (near, address("127.0.0.1"), DropReason::ForwardScope),
        (near, address("0.1.2.3"), DropReason::ForwardScope),
        (near, address("240.0.0.1"), DropReason::ForwardScope),
        (near, address("198.51.100.255"), DropReason::ForwardBroadcast),
        (near, address("224.0.0.9"), DropReason::Ipv4NotForUs),
        (address("169.254.1.1"), far, DropReason::ForwardScope),
        (address("127.0.0.1"), far, DropReason::Ipv4SourceInvalid),
        (address("0.0.0.0"), far, DropReason::Ipv4SourceInvalid),
        (address("224.0.0.1"), far, DropReason::Ipv4SourceInvalid),
        (address("255.255.255.255"), far, DropReason::Ipv4SourceInvalid),
        (address("192.0.2.255"), far, DropReason::Ipv4SourceInvalid),
        (address("192.0.2.1"), far, DropReason::Ipv4SourceInvalid),
        (near6, address("fe80::7"), DropReason::ForwardScope),
        (near6, address("::1"), DropReason::ForwardScope),
        (near6, address("::"), DropReason::ForwardScope),
        (near6, address("::ffff:198.51.100.7"), DropReason::ForwardScope),
        (near6, address("ff0e::7"), DropReason::Ipv6NotForUs),
        (address("::"), far6, DropReason::Ipv6SourceInvalid),
        (address("::1"), far6, DropReason::Ipv6SourceInvalid),
        (address("ff02::1"), far6, DropReason::Ipv6SourceInvalid),
        (address("2001:db8::1"), far6, DropReason::Ipv6SourceInvalid),
    ] {
        let mut testbed = RouterTestbed::with_neighbours();
        testbed.feed_dropped(&frame(&ip(from, to, Protocol::UDP, &[0; 24])), reason);
        assert!(testbed.sent(0).is_empty(), "{from} to {to} was answered");
        testbed.finish();
    }
}

#[test]
fn reports_beyond_scope_to_link_local_source() {
    let mut testbed = RouterTestbed::with_neighbours();
    let from: IpAddr = "fe80::2".parse().unwrap();
    let (now_ns, arena) = (testbed.now_ns, &mut testbed.arena);
    testbed.router.stack_mut(0).set_neighbour(now_ns, from, Some(NEAR_MAC), arena);
    let packet = ip(from, Family::V6.far_host(), Protocol::UDP, &[0; 24]);
    testbed.feed_dropped(&frame(&packet), DropReason::ForwardScope);
    let error = parse_icmp_error(&testbed.sent_one(0));
    assert_eq!(error.kind, ("unreachable", icmpv6::unreachable::BEYOND_SCOPE, 0));
    assert_eq!(error.to, from);
    testbed.finish();
}

#[test]
fn does_not_forward_link_broadcasts() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        let packet = udp_packet(family.host(2), family.far_host(), (1, 2), b"x");
        testbed.feed_dropped(&frame_to(MacAddr::BROADCAST, &packet), DropReason::ForwardLinkGroup);
        assert!(testbed.sent(0).is_empty());
        testbed.finish();
    });
}

#[test]
fn rejects_source_routes() {
    let mut testbed = RouterTestbed::with_neighbours();
    let packet = udp_packet(Family::V4.host(2), Family::V4.far_host(), (1, 2), b"x");
    let (mut header, carried) = Ipv4Header::parse(&packet).unwrap();
    header.header_bytes = 28;
    header.total_bytes += 8;
    let mut routed = vec![0; packet.len() + 8];
    routed[20..28].copy_from_slice(&[131, 7, 4, 198, 51, 100, 9, 0]);
    header.emit(&mut routed).unwrap().copy_from_slice(carried);
    testbed.feed_dropped(&frame(&routed), DropReason::Ipv4SourceRoute);
    testbed.finish();
}

#[test]
fn sends_no_error_about_icmp_errors() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        let (from, to) = (family.host(2), family.far_host());
        let error = crate::kit::packets::port_unreachable(from, to, &[0; 48]);
        let mut last_hop = error.clone();
        match family {
            Family::V4 => {
                let (mut header, payload) = Ipv4Header::parse(&error).unwrap();
                header.ttl = 1;
                header.emit(&mut last_hop).unwrap().copy_from_slice(payload);
            }
            Family::V6 => last_hop[7] = 1,
        }
        testbed.feed_dropped(&frame(&last_hop), DropReason::HopLimitExceeded);
        assert!(testbed.sent(0).is_empty());
        testbed.finish();
    });
}

#[test]
fn rate_limits_icmp_errors() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        let packet = ip_with_hops(family.host(2), family.far_host(), Protocol::UDP, 1, &[0; 24]);
        for _ in 0..50 {
            testbed.feed(0, &frame(&packet));
        }
        assert_eq!(testbed.sent(0).len(), 10);
        assert_eq!(testbed.counters(0).transmit_drops.get(DropReason::IcmpRateLimited), 40);
        testbed.finish();
    });
}

#[test]
fn replies_on_all_router_addresses() {
    for_each_family(|family| {
        for (to, bytes) in [
            (family.host(1), 32),
            (router_far_address(family), 32),
            (router_far_address(family), 1400),
        ] {
            let mut testbed = RouterTestbed::with_neighbours();
            let data = vec![7; bytes];
            testbed.feed(0, &frame(&echo_request(family.host(2), to, &data)));
            let reply = testbed.sent_one(0);
            let (link, packet) = EthernetHeader::parse(&reply).unwrap();
            assert_eq!(link.destination, NEAR_MAC);
            assert_eq!(echo_reply_data(packet).unwrap(), data);
            assert!(testbed.sent(1).is_empty());
            testbed.finish();
        }
        // Also to a host behind the far network.
        let mut testbed = RouterTestbed::with_neighbours();
        testbed.feed(0, &frame(&echo_request(remote_host(family), family.host(1), b"x")));
        assert_eq!(echo_reply_data(packet_of(&testbed.sent_one(1))).unwrap(), b"x");
        testbed.finish();
    });
}

#[test]
fn fills_or_offloads_partial_checksums() {
    for_each_family(|family| {
        for by_device in [false, true] {
            let mut testbed =
                RouterTestbed::with_far_config(|far| far.transmit_checksum = by_device)
                    .resolve_neighbours();
            let mut sent = datagram_frame(family, 101);
            let start = EthernetHeader::BYTES + family.header_bytes();
            let bytes = sent.len() - start;
            let (from, to) = (family.host(2), family.far_host());
            let pseudo = crate::kit::packets::pseudo(from, to, bytes);
            sent[start + 6..start + 8].copy_from_slice(&pseudo.fold().to_be_bytes());
            let partial = Checksum::Partial { start: start as u16, offset: 6 };
            testbed.feed_with(0, &sent, partial);
            let checksum = testbed.router.transmit_queue(1)[0].checksum();
            let forwarded = testbed.sent_one(1);
            if by_device {
                assert_eq!(checksum, partial);
                continue;
            }
            assert_eq!(checksum, Checksum::Unknown);
            assert!(pseudo.with(&forwarded[start..]).is_valid());
        }
    });
}

#[test]
fn keeps_checksum_of_verified_frames() {
    let mut testbed = RouterTestbed::with_neighbours();
    testbed.feed_with(0, &datagram_frame(Family::V4, 9), Checksum::Verified);
    assert_eq!(testbed.router.transmit_queue(1)[0].checksum(), Checksum::Unknown);
    let forwarded = testbed.sent_one(1);
    let (header, segment) = Ipv4Header::parse(packet_of(&forwarded)).unwrap();
    assert_eq!(udp::verify_v4(header.source, header.destination, segment), Ok(()));
    assert!(Sum::of(&packet_of(&forwarded)[..20]).is_valid());
    testbed.finish();
}

#[test]
fn host_does_not_forward() {
    for_each_family(|family| {
        let mut testbed = RouterTestbed::with_neighbours();
        testbed.router = Router::new(Vec::new(), [0; 16]);
        let mut config = interface_config(1, ["192.0.2.1/24", "2001:db8::1/64"]);
        config.forwarding = false;
        testbed.router = Router::new(vec![Stack::new(config, 0).unwrap()], [0; 16]);
        testbed.feed(0, &datagram_frame(family, 9));
        let reason = match family {
            Family::V4 => DropReason::Ipv4NotForUs,
            Family::V6 => DropReason::Ipv6NotForUs,
        };
        assert_eq!(testbed.counters(0).drops.get(reason), 1);
    });
}

#[test]
fn counts_packets_discarded_by_a_filter() {
    let mut testbed = RouterTestbed::with_neighbours();
    let frame = testbed.arena.alloc_from(&datagram_frame(Family::V4, 9)).unwrap();
    testbed.router.handle_frame(testbed.now_ns, 0, frame, &mut testbed.arena);
    let transit = testbed.router.poll_transit().unwrap();
    assert_eq!(transit.ingress(), 0);
    assert_eq!(transit.bytes(&testbed.arena), packet_of(&datagram_frame(Family::V4, 9)));
    testbed.router.discard(transit, DropReason::FilterRefused, &mut testbed.arena);
    assert_eq!(testbed.counters(0).transmit_drops.get(DropReason::FilterRefused), 1);
    assert!(testbed.sent(1).is_empty());
    testbed.finish();
}

mod random_packets {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any packets on any interface in any order: no frame is lost, and every sent packet
        /// is well formed and fits the link.
        #[test]
        fn leaks_no_frame_and_sends_only_valid_packets(
            frames in prop::collection::vec(
                (0..2_usize, any::<bool>(), 0..5_u8, 0..1490_usize, any::<[u8; 6]>(), 0..2_u64),
                1..40,
            ),
        ) {
            let mut testbed = RouterTestbed::with_far_config(|far| far.mtu = 1280).resolve_neighbours();
            for (interface, v4, hops, bytes, noise, seconds) in frames {
                let family = if v4 { Family::V4 } else { Family::V6 };
                let addresses = [family.host(2), family.far_host(), remote_host(family), router_far_address(family)];
                let at = |n: usize| addresses[usize::from(noise[n]) % addresses.len()];
                let bytes = bytes.min(1500 - family.header_bytes());
                let mut packet =
                    ip_with_hops(at(0), at(1), Protocol(noise[2] % 64), hops, &vec![noise[3]; bytes]);
                let offset = usize::from(noise[4]) % packet.len();
                if noise[5].is_multiple_of(4) {
                    packet[offset] ^= noise[5];
                } else if v4 && noise[5] % 4 == 1 {
                    let (mut header, payload) = Ipv4Header::parse(&packet.clone()).map(|(h, p)| (h, p.to_vec())).unwrap();
                    header.dont_fragment = false;
                    header.emit(&mut packet).unwrap().copy_from_slice(&payload);
                }
                testbed.feed(interface, &frame_to(mac(if interface == 0 { 1 } else { 9 }), &packet));
                for interface in 0..2 {
                    let mtu = if interface == 0 { 1500 } else { 1280 };
                    for sent in testbed.sent(interface) {
                        let (link, packet) = EthernetHeader::parse(&sent).unwrap();
                        if link.ethertype == tidegate_wire::EtherType::ARP {
                            continue;
                        }
                        prop_assert!(packet.len() <= mtu);
                        match packet[0] >> 4 {
                            4 => prop_assert!(Ipv4Header::parse(packet).is_ok()),
                            _ => prop_assert!(Ipv6Header::parse(packet).is_ok()),
                        }
                    }
                }
                testbed.advance(seconds * SECOND_NS);
            }
            testbed.finish();
        }
    }
}
