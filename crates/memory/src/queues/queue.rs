//! The ends of a queue: a structure with limits, sleep and an end.

use std::collections::VecDeque;
use std::io;

use super::account::{Account, Limits, Unlimited};
use super::bed::{Bed, Futex, Semaphore};
use super::lock::LockStatistics;
use super::structure::{Opened, Packet, Padded, Shape, Structure};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, relax, yield_now};

/// Packets that [`Reader::pop_each`] and [`Producer::push_each`] move at most
/// before they wake and account.
pub use super::grid::BURST;

/// Why a packet was not put in; it comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError<T> {
    /// A limit is reached, or the structure has no room.
    Full(T),
    /// The queue is closed: nobody would read it.
    Closed(T),
}

struct Shared<S, A, B> {
    structure: S,
    account: A,
    /// One for all readers, or one for each.
    beds: Box<[Padded<Bed<B>>]>,
    closed: AtomicBool,
    producers: AtomicUsize,
    readers: AtomicUsize,
}

/// A producer's end. The queue closes when the last producer is gone.
pub struct Producer<S: Structure, A: Account = Unlimited, B: Semaphore = Futex> {
    shared: Arc<Shared<S, A, B>>,
    own: S::Producer,
    number: usize,
}

/// A reader's end. The queue closes when the last reader is gone.
pub struct Reader<S: Structure, A: Account = Unlimited, B: Semaphore = Futex> {
    shared: Arc<Shared<S, A, B>>,
    own: S::Reader,
    number: usize,
    /// How long looking again paid before sleeping.
    pauses: u32,
    /// Woken, and nothing found yet.
    searching: bool,
}

/// All ends of a queue.
pub struct Ends<S: Structure, A: Account = Unlimited, B: Semaphore = Futex> {
    /// One for each producer.
    pub producers: Vec<Producer<S, A, B>>,
    /// One for each reader.
    pub readers: Vec<Reader<S, A, B>>,
}

/// How the locks of a queue were used, where they are of a kind that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueStatistics {
    /// The locks around the packets.
    pub structure: Option<LockStatistics>,
    /// The lock around the account.
    pub account: Option<LockStatistics>,
}

/// Makes an empty queue.
///
/// # Errors
/// When the process has no descriptor left to sleep on.
///
/// # Panics
/// Without producers or without readers.
pub fn open<S: Structure, A: Account, B: Semaphore>(
    shape: &Shape,
    limits: Limits,
) -> io::Result<Ends<S, A, B>> {
    assert!(shape.producers > 0 && shape.readers > 0, "a queue has producers and readers");
    let Opened { structure, producers, readers } = S::open(shape);
    let beds = if S::BED_PER_READER { shape.readers } else { 1 };
    let shared = Arc::new(Shared {
        structure,
        account: A::new(limits, shape),
        beds: (0..beds).map(|_| Ok(Padded(Bed::new()?))).collect::<io::Result<_>>()?,
        closed: AtomicBool::new(false),
        producers: AtomicUsize::new(shape.producers),
        readers: AtomicUsize::new(shape.readers),
    });
    let producer = |(number, own)| Producer { shared: Arc::clone(&shared), own, number };
    let producers = producers.into_iter().enumerate().map(producer).collect();
    let reader = |(number, own)| Reader {
        shared: Arc::clone(&shared),
        own,
        number,
        pauses: B::MOST_PAUSES,
        searching: false,
    };
    let readers = readers.into_iter().enumerate().map(reader).collect();
    Ok(Ends { producers, readers })
}

impl<S: Structure, A: Account, B: Semaphore> Shared<S, A, B> {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        for bed in &self.beds {
            bed.0.wake_all();
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
    /// Puts a packet in, and wakes a reader for it.
    ///
    /// # Errors
    /// [`PushError`] with the packet. A structure of fixed size may be full a
    /// moment longer than the limit says, while a reader leaves its cell.
    #[inline]
    pub fn try_push(&mut self, packet: S::Packet) -> Result<(), PushError<S::Packet>> {
        let bed = self.put(packet)?;
        self.shared.structure.flush(&mut self.own);
        self.shared.beds[bed].0.wake_one();
        Ok(())
    }

    /// Puts a packet in, waiting for room.
    ///
    /// # Errors
    /// The packet, when the queue is closed.
    #[inline]
    pub fn push(&mut self, mut packet: S::Packet) -> Result<(), S::Packet> {
        let mut turn = 0;
        loop {
            match self.try_push(packet) {
                Ok(()) => return Ok(()),
                Err(PushError::Closed(back)) => return Err(back),
                Err(PushError::Full(back)) => packet = back,
            }
            wait_for_room(&mut turn);
        }
    }

    /// Puts packets in until there are no more, or there is no room; shows them
    /// to the readers in bursts of [`BURST`]. Returns how many.
    ///
    /// # Errors
    /// The first packet that was not put in, with how many were before it.
    pub fn push_each(
        &mut self,
        packets: impl IntoIterator<Item = S::Packet>,
    ) -> Result<usize, (usize, PushError<S::Packet>)> {
        let (mut count, mut shown) = (0, 0);
        let mut bed: Option<usize> = None;
        for packet in packets {
            match self.put(packet) {
                Ok(now) => {
                    // What lies for another reader has been shown to it.
                    if let Some(before) = bed.filter(|&before| before != now) {
                        self.shared.beds[before].0.wake_one();
                    }
                    bed = Some(now);
                }
                Err(error) => {
                    self.show(bed, count - shown);
                    return Err((count, error));
                }
            }
            count += 1;
            if count - shown == BURST {
                self.show(bed.take(), BURST);
                shown = count;
            }
        }
        self.show(bed, count - shown);
        Ok(count)
    }

    /// Shows the readers what was put in, and wakes some for it.
    #[inline]
    fn show(&mut self, bed: Option<usize>, packets: usize) {
        let Some(bed) = bed else { return };
        self.shared.structure.flush(&mut self.own);
        // One that searches alone wakes the next; without that each packet has
        // to wake its own.
        let wakes = if B::ONE_SEARCHES { 1 } else { packets };
        for _ in 0..wakes {
            self.shared.beds[bed].0.wake_one();
        }
    }

    #[inline]
    fn put(&mut self, packet: S::Packet) -> Result<usize, PushError<S::Packet>> {
        if self.shared.is_closed() {
            return Err(PushError::Closed(packet));
        }
        let bytes = packet.bytes();
        if !self.shared.account.charge(self.number, bytes) {
            return Err(PushError::Full(packet));
        }
        self.shared.structure.put(&mut self.own, packet).map_err(|packet| {
            self.shared.account.take_back(self.number, bytes);
            PushError::Full(packet)
        })
    }

    /// Ends the queue: readers take what is there and are not waited for.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Whether the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// How the locks were used until now.
    pub fn statistics(&self) -> QueueStatistics {
        self.shared.statistics()
    }
}

/// One turn of a producer that waits: a reader may be as quick as that, or
/// need the processor.
pub fn wait_for_room(turn: &mut u32) {
    *turn += 1;
    match *turn {
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
        let packet = self.shared.structure.take(&mut self.own)?;
        self.shared.account.release(self.number, 1, packet.bytes());
        if self.searching {
            self.found();
        }
        Some(packet)
    }

    /// Takes a packet, sleeping until there is one; `None` when the queue is
    /// closed and empty.
    pub fn pop_wait(&mut self) -> Option<S::Packet> {
        self.wait_for(Self::pop)
    }

    /// Takes up to `most` packets, sleeping until there is one; adds them to
    /// `packets` and returns how many: 0 when the queue is closed and empty.
    pub fn pop_each_wait(&mut self, most: usize, packets: &mut VecDeque<S::Packet>) -> usize {
        let some = |reader: &mut Self| Some(reader.pop_each(most, packets)).filter(|&n| n > 0);
        self.wait_for(some).unwrap_or(0)
    }

    /// Takes up to `most` packets, adds them to `packets` and returns how many.
    pub fn pop_each(&mut self, most: usize, packets: &mut VecDeque<S::Packet>) -> usize {
        let mut bytes = 0;
        let count = self.shared.structure.take_each(&mut self.own, most, |packet| {
            bytes += packet.bytes();
            packets.push_back(packet);
        });
        if count > 0 {
            self.shared.account.release(self.number, count, bytes);
            if self.searching {
                self.found();
            }
        }
        count
    }

    fn wait_for<R>(&mut self, mut look: impl FnMut(&mut Self) -> Option<R>) -> Option<R> {
        loop {
            if let Some(found) = look(self) {
                return Some(found);
            }
            for _ in 0..self.pauses {
                relax();
                if let Some(found) = look(self) {
                    self.pauses = (self.pauses * 2).min(B::MOST_PAUSES);
                    return Some(found);
                }
            }
            // It never comes to nothing, or spinning could not come back.
            self.pauses = (self.pauses / 2).max(1).min(B::MOST_PAUSES);
            self.enter_bed();
            let found = look(self);
            let closed = self.shared.is_closed();
            if found.is_none() && !closed {
                self.bed().sleep();
                self.searching = B::ONE_SEARCHES;
                continue;
            }
            self.searching = self.bed().leave() && B::ONE_SEARCHES;
            if found.is_some() {
                if self.searching {
                    self.found();
                }
                return found;
            }
            // What was put in before it was closed can be seen now.
            let last = look(self);
            if last.is_none() && self.searching {
                self.found();
            }
            return last;
        }
    }

    fn enter_bed(&mut self) {
        let searching = std::mem::take(&mut self.searching);
        self.bed().enter(searching);
    }

    fn bed(&self) -> &Bed<B> {
        &self.shared.beds[if S::BED_PER_READER { self.number } else { 0 }].0
    }

    /// The search is over; where there is more, the next reader may begin.
    #[cold]
    fn found(&mut self) {
        self.searching = false;
        self.bed().stop_searching();
        if self.shared.structure.may_have_more(&mut self.own) {
            self.bed().wake_one();
        }
    }

    /// Ends the queue: nothing more can be put in, sleeping readers wake.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Whether the queue is closed. Packets may still be there.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// How the locks were used until now.
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
            self.found();
        }
        if S::BED_PER_READER {
            // Nobody else can take what was for this reader: it goes, and
            // counts no more.
            while self.pop().is_some() {}
        }
        if self.shared.readers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.close();
        }
    }
}
