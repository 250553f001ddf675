//! A piece of memory that can be handed to another process.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use super::Words;
use super::byte_part::copy_shared;
use crate::mapping::{Pages, map_shared};

/// What keeps a mapping good: nobody can make the file shorter under it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const WORD_BYTES: usize = size_of::<u64>();

/// Memory of whole words that other processes may write to at any time.
pub struct Region {
    base: NonNull<AtomicU64>,
    words: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread;
// it is only reached as atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region of zeroes, of a size that stays as it is.
    ///
    /// # Errors
    /// When the kernel gives no memory or no descriptor.
    pub fn create(words: usize) -> io::Result<Self> {
        Self::make(words, Pages::Now)
    }

    /// As [`Region::create`], but memory is there only where it is used.
    ///
    /// # Errors
    /// As [`Region::create`].
    pub fn reserve(words: usize) -> io::Result<Self> {
        Self::make(words, Pages::WhenUsed)
    }

    fn make(words: usize, pages: Pages) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("tidegate-shared", flags)?;
        rustix::fs::ftruncate(&fd, (words * WORD_BYTES) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Self::map(fd, words, pages)
    }

    /// Maps a region that another process has made, of at most so many words.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when it is larger, is empty, or could
    /// still be made shorter, which would end us; else what the kernel says.
    pub fn open(fd: OwnedFd, most_words: usize) -> io::Result<Self> {
        // What the one who made it has there is there for us too.
        let refuse = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what.to_owned()));
        // Other files have no seals.
        let sealed = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        if !sealed.contains(SEALS) {
            return refuse("the shared memory is not sealed: its size could change");
        }
        let bytes = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        let words = bytes / WORD_BYTES;
        if words == 0 || words > most_words {
            return refuse("the shared memory has not the size that was agreed on");
        }
        Self::map(fd, words, Pages::WhenUsed)
    }

    fn map(fd: OwnedFd, words: usize, pages: Pages) -> io::Result<Self> {
        let base = map_shared(&fd, words * WORD_BYTES, pages)?.cast();
        Ok(Self { base, words, fd })
    }

    /// How many bytes it has.
    pub(super) fn bytes(&self) -> usize {
        self.words * WORD_BYTES
    }

    /// Copies `from` to byte `at` and on.
    pub(super) fn put(&self, at: usize, from: &[u8]) {
        assert!(self.has(at, from.len()), "a copy into shared memory stays inside");
        // SAFETY: the range is inside the mapping, and nothing here is ever
        // referred to as bytes.
        unsafe { copy_shared(self.base.as_ptr().cast::<u8>().add(at), from.as_ptr(), from.len()) };
    }

    /// Copies from byte `at` and on into `to`.
    pub(super) fn get(&self, at: usize, to: &mut [u8]) {
        assert!(self.has(at, to.len()), "a copy from shared memory stays inside");
        // SAFETY: the range is inside the mapping, and `to` is ours alone.
        unsafe { copy_shared(to.as_mut_ptr(), self.base.as_ptr().cast::<u8>().add(at), to.len()) };
    }

    fn has(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.bytes())
    }

    /// How many bytes of it have memory: those that somebody has written to.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn used_bytes(&self) -> io::Result<u64> {
        /// The unit of `st_blocks`, stat(2).
        const BLOCK_BYTES: u64 = 512;
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks as u64 * BLOCK_BYTES)
    }

    /// Gives the memory of these bytes back; they are zero when next used.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn discard(&self, start: usize, len: usize) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.fd, mode, start as u64, len as u64)?)
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Words for Region {
    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this many words, begins on a page, lives as
        // long as `self` and cannot shrink (it is sealed). Every bit pattern is
        // a number, and what others write meanwhile is an atomic's business.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and no borrow of it can
        // outlive `self`. Nothing can be done about a failure.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * WORD_BYTES) };
    }
}

/// Some words of a region, for one of the rings in it.
#[derive(Clone)]
pub struct Part {
    region: Arc<Region>,
    range: Range<usize>,
}

impl Part {
    /// These words of a region; `None` when it has not as many.
    pub fn new(region: &Arc<Region>, range: Range<usize>) -> Option<Self> {
        region.words().get(range.clone())?;
        Some(Self { region: Arc::clone(region), range })
    }
}

impl Words for Part {
    #[inline]
    fn words(&self) -> &[AtomicU64] {
        self.region.words().get(self.range.clone()).unwrap_or(&[])
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn again(region: &Region) -> OwnedFd {
        region.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn two_mappings_are_the_same_memory() {
        let ours = Region::create(100).unwrap();
        let theirs = Region::open(again(&ours), 100).unwrap();
        ours.words()[99].store(7, Ordering::Relaxed);
        assert_eq!(theirs.words()[99].load(Ordering::Relaxed), 7);
        assert_eq!(theirs.words().len(), 100);
    }

    #[test]
    fn what_could_change_its_size_is_refused() {
        let ours = Region::create(100).unwrap();
        assert!(Region::open(again(&ours), 99).is_err(), "larger than agreed on");
        assert!(rustix::fs::ftruncate(&ours, 8).is_err(), "it is sealed");
        let fd = rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 800).unwrap();
        let error = Region::open(fd, 100).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Region::open(file.into(), usize::MAX).is_err(), "no memory at all");
    }

    #[test]
    fn a_part_is_inside_its_region() {
        let region = Arc::new(Region::create(10).unwrap());
        assert_eq!(Part::new(&region, 2..10).unwrap().words().len(), 8);
        assert!(Part::new(&region, 2..11).is_none());
    }
}
