//! A stream of bytes from one process to another.
//!
//! The indices are words of their own, so that many streams can have them
//! together in memory that is always there, and their bytes in memory that is
//! there only when it is used.

use super::{Broken, Bytes, Words};
use crate::sync::Ordering;

/// Where the two indices stand, each on a cache line of its own.
const PUBLISHED: usize = 0;
const RELEASED: usize = 8;

/// The words that the indices of a stream need.
pub const STREAM_WORDS: usize = 16;

/// Why a stream cannot be made in a piece of memory.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The length of the memory for its bytes is no power of two.
    #[error("a stream holds a power of two of bytes, not {0}")]
    Capacity(usize),
    /// There are not enough words for its indices.
    #[error("the indices of a stream need {STREAM_WORDS} words, and there are {0}")]
    TooSmall(usize),
}

/// A stream in memory, and how far this side has come.
struct Side<M, B> {
    indices: M,
    bytes: B,
    capacity: u64,
    /// What this side has put in, or taken out. Nobody else can change it.
    own: u64,
    /// What the other side was seen to have taken out, or put in.
    seen: u64,
}

impl<M: Words, B: Bytes> Side<M, B> {
    fn new(indices: M, bytes: B) -> Result<Self, StreamError> {
        let (words, len) = (indices.words().len(), bytes.len());
        if words < STREAM_WORDS {
            return Err(StreamError::TooSmall(words));
        }
        if !len.is_power_of_two() {
            return Err(StreamError::Capacity(len));
        }
        Ok(Self { indices, bytes, capacity: len as u64, own: 0, seen: 0 })
    }

    /// Where byte number `at` lies, and how many lie together from there on.
    fn place(&self, at: u64) -> (usize, usize) {
        let start = (at & (self.capacity - 1)) as usize;
        (start, self.bytes.len() - start)
    }
}

/// The end that bytes are written to.
pub struct ByteSender<M, B>(Side<M, B>);

impl<M: Words, B: Bytes> ByteSender<M, B> {
    /// The sending end of a stream whose indices were zero when both ends began.
    ///
    /// # Errors
    /// See [`StreamError`].
    pub fn new(indices: M, bytes: B) -> Result<Self, StreamError> {
        Side::new(indices, bytes).map(Self)
    }

    /// Goes on where another process left this end: what was published is what
    /// this side has put in.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn resume(&mut self) -> Result<(), Broken> {
        let Self(side) = self;
        let words = side.indices.words();
        let own = words[PUBLISHED].load(Ordering::Acquire);
        let seen = words[RELEASED].load(Ordering::Acquire);
        if seen > own || own - seen > side.capacity {
            return Err(Broken);
        }
        (side.own, side.seen) = (own, seen);
        Ok(())
    }

    /// How many bytes can be written now.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn room(&mut self) -> Result<usize, Broken> {
        let Self(side) = self;
        let released = side.indices.words()[RELEASED].load(Ordering::Acquire);
        // It never goes back, and not beyond what was put in.
        if !(side.seen..=side.own).contains(&released) {
            return Err(Broken);
        }
        side.seen = released;
        Ok((side.capacity - (side.own - side.seen)) as usize)
    }

    /// How many bytes can be written now, when there may be no more than `limit`
    /// that the other side has not taken.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn room_within(&mut self, limit: usize) -> Result<usize, Broken> {
        let room = self.room()?;
        let taken = self.0.capacity as usize - room;
        Ok(room.min(limit.saturating_sub(taken)))
    }

    /// Writes as much of `data` as there is room for, to be seen by the other
    /// side after [`ByteSender::publish`]. Returns how much that is.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn write(&mut self, data: &[u8]) -> Result<usize, Broken> {
        self.write_within(usize::MAX, data)
    }

    /// As [`ByteSender::write`], as far as [`ByteSender::room_within`] allows.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn write_within(&mut self, limit: usize, data: &[u8]) -> Result<usize, Broken> {
        let data = &data[..data.len().min(self.room_within(limit)?)];
        let Self(side) = self;
        let (start, together) = side.place(side.own);
        let (first, rest) = data.split_at(together.min(data.len()));
        side.bytes.put(start, first);
        side.bytes.put(0, rest);
        side.own += data.len() as u64;
        Ok(data.len())
    }

    /// Lets the other side see what was written.
    #[inline]
    pub fn publish(&mut self) {
        self.0.indices.words()[PUBLISHED].store(self.0.own, Ordering::Release);
    }
}

/// The end that bytes are read from.
pub struct ByteReceiver<M, B>(Side<M, B>);

impl<M: Words, B: Bytes> ByteReceiver<M, B> {
    /// The receiving end of a stream whose indices were zero when both ends
    /// began.
    ///
    /// # Errors
    /// See [`StreamError`].
    pub fn new(indices: M, bytes: B) -> Result<Self, StreamError> {
        Side::new(indices, bytes).map(Self)
    }

    /// Goes on where another process left this end: what was released is what
    /// this side has taken out.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn resume(&mut self) -> Result<(), Broken> {
        let Self(side) = self;
        let words = side.indices.words();
        let own = words[RELEASED].load(Ordering::Acquire);
        let seen = words[PUBLISHED].load(Ordering::Acquire);
        if own > seen || seen - own > side.capacity {
            return Err(Broken);
        }
        (side.own, side.seen) = (own, seen);
        Ok(())
    }

    /// How many bytes can be read now.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn available(&mut self) -> Result<usize, Broken> {
        let Self(side) = self;
        let published = side.indices.words()[PUBLISHED].load(Ordering::Acquire);
        if published < side.seen || published - side.own > side.capacity {
            return Err(Broken);
        }
        side.seen = published;
        Ok((side.seen - side.own) as usize)
    }

    /// Copies bytes that come `skip` bytes later, as many as there are, and
    /// leaves them. Returns how many.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn peek(&mut self, skip: usize, buf: &mut [u8]) -> Result<usize, Broken> {
        let len = buf.len().min(self.available()?.saturating_sub(skip));
        let Self(side) = self;
        let (start, together) = side.place(side.own + skip as u64);
        let (first, rest) = buf[..len].split_at_mut(together.min(len));
        side.bytes.get(start, first);
        side.bytes.get(0, rest);
        Ok(len)
    }

    /// Takes so many bytes away, or all there are. Their place is the sender's
    /// again after [`ByteReceiver::release`].
    #[inline]
    pub fn skip(&mut self, bytes: usize) {
        let Self(side) = self;
        side.own += (bytes as u64).min(side.seen - side.own);
    }

    /// Reads bytes, as many as there are. Returns how many.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn read(&mut self, buf: &mut [u8]) -> Result<usize, Broken> {
        let len = self.peek(0, buf)?;
        self.skip(len);
        Ok(len)
    }

    /// Gives the places of what was read back to the sender.
    #[inline]
    pub fn release(&mut self) {
        self.0.indices.words()[RELEASED].store(self.0.own, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{Arc, AtomicU8, AtomicU64};

    impl Bytes for Arc<Vec<AtomicU8>> {
        fn len(&self) -> usize {
            Vec::len(self)
        }

        fn put(&self, at: usize, from: &[u8]) {
            let to = self.iter().skip(at);
            to.zip(from).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        }

        fn get(&self, at: usize, to: &mut [u8]) {
            let from = self.iter().skip(at);
            from.zip(to).for_each(|(from, to)| *to = from.load(Ordering::Relaxed));
        }
    }

    type Memory = (Arc<Vec<AtomicU64>>, Arc<Vec<AtomicU8>>);
    type Ends = (
        ByteSender<Arc<Vec<AtomicU64>>, Arc<Vec<AtomicU8>>>,
        ByteReceiver<Arc<Vec<AtomicU64>>, Arc<Vec<AtomicU8>>>,
    );

    fn stream(capacity: usize) -> (Ends, Memory) {
        let words: Arc<Vec<_>> = Arc::new((0..STREAM_WORDS).map(|_| AtomicU64::new(0)).collect());
        let bytes: Arc<Vec<_>> = Arc::new((0..capacity).map(|_| AtomicU8::new(0)).collect());
        let sender = ByteSender::new(Arc::clone(&words), Arc::clone(&bytes)).unwrap();
        let receiver = ByteReceiver::new(Arc::clone(&words), Arc::clone(&bytes)).unwrap();
        ((sender, receiver), (words, bytes))
    }

    #[cfg(not(loom))]
    #[test]
    fn bytes_come_out_as_they_went_in_however_they_wrap() {
        let ((mut sender, mut receiver), _) = stream(8);
        let (mut next, mut expected) = (0_u8, 0_u8);
        for len in (0..=8).cycle().take(1000) {
            let data: Vec<u8> = (0..len).map(|n| next.wrapping_add(n)).collect();
            assert_eq!(sender.write(&data), Ok(data.len()));
            next = next.wrapping_add(len);
            assert_eq!(receiver.available(), Ok(0), "nothing was published");
            sender.publish();
            let mut peeked = [0; 9];
            let skip = usize::from(len) / 2;
            let rest = receiver.peek(skip, &mut peeked).unwrap();
            assert_eq!(peeked[..rest], data[skip..]);
            for byte in &data {
                let mut one = [0];
                assert_eq!(receiver.read(&mut one), Ok(1));
                assert_eq!((one[0], one[0]), (*byte, expected));
                expected = expected.wrapping_add(1);
            }
            assert_eq!(receiver.read(&mut peeked), Ok(0));
            assert_eq!(sender.room(), Ok(8 - data.len()), "nothing was released");
            receiver.release();
            assert_eq!(sender.room(), Ok(8));
        }
        assert_eq!(sender.write_within(3, &[0; 9]), Ok(3), "no more than is wanted");
        assert_eq!(sender.write_within(3, &[0; 9]), Ok(0));
        assert_eq!(sender.room_within(5), Ok(2));
        assert_eq!(sender.write(&[0; 9]), Ok(5), "no more than there is room for");
        receiver.skip(100);
        receiver.release();
        assert_eq!(sender.room(), Ok(0), "what was not published cannot be skipped");
    }

    #[cfg(not(loom))]
    #[test]
    fn memory_that_does_not_do_is_refused() {
        let bytes = |len| -> Arc<Vec<_>> { Arc::new((0..len).map(|_| AtomicU8::new(0)).collect()) };
        let words =
            |len| -> Arc<Vec<_>> { Arc::new((0..len).map(|_| AtomicU64::new(0)).collect()) };
        let made = |w, b| ByteSender::new(words(w), bytes(b)).map(|_| ());
        assert_eq!(made(16, 12), Err(StreamError::Capacity(12)));
        assert_eq!(made(16, 0), Err(StreamError::Capacity(0)));
        assert_eq!(made(15, 8), Err(StreamError::TooSmall(15)));
    }

    #[cfg(not(loom))]
    #[test]
    fn a_lying_side_is_found_out() {
        for lie in [9, u64::MAX, u64::MAX / 2, 1 << 63] {
            let ((mut sender, mut receiver), (words, _)) = stream(8);
            assert_eq!(sender.write(&[1; 4]), Ok(4));
            words[PUBLISHED].store(lie, Ordering::Release);
            assert_eq!(receiver.available(), Err(Broken));
            assert_eq!(receiver.peek(3, &mut [0; 9]), Err(Broken));
            words[RELEASED].store(lie, Ordering::Release);
            assert_eq!(sender.room(), Err(Broken));
            assert_eq!(sender.write(&[1]), Err(Broken));
        }
        // Indices that go back.
        let ((mut sender, mut receiver), (words, _)) = stream(8);
        assert_eq!(sender.write(&[1; 4]), Ok(4));
        sender.publish();
        assert_eq!(receiver.read(&mut [0; 4]), Ok(4));
        receiver.release();
        assert_eq!(sender.room(), Ok(8));
        words[PUBLISHED].store(3, Ordering::Release);
        assert_eq!(receiver.available(), Err(Broken));
        words[RELEASED].store(3, Ordering::Release);
        assert_eq!(sender.room(), Err(Broken));
    }

    #[cfg(not(loom))]
    #[test]
    fn other_ends_go_on_where_the_first_ones_stopped() {
        let ((mut sender, mut receiver), (words, bytes)) = stream(8);
        let mut second = ByteSender::new(Arc::clone(&words), Arc::clone(&bytes)).unwrap();
        let mut reader = ByteReceiver::new(Arc::clone(&words), Arc::clone(&bytes)).unwrap();
        let mut got = [0; 8];
        for round in 0..20 {
            for sender in [&mut sender, &mut second] {
                sender.resume().unwrap();
                assert_eq!(sender.write(&[round; 3]), Ok(3));
                sender.publish();
            }
            for receiver in [&mut receiver, &mut reader] {
                receiver.resume().unwrap();
                assert_eq!(receiver.read(&mut got[..3]), Ok(3));
                receiver.release();
                assert_eq!(got[..3], [round; 3]);
            }
        }
        words[PUBLISHED].store(u64::MAX, Ordering::Release);
        assert_eq!((second.resume(), reader.resume()), (Err(Broken), Err(Broken)));
        words[PUBLISHED].store(0, Ordering::Release);
        assert_eq!((second.resume(), reader.resume()), (Err(Broken), Err(Broken)));
    }

    #[cfg(not(loom))]
    #[test]
    fn two_threads_lose_nothing() {
        let count: usize = if cfg!(miri) { 500 } else { 1_000_000 };
        let ((mut sender, mut receiver), _) = stream(64);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut sent = 0;
                while sent < count {
                    let data: Vec<u8> = (sent..count.min(sent + 23)).map(|n| n as u8).collect();
                    sent += sender.write(&data).unwrap();
                    sender.publish();
                    std::hint::spin_loop();
                }
            });
            let mut got = 0;
            while got < count {
                let mut buf = [0; 17];
                let len = receiver.read(&mut buf).unwrap();
                receiver.release();
                assert!(buf[..len].iter().zip(got..).all(|(byte, n)| *byte == n as u8));
                got += len;
            }
        });
    }

    #[cfg(loom)]
    #[test]
    fn every_interleaving_delivers_in_order() {
        loom::model(|| {
            let ((mut sender, mut receiver), _) = stream(1);
            let thread = loom::thread::spawn(move || {
                for byte in 1..=2 {
                    while sender.write(&[byte]).unwrap() == 0 {
                        loom::thread::yield_now();
                    }
                    sender.publish();
                }
            });
            for expected in 1..=2 {
                let mut buf = [0];
                while receiver.read(&mut buf).unwrap() == 0 {
                    loom::thread::yield_now();
                }
                receiver.release();
                assert_eq!(buf[0], expected);
            }
            thread.join().unwrap();
        });
    }
}
