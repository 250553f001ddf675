//! Layout of the shared memory of an application and the daemon.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use tidegate_memory::shared::{
    ByteRange, ByteReceiver, ByteSender, Receiver, Region, STREAM_WORDS, Sender, SharedWords,
    WakeFlag, WordRange, ring_words,
};

use super::command::COMMAND_WORDS;
use super::notification::NOTIFICATION_WORDS;
use super::processor::LastProcessor;

/// Slots of the command ring.
pub(crate) const COMMAND_RING_SLOTS: usize = 1024;
/// Slots of the notification ring.
const NOTIFICATION_RING_SLOTS: usize = 1024;

/// Words of the two sides, each in a cache line of its own: sleep flag and processor.
const DAEMON_SLEEPS_WORD: usize = 0;
const DAEMON_PROCESSOR_WORD: usize = 1;
const APPLICATION_SLEEPS_WORD: usize = 8;
const APPLICATION_PROCESSOR_WORD: usize = 9;
const HEADER_WORDS: usize = 16;

const COMMAND_RING_WORD: usize = HEADER_WORDS;
const NOTIFICATION_RING_WORD: usize =
    COMMAND_RING_WORD + ring_words(COMMAND_RING_SLOTS, COMMAND_WORDS);
const SLOTS_WORD: usize =
    NOTIFICATION_RING_WORD + ring_words(NOTIFICATION_RING_SLOTS, NOTIFICATION_WORDS);

/// Word offsets in a socket's slot. Each of the first five has a cache line of its own.
const STATUS_WORD: usize = 0;
const NOTIFY_ON_CHANGE_WORD: usize = 8;
const POLL_ON_WRITE_WORD: usize = 16;
const NOTIFY_ON_TX_SPACE_WORD: usize = 24;
const POLL_ON_RX_SPACE_WORD: usize = 32;
const TO_APPLICATION_WORD: usize = 40;
const TO_DAEMON_WORD: usize = TO_APPLICATION_WORD + STREAM_WORDS;
const SLOT_WORDS: usize = TO_DAEMON_WORD + STREAM_WORDS;

/// Receiving end of a stream in shared memory.
pub type StreamIn = ByteReceiver<WordRange, ByteRange>;
/// Sending end of a stream in shared memory.
pub type StreamOut = ByteSender<WordRange, ByteRange>;

/// Sizes of an application's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Number of socket slots.
    pub sockets: u32,
    /// Bytes of a TCP connection's stream in each direction, a power of two.
    pub tcp_bytes: u32,
    /// Bytes of a UDP socket's datagrams in each direction, a power of two.
    pub udp_bytes: u32,
}

/// Limits of a valid geometry.
const MAX_SOCKETS: u32 = 1 << 20;
const STREAM_BYTES_RANGE: std::ops::RangeInclusive<u32> = 4096..=1 << 26;

impl Geometry {
    /// True if both sides can work with these sizes.
    pub fn is_valid(&self) -> bool {
        let sizes = [self.tcp_bytes, self.udp_bytes];
        (1..=MAX_SOCKETS).contains(&self.sockets)
            && sizes.iter().all(|size| size.is_power_of_two() && STREAM_BYTES_RANGE.contains(size))
    }

    /// Bytes of a slot in each direction: enough for a TCP or a UDP socket.
    fn stream_bytes(&self) -> usize {
        self.tcp_bytes.max(self.udp_bytes) as usize
    }

    /// Words of the control region: rings and slots.
    pub fn control_words(&self) -> usize {
        SLOTS_WORD + self.sockets as usize * SLOT_WORDS
    }

    /// Words of the data region: streams.
    pub fn data_words(&self) -> usize {
        self.sockets as usize * 2 * self.stream_bytes() / 8
    }
}

/// Memory that an application and the daemon share: a control and a data region.
#[derive(Clone)]
pub struct SharedMemory {
    geometry: Geometry,
    control: Arc<Region>,
    data: Arc<Region>,
}

fn unusable(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("cannot use the shared memory: {reason}"))
}

impl SharedMemory {
    /// Joins the two regions.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if they are too small for the geometry.
    pub fn new(geometry: Geometry, control: Region, data: Region) -> io::Result<Self> {
        if !geometry.is_valid()
            || control.words().len() < geometry.control_words()
            || data.words().len() < geometry.data_words()
        {
            return Err(unusable("it is smaller than its geometry requires"));
        }
        Ok(Self { geometry, control: Arc::new(control), data: Arc::new(data) })
    }

    /// Sizes of the memory.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Control and data region, to be sent to the other side.
    pub fn regions(&self) -> [&Region; 2] {
        [&self.control, &self.data]
    }

    fn word_range(&self, start_word: usize, words: usize) -> io::Result<WordRange> {
        WordRange::new(&self.control, start_word..start_word + words)
            .ok_or_else(|| unusable("it is too small"))
    }

    fn wake_flag(&self, word: usize) -> io::Result<WakeFlag<WordRange>> {
        WakeFlag::new(self.word_range(word, 1)?).ok_or_else(|| unusable("it is too small"))
    }

    /// Application's end of the command ring.
    pub(crate) fn command_sender(&self) -> io::Result<Sender<WordRange, COMMAND_WORDS>> {
        let range =
            self.word_range(COMMAND_RING_WORD, ring_words(COMMAND_RING_SLOTS, COMMAND_WORDS))?;
        Sender::new(range, COMMAND_RING_SLOTS).map_err(io::Error::other)
    }

    /// Daemon's end of the command ring.
    pub(crate) fn command_receiver(&self) -> io::Result<Receiver<WordRange, COMMAND_WORDS>> {
        let range =
            self.word_range(COMMAND_RING_WORD, ring_words(COMMAND_RING_SLOTS, COMMAND_WORDS))?;
        Receiver::new(range, COMMAND_RING_SLOTS).map_err(io::Error::other)
    }

    /// Daemon's end of the notification ring.
    pub(crate) fn notification_sender(&self) -> io::Result<Sender<WordRange, NOTIFICATION_WORDS>> {
        let range = self.word_range(
            NOTIFICATION_RING_WORD,
            ring_words(NOTIFICATION_RING_SLOTS, NOTIFICATION_WORDS),
        )?;
        Sender::new(range, NOTIFICATION_RING_SLOTS).map_err(io::Error::other)
    }

    /// Application's end of the notification ring.
    pub(crate) fn notification_receiver(
        &self,
    ) -> io::Result<Receiver<WordRange, NOTIFICATION_WORDS>> {
        let range = self.word_range(
            NOTIFICATION_RING_WORD,
            ring_words(NOTIFICATION_RING_SLOTS, NOTIFICATION_WORDS),
        )?;
        Receiver::new(range, NOTIFICATION_RING_SLOTS).map_err(io::Error::other)
    }

    /// Flag that is set while the daemon sleeps.
    pub(crate) fn daemon_sleeps(&self) -> io::Result<WakeFlag<WordRange>> {
        self.wake_flag(DAEMON_SLEEPS_WORD)
    }

    /// Flag that is set while the application sleeps.
    pub(crate) fn application_sleeps(&self) -> io::Result<WakeFlag<WordRange>> {
        self.wake_flag(APPLICATION_SLEEPS_WORD)
    }

    /// Processor of the network core.
    pub(crate) fn daemon_processor(&self) -> io::Result<LastProcessor> {
        Ok(LastProcessor::new(self.word_range(DAEMON_PROCESSOR_WORD, 1)?))
    }

    /// Processor of the application's thread that waited last.
    pub(crate) fn application_processor(&self) -> io::Result<LastProcessor> {
        Ok(LastProcessor::new(self.word_range(APPLICATION_PROCESSOR_WORD, 1)?))
    }

    /// Bytes that are allocated for streams, including those of closed sockets.
    pub(crate) fn allocated_bytes(&self) -> io::Result<u64> {
        self.data.allocated_bytes()
    }

    /// True if sockets use the memory: it has more than one reference.
    pub(crate) fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.control) > 1
    }

    /// True if the descriptor refers to the control region.
    pub(crate) fn is_backed_by(&self, fd: BorrowedFd<'_>) -> bool {
        let inode_of = |fd: BorrowedFd<'_>| {
            rustix::fs::fstat(fd).map(|metadata| (metadata.st_dev, metadata.st_ino))
        };
        inode_of(self.control.as_fd()).is_ok_and(|own| inode_of(fd) == Ok(own))
    }

    /// True if both refer to the same mapping, not only to memory of the same kind.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.control, &other.control)
    }

    /// Number that no other memory has while this one exists.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.control).addr()
    }

    /// Flag of a slot by which an application requests notifications of changes.
    pub(crate) fn change_flag(&self, slot: u32) -> io::Result<WakeFlag<WordRange>> {
        Ok(self.slot(slot)?.notify_on_change)
    }

    /// Slot with this index.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if there is no such slot.
    pub(crate) fn slot(&self, index: u32) -> io::Result<SocketSlot> {
        if index >= self.geometry.sockets {
            return Err(unusable("it has no such socket slot"));
        }
        let start = SLOTS_WORD + index as usize * SLOT_WORDS;
        Ok(SocketSlot {
            memory: self.clone(),
            index,
            status: self.word_range(start + STATUS_WORD, 1)?,
            notify_on_change: self.wake_flag(start + NOTIFY_ON_CHANGE_WORD)?,
            poll_on_write: self.wake_flag(start + POLL_ON_WRITE_WORD)?,
            notify_on_tx_space: self.wake_flag(start + NOTIFY_ON_TX_SPACE_WORD)?,
            poll_on_rx_space: self.wake_flag(start + POLL_ON_RX_SPACE_WORD)?,
        })
    }
}

/// Slot of a socket: its status, wake flags and streams.
pub(crate) struct SocketSlot {
    memory: SharedMemory,
    index: u32,
    /// Status of the socket, written by the daemon.
    pub(crate) status: WordRange,
    /// The application requests a notification of the next change.
    pub(crate) notify_on_change: WakeFlag<WordRange>,
    /// The daemon requests a poll command when the application writes.
    pub(crate) poll_on_write: WakeFlag<WordRange>,
    /// The application waits for space in the stream to the daemon.
    pub(crate) notify_on_tx_space: WakeFlag<WordRange>,
    /// The daemon waits for space in the stream to the application.
    pub(crate) poll_on_rx_space: WakeFlag<WordRange>,
}

/// Content of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// Bytes of a TCP connection.
    Bytes,
    /// Datagrams, each with a header.
    Datagrams,
}

/// Exclusive lock of the memory among processes (`fcntl`). The kernel releases the lock when
/// its process exits, however it exits.
///
/// A robust mutex in the memory would need no system call, but its list of held mutexes has
/// pointers there: a process that shares the memory could make others write anywhere.
pub(crate) struct MemoryLock(Arc<Region>);

impl MemoryLock {
    fn acquire(region: &Arc<Region>) -> io::Result<Self> {
        loop {
            match rustix::fs::fcntl_lock(region, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Self(Arc::clone(region))),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        // Unlocking a held lock does not fail.
        let _ = rustix::fs::fcntl_lock(&self.0, FlockOperation::Unlock);
    }
}

impl SocketSlot {
    /// Same slot for another attachment, with the change flag of a slot in that attachment's
    /// `memory`.
    pub(crate) fn with_change_flag_in(&self, memory: &SharedMemory, slot: u32) -> io::Result<Self> {
        let notify_on_change = memory.change_flag(slot)?;
        Ok(Self { notify_on_change, ..self.memory.slot(self.index)? })
    }

    /// Memory of the slot.
    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// True if the slot is in this memory.
    pub(crate) fn is_in(&self, memory: &SharedMemory) -> bool {
        self.memory.is_same(memory)
    }

    /// Locks the memory against the other processes that use its sockets.
    pub(crate) fn lock(&self) -> io::Result<MemoryLock> {
        MemoryLock::acquire(&self.memory.control)
    }

    /// Zeroes all words of the slot, as new streams require.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let start = SLOTS_WORD + self.index as usize * SLOT_WORDS;
        let range = self.memory.word_range(start, SLOT_WORDS)?;
        for word in range.words() {
            word.store(0, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    }

    /// Frees the memory of the slot's streams.
    pub(crate) fn discard(&self) {
        let bytes = 2 * self.memory.geometry.stream_bytes();
        // On failure the pages only stay allocated.
        let _ = self.memory.data.discard(self.index as usize * bytes, bytes);
    }

    fn stream(&self, kind: StreamKind, to_daemon: bool) -> io::Result<(WordRange, ByteRange)> {
        let Geometry { tcp_bytes, udp_bytes, .. } = self.memory.geometry;
        let stream_bytes = self.memory.geometry.stream_bytes();
        let start = SLOTS_WORD + self.index as usize * SLOT_WORDS;
        let indices = if to_daemon { TO_DAEMON_WORD } else { TO_APPLICATION_WORD };
        let indices = self.memory.word_range(start + indices, STREAM_WORDS)?;
        let len = match kind {
            StreamKind::Bytes => tcp_bytes,
            StreamKind::Datagrams => udp_bytes,
        };
        let start_byte = (2 * self.index as usize + usize::from(to_daemon)) * stream_bytes;
        let bytes = ByteRange::new(&self.memory.data, start_byte, len as usize);
        Ok((indices, bytes.ok_or_else(|| unusable("it is too small"))?))
    }

    /// Daemon's ends: the stream that it reads and the stream that it writes.
    pub(crate) fn daemon_streams(&self, kind: StreamKind) -> io::Result<(StreamIn, StreamOut)> {
        self.streams(kind, true)
    }

    /// Application's ends: the stream that it reads and the stream that it writes.
    pub(crate) fn application_streams(
        &self,
        kind: StreamKind,
    ) -> io::Result<(StreamIn, StreamOut)> {
        self.streams(kind, false)
    }

    fn streams(&self, kind: StreamKind, of_daemon: bool) -> io::Result<(StreamIn, StreamOut)> {
        let (indices, bytes) = self.stream(kind, of_daemon)?;
        let read = StreamIn::new(indices, bytes).map_err(io::Error::other)?;
        let (indices, bytes) = self.stream(kind, !of_daemon)?;
        let written = StreamOut::new(indices, bytes).map_err(io::Error::other)?;
        Ok((read, written))
    }
}
