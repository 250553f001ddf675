//! Messages: buffers with an address and control messages, one or many with a call.

use std::io;
use std::time::{Duration, Instant};

use libc::{c_int, c_uint, mmsghdr, msghdr, sockaddr};
use tidegate_posix::arguments;
use tidegate_posix::control::{SendOptions, apply_to_sent};

use super::{read_address, write_address};
use crate::descriptors;
use crate::socket::os_error;

/// Most messages of a call, as in the kernel.
const MAX_MESSAGES: c_uint = 1024;

/// Receives a message.
///
/// # Errors
/// As `recvmsg`.
///
/// # Safety
/// `message` is null or valid, with all that it points to.
pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let message = unsafe { message.as_mut() }.ok_or_else(|| os_error(libc::EFAULT))?;
    if message.msg_iov.is_null() && message.msg_iovlen > 0 {
        return Err(os_error(libc::EFAULT));
    }
    // SAFETY: guaranteed by the caller.
    let mut bufs = unsafe { arguments::read_buffers(message.msg_iov, message.msg_iovlen) }
        .ok_or_else(|| os_error(libc::EMSGSIZE))?;
    let received = socket.receive(&mut bufs, flags)?;
    message.msg_flags = 0;
    let Some(datagram) = received.datagram else {
        (message.msg_namelen, message.msg_controllen) = (0, 0);
        return Ok(received.len);
    };
    if datagram.truncated {
        message.msg_flags |= libc::MSG_TRUNC;
    }
    let messages = socket.control_requests.messages(&datagram, |_| 0);
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (name, len) = (message.msg_name.cast::<sockaddr>(), &raw mut message.msg_namelen);
        match name.is_null() {
            true => message.msg_namelen = 0,
            false => write_address(&socket, datagram.from, name, len),
        }
        arguments::write_control_messages(message, &messages);
    }
    Ok(received.len)
}

/// Sends a message.
///
/// # Errors
/// As `sendmsg`.
///
/// # Safety
/// `message` is null or valid, with all that it points to.
pub(crate) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let message = unsafe { message.as_ref() }.ok_or_else(|| os_error(libc::EFAULT))?;
    if message.msg_iov.is_null() && message.msg_iovlen > 0 {
        return Err(os_error(libc::EFAULT));
    }
    // SAFETY: guaranteed by the caller.
    let data = unsafe { arguments::write_buffers(message.msg_iov, message.msg_iovlen) }
        .ok_or_else(|| os_error(libc::EMSGSIZE))?;
    let to = match message.msg_name.is_null() {
        true => None,
        // SAFETY: guaranteed by the caller.
        false => Some(unsafe { read_address(message.msg_name.cast(), message.msg_namelen) }?),
    };
    let mut options = SendOptions::default();
    if !message.msg_control.is_null() && message.msg_controllen > 0 {
        let is_v4 = match to {
            Some(to) => to.ip().to_canonical().is_ipv4(),
            None => !socket.is_v6,
        };
        // SAFETY: guaranteed by the caller.
        for one in unsafe { arguments::control_messages(message) } {
            apply_to_sent(&one, is_v4, &mut options)?;
        }
    }
    socket.send(&data, to, options.fields, flags)
}

/// Messages of a call, at most as many as the kernel takes.
///
/// # Errors
/// `EFAULT`.
///
/// # Safety
/// `messages` is null or points to `count` messages.
unsafe fn messages<'a>(messages: *mut mmsghdr, count: c_uint) -> io::Result<&'a mut [mmsghdr]> {
    match (messages.is_null(), count.min(MAX_MESSAGES) as usize) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(os_error(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        (false, count) => Ok(unsafe { std::slice::from_raw_parts_mut(messages, count) }),
    }
}

/// Receives messages: waits for the first, then takes those that have arrived; without
/// `MSG_WAITFORONE` waits for all until the timeout expires. Returns their number.
///
/// # Errors
/// As `recvmmsg`. An error after a message is returned by the next call.
///
/// # Safety
/// `list` is null or points to `count` messages, each valid for [`recvmsg`].
pub(crate) unsafe fn recvmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: Option<Duration>,
) -> io::Result<usize> {
    // SAFETY: guaranteed by the caller.
    let list = unsafe { messages(list, count) }?;
    let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
    let mut flags_of_next = flags & !libc::MSG_WAITFORONE;
    let mut received = 0;
    for one in list {
        // SAFETY: guaranteed by the caller.
        match unsafe { recvmsg(fd, &raw mut one.msg_hdr, flags_of_next) } {
            Ok(len) => one.msg_len = len as c_uint,
            Err(error) if received == 0 => return Err(error),
            Err(_) => break,
        }
        received += 1;
        if flags & libc::MSG_WAITFORONE != 0 {
            flags_of_next |= libc::MSG_DONTWAIT;
        }
        // The kernel, too, looks at the time after each message only.
        if deadline.is_some_and(|end| Instant::now() >= end) {
            break;
        }
    }
    Ok(received)
}

/// Sends messages in one transmit batch. Returns their number.
///
/// # Errors
/// As `sendmmsg`. An error after a message is returned by the next call.
///
/// # Safety
/// `list` is null or points to `count` messages, each valid for [`sendmsg`].
pub(crate) unsafe fn sendmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let list = unsafe { messages(list, count) }?;
    // Frames of all but the last wait for the last.
    socket.net.defer_transmit(list.len().saturating_sub(1) as u32);
    let mut sent = 0;
    let mut failure = None;
    for one in list {
        // SAFETY: guaranteed by the caller.
        match unsafe { sendmsg(fd, &raw const one.msg_hdr, flags) } {
            Ok(len) => one.msg_len = len as c_uint,
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
        sent += 1;
    }
    match failure {
        Some(error) if sent == 0 => Err(error),
        Some(_) => {
            // Sends what was deferred.
            socket.net.run_once()?;
            Ok(sent)
        }
        None => Ok(sent),
    }
}
