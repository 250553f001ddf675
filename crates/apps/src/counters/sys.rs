//! Counters in a file that another process may read at any time.

use std::fs::File;
use std::io;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::ServeCounters;

/// Maps the front of `file`, which holds zeros there or counters, and keeps it
/// mapped until the process ends.
pub(super) fn map(file: &File) -> io::Result<&'static ServeCounters> {
    let bytes = size_of::<ServeCounters>();
    if file.metadata()?.len() < bytes as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // SAFETY: a new mapping, at a place that the kernel chooses.
    let address = unsafe {
        mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
    }?;
    // SAFETY: the mapping begins at a page, is long enough, and is never
    // undone. `ServeCounters` is made of atomics, which may be written from
    // elsewhere, and every bit pattern is a value of it. Whoever cuts the file
    // short makes this process end by a signal, as with any mapped file.
    Ok(unsafe { &*address.cast::<ServeCounters>() })
}
