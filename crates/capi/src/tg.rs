//! `tg_*`: the sockets of Tidegate as C functions. The header `tidegate.h` describes them.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{
    c_char, c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t,
    pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use tidegate_posix::arguments::{ms_timeout, timespec_timeout};

use crate::boundary::export;
use crate::calls::ring::{self, RingCompletion, RingEntry};
use crate::calls::transfer::{ReadFn, ReplyFn, WriteFn};
use crate::calls::{message, socket, transfer, wait};
use crate::config::{DEFAULT_SOCKET, StackLocation};
use crate::socket::os_error;
use crate::{descriptors, stack};

/// Path from C; `None` for null.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn path<'a>(text: *const c_char) -> Option<&'a Path> {
    // SAFETY: guaranteed by the caller.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
    Some(Path::new(OsStr::from_bytes(text.to_bytes())))
}

export! {
    /// Opens the stack that a configuration file or the environment names.
    tg_init(config_file: *const c_char) -> c_int = status {
        let location = match path(config_file) {
            Some(file) => StackLocation::read(file),
            None => StackLocation::of_environment(),
        };
        stack::init(&location.map_err(|text| stack::fail(libc::EINVAL, &text))?)
    }
    /// Attaches to a daemon.
    tg_attach(daemon_socket: *const c_char) -> c_int = status {
        let socket = path(daemon_socket).unwrap_or(Path::new(DEFAULT_SOCKET));
        stack::init(&StackLocation::daemon(socket))
    }
    /// Finishes all connections.
    tg_finish() = nothing {
        stack::finish();
        Ok(())
    }
    /// Creates a socket.
    tg_socket(domain: c_int, type_: c_int, protocol: c_int) -> c_int = number {
        socket::socket(stack::net()?, domain, type_, protocol)
    }
    /// Binds a socket.
    tg_bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int = status {
        socket::bind(fd, address, length)
    }
    /// Listens for connections.
    tg_listen(fd: c_int, backlog: c_int) -> c_int = status {
        socket::listen(fd, backlog)
    }
    /// Accepts a connection.
    tg_accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int = number {
        socket::accept(fd, address, length, 0, false)
    }
    /// Accepts a connection, with flags.
    tg_accept4(
        fd: c_int,
        address: *mut sockaddr,
        length: *mut socklen_t,
        flags: c_int,
    ) -> c_int = number {
        socket::accept(fd, address, length, flags, false)
    }
    /// Connects a socket.
    tg_connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int = status {
        socket::connect(fd, address, length)
    }
    /// Closes directions.
    tg_shutdown(fd: c_int, how: c_int) -> c_int = status {
        socket::shutdown(fd, how)
    }
    /// Closes a descriptor.
    tg_close(fd: c_int) -> c_int = status {
        descriptors::close(fd)
    }
    /// Local address.
    tg_getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int = status {
        socket::name(fd, address, length, false)
    }
    /// Address of the peer.
    tg_getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int = status {
        socket::name(fd, address, length, true)
    }
    /// Sets an option.
    tg_setsockopt(
        fd: c_int,
        level: c_int,
        option: c_int,
        value: *const c_void,
        length: socklen_t,
    ) -> c_int = status {
        socket::set_option(fd, level, option, value, length)
    }
    /// Reads an option.
    tg_getsockopt(
        fd: c_int,
        level: c_int,
        option: c_int,
        value: *mut c_void,
        length: *mut socklen_t,
    ) -> c_int = status {
        socket::option(fd, level, option, value, length)
    }
    /// Reads and sets flags.
    tg_fcntl(fd: c_int, command: c_int, argument: c_int) -> c_int = number {
        socket::fcntl(fd, command, argument)
    }
    /// `FIONREAD` and `FIONBIO`.
    tg_ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int = status {
        socket::ioctl(fd, request, argument)
    }
    /// Receives.
    tg_recv(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t = bytes {
        transfer::recv(fd, buffer, length, flags)
    }
    /// Receives, with the sender's address.
    tg_recvfrom(
        fd: c_int,
        buffer: *mut c_void,
        length: size_t,
        flags: c_int,
        from: *mut sockaddr,
        from_length: *mut socklen_t,
    ) -> ssize_t = bytes {
        transfer::recvfrom(fd, buffer, length, flags, from, from_length)
    }
    /// Receives a message.
    tg_recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t = bytes {
        message::recvmsg(fd, message, flags)
    }
    /// Receives several messages.
    tg_recvmmsg(
        fd: c_int,
        messages: *mut mmsghdr,
        count: c_uint,
        flags: c_int,
        timeout: *mut timespec,
    ) -> c_int = count {
        let timeout = timespec_timeout(timeout)?;
        message::recvmmsg(fd, messages, count, flags, timeout)
    }
    /// Receives without flags.
    tg_read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t = bytes {
        transfer::recv(fd, buffer, length, 0)
    }
    /// Receives into several buffers.
    tg_readv(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t = bytes {
        transfer::readv(fd, buffers, count)
    }
    /// Sends.
    tg_send(fd: c_int, data: *const c_void, length: size_t, flags: c_int) -> ssize_t = bytes {
        transfer::send(fd, data, length, flags)
    }
    /// Sends to an address.
    tg_sendto(
        fd: c_int,
        data: *const c_void,
        length: size_t,
        flags: c_int,
        to: *const sockaddr,
        to_length: socklen_t,
    ) -> ssize_t = bytes {
        transfer::sendto(fd, data, length, flags, to, to_length)
    }
    /// Sends a message.
    tg_sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t = bytes {
        message::sendmsg(fd, message, flags)
    }
    /// Sends several messages.
    tg_sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = count {
        message::sendmmsg(fd, messages, count, flags)
    }
    /// Sends without flags.
    tg_write(fd: c_int, data: *const c_void, length: size_t) -> ssize_t = bytes {
        transfer::send(fd, data, length, 0)
    }
    /// Sends several buffers.
    tg_writev(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t = bytes {
        transfer::writev(fd, buffers, count)
    }
    /// Reads received data in place.
    tg_recv_with(fd: c_int, read: Option<ReadFn>, context: *mut c_void) -> ssize_t = bytes {
        transfer::recv_with(fd, read, context)
    }
    /// Writes data in place.
    tg_send_with(
        fd: c_int,
        limit: size_t,
        write: Option<WriteFn>,
        context: *mut c_void,
    ) -> ssize_t = bytes {
        transfer::send_with(fd, limit, write, context)
    }
    /// Answers datagrams in place.
    tg_exchange(fd: c_int, reply: Option<ReplyFn>, context: *mut c_void) -> ssize_t = bytes {
        transfer::exchange(fd, reply, context)
    }
    /// Creates an epoll set.
    tg_epoll_create(size: c_int) -> c_int = number {
        match size {
            1.. => wait::epoll_create(stack::net()?, 0),
            _ => Err(os_error(libc::EINVAL)),
        }
    }
    /// Creates an epoll set, with flags.
    tg_epoll_create1(flags: c_int) -> c_int = number {
        wait::epoll_create(stack::net()?, flags)
    }
    /// Changes an epoll set.
    tg_epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int = status {
        let event = (!event.is_null()).then(|| event.read_unaligned());
        wait::epoll_control(set, operation, fd, event.map(|event| (event.events, event.u64)))
    }
    /// Waits for events.
    tg_epoll_wait(set: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int = count {
        wait::epoll_wait(set, events, max, ms_timeout(timeout), std::ptr::null())
    }
    /// Waits for events, with a signal mask.
    tg_epoll_pwait(
        set: c_int,
        events: *mut epoll_event,
        max: c_int,
        timeout: c_int,
        mask: *const sigset_t,
    ) -> c_int = count {
        wait::epoll_wait(set, events, max, ms_timeout(timeout), mask)
    }
    /// Creates a ring.
    tg_ring_create(entries: c_uint, buffers: c_uint, buffer_bytes: c_uint) -> c_int = number {
        ring::create(stack::net()?, entries, buffers, buffer_bytes)
    }
    /// Queues operations.
    tg_ring_push(ring: c_int, entries: *const RingEntry, count: c_uint) -> c_int = count {
        ring::push(ring, entries, count)
    }
    /// Submits operations.
    tg_ring_submit(ring: c_int) -> c_int = count {
        ring::submit(ring)
    }
    /// Submits operations, and waits for completions.
    tg_ring_submit_and_wait(
        ring: c_int,
        count: c_uint,
        timeout: *const timespec,
    ) -> c_int = count {
        ring::submit_and_wait(ring, count, timespec_timeout(timeout)?)
    }
    /// Takes completions.
    tg_ring_completions(
        ring: c_int,
        completions: *mut RingCompletion,
        max: c_uint,
    ) -> c_int = count {
        ring::completions(ring, completions, max)
    }
    /// Takes a free buffer.
    tg_ring_take_buffer(ring: c_int) -> c_int = number {
        ring::take_buffer(ring)
    }
    /// Frees a buffer.
    tg_ring_release_buffer(ring: c_int, buffer: c_uint) -> c_int = status {
        ring::release_buffer(ring, buffer)
    }
    /// Memory of a buffer.
    tg_ring_buffer(ring: c_int, buffer: c_uint) -> *mut c_void = pointer {
        ring::buffer(ring, buffer)
    }
    /// Waits for descriptors.
    tg_poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int = count {
        wait::poll(fds, count, ms_timeout(timeout))
    }
    /// Waits for descriptors in sets.
    tg_select(
        count: c_int,
        readable: *mut fd_set,
        writable: *mut fd_set,
        exceptional: *mut fd_set,
        timeout: *mut timeval,
    ) -> c_int = count {
        wait::select(count, [readable, writable, exceptional], wait::select_timeout(timeout)?)
    }
}

/// Text of the thread's last error of opening a stack.
#[unsafe(no_mangle)]
pub extern "C" fn tg_last_error() -> *const c_char {
    stack::last_error()
}
