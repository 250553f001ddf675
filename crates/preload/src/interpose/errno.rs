//! What went wrong, in the numbers of C.

use std::io::{Error, ErrorKind};

use libc::c_int;

/// The number of an error.
pub(super) fn number(error: &Error) -> c_int {
    if let Some(number) = error.raw_os_error() {
        return number;
    }
    match error.kind() {
        ErrorKind::WouldBlock => libc::EAGAIN,
        ErrorKind::Interrupted => libc::EINTR,
        ErrorKind::ConnectionRefused => libc::ECONNREFUSED,
        ErrorKind::ConnectionReset => libc::ECONNRESET,
        ErrorKind::ConnectionAborted => libc::ECONNABORTED,
        ErrorKind::NotConnected => libc::ENOTCONN,
        ErrorKind::AddrInUse => libc::EADDRINUSE,
        ErrorKind::AddrNotAvailable => libc::EADDRNOTAVAIL,
        ErrorKind::NetworkUnreachable => libc::ENETUNREACH,
        ErrorKind::HostUnreachable => libc::EHOSTUNREACH,
        ErrorKind::NetworkDown => libc::ENETDOWN,
        ErrorKind::BrokenPipe => libc::EPIPE,
        ErrorKind::TimedOut => libc::ETIMEDOUT,
        ErrorKind::OutOfMemory => libc::ENOMEM,
        ErrorKind::InvalidInput => libc::EINVAL,
        ErrorKind::AlreadyExists => libc::EEXIST,
        ErrorKind::NotFound => libc::ENOENT,
        ErrorKind::PermissionDenied => libc::EPERM,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

/// Tells the program what went wrong.
pub(super) fn set(error: &Error) {
    set_number(number(error));
}

pub(super) fn set_number(number: c_int) {
    // SAFETY: the place of this thread's own errno.
    unsafe { *libc::__errno_location() = number };
}

/// A count, or -1.
pub(super) fn count(result: std::io::Result<usize>) -> isize {
    match result {
        Ok(count) => isize::try_from(count).unwrap_or(isize::MAX),
        Err(error) => {
            set(&error);
            -1
        }
    }
}

/// 0, or -1.
pub(super) fn done(result: std::io::Result<()>) -> c_int {
    count(result.map(|()| 0)) as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_pass_and_ours_are_translated() {
        assert_eq!(number(&Error::from_raw_os_error(libc::EINPROGRESS)), libc::EINPROGRESS);
        for (kind, expected) in [
            (ErrorKind::WouldBlock, libc::EAGAIN),
            (ErrorKind::ConnectionReset, libc::ECONNRESET),
            (ErrorKind::BrokenPipe, libc::EPIPE),
            (ErrorKind::HostUnreachable, libc::EHOSTUNREACH),
        ] {
            assert_eq!(number(&Error::new(kind, "with words")), expected);
        }
        assert_eq!(count(Err(ErrorKind::TimedOut.into())), -1);
        assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::ETIMEDOUT));
        assert_eq!(count(Ok(3)), 3);
    }
}
