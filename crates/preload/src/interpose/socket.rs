//! Making, binding, connecting and asking.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use libc::{c_int, c_void, sockaddr, socklen_t};

use super::errno;
use crate::rules::is_loopback;
use crate::signals::Turn;
use crate::socket::moving::{self, Moved};
use crate::socket::{Body, Listener, Side, Socket, options};
use crate::{log, raw, real, start, table};

/// `IPV6_FREEBIND`, which `libc` does not name.
const IPV6_FREEBIND: c_int = 78;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the program's own call.
    let result = unsafe { real::bind(fd, address, len) };
    if start::rules().is_none() {
        return result;
    }
    // SAFETY: the program's own argument.
    let Some(wanted) = (unsafe { raw::address(address, len) }) else { return result };
    // SAFETY: the program's own call, again.
    let again = || unsafe { real::bind(fd, address, len) };
    if result != 0 && !((bind_foreign(fd, wanted) || is_free_now()) && again() == 0) {
        return -1;
    }
    let local = raw::kernels_address(fd).filter(|_| wanted.port() != 0);
    let moved = local.map_or(Ok(Moved::No), |local| moving::on_bound(fd, local));
    errno::done(moved.map(|_| ()))
}

/// After the kernel has refused an address that is Tidegate's: lets it take it,
/// so that the port is reserved. Whether that is worth another try.
fn bind_foreign(fd: c_int, wanted: SocketAddr) -> bool {
    let refused = io::Error::last_os_error();
    let is_tidegates = refused.raw_os_error() == Some(libc::EADDRNOTAVAIL)
        && !is_loopback(wanted.ip())
        && start::net().is_ok_and(|net| net.has_address(wanted.ip()));
    let allowed = is_tidegates
        && match wanted {
            SocketAddr::V4(_) => options::set_number(fd, libc::IPPROTO_IP, libc::IP_FREEBIND, 1),
            SocketAddr::V6(_) => options::set_number(fd, libc::IPPROTO_IPV6, IPV6_FREEBIND, 1),
        };
    if !allowed {
        errno::set(&refused);
    }
    allowed
}

/// After the kernel has said that somebody has the port: that may be the daemon, which
/// has not heard yet that this program has closed it. Whether another try is worth it.
fn is_free_now() -> bool {
    let refused = io::Error::last_os_error();
    let is_taken = refused.raw_os_error() == Some(libc::EADDRINUSE) && start::is_shared_daemon();
    let _turn = Turn::begin();
    let is_free = is_taken && start::open_net().is_some_and(|net| net.await_closed().is_ok());
    if !is_free {
        errno::set(&refused);
    }
    is_free
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the program's own call.
    let kernel_listens = || unsafe { real::listen(fd, backlog) };
    if start::rules().is_none() {
        return kernel_listens();
    }
    if let Some(socket) = table::socket(fd) {
        return if socket.has_kernel { kernel_listens() } else { 0 };
    }
    let Some(local) = raw::kernels_address(fd) else { return kernel_listens() };
    // Without a port the kernel chooses one by listening.
    let is_bound = local.port() != 0;
    if !is_bound && kernel_listens() != 0 {
        return -1;
    }
    let Some(local) = raw::kernels_address(fd) else { return -1 };
    match moving::on_listen(fd, local, usize::try_from(backlog).unwrap_or(0)) {
        Ok(Moved::Yes(socket)) if !socket.has_kernel => 0,
        // Loopback stays with the kernel.
        Ok(_) if is_bound => kernel_listens(),
        Ok(_) => 0,
        Err(error) => {
            errno::set(&error);
            -1
        }
    }
}

/// What comes of waiting for a connection.
enum Accepted {
    Kernel(c_int),
    Tidegate(c_int, SocketAddr),
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe { accept4(fd, address, len, 0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's own call.
    let from_kernel = || unsafe { real::accept4(fd, address, len, flags) };
    let Some(socket) = table::socket(fd) else { return from_kernel() };
    let Body::Listener(listener) = &socket.body else {
        errno::set_number(libc::EINVAL);
        return -1;
    };
    let accepted = socket.repeat(fd, Side::Read, true, || match take(&socket, listener, flags) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock && socket.has_kernel => {
            take_kernels(fd, from_kernel)
        }
        result => result,
    });
    match accepted {
        Ok(Accepted::Kernel(new)) => new,
        Ok(Accepted::Tidegate(new, peer)) => {
            // SAFETY: the program's own arguments.
            unsafe { raw::put_address(address, len, peer) };
            new
        }
        Err(error) => {
            errno::set(&error);
            -1
        }
    }
}

/// A connection of Tidegate's, with a descriptor.
fn take(socket: &Socket, listener: &Listener, flags: c_int) -> io::Result<Accepted> {
    if !socket.readiness().readable {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let family = if socket.is_v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: makes a descriptor.
    let fd = unsafe { real::socket(family, libc::SOCK_STREAM | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let entered = listener.accept(socket).and_then(|(accepted, peer)| {
        options::inherit(fd, &listener.inherited.lock().unwrap_or_else(PoisonError::into_inner));
        match moving::enter_accepted(fd, accepted, flags & libc::SOCK_NONBLOCK != 0) {
            true => Ok(Accepted::Tidegate(fd, peer)),
            false => Err(io::Error::from_raw_os_error(libc::EMFILE)),
        }
    });
    if entered.is_err() {
        // SAFETY: made above, and nobody knows it yet.
        unsafe { real::close(fd) };
    }
    entered
}

/// A connection over loopback, if one waits.
fn take_kernels(fd: c_int, accept: impl Fn() -> c_int) -> io::Result<Accepted> {
    let mut waiting = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
    // The kernel's call would wait.
    if crate::sleeper::poll(&mut waiting, Some(std::time::Duration::ZERO), None)? == 0 {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    match accept() {
        new @ 0.. => Ok(Accepted::Kernel(new)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the program's own call.
    let by_kernel = || unsafe { real::connect(fd, address, len) };
    if start::rules().is_none() {
        return by_kernel();
    }
    // SAFETY: the program's own arguments.
    let (family, peer) = unsafe { (raw::family(address, len), raw::address(address, len)) };
    if let Some(socket) = table::socket(fd) {
        let result = match peer {
            Some(peer) if moving::go_back(&socket, peer) => return by_kernel(),
            Some(peer) => connect_moved(fd, &socket, peer),
            None if family == Some(libc::AF_UNSPEC) => disconnect(&socket),
            None => Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
        };
        return errno::done(result);
    }
    let Some(peer) = peer else { return by_kernel() };
    let Some(local) = raw::kernels_address(fd) else { return by_kernel() };
    match moving::on_connect(fd, local, peer) {
        Ok(Moved::No) => by_kernel(),
        Ok(Moved::Yes(socket)) => errno::done(finish_connect(fd, &socket)),
        Err(error) => errno::done(Err(error)),
    }
}

/// Waits until a connection is there, if the socket is one that waits.
fn finish_connect(fd: c_int, socket: &Socket) -> io::Result<()> {
    let Body::Stream(stream) = &socket.body else { return Ok(()) };
    if socket.is_nonblocking() {
        return Err(io::Error::from_raw_os_error(libc::EINPROGRESS));
    }
    let finished = socket.repeat(fd, Side::Write, true, || stream.finish_connect(socket));
    match finished {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(io::Error::from_raw_os_error(libc::EINPROGRESS))
        }
        result => result,
    }
}

fn connect_moved(fd: c_int, socket: &Socket, peer: SocketAddr) -> io::Result<()> {
    match &socket.body {
        Body::Listener(_) => Err(io::Error::from_raw_os_error(libc::EISCONN)),
        Body::Udp(_) => moving::connect_udp(socket, peer),
        Body::Stream(stream) if stream.is_open() => {
            match stream.is_connecting.swap(false, Ordering::Relaxed) {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(libc::EISCONN)),
            }
        }
        Body::Stream(stream) if stream.is_connecting.load(Ordering::Relaxed) => {
            match stream.finish_connect(socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    Err(io::Error::from_raw_os_error(libc::EALREADY))
                }
                result => result,
            }
        }
        Body::Stream(_) => finish_connect(fd, &*moving::connect_again(fd, socket, peer)?),
    }
}

fn disconnect(socket: &Socket) -> io::Result<()> {
    match &socket.body {
        Body::Udp(udp) => {
            udp.is_connected.store(false, Ordering::Relaxed);
            udp.socket.disconnect()
        }
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let Some(socket) = table::socket(fd) else {
        // SAFETY: the program's own call.
        return unsafe { real::shutdown(fd, how) };
    };
    if start::is_child() {
        return errno::done(Err(start::child_error()));
    }
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return errno::done(Err(io::ErrorKind::InvalidInput.into())),
    };
    errno::done(match &socket.body {
        Body::Stream(stream) => stream.shutdown(&socket, how),
        Body::Listener(_) | Body::Udp(_) => {
            log::say_once("shutdown() of a socket that listens or is for datagrams does nothing");
            Ok(())
        }
    })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockname(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let known = table::socket(fd).filter(|_| !start::is_child());
    let Some(Ok(local)) = known.map(|socket| socket.local_addr()) else {
        // SAFETY: the program's own call.
        return unsafe { real::getsockname(fd, address, len) };
    };
    // SAFETY: the program's own arguments.
    unsafe { raw::put_address(address, len, local) };
    0
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getpeername(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let Some(socket) = table::socket(fd).filter(|_| !start::is_child()) else {
        // SAFETY: the program's own call.
        return unsafe { real::getpeername(fd, address, len) };
    };
    errno::done(socket.peer_addr().map(|peer| {
        // SAFETY: the program's own arguments.
        unsafe { raw::put_address(address, len, peer) };
    }))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let known = table::socket(fd).filter(|_| !start::is_child());
    match known.as_deref().and_then(|socket| answer(socket, level, name)) {
        // SAFETY: the program's own arguments.
        Some(Ok(bytes)) => unsafe { put_value(&bytes, value, len) },
        Some(Err(error)) => errno::done(Err(error)),
        // SAFETY: the program's own call.
        None => unsafe { real::getsockopt(fd, level, name, value, len) },
    }
}

/// The value of an option that the kernel's socket does not know.
fn answer(socket: &Socket, level: c_int, name: c_int) -> Option<io::Result<Vec<u8>>> {
    let bytes = |number: c_int| number.to_ne_bytes().to_vec();
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            let error = socket.take_error();
            Some(error.map(|error| bytes(error.as_ref().map_or(0, errno::number))))
        }
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
            Some(Ok(bytes(matches!(socket.body, Body::Listener(_)).into())))
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => match &socket.body {
            Body::Stream(stream) => {
                Some(stream.stream.info().map(|info| options::tcp_info(&info).to_vec()))
            }
            _ => None,
        },
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => match &socket.body {
            Body::Stream(stream) => {
                Some(stream.stream.info().map(|info| bytes(info.mss_bytes.into())))
            }
            _ => None,
        },
        _ => None,
    }
}

/// # Safety
/// `len` is null or valid, and there is room for so many bytes at `value`.
unsafe fn put_value(bytes: &[u8], value: *mut c_void, len: *mut socklen_t) -> c_int {
    if value.is_null() || len.is_null() {
        errno::set_number(libc::EFAULT);
        return -1;
    }
    // SAFETY: no more is written than there is room for.
    unsafe {
        let room = bytes.len().min(*len as usize);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), room);
        *len = room as socklen_t;
    }
    0
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let known = table::socket(fd).filter(|_| !start::is_child());
    if known.is_some() && !options::is_known(level, name) {
        let option = options::describe(level, name);
        if start::is_strict() || (level, name) == (libc::IPPROTO_TCP, libc::TCP_FASTOPEN) {
            log::say_once(&format!("{option} is refused: Tidegate does not have it"));
            errno::set_number(libc::ENOPROTOOPT);
            return -1;
        }
        log::say_once(&format!("{option} has no effect: Tidegate does not have it"));
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::setsockopt(fd, level, name, value, len) };
    match known {
        Some(socket) if result == 0 => errno::done(options::carry_over(fd, &socket, level, name)),
        _ => result,
    }
}
