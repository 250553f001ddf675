//! Conversion of C arguments.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::time::Duration;

use libc::{
    c_int, c_uint, c_void, cmsghdr, iovec, msghdr, sockaddr, sockaddr_in, sockaddr_in6,
    sockaddr_storage, socklen_t, timespec,
};

/// Maximum number of buffers of a call, as in the kernel (`UIO_MAXIOV`).
const MAX_BUFFERS: usize = 1024;

/// Reads an IPv4 or IPv6 address; `None` for other families and lengths.
///
/// # Safety
/// `address` is null or points to `len` bytes.
#[inline]
pub unsafe fn address(address: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    let len = len as usize;
    if address.is_null() || len < size_of::<sockaddr_in>() {
        return None;
    }
    // SAFETY: `len` was checked against the size of each type that is read.
    unsafe {
        match c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
            }
            // Some applications omit the scope id (RFC 2133).
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

/// Address family of a socket address.
///
/// # Safety
/// As [`address`].
pub unsafe fn family(address: *const sockaddr, len: socklen_t) -> Option<c_int> {
    // SAFETY: guaranteed by the caller, and the two bytes of the family exist.
    (!address.is_null() && len >= 2).then(|| unsafe { (*address).sa_family }.into())
}

/// Writes a socket address for the application, truncated to `*len` bytes; sets `*len` to the
/// full length.
///
/// # Safety
/// Both pointers are null or valid; `to` has space for `*len` bytes.
#[inline]
pub unsafe fn write_address(to: *mut sockaddr, len: *mut socklen_t, address: SocketAddr) {
    if to.is_null() || len.is_null() {
        return;
    }
    // SAFETY: the length is valid.
    let space = unsafe { *len } as usize;
    if let SocketAddr::V4(v4) = address
        && space >= size_of::<sockaddr_in>()
    {
        // SAFETY: there is space for the address, which need not be aligned.
        unsafe {
            to.cast::<sockaddr_in>().write_unaligned(to_sockaddr_in(v4));
            *len = size_of::<sockaddr_in>() as socklen_t;
        }
        return;
    }
    let (bytes, full_len) = to_sockaddr(address);
    // SAFETY: writes no more than the space at `to` and the length of the address.
    unsafe {
        let copied = space.min(full_len);
        std::ptr::copy_nonoverlapping((&raw const bytes).cast::<u8>(), to.cast(), copied);
        *len = full_len as socklen_t;
    }
}

fn to_sockaddr_in(address: SocketAddrV4) -> sockaddr_in {
    sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}

/// Socket address as C structure, with its length in bytes.
pub fn to_sockaddr(address: SocketAddr) -> (sockaddr_storage, usize) {
    // SAFETY: plain integers, for which zero is valid.
    let mut bytes: sockaddr_storage = unsafe { std::mem::zeroed() };
    let ptr = &raw mut bytes;
    match address {
        SocketAddr::V4(v4) => {
            // SAFETY: `sockaddr_storage` is large enough for every address.
            unsafe { ptr.cast::<sockaddr_in>().write(to_sockaddr_in(v4)) };
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
            // SAFETY: `sockaddr_storage` is large enough for every address.
            unsafe { ptr.cast::<sockaddr_in6>().write(raw) };
            (bytes, size_of::<sockaddr_in6>())
        }
    }
}

/// Socket address as the bytes of its C structure.
pub fn sockaddr_bytes(address: SocketAddr) -> Vec<u8> {
    let (storage, len) = to_sockaddr(address);
    // SAFETY: the structure begins with `len` bytes, all of which are initialised.
    unsafe { std::slice::from_raw_parts((&raw const storage).cast::<u8>(), len) }.to_vec()
}

/// Buffer that the application reads into.
///
/// # Safety
/// `ptr` points to `len` bytes that the caller owns exclusively.
pub unsafe fn read_buffer<'a>(ptr: *mut c_void, len: usize) -> IoSliceMut<'a> {
    if ptr.is_null() || len == 0 {
        return IoSliceMut::new(&mut []);
    }
    // SAFETY: guaranteed by the caller. The kernel limits the length, too.
    IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(ptr.cast(), len.min(MAX_RW_BYTES)) })
}

/// Buffer that the application writes from.
///
/// # Safety
/// `ptr` points to `len` bytes.
pub unsafe fn write_buffer<'a>(ptr: *const c_void, len: usize) -> IoSlice<'a> {
    if ptr.is_null() || len == 0 {
        return IoSlice::new(&[]);
    }
    // SAFETY: guaranteed by the caller. The kernel limits the length, too.
    IoSlice::new(unsafe { std::slice::from_raw_parts(ptr.cast(), len.min(MAX_RW_BYTES)) })
}

/// Maximum number of bytes of a read or write call (the kernel's `MAX_RW_COUNT`).
const MAX_RW_BYTES: usize = 0x7fff_f000;

/// Several buffers as of [`read_buffer`]; `None` when there are too many.
///
/// # Safety
/// `bufs` points to `count` entries, each valid for [`read_buffer`].
pub unsafe fn read_buffers<'a>(bufs: *const iovec, count: usize) -> Option<Vec<IoSliceMut<'a>>> {
    if count > MAX_BUFFERS {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let one = |at| unsafe {
        let piece = bufs.add(at).read();
        read_buffer(piece.iov_base, piece.iov_len)
    };
    Some((0..count).map(one).collect())
}

/// Number of bytes that several buffers hold; `None` when there are too many buffers.
///
/// # Safety
/// `bufs` points to `count` entries.
pub unsafe fn buffer_bytes(bufs: *const iovec, count: usize) -> Option<usize> {
    // SAFETY: guaranteed by the caller.
    let one = |at| unsafe { bufs.add(at).read().iov_len };
    (count <= MAX_BUFFERS).then(|| (0..count).map(one).fold(0, usize::saturating_add))
}

/// Several buffers as of [`write_buffer`]; `None` when there are too many.
///
/// # Safety
/// `pieces` points to `count` entries, each valid for [`write_buffer`].
pub unsafe fn write_buffers<'a>(pieces: *const iovec, count: usize) -> Option<Vec<IoSlice<'a>>> {
    if count > MAX_BUFFERS {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let one = |at| unsafe {
        let piece = pieces.add(at).read();
        write_buffer(piece.iov_base, piece.iov_len)
    };
    Some((0..count).map(one).collect())
}

/// Descriptors that a message passes (`SCM_RIGHTS`).
///
/// # Safety
/// The lengths in the message are valid.
pub unsafe fn passed_fds(message: &msghdr) -> Vec<c_int> {
    // SAFETY: guaranteed by the caller.
    let mut all = unsafe { control_messages(message) };
    all.retain(|one| (one.level, one.kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS));
    let numbers = all.iter().flat_map(|one| one.data.as_chunks().0);
    numbers.map(|&bytes| c_int::from_ne_bytes(bytes)).collect()
}

/// Control messages that an application passes to send, or that the kernel has received.
///
/// # Safety
/// The lengths in the message are valid.
pub unsafe fn control_messages(message: &msghdr) -> Vec<ControlMessage> {
    let mut all = Vec::new();
    // SAFETY: the C library's macros for control messages, and `space`, stay within their buffer.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(one) = header.as_ref() {
            let start = libc::CMSG_DATA(header);
            let space = (message.msg_control as usize + message.msg_controllen)
                .saturating_sub(start as usize);
            let bytes = one.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize).min(space);
            let data = std::slice::from_raw_parts(start, bytes).to_vec();
            all.push(ControlMessage { level: one.cmsg_level, kind: one.cmsg_type, data });
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    all
}

/// Control message of received data, or of data to be sent.
#[derive(Debug, PartialEq, Eq)]
pub struct ControlMessage {
    /// Level of the protocol (`cmsg_level`).
    pub level: c_int,
    /// Type within the level (`cmsg_type`).
    pub kind: c_int,
    /// Data after the header.
    pub data: Vec<u8>,
}

/// Writes control messages as the kernel does: a message without enough space is cut
/// (`MSG_CTRUNC`).
///
/// # Safety
/// `msg_control` of the message is null or has space for `msg_controllen` bytes.
pub unsafe fn write_control_messages(message: &mut msghdr, all: &[ControlMessage]) {
    let space = if message.msg_control.is_null() { 0 } else { message.msg_controllen };
    let mut used = 0;
    for one in all {
        let free = space - used;
        if free < size_of::<cmsghdr>() {
            message.msg_flags |= libc::MSG_CTRUNC;
            break;
        }
        // SAFETY: calculations with a length of some bytes.
        let (needed, needed_space) = unsafe {
            let len = one.data.len() as c_uint;
            (libc::CMSG_LEN(len) as usize, libc::CMSG_SPACE(len) as usize)
        };
        if free < needed {
            message.msg_flags |= libc::MSG_CTRUNC;
        }
        let len = needed.min(free);
        // SAFETY: writes `len` bytes, of which there is space for `free`. The start is aligned as
        // the application's buffer is.
        unsafe {
            let mut head: cmsghdr = std::mem::zeroed();
            (head.cmsg_len, head.cmsg_level, head.cmsg_type) = (len, one.level, one.kind);
            let start = message.msg_control.cast::<u8>().add(used);
            start.cast::<cmsghdr>().write_unaligned(head);
            let data = start.add(size_of::<cmsghdr>());
            std::ptr::copy_nonoverlapping(one.data.as_ptr(), data, len - size_of::<cmsghdr>());
        }
        used += needed_space.min(free);
    }
    message.msg_controllen = used;
}

/// Timeout from milliseconds; `None` (no limit) when negative.
pub fn ms_timeout(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// Timeout from a `timespec`; `None` (no limit) when null.
///
/// # Errors
/// `EINVAL`.
///
/// # Safety
/// `timeout` is null or valid.
pub unsafe fn timespec_timeout(timeout: *const timespec) -> io::Result<Option<Duration>> {
    // SAFETY: guaranteed by the caller.
    let Some(time) = (unsafe { timeout.as_ref() }) else { return Ok(None) };
    let (Ok(seconds), Ok(nanoseconds @ 0..1_000_000_000)) =
        (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec))
    else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    Ok(Some(Duration::new(seconds, nanoseconds)))
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "the tests build the arguments")]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["192.0.2.1:80", "[2001:db8::1]:6379", "[fe80::1%3]:7"] {
            let given: SocketAddr = text.parse().unwrap();
            let mut buf: sockaddr_storage = unsafe { std::mem::zeroed() };
            let mut len = size_of::<sockaddr_storage>() as socklen_t;
            let read = unsafe {
                write_address((&raw mut buf).cast(), &mut len, given);
                address((&raw const buf).cast(), len)
            };
            assert_eq!(read, Some(given));
        }
    }

    #[test]
    fn truncates_address_to_buffer_and_reports_full_length() {
        let mut buf = [0xffu8; 32];
        let mut len: socklen_t = 4;
        let given = "192.0.2.1:80".parse().unwrap();
        unsafe { write_address(buf.as_mut_ptr().cast(), &mut len, given) };
        assert_eq!(len as usize, size_of::<sockaddr_in>());
        assert!(buf[4..].iter().all(|&byte| byte == 0xff));
    }

    #[test]
    fn control_messages_are_cut_to_their_space() {
        let message = |kind, data: &[u8]| ControlMessage { level: 0, kind, data: data.to_vec() };
        let all = [message(1, &[1]), message(2, &[2; 12])];
        for (space, used, is_cut) in
            [(0, 0, true), (15, 0, true), (16, 16, true), (24, 24, true), (40, 40, true)]
                .into_iter()
                .chain([(50, 50, true), (52, 52, false), (100, 56, false)])
        {
            let mut buf = [0xffu8; 128];
            let mut header: msghdr = unsafe { std::mem::zeroed() };
            header.msg_control = buf.as_mut_ptr().cast();
            header.msg_controllen = space;
            unsafe { write_control_messages(&mut header, &all) };
            assert_eq!(header.msg_controllen, used, "{space}");
            assert_eq!(header.msg_flags & libc::MSG_CTRUNC != 0, is_cut, "{space}");
            assert!(buf[space..].iter().all(|&byte| byte == 0xff), "{space}");
        }
    }

    #[test]
    fn rejects_invalid_addresses() {
        let buf = [0u8; 64];
        for len in [0, 1, 2, 15, 16, 28] {
            assert_eq!(unsafe { address(buf.as_ptr().cast(), len) }, None);
        }
        assert_eq!(unsafe { address(std::ptr::null(), 16) }, None);
    }
}
