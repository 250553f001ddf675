//! Mapped memory of an arena.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;

use crate::mapping::{PagePolicy, map_shared};
use crate::numa::node_of_page;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory of an arena. Stays mapped as long as any reference to this value exists.
pub struct ArenaMemory {
    base: NonNull<u8>,
    /// Length of the mapping in bytes: whole pages.
    bytes: usize,
    page_bytes: usize,
}

impl ArenaMemory {
    /// Maps `bytes` bytes of a new memfd, rounded up to whole pages.
    pub(super) fn map(bytes: usize, huge: bool) -> io::Result<(Self, OwnedFd)> {
        let page_bytes = if huge { HUGE_PAGE_BYTES } else { rustix::param::page_size() };
        let bytes = bytes.next_multiple_of(page_bytes);
        let flags = if huge {
            MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
        } else {
            MemfdFlags::CLOEXEC
        };
        let fd = rustix::fs::memfd_create("tidegate-arena", flags)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        let base = map_shared(&fd, bytes, PagePolicy::Prefault)?;
        Ok((Self { base, bytes, page_bytes }, fd))
    }

    /// Address and length in bytes, in whole pages.
    pub fn range(&self) -> (NonNull<u8>, usize) {
        (self.base, self.bytes)
    }

    /// NUMA node of the first page; `None` if the kernel does not tell it.
    pub fn node(&self) -> Option<usize> {
        node_of_page(self.base)
    }

    /// Page size in bytes.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }
}

// SAFETY: the value only holds the address of the memory and unmaps the memory.
unsafe impl Send for ArenaMemory {}
// SAFETY: as above.
unsafe impl Sync for ArenaMemory {}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` with this length, and no slice into it can outlive
        // the arena, which holds a reference to this value.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) } {
            debug_assert!(false, "munmap of an arena failed: {error}");
        }
    }
}
