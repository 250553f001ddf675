//! Requests of the ioctls on network interfaces (netdevice(7)).

use std::mem;

/// Longest interface name in bytes.
pub const NAME_BYTES: usize = libc::IFNAMSIZ - 1;

/// Request for the interface of this name, otherwise zero. Bytes beyond [`NAME_BYTES`] are cut off.
pub fn interface_request(name: &str) -> libc::ifreq {
    // SAFETY: all zero is a valid `ifreq`: no name, no flags.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // The last byte stays zero: it terminates the name.
    for (to, from) in request.ifr_name[..NAME_BYTES].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}
