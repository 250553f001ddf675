//! Copying of bytes that another process may change meanwhile.

/// Copies bytes where another process may change the source or the destination meanwhile. The
/// result is then some mixture of old and new bytes.
///
/// # Safety
/// Both ranges are mapped, and no reference of this process points into `to`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller guarantees that both ranges are mapped. The compiler cannot draw wrong
    // conclusions from a race inside one opaque instruction, as it could from a call of `memcpy`.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Portable form of the above, byte by byte.
///
/// # Safety
/// As above.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    for n in 0..len {
        // SAFETY: the caller guarantees that both ranges are mapped; the compiler makes no
        // assumption about a volatile access of one byte.
        unsafe { to.add(n).write_volatile(from.add(n).read_volatile()) };
    }
}
