//! Bytes of a region.

use std::sync::Arc;

use super::{Bytes, Region};

/// Some bytes of a region, for one of the streams in it.
#[derive(Clone)]
pub struct BytePart {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl BytePart {
    /// These bytes of a region; `None` when it has not as many. Nobody may reach
    /// them as words.
    pub fn new(region: &Arc<Region>, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= region.bytes()).then(|| Self { region: Arc::clone(region), start, len })
    }

    /// How many of so many bytes from `at` on there are.
    fn within(&self, at: usize, bytes: usize) -> usize {
        bytes.min(self.len.saturating_sub(at))
    }
}

impl Bytes for BytePart {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn put(&self, at: usize, from: &[u8]) {
        let from = &from[..self.within(at, from.len())];
        if !from.is_empty() {
            self.region.put(self.start + at, from);
        }
    }

    #[inline]
    fn get(&self, at: usize, to: &mut [u8]) {
        let len = self.within(at, to.len());
        if len > 0 {
            self.region.get(self.start + at, &mut to[..len]);
        }
    }
}

/// Copies bytes of which one side may change meanwhile, by whoever else has it
/// mapped. What is copied then is some mixture of old and new.
///
/// # Safety
/// Both ranges are mapped, and nothing of this program's refers to `to`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller says that both ranges are there. One instruction that
    // the compiler does not look into cannot be reasoned wrongly about because
    // of a race, as a call of `memcpy` could be.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

/// As above, byte by byte.
///
/// # Safety
/// As above.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    for n in 0..len {
        // SAFETY: the caller says that both ranges are there; a volatile access
        // of one byte is not reasoned about.
        unsafe { to.add(n).write_volatile(from.add(n).read_volatile()) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn bytes_go_to_the_other_mapping_and_nowhere_else() {
        let ours = Arc::new(Region::reserve(2).unwrap());
        let fd = ours.as_fd().try_clone_to_owned().unwrap();
        let theirs = Arc::new(Region::open(fd, 2).unwrap());
        assert!(BytePart::new(&ours, 3, 14).is_none());
        assert!(BytePart::new(&ours, usize::MAX, 2).is_none());
        let part = BytePart::new(&ours, 3, 9).unwrap();
        let whole = BytePart::new(&theirs, 0, 16).unwrap();
        assert_eq!((part.len(), whole.len()), (9, 16));
        part.put(2, b"abcdefghijk");
        part.put(9, b"x");
        let mut seen = [b'-'; 20];
        whole.get(0, &mut seen);
        assert_eq!(&seen, b"\0\0\0\0\0abcdefg\0\0\0\0----");
        ours.discard(0, 16).unwrap();
        whole.get(0, &mut seen);
        assert_eq!(seen[..16], [0; 16]);
    }
}
