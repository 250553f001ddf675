//! What every receive queue is built around: something that holds packets
//! between producers and readers.

use super::lock::LockStatistics;

/// Something that is queued.
pub trait Packet: Send {
    /// What it counts against a limit in bytes.
    fn bytes(&self) -> usize;
}

impl Packet for crate::Frame {
    fn bytes(&self) -> usize {
        self.len()
    }
}

/// Who uses a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threads that put packets in.
    pub producers: usize,
    /// Threads that take packets out.
    pub readers: usize,
    /// Packets for which a structure of fixed size has room at least.
    pub capacity: usize,
}

/// A structure and what each of its users keeps to itself.
pub struct Opened<S: Structure> {
    /// What they share.
    pub structure: S,
    /// One for each producer.
    pub producers: Vec<S::Producer>,
    /// One for each reader.
    pub readers: Vec<S::Reader>,
}

/// Holds packets between producers and readers. Limits, sleeping and closing
/// are not its business.
pub trait Structure: Send + Sync + Sized {
    /// What it holds.
    type Packet: Packet;
    /// What a producer keeps to itself.
    type Producer: Send;
    /// What a reader keeps to itself.
    type Reader: Send;
    /// Whether a reader sees the packets of one producer in the order in which
    /// they were put in.
    const KEEPS_ORDER: bool;
    /// Whether each reader has packets that no other reader can take.
    const BED_PER_READER: bool = false;

    /// Makes an empty structure.
    fn open(shape: &Shape) -> Opened<Self>;

    /// Puts a packet in. It may stay out of the readers' sight until
    /// [`Structure::flush`]. Says which bed to look for a sleeping reader in: 0,
    /// or the reader's number with [`Structure::BED_PER_READER`].
    ///
    /// # Errors
    /// Gives the packet back when there is no room.
    fn put(
        &self,
        producer: &mut Self::Producer,
        packet: Self::Packet,
    ) -> Result<usize, Self::Packet>;

    /// Shows readers what was put in.
    #[inline]
    fn flush(&self, _producer: &mut Self::Producer) {}

    /// Takes a packet out.
    fn take(&self, reader: &mut Self::Reader) -> Option<Self::Packet>;

    /// Takes packets out until `most` are taken or none is left; returns how
    /// many.
    #[inline]
    fn take_each(
        &self,
        reader: &mut Self::Reader,
        most: usize,
        mut taken: impl FnMut(Self::Packet),
    ) -> usize {
        let mut count = 0;
        while count < most {
            let Some(packet) = self.take(reader) else { break };
            taken(packet);
            count += 1;
        }
        count
    }

    /// Whether another reader that looks now could find a packet; `true` when
    /// finding out costs as much as looking.
    #[inline]
    fn may_have_more(&self, _reader: &mut Self::Reader) -> bool {
        true
    }

    /// How its locks were used, if it has locks that count.
    fn statistics(&self) -> Option<LockStatistics> {
        None
    }
}

/// A value alone on its cache lines: two, since processors fetch them in pairs.
#[repr(align(128))]
pub(super) struct Padded<T>(pub(super) T);
