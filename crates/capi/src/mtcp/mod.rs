//! `mtcp_*`: the functions of mTCP. The headers `mtcp_api.h` and `mtcp_epoll.h` describe them.

mod config;
mod context;
mod pipe;

use std::ffi::{CStr, OsStr};
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use libc::{
    c_char, c_int, c_ulong, c_void, epoll_event, in_addr_t, iovec, size_t, sockaddr, socklen_t,
    ssize_t,
};
use tidegate_posix::arguments::ms_timeout;

use self::config::MtcpConf;
use self::context::{Context, Named};
use self::pipe::PipeEnd;
use crate::boundary::export;
use crate::calls::{socket, transfer, wait};
use crate::socket::os_error;
use crate::{descriptors, stack};

/// Most events of a wait.
const MAX_EVENTS: usize = 1024;

/// Event, as the header's `struct mtcp_epoll_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MtcpEpollEvent {
    events: u32,
    data: u64,
}

/// Handler of a signal.
type SignalHandler = Option<unsafe extern "C" fn(c_int)>;

/// Context from C.
///
/// # Errors
/// `EINVAL` for null, `EPERM` for a destroyed one.
///
/// # Safety
/// `context` is null or from `mtcp_create_context`.
unsafe fn context<'a>(context: *mut Context) -> io::Result<&'a Context> {
    // SAFETY: guaranteed by the caller; contexts are never freed.
    unsafe { context.as_ref() }.ok_or_else(|| os_error(libc::EINVAL))?.check()
}

/// `FIONREAD` and `FIONBIO`.
unsafe fn ioctl(
    mctx: *mut Context,
    sockid: c_int,
    request: c_int,
    argument: *mut c_void,
) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let fd = context(mctx)?.fd(sockid)?;
        socket::ioctl(fd, c_ulong::from(request.cast_unsigned()), argument)
    }
}

/// Creates an epoll set of a context.
unsafe fn epoll_create(mctx: *mut Context, flags: c_int) -> io::Result<c_int> {
    // SAFETY: guaranteed by the caller.
    let context = unsafe { context(mctx) }?;
    context.check_space(1)?;
    context.add(wait::epoll_create(&context.net, flags)?)
}

/// Waits for events, at most [`MAX_EVENTS`].
unsafe fn epoll_wait(
    set: c_int,
    events: *mut MtcpEpollEvent,
    max: c_int,
    timeout: c_int,
) -> io::Result<usize> {
    let mut found = [epoll_event { events: 0, u64: 0 }; MAX_EVENTS];
    let limit = max.min(MAX_EVENTS as c_int);
    if events.is_null() {
        return Err(os_error(libc::EFAULT));
    }
    let timeout = ms_timeout(timeout);
    // SAFETY: `found` has space for `limit` events.
    let count =
        unsafe { wait::epoll_wait(set, found.as_mut_ptr(), limit, timeout, std::ptr::null()) }?;
    for (at, event) in found[..count].iter().enumerate() {
        let event = MtcpEpollEvent { events: event.events, data: event.u64 };
        // SAFETY: guaranteed by the caller: space for `max` events.
        unsafe { events.add(at).write(event) };
    }
    Ok(count)
}

/// Reads from the end of a pipe.
unsafe fn read_pipe(
    context: &Context,
    end: &PipeEnd,
    iov: *const iovec,
    count: c_int,
) -> io::Result<usize> {
    // SAFETY: guaranteed by the caller.
    end.read(&context.net, &mut unsafe { transfer::read_buffers(iov, count) }?)
}

/// Writes to the end of a pipe.
unsafe fn write_pipe(
    context: &Context,
    end: &PipeEnd,
    iov: *const iovec,
    count: c_int,
) -> io::Result<usize> {
    // SAFETY: guaranteed by the caller.
    end.write(&context.net, &unsafe { transfer::write_buffers(iov, count) }?)
}

export! {
    /// Reads the configuration file and opens the stack.
    mtcp_init(config_file: *const c_char) -> c_int = status {
        if config_file.is_null() {
            return Err(os_error(libc::EFAULT));
        }
        let path = Path::new(OsStr::from_bytes(CStr::from_ptr(config_file).to_bytes()));
        context::init(path).inspect_err(|_| stack::print_last_error())
    }
    /// Destroys all contexts.
    mtcp_destroy() = nothing {
        context::destroy_all();
        Ok(())
    }
    /// Reads the numbers of the configuration.
    mtcp_getconf(conf: *mut MtcpConf) -> c_int = status {
        *conf.as_mut().ok_or_else(|| os_error(libc::EINVAL))? = context::numbers();
        Ok(())
    }
    /// Sets the numbers of the configuration.
    mtcp_setconf(conf: *const MtcpConf) -> c_int = status {
        context::set_numbers(*conf.as_ref().ok_or_else(|| os_error(libc::EINVAL))?);
        Ok(())
    }
    /// Pins the calling thread to a processor.
    mtcp_core_affinitize(cpu: c_int) -> c_int = status {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let cpu = usize::try_from(cpu).ok().filter(|&cpu| cpu < libc::CPU_SETSIZE as usize);
        libc::CPU_SET(cpu.ok_or_else(|| os_error(libc::EINVAL))?, &mut set);
        match libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
    /// Creates the context of a core.
    mtcp_create_context(cpu: c_int) -> *mut Context = pointer {
        context::create(cpu).map(|context| std::ptr::from_ref(context).cast_mut())
    }
    /// Destroys a context.
    mtcp_destroy_context(mctx: *mut Context) = nothing {
        context(mctx)?.destroy();
        Ok(())
    }
    /// Creates a socket.
    mtcp_socket(mctx: *mut Context, domain: c_int, type_: c_int, protocol: c_int) -> c_int = number {
        let context = context(mctx)?;
        context.check_space(1)?;
        let fd = socket::socket(&context.net, domain, type_, protocol)?;
        context.configure(&*descriptors::socket(fd)?);
        context.add(fd)
    }
    /// Makes a socket non-blocking.
    mtcp_setsock_nonblock(mctx: *mut Context, sockid: c_int) -> c_int = status {
        match context(mctx)?.object(sockid)? {
            Named::Fd(fd) => descriptors::socket(fd)?.set_nonblocking(true),
            Named::Pipe(end) => end.set_nonblocking(),
        }
        Ok(())
    }
    /// Binds a socket.
    mtcp_bind(
        mctx: *mut Context,
        sockid: c_int,
        addr: *const sockaddr,
        addrlen: socklen_t,
    ) -> c_int = status {
        let fd = context(mctx)?.fd(sockid)?;
        socket::bind(fd, addr, addrlen)
    }
    /// Listens for connections.
    mtcp_listen(mctx: *mut Context, sockid: c_int, backlog: c_int) -> c_int = status {
        let fd = context(mctx)?.fd(sockid)?;
        socket::listen(fd, backlog)
    }
    /// Accepts a connection.
    mtcp_accept(
        mctx: *mut Context,
        sockid: c_int,
        addr: *mut sockaddr,
        addrlen: *mut socklen_t,
    ) -> c_int = number {
        let context = context(mctx)?;
        context.check_space(1)?;
        context.add(socket::accept(context.fd(sockid)?, addr, addrlen, 0, false)?)
    }
    /// Sets the addresses to connect from.
    mtcp_init_rss(
        mctx: *mut Context,
        saddr_base: in_addr_t,
        num_addr: c_int,
        daddr: in_addr_t,
        dport: in_addr_t,
    ) -> c_int = status {
        // Replies find their stack whatever the peer is.
        let _ = (daddr, dport);
        let count = u32::try_from(num_addr).map_err(|_| os_error(libc::EINVAL))?;
        context(mctx)?.set_sources(Ipv4Addr::from(u32::from_be(saddr_base)), count);
        Ok(())
    }
    /// Connects a socket.
    mtcp_connect(
        mctx: *mut Context,
        sockid: c_int,
        addr: *const sockaddr,
        addrlen: socklen_t,
    ) -> c_int = status {
        let context = context(mctx)?;
        let fd = context.fd(sockid)?;
        let connecting = descriptors::socket(fd)?;
        if !connecting.is_v6 && connecting.endpoint().is_none() && connecting.settings().bound.is_none()
            && let Some(source) = context.next_source()
        {
            connecting.bind(source)?;
        }
        socket::connect(fd, addr, addrlen)
    }
    /// Closes a socket or an epoll set.
    mtcp_close(mctx: *mut Context, sockid: c_int) -> c_int = status {
        context(mctx)?.remove(sockid)?.close()
    }
    /// Closes with RST.
    mtcp_abort(mctx: *mut Context, sockid: c_int) -> c_int = status {
        match context(mctx)?.remove(sockid)? {
            Named::Fd(fd) => socket::abort(fd),
            pipe => pipe.close(),
        }
    }
    /// Local address.
    mtcp_getsockname(
        mctx: *mut Context,
        sockid: c_int,
        addr: *mut sockaddr,
        addrlen: *mut socklen_t,
    ) -> c_int = status {
        let fd = context(mctx)?.fd(sockid)?;
        socket::name(fd, addr, addrlen, false)
    }
    /// Address of the peer.
    mtcp_getpeername(
        mctx: *mut Context,
        sockid: c_int,
        addr: *mut sockaddr,
        addrlen: *mut socklen_t,
    ) -> c_int = status {
        let fd = context(mctx)?.fd(sockid)?;
        socket::name(fd, addr, addrlen, true)
    }
    /// Reads an option.
    mtcp_getsockopt(
        mctx: *mut Context,
        sockid: c_int,
        level: c_int,
        optname: c_int,
        optval: *mut c_void,
        optlen: *mut socklen_t,
    ) -> c_int = status {
        let fd = context(mctx)?.fd(sockid)?;
        socket::option(fd, level, optname, optval, optlen)
    }
    /// Sets an option.
    mtcp_setsockopt(
        mctx: *mut Context,
        sockid: c_int,
        level: c_int,
        optname: c_int,
        optval: *const c_void,
        optlen: socklen_t,
    ) -> c_int = status {
        let fd = context(mctx)?.fd(sockid)?;
        socket::set_option(fd, level, optname, optval, optlen)
    }
    /// `FIONREAD` and `FIONBIO`.
    mtcp_socket_ioctl(mctx: *mut Context, sockid: c_int, request: c_int, argp: *mut c_void) -> c_int = status {
        ioctl(mctx, sockid, request, argp)
    }
    /// `FIONREAD` and `FIONBIO`.
    mtcp_ioctl(mctx: *mut Context, sockid: c_int, request: c_int, argp: *mut c_void) -> c_int = status {
        ioctl(mctx, sockid, request, argp)
    }
    /// Receives.
    mtcp_read(mctx: *mut Context, sockid: c_int, buf: *mut c_char, len: size_t) -> ssize_t = bytes {
        let context = context(mctx)?;
        match context.object(sockid)? {
            Named::Fd(fd) => transfer::recv(fd, buf.cast(), len, 0),
            Named::Pipe(end) => read_pipe(context, &end, &iovec { iov_base: buf.cast(), iov_len: len }, 1),
        }
    }
    /// Receives, with flags.
    mtcp_recv(
        mctx: *mut Context,
        sockid: c_int,
        buf: *mut c_char,
        len: size_t,
        flags: c_int,
    ) -> ssize_t = bytes {
        let fd = context(mctx)?.fd(sockid)?;
        transfer::recv(fd, buf.cast(), len, flags)
    }
    /// Receives into several buffers.
    mtcp_readv(mctx: *mut Context, sockid: c_int, iov: *const iovec, num_iov: c_int) -> c_int = count {
        let context = context(mctx)?;
        match context.object(sockid)? {
            Named::Fd(fd) => transfer::readv(fd, iov, num_iov),
            Named::Pipe(end) => read_pipe(context, &end, iov, num_iov),
        }
    }
    /// Sends.
    mtcp_write(mctx: *mut Context, sockid: c_int, buf: *const c_char, len: size_t) -> ssize_t = bytes {
        let context = context(mctx)?;
        match context.object(sockid)? {
            Named::Fd(fd) => transfer::send(fd, buf.cast(), len, 0),
            Named::Pipe(end) => write_pipe(context, &end, &iovec { iov_base: buf.cast_mut().cast(), iov_len: len }, 1),
        }
    }
    /// Sends several buffers.
    mtcp_writev(mctx: *mut Context, sockid: c_int, iov: *const iovec, num_iov: c_int) -> c_int = count {
        let context = context(mctx)?;
        match context.object(sockid)? {
            Named::Fd(fd) => transfer::writev(fd, iov, num_iov),
            Named::Pipe(end) => write_pipe(context, &end, iov, num_iov),
        }
    }
    /// Creates a pipe: the end to read from, then the end to write to.
    mtcp_pipe(mctx: *mut Context, pipeid: *mut c_int) -> c_int = status {
        let context = context(mctx)?;
        let ends = pipeid.cast::<[c_int; 2]>().as_mut().ok_or_else(|| os_error(libc::EFAULT))?;
        context.check_space(2)?;
        let (reader, writer) = PipeEnd::pair()?;
        let add = |end| context.add_object(Named::Pipe(Arc::new(end)));
        *ends = [add(reader)?, add(writer)?];
        Ok(())
    }
    /// Creates an epoll set.
    mtcp_epoll_create(mctx: *mut Context, size: c_int) -> c_int = number {
        match size {
            1.. => epoll_create(mctx, 0),
            _ => Err(os_error(libc::EINVAL)),
        }
    }
    /// Creates an epoll set, with flags.
    mtcp_epoll_create1(mctx: *mut Context, flags: c_int) -> c_int = number {
        epoll_create(mctx, flags)
    }
    /// Changes an epoll set.
    mtcp_epoll_ctl(
        mctx: *mut Context,
        epid: c_int,
        op: c_int,
        sockid: c_int,
        event: *mut MtcpEpollEvent,
    ) -> c_int = status {
        let context = context(mctx)?;
        let event = event.as_ref().map(|event| (event.events, event.data));
        wait::epoll_control(context.fd(epid)?, op, context.fd(sockid)?, event)
    }
    /// Waits for events.
    mtcp_epoll_wait(
        mctx: *mut Context,
        epid: c_int,
        events: *mut MtcpEpollEvent,
        maxevents: c_int,
        timeout: c_int,
    ) -> c_int = count {
        epoll_wait(context(mctx)?.fd(epid)?, events, maxevents, timeout)
    }
}

/// Installs a signal handler; returns the handler before.
///
/// # Safety
/// `handler` can be called by any thread at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mtcp_register_signal(
    signum: c_int,
    handler: SignalHandler,
) -> SignalHandler {
    // SAFETY: the structures are valid; the handler is the program's. Function pointers and the
    // constants SIG_DFL and SIG_IGN have the size of an address; null is SIG_DFL.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler.map_or(libc::SIG_DFL, |handler| handler as usize);
        match libc::sigaction(signum, &raw const action, &raw mut before) {
            0 => std::mem::transmute::<usize, SignalHandler>(before.sa_sigaction),
            _ => std::mem::transmute::<usize, SignalHandler>(libc::SIG_ERR),
        }
    }
}

/// Name of an event.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is mTCP's")]
pub extern "C" fn EventToString(event: u32) -> *mut c_char {
    let name = match event {
        0x0 => c"MTCP_EPOLLNONE",
        0x1 => c"MTCP_EPOLLIN",
        0x2 => c"MTCP_EPOLLPRI",
        0x4 => c"MTCP_EPOLLOUT",
        0x8 => c"MTCP_EPOLLERR",
        0x10 => c"MTCP_EPOLLHUP",
        0x40 => c"MTCP_EPOLLRDNORM",
        0x80 => c"MTCP_EPOLLRDBAND",
        0x100 => c"MTCP_EPOLLWRNORM",
        0x200 => c"MTCP_EPOLLWRBAND",
        0x400 => c"MTCP_EPOLLMSG",
        0x2000 => c"MTCP_EPOLLRDHUP",
        _ => c"UNKNOWN",
    };
    name.as_ptr().cast_mut()
}
