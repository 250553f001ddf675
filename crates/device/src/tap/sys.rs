//! The ioctls of TUN and TAP devices (linux/if_tun.h).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

pub use crate::sys::NAME_BYTES;
use crate::sys::interface_request;

/// Attaches the descriptor of `/dev/net/tun` to a device, created if needed, and returns the
/// device's name. The kernel completes an empty name or one with `%d`; bytes beyond
/// [`NAME_BYTES`] are cut off.
pub fn attach(fd: BorrowedFd<'_>, name: &str, flags: libc::c_int) -> io::Result<String> {
    let mut request = interface_request(name);
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which is live.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    name_in(&request)
}

/// Name and flags of the device that the descriptor is attached to.
pub fn attached(fd: BorrowedFd<'_>) -> io::Result<(String, libc::c_int)> {
    let mut request = interface_request("");
    // SAFETY: TUNGETIFF writes one `ifreq`, which is live.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: TUNGETIFF has set the flags, and they were set before.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok((name_in(&request)?, libc::c_int::from(flags)))
}

fn name_in(request: &libc::ifreq) -> io::Result<String> {
    let name = request.ifr_name.map(|byte| byte as u8);
    let name = CStr::from_bytes_until_nul(&name).map_err(io::Error::other)?;
    Ok(name.to_string_lossy().into_owned())
}

/// Sets the offload flags: work on frames that the kernel may leave to this end.
pub fn set_offload(fd: BorrowedFd<'_>, features: libc::c_uint) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes a number, not a pointer.
    let result =
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(features)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
