//! Reasons why state is not taken over.

use std::net::{IpAddr, SocketAddr};

use crate::ConfigError;

/// Format version of [`crate::StackSnapshot`]. It increases with every change of the format, so that two
/// processes can check their compatibility before a handover.
pub const STATE_VERSION: u32 = 9;

/// Failure to restore a [`crate::StackSnapshot`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The snapshot has another format version.
    #[error(
        "the state has format {found}, this version reads format {STATE_VERSION}: \
         restart instead of upgrading"
    )]
    Version {
        /// Format version of the snapshot.
        found: u32,
    },
    /// The configuration of the new stack is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The snapshot exceeds a limit of the new stack.
    #[error("the state has {found} {what}, the limit is {limit}: raise the limit")]
    TooMany {
        /// Kind of object.
        what: &'static str,
        /// Number in the snapshot.
        found: usize,
        /// Limit of the new stack.
        limit: usize,
    },
    /// A socket has an address that the new stack lacks.
    #[error("a socket uses the address {0}, which the interface no longer has: keep the address")]
    Address(IpAddr),
    /// The snapshot is inconsistent: it was damaged in transfer.
    #[error("the state is damaged: {0}; save it again, or restart instead of upgrading")]
    Damaged(&'static str),
}

/// Reason why a stack rejects migrated sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The secrets differ: peers would see other sequence numbers and timestamps, and SYN cookies
    /// would be rejected.
    #[error(
        "the stacks have different secrets: call `share_tcp_secrets` on the target stack first"
    )]
    SecretsDiffer,
    /// Another socket has the address and port, or a connection has the same four-tuple.
    #[error("{0} is in use in the target stack: close the socket bound to it")]
    AddressInUse(SocketAddr),
    /// An address of the sockets is missing on the target stack's interface.
    #[error(
        "{0} is not an address of the target stack: configure the same addresses on both stacks"
    )]
    AddressNotAvailable(IpAddr),
    /// A limit of the target stack is reached.
    #[error("the target stack has reached its limit of {0}: raise the limit")]
    LimitReached(&'static str),
}
