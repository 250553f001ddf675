//! Bytes of another process that nobody can change any more.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::slice;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Seals that make the bytes of a file final.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// Contents of a sealed memory file (`memfd_create(2)`), mapped and not copied.
#[derive(Debug)]
pub struct SealedBytes {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, is not tied to a thread, and is only read.
unsafe impl Send for SealedBytes {}
// SAFETY: as above.
unsafe impl Sync for SealedBytes {}

impl SealedBytes {
    /// Creates a file with what `write` writes, and seals it.
    ///
    /// # Errors
    /// The error of `write`, or the kernel's.
    pub fn create(write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(rustix::fs::memfd_create("tidegate-sealed", flags)?);
        write(&mut file)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Ok(file.into())
    }

    /// Maps a file that another process has created, of at most `max_len` bytes.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the file is larger, or is not sealed: its contents could
    /// change while they are read. Otherwise the kernel's error.
    pub fn map(fd: OwnedFd, max_len: u64) -> io::Result<Self> {
        // Other files have no seals.
        let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        let len = u64::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(u64::MAX);
        if !seals.contains(SEALS) || len > max_len {
            let what = "the memory file is not sealed, or too large";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let len = usize::try_from(len).map_err(io::Error::other)?;
        if len == 0 {
            return Ok(Self { base: NonNull::dangling(), len });
        }
        // Kernels before 6.7 refuse a shared mapping of a file that is sealed for writing.
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        Ok(Self { base, len })
    }
}

impl Deref for SealedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `len` bytes, as has the file, whose size is sealed. No process can
        // write to the file, nor to this private mapping, which is read-only.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for SealedBytes {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the range was mapped by `SealedBytes::map`, and no borrow of it outlives this
            // value. A failure has no remedy.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::Write;

    use super::*;

    fn sealed(bytes: &[u8]) -> OwnedFd {
        SealedBytes::create(|file| file.write_all(bytes)).unwrap()
    }

    #[test]
    fn maps_what_was_written() {
        for bytes in [&b""[..], b"x", &[7; 100_000]] {
            let mapped = SealedBytes::map(sealed(bytes), 100_000).unwrap();
            assert!(*mapped == *bytes);
        }
        let refused = SealedBytes::map(sealed(&[7; 11]), 10).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn file_that_can_change_is_refused() {
        let file = sealed(b"final");
        File::from(file.try_clone().unwrap()).write_all(b"x").unwrap_err();
        SealedBytes::map(file, 10).unwrap();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let refused = SealedBytes::map(file, 10).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        let other = File::open("/dev/null").unwrap();
        SealedBytes::map(other.into(), 10).unwrap_err();
    }
}
