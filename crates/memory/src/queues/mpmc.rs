//! A bounded ring for any number of producers and readers, without locks, of
//! the shape that D. Vyukov published ("Bounded MPMC queue", 1024cores.net):
//! each cell says whose turn it is.

use super::structure::{Opened, Packet, Padded, Shape, Structure};
use crate::sync::{AtomicUsize, Ordering, UnsafeCell};

/// The ring. Users with nothing of their own share it.
pub struct Mpmc<T> {
    cells: Box<[Cell<T>]>,
    /// Cells claimed by producers since the ring was made.
    claimed: Padded<AtomicUsize>,
    /// Cells taken by readers since the ring was made.
    taken: Padded<AtomicUsize>,
}

struct Cell<T> {
    /// Its number in the sequence of all uses while it is free for it; that
    /// number plus one while it holds a value.
    turn: AtomicUsize,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: a cell's value is reached only by the one thread that moved `claimed`
// or `taken` over it, from then until it passes the turn on; the turn is
// written with release and read with acquire.
unsafe impl<T: Send> Sync for Mpmc<T> {}
// SAFETY: the ring owns its values.
unsafe impl<T: Send> Send for Mpmc<T> {}

impl<T> Mpmc<T> {
    /// An empty ring of at least `capacity` cells, a power of two.
    pub(super) fn new(capacity: usize) -> Self {
        // With one cell, "holds a value" would read as "free for the next use".
        let capacity = capacity.next_power_of_two().max(2);
        let cell = |at| Cell { turn: AtomicUsize::new(at), value: UnsafeCell::new(None) };
        Self {
            cells: (0..capacity).map(cell).collect(),
            claimed: Padded(AtomicUsize::new(0)),
            taken: Padded(AtomicUsize::new(0)),
        }
    }

    #[inline(always)]
    fn cell(&self, at: usize) -> &Cell<T> {
        &self.cells[at & (self.cells.len() - 1)]
    }

    /// Puts a value in; gives it back when the ring is full, or when the reader
    /// of the oldest cell has not left it yet.
    #[inline]
    pub(super) fn push(&self, value: T) -> Result<(), T> {
        let mut at = self.claimed.0.load(Ordering::Relaxed);
        loop {
            let cell = self.cell(at);
            let ahead = cell.turn.load(Ordering::Acquire).wrapping_sub(at) as isize;
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
                Ok(_) => cell.value.with_mut(|place| unsafe { *place = Some(value) }),
                Err(now) => {
                    at = now;
                    continue;
                }
            }
            cell.turn.store(next, Ordering::Release);
            return Ok(());
        }
    }

    /// Takes the oldest values, at most `most`, with one claim; returns how
    /// many.
    #[inline]
    pub(super) fn pop_each(&self, most: usize, mut taken: impl FnMut(T)) -> usize {
        let mut at = self.taken.0.load(Ordering::Relaxed);
        let count = loop {
            let mut count = 0;
            let mut ahead = 0;
            while count < most {
                let turn = self.cell(at.wrapping_add(count)).turn.load(Ordering::Acquire);
                ahead = turn.wrapping_sub(at.wrapping_add(count + 1)) as isize;
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
            // Cells that hold values keep them until somebody claims them.
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
            let value = cell.value.with_mut(|place| unsafe { (*place).take() });
            cell.turn.store(at.wrapping_add(self.cells.len()), Ordering::Release);
            value.into_iter().for_each(&mut taken);
        }
        count
    }

    /// Whether a reader that looks now finds nothing.
    #[inline]
    pub(super) fn looks_empty(&self) -> bool {
        let at = self.taken.0.load(Ordering::Relaxed);
        let turn = self.cell(at).turn.load(Ordering::Acquire);
        (turn.wrapping_sub(at.wrapping_add(1)) as isize) < 0
    }
}

impl<T: Packet> Structure for Mpmc<T> {
    type Packet = T;
    type Producer = ();
    type Reader = ();
    const KEEPS_ORDER: bool = true;

    fn open(shape: &Shape) -> Opened<Self> {
        Opened {
            structure: Self::new(shape.capacity),
            producers: vec![(); shape.producers],
            readers: vec![(); shape.readers],
        }
    }

    #[inline]
    fn put(&self, (): &mut (), packet: T) -> Result<usize, T> {
        self.push(packet).map(|()| 0)
    }

    #[inline]
    fn take(&self, (): &mut ()) -> Option<T> {
        let mut packet = None;
        self.pop_each(1, |one| packet = Some(one));
        packet
    }

    #[inline]
    fn take_each(&self, (): &mut (), most: usize, taken: impl FnMut(T)) -> usize {
        self.pop_each(most, taken)
    }

    #[inline]
    fn may_have_more(&self, (): &mut ()) -> bool {
        !self.looks_empty()
    }
}

/// Every interleaving of small runs.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn pop(ring: &Mpmc<usize>, most: usize) -> Vec<usize> {
        let mut values = Vec::new();
        ring.pop_each(most, |value| values.push(value));
        values
    }

    #[test]
    fn two_producers_lose_nothing() {
        loom::model(|| {
            let ring = Arc::new(Mpmc::new(2));
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
    fn two_readers_take_nothing_twice() {
        loom::model(|| {
            let ring = Arc::new(Mpmc::new(2));
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
    fn cells_are_used_again() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let ring = Arc::new(Mpmc::new(2));
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
