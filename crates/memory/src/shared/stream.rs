//! Stream of bytes from one process to another.
//!
//! The indices are separate words, so that the indices of many streams can lie together in
//! memory that is always allocated, and the bytes in memory that is allocated when used.

use super::{PeerError, SharedBytes, SharedWords};
use crate::sync::Ordering;

/// Word offsets of the two indices, each on a cache line of its own.
const PUBLISHED_WORD: usize = 0;
const RELEASED_WORD: usize = 8;

/// Words that the indices of a stream need.
pub const STREAM_WORDS: usize = 16;

/// Error of creating a stream in given memory.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The length of the byte memory is not a power of two.
    #[error("the capacity of a stream must be a power of two, not {0} bytes")]
    Capacity(usize),
    /// Too few words for the indices.
    #[error("the indices of a stream need {STREAM_WORDS} words of memory; available: {0}")]
    TooSmall(usize),
}

/// A stream in memory, and the progress of one end.
struct StreamEnd<M, B> {
    indices: M,
    bytes: B,
    capacity: u64,
    /// Bytes this end has written or read. No other process can change it.
    own_index: u64,
    /// Bytes the peer was last seen to have read or written.
    peer_index: u64,
}

impl<M: SharedWords, B: SharedBytes> StreamEnd<M, B> {
    fn new(indices: M, bytes: B) -> Result<Self, StreamError> {
        let (words, len) = (indices.words().len(), bytes.len());
        if words < STREAM_WORDS {
            return Err(StreamError::TooSmall(words));
        }
        if !len.is_power_of_two() {
            return Err(StreamError::Capacity(len));
        }
        Ok(Self { indices, bytes, capacity: len as u64, own_index: 0, peer_index: 0 })
    }

    /// Offset of byte number `position` in the memory, and number of contiguous bytes from there.
    fn locate(&self, position: u64) -> (usize, usize) {
        let start = (position & (self.capacity - 1)) as usize;
        (start, self.bytes.len() - start)
    }
}

/// Writing end of a stream.
pub struct ByteSender<M, B>(StreamEnd<M, B>);

impl<M: SharedWords, B: SharedBytes> ByteSender<M, B> {
    /// Creates the writing end of a stream whose indices were zero when both ends began.
    ///
    /// # Errors
    /// See [`StreamError`].
    pub fn new(indices: M, bytes: B) -> Result<Self, StreamError> {
        StreamEnd::new(indices, bytes).map(Self)
    }

    /// Resumes where another process left this end: the published index becomes the index of this
    /// end.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn resume(&mut self) -> Result<(), PeerError> {
        let Self(end) = self;
        let words = end.indices.words();
        let own = words[PUBLISHED_WORD].load(Ordering::Acquire);
        let seen = words[RELEASED_WORD].load(Ordering::Acquire);
        if seen > own || own - seen > end.capacity {
            return Err(PeerError);
        }
        (end.own_index, end.peer_index) = (own, seen);
        Ok(())
    }

    /// Free space in bytes.
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn space(&mut self) -> Result<usize, PeerError> {
        let Self(end) = self;
        let released = end.indices.words()[RELEASED_WORD].load(Ordering::Acquire);
        // The index never goes back, nor beyond the bytes that were written.
        if !(end.peer_index..=end.own_index).contains(&released) {
            return Err(PeerError);
        }
        end.peer_index = released;
        Ok((end.capacity - (end.own_index - end.peer_index)) as usize)
    }

    /// Free space in bytes, when at most `limit` bytes may be outstanding (not yet released by the
    /// peer).
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn space_within(&mut self, limit: usize) -> Result<usize, PeerError> {
        let unread = self.unread()?;
        let space = self.0.capacity as usize - unread;
        Ok(space.min(limit.saturating_sub(unread)))
    }

    /// Bytes that were written and that the peer has not released yet.
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn unread(&mut self) -> Result<usize, PeerError> {
        Ok(self.0.capacity as usize - self.space()?)
    }

    /// Writes as much of `data` as fits, visible to the peer after [`ByteSender::publish`]. Returns
    /// the number of bytes written.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn write(&mut self, data: &[u8]) -> Result<usize, PeerError> {
        self.write_within(usize::MAX, data)
    }

    /// Same as [`ByteSender::write`], within the limit of [`ByteSender::space_within`].
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn write_within(&mut self, limit: usize, data: &[u8]) -> Result<usize, PeerError> {
        let data = &data[..data.len().min(self.space_within(limit)?)];
        let Self(end) = self;
        let (start, contiguous) = end.locate(end.own_index);
        let (first, rest) = data.split_at(contiguous.min(data.len()));
        end.bytes.write_at(start, first);
        end.bytes.write_at(0, rest);
        end.own_index += data.len() as u64;
        Ok(data.len())
    }

    /// Makes all written bytes visible to the peer.
    #[inline]
    pub fn publish(&mut self) {
        self.0.indices.words()[PUBLISHED_WORD].store(self.0.own_index, Ordering::Release);
    }
}

/// Reading end of a stream.
pub struct ByteReceiver<M, B>(StreamEnd<M, B>);

impl<M: SharedWords, B: SharedBytes> ByteReceiver<M, B> {
    /// Creates the reading end of a stream whose indices were zero when both ends began.
    ///
    /// # Errors
    /// See [`StreamError`].
    pub fn new(indices: M, bytes: B) -> Result<Self, StreamError> {
        StreamEnd::new(indices, bytes).map(Self)
    }

    /// Resumes where another process left this end: the released index becomes the index of this
    /// end.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn resume(&mut self) -> Result<(), PeerError> {
        let Self(end) = self;
        let words = end.indices.words();
        let own = words[RELEASED_WORD].load(Ordering::Acquire);
        let seen = words[PUBLISHED_WORD].load(Ordering::Acquire);
        if own > seen || seen - own > end.capacity {
            return Err(PeerError);
        }
        (end.own_index, end.peer_index) = (own, seen);
        Ok(())
    }

    /// Number of bytes that can be read now.
    ///
    /// # Errors
    /// [`PeerError`].
    #[inline]
    pub fn available(&mut self) -> Result<usize, PeerError> {
        let Self(end) = self;
        let published = end.indices.words()[PUBLISHED_WORD].load(Ordering::Acquire);
        if published < end.peer_index || published - end.own_index > end.capacity {
            return Err(PeerError);
        }
        end.peer_index = published;
        Ok((end.peer_index - end.own_index) as usize)
    }

    /// Number of bytes that the sender has published so far, as it claims: to compare, not to
    /// rely on.
    pub fn published(&self) -> u64 {
        self.0.indices.words()[PUBLISHED_WORD].load(Ordering::Acquire)
    }

    /// Copies bytes from `skip` bytes ahead without consuming them. Returns the number of bytes
    /// copied.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn peek(&mut self, skip: usize, buf: &mut [u8]) -> Result<usize, PeerError> {
        let len = buf.len().min(self.available()?.saturating_sub(skip));
        let Self(end) = self;
        let (start, contiguous) = end.locate(end.own_index + skip as u64);
        let (first, rest) = buf[..len].split_at_mut(contiguous.min(len));
        end.bytes.read_at(start, first);
        end.bytes.read_at(0, rest);
        Ok(len)
    }

    /// Consumes `bytes` bytes, or all available ones. The sender can reuse their space after
    /// [`ByteReceiver::release`].
    #[inline]
    pub fn skip(&mut self, bytes: usize) {
        let Self(end) = self;
        end.own_index += (bytes as u64).min(end.peer_index - end.own_index);
    }

    /// Reads as many bytes as are available and fit. Returns the number of bytes read.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn read(&mut self, buf: &mut [u8]) -> Result<usize, PeerError> {
        let len = self.peek(0, buf)?;
        self.skip(len);
        Ok(len)
    }

    /// Frees the space of all consumed bytes for the sender.
    #[inline]
    pub fn release(&mut self) {
        self.0.indices.words()[RELEASED_WORD].store(self.0.own_index, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{Arc, AtomicU8, AtomicU64};

    impl SharedBytes for Arc<Vec<AtomicU8>> {
        fn len(&self) -> usize {
            Vec::len(self)
        }

        fn write_at(&self, offset: usize, from: &[u8]) {
            let to = self.iter().skip(offset);
            to.zip(from).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        }

        fn read_at(&self, offset: usize, to: &mut [u8]) {
            let from = self.iter().skip(offset);
            from.zip(to).for_each(|(from, to)| *to = from.load(Ordering::Relaxed));
        }
    }

    type Memory = (Arc<Vec<AtomicU64>>, Arc<Vec<AtomicU8>>);
    type StreamPair = (
        ByteSender<Arc<Vec<AtomicU64>>, Arc<Vec<AtomicU8>>>,
        ByteReceiver<Arc<Vec<AtomicU64>>, Arc<Vec<AtomicU8>>>,
    );

    fn stream(capacity: usize) -> (StreamPair, Memory) {
        let words: Arc<Vec<_>> = Arc::new((0..STREAM_WORDS).map(|_| AtomicU64::new(0)).collect());
        let bytes: Arc<Vec<_>> = Arc::new((0..capacity).map(|_| AtomicU8::new(0)).collect());
        let sender = ByteSender::new(Arc::clone(&words), Arc::clone(&bytes)).unwrap();
        let receiver = ByteReceiver::new(Arc::clone(&words), Arc::clone(&bytes)).unwrap();
        ((sender, receiver), (words, bytes))
    }

    #[cfg(not(loom))]
    #[test]
    fn bytes_arrive_unchanged_across_wraps() {
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
            assert_eq!(sender.space(), Ok(8 - data.len()), "nothing was released");
            assert_eq!(sender.unread(), Ok(data.len()));
            receiver.release();
            assert_eq!(sender.space(), Ok(8));
        }
        assert_eq!(sender.write_within(3, &[0; 9]), Ok(3), "at most the limit");
        assert_eq!(sender.write_within(3, &[0; 9]), Ok(0));
        assert_eq!(sender.space_within(5), Ok(2));
        assert_eq!(sender.write(&[0; 9]), Ok(5), "at most the free space");
        receiver.skip(100);
        receiver.release();
        assert_eq!(sender.space(), Ok(0), "what was not published cannot be skipped");
    }

    #[cfg(not(loom))]
    #[test]
    fn rejects_unsuitable_memory() {
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
    fn detects_an_invalid_peer_index() {
        for lie in [9, u64::MAX, u64::MAX / 2, 1 << 63] {
            let ((mut sender, mut receiver), (words, _)) = stream(8);
            assert_eq!(sender.write(&[1; 4]), Ok(4));
            words[PUBLISHED_WORD].store(lie, Ordering::Release);
            assert_eq!(receiver.available(), Err(PeerError));
            assert_eq!(receiver.peek(3, &mut [0; 9]), Err(PeerError));
            words[RELEASED_WORD].store(lie, Ordering::Release);
            assert_eq!(sender.space(), Err(PeerError));
            assert_eq!(sender.write(&[1]), Err(PeerError));
        }
        // Indices that go back.
        let ((mut sender, mut receiver), (words, _)) = stream(8);
        assert_eq!(sender.write(&[1; 4]), Ok(4));
        sender.publish();
        assert_eq!(receiver.read(&mut [0; 4]), Ok(4));
        receiver.release();
        assert_eq!(sender.space(), Ok(8));
        words[PUBLISHED_WORD].store(3, Ordering::Release);
        assert_eq!(receiver.available(), Err(PeerError));
        words[RELEASED_WORD].store(3, Ordering::Release);
        assert_eq!(sender.space(), Err(PeerError));
    }

    #[cfg(not(loom))]
    #[test]
    fn resumed_ends_continue_where_the_first_stopped() {
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
        words[PUBLISHED_WORD].store(u64::MAX, Ordering::Release);
        assert_eq!((second.resume(), reader.resume()), (Err(PeerError), Err(PeerError)));
        words[PUBLISHED_WORD].store(0, Ordering::Release);
        assert_eq!((second.resume(), reader.resume()), (Err(PeerError), Err(PeerError)));
    }

    #[cfg(not(loom))]
    #[test]
    fn two_threads_deliver_every_byte() {
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
