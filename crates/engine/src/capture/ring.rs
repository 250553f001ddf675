//! Shared memory through which network cores pass copies of frames to a reader.
//!
//! The reader creates the memory and passes its descriptor. Each core has a ring of its own. A
//! core that finds its ring full counts the copy as lost: it never waits for the reader.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_memory::shared::{
    ByteRange, ByteReceiver, ByteSender, PeerError, Region, STREAM_WORDS, SharedWords, WordRange,
};

/// Maximum number of cores of one capture.
pub const MAX_CAPTURE_CORES: usize = 64;

/// Smallest and largest ring of a core, in bytes.
pub const MIN_RING_BYTES: usize = 1 << 16;
/// See [`MIN_RING_BYTES`].
pub const MAX_RING_BYTES: usize = 1 << 26;

/// Words of a core before the bytes of all rings: the indices of its ring, then its counters.
const CORE_WORDS: usize = STREAM_WORDS + COUNTER_WORDS;
const COUNTER_WORDS: usize = 16;
const SELECTED_WORD: usize = 0;
const LOST_WORD: usize = 1;

const WORD_BYTES: usize = size_of::<u64>();

/// Bytes of a record before the bytes of the frame.
const HEADER_BYTES: usize = 32;

/// Maximum number of bytes of a frame that a record has.
pub const MAX_SNAP_BYTES: usize = 1 << 17;

/// Way of a recorded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureDirection {
    /// Received from the device.
    Received,
    /// Passed to the device.
    Transmitted,
    /// Sent by the stack to one of its own addresses.
    Loopback,
    /// No frame: the program of a socket was notified that it can read. The data is the text of
    /// the protocol, the local address and the peer's address, separated by spaces; the peer's
    /// address is missing for an unconnected socket.
    Notified,
}

/// Copy of a frame, and what became of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureRecord<'a> {
    /// Time at which the frame was received or transmitted, in nanoseconds of the system's
    /// monotonic clock.
    pub time_ns: u64,
    /// Time at which the stack was done with a received frame, by the same clock.
    pub done_ns: u64,
    /// Way of the frame.
    pub direction: CaptureDirection,
    /// Drop reason, as number in the list of all reasons.
    pub drop_reason: Option<u16>,
    /// Length of the frame in bytes.
    pub original_bytes: usize,
    /// Copies lost since the record before.
    pub lost: u32,
    /// First bytes of the frame.
    pub data: &'a [u8],
}

/// Layout of the shared memory of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureLayout {
    cores: usize,
    ring_bytes: usize,
}

impl CaptureLayout {
    /// Layout for this many cores, with this many bytes for each.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for numbers out of range.
    pub fn new(cores: usize, ring_bytes: usize) -> io::Result<Self> {
        let fits = (1..=MAX_CAPTURE_CORES).contains(&cores)
            && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes)
            && ring_bytes.is_power_of_two();
        if fits {
            return Ok(Self { cores, ring_bytes });
        }
        let message = format!(
            "a capture has 1 to {MAX_CAPTURE_CORES} cores and rings of {MIN_RING_BYTES} to \
             {MAX_RING_BYTES} bytes, a power of two"
        );
        Err(io::Error::new(io::ErrorKind::InvalidInput, message))
    }

    /// Words of the shared memory.
    pub fn words(&self) -> usize {
        self.cores * (CORE_WORDS + self.ring_bytes / WORD_BYTES)
    }

    fn indices(&self, memory: &Arc<Region>, core: usize) -> Option<WordRange> {
        let start = core * CORE_WORDS;
        WordRange::new(memory, start..start + STREAM_WORDS)
    }

    fn counters(&self, memory: &Arc<Region>, core: usize) -> Option<WordRange> {
        let start = core * CORE_WORDS + STREAM_WORDS;
        WordRange::new(memory, start..start + COUNTER_WORDS)
    }

    fn bytes(&self, memory: &Arc<Region>, core: usize) -> Option<ByteRange> {
        let start = self.cores * CORE_WORDS * WORD_BYTES + core * self.ring_bytes;
        ByteRange::new(memory, start, self.ring_bytes)
    }

    /// Indices, counters and bytes of a core.
    fn parts(
        &self,
        memory: &Arc<Region>,
        core: usize,
    ) -> io::Result<(WordRange, WordRange, ByteRange)> {
        let indices = self.indices(memory, core);
        let parts = indices.zip(self.counters(memory, core)).zip(self.bytes(memory, core));
        let ((indices, counters), bytes) = parts.ok_or_else(|| {
            let message = "the shared memory of the capture is too small";
            io::Error::new(io::ErrorKind::InvalidData, message)
        })?;
        Ok((indices, counters, bytes))
    }
}

/// Writing end of the ring of one core.
pub struct CaptureWriter {
    ring: ByteSender<WordRange, ByteRange>,
    counters: WordRange,
    selected: u64,
    lost: u64,
    /// Copies lost since the last record.
    lost_since: u32,
}

impl CaptureWriter {
    /// Writing end of `core` in the memory of a reader.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the memory is too small.
    pub fn new(layout: CaptureLayout, memory: &Arc<Region>, core: usize) -> io::Result<Self> {
        let (indices, counters, bytes) = layout.parts(memory, core)?;
        let ring = ByteSender::new(indices, bytes).map_err(io::Error::other)?;
        Ok(Self { ring, counters, selected: 0, lost: 0, lost_since: 0 })
    }

    /// Writes a record if there is space for all of it, and counts it as lost otherwise.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn write(&mut self, record: &CaptureRecord<'_>) -> Result<(), PeerError> {
        self.selected += 1;
        let space = self.ring.space()?;
        if space < HEADER_BYTES + record.data.len() {
            self.lost += 1;
            self.lost_since = self.lost_since.saturating_add(1);
            return Ok(());
        }
        let lost = std::mem::take(&mut self.lost_since);
        self.ring.write(&encode_header(&CaptureRecord { lost, ..*record }))?;
        self.ring.write(record.data)?;
        Ok(())
    }

    /// Makes all records visible to the reader.
    pub fn publish(&mut self) {
        self.ring.publish();
        let words = self.counters.words();
        for (word, count) in [(SELECTED_WORD, self.selected), (LOST_WORD, self.lost)] {
            if let Some(word) = words.get(word) {
                word.store(count, Ordering::Relaxed);
            }
        }
    }
}

fn encode_header(record: &CaptureRecord<'_>) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    let kept = record.data.len() as u32;
    header[..4].copy_from_slice(&kept.to_le_bytes());
    header[4..8].copy_from_slice(&(record.original_bytes as u32).to_le_bytes());
    header[8..16].copy_from_slice(&record.time_ns.to_le_bytes());
    header[16..24].copy_from_slice(&record.done_ns.to_le_bytes());
    let reason = record.drop_reason.map_or(0, |reason| reason + 1);
    header[24..26].copy_from_slice(&reason.to_le_bytes());
    header[26] = match record.direction {
        CaptureDirection::Received => 0,
        CaptureDirection::Transmitted => 1,
        CaptureDirection::Loopback => 2,
        CaptureDirection::Notified => 3,
    };
    header[28..].copy_from_slice(&record.lost.to_le_bytes());
    header
}

/// Reading end of the ring of one core.
pub struct CaptureReader {
    ring: ByteReceiver<WordRange, ByteRange>,
    counters: WordRange,
    data: Vec<u8>,
}

/// Numbers of a capture so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureCounts {
    /// Frames that the filter has selected.
    pub selected: u64,
    /// Copies that were lost because the reader was too slow.
    pub lost: u64,
}

impl CaptureReader {
    /// Reading end of `core`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the memory is too small.
    pub fn new(layout: CaptureLayout, memory: &Arc<Region>, core: usize) -> io::Result<Self> {
        let (indices, counters, bytes) = layout.parts(memory, core)?;
        let ring = ByteReceiver::new(indices, bytes).map_err(io::Error::other)?;
        Ok(Self { ring, counters, data: Vec::new() })
    }

    /// Reads the next record, if there is one.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for a record that breaks the format.
    pub fn read(&mut self) -> io::Result<Option<CaptureRecord<'_>>> {
        let invalid = |_| io::Error::new(io::ErrorKind::InvalidData, "invalid capture record");
        let mut header = [0; HEADER_BYTES];
        if self.ring.available().map_err(invalid)? < HEADER_BYTES {
            return Ok(None);
        }
        self.ring.read(&mut header).map_err(invalid)?;
        let word = |at: usize| -> u32 {
            header[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
        };
        let long = |at: usize| -> u64 {
            header[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let kept = word(0) as usize;
        if kept > MAX_SNAP_BYTES || self.ring.available().map_err(invalid)? < kept {
            return Err(invalid(PeerError));
        }
        self.data.resize(kept, 0);
        self.ring.read(&mut self.data).map_err(invalid)?;
        self.ring.release();
        let direction = match header[26] {
            0 => CaptureDirection::Received,
            1 => CaptureDirection::Transmitted,
            2 => CaptureDirection::Loopback,
            _ => CaptureDirection::Notified,
        };
        Ok(Some(CaptureRecord {
            time_ns: long(8),
            done_ns: long(16),
            direction,
            drop_reason: u16::from_le_bytes([header[24], header[25]]).checked_sub(1),
            original_bytes: word(4) as usize,
            lost: word(28),
            data: &self.data,
        }))
    }

    /// Numbers of this core so far, as the core says.
    pub fn counts(&self) -> CaptureCounts {
        let words = self.counters.words();
        let count = |word: usize| words.get(word).map_or(0, |word| word.load(Ordering::Relaxed));
        CaptureCounts { selected: count(SELECTED_WORD), lost: count(LOST_WORD) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(data: &[u8]) -> CaptureRecord<'_> {
        CaptureRecord {
            time_ns: 7,
            done_ns: 9,
            direction: CaptureDirection::Received,
            drop_reason: Some(0),
            original_bytes: 1500,
            lost: 0,
            data,
        }
    }

    #[test]
    fn slow_reader_loses_copies_and_learns_how_many() {
        let layout = CaptureLayout::new(2, MIN_RING_BYTES).unwrap();
        let memory = Arc::new(Region::reserve(layout.words()).unwrap());
        let mut writer = CaptureWriter::new(layout, &memory, 1).unwrap();
        let mut reader = CaptureReader::new(layout, &memory, 1).unwrap();
        let data = [5; 1000];
        for _ in 0..100 {
            writer.write(&record(&data)).unwrap();
        }
        writer.publish();
        let mut read = 0;
        while let Some(got) = reader.read().unwrap() {
            assert_eq!(got, record(&data));
            read += 1;
        }
        assert_eq!(read, MIN_RING_BYTES / (HEADER_BYTES + 1000));
        assert_eq!(reader.counts(), CaptureCounts { selected: 100, lost: 100 - read as u64 });
        writer.write(&record(&data)).unwrap();
        writer.publish();
        assert_eq!(reader.read().unwrap().unwrap().lost, 100 - read as u32);
    }

    #[test]
    fn refuses_sizes_out_of_range() {
        for (cores, bytes) in [(0, 1 << 16), (65, 1 << 16), (1, 1 << 15), (1, 100_000)] {
            assert!(CaptureLayout::new(cores, bytes).is_err());
        }
        let layout = CaptureLayout::new(1, MIN_RING_BYTES).unwrap();
        let memory = Arc::new(Region::reserve(layout.words() - 1).unwrap());
        assert!(CaptureWriter::new(layout, &memory, 0).is_err());
    }
}
