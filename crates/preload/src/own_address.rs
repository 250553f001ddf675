//! Which addresses are the kernel's own on this host, and on which interface.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use libc::{ifaddrs, socklen_t};

use crate::{raw, real};

/// So many addresses are remembered: a host has fewer, but who sends to groups names
/// more.
const MOST: usize = 256;

static KNOWN: Mutex<Option<HashMap<IpAddr, u32>>> = Mutex::new(None);

/// The number of the interface that has an address of ours; 0 when the kernel has the
/// address on none.
pub(crate) fn interface_of(address: IpAddr) -> u32 {
    let address = address.to_canonical();
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if known.len() >= MOST {
        known.clear();
    }
    *known.entry(address).or_insert_with(|| find(address))
}

/// Whether the kernel has the address: what is sent there never leaves this host.
/// Addresses come and go, so it is asked each time.
pub(crate) fn is_own(address: SocketAddr) -> bool {
    // The first question costs little and rules nearly all others out; hosts may be told
    // to let any address be bound.
    can_be_bound(address) && find(address.ip().to_canonical()) != 0
}

fn can_be_bound(mut address: SocketAddr) -> bool {
    if let v4 @ IpAddr::V4(_) = address.ip().to_canonical() {
        address.set_ip(v4);
    }
    address.set_port(0);
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (place, len) = raw::storage(address);
    // SAFETY: makes a socket of its own and closes it; the address is as long as `len`
    // says.
    unsafe {
        let fd = real::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        let bound = real::bind(fd, (&raw const place).cast(), len as socklen_t) == 0;
        real::close(fd);
        bound
    }
}

fn find(address: IpAddr) -> u32 {
    let mut first: *mut ifaddrs = std::ptr::null_mut();
    // SAFETY: gives a list, which is given back below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return 0;
    }
    // SAFETY: each entry leads to the next, until there is none.
    let next = |entry: &NonNull<ifaddrs>| NonNull::new(unsafe { entry.as_ref() }.ifa_next);
    let mut all = std::iter::successors(NonNull::new(first), next);
    let number = all.find_map(|entry| {
        // SAFETY: the list is there until it is given back; an address is as long as its
        // family says, and a name is a string of C's.
        unsafe {
            let entry = entry.as_ref();
            let len = match i32::from(entry.ifa_addr.as_ref()?.sa_family) {
                libc::AF_INET => size_of::<libc::sockaddr_in>(),
                libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
                _ => return None,
            };
            let own = raw::address(entry.ifa_addr, len as socklen_t)?;
            (own.ip() == address).then(|| libc::if_nametoindex(entry.ifa_name))
        }
    });
    // SAFETY: the list of above, which nobody has any more.
    unsafe { libc::freeifaddrs(first) };
    number.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_known_and_an_address_of_others_is_not() {
        // SAFETY: a string of C's.
        let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        assert_ne!(loopback, 0);
        for _ in 0..2 {
            assert_eq!(interface_of("127.0.0.1".parse().unwrap()), loopback);
            assert_eq!(interface_of("::ffff:127.0.0.1".parse().unwrap()), loopback);
            assert_eq!(interface_of("203.0.113.9".parse().unwrap()), 0);
        }
        for own in ["127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"] {
            assert!(is_own(own.parse().unwrap()), "{own}");
        }
        for others in ["203.0.113.9:7", "[2001:db8::9]:7"] {
            assert!(!is_own(others.parse().unwrap()), "{others}");
        }
    }
}
