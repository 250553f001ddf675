//! Socket calls other than I/O: bind, listen, accept, connect, shutdown, addresses, options.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use libc::{c_int, c_void, sockaddr, socklen_t};
use tidegate_posix::tcp_info;

use crate::errno;
use crate::rules::is_loopback;
use crate::signals::SignalGuard;
use crate::socket::install::{self, MoveOutcome};
use crate::socket::moving;
use crate::socket::{Endpoint, IoDirection, Listener, Socket, options};
use crate::{fd_table, lifecycle, log, raw, real, runtime};

/// `IPV6_FREEBIND`, which the `libc` crate does not define.
const IPV6_FREEBIND: c_int = 78;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the application's own call.
    let result = unsafe { real::bind(fd, address, len) };
    if runtime::rules().is_none() {
        return result;
    }
    // SAFETY: the application's own argument.
    let Some(wanted) = (unsafe { raw::address(address, len) }) else { return result };
    // SAFETY: the application's own call, again.
    let retry = || unsafe { real::bind(fd, address, len) };
    if result != 0
        && !((allow_tidegate_address(fd, wanted) || await_port_release()) && retry() == 0)
    {
        return -1;
    }
    let local = raw::kernel_local_address(fd);
    let moved = local.map_or(Ok(MoveOutcome::Kernel), |local| moving::on_bound(fd, local));
    errno::return_status(moved.map(|_| ()))
}

/// Called after the kernel refused an address that is Tidegate's: allows the kernel socket to
/// bind it (`IP_FREEBIND`), which reserves the port. True when a retry is worthwhile.
fn allow_tidegate_address(fd: c_int, wanted: SocketAddr) -> bool {
    let refused = io::Error::last_os_error();
    let is_tidegates = refused.raw_os_error() == Some(libc::EADDRNOTAVAIL)
        && !is_loopback(wanted.ip())
        && lifecycle::net().is_ok_and(|net| net.has_datagram_address(wanted.ip()));
    let allowed = is_tidegates
        && match wanted {
            SocketAddr::V4(_) => options::set_int(fd, libc::IPPROTO_IP, libc::IP_FREEBIND, 1),
            SocketAddr::V6(_) => options::set_int(fd, libc::IPPROTO_IPV6, IPV6_FREEBIND, 1),
        };
    if !allowed {
        errno::set_from(&refused);
    }
    allowed
}

/// Called after the kernel reported a port in use. The holder may be the daemon, if it does not
/// know yet that this process has closed the port. True when a retry is worthwhile.
fn await_port_release() -> bool {
    let refused = io::Error::last_os_error();
    let is_in_use =
        refused.raw_os_error() == Some(libc::EADDRINUSE) && runtime::uses_shared_daemon();
    let _signal_guard = SignalGuard::enter();
    let is_free = is_in_use && runtime::opened_net().is_some_and(|net| net.await_closed().is_ok());
    if !is_free {
        errno::set_from(&refused);
    }
    is_free
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the application's own call.
    let kernel_listens = || unsafe { real::listen(fd, backlog) };
    if runtime::rules().is_none() {
        return kernel_listens();
    }
    if let Some(socket) = fd_table::socket(fd) {
        return if socket.uses_kernel_socket { kernel_listens() } else { 0 };
    }
    let Some(local) = raw::kernel_local_address(fd) else { return kernel_listens() };
    // Without a port the kernel chooses one in `listen`.
    let is_bound = local.port() != 0;
    if !is_bound && kernel_listens() != 0 {
        return -1;
    }
    let Some(local) = raw::kernel_local_address(fd) else { return -1 };
    let backlog = usize::try_from(backlog).unwrap_or(0);
    match moving::on_listen(fd, local, backlog) {
        Ok(MoveOutcome::Tidegate(socket)) if !socket.uses_kernel_socket => 0,
        // Loopback stays with the kernel.
        Ok(outcome) if is_bound => {
            let result = kernel_listens();
            let has_other_port = |now: SocketAddr| now.port() != local.port();
            match (raw::kernel_local_address(fd).filter(|now| has_other_port(*now)), outcome) {
                // After a shutdown the kernel reports a port that it has given up.
                (Some(now), MoveOutcome::Tidegate(socket)) if result == 0 => {
                    moving::leave_to_kernel(&socket);
                    errno::return_status(moving::on_listen(fd, now, backlog).map(|_| ()))
                }
                _ => result,
            }
        }
        Ok(_) => 0,
        Err(error) => {
            errno::set_from(&error);
            -1
        }
    }
}

/// Accepted connection: descriptor, and peer address if it is Tidegate's.
enum AcceptedSocket {
    Kernel(c_int),
    Tidegate(c_int, SocketAddr),
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the application's own arguments.
    unsafe { accept4(fd, address, len, 0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the application's own call.
    let from_kernel = || unsafe { real::accept4(fd, address, len, flags) };
    let Some(socket) = fd_table::socket(fd) else { return from_kernel() };
    let Endpoint::Listener(listener) = &*socket.endpoint else {
        errno::set(libc::EINVAL);
        return -1;
    };
    let accepted =
        socket.retry_until_ready(fd, IoDirection::Read, true, || {
            match accept_tidegate(&socket, listener, flags) {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && socket.uses_kernel_socket =>
                {
                    accept_kernel(fd, from_kernel)
                }
                result => result,
            }
        });
    match accepted {
        Ok(AcceptedSocket::Kernel(new)) => new,
        Ok(AcceptedSocket::Tidegate(new, peer)) => {
            // SAFETY: the application's own arguments.
            unsafe { raw::write_address(address, len, peer) };
            new
        }
        Err(error) => {
            errno::set_from(&error);
            -1
        }
    }
}

/// Accepts a connection of Tidegate; creates a descriptor for it.
fn accept_tidegate(
    socket: &Socket,
    listener: &Listener,
    flags: c_int,
) -> io::Result<AcceptedSocket> {
    let ready = socket.readiness();
    if ready.read_closed {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if !ready.readable {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let family = if socket.is_v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: creates a descriptor.
    let fd = unsafe { real::socket(family, libc::SOCK_STREAM | flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let installed = listener.accept(socket).and_then(|(accepted, peer)| {
        options::apply_inherited(
            fd,
            &listener.inherited_options.lock().unwrap_or_else(PoisonError::into_inner),
        );
        match install::install_accepted(fd, accepted, flags & libc::SOCK_NONBLOCK != 0) {
            true => Ok(AcceptedSocket::Tidegate(fd, peer)),
            false => Err(io::Error::from_raw_os_error(libc::EMFILE)),
        }
    });
    if installed.is_err() {
        // SAFETY: created above, and not known outside this function.
        unsafe { real::close(fd) };
    }
    installed
}

/// Accepts a connection of the kernel (loopback), if one waits.
fn accept_kernel(fd: c_int, accept: impl Fn() -> c_int) -> io::Result<AcceptedSocket> {
    let mut pollfds = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
    // The kernel's `accept` would block.
    if crate::sleeper::poll(&mut pollfds, Some(std::time::Duration::ZERO), None)? == 0 {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    match accept() {
        new @ 0.. => Ok(AcceptedSocket::Kernel(new)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the application's own call.
    let by_kernel = || unsafe { real::connect(fd, address, len) };
    if runtime::rules().is_none() {
        return by_kernel();
    }
    // SAFETY: the application's own arguments.
    let (family, peer) = unsafe { (raw::family(address, len), raw::address(address, len)) };
    if let Some(socket) = fd_table::socket(fd) {
        let result = match peer {
            Some(peer) if moving::return_to_kernel(&socket, peer) => return by_kernel(),
            Some(peer) => connect_moved(fd, &socket, peer),
            None if family == Some(libc::AF_UNSPEC) => disconnect(fd, &socket, || by_kernel() == 0),
            None => Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
        };
        return errno::return_status(result);
    }
    let Some(peer) = peer else { return by_kernel() };
    let Some(local) = raw::kernel_local_address(fd) else { return by_kernel() };
    match moving::on_connect(fd, local, peer) {
        Ok(MoveOutcome::Kernel) => by_kernel(),
        Ok(MoveOutcome::Tidegate(socket)) => errno::return_status(finish_connect(fd, &socket)),
        Err(error) => errno::return_status(Err(error)),
    }
}

/// Waits until the connection is established, unless the socket is nonblocking.
fn finish_connect(fd: c_int, socket: &Socket) -> io::Result<()> {
    let Endpoint::Stream(stream) = &*socket.endpoint else { return Ok(()) };
    if socket.is_nonblocking() {
        return Err(io::Error::from_raw_os_error(libc::EINPROGRESS));
    }
    let finished =
        socket.retry_until_ready(fd, IoDirection::Write, true, || stream.finish_connect(socket));
    match finished {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(io::Error::from_raw_os_error(libc::EINPROGRESS))
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            moving::release_unchosen_port(fd);
            Err(error)
        }
        result => result,
    }
}

fn connect_moved(fd: c_int, socket: &Socket, peer: SocketAddr) -> io::Result<()> {
    match &*socket.endpoint {
        Endpoint::Listener(_) => Err(io::Error::from_raw_os_error(libc::EISCONN)),
        Endpoint::Udp(_) => moving::connect_udp(socket, peer),
        Endpoint::Stream(stream) if stream.is_open() => {
            match stream.is_connecting.swap(false, Ordering::Relaxed) {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(libc::EISCONN)),
            }
        }
        Endpoint::Stream(stream) if stream.is_connecting.load(Ordering::Relaxed) => {
            match stream.finish_connect(socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    Err(io::Error::from_raw_os_error(libc::EALREADY))
                }
                result => result,
            }
        }
        Endpoint::Stream(_) => finish_connect(fd, &*moving::reconnect(fd, socket, peer)?),
    }
}

/// Disconnects a socket; `by_kernel` disconnects the kernel socket.
fn disconnect(fd: c_int, socket: &Arc<Socket>, by_kernel: impl FnOnce() -> bool) -> io::Result<()> {
    match &*socket.endpoint {
        Endpoint::Udp(udp) => {
            udp.is_connected.store(false, Ordering::Relaxed);
            match by_kernel() && raw::kernel_local_address(fd).is_some_and(|own| own.port() == 0) {
                // The application had not chosen the port, and gives it up.
                true => {
                    moving::leave_to_kernel(socket);
                    Ok(())
                }
                false => udp.socket.disconnect(),
            }
        }
        Endpoint::Stream(stream) => {
            moving::disconnect_stream(socket, stream);
            Ok(())
        }
        Endpoint::Listener(listener) => {
            stop_listening(fd, socket, listener);
            Ok(())
        }
    }
}

/// Ends listening on Tidegate and at the kernel.
fn stop_listening(fd: c_int, socket: &Arc<Socket>, listener: &Listener) {
    moving::stop_listening(socket, listener);
    if socket.uses_kernel_socket {
        // SAFETY: ends listening of a socket of the application.
        unsafe { real::shutdown(fd, libc::SHUT_RDWR) };
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let Some(socket) = fd_table::socket(fd) else {
        // SAFETY: the application's own call.
        return unsafe { real::shutdown(fd, how) };
    };
    if runtime::is_child() {
        return errno::return_status(Err(runtime::child_error()));
    }
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return errno::return_status(Err(io::ErrorKind::InvalidInput.into())),
    };
    errno::return_status(match &*socket.endpoint {
        Endpoint::Stream(stream) => stream.shutdown(how),
        Endpoint::Listener(listener) => {
            if how != Shutdown::Write {
                stop_listening(fd, &socket, listener);
            }
            Ok(())
        }
        Endpoint::Udp(udp) => udp.shutdown(fd, how),
    })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getsockname(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    moving::on_address_requested(fd);
    let known = fd_table::socket(fd).filter(|_| !runtime::is_child());
    let Some(Ok(local)) = known.map(|socket| socket.local_addr()) else {
        // SAFETY: the application's own call.
        return unsafe { real::getsockname(fd, address, len) };
    };
    // SAFETY: the application's own arguments.
    unsafe { raw::write_address(address, len, local) };
    0
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn getpeername(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let Some(socket) = fd_table::socket(fd).filter(|_| !runtime::is_child()) else {
        // SAFETY: the application's own call.
        return unsafe { real::getpeername(fd, address, len) };
    };
    errno::return_status(socket.peer_addr().map(|peer| {
        // SAFETY: the application's own arguments.
        unsafe { raw::write_address(address, len, peer) };
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
    let known = fd_table::socket(fd).filter(|_| !runtime::is_child());
    match known.as_deref().and_then(|socket| tidegate_option(fd, socket, level, name)) {
        // SAFETY: the application's own arguments.
        Some(Ok(bytes)) => unsafe { write_option(&bytes, value, len) },
        Some(Err(error)) => errno::return_status(Err(error)),
        // SAFETY: the application's own call.
        None => unsafe { real::getsockopt(fd, level, name, value, len) },
    }
}

/// Value of an option that Tidegate reports in place of the kernel socket.
fn tidegate_option(
    fd: c_int,
    socket: &Socket,
    level: c_int,
    name: c_int,
) -> Option<io::Result<Vec<u8>>> {
    let bytes = |number: c_int| number.to_ne_bytes().to_vec();
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            let error = socket.take_error();
            Some(error.map(|error| bytes(error.as_ref().map_or(0, errno::code))))
        }
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
            Some(Ok(bytes(matches!(*socket.endpoint, Endpoint::Listener(_)).into())))
        }
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => match &*socket.endpoint {
            // A size that the application has set is reported as the kernel does.
            Endpoint::Stream(stream) if !options::has_chosen_buffer_bytes(fd, name) => {
                let chosen = stream.stream.options().map(|options| match name {
                    libc::SO_SNDBUF => options.send_buffer_bytes,
                    _ => options.receive_buffer_bytes,
                });
                Some(chosen.map(|size| bytes(c_int::try_from(size).unwrap_or(c_int::MAX))))
            }
            _ => None,
        },
        (libc::IPPROTO_TCP, libc::TCP_INFO) => match &*socket.endpoint {
            Endpoint::Stream(stream) => {
                Some(stream.stream.info().map(|info| tcp_info::to_kernel(&info).to_vec()))
            }
            Endpoint::Listener(_) => Some(Ok(tcp_info::of_listener().to_vec())),
            Endpoint::Udp(_) => None,
        },
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => match &*socket.endpoint {
            Endpoint::Stream(stream) => {
                Some(stream.stream.info().map(|info| bytes(info.mss_bytes.into())))
            }
            _ => None,
        },
        _ => None,
    }
}

/// Writes the value of an option; returns the status of `getsockopt`.
///
/// # Safety
/// `len` is null or valid, and `value` is null or has space for `*len` bytes.
unsafe fn write_option(bytes: &[u8], value: *mut c_void, len: *mut socklen_t) -> c_int {
    if value.is_null() || len.is_null() {
        errno::set(libc::EFAULT);
        return -1;
    }
    // SAFETY: writes at most `*len` bytes.
    unsafe {
        let copied = bytes.len().min(*len as usize);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), copied);
        *len = copied as socklen_t;
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
    let known = fd_table::socket(fd).filter(|_| !runtime::is_child());
    if known.is_some() && !options::is_supported(level, name) {
        let option = options::describe(level, name);
        if runtime::is_strict() || options::is_refused(level, name) {
            log::write_once(&format!("{option} is refused: Tidegate does not support it"));
            errno::set(libc::ENOPROTOOPT);
            return -1;
        }
        log::write_once(&format!("{option} has no effect: Tidegate does not support it"));
    }
    // SAFETY: the application's own call.
    let result = unsafe { real::setsockopt(fd, level, name, value, len) };
    match known {
        Some(socket) if result == 0 => {
            errno::return_status(options::apply_change(fd, &socket, level, name))
        }
        _ => result,
    }
}
