mod queues;
mod segments;

use std::net::IpAddr;
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_memory::{Arena, ArenaConfig, Frame, FrameSize};
use tidegate_wire::{Icmpv4Message, Icmpv6Message, Medium, icmpv4};

use super::destination::Destination;
use super::*;
use crate::fault::{FaultConfig, FaultInjector};
use crate::mem::{MemDevice, wire};
use crate::steering::{SharedRules, SteeringRule, TransportProtocol};
use crate::trace::Trace;
use crate::{Burst, DeviceCounters};

const UDP: u8 = 17;
const TCP: u8 = 6;
const SOURCE: u16 = 4000;

fn arena() -> Arena {
    Arena::new(ArenaConfig { frames: 2048, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

/// Transport header up to both ports, and a payload.
fn transport(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &[0; 4], payload].concat()
}

fn v4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let total = (20 + payload.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend(total.to_be_bytes());
    packet.extend([0, 7]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0, 192, 0, 2, 9, 192, 0, 2, 1]);
    packet.extend(payload);
    packet
}

fn v6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next, 64]);
    packet.extend([0xfd; 16]);
    packet.extend([0xfe; 16]);
    packet.extend(payload);
    packet
}

/// A packet of each address family to a port.
fn both(protocol: u8, to: u16, payload: &[u8]) -> [Vec<u8>; 2] {
    let datagram = transport(SOURCE, to, payload);
    [v4(protocol, 0x4000, &datagram), v6(protocol, &datagram)]
}

/// A device sharded over several cores, and a peer that sends to it.
struct Testbed {
    sender: MemDevice,
    arena: Arena,
    primary: CoreDevice,
    primary_arena: Arena,
    secondaries: Vec<(CoreDevice, Arena)>,
}

impl Testbed {
    fn new(cores: usize) -> Self {
        let config = MemConfig { medium: Medium::Ip, capacity: 2048, ..MemConfig::default() };
        let (sender, device) = wire(&config).unwrap();
        let mut secondaries = shard(Box::new(device), cores).unwrap();
        let primary = secondaries.remove(0);
        let secondaries = secondaries.into_iter().map(|secondary| (secondary, arena())).collect();
        Self { sender, arena: arena(), primary, primary_arena: arena(), secondaries }
    }

    fn send(&mut self, packet: &[u8]) {
        let mut burst: Burst = [self.arena.alloc_from(packet).unwrap()].into();
        assert_eq!(self.sender.transmit(&mut self.arena, &mut burst).unwrap(), 1);
    }

    /// Packets that each core receives, the primary core first.
    fn receive(&mut self) -> Vec<Vec<Vec<u8>>> {
        let mut got = vec![receive_all(&mut self.primary, &mut self.primary_arena)];
        got.extend(
            self.secondaries.iter_mut().map(|(secondary, arena)| receive_all(secondary, arena)),
        );
        got
    }

    /// Core that receives a packet; panics when none or several do.
    fn receiving_core(&mut self, packet: &[u8]) -> usize {
        self.send(packet);
        let got = self.receive();
        let mut receivers = got.iter().enumerate().filter(|(_, packets)| !packets.is_empty());
        let (core, packets) = receivers.next().expect("the packet is lost");
        assert_eq!((packets.len(), &packets[0][..]), (1, packet));
        assert!(receivers.next().is_none(), "only one core gets the packet");
        core
    }

    fn claim(&mut self, core: usize, protocol: TransportProtocol, port: u16) -> io::Result<()> {
        self.primary.flow_steering().claim(core, (protocol, port), PortSharing::Exclusive)
    }
}

fn receive_all(device: &mut dyn Device, arena: &mut Arena) -> Vec<Vec<u8>> {
    let mut burst = Burst::new();
    device.receive(arena, &mut burst, 1024).unwrap();
    let take = |frame| {
        let bytes = arena.bytes(&frame).to_vec();
        arena.free(frame);
        bytes
    };
    burst.drain(..).map(take).collect()
}

fn readable(primary: &CoreDevice) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let fd = primary.wake_fd().unwrap();
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).unwrap() == 1
}

#[test]
fn frames_reach_the_core_that_claimed_the_port() {
    let mut testbed = Testbed::new(3);
    testbed.claim(1, TransportProtocol::Tcp, 80).unwrap();
    testbed.claim(2, TransportProtocol::Udp, 80).unwrap();
    testbed.claim(0, TransportProtocol::Udp, 53).unwrap();
    for (protocol, port, core) in [(TCP, 80, 1), (UDP, 80, 2), (UDP, 53, 0), (UDP, 9, 0)] {
        for packet in both(protocol, port, b"payload") {
            assert_eq!(testbed.receiving_core(&packet), core);
        }
    }
    let refused = testbed.claim(0, TransportProtocol::Tcp, 80).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
    assert!(testbed.primary.flow_steering().is_claimed_elsewhere(0, (TransportProtocol::Tcp, 80)));
    // Not a packet, truncated, or of another protocol.
    for odd in [&b"x"[..], &[0x45; 19], &v4(47, 0, &[0; 8]), &v4(TCP, 0, &[0; 3]), &v6(59, &[])] {
        assert_eq!(testbed.receiving_core(odd), 0);
    }
}

#[test]
fn fragments_follow_the_first_fragment() {
    let mut testbed = Testbed::new(2);
    testbed.claim(1, TransportProtocol::Udp, 53).unwrap();
    let first = transport(SOURCE, 53, &[0; 8]);
    let fragment_v6 = |offset: u16, payload: &[u8]| {
        let mut data = vec![UDP, 0];
        data.extend((offset | u16::from(offset == 0)).to_be_bytes());
        data.extend([0, 0, 0, 9]);
        data.extend(payload);
        v6(44, &data)
    };
    for (head, tail) in [
        (v4(UDP, 0x2000, &first), v4(UDP, 2, &[1; 8])),
        (fragment_v6(0, &first), fragment_v6(16, &[1; 8])),
    ] {
        assert_eq!(testbed.receiving_core(&head), 1);
        assert_eq!(testbed.receiving_core(&tail), 1);
    }
}

/// Fragment of a datagram to a port, of either family, and the number of its packet.
fn fragment(is_v6: bool, number: u8, offset: u16, payload: &[u8]) -> Vec<u8> {
    let is_last = offset > 16;
    if !is_v6 {
        let mut packet = v4(UDP, (offset / 8) | (u16::from(!is_last) << 13), payload);
        packet[5] = number;
        return packet;
    }
    let mut data = vec![UDP, 0];
    data.extend((offset | u16::from(!is_last)).to_be_bytes());
    data.extend([0, 0, 0, number]);
    data.extend(payload);
    v6(44, &data)
}

#[test]
fn fragments_wait_for_the_first_one() {
    for is_v6 in [false, true] {
        let mut testbed = Testbed::new(2);
        testbed.claim(1, TransportProtocol::Udp, 53).unwrap();
        let first = fragment(is_v6, 1, 0, &transport(SOURCE, 53, &[0; 8]));
        let [second, third] = [16, 24].map(|offset| fragment(is_v6, 1, offset, &[1; 8]));
        for early in [&third, &second] {
            testbed.send(early);
            assert!(testbed.receive().iter().all(Vec::is_empty), "the core is not known yet");
        }
        testbed.send(&first);
        let received = testbed.receive();
        assert_eq!(received, [vec![], vec![first.clone(), third, second.clone()]]);
        assert_eq!(testbed.receiving_core(&second), 1, "the flow is known now");
        let mut other = fragment(is_v6, 2, 16, &[1; 8]);
        other[if is_v6 { 40 } else { 9 }] = 50;
        assert_eq!(testbed.receiving_core(&other), 0, "a packet without ports");
    }
}

/// Fragments without a first one take a bounded number of frames; the rest goes to the primary
/// core, which counts what it cannot reassemble.
#[test]
fn waiting_fragments_are_limited() {
    for is_v6 in [false, true] {
        let mut testbed = Testbed::new(2);
        let available = testbed.primary_arena.available();
        let mut passed = 0;
        for number in 0..=255 {
            for _ in 0..20 {
                testbed.send(&fragment(is_v6, number, 16, &[1; 8]));
                passed += testbed.receive()[0].len();
            }
        }
        let waiting = available - testbed.primary_arena.available();
        assert_eq!((passed + waiting, waiting), (256 * 20, 128));
    }
}

#[test]
fn fragments_of_chosen_packets_displace_no_others() {
    let mut testbed = Testbed::new(2);
    testbed.claim(1, TransportProtocol::Udp, 53).unwrap();
    testbed.claim(0, TransportProtocol::Udp, 54).unwrap();
    let fragment = |source: u8, number: u8, first: bool, payload: &[u8]| {
        let mut data = vec![UDP, 0];
        data.extend([0, if first { 1 } else { 16 }]);
        data.extend([0, 0, 0, number]);
        data.extend(payload);
        let mut packet = v6(44, &data);
        // Both halves of the address change in the same way.
        (packet[8 + 7], packet[8 + 15]) = (source, source);
        packet
    };
    // By a keyed hash a few may share a slot by chance.
    let followed = (0..64).filter(|&number| {
        let (wanted, other) = (transport(SOURCE, 53, &[0; 8]), transport(SOURCE, 54, &[0; 8]));
        assert_eq!(testbed.receiving_core(&fragment(1, number, true, &wanted)), 1);
        assert_eq!(testbed.receiving_core(&fragment(2, number, true, &other)), 0);
        // A packet whose flow was displaced waits for its first fragment.
        testbed.send(&fragment(1, number, false, &[1; 8]));
        testbed.receive()[1].len() == 1
    });
    assert!(followed.count() > 48);
}

#[test]
fn icmp_errors_reach_the_core_that_sent_the_quoted_packet() {
    let mut testbed = Testbed::new(2);
    testbed.claim(1, TransportProtocol::Tcp, SOURCE).unwrap();
    let [quote_v4, quote_v6] = both(TCP, 443, &[]);
    let mut message = vec![0; 8 + quote_v4.len()];
    let error = Icmpv4Message::DestinationUnreachable {
        code: icmpv4::unreachable::FRAGMENTATION_NEEDED,
        next_hop_mtu: 1400,
        quote: &quote_v4,
    };
    assert!(error.emit(&mut message).is_some());
    assert_eq!(testbed.receiving_core(&v4(1, 0, &message)), 1);
    assert_eq!(testbed.receiving_core(&v4(1, 0, &message[..20])), 0, "truncated");
    let mut message = vec![0; 8 + quote_v6.len()];
    let error = Icmpv6Message::PacketTooBig { mtu: 1280, quote: &quote_v6 };
    assert!(error.emit([0xfd; 16].into(), [0xfe; 16].into(), &mut message).is_some());
    assert_eq!(testbed.receiving_core(&v6(58, &message)), 1);
    let request = Icmpv4Message::EchoRequest { identifier: 1, sequence: 1, data: &quote_v4 };
    let mut message = vec![0; 8 + quote_v4.len()];
    assert!(request.emit(&mut message).is_some());
    assert_eq!(testbed.receiving_core(&v4(1, 0, &message)), 0, "the primary core answers pings");
}

#[test]
fn active_cores_get_neighbour_advertisements() {
    let mut testbed = Testbed::new(3);
    testbed.primary.flow_steering().set_active(2);
    let advertisement = v6(58, &[136, 0, 0, 0, 0, 0, 0, 0]);
    testbed.send(&advertisement);
    let got = testbed.receive();
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 1]);
    (0..3).for_each(|core| testbed.primary.flow_steering().set_inactive(core));
    assert_eq!(testbed.receiving_core(&advertisement), 0, "no core but the primary has sockets");
    let mut arp = vec![0xff; 12];
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    arp.extend([1; 20]);
    assert_eq!(Destination::classify(Medium::Ethernet, &arp), Destination::AllCores);
    arp[21] = 1;
    assert_eq!(
        Destination::classify(Medium::Ethernet, &arp),
        Destination::PrimaryCore,
        "an ARP request"
    );
}

#[test]
fn frames_of_secondary_cores_leave_by_the_primary() {
    let mut testbed = Testbed::new(2);
    assert!(testbed.primary.prepare_sleep().unwrap() && !readable(&testbed.primary));
    let (secondary, arena) = &mut testbed.secondaries[0];
    let mut burst: Burst = (0..3u8).map(|at| arena.alloc_from(&[at; 60]).unwrap()).collect();
    assert_eq!(secondary.transmit(arena, &mut burst).unwrap(), 3);
    assert!(readable(&testbed.primary), "transmitting wakes the primary core");
    assert!(!testbed.primary.prepare_sleep().unwrap());
    assert!(testbed.receive().iter().all(Vec::is_empty));
    let sent = receive_all(&mut testbed.sender, &mut testbed.arena);
    assert_eq!(sent, [[0; 60], [1; 60], [2; 60]]);
    assert_eq!(testbed.primary_arena.available(), 2048);
}

#[test]
fn port_migration_keeps_order_without_loss() {
    let mut testbed = Testbed::new(3);
    testbed.claim(1, TransportProtocol::Udp, 53).unwrap();
    let ports = [(TransportProtocol::Udp, 53)];
    let flow_steering = testbed.primary.flow_steering();
    let number = |at: u8| v4(UDP, 0, &transport(SOURCE, 53, &[at]));
    let mut expected = Vec::new();
    testbed.send(&number(0));
    assert!(receive_all(&mut testbed.primary, &mut testbed.primary_arena).is_empty());
    // Parking completes only once the primary core has received.
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| flow_steering.park(1, &ports));
        while !parked.is_finished() {
            assert!(receive_all(&mut testbed.primary, &mut testbed.primary_arena).is_empty());
            std::thread::yield_now();
        }
        parked.join().unwrap().unwrap();
    });
    let (secondary, arena) = &mut testbed.secondaries[0];
    assert_eq!(receive_all(secondary, arena), [number(0)]);
    for at in 1..100 {
        testbed.send(&number(at));
        expected.push(number(at));
        if at % 9 == 0 {
            assert!(testbed.receive().iter().all(Vec::is_empty), "parked frames wait");
        }
    }
    flow_steering.hand_over(1, 2, [(ports[0], 1)]);
    assert!(!testbed.primary.prepare_sleep().unwrap());
    for at in 100..110 {
        testbed.send(&number(at));
        expected.push(number(at));
    }
    let mut got = testbed.receive();
    got[2].extend(testbed.receive().remove(2));
    assert_eq!(got[2], expected);
    assert!(got[0].is_empty() && got[1].is_empty());
    assert_eq!(testbed.primary_arena.available(), 2048);
}

#[test]
fn migration_from_the_primary_core_does_not_wait() {
    let mut testbed = Testbed::new(2);
    testbed.claim(0, TransportProtocol::Tcp, 80).unwrap();
    let flow_steering = testbed.primary.flow_steering();
    flow_steering.park(0, &[(TransportProtocol::Tcp, 80)]).unwrap();
    flow_steering.hand_over(0, 1, [((TransportProtocol::Tcp, 80), 1)]);
    let [packet, _] = both(TCP, 80, b"x");
    assert_eq!(testbed.receiving_core(&packet), 1);
}

#[test]
fn ring_overflow_drops_frames_of_that_core_only() {
    let mut testbed = Testbed::new(3);
    testbed.claim(1, TransportProtocol::Udp, 1).unwrap();
    testbed.claim(2, TransportProtocol::Udp, 2).unwrap();
    let [flood, _] = both(UDP, 1, b"flood");
    let [other, _] = both(UDP, 2, b"other");
    for _ in 0..LINK_FRAMES + 10 {
        testbed.send(&flood);
    }
    testbed.send(&other);
    assert!(receive_all(&mut testbed.primary, &mut testbed.primary_arena).is_empty());
    assert!(receive_all(&mut testbed.primary, &mut testbed.primary_arena).is_empty());
    let (secondary, arena) = &mut testbed.secondaries[1];
    assert_eq!(receive_all(secondary, arena), [other]);
    let drops = testbed.primary.counters().drops;
    assert_eq!(drops.get(tidegate_wire::DropReason::DeviceRingFull), 10);
    assert_eq!(testbed.primary_arena.available(), 2048);
}

#[test]
fn secondary_fails_once_the_primary_is_dropped() {
    let Testbed { primary, mut secondaries, .. } = Testbed::new(2);
    drop(primary);
    let (secondary, arena) = &mut secondaries[0];
    let ended = secondary.receive(arena, &mut Burst::new(), 1).unwrap_err();
    assert_eq!(ended.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn rejects_invalid_core_counts() {
    let device = || Box::new(wire(&MemConfig::default()).unwrap().0);
    for cores in [0, MAX_CORES + 1] {
        assert_eq!(shard(device(), cores).err().unwrap().kind(), io::ErrorKind::InvalidInput);
    }
    assert!(shard(device(), 1).is_ok());
}

/// Packets that a core sends to its own addresses, of both families.
fn loopback_frames(protocol: u8, to: u16, arena: &mut Arena) -> Burst {
    let frames = both(protocol, to, b"to ourselves").map(|packet| {
        let mut frame = arena.alloc_from(&packet).unwrap();
        frame.set_loopback();
        frame
    });
    frames.into()
}

#[test]
fn loopback_frames_reach_the_core_that_claimed_the_port() {
    const CORES: usize = 3;
    for from in 0..CORES {
        for to in 0..CORES {
            let mut testbed = Testbed::new(CORES);
            testbed.claim(to, TransportProtocol::Tcp, 80).unwrap();
            let (device, arena): (&mut dyn Device, _) = match from.checked_sub(1) {
                Some(at) => {
                    let (secondary, arena) = &mut testbed.secondaries[at];
                    (secondary, arena)
                }
                None => (&mut testbed.primary, &mut testbed.primary_arena),
            };
            let (mut frames, mut own) = (loopback_frames(TCP, 80, arena), Burst::new());
            device.loop_back(arena, &mut frames, &mut own, 9).unwrap();
            assert!(frames.is_empty());
            let mut received = vec![0; CORES];
            for frame in own.drain(..) {
                assert!(frame.is_loopback());
                received[from] += 1;
                arena.free(frame);
            }
            for (core, packets) in testbed.receive().into_iter().enumerate() {
                received[core] += packets.len();
            }
            let mut expected = vec![0; CORES];
            expected[to] = 2;
            assert_eq!(received, expected, "from core {from} to core {to}");
            assert!(!testbed.sender.has_frame(), "no loopback frame is transmitted");
            if let Some(at) = from.checked_sub(1) {
                testbed.primary.flow_steering().wait_until_sent(at + 1).unwrap();
            }
        }
    }
}

#[test]
fn loopback_mark_is_kept_between_cores_and_never_set_on_receive() {
    let mut testbed = Testbed::new(2);
    testbed.claim(1, TransportProtocol::Udp, 53).unwrap();
    let mut frames = loopback_frames(UDP, 53, &mut testbed.primary_arena);
    testbed
        .primary
        .loop_back(&mut testbed.primary_arena, &mut frames, &mut Burst::new(), 9)
        .unwrap();
    both(UDP, 53, b"from the wire").iter().for_each(|packet| testbed.send(packet));
    testbed.primary.receive(&mut testbed.primary_arena, &mut Burst::new(), 9).unwrap();
    let (secondary, arena) = &mut testbed.secondaries[0];
    let mut burst = Burst::new();
    secondary.receive(arena, &mut burst, 9).unwrap();
    let marks: Vec<bool> = burst.iter().map(Frame::is_loopback).collect();
    assert_eq!(marks, [true, true, false, false]);
    burst.drain(..).for_each(|frame| arena.free(frame));
}

#[test]
fn loopback_frames_wait_for_a_migrating_port() {
    let mut testbed = Testbed::new(2);
    testbed.claim(0, TransportProtocol::Tcp, 80).unwrap();
    let flow_steering = testbed.primary.flow_steering();
    flow_steering.park(0, &[(TransportProtocol::Tcp, 80)]).unwrap();
    let mut frames = loopback_frames(TCP, 80, &mut testbed.primary_arena);
    testbed
        .primary
        .loop_back(&mut testbed.primary_arena, &mut frames, &mut Burst::new(), 9)
        .unwrap();
    assert!(testbed.receive().iter().all(Vec::is_empty));
    flow_steering.hand_over(0, 1, [((TransportProtocol::Tcp, 80), 1)]);
    assert_eq!(testbed.receive()[1].len(), 2);
}

/// Cores 1 and 2 share a port of all addresses.
fn share(testbed: &Testbed, local: LocalPort) {
    let flow_steering = testbed.primary.flow_steering();
    for core in [1, 2] {
        for any in ["0.0.0.0", "::"] {
            flow_steering.join(core, local, any.parse().unwrap(), 0);
        }
        flow_steering.claim(core, local, PortSharing::ReusePort { owner: 0 }).unwrap();
    }
}

/// Flow of the packets that [`both`] makes, from another source port.
fn flow_of(local: LocalPort, at: usize, from: u16) -> Flow {
    let [own, peer]: [IpAddr; 2] = match at {
        0 => [[192, 0, 2, 1].into(), [192, 0, 2, 9].into()],
        _ => [[0xfe; 16].into(), [0xfd; 16].into()],
    };
    Flow::new(local.0, (own, local.1).into(), (peer, from).into())
}

#[test]
fn flows_of_a_shared_port_are_distributed_and_stay() {
    for (number, protocol) in [(TCP, TransportProtocol::Tcp), (UDP, TransportProtocol::Udp)] {
        let mut testbed = Testbed::new(3);
        let local = (protocol, 80);
        share(&testbed, local);
        let flow_steering = testbed.primary.flow_steering();
        let packets = |from: u16| {
            let payload = transport(from, 80, b"x");
            [v4(number, 0x4000, &payload), v6(number, &payload)]
        };
        let mut counts = [[0; 3]; 2];
        for from in 1..=200 {
            for (at, packet) in packets(from).iter().enumerate() {
                let core = testbed.receiving_core(packet);
                assert_eq!(testbed.receiving_core(packet), core, "each flow stays with one core");
                counts[at][core] += 1;
                assert!(flow_steering.begin_flow(core, flow_of(local, at, from)));
            }
        }
        for [card, one, other] in counts {
            assert!(card == 0 && one > 50 && other > 50, "{one} and {other}");
        }
        // Sockets of core 1 leave: the core keeps its flows and gets no new ones.
        for any in ["0.0.0.0", "::"] {
            flow_steering.leave(1, local, any.parse().unwrap(), 0);
        }
        for from in 1..=200 {
            for (at, packet) in packets(from).iter().enumerate() {
                counts[at][testbed.receiving_core(packet)] -= 1;
            }
            for packet in packets(from + 1000) {
                assert_eq!(testbed.receiving_core(&packet), 2);
            }
        }
        assert_eq!(counts, [[0; 3]; 2], "each flow stays with its core");
    }
}

#[test]
fn fragments_and_icmp_errors_follow_their_flow() {
    let mut testbed = Testbed::new(3);
    let local = (TransportProtocol::Udp, 53);
    share(&testbed, local);
    let flow_steering = testbed.primary.flow_steering();
    for core in [1, 2] {
        for at in [0, 1] {
            flow_steering.take_over_flow(core, flow_of(local, at, SOURCE));
        }
        let datagram = transport(SOURCE, 53, &[0; 8]);
        assert_eq!(testbed.receiving_core(&v4(UDP, 0x2000, &datagram)), core);
        assert_eq!(testbed.receiving_core(&v4(UDP, 2, &[1; 8])), core);
        let fragment = |offset: [u8; 2], data: &[u8]| {
            v6(44, &[&[UDP, 0][..], &offset, &[0, 0, 0, 9], data].concat())
        };
        assert_eq!(testbed.receiving_core(&fragment([0, 1], &datagram)), core);
        assert_eq!(testbed.receiving_core(&fragment([0, 16], &[1; 8])), core);
        // In a quoted packet, source and destination are swapped.
        let sent = transport(53, SOURCE, &[]);
        let mut quote = v4(UDP, 0, &sent);
        let (source, destination) = ([192, 0, 2, 1], [192, 0, 2, 9]);
        quote[12..16].copy_from_slice(&source);
        quote[16..20].copy_from_slice(&destination);
        let code = icmpv4::unreachable::PORT;
        let error = Icmpv4Message::DestinationUnreachable { code, next_hop_mtu: 0, quote: &quote };
        let mut message = vec![0; 8 + quote.len()];
        assert!(error.emit(&mut message).is_some());
        assert_eq!(testbed.receiving_core(&v4(1, 0, &message)), core);
        let mut quote = v6(UDP, &sent);
        quote[8..24].fill(0xfe);
        quote[24..40].fill(0xfd);
        let mut message = vec![0; 8 + quote.len()];
        let error = Icmpv6Message::PacketTooBig { mtu: 1280, quote: &quote };
        assert!(error.emit([0xfd; 16].into(), [0xfe; 16].into(), &mut message).is_some());
        assert_eq!(testbed.receiving_core(&v6(58, &message)), core);
    }
}

#[test]
fn group_datagrams_reach_every_core_sharing_the_port() {
    let mut testbed = Testbed::new(3);
    share(&testbed, (TransportProtocol::Udp, 5353));
    let datagram = transport(SOURCE, 5353, b"who is there");
    let mut groups = [v4(UDP, 0, &datagram), v4(UDP, 0, &datagram), v6(UDP, &datagram)];
    groups[0][16..20].copy_from_slice(&[224, 0, 0, 251]);
    groups[1][16..20].fill(0xff);
    groups[2][24..40].fill(0xff);
    for packet in &groups {
        testbed.send(packet);
        assert_eq!(testbed.receive(), [vec![], vec![packet.clone()], vec![packet.clone()]]);
    }
    testbed
        .primary
        .flow_steering()
        .claim(0, (TransportProtocol::Udp, 5353), PortSharing::ReusePort { owner: 0 })
        .unwrap();
    testbed.send(&groups[0]);
    assert!(testbed.receive().iter().all(|got| *got == [groups[0].clone()]));
    assert_eq!(testbed.primary_arena.available(), 2048);
}

#[test]
fn shared_port_migration_keeps_order_without_loss() {
    let mut testbed = Testbed::new(3);
    let local = (TransportProtocol::Udp, 53);
    share(&testbed, local);
    let flow_steering = testbed.primary.flow_steering();
    let known = flow_of(local, 0, SOURCE);
    flow_steering.take_over_flow(1, known);
    let other = flow_of(local, 0, 9);
    flow_steering.take_over_flow(2, other);
    let number = |at: u8| v4(UDP, 0, &transport(SOURCE, 53, &[at]));
    let elsewhere = v4(UDP, 0, &transport(9, 53, b"goes on"));
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| flow_steering.park(1, &[local]));
        while !parked.is_finished() {
            assert!(receive_all(&mut testbed.primary, &mut testbed.primary_arena).is_empty());
            std::thread::yield_now();
        }
        parked.join().unwrap().unwrap();
    });
    assert_eq!(testbed.receiving_core(&elsewhere), 2, "core 2 does not migrate");
    (0..50).for_each(|at| testbed.send(&number(at)));
    let new_flow = v4(UDP, 0, &transport(77, 53, b"new"));
    testbed.send(&new_flow);
    assert!(testbed.receive().iter().all(Vec::is_empty), "parked frames wait");
    for any in ["0.0.0.0", "::"] {
        flow_steering.leave(1, local, any.parse().unwrap(), 0);
        flow_steering.join(0, local, any.parse().unwrap(), 0);
    }
    flow_steering.take_over_flow(0, known);
    flow_steering.hand_over(1, 0, [(local, 1)]);
    (50..60).for_each(|at| testbed.send(&number(at)));
    let mut got = testbed.receive();
    got[0].extend(testbed.receive().remove(0));
    got.iter_mut().for_each(|got| got.retain(|packet| *packet != new_flow));
    assert_eq!(got[0], (0..60).map(number).collect::<Vec<_>>());
    assert_eq!(testbed.primary_arena.available(), 2048);
}

#[test]
fn primary_core_forwards_while_it_does_not_receive() {
    let mut testbed = Testbed::new(2);
    let flow_steering = testbed.primary.flow_steering();
    for packet in both(UDP, 53, b"out") {
        testbed.primary.pause_receive(1_000_000).unwrap();
        let is_woken = |primary: &CoreDevice| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let fd = primary.pause_wake_fd().unwrap();
            poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).unwrap() == 1
        };
        assert!(!is_woken(&testbed.primary));
        // A frame for the primary core stays in the device.
        testbed.send(&packet);
        let (secondary, arena) = &mut testbed.secondaries[0];
        let mut burst: Burst = [arena.alloc_from(&packet).unwrap()].into();
        assert_eq!(secondary.transmit(arena, &mut burst).unwrap(), 1);
        assert!(is_woken(&testbed.primary), "the primary core sleeps on");
        testbed.primary.forward(&mut testbed.primary_arena).unwrap();
        flow_steering.wait_until_sent(1).unwrap();
        assert_eq!(
            receive_all(&mut testbed.sender, &mut testbed.arena),
            std::slice::from_ref(&packet)
        );
        // Frames sent before the pause wake the primary core at once.
        let (secondary, arena) = &mut testbed.secondaries[0];
        let mut burst: Burst = [arena.alloc_from(&packet).unwrap()].into();
        secondary.transmit(arena, &mut burst).unwrap();
        testbed.primary.pause_receive(1_000_000).unwrap();
        assert!(is_woken(&testbed.primary));
        testbed.primary.forward(&mut testbed.primary_arena).unwrap();
        assert_eq!(
            receive_all(&mut testbed.sender, &mut testbed.arena),
            std::slice::from_ref(&packet)
        );
        assert_eq!(receive_all(&mut testbed.primary, &mut testbed.primary_arena), [packet]);
    }
}

/// Device with steering rules: notes what is set.
struct DeviceWithRules {
    link: MemDevice,
    rules: Arc<RuleLog>,
}

#[derive(Default)]
struct RuleLog(Mutex<Vec<(SteeringRule, bool)>>);

impl SharedRules for RuleLog {
    fn set(&self, rule: &SteeringRule, take: bool) -> io::Result<()> {
        self.0.lock().unwrap().push((*rule, take));
        Ok(())
    }
}

impl Device for DeviceWithRules {
    fn capabilities(&self) -> &Capabilities {
        self.link.capabilities()
    }
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.link.receive(arena, burst, quota)
    }
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.link.transmit(arena, burst)
    }
    fn shared_rules(&self) -> Option<Arc<dyn SharedRules>> {
        Some(Arc::clone(&self.rules) as Arc<dyn SharedRules>)
    }
    fn counters(&mut self) -> DeviceCounters {
        self.link.counters()
    }
}

#[test]
fn every_core_sets_the_rules_of_the_device_through_any_wrapper() {
    let rule = SteeringRule::Port { protocol: TransportProtocol::Udp, address: None, port: 53 };
    let rules = Arc::new(RuleLog::default());
    let device = || {
        let (link, _) = wire(&MemConfig::default()).unwrap();
        DeviceWithRules { link, rules: Arc::clone(&rules) }
    };
    let wrapped: [Box<dyn Device>; 3] = [
        Box::new(device()),
        Box::new(FaultInjector::new(device(), FaultConfig::default()).unwrap()),
        Box::new(Trace::new(device(), io::sink())),
    ];
    for device in wrapped {
        for core in shard(device, 2).unwrap() {
            core.set_steering(&rule, true).unwrap();
            core.set_steering(&rule, false).unwrap();
        }
        assert_eq!(rules.0.lock().unwrap().split_off(0), [(rule, true), (rule, false)].repeat(2));
    }
    let (link, _) = wire(&MemConfig::default()).unwrap();
    let refused = shard(Box::new(link), 2).unwrap()[1].set_steering(&rule, true).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
}
