//! Taking and giving back many frames for less than one by one.

use std::ptr::NonNull;
use std::slice;

use super::{Arena, Frame, FreePlace, HEADROOM_BYTES, State, foreign_frame, note, split};
use crate::copy_packet;

/// Takes free frames; made by [`Arena::take`].
pub struct Take<'a> {
    base: NonNull<u8>,
    room: usize,
    shift: u32,
    places: slice::Iter<'a, FreePlace>,
    available: &'a mut usize,
    state: &'a mut [State],
}

/// Gives frames back; made by [`Arena::give_back`].
pub struct GiveBack<'a> {
    base: NonNull<u8>,
    bytes: usize,
    frame_bytes: usize,
    usable_bytes: usize,
    shift: u32,
    places: slice::IterMut<'a, FreePlace>,
    /// The places there were, less those that are counted in `available`.
    unused: usize,
    available: &'a mut usize,
    state: &'a mut [State],
}

/// Lends frames and takes them back; made by [`Arena::lending`].
pub struct Lending<'a> {
    frame_bytes: usize,
    usable_bytes: usize,
    shift: u32,
    state: &'a mut [State],
}

impl Arena {
    /// To lend many frames or take them back, one after the other.
    #[inline(always)]
    pub fn lending(&mut self) -> Lending<'_> {
        Lending {
            frame_bytes: self.frame_bytes,
            usable_bytes: self.usable_bytes,
            shift: self.shift,
            state: &mut self.state,
        }
    }

    /// To take many frames, one after the other.
    #[inline(always)]
    pub fn take(&mut self) -> Take<'_> {
        let available = self.available.min(self.free.len());
        Take {
            base: self.base,
            room: self.usable_bytes - usize::from(HEADROOM_BYTES),
            shift: self.shift,
            places: self.free[..available].iter(),
            available: &mut self.available,
            state: &mut self.state,
        }
    }

    /// To give many frames back, one after the other.
    #[inline(always)]
    pub fn give_back(&mut self) -> GiveBack<'_> {
        let available = self.available.min(self.free.len());
        let places = self.free[available..].iter_mut();
        GiveBack {
            base: self.base,
            bytes: self.bytes,
            frame_bytes: self.frame_bytes,
            usable_bytes: self.usable_bytes,
            shift: self.shift,
            unused: places.len(),
            places,
            available: &mut self.available,
            state: &mut self.state,
        }
    }
}

impl Lending<'_> {
    /// As [`Arena::lend`].
    #[inline(always)]
    pub fn lend(&mut self, frame: Frame) -> u64 {
        self.state[frame.at() >> self.shift] = State::Lent;
        frame.at() as u64
    }

    /// As [`Arena::reclaim`].
    #[inline(always)]
    pub fn reclaim(&mut self, address: u64, len: u32) -> Option<Frame> {
        let at = usize::try_from(address).ok()?;
        let headroom = at & (self.frame_bytes - 1);
        let state = self.state.get_mut(at >> self.shift)?;
        if *state != State::Lent || headroom as u64 + u64::from(len) > self.usable_bytes as u64 {
            return None;
        }
        *state = State::Held;
        Some(Frame::new(at, headroom as u16, len as u16))
    }
}

impl Take<'_> {
    /// As [`Arena::alloc_from`].
    #[inline(always)]
    pub fn alloc_from(&mut self, bytes: &[u8]) -> Option<Frame> {
        if bytes.len() > self.room {
            return None;
        }
        let place = *self.places.next_back()?;
        let frame = Frame { place: place | bytes.len() as u64, notes: u64::from(HEADROOM_BYTES) };
        note(self.state, self.shift, &frame, State::Held);
        // SAFETY: a free frame's place is inside the mapping, and the bytes fit
        // behind its headroom (`room`). Nobody else has this frame, and the
        // exclusive borrow of the arena makes this the only slice into it.
        let data =
            unsafe { slice::from_raw_parts_mut(self.base.as_ptr().add(frame.at()), bytes.len()) };
        copy_packet(data, bytes);
        Some(frame)
    }
}

impl Drop for Take<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.available = self.places.len();
    }
}

impl GiveBack<'_> {
    /// Gives a frame back when `read` has seen its data.
    ///
    /// # Panics
    /// When the frame belongs to a larger arena.
    #[inline(always)]
    pub fn consume<R>(&mut self, frame: Frame, read: impl FnOnce(&[u8]) -> R) -> R {
        let (at, len) = (frame.at(), frame.len());
        // No data reaches to the last byte of a frame.
        if at + len >= self.bytes {
            foreign_frame();
        }
        // SAFETY: the range lies inside the mapping (checked just now); the
        // exclusive borrow of the arena excludes whoever writes to it.
        let result = read(unsafe { slice::from_raw_parts(self.base.as_ptr().add(at), len) });
        self.put(&frame, at & !(self.frame_bytes - 1));
        result
    }

    /// As [`Arena::free`].
    ///
    /// # Panics
    /// When the frame belongs to a larger arena.
    #[inline(always)]
    pub fn free(&mut self, frame: Frame) {
        let start = frame.at() & !(self.frame_bytes - 1);
        if start >= self.bytes {
            foreign_frame();
        }
        self.put(&frame, start);
    }

    /// Puts the frame that begins at `start` among the free ones.
    #[inline(always)]
    fn put(&mut self, frame: &Frame, start: usize) {
        note(self.state, self.shift, frame, State::Free);
        match self.places.next() {
            Some(place) => *place = ((start | usize::from(HEADROOM_BYTES)) as u64) << 16,
            None => foreign_frame(),
        }
    }

    /// As [`Arena::headers_mut`].
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
        // SAFETY: as in `Arena::headers_mut`.
        Some(unsafe { split(self.base, frame, room) })
    }

    /// As [`Arena::set_len`].
    #[inline(always)]
    pub fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        let room = self.usable_bytes.checked_sub(frame.headroom());
        let fits = room.is_some_and(|room| len <= room);
        if fits {
            frame.place = frame.place & !0xffff | len as u64;
        }
        fits
    }
}

impl Drop for GiveBack<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.available += self.unused - self.places.len();
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
    fn what_is_taken_together_comes_back_together() {
        let mut arena = arena(3);
        let mut take = arena.take();
        assert!(take.alloc_from(&[0; 2000]).is_none(), "too long");
        let frames: Vec<_> = [&b"one"[..], b"", b"three"]
            .into_iter()
            .map(|bytes| take.alloc_from(bytes).unwrap())
            .collect();
        assert!(take.alloc_from(b"x").is_none(), "none left");
        drop(take);
        assert_eq!(arena.available(), 0);
        assert_eq!(arena.bytes(&frames[2]), b"three");
        let mut back = arena.give_back();
        let mut seen = Vec::new();
        for frame in frames {
            back.consume(frame, |bytes| seen.push(bytes.to_vec()));
        }
        drop(back);
        assert_eq!(seen, [&b"one"[..], b"", b"three"]);
        assert_eq!(arena.available(), 3);
        assert!(arena.alloc().is_some());
    }

    #[test]
    fn frames_are_changed_while_others_are_given_back() {
        let mut arena = arena(2);
        let mut frame = arena.alloc_from(b"headpayload").unwrap();
        let other = arena.alloc().unwrap();
        frame.advance(4);
        let mut back = arena.give_back();
        back.free(other);
        let (head, room) = back.headers_mut::<4>(&mut frame).unwrap();
        assert_eq!((&*head, &room[..7]), (b"head", &b"payload"[..]));
        assert_eq!(room.len(), 2047 - usize::from(HEADROOM_BYTES) - 4);
        assert!(back.headers_mut::<261>(&mut frame).is_none());
        assert!(!back.set_len(&mut frame, 2048) && back.set_len(&mut frame, 3));
        drop(back);
        assert_eq!((arena.bytes(&frame), arena.available()), (&b"pay"[..], 1));
        arena.free(frame);
    }

    #[test]
    fn what_is_lent_together_is_taken_back_by_its_addresses() {
        let mut arena = arena(2);
        let (a, b) = (arena.alloc_from(b"first").unwrap(), arena.alloc_from(b"other").unwrap());
        let mut lending = arena.lending();
        let (a, b) = (lending.lend(a), lending.lend(b));
        let frame = lending.reclaim(b + 1, 3).unwrap();
        assert!(lending.reclaim(b, 0).is_none(), "it is not lent any more");
        assert_eq!(arena.bytes(&frame), b"the");
        arena.free(frame);
        let frame = arena.reclaim(a, 5).unwrap();
        assert_eq!(arena.bytes(&frame), b"first");
        arena.free(frame);
        assert_eq!(arena.available(), 2);
    }

    #[test]
    fn a_reader_that_panics_loses_only_its_own_frame() {
        let mut arena = arena(2);
        let (a, b) = (arena.alloc_from(b"a").unwrap(), arena.alloc_from(b"b").unwrap());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut back = arena.give_back();
            back.consume(a, |_| ());
            back.consume(b, |_| panic!("no"));
        }));
        assert!(result.is_err());
        assert_eq!(arena.available(), 1);
    }

    #[test]
    fn frames_of_a_larger_arena_are_refused() {
        let (mut small, mut large) = (arena(1), arena(2));
        let (first, second) = (large.alloc_from(b"x").unwrap(), large.alloc_from(b"x").unwrap());
        let outside = if first.at() > second.at() { first } else { second };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            small.give_back().consume(outside, <[u8]>::len)
        }));
        assert!(result.is_err());
        assert_eq!(small.available(), 1);
    }
}
