//! Reading and writing.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, off64_t, size_t, sockaddr, socklen_t,
    ssize_t, timespec,
};

use super::errno;
use crate::socket::moving::{self, Moved};
use crate::socket::{Body, Side, Socket, passing};
use crate::table::InUse;
use crate::{log, own_address, raw, real, start, table};

/// What was received.
struct Got {
    len: usize,
    from: Option<SocketAddr>,
    /// The address of ours that it was sent to.
    to: Option<IpAddr>,
    flags: c_int,
}

/// Receives into these buffers. `from_kernel` makes the same call on the
/// kernel's socket, without waiting.
fn receive(
    fd: c_int,
    socket: &Socket,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
    mut from_kernel: impl FnMut() -> ssize_t,
) -> io::Result<Result<Got, usize>> {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        let number = if flags & libc::MSG_OOB != 0 { libc::EINVAL } else { libc::EAGAIN };
        return Err(io::Error::from_raw_os_error(number));
    }
    let waits = flags & libc::MSG_DONTWAIT == 0;
    match &socket.body {
        Body::Listener(_) => Err(io::ErrorKind::NotConnected.into()),
        Body::Stream(_) => {
            let len = receive_stream(fd, socket, bufs, flags)?;
            Ok(Ok(Got { len, from: None, to: None, flags: 0 }))
        }
        Body::Udp(udp) => {
            let taken = flags & libc::MSG_PEEK == 0;
            socket.repeat(fd, Side::Read, waits, || match udp.receive(bufs, taken) {
                Ok(one) => {
                    let cut = if one.truncated { libc::MSG_TRUNC } else { 0 };
                    let whole = flags & libc::MSG_TRUNC != 0;
                    let len = if whole { one.datagram_len } else { one.len };
                    let from = Some(socket.present(one.from));
                    Ok(Ok(Got { len, from, to: Some(one.to), flags: cut }))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && socket.has_kernel => {
                    if udp.is_connected.load(Ordering::Relaxed) {
                        // Its peer is not at the kernel, and it hears nobody else.
                        discard_kernels(fd);
                        return Err(error);
                    }
                    match usize::try_from(from_kernel()) {
                        Ok(len) => Ok(Err(len)),
                        Err(_) => Err(io::Error::last_os_error()),
                    }
                }
                Err(error) => Err(error),
            })
        }
    }
}

/// Throws away the datagrams that wait at the kernel.
fn discard_kernels(fd: c_int) {
    let (nowhere, nobody) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: without room nothing is written.
    while unsafe {
        real::recvfrom(fd, nowhere, 0, libc::MSG_DONTWAIT, nobody, std::ptr::null_mut())
    } >= 0
    {}
}

fn receive_stream(
    fd: c_int,
    socket: &Socket,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
) -> io::Result<usize> {
    let Body::Stream(stream) = &socket.body else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    let taken = flags & libc::MSG_PEEK == 0;
    let waits = flags & libc::MSG_DONTWAIT == 0;
    let all = flags & libc::MSG_WAITALL != 0 && waits && taken && !socket.is_nonblocking();
    let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
    if !all {
        return socket.repeat(fd, Side::Read, waits, || stream.receive(socket, bufs, taken));
    }
    let mut rest = &mut *bufs;
    let mut total = 0;
    while total < wanted {
        match socket.repeat(fd, Side::Read, true, || stream.receive(socket, rest, true)) {
            Ok(0) => break,
            Ok(len) => {
                total += len;
                IoSliceMut::advance_slices(&mut rest, len);
            }
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// Sends these pieces. A broken pipe raises the signal unless that was asked
/// not to be. `by_kernel` makes the same call on the kernel's socket.
fn send_on(
    fd: c_int,
    socket: &Socket,
    data: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    from: Option<IpAddr>,
    flags: c_int,
    by_kernel: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let waits = flags & libc::MSG_DONTWAIT == 0;
    let sent = match &socket.body {
        _ if flags & libc::MSG_OOB != 0 => Err(io::ErrorKind::Unsupported.into()),
        Body::Listener(_) => Err(io::ErrorKind::BrokenPipe.into()),
        Body::Stream(_) => send_stream(fd, socket, data, waits, flags & libc::MSG_MORE != 0),
        Body::Udp(udp) if udp.is_for_kernel(socket, to) => return by_kernel(),
        Body::Udp(udp) => socket.repeat(fd, Side::Write, waits, || udp.send(data, to, from)),
    };
    if let Err(error) = &sent
        && error.kind() == io::ErrorKind::BrokenPipe
        && flags & libc::MSG_NOSIGNAL == 0
    {
        // SAFETY: sends this thread a signal, as the kernel does.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
    }
    errno::count(sent)
}

/// A call that waits sends all.
fn send_stream(
    fd: c_int,
    socket: &Socket,
    data: &[IoSlice<'_>],
    waits: bool,
    more_follows: bool,
) -> io::Result<usize> {
    let Body::Stream(stream) = &socket.body else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    let wanted: usize = data.iter().map(|piece| piece.len()).sum();
    let first =
        socket.repeat(fd, Side::Write, waits, || stream.send(socket, data, more_follows))?;
    if first == wanted || !waits || socket.is_nonblocking() {
        return Ok(first);
    }
    let mut total = first;
    let mut rest = data.to_vec();
    let mut rest = &mut rest[..];
    IoSlice::advance_slices(&mut rest, first);
    while total < wanted {
        match socket.repeat(fd, Side::Write, true, || stream.send(socket, rest, more_follows)) {
            Ok(len) => {
                total += len;
                IoSlice::advance_slices(&mut rest, len);
            }
            // What went wrong is told by the next call.
            Err(_) => break,
        }
    }
    Ok(total)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    if !table::is_ours(fd) {
        // SAFETY: the program's own call.
        return unsafe { real::read(fd, buf, len) };
    }
    // SAFETY: the program's own arguments.
    unsafe { recvfrom(fd, buf, len, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
) -> ssize_t {
    check(len, room);
    // SAFETY: the program's own arguments.
    unsafe { read(fd, buf, len) }
}

/// What the C library does where a compiler has counted the room.
fn check(len: size_t, room: size_t) {
    if len > room {
        eprintln!("tidegate: the program reads {len} bytes into room for {room}");
        std::process::abort();
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn readv(fd: c_int, bufs: *const iovec, count: c_int) -> ssize_t {
    let Some(socket) = table::socket(fd) else {
        // SAFETY: the program's own call.
        return unsafe { real::readv(fd, bufs, count) };
    };
    // SAFETY: the program's own arguments.
    let pieces = usize::try_from(count).ok().and_then(|count| unsafe { raw::buffers(bufs, count) });
    let Some(mut pieces) = pieces else {
        return errno::count(Err(io::ErrorKind::InvalidInput.into()));
    };
    // SAFETY: the program's own call, on a socket that does not wait.
    let from_kernel = || unsafe {
        let mut message: msghdr = std::mem::zeroed();
        message.msg_iov = bufs.cast_mut();
        message.msg_iovlen = count as usize;
        real::recvmsg(fd, &mut message, libc::MSG_DONTWAIT)
    };
    let got = receive(fd, &socket, &mut pieces, 0, from_kernel);
    errno::count(got.map(|got| got.map_or_else(|len| len, |got| got.len)))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own arguments.
    unsafe { recvfrom(fd, buf, len, flags, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    check(len, room);
    // SAFETY: the program's own arguments.
    unsafe { recv(fd, buf, len, flags) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the program's own call.
    let from_kernel =
        |more| unsafe { real::recvfrom(fd, buf, len, flags | more, address, address_len) };
    let Some(socket) = table::socket(fd) else { return from_kernel(0) };
    // SAFETY: the program's own arguments.
    let mut bufs = [unsafe { raw::buffer(buf, len) }];
    match receive(fd, &socket, &mut bufs, flags, || from_kernel(libc::MSG_DONTWAIT)) {
        Ok(Ok(got)) => {
            match got.from {
                // SAFETY: the program's own arguments.
                Some(from) => unsafe { raw::put_address(address, address_len, from) },
                // SAFETY: as above; a connection tells no address.
                None if !address_len.is_null() => unsafe { *address_len = 0 },
                None => {}
            }
            errno::count(Ok(got.len))
        }
        Ok(Err(len)) => errno::count(Ok(len)),
        Err(error) => errno::count(Err(error)),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    check(len, room);
    // SAFETY: the program's own arguments.
    unsafe { recvfrom(fd, buf, len, flags, address, address_len) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let from_kernel = |more| unsafe { real::recvmsg(fd, message, flags | more) };
    let Some(socket) = table::socket(fd) else {
        let got = from_kernel(0);
        // SAFETY: the kernel has just filled the program's own message.
        if let Some(message) = unsafe { message.as_ref() }.filter(|_| got >= 0) {
            // SAFETY: as above.
            unsafe { raw::descriptors(message) }.into_iter().for_each(passing::take);
        }
        return got;
    };
    // SAFETY: the program's own argument.
    let Some(told) = (unsafe { message.as_mut() }) else {
        return errno::count(Err(io::Error::from_raw_os_error(libc::EFAULT)));
    };
    // SAFETY: the program's own arguments.
    let Some(mut bufs) = (unsafe { raw::buffers(told.msg_iov, told.msg_iovlen) }) else {
        return errno::count(Err(io::Error::from_raw_os_error(libc::EMSGSIZE)));
    };
    match receive(fd, &socket, &mut bufs, flags, || from_kernel(libc::MSG_DONTWAIT)) {
        Ok(Ok(got)) => {
            let len = got.len;
            // SAFETY: the program's own arguments.
            unsafe { put_message(&socket, told, &got) };
            errno::count(Ok(len))
        }
        Ok(Err(len)) => errno::count(Ok(len)),
        Err(error) => errno::count(Err(error)),
    }
}

/// Fills in what stands beside the data.
///
/// # Safety
/// The message is as its lengths say.
unsafe fn put_message(socket: &Socket, message: &mut msghdr, got: &Got) {
    match got.from {
        // SAFETY: the caller's promise.
        Some(from) => unsafe {
            raw::put_address(message.msg_name.cast(), &mut message.msg_namelen, from);
        },
        None => message.msg_namelen = 0,
    }
    message.msg_flags = got.flags;
    let room = message.msg_controllen;
    message.msg_controllen = 0;
    let Body::Udp(udp) = &socket.body else { return };
    if let Some(to) = got.to
        && udp.tells_destination.load(Ordering::Relaxed)
    {
        // SAFETY: the caller's promise.
        unsafe { put_destination(message, room, to) };
    }
}

/// The address that a datagram was sent to, as a control message.
///
/// # Safety
/// As [`put_message`]; there is `room` at `msg_control`.
unsafe fn put_destination(message: &mut msghdr, room: usize, to: IpAddr) {
    let interface = own_address::interface_of(to).to_ne_bytes();
    let (level, kind, bytes): (c_int, c_int, Vec<u8>) = match to {
        IpAddr::V4(v4) => {
            let bytes = [interface, v4.octets(), v4.octets()].concat();
            (libc::IPPROTO_IP, libc::IP_PKTINFO, bytes)
        }
        IpAddr::V6(v6) => {
            let bytes = [&v6.octets()[..], &interface].concat();
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, bytes)
        }
    };
    // SAFETY: nothing is written beyond `room`, which the caller answers for.
    unsafe {
        let space = libc::CMSG_SPACE(bytes.len() as c_uint) as usize;
        if message.msg_control.is_null() || room < space {
            message.msg_flags |= libc::MSG_CTRUNC;
            return;
        }
        message.msg_controllen = space;
        let head = libc::CMSG_FIRSTHDR(message);
        (*head).cmsg_level = level;
        (*head).cmsg_type = kind;
        (*head).cmsg_len = libc::CMSG_LEN(bytes.len() as c_uint) as usize;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), libc::CMSG_DATA(head), bytes.len());
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if !table::is_ours(fd) {
        // SAFETY: the program's own call.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    let mut flags = flags;
    let mut done = 0;
    while done < count {
        // SAFETY: the program's own arguments.
        let len = unsafe {
            let message = messages.add(done as usize);
            let len = recvmsg(fd, &raw mut (*message).msg_hdr, flags & !libc::MSG_WAITFORONE);
            if len >= 0 {
                (*message).msg_len = len as c_uint;
            }
            len
        };
        if len < 0 {
            break;
        }
        done += 1;
        // The kernel looks at its time-out between two messages only, too; so
        // no message is waited for once there is one.
        if flags & libc::MSG_WAITFORONE != 0 || !timeout.is_null() {
            flags |= libc::MSG_DONTWAIT;
        }
    }
    if done == 0 && count > 0 { -1 } else { done as c_int }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    let Some(socket) = table::socket(fd) else {
        // SAFETY: the program's own call.
        return unsafe { real::write(fd, buf, len) };
    };
    // SAFETY: the program's own arguments.
    let data = [unsafe { raw::data(buf, len) }];
    // SAFETY: the program's own call.
    send_on(fd, &socket, &data, None, None, 0, || unsafe { real::write(fd, buf, len) })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let by_kernel = || unsafe { real::writev(fd, pieces, count) };
    let Some(socket) = table::socket(fd) else { return by_kernel() };
    // SAFETY: the program's own arguments.
    let data = usize::try_from(count).ok().and_then(|count| unsafe { raw::pieces(pieces, count) });
    match data {
        Some(data) => send_on(fd, &socket, &data, None, None, 0, by_kernel),
        None => errno::count(Err(io::ErrorKind::InvalidInput.into())),
    }
}

/// The socket to send on, which may move for that.
fn sender(fd: c_int, to: Option<SocketAddr>) -> io::Result<Option<InUse<Arc<Socket>>>> {
    if let Some(socket) = table::socket(fd) {
        return Ok(Some(socket));
    }
    let (Some(to), Some(_)) = (to, start::rules()) else { return Ok(None) };
    let Some(local) = raw::kernels_address(fd) else { return Ok(None) };
    match moving::on_send(fd, local, to)? {
        Moved::Yes(socket) => Ok(Some(socket)),
        Moved::No => Ok(None),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own arguments.
    unsafe { sendto(fd, buf, len, flags, std::ptr::null(), 0) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> ssize_t {
    // SAFETY: the program's own call.
    let by_kernel = || unsafe { real::sendto(fd, buf, len, flags, address, address_len) };
    // SAFETY: the program's own arguments.
    let to = unsafe { raw::address(address, address_len) };
    match sender(fd, to) {
        Ok(None) => by_kernel(),
        Ok(Some(socket)) => {
            // SAFETY: the program's own arguments.
            let data = [unsafe { raw::data(buf, len) }];
            send_on(fd, &socket, &data, to, None, flags, by_kernel)
        }
        Err(error) => errno::count(Err(error)),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let by_kernel = || unsafe { real::sendmsg(fd, message, flags) };
    // SAFETY: the program's own argument.
    let Some(told) = (unsafe { message.as_ref() }) else { return by_kernel() };
    // SAFETY: the program's own arguments.
    let to = unsafe { raw::address(told.msg_name.cast(), told.msg_namelen) };
    let socket = match sender(fd, to) {
        // SAFETY: the program's own arguments.
        Ok(None) => return handing_on(unsafe { raw::descriptors(told) }, by_kernel),
        Ok(Some(socket)) => socket,
        Err(error) => return errno::count(Err(error)),
    };
    // SAFETY: the program's own arguments.
    let (data, from) = unsafe { (raw::pieces(told.msg_iov, told.msg_iovlen), source(told)) };
    match data {
        Some(data) => send_on(fd, &socket, &data, to, from, flags, by_kernel),
        None => errno::count(Err(io::Error::from_raw_os_error(libc::EMSGSIZE))),
    }
}

/// Makes a call that hands descriptors to another process, and their sockets with
/// them.
fn handing_on(mut descriptors: Vec<c_int>, send: impl FnOnce() -> ssize_t) -> ssize_t {
    descriptors.retain(|&fd| passing::offer(fd));
    let sent = send();
    if sent < 0 && !descriptors.is_empty() {
        let error = io::Error::last_os_error();
        descriptors.into_iter().for_each(passing::withdraw);
        errno::set(&error);
    }
    sent
}

/// The address that a datagram shall leave from, if a control message says.
///
/// # Safety
/// The message is as its lengths say.
unsafe fn source(message: &msghdr) -> Option<IpAddr> {
    // SAFETY: the C library's own walk over the messages, which stays within
    // their lengths.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(message);
        while let Some(one) = head.as_ref() {
            let bytes = libc::CMSG_DATA(head);
            let len = one.cmsg_len;
            match (one.cmsg_level, one.cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) if len >= libc::CMSG_LEN(12) as usize => {
                    let address = bytes.add(4).cast::<[u8; 4]>().read_unaligned();
                    return Some(IpAddr::from(address)).filter(|ip| !ip.is_unspecified());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if len >= libc::CMSG_LEN(20) as usize => {
                    let address = bytes.cast::<[u8; 16]>().read_unaligned();
                    return Some(IpAddr::from(address).to_canonical())
                        .filter(|ip| !ip.is_unspecified());
                }
                _ => {}
            }
            head = libc::CMSG_NXTHDR(message, head);
        }
    }
    None
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let mut done = 0;
    while done < count {
        // The first may move the socket; the kernel takes all of its own at once.
        if done > 0 && !table::is_ours(fd) {
            // SAFETY: the program's own call, without what was done.
            let more =
                unsafe { real::sendmmsg(fd, messages.add(done as usize), count - done, flags) };
            return done as c_int + more.max(0);
        }
        // SAFETY: the program's own arguments.
        let len = unsafe {
            let message = messages.add(done as usize);
            let len = sendmsg(fd, &raw const (*message).msg_hdr, flags);
            if len >= 0 {
                (*message).msg_len = len as c_uint;
            }
            len
        };
        if len < 0 {
            break;
        }
        done += 1;
    }
    if done == 0 && count > 0 { -1 } else { done as c_int }
}

/// What is read of a file at once to be sent.
const FILE_BYTES: usize = 64 * 1024;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile64(
    out: c_int,
    source: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    let Some(socket) = table::socket(out) else {
        if table::is_ours(source) {
            return errno::count(Err(io::ErrorKind::InvalidInput.into()));
        }
        // SAFETY: the program's own call.
        return unsafe { real::sendfile64(out, source, offset, count) };
    };
    // SAFETY: the program's own argument.
    let given = unsafe { offset.as_mut() };
    errno::count(send_file(out, &socket, source, given, count))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendfile(
    out: c_int,
    source: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the program's own arguments; both offsets have 64 bits.
    unsafe { sendfile64(out, source, offset.cast(), count) }
}

fn send_file(
    fd: c_int,
    socket: &Socket,
    file: c_int,
    offset: Option<&mut off64_t>,
    count: usize,
) -> io::Result<usize> {
    // Without an offset the file's own moves on by what was sent.
    let begin = match &offset {
        Some(offset) => **offset,
        // SAFETY: asks for the place in a file.
        None => unsafe { libc::lseek64(file, 0, libc::SEEK_CUR) },
    };
    if begin < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut chunk = vec![0u8; count.min(FILE_BYTES)];
    let mut total = 0;
    while total < count {
        let wanted = chunk.len().min(count - total);
        // SAFETY: there is room for so many bytes.
        let len = unsafe {
            real::pread(file, chunk.as_mut_ptr().cast(), wanted, begin + total as off64_t)
        };
        let Ok(len) = usize::try_from(len) else {
            match total {
                0 => return Err(io::Error::last_os_error()),
                _ => break,
            }
        };
        if len == 0 {
            break;
        }
        // The rest of the file is more, if there is any.
        let more = len == wanted && total + len < count;
        match send_stream(fd, socket, &[IoSlice::new(&chunk[..len])], true, more) {
            Ok(sent) => {
                total += sent;
                if sent < len {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    let end = begin + total as off64_t;
    match offset {
        Some(offset) => *offset = end,
        // SAFETY: sets the place in a file.
        None => drop(unsafe { libc::lseek64(file, end, libc::SEEK_SET) }),
    }
    Ok(total)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    if table::is_ours(from) || table::is_ours(to) {
        log::say_once("splice() with a socket of Tidegate's gives EINVAL: programs then copy");
        return errno::count(Err(io::ErrorKind::InvalidInput.into()));
    }
    // SAFETY: the program's own call.
    unsafe { real::splice(from, from_offset, to, to_offset, len, flags) }
}
