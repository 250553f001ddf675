//! Random input: nothing panics, no frame is lost, every packet is counted.

use std::net::SocketAddr;

use proptest::prelude::*;
use tidegate_stack::{AddressOwnership, UdpOptions};
use tidegate_wire::{
    ArpOperation, Icmpv6Message, MacAddr, NdpMessage, NeighbourAdvertisement, Protocol,
};

use crate::kit::packets::{
    arp, arp_frame, echo_request, fragment, frame, icmpv6_with_hops, ndp_frame, packet_too_big,
    port_unreachable, udp, udp_frame, udp_packet,
};
use crate::kit::{Family, SECOND_NS, TestHost, config};

/// Valid frames, at least one of every kind that the stack handles.
fn valid_frames() -> Vec<Vec<u8>> {
    let mut frames = vec![arp_frame(MacAddr::BROADCAST, arp(ArpOperation::Request, 2, 1))];
    frames.push(arp_frame(super::kit::mac(1), arp(ArpOperation::Reply, 2, 1)));
    for family in [Family::V4, Family::V6] {
        let (us, peer) = (family.host(1), family.host(2));
        frames.push(udp_frame(family, (4000, 53), b"a datagram"));
        frames.push(udp_frame(family, (4000, 9), b"for nobody"));
        frames.push(frame(&echo_request(peer, us, b"ping")));
        let ours = udp_packet(us, peer, (53, 4000), &[0; 1400]);
        frames.push(frame(&port_unreachable(peer, us, &ours[..200])));
        frames.push(frame(&packet_too_big(peer, us, 1300, &ours[..200])));
        let datagram = udp(peer, us, (4000, 53), &[3; 40]);
        frames.push(frame(&fragment(peer, us, 1, 0, true, &datagram[..24])));
        frames.push(frame(&fragment(peer, us, 1, 24, false, &datagram[24..])));
        frames.push(frame(&super::kit::packets::ip(peer, us, Protocol::TCP, &[0; 20])));
    }
    let (us, peer) = (Family::V6.host(1), Family::V6.host(2));
    let std::net::IpAddr::V6(target) = us else { panic!("an IPv6 host") };
    let source_mac = Some(super::kit::mac(2));
    frames.push(ndp_frame(peer, us, NdpMessage::NeighbourSolicitation { target, source_mac }));
    let std::net::IpAddr::V6(target) = peer else { panic!("an IPv6 host") };
    frames.push(ndp_frame(
        peer,
        us,
        NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
            router: false,
            solicited: true,
            overrides: true,
            target,
            target_mac: source_mac,
        }),
    ));
    let query = tidegate_wire::MldMessage::Query {
        maximum_response_code: 1000,
        group: std::net::Ipv6Addr::UNSPECIFIED,
    };
    let router = super::kit::mac(254).link_local().into();
    frames.push(frame(&icmpv6_with_hops(router, us, 1, &Icmpv6Message::Mld(query))));
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let extended = [&options[..], &udp(peer, us, (4000, 53), b"x")].concat();
    frames.push(frame(&super::kit::packets::ip(peer, us, Protocol::HOP_BY_HOP, &extended)));
    frames
}

/// A change to a frame.
#[derive(Clone, Debug)]
enum Mutation {
    None,
    Set(prop::sample::Index, u8),
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Grow(u8),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        Just(Mutation::None),
        (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, to)| Mutation::Set(at, to)),
        (any::<prop::sample::Index>(), 0..8u8).prop_map(|(at, bit)| Mutation::Flip(at, bit)),
        any::<prop::sample::Index>().prop_map(Mutation::Cut),
        any::<u8>().prop_map(Mutation::Grow),
    ]
}

impl Mutation {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            _ if bytes.is_empty() => {}
            Mutation::None => {}
            Mutation::Set(at, to) => {
                let at = at.index(bytes.len());
                bytes[at] = *to;
            }
            Mutation::Flip(at, bit) => {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
            }
            Mutation::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Mutation::Grow(by) => bytes.resize((bytes.len() + usize::from(*by)).min(1700), 0xaa),
        }
    }
}

/// One step of a random test: input, a call, or passing time.
#[derive(Clone, Debug)]
enum Step {
    Frame(prop::sample::Index, Vec<Mutation>),
    Noise(Vec<u8>),
    Send(bool, u8, u16),
    Pass(u64),
    Read,
    Transmit,
    LoopBack,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<prop::sample::Index>(), prop::collection::vec(mutation(), 0..3))
            .prop_map(|(at, mutations)| Step::Frame(at, mutations)),
        1 => prop::collection::vec(any::<u8>(), 0..200).prop_map(Step::Noise),
        2 => (any::<bool>(), 1..20u8, 0..5000u16).prop_map(|(v6, to, n)| Step::Send(v6, to, n)),
        1 => (0..70 * SECOND_NS).prop_map(Step::Pass),
        1 => Just(Step::Read),
        1 => Just(Step::Transmit),
        1 => Just(Step::LoopBack),
    ]
}

fn run(ownership: AddressOwnership, bare: bool, steps: &[Step]) {
    let mut settings = config(1);
    settings.ownership = ownership;
    settings.limits.neighbours = 8;
    settings.limits.transmit_frames = 64;
    settings.limits.socket_queue_packets = 16;
    if bare {
        settings.medium = tidegate_wire::Medium::Ip;
    }
    let mut host = TestHost::new(settings);
    let options = UdpOptions::default().report_errors(true);
    let sockets = [Family::V4, Family::V6].map(|family| {
        host.stack.udp_bind(SocketAddr::new(family.unspecified(), 53), options).unwrap()
    });
    let frames = valid_frames();
    for step in steps {
        match step {
            Step::Frame(at, mutations) => {
                let mut bytes = frames[at.index(frames.len())].clone();
                if bare {
                    bytes.drain(..14);
                }
                mutations.iter().for_each(|mutation| mutation.apply(&mut bytes));
                host.feed(&bytes);
            }
            Step::Noise(bytes) => host.feed(bytes),
            Step::Send(v6, to, bytes) => {
                let family = if *v6 { Family::V6 } else { Family::V4 };
                // The destination may be the host itself, and port 4000 has no socket.
                let port = if *bytes % 2 == 0 { 53 } else { 4000 };
                let to = SocketAddr::new(family.host((*to).saturating_sub(4).max(1)), port);
                let payload = vec![1; usize::from(*bytes)];
                let socket = sockets[usize::from(*v6)];
                let TestHost { stack, arena, now_ns } = &mut host;
                // Earlier steps decide whether the datagram can be sent.
                let _ = stack.udp_send(*now_ns, arena, socket, Some(to), None, &payload);
            }
            Step::Pass(ns) => host.advance(*ns),
            Step::Read => {
                for socket in sockets {
                    while host.receive(socket).is_some() {}
                    host.stack.udp_take_error(socket);
                }
                host.events();
            }
            Step::Transmit => {
                host.sent();
            }
            Step::LoopBack => {
                host.deliver_loopback();
            }
        }
        assert!(host.stack.transmit_queue().len() <= 64);
        assert!(host.stack.loopback_queue().len() <= 64);
        assert_eq!(host.stack.counters().balance(), 0);
    }
    host.finish();
}

proptest! {
    #[test]
    fn whatever_arrives_is_counted_and_no_frame_is_lost(
        shared in any::<bool>(),
        bare in any::<bool>(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        run(if shared { AddressOwnership::Shared } else { AddressOwnership::Exclusive }, bare, &steps);
    }
}

#[test]
fn counts_valid_frames_with_any_byte_corrupted() {
    for (kind, good) in valid_frames().iter().enumerate() {
        let mut host = TestHost::with_neighbour(2);
        host.bind(SocketAddr::new(Family::V4.unspecified(), 53));
        host.bind(SocketAddr::new(Family::V6.unspecified(), 53));
        for at in 0..good.len().min(120) {
            for value in [0, 1, 0x7f, 0x80, 0xff, good[at] ^ 1] {
                let mut bad = good.clone();
                bad[at] = value;
                host.feed(&bad);
                host.sent();
            }
        }
        assert!(host.stack.counters().received > 0, "frame {kind}");
        host.finish();
    }
}

/// Feeds the same datagrams to a host on the fast path and to a host on the slow path.
///
/// The second host is in a VLAN, so every frame goes through the parsers.
#[test]
fn fast_path_and_slow_path_agree() {
    let mut plain = TestHost::with_neighbour(2);
    let mut settings = config(1);
    settings.vlan = Some(7);
    let mut tagged = TestHost::quiet(settings);
    for family in [Family::V4, Family::V6] {
        let mac = Some(super::kit::mac(2));
        tagged.stack.set_neighbour(tagged.now_ns, family.host(2), mac, &mut tagged.arena);
        let any = SocketAddr::new(family.unspecified(), 53);
        let sockets = [plain.bind(any), tagged.bind(any)];
        let good = udp_frame(family, (4000, 53), b"payload");
        for at in 14..good.len() {
            for bit in 0..8 {
                let mut frame = good.clone();
                frame[at] ^= 1 << bit;
                plain.feed(&frame);
                frame.splice(12..12, [0x81, 0, 0, 7]);
                tagged.feed(&frame);
                let (a, b) = (plain.receive(sockets[0]), tagged.receive(sockets[1]));
                assert_eq!(a, b, "{family:?} byte {at} bit {bit}");
                let (sent_a, sent_b) = (plain.sent(), tagged.sent());
                let bare = |frames: &[Vec<u8>], link: usize| -> Vec<Vec<u8>> {
                    frames.iter().map(|frame| frame[link..].to_vec()).collect()
                };
                assert_eq!(bare(&sent_a, 14), bare(&sent_b, 18));
                assert_eq!(plain.stack.counters().drops, tagged.stack.counters().drops);
            }
        }
        for bytes in [0, 1, 2, 63, 64, 1400] {
            let to = Some(SocketAddr::new(family.host(2), 9));
            let payload = vec![0xa5; bytes];
            plain.send(sockets[0], to, &payload);
            tagged.send(sockets[1], to, &payload);
            assert_eq!(plain.sent_one()[14..], tagged.sent_one()[18..]);
        }
    }
    plain.finish();
    tagged.finish();
}
