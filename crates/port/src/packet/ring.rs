//! Frames out of the blocks of a TPACKET_V3 ring.
//!
//! A block is a list of frames with headers in front, each naming the offset
//! of the next (linux/if_packet.h). The kernel wrote it, but offsets and
//! lengths are checked all the same: a fault there must not become one here.

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

/// A frame as it lies in a block.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot<'a> {
    /// The bytes that the kernel kept.
    pub data: &'a [u8],
    /// The frame was longer than what the kernel kept.
    pub truncated: bool,
    /// The virtio header.
    pub vnet: vnet::Raw,
    /// The VLAN tag that the kernel took out: protocol and tag control.
    pub vlan: Option<(u16, u16)>,
}

/// What [`Reader::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// A frame.
    Frame(Slot<'a>),
    /// A header with an impossible offset or length; `lost` frames of its
    /// block are skipped.
    Broken {
        /// Frames that the block said it still had.
        lost: u32,
    },
    /// Nothing is waiting.
    Empty,
}

/// Walks over the frames of a ring.
pub struct Reader {
    ring: Ring,
    /// The block in hand; `None` between blocks.
    place: Option<Place>,
}

#[derive(Clone, Copy)]
struct Place {
    /// Frames of the block not yet taken.
    left: u32,
    /// Where the next frame's header is in the block.
    next: usize,
}

impl Reader {
    pub fn new(ring: Ring) -> Self {
        Self { ring, place: None }
    }

    /// Whether [`Reader::next`] would give a frame.
    pub fn is_waiting(&self) -> bool {
        self.place.is_some_and(|place| place.left > 0) || {
            self.place.is_none() && self.ring.is_ready()
        }
    }

    /// Gives a block that was read to its end back to the kernel. Called before
    /// each [`Reader::next`], apart from it because a slot borrows the block.
    #[inline]
    pub fn settle(&mut self) {
        if self.place.is_some_and(|place| place.left == 0) {
            self.ring.release();
            self.place = None;
        }
    }

    /// The next frame. Empty blocks are for [`Reader::settle`] to give back.
    #[inline]
    pub fn next(&mut self) -> Step<'_> {
        let Some(block) = self.ring.block() else { return Step::Empty };
        let place = match self.place {
            Some(place) => place,
            None => open(block),
        };
        if place.left == 0 {
            self.place = Some(place);
            return Step::Empty;
        }
        match slot(block, place.next) {
            Some((slot, step)) => {
                self.place = Some(Place { left: place.left - 1, next: place.next + step });
                Step::Frame(slot)
            }
            None => {
                self.place = Some(Place { left: 0, next: 0 });
                Step::Broken { lost: place.left }
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

fn open(block: &[u8]) -> Place {
    Place {
        // No more than there is room for, so that a false count ends too.
        left: word(block, BLOCK_FRAMES).unwrap_or(0).min((block.len() / HEADER_BYTES) as u32),
        next: word(block, BLOCK_FIRST).unwrap_or(0) as usize,
    }
}

/// The frame whose header is at `at`, and how far on the next header is.
fn slot(block: &[u8], at: usize) -> Option<(Slot<'_>, usize)> {
    let header = block.get(at..)?;
    let data_at = usize::from(half(header, DATA)?);
    let kept = word(header, SNAP_LEN)? as usize;
    let data = header.get(data_at..)?.get(..kept)?;
    let vnet = header.get(data_at.checked_sub(vnet::BYTES)?..)?.first_chunk().copied()?;
    let status = word(header, STATUS)?;
    let vlan = if status & libc::TP_STATUS_VLAN_VALID == 0 {
        None
    } else if status & libc::TP_STATUS_VLAN_TPID_VALID == 0 {
        Some((0x8100, word(header, VLAN_TAG)? as u16))
    } else {
        Some((half(header, VLAN_PROTOCOL)?, word(header, VLAN_TAG)? as u16))
    };
    let truncated = word(header, LEN)? as usize > kept;
    Some((Slot { data, truncated, vnet, vlan }, word(header, NEXT)? as usize))
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
    fn a_frame_lies_where_its_header_says() {
        let mut block = header(128, 3, 5, 60);
        block.resize(60, 7);
        block.extend(b"abcdef");
        let (slot, step) = slot(&block, 0).unwrap();
        assert_eq!((slot.data, slot.truncated, step), (&b"abc"[..], true, 128));
        assert_eq!(slot.vnet[9], 7);
        assert_eq!(slot.vlan, None);
    }

    #[test]
    fn lengths_past_the_block_are_refused() {
        let mut block = header(0, 100, 100, 60);
        block.resize(128, 0);
        assert!(slot(&block, 0).is_none(), "data past the end");
        assert!(slot(&block, 1000).is_none(), "header past the end");
        let mut block = header(0, 1, 1, 4);
        block.resize(128, 0);
        assert!(slot(&block, 0).is_none(), "no room for the virtio header");
    }

    proptest! {
        #[test]
        fn any_block_is_read_without_a_panic(
            block in proptest::collection::vec(any::<u8>(), 0..256),
            at in any::<u32>(),
        ) {
            let _ = open(&block);
            if let Some((slot, _)) = slot(&block, at as usize) {
                prop_assert!(slot.data.len() <= block.len());
            }
        }
    }
}
