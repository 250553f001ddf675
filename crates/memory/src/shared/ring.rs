//! Ring of fixed-size messages from one process to another.

use crate::sync::{AtomicU64, Ordering};

/// Memory that is accessed as atomic words.
pub trait SharedWords {
    /// All words of the memory.
    fn words(&self) -> &[AtomicU64];
}

#[cfg(test)]
impl SharedWords for crate::sync::Arc<Vec<AtomicU64>> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// Word offsets of the two indices, each on cache lines of its own, and of the first message.
const PUBLISHED_WORD: usize = 0;
const RELEASED_WORD: usize = 16;
const HEADER_WORDS: usize = 32;

/// Words that a ring of `capacity` messages of `message_words` words needs.
pub const fn ring_words(capacity: usize, message_words: usize) -> usize {
    HEADER_WORDS + capacity * message_words
}

/// Error of creating a ring in given memory.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The capacity is not a power of two.
    #[error("the capacity of a ring must be a power of two, not {0} messages")]
    Capacity(usize),
    /// The memory is too small.
    #[error("a ring of this capacity needs {needed} words of memory; available: {available}")]
    TooSmall {
        /// Words that the ring needs.
        needed: usize,
        /// Words that the memory has.
        available: usize,
    },
}

/// Error: the peer has set its index out of range, by a fault or on purpose. The ring is
/// unusable from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer of a shared-memory ring is faulty: its index is out of range")]
pub struct PeerError;

/// A ring in memory, and the progress of one end.
struct RingEnd<M, const W: usize> {
    memory: M,
    mask: u64,
    /// Messages this end has pushed or popped. No other process can change it.
    own_index: u64,
    /// Messages the peer was last seen to have popped or pushed.
    peer_index: u64,
}

impl<M: SharedWords, const W: usize> RingEnd<M, W> {
    fn new(memory: M, capacity: usize) -> Result<Self, RingError> {
        if !capacity.is_power_of_two() {
            return Err(RingError::Capacity(capacity));
        }
        let (needed, available) = (ring_words(capacity, W), memory.words().len());
        if available < needed {
            return Err(RingError::TooSmall { needed, available });
        }
        Ok(Self { memory, mask: capacity as u64 - 1, own_index: 0, peer_index: 0 })
    }

    fn capacity(&self) -> u64 {
        self.mask + 1
    }

    /// Words of message number `number`.
    #[inline]
    fn slot(&self, number: u64) -> &[AtomicU64] {
        let start = HEADER_WORDS + (number & self.mask) as usize * W;
        self.memory.words().get(start..start + W).unwrap_or(&[])
    }
}

/// Sending end of a ring with messages of `W` words.
pub struct Sender<M, const W: usize>(RingEnd<M, W>);

impl<M: SharedWords, const W: usize> Sender<M, W> {
    /// Creates the sending end in memory that was zero when both ends began.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn new(memory: M, capacity: usize) -> Result<Self, RingError> {
        RingEnd::new(memory, capacity).map(Self)
    }

    /// Resumes where another process left this end: the published index becomes the index of this
    /// end.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn resume(&mut self) -> Result<(), PeerError> {
        let Self(end) = self;
        let words = end.memory.words();
        let own = words[PUBLISHED_WORD].load(Ordering::Acquire);
        let seen = words[RELEASED_WORD].load(Ordering::Acquire);
        if seen > own || own - seen > end.capacity() {
            return Err(PeerError);
        }
        (end.own_index, end.peer_index) = (own, seen);
        Ok(())
    }

    /// Pushes a message, visible to the peer after [`Sender::publish`]. Returns false when the ring
    /// is full.
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn push(&mut self, message: &[u64; W]) -> Result<bool, PeerError> {
        let Self(end) = self;
        if end.own_index - end.peer_index == end.capacity() {
            let released = end.memory.words()[RELEASED_WORD].load(Ordering::Acquire);
            // The index never goes back, nor beyond the messages that were pushed.
            if !(end.peer_index..=end.own_index).contains(&released) {
                return Err(PeerError);
            }
            end.peer_index = released;
            if end.own_index - end.peer_index == end.capacity() {
                return Ok(false);
            }
        }
        for (word, value) in end.slot(end.own_index).iter().zip(message) {
            word.store(*value, Ordering::Relaxed);
        }
        end.own_index += 1;
        Ok(true)
    }

    /// Makes all pushed messages visible to the peer.
    #[inline]
    pub fn publish(&mut self) {
        self.0.memory.words()[PUBLISHED_WORD].store(self.0.own_index, Ordering::Release);
    }
}

/// Receiving end of a ring with messages of `W` words.
pub struct Receiver<M, const W: usize>(RingEnd<M, W>);

impl<M: SharedWords, const W: usize> Receiver<M, W> {
    /// Creates the receiving end in memory that was zero when both ends began.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn new(memory: M, capacity: usize) -> Result<Self, RingError> {
        RingEnd::new(memory, capacity).map(Self)
    }

    /// Resumes where another process left this end: the released index becomes the index of this
    /// end.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn resume(&mut self) -> Result<(), PeerError> {
        let Self(end) = self;
        let words = end.memory.words();
        let own = words[RELEASED_WORD].load(Ordering::Acquire);
        let seen = words[PUBLISHED_WORD].load(Ordering::Acquire);
        if own > seen || seen - own > end.capacity() {
            return Err(PeerError);
        }
        (end.own_index, end.peer_index) = (own, seen);
        Ok(())
    }

    /// Pops a copy of the next message, if there is one. The sender can reuse the slot after
    /// [`Receiver::release`].
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn pop(&mut self) -> Result<Option<[u64; W]>, PeerError> {
        if self.is_empty()? {
            return Ok(None);
        }
        let Self(end) = self;
        let mut message = [0; W];
        for (value, word) in message.iter_mut().zip(end.slot(end.own_index)) {
            *value = word.load(Ordering::Relaxed);
        }
        end.own_index += 1;
        Ok(Some(message))
    }

    /// True if there is no message.
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, PeerError> {
        let Self(end) = self;
        if end.own_index == end.peer_index {
            let published = end.memory.words()[PUBLISHED_WORD].load(Ordering::Acquire);
            if published < end.peer_index || published - end.own_index > end.capacity() {
                return Err(PeerError);
            }
            end.peer_index = published;
        }
        Ok(end.own_index == end.peer_index)
    }

    /// Frees the slots of all popped messages for the sender.
    #[inline]
    pub fn release(&mut self) {
        self.0.memory.words()[RELEASED_WORD].store(self.0.own_index, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Arc;

    fn memory(capacity: usize, message_words: usize) -> Arc<Vec<AtomicU64>> {
        let words = ring_words(capacity, message_words);
        Arc::new((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    type RingPair<const W: usize> =
        (Sender<Arc<Vec<AtomicU64>>, W>, Receiver<Arc<Vec<AtomicU64>>, W>, Arc<Vec<AtomicU64>>);

    fn ring<const W: usize>(capacity: usize) -> RingPair<W> {
        let memory = memory(capacity, W);
        let sender = Sender::new(Arc::clone(&memory), capacity).unwrap();
        (sender, Receiver::new(Arc::clone(&memory), capacity).unwrap(), memory)
    }

    #[cfg(not(loom))]
    #[test]
    fn messages_arrive_unchanged() {
        let (mut sender, mut receiver, _) = ring::<2>(4);
        for round in 0..10 {
            for n in 0..4 {
                assert_eq!(sender.push(&[round, n]), Ok(true));
            }
            assert_eq!(sender.push(&[9, 9]), Ok(false), "the ring is full");
            assert_eq!(receiver.pop(), Ok(None), "nothing was published");
            sender.publish();
            for n in 0..4 {
                assert_eq!(receiver.pop(), Ok(Some([round, n])));
            }
            assert_eq!(receiver.pop(), Ok(None));
            assert_eq!(sender.push(&[9, 9]), Ok(false), "nothing was released");
            receiver.release();
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn rejects_unsuitable_memory() {
        let ring = |capacity| Sender::<_, 2>::new(memory(4, 2), capacity).map(|_| ());
        assert_eq!(ring(3), Err(RingError::Capacity(3)));
        assert_eq!(ring(0), Err(RingError::Capacity(0)));
        assert_eq!(ring(8), Err(RingError::TooSmall { needed: 48, available: 40 }));
    }

    /// Whatever the peer writes, the result is messages of its making, nothing, or an error; no
    /// access leaves this ring's part of the memory.
    #[cfg(not(loom))]
    #[test]
    fn detects_an_invalid_peer_index() {
        for lie in [1, 4, 5, 6, u64::MAX, u64::MAX / 2, 1 << 63] {
            let (mut sender, mut receiver, memory) = ring::<1>(4);
            (0..4).for_each(|n| assert_eq!(sender.push(&[n]), Ok(true)));
            memory[PUBLISHED_WORD].store(lie, Ordering::Release);
            let took = std::iter::from_fn(|| receiver.pop().ok().flatten()).count() as u64;
            assert_eq!(took, if lie <= 4 { lie } else { 0 });
            assert_eq!(receiver.pop(), if lie <= 4 { Ok(None) } else { Err(PeerError) }, "{lie}");
            memory[RELEASED_WORD].store(lie, Ordering::Release);
            assert_eq!(
                sender.push(&[4]),
                if lie <= 4 { Ok(true) } else { Err(PeerError) },
                "{lie}"
            );
        }
        // An index that goes back.
        let (mut sender, mut receiver, memory) = ring::<1>(4);
        (0..3).for_each(|n| assert_eq!(sender.push(&[n]), Ok(true)));
        sender.publish();
        (0..3).for_each(|n| assert_eq!(receiver.pop(), Ok(Some([n]))));
        memory[PUBLISHED_WORD].store(2, Ordering::Release);
        assert_eq!(receiver.pop(), Err(PeerError));
    }

    #[cfg(not(loom))]
    #[test]
    fn resumed_ends_continue_where_the_first_stopped() {
        let (mut sender, mut receiver, memory) = ring::<1>(4);
        let mut second = Sender::<_, 1>::new(Arc::clone(&memory), 4).unwrap();
        let mut reader = Receiver::<_, 1>::new(Arc::clone(&memory), 4).unwrap();
        for round in 0..20 {
            for (sender, n) in [(&mut sender, 0), (&mut second, 1)] {
                sender.resume().unwrap();
                assert_eq!(sender.push(&[2 * round + n]), Ok(true));
                sender.publish();
            }
            for (receiver, n) in [(&mut receiver, 0), (&mut reader, 1)] {
                receiver.resume().unwrap();
                assert_eq!(receiver.pop(), Ok(Some([2 * round + n])));
                receiver.release();
            }
        }
        for lie in [u64::MAX, 0] {
            memory[PUBLISHED_WORD].store(lie, Ordering::Release);
            assert_eq!((second.resume(), reader.resume()), (Err(PeerError), Err(PeerError)));
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn two_threads_deliver_every_message() {
        let count: u64 = if cfg!(miri) { 200 } else { 200_000 };
        let (mut sender, mut receiver, _) = ring::<4>(64);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for n in 0..count {
                    while !sender.push(&[n, !n, n, !n]).unwrap() {
                        sender.publish();
                        crate::sync::yield_now();
                    }
                    if n % 7 == 0 {
                        sender.publish();
                    }
                }
                sender.publish();
            });
            let mut next = 0;
            while next < count {
                match receiver.pop().unwrap() {
                    Some(message) => {
                        assert_eq!(message, [next, !next, next, !next]);
                        next += 1;
                    }
                    None => {
                        receiver.release();
                        crate::sync::yield_now();
                    }
                }
            }
        });
    }

    #[cfg(loom)]
    #[test]
    fn loom_delivers_whole_messages_and_reuses_slots() {
        loom::model(|| {
            let (mut sender, mut receiver, _) = ring::<2>(2);
            let sending = loom::thread::spawn(move || {
                for n in 1..=3 {
                    while !sender.push(&[n, 10 * n]).unwrap() {
                        crate::sync::yield_now();
                    }
                    sender.publish();
                }
            });
            for n in 1..=3 {
                let message = loop {
                    match receiver.pop().unwrap() {
                        Some(message) => break message,
                        None => crate::sync::yield_now(),
                    }
                };
                assert_eq!(message, [n, 10 * n]);
                receiver.release();
            }
            sending.join().unwrap();
        });
    }
}
