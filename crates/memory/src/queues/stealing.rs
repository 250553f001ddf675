//! A ring for each reader, from which the others steal when their own is
//! empty.

use super::grid::BURST;
use super::mpmc::Mpmc;
use super::structure::{Opened, Packet, Shape, Structure};

/// The rings, by reader.
pub struct Stealing<T> {
    rings: Box<[Mpmc<T>]>,
}

/// Where a producer goes on.
pub struct Target {
    ring: usize,
    put: usize,
}

impl Target {
    #[inline]
    fn next(&mut self, rings: usize) {
        self.put = 0;
        self.ring = if self.ring + 1 == rings { 0 } else { self.ring + 1 };
    }
}

impl<T: Packet> Structure for Stealing<T> {
    type Packet = T;
    type Producer = Target;
    /// The reader's number.
    type Reader = usize;
    const KEEPS_ORDER: bool = false;

    fn open(shape: &Shape) -> Opened<Self> {
        let target = |producer| Target { ring: producer % shape.readers, put: 0 };
        Opened {
            structure: Self {
                rings: (0..shape.readers).map(|_| Mpmc::new(shape.capacity)).collect(),
            },
            producers: (0..shape.producers).map(target).collect(),
            readers: (0..shape.readers).collect(),
        }
    }

    #[inline]
    fn put(&self, target: &mut Target, mut packet: T) -> Result<usize, T> {
        for _ in 0..self.rings.len() {
            match self.rings[target.ring].push(packet) {
                Ok(()) => {
                    target.put += 1;
                    if target.put == BURST {
                        target.next(self.rings.len());
                    }
                    return Ok(0);
                }
                Err(back) => packet = back,
            }
            target.next(self.rings.len());
        }
        Err(packet)
    }

    #[inline]
    fn flush(&self, target: &mut Target) {
        if target.put > 0 {
            target.next(self.rings.len());
        }
    }

    #[inline]
    fn take(&self, reader: &mut usize) -> Option<T> {
        let mut packet = None;
        self.take_each(reader, 1, |one| packet = Some(one));
        packet
    }

    #[inline]
    fn take_each(&self, reader: &mut usize, most: usize, mut taken: impl FnMut(T)) -> usize {
        let (others, own) = self.rings.split_at(*reader);
        for ring in own.iter().chain(others) {
            // What is stolen is stolen from one only.
            let count = ring.pop_each(most, &mut taken);
            if count > 0 {
                return count;
            }
        }
        0
    }

    fn may_have_more(&self, _reader: &mut usize) -> bool {
        self.rings.iter().any(|ring| !ring.looks_empty())
    }
}
