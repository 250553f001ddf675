//! A wire in memory: what one end transmits the other receives.
//!
//! For tests, for measuring the stack alone, and for embedding. The two ends
//! may live on different threads; each has an arena of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tidegate_memory::spsc::{Consumer, Producer, ring};
use tidegate_memory::{Arena, Checksum, Doorbell, PackedChecksum, copy_packet};
use tidegate_wire::{DropReason, Medium};

use crate::buffer::LINK_HEADER_BYTES;
use crate::{Burst, Capabilities, Port, PortCounters};

/// The longest frame that the wire carries, in bytes.
pub const MAX_FRAME_BYTES: usize = 2048;

/// What the wire is like.
#[derive(Clone, Debug)]
pub struct MemConfig {
    /// What frames begin with.
    pub medium: Medium,
    /// The hardware addresses of the two ends; not used on [`Medium::Ip`].
    pub macs: [[u8; 6]; 2],
    /// The largest IP packet in bytes; at most 2,030.
    pub mtu: usize,
    /// How many frames may be under way in each direction; a power of two.
    pub capacity: usize,
}

impl Default for MemConfig {
    fn default() -> Self {
        Self {
            medium: Medium::Ethernet,
            // Locally administered addresses.
            macs: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            mtu: 1500,
            capacity: 1024,
        }
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

    /// Holds a frame from now on. Returns whether it fits.
    #[inline(always)]
    fn fill(&mut self, bytes: &[u8], checksum: PackedChecksum) -> bool {
        let Some(place) = self.bytes.get_mut(..bytes.len()) else { return false };
        copy_packet(place, bytes);
        (self.len, self.checksum) = (bytes.len(), checksum);
        true
    }

    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// One end of a wire in memory.
pub struct MemPort {
    capabilities: Capabilities,
    incoming: Consumer<Slot>,
    outgoing: Producer<Slot>,
    own_bell: Arc<Doorbell>,
    peer_bell: Arc<Doorbell>,
    counters: PortCounters,
}

/// Makes a wire and returns its two ends.
///
/// # Errors
/// When the process has no descriptor left, or the configuration asks for a
/// capacity that is no power of two or an MTU that no frame can hold.
pub fn wire(config: &MemConfig) -> io::Result<(MemPort, MemPort)> {
    wire_between(config, Arc::new(Doorbell::new()?), Arc::new(Doorbell::new()?))
}

/// As [`wire`], with the bells that the two ends are woken by.
pub(crate) fn wire_between(
    config: &MemConfig,
    bell_a: Arc<Doorbell>,
    bell_b: Arc<Doorbell>,
) -> io::Result<(MemPort, MemPort)> {
    if !config.capacity.is_power_of_two() || config.mtu + LINK_HEADER_BYTES > MAX_FRAME_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a wire in memory needs a capacity that is a power of two and an MTU of at most {}",
                MAX_FRAME_BYTES - LINK_HEADER_BYTES
            ),
        ));
    }
    let (a_to_b, from_a) = ring(config.capacity, Slot::new);
    let (b_to_a, from_b) = ring(config.capacity, Slot::new);
    let end = |mac, incoming, outgoing, own_bell, peer_bell| MemPort {
        capabilities: Capabilities {
            kind: "mem",
            detail: "a wire in memory".into(),
            medium: config.medium,
            mac: if config.medium == Medium::Ethernet { mac } else { [0; 6] },
            mtu: config.mtu,
            receive_checksum: true,
            transmit_checksum: true,
            segmentation: false,
            queues: 1,
        },
        incoming,
        outgoing,
        own_bell,
        peer_bell,
        counters: PortCounters::default(),
    };
    Ok((
        end(config.macs[0], from_b, a_to_b, Arc::clone(&bell_a), Arc::clone(&bell_b)),
        end(config.macs[1], from_a, b_to_a, bell_b, bell_a),
    ))
}

impl MemPort {
    /// Whether a frame waits to be received.
    pub(crate) fn has_arrived(&mut self) -> bool {
        self.incoming.ready(1) > 0
    }

    /// Whether the other end was dropped.
    pub fn is_closed(&self) -> bool {
        self.incoming.is_closed()
    }

    /// Writes the frame number `ahead` after those already sent, without an
    /// arena: for generators and tests. Returns whether there was room. Not
    /// visible to the other end before [`MemPort::flush`].
    ///
    /// # Panics
    /// When the frame is longer than [`MAX_FRAME_BYTES`].
    #[inline]
    pub fn stage(&mut self, ahead: usize, bytes: &[u8]) -> bool {
        let room = self.outgoing.free(ahead + 1) > ahead;
        if room {
            let checksum = PackedChecksum::new(Checksum::Unknown);
            let fits = self.outgoing.slot(ahead, |slot| slot.fill(bytes, checksum));
            assert!(fits, "a frame longer than the wire carries");
        }
        room
    }

    /// Sends the same frame up to `count` times, as often as there is room,
    /// without an arena: for generators and tests. Returns how often.
    ///
    /// # Panics
    /// When the frame is longer than [`MAX_FRAME_BYTES`].
    #[inline]
    pub fn transmit_copies(&mut self, count: usize, bytes: &[u8]) -> usize {
        assert!(bytes.len() <= MAX_FRAME_BYTES, "a frame longer than the wire carries");
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

    fn on_transmitted(&mut self, count: usize) {
        self.counters.transmitted += count as u64;
        self.peer_bell.ring();
    }

    /// Reads up to `quota` frames in place, without an arena, and returns how
    /// many there were: for generators and tests.
    #[inline]
    pub fn receive_bytes(&mut self, quota: usize, mut read: impl FnMut(&[u8])) -> usize {
        let count = self.incoming.release_each(quota, |slot| read(slot.bytes()));
        self.counters.received += count as u64;
        count
    }
}

impl Port for MemPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        // Frames for which there is no buffer stay on the wire, as on a card
        // whose ring is empty; the sender sees its ring fill.
        let most = quota.min(arena.available());
        let (mut bytes, mut came, before) = (0, 0, burst.len());
        loop {
            let mut spare = burst.spare(usize::MAX, most);
            let wanted = spare.left().min(most - came);
            let mut take = arena.take();
            let read = self.incoming.release_into(wanted, &mut spare, |slot| {
                let data = slot.bytes();
                let mut frame = take.alloc_from(data)?;
                frame.set_packed_checksum(slot.checksum);
                bytes += data.len() as u64;
                Some(frame)
            });
            came += read;
            if read < wanted || came == most {
                break;
            }
        }
        let taken = burst.len() - before;
        if taken < came {
            self.counters.drops.add(DropReason::FrameTooLong, (came - taken) as u64);
        }
        self.counters.received += taken as u64;
        self.counters.received_bytes += bytes;
        Ok(taken)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let (mut bytes, mut sent, before) = (0, 0, burst.len());
        while !burst.is_empty() {
            let mut run = burst.run();
            let mut back = arena.give_back();
            let (there, mut last_bytes) = (run.len(), 0);
            let written = self.outgoing.publish_run(&mut run, |slot, frame| {
                let checksum = frame.packed_checksum();
                last_bytes = frame.len() as u64;
                bytes += last_bytes;
                back.consume(frame, |data| slot.fill(data, checksum))
            });
            sent += written;
            if there - run.len() > written {
                bytes -= last_bytes;
                self.counters.drops.count(DropReason::FrameTooLong);
            } else if self.outgoing.free(1) == 0 {
                break;
            }
        }
        if sent > 0 {
            self.counters.transmitted_bytes += bytes;
            self.on_transmitted(sent);
        }
        Ok(before - burst.len())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.own_bell.disarm();
        self.own_bell.arm();
        let idle = !self.has_arrived();
        if !idle {
            self.own_bell.disarm();
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.own_bell.as_fd())
    }

    fn counters(&mut self) -> PortCounters {
        self.counters.clone()
    }
}

#[cfg(test)]
mod tests {
    use tidegate_memory::{ArenaConfig, FrameSize};

    use super::*;

    fn arena() -> Arena {
        Arena::new(ArenaConfig { frames: 8, frame_size: FrameSize::K4, hugepages: false }).unwrap()
    }

    #[test]
    fn frames_cross_in_order_with_their_checksum_state() {
        let (mut a, mut b) = wire(&MemConfig::default()).unwrap();
        let (mut arena_a, mut arena_b) = (arena(), arena());
        let mut burst = Burst::new();
        for text in ["one", "two", "three"] {
            let mut frame = arena_a.alloc_from(text.as_bytes()).unwrap();
            frame.set_checksum(Checksum::Partial { start: 1, offset: 2 });
            burst.push_back(frame);
        }
        assert_eq!(a.transmit(&mut arena_a, &mut burst).unwrap(), 3);
        assert_eq!(arena_a.available(), 8);
        assert_eq!(b.receive(&mut arena_b, &mut burst, 2).unwrap(), 2);
        assert_eq!(b.receive(&mut arena_b, &mut burst, 2).unwrap(), 1);
        let texts: Vec<_> = burst.iter().map(|frame| arena_b.bytes(frame).to_vec()).collect();
        assert_eq!(texts, [&b"one"[..], b"two", b"three"]);
        assert_eq!(burst[0].checksum(), Checksum::Partial { start: 1, offset: 2 });
        assert_eq!(b.counters().received_bytes, 11);
        burst.drain(..).for_each(|frame| arena_b.free(frame));
    }

    #[test]
    fn copies_of_any_length_are_whole() {
        let (mut a, mut b) = wire(&MemConfig { capacity: 4, ..MemConfig::default() }).unwrap();
        for len in [0, 1, 63, 64, 65, 100, 127, 128, 129, 1514, MAX_FRAME_BYTES] {
            let frame: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            assert_eq!(a.transmit_copies(9, &frame), 4, "{len} bytes");
            let mut came = 0;
            b.receive_bytes(9, |bytes| {
                assert_eq!(bytes, frame);
                came += 1;
            });
            assert_eq!(came, 4);
        }
    }

    #[test]
    fn a_full_wire_leaves_frames_with_the_sender() {
        let config = MemConfig { capacity: 2, ..MemConfig::default() };
        let (mut a, _b) = wire(&config).unwrap();
        let mut arena = arena();
        let mut burst: Burst = (0..3).map(|_| arena.alloc_from(b"x").unwrap()).collect();
        assert_eq!(a.transmit(&mut arena, &mut burst).unwrap(), 2);
        assert_eq!(burst.len(), 1);
        burst.drain(..).for_each(|frame| arena.free(frame));
    }

    #[test]
    fn sleep_is_refused_while_a_frame_waits() {
        let (mut a, mut b) = wire(&MemConfig::default()).unwrap();
        let mut arena = arena();
        assert!(b.prepare_sleep().unwrap());
        let mut burst: Burst = [arena.alloc_from(b"x").unwrap()].into();
        a.transmit(&mut arena, &mut burst).unwrap();
        assert!(!b.prepare_sleep().unwrap());
    }

    #[test]
    fn an_impossible_wire_is_refused() {
        assert!(wire(&MemConfig { capacity: 3, ..MemConfig::default() }).is_err());
        assert!(wire(&MemConfig { mtu: 9000, ..MemConfig::default() }).is_err());
    }
}
