//! Frames in the blocks of a TPACKET_V3 ring.
//!
//! A block is a list of frames, each with a header that has the offset of the next frame
//! (linux/if_packet.h). The kernel writes the blocks, but offsets and lengths are checked all
//! the same: a kernel bug must not become a memory error here.

use super::sys::Ring;
use crate::vnet;

// Offsets in `struct tpacket_block_desc`.
const BLOCK_FRAMES: usize = 12;
const BLOCK_FIRST: usize = 16;

// Offsets in `struct tpacket3_hdr`.
const NEXT: usize = 0;
const SNAP_LEN: usize = 12;
const LEN: usize = 16;
const STATUS: usize = 20;
const DATA: usize = 24;
const VLAN_TAG: usize = 32;
const VLAN_PROTOCOL: usize = 36;
const HEADER_BYTES: usize = 48;

/// A frame in a block of the ring.
#[derive(Debug, PartialEq, Eq)]
pub struct RingFrame<'a> {
    /// Bytes that the kernel captured.
    pub data: &'a [u8],
    /// Bytes of the frame.
    pub len: usize,
    /// The virtio header.
    pub vnet: vnet::RawHeader,
    /// VLAN tag that the kernel removed: protocol and tag control information.
    pub vlan: Option<(u16, u16)>,
}

impl RingFrame<'_> {
    /// True when the frame was longer than the captured bytes.
    pub fn is_truncated(&self) -> bool {
        self.len > self.data.len()
    }
}

/// Result of [`RingReader::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum NextFrame<'a> {
    /// A frame.
    Frame(RingFrame<'a>),
    /// A header with an impossible offset or length; `lost` frames of its block are skipped.
    Malformed {
        /// Frames that were left in the block.
        lost: u32,
    },
    /// No frame is waiting.
    Empty,
}

/// Reads the frames of a ring.
pub struct RingReader {
    ring: Ring,
    /// Position in the current block; `None` between blocks.
    cursor: Option<BlockCursor>,
}

#[derive(Clone, Copy)]
struct BlockCursor {
    /// Frames of the block that are not read yet.
    left: u32,
    /// Offset of the next frame's header in the block.
    next: usize,
}

impl RingReader {
    pub fn new(ring: Ring) -> Self {
        Self { ring, cursor: None }
    }

    /// Returns true when [`RingReader::next`] would return a frame.
    pub fn has_frame(&self) -> bool {
        self.cursor.is_some_and(|place| place.left > 0) || {
            self.cursor.is_none() && self.ring.is_ready()
        }
    }

    /// Returns a finished block to the kernel. Call before each [`RingReader::next`]; a separate
    /// function, because a [`RingFrame`] borrows the block.
    #[inline]
    pub fn release_finished_block(&mut self) {
        if self.cursor.is_some_and(|place| place.left == 0) {
            self.ring.release();
            self.cursor = None;
        }
    }

    /// Returns the next frame. [`RingReader::release_finished_block`] releases empty blocks.
    #[inline]
    pub fn next(&mut self) -> NextFrame<'_> {
        let Some(block) = self.ring.block() else { return NextFrame::Empty };
        let cursor = match self.cursor {
            Some(cursor) => cursor,
            None => block_start(block),
        };
        if cursor.left == 0 {
            self.cursor = Some(cursor);
            return NextFrame::Empty;
        }
        match parse_frame(block, cursor.next) {
            Some((frame, advance)) => {
                self.cursor =
                    Some(BlockCursor { left: cursor.left - 1, next: cursor.next + advance });
                NextFrame::Frame(frame)
            }
            None => {
                self.cursor = Some(BlockCursor { left: 0, next: 0 });
                NextFrame::Malformed { lost: cursor.left }
            }
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn block_start(block: &[u8]) -> BlockCursor {
    BlockCursor {
        // Limited to the frames that fit in the block, so that a wrong count ends too.
        left: word(block, BLOCK_FRAMES).unwrap_or(0).min((block.len() / HEADER_BYTES) as u32),
        next: word(block, BLOCK_FIRST).unwrap_or(0) as usize,
    }
}

/// Parses the frame whose header is at `at`; returns it with the distance to the next header.
fn parse_frame(block: &[u8], at: usize) -> Option<(RingFrame<'_>, usize)> {
    let header = block.get(at..)?;
    let data_at = usize::from(half(header, DATA)?);
    let kept = word(header, SNAP_LEN)? as usize;
    let data = header.get(data_at..)?.get(..kept)?;
    let vnet = header.get(data_at.checked_sub(vnet::HEADER_BYTES)?..)?.first_chunk().copied()?;
    let status = word(header, STATUS)?;
    let vlan = if status & libc::TP_STATUS_VLAN_VALID == 0 {
        None
    } else if status & libc::TP_STATUS_VLAN_TPID_VALID == 0 {
        Some((0x8100, word(header, VLAN_TAG)? as u16))
    } else {
        Some((half(header, VLAN_PROTOCOL)?, word(header, VLAN_TAG)? as u16))
    };
    let len = word(header, LEN)? as usize;
    Some((RingFrame { data, len, vnet, vlan }, word(header, NEXT)? as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(next: u32, kept: u32, len: u32, data_at: u16) -> Vec<u8> {
        let mut header = vec![0; 48];
        header[NEXT..][..4].copy_from_slice(&next.to_ne_bytes());
        header[SNAP_LEN..][..4].copy_from_slice(&kept.to_ne_bytes());
        header[LEN..][..4].copy_from_slice(&len.to_ne_bytes());
        header[DATA..][..2].copy_from_slice(&data_at.to_ne_bytes());
        header
    }

    #[test]
    fn parses_frame_at_header_offsets() {
        let mut block = header(128, 3, 5, 60);
        block.resize(60, 7);
        block.extend(b"abcdef");
        let (frame, advance) = parse_frame(&block, 0).unwrap();
        assert_eq!((frame.data, frame.len, advance), (&b"abc"[..], 5, 128));
        assert!(frame.is_truncated());
        assert_eq!(frame.vnet[9], 7);
        assert_eq!(frame.vlan, None);
    }

    #[test]
    fn rejects_lengths_past_the_block() {
        let mut block = header(0, 100, 100, 60);
        block.resize(128, 0);
        assert!(parse_frame(&block, 0).is_none(), "data past the end");
        assert!(parse_frame(&block, 1000).is_none(), "header past the end");
        let mut block = header(0, 1, 1, 4);
        block.resize(128, 0);
        assert!(parse_frame(&block, 0).is_none(), "no space for the virtio header");
    }

    proptest! {
        #[test]
        fn any_block_is_read_without_a_panic(
            block in proptest::collection::vec(any::<u8>(), 0..256),
            at in any::<u32>(),
        ) {
            let _ = block_start(&block);
            if let Some((slot, _)) = parse_frame(&block, at as usize) {
                prop_assert!(slot.data.len() <= block.len());
            }
        }
    }
}
