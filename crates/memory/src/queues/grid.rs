//! A ring of one producer and one reader for each pair of them: no two
//! producers and no two readers ever touch the same index.

use super::structure::{Opened, Packet, Shape, Structure};
use crate::spsc;

/// Packets that a producer puts into one ring before it goes on to the next,
/// and that a reader takes from one before it looks at the next.
pub const BURST: usize = 32;

/// The rings; both of their ends are with those who use them.
pub struct Grid<T>(std::marker::PhantomData<fn() -> T>);

/// A producer's rings, one to each reader.
pub struct Outputs<T> {
    rings: Box<[spsc::Producer<Option<T>>]>,
    ring: usize,
    /// Slots of that ring that are written and not yet published.
    written: usize,
}

/// A reader's rings, one from each producer.
pub struct Inputs<T> {
    rings: Box<[spsc::Consumer<Option<T>>]>,
    ring: usize,
    /// Packets taken from that ring since the reader came to it.
    taken: usize,
}

impl<T> Outputs<T> {
    /// Publishes what was written and goes on to the next ring.
    #[inline]
    fn next(&mut self) {
        if self.written > 0 {
            self.rings[self.ring].publish(self.written);
            self.written = 0;
        }
        self.ring = if self.ring + 1 == self.rings.len() { 0 } else { self.ring + 1 };
    }
}

impl<T> Inputs<T> {
    #[inline]
    fn next(&mut self) {
        self.taken = 0;
        self.ring = if self.ring + 1 == self.rings.len() { 0 } else { self.ring + 1 };
    }
}

impl<T: Packet> Structure for Grid<T> {
    type Packet = T;
    type Producer = Outputs<T>;
    type Reader = Inputs<T>;
    const KEEPS_ORDER: bool = true;
    const BED_PER_READER: bool = true;

    fn open(shape: &Shape) -> Opened<Self> {
        let capacity = shape.capacity.next_power_of_two();
        let mut readers: Vec<Vec<_>> = (0..shape.readers).map(|_| Vec::new()).collect();
        let outputs = |producer: usize| {
            let ring_to = |reader: &mut Vec<_>| {
                let (output, input) = spsc::ring(capacity, || None);
                reader.push(input);
                output
            };
            let rings = readers.iter_mut().map(ring_to).collect();
            // Each begins at another reader.
            Outputs { rings, ring: producer % shape.readers, written: 0 }
        };
        let producers = (0..shape.producers).map(outputs).collect();
        let inputs = |(reader, rings): (usize, Vec<_>)| Inputs {
            rings: rings.into(),
            ring: reader % shape.producers,
            taken: 0,
        };
        Opened {
            structure: Self(std::marker::PhantomData),
            producers,
            readers: readers.into_iter().enumerate().map(inputs).collect(),
        }
    }

    #[inline]
    fn put(&self, outputs: &mut Outputs<T>, packet: T) -> Result<usize, T> {
        for _ in 0..outputs.rings.len() {
            let (at, written) = (outputs.ring, outputs.written);
            let ring = &mut outputs.rings[at];
            if ring.free(written + 1) > written && !ring.is_closed() {
                ring.slot(written, |slot| *slot = Some(packet));
                outputs.written += 1;
                if outputs.written == BURST {
                    outputs.next();
                }
                return Ok(at);
            }
            outputs.next();
        }
        Err(packet)
    }

    #[inline]
    fn flush(&self, outputs: &mut Outputs<T>) {
        if outputs.written > 0 {
            outputs.next();
        }
    }

    #[inline]
    fn take(&self, inputs: &mut Inputs<T>) -> Option<T> {
        for _ in 0..inputs.rings.len() {
            if let Some(packet) = inputs.rings[inputs.ring].pop().flatten() {
                inputs.taken += 1;
                if inputs.taken == BURST {
                    inputs.next();
                }
                return Some(packet);
            }
            inputs.next();
        }
        None
    }

    #[inline]
    fn take_each(&self, inputs: &mut Inputs<T>, most: usize, mut taken: impl FnMut(T)) -> usize {
        let mut count = 0;
        for _ in 0..inputs.rings.len() {
            count += inputs.rings[inputs.ring].release_each(most - count, |slot| {
                slot.take().into_iter().for_each(&mut taken);
            });
            if count == most {
                break;
            }
            inputs.next();
        }
        count
    }
}
