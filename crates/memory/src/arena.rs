//! Arenas of fixed-size frames.
//!
//! An [`Arena`] is one mapping of memory (a memfd, so that it can be shared
//! with another process or registered with the kernel later), cut into frames
//! of one size. A [`Frame`] is a token for one of them: it is neither `Copy`
//! nor `Clone`, is made by [`Arena::alloc`] and goes back by [`Arena::free`].
//! Bytes are reached only through the arena, so the borrow checker keeps two
//! users of one frame apart even if a token is used with the wrong arena.
//!
//! A frame can be *lent* to the kernel or a card ([`Arena::lend`]): then no
//! token exists for it until [`Arena::reclaim`] takes it back by its address.
//! The arena remembers which frames are lent, so an address that the other
//! side made up or returned twice is refused.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes kept free in front of a new frame's data, for headers to be put there.
///
/// Equal to the kernel's `XDP_PACKET_HEADROOM`, so a received AF_XDP frame has
/// at least as much.
pub const HEADROOM_BYTES: u16 = 256;

/// The size of every frame of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSize {
    /// 2048 bytes: enough for an MTU of 1500 with headroom.
    K2,
    /// 4096 bytes: a page each.
    K4,
}

impl FrameSize {
    const fn shift(self) -> u32 {
        match self {
            FrameSize::K2 => 11,
            FrameSize::K4 => 12,
        }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }
}

/// What an arena is made of.
#[derive(Clone, Copy, Debug)]
pub struct ArenaConfig {
    /// How many frames.
    pub frames: u32,
    /// How large each is.
    pub frame_size: FrameSize,
    /// Whether to try hugepages first; ordinary pages are the fallback.
    pub hugepages: bool,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self { frames: 8192, frame_size: FrameSize::K2, hugepages: true }
    }
}

/// Why an arena could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The configuration asks for no frames or for more than 2^24.
    #[error("an arena needs between 1 and 16777216 frames, not {0}")]
    FrameCount(u32),
    /// The kernel gave no memory.
    #[error("cannot map {bytes} bytes for packet buffers: {source}; ask for fewer frames")]
    Map {
        /// The size that was asked for.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What is known about a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Received: nobody checked it. To send: it is complete.
    #[default]
    Unknown,
    /// Received: the card or the kernel checked it, or the frame never left
    /// this machine, so that there is nothing to check.
    Verified,
    /// The field holds only the sum of the pseudo-header. To send: the port
    /// sums from `start` to the end of the frame and stores at
    /// `start + offset`. Received: the sender is on this machine and left it
    /// to a card that does not exist; the data is good.
    Partial {
        /// Where the sum begins, in bytes from the start of the frame.
        start: u16,
        /// Where the field is, in bytes from `start`.
        offset: u16,
    },
}

/// A token for one frame of an arena, with the place of its data.
///
/// A frame that is dropped instead of being given back is lost to its arena.
#[must_use = "a frame that is not given back to its arena is lost"]
pub struct Frame {
    index: u32,
    start: u16,
    len: u16,
    /// What is known about the transport checksum.
    pub checksum: Checksum,
}

impl Frame {
    /// Bytes of data.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Whether there is no data.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes free in front of the data.
    #[inline]
    pub fn headroom(&self) -> usize {
        usize::from(self.start)
    }

    /// Drops `n` bytes from the front; they become headroom. At most all.
    #[inline]
    pub fn advance(&mut self, n: usize) {
        let n = n.min(self.len()) as u16;
        self.start += n;
        self.len -= n;
    }

    /// Shortens the data to `len` bytes; longer stays as it is.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(u16::try_from(len).unwrap_or(u16::MAX));
    }

    /// Grows the data by `n` bytes of headroom in front of it, or by as many
    /// as there are. The bytes hold whatever was there.
    #[inline]
    pub fn retreat(&mut self, n: usize) {
        let n = n.min(self.headroom()) as u16;
        self.start -= n;
        self.len += n;
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame#{}[{}..+{}]", self.index, self.start, self.len)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Held,
    Lent,
}

/// One mapping of memory cut into frames.
pub struct Arena {
    base: NonNull<u8>,
    shift: u32,
    frames: u32,
    hugepages: bool,
    free: Vec<u32>,
    state: Box<[State]>,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to this value alone and moves with it; nothing in
// it is tied to a thread.
unsafe impl Send for Arena {}

const HUGE_PAGE_BYTES: usize = 2 << 20;

impl Arena {
    /// Maps memory for `config.frames` frames.
    ///
    /// # Errors
    /// [`ArenaError::FrameCount`] for a count out of range,
    /// [`ArenaError::Map`] when the kernel has no memory to give.
    pub fn new(config: ArenaConfig) -> Result<Self, ArenaError> {
        if config.frames == 0 || config.frames > 1 << 24 {
            return Err(ArenaError::FrameCount(config.frames));
        }
        let shift = config.frame_size.shift();
        let bytes = (config.frames as usize) << shift;
        let huge = config.hugepages.then(|| map(bytes, true)).and_then(Result::ok);
        let hugepages = huge.is_some();
        let (base, fd) = match huge {
            Some(mapped) => mapped,
            None => map(bytes, false).map_err(|source| ArenaError::Map { bytes, source })?,
        };
        Ok(Self {
            base,
            shift,
            frames: config.frames,
            hugepages,
            // The last frame freed is the next one used: it is still in cache.
            free: (0..config.frames).rev().collect(),
            state: vec![State::Free; config.frames as usize].into_boxed_slice(),
            fd,
        })
    }

    /// The number of frames.
    pub fn capacity(&self) -> usize {
        self.frames as usize
    }

    /// The number of frames that [`Arena::alloc`] could still give.
    #[inline]
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// The size of a frame in bytes, headroom included.
    #[inline]
    pub fn frame_bytes(&self) -> usize {
        1 << self.shift
    }

    /// Whether the memory is in hugepages.
    pub fn is_huge(&self) -> bool {
        self.hugepages
    }

    /// The whole mapping: its address and its length in bytes. For a port that
    /// registers it with the kernel; the address is valid as long as the arena.
    pub fn region(&self) -> (NonNull<u8>, usize) {
        (self.base, self.capacity() << self.shift)
    }

    /// Takes a free frame, empty, with [`HEADROOM_BYTES`] in front.
    #[inline]
    pub fn alloc(&mut self) -> Option<Frame> {
        let index = self.free.pop()?;
        self.state[index as usize] = State::Held;
        Some(Frame { index, start: HEADROOM_BYTES, len: 0, checksum: Checksum::Unknown })
    }

    /// Takes a free frame and fills it with `bytes`; `None` when there is no
    /// frame or the bytes do not fit.
    #[inline]
    pub fn alloc_from(&mut self, bytes: &[u8]) -> Option<Frame> {
        if bytes.len() > self.frame_bytes() - usize::from(HEADROOM_BYTES) {
            return None;
        }
        let mut frame = self.alloc()?;
        frame.len = bytes.len() as u16;
        self.bytes_mut(&mut frame).copy_from_slice(bytes);
        Some(frame)
    }

    /// Gives a frame back.
    #[inline]
    pub fn free(&mut self, frame: Frame) {
        debug_assert!(self.state[frame.index as usize] == State::Held, "{frame:?} freed twice");
        self.state[frame.index as usize] = State::Free;
        self.free.push(frame.index);
    }

    /// The frame's data.
    #[inline]
    pub fn bytes(&self, frame: &Frame) -> &[u8] {
        let offset = self.locate(frame);
        // SAFETY: `locate` checked that the range lies inside the mapping, which
        // lives as long as `self`; a shared borrow of the arena excludes
        // `bytes_mut`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), frame.len()) }
    }

    /// The frame's data, to be written.
    #[inline]
    pub fn bytes_mut(&mut self, frame: &mut Frame) -> &mut [u8] {
        let offset = self.locate(frame);
        // SAFETY: as in `bytes`; the exclusive borrow of the arena makes this
        // the only slice into the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset), frame.len()) }
    }

    /// The data of one frame to read and of another to write, at once.
    ///
    /// # Panics
    /// When both tokens are of the same frame, which safe code cannot have
    /// from one arena.
    #[inline]
    pub fn pair(&mut self, read: &Frame, write: &mut Frame) -> (&[u8], &mut [u8]) {
        assert_ne!(read.index, write.index, "one frame cannot be read and written at once");
        let (r, w) = (self.locate(read), self.locate(write));
        // SAFETY: both ranges are inside the mapping (`locate`) and inside
        // different frames (the assertion), so they do not overlap.
        unsafe {
            (
                std::slice::from_raw_parts(self.base.as_ptr().add(r), read.len()),
                std::slice::from_raw_parts_mut(self.base.as_ptr().add(w), write.len()),
            )
        }
    }

    /// Sets the length of the data, growing or shrinking at the end; new bytes
    /// hold whatever was there. Returns whether it fits in the frame.
    #[inline]
    pub fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        let fits = frame.headroom() + len <= self.frame_bytes();
        if fits {
            frame.len = len as u16;
        }
        fits
    }

    /// Copies a frame into a new one; `None` when there is no frame left.
    pub fn copy_of(&mut self, frame: &Frame) -> Option<Frame> {
        let mut copy = self.alloc()?;
        (copy.start, copy.len, copy.checksum) = (frame.start, frame.len, frame.checksum);
        let (from, to) = self.pair(frame, &mut copy);
        to.copy_from_slice(from);
        Some(copy)
    }

    /// Gives a frame to the kernel or a card. Returns the address of its data,
    /// in bytes from the start of the mapping.
    #[inline]
    pub fn lend(&mut self, frame: Frame) -> u64 {
        self.state[frame.index as usize] = State::Lent;
        (u64::from(frame.index) << self.shift) + u64::from(frame.start)
    }

    /// Takes a lent frame back by an address inside it, with `len` bytes of
    /// data from there. `None` when the address is outside the mapping, the
    /// data does not fit in the frame, or the frame is not lent.
    #[inline]
    pub fn reclaim(&mut self, address: u64, len: u32) -> Option<Frame> {
        let index = u32::try_from(address >> self.shift).ok()?;
        let start = (address & (self.frame_bytes() as u64 - 1)) as u16;
        let state = self.state.get_mut(index as usize)?;
        if *state != State::Lent || u64::from(start) + u64::from(len) > 1 << self.shift {
            return None;
        }
        *state = State::Held;
        Some(Frame { index, start, len: len as u16, checksum: Checksum::Unknown })
    }

    /// Takes every lent frame back into the free list. Only for when the other
    /// side is gone: its socket closed, its card reset.
    pub fn reclaim_all(&mut self) {
        for (index, state) in self.state.iter_mut().enumerate() {
            if *state == State::Lent {
                *state = State::Free;
                self.free.push(index as u32);
            }
        }
    }

    /// Where the frame's data begins in the mapping, checked.
    #[inline]
    fn locate(&self, frame: &Frame) -> usize {
        assert!(
            frame.index < self.frames && frame.headroom() + frame.len() <= self.frame_bytes(),
            "a frame was used with an arena that it does not belong to"
        );
        ((frame.index as usize) << self.shift) + frame.headroom()
    }
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
            .field("frames", &self.frames)
            .field("frame_bytes", &self.frame_bytes())
            .field("hugepages", &self.hugepages)
            .field("available", &self.available())
            .finish()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let (base, len) = (self.base, mapped_bytes(self.capacity() << self.shift, self.hugepages));
        // SAFETY: the range was mapped by `map` with this length, and no slice
        // into it can outlive `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(base.as_ptr().cast(), len) } {
            debug_assert!(false, "munmap of an arena failed: {error}");
        }
    }
}

fn mapped_bytes(bytes: usize, huge: bool) -> usize {
    if huge { bytes.next_multiple_of(HUGE_PAGE_BYTES) } else { bytes }
}

fn map(bytes: usize, huge: bool) -> io::Result<(NonNull<u8>, OwnedFd)> {
    let bytes = mapped_bytes(bytes, huge);
    let flags = if huge {
        MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
    } else {
        MemfdFlags::CLOEXEC
    };
    let fd = rustix::fs::memfd_create("tidegate-arena", flags)?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    // Populated at once: a page fault per frame under load would look like a
    // slow stack, and missing hugepages must fail here, not by a signal later.
    // SAFETY: a new mapping at an address of the kernel's choice aliases
    // nothing.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::POPULATE,
            &fd,
            0,
        )?
    };
    let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
    Ok((base, fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(frames: u32) -> Arena {
        Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
    }

    #[test]
    fn every_frame_is_given_once_and_comes_back() {
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
    fn data_moves_between_headroom_and_frame() {
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
    fn a_frame_count_of_zero_is_refused() {
        let config = ArenaConfig { frames: 0, ..ArenaConfig::default() };
        assert!(matches!(Arena::new(config), Err(ArenaError::FrameCount(0))));
    }
}
