//! Results of non-blocking operations, and errors that several calls share.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use tidegate_stack::{SendError, TcpError};

/// Failure of a non-blocking operation.
pub(crate) enum OpError {
    /// Retry when the socket is ready.
    WouldBlock,
    /// Permanent for this call: do not retry.
    Failed(io::Error),
}

/// Result of a non-blocking operation.
pub(crate) type OpResult<R> = Result<R, OpError>;

impl From<TcpError> for OpError {
    fn from(error: TcpError) -> Self {
        match error {
            TcpError::WouldBlock => Self::WouldBlock,
            error => Self::Failed(error.into()),
        }
    }
}

impl From<SendError> for OpError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::WouldBlock => Self::WouldBlock,
            error => Self::Failed(error.into()),
        }
    }
}

impl From<io::Error> for OpError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::WouldBlock,
            _ => Self::Failed(error),
        }
    }
}

impl From<OpError> for io::Error {
    fn from(error: OpError) -> Self {
        match error {
            OpError::WouldBlock => io::ErrorKind::WouldBlock.into(),
            OpError::Failed(error) => error,
        }
    }
}

/// Maps `WouldBlock` to `None`.
pub(crate) fn unless_blocked<R>(result: OpResult<R>) -> Option<io::Result<R>> {
    match result {
        Ok(result) => Some(Ok(result)),
        Err(OpError::WouldBlock) => None,
        Err(OpError::Failed(error)) => Some(Err(error)),
    }
}

/// Error of an operation that needs an embedded stack.
pub(crate) fn unsupported_when_attached(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!(
            "{what} needs an embedded stack, but this Net is attached to a daemon: use Net::open"
        ),
    )
}

/// Error of a name without addresses.
pub(crate) fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the name resolves to no address")
}

/// Runs `attempt` on one address after the other until one succeeds; returns the last error.
pub(crate) fn try_each_address<R>(
    address: impl ToSocketAddrs,
    mut attempt: impl FnMut(SocketAddr) -> io::Result<R>,
) -> io::Result<R> {
    let mut last = no_address();
    for address in address.to_socket_addrs()? {
        match attempt(address) {
            Ok(result) => return Ok(result),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Applies `op` to one buffer after the other until it returns false; returns the total bytes. `op`
/// returns false where the next transfer would fail, since an error is reported only once.
pub(crate) fn vectored_op<T>(
    buffers: impl IntoIterator<Item = T>,
    mut op: impl FnMut(T) -> OpResult<(usize, bool)>,
) -> OpResult<usize> {
    let mut total = 0;
    for buffer in buffers {
        match op(buffer) {
            Ok((len, has_more)) => {
                total += len;
                if !has_more {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}
