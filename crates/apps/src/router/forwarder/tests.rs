//! A router between two wires in memory, on a clock that is put forward.

use std::net::IpAddr;
use std::path::Path;

use proptest::prelude::*;
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    listen, recv, send, socket_with,
};
use tidegate::{MacAddr, Route};
use tidegate_port::mem::{MemConfig, MemPort, wire};
use tidegate_wire::icmpv4::unreachable;
use tidegate_wire::{
    ArpOperation, ArpPacket, EtherType, EthernetHeader, Icmpv4Message, Icmpv6Message, Ipv4Header,
    Ipv6Header, NdpMessage, NeighbourAdvertisement, Protocol, UdpHeader, checksum, udp,
};

use super::*;
use crate::router::{PortSpec, RouterConfig, RouterPort, open};
use crate::screen::ScreenConfig;

const SECOND_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

fn both(test: impl Fn(Family)) {
    test(Family::V4);
    test(Family::V6);
}

impl Family {
    /// Host `n` of the network on one of the wires; 1 is the router.
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

/// Host 2 of a wire: it answers questions about its addresses, unless told not
/// to, and keeps what else it hears.
struct Host {
    wire: u8,
    port: MemPort,
    silent: bool,
    questions: usize,
    heard: Vec<Vec<u8>>,
}

impl Host {
    #[track_caller]
    fn send(&mut self, ethertype: EtherType, payload: &[u8]) {
        assert!(self.try_send(ethertype, payload), "the wire is full");
    }

    /// Sends a frame to the router, if the wire has room.
    fn try_send(&mut self, ethertype: EtherType, payload: &[u8]) -> bool {
        let header = EthernetHeader {
            destination: mac(self.wire, 1),
            source: mac(self.wire, 2),
            vlan: None,
            ethertype,
        };
        let mut frame = vec![0; EthernetHeader::BYTES + payload.len()];
        header.emit(&mut frame).unwrap().copy_from_slice(payload);
        self.port.transmit_copies(1, &frame) == 1
    }

    fn send_packet(&mut self, packet: &[u8]) {
        let v4 = packet[0] >> 4 == 4;
        self.send(if v4 { EtherType::IPV4 } else { EtherType::IPV6 }, packet);
    }

    /// Takes what came; returns whether anything did.
    fn attend(&mut self) -> bool {
        let mut frames = Vec::new();
        self.port.receive_bytes(usize::MAX, |frame| frames.push(frame.to_vec()));
        for frame in &frames {
            let (header, payload) = EthernetHeader::parse(frame).unwrap();
            if self.is_asked(header.ethertype, payload) {
                self.questions += 1;
                if !self.silent {
                    self.answer(payload);
                }
            } else if header.destination == mac(self.wire, 2) {
                assert_eq!(header.source, mac(self.wire, 1));
                self.heard.push(payload.to_vec());
            }
        }
        !frames.is_empty()
    }

    fn is_asked(&self, ethertype: EtherType, payload: &[u8]) -> bool {
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

    fn answer(&mut self, question: &[u8]) {
        let own = mac(self.wire, 2);
        if let Ok((asked, _)) = ArpPacket::parse(question) {
            let answer = ArpPacket {
                operation: ArpOperation::Reply,
                sender_mac: own,
                sender_ip: asked.target_ip,
                target_mac: asked.sender_mac,
                target_ip: asked.sender_ip,
            };
            let mut bytes = vec![0; ArpPacket::BYTES];
            assert!(answer.emit(&mut bytes).is_some());
            return self.send(EtherType::ARP, &bytes);
        }
        let (asked, _) = Ipv6Header::parse(question).unwrap();
        let IpAddr::V6(target) = Family::V6.host(self.wire, 2) else { unreachable!("it is IPv6") };
        let answer =
            Icmpv6Message::Ndp(NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
                router: false,
                solicited: true,
                overrides: true,
                target,
                target_link: Some(own),
            }));
        let mut message = vec![0; answer.message_bytes()];
        answer.emit(target, asked.source, &mut message).unwrap();
        let packet = ip(target.into(), asked.source.into(), Protocol::ICMPV6, 255, &message);
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

/// A datagram from the near host with so many bytes of payload, all `fill`.
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
        _ => unreachable!("both are of one family"),
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

/// An ICMP error: from whom, to whom, its type, code and MTU.
type Told = (IpAddr, IpAddr, (&'static str, u8, u32));

fn told(packet: &[u8]) -> Told {
    if packet[0] >> 4 == 4 {
        let (header, payload) = Ipv4Header::parse(packet).unwrap();
        let what = match Icmpv4Message::parse(payload).unwrap() {
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu, .. } => {
                ("unreachable", code, next_hop_mtu.into())
            }
            Icmpv4Message::TimeExceeded { code, .. } => ("time", code, 0),
            other => panic!("{other:?}"),
        };
        return (header.source.into(), header.destination.into(), what);
    }
    let (header, payload) = Ipv6Header::parse(packet).unwrap();
    let what = match Icmpv6Message::parse(&header, payload).unwrap() {
        Icmpv6Message::DestinationUnreachable { code, .. } => ("unreachable", code, 0),
        Icmpv6Message::TimeExceeded { code, .. } => ("time", code, 0),
        Icmpv6Message::PacketTooBig { mtu, .. } => ("too big", 0, mtu),
        other => panic!("{other:?}"),
    };
    (header.source.into(), header.destination.into(), what)
}

fn hops_of(packet: &[u8]) -> u8 {
    match packet[0] >> 4 {
        4 => Ipv4Header::parse(packet).expect("a right checksum").0.ttl,
        _ => Ipv6Header::parse(packet).unwrap().0.hop_limit,
    }
}

/// A router, and a host on each of its two wires.
struct Site {
    forwarder: Forwarder,
    near: Host,
    far: Host,
}

impl Site {
    fn new() -> Self {
        Self::with(1500, |_| ())
    }

    fn with_screen(path: &Path) -> Self {
        Self::with(1500, |config| config.screen = Some(ScreenConfig::new(path)))
    }

    /// With this MTU on the far wire and changes to the configuration.
    fn with(far_mtu: usize, change: impl FnOnce(&mut RouterConfig)) -> Self {
        let mut config = RouterConfig { frames: 512, hugepages: false, ..RouterConfig::default() };
        let [near, far] = [(1, 1500), (2, far_mtu)].map(|(n, mtu)| {
            let macs = [mac(n, 1).0, mac(n, 2).0];
            let (own, port) = wire(&MemConfig { macs, mtu, ..MemConfig::default() }).unwrap();
            let addresses = [format!("10.{n}.0.1/24"), format!("fd00:{n}::1/64")];
            config.ports.push(PortSpec {
                port: RouterPort::Mem(Box::new(own)),
                addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            });
            Host { wire: n, port, silent: false, questions: 0, heard: Vec::new() }
        });
        change(&mut config);
        let mut site = Self { forwarder: open(config).unwrap(), near, far };
        // Until the addresses are known to be nobody else's.
        site.pass(3 * SECOND_NS);
        site.near.heard.clear();
        site.far.heard.clear();
        site
    }

    /// Time goes by, a little at a time, and what is due happens.
    fn pass(&mut self, ns: u64) {
        for _ in 0..16 {
            self.forwarder.clock = self.forwarder.clock.put_forward(ns / 16);
            self.settle();
        }
    }

    /// Until nobody has anything to say, or receiving is held back.
    fn settle(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            self.forwarder.look_everywhere();
            loop {
                match self.forwarder.step().unwrap() {
                    Step::Served(packets) => moved |= packets > 0,
                    Step::Yield => {}
                    Step::Wait(_) => break,
                }
            }
            self.forwarder.read_clock();
            self.forwarder.serve_timers();
            moved |= self.near.attend() | self.far.attend();
        }
    }

    fn heard_far(&mut self) -> Vec<Vec<u8>> {
        self.settle();
        std::mem::take(&mut self.far.heard)
    }

    fn heard_near(&mut self) -> Vec<Vec<u8>> {
        self.settle();
        std::mem::take(&mut self.near.heard)
    }

    fn dropped(&mut self, reason: DropReason) -> u64 {
        self.forwarder.drops().get(reason)
    }
}

#[test]
fn a_packet_goes_on_with_one_hop_less_once_its_receiver_is_found() {
    both(|family| {
        let mut site = Site::new();
        let sent = datagram(family.far(), 64, 7, 900);
        site.near.send_packet(&sent);
        let heard = site.heard_far();
        assert_eq!(site.far.questions, 1);
        assert_eq!((heard.len(), hops_of(&heard[0])), (1, 63));
        let headers = if family == Family::V4 { 20 } else { 40 };
        assert_eq!(heard[0][headers..], sent[headers..]);
        site.near.send_packet(&sent);
        assert_eq!(site.heard_far().len(), 1);
        assert_eq!(site.far.questions, 1, "it is known now");
        assert_eq!(site.near.heard, Vec::<Vec<u8>>::new());
        let counters = site.forwarder.counters();
        assert!(counters.turns > 2 && counters.busy_turns >= 2, "{counters:?}");
    });
}

#[test]
fn a_silent_receiver_is_told_to_the_sender() {
    both(|family| {
        let mut site = Site::new();
        site.far.silent = true;
        site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        site.settle();
        assert_eq!((site.far.questions, site.near.heard.len()), (1, 0));
        site.pass(16 * SECOND_NS);
        assert_eq!(site.far.questions, 3);
        let code = if family == Family::V4 { unreachable::HOST } else { 3 };
        let heard: Vec<_> = site.heard_near().iter().map(|packet| told(packet)).collect();
        assert_eq!(heard.len(), 1);
        assert_eq!((heard[0].1, heard[0].2), (family.near(), ("unreachable", code, 0)));
        assert_eq!(site.dropped(DropReason::NeighbourUnreachable), 1);
        // He is asked anew, and there.
        site.far.silent = false;
        site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        assert_eq!(site.heard_far().len(), 1);
    });
}

#[test]
fn the_last_hop_and_nowhere_are_told_to_the_sender() {
    both(|family| {
        let mut site = Site::new();
        let errors = [
            (datagram(family.far(), 1, 7, 9), ("time", 0, 0), DropReason::HopLimitExceeded),
            (datagram(family.host(9, 9), 64, 7, 9), ("unreachable", 0, 0), DropReason::NoRoute),
        ];
        for (packet, what, reason) in errors {
            site.near.send_packet(&packet);
            let heard: Vec<_> = site.heard_near().iter().map(|packet| told(packet)).collect();
            assert_eq!(heard, [(family.host(1, 1), family.near(), what)]);
            assert_eq!(site.dropped(reason), 1);
        }
        assert_eq!(site.heard_far(), Vec::<Vec<u8>>::new());
    });
}

#[test]
fn errors_have_a_rate() {
    both(|family| {
        let mut site = Site::new();
        // The router learns who asks, so that no error waits for that.
        site.near.send_packet(&echo_request(family));
        assert!(is_echo_reply(&site.heard_near()[0]));
        let began_ns = site.forwarder.read_clock();
        for _ in 0..50 {
            site.near.send_packet(&datagram(family.far(), 1, 7, 9));
        }
        let heard = site.heard_near().len();
        let refilled = (site.forwarder.read_clock() - began_ns) * 10 / SECOND_NS + 1;
        assert!((10..=10 + refilled as usize).contains(&heard), "{heard} were told");
        assert_eq!(site.dropped(DropReason::IcmpRateLimited), 50 - heard as u64);
        assert_eq!(site.dropped(DropReason::HopLimitExceeded), 50);
        site.pass(SECOND_NS);
        for _ in 0..10 {
            site.near.send_packet(&datagram(family.far(), 1, 7, 9));
        }
        assert_eq!(site.heard_near().len(), 10, "a second later there may be more");
    });
}

#[test]
fn what_does_not_fit_is_told_with_the_mtu_or_cut() {
    both(|family| {
        let mut site = Site::with(1300, |_| ());
        site.near.send_packet(&datagram(family.far(), 64, 7, 1300));
        let heard: Vec<_> = site.heard_near().iter().map(|packet| told(packet)).collect();
        let what = match family {
            Family::V4 => ("unreachable", unreachable::FRAGMENTATION_NEEDED, 1300),
            Family::V6 => ("too big", 0, 1300),
        };
        assert_eq!(heard, [(family.host(1, 1), family.near(), what)]);
        assert_eq!(site.dropped(DropReason::PacketTooBig), 1);
        assert_eq!(site.heard_far(), Vec::<Vec<u8>>::new());
        let fitting = 1300 - 8 - if family == Family::V4 { 20 } else { 40 };
        site.near.send_packet(&datagram(family.far(), 64, 7, fitting));
        assert_eq!(site.heard_far()[0].len(), 1300);
    });
    let mut site = Site::with(1300, |_| ());
    let whole = datagram(Family::V4.far(), 64, 7, 1400);
    let (mut header, payload) = Ipv4Header::parse(&whole).unwrap();
    header.dont_fragment = false;
    let mut cuttable = whole.clone();
    header.emit(&mut cuttable).unwrap().copy_from_slice(payload);
    site.near.send_packet(&cuttable);
    let pieces = site.heard_far();
    assert_eq!(pieces.len(), 2);
    let joined: Vec<u8> =
        pieces.iter().flat_map(|piece| Ipv4Header::parse(piece).unwrap().1.to_vec()).collect();
    assert_eq!(joined, payload);
}

#[test]
fn what_is_behind_a_gateway_goes_to_the_gateway() {
    both(|family| {
        let mut site = Site::with(1500, |config| {
            config.routes = [Family::V4, Family::V6]
                .map(|family| Route {
                    prefix: format!("{}/24", family.host(9, 0)).parse().unwrap(),
                    gateway: Some(family.far()),
                })
                .into();
        });
        site.near.send_packet(&datagram(family.host(9, 9), 64, 7, 9));
        assert_eq!(site.heard_far().len(), 1);
    });
}

/// Nobody empties the far wire: what does not go onto it waits, then is dropped
/// and counted, and no buffer is lost.
#[test]
fn a_wire_that_takes_nothing_costs_no_frame() {
    both(|family| {
        let mut site = Site::new();
        let packet = datagram(family.far(), 64, 7, 9);
        let ethertype = if family == Family::V4 { EtherType::IPV4 } else { EtherType::IPV6 };
        site.near.send_packet(&packet);
        assert_eq!(site.heard_far().len(), 1);
        let mut sent = 0;
        for _ in 0..3 * 1024 {
            sent += u64::from(site.near.try_send(ethertype, &packet));
            site.forwarder.look_everywhere();
            while let Step::Served(_) = site.forwarder.step().unwrap() {}
            // Feedback holds receiving back for one time-out, not for ever.
            site.forwarder.clock = site.forwarder.clock.put_forward(1_000_000);
        }
        site.pass(SECOND_NS);
        let heard = site.far.heard.len() as u64;
        let dropped: u64 = site.forwarder.drops().nonzero().map(|(_, packets)| packets).sum();
        assert_eq!(heard + dropped, sent);
        assert!(heard >= 1024 && sent > 1024, "{heard} of {sent}");
        for _ in 0..256 {
            site.near.send_packet(&packet);
        }
        site.settle();
        assert_eq!(site.far.heard.len() as u64, heard + 256);
    });
}

/// A screen whose other side is the test itself.
struct Screen {
    folder: tempfile::TempDir,
    listener: OwnedFd,
}

impl Screen {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Self::listen(folder.path());
        Self { folder, listener }
    }

    fn listen(folder: &Path) -> OwnedFd {
        let path = folder.join("screen");
        // The last one may have left its socket there.
        let _ = std::fs::remove_file(&path);
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 1).unwrap();
        socket
    }

    fn site(&self) -> Site {
        Site::with_screen(&self.folder.path().join("screen"))
    }

    /// The connection that the router made.
    fn accept(&self) -> OwnedFd {
        accept(&self.listener).unwrap()
    }
}

/// The numbers of the packets that the router asks about.
fn asked(screen: &OwnedFd) -> Vec<u32> {
    let mut numbers = Vec::new();
    let mut message = [0; 4096];
    while let Ok((len, _)) = recv(screen, &mut message[..], RecvFlags::DONTWAIT) {
        // One packet for each message: six bytes of head, then its beginning.
        assert!(len > 6, "the router hung up");
        numbers.push(u32::from_ne_bytes(message[..4].try_into().unwrap()));
    }
    numbers
}

fn say(screen: &OwnedFd, message: &[u8]) -> bool {
    send(screen, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
}

fn verdict(number: u32, verdict: u8) -> [u8; 5] {
    let [a, b, c, d] = number.to_ne_bytes();
    [a, b, c, d, verdict]
}

#[test]
fn only_what_the_screen_lets_pass_is_forwarded() {
    both(|family| {
        let screen = Screen::new();
        let mut site = screen.site();
        for fill in 0..3 {
            site.near.send_packet(&datagram(family.far(), 64, fill, 9));
        }
        assert_eq!(site.heard_far(), Vec::<Vec<u8>>::new());
        let connection = screen.accept();
        let numbers = asked(&connection);
        assert_eq!(numbers.len(), 3);
        say(&connection, &verdict(numbers[0], 0));
        say(&connection, &verdict(numbers[1], 1));
        let heard = site.heard_far();
        assert_eq!((heard.len(), heard[0].last()), (1, Some(&1)));
        assert_eq!(site.dropped(DropReason::ScreenRefused), 1);
        // The second verdict about a packet is one too many.
        say(&connection, &verdict(numbers[0], 1));
        say(&connection, &verdict(numbers[2], 2));
        assert_eq!(site.heard_far(), Vec::<Vec<u8>>::new());
        let counters = site.forwarder.screen_counters().unwrap();
        assert_eq!((counters.passed, counters.refused, counters.stray), (1, 2, 1));
    });
}

#[test]
fn a_screen_that_talks_without_end_stops_nothing() {
    both(|family| {
        let screen = Screen::new();
        let mut site = screen.site();
        site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        site.settle();
        let connection = screen.accept();
        let number = asked(&connection)[0];
        // More messages than any turn may take, each about no packet.
        let mut said = 0;
        while said < 10 * QUEUE_PACKETS && say(&connection, &verdict(number + 1, 1)) {
            said += 1;
        }
        assert!(said > 2 * QUEUE_PACKETS, "{said}");
        let strays = |site: &Site| site.forwarder.screen_counters().unwrap().stray as usize;
        assert_eq!(site.forwarder.collect_verdicts(usize::MAX), 0);
        assert_eq!(strays(&site), QUEUE_PACKETS);
        site.near.send_packet(&echo_request(family));
        assert!(site.heard_near().iter().any(|packet| is_echo_reply(packet)));
        while strays(&site) < said {
            site.settle();
        }
        assert!(say(&connection, &verdict(number, 1)));
        assert_eq!(site.heard_far().len(), 1, "it is heard all the same");
    });
}

#[test]
fn a_stuck_screen_holds_packets_for_a_while_only() {
    both(|family| {
        let screen = Screen::new();
        let mut site = screen.site();
        for _ in 0..100 {
            site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        }
        site.settle();
        let stuck = screen.accept();
        assert_eq!(site.forwarder.screen_counters().unwrap().asked, QUEUE_PACKETS as u64);
        site.near.send_packet(&echo_request(family));
        site.pass(9 * SECOND_NS);
        assert!(site.heard_near().iter().any(|packet| is_echo_reply(packet)));
        let given_up = site.dropped(DropReason::ScreenGone);
        assert!(given_up >= QUEUE_PACKETS as u64, "{given_up}");
        assert_eq!(given_up + site.dropped(DropReason::ScreenQueueFull), 100);
        // What it says now is too late.
        let numbers = asked(&stuck);
        numbers.iter().for_each(|&number| assert!(say(&stuck, &verdict(number, 1))));
        site.pass(SECOND_NS);
        assert_eq!(site.heard_far(), Vec::<Vec<u8>>::new());
        // What comes now it may judge.
        site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        site.settle();
        asked(&stuck).iter().for_each(|&number| assert!(say(&stuck, &verdict(number, 1))));
        assert_eq!(site.heard_far().len(), 1);
    });
}

#[test]
fn a_screen_that_dies_takes_its_packets_along_and_the_next_one_goes_on() {
    both(|family| {
        let mut screen = Screen::new();
        let mut site = screen.site();
        for _ in 0..10 {
            site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        }
        site.settle();
        let connection = screen.accept();
        let numbers = asked(&connection);
        say(&connection, &verdict(numbers[0], 1));
        // The last message is cut off.
        say(&connection, &verdict(numbers[1], 1)[..4]);
        drop(connection);
        assert_eq!(site.heard_far().len(), 1);
        assert_eq!(site.dropped(DropReason::ScreenGone), 9);
        screen.listener = Screen::listen(screen.folder.path());
        // It is looked for again after a while.
        site.pass(SECOND_NS);
        site.near.send_packet(&datagram(family.far(), 64, 7, 9));
        site.settle();
        let connection = screen.accept();
        let again = asked(&connection);
        assert_eq!(again.len(), 1);
        // A verdict that was meant for the first one's packet.
        say(&connection, &verdict(numbers[2], 1));
        assert_eq!(site.heard_far(), Vec::<Vec<u8>>::new());
        say(&connection, &verdict(again[0], 1));
        assert_eq!(site.heard_far().len(), 1);
        assert_eq!(site.forwarder.screen_counters().unwrap().connections, 2);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever a screen says, a packet passes only if it is named, before it
    /// was judged, with a "pass".
    #[test]
    fn a_hostile_screen_passes_only_what_it_names(
        packets in 1..QUEUE_PACKETS / 2,
        said in prop::collection::vec(
            prop::collection::vec((prop_oneof![any::<u32>(), 32..80_u32], 0..3_u8), 1..8),
            0..20,
        ),
        torn in prop::collection::vec(any::<u8>(), 1..5),
    ) {
        let screen = Screen::new();
        let mut site = screen.site();
        for fill in 0..packets {
            site.near.send_packet(&datagram(Family::V4.far(), 64, fill as u8, 9));
        }
        site.settle();
        let connection = screen.accept();
        let mut waiting: Vec<(u32, usize)> = asked(&connection).into_iter().zip(0..).collect();
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
            prop_assert!(say(&connection, &bytes));
            site.settle();
        }
        let heard = site.heard_far();
        let heard: Vec<usize> = heard.iter().map(|packet| packet[packet.len() - 1].into()).collect();
        prop_assert_eq!(heard, passed);
        prop_assert_eq!(site.forwarder.screen.as_ref().unwrap().waiting(), waiting.len());
        // An empty message hangs up.
        say(&connection, &[]);
        drop(connection);
        site.settle();
        prop_assert_eq!(site.dropped(DropReason::ScreenGone), waiting.len() as u64);
    }
}
