//! Raw arguments, read and written.

use std::io::{IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use libc::{
    c_int, c_void, iovec, msghdr, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t,
    timespec,
};

use crate::real;

/// More pieces than the kernel takes.
const IOV_MAX: usize = 1024;

/// An address of IPv4 or IPv6; `None` for all others.
///
/// # Safety
/// `address` is null or points to `len` bytes.
pub(crate) unsafe fn address(address: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    let len = len as usize;
    if address.is_null() || len < size_of::<sockaddr_in>() {
        return None;
    }
    // SAFETY: it is as long as what is read, by the checks of `len`.
    unsafe {
        match c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
            }
            // The scope is left out by some (RFC 2133).
            libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                let v6 = address.cast::<sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// The family of an address.
///
/// # Safety
/// As [`address`].
pub(crate) unsafe fn family(address: *const sockaddr, len: socklen_t) -> Option<c_int> {
    // SAFETY: the caller's promise, and there are two bytes.
    (!address.is_null() && len >= 2).then(|| unsafe { (*address).sa_family }.into())
}

/// Writes an address where a program wants it, as much as there is room for.
///
/// # Safety
/// Both are null or valid; there is room for `*len` bytes.
pub(crate) unsafe fn put_address(to: *mut sockaddr, len: *mut socklen_t, address: SocketAddr) {
    if to.is_null() || len.is_null() {
        return;
    }
    let (bytes, whole) = storage(address);
    // SAFETY: no more is written than there is room for and than there is.
    unsafe {
        let room = (*len as usize).min(whole);
        std::ptr::copy_nonoverlapping((&raw const bytes).cast::<u8>(), to.cast(), room);
        *len = whole as socklen_t;
    }
}

/// An address as C has it, with its length.
pub(crate) fn storage(address: SocketAddr) -> (sockaddr_storage, usize) {
    // SAFETY: plain numbers, for which zero is a value.
    let mut bytes: sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut bytes;
    match address {
        SocketAddr::V4(v4) => {
            let raw = sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: a storage is large enough for every address.
            unsafe { place.cast::<sockaddr_in>().write(raw) };
            (bytes, size_of::<sockaddr_in>())
        }
        SocketAddr::V6(v6) => {
            let raw = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: a storage is large enough for every address.
            unsafe { place.cast::<sockaddr_in6>().write(raw) };
            (bytes, size_of::<sockaddr_in6>())
        }
    }
}

/// The address that the kernel's socket is bound to.
pub(crate) fn kernels_address(fd: c_int) -> Option<SocketAddr> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    let place: *mut sockaddr = (&raw mut storage).cast();
    // SAFETY: there is room for `len` bytes, and the kernel says how many it wrote.
    unsafe {
        match real::getsockname(fd, place, &mut len) {
            0 => address(place, len),
            _ => None,
        }
    }
}

/// Memory that a program reads into.
///
/// # Safety
/// `at` points to `len` bytes that are the caller's alone.
pub(crate) unsafe fn buffer<'a>(at: *mut c_void, len: usize) -> IoSliceMut<'a> {
    if at.is_null() || len == 0 {
        return IoSliceMut::new(&mut []);
    }
    // SAFETY: the caller's promise. The kernel takes no more either.
    IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(at.cast(), len.min(MOST_BYTES)) })
}

/// Memory that a program writes from.
///
/// # Safety
/// `at` points to `len` bytes.
pub(crate) unsafe fn data<'a>(at: *const c_void, len: usize) -> IoSlice<'a> {
    if at.is_null() || len == 0 {
        return IoSlice::new(&[]);
    }
    // SAFETY: the caller's promise. The kernel takes no more either.
    IoSlice::new(unsafe { std::slice::from_raw_parts(at.cast(), len.min(MOST_BYTES)) })
}

/// The most that one call moves (`MAX_RW_COUNT`).
const MOST_BYTES: usize = 0x7fff_f000;

/// As [`buffer`], several.
///
/// # Safety
/// `bufs` points to `count` of them, each as [`buffer`] wants it.
pub(crate) unsafe fn buffers<'a>(bufs: *const iovec, count: usize) -> Option<Vec<IoSliceMut<'a>>> {
    if count > IOV_MAX {
        return None;
    }
    // SAFETY: the caller's promise.
    let one = |at| unsafe {
        let piece = bufs.add(at).read();
        buffer(piece.iov_base, piece.iov_len)
    };
    Some((0..count).map(one).collect())
}

/// As [`data`], several.
///
/// # Safety
/// `pieces` points to `count` of them, each as [`data`] wants it.
pub(crate) unsafe fn pieces<'a>(pieces: *const iovec, count: usize) -> Option<Vec<IoSlice<'a>>> {
    if count > IOV_MAX {
        return None;
    }
    // SAFETY: the caller's promise.
    let one = |at| unsafe {
        let piece = pieces.add(at).read();
        data(piece.iov_base, piece.iov_len)
    };
    Some((0..count).map(one).collect())
}

/// The descriptors that a message hands on.
///
/// # Safety
/// The message is as its lengths say.
pub(crate) unsafe fn descriptors(message: &msghdr) -> Vec<c_int> {
    let mut all = Vec::new();
    // SAFETY: the C library's own walk over the messages, which stays within
    // their lengths.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while let Some(one) = head.as_ref() {
            if (one.cmsg_level, one.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = one.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(head).cast::<c_int>();
                all.extend((0..bytes / size_of::<c_int>()).map(|at| fds.add(at).read_unaligned()));
            }
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
    all
}

/// A time-out in milliseconds; negative is for ever.
pub(crate) fn milliseconds(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// A time-out; null is for ever. `Err` for what is no time.
///
/// # Safety
/// `timeout` is null or valid.
pub(crate) unsafe fn time(timeout: *const timespec) -> Result<Option<Duration>, ()> {
    // SAFETY: the caller's promise.
    let Some(time) = (unsafe { timeout.as_ref() }) else { return Ok(None) };
    let (Ok(seconds), Ok(nanoseconds @ 0..1_000_000_000)) =
        (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec))
    else {
        return Err(());
    };
    Ok(Some(Duration::new(seconds, nanoseconds)))
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "the arguments are made here")]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_out_and_back() {
        for text in ["192.0.2.1:80", "[2001:db8::1]:6379", "[fe80::1%3]:7"] {
            let given: SocketAddr = text.parse().unwrap();
            let mut place: sockaddr_storage = unsafe { std::mem::zeroed() };
            let mut len = size_of::<sockaddr_storage>() as socklen_t;
            let read = unsafe {
                put_address((&raw mut place).cast(), &mut len, given);
                address((&raw const place).cast(), len)
            };
            assert_eq!(read, Some(given));
        }
    }

    #[test]
    fn a_short_place_is_not_overrun_and_the_whole_length_is_told() {
        let mut place = [0xffu8; 32];
        let mut len: socklen_t = 4;
        let given = "192.0.2.1:80".parse().unwrap();
        unsafe { put_address(place.as_mut_ptr().cast(), &mut len, given) };
        assert_eq!(len as usize, size_of::<sockaddr_in>());
        assert!(place[4..].iter().all(|&byte| byte == 0xff));
    }

    #[test]
    fn what_is_no_address_is_none() {
        let place = [0u8; 64];
        for len in [0, 1, 2, 15, 16, 28] {
            assert_eq!(unsafe { address(place.as_ptr().cast(), len) }, None);
        }
        assert_eq!(unsafe { address(std::ptr::null(), 16) }, None);
    }
}
