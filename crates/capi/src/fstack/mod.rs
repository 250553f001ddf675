//! `ff_*`: the functions of F-Stack. The headers `ff_api.h` and `ff_epoll.h` describe them.

mod config;
mod events;
mod log;
mod mbuf;
mod run;

use std::ffi::CStr;
use std::io;
use std::time::Duration;

use libc::{
    c_char, c_int, c_ulong, c_void, epoll_event, fd_set, iovec, msghdr, nfds_t, pollfd,
    pthread_attr_t, pthread_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use tidegate_posix::arguments::ms_timeout;
use tidegate_posix::fd_table::MAX_FDS;

use crate::boundary::export;
use crate::calls::{message, socket, transfer, wait};
use crate::fstack::mbuf::FfZcMbuf;
use crate::kqueue::Kevent;
use crate::socket::os_error;
use crate::{descriptors, stack};

/// Function of the program that `ff_run` calls.
type LoopFn = unsafe extern "C" fn(argument: *mut c_void) -> c_int;
/// Function of the program that a thread runs.
type ThreadFn = extern "C" fn(argument: *mut c_void) -> *mut c_void;
/// Function of the program for each event.
type EachFn = unsafe extern "C" fn(list: *mut *mut c_void, event: *mut Kevent);

/// Arguments from C, without those that are no text.
///
/// # Safety
/// `list` is null or points to `count` C strings.
unsafe fn arguments<'a>(count: c_int, list: *const *mut c_char) -> Vec<&'a str> {
    let count = if list.is_null() { 0 } else { usize::try_from(count).unwrap_or(0) };
    // SAFETY: guaranteed by the caller.
    let text = |at| unsafe { CStr::from_ptr(*list.add(at)) };
    (0..count).filter_map(|at| text(at).to_str().ok()).collect()
}

/// Sends the first `len` bytes of a message.
///
/// # Errors
/// As `send`.
fn send_message(fd: c_int, message: &[u8], len: size_t) -> io::Result<usize> {
    descriptors::socket(fd)?.send_bytes(&message[..len.min(message.len())], 0)
}

export! {
    /// Reads the configuration file and opens the stack.
    ff_init(argc: c_int, argv: *const *mut c_char) -> c_int = status {
        let path = config::path_of(&arguments(argc, argv));
        let opened = config::read(&path)
            .map_err(|text| stack::fail(libc::EINVAL, &text))
            .and_then(|location| stack::init(&location));
        opened.inspect_err(|_| stack::print_last_error())
    }
    /// Creates a socket.
    ff_socket(domain: c_int, type_: c_int, protocol: c_int) -> c_int = number {
        /// FreeBSD's number of IPv6.
        const AF_INET6_FREEBSD: c_int = 28;
        let domain = if domain == AF_INET6_FREEBSD { libc::AF_INET6 } else { domain };
        socket::socket(stack::net()?, domain, type_, protocol)
    }
    /// Binds a socket.
    ff_bind(s: c_int, addr: *const sockaddr, addrlen: socklen_t) -> c_int = status {
        socket::bind(s, addr, addrlen)
    }
    /// Listens for connections.
    ff_listen(s: c_int, backlog: c_int) -> c_int = status {
        socket::listen(s, backlog)
    }
    /// Accepts a connection.
    ff_accept(s: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t) -> c_int = number {
        socket::accept(s, addr, addrlen, 0, true)
    }
    /// Accepts a connection, with flags.
    ff_accept4(s: c_int, addr: *mut sockaddr, addrlen: *mut socklen_t, flags: c_int) -> c_int = number {
        socket::accept(s, addr, addrlen, flags, false)
    }
    /// Connects a socket.
    ff_connect(s: c_int, name: *const sockaddr, namelen: socklen_t) -> c_int = status {
        socket::connect(s, name, namelen)
    }
    /// Closes a descriptor.
    ff_close(fd: c_int) -> c_int = status {
        descriptors::close(fd)
    }
    /// Closes directions.
    ff_shutdown(s: c_int, how: c_int) -> c_int = status {
        socket::shutdown(s, how)
    }
    /// Address of the peer.
    ff_getpeername(s: c_int, name: *mut sockaddr, namelen: *mut socklen_t) -> c_int = status {
        socket::name(s, name, namelen, true)
    }
    /// Local address.
    ff_getsockname(s: c_int, name: *mut sockaddr, namelen: *mut socklen_t) -> c_int = status {
        socket::name(s, name, namelen, false)
    }
    /// Sets an option.
    ff_setsockopt(
        s: c_int,
        level: c_int,
        optname: c_int,
        optval: *const c_void,
        optlen: socklen_t,
    ) -> c_int = status {
        socket::set_option(s, level, optname, optval, optlen)
    }
    /// Reads an option.
    ff_getsockopt(
        s: c_int,
        level: c_int,
        optname: c_int,
        optval: *mut c_void,
        optlen: *mut socklen_t,
    ) -> c_int = status {
        socket::option(s, level, optname, optval, optlen)
    }
    /// Reads and sets flags.
    ff_fcntl(fd: c_int, cmd: c_int, argument: c_int) -> c_int = number {
        socket::fcntl(fd, cmd, argument)
    }
    /// `FIONREAD` and `FIONBIO`.
    ff_ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int = status {
        socket::ioctl(fd, request, argument)
    }
    /// Duplicates a descriptor.
    ff_dup(oldfd: c_int) -> c_int = number {
        descriptors::duplicate(oldfd)
    }
    /// Gives a socket a second descriptor with a certain number.
    ff_dup2(oldfd: c_int, newfd: c_int) -> c_int = number {
        descriptors::duplicate_to(oldfd, newfd)
    }
    /// Number of descriptors that the process may have.
    ff_getmaxfd() -> c_int = number {
        let limit = libc::sysconf(libc::_SC_OPEN_MAX);
        Ok(usize::try_from(limit).unwrap_or(MAX_FDS).min(MAX_FDS) as c_int)
    }
    /// Receives without flags.
    ff_read(d: c_int, buf: *mut c_void, nbytes: size_t) -> ssize_t = bytes {
        transfer::recv(d, buf, nbytes, 0)
    }
    /// Receives into several buffers.
    ff_readv(fd: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t = bytes {
        transfer::readv(fd, iov, iovcnt)
    }
    /// Receives.
    ff_recv(s: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t = bytes {
        transfer::recv(s, buf, len, flags)
    }
    /// Receives, with the sender's address.
    ff_recvfrom(
        s: c_int,
        buf: *mut c_void,
        len: size_t,
        flags: c_int,
        from: *mut sockaddr,
        fromlen: *mut socklen_t,
    ) -> ssize_t = bytes {
        transfer::recvfrom(s, buf, len, flags, from, fromlen)
    }
    /// Receives a message.
    ff_recvmsg(s: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t = bytes {
        message::recvmsg(s, msg, flags)
    }
    /// Sends without flags, bytes or a message of [`ff_zc_mbuf_get`].
    ff_write(fd: c_int, buf: *const c_void, nbytes: size_t) -> ssize_t = bytes {
        match mbuf::take(buf) {
            Some(message) => send_message(fd, &message, nbytes),
            None => transfer::send(fd, buf, nbytes, 0),
        }
    }
    /// Sends a message of [`ff_zc_mbuf_get`].
    ff_zc_send(fd: c_int, mb: *const c_void, nbytes: size_t) -> ssize_t = bytes {
        let message = mbuf::take(mb).ok_or_else(|| os_error(libc::EINVAL))?;
        send_message(fd, &message, nbytes)
    }
    /// Makes an empty message.
    ff_zc_mbuf_get(m: *mut FfZcMbuf, len: c_int) -> c_int = status {
        if m.is_null() {
            return Err(os_error(libc::EFAULT));
        }
        m.write(mbuf::allocate(len)?);
        Ok(())
    }
    /// Appends to a message.
    ff_zc_mbuf_write(m: *mut FfZcMbuf, data: *const c_char, len: c_int) -> c_int = count {
        let bytes = usize::try_from(len).map_err(|_| os_error(libc::EINVAL))?;
        let message = m.as_mut().ok_or_else(|| os_error(libc::EFAULT))?;
        message.append(transfer::buffer(data.cast(), bytes)?)
    }
    /// Sends several buffers.
    ff_writev(fd: c_int, iov: *const iovec, iovcnt: c_int) -> ssize_t = bytes {
        transfer::writev(fd, iov, iovcnt)
    }
    /// Sends.
    ff_send(s: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t = bytes {
        transfer::send(s, buf, len, flags)
    }
    /// Sends to an address.
    ff_sendto(
        s: c_int,
        buf: *const c_void,
        len: size_t,
        flags: c_int,
        to: *const sockaddr,
        tolen: socklen_t,
    ) -> ssize_t = bytes {
        transfer::sendto(s, buf, len, flags, to, tolen)
    }
    /// Sends a message.
    ff_sendmsg(s: c_int, msg: *const msghdr, flags: c_int) -> ssize_t = bytes {
        message::sendmsg(s, msg, flags)
    }
    /// Waits for descriptors in sets.
    ff_select(
        nfds: c_int,
        readfds: *mut fd_set,
        writefds: *mut fd_set,
        exceptfds: *mut fd_set,
        timeout: *mut timeval,
    ) -> c_int = count {
        wait::select(nfds, [readfds, writefds, exceptfds], wait::select_timeout(timeout)?)
    }
    /// Waits for descriptors.
    ff_poll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int = count {
        wait::poll(fds, nfds, ms_timeout(timeout))
    }
    /// Creates a kqueue.
    ff_kqueue() -> c_int = number {
        events::create_kqueue()
    }
    /// Changes filters of a kqueue and takes events.
    ff_kevent(
        kq: c_int,
        changelist: *const Kevent,
        nchanges: c_int,
        eventlist: *mut Kevent,
        nevents: c_int,
        timeout: *const timespec,
    ) -> c_int = count {
        let _ = timeout;
        let mut next = eventlist;
        events::kevent(kq, changelist, nchanges, nevents, |event| {
            next.write(event);
            next = next.add(1);
        })
    }
    /// Changes filters of a kqueue and passes events to a function.
    ff_kevent_do_each(
        kq: c_int,
        changelist: *const Kevent,
        nchanges: c_int,
        eventlist: *mut c_void,
        nevents: c_int,
        timeout: *const timespec,
        do_each: Option<EachFn>,
    ) -> c_int = count {
        let _ = timeout;
        let do_each = do_each.ok_or_else(|| os_error(libc::EFAULT))?;
        let mut list = eventlist;
        events::kevent(kq, changelist, nchanges, nevents, |mut event| {
            do_each(&raw mut list, &raw mut event);
        })
    }
    /// Creates an epoll set.
    ff_epoll_create(size: c_int) -> c_int = number {
        let _ = size;
        events::create_epoll()
    }
    /// Changes an epoll set.
    ff_epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int = status {
        let event = (!event.is_null()).then(|| event.read_unaligned());
        wait::epoll_control(epfd, op, fd, event.map(|event| (event.events, event.u64)))
    }
    /// Takes events of an epoll set.
    ff_epoll_wait(epfd: c_int, events: *mut epoll_event, maxevents: c_int, timeout: c_int) -> c_int = count {
        let _ = timeout;
        wait::epoll_wait(epfd, events, maxevents, Some(Duration::ZERO), std::ptr::null())
    }
    /// Time of the system.
    ff_gettimeofday(tv: *mut timeval, tz: *mut c_void) -> c_int = status {
        match libc::gettimeofday(tv, tz.cast()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Calls a function of the program until [`ff_stop_run`].
///
/// # Safety
/// `loop_function` can be called with `argument`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ff_run(loop_function: Option<LoopFn>, argument: *mut c_void) {
    let Some(loop_function) = loop_function else { return };
    run::start();
    while run::is_running() {
        crate::boundary::nothing(run::wait_for_events);
        // Outside the boundary: the program may leave with `exit`.
        // SAFETY: guaranteed by the caller.
        unsafe { loop_function(argument) };
    }
}

/// Ends [`ff_run`].
#[unsafe(no_mangle)]
pub extern "C" fn ff_stop_run() {
    run::stop();
}

/// True for a descriptor of the library.
#[unsafe(no_mangle)]
pub extern "C" fn ff_fdisused(fd: c_int) -> c_int {
    descriptors::contains(fd).into()
}

/// Starts a thread, which may use the sockets as any other.
///
/// # Safety
/// As `pthread_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ff_pthread_create(
    thread: *mut pthread_t,
    attr: *const pthread_attr_t,
    start_routine: Option<ThreadFn>,
    arg: *mut c_void,
) -> c_int {
    let Some(start_routine) = start_routine else { return libc::EINVAL };
    // SAFETY: guaranteed by the caller.
    unsafe { libc::pthread_create(thread, attr, start_routine, arg) }
}

/// Waits for the end of a thread.
///
/// # Safety
/// As `pthread_join`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ff_pthread_join(thread: pthread_t, retval: *mut *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::pthread_join(thread, retval) }
}
