//! The core of every receive queue: a data structure that holds packets between producers and
//! readers.

use crate::lock::LockStatistics;

/// An item that can be queued.
pub trait Packet: Send {
    /// Bytes charged against a limit.
    fn bytes(&self) -> usize;
}

impl Packet for tidegate_memory::Frame {
    fn bytes(&self) -> usize {
        self.len()
    }
}

/// Number of users and capacity of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueShape {
    /// Number of threads that put packets in.
    pub producers: usize,
    /// Number of threads that take packets out.
    pub readers: usize,
    /// Minimum capacity in packets, for a structure of fixed size.
    pub capacity: usize,
}

/// A structure and the private state of each of its users.
pub struct StructureParts<S: Structure> {
    /// Shared part.
    pub structure: S,
    /// State of each producer.
    pub producers: Vec<S::Producer>,
    /// State of each reader.
    pub readers: Vec<S::Reader>,
}

/// Holds packets between producers and readers. Limits, sleeping and closing are handled
/// outside.
pub trait Structure: Send + Sync + Sized {
    /// Type of the queued packets.
    type Packet: Packet;
    /// Private state of a producer.
    type Producer: Send;
    /// Private state of a reader.
    type Reader: Send;
    /// True if a reader sees the packets of one producer in the order in which they were put in.
    const KEEPS_ORDER: bool;
    /// True if each reader has packets that no other reader can take.
    const PARKER_PER_READER: bool = false;

    /// Creates an empty structure.
    fn open(shape: &QueueShape) -> StructureParts<Self>;

    /// Puts a packet in. The packet may stay invisible to readers until [`Structure::flush`].
    ///
    /// Returns the index of the parker on which to wake a reader: 0, or the reader's index with
    /// [`Structure::PARKER_PER_READER`].
    ///
    /// # Errors
    /// The packet itself when the structure is full.
    fn enqueue(
        &self,
        producer: &mut Self::Producer,
        packet: Self::Packet,
    ) -> Result<usize, Self::Packet>;

    /// Makes all packets that were put in visible to readers.
    #[inline]
    fn flush(&self, _producer: &mut Self::Producer) {}

    /// Takes a packet out.
    fn dequeue(&self, reader: &mut Self::Reader) -> Option<Self::Packet>;

    /// Takes packets out until `max` are taken or none is left; returns their number.
    #[inline]
    fn dequeue_each(
        &self,
        reader: &mut Self::Reader,
        max: usize,
        mut taken: impl FnMut(Self::Packet),
    ) -> usize {
        let mut count = 0;
        while count < max {
            let Some(packet) = self.dequeue(reader) else { break };
            taken(packet);
            count += 1;
        }
        count
    }

    /// True if another reader could find a packet now; also true when finding out costs as much
    /// as trying.
    #[inline]
    fn may_have_more(&self, _reader: &mut Self::Reader) -> bool {
        true
    }

    /// Usage of the structure's locks, if it has metered locks.
    fn statistics(&self) -> Option<LockStatistics> {
        None
    }
}

/// A value alone on its cache lines: two, since processors fetch them in pairs.
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub(super) T);
