//! Mappings of memory that has a descriptor.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// When the pages of a mapping come to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    /// At once: a page fault per frame under load would look like a slow stack,
    /// and missing memory must fail here, not by a signal later.
    Now,
    /// When they are used for the first time: most of them may never be.
    WhenUsed,
}

/// Maps the first `bytes` of a file, to be read and written by all who have it
/// mapped.
pub(crate) fn map_shared(fd: impl AsFd, bytes: usize, pages: Pages) -> io::Result<NonNull<u8>> {
    let flags = match pages {
        Pages::Now => MapFlags::SHARED | MapFlags::POPULATE,
        Pages::WhenUsed => MapFlags::SHARED | MapFlags::NORESERVE,
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
