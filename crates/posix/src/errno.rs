//! Errors as `errno`.

use std::io::{Error, ErrorKind};

use libc::c_int;

/// Error code of an error.
pub fn code(error: &Error) -> c_int {
    if let Some(code) = error.raw_os_error() {
        return code;
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
        ErrorKind::ResourceBusy => libc::EBUSY,
        ErrorKind::PermissionDenied => libc::EPERM,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

/// Sets `errno` from an error.
pub fn set_from(error: &Error) {
    set(code(error));
}

/// Sets `errno`.
pub fn set(code: c_int) {
    // SAFETY: the address of this thread's own errno.
    unsafe { *libc::__errno_location() = code };
}

/// Leaves `errno` as it is, whatever the call does: for what happens between the end of a call of the
/// application and its return, and in the allocator.
#[inline]
pub fn preserve<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: the address of this thread's own errno.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let result = call();
        *errno = before;
        result
    }
}

/// Count as return value; -1 and `errno` for an error.
#[inline]
pub fn return_count(result: std::io::Result<usize>) -> isize {
    match result {
        // No length in memory is longer.
        Ok(count) => count.cast_signed(),
        Err(error) => {
            set_from(&error);
            -1
        }
    }
}

/// 0 as return value; -1 and `errno` for an error.
pub fn return_status(result: std::io::Result<()>) -> c_int {
    return_count(result.map(|()| 0)) as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_os_codes_and_translates_error_kinds() {
        assert_eq!(code(&Error::from_raw_os_error(libc::EINPROGRESS)), libc::EINPROGRESS);
        for (kind, expected) in [
            (ErrorKind::WouldBlock, libc::EAGAIN),
            (ErrorKind::ConnectionReset, libc::ECONNRESET),
            (ErrorKind::BrokenPipe, libc::EPIPE),
            (ErrorKind::HostUnreachable, libc::EHOSTUNREACH),
        ] {
            assert_eq!(code(&Error::new(kind, "with words")), expected);
        }
        assert_eq!(return_count(Err(ErrorKind::TimedOut.into())), -1);
        assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::ETIMEDOUT));
        assert_eq!(return_count(Ok(3)), 3);
    }
}
