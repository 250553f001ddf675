//! Table of functions that packetdrill calls.
//!
//! packetdrill makes a blocking call in a thread of its own, while its main thread goes on with
//! the script. All calls share one host behind a lock; a blocked call waits for another call to
//! change something. When nothing else happens, the blocked call itself advances the clock.

use std::ffi::{CStr, c_char, c_int, c_long, c_longlong, c_short, c_ulong, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libc::{iovec, msghdr, pollfd, sockaddr, socklen_t, timeval};

use crate::address;
use crate::calls::Outcome;
use crate::errno::Errno;
use crate::host::VirtualHost;
use crate::profile::Profile;

static HOST: Mutex<Option<VirtualHost>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();
/// A call has blocked before: other threads get time to act before the clock advances.
static HAS_BLOCKED: AtomicBool = AtomicBool::new(false);
/// Time for which a blocked call waits for other calls.
const QUIET: Duration = Duration::from_millis(50);

type Void = *mut c_void;
type Missing = Option<unsafe extern "C" fn()>;

/// `struct packetdrill_interface`.
#[repr(C)]
pub struct Interface {
    userdata: Void,
    free: extern "C" fn(Void),
    socket: extern "C" fn(Void, c_int, c_int, c_int) -> c_int,
    bind: extern "C" fn(Void, c_int, *const sockaddr, socklen_t) -> c_int,
    listen: extern "C" fn(Void, c_int, c_int) -> c_int,
    accept: extern "C" fn(Void, c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    connect: extern "C" fn(Void, c_int, *const sockaddr, socklen_t) -> c_int,
    read: extern "C" fn(Void, c_int, *mut u8, usize) -> isize,
    readv: extern "C" fn(Void, c_int, *const iovec, c_int) -> isize,
    recv: extern "C" fn(Void, c_int, *mut u8, usize, c_int) -> isize,
    recvfrom:
        extern "C" fn(Void, c_int, *mut u8, usize, c_int, *mut sockaddr, *mut socklen_t) -> isize,
    recvmsg: extern "C" fn(Void, c_int, *mut msghdr, c_int) -> isize,
    write: extern "C" fn(Void, c_int, *const u8, usize) -> isize,
    writev: extern "C" fn(Void, c_int, *const iovec, c_int) -> isize,
    send: extern "C" fn(Void, c_int, *const u8, usize, c_int) -> isize,
    sendto:
        extern "C" fn(Void, c_int, *const u8, usize, c_int, *const sockaddr, socklen_t) -> isize,
    sendmsg: extern "C" fn(Void, c_int, *const msghdr, c_int) -> isize,
    fcntl: extern "C" fn(Void, c_int, c_int, c_int) -> c_int,
    ioctl: extern "C" fn(Void, c_int, c_ulong, *mut c_int) -> c_int,
    close: extern "C" fn(Void, c_int) -> c_int,
    shutdown: extern "C" fn(Void, c_int, c_int) -> c_int,
    getsockopt: extern "C" fn(Void, c_int, c_int, c_int, *mut u8, *mut socklen_t) -> c_int,
    setsockopt: extern "C" fn(Void, c_int, c_int, c_int, *const u8, socklen_t) -> c_int,
    poll: extern "C" fn(Void, *mut pollfd, c_ulong, c_int) -> c_int,
    netdev_send: extern "C" fn(Void, *const u8, usize) -> c_int,
    netdev_receive: extern "C" fn(Void, *mut u8, *mut usize, *mut c_longlong) -> c_int,
    usleep: extern "C" fn(Void, u32) -> c_int,
    gettimeofday: extern "C" fn(Void, *mut timeval, Void) -> c_int,
    epoll_create: extern "C" fn(Void, c_int) -> c_int,
    epoll_ctl: Missing,
    epoll_wait: Missing,
    pipe: extern "C" fn(Void, *mut c_int) -> c_int,
    splice: Missing,
}

/// Entry point: fills the table.
///
/// # Safety
/// `flags` is null or a C string; `interface` points to a `struct packetdrill_interface`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn packetdrill_interface_init(
    flags: *const c_char,
    interface: *mut Interface,
) {
    let flags = match flags.is_null() {
        true => String::new(),
        // SAFETY: the caller passes a C string.
        false => unsafe { CStr::from_ptr(flags) }.to_string_lossy().into_owned(),
    };
    *lock() = Some(VirtualHost::new(Profile::parse(&flags)));
    let table = Interface {
        userdata: std::ptr::null_mut(),
        free,
        socket,
        bind,
        listen,
        accept,
        connect,
        read,
        readv,
        recv,
        recvfrom,
        recvmsg,
        write,
        writev,
        send,
        sendto,
        sendmsg,
        fcntl,
        ioctl,
        close,
        shutdown,
        getsockopt,
        setsockopt,
        poll,
        netdev_send,
        netdev_receive,
        usleep,
        gettimeofday,
        epoll_create,
        epoll_ctl: None,
        epoll_wait: None,
        pipe,
        splice: None,
    };
    // SAFETY: the caller passes a table to fill.
    unsafe { interface.write(table) };
}

fn lock() -> MutexGuard<'static, Option<VirtualHost>> {
    HOST.lock().unwrap_or_else(PoisonError::into_inner)
}

fn host(guard: &mut MutexGuard<'static, Option<VirtualHost>>) -> &'static mut VirtualHost {
    let host: *mut VirtualHost = guard.as_mut().expect("packetdrill has initialized the library");
    // SAFETY: the host is never dropped before the process ends, and the caller holds the lock.
    unsafe { &mut *host }
}

/// Ends the run with a reason, where packetdrill would wait for ever.
fn give_up(reason: &str) -> ! {
    eprintln!("tidegate: {reason}");
    std::process::exit(1);
}

/// Makes a call that does not block.
fn now(call: impl FnOnce(&mut VirtualHost) -> Outcome) -> i64 {
    let mut guard = lock();
    let host = host(&mut guard);
    host.calls += 1;
    let outcome = call(host);
    CHANGED.notify_all();
    returned(outcome)
}

fn returned(outcome: Outcome) -> i64 {
    outcome.unwrap_or_else(|errno| {
        // SAFETY: the location of the thread's `errno` is always valid.
        unsafe { *libc::__errno_location() = errno };
        -1
    })
}

/// Repeats a call until it does not return `EAGAIN`, unless the socket is non-blocking.
fn blocking(fd: c_int, flags: c_int, mut call: impl FnMut(&mut VirtualHost) -> Outcome) -> i64 {
    let mut guard = lock();
    host(&mut guard).calls += 1;
    let mut quiet_rounds = 0;
    loop {
        let host = host(&mut guard);
        let outcome = call(host);
        let waits = host.sockets.get(&fd).is_some_and(|socket| !socket.non_blocking);
        if outcome != Err(libc::EAGAIN) || !waits || flags & libc::MSG_DONTWAIT != 0 {
            CHANGED.notify_all();
            return returned(outcome);
        }
        HAS_BLOCKED.store(true, Ordering::Relaxed);
        let calls = host.calls;
        let (next, timeout) =
            CHANGED.wait_timeout(guard, QUIET).unwrap_or_else(PoisonError::into_inner);
        guard = next;
        if timeout.timed_out() && self::host(&mut guard).calls == calls {
            quiet_rounds += 1;
            if !self::host(&mut guard).advance_to_timer() || quiet_rounds > 100 {
                give_up("a call blocks and nothing more happens");
            }
        }
    }
}

/// Gives blocked calls of other threads time to return before the clock advances.
fn yield_to_blocked() {
    if HAS_BLOCKED.load(Ordering::Relaxed) {
        CHANGED.notify_all();
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// Copies bytes from C; nothing for a null pointer.
fn copied(data: *const u8, len: usize) -> Vec<u8> {
    match data.is_null() {
        true => Vec::new(),
        // SAFETY: packetdrill passes buffers of the length that it states.
        false => unsafe { std::slice::from_raw_parts(data, len) }.to_vec(),
    }
}

/// Copies bytes to C, at most `len`.
fn copy_out(bytes: &[u8], data: *mut u8, len: usize) {
    if !data.is_null() {
        // SAFETY: packetdrill passes buffers of the length that it states.
        unsafe { data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(len)) };
    }
}

fn vectors(iov: *const iovec, count: usize) -> Vec<(*mut u8, usize)> {
    if iov.is_null() {
        return Vec::new();
    }
    // SAFETY: packetdrill passes an array of the length that it states.
    let vectors = unsafe { std::slice::from_raw_parts(iov, count) };
    vectors.iter().map(|one| (one.iov_base.cast(), one.iov_len)).collect()
}

fn address_from(addr: *const sockaddr, len: socklen_t) -> Result<std::net::SocketAddr, Errno> {
    address::parse(&copied(addr.cast(), len as usize))
}

fn address_to(value: std::net::SocketAddr, addr: *mut sockaddr, len: *mut socklen_t) {
    if addr.is_null() || len.is_null() {
        return;
    }
    let bytes = address::to_bytes(value);
    // SAFETY: `len` was checked and points to the length of `addr`.
    unsafe {
        copy_out(&bytes, addr.cast(), *len as usize);
        *len = bytes.len() as socklen_t;
    }
}

extern "C" fn free(_: Void) {}

extern "C" fn socket(_: Void, domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    now(|host| host.open(domain, kind, protocol)) as c_int
}

extern "C" fn bind(_: Void, fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    now(|host| host.bind(fd, address_from(addr, len)?)) as c_int
}

extern "C" fn listen(_: Void, fd: c_int, backlog: c_int) -> c_int {
    now(|host| host.listen(fd, backlog)) as c_int
}

extern "C" fn accept(_: Void, fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let result = blocking(fd, 0, |host| {
        let (fd, peer) = host.accept(fd)?;
        address_to(peer, addr, len);
        Ok(fd.into())
    });
    result as c_int
}

extern "C" fn connect(_: Void, fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    let remote = match address_from(addr, len) {
        Ok(remote) => remote,
        Err(errno) => return returned(Err(errno)) as c_int,
    };
    let mut is_first = true;
    let result = blocking(fd, 0, |host| {
        let was_begun = host.socket(fd)?.connecting;
        let waits = !host.socket(fd)?.non_blocking;
        let outcome = host.connect(fd, remote);
        match (outcome, std::mem::take(&mut is_first) && was_begun) {
            (Err(libc::EAGAIN), _) if waits => Err(libc::EAGAIN),
            (Err(libc::EAGAIN), true) => Err(libc::EALREADY),
            (Err(libc::EAGAIN), false) => Err(libc::EINPROGRESS),
            (outcome, _) => outcome,
        }
    });
    result as c_int
}

fn receive(fd: c_int, buffers: &[(*mut u8, usize)], flags: c_int) -> isize {
    let len = buffers.iter().map(|&(_, len)| len).sum();
    let mut bytes = vec![0; len];
    let mut done = 0;
    let result = blocking(fd, flags, |host| {
        let all = flags & libc::MSG_WAITALL != 0;
        loop {
            match host.receive_bytes(fd, &mut bytes[done..], flags) {
                Ok(0) => return Ok(done as i64),
                Ok(count) => done += count as usize,
                Err(libc::EAGAIN) if done > 0 && !all => return Ok(done as i64),
                Err(errno) => return Err(errno),
            }
            if done == len || !all {
                return Ok(done as i64);
            }
        }
    });
    let mut rest = &bytes[..result.max(0) as usize];
    for &(data, len) in buffers {
        let (part, more) = rest.split_at(len.min(rest.len()));
        copy_out(part, data, len);
        rest = more;
    }
    result as isize
}

extern "C" fn read(_: Void, fd: c_int, buf: *mut u8, count: usize) -> isize {
    receive(fd, &[(buf, count)], 0)
}

extern "C" fn readv(_: Void, fd: c_int, iov: *const iovec, count: c_int) -> isize {
    receive(fd, &vectors(iov, count.max(0) as usize), 0)
}

extern "C" fn recv(_: Void, fd: c_int, buf: *mut u8, len: usize, flags: c_int) -> isize {
    receive(fd, &[(buf, len)], flags)
}

extern "C" fn recvfrom(
    _: Void,
    fd: c_int,
    buf: *mut u8,
    len: usize,
    flags: c_int,
    _addr: *mut sockaddr,
    _addr_len: *mut socklen_t,
) -> isize {
    receive(fd, &[(buf, len)], flags)
}

extern "C" fn recvmsg(_: Void, fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    // SAFETY: packetdrill passes a valid message header.
    let message = unsafe { &mut *message };
    let result = receive(fd, &vectors(message.msg_iov, message.msg_iovlen), flags);
    (message.msg_controllen, message.msg_flags) = (0, 0);
    result
}

fn transmit(fd: c_int, data: &[u8], flags: c_int) -> isize {
    let mut done = 0;
    let result = blocking(fd, flags, |host| {
        match host.send_bytes(fd, &data[done..]) {
            Ok(count) => done += count as usize,
            Err(libc::EAGAIN) => {}
            Err(_) if done > 0 => return Ok(done as i64),
            Err(errno) => return Err(errno),
        }
        let waits = !host.socket(fd)?.non_blocking && flags & libc::MSG_DONTWAIT == 0;
        match done == data.len() || (done > 0 && !waits) {
            true => Ok(done as i64),
            false => Err(libc::EAGAIN),
        }
    });
    result as isize
}

extern "C" fn write(_: Void, fd: c_int, buf: *const u8, count: usize) -> isize {
    transmit(fd, &copied(buf, count), 0)
}

extern "C" fn writev(_: Void, fd: c_int, iov: *const iovec, count: c_int) -> isize {
    let parts = vectors(iov, count.max(0) as usize);
    let data: Vec<u8> = parts.into_iter().flat_map(|(data, len)| copied(data, len)).collect();
    transmit(fd, &data, 0)
}

extern "C" fn send(_: Void, fd: c_int, buf: *const u8, len: usize, flags: c_int) -> isize {
    transmit(fd, &copied(buf, len), flags)
}

extern "C" fn sendto(
    _: Void,
    fd: c_int,
    buf: *const u8,
    len: usize,
    flags: c_int,
    _addr: *const sockaddr,
    _addr_len: socklen_t,
) -> isize {
    transmit(fd, &copied(buf, len), flags)
}

extern "C" fn sendmsg(_: Void, fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: packetdrill passes a valid message header.
    let message = unsafe { &*message };
    let parts = vectors(message.msg_iov, message.msg_iovlen);
    let data: Vec<u8> = parts.into_iter().flat_map(|(data, len)| copied(data, len)).collect();
    transmit(fd, &data, flags)
}

/// In C a variadic function: the optional argument is passed like a fixed one.
extern "C" fn fcntl(_: Void, fd: c_int, command: c_int, argument: c_int) -> c_int {
    now(|host| host.control(fd, command, argument)) as c_int
}

extern "C" fn ioctl(_: Void, fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int {
    let result = now(|host| host.queue_bytes(fd, request));
    if result >= 0 {
        copy_out(&(result as c_int).to_ne_bytes(), argument.cast(), size_of::<c_int>());
    }
    result.min(0) as c_int
}

extern "C" fn close(_: Void, fd: c_int) -> c_int {
    now(|host| host.close(fd)) as c_int
}

extern "C" fn shutdown(_: Void, fd: c_int, how: c_int) -> c_int {
    now(|host| host.shut_down(fd, how)) as c_int
}

extern "C" fn getsockopt(
    _: Void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut u8,
    len: *mut socklen_t,
) -> c_int {
    let result = now(|host| {
        let bytes = host.option(fd, level, name)?;
        // SAFETY: packetdrill passes the length of `value`.
        unsafe {
            copy_out(&bytes, value, *len as usize);
            *len = (*len).min(bytes.len() as socklen_t);
        }
        Ok(0)
    });
    result as c_int
}

/// `getsockopt` of the whole process, for the library as `LD_PRELOAD`: packetdrill reads `TCP_INFO`
/// with the function of the C library.
///
/// # Safety
/// As `getsockopt(2)`.
#[unsafe(export_name = "getsockopt")]
pub unsafe extern "C" fn getsockopt_of_process(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut u8,
    len: *mut socklen_t,
) -> c_int {
    let is_ours = lock().as_ref().is_some_and(|host| host.sockets.contains_key(&fd));
    match is_ours {
        true => getsockopt(std::ptr::null_mut(), fd, level, name, value, len),
        // SAFETY: the arguments are those of the caller.
        false => unsafe {
            libc::syscall(libc::SYS_getsockopt, fd, level, name, value, len) as c_int
        },
    }
}

extern "C" fn setsockopt(
    _: Void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const u8,
    len: socklen_t,
) -> c_int {
    now(|host| host.set_option(fd, level, name, &copied(value, len as usize))) as c_int
}

extern "C" fn poll(_: Void, fds: *mut pollfd, count: c_ulong, timeout_ms: c_int) -> c_int {
    // SAFETY: packetdrill passes an array of the length that it states.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    let mut end_ns = None;
    loop {
        let ready = now(|host| {
            let wait_ns = timeout_ms as u64 * 1_000_000;
            let end_ns = *end_ns.get_or_insert(if timeout_ms < 0 {
                u64::MAX
            } else {
                host.now_ns + wait_ns
            });
            let mut ready = 0;
            for one in &mut *fds {
                let always: c_short = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
                one.revents = host.ready_events(one.fd) & (one.events | always);
                ready += i64::from(one.revents != 0);
            }
            if ready == 0 && host.now_ns < end_ns { Err(libc::EAGAIN) } else { Ok(ready) }
        });
        if ready >= 0 {
            return ready as c_int;
        }
        HAS_BLOCKED.store(true, Ordering::Relaxed);
        let mut guard = lock();
        let calls = host(&mut guard).calls;
        let (mut guard, timeout) =
            CHANGED.wait_timeout(guard, QUIET).unwrap_or_else(PoisonError::into_inner);
        let host = host(&mut guard);
        if timeout.timed_out() && host.calls == calls {
            let timer_ns = host.stack.next_timeout().unwrap_or(u64::MAX);
            match timer_ns.min(end_ns.unwrap_or(u64::MAX)) {
                u64::MAX => give_up("poll blocks and nothing more happens"),
                due_ns => host.advance_to(due_ns),
            }
        }
    }
}

extern "C" fn netdev_send(_: Void, packet: *const u8, count: usize) -> c_int {
    let accepted = now(|host| match host.receive(&copied(packet, count)) {
        true => Ok(0),
        false => Err(libc::ENOBUFS),
    });
    accepted as c_int
}

extern "C" fn netdev_receive(
    _: Void,
    buf: *mut u8,
    count: *mut usize,
    time_usecs: *mut c_longlong,
) -> c_int {
    if host(&mut lock()).sent.is_empty() {
        yield_to_blocked();
    }
    let next = host(&mut lock()).next_sent();
    CHANGED.notify_all();
    let Some((at_ns, packet)) = next else {
        let drops = host(&mut lock()).drops();
        give_up(&format!("the stack sends no more packets; dropped so far: {drops}"))
    };
    // SAFETY: packetdrill passes the size of `buf` in `count`, and a place for the time.
    unsafe {
        copy_out(&packet, buf, *count);
        *count = packet.len().min(*count);
        *time_usecs = (at_ns / 1000) as c_longlong;
    }
    0
}

extern "C" fn usleep(_: Void, usecs: u32) -> c_int {
    yield_to_blocked();
    now(|host| {
        host.advance_to(host.now_ns + u64::from(usecs) * 1000);
        Ok(0)
    });
    yield_to_blocked();
    0
}

/// packetdrill reads the clock again and again while it waits for less than 20 us, so that the
/// clock advances a little with each call.
extern "C" fn gettimeofday(_: Void, value: *mut timeval, _zone: Void) -> c_int {
    const STEP_NS: u64 = 1000;
    let mut guard = lock();
    let host = host(&mut guard);
    host.advance_to(host.now_ns + STEP_NS);
    host.write_states();
    let usecs = host.now_ns / 1000;
    // SAFETY: packetdrill passes a place for the time.
    unsafe {
        (*value).tv_sec = (usecs / 1_000_000) as c_long;
        (*value).tv_usec = (usecs % 1_000_000) as c_long;
    }
    0
}

extern "C" fn epoll_create(_: Void, _size: c_int) -> c_int {
    give_up("epoll is not implemented")
}

extern "C" fn pipe(_: Void, _fds: *mut c_int) -> c_int {
    give_up("pipes are not implemented")
}
