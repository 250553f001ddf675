//! Receiving: `read`, `recv` and their variants.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec,
};

use tidegate::DatagramMeta;

use crate::errno;
use crate::raw::ControlMessage;
use crate::socket::error_queue::QueuedError;
use crate::socket::tcp::scatter;
use crate::socket::{Endpoint, IoDirection, Socket, transfer};
use crate::{fd_table, local_addresses, raw, real};

/// Received data, with its addresses.
#[derive(Default)]
struct ReceivedMessage {
    len: usize,
    from: Option<SocketAddr>,
    datagram: Option<DatagramMeta>,
    /// Control message of an error (`MSG_ERRQUEUE`).
    error: Option<ControlMessage>,
    flags: c_int,
}

/// Receives into the buffers. `from_kernel` makes the same call on the kernel socket,
/// nonblocking. The inner `Err` is the length that `from_kernel` received: the kernel has then
/// filled the application's buffers itself.
fn receive(
    fd: c_int,
    socket: &Socket,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
    mut from_kernel: impl FnMut() -> ssize_t,
) -> io::Result<Result<ReceivedMessage, usize>> {
    if flags & libc::MSG_ERRQUEUE != 0 {
        return receive_error(socket, bufs, from_kernel);
    }
    if flags & libc::MSG_OOB != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let may_block = flags & libc::MSG_DONTWAIT == 0 && !socket.is_nonblocking();
    match &*socket.endpoint {
        Endpoint::Listener(_) => Err(io::ErrorKind::NotConnected.into()),
        Endpoint::Stream(_) => {
            let len = receive_stream(fd, socket, bufs, flags)?;
            Ok(Ok(ReceivedMessage { len, ..ReceivedMessage::default() }))
        }
        Endpoint::Udp(udp) => {
            let consume = flags & libc::MSG_PEEK == 0;
            socket.retry_until_ready(fd, IoDirection::Read, may_block, || {
                match udp.receive(bufs, consume) {
                    Ok(one) => {
                        let truncation = if one.truncated { libc::MSG_TRUNC } else { 0 };
                        let wants_full_len = flags & libc::MSG_TRUNC != 0;
                        let len = if wants_full_len { one.datagram_len } else { one.len };
                        let from = Some(socket.to_app_family(one.from));
                        let datagram = Some(one);
                        let (error, flags) = (None, truncation);
                        Ok(Ok(ReceivedMessage { len, from, datagram, error, flags }))
                    }
                    // The socket was shut down, and nothing is left to read.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        if socket.uses_kernel_socket
                            && let Ok(len) = usize::try_from(from_kernel())
                        {
                            return Ok(Err(len));
                        }
                        match may_block {
                            true => Ok(Ok(ReceivedMessage::default())),
                            false => Err(io::ErrorKind::WouldBlock.into()),
                        }
                    }
                    Err(error)
                        if error.kind() == io::ErrorKind::WouldBlock
                            && socket.uses_kernel_socket =>
                    {
                        if udp.is_connected.load(Ordering::Relaxed) {
                            // The peer is not at the kernel, and a connected socket receives from
                            // its peer only.
                            discard_kernel_datagrams(fd);
                            return Err(error);
                        }
                        match usize::try_from(from_kernel()) {
                            Ok(len) => Ok(Err(len)),
                            Err(_) => Err(io::Error::last_os_error()),
                        }
                    }
                    Err(error) => Err(error),
                }
            })
        }
    }
}

/// Receives a notification about sent data or an error about a sent datagram (`MSG_ERRQUEUE`), as
/// [`receive`]. Such a call never waits.
fn receive_error(
    socket: &Socket,
    bufs: &mut [IoSliceMut<'_>],
    mut from_kernel: impl FnMut() -> ssize_t,
) -> io::Result<Result<ReceivedMessage, usize>> {
    if let Some(error) = socket.take_zero_copy_notification() {
        let (error, flags) = (Some(error), libc::MSG_ERRQUEUE);
        return Ok(Ok(ReceivedMessage { error, flags, ..ReceivedMessage::default() }));
    }
    let taken = match &*socket.endpoint {
        Endpoint::Udp(udp) => udp.take_queued_error(socket),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    };
    match taken {
        Ok(QueuedError { payload, destination, message }) => {
            let space: usize = bufs.iter().map(|buf| buf.len()).sum();
            let len = payload.len().min(space);
            scatter(&payload[..len], bufs);
            let truncation = if len < payload.len() { libc::MSG_TRUNC } else { 0 };
            Ok(Ok(ReceivedMessage {
                len,
                from: Some(destination),
                error: Some(message),
                flags: libc::MSG_ERRQUEUE | truncation,
                ..ReceivedMessage::default()
            }))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock && socket.uses_kernel_socket => {
            match usize::try_from(from_kernel()) {
                Ok(len) => Ok(Err(len)),
                Err(_) => Err(io::Error::last_os_error()),
            }
        }
        Err(error) => Err(error),
    }
}

/// Discards the datagrams that wait at the kernel socket.
fn discard_kernel_datagrams(fd: c_int) {
    let (no_buffer, no_address) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: nothing is written to a buffer of length 0.
    while unsafe {
        real::recvfrom(fd, no_buffer, 0, libc::MSG_DONTWAIT, no_address, std::ptr::null_mut())
    } >= 0
    {}
}

fn receive_stream(
    fd: c_int,
    socket: &Socket,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
) -> io::Result<usize> {
    let Endpoint::Stream(stream) = &*socket.endpoint else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    let consume = flags & libc::MSG_PEEK == 0;
    let may_block = flags & libc::MSG_DONTWAIT == 0;
    let wait_all =
        flags & libc::MSG_WAITALL != 0 && may_block && consume && !socket.is_nonblocking();
    let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
    if !wait_all {
        return socket.retry_until_ready(fd, IoDirection::Read, may_block, || {
            stream.receive(socket, bufs, consume)
        });
    }
    let mut rest = &mut *bufs;
    let mut total = 0;
    while total < wanted {
        match socket
            .retry_until_ready(fd, IoDirection::Read, true, || stream.receive(socket, rest, true))
        {
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

/// Bytes that one call discards at most.
const MAX_DISCARDED_BYTES: usize = 1 << 20;

/// True for a call that discards data of a connection, and may have no buffer (`MSG_TRUNC`).
fn discards_data(socket: &Socket, flags: c_int) -> bool {
    flags & libc::MSG_TRUNC != 0 && matches!(*socket.endpoint, Endpoint::Stream(_))
}

/// Discards up to `len` bytes of a connection, or with `MSG_PEEK` counts them.
fn discard(fd: c_int, socket: &Socket, len: usize, flags: c_int) -> io::Result<usize> {
    let mut discarded = vec![0; len.min(MAX_DISCARDED_BYTES)];
    receive_stream(fd, socket, &mut [IoSliceMut::new(&mut discarded)], flags)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    if !fd_table::is_tidegate(fd) {
        // SAFETY: the application's own call.
        return unsafe { real::read(fd, buf, len) };
    }
    // SAFETY: the application's own arguments.
    unsafe { recvfrom(fd, buf, len, 0, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    buf_bytes: size_t,
) -> ssize_t {
    check_buffer_size(len, buf_bytes);
    // SAFETY: the application's own arguments.
    unsafe { read(fd, buf, len) }
}

/// Aborts on a buffer overflow, as the C library does where the compiler knows the size of the
/// buffer.
fn check_buffer_size(len: size_t, buf_bytes: size_t) {
    if len > buf_bytes {
        eprintln!("tidegate: the application reads {len} bytes into a buffer of size {buf_bytes}");
        std::process::abort();
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn readv(fd: c_int, bufs: *const iovec, count: c_int) -> ssize_t {
    let Some(socket) = fd_table::socket(fd) else {
        // SAFETY: the application's own call.
        return unsafe { real::readv(fd, bufs, count) };
    };
    // SAFETY: the application's own arguments.
    let pieces =
        usize::try_from(count).ok().and_then(|count| unsafe { raw::read_buffers(bufs, count) });
    let Some(mut pieces) = pieces else {
        return errno::return_count(Err(io::ErrorKind::InvalidInput.into()));
    };
    // SAFETY: the application's own call, nonblocking.
    let from_kernel = || unsafe {
        let mut message: msghdr = std::mem::zeroed();
        message.msg_iov = bufs.cast_mut();
        message.msg_iovlen = count as usize;
        real::recvmsg(fd, &mut message, libc::MSG_DONTWAIT)
    };
    let got = receive(fd, &socket, &mut pieces, 0, from_kernel);
    errno::return_count(got.map(|got| got.map_or_else(|len| len, |got| got.len)))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the application's own arguments.
    unsafe { recvfrom(fd, buf, len, flags, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    buf_bytes: size_t,
    flags: c_int,
) -> ssize_t {
    check_buffer_size(len, buf_bytes);
    // SAFETY: the application's own arguments.
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
    // SAFETY: the application's own call.
    let from_kernel =
        |more| unsafe { real::recvfrom(fd, buf, len, flags | more, address, address_len) };
    let Some(socket) = fd_table::socket(fd) else { return from_kernel(0) };
    if discards_data(&socket, flags) {
        return errno::return_count(discard(fd, &socket, len, flags));
    }
    // SAFETY: the application's own arguments.
    let mut bufs = [unsafe { raw::read_buffer(buf, len) }];
    match receive(fd, &socket, &mut bufs, flags, || from_kernel(libc::MSG_DONTWAIT)) {
        Ok(Ok(got)) => {
            match got.from {
                // SAFETY: the application's own arguments.
                Some(from) => unsafe { raw::write_address(address, address_len, from) },
                // SAFETY: as above; a connection reports no address.
                None if !address_len.is_null() => unsafe { *address_len = 0 },
                None => {}
            }
            errno::return_count(Ok(got.len))
        }
        Ok(Err(len)) => errno::return_count(Ok(len)),
        Err(error) => errno::return_count(Err(error)),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    buf_bytes: size_t,
    flags: c_int,
    address: *mut sockaddr,
    address_len: *mut socklen_t,
) -> ssize_t {
    check_buffer_size(len, buf_bytes);
    // SAFETY: the application's own arguments.
    unsafe { recvfrom(fd, buf, len, flags, address, address_len) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the application's own call.
    let from_kernel = |more| unsafe { real::recvmsg(fd, message, flags | more) };
    let Some(socket) = fd_table::socket(fd) else {
        let got = from_kernel(0);
        // SAFETY: the kernel has just written the application's own message.
        if let Some(message) = unsafe { message.as_ref() }.filter(|_| got >= 0) {
            // SAFETY: as above.
            unsafe { raw::passed_fds(message) }.into_iter().for_each(transfer::receive_socket);
        }
        return got;
    };
    // SAFETY: the application's own argument.
    let Some(header) = (unsafe { message.as_mut() }) else {
        return errno::return_count(Err(io::Error::from_raw_os_error(libc::EFAULT)));
    };
    if discards_data(&socket, flags) {
        // SAFETY: the application's own arguments.
        let Some(len) = (unsafe { raw::buffer_bytes(header.msg_iov, header.msg_iovlen) }) else {
            return errno::return_count(Err(io::Error::from_raw_os_error(libc::EMSGSIZE)));
        };
        (header.msg_namelen, header.msg_controllen, header.msg_flags) = (0, 0, 0);
        return errno::return_count(discard(fd, &socket, len, flags));
    }
    // SAFETY: the application's own arguments.
    let Some(mut bufs) = (unsafe { raw::read_buffers(header.msg_iov, header.msg_iovlen) }) else {
        return errno::return_count(Err(io::Error::from_raw_os_error(libc::EMSGSIZE)));
    };
    match receive(fd, &socket, &mut bufs, flags, || from_kernel(libc::MSG_DONTWAIT)) {
        Ok(Ok(got)) => {
            let len = got.len;
            // SAFETY: the application's own arguments.
            unsafe { write_message_header(&socket, header, &got) };
            errno::return_count(Ok(len))
        }
        Ok(Err(len)) => errno::return_count(Ok(len)),
        Err(error) => errno::return_count(Err(error)),
    }
}

/// Writes address, flags and control messages of received data.
///
/// # Safety
/// The lengths in the message are valid.
unsafe fn write_message_header(socket: &Socket, message: &mut msghdr, got: &ReceivedMessage) {
    match got.from {
        // SAFETY: guaranteed by the caller.
        Some(from) => unsafe {
            raw::write_address(message.msg_name.cast(), &mut message.msg_namelen, from);
        },
        None => message.msg_namelen = 0,
    }
    message.msg_flags = got.flags;
    if let Some(error) = &got.error {
        // SAFETY: guaranteed by the caller.
        unsafe { raw::write_control_messages(message, std::slice::from_ref(error)) };
        return;
    }
    let messages = match (&*socket.endpoint, &got.datagram) {
        (Endpoint::Udp(udp), Some(datagram)) => {
            udp.control_requests.messages(datagram, local_addresses::interface_index)
        }
        (Endpoint::Stream(stream), _) if stream.reports_left_bytes.load(Ordering::Relaxed) => {
            vec![left_bytes(socket)]
        }
        _ => Vec::new(),
    };
    // SAFETY: guaranteed by the caller.
    unsafe { raw::write_control_messages(message, &messages) };
}

/// Control message with the number of bytes that the next call could read (`TCP_INQ`); 1 at the end
/// of the data.
fn left_bytes(socket: &Socket) -> ControlMessage {
    let left = socket.readable_bytes().unwrap_or(0);
    let left = left.max(socket.readiness().read_closed.into());
    let data = c_int::try_from(left).unwrap_or(c_int::MAX).to_ne_bytes().to_vec();
    ControlMessage { level: libc::IPPROTO_TCP, kind: libc::TCP_CM_INQ, data }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if !fd_table::is_tidegate(fd) {
        // SAFETY: the application's own call.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    let mut flags = flags;
    let mut done = 0;
    while done < count {
        // SAFETY: the application's own arguments.
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
        // The kernel, too, checks the timeout only between messages. So the call no longer
        // waits once it has a message.
        if flags & libc::MSG_WAITFORONE != 0 || !timeout.is_null() {
            flags |= libc::MSG_DONTWAIT;
        }
    }
    if done == 0 && count > 0 { -1 } else { done as c_int }
}
