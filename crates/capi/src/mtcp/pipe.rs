//! Pipes of mTCP: a pair of the kernel's sockets with one direction, which stand in epoll sets beside
//! the sockets of the stack.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, pollfd};
use tidegate::Net;

use crate::sleeper::KernelWaiter;
use crate::socket::os_error;

/// End of a pipe. Calls of a blocking end run the stack while they wait.
pub(super) struct PipeEnd {
    /// Always non-blocking for the kernel.
    stream: UnixStream,
    is_reader: bool,
    is_nonblocking: AtomicBool,
}

impl PipeEnd {
    /// Creates both ends: that to read from, and that to write to.
    ///
    /// # Errors
    /// As `socketpair`.
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let (reader, writer) = UnixStream::pair()?;
        reader.shutdown(Shutdown::Write)?;
        writer.shutdown(Shutdown::Read)?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        let end =
            |stream, is_reader| Self { stream, is_reader, is_nonblocking: AtomicBool::new(false) };
        Ok((end(reader, true), end(writer, false)))
    }

    /// Descriptor of the kernel, for epoll sets.
    pub(super) fn fd(&self) -> c_int {
        self.stream.as_raw_fd()
    }

    pub(super) fn set_nonblocking(&self) {
        self.is_nonblocking.store(true, Ordering::Relaxed);
    }

    /// Reads; 0 when the other end is closed.
    ///
    /// # Errors
    /// `EBADF` at the end to write to, and as `read`.
    pub(super) fn read(&self, net: &Net, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if !self.is_reader {
            return Err(os_error(libc::EBADF));
        }
        self.retry(net, libc::POLLIN, || (&self.stream).read_vectored(buffers))
    }

    /// Writes.
    ///
    /// # Errors
    /// `EBADF` at the end to read from, `EPIPE` when the other end is closed, and as `write`.
    pub(super) fn write(&self, net: &Net, data: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.is_reader {
            return Err(os_error(libc::EBADF));
        }
        // One buffer at a time: a signal of the kernel's vectored write would end the program.
        let mut written = 0;
        for piece in data.iter().filter(|piece| !piece.is_empty()) {
            match self.retry(net, libc::POLLOUT, || (&self.stream).write(piece)) {
                Ok(len) if len == piece.len() => written += len,
                Ok(len) => return Ok(written + len),
                Err(error) if written == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(written)
    }

    /// Repeats a call that does not wait until it is done, unless the end is non-blocking.
    fn retry(
        &self,
        net: &Net,
        events: i16,
        mut call: impl FnMut() -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match call() {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && !self.is_nonblocking.load(Ordering::Relaxed) => {}
                done => return done,
            }
            let fds = vec![pollfd { fd: self.fd(), events, revents: 0 }];
            net.wait(&[], None, &mut KernelWaiter::new(fds, None, true))?;
        }
    }
}
