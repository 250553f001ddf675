//! `splice` between a connection and a pipe. Data is copied.

use std::io::{self, Error, ErrorKind, IoSlice, IoSliceMut};

use libc::{c_int, c_uint, iovec, off64_t, pollfd, size_t, ssize_t};

use super::send::{raise_broken_pipe, send_stream};
use crate::errno;
use crate::socket::{Endpoint, IoDirection, Socket, Stream};
use crate::{fd_table, real, sleeper};

/// Bytes that one call moves at most: the usual size of a pipe.
const MAX_BYTES: usize = 64 << 10;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let (source, target) = (fd_table::socket(from), fd_table::socket(to));
    let (pipe, socket_offset, pipe_offset) = match (&source, &target) {
        (None, None) => {
            // SAFETY: the application's own call.
            return unsafe { real::splice(from, from_offset, to, to_offset, len, flags) };
        }
        (Some(_), _) => (to, from_offset, to_offset),
        (None, Some(_)) => (from, to_offset, from_offset),
    };
    if !is_pipe(pipe) {
        return errno::return_count(Err(ErrorKind::InvalidInput.into()));
    }
    if !pipe_offset.is_null() {
        return errno::return_count(Err(Error::from_raw_os_error(libc::ESPIPE)));
    }
    if !socket_offset.is_null() {
        return errno::return_count(Err(ErrorKind::InvalidInput.into()));
    }
    let len = len.min(MAX_BYTES);
    errno::return_count(match (source, target) {
        (Some(socket), _) => to_pipe(from, &socket, to, len, flags),
        (None, Some(socket)) => {
            let sent = from_pipe(to, &socket, from, len, flags);
            sent.inspect_err(|error| raise_broken_pipe(&socket, error, 0))
        }
        (None, None) => Err(ErrorKind::InvalidInput.into()),
    })
}

fn is_pipe(fd: c_int) -> bool {
    // SAFETY: plain integers, for which zero is valid; the kernel writes them.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        libc::fstat(fd, &raw mut status) == 0 && status.st_mode & libc::S_IFMT == libc::S_IFIFO
    }
}

fn may_block(pipe: c_int, flags: c_uint) -> bool {
    // SAFETY: reads flags.
    let pipe_flags = unsafe { real::fcntl64(pipe, libc::F_GETFL, 0) };
    flags & libc::SPLICE_F_NONBLOCK == 0 && pipe_flags & libc::O_NONBLOCK == 0
}

/// Result of a call of the kernel that returns a count.
fn counted(result: ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| Error::last_os_error())
}

/// Repeats `attempt` until the pipe is ready, if the call may wait.
fn retry_pipe(
    pipe: c_int,
    events: i16,
    may_block: bool,
    mut attempt: impl FnMut() -> io::Result<usize>,
) -> io::Result<usize> {
    loop {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && may_block => {}
            result => return result,
        }
        sleeper::poll(&mut [pollfd { fd: pipe, events, revents: 0 }], None, None)?;
    }
}

fn stream_of(socket: &Socket) -> io::Result<&Stream> {
    match &*socket.endpoint {
        Endpoint::Stream(stream) => Ok(stream),
        Endpoint::Listener(_) | Endpoint::Udp(_) => Err(ErrorKind::InvalidInput.into()),
    }
}

fn to_pipe(
    fd: c_int,
    socket: &Socket,
    pipe: c_int,
    len: usize,
    flags: c_uint,
) -> io::Result<usize> {
    let stream = stream_of(socket)?;
    let mut buf = vec![0; len];
    // `SPLICE_F_NONBLOCK` concerns the pipe. What the pipe does not take stays in the queue.
    let len = socket.retry_until_ready(fd, IoDirection::Read, true, || {
        stream.receive(socket, &mut [IoSliceMut::new(&mut buf)], false)
    })?;
    if len == 0 {
        return Ok(0);
    }
    let piece = iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: len };
    let written = retry_pipe(pipe, libc::POLLOUT, may_block(pipe, flags), || {
        // SAFETY: the buffer has `len` bytes.
        counted(unsafe { libc::pwritev2(pipe, &raw const piece, 1, -1, libc::RWF_NOWAIT) })
    })?;
    stream.receive(socket, &mut [IoSliceMut::new(&mut buf[..written])], true)
}

fn from_pipe(
    fd: c_int,
    socket: &Socket,
    pipe: c_int,
    len: usize,
    flags: c_uint,
) -> io::Result<usize> {
    let stream = stream_of(socket)?;
    // What is read from the pipe must find space.
    let space = socket.retry_until_ready(fd, IoDirection::Write, true, || {
        match stream.stream.writable_bytes() {
            // An ended connection returns its error.
            0 => stream.send(socket, &[], false).and(Err(ErrorKind::WouldBlock.into())),
            space => Ok(space),
        }
    })?;
    let mut buf = vec![0; len.min(space)];
    let piece = iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let len = retry_pipe(pipe, libc::POLLIN, may_block(pipe, flags), || {
        // SAFETY: the buffer has this many bytes.
        counted(unsafe { libc::preadv2(pipe, &raw const piece, 1, -1, libc::RWF_NOWAIT) })
    })?;
    let more_follows = flags & libc::SPLICE_F_MORE != 0;
    send_stream(fd, socket, &[IoSlice::new(&buf[..len])], true, more_follows)
}
