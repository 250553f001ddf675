//! A stack on any frames at any times: nothing panics, every frame is accounted for, none
//! is lost, due timers are handled, and every transmitted frame is well-formed.
//!
//! The input is one byte of setup and then records: an action byte, a length of two bytes,
//! and a frame.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tidegate_memory::{Arena, ArenaConfig, Checksum, Frame, FrameSize};
use tidegate_stack::{
    AddressOwnership, AddressProbe, Config, Counters, Event, Limits, Route, Stack, UdpId,
    UdpOptions,
};
use tidegate_wire::{
    ArpPacket, EtherType, EthernetHeader, Icmpv4Message, Icmpv6Message, Ipv4Header, Ipv6Header,
    MacAddr, Medium, Protocol, Sum, checksum, tcp, udp, upper_layer,
};

const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x0b]);
const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x0a]);
const VLAN: u16 = 7;
const STEPS_NS: [u64; 4] = [0, 1_000_000, 1_000_000_000, 61_000_000_000];
const FRAMES: u32 = 64;
const MAX_RECORDS: usize = 64;
const MAX_UNRESOLVED_FRAMES: usize = 4;

/// Bits of the first byte.
mod setup {
    pub const NO_LINK_HEADER: u8 = 1;
    pub const SHARED: u8 = 2;
    pub const VLAN: u8 = 4;
    pub const PROBE_ADDRESSES: u8 = 8;
    pub const TRANSMIT_CHECKSUM: u8 = 16;
}

/// Bits of the action byte before each frame; the two lowest choose the time step.
mod action {
    pub const READ: u8 = 4;
    pub const REPLY: u8 = 8;
    pub const REPAIR: u8 = 16;
    pub const VERIFIED: u8 = 32;
    pub const SEND: u8 = 64;
    pub const KEEP_TRANSMIT: u8 = 128;
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::new(
        Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
            .expect("a small arena"),
    );
}

/// Runs one input and returns the packet counters.
pub fn check(input: &[u8]) -> Counters {
    let Some((&setup, mut records)) = input.split_first() else { return Counters::default() };
    ARENA.with_borrow_mut(|arena| {
        let mut host = TestHost::new(setup);
        for _ in 0..MAX_RECORDS {
            let Some((&[action, high, low], rest)) = records.split_first_chunk() else { break };
            let len = usize::from(u16::from_be_bytes([high, low])).min(rest.len());
            let (frame, rest) = rest.split_at(len);
            host.step(arena, action, frame);
            records = rest;
        }
        let counters = host.finish(arena);
        assert_eq!(arena.available(), arena.capacity(), "a frame was lost");
        counters
    })
}

struct TestHost {
    stack: Stack,
    sockets: Vec<UdpId>,
    medium: Medium,
    now_ns: u64,
    transmit_checksum: bool,
}

impl TestHost {
    fn new(bits: u8) -> Self {
        let has = |bit: u8| bits & bit != 0;
        let mut config = Config::ethernet(MAC, [7; 16]);
        if has(setup::NO_LINK_HEADER) {
            config.medium = Medium::Ip;
        }
        config.ownership =
            if has(setup::SHARED) { AddressOwnership::Shared } else { AddressOwnership::Exclusive };
        config.vlan = has(setup::VLAN).then_some(VLAN);
        config.transmit_checksum = has(setup::TRANSMIT_CHECKSUM);
        config.addresses =
            ["192.0.2.2/24", "2001:db8::2/64"].map(|cidr| cidr.parse().unwrap()).into();
        config.routes = vec![Route {
            prefix: "0.0.0.0/0".parse().unwrap(),
            gateway: Some(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))),
        }];
        config.limits = Limits::default()
            .neighbours(8)
            .unresolved_frames(MAX_UNRESOLVED_FRAMES)
            .unresolved_frames_total(8)
            .fragment_bytes(16_384)
            .fragment_packets(8)
            .fragments_per_packet(8)
            .path_mtus(4)
            .transmit_frames(16)
            .sockets(8)
            .socket_queue_packets(8)
            .socket_queue_bytes(16_384);
        let (medium, transmit_checksum) = (config.medium, config.transmit_checksum);
        let mut stack = Stack::new(config, 0).expect("a valid configuration");
        if has(setup::PROBE_ADDRESSES) {
            stack.claim_addresses(0, AddressProbe::Rfc);
        }
        let dual = UdpOptions::default().dual_stack(true).report_errors(true);
        let mut sockets = vec![
            stack.udp_bind("[::]:53".parse().unwrap(), dual).expect("a free port"),
            stack.udp_bind("0.0.0.0:7".parse().unwrap(), UdpOptions::default()).unwrap(),
        ];
        for (local, remote) in [("0.0.0.0:4000", "192.0.2.1:9"), ("[::]:4001", "[2001:db8::1]:9")] {
            let id = stack.udp_bind(local.parse().unwrap(), UdpOptions::default()).unwrap();
            if stack.udp_connect(id, remote.parse().unwrap()).is_ok() {
                sockets.push(id);
            }
        }
        Self { stack, sockets, medium, now_ns: 0, transmit_checksum }
    }

    fn step(&mut self, arena: &mut Arena, action: u8, bytes: &[u8]) {
        let has = |bit: u8| action & bit != 0;
        self.pass_time(arena, STEPS_NS[usize::from(action & 3)]);
        if let Some(mut frame) = arena.alloc_from(bytes) {
            if has(action::REPAIR) {
                repair_frame(arena.bytes_mut(&mut frame), self.medium);
            }
            if has(action::VERIFIED) {
                frame.set_checksum(Checksum::Verified);
            }
            let waiting = self.stack.transmit_queue().len();
            self.stack.handle_frame(self.now_ns, frame, arena);
            let sent = self.stack.transmit_queue().len() - waiting;
            // A reply, and the frames queued for a neighbour that is now resolved.
            assert!(sent <= MAX_UNRESOLVED_FRAMES + 2, "one frame caused {sent} frames");
        }
        if has(action::READ) {
            self.read(arena, has(action::REPLY));
        }
        if has(action::SEND) {
            for &id in &self.sockets {
                let to = match id == self.sockets[0] {
                    true => Some(SocketAddr::from(([192, 0, 2, bytes.len() as u8], 53))),
                    false => None,
                };
                let payload = &bytes[..bytes.len().min(1400)];
                let _ = self.stack.udp_send(self.now_ns, arena, id, to, None, payload);
            }
        }
        if !has(action::KEEP_TRANSMIT) {
            self.transmit(arena);
        }
        self.take_events(arena);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
    }

    fn pass_time(&mut self, arena: &mut Arena, step_ns: u64) {
        self.now_ns += step_ns;
        if self.stack.next_timeout().is_some_and(|due_ns| due_ns <= self.now_ns) {
            self.stack.handle_timeout(self.now_ns, arena);
            let next_ns = self.stack.next_timeout();
            assert!(next_ns.is_none_or(|next_ns| next_ns > self.now_ns), "a timer was left due");
        }
    }

    fn read(&mut self, arena: &mut Arena, reply: bool) {
        for &id in &self.sockets {
            while let Some(datagram) = self.stack.udp_recv(arena, id) {
                assert_eq!(datagram.bytes(arena).len(), datagram.len());
                let (to, from) = (datagram.remote, datagram.local);
                match datagram.into_frame() {
                    Ok(frame) if reply => {
                        let _ = self.stack.udp_send_frame(
                            self.now_ns,
                            arena,
                            id,
                            Some(to),
                            Some(from),
                            frame,
                        );
                    }
                    Ok(frame) => arena.free(frame),
                    Err(datagram) => datagram.release(arena),
                }
            }
            let _ = self.stack.udp_take_error(id);
        }
    }

    fn transmit(&mut self, arena: &mut Arena) {
        while let Some(frame) = self.stack.transmit_queue().pop_front() {
            self.check_sent(arena, &frame);
            arena.free(frame);
        }
    }

    /// Asserts that a peer would accept a transmitted frame.
    fn check_sent(&self, arena: &Arena, frame: &Frame) {
        let bytes = arena.bytes(frame);
        let partial = matches!(frame.checksum(), Checksum::Partial { .. });
        assert!(!partial || self.transmit_checksum);
        let packet = match self.medium {
            Medium::Ip => bytes,
            Medium::Ethernet => {
                let (header, rest) = EthernetHeader::parse(bytes).expect("a link header");
                assert_eq!(header.source, MAC);
                match header.ethertype {
                    EtherType::ARP => {
                        ArpPacket::parse(rest).expect("an ARP packet");
                        return;
                    }
                    EtherType::IPV4 | EtherType::IPV6 => rest,
                    other => panic!("sent {other:?}"),
                }
            }
        };
        assert!(packet.len() <= 1500, "{} bytes on an MTU of 1500", packet.len());
        match packet.first().map(|first| first >> 4) {
            Some(4) => check_sent_v4(packet, partial),
            Some(6) => check_sent_v6(packet, partial),
            version => panic!("sent IP version {version:?}"),
        }
    }

    fn take_events(&mut self, arena: &mut Arena) {
        let mut events = 0;
        while let Some(event) = self.stack.poll_event() {
            events += 1;
            assert!(events < 4096, "the event queue never empties");
            if let Event::NeighbourUnresolved(ip) = event {
                let known = events % 2 == 1;
                self.stack.set_neighbour(self.now_ns, ip, known.then_some(PEER_MAC), arena);
            }
        }
    }

    fn finish(mut self, arena: &mut Arena) -> Counters {
        self.transmit(arena);
        for step_ns in [STEPS_NS[2], STEPS_NS[3], STEPS_NS[3]] {
            self.pass_time(arena, step_ns);
            self.transmit(arena);
            self.take_events(arena);
            assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
        }
        let id = self.sockets[0];
        self.stack.udp_close(id, arena);
        let counters = self.stack.counters().clone();
        assert_eq!(counters.balance(), 0, "{counters:?}");
        self.stack.release(arena);
        counters
    }
}

fn check_sent_v4(packet: &[u8], partial: bool) {
    let (ip, payload) = Ipv4Header::parse(packet).expect("an IPv4 packet");
    assert_eq!(usize::from(ip.total_bytes), packet.len());
    assert!(!ip.source.is_multicast() && !ip.source.is_broadcast() && ip.ttl > 0);
    if ip.is_fragment() || partial {
        return;
    }
    match ip.protocol {
        Protocol::ICMPV4 => {
            Icmpv4Message::parse(payload).expect("an ICMP message");
        }
        Protocol::UDP => {
            udp::verify_v4(ip.source, ip.destination, payload).expect("a UDP checksum");
        }
        Protocol::TCP => {
            tcp::verify_v4(ip.source, ip.destination, payload).expect("a TCP checksum");
        }
        other => panic!("sent {other:?}"),
    }
}

fn check_sent_v6(packet: &[u8], partial: bool) {
    let (ip, rest) = Ipv6Header::parse(packet).expect("an IPv6 packet");
    assert_eq!(Ipv6Header::BYTES + rest.len(), packet.len());
    assert!(!ip.source.is_multicast() && ip.hop_limit > 0);
    let upper = upper_layer(ip.next_header, rest).expect("known extension headers");
    if upper.fragment.is_some() || partial {
        return;
    }
    match upper.protocol {
        Protocol::ICMPV6 => {
            Icmpv6Message::parse(&ip, upper.payload).expect("an ICMPv6 message");
        }
        Protocol::UDP => {
            udp::verify_v6(ip.source, ip.destination, upper.payload).expect("a UDP checksum");
        }
        Protocol::TCP => {
            tcp::verify_v6(ip.source, ip.destination, upper.payload).expect("a TCP checksum");
        }
        other => panic!("sent {other:?}"),
    }
}

/// Corrects the checksums of a frame where it parses: a fuzzer cannot guess them.
fn repair_frame(frame: &mut [u8], medium: Medium) {
    let link_bytes = match medium {
        Medium::Ip => 0,
        Medium::Ethernet => {
            EthernetHeader::parse(frame).map_or(frame.len(), |(header, _)| header.header_bytes())
        }
    };
    let packet = &mut frame[link_bytes..];
    match packet.first().map(|first| first >> 4) {
        Some(4) => repair_v4(packet),
        Some(6) => repair_v6(packet),
        _ => {}
    }
}

fn repair_v4(packet: &mut [u8]) {
    let Ok((ip, payload)) = Ipv4Header::parse_quoted(packet) else { return };
    let (start, len) = (usize::from(ip.header_bytes), payload.len());
    set_field(&mut packet[..start], 10, Sum::ZERO);
    if !ip.is_fragment() {
        let pseudo = checksum::pseudo_header_v4(ip.source, ip.destination, ip.protocol, len as u16);
        repair_payload(ip.protocol, pseudo, &mut packet[start..start + len]);
    }
}

fn repair_v6(packet: &mut [u8]) {
    let Ok((ip, rest)) = Ipv6Header::parse(packet) else { return };
    let Ok(upper) = upper_layer(ip.next_header, rest) else { return };
    let (start, len, protocol) = (upper.offset_bytes, upper.payload.len(), upper.protocol);
    if upper.fragment.is_none() {
        let pseudo = checksum::pseudo_header_v6(ip.source, ip.destination, protocol, len as u32);
        repair_payload(protocol, pseudo, &mut packet[start..start + len]);
    }
}

fn repair_payload(protocol: Protocol, pseudo: Sum, payload: &mut [u8]) {
    match protocol {
        Protocol::UDP => udp::fill_checksum(pseudo, payload),
        Protocol::TCP => tcp::fill_checksum(pseudo, payload),
        Protocol::ICMPV4 => set_field(payload, 2, Sum::ZERO),
        Protocol::ICMPV6 => set_field(payload, 2, pseudo),
        _ => {}
    }
}

/// Sets the checksum at `at` so that `bytes` verify.
fn set_field(bytes: &mut [u8], at: usize, pseudo: Sum) {
    if let Some(field) = bytes.get_mut(at..at + 2) {
        field.fill(0);
        let checksum = pseudo.with(bytes).checksum();
        bytes[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}
