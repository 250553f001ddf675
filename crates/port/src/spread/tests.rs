use std::net::IpAddr;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_memory::{Arena, ArenaConfig, Frame, FrameSize};
use tidegate_wire::{Icmpv4Message, Icmpv6Message, Medium, icmpv4};

use super::destination::Destination;
use super::*;
use crate::Burst;
use crate::mem::{MemPort, wire};
use crate::steering::Protocol;

const UDP: u8 = 17;
const TCP: u8 = 6;
const SOURCE: u16 = 4000;

fn arena() -> Arena {
    Arena::new(ArenaConfig { frames: 2048, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

/// Both ports and some bytes.
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

/// A packet of each family to a port.
fn both(protocol: u8, to: u16, payload: &[u8]) -> [Vec<u8>; 2] {
    let datagram = transport(SOURCE, to, payload);
    [v4(protocol, 0x4000, &datagram), v6(protocol, &datagram)]
}

/// A card with so many cores behind it, and who sends to it.
struct Bench {
    sender: MemPort,
    arena: Arena,
    trunk: Trunk,
    own: Arena,
    branches: Vec<(Branch, Arena)>,
}

impl Bench {
    fn new(cores: usize) -> Self {
        let config = MemConfig { medium: Medium::Ip, capacity: 2048, ..MemConfig::default() };
        let (sender, card) = wire(&config).unwrap();
        let (trunk, branches) = spread(Box::new(card), cores).unwrap();
        let branches = branches.into_iter().map(|branch| (branch, arena())).collect();
        Self { sender, arena: arena(), trunk, own: arena(), branches }
    }

    fn send(&mut self, packet: &[u8]) {
        let mut burst: Burst = [self.arena.alloc_from(packet).unwrap()].into();
        assert_eq!(self.sender.transmit(&mut self.arena, &mut burst).unwrap(), 1);
    }

    /// What each core gets, the one with the card first.
    fn receive(&mut self) -> Vec<Vec<Vec<u8>>> {
        let mut got = vec![take(&mut self.trunk, &mut self.own)];
        got.extend(self.branches.iter_mut().map(|(branch, arena)| take(branch, arena)));
        got
    }

    /// Who gets a packet: there must be one.
    fn whose(&mut self, packet: &[u8]) -> usize {
        self.send(packet);
        let got = self.receive();
        let mut who = got.iter().enumerate().filter(|(_, packets)| !packets.is_empty());
        let (core, packets) = who.next().expect("it is lost");
        assert_eq!((packets.len(), &packets[0][..]), (1, packet));
        assert!(who.next().is_none(), "one only");
        core
    }

    fn claim(&mut self, core: usize, protocol: Protocol, port: u16) -> io::Result<()> {
        self.trunk.crossing().claim(core, (protocol, port), Sharing::Alone)
    }
}

fn take(port: &mut dyn Port, arena: &mut Arena) -> Vec<Vec<u8>> {
    let mut burst = Burst::new();
    port.receive(arena, &mut burst, 1024).unwrap();
    let take = |frame| {
        let bytes = arena.bytes(&frame).to_vec();
        arena.free(frame);
        bytes
    };
    burst.drain(..).map(take).collect()
}

fn readable(trunk: &Trunk) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let fd = trunk.wake_fd().unwrap();
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).unwrap() == 1
}

#[test]
fn each_core_gets_what_its_ports_get() {
    let mut bench = Bench::new(3);
    bench.claim(1, Protocol::Tcp, 80).unwrap();
    bench.claim(2, Protocol::Udp, 80).unwrap();
    bench.claim(0, Protocol::Udp, 53).unwrap();
    for (protocol, port, core) in [(TCP, 80, 1), (UDP, 80, 2), (UDP, 53, 0), (UDP, 9, 0)] {
        for packet in both(protocol, port, b"payload") {
            assert_eq!(bench.whose(&packet), core);
        }
    }
    let refused = bench.claim(0, Protocol::Tcp, 80).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
    assert!(bench.trunk.crossing().is_foreign(0, (Protocol::Tcp, 80)));
    // What is no packet, is cut off, or is another protocol's.
    for odd in [&b"x"[..], &[0x45; 19], &v4(47, 0, &[0; 8]), &v4(TCP, 0, &[0; 3]), &v6(59, &[])] {
        assert_eq!(bench.whose(odd), 0);
    }
}

#[test]
fn all_parts_of_a_packet_go_the_same_way() {
    let mut bench = Bench::new(2);
    bench.claim(1, Protocol::Udp, 53).unwrap();
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
        assert_eq!(bench.whose(&tail), 0, "nobody knows whose it is");
        assert_eq!(bench.whose(&head), 1);
        assert_eq!(bench.whose(&tail), 1);
    }
}

#[test]
fn an_error_goes_to_whoever_sent_what_it_quotes() {
    let mut bench = Bench::new(2);
    bench.claim(1, Protocol::Tcp, SOURCE).unwrap();
    let [quote_v4, quote_v6] = both(TCP, 443, &[]);
    let mut message = vec![0; 8 + quote_v4.len()];
    let error = Icmpv4Message::DestinationUnreachable {
        code: icmpv4::unreachable::FRAGMENTATION_NEEDED,
        next_hop_mtu: 1400,
        quote: &quote_v4,
    };
    assert!(error.emit(&mut message).is_some());
    assert_eq!(bench.whose(&v4(1, 0, &message)), 1);
    assert_eq!(bench.whose(&v4(1, 0, &message[..20])), 0, "cut off");
    let mut message = vec![0; 8 + quote_v6.len()];
    let error = Icmpv6Message::PacketTooBig { mtu: 1280, quote: &quote_v6 };
    assert!(error.emit([0xfd; 16].into(), [0xfe; 16].into(), &mut message).is_some());
    assert_eq!(bench.whose(&v6(58, &message)), 1);
    let request = Icmpv4Message::EchoRequest { identifier: 1, sequence: 1, data: &quote_v4 };
    let mut message = vec![0; 8 + quote_v4.len()];
    assert!(request.emit(&mut message).is_some());
    assert_eq!(bench.whose(&v4(1, 0, &message)), 0, "who is pinged is the one with the card");
}

#[test]
fn all_cores_in_use_hear_of_neighbours() {
    let mut bench = Bench::new(3);
    bench.trunk.crossing().set_used(2);
    let advertisement = v6(58, &[136, 0, 0, 0, 0, 0, 0, 0]);
    bench.send(&advertisement);
    let got = bench.receive();
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 1]);
    let mut arp = vec![0xff; 12];
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    arp.extend([1; 20]);
    assert_eq!(Destination::of(Medium::Ethernet, &arp), Destination::Everybody);
    arp[21] = 1;
    assert_eq!(Destination::of(Medium::Ethernet, &arp), Destination::Home, "a question");
}

#[test]
fn what_a_core_sends_leaves_by_the_card() {
    let mut bench = Bench::new(2);
    assert!(bench.trunk.prepare_sleep().unwrap() && !readable(&bench.trunk));
    let (branch, arena) = &mut bench.branches[0];
    let mut burst: Burst = (0..3u8).map(|at| arena.alloc_from(&[at; 60]).unwrap()).collect();
    assert_eq!(branch.transmit(arena, &mut burst).unwrap(), 3);
    assert!(readable(&bench.trunk), "it wakes the core with the card");
    assert!(!bench.trunk.prepare_sleep().unwrap());
    assert!(bench.receive().iter().all(Vec::is_empty));
    let sent = take(&mut bench.sender, &mut bench.arena);
    assert_eq!(sent, [[0; 60], [1; 60], [2; 60]]);
    assert_eq!(bench.own.available(), 2048);
}

#[test]
fn ports_move_without_loss_and_in_order() {
    let mut bench = Bench::new(3);
    bench.claim(1, Protocol::Udp, 53).unwrap();
    let ports = [(Protocol::Udp, 53)];
    let crossing = bench.trunk.crossing();
    let number = |at: u8| v4(UDP, 0, &transport(SOURCE, 53, &[at]));
    let mut expected = Vec::new();
    bench.send(&number(0));
    assert!(take(&mut bench.trunk, &mut bench.own).is_empty());
    // The core with the card must look for the other to have everything.
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| crossing.park(1, &ports));
        while !parked.is_finished() {
            assert!(take(&mut bench.trunk, &mut bench.own).is_empty());
            std::thread::yield_now();
        }
        parked.join().unwrap().unwrap();
    });
    let (branch, arena) = &mut bench.branches[0];
    assert_eq!(take(branch, arena), [number(0)]);
    for at in 1..100 {
        bench.send(&number(at));
        expected.push(number(at));
        if at % 9 == 0 {
            assert!(bench.receive().iter().all(Vec::is_empty), "they wait");
        }
    }
    crossing.hand(1, 2, [(ports[0], 1)]);
    assert!(!bench.trunk.prepare_sleep().unwrap());
    for at in 100..110 {
        bench.send(&number(at));
        expected.push(number(at));
    }
    let mut got = bench.receive();
    got[2].extend(bench.receive().remove(2));
    assert_eq!(got[2], expected);
    assert!(got[0].is_empty() && got[1].is_empty());
    assert_eq!(bench.own.available(), 2048);
}

#[test]
fn a_move_from_the_core_with_the_card_waits_for_nobody() {
    let mut bench = Bench::new(2);
    bench.claim(0, Protocol::Tcp, 80).unwrap();
    let crossing = bench.trunk.crossing();
    crossing.park(0, &[(Protocol::Tcp, 80)]).unwrap();
    crossing.hand(0, 1, [((Protocol::Tcp, 80), 1)]);
    let [packet, _] = both(TCP, 80, b"x");
    assert_eq!(bench.whose(&packet), 1);
}

#[test]
fn who_cannot_take_more_loses_it_and_nobody_else() {
    let mut bench = Bench::new(3);
    bench.claim(1, Protocol::Udp, 1).unwrap();
    bench.claim(2, Protocol::Udp, 2).unwrap();
    let [flood, _] = both(UDP, 1, b"flood");
    let [other, _] = both(UDP, 2, b"other");
    for _ in 0..WIRE_FRAMES + 10 {
        bench.send(&flood);
    }
    bench.send(&other);
    assert!(take(&mut bench.trunk, &mut bench.own).is_empty());
    assert!(take(&mut bench.trunk, &mut bench.own).is_empty());
    let (branch, arena) = &mut bench.branches[1];
    assert_eq!(take(branch, arena), [other]);
    let drops = bench.trunk.counters().drops;
    assert_eq!(drops.get(tidegate_wire::DropReason::PortRingFull), 10);
    assert_eq!(bench.own.available(), 2048);
}

#[test]
fn a_core_without_the_one_with_the_card_ends() {
    let Bench { trunk, mut branches, .. } = Bench::new(2);
    drop(trunk);
    let (branch, arena) = &mut branches[0];
    let ended = branch.receive(arena, &mut Burst::new(), 1).unwrap_err();
    assert_eq!(ended.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn what_cannot_be_spread_is_refused() {
    let card = || Box::new(wire(&MemConfig::default()).unwrap().0);
    for cores in [0, MOST_CORES + 1] {
        assert_eq!(spread(card(), cores).err().unwrap().kind(), io::ErrorKind::InvalidInput);
    }
    assert!(spread(card(), 1).is_ok());
}

/// What a core sends to its own address, of both families.
fn looped(protocol: u8, to: u16, arena: &mut Arena) -> Burst {
    let frames = both(protocol, to, b"to ourselves").map(|packet| {
        let mut frame = arena.alloc_from(&packet).unwrap();
        frame.set_looped();
        frame
    });
    frames.into()
}

#[test]
fn what_a_core_sends_to_its_own_address_goes_to_whoever_has_the_port() {
    const CORES: usize = 3;
    for from in 0..CORES {
        for to in 0..CORES {
            let mut bench = Bench::new(CORES);
            bench.claim(to, Protocol::Tcp, 80).unwrap();
            let (port, arena): (&mut dyn Port, _) = match from.checked_sub(1) {
                Some(at) => {
                    let (branch, arena) = &mut bench.branches[at];
                    (branch, arena)
                }
                None => (&mut bench.trunk, &mut bench.own),
            };
            let (mut frames, mut own) = (looped(TCP, 80, arena), Burst::new());
            port.loop_back(arena, &mut frames, &mut own, 9).unwrap();
            assert!(frames.is_empty());
            let mut came = vec![0; CORES];
            for frame in own.drain(..) {
                assert!(frame.is_looped());
                came[from] += 1;
                arena.free(frame);
            }
            for (core, packets) in bench.receive().into_iter().enumerate() {
                came[core] += packets.len();
            }
            let mut expected = vec![0; CORES];
            expected[to] = 2;
            assert_eq!(came, expected, "from core {from} to core {to}");
            assert!(!bench.sender.has_arrived(), "nothing of it is for the card");
            if let Some(at) = from.checked_sub(1) {
                bench.trunk.crossing().wait_until_sent(at + 1).unwrap();
            }
        }
    }
}

#[test]
fn the_mark_of_a_looped_frame_goes_from_core_to_core_and_is_not_made_by_the_wire() {
    let mut bench = Bench::new(2);
    bench.claim(1, Protocol::Udp, 53).unwrap();
    let mut frames = looped(UDP, 53, &mut bench.own);
    bench.trunk.loop_back(&mut bench.own, &mut frames, &mut Burst::new(), 9).unwrap();
    both(UDP, 53, b"from the wire").iter().for_each(|packet| bench.send(packet));
    bench.trunk.receive(&mut bench.own, &mut Burst::new(), 9).unwrap();
    let (branch, arena) = &mut bench.branches[0];
    let mut burst = Burst::new();
    branch.receive(arena, &mut burst, 9).unwrap();
    let marks: Vec<bool> = burst.iter().map(Frame::is_looped).collect();
    assert_eq!(marks, [true, true, false, false]);
    burst.drain(..).for_each(|frame| arena.free(frame));
}

#[test]
fn what_is_looped_waits_for_a_port_that_is_on_its_way() {
    let mut bench = Bench::new(2);
    bench.claim(0, Protocol::Tcp, 80).unwrap();
    let crossing = bench.trunk.crossing();
    crossing.park(0, &[(Protocol::Tcp, 80)]).unwrap();
    let mut frames = looped(TCP, 80, &mut bench.own);
    bench.trunk.loop_back(&mut bench.own, &mut frames, &mut Burst::new(), 9).unwrap();
    assert!(bench.receive().iter().all(Vec::is_empty));
    crossing.hand(0, 1, [((Protocol::Tcp, 80), 1)]);
    assert_eq!(bench.receive()[1].len(), 2);
}

/// Cores 1 and 2 share a port of all addresses.
fn share(bench: &Bench, local: LocalPort) {
    let crossing = bench.trunk.crossing();
    for core in [1, 2] {
        for any in ["0.0.0.0", "::"] {
            crossing.join(core, local, any.parse().unwrap(), 0);
        }
        crossing.claim(core, local, Sharing::ReusePort { party: 0 }).unwrap();
    }
}

/// The flow of the packets that [`both`] makes, from another port.
fn flow_of(local: LocalPort, at: usize, from: u16) -> Flow {
    let [own, peer]: [IpAddr; 2] = match at {
        0 => [[192, 0, 2, 1].into(), [192, 0, 2, 9].into()],
        _ => [[0xfe; 16].into(), [0xfd; 16].into()],
    };
    Flow::new(local.0, (own, local.1).into(), (peer, from).into())
}

#[test]
fn flows_of_a_shared_port_are_divided_and_stay() {
    for (number, protocol) in [(TCP, Protocol::Tcp), (UDP, Protocol::Udp)] {
        let mut bench = Bench::new(3);
        let local = (protocol, 80);
        share(&bench, local);
        let crossing = bench.trunk.crossing();
        let packets = |from: u16| {
            let payload = transport(from, 80, b"x");
            [v4(number, 0x4000, &payload), v6(number, &payload)]
        };
        let mut counts = [[0; 3]; 2];
        for from in 1..=200 {
            for (at, packet) in packets(from).iter().enumerate() {
                let core = bench.whose(packet);
                assert_eq!(bench.whose(packet), core, "each flow is one core's");
                counts[at][core] += 1;
                assert!(crossing.begin(core, flow_of(local, at, from)));
            }
        }
        for [card, one, other] in counts {
            assert!(card == 0 && one > 50 && other > 50, "{one} and {other}");
        }
        // The sockets of core 1 take no more flows: only those that it has are its.
        for any in ["0.0.0.0", "::"] {
            crossing.leave(1, local, any.parse().unwrap(), 0);
        }
        for from in 1..=200 {
            for (at, packet) in packets(from).iter().enumerate() {
                counts[at][bench.whose(packet)] -= 1;
            }
            for packet in packets(from + 1000) {
                assert_eq!(bench.whose(&packet), 2);
            }
        }
        assert_eq!(counts, [[0; 3]; 2], "each flow is where it was");
    }
}

#[test]
fn parts_of_a_packet_and_errors_follow_their_flow() {
    let mut bench = Bench::new(3);
    let local = (Protocol::Udp, 53);
    share(&bench, local);
    let crossing = bench.trunk.crossing();
    for core in [1, 2] {
        for at in [0, 1] {
            crossing.take_over(core, flow_of(local, at, SOURCE));
        }
        let datagram = transport(SOURCE, 53, &[0; 8]);
        assert_eq!(bench.whose(&v4(UDP, 0x2000, &datagram)), core);
        assert_eq!(bench.whose(&v4(UDP, 2, &[1; 8])), core);
        let fragment = |offset: [u8; 2], data: &[u8]| {
            v6(44, &[&[UDP, 0][..], &offset, &[0, 0, 0, 9], data].concat())
        };
        assert_eq!(bench.whose(&fragment([0, 1], &datagram)), core);
        assert_eq!(bench.whose(&fragment([0, 16], &[1; 8])), core);
        // What was sent has the ends the other way round.
        let sent = transport(53, SOURCE, &[]);
        let mut quote = v4(UDP, 0, &sent);
        let (source, destination) = ([192, 0, 2, 1], [192, 0, 2, 9]);
        quote[12..16].copy_from_slice(&source);
        quote[16..20].copy_from_slice(&destination);
        let code = icmpv4::unreachable::PORT;
        let error = Icmpv4Message::DestinationUnreachable { code, next_hop_mtu: 0, quote: &quote };
        let mut message = vec![0; 8 + quote.len()];
        assert!(error.emit(&mut message).is_some());
        assert_eq!(bench.whose(&v4(1, 0, &message)), core);
        let mut quote = v6(UDP, &sent);
        quote[8..24].fill(0xfe);
        quote[24..40].fill(0xfd);
        let mut message = vec![0; 8 + quote.len()];
        let error = Icmpv6Message::PacketTooBig { mtu: 1280, quote: &quote };
        assert!(error.emit([0xfd; 16].into(), [0xfe; 16].into(), &mut message).is_some());
        assert_eq!(bench.whose(&v6(58, &message)), core);
    }
}

#[test]
fn all_who_share_a_port_hear_what_is_for_a_group() {
    let mut bench = Bench::new(3);
    share(&bench, (Protocol::Udp, 5353));
    let datagram = transport(SOURCE, 5353, b"who is there");
    let mut groups = [v4(UDP, 0, &datagram), v4(UDP, 0, &datagram), v6(UDP, &datagram)];
    groups[0][16..20].copy_from_slice(&[224, 0, 0, 251]);
    groups[1][16..20].fill(0xff);
    groups[2][24..40].fill(0xff);
    for packet in &groups {
        bench.send(packet);
        assert_eq!(bench.receive(), [vec![], vec![packet.clone()], vec![packet.clone()]]);
    }
    bench
        .trunk
        .crossing()
        .claim(0, (Protocol::Udp, 5353), Sharing::ReusePort { party: 0 })
        .unwrap();
    bench.send(&groups[0]);
    assert!(bench.receive().iter().all(|got| *got == [groups[0].clone()]));
    assert_eq!(bench.own.available(), 2048);
}

#[test]
fn a_part_of_a_shared_port_moves_without_loss_and_in_order() {
    let mut bench = Bench::new(3);
    let local = (Protocol::Udp, 53);
    share(&bench, local);
    let crossing = bench.trunk.crossing();
    let known = flow_of(local, 0, SOURCE);
    crossing.take_over(1, known);
    let other = flow_of(local, 0, 9);
    crossing.take_over(2, other);
    let number = |at: u8| v4(UDP, 0, &transport(SOURCE, 53, &[at]));
    let elsewhere = v4(UDP, 0, &transport(9, 53, b"goes on"));
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| crossing.park(1, &[local]));
        while !parked.is_finished() {
            assert!(take(&mut bench.trunk, &mut bench.own).is_empty());
            std::thread::yield_now();
        }
        parked.join().unwrap().unwrap();
    });
    assert_eq!(bench.whose(&elsewhere), 2, "nothing of it moves");
    (0..50).for_each(|at| bench.send(&number(at)));
    let stranger = v4(UDP, 0, &transport(77, 53, b"new"));
    bench.send(&stranger);
    assert!(bench.receive().iter().all(Vec::is_empty), "they wait");
    for any in ["0.0.0.0", "::"] {
        crossing.leave(1, local, any.parse().unwrap(), 0);
        crossing.join(0, local, any.parse().unwrap(), 0);
    }
    crossing.take_over(0, known);
    crossing.hand(1, 0, [(local, 1)]);
    (50..60).for_each(|at| bench.send(&number(at)));
    let mut got = bench.receive();
    got[0].extend(bench.receive().remove(0));
    got.iter_mut().for_each(|got| got.retain(|packet| *packet != stranger));
    assert_eq!(got[0], (0..60).map(number).collect::<Vec<_>>());
    assert_eq!(bench.own.available(), 2048);
}
