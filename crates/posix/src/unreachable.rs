//! Error codes of the kernel for ICMP errors that have no error kind.

use std::io;

use tidegate::{TcpStream, UnreachableReason};

/// The kernel's error code where an ICMP error has ended the connection for a reason that has
/// no error kind; otherwise `error`.
pub fn with_unreachable_reason(stream: &TcpStream, error: io::Error) -> io::Error {
    if !matches!(error.kind(), io::ErrorKind::HostUnreachable | io::ErrorKind::ConnectionRefused) {
        return error;
    }
    let code = match stream.info().ok().and_then(|info| info.unreachable) {
        Some(UnreachableReason::Protocol) => libc::ENOPROTOOPT,
        Some(UnreachableReason::SourceRoute) => libc::EOPNOTSUPP,
        Some(UnreachableReason::HostUnknown) => libc::EHOSTDOWN,
        Some(UnreachableReason::SourceIsolated) => libc::ENONET,
        _ => return error,
    };
    io::Error::from_raw_os_error(code)
}
