//! The C library's heap.

/// Gives the kernel back what is free in the heap, of all threads.
///
/// By itself the C library keeps what lies between things that are in use: after
/// a peak most of it. This takes up to some milliseconds, in which other threads
/// may have to wait for memory. Does nothing where the C library is not GNU's.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called by any thread at any time, and touches only what
    // nobody has.
    unsafe {
        libc::malloc_trim(0);
    }
}
