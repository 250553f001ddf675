//! Arenas of fixed-size packet buffers (frames).
//!
//! An [`Arena`] is one memory mapping, cut into frames of one size. The mapping is a memfd, so
//! that it can be shared with another process or registered with the kernel later. A [`Frame`]
//! is a token for one frame: it is neither `Copy` nor `Clone`, is allocated by [`Arena::alloc`]
//! and freed by [`Arena::free`]. Bytes are reached only through the arena, so the borrow
//! checker keeps two users of one frame apart even if a token is used with the wrong arena.
//!
//! A frame can be *lent* to the kernel or a NIC ([`Arena::lend`]): then no token exists for it
//! until [`Arena::reclaim`] takes the frame back by its address. The arena records which frames
//! are lent, so it rejects an address that the kernel or the NIC made up or returned twice.

mod batch;
mod frame;
mod memory;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

pub use self::batch::{AllocBatch, FreeBatch};
pub use self::frame::{Checksum, Frame, MAX_SEGMENT_BYTES, PackedChecksum};
pub use self::memory::ArenaMemory;
use crate::copy_packet;

/// Bytes kept free in front of a new frame's data, for headers to be prepended.
///
/// Equal to the kernel's `XDP_PACKET_HEADROOM`, so a received AF_XDP frame has at least as much.
pub const HEADROOM_BYTES: u16 = 256;

/// Size of every frame of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSize {
    /// 2048 bytes: enough for an MTU of 1500 with headroom. As with every size, the last byte is
    /// not used.
    K2,
    /// 4096 bytes: one page each.
    K4,
    /// 65536 bytes: enough for the largest packet that a device with segmentation offload sends or
    /// receives at once.
    K64,
}

impl FrameSize {
    const fn shift(self) -> u32 {
        match self {
            FrameSize::K2 => 11,
            FrameSize::K4 => 12,
            FrameSize::K64 => 16,
        }
    }

    /// Frame size in bytes.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }

    /// Largest end offset of data within a frame: the frame size less one.
    ///
    /// The offset just behind the data must still be inside the frame: a frame whose data was all
    /// dropped from the front begins there. Offsets within a frame thus also fit in 16 bits.
    const fn usable_bytes(self) -> usize {
        self.bytes() - 1
    }
}

/// Size and page type of an arena.
#[derive(Clone, Copy, Debug)]
pub struct ArenaConfig {
    /// Number of frames, 1 to 2^24.
    pub frames: u32,
    /// Size of each frame.
    pub frame_size: FrameSize,
    /// Try hugepages first; ordinary pages are the fallback.
    pub hugepages: bool,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self { frames: 8192, frame_size: FrameSize::K2, hugepages: true }
    }
}

/// Error of creating an arena.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The configuration asks for zero frames or for more than 2^24.
    #[error("an arena needs between 1 and 16777216 frames, not {0}")]
    FrameCount(u32),
    /// The kernel could not provide the memory.
    #[error("cannot map {bytes} bytes for packet buffers: {source}; ask for fewer frames")]
    Map {
        /// Size of the requested mapping in bytes.
        bytes: usize,
        /// Error that the kernel returned.
        source: io::Error,
    },
}

/// State of a frame. Tokens already distinguish `Free` from `Allocated`; these two states only
/// serve to find double frees in debug builds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FrameState {
    Free,
    Allocated,
    Lent,
}

/// One memory mapping cut into frames.
pub struct Arena {
    base: NonNull<u8>,
    /// Length of all frames together, in bytes.
    bytes: usize,
    shift: u32,
    frame_bytes: usize,
    /// Largest end offset of data within a frame.
    usable_bytes: usize,
    hugepages: bool,
    /// Spans of the free frames, each inside the mapping; the first `available` entries are valid.
    free: Box<[FreeSpan]>,
    available: usize,
    state: Box<[FrameState]>,
    fd: OwnedFd,
    memory: Arc<ArenaMemory>,
}

/// Span of the data that a free frame will hold, as in [`Frame::span`].
type FreeSpan = u64;

// SAFETY: the bytes of frames are reached through this value alone, and nothing
// in it is tied to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps memory for `config.frames` frames.
    ///
    /// # Errors
    /// [`ArenaError::FrameCount`] for a count out of range, [`ArenaError::Map`] when the kernel
    /// cannot provide the memory.
    pub fn new(config: ArenaConfig) -> Result<Self, ArenaError> {
        if config.frames == 0 || config.frames > 1 << 24 {
            return Err(ArenaError::FrameCount(config.frames));
        }
        let shift = config.frame_size.shift();
        let bytes = (config.frames as usize) << shift;
        let huge = config.hugepages.then(|| ArenaMemory::map(bytes, true)).and_then(Result::ok);
        let hugepages = huge.is_some();
        let (memory, fd) = match huge {
            Some(mapped) => mapped,
            None => ArenaMemory::map(bytes, false)
                .map_err(|source| ArenaError::Map { bytes, source })?,
        };
        let first = |index: u32| ((index as usize) << shift) + usize::from(HEADROOM_BYTES);
        Ok(Self {
            base: memory.range().0,
            bytes,
            shift,
            frame_bytes: config.frame_size.bytes(),
            usable_bytes: config.frame_size.usable_bytes(),
            hugepages,
            // The last frame freed is the next one used: it is still in cache.
            free: (0..config.frames).rev().map(|index| (first(index) as u64) << 16).collect(),
            available: config.frames as usize,
            state: vec![FrameState::Free; config.frames as usize].into_boxed_slice(),
            fd,
            memory: Arc::new(memory),
        })
    }

    /// Number of frames.
    pub fn capacity(&self) -> usize {
        self.bytes >> self.shift
    }

    /// Number of free frames.
    #[inline]
    pub fn available(&self) -> usize {
        self.available
    }

    /// Size of a frame in bytes, headroom included.
    #[inline]
    pub fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Largest data length of the frame with its present headroom, in bytes.
    #[inline]
    pub fn space(&self, frame: &Frame) -> usize {
        self.usable_bytes.saturating_sub(frame.headroom())
    }

    /// Largest data length of a new frame, in bytes.
    #[inline]
    pub fn max_data_bytes(&self) -> usize {
        self.usable_bytes - usize::from(HEADROOM_BYTES)
    }

    /// True if the memory uses hugepages.
    pub fn uses_hugepages(&self) -> bool {
        self.hugepages
    }

    /// Whole mapping: address and length in bytes, for a device that registers it with the kernel.
    /// The address is valid as long as the arena.
    pub fn region(&self) -> (NonNull<u8>, usize) {
        (self.base, self.bytes)
    }

    /// Memory of the arena, for a device whose driver writes to it in this process. The memory
    /// stays mapped as long as the arena or the returned value exists.
    pub fn memory(&self) -> Arc<ArenaMemory> {
        self.memory.clone()
    }

    /// Allocates an empty frame with [`HEADROOM_BYTES`] in front; `None` when no frame is free.
    #[inline(always)]
    pub fn alloc(&mut self) -> Option<Frame> {
        let last = self.available.wrapping_sub(1);
        let span = *self.free.get(last)?;
        self.available = last;
        let frame = Frame { span, meta: u64::from(HEADROOM_BYTES) };
        set_frame_state(&mut self.state, self.shift, &frame, FrameState::Allocated);
        Some(frame)
    }

    /// Allocates a frame and fills it with `bytes`; `None` when no frame is free or the bytes do
    /// not fit.
    #[inline(always)]
    pub fn alloc_from(&mut self, bytes: &[u8]) -> Option<Frame> {
        if bytes.len() > self.usable_bytes - usize::from(HEADROOM_BYTES) {
            return None;
        }
        let mut frame = self.alloc()?;
        frame.span |= bytes.len() as u64;
        // SAFETY: a free frame's span is inside the mapping, and the bytes fit behind its headroom
        // (checked above); the exclusive borrow of the arena makes this the only slice into it.
        let data = unsafe {
            slice::from_raw_parts_mut(self.base.as_ptr().add(frame.offset()), bytes.len())
        };
        copy_packet(data, bytes);
        Some(frame)
    }

    /// Frees a frame.
    ///
    /// # Panics
    /// When the frame belongs to a larger arena.
    #[inline(always)]
    pub fn free(&mut self, frame: Frame) {
        set_frame_state(&mut self.state, self.shift, &frame, FrameState::Free);
        let start = frame.offset() & !(self.frame_bytes() - 1);
        match self.free.get_mut(self.available) {
            Some(slot) if start < self.bytes => {
                *slot = ((start | usize::from(HEADROOM_BYTES)) as u64) << 16;
                self.available += 1;
            }
            _ => panic_foreign_frame(),
        }
    }

    /// Data of the frame.
    #[inline(always)]
    pub fn bytes(&self, frame: &Frame) -> &[u8] {
        let offset = self.checked_offset(frame);
        // SAFETY: `checked_offset` checked that the range lies inside the mapping, which lives as
        // long as `self`; a shared borrow of the arena excludes `bytes_mut`.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), frame.len()) }
    }

    /// Same as [`Arena::bytes`], but `None` for a frame of a larger arena.
    #[inline(always)]
    pub fn get(&self, frame: &Frame) -> Option<&[u8]> {
        if frame.offset() + frame.len() > self.bytes {
            return None;
        }
        // SAFETY: as in `bytes`.
        Some(unsafe { slice::from_raw_parts(self.base.as_ptr().add(frame.offset()), frame.len()) })
    }

    /// Data of the frame, for writing.
    #[inline(always)]
    pub fn bytes_mut(&mut self, frame: &mut Frame) -> &mut [u8] {
        let offset = self.checked_offset(frame);
        // SAFETY: as in `bytes`; the exclusive borrow of the arena makes this
        // the only slice into the mapping.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr().add(offset), frame.len()) }
    }

    /// The last `N` bytes of the frame's headroom, where its headers are or were. `None` when
    /// there is less headroom.
    #[inline(always)]
    pub fn headers<const N: usize>(&self, frame: &Frame) -> Option<&[u8; N]> {
        if frame.headroom() < N {
            return None;
        }
        if frame.offset() > self.bytes {
            panic_foreign_frame();
        }
        // SAFETY: the data begins at least `N` bytes behind the start of a frame and ends inside
        // the mapping (checked just now); a shared borrow of the arena excludes writers. An array
        // of bytes needs no alignment.
        Some(unsafe { &*self.base.as_ptr().add(frame.offset()).sub(N).cast::<[u8; N]>() })
    }

    /// The last `N` bytes of the frame's headroom, and all bytes behind them to the end of the
    /// frame: space for headers, and for the data to grow. `None` when there is less headroom.
    #[inline(always)]
    pub fn headers_mut<const N: usize>(
        &mut self,
        frame: &mut Frame,
    ) -> Option<(&mut [u8; N], &mut [u8])> {
        let headroom = frame.headroom();
        if headroom < N {
            return None;
        }
        let space = self.usable_bytes.checked_sub(headroom)?;
        if frame.offset() + space > self.bytes {
            panic_foreign_frame();
        }
        // SAFETY: the data begins `headroom` bytes behind the start of a frame, so that there are
        // `N` bytes in front of it, and `space` bytes are inside the mapping (checked just now).
        // The exclusive borrow of the arena makes the slices the only ones.
        Some(unsafe { split_at_data(self.base, frame, space) })
    }

    /// Data of one frame for reading and of another frame for writing, at the same time.
    ///
    /// # Panics
    /// When both tokens are of the same frame, which safe code cannot obtain from one arena.
    #[inline]
    pub fn read_and_write(&mut self, read: &Frame, write: &mut Frame) -> (&[u8], &mut [u8]) {
        let (r, w) = (self.checked_offset(read), self.checked_offset(write));
        let disjoint = if r <= w { r + read.len() <= w } else { w + write.len() <= r };
        assert!(disjoint, "one frame cannot be read and written at once");
        // SAFETY: both ranges are inside the mapping (`checked_offset`) and do not overlap (the
        // assertion).
        unsafe {
            (
                slice::from_raw_parts(self.base.as_ptr().add(r), read.len()),
                slice::from_raw_parts_mut(self.base.as_ptr().add(w), write.len()),
            )
        }
    }

    /// Sets the length of the data, growing or shrinking it at the end; new bytes hold whatever
    /// was there. Returns false, leaving the frame unchanged, when the length does not fit.
    #[inline(always)]
    pub fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        let room = self.usable_bytes.checked_sub(frame.headroom());
        let fits = room.is_some_and(|room| len <= room);
        if fits {
            frame.span = frame.span & !0xffff | len as u64;
        }
        fits
    }

    /// Turns `header_bytes` bytes of the headroom into data, and sets the length of all the data
    /// to `len`. Returns false, leaving the frame unchanged, when the length does not fit.
    #[inline(always)]
    pub fn prepend(&self, frame: &mut Frame, header_bytes: usize, len: usize) -> bool {
        let headroom = frame.headroom();
        let fits = headroom >= header_bytes && headroom - header_bytes + len <= self.usable_bytes;
        if fits {
            frame.span = ((frame.offset() - header_bytes) as u64) << 16 | len as u64;
            frame.meta -= header_bytes as u64;
        }
        fits
    }

    /// Copies a frame into a newly allocated one; `None` when no frame is free.
    pub fn copy_of(&mut self, frame: &Frame) -> Option<Frame> {
        let mut copy = self.alloc()?;
        let start = copy.offset() - copy.headroom();
        copy = Frame {
            span: ((start + frame.headroom()) as u64) << 16 | frame.len() as u64,
            meta: frame.meta,
        };
        let (from, to) = self.read_and_write(frame, &mut copy);
        to.copy_from_slice(from);
        Some(copy)
    }

    /// Lends a frame to the kernel or a NIC. Returns the address of its data, in bytes from the
    /// start of the mapping.
    #[inline(always)]
    pub fn lend(&mut self, frame: Frame) -> u64 {
        self.lend_batch().lend(frame)
    }

    /// Takes back a lent frame by an address inside it, with `len` bytes of data from there.
    /// `None` when the address is outside the mapping, the data does not fit in the frame, or the
    /// frame is not lent.
    #[inline(always)]
    pub fn reclaim(&mut self, address: u64, len: u32) -> Option<Frame> {
        self.lend_batch().reclaim(address, len)
    }

    /// Data that the borrower of a frame wrote, from an address inside the frame. Unlike the data
    /// of a frame, it may reach the frame's last byte. `None` when the address is outside the
    /// mapping, the data does not fit in the frame, or the frame is not lent.
    #[inline]
    pub fn lent_bytes(&self, address: u64, len: u32) -> Option<&[u8]> {
        let (offset, len) = (usize::try_from(address).ok()?, len as usize);
        let is_lent = *self.state.get(offset >> self.shift)? == FrameState::Lent;
        if !is_lent || (offset & (self.frame_bytes - 1)) + len > self.frame_bytes {
            return None;
        }
        // SAFETY: the range is inside one frame, and so inside the mapping, which lives as long as
        // `self`. Only the borrower, outside this process, writes to a lent frame; a borrower that
        // has announced the data has done so.
        Some(unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), len) })
    }

    /// Puts every lent frame back on the free list. Only valid once the borrower is gone: the
    /// socket closed, the NIC reset.
    pub fn reclaim_all(&mut self) {
        for index in 0..self.state.len() {
            if self.state[index] == FrameState::Lent {
                self.state[index] = FrameState::Allocated;
                self.free(Frame::new(index << self.shift, 0, 0));
            }
        }
    }

    /// Bounds-checked offset of the frame's data in the mapping.
    #[inline(always)]
    fn checked_offset(&self, frame: &Frame) -> usize {
        if frame.offset() + frame.len() > self.bytes {
            panic_foreign_frame();
        }
        frame.offset()
    }
}

/// Records the state of a frame in debug builds and catches double frees. Release builds need
/// [`FrameState::Lent`] only, which lending records.
#[inline(always)]
fn set_frame_state(states: &mut [FrameState], shift: u32, frame: &Frame, state: FrameState) {
    let index = frame.offset() >> shift;
    if cfg!(debug_assertions) {
        let held = states[index] == FrameState::Allocated;
        assert!(held || state == FrameState::Allocated, "{frame:?} freed twice");
        states[index] = state;
    }
}

/// The last `N` bytes in front of a frame's data, and `space` bytes from the start of the data
/// on.
///
/// # Safety
/// Both ranges are inside one mapping that starts at `base`, and no other slice of them exists
/// as long as these two do.
#[inline(always)]
unsafe fn split_at_data<'a, const N: usize>(
    base: NonNull<u8>,
    frame: &Frame,
    space: usize,
) -> (&'a mut [u8; N], &'a mut [u8]) {
    // SAFETY: guaranteed by the caller; the two slices do not overlap, and an array of bytes
    // needs no alignment.
    unsafe {
        let data = base.as_ptr().add(frame.offset());
        (&mut *data.sub(N).cast::<[u8; N]>(), slice::from_raw_parts_mut(data, space))
    }
}

#[cold]
#[inline(never)]
fn panic_foreign_frame() -> ! {
    panic!("a frame was used with an arena that it does not belong to")
}

impl AsFd for Arena {
    /// The memfd behind the mapping.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("frames", &self.capacity())
            .field("frame_bytes", &self.frame_bytes())
            .field("hugepages", &self.hugepages)
            .field("available", &self.available())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(frames: u32) -> Arena {
        Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
    }

    #[test]
    fn allocates_and_frees_every_frame() {
        let mut arena = arena(4);
        let frames: Vec<_> = std::iter::from_fn(|| arena.alloc()).collect();
        assert_eq!(frames.len(), 4);
        assert_eq!(arena.available(), 0);
        for frame in frames {
            arena.free(frame);
        }
        assert_eq!(arena.available(), 4);
    }

    #[test]
    fn retreat_and_advance_move_bytes_between_headroom_and_data() {
        let mut arena = arena(2);
        let mut frame = arena.alloc_from(b"payload").unwrap();
        frame.retreat(4);
        arena.bytes_mut(&mut frame)[..4].copy_from_slice(b"head");
        assert_eq!(arena.bytes(&frame), b"headpayload");
        frame.advance(2);
        frame.truncate(4);
        assert_eq!(arena.bytes(&frame), b"adpa");
        assert!(!arena.set_len(&mut frame, 2048));
        let copy = arena.copy_of(&frame).unwrap();
        assert_eq!(arena.bytes(&copy), b"adpa");
        arena.free(copy);
        arena.free(frame);
    }

    #[test]
    fn retreat_stops_at_the_start_of_the_frame() {
        let mut arena = arena(1);
        let mut frame = arena.alloc().unwrap();
        frame.retreat(10_000);
        assert_eq!(frame.len(), usize::from(HEADROOM_BYTES));
        assert_eq!(frame.headroom(), 0);
        arena.free(frame);
    }

    #[test]
    fn frees_the_right_frame_when_its_data_reaches_the_end() {
        let mut arena = arena(2);
        let (mut first, second) = (arena.alloc().unwrap(), arena.alloc().unwrap());
        let space = arena.space(&first);
        assert!(arena.set_len(&mut first, space) && !arena.set_len(&mut first, space + 1));
        first.advance(space);
        let (index, other) = (first.offset() >> arena.shift, second.offset() >> arena.shift);
        assert_ne!(index, other);
        arena.free(first);
        let again = arena.alloc().unwrap();
        assert_ne!(again.offset() >> arena.shift, other);
        arena.free(again);
        arena.free(second);
    }

    #[test]
    fn only_lent_frames_are_reclaimed() {
        let mut arena = arena(2);
        assert!(arena.reclaim(0, 0).is_none(), "a free frame");
        let frame = arena.alloc().unwrap();
        let address = arena.lend(frame);
        assert!(arena.reclaim(address, 2048).is_none(), "past the end of the frame");
        assert!(arena.reclaim(1 << 40, 0).is_none(), "outside the arena");
        let frame = arena.reclaim(address + 10, 100).unwrap();
        assert_eq!((frame.headroom(), frame.len()), (usize::from(HEADROOM_BYTES) + 10, 100));
        assert!(arena.reclaim(address, 0).is_none(), "the same frame again");
        let _ = arena.lend(frame);
        arena.reclaim_all();
        assert_eq!(arena.available(), 2);
    }

    #[test]
    fn lent_data_reaches_the_end_of_the_frame() {
        let mut arena = arena(2);
        let frame = arena.alloc_from(b"data").unwrap();
        let offset = frame.offset() as u64;
        assert!(arena.lent_bytes(offset, 4).is_none(), "not lent");
        let address = arena.lend(frame);
        assert_eq!(arena.lent_bytes(address, 4), Some(&b"data"[..]));
        let end = (address | 2047) + 1;
        assert_eq!(arena.lent_bytes(end - 1, 1).unwrap().len(), 1);
        assert!(arena.lent_bytes(end - 1, 2).is_none(), "past the end of the frame");
        assert!(arena.lent_bytes(1 << 40, 0).is_none(), "outside the arena");
        assert!(arena.lent_bytes(address, u32::MAX).is_none());
        arena.reclaim_all();
    }

    #[test]
    fn headers_are_the_end_of_the_headroom() {
        let mut arena = arena(2);
        let mut frame = arena.alloc_from(b"headpayload").unwrap();
        frame.advance(4);
        assert_eq!(arena.headers::<4>(&frame), Some(b"head"));
        let (head, space) = arena.headers_mut::<4>(&mut frame).unwrap();
        assert_eq!((&*head, &space[..7]), (b"head", &b"payload"[..]));
        assert_eq!(space.len(), 2047 - usize::from(HEADROOM_BYTES) - 4);
        assert!(!arena.prepend(&mut frame, 1, 2048));
        assert!(arena.prepend(&mut frame, 2, 5));
        assert_eq!((arena.bytes(&frame), frame.headroom()), (&b"adpay"[..], 258));
        frame.retreat(frame.headroom() - 3);
        assert!(!arena.prepend(&mut frame, 4, 4));
        assert!(arena.headers::<4>(&frame).is_none());
        assert!(arena.headers_mut::<4>(&mut frame).is_none());
        arena.free(frame);
    }

    #[test]
    fn the_largest_frame_can_be_filled_and_emptied() {
        let config = ArenaConfig { frames: 2, frame_size: FrameSize::K64, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let mut frame = arena.alloc().unwrap();
        let space = arena.space(&frame);
        assert!(!arena.set_len(&mut frame, space + 1));
        assert!(arena.set_len(&mut frame, space));
        frame.set_checksum(Checksum::Partial { start: 34, offset: 16 });
        frame.set_segment_bytes(1448);
        frame.advance(space);
        assert_eq!((frame.headroom(), frame.len()), (usize::from(u16::MAX), 0));
        assert_eq!(frame.checksum(), Checksum::Partial { start: 34, offset: 16 });
        frame.retreat(usize::from(u16::MAX));
        assert_eq!((frame.headroom(), frame.len()), (0, usize::from(u16::MAX)));
        assert_eq!(frame.segment_bytes(), 1448);
        arena.free(frame);
        assert_eq!(arena.available(), 2);
    }

    #[test]
    fn only_a_partial_checksum_has_segments() {
        let mut arena = arena(1);
        let mut frame = arena.alloc().unwrap();
        for checksum in [Checksum::Unknown, Checksum::Verified] {
            frame.set_checksum(checksum);
            frame.set_segment_bytes(1448);
            assert_eq!((frame.segment_bytes(), frame.checksum()), (0, checksum));
        }
        let partial = Checksum::Partial { start: u16::MAX, offset: u16::MAX };
        frame.set_checksum(partial);
        frame.set_segment_bytes(MAX_SEGMENT_BYTES as u16);
        assert_eq!((frame.segment_bytes(), frame.checksum()), (MAX_SEGMENT_BYTES, partial));
        assert!(!frame.is_unchecked());
        frame.set_checksum(partial);
        assert_eq!(frame.segment_bytes(), 0, "cleared with the old checksum");
        arena.free(frame);
    }

    #[test]
    fn packed_checksum_round_trips() {
        let mut arena = arena(1);
        let mut frame = arena.alloc_from(b"headpayload").unwrap();
        let partial = Checksum::Partial { start: 0xfedc, offset: 0xba98 };
        for checksum in [partial, Checksum::Verified, Checksum::Unknown, partial] {
            frame.set_checksum(checksum);
            frame.advance(4);
            frame.retreat(4);
            assert_eq!((frame.checksum(), frame.len()), (checksum, 11));
            assert_eq!(PackedChecksum::new(checksum).unpack(), checksum);
        }
        arena.free(frame);
    }

    #[test]
    fn panics_on_frames_of_a_larger_arena() {
        let (mut small, mut large) = (arena(1), arena(2));
        let mut frames: Vec<_> = std::iter::from_fn(|| large.alloc_from(b"x")).collect();
        let mut frame = frames.remove(0);
        let refused = |run: &mut dyn FnMut()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
        };
        if large.bytes(&frame).as_ptr() < large.bytes(&frames[0]).as_ptr() {
            std::mem::swap(&mut frame, &mut frames[0]);
        }
        assert!(refused(&mut || drop(small.bytes(&frame).to_vec())));
        assert!(small.get(&frame).is_none());
        assert!(refused(&mut || small.bytes_mut(&mut frame).fill(0)));
        assert!(refused(&mut || _ = small.headers::<4>(&frame)));
        assert!(refused(&mut || _ = small.headers_mut::<4>(&mut frame)));
        let mut frame = Some(frame);
        assert!(refused(&mut || small.free(frame.take().unwrap())));
    }

    #[test]
    fn rejects_a_frame_count_of_zero() {
        let config = ArenaConfig { frames: 0, ..ArenaConfig::default() };
        assert!(matches!(Arena::new(config), Err(ArenaError::FrameCount(0))));
    }
}
