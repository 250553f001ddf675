//! A router between two in-memory links, on a clock that the tests advance.

use std::net::IpAddr;
use std::path::Path;

use proptest::prelude::*;
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    listen, recv, send, socket_with,
};
use tidegate::{MacAddr, Route};
use tidegate_device::mem::{MemConfig, MemDevice, wire};
use tidegate_wire::icmpv4::unreachable;
use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, Icmpv4Message, Icmpv6Message, Ipv4Header,
    Ipv6Header, NdpMessage, NeighbourAdvertisement, Protocol, UdpHeader, checksum, udp,
};

use super::*;
use crate::filter::FilterConfig;
use crate::router::{InterfaceSpec, RouterConfig, RouterDevice, open};

const SECOND_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

fn for_both_families(test: impl Fn(Family)) {
    test(Family::V4);
    test(Family::V6);
}

impl Family {
    /// Address of host `n` on one of the links; 1 is the router.
    fn host(self, wire: u8, n: u8) -> IpAddr {
        match self {
            Self::V4 => format!("10.{wire}.0.{n}").parse().unwrap(),
            Self::V6 => format!("fd00:{wire}::{n}").parse().unwrap(),
        }
    }

    fn near(self) -> IpAddr {
        self.host(1, 2)
    }

    fn far(self) -> IpAddr {
        self.host(2, 2)
    }
}

fn mac(wire: u8, n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, wire, n])
}

/// Host 2 of a link: answers ARP requests and neighbour solicitations for its addresses unless
/// `silent`, and keeps all other frames.
struct TestHost {
    wire: u8,
    device: MemDevice,
    silent: bool,
    solicitations: usize,
    received: Vec<Vec<u8>>,
}

impl TestHost {
    #[track_caller]
    fn send(&mut self, ethertype: EtherType, payload: &[u8]) {
        assert!(self.try_send(ethertype, payload), "the link is full");
    }

    /// Sends a frame to the router, if the link has space.
    fn try_send(&mut self, ethertype: EtherType, payload: &[u8]) -> bool {
        let header = EthernetHeader {
            destination: mac(self.wire, 1),
            source: mac(self.wire, 2),
            vlan: None,
            ethertype,
        };
        let mut frame = vec![0; EthernetHeader::BYTES + payload.len()];
        header.emit(&mut frame).unwrap().copy_from_slice(payload);
        self.device.transmit_copies(1, &frame) == 1
    }

    fn send_packet(&mut self, packet: &[u8]) {
        let v4 = packet[0] >> 4 == 4;
        self.send(if v4 { EtherType::IPV4 } else { EtherType::IPV6 }, packet);
    }

    /// Receives and handles frames; returns true when there were any.
    fn poll(&mut self) -> bool {
        let mut frames = Vec::new();
        self.device.receive_bytes(usize::MAX, |frame| frames.push(frame.to_vec()));
        for frame in &frames {
            let (header, payload) = EthernetHeader::parse(frame).unwrap();
            if self.is_solicitation(header.ethertype, payload) {
                self.solicitations += 1;
                if !self.silent {
                    self.answer_solicitation(payload);
                }
            } else if header.destination == mac(self.wire, 2) {
                assert_eq!(header.source, mac(self.wire, 1));
                self.received.push(payload.to_vec());
            }
        }
        !frames.is_empty()
    }

    fn is_solicitation(&self, ethertype: EtherType, payload: &[u8]) -> bool {
        let target = match ethertype {
            EtherType::ARP => IpAddr::V4(ArpPacket::parse(payload).unwrap().0.target_ip),
            EtherType::IPV6 => {
                let (header, payload) = Ipv6Header::parse(payload).unwrap();
                match Icmpv6Message::parse(&header, payload) {
                    Ok(Icmpv6Message::Ndp(NdpMessage::NeighbourSolicitation {
                        target, ..
                    })) => target.into(),
                    _ => return false,
                }
            }
            _ => return false,
        };
        [Family::V4, Family::V6].iter().any(|family| family.host(self.wire, 2) == target)
    }

    fn answer_solicitation(&mut self, solicitation: &[u8]) {
        let own = mac(self.wire, 2);
        if let Ok((request, _)) = ArpPacket::parse(solicitation) {
            let reply = ArpPacket {
                operation: ArpOperation::Reply,
                sender_mac: own,
                sender_ip: request.target_ip,
                target_mac: request.sender_mac,
                target_ip: request.sender_ip,
            };
            let mut bytes = vec![0; ArpPacket::BYTES];
            assert!(reply.emit(&mut bytes).is_some());
            return self.send(EtherType::ARP, &bytes);
        }
        let (solicitation_header, _) = Ipv6Header::parse(solicitation).unwrap();
        let IpAddr::V6(target) = Family::V6.host(self.wire, 2) else {
            unreachable!("the address is IPv6")
        };
        let reply =
            Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
                router: false,
                solicited: true,
                overrides: true,
                target,
                target_mac: Some(own),
            }));
        let mut message = vec![0; reply.message_bytes()];
        reply.emit(target, solicitation_header.source, &mut message).unwrap();
        let packet =
            ip(target.into(), solicitation_header.source.into(), Protocol::ICMPV6, 255, &message);
        self.send_packet(&packet);
    }
}

fn ip(source: IpAddr, to: IpAddr, protocol: Protocol, hops: u8, payload: &[u8]) -> Vec<u8> {
    match (source, to) {
        (IpAddr::V4(source), IpAddr::V4(to)) => {
            let mut header = Ipv4Header::new(source, to, protocol, payload.len()).unwrap();
            header.ttl = hops;
            let mut packet = vec![0; 20 + payload.len()];
            header.emit(&mut packet).unwrap().copy_from_slice(payload);
            packet
        }
        (IpAddr::V6(source), IpAddr::V6(to)) => {
            let mut header = Ipv6Header::new(source, to, protocol, payload.len()).unwrap();
            header.hop_limit = hops;
            let mut packet = vec![0; 40 + payload.len()];
            header.emit(&mut packet).unwrap().copy_from_slice(payload);
            packet
        }
        _ => panic!("addresses of two families"),
    }
}

/// UDP datagram from the near host with `bytes` bytes of payload, all `fill`.
fn datagram(to: IpAddr, hops: u8, fill: u8, bytes: usize) -> Vec<u8> {
    let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
    let len = 8 + bytes;
    let mut message = vec![fill; len];
    UdpHeader::new(4000, 53, bytes).unwrap().emit(&mut message).unwrap();
    let pseudo = match (family.near(), to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            checksum::pseudo_header_v4(from, to, Protocol::UDP, len as u16)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            checksum::pseudo_header_v6(from, to, Protocol::UDP, len as u32)
        }
        _ => unreachable!("both addresses are of one family"),
    };
    udp::fill_checksum(pseudo, &mut message);
    ip(family.near(), to, Protocol::UDP, hops, &message)
}

fn echo_request(family: Family) -> Vec<u8> {
    let (from, to) = (family.near(), family.host(1, 1));
    match (from, to) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let request =
                Icmpv6Message::EchoRequest { identifier: 7, sequence: 1, data: b"there?" };
            let mut message = vec![0; request.message_bytes()];
            request.emit(source, destination, &mut message).unwrap();
            ip(from, to, Protocol::ICMPV6, 64, &message)
        }
        _ => {
            let request =
                Icmpv4Message::EchoRequest { identifier: 7, sequence: 1, data: b"there?" };
            let mut message = vec![0; request.message_bytes()];
            request.emit(&mut message).unwrap();
            ip(from, to, Protocol::ICMPV4, 64, &message)
        }
    }
}

fn is_echo_reply(packet: &[u8]) -> bool {
    if packet[0] >> 4 == 4 {
        let (_, payload) = Ipv4Header::parse(packet).unwrap();
        return matches!(
            Icmpv4Message::parse(payload),
            Ok(Icmpv4Message::EchoReply { data: b"there?", .. })
        );
    }
    let (header, payload) = Ipv6Header::parse(packet).unwrap();
    matches!(
        Icmpv6Message::parse(&header, payload),
        Ok(Icmpv6Message::EchoReply { data: b"there?", .. })
    )
}

/// ICMP error: source, destination, and its type, code and MTU.
type IcmpError = (IpAddr, IpAddr, (&'static str, u8, u32));

fn parse_icmp_error(packet: &[u8]) -> IcmpError {
    if packet[0] >> 4 == 4 {
        let (header, payload) = Ipv4Header::parse(packet).unwrap();
        let error = match Icmpv4Message::parse(payload).unwrap() {
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu, .. } => {
                ("unreachable", code, next_hop_mtu.into())
            }
            Icmpv4Message::TimeExceeded { code, .. } => ("time", code, 0),
            other => panic!("{other:?}"),
        };
        return (header.source.into(), header.destination.into(), error);
    }
    let (header, payload) = Ipv6Header::parse(packet).unwrap();
    let error = match Icmpv6Message::parse(&header, payload).unwrap() {
        Icmpv6Message::DestinationUnreachable { code, .. } => ("unreachable", code, 0),
        Icmpv6Message::TimeExceeded { code, .. } => ("time", code, 0),
        Icmpv6Message::PacketTooBig { mtu, .. } => ("too big", 0, mtu),
        other => panic!("{other:?}"),
    };
    (header.source.into(), header.destination.into(), error)
}

fn hop_limit_of(packet: &[u8]) -> u8 {
    match packet[0] >> 4 {
        4 => Ipv4Header::parse(packet).expect("a valid checksum").0.ttl,
        _ => Ipv6Header::parse(packet).unwrap().0.hop_limit,
    }
}

/// A router with a host on each of its two links.
struct Testbed {
    forwarder: Forwarder,
    near: TestHost,
    far: TestHost,
}

impl Testbed {
    fn new() -> Self {
        Self::with(1500, |_| ())
    }

    fn with_filter(path: &Path) -> Self {
        Self::with(1500, |config| config.filter = Some(FilterConfig::new(path)))
    }

    /// Testbed with this MTU on the far link and changes to the configuration.
    fn with(far_mtu: usize, change: impl FnOnce(&mut RouterConfig)) -> Self {
        let mut config = RouterConfig { frames: 512, hugepages: false, ..RouterConfig::default() };
        let [near, far] = [(1, 1500), (2, far_mtu)].map(|(n, mtu)| {
            let macs = [mac(n, 1).0, mac(n, 2).0];
            let (own, device) = wire(&MemConfig::default().macs(macs).mtu(mtu)).unwrap();
            let addresses = [format!("10.{n}.0.1/24"), format!("fd00:{n}::1/64")];
            config.interfaces.push(InterfaceSpec {
                device: RouterDevice::Mem(Box::new(own)),
                addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            });
            TestHost { wire: n, device, silent: false, solicitations: 0, received: Vec::new() }
        });
        change(&mut config);
        let mut testbed = Self { forwarder: open(config).unwrap(), near, far };
        // Wait for duplicate address detection.
        testbed.advance_time(3 * SECOND_NS);
        testbed.near.received.clear();
        testbed.far.received.clear();
        testbed
    }

    /// Advances the clock by `ns` in small steps and serves what is due.
    fn advance_time(&mut self, ns: u64) {
        for _ in 0..16 {
            self.forwarder.clock = self.forwarder.clock.advanced_by(ns / 16);
            self.run_until_idle();
        }
    }

    /// Runs router and hosts until no frame moves, or receiving is paused.
    fn run_until_idle(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            self.forwarder.mark_all_ready();
            loop {
                match self.forwarder.step().unwrap() {
                    ForwarderStep::Served(packets) => moved |= packets > 0,
                    ForwarderStep::Yield => {}
                    ForwarderStep::Wait(_) => break,
                }
            }
            self.forwarder.read_clock();
            self.forwarder.serve_timers();
            moved |= self.near.poll() | self.far.poll();
        }
    }

    fn take_received_far(&mut self) -> Vec<Vec<u8>> {
        self.run_until_idle();
        std::mem::take(&mut self.far.received)
    }

    fn take_received_near(&mut self) -> Vec<Vec<u8>> {
        self.run_until_idle();
        std::mem::take(&mut self.near.received)
    }

    fn drop_count(&mut self, reason: DropReason) -> u64 {
        self.forwarder.drops().get(reason)
    }
}

#[test]
fn forwards_with_decremented_hop_limit_after_resolution() {
    for_both_families(|family| {
        let mut testbed = Testbed::new();
        let sent = datagram(family.far(), 64, 7, 900);
        testbed.near.send_packet(&sent);
        let received = testbed.take_received_far();
        assert_eq!(testbed.far.solicitations, 1);
        assert_eq!((received.len(), hop_limit_of(&received[0])), (1, 63));
        let headers = if family == Family::V4 { 20 } else { 40 };
        assert_eq!(received[0][headers..], sent[headers..]);
        testbed.near.send_packet(&sent);
        assert_eq!(testbed.take_received_far().len(), 1);
        assert_eq!(testbed.far.solicitations, 1, "the neighbour is cached");
        assert_eq!(testbed.near.received, Vec::<Vec<u8>>::new());
        let counters = testbed.forwarder.counters();
        assert!(counters.turns > 2 && counters.busy_turns >= 2, "{counters:?}");
    });
}

#[test]
fn reports_unresolved_neighbour_to_sender() {
    for_both_families(|family| {
        let mut testbed = Testbed::new();
        testbed.far.silent = true;
        testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        testbed.run_until_idle();
        assert_eq!((testbed.far.solicitations, testbed.near.received.len()), (1, 0));
        testbed.advance_time(16 * SECOND_NS);
        assert_eq!(testbed.far.solicitations, 3);
        let code = if family == Family::V4 { unreachable::HOST } else { 3 };
        let received: Vec<_> =
            testbed.take_received_near().iter().map(|packet| parse_icmp_error(packet)).collect();
        assert_eq!(received.len(), 1);
        assert_eq!((received[0].1, received[0].2), (family.near(), ("unreachable", code, 0)));
        assert_eq!(testbed.drop_count(DropReason::NeighbourUnreachable), 1);
        // The host is solicited again, and answers now.
        testbed.far.silent = false;
        testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        assert_eq!(testbed.take_received_far().len(), 1);
    });
}

#[test]
fn reports_hop_limit_and_missing_route_to_sender() {
    for_both_families(|family| {
        let mut testbed = Testbed::new();
        let errors = [
            (datagram(family.far(), 1, 7, 9), ("time", 0, 0), DropReason::HopLimitExceeded),
            (datagram(family.host(9, 9), 64, 7, 9), ("unreachable", 0, 0), DropReason::NoRoute),
        ];
        for (packet, error, reason) in errors {
            testbed.near.send_packet(&packet);
            let received: Vec<_> = testbed
                .take_received_near()
                .iter()
                .map(|packet| parse_icmp_error(packet))
                .collect();
            assert_eq!(received, [(family.host(1, 1), family.near(), error)]);
            assert_eq!(testbed.drop_count(reason), 1);
        }
        assert_eq!(testbed.take_received_far(), Vec::<Vec<u8>>::new());
    });
}

#[test]
fn rate_limits_icmp_errors() {
    for_both_families(|family| {
        let mut testbed = Testbed::new();
        // The router resolves the sender first, so that no error waits for resolution.
        testbed.near.send_packet(&echo_request(family));
        assert!(is_echo_reply(&testbed.take_received_near()[0]));
        let began_ns = testbed.forwarder.read_clock();
        for _ in 0..50 {
            testbed.near.send_packet(&datagram(family.far(), 1, 7, 9));
        }
        let received = testbed.take_received_near().len();
        let refilled = (testbed.forwarder.read_clock() - began_ns) * 10 / SECOND_NS + 1;
        assert!((10..=10 + refilled as usize).contains(&received), "{received} errors were sent");
        assert_eq!(testbed.drop_count(DropReason::IcmpRateLimited), 50 - received as u64);
        assert_eq!(testbed.drop_count(DropReason::HopLimitExceeded), 50);
        testbed.advance_time(SECOND_NS);
        for _ in 0..10 {
            testbed.near.send_packet(&datagram(family.far(), 1, 7, 9));
        }
        assert_eq!(
            testbed.take_received_near().len(),
            10,
            "the rate limit refills within a second"
        );
    });
}

#[test]
fn reports_mtu_for_or_fragments_oversized_packets() {
    for_both_families(|family| {
        let mut testbed = Testbed::with(1300, |_| ());
        testbed.near.send_packet(&datagram(family.far(), 64, 7, 1300));
        let received: Vec<_> =
            testbed.take_received_near().iter().map(|packet| parse_icmp_error(packet)).collect();
        let error = match family {
            Family::V4 => ("unreachable", unreachable::FRAGMENTATION_NEEDED, 1300),
            Family::V6 => ("too big", 0, 1300),
        };
        assert_eq!(received, [(family.host(1, 1), family.near(), error)]);
        assert_eq!(testbed.drop_count(DropReason::PacketTooBig), 1);
        assert_eq!(testbed.take_received_far(), Vec::<Vec<u8>>::new());
        let fitting = 1300 - 8 - if family == Family::V4 { 20 } else { 40 };
        testbed.near.send_packet(&datagram(family.far(), 64, 7, fitting));
        assert_eq!(testbed.take_received_far()[0].len(), 1300);
    });
    let mut testbed = Testbed::with(1300, |_| ());
    let whole = datagram(Family::V4.far(), 64, 7, 1400);
    let (mut header, payload) = Ipv4Header::parse(&whole).unwrap();
    header.dont_fragment = false;
    let mut cuttable = whole.clone();
    header.emit(&mut cuttable).unwrap().copy_from_slice(payload);
    testbed.near.send_packet(&cuttable);
    let pieces = testbed.take_received_far();
    assert_eq!(pieces.len(), 2);
    let joined: Vec<u8> =
        pieces.iter().flat_map(|piece| Ipv4Header::parse(piece).unwrap().1.to_vec()).collect();
    assert_eq!(joined, payload);
}

#[test]
fn forwards_to_the_gateway_of_a_route() {
    for_both_families(|family| {
        let mut testbed = Testbed::with(1500, |config| {
            config.routes = [Family::V4, Family::V6]
                .map(|family| Route {
                    prefix: format!("{}/24", family.host(9, 0)).parse().unwrap(),
                    gateway: Some(family.far()),
                })
                .into();
        });
        testbed.near.send_packet(&datagram(family.host(9, 9), 64, 7, 9));
        assert_eq!(testbed.take_received_far().len(), 1);
    });
}

/// Nobody drains the far link: packets that do not fit wait, then are dropped and counted, and no
/// frame leaks.
#[test]
fn full_link_leaks_no_frame() {
    for_both_families(|family| {
        let mut testbed = Testbed::new();
        let packet = datagram(family.far(), 64, 7, 9);
        let ethertype = if family == Family::V4 { EtherType::IPV4 } else { EtherType::IPV6 };
        testbed.near.send_packet(&packet);
        assert_eq!(testbed.take_received_far().len(), 1);
        let mut sent = 0;
        for _ in 0..3 * 1024 {
            sent += u64::from(testbed.near.try_send(ethertype, &packet));
            testbed.forwarder.mark_all_ready();
            while let ForwarderStep::Served(_) = testbed.forwarder.step().unwrap() {}
            // Feedback pauses receiving for one time-out, not forever.
            testbed.forwarder.clock = testbed.forwarder.clock.advanced_by(1_000_000);
        }
        testbed.advance_time(SECOND_NS);
        let received = testbed.far.received.len() as u64;
        let dropped: u64 = testbed.forwarder.drops().nonzero().map(|(_, packets)| packets).sum();
        assert_eq!(received + dropped, sent);
        assert!(received >= 1024 && sent > 1024, "{received} of {sent}");
        for _ in 0..256 {
            testbed.near.send_packet(&packet);
        }
        testbed.run_until_idle();
        assert_eq!(testbed.far.received.len() as u64, received + 256);
    });
}

/// A packet filter whose other end is the test itself.
struct TestFilter {
    folder: tempfile::TempDir,
    listener: OwnedFd,
}

impl TestFilter {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Self::listen(folder.path());
        Self { folder, listener }
    }

    fn listen(folder: &Path) -> OwnedFd {
        let path = folder.join("screen");
        // An earlier filter may have left its socket there.
        let _ = std::fs::remove_file(&path);
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 1).unwrap();
        socket
    }

    fn testbed(&self) -> Testbed {
        Testbed::with_filter(&self.folder.path().join("screen"))
    }

    /// Accepts the router's connection.
    fn accept(&self) -> OwnedFd {
        accept(&self.listener).unwrap()
    }
}

/// Identifiers of the packets that the router requests verdicts on.
fn received_ids(connection: &OwnedFd) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut message = [0; 4096];
    while let Ok((len, _)) = recv(connection, &mut message[..], RecvFlags::DONTWAIT) {
        // One packet per message: a header of six bytes, then the start of the packet.
        assert!(len > 6, "the router disconnected");
        ids.push(u32::from_ne_bytes(message[..4].try_into().unwrap()));
    }
    ids
}

fn send_message(connection: &OwnedFd, message: &[u8]) -> bool {
    send(connection, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
}

fn verdict(id: u32, verdict: u8) -> [u8; 5] {
    let [a, b, c, d] = id.to_ne_bytes();
    [a, b, c, d, verdict]
}

#[test]
fn forwards_only_what_the_filter_passes() {
    for_both_families(|family| {
        let filter = TestFilter::new();
        let mut testbed = filter.testbed();
        for fill in 0..3 {
            testbed.near.send_packet(&datagram(family.far(), 64, fill, 9));
        }
        assert_eq!(testbed.take_received_far(), Vec::<Vec<u8>>::new());
        let connection = filter.accept();
        let ids = received_ids(&connection);
        assert_eq!(ids.len(), 3);
        send_message(&connection, &verdict(ids[0], 0));
        send_message(&connection, &verdict(ids[1], 1));
        let received = testbed.take_received_far();
        assert_eq!((received.len(), received[0].last()), (1, Some(&1)));
        assert_eq!(testbed.drop_count(DropReason::FilterRefused), 1);
        // A second verdict on the same packet is stray.
        send_message(&connection, &verdict(ids[0], 1));
        send_message(&connection, &verdict(ids[2], 2));
        assert_eq!(testbed.take_received_far(), Vec::<Vec<u8>>::new());
        let counters = testbed.forwarder.filter_counters().unwrap();
        assert_eq!((counters.passed, counters.refused, counters.stray_verdicts), (1, 2, 1));
    });
}

#[test]
fn verdict_flood_does_not_stall_the_router() {
    for_both_families(|family| {
        let filter = TestFilter::new();
        let mut testbed = filter.testbed();
        testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        testbed.run_until_idle();
        let connection = filter.accept();
        let id = received_ids(&connection)[0];
        // More messages than one turn may read, each about an unknown packet.
        let mut sent = 0;
        while sent < 10 * QUEUE_PACKETS && send_message(&connection, &verdict(id + 1, 1)) {
            sent += 1;
        }
        assert!(sent > 2 * QUEUE_PACKETS, "{sent}");
        let strays = |testbed: &Testbed| {
            testbed.forwarder.filter_counters().unwrap().stray_verdicts as usize
        };
        assert_eq!(testbed.forwarder.collect_verdicts(usize::MAX), 0);
        assert_eq!(strays(&testbed), QUEUE_PACKETS);
        testbed.near.send_packet(&echo_request(family));
        assert!(testbed.take_received_near().iter().any(|packet| is_echo_reply(packet)));
        while strays(&testbed) < sent {
            testbed.run_until_idle();
        }
        assert!(send_message(&connection, &verdict(id, 1)));
        assert_eq!(testbed.take_received_far().len(), 1, "a valid verdict still counts");
    });
}

#[test]
fn stalled_filter_times_out() {
    for_both_families(|family| {
        let filter = TestFilter::new();
        let mut testbed = filter.testbed();
        for _ in 0..100 {
            testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        }
        testbed.run_until_idle();
        let stuck = filter.accept();
        assert_eq!(testbed.forwarder.filter_counters().unwrap().requests, QUEUE_PACKETS as u64);
        testbed.near.send_packet(&echo_request(family));
        testbed.advance_time(9 * SECOND_NS);
        assert!(testbed.take_received_near().iter().any(|packet| is_echo_reply(packet)));
        let given_up = testbed.drop_count(DropReason::FilterGone);
        assert!(given_up >= QUEUE_PACKETS as u64, "{given_up}");
        assert_eq!(given_up + testbed.drop_count(DropReason::FilterQueueFull), 100);
        // These verdicts arrive too late.
        let ids = received_ids(&stuck);
        ids.iter().for_each(|&number| assert!(send_message(&stuck, &verdict(number, 1))));
        testbed.advance_time(SECOND_NS);
        assert_eq!(testbed.take_received_far(), Vec::<Vec<u8>>::new());
        // Verdicts on new packets count again.
        testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        testbed.run_until_idle();
        received_ids(&stuck)
            .iter()
            .for_each(|&number| assert!(send_message(&stuck, &verdict(number, 1))));
        assert_eq!(testbed.take_received_far().len(), 1);
    });
}

#[test]
fn filter_exit_drops_pending_packets_and_the_router_reconnects() {
    for_both_families(|family| {
        let mut filter = TestFilter::new();
        let mut testbed = filter.testbed();
        for _ in 0..10 {
            testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        }
        testbed.run_until_idle();
        let connection = filter.accept();
        let ids = received_ids(&connection);
        send_message(&connection, &verdict(ids[0], 1));
        // The last message is truncated.
        send_message(&connection, &verdict(ids[1], 1)[..4]);
        drop(connection);
        assert_eq!(testbed.take_received_far().len(), 1);
        assert_eq!(testbed.drop_count(DropReason::FilterGone), 9);
        filter.listener = TestFilter::listen(filter.folder.path());
        // The router reconnects after a while.
        testbed.advance_time(SECOND_NS);
        testbed.near.send_packet(&datagram(family.far(), 64, 7, 9));
        testbed.run_until_idle();
        let connection = filter.accept();
        let again = received_ids(&connection);
        assert_eq!(again.len(), 1);
        // A verdict meant for a packet of the first connection.
        send_message(&connection, &verdict(ids[2], 1));
        assert_eq!(testbed.take_received_far(), Vec::<Vec<u8>>::new());
        send_message(&connection, &verdict(again[0], 1));
        assert_eq!(testbed.take_received_far().len(), 1);
        assert_eq!(testbed.forwarder.filter_counters().unwrap().connections, 2);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the filter sends, a packet passes only when a "pass" verdict names it before
    /// any other verdict on it.
    #[test]
    fn hostile_filter_passes_only_named_packets(
        packets in 1..QUEUE_PACKETS / 2,
        said in prop::collection::vec(
            prop::collection::vec((prop_oneof![any::<u32>(), 32..80_u32], 0..3_u8), 1..8),
            0..20,
        ),
        torn in prop::collection::vec(any::<u8>(), 1..5),
    ) {
        let filter = TestFilter::new();
        let mut testbed = filter.testbed();
        for fill in 0..packets {
            testbed.near.send_packet(&datagram(Family::V4.far(), 64, fill as u8, 9));
        }
        testbed.run_until_idle();
        let connection = filter.accept();
        let mut waiting: Vec<(u32, usize)> = received_ids(&connection).into_iter().zip(0..).collect();
        prop_assert_eq!(waiting.len(), packets);
        let mut passed = Vec::new();
        for message in &said {
            let mut bytes = Vec::new();
            for &(number, says) in message {
                bytes.extend(verdict(number, says));
                if let Some(at) = waiting.iter().position(|&(waits, _)| waits == number) {
                    let (_, packet) = waiting.swap_remove(at);
                    passed.extend((says == 1).then_some(packet));
                }
            }
            bytes.extend(&torn[..torn.len().min(4)]);
            prop_assert!(send_message(&connection, &bytes));
            testbed.run_until_idle();
        }
        let heard = testbed.take_received_far();
        let heard: Vec<usize> = heard.iter().map(|packet| packet[packet.len() - 1].into()).collect();
        prop_assert_eq!(heard, passed);
        prop_assert_eq!(testbed.forwarder.filter.as_ref().unwrap().waiting(), waiting.len());
        // An empty message closes the connection.
        send_message(&connection, &[]);
        drop(connection);
        testbed.run_until_idle();
        prop_assert_eq!(testbed.drop_count(DropReason::FilterGone), waiting.len() as u64);
    }
}
