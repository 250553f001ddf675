//! Meaning of the C calls, with C arguments. The families of names (`tg_*`, `mtcp_*`, `ff_*`) differ
//! only in how they reach the stack.

pub(crate) mod message;
pub(crate) mod ring;
pub(crate) mod socket;
pub(crate) mod transfer;
pub(crate) mod wait;

use std::io;
use std::net::SocketAddr;

use libc::{c_int, sockaddr, socklen_t};
use tidegate_posix::arguments;

use crate::socket::{Socket, os_error};

/// Address from C.
///
/// # Errors
/// The kernel's: `EFAULT` without an address, `EINVAL` for a wrong length, `EAFNOSUPPORT` for
/// another family.
///
/// # Safety
/// `address` is null or points to `len` bytes.
#[inline]
pub(crate) unsafe fn read_address(
    address: *const sockaddr,
    len: socklen_t,
) -> io::Result<SocketAddr> {
    if address.is_null() {
        return Err(os_error(libc::EFAULT));
    }
    // SAFETY: guaranteed by the caller.
    let parsed = unsafe { arguments::address(address, len) };
    // SAFETY: guaranteed by the caller.
    parsed.ok_or_else(|| match unsafe { arguments::family(address, len) } {
        Some(libc::AF_INET | libc::AF_INET6) | None => os_error(libc::EINVAL),
        Some(_) => os_error(libc::EAFNOSUPPORT),
    })
}

/// Checks the pointers of an address that a call returns.
///
/// # Errors
/// `EFAULT` without space or length, `EINVAL` for a negative length.
///
/// # Safety
/// `len` is null or valid.
#[inline]
pub(crate) unsafe fn check_address_space(
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    match unsafe { len.as_ref() } {
        Some(&space) if c_int::try_from(space).is_err() => Err(os_error(libc::EINVAL)),
        Some(_) if !address.is_null() => Ok(()),
        _ => Err(os_error(libc::EFAULT)),
    }
}

/// Writes an address in the family of the socket.
///
/// # Safety
/// Both pointers are null or valid; `address` has space for `*len` bytes.
#[inline]
pub(crate) unsafe fn write_address(
    socket: &Socket,
    from: SocketAddr,
    address: *mut sockaddr,
    len: *mut socklen_t,
) {
    if socket.is_v6 {
        // SAFETY: guaranteed by the caller.
        return unsafe { write_address_v6(socket, from, address, len) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe { arguments::write_address(address, len, from) };
}

/// The same for an IPv6 socket. Not inlined: it needs the parts of the address one by one.
///
/// # Safety
/// As [`write_address`].
#[inline(never)]
unsafe fn write_address_v6(
    socket: &Socket,
    from: SocketAddr,
    address: *mut sockaddr,
    len: *mut socklen_t,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { arguments::write_address(address, len, socket.to_program_family(from)) };
}
