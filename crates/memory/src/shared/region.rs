//! Memory that can be shared with another process.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use super::SharedWords;
use super::copy::copy_shared;
use crate::mapping::{PagePolicy, map_shared};
use crate::own_fd::OwnFd;

/// Seals that keep a mapping valid: no process can change the size of the file.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const WORD_BYTES: usize = size_of::<u64>();

/// Mapping and file of a dropped [`Region`]. Dropping this value unmaps and closes them: system
/// calls that can wait for the other processes with the same memory.
pub struct ReleasedRegion {
    base: NonNull<AtomicU64>,
    words: usize,
    fd: OwnFd,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread.
unsafe impl Send for ReleasedRegion {}
// SAFETY: as above; nothing is reached through a shared reference but the descriptor.
unsafe impl Sync for ReleasedRegion {}

impl Drop for ReleasedRegion {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `Region::map`, and no borrow of it outlives the region. A
        // failure has no remedy.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * WORD_BYTES) };
    }
}

/// Receiver of what a region leaves when it is dropped.
pub type RegionReleaser = Arc<dyn Fn(ReleasedRegion) + Send + Sync>;

/// Memory of whole words that other processes may write to at any time.
pub struct Region {
    base: NonNull<AtomicU64>,
    words: usize,
    /// Taken only when the region is dropped.
    file: ManuallyDrop<ReleasedRegion>,
    releaser: Option<RegionReleaser>,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread;
// it is only reached as atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates a zeroed region of fixed size, with all its pages allocated.
    ///
    /// # Errors
    /// When the kernel provides no memory or no file descriptor.
    pub fn create(words: usize) -> io::Result<Self> {
        Self::create_with(words, PagePolicy::Prefault)
    }

    /// Same as [`Region::create`], but pages are allocated at first use.
    ///
    /// # Errors
    /// As [`Region::create`].
    pub fn reserve(words: usize) -> io::Result<Self> {
        Self::create_with(words, PagePolicy::OnDemand)
    }

    fn create_with(words: usize, pages: PagePolicy) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("tidegate-shared", flags)?;
        rustix::fs::ftruncate(&fd, (words * WORD_BYTES) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Self::map(fd, words, pages)
    }

    /// Maps a region that another process has created, of at most `max_words` words.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the region is larger, is empty, or is not sealed: a
    /// region that shrinks would kill this process. Otherwise the kernel's error.
    pub fn open(fd: OwnedFd, max_words: usize) -> io::Result<Self> {
        // Pages that the creator has allocated are available here too.
        let refuse =
            |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidData, reason.to_owned()));
        // Other files have no seals.
        let sealed = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        if !sealed.contains(SEALS) {
            return refuse("the shared memory is not sealed: its size could change");
        }
        let bytes = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        let words = bytes / WORD_BYTES;
        if words == 0 || words > max_words {
            return refuse("the shared memory is empty or larger than agreed");
        }
        Self::map(fd, words, PagePolicy::OnDemand)
    }

    fn map(fd: OwnedFd, words: usize, pages: PagePolicy) -> io::Result<Self> {
        let base = map_shared(&fd, words * WORD_BYTES, pages)?.cast();
        let file = ManuallyDrop::new(ReleasedRegion { base, words, fd: fd.into() });
        Ok(Self { base, words, file, releaser: None })
    }

    /// Passes the mapping to `releaser` when the region is dropped, for a thread that may wait.
    #[must_use]
    pub fn released_by(mut self, releaser: RegionReleaser) -> Self {
        self.releaser = Some(releaser);
        self
    }

    /// Length in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.words * WORD_BYTES
    }

    /// Copies `from` into the region, starting at byte `offset`.
    pub(super) fn write_at(&self, offset: usize, from: &[u8]) {
        assert!(self.contains(offset, from.len()), "a copy into shared memory is out of bounds");
        // SAFETY: the range is inside the mapping, and no reference to it as bytes ever exists.
        unsafe {
            copy_shared(self.base.as_ptr().cast::<u8>().add(offset), from.as_ptr(), from.len());
        }
    }

    /// Copies into `to` from the region, starting at byte `offset`.
    pub(super) fn read_at(&self, offset: usize, to: &mut [u8]) {
        assert!(self.contains(offset, to.len()), "a copy from shared memory is out of bounds");
        // SAFETY: the range is inside the mapping, and `to` is borrowed exclusively.
        unsafe {
            copy_shared(to.as_mut_ptr(), self.base.as_ptr().cast::<u8>().add(offset), to.len());
        }
    }

    fn contains(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.bytes())
    }

    /// Bytes of the region with allocated pages: those written to by any process.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        /// The unit of `st_blocks`, stat(2).
        const BLOCK_BYTES: u64 = 512;
        Ok(rustix::fs::fstat(&self.file.fd)?.st_blocks as u64 * BLOCK_BYTES)
    }

    /// Frees the pages of this byte range; its bytes read as zero afterwards.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn discard(&self, start: usize, len: usize) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file.fd, mode, start as u64, len as u64)?)
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }
}

impl SharedWords for Region {
    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this many words, begins on a page, lives as long as `self` and
        // cannot shrink (it is sealed). Every bit pattern is a number, and concurrent writes by
        // other processes are atomic accesses.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `file` is not used again.
        let file = unsafe { ManuallyDrop::take(&mut self.file) };
        if let Some(releaser) = &self.releaser {
            releaser(file);
        }
    }
}

/// A word range of a region, for one of the rings in it.
#[derive(Clone)]
pub struct WordRange {
    region: Arc<Region>,
    range: Range<usize>,
}

impl WordRange {
    /// The words `range` of a region; `None` when the range is out of bounds.
    pub fn new(region: &Arc<Region>, range: Range<usize>) -> Option<Self> {
        region.words().get(range.clone())?;
        Some(Self { region: Arc::clone(region), range })
    }
}

impl SharedWords for WordRange {
    #[inline]
    fn words(&self) -> &[AtomicU64] {
        self.region.words().get(self.range.clone()).unwrap_or(&[])
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn dup_fd(region: &Region) -> OwnedFd {
        region.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn two_mappings_share_the_same_memory() {
        let ours = Region::create(100).unwrap();
        let theirs = Region::open(dup_fd(&ours), 100).unwrap();
        ours.words()[99].store(7, Ordering::Relaxed);
        assert_eq!(theirs.words()[99].load(Ordering::Relaxed), 7);
        assert_eq!(theirs.words().len(), 100);
    }

    #[test]
    fn rejects_memory_that_can_change_size() {
        let ours = Region::create(100).unwrap();
        assert!(Region::open(dup_fd(&ours), 99).is_err(), "larger than agreed on");
        assert!(rustix::fs::ftruncate(&ours, 8).is_err(), "it is sealed");
        let fd = rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 800).unwrap();
        let error = Region::open(fd, 100).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Region::open(file.into(), usize::MAX).is_err(), "not a memfd");
    }

    #[test]
    fn releaser_receives_the_mapping_of_a_dropped_region() {
        let (sender, released) = std::sync::mpsc::channel();
        let region = Region::create(10).unwrap().released_by(Arc::new(move |file| {
            sender.send(file).unwrap();
        }));
        let words = WordRange::new(&Arc::new(region), 2..10).unwrap();
        assert!(released.try_recv().is_err(), "the last word range is still there");
        drop(words);
        released.try_recv().unwrap();
    }

    #[test]
    fn word_range_stays_inside_its_region() {
        let region = Arc::new(Region::create(10).unwrap());
        assert_eq!(WordRange::new(&region, 2..10).unwrap().words().len(), 8);
        assert!(WordRange::new(&region, 2..11).is_none());
    }
}
