//! Allocator of the library, apart from the C library's.
//!
//! A signal handler may use a socket after it has interrupted the application in `malloc`.
//! The library must not wait for the locks of `malloc` then.

use std::alloc::{GlobalAlloc, Layout};

use mimalloc::MiMalloc;

use crate::errno;

/// Allocator that leaves `errno` unchanged, as the C library's does: the application may read
/// `errno` next.
struct ErrnoPreservingAllocator;

#[global_allocator]
static ALLOCATOR: ErrnoPreservingAllocator = ErrnoPreservingAllocator;

// SAFETY: every method forwards to an allocator that upholds the contract.
unsafe impl GlobalAlloc for ErrnoPreservingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        errno::preserve(|| unsafe { MiMalloc.alloc(layout) })
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        errno::preserve(|| unsafe { MiMalloc.dealloc(ptr, layout) });
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        errno::preserve(|| unsafe { MiMalloc.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        errno::preserve(|| unsafe { MiMalloc.realloc(ptr, layout, size) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_preserves_errno() {
        // SAFETY: the address of this thread's own errno.
        let code = unsafe { &mut *libc::__errno_location() };
        *code = libc::EXDEV;
        assert!(errno::preserve(|| std::fs::metadata("/nowhere").is_err()));
        assert_eq!(*code, libc::EXDEV);
        for bytes in (4..28).map(|shift| 1 << shift) {
            let mut all = vec![vec![1u8; bytes], vec![0; bytes]];
            all[0].reserve(bytes * 2);
            drop(std::hint::black_box(all));
            assert_eq!(*code, libc::EXDEV, "{bytes}");
        }
    }
}
