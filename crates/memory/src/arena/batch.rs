//! Batched allocation, freeing and lending of frames: cheaper than frame by frame.

use std::ptr::NonNull;
use std::slice;

use super::{
    Arena, Frame, FrameState, FreeSpan, HEADROOM_BYTES, panic_foreign_frame, set_frame_state,
    split_at_data,
};
use crate::copy_packet;

/// Allocates frames in a batch; created by [`Arena::alloc_batch`].
pub struct AllocBatch<'a> {
    base: NonNull<u8>,
    max_data_bytes: usize,
    shift: u32,
    free_spans: slice::Iter<'a, FreeSpan>,
    available: &'a mut usize,
    state: &'a mut [FrameState],
}

/// Frees frames in a batch; created by [`Arena::free_batch`].
pub struct FreeBatch<'a> {
    base: NonNull<u8>,
    bytes: usize,
    frame_bytes: usize,
    usable_bytes: usize,
    shift: u32,
    slots: slice::IterMut<'a, FreeSpan>,
    /// Number of free-list slots when the batch began.
    initial_slots: usize,
    available: &'a mut usize,
    state: &'a mut [FrameState],
}

/// Lends frames and takes them back in a batch; created by [`Arena::lend_batch`].
pub struct LendBatch<'a> {
    frame_bytes: usize,
    usable_bytes: usize,
    shift: u32,
    state: &'a mut [FrameState],
}

impl Arena {
    /// Begins a batch of lending and reclaiming frames.
    #[inline(always)]
    pub fn lend_batch(&mut self) -> LendBatch<'_> {
        LendBatch {
            frame_bytes: self.frame_bytes,
            usable_bytes: self.usable_bytes,
            shift: self.shift,
            state: &mut self.state,
        }
    }

    /// Begins a batch of allocations.
    #[inline(always)]
    pub fn alloc_batch(&mut self) -> AllocBatch<'_> {
        let available = self.available.min(self.free.len());
        AllocBatch {
            base: self.base,
            max_data_bytes: self.usable_bytes - usize::from(HEADROOM_BYTES),
            shift: self.shift,
            free_spans: self.free[..available].iter(),
            available: &mut self.available,
            state: &mut self.state,
        }
    }

    /// Begins a batch of freeing frames.
    #[inline(always)]
    pub fn free_batch(&mut self) -> FreeBatch<'_> {
        let available = self.available.min(self.free.len());
        let slots = self.free[available..].iter_mut();
        FreeBatch {
            base: self.base,
            bytes: self.bytes,
            frame_bytes: self.frame_bytes,
            usable_bytes: self.usable_bytes,
            shift: self.shift,
            initial_slots: slots.len(),
            slots,
            available: &mut self.available,
            state: &mut self.state,
        }
    }
}

impl LendBatch<'_> {
    /// Same as [`Arena::lend`].
    #[inline(always)]
    pub fn lend(&mut self, frame: Frame) -> u64 {
        self.state[frame.offset() >> self.shift] = FrameState::Lent;
        frame.offset() as u64
    }

    /// Same as [`Arena::reclaim`].
    #[inline(always)]
    pub fn reclaim(&mut self, address: u64, len: u32) -> Option<Frame> {
        let offset = usize::try_from(address).ok()?;
        let headroom = offset & (self.frame_bytes - 1);
        let state = self.state.get_mut(offset >> self.shift)?;
        if *state != FrameState::Lent || headroom as u64 + u64::from(len) > self.usable_bytes as u64
        {
            return None;
        }
        *state = FrameState::Allocated;
        Some(Frame::new(offset, headroom as u16, len as u16))
    }
}

impl AllocBatch<'_> {
    /// Same as [`Arena::alloc_from`].
    #[inline(always)]
    pub fn alloc_from(&mut self, bytes: &[u8]) -> Option<Frame> {
        if bytes.len() > self.max_data_bytes {
            return None;
        }
        let span = *self.free_spans.next_back()?;
        let frame = Frame { span: span | bytes.len() as u64, meta: u64::from(HEADROOM_BYTES) };
        set_frame_state(self.state, self.shift, &frame, FrameState::Allocated);
        // SAFETY: a free frame's span is inside the mapping, and the bytes fit behind its headroom
        // (`max_data_bytes`). The frame was free, so no other token for it exists, and the
        // exclusive borrow of the arena makes this the only slice into it.
        let data = unsafe {
            slice::from_raw_parts_mut(self.base.as_ptr().add(frame.offset()), bytes.len())
        };
        copy_packet(data, bytes);
        Some(frame)
    }
}

impl Drop for AllocBatch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.available = self.free_spans.len();
    }
}

impl FreeBatch<'_> {
    /// Calls `read` with the frame's data, then frees the frame.
    ///
    /// # Panics
    /// When the frame belongs to a larger arena.
    #[inline(always)]
    pub fn consume<R>(&mut self, frame: Frame, read: impl FnOnce(&[u8]) -> R) -> R {
        let (offset, len) = (frame.offset(), frame.len());
        // Data never reaches the last byte of a frame.
        if offset + len >= self.bytes {
            panic_foreign_frame();
        }
        // SAFETY: the range lies inside the mapping (checked just now); the exclusive borrow of the
        // arena excludes writers.
        let result = read(unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset), len) });
        self.push_free(&frame, offset & !(self.frame_bytes - 1));
        result
    }

    /// Same as [`Arena::free`].
    ///
    /// # Panics
    /// When the frame belongs to a larger arena.
    #[inline(always)]
    pub fn free(&mut self, frame: Frame) {
        let start = frame.offset() & !(self.frame_bytes - 1);
        if start >= self.bytes {
            panic_foreign_frame();
        }
        self.push_free(&frame, start);
    }

    /// Adds the frame that begins at `start` to the free list.
    #[inline(always)]
    fn push_free(&mut self, frame: &Frame, start: usize) {
        set_frame_state(self.state, self.shift, frame, FrameState::Free);
        match self.slots.next() {
            Some(slot) => *slot = ((start | usize::from(HEADROOM_BYTES)) as u64) << 16,
            None => panic_foreign_frame(),
        }
    }

    /// Same as [`Arena::headers_mut`].
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
        // SAFETY: as in `Arena::headers_mut`.
        Some(unsafe { split_at_data(self.base, frame, space) })
    }

    /// Same as [`Arena::set_len`].
    #[inline(always)]
    pub fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        let room = self.usable_bytes.checked_sub(frame.headroom());
        let fits = room.is_some_and(|room| len <= room);
        if fits {
            frame.span = frame.span & !0xffff | len as u64;
        }
        fits
    }
}

impl Drop for FreeBatch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.available += self.initial_slots - self.slots.len();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ArenaConfig, FrameSize};
    use super::*;

    fn arena(frames: u32) -> Arena {
        Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
    }

    #[test]
    fn allocates_and_frees_frames_in_batches() {
        let mut arena = arena(3);
        let mut batch = arena.alloc_batch();
        assert!(batch.alloc_from(&[0; 2000]).is_none(), "data larger than a frame");
        let frames: Vec<_> = [&b"one"[..], b"", b"three"]
            .into_iter()
            .map(|bytes| batch.alloc_from(bytes).unwrap())
            .collect();
        assert!(batch.alloc_from(b"x").is_none(), "no free frame left");
        drop(batch);
        assert_eq!(arena.available(), 0);
        assert_eq!(arena.bytes(&frames[2]), b"three");
        let mut batch = arena.free_batch();
        let mut seen = Vec::new();
        for frame in frames {
            batch.consume(frame, |bytes| seen.push(bytes.to_vec()));
        }
        drop(batch);
        assert_eq!(seen, [&b"one"[..], b"", b"three"]);
        assert_eq!(arena.available(), 3);
        assert!(arena.alloc().is_some());
    }

    #[test]
    fn edits_a_frame_while_freeing_others() {
        let mut arena = arena(2);
        let mut frame = arena.alloc_from(b"headpayload").unwrap();
        let other = arena.alloc().unwrap();
        frame.advance(4);
        let mut batch = arena.free_batch();
        batch.free(other);
        let (head, space) = batch.headers_mut::<4>(&mut frame).unwrap();
        assert_eq!((&*head, &space[..7]), (b"head", &b"payload"[..]));
        assert_eq!(space.len(), 2047 - usize::from(HEADROOM_BYTES) - 4);
        assert!(batch.headers_mut::<261>(&mut frame).is_none());
        assert!(!batch.set_len(&mut frame, 2048) && batch.set_len(&mut frame, 3));
        drop(batch);
        assert_eq!((arena.bytes(&frame), arena.available()), (&b"pay"[..], 1));
        arena.free(frame);
    }

    #[test]
    fn reclaims_lent_frames_by_address() {
        let mut arena = arena(2);
        let (a, b) = (arena.alloc_from(b"first").unwrap(), arena.alloc_from(b"other").unwrap());
        let mut batch = arena.lend_batch();
        let (a, b) = (batch.lend(a), batch.lend(b));
        let frame = batch.reclaim(b + 1, 3).unwrap();
        assert!(batch.reclaim(b, 0).is_none(), "no longer lent");
        assert_eq!(arena.bytes(&frame), b"the");
        arena.free(frame);
        let frame = arena.reclaim(a, 5).unwrap();
        assert_eq!(arena.bytes(&frame), b"first");
        arena.free(frame);
        assert_eq!(arena.available(), 2);
    }

    #[test]
    fn panicking_reader_loses_only_its_own_frame() {
        let mut arena = arena(2);
        let (a, b) = (arena.alloc_from(b"a").unwrap(), arena.alloc_from(b"b").unwrap());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut batch = arena.free_batch();
            batch.consume(a, |_| ());
            batch.consume(b, |_| panic!("no"));
        }));
        assert!(result.is_err());
        assert_eq!(arena.available(), 1);
    }

    #[test]
    fn panics_on_frames_of_a_larger_arena() {
        let (mut small, mut large) = (arena(1), arena(2));
        let (first, second) = (large.alloc_from(b"x").unwrap(), large.alloc_from(b"x").unwrap());
        let outside = if first.offset() > second.offset() { first } else { second };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            small.free_batch().consume(outside, <[u8]>::len)
        }));
        assert!(result.is_err());
        assert_eq!(small.available(), 1);
    }
}
