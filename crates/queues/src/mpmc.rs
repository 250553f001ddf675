//! Bounded lock-free ring for any number of producers and readers, by D. Vyukov ("Bounded MPMC
//! queue", 1024cores.net): the sequence number of each cell says which use comes next.

use crate::structure::{CachePadded, Packet, QueueShape, Structure, StructureParts};
use crate::sync::{AtomicUsize, Ordering, UnsafeCell};

/// Ring shared by all producers and readers; they have no state of their own.
pub struct MpmcRing<T> {
    cells: Box<[Cell<T>]>,
    /// Cells claimed by producers since the ring was created.
    claimed: CachePadded<AtomicUsize>,
    /// Cells taken by readers since the ring was created.
    taken: CachePadded<AtomicUsize>,
}

struct Cell<T> {
    /// While the cell is free: the free-running index of its next use. While the cell holds a
    /// value: that index plus one.
    sequence: AtomicUsize,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: a cell's value is reached only by the one thread that moved `claimed` or `taken`
// over it, from then until it stores the next sequence number; the sequence number is written
// with release and read with acquire.
unsafe impl<T: Send> Sync for MpmcRing<T> {}
// SAFETY: the ring owns its values.
unsafe impl<T: Send> Send for MpmcRing<T> {}

impl<T> MpmcRing<T> {
    /// Creates an empty ring of at least `capacity` cells, rounded up to a power of two.
    pub(super) fn new(capacity: usize) -> Self {
        // With one cell, "holds a value" would read as "free for the next use".
        let capacity = capacity.next_power_of_two().max(2);
        let cell = |at| Cell { sequence: AtomicUsize::new(at), value: UnsafeCell::new(None) };
        Self {
            cells: (0..capacity).map(cell).collect(),
            claimed: CachePadded(AtomicUsize::new(0)),
            taken: CachePadded(AtomicUsize::new(0)),
        }
    }

    #[inline(always)]
    fn cell(&self, at: usize) -> &Cell<T> {
        &self.cells[at & (self.cells.len() - 1)]
    }

    /// Appends a value; returns it when the ring is full, or when the reader of the oldest cell
    /// has not finished with the cell.
    #[inline]
    pub(super) fn push(&self, value: T) -> Result<(), T> {
        let mut at = self.claimed.0.load(Ordering::Relaxed);
        loop {
            let cell = self.cell(at);
            let ahead = cell.sequence.load(Ordering::Acquire).wrapping_sub(at) as isize;
            if ahead < 0 {
                return Err(value);
            }
            if ahead > 0 {
                at = self.claimed.0.load(Ordering::Relaxed);
                continue;
            }
            let next = at.wrapping_add(1);
            let (ok, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            match self.claimed.0.compare_exchange_weak(at, next, ok, failed) {
                // SAFETY: the cell is free and this thread has claimed it.
                Ok(_) => cell.value.with_mut(|slot| unsafe { *slot = Some(value) }),
                Err(now) => {
                    at = now;
                    continue;
                }
            }
            cell.sequence.store(next, Ordering::Release);
            return Ok(());
        }
    }

    /// Removes the oldest values, at most `max`, with one claim; returns their number.
    #[inline]
    pub(super) fn pop_each(&self, max: usize, mut taken: impl FnMut(T)) -> usize {
        let mut at = self.taken.0.load(Ordering::Relaxed);
        let count = loop {
            let mut count = 0;
            let mut ahead = 0;
            while count < max {
                let sequence = self.cell(at.wrapping_add(count)).sequence.load(Ordering::Acquire);
                ahead = sequence.wrapping_sub(at.wrapping_add(count + 1)) as isize;
                if ahead != 0 {
                    break;
                }
                count += 1;
            }
            if count == 0 {
                if ahead <= 0 {
                    return 0;
                }
                at = self.taken.0.load(Ordering::Relaxed);
                continue;
            }
            // Cells that hold values keep them until a reader claims them.
            let (ok, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            let next = at.wrapping_add(count);
            match self.taken.0.compare_exchange_weak(at, next, ok, failed) {
                Ok(_) => break count,
                Err(now) => at = now,
            }
        };
        for at in (0..count).map(|ahead| at.wrapping_add(ahead)) {
            let cell = self.cell(at);
            // SAFETY: the cell holds a value and this thread has claimed it.
            let value = cell.value.with_mut(|slot| unsafe { (*slot).take() });
            cell.sequence.store(at.wrapping_add(self.cells.len()), Ordering::Release);
            value.into_iter().for_each(&mut taken);
        }
        count
    }

    /// True if a reader that tries now finds nothing.
    #[inline]
    pub(super) fn appears_empty(&self) -> bool {
        let at = self.taken.0.load(Ordering::Relaxed);
        let sequence = self.cell(at).sequence.load(Ordering::Acquire);
        (sequence.wrapping_sub(at.wrapping_add(1)) as isize) < 0
    }
}

impl<T: Packet> Structure for MpmcRing<T> {
    type Packet = T;
    type Producer = ();
    type Reader = ();
    const KEEPS_ORDER: bool = true;

    fn open(shape: &QueueShape) -> StructureParts<Self> {
        StructureParts {
            structure: Self::new(shape.capacity),
            producers: vec![(); shape.producers],
            readers: vec![(); shape.readers],
        }
    }

    #[inline]
    fn enqueue(&self, (): &mut (), packet: T) -> Result<usize, T> {
        self.push(packet).map(|()| 0)
    }

    #[inline]
    fn dequeue(&self, (): &mut ()) -> Option<T> {
        let mut packet = None;
        self.pop_each(1, |one| packet = Some(one));
        packet
    }

    #[inline]
    fn dequeue_each(&self, (): &mut (), max: usize, taken: impl FnMut(T)) -> usize {
        self.pop_each(max, taken)
    }

    #[inline]
    fn may_have_more(&self, (): &mut ()) -> bool {
        !self.appears_empty()
    }
}

/// Explores every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn pop(ring: &MpmcRing<usize>, max: usize) -> Vec<usize> {
        let mut values = Vec::new();
        ring.pop_each(max, |value| values.push(value));
        values
    }

    #[test]
    fn two_producers_lose_nothing() {
        loom::model(|| {
            let ring = Arc::new(MpmcRing::new(2));
            let other = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || ring.push(1).is_ok())
            };
            assert!(ring.push(2).is_ok());
            assert!(other.join().unwrap());
            let mut values = pop(&ring, 4);
            values.sort_unstable();
            assert_eq!(values, [1, 2]);
        });
    }

    #[test]
    fn two_readers_never_take_the_same_value() {
        loom::model(|| {
            let ring = Arc::new(MpmcRing::new(2));
            ring.push(1).unwrap();
            ring.push(2).unwrap();
            let other = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || pop(&ring, 2))
            };
            let mut values = pop(&ring, 1);
            values.extend(other.join().unwrap());
            values.extend(pop(&ring, 2));
            values.sort_unstable();
            assert_eq!(values, [1, 2]);
        });
    }

    #[test]
    fn reuses_cells() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let ring = Arc::new(MpmcRing::new(2));
            let producer = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    for value in 1..=3 {
                        while ring.push(value).is_err() {
                            thread::yield_now();
                        }
                    }
                })
            };
            let mut values = Vec::new();
            while values.len() < 3 {
                values.extend(pop(&ring, 2));
                thread::yield_now();
            }
            producer.join().unwrap();
            assert_eq!(values, [1, 2, 3]);
        });
    }
}
