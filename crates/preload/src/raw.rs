//! Conversion of C arguments, and of the addresses of kernel sockets.

use std::net::SocketAddr;

use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
pub(crate) use tidegate_posix::arguments::*;

use crate::real;

/// Address that a kernel socket is bound to.
pub(crate) fn kernel_local_address(fd: c_int) -> Option<SocketAddr> {
    // SAFETY: plain integers, for which zero is valid.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    let ptr: *mut sockaddr = (&raw mut storage).cast();
    // SAFETY: the buffer has `len` bytes, and the kernel returns how many it wrote.
    unsafe {
        match real::getsockname(fd, ptr, &mut len) {
            0 => address(ptr, len),
            _ => None,
        }
    }
}

/// True when a kernel socket is connected.
pub(crate) fn has_kernel_peer(fd: c_int) -> bool {
    // SAFETY: plain integers, for which zero is valid.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    // SAFETY: the buffer has `len` bytes.
    unsafe { real::getpeername(fd, (&raw mut storage).cast(), &mut len) == 0 }
}
