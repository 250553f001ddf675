//! Streams that busy-poll the kernel instead of sleeping in it.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;

use super::busy_poll_until;

/// One direction of a stream. Calls that would block are made again until they do not.
pub(super) struct Spinning<T>(T);

impl<T: AsFd> Spinning<T> {
    /// Wraps a stream, and makes it non-blocking if it `spins`. A blocking stream stays as it is.
    pub(super) fn new(stream: T, spins: bool) -> io::Result<Self> {
        if spins {
            rustix::io::ioctl_fionbio(&stream, true)?;
        }
        Ok(Self(stream))
    }
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    busy_poll_until(|| match call() {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        result => result.map(Some),
    })
}

impl<T: Read> Read for Spinning<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        retry(|| self.0.read(bytes))
    }
}

impl<T: Write> Write for Spinning<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        retry(|| self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
