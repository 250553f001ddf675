//! The rings between a socket and the kernel.
//!
//! Each ring has one producer and one consumer. The side that is ours keeps its
//! own copy of both indices; what the kernel writes is read with acquire, what
//! we write is stored with release. The kernel's index is not trusted: a count
//! larger than the ring is cut to the ring.

use std::sync::atomic::Ordering;

use super::sys::{Entry, RingMemory};

/// `XDP_RING_NEED_WAKEUP` of `linux/if_xdp.h`.
const NEED_WAKEUP: u32 = 1;

/// A ring that we fill and the kernel empties: fill and transmit.
pub(super) struct Producer<T> {
    memory: RingMemory<T>,
    /// The next index to write; what lies before it but was not published yet
    /// is not seen by the kernel.
    head: u32,
    /// The kernel's index as last seen.
    tail: u32,
}

impl<T: Entry> Producer<T> {
    pub(super) fn new(memory: RingMemory<T>) -> Self {
        Self { memory, head: 0, tail: 0 }
    }

    /// The number of entries.
    pub(super) fn size(&self) -> u32 {
        self.memory.size()
    }

    /// How many entries are free at least; asks the kernel when fewer than
    /// `wanted` are known to be.
    #[inline]
    pub(super) fn free(&mut self, wanted: u32) -> u32 {
        let known = self.size() - self.head.wrapping_sub(self.tail);
        if known >= wanted {
            return known;
        }
        let tail = self.memory.consumer().load(Ordering::Acquire);
        // Further on than where we were, or behind where it was: not believed.
        if self.head.wrapping_sub(tail) <= self.head.wrapping_sub(self.tail) {
            self.tail = tail;
        }
        self.size() - self.head.wrapping_sub(self.tail)
    }

    /// Writes an entry. Only after [`Producer::free`] said that there is room.
    #[inline]
    pub(super) fn push(&mut self, entry: T) {
        self.memory.write(self.head, entry);
        self.head = self.head.wrapping_add(1);
    }

    /// Shows the kernel what was pushed.
    #[inline]
    pub(super) fn publish(&mut self) {
        self.memory.producer().store(self.head, Ordering::Release);
    }

    /// How many entries the kernel has not taken yet.
    #[inline]
    pub(super) fn pending(&mut self) -> u32 {
        let size = self.size();
        size - self.free(size)
    }

    /// Whether the kernel sleeps until it is woken by a call.
    #[inline]
    pub(super) fn needs_wakeup(&self) -> bool {
        self.memory.flags().load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

/// A ring that the kernel fills and we empty: receive and completion.
pub(super) struct Consumer<T> {
    memory: RingMemory<T>,
    /// The next index to read.
    tail: u32,
    /// The kernel's index as last seen.
    head: u32,
}

impl<T: Entry> Consumer<T> {
    pub(super) fn new(memory: RingMemory<T>) -> Self {
        Self { memory, tail: 0, head: 0 }
    }

    /// How many entries wait, at most `wanted`; asks the kernel only when fewer
    /// are known.
    #[inline]
    pub(super) fn available(&mut self, wanted: u32) -> u32 {
        let known = self.head.wrapping_sub(self.tail);
        if known >= wanted {
            return wanted;
        }
        let head = self.memory.producer().load(Ordering::Acquire);
        if head.wrapping_sub(self.tail) <= self.memory.size() {
            self.head = head;
        }
        self.head.wrapping_sub(self.tail).min(wanted)
    }

    /// Reads an entry. Only as often as [`Consumer::available`] said.
    #[inline]
    pub(super) fn pop(&mut self) -> T {
        let entry = self.memory.read(self.tail);
        self.tail = self.tail.wrapping_add(1);
        entry
    }

    /// Gives the kernel back the room of what was read.
    #[inline]
    pub(super) fn release(&mut self) {
        self.memory.consumer().store(self.tail, Ordering::Release);
    }
}

/// The kernel's side, for tests that play it.
#[cfg(test)]
impl<T: Entry> Producer<T> {
    pub(super) fn consume(&self) -> Option<T> {
        let tail = self.memory.consumer().load(Ordering::Relaxed);
        (tail != self.memory.producer().load(Ordering::Relaxed)).then(|| {
            self.memory.consumer().store(tail.wrapping_add(1), Ordering::Relaxed);
            self.memory.read(tail)
        })
    }
}

/// The kernel's side, for tests that play it.
#[cfg(test)]
impl<T: Entry> Consumer<T> {
    pub(super) fn produce(&mut self, entry: T) {
        let head = self.memory.producer().load(Ordering::Relaxed);
        self.memory.write(head, entry);
        self.memory.producer().store(head.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_producer_stops_at_the_size_of_the_ring() {
        let mut ring = Producer::<u64>::new(RingMemory::private(8));
        for value in 0..8 {
            assert!(ring.free(1) >= 1);
            ring.push(value);
        }
        assert_eq!(ring.free(1), 0);
        ring.publish();
        assert_eq!(ring.memory.producer().load(Ordering::Relaxed), 8);
        ring.memory.consumer().store(3, Ordering::Relaxed);
        assert_eq!(ring.free(1), 3);
        assert_eq!(ring.pending(), 5);
    }

    #[test]
    fn a_kernel_that_took_more_than_it_got_is_not_believed() {
        let mut ring = Producer::<u64>::new(RingMemory::private(8));
        ring.push(1);
        ring.publish();
        for lie in [2, 7, 1 << 31, u32::MAX] {
            ring.memory.consumer().store(lie, Ordering::Relaxed);
            assert_eq!(ring.free(8), 7, "consumer index {lie}");
        }
        ring.memory.consumer().store(1, Ordering::Relaxed);
        assert_eq!(ring.free(8), 8);
        ring.memory.consumer().store(0, Ordering::Relaxed);
        ring.push(2);
        assert_eq!(ring.free(8), 7, "the index went back");
    }

    #[test]
    fn a_consumer_reads_what_was_produced_in_order() {
        let mut ring = Consumer::<u64>::new(RingMemory::private(4));
        let mut produced = 0_u32;
        for round in 0..100 {
            let batch = round % 5;
            for _ in 0..batch {
                ring.memory.write(produced, u64::from(produced));
                produced += 1;
            }
            ring.memory.producer().store(produced, Ordering::Release);
            assert_eq!(ring.available(u32::MAX), batch);
            for expected in produced - batch..produced {
                assert_eq!(ring.pop(), u64::from(expected));
            }
            ring.release();
            assert_eq!(ring.memory.consumer().load(Ordering::Relaxed), produced);
        }
    }

    #[test]
    fn a_kernel_that_produced_more_than_fits_is_not_believed() {
        let mut ring = Consumer::<u64>::new(RingMemory::private(4));
        for lie in [5, 1 << 31, u32::MAX] {
            ring.memory.producer().store(lie, Ordering::Relaxed);
            assert_eq!(ring.available(u32::MAX), 0, "producer index {lie}");
        }
        ring.memory.producer().store(4, Ordering::Relaxed);
        assert_eq!(ring.available(3), 3);
        assert_eq!(ring.available(u32::MAX), 4);
    }

    #[test]
    fn indices_wrap() {
        let mut ring = Producer::<u64>::new(RingMemory::private(4));
        ring.head = u32::MAX - 1;
        ring.tail = ring.head;
        ring.memory.consumer().store(ring.head, Ordering::Relaxed);
        for value in 0..4 {
            assert!(ring.free(1) >= 1);
            ring.push(value);
        }
        assert_eq!(ring.free(1), 0);
        assert_eq!(ring.head, 2);
        ring.memory.consumer().store(2, Ordering::Relaxed);
        assert_eq!(ring.free(4), 4);
    }
}
