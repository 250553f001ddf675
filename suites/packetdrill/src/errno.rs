//! Error numbers.

use tidegate_stack::TcpError;

/// Error number of a call.
pub type Errno = i32;

/// Error number with which a kernel reports `error`.
pub fn of(error: TcpError) -> Errno {
    match error {
        TcpError::Closed => libc::EBADF,
        TcpError::WouldBlock => libc::EAGAIN,
        TcpError::NotConnected => libc::ENOTCONN,
        TcpError::BrokenPipe => libc::EPIPE,
        TcpError::Refused(_) => libc::ECONNREFUSED,
        TcpError::Reset(_) => libc::ECONNRESET,
        TcpError::Aborted(_) => libc::ECONNABORTED,
        TcpError::TimedOut(_) => libc::ETIMEDOUT,
        TcpError::HostUnreachable(_) => libc::EHOSTUNREACH,
        TcpError::NetworkUnreachable(_) => libc::ENETUNREACH,
        TcpError::AddressInUse(_) => libc::EADDRINUSE,
        TcpError::AddressNotAvailable(_) | TcpError::NoPortFree(_) => libc::EADDRNOTAVAIL,
        TcpError::TooMany(_) => libc::ENFILE,
        _ => libc::EINVAL,
    }
}
