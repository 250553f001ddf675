//! Routers: what is forwarded, how, and what the sender is told when it is not.

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
use crate::kit::{Family, SECOND_NS, both, mac};

const FRAMES: u32 = 256;
/// The host in the near network that frames come from.
const NEAR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// The host in the far network.
const FAR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

/// Interface 0 is host 1 of the near network, with `mac(1)`; interface 1 is in
/// the network of [`Family::far_host`], with `mac(9)`. Everybody else is behind
/// a host of the far network.
struct Site {
    router: Router,
    arena: Arena,
    now_ns: u64,
}

/// The router's address in the far network.
fn far_side(family: Family) -> IpAddr {
    match family {
        Family::V4 => "198.51.100.1".parse().unwrap(),
        Family::V6 => "2001:db8:ffff::1".parse().unwrap(),
    }
}

/// Somebody far behind the far network.
fn remote(family: Family) -> IpAddr {
    match family {
        Family::V4 => "203.0.113.9".parse().unwrap(),
        Family::V6 => "2001:db8:aaaa::9".parse().unwrap(),
    }
}

fn interface(n: u8, addresses: [&str; 2]) -> Config {
    let mut config = Config::ethernet(mac(n), [n; 16]);
    config.addresses = addresses.map(|address| address.parse().unwrap()).into();
    config.forwarding = true;
    config
}

impl Site {
    fn new() -> Self {
        Self::with(|_| ())
    }

    /// With changes to the configuration of the far interface.
    fn with(change: impl FnOnce(&mut Config)) -> Self {
        let arena =
            Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
                .unwrap();
        let near = interface(1, ["192.0.2.1/24", "2001:db8::1/64"]);
        let mut far = interface(9, ["198.51.100.1/24", "2001:db8:ffff::1/64"]);
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
        let mut site = Self { router: Router::new(stacks.into(), [3; 16]), arena, now_ns };
        site.pass(3 * SECOND_NS);
        site.sent(0);
        site.sent(1);
        site
    }

    /// Both hosts' hardware addresses are known.
    fn with_neighbours() -> Self {
        Self::new().knowing_neighbours()
    }

    fn knowing_neighbours(mut self) -> Self {
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
        self.router.ingest(self.now_ns, interface, frame, &mut self.arena);
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

    fn pass(&mut self, ns: u64) {
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

    /// Feeds a frame that must go no further, for this reason.
    #[track_caller]
    fn feed_dropped(&mut self, bytes: &[u8], reason: DropReason) {
        let count = |site: &Self| {
            let all = site.router.stacks().iter().map(Stack::counters);
            all.map(|c| c.drops.get(reason) + c.transmit_drops.get(reason)).sum::<u64>()
        };
        let before = count(self);
        self.feed(0, bytes);
        assert_eq!(count(self), before + 1, "{:?} {:?}", self.counters(0), self.counters(1));
        assert!(self.sent(1).is_empty(), "it was forwarded");
    }

    fn finish(mut self) {
        let router = std::mem::replace(&mut self.router, Router::new(Vec::new(), [0; 16]));
        router.release(&mut self.arena);
        assert_eq!(self.arena.available(), FRAMES as usize, "frames were lost");
    }
}

/// A datagram from the near host to the far one, in a frame to the router.
fn datagram(family: Family, bytes: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..bytes).map(|n| n as u8).collect();
    frame(&udp_packet(family.host(2), family.far_host(), (4000, 53), &payload))
}

fn hops_of(packet: &[u8]) -> u8 {
    match packet[0] >> 4 {
        4 => Ipv4Header::parse(packet).expect("a right checksum").0.ttl,
        _ => Ipv6Header::parse(packet).unwrap().0.hop_limit,
    }
}

/// An ICMP error: who sent it, to whom, its type, code and MTU, and the quote.
#[derive(Debug, PartialEq)]
struct Told {
    from: IpAddr,
    to: IpAddr,
    what: (&'static str, u8, usize),
    quote: Vec<u8>,
}

#[track_caller]
fn told(frame: &[u8]) -> Told {
    let packet = packet_of(frame);
    if packet[0] >> 4 == 4 {
        let (header, payload) = Ipv4Header::parse(packet).unwrap();
        let (what, quote) = match Icmpv4Message::parse(payload).unwrap() {
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu, quote } => {
                (("unreachable", code, next_hop_mtu.into()), quote)
            }
            Icmpv4Message::TimeExceeded { code, quote } => (("time", code, 0), quote),
            other => panic!("{other:?}"),
        };
        let (from, to) = (header.source.into(), header.destination.into());
        return Told { from, to, what, quote: quote.into() };
    }
    let (header, payload) = Ipv6Header::parse(packet).unwrap();
    let (what, quote) = match Icmpv6Message::parse(&header, payload).unwrap() {
        Icmpv6Message::DestinationUnreachable { code, quote } => (("unreachable", code, 0), quote),
        Icmpv6Message::TimeExceeded { code, quote } => (("time", code, 0), quote),
        Icmpv6Message::PacketTooBig { mtu, quote } => (("too big", 0, mtu as usize), quote),
        other => panic!("{other:?}"),
    };
    let (from, to) = (header.source.into(), header.destination.into());
    Told { from, to, what, quote: quote.into() }
}

#[test]
fn a_packet_goes_to_the_other_side_with_one_hop_less() {
    both(|family| {
        let mut site = Site::with_neighbours();
        let sent = datagram(family, 100);
        let before = site.counters(1).transmitted;
        site.feed(0, &sent);
        let forwarded = site.sent_one(1);
        let (link, packet) = EthernetHeader::parse(&forwarded).unwrap();
        assert_eq!((link.source, link.destination), (mac(9), FAR_MAC));
        assert_eq!(hops_of(packet), 63);
        let at = family.header_bytes();
        assert_eq!(packet[at..], packet_of(&sent)[at..], "what it carries is as it was");
        assert!(site.sent(0).is_empty());
        assert_eq!((site.counters(0).forwarded, site.counters(1).transmitted - before), (1, 1));
        site.finish();
    });
}

#[test]
fn a_gateway_gets_what_is_behind_it() {
    both(|family| {
        let mut site = Site::with_neighbours();
        site.feed(0, &frame(&udp_packet(family.host(2), remote(family), (1, 2), b"x")));
        let forwarded = site.sent_one(1);
        assert_eq!(EthernetHeader::parse(&forwarded).unwrap().0.destination, FAR_MAC);
        site.finish();
    });
}

#[test]
fn a_packet_may_leave_where_it_came_from() {
    both(|family| {
        let mut site = Site::with_neighbours();
        let packet = udp_packet(remote(family), family.far_host(), (1, 2), b"x");
        site.feed(1, &frame_to(mac(9), &packet));
        assert_eq!(hops_of(packet_of(&site.sent_one(1))), 63);
        assert!(site.sent(1).is_empty(), "and nobody is told of a shorter way");
        site.finish();
    });
}

#[test]
fn the_padding_of_short_frames_stays_behind() {
    let mut site = Site::with_neighbours();
    let mut sent = datagram(Family::V4, 1);
    let len = sent.len();
    sent.resize(60, 0xee);
    site.feed(0, &sent);
    assert_eq!(site.sent_one(1).len(), len);
    site.finish();
}

#[test]
fn at_the_last_hop_the_sender_is_told_that_time_is_up() {
    both(|family| {
        for hops in [0, 1] {
            let mut site = Site::with_neighbours();
            let packet =
                ip_with_hops(family.host(2), family.far_host(), Protocol::UDP, hops, &[0; 24]);
            site.feed_dropped(&frame(&packet), DropReason::HopLimitExceeded);
            let told = told(&site.sent_one(0));
            assert_eq!((told.from, told.to), (family.host(1), family.host(2)));
            assert_eq!(told.what, ("time", time_exceeded::IN_TRANSIT, 0));
            assert_eq!(told.quote[..packet.len()], packet);
            site.finish();
        }
        let mut site = Site::with_neighbours();
        let packet = ip_with_hops(family.host(2), family.far_host(), Protocol::UDP, 2, &[0; 24]);
        site.feed(0, &frame(&packet));
        assert_eq!(hops_of(packet_of(&site.sent_one(1))), 1);
        site.finish();
    });
}

#[test]
fn nowhere_is_told_to_the_sender() {
    both(|family| {
        let mut site = Site::with_neighbours();
        let nowhere: IpAddr = match family {
            Family::V4 => "8.8.8.8".parse().unwrap(),
            Family::V6 => "2001:4860::8888".parse().unwrap(),
        };
        let packet = udp_packet(family.host(2), nowhere, (1, 2), b"x");
        site.feed_dropped(&frame(&packet), DropReason::NoRoute);
        let told = told(&site.sent_one(0));
        assert_eq!(told.what, ("unreachable", 0, 0), "network, or no route");
        assert_eq!((told.from, told.to), (family.host(1), family.host(2)));
        site.finish();
    });
}

#[test]
fn a_silent_host_is_told_to_the_sender() {
    both(|family| {
        let mut site = Site::new();
        let (now_ns, arena) = (site.now_ns, &mut site.arena);
        site.router.stack_mut(0).set_neighbour(now_ns, family.host(2), Some(NEAR_MAC), arena);
        site.feed(0, &datagram(family, 10));
        assert_eq!(site.sent(1).len(), 1, "a question");
        site.pass(10 * SECOND_NS);
        assert_eq!(site.sent(1).len(), 2, "two more");
        let told = told(&site.sent_one(0));
        let code = if family == Family::V4 { unreachable::HOST } else { 3 };
        assert_eq!(told.what, ("unreachable", code, 0));
        assert_eq!(told.to, family.host(2));
        assert_eq!(site.counters(1).transmit_drops.get(DropReason::NeighbourUnreachable), 1);
        site.finish();
    });
}

#[test]
fn what_waits_for_a_neighbour_is_bounded_and_goes_when_he_answers() {
    both(|family| {
        let mut site = Site::with(|far| far.limits.unresolved_frames = 3);
        for _ in 0..5 {
            site.feed(0, &datagram(family, 10));
        }
        assert_eq!(site.counters(1).transmit_drops.get(DropReason::NeighbourQueueFull), 2);
        site.sent(1);
        let (now_ns, arena) = (site.now_ns, &mut site.arena);
        site.router.stack_mut(1).set_neighbour(now_ns, family.far_host(), Some(FAR_MAC), arena);
        let sent = site.sent(1);
        assert_eq!(sent.len(), 3);
        sent.iter().for_each(|frame| assert_eq!(hops_of(packet_of(frame)), 63));
        site.finish();
    });
}

#[test]
fn what_does_not_fit_is_told_with_the_mtu() {
    both(|family| {
        let mut site = Site::with(|far| far.mtu = 1300).knowing_neighbours();
        let large = datagram(family, 1300);
        site.feed_dropped(&large, DropReason::PacketTooBig);
        let told = told(&site.sent_one(0));
        let expected = match family {
            Family::V4 => ("unreachable", unreachable::FRAGMENTATION_NEEDED, 1300),
            Family::V6 => ("too big", 0, 1300),
        };
        assert_eq!(told.what, expected);
        let at = if family == Family::V4 { 576 - 28 } else { 1280 - 48 };
        assert_eq!(told.quote[..], packet_of(&large)[..at], "as much as an error may quote");
        // Exactly fitting goes through.
        site.feed(0, &datagram(family, 1300 - 8 - family.header_bytes()));
        assert_eq!(packet_of(&site.sent_one(1)).len(), 1300);
        site.finish();
    });
}

/// Less than IPv6 may have.
fn narrow(far: &mut Config) {
    far.addresses.retain(|address| address.address().is_ipv4());
    far.mtu = 600;
}

#[test]
fn ipv4_without_the_flag_is_cut_and_arrives_whole() {
    for options in [&[][..], &[7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0]] {
        let mut site = Site::with(narrow).knowing_neighbours();
        let family = Family::V4;
        let payload: Vec<u8> = (0..1400).map(|n| (n * 7) as u8).collect();
        let packet = udp_packet(family.host(2), family.far_host(), (4000, 53), &payload);
        let (mut header, carried) = Ipv4Header::parse(&packet).unwrap();
        (header.dont_fragment, header.identification) = (false, 0x1234);
        header.header_bytes += options.len() as u8;
        header.total_bytes += options.len() as u16;
        let mut cuttable = vec![0; packet.len() + options.len()];
        cuttable[20..20 + options.len()].copy_from_slice(options);
        header.emit(&mut cuttable).unwrap().copy_from_slice(carried);
        site.feed(0, &frame(&cuttable));
        let pieces = site.sent(1);
        assert_eq!(pieces.len(), 3);
        let mut whole = Vec::new();
        for (at, piece) in pieces.iter().enumerate() {
            let packet = packet_of(piece);
            let (header, data) = Ipv4Header::parse(packet).unwrap();
            assert!(packet.len() <= 600 && header.ttl == 63 && header.identification == 0x1234);
            assert_eq!(usize::from(header.fragment_offset_bytes), whole.len());
            assert_eq!(header.more_fragments, at < 2);
            let carried = match at {
                0 => options,
                _ if options.is_empty() => options,
                _ => &options[8..],
            };
            assert_eq!(&packet[20..header.header_bytes.into()], carried);
            whole.extend_from_slice(data);
        }
        assert_eq!(whole, carried);
        site.finish();
    }
}

#[test]
fn a_fragment_is_cut_again_where_it_belongs() {
    let mut site = Site::with(narrow).knowing_neighbours();
    let (from, to) = (Family::V4.host(2), Family::V4.far_host());
    let fragment = crate::kit::packets::fragment(from, to, 5, 1480, true, &[7; 1000]);
    site.feed(0, &frame(&fragment));
    let places: Vec<_> = site
        .sent(1)
        .iter()
        .map(|frame| Ipv4Header::parse(packet_of(frame)).unwrap().0)
        .map(|h| (h.fragment_offset_bytes, h.payload_bytes(), h.more_fragments))
        .collect();
    assert_eq!(places, [(1480, 576, true), (2056, 424, true)]);
    site.finish();
}

#[test]
fn what_belongs_to_a_link_stays_there() {
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
        let mut site = Site::with_neighbours();
        site.feed_dropped(&frame(&ip(from, to, Protocol::UDP, &[0; 24])), reason);
        assert!(site.sent(0).is_empty(), "{from} to {to} was answered");
        site.finish();
    }
}

#[test]
fn a_link_local_source_is_told_that_it_cannot_be_answered() {
    let mut site = Site::with_neighbours();
    let from: IpAddr = "fe80::2".parse().unwrap();
    let (now_ns, arena) = (site.now_ns, &mut site.arena);
    site.router.stack_mut(0).set_neighbour(now_ns, from, Some(NEAR_MAC), arena);
    let packet = ip(from, Family::V6.far_host(), Protocol::UDP, &[0; 24]);
    site.feed_dropped(&frame(&packet), DropReason::ForwardScope);
    let told = told(&site.sent_one(0));
    assert_eq!(told.what, ("unreachable", icmpv6::unreachable::BEYOND_SCOPE, 0));
    assert_eq!(told.to, from);
    site.finish();
}

#[test]
fn a_broadcast_of_the_link_is_not_forwarded() {
    both(|family| {
        let mut site = Site::with_neighbours();
        let packet = udp_packet(family.host(2), family.far_host(), (1, 2), b"x");
        site.feed_dropped(&frame_to(MacAddr::BROADCAST, &packet), DropReason::ForwardLinkGroup);
        assert!(site.sent(0).is_empty());
        site.finish();
    });
}

#[test]
fn source_routes_are_not_followed() {
    let mut site = Site::with_neighbours();
    let packet = udp_packet(Family::V4.host(2), Family::V4.far_host(), (1, 2), b"x");
    let (mut header, carried) = Ipv4Header::parse(&packet).unwrap();
    header.header_bytes = 28;
    header.total_bytes += 8;
    let mut routed = vec![0; packet.len() + 8];
    routed[20..28].copy_from_slice(&[131, 7, 4, 198, 51, 100, 9, 0]);
    header.emit(&mut routed).unwrap().copy_from_slice(carried);
    site.feed_dropped(&frame(&routed), DropReason::Ipv4SourceRoute);
    site.finish();
}

#[test]
fn errors_about_errors_are_not_sent() {
    both(|family| {
        let mut site = Site::with_neighbours();
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
        site.feed_dropped(&frame(&last_hop), DropReason::HopLimitExceeded);
        assert!(site.sent(0).is_empty());
        site.finish();
    });
}

#[test]
fn errors_have_a_rate() {
    both(|family| {
        let mut site = Site::with_neighbours();
        let packet = ip_with_hops(family.host(2), family.far_host(), Protocol::UDP, 1, &[0; 24]);
        for _ in 0..50 {
            site.feed(0, &frame(&packet));
        }
        assert_eq!(site.sent(0).len(), 10);
        assert_eq!(site.counters(0).transmit_drops.get(DropReason::IcmpRateLimited), 40);
        site.finish();
    });
}

#[test]
fn the_router_answers_on_all_of_its_addresses() {
    both(|family| {
        for (to, bytes) in [(family.host(1), 32), (far_side(family), 32), (far_side(family), 1400)]
        {
            let mut site = Site::with_neighbours();
            let data = vec![7; bytes];
            site.feed(0, &frame(&echo_request(family.host(2), to, &data)));
            let reply = site.sent_one(0);
            let (link, packet) = EthernetHeader::parse(&reply).unwrap();
            assert_eq!(link.destination, NEAR_MAC);
            assert_eq!(echo_reply_data(packet).unwrap(), data);
            assert!(site.sent(1).is_empty());
            site.finish();
        }
        // And to somebody beyond the other side.
        let mut site = Site::with_neighbours();
        site.feed(0, &frame(&echo_request(remote(family), family.host(1), b"x")));
        assert_eq!(echo_reply_data(packet_of(&site.sent_one(1))).unwrap(), b"x");
        site.finish();
    });
}

#[test]
fn a_checksum_that_was_left_to_a_card_is_filled_or_passed_on() {
    both(|family| {
        for by_port in [false, true] {
            let mut site = Site::with(|far| far.transmit_checksum = by_port).knowing_neighbours();
            let mut sent = datagram(family, 101);
            let start = EthernetHeader::BYTES + family.header_bytes();
            let bytes = sent.len() - start;
            let (from, to) = (family.host(2), family.far_host());
            let pseudo = crate::kit::packets::pseudo(from, to, bytes);
            sent[start + 6..start + 8].copy_from_slice(&pseudo.fold().to_be_bytes());
            let partial = Checksum::Partial { start: start as u16, offset: 6 };
            site.feed_with(0, &sent, partial);
            let left = site.router.transmit_queue(1)[0].checksum();
            let forwarded = site.sent_one(1);
            if by_port {
                assert_eq!(left, partial);
                continue;
            }
            assert_eq!(left, Checksum::Unknown);
            assert!(pseudo.with(&forwarded[start..]).is_valid());
        }
    });
}

#[test]
fn a_checked_frame_goes_out_with_the_checksum_that_it_has() {
    let mut site = Site::with_neighbours();
    site.feed_with(0, &datagram(Family::V4, 9), Checksum::Verified);
    assert_eq!(site.router.transmit_queue(1)[0].checksum(), Checksum::Unknown);
    let forwarded = site.sent_one(1);
    let (header, segment) = Ipv4Header::parse(packet_of(&forwarded)).unwrap();
    assert_eq!(udp::verify_v4(header.source, header.destination, segment), Ok(()));
    assert!(Sum::of(&packet_of(&forwarded)[..20]).is_valid());
    site.finish();
}

#[test]
fn a_host_forwards_nothing() {
    both(|family| {
        let mut site = Site::with_neighbours();
        site.router = Router::new(Vec::new(), [0; 16]);
        let mut config = interface(1, ["192.0.2.1/24", "2001:db8::1/64"]);
        config.forwarding = false;
        site.router = Router::new(vec![Stack::new(config, 0).unwrap()], [0; 16]);
        site.feed(0, &datagram(family, 9));
        let reason = match family {
            Family::V4 => DropReason::Ipv4NotForUs,
            Family::V6 => DropReason::Ipv6NotForUs,
        };
        assert_eq!(site.counters(0).drops.get(reason), 1);
    });
}

#[test]
fn a_packet_that_somebody_refuses_is_counted() {
    let mut site = Site::with_neighbours();
    let frame = site.arena.alloc_from(&datagram(Family::V4, 9)).unwrap();
    site.router.ingest(site.now_ns, 0, frame, &mut site.arena);
    let transit = site.router.poll_transit().unwrap();
    assert_eq!(transit.ingress(), 0);
    assert_eq!(transit.bytes(&site.arena), packet_of(&datagram(Family::V4, 9)));
    site.router.discard(transit, DropReason::ScreenRefused, &mut site.arena);
    assert_eq!(site.counters(0).transmit_drops.get(DropReason::ScreenRefused), 1);
    assert!(site.sent(1).is_empty());
    site.finish();
}

mod anything {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever arrives, wherever, in whatever order: no frame is lost,
        /// and what leaves is a well-formed packet that fits the link.
        #[test]
        fn no_frame_is_lost(
            frames in prop::collection::vec(
                (0..2_usize, any::<bool>(), 0..5_u8, 0..1490_usize, any::<[u8; 6]>(), 0..2_u64),
                1..40,
            ),
        ) {
            let mut site = Site::with(|far| far.mtu = 1280).knowing_neighbours();
            for (interface, v4, hops, bytes, noise, seconds) in frames {
                let family = if v4 { Family::V4 } else { Family::V6 };
                let ends = [family.host(2), family.far_host(), remote(family), far_side(family)];
                let at = |n: usize| ends[usize::from(noise[n]) % ends.len()];
                let bytes = bytes.min(1500 - family.header_bytes());
                let mut packet =
                    ip_with_hops(at(0), at(1), Protocol(noise[2] % 64), hops, &vec![noise[3]; bytes]);
                let place = usize::from(noise[4]) % packet.len();
                if noise[5].is_multiple_of(4) {
                    packet[place] ^= noise[5];
                } else if v4 && noise[5] % 4 == 1 {
                    let (mut header, payload) = Ipv4Header::parse(&packet.clone()).map(|(h, p)| (h, p.to_vec())).unwrap();
                    header.dont_fragment = false;
                    header.emit(&mut packet).unwrap().copy_from_slice(&payload);
                }
                site.feed(interface, &frame_to(mac(if interface == 0 { 1 } else { 9 }), &packet));
                for interface in 0..2 {
                    let mtu = if interface == 0 { 1500 } else { 1280 };
                    for sent in site.sent(interface) {
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
                site.pass(seconds * SECOND_NS);
            }
            site.finish();
        }
    }
}
