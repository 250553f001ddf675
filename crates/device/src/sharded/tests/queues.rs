//! Cores with a receive queue each.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::{Capabilities, DeviceCounters, OpenDevice, ShardedDevice};

/// Queues of a device, the first one's own.
struct MultiQueue(Vec<MemDevice>);

impl MultiQueue {
    /// Queues, and the peer that sends to each.
    fn new(queues: usize) -> (Self, Vec<MemDevice>) {
        let config = MemConfig { medium: Medium::Ip, capacity: 2048, ..MemConfig::default() };
        let (own, senders) = (0..queues).map(|_| wire(&config).unwrap()).unzip();
        (Self(own), senders)
    }
}

impl Device for MultiQueue {
    fn capabilities(&self) -> &Capabilities {
        self.0[0].capabilities()
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.0[0].receive(arena, burst, quota)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.0[0].transmit(arena, burst)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.0[0].prepare_sleep()
    }

    fn wake_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.0[0].wake_fd()
    }

    fn offer_queues(&mut self) -> Vec<OpenDevice> {
        let open = |queue| -> OpenDevice { Box::new(move |_| Ok(Box::new(queue))) };
        self.0.drain(1..).map(open).collect()
    }

    fn counters(&mut self) -> DeviceCounters {
        self.0[0].counters()
    }
}

/// Cores of which the first ones have a queue, and a peer that sends to each queue.
struct QueueTestbed {
    senders: Vec<MemDevice>,
    arena: Arena,
    cores: Vec<(CoreDevice, Arena)>,
}

impl QueueTestbed {
    fn new(cores: usize, queues: usize) -> Self {
        Self::with(queues, |device| shard(device, cores))
    }

    fn with(
        queues: usize,
        shard: impl FnOnce(Box<dyn Device>) -> io::Result<Vec<CoreDevice>>,
    ) -> Self {
        let (device, senders) = MultiQueue::new(queues);
        let cores = shard(Box::new(device)).unwrap();
        let open = |mut core: CoreDevice| {
            let mut arena = arena();
            core.open_queue(&mut arena).unwrap();
            (core, arena)
        };
        Self { senders, arena: arena(), cores: cores.into_iter().map(open).collect() }
    }

    fn send(&mut self, queue: usize, packet: &[u8]) {
        let mut burst: Burst = [self.arena.alloc_from(packet).unwrap()].into();
        assert_eq!(self.senders[queue].transmit(&mut self.arena, &mut burst).unwrap(), 1);
    }

    /// Packets that each core receives, those included that cross.
    fn receive(&mut self) -> Vec<Vec<Vec<u8>>> {
        let mut got = vec![Vec::new(); self.cores.len()];
        for _ in 0..2 {
            for ((core, arena), got) in self.cores.iter_mut().zip(&mut got) {
                got.extend(receive_all(core, arena));
            }
        }
        got
    }

    /// Core that receives a packet.
    fn receiving_core(&mut self, queue: usize, packet: &[u8]) -> usize {
        self.send(queue, packet);
        let got = self.receive();
        let mut receivers = (0..got.len()).filter(|&core| !got[core].is_empty());
        let core = receivers.next().expect("the packet is lost");
        assert_eq!(got[core], [packet]);
        assert_eq!(receivers.next(), None, "only one core gets the packet");
        core
    }

    fn flow_steering(&self) -> Arc<FlowSteering> {
        self.cores[0].0.flow_steering()
    }

    /// Packets that have left by each queue.
    fn sent(&mut self) -> Vec<Vec<Vec<u8>>> {
        let Self { senders, arena, .. } = self;
        senders.iter_mut().map(|sender| receive_all(sender, arena)).collect()
    }

    fn assert_no_frame_is_lost(&self) {
        assert!(self.cores.iter().all(|(_, arena)| arena.available() == 2048));
    }
}

#[test]
fn frames_of_any_queue_reach_the_core_that_claimed_the_port() {
    const CORES: usize = 4;
    let mut testbed = QueueTestbed::new(CORES, 3);
    let has_queue: Vec<_> = testbed.cores.iter().map(|(core, _)| core.has_queue()).collect();
    assert_eq!(has_queue, [true, true, true, false]);
    for core in 0..CORES {
        let port = (TransportProtocol::Udp, 1000 + core as u16);
        testbed.flow_steering().claim(core, port, PortSharing::Exclusive).unwrap();
    }
    for queue in 0..3 {
        for core in 0..CORES {
            for packet in both(UDP, 1000 + core as u16, b"payload") {
                assert_eq!(testbed.receiving_core(queue, &packet), core);
            }
        }
        for packet in both(UDP, 9, b"no socket") {
            assert_eq!(testbed.receiving_core(queue, &packet), 0);
        }
    }
    testbed.assert_no_frame_is_lost();
}

#[test]
fn router_forwards_each_packet_on_the_core_that_has_received_it() {
    const ICMPV6: u8 = 58;
    // Destination of the packets of these tests.
    let own = IpAddr::from([0xfe; 16]);
    let router =
        |own: Option<IpAddr>| QueueTestbed::with(2, move |device| shard_router(device, 3, own));
    let mut testbed = router(Some(own));
    // Ports, fragments and errors mean nothing to a router.
    let mut packets = Vec::from(both(UDP, 1000, b"payload"));
    packets.extend(both(TCP, 80, b"payload"));
    packets.push(v4(UDP, 0x2000, b"first"));
    packets.push(v4(UDP, 100, b"later"));
    packets.push(v4(1, 0, &[8; 60]));
    packets.push(v6(ICMPV6, &[128; 60]));
    for packet in &packets {
        assert_eq!(testbed.receiving_core(0, packet), 0);
        assert_eq!(testbed.receiving_core(1, packet), 1);
    }
    // All cores learn of neighbours, and one answers for the router.
    let [advertisement, solicitation] = [136, 135].map(|kind| v6(ICMPV6, &[kind; 24]));
    testbed.send(1, &advertisement);
    assert_eq!(testbed.receive(), vec![vec![advertisement.clone()]; 3]);
    assert_eq!(testbed.receiving_core(1, &solicitation), 0);
    testbed.assert_no_frame_is_lost();
    // A message for another host would be forwarded by each core that had it.
    let mut testbed = router(None);
    assert_eq!(testbed.receiving_core(1, &advertisement), 1);
    assert_eq!(testbed.receiving_core(1, &solicitation), 1);
}

#[test]
fn frames_that_arrive_at_their_core_do_not_cross() {
    let mut testbed = QueueTestbed::new(3, 3);
    testbed.flow_steering().claim(2, (TransportProtocol::Udp, 53), PortSharing::Exclusive).unwrap();
    for packet in both(UDP, 53, b"question") {
        testbed.send(2, &packet);
        let (core, arena) = &mut testbed.cores[2];
        assert_eq!(receive_all(core, arena), [packet]);
    }
}

/// The cores with a queue share a port; the first `sharing` of them have sockets.
fn share_port(testbed: &QueueTestbed, local: LocalPort, sharing: usize) {
    let flow_steering = testbed.flow_steering();
    for core in 0..sharing {
        for any in ["0.0.0.0", "::"] {
            flow_steering.join(core, local, any.parse().unwrap(), 0);
        }
        flow_steering.claim(core, local, PortSharing::ReusePort { owner: 0 }).unwrap();
    }
}

/// The card divides the flows of a port that all its cores read.
#[test]
fn new_flows_of_a_shared_port_stay_where_they_arrive() {
    for (number, protocol) in [(TCP, TransportProtocol::Tcp), (UDP, TransportProtocol::Udp)] {
        let local = (protocol, 80);
        let packets = |from: u16| {
            let payload = transport(from, 80, b"x");
            [v4(number, 0x4000, &payload), v6(number, &payload)]
        };
        let mut testbed = QueueTestbed::new(3, 3);
        share_port(&testbed, local, 2);
        let mut counts = [0; 3];
        for packet in (1..100).flat_map(packets) {
            assert_eq!(testbed.receiving_core(0, &packet), 0);
            assert_eq!(testbed.receiving_core(1, &packet), 1);
            counts[testbed.receiving_core(2, &packet)] += 1;
        }
        assert!(counts[0] > 50 && counts[1] > 50 && counts[2] == 0, "without a socket: {counts:?}");
        // A known flow stays with its socket, wherever its frames arrive.
        testbed.flow_steering().take_over_flow(1, flow_of(local, 0, SOURCE));
        let [known, _] = both(number, 80, b"x");
        assert_eq!(testbed.receiving_core(0, &known), 1);

        // A core of the port has no queue: it would get no flow otherwise.
        let mut testbed = QueueTestbed::new(3, 2);
        share_port(&testbed, local, 3);
        let mut counts = [0; 3];
        for packet in (1..100).flat_map(packets) {
            counts[testbed.receiving_core(0, &packet)] += 1;
        }
        assert!(counts.iter().all(|&count| count > 20), "{counts:?}");
    }
}

#[test]
fn each_core_sends_by_its_own_queue() {
    let mut testbed = QueueTestbed::new(3, 2);
    for core in 0..3u8 {
        let (device, arena) = &mut testbed.cores[usize::from(core)];
        let mut burst: Burst = [arena.alloc_from(&[core; 60]).unwrap()].into();
        assert_eq!(device.transmit(arena, &mut burst).unwrap(), 1);
    }
    assert!(testbed.receive().iter().all(Vec::is_empty));
    let of = |core: u8| vec![core; 60];
    assert_eq!(testbed.sent(), [vec![of(0), of(2)], vec![of(1)]]);
    (0..3).for_each(|core| testbed.flow_steering().wait_until_sent(core).unwrap());
    testbed.assert_no_frame_is_lost();
}

#[test]
fn advertisements_of_any_queue_reach_active_cores() {
    let mut testbed = QueueTestbed::new(4, 4);
    testbed.flow_steering().set_active(2);
    for queue in 0..4 {
        testbed.send(queue, &v6(58, &[136, 0, 0, 0, 0, 0, 0, 0]));
        let got = testbed.receive();
        assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [1, 0, 1, 0]);
    }
    testbed.assert_no_frame_is_lost();
}

#[test]
fn loopback_frames_reach_any_core() {
    const CORES: usize = 3;
    for from in 0..CORES {
        for to in 0..CORES {
            let mut testbed = QueueTestbed::new(CORES, 2);
            let port = (TransportProtocol::Tcp, 80);
            testbed.flow_steering().claim(to, port, PortSharing::Exclusive).unwrap();
            let (device, arena) = &mut testbed.cores[from];
            let (mut frames, mut own) = (loopback_frames(TCP, 80, arena), Burst::new());
            device.loop_back(arena, &mut frames, &mut own, 9).unwrap();
            let mut received = [0; CORES];
            received[from] += own.len();
            own.drain(..).for_each(|frame| arena.free(frame));
            for (core, packets) in testbed.receive().into_iter().enumerate() {
                received[core] += packets.len();
            }
            let mut expected = [0; CORES];
            expected[to] = 2;
            assert_eq!(received, expected, "from core {from} to core {to}");
            assert!(testbed.sent().iter().all(Vec::is_empty));
        }
    }
}

/// Neither the queue nor the passed-on frames starve the other, whatever the quota.
#[test]
fn queue_and_passed_frames_share_the_quota() {
    for quota in [1, 2, 7] {
        let mut testbed = QueueTestbed::new(2, 2);
        let port = (TransportProtocol::Udp, 53);
        testbed.flow_steering().claim(0, port, PortSharing::Exclusive).unwrap();
        let [own, _] = both(UDP, 53, b"own");
        let [passed, _] = both(UDP, 53, b"passed on");
        for _ in 0..100 {
            testbed.send(0, &own);
            testbed.send(1, &passed);
        }
        let (core, arena) = &mut testbed.cores[1];
        assert!(receive_all(core, arena).is_empty());
        let (core, arena) = &mut testbed.cores[0];
        let (mut burst, mut own_count, mut passed_count) = (Burst::new(), 0, 0);
        for _ in 0..20 {
            assert_eq!(core.receive(arena, &mut burst, quota).unwrap(), quota);
            for frame in burst.drain(..) {
                match arena.bytes(&frame) == own {
                    true => own_count += 1,
                    false => passed_count += 1,
                }
                arena.free(frame);
            }
        }
        assert_eq!([own_count, passed_count], [10 * quota; 2]);
    }
}

#[test]
fn frames_of_any_queue_wait_for_a_migrating_port() {
    let mut testbed = QueueTestbed::new(3, 3);
    let port = (TransportProtocol::Udp, 53);
    let flow_steering = testbed.flow_steering();
    flow_steering.claim(1, port, PortSharing::Exclusive).unwrap();
    let number = |at: u8| v4(UDP, 0, &transport(SOURCE, 53, &[at]));
    flow_steering.park(1, &[port]).unwrap();
    for at in 0..30 {
        testbed.send(usize::from(at % 3), &number(at));
    }
    assert!(testbed.receive().iter().all(Vec::is_empty));
    flow_steering.hand_over(1, 2, [(port, 1)]);
    let mut got = testbed.receive();
    got[2].sort_unstable();
    assert_eq!(got, [vec![], vec![], (0..30).map(number).collect()]);
}

/// Ports migrate between two cores while two others dispatch frames to them all the time.
#[test]
fn no_frame_reaches_a_core_after_its_port_has_left() {
    const FRAMES: usize = 20_000;
    /// Frames of one queue on their way; fewer than any ring has.
    const WINDOW: usize = 256;
    let QueueTestbed { senders, cores, .. } = QueueTestbed::new(4, 2);
    let flow_steering = cores[0].0.flow_steering();
    let port = (TransportProtocol::Udp, 53);
    flow_steering.claim(2, port, PortSharing::Exclusive).unwrap();
    let number = |queue: usize, at: usize| {
        let payload = [&(at as u32).to_be_bytes()[..], &[queue as u8]].concat();
        v4(UDP, 0, &transport(SOURCE + queue as u16, 53, &payload))
    };
    let is_over = AtomicBool::new(false);
    let counts = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let mut cores = cores.into_iter();
    std::thread::scope(|scope| {
        for (queue, mut sender) in senders.into_iter().enumerate() {
            let (mut core, mut core_arena) = cores.next().unwrap();
            let (is_over, received) = (&is_over, &counts[queue]);
            scope.spawn(move || {
                let (mut sent, mut arena) = (0, arena());
                while !is_over.load(Ordering::Relaxed) {
                    while sent < FRAMES && sent < received.load(Ordering::Relaxed) + WINDOW {
                        let frame = arena.alloc_from(&number(queue, sent)).unwrap();
                        sender.transmit(&mut arena, &mut [frame].into()).unwrap();
                        sent += 1;
                    }
                    assert!(receive_all(&mut core, &mut core_arena).is_empty());
                    std::thread::yield_now();
                }
            });
        }
        let mut holders = [(2, cores.next().unwrap()), (3, cores.next().unwrap())];
        let mut next = [0; 2];
        let mut check = |packets: Vec<Vec<u8>>| {
            for packet in packets {
                let queue = usize::from(packet[packet.len() - 1]);
                assert_eq!(packet, number(queue, next[queue]), "in order, none lost");
                next[queue] += 1;
                counts[queue].store(next[queue], Ordering::Relaxed);
            }
            next == [FRAMES; 2]
        };
        let mut migrations = 0;
        loop {
            let [(from, (device, arena)), (to, (other, other_arena))] = &mut holders;
            let mut is_done = check(receive_all(device, arena));
            flow_steering.park(*from, &[port]).unwrap();
            while device.has_passed_frames() {
                is_done = check(receive_all(device, arena));
            }
            flow_steering.hand_over(*from, *to, [(port, 1)]);
            is_done = check(receive_all(other, other_arena)) || is_done;
            assert!(receive_all(device, arena).is_empty(), "the port has left");
            migrations += 1;
            if is_done {
                break;
            }
            holders.swap(0, 1);
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(migrations > 10, "{migrations}");
    });
}

#[test]
fn queues_are_closed_and_opened_with_the_primary_cores_device() {
    let mut testbed = QueueTestbed::new(3, 3);
    let is_over = AtomicBool::new(false);
    let mut others = testbed.cores.split_off(1);
    let (closed, _peers) = MultiQueue::new(1);
    let (reopened, senders) = MultiQueue::new(2);
    std::thread::scope(|scope| {
        for (core, arena) in &mut others {
            let is_over = &is_over;
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(receive_all(core, arena).is_empty());
                    std::thread::yield_now();
                }
            });
        }
        let primary = &mut testbed.cores[0].0;
        assert_eq!(primary.queue_cores(), 3);
        let before = primary.replace_inner(Box::new(closed)).unwrap();
        assert!(testbed.senders.iter().skip(1).all(MemDevice::is_closed));
        drop(before);
        primary.replace_inner(Box::new(reopened)).unwrap();
        is_over.store(true, Ordering::Relaxed);
    });
    testbed.cores.extend(others);
    testbed.senders = senders;
    let has_queue: Vec<_> = testbed.cores.iter().map(|(core, _)| core.has_queue()).collect();
    assert_eq!(has_queue, [true, true, false]);
    let port = (TransportProtocol::Udp, 53);
    testbed.flow_steering().claim(2, port, PortSharing::Exclusive).unwrap();
    for queue in [0, 1] {
        for packet in both(UDP, 53, b"again") {
            assert_eq!(testbed.receiving_core(queue, &packet), 2);
        }
    }
}

#[test]
fn passed_frames_and_requests_wake_a_sleeping_core() {
    let mut testbed = QueueTestbed::new(2, 2);
    let port = (TransportProtocol::Udp, 53);
    testbed.flow_steering().claim(1, port, PortSharing::Exclusive).unwrap();
    let [packet, _] = both(UDP, 53, b"wake up");
    assert!(testbed.cores[1].0.prepare_sleep().unwrap());
    testbed.send(0, &packet);
    assert!(!readable(&testbed.cores[1].0), "the frame is in the other core's queue");
    let (primary, arena) = &mut testbed.cores[0];
    assert!(receive_all(primary, arena).is_empty());
    assert!(readable(&testbed.cores[1].0), "the frame was passed on");
    assert!(!testbed.cores[1].0.prepare_sleep().unwrap());
    assert_eq!(testbed.receive()[1], std::slice::from_ref(&packet));
    assert!(testbed.cores[1].0.prepare_sleep().unwrap());
    testbed.send(1, &packet);
    assert!(readable(&testbed.cores[1].0), "a frame in the own queue wakes the core");
    assert!(!testbed.cores[1].0.prepare_sleep().unwrap());
    assert_eq!(testbed.receive()[1], std::slice::from_ref(&packet));
    // While receiving is paused, passed-on frames wait.
    testbed.cores[1].0.pause_receive(1_000_000).unwrap();
    testbed.send(0, &packet);
    let (primary, arena) = &mut testbed.cores[0];
    assert!(receive_all(primary, arena).is_empty());
    let is_woken = |core: &CoreDevice| {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let fd = core.pause_wake_fd().unwrap();
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).unwrap() == 1
    };
    assert!(!is_woken(&testbed.cores[1].0));
    testbed.flow_steering().hand_over(0, 1, []);
    assert!(is_woken(&testbed.cores[1].0));
}
