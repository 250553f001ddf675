//! In-memory link: each end receives the frames that the other end transmits.
//!
//! For tests, for measuring the stack without a NIC, and for embedding. The two ends may be on
//! different threads; each has its own arena.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tidegate_memory::spsc::{Consumer, Producer, ring};
use tidegate_memory::{Arena, Checksum, Doorbell, Frame, PackedChecksum, copy_packet};
use tidegate_wire::{DropReason, Medium};

use crate::buffer::LINK_HEADER_BYTES;
use crate::segments::Segments;
use crate::{Burst, Capabilities, Device, DeviceCounters};

/// Longest frame of the link in bytes.
pub const MAX_FRAME_BYTES: usize = 2048;

/// Settings of an in-memory link.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemConfig {
    /// Header that frames begin with.
    pub medium: Medium,
    /// Hardware addresses of the two ends; not used on [`Medium::Ip`].
    pub macs: [[u8; 6]; 2],
    /// Largest IP packet in bytes; at most 2,030.
    pub mtu: usize,
    /// Ring capacity in frames for each direction; a power of two.
    pub capacity: usize,
    /// Sent frames may carry unfilled checksums. False is a device without checksum offload: the
    /// stack computes them.
    pub transmit_checksum: bool,
    /// Sent frames may stand for several TCP segments; the link cuts them into packets.
    pub segmentation: bool,
}

impl Default for MemConfig {
    fn default() -> Self {
        Self {
            medium: Medium::Ethernet,
            // Locally administered addresses.
            macs: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            mtu: 1500,
            capacity: 1024,
            transmit_checksum: true,
            segmentation: false,
        }
    }
}

impl MemConfig {
    /// Sets the header that frames begin with.
    pub fn medium(self, medium: Medium) -> Self {
        Self { medium, ..self }
    }

    /// Sets the hardware addresses of the two ends.
    pub fn macs(self, macs: [[u8; 6]; 2]) -> Self {
        Self { macs, ..self }
    }

    /// Sets the largest IP packet in bytes; at most 2,030.
    pub fn mtu(self, mtu: usize) -> Self {
        Self { mtu, ..self }
    }

    /// Sets the ring capacity in frames for each direction; a power of two.
    pub fn capacity(self, capacity: usize) -> Self {
        Self { capacity, ..self }
    }

    /// Sets whether the link accepts frames with unfilled checksums.
    pub fn transmit_checksum(self, transmit_checksum: bool) -> Self {
        Self { transmit_checksum, ..self }
    }

    /// Sets whether the link accepts frames that stand for several TCP segments.
    pub fn segmentation(self, segmentation: bool) -> Self {
        Self { segmentation, ..self }
    }
}

struct Slot {
    len: usize,
    checksum: PackedChecksum,
    bytes: [u8; MAX_FRAME_BYTES],
}

impl Slot {
    fn new() -> Self {
        Self { len: 0, checksum: PackedChecksum::default(), bytes: [0; MAX_FRAME_BYTES] }
    }

    /// Stores a frame in the slot. Returns false when the frame is too long.
    #[inline(always)]
    fn fill(&mut self, bytes: &[u8], checksum: PackedChecksum) -> bool {
        let Some(target) = self.bytes.get_mut(..bytes.len()) else { return false };
        copy_packet(target, bytes);
        (self.len, self.checksum) = (bytes.len(), checksum);
        true
    }

    /// Stores the next packet of a frame that stands for several. Returns its length.
    fn cut(&mut self, segments: &mut Segments, frame: &[u8], checksum: PackedChecksum) -> usize {
        self.len = segments.write_next(frame, &mut self.bytes).unwrap_or_default();
        self.checksum = checksum;
        self.len
    }

    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// One end of an in-memory link.
pub struct MemDevice {
    capabilities: Capabilities,
    incoming: Consumer<Slot>,
    outgoing: Producer<Slot>,
    own_doorbell: Arc<Doorbell>,
    peer_doorbell: Arc<Doorbell>,
    counters: DeviceCounters,
}

/// Creates an in-memory link and returns its two ends.
///
/// # Errors
/// When the process has no file descriptor left, the capacity is not a power of two, or the
/// MTU does not fit a frame.
pub fn wire(config: &MemConfig) -> io::Result<(MemDevice, MemDevice)> {
    let doorbells = [Arc::new(Doorbell::new()?), Arc::new(Doorbell::new()?)];
    wire_between(config, doorbells, [config.capacity; 2])
}

/// As [`wire`], with the doorbells that wake the two ends, and the ring capacity from each end.
pub(crate) fn wire_between(
    config: &MemConfig,
    [doorbell_a, doorbell_b]: [Arc<Doorbell>; 2],
    capacities: [usize; 2],
) -> io::Result<(MemDevice, MemDevice)> {
    if !capacities.iter().all(|capacity| capacity.is_power_of_two())
        || config.mtu + LINK_HEADER_BYTES > MAX_FRAME_BYTES
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "an in-memory link needs a power-of-two capacity and an MTU of at most {}",
                MAX_FRAME_BYTES - LINK_HEADER_BYTES
            ),
        ));
    }
    let [(a_to_b, from_a), (b_to_a, from_b)] = capacities.map(|capacity| ring(capacity, Slot::new));
    let end = |mac, incoming, outgoing, own_doorbell, peer_doorbell| MemDevice {
        capabilities: Capabilities {
            kind: "mem",
            detail: "in-memory link".into(),
            medium: config.medium,
            mac: if config.medium == Medium::Ethernet { mac } else { [0; 6] },
            mtu: config.mtu,
            receive_checksum: true,
            transmit_checksum: config.transmit_checksum,
            segmentation: config.segmentation,
            queues: 1,
        },
        incoming,
        outgoing,
        own_doorbell,
        peer_doorbell,
        counters: DeviceCounters::default(),
    };
    Ok((
        end(config.macs[0], from_b, a_to_b, Arc::clone(&doorbell_a), Arc::clone(&doorbell_b)),
        end(config.macs[1], from_a, b_to_a, doorbell_b, doorbell_a),
    ))
}

impl MemDevice {
    /// Returns true when a frame waits to be received.
    pub(crate) fn has_frame(&mut self) -> bool {
        self.incoming.ready_slots(1) > 0
    }

    /// Packets sent so far.
    pub(crate) fn transmitted(&self) -> u64 {
        self.counters.transmitted
    }

    /// Returns true when the other end was dropped.
    pub fn is_closed(&self) -> bool {
        self.incoming.is_closed()
    }

    /// Writes a frame to the ring, `ahead` slots after the last frame sent, without an arena: for
    /// generators and tests. Returns false when the ring is full. The other end sees the frame
    /// only after [`MemDevice::flush`].
    ///
    /// # Panics
    /// When the frame is longer than [`MAX_FRAME_BYTES`].
    #[inline]
    pub fn stage(&mut self, ahead: usize, bytes: &[u8]) -> bool {
        let has_space = self.outgoing.free_slots(ahead + 1) > ahead;
        if has_space {
            let checksum = PackedChecksum::new(Checksum::Unknown);
            let fits = self.outgoing.slot(ahead, |slot| slot.fill(bytes, checksum));
            assert!(fits, "the frame is longer than MAX_FRAME_BYTES");
        }
        has_space
    }

    /// Transmits up to `count` copies of a frame, limited by ring space, without an arena: for
    /// generators and tests. Returns the number of copies sent.
    ///
    /// # Panics
    /// When the frame is longer than [`MAX_FRAME_BYTES`].
    #[inline]
    pub fn transmit_copies(&mut self, count: usize, bytes: &[u8]) -> usize {
        assert!(bytes.len() <= MAX_FRAME_BYTES, "the frame is longer than MAX_FRAME_BYTES");
        let checksum = PackedChecksum::new(Checksum::Unknown);
        let sent = self.outgoing.publish_each(count, |slot| slot.fill(bytes, checksum));
        self.on_transmitted(sent);
        sent
    }

    /// Makes `staged` frames visible to the other end and wakes it.
    #[inline]
    pub fn flush(&mut self, staged: usize) {
        if staged > 0 {
            self.outgoing.publish(staged);
            self.on_transmitted(staged);
        }
    }

    /// Moves frames to the ring until it is full. Returns their number and bytes.
    #[inline(always)]
    fn publish_frames(&mut self, arena: &mut Arena, burst: &mut Burst) -> (usize, u64) {
        let (mut sent, mut bytes) = (0, 0);
        while !burst.is_empty() {
            let mut run = burst.pop_batch();
            let mut free_batch = arena.free_batch();
            let (offered, mut last_bytes) = (run.len(), 0);
            let written = self.outgoing.publish_batch(&mut run, |slot, frame| {
                let checksum = frame.packed_checksum();
                last_bytes = frame.len() as u64;
                bytes += last_bytes;
                free_batch.consume(frame, |data| slot.fill(data, checksum))
            });
            sent += written;
            if offered - run.len() > written {
                bytes -= last_bytes;
                self.counters.drops.count(DropReason::FrameTooLong);
            } else if self.outgoing.free_slots(1) == 0 {
                break;
            }
        }
        (sent, bytes)
    }

    /// As [`MemDevice::publish_frames`], where frames may stand for several packets.
    #[inline(never)]
    fn publish_packets(&mut self, arena: &mut Arena, burst: &mut Burst) -> (usize, u64) {
        let (mut sent, mut bytes) = (0, 0);
        while let Some(frame) = burst.front() {
            let Some(staged) = self.stage_packets(sent, frame, arena.bytes(frame)) else { break };
            sent += staged.0;
            bytes += staged.1 as u64;
            burst.pop_front().into_iter().for_each(|frame| arena.free(frame));
        }
        self.outgoing.publish(sent);
        (sent, bytes)
    }

    /// Writes the packets of a frame to the ring, `ahead` slots after the last one sent. Returns
    /// their number and bytes, none if the frame is dropped; `None` if they have to wait for space.
    fn stage_packets(
        &mut self,
        ahead: usize,
        frame: &Frame,
        data: &[u8],
    ) -> Option<(usize, usize)> {
        let Capabilities { medium, mtu, .. } = self.capabilities;
        let segments = match frame.segment_bytes() {
            0 if frame.is_loopback() && data.len() > MAX_FRAME_BYTES => {
                Segments::for_mtu(medium, data, mtu)
            }
            0 => return self.stage_packet(ahead, data, frame.packed_checksum()),
            bytes => Segments::new(medium, data, bytes),
        };
        let fits = |segments: &Segments| segments.max_frame_bytes() <= MAX_FRAME_BYTES;
        let Some(mut segments) = segments.filter(fits) else {
            self.counters.drops.count(DropReason::FrameTooLong);
            return Some((0, 0));
        };
        // A frame that not even an empty ring could take loses its end.
        let count = segments.remaining().min(self.outgoing.capacity());
        if self.outgoing.free_slots(ahead + count) < ahead + count {
            return None;
        }
        let checksum = match frame.is_loopback() {
            true => frame.packed_checksum(),
            false => PackedChecksum::new(segments.checksum()),
        };
        let mut cut = |at| self.outgoing.slot(at, |slot| slot.cut(&mut segments, data, checksum));
        let bytes = (ahead..ahead + count).map(&mut cut).sum();
        self.counters.drops.add(DropReason::DeviceRingFull, segments.remaining() as u64);
        Some((count, bytes))
    }

    /// As [`MemDevice::stage_packets`], for a frame that is one packet.
    fn stage_packet(
        &mut self,
        ahead: usize,
        data: &[u8],
        checksum: PackedChecksum,
    ) -> Option<(usize, usize)> {
        if self.outgoing.free_slots(ahead + 1) <= ahead {
            return None;
        }
        if self.outgoing.slot(ahead, |slot| slot.fill(data, checksum)) {
            return Some((1, data.len()));
        }
        self.counters.drops.count(DropReason::FrameTooLong);
        Some((0, 0))
    }

    fn on_transmitted(&mut self, count: usize) {
        self.counters.transmitted += count as u64;
        self.peer_doorbell.ring();
    }

    /// Passes up to `quota` frames to `read`, in place and without an arena, and returns their
    /// number: for generators and tests.
    #[inline]
    pub fn receive_bytes(&mut self, quota: usize, mut read: impl FnMut(&[u8])) -> usize {
        let count = self.incoming.release_each(quota, |slot| read(slot.bytes()));
        self.counters.received += count as u64;
        count
    }
}

impl Device for MemDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        // Frames without a free buffer stay in the ring, as on a NIC whose receive ring is
        // empty; the sender sees its ring fill.
        let max_frames = quota.min(arena.available());
        let (mut bytes, mut received, before) = (0, 0, burst.len());
        loop {
            let mut spare = burst.push_batch(usize::MAX, max_frames);
            let wanted = spare.remaining().min(max_frames - received);
            let mut alloc_batch = arena.alloc_batch();
            let read = self.incoming.release_into(wanted, &mut spare, |slot| {
                let data = slot.bytes();
                let mut frame = alloc_batch.alloc_from(data)?;
                frame.set_packed_checksum(slot.checksum);
                bytes += data.len() as u64;
                Some(frame)
            });
            received += read;
            if read < wanted || received == max_frames {
                break;
            }
        }
        let taken = burst.len() - before;
        if taken < received {
            self.counters.drops.add(DropReason::FrameTooLong, (received - taken) as u64);
        }
        self.counters.received += taken as u64;
        self.counters.received_bytes += bytes;
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let before = burst.len();
        let (sent, bytes) = match self.capabilities.segmentation {
            true => self.publish_packets(arena, burst),
            false => self.publish_frames(arena, burst),
        };
        if sent > 0 {
            self.counters.transmitted_bytes += bytes;
            self.on_transmitted(sent);
        }
        Ok(before - burst.len())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.own_doorbell.disarm();
        self.own_doorbell.arm();
        let idle = !self.has_frame();
        if !idle {
            self.own_doorbell.disarm();
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.own_doorbell.as_fd())
    }

    fn counters(&mut self) -> DeviceCounters {
        self.counters.clone()
    }
}

#[cfg(test)]
mod tests {
    use tidegate_memory::{ArenaConfig, FrameSize};

    use super::*;
    use crate::segments::tests::packets_of;
    use crate::transport::tests::Shape;

    fn arena() -> Arena {
        Arena::new(ArenaConfig { frames: 8, frame_size: FrameSize::K4, hugepages: false }).unwrap()
    }

    #[test]
    fn delivers_frames_in_order_with_checksum_state() {
        let (mut a, mut b) = wire(&MemConfig::default()).unwrap();
        let (mut arena_a, mut arena_b) = (arena(), arena());
        let mut burst = Burst::new();
        for payload in ["one", "two", "three"] {
            let mut frame = arena_a.alloc_from(payload.as_bytes()).unwrap();
            frame.set_checksum(Checksum::Partial { start: 1, offset: 2 });
            burst.push_back(frame);
        }
        assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 3);
        assert_eq!(arena_a.available(), 8);
        assert_eq!(b.receive(&mut arena_b, &mut burst, 2).unwrap(), 2);
        assert_eq!(b.receive(&mut arena_b, &mut burst, 2).unwrap(), 1);
        let payloads: Vec<_> = burst.iter().map(|frame| arena_b.bytes(frame).to_vec()).collect();
        assert_eq!(payloads, [&b"one"[..], b"two", b"three"]);
        assert_eq!(burst[0].checksum(), Checksum::Partial { start: 1, offset: 2 });
        assert_eq!(b.counters().received_bytes, 11);
        burst.drain(..).for_each(|frame| arena_b.free(frame));
    }

    #[test]
    fn transmit_copies_delivers_any_length_intact() {
        let (mut a, mut b) = wire(&MemConfig { capacity: 4, ..MemConfig::default() }).unwrap();
        for len in [0, 1, 63, 64, 65, 100, 127, 128, 129, 1514, MAX_FRAME_BYTES] {
            let frame: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            assert_eq!(a.transmit_copies(9, &frame), 4, "{len} bytes");
            let mut received = 0;
            b.receive_bytes(9, |bytes| {
                assert_eq!(bytes, frame);
                received += 1;
            });
            assert_eq!(received, 4);
        }
    }

    #[test]
    fn full_wire_leaves_frames_with_the_sender() {
        let config = MemConfig { capacity: 2, ..MemConfig::default() };
        let (mut a, _b) = wire(&config).unwrap();
        let mut arena = arena();
        let mut burst: Burst = (0..3).map(|_| arena.alloc_from(b"x").unwrap()).collect();
        assert_eq!(a.transmit(&mut arena, &mut burst).unwrap(), 2);
        assert_eq!(burst.len(), 1);
        burst.drain(..).for_each(|frame| arena.free(frame));
    }

    /// Frame that stands for four TCP segments of 1,000 bytes.
    fn large_frame(shape: Shape, arena: &mut Arena) -> Frame {
        let mut frame = arena.alloc_from(&shape.frame()).unwrap();
        let start = shape.transport_at() as u16;
        frame.set_checksum(Checksum::Partial { start, offset: 16 });
        frame.set_segment_bytes(1000);
        frame
    }

    fn large_shapes() -> impl Iterator<Item = Shape> {
        let shapes = Shape::all().filter(|shape| shape.is_tcp);
        shapes.map(|shape| Shape { payload_bytes: 3500, ..shape })
    }

    fn large_arena() -> Arena {
        Arena::new(ArenaConfig { frames: 8, frame_size: FrameSize::K64, hugepages: false }).unwrap()
    }

    fn segmented(capacity: usize) -> (MemDevice, MemDevice) {
        wire(&MemConfig::default().capacity(capacity).segmentation(true)).unwrap()
    }

    #[test]
    fn frames_of_several_segments_arrive_as_packets() {
        for shape in large_shapes() {
            let (mut a, mut b) = segmented(8);
            let (mut arena_a, mut arena_b) = (large_arena(), arena());
            let mut expected = packets_of(&shape.frame(), 1000);
            assert_eq!(expected.len(), 4);
            expected.insert(0, b"before".to_vec());
            expected.push(b"after".to_vec());
            let before = arena_a.alloc_from(b"before").unwrap();
            let large = large_frame(shape, &mut arena_a);
            let mut burst: Burst = [before, large, arena_a.alloc_from(b"after").unwrap()].into();
            assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 3);
            assert_eq!((arena_a.available(), a.transmitted()), (8, 6));
            b.receive(&mut arena_b, &mut burst, 8).unwrap();
            let packets: Vec<_> = burst.iter().map(|frame| arena_b.bytes(frame).to_vec()).collect();
            assert_eq!(packets, expected, "{shape:?}");
            let start = shape.transport_at() as u16;
            for frame in burst.iter().skip(1).take(4) {
                let partial = Checksum::Partial { start, offset: 16 };
                assert_eq!((frame.checksum(), frame.segment_bytes()), (partial, 0));
            }
            assert_eq!(a.counters().transmitted_bytes, b.counters().received_bytes);
            burst.drain(..).for_each(|frame| arena_b.free(frame));
        }
    }

    #[test]
    fn a_frame_of_several_segments_waits_for_space_for_all() {
        let shape = large_shapes().next().unwrap();
        let (mut a, mut b) = segmented(4);
        let (mut arena_a, mut arena_b) = (large_arena(), arena());
        let before = arena_a.alloc_from(b"before").unwrap();
        let mut burst: Burst = [before, large_frame(shape, &mut arena_a)].into();
        assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 1);
        assert_eq!((burst.len(), a.transmitted()), (1, 1));
        assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 0);
        let mut received = Burst::new();
        assert_eq!(b.receive(&mut arena_b, &mut received, 8).unwrap(), 1);
        assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 1);
        assert_eq!(b.receive(&mut arena_b, &mut received, 8).unwrap(), 4);
        assert_eq!((arena_a.available(), a.counters().drops.total()), (8, 0));
        received.drain(..).for_each(|frame| arena_b.free(frame));
    }

    #[test]
    fn a_frame_of_more_segments_than_the_ring_has_slots_loses_its_end() {
        let shape = large_shapes().next().unwrap();
        let (mut a, mut b) = segmented(2);
        let (mut arena_a, mut arena_b) = (large_arena(), arena());
        let mut burst: Burst = [large_frame(shape, &mut arena_a)].into();
        assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 1);
        assert_eq!(b.receive(&mut arena_b, &mut burst, 8).unwrap(), 2);
        let drops = a.counters().drops;
        assert_eq!((drops.get(DropReason::DeviceRingFull), drops.total()), (2, 2));
        assert_eq!(arena_a.available(), 8);
        burst.drain(..).for_each(|frame| arena_b.free(frame));
    }

    #[test]
    fn a_long_frame_that_is_no_segments_is_dropped() {
        let (mut a, _b) = segmented(8);
        let mut arena = large_arena();
        let mut burst = Burst::new();
        burst.push_back(arena.alloc_from(&[0; MAX_FRAME_BYTES + 1]).unwrap());
        // Marked as segments, and nothing that can be split.
        let mut frame = arena.alloc_from(&[0; 3000]).unwrap();
        frame.set_checksum(Checksum::Partial { start: 34, offset: 16 });
        frame.set_segment_bytes(1000);
        burst.push_back(frame);
        // Segments that no slot can take.
        let mut frame = large_frame(large_shapes().next().unwrap(), &mut arena);
        frame.set_segment_bytes(3000);
        burst.push_back(frame);
        assert_eq!(a.transmit(&mut arena, &mut burst).unwrap(), 3);
        assert_eq!((a.transmitted(), arena.available()), (0, 8));
        assert_eq!(a.counters().drops.get(DropReason::FrameTooLong), 3);
    }

    #[test]
    fn prepare_sleep_fails_while_a_frame_waits() {
        let (mut a, mut b) = wire(&MemConfig::default()).unwrap();
        let mut arena = arena();
        assert!(b.prepare_sleep().unwrap());
        let mut burst: Burst = [arena.alloc_from(b"x").unwrap()].into();
        a.transmit(&mut arena, &mut burst).unwrap();
        assert!(!b.prepare_sleep().unwrap());
    }

    #[test]
    fn rejects_invalid_config() {
        assert!(wire(&MemConfig { capacity: 3, ..MemConfig::default() }).is_err());
        assert!(wire(&MemConfig { mtu: 9000, ..MemConfig::default() }).is_err());
    }
}
