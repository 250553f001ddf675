//! Rings shared by an AF_XDP socket and the kernel.
//!
//! Each ring has one producer and one consumer. The user-space side keeps its own copy of
//! both indices. Indices written by the kernel are read with acquire; own indices are stored
//! with release. The kernel's index is not trusted: an index that would exceed the ring is
//! ignored.

use std::sync::atomic::Ordering;

use super::sys::{Entry, RingMemory};

/// `XDP_RING_NEED_WAKEUP` of `linux/if_xdp.h`.
const NEED_WAKEUP: u32 = 1;

/// Ring filled by user space and emptied by the kernel: fill ring and TX ring.
pub(super) struct Producer<T> {
    memory: RingMemory<T>,
    /// Next index to write. Entries before it that are not published are invisible to the kernel.
    head: u32,
    /// Kernel's consumer index as last read.
    tail: u32,
}

impl<T: Entry> Producer<T> {
    pub(super) fn new(memory: RingMemory<T>) -> Self {
        Self { memory, head: 0, tail: 0 }
    }

    /// Number of entries.
    pub(super) fn size(&self) -> u32 {
        self.memory.size()
    }

    /// Minimum number of free entries; reads the kernel's index only if fewer than `wanted` are
    /// known to be free.
    #[inline]
    pub(super) fn free_slots(&mut self, wanted: u32) -> u32 {
        let known = self.size() - self.head.wrapping_sub(self.tail);
        if known >= wanted {
            return known;
        }
        let tail = self.memory.consumer().load(Ordering::Acquire);
        // An index ahead of `head` or behind the last `tail` is invalid: ignored.
        if self.head.wrapping_sub(tail) <= self.head.wrapping_sub(self.tail) {
            self.tail = tail;
        }
        self.size() - self.head.wrapping_sub(self.tail)
    }

    /// Writes an entry. Requires a free entry according to [`Producer::free_slots`].
    #[inline]
    pub(super) fn push(&mut self, entry: T) {
        self.memory.write(self.head, entry);
        self.head = self.head.wrapping_add(1);
    }

    /// Publishes the pushed entries to the kernel.
    #[inline]
    pub(super) fn publish(&mut self) {
        self.memory.producer().store(self.head, Ordering::Release);
    }

    /// Number of entries that the kernel has not consumed yet.
    #[inline]
    pub(super) fn pending(&mut self) -> u32 {
        let size = self.size();
        size - self.free_slots(size)
    }

    /// True if the kernel must be woken by a system call.
    #[inline]
    pub(super) fn needs_wakeup(&self) -> bool {
        self.memory.flags().load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

/// Ring filled by the kernel and emptied by user space: RX ring and completion ring.
pub(super) struct Consumer<T> {
    memory: RingMemory<T>,
    /// Next index to read.
    tail: u32,
    /// Kernel's producer index as last read.
    head: u32,
}

impl<T: Entry> Consumer<T> {
    pub(super) fn new(memory: RingMemory<T>) -> Self {
        Self { memory, tail: 0, head: 0 }
    }

    /// Number of readable entries, at most `wanted`; reads the kernel's index only if fewer are
    /// known.
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

    /// Reads an entry. Call at most as often as [`Consumer::available`] allows.
    #[inline]
    pub(super) fn pop(&mut self) -> T {
        let entry = self.memory.read(self.tail);
        self.tail = self.tail.wrapping_add(1);
        entry
    }

    /// Returns the entries read to the kernel.
    #[inline]
    pub(super) fn release(&mut self) {
        self.memory.consumer().store(self.tail, Ordering::Release);
    }
}

/// Kernel side of the ring, simulated in tests.
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

/// Kernel side of the ring, simulated in tests.
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
    fn producer_stops_at_the_ring_size() {
        let mut ring = Producer::<u64>::new(RingMemory::private(8));
        for value in 0..8 {
            assert!(ring.free_slots(1) >= 1);
            ring.push(value);
        }
        assert_eq!(ring.free_slots(1), 0);
        ring.publish();
        assert_eq!(ring.memory.producer().load(Ordering::Relaxed), 8);
        ring.memory.consumer().store(3, Ordering::Relaxed);
        assert_eq!(ring.free_slots(1), 3);
        assert_eq!(ring.pending(), 5);
    }

    #[test]
    fn ignores_invalid_consumer_index() {
        let mut ring = Producer::<u64>::new(RingMemory::private(8));
        ring.push(1);
        ring.publish();
        for index in [2, 7, 1 << 31, u32::MAX] {
            ring.memory.consumer().store(index, Ordering::Relaxed);
            assert_eq!(ring.free_slots(8), 7, "consumer index {index}");
        }
        ring.memory.consumer().store(1, Ordering::Relaxed);
        assert_eq!(ring.free_slots(8), 8);
        ring.memory.consumer().store(0, Ordering::Relaxed);
        ring.push(2);
        assert_eq!(ring.free_slots(8), 7, "the index went back");
    }

    #[test]
    fn consumer_reads_entries_in_order() {
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
    fn ignores_invalid_producer_index() {
        let mut ring = Consumer::<u64>::new(RingMemory::private(4));
        for index in [5, 1 << 31, u32::MAX] {
            ring.memory.producer().store(index, Ordering::Relaxed);
            assert_eq!(ring.available(u32::MAX), 0, "producer index {index}");
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
            assert!(ring.free_slots(1) >= 1);
            ring.push(value);
        }
        assert_eq!(ring.free_slots(1), 0);
        assert_eq!(ring.head, 2);
        ring.memory.consumer().store(2, Ordering::Relaxed);
        assert_eq!(ring.free_slots(4), 4);
    }
}
