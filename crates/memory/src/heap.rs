//! Heap of the C library.

/// Returns the free memory of the heap to the kernel, for all threads.
///
/// By default the C library keeps free memory between live allocations: after a peak, most of
/// it. The call takes up to some milliseconds, in which other threads may have to wait for
/// memory. Does nothing where the C library is not glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` may be called by any thread at any time, and touches only memory
    // that is not allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}
