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

mod batch;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

pub use self::batch::{GiveBack, Take};
use crate::copy_packet;
use crate::mapping::{Pages, map_shared};

/// Bytes kept free in front of a new frame's data, for headers to be put there.
///
/// Equal to the kernel's `XDP_PACKET_HEADROOM`, so a received AF_XDP frame has
/// at least as much.
pub const HEADROOM_BYTES: u16 = 256;

/// The size of every frame of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSize {
    /// 2048 bytes, of which, as with every size, the last one is not used:
    /// enough for an MTU of 1500 with headroom.
    K2,
    /// 4096 bytes: a page each.
    K4,
    /// 65536 bytes: enough for what a port with segmentation takes and gives at
    /// once.
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

    /// The size in bytes.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }

    /// How far data may reach. Never to the last byte: the place behind the
    /// data, where a frame begins of which all was dropped from the front, is
    /// still in the frame. So places in a frame fit in 16 bits, too.
    const fn usable_bytes(self) -> usize {
        self.bytes() - 1
    }
}

/// The largest payload that [`Frame::set_segment_bytes`] takes.
pub const MAX_SEGMENT_BYTES: usize = (1 << 14) - 1;

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

/// A [`Checksum`] in one word, for those who only pass it on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedChecksum(u64);

impl PackedChecksum {
    const VERIFIED: u64 = 1 << 16;
    const PARTIAL: u64 = 2 << 16;
    const KIND: u64 = 3 << 16;
    /// The bits of [`Frame::notes`] that are its own.
    const BITS: u64 = !0xffff;
    /// Verified, and looped ([`Frame::is_looped`]): a bit of the start, which
    /// only a partial checksum has.
    const LOOPED: u64 = Self::VERIFIED | 1 << 32;
    /// Where [`Frame::segment_bytes`] stands: of the bits of the kind, those
    /// that it does not need.
    const SEGMENT_SHIFT: u32 = 18;

    /// From the top: offset and start of a partial checksum, and the kind, 16
    /// bits each.
    #[inline(always)]
    pub const fn new(checksum: Checksum) -> Self {
        Self(match checksum {
            Checksum::Unknown => 0,
            Checksum::Verified => Self::VERIFIED,
            Checksum::Partial { start, offset } => {
                Self::PARTIAL | (start as u64) << 32 | (offset as u64) << 48
            }
        })
    }

    /// What it says.
    #[inline(always)]
    pub const fn unpack(self) -> Checksum {
        match self.0 & Self::KIND {
            0 => Checksum::Unknown,
            Self::VERIFIED => Checksum::Verified,
            _ => Checksum::Partial { start: (self.0 >> 32) as u16, offset: (self.0 >> 48) as u16 },
        }
    }
}

/// A token for one frame of an arena, with the place of its data.
///
/// A frame that is dropped instead of being given back is lost to its arena.
///
/// The token is two words, so that it moves through queues in two registers.
#[must_use = "a frame that is not given back to its arena is lost"]
pub struct Frame {
    /// From the top: where the data begins, 48 bits, in bytes from the start
    /// of the mapping, and its length, 16 bits.
    place: u64,
    /// From the top: the [`PackedChecksum`], 48 bits, and the headroom, 16
    /// bits.
    notes: u64,
}

impl Frame {
    /// A token for `len` bytes of data at `at`, with `headroom` in front.
    #[inline(always)]
    fn new(at: usize, headroom: u16, len: u16) -> Self {
        Self { place: (at as u64) << 16 | u64::from(len), notes: u64::from(headroom) }
    }

    /// Where the data begins, in bytes from the start of the mapping.
    #[inline(always)]
    fn at(&self) -> usize {
        (self.place >> 16) as usize
    }

    /// Bytes of data.
    #[inline(always)]
    pub fn len(&self) -> usize {
        usize::from(self.place as u16)
    }

    /// Whether there is no data.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes free in front of the data.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from(self.notes as u16)
    }

    /// What is known about the transport checksum.
    #[inline(always)]
    pub fn checksum(&self) -> Checksum {
        self.packed_checksum().unpack()
    }

    /// Notes what is known about the transport checksum.
    #[inline(always)]
    pub fn set_checksum(&mut self, checksum: Checksum) {
        self.set_packed_checksum(PackedChecksum::new(checksum));
    }

    /// The payload of each of the TCP segments that the frame stands for; 0 when
    /// it is one packet as any other. Only frames with a partial checksum stand
    /// for several.
    #[inline(always)]
    pub fn segment_bytes(&self) -> usize {
        (self.notes >> PackedChecksum::SEGMENT_SHIFT) as usize & MAX_SEGMENT_BYTES
    }

    /// Notes that the frame stands for several segments with this payload each,
    /// at most [`MAX_SEGMENT_BYTES`]; the last may have less. To be called
    /// behind [`Frame::set_checksum`], which forgets it. Has no effect on a
    /// frame without a partial checksum.
    #[inline(always)]
    pub fn set_segment_bytes(&mut self, bytes: u16) {
        if self.notes & PackedChecksum::KIND == PackedChecksum::PARTIAL {
            let bits = (MAX_SEGMENT_BYTES as u64) << PackedChecksum::SEGMENT_SHIFT;
            let bytes = u64::from(bytes) << PackedChecksum::SEGMENT_SHIFT;
            self.notes = self.notes & !bits | bytes & bits;
        }
    }

    /// Whether nothing is known about the transport checksum.
    #[inline(always)]
    pub fn is_unchecked(&self) -> bool {
        // All of it is zero then.
        self.notes & PackedChecksum::BITS == 0
    }

    /// Notes that a host sends the frame to itself: it never leaves the host, so
    /// its checksum counts as verified. [`Frame::set_checksum`] forgets it.
    #[inline(always)]
    pub fn set_looped(&mut self) {
        self.set_packed_checksum(PackedChecksum(PackedChecksum::LOOPED));
    }

    /// Whether the host sent the frame to itself. No frame from a wire is looped,
    /// whatever its bytes say.
    #[inline(always)]
    pub fn is_looped(&self) -> bool {
        self.notes & PackedChecksum::BITS == PackedChecksum::LOOPED
    }

    /// As [`Frame::checksum`], to be passed on.
    #[inline(always)]
    pub fn packed_checksum(&self) -> PackedChecksum {
        PackedChecksum(self.notes & PackedChecksum::BITS)
    }

    /// As [`Frame::set_checksum`], of what was passed on.
    #[inline(always)]
    pub fn set_packed_checksum(&mut self, checksum: PackedChecksum) {
        self.notes = self.notes & !PackedChecksum::BITS | checksum.0;
    }

    /// Drops `n` bytes from the front; they become headroom. At most all.
    #[inline(always)]
    pub fn advance(&mut self, n: usize) {
        let n = n.min(self.len()) as u64;
        // The length is at least `n`, so that nothing is borrowed from the
        // place; a frame is far smaller than the headroom's 16 bits can tell.
        self.place = self.place + (n << 16) - n;
        self.notes += n;
    }

    /// Shortens the data to `len` bytes; longer stays as it is.
    #[inline(always)]
    pub fn truncate(&mut self, len: usize) {
        let len = self.len().min(len) as u64;
        self.place = self.place & !0xffff | len;
    }

    /// Grows the data by `n` bytes of headroom in front of it, or by as many
    /// as there are. The bytes hold whatever was there.
    #[inline(always)]
    pub fn retreat(&mut self, n: usize) {
        let n = n.min(self.headroom()) as u64;
        self.place = self.place - (n << 16) + n;
        self.notes -= n;
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.at() - self.headroom();
        write!(f, "Frame@{start:#x}[{}..+{}]", self.headroom(), self.len())
    }
}

/// Whose a frame is. `Free` and `Held` are told apart by who has a token, and
/// here only to find mistakes when debugging.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Held,
    Lent,
}

/// The memory of an arena, which stays mapped as long as anybody has this.
pub struct ArenaMemory {
    base: NonNull<u8>,
    /// What was mapped: whole pages.
    bytes: usize,
    page_bytes: usize,
}

impl ArenaMemory {
    /// The address and the length in bytes, in whole pages.
    pub fn range(&self) -> (NonNull<u8>, usize) {
        (self.base, self.bytes)
    }

    /// The size of its pages in bytes.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }
}

// SAFETY: it only says where the memory is, and unmaps it.
unsafe impl Send for ArenaMemory {}
// SAFETY: as above.
unsafe impl Sync for ArenaMemory {}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` with this length, and no slice
        // into it can outlive the arena, which has one of these.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) } {
            debug_assert!(false, "munmap of an arena failed: {error}");
        }
    }
}

/// One mapping of memory cut into frames.
pub struct Arena {
    base: NonNull<u8>,
    /// The length of all frames together.
    bytes: usize,
    shift: u32,
    frame_bytes: usize,
    /// How far data may reach in a frame.
    usable_bytes: usize,
    hugepages: bool,
    /// The places of free frames, each inside the mapping; the first
    /// `available` count.
    free: Box<[FreePlace]>,
    available: usize,
    state: Box<[State]>,
    fd: OwnedFd,
    memory: Arc<ArenaMemory>,
}

/// Where the data of a free frame will begin, as in [`Frame::place`].
type FreePlace = u64;

// SAFETY: the bytes of frames are reached through this value alone, and nothing
// in it is tied to a thread.
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
        let first = |index: u32| ((index as usize) << shift) + usize::from(HEADROOM_BYTES);
        Ok(Self {
            base,
            bytes,
            shift,
            frame_bytes: config.frame_size.bytes(),
            usable_bytes: config.frame_size.usable_bytes(),
            hugepages,
            // The last frame freed is the next one used: it is still in cache.
            free: (0..config.frames).rev().map(|index| (first(index) as u64) << 16).collect(),
            available: config.frames as usize,
            state: vec![State::Free; config.frames as usize].into_boxed_slice(),
            fd,
            memory: Arc::new(ArenaMemory {
                base,
                bytes: mapped_bytes(bytes, hugepages),
                page_bytes: page_bytes(hugepages),
            }),
        })
    }

    /// The number of frames.
    pub fn capacity(&self) -> usize {
        self.bytes >> self.shift
    }

    /// The number of frames that [`Arena::alloc`] could still give.
    #[inline]
    pub fn available(&self) -> usize {
        self.available
    }

    /// The size of a frame in bytes, headroom included.
    #[inline]
    pub fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// How long the data of a frame can become without more headroom, in bytes.
    #[inline]
    pub fn room(&self, frame: &Frame) -> usize {
        self.usable_bytes.saturating_sub(frame.headroom())
    }

    /// Whether the memory is in hugepages.
    pub fn is_huge(&self) -> bool {
        self.hugepages
    }

    /// The whole mapping: its address and its length in bytes. For a port that
    /// registers it with the kernel; the address is valid as long as the arena.
    pub fn region(&self) -> (NonNull<u8>, usize) {
        (self.base, self.bytes)
    }

    /// The memory itself, for a port whose device writes to it in this process:
    /// it stays mapped as long as either exists.
    pub fn memory(&self) -> Arc<ArenaMemory> {
        self.memory.clone()
    }

    /// Takes a free frame, empty, with [`HEADROOM_BYTES`] in front.
    #[inline(always)]
    pub fn alloc(&mut self) -> Option<Frame> {
        let last = self.available.wrapping_sub(1);
        let place = *self.free.get(last)?;
        self.available = last;
        let frame = Frame { place, notes: u64::from(HEADROOM_BYTES) };
        note(&mut self.state, self.shift, &frame, State::Held);
        Some(frame)
    }

    /// Takes a free frame and fills it with `bytes`; `None` when there is no
    /// frame or the bytes do not fit.
    #[inline(always)]
    pub fn alloc_from(&mut self, bytes: &[u8]) -> Option<Frame> {
        if bytes.len() > self.usable_bytes - usize::from(HEADROOM_BYTES) {
            return None;
        }
        let mut frame = self.alloc()?;
        frame.place |= bytes.len() as u64;
        // SAFETY: a free frame's place is inside the mapping, and the bytes fit
        // behind its headroom (checked above); the exclusive borrow of the
        // arena makes this the only slice into it.
        let data =
            unsafe { slice::from_raw_parts_mut(self.base.as_ptr().add(frame.at()), bytes.len()) };
        copy_packet(data, bytes);
        Some(frame)
    }

    /// Gives a frame back.
    ///
    /// # Panics
    /// When the frame belongs to a larger arena.
    #[inline(always)]
    pub fn free(&mut self, frame: Frame) {
        note(&mut self.state, self.shift, &frame, State::Free);
        let start = frame.at() & !(self.frame_bytes() - 1);
        match self.free.get_mut(self.available) {
            Some(place) if start < self.bytes => {
                *place = ((start | usize::from(HEADROOM_BYTES)) as u64) << 16;
                self.available += 1;
            }
            _ => foreign_frame(),
        }
    }

    /// The frame's data.
    #[inline(always)]
    pub fn bytes(&self, frame: &Frame) -> &[u8] {
        let offset = self.locate(frame);
        // SAFETY: `locate` checked that the range lies inside the mapping, which
        // lives as long as `self`; a shared borrow of the arena excludes
        // `bytes_mut`.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), frame.len()) }
    }

    /// As [`Arena::bytes`]; `None` for a frame of a larger arena.
    #[inline(always)]
    pub fn get(&self, frame: &Frame) -> Option<&[u8]> {
        if frame.at() + frame.len() > self.bytes {
            return None;
        }
        // SAFETY: as in `bytes`.
        Some(unsafe { slice::from_raw_parts(self.base.as_ptr().add(frame.at()), frame.len()) })
    }

    /// The frame's data, to be written.
    #[inline(always)]
    pub fn bytes_mut(&mut self, frame: &mut Frame) -> &mut [u8] {
        let offset = self.locate(frame);
        // SAFETY: as in `bytes`; the exclusive borrow of the arena makes this
        // the only slice into the mapping.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr().add(offset), frame.len()) }
    }

    /// The last `N` bytes of the frame's headroom: where its headers are, or
    /// were. `None` when there is less headroom.
    #[inline(always)]
    pub fn headers<const N: usize>(&self, frame: &Frame) -> Option<&[u8; N]> {
        if frame.headroom() < N {
            return None;
        }
        if frame.at() > self.bytes {
            foreign_frame();
        }
        // SAFETY: the data begins at least `N` bytes behind the start of a
        // frame and ends inside the mapping (checked just now); a shared borrow
        // of the arena excludes whoever writes to it. An array of bytes needs
        // no alignment.
        Some(unsafe { &*self.base.as_ptr().add(frame.at()).sub(N).cast::<[u8; N]>() })
    }

    /// The last `N` bytes of the frame's headroom, and everything behind them
    /// to the end of the buffer: room for headers, and for the data to grow.
    /// `None` when there is less headroom.
    #[inline(always)]
    pub fn headers_mut<const N: usize>(
        &mut self,
        frame: &mut Frame,
    ) -> Option<(&mut [u8; N], &mut [u8])> {
        let headroom = frame.headroom();
        if headroom < N {
            return None;
        }
        let room = self.usable_bytes.checked_sub(headroom)?;
        if frame.at() + room > self.bytes {
            foreign_frame();
        }
        // SAFETY: the data begins `headroom` bytes behind the start of a frame,
        // so that there are `N` bytes in front of it, and `room` bytes are
        // inside the mapping (checked just now). The exclusive borrow of the
        // arena makes the slices the only ones.
        Some(unsafe { split(self.base, frame, room) })
    }

    /// The data of one frame to read and of another to write, at once.
    ///
    /// # Panics
    /// When both tokens are of the same frame, which safe code cannot have
    /// from one arena.
    #[inline]
    pub fn pair(&mut self, read: &Frame, write: &mut Frame) -> (&[u8], &mut [u8]) {
        let (r, w) = (self.locate(read), self.locate(write));
        let apart = if r <= w { r + read.len() <= w } else { w + write.len() <= r };
        assert!(apart, "one frame cannot be read and written at once");
        // SAFETY: both ranges are inside the mapping (`locate`) and do not
        // overlap (the assertion).
        unsafe {
            (
                slice::from_raw_parts(self.base.as_ptr().add(r), read.len()),
                slice::from_raw_parts_mut(self.base.as_ptr().add(w), write.len()),
            )
        }
    }

    /// Sets the length of the data, growing or shrinking at the end; new bytes
    /// hold whatever was there. Returns whether it fits in the frame.
    #[inline(always)]
    pub fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        let room = self.usable_bytes.checked_sub(frame.headroom());
        let fits = room.is_some_and(|room| len <= room);
        if fits {
            frame.place = frame.place & !0xffff | len as u64;
        }
        fits
    }

    /// Makes `before` bytes of the headroom part of the data, and the data
    /// `len` bytes long in all. Returns whether it fits in the frame; if not,
    /// the frame is as it was.
    #[inline(always)]
    pub fn prepend(&self, frame: &mut Frame, before: usize, len: usize) -> bool {
        let headroom = frame.headroom();
        let fits = headroom >= before && headroom - before + len <= self.usable_bytes;
        if fits {
            frame.place = ((frame.at() - before) as u64) << 16 | len as u64;
            frame.notes -= before as u64;
        }
        fits
    }

    /// Copies a frame into a new one; `None` when there is no frame left.
    pub fn copy_of(&mut self, frame: &Frame) -> Option<Frame> {
        let mut copy = self.alloc()?;
        let start = copy.at() - copy.headroom();
        copy = Frame {
            place: ((start + frame.headroom()) as u64) << 16 | frame.len() as u64,
            notes: frame.notes,
        };
        let (from, to) = self.pair(frame, &mut copy);
        to.copy_from_slice(from);
        Some(copy)
    }

    /// Gives a frame to the kernel or a card. Returns the address of its data,
    /// in bytes from the start of the mapping.
    #[inline(always)]
    pub fn lend(&mut self, frame: Frame) -> u64 {
        self.lending().lend(frame)
    }

    /// Takes a lent frame back by an address inside it, with `len` bytes of
    /// data from there. `None` when the address is outside the mapping, the
    /// data does not fit in the frame, or the frame is not lent.
    #[inline(always)]
    pub fn reclaim(&mut self, address: u64, len: u32) -> Option<Frame> {
        self.lending().reclaim(address, len)
    }

    /// Takes every lent frame back into the free list. Only for when the other
    /// side is gone: its socket closed, its card reset.
    pub fn reclaim_all(&mut self) {
        for index in 0..self.state.len() {
            if self.state[index] == State::Lent {
                self.state[index] = State::Held;
                self.free(Frame::new(index << self.shift, 0, 0));
            }
        }
    }

    /// Where the frame's data begins in the mapping, checked.
    #[inline(always)]
    fn locate(&self, frame: &Frame) -> usize {
        if frame.at() + frame.len() > self.bytes {
            foreign_frame();
        }
        frame.at()
    }
}

/// Notes whose a frame is now. Only [`State::Lent`] matters to anybody but who
/// looks for mistakes.
#[inline(always)]
fn note(states: &mut [State], shift: u32, frame: &Frame, state: State) {
    let index = frame.at() >> shift;
    if cfg!(debug_assertions) {
        let held = states[index] == State::Held;
        assert!(held || state == State::Held, "{frame:?} freed twice");
        states[index] = state;
    }
}

/// The last `N` bytes in front of a frame's data, and `room` bytes from its
/// start on.
///
/// # Safety
/// All of them are inside one mapping from `base` on, and nobody else has a
/// slice of them as long as these exist.
#[inline(always)]
unsafe fn split<'a, const N: usize>(
    base: NonNull<u8>,
    frame: &Frame,
    room: usize,
) -> (&'a mut [u8; N], &'a mut [u8]) {
    // SAFETY: the caller's; the two slices are apart, and an array of bytes
    // needs no alignment.
    unsafe {
        let data = base.as_ptr().add(frame.at());
        (&mut *data.sub(N).cast::<[u8; N]>(), slice::from_raw_parts_mut(data, room))
    }
}

#[cold]
#[inline(never)]
fn foreign_frame() -> ! {
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

fn page_bytes(huge: bool) -> usize {
    if huge { HUGE_PAGE_BYTES } else { rustix::param::page_size() }
}

fn mapped_bytes(bytes: usize, huge: bool) -> usize {
    bytes.next_multiple_of(page_bytes(huge))
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
    let base = map_shared(&fd, bytes, Pages::Now)?;
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
    fn a_frame_used_up_to_its_end_is_given_back_as_itself() {
        let mut arena = arena(2);
        let (mut first, second) = (arena.alloc().unwrap(), arena.alloc().unwrap());
        let room = arena.room(&first);
        assert!(arena.set_len(&mut first, room) && !arena.set_len(&mut first, room + 1));
        first.advance(room);
        let (place, other) = (first.at() >> arena.shift, second.at() >> arena.shift);
        assert_ne!(place, other);
        arena.free(first);
        let again = arena.alloc().unwrap();
        assert_ne!(again.at() >> arena.shift, other);
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
    fn headers_are_the_end_of_the_headroom() {
        let mut arena = arena(2);
        let mut frame = arena.alloc_from(b"headpayload").unwrap();
        frame.advance(4);
        assert_eq!(arena.headers::<4>(&frame), Some(b"head"));
        let (head, room) = arena.headers_mut::<4>(&mut frame).unwrap();
        assert_eq!((&*head, &room[..7]), (b"head", &b"payload"[..]));
        assert_eq!(room.len(), 2047 - usize::from(HEADROOM_BYTES) - 4);
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
        let room = arena.room(&frame);
        assert!(!arena.set_len(&mut frame, room + 1));
        assert!(arena.set_len(&mut frame, room));
        frame.set_checksum(Checksum::Partial { start: 34, offset: 16 });
        frame.set_segment_bytes(1448);
        frame.advance(room);
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
        assert_eq!(frame.segment_bytes(), 0, "forgotten with the old checksum");
        arena.free(frame);
    }

    #[test]
    fn a_checksum_is_what_was_noted() {
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
    fn frames_of_a_larger_arena_are_refused() {
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
    fn a_frame_count_of_zero_is_refused() {
        let config = ArenaConfig { frames: 0, ..ArenaConfig::default() };
        assert!(matches!(Arena::new(config), Err(ArenaError::FrameCount(0))));
    }
}
