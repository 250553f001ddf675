//! Frames that stand for several TCP segments.

use std::collections::VecDeque;
use std::sync::MutexGuard;

use super::*;
use crate::segments::Segments;
use crate::segments::tests::packets_of;
use crate::transport::tests::Shape;

/// Payload of each segment.
const SEGMENT_BYTES: u16 = 1448;
/// Segments of one frame.
const SEGMENTS: usize = 40;
/// Local port of all frames.
const PORT: LocalPort = (TransportProtocol::Tcp, 7);

/// Frames of a device with segmentation.
#[derive(Default)]
struct Frames {
    /// Frames that it has yet to receive.
    incoming: VecDeque<Vec<u8>>,
    /// Frames that it has sent, with their segment size.
    sent: Vec<(Vec<u8>, usize)>,
}

#[derive(Clone, Default)]
struct Traffic(Arc<Mutex<Frames>>);

impl Traffic {
    fn lock(&self) -> MutexGuard<'_, Frames> {
        self.0.lock().unwrap()
    }
}

/// Device with segmentation on which a peer sends whole frames.
struct LargeFrameDevice {
    capabilities: Capabilities,
    traffic: Traffic,
}

impl Device for LargeFrameDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut count = 0;
        while count < quota
            && let Some(bytes) = self.traffic.lock().incoming.pop_front()
        {
            burst.push_back(as_segments(arena.alloc_from(&bytes).unwrap(), &bytes));
            count += 1;
        }
        Ok(count)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let count = burst.len();
        for frame in burst.drain(..) {
            let sent = (arena.bytes(&frame).to_vec(), frame.segment_bytes());
            self.traffic.lock().sent.push(sent);
            arena.free(frame);
        }
        Ok(count)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn wake_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn counters(&mut self) -> DeviceCounters {
        DeviceCounters::default()
    }
}

/// The frame marked as segments, as a device or the stack does.
fn as_segments(mut frame: Frame, bytes: &[u8]) -> Frame {
    let segments = Segments::new(Medium::Ethernet, bytes, 1).unwrap();
    frame.set_checksum(segments.checksum());
    frame.set_segment_bytes(SEGMENT_BYTES);
    frame
}

/// Frames of [`SEGMENTS`] segments, of each address family.
fn large_shapes() -> [Shape; 2] {
    let payload_bytes = SEGMENTS * usize::from(SEGMENT_BYTES);
    let shape = Shape { is_v6: false, is_tcp: true, tagged: false, extra_bytes: 0, payload_bytes };
    [shape, Shape { is_v6: true, ..shape }]
}

fn large_frames() -> [Vec<u8>; 2] {
    large_shapes().map(Shape::frame)
}

fn large_arena() -> Arena {
    Arena::new(ArenaConfig { frames: 64, frame_size: FrameSize::K64, hugepages: false }).unwrap()
}

/// Cores of a device with segmentation, of which only the first has a queue.
fn shard_large(cores: usize) -> (Traffic, Vec<(CoreDevice, Arena)>) {
    let traffic = Traffic::default();
    let capabilities = Capabilities {
        segmentation: true,
        ..wire(&MemConfig::default()).unwrap().0.capabilities().clone()
    };
    let device = LargeFrameDevice { capabilities, traffic: traffic.clone() };
    let cores = shard(Box::new(device), cores).unwrap();
    (traffic, cores.into_iter().map(|core| (core, large_arena())).collect())
}

/// Packets that a core receives; frees them.
fn received(core: &mut (CoreDevice, Arena)) -> Vec<Vec<u8>> {
    receive_all(&mut core.0, &mut core.1)
}

#[test]
fn a_large_frame_stays_whole_on_its_core_and_crosses_as_packets() {
    for frame in large_frames() {
        for port_core in 0..3 {
            let (traffic, mut cores) = shard_large(3);
            let flow_steering = cores[0].0.flow_steering();
            flow_steering.claim(port_core, PORT, PortSharing::Exclusive).unwrap();
            traffic.lock().incoming.push_back(frame.clone());
            let expected = if port_core == 0 {
                vec![frame.clone()]
            } else {
                packets_of(&frame, SEGMENT_BYTES.into())
            };
            for (core, device) in cores.iter_mut().enumerate() {
                let packets = received(device);
                assert_eq!(packets.is_empty(), core != port_core);
                assert!(core != port_core || packets == expected, "core {core}");
            }
            assert!(cores.iter().all(|(_, arena)| arena.available() == 64));
        }
    }
}

#[test]
fn full_link_drops_and_counts_frames() {
    let (traffic, mut cores) = shard_large(2);
    cores[0].0.flow_steering().claim(1, PORT, PortSharing::Exclusive).unwrap();
    let [frame, _] = large_frames();
    let fitting = LINK_FRAMES / SEGMENTS;
    traffic.lock().incoming.extend(vec![frame.clone(); fitting + 3]);
    while !traffic.lock().incoming.is_empty() {
        assert!(received(&mut cores[0]).is_empty());
    }
    let counters = cores[0].0.counters();
    assert_eq!(counters.drops.get(tidegate_wire::DropReason::DeviceRingFull), 3);
    assert_eq!(counters.passed_on as usize, fitting * SEGMENTS);
    let mut packets = Vec::new();
    while packets.len() < fitting * SEGMENTS {
        packets.extend(received(&mut cores[1]));
    }
    assert!(
        packets.chunks(SEGMENTS).all(|packets| packets == packets_of(&frame, SEGMENT_BYTES.into()))
    );
    assert!(cores.iter().all(|(_, arena)| arena.available() == 64));
}

/// A core whose queue is closed while it runs may still have large frames to send.
#[test]
fn large_frames_of_a_core_without_a_queue_leave_as_packets() {
    for frame in large_frames() {
        let (traffic, mut cores) = shard_large(2);
        let segmentation = |core: &(CoreDevice, Arena)| core.0.capabilities().segmentation;
        assert!(segmentation(&cores[0]) && !segmentation(&cores[1]));
        let (core, arena) = &mut cores[1];
        let mut burst: Burst = [as_segments(arena.alloc_from(&frame).unwrap(), &frame)].into();
        assert_eq!(core.transmit(arena, &mut burst).unwrap(), 1);
        assert!(received(&mut cores[0]).is_empty());
        let expected: Vec<_> = packets_of(&frame, SEGMENT_BYTES.into())
            .into_iter()
            .map(|packet| (packet, 0))
            .collect();
        assert!(traffic.lock().sent == expected);
        cores[0].0.flow_steering().wait_until_sent(1).unwrap();
        assert!(cores.iter().all(|(_, arena)| arena.available() == 64));
    }
}

#[test]
fn large_loopback_frames_cross_in_all_directions() {
    for (from, to) in [(0, 1), (1, 0), (1, 2)] {
        for shape in large_shapes() {
            let (traffic, mut cores) = shard_large(3);
            cores[0].0.flow_steering().claim(to, PORT, PortSharing::Exclusive).unwrap();
            let (core, arena) = &mut cores[from];
            let mut loopback = arena.alloc_from(&shape.frame()).unwrap();
            loopback.set_loopback();
            core.loop_back(arena, &mut [loopback].into(), &mut Burst::new(), 9).unwrap();
            assert!(to == 0 || received(&mut cores[0]).is_empty());
            let (core, arena) = &mut cores[to];
            let (mut burst, mut payload) = (Burst::new(), Vec::new());
            core.receive(arena, &mut burst, 1024).unwrap();
            for frame in burst.drain(..) {
                assert!(frame.is_loopback() && frame.len() <= 1514);
                payload.extend_from_slice(&arena.bytes(&frame)[shape.headers_bytes()..]);
                arena.free(frame);
            }
            assert!(payload == shape.frame()[shape.headers_bytes()..], "from {from} to {to}");
            assert_eq!(traffic.lock().sent, [], "no loopback frame is transmitted");
        }
    }
}
