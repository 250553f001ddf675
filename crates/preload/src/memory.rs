//! Memory of the library's own.
//!
//! A handler may use a socket when it has interrupted the program in `malloc`, whose
//! locks must not be wanted then.

use std::alloc::{GlobalAlloc, Layout};

use mimalloc::MiMalloc;

/// As the C library's, it leaves `errno` as it was: that may be what the program is told
/// next.
struct Memory;

#[global_allocator]
static MEMORY: Memory = Memory;

fn keep_errno<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: the place of this thread's own errno.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let result = call();
        *errno = before;
        result
    }
}

// SAFETY: all is done by an allocator that keeps the promises.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises.
        keep_errno(|| unsafe { MiMalloc.alloc(layout) })
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises.
        keep_errno(|| unsafe { MiMalloc.dealloc(place, layout) });
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises.
        keep_errno(|| unsafe { MiMalloc.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promises.
        keep_errno(|| unsafe { MiMalloc.realloc(place, layout, size) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_stays_as_it_was() {
        // SAFETY: the place of this thread's own errno.
        let errno = unsafe { &mut *libc::__errno_location() };
        *errno = libc::EXDEV;
        assert!(keep_errno(|| std::fs::metadata("/nowhere").is_err()));
        assert_eq!(*errno, libc::EXDEV);
        for bytes in (4..28).map(|shift| 1 << shift) {
            let mut all = vec![vec![1u8; bytes], vec![0; bytes]];
            all[0].reserve(bytes * 2);
            drop(std::hint::black_box(all));
            assert_eq!(*errno, libc::EXDEV, "{bytes}");
        }
    }
}
