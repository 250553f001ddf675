//! Receiving and sending bytes and datagrams.

use std::io::{self, IoSlice, IoSliceMut};

use libc::{c_int, c_void, iovec, sockaddr, socklen_t};
use tidegate::UdpSendOptions;
use tidegate_posix::arguments;

use super::{check_address_space, read_address, write_address};
use crate::descriptors;
use crate::socket::{Endpoint, IoDirection, os_error};

/// Longest transfer of a call, as in the kernel (`MAX_RW_COUNT`).
const MAX_BYTES: usize = 0x7fff_f000;

/// Buffer to receive into.
///
/// # Errors
/// `EFAULT` without a buffer.
///
/// # Safety
/// `data` is null or points to `len` bytes.
unsafe fn buffer_mut<'a>(data: *mut c_void, len: usize) -> io::Result<&'a mut [u8]> {
    match (data.is_null(), len) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(os_error(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len.min(MAX_BYTES)) }),
    }
}

/// Data to send.
///
/// # Errors
/// `EFAULT` without data.
///
/// # Safety
/// `data` is null or points to `len` bytes.
pub(crate) unsafe fn buffer<'a>(data: *const c_void, len: usize) -> io::Result<&'a [u8]> {
    match (data.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(os_error(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        _ => Ok(unsafe { std::slice::from_raw_parts(data.cast(), len.min(MAX_BYTES)) }),
    }
}

/// Buffers to receive into, one after the other.
///
/// # Errors
/// `EFAULT` without buffers, `EINVAL` for fewer than none or more than `IOV_MAX`.
///
/// # Safety
/// `bufs` is null or points to `count` valid buffers.
pub(crate) unsafe fn read_buffers<'a>(
    bufs: *const iovec,
    count: c_int,
) -> io::Result<Vec<IoSliceMut<'a>>> {
    let count = buffer_count(bufs, count)?;
    // SAFETY: guaranteed by the caller.
    unsafe { arguments::read_buffers(bufs, count) }.ok_or_else(|| os_error(libc::EINVAL))
}

/// Data to send, one after the other.
///
/// # Errors
/// As [`read_buffers`].
///
/// # Safety
/// As [`read_buffers`].
pub(crate) unsafe fn write_buffers<'a>(
    bufs: *const iovec,
    count: c_int,
) -> io::Result<Vec<IoSlice<'a>>> {
    let count = buffer_count(bufs, count)?;
    // SAFETY: guaranteed by the caller.
    unsafe { arguments::write_buffers(bufs, count) }.ok_or_else(|| os_error(libc::EINVAL))
}

/// Number of buffers from C.
///
/// # Errors
/// As [`read_buffers`], without the upper limit.
fn buffer_count(bufs: *const iovec, count: c_int) -> io::Result<usize> {
    match usize::try_from(count) {
        Ok(1..) if bufs.is_null() => Err(os_error(libc::EFAULT)),
        count => count.map_err(|_| os_error(libc::EINVAL)),
    }
}

/// Receives.
///
/// # Errors
/// As `recv`.
///
/// # Safety
/// `data` is null or points to `len` bytes.
#[inline(always)]
pub(crate) unsafe fn recv(
    fd: c_int,
    data: *mut c_void,
    len: usize,
    flags: c_int,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    socket.receive_bytes(unsafe { buffer_mut(data, len) }?, flags)
}

/// Receives, with the address of the sender.
///
/// # Errors
/// As `recvfrom`.
///
/// # Safety
/// As [`recv`]; `from` and `from_len` are null or valid, and `from` has space for `*from_len`
/// bytes.
#[inline(always)]
pub(crate) unsafe fn recvfrom(
    fd: c_int,
    data: *mut c_void,
    len: usize,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    if !from.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { check_address_space(from, from_len) }?;
    }
    // SAFETY: guaranteed by the caller.
    let data = unsafe { buffer_mut(data, len) }?;
    // SAFETY: guaranteed by the caller.
    let write = |sender: &_| unsafe { write_address(&socket, *sender, from, from_len) };
    if let Some(received) = socket.receive_one_datagram(data, flags, write) {
        return received;
    }
    let received = socket.receive(&mut [IoSliceMut::new(data)], flags)?;
    if !from.is_null() {
        match received.datagram {
            // SAFETY: guaranteed by the caller.
            Some(datagram) => unsafe { write_address(&socket, datagram.from, from, from_len) },
            // SAFETY: checked above. A connection has no address of a sender.
            None => unsafe { *from_len = 0 },
        }
    }
    Ok(received.len)
}

/// Receives into several buffers.
///
/// # Errors
/// As `readv`.
///
/// # Safety
/// `bufs` is null or points to `count` valid buffers.
pub(crate) unsafe fn readv(fd: c_int, bufs: *const iovec, count: c_int) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let mut bufs = unsafe { read_buffers(bufs, count) }?;
    socket.receive(&mut bufs, 0).map(|received| received.len)
}

/// Sends.
///
/// # Errors
/// As `send`.
///
/// # Safety
/// `data` is null or points to `len` bytes.
#[inline(always)]
pub(crate) unsafe fn send(
    fd: c_int,
    data: *const c_void,
    len: usize,
    flags: c_int,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    socket.send_bytes(unsafe { buffer(data, len) }?, flags)
}

/// Sends to an address.
///
/// # Errors
/// As `sendto`.
///
/// # Safety
/// As [`send`]; `to` is null or points to `to_len` bytes.
#[inline(always)]
pub(crate) unsafe fn sendto(
    fd: c_int,
    data: *const c_void,
    len: usize,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> io::Result<usize> {
    if to.is_null() {
        // SAFETY: guaranteed by the caller.
        return unsafe { send(fd, data, len, flags) };
    }
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let data = unsafe { buffer(data, len) }?;
    // SAFETY: guaranteed by the caller.
    if let Some(sent) = socket.send_one_datagram(data, unsafe { read_address(to, to_len) }?, flags)
    {
        return sent;
    }
    // Read again, so that the usual case need not keep it. SAFETY: guaranteed by the caller.
    let to = unsafe { read_address(to, to_len) }?;
    socket.send(&[IoSlice::new(data)], Some(to), UdpSendOptions::default(), flags)
}

/// Sends several buffers.
///
/// # Errors
/// As `writev`.
///
/// # Safety
/// `bufs` is null or points to `count` valid buffers.
pub(crate) unsafe fn writev(fd: c_int, bufs: *const iovec, count: c_int) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    // SAFETY: guaranteed by the caller.
    let data = unsafe { write_buffers(bufs, count) }?;
    socket.send(&data, None, UdpSendOptions::default(), 0)
}

/// Function that reads received data in place; returns the number of bytes that it takes.
pub(crate) type ReadFn =
    unsafe extern "C" fn(context: *mut c_void, data: *const c_void, len: usize) -> usize;
/// Function that writes data in place; returns the number of bytes written.
pub(crate) type WriteFn =
    unsafe extern "C" fn(context: *mut c_void, space: *mut c_void, len: usize) -> usize;
/// Function that writes a reply over a datagram; returns its length, or -1 for no reply.
pub(crate) type ReplyFn = unsafe extern "C" fn(
    context: *mut c_void,
    datagram: *mut c_void,
    len: usize,
    space: usize,
) -> isize;

/// Reads received data where it lies.
///
/// # Errors
/// As `recv`; `EOPNOTSUPP` for UDP, `EFAULT` without a function.
///
/// # Safety
/// `read` can be called with `context`.
pub(crate) unsafe fn recv_with(
    fd: c_int,
    read: Option<ReadFn>,
    context: *mut c_void,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    let read = read.ok_or_else(|| os_error(libc::EFAULT))?;
    let stream = socket.transfer_stream()?;
    socket.retry_until_ready(IoDirection::Read, true, || {
        stream.recv_with(|data| {
            // SAFETY: guaranteed by the caller; the data is readable during the call.
            let taken = unsafe { read(context, data.as_ptr().cast(), data.len()) };
            taken.min(data.len())
        })
    })
}

/// Writes data where it stays until it is acknowledged.
///
/// # Errors
/// As `send`; `EOPNOTSUPP` for UDP, `EFAULT` without a function.
///
/// # Safety
/// `write` can be called with `context`.
pub(crate) unsafe fn send_with(
    fd: c_int,
    limit: usize,
    write: Option<WriteFn>,
    context: *mut c_void,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    let write = write.ok_or_else(|| os_error(libc::EFAULT))?;
    let stream = socket.transfer_stream()?;
    socket.retry_until_ready(IoDirection::Write, true, || {
        stream.send_with(limit, |space| {
            // SAFETY: guaranteed by the caller; the space is writable during the call.
            let written = unsafe { write(context, space.as_mut_ptr().cast(), space.len()) };
            written.min(space.len())
        })
    })
}

/// Answers the datagrams that have arrived, each in place. Returns their number.
///
/// # Errors
/// As `recv`; `EOPNOTSUPP` for TCP, `EFAULT` without a function.
///
/// # Safety
/// `reply` can be called with `context`.
pub(crate) unsafe fn exchange(
    fd: c_int,
    reply: Option<ReplyFn>,
    context: *mut c_void,
) -> io::Result<usize> {
    let socket = descriptors::socket(fd)?;
    let reply = reply.ok_or_else(|| os_error(libc::EFAULT))?;
    socket.udp()?;
    let Some(Endpoint::Udp(udp)) = socket.endpoint() else {
        return Err(os_error(libc::EOPNOTSUPP));
    };
    socket.retry_until_ready(IoDirection::Read, true, || {
        udp.exchange_in_place(|request| {
            let space = request.buffer.len();
            // SAFETY: guaranteed by the caller; the space is writable during the call.
            let len =
                unsafe { reply(context, request.buffer.as_mut_ptr().cast(), request.len, space) };
            usize::try_from(len).ok().map(|len| len.min(space))
        })
    })
}
