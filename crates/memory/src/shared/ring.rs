//! A ring of messages of one size from one process to another.

use crate::sync::{AtomicU64, Ordering};

/// Memory that is reached as atomic words.
pub trait Words {
    /// All of it.
    fn words(&self) -> &[AtomicU64];
}

#[cfg(test)]
impl Words for crate::sync::Arc<Vec<AtomicU64>> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// Where the two indices stand, each on cache lines of its own, and where the
/// messages begin.
const PUBLISHED: usize = 0;
const RELEASED: usize = 16;
const HEAD_WORDS: usize = 32;

/// The words that a ring of `capacity` messages of `message_words` needs.
pub const fn words_for(capacity: usize, message_words: usize) -> usize {
    HEAD_WORDS + capacity * message_words
}

/// Why a ring cannot be made in a piece of memory.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The capacity is no power of two.
    #[error("a ring holds a power of two of messages, not {0}")]
    Capacity(usize),
    /// There is not enough memory.
    #[error("a ring of this capacity needs {needed} words, and there are {there}")]
    TooSmall {
        /// Words that it needs.
        needed: usize,
        /// Words that there are.
        there: usize,
    },
}

/// The other side has set its index where it cannot be: it is broken, or lies.
/// The ring is of no further use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other side of a ring in shared memory is broken: its index is out of range")]
pub struct Broken;

/// A ring in memory, and how far this side has come.
struct Side<M, const W: usize> {
    memory: M,
    mask: u64,
    /// What this side has put in, or taken out. Nobody else can change it.
    own: u64,
    /// What the other side was seen to have taken out, or put in.
    seen: u64,
}

impl<M: Words, const W: usize> Side<M, W> {
    fn new(memory: M, capacity: usize) -> Result<Self, RingError> {
        if !capacity.is_power_of_two() {
            return Err(RingError::Capacity(capacity));
        }
        let (needed, there) = (words_for(capacity, W), memory.words().len());
        if there < needed {
            return Err(RingError::TooSmall { needed, there });
        }
        Ok(Self { memory, mask: capacity as u64 - 1, own: 0, seen: 0 })
    }

    fn capacity(&self) -> u64 {
        self.mask + 1
    }

    /// The words of the message with this number.
    #[inline]
    fn slot(&self, number: u64) -> &[AtomicU64] {
        let start = HEAD_WORDS + (number & self.mask) as usize * W;
        self.memory.words().get(start..start + W).unwrap_or(&[])
    }
}

/// The end that sends messages of `W` words.
pub struct Sender<M, const W: usize>(Side<M, W>);

impl<M: Words, const W: usize> Sender<M, W> {
    /// The sending end of a ring in memory that was zero when both ends began.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn new(memory: M, capacity: usize) -> Result<Self, RingError> {
        Side::new(memory, capacity).map(Self)
    }

    /// Goes on where another process left this end: what was published is what
    /// this side has put in.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn resume(&mut self) -> Result<(), Broken> {
        let Self(side) = self;
        let words = side.memory.words();
        let own = words[PUBLISHED].load(Ordering::Acquire);
        let seen = words[RELEASED].load(Ordering::Acquire);
        if seen > own || own - seen > side.capacity() {
            return Err(Broken);
        }
        (side.own, side.seen) = (own, seen);
        Ok(())
    }

    /// Puts a message in, for the other side to see after [`Sender::publish`].
    /// Returns whether there was room.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn push(&mut self, message: &[u64; W]) -> Result<bool, Broken> {
        let Self(side) = self;
        if side.own - side.seen == side.capacity() {
            let released = side.memory.words()[RELEASED].load(Ordering::Acquire);
            // It never goes back, and not beyond what was put in.
            if !(side.seen..=side.own).contains(&released) {
                return Err(Broken);
            }
            side.seen = released;
            if side.own - side.seen == side.capacity() {
                return Ok(false);
            }
        }
        for (word, value) in side.slot(side.own).iter().zip(message) {
            word.store(*value, Ordering::Relaxed);
        }
        side.own += 1;
        Ok(true)
    }

    /// Lets the other side see what was put in.
    #[inline]
    pub fn publish(&mut self) {
        self.0.memory.words()[PUBLISHED].store(self.0.own, Ordering::Release);
    }
}

/// The end that receives messages of `W` words.
pub struct Receiver<M, const W: usize>(Side<M, W>);

impl<M: Words, const W: usize> Receiver<M, W> {
    /// The receiving end of a ring in memory that was zero when both ends
    /// began.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn new(memory: M, capacity: usize) -> Result<Self, RingError> {
        Side::new(memory, capacity).map(Self)
    }

    /// Goes on where another process left this end: what was released is what
    /// this side has taken out.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn resume(&mut self) -> Result<(), Broken> {
        let Self(side) = self;
        let words = side.memory.words();
        let own = words[RELEASED].load(Ordering::Acquire);
        let seen = words[PUBLISHED].load(Ordering::Acquire);
        if own > seen || seen - own > side.capacity() {
            return Err(Broken);
        }
        (side.own, side.seen) = (own, seen);
        Ok(())
    }

    /// Takes a copy of the next message, if there is one. Its place is the
    /// sender's again after [`Receiver::release`].
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn pop(&mut self) -> Result<Option<[u64; W]>, Broken> {
        if self.is_empty()? {
            return Ok(None);
        }
        let Self(side) = self;
        let mut message = [0; W];
        for (value, word) in message.iter_mut().zip(side.slot(side.own)) {
            *value = word.load(Ordering::Relaxed);
        }
        side.own += 1;
        Ok(Some(message))
    }

    /// Whether there is no message.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        let Self(side) = self;
        if side.own == side.seen {
            let published = side.memory.words()[PUBLISHED].load(Ordering::Acquire);
            if published < side.seen || published - side.own > side.capacity() {
                return Err(Broken);
            }
            side.seen = published;
        }
        Ok(side.own == side.seen)
    }

    /// Gives the places of the messages that were taken back to the sender.
    #[inline]
    pub fn release(&mut self) {
        self.0.memory.words()[RELEASED].store(self.0.own, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Arc;

    fn memory(capacity: usize, message_words: usize) -> Arc<Vec<AtomicU64>> {
        let words = words_for(capacity, message_words);
        Arc::new((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    type Ends<const W: usize> =
        (Sender<Arc<Vec<AtomicU64>>, W>, Receiver<Arc<Vec<AtomicU64>>, W>, Arc<Vec<AtomicU64>>);

    fn ring<const W: usize>(capacity: usize) -> Ends<W> {
        let memory = memory(capacity, W);
        let sender = Sender::new(Arc::clone(&memory), capacity).unwrap();
        (sender, Receiver::new(Arc::clone(&memory), capacity).unwrap(), memory)
    }

    #[cfg(not(loom))]
    #[test]
    fn messages_come_out_as_they_went_in() {
        let (mut sender, mut receiver, _) = ring::<2>(4);
        for round in 0..10 {
            for n in 0..4 {
                assert_eq!(sender.push(&[round, n]), Ok(true));
            }
            assert_eq!(sender.push(&[9, 9]), Ok(false), "it is full");
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
    fn memory_that_does_not_do_is_refused() {
        let ring = |capacity| Sender::<_, 2>::new(memory(4, 2), capacity).map(|_| ());
        assert_eq!(ring(3), Err(RingError::Capacity(3)));
        assert_eq!(ring(0), Err(RingError::Capacity(0)));
        assert_eq!(ring(8), Err(RingError::TooSmall { needed: 48, there: 40 }));
    }

    /// Whatever the other side writes, we get messages of its making, nothing,
    /// or an error; we never leave our part of the memory.
    #[cfg(not(loom))]
    #[test]
    fn a_lying_side_is_found_out() {
        for lie in [1, 4, 5, 6, u64::MAX, u64::MAX / 2, 1 << 63] {
            let (mut sender, mut receiver, memory) = ring::<1>(4);
            (0..4).for_each(|n| assert_eq!(sender.push(&[n]), Ok(true)));
            memory[PUBLISHED].store(lie, Ordering::Release);
            let took = std::iter::from_fn(|| receiver.pop().ok().flatten()).count() as u64;
            assert_eq!(took, if lie <= 4 { lie } else { 0 });
            assert_eq!(receiver.pop(), if lie <= 4 { Ok(None) } else { Err(Broken) }, "{lie}");
            memory[RELEASED].store(lie, Ordering::Release);
            assert_eq!(sender.push(&[4]), if lie <= 4 { Ok(true) } else { Err(Broken) }, "{lie}");
        }
        // An index that goes back.
        let (mut sender, mut receiver, memory) = ring::<1>(4);
        (0..3).for_each(|n| assert_eq!(sender.push(&[n]), Ok(true)));
        sender.publish();
        (0..3).for_each(|n| assert_eq!(receiver.pop(), Ok(Some([n]))));
        memory[PUBLISHED].store(2, Ordering::Release);
        assert_eq!(receiver.pop(), Err(Broken));
    }

    #[cfg(not(loom))]
    #[test]
    fn other_ends_go_on_where_the_first_ones_stopped() {
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
            memory[PUBLISHED].store(lie, Ordering::Release);
            assert_eq!((second.resume(), reader.resume()), (Err(Broken), Err(Broken)));
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn two_threads_lose_nothing() {
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
    fn loom_a_message_is_seen_whole_and_its_place_is_used_again() {
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
