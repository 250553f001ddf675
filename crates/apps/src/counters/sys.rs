//! Memory-mapped counters that another process may read at any time.

use std::fs::File;
use std::io;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::ServeCounters;

/// Maps the counters at the start of `file` until the process ends. The file starts with zeros
/// or with earlier counters.
pub(super) fn map(file: &File) -> io::Result<&'static ServeCounters> {
    let bytes = size_of::<ServeCounters>();
    if file.metadata()?.len() < bytes as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let address = unsafe {
        mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
    }?;
    // SAFETY: the mapping begins at a page, is long enough, and is never unmapped.
    // `ServeCounters` consists of atomics, which other processes may write, and every bit
    // pattern is a valid value. Truncating the file ends this process by a signal (SIGBUS), as
    // with any mapped file.
    Ok(unsafe { &*address.cast::<ServeCounters>() })
}
