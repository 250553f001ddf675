//! Sending: `write`, `send` and their variants.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use tidegate_posix::control::{self, SendOptions};

use crate::errno;
use crate::fd_table::InUse;
use crate::socket::install::MoveOutcome;
use crate::socket::{Endpoint, IoDirection, Socket, moving, transfer, udp};
use crate::{fd_table, raw, real, runtime};

/// Sends the buffers. A broken pipe raises SIGPIPE unless `MSG_NOSIGNAL` is set. `by_kernel`
/// makes the same call on the kernel socket.
fn send_to_socket(
    fd: c_int,
    socket: &Socket,
    data: &[IoSlice<'_>],
    to: Option<SocketAddr>,
    options: SendOptions,
    flags: c_int,
    by_kernel: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let may_block = flags & libc::MSG_DONTWAIT == 0;
    let sent = match &*socket.endpoint {
        _ if flags & libc::MSG_OOB != 0 => Err(io::ErrorKind::Unsupported.into()),
        Endpoint::Listener(_) => Err(io::ErrorKind::BrokenPipe.into()),
        Endpoint::Stream(_) => {
            send_stream(fd, socket, data, may_block, flags & libc::MSG_MORE != 0)
        }
        Endpoint::Udp(udp) if udp.is_kernel_destination(socket, to) => return by_kernel(),
        Endpoint::Udp(udp) => {
            let payload = udp::joined(data);
            let mut sent = 0;
            let all = socket.retry_until_ready(fd, IoDirection::Write, may_block, || {
                udp.check_family(socket, to)?;
                sent += udp.send(socket, &payload[sent..], to, options)?;
                match sent < payload.len() {
                    true => Err(io::ErrorKind::WouldBlock.into()),
                    false => Ok(sent),
                }
            });
            // Of several datagrams the first may have been sent.
            all.or_else(|error| if sent > 0 { Ok(sent) } else { Err(error) })
        }
    };
    if let Ok(len) = sent
        && flags & libc::MSG_ZEROCOPY != 0
    {
        socket.on_zero_copy_sent(len);
    }
    errno::return_count(sent.inspect_err(|error| raise_broken_pipe(socket, error, flags)))
}

/// Raises SIGPIPE for the error of a call with these flags. A datagram raises no signal.
pub(super) fn raise_broken_pipe(socket: &Socket, error: &io::Error, flags: c_int) {
    if !matches!(*socket.endpoint, Endpoint::Udp(_))
        && error.kind() == io::ErrorKind::BrokenPipe
        && flags & libc::MSG_NOSIGNAL == 0
    {
        // SAFETY: sends this thread a signal, as the kernel does.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
    }
}

/// Sends to a connection; a blocking call sends everything.
pub(super) fn send_stream(
    fd: c_int,
    socket: &Socket,
    data: &[IoSlice<'_>],
    may_block: bool,
    more_follows: bool,
) -> io::Result<usize> {
    let Endpoint::Stream(stream) = &*socket.endpoint else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    let wanted: usize = data.iter().map(|piece| piece.len()).sum();
    let first = socket.retry_until_ready(fd, IoDirection::Write, may_block, || {
        stream.send(socket, data, more_follows)
    })?;
    if first == wanted || !may_block || socket.is_nonblocking() {
        return Ok(first);
    }
    let mut total = first;
    let mut rest = data.to_vec();
    let mut rest = &mut rest[..];
    IoSlice::advance_slices(&mut rest, first);
    while total < wanted {
        match socket.retry_until_ready(fd, IoDirection::Write, true, || {
            stream.send(socket, rest, more_follows)
        }) {
            Ok(len) => {
                total += len;
                IoSlice::advance_slices(&mut rest, len);
            }
            // The next call reports the error.
            Err(_) => break,
        }
    }
    Ok(total)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    let Some(socket) = fd_table::socket(fd) else {
        // SAFETY: the application's own call.
        return unsafe { real::write(fd, buf, len) };
    };
    // SAFETY: the application's own arguments.
    let data = [unsafe { raw::write_buffer(buf, len) }];
    // SAFETY: the application's own call.
    send_to_socket(fd, &socket, &data, None, SendOptions::default(), 0, || unsafe {
        real::write(fd, buf, len)
    })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the application's own call.
    let by_kernel = || unsafe { real::writev(fd, pieces, count) };
    let Some(socket) = fd_table::socket(fd) else { return by_kernel() };
    // SAFETY: the application's own arguments.
    let data =
        usize::try_from(count).ok().and_then(|count| unsafe { raw::write_buffers(pieces, count) });
    match data {
        Some(data) => {
            send_to_socket(fd, &socket, &data, None, SendOptions::default(), 0, by_kernel)
        }
        None => errno::return_count(Err(io::ErrorKind::InvalidInput.into())),
    }
}

/// Socket to send on; a kernel socket may move to Tidegate first.
fn sending_socket(fd: c_int, to: Option<SocketAddr>) -> io::Result<Option<InUse<Arc<Socket>>>> {
    if let Some(socket) = fd_table::socket(fd) {
        return Ok(Some(socket));
    }
    let (Some(to), Some(_)) = (to, runtime::rules()) else { return Ok(None) };
    let Some(local) = raw::kernel_local_address(fd) else { return Ok(None) };
    match moving::on_send(fd, local, to)? {
        MoveOutcome::Tidegate(socket) => Ok(Some(socket)),
        MoveOutcome::Kernel => Ok(None),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the application's own arguments.
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
    // SAFETY: the application's own call.
    let by_kernel = || unsafe { real::sendto(fd, buf, len, flags, address, address_len) };
    // SAFETY: the application's own arguments.
    let to = unsafe { raw::address(address, address_len) };
    match sending_socket(fd, to) {
        Ok(None) => by_kernel(),
        Ok(Some(socket)) => {
            // SAFETY: the application's own arguments.
            let data = [unsafe { raw::write_buffer(buf, len) }];
            let options = SendOptions::default();
            send_to_socket(fd, &socket, &data, to, options, flags, by_kernel)
        }
        Err(error) => errno::return_count(Err(error)),
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the application's own call.
    let by_kernel = || unsafe { real::sendmsg(fd, message, flags) };
    // SAFETY: the application's own argument.
    let Some(header) = (unsafe { message.as_ref() }) else { return by_kernel() };
    // SAFETY: the application's own arguments.
    let to = unsafe { raw::address(header.msg_name.cast(), header.msg_namelen) };
    let socket = match sending_socket(fd, to) {
        // SAFETY: the application's own arguments.
        Ok(None) => return transfer_fds(unsafe { raw::passed_fds(header) }, by_kernel),
        Ok(Some(socket)) => socket,
        Err(error) => return errno::return_count(Err(error)),
    };
    // SAFETY: the application's own arguments.
    let (data, options) = unsafe {
        (raw::write_buffers(header.msg_iov, header.msg_iovlen), send_options(&socket, header, to))
    };
    match (data, options) {
        (Some(data), Ok(options)) => {
            send_to_socket(fd, &socket, &data, to, options, flags, by_kernel)
        }
        (None, _) => errno::return_count(Err(io::Error::from_raw_os_error(libc::EMSGSIZE))),
        (_, Err(error)) => errno::return_count(Err(error)),
    }
}

/// Makes a call that passes descriptors to another process, and sends their sockets with them.
fn transfer_fds(mut descriptors: Vec<c_int>, send: impl FnOnce() -> ssize_t) -> ssize_t {
    descriptors.retain(|&fd| transfer::send_socket(fd));
    let sent = send();
    if sent < 0 && !descriptors.is_empty() {
        let error = io::Error::last_os_error();
        descriptors.into_iter().for_each(transfer::withdraw_socket);
        errno::set_from(&error);
    }
    sent
}

/// Options of a datagram that control messages set.
///
/// # Errors
/// `EINVAL` for a value that the kernel refuses.
///
/// # Safety
/// The lengths in the message are valid.
unsafe fn send_options(
    socket: &Socket,
    message: &msghdr,
    to: Option<SocketAddr>,
) -> io::Result<SendOptions> {
    let mut options = SendOptions::default();
    let Endpoint::Udp(udp) = &*socket.endpoint else { return Ok(options) };
    // SAFETY: guaranteed by the caller.
    let messages = unsafe { raw::control_messages(message) };
    if messages.is_empty() {
        return Ok(options);
    }
    let to = to.or_else(|| udp.socket.peer_addr().ok());
    let is_v4 = to.is_some_and(|to| to.ip().to_canonical().is_ipv4());
    for one in messages {
        control::apply_to_sent(&one, is_v4, &mut options)?;
    }
    Ok(options)
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
        // The first message may move the socket; if it stays, the kernel sends the rest at once.
        if done > 0 && !fd_table::is_tidegate(fd) {
            // SAFETY: the application's own call, without the messages already sent.
            let more =
                unsafe { real::sendmmsg(fd, messages.add(done as usize), count - done, flags) };
            return done as c_int + more.max(0);
        }
        // SAFETY: the application's own arguments.
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
