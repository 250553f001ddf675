//! Shared mappings of file-backed memory.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// Allocation time of the pages of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagePolicy {
    /// Immediately: a page fault per frame under load would look like a slow stack, and missing
    /// memory must fail here, not by a signal later.
    Prefault,
    /// At first use: most pages may never be used.
    OnDemand,
}

/// Maps the first `bytes` bytes of a file for reading and writing, shared with all processes
/// that map it.
pub(crate) fn map_shared(
    fd: impl AsFd,
    bytes: usize,
    pages: PagePolicy,
) -> io::Result<NonNull<u8>> {
    let flags = match pages {
        PagePolicy::Prefault => MapFlags::SHARED | MapFlags::POPULATE,
        PagePolicy::OnDemand => MapFlags::SHARED | MapFlags::NORESERVE,
    };
    // SAFETY: a new mapping at an address of the kernel's choice aliases
    // nothing.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            flags,
            fd,
            0,
        )?
    };
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))
}
