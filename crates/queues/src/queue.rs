//! Producer and reader ends of a queue: a structure with limits, sleeping and closing.

use std::collections::VecDeque;
use std::io;

use crate::account::{Account, QueueLimits, Unlimited};
use crate::lock::LockStatistics;
use crate::parker::{Futex, Parker, Semaphore};
use crate::structure::{CachePadded, Packet, QueueShape, Structure, StructureParts};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, relax, yield_now};

/// Most packets that [`Producer::push_each`] puts in before it makes them visible and wakes
/// readers.
pub use crate::ring_matrix::BURST_PACKETS;

/// Reason for a rejected packet; returns the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PushError<T> {
    /// A limit is reached, or the structure is full.
    Full(T),
    /// The queue is closed.
    Closed(T),
}

struct Shared<S, A, B> {
    structure: S,
    account: A,
    /// One parker for all readers, or one for each.
    parkers: Box<[CachePadded<Parker<B>>]>,
    closed: AtomicBool,
    producers: AtomicUsize,
    readers: AtomicUsize,
}

/// Producer end. The queue closes when the last producer is dropped.
pub struct Producer<S: Structure, A: Account = Unlimited, B: Semaphore = Futex> {
    shared: Arc<Shared<S, A, B>>,
    local: S::Producer,
    index: usize,
}

/// Reader end. The queue closes when the last reader is dropped.
pub struct Reader<S: Structure, A: Account = Unlimited, B: Semaphore = Futex> {
    shared: Arc<Shared<S, A, B>>,
    local: S::Reader,
    index: usize,
    /// Pauses to spin before sleeping; adapts to how often spinning finds a packet.
    spin_pauses: u32,
    /// True after a wake-up until the reader has found a packet.
    searching: bool,
}

/// All ends of a queue.
pub struct QueueEnds<S: Structure, A: Account = Unlimited, B: Semaphore = Futex> {
    /// One end for each producer.
    pub producers: Vec<Producer<S, A, B>>,
    /// One end for each reader.
    pub readers: Vec<Reader<S, A, B>>,
}

/// Usage of the locks of a queue, where they are metered.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueStatistics {
    /// Locks around the packets.
    pub structure: Option<LockStatistics>,
    /// Lock around the account.
    pub account: Option<LockStatistics>,
}

/// Creates an empty queue.
///
/// # Errors
/// When the process has no file descriptor left to sleep on.
///
/// # Panics
/// Without producers or without readers.
pub fn open<S: Structure, A: Account, B: Semaphore>(
    shape: &QueueShape,
    limits: QueueLimits,
) -> io::Result<QueueEnds<S, A, B>> {
    assert!(
        shape.producers > 0 && shape.readers > 0,
        "a queue needs at least one producer and one reader"
    );
    let StructureParts { structure, producers, readers } = S::open(shape);
    let parkers = if S::PARKER_PER_READER { shape.readers } else { 1 };
    let shared = Arc::new(Shared {
        structure,
        account: A::new(limits, shape),
        parkers: (0..parkers)
            .map(|_| Ok(CachePadded(Parker::new()?)))
            .collect::<io::Result<_>>()?,
        closed: AtomicBool::new(false),
        producers: AtomicUsize::new(shape.producers),
        readers: AtomicUsize::new(shape.readers),
    });
    let producer = |(index, local)| Producer { shared: Arc::clone(&shared), local, index };
    let producers = producers.into_iter().enumerate().map(producer).collect();
    let reader = |(index, local)| Reader {
        shared: Arc::clone(&shared),
        local,
        index,
        spin_pauses: B::MAX_SPIN_PAUSES,
        searching: false,
    };
    let readers = readers.into_iter().enumerate().map(reader).collect();
    Ok(QueueEnds { producers, readers })
}

impl<S: Structure, A: Account, B: Semaphore> Shared<S, A, B> {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        for parker in &self.parkers {
            parker.0.wake_all();
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn statistics(&self) -> QueueStatistics {
        QueueStatistics {
            structure: self.structure.statistics(),
            account: self.account.statistics(),
        }
    }
}

impl<S: Structure, A: Account, B: Semaphore> Producer<S, A, B> {
    /// Puts a packet in and wakes a reader.
    ///
    /// # Errors
    /// [`PushError`] with the packet. A structure of fixed size may stay full for a moment after
    /// the account has space, until a reader has finished with its cell.
    #[inline]
    pub fn try_push(&mut self, packet: S::Packet) -> Result<(), PushError<S::Packet>> {
        let parker = self.enqueue(packet)?;
        self.shared.structure.flush(&mut self.local);
        self.shared.parkers[parker].0.wake_one();
        Ok(())
    }

    /// Puts a packet in, waiting for space.
    ///
    /// # Errors
    /// The packet, when the queue is closed.
    #[inline]
    pub fn push(&mut self, mut packet: S::Packet) -> Result<(), S::Packet> {
        let mut attempt = 0;
        loop {
            match self.try_push(packet) {
                Ok(()) => return Ok(()),
                Err(PushError::Closed(back)) => return Err(back),
                Err(PushError::Full(back)) => packet = back,
            }
            wait_for_space(&mut attempt);
        }
    }

    /// Puts packets in until there are no more, or the queue is full. Makes them visible to readers
    /// in bursts of [`BURST_PACKETS`]. Returns their number.
    ///
    /// # Errors
    /// The first rejected packet, with the number of packets accepted before it.
    pub fn push_each(
        &mut self,
        packets: impl IntoIterator<Item = S::Packet>,
    ) -> Result<usize, (usize, PushError<S::Packet>)> {
        let (mut count, mut published) = (0, 0);
        let mut parker: Option<usize> = None;
        for packet in packets {
            match self.enqueue(packet) {
                Ok(now) => {
                    // The packets for the previous reader are already visible.
                    if let Some(before) = parker.filter(|&before| before != now) {
                        self.shared.parkers[before].0.wake_one();
                    }
                    parker = Some(now);
                }
                Err(error) => {
                    self.publish(parker, count - published);
                    return Err((count, error));
                }
            }
            count += 1;
            if count - published == BURST_PACKETS {
                self.publish(parker.take(), BURST_PACKETS);
                published = count;
            }
        }
        self.publish(parker, count - published);
        Ok(count)
    }

    /// Makes the packets visible to readers, and wakes readers for them.
    #[inline]
    fn publish(&mut self, parker: Option<usize>, packets: usize) {
        let Some(parker) = parker else { return };
        self.shared.structure.flush(&mut self.local);
        // A single searcher wakes the next reader; otherwise each packet has to wake a reader.
        let wakes = if B::SINGLE_SEARCHER { 1 } else { packets };
        for _ in 0..wakes {
            self.shared.parkers[parker].0.wake_one();
        }
    }

    #[inline]
    fn enqueue(&mut self, packet: S::Packet) -> Result<usize, PushError<S::Packet>> {
        if self.shared.is_closed() {
            return Err(PushError::Closed(packet));
        }
        let bytes = packet.bytes();
        if !self.shared.account.charge(self.index, bytes) {
            return Err(PushError::Full(packet));
        }
        self.shared.structure.enqueue(&mut self.local, packet).map_err(|packet| {
            self.shared.account.uncharge(self.index, bytes);
            PushError::Full(packet)
        })
    }

    /// Closes the queue: readers take the remaining packets and then see the end.
    pub fn close(&self) {
        self.shared.close();
    }

    /// True if the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Lock usage until now.
    pub fn statistics(&self) -> QueueStatistics {
        self.shared.statistics()
    }
}

/// One pause of a producer that waits for space. Spins first, then yields, then sleeps 100 us:
/// a reader may be fast, or need the processor.
pub fn wait_for_space(attempt: &mut u32) {
    *attempt += 1;
    match *attempt {
        0..8 => relax(),
        8..64 => yield_now(),
        #[cfg(not(loom))]
        _ => std::thread::sleep(std::time::Duration::from_micros(100)),
        #[cfg(loom)]
        _ => yield_now(),
    }
}

impl<S: Structure, A: Account, B: Semaphore> Reader<S, A, B> {
    /// Takes a packet, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Option<S::Packet> {
        let packet = self.shared.structure.dequeue(&mut self.local)?;
        self.shared.account.release(self.index, 1, packet.bytes());
        if self.searching {
            self.finish_search();
        }
        Some(packet)
    }

    /// Takes a packet, sleeping until there is one; `None` when the queue is closed and empty.
    pub fn pop_wait(&mut self) -> Option<S::Packet> {
        self.wait_for(Self::pop)
    }

    /// Takes up to `max` packets, sleeping until there is one. Appends them to `packets` and
    /// returns their number: 0 when the queue is closed and empty.
    pub fn pop_each_wait(&mut self, max: usize, packets: &mut VecDeque<S::Packet>) -> usize {
        let some = |reader: &mut Self| Some(reader.pop_each(max, packets)).filter(|&n| n > 0);
        self.wait_for(some).unwrap_or(0)
    }

    /// Takes up to `max` packets, appends them to `packets` and returns their number.
    pub fn pop_each(&mut self, max: usize, packets: &mut VecDeque<S::Packet>) -> usize {
        let mut bytes = 0;
        let count = self.shared.structure.dequeue_each(&mut self.local, max, |packet| {
            bytes += packet.bytes();
            packets.push_back(packet);
        });
        if count > 0 {
            self.shared.account.release(self.index, count, bytes);
            if self.searching {
                self.finish_search();
            }
        }
        count
    }

    fn wait_for<R>(&mut self, mut try_pop: impl FnMut(&mut Self) -> Option<R>) -> Option<R> {
        loop {
            if let Some(found) = try_pop(self) {
                return Some(found);
            }
            for _ in 0..self.spin_pauses {
                relax();
                if let Some(found) = try_pop(self) {
                    self.spin_pauses = (self.spin_pauses * 2).min(B::MAX_SPIN_PAUSES);
                    return Some(found);
                }
            }
            // The budget never drops to zero, or spinning could not recover.
            self.spin_pauses = (self.spin_pauses / 2).max(1).min(B::MAX_SPIN_PAUSES);
            self.prepare_to_park();
            let found = try_pop(self);
            let closed = self.shared.is_closed();
            if found.is_none() && !closed {
                self.parker().park();
                self.searching = B::SINGLE_SEARCHER;
                continue;
            }
            self.searching = self.parker().cancel_park() && B::SINGLE_SEARCHER;
            if found.is_some() {
                if self.searching {
                    self.finish_search();
                }
                return found;
            }
            // Packets put in before the queue was closed are visible now.
            let last = try_pop(self);
            if last.is_none() && self.searching {
                self.finish_search();
            }
            return last;
        }
    }

    fn prepare_to_park(&mut self) {
        let searching = std::mem::take(&mut self.searching);
        self.parker().prepare_to_park(searching);
    }

    fn parker(&self) -> &Parker<B> {
        &self.shared.parkers[if S::PARKER_PER_READER { self.index } else { 0 }].0
    }

    /// Ends the search; if packets remain, wakes the next reader.
    #[cold]
    fn finish_search(&mut self) {
        self.searching = false;
        self.parker().stop_searching();
        if self.shared.structure.may_have_more(&mut self.local) {
            self.parker().wake_one();
        }
    }

    /// Closes the queue: no more packets are accepted, and sleeping readers wake.
    pub fn close(&self) {
        self.shared.close();
    }

    /// True if the queue is closed. Packets may remain.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Lock usage until now.
    pub fn statistics(&self) -> QueueStatistics {
        self.shared.statistics()
    }
}

impl<S: Structure, A: Account, B: Semaphore> Drop for Producer<S, A, B> {
    fn drop(&mut self) {
        if self.shared.producers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.close();
        }
    }
}

impl<S: Structure, A: Account, B: Semaphore> Drop for Reader<S, A, B> {
    fn drop(&mut self) {
        if self.searching {
            self.finish_search();
        }
        if S::PARKER_PER_READER {
            // No other reader can take the packets of this reader: they are dropped and no longer
            // charged.
            while self.pop().is_some() {}
        }
        if self.shared.readers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.close();
        }
    }
}
