//! A ring for each pair of a producer and a reader: no two producers and no two readers ever
//! touch the same index.

use crate::structure::{Packet, QueueShape, Structure, StructureParts};
use tidegate_memory::spsc;

/// Packets that a producer puts into one ring, and that a reader takes from one ring, before it
/// moves on to the next.
pub const BURST_PACKETS: usize = 32;

/// Matrix of rings; producers and readers own the ends of the rings.
pub struct RingMatrix<T>(std::marker::PhantomData<fn() -> T>);

/// Rings of one producer, one to each reader.
pub struct MatrixProducer<T> {
    rings: Box<[spsc::Producer<Option<T>>]>,
    ring: usize,
    /// Slots of the current ring that are written and not yet published.
    written: usize,
}

/// Rings of one reader, one from each producer.
pub struct MatrixReader<T> {
    rings: Box<[spsc::Consumer<Option<T>>]>,
    ring: usize,
    /// Packets taken from the current ring since the reader moved on to it.
    taken: usize,
}

impl<T> MatrixProducer<T> {
    /// Publishes the written slots and moves on to the next ring.
    #[inline]
    fn advance(&mut self) {
        if self.written > 0 {
            self.rings[self.ring].publish(self.written);
            self.written = 0;
        }
        self.ring = if self.ring + 1 == self.rings.len() { 0 } else { self.ring + 1 };
    }
}

impl<T> MatrixReader<T> {
    #[inline]
    fn advance(&mut self) {
        self.taken = 0;
        self.ring = if self.ring + 1 == self.rings.len() { 0 } else { self.ring + 1 };
    }
}

impl<T: Packet> Structure for RingMatrix<T> {
    type Packet = T;
    type Producer = MatrixProducer<T>;
    type Reader = MatrixReader<T>;
    const KEEPS_ORDER: bool = true;
    const PARKER_PER_READER: bool = true;

    fn open(shape: &QueueShape) -> StructureParts<Self> {
        let capacity = shape.capacity.next_power_of_two();
        let mut readers: Vec<Vec<_>> = (0..shape.readers).map(|_| Vec::new()).collect();
        let outputs = |producer: usize| {
            let ring_to = |reader: &mut Vec<_>| {
                let (output, input) = spsc::ring(capacity, || None);
                reader.push(input);
                output
            };
            let rings = readers.iter_mut().map(ring_to).collect();
            // Each producer begins at another reader.
            MatrixProducer { rings, ring: producer % shape.readers, written: 0 }
        };
        let producers = (0..shape.producers).map(outputs).collect();
        let inputs = |(reader, rings): (usize, Vec<_>)| MatrixReader {
            rings: rings.into(),
            ring: reader % shape.producers,
            taken: 0,
        };
        StructureParts {
            structure: Self(std::marker::PhantomData),
            producers,
            readers: readers.into_iter().enumerate().map(inputs).collect(),
        }
    }

    #[inline]
    fn enqueue(&self, outputs: &mut MatrixProducer<T>, packet: T) -> Result<usize, T> {
        for _ in 0..outputs.rings.len() {
            let (at, written) = (outputs.ring, outputs.written);
            let ring = &mut outputs.rings[at];
            if ring.free_slots(written + 1) > written && !ring.is_closed() {
                ring.slot(written, |slot| *slot = Some(packet));
                outputs.written += 1;
                if outputs.written == BURST_PACKETS {
                    outputs.advance();
                }
                return Ok(at);
            }
            outputs.advance();
        }
        Err(packet)
    }

    #[inline]
    fn flush(&self, outputs: &mut MatrixProducer<T>) {
        if outputs.written > 0 {
            outputs.advance();
        }
    }

    #[inline]
    fn dequeue(&self, inputs: &mut MatrixReader<T>) -> Option<T> {
        for _ in 0..inputs.rings.len() {
            if let Some(packet) = inputs.rings[inputs.ring].pop().flatten() {
                inputs.taken += 1;
                if inputs.taken == BURST_PACKETS {
                    inputs.advance();
                }
                return Some(packet);
            }
            inputs.advance();
        }
        None
    }

    #[inline]
    fn dequeue_each(
        &self,
        inputs: &mut MatrixReader<T>,
        max: usize,
        mut taken: impl FnMut(T),
    ) -> usize {
        let mut count = 0;
        for _ in 0..inputs.rings.len() {
            count += inputs.rings[inputs.ring].release_each(max - count, |slot| {
                slot.take().into_iter().for_each(&mut taken);
            });
            if count == max {
                break;
            }
            inputs.advance();
        }
        count
    }
}
