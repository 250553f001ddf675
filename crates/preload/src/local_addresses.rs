//! IP addresses of the host's kernel, and their interfaces.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use libc::{ifaddrs, socklen_t};

use crate::{raw, real};

/// Capacity of the cache. A host has fewer addresses, but a sender to multicast groups asks for
/// more.
const MAX_CACHED_ADDRESSES: usize = 256;

static INTERFACE_CACHE: Mutex<Option<HashMap<IpAddr, u32>>> = Mutex::new(None);

/// Index of the interface that has a local address, cached; 0 when no interface of the kernel
/// has the address.
pub(crate) fn interface_index(address: IpAddr) -> u32 {
    let address = address.to_canonical();
    let mut cache = INTERFACE_CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.get_or_insert_default();
    if cache.len() >= MAX_CACHED_ADDRESSES {
        cache.clear();
    }
    *cache.entry(address).or_insert_with(|| find_interface(address))
}

/// True when the kernel has the address: traffic to such an address never leaves this host.
/// Not cached, since addresses come and go.
pub(crate) fn is_local(address: SocketAddr) -> bool {
    // The first check is cheap and rules out nearly all other addresses. A host may be
    // configured to let any address be bound.
    can_be_bound(address) && find_interface(address.ip().to_canonical()) != 0
}

fn can_be_bound(mut address: SocketAddr) -> bool {
    if let v4 @ IpAddr::V4(_) = address.ip().to_canonical() {
        address.set_ip(v4);
    }
    address.set_port(0);
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (raw_address, len) = raw::to_sockaddr(address);
    // SAFETY: creates a socket and closes it; the address has `len` bytes.
    unsafe {
        let fd = real::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        let bound = real::bind(fd, (&raw const raw_address).cast(), len as socklen_t) == 0;
        real::close(fd);
        bound
    }
}

fn find_interface(address: IpAddr) -> u32 {
    let mut first: *mut ifaddrs = std::ptr::null_mut();
    // SAFETY: returns a list, which is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return 0;
    }
    // SAFETY: each entry points to the next, and the last one to null.
    let next = |entry: &NonNull<ifaddrs>| NonNull::new(unsafe { entry.as_ref() }.ifa_next);
    let mut all = std::iter::successors(NonNull::new(first), next);
    let index = all.find_map(|entry| {
        // SAFETY: the list is valid until it is freed; an address has the length of its
        // family, and a name is a C string.
        unsafe {
            let entry = entry.as_ref();
            let len = match i32::from(entry.ifa_addr.as_ref()?.sa_family) {
                libc::AF_INET => size_of::<libc::sockaddr_in>(),
                libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
                _ => return None,
            };
            let local = raw::address(entry.ifa_addr, len as socklen_t)?;
            (local.ip() == address).then(|| libc::if_nametoindex(entry.ifa_name))
        }
    });
    // SAFETY: the list from above, to which no reference is left.
    unsafe { libc::freeifaddrs(first) };
    index.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_loopback_interface_but_no_foreign_address() {
        // SAFETY: a C string.
        let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        assert_ne!(loopback, 0);
        for _ in 0..2 {
            assert_eq!(interface_index("127.0.0.1".parse().unwrap()), loopback);
            assert_eq!(interface_index("::ffff:127.0.0.1".parse().unwrap()), loopback);
            assert_eq!(interface_index("203.0.113.9".parse().unwrap()), 0);
        }
        for local in ["127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"] {
            assert!(is_local(local.parse().unwrap()), "{local}");
        }
        for foreign in ["203.0.113.9:7", "[2001:db8::9]:7"] {
            assert!(!is_local(foreign.parse().unwrap()), "{foreign}");
        }
    }
}
