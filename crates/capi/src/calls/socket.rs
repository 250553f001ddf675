//! Sockets: creation, addresses, connections, options, flags.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;

use libc::{c_int, c_ulong, c_void, sockaddr, socklen_t};
use tidegate::Net;

use super::{check_address_space, read_address, write_address};
use crate::descriptors::{self, Entry};
use crate::socket::{Protocol, Socket, os_error};

/// Creates a socket on a stack.
///
/// # Errors
/// As `socket`.
pub(crate) fn socket(net: &Net, domain: c_int, kind: c_int, protocol: c_int) -> io::Result<c_int> {
    let flags = kind & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let is_v6 = match domain {
        libc::AF_INET => false,
        libc::AF_INET6 => true,
        _ => return Err(os_error(libc::EAFNOSUPPORT)),
    };
    let transport = match (kind & !flags, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => Protocol::Tcp,
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => Protocol::Udp,
        (libc::SOCK_STREAM | libc::SOCK_DGRAM, _) => return Err(os_error(libc::EPROTONOSUPPORT)),
        (1..=10, _) => return Err(os_error(libc::ESOCKTNOSUPPORT)),
        _ => return Err(os_error(libc::EINVAL)),
    };
    let socket = Socket::new(net, transport, is_v6);
    socket.set_nonblocking(flags & libc::SOCK_NONBLOCK != 0);
    descriptors::install(Entry::Socket(Arc::new(socket)))
}

/// Binds a socket.
///
/// # Errors
/// As `bind`.
///
/// # Safety
/// `address` is null or points to `len` bytes.
pub(crate) unsafe fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    socket.bind(unsafe { read_address(address, len) }?)
}

/// Listens for connections.
///
/// # Errors
/// As `listen`.
pub(crate) fn listen(fd: c_int, backlog: c_int) -> io::Result<()> {
    descriptors::socket(fd)?.listen(backlog)
}

/// Accepts a connection. With `inherits` the new socket is non-blocking if the listener is, as on
/// FreeBSD.
///
/// # Errors
/// As `accept4`.
///
/// # Safety
/// Both pointers are null or valid; `address` has space for `*len` bytes.
pub(crate) unsafe fn accept(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
    inherits: bool,
) -> io::Result<c_int> {
    if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        return Err(os_error(libc::EINVAL));
    }
    let listener = descriptors::socket(fd)?;
    if !address.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { check_address_space(address, len) }?;
    }
    let (socket, peer) = listener.accept()?;
    let is_nonblocking = flags & libc::SOCK_NONBLOCK != 0;
    socket.set_nonblocking(is_nonblocking || inherits && listener.is_nonblocking());
    let accepted = descriptors::install(Entry::Socket(Arc::clone(&socket)))?;
    // SAFETY: guaranteed by the caller.
    unsafe { write_address(&socket, peer, address, len) };
    Ok(accepted)
}

/// Connects a socket.
///
/// # Errors
/// As `connect`.
///
/// # Safety
/// `address` is null or points to `len` bytes.
pub(crate) unsafe fn connect(
    fd: c_int,
    address: *const sockaddr,
    len: socklen_t,
) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let peer = match unsafe { tidegate_posix::arguments::family(address, len) } {
        Some(libc::AF_UNSPEC) => None,
        // SAFETY: guaranteed by the caller.
        _ => Some(unsafe { read_address(address, len) }?),
    };
    if !socket.connect(peer)? {
        // The last attempt has failed: the socket starts anew, with its options.
        let renewed = socket.renewed();
        descriptors::replace(fd, Arc::clone(&renewed));
        renewed.connect(peer)?;
    }
    Ok(())
}

/// Closes directions of a socket.
///
/// # Errors
/// As `shutdown`.
pub(crate) fn shutdown(fd: c_int, how: c_int) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    socket.shutdown(match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return Err(os_error(libc::EINVAL)),
    })
}

/// Resets a connection and closes its descriptor.
///
/// # Errors
/// `EBADF` and `ENOTSOCK`.
pub(crate) fn abort(fd: c_int) -> io::Result<()> {
    descriptors::socket(fd)?.reset_on_close();
    descriptors::close(fd)
}

/// Writes the local or the peer's address of a socket.
///
/// # Errors
/// As `getsockname` and `getpeername`.
///
/// # Safety
/// Both pointers are null or valid; `address` has space for `*len` bytes.
pub(crate) unsafe fn name(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    is_peer: bool,
) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    let name = if is_peer { socket.peer_addr() } else { socket.local_addr() }?;
    // SAFETY: guaranteed by the caller.
    unsafe {
        check_address_space(address, len)?;
        write_address(&socket, name, address, len);
    }
    Ok(())
}

/// Sets an option.
///
/// # Errors
/// As `setsockopt`.
///
/// # Safety
/// `value` is null or points to `len` bytes.
pub(crate) unsafe fn set_option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    let len = c_int::try_from(len).map_err(|_| os_error(libc::EINVAL))?;
    if value.is_null() {
        return Err(os_error(if len == 0 { libc::EINVAL } else { libc::EFAULT }));
    }
    // SAFETY: guaranteed by the caller.
    let value = unsafe { std::slice::from_raw_parts(value.cast(), len.unsigned_abs() as usize) };
    socket.set_option(level, name, value)
}

/// Reads an option.
///
/// # Errors
/// As `getsockopt`.
///
/// # Safety
/// Both pointers are null or valid; `value` has space for `*len` bytes.
pub(crate) unsafe fn option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let space = *unsafe { len.as_ref() }.ok_or_else(|| os_error(libc::EFAULT))?;
    let space = c_int::try_from(space).map_err(|_| os_error(libc::EINVAL))?.unsigned_abs() as usize;
    if value.is_null() && space > 0 {
        return Err(os_error(libc::EFAULT));
    }
    let bytes = socket.option(level, name)?;
    let count = bytes.len().min(space);
    if count > 0 {
        // SAFETY: `value` has space for `count` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), count) };
    }
    // SAFETY: not null, as above.
    unsafe { *len = count as socklen_t };
    Ok(())
}

/// Reads and sets flags.
///
/// # Errors
/// As `fcntl`; `EINVAL` for commands other than `F_GETFL`, `F_SETFL`, `F_GETFD`, `F_SETFD` and
/// `F_DUPFD`.
pub(crate) fn fcntl(fd: c_int, command: c_int, argument: c_int) -> io::Result<c_int> {
    match command {
        libc::F_GETFL => {
            let is_nonblocking = descriptors::socket(fd)?.is_nonblocking();
            Ok(libc::O_RDWR | if is_nonblocking { libc::O_NONBLOCK } else { 0 })
        }
        libc::F_SETFL => {
            descriptors::socket(fd)?.set_nonblocking(argument & libc::O_NONBLOCK != 0);
            Ok(0)
        }
        _ if !descriptors::contains(fd) => Err(descriptors::other_kind(fd, libc::EBADF)),
        libc::F_GETFD | libc::F_SETFD => {
            // SAFETY: flags of a descriptor of the library's own.
            match unsafe { libc::fcntl(fd, command, argument) } {
                -1 => Err(io::Error::last_os_error()),
                flags => Ok(flags),
            }
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => descriptors::duplicate(fd),
        _ => Err(os_error(libc::EINVAL)),
    }
}

/// `FIONREAD` and `FIONBIO`.
///
/// # Errors
/// As `ioctl`; `ENOTTY` for other requests.
///
/// # Safety
/// `argument` is null or points to an `int`.
pub(crate) unsafe fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> io::Result<()> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let number = unsafe { argument.cast::<c_int>().as_mut() };
    let number = number.ok_or_else(|| os_error(libc::EFAULT));
    match request {
        libc::FIONREAD => {
            *number? = c_int::try_from(socket.readable_bytes()?).unwrap_or(c_int::MAX);
        }
        libc::FIONBIO => socket.set_nonblocking(*number? != 0),
        _ => return Err(os_error(libc::ENOTTY)),
    }
    Ok(())
}
