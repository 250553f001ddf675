//! A ring for each reader, from which other readers steal when their own ring is empty.

use crate::mpmc::MpmcRing;
use crate::ring_matrix::BURST_PACKETS;
use crate::structure::{Packet, QueueShape, Structure, StructureParts};

/// Rings, by reader.
pub struct WorkStealing<T> {
    rings: Box<[MpmcRing<T>]>,
}

/// Position of a producer: the ring that it fills, and the packets it has put there.
pub struct StealingProducer {
    ring: usize,
    pushed: usize,
}

impl StealingProducer {
    #[inline]
    fn advance(&mut self, rings: usize) {
        self.pushed = 0;
        self.ring = if self.ring + 1 == rings { 0 } else { self.ring + 1 };
    }
}

impl<T: Packet> Structure for WorkStealing<T> {
    type Packet = T;
    type Producer = StealingProducer;
    /// Index of the reader.
    type Reader = usize;
    const KEEPS_ORDER: bool = false;

    fn open(shape: &QueueShape) -> StructureParts<Self> {
        let target = |producer| StealingProducer { ring: producer % shape.readers, pushed: 0 };
        StructureParts {
            structure: Self {
                rings: (0..shape.readers).map(|_| MpmcRing::new(shape.capacity)).collect(),
            },
            producers: (0..shape.producers).map(target).collect(),
            readers: (0..shape.readers).collect(),
        }
    }

    #[inline]
    fn enqueue(&self, target: &mut StealingProducer, mut packet: T) -> Result<usize, T> {
        for _ in 0..self.rings.len() {
            match self.rings[target.ring].push(packet) {
                Ok(()) => {
                    target.pushed += 1;
                    if target.pushed == BURST_PACKETS {
                        target.advance(self.rings.len());
                    }
                    return Ok(0);
                }
                Err(back) => packet = back,
            }
            target.advance(self.rings.len());
        }
        Err(packet)
    }

    #[inline]
    fn flush(&self, target: &mut StealingProducer) {
        if target.pushed > 0 {
            target.advance(self.rings.len());
        }
    }

    #[inline]
    fn dequeue(&self, reader: &mut usize) -> Option<T> {
        let mut packet = None;
        self.dequeue_each(reader, 1, |one| packet = Some(one));
        packet
    }

    #[inline]
    fn dequeue_each(&self, reader: &mut usize, max: usize, mut taken: impl FnMut(T)) -> usize {
        let (others, own) = self.rings.split_at(*reader);
        for ring in own.iter().chain(others) {
            // A reader steals from one ring at a time only.
            let count = ring.pop_each(max, &mut taken);
            if count > 0 {
                return count;
            }
        }
        0
    }

    fn may_have_more(&self, _reader: &mut usize) -> bool {
        self.rings.iter().any(|ring| !ring.appears_empty())
    }
}
